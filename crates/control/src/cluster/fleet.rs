//! The control plane of a router in front of a cluster, as the admin port shows it.

use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;
use switchyard_policy::topology::Topology;
use tracing::info;

use super::moves::ClusterMoves;
use crate::admin::{Operation, OperationError, Readiness, Source, StatusReport, UpgradePort};
use crate::fleet::{AboutProcess, LoadState, add_common_metrics, not_started, report, router_page};
use crate::operator::{describe, hot_keys_report, load_report, location_report, slots_report};
use crate::running::{Phase, Running};

/// Control plane of a router in front of a cluster.
#[derive(Debug)]
pub struct ClusterFleet {
    running: Arc<Running>,
    moves: Arc<ClusterMoves>,
    about_process: AboutProcess,
    configuration: LoadState,
    upgrades: Arc<dyn UpgradePort>,
}

impl ClusterFleet {
    /// Creates the control plane of the router in `running`.
    #[must_use]
    pub fn new(
        running: Arc<Running>,
        moves: Arc<ClusterMoves>,
        about_process: AboutProcess,
        upgrades: Arc<dyn UpgradePort>,
    ) -> Arc<Self> {
        Arc::new(Self { running, moves, about_process, configuration: LoadState::new(), upgrades })
    }

    /// Records for the metrics whether a reload was applied.
    pub fn note_reload(&self, is_good: bool) {
        self.configuration.note(is_good);
    }

    fn topology(&self) -> Result<Arc<Topology>, OperationError> {
        let topology = self.running.with_phase(|phase| match phase {
            Phase::Serving { topology, .. } => Some(Arc::clone(topology)),
            Phase::Starting | Phase::Draining { .. } => None,
        });
        topology.ok_or_else(|| {
            OperationError::Unavailable("the router is not serving: it is starting or shutting down".to_owned())
        })
    }

    fn execute(&self, operation: Operation) -> Result<Value, OperationError> {
        if matches!(operation, Operation::Upgrade) {
            if self.moves.has_moves() {
                let why = "slots are being moved, and only this process has the rest of the order: let the moves end (`switchyard moves watch`), or end them (`switchyard moves abort ID`)";
                return Err(OperationError::Conflict(why.to_owned()));
            }
            return json(&self.upgrades.upgrade()?);
        }
        let topology = self.topology()?;
        match operation {
            Operation::Moves => json(&self.moves.report()),
            Operation::Move(request) => json(&self.moves.begin(&request)?),
            Operation::Steer { id, what } => json(&self.moves.steer(id, &what)?),
            Operation::Balance(request) => match request.by.as_deref() {
                None | Some("slots") => json(&self.moves.balance(&request.how, request.dry_run)?),
                Some("load") => json(&self.moves.balance_by_load(&request.how, request.dry_run)?),
                Some(other) => Err(OperationError::Invalid(format!("by: {other:?} is neither slots nor load"))),
            },
            Operation::Plan(request) => json(&self.moves.plan(&request)?),
            Operation::Slots => json(&slots_report(&topology)),
            Operation::Where(keys) => json(&location_report(&topology, &keys)),
            Operation::Load => json(&load_report(&self.running, &topology)),
            Operation::HotKeys { keys, named } => json(&hot_keys_report(&self.running, &topology, keys, named)),
            _ => {
                let why = "the nodes are members of a cluster, which does this itself: add and remove members by its own tools, such as redis-cli --cluster";
                Err(OperationError::Unavailable(why.to_owned()))
            }
        }
    }
}

fn json(value: &impl Serialize) -> Result<Value, OperationError> {
    serde_json::to_value(value).map_err(|error| OperationError::Failed(error.to_string()))
}

impl Source for ClusterFleet {
    fn status(&self) -> StatusReport {
        let report = self.running.with_phase(|phase| match phase {
            Phase::Serving { router, topology } => report(&self.running, &router.status(), topology, false),
            Phase::Draining { status, topology, .. } => report(&self.running, status, topology, true),
            // Unreachable, because no request is answered before the router serves.
            Phase::Starting => StatusReport::default(),
        });
        StatusReport { warnings: self.moves.warnings(), ..report }
    }

    fn metrics(&self) -> String {
        let mut page = router_page(&self.running);
        self.moves.add_metrics(&mut page);
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

    fn operate(&self, operation: Operation, who: &str) -> Result<Value, OperationError> {
        let (changes, what) = (operation.changes(), describe(&operation));
        let outcome = self.execute(operation);
        match &outcome {
            Err(refused) => info!(target: "audit", who, "refused: {what}: {}", refused.text()),
            Ok(_) if !changes => {}
            Ok(_) => info!(target: "audit", who, "requested: {what}"),
        }
        outcome
    }

    fn ready(&self) -> Readiness {
        if self.running.with_phase(|phase| matches!(phase, Phase::Starting)) {
            return not_started();
        }
        self.status().readiness()
    }
}
