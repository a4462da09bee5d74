//! Moving slots from one node to another while both serve.
//!
//! A move is cut into *legs*: slots that change their owner together. A leg is a state machine, a [`Machine`], stepped
//! with what happened ([`Event`]) and answering with what to do ([`Action`]). It knows no connection, no file and no
//! clock. A [`Driver`] steps it, with all that is the same for each protocol; the router's mover and the simulator do
//! what that says and tell it what came of it.
//!
//! # Who does what
//! - **Workers** ask one question of a command for a slot in transit ([`KeyLookup`]): are all its keys *committed*? Then it
//!   goes to the target, on the same connections as ever. Otherwise its client waits, and the keys are wanted
//!   ([`Event::Wanted`]). A key is committed once and for all ([`Io::Commit`]), so there is nothing to lock and nothing
//!   to take back, and nothing changes its path at release.
//! - **The mover**, one thread per move, owns the leg's machine and the only connections that copy. It serialises what
//!   happens to the *place* of each key; the commands themselves need not pass through it (docs/decisions/0011).
//!
//! # The rules
//! 1. Nothing is copied before the drain: every worker knows that the slots are moving, and nothing sent to the source
//!    earlier is still in flight ([`Event::Drained`]).
//! 2. A key is committed only when its copy is stored at the target (as safely as was asked), that is on record, and
//!    its source copy is gone. A key that the source does not have is committed when that is on record.
//! 3. A copy is never stored over an existing key. Where there is one it is an earlier copy of ours, and it stays.
//! 4. What a broken connection may still do is unknown until the node has confirmed its end ([`Event::Restored`]); then
//!    the batch is done again from its beginning, which is harmless by rule 3.
//! 5. If the source is another process than the one that the record names, what it shows of keys on record is stale,
//!    and is removed.
//! 6. The slots are handed over when no key is left at the source, and not before. Only where the user gives up a side
//!    that does not answer are they handed over to the other one with what that has; nobody is served there before all
//!    that was sent to the lost side has ended for its client.

mod double_read;
pub mod driver;
mod fingerprint;
mod fulva;
mod leg;
pub mod life;
mod order;
pub mod pace;
mod planted;
mod precopy;
pub mod published;
pub mod record;
mod rocksteady;
pub mod staging;
mod stop_and_copy;
pub mod tail;
pub mod tracker;
mod view;

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::topology::{MoveId, NodeId, Slot};

pub use double_read::DoubleRead;
pub use driver::{Begin, Driver, DriverAction, DriverEvent};
pub use fingerprint::{Fingerprint, FingerprintHasher, FingerprintMap, FingerprintSet, Fingerprinter};
pub use leg::Leg;
pub use life::{MoveEnd, MoveStateMachine, Steer};
pub use order::{Cause, MoveOptions, MoveOrder};
pub use pace::Pacer;
#[cfg(feature = "planted-bugs")]
pub use planted::Bug;
pub use precopy::Precopy;
pub use record::Record;
pub use stop_and_copy::StopAndCopy;
pub use tail::DirtyElements;
pub use view::{Committed, KeyLookup, LegView, Legs, Place, Scope, Waits, Wanted, is_late, moved, observed};

/// A key's name. A unit of moving is a name, in all databases: commands that touch several databases (`MOVE`,
/// `COPY ... DB`) then need nothing special.
pub type Key = Arc<[u8]>;

/// What names of keys begin with that the router makes for itself at nodes, for a while. Clients do not see them, and
/// they belong to no slot: moves leave them where they are.
pub const TEMPORARY: &[u8] = b"switchyard:temporary:";

/// Whether a key is one of these.
#[must_use]
pub fn is_temporary(key: &[u8]) -> bool {
    key.starts_with(TEMPORARY)
}

/// Number of a batch within its leg.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BatchId(pub u32);

/// One of the two nodes of a leg. They change places when a leg is rolled back.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Side {
    /// Where the slots are before the move.
    Source,
    /// Where they are to be.
    Target,
}

impl Side {
    /// The other one.
    #[must_use]
    pub const fn other(self) -> Self {
        match self {
            Self::Source => Self::Target,
            Self::Target => Self::Source,
        }
    }
}

/// What must be safe at the target before the copy at the source goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Durability {
    /// That the target has answered: as safe as a client's write to it.
    #[default]
    Memory,
    /// That its append-only file is on disk (`WAITAOF 1 0`, or `appendfsync always`).
    Aof,
    /// That all connected replicas have it (`WAIT`): a failover may promote any of them.
    Replica,
}

/// How a move goes about it. The journal has their numbers: a new one comes last, here and in [`Protocol::ALL`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Protocol {
    /// Keys move in batches and on demand, and are served throughout.
    #[default]
    Switchyard,
    /// The source's `MIGRATE`, as `redis-cli --cluster reshard` uses it; the leg's keys wait.
    StopAndCopy,
    /// All keys are copied while the source serves, what is written meanwhile again, and for the rest everybody waits
    /// (Slacker, Remus).
    Source,
    /// Everybody waits while all keys are copied.
    FreezeAndCopy,
    /// As the default, but that keys which clients wait for are fetched several at a time.
    Rocksteady,
    /// As the default, but that a read of a key on its way is asked of both nodes.
    NetMigrate,
    /// The same, with all slots at once, and a sample of what is read so is fetched.
    Fulva,
    /// A filter says which keys are at the target. It is there as published only ([`published`]).
    Bloom,
}

impl Protocol {
    /// All of them, with the names that users write.
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

    /// Whether all slots of a move are one leg: they change their owner together.
    #[must_use]
    pub const fn is_one_leg(self) -> bool {
        self.copies_first() || matches!(self, Self::Fulva | Self::Bloom)
    }

    /// Whether the target serves nothing before it has a copy of everything.
    #[must_use]
    pub const fn copies_first(self) -> bool {
        matches!(self, Self::Source | Self::FreezeAndCopy)
    }
}

/// What the user cares about most while data moves.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Goal {
    /// To be done soon: what the nodes can give.
    Fast,
    /// That clients hardly notice, and to be done in reasonable time.
    #[default]
    Balanced,
    /// That clients do not notice.
    Gentle,
}

impl Goal {
    /// All of them, with the names that users write.
    pub const ALL: [(Self, &'static str); 3] =
        [(Self::Fast, "fast"), (Self::Balanced, "balanced"), (Self::Gentle, "gentle")];
}

/// What a leg is to do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Orders {
    /// The move.
    pub move_id: MoveId,
    /// Which leg of it, from 0.
    pub leg: u32,
    /// From where.
    pub source: NodeId,
    /// To where.
    pub target: NodeId,
    /// The slots, ascending.
    pub slots: Vec<Slot>,
    /// What must be safe before a source copy goes.
    pub durability: Durability,
    /// If the drain takes longer than this, the leg gives up before it has changed anything, microseconds: clients wait
    /// meanwhile.
    pub drain_patience_us: u64,
}

/// How fast, from now on: set anew whenever the pace changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pace {
    /// Keys of a batch, at most; at least 1.
    pub batch_keys: u32,
    /// Batches of listed keys under way at once, at most; 0 pauses them. Keys that are wanted do not count.
    pub batches: u32,
    /// Between the starts of two batches of listed keys, at least, microseconds.
    pub interval_us: u64,
}

/// A process at a node, as the mover's connection met it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Process {
    /// Its `run_id`: another one means another process.
    pub run_id: String,
    /// The number of the mover's connection there (`CLIENT ID`), so that it can be ended after a crash of the router.
    pub client_id: u64,
}

/// What came of copying one key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Copied {
    /// The mover has its content, so many bytes.
    Taken {
        /// Size of the serialised value, bytes.
        bytes: u64,
    },
    /// The node does not have it.
    Absent,
    /// The node refuses to give it (an error text): the leg cannot finish.
    Refused(String),
}

/// What came of storing one key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Stored {
    /// It is there now (or its time to live was over before it came).
    Stored,
    /// There was one already. It stays: it is ours from an attempt whose end was unknown, or else a stranger's, and the
    /// leg goes back.
    Exists,
    /// The node refuses it (`OOM`, `MISCONF`, `Bad data format`, ...).
    Refused(String),
}

/// What happened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// Both nodes are reached, and connections of a mover before this one are confirmed to be dead. Once, first.
    Met {
        /// The process at the source.
        source: Process,
        /// The process at the target.
        target: Process,
    },
    /// The record of this number is durable, and all before it.
    Recorded(u64),
    /// [`Action::Announce`] is done: every worker knows, and nothing sent to the source before is in flight.
    Drained,
    /// [`Action::Purge`] is done.
    Purged,
    /// [`Action::List`]: further keys of the leg that the source may have; duplicates and keys already moved are
    /// harmless.
    Listed {
        /// The keys.
        keys: Vec<Key>,
        /// There are no more.
        end: bool,
    },
    /// A worker has a command for these keys.
    Wanted {
        /// The keys.
        keys: Vec<Key>,
    },
    /// Commands that may change these keys were about to be sent to the source, before the drain.
    Written {
        /// The keys.
        keys: Vec<Key>,
    },
    /// The same of any key of the leg: scripts do not name all, or everything is removed.
    Rewritten,
    /// [`Io::Copy`] is done: an outcome per key, in order; of the first keys at least, where the others would make the
    /// batch too large ([`pace::first_that_fit`]). Those are read in another one.
    Copied {
        /// The batch.
        batch: BatchId,
        /// What came of it.
        outcomes: Vec<Copied>,
    },
    /// [`Io::Store`] is done: an outcome per key, in order.
    Stored {
        /// The batch.
        batch: BatchId,
        /// What came of it.
        outcomes: Vec<Stored>,
    },
    /// [`Io::Secure`] is done, or the node could not make it safe in time (a text).
    Secured {
        /// The batch.
        batch: BatchId,
        /// Why not, where not.
        refused: Option<String>,
    },
    /// [`Io::Remove`] is done.
    Removed {
        /// The batch.
        batch: BatchId,
    },
    /// [`Io::Migrate`] is done: the keys are at the target, or why the node refused.
    Migrated {
        /// The batch.
        batch: BatchId,
        /// Why not, where not.
        refused: Option<String>,
    },
    /// The connection to a side broke, or its node is silent: nothing that was asked there and not answered is known.
    /// No further answer comes from that connection.
    Lost {
        /// The side.
        side: Side,
    },
    /// There is a new connection to that side, and the node has confirmed that the old one is dead (or is another
    /// process).
    Restored {
        /// The side.
        side: Side,
        /// Who answers there now.
        process: Process,
    },
    /// [`Action::Confirm`] is answered, on the connection that was there when it was asked for.
    Confirmed {
        /// The side.
        side: Side,
        /// So many keys its process has evicted since it began.
        evicted: u64,
    },
    /// [`Action::HandOver`] is done: stored, published.
    HandedOver,
    /// FLUSHALL or the like is about to be sent to the nodes: end what is under way and start nothing, until
    /// [`Event::Resume`].
    Quiesce,
    /// Go on after [`Event::Quiesce`].
    Resume,
    /// Another pace.
    Pace(Pace),
    /// Go back: the user asks for it.
    RollBack,
    /// That side is lost for good, the user says: end at the other one, with what is there. Not done where the side
    /// answers.
    GiveUp {
        /// The side.
        side: Side,
    },
    /// Nothing: time passes. At least every 10 ms while a leg is under way.
    Tick,
}

/// Keys of a leg's slots that a node should not have.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum UnexpectedKeys {
    /// All but these: what the node has is not known.
    AllBut(Arc<BTreeSet<Fingerprint>>),
    /// These, as far as it has them. Others are none of ours.
    These(Arc<BTreeSet<Fingerprint>>),
}

impl UnexpectedKeys {
    /// Whether a key is one of them.
    #[must_use]
    pub fn has(&self, key: Fingerprint) -> bool {
        match self {
            Self::AllBut(right) => !right.contains(&key),
            Self::These(wrong) => wrong.contains(&key),
        }
    }
}

/// What to do. Actions of one step are done in their order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// Make this durable; [`Event::Recorded`] with the number of the record follows. Numbers count from 1 in each leg.
    Record {
        /// Its number.
        number: u64,
        /// What.
        record: Record,
    },
    /// Make every worker know that the slots are moving; [`Event::Drained`] follows.
    Announce {
        /// Keys on their way may be read at both sides, under this condition.
        double_read: Option<Arc<DoubleRead>>,
    },
    /// What was sent to the source before is awaited, while it serves; [`Event::Drained`] follows. What commands that
    /// wait there may still do is told anew.
    Observe,
    /// Make every worker know that they are not: the leg has changed nothing. No event follows.
    Withdraw,
    /// Remove what the side has of the leg's slots and should not have. Look at the node itself for it, from the
    /// beginning, not at an earlier listing. [`Event::Purged`] follows; one at a time.
    Purge {
        /// Where.
        side: Side,
        /// Which keys.
        wrong: UnexpectedKeys,
    },
    /// Every key is at the target, also those that nobody has named: workers use it there. No event follows.
    CommitAll,
    /// Tell further keys, about so many: one [`Event::Listed`] follows for each of these, in order. They are keys of
    /// the source, until [`Action::Relist`] says otherwise.
    List {
        /// How many.
        count: u32,
    },
    /// Begin a new listing: what the side has of the leg's slots now, asked of the node itself and not taken from an
    /// earlier listing. No event follows; what is asked for by [`Action::List`] from here on is from the new one. What
    /// was asked for before is answered with no key of it: the answer is not believed, and a key of the new listing in
    /// it would be forgotten.
    Relist {
        /// Where.
        at: Side,
    },
    /// Make a new connection to that side, confirm the end of the old one; [`Event::Restored`] follows, sooner or
    /// later.
    Restore {
        /// The side.
        side: Side,
    },
    /// Ask that side how many keys it has evicted, on the connection that there is; [`Event::Confirmed`] follows,
    /// unless the connection is lost.
    Confirm {
        /// The side.
        side: Side,
    },
    /// Every key is at the side `to`: store and publish the topology in which that node owns the slots;
    /// [`Event::HandedOver`] follows.
    HandOver {
        /// The side.
        to: Side,
    },
    /// The leg changed direction: from now on only keys that come back are committed, and those never moved may be used
    /// at the source at once. Every worker must know before it is done; [`Event::Drained`] follows, when nothing sent
    /// to the target for these slots before is in flight, and whoever waited for a key has been told to look again.
    /// After a crash of the router it comes in the place of [`Action::Announce`].
    RollBack {
        /// Why, for people.
        why: String,
        /// The keys that have to come back: each waits until it is committed. All others may be used at the source.
        away: Arc<BTreeSet<Fingerprint>>,
    },
    /// A side was given up, and the leg ends without it. No event follows.
    Lost {
        /// The keys that were on record as moved to it, where that is the target: at most these are lost. What the
        /// source had is not known by name.
        keys: Vec<Fingerprint>,
    },
    /// What the driver hands on as it is.
    Io(Io),
}

/// What is asked of nodes, workers and people, by a protocol and through the driver.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Io {
    /// Read these keys at `from`: all databases, expiry as absolute time, what the node knows of their use. A batch of
    /// that number that was copied before is begun again: forget what was read. Until its keys are gone from there,
    /// what was read is kept: it may have to be stored again.
    Copy {
        /// The batch.
        batch: BatchId,
        /// Where.
        from: Side,
        /// Which.
        keys: Vec<Key>,
    },
    /// Store what was read of these of the batch's keys, at `to`, never over an existing key; [`Event::Stored`] has an
    /// outcome for each of these keys.
    Store {
        /// The batch.
        batch: BatchId,
        /// Where.
        to: Side,
        /// Which.
        keys: Vec<Key>,
    },
    /// Store what was read of these of the batch's keys, at `to`, in the place of what is there; [`Event::Stored`] has
    /// an outcome for each of these keys. What was read is forgotten then.
    Overwrite {
        /// The batch.
        batch: BatchId,
        /// Where.
        to: Side,
        /// Which.
        keys: Vec<Key>,
    },
    /// Wait until what was stored is as safe as was asked; [`Event::Secured`] follows.
    Secure {
        /// The batch.
        batch: BatchId,
        /// Where.
        at: Side,
        /// How safe; never [`Durability::Memory`].
        durability: Durability,
    },
    /// Remove these keys at `from`; [`Event::Removed`] follows.
    Remove {
        /// The batch.
        batch: BatchId,
        /// Where.
        from: Side,
        /// Which.
        keys: Vec<Key>,
    },
    /// Have the node at `from` migrate these keys to the other one itself (`MIGRATE`, without `REPLACE`);
    /// [`Event::Migrated`] follows.
    Migrate {
        /// The batch.
        batch: BatchId,
        /// Where.
        from: Side,
        /// Which.
        keys: Vec<Key>,
    },
    /// Commands for these keys may go to where the slots are going. Forget their content.
    Commit {
        /// Which.
        keys: Vec<Key>,
    },
    /// The switch's tracker is told that these groups start, or are complete. Of a protocol as published.
    Track {
        /// Which.
        groups: Vec<Fingerprint>,
        /// Or they start.
        complete: bool,
    },
    /// The switch's tracker has said something else of this group, and may say what is true from now on. Whoever waits
    /// for a key of it looks again. Of a protocol as published.
    Found {
        /// Which.
        group: Fingerprint,
        /// Where it is in truth.
        truth: tracker::State,
    },
    /// Whoever waits for a key now is told this error, and may try again.
    Refuse {
        /// Which keys; `None`: all that are waited for.
        keys: Option<Vec<Key>>,
        /// Text of the error reply, with its code in front.
        error: String,
    },
    /// Nothing is under way, as [`Event::Quiesce`] asked. A leg that is over says it too.
    Quiet,
    /// Something that people should know about this leg: for the log, and beside the move where moves are shown. No
    /// event follows.
    Report {
        /// What.
        text: String,
    },
    /// The leg is over. After it comes nothing but [`Io::Quiet`].
    End(Outcome),
}

/// How a leg ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// The target owns the slots.
    Moved,
    /// The source owns them again, and has all keys.
    Returned {
        /// Why.
        why: String,
    },
    /// It gave up before anything was changed, and may be tried again.
    NotBegun {
        /// Why.
        why: String,
    },
}

/// A leg's machine. Each protocol is one of these.
pub trait Machine {
    /// Takes note of what happened at `now_us` (microseconds on any clock that does not go back) and says what to do.
    fn step(&mut self, event: Event, now_us: u64, actions: &mut Vec<Action>);

    /// How far it is.
    fn progress(&self) -> Progress;
}

/// Where a leg is on its way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Purging, recording, draining. The source serves, or (while draining) everybody waits.
    Preparing,
    /// Keys are moving.
    Moving,
    /// Keys are moving back.
    Returning,
    /// All keys are there; the slots are being handed over.
    Releasing,
    /// Over.
    Ended,
}

/// How far a leg is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Progress {
    /// Where it is.
    pub phase: Phase,
    /// Keys committed that the source had.
    pub keys_moved: u64,
    /// Bytes of their serialised values.
    pub bytes_moved: u64,
    /// Of them those that were moved because a command wanted them.
    pub pulled: u64,
    /// Batches done again because their end was unknown.
    pub repeated: u64,
    /// Keys that a leg which goes back still has to bring back, at most; of one that goes on, those that are listed and
    /// have not moved.
    pub left: u64,
    /// Keys that are on record as moved: so many are lost with the target, at most.
    pub away: u64,
    /// The side that was given up.
    pub given_up: Option<Side>,
}

impl Progress {
    /// Of a leg that has not begun.
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
