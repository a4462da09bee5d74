//! Settings of a simulated experiment. The defaults are the paper's (sections 5.1 and 5.4, table 2), and for the
//! parameters that it does not state, values that the experiments vary.

use std::time::Duration;

use serde::Serialize;
use switchyard_policy::hot_copies::{Knobs, Limited, Selection};

use super::system::SLICES_PER_SECOND;

/// Path of a query.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Architecture {
    /// The switch sends reads of cached keys to the cache node, and all other queries to the backends.
    #[default]
    SwitchKv,
    /// Clients send reads to the cache node, and after a miss to the backend.
    LookAside,
    /// Clients send reads to the cache node, which forwards a miss to the backend.
    LookThrough,
}

/// Machine that a query passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Machine {
    /// The cache node.
    Cache,
    /// A client that receives a miss and sends the query again.
    Client,
    /// The owner of the key.
    Backend,
}

impl Architecture {
    /// Machines that a read passes, in order.
    #[must_use]
    pub const fn path(self, is_cached: bool) -> &'static [Machine] {
        match (self, is_cached) {
            (_, true) => &[Machine::Cache],
            (Self::SwitchKv, false) => &[Machine::Backend],
            (Self::LookThrough, false) => &[Machine::Cache, Machine::Backend],
            (Self::LookAside, false) => &[Machine::Cache, Machine::Client, Machine::Backend],
        }
    }
}

/// Distribution of written keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Written {
    /// All keys equally often.
    #[default]
    Uniform,
    /// As the reads.
    Skewed,
}

/// Pattern of changes of popularity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pattern {
    /// Cold keys become the hottest ones.
    HotIn,
    /// The hottest keys become cold.
    HotOut,
    /// Cold keys take the ranks of random ones.
    Random {
        /// Number of hottest keys that include the random ones.
        within: usize,
    },
}

/// Changes of popularity.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Changes {
    /// Pattern.
    pub pattern: Pattern,
    /// Number of keys that change at once.
    pub keys: usize,
    /// Time of the first change, in seconds.
    pub first: f64,
    /// Interval, in seconds.
    pub every: f64,
}

/// Trackers of backends and cache node.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Trackers {
    /// One query in this many enters the log of recent queries. The paper's log has all.
    pub sample: u32,
    /// Weight of the newest segment: the paper's alpha. Not stated there.
    pub alpha: f64,
    /// Number of keys in a frequency counter: the paper's N. Not stated there.
    pub counters: usize,
    /// Number of keys in a backend's list of loads: the paper's k. Not stated there.
    pub listed: usize,
    /// Hottest keys that a backend reports once a second.
    pub reported: usize,
    /// Part of a backend's limit from which on it sends instant reports. The paper has such a threshold and no value.
    pub instant_load: f64,
    /// Number of times per second at which a part of the backends reports.
    pub phases: u32,
}

impl Trackers {
    /// The paper's values. For values that it does not state: the middle of the varied range.
    pub const DEFAULT: Self =
        Self { sample: 4, alpha: 0.5, counters: 1000, listed: 100, reported: 5, instant_load: 0.5, phases: 4 };
}

/// Selection of the cached keys, and limit of their changes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Admission {
    /// Rule that selects keys by load.
    pub selection: Selection,
    /// Changes that are limited.
    pub limited: Limited,
    /// Maximum number of these changes per second.
    pub per_second: usize,
    /// Time for which an eviction waits, or a cold key stays, in seconds.
    pub delay: f64,
    /// Reads per second that a key needs in any case.
    pub least: usize,
}

impl Admission {
    /// SwitchKV's rules, with its maximum delay of 2 s (section 5.4).
    pub const PUBLISHED: Self =
        Self { selection: Selection::Percentile, limited: Limited::Changes, per_second: 400, delay: 2.0, least: 1 };

    /// The router's defaults.
    #[must_use]
    pub fn of_router() -> Self {
        let Knobs { selection, limited, admissions_per_second, deletion_delay, min_reads_per_second, .. } =
            Knobs::default();
        Self {
            selection,
            limited,
            per_second: admissions_per_second,
            delay: deletion_delay.as_secs_f64(),
            least: min_reads_per_second,
        }
    }

    pub(super) fn knobs(&self, items: usize) -> Knobs {
        Knobs {
            selection: self.selection,
            limited: self.limited,
            keys_max: items,
            bytes_max: usize::MAX,
            min_reads_per_second: self.least,
            admissions_per_second: self.per_second,
            deletion_delay: Duration::from_secs_f64(self.delay),
        }
    }
}

/// Method that updates the cache.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// Each queried key replaces the least recently used one.
    EveryKey,
    /// Backends report hot keys.
    Reports {
        /// Reports once a second.
        periodic: bool,
        /// Reports of keys that are suddenly hot.
        instant: bool,
        /// Choice of the reported keys.
        admission: Admission,
    },
}

/// Updates of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Updates {
    /// Method.
    pub method: Method,
    /// Rules that the switch installs or removes per second. `None`: no limit.
    pub rules_per_second: Option<f64>,
    /// Trackers.
    pub trackers: Trackers,
}

impl Updates {
    /// Both kinds of reports, with a switch that updates 400 rules per second.
    pub const PUBLISHED: Self = Self::reports(true, true, Admission::PUBLISHED);

    /// Reports of these kinds.
    #[must_use]
    pub const fn reports(periodic: bool, instant: bool, admission: Admission) -> Self {
        Self {
            method: Method::Reports { periodic, instant, admission },
            rules_per_second: Some(400.0),
            trackers: Trackers::DEFAULT,
        }
    }
}

/// An experiment.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Settings {
    /// Path of the queries.
    pub architecture: Architecture,
    /// Number of backends.
    pub backends: u16,
    /// Queries that a backend serves per second.
    pub backend_limit: f64,
    /// Queries that the cache node processes per second. The text's value for look-aside and look-through.
    pub cache_limit: f64,
    /// Number of keys.
    pub keys: f64,
    /// Exponent of the Zipf distribution of reads. 0: uniform.
    pub zipf: f64,
    /// Number of cached items. The hottest ones are cached at the start.
    pub items: usize,
    /// Share of writes.
    pub writes: f64,
    /// Distribution of written keys.
    pub written: Written,
    /// Increase of the rate in a slice without sufficient loss, as a part of the rate. Not stated in the paper.
    pub rise: f64,
    /// Changes of popularity.
    pub changes: Option<Changes>,
    /// Updates of the cache. `None`: the cached keys stay.
    pub updates: Option<Updates>,
    /// Duration, without the time before it in which the sender finds its rate.
    pub seconds: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            architecture: Architecture::SwitchKv,
            backends: 128,
            backend_limit: 100_000.0,
            cache_limit: 14e6,
            keys: 1e10,
            zipf: 0.99,
            items: 10_000,
            writes: 0.0,
            written: Written::Uniform,
            rise: 0.02,
            changes: None,
            updates: None,
            seconds: 1,
        }
    }
}

impl Changes {
    /// Whether a change happens at the start of this slice.
    pub(super) fn is_due(&self, slice: u32) -> bool {
        let slices = |seconds: f64| (seconds * f64::from(SLICES_PER_SECOND)).round() as u32;
        let since = slice.checked_sub(slices(self.first));
        since.is_some_and(|since| since.is_multiple_of(slices(self.every).max(1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_due_at_their_interval() {
        let changes = Changes { pattern: Pattern::HotIn, keys: 1, first: 0.5, every: 10.0 };
        let due: Vec<u32> = (0..2500).filter(|slice| changes.is_due(*slice)).collect();
        assert_eq!(due, [50, 1050, 2050]);
    }
}
