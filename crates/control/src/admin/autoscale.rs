//! The autoscaler, as the admin API shows it.

use serde::{Deserialize, Serialize};

/// An order to the autoscaler.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AutoscaleRequest {
    /// `set-nodes`, `pause` or `resume`.
    #[serde(rename = "do")]
    pub verb: String,
    /// So many nodes, for `set-nodes`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nodes: Option<usize>,
}

/// The number of nodes, and the reasons for it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AutoscaleReport {
    /// Mode of the configuration: `off`, `observe` or `on`.
    pub mode: String,
    /// The policy.
    pub policy: String,
    /// The way in which servers are started: `local`, `standby` or `command`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provisioner: Option<String>,
    /// Why it decides nothing by itself, where the mode says that it should.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rests: Option<String>,
    /// Nodes now.
    pub nodes: usize,
    /// So many are wanted, where that is another number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wanted: Option<usize>,
    /// The least, now: by the schedule, too.
    pub min: usize,
    /// The most.
    pub max: usize,
    /// The policy's decision: `stay`, `add`, or `remove` and the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decision: Option<String>,
    /// Why.
    pub reasons: Vec<String>,
    /// The change that is under way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub change: Option<AutoscaleChange>,
    /// Nodes that it has started.
    pub started: Vec<String>,
    /// Events, the newest first.
    pub events: Vec<AutoscaleEvent>,
}

/// A change that is under way.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AutoscaleChange {
    /// Its number.
    pub number: u64,
    /// Its step.
    pub stage: String,
    /// Since when, milliseconds since 1970.
    pub since: u64,
    /// Why the last attempt at this step failed, if it did.
    pub error: Option<String>,
}

/// Something that happened.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AutoscaleEvent {
    /// When, milliseconds since 1970.
    pub at: u64,
    /// The number of its change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub change: Option<u64>,
    /// `decided`, `done` or `failed`.
    pub kind: String,
    /// In a sentence.
    pub text: String,
}
