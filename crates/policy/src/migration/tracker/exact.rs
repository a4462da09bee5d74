//! The tracker of the default protocol: a set of fingerprints.

use super::{State, Tracker};
use crate::migration::{Fingerprint, FingerprintSet};

/// Never wrong, as far as no two groups have one fingerprint.
#[derive(Clone, Debug, Default)]
pub struct Exact {
    under_way: FingerprintSet,
    complete: FingerprintSet,
}

/// What a set of so many fingerprints takes where it has room for no more: a fingerprint and a byte in each place, and
/// an eighth of the places is free.
const fn bytes_with_room_for(count: usize) -> usize {
    match count {
        0 => 0,
        1..4 => 4 * (size_of::<Fingerprint>() + 1),
        4..8 => 8 * (size_of::<Fingerprint>() + 1),
        _ => (count * 8 / 7).next_power_of_two() * (size_of::<Fingerprint>() + 1),
    }
}

impl Exact {
    /// Bytes for so many groups that are complete.
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
            State::UnderWay
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
