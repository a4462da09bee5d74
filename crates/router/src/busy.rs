//! Nodes that execute a slow command of ours. A server executes one command at a time and answers nobody meanwhile:
//! that is no silence, and nobody's command fails for it.
//!
//! Workers say so when they look at their connections, as long as such a command is not answered; others that find a
//! command late ask here first. Not by the number of commands under way: what is over ends by itself, also where a
//! worker panics.

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

/// Twice Redis's `busy-reply-threshold`: a server says so itself (BUSY) when a script runs for five seconds. One that
/// says nothing to anybody for twice as long executes none.
const SCRIPT_SILENT: Duration = Duration::from_secs(10);

impl Busy {
    /// Whether a slow command that was sent so long ago shows that its node is busy: sooner than others may wait there.
    pub(crate) fn shows(age: Duration, is_script: bool, command_timeout: Duration) -> bool {
        age > SLOW.min(command_timeout / 2) && !(is_script && age > SCRIPT_SILENT)
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
        assert!(
            busy.was(node, 1070, patience) && !busy.was(node, 1071, patience) && !busy.was(NodeId(2), 1020, patience)
        );
    }

    #[test]
    fn a_script_that_hangs_ends_being_busy() {
        let shows = |age_ms, is_script| Busy::shows(Duration::from_millis(age_ms), is_script, Duration::from_secs(5));
        assert_eq!([1_000, 1_001, 10_000, 10_001].map(|age_ms| shows(age_ms, true)), [false, true, true, false]);
        assert!(shows(10_001, false) && shows(3_600_000, false));
        assert!(Busy::shows(Duration::from_millis(251), false, Duration::from_millis(500)));
    }
}
