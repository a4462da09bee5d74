//! Reasons why the planner does not act although its mode is `on`, and log lines about them.
//!
//! Separate from the decisions, so that `automation`, the status, the metrics and the log report the same reason.

use std::mem::{Discriminant, discriminant};
use std::time::{Duration, Instant};

use switchyard_policy::topology::MoveId;
use switchyard_resp::units::describe_time;
use tracing::{info, warn};

/// Consecutive failures after which the planner pauses.
pub(super) const FAILURES_MAX: u32 = 3;

/// Pause after the last of these failures, and the maximum pause. Each further failure doubles it.
pub(super) const PAUSE: Duration = Duration::from_secs(60);
const PAUSE_MAX: Duration = Duration::from_secs(3600);

/// A reason why the planner does not act.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PauseReason {
    /// An operator has disabled all automation.
    Off,
    /// Decisions have failed in a row. The planner pauses and then retries.
    Failed {
        /// Number of these decisions.
        failures: u32,
        /// Remaining pause.
        left: Duration,
    },
    /// Moves of a decision take long, or are paused.
    Waits {
        /// Number of the decision.
        decision: u64,
        /// All moves of the decision.
        moves: Vec<MoveId>,
    },
}

impl PauseReason {
    /// Reason and remedy as text.
    pub(super) fn text(&self) -> String {
        match self {
            Self::Off => "automation is switched off (`switchyard automation on`)".to_owned(),
            Self::Failed { failures, left } => format!(
                "{failures} decisions in a row have failed (`switchyard plan history`): it tries again in {}, or after `switchyard automation on`",
                describe_time(*left)
            ),
            Self::Waits { decision, moves } => {
                let moves: Vec<String> = moves.iter().map(|id| id.0.to_string()).collect();
                format!(
                    "it waits for decision {decision}: not all of its moves ({}) have ended (`switchyard moves`)",
                    moves.join(", ")
                )
            }
        }
    }
}

/// Pause after failures, and the reason that was logged last.
#[derive(Debug, Default)]
pub(super) struct PauseState {
    until: Option<Instant>,
    logged: Option<Discriminant<PauseReason>>,
}

impl PauseState {
    /// Starts the pause after this number of consecutive failures. Ends it below [`FAILURES_MAX`].
    pub(super) fn failed(&mut self, now: Instant, failures: u32) {
        let pause = |more: u32| PAUSE.saturating_mul(1 << more.min(16)).min(PAUSE_MAX);
        self.until = failures.checked_sub(FAILURES_MAX).map(|more| now + pause(more));
    }

    /// Remaining pause.
    pub(super) fn left(&self, now: Instant) -> Option<Duration> {
        self.until.and_then(|until| until.checked_duration_since(now)).filter(|left| !left.is_zero())
    }

    /// Logs a reason once, and its end.
    pub(super) fn log(&mut self, rest: Option<&PauseReason>) {
        let kind = rest.map(discriminant);
        if kind != self.logged {
            match rest {
                Some(rest) => warn!("the planner is paused: {}", rest.text()),
                None => info!("the planner acts again"),
            }
            self.logged = kind;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_doubles_with_each_failure_up_to_an_hour() {
        let (mut rests, now) = (PauseState::default(), Instant::now());
        let mut after = |failures| {
            rests.failed(now, failures);
            rests.left(now).map(|left| left.as_secs())
        };
        assert_eq!(
            [after(2), after(3), after(4), after(9), after(100), after(0)],
            [None, Some(60), Some(120), Some(3600), Some(3600), None]
        );
    }
}
