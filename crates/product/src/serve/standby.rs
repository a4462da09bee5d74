//! Admin port of a waiting standby, so that monitoring sees the standby and the reason for its wait.
//!
//! The process keeps one port and one thread: after the take-over the same port serves the fleet, so that no scrape
//! fails. If an active router on the same host has the address, the standby waits without the port, and tries again.

use std::mem;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use switchyard_control::admin::{
    Access, AdminOptions, AdminThread, Operation, OperationError, Readiness, Source, StandbyReport, StatusReport, Token,
};
use switchyard_control::metrics::Page;
use switchyard_control::ownership::{Standby, Waiting};
use switchyard_router::Secret;
use tracing::{info, warn};

use super::{SignalWait, metrics};

const RETRY: Duration = Duration::from_secs(1);

/// Access before this router owns the state directory: no token is written to a directory that another router uses.
pub(super) fn first_access(token: Option<&Secret>) -> Access {
    match token.and_then(|token| Token::new(&token.0)) {
        Some(token) => Access::Given(token),
        None => Access::ReadOnly { why: "this router does not serve yet, so nothing can be changed here".to_owned() },
    }
}

/// A waiting standby, with its signals and admin port.
pub(super) struct StandbyWait {
    pub(super) with: Standby,
    pub(super) signals: SignalWait,
    address: SocketAddr,
    options: AdminOptions,
    source: Arc<AdminSource>,
    port: Port,
}

enum Port {
    Closed { next_attempt: Instant, has_logged: bool },
    Open(AdminThread),
}

impl StandbyWait {
    pub(super) fn new(with: Standby, address: SocketAddr, options: AdminOptions) -> anyhow::Result<Self> {
        let port = Port::Closed { next_attempt: Instant::now(), has_logged: false };
        Ok(Self { with, signals: SignalWait::new()?, address, options, source: Arc::default(), port })
    }

    /// Waits for `period`. Returns false on a signal to stop.
    pub(super) fn pause(&mut self, waiting: Waiting, period: Duration) -> bool {
        self.source.wait_for(waiting);
        self.open();
        self.signals.pause(&format!("standby: {waiting}"), period)
    }

    fn open(&mut self) {
        let Port::Closed { next_attempt, has_logged } = &mut self.port else { return };
        if Instant::now() < *next_attempt {
            return;
        }
        match AdminThread::bind(self.address, self.options.clone()) {
            Ok(mut thread) => {
                thread.serve(Arc::clone(&self.source) as Arc<dyn Source>);
                info!("standby: the admin port is {}", thread.address);
                self.port = Port::Open(thread);
            }
            Err(error) => {
                *next_attempt = Instant::now() + RETRY;
                if !mem::replace(has_logged, true) {
                    warn!("standby: waits without an admin port until its address is free: {error:#}");
                }
            }
        }
    }

    /// Ends the wait. Returns the signals, and the admin port if it is open.
    pub(super) fn end(self) -> (SignalWait, Option<(AdminThread, Arc<AdminSource>)>) {
        let port = match self.port {
            Port::Open(thread) => Some((thread, self.source)),
            Port::Closed { .. } => None,
        };
        (self.signals, port)
    }
}

/// Source of the admin port: this standby, and after the take-over the fleet.
#[derive(Default)]
pub(super) struct AdminSource {
    waiting: Mutex<Waiting>,
    fleet: OnceLock<Arc<dyn Source>>,
}

impl AdminSource {
    fn wait_for(&self, waiting: Waiting) {
        *self.waiting.lock().unwrap_or_else(PoisonError::into_inner) = waiting;
    }

    /// Switches to the fleet: the router serves from now on.
    pub(super) fn hand_over(&self, fleet: Arc<dyn Source>) {
        // Fails only on a second call. A process takes over at most once.
        let _ = self.fleet.set(fleet);
    }
}

const REFUSAL: &str = "this router waits as a standby: query the active router";

impl Source for AdminSource {
    fn status(&self) -> StatusReport {
        match self.fleet.get() {
            Some(fleet) => fleet.status(),
            None => {
                let waiting = *self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
                let standby = StandbyReport {
                    waits_for: waiting.to_string(),
                    is_cut_off: matches!(waiting, Waiting::CutOff { .. }),
                };
                StatusReport {
                    version: env!("CARGO_PKG_VERSION").to_owned(),
                    standby: Some(standby),
                    ..StatusReport::default()
                }
            }
        }
    }

    fn metrics(&self) -> String {
        match self.fleet.get() {
            Some(fleet) => fleet.metrics(),
            None => {
                let mut page = Page::default();
                page.standby(true);
                metrics::add_process(&mut page);
                page.finish()
            }
        }
    }

    fn accept(&self, node: &str) -> Result<(), OperationError> {
        self.fleet
            .get()
            .map_or_else(|| Err(OperationError::Unavailable(REFUSAL.to_owned())), |fleet| fleet.accept(node))
    }

    fn operate(&self, operation: Operation, who: &str) -> Result<serde_json::Value, OperationError> {
        self.fleet
            .get()
            .map_or_else(|| Err(OperationError::Unavailable(REFUSAL.to_owned())), |fleet| fleet.operate(operation, who))
    }

    fn ready(&self) -> Readiness {
        self.fleet.get().map_or_else(|| self.status().readiness(), |fleet| fleet.ready())
    }
}
