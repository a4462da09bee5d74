//! Clocks for delays and pauses: a run uses the monotonic clock, and only a restart uses the wall clock.
//!
//! An administrator or NTP may set the wall clock at any time. A jump must neither end nor prolong a pause. Wall time
//! is used for schedules and reports, and carries waits over a restart, because monotonic clocks of two runs are
//! unrelated.

use serde::{Deserialize, Serialize};

use super::Millis;

/// One moment on two clocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Now {
    /// Time of the run: wall time at its start plus monotonic time since. For differences only.
    pub run: Millis,
    /// Milliseconds since 1970, UTC. For schedules and reports.
    pub wall: Millis,
}

/// Clock of one run of the router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clock {
    started: Millis,
}

impl Clock {
    /// Starts a run at this wall time.
    #[must_use]
    pub fn start(wall: Millis) -> Self {
        Self { started: wall }
    }

    /// Returns the moment `elapsed` monotonic milliseconds after the start. `wall` is the current wall time.
    #[must_use]
    pub fn now(&self, elapsed: Millis, wall: Millis) -> Now {
        Now { run: self.started.saturating_add(elapsed), wall }
    }
}

impl Now {
    /// Converts a time of this run into wall time, for the next run.
    #[must_use]
    pub fn to_wall(self, run: Millis) -> Millis {
        (self.wall + run).saturating_sub(self.run)
    }
}
