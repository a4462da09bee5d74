//! How many exclusive connections there are to a node, over all workers: its bound holds for all of them together,
//! because the node counts them together.
//!
//! Touched where such a connection is made or closed, never by a command that finds one. A worker that gets none says
//! so (`waiting`); the others then give up free ones, and do not keep more than their share when one of theirs becomes
//! free.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::metrics::Counter;

/// Kinds of exclusive connections, by `Lane::pool`.
pub(crate) const KINDS: usize = 3;

/// Of a node's `maxclients`, exclusive connections take at most so much: the rest is for shared ones, replicas, other
/// routers and people.
const OF_MAXCLIENTS: (usize, usize) = (3, 4);

/// The exclusive connections to one node.
#[derive(Debug)]
pub(crate) struct ExclusiveBounds {
    open: [AtomicUsize; KINDS],
    /// The same by worker, for the case that one panics.
    by_worker: Vec<[Counter; KINDS]>,
    /// Workers (modulo 64) that have clients in line and got no connection for them.
    waiting: [AtomicU64; KINDS],
    /// The node's `maxclients`; 0 where it does not say.
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

    /// The most connections of a kind, where so many are configured; what the node takes may be less.
    pub(crate) fn bound(&self, configured: usize) -> usize {
        match self.clients_max.load(Ordering::Relaxed) {
            0 => configured,
            max => configured.min((max * OF_MAXCLIENTS.0 / OF_MAXCLIENTS.1).max(1)),
        }
    }

    /// How many there are of a kind.
    pub(crate) fn open(&self, kind: usize) -> usize {
        self.open[kind].load(Ordering::Relaxed)
    }

    pub(crate) fn set_clients_max(&self, max: usize) {
        self.clients_max.store(max, Ordering::Relaxed);
    }

    /// How many more there may be.
    pub(crate) fn left(&self, kind: usize, configured: usize) -> usize {
        let of_kind = self.open[kind].load(Ordering::Relaxed);
        configured.saturating_sub(of_kind).min(self.bound(usize::MAX).saturating_sub(self.all()))
    }

    /// Whether the node takes no more, of whatever kind.
    pub(crate) fn is_full(&self) -> bool {
        self.all() >= self.bound(usize::MAX)
    }

    fn all(&self) -> usize {
        self.open.iter().map(|open| open.load(Ordering::Acquire)).sum()
    }

    /// Takes room for one of this worker's; false where there is none.
    pub(crate) fn take(&self, worker: usize, kind: usize, configured: usize) -> bool {
        let one_more = |open: usize| (open < configured).then_some(open + 1);
        if self.open[kind].fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more).is_err() {
            return false;
        }
        // Counted first: of two that find the last place taken by each other, neither is above what the node takes.
        if self.all() > self.bound(usize::MAX) {
            self.open[kind].fetch_sub(1, Ordering::AcqRel);
            return false;
        }
        self.by_worker[worker][kind].add(1);
        true
    }

    /// One of this worker's has been closed. Gives the workers that wait for room.
    pub(crate) fn give_back(&self, worker: usize, kind: usize) -> u64 {
        self.open[kind].fetch_sub(1, Ordering::AcqRel);
        self.by_worker[worker][kind].sub(1);
        // Another kind may have had all that the node takes.
        self.waiting.iter().fold(0, |all, waiting| all | waiting.load(Ordering::Acquire))
    }

    /// Says whether this worker waits for room; gives whether it said otherwise before.
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

    /// Whether this worker, which has so many of a kind, is to give one up that has become free: others wait, and it
    /// has more than its share.
    pub(crate) fn is_above_share(&self, worker: usize, kind: usize, own: usize, configured: usize) -> bool {
        let others = self.waiting[kind].load(Ordering::Acquire) & !(1 << (worker % 64));
        others != 0 && own > self.bound(configured) / self.by_worker.len()
    }

    /// A worker has panicked: its connections are gone.
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
    fn a_bound_holds_over_all_workers_whoever_comes_when() {
        let bounds = ExclusiveBounds::new(4);
        let most = AtomicUsize::new(0);
        let taken: [AtomicUsize; 2] = Default::default();
        std::thread::scope(|scope| {
            for worker in 0..4 {
                let (bounds, most, taken) = (&bounds, &most, &taken);
                scope.spawn(move || {
                    for round in 0..20_000 {
                        if bounds.take(worker, round % 2, 3) {
                            // Given back before the bound is: what is counted here was taken at one time.
                            most.fetch_max(taken[round % 2].fetch_add(1, Ordering::AcqRel) + 1, Ordering::Relaxed);
                            taken[round % 2].fetch_sub(1, Ordering::AcqRel);
                            bounds.give_back(worker, round % 2);
                        }
                    }
                });
            }
        });
        assert!((1..=3).contains(&most.load(Ordering::Relaxed)));
        assert_eq!((bounds.left(0, 3), bounds.left(1, 3)), (3, 3));
    }

    #[test]
    fn what_a_node_takes_bounds_all_kinds_together() {
        let bounds = ExclusiveBounds::new(2);
        bounds.set_clients_max(8);
        assert!((0..6).all(|n| bounds.take(n % 2, n % 3, 100)));
        assert!((0..3).all(|kind| !bounds.take(0, kind, 100) && bounds.left(kind, 100) == 0));
        bounds.set_waiting(1, 2, true);
        assert_eq!(bounds.give_back(0, 0), 0b10, "of whatever kind");
        assert!(bounds.take(1, 2, 100) && bounds.set_waiting(1, 2, false) && !bounds.set_waiting(1, 2, false));
        bounds.forget_worker(1);
        assert!((0..4).all(|_| bounds.take(0, 1, 100)) && !bounds.take(0, 1, 100));
    }

    #[test]
    fn nobody_keeps_more_than_its_share_while_others_wait() {
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
