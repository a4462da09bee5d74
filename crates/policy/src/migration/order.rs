//! One move as it was ordered: the same value while it is planned, put on record, queued, done and reported.
//!
//! What somebody asks for is text with names of nodes, and may be several moves. What a mover needs beside the order
//! (where it stood before a restart, who keeps its records) is no part of it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::published::Paper;
use super::{Durability, Goal, Key, Protocol, Record};
use crate::topology::{MoveId, NodeId, Placement, Slot, Topology};

/// What goes from one node to another, and how.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MoveOrder {
    /// From where.
    pub source: NodeId,
    /// To where.
    pub target: NodeId,
    /// Which slots, ascending.
    pub slots: Vec<Slot>,
    /// Only these keys of the slots, ascending; the slots keep their owner. `None`: the slots with all that they have.
    pub keys: Option<Arc<[Key]>>,
    /// How.
    pub how: MoveOptions,
    /// Why.
    pub cause: Cause,
}

/// How data moves.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MoveOptions {
    /// In which steps.
    pub protocol: Protocol,
    /// What must be safe at the target before a source copy goes.
    pub durability: Durability,
    /// What matters most.
    pub goal: Goal,
    /// Bytes per second at most; `None`: as the goal says.
    pub max_rate: Option<u64>,
    /// Keys found at the target in slots that it does not own are removed, whoever put them there.
    pub purge_target: bool,
    /// Clients use the nodes past the router, and the user has said that it may be so.
    pub direct_clients: bool,
    /// The protocol as it was published, with its holes; `None`: with what makes it correct.
    pub paper: Option<Paper>,
}

impl MoveOptions {
    /// Whether all slots of a move are one leg.
    #[must_use]
    pub const fn is_one_leg(&self) -> bool {
        self.protocol.is_one_leg() || self.paper.is_some()
    }

    /// Whether keys are written at the source while they are copied.
    #[must_use]
    pub const fn copies_while_served(&self) -> bool {
        self.protocol.copies_first() || self.paper.is_some()
    }
}

/// Why data moves.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Cause {
    /// Somebody asks for it; where only some keys move, those that match this pattern.
    Requested(Option<String>),
    /// Commands of clients need keys together with others of their slots: how many keys, by the command that needed
    /// them first.
    Needed(BTreeMap<String, u64>),
    /// The planner has decided so.
    Planned,
}

impl MoveOrder {
    /// The records by which a move begins.
    #[must_use]
    pub fn records(&self, move_id: MoveId) -> Vec<Record> {
        let Self { source, target, how: MoveOptions { protocol, durability, .. }, .. } = *self;
        let begun = Record::Begun { move_id, source, target, slots: self.slots.clone(), protocol, durability };
        let keys = self.keys.as_ref().map(|keys| Record::Keys { move_id, keys: keys.to_vec() });
        std::iter::once(begun).chain(keys).collect()
    }

    /// Whether all of it is at the source.
    #[must_use]
    pub fn is_at_source(&self, topology: &Topology) -> bool {
        match &self.keys {
            Some(keys) => keys.iter().all(|key| topology.lives_at(key) == self.source),
            None => self.slots.iter().all(|slot| topology.owner(*slot) == self.source),
        }
    }

    /// The slots of these keys, ascending.
    #[must_use]
    pub fn slots_of(placement: &Placement, keys: &[Key]) -> Vec<Slot> {
        let slots: BTreeSet<Slot> = keys.iter().map(|key| placement.slot_of(key)).collect();
        slots.into_iter().collect()
    }

    /// The keys, if clients wait for them.
    #[must_use]
    pub fn needed_keys(&self) -> Option<&Arc<[Key]>> {
        self.keys.as_ref().filter(|_| matches!(self.cause, Cause::Needed(_)))
    }

    /// Source and target.
    #[must_use]
    pub const fn nodes(&self) -> [NodeId; 2] {
        [self.source, self.target]
    }
}
