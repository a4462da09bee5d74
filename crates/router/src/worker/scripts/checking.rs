//! Wait of a client while the libraries of its command are checked by another thread ([`crate::library_checks`]).

use std::sync::Arc;

use switchyard_policy::topology::Placement;

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
    /// The placement at its start, because the check depends on placement rules.
    placement: Placement,
    progress: Progress,
}

#[derive(Debug)]
enum Progress {
    /// The thread has a copy of the command, of `len` bytes. It skips the check after `wait` was dropped.
    Pending {
        len: usize,
        _wait: Arc<()>,
    },
    Done(Checked),
}

impl LibraryCheck {
    /// Memory in bytes.
    pub(in crate::worker) fn memory(&self) -> usize {
        match &self.progress {
            Progress::Pending { len, .. } => *len,
            Progress::Done(Ok(Some(request))) => request.capacity(),
            Progress::Done(_) => 0,
        }
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
    match client.take_state::<LibraryCheck>().filter(|check| check.number == number).map(|check| *check) {
        Some(LibraryCheck { progress: Progress::Done(result), placement, .. })
            if placement == *routing.topology.placement() =>
        {
            Some(result)
        }
        Some(pending @ LibraryCheck { progress: Progress::Pending { .. }, .. }) => {
            client.set_state(pending);
            None
        }
        _ => {
            let (shared, place, wait) = (turn.shared(), (turn.index(), handle, number), Arc::default());
            let len = shared.library_checks.queue(routing, &command.name, args, place, &shared.mailboxes, &wait);
            let placement = routing.topology.placement().clone();
            client.set_state(LibraryCheck { number, placement, progress: Progress::Pending { len, _wait: wait } });
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
    check.progress = Progress::Done(result);
    if client.stall() == Stall::Libraries {
        down.unstall(turn, handle);
    }
}
