//! What the journal of the moves says, and what follows from it after a crash.
//!
//! Presence of a key at a node is not history: a node that restarted may show keys again that have left it. So each
//! step is on record before it takes effect, and after a crash the record is read first, and the nodes only then.

mod bytes;
mod queue;
mod replay;

use std::collections::BTreeMap;
use std::sync::Arc;

pub use bytes::Damaged;
pub use queue::{Given, Kind, Queue, Room};
pub use replay::Contradiction;

use super::{Durability, Fingerprint, Key, Process, Protocol, Side, UnexpectedKeys};
use crate::topology::{MoveId, NodeId, Slot};

/// One entry of the journal.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Record {
    /// A move was accepted.
    Begun {
        /// Its number.
        move_id: MoveId,
        /// From where.
        source: NodeId,
        /// To where.
        target: NodeId,
        /// All its slots, ascending.
        slots: Vec<Slot>,
        /// How.
        protocol: Protocol,
        /// How safe.
        durability: Durability,
    },
    /// The move takes only these keys of its slots, and the slots keep their owner. Right behind `Begun`, and with it.
    Keys {
        /// The move.
        move_id: MoveId,
        /// The keys, ascending.
        keys: Vec<Key>,
    },
    /// A leg begins: written before anything of it is done. What the target has of these slots may be removed until
    /// `LegMoving`.
    LegBegun {
        /// The move.
        move_id: MoveId,
        /// The leg.
        leg: u32,
        /// Its slots, ascending.
        slots: Vec<Slot>,
        /// The process at the source.
        source: Process,
        /// The process at the target.
        target: Process,
    },
    /// The drain is complete: from here on keys may be at the target.
    LegMoving {
        /// The move.
        move_id: MoveId,
        /// The leg.
        leg: u32,
    },
    /// Another process, or another connection, at a side.
    Met {
        /// The move.
        move_id: MoveId,
        /// The leg.
        leg: u32,
        /// Which side.
        side: Side,
        /// Who is there now.
        process: Process,
    },
    /// These keys are stored at the target, or the source does not have them. Written before their source copies are
    /// removed.
    Moved {
        /// The move.
        move_id: MoveId,
        /// The leg.
        leg: u32,
        /// The keys.
        keys: Vec<Fingerprint>,
    },
    /// The target is another process, and these keys were committed before: what it has of them is all there is, and
    /// what a source that has come back shows of them is past.
    Committed {
        /// The move.
        move_id: MoveId,
        /// The leg.
        leg: u32,
        /// The keys.
        keys: Vec<Fingerprint>,
    },
    /// The leg goes back: keys on record as moved return to the source.
    RolledBack {
        /// The move.
        move_id: MoveId,
        /// The leg.
        leg: u32,
        /// Why.
        why: String,
    },
    /// These keys are stored at the source again. Written before their copies at the target are removed.
    Returned {
        /// The move.
        move_id: MoveId,
        /// The leg.
        leg: u32,
        /// The keys.
        keys: Vec<Fingerprint>,
    },
    /// This side is lost for good: the leg ends at the other one.
    GivenUp {
        /// The move.
        move_id: MoveId,
        /// The leg.
        leg: u32,
        /// The side.
        side: Side,
    },
    /// All keys of the leg are at the target, and what the source has is past: from here on the target serves. Of a
    /// protocol that copies all keys first.
    CutOver {
        /// The move.
        move_id: MoveId,
        /// The leg.
        leg: u32,
    },
    /// Of a protocol that copies all keys first: what the target has of these was copied before their last write. With
    /// `LegMoving`; nobody writes from then on.
    Behind {
        /// The move.
        move_id: MoveId,
        /// The leg.
        leg: u32,
        /// The keys.
        keys: StaleCopies,
    },
    /// Every key of the leg is at this side (or it is what is left), which owns the slots from here on.
    LegEnded {
        /// The move.
        move_id: MoveId,
        /// The leg.
        leg: u32,
        /// The owner.
        owner: Side,
    },
    /// The move is over, finished or not; what is left of it stays where it is.
    Ended {
        /// The move.
        move_id: MoveId,
    },
}

/// Keys whose copies are older than what clients were told.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StaleCopies {
    /// These, at most.
    These(Vec<Fingerprint>),
    /// Any: a key that nobody has named was written.
    Any,
}

impl StaleCopies {
    /// None.
    pub const NONE: Self = Self::These(Vec::new());

    /// What is to be removed where their copies are; `None`: nothing.
    #[must_use]
    pub fn wrong(&self) -> Option<UnexpectedKeys> {
        match self {
            Self::These(keys) if keys.is_empty() => None,
            Self::These(keys) => Some(UnexpectedKeys::These(Arc::new(keys.iter().copied().collect()))),
            Self::Any => Some(UnexpectedKeys::AllBut(Arc::default())),
        }
    }
}

/// In the place of the target's era: committed, so the target's state of it is the only one, whatever happens to the
/// target.
pub(in crate::migration) const COMMITTED: u32 = u32::MAX;

impl Record {
    /// The move that it is about.
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

/// How many times another process than before was at each side, since the leg began, when a key was recorded.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ProcessGenerations {
    /// At the source.
    pub source: u32,
    /// At the target.
    pub target: u32,
}

impl ProcessGenerations {
    /// At this side.
    #[must_use]
    pub const fn of(&self, side: Side) -> u32 {
        match side {
            Side::Source => self.source,
            Side::Target => self.target,
        }
    }
}

/// A leg that was under way at the end of the journal.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OpenLeg {
    /// Its number.
    pub leg: u32,
    /// Its slots.
    pub slots: Vec<Slot>,
    /// Whether the drain was complete. If not, the source has everything.
    pub moving: bool,
    /// Why it was rolled back, if it was.
    pub rolled_back: Option<String>,
    /// The side that was given up, if one was.
    pub given_up: Option<Side>,
    /// All of it is at the target by one record ([`Record::CutOver`]).
    pub cut_over: bool,
    /// Copies at the target that are past ([`Record::StaleCopies`]), until it is cut over.
    pub behind: StaleCopies,
    /// Who was at the source last.
    pub source: Process,
    /// Who was at the target last.
    pub target: Process,
    /// How many times another process than before was met at each side, since the leg began.
    pub eras: ProcessGenerations,
    /// Keys on record as moved and not as returned, with the eras of their last record.
    pub away: BTreeMap<Fingerprint, ProcessGenerations>,
}

/// A move that was under way at the end of the journal.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OpenMove {
    /// From where.
    pub source: NodeId,
    /// To where.
    pub target: NodeId,
    /// All its slots.
    pub slots: Vec<Slot>,
    /// How.
    pub protocol: Protocol,
    /// How safe.
    pub durability: Durability,
    /// Where the move takes only some keys of its slots: which, ascending.
    pub keys: Option<Arc<[Key]>>,
    /// Slots that the target owns by the journal (or of which the keys live there). The stored topology may not say so
    /// yet.
    pub handed_over: Vec<Slot>,
    /// The leg under way.
    pub leg: Option<OpenLeg>,
    /// The number that the next leg gets.
    pub next_leg: u32,
}

/// The moves that were under way, as the journal tells. A record that fits nothing before it is an error: the journal
/// is damaged.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Replay {
    /// By number.
    pub open: BTreeMap<MoveId, OpenMove>,
    /// The highest number of a move seen.
    pub last: u64,
}
