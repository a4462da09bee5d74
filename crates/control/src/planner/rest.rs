//! Log lines and texts about the reasons why the planner does not act although its mode is `on`.
//!
//! Separate from the decisions, so that `automation`, the status, the metrics and the log report the same reason.

use std::mem::{Discriminant, discriminant};

use switchyard_policy::planner::PauseReason;
use switchyard_resp::units::describe_time;
use tracing::{info, warn};

/// Reason and remedy as text.
pub(super) fn text(reason: &PauseReason) -> String {
    match reason {
        PauseReason::Off => "automation is switched off (`switchyard automation on`)".to_owned(),
        PauseReason::Failed { failures, left } => format!(
            "{failures} decisions in a row have failed (`switchyard plan history`): it tries again in {}, or after `switchyard automation on`",
            describe_time(*left)
        ),
        PauseReason::Waits { decision, moves } => {
            let moves: Vec<String> = moves.iter().map(|id| id.0.to_string()).collect();
            format!(
                "it waits for decision {decision}: not all of its moves ({}) have ended (`switchyard moves`)",
                moves.join(", ")
            )
        }
    }
}

/// The reason that was logged last.
#[derive(Debug, Default)]
pub(super) struct LoggedReason(Option<Discriminant<PauseReason>>);

impl LoggedReason {
    /// Logs a reason once, and its end.
    pub(super) fn log(&mut self, reason: Option<&PauseReason>) {
        let kind = reason.map(discriminant);
        if kind != self.0 {
            match reason {
                Some(reason) => warn!("the planner is paused: {}", text(reason)),
                None => info!("the planner acts again"),
            }
            self.0 = kind;
        }
    }
}
