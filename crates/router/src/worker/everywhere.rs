//! Which nodes a command about all nodes goes to.
//!
//! A *keeper* is a node at which keys may be. What is asked about all keys is asked of keepers only: the others have nothing to say, and one of them that
//! is down, or was never there, must not fail the command. What every node is to have (scripts, functions, settings) goes to the others too, as long as
//! they are up, and their errors are left out. A node that misses it for that reason is given scripts and functions when keys move to it.

use switchyard_policy::topology::NodeId;

use super::Worker;

/// About what a command asks all nodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Reach {
    /// Keys: those at which keys may be.
    Keepers,
    /// What every server has: the others too.
    Everybody,
    /// The same, where an error of any of them counts.
    Unanimous,
}

impl Worker {
    /// The plan is another one.
    pub(super) fn note_keepers(&mut self) {
        self.keeps.clear();
        self.keeps.resize(self.plan.topology.node_id_bound(), false);
        for node in self.plan.topology.keepers() {
            self.keeps[node.index()] = true;
        }
    }

    /// Whether keys may be at a node, by the plan that this worker has adopted.
    pub(super) fn keeps(&self, node: NodeId) -> bool {
        self.keeps.get(node.index()) == Some(&true)
    }

    /// The nodes at which keys may be.
    pub(super) fn keepers(&self) -> Vec<NodeId> {
        self.plan.topology.nodes().map(|node| node.id).filter(|node| self.keeps(*node)).collect()
    }

    /// The keepers and those of the others that are up.
    pub(super) fn reachable(&self) -> Vec<NodeId> {
        self.plan.topology.nodes().map(|node| node.id).filter(|node| self.keeps(*node) || self.node_is_up(*node)).collect()
    }
}
