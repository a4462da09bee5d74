//! Which nodes a command about all nodes goes to.
//!
//! A *keeper* is a node at which keys may be. What is asked about all keys is asked of keepers only: the others have
//! nothing to say, and one of them that is down, or was never there, must not fail the command. What every node is to
//! have (scripts, functions, settings) goes to the others too, as long as they are up, and their errors are left out. A
//! node that misses it for that reason is given scripts and functions when keys move to it.

use switchyard_policy::topology::{NodeId, Topology};

use super::Worker;

/// About what a command asks all nodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum FanOutScope {
    /// Keys: those at which keys may be.
    DataNodes,
    /// What every server has: the others too.
    Everybody,
    /// The same, where an error of any of them counts.
    Unanimous,
}

/// The nodes at which keys may be, by the plan that the worker has adopted.
#[derive(Debug, Default)]
pub(super) struct DataNodes {
    all: Vec<NodeId>,
    /// By node number.
    is_one: Vec<bool>,
}

impl DataNodes {
    /// The plan is another one.
    pub(super) fn adopt(&mut self, topology: &Topology) {
        self.is_one.clear();
        self.is_one.resize(topology.node_id_bound(), false);
        for node in topology.nodes_with_keys() {
            self.is_one[node.index()] = true;
        }
        self.all = topology.nodes().map(|node| node.id).filter(|node| self.is_one[node.index()]).collect();
    }

    #[inline]
    pub(super) fn has(&self, node: NodeId) -> bool {
        self.is_one.get(node.index()) == Some(&true)
    }

    pub(super) fn all(&self) -> Vec<NodeId> {
        self.all.clone()
    }
}

impl Worker {
    /// The keepers and those of the others that are up.
    pub(super) fn reachable(&self) -> Vec<NodeId> {
        self.plan
            .topology
            .nodes()
            .map(|node| node.id)
            .filter(|node| self.keepers.has(*node) || self.links.is_up(*node))
            .collect()
    }
}
