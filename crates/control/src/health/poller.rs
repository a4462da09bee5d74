//! The polling thread: one task per node, so that a silent node does not delay the others.

use std::collections::BTreeMap;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use switchyard_policy::data_loss::Sent;
use switchyard_policy::topology::NodeId;
use switchyard_router::{NodeAccess, Router};
use tokio::sync::oneshot;
use tokio::task::{AbortHandle, JoinHandle, JoinSet};
use tracing::{debug, info, warn};

use super::INTERVAL;
use super::info_reply::{COMMANDS, InfoReply, read};
use crate::admin::Silence;
use crate::nodes::Endpoint;
use crate::nodes::wire::Connection;
use crate::running::Running;

/// Connect timeout. The next attempt may use another address.
const CONNECT: Duration = Duration::from_secs(2);

/// Time without a reply after which a connection is abandoned: the node may have forgotten it.
const GIVE_UP: Duration = Duration::from_secs(30);

/// The running thread. Dropping it ends the thread.
#[derive(Debug)]
pub struct HealthThread {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl HealthThread {
    /// Starts polling the nodes of the router.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn start(running: Arc<Running>) -> anyhow::Result<Self> {
        let (stop, stopped) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("cannot start polling the nodes")?;
        let threads = running.threads().clone();
        let thread = threads
            .spawn("health", move || {
                runtime.block_on(watch(running, stopped));
                // Resolving a name may take long, and the result is no longer needed.
                runtime.shutdown_background();
            })
            .context("cannot start polling the nodes")?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for HealthThread {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn watch(running: Arc<Running>, mut stop: oneshot::Receiver<()>) {
    // Dropped at the end, which aborts all tasks.
    let mut tasks = JoinSet::new();
    let mut asked: BTreeMap<NodeId, (NodeAccess, AbortHandle)> = BTreeMap::new();
    let mut told = BTreeMap::new();
    let mut ticks = tokio::time::interval(INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = &mut stop => return,
            _ = ticks.tick() => {}
        }
        let looked = running.with(|router| (router.node_access(), router.traffic(), router.slot_counts()));
        let Some((access, traffic, slots)) = looked else { continue };
        running.loads().note_traffic(Instant::now(), traffic);
        running.loads().note_slots(Instant::now(), slots);
        asked.retain(|node, (known, task)| {
            let stays = access.get(node) == Some(known);
            if !stays {
                task.abort();
            }
            stays
        });
        for (node, access) in &access {
            asked
                .entry(*node)
                .or_insert_with(|| (access.clone(), tasks.spawn(poll(*node, access.clone(), Arc::clone(&running)))));
        }
        while tasks.try_join_next().is_some() {}
        running.health().keep(|node| access.contains_key(&node));
        log_changes(&running, &mut told);
    }
}

/// Logged state of a node.
#[derive(Default, PartialEq)]
struct LogState {
    silence: Option<bool>,
    refuses: Option<String>,
}

/// Logs changes of the nodes' states.
fn log_changes(running: &Running, told: &mut BTreeMap<NodeId, LogState>) {
    let Some(status) = running.with(Router::status) else { return };
    let now = Instant::now();
    told.retain(|node, _| status.nodes.iter().any(|known| known.id == *node));
    for node in &status.nodes {
        running.health().note_refusals(node.id, now, node.refusals);
        let silence = running.health().silence(node, now).map(|silence| matches!(silence, Silence::Busy { .. }));
        let refusal = running.health().refusal(node.id, now);
        // Compare only the code, because numbers in the text change all the time.
        let code = refusal.as_deref().and_then(|why| why.split(' ').next()).map(str::to_owned);
        let before = told.entry(node.id).or_default();
        match (before.silence, silence) {
            (before, now) if before == now => {}
            (_, Some(true)) => {
                info!(node = %node.name, "node is busy: it executes a slow command, and answers nothing else")
            }
            (_, Some(false)) => warn!(node = %node.name, "node is silent: it does not answer"),
            (_, None) => info!(node = %node.name, "node answers again, or its connection has ended"),
        }
        match (&before.refuses, &code) {
            (before, now) if before == now => {}
            (_, Some(_)) => warn!(node = %node.name, reason = refusal.as_deref(), "node refuses writes"),
            (_, None) => info!(node = %node.name, "node takes writes again"),
        }
        *before = LogState { silence, refuses: code };
    }
    let is_heard = |node: NodeId| {
        status.nodes.iter().any(|known| known.id == node && running.health().silence(known, now).is_none())
    };
    running.loads().keep_servers(is_heard);
}

/// Polls one node in a loop.
async fn poll(node: NodeId, access: NodeAccess, running: Arc<Running>) {
    let mut connection = None;
    let mut name = Name::of(&access);
    loop {
        let began = Instant::now();
        running.health().note_queried(node, began);
        // Read this before the node counts its keys: commands sent later may or may not be in that count.
        let sent = running.with(|router: &Router| router.changes_sent(node)).unwrap_or_default();
        let answered = {
            let round = pin!(round(&mut connection, &access));
            tokio::time::timeout(GIVE_UP, round).await
        };
        let now = Instant::now();
        match answered {
            Ok(Ok(said)) => note(&running, node, now, said, sent),
            Ok(Err(why)) if why.kind() == io::ErrorKind::TimedOut => connection = None,
            Ok(Err(why)) => {
                debug!(node = %access.name, reason = %why, "cannot poll a node");
                connection = None;
                running.health().note_gone(node);
            }
            Err(_) => connection = None,
        }
        if connection.is_none() {
            name.look_up(node, &running);
        }
        tokio::time::sleep(INTERVAL.saturating_sub(began.elapsed())).await;
    }
}

/// Name of a node, which may resolve to another address than before. It is looked up again after each failed attempt,
/// on a blocking thread.
struct Name {
    endpoint: Option<Endpoint>,
    under_way: Option<JoinHandle<()>>,
}

impl Name {
    fn of(access: &NodeAccess) -> Self {
        // Names of Sentinels' nodes are not host names; the router knows such nodes.
        let endpoint = Endpoint::parse(&access.name, None).ok().filter(Endpoint::is_name);
        Self { endpoint, under_way: None }
    }

    fn look_up(&mut self, node: NodeId, running: &Arc<Running>) {
        if self.under_way.as_ref().is_some_and(|task| !task.is_finished()) {
            return;
        }
        let Some(endpoint) = self.endpoint.clone() else { return };
        let running = Arc::clone(running);
        self.under_way = Some(tokio::task::spawn_blocking(move || {
            let found = endpoint.resolve();
            let is_news = running.with(|router| router.set_resolved_address(node, found.clone())).unwrap_or(false);
            if let Ok(address) = found
                && is_news
            {
                info!(node = %endpoint, %address, "the name of the node resolves to another address now");
            }
        }));
    }
}

async fn round(connection: &mut Option<Connection>, access: &NodeAccess) -> io::Result<InfoReply> {
    let connection = match connection {
        Some(connection) => connection,
        none => {
            let address = access.address.ok_or(io::ErrorKind::AddrNotAvailable)?;
            none.insert(Connection::open_within(CONNECT, address, access).await?.with_timeout(GIVE_UP))
        }
    };
    Ok(read(&connection.call_batch(&COMMANDS).await?))
}

/// Distributes a reply to its consumers.
fn note(running: &Running, node: NodeId, at: Instant, said: InfoReply, sent: Sent) {
    running.health().note_answer(node, at, said.is_busy, said.info.as_ref().map(|info| info.refuses.clone()));
    if let Some(info) = said.info {
        // Input for the detection of nodes that return without their data. Sent every time, because `CONFIG SET` at a
        // node changes whether it persists data while its process runs.
        running.with(|router| {
            router.note_data(node, &info.run_id, info.holdings, info.persists, sent);
            router.note_info(node, &info.text);
        });
        running.loads().note_server(node, &info.run_id, at, info.load);
    }
}
