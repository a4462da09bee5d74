//! CLIENT TRACKING: clients with copies of values are notified when a key may have changed.
//!
//! Replies and invalidations reach the router on different connections, from several nodes. The rule is: an
//! invalidation may come too often, but it must not come too early, or be missed.
//!
//! - **At nodes**: the connection of subscriptions of each worker and node tracks, in BCAST mode, the prefixes that its
//!   clients need together: everything as soon as one client is in the default mode. So the connection and the protocol
//!   of a read do not matter, nor the node's own table.
//! - **Receivers** are chosen here: clients in BCAST mode by their prefixes; the others by a table of keys that they
//!   have read (OPTIN, OPTOUT and CACHING decide what enters it). An entry is removed with the first invalidation, as
//!   in Redis.
//! - **Order**: a pending reply may carry the old value. So an invalidation comes after all replies pending at its
//!   arrival (`Tracked::held`). Not with REDIRECT: that is another connection, and the order of the two is undefined in
//!   Redis, too.
//! - **NOLOOP** ([`own`]): a key that the client replaces is removed from the table at the reply, as in Redis.
//! - **A lost connection** invalidates everything at once, and again when tracking is back in force: values cached in
//!   between were not tracked.
//!
//! `CLIENT CACHING YES` before each read on the shared connections is no alternative: reads that are repeated, split,
//! in a transaction or in the slow lane would each need special handling, and RESP2 connections could not be tracked at
//! all. The price is that nodes send every changed key (with these prefixes) to each worker with a tracking client.

pub(super) mod commands;
pub(super) mod nodes;
pub(super) mod own;

use std::collections::{HashMap, VecDeque};

use switchyard_policy::topology::NodeId;
use switchyard_resp::reply;

use crate::slab::Handle;

/// Maximum number of keys read by default-mode clients of a worker; beyond it all their keys are invalidated (Redis
/// `tracking-table-max-keys`).
const KEYS_MAX: usize = 1_000_000;

/// The client that gets the invalidations instead.
#[derive(Clone, Copy, Debug)]
pub(in crate::worker) struct Redirect {
    id: u64,
    worker: usize,
    client: Handle,
    pub(in crate::worker) broken: bool,
}

/// Options of a client.
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
    /// CLIENT CACHING was sent for the next command.
    caching: bool,
    /// Keys that commands between MULTI and EXEC will read.
    queued: Vec<Box<[u8]>>,
    /// A TRACKING ON waits for the search for its REDIRECT.
    looking: bool,
    /// Number of the TRACKING ON that waits for the nodes.
    pending: Option<u32>,
    /// Tracked before this TRACKING ON.
    was_tracking: bool,
    /// Invalidations, each after the command of this number: an array of keys, or `None` for all.
    held: VecDeque<(u32, Option<Vec<u8>>)>,
    held_bytes: usize,
    /// Number of held ones at the last check of blocked clients.
    held_long: usize,
    /// Unanswered writes of its own (NOLOOP).
    own: VecDeque<Write>,
}

impl Tracked {
    /// Used bytes.
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

    /// Whether a write of its own to this key is unanswered.
    fn is_changing(&self, key: &[u8]) -> bool {
        self.own.iter().any(|write| write.changes(key))
    }
}

/// The state of tracking at one node.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Place {
    Requested,
    /// In force, with more prefixes requested.
    Widening,
    InForce,
    Down,
    Refused(Box<str>),
}

/// Tracking state of a worker.
#[derive(Debug, Default)]
pub(in crate::worker) struct Tracking {
    clients: Vec<Handle>,
    /// Prefixes requested from the nodes; none is a prefix of another. Empty: nothing is tracked.
    cover: Vec<Box<[u8]>>,
    /// Counts changes of `cover`: answers to older requests are ignored.
    generation: u32,
    places: Vec<(NodeId, Place)>,
    /// Readers of each key, in the default mode.
    keys: HashMap<Box<[u8]>, Vec<Handle>>,
    /// Bytes of these keys.
    key_bytes: usize,
    /// The readers of all these keys.
    reads: usize,
    /// Requests to nodes, in order.
    requests: VecDeque<Request>,
}

/// Work that needs connections to nodes. Commands and events of clients only record it.
#[derive(Debug)]
enum Request {
    /// Track keys with these prefixes at all nodes.
    Widen(Vec<Box<[u8]>>),
    /// End tracking at these nodes.
    Stop(Vec<NodeId>),
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

    /// Returns the readers of a changed key, once.
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

    /// Memory of the table of keys, approximate.
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

    /// Adds a prefix, and drops prefixes covered by it.
    fn widen(&mut self, prefix: &[u8]) {
        if !self.covers(prefix) {
            self.cover.retain(|c| !c.starts_with(prefix));
            self.cover.push(prefix.into());
        }
    }
}

/// Reply that proves that the client knows the new value of every key of its command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Proof {
    Ok,
    One,
    Integer,
    Value,
}

impl Proof {
    /// Returns the proof for a command of this name and number of keys, if any.
    fn of(name: &str, keys: usize) -> Option<Self> {
        Some(match name {
            "SET" | "SETEX" | "PSETEX" | "MSET" => Self::Ok,
            "SETNX" => Self::One,
            // With several keys, the count does not identify the deleted ones.
            "DEL" | "UNLINK" if keys == 1 => Self::One,
            "INCR" | "DECR" | "INCRBY" | "DECRBY" => Self::Integer,
            "INCRBYFLOAT" | "GETSET" | "GETDEL" => Self::Value,
            _ => return None,
        })
    }

    fn is_given_by(self, answer: &[u8]) -> bool {
        match self {
            Self::Ok => answer == b"+OK\r\n",
            Self::One => reply::integer(answer) == Some(1),
            Self::Integer => answer.starts_with(b":"),
            Self::Value => answer.starts_with(b"$") && !reply::is_null(answer),
        }
    }
}

/// An unanswered command of a client with NOLOOP.
#[derive(Debug)]
pub(super) struct Write {
    seq: u32,
    proof: Proof,
    /// Keys that the client had read, and has not read again since.
    keys: Vec<Box<[u8]>>,
}

impl Write {
    pub(super) fn changes(&self, key: &[u8]) -> bool {
        self.keys.iter().any(|k| **k == *key)
    }

    /// Whether its reply was sent. `first`: number of the next command to answer.
    pub(super) fn is_answered(&self, first: u32) -> bool {
        (self.seq.wrapping_sub(first) as i32) < 0
    }

    /// Drops a key that the client has read again.
    pub(super) fn forget(&mut self, key: &[u8]) {
        self.keys.retain(|k| **k != *key);
    }
}

/// -1 without tracking, 0 without a redirect: CLIENT GETREDIR and CLIENT LIST.
pub(in crate::worker) fn shown_redirect(tracked: Option<&Tracked>) -> i64 {
    tracked.map_or(-1, |t| t.options.redirect.map_or(0, |r| r.id as i64))
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
    fn tracked_prefixes_at_nodes_never_overlap() {
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
