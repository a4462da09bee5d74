//! Number of exclusive connections to a node, over all workers. The limit applies to the sum, because the node counts
//! all of them.
//!
//! Accessed when such a connection is opened or closed, never by a command that finds a free one. A worker without a
//! connection sets `waiting`. Other workers then close free connections and keep no more than their share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::metrics::Counter;

/// Number of kinds of exclusive connections, see `Lane::pool`.
pub(crate) const KINDS: usize = 3;

/// Maximum share of a node's `maxclients` for exclusive connections, as a fraction. The rest is for shared connections,
/// replicas, other routers and operators.
const OF_MAXCLIENTS: (usize, usize) = (3, 4);

#[derive(Debug)]
pub(crate) struct ExclusiveBounds {
    open: [AtomicUsize; KINDS],
    /// Counts per worker and kind, needed if a worker panics.
    by_worker: Vec<[Counter; KINDS]>,
    /// Workers (modulo 64) with clients that wait for a connection.
    waiting: [AtomicU64; KINDS],
    /// The node's `maxclients`. 0 if unknown.
    clients_max: AtomicUsize,
}

impl ExclusiveBounds {
    pub(crate) fn new(workers: usize) -> Arc<Self> {
        Arc::new(Self {
            open: Default::default(),
            by_worker: (0..workers).map(|_| Default::default()).collect(),
            waiting: Default::default(),
            clients_max: AtomicUsize::new(0),
        })
    }

    /// Returns the maximum number of connections of a kind: the configured limit, or less if the node accepts less.
    pub(crate) fn bound(&self, configured: usize) -> usize {
        match self.clients_max.load(Ordering::Relaxed) {
            0 => configured,
            max => configured.min((max * OF_MAXCLIENTS.0 / OF_MAXCLIENTS.1).max(1)),
        }
    }

    /// Number of open connections of a kind.
    pub(crate) fn open(&self, kind: usize) -> usize {
        self.open[kind].load(Ordering::Relaxed)
    }

    pub(crate) fn set_clients_max(&self, max: usize) {
        self.clients_max.store(max, Ordering::Relaxed);
    }

    /// Returns how many more connections of a kind may be opened.
    pub(crate) fn available(&self, kind: usize, configured: usize) -> usize {
        let of_kind = self.open[kind].load(Ordering::Relaxed);
        configured.saturating_sub(of_kind).min(self.bound(usize::MAX).saturating_sub(self.all()))
    }

    /// Whether the total over all kinds has reached the node's limit.
    pub(crate) fn is_full(&self) -> bool {
        self.all() >= self.bound(usize::MAX)
    }

    fn all(&self) -> usize {
        self.open.iter().map(|open| open.load(Ordering::Acquire)).sum()
    }

    /// Reserves a connection for this worker. Returns false at the limit.
    pub(crate) fn take(&self, worker: usize, kind: usize, configured: usize) -> bool {
        let one_more = |open: usize| (open < configured).then_some(open + 1);
        if self.open[kind].fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more).is_err() {
            return false;
        }
        // Counted before the check, so that two workers cannot both take the last place.
        if self.all() > self.bound(usize::MAX) {
            self.open[kind].fetch_sub(1, Ordering::AcqRel);
            return false;
        }
        self.by_worker[worker][kind].add(1);
        true
    }

    /// Releases a connection of this worker. Returns the workers that wait, as bits.
    pub(crate) fn release(&self, worker: usize, kind: usize) -> u64 {
        self.open[kind].fetch_sub(1, Ordering::AcqRel);
        self.by_worker[worker][kind].sub(1);
        // All kinds: the node's limit is shared between them.
        self.waiting.iter().fold(0, |all, waiting| all | waiting.load(Ordering::Acquire))
    }

    /// Sets whether this worker waits for a connection. Returns whether this changed.
    pub(crate) fn set_waiting(&self, worker: usize, kind: usize, waits: bool) -> bool {
        let bit = 1 << (worker % 64);
        let waiting = &self.waiting[kind];
        if (waiting.load(Ordering::Acquire) & bit != 0) == waits {
            return false;
        }
        if waits {
            waiting.fetch_or(bit, Ordering::AcqRel)
        } else {
            waiting.fetch_and(!bit, Ordering::AcqRel)
        };
        true
    }

    /// Whether this worker, with `own` connections of a kind, should close one that is free: other workers wait, and it
    /// has more than its share.
    pub(crate) fn is_above_share(&self, worker: usize, kind: usize, own: usize, configured: usize) -> bool {
        let others = self.waiting[kind].load(Ordering::Acquire) & !(1 << (worker % 64));
        others != 0 && own > self.bound(configured) / self.by_worker.len()
    }

    /// Releases all connections of a worker that has panicked.
    pub(crate) fn forget_worker(&self, worker: usize) {
        for (kind, counter) in self.by_worker[worker].iter().enumerate() {
            self.open[kind].fetch_sub(counter.get() as usize, Ordering::AcqRel);
            counter.set(0);
            self.set_waiting(worker, kind, false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_limit_holds_over_concurrent_workers() {
        let bounds = ExclusiveBounds::new(4);
        let most = AtomicUsize::new(0);
        let taken: [AtomicUsize; 2] = Default::default();
        std::thread::scope(|scope| {
            for worker in 0..4 {
                let (bounds, most, taken) = (&bounds, &most, &taken);
                scope.spawn(move || {
                    for round in 0..20_000 {
                        if bounds.take(worker, round % 2, 3) {
                            // Released before the limit is, so these connections were open at the same time.
                            most.fetch_max(taken[round % 2].fetch_add(1, Ordering::AcqRel) + 1, Ordering::Relaxed);
                            taken[round % 2].fetch_sub(1, Ordering::AcqRel);
                            bounds.release(worker, round % 2);
                        }
                    }
                });
            }
        });
        assert!((1..=3).contains(&most.load(Ordering::Relaxed)));
        assert_eq!((bounds.available(0, 3), bounds.available(1, 3)), (3, 3));
    }

    #[test]
    fn node_limit_applies_to_all_kinds_together() {
        let bounds = ExclusiveBounds::new(2);
        bounds.set_clients_max(8);
        assert!((0..6).all(|n| bounds.take(n % 2, n % 3, 100)));
        assert!((0..3).all(|kind| !bounds.take(0, kind, 100) && bounds.available(kind, 100) == 0));
        bounds.set_waiting(1, 2, true);
        assert_eq!(bounds.release(0, 0), 0b10, "of whatever kind");
        assert!(bounds.take(1, 2, 100) && bounds.set_waiting(1, 2, false) && !bounds.set_waiting(1, 2, false));
        bounds.forget_worker(1);
        assert!((0..4).all(|_| bounds.take(0, 1, 100)) && !bounds.take(0, 1, 100));
    }

    #[test]
    fn workers_keep_at_most_their_share_while_others_wait() {
        let bounds = ExclusiveBounds::new(2);
        assert!(!bounds.is_above_share(0, 1, 4, 4), "nobody waits");
        bounds.set_waiting(1, 1, true);
        assert!(
            bounds.is_above_share(0, 1, 3, 4)
                && !bounds.is_above_share(0, 1, 2, 4)
                && !bounds.is_above_share(1, 1, 3, 4)
        );
    }
}
