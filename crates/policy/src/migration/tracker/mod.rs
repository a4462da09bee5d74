//! Where each group of a move is, as far as it is remembered: exactly, or by filters that take less memory and err to
//! one side.
//!
//! A *group* is the unit that a protocol tracks: a key, or a range of hashes. It is a [`Fingerprint`]: that of the key,
//! or [`group`]. Several moves share one tracker, so a group of a range has its pair of source and target in it, as
//! NetMigrate's filters have address and port.
//!
//! # What may be relied upon
//! What has completed is never said to be elsewhere, and what is under way is never said not to have started. Filters
//! err in the other direction only: they call a group complete, or under way, that is not. Two things follow from that.
//! - Whoever reads by a filter looks at the other node when he finds nothing. [`Tracker::found`] is told of it.
//! - A group that has not started can be called under way now and not started later, when another group with the same
//!   cells completes. What was written for it meanwhile at the target is then not looked for there. The papers do not
//!   say so; a correct protocol remembers such writes exactly.

mod adaptive;
mod exact;
mod filters;

use super::Fingerprint;
use crate::topology::MoveId;

pub use adaptive::Adaptive;
pub use exact::Exact;
pub use filters::{Filter, Filters, Geometry, Layout};

/// Where a group is. S1 to S4 are NetMigrate's names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// S1: at the source.
    NotStarted,
    /// S2: keys of it are on their way.
    UnderWay,
    /// S3: at the target.
    Complete,
    /// S4: it cannot be both under way and complete, so one of both is false.
    Unsure,
}

/// How full a tracker is.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Saturation {
    /// Share of the cells of complete groups that are set.
    pub complete: f64,
    /// Share of the cells of groups under way that are not zero.
    pub under_way: f64,
    /// Counters that have reached their end. They stay there until [`Tracker::reset`], because how much they should be
    /// lowered is not known.
    pub stuck: usize,
    /// How often a group that has not started is called something else, with what is in the tracker now.
    pub false_positives: f64,
}

/// Remembers where groups are.
pub trait Tracker: Send + Sync {
    /// The group starts, once.
    fn start(&mut self, group: Fingerprint);

    /// The group, which has started, is complete.
    fn complete(&mut self, group: Fingerprint);

    /// Where the group is.
    fn state(&self, group: Fingerprint) -> State;

    /// The group is in truth in this state, not in the one that was said. Whether it is said from now on, until the
    /// group starts or completes.
    fn found(&mut self, _group: Fingerprint, _truth: State) -> bool {
        false
    }

    /// Nothing has started. No move that relies on it may be under way: what is forgotten here would be looked for at
    /// its source.
    fn reset(&mut self);

    /// Bytes of memory.
    fn bytes(&self) -> usize;

    /// How full it is.
    fn saturation(&self) -> Saturation {
        Saturation::default()
    }

    /// Whether the group is at the target.
    fn is_complete(&self, group: Fingerprint) -> bool {
        self.state(group) == State::Complete
    }
}

/// A source and a target, of those that share a tracker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pair(pub u32);

impl Pair {
    /// That of a move.
    #[must_use]
    pub const fn of(move_id: MoveId) -> Self {
        Self(move_id.0 as u32)
    }
}

/// A group that is a range of hashes, by its number.
#[must_use]
pub fn group(pair: Pair, number: u64) -> Fingerprint {
    let pair = u64::from(pair.0);
    let (low, high) = (wang(number ^ wang(pair)), wang(number.wrapping_add(wang(!pair))));
    Fingerprint(u128::from(high) << 64 | u128::from(low))
}

/// The integer hash of Thomas Wang that the Bloom telemetry paper names.
const fn wang(mut key: u64) -> u64 {
    key = (!key).wrapping_add(key << 21);
    key ^= key >> 24;
    key = key.wrapping_add(key << 3).wrapping_add(key << 8);
    key ^= key >> 14;
    key = key.wrapping_add(key << 2).wrapping_add(key << 4);
    key ^= key >> 28;
    key.wrapping_add(key << 31)
}

/// Which tracker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Never wrong.
    Exact,
    /// A Bloom filter of what is complete. It does not know what is under way.
    Bloom,
    /// And a counting Bloom filter of what is under way.
    BloomAndCounting,
    /// The same, and what was found to be wrong is not said again.
    Adaptive,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Exact, Self::Bloom, Self::BloomAndCounting, Self::Adaptive];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Bloom => "bloom",
            Self::BloomAndCounting => "bloom+counting",
            Self::Adaptive => "adaptive",
        }
    }

    /// The one of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// A new one. Filters have that geometry.
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
