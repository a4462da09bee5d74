//! Publication of the routing snapshot to the workers, and the barriers of movers and failovers.
//!
//! Two barriers: all workers have left the old servers ([`Publication::all_left_old_servers`]), and no command that a
//! worker sent under an older epoch is in flight ([`DrainBarrier::has_drained`]). Workers synchronise only through this
//! file and through sockets, so `tests/loom` compiles it with the primitives of loom and executes it in all orders that
//! Acquire and Release permit.

use switchyard_policy::topology::NodeId;

use crate::lock::lock;
use crate::sync::{Arc, AtomicU64, Mutex, Ordering};

/// The current snapshot, and the progress of the workers.
#[derive(Debug)]
pub(crate) struct Publication<T> {
    current: Mutex<Arc<T>>,
    /// Number of the current snapshot. A worker with another number adopts the snapshot.
    generation: AtomicU64,
    /// Number of the snapshot that last changed primaries.
    primaries_generation: AtomicU64,
    /// Adopted snapshot of each worker.
    adopted: Vec<AtomicU64>,
}

impl<T: Clone> Publication<T> {
    pub(crate) fn new(first: T, workers: usize) -> Self {
        Self {
            current: Mutex::new(Arc::new(first)),
            generation: AtomicU64::new(1),
            primaries_generation: AtomicU64::new(0),
            adopted: (0..workers).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Number of the current snapshot. Read by each worker once per turn.
    #[inline]
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    pub(crate) fn current(&self) -> Arc<T> {
        lock(&self.current).clone()
    }

    /// Returns the current snapshot, in an allocation of its own, with its number. Both are read under one lock: an old
    /// snapshot with a newer number would be kept until the next change.
    pub(crate) fn own(&self) -> (u64, Arc<T>) {
        let current = lock(&self.current);
        (self.generation(), Arc::new((**current).clone()))
    }

    /// Replaces the snapshot. `observe` is called under the lock, before workers can adopt it.
    pub(crate) fn change(&self, change: impl FnOnce(&T) -> T, observe: impl FnOnce(&T)) {
        self.replace(change, observe, false);
    }

    /// Like [`Self::change`]; workers leave the old servers when they adopt it.
    pub(crate) fn change_servers(&self, change: impl FnOnce(&T) -> T, observe: impl FnOnce(&T)) {
        self.replace(change, observe, true);
    }

    fn replace(&self, change: impl FnOnce(&T) -> T, observe: impl FnOnce(&T), leaves_servers: bool) {
        let mut current = lock(&self.current);
        let next = change(&current);
        observe(&next);
        if leaves_servers {
            // Before the snapshot, so that a worker that has adopted an older one cannot pass for the newest.
            self.primaries_generation.store(self.generation() + 1, Ordering::Release);
        }
        *current = Arc::new(next);
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Records that a worker has adopted the snapshot of this number and has left old primaries. `u64::MAX`: it sends
    /// nothing any more.
    pub(crate) fn adopted(&self, worker: usize, generation: u64) {
        self.adopted[worker].store(generation, Ordering::Release);
    }

    /// Whether a worker with the snapshot of this number must leave servers or processes because of a newer snapshot.
    pub(crate) fn must_leave_servers(&self, known: u64) -> bool {
        self.primaries_generation.load(Ordering::Acquire) > known
    }

    /// Whether no worker uses an old primary or a replaced process any more.
    pub(crate) fn all_left_old_servers(&self) -> bool {
        let since = self.primaries_generation.load(Ordering::Acquire);
        self.adopted.iter().all(|adopted| adopted.load(Ordering::Acquire) >= since)
    }
}

/// Oldest epoch of commands in flight, by node.
#[derive(Clone, Debug, Default)]
pub(crate) struct OldestInFlight {
    /// Commands that may still be executed.
    pub(crate) executed: Vec<u64>,
    /// Commands that may still be answered. Excludes commands of broken connections.
    pub(crate) answered: Vec<u64>,
}

/// Epochs of the workers' commands in flight.
#[derive(Debug)]
pub(crate) struct DrainBarrier {
    /// Per worker: oldest epoch of a command still in flight (the worker's own epoch if there is none).
    oldest: Vec<AtomicU64>,
    /// The oldest epochs by node, maintained while a mover waits.
    by_node: Vec<Mutex<OldestInFlight>>,
    /// Highest epoch that a mover waits for.
    wanted: AtomicU64,
}

impl DrainBarrier {
    pub(crate) fn new(workers: usize, epoch: u64) -> Self {
        Self {
            oldest: (0..workers).map(|_| AtomicU64::new(epoch)).collect(),
            by_node: (0..workers).map(|_| Mutex::new(OldestInFlight::default())).collect(),
            wanted: AtomicU64::new(0),
        }
    }

    /// Records the oldest epoch of the worker's commands in flight, in total and for the nodes in `by_node`.
    pub(crate) fn publish(&self, worker: usize, oldest: u64, by_node: OldestInFlight) {
        *lock(&self.by_node[worker]) = by_node;
        // After the replies to all older commands.
        self.oldest[worker].store(oldest, Ordering::Release);
    }

    /// Oldest epoch of the worker's commands in flight.
    pub(crate) fn of(&self, worker: usize) -> u64 {
        self.oldest[worker].load(Ordering::Acquire)
    }

    /// Oldest epoch of any command in flight.
    pub(crate) fn oldest(&self) -> u64 {
        self.oldest.iter().map(|oldest| oldest.load(Ordering::Acquire)).min().unwrap_or(0)
    }

    /// Whether every worker has adopted this epoch, and no command of an older one is in flight at the node.
    pub(crate) fn has_drained(&self, epoch: u64, node: NodeId, which: fn(&OldestInFlight) -> &Vec<u64>) -> bool {
        self.by_node.iter().zip(&self.oldest).all(|(by_node, oldest)| {
            oldest.load(Ordering::Acquire) >= epoch
                || which(&lock(by_node)).get(node.index()).is_some_and(|oldest| *oldest >= epoch)
        })
    }

    /// Makes workers publish promptly until nothing older than this epoch is in flight.
    pub(crate) fn want(&self, epoch: u64) {
        self.wanted.fetch_max(epoch, Ordering::AcqRel);
    }

    /// Whether a mover waits for the worker.
    pub(crate) fn is_wanted(&self, worker: usize) -> bool {
        self.wanted.load(Ordering::Relaxed) > self.oldest[worker].load(Ordering::Relaxed)
    }
}
