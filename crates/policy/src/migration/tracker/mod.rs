//! State of each group of a move: exact, or by filters that need less memory and are wrong in one direction only.
//!
//! A *group* is the unit that a protocol tracks: a key, or a range of hashes. It is a [`Fingerprint`]: of the key, or
//! from [`group`]. Several moves share one tracker, so the group of a range includes its pair of source and target,
//! like address and port in NetMigrate's filters.
//!
//! # Guarantees
//! A complete group is never reported in an earlier state, and a group in progress never as not started. Filters only
//! err in the other direction: they report a group as complete, or in progress, that is not. Two consequences:
//! - A reader that finds nothing must also read from the other node, and then reports the error to
//!   [`Tracker::correct`].
//! - A group that has not started can be reported as in progress now and as not started later, when another group with
//!   the same cells completes. Writes made at the target in between are then not found. The papers do not mention this;
//!   a correct protocol tracks such writes exactly.

mod adaptive;
mod exact;
mod filters;

use super::Fingerprint;
use crate::topology::MoveId;

pub use adaptive::Adaptive;
pub use exact::Exact;
pub use filters::{Filter, Filters, Geometry, Layout};

/// State of a group. S1 to S4 are NetMigrate's names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// S1: at the source.
    NotStarted,
    /// S2: its keys are in transit.
    InProgress,
    /// S3: at the target.
    Complete,
    /// S4: reported both in progress and complete, so one report is wrong.
    Unsure,
}

/// Fill level of a tracker.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Saturation {
    /// Fraction of set cells in the filter of complete groups.
    pub complete: f64,
    /// Fraction of nonzero counters for groups in progress.
    pub under_way: f64,
    /// Counters at their maximum. They stay there until [`Tracker::reset`], because their true value is unknown.
    pub stuck: usize,
    /// Probability that a group that has not started gets another state, with the present contents.
    pub false_positives: f64,
}

/// Tracks the states of groups.
pub trait Tracker: Send + Sync {
    /// Records that a group starts. Call once per group.
    fn start(&mut self, group: Fingerprint);

    /// Records that a started group is complete.
    fn complete(&mut self, group: Fingerprint);

    /// Returns the state of a group.
    fn state(&self, group: Fingerprint) -> State;

    /// Corrects a wrong state. Returns whether the correction applies from now on, until the group starts or completes.
    fn correct(&mut self, _group: Fingerprint, _truth: State) -> bool {
        false
    }

    /// Forgets all groups. No move may rely on the tracker: it would look for moved groups at the source.
    fn reset(&mut self);

    /// Memory, bytes.
    fn bytes(&self) -> usize;

    /// Returns the fill level.
    fn saturation(&self) -> Saturation {
        Saturation::default()
    }

    /// Whether the group is at the target.
    fn is_complete(&self, group: Fingerprint) -> bool {
        self.state(group) == State::Complete
    }
}

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
