//! Nodes that execute a slow command of ours. A server executes one command at a time and does not reply to other
//! commands in the meantime. Such commands must not time out.
//!
//! A worker records a busy node when it checks its connections while a slow command is unanswered. Workers with a late
//! command check here first. Timestamps rather than a count of slow commands: a record expires by itself, also if a
//! worker panics.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use switchyard_policy::topology::NodeId;

use crate::lock::lock;

/// Minimum age of an unanswered command to count as slow.
const SLOW: Duration = Duration::from_secs(1);

/// Time at which each node was last seen executing a slow command, in microseconds of the router's uptime.
#[derive(Debug, Default)]
pub(crate) struct Busy(Mutex<BTreeMap<NodeId, u64>>);

/// Maximum age of a script that explains silence. Twice Redis's `busy-reply-threshold`: after five seconds of a script,
/// a server replies BUSY itself.
const SCRIPT_SILENT: Duration = Duration::from_secs(10);

impl Busy {
    /// Whether a pending slow command of this age shows that its node is busy. The minimum age is below the command
    /// timeout.
    pub(crate) fn explains_silence(age: Duration, is_script: bool, command_timeout: Duration) -> bool {
        age > SLOW.min(command_timeout / 2) && !(is_script && age > SCRIPT_SILENT)
    }

    /// Records that a node is busy now.
    pub(crate) fn note(&self, node: NodeId, now_us: u64) {
        lock(&self.0).insert(node, now_us);
    }

    /// Whether a node was busy within this time. Commands that wait there get their whole timeout from that moment.
    pub(crate) fn was_busy(&self, node: NodeId, now_us: u64, within: Duration) -> bool {
        lock(&self.0).get(&node).is_some_and(|at_us| now_us.saturating_sub(*at_us) <= within.as_micros() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_stays_busy_for_as_long_as_others_may_wait() {
        let busy = Busy::default();
        let (node, timeout) = (NodeId(1), Duration::from_micros(50));
        assert!(!busy.was_busy(node, 1000, timeout));
        busy.note(node, 1000);
        busy.note(node, 1020);
        assert!(
            busy.was_busy(node, 1070, timeout)
                && !busy.was_busy(node, 1071, timeout)
                && !busy.was_busy(NodeId(2), 1020, timeout)
        );
    }

    #[test]
    fn a_hanging_script_counts_as_busy_for_ten_seconds() {
        let shows = |age_ms, is_script| {
            Busy::explains_silence(Duration::from_millis(age_ms), is_script, Duration::from_secs(5))
        };
        assert_eq!([1_000, 1_001, 10_000, 10_001].map(|age_ms| shows(age_ms, true)), [false, true, true, false]);
        assert!(shows(10_001, false) && shows(3_600_000, false));
        assert!(Busy::explains_silence(Duration::from_millis(251), false, Duration::from_millis(500)));
    }
}
