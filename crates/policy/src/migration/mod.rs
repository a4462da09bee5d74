//! Moving slots from one node to another while both serve.
//!
//! A move is cut into *legs*: slots that change owner together. A leg is a state machine, a [`Machine`]: it consumes an
//! [`Event`] and returns [`Action`]s, without a connection, file or clock. A [`Driver`] steps it and implements what
//! all protocols share. The router's mover and the simulator execute the actions and report the results.
//!
//! # Responsibilities
//! - **Workers** check one condition for a command on a slot in transit ([`KeyLookup`]): are all its keys *committed*?
//!   If so, the command goes to the target, on the existing connections. Otherwise its client waits, and the worker
//!   requests the keys ([`Event::Wanted`]). A commit is final ([`Io::Commit`]), so it needs no lock and no undo, and no
//!   command changes its path when the leg is released.
//! - **The mover**, one thread per move, owns the machine of the leg and the only connections that copy. It serialises
//!   changes to the *place* of each key; commands need not pass through it (docs/decisions/0011).
//!
//! # Rules
//! 1. Nothing is copied before the drain: every worker has seen that the slots move, and nothing sent to the source
//!    earlier is still in flight ([`Event::Drained`]).
//! 2. A key is committed only when its copy is stored at the target (with the requested durability), this is on record,
//!    and the source copy is removed. A key that the source does not have is committed when that is on record.
//! 3. A copy is never stored over an existing key. An existing key is an earlier copy of this leg, and it stays.
//! 4. Commands on a broken connection may still execute until the node confirms its end ([`Event::Reconnected`]). Then
//!    the batch is repeated from its beginning, which is harmless by rule 3.
//! 5. If the source is not the process named in the record, its copies of recorded keys are stale and are removed.
//! 6. The slots are handed over when no key is left at the source, and not before. Exception: the user gives up a side
//!    that does not respond. Then the other side gets the slots with the keys it has, but serves no client until every
//!    command sent to the lost side has ended for its client.
//!    that was sent to the lost side has ended for its client.

pub mod dirty_elements;
mod double_read;
pub mod driver;
mod fingerprint;
mod fulva;
mod injected;
mod leg;
pub mod life;
mod order;
pub mod pace;
mod precopy;
#[cfg(feature = "research")]
pub mod published;
pub mod record;
mod rocksteady;
pub mod staging;
mod stop_and_copy;
pub mod tracker;
#[cfg(not(feature = "research"))]
pub mod unpublished;
mod view;

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::topology::{MoveId, NodeId, Slot};

pub use dirty_elements::DirtyElements;
pub use double_read::DoubleRead;
pub use driver::{Begin, Driver, DriverAction, DriverEvent};
pub use fingerprint::{Fingerprint, FingerprintHasher, FingerprintMap, FingerprintSet, Fingerprinter};
#[cfg(feature = "planted-bugs")]
pub use injected::Bug;
pub use leg::Leg;
pub use life::{MoveEnd, MoveStateMachine, UserRequest};
pub use order::{Cause, MoveOptions, MoveOrder};
pub use pace::Pacer;
pub use precopy::Precopy;
pub use record::Record;
pub use stop_and_copy::StopAndCopy;
#[cfg(not(feature = "research"))]
pub use unpublished as published;
pub use view::{Committed, Decision, KeyLookup, LegView, Legs, Place, Scope, Waits, Wanted, is_late, moved, observed};

/// A key's name, which is the unit of a move and stands for all databases. Commands that touch several databases
/// (`MOVE`, `COPY ... DB`) therefore need no special case.
pub type Key = Arc<[u8]>;

/// Prefix of the short-lived keys that the router creates at nodes. Clients do not see these keys, and they belong to
/// no slot: moves leave them in place.
pub const TEMPORARY: &[u8] = b"switchyard:temporary:";

/// Whether a key has the prefix [`TEMPORARY`].
#[must_use]
pub fn is_temporary(key: &[u8]) -> bool {
    key.starts_with(TEMPORARY)
}

/// Number of a batch within its leg.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BatchId(pub u32);

/// One of the two nodes of a leg. A rollback exchanges their roles.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Side {
    /// Owner of the slots before the move.
    Source,
    /// Owner of the slots after the move.
    Target,
}

impl Side {
    /// The opposite side.
    #[must_use]
    pub const fn other(self) -> Self {
        match self {
            Self::Source => Self::Target,
            Self::Target => Self::Source,
        }
    }
}

/// Durability required at the target before the source copy is removed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Durability {
    /// The target has replied: as safe as a client's write to it.
    #[default]
    Memory,
    /// The target's append-only file is on disk (`WAITAOF 1 0`, or `appendfsync always`).
    Aof,
    /// All connected replicas have it (`WAIT`): a failover may promote any of them.
    Replica,
}

/// Migration protocol. The journal stores its number: add a new one at the end, here and in [`Protocol::ALL`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Protocol {
    /// Keys move in batches and on demand, and are served throughout.
    #[default]
    Switchyard,
    /// The source's `MIGRATE`, as `redis-cli --cluster reshard` uses it; the leg's keys wait.
    StopAndCopy,
    /// All keys are copied while the source serves, keys written in the meantime are copied again, and clients wait
    /// only for the rest (Slacker, Remus).
    Source,
    /// Clients wait while all keys are copied.
    FreezeAndCopy,
    /// The default, but keys that clients wait for are fetched several at a time.
    Rocksteady,
    /// The default, but a read of a key in transit is sent to both nodes.
    NetMigrate,
    /// [`Protocol::NetMigrate`] with all slots in one leg; a sample of the keys read this way is fetched.
    Fulva,
    /// A filter tracks the keys at the target. Implemented only as published ([`published`]).
    Bloom,
}

impl Protocol {
    /// All protocols, with their configuration names.
    pub const ALL: [(Self, &'static str); 8] = [
        (Self::Switchyard, "switchyard"),
        (Self::StopAndCopy, "stop-and-copy"),
        (Self::Source, "source"),
        (Self::FreezeAndCopy, "freeze-and-copy"),
        (Self::Rocksteady, "rocksteady"),
        (Self::NetMigrate, "netmigrate"),
        (Self::Fulva, "fulva"),
        (Self::Bloom, "bloom"),
    ];

    /// Whether a build offers the protocol for new moves. Without the feature `research` it offers none that loses keys:
    /// stop-and-copy if a node restarts, and bloom. It continues moves that another build started with stop-and-copy.
    #[must_use]
    pub const fn is_offered(self) -> bool {
        cfg!(feature = "research") || !matches!(self, Self::StopAndCopy | Self::Bloom)
    }

    /// Returns the names of the protocols that a build offers.
    pub fn offered() -> impl Iterator<Item = &'static str> {
        Self::ALL.into_iter().filter(|(protocol, _)| protocol.is_offered()).map(|(_, name)| name)
    }

    /// Whether all slots of a move form one leg, and so change owner together.
    #[must_use]
    pub const fn is_one_leg(self) -> bool {
        self.copies_first() || matches!(self, Self::Fulva | Self::Bloom)
    }

    /// Whether the target serves nothing before it has a copy of all keys.
    #[must_use]
    pub const fn copies_first(self) -> bool {
        matches!(self, Self::Source | Self::FreezeAndCopy)
    }
}

/// Trade-off between the speed of a move and its effect on clients.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Goal {
    /// As fast as the nodes allow.
    Fast,
    /// Clients hardly notice, and the move ends in reasonable time.
    #[default]
    Balanced,
    /// Clients do not notice.
    Gentle,
}

impl Goal {
    /// All goals, with their configuration names.
    pub const ALL: [(Self, &'static str); 3] =
        [(Self::Fast, "fast"), (Self::Balanced, "balanced"), (Self::Gentle, "gentle")];
}

/// Parameters of a leg.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LegOrder {
    /// Move id.
    pub move_id: MoveId,
    /// Number of the leg within the move, from 0.
    pub leg: u32,
    /// Current owner of the slots.
    pub source: NodeId,
    /// Future owner of the slots.
    pub target: NodeId,
    /// Slots, ascending.
    pub slots: Vec<Slot>,
    /// Durability required before a source copy is removed.
    pub durability: Durability,
    /// Time limit of the drain, microseconds. After it the leg gives up, with nothing changed: clients wait during the
    /// drain.
    pub drain_timeout_us: u64,
}

/// Speed limits. Replaced whenever the pace changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pace {
    /// Maximum number of keys per batch, at least 1.
    pub batch_keys: u32,
    /// Maximum number of batches of listed keys in flight; 0 pauses them. Batches of requested keys do not count.
    pub batches: u32,
    /// Minimum interval between the starts of two batches of listed keys, microseconds.
    pub interval_us: u64,
}

/// A server process, as found by the mover's connection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Process {
    /// `run_id` of the server. A changed value means a new process.
    pub run_id: String,
    /// `CLIENT ID` of the mover's connection there, to close it after a crash of the router.
    pub client_id: u64,
}

/// Result of copying one key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Copied {
    /// The mover has its content.
    Taken {
        /// Size of the serialised value, bytes.
        bytes: u64,
    },
    /// The node has no such key.
    Absent,
    /// The node refuses to return it (with the error text): the leg cannot finish.
    Refused(String),
}

/// Result of storing one key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Stored {
    /// The key is stored (or had expired before it arrived).
    Stored,
    /// The key exists, and stays. Either an earlier attempt with unknown result stored it, or it is foreign and the leg
    /// is rolled back.
    Exists,
    /// The node refuses the key (`OOM`, `MISCONF`, `Bad data format`, ...).
    Refused(String),
}

/// Input of a [`Machine`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// Both nodes are connected, and the connections of an earlier mover are confirmed dead. First event, exactly once.
    Met {
        /// The process at the source.
        source: Process,
        /// The process at the target.
        target: Process,
    },
    /// The record with this number is durable, and all before it.
    Recorded(u64),
    /// [`Action::Announce`] is done: every worker has seen it, and nothing sent to the source earlier is in flight.
    Drained,
    /// [`Action::Purge`] is done.
    Purged,
    /// Reply to [`Action::List`]: more keys of the leg that the source may have. Duplicates and keys already moved are
    /// harmless.
    Listed {
        /// Keys, in any order.
        keys: Vec<Key>,
        /// Whether the listing is complete.
        end: bool,
    },
    /// A worker has a command for these keys.
    Wanted {
        /// Keys of the command in this leg's slots.
        keys: Vec<Key>,
    },
    /// Commands that may change these keys were about to be sent to the source, before the drain.
    Written {
        /// Keys of the commands in this leg's slots.
        keys: Vec<Key>,
    },
    /// Any key of the leg may change: the command is a script with undeclared keys, or removes everything.
    Rewritten,
    /// [`Io::Copy`] is done, with a result per key, in order. If the values are too large for one batch, the results
    /// cover only its first keys ([`pace::first_that_fit`]); the rest are read in a later batch.
    Copied {
        /// Batch number.
        batch: BatchId,
        /// Results, in the order of the keys.
        outcomes: Vec<Copied>,
    },
    /// [`Io::Store`] is done, with a result per key, in order.
    Stored {
        /// Batch number.
        batch: BatchId,
        /// Results, in the order of the keys.
        outcomes: Vec<Stored>,
    },
    /// [`Io::Secure`] is done, or the node did not make the keys durable in time.
    Secured {
        /// Batch number.
        batch: BatchId,
        /// Reason of a failure.
        refused: Option<String>,
    },
    /// [`Io::Remove`] is done.
    Removed {
        /// Batch number.
        batch: BatchId,
    },
    /// [`Io::Migrate`] is done, or the node refused.
    Migrated {
        /// Batch number.
        batch: BatchId,
        /// Reason of a failure.
        refused: Option<String>,
    },
    /// The connection to a side broke, or its node is silent. The results of its unanswered requests are unknown, and
    /// no further reply comes from that connection.
    Lost {
        /// Side of the connection.
        side: Side,
    },
    /// A new connection to that side exists, and the node has confirmed that the old one is dead (or is another
    /// process).
    Reconnected {
        /// Side of the connection.
        side: Side,
        /// Process now serving at that side.
        process: Process,
    },
    /// Reply to [`Action::Confirm`], on the connection that was open when it was requested.
    Confirmed {
        /// Side of the connection.
        side: Side,
        /// Number of keys that its process has evicted since it started.
        evicted: u64,
    },
    /// [`Action::HandOver`] is done: stored, published.
    HandedOver,
    /// A FLUSHALL or similar command is about to be sent to the nodes: finish all requests in flight and start nothing
    /// until [`Event::Resume`].
    Quiesce,
    /// End of the pause after [`Event::Quiesce`].
    Resume,
    /// New speed limits.
    Pace(Pace),
    /// The user requests a rollback.
    RollBack,
    /// The user declares that side lost for good: end at the other side, with the keys it has. Ignored while the side
    /// responds.
    GiveUp {
        /// Lost side.
        side: Side,
    },
    /// Time passes: sent at least every 10 ms while a leg runs.
    Tick,
}

/// Keys of a leg's slots that must not be at a node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum UnexpectedKeys {
    /// All keys except these. Used if the content of the node is unknown.
    AllBut(Arc<BTreeSet<Fingerprint>>),
    /// These keys, if present. Other keys do not belong to the leg.
    These(Arc<BTreeSet<Fingerprint>>),
}

impl UnexpectedKeys {
    /// Whether the set contains a key.
    #[must_use]
    pub fn has(&self, key: Fingerprint) -> bool {
        match self {
            Self::AllBut(right) => !right.contains(&key),
            Self::These(wrong) => wrong.contains(&key),
        }
    }
}

/// Output of a [`Machine`]. Actions of one step are executed in order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// Make the record durable; [`Event::Recorded`] with its number follows. Numbers count from 1 in each leg.
    Record {
        /// Record number.
        number: u64,
        /// Record contents.
        record: Record,
    },
    /// Publish to every worker that the slots are moving; [`Event::Drained`] follows.
    Announce {
        /// Permits reads of keys in transit at both sides, under its condition.
        double_read: Option<Arc<DoubleRead>>,
    },
    /// Wait until every command sent to the source earlier has ended, while the source serves; [`Event::Drained`]
    /// follows. Writes of commands that block there are reported again.
    Observe,
    /// Publish to every worker that the slots do not move: the leg has changed nothing. No event follows.
    Withdraw,
    /// Remove keys of the leg's slots that the side must not have. Scan the node from the beginning rather than use an
    /// earlier listing. [`Event::Purged`] follows; one purge at a time.
    Purge {
        /// Side to scan.
        side: Side,
        /// Keys to remove.
        wrong: UnexpectedKeys,
    },
    /// Every key is at the target, also keys never listed: workers use them there. No event follows.
    CommitAll,
    /// Return about `count` more keys: one [`Event::Listed`] follows for each request, in order. The keys are those of
    /// the source, unless [`Action::Relist`] has changed that.
    List {
        /// Approximate number of keys.
        count: u32,
    },
    /// Start a new listing of the leg's slots at a side, from the node itself rather than from an earlier listing. No
    /// event follows; each later [`Action::List`] returns keys of the new listing. Replies to earlier requests must not
    /// contain any: the machine ignores these replies, so such a key would be lost.
    Relist {
        /// Side to list.
        at: Side,
    },
    /// Open a new connection to that side and confirm the end of the old one; [`Event::Reconnected`] follows
    /// eventually.
    Reconnect {
        /// Side to reconnect.
        side: Side,
    },
    /// Query the number of evicted keys of that side, on the current connection; [`Event::Confirmed`] follows, unless
    /// the connection is lost.
    Confirm {
        /// Side to query.
        side: Side,
    },
    /// Every key is at the side `to`: store and publish the topology in which this node owns the slots;
    /// [`Event::HandedOver`] follows.
    HandOver {
        /// New owner.
        to: Side,
    },
    /// The leg changed direction: from now on only returned keys are committed, and keys that never moved may be used
    /// at the source at once. Every worker must have seen this; [`Event::Drained`] follows when nothing sent to the
    /// target for these slots earlier is in flight, and waiting commands have been checked again. After a crash of the
    /// router it replaces [`Action::Announce`].
    RollBack {
        /// Reason, for display.
        why: String,
        /// Keys that have to return: each waits until it is committed. All others may be used at the source.
        away: Arc<BTreeSet<Fingerprint>>,
    },
    /// The leg ends without a side that was given up. No event follows.
    Lost {
        /// Keys on record as moved to the target, if the target was given up: an upper bound of the loss. Empty for the
        /// source: its keys are not known by name.
        keys: Vec<Fingerprint>,
    },
    /// Passed through by the driver unchanged.
    Io(Io),
}

/// Requests of a protocol to nodes, workers and operators, passed through the driver.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Io {
    /// Read these keys at `from`: all databases, absolute expiry, and the node's usage data. A repeated batch number
    /// restarts that batch: discard the values read before. Retain the values until the keys are removed at `from`:
    /// they may have to be stored again.
    Copy {
        /// Batch number.
        batch: BatchId,
        /// Side to read.
        from: Side,
        /// Keys to read.
        keys: Vec<Key>,
    },
    /// Store the copied values of these keys of the batch at `to`, never over an existing key; [`Event::Stored`] has a
    /// result per key.
    Store {
        /// Batch number.
        batch: BatchId,
        /// Side to write.
        to: Side,
        /// Keys to store.
        keys: Vec<Key>,
    },
    /// Store the copied values of these keys of the batch at `to`, replacing existing ones; [`Event::Stored`] has a
    /// result per key. Discard the values afterwards.
    Overwrite {
        /// Batch number.
        batch: BatchId,
        /// Side to write.
        to: Side,
        /// Keys to store.
        keys: Vec<Key>,
    },
    /// Wait until the stored keys are as durable as requested; [`Event::Secured`] follows.
    Secure {
        /// Batch number.
        batch: BatchId,
        /// Side that stored the keys.
        at: Side,
        /// Requested durability; never [`Durability::Memory`].
        durability: Durability,
    },
    /// Remove these keys at `from`; [`Event::Removed`] follows.
    Remove {
        /// Batch number.
        batch: BatchId,
        /// Side to remove from.
        from: Side,
        /// Keys to remove.
        keys: Vec<Key>,
    },
    /// Make the node at `from` migrate these keys to the other side itself (`MIGRATE`, without `REPLACE`);
    /// [`Event::Migrated`] follows.
    Migrate {
        /// Batch number.
        batch: BatchId,
        /// Side that executes `MIGRATE`.
        from: Side,
        /// Keys to migrate.
        keys: Vec<Key>,
    },
    /// Commands for these keys may go to the new owner. Discard the copied values.
    Commit {
        /// Committed keys.
        keys: Vec<Key>,
    },
    /// Record in the switch's tracker that these groups start, or are complete. Only for protocols as published.
    Track {
        /// Groups of keys.
        groups: Vec<Fingerprint>,
        /// Whether the groups are complete; otherwise they start.
        complete: bool,
    },
    /// The switch's tracker was wrong about this group, and may store the true state from now on. Clients that wait for
    /// its keys are checked again. Only for protocols as published.
    CorrectTracker {
        /// Group of keys.
        group: Fingerprint,
        /// Actual state of the group.
        truth: tracker::State,
    },
    /// Return this error to clients that wait for a key now. They may retry.
    Refuse {
        /// Keys to refuse; `None`: all keys that clients wait for.
        keys: Option<Vec<Key>>,
        /// Text of the error reply, with its code in front.
        error: String,
    },
    /// Nothing is in flight: the reply to [`Event::Quiesce`]. Also sent by a leg that has ended.
    Quiet,
    /// Message for operators: log it, and show it with the move. No event follows.
    Report {
        /// Message text.
        text: String,
    },
    /// The leg has ended. Only [`Io::Quiet`] may follow.
    End(Outcome),
}

/// Result of a leg.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// The target owns the slots.
    Moved,
    /// The source owns the slots again, and has all keys.
    Returned {
        /// Reason, for display.
        why: String,
    },
    /// The leg gave up with nothing changed, and may be retried.
    NotBegun {
        /// Reason, for display.
        why: String,
    },
}

/// State machine of a leg, one type per protocol.
pub trait Machine {
    /// Handles an event at `now_us` (microseconds on any monotonic clock) and appends the resulting actions.
    fn step(&mut self, event: Event, now_us: u64, actions: &mut Vec<Action>);

    /// Returns the current counters and phase.
    fn progress(&self) -> Progress;
}

/// Phase of a leg.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Purging, recording, draining. The source serves, except that clients wait while draining.
    Preparing,
    /// Keys are moving.
    Moving,
    /// Keys are moving back.
    Returning,
    /// All keys have arrived; the slots are being handed over.
    Releasing,
    /// Finished.
    Ended,
}

/// Progress of a leg.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Progress {
    /// Current phase.
    pub phase: Phase,
    /// Number of committed keys that the source had.
    pub keys_moved: u64,
    /// Serialised size of these keys, bytes.
    pub bytes_moved: u64,
    /// Number of these keys that moved because a command requested them.
    pub pulled: u64,
    /// Number of batches repeated because their result was unknown.
    pub repeated: u64,
    /// Maximum number of keys to move: while returning, keys that must come back; otherwise listed keys that have not
    /// moved.
    pub left: u64,
    /// Number of keys on record as moved: the most that a loss of the target can lose.
    pub away: u64,
    /// Side that was given up.
    pub given_up: Option<Side>,
}

impl Progress {
    /// Progress of a leg that has not started.
    pub const NONE: Self = Self {
        phase: Phase::Preparing,
        keys_moved: 0,
        bytes_moved: 0,
        pulled: 0,
        repeated: 0,
        left: 0,
        away: 0,
        given_up: None,
    };
}
