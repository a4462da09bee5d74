//! Averages over time, of real servers and of the simulator in one form, and the numbers that are compared.

use switchyard_sim::fleet::Run;

/// Load of the fullest node, relative to the mean, up to which a fleet counts as balanced. As in the simulator.
const BALANCED: f64 = 1.2;

/// Samples whose mean decides about balance, because requests arrive at random: a second in the scenario with a step.
const BALANCED_SAMPLES: usize = 4;

/// Length of the end of a run, in seconds, in which the planner has no more to do.
const LAST: f64 = 5.0;

/// Averages over one bin.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Sample {
    /// End of the bin, in seconds since the start of the load.
    pub(super) at: f64,
    /// Replies per second.
    pub(super) served: f64,
    /// Replies per second that hot copies served.
    pub(super) hits: f64,
    /// Load of the fullest node, relative to the mean of all nodes.
    pub(super) max_over_mean: f64,
}

/// Samples of one run, after the warm-up.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Series {
    pub(super) samples: Vec<Sample>,
    /// Length of a bin, in seconds.
    pub(super) bin: f64,
    /// Begin of the first event, in seconds since the start of the load.
    pub(super) event_at: f64,
}

/// A number of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Measure {
    /// Name with its unit.
    pub(super) name: &'static str,
    /// Returns the number.
    pub(super) of: fn(&Series) -> f64,
}

pub(super) const THROUGHPUT: Measure = Measure { name: "requests served per second", of: Series::throughput };
pub(super) const HITS: Measure = Measure { name: "hits, %", of: Series::hits };
pub(super) const EVENNESS: Measure = Measure { name: "max/mean", of: |series| series.evenness(|_| true) };
pub(super) const BEFORE: Measure =
    Measure { name: "max/mean before the step", of: |series| series.evenness(|at| at <= series.event_at) };
pub(super) const UNTIL_BALANCED: Measure = Measure { name: "time to balance, s", of: Series::balanced_after };
pub(super) const AFTER: Measure = Measure {
    name: "max/mean in the last 5 s",
    of: |series| series.evenness(|at| at > series.samples.last().map_or(0.0, |last| last.at - LAST)),
};

impl Series {
    /// Converts the points of a simulated run.
    pub(super) fn simulated(run: &Run) -> Self {
        let samples = run.points.iter().map(|point| Sample {
            at: point.at,
            served: point.served,
            hits: point.hits * point.offered,
            max_over_mean: point.max_over_mean,
        });
        Self { samples: samples.collect(), bin: run.bin, event_at: run.event_at }
    }

    fn throughput(&self) -> f64 {
        mean(self.samples.iter().map(|sample| sample.served))
    }

    fn hits(&self) -> f64 {
        100.0 * mean(self.samples.iter().map(|sample| sample.hits)) / self.throughput().max(1e-9)
    }

    /// Median of max/mean over the samples that end at such times.
    fn evenness(&self, is_counted: impl Fn(f64) -> bool) -> f64 {
        let counted = self.samples.iter().filter(|sample| is_counted(sample.at));
        let mut values: Vec<f64> = counted.map(|sample| sample.max_over_mean).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied().unwrap_or_default()
    }

    /// Returns the time from the event to the begin of the first [`BALANCED_SAMPLES`] samples that are balanced on
    /// average, in seconds. The rest of the run if there are none.
    fn balanced_after(&self) -> f64 {
        let after: Vec<&Sample> = self.samples.iter().filter(|sample| sample.at > self.event_at + 1e-6).collect();
        let is_balanced = |window: &&[&Sample]| mean(window.iter().map(|sample| sample.max_over_mean)) <= BALANCED;
        let found = after.windows(BALANCED_SAMPLES).find(is_balanced).and_then(|window| window.first());
        let end = found.map(|sample| sample.at - self.bin).or(after.last().map(|sample| sample.at));
        end.map_or(0.0, |end| (end - self.event_at).max(0.0))
    }
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (count, sum) = values.fold((0_u32, 0.0), |(count, sum), value| (count + 1, sum + value));
    sum / f64::from(count.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(max_over_mean: &[f64]) -> Series {
        let sample = |(number, max_over_mean): (u32, &f64)| Sample {
            at: f64::from(number) * 0.5,
            served: 100.0,
            hits: 25.0,
            max_over_mean: *max_over_mean,
        };
        Series { samples: (1..).zip(max_over_mean).map(sample).collect(), bin: 0.5, event_at: 1.0 }
    }

    #[test]
    fn time_to_balance_ends_with_the_first_balanced_second() {
        // A single balanced sample is no balance, and a single unbalanced one afterwards does not end it.
        let moved = series(&[1.0, 1.0, 2.0, 1.1, 2.0, 1.1, 1.0, 1.25, 1.1, 2.0]);
        assert_eq!(moved.balanced_after(), 1.5);
        assert_eq!(series(&[1.0, 1.0, 1.0, 1.0, 1.0, 1.0]).balanced_after(), 0.0);
        assert_eq!(series(&[1.0, 1.0, 2.0, 2.0, 2.0, 2.0]).balanced_after(), 2.0, "never: the rest of the run");
    }

    #[test]
    fn measures_count_their_part_of_the_run() {
        let long: Vec<f64> = [1.1, 1.1].into_iter().chain([2.0; 6]).chain([1.0; 10]).collect();
        let moved = series(&long);
        let [before, after] = [BEFORE, AFTER].map(|measure| (measure.of)(&moved));
        assert_eq!((before, after, (THROUGHPUT.of)(&moved), (HITS.of)(&moved)), (1.1, 1.0, 100.0, 25.0));
    }
}
