//! The data plane: one worker thread per core, each with its own listener, clients, and connections to the nodes.
//!
//! [`Router::start`] starts the workers; after that the router is told of changes ([`Router::publish`],
//! [`Router::reconfigure`]) and asked what it sees ([`Router::status`], [`Router::metrics`]). Where a command goes is
//! decided by `switchyard_policy`; this crate moves bytes, keeps order, and knows what is in flight.
//!
//! Absent on purpose: locks on the path of a command, knowledge of who changes the topology and why, HTTP, files.

mod away;
mod busy;
mod colocate;
mod command_reply_cache;
mod config_set;
mod connections;
mod exclusive_bounds;
mod fences;
mod function_turns;
mod functions_dump;
mod hot_copies;
mod limits;
mod listener;
mod lua;
mod memory;
mod metrics;
mod mover;
pub mod open_files;
mod operator;
mod poll;
mod pubsub;
mod reigns;
mod scripts;
mod seat;
mod settings;
mod shared;
mod single_node_usage;
mod slab;
mod slow_log;
mod sys;
mod tap;
mod telemetry;
mod threads;
mod tls;
mod users;
mod wait_queues;
mod worker;

pub use colocate::{ColocatePort, ColocateRequest};
pub use config_set::allows_config_set;
pub use fences::left_behind;
pub use function_turns::CopyTurn;
pub use limits::{KEY_RATE_MAX, KeyLimit};
pub use listener::could_listen;
pub use memory::heap_used;
pub use metrics::{Traffic, Waits, WriteRefusal};
pub use mover::{
    BigKey, BigKeys, Done, Holds, Host, LateKeys, MoveEnd, MoveProgress, MoveTask, MoveTotals, UserRequest,
    are_all_that_is_left,
};
pub use operator::{OperatorCommand, OperatorPort};
pub use seat::{Admission, Before, FleetOwnership, mark_in, question_of, site_of_mark, why_not};
pub use settings::{
    Cluster, EmptyReturn, HotCopies, KnownProcess, ListenAddress, ListenerSettings, NodeAccess, OnMissed, Ports, Reads,
    Reports, RuntimeSettings, Secret, Servers, Settings, Telemetry,
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

use switchyard_policy::empty_return::{Holdings, Sent};
use switchyard_policy::hot_copies::Discarded;
use switchyard_policy::load::SlotCount;
use switchyard_policy::migration::{Fingerprinter, Process};
use switchyard_policy::telemetry::HotNode;
use switchyard_policy::topology::{MoveId, NodeId, Slot, Topology};
use switchyard_resp::command::CommandTable;

use listener::Listener;
pub use lua::is_wrapped_library as is_checked_library;

use away::Away;
use metrics::{Counter, HotCounters, NodeCounters, NodeScrape, Scrape};
use shared::{NodeFacts, RoutingSnapshot, Shared, lock, unix_ms};
use worker::Worker;

/// Why the router did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Another process has the port.
    #[error("cannot listen on {address}: {why}")]
    Listen {
        /// The address asked for.
        address: ListenAddress,
        /// What the system said.
        why: io::Error,
    },
    /// The system refused a thread, an epoll instance or the like.
    #[error("cannot start a worker: {0}")]
    System(#[from] io::Error),
}

/// Whether a node can be talked to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Link {
    /// Connected and answering.
    Up,
    /// No worker has a connection yet.
    Connecting,
    /// The last attempt failed; the text says why.
    Down(String),
}

/// What the router knows of a node, over all workers.
#[derive(Clone, Debug)]
pub struct NodeStatus {
    /// Its number.
    pub id: NodeId,
    /// Its address as the user wrote it.
    pub name: String,
    /// Whether it can be talked to.
    pub link: Link,
    /// The address that it is connected at: that of its primary, for a node that has replicas.
    pub address: Option<SocketAddr>,
    /// `run_id` of the server process, once known: another one means that it restarted.
    pub run_id: Option<String>,
    /// `redis` or `valkey`, with its version, once known ("redis 7.0.15").
    pub version: Option<String>,
    /// Commands sent to it since start.
    pub requests: u64,
    /// Error replies and failures since start.
    pub errors: u64,
    /// Commands sent and not yet answered.
    pub in_flight: u64,
    /// The time since the oldest slow command in flight was sent.
    pub slow_for: Option<Duration>,
    /// Writes that it has refused since the start, by [`WriteRefusal::ALL`].
    pub refusals: [u64; WriteRefusal::ALL.len()],
    /// Who is who, for a node that has replicas.
    pub servers: Option<Servers>,
}

/// What the router knows of itself.
#[derive(Clone, Debug)]
pub struct Status {
    /// Epoch of the topology that every worker has adopted.
    pub epoch: u64,
    /// Clients connected now.
    pub clients: u64,
    /// Commands answered since start.
    pub commands: u64,
    /// Time since start.
    pub uptime: Duration,
    /// The nodes, by number.
    pub nodes: Vec<NodeStatus>,
    /// Commands that were served because there is one node, and would meet a limit if there were two.
    pub limited: Vec<Limited>,
}

/// What the router answers from hot copies.
#[derive(Clone, Debug)]
pub struct HotCopiesStatus {
    /// There may be some.
    pub is_on: bool,
    /// Somebody has said that nothing is answered from them.
    pub is_suspended: bool,
    /// Commands that were answered, since the start.
    pub hits: u64,
    /// Times that a node was asked for one.
    pub fills: u64,
    /// Answers that were not kept, by why.
    pub discarded: Vec<(Discarded, u64)>,
    /// Keys of which nodes have said that they changed.
    pub invalidations: u64,
    /// How many there are, over all workers.
    pub copies: u64,
    /// Bytes that they take.
    pub bytes: u64,
    /// How many keys may have some.
    pub keys: u64,
    /// Nodes that give none, by name, and why.
    pub refused: BTreeMap<String, String>,
}

/// How a drain ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drained {
    /// Clients that were cut because the bound was reached with commands of theirs in flight.
    pub cut: u64,
}

/// A running router. Dropping it stops it at once; [`Router::drain`] stops it politely.
#[derive(Debug)]
pub struct Router {
    shared: Arc<Shared>,
    addresses: Vec<SocketAddr>,
    listeners: Vec<ListenAddress>,
    threads: Vec<JoinHandle<()>>,
    /// Who chooses the keys of hot copies.
    chooser: Option<JoinHandle<()>>,
}

impl Router {
    /// Binds the addresses and starts the workers. The data port accepts commands when this returns; nodes are
    /// connected meanwhile.
    ///
    /// # Errors
    /// Where an address is in use or cannot be bound, or the system refuses a thread or descriptor.
    pub fn start(settings: Settings, topology: Arc<Topology>) -> Result<Router, StartError> {
        let workers = settings.workers.max(1);
        let bound = listener::bind(&settings.listen, workers)?;
        let addresses: Vec<SocketAddr> = bound
            .addresses
            .iter()
            .filter_map(|address| match address {
                ListenAddress::Tcp(address) => Some(*address),
                ListenAddress::Unix { .. } => None,
            })
            .collect();
        let port = addresses.first().map_or(0, SocketAddr::port);
        let listeners_read_replicas =
            settings.listen.iter().any(|l| l.reads.is_some_and(|reads| reads != Reads::Primary));
        let plan = RoutingSnapshot {
            topology,
            configured_users: settings.live.users.clone(),
            live: Arc::new(settings.live),
            overrides: Arc::default(),
            commands: Arc::new(CommandTable::builtin()),
            servers: Arc::new(settings.servers),
            moves: Arc::default(),
            held: settings.held.map(Arc::from),
        };
        let shared = Shared::new(
            workers,
            plan,
            port,
            settings.site,
            settings.seat,
            listeners_read_replicas,
            settings.batched_sends,
        )?;
        let shared = Arc::new(shared.with_ports(settings.ports));
        lock(&shared.nodes).extend(settings.processes.into_iter().map(|(id, process)| (id, NodeFacts::known(process))));
        let processors = if settings.pin { processors() } else { Vec::new() };
        let mut router = Router {
            shared: shared.clone(),
            addresses,
            listeners: bound.addresses,
            threads: Vec::new(),
            chooser: None,
        };
        let mut guards = bound.guards;
        for (index, listeners) in bound.by_worker.into_iter().enumerate() {
            let worker = Worker::new(index, shared.clone(), clone_all(&listeners)?)?;
            let processor = (!processors.is_empty()).then(|| processors[index % processors.len()]);
            let guard = std::mem::take(&mut guards);
            let shared = shared.clone();
            let thread = std::thread::Builder::new().name(format!("worker-{index}")).spawn(move || {
                let _guard = guard;
                let _account = memory::Account::open();
                if let Some(processor) = processor {
                    pin(processor);
                }
                run_worker(worker, index, &shared, &listeners);
            })?;
            router.threads.push(thread);
        }
        let thread = settings.threads.spawn("hot-copies", move || hot_copies::coordinate(&shared))?;
        router.chooser = Some(thread);
        Ok(router)
    }

    /// IP addresses listened on, with the port that the system chose where 0 was asked for.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Everything listened on, in the order of the settings.
    pub fn listeners(&self) -> &[ListenAddress] {
        &self.listeners
    }

    /// Makes every worker adopt a newer topology. One that is not newer is ignored.
    pub fn publish(&self, topology: Arc<Topology>) {
        self.shared.change_plan(|plan| {
            let newer = topology.epoch() > plan.topology.epoch();
            RoutingSnapshot { topology: if newer { topology } else { plan.topology.clone() }, ..plan.clone() }
        });
    }

    /// Tells the workers who the servers of a node are that has replicas. They leave the old primary at once: what is
    /// in flight there gets an error, and nothing more is sent to it. The new one is used when all have left: a write
    /// that it answers is seen by every read that begins then. `None`: the node has no replicas any more, and is where
    /// [`NodeAccess`] says.
    pub fn set_servers(&self, node: NodeId, servers: Option<Servers>) {
        self.shared.change_servers(|all| {
            match servers {
                Some(servers) => all.insert(node, servers),
                None => all.remove(&node),
            };
        });
    }

    /// What INFO of this router says as its `run_id`.
    pub fn run_id(&self) -> &str {
        &self.shared.incarnation
    }

    /// How many databases clients have been told that there are, at least.
    pub fn databases(&self) -> u32 {
        self.shared.databases()
    }

    /// Somebody has said that the node may be served although it came back without its keys (`nodes.empty-return`): it
    /// is at the next attempt to connect. Counts for this loss only. False where the node is not held, `None` where
    /// there is no node of that name.
    pub fn accept_empty(&self, node: &str) -> Option<bool> {
        let plan = self.shared.plan();
        let id = plan.topology.nodes().find(|known| known.name == node)?.id;
        Some(self.shared.with_facts(id, |facts| {
            facts.accepted |= facts.is_held;
            facts.is_held
        }))
    }

    /// Within so long, a node that can be reached is connected again, unless that pauses for longer than anybody waits.
    pub fn patience(&self) -> Duration {
        let live = &self.shared.plan().live;
        (live.reconnect_backoff_max + live.connect_timeout + Duration::from_secs(2)).min(Duration::from_secs(30))
    }

    /// Whether every worker is connected to a node, for clients of both protocols, so that all are served there; false
    /// where there is none of that name.
    pub fn is_served(&self, node: &str) -> bool {
        let plan = self.shared.plan();
        let known = plan.topology.nodes().find(|known| known.name == node);
        known.is_some_and(|known| {
            self.shared
                .counters
                .iter()
                .map(|worker| worker.node(known.id))
                .all(|node| node.connections.get() > 0 && node.mains_down.get() == 0)
        })
    }

    /// The nodes that are used, each with so many of the keys that are used most. From a sample, as of a second ago at
    /// most, and weighed over the last seconds ([`switchyard_policy::telemetry`]).
    pub fn hot_keys(&self, keys: usize) -> Vec<HotNode> {
        self.shared.board.nodes(keys)
    }

    /// What the router answers from copies, and which keys it may.
    pub fn hot_copies(&self) -> HotCopiesStatus {
        let sum =
            |of: fn(&HotCounters) -> &Counter| self.shared.counters.iter().map(|worker| of(&worker.hot).get()).sum();
        let plan = self.shared.plan();
        let name = |node: NodeId| plan.topology.node(node).map(|node| node.name.clone());
        let discarded =
            |why: &Discarded| self.shared.counters.iter().map(|worker| worker.hot.discarded[*why as usize].get()).sum();
        HotCopiesStatus {
            is_on: plan.live.hot_copies.is_on,
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

    /// Nothing is answered from copies any more, or (false) it is again: at once, at every worker. Says whether that is
    /// news.
    pub fn suspend_hot_copies(&self, is_suspended: bool) -> bool {
        self.shared.hot.suspend(is_suspended)
    }

    /// Every copy is past at once, at every worker; of one key, where it is named.
    pub fn evict_hot_copies(&self, key: Option<&[u8]>) {
        match key {
            Some(key) => self.shared.hot.renew_key(self.shared.board.fingerprints.of(key).0 as u64),
            None => self.shared.hot.renew_all(),
        }
    }

    /// What is known of the nodes' processes that a later run of the router must know, by the nodes' names.
    pub fn processes(&self) -> BTreeMap<String, KnownProcess> {
        let plan = self.shared.plan();
        let known = plan.topology.nodes().filter_map(|node| {
            let sent = self.shared.changes_sent(node.id);
            self.shared.with_facts(node.id, |facts| {
                let run_id = facts.run_id.as_deref()?.to_owned();
                let data = facts.data.to_know(sent);
                let NodeFacts { persists, is_held, is_marked, .. } = *facts;
                Some((node.name.clone(), KnownProcess { run_id, data, persists, is_held, is_marked }))
            })
        });
        known.collect()
    }

    /// Commands that may change the keys of a node, sent to it by now. To be asked before the node is asked what it
    /// has.
    pub fn changes_sent(&self, node: NodeId) -> Sent {
        self.shared.changes_sent(node)
    }

    /// Takes note of a node's INFO: its figures count for clients while the node is late with newer ones.
    pub fn note_info(&self, node: NodeId, text: &str) {
        self.shared.with_facts(node, |facts| facts.info = Some(text.as_bytes().into()));
    }

    /// Takes note what a process of a node has now, and whether it keeps it on disk. `sent`: [`Router::changes_sent`]
    /// before the process was asked.
    pub fn note_data(&self, node: NodeId, run_id: &str, holdings: Holdings, persists: bool, sent: Sent) {
        self.shared.with_facts(node, |facts| {
            if facts.run_id.as_deref() == Some(run_id) {
                facts.data.counted(holdings, unix_ms(), sent);
                facts.persists = persists;
            }
        });
    }

    /// Nodes that are not served because they came back without their data, each with the reason.
    pub fn held_nodes(&self) -> BTreeMap<NodeId, String> {
        let plan = self.shared.plan();
        let why = |node: NodeId| {
            self.shared.with_facts(node, |facts| {
                (facts.is_held && !facts.accepted).then(|| facts.failure.clone().unwrap_or_default())
            })
        };
        plan.topology.nodes().filter_map(|node| Some((node.id, why(node.id)?))).collect()
    }

    /// Says why no node is used yet; `None`: they are from now on, each at the next attempt to connect.
    pub fn hold(&self, why: Option<&str>) {
        self.shared.change_plan(|plan| RoutingSnapshot { held: why.map(Arc::from), ..plan.clone() });
    }

    /// Shows a tap every command with keys, from the moment on at which each worker has noticed. Once.
    pub fn tap(&self, tap: Arc<dyn Tap>) {
        // A second one is a mistake of the caller that changes nothing.
        let _ = self.shared.tap.set(tap);
        self.shared.change_plan(RoutingSnapshot::clone);
    }

    /// Makes every worker adopt new settings; what CONFIG SET has changed stays so. Connections to nodes whose
    /// credentials have changed are made anew; a changed address counts for new ones. Users that are configured as
    /// before stay as they are: clients may have changed them since.
    pub fn reconfigure(&self, live: RuntimeSettings) {
        self.shared.change_plan(|plan| plan.reconfigured(live, plan.overrides.clone()));
    }

    /// A node's name leads to this address now; connections that are open stay. An error: to none, and the node keeps
    /// the address that it has. The servers of a node that has replicas stay ([`Router::set_servers`]). True where
    /// anything has changed.
    pub fn name_resolves(&self, node: NodeId, found: Result<SocketAddr, String>) -> bool {
        let with = |plan: &RoutingSnapshot| {
            let access = plan.live.nodes.get(&node)?;
            let (address, unresolved) = match &found {
                Ok(address) => (Some(*address), None),
                Err(why) => (access.address, access.address.is_none().then(|| why.clone())),
            };
            let is_taken = plan
                .live
                .nodes
                .iter()
                .any(|(other, known)| *other != node && address.is_some() && known.address == address);
            if is_taken || (access.address, &access.unresolved) == (address, &unresolved) {
                return None;
            }
            let mut live = (*plan.live).clone();
            live.nodes.insert(node, NodeAccess { address, unresolved, ..access.clone() });
            Some(RoutingSnapshot { live: Arc::new(live), ..plan.clone() })
        };
        if with(&self.shared.plan()).is_none() {
            return false;
        }
        self.shared.change_plan(|plan| with(plan).unwrap_or_else(|| plan.clone()));
        true
    }

    /// Forgets what CONFIG SET has changed: the settings are these again. False where it had changed nothing.
    pub fn forget_config_set(&self, live: RuntimeSettings) -> bool {
        let had_any = !self.shared.plan().overrides.is_empty();
        if had_any {
            self.shared.change_plan(|plan| plan.reconfigured(live, Arc::default()));
        }
        had_any
    }

    /// The users in force, and those that were configured last.
    pub fn users(&self) -> (Arc<Users>, Arc<Users>) {
        let plan = self.shared.plan();
        (plan.live.users.clone(), plan.configured_users.clone())
    }

    /// Replaces the users in force, where they are still those of `before`; with `configured`, these are what the
    /// configuration says, too. False where they are not: then nothing has changed.
    pub fn replace_users(&self, before: &Arc<Users>, after: &Arc<Users>, configured: bool) -> bool {
        let mut done = false;
        self.shared.change_plan(|plan| {
            done = Arc::ptr_eq(&plan.live.users, before);
            if !done {
                return plan.clone();
            }
            let live = Arc::new(RuntimeSettings { users: after.clone(), ..(*plan.live).clone() });
            let configured_users = if configured { after.clone() } else { plan.configured_users.clone() };
            RoutingSnapshot { live, configured_users, ..plan.clone() }
        });
        done
    }

    /// The drain barrier: no command sent under an epoch older than the one returned is still in flight. In flight ends
    /// with a reply, or with a node's confirmation that it has killed the connection, or with the node's process.
    pub fn drained_epoch(&self) -> u64 {
        self.shared.drained.iter().map(|d| d.load(Ordering::Acquire)).min().unwrap_or(0)
    }

    /// The drain barrier of one node, for moves: whether every worker has adopted the topology of this epoch, and
    /// nothing that was sent to the node under an older one is still in flight.
    pub fn drained_source(&self, epoch: u64, node: NodeId) -> bool {
        self.shared.want_drained(epoch);
        self.shared.drained_source(epoch, node)
    }

    /// The same of a node that does not answer: what was sent there may still be executed, should it answer again, but
    /// no client gets an answer to it any more.
    pub fn drained_of_the_lost(&self, epoch: u64, node: NodeId) -> bool {
        self.shared.want_drained(epoch);
        self.shared.drained_of_the_lost(epoch, node)
    }

    /// For who copies functions from one node to another: until it is dropped no client changes any. It begins when the
    /// changes under way are over ([`CopyTurn::is_alone`]). `None`: somebody else copies.
    pub fn turn_to_copy_functions(&self) -> Option<CopyTurn> {
        self.shared.functions.to_copy()
    }

    /// Functions were to be stored on this connection, which was not answered: they may still be. The turn lasts until
    /// that is over.
    pub fn leave_functions(&self, node: NodeId, connection: Process, turn: CopyTurn) {
        self.shared.fences.broke_with_functions(node, connection, turn);
    }

    /// What was left so, by whoever it was: somebody has to see to its end.
    pub fn functions_left(&self) -> Vec<(NodeId, Process)> {
        self.shared.fences.with_functions()
    }

    /// A connection to a node broke with something under way: no move relies on the node before its end is confirmed.
    pub fn connection_broke(&self, node: NodeId, connection: Process) {
        self.shared.fences.broke(node, connection);
    }

    /// The connections to a node that were not the workers', and whose end is not confirmed.
    pub fn broken_connections(&self, node: NodeId) -> Vec<Process> {
        self.shared.fences.broken(node)
    }

    /// Whether the node has confirmed the end of each connection that broke with something under way.
    pub fn is_all_confirmed(&self, node: NodeId) -> bool {
        self.shared.fences.broken(node).is_empty()
            && self.shared.counters.iter().all(|worker| worker.node(node).unconfirmed.get() == 0)
    }

    /// The node has confirmed the end of a connection, or is another process.
    pub fn connection_ended(&self, node: NodeId, connection: Process) {
        self.shared.fences.ended(node, &[connection]);
    }

    /// Begins a move, or goes on with one. A thread of its own does it and tells the order's [`Host`]; [`Host::ended`]
    /// is the last that is heard of it. If the router stops before, the move is where its journal says.
    ///
    /// # Errors
    /// `InvalidInput` where the order makes no sense (a node that does not exist, slots of somebody else),
    /// `AlreadyExists` where this move is under way; else what the system said.
    pub fn begin_move(&self, task: MoveTask) -> io::Result<()> {
        mover::begin(&self.shared, task)
    }

    /// Starts to record keys that clients write in these slots of an ejected node, from the epoch on that is published
    /// next. By this list the node can keep its other keys when it returns as the same process.
    pub fn slots_go_away(&self, node: NodeId, slots: &[Slot], fingerprints: Fingerprinter) {
        let facts = |facts: &mut NodeFacts| facts.run_id.clone().filter(|_| !facts.is_held);
        let process = self.shared.with_facts(node, facts);
        let process = process.as_deref();
        self.shared.change_moves(|moves| {
            let before = moves.away.iter().position(|away| away.node == node).map(|at| moves.away.remove(at));
            let away = before.map_or_else(|| Away::new(node, process, fingerprints), |before| Away::clone(&before));
            moves.away.push(Arc::new(away.with(slots, process)));
        });
    }

    /// Makes WAIT confirm no earlier write to an ejected node: other nodes are about to serve its slots without its
    /// keys. To be called when no client gets a reply from the node for these slots any more
    /// ([`Router::drained_of_the_lost`]), so that every write there was recorded before.
    pub fn keys_stay_behind(&self, node: NodeId) {
        self.shared.reigns.begin(node);
    }

    /// Ends the record of keys written while a node was ejected.
    pub fn slots_are_back(&self, node: NodeId) {
        if self.shared.plan().moves.away.iter().any(|away| away.node == node) {
            self.shared.change_moves(|moves| moves.away.retain(|away| away.node != node));
        }
    }

    /// Makes an ejected node lose all its keys at its next return, because one was interrupted.
    pub fn return_was_interrupted(&self, node: NodeId) {
        self.shared.plan().moves.away.iter().filter(|away| away.node == node).for_each(|away| away.note_any());
    }

    /// The database of clients that select none.
    pub fn own_database(&self) -> u32 {
        self.shared.plan().live.database
    }

    /// How far the moves are: those under way, and those that ended since the router started.
    pub fn moves(&self) -> Vec<MoveProgress> {
        let moves: Vec<_> = lock(&self.shared.moves).values().cloned().collect();
        moves.iter().map(|m| m.progress()).collect()
    }

    /// Takes note of what clients wait now, for moves to come: `balanced` and `gentle` ones are steered by whether it
    /// gets more. To be called about once a second; a move that begins without it waits half a second to find out, and
    /// takes that half second for what is usual.
    pub fn note_waits(&self) {
        let moving = lock(&self.shared.moves).values().any(|m| lock(&m.progress).end.is_none());
        let mut lately = lock(&self.shared.waits_lately);
        if moving {
            lately.forget();
        } else {
            lately.note(Instant::now(), || Waits::so_far(&self.shared.counters));
        }
    }

    /// Steers a move; false where no such move is under way.
    pub fn steer_move(&self, id: MoveId, steer: UserRequest) -> bool {
        let Some(found) = lock(&self.shared.moves).get(&id).cloned() else { return false };
        let under_way = lock(&found.progress).end.is_none();
        if under_way {
            found.notify(mover::MoverMessage::Steer(steer));
        }
        under_way
    }

    /// What the router knows of itself and its nodes.
    pub fn status(&self) -> Status {
        let plan = self.shared.plan();
        let nodes = plan.topology.nodes().map(|node| self.node_status(node.id, &node.name)).collect();
        let commands = self.shared.counters.iter().flat_map(|w| w.commands.iter()).map(Counter::get).sum();
        Status {
            epoch: plan.topology.epoch(),
            clients: self.shared.clients.load(Ordering::Relaxed) as u64,
            commands,
            uptime: self.shared.uptime(),
            nodes,
            limited: self.limited(),
        }
    }

    /// The name of a connection to a node that is this router's own, and is not ended as one that another has left;
    /// `what` says whose it is.
    pub fn connection_name(&self, what: &str) -> String {
        self.shared.connection_name(what)
    }

    /// The way to each node by its configuration, with the address that its name leads to by now.
    pub fn configured_access(&self) -> BTreeMap<NodeId, NodeAccess> {
        self.shared.plan().live.nodes.clone()
    }

    /// Settings that clients may change at every node (`nodes.config-set`).
    pub fn config_set(&self) -> Vec<String> {
        self.shared.plan().live.config_set.clone()
    }

    /// How the primary of each node is reached now.
    pub fn node_access(&self) -> BTreeMap<NodeId, NodeAccess> {
        let plan = self.shared.plan();
        let mut nodes = plan.live.nodes.clone();
        for (id, servers) in plan.servers.iter() {
            if let (Some(access), Some(primary)) = (nodes.get_mut(id), servers.primary) {
                access.address = Some(primary);
            }
        }
        nodes
    }

    /// Uses of the keys of each slot since the start, estimated of a sample.
    pub fn slot_counts(&self) -> Vec<SlotCount> {
        self.shared.board.slots()
    }

    /// Whether one node has every key, so that it takes every command.
    pub fn is_one_node(&self) -> bool {
        self.shared.plan().topology.only_node().is_some()
    }

    /// A library of functions at a node as it must become, checked or not: `None` where it is so already; `Err` has
    /// the reason why it cannot be.
    pub fn renewed_library(&self, code: &[u8]) -> Option<Result<Vec<u8>, String>> {
        let plan = self.shared.plan();
        lua::renewed_library(code, plan.libraries(), &plan.commands)
    }

    /// Commands that were served because there is one node, and would meet a limit if there were two.
    pub fn limited(&self) -> Vec<Limited> {
        self.shared.alone.counted()
    }

    /// What has gone to each node since the start. Not part of [`Router::status`]: only who looks again and again can
    /// make something of it.
    pub fn traffic(&self) -> BTreeMap<NodeId, Traffic> {
        let counters = |id| self.shared.counters.iter().map(|worker| worker.node(id)).collect::<Vec<_>>();
        self.shared.plan().topology.nodes().map(|node| (node.id, Traffic::of(&counters(node.id)))).collect()
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
            address: self.shared.plan().address_of(id, None),
            run_id: facts.run_id.as_deref().map(str::to_string),
            version: (!facts.version.is_empty()).then(|| format!("{} {}", facts.flavour, facts.version)),
            requests: sum(|c| c.classes.iter().map(|k| k.requests.get()).sum()),
            errors: sum(|c| c.classes.iter().map(|k| k.errors.get()).sum()),
            in_flight: sum(|c| c.in_flight.get()),
            slow_for: slow_since_us
                .map(|since_us| self.shared.uptime().saturating_sub(Duration::from_micros(since_us))),
            refusals: WriteRefusal::ALL
                .map(|refusal| counters.iter().map(|c| c.refusals[refusal as usize].get()).sum()),
            servers: self.shared.plan().servers.get(&id).cloned(),
        }
    }

    /// All metrics in Prometheus' text format.
    pub fn metrics(&self) -> String {
        let plan = self.shared.plan();
        let live = &plan.live;
        let mut scraped = lock(&self.shared.scraped);
        for node in plan.topology.nodes() {
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
            slots: plan.topology.slots_of(node.id),
            exceptions: plan.topology.exceptions_at(node.id),
            exclusive_bounds: self.shared.exclusive_bounds(node.id),
        };
        Scrape {
            workers: self.shared.counters.clone(),
            nodes: plan.topology.nodes().map(node).collect(),
            epoch: plan.topology.epoch(),
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

    /// Stops accepting, lets what is in flight finish within `bound`, then stops the workers.
    pub fn drain(mut self, bound: Duration) -> Drained {
        self.shared.draining.store(true, Ordering::Release);
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
        self.shared.ring_all();
        for thread in self.threads.drain(..) {
            // A worker that panicked has said so on stderr already.
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

/// Runs a worker, and another in its place should it panic: a bug that one client's bytes can reach must not stop the
/// others' service for longer than their reconnect.
fn run_worker(mut worker: Worker, index: usize, shared: &Arc<Shared>, listeners: &[Listener]) {
    loop {
        let failed = match std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| worker.run())) {
            Ok(Ok(())) => return shared.adopted(index, u64::MAX),
            Ok(Err(error)) => error.to_string(),
            Err(_) => {
                tracing::error!(
                    worker = index,
                    "a worker panicked: its clients are disconnected, and it starts anew. This is a bug, please report it"
                );
                shared.forget_worker(index);
                match clone_all(listeners).and_then(|listeners| Worker::new(index, shared.clone(), listeners)) {
                    Ok(next) => {
                        worker = next;
                        continue;
                    }
                    Err(error) => error.to_string(),
                }
            }
        };
        tracing::error!(worker = index, error = failed, "a worker stopped: the system refuses it epoll or descriptors");
        shared.adopted(index, u64::MAX);
        return;
    }
}

fn clone_all(listeners: &[Listener]) -> io::Result<Vec<Listener>> {
    listeners.iter().map(Listener::try_clone).collect()
}

/// The processors that this process may run on.
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

    fn ping(router: &Router) -> TcpStream {
        let mut stream = TcpStream::connect(router.addresses()[0]).expect("the router listens");
        stream.set_read_timeout(Some(Duration::from_secs(10))).expect("a timeout");
        stream.write_all(b"PING\r\n").expect("sent");
        let mut reply = [0; 7];
        stream.read_exact(&mut reply).expect("a reply");
        assert_eq!(&reply, b"+PONG\r\n");
        stream
    }

    #[test]
    fn a_panic_costs_a_worker_its_clients_and_no_more() {
        let topology = Topology::even(&["127.0.0.1:1".to_string()]).expect("one node");
        let settings = Settings {
            listen: vec![ListenerSettings::tcp("127.0.0.1:0".parse().expect("address"))],
            workers: 1,
            pin: false,
            batched_sends: true,
            threads: Threads::default(),
            site: "test".to_owned(),
            seat: None,
            servers: BTreeMap::new(),
            processes: BTreeMap::new(),
            held: None,
            ports: Ports::default(),
            live: RuntimeSettings::default(),
        };
        let router = Router::start(settings, Arc::new(topology)).expect("starts");
        let mut client = ping(&router);
        router.shared.mailboxes[0].send(shared::Message::Panic);
        assert_eq!(client.read(&mut [0; 1]).expect("closed, not timed out"), 0);
        let _again = ping(&router);
        assert_eq!(router.status().clients, 1);
        assert_eq!(router.drain(Duration::from_secs(5)), Drained { cut: 0 });
    }
}
