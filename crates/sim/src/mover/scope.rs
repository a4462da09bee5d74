//! Scope of a move: slots, or some of their keys; and the locations of keys by the stored map. The map is the router's
//! own (`switchyard_policy::topology`).

use std::collections::BTreeSet;
use std::rc::Rc;

use switchyard_policy::migration::Protocol;
use switchyard_policy::topology::{NodeId, Rule, RuleSet, Slot, Topology};

use super::{Lane, SlotView};
use crate::injected::Bug;
use crate::node::{KeyIx, STAGING};
use crate::world::World;

impl World {
    /// The mover of a slot.
    pub(super) fn lane_of_slot(&self, slot: Slot) -> Lane {
        self.movers.iter().position(|mover| mover.all_slots.contains(&slot)).unwrap_or_default()
    }

    /// The mover of a key.
    pub(crate) fn lane_of(&self, key: KeyIx) -> Lane {
        self.lane_of_slot(self.slot_of(key))
    }

    /// Slot of a key by the stored map.
    pub(crate) fn slot_of(&self, key: KeyIx) -> Slot {
        self.fleet.map.slot_of(&self.keys[key])
    }

    fn owner(&self, slot: Slot) -> usize {
        usize::from(self.fleet.map.owner(slot).0)
    }

    pub(crate) fn lives_at(&self, key: KeyIx) -> usize {
        usize::from(self.fleet.map.lives_at(&self.keys[key]).0)
    }

    /// The node that the last move took keys from.
    pub(crate) fn node_left(&self, lane: Lane) -> usize {
        self.movers[lane].source
    }

    /// Whether the last leg concerned this key.
    pub(crate) fn has_left(&self, lane: Lane, key: KeyIx) -> bool {
        self.is_of_leg(lane, key)
            && self.movers[lane].scope.as_ref().is_none_or(|scope| scope.contains(&(key % self.names())))
    }

    /// Whether a key is in a slot of the current leg.
    pub(super) fn is_of_leg(&self, lane: Lane, key: KeyIx) -> bool {
        self.movers[lane].leg_slots.contains(&self.slot_of(key))
    }

    /// Whether a key belongs to the current leg: it is in the scope, or (for slots) has no placement override.
    pub(super) fn is_own(&self, lane: Lane, key: KeyIx) -> bool {
        key < STAGING && self.is_of_leg(lane, key) && self.moves(lane, key)
    }

    /// Whether a key belongs to the remaining part of the move.
    pub(super) fn is_left(&self, lane: Lane, key: KeyIx) -> bool {
        key < STAGING && self.movers[lane].slots.contains(&self.slot_of(key)) && self.moves(lane, key)
    }

    fn moves(&self, lane: Lane, key: KeyIx) -> bool {
        match &self.movers[lane].scope {
            Some(scope) => scope.contains(&(key % self.names())),
            None => self.fleet.map.placement_override(&self.keys[key]).is_none() || self.bug(Bug::OverrideTaken),
        }
    }

    /// Returns the stored map after the current leg has ended at this node.
    pub(super) fn map_with_leg_at(&self, lane: Lane, node: usize) -> Topology {
        let (m, node) = (&self.movers[lane], NodeId(node as u16));
        let mut slots = m.leg_slots.clone();
        slots.extend(m.rest().into_iter().filter(|_| self.bug(Bug::HandedOverTooEarly)));
        let keys = |scope: &Rc<BTreeSet<KeyIx>>| {
            let keys = scope.iter().map(|key| &self.keys[*key]);
            keys.filter(|key| slots.contains(&self.fleet.map.slot_of(key))).collect::<Vec<_>>()
        };
        match &m.scope {
            None => self.fleet.map.handed_over(&slots, node),
            Some(scope) => self.fleet.map.keys_handed_over(&slots, keys(scope), node),
        }
    }

    /// Draws the scope of the next move: slots, some keys at their slot owner, or some with placement overrides.
    pub(super) fn draw_move(&mut self, lane: Lane) {
        if self.scenario.adoptions > 0 && self.draw_adoption(lane) {
            return;
        }
        let all = self.movers[lane].all_slots.clone();
        let one = if all.len() > 1 { self.random.below(all.len() as u64) as usize } else { 0 };
        let owner = self.owner(all[one]);
        let there: Vec<Slot> = all.iter().copied().filter(|slot| self.owner(*slot) == owner).collect();
        let slots = self.some_of(there);
        let m = &mut self.movers[lane];
        (m.source, m.target, m.scope, m.slots) = (owner, 1 - owner, None, slots);
        let chance = self.scenario.overrides;
        if chance == 0 || self.movers[lane].protocol != Protocol::Switchyard || !self.random.chance(chance) {
            return;
        }
        let goes_home = self.random.chance(400);
        let from = if goes_home { 1 - owner } else { owner };
        let there: Vec<KeyIx> =
            (0..self.names()).filter(|key| self.lane_of(*key) == lane && self.lives_at(*key) == from).collect();
        let scope: BTreeSet<KeyIx> = there.into_iter().filter(|_| self.random.chance(600)).collect();
        if !scope.is_empty() {
            let slots = all.into_iter().filter(|slot| scope.iter().any(|key| self.slot_of(*key) == *slot)).collect();
            let m = &mut self.movers[lane];
            (m.source, m.target, m.scope, m.slots) = (from, 1 - from, Some(Rc::new(scope)), slots);
        }
    }

    /// Begins or ends an adoption of rules. Returns whether the next move is part of an adoption.
    fn draw_adoption(&mut self, lane: Lane) -> bool {
        if !self.fleet.map.is_adopting() && self.random.chance(self.scenario.adoptions) {
            let is_ruled = self.fleet.map.ruled().is_some_and(|ruled| !ruled.rules().is_empty());
            let rule = Rule { keys: vec!["{tag}--*".to_owned()], tag: None };
            let rules = RuleSet::new(if is_ruled { Vec::new() } else { vec![rule] }).expect("valid rules");
            self.fleet.map = self.fleet.map.with_adoption(rules).expect("no slot is in transit in the stored map");
            self.publish(lane, SlotView::Nothing);
        }
        let used: BTreeSet<Slot> = (0..self.names()).map(|key| self.slot_of(key)).collect();
        let left = self.fleet.map.adoption_moves();
        let with_keys: Vec<(Slot, NodeId)> = left.iter().filter(|(slot, _)| used.contains(slot)).copied().collect();
        let first = with_keys.first().copied().filter(|_| !self.bug(Bug::AdoptionEndedEarly));
        let Some((first, target)) = first else {
            if self.fleet.map.is_adopting() {
                let arrived =
                    left.iter().fold(self.fleet.map.clone(), |map, (slot, node)| map.handed_over(&[*slot], *node));
                self.fleet.map = arrived.with_adoption_ended().expect("all passages have arrived");
                self.publish(lane, SlotView::Nothing);
            }
            let used: BTreeSet<Slot> = (0..self.names()).map(|key| self.slot_of(key)).collect();
            self.movers[lane].all_slots = used.into_iter().collect();
            return false;
        };
        let source = self.fleet.map.owner(first);
        let is_one = |(slot, node): &&(Slot, NodeId)| *node == target && self.fleet.map.owner(*slot) == source;
        let slots = with_keys.iter().filter(is_one).map(|(slot, _)| *slot).collect();
        let slots = self.some_of(slots);
        let m = &mut self.movers[lane];
        (m.source, m.target, m.scope, m.slots) = (source.index(), target.index(), None, slots);
        m.all_slots = used.into_iter().collect();
        true
    }

    /// Draws the slots of the next leg.
    pub(super) fn draw_leg(&mut self, lane: Lane) {
        let slots = self.movers[lane].slots.clone();
        self.movers[lane].leg_slots = if self.movers[lane].how().is_one_leg() { slots } else { self.some_of(slots) };
    }

    /// Draws some of these slots, or all, in order.
    fn some_of(&mut self, mut slots: Vec<Slot>) -> Vec<Slot> {
        if slots.len() > 1 && self.random.chance(600) {
            let first = slots.remove(self.random.below(slots.len() as u64) as usize);
            slots.retain(|_| self.random.chance(400));
            slots.push(first);
            slots.sort_unstable();
        }
        slots
    }
}
