//! All nodes of a fleet, also nodes missing in the configuration, for `doctor` and `recover`.
//! Reads the state directory, or queries the router that runs on it. Changes and creates nothing.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::{Context, bail};
use switchyard_control::Processes;
use switchyard_control::admin::{MisplacedReport, NodesReport};
use switchyard_control::members::load_changes;
use switchyard_control::store::{RedbStore, Store, StoreError};
use switchyard_policy::topology::Topology;

use super::admin_client::AdminClient;
use crate::config::Config;

/// Knowledge of a fleet.
#[derive(Debug)]
pub(super) enum KnownFleet {
    /// The state directory has no slot map.
    Unplaced,
    /// The state directory has a slot map, and no router runs on it.
    Placed { topology: Topology, processes: Processes },
    /// A router runs on the state directory. It has reported its nodes and, if possible, misplaced keys.
    Running { report: NodesReport, misplaced: anyhow::Result<MisplacedReport> },
    /// The fleet is unknown, for this reason.
    Hidden(String),
}

impl KnownFleet {
    /// Finds the fleet, and adds nodes to the configuration that it does not list.
    pub(super) fn find(config: &mut Config) -> Self {
        Self::try_find(config).unwrap_or_else(|error| Self::Hidden(format!("{error:#}")))
    }

    /// Primary of this node according to a running router.
    pub(super) fn primary_of(&self, node: &str) -> Option<SocketAddr> {
        let Self::Running { report, .. } = self else { return None };
        report.nodes.iter().find(|report| report.address == node)?.primary
    }

    fn try_find(config: &mut Config) -> anyhow::Result<Self> {
        // Without an explicit state directory, use that of a router that runs here.
        if config.has_default_state_dir()
            && let Ok(Some(folder)) = AdminClient::of(config).and_then(|client| client.state_dir())
            && folder.is_dir()
        {
            config.state_dir = folder;
        }
        // Opening the store would create it.
        if !config.state_dir.join("state.redb").try_exists().unwrap_or(true) {
            return Ok(Self::Unplaced);
        }
        match RedbStore::open(&config.state_dir) {
            Ok(store) => {
                let remembered = load_changes(&store, &config.node_names())?;
                config.apply_membership(&remembered.added, &remembered.removed)?;
                Ok(match store.load_topology()? {
                    None => Self::Unplaced,
                    Some(topology) => Self::Placed { topology, processes: Processes::load(&store)? },
                })
            }
            Err(locked @ StoreError::Locked { .. }) => {
                // A configured node that the router lacks may be about to join, with the next reload.
                let client = router_on(config).with_context(|| locked.to_string())?;
                let report: NodesReport = client.read(&client.get("/api/v1/nodes")?)?;
                let names: Vec<String> = report.nodes.iter().map(|node| node.address.clone()).collect();
                config.apply_membership(&names, &[])?;
                let misplaced = client.get("/api/v1/misplaced").and_then(|body| client.read(&body));
                Ok(Self::Running { report, misplaced })
            }
            Err(error) => bail!(error),
        }
    }
}

/// Returns the client of the router that runs on the state directory.
fn router_on(config: &Config) -> anyhow::Result<AdminClient> {
    let client = AdminClient::of(config)?;
    let is_ours = |folder: &PathBuf| folder.canonicalize().ok() == config.state_dir.canonicalize().ok();
    if let Some(folder) = client.state_dir()?.filter(|folder| !is_ours(folder)) {
        bail!(
            "the router at the admin address has another state directory, {}; give the address of the right router with --admin",
            folder.display()
        );
    }
    Ok(client)
}
