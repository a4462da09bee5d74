//! The planner's view, plans and decisions, as the admin API shows it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::PlanReport;

/// A request to the planner. Only `apply` changes anything.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanRequest {
    /// Begin the moves.
    #[serde(default)]
    pub apply: bool,
    /// As if the load were so many times as high.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load: Option<f64>,
    /// As if this node were to go.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub without: Option<String>,
    /// Move back what this decision has moved, in place of a new plan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub undo: Option<u64>,
    /// By another policy than that of the configuration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// Names of keys are shown. Not read from a request: who asks has it or not.
    #[serde(skip)]
    pub named: bool,
}

/// Whether anything happens by itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AutomationRequest {
    /// `on` or `off`.
    #[serde(rename = "do")]
    pub verb: String,
}

/// Whether anything happens by itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AutomationReport {
    /// Moves are begun without anybody asking.
    pub acts: bool,
    /// Mode of the configuration: `off`, `observe` or `on`.
    pub mode: String,
    /// Why it rests, where the mode is `on`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rests: Option<String>,
    /// Nodes over their limit.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub over: Vec<String>,
    /// Decisions that have ended since the start, by outcome.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub outcomes: BTreeMap<String, u64>,
}

/// A decision: what was seen, and what follows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DecisionReport {
    /// Its number; none where it was only asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<u64>,
    /// When, seconds since 1970.
    pub at: u64,
    /// Whose it is: `planner`, or who asked.
    pub by: String,
    /// The policy.
    pub policy: String,
    /// `fine`, `relieved`, `partly` or `none-found`.
    pub verdict: String,
    /// The same in a sentence.
    pub says: String,
    /// Each node.
    pub nodes: Vec<NodeOutlookReport>,
    /// What moves.
    pub steps: Vec<StepReport>,
    /// Its price.
    pub price: PriceReport,
    /// Other ways.
    pub alternatives: Vec<AlternativeReport>,
    /// Nodes that stay over their limit, each with the reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub held: Vec<String>,
    /// Remedies that only people have, and those that hot copies are about to bring.
    pub advice: Vec<String>,
    /// The moves that were begun.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub applied: Option<PlanReport>,
    /// The outcome.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<String>,
}

/// Decisions, the newest first.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HistoryReport {
    /// Whether it acts.
    pub automation: AutomationReport,
    /// The decisions.
    pub decisions: Vec<DecisionReport>,
}

/// A node, before and after.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeOutlookReport {
    /// Its name.
    pub node: String,
    /// Requests in a second, now.
    pub requests_per_second: f64,
    /// As predicted.
    pub after_per_second: f64,
    /// Its limit.
    pub limit_per_second: f64,
}

/// Something that moves.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    /// `key`, `key home` or `slots`.
    pub what: String,
    /// The key, for those who may read names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// The slots.
    pub slots: String,
    /// From where.
    pub from: String,
    /// To where.
    pub to: String,
    /// Requests in a second that go with it.
    pub requests_per_second: f64,
    /// Bytes that are moved.
    pub bytes: u64,
}

/// The price of a plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PriceReport {
    /// Bytes that are moved.
    pub bytes: u64,
    /// Keys that move by themselves.
    pub keys: u64,
    /// Slots that move.
    pub slots: u64,
    /// All of it as bytes.
    pub total: f64,
}

/// Another way to the same end.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AlternativeReport {
    /// Which: `keys-first`, `cheapest`, `slots`, `cheap-slots` or `search`.
    pub way: String,
    /// Whether every node would be under its limit.
    pub relieves: bool,
    /// Its price.
    pub price: PriceReport,
    /// The fullest node afterwards, percent of its limit. 0: only a node that leaves still has something.
    pub fullest_percent: f64,
}
