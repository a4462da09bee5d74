//! State shared by the workers of a router. Not accessed on the path of a forwarded command: workers read one
//! generation number per turn, and their mailbox when they are woken.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::event::{EventfdFlags, eventfd};
use switchyard_policy::data_loss::{Data, Holdings, Sent};
use switchyard_policy::migration::published::Paper;
use switchyard_policy::migration::{Fingerprint, Side};
use switchyard_policy::routing::{Route, route};
use switchyard_policy::scan::{Scans, TICK_MS};
use switchyard_policy::topology::{MoveId, NodeId, Topology};
use switchyard_resp::command::CommandTable;

use crate::busy::Busy;
use crate::cluster::ClusterMap;
use crate::command_reply_cache::CommandReplyCache;
use crate::config_set::Overrides;
use crate::connections::Connections;
use crate::exclusive_bounds::ExclusiveBounds;
use crate::fences::Fences;
use crate::function_turns::FunctionTurns;
use crate::hot_copies::HotCopies;
use crate::lane::Lane;
use crate::library_checks::{Checked, LibraryChecks};
use crate::limits::Limits;
use crate::listener::Listening;
use crate::lock::lock;
use crate::lua::LibraryForm;
use crate::metrics::{RecentWaits, WorkerCounters};
use crate::mover::{CheckedPairs, Moved};
use crate::mover::{Moves, SharedMove, SharedTracker};
use crate::ownership::FleetOwnership;
use crate::publication::{DrainBarrier, OldestInFlight, Publication};
use crate::pubsub::Subscriptions;
use crate::reigns::ProcessReplacements;
use crate::scripts::Scripts;
use crate::settings::{CrossSlot, KnownProcess, Ports, Reads, RuntimeSettings, Servers};
use crate::single_node_usage::SingleNodeUsage;
use crate::slab::Handle;
use crate::slow_log::SlowLog;
use crate::tap::Tap;
use crate::telemetry::SharedBoard;
use crate::used_together::UsedTogether;
use crate::users::AclLog;
use crate::users::Users;
use crate::users::{Attempt, Logins};
use crate::wait_queues::WaitQueues;

/// Returns the Unix time in milliseconds.
pub(crate) fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

/// State that a worker adopts as a whole, at one epoch.
#[derive(Clone, Debug)]
pub(crate) struct RoutingSnapshot {
    pub(crate) topology: Arc<Topology>,
    /// Configured settings with `overrides` applied.
    pub(crate) live: Arc<RuntimeSettings>,
    /// Changes by CONFIG SET.
    pub(crate) overrides: Arc<Overrides>,
    pub(crate) commands: Arc<CommandTable>,
    /// Primary and replicas of replicated nodes.
    pub(crate) servers: Arc<BTreeMap<NodeId, Servers>>,
    /// Moves in progress, and their legs.
    pub(crate) moves: Arc<Moves>,
    /// Reason why no node may be used, if so.
    pub(crate) held: Option<Arc<str>>,
    /// Users as last configured. The active users (`live.users`) differ after `ACL SETUSER`.
    pub(crate) configured_users: Arc<Users>,
}

impl RoutingSnapshot {
    /// Whether keys of several slots are brought to one node for commands that need them there.
    pub(crate) fn colocates(&self) -> bool {
        self.live.cross_slot == CrossSlot::CoLocate && !self.topology.is_of_cluster()
    }

    /// Routes a command that needs one node, by the configuration.
    #[inline]
    pub(crate) fn route<'k>(&self, keys: impl Iterator<Item = &'k [u8]> + Clone) -> Route {
        match route(&self.topology, keys) {
            Route::Together(_) if !self.colocates() && self.topology.only_node().is_none() => Route::CrossSlot,
            route => route,
        }
    }

    /// Whether scripts and functions may use only declared keys. A single node has all keys, so no check is needed.
    pub(crate) fn checks_scripts(&self) -> bool {
        self.live.check_scripts && self.topology.only_node().is_none()
    }

    /// Returns the form of libraries that nodes must store.
    pub(crate) fn required_library_form(&self) -> LibraryForm {
        match self.live.check_scripts {
            true if self.checks_scripts() => LibraryForm::Checked(self.topology.ruled().cloned()),
            true => LibraryForm::Plain,
            false => LibraryForm::Any,
        }
    }

    /// Returns this snapshot with other configured settings. Users with unchanged configuration keep the changes by
    /// clients.
    pub(crate) fn reconfigured(&self, mut live: RuntimeSettings, overrides: Arc<Overrides>) -> Self {
        let configured_users = live.users.clone();
        if configured_users == self.configured_users {
            live.users = self.live.users.clone();
        }
        Self { live: Arc::new(overrides.over(live)), overrides, configured_users, ..self.clone() }
    }
}

/// State of the query for a node's command list.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Commands {
    #[default]
    Unknown,
    Requested,
    Known,
}

/// Facts about a node's server process.
#[derive(Clone, Debug, Default)]
pub(crate) struct NodeFacts {
    /// `run_id`. Changes with a restart.
    pub(crate) run_id: Option<Arc<str>>,
    /// `redis` or `valkey`.
    pub(crate) flavour: &'static str,
    pub(crate) version: String,
    /// Databases known to exist: SELECT below this number cannot fail.
    pub(crate) databases: u32,
    /// Redis version, or for Valkey the compatible Redis version.
    pub(crate) redis_version: String,
    /// Whether its command list has been compared with ours since it started.
    pub(crate) commands: Commands,
    /// Error of the last attempt to connect. `None` after a success.
    pub(crate) failure: Option<String>,
    /// Whether it does not support RESP3.
    pub(crate) translated: bool,
    /// Whether any attempt to connect has ended.
    pub(crate) tried: bool,
    /// Amount of data of this process.
    pub(crate) data: Data,
    /// Whether it persists its data.
    pub(crate) persists: bool,
    /// Last INFO reply of the health check.
    pub(crate) info: Option<Arc<[u8]>>,
    /// Whether this process stores the ownership record of the router.
    pub(crate) is_marked: bool,
    /// The node is not used, because another process without this data has replaced it.
    pub(crate) is_held: bool,
    /// An operator has accepted the loss.
    pub(crate) accepted: bool,
}

impl NodeFacts {
    /// Returns facts from an earlier run of the router.
    pub(crate) fn known(process: KnownProcess) -> Self {
        let KnownProcess { run_id, data, persists, is_held, has_ownership_record: is_marked } = process;
        Self { run_id: Some(run_id.into()), data: Data::known(data), persists, is_held, is_marked, ..Self::default() }
    }

    /// Records the amount of data of a process, if it is the present one. `persists`: `None` keeps the known value,
    /// because a node that refuses the query may persist its data as before.
    pub(crate) fn note_data(&mut self, run_id: &str, holdings: Holdings, persists: Option<bool>, sent: Sent) {
        if self.run_id.as_deref() == Some(run_id) {
            self.data.counted(holdings, unix_ms(), sent);
            self.persists = persists.unwrap_or(self.persists);
        }
    }
}

/// CLIENT PAUSE.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pause {
    /// Microseconds since the start of the router.
    pub(crate) until_us: u64,
    /// Pause all commands, not only writes.
    pub(crate) all: bool,
}

/// Message to a worker.
#[derive(Debug)]
pub(crate) enum Message {
    /// Describe matching clients (CLIENT LIST) for the gather of worker `from`.
    List { filter: Arc<ClientFilter>, from: usize, gather: Handle, part: u32 },
    /// Close matching clients (CLIENT KILL).
    Kill { filter: Arc<ClientFilter>, from: usize, gather: Handle, part: u32 },
    /// End the wait of this client (CLIENT UNBLOCK), with an error or like a timeout.
    Unblock { id: u64, error: bool, from: usize, gather: Handle, part: u32 },
    /// Adopt the list of monitors and the pause, then reply; if `settled`, after the replies to all earlier commands.
    Refresh { from: usize, gather: Handle, part: u32, settled: bool },
    /// Reply whether this client is yours, for the gather of worker `from`.
    Find { id: u64, from: usize, gather: Handle, part: u32 },
    /// Invalidation for the receiving worker's client `to`; `source` of worker `from` redirects its own there. `None`:
    /// all keys.
    Invalidate { to: Handle, from: usize, source: Handle, keys: Option<Box<[u8]>> },
    /// The redirection target does not exist.
    RedirectBroken { source: Handle },
    /// Lines for the receiving worker's clients in MONITOR.
    Lines(Arc<[u8]>),
    /// Reply of a worker, as RESP.
    Answer { gather: Handle, part: u32, reply: Vec<u8> },
    /// This client of yours may now wait at a node ([`crate::wait_queues`]).
    WaitTurn { client: Handle },
    /// Reissue the blocking command of this client, behind another client's command.
    Recall { client: Handle },
    /// Memory is above the limit, and you have the biggest client.
    Evict,
    /// Keys of a leg were committed; clients may wait for them.
    Committed,
    /// Fail clients that wait for these keys of a move (`None`: any) with this error.
    Refused { move_id: MoveId, keys: Option<Arc<[Fingerprint]>>, error: Arc<str> },
    /// The keys needed by command `number` of this client are together, or (with the reason) will not be soon.
    ColocateAnswer { client: Handle, number: u32, refusal: Option<Arc<str>> },
    /// The mover has quiesced for this ticket.
    Quiesced { move_id: MoveId, ticket: u64 },
    /// Other workers have clients waiting for an exclusive connection of this kind to the node. Close unused ones.
    CloseUnused { node: NodeId, lane: Lane },
    /// An exclusive connection to the node may be available.
    ConnectionAvailable { node: NodeId },
    /// Result of a password check.
    Login { client: Handle, attempt: Attempt },
    /// Result of a check of libraries, for command `number` of this client.
    LibrariesChecked { client: Handle, number: u32, result: Checked },
    /// Accept clients from the sockets in [`Shared::listening`] only, and report when this is in force.
    Listeners { done: Sender<std::io::Result<()>> },
    #[cfg(test)]
    Panic,
}

/// Client types of CLIENT LIST and CLIENT KILL `TYPE`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ClientType {
    Normal,
    Pubsub,
    /// Replicas and primaries. The router has no such clients.
    Server,
}

/// Selection of clients for CLIENT LIST and CLIENT KILL.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClientFilter {
    pub(crate) ids: Option<Vec<u64>>,
    pub(crate) addr: Option<String>,
    pub(crate) laddr: Option<String>,
    pub(crate) user: Option<String>,
    pub(crate) client_type: Option<ClientType>,
    /// The calling client, if it must be skipped (`SKIPME yes`).
    pub(crate) skip: Option<u64>,
    pub(crate) max_age_s: Option<u64>,
}

#[derive(Debug)]
pub(crate) struct Mailbox {
    messages: Mutex<Vec<Message>>,
    pub(crate) wake: OwnedFd,
}

impl Mailbox {
    pub(crate) fn send(&self, message: Message) {
        lock(&self.messages).push(message);
        self.ring();
    }

    /// Wakes the worker without a message: it checks the generation and the flags.
    pub(crate) fn ring(&self) {
        // Fails only if the counter is full, and then the worker is already awake.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    pub(crate) fn take(&self) -> Vec<Message> {
        let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
        std::mem::take(&mut lock(&self.messages))
    }
}

#[derive(Debug, Default)]
pub(crate) struct Mailboxes(Vec<Mailbox>);

impl Mailboxes {
    pub(crate) fn new(workers: usize) -> std::io::Result<Self> {
        let mailbox = |_| {
            let wake = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
            Ok(Mailbox { messages: Mutex::default(), wake })
        };
        (0..workers).map(mailbox).collect::<std::io::Result<_>>().map(Self)
    }

    pub(crate) fn send(&self, worker: usize, message: Message) {
        self.0[worker].send(message);
    }
}

impl std::ops::Deref for Mailboxes {
    type Target = [Mailbox];

    fn deref(&self) -> &[Mailbox] {
        &self.0
    }
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) started: Instant,
    /// Identifies this router, over all its runs, in CLIENT LIST replies of nodes.
    pub(crate) site: String,
    /// Identifies this run there.
    pub(crate) incarnation: String,
    /// Ownership record at the nodes, so that one router at a time serves them.
    pub(crate) ownership: Option<Arc<FleetOwnership>>,
    pub(crate) fences: Arc<Fences>,
    /// Connections of ended moves.
    pub(crate) checked_pairs: CheckedPairs,
    /// Counts processes that have served the nodes.
    pub(crate) reigns: ProcessReplacements,
    pub(crate) publication: Publication<RoutingSnapshot>,
    pub(crate) nodes: Mutex<BTreeMap<NodeId, NodeFacts>>,
    pub(crate) scripts: Mutex<Scripts>,
    pub(crate) slow_log: Mutex<SlowLog>,
    pub(crate) acl_log: Mutex<AclLog>,
    /// Errors by code at the last CONFIG RESETSTAT. INFO subtracts them, while metrics never decrease.
    pub(crate) errors_before: Mutex<BTreeMap<String, u64>>,
    pub(crate) subscriptions: Subscriptions,
    /// Clients in MONITOR: worker and handle.
    pub(crate) monitors: Mutex<Vec<(usize, Handle)>>,
    pub(crate) pause: Mutex<Option<Pause>>,
    pub(crate) connections: Connections,
    pub(crate) wait_queues: WaitQueues,
    /// Cached replies to COMMAND.
    pub(crate) command_replies: CommandReplyCache,
    /// Nodes that execute slow commands.
    pub(crate) busy: Busy,
    /// Commands that only work because there is a single node.
    pub(crate) alone: SingleNodeUsage,
    /// Keys used together although they are in several slots.
    pub(crate) used_together: UsedTogether,
    exclusive_bounds: Mutex<BTreeMap<NodeId, Arc<ExclusiveBounds>>>,
    pub(crate) mailboxes: Arc<Mailboxes>,
    pub(crate) listening: Listening,
    pub(crate) logins: Arc<Logins>,
    pub(crate) library_checks: LibraryChecks,
    pub(crate) limits: Limits,
    pub(crate) counters: Vec<Arc<WorkerCounters>>,
    /// Nodes seen by scrapes, including removed ones: a node that joins again gets a new id, but its counters continue.
    /// Bounded like the ids.
    pub(crate) scraped: Mutex<BTreeMap<NodeId, String>>,
    pub(crate) clients: AtomicUsize,
    pub(crate) next_client_id: AtomicU64,
    /// Held by the worker that disconnects clients because of `memory-max`.
    pub(crate) evicting: Mutex<()>,
    pub(crate) drained: DrainBarrier,
    /// Tracker shared by moves with published protocols, while there are any.
    tracker: Mutex<Weak<SharedTracker>>,
    /// Moves since the start, including ended ones.
    pub(crate) moves: Mutex<BTreeMap<MoveId, Arc<SharedMove>>>,
    pub(crate) moved: Mutex<Moved>,
    /// Counts of keys and slots from all workers.
    pub(crate) board: SharedBoard,
    pub(crate) hot: HotCopies,
    /// Lock order: after `routing`.
    pub(crate) scans: Mutex<Scans>,
    started_tick: u64,
    /// Threads of movers.
    pub(crate) movers: Mutex<Vec<JoinHandle<()>>>,
    /// Waits of clients in times without a move.
    pub(crate) recent_waits: Mutex<RecentWaits>,
    /// Set by `drain`: stop accepting and reading, finish commands in flight.
    pub(crate) draining: AtomicBool,
    /// Set at the bound of a drain: close all remaining clients.
    pub(crate) stop: AtomicBool,
    /// Clients disconnected at the bound.
    pub(crate) cut: AtomicU64,
    /// Client port, for INFO.
    pub(crate) port: u16,
    /// Whether clients of some listener may read from replicas.
    listeners_read_replicas: bool,
    /// Whether workers may send with io_uring.
    pub(crate) batched_sends: bool,
    /// Handlers of commands that workers do not execute.
    pub(crate) ports: Ports,
    /// Map of the cluster whose members the nodes are.
    pub(crate) cluster: Option<Arc<ClusterMap>>,
    quiesce_lock: Arc<Mutex<QuiesceLock>>,
    /// Turns of changing and copying functions.
    pub(crate) functions: FunctionTurns,
    /// Observer of all commands with keys.
    pub(crate) tap: OnceLock<Arc<dyn Tap>>,
}

/// Lock for operations that quiesce movers to access all keys, one at a time.
#[derive(Debug, Default)]
struct QuiesceLock {
    is_taken: bool,
    not_before: Option<Instant>,
}

/// Permission to quiesce movers and access all keys. Released on drop.
#[derive(Debug)]
pub(crate) struct QuiesceLockGuard(Arc<Mutex<QuiesceLock>>);

/// Minimum time for which movers run between two quiesces, so that frequent operations cannot starve a move.
const QUIESCE_REST: Duration = Duration::from_millis(50);

impl Drop for QuiesceLockGuard {
    fn drop(&mut self) {
        *lock(&self.0) = QuiesceLock { is_taken: false, not_before: Some(Instant::now() + QUIESCE_REST) };
    }
}

impl Shared {
    /// Last INFO reply of the node's health check.
    pub(crate) fn last_info(&self, node: NodeId) -> Option<Arc<[u8]>> {
        lock(&self.nodes).get(&node)?.info.clone()
    }

    pub(crate) fn with_ports(self, ports: Ports) -> Self {
        Self { ports, ..self }
    }

    pub(crate) fn with_listening(self, listening: Listening) -> Self {
        Self { listening, ..self }
    }

    pub(crate) fn with_cluster(self, cluster: Option<Arc<ClusterMap>>) -> Self {
        Self { cluster, ..self }
    }

    pub(crate) fn new(
        workers: usize,
        routing: RoutingSnapshot,
        port: u16,
        site: String,
        seat: Option<Arc<FleetOwnership>>,
        listeners_read_replicas: bool,
        batched_sends: bool,
    ) -> std::io::Result<Self> {
        let mailboxes = Arc::new(Mailboxes::new(workers)?);
        let epoch = routing.topology.epoch();
        let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let started_tick = since_epoch.as_millis() as u64 / TICK_MS;
        // Routers in front of one cluster have no terms, so each start has a random number.
        let random = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), since_epoch);
        Ok(Self {
            board: SharedBoard::default(),
            hot: HotCopies::new(workers),
            scans: Mutex::new(Scans::new(
                Arc::clone(&routing.topology),
                started_tick,
                seat.as_ref().map_or(random, |seat| seat.record().term),
            )),
            started_tick,
            started: Instant::now(),
            site,
            ownership: seat,
            fences: Arc::default(),
            checked_pairs: CheckedPairs::default(),
            reigns: ProcessReplacements::default(),
            incarnation: format!("{:x}-{:x}", std::process::id(), since_epoch.as_micros()),
            publication: Publication::new(routing, workers),
            nodes: Mutex::default(),
            scripts: Mutex::default(),
            slow_log: Mutex::default(),
            acl_log: Mutex::default(),
            subscriptions: Subscriptions::default(),
            monitors: Mutex::default(),
            pause: Mutex::default(),
            connections: Connections::default(),
            limits: Limits::default(),
            wait_queues: WaitQueues::default(),
            busy: Busy::default(),
            command_replies: CommandReplyCache::default(),
            alone: SingleNodeUsage::default(),
            used_together: UsedTogether::default(),
            exclusive_bounds: Mutex::default(),
            errors_before: Mutex::default(),
            logins: Arc::new(Logins::new(mailboxes.clone())),
            library_checks: LibraryChecks::default(),
            mailboxes,
            listening: Listening::default(),
            counters: (0..workers).map(|_| Arc::default()).collect(),
            scraped: Mutex::default(),
            clients: AtomicUsize::new(0),
            next_client_id: AtomicU64::new(1),
            evicting: Mutex::default(),
            drained: DrainBarrier::new(workers, epoch),
            tracker: Mutex::default(),
            moves: Mutex::default(),
            moved: Mutex::default(),
            movers: Mutex::default(),
            recent_waits: Mutex::default(),
            draining: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            cut: AtomicU64::new(0),
            port,
            listeners_read_replicas,
            batched_sends,
            ports: Ports::default(),
            cluster: None,
            quiesce_lock: Arc::default(),
            functions: FunctionTurns::default(),
            tap: OnceLock::new(),
        })
    }

    /// Returns the tracker shared by moves with published protocols. Created with the parameters of the first such
    /// move.
    pub(crate) fn tracker(&self, paper: &Paper) -> Arc<SharedTracker> {
        let mut known = lock(&self.tracker);
        known.upgrade().unwrap_or_else(|| {
            let tracker = Arc::new(SharedTracker::new(paper));
            *known = Arc::downgrade(&tracker);
            tracker
        })
    }

    /// Returns the name of a connection to a node. `what`: its purpose.
    pub(crate) fn connection_name(&self, what: impl std::fmt::Display) -> String {
        format!("switchyard-{}-{}-{what}", self.site, self.incarnation)
    }

    pub(crate) fn routing(&self) -> Arc<RoutingSnapshot> {
        self.publication.current()
    }

    /// Publishes the servers of nodes to the workers. A new primary is used after all workers have left the old one.
    pub(crate) fn change_servers(&self, change: impl FnOnce(&mut BTreeMap<NodeId, Servers>)) {
        let change = |routing: &RoutingSnapshot| {
            let mut servers = (*routing.servers).clone();
            change(&mut servers);
            RoutingSnapshot { servers: Arc::new(servers), ..routing.clone() }
        };
        self.publication.change_servers(change, |next| self.observe(next));
        self.ring_all();
    }

    /// Makes all workers close connections to processes that no longer serve the nodes.
    pub(crate) fn make_workers_leave_old_processes(&self) {
        self.publication.change_servers(RoutingSnapshot::clone, |next| self.observe(next));
        self.ring_all();
    }

    /// Whether some clients may read from replicas, if nodes have them.
    pub(crate) fn are_replicas_read(&self, live: &RuntimeSettings) -> bool {
        self.listeners_read_replicas || live.reads != Reads::Primary || live.users.read_replicas()
    }

    /// Replaces the snapshot and wakes all workers.
    pub(crate) fn change_routing(&self, change: impl FnOnce(&RoutingSnapshot) -> RoutingSnapshot) {
        self.publication.change(change, |next| self.observe(next));
        self.ring_all();
    }

    fn observe(&self, next: &RoutingSnapshot) {
        let back = next.moves.legs.iter().filter(|(_, leg)| leg.to() == Side::Source).map(|(leg, _)| *leg).collect();
        lock(&self.scans).observe(&next.topology, back, self.scan_tick());
    }

    /// Publishes the oldest epoch of the worker's commands in flight, in total and for the nodes in `by_node`.
    pub(crate) fn publish_drained(&self, worker: usize, oldest: u64, by_node: OldestInFlight) {
        self.drained.publish(worker, oldest, by_node);
        for mover in self.routing().moves.by_id.values() {
            mover.ring();
        }
    }

    /// The drain barrier of one node: whether every worker has adopted this epoch, and no command sent to the node
    /// under an older one is in flight.
    pub(crate) fn drained_source(&self, epoch: u64, node: NodeId) -> bool {
        self.drained.has_drained(epoch, node, |at| &at.executed)
    }

    /// The drain barrier of a lost node: its commands may be executed if it returns, but clients receive no reply to
    /// them any more.
    pub(crate) fn drained_of_the_lost(&self, epoch: u64, node: NodeId) -> bool {
        self.drained.has_drained(epoch, node, |at| &at.answered)
    }

    /// Makes the workers publish their commands in flight promptly, until none is older than this epoch.
    pub(crate) fn want_drained(&self, epoch: u64) {
        self.drained.want(epoch);
        self.ring_all();
    }

    /// Changes the published state of moves.
    pub(crate) fn change_moves(&self, change: impl FnOnce(&mut Moves)) {
        self.change_routing(|routing| {
            let mut moves = (*routing.moves).clone();
            change(&mut moves);
            RoutingSnapshot { moves: Arc::new(moves), ..routing.clone() }
        });
    }

    /// Acquires the permission to quiesce movers and access all keys. `None`: not now.
    pub(crate) fn try_quiesce_lock(&self) -> Option<QuiesceLockGuard> {
        let mut looking = lock(&self.quiesce_lock);
        if looking.is_taken || looking.not_before.is_some_and(|at| Instant::now() < at) {
            return None;
        }
        looking.is_taken = true;
        Some(QuiesceLockGuard(self.quiesce_lock.clone()))
    }

    /// Returns the counts of exclusive connections to a node, over all workers.
    pub(crate) fn exclusive_bounds(&self, node: NodeId) -> Arc<ExclusiveBounds> {
        lock(&self.exclusive_bounds).entry(node).or_insert_with(|| ExclusiveBounds::new(self.counters.len())).clone()
    }

    /// Resets the state of a worker that has panicked, whose clients and connections are gone.
    pub(crate) fn forget_worker(&self, worker: usize) {
        let counters = &self.counters[worker];
        self.clients.fetch_sub(counters.clients.get() as usize, Ordering::Relaxed);
        counters.clients.set(0);
        counters.blocked.set(0);
        counters.subscriptions.set(0);
        counters.subscribers.set(0);
        counters.upstream_subscriptions.set(0);
        counters.tracking.set(0);
        counters.memory_biggest.set(0);
        counters.memory_leaving.set(0);
        counters.hot.copies.set(0);
        counters.hot.in_doubt.set(0);
        counters.hot.bytes.set(0);
        self.hot.forget_worker(worker);
        self.subscriptions.forget_worker(worker);
        self.wait_queues.forget_worker(worker, &self.mailboxes);
        lock(&self.exclusive_bounds).values().for_each(|bounds| bounds.forget_worker(worker));
        lock(&self.monitors).retain(|(w, _)| *w != worker);
        for node in lock(&counters.nodes).iter().flatten() {
            node.in_flight.set(0);
            node.connections.set(0);
        }
    }

    pub(crate) fn ring_all(&self) {
        for mailbox in self.mailboxes.iter() {
            mailbox.ring();
        }
    }

    pub(crate) fn uptime(&self) -> Duration {
        self.started.elapsed()
    }

    /// Current time for [`Scans`].
    pub(crate) fn scan_tick(&self) -> u64 {
        self.started_tick + self.uptime().as_millis() as u64 / TICK_MS
    }

    /// Whether all these nodes are known to have a database of this number.
    pub(crate) fn has_database(&self, keepers: &[NodeId], database: u32) -> bool {
        let nodes = lock(&self.nodes);
        keepers.iter().all(|node| nodes.get(node).is_some_and(|facts| database < facts.databases))
    }

    /// Minimum number of databases that clients have seen.
    pub(crate) fn databases(&self) -> u32 {
        lock(&self.nodes).values().map(|facts| facts.databases).max().unwrap_or(0)
    }

    /// Sum over all workers of commands sent to a node that may change keys.
    pub(crate) fn changes_sent(&self, node: NodeId) -> Sent {
        self.counters.iter().map(|worker| worker.node(node)).fold(Sent::default(), |sent, node| Sent {
            writes: sent.writes + node.writes.get(),
            removals: sent.removals.saturating_add(node.removals.get()),
        })
    }

    /// Accesses the facts about a node.
    pub(crate) fn with_facts<R>(&self, node: NodeId, change: impl FnOnce(&mut NodeFacts) -> R) -> R {
        change(lock(&self.nodes).entry(node).or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared(workers: usize) -> Shared {
        let routing = RoutingSnapshot {
            topology: Arc::new(Topology::even(&["127.0.0.1:1".to_owned()]).expect("one node")),
            configured_users: Arc::default(),
            live: Arc::default(),
            overrides: Arc::default(),
            commands: Arc::new(CommandTable::builtin()),
            servers: Arc::default(),
            moves: Arc::default(),
            held: Some("1".into()),
        };
        Shared::new(workers, routing, 0, String::new(), None, false, false).expect("made")
    }

    #[test]
    fn persistence_stays_known_if_the_node_refuses_the_query() {
        let mut facts = NodeFacts { run_id: Some("a".into()), ..NodeFacts::default() };
        let mut persists = |run_id: &str, reply| {
            facts.note_data(run_id, Holdings::default(), reply, Sent::default());
            facts.persists
        };
        assert!(persists("a", Some(true)) && persists("a", None));
        assert!(persists("b", Some(false)), "another process");
        assert!(!persists("a", Some(false)) && !persists("a", None));
    }

    #[test]
    fn a_snapshot_is_read_with_its_number() {
        let shared = shared(1);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 2..20_000 {
                    shared.change_routing(|routing| RoutingSnapshot {
                        held: Some(number.to_string().into()),
                        ..routing.clone()
                    });
                }
            });
            let mut last = 0;
            while last < 19_999 {
                let (number, routing) = shared.publication.own();
                assert_eq!(
                    routing.held.as_deref(),
                    Some(&*number.to_string()),
                    "a worker would keep it until the next change"
                );
                last = number;
            }
        });
    }

    #[test]
    fn a_new_primary_is_used_after_all_workers_left_the_old() {
        let shared = shared(2);
        assert!(shared.publication.all_left_old_servers(), "there was none before");
        shared.change_servers(|servers| drop(servers.insert(NodeId(0), Servers::default())));
        let (number, _) = shared.publication.own();
        shared.publication.adopted(0, number);
        assert!(!shared.publication.all_left_old_servers(), "the other worker may still read at it");
        shared.publication.adopted(1, u64::MAX);
        assert!(shared.publication.all_left_old_servers(), "it has ended");
        shared.make_workers_leave_old_processes();
        assert!(!shared.publication.all_left_old_servers(), "the first worker may still use the process before");
        shared.publication.adopted(0, shared.publication.own().0);
        assert!(shared.publication.all_left_old_servers());
    }
}
