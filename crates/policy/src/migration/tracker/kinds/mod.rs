//! The trackers: exact, a Bloom filter, NetMigrate's two filters, and filters with corrections; and the groups that they
//! track. Compiled only with the feature `research`, because no protocol of the product needs them.

mod adaptive;
mod exact;
mod filters;

use super::{Saturation, State, Tracker};
use crate::migration::Fingerprint;
use crate::topology::MoveId;

pub use adaptive::Adaptive;
pub use exact::Exact;
pub use filters::{Filter, Filters, Geometry, Layout};

/// A pair of source and target that shares a tracker with other pairs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pair(pub u32);

impl Pair {
    /// Returns the pair of a move.
    #[must_use]
    pub const fn of(move_id: MoveId) -> Self {
        Self(move_id.0 as u32)
    }
}

/// Returns the group of a range of hashes, by its number.
#[must_use]
pub fn group(pair: Pair, number: u64) -> Fingerprint {
    let pair = u64::from(pair.0);
    let (low, high) = (wang(number ^ wang(pair)), wang(number.wrapping_add(wang(!pair))));
    Fingerprint(u128::from(high) << 64 | u128::from(low))
}

/// Thomas Wang's integer hash, as named in the Bloom telemetry paper.
const fn wang(mut key: u64) -> u64 {
    key = (!key).wrapping_add(key << 21);
    key ^= key >> 24;
    key = key.wrapping_add(key << 3).wrapping_add(key << 8);
    key ^= key >> 14;
    key = key.wrapping_add(key << 2).wrapping_add(key << 4);
    key ^= key >> 28;
    key.wrapping_add(key << 31)
}

/// Kind of tracker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Exact sets.
    Exact,
    /// A Bloom filter of complete groups. Groups in progress are not tracked.
    Bloom,
    /// Adds a counting Bloom filter of groups in progress.
    BloomAndCounting,
    /// Adds corrections of the errors found.
    Adaptive,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 4] = [Self::Exact, Self::Bloom, Self::BloomAndCounting, Self::Adaptive];

    /// Configuration name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Bloom => "bloom",
            Self::BloomAndCounting => "bloom+counting",
            Self::Adaptive => "adaptive",
        }
    }

    /// Returns the kind with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Creates a tracker. Filters use this geometry.
    #[must_use]
    pub fn tracker(self, geometry: Geometry) -> Box<dyn Tracker> {
        match self {
            Self::Exact => Box::new(Exact::default()),
            Self::Bloom => Box::new(Filters::new(Geometry { under_way: None, ..geometry })),
            Self::BloomAndCounting => Box::new(Filters::new(geometry)),
            Self::Adaptive => Box::new(Adaptive::new(Filters::new(geometry), Adaptive::<Filters>::REPAIRS_MAX)),
        }
    }
}
