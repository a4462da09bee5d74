//! The load of the fleet, as the admin API shows it.

use serde::{Deserialize, Serialize};

/// The load of all nodes, and the slots that are used most.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LoadReport {
    /// All nodes.
    pub nodes: Vec<NodeLoadReport>,
    /// The busiest slots, the first one first.
    pub slots: Vec<SlotLoadReport>,
}

impl LoadReport {
    /// So many slots are shown.
    pub const SLOTS: usize = 20;
}

/// The load of a node over the last second. A number that is not known is left out.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeLoadReport {
    /// Its name.
    pub node: String,
    /// Commands sent to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests_per_second: Option<f64>,
    /// Mean time from sending a command to its answer, microseconds; without commands that wait there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer_us: Option<f64>,
    /// Half of the answers took no longer, microseconds, to within a fifth.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p50_us: Option<u64>,
    /// 99 of 100 answers took no longer, microseconds, to within a fifth.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p99_us: Option<u64>,
    /// Commands sent and not yet answered.
    pub in_flight: u64,
    /// Time of one processor that its server takes, percent, with all its threads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_percent: Option<f64>,
    /// Memory that the server uses, bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Its `maxmemory`; 0: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_max_bytes: Option<u64>,
    /// Keys in all its databases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys: Option<u64>,
    /// Keys that it evicts for want of memory, each second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evictions_per_second: Option<f64>,
    /// Its clients, the router's connections among them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clients: Option<u64>,
    /// Bytes that its slowest replica is behind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica_lag_bytes: Option<u64>,
}

/// The load of a slot, of a sample and weighed over the last ten seconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SlotLoadReport {
    /// Its number.
    pub slot: u16,
    /// Its owner.
    pub node: String,
    /// Uses of its keys each second.
    pub commands_per_second: f64,
    /// Those that may write.
    pub writes_per_second: f64,
    /// Bytes of commands and answers each second.
    pub bytes_per_second: f64,
}
