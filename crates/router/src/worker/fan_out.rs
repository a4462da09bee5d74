//! Selection of nodes for commands about all nodes.
//!
//! A *keeper* is a node that may have keys. Commands about all keys go to keepers only: other nodes have no keys, and
//! must not fail the command if they are down or were never reachable. State that every node should have (scripts,
//! functions, settings) goes to other connected nodes too, with errors ignored. A node that misses such a command
//! receives scripts and functions when keys move to it.

use switchyard_policy::topology::{NodeId, Topology};

/// Scope of a command about all nodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum FanOutScope {
    /// Keys: nodes that may have keys.
    DataNodes,
    /// State of every server: all connected nodes as well.
    Everybody,
    /// Like `Everybody`, and an error of any node counts.
    Unanimous,
}

/// Nodes that may have keys, by the worker's snapshot.
#[derive(Debug, Default)]
pub(super) struct DataNodes {
    all: Vec<NodeId>,
    /// By node number.
    is_one: Vec<bool>,
}

impl DataNodes {
    pub(super) fn of(topology: &Topology) -> Self {
        let mut is_one = vec![false; topology.node_id_bound()];
        for node in topology.nodes_with_keys() {
            is_one[node.index()] = true;
        }
        Self { all: topology.nodes().map(|node| node.id).filter(|node| is_one[node.index()]).collect(), is_one }
    }

    #[inline]
    pub(super) fn has(&self, node: NodeId) -> bool {
        self.is_one.get(node.index()) == Some(&true)
    }

    pub(super) fn all(&self) -> Vec<NodeId> {
        self.all.clone()
    }
}
