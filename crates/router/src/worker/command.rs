//! A command with keys on its way to a node: source of its keys, and the number of its observed end.

use switchyard_policy::topology::NodeId;
use switchyard_resp::command::{Command, Flags, Handling, Local, Lookup};
use switchyard_resp::request::{Args, Scanner};

use crate::shared::RoutingSnapshot;

/// Source of the keys of a command.
#[derive(Clone, Copy, Debug)]
pub(super) enum Call<'a> {
    /// A client's command, as dispatched. The sent bytes may differ, with the same keys (a checked script).
    Found(&'a Command, &'a Args<'a>),
    /// Bytes stored or created by the router.
    Bytes(&'a [u8]),
}

/// A command for a node.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeyedCommand<'a> {
    pub(super) call: Call<'a>,
    pub(super) node: NodeId,
    pub(super) database: u32,
}

/// Number of a command with an observed end.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub(super) struct CommandSeq(u64);

impl CommandSeq {
    /// The end is not observed.
    pub(super) const NONE: Self = Self(0);

    /// Flag of numbers that only telemetry observes.
    pub(super) const COUNTED: u64 = 1 << 63;

    /// Returns a new number. Never reused, because a command may block at its node while any number of others pass.
    pub(super) const fn next(self) -> Self {
        Self(self.0 + 1)
    }

    /// Returns the number with the flag that only telemetry observes it.
    pub(super) const fn counted(self) -> Self {
        Self(self.0 | Self::COUNTED)
    }

    /// Index in a table with this many places.
    pub(super) fn slot(self, places: usize) -> usize {
        self.0 as usize % places
    }

    pub(super) fn number(self) -> u64 {
        self.0
    }

    #[cfg(test)]
    pub(super) fn of(number: u64) -> Self {
        Self(number)
    }
}

/// Whether a command may change its keys.
pub(super) fn writes(command: &Command) -> bool {
    !command.flags.has(Flags::READONLY) && command.handling != Handling::Local(Local::Watch)
}

/// Calls `with` with the command in a whole request.
pub(super) fn with_parsed_command<R>(
    routing: &RoutingSnapshot,
    request: &[u8],
    with: impl FnOnce(&Command, &Args<'_>) -> R,
) -> Option<R> {
    let scanner = Scanner::again(request)?;
    let args = scanner.args(request);
    let Lookup::Command(command) = routing.commands.find(&args) else { return None };
    Some(with(command, &args))
}

pub(super) fn parse<T: std::str::FromStr>(bytes: &[u8]) -> Option<T> {
    std::str::from_utf8(bytes).ok()?.parse().ok()
}

/// Whether Redis counts a command as possibly writing.
pub(super) fn may_write(command: &Command) -> bool {
    command.flags.has(Flags::WRITE)
        || command.flags.has(Flags::SCRIPT) && !command.flags.has(Flags::READONLY)
        || matches!(&*command.name, "PUBLISH" | "SPUBLISH" | "PFCOUNT")
}
