//! What a move is about: its slot, or only some keys of it; and where keys live, by the map that is stored. The map is the router's own
//! (`switchyard_policy::topology`).

use std::collections::BTreeSet;
use std::rc::Rc;

use switchyard_policy::migration::Protocol;
use switchyard_policy::topology::{NodeId, Slot, Topology, slot_of};

use super::Lane;
use crate::node::{KeyIx, STAGING};
use crate::planted::Bug;
use crate::world::World;

impl World {
    /// The mover of a slot.
    pub(super) fn lane_of_slot(&self, slot: Slot) -> Lane {
        self.movers.iter().position(|mover| mover.slot == slot).unwrap_or_default()
    }

    /// The mover of a key.
    pub(crate) fn lane_of(&self, key: KeyIx) -> Lane {
        self.lane_of_slot(slot_of(&self.keys[key]))
    }

    pub(super) fn owner(&self, lane: Lane) -> usize {
        usize::from(self.fleet.map.owner(self.movers[lane].slot).0)
    }

    pub(crate) fn lives_at(&self, key: KeyIx) -> usize {
        usize::from(self.fleet.map.lives_at(&self.keys[key]).0)
    }

    /// The node that the last move took keys from.
    pub(crate) fn node_left(&self, lane: Lane) -> usize {
        self.movers[lane].source
    }

    /// Whether the last move was about this key.
    pub(crate) fn has_left(&self, lane: Lane, key: KeyIx) -> bool {
        self.movers[lane].scope.as_ref().is_none_or(|scope| scope.contains(&key))
    }

    /// Whether a key is part of the move under way: it is named, or (of a slot) lives where its slot is.
    pub(super) fn is_own(&self, lane: Lane, key: KeyIx) -> bool {
        if key >= STAGING {
            return false;
        }
        match &self.movers[lane].scope {
            Some(scope) => scope.contains(&key),
            None => self.fleet.map.exception(&self.keys[key]).is_none() || self.bug(Bug::ExceptionTaken),
        }
    }

    /// What the stored map says when the leg under way has ended at this node.
    pub(super) fn map_with_leg_at(&self, lane: Lane, node: usize) -> Topology {
        let (m, node) = (&self.movers[lane], NodeId(node as u16));
        match &m.scope {
            None => self.fleet.map.handed_over(&[m.slot], node),
            Some(scope) => self.fleet.map.keys_handed_over(&[m.slot], scope.iter().map(|key| &self.keys[*key]), node),
        }
    }

    /// Draws what the next move is about: the slot, some keys that live where it is, or some that do not.
    pub(super) fn draw_move(&mut self, lane: Lane) {
        let owner = self.owner(lane);
        (self.movers[lane].source, self.movers[lane].target, self.movers[lane].scope) = (owner, 1 - owner, None);
        let chance = self.scenario.exceptions;
        if chance == 0 || self.movers[lane].protocol != Protocol::Switchyard || !self.random.chance(chance) {
            return;
        }
        let goes_home = self.random.chance(400);
        let from = if goes_home { 1 - owner } else { owner };
        let there: Vec<KeyIx> = (0..self.keys.len()).filter(|key| self.lives_at(*key) == from).collect();
        let scope: BTreeSet<KeyIx> = there.into_iter().filter(|_| self.random.chance(600)).collect();
        if !scope.is_empty() {
            (self.movers[lane].source, self.movers[lane].target, self.movers[lane].scope) = (from, 1 - from, Some(Rc::new(scope)));
        }
    }
}
