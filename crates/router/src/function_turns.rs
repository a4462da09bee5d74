//! Mutual exclusion of changes and copies of functions.
//!
//! All nodes have the same functions, because each change is sent to all. A copy (by a mover to its target, or by node
//! maintenance to a node without functions) reads at one node and stores at another later. A change in between would be
//! undone by the copy. So either changes or one copy may be in progress.
//!
//! A copy whose connection breaks leaves a doubt: the node may still store the functions. Changes wait until the doubt
//! is resolved. Copies between other nodes proceed, because one node that is down must not stall every move.

use std::sync::{Arc, Mutex};

use crate::lock::lock;

/// Grants turns.
#[derive(Debug, Default)]
pub(crate) struct FunctionTurns(Arc<Mutex<TurnState>>);

#[derive(Clone, Copy, Debug, Default)]
struct TurnState {
    changes: usize,
    /// A copy is in progress or waits for changes to end. Blocks further changes.
    copies: bool,
    /// Number of ended copies that nodes may still store.
    doubts: usize,
}

/// Permission to change functions. Released on drop.
#[derive(Debug)]
pub(crate) struct ChangeTurn(Arc<Mutex<TurnState>>);

/// Permission to copy functions, once [`CopyTurn::is_alone`]. Released on drop.
#[derive(Debug)]
pub struct CopyTurn(Arc<Mutex<TurnState>>);

/// An unconfirmed copy. Resolved on drop.
#[derive(Debug)]
pub(crate) struct Doubt(Arc<Mutex<TurnState>>);

impl FunctionTurns {
    /// Returns a turn for a change. `None` while there is a copy or a doubt.
    pub(crate) fn begin_change(&self) -> Option<ChangeTurn> {
        let mut under_way = lock(&self.0);
        (!under_way.copies && under_way.doubts == 0).then(|| {
            under_way.changes += 1;
            ChangeTurn(self.0.clone())
        })
    }

    /// Returns a turn for a copy. `None` while another copy has the turn.
    pub(crate) fn begin_copy(&self) -> Option<CopyTurn> {
        let mut under_way = lock(&self.0);
        let is_free = !std::mem::replace(&mut under_way.copies, true);
        is_free.then(|| CopyTurn(self.0.clone()))
    }
}

impl CopyTurn {
    /// Whether all changes that preceded this turn have ended. Functions read before may still change.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        lock(&self.0).changes == 0
    }

    /// Ends the copy without a confirmation.
    pub(crate) fn leave_doubt(self) -> Doubt {
        lock(&self.0).doubts += 1;
        Doubt(self.0.clone())
    }
}

impl Drop for ChangeTurn {
    fn drop(&mut self) {
        lock(&self.0).changes -= 1;
    }
}

impl Drop for Doubt {
    fn drop(&mut self) {
        lock(&self.0).doubts -= 1;
    }
}

impl Drop for CopyTurn {
    fn drop(&mut self) {
        lock(&self.0).copies = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_follows_running_changes_and_blocks_later_ones() {
        let turns = FunctionTurns::default();
        let (one, other) = (turns.begin_change().expect("free"), turns.begin_change().expect("as many as there are"));
        let copy = turns.begin_copy().expect("nobody copies");
        assert!(turns.begin_copy().is_none() && turns.begin_change().is_none(), "it would never come to its turn");
        drop(one);
        assert!(!copy.is_alone());
        drop(other);
        assert!(copy.is_alone() && turns.begin_change().is_none());
        drop(copy);
        assert!(turns.begin_change().is_some() && turns.begin_copy().is_some());
    }

    #[test]
    fn a_doubt_blocks_changes_but_not_copies() {
        let turns = FunctionTurns::default();
        let doubt = turns.begin_copy().expect("free").leave_doubt();
        assert!(turns.begin_change().is_none());
        let other = turns.begin_copy().expect("free again").leave_doubt();
        drop(doubt);
        assert!(turns.begin_change().is_none(), "one is left");
        drop(other);
        assert!(turns.begin_change().is_some());
    }
}
