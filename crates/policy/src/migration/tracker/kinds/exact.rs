//! The exact tracker: two sets of fingerprints.

use super::{State, Tracker};
use crate::migration::{Fingerprint, FingerprintSet};

/// Exact, unless two groups have the same fingerprint.
#[derive(Clone, Debug, Default)]
pub struct Exact {
    under_way: FingerprintSet,
    complete: FingerprintSet,
}

/// Memory of a full set of fingerprints, bytes: a fingerprint and a byte per place, and one eighth of the places free.
const fn bytes_with_room_for(count: usize) -> usize {
    match count {
        0 => 0,
        1..4 => 4 * (size_of::<Fingerprint>() + 1),
        4..8 => 8 * (size_of::<Fingerprint>() + 1),
        _ => (count * 8 / 7).next_power_of_two() * (size_of::<Fingerprint>() + 1),
    }
}

impl Exact {
    /// Memory for complete groups, bytes.
    #[must_use]
    pub const fn bytes_for(groups: usize) -> usize {
        bytes_with_room_for(groups)
    }
}

impl Tracker for Exact {
    fn start(&mut self, group: Fingerprint) {
        self.under_way.insert(group);
    }

    fn complete(&mut self, group: Fingerprint) {
        self.under_way.remove(&group);
        self.complete.insert(group);
    }

    fn state(&self, group: Fingerprint) -> State {
        if self.complete.contains(&group) {
            State::Complete
        } else if self.under_way.contains(&group) {
            State::InProgress
        } else {
            State::NotStarted
        }
    }

    fn reset(&mut self) {
        *self = Self::default();
    }

    fn bytes(&self) -> usize {
        bytes_with_room_for(self.complete.capacity()) + bytes_with_room_for(self.under_way.capacity())
    }

    fn is_complete(&self, group: Fingerprint) -> bool {
        self.complete.contains(&group)
    }
}
