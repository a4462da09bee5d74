//! Monitors nodes that have replicas: queries their servers and Sentinels, lets `policy::failover` decide, and informs
//! the router.
//!
//! A thread of its own, so that no worker waits for a server that does not reply. Decisions are durable before the
//! router acts on them, so that a restart does not return to an abandoned primary.

mod names;
mod needs;
mod sentinel;
pub(crate) mod server;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use switchyard_policy::failover::{Action, Event, PrimaryMonitor, Why};
use switchyard_policy::topology::{NodeId, Topology};
use switchyard_router::{NodeAccess, Servers};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{AbortHandle, JoinSet};
use tracing::{error, warn};

use crate::nodes::{NodeAddress, SentinelAddress, ServerName};
use crate::running::Running;
use crate::store::{RedbStore, Store, load_json, save_json};
use names::Names;
pub(crate) use needs::{ReplicaRequirement, ReplicaRequirements};

/// Capacity of the event queue.
const QUEUE: usize = 1024;

/// Interval for resolving the names that have no working server.
const NAMES: Duration = Duration::from_secs(1);

/// A monitored node that has replicas.
#[derive(Clone, Debug)]
pub struct MonitoredNode {
    node: NodeId,
    name: String,
    access: NodeAccess,
    sentinel: Option<SentinelAddress>,
    names: Vec<ServerName>,
    /// Primary and host name in the store.
    host: Host,
    watch: PrimaryMonitor<SocketAddr>,
}

/// A primary and the host name that Sentinels announce for it, if that name verifies its certificate. Stored, because a
/// router may start while no Sentinel replies.
type Host = Option<(SocketAddr, String)>;

/// Store document of a node's [`Host`].
fn host_document(node: &str) -> String {
    format!("primary-host-{node}")
}

/// Returns the nodes to monitor, each with its stored state.
pub fn monitored_nodes(
    topology: &Topology,
    nodes: &[NodeAddress],
    store: &RedbStore,
) -> anyhow::Result<Vec<MonitoredNode>> {
    let mut monitored_nodes = Vec::new();
    for node in nodes.iter().filter(|node| node.has_replicas()) {
        let Some(id) = topology.nodes().find(|known| known.name == node.name).map(|known| known.id) else { continue };
        let stored = store.load_primary(&node.name).with_context(|| format!("node {}", node.name))?;
        let watch = match (node.address, &node.sentinel) {
            (None, None) => PrimaryMonitor::without_first(node.replicas.clone(), stored),
            (first, sentinel) => PrimaryMonitor::new(
                first.into_iter().chain(node.replicas.iter().copied()).collect(),
                sentinel.is_some(),
                stored,
            ),
        };
        let (sentinel, names) = (node.sentinel.clone(), node.names.clone());
        let mut host = None;
        if let (Some(tls), Some(_)) = (&node.tls, &sentinel) {
            host =
                load_json::<Host>(store, &host_document(&node.name)).with_context(|| format!("node {}", node.name))?;
            // Skip this if a Sentinel has announced another name already.
            if let Some((address, name)) = host.as_ref().filter(|(address, _)| tls.host_at(*address).is_none()) {
                tls.note_host(*address, name);
            }
        }
        monitored_nodes.push(MonitoredNode {
            node: id,
            name: node.name.clone(),
            access: node.access(),
            sentinel,
            names,
            host,
            watch,
        });
    }
    Ok(monitored_nodes)
}

impl MonitoredNode {
    /// Stores the host name of the primary if the name or the primary has changed.
    fn keep_host(&mut self, primary: Option<SocketAddr>, store: &RedbStore) {
        let (Some(tls), Some(_)) = (&self.access.tls, &self.sentinel) else { return };
        let host: Host = primary.and_then(|address| Some((address, tls.host_at(address)?)));
        if host == self.host {
            return;
        }
        if let Err(why) = save_json(store, &host_document(&self.name), &host) {
            error!(node = %self.name, "cannot record the host name of the node's primary: {why}");
        }
        self.host = host;
    }

    /// Servers known at the router's start.
    pub fn servers(&self) -> (NodeId, Servers) {
        (
            self.node,
            Servers {
                primary: self.watch.primary().copied(),
                readable: Vec::new(),
                primary_is_nearest: true,
                ..Servers::default()
            },
        )
    }
}

/// The monitoring thread. Dropping it ends the thread.
#[derive(Debug, Default)]
pub struct Observer {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Observer {
    /// Starts monitoring, unless there are no such nodes.
    pub fn start(
        monitored_nodes: Vec<MonitoredNode>,
        store: Arc<RedbStore>,
        running: Arc<Running>,
    ) -> anyhow::Result<Self> {
        let (stop, stopped) = oneshot::channel();
        if monitored_nodes.is_empty() {
            return Ok(Self { stop: None, thread: None });
        }
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot watch replicas")?;
        let threads = running.threads().clone();
        let thread = threads
            .spawn("observer", move || {
                runtime.block_on(observe(monitored_nodes, &store, &running, stopped));
                // Resolving a name may take long, and the result is no longer needed.
                runtime.shutdown_background();
            })
            .context("cannot watch replicas")?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Sends observations, with the index of their node.
pub(crate) type Sender = mpsc::Sender<(usize, Event<SocketAddr>)>;

async fn observe(
    mut monitored_nodes: Vec<MonitoredNode>,
    store: &RedbStore,
    running: &Running,
    mut stop: oneshot::Receiver<()>,
) {
    let began = Instant::now();
    let mut accepted = running.accepted();
    let (sender, mut seen) = mpsc::channel(QUEUE);
    // Dropped at the end, which aborts all tasks.
    let mut tasks = JoinSet::new();
    let mut asked: BTreeMap<(usize, SocketAddr), AbortHandle> = BTreeMap::new();
    let mut names = Names::new();
    let mut look_ups = tokio::time::interval(NAMES);
    look_ups.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut servers: BTreeMap<usize, Servers> = BTreeMap::new();
    let (hurry, hurried) = watch::channel(false);
    // Moves that wait for replicas, with the index of their node.
    let mut waiting: Vec<(usize, ReplicaRequirement)> = Vec::new();
    for (index, node) in monitored_nodes.iter().enumerate() {
        servers.insert(index, node.servers().1);
        if let Some(group) = &node.sentinel {
            for place in &group.sentinels {
                tasks.spawn(sentinel::monitor(
                    index,
                    place.clone(),
                    group.clone(),
                    node.access.tls.clone(),
                    sender.clone(),
                ));
            }
        }
    }
    loop {
        asked.retain(|(index, server), task| {
            let stays = monitored_nodes[*index].watch.servers().any(|known| known == server);
            if !stays {
                task.abort();
                if let Some(tls) = &monitored_nodes[*index].access.tls {
                    tls.forget_host(*server);
                }
            }
            stays
        });
        for (index, node) in monitored_nodes.iter().enumerate() {
            for server in node.watch.servers() {
                let ask =
                    || tasks.spawn(server::query(index, *server, node.access.clone(), sender.clone(), hurried.clone()));
                asked.entry((index, *server)).or_insert_with(ask);
            }
        }
        while tasks.try_join_next().is_some() {}
        let timeout = waiting.iter().map(|(_, need)| need.until).min();
        let event = tokio::select! {
            _ = &mut stop => return,
            event = seen.recv() => match event {
                // Ignore a server that has left in the meantime.
                Some((index, Event::RoleReported { address, .. } | Event::Silent { address })) if !asked.contains_key(&(index, address)) => None,
                Some(event) => Some(event),
                None => return,
            },
            _ = look_ups.tick() => {
                names.start_resolving(&monitored_nodes);
                None
            }
            found = names.found() => found.and_then(|found| names.note(found, &mut monitored_nodes, running)),
            name = accepted.recv() => {
                monitored_nodes.iter().position(|node| Ok(&node.name) == name.as_ref()).map(|index| (index, Event::Accepted))
            }
            needs = running.needs().take() => {
                for need in needs {
                    match monitored_nodes.iter().position(|node| node.node == need.node) {
                        Some(index) => waiting.push((index, need)),
                        None => need.met(),
                    }
                }
                None
            }
            () = async { tokio::time::sleep_until(timeout.unwrap_or(began).into()).await }, if timeout.is_some() => None,
        };
        let now_us = || began.elapsed().as_micros() as u64;
        if let Some((index, event)) = event {
            step(&mut monitored_nodes[index], event, now_us(), servers.entry(index).or_default(), store, running);
        }
        for (index, need) in std::mem::take(&mut waiting) {
            let node = &mut monitored_nodes[index];
            let behind: Vec<SocketAddr> = node.watch.behind(&need.position).copied().collect();
            if !behind.is_empty() && Instant::now() < need.until {
                waiting.push((index, need));
                continue;
            }
            for replica in behind {
                warn!(node = %node.name, %replica, "a replica lacks keys that were moved to its node: it is not read until it has them");
            }
            // Also for replicas that are not read now, because they may be read soon.
            step(
                node,
                Event::Needed(need.position.clone()),
                now_us(),
                servers.entry(index).or_default(),
                store,
                running,
            );
            need.met();
        }
        hurry.send_if_modified(|hurry| std::mem::replace(hurry, !waiting.is_empty()) == waiting.is_empty());
    }
}

fn step(
    node: &mut MonitoredNode,
    event: Event<SocketAddr>,
    now_us: u64,
    servers: &mut Servers,
    store: &RedbStore,
    running: &Running,
) {
    let mut actions = Vec::new();
    node.watch.step(event, now_us, &mut actions);
    running.note_claim(&node.name, node.watch.has_claimant());
    apply(node, actions, servers, store, running);
    node.keep_host(servers.primary, store);
}

fn apply(
    node: &MonitoredNode,
    actions: Vec<Action<SocketAddr>>,
    servers: &mut Servers,
    store: &RedbStore,
    running: &Running,
) {
    let before = servers.clone();
    for action in actions {
        match action {
            Action::Record(record) => {
                if let Some(Err(why)) = running.ownerships().map(|seats| seats.raise_version()) {
                    error!("cannot record at the nodes that the state directory has changed: {why}");
                }
                if let Err(why) = store.save_primary(&node.name, &record) {
                    // Without the record, a later start might use the wrong server. But not acting would send writes to
                    // a server that is certainly wrong now.
                    error!(node = %node.name, primary = %record.primary, "cannot record the node's primary: {why}");
                }
            }
            Action::Primary { address, why } => {
                servers.primary = Some(address);
                let why = match why {
                    Why::Announced => "a Sentinel announced it",
                    Why::Demoted => "the old primary is a replica now",
                    Why::Silence => "the old primary is silent, and this server was promoted in its place",
                    Why::Accepted => "an operator accepted it",
                    Why::Renamed => "the name of the old primary resolves to it now",
                };
                match before.primary {
                    Some(old) => {
                        warn!(node = %node.name, %old, new = %address, reason = why, "node has another primary")
                    }
                    None => tracing::info!(node = %node.name, primary = %address, reason = why, "node has a primary"),
                }
            }
            Action::Readable { replicas, primary_is_nearest } => {
                servers.readable = replicas;
                servers.primary_is_nearest = primary_is_nearest;
            }
            Action::Unproven { address } => warn!(
                node = %node.name, %address,
                "a server claims to be a primary, but nothing shows that it was promoted to replace ours: it is not followed. \
                 To follow it, run `switchyard nodes accept` with the node's name: writes that it does not have are then lost"
            ),
        }
    }
    if *servers != before {
        running.with(|router| router.set_servers(node.node, Some(servers.clone())));
    }
}
