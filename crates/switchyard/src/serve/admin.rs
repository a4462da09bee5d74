//! The admin port: a thread with a runtime of its own, and the router as the source of what it serves.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, OnceLock, mpsc};
use std::thread::JoinHandle;

use anyhow::{Context, anyhow};
use switchyard_control::admin::{
    Access, Admin, AdminError, AdminOptions, LinkReport, NodeReport, NotReady, Operation, Readiness, Refused, Source, StatusReport, Token,
};
use switchyard_policy::topology::Topology;
use switchyard_router::{Link, Secret, Status};
use tokio::sync::oneshot;
use tracing::{error, warn};

use super::explain_listen;
use super::metrics::Page;
use super::moves::Moves;
use super::running::{Phase, Running};

/// Threads for answering requests; a scrape is rare, and more than a few at once is somebody's mistake.
const ANSWERING_THREADS: usize = 4;

/// The running admin port.
pub(super) struct AdminThread {
    pub(super) address: SocketAddr,
    /// There once the router serves.
    moves: Arc<OnceLock<Arc<Moves>>>,
    /// Answered with once the router serves.
    go: Option<oneshot::Sender<()>>,
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

impl AdminThread {
    /// Takes the port, and starts answering when [`AdminThread::serve`] is called. So a port that is taken is told before the
    /// router starts.
    pub(super) fn bind(address: SocketAddr, options: AdminOptions, running: Arc<Running>, incarnation: u64) -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(ANSWERING_THREADS)
            .thread_name("admin-answer")
            .build()
            .context("cannot start the admin port")?;
        let (bound, outcome) = mpsc::sync_channel(1);
        let (go, ready) = oneshot::channel::<()>();
        let (stop, stopped) = oneshot::channel::<()>();
        let moves = Arc::<OnceLock<Arc<Moves>>>::default();
        let source = Arc::new(RouterSource { running, incarnation, moves: Arc::clone(&moves) });
        let thread = std::thread::Builder::new()
            .name("admin".to_owned())
            .spawn(move || {
                runtime.block_on(async move {
                    let admin = match Admin::bind(address, options, source).await {
                        Ok(admin) => admin,
                        Err(error) => return drop(bound.send(Err(error))),
                    };
                    drop(bound.send(Ok(admin.address())));
                    if ready.await.is_err() {
                        return; // the router did not start
                    }
                    let until = async { drop(stopped.await) };
                    if let Err(error) = admin.serve(until).await {
                        error!("the admin port has failed, the router goes on without it: {error}");
                    }
                });
                // A request may still be looking at the router; that must not hold up the end of the process.
                runtime.shutdown_background();
            })
            .context("cannot start a thread")?;
        let address = outcome.recv().context("the admin thread has ended")?.map_err(|error| match error {
            AdminError::Listen { address, why } => explain_listen(address, "the admin API", "--admin", why),
            exposed @ AdminError::Exposed { .. } => anyhow!(exposed),
        })?;
        Ok(Self { address, moves, go: Some(go), stop, thread })
    }

    /// Starts answering.
    pub(super) fn serve(&mut self, moves: Arc<Moves>) {
        let _ = self.moves.set(moves); // once
        if let Some(go) = self.go.take() {
            let _ = go.send(());
        }
    }

    /// Stops answering; requests under way get a moment.
    pub(super) fn stop(self) {
        let _ = self.stop.send(());
        if self.thread.join().is_err() {
            error!("the admin thread has panicked");
        }
    }
}

/// Who may do what at the admin port: by the token of the configuration (whether it fits was checked there), or by one that is made now.
///
/// A disk that is full is no reason not to serve: then the token of the start before is kept. Where there is none, nothing can be changed by this port.
pub(super) fn access(token: Option<&Secret>, state_dir: &Path) -> Access {
    if let Some(token) = token.and_then(|token| Token::new(&token.0)) {
        return Access::Given(token);
    }
    let error = match Token::make(state_dir) {
        Ok((token, file)) => return Access::Made { token, file },
        Err(error) => error,
    };
    let (kept, state_dir) = (Token::kept(state_dir), state_dir.display());
    match kept {
        Ok((token, file)) => {
            warn!("no new token for the admin port can be written to {state_dir}: {error}. The one of an earlier start is kept");
            Access::Made { token, file }
        }
        Err(_) => {
            let why = format!(
                "the admin port shows everything and changes nothing: no token for it can be written to {state_dir} ({error}). Make that possible, then \
                 reload the router (SIGHUP)"
            );
            error!("{why}");
            Access::ReadOnly { why }
        }
    }
}

/// The router, as the admin port sees it.
struct RouterSource {
    running: Arc<Running>,
    incarnation: u64,
    moves: Arc<OnceLock<Arc<Moves>>>,
}

impl RouterSource {
    fn report(&self, status: &Status, topology: &Topology, draining: bool) -> StatusReport {
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
                drained: self.moves.get().is_some_and(|moves| moves.is_drained(&node.name)),
                exceptions: topology.exceptions_at(node.id) as u64,
                requests: node.requests,
                errors: node.errors,
                in_flight: node.in_flight,
                primary: node.servers.as_ref().and_then(|s| s.primary),
                replicas: node.servers.as_ref().map(|s| s.readable.clone()).unwrap_or_default(),
            })
            .collect();
        StatusReport {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            incarnation: self.incarnation,
            epoch: status.epoch,
            uptime_seconds: status.uptime.as_secs_f64(),
            draining,
            clients: status.clients,
            commands: status.commands,
            nodes,
            troubles: Vec::new(),
        }
    }
}

impl Source for RouterSource {
    fn status(&self) -> StatusReport {
        let report = self.running.look(|phase| match phase {
            Phase::Serving { router, topology } => self.report(&router.status(), topology, false),
            Phase::Draining { status, topology, .. } => self.report(status, topology, true),
            // Nobody is answered before the router serves; this is for completeness.
            Phase::Starting => StatusReport {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                incarnation: self.incarnation,
                epoch: 0,
                uptime_seconds: 0.0,
                draining: false,
                clients: 0,
                commands: 0,
                nodes: Vec::new(),
                troubles: Vec::new(),
            },
        });
        // Behind the look at the phase, which moves look at as well.
        let troubles = self.moves.get().map(|moves| moves.troubles()).unwrap_or_default();
        StatusReport { troubles: if report.draining { Vec::new() } else { troubles }, ..report }
    }

    fn operate(&self, operation: Operation, who: &str) -> Result<serde_json::Value, Refused> {
        match self.moves.get() {
            Some(moves) => moves.operate(operation, who),
            None => Err(Refused::Unavailable("the router is starting".to_owned())),
        }
    }

    fn metrics(&self) -> String {
        let mut page = Page::behind(self.running.look(|phase| match phase {
            Phase::Serving { router, .. } => router.metrics(),
            Phase::Draining { metrics, .. } => metrics.clone(),
            Phase::Starting => String::new(),
        }));
        if let Some(moves) = self.moves.get() {
            moves.add_metrics(&mut page);
        }
        page.gauge("slots_unserved", "Slots whose owner cannot be reached", self.status().readiness().slots_unserved() as f64);
        page.add_log();
        page.add_build();
        page.add_process();
        page.finish()
    }

    fn accept(&self, node: &str) -> Result<(), Refused> {
        self.running.accept(node)?;
        tracing::warn!(node, "an operator has accepted the node as it is");
        Ok(())
    }

    fn ready(&self) -> Readiness {
        if self.running.look(|phase| matches!(phase, Phase::Starting)) {
            let not_ready = vec![NotReady { address: "all".to_owned(), slots: 0, reason: "starting".to_owned() }];
            return Readiness { not_ready, ..Readiness::default() };
        }
        self.status().readiness()
    }
}
