//! One fleet: slot map, journal, moves and metrics. Nothing is global, so a process may serve several fleets.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use switchyard_policy::topology::Topology;
use switchyard_router::{Limited, Link, Status};

use crate::admin::{
    LimitedReport, LinkReport, NodeReport, Operation, OperationError, Readiness, Source, StatusReport, UnreachableNode,
};
use crate::eject::Ejector;
use crate::health;
use crate::journal::Sync;
use crate::members::NodeList;
use crate::metrics::Page;
use crate::moves::Moves;
use crate::operator::Operator;
use crate::placement::Placement;
use crate::running::{Phase, Running};

/// Adds metrics of the process, regardless of the fleet.
pub type AboutProcess = fn(&mut Page);

/// Control plane of a fleet.
#[derive(Debug)]
pub struct Fleet {
    /// The router, while it runs.
    pub running: Arc<Running>,
    /// Slot map.
    pub placement: Arc<Placement>,
    /// Moves.
    pub moves: Arc<Moves>,
    /// Executes operators' requests.
    pub operator: Arc<Operator>,
    /// Ejects failed nodes of a pool.
    pub ejector: Arc<Ejector>,
    /// Number of router starts on its state directory, including this one.
    pub incarnation: u64,
    about_process: AboutProcess,
    configuration: LoadState,
}

/// State of the configuration, for the metrics.
#[derive(Debug)]
pub(crate) struct LoadState(Mutex<Loaded>);

/// Result of the last load of the configuration: the start, or a reload.
#[derive(Clone, Copy, Debug)]
struct Loaded {
    is_good: bool,
    /// Time of the last load without an error.
    last_good: SystemTime,
}

impl Fleet {
    /// Counts this start, and opens the journal in the state directory of `placement`. Afterwards the map agrees with
    /// the journal: open legs are in transit, and their nodes cannot be removed.
    ///
    /// # Errors
    /// If journal or store cannot be used.
    pub fn open(
        directory: &Path,
        running: Arc<Running>,
        placement: Arc<Placement>,
        list: Arc<dyn NodeList>,
        sync: Sync,
        about_process: AboutProcess,
    ) -> anyhow::Result<Arc<Self>> {
        let incarnation = placement.next_incarnation()?;
        let moves = Moves::open(directory, Arc::clone(&placement), Arc::clone(&running), sync)?;
        let operator =
            Operator::open(directory, Arc::clone(&moves), Arc::clone(&running), Arc::clone(placement.store()), list)?;
        let ejector = Ejector::open(Arc::clone(&moves), Arc::clone(&running), Arc::clone(&placement))?;
        let configuration = LoadState::new();
        Ok(Arc::new(Self { running, placement, moves, operator, ejector, incarnation, about_process, configuration }))
    }

    /// Records for the metrics whether a reload was applied.
    pub fn note_reload(&self, is_good: bool) {
        self.configuration.note(is_good);
    }

    fn report(&self, status: &Status, topology: &Topology, draining: bool) -> StatusReport {
        let mut report = report(&self.running, status, topology, draining);
        for (node, status) in report.nodes.iter_mut().zip(&status.nodes) {
            node.drained = self.operator.is_drained(&status.name);
            node.ejected = self.ejector.slots_away(status.id);
        }
        StatusReport { incarnation: self.incarnation, ..report }
    }
}

impl LoadState {
    /// State after the start.
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Loaded { is_good: true, last_good: SystemTime::now() }))
    }

    /// Records whether a reload was applied.
    pub(crate) fn note(&self, is_good: bool) {
        let mut loaded = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let last_good = if is_good { SystemTime::now() } else { loaded.last_good };
        *loaded = Loaded { is_good, last_good };
    }

    pub(crate) fn add_metrics(&self, page: &mut Page) {
        let Loaded { is_good, last_good } = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let help =
            "1 if the last load of the configuration, at the start or by SIGHUP, was applied; 0 if it was refused";
        page.gauge("config_last_reload_successful", help, f64::from(u8::from(is_good)));
        let help = "Time of the last load of the configuration that was applied, in seconds since 1970";
        let seconds = last_good.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        page.gauge("config_last_reload_success_timestamp_seconds", help, seconds);
    }
}

/// Returns the state of a router and its nodes.
pub(crate) fn report(running: &Running, status: &Status, topology: &Topology, draining: bool) -> StatusReport {
    let now = Instant::now();
    let nodes = status
        .nodes
        .iter()
        .map(|node| NodeReport {
            id: node.id.0,
            address: node.name.clone(),
            link: match &node.link {
                Link::Up => LinkReport::Up,
                Link::Connecting => LinkReport::Connecting,
                Link::Down(reason) => LinkReport::Down { reason: reason.clone() },
            },
            run_id: node.run_id.clone(),
            version: node.version.clone(),
            slots: topology.slots_of(node.id) as u64,
            drained: false,
            ejected: None,
            overrides: topology.overrides_at(node.id) as u64,
            requests: node.requests,
            errors: node.errors,
            in_flight: node.in_flight,
            resolved: node.address.filter(|address| node.servers.is_none() && address.to_string() != node.name),
            primary: node.servers.as_ref().and_then(|s| s.primary),
            replicas: node.servers.as_ref().map(|s| s.readable.clone()).unwrap_or_default(),
            silence: running.health().silence(node, now),
            refuses_writes: running.health().refusal(node.id, now),
        })
        .collect();
    StatusReport {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        epoch: status.epoch,
        uptime_seconds: status.uptime.as_secs_f64(),
        draining,
        clients: status.clients,
        commands: status.commands,
        nodes,
        stopped_threads: running.threads().troubles(),
        limited: status
            .limited
            .iter()
            .map(|Limited { command, limit, count }| LimitedReport {
                command: command.clone(),
                limit: limit.text().to_owned(),
                count: *count,
            })
            .collect(),
        ..StatusReport::default()
    }
}

/// Starts a page with the metrics of the router, or with the last ones of a draining router.
pub(crate) fn router_page(running: &Running) -> Page {
    Page::after_router(running.with_phase(|phase| match phase {
        Phase::Serving { router, .. } => router.metrics(),
        Phase::Draining { metrics, .. } => metrics.clone(),
        Phase::Starting => String::new(),
    }))
}

/// Adds metrics about the health of nodes, and about threads.
pub(crate) fn add_common_metrics(running: &Running, status: &StatusReport, page: &mut Page) {
    page.gauge("slots_unserved", "Slots whose owner cannot be reached", status.readiness().slots_unserved() as f64);
    health::add_metrics(page, &status.nodes);
    let threads = running.threads().all();
    let samples = threads
        .into_iter()
        .map(|(name, is_stopped)| (vec![("thread", name.to_owned())], f64::from(u8::from(!is_stopped))));
    page.gauges(
        "automation_thread_up",
        "1 while a thread of automation or observation runs, 0 after an internal error has stopped it",
        samples,
    );
}

/// Readiness of a router that has not started yet.
pub(crate) fn not_started() -> Readiness {
    let not_ready = vec![UnreachableNode { address: "all".to_owned(), slots: 0, reason: "starting".to_owned() }];
    Readiness { not_ready, ..Readiness::default() }
}

impl Source for Fleet {
    fn status(&self) -> StatusReport {
        let report = self.running.with_phase(|phase| match phase {
            Phase::Serving { router, topology } => self.report(&router.status(), topology, false),
            Phase::Draining { status, topology, .. } => self.report(status, topology, true),
            // Unreachable, because no request is answered before the router serves.
            Phase::Starting => StatusReport { incarnation: self.incarnation, ..StatusReport::default() },
        });
        // After the lock on the phase is released, because moves use it as well.
        let warnings = if report.draining { Vec::new() } else { self.moves.warnings() };
        StatusReport { warnings, automation: self.operator.automation_states(), ..report }
    }

    fn operate(&self, operation: Operation, who: &str) -> Result<serde_json::Value, OperationError> {
        self.operator.operate(operation, who)
    }

    fn metrics(&self) -> String {
        let mut page = router_page(&self.running);
        self.moves.add_metrics(&mut page);
        self.operator.add_automation_metrics(&mut page);
        self.operator.add_rules_metrics(&mut page);
        let status = self.status();
        add_common_metrics(&self.running, &status, &mut page);
        self.ejector.add_metrics(&mut page, &status.nodes);
        self.configuration.add_metrics(&mut page);
        page.standby(false);
        (self.about_process)(&mut page);
        page.finish()
    }

    fn accept(&self, node: &str) -> Result<(), OperationError> {
        self.running.accept(node)?;
        tracing::warn!(node, "an operator has accepted the node as it is");
        Ok(())
    }

    fn ready(&self) -> Readiness {
        if self.running.with_phase(|phase| matches!(phase, Phase::Starting)) {
            return not_started();
        }
        self.status().readiness()
    }
}
