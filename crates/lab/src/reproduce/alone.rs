//! A fleet without an operator: half of the load goes to some keys of one node, and periodically to keys of another
//! node. One run with the planner off, and one with it on.
//!
//! No paper has this. It is here because it needs the same servers, load and report as their experiments.

use std::collections::BTreeMap;
use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::json;
use switchyard_bench::client::Client;
use switchyard_bench::random::Rng;
use switchyard_bench::table::Table;
use switchyard_bench::wire::Reply;

use super::makris::pause;
use super::{Bench, Conduct, Section, measure, publish, written};
use crate::moves::admin;
use crate::moves::site::Routed;

const MARK: &str = "planner-alone";
const NODES: usize = 4;
const HOT: usize = 8;
const COLD: u64 = 20_000;
const WRITES: f64 = 0.4;

/// Number of runs with a written key.
const WRITTEN_ROUNDS: u32 = 5;

/// Seconds after a change of the hot keys that do not count, because the planner must see it and move.
const SETTLES: u64 = 15;

/// Settings of the experiment.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Common settings.
    pub conduct: Conduct,
    /// Share of a processor for each server.
    pub cpu: f64,
    /// Connections of the load.
    pub connections: usize,
    /// Time for which the same keys are hot.
    pub change: Duration,
    /// Number of sets of hot keys.
    pub changes: u32,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Measured {
    /// For each second: seconds since the last change, and requests of the fullest node over the mean.
    uneven: Vec<(u64, f64)>,
    rps: f64,
    errors: u64,
    bytes_moved: u64,
    keys_moved: u64,
    moves: u64,
}

/// Does the missing measurements, prints all, and rewrites the section of the document.
///
/// # Errors
/// If a server cannot be started, or the user interrupts.
pub fn run(settings: &Settings) -> Result<()> {
    let Settings { conduct, cpu, connections, change, changes } = settings;
    let modes = ["off", "on"];
    let outcome = measure(
        conduct,
        &modes,
        |mode| json!({"experiment": "alone", "mode": mode, "cpu": cpu, "connections": connections, "change": change.as_secs(), "changes": changes}),
        |mode| format!("planner {mode}"),
        |bench, mode| one(bench, settings, mode),
    )?;
    let mut table = Table::new([
        "planner",
        "max/mean, median",
        "seconds at 1.2 or less",
        "requests/s",
        "errors",
        "moves",
        "keys moved",
        "bytes moved",
    ]);
    for (mode, results) in modes.iter().zip(&outcome.results) {
        for run in results {
            let mut settled: Vec<f64> =
                run.uneven.iter().filter(|(since, _)| *since >= SETTLES).map(|(_, uneven)| *uneven).collect();
            settled.sort_by(f64::total_cmp);
            let good = settled.iter().filter(|uneven| **uneven <= 1.2).count() * 100 / settled.len().max(1);
            table.row([
                (*mode).to_owned(),
                format!("{:.2}", settled.get(settled.len() / 2).copied().unwrap_or_default()),
                format!("{good} %"),
                format!("{:.0}", run.rps),
                run.errors.to_string(),
                run.moves.to_string(),
                run.keys_moved.to_string(),
                run.bytes_moved.to_string(),
            ]);
        }
    }
    let notes = vec![format!(
        "{NODES} servers with {cpu} of a processor each, {connections} connections in a closed loop, {:.0} % writes. Half of the load goes to {HOT} keys of one node; every {} s others of \
         another node take their place, {changes} times. The first {SETTLES} s after a change do not count. Hot copies are off.",
        WRITES * 100.0,
        change.as_secs()
    )];
    let rounds: Vec<u32> = (1..=WRITTEN_ROUNDS).collect();
    let written = measure(
        conduct,
        &rounds,
        |round| json!({"experiment": "written-over-capacity", "cpu": cpu, "connections": connections, "round": round}),
        |round| format!("a key that is written, round {round}"),
        |bench, _| written::one(bench, settings),
    )?;
    let mut relocated = Table::new(["round", "the key has moved after, s", "errors"]);
    for (round, runs) in rounds.iter().zip(&written.results) {
        for run in runs {
            relocated.row([round.to_string(), format!("{:.1}", run.relocated), run.errors.to_string()]);
        }
    }
    let tables = vec![("A fleet left alone".to_owned(), table), (written::TITLE.to_owned(), relocated)];
    publish(conduct, MARK, &outcome, &Section { notes, tables, figures: Vec::new() })
}

fn one(bench: &Bench<'_>, settings: &Settings, mode: &str) -> Result<Measured> {
    let mode = format!("planner.mode={mode}");
    let args = ["--set", &mode, "--set", "planner.min-requests=500", "--set", "hot-copies.mode=off", "--workers", "1"]
        .map(str::to_owned);
    let site = Routed::start_many(&bench.programs, &args, NODES, &bench.name(), bench.folder)?;
    let sets = sets(&site, settings.changes as usize)?;
    let _capped = bench.cap_all(&site.process_ids(), settings.cpu)?;
    let (stop, errors, done, hot) =
        (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0), RwLock::new(&sets[0]));
    std::thread::scope(|scope| {
        for seed in 0..settings.connections {
            let (site, hot, stop, errors, done) = (&site, &hot, &stop, &errors, &done);
            scope.spawn(move || {
                let mut rng = Rng::new(seed as u64 + 1);
                let Ok(mut client) = Client::connect(site.entry) else { return };
                while !stop.load(Ordering::Relaxed) {
                    let key = match rng.unit() < 0.5 {
                        true => {
                            hot.read().map_or_else(|_| String::new(), |hot| hot[rng.below(HOT as u64) as usize].clone())
                        }
                        false => format!("cold:{}", rng.below(COLD)),
                    };
                    let outcome = match rng.unit() < WRITES {
                        true => client.ok(&[b"SET", key.as_bytes(), &[b'x'; 64]]),
                        false => client
                            .call(&[b"GET", key.as_bytes()], |reply| matches!(reply, Reply::Error(_)))
                            .and_then(|is_error| {
                                anyhow::ensure!(!is_error, "an error");
                                Ok(())
                            }),
                    };
                    errors.fetch_add(u64::from(outcome.is_err()), Ordering::Relaxed);
                    done.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let began = Instant::now();
        let watched = (|| {
            let mut uneven = Vec::new();
            for set in &sets {
                if let Ok(mut hot) = hot.write() {
                    *hot = set;
                }
                for second in 1..=settings.change.as_secs() {
                    pause(bench, Duration::from_secs(1))?;
                    let load = admin::get(site.admin, "/api/v1/load")?;
                    let rates: Vec<f64> = load["nodes"]
                        .as_array()
                        .into_iter()
                        .flatten()
                        .map(|node| node["requests_per_second"].as_f64().unwrap_or(0.0))
                        .collect();
                    let mean = rates.iter().sum::<f64>() / rates.len().max(1) as f64;
                    uneven.push((second, rates.iter().copied().fold(0.0, f64::max) / mean.max(1e-9)));
                }
            }
            Ok::<_, anyhow::Error>(uneven)
        })();
        stop.store(true, Ordering::Relaxed);
        let report = admin::report(site.admin)?;
        let ended: Vec<&serde_json::Value> = report["ended"].as_array().into_iter().flatten().collect();
        let sum = |field: &str| ended.iter().filter_map(|one| one[field].as_u64()).sum();
        Ok(Measured {
            uneven: watched?,
            rps: done.load(Ordering::Relaxed) as f64 / began.elapsed().as_secs_f64(),
            errors: errors.load(Ordering::Relaxed),
            bytes_moved: sum("bytes_moved"),
            keys_moved: sum("keys_moved"),
            moves: ended.len() as u64,
        })
    })
}

/// Returns sets of hot keys: each set is of one node, and the next one of another.
fn sets(site: &Routed, count: usize) -> Result<Vec<Vec<String>>> {
    let mut through = Client::connect(site.entry)?;
    let mut nodes: Vec<Client> =
        site.addresses.iter().map(|address| Client::connect(*address)).collect::<Result<_>>()?;
    let mut of_node: BTreeMap<usize, Vec<String>> = BTreeMap::new();
    let needed = HOT * count.div_ceil(NODES);
    let mut number = 0_u64;
    while of_node.len() < NODES || of_node.values().any(|keys| keys.len() < needed) {
        let key = format!("hot:{number}");
        number += 1;
        through.ok(&[b"SET", key.as_bytes(), b"x"])?;
        for (at, node) in nodes.iter_mut().enumerate() {
            if node.integer(&[b"EXISTS", key.as_bytes()])? == 1 {
                of_node.entry(at).or_default().push(key.clone());
            }
        }
    }
    Ok((0..count).map(|at| of_node[&(at % NODES)][at / NODES * HOT..][..HOT].to_vec()).collect())
}
