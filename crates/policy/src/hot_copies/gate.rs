//! Gates: counters of writes in flight and completed. They decide whether a copy is current.

use crate::topology::NodeId;

/// Number of node gates. With more nodes, several share a gate, and a write at one shuts it for all of them.
const NODES: u32 = 1 << 10;

/// Number of key gates. Keys share a gate if their hashes collide.
const KEYS: u32 = 1 << 16;

/// State of a gate. Low half: writes in flight. High half: version, incremented when a write completes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Gate(pub u64);

impl Gate {
    /// Increment for one more write in flight.
    pub const RAISE: u64 = 1;

    /// Increment for a completed write: one less in flight, next version.
    pub const LOWER: u64 = u32::MAX as u64;

    /// Whether no write is in flight.
    #[must_use]
    pub const fn is_open(self) -> bool {
        self.0 as u32 == 0
    }
}

/// Index of a gate.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct GateId(u32);

impl GateId {
    /// Number of gates.
    pub const COUNT: usize = (NODES + KEYS) as usize;

    /// Gate of a key, by the hash of its name.
    #[must_use]
    pub const fn of_key(hash: u64) -> Self {
        Self(NODES + (hash >> 20) as u32 % KEYS)
    }

    /// Gate of a node, for writes that may affect any of its keys.
    #[must_use]
    pub const fn of_node(node: NodeId) -> Self {
        Self(node.0 as u32 % NODES)
    }

    /// All node gates.
    pub fn of_nodes() -> impl Iterator<Item = Self> {
        (0..NODES).map(Self)
    }

    /// Index, below [`Self::COUNT`].
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// The gates, shared by all workers. Each change is atomic, and all threads observe the same order of changes.
pub trait Gates {
    /// Current state of a gate.
    fn load(&self, gate: GateId) -> Gate;

    /// Adds [`Gate::RAISE`] or [`Gate::LOWER`].
    fn add(&self, gate: GateId, what: u64);

    /// Records that a write is about to be sent.
    fn raise(&self, gate: GateId) {
        self.add(gate, Gate::RAISE);
    }

    /// Records that a write has completed.
    fn lower(&self, gate: GateId) {
        self.add(gate, Gate::LOWER);
    }

    /// Changes the version, which invalidates all earlier copies.
    fn renew(&self, gate: GateId) {
        self.raise(gate);
        self.lower(gate);
    }
}

/// Gates for tests in one thread.
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
    fn a_gate_counts_writes_in_flight_and_completed() {
        let mut gate = Gate::default();
        let mut add = |what: u64| {
            gate.0 = gate.0.wrapping_add(what);
            gate
        };
        let first = add(0);
        assert!(first.is_open());
        assert!(!add(Gate::RAISE).is_open());
        assert!(!add(Gate::RAISE).is_open());
        assert!(!add(Gate::LOWER).is_open(), "one write is still in flight");
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
