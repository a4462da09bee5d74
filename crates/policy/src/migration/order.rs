//! One move as ordered: the same value is planned, recorded, queued, executed and reported.
//!
//! A user request is text with node names, and may become several moves. The order does not contain the rest of a
//! mover's state (progress before a restart, access to the journal).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::published::Paper;
use super::{Durability, Goal, Key, Protocol, Record};
use crate::topology::{MoveId, NodeId, Placement, Slot, Topology};

/// Data to move, its nodes and options.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MoveOrder {
    /// Current owner.
    pub source: NodeId,
    /// New owner.
    pub target: NodeId,
    /// Slots, ascending.
    pub slots: Vec<Slot>,
    /// The only keys of the slots that move, ascending; the slots keep their owner. `None`: the slots move with all
    /// their keys.
    pub keys: Option<Arc<[Key]>>,
    /// Options of the move.
    pub how: MoveOptions,
    /// Origin of the move.
    pub cause: Cause,
}

/// Options of a move.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MoveOptions {
    /// Migration protocol.
    pub protocol: Protocol,
    /// Durability required at the target before a source copy is removed.
    pub durability: Durability,
    /// Priority between speed and clients.
    pub goal: Goal,
    /// Rate limit, bytes per second; `None`: the rate follows from the goal.
    pub max_rate: Option<u64>,
    /// Remove keys found at the target in slots that it does not own, regardless of their origin.
    pub purge_target: bool,
    /// Clients may use the nodes past the router, as the user has confirmed.
    pub direct_clients: bool,
    /// Limit of the client commands per second that the source serves of keys in transit; `None`: no limit. Only for
    /// protocols as published.
    pub source_ops_max: Option<u32>,
    /// Variant of the protocol as published, including its flaws; `None`: the corrected protocol.
    pub paper: Option<Paper>,
}

impl MoveOptions {
    /// Whether all slots of a move form one leg.
    #[must_use]
    pub const fn is_one_leg(&self) -> bool {
        self.protocol.is_one_leg() || self.paper.is_some()
    }

    /// Whether clients write keys at the source during the copy.
    #[must_use]
    pub const fn copies_while_served(&self) -> bool {
        self.protocol.copies_first() || self.paper.is_some()
    }
}

/// Origin of a move.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Cause {
    /// A user or a client; with the pattern, if the move is of the keys that match it.
    Requested(Option<String>),
    /// Commands need keys of different slots together: number of keys per command that first needed them.
    Needed(BTreeMap<String, u64>),
    /// The planner.
    Planned,
}

impl MoveOrder {
    /// Returns the records that start the move.
    #[must_use]
    pub fn records(&self, move_id: MoveId) -> Vec<Record> {
        let Self { source, target, how: MoveOptions { protocol, durability, .. }, .. } = *self;
        let begun = Record::Begun { move_id, source, target, slots: self.slots.clone(), protocol, durability };
        let keys = self.keys.as_ref().map(|keys| Record::Keys { move_id, keys: keys.to_vec() });
        std::iter::once(begun).chain(keys).collect()
    }

    /// Whether the source has all slots or keys of the move.
    #[must_use]
    pub fn is_at_source(&self, topology: &Topology) -> bool {
        match &self.keys {
            Some(keys) => keys.iter().all(|key| topology.node_of(key) == self.source),
            None => self.slots.iter().all(|slot| topology.owner(*slot) == self.source),
        }
    }

    /// Returns the slots of the keys, ascending.
    #[must_use]
    pub fn slots_of(placement: &Placement, keys: &[Key]) -> Vec<Slot> {
        let slots: BTreeSet<Slot> = keys.iter().map(|key| placement.slot_of(key)).collect();
        slots.into_iter().collect()
    }

    /// Keys of the move, if clients wait for them.
    #[must_use]
    pub fn needed_keys(&self) -> Option<&Arc<[Key]>> {
        self.keys.as_ref().filter(|_| matches!(self.cause, Cause::Needed(_)))
    }

    /// Source and target, in this order.
    #[must_use]
    pub const fn nodes(&self) -> [NodeId; 2] {
        [self.source, self.target]
    }
}
