//! Which commands a script may call, and where the keys of each are: made from the command table, for the proof and for
//! the check at run time.

use switchyard_resp::command::{Command, CommandTable, Flags, Handling, Keys, Local};

/// Commands without keys that a script may call: what they do does not depend on the node. Containers stand for all of
/// their subcommands.
pub(super) const KEYLESS: [&str; 6] = ["COMMAND", "ECHO", "PING", "PUBLISH", "SELECT", "TIME"];

/// Where the keys are of a command that a script may call: `Keys::None` where it has none, and says the same at every
/// node. `None`, where no script may call it, or only its subcommands may be called.
pub(super) fn rule(command: &Command) -> Option<&Keys> {
    let container = command.name.split('|').next().unwrap_or_default();
    if KEYLESS.contains(&container) {
        return Some(&Keys::None);
    }
    // A channel of a shard is a key to routing: its subscribers are at the owner of its slot.
    let forwarded = matches!(command.handling, Handling::Keyed | Handling::Split(_) | Handling::Local(Local::Spublish));
    if !forwarded || command.flags.has(Flags::SCRIPT) {
        return None;
    }
    let is_told = !matches!(command.keys, Keys::None | Keys::Migrate | Keys::Specs(_) | Keys::Unknown);
    is_told.then_some(&command.keys)
}

/// A command as the check at run time has it: `NAME` in lower case, and how its keys are found. `None` where only the
/// node can say.
pub(super) fn entry(command: &Command) -> Option<(String, String)> {
    let code = match rule(command) {
        Some(Keys::None) => "0".to_owned(),
        Some(Keys::Range { first: 1, last: 1, .. }) => "1".to_owned(),
        Some(Keys::Range { first, last, step }) => format!("R{first},{last},{step}"),
        Some(Keys::Numbered { destination, count, step, .. }) => format!("N{},{count},{step}", u8::from(*destination)),
        Some(Keys::Sort { .. }) => "S".to_owned(),
        Some(Keys::GeoStore { options }) => format!("G{options}"),
        Some(Keys::Streams) => "X".to_owned(),
        _ if command.is_container() => "C".to_owned(),
        // A node may have been told to give it keys at a fixed place.
        _ if command.keys == Keys::None || matches!(command.keys, Keys::Specs(_) | Keys::Unknown) => return None,
        _ => "-".to_owned(),
    };
    Some((command.name.to_ascii_lowercase(), code))
}

/// The commands that scripts call most: they stand first where a list is searched.
const OFTEN: [&str; 14] = [
    "GET", "SET", "HGET", "HSET", "DEL", "EXISTS", "INCR", "INCRBY", "EXPIRE", "PEXPIRE", "ZADD", "SADD", "HGETALL",
    "TTL",
];

/// The entries of all builtin commands.
pub(super) fn entries() -> Vec<(String, String)> {
    let table = CommandTable::builtin();
    let mut commands: Vec<&Command> =
        table.iter().filter(|c| !(c.name.contains('|') && rule(c) == Some(&Keys::None))).collect();
    commands.sort_by_key(|c| (OFTEN.iter().position(|o| *o == c.name).unwrap_or(OFTEN.len()), c.name.clone()));
    commands.into_iter().filter_map(entry).collect()
}
