//! Lists the keys of a move once, before its legs. Keys that workers write later are added.

use switchyard_policy::migration::Key;
use switchyard_policy::migration::life::StepResult;

use super::{Lane, Stage, What};
use crate::node::{Cmd, KeyIx, STAGING};
use crate::world::World;

/// Keys per SCAN.
const LISTED_AT_ONCE: usize = 8;
/// Keys taken from the list at once.
const LISTED_KEYS: usize = 3;

impl World {
    /// Lists the keys of the source.
    pub(super) fn list(&mut self, lane: Lane) {
        self.movers[lane].stage = Stage::Listing;
        self.demand(lane, 0, Cmd::Scan(0, LISTED_AT_ONCE, STAGING), What::List);
    }

    pub(super) fn listed(&mut self, lane: Lane, keys: Vec<KeyIx>, next: Option<KeyIx>) {
        let own: Vec<KeyIx> =
            keys.into_iter().filter(|key| self.is_left(lane, *key)).map(|key| key % self.names()).collect();
        self.movers[lane].list.keys.extend(own);
        if self.movers[lane].stage != Stage::Listing {
            return;
        }
        match next {
            Some(next) => self.demand(lane, 0, Cmd::Scan(next, LISTED_AT_ONCE, STAGING), What::List),
            None => {
                self.movers[lane].list.of = self.movers[lane].links[0].process.map(|(process, _)| process);
                self.movers[lane].list.is_whole = true;
                self.on_step_result(lane, StepResult::Done);
            }
        }
    }

    pub(crate) fn mover_notes(&mut self, lane: Lane, keys: &[KeyIx]) {
        let own: Vec<KeyIx> =
            keys.iter().filter(|key| self.is_left(lane, **key)).map(|key| key % self.names()).collect();
        self.movers[lane].list.keys.extend(own);
    }

    /// Takes the next listed keys of the leg. `None` if the list is incomplete.
    pub(super) fn take_listed(&mut self, lane: Lane) -> Option<(Vec<Key>, bool)> {
        let is_lost = self.random.chance(20);
        let m = &self.movers[lane];
        if is_lost || m.leg_slots.iter().any(|slot| m.list.anything.contains(slot)) {
            return None;
        }
        let from = self.movers[lane].list.at;
        let of_leg = |key: &&KeyIx| self.is_of_leg(lane, **key);
        let list = &self.movers[lane].list;
        let keys: Vec<KeyIx> = list.keys.range(from..).filter(of_leg).take(LISTED_KEYS).copied().collect();
        self.movers[lane].list.at = keys.last().map_or(from, |last| last + 1);
        let end = !self.movers[lane].list.keys.range(self.movers[lane].list.at..).any(|key| self.is_of_leg(lane, *key));
        Some((keys.into_iter().map(|key| self.keys[key].clone()).collect(), end))
    }
}
