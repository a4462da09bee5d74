//! Reports and requests of the planner in the admin API.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::PlanReport;

/// A request to the planner. Only `apply` changes anything.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanRequest {
    /// Start the moves instead of only returning the plan.
    #[serde(default)]
    pub apply: bool,
    /// Factor that scales the load, to plan for a higher or lower one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load: Option<f64>,
    /// Plan as if this node left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub without: Option<String>,
    /// Move back everything that this decision has moved, instead of making a new plan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub undo: Option<u64>,
    /// Policy to use instead of the configured one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// Show names of keys. Set from the client's rights, never read from the request.
    #[serde(skip)]
    pub named: bool,
}

/// Enables or disables automation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AutomationRequest {
    /// `on` or `off`.
    #[serde(rename = "do")]
    pub verb: String,
}

/// State of automation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AutomationReport {
    /// Whether the planner begins moves by itself.
    pub acts: bool,
    /// Mode of the configuration: `off`, `observe` or `on`.
    pub mode: String,
    /// Reason why it does not act although the mode is `on`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rests: Option<String>,
    /// Nodes above their limit.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub over: Vec<String>,
    /// Decisions that have ended since the start, by outcome.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub outcomes: BTreeMap<String, u64>,
}

/// A decision: the observed load, and the plan.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DecisionReport {
    /// Number of the decision. `None` for a dry run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<u64>,
    /// Time of the decision, in seconds since 1970.
    pub at: u64,
    /// Origin: `planner`, or the client that requested it.
    pub by: String,
    /// Name of the policy.
    pub policy: String,
    /// `fine`, `relieved`, `partly` or `none-found`.
    pub verdict: String,
    /// Verdict as a sentence.
    pub message: String,
    /// Load of each node before and after.
    pub nodes: Vec<NodeOutlookReport>,
    /// Steps of the plan.
    pub steps: Vec<StepReport>,
    /// Cost of the plan.
    pub price: PriceReport,
    /// Other plans that were considered.
    pub alternatives: Vec<AlternativeReport>,
    /// Nodes that stay above their limit, each with the reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub held: Vec<String>,
    /// Remedies that only an operator can apply, and pending relief by hot copies.
    pub advice: Vec<String>,
    /// Started moves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub applied: Option<PlanReport>,
    /// Outcome of the moves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<String>,
}

/// Decisions, the newest first.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HistoryReport {
    /// State of automation.
    pub automation: AutomationReport,
    /// The decisions.
    pub decisions: Vec<DecisionReport>,
}

/// Load of a node before and after a plan.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeOutlookReport {
    /// Name of the node.
    pub node: String,
    /// Current requests per second.
    pub requests_per_second: f64,
    /// Predicted requests per second.
    pub after_per_second: f64,
    /// Limit in requests per second.
    pub limit_per_second: f64,
}

/// A step of a plan.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    /// `key`, `key home` or `slots`.
    pub what: String,
    /// The key, if the client may read names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Slots as ranges.
    pub slots: String,
    /// Source.
    pub from: String,
    /// Target.
    pub to: String,
    /// Requests per second that move along.
    pub requests_per_second: f64,
    /// Bytes to move.
    pub bytes: u64,
}

/// Cost of a plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PriceReport {
    /// Bytes to move.
    pub bytes: u64,
    /// Keys that move without their slots.
    pub keys: u64,
    /// Number of slots.
    pub slots: u64,
    /// Total cost, expressed in bytes.
    pub total: f64,
}

/// An alternative plan.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AlternativeReport {
    /// Method: `keys-first`, `cheapest`, `slots`, `cheap-slots` or `search`.
    pub way: String,
    /// Whether every node would be below its limit.
    pub relieves: bool,
    /// Cost of the plan.
    pub price: PriceReport,
    /// Utilization of the fullest node afterwards, in percent of its limit. 0 if only a leaving node still has load.
    pub fullest_percent: f64,
}
