//! Keys that clients use together although they are in several slots, sampled for placement rules
//! ([`switchyard_policy::together`]).
//!
//! Each worker samples a few groups per tick and regularly adds them to the shared sample, so a client's command takes
//! no lock. Commands whose keys share a slot, and commands that work across slots, are not sampled.

use std::sync::Mutex;

use switchyard_policy::together::Groups;

use crate::lock::lock;

/// Maximum number of groups that a worker samples per tick.
const GROUPS_PER_TICK: usize = 8;

/// Groups of one worker, not yet added to the shared sample.
#[derive(Debug, Default)]
pub(crate) struct GroupSample {
    groups: Groups,
    count: usize,
}

impl GroupSample {
    /// Whether another group is sampled in this tick.
    #[inline]
    pub(crate) fn has_room(&self) -> bool {
        self.count < GROUPS_PER_TICK
    }

    /// Samples the keys of a command or transaction.
    #[cold]
    pub(crate) fn note<'k>(&mut self, keys: impl IntoIterator<Item = &'k [u8]>) {
        if self.has_room() {
            self.count += 1;
            self.groups.note(keys);
        }
    }

    /// Adds the groups to the shared sample.
    #[inline]
    pub(crate) fn drain_into(&mut self, all: &UsedTogether) {
        if self.count > 0 {
            let Self { groups, .. } = std::mem::take(self);
            lock(&all.0).append(groups);
        }
    }
}

/// The sample of all workers.
#[derive(Debug, Default)]
pub(crate) struct UsedTogether(Mutex<Groups>);

impl UsedTogether {
    /// Returns the sample.
    pub(crate) fn groups(&self) -> Groups {
        lock(&self.0).clone()
    }
}
