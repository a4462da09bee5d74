//! Time for patience and pauses: a run counts by the monotonic clock, and only a restart trusts the wall clock.
//!
//! An administrator or NTP may set the wall clock at any moment. Neither a jump forward may end a pause, nor a jump
//! back prolong one. Wall time serves schedules and reports, and carries waits over a restart, because monotonic clocks
//! of two runs have nothing in common.

use serde::{Deserialize, Serialize};

use super::Millis;

/// One moment on two clocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Now {
    /// Time of the run: wall time at its start, plus monotonic time since. For differences only.
    pub run: Millis,
    /// Milliseconds since 1970, UTC. For schedules and reports.
    pub wall: Millis,
}

/// The clock of one run of the router.
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

    /// Returns the moment `elapsed` monotonic milliseconds after the start. `wall`: reading of the wall clock.
    #[must_use]
    pub fn now(&self, elapsed: Millis, wall: Millis) -> Now {
        Now { run: self.started.saturating_add(elapsed), wall }
    }
}

impl Now {
    /// Translates a time of the run to which this moment belongs into wall time, for the next run.
    #[must_use]
    pub fn to_wall(self, run: Millis) -> Millis {
        (self.wall + run).saturating_sub(self.run)
    }
}
