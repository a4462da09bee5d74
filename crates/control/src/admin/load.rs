//! Reports of the fleet's load in the admin API.

use serde::{Deserialize, Serialize};

/// Load of all nodes, and the busiest slots.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LoadReport {
    /// One entry per node.
    pub nodes: Vec<NodeLoadReport>,
    /// Busiest slots, in descending order.
    pub slots: Vec<SlotLoadReport>,
}

impl LoadReport {
    /// Maximum number of slots in a report.
    pub const SLOTS: usize = 20;
}

/// Load of a node over the last second. Unknown numbers are omitted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeLoadReport {
    /// Name of the node.
    pub node: String,
    /// Commands sent per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests_per_second: Option<f64>,
    /// Mean time from sending a command to its reply, in microseconds. Blocking commands are excluded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer_us: Option<f64>,
    /// Median time to the reply, in microseconds, to within a fifth.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p50_us: Option<u64>,
    /// 99th percentile of the time to the reply, in microseconds, to within a fifth.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p99_us: Option<u64>,
    /// Commands sent and not yet answered.
    pub in_flight: u64,
    /// CPU time of the server over all threads, in percent of one processor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_percent: Option<f64>,
    /// Bytes of memory that the server uses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// `maxmemory` in bytes. 0 means no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_max_bytes: Option<u64>,
    /// Keys in all databases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys: Option<u64>,
    /// Evictions per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evictions_per_second: Option<f64>,
    /// Number of clients, including the router's connections.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clients: Option<u64>,
    /// Replication lag of the slowest replica, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica_lag_bytes: Option<u64>,
}

/// Load of a slot, sampled, as a weighted average over the last ten seconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SlotLoadReport {
    /// Slot number.
    pub slot: u16,
    /// Owner of the slot.
    pub node: String,
    /// Uses of the slot's keys per second.
    pub commands_per_second: f64,
    /// Commands per second that may write.
    pub writes_per_second: f64,
    /// Bytes of commands and replies per second.
    pub bytes_per_second: f64,
}
