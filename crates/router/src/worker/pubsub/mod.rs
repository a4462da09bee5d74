//! Pub/sub: many clients on one subscription of the worker at each node.
//!
//! A worker has one connection per node for subscriptions only ([`super::upstreams::link::Lane::Pubsub`]), opened at first
//! use. A [`Topic`] is a channel, pattern or shard channel with subscribers in this worker. It is subscribed to once at
//! each node where a message for it can be published, and messages are passed to all its subscribers.
//!
//! - Nodes: a shard channel only at the owner of its slot; channels and patterns at every node. `PUBLISH` through the
//!   router goes to the owner of the channel's slot, or to another node while the owner is down, and so arrives once.
//!   The other nodes have the subscription too, because scripts, transactions, keyspace notifications and direct
//!   publishers publish at their node, and nodes do not forward messages.
//! - A client's confirmation is sent when the subscription is in force at every reachable node: from then on no message
//!   is missed while the connections last. At a node that is down it comes into force before anything is published
//!   there through the router.
//! - Commands of one client (`SUBSCRIBE a`, `UNSUBSCRIBE`, ...) take effect in order, also if an earlier one still
//!   waits for nodes.
//! - A client receives its own messages (RESP3) after the reply to the command that published them
//!   (`Subscriber::published`), as in Redis from 7.2 on.
//!
//! Not one upstream connection per client: thousands of subscribers would be thousands of connections at each node.

pub(super) mod clients;
pub(super) mod commands;
pub(super) mod nodes;

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use switchyard_policy::topology::NodeId;
use switchyard_resp::encode;

pub(super) use crate::pubsub::Kind;
use crate::slab::{Handle, Slab};

/// The state of a topic at one node.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Place {
    /// Requested from the node, or will be when the connection is up.
    Requested,
    InForce,
    /// The node cannot be reached; the subscription is requested when it can.
    Down,
    /// The node's error.
    Refused(Box<str>),
}

/// Something to which clients of this worker are subscribed.
#[derive(Debug)]
struct Topic {
    kind: Kind,
    name: Arc<[u8]>,
    places: Vec<(NodeId, Place)>,
    subscribers: HashSet<Handle>,
    /// Clients whose commands wait for the outcome: client and number of its command.
    waiting: Vec<(Handle, u32)>,
    /// Commands that name this topic and have not taken effect: it must not be removed before them.
    holds: usize,
}

/// State of a topic over all its nodes.
enum Standing {
    Unsettled,
    InForce,
    /// None of its nodes can be reached.
    Down,
    /// A node's error.
    Refused(String),
}

/// The topics of one worker.
#[derive(Debug)]
pub(super) struct Topics {
    topics: Slab<Topic>,
    by_name: [HashMap<Arc<[u8]>, Handle>; 3],
    /// Some shard channels have places at nodes that their slots have left.
    has_old_places: bool,
    /// Reused for the bytes of a message or a confirmation.
    scratch: Vec<u8>,
    /// Reused for the receivers of a message.
    receivers: Vec<Handle>,
    /// Requests to nodes, and their consequences for clients, in order.
    requests: VecDeque<Request>,
}

/// Work that needs connections to nodes. Commands and events of clients only record it.
#[derive(Debug)]
enum Request {
    /// Subscribe to a topic at a node.
    Subscribe { topic: Handle, node: NodeId },
    /// End a subscription at a node.
    Unsubscribe { kind: Kind, name: Arc<[u8]>, node: NodeId },
    /// Send PING on all connections, for the UNSUBSCRIBE `seq` of a client.
    Ping { client: Handle, seq: u32 },
    /// Report the state of a topic to waiting commands.
    Settle { topic: Handle },
}

/// Effect of a request on clients.
#[derive(Debug)]
pub(super) enum Effect {
    Settle {
        topic: Handle,
    },
    /// The UNSUBSCRIBE `seq` of a client waits for replies on this number of connections.
    Pinged {
        client: Handle,
        seq: u32,
        connections: usize,
    },
}

impl Topics {
    /// Returns the buffer that may have grown in a burst.
    pub(super) fn reused(&mut self) -> &mut Vec<u8> {
        &mut self.scratch
    }

    /// Whether requests to nodes are recorded.
    #[inline]
    pub(super) fn has_requests(&self) -> bool {
        !self.requests.is_empty()
    }

    pub(super) fn new() -> Self {
        Self {
            topics: Slab::new(),
            by_name: Default::default(),
            has_old_places: false,
            scratch: Vec::new(),
            receivers: Vec::new(),
            requests: VecDeque::new(),
        }
    }
}

/// A command of a client that has not taken effect yet.
#[derive(Debug)]
enum Item {
    Subscribe {
        seq: u32,
        kind: Kind,
        topics: Vec<Handle>,
        /// Number of them that are not in force yet.
        left: usize,
        failed: Option<String>,
    },
    /// `names` is empty for everything of the kind. `left`: connections that may still deliver an earlier message.
    Unsubscribe { seq: u32, kind: Kind, names: Vec<Arc<[u8]>>, left: usize },
}

/// Subscriptions of a client.
#[derive(Debug, Default)]
pub(super) struct Subscriber {
    /// By kind: names, and their topics.
    names: [HashMap<Arc<[u8]>, Handle>; 3],
    /// Bytes of all these names.
    name_bytes: usize,
    items: VecDeque<Item>,
    /// Messages, each after the command of this number, which may have published it, or whose large reply is being
    /// streamed.
    held: VecDeque<(u32, Vec<u8>)>,
    held_bytes: usize,
    /// The last command of the client that may have published something.
    published: Option<u32>,
}

impl Subscriber {
    pub(super) fn count(&self, kind: Kind) -> usize {
        self.names[kind as usize].len()
    }

    pub(super) fn total(&self) -> usize {
        Kind::ALL.into_iter().map(|kind| self.count(kind)).sum()
    }

    /// Returns the count in a confirmation: shard channels are counted separately.
    fn shown(&self, kind: Kind) -> usize {
        match kind {
            Kind::Shard => self.count(Kind::Shard),
            Kind::Channel | Kind::Pattern => self.count(Kind::Channel) + self.count(Kind::Pattern),
        }
    }

    /// Returns the command that a new message has to wait for. `first`: number of the next reply; `streaming`: whether
    /// a part of it has been sent.
    pub(super) fn holds(&self, first: u32, streaming: bool) -> Option<u32> {
        let publishing = self.published.filter(|seq| seq.wrapping_sub(first) as i32 >= 0);
        // Messages keep their order.
        let before = self.held.back().map(|(behind, _)| *behind);
        publishing.or(streaming.then_some(first)).or(before)
    }

    /// Used bytes, with its share of the names and tables of topics.
    pub(super) fn memory(&self) -> usize {
        const TOPIC: usize = 256;
        size_of::<Self>()
            + self.name_bytes
            + self.total() * TOPIC
            + self.items.len() * size_of::<Item>()
            + self.held_bytes
    }

    /// Whether a command of the client waits for nodes.
    pub(super) fn waits(&self) -> bool {
        !self.items.is_empty()
    }

    pub(super) fn is_idle(&self) -> bool {
        self.total() == 0 && !self.waits() && self.held.is_empty()
    }
}

/// Appends one confirmation. `name` is `None` if there was no subscription to end.
pub(super) fn confirmation(
    out: &mut Vec<u8>,
    verb: &str,
    name: Option<&[u8]>,
    subscriber: &Subscriber,
    kind: Kind,
    resp3: bool,
) {
    encode::header(out, if resp3 { b'>' } else { b'*' }, 3);
    out.extend_from_slice(format!("${}\r\n", verb.len()).as_bytes());
    out.extend(verb.bytes().map(|b| b.to_ascii_lowercase()));
    out.extend_from_slice(b"\r\n");
    match name {
        Some(name) => encode::bulk(out, name),
        None => encode::null(out, resp3),
    }
    encode::integer(out, subscriber.shown(kind) as i64);
}
