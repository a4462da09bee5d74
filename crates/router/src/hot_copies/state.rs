//! State of hot copies that workers share: gates, the set of cacheable keys, and the progress of each worker.
//!
//! Workers synchronise only through this file and through sockets, so `tests/loom` compiles it with the primitives of
//! loom and executes it in all orders that Acquire and Release permit.

use std::collections::BTreeMap;

use switchyard_policy::hot_copies::{CacheableSet, Gate, GateId, Gates};
use switchyard_policy::telemetry::Notices;
use switchyard_policy::topology::{NodeId, Slot};

use crate::lock::lock;
use crate::sync::{
    Arc, AtomicBool, AtomicU64, BLOCK, BLOCKS, Condvar, GATES, Mutex, OnceLock, Ordering, node_gates, place_of_gate,
};

/// Maximum number of requested keys that wait for the coordinator.
const WANTED_MAX: usize = 4096;

#[derive(Debug)]
pub(crate) struct Table(Box<[AtomicU64]>);

impl Table {
    fn new() -> Self {
        Self((0..GATES).map(|_| AtomicU64::new(0)).collect())
    }
}

/// Changes of one gate have one order for all threads, because they are atomic. Changes of several gates need none: a
/// write is compared with a copy by each of its gates alone.
///
/// - A hit sees every change that happened before it. A change happens before a hit if the worker that received the
///   command for the hit could know of it: the reply to the write, or to a read of its value, has passed through
///   sockets, whose system calls order memory. No stronger load is needed, because an atomic load never returns a value
///   older than one that happened before it.
/// - A fill that sees a gate lowered is sent after the reply to the write: Release here, Acquire in the load. So the node
///   executes the read later.
///
/// `tests/loom` checks both, and fails with Relaxed.
impl Gates for Table {
    #[inline]
    fn load(&self, gate: GateId) -> Gate {
        Gate(self.0[place_of_gate(gate)].load(Ordering::Acquire))
    }

    fn add(&self, gate: GateId, what: u64) {
        self.0[place_of_gate(gate)].fetch_add(what, Ordering::AcqRel);
    }
}

/// State that workers adopt.
#[derive(Clone, Debug)]
pub(crate) struct Published {
    pub(crate) set: Arc<CacheableSet>,
    pub(crate) gates: Arc<Table>,
    /// Every key that is read becomes cacheable.
    pub(crate) all: bool,
    /// An operator has disabled hot copies. All node gates are shut.
    is_suspended: bool,
}

/// Value of a node for which the worker has not published a generation. Below the generation of every key, because the
/// first key becomes cacheable in generation 1.
const UNPUBLISHED: u64 = 0;

/// Oldest generation of a worker's commands in flight, by node id.
///
/// One thread at a time writes it: the worker, or the thread that replaces the worker after a panic. All workers read
/// it on the path of a command, so it has no lock. Node ids are never reused and may exceed the number of nodes by far,
/// so blocks are allocated as ids need them. They are never moved or freed: readers need neither a lock nor a reference
/// count.
#[derive(Debug)]
struct OldestInFlight(Box<[OnceLock<Box<[AtomicU64]>>]>);

impl Default for OldestInFlight {
    fn default() -> Self {
        Self((0..BLOCKS).map(|_| OnceLock::new()).collect())
    }
}

impl OldestInFlight {
    /// Publishes the generations of all nodes. Nodes beyond the end become unpublished.
    fn publish(&self, by_node: Vec<u64>) {
        let mut by_node = by_node.into_iter();
        for block in &self.0 {
            if by_node.len() == 0 && block.get().is_none() {
                continue;
            }
            for entry in block.get_or_init(|| (0..BLOCK).map(|_| AtomicU64::new(UNPUBLISHED)).collect()) {
                let oldest = by_node.next().unwrap_or(UNPUBLISHED);
                // No other thread writes the entry now. An unchanged one stays in the caches of its readers.
                if entry.load(Ordering::Relaxed) != oldest {
                    // After the replies to all older commands: see `HotCopies::may_fill`.
                    entry.store(oldest, Ordering::Release);
                }
            }
        }
    }

    fn of(&self, node: NodeId) -> u64 {
        let block = self.0.get(node.index() / BLOCK).and_then(OnceLock::get);
        block.and_then(|block| block.get(node.index() % BLOCK)).map_or(UNPUBLISHED, |at| at.load(Ordering::Acquire))
    }
}

/// Progress of a worker.
#[derive(Debug, Default)]
struct Progress {
    /// Adopted generation: the worker raises the gates of its keys.
    adopted: AtomicU64,
    /// Oldest generation of commands in flight.
    drained: OldestInFlight,
}

/// Keys that are no longer cacheable. Their gates are shut until every worker has adopted the set without them: such a
/// worker no longer raises the gates for its writes, and other workers would still serve their copies.
#[derive(Debug)]
struct RemovedKeys {
    generation: u64,
    gates: Arc<Table>,
    shut: Vec<GateId>,
}

/// Shared state of hot copies.
#[derive(Debug)]
pub(crate) struct HotCopies {
    published: Mutex<Published>,
    /// Generation of the set. Read by each worker once per turn.
    generation: AtomicU64,
    workers: Vec<Progress>,
    removed: Mutex<Vec<RemovedKeys>>,
    pub(super) requested: Mutex<Vec<(u64, Slot)>>,
    pub(super) noticed: Mutex<Notices>,
    /// Wakes the coordinator.
    pub(super) bell: Condvar,
    pub(super) is_stopped: AtomicBool,
    /// Nodes that do not support copies, with the reasons.
    refused: Mutex<BTreeMap<NodeId, String>>,
}

impl HotCopies {
    pub(crate) fn new(workers: usize) -> Self {
        let published =
            Published { set: Arc::default(), gates: Arc::new(Table::new()), all: false, is_suspended: false };
        Self {
            published: Mutex::new(published),
            generation: AtomicU64::new(0),
            workers: (0..workers).map(|_| Progress::default()).collect(),
            removed: Mutex::default(),
            requested: Mutex::default(),
            noticed: Mutex::default(),
            bell: Condvar::new(),
            is_stopped: AtomicBool::new(false),
            refused: Mutex::default(),
        }
    }

    #[inline]
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    pub(crate) fn published(&self) -> Published {
        lock(&self.published).clone()
    }

    /// Publishes a set of the next generation.
    fn publish(&self, change: impl FnOnce(&Published) -> Published) {
        let mut published = lock(&self.published);
        *published = change(&published);
        self.generation.store(published.set.generation(), Ordering::Release);
    }

    /// Publishes the next set. `more`: added keys, `less`: removed keys.
    pub(super) fn change(&self, all: bool, more: Vec<(u64, Slot)>, less: Vec<u64>) {
        self.publish(|published| {
            let shut: Vec<GateId> = less.iter().map(|hash| GateId::of_key(*hash)).collect();
            shut.iter().for_each(|gate| published.gates.raise(*gate));
            let set = published.set.next(more, less);
            if !shut.is_empty() {
                lock(&self.removed).push(RemovedKeys {
                    generation: set.generation(),
                    gates: published.gates.clone(),
                    shut,
                });
            }
            Published { set: Arc::new(set), all, ..published.clone() }
        });
    }

    /// Opens the gates of removed keys that no worker has any more. Call it regularly.
    pub(super) fn release(&self) {
        let adopted =
            self.workers.iter().map(|worker| worker.adopted.load(Ordering::Acquire)).min().unwrap_or(u64::MAX);
        lock(&self.removed).retain(|leaving| {
            let is_over = adopted >= leaving.generation;
            if is_over {
                leaving.shut.iter().for_each(|gate| leaving.gates.lower(*gate));
            }
            !is_over
        });
    }

    // ---- progress of workers ----

    /// Records that the worker raises the gates of this generation.
    pub(crate) fn adopted(&self, worker: usize, generation: u64) {
        self.workers[worker].adopted.store(generation, Ordering::Release);
    }

    /// Records the oldest generation of the worker's commands in flight, by node.
    pub(crate) fn drained(&self, worker: usize, by_node: Vec<u64>) {
        self.workers[worker].drained.publish(by_node);
    }

    /// Whether a key added in this generation may be filled from the node: all workers raise its gate, and no older
    /// command is in flight there.
    ///
    /// Each worker's two values are loaded separately, while the worker may change them. This suffices:
    /// - A worker that has adopted a generation sends only commands of this or a newer generation. So a condition that
    ///   is true stays true, unless the worker panics. Then all keys restart in a newer generation, and the copies of
    ///   this one end with their gates ([`Self::forget_worker`]).
    /// - The worker stores its values with Release after the replies to all older commands have arrived, and the loads
    ///   are Acquire loads. So the node has executed these commands before the caller sends the fill.
    /// - An outdated value is smaller and only delays the fill, or belongs to a node without commands. After a panic,
    ///   an outdated value may be greater. It is below the newer generation, and workers with keys of that generation
    ///   do not load it: [`Self::forget_worker`] resets the values first.
    pub(crate) fn may_fill(&self, since: u64, node: NodeId) -> bool {
        self.workers
            .iter()
            .all(|worker| worker.adopted.load(Ordering::Acquire) >= since && worker.drained.of(node) >= since)
    }

    /// Replaces all gates after a panic of a worker: nothing would lower the gates that it has raised, and its commands
    /// in flight are only known by their connections. All keys start as new.
    pub(crate) fn forget_worker(&self, worker: usize) {
        self.workers[worker].adopted.store(0, Ordering::Release);
        self.workers[worker].drained.publish(Vec::new());
        self.publish(|published| {
            // Other workers use the old gates until they adopt the new ones: shut them.
            node_gates().for_each(|gate| published.gates.raise(gate));
            let gates = Table::new();
            if published.is_suspended {
                node_gates().for_each(|gate| gates.raise(gate));
            }
            Published { set: Arc::new(published.set.renewed()), gates: Arc::new(gates), ..*published }
        });
    }

    // ---- invalidation at all workers ----

    /// Invalidates all copies of a node, before or after its process is replaced.
    pub(crate) fn invalidate_node(&self, node: NodeId) {
        lock(&self.published).gates.renew(GateId::of_node(node));
    }

    /// Invalidates all copies.
    pub(crate) fn invalidate_all(&self) {
        let published = lock(&self.published);
        node_gates().for_each(|gate| published.gates.renew(gate));
    }

    /// Invalidates the copies of a key.
    pub(crate) fn invalidate_key(&self, hash: u64) {
        lock(&self.published).gates.renew(GateId::of_key(hash));
    }

    /// Suspends or resumes hot copies on all workers at once. Returns whether the state changed.
    pub(crate) fn suspend(&self, is_suspended: bool) -> bool {
        let mut published = lock(&self.published);
        let is_news = published.is_suspended != is_suspended;
        published.is_suspended = is_suspended;
        if is_news {
            node_gates()
                .for_each(|gate| if is_suspended { published.gates.raise(gate) } else { published.gates.lower(gate) });
        }
        is_news
    }

    // ---- for the coordinator ----

    /// Requests that a key becomes cacheable at once.
    pub(crate) fn request_key(&self, hash: u64, slot: Slot) {
        let mut wanted = lock(&self.requested);
        if wanted.len() < WANTED_MAX {
            wanted.push((hash, slot));
            if wanted.len() == 1 {
                self.bell.notify_one();
            }
        }
    }

    /// Records the number of occurrences of a key among a worker's last commands to a node.
    pub(crate) fn note_frequent(&self, worker: usize, hash: u64, slot: Slot, count: u8) {
        if lock(&self.noticed).add(worker, hash, count) {
            self.request_key(hash, slot);
        }
    }

    pub(crate) fn stop(&self) {
        self.is_stopped.store(true, Ordering::Release);
        let _wanted = lock(&self.requested);
        self.bell.notify_one();
    }

    // ---- for operators ----

    /// Records why a node does not support copies, or (`None`) that it does. Returns whether this changed.
    pub(crate) fn refused(&self, node: NodeId, why: Option<String>) -> bool {
        let mut refused = lock(&self.refused);
        match why {
            Some(why) => refused.insert(node, why.clone()).is_none_or(|before| before != why),
            None => refused.remove(&node).is_some(),
        }
    }

    /// Returns the nodes that do not support copies, with reasons.
    pub(crate) fn refusals(&self) -> BTreeMap<NodeId, String> {
        lock(&self.refused).clone()
    }

    /// Whether an operator has disabled hot copies.
    pub(crate) fn is_suspended(&self) -> bool {
        lock(&self.published).is_suspended
    }

    /// Number of cacheable keys.
    pub(crate) fn keys(&self) -> u64 {
        lock(&self.published).set.len() as u64
    }
}
