//! State of hot copies ([`switchyard_policy::hot_copies`]) that workers share: gates, the set of cacheable keys, and
//! the progress of each worker.
//!
//! A hit reads two gates and no other shared state. Only writes of cacheable keys, and of whole nodes, change a gate.
//! Each worker has its own copies: shared copies would need a lock, or reference counts that all workers write.
//!
//! The [`coordinator`] thread chooses the keys from the counts of all workers once a second, and from requests of
//! workers at once.

mod coordinator;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use switchyard_policy::hot_copies::{CacheableSet, Gate, GateId, Gates};
use switchyard_policy::telemetry::Notices;
use switchyard_policy::topology::{NodeId, Slot};

pub(crate) use coordinator::coordinate;

use crate::shared::lock;

/// Maximum number of requested keys that wait for the coordinator.
const WANTED_MAX: usize = 4096;

#[derive(Debug)]
pub(crate) struct Table(Box<[AtomicU64]>);

impl Table {
    fn new() -> Self {
        Self((0..GateId::COUNT).map(|_| AtomicU64::new(0)).collect())
    }
}

impl Gates for Table {
    #[inline]
    fn load(&self, gate: GateId) -> Gate {
        Gate(self.0[gate.index()].load(Ordering::Acquire))
    }

    fn add(&self, gate: GateId, what: u64) {
        // Sequentially consistent with all loads of gates: for all workers, a command sent later comes after this
        // change.
        self.0[gate.index()].fetch_add(what, Ordering::SeqCst);
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

/// Progress of a worker.
#[derive(Debug, Default)]
struct Progress {
    /// Adopted generation: the worker raises the gates of its keys.
    adopted: AtomicU64,
    /// Oldest generation of commands in flight, by node number.
    drained: Mutex<Vec<u64>>,
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
    requested: Mutex<Vec<(u64, Slot)>>,
    noticed: Mutex<Notices>,
    /// Wakes the coordinator.
    bell: Condvar,
    is_stopped: AtomicBool,
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
    fn change(&self, all: bool, more: Vec<(u64, Slot)>, less: Vec<u64>) {
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
    fn release(&self) {
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
        *lock(&self.workers[worker].drained) = by_node;
    }

    /// Whether a key added in this generation may be filled from the node: all workers raise its gate, and no older
    /// command is in flight there.
    pub(crate) fn may_fill(&self, since: u64, node: NodeId) -> bool {
        self.workers.iter().all(|worker| {
            worker.adopted.load(Ordering::Acquire) >= since
                && lock(&worker.drained).get(node.index()).is_some_and(|oldest| *oldest >= since)
        })
    }

    /// Replaces all gates after a panic of a worker: nothing would lower the gates that it has raised, and its commands
    /// in flight are only known by their connections. All keys start as new.
    pub(crate) fn forget_worker(&self, worker: usize) {
        self.workers[worker].adopted.store(0, Ordering::Release);
        lock(&self.workers[worker].drained).clear();
        self.publish(|published| {
            // Other workers use the old gates until they adopt the new ones: shut them.
            GateId::of_nodes().for_each(|gate| published.gates.raise(gate));
            let gates = Table::new();
            if published.is_suspended {
                GateId::of_nodes().for_each(|gate| gates.raise(gate));
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
        GateId::of_nodes().for_each(|gate| published.gates.renew(gate));
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
            GateId::of_nodes()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gate_of_a_removed_key_is_shut_until_all_workers_adopt_the_set() {
        let hot = HotCopies::new(2);
        let (hash, slot) = (77 << 40, Slot::new(7).expect("a slot"));
        let gate = || hot.published().gates.load(GateId::of_key(hash));
        hot.change(false, vec![(hash, slot)], Vec::new());
        hot.release();
        assert!(gate().is_open(), "gate of an added key");
        let before = gate();
        hot.change(false, Vec::new(), vec![hash]);
        hot.adopted(0, 2);
        hot.release();
        assert!(!gate().is_open(), "the other worker has the set with it");
        hot.adopted(1, 2);
        hot.release();
        assert!(gate().is_open() && gate() != before);
    }

    #[test]
    fn worker_panic_replaces_gates_and_restarts_all_keys() {
        let hot = HotCopies::new(2);
        hot.change(true, vec![(1, Slot::new(7).expect("a slot"))], Vec::new());
        let before = hot.published();
        [0, 1].into_iter().for_each(|worker| {
            hot.adopted(worker, 1);
            hot.drained(worker, vec![1]);
        });
        assert!(hot.may_fill(1, NodeId(0)));
        hot.forget_worker(1);
        let after = hot.published();
        assert!(
            !before.gates.load(GateId::of_node(NodeId(0))).is_open()
                && after.gates.load(GateId::of_node(NodeId(0))).is_open()
        );
        let since = after.set.get(1).expect("armed").since;
        assert!(since == 2 && after.all && !hot.may_fill(since, NodeId(0)));
    }

    #[test]
    fn suspension_persists_across_new_gates() {
        let hot = HotCopies::new(1);
        assert!(hot.suspend(true) && !hot.suspend(true));
        hot.forget_worker(0);
        assert!(!hot.published().gates.load(GateId::of_node(NodeId(3))).is_open());
        assert!(hot.suspend(false));
        assert!(hot.published().gates.load(GateId::of_node(NodeId(3))).is_open());
    }
}
