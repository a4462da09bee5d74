//! Commands that a script may call, with the positions of their keys: derived from the command table, for the static
//! proof and for the run-time check.

use switchyard_resp::command::{Command, CommandTable, Flags, Handling, Keys, Local};

/// Keyless commands that a script may call, because their effect does not depend on the node. A container stands for
/// all its subcommands.
pub(super) const KEYLESS: [&str; 6] = ["COMMAND", "ECHO", "PING", "PUBLISH", "SELECT", "TIME"];

/// Returns the key positions of a command that a script may call. `Keys::None` for commands without keys and with the
/// same result at all nodes. `None` if no script may call it, or only its subcommands may be called.
pub(super) fn rule(command: &Command) -> Option<&Keys> {
    let container = command.name.split('|').next().unwrap_or_default();
    if KEYLESS.contains(&container) {
        return Some(&Keys::None);
    }
    // Routing treats a shard channel like a key: its subscribers are at the owner of its slot.
    let forwarded = matches!(command.handling, Handling::Keyed | Handling::Split(_) | Handling::Local(Local::Spublish));
    if !forwarded || command.flags.has(Flags::SCRIPT) {
        return None;
    }
    let is_told = !matches!(command.keys, Keys::None | Keys::Migrate | Keys::Specs(_) | Keys::Unknown);
    is_told.then_some(&command.keys)
}

/// Returns a command's name in lower case, and the code for its key positions in the run-time check. `None` if only the
/// node knows them.
pub(super) fn entry(command: &Command) -> Option<(String, String)> {
    let code = match rule(command) {
        Some(Keys::None) => "0".to_owned(),
        Some(_) if command.handling == Handling::Local(Local::Spublish) => "Y".to_owned(),
        Some(Keys::Range { first: 1, last: 1, .. }) => "1".to_owned(),
        Some(Keys::Range { first, last, step }) => format!("R{first},{last},{step}"),
        Some(Keys::Numbered { destination, count, step, .. }) => format!("N{},{count},{step}", u8::from(*destination)),
        Some(Keys::Sort { .. }) => "S".to_owned(),
        Some(Keys::GeoStore { options }) => format!("G{options}"),
        Some(Keys::Streams) => "X".to_owned(),
        _ if command.is_container() => "C".to_owned(),
        // A module or configuration may assign it keys at fixed positions at the node.
        _ if command.keys == Keys::None || matches!(command.keys, Keys::Specs(_) | Keys::Unknown) => return None,
        _ => "-".to_owned(),
    };
    Some((command.name.to_ascii_lowercase(), code))
}

/// Frequent commands, listed first to speed up the search.
const OFTEN: [&str; 14] = [
    "GET", "SET", "HGET", "HSET", "DEL", "EXISTS", "INCR", "INCRBY", "EXPIRE", "PEXPIRE", "ZADD", "SADD", "HGETALL",
    "TTL",
];

/// Returns the entries of all builtin commands.
pub(super) fn entries() -> Vec<(String, String)> {
    let table = CommandTable::builtin();
    let mut commands: Vec<&Command> =
        table.iter().filter(|c| !(c.name.contains('|') && rule(c) == Some(&Keys::None))).collect();
    commands.sort_by_key(|c| (OFTEN.iter().position(|o| *o == c.name).unwrap_or(OFTEN.len()), c.name.clone()));
    commands.into_iter().filter_map(entry).collect()
}
