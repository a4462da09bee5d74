//! What is between a copy and those who read it: how many writes are under way, and how many there have been.

use crate::topology::NodeId;

/// Gates of nodes. Nodes share one where there are more: then each shuts the other's, too.
const NODES: u32 = 1 << 10;

/// Gates of keys. Keys share one where their hashes fall together.
const KEYS: u32 = 1 << 16;

/// A gate's state: in the low half the writes under way, in the high half a number that each of them changes at its
/// end.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Gate(pub u64);

impl Gate {
    /// What is added to raise it: one more write under way.
    pub const RAISE: u64 = 1;

    /// What is added to lower it: one less, and another version.
    pub const LOWER: u64 = u32::MAX as u64;

    /// No write is under way.
    #[must_use]
    pub const fn is_open(self) -> bool {
        self.0 as u32 == 0
    }
}

/// Which gate.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct GateId(u32);

impl GateId {
    /// How many there are.
    pub const COUNT: usize = (NODES + KEYS) as usize;

    /// That of a key, by the hash of its name.
    #[must_use]
    pub const fn of_key(hash: u64) -> Self {
        Self(NODES + (hash >> 20) as u32 % KEYS)
    }

    /// That of all keys of a node.
    #[must_use]
    pub const fn of_node(node: NodeId) -> Self {
        Self(node.0 as u32 % NODES)
    }

    /// Those of all nodes.
    pub fn of_nodes() -> impl Iterator<Item = Self> {
        (0..NODES).map(Self)
    }

    /// Its place among [`Self::COUNT`].
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// The gates, which all workers share. Each change is one step for all, in one order.
pub trait Gates {
    /// Its state now.
    fn load(&self, gate: GateId) -> Gate;

    /// Adds [`Gate::RAISE`] or [`Gate::LOWER`].
    fn add(&self, gate: GateId, what: u64);

    /// A write is about to be sent.
    fn raise(&self, gate: GateId) {
        self.add(gate, Gate::RAISE);
    }

    /// A write is over.
    fn lower(&self, gate: GateId) {
        self.add(gate, Gate::LOWER);
    }

    /// Whatever was read before is past.
    fn renew(&self, gate: GateId) {
        self.raise(gate);
        self.lower(gate);
    }
}

/// Gates of one thread, for tests.
#[cfg(test)]
#[derive(Default)]
pub(super) struct OneThread(std::cell::RefCell<std::collections::BTreeMap<GateId, u64>>);

#[cfg(test)]
impl Gates for OneThread {
    fn load(&self, gate: GateId) -> Gate {
        Gate(self.0.borrow().get(&gate).copied().unwrap_or(0))
    }

    fn add(&self, gate: GateId, what: u64) {
        let mut gates = self.0.borrow_mut();
        let state = gates.entry(gate).or_default();
        *state = state.wrapping_add(what);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_counts_what_is_under_way_and_what_is_over() {
        let mut gate = Gate::default();
        let mut add = |what: u64| {
            gate.0 = gate.0.wrapping_add(what);
            gate
        };
        let first = add(0);
        assert!(first.is_open());
        assert!(!add(Gate::RAISE).is_open());
        assert!(!add(Gate::RAISE).is_open());
        assert!(!add(Gate::LOWER).is_open(), "one is still under way");
        let last = add(Gate::LOWER);
        assert!(last.is_open() && last != first);
        assert_eq!(last.0 >> 32, 2);
    }

    #[test]
    fn gates_of_nodes_and_keys_are_apart() {
        for number in [0, 1, 1023, u16::MAX] {
            assert!(GateId::of_node(NodeId(number)).index() < NODES as usize);
        }
        for hash in [0, 1, u64::MAX, 0x1234_5678_9abc_def0] {
            assert!((NODES as usize..GateId::COUNT).contains(&GateId::of_key(hash).index()));
        }
    }
}
