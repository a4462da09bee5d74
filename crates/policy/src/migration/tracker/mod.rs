//! State of each group of a move: exact, or by filters that need less memory and are wrong in one direction only.
//!
//! A *group* is the unit that a protocol tracks: a key, or a range of hashes. It is a [`Fingerprint`]: of the key, or
//! from its number. Several moves share one tracker, so the group of a range includes its pair of source and target,
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
//!
//! The trackers themselves (`kinds/`) are compiled only with the feature `research`. Their interface is always
//! compiled, because routing of commands refers to it.

#[cfg(feature = "research")]
mod kinds;

use super::Fingerprint;

#[cfg(feature = "research")]
pub use kinds::{Adaptive, Exact, Filter, Filters, Geometry, Kind, Layout, Pair, group};

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
