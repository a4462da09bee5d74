//! Wait of a client until movers are quiet, and the movers that it keeps quiet.

use std::collections::BTreeMap;
use std::sync::Arc;

use switchyard_policy::topology::MoveId;

use crate::function_turns::ChangeTurn;
use crate::mover::{MoverMessage, Moves, SharedMove};
use crate::shared::QuiesceLockGuard;

/// A command that waits until movers are quiet.
#[derive(Debug)]
pub(in crate::worker) struct QuiesceWait {
    pub(super) since_us: u64,
    pub(super) guard: Guard,
}

/// Activity that stops for the command.
#[derive(Debug)]
pub(super) enum Guard {
    /// Movers.
    Movers(QuiesceGuard),
    /// Copies of functions; `None`: a copy is in progress.
    Functions { _turn: Option<ChangeTurn> },
}

impl QuiesceWait {
    /// Returns the movers that it waits for.
    pub(super) const fn movers(&mut self) -> Option<&mut QuiesceGuard> {
        match &mut self.guard {
            Guard::Movers(movers) => Some(movers),
            Guard::Functions { .. } => None,
        }
    }
}

/// Movers that were requested to be quiet. They resume when this is dropped.
#[derive(Debug)]
pub(super) struct QuiesceGuard {
    pub(super) ticket: u64,
    pub(super) flushes: bool,
    pub(super) turn: Option<QuiesceLockGuard>,
    /// With a flag whether the mover is quiet.
    pub(super) movers: BTreeMap<MoveId, (Arc<SharedMove>, bool)>,
}

impl QuiesceGuard {
    /// Sends the request to all movers that do not have it yet.
    pub(super) fn request(&mut self, moves: &Moves, worker: usize) {
        for (id, mover) in &moves.by_id {
            if !self.movers.contains_key(id) {
                mover.notify(MoverMessage::Quiesce { from: worker, ticket: self.ticket, flushes: self.flushes });
                self.movers.insert(*id, (mover.clone(), false));
            }
        }
    }
}

impl Drop for QuiesceGuard {
    fn drop(&mut self) {
        for (mover, _) in self.movers.values() {
            mover.notify(MoverMessage::Unquiesce { ticket: self.ticket });
        }
    }
}
