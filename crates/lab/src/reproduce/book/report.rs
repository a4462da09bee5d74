//! Rows of the report on auto-scaling of key-value stores, in its order. Its figures have no numbers, and its text has
//! only sentences.
//!
//! Methods that it describes without a measurement have no row.
//!
//! Exponents and correlations have no unit, like ratios. So an exponent of 1 and a quadratic one differ by the whole
//! effect.

use serde_json::json;

use super::super::autoscaling::nodes::{self, Cell, Limit, MEGABYTES, SHARES};
use super::super::autoscaling::queries::{self, Fleet};
use super::super::autoscaling::{NODES, fill, join, ramp};
use super::super::published::autoscaling as says;
use super::{Better, Measure, Ours, Published, ResultSet, Row, row};

const NO_SWAP: &str =
    "The report's server swaps beyond its limit; ours evicts keys, because the test machine has no swap.";
const PER_SHARE: &str =
    "A query needs the same processor time with each share, so its time is inversely proportional to the share.";
const TWO_PROCESSORS: &str =
    "All servers share two processors with the router and the load, so further servers add no processor time.";
const ONE_AT_A_TIME: &str =
    "Each query waits for the previous reply, so one server works at a time, and the proxy is one more hop.";
const SHARE_OF_KEYS: &str =
    "A node that joins N others gets 1/(N+1) of the keys, so the ideal time is 2/(N+1) of the first, not 1/N.";
const MOVES: &str = "A node that joins N others needs a move from each of them, and each move has a fixed cost.";

pub(super) fn rows() -> Vec<Row> {
    let mut rows = single_instance();
    rows.extend(six_nodes());
    rows.extend(added_node());
    rows.extend(threshold());
    rows
}

fn measured(
    experiment: &'static str,
    page: &'static str,
    better: Better,
    values: impl Fn(&ResultSet) -> Vec<f64> + 'static,
) -> Ours {
    Ours::Measured(Measure { experiment, unit: "", better, page, values: Box::new(values) })
}

fn of_nodes(better: Better, values: impl Fn(&ResultSet) -> Vec<f64> + 'static) -> Ours {
    measured("autoscaling-nodes", "results/autoscaling.md#one-to-six-nodes", better, values)
}

fn of_queries(better: Better, values: impl Fn(&ResultSet) -> Vec<f64> + 'static) -> Ours {
    measured("autoscaling-queries", "results/autoscaling.md#time-of-10-to-100000-queries", better, values)
}

/// A single server without the router.
fn alone(limit: Limit) -> Cell {
    Cell { servers: 1, is_routed: false, limit }
}

/// Servers without limits behind the router.
fn routed(servers: usize) -> Cell {
    Cell { servers, is_routed: true, limit: Limit::Nothing }
}

/// Repetitions of the run of this cell.
fn of_cell(set: &ResultSet, cell: &Cell) -> Vec<nodes::Measured> {
    let cell = json!(cell);
    set.of::<nodes::Measured>(|what| what["cell"] == cell).into_iter().flatten().collect()
}

/// Returns for each repetition that all cells have the values by the number of each cell.
fn curves(
    set: &ResultSet,
    cells: impl Iterator<Item = (f64, Cell)>,
    value: fn(&nodes::Measured) -> f64,
) -> Vec<Vec<(f64, f64)>> {
    let runs: Vec<(f64, Vec<nodes::Measured>)> = cells.map(|(number, cell)| (number, of_cell(set, &cell))).collect();
    let repetitions = runs.iter().map(|(_, runs)| runs.len()).min().unwrap_or_default();
    (0..repetitions).map(|at| runs.iter().map(|(number, runs)| (*number, value(&runs[at]))).collect()).collect()
}

fn of_fleet(set: &ResultSet, fleet: Fleet) -> Vec<queries::Measured> {
    let fleet = json!(fleet);
    set.of::<queries::Measured>(|what| what["fleet"] == fleet).into_iter().flatten().collect()
}

/// Time of the largest batch, for each repetition: a fleet against one server.
fn against_one(fleet: Fleet) -> Ours {
    of_queries(Better::Less, move |set| {
        let pairs = of_fleet(set, fleet).into_iter().zip(of_fleet(set, Fleet::One));
        pairs.map(|(of_fleet, of_one)| of_fleet.longest() / of_one.longest()).collect()
    })
}

fn single_instance() -> Vec<Row> {
    vec![
        row(
            "Single instance",
            "exponent of the time by the number of queries, 10 to 100,000; linear is 1",
            Published::implied(says::QUERIES, 1.0, 1.0),
            of_queries(Better::Neither, |set| {
                of_fleet(set, Fleet::One).iter().map(queries::Measured::exponent).collect()
            }),
            "",
        ),
        row(
            "Single instance, 10 MB",
            "time of 100,000 queries, 10 MB : no limit",
            Published::sentence("time taken increases drastically for n=10^5 queries"),
            against_one(Fleet::OneLittle),
            NO_SWAP,
        ),
        row(
            "Main memory",
            "time of 100,000 queries by the memory of a server that swaps",
            Published::sentence(says::MEMORY_SWEEP),
            Ours::NotPossible("The test machine has no swap."),
            "",
        ),
        row(
            "Main memory",
            "hits that each MB adds, 10 to 18 MB : 4 to 10 MB; linear is 1",
            Published::sentence(says::MEMORY_SWEEP),
            of_nodes(Better::Neither, |set| {
                let cells =
                    MEGABYTES.into_iter().map(|most| (f64::from(most), alone(Limit::Memory(format!("{most}mb")))));
                curves(set, cells, nodes::Measured::hit_percent).iter().filter_map(|points| bend(points)).collect()
            }),
            NO_SWAP,
        ),
        row(
            "CPU",
            "exponent of the time by CPU period : quota; linear is 1, quadratic is 2",
            Published::implied(says::CPU_SWEEP, 2.0, 2.0),
            of_nodes(Better::Neither, |set| {
                let cells = SHARES.into_iter().map(|share| (1.0 / share, alone(Limit::Cpu(share))));
                curves(set, cells, |run| 1.0 / run.rps).iter().map(|points| nodes::power(points)).collect()
            }),
            PER_SHARE,
        ),
    ]
}

fn six_nodes() -> Vec<Row> {
    let negligible = || Published::implied(says::SIX_NODES, 1.0, 1.0);
    vec![
        row(
            "1 and 6 nodes",
            "time of 100,000 queries of one client, 6 nodes behind Switchyard : 1 node without a proxy",
            negligible(),
            against_one(Fleet::SixRouted),
            ONE_AT_A_TIME,
        ),
        row(
            "1 and 6 nodes",
            "time of 100,000 queries of one client, 6 nodes behind nutcracker : 1 node without a proxy",
            negligible(),
            against_one(Fleet::SixNutcracker),
            ONE_AT_A_TIME,
        ),
        row(
            "1 and 6 nodes",
            "queries per second of concurrent clients, 6 nodes : 1 node, both behind Switchyard",
            negligible(),
            of_nodes(Better::More, |set| {
                let pairs = of_cell(set, &routed(NODES)).into_iter().zip(of_cell(set, &routed(1)));
                pairs.map(|(six, one)| six.rps / one.rps).collect()
            }),
            TWO_PROCESSORS,
        ),
        row(
            "Node configurations",
            "correlation of the number of nodes, 1 to 6, and the queries per second",
            Published::implied(says::NODE_SWEEP, 0.0, 0.0),
            of_nodes(Better::Neither, |set| {
                let cells = (1..=NODES).map(|servers| (servers as f64, routed(servers)));
                curves(set, cells, |run| run.rps).iter().map(|points| correlation(points)).collect()
            }),
            TWO_PROCESSORS,
        ),
    ]
}

/// A value for each join but the first, from the number of nodes before, this join and the first one.
fn of_joins(goal: &'static str, value: fn(f64, &join::Joined, &join::Joined) -> f64) -> Ours {
    measured("autoscaling-join", "results/autoscaling.md#a-node-joins", Better::Less, move |set| {
        let runs = set.of::<join::Measured>(|what| what["goal"] == goal);
        let values = |run: &join::Measured| -> Vec<f64> {
            let joined = run.joined.iter().enumerate().skip(1);
            joined.map(|(before, one)| value((before + 1) as f64, one, &run.joined[0])).collect()
        };
        runs.iter().flatten().flat_map(values).collect()
    })
}

fn added_node() -> Vec<Row> {
    let mut rows = Vec::new();
    for goal in ["fast", "balanced"] {
        rows.push(row(
            "Adding a node",
            format!("time to join N = 2 to 5 nodes : 1/N of the time to join one (goal {goal})"),
            Published::implied(says::NODE_ADD, 1.0, 1.0),
            of_joins(goal, |nodes, one, first| one.seconds / first.seconds * nodes),
            SHARE_OF_KEYS,
        ));
        rows.push(row(
            "Adding a node",
            format!("time to join N = 2 to 5 nodes : 2/(N+1) of the time to join one (goal {goal})"),
            Published::implied("1 (computed from the new node's share of the keys)", 1.0, 1.0),
            of_joins(goal, |nodes, one, first| one.seconds / first.seconds * (nodes + 1.0) / 2.0),
            MOVES,
        ));
    }
    rows.push(row(
        "Adding a node",
        "keys moved to join N = 2 to 5 nodes : 1/N of those to join one",
        Published::implied(
            "the number of keys needed to be transferred will reduce by a factor of the number of nodes",
            1.0,
            1.0,
        ),
        of_joins("fast", |nodes, one, first| one.keys as f64 / first.keys as f64 * nodes),
        "A node that joins N others gets 1/(N+1) of the keys.",
    ));
    rows.push(row(
        "Adding a node",
        "failed requests and wrong replies while nodes join",
        Published::implied("the cluster can still respond to requests", 0.0, 0.0),
        measured("autoscaling-join", "results/autoscaling.md#a-node-joins", Better::Less, |set| {
            let bad = |run: &join::Measured| run.wrong_after + run.joined.iter().map(|one| one.errors).sum::<u64>();
            set.of::<join::Measured>(|_| true).iter().flatten().map(|run| bad(run) as f64).collect()
        }),
        "",
    ));
    rows
}

fn threshold() -> Vec<Row> {
    vec![
        row(
            "Threshold",
            "keys for each node when one more is added: the third and later ones : the second",
            Published::sentence(says::THRESHOLD),
            measured(
                "autoscaling-fill",
                "results/autoscaling.md#a-fleet-grows-while-it-is-filled",
                Better::Neither,
                |set| set.of::<fill::Measured>(|_| true).iter().flatten().flat_map(|run| jumps(&run.points)).collect(),
            ),
            "The report has no number of keys; it adds a node by the response time, here the used memory adds one.",
        ),
        row(
            "Threshold",
            "failed requests and lost keys while the fleet grows",
            Published::sentence("not counted in the report"),
            measured(
                "autoscaling-fill",
                "results/autoscaling.md#a-fleet-grows-while-it-is-filled",
                Better::Less,
                |set| {
                    set.of::<fill::Measured>(|_| true)
                        .iter()
                        .flatten()
                        .map(|run| run.errors as f64 + run.lost as f64)
                        .collect()
                },
            ),
            "The report does not count them.",
        ),
        row(
            "Threshold",
            "load for each node when the response time adds one, of one node's capacity",
            Published::sentence(
                "if the response time gets above this threshold value, we increase the node count by one",
            ),
            measured(
                "autoscaling-ramp",
                "results/autoscaling.md#a-fleet-grows-with-its-load",
                Better::Neither,
                |set| {
                    let loads = |run: &ramp::Measured| -> Vec<f64> {
                        (1..).map_while(|nodes| Some(run.load_beyond(nodes)? / nodes as f64)).collect()
                    };
                    set.of::<ramp::Measured>(|_| true).iter().flatten().flat_map(loads).collect()
                },
            ),
            "The report has a threshold of 20 s for a batch of queries, and no load in the text.",
        ),
    ]
}

/// Returns the ratio of two slopes: of the upper half of the points to the lower one.
fn bend(points: &[(f64, f64)]) -> Option<f64> {
    let [first, .., last] = points else { return None };
    let middle = points[points.len() / 2];
    let slope = |from: &(f64, f64), to: &(f64, f64)| (to.1 - from.1) / (to.0 - from.0);
    Some(slope(&middle, last) / slope(first, &middle))
}

/// Returns Pearson's correlation coefficient; NaN, which the book skips, for a constant.
fn correlation(points: &[(f64, f64)]) -> f64 {
    let count = points.len() as f64;
    let (x, y) = points.iter().fold((0.0, 0.0), |(x, y), point| (x + point.0 / count, y + point.1 / count));
    let sum = |of: fn(f64, f64) -> f64| points.iter().map(|point| of(point.0 - x, point.1 - y)).sum::<f64>();
    sum(|x, y| x * y) / (sum(|x, _| x * x) * sum(|_, y| y * y)).sqrt()
}

/// Returns the keys for each node at each increase of the number of nodes but the first, relative to the first.
fn jumps(points: &[fill::Point]) -> Vec<f64> {
    let added = points.windows(2).filter(|pair| pair[1].nodes > pair[0].nodes);
    let keys: Vec<f64> = added.map(|pair| pair[1].keys as f64 / pair[0].nodes as f64).collect();
    keys.iter().skip(1).map(|one| one / keys[0]).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::super::super::kept::StoredResults;
    use super::*;

    #[test]
    fn a_line_has_no_bend() {
        assert_eq!(bend(&[(4.0, 10.0), (6.0, 14.0), (10.0, 22.0), (18.0, 38.0)]), Some(1.0));
        assert_eq!(bend(&[(0.0, 0.0), (1.0, 1.0), (2.0, 4.0)]), Some(3.0));
        assert_eq!(bend(&[(4.0, 10.0)]), None);
    }

    #[test]
    fn a_correlation_has_the_sign_of_the_trend() {
        let of = |values: [f64; 3]| correlation(&[(1.0, values[0]), (2.0, values[1]), (3.0, values[2])]);
        assert!((of([5.0, 4.0, 3.0]) + 1.0).abs() < 1e-9);
        assert!((of([5.0, 7.0, 9.0]) - 1.0).abs() < 1e-9);
        assert!(of([1.0, 2.0, 1.0]).abs() < 1e-9);
        assert!(of([1.0, 1.0, 1.0]).is_nan());
    }

    /// Values of the row with this quantity, from one repetition of each run.
    fn values(experiment: &str, quantity: &str, runs: &[(Value, Value)]) -> Vec<f64> {
        let folder = tempfile::tempdir().expect("a folder");
        let mut stored = StoredResults::open(folder.path(), experiment, "this".to_owned()).expect("readable");
        let whats: Vec<Value> = runs.iter().map(|(what, _)| what.clone()).collect();
        stored.plan(&whats, 1).expect("written");
        for (what, result) in runs {
            stored.add(what, 0, "2026-01-01".to_owned(), 0.0, result).expect("written");
        }
        let set = StoredResults::newest_complete(folder.path(), experiment).expect("readable").expect("a set");
        let rows = rows();
        let row = rows.iter().find(|row| row.quantity.starts_with(quantity)).expect("a row");
        let Ours::Measured(measure) = &row.ours else { panic!("{quantity} is not measured") };
        assert_eq!(measure.experiment, experiment);
        (measure.values)(&set).iter().map(|value| (value * 1e6).round() / 1e6).collect()
    }

    #[test]
    fn queries_per_second_in_proportion_to_the_share_have_the_exponent_1() {
        let others = ["mean_ms", "p99_ms", "hits", "misses", "evicted", "errors"];
        let result = |rps: f64| {
            let mut result = json!({"rps": rps});
            others.iter().for_each(|name| result[name] = json!(0));
            result
        };
        let mut runs: Vec<(Value, Value)> =
            SHARES.map(|share| (json!({"cell": alone(Limit::Cpu(share))}), result(share * 1000.0))).into();
        runs.extend((1..=NODES).map(|servers| (json!({"cell": routed(servers)}), result(100.0 / servers as f64))));
        assert_eq!(values("autoscaling-nodes", "exponent of the time by CPU", &runs), [1.0]);
        assert_eq!(values("autoscaling-nodes", "queries per second", &runs), [0.166_667]);
        // No run has a limit of memory.
        assert!(values("autoscaling-nodes", "hits", &runs).is_empty());
    }

    #[test]
    fn joins_are_compared_with_the_first_one() {
        let joined: Vec<Value> = [(6.0, 600), (4.0, 400), (3.0, 300)]
            .map(|(seconds, keys)| json!({"seconds": seconds, "keys": keys, "p99_ms": 1, "errors": 1}))
            .into();
        let runs = [(json!({"goal": "fast"}), json!({"joined": joined, "wrong_after": 2}))];
        let of = |quantity: &str| values("autoscaling-join", quantity, &runs);
        assert_eq!(of("time to join N = 2 to 5 nodes : 2/(N+1)"), [1.0, 1.0]);
        assert_eq!(of("time to join N = 2 to 5 nodes : 1/N"), [1.333_333, 1.5]);
        assert_eq!(of("keys moved"), [1.333_333, 1.5]);
        assert_eq!(of("failed requests"), [5.0]);
    }

    #[test]
    fn added_nodes_are_compared_by_keys_and_load() {
        let points: Vec<Value> = [(100, 1), (200, 2), (300, 2), (500, 3)]
            .map(|(keys, nodes)| json!({"keys": keys, "nodes": nodes, "mean_ms": 1, "most_ms": 1}))
            .into();
        let runs = [(json!("fill"), json!({"points": points, "errors": 0, "lost": 0}))];
        assert_eq!(values("autoscaling-fill", "keys for each node", &runs), [1.25]);
        let steps: Vec<Value> = [(0.5, 1), (1.0, 2), (1.5, 3)]
            .map(|(load, nodes)| json!({"load": load, "mean_ms": 1, "nodes": nodes}))
            .into();
        let runs = [(json!("ramp"), json!({"capacity": 1, "steps": steps, "errors": 0, "wrong_after": 0}))];
        assert_eq!(values("autoscaling-ramp", "load for each node", &runs), [1.0, 0.75]);
    }
}
