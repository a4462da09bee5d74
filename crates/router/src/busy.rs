//! Nodes that execute a slow command of ours. A server executes one command at a time and answers nobody meanwhile: that is no silence, and nobody's command
//! fails for it.
//!
//! Workers say so when they look at their connections, as long as such a command is not answered; others that find a command late ask here first. Not by the
//! number of commands under way: what is over ends by itself, also where a worker panics.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use switchyard_policy::topology::NodeId;

use crate::shared::lock;

/// A command that is answered sooner is not slow.
const SLOW: Duration = Duration::from_secs(1);

/// When each node was last found to execute a slow command, us of the router's time.
#[derive(Debug, Default)]
pub(crate) struct Busy(Mutex<BTreeMap<NodeId, u64>>);

impl Busy {
    /// How long a slow command is under way before its node counts as busy, us; less than others may wait there.
    pub(crate) fn after_us(command_timeout: Duration) -> u64 {
        SLOW.min(command_timeout / 2).as_micros() as u64
    }

    /// It is busy now.
    pub(crate) fn note(&self, node: NodeId, now_us: u64) {
        lock(&self.0).insert(node, now_us);
    }

    /// Whether it was within such a time: what waits there for it has its whole time from then on.
    pub(crate) fn was(&self, node: NodeId, now_us: u64, within: Duration) -> bool {
        lock(&self.0).get(&node).is_some_and(|at_us| now_us.saturating_sub(*at_us) <= within.as_micros() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_stays_busy_for_as_long_as_others_may_wait() {
        let busy = Busy::default();
        let (node, patience) = (NodeId(1), Duration::from_micros(50));
        assert!(!busy.was(node, 1000, patience));
        busy.note(node, 1000);
        busy.note(node, 1020);
        assert!(busy.was(node, 1070, patience) && !busy.was(node, 1071, patience) && !busy.was(NodeId(2), 1020, patience));
        assert_eq!((Busy::after_us(Duration::from_secs(5)), Busy::after_us(Duration::from_millis(500))), (1_000_000, 250_000));
    }
}
