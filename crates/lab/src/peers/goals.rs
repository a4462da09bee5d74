//! The goals of the fast path, each compared with results of the same run.
//!
//! Ratios rather than absolute times, because they hold on other machines. Goals are data, so that the printed table
//! and the judgement cannot differ.

use switchyard_bench::table::Table;

use super::Results;
use super::rows::{
    FLAT_NODES, GATE_C50, GATE_C512, GATE_P16, GET_16K, GET_C1, GET_C8, GET_C10K, GET_C50, GET_C512, GET_P16, Row,
};
use super::target::Peer;

/// Compared quantity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Measure {
    /// CPU of the proxy per request.
    ProxyCpu,
    /// Median latency.
    P50,
}

/// Relative difference of requests/s that counts as equal, because rounds of one proxy differ by more.
const NOISE: f64 = 0.05;
/// Resolution of redis-benchmark's latencies, in milliseconds.
const LATENCY_STEP_MS: f64 = 0.008;

/// One goal: in `row`, our measure must be at most `bound` times `than`'s.
struct Ratio {
    row: Row,
    measure: Measure,
    than: Peer,
    bound: f64,
    /// Applies only if the router sends in batches (io_uring); the other bound is for epoll alone.
    batched: bool,
}

fn cpu(row: Row, than: Peer, bound: f64) -> Ratio {
    Ratio { row, measure: Measure::ProxyCpu, than, bound, batched: false }
}

fn p50(row: Row, than: Peer, bound: f64) -> Ratio {
    Ratio { measure: Measure::P50, ..cpu(row, than, bound) }
}

fn batched(ratio: Ratio) -> Ratio {
    Ratio { batched: true, ..ratio }
}

fn ratios() -> [Ratio; 16] {
    [
        cpu(GET_C50, Peer::Predixy, 0.85),
        batched(cpu(GET_C50, Peer::Predixy, 0.65)),
        cpu(GET_C50, Peer::Twemproxy, 0.65),
        cpu(GET_C50, Peer::Envoy, 0.65),
        cpu(GET_C50, Peer::Haproxy, 0.65),
        cpu(GET_P16, Peer::Predixy, 0.6),
        cpu(GET_P16, Peer::Twemproxy, 0.25),
        cpu(GET_P16, Peer::Envoy, 0.25),
        cpu(GET_C512, Peer::Predixy, 0.85),
        batched(cpu(GET_C512, Peer::Predixy, 0.6)),
        cpu(GET_16K, Peer::Predixy, 0.8),
        p50(GET_C1, Peer::Predixy, 1.0),
        p50(GET_C8, Peer::Predixy, 1.0),
        cpu(GATE_C50, Peer::Predixy, 0.65),
        cpu(GATE_C512, Peer::Predixy, 0.7),
        cpu(GATE_P16, Peer::Predixy, 0.75),
    ]
}

/// predixy's CPU as a share of twemproxy's in the same row, from an earlier run, for runs without its binary.
const PREDIXY_OF_TWEMPROXY: [(Row, f64); 3] = [(GET_C50, 0.78), (GET_P16, 0.32), (GET_C512, 0.73)];

/// Maximum ratio of costs for different numbers of nodes and clients.
const FLAT: f64 = 1.25;

/// Maximum ratio of CPU per request to twemproxy with the same configuration.
const WITH_ITS_FILE: f64 = 0.6;

/// Result of a goal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Reached.
    Reached,
    /// Missed.
    Missed,
    /// Not measured in this run, with the reason.
    Open(String),
}

/// One judged goal.
#[derive(Debug, Clone)]
pub struct Goal {
    /// Whether the goal belongs to the gate (pinned rows).
    pub gate: bool,
    /// Requirement.
    pub text: String,
    /// Measured values.
    pub measured: String,
    /// Result.
    pub verdict: Verdict,
    /// Rows that miss a goal for many rows, with the values.
    pub misses: Vec<String>,
}

/// Judges `ours` (a variant of our router) by every goal with measured rows.
pub(super) fn judge(results: &Results, ours: &Peer) -> Vec<Goal> {
    if results.peers.contains(&Peer::before(FLAT_NODES[0])) {
        return flat(results);
    }
    if results.pools.is_some() {
        return results
            .rows
            .iter()
            .map(|row| ratio(results, ours, &cpu(*row, Peer::Twemproxy, WITH_ITS_FILE)))
            .collect();
    }
    let mut goals: Vec<_> =
        ratios().iter().filter(|r| results.rows.contains(&r.row)).map(|r| ratio(results, ours, r)).collect();
    for gate in [false, true] {
        let rows: Vec<_> = results.rows.iter().copied().filter(|r| r.pinned == gate).collect();
        if !rows.is_empty() {
            goals.push(total_cpu(results, ours, &rows, gate));
            goals.push(throughput(results, ours, &rows, gate));
        }
    }
    if results.rows.contains(&GET_C512) {
        goals.push(faster_than_direct(results, ours));
    }
    if let Some(memory) = &results.memory {
        goals.extend(memory_goals(memory, ours));
    }
    goals
}

/// Goals for a cost that hardly grows with nodes or clients.
fn flat(results: &Results) -> Vec<Goal> {
    let [few, more @ ..] = FLAT_NODES;
    let compare = |text: String, (nodes, row): (usize, Row), (than_nodes, than_row): (usize, Row)| {
        let cpu = |nodes: usize, row: Row| results.proxy_us(&Peer::before(nodes), row);
        let (measured, verdict) = match (cpu(nodes, row), cpu(than_nodes, than_row)) {
            (Some(mine), Some(base)) => {
                (format!("{mine:.2} / {base:.2} µs = {:.2}", mine / base), verdict(mine <= FLAT * base))
            }
            _ => (String::new(), Verdict::Open("not both were measured".to_owned())),
        };
        Goal { gate: false, text, measured, verdict, misses: Vec::new() }
    };
    let rows = results.rows.iter().copied();
    let mut goals: Vec<_> = rows
        .flat_map(|row| more.map(|nodes| (row, nodes)))
        .map(|(row, nodes)| {
            compare(format!("{row}: CPU/request with {nodes} nodes <= {FLAT} x {few} nodes"), (nodes, row), (few, row))
        })
        .collect();
    if results.rows.contains(&GET_C10K) {
        goals.push(compare(
            format!("{few} nodes: CPU/request of {GET_C10K} <= {FLAT} x {GET_C50}"),
            (few, GET_C10K),
            (few, GET_C50),
        ));
    }
    goals
}

fn ratio(results: &Results, ours: &Peer, goal: &Ratio) -> Goal {
    let value = |peer: &Peer| match goal.measure {
        Measure::ProxyCpu => results.proxy_us(peer, goal.row),
        Measure::P50 => results.p50_ms(peer, goal.row),
    };
    let (name, unit, digits) = match goal.measure {
        Measure::ProxyCpu => ("CPU/request", "µs", 2),
        Measure::P50 => ("p50", "ms", 3),
    };
    let estimate = (goal.than == Peer::Predixy && goal.measure == Measure::ProxyCpu)
        .then(|| PREDIXY_OF_TWEMPROXY.iter().find(|(row, _)| *row == goal.row))
        .flatten()
        .and_then(|(_, share)| Some(results.proxy_us(&Peer::Twemproxy, goal.row)? * share));
    let (theirs, note) = match (value(&goal.than), estimate) {
        (Some(v), _) => (Some(v), ""),
        (None, Some(v)) => (Some(v), " (predixy estimated from twemproxy)"),
        (None, None) => (None, ""),
    };
    let when = if goal.batched { " (where batched send is chosen)" } else { "" };
    let text = format!("{}: {name} <= {} x {}{when}", goal.row, goal.bound, goal.than);
    let (measured, verdict) = match (value(ours), theirs) {
        (Some(mine), Some(theirs)) => {
            // One step of the resolution is no difference.
            let slack = if goal.measure == Measure::P50 { LATENCY_STEP_MS } else { 0.0 };
            let measured = format!("{mine:.digits$} / {theirs:.digits$} {unit} = {:.2}{note}", mine / theirs);
            (measured, verdict(mine <= goal.bound * theirs + slack + 1e-9))
        }
        (None, _) => (String::new(), Verdict::Open(format!("{ours} was not measured"))),
        (_, None) => (String::new(), Verdict::Open(format!("{} was not measured", goal.than))),
    };
    Goal { gate: goal.row.pinned, text, measured, verdict, misses: Vec::new() }
}

fn verdict(reached: bool) -> Verdict {
    if reached { Verdict::Reached } else { Verdict::Missed }
}

/// Goal: proxy and nodes together cost less than with any other proxy.
fn total_cpu(results: &Results, ours: &Peer, rows: &[Row], gate: bool) -> Goal {
    let text = "CPU of proxy + redis-servers lower than with any peer, in every row";
    let value = |peer: &Peer, row| results.total_us(peer, row);
    let judge_row = |mine: f64, others: &[(&Peer, f64)]| {
        let (peer, best) = others.iter().min_by(|a, b| a.1.total_cmp(&b.1))?;
        (mine >= *best).then(|| format!("{mine:.2} µs, {peer} {best:.2}"))
    };
    every_row(results, ours, rows, gate, text.to_owned(), &value, &judge_row)
}

/// Goal: as fast as the fastest other proxy, within the noise.
fn throughput(results: &Results, ours: &Peer, rows: &[Row], gate: bool) -> Goal {
    let text = format!("requests/s first of all proxies (within {:.0} %), in every row", NOISE * 100.0);
    let value = |peer: &Peer, row| results.requests_per_second(peer, row);
    let judge_row = |mine: f64, others: &[(&Peer, f64)]| {
        let (peer, best) = others.iter().max_by(|a, b| a.1.total_cmp(&b.1))?;
        let missed = mine < best * (1.0 - NOISE);
        missed.then(|| format!("{:.0} k/s, {peer} {:.0}", mine / 1000.0, best / 1000.0))
    };
    every_row(results, ours, rows, gate, text, &value, &judge_row)
}

/// Returns the miss of a row, from our value and the others'; `None` if it reaches the goal.
type Miss<'a> = &'a dyn Fn(f64, &[(&Peer, f64)]) -> Option<String>;

/// Judges a goal that must hold in every row.
fn every_row(
    results: &Results,
    ours: &Peer,
    rows: &[Row],
    gate: bool,
    text: String,
    value: &dyn Fn(&Peer, Row) -> Option<f64>,
    miss: Miss<'_>,
) -> Goal {
    let mut judged = 0;
    let mut misses = Vec::new();
    for row in rows {
        let others: Vec<_> =
            results.peers.iter().filter(|p| p.is_other_proxy()).filter_map(|p| Some((p, value(p, *row)?))).collect();
        let Some(mine) = value(ours, *row).filter(|_| !others.is_empty()) else {
            continue;
        };
        judged += 1;
        misses.extend(miss(mine, &others).map(|how| format!("{row}: {how}")));
    }
    let (measured, verdict) = if judged == 0 {
        let why = format!("{ours} and another proxy were not measured together");
        (String::new(), Verdict::Open(why))
    } else {
        let held = format!("in {} of {judged} rows", judged - misses.len());
        (held, verdict(misses.is_empty()))
    };
    Goal { gate, text, measured, verdict, misses }
}

fn faster_than_direct(results: &Results, ours: &Peer) -> Goal {
    let text = format!("{GET_C512}: requests/s above redis-server without a proxy");
    let (measured, verdict) =
        match (results.requests_per_second(ours, GET_C512), results.requests_per_second(&Peer::Direct, GET_C512)) {
            (Some(mine), Some(direct)) => {
                (format!("{:.0} k/s, direct {:.0}", mine / 1000.0, direct / 1000.0), verdict(mine > direct))
            }
            _ => (String::new(), Verdict::Open(format!("{ours} was not measured"))),
        };
    Goal { gate: false, text, measured, verdict, misses: Vec::new() }
}

fn memory_goals(memory: &[super::memory::Memory], ours: &Peer) -> Vec<Goal> {
    let mine = memory.iter().find(|m| m.peer == *ours);
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let goal = |text: String, bound: f64, bytes: Result<u64, String>| {
        let (measured, verdict) = match bytes {
            Ok(bytes) => (format!("{:.1} MiB", mib(bytes)), verdict((bytes as f64) < bound * 1e6)),
            Err(why) => (String::new(), Verdict::Open(why)),
        };
        Goal { gate: false, text, measured, verdict, misses: Vec::new() }
    };
    let missing = || format!("{ours} was not measured");
    vec![
        goal("memory of the idle router < 20 MB".to_owned(), 20.0, mine.map(|m| m.idle).ok_or_else(missing)),
        goal(
            format!("memory with {} idle clients < 100 MB", super::memory::CLIENTS),
            100.0,
            mine.map_or_else(|| Err(missing()), |m| m.with_clients.clone()),
        ),
    ]
}

/// Returns the goals as a table, with marks on goals of the gate.
pub(super) fn table(goals: &[Goal]) -> Table {
    let mut table = Table::new(["goal", "measured", "reached"]);
    for goal in goals {
        let (measured, verdict) = match &goal.verdict {
            Verdict::Reached => (goal.measured.clone(), "yes"),
            Verdict::Missed => (goal.measured.clone(), "NO"),
            Verdict::Open(why) => (why.clone(), "open"),
        };
        let text = if goal.gate { format!("gate: {}", goal.text) } else { goal.text.clone() };
        table.row([text, measured, verdict.to_owned()]);
    }
    table
}

/// Returns a line for each row that misses a goal for many rows.
pub(super) fn misses(goals: &[Goal]) -> Vec<String> {
    let of = |goal: &Goal| {
        let what = goal.text.split(',').next().unwrap_or_default().to_owned();
        goal.misses.iter().map(move |miss| format!("{what}: not at {miss}")).collect::<Vec<_>>()
    };
    goals.iter().flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::{memory::Memory, rows::Sample};

    fn results(cells: &[(Peer, Row, f64, f64)]) -> Results {
        let mut results = Results::default();
        for (peer, row, us, rps) in cells {
            let sample = Sample {
                requests_per_second: *rps,
                p50_ms: us / 10.0,
                p99_ms: 1.0,
                proxy_us: (*peer != Peer::Direct).then_some(*us),
                total_us: us + 2.0,
                foreign: 0.0,
            };
            results.add(peer.clone(), *row, sample);
        }
        results
    }

    fn of<'a>(goals: &'a [Goal], text: &str) -> &'a Goal {
        goals.iter().find(|g| g.text.contains(text)).unwrap_or_else(|| panic!("no goal with {text}"))
    }

    #[test]
    fn goals_are_judged_by_ratio() {
        let cells = [
            (Peer::SWITCHYARD, GET_C50, 4.0, 150e3),
            (Peer::Predixy, GET_C50, 5.0, 140e3),
            (Peer::Twemproxy, GET_C50, 6.0, 120e3),
            (Peer::Direct, GET_C50, 0.0, 180e3),
        ];
        let goals = judge(&results(&cells), &Peer::SWITCHYARD);
        assert_eq!(of(&goals, "0.85 x predixy").verdict, Verdict::Reached);
        assert_eq!(of(&goals, "0.65 x predixy").verdict, Verdict::Missed);
        assert_eq!(of(&goals, "0.65 x twemproxy").verdict, Verdict::Missed);
        assert!(matches!(of(&goals, "0.65 x envoy").verdict, Verdict::Open(_)));
        assert_eq!(of(&goals, "proxy + redis").verdict, Verdict::Reached);
        assert!(misses(&goals).is_empty());
        // Direct is no proxy: being slower than it is no miss.
        assert_eq!(of(&goals, "first of all").verdict, Verdict::Reached);
    }

    #[test]
    fn a_flat_cost_is_judged_over_nodes_and_over_clients() {
        let cells = [
            (Peer::before(2), GET_C50, 4.0, 1e5),
            (Peer::before(32), GET_C50, 5.0, 1e5),
            (Peer::before(64), GET_C50, 5.1, 1e5),
            (Peer::before(2), GET_C10K, 5.1, 1e5),
            (Peer::before(64), GET_C10K, 5.2, 1e5),
        ];
        let goals = judge(&results(&cells), &Peer::SWITCHYARD);
        assert_eq!(goals.len(), 5);
        assert_eq!(of(&goals, "50 clients: CPU/request with 32 nodes").verdict, Verdict::Reached);
        assert_eq!(of(&goals, "50 clients: CPU/request with 64 nodes").verdict, Verdict::Missed);
        assert_eq!(of(&goals, "10000 clients: CPU/request with 64 nodes").verdict, Verdict::Reached);
        assert!(matches!(of(&goals, "10000 clients: CPU/request with 32 nodes").verdict, Verdict::Open(_)));
        assert_eq!(of(&goals, "2 nodes: CPU/request of").verdict, Verdict::Missed);
    }

    #[test]
    fn a_goal_for_every_row_lists_the_missing_rows() {
        let cells = [
            (Peer::SWITCHYARD, GET_C50, 4.0, 150e3),
            (Peer::Envoy, GET_C50, 5.0, 140e3),
            (Peer::SWITCHYARD, GET_C512, 4.0, 100e3),
            (Peer::Envoy, GET_C512, 3.0, 140e3),
        ];
        let goals = judge(&results(&cells), &Peer::SWITCHYARD);
        let goal = of(&goals, "first of all");
        assert_eq!(goal.verdict, Verdict::Missed);
        assert_eq!(goal.measured, "in 1 of 2 rows");
        let misses = misses(&goals);
        assert_eq!(misses.len(), 2, "{misses:?}");
        assert!(misses.iter().all(|m| m.contains("512 clients") && m.contains("envoy")));
    }

    #[test]
    fn missing_predixy_is_estimated_from_twemproxy() {
        let cells = [(Peer::SWITCHYARD, GET_P16, 0.45, 1e6), (Peer::Twemproxy, GET_P16, 2.5, 3e5)];
        let goals = judge(&results(&cells), &Peer::SWITCHYARD);
        let goal = of(&goals, "0.6 x predixy"); // 2.5 * 0.32 * 0.6 = 0.48
        assert_eq!(goal.verdict, Verdict::Reached);
        assert!(goal.measured.contains("estimated"), "{}", goal.measured);
        // Never for the gate: those ratios come from unpinned runs.
        let cells = [(Peer::SWITCHYARD, GATE_P16, 0.45, 1e6), (Peer::Twemproxy, GATE_P16, 2.5, 3e5)];
        let goals = judge(&results(&cells), &Peer::SWITCHYARD);
        assert!(matches!(of(&goals, "0.75 x predixy").verdict, Verdict::Open(_)));
    }

    #[test]
    fn one_step_of_latency_is_no_difference() {
        let at = |us| [(Peer::SWITCHYARD, GET_C1, us, 1e4), (Peer::Predixy, GET_C1, 0.31, 1e4)];
        let judged = |us| of(&judge(&results(&at(us)), &Peer::SWITCHYARD), "p50").verdict.clone();
        assert_eq!(judged(0.39), Verdict::Reached);
        assert_eq!(judged(0.47), Verdict::Missed);
    }

    #[test]
    fn goals_without_measurements_are_open() {
        let goals = judge(
            &results(&[(Peer::Predixy, GET_C512, 5.0, 1e5), (Peer::Direct, GET_C512, 0.0, 1e5)]),
            &Peer::SWITCHYARD,
        );
        assert!(goals.len() > 3);
        assert!(goals.iter().all(|g| matches!(g.verdict, Verdict::Open(_))), "{goals:?}");
    }

    #[test]
    fn memory_is_judged_in_megabytes() {
        let mut results = results(&[(Peer::SWITCHYARD, GET_C50, 4.0, 150e3)]);
        results.memory = Some(vec![Memory { peer: Peer::SWITCHYARD, idle: 19_000_000, with_clients: Ok(101_000_000) }]);
        let goals = judge(&results, &Peer::SWITCHYARD);
        assert_eq!(of(&goals, "idle router").verdict, Verdict::Reached);
        assert_eq!(of(&goals, "idle clients").verdict, Verdict::Missed);
    }
}
