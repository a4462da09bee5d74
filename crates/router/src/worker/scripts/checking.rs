//! Wait of a client while the libraries of its command are checked by another thread ([`crate::library_checks`]).

use super::super::downstreams::Downstreams;
use super::super::downstreams::waits::Stall;
use super::super::invocation::Invocation;
use super::super::turn::Turn;
use crate::library_checks::{Checked, LARGE, checked_libraries};
use crate::slab::Handle;

/// Check of a command, kept until the command is dispatched again.
#[derive(Debug)]
pub(in crate::worker) struct LibraryCheck {
    /// Command number within its client.
    number: u32,
    /// `None`: pending.
    result: Option<Checked>,
}

impl LibraryCheck {
    /// Memory in bytes.
    pub(in crate::worker) fn memory(&self) -> usize {
        self.result.as_ref().and_then(|result| result.as_ref().ok()?.as_ref()).map_or(0, Vec::capacity)
    }
}

/// Checks the libraries of FUNCTION LOAD and RESTORE. `None`: the client waits for the result.
pub(super) fn check_libraries(turn: &Turn, down: &mut Downstreams, call: &Invocation<'_>) -> Option<Checked> {
    let Invocation { routing, handle, command, raw, args } = *call;
    if raw.len() < LARGE || !routing.checks_scripts() {
        return Some(checked_libraries(routing, &command.name, args));
    }
    let client = down.get_mut(handle)?;
    let number = client.replies().next_seq();
    let known = client.state_mut::<LibraryCheck>().filter(|check| check.number == number);
    match known.map(|check| check.result.take()) {
        Some(Some(result)) => {
            client.take_state::<LibraryCheck>();
            Some(result)
        }
        Some(None) => None,
        None => {
            client.set_state(LibraryCheck { number, result: None });
            let shared = turn.shared();
            let place = (turn.index(), handle, number);
            shared.library_checks.queue(routing, &command.name, args, place, &shared.mailboxes);
            None
        }
    }
}

/// Handles the result of a check.
pub(in crate::worker) fn on_libraries_checked(
    turn: &Turn,
    down: &mut Downstreams,
    handle: Handle,
    number: u32,
    result: Checked,
) {
    let Some(client) = down.get_mut(handle) else { return };
    let Some(check) = client.state_mut::<LibraryCheck>().filter(|check| check.number == number) else { return };
    check.result = Some(result);
    if client.stall() == Stall::Libraries {
        down.unstall(turn, handle);
    }
}
