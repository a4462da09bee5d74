//! Functions are the same at every node, because each change of them goes to all. Who copies them from one node to
//! another (a mover to its target, the care of nodes to one without any) reads at one node and stores at another later:
//! what clients were told is gone, or replaced, in between would come back. So either changes are under way, or a copy.
//!
//! A copy whose connection breaks leaves a doubt: the node may still store what was sent. Changes wait until that is
//! over. Copies go on, between other nodes: one node that is down must not hold up every move.

use std::sync::{Arc, Mutex};

use crate::shared::lock;

/// Who has a turn.
#[derive(Debug, Default)]
pub(crate) struct FunctionTurns(Arc<Mutex<UnderWay>>);

#[derive(Clone, Copy, Debug, Default)]
struct UnderWay {
    changes: usize,
    /// Somebody copies, or waits for the changes to end before: no further one begins.
    copies: bool,
    /// Nodes may still store what copies that are over have sent.
    doubts: usize,
}

/// A change of all nodes' functions may be under way. Over when it is dropped.
#[derive(Debug)]
pub(crate) struct ChangeTurn(Arc<Mutex<UnderWay>>);

/// Functions may be copied, once that is alone. Over when it is dropped.
#[derive(Debug)]
pub struct CopyTurn(Arc<Mutex<UnderWay>>);

/// What a copy has sent may still be stored. Over when it is dropped.
#[derive(Debug)]
pub(crate) struct Doubt(Arc<Mutex<UnderWay>>);

impl FunctionTurns {
    /// To change them. `None`: not now.
    pub(crate) fn to_change(&self) -> Option<ChangeTurn> {
        let mut under_way = lock(&self.0);
        (!under_way.copies && under_way.doubts == 0).then(|| {
            under_way.changes += 1;
            ChangeTurn(self.0.clone())
        })
    }

    /// To copy them. `None`: somebody else does.
    pub(crate) fn to_copy(&self) -> Option<CopyTurn> {
        let mut under_way = lock(&self.0);
        let is_free = !std::mem::replace(&mut under_way.copies, true);
        is_free.then(|| CopyTurn(self.0.clone()))
    }
}

impl CopyTurn {
    /// Whether what clients were changing when it was taken is over: what is read before that may be changed later.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        lock(&self.0).changes == 0
    }

    /// The copy ends without an answer.
    pub(crate) fn leave(self) -> Doubt {
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
    fn a_copy_begins_behind_changes_and_before_others() {
        let turns = FunctionTurns::default();
        let (one, other) = (turns.to_change().expect("free"), turns.to_change().expect("as many as there are"));
        let copy = turns.to_copy().expect("nobody copies");
        assert!(turns.to_copy().is_none() && turns.to_change().is_none(), "it would never come to its turn");
        drop(one);
        assert!(!copy.is_alone());
        drop(other);
        assert!(copy.is_alone() && turns.to_change().is_none());
        drop(copy);
        assert!(turns.to_change().is_some() && turns.to_copy().is_some());
    }

    #[test]
    fn a_doubt_holds_up_changes_and_no_copy() {
        let turns = FunctionTurns::default();
        let doubt = turns.to_copy().expect("free").leave();
        assert!(turns.to_change().is_none());
        let other = turns.to_copy().expect("free again").leave();
        drop(doubt);
        assert!(turns.to_change().is_none(), "one is left");
        drop(other);
        assert!(turns.to_change().is_some());
    }
}
