//! Makris et al. (2017): three servers, twenty keys by Zipf, nearly all of them at the first one; and the effect of
//! moving single keys. Its figures 1 and 3 to 8, and table I.
//!
//! Each policy of the planner has its own run. The load runs all the time: automation is first off, and then on.
//!
//! The load is open: each client plans its requests independently of replies, and catches up after a late one. A
//! response time counts from the planned time, so that it includes the wait for earlier replies. Clients that send as
//! fast as they can would measure this machine's processors once three servers reply.
//!
//! The servers get a part of a processor, like the paper's virtual machines on one; otherwise so few clients would
//! overload no server. The mean response time of one server by the rate, behind the router, comes first (figure 1). Its
//! knee is the greatest rate that the server sustains. Each policy runs at several rates around the knee, because the
//! result of one rate alone would depend on its choice.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::json;
use switchyard_bench::client::Client;
use switchyard_bench::random::Rng;
use switchyard_bench::table::Table;

use super::spread::Spread;
use super::{Bench, Conduct, NO_COPIES, Section, measure, plain, publish};
use crate::figure::{self, Line, Panel};
use crate::moves::admin;
use crate::moves::site::Routed;

const MARK: &str = "reproduce-makris";
const NODES: usize = 3;
const KEYS: usize = 20;
/// Lowest rate of figure 1, and the factor from a rate to the next one.
const RATES: (f64, f64) = (2000.0, 1.1);
/// Share of the offered requests that a server replies to at a rate that it sustains.
const SUSTAINED: f64 = 0.95;
/// Time before each phase of a run, in which nothing is counted.
const SETTLES: Duration = Duration::from_secs(2);
pub(super) const POLICIES: [&str; 4] = ["makris-printed", "makris-ffd", "makris-safe", "switchyard"];

/// Before and after, of each node: share of the load in percent, and mean response time in seconds (table I).
pub(super) const PUBLISHED: [[(f64, f64); NODES]; 2] =
    [[(98.0, 0.82), (1.0, 0.36), (1.0, 0.34)], [(42.0, 0.55), (30.0, 0.48), (28.0, 0.47)]];

/// Change of the mean response time of all requests, in percent: computed from table I.
pub(super) const MEAN_PUBLISHED: f64 = -37.5;

/// Settings of the experiment.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Common settings.
    pub conduct: Conduct,
    /// Share of a processor for each server.
    pub cpu: f64,
    /// Clients of the load, with one connection and one request in flight each.
    pub clients: usize,
    /// Rates of the load, as shares of the knee. Each policy runs at each of these rates.
    pub of_knee: Vec<f64>,
    /// Duration of each phase.
    pub phase: Duration,
    /// Maximum number of rates of figure 1.
    pub rates_max: usize,
}

/// A rate of figure 1.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct RatePoint {
    /// Requests per second that the load offered, and that the server replied to.
    pub(super) offered: f64,
    pub(super) achieved: f64,
    pub(super) mean_ms: f64,
}

/// Load of a node in a phase: replies per second, and their mean time.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Node {
    pub(super) requests: f64,
    pub(super) answer_us: f64,
}

/// Results of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Measured {
    pub(super) before: Vec<Node>,
    pub(super) after: Vec<Node>,
    /// Number of moved keys.
    moved: u64,
    errors: u64,
}

/// Does the missing measurements, prints all, and rewrites the section of the document.
///
/// # Errors
/// If a server cannot be started, or the user interrupts.
pub fn run(settings: &Settings) -> Result<()> {
    let Settings { conduct, cpu, clients, of_knee, phase, .. } = settings;
    let rates = measure(
        conduct,
        &["rates"],
        |_| json!({"experiment": "makris-rates", "cpu": cpu, "clients": clients, "seconds": phase.as_secs_f64(), "rates_max": settings.rates_max}),
        |_| "response time by rate".to_owned(),
        |bench, _| by_rate(bench, settings),
    )?;
    let sweeps: &[Vec<RatePoint>] = rates.results.first().map(Vec::as_slice).unwrap_or_default();
    let knee = Spread::of(sweeps.iter().filter_map(|points| knee(points))).context("figure 1 has no rate")?;
    let points = sweeps.first().map(|points| points.iter().map(|point| (point.offered, point.mean_ms)).collect());
    let loads: Vec<f64> = of_knee.iter().map(|share| (share * knee.median).round()).collect();
    let runs: Vec<(f64, f64, &str)> =
        of_knee.iter().zip(&loads).flat_map(|(share, load)| POLICIES.map(|policy| (*share, *load, policy))).collect();
    let outcome = measure(
        conduct,
        &runs,
        |(share, load, policy)| json!({"experiment": "makris", "policy": policy, "cpu": cpu, "clients": clients, "of_knee": share, "load": load, "seconds": phase.as_secs()}),
        |(share, load, policy)| format!("policy {policy}, {share} of the knee: {load} GET/s"),
        |bench, (_, load, policy)| one(bench, settings, *load, policy),
    )?;
    let mut table = Table::new([
        "of the knee",
        "GET/s offered",
        "achieved before",
        "after",
        "policy",
        "load before, % of all",
        "after",
        "response time before",
        "after",
        "hottest node's response time",
        "mean of all requests",
        "keys moved",
        "errors",
    ]);
    let of = |phase: usize, value: &dyn Fn(&(f64, f64)) -> String| {
        PUBLISHED[phase].iter().map(value).collect::<Vec<_>>().join(" / ")
    };
    let (share, answer) = (|node: &(f64, f64)| format!("{:.0}", node.0), |node: &(f64, f64)| format!("{:.2}", node.1));
    table.row([
        String::new(),
        String::new(),
        String::new(),
        String::new(),
        "published".to_owned(),
        of(0, &share),
        of(1, &share),
        format!("{} s", of(0, &answer)),
        format!("{} s", of(1, &answer)),
        "-33 %".to_owned(),
        format!("{MEAN_PUBLISHED:+.0} %"),
        String::new(),
        String::new(),
    ]);
    for ((share, load, policy), results) in runs.iter().zip(&outcome.results) {
        let each = |of: &dyn Fn(&Measured, usize) -> f64, digits: usize| -> String {
            let of_node = |node| {
                Spread::of(results.iter().map(|run| of(run, node)))
                    .map_or(String::new(), |spread| spread.text(|v| format!("{v:.digits$}")))
            };
            (0..NODES).map(of_node).collect::<Vec<_>>().join(" / ")
        };
        let sum = |of: fn(&Measured) -> u64| results.iter().map(of).max().unwrap_or(0).to_string();
        let achieved = |nodes: fn(&Measured) -> &[Node]| {
            Spread::of(results.iter().map(|run| nodes(run).iter().map(|node| node.requests).sum()))
                .map_or(String::new(), |spread| spread.text(|v| format!("{v:.0}")))
        };
        table.row([
            plain(*share),
            load.to_string(),
            achieved(|run| &run.before),
            achieved(|run| &run.after),
            (*policy).to_owned(),
            each(&|run, node| share_of(&run.before, node), 0),
            each(&|run, node| share_of(&run.after, node), 0),
            format!("{} ms", each(&|run, node| run.before[node].answer_us / 1e3, 2)),
            format!("{} ms", each(&|run, node| run.after[node].answer_us / 1e3, 2)),
            Spread::of(results.iter().map(change))
                .map_or(String::new(), |change| change.text(|v| format!("{v:+.0} %"))),
            Spread::of(results.iter().map(change_of_mean))
                .map_or(String::new(), |change| change.text(|v| format!("{v:+.0} %"))),
            sum(|run| run.moved),
            sum(|run| run.errors),
        ]);
    }
    // At the knee, or the last rate.
    let shown = of_knee.iter().position(|share| *share == 1.0).unwrap_or(of_knee.len().saturating_sub(1));
    let notes = vec![format!(
        "Makris et al., table I: {KEYS} keys by Zipf (exponent 1), 18 of them at the first of {NODES} servers. Here each server has {cpu} of a processor, and {clients} clients \
         send GET in an open loop; times count from the planned time of a request. One server sustains {} GET/s: the knee. Nodes are in the order in which the configuration \
         lists them; after a move the second may have the most. The last figure is of {} GET/s.",
        knee.text(|rate| format!("{rate:.0}")),
        loads[shown]
    )];
    let mut figures = vec![(
        "makris-rate".to_owned(),
        "Mean response time of one capped server behind the router, by the rate of requests (figure 1)".to_owned(),
        figure::svg(&[Panel {
            title: "Figure 1: one server".to_owned(),
            x: "GET/s".to_owned(),
            y: "mean response time, ms".to_owned(),
            floor: Some(0.1),
            lines: vec![Line { name: format!("{cpu} of a processor"), points: points.unwrap_or_default() }],
        }])?,
    )];
    let gains = POLICIES.iter().enumerate().map(|(at, policy)| Line {
        name: (*policy).to_owned(),
        points: loads
            .iter()
            .enumerate()
            .filter_map(|(load, rate)| {
                Some((
                    *rate,
                    Spread::of(outcome.results[load * POLICIES.len() + at].iter().map(change))?.median + 100.0,
                ))
            })
            .collect(),
    });
    figures.push((
        "makris-gain".to_owned(),
        "Mean response time of the hottest node after the move, in percent of the time before, by load and policy"
            .to_owned(),
        figure::svg(&[Panel {
            title: "The hottest node".to_owned(),
            x: "GET/s".to_owned(),
            y: "response time after, % of the time before".to_owned(),
            floor: None,
            lines: gains.collect(),
        }])?,
    ));
    let at_knee = &outcome.results[shown * POLICIES.len()..(shown + 1) * POLICIES.len()];
    let panels = [
        ("Figures 3, 4: before", 0, true),
        ("Figures 6, 7: after", 1, true),
        ("Figure 5: before", 0, false),
        ("Figure 8: after", 1, false),
    ]
    .map(|(title, phase, is_load)| Panel {
        title: title.to_owned(),
        x: "node".to_owned(),
        y: if is_load { "load, % of all" } else { "response time / previous response time of node 1" }.to_owned(),
        floor: None,
        lines: lines(at_knee, phase, is_load),
    });
    let shows = "Share of the load and response time of each node, before and after, as published and by each policy (figures 3 to 8)";
    figures.push(("makris".to_owned(), shows.to_owned(), figure::svg(&panels)?));
    let section = Section { notes, tables: vec![("Load and response time of each node".to_owned(), table)], figures };
    publish(conduct, MARK, &outcome, &section)
}

/// Returns a node's part of all requests, in percent.
pub(super) fn share_of(nodes: &[Node], node: usize) -> f64 {
    let all: f64 = nodes.iter().map(|node| node.requests).sum();
    nodes[node].requests * 100.0 / all.max(1.0)
}

/// Returns the change of the hottest node's response time, in percent.
pub(super) fn change(run: &Measured) -> f64 {
    let hottest = |nodes: &[Node]| nodes.iter().map(|node| node.answer_us).fold(0.0, f64::max);
    (hottest(&run.after) / hottest(&run.before) - 1.0) * 100.0
}

/// Returns the change of the mean response time of all requests, in percent.
pub(super) fn change_of_mean(run: &Measured) -> f64 {
    let mean = |nodes: &[Node]| {
        let all: f64 = nodes.iter().map(|node| node.requests).sum();
        nodes.iter().map(|node| node.requests * node.answer_us).sum::<f64>() / all
    };
    (mean(&run.after) / mean(&run.before) - 1.0) * 100.0
}

/// Returns the greatest rate up to which the server sustained each rate, and at least the lowest measured one.
pub(super) fn knee(points: &[RatePoint]) -> Option<f64> {
    let sustained = points.iter().take_while(|point| point.achieved >= SUSTAINED * point.offered);
    sustained.last().or(points.first()).map(|point| point.offered)
}

/// Counters of the clients: replies and the sum of their times in microseconds, by phase and key.
#[derive(Debug)]
struct Counts {
    /// The current phase; no phase has another number.
    phase: AtomicUsize,
    replies: [[AtomicU64; KEYS]; 2],
    micros: [[AtomicU64; KEYS]; 2],
    errors: AtomicU64,
}

impl Counts {
    fn new() -> Self {
        Self {
            phase: AtomicUsize::new(usize::MAX),
            replies: Default::default(),
            micros: Default::default(),
            errors: AtomicU64::new(0),
        }
    }

    /// Counts for the duration of a phase. Returns the exact duration.
    fn count(&self, bench: &Bench<'_>, phase: usize, duration: Duration) -> Result<Duration> {
        let begun = Instant::now();
        self.phase.store(phase, Ordering::Relaxed);
        let paused = pause(bench, duration);
        self.phase.store(usize::MAX, Ordering::Relaxed);
        paused.map(|()| begun.elapsed())
    }

    fn add(&self, key: usize, planned: Instant) {
        let phase = self.phase.load(Ordering::Relaxed);
        if let Some((replies, micros)) = self.replies.get(phase).zip(self.micros.get(phase)) {
            replies[key].fetch_add(1, Ordering::Relaxed);
            micros[key].fetch_add(planned.elapsed().as_micros() as u64, Ordering::Relaxed);
        }
    }
}

/// Runs `observe` while the clients send `load` requests per second for keys by Zipf.
fn under_load<T>(
    settings: &Settings,
    entry: SocketAddr,
    keys: &[String],
    load: f64,
    counts: &Counts,
    observe: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let stop = AtomicBool::new(false);
    // Mean time between two requests of a client.
    let gap = Duration::from_secs_f64(settings.clients as f64 / load);
    let shares = zipf();
    std::thread::scope(|scope| {
        for seed in 0..settings.clients {
            let (shares, stop) = (&shares, &stop);
            scope.spawn(move || {
                let mut rng = Rng::new(seed as u64 + 1);
                let mut client = Client::connect(entry).ok();
                let mut planned = Instant::now();
                while let Some(client) = client.as_mut().filter(|_| !stop.load(Ordering::Relaxed)) {
                    // Requests arrive at random, independently of replies.
                    planned += gap.mul_f64(-(1.0 - rng.unit()).ln());
                    std::thread::sleep(planned.saturating_duration_since(Instant::now()));
                    let at = rng.unit();
                    let key = shares.partition_point(|sum| *sum < at).min(KEYS - 1);
                    if client.text(&[b"GET", keys[key].as_bytes()]).is_err() {
                        counts.errors.fetch_add(1, Ordering::Relaxed);
                    } else {
                        counts.add(key, planned);
                    }
                }
            });
        }
        let observed = observe();
        stop.store(true, Ordering::Relaxed);
        observed
    })
}

fn one(bench: &Bench<'_>, settings: &Settings, load: f64, policy: &str) -> Result<Measured> {
    let policy = format!("planner.policy={policy}");
    let args = ["planner.mode=on", &policy, "planner.min-requests=100", "planner.window=2s", "hot-copies.mode=off"];
    let mut args: Vec<String> = args.iter().flat_map(|set| ["--set".to_owned(), (*set).to_owned()]).collect();
    args.extend(["--workers".to_owned(), "1".to_owned()]);
    let site = Routed::start_many(&bench.programs, &args, NODES, &bench.name(), bench.folder)?;
    bench.order(site.admin, &["automation", "off"])?;
    let keys = keys(&site)?;
    let _capped = bench.cap_all(&site.process_ids(), settings.cpu)?;
    let counts = Counts::new();
    let watch = |phase: usize| -> Result<Vec<Node>> {
        pause(bench, SETTLES)?;
        let time = counts.count(bench, phase, settings.phase)?;
        by_node(&site, &keys, &counts.replies[phase], &counts.micros[phase], time)
    };
    under_load(settings, site.entry, &keys, load, &counts, || {
        let before = watch(0)?;
        bench.order(site.admin, &["automation", "on"])?;
        // The planner observes, moves, and checks the effect, several times.
        pause(bench, settings.phase * 2)?;
        let after = watch(1)?;
        let history = admin::get(site.admin, "/api/v1/plan/history")?;
        let steps = |decision: &serde_json::Value| {
            decision["steps"]
                .as_array()
                .map_or(0, |steps| steps.iter().filter(|step| step["what"] == "key").count() as u64)
        };
        let moved = history["decisions"]
            .as_array()
            .map_or(0, |all| all.iter().filter(|decision| !decision["outcome"].is_null()).map(steps).sum());
        Ok(Measured { before, after, moved, errors: counts.errors.load(Ordering::Relaxed) })
    })
}

/// Returns the load of each node, by the nodes that have the keys now.
fn by_node(
    site: &Routed,
    keys: &[String],
    replies: &[AtomicU64; KEYS],
    micros: &[AtomicU64; KEYS],
    time: Duration,
) -> Result<Vec<Node>> {
    let (mut counts, mut sums) = ([0_u64; NODES], [0_u64; NODES]);
    for (key, (replies, micros)) in keys.iter().zip(replies.iter().zip(micros)) {
        let found = admin::get(site.admin, &format!("/api/v1/where?key={key}"))?;
        let name = found["keys"][0]["node"].as_str().with_context(|| format!("the router reports no node of {key}"))?;
        let node = site.addresses.iter().position(|address| address.to_string() == name);
        let node = node.with_context(|| format!("{key} is at {name}, which is no node of this run"))?;
        counts[node] += replies.load(Ordering::Relaxed);
        sums[node] += micros.load(Ordering::Relaxed);
    }
    let node = |(count, sum): (u64, u64)| Node {
        requests: count as f64 / time.as_secs_f64(),
        answer_us: sum as f64 / count.max(1) as f64,
    };
    Ok(counts.into_iter().zip(sums).map(node).collect())
}

/// Returns the lines of a panel: published values, and for each policy the median of its runs.
fn lines(results: &[Vec<Measured>], phase: usize, is_load: bool) -> Vec<Line> {
    let number = |node: usize| (node + 1) as f64;
    let published = PUBLISHED[phase].iter().enumerate();
    let first = PUBLISHED[0][0].1;
    let published =
        published.map(|(node, (load, answer))| (number(node), if is_load { *load } else { answer / first })).collect();
    let of_run = |run: &Measured, node: usize| {
        let nodes = if phase == 0 { &run.before } else { &run.after };
        if is_load { share_of(nodes, node) } else { nodes[node].answer_us / run.before[0].answer_us.max(1.0) }
    };
    let policies = POLICIES.iter().zip(results).map(|(policy, runs)| {
        let point = |node: usize| Some((number(node), Spread::of(runs.iter().map(|run| of_run(run, node)))?.median));
        Line { name: (*policy).to_owned(), points: (0..NODES).filter_map(point).collect() }
    });
    [Line { name: "published".to_owned(), points: published }].into_iter().chain(policies).collect()
}

/// Measures figure 1, up to a rate that the server cannot sustain: with the clients of the other figures, because the
/// knee depends on their number of requests in flight.
fn by_rate(bench: &Bench<'_>, settings: &Settings) -> Result<Vec<RatePoint>> {
    let args: Vec<String> = ["--workers", "1"].into_iter().chain(NO_COPIES).map(str::to_owned).collect();
    let site = Routed::start_many(&bench.programs, &args, 1, &bench.name(), bench.folder)?;
    let keys: Vec<String> = (0..KEYS).map(|number| format!("object:{number}")).collect();
    let mut through = Client::connect(site.entry)?;
    for key in &keys {
        through.ok(&[b"SET", key.as_bytes(), b"value"])?;
    }
    let _capped = bench.cap_all(&site.process_ids(), settings.cpu)?;
    let (mut rate, mut points) = (RATES.0, Vec::new());
    loop {
        let counts = Counts::new();
        let time = under_load(settings, site.entry, &keys, rate, &counts, || counts.count(bench, 0, settings.phase))?;
        let sum = |values: &[AtomicU64]| values.iter().map(|value| value.load(Ordering::Relaxed)).sum::<u64>() as f64;
        let (replies, micros) = (sum(&counts.replies[0]), sum(&counts.micros[0]));
        let achieved = replies / time.as_secs_f64();
        points.push(RatePoint { offered: rate, achieved, mean_ms: micros / replies.max(1.0) / 1e3 });
        if achieved < SUSTAINED * rate || points.len() >= settings.rates_max {
            return Ok(points);
        }
        rate *= RATES.1;
    }
}

/// Returns the cumulative shares of the keys.
fn zipf() -> Vec<f64> {
    let all: f64 = (1..=KEYS).map(|rank| 1.0 / rank as f64).sum();
    (1..=KEYS)
        .scan(0.0, |sum, rank| {
            *sum += 1.0 / rank as f64 / all;
            Some(*sum)
        })
        .collect()
}

/// Returns names of keys, hottest first: all at the first server, except the last two, which are at the other servers.
fn keys(site: &Routed) -> Result<Vec<String>> {
    let mut through = Client::connect(site.entry)?;
    let mut nodes: Vec<Client> =
        site.addresses.iter().map(|address| Client::connect(*address)).collect::<Result<_>>()?;
    let mut of_node: Vec<Vec<String>> = vec![Vec::new(); NODES];
    for number in 0..10_000 {
        let key = format!("object:{number}");
        through.ok(&[b"SET", key.as_bytes(), b"value"])?;
        for (node, of_node) in nodes.iter_mut().zip(&mut of_node) {
            if node.integer(&[b"EXISTS", key.as_bytes()])? == 1 {
                of_node.push(key.clone());
            }
        }
        if of_node[0].len() >= KEYS - 2 && of_node[1..].iter().all(|keys| !keys.is_empty()) {
            let mut keys: Vec<String> = of_node[0][..KEYS - 2].to_vec();
            keys.extend(of_node[1..].iter().map(|keys| keys[0].clone()));
            return Ok(keys);
        }
    }
    anyhow::bail!("no keys were found at each of the servers")
}

pub(super) fn pause(bench: &Bench<'_>, time: Duration) -> Result<()> {
    let end = Instant::now() + time;
    while Instant::now() < end {
        ensure!(!bench.conduct.stop.load(Ordering::Relaxed), "interrupted");
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(achieved: &[f64]) -> Vec<RatePoint> {
        let rates = (1..).map(|number| f64::from(number) * 100.0);
        rates
            .zip(achieved)
            .map(|(offered, achieved)| RatePoint { offered, achieved: *achieved, mean_ms: 1.0 })
            .collect()
    }

    #[test]
    fn the_knee_is_the_last_sustained_rate() {
        assert_eq!(knee(&points(&[100.0, 199.0, 290.0, 300.0])), Some(300.0));
        assert_eq!(knee(&points(&[100.0, 180.0, 300.0])), Some(100.0));
        assert_eq!(knee(&points(&[50.0])), Some(100.0));
        assert_eq!(knee(&[]), None);
    }

    #[test]
    fn the_published_mean_is_that_of_table_1() {
        let nodes = |phase: &[(f64, f64); NODES]| -> Vec<Node> {
            phase.iter().map(|(share, seconds)| Node { requests: *share, answer_us: seconds * 1e6 }).collect()
        };
        let run = Measured { before: nodes(&PUBLISHED[0]), after: nodes(&PUBLISHED[1]), moved: 0, errors: 0 };
        assert!((change(&run) + 33.0).abs() < 0.5, "{}", change(&run));
        assert!((change_of_mean(&run) - MEAN_PUBLISHED).abs() < 0.5, "{}", change_of_mean(&run));
    }
}
