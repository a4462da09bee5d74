//! Replacement of the router's process by a new one.

use serde::{Deserialize, Serialize};

use super::moves::OperationError;

/// Starts a new process that replaces this one.
pub trait UpgradePort: std::fmt::Debug + Send + Sync {
    /// Starts the new process, and returns when it accepts the clients, or has failed.
    ///
    /// # Errors
    /// If the new process is not ready, with the reason. This process then serves as before.
    fn upgrade(&self) -> Result<UpgradeReport, OperationError>;
}

/// Result of an upgrade.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpgradeReport {
    /// Id of the new process.
    pub pid: u32,
    /// Version of the new process.
    pub version: String,
    /// Id of the old process.
    pub old_pid: u32,
    /// Clients of the old process, which it serves until they leave.
    pub clients: u64,
    /// Maximum time for which the old process serves its clients, in seconds.
    pub drain_max_seconds: u64,
}
