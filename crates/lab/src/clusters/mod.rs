//! The router in front of a cluster: CPU per request, and requests during changes of the cluster.
//!
//! CPU rather than throughput, because six servers on the test machine would limit the throughput. All proxies have one
//! worker thread, the same keys and the same load, and alternate in one run.

mod events;
mod site;

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, Result, ensure};
use switchyard_bench::client;
use switchyard_bench::process::{self, Process};
use switchyard_bench::table::Table;

use self::site::{Members, PRIMARIES, Proxy};
use crate::document::{replace_between_marks, today};
use crate::moves::site::{Programs, version_of};
use crate::peers;
use crate::peers::redis_benchmark;
use crate::procfs::{CpuReading, describe_machine};
use crate::reproduce::spread::Spread;

const CPU_MARK: &str = "bench-clusters-cpu";
const EVENTS_MARK: &str = "bench-clusters-events";
/// Keys. Each has 64 bytes.
const KEYS: u64 = 100_000;

/// Settings of a run.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Path of the router's binary.
    pub switchyard: PathBuf,
    /// Server program, if not the installed one.
    pub server: Option<PathBuf>,
    /// Rounds. Each has all rows and proxies.
    pub rounds: usize,
    /// Requests of a measurement of CPU.
    pub requests: u64,
    /// Seconds of load before and during each change of the cluster.
    pub seconds: u64,
    /// Whether Envoy may be installed.
    pub install: bool,
    /// The document whose sections are rewritten.
    pub out: Option<PathBuf>,
    /// Command line of this run, for the document.
    pub command_line: String,
    /// Set to end the run early.
    pub stop: Arc<AtomicBool>,
}

impl Settings {
    fn check_interrupted(&self) -> Result<()> {
        ensure!(!self.stop.load(Ordering::Relaxed), "interrupted; nothing was written");
        Ok(())
    }
}

/// One load of redis-benchmark.
#[derive(Debug, Clone, Copy)]
struct Row {
    title: &'static str,
    /// The command's words; `__rand_int__` is replaced by a number below [`KEYS`].
    words: &'static [&'static str],
    pipeline: u32,
    /// Greatest CPU of the router in front of the cluster, as a multiple of that in front of nodes.
    goal: f64,
}

const KEY: &str = "key:__rand_int__";
const VALUE: &str = "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx";
const ROWS: [Row; 5] = [
    Row { title: "GET, 50 clients", words: &["GET", KEY], pipeline: 1, goal: 1.03 },
    Row { title: "GET, 50 clients, pipelines of 16", words: &["GET", KEY], pipeline: 16, goal: 1.03 },
    Row { title: "SET, 50 clients", words: &["SET", KEY, VALUE], pipeline: 1, goal: 1.03 },
    Row { title: "SET, 50 clients, pipelines of 16", words: &["SET", KEY, VALUE], pipeline: 16, goal: 1.03 },
    Row {
        title: "MGET of 10 keys, 50 clients",
        words: &["MGET", KEY, KEY, KEY, KEY, KEY, KEY, KEY, KEY, KEY, KEY],
        pipeline: 1,
        goal: 1.4,
    },
];

/// Measures, prints, and rewrites the sections of the document.
///
/// # Errors
/// If a program is missing or a server fails, or the user interrupts.
pub fn run(settings: &Settings) -> Result<()> {
    let programs = Programs::find(&settings.switchyard, settings.server.as_deref())?;
    let folder = tempfile::Builder::new()
        .prefix("switchyard-clusters-")
        .tempdir()
        .context("cannot create a temporary folder")?;
    let members = Members::start(&programs, folder.path())?;
    let version = version_of(members.addresses[0])?;
    let cpu = cpu(settings, &programs, members, folder.path())?;
    print!("{}", cpu.to_text());
    let events = events::run(settings, &programs, folder.path())?;
    print!("\n{}", events.to_text());
    let Some(out) = &settings.out else { return Ok(()) };
    let head = format!(
        "Measured on {} by `{}` on: {}. Servers: {version}, {PRIMARIES} primaries with a replica each.",
        today(),
        settings.command_line,
        describe_machine()
    );
    let mut document = fs::read_to_string(out).with_context(|| format!("cannot read {}", out.display()))?;
    let rounds = settings.rounds;
    let sections = [
        (CPU_MARK, format!("{head} Median (range) of {rounds} rounds.\n\n{}", cpu.to_markdown())),
        (EVENTS_MARK, format!("{head}\n\n{}", events.to_markdown())),
    ];
    for (mark, section) in sections {
        document = replace_between_marks(&document, mark, &section)
            .with_context(|| format!("cannot rewrite {}", out.display()))?;
    }
    fs::write(out, document).with_context(|| format!("cannot write {}", out.display()))
}

/// Measures the CPU per request of the proxies.
fn cpu(settings: &Settings, programs: &Programs, members: Members, folder: &Path) -> Result<Table> {
    let benchmark = redis_benchmark::find()?;
    let nodes: Vec<(Process, SocketAddr)> = (0..PRIMARIES)
        .map(|number| process::start_redis(&programs.server, &format!("node-{number}"), folder))
        .collect::<Result<_>>()?;
    // Members have a replica each, which uses the processors during a SET. Both proxies get the same.
    let replicas: Vec<(Process, SocketAddr)> = (0..PRIMARIES)
        .map(|number| process::start_redis(&programs.server, &format!("node-replica-{number}"), folder))
        .collect::<Result<_>>()?;
    for ((_, replica), (_, node)) in replicas.iter().zip(&nodes) {
        let port = node.port().to_string();
        client::Client::connect(*replica)?.ok(&[b"REPLICAOF", b"127.0.0.1", port.as_bytes()])?;
    }
    let state = folder.join("nodes-state").to_string_lossy().into_owned();
    let of_nodes = nodes.iter().flat_map(|(_, address)| ["--node".to_owned(), address.to_string()]);
    let of_nodes: Vec<String> = of_nodes.chain(["--state-dir".to_owned(), state]).collect();
    let of_cluster = ["--storage-cluster".to_owned(), members.addresses[0].to_string()];
    let mut proxies = vec![
        ("switchyard, nodes", Proxy::switchyard(programs, "router-nodes", &of_nodes, folder)?),
        ("switchyard, cluster", Proxy::switchyard(programs, "router-cluster", &of_cluster, folder)?),
    ];
    match peers::find_envoy(settings.install, &|text| eprintln!("{text}")) {
        Ok(program) => proxies.push(("envoy, cluster", Proxy::envoy(&program, &members, folder)?)),
        Err(error) => eprintln!("envoy is left out: {error:#}"),
    }
    for (_, proxy) in &proxies[..2] {
        client::fill(proxy.address, KEYS, VALUE.as_bytes(), redis_benchmark::key)?;
    }
    let mut used: Vec<Vec<Vec<f64>>> = vec![vec![Vec::new(); proxies.len()]; ROWS.len()];
    for round in 0..settings.rounds {
        for (at_row, row) in ROWS.iter().enumerate() {
            // The order rotates, so that a machine whose speed changes favours no proxy.
            for turn in 0..proxies.len() {
                settings.check_interrupted()?;
                let at = (round + turn) % proxies.len();
                let (name, proxy) = &proxies[at];
                let us = measure(settings, &benchmark, row, proxy, folder)?;
                eprintln!("round {}: {}, {name}: {us:.2} µs", round + 1, row.title);
                used[at_row][at].push(us);
            }
        }
    }
    let names = proxies.iter().map(|(name, _)| format!("{name}, µs"));
    let mut table = Table::new(
        std::iter::once("CPU of the proxy per request".to_owned())
            .chain(names)
            .chain(["cluster : nodes".to_owned(), "goal".to_owned()])
            .chain((proxies.len() > 2).then(|| "switchyard : envoy".to_owned())),
    );
    for (row, used) in ROWS.iter().zip(&used) {
        let shown = |spread: Option<Spread>| spread.map_or_else(String::new, |s| s.text(|value| format!("{value:.2}")));
        let spread = |values: &[f64]| shown(Spread::of(values.iter().copied()));
        let ratio =
            |one: &[f64], other: &[f64]| shown(Spread::of(one.iter().zip(other).map(|(one, other)| one / other)));
        table.row(
            std::iter::once(row.title.to_owned())
                .chain(used.iter().map(|values| spread(values)))
                .chain([ratio(&used[1], &used[0]), format!("at most {}", row.goal)])
                .chain(used.get(2).map(|envoy| ratio(&used[1], envoy))),
        );
    }
    Ok(table)
}

/// Returns the CPU of a proxy per request, in microseconds.
fn measure(settings: &Settings, benchmark: &Path, row: &Row, proxy: &Proxy, folder: &Path) -> Result<f64> {
    let requests = if row.pipeline > 1 { settings.requests * 4 } else { settings.requests };
    let mut command = Command::new(benchmark);
    command.args(["-h", "127.0.0.1", "-p", &proxy.address.port().to_string(), "--csv", "-c", "50"]);
    command.args(["-n", &requests.to_string(), "-r", &KEYS.to_string(), "-P", &row.pipeline.to_string()]);
    command.args(row.words);
    let before = CpuReading::of(proxy.process.id())?;
    redis_benchmark::measure(&command, &row.words.join(" "), folder, &settings.stop)?;
    let used = CpuReading::of(proxy.process.id())?.since(&before);
    Ok(used.as_secs_f64() * 1e6 / requests as f64)
}
