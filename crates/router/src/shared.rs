//! What the workers of a router have in common. Nothing here is touched on the path of a forwarded command: workers
//! look at one generation number per turn, and at their mailbox when they are woken.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::event::{EventfdFlags, eventfd};
use switchyard_policy::empty_return::{Data, Sent};
use switchyard_policy::migration::published::Paper;
use switchyard_policy::migration::{Fingerprint, Side};
use switchyard_policy::scan::{Scans, TICK_MS};
use switchyard_policy::topology::{MoveId, NodeId, Topology};
use switchyard_resp::command::CommandTable;

use crate::busy::Busy;
use crate::command_reply_cache::CommandReplyCache;
use crate::config_set::Overrides;
use crate::connections::Connections;
use crate::exclusive_bounds::ExclusiveBounds;
use crate::fences::Fences;
use crate::function_turns::FunctionTurns;
use crate::hot_copies::HotCopies;
use crate::limits::Limits;
use crate::lua::Libraries;
use crate::metrics::{WaitsLately, WorkerCounters};
use crate::mover::{Moved, Moves, SharedMove, SharedTracker};
use crate::pubsub::Subscriptions;
use crate::reigns::Reigns;
use crate::scripts::Scripts;
use crate::seat::FleetOwnership;
use crate::settings::{KnownProcess, Ports, Reads, RuntimeSettings, Servers};
use crate::single_node_usage::SingleNodeUsage;
use crate::slab::Handle;
use crate::slow_log::SlowLog;
use crate::tap::Tap;
use crate::telemetry::SharedBoard;
use crate::users::{AclLog, Attempt, Logins, Users};
use crate::wait_queues::WaitQueues;
use crate::worker::Lane;

/// The time of day, milliseconds since 1970.
pub(crate) fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

/// Everything that a worker adopts together, at one epoch.
#[derive(Clone, Debug)]
pub(crate) struct RoutingSnapshot {
    pub(crate) topology: Arc<Topology>,
    /// The configuration's, with `overrides`.
    pub(crate) live: Arc<RuntimeSettings>,
    /// What CONFIG SET has changed.
    pub(crate) overrides: Arc<Overrides>,
    pub(crate) commands: Arc<CommandTable>,
    /// Of nodes that have replicas: who is who.
    pub(crate) servers: Arc<BTreeMap<NodeId, Servers>>,
    /// Moves under way, and their legs.
    pub(crate) moves: Arc<Moves>,
    /// Why no node is used yet, if so.
    pub(crate) held: Option<Arc<str>>,
    /// The users as they were configured last. Those in force (`live.users`) differ from them after `ACL SETUSER`.
    pub(crate) configured_users: Arc<Users>,
}

impl RoutingSnapshot {
    /// Whether scripts and functions are kept to the keys that they declare. The only node has all keys, so there is
    /// nothing to keep them from.
    pub(crate) fn checks_scripts(&self) -> bool {
        self.live.check_scripts && self.topology.only_node().is_none()
    }

    /// The form in which libraries are to be at nodes.
    pub(crate) fn libraries(&self) -> Libraries {
        match self.live.check_scripts {
            true if self.checks_scripts() => Libraries::Checked,
            true => Libraries::Plain,
            false => Libraries::Any,
        }
    }

    /// This plan by other settings of the configuration. Users that are configured as before stay as clients have
    /// changed them.
    pub(crate) fn reconfigured(&self, mut live: RuntimeSettings, overrides: Arc<Overrides>) -> Self {
        let configured_users = live.users.clone();
        if configured_users == self.configured_users {
            live.users = self.live.users.clone();
        }
        Self { live: Arc::new(overrides.over(live)), overrides, configured_users, ..self.clone() }
    }
}

/// How far the router is with learning a node's commands.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Commands {
    #[default]
    Unknown,
    Requested,
    Known,
}

/// What is known of a node's server process.
#[derive(Clone, Debug, Default)]
pub(crate) struct NodeFacts {
    /// Identity of the process: another one means that it restarted.
    pub(crate) run_id: Option<Arc<str>>,
    /// `redis` or `valkey`.
    pub(crate) flavour: &'static str,
    pub(crate) version: String,
    /// Databases known to exist: SELECT below this number cannot fail.
    pub(crate) databases: u32,
    /// The version of Redis that it is, or is compatible with.
    pub(crate) redis_version: String,
    /// Whether its command list has been compared with ours since it started.
    pub(crate) commands: Commands,
    /// Why the last attempt to connect failed; `None` once one succeeded.
    pub(crate) failure: Option<String>,
    /// Whether it was found not to speak RESP3.
    pub(crate) translated: bool,
    /// Whether an attempt to connect has ended, either way.
    pub(crate) tried: bool,
    /// The data of this process.
    pub(crate) data: Data,
    /// Whether it keeps its data on disk.
    pub(crate) persists: bool,
    /// Its INFO when its health was asked last.
    pub(crate) info: Option<Arc<[u8]>>,
    /// Whether this process keeps the mark of the router.
    pub(crate) is_marked: bool,
    /// It is not used because another process answers, without the keys that this one had.
    pub(crate) is_held: bool,
    /// Somebody has said that these are gone.
    pub(crate) accepted: bool,
}

impl NodeFacts {
    /// What an earlier run of the router has known.
    pub(crate) fn known(process: KnownProcess) -> Self {
        let KnownProcess { run_id, data, persists, is_held, is_marked } = process;
        Self { run_id: Some(run_id.into()), data: Data::known(data), persists, is_held, is_marked, ..Self::default() }
    }
}

/// CLIENT PAUSE.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pause {
    /// Microseconds since the router's start.
    pub(crate) until_us: u64,
    /// Everything, not only what may write.
    pub(crate) all: bool,
}

/// What one worker asks another.
#[derive(Debug)]
pub(crate) enum Message {
    /// Describe your clients (CLIENT LIST) for the gather of worker `from`.
    List { filter: Arc<ClientFilter>, from: usize, gather: Handle, part: u32 },
    /// Close the clients that match (CLIENT KILL).
    Kill { filter: Arc<ClientFilter>, from: usize, gather: Handle, part: u32 },
    /// End the wait of your client with this id (CLIENT UNBLOCK), by an error or as if its time were over.
    Unblock { id: u64, error: bool, from: usize, gather: Handle, part: u32 },
    /// Look at the list of monitors and the pause, and answer; where `settled`, when what was sent to nodes before has
    /// been answered.
    Refresh { from: usize, gather: Handle, part: u32, settled: bool },
    /// Whether the client of this number is yours, for the gather of worker `from`.
    Find { id: u64, from: usize, gather: Handle, part: u32 },
    /// An invalidation for your client `to`; `source` of worker `from` redirects its own there. `None`: all keys.
    Invalidate { to: Handle, from: usize, source: Handle, keys: Option<Box<[u8]>> },
    /// There is no such client.
    RedirectBroken { source: Handle },
    /// Lines for your clients in MONITOR.
    Lines(Arc<[u8]>),
    /// A worker's answer, as a RESP reply.
    Answer { gather: Handle, part: u32, reply: Vec<u8> },
    /// It is the turn of this client of yours to wait at a node ([`crate::wait_queues`]).
    Turn { client: Handle },
    /// What this client of yours waits for is to be issued again, behind somebody else.
    Recall { client: Handle },
    /// More memory is in use than may be, and you have the client that takes the most.
    Evict,
    /// Keys of a leg that your clients wait for were committed.
    Committed,
    /// Your clients that wait for these keys of a move (`None`: any) are told this error.
    Refused { move_id: MoveId, keys: Option<Arc<[Fingerprint]>>, error: Arc<str> },
    /// What this client of yours needs together for its command of this number lives together, or (with the reason)
    /// will not soon.
    Home { client: Handle, number: u32, refusal: Option<Arc<str>> },
    /// The mover is quiet, as was asked under this ticket.
    Quiet { move_id: MoveId, ticket: u64 },
    /// Others have clients in line for an exclusive connection of this kind to the node, and got none: give up what you
    /// do not use.
    WantRoom { node: NodeId, lane: Lane },
    /// There may be room for an exclusive connection to the node.
    Room { node: NodeId },
    /// A password of a client was checked.
    Login { client: Handle, attempt: Attempt },
    #[cfg(test)]
    Panic,
}

/// What CLIENT LIST and CLIENT KILL tell apart by `TYPE`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ClientType {
    Normal,
    Pubsub,
    /// Replicas and primaries: no client of ours is one.
    Server,
}

/// Which clients CLIENT LIST and CLIENT KILL mean.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClientFilter {
    pub(crate) ids: Option<Vec<u64>>,
    pub(crate) addr: Option<String>,
    pub(crate) laddr: Option<String>,
    pub(crate) user: Option<String>,
    /// `TYPE`.
    pub(crate) client_type: Option<ClientType>,
    /// The client that asks, where it is to be spared (`SKIPME yes`).
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

    /// Wakes the worker without a message: it looks at the generation and the flags.
    pub(crate) fn ring(&self) {
        // Fails only when the counter is full, and then the worker is awake already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    pub(crate) fn take(&self) -> Vec<Message> {
        let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
        std::mem::take(&mut lock(&self.messages))
    }
}

/// The mailboxes of all workers.
#[derive(Debug, Default)]
pub(crate) struct Mailboxes(Vec<Mailbox>);

impl Mailboxes {
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
    /// Names this router in CLIENT LIST of the nodes, whichever run it is.
    pub(crate) site: String,
    /// Names this run of it there.
    pub(crate) incarnation: String,
    /// What is left at nodes, so that one router at a time serves them.
    pub(crate) seat: Option<Arc<FleetOwnership>>,
    pub(crate) fences: Arc<Fences>,
    /// Processes that have served the nodes.
    pub(crate) reigns: Reigns,
    plan: Mutex<Arc<RoutingSnapshot>>,
    /// Counts changes of the plan; a worker that sees another number than its own takes the new plan.
    pub(crate) generation: AtomicU64,
    /// The number of the plan that last named the primaries; and by worker, that of the plan that it goes by.
    led_since: AtomicU64,
    adopted: Vec<AtomicU64>,
    pub(crate) nodes: Mutex<BTreeMap<NodeId, NodeFacts>>,
    pub(crate) scripts: Mutex<Scripts>,
    pub(crate) slow_log: Mutex<SlowLog>,
    pub(crate) acl_log: Mutex<AclLog>,
    /// Errors by code up to the last CONFIG RESETSTAT: INFO leaves them out, while metrics never fall.
    pub(crate) errors_before: Mutex<BTreeMap<String, u64>>,
    pub(crate) subscriptions: Subscriptions,
    /// Clients in MONITOR: worker and handle.
    pub(crate) monitors: Mutex<Vec<(usize, Handle)>>,
    pub(crate) pause: Mutex<Option<Pause>>,
    pub(crate) connections: Connections,
    pub(crate) wait_queues: WaitQueues,
    /// Answers to COMMAND.
    pub(crate) command_replies: CommandReplyCache,
    /// Nodes that execute slow commands.
    pub(crate) busy: Busy,
    /// Commands that were served and would meet a limit if there were two nodes.
    pub(crate) alone: SingleNodeUsage,
    exclusive_bounds: Mutex<BTreeMap<NodeId, Arc<ExclusiveBounds>>>,
    pub(crate) mailboxes: Arc<Mailboxes>,
    pub(crate) logins: Arc<Logins>,
    pub(crate) limits: Limits,
    pub(crate) counters: Vec<Arc<WorkerCounters>>,
    /// The nodes that a scrape has seen, also those that are gone: whoever joins again gets another number, and its
    /// counters go on. As bounded as numbers.
    pub(crate) scraped: Mutex<BTreeMap<NodeId, String>>,
    pub(crate) clients: AtomicUsize,
    pub(crate) next_client_id: AtomicU64,
    /// Held by the worker that cuts clients because of `memory-max`.
    pub(crate) evicting: Mutex<()>,
    /// Per worker: the oldest epoch under which a command still in flight was sent (its own epoch when none is older).
    pub(crate) drained: Vec<AtomicU64>,
    /// The same by node, while somebody waits for that.
    drained_at: Vec<Mutex<OldestInFlight>>,
    /// The highest epoch that a mover waits for.
    pub(crate) drain_wanted: AtomicU64,
    /// What moves by published protocols share, as long as there are such.
    tracker: Mutex<Weak<SharedTracker>>,
    /// All moves since the start, also those that have ended.
    pub(crate) moves: Mutex<BTreeMap<MoveId, Arc<SharedMove>>>,
    pub(crate) moved: Mutex<Moved>,
    /// What scans of clients have to know of them. Locked behind the plan.
    pub(crate) board: SharedBoard,
    pub(crate) hot: HotCopies,
    pub(crate) scans: Mutex<Scans>,
    started_tick: u64,
    /// Their threads.
    pub(crate) movers: Mutex<Vec<JoinHandle<()>>>,
    /// What clients wait without a move.
    pub(crate) waits_lately: Mutex<WaitsLately>,
    /// Set by `drain`: stop accepting and reading, finish what is in flight.
    pub(crate) draining: AtomicBool,
    /// Set when the bound of a drain is reached: close whatever is left.
    pub(crate) stop: AtomicBool,
    /// Clients cut at the bound.
    pub(crate) cut: AtomicU64,
    /// Ports that clients connect to, for INFO.
    pub(crate) port: u16,
    /// Clients of some listener may read from replicas.
    listeners_read_replicas: bool,
    /// Workers may use io_uring to send.
    pub(crate) batched_sends: bool,
    /// Who executes what workers do not.
    pub(crate) ports: Ports,
    looking: Arc<Mutex<QuiesceLock>>,
    /// Who changes functions, or copies them.
    pub(crate) functions: FunctionTurns,
    /// Who sees all commands with keys.
    pub(crate) tap: OnceLock<Arc<dyn Tap>>,
}

/// By node the oldest epoch under which something is in flight.
#[derive(Clone, Debug, Default)]
pub(crate) struct OldestInFlight {
    /// That may still be executed.
    pub(crate) executed: Vec<u64>,
    /// That may still be answered: without what a connection has left behind that is gone.
    pub(crate) answered: Vec<u64>,
}

/// Somebody has movers be quiet to look at all keys: one at a time.
#[derive(Debug, Default)]
struct QuiesceLock {
    is_taken: bool,
    not_before: Option<Instant>,
}

/// The right to have movers be quiet to look at all keys. Given back when it is dropped.
#[derive(Debug)]
pub(crate) struct QuiesceLockGuard(Arc<Mutex<QuiesceLock>>);

/// Movers go on for so long before somebody else has them be quiet: clients that look all the time do not keep a move
/// from its end.
const LOOK_REST: Duration = Duration::from_millis(50);

impl Drop for QuiesceLockGuard {
    fn drop(&mut self) {
        *lock(&self.0) = QuiesceLock { is_taken: false, not_before: Some(Instant::now() + LOOK_REST) };
    }
}

/// A poisoned lock means that a worker panicked while it held it; what it protects is a cache or a queue whose worst
/// state is incomplete, so the others go on.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// The INFO of this node when its health was asked last.
    pub(crate) fn last_info(&self, node: NodeId) -> Option<Arc<[u8]>> {
        lock(&self.nodes).get(&node)?.info.clone()
    }

    pub(crate) fn with_ports(self, ports: Ports) -> Self {
        Self { ports, ..self }
    }

    pub(crate) fn new(
        workers: usize,
        plan: RoutingSnapshot,
        port: u16,
        site: String,
        seat: Option<Arc<FleetOwnership>>,
        listeners_read_replicas: bool,
        batched_sends: bool,
    ) -> std::io::Result<Self> {
        let mailboxes: Vec<Mailbox> = (0..workers)
            .map(|_| {
                let wake = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
                Ok(Mailbox { messages: Mutex::default(), wake })
            })
            .collect::<std::io::Result<_>>()?;
        let mailboxes = Arc::new(Mailboxes(mailboxes));
        let epoch = plan.topology.epoch();
        let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let started_tick = since_epoch.as_millis() as u64 / TICK_MS;
        Ok(Self {
            board: SharedBoard::default(),
            hot: HotCopies::new(workers),
            scans: Mutex::new(Scans::new(
                Arc::clone(&plan.topology),
                started_tick,
                seat.as_ref().map_or(0, |seat| seat.mark().term),
            )),
            started_tick,
            started: Instant::now(),
            site,
            seat,
            fences: Arc::default(),
            reigns: Reigns::default(),
            incarnation: format!("{:x}-{:x}", std::process::id(), since_epoch.as_micros()),
            plan: Mutex::new(Arc::new(plan)),
            generation: AtomicU64::new(1),
            led_since: AtomicU64::new(0),
            adopted: (0..workers).map(|_| AtomicU64::new(0)).collect(),
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
            exclusive_bounds: Mutex::default(),
            errors_before: Mutex::default(),
            logins: Arc::new(Logins::new(mailboxes.clone())),
            mailboxes,
            counters: (0..workers).map(|_| Arc::default()).collect(),
            scraped: Mutex::default(),
            clients: AtomicUsize::new(0),
            next_client_id: AtomicU64::new(1),
            evicting: Mutex::default(),
            drained: (0..workers).map(|_| AtomicU64::new(epoch)).collect(),
            drained_at: (0..workers).map(|_| Mutex::default()).collect(),
            drain_wanted: AtomicU64::new(0),
            tracker: Mutex::default(),
            moves: Mutex::default(),
            moved: Mutex::default(),
            movers: Mutex::default(),
            waits_lately: Mutex::default(),
            draining: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            cut: AtomicU64::new(0),
            port,
            listeners_read_replicas,
            batched_sends,
            ports: Ports::default(),
            looking: Arc::default(),
            functions: FunctionTurns::default(),
            tap: OnceLock::new(),
        })
    }

    /// The name of a connection to a node; `what` says whose it is. The tracker of the moves by published protocols
    /// that are under way, or a new one: it is as the first of them wants it.
    pub(crate) fn tracker(&self, paper: &Paper) -> Arc<SharedTracker> {
        let mut known = lock(&self.tracker);
        known.upgrade().unwrap_or_else(|| {
            let tracker = Arc::new(SharedTracker::new(paper));
            *known = Arc::downgrade(&tracker);
            tracker
        })
    }

    pub(crate) fn connection_name(&self, what: impl std::fmt::Display) -> String {
        format!("switchyard-{}-{}-{what}", self.site, self.incarnation)
    }

    pub(crate) fn plan(&self) -> Arc<RoutingSnapshot> {
        lock(&self.plan).clone()
    }

    /// The plan in an allocation of the caller's own, with its number. Together: under the number of a newer one it
    /// would be kept until the next change.
    pub(crate) fn own_plan(&self) -> (u64, Arc<RoutingSnapshot>) {
        let plan = lock(&self.plan);
        (self.generation.load(Ordering::Acquire), Arc::new((**plan).clone()))
    }

    /// Tells workers who the servers of nodes are. One that is primary now is used when no worker uses the one before
    /// any more.
    pub(crate) fn change_servers(&self, change: impl FnOnce(&mut BTreeMap<NodeId, Servers>)) {
        self.change_plan(|plan| {
            let mut servers = (*plan.servers).clone();
            change(&mut servers);
            self.led_since.store(self.generation.load(Ordering::Acquire) + 1, Ordering::Release);
            RoutingSnapshot { servers: Arc::new(servers), ..plan.clone() }
        });
    }

    /// Makes all workers end their connections to processes that are not those of the nodes any more.
    pub(crate) fn leave_other_processes(&self) {
        self.change_plan(|plan| {
            self.led_since.store(self.generation.load(Ordering::Acquire) + 1, Ordering::Release);
            plan.clone()
        });
    }

    /// A worker goes by the plan of this number, and has left the servers that are no primaries by it. `u64::MAX`: it
    /// sends nothing any more.
    pub(crate) fn adopted(&self, worker: usize, generation: u64) {
        self.adopted[worker].store(generation, Ordering::Release);
    }

    /// Whether a worker that knows the plan of this number has servers or processes to leave by a newer one.
    pub(crate) fn are_others_to_be_left(&self, known: u64) -> bool {
        self.led_since.load(Ordering::Acquire) > known
    }

    /// Whether no worker uses a server any more that was a primary before, or a process that another process has
    /// replaced.
    pub(crate) fn are_others_left(&self) -> bool {
        let since = self.led_since.load(Ordering::Acquire);
        self.adopted.iter().all(|adopted| adopted.load(Ordering::Acquire) >= since)
    }

    /// Whether some clients may read from replicas, where nodes have them.
    pub(crate) fn are_replicas_read(&self, live: &RuntimeSettings) -> bool {
        self.listeners_read_replicas || live.reads != Reads::Primary || live.users.read_replicas()
    }

    /// Replaces the plan by what `change` makes of it, and wakes everybody.
    pub(crate) fn change_plan(&self, change: impl FnOnce(&RoutingSnapshot) -> RoutingSnapshot) {
        let mut plan = lock(&self.plan);
        let next = change(&plan);
        let back = next.moves.legs.iter().filter(|(_, leg)| leg.to() == Side::Source).map(|(leg, _)| *leg).collect();
        lock(&self.scans).observe(&next.topology, back, self.scan_tick());
        *plan = Arc::new(next);
        self.generation.fetch_add(1, Ordering::Release);
        drop(plan);
        self.ring_all();
    }

    /// Worker `worker` has nothing in flight that is older than this; by node, for those that have a number in
    /// `by_node`.
    pub(crate) fn publish_drained(&self, worker: usize, oldest: u64, by_node: OldestInFlight) {
        *lock(&self.drained_at[worker]) = by_node;
        self.drained[worker].store(oldest, Ordering::Release);
        let moves = lock(&self.plan).moves.clone();
        for mover in moves.by_id.values() {
            mover.ring();
        }
    }

    /// The drain barrier of one node: whether nothing that was sent to it under an epoch before this one is in flight,
    /// and every worker has adopted it.
    pub(crate) fn drained_source(&self, epoch: u64, node: NodeId) -> bool {
        self.has_drained(epoch, node, |at| &at.executed)
    }

    /// The same of a node that is lost for good: what was sent there may be executed, should it come back, but nobody
    /// is told so any more.
    pub(crate) fn drained_of_the_lost(&self, epoch: u64, node: NodeId) -> bool {
        self.has_drained(epoch, node, |at| &at.answered)
    }

    fn has_drained(&self, epoch: u64, node: NodeId, which: fn(&OldestInFlight) -> &Vec<u64>) -> bool {
        self.drained_at.iter().zip(&self.drained).all(|(by_node, all)| {
            all.load(Ordering::Acquire) >= epoch
                || which(&lock(by_node)).get(node.index()).is_some_and(|oldest| *oldest >= epoch)
        })
    }

    /// Has the workers publish what is in flight promptly, until nothing is older than this epoch.
    pub(crate) fn want_drained(&self, epoch: u64) {
        self.drain_wanted.fetch_max(epoch, Ordering::AcqRel);
        self.ring_all();
    }

    /// Changes what workers know of moves.
    pub(crate) fn change_moves(&self, change: impl FnOnce(&mut Moves)) {
        self.change_plan(|plan| {
            let mut moves = (*plan.moves).clone();
            change(&mut moves);
            RoutingSnapshot { moves: Arc::new(moves), ..plan.clone() }
        });
    }

    /// For a command that has movers be quiet while it looks at all keys. `None`: not now.
    pub(crate) fn take_turn_to_look(&self) -> Option<QuiesceLockGuard> {
        let mut looking = lock(&self.looking);
        if looking.is_taken || looking.not_before.is_some_and(|at| Instant::now() < at) {
            return None;
        }
        looking.is_taken = true;
        Some(QuiesceLockGuard(self.looking.clone()))
    }

    /// The exclusive connections to a node, over all workers.
    pub(crate) fn exclusive_bounds(&self, node: NodeId) -> Arc<ExclusiveBounds> {
        lock(&self.exclusive_bounds).entry(node).or_insert_with(|| ExclusiveBounds::new(self.counters.len())).clone()
    }

    /// A worker has panicked: its clients and connections are gone with it.
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

    /// The time of [`Scans`].
    pub(crate) fn scan_tick(&self) -> u64 {
        self.started_tick + self.uptime().as_millis() as u64 / TICK_MS
    }

    /// Whether every one of these nodes is known to have a database of this number.
    pub(crate) fn has_database(&self, keepers: &[NodeId], database: u32) -> bool {
        let nodes = lock(&self.nodes);
        keepers.iter().all(|node| nodes.get(node).is_some_and(|facts| database < facts.databases))
    }

    /// How many databases clients have been told that there are, at least.
    pub(crate) fn databases(&self) -> u32 {
        lock(&self.nodes).values().map(|facts| facts.databases).max().unwrap_or(0)
    }

    /// Commands that may change the keys of a node, sent by all workers.
    pub(crate) fn changes_sent(&self, node: NodeId) -> Sent {
        self.counters.iter().map(|worker| worker.node(node)).fold(Sent::default(), |sent, node| Sent {
            writes: sent.writes + node.writes.get(),
            removals: sent.removals.saturating_add(node.removals.get()),
        })
    }

    /// Changes what is known of a node.
    pub(crate) fn with_facts<R>(&self, node: NodeId, change: impl FnOnce(&mut NodeFacts) -> R) -> R {
        change(lock(&self.nodes).entry(node).or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared(workers: usize) -> Shared {
        let plan = RoutingSnapshot {
            topology: Arc::new(Topology::even(&["127.0.0.1:1".to_owned()]).expect("one node")),
            configured_users: Arc::default(),
            live: Arc::default(),
            overrides: Arc::default(),
            commands: Arc::new(CommandTable::builtin()),
            servers: Arc::default(),
            moves: Arc::default(),
            held: Some("1".into()),
        };
        Shared::new(workers, plan, 0, String::new(), None, false, false).expect("made")
    }

    #[test]
    fn a_plan_comes_with_its_own_number() {
        let shared = shared(1);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 2..20_000 {
                    shared
                        .change_plan(|plan| RoutingSnapshot { held: Some(number.to_string().into()), ..plan.clone() });
                }
            });
            let mut last = 0;
            while last < 19_999 {
                let (number, plan) = shared.own_plan();
                assert_eq!(
                    plan.held.as_deref(),
                    Some(&*number.to_string()),
                    "a worker would keep it until the next change"
                );
                last = number;
            }
        });
    }

    #[test]
    fn a_new_primary_is_used_when_all_have_left_the_one_before() {
        let shared = shared(2);
        assert!(shared.are_others_left(), "there was none before");
        shared.change_servers(|servers| drop(servers.insert(NodeId(0), Servers::default())));
        let (number, _) = shared.own_plan();
        shared.adopted(0, number);
        assert!(!shared.are_others_left(), "the other worker may still read at it");
        shared.adopted(1, u64::MAX);
        assert!(shared.are_others_left(), "it has ended");
        shared.leave_other_processes();
        assert!(!shared.are_others_left(), "the first worker may still use the process before");
        shared.adopted(0, shared.own_plan().0);
        assert!(shared.are_others_left());
    }
}
