//! Subscriptions of all workers, for the reply to `PUBLISH` and for `PUBSUB`.
//!
//! Workers write them when a client subscribes or leaves, and read them for the reply to a `PUBLISH`. Messages do not
//! pass here: each worker has its own subscriptions at the nodes, and delivers their messages to its own clients.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use switchyard_policy::topology::NodeId;
use switchyard_resp::glob;

/// Kind of a subscription.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Channel,
    Pattern,
    Shard,
}

impl Kind {
    pub(crate) const ALL: [Kind; 3] = [Kind::Channel, Kind::Pattern, Kind::Shard];

    /// Command that subscribes at a node.
    pub(crate) const fn subscribe(self) -> &'static str {
        match self {
            Kind::Channel => "SUBSCRIBE",
            Kind::Pattern => "PSUBSCRIBE",
            Kind::Shard => "SSUBSCRIBE",
        }
    }

    /// Command that unsubscribes at a node.
    pub(crate) const fn unsubscribe(self) -> &'static str {
        match self {
            Kind::Channel => "UNSUBSCRIBE",
            Kind::Pattern => "PUNSUBSCRIBE",
            Kind::Shard => "SUNSUBSCRIBE",
        }
    }
}

/// Subscriptions to one channel or pattern.
#[derive(Debug, Default)]
struct Entry {
    /// Subscribed clients per worker.
    clients: Vec<(usize, usize)>,
    /// Active subscriptions of workers at nodes. The nodes count them in addition to their own clients.
    upstream: Vec<(usize, NodeId)>,
}

impl Entry {
    fn clients(&self) -> usize {
        self.clients.iter().map(|(_, count)| count).sum()
    }

    fn upstream_at(&self, node: NodeId) -> usize {
        self.upstream.iter().filter(|(_, n)| *n == node).count()
    }

    fn is_empty(&self) -> bool {
        self.clients.is_empty() && self.upstream.is_empty()
    }
}

type Names = HashMap<Arc<[u8]>, Entry>;

/// Subscriptions of all clients of the router.
#[derive(Debug, Default)]
pub(crate) struct Subscriptions {
    names: RwLock<[Names; 3]>,
    /// Number of entries of all kinds. If 0, readers skip the lock.
    count: AtomicUsize,
}

impl Subscriptions {
    fn change(&self, kind: Kind, name: &Arc<[u8]>, change: impl FnOnce(&mut Entry)) {
        let mut names = self.names.write().unwrap_or_else(PoisonError::into_inner);
        let entry = names[kind as usize].entry(name.clone()).or_default();
        change(entry);
        if entry.is_empty() {
            names[kind as usize].remove(name);
        }
        self.count.store(names.iter().map(HashMap::len).sum(), Ordering::Release);
    }

    fn read<R>(&self, look: impl FnOnce(&[Names; 3]) -> R) -> R {
        look(&self.names.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether there are no subscriptions.
    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    /// Adds a client of this worker.
    pub(crate) fn add_client(&self, worker: usize, kind: Kind, name: &Arc<[u8]>) {
        self.change(kind, name, |entry| match entry.clients.iter_mut().find(|(w, _)| *w == worker) {
            Some((_, count)) => *count += 1,
            None => entry.clients.push((worker, 1)),
        });
    }

    /// Removes a client of this worker.
    pub(crate) fn remove_client(&self, worker: usize, kind: Kind, name: &Arc<[u8]>) {
        self.change(kind, name, |entry| {
            if let Some((_, count)) = entry.clients.iter_mut().find(|(w, _)| *w == worker) {
                *count -= 1;
            }
            entry.clients.retain(|(_, count)| *count > 0);
        });
    }

    /// Records whether the worker's own subscription at a node is active.
    pub(crate) fn set_upstream(&self, worker: usize, kind: Kind, name: &Arc<[u8]>, node: NodeId, in_force: bool) {
        self.change(kind, name, |entry| {
            entry.upstream.retain(|at| *at != (worker, node));
            if in_force {
                entry.upstream.push((worker, node));
            }
        });
    }

    /// Counts the recipients of a message published at `node`: clients of the router, and subscriptions of its workers
    /// there.
    pub(crate) fn audience(&self, kind: Kind, channel: &[u8], node: NodeId) -> (usize, usize) {
        self.read(|names| {
            let exact = names[kind as usize].get(channel).into_iter();
            let patterns = names[Kind::Pattern as usize]
                .iter()
                .filter(|(p, _)| kind == Kind::Channel && glob::matches(p, channel));
            exact
                .chain(patterns.map(|(_, entry)| entry))
                .fold((0, 0), |(clients, upstream), e| (clients + e.clients(), upstream + e.upstream_at(node)))
        })
    }

    /// Whether a message published at `node` reaches all subscribed clients, because the subscriptions of their workers
    /// are active there.
    pub(crate) fn reaches_all(&self, kind: Kind, channel: &[u8], node: NodeId) -> bool {
        self.read(|names| {
            let exact = names[kind as usize].get(channel).into_iter();
            let patterns = names[Kind::Pattern as usize]
                .iter()
                .filter(|(p, _)| kind == Kind::Channel && glob::matches(p, channel));
            let reaches =
                |entry: &Entry| entry.clients.iter().all(|(worker, _)| entry.upstream.contains(&(*worker, node)));
            exact.chain(patterns.map(|(_, entry)| entry)).all(reaches)
        })
    }

    /// Channels with subscribed clients that match the pattern.
    pub(crate) fn channels(&self, kind: Kind, pattern: Option<&[u8]>) -> Vec<Arc<[u8]>> {
        self.read(|names| {
            let all = names[kind as usize].iter().filter(|(_, e)| e.clients() > 0).map(|(name, _)| name);
            all.filter(|name| pattern.is_none_or(|p| glob::matches(p, name))).cloned().collect()
        })
    }

    /// Number of channels (or patterns) with subscribed clients.
    pub(crate) fn count(&self, kind: Kind) -> usize {
        self.read(|names| names[kind as usize].values().filter(|entry| entry.clients() > 0).count())
    }

    /// Number of clients subscribed to exactly this name.
    pub(crate) fn subscribers(&self, kind: Kind, name: &[u8]) -> usize {
        self.read(|names| names[kind as usize].get(name).map_or(0, Entry::clients))
    }

    /// Removes the clients and subscriptions of a worker that has panicked.
    pub(crate) fn forget_worker(&self, worker: usize) {
        let mut names = self.names.write().unwrap_or_else(PoisonError::into_inner);
        for kind in names.iter_mut() {
            for entry in kind.values_mut() {
                entry.clients.retain(|(w, _)| *w != worker);
                entry.upstream.retain(|(w, _)| *w != worker);
            }
            kind.retain(|_, entry| !entry.is_empty());
        }
        self.count.store(names.iter().map(HashMap::len).sum(), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_counts_clients_once_for_each_name_that_reaches_them() {
        let all = Subscriptions::default();
        let node = NodeId(1);
        let news: Arc<[u8]> = Arc::from(&b"news.1"[..]);
        let pattern: Arc<[u8]> = Arc::from(&b"news.*"[..]);
        assert!(all.is_empty());
        for worker in [0, 0, 1] {
            all.add_client(worker, Kind::Channel, &news);
        }
        all.add_client(1, Kind::Pattern, &pattern);
        all.add_client(0, Kind::Shard, &news);
        all.set_upstream(0, Kind::Channel, &news, node, true);
        all.set_upstream(0, Kind::Channel, &news, node, true);
        all.set_upstream(1, Kind::Channel, &news, node, true);
        all.set_upstream(1, Kind::Pattern, &pattern, node, true);
        all.set_upstream(1, Kind::Pattern, &pattern, NodeId(2), true);
        assert_eq!(all.audience(Kind::Channel, b"news.1", node), (4, 3));
        assert_eq!(all.audience(Kind::Channel, b"news.2", node), (1, 1));
        assert_eq!(all.audience(Kind::Shard, b"news.1", node), (1, 0));
        assert!(
            all.reaches_all(Kind::Channel, b"news.1", node) && !all.reaches_all(Kind::Channel, b"news.1", NodeId(2))
        );
        assert!(all.reaches_all(Kind::Channel, b"news.2", NodeId(2)) && !all.reaches_all(Kind::Shard, b"news.1", node));
        assert_eq!(all.channels(Kind::Channel, Some(b"n*")), std::slice::from_ref(&news));
        assert!(all.channels(Kind::Channel, Some(b"x*")).is_empty());
        assert_eq!(all.subscribers(Kind::Channel, b"news.1"), 3);
        all.forget_worker(0);
        assert_eq!(all.audience(Kind::Channel, b"news.1", node), (2, 2));
        all.remove_client(1, Kind::Channel, &news);
        all.remove_client(1, Kind::Pattern, &pattern);
        all.set_upstream(1, Kind::Channel, &news, node, false);
        all.set_upstream(1, Kind::Pattern, &pattern, node, false);
        assert!(!all.is_empty());
        all.set_upstream(1, Kind::Pattern, &pattern, NodeId(2), false);
        assert!(all.is_empty());
    }
}
