//! A fleet of small nodes grows while it is filled: the autoscaler's threshold of memory adds a node before the last
//! one is full.
//!
//! The report's trigger is a response time that leaps once its servers swap. Here it is the memory itself, because no
//! server should get that far.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::json;
use switchyard_bench::client::Client;
use switchyard_bench::random::Rng;
use switchyard_bench::table::Table;

use super::super::published::autoscaling as says;
use super::super::watch::check_interrupted;
use super::super::{Bench, Section, measure, publish};
use super::grown::GrowingFleet;
use super::{MEMORY, NODES, Settings};
use crate::figure::{self, Line, Panel};
use crate::moves::site::keys_at;

const MARK: &str = "autoscaling-fill";
/// Threshold of used memory that adds a node, in percent.
const THRESHOLD: &str = "60";
/// Interval between samples of the number of nodes, in keys.
const LOOK: u64 = 100;

/// Interval between two points of a figure, whose axis has a number for each; in keys.
const SHOWN: u64 = 5000;

/// Progress after some keys.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(in crate::reproduce) struct Point {
    pub(in crate::reproduce) keys: u64,
    pub(in crate::reproduce) nodes: usize,
    /// Mean and maximum time of a SET since the previous point.
    mean_ms: f64,
    most_ms: f64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(in crate::reproduce) struct Measured {
    pub(in crate::reproduce) points: Vec<Point>,
    pub(in crate::reproduce) errors: u64,
    /// Acknowledged keys that are at no server.
    pub(in crate::reproduce) lost: i64,
}

pub(super) fn run(settings: &Settings) -> Result<()> {
    let Settings { keys, fill_rate, .. } = settings;
    let outcome = measure(
        &settings.conduct,
        &["fill"],
        |_| json!({"experiment": "autoscaling-fill", "keys": keys, "rate": fill_rate, "threshold": THRESHOLD, "memory": MEMORY}),
        |_| "a fleet grows while it is filled".to_owned(),
        |bench, _| one(bench, settings),
    )?;
    let runs = outcome.results.first().map_or(&[][..], Vec::as_slice);
    let mut table =
        Table::new(["round", "nodes", "from keys", "keys per node then", "longest SET since the previous row, ms"]);
    for (round, run) in runs.iter().enumerate() {
        let mut most = 0.0_f64;
        for (at, point) in run.points.iter().enumerate() {
            most = most.max(point.most_ms);
            if at == 0 || run.points[at - 1].nodes != point.nodes {
                let cells = [round as u64 + 1, point.nodes as u64, point.keys, point.keys / point.nodes.max(1) as u64];
                table.row(cells.map(|cell| cell.to_string()).into_iter().chain([format!("{most:.1}")]));
                most = 0.0;
            }
        }
    }
    let mut panels = Vec::new();
    if let Some(run) = runs.first() {
        let panel = |title: &str, y: &str, value: fn(&Point) -> f64| {
            let shown = run.points.iter().filter(|point| point.keys % SHOWN == 0);
            let points = shown.map(|point| (point.keys as f64 / 1000.0, value(point))).collect();
            let lines = vec![Line { name: "first round".to_owned(), points }];
            Panel { title: title.to_owned(), x: "thousands of keys".to_owned(), y: y.to_owned(), floor: None, lines }
        };
        panels.push(panel("Nodes", "nodes", |point| point.nodes as f64));
        panels.push(panel("Response time", "mean time of a SET, ms", |point| point.mean_ms));
    }
    let sum = |value: fn(&Measured) -> i64| runs.iter().map(value).sum::<i64>();
    let section = Section {
        notes: vec![
            format!(
                "The report, of nodes with 6 MB: \"{}\". Its threshold is a response time of 20 s.",
                says::THRESHOLD
            ),
            format!(
                "One node of {MEMORY} with `noeviction` at the start, at most {NODES}. One client writes {keys} keys of 64 characters with values of 1 to 128, {fill_rate} per second. \
                 `[autoscale]` has the policy `threshold` with `max-memory = {THRESHOLD}`, and `[autoscale.local]`. Requests that failed: {}. Keys that were lost: {}.",
                sum(|run| run.errors as i64),
                sum(|run| run.lost)
            ),
        ],
        tables: vec![("A node more".to_owned(), table)],
        figures: vec![(
            "autoscaling-fill".to_owned(),
            "Nodes and response time by the number of keys".to_owned(),
            figure::svg(&panels)?,
        )],
    };
    publish(&settings.conduct, MARK, &outcome, &section)
}

fn one(bench: &Bench<'_>, settings: &Settings) -> Result<Measured> {
    let most = NODES.to_string();
    let keys = [("max-nodes", &*most), ("max-memory", THRESHOLD), ("up-after", "1s"), ("up-cooldown", "1s")];
    let grown = GrowingFleet::start(
        bench,
        &keys,
        &["--maxmemory", MEMORY, "--maxmemory-policy", "noeviction", "--appendonly", "no"],
    )?;
    let mut client = Client::connect(grown.site.entry)?;
    let (mut rng, begun) = (Rng::new(1), Instant::now());
    let (mut points, mut errors, mut acknowledged) = (Vec::new(), 0, 0);
    let (mut sum, mut longest) = (Duration::ZERO, Duration::ZERO);
    let point = |keys: u64, nodes: usize, sum: Duration, longest: Duration| Point {
        keys,
        nodes,
        mean_ms: sum.as_secs_f64() * 1e3 / LOOK as f64,
        most_ms: longest.as_secs_f64() * 1e3,
    };
    for number in 0..settings.keys {
        check_interrupted(&bench.conduct.stop)?;
        std::thread::sleep(Duration::from_secs_f64(number as f64 / settings.fill_rate).saturating_sub(begun.elapsed()));
        let value = vec![b'x'; 1 + rng.below(128) as usize];
        let sent = Instant::now();
        match client.ok(&[b"SET", format!("{number:064}").as_bytes(), &value]) {
            Ok(()) => acknowledged += 1,
            Err(_) => errors += 1,
        }
        let took = sent.elapsed();
        (sum, longest) = (sum + took, longest.max(took));
        if (number + 1) % LOOK == 0 {
            points.push(point(number + 1, grown.standing()?.nodes, sum, longest));
            (sum, longest) = (Duration::ZERO, Duration::ZERO);
        }
    }
    // During a move, keys are at both of its ends.
    let end = Instant::now() + bench.conduct.timeout;
    let standing = loop {
        let standing = grown.standing()?;
        if standing.stage.is_none() {
            break standing;
        }
        ensure!(Instant::now() < end, "a change was not finished within {:?}: {standing:?}", bench.conduct.timeout);
        check_interrupted(&bench.conduct.stop)?;
        std::thread::sleep(Duration::from_millis(50));
    };
    let there: i64 = grown.servers(&standing).into_iter().map(keys_at).sum::<Result<_>>()?;
    Ok(Measured { points, errors, lost: acknowledged - there })
}
