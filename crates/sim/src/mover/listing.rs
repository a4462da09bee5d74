//! The keys of a move: listed once, before its legs; what workers write meanwhile is added.

use switchyard_policy::migration::Key;

use super::{Stage, What};
use crate::node::{Cmd, KeyIx};
use crate::world::World;

/// Keys of a SCAN.
const LISTED_AT_ONCE: usize = 8;
/// Keys that are taken from the list at once.
const LISTED_KEYS: usize = 3;

impl World {
    /// Both nodes are reached, and there is no leg to go on with.
    pub(super) fn list(&mut self) {
        self.mover.stage = Stage::Listing;
        self.demand(0, Cmd::Scan(0, LISTED_AT_ONCE), What::List);
    }

    pub(super) fn listed(&mut self, keys: Vec<KeyIx>, next: Option<KeyIx>) {
        let own: Vec<KeyIx> = keys.into_iter().filter(|key| self.is_own(*key)).collect();
        self.mover.list.extend(own);
        if self.mover.stage != Stage::Listing {
            return;
        }
        match next {
            Some(next) => self.demand(0, Cmd::Scan(next, LISTED_AT_ONCE), What::List),
            None => {
                self.mover.listed_of = self.mover.links[0].process.map(|(process, _)| process);
                self.connected();
            }
        }
    }

    pub(crate) fn mover_notes(&mut self, keys: &[KeyIx]) {
        let own: Vec<KeyIx> = keys.iter().copied().filter(|key| self.is_own(*key)).collect();
        self.mover.list.extend(own);
    }

    /// Some more of what is listed.
    pub(super) fn take_listed(&mut self) -> Option<(Vec<Key>, bool)> {
        if self.random.chance(20) || self.mover.anything {
            return None;
        }
        let from = self.mover.list_at;
        let keys: Vec<KeyIx> = self.mover.list.range(from..).take(LISTED_KEYS).copied().collect();
        self.mover.list_at = keys.last().map_or(from, |last| last + 1);
        let end = self.mover.list.range(self.mover.list_at..).next().is_none();
        Some((keys.into_iter().map(|key| self.keys[key].clone()).collect(), end))
    }
}
