//! Makris et al. (2017): three servers, twenty keys by Zipf, nearly all of them at the first one; and the effect of
//! moving single keys. Its figures 1 and 3 to 8, and table I.
//!
//! Each policy of the planner has its own run. The load runs all the time: automation is first off, and then on. The
//! load and response time of each node are the router's counts.
//!
//! The servers get a part of a processor, like the paper's virtual machines on one; otherwise so few clients would
//! overload no server. The mean response time of one server by the rate, behind the router, comes first (figure 1).
//!
//! Each policy runs at several rates. Below them no server is overloaded, and above them all three are: single keys
//! help in between. The result of one rate alone would depend on its choice. Clients that send as fast as they can
//! would measure this machine's processors once three servers reply.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::json;
use switchyard_bench::client::Client;
use switchyard_bench::load::{self, Pace, Sharing, Skew, ValueSizes};
use switchyard_bench::random::Rng;
use switchyard_bench::table::Table;

use super::capped::Capped;
use super::figure::{self, Line, Panel};
use super::spread::Spread;
use super::{Bench, Conduct, Section, measure, publish};
use crate::moves::admin;
use crate::moves::site::Routed;

const MARK: &str = "reproduce-makris";
const NODES: usize = 3;
const KEYS: usize = 20;
/// Lowest rate of figure 1, and the factor from a rate to the next one.
const RATES: (f64, f64) = (200.0, 1.5);
const POLICIES: [&str; 4] = ["makris-printed", "makris-ffd", "makris-safe", "switchyard"];

/// Before and after, of each node: share of the load in percent, and mean response time in seconds (table I).
const PUBLISHED: [[(f64, f64); NODES]; 2] =
    [[(98.0, 0.82), (1.0, 0.36), (1.0, 0.34)], [(42.0, 0.55), (30.0, 0.48), (28.0, 0.47)]];

/// Settings of the experiment.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Common settings.
    pub conduct: Conduct,
    /// Share of a processor for each server.
    pub cpu: f64,
    /// Connections of the load.
    pub connections: usize,
    /// GET/s of all connections together. Each policy runs at each of these rates.
    pub loads: Vec<f64>,
    /// Duration of each phase.
    pub phase: Duration,
}

/// Load of a node in a phase.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Node {
    requests: f64,
    answer_us: f64,
}

/// Results of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Measured {
    before: Vec<Node>,
    after: Vec<Node>,
    /// Number of moved keys.
    moved: u64,
    errors: u64,
}

/// Does the missing measurements, prints all, and rewrites the section of the document.
///
/// # Errors
/// If a server cannot be started, or the user interrupts.
pub fn run(settings: &Settings) -> Result<()> {
    let Settings { conduct, cpu, connections, loads, phase } = settings;
    let rates = measure(
        conduct,
        &["rates"],
        |_| json!({"experiment": "makris-rates-routed", "cpu": cpu, "connections": connections}),
        |_| "response time by rate".to_owned(),
        |bench, _| by_rate(bench, settings),
    )?;
    let points: Vec<(f64, f64)> = rates.results.first().and_then(|runs| runs.first()).cloned().unwrap_or_default();
    let runs: Vec<(f64, &str)> = loads.iter().flat_map(|load| POLICIES.map(|policy| (*load, policy))).collect();
    let outcome = measure(
        conduct,
        &runs,
        |(load, policy)| json!({"experiment": "makris", "policy": policy, "cpu": cpu, "connections": connections, "load": load, "seconds": phase.as_secs()}),
        |(load, policy)| format!("policy {policy}, {load} GET/s"),
        |bench, (load, policy)| one(bench, settings, *load, policy),
    )?;
    let mut table = Table::new([
        "GET/s",
        "policy",
        "load before, % of all",
        "after",
        "response time before",
        "after",
        "hottest node's response time",
        "keys moved",
        "errors",
    ]);
    let of = |phase: usize, value: &dyn Fn(&(f64, f64)) -> String| {
        PUBLISHED[phase].iter().map(value).collect::<Vec<_>>().join(" / ")
    };
    let (share, answer) = (|node: &(f64, f64)| format!("{:.0}", node.0), |node: &(f64, f64)| format!("{:.2}", node.1));
    table.row([
        String::new(),
        "published".to_owned(),
        of(0, &share),
        of(1, &share),
        format!("{} s", of(0, &answer)),
        format!("{} s", of(1, &answer)),
        "-33 %".to_owned(),
        String::new(),
        String::new(),
    ]);
    for ((load, policy), results) in runs.iter().zip(&outcome.results) {
        let each = |of: &dyn Fn(&Measured, usize) -> f64, digits: usize| -> String {
            let of_node = |node| {
                Spread::of(results.iter().map(|run| of(run, node)))
                    .map_or(String::new(), |spread| spread.text(|v| format!("{v:.digits$}")))
            };
            (0..NODES).map(of_node).collect::<Vec<_>>().join(" / ")
        };
        let sum = |of: fn(&Measured) -> u64| results.iter().map(of).max().unwrap_or(0).to_string();
        table.row([
            load.to_string(),
            (*policy).to_owned(),
            each(&|run, node| share_of(&run.before, node), 0),
            each(&|run, node| share_of(&run.after, node), 0),
            format!("{} ms", each(&|run, node| run.before[node].answer_us / 1e3, 2)),
            format!("{} ms", each(&|run, node| run.after[node].answer_us / 1e3, 2)),
            Spread::of(results.iter().map(change))
                .map_or(String::new(), |change| change.text(|v| format!("{v:+.0} %"))),
            sum(|run| run.moved),
            sum(|run| run.errors),
        ]);
    }
    let alike = most_alike(loads, &outcome.results);
    let notes = vec![format!(
        "Makris et al., table I: {KEYS} keys by Zipf (exponent 1), 18 of them at the first of {NODES} servers. Here each server has {cpu} of a processor, and {connections} clients \
         send GET at a fixed rate. Nodes are in the order in which the configuration lists them; after a move the second may have the most. The last figure is of {} GET/s: there \
         the first node's response time, over the mean of the others before, is nearest to the published one.",
        loads[alike]
    )];
    let mut figures = vec![(
        "makris-rate".to_owned(),
        "Mean response time of one capped server behind the router, by the rate of requests (figure 1)".to_owned(),
        figure::svg(&[Panel {
            title: "Figure 1: one server".to_owned(),
            x: "GET/s".to_owned(),
            y: "mean response time, ms".to_owned(),
            floor: Some(0.1),
            lines: vec![Line { name: format!("{cpu} of a processor"), points }],
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
    let alike = &outcome.results[alike * POLICIES.len()..(alike + 1) * POLICIES.len()];
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
        lines: lines(alike, phase, is_load),
    });
    let shows = "Share of the load and response time of each node, before and after, as published and by each policy (figures 3 to 8)";
    figures.push(("makris".to_owned(), shows.to_owned(), figure::svg(&panels)?));
    let section = Section { notes, tables: vec![("Load and response time of each node".to_owned(), table)], figures };
    publish(conduct, MARK, &outcome, &section)
}

/// Returns a node's part of all requests, in percent.
fn share_of(nodes: &[Node], node: usize) -> f64 {
    let all: f64 = nodes.iter().map(|node| node.requests).sum();
    nodes[node].requests * 100.0 / all.max(1.0)
}

/// Returns the change of the hottest node's response time, in percent.
fn change(run: &Measured) -> f64 {
    let hottest = |nodes: &[Node]| nodes.iter().map(|node| node.answer_us).fold(0.0, f64::max);
    (hottest(&run.after) / hottest(&run.before) - 1.0) * 100.0
}

/// Returns the index of the rate whose state before is closest to the published one. Ignores the state after.
fn most_alike(loads: &[f64], results: &[Vec<Measured>]) -> usize {
    let ratio = |nodes: &mut dyn Iterator<Item = f64>| {
        nodes.next().unwrap_or(0.0) * (NODES - 1) as f64 / nodes.sum::<f64>().max(1e-9)
    };
    let published = ratio(&mut PUBLISHED[0].iter().map(|node| node.1));
    let distance = |load: usize| {
        let of_load = results[load * POLICIES.len()..(load + 1) * POLICIES.len()].iter().flatten();
        let ratios = of_load.map(|run| ratio(&mut run.before.iter().map(|node| node.answer_us)));
        Spread::of(ratios).map_or(f64::INFINITY, |spread| (spread.median / published).ln().abs())
    };
    (0..loads.len()).min_by(|a, b| distance(*a).total_cmp(&distance(*b))).unwrap_or(0)
}

fn one(bench: &Bench<'_>, settings: &Settings, load: f64, policy: &str) -> Result<Measured> {
    let policy = format!("planner.policy={policy}");
    let args = ["planner.mode=on", &policy, "planner.min-requests=100", "planner.window=2s", "hot-copies.mode=off"];
    let mut args: Vec<String> = args.iter().flat_map(|set| ["--set".to_owned(), (*set).to_owned()]).collect();
    args.extend(["--workers".to_owned(), "1".to_owned()]);
    let site = Routed::start_many(&bench.programs, &args, NODES, &bench.name(), bench.folder)?;
    bench.order(site.admin, &["automation", "off"])?;
    let keys = keys(&site)?;
    let _capped: Vec<Capped> =
        site.process_ids().iter().map(|id| Capped::new(*id, settings.cpu)).collect::<Result<_>>()?;
    let (stop, errors) = (AtomicBool::new(false), AtomicU64::new(0));
    // Mean time between two requests of a client.
    let gap = Duration::from_secs_f64(settings.connections as f64 / load);
    let shares = zipf();
    std::thread::scope(|scope| {
        for seed in 0..settings.connections {
            let (site, keys, shares, stop, errors) = (&site, &keys, &shares, &stop, &errors);
            scope.spawn(move || {
                let mut rng = Rng::new(seed as u64 + 1);
                let mut client = Client::connect(site.entry).ok();
                let mut due = Instant::now();
                while let Some(client) = client.as_mut().filter(|_| !stop.load(Ordering::Relaxed)) {
                    wait_turn(&mut rng, &mut due, gap);
                    let at = rng.unit();
                    let key = &keys[shares.partition_point(|sum| *sum < at).min(KEYS - 1)];
                    if client.text(&[b"GET", key.as_bytes()]).is_err() {
                        errors.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        let watched = (|| {
            let before = watch(bench, &site, settings.phase)?;
            bench.order(site.admin, &["automation", "on"])?;
            // The planner observes, moves, and checks the effect, several times.
            pause(bench, settings.phase * 2)?;
            let after = watch(bench, &site, settings.phase)?;
            let history = admin::get(site.admin, "/api/v1/plan/history")?;
            let steps = |decision: &serde_json::Value| {
                decision["steps"]
                    .as_array()
                    .map_or(0, |steps| steps.iter().filter(|step| step["what"] == "key").count() as u64)
            };
            let moved = history["decisions"]
                .as_array()
                .map_or(0, |all| all.iter().filter(|decision| !decision["outcome"].is_null()).map(steps).sum());
            Ok(Measured { before, after, moved, errors: errors.load(Ordering::Relaxed) })
        })();
        stop.store(true, Ordering::Relaxed);
        watched
    })
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

/// Measures figure 1: rate and mean response time in milliseconds, up to a rate that the server cannot sustain.
fn by_rate(bench: &Bench<'_>, settings: &Settings) -> Result<Vec<(f64, f64)>> {
    let site =
        Routed::start_many(&bench.programs, &["--workers".to_owned(), "1".to_owned()], 1, &bench.name(), bench.folder)?;
    let _capped: Vec<Capped> =
        site.process_ids().iter().map(|id| Capped::new(*id, settings.cpu)).collect::<Result<_>>()?;
    let (mut rate, mut points) = (RATES.0, Vec::new());
    loop {
        ensure!(!bench.conduct.stop.load(Ordering::Relaxed), "interrupted");
        let run = load::start(&load::Settings {
            target: site.entry,
            threads: 1,
            connections: settings.connections,
            pipeline: 1000,
            pace: Pace::Open { rate },
            duration: settings.phase,
            mix: "get=1".parse()?,
            sizes: ValueSizes::fixed(64),
            keys: 1000,
            skew: Skew::Uniform,
            sharing: Sharing::Shared,
            prefix: "rate:".to_owned(),
            doubt: load::Doubt::Lasting,
            seed: 1,
        })?;
        let summary = run.finish()?;
        points.push((rate, summary.total.mean().as_secs_f64() * 1e3));
        if (summary.total.replies as f64) < rate * summary.elapsed.as_secs_f64() * 0.9 || points.len() > 40 {
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

/// Waits for a client's next request. Requests arrive at random. Lost time is not made up: a client that had to wait
/// sends its next request at once.
pub(super) fn wait_turn(rng: &mut Rng, due: &mut Instant, gap: Duration) {
    *due = (*due + gap.mul_f64(-(1.0 - rng.unit()).ln())).max(Instant::now());
    std::thread::sleep(due.saturating_duration_since(Instant::now()));
}

pub(super) fn pause(bench: &Bench<'_>, time: Duration) -> Result<()> {
    let end = Instant::now() + time;
    while Instant::now() < end {
        ensure!(!bench.conduct.stop.load(Ordering::Relaxed), "interrupted");
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// Returns the mean of the router's reports on each node, taken once a second.
fn watch(bench: &Bench<'_>, site: &Routed, time: Duration) -> Result<Vec<Node>> {
    pause(bench, Duration::from_secs(2))?;
    let mut sums = [Node { requests: 0.0, answer_us: 0.0 }; NODES];
    let seconds = time.as_secs().max(1);
    for _ in 0..seconds {
        pause(bench, Duration::from_secs(1))?;
        let load = admin::get(site.admin, "/api/v1/load")?;
        for (sum, address) in sums.iter_mut().zip(&site.addresses) {
            let name = address.to_string();
            let node = load["nodes"]
                .as_array()
                .and_then(|nodes| nodes.iter().find(|node| node["node"] == name.as_str()))
                .cloned();
            let node = node.with_context(|| format!("the router reports no load of {name}"))?;
            sum.requests += node["requests_per_second"].as_f64().unwrap_or(0.0) / seconds as f64;
            sum.answer_us += node["answer_us"].as_f64().unwrap_or(0.0) / seconds as f64;
        }
    }
    Ok(sums.to_vec())
}
