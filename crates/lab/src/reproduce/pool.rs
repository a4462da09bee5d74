//! Effect on clients while a sixth server joins a pool of twemproxy's configuration with five. Users of twemproxy have
//! requested such joins.
//!
//! No paper has this. Only the time before the join is compared with the time of the join: the same router, servers and
//! load.

use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use serde_json::json;
use switchyard_bench::process::{self, Process};
use switchyard_bench::table::Table;

use super::autoscaling::{keys, load, moves_of};
use super::spread::Spread;
use super::watch::{for_a_while, until_done};
use super::{Bench, Conduct, Section, measure, publish};
use crate::moves::generator::Run;
use crate::moves::site::keys_at;

const MARK: &str = "pool-joins";
const SERVERS: usize = 5;

/// Settings of the experiment.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Common settings.
    pub conduct: Conduct,
    /// Keys of the pool.
    pub keys: u64,
    /// Requests per second.
    pub rate: f64,
    /// Connections of the load.
    pub connections: usize,
    /// Duration of the load before the join.
    pub control: Duration,
}

/// Results of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Measured {
    seconds: f64,
    keys_moved: i64,
    control_p99_ms: f64,
    join_p99_ms: f64,
    longest_gap_ms: f64,
    errors: u64,
    wrong_after: u64,
}

/// Does the missing measurements, prints all, and rewrites the section of the document.
///
/// # Errors
/// If a server cannot be started, or the user interrupts.
pub fn run(settings: &Settings) -> Result<()> {
    let Settings { conduct, keys, rate, connections, control } = settings;
    let outcome = measure(
        conduct,
        &["pool"],
        |_| json!({"experiment": MARK, "keys": keys, "rate": rate, "connections": connections, "control": control.as_secs_f64()}),
        |_| "a sixth server joins a pool".to_owned(),
        |bench, _| one(bench, settings),
    )?;
    let mut table = Table::new([
        "takes, s",
        "keys moved",
        "p99 before, ms",
        "p99 during the join, ms",
        "ratio",
        "longest gap, ms",
        "errors",
    ]);
    let runs: Vec<Measured> = outcome.results.iter().flatten().cloned().collect();
    let text = |value: fn(&Measured) -> f64, digits: usize| {
        Spread::of(runs.iter().map(value)).map_or(String::new(), |spread| spread.text(|v| format!("{v:.digits$}")))
    };
    table.row([
        text(|m| m.seconds, 1),
        text(|m| m.keys_moved as f64, 0),
        text(|m| m.control_p99_ms, 2),
        text(|m| m.join_p99_ms, 2),
        text(|m| m.join_p99_ms / m.control_p99_ms.max(1e-9), 2),
        text(|m| m.longest_gap_ms, 1),
        runs.iter().map(|run| run.errors).sum::<u64>().to_string(),
    ]);
    let wrong: u64 = runs.iter().map(|run| run.wrong_after).sum();
    let section = Section {
        notes: vec![format!(
            "{keys} keys at {SERVERS} servers of a pool with `hash: fnv1a_64` and `distribution: ketama`; {rate} requests per second by {connections} connections, 10 % SET. The sixth server \
             joins by `switchyard nodes add --rebalance`. At the end each key was read: {wrong} were wrong."
        )],
        tables: vec![("A sixth server joins".to_owned(), table)],
        figures: Vec::new(),
    };
    publish(conduct, MARK, &outcome, &section)
}

fn one(bench: &Bench<'_>, settings: &Settings) -> Result<Measured> {
    let name = bench.name();
    let start = |number: usize| process::start_redis(&bench.programs.server, &format!("{name}-{number}"), bench.folder);
    let (_servers, addresses): (Vec<Process>, Vec<SocketAddr>) =
        (0..SERVERS).map(start).collect::<Result<Vec<_>>>()?.into_iter().unzip();
    let (entry, admin) = (process::free_address()?, process::free_address()?);
    let lines: String = addresses.iter().map(|address| format!("   - {address}:1\n")).collect();
    let pool = format!(
        "pool:\n  listen: {entry}\n  hash: fnv1a_64\n  distribution: ketama\n  redis: true\n  servers:\n{lines}"
    );
    let file = bench.folder.join(format!("{name}.yml"));
    std::fs::write(&file, pool).with_context(|| format!("cannot write {}", file.display()))?;
    let mut command = Command::new(&bench.programs.switchyard);
    command.args(["serve", "--workers", "1", "--admin", &admin.to_string(), "--twemproxy-config"]).arg(&file);
    command.arg("--state-dir").arg(bench.folder.join(format!("{name}-state")));
    let mut router = Process::start(&format!("{name}-router"), &command, bench.folder)?;
    router.wait_ready(entry)?;

    let keys = keys(0, settings.keys);
    keys.fill(|_| entry, &|_| {})?;
    let run = Run::start(&load(entry, &keys, settings.connections, Some(settings.rate)))?;
    for_a_while(&run, settings.control / 4, &bench.conduct.stop)?;
    let (control, _) = for_a_while(&run, settings.control, &bench.conduct.stop)?;
    let (_sixth, address) = start(SERVERS)?;
    run.take();
    let begun = Instant::now();
    let text = bench.order(admin, &["nodes", "add", &address.to_string(), "--rebalance", "--json"])?;
    let watched = until_done(&run, admin, &moves_of(&text)?, begun, bench.conduct.timeout, &bench.conduct.stop)?;
    run.finish()?;
    let tally = &watched.counts.tally;
    Ok(Measured {
        seconds: watched.took.as_secs_f64(),
        keys_moved: keys_at(address)?,
        control_p99_ms: control.tally.quantile(0.99).as_secs_f64() * 1e3,
        join_p99_ms: watched.latency_ms(0.99),
        longest_gap_ms: watched.longest_gap_ms(),
        errors: tally.errors + tally.wrong + tally.unanswered + tally.disconnects,
        wrong_after: keys.count_wrong(|_| entry)?,
    })
}
