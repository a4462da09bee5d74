//! SwitchKV's evaluation (NSDI 2016, section 5), simulated: a switch sends reads of cached keys to a fast cache node, and
//! all other queries to many slow backends.
//!
//! The paper emulates its backends, too: each is a rate limit. So a simulation needs only the loads of the backends, not
//! single queries. The client of the paper, which adapts its rate to the loss, measures the throughput.
//!
//! The production code decides: trackers ([`switchyard_policy::telemetry`]) receive the counts of the queries, and the
//! admission of hot copies ([`switchyard_policy::hot_copies`]) chooses the cached keys, by its own rules or by the
//! published ones. Switch, cache node, clients and the other architectures are models, and exist only here.
//!
//! Separate from the other fleets: these have ten times as many requests per second, and time in steps of 10 ms; but no
//! moves, memory, or nodes that come and go.

mod cache;
mod keys;
mod settings;
mod system;
mod trackers;

use serde::{Deserialize, Serialize};

pub use settings::{Admission, Architecture, Changes, Machine, Method, Pattern, Settings, Trackers, Updates, Written};

pub use switchyard_policy::hot_copies::{Limited, Selection};

use super::{Planted, three_digits};
use system::{SLICE_S, SLICES_PER_SECOND, Slice, System};

/// Version of the model. Stored results of another version are not comparable: increase it with each change that the
/// golden results show.
pub const MODEL: u32 = 2;

/// Time in which the sender finds its rate, and the trackers fill, before anything counts. In seconds.
const WARM_UP_S: u32 = 3;

/// Slices of a point of the results: 100 ms.
const POINT_SLICES: u32 = 10;

/// Length of a point of the results, in seconds.
pub const POINT_S: f64 = 0.1;

const HALF_A_SECOND: f64 = 0.5;

/// Share of the new keys that the cache has when they count as added. The last ones are hardly queried.
pub const FILLED: f64 = 0.9;

/// Results of a run, with three digits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Queries served per second, for each 100 ms.
    pub served: Vec<f64>,
    /// Mean queries served per second.
    pub throughput: f64,
    /// Part of these that the cache node serves.
    pub by_cache: f64,
    /// Queries that the cache node processes, as a share of all that were sent.
    pub at_cache: f64,
    /// Queries served per second by each backend, at the end.
    pub by_backend: Vec<f64>,
    /// Queries sent to the busiest backend, relative to the mean, at the end; 0 without such queries.
    pub busiest: f64,
    /// Share of the reads of cached keys, at the end.
    pub hits: f64,
    /// Machines that a read passes: mean, and 99th percentile.
    pub transits: (f64, f64),
    /// Rules installed and removed per second.
    pub rules: f64,
    /// Keys added to the cache per second.
    pub added: f64,
    /// Time from each change until the cache serves [`FILLED`] of the new keys, in seconds. `None`: not before the next.
    pub filled: Vec<Option<f64>>,
}

impl Outcome {
    /// Mean queries served per second between two times, in seconds.
    #[must_use]
    pub fn mean(&self, from: f64, to: f64) -> f64 {
        let place = |at: f64| ((at / POINT_S).round() as usize).min(self.served.len());
        let points = &self.served[place(from).min(place(to))..place(to)];
        points.iter().sum::<f64>() / points.len().max(1) as f64
    }

    /// Time from `from` until the mean of half a second first reaches `level`, in seconds.
    #[must_use]
    pub fn recovered(&self, from: f64, level: f64) -> Option<f64> {
        let first = (from / POINT_S).round() as usize;
        let window = (HALF_A_SECOND / POINT_S).round() as usize;
        let means = (first..self.served.len().saturating_sub(window)).map(|at| (at, &self.served[at..at + window]));
        let reached = means.into_iter().find(|(_, all)| all.iter().sum::<f64>() / window as f64 >= level);
        reached.map(|(at, _)| rounded((at - first) as f64 * POINT_S))
    }
}

fn rounded(value: f64) -> f64 {
    three_digits(value).parse().unwrap_or(value)
}

/// Simulates an experiment. `planted` has an effect only with the feature `planted-bugs`.
#[must_use]
pub fn run(settings: &Settings, seed: u64, planted: Option<Planted>) -> Outcome {
    let mut system = System::new(settings, seed, planted);
    for _ in 0..WARM_UP_S * SLICES_PER_SECOND {
        system.slice();
    }
    let slices = settings.seconds * SLICES_PER_SECOND;
    let (mut sum, mut point) = (Slice::default(), 0.0);
    let mut outcome = Outcome {
        served: Vec::new(),
        throughput: 0.0,
        by_cache: 0.0,
        at_cache: 0.0,
        by_backend: Vec::new(),
        busiest: 0.0,
        hits: 0.0,
        transits: (0.0, 0.0),
        rules: 0.0,
        added: 0.0,
        filled: Vec::new(),
    };
    let mut changed_at = 0;
    for number in 0..slices {
        if settings.changes.is_some_and(|changes| changes.is_due(number)) {
            system.change();
            changed_at = number;
            outcome.filled.push(None);
        }
        let slice = system.slice();
        sum.sent += slice.sent;
        sum.by_cache += slice.by_cache;
        sum.by_backends += slice.by_backends;
        sum.at_cache += slice.at_cache;
        sum.rules += slice.rules;
        sum.added += slice.added;
        point += slice.served();
        if (number + 1) % POINT_SLICES == 0 {
            outcome.served.push(rounded(point / f64::from(POINT_SLICES)));
            point = 0.0;
        }
        if system.new_cached() >= FILLED
            && let Some(filled) = outcome.filled.last_mut().filter(|filled| filled.is_none())
        {
            *filled = Some(rounded(f64::from(number + 1 - changed_at) * SLICE_S));
        }
    }
    outcome.throughput = rounded(sum.served() / f64::from(slices.max(1)));
    outcome.by_cache = rounded(sum.by_cache / sum.served());
    outcome.at_cache = rounded(sum.at_cache / sum.sent);
    let seconds = f64::from(settings.seconds);
    (outcome.rules, outcome.added) = (rounded(sum.rules as f64 / seconds), rounded(sum.added as f64 / seconds));
    let offered = system.offered();
    outcome.by_backend = offered.iter().map(|offered| rounded(offered.min(settings.backend_limit))).collect();
    let most = offered.iter().copied().fold(0.0, f64::max);
    let all: f64 = offered.iter().sum();
    outcome.busiest = if all > 0.0 { rounded(most * offered.len() as f64 / all) } else { 0.0 };
    outcome.hits = rounded(system.hits());
    outcome.transits = transits(settings.architecture, system.hits(), system.stale());
    outcome
}

/// Returns the mean and the 99th percentile of the number of machines that a read passes.
fn transits(architecture: Architecture, hits: f64, stale: f64) -> (f64, f64) {
    let of = |is_cached| architecture.path(is_cached).len() as f64;
    // The cache node forwards a read of a key that it no longer has.
    let forwarded = of(false).max(2.0);
    let mut shares = [(of(true), hits), (of(false), 1.0 - hits - stale), (forwarded, stale)];
    let mean = shares.iter().map(|(machines, share)| machines * share).sum();
    shares.sort_by(|one, other| one.0.total_cmp(&other.0));
    let mut below = 0.0;
    let p99 = shares.iter().find(|(_, share)| {
        below += share;
        below >= 0.99
    });
    (rounded(mean), p99.map_or(forwarded, |(machines, _)| *machines))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misses_pass_one_two_or_three_machines() {
        let of = |architecture, hits| transits(architecture, hits, 0.0);
        use Architecture::{LookAside, LookThrough, SwitchKv};
        assert_eq!([SwitchKv, LookThrough, LookAside].map(|one| of(one, 0.0)), [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]);
        assert_eq!([SwitchKv, LookThrough, LookAside].map(|one| of(one, 1.0)), [(1.0, 1.0); 3]);
        assert_eq!(of(LookAside, 0.4), (2.2, 3.0));
        assert_eq!(transits(SwitchKv, 0.38, 0.02), (1.02, 2.0), "a stale rule");
    }

    #[test]
    fn means_and_recovery_are_of_points() {
        let settings = Settings { backends: 4, keys: 1e6, items: 10, seconds: 4, ..Settings::default() };
        let mut outcome = run(&settings, 1, None);
        assert_eq!(outcome.served.len(), 40);
        outcome.served = (0..40).map(|point| if (10..20).contains(&point) { 1.0 } else { 5.0 }).collect();
        assert_eq!((outcome.mean(0.0, 1.0), outcome.mean(1.0, 2.0), outcome.mean(1.0, 3.0)), (5.0, 1.0, 3.0));
        assert_eq!((outcome.recovered(1.0, 4.9), outcome.recovered(1.0, 6.0)), (Some(1.0), None));
    }
}
