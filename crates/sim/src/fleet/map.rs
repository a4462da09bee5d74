//! The placement of the fleet, with the node of each simulated key.

use std::sync::Arc;

use switchyard_policy::topology::{NodeId, Topology};

use super::keys::Key;
use super::moves::{HandOver, Subject};

/// Placement of slots and keys.
#[derive(Clone, Debug)]
pub(super) struct Map {
    topology: Topology,
    /// Number of nodes that have ever joined: the id of the next one.
    joined: usize,
    /// Node of each key, by place.
    nodes: Vec<NodeId>,
    /// Whether loads by node must be summed again.
    is_changed: bool,
}

fn name(number: usize) -> String {
    format!("node-{number:05}")
}

impl Map {
    pub(super) fn new(topology: Topology, keys: &[Key]) -> Self {
        let joined = topology.nodes().len();
        let mut map = Self { topology, joined, nodes: Vec::new(), is_changed: true };
        map.place_all(keys);
        map
    }

    /// Creates the placement of a fleet with this many nodes.
    pub(super) fn even(nodes: usize) -> Topology {
        Topology::even_of_any_size(&(0..nodes).map(name).collect::<Vec<_>>())
    }

    pub(super) fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Node of each key, by place.
    pub(super) fn nodes(&self) -> &[NodeId] {
        &self.nodes
    }

    /// Returns whether the placement has changed since the last call.
    pub(super) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.is_changed)
    }

    fn place_all(&mut self, keys: &[Key]) {
        self.nodes = keys.iter().map(|key| self.topology.lives_at(&key.name)).collect();
    }

    /// Places a key that has taken the place of another.
    pub(super) fn place(&mut self, place: usize, key: &Key) {
        self.nodes[place] = self.topology.lives_at(&key.name);
    }

    /// Assigns moved slots and keys to their targets.
    pub(super) fn hand_over(&mut self, done: &[HandOver], keys: &[Key]) {
        if done.is_empty() {
            return;
        }
        for HandOver { target, subject, .. } in done {
            self.topology = match subject {
                Subject::Slots(slots) => self.topology.handed_over(slots, *target),
                Subject::Keys(names) => {
                    let names: Vec<Arc<[u8]>> = names.iter().map(|name| Arc::from(&**name)).collect();
                    self.topology.keys_handed_over(&[], &names, *target)
                }
            };
        }
        self.is_changed = true;
        self.place_all(keys);
    }

    /// Adds a node without slots.
    pub(super) fn join(&mut self) {
        self.joined += 1;
        let mut names: Vec<String> = self.topology.nodes().map(|node| node.name.clone()).collect();
        names.push(name(self.joined - 1));
        self.reconcile(&names);
    }

    /// Removes a node that owns nothing.
    pub(super) fn leave(&mut self, node: NodeId) {
        let others = self.topology.nodes().filter(|other| other.id != node);
        let names: Vec<String> = others.map(|node| node.name.clone()).collect();
        self.reconcile(&names);
    }

    fn reconcile(&mut self, names: &[String]) {
        let placed = Topology::place(Some(&self.topology), names).expect("a node joins, or an empty one leaves");
        self.topology = placed.topology;
        self.is_changed = true;
    }
}
