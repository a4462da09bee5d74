//! CLIENT TRACKING: clients that keep copies of values are told when a key may have changed.
//!
//! Replies and invalidations reach the router on different connections, from several nodes. The rule is: an
//! invalidation may come too often, but never too early and never not at all.
//!
//! - **What nodes are asked.** The connection of subscriptions of each worker and node tracks in BCAST mode the
//!   prefixes that its clients need together: everything as soon as one client is in the default mode. So it does not
//!   matter on which connection a key was read, or in which protocol, or whether the node still remembers.
//! - **Who is told** is decided here: clients in BCAST mode by their prefixes; the others by a table of the keys that
//!   they have read since (OPTIN, OPTOUT and CACHING decide what enters it). An entry goes with the first invalidation,
//!   as in Redis.
//! - **When.** A reply that is still owed may carry the old value. So an invalidation goes behind everything that its
//!   client is owed when it comes (`Tracked::held`). With REDIRECT it does not: it concerns another connection, whose
//!   order to this one nothing defines in Redis either.
//! - **NOLOOP** ([`own`]): a key that its client replaces is taken out of the table when the reply says so, as Redis
//!   does.
//! - **A lost connection** invalidates everything at once, and again when tracking is in force anew: what was cached in
//!   between was not watched.
//!
//! Not `CLIENT CACHING YES` before each read on the shared connections: a read that is asked again, split, in a
//! transaction or in the slow lane would each need its own care, and RESP2 connections could not be tracked at all. The
//! price is that nodes name every changed key (with the prefixes wanted) to each worker that has a tracking client.

mod commands;
mod nodes;
mod own;

use std::collections::{HashMap, VecDeque};

pub(in crate::worker) use commands::shown_redirect;
use switchyard_policy::topology::NodeId;

use crate::slab::Handle;
use crate::worker::Worker;

/// Keys that default-mode clients of a worker have read; beyond it they are told to forget everything (Redis
/// `tracking-table-max-keys`).
const KEYS_MAX: usize = 1_000_000;

/// Where a client's invalidations go instead.
#[derive(Clone, Copy, Debug)]
pub(in crate::worker) struct Redirect {
    id: u64,
    worker: usize,
    client: Handle,
    pub(in crate::worker) broken: bool,
}

/// What a client has asked for.
#[derive(Clone, Debug, Default)]
pub(in crate::worker) struct Options {
    redirect_id: Option<u64>,
    redirect: Option<Redirect>,
    bcast: bool,
    optin: bool,
    optout: bool,
    noloop: bool,
    prefixes: Vec<Box<[u8]>>,
}

/// A client that tracks.
#[derive(Debug, Default)]
pub(in crate::worker) struct Tracked {
    options: Options,
    /// CLIENT CACHING was given for the next command.
    caching: bool,
    /// Keys that commands between MULTI and EXEC will read.
    queued: Vec<Box<[u8]>>,
    /// A TRACKING ON waits to know its REDIRECT.
    looking: bool,
    /// Number of the TRACKING ON that waits for the nodes.
    pending: Option<u32>,
    /// It tracked before that TRACKING ON.
    was_tracking: bool,
    /// Invalidations, each behind the command of this number: an array of keys, or `None` for all.
    held: VecDeque<(u32, Option<Vec<u8>>)>,
    held_bytes: usize,
    /// How many of them were held when clients that wait at a node were looked at last.
    held_long: usize,
    /// Writes of its own that are not answered (NOLOOP).
    own: VecDeque<own::Write>,
}

impl Tracked {
    /// Bytes that it takes.
    pub(in crate::worker) fn memory(&self) -> usize {
        let keys = self.queued.iter().chain(&self.options.prefixes);
        size_of::<Self>() + self.held_bytes + keys.map(|key| key.len() + size_of::<Box<[u8]>>()).sum::<usize>()
    }

    pub(in crate::worker) fn redirect(&self) -> Option<Redirect> {
        self.options.redirect
    }

    pub(in crate::worker) fn is_broadcast(&self) -> bool {
        self.options.bcast
    }

    /// Whether a write of its own to this key is not answered.
    fn is_changing(&self, key: &[u8]) -> bool {
        self.own.iter().any(|write| write.changes(key))
    }
}

/// The state of tracking at one node.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Place {
    Requested,
    /// In force, and asked for more prefixes.
    Widening,
    InForce,
    Down,
    Refused(Box<str>),
}

/// What a worker tracks for its clients.
#[derive(Debug, Default)]
pub(in crate::worker) struct Tracking {
    clients: Vec<Handle>,
    /// Prefixes asked of the nodes; none is a prefix of another. Empty: nothing is tracked.
    cover: Vec<Box<[u8]>>,
    /// Counts changes of `cover`: an answer to an older question says nothing.
    generation: u32,
    places: Vec<(NodeId, Place)>,
    /// Who has read what, in the default mode.
    keys: HashMap<Box<[u8]>, Vec<Handle>>,
    /// Bytes of these keys.
    key_bytes: usize,
    /// The readers of all these keys.
    reads: usize,
}

impl Tracking {
    fn is_read_by(&self, key: &[u8], client: Handle) -> bool {
        self.keys.get(key).is_some_and(|readers| readers.contains(&client))
    }

    fn note_read(&mut self, key: &[u8], client: Handle) {
        match self.keys.get_mut(key) {
            Some(readers) if readers.contains(&client) => return,
            Some(readers) => readers.push(client),
            None => {
                self.key_bytes += key.len();
                self.keys.insert(key.into(), vec![client]);
            }
        }
        self.reads += 1;
    }

    /// The key has changed: who has read it, once.
    fn take_readers(&mut self, key: &[u8]) -> Vec<Handle> {
        let Some(readers) = self.keys.remove(key) else { return Vec::new() };
        self.key_bytes -= key.len();
        self.reads -= readers.len();
        readers
    }

    fn forget_read(&mut self, key: &[u8], client: Handle) {
        let Some(readers) = self.keys.get_mut(key) else { return };
        let before = readers.len();
        readers.retain(|reader| *reader != client);
        self.reads -= before - readers.len();
        if readers.is_empty() {
            self.keys.remove(key);
            self.key_bytes -= key.len();
        }
    }

    fn forget_reads(&mut self) {
        self.keys = HashMap::new();
        self.key_bytes = 0;
        self.reads = 0;
    }

    /// Bytes that the table of keys takes, about.
    pub(in crate::worker) fn memory(&self) -> usize {
        let entry = size_of::<(Box<[u8]>, Vec<Handle>)>() + 4 * size_of::<Handle>();
        self.keys.capacity() * entry + self.key_bytes + self.reads * size_of::<Handle>()
    }

    pub(in crate::worker) fn is_on(&self) -> bool {
        !self.cover.is_empty()
    }

    /// Whether every key that begins with `prefix` is tracked.
    fn covers(&self, prefix: &[u8]) -> bool {
        self.cover.iter().any(|c| prefix.starts_with(c))
    }

    /// Adds a prefix, and drops those that it makes superfluous.
    fn widen(&mut self, prefix: &[u8]) {
        if !self.covers(prefix) {
            self.cover.retain(|c| !c.starts_with(prefix));
            self.cover.push(prefix.into());
        }
    }
}

impl Worker {
    /// Clients are told to forget all that they have read: the table is too large.
    pub(in crate::worker) fn forget_tracked_reads(&mut self) {
        self.tracking.forget_reads();
        self.invalidate_all();
        self.count_tracked();
    }

    /// Shows how much is tracked.
    fn count_tracked(&self) {
        self.counters.tracked_keys.set(self.tracking.keys.len() as u64);
        self.counters.tracked_reads.set(self.tracking.reads as u64);
    }

    /// The same for prefixes, when clients have begun or ended to track.
    fn count_prefixes(&self) {
        let options =
            self.tracking.clients.iter().filter_map(|c| Some(&self.clients.get(*c)?.tracked.as_deref()?.options));
        let mut prefixes: Vec<&[u8]> =
            options.filter(|o| o.bcast).flat_map(|o| o.prefixes.iter().map(|p| &**p)).collect();
        prefixes.sort_unstable();
        prefixes.dedup();
        self.counters.tracked_prefixes.set(prefixes.len() as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::Tracking;
    use crate::slab::Handle;

    #[test]
    fn readers_are_counted() {
        let mut tracking = Tracking::default();
        let clients = [1, 2].map(|index| Handle { index, generation: 1 });
        for client in clients {
            tracking.note_read(b"a", client);
            tracking.note_read(b"a", client);
        }
        tracking.note_read(b"b", clients[0]);
        assert_eq!((tracking.keys.len(), tracking.reads), (2, 3));
        tracking.forget_read(b"a", clients[0]);
        assert!(!tracking.is_read_by(b"a", clients[0]) && tracking.is_read_by(b"a", clients[1]));
        tracking.forget_read(b"b", clients[0]);
        assert_eq!((tracking.keys.len(), tracking.reads), (1, 1));
        assert_eq!(tracking.take_readers(b"a"), [clients[1]]);
        assert_eq!(tracking.take_readers(b"a"), []);
        assert_eq!((tracking.keys.len(), tracking.reads), (0, 0));
    }

    #[test]
    fn prefixes_asked_of_nodes_never_overlap() {
        let mut tracking = Tracking::default();
        for prefix in ["user:1", "order:", "user:1:name", "user:2", "user:", "order:"] {
            tracking.widen(prefix.as_bytes());
        }
        let cover: Vec<&[u8]> = tracking.cover.iter().map(|c| &**c).collect();
        assert_eq!(cover, [&b"order:"[..], b"user:"]);
        assert!(tracking.covers(b"user:7") && !tracking.covers(b"use"));
        tracking.widen(b"");
        assert_eq!(tracking.cover.len(), 1);
        assert!(tracking.covers(b"anything"));
    }
}
