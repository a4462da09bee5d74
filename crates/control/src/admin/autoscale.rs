//! Reports and requests of the autoscaler in the admin API.

use serde::{Deserialize, Serialize};

/// A request to the autoscaler.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AutoscaleRequest {
    /// `set-nodes`, `pause` or `resume`.
    #[serde(rename = "do")]
    pub verb: String,
    /// Number of nodes, for `set-nodes`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nodes: Option<usize>,
}

/// State of the autoscaler: number of nodes, and the reasons for it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AutoscaleReport {
    /// Mode of the configuration: `off`, `observe` or `on`.
    pub mode: String,
    /// Name of the policy.
    pub policy: String,
    /// Provisioner that starts servers: `local`, `standby` or `command`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provisioner: Option<String>,
    /// Reason why the autoscaler does not act by itself, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rests: Option<String>,
    /// Current number of nodes.
    pub nodes: usize,
    /// Target number of nodes, if it differs from the current one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wanted: Option<usize>,
    /// Current minimum, including the schedule's.
    pub min: usize,
    /// Maximum.
    pub max: usize,
    /// Decision of the policy: `stay`, `add`, or `remove` and the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decision: Option<String>,
    /// Reasons for the decision, one sentence each.
    pub reasons: Vec<String>,
    /// Change in progress.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub change: Option<AutoscaleChange>,
    /// Nodes that the autoscaler has started.
    pub started: Vec<String>,
    /// Events, the newest first.
    pub events: Vec<AutoscaleEvent>,
}

/// A change in progress.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AutoscaleChange {
    /// Number of the change.
    pub number: u64,
    /// Current step.
    pub stage: String,
    /// Start of the change, in milliseconds since 1970.
    pub since: u64,
    /// Error of the last attempt at this step.
    pub error: Option<String>,
}

/// An entry in the autoscaler's event log.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AutoscaleEvent {
    /// Time of the event, in milliseconds since 1970.
    pub at: u64,
    /// Number of the change that the event belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub change: Option<u64>,
    /// `decided`, `done` or `failed`.
    pub kind: String,
    /// Description as a sentence.
    pub text: String,
}
