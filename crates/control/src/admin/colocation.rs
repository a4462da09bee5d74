//! Co-location in the admin API: keys that commands have brought together. As in `report`, fields are only ever added.

use serde::{Deserialize, Serialize};

use super::moves::MoveReport;

/// Keys that commands have brought together, and what happens to further requests. Each list has at most
/// [`LISTED_MAX`](Self::LISTED_MAX) entries.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ColocationReport {
    /// Number of keys that are at other nodes than their slots, for any reason.
    pub overrides: u64,
    /// Number of these keys that commands have brought there within the last hour, since the start of the router.
    pub brought: u64,
    /// The latest of these keys.
    pub keys: Vec<ColocatedKeyReport>,
    /// Number of remembered groups.
    pub groups_total: u64,
    /// Keys that commands recently needed together, the latest first.
    pub groups: Vec<KeyGroupReport>,
    /// Number of commands that wait for their keys.
    pub waiting_total: u64,
    /// Commands that wait for their keys, the oldest first.
    pub waiting: Vec<ColocationWaitReport>,
    /// Moves for commands: first the moves in progress, then ended moves, the latest first.
    pub moves: Vec<MoveReport>,
    /// Refused commands, the latest first.
    pub refusals: Vec<ColocationRefusalReport>,
}

impl ColocationReport {
    /// Maximum length of each list.
    pub const LISTED_MAX: usize = 50;
}

/// A key that a command has brought to another node than its slot.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ColocatedKeyReport {
    /// Name, shortened to 64 bytes, with bytes other than ASCII escaped. `None` if the client may not read it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Slot number.
    pub slot: u16,
    /// Owner of the slot.
    pub owner: String,
    /// Node that has the key.
    pub node: String,
    /// Commands whose move has brought the key, separated by commas.
    pub commands: String,
    /// Time since the move, in seconds.
    pub seconds_ago: u64,
}

/// Keys that commands needed together. When one of them moves for a command, the others follow.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct KeyGroupReport {
    /// Number of keys.
    pub keys: u64,
    /// Names of the first keys. Empty if the client may not read them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<String>,
    /// Nodes of these first keys.
    pub nodes: Vec<String>,
    /// Time since the last move of the group, in seconds.
    pub seconds_ago: u64,
}

/// A command that waits for its keys.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ColocationWaitReport {
    /// Name of the command.
    pub command: String,
    /// Number of its keys. `None`: all keys of a slot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys: Option<u64>,
    /// Time since the wait began, in seconds.
    pub seconds: u64,
}

/// A command whose keys were not brought together.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ColocationRefusalReport {
    /// Name of the command.
    pub command: String,
    /// Number of its keys. `None`: all keys of a slot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys: Option<u64>,
    /// Reason, as in the error of the client.
    pub reason: String,
    /// Time since the refusal, in seconds.
    pub seconds_ago: u64,
}
