//! Results of a run: points over time, and sums.

use std::collections::BTreeMap;
use std::time::Duration;

use switchyard_policy::topology::NodeId;

use super::scenario::Goal;

/// Load of the fullest node, relative to the mean, up to which a fleet counts as balanced.
const BALANCED: f64 = 1.2;

/// Part of the requests of a bin that may be lost.
const LOST_MAX: f64 = 0.001;

/// Averages over one bin.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// End of the bin, in seconds since the start.
    pub at: f64,
    /// Requests sent per second.
    pub offered: f64,
    /// Requests served per second.
    pub served: f64,
    /// Part of the requests that was lost.
    pub lost: f64,
    /// Part of the requests that copies served.
    pub hits: f64,
    /// Load of the fullest node, relative to the mean of all nodes.
    pub max_over_mean: f64,
    /// Mean response time at the nodes, in microseconds.
    pub response_us: f64,
    /// Mean number of nodes, with servers that start.
    pub nodes: f64,
    /// Bytes moved.
    pub moved_bytes: f64,
}

/// Result of one seed with one policy.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Run {
    /// Bins after the warm-up.
    pub points: Vec<Point>,
    /// Length of a bin, in seconds.
    pub bin: f64,
    /// Begin of the first event, in seconds since the start.
    pub event_at: f64,
    /// Mean response time above which a bin violates the objective, in microseconds.
    pub objective_us: f64,
    /// Decisions of the planner that were carried out.
    pub decisions: u64,
    /// Decisions among them that revert a failed one.
    pub reverts: u64,
    /// Decisions that did not help.
    pub failed: u64,
    /// Keys and slots that moved back to their former node within their cooldown.
    pub reversals: u64,
    /// Keys moved alone.
    pub keys_moved: u64,
    /// Slots moved.
    pub slots_moved: u64,
    /// Nodes added and removed after the warm-up.
    pub resizes: u64,
    /// Wall time of the run, without `solving`.
    pub wall: Duration,
    /// Wall time in `policy::planner::solve`.
    pub solving: Duration,
}

/// A number of a run.
#[derive(Clone, Copy, Debug)]
pub struct Measure {
    /// Name with its unit.
    pub name: &'static str,
    /// Returns the number.
    pub of: fn(&Run) -> f64,
}

/// The numbers of each run. Those of the wall time follow separately, because they are not reproducible.
pub const MEASURES: &[Measure] = &[
    Measure { name: "offered, requests/s", of: |run| run.mean(|point| point.offered) },
    Measure { name: "served, requests/s", of: |run| run.mean(|point| point.served) },
    Measure { name: "lost, %", of: |run| 100.0 * run.lost() },
    Measure { name: "hits, %", of: |run| 100.0 * run.hits() },
    Measure { name: "response, us", of: |run| run.mean(|point| point.response_us) },
    Measure { name: "bins over the objective, %", of: |run| 100.0 * run.violations() },
    Measure { name: "minutes over the objective", of: |run| 60.0 * run.hours() * run.violations() },
    Measure { name: "max/mean, median", of: |run| run.max_over_mean(0.5) },
    Measure { name: "max/mean, 95th percentile", of: |run| run.max_over_mean(0.95) },
    Measure { name: "bins with max/mean of at most 1.2, %", of: |run| 100.0 * run.balanced() },
    Measure { name: "balanced after, s", of: Run::balanced_after },
    Measure { name: "decisions", of: |run| run.decisions as f64 },
    Measure { name: "decisions that failed", of: |run| run.failed as f64 },
    Measure { name: "decisions that revert another", of: |run| run.reverts as f64 },
    Measure { name: "moves reversed within the cooldown", of: |run| run.reversals as f64 },
    Measure { name: "keys moved", of: |run| run.keys_moved as f64 },
    Measure { name: "slots moved", of: |run| run.slots_moved as f64 },
    Measure { name: "MB moved per hour", of: |run| run.moved_bytes() / 1e6 / run.hours() },
    Measure { name: "nodes added or removed", of: |run| run.resizes as f64 },
    Measure { name: "node hours", of: Run::node_hours },
];

impl Run {
    fn mean(&self, of: impl Fn(&Point) -> f64) -> f64 {
        self.points.iter().map(of).sum::<f64>() / self.points.len().max(1) as f64
    }

    fn part(&self, is_so: impl Fn(&Point) -> bool) -> f64 {
        self.mean(|point| f64::from(u8::from(is_so(point))))
    }

    /// Simulated hours of the points.
    fn hours(&self) -> f64 {
        self.points.len() as f64 * self.bin / 3600.0
    }

    fn node_hours(&self) -> f64 {
        self.mean(|point| point.nodes) * self.hours()
    }

    fn lost(&self) -> f64 {
        self.mean(|point| point.lost * point.offered) / self.mean(|point| point.offered).max(1e-9)
    }

    fn hits(&self) -> f64 {
        self.mean(|point| point.hits * point.offered) / self.mean(|point| point.offered).max(1e-9)
    }

    fn violations(&self) -> f64 {
        self.part(|point| point.lost > LOST_MAX || point.response_us > self.objective_us)
    }

    fn balanced(&self) -> f64 {
        self.part(|point| point.max_over_mean <= BALANCED)
    }

    /// Time from the first event until the end of the last bin without balance, in seconds; 0 if all are balanced.
    fn balanced_after(&self) -> f64 {
        let last = self.points.iter().rev().find(|point| point.max_over_mean > BALANCED);
        last.map_or(0.0, |point| (point.at - self.event_at).max(0.0))
    }

    fn moved_bytes(&self) -> f64 {
        self.points.iter().map(|point| point.moved_bytes).sum()
    }

    fn max_over_mean(&self, quantile: f64) -> f64 {
        let mut all: Vec<f64> = self.points.iter().map(|point| point.max_over_mean).collect();
        all.sort_by(f64::total_cmp);
        all.get((quantile * all.len() as f64) as usize).copied().unwrap_or_default()
    }
}

impl Goal {
    /// Returns the bounds that a run does not keep, as text.
    #[must_use]
    pub fn missed(&self, run: &Run) -> Vec<String> {
        let bounds = [
            ("balanced-min", self.balanced_min, run.balanced(), true),
            ("lost-max", self.lost_max, run.lost(), false),
            ("hits-min", self.hits_min, run.hits(), true),
            ("served-min", self.served_min, run.mean(|point| point.served), true),
            ("violations-max", self.violations_max, run.violations(), false),
            ("decisions-max", self.decisions_max, run.decisions as f64, false),
            ("reversals-max", self.reversals_max, run.reversals as f64, false),
            ("resizes-max", self.resizes_max, run.resizes as f64, false),
            ("resizes-min", self.resizes_min, run.resizes as f64, true),
            ("node-hours-max", self.node_hours_max, run.node_hours(), false),
        ];
        let missed = |(name, bound, found, is_least): (&str, Option<f64>, f64, bool)| {
            let bound = bound?;
            let is_kept = if is_least { found >= bound } else { found <= bound };
            (!is_kept).then(|| format!("{name} = {bound}, but it is {}", three_digits(found)))
        };
        bounds.into_iter().filter_map(missed).collect()
    }
}

/// Formats a number with three digits. More may differ between processors.
#[must_use]
pub fn three_digits(value: f64) -> String {
    let rounded: f64 = format!("{value:.2e}").parse().unwrap_or(value);
    // Without the sign of a negative zero.
    format!("{}", rounded + 0.0)
}

/// Sums of the present bin.
#[derive(Clone, Debug, Default)]
struct Bin {
    seconds: f64,
    offered: f64,
    served: f64,
    lost: f64,
    hits: f64,
    response: f64,
    answered: f64,
    node_seconds: f64,
    /// Requests, and the time as a node.
    nodes: BTreeMap<NodeId, (f64, f64)>,
    bytes: f64,
}

/// Recorder of a run.
#[derive(Clone, Debug)]
pub(super) struct Recorder {
    length: f64,
    warm_up: f64,
    bin: Bin,
    points: Vec<Point>,
}

/// Requests of a slice, as numbers rather than rates.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Totals {
    pub(super) offered: f64,
    pub(super) served: f64,
    pub(super) lost: f64,
    pub(super) hits: f64,
    /// Sum of the response times at the nodes, in microseconds, and the number of these requests.
    pub(super) response: f64,
    pub(super) answered: f64,
    /// Bytes moved.
    pub(super) bytes: f64,
    /// Servers that start, and are no nodes yet.
    pub(super) starting: usize,
}

impl Recorder {
    pub(super) fn new(length: f64, warm_up: f64) -> Self {
        Self { length, warm_up, bin: Bin::default(), points: Vec::new() }
    }

    /// Adds a slice that ends at `at`. `nodes`: requests at each node.
    pub(super) fn note(
        &mut self,
        at: f64,
        seconds: f64,
        totals: &Totals,
        nodes: impl ExactSizeIterator<Item = (NodeId, f64)>,
    ) {
        let bin = &mut self.bin;
        bin.seconds += seconds;
        bin.node_seconds += seconds * (nodes.len() + totals.starting) as f64;
        for (node, requests) in nodes {
            let sums = bin.nodes.entry(node).or_default();
            (sums.0, sums.1) = (sums.0 + requests, sums.1 + seconds);
        }
        bin.offered += totals.offered;
        bin.served += totals.served;
        bin.lost += totals.lost;
        bin.hits += totals.hits;
        bin.response += totals.response;
        bin.answered += totals.answered;
        bin.bytes += totals.bytes;
        if bin.seconds >= self.length - seconds / 2.0 {
            let bin = std::mem::take(&mut self.bin);
            if at > self.warm_up + seconds / 2.0 {
                self.points.push(bin.point(at));
            }
        }
    }

    pub(super) fn points(self) -> Vec<Point> {
        self.points
    }
}

impl Bin {
    fn point(self, at: f64) -> Point {
        let rates: Vec<f64> = self.nodes.values().map(|(requests, seconds)| requests / seconds).collect();
        let mean = rates.iter().sum::<f64>() / rates.len().max(1) as f64;
        let part = |count: f64| if self.offered > 0.0 { count / self.offered } else { 0.0 };
        Point {
            at,
            offered: self.offered / self.seconds,
            served: self.served / self.seconds,
            lost: part(self.lost),
            hits: part(self.hits),
            max_over_mean: if mean > 0.0 { rates.iter().copied().fold(0.0, f64::max) / mean } else { 1.0 },
            response_us: if self.answered > 0.0 { self.response / self.answered } else { 0.0 },
            nodes: self.node_seconds / self.seconds,
            moved_bytes: self.bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits() {
        let texts = [0.0, 1.0, 12_345.6, 0.000_123_456, -1234.0, 999.6].map(three_digits);
        assert_eq!(texts, ["0", "1", "12300", "0.000123", "-1230", "1000"]);
    }

    #[test]
    fn bins_average_slices_after_the_warm_up() {
        let mut recorder = Recorder::new(2.0, 2.0);
        for second in 1..=6 {
            let totals = Totals { offered: 100.0, served: 90.0, lost: 10.0, ..Totals::default() };
            let nodes = [(NodeId(0), 30.0), (NodeId(1), if second > 4 { 90.0 } else { 30.0 })];
            recorder.note(f64::from(second), 1.0, &totals, nodes.into_iter());
        }
        let points = recorder.points();
        assert_eq!(points.iter().map(|point| point.at).collect::<Vec<_>>(), [4.0, 6.0]);
        assert_eq!(points.iter().map(|point| point.max_over_mean).collect::<Vec<_>>(), [1.0, 1.5]);
        let run = Run { points, bin: 2.0, objective_us: 1.0, ..Run::default() };
        assert_eq!((run.balanced(), run.lost(), run.violations()), (0.5, 0.1, 1.0));
        let goal = Goal { balanced_min: Some(0.9), lost_max: Some(0.2), ..Goal::default() };
        assert_eq!(goal.missed(&run), ["balanced-min = 0.9, but it is 0.5"]);
    }
}
