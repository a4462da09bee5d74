//! Records in the journal of moves, and their replay after a crash.
//!
//! The presence of a key at a node is not history: a restarted node may show keys that have left it. So each step is on
//! record before it takes effect, and after a crash the records are read before the nodes.

mod bytes;
mod queue;
mod replay;

use std::collections::BTreeMap;
use std::sync::Arc;

pub use bytes::Damaged;
pub use queue::{Kind, Queue, RecordGroup, SpaceCheck};
pub use replay::Contradiction;

use super::{Durability, Fingerprint, Key, Process, Protocol, Side, UnexpectedKeys};
use crate::topology::{MoveId, NodeId, Slot};

/// Entry of the journal.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Record {
    /// A move was accepted.
    Begun {
        /// Move id.
        move_id: MoveId,
        /// Current owner.
        source: NodeId,
        /// New owner.
        target: NodeId,
        /// All slots of the move, ascending.
        slots: Vec<Slot>,
        /// Migration protocol.
        protocol: Protocol,
        /// Durability required before a source copy is removed.
        durability: Durability,
    },
    /// The move takes only these keys of its slots, and the slots keep their owner. Written right after `Begun`, in the
    /// same entry.
    Keys {
        /// Move id.
        move_id: MoveId,
        /// Keys of the move, ascending.
        keys: Vec<Key>,
    },
    /// A leg starts. Written before its first action. Keys of its slots at the target may be removed until `LegMoving`.
    LegBegun {
        /// Move id.
        move_id: MoveId,
        /// Leg number.
        leg: u32,
        /// Slots of the leg, ascending.
        slots: Vec<Slot>,
        /// The process at the source.
        source: Process,
        /// The process at the target.
        target: Process,
    },
    /// The drain is complete: from here on keys may be at the target.
    LegMoving {
        /// Move id.
        move_id: MoveId,
        /// Leg number.
        leg: u32,
    },
    /// A new process or connection at a side.
    Met {
        /// Move id.
        move_id: MoveId,
        /// Leg number.
        leg: u32,
        /// Side of the process.
        side: Side,
        /// Process now serving there.
        process: Process,
    },
    /// These keys are stored at the target, or absent at the source. Written before their source copies are removed.
    Moved {
        /// Move id.
        move_id: MoveId,
        /// Leg number.
        leg: u32,
        /// Affected keys.
        keys: Vec<Fingerprint>,
    },
    /// The target is a new process, and these keys were committed before. Only its own copies are valid; copies at a
    /// restarted source are stale.
    Committed {
        /// Move id.
        move_id: MoveId,
        /// Leg number.
        leg: u32,
        /// Affected keys.
        keys: Vec<Fingerprint>,
    },
    /// The leg goes back: keys on record as moved return to the source.
    RolledBack {
        /// Move id.
        move_id: MoveId,
        /// Leg number.
        leg: u32,
        /// Reason, for display.
        why: String,
    },
    /// These keys are stored at the source again. Written before their copies at the target are removed.
    Returned {
        /// Move id.
        move_id: MoveId,
        /// Leg number.
        leg: u32,
        /// Affected keys.
        keys: Vec<Fingerprint>,
    },
    /// A side is lost for good: the leg ends at the other side.
    GivenUp {
        /// Move id.
        move_id: MoveId,
        /// Leg number.
        leg: u32,
        /// Lost side.
        side: Side,
    },
    /// All keys of the leg are at the target, and the source's copies are outdated: from here on the target serves.
    /// Only in protocols that copy all keys first.
    CutOver {
        /// Move id.
        move_id: MoveId,
        /// Leg number.
        leg: u32,
    },
    /// The target's copies of these keys are older than their last write. Written with `LegMoving`, after which writes
    /// have stopped. Only in protocols that copy all keys first.
    Behind {
        /// Move id.
        move_id: MoveId,
        /// Leg number.
        leg: u32,
        /// Affected keys.
        keys: StaleCopies,
    },
    /// Every remaining key of the leg is at this side, which owns the slots from here on.
    LegEnded {
        /// Move id.
        move_id: MoveId,
        /// Leg number.
        leg: u32,
        /// New owner of the slots.
        owner: Side,
    },
    /// The move has ended, complete or not. Slots stay where they are.
    Ended {
        /// Move id.
        move_id: MoveId,
    },
}

/// Keys whose copies are older than acknowledged writes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StaleCopies {
    /// At most these keys.
    These(Vec<Fingerprint>),
    /// Any key: undeclared keys were written.
    Any,
}

impl StaleCopies {
    /// No keys.
    pub const NONE: Self = Self::These(Vec::new());

    /// Returns the copies to remove; `None`: nothing.
    #[must_use]
    pub fn wrong(&self) -> Option<UnexpectedKeys> {
        match self {
            Self::These(keys) if keys.is_empty() => None,
            Self::These(keys) => Some(UnexpectedKeys::These(Arc::new(keys.iter().copied().collect()))),
            Self::Any => Some(UnexpectedKeys::AllBut(Arc::default())),
        }
    }
}

/// Replaces the target's generation for committed keys: only the target's copy is valid, even after a restart of the
/// target.
pub(in crate::migration) const COMMITTED: u32 = u32::MAX;

impl Record {
    /// Move that the record belongs to.
    #[must_use]
    pub const fn move_id(&self) -> MoveId {
        match self {
            Self::Begun { move_id, .. }
            | Self::Keys { move_id, .. }
            | Self::LegBegun { move_id, .. }
            | Self::LegMoving { move_id, .. }
            | Self::Met { move_id, .. }
            | Self::Moved { move_id, .. }
            | Self::Committed { move_id, .. }
            | Self::RolledBack { move_id, .. }
            | Self::Returned { move_id, .. }
            | Self::GivenUp { move_id, .. }
            | Self::CutOver { move_id, .. }
            | Self::Behind { move_id, .. }
            | Self::LegEnded { move_id, .. }
            | Self::Ended { move_id } => *move_id,
        }
    }
}

/// Process generations: how often the process at each side had changed since the start of the leg, when a key was
/// recorded.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ProcessGenerations {
    /// Generation of the source.
    pub source: u32,
    /// Generation of the target.
    pub target: u32,
}

impl ProcessGenerations {
    /// Returns the generation of a side.
    #[must_use]
    pub const fn of(&self, side: Side) -> u32 {
        match side {
            Side::Source => self.source,
            Side::Target => self.target,
        }
    }
}

/// A leg without an end in the journal.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OpenLeg {
    /// Leg number.
    pub leg: u32,
    /// Slots of the leg.
    pub slots: Vec<Slot>,
    /// Whether the drain was complete. If not, the source has every key.
    pub moving: bool,
    /// Reason of the rollback, if there was one.
    pub rolled_back: Option<String>,
    /// Side that was given up.
    pub given_up: Option<Side>,
    /// All keys are at the target, by [`Record::CutOver`].
    pub cut_over: bool,
    /// Outdated copies at the target ([`Record::StaleCopies`]), until the cut-over.
    pub behind: StaleCopies,
    /// Last process at the source.
    pub source: Process,
    /// Last process at the target.
    pub target: Process,
    /// Present process generations.
    pub eras: ProcessGenerations,
    /// Keys on record as moved and not as returned, with the generations of their last record.
    pub away: BTreeMap<Fingerprint, ProcessGenerations>,
}

/// A move without an end in the journal.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OpenMove {
    /// Current owner.
    pub source: NodeId,
    /// New owner.
    pub target: NodeId,
    /// All slots of the move.
    pub slots: Vec<Slot>,
    /// Migration protocol.
    pub protocol: Protocol,
    /// Durability required before a source copy is removed.
    pub durability: Durability,
    /// The only keys of the slots that move, ascending; `None`: all.
    pub keys: Option<Arc<[Key]>>,
    /// Slots that the target owns according to the journal (or whose keys it has). The stored topology may be older.
    pub handed_over: Vec<Slot>,
    /// Open leg.
    pub leg: Option<OpenLeg>,
    /// Number of the next leg.
    pub next_leg: u32,
}

/// Open moves of a journal. A record that does not fit the previous ones is an error: the journal is damaged.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Replay {
    /// Open moves by id.
    pub open: BTreeMap<MoveId, OpenMove>,
    /// Highest move id so far.
    pub last: u64,
}
