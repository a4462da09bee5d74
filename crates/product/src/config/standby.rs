//! Settings that a standby refuses. Separate from the other checks, because the same file is valid without `--standby`.

use super::{Config, Problems};

impl Config {
    /// Refuses local servers for a standby. After a take-over it could not see the servers of the other machine, and
    /// would start empty ones at their addresses.
    ///
    /// # Errors
    /// If local servers are configured.
    pub(crate) fn check_standby(&self) -> Result<(), Problems> {
        if self.autoscale.local.command.is_empty() {
            return Ok(());
        }
        let why = "servers of [autoscale.local] run on one machine, and --standby moves the router to another one, where their keys would be missing: start \
                   servers by [autoscale.command] or [autoscale.standby], or serve without --standby";
        Err(Problems(vec![self.problem("autoscale.local.command", why)]))
    }
}
