//! The data plane: one worker thread per core, each with its own listener, clients, and connections to the nodes.
//!
//! [`Router::start`] starts the workers. Later changes arrive through [`Router::publish`] and [`Router::reconfigure`],
//! observations are read through [`Router::status`] and [`Router::metrics`]. Routing decisions are in
//! `switchyard_policy`; this crate moves bytes, preserves order, and tracks commands in flight.
//!
//! Deliberately absent: locks on the path of a command, the origin of topology changes, HTTP, files.

mod away;
mod busy;
mod cluster;
mod colocate;
mod command_reply_cache;
mod config_set;
mod connections;
mod exclusive_bounds;
mod fences;
mod function_turns;
mod functions_dump;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod handover;
mod hot_copies;
mod lane;
mod library_checks;
mod limits;
mod listener;
mod lock;
mod lua;
mod member_replicas;
mod memory;
mod metrics;
mod mover;

mod opaque;
pub mod open_files;
mod operator;
mod ownership;
mod poll;
mod publication;
mod pubsub;
mod reigns;
mod script_argument;
mod scripts;
mod settings;
mod shared;
mod single_node_usage;
mod slab;
mod slow_log;
mod sync;
mod sys;
mod tap;
mod telemetry;
mod threads;
mod tls;
mod used_together;
mod users;
mod wait_queues;
mod worker;

pub use cluster::ClusterMap;
pub use colocate::{ColocatePort, ColocateRequest};
pub use config_set::allows_config_set;
pub use fences::foreign_connections;
pub use function_turns::CopyTurn;
pub use limits::{KEY_RATE_MAX, KeyLimit};
pub use listener::{ListeningSockets, StartError, could_listen};
pub use memory::heap_used;
pub use metrics::{Traffic, Waits, WriteRefusal};
pub use mover::{
    BigKey, BigKeys, Done, Holds, Host, LateKeys, MoveEnd, MoveProgress, MoveTask, MoveTotals, UserRequest,
    may_be_only_copies,
};
pub use operator::{OperatorCommand, OperatorPort};
pub use ownership::{
    Admission, EarlierRouters, FleetOwnership, parse_record, query_of_site, refusal_reason, site_of_record_user,
};
pub use settings::{
    Cluster, CrossSlot, HotCopies, KnownProcess, ListenAddress, ListenerSettings, NodeAccess, OnDataLoss, OnMissed,
    Ports, Reads, ReplicaMember, Reports, RuntimeSettings, Secret, Servers, Settings, Telemetry,
};
pub use single_node_usage::{Limit, Limited};
pub use sys::CountedHeap;
pub use tap::{Outcome, SentCommand, Tap};
pub use threads::{Repeating, Threads};
pub use tls::{KEY_KINDS, NodeTls, ServerTls, node_failure};
pub use users::{Bounds, RuleError, User, Users, hash_password};
pub use worker::spans_slots;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use switchyard_policy::cluster::{Member, Shard, ViewError};
use switchyard_policy::data_loss::{Holdings, Sent};
use switchyard_policy::hot_copies::Discarded;
use switchyard_policy::load::SlotCount;
use switchyard_policy::migration::{Fingerprinter, Process};
use switchyard_policy::telemetry::HotNode;
use switchyard_policy::together::Groups;
use switchyard_policy::topology::{MoveId, NodeId, Slot, Topology};
use switchyard_resp::command::CommandTable;

use crate::away::Away;
use crate::listener::Listening;
use crate::lock::lock;
use crate::metrics::{Counter, HotCounters, NodeCounters};
use crate::metrics::{NodeScrape, Scrape};
use crate::shared::{NodeFacts, RoutingSnapshot, Shared};
use crate::worker::Worker;
pub use lua::is_wrapped_library as is_checked_library;

/// Connectivity of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Link {
    /// Connected and replying.
    Up,
    /// No worker has a connection yet.
    Connecting,
    /// The last attempt failed, for this reason.
    Down(String),
}

/// State of a node, aggregated over all workers.
#[derive(Clone, Debug)]
pub struct NodeStatus {
    /// Node id.
    pub id: NodeId,
    /// Address as written in the configuration.
    pub name: String,
    /// Connectivity.
    pub link: Link,
    /// Connected address. For a replicated node, the address of its primary.
    pub address: Option<SocketAddr>,
    /// `run_id` of the server process, once known. Changes with a restart.
    pub run_id: Option<String>,
    /// `redis` or `valkey`, with its version, once known ("redis 7.0.15").
    pub version: Option<String>,
    /// Commands sent since the start.
    pub requests: u64,
    /// Error replies and failures since the start.
    pub errors: u64,
    /// Commands sent and not yet answered.
    pub in_flight: u64,
    /// Time since the oldest slow command in flight was sent.
    pub slow_for: Option<Duration>,
    /// Refused writes since the start, by [`WriteRefusal::ALL`].
    pub refusals: [u64; WriteRefusal::ALL.len()],
    /// Primary and replicas, for a replicated node.
    pub servers: Option<Servers>,
}

/// State of the router.
#[derive(Clone, Debug)]
pub struct Status {
    /// Epoch of the topology that every worker has adopted.
    pub epoch: u64,
    /// Clients connected now.
    pub clients: u64,
    /// Commands answered since the start.
    pub commands: u64,
    /// Time since the start.
    pub uptime: Duration,
    /// Nodes by number.
    pub nodes: Vec<NodeStatus>,
    /// Commands that only work because there is a single node.
    pub limited: Vec<Limited>,
}

/// State of hot copies.
#[derive(Clone, Debug)]
pub struct HotCopiesStatus {
    /// Whether hot copies are enabled by the settings.
    pub is_on: bool,
    /// Whether an operator has disabled hot copies.
    pub is_suspended: bool,
    /// Commands answered from copies since the start.
    pub hits: u64,
    /// Fills requested from nodes.
    pub fills: u64,
    /// Discarded fills by reason.
    pub discarded: Vec<(Discarded, u64)>,
    /// Invalidations received from nodes.
    pub invalidations: u64,
    /// Number of copies, over all workers.
    pub copies: u64,
    /// Size of all copies, bytes.
    pub bytes: u64,
    /// Number of cacheable keys.
    pub keys: u64,
    /// Nodes that do not support copies, by name, with reasons.
    pub refused: BTreeMap<String, String>,
}

/// Result of a drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drained {
    /// Clients disconnected at the bound with commands in flight.
    pub cut: u64,
}

/// A running router. Dropping it stops it at once; [`Router::drain`] stops it gracefully.
#[derive(Debug)]
pub struct Router {
    shared: Arc<Shared>,
    addresses: Vec<SocketAddr>,
    listeners: Vec<ListenAddress>,
    threads: Vec<JoinHandle<()>>,
    /// Thread that chooses the keys of hot copies.
    chooser: Option<JoinHandle<()>>,
}

impl Router {
    /// Binds the addresses and starts the workers. On return the data port accepts commands; connections to nodes are
    /// established in the background.
    ///
    /// # Errors
    /// If an address cannot be bound, or the system refuses a thread or descriptor.
    pub fn start(settings: Settings, topology: Arc<Topology>) -> Result<Router, StartError> {
        Self::start_with(settings, topology, Vec::new(), true)
    }

    /// Like [`Router::start`], with the listening sockets of another process, which still accepts from them. Other
    /// addresses are bound. Clients are accepted after [`Router::open`].
    ///
    /// # Errors
    /// As for [`Router::start`], and if a socket cannot be used.
    pub fn start_closed(
        settings: Settings,
        topology: Arc<Topology>,
        inherited: Vec<ListeningSockets>,
    ) -> Result<Router, StartError> {
        Self::start_with(settings, topology, inherited, false)
    }

    fn start_with(
        settings: Settings,
        topology: Arc<Topology>,
        inherited: Vec<ListeningSockets>,
        is_open: bool,
    ) -> Result<Router, StartError> {
        let workers = settings.workers.max(1);
        let mut bound = listener::bind(&settings.listen, workers, inherited)?;
        let listeners = std::mem::take(&mut bound.addresses);
        let addresses: Vec<SocketAddr> = listeners
            .iter()
            .filter_map(|address| match address {
                ListenAddress::Tcp(address) => Some(*address),
                ListenAddress::Unix { .. } => None,
            })
            .collect();
        let port = addresses.first().map_or(0, SocketAddr::port);
        let listeners_read_replicas =
            settings.listen.iter().any(|l| l.reads.is_some_and(|reads| reads != Reads::Primary));
        let routing = RoutingSnapshot {
            topology,
            configured_users: settings.live.users.clone(),
            live: Arc::new(settings.live),
            overrides: Arc::default(),
            commands: Arc::new(CommandTable::builtin()),
            servers: Arc::new(settings.servers),
            moves: Arc::default(),
            held: settings.held_reason.map(Arc::from),
        };
        let shared = Shared::new(
            workers,
            routing,
            port,
            settings.site,
            settings.ownership,
            listeners_read_replicas,
            settings.batched_sends,
        )?;
        let listening = Listening::new(bound, is_open);
        let shared = shared.with_ports(settings.ports).with_cluster(settings.cluster_map).with_listening(listening);
        let shared = Arc::new(shared);
        lock(&shared.nodes).extend(settings.processes.into_iter().map(|(id, process)| (id, NodeFacts::known(process))));
        let processors = if settings.pin { processors() } else { Vec::new() };
        let mut router = Router { shared: shared.clone(), addresses, listeners, threads: Vec::new(), chooser: None };
        for index in 0..workers {
            let worker = Worker::new(index, shared.clone(), shared.listening.of_worker(index)?)?;
            let processor = (!processors.is_empty()).then(|| processors[index % processors.len()]);
            let shared = shared.clone();
            let thread = std::thread::Builder::new().name(format!("worker-{index}")).spawn(move || {
                let _account = memory::Account::open();
                if let Some(processor) = processor {
                    pin(processor);
                }
                run_worker(worker, index, &shared);
            })?;
            router.threads.push(thread);
        }
        let thread = settings.threads.spawn("hot-copies", move || hot_copies::coordinate(&shared))?;
        router.chooser = Some(thread);
        Ok(router)
    }

    /// IP addresses of the listeners, with the port chosen by the system for port 0.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// All listeners, in the order of the settings.
    pub fn listeners(&self) -> &[ListenAddress] {
        &self.listeners
    }

    /// Makes every worker adopt a newer topology. An older or equal epoch is ignored.
    pub fn publish(&self, topology: Arc<Topology>) {
        self.shared.change_routing(|routing| {
            let newer = topology.epoch() > routing.topology.epoch();
            RoutingSnapshot { topology: if newer { topology } else { routing.topology.clone() }, ..routing.clone() }
        });
    }

    /// Publishes a report of a member of the cluster. `access`: access to every reported primary. Returns whether
    /// anything has changed.
    ///
    /// # Errors
    /// If the report is not usable.
    pub fn adopt_shards(&self, shards: &[Shard], access: &BTreeMap<Member, NodeAccess>) -> Result<bool, ViewError> {
        self.shared.adopt_shards(shards, access)
    }

    /// Publishes a member of the cluster that owns no slots, as the target of a migration. Returns whether anything has
    /// changed.
    pub fn adopt_member(&self, member: &Member, access: NodeAccess) -> bool {
        self.shared.adopt_member(member, access)
    }

    /// Publishes the servers of a replicated node to the workers. They leave an old primary at once: commands in flight
    /// there fail, and no further command is sent to it. The new primary is used after all workers have left, so that
    /// its replies are visible to every later read. `None`: the node has no replicas any more, and its address is in
    /// [`NodeAccess`].
    pub fn set_servers(&self, node: NodeId, servers: Option<Servers>) {
        self.shared.change_servers(|all| {
            match servers {
                Some(servers) => all.insert(node, servers),
                None => all.remove(&node),
            };
        });
    }

    /// The `run_id` in INFO replies of this router.
    pub fn run_id(&self) -> &str {
        &self.shared.incarnation
    }

    /// Minimum number of databases that clients have seen.
    pub fn databases(&self) -> u32 {
        self.shared.databases()
    }

    /// Accepts a node that returned without its keys (`nodes.on-data-loss`); it serves from the next attempt to
    /// connect. Applies to this loss only. Returns false if the node is not held, `None` if no node has this name.
    pub fn accept_empty(&self, node: &str) -> Option<bool> {
        let routing = self.shared.routing();
        let id = routing.topology.nodes().find(|known| known.name == node)?.id;
        Some(self.shared.with_facts(id, |facts| {
            facts.accepted |= facts.is_held;
            facts.is_held
        }))
    }

    /// Maximum time until a reachable node is connected again. At most 30 seconds.
    pub fn timeout(&self) -> Duration {
        let live = &self.shared.routing().live;
        (live.reconnect_backoff_max + live.connect_timeout + Duration::from_secs(2)).min(Duration::from_secs(30))
    }

    /// Whether every worker is connected to a node, for both protocol versions. False if no node has this name.
    pub fn is_served(&self, node: &str) -> bool {
        let routing = self.shared.routing();
        let known = routing.topology.nodes().find(|known| known.name == node);
        known.is_some_and(|known| {
            self.shared
                .counters
                .iter()
                .map(|worker| worker.node(known.id))
                .all(|node| node.connections.get() > 0 && node.mains_down.get() == 0)
        })
    }

    /// Returns the nodes in use, each with up to `keys` of its hottest keys. From a sample that is at most a second
    /// old, weighted over the last seconds ([`switchyard_policy::telemetry`]).
    pub fn hot_keys(&self, keys: usize) -> Vec<HotNode> {
        self.shared.board.nodes(keys)
    }

    /// State of hot copies.
    pub fn hot_copies(&self) -> HotCopiesStatus {
        let sum =
            |of: fn(&HotCounters) -> &Counter| self.shared.counters.iter().map(|worker| of(&worker.hot).get()).sum();
        let routing = self.shared.routing();
        let name = |node: NodeId| routing.topology.node(node).map(|node| node.name.clone());
        let discarded =
            |why: &Discarded| self.shared.counters.iter().map(|worker| worker.hot.discarded[*why as usize].get()).sum();
        HotCopiesStatus {
            is_on: routing.live.hot_copies.is_on,
            is_suspended: self.shared.hot.is_suspended(),
            hits: sum(|hot| &hot.hits),
            fills: sum(|hot| &hot.fills),
            discarded: Discarded::ALL.iter().map(|why| (*why, discarded(why))).collect(),
            invalidations: sum(|hot| &hot.invalidations),
            copies: sum(|hot| &hot.copies),
            bytes: sum(|hot| &hot.bytes),
            keys: self.shared.hot.keys(),
            refused: self
                .shared
                .hot
                .refusals()
                .into_iter()
                .filter_map(|(node, why)| Some((name(node)?, why)))
                .collect(),
        }
    }

    /// Suspends or resumes hot copies on all workers at once. Returns whether the state changed.
    pub fn suspend_hot_copies(&self, is_suspended: bool) -> bool {
        self.shared.hot.suspend(is_suspended)
    }

    /// Invalidates all copies, or the copies of one key, on all workers at once.
    pub fn evict_hot_copies(&self, key: Option<&[u8]>) {
        match key {
            Some(key) => self.shared.hot.invalidate_key(self.shared.board.fingerprints.of(key).0 as u64),
            None => self.shared.hot.invalidate_all(),
        }
    }

    /// Facts about the nodes' processes that a later run of the router needs, by node name.
    pub fn processes(&self) -> BTreeMap<String, KnownProcess> {
        let routing = self.shared.routing();
        let known = routing.topology.nodes().filter_map(|node| {
            let sent = self.shared.changes_sent(node.id);
            self.shared.with_facts(node.id, |facts| {
                let run_id = facts.run_id.as_deref()?.to_owned();
                let data = facts.data.to_know(sent);
                let NodeFacts { persists, is_held, is_marked, .. } = *facts;
                Some((
                    node.name.clone(),
                    KnownProcess { run_id, data, persists, is_held, has_ownership_record: is_marked },
                ))
            })
        });
        known.collect()
    }

    /// Number of commands sent to a node that may change keys. Read it before querying the node's data.
    pub fn changes_sent(&self, node: NodeId) -> Sent {
        self.shared.changes_sent(node)
    }

    /// Stores a node's INFO reply for clients that request it while the node is slow to reply.
    pub fn note_info(&self, node: NodeId, text: &str) {
        self.shared.with_facts(node, |facts| facts.info = Some(text.as_bytes().into()));
    }

    /// Records the amount of data of a node's process, and whether it persists them (`None`: unchanged as far as
    /// known). `sent`: [`Router::changes_sent`] before the query.
    pub fn note_data(&self, node: NodeId, run_id: &str, holdings: Holdings, persists: Option<bool>, sent: Sent) {
        self.shared.with_facts(node, |facts| facts.note_data(run_id, holdings, persists, sent));
    }

    /// Returns the nodes that are not served because they returned without their data, with reasons.
    pub fn held_nodes(&self) -> BTreeMap<NodeId, String> {
        let routing = self.shared.routing();
        let why = |node: NodeId| {
            self.shared.with_facts(node, |facts| {
                (facts.is_held && !facts.accepted).then(|| facts.failure.clone().unwrap_or_default())
            })
        };
        routing.topology.nodes().filter_map(|node| Some((node.id, why(node.id)?))).collect()
    }

    /// Prevents the use of all nodes, for this reason. `None`: they are used from their next attempts to connect.
    pub fn hold(&self, why: Option<&str>) {
        self.shared.change_routing(|routing| RoutingSnapshot { held: why.map(Arc::from), ..routing.clone() });
    }

    /// Shows a tap every command with keys, from the next snapshot change of each worker on. Only the first tap counts.
    pub fn tap(&self, tap: Arc<dyn Tap>) {
        // A second tap is a caller's mistake without effect.
        let _ = self.shared.tap.set(tap);
        self.shared.change_routing(RoutingSnapshot::clone);
    }

    /// Makes every worker adopt new settings. Changes by CONFIG SET are kept. Connections to nodes with changed
    /// credentials are replaced; a changed address applies to new connections. Users with unchanged configuration stay
    /// as they are, because clients may have changed them since.
    pub fn reconfigure(&self, live: RuntimeSettings) {
        self.shared.change_routing(|routing| routing.reconfigured(live, routing.overrides.clone()));
    }

    /// Sets the address of a node's name for new connections. On an error the node keeps its address. The servers of a
    /// replicated node are not affected ([`Router::set_servers`]). Returns whether anything changed.
    pub fn set_resolved_address(&self, node: NodeId, found: Result<SocketAddr, String>) -> bool {
        let with = |routing: &RoutingSnapshot| {
            let access = routing.live.nodes.get(&node)?;
            let (address, unresolved) = match &found {
                Ok(address) => (Some(*address), None),
                Err(why) => (access.address, access.address.is_none().then(|| why.clone())),
            };
            let is_taken = routing
                .live
                .nodes
                .iter()
                .any(|(other, known)| *other != node && address.is_some() && known.address == address);
            if is_taken || (access.address, &access.unresolved) == (address, &unresolved) {
                return None;
            }
            let mut live = (*routing.live).clone();
            live.nodes.insert(node, NodeAccess { address, unresolved, ..access.clone() });
            Some(RoutingSnapshot { live: Arc::new(live), ..routing.clone() })
        };
        if with(&self.shared.routing()).is_none() {
            return false;
        }
        self.shared.change_routing(|routing| with(routing).unwrap_or_else(|| routing.clone()));
        true
    }

    /// Discards changes by CONFIG SET and applies these settings. Returns false if there were no changes.
    pub fn discard_config_set(&self, live: RuntimeSettings) -> bool {
        let had_any = !self.shared.routing().overrides.is_empty();
        if had_any {
            self.shared.change_routing(|routing| routing.reconfigured(live, Arc::default()));
        }
        had_any
    }

    /// The active users, and the users as last configured.
    pub fn users(&self) -> (Arc<Users>, Arc<Users>) {
        let routing = self.shared.routing();
        (routing.live.users.clone(), routing.configured_users.clone())
    }

    /// Replaces the active users if they still equal `before`. `configured`: also replaces the configured users.
    /// Returns false, without a change, otherwise.
    pub fn replace_users(&self, before: &Arc<Users>, after: &Arc<Users>, configured: bool) -> bool {
        let mut done = false;
        self.shared.change_routing(|routing| {
            done = Arc::ptr_eq(&routing.live.users, before);
            if !done {
                return routing.clone();
            }
            let live = Arc::new(RuntimeSettings { users: after.clone(), ..(*routing.live).clone() });
            let configured_users = if configured { after.clone() } else { routing.configured_users.clone() };
            RoutingSnapshot { live, configured_users, ..routing.clone() }
        });
        done
    }

    /// The drain barrier: no command sent under an epoch older than the returned one is still in flight. A command
    /// leaves flight with its reply, with a node's confirmation that the connection is closed, or with the end of the
    /// node's process.
    pub fn drained_epoch(&self) -> u64 {
        self.shared.drained.oldest()
    }

    /// The drain barrier of one node, for moves: whether every worker has adopted the topology of this epoch, and no
    /// command sent to the node under an older one is still in flight.
    pub fn drained_source(&self, epoch: u64, node: NodeId) -> bool {
        self.shared.want_drained(epoch);
        self.shared.drained_source(epoch, node)
    }

    /// The drain barrier of an unreachable node: its commands may still be executed if it returns, but no client
    /// receives a reply to them any more.
    pub fn drained_lost_node(&self, epoch: u64, node: NodeId) -> bool {
        self.shared.want_drained(epoch);
        self.shared.drained_of_the_lost(epoch, node)
    }

    /// Returns a turn to copy functions between nodes. Clients cannot change functions until it is dropped. The copy
    /// may start when earlier changes have ended ([`CopyTurn::is_alone`]). `None`: another copy is in progress.
    pub fn begin_copy_of_functions(&self) -> Option<CopyTurn> {
        self.shared.functions.begin_copy()
    }

    /// Records a connection without a reply that was storing functions. The turn lasts until its end is confirmed.
    pub fn note_unconfirmed_functions(&self, node: NodeId, connection: Process, turn: CopyTurn) {
        self.shared.fences.add_broken_with_functions(node, connection, turn);
    }

    /// Returns all such connections. A caller must confirm their end.
    pub fn unconfirmed_functions(&self) -> Vec<(NodeId, Process)> {
        self.shared.fences.with_functions()
    }

    /// Records a connection that broke with commands in flight. No move relies on the node before its end is confirmed.
    pub fn note_broken_connection(&self, node: NodeId, connection: Process) {
        self.shared.fences.add_broken(node, connection);
    }

    /// Returns the connections to a node with an unconfirmed end, except those of workers.
    pub fn broken_connections(&self, node: NodeId) -> Vec<Process> {
        self.shared.fences.broken(node)
    }

    /// Whether the node has confirmed the end of every connection that broke with commands in flight.
    pub fn has_no_unconfirmed_connections(&self, node: NodeId) -> bool {
        self.shared.fences.broken(node).is_empty()
            && self.shared.counters.iter().all(|worker| worker.node(node).unconfirmed.get() == 0)
    }

    /// Removes a connection after its end is confirmed or its process has ended.
    pub fn note_confirmed_connection(&self, node: NodeId, connection: Process) {
        self.shared.fences.remove_broken(node, &[connection]);
    }

    /// Starts or resumes a move on its own thread, which reports to the order's [`Host`]; [`Host::remove_broken`] is
    /// the last call. If the router stops first, the journal has the state of the move.
    ///
    /// # Errors
    /// `InvalidInput` for a wrong order (missing node, slots of another owner), `AlreadyExists` if this move is
    /// running, or an error of the system.
    pub fn begin_move(&self, task: MoveTask) -> io::Result<()> {
        mover::begin(&self.shared, task)
    }

    /// Starts to record keys that clients write in these slots of an ejected node, from the next epoch on. If the node
    /// returns as the same process, it can keep its other keys.
    pub fn note_slots_ejected(&self, node: NodeId, slots: &[Slot], fingerprints: Fingerprinter) {
        let facts = |facts: &mut NodeFacts| facts.run_id.clone().filter(|_| !facts.is_held);
        let process = self.shared.with_facts(node, facts);
        let process = process.as_deref();
        self.shared.change_moves(|moves| {
            let before = moves.away.iter().position(|away| away.node == node).map(|at| moves.away.remove(at));
            let away = before.map_or_else(|| Away::new(node, process, fingerprints), |before| Away::clone(&before));
            moves.away.push(Arc::new(away.with(slots, process)));
        });
    }

    /// Makes WAIT confirm no earlier write to an ejected node: other nodes will serve its slots without its keys. Call
    /// it when clients no longer receive replies of the node for these slots ([`Router::drained_lost_node`]), so that
    /// every write there was recorded before.
    pub fn note_keys_left_behind(&self, node: NodeId) {
        self.shared.reigns.begin(node);
    }

    /// Ends the record of keys written while a node was ejected.
    pub fn note_slots_returned(&self, node: NodeId) {
        if self.shared.routing().moves.away.iter().any(|away| away.node == node) {
            self.shared.change_moves(|moves| moves.away.retain(|away| away.node != node));
        }
    }

    /// Makes an ejected node lose all its keys at its next return, because an earlier return was interrupted.
    pub fn note_interrupted_return(&self, node: NodeId) {
        self.shared.routing().moves.away.iter().filter(|away| away.node == node).for_each(|away| away.note_any());
    }

    /// Database of clients that do not select one.
    pub fn own_database(&self) -> u32 {
        self.shared.routing().live.database
    }

    /// Progress of these moves, which run or have ended since the start. The oldest ended ones are unknown.
    pub fn progress_of(&self, ids: &[MoveId]) -> Vec<MoveProgress> {
        let moves: Vec<_> = {
            let all = lock(&self.shared.moves);
            ids.iter().filter_map(|id| all.get(id).cloned()).collect()
        };
        moves.iter().map(|m| m.progress()).collect()
    }

    /// Counts slots, keys, and bytes of values that the members of a cluster have moved by an order of this router.
    pub fn note_moved(&self, slots: u64, keys: u64, bytes: u64) {
        let mut moved = lock(&self.shared.moved);
        moved.slots += slots;
        moved.keys += keys;
        moved.bytes += bytes;
    }

    /// Records the current waits of clients as a baseline for later moves, whose goals `balanced` and `gentle` limit
    /// the increase. Call it about once a second. Without a baseline, a move first measures for half a second.
    pub fn note_waits(&self) {
        let moving = lock(&self.shared.moves).values().any(|m| lock(&m.progress).end.is_none());
        let mut lately = lock(&self.shared.recent_waits);
        if moving {
            lately.forget();
        } else {
            lately.note(Instant::now(), || Waits::so_far(&self.shared.counters));
        }
    }

    /// Closes connections that ended moves have left to later ones, if none has used them. Call it about once a second.
    pub fn close_unused_mover_connections(&self) {
        self.shared.checked_pairs.close_expired();
    }

    /// Steers a move. Returns false if it is not running.
    pub fn steer_move(&self, id: MoveId, steer: UserRequest) -> bool {
        let Some(found) = lock(&self.shared.moves).get(&id).cloned() else { return false };
        let under_way = lock(&found.progress).end.is_none();
        if under_way {
            found.notify(mover::MoverMessage::Steer(steer));
        }
        under_way
    }

    /// State of the router and its nodes.
    pub fn status(&self) -> Status {
        let routing = self.shared.routing();
        let nodes = routing.topology.nodes().map(|node| self.node_status(node.id, &node.name)).collect();
        let commands = self.shared.counters.iter().flat_map(|w| w.commands.iter()).map(Counter::get).sum();
        Status {
            epoch: routing.topology.epoch(),
            clients: self.shared.clients.load(Ordering::Relaxed) as u64,
            commands,
            uptime: self.shared.uptime(),
            nodes,
            limited: self.limited(),
        }
    }

    /// Returns a connection name that identifies the connection as this router's own. `what`: its purpose.
    pub fn connection_name(&self, what: &str) -> String {
        self.shared.connection_name(what)
    }

    /// Configured access to each node, with the currently resolved address.
    pub fn configured_access(&self) -> BTreeMap<NodeId, NodeAccess> {
        self.shared.routing().live.nodes.clone()
    }

    /// Settings that clients may change at all nodes (`nodes.config-set`).
    pub fn config_set(&self) -> Vec<String> {
        self.shared.routing().live.config_set.clone()
    }

    /// Current access to the primary of each node.
    pub fn node_access(&self) -> BTreeMap<NodeId, NodeAccess> {
        let routing = self.shared.routing();
        let mut nodes = routing.live.nodes.clone();
        for (id, servers) in routing.servers.iter() {
            if let (Some(access), Some(primary)) = (nodes.get_mut(id), servers.primary) {
                access.address = Some(primary);
            }
        }
        nodes
    }

    /// Estimated uses of the keys of each slot since the start, from a sample.
    pub fn slot_counts(&self) -> Vec<SlotCount> {
        self.shared.board.slots()
    }

    /// Whether one node has all keys, and so accepts every command.
    pub fn is_one_node(&self) -> bool {
        self.shared.routing().topology.only_node().is_some()
    }

    /// A sample of keys that clients use together although they are in several slots.
    pub fn used_together(&self) -> Groups {
        self.shared.used_together.groups()
    }

    /// Number of the placement rules, and whether an adoption is in progress: the checks of libraries depend on both.
    pub fn rules_in_force(&self) -> (u64, bool) {
        let topology = &self.shared.routing().topology;
        (topology.ruled().map_or(0, |ruled| ruled.number()), topology.is_adopting())
    }

    /// Returns a function library as it must be stored, with or without the router's check. `None` if it already is,
    /// `Err` with a reason if it cannot be.
    pub fn renewed_library(&self, code: &[u8]) -> Option<Result<Vec<u8>, String>> {
        let routing = self.shared.routing();
        lua::renewed_library(code, &routing.required_library_form(), &routing.commands)
    }

    /// Commands that only work because there is a single node.
    pub fn limited(&self) -> Vec<Limited> {
        self.shared.alone.all()
    }

    /// Counters of commands per node since the start. Not part of [`Router::status`], because only differences over
    /// time are meaningful.
    pub fn traffic(&self) -> BTreeMap<NodeId, Traffic> {
        let counters = |id| self.shared.counters.iter().map(|worker| worker.node(id)).collect::<Vec<_>>();
        self.shared.routing().topology.nodes().map(|node| (node.id, Traffic::of(&counters(node.id)))).collect()
    }

    fn node_status(&self, id: NodeId, name: &str) -> NodeStatus {
        let facts = self.shared.with_facts(id, |f| f.clone());
        let counters: Vec<Arc<NodeCounters>> = self.shared.counters.iter().map(|w| w.node(id)).collect();
        let sum = |counter: fn(&NodeCounters) -> u64| counters.iter().map(|c| counter(c)).sum::<u64>();
        let up = sum(|c| c.connections.get()) > 0;
        let slow_since_us = counters.iter().map(|c| c.slow_since_us.get()).filter(|since_us| *since_us > 0).min();
        NodeStatus {
            id,
            name: name.to_string(),
            link: match facts.failure {
                Some(why) if !up => Link::Down(why),
                _ if up => Link::Up,
                _ => Link::Connecting,
            },
            address: self.shared.routing().address_of(id, None),
            run_id: facts.run_id.as_deref().map(str::to_string),
            version: (!facts.version.is_empty()).then(|| format!("{} {}", facts.flavour, facts.version)),
            requests: sum(|c| c.classes.iter().map(|k| k.requests.get()).sum()),
            errors: sum(|c| c.classes.iter().map(|k| k.errors.get()).sum()),
            in_flight: sum(|c| c.in_flight.get()),
            slow_for: slow_since_us
                .map(|since_us| self.shared.uptime().saturating_sub(Duration::from_micros(since_us))),
            refusals: WriteRefusal::ALL
                .map(|refusal| counters.iter().map(|c| c.refusals[refusal as usize].get()).sum()),
            servers: self.shared.routing().servers.get(&id).cloned(),
        }
    }

    /// All metrics in Prometheus' text format.
    pub fn metrics(&self) -> String {
        let routing = self.shared.routing();
        let live = &routing.live;
        let mut scraped = lock(&self.shared.scraped);
        for node in routing.topology.nodes() {
            scraped.entry(node.id).or_insert_with(|| node.name.clone());
        }
        let before = |node: &switchyard_policy::topology::Node| {
            let same = scraped.iter().filter(|(id, name)| **id != node.id && **name == node.name);
            same.map(|(id, _)| *id).collect()
        };
        let node = |node: &switchyard_policy::topology::Node| NodeScrape {
            id: node.id,
            before: before(node),
            name: node.name.clone(),
            is_up: self.shared.counters.iter().any(|w| w.node(node.id).connections.get() > 0),
            slots: routing.topology.slots_of(node.id),
            placement_overrides: routing.topology.overrides_at(node.id),
            exclusive_bounds: self.shared.exclusive_bounds(node.id),
        };
        Scrape {
            workers: self.shared.counters.clone(),
            nodes: routing.topology.nodes().map(node).collect(),
            epoch: routing.topology.epoch(),
            uptime_s: self.shared.uptime().as_secs_f64(),
            memory: (heap_used(), live.memory_max),
            clients_max: live.max_clients,
            moved: *lock(&self.shared.moved),
            hot: (self.shared.hot.keys(), live.hot_copies.is_on && !self.shared.hot.is_suspended()),
            limited: self.limited(),
            exclusive_max: [live.large_connections_max, live.watch_connections_max, live.blocking_connections_max],
        }
        .text()
    }

    /// Stops accepting, waits up to `bound` for commands in flight, then stops the workers.
    pub fn drain(mut self, bound: Duration) -> Drained {
        self.shared.draining.store(true, Ordering::Release);
        self.shared.listening.close();
        self.shared.ring_all();
        let until = Instant::now() + bound;
        while Instant::now() < until && !self.threads.iter().all(JoinHandle::is_finished) {
            std::thread::sleep(Duration::from_millis(2));
        }
        self.stop();
        Drained { cut: self.shared.cut.load(Ordering::Relaxed) }
    }

    fn stop(&mut self) {
        self.shared.draining.store(true, Ordering::Release);
        self.shared.stop.store(true, Ordering::Release);
        self.shared.listening.close();
        self.shared.ring_all();
        for thread in self.threads.drain(..) {
            // A panicked worker has already logged the panic.
            let _ = thread.join();
        }
        self.shared.hot.stop();
        if let Some(chooser) = self.chooser.take() {
            let _ = chooser.join();
        }
        for mover in lock(&self.shared.moves).values() {
            mover.ring();
        }
        let movers = std::mem::take(&mut *lock(&self.shared.movers));
        for thread in movers {
            let _ = thread.join();
        }
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        self.stop();
        lock(&self.shared.scripts).clear();
    }
}

/// Runs a worker, and a replacement if it panics: a bug that one client can trigger must not stop the service of other
/// clients for longer than a reconnect.
fn run_worker(mut worker: Worker, index: usize, shared: &Arc<Shared>) {
    loop {
        let failed = match std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| worker.run())) {
            Ok(Ok(())) => return shared.publication.adopted(index, u64::MAX),
            Ok(Err(error)) => error.to_string(),
            Err(_) => {
                tracing::error!(
                    worker = index,
                    "a worker panicked: its clients are disconnected, and it restarts. This is a bug, please report it"
                );
                shared.forget_worker(index);
                let listeners = shared.listening.of_worker(index);
                match listeners.and_then(|listeners| Worker::new(index, shared.clone(), listeners)) {
                    Ok(next) => {
                        worker = next;
                        continue;
                    }
                    Err(error) => error.to_string(),
                }
            }
        };
        tracing::error!(worker = index, error = failed, "a worker stopped: the system refuses epoll or descriptors");
        shared.publication.adopted(index, u64::MAX);
        return;
    }
}

/// Returns the processors that this process may use.
fn processors() -> Vec<usize> {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else { return Vec::new() };
    (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect()
}

fn pin(processor: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(processor);
    if let Err(error) = rustix::thread::sched_setaffinity(None, &set) {
        tracing::warn!(processor, %error, "cannot pin a worker");
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;

    use super::*;

    pub(crate) fn ping(router: &Router) -> TcpStream {
        let mut stream = TcpStream::connect(router.addresses()[0]).expect("the router listens");
        stream.set_read_timeout(Some(Duration::from_secs(10))).expect("a timeout");
        stream.write_all(b"PING\r\n").expect("sent");
        let mut reply = [0; 7];
        stream.read_exact(&mut reply).expect("a reply");
        assert_eq!(&reply, b"+PONG\r\n");
        stream
    }

    pub(crate) fn settings() -> (Settings, Arc<Topology>) {
        let topology = Topology::even(&["127.0.0.1:1".to_string()]).expect("one node");
        let settings = Settings {
            listen: vec![ListenerSettings::tcp("127.0.0.1:0".parse().expect("address"))],
            workers: 1,
            pin: false,
            batched_sends: true,
            threads: Threads::default(),
            site: "test".to_owned(),
            ownership: None,
            servers: BTreeMap::new(),
            processes: BTreeMap::new(),
            held_reason: None,
            ports: Ports::default(),
            cluster_map: None,
            live: RuntimeSettings::default(),
        };
        (settings, Arc::new(topology))
    }

    #[test]
    fn worker_panic_disconnects_only_its_clients() {
        let (settings, topology) = settings();
        let router = Router::start(settings, topology).expect("starts");
        let mut client = ping(&router);
        router.shared.mailboxes[0].send(shared::Message::Panic);
        assert_eq!(client.read(&mut [0; 1]).expect("closed, not timed out"), 0);
        let _again = ping(&router);
        assert_eq!(router.status().clients, 1);
        assert_eq!(router.drain(Duration::from_secs(5)), Drained { cut: 0 });
    }
}
