//! The gates held shut by the writes of one worker, from before each write is sent until it completes.

use std::collections::BTreeMap;

use super::{GateId, Gates};
use crate::topology::NodeId;

/// Outcome of a write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WriteOutcome {
    /// The node replied, or never received the write.
    Certain,
    /// The connection was lost. The node may execute the write until it confirms that the connection is dead.
    Doubtful,
}

#[derive(Debug)]
struct WriteHold {
    node: NodeId,
    gates: Vec<GateId>,
}

/// Gates held by the writes of one worker.
#[derive(Debug, Default)]
pub struct WriteHolds {
    by_end: BTreeMap<u64, WriteHold>,
    in_doubt: Vec<WriteHold>,
}

impl WriteHolds {
    /// Whether no gate is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_end.is_empty() && self.in_doubt.is_empty()
    }

    /// Number of writes with an unknown outcome.
    #[must_use]
    pub fn in_doubt(&self) -> usize {
        self.in_doubt.len()
    }

    /// Raises the gates of a write before it is sent. May be called again for the same `end` to add gates.
    pub fn sent(&mut self, gates: &impl Gates, end: u64, node: NodeId, held: impl IntoIterator<Item = GateId>) {
        let place = self.by_end.entry(end).or_insert(WriteHold { node, gates: Vec::new() });
        for gate in held {
            if !place.gates.contains(&gate) {
                gates.raise(gate);
                place.gates.push(gate);
            }
        }
    }

    /// Completes a write. Returns whether it held any gate.
    pub fn over(&mut self, gates: &impl Gates, end: u64, how: WriteOutcome) -> bool {
        let Some(held) = self.by_end.remove(&end) else { return false };
        match how {
            WriteOutcome::Certain => held.gates.iter().for_each(|gate| gates.lower(*gate)),
            WriteOutcome::Doubtful => self.in_doubt.push(held),
        }
        true
    }

    /// Releases the writes in doubt at nodes where nothing sent over a lost connection can still be executed.
    pub fn settle(&mut self, gates: &impl Gates, mut is_settled: impl FnMut(NodeId) -> bool) {
        self.in_doubt.retain(|held| {
            let is_over = is_settled(held.node);
            if is_over {
                held.gates.iter().for_each(|gate| gates.lower(*gate));
            }
            !is_over
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::Gate;
    use super::super::gate::OneThread;
    use super::*;

    const NODE: NodeId = NodeId(3);

    #[test]
    fn a_gate_is_shut_from_before_a_write_until_its_completion() {
        let (gates, mut holds, gate) = (OneThread::default(), WriteHolds::default(), GateId::of_key(5));
        holds.sent(&gates, 1, NODE, [gate, gate]);
        holds.sent(&gates, 1, NODE, [gate]);
        holds.sent(&gates, 2, NODE, [gate]);
        assert!(holds.over(&gates, 1, WriteOutcome::Certain));
        assert!(!gates.load(gate).is_open(), "the second write");
        assert!(!holds.over(&gates, 1, WriteOutcome::Certain), "once");
        assert!(holds.over(&gates, 2, WriteOutcome::Certain));
        assert_eq!(gates.load(gate), Gate(2 << 32));
        assert!(holds.is_empty());
    }

    #[test]
    fn a_lost_write_keeps_its_gates_shut_until_the_node_confirms() {
        let (gates, mut holds, gate) = (OneThread::default(), WriteHolds::default(), GateId::of_key(5));
        holds.sent(&gates, 1, NODE, [gate]);
        assert!(holds.over(&gates, 1, WriteOutcome::Doubtful));
        holds.settle(&gates, |node| node != NODE);
        assert_eq!((holds.in_doubt(), gates.load(gate).is_open()), (1, false));
        holds.settle(&gates, |_| true);
        assert_eq!((holds.in_doubt(), gates.load(gate)), (0, Gate(1 << 32)));
    }
}
