//! The gates that the writes of one worker hold shut, from before each is sent until it is over.

use std::collections::BTreeMap;

use super::{GateId, Gates};
use crate::topology::NodeId;

/// How a write has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WriteOutcome {
    /// The node has answered, or never had it.
    Certain,
    /// Its connection was lost: the node may execute it until it has confirmed that the connection is dead.
    Doubtful,
}

#[derive(Debug)]
struct WriteHold {
    node: NodeId,
    gates: Vec<GateId>,
}

/// What the writes of one worker hold shut.
#[derive(Debug, Default)]
pub struct WriteHolds {
    by_end: BTreeMap<u64, WriteHold>,
    in_doubt: Vec<WriteHold>,
}

impl WriteHolds {
    /// Whether no write holds anything.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_end.is_empty() && self.in_doubt.is_empty()
    }

    /// Those whose end is in doubt.
    #[must_use]
    pub fn in_doubt(&self) -> usize {
        self.in_doubt.len()
    }

    /// A write is about to be sent, whose end has this number; or more is known of what it may change.
    pub fn sent(&mut self, gates: &impl Gates, end: u64, node: NodeId, held: impl IntoIterator<Item = GateId>) {
        let place = self.by_end.entry(end).or_insert(WriteHold { node, gates: Vec::new() });
        for gate in held {
            if !place.gates.contains(&gate) {
                gates.raise(gate);
                place.gates.push(gate);
            }
        }
    }

    /// A write has ended. Says whether it held anything.
    pub fn over(&mut self, gates: &impl Gates, end: u64, how: WriteOutcome) -> bool {
        let Some(held) = self.by_end.remove(&end) else { return false };
        match how {
            WriteOutcome::Certain => held.gates.iter().for_each(|gate| gates.lower(*gate)),
            WriteOutcome::Doubtful => self.in_doubt.push(held),
        }
        true
    }

    /// Nothing that was sent to these nodes on connections that are lost can be executed any more.
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
    fn a_gate_is_shut_from_before_a_write_until_it_is_over() {
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
    fn what_is_in_doubt_stays_shut_until_its_node_has_confirmed() {
        let (gates, mut holds, gate) = (OneThread::default(), WriteHolds::default(), GateId::of_key(5));
        holds.sent(&gates, 1, NODE, [gate]);
        assert!(holds.over(&gates, 1, WriteOutcome::Doubtful));
        holds.settle(&gates, |node| node != NODE);
        assert_eq!((holds.in_doubt(), gates.load(gate).is_open()), (1, false));
        holds.settle(&gates, |_| true);
        assert_eq!((holds.in_doubt(), gates.load(gate)), (0, Gate(1 << 32)));
    }
}
