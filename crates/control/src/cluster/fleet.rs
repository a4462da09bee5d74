//! The control plane of a router in front of a cluster, as the admin port shows it.

use std::sync::Arc;

use tracing::info;

use crate::admin::{Operation, OperationError, Readiness, Source, StatusReport, UpgradePort};
use crate::fleet::{AboutProcess, LoadState, add_common_metrics, not_started, report, router_page};
use crate::running::{Phase, Running};

/// Control plane of a router in front of a cluster.
#[derive(Debug)]
pub struct ClusterFleet {
    running: Arc<Running>,
    about_process: AboutProcess,
    configuration: LoadState,
    upgrades: Arc<dyn UpgradePort>,
}

impl ClusterFleet {
    /// Creates the control plane of the router in `running`.
    #[must_use]
    pub fn new(running: Arc<Running>, about_process: AboutProcess, upgrades: Arc<dyn UpgradePort>) -> Arc<Self> {
        Arc::new(Self { running, about_process, configuration: LoadState::new(), upgrades })
    }

    /// Records for the metrics whether a reload was applied.
    pub fn note_reload(&self, is_good: bool) {
        self.configuration.note(is_good);
    }
}

impl Source for ClusterFleet {
    fn status(&self) -> StatusReport {
        self.running.with_phase(|phase| match phase {
            Phase::Serving { router, topology } => report(&self.running, &router.status(), topology, false),
            Phase::Draining { status, topology, .. } => report(&self.running, status, topology, true),
            // Unreachable, because no request is answered before the router serves.
            Phase::Starting => StatusReport::default(),
        })
    }

    fn metrics(&self) -> String {
        let mut page = router_page(&self.running);
        add_common_metrics(&self.running, &self.status(), &mut page);
        self.configuration.add_metrics(&mut page);
        (self.about_process)(&mut page);
        page.finish()
    }

    fn accept(&self, node: &str) -> Result<(), OperationError> {
        let _ = node;
        Err(OperationError::Conflict(
            "the nodes are members of a cluster, which decides itself whether a member is served".to_owned(),
        ))
    }

    fn operate(&self, operation: Operation, who: &str) -> Result<serde_json::Value, OperationError> {
        if matches!(operation, Operation::Upgrade) {
            let outcome = self.upgrades.upgrade();
            match &outcome {
                Ok(_) => info!(target: "audit", who, "asked: upgrade"),
                Err(refused) => info!(target: "audit", who, "refused: upgrade: {}", refused.text()),
            }
            let value = serde_json::to_value(outcome?);
            return value.map_err(|error| OperationError::Failed(error.to_string()));
        }
        let why = "the nodes are members of a cluster: move slots and add members by its own tools, such as redis-cli --cluster";
        Err(OperationError::Unavailable(why.to_owned()))
    }

    fn ready(&self) -> Readiness {
        if self.running.with_phase(|phase| matches!(phase, Phase::Starting)) {
            return not_started();
        }
        self.status().readiness()
    }
}
