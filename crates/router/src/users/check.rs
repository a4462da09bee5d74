//! Permission check of a command with its arguments.
//!
//! Follows Redis's `ACLCheckAllUserCommandPerm`: the command, then its keys, then its channels. Beyond Redis: if the
//! keys cannot be derived from the arguments, users with restricted keys are refused, because at the node the command
//! would run as the router's user.

use switchyard_resp::command::{Access, Command, Flags, KeyError, is_option};
use switchyard_resp::glob;
use switchyard_resp::request::Args;

use super::User;

/// Reason of a refusal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Denied {
    /// The user may not run the command.
    Command,
    /// The argument with this index is a key without the required access.
    Key(usize),
    /// The argument with this index is a forbidden channel.
    Channel(usize),
    /// Scripts may use any key.
    Script,
    /// `SORT` with this option reads keys that depend on data.
    SortPattern(&'static str),
    /// The keys of the command are unknown.
    Unknown,
}

impl Denied {
    /// Returns the error for the client, with Redis's text if it has one.
    pub(crate) fn text(self, command: &Command) -> String {
        let name = command.name.to_ascii_lowercase();
        match self {
            Denied::Command => format!("NOPERM this user has no permissions to run the '{name}' command"),
            Denied::Key(_) => {
                "NOPERM this user has no permissions to access one of the keys used as arguments".to_owned()
            }
            Denied::Channel(_) => {
                "NOPERM this user has no permissions to access one of the channels used as arguments".to_owned()
            }
            Denied::Script => format!(
                "NOPERM '{name}' runs a script, and at the nodes scripts have Switchyard's permissions, not this user's; the users file \
                 can allow them with allscripts"
            ),
            Denied::SortPattern(option) => {
                format!("ERR {option} option of SORT denied due to insufficient ACL permissions.")
            }
            Denied::Unknown => {
                format!("NOPERM the keys of '{name}' are unknown, and this user may not access every key")
            }
        }
    }

    /// Returns the text for `ACL DRYRUN`.
    pub(crate) fn dry_run_text(self, command: &Command, args: &Args<'_>) -> String {
        let shown = |index: usize| String::from_utf8_lossy(args.get(index).unwrap_or_default()).into_owned();
        match self {
            Denied::Command => {
                format!("This user has no permissions to run the '{}' command", command.name.to_ascii_lowercase())
            }
            Denied::Key(index) => format!("This user has no permissions to access the '{}' key", shown(index)),
            Denied::Channel(index) => format!("This user has no permissions to access the '{}' channel", shown(index)),
            other => other.text(command),
        }
    }
}

impl User {
    /// Checks whether the user may run this command. `keys` is a scratch buffer.
    pub(crate) fn check(&self, command: &Command, args: &Args<'_>, keys: &mut Vec<u32>) -> Result<(), Denied> {
        if command.flags.has(Flags::NO_AUTH) {
            return Ok(());
        }
        if !self.may_run(command) {
            return Err(Denied::Command);
        }
        if command.flags.has(Flags::SCRIPT) && !self.all_scripts && !self.is_unrestricted() {
            return Err(Denied::Script);
        }
        // Arguments of pub/sub commands are channels, even if routing treats them like keys (SPUBLISH).
        if !self.all_keys && !command.flags.has(Flags::PUBSUB) {
            self.check_keys(command, args, keys)?;
        }
        if !self.all_channels && command.flags.has(Flags::PUBSUB) {
            self.check_channels(command, args)?;
        }
        Ok(())
    }

    fn check_keys(&self, command: &Command, args: &Args<'_>, keys: &mut Vec<u32>) -> Result<(), Denied> {
        keys.clear();
        match command.find_keys(args, keys) {
            Ok(()) => {}
            Err(KeyError::Undescribed | KeyError::Incomplete) => return Err(Denied::Unknown),
            // The command will fail without access to a key.
            Err(_) => return Ok(()),
        }
        for (place, index) in keys.iter().enumerate() {
            let index = *index as usize;
            let Some(key) = args.get(index) else { return Err(Denied::Unknown) };
            let wanted = command.key_access(args, place);
            if !self.keys.iter().any(|rule| rule.access.covers(wanted) && glob::matches(&rule.pattern, key)) {
                return Err(Denied::Key(index));
            }
        }
        match sort_pattern(command, args) {
            Some(option) if !self.reads_every_key() => Err(Denied::SortPattern(option)),
            _ => Ok(()),
        }
    }

    fn reads_every_key(&self) -> bool {
        self.keys.iter().any(|rule| rule.access.covers(Access::R) && rule.pattern == b"*")
    }

    fn check_channels(&self, command: &Command, args: &Args<'_>) -> Result<(), Denied> {
        let (indexes, are_patterns) = match &*command.name {
            "PUBLISH" | "SPUBLISH" => (1..2, false),
            "SUBSCRIBE" | "SSUBSCRIBE" => (1..args.len(), false),
            "PSUBSCRIBE" => (1..args.len(), true),
            _ => return Ok(()),
        };
        for index in indexes {
            let channel = args.get(index).unwrap_or_default();
            // A pattern is only allowed by the identical pattern, because containment of patterns is not computed.
            let fits =
                |pattern: &Vec<u8>| if are_patterns { pattern == channel } else { glob::matches(pattern, channel) };
            if !self.channels.iter().any(fits) {
                return Err(Denied::Channel(index));
            }
        }
        Ok(())
    }
}

/// Returns the option of a SORT that names keys by a pattern.
fn sort_pattern(command: &Command, args: &Args<'_>) -> Option<&'static str> {
    if !matches!(&*command.name, "SORT" | "SORT_RO") {
        return None;
    }
    let mut index = 2;
    while index + 1 < args.len() {
        let (option, value) = (args.get(index)?, args.get(index + 1)?);
        if is_option(option, b"by") {
            if value.contains(&b'*') {
                return Some("BY");
            }
            index += 1;
        } else if is_option(option, b"get") {
            return Some("GET");
        } else if is_option(option, b"limit") {
            index += 2;
        } else if is_option(option, b"store") {
            index += 1;
        }
        index += 1;
    }
    None
}
