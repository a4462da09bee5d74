//! Measured load of a fleet, the common input of planner, autoscaler, and simulator.
//!
//! The router counts ([`SlotCount`], and per-node counters). The control plane takes the difference of two readings and
//! computes rates. The simulator produces the same value.
//!
//! Rates are per second. `None`: not reported, or outdated.

use std::collections::BTreeMap;

use crate::telemetry::HotNode;
use crate::topology::{NodeId, SLOT_NUMBERS, Slot};

/// Time from sending a command to its reply, in microseconds. Excludes commands that may block at the node.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Answers {
    /// Mean.
    pub mean_us: f64,
    /// Median, with an error of up to one fifth.
    pub p50_us: u64,
    /// 99th percentile, with an error of up to one fifth.
    pub p99_us: u64,
}

/// Load of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct NodeLoad {
    /// Commands sent.
    pub requests: Option<f64>,
    /// Reply times. `None` also if there was no reply.
    pub answers: Option<Answers>,
    /// Commands in flight.
    pub in_flight: u64,
    /// CPU use of the server: 1.0 is one core.
    pub cpu: Option<f64>,
    /// Memory use of the server, in bytes.
    pub memory: Option<u64>,
    /// Memory limit, in bytes; 0: no limit.
    pub memory_max: Option<u64>,
    /// Number of keys in all databases.
    pub keys: Option<u64>,
    /// Keys evicted due to the memory limit.
    pub evictions: Option<f64>,
    /// Connected clients, including the router.
    pub clients: Option<u64>,
    /// Maximum lag of a replica, in bytes.
    pub replica_lag: Option<u64>,
}

/// Counters of a slot since the start of the router.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotCount {
    /// Uses of its keys.
    pub commands: u64,
    /// Uses that may write.
    pub writes: u64,
    /// Bytes of commands and replies.
    pub bytes: u64,
    /// Number of samples from which `commands` is estimated.
    pub samples: u64,
}

impl SlotCount {
    /// Adds the other counters.
    pub fn add(&mut self, other: Self) {
        self.commands += other.commands;
        self.writes += other.writes;
        self.bytes += other.bytes;
        self.samples += other.samples;
    }
}

/// Load of a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SlotLoad {
    /// Uses of its keys.
    pub commands: f64,
    /// Uses that may write.
    pub writes: f64,
    /// Bytes of commands and replies.
    pub bytes: f64,
    /// Variance of `commands` due to sampling.
    pub noise: f64,
}

/// Rates of all slots, smoothed like the rates of keys ([`crate::telemetry::Weights`]).
#[derive(Clone, Debug)]
pub struct SlotRates {
    before: Vec<SlotCount>,
    rates: Vec<SlotLoad>,
}

impl Default for SlotRates {
    fn default() -> Self {
        Self { before: vec![SlotCount::default(); SLOT_NUMBERS], rates: vec![SlotLoad::default(); SLOT_NUMBERS] }
    }
}

impl SlotRates {
    /// Weight of the newest reading. Smaller than for keys, because slots are many and their counts are samples:
    /// averages over about ten seconds.
    const NEWEST: f64 = 0.2;

    /// Adds a reading of all slots, `seconds` after the last one. A count that fell has restarted.
    pub fn counted(&mut self, counts: Vec<SlotCount>, seconds: f64) {
        if counts.len() != SLOT_NUMBERS || seconds <= 0.0 {
            return;
        }
        for ((rate, before), now) in self.rates.iter_mut().zip(&self.before).zip(&counts) {
            let weigh = |rate: &mut f64, before: u64, now: u64| {
                *rate += Self::NEWEST * (now.saturating_sub(before) as f64 / seconds - *rate);
            };
            weigh(&mut rate.commands, before.commands, now.commands);
            weigh(&mut rate.writes, before.writes, now.writes);
            weigh(&mut rate.bytes, before.bytes, now.bytes);
            // Each sample stands for `uses / samples` uses. Sampling is random, so the variance of the number of
            // samples is this number.
            let (uses, samples) = (
                now.commands.saturating_sub(before.commands) as f64,
                now.samples.saturating_sub(before.samples).max(1) as f64,
            );
            rate.noise =
                (1.0 - Self::NEWEST).powi(2) * rate.noise + (Self::NEWEST / seconds).powi(2) * uses * uses / samples;
        }
        self.before = counts;
    }

    /// Rates by slot.
    #[must_use]
    pub fn rates(&self) -> &[SlotLoad] {
        &self.rates
    }
}

/// Expected loads of slots, given noisy estimates.
///
/// The highest of many estimates are mostly those with the highest sampling errors, so a plan that moves these slots
/// moves less load than estimated. Each estimate is therefore shrunk toward the mean, by the share of the variance that
/// noise explains (empirical Bayes, linear).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Expected {
    mean: f64,
    /// Fraction of a difference from the mean that is real, 0 to 1.
    real: f64,
}

impl Expected {
    /// Computes the mean and shrinkage from the estimates of all slots of a node, each with its variance.
    pub fn of(estimates: impl Iterator<Item = (f64, f64)> + Clone) -> Self {
        let count = estimates.clone().count().max(1) as f64;
        let mean = estimates.clone().map(|(load, _)| load).sum::<f64>() / count;
        let (differences, noise) = estimates
            .fold((0.0, 0.0), |(all, noise), (load, variance)| (all + (load - mean).powi(2), noise + variance));
        let real = if differences > 0.0 { (1.0 - noise / differences).max(0.0) } else { 0.0 };
        Self { mean, real }
    }

    /// Expected load for an estimate; 0 if no use of the slot was observed.
    #[must_use]
    pub fn load(self, estimate: f64) -> f64 {
        if estimate > 0.0 { self.mean + self.real * (estimate - self.mean) } else { 0.0 }
    }
}

/// Rates of sampled uses that can be added: estimate and variance.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SampledRate {
    /// Uses per second.
    rate: f64,
    variance: f64,
}

impl SampledRate {
    /// Standard deviations below the estimate for [`Self::certain`].
    const DEVIATIONS: f64 = 2.0;

    /// A rate of `rate` uses per second, estimated from one in `one_in` uses of the last `seconds` seconds. Sampling is
    /// random, so the variance of the number of samples is this number.
    #[must_use]
    pub fn new(rate: f64, one_in: u32, seconds: f64) -> Self {
        Self { rate, variance: rate * f64::from(one_in.max(1)) / seconds }
    }

    /// Adds an independent rate.
    pub fn add(&mut self, other: Self) {
        (self.rate, self.variance) = (self.rate + other.rate, self.variance + other.variance);
    }

    /// Lower bound of the rate relative to the estimate, 0 to 1.
    #[must_use]
    pub fn certain(self) -> f64 {
        if self.rate > 0.0 { (1.0 - Self::DEVIATIONS * self.variance.sqrt() / self.rate).max(0.0) } else { 0.0 }
    }
}

/// Returns a lower bound of a node's sustained load, in requests per second. 0 without loads.
///
/// `loads` are measurements of equal intervals, oldest first; only the newest `alike` were made under the current
/// assignment of keys. The newest `window` of these must all exceed the result. So must, by `errors` standard errors,
/// the mean of the newest n for some n of at least `window`: a small excess takes longer to prove than a large one. The
/// standard deviation is estimated from the median difference of neighbours, which a step in the load does not affect,
/// and is raised for few differences.
#[must_use]
pub fn lasting_load(loads: &[f64], alike: usize, window: usize, errors: f64) -> f64 {
    /// Ratio of the median |difference of neighbours| to the standard deviation for normal noise: 0.6745 times the
    /// square root of 2.
    const MEDIAN_DIFFERENCE: f64 = 0.954;
    /// With d differences the estimate is raised by this over the square root of d.
    const FEW: f64 = 3.0;
    let mut differences: Vec<f64> = loads.windows(2).map(|pair| (pair[1] - pair[0]).abs()).collect();
    let middle = differences.len() / 2;
    let median = match differences.is_empty() {
        true => 0.0,
        false => *differences.select_nth_unstable_by(middle, f64::total_cmp).1,
    };
    let deviation = median / MEDIAN_DIFFERENCE * (1.0 + FEW / (differences.len().max(1) as f64).sqrt());
    let (mut sum, mut least, mut proven) = (0.0, f64::INFINITY, 0.0_f64);
    for (load, count) in loads.iter().rev().take(alike).zip(1_u32..) {
        sum += load;
        if count as usize <= window {
            least = least.min(*load);
        }
        if count as usize >= window {
            proven = proven.max(sum / f64::from(count) - errors * deviation / f64::from(count).sqrt());
        }
    }
    least.min(proven)
}

/// All known load of a fleet.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ObservedLoad {
    /// Load per node.
    pub nodes: BTreeMap<NodeId, NodeLoad>,
    /// Load per slot. Empty before the second reading.
    pub slots: Vec<SlotLoad>,
    /// Hottest keys per node.
    pub keys: Vec<HotNode>,
}

impl ObservedLoad {
    /// Load of a slot.
    #[must_use]
    pub fn slot(&self, slot: Slot) -> SlotLoad {
        self.slots.get(slot.index()).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sampled_rate_counts_with_its_lower_bound() {
        let certain = |rate: f64, one_in, seconds| (rate * SampledRate::new(rate, one_in, seconds).certain()).round();
        assert_eq!([certain(500.0, 16, 1.0), certain(64.0, 16, 1.0), certain(16.0, 16, 3.0)], [321.0, 0.0, 0.0]);
        assert_eq!([certain(500.0, 16, 3.0), certain(500.0, 1, 1.0), certain(0.0, 16, 1.0)], [397.0, 455.0, 0.0]);
        // The combined rate of a tag is certain before each of its keys is.
        let mut tag = SampledRate::default();
        (0..20).for_each(|_| tag.add(SampledRate::new(175.0, 16, 1.0)));
        assert!(tag.certain() > 0.85 && SampledRate::new(175.0, 16, 1.0).certain() < 0.4);
    }

    #[test]
    fn a_small_excess_takes_longer_to_prove_than_a_large_one() {
        let noisy =
            |mean: f64, count: usize| -> Vec<f64> { (0..count).map(|at| mean + [-100.0, 100.0][at % 2]).collect() };
        let of = |loads: &[f64]| lasting_load(loads, loads.len(), 4, 3.0);
        assert!(of(&noisy(3000.0, 4)) > 1900.0, "{}", of(&noisy(3000.0, 4)));
        // Differences of 200 give a deviation of 210: four measurements prove 330 of 1,200, and sixty prove 1,090.
        assert!(of(&noisy(1200.0, 4)) < 500.0 && of(&noisy(1200.0, 60)) > 1050.0, "{}", of(&noisy(1200.0, 60)));
        // A step counts from its start. A gap of one interval resets it, and so does a new assignment of keys.
        let step: Vec<f64> = noisy(1000.0, 30).into_iter().chain(noisy(3000.0, 4)).collect();
        assert!(of(&step) > 2400.0, "{}", of(&step));
        let pause = [3000.0, 3000.0, 0.0, 3000.0, 3000.0];
        assert_eq!([of(&pause), lasting_load(&step, 3, 4, 3.0), lasting_load(&[], 0, 4, 3.0)], [0.0, 0.0, 0.0]);
    }

    #[test]
    fn slots_have_rates_that_follow_the_load() {
        let mut rates = SlotRates::default();
        let mut counts = vec![SlotCount::default(); SLOT_NUMBERS];
        for _ in 0..40 {
            counts[7].add(SlotCount { commands: 500, writes: 100, bytes: 9000, samples: 20 });
            rates.counted(counts.clone(), 0.5);
        }
        let SlotLoad { commands, writes, bytes, noise } = rates.rates()[7];
        assert!(
            (commands - 1000.0).abs() < 1.0 && (writes - 200.0).abs() < 1.0 && (bytes - 18_000.0).abs() < 10.0,
            "{commands} {writes} {bytes}"
        );
        // 20 samples for 25 uses each, in half a second: 1000 +- 224; after averaging over ten seconds, a third of
        // that.
        assert!((noise.sqrt() - 224.0 / 3.0).abs() < 1.0, "{noise}");
        assert_eq!(rates.rates()[8], SlotLoad::default());
        // A restarted router counts from zero.
        rates.counted(vec![SlotCount::default(); SLOT_NUMBERS], 0.5);
        assert!(rates.rates()[7].commands < commands);
        for _ in 0..60 {
            rates.counted(counts.clone(), 0.5);
        }
        assert!(rates.rates()[7].commands < 1.0);
    }

    #[test]
    fn the_busiest_slots_of_a_sample_have_the_expected_load() {
        // 4,000 equal slots, except 100 with four times the load. A few samples each; every sample stands for 14 uses.
        let mut state = 1_u64;
        let mut draw = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize
        };
        let truth: Vec<f64> = (0..4000).map(|slot| if slot % 40 == 0 { 56.0 } else { 14.0 }).collect();
        let places: Vec<usize> = truth
            .iter()
            .enumerate()
            .flat_map(|(slot, load)| std::iter::repeat_n(slot, (load / 14.0) as usize))
            .collect();
        for looks in [1, 3, 9, 40] {
            let mut rates = SlotRates::default();
            let mut counts = vec![SlotCount::default(); SLOT_NUMBERS];
            for _ in 0..looks {
                for _ in 0..places.len() {
                    counts[places[draw() % places.len()]].add(SlotCount {
                        commands: 14,
                        writes: 0,
                        bytes: 0,
                        samples: 1,
                    });
                }
                rates.counted(counts.clone(), 1.0);
            }
            let estimates = || rates.rates()[..truth.len()].iter().map(|slot| (slot.commands, slot.noise));
            let expected = Expected::of(estimates());
            let mut order: Vec<usize> = (0..truth.len()).collect();
            order.sort_by(|one, other| rates.rates()[*other].commands.total_cmp(&rates.rates()[*one].commands));
            let part =
                |load: &dyn Fn(usize) -> f64, all: f64| order[..400].iter().map(|slot| load(*slot)).sum::<f64>() / all;
            let all = estimates().map(|(load, _)| load).sum::<f64>();
            let says = part(&|slot| expected.load(rates.rates()[slot].commands), all);
            let carries = part(&|slot| truth[slot], truth.iter().sum());
            assert!((says / carries - 1.0).abs() < 0.15, "after {looks} looks: {says} said, {carries} carried");
        }
    }
}
