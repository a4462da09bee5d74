//! The router compared with other proxies: same nodes, same load, one worker thread each, one run.
//!
//! Rounds are interleaved and the order of the proxies rotates, so that a machine that slows down or gets busier does
//! not favour one proxy. The result is the median over the rounds.
//!
//! Every measurement is checked: the requests must have arrived at the nodes, by their command statistics, and every
//! GET must have found its key. A proxy with fast errors, or a load that died halfway, is no measurement.

mod find;
mod goals;
mod memory;
pub(crate) mod redis_benchmark;
mod report;
mod rows;
mod target;

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use switchyard_bench::client::{self, Client};
use switchyard_bench::process::{self, Process};

pub use self::find::Missing;
pub(crate) use self::find::find_envoy;
pub use self::goals::{Goal, Verdict};
pub use self::memory::Memory;
use self::rows::{Command, FLAT_NODES, flat_rows, gate_rows, median, open_rows, pool_rows};
pub use self::rows::{Row, Sample};
pub use self::target::Peer;
pub(crate) use self::target::envoy_config;
use self::target::{Recipe, Target};
use crate::procfs::{CpuReading, MachineReading, threads_of};

/// Settings of a run.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Path of the router's binary.
    pub switchyard: PathBuf,
    /// Further arguments of `serve` for our router.
    pub serve_args: Vec<String>,
    /// Variants of our router to measure, too: a name and further arguments of `serve`.
    pub variants: Vec<(String, Vec<String>)>,
    /// Whether our router is also measured with TLS clients.
    pub tls: bool,
    /// Path of predixy's binary, if the user has one.
    pub predixy: Option<PathBuf>,
    /// Names of the peers to measure; empty for all.
    pub only: Vec<String>,
    /// Measures only rows whose name contains this text.
    pub filter: Option<String>,
    /// Rounds per row.
    pub rounds: usize,
    /// Few rows and short measurements: a check that everything works, not a comparison.
    pub quick: bool,
    /// Measures only the gate: the proxy alone on one CPU.
    pub pinned_only: bool,
    /// Compares our router with itself, with few and many nodes, instead of with the peers.
    pub flat: bool,
    /// Compares our router with twemproxy, both with a configuration of this many pools.
    pub pools: Option<usize>,
    /// Whether missing peers may be installed.
    pub install: bool,
    /// The document whose tables are rewritten.
    pub out: Option<PathBuf>,
    /// Command line of this run, for the document.
    pub command_line: String,
    /// Set to end the run early.
    pub stop: Arc<AtomicBool>,
}

/// Keys per node: more than caches hold of 64-byte values, and few enough to fill the nodes in a second.
const KEYS: u64 = 100_000;
/// Maximum keys over all nodes, each of which has all of them.
const COPIES: u64 = 1_000_000;
/// Minimum requests of each client, because its connection is counted, too.
const REQUESTS_PER_CLIENT: u64 = 50;
/// Number of nodes, except in the test for a flat cost.
const NODES: usize = 2;
/// Maximum bytes of values per node; large values have fewer keys.
const FILL_BYTES: u64 = 160 << 20;

/// All results.
#[derive(Debug, Default)]
pub struct Results {
    /// Peers in the order of the tables.
    pub peers: Vec<Peer>,
    /// Rows in the order of the tables.
    pub rows: Vec<Row>,
    samples: HashMap<(Peer, Row), Vec<Sample>>,
    /// Memory, if measured.
    pub memory: Option<Vec<Memory>>,
    /// Peers that could not be measured.
    pub missing: Vec<Missing>,
    /// Descriptions of failed measurements.
    pub failures: Vec<String>,
    /// Reported version of each peer.
    pub versions: BTreeMap<Peer, String>,
    /// Completed rounds.
    pub rounds: usize,
    /// Pools of twemproxy's configuration, if one is used.
    pub pools: Option<usize>,
}

impl Results {
    fn add(&mut self, peer: Peer, row: Row, sample: Sample) {
        if !self.peers.contains(&peer) {
            self.peers.push(peer.clone());
        }
        if !self.rows.contains(&row) {
            self.rows.push(row);
        }
        self.samples.entry((peer, row)).or_default().push(sample);
    }

    fn samples(&self, peer: &Peer, row: Row) -> &[Sample] {
        self.samples.get(&(peer.clone(), row)).map_or(&[], Vec::as_slice)
    }

    /// Median requests per second.
    pub fn requests_per_second(&self, peer: &Peer, row: Row) -> Option<f64> {
        median(self.samples(peer, row).iter().map(|s| s.requests_per_second))
    }

    /// Median of the rounds' median latencies.
    pub fn p50_ms(&self, peer: &Peer, row: Row) -> Option<f64> {
        median(self.samples(peer, row).iter().map(|s| s.p50_ms))
    }

    /// Median of the rounds' 99th percentiles.
    pub fn p99_ms(&self, peer: &Peer, row: Row) -> Option<f64> {
        median(self.samples(peer, row).iter().map(|s| s.p99_ms))
    }

    /// Median CPU of the proxy per request.
    pub fn proxy_us(&self, peer: &Peer, row: Row) -> Option<f64> {
        median(self.samples(peer, row).iter().filter_map(|s| s.proxy_us))
    }

    /// Least and most CPU of the proxy per request.
    pub fn proxy_us_range(&self, peer: &Peer, row: Row) -> Option<(f64, f64)> {
        let values = || self.samples(peer, row).iter().filter_map(|s| s.proxy_us);
        Some((values().min_by(f64::total_cmp)?, values().max_by(f64::total_cmp)?))
    }

    /// Median CPU of proxy and redis-servers per request.
    pub fn total_us(&self, peer: &Peer, row: Row) -> Option<f64> {
        median(self.samples(peer, row).iter().map(|s| s.total_us))
    }

    /// Median and maximum share of the machine that other processes took during measurements.
    pub fn foreign(&self) -> Option<(f64, f64)> {
        let all = || self.samples.values().flatten().map(|s| s.foreign);
        Some((median(all())?, all().max_by(f64::total_cmp)?))
    }
}

/// Measures, prints, and rewrites the document. Returns the goals, for the exit code.
pub fn run(settings: &Settings) -> Result<Vec<Goal>> {
    ensure!(settings.rounds > 0, "at least one round is needed");
    let say = |text: &str| eprintln!("{text}");
    let benchmark = redis_benchmark::find()?;
    let redis = process::find_redis_server()?;
    process::raise_file_limit();
    let folder =
        tempfile::Builder::new().prefix("switchyard-bench-").tempdir().context("cannot create a temporary folder")?;
    let count =
        if settings.flat { FLAT_NODES.into_iter().max().unwrap_or(NODES) } else { NODES * settings.pools.unwrap_or(1) };
    let (nodes, addresses): (Vec<_>, Vec<_>) = (0..count)
        .map(|i| process::start_redis(&redis, &format!("node{i}"), folder.path()))
        .collect::<Result<Vec<_>>>()?
        .into_iter()
        .unzip();

    let mut bench = Bench {
        settings,
        benchmark,
        folder: folder.path(),
        nodes,
        addresses,
        targets: Vec::new(),
        rates: HashMap::new(),
        results: Results { pools: settings.pools, ..Results::default() },
        bar: ProgressBar::hidden(),
        cpus: two_cpus()?,
        machine_cpus: std::thread::available_parallelism().map_or(1.0, |n| n.get() as f64),
    };
    let recipes = bench.start_targets(&say);
    let wanted = |mut rows: Vec<Row>| {
        rows.retain(|row| settings.filter.as_ref().is_none_or(|text| row.to_string().contains(text.as_str())));
        rows
    };
    let rows = wanted(match (settings.flat, settings.pinned_only) {
        (true, _) => flat_rows(),
        _ if settings.pools.is_some() => pool_rows(),
        (false, true) => Vec::new(),
        (false, false) => open_rows(settings.quick),
    });
    let gate = wanted(if bench.cpus.is_some() && !settings.flat && settings.pools.is_none() {
        gate_rows()
    } else {
        Vec::new()
    });
    if bench.cpus.is_none() {
        let why = "this machine gives us one CPU; the gate needs two".to_owned();
        ensure!(!settings.pinned_only, "{why}");
        say(&why);
    }
    let cells = (rows.len() + gate.len()) * settings.rounds * bench.targets.len();
    bench.bar = progress_bar(cells as u64);
    bench.measure_rows(&rows)?;
    bench.measure_rows(&gate)?;
    if !settings.pinned_only && !settings.flat && settings.pools.is_none() && settings.filter.is_none() {
        bench.measure_memory(&recipes);
    }
    bench.bar.finish_and_clear();
    let results = std::mem::take(&mut bench.results);
    drop(bench); // ends all children before the tables are printed

    let goals = goals::judge(&results, &Peer::SWITCHYARD);
    print!("{}", report::text(&results, &goals));
    if settings.stop.load(Ordering::Relaxed) {
        bail!("interrupted; nothing was written");
    }
    if let Some(out) = &settings.out {
        report::write(out, settings, &results, &goals)?;
        eprintln!("wrote the tables to {}", out.display());
    }
    Ok(goals)
}

fn progress_bar(cells: u64) -> ProgressBar {
    let bar = ProgressBar::new(cells);
    let style = "{elapsed_precise} [{bar:30}] {pos}/{len} {msg} ({eta} left)";
    bar.set_style(
        ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "),
    );
    bar
}

/// Returns two usable CPUs: for everything else, and for the proxy.
fn two_cpus() -> Result<Option<(usize, usize)>> {
    let allowed = sched_getaffinity(None).context("cannot read which CPUs this process may use")?;
    let mut cpus = (0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu));
    Ok(cpus.next().zip(cpus.next()))
}

struct Bench<'a> {
    settings: &'a Settings,
    benchmark: PathBuf,
    folder: &'a Path,
    nodes: Vec<Process>,
    addresses: Vec<SocketAddr>,
    targets: Vec<Target>,
    /// Recent requests per second of a target in a row, which give the number of requests for the wanted time.
    rates: HashMap<(usize, Row), f64>,
    results: Results,
    bar: ProgressBar,
    cpus: Option<(usize, usize)>,
    /// CPUs of the machine. Read once, because a thread that is bound to one CPU sees only that one.
    machine_cpus: f64,
}

impl Bench<'_> {
    fn start_targets(&mut self, say: &dyn Fn(&str)) -> Vec<Recipe> {
        let settings = self.settings;
        let (others, mut missing) = if settings.flat {
            (Vec::new(), Vec::new())
        } else {
            find::find(settings.predixy.as_deref(), settings.install, say)
        };
        let ours = |variant: &str, more: &[String]| Recipe {
            peer: Peer::Switchyard { variant: variant.to_owned() },
            program: settings.switchyard.clone(),
            extra: settings.serve_args.iter().chain(more).cloned().collect(),
            tls: false,
            nodes: NODES,
            pools: None,
        };
        let mut recipes: Vec<_> = if settings.flat {
            FLAT_NODES.map(|nodes| Recipe { peer: Peer::before(nodes), nodes, ..ours("", &[]) }).into()
        } else {
            let by_tls = settings.tls.then(|| Recipe { tls: true, ..ours("by TLS", &[]) });
            let variants = settings.variants.iter().map(|(name, more)| ours(name, more));
            std::iter::once(ours("", &[])).chain(by_tls).chain(variants).chain(others).collect()
        };
        if let Some(pools) = settings.pools {
            recipes.retain(|recipe| matches!(recipe.peer, Peer::Switchyard { .. } | Peer::Twemproxy));
            missing.retain(|missing| missing.peer == Peer::Twemproxy);
            recipes.iter_mut().for_each(|recipe| (recipe.pools, recipe.nodes) = (Some(pools), self.addresses.len()));
        }
        let wanted = |peer: &Peer| settings.only.is_empty() || settings.only.contains(&peer.to_string());
        recipes.retain(|r| wanted(&r.peer));
        missing.retain(|m| wanted(&m.peer));
        let mut started = Vec::new();
        for recipe in recipes {
            self.empty_nodes();
            match recipe.start(&recipe.peer.to_string().replace(' ', "-"), &self.addresses, self.folder) {
                Ok(target) => {
                    self.results.peers.push(target.peer.clone());
                    self.results.versions.insert(target.peer.clone(), target.version.clone());
                    self.targets.push(target);
                    started.push(recipe);
                }
                Err(e) => missing.push(Missing { peer: recipe.peer, why: format!("{e:#}") }),
            }
        }
        for one in &missing {
            say(&format!("{} is left out: {}", one.peer, one.why));
        }
        self.results.missing = missing;
        started
    }

    /// Measures rows that are all pinned or all not.
    fn measure_rows(&mut self, rows: &[Row]) -> Result<()> {
        let Some(first) = rows.first() else {
            return Ok(());
        };
        let everywhere = sched_getaffinity(None).context("cannot read which CPUs this process may use")?;
        if let Some((shared, alone)) = self.cpus.filter(|_| first.pinned) {
            // Children inherit the binding: redis-benchmark is started from this thread.
            sched_setaffinity(None, &one_cpu(shared)).context("cannot bind this process to a CPU")?;
            self.bind_all(&one_cpu(shared), &one_cpu(alone))?;
        }
        let mut sizes: Vec<_> = rows.iter().map(|r| r.value).collect();
        sizes.dedup();
        for value in sizes {
            let keys = KEYS.min(FILL_BYTES / value as u64).min(COPIES / self.nodes.len() as u64);
            self.bar.set_message(format!("filling the nodes with values of {value} B"));
            for address in &self.addresses {
                Client::connect(*address)?.ok(&[b"FLUSHALL"])?;
                client::fill(*address, keys, &vec![b'x'; value], redis_benchmark::key)?;
            }
            for round in 0..self.settings.rounds {
                for row in rows.iter().filter(|r| r.value == value) {
                    if self.bar.is_hidden() {
                        // Without a terminal, a line per row shows the progress in a log.
                        eprintln!(
                            "round {}/{}: {row}{}",
                            round + 1,
                            self.settings.rounds,
                            if row.pinned { " (pinned)" } else { "" }
                        );
                    }
                    for i in 0..self.targets.len() {
                        if self.settings.stop.load(Ordering::Relaxed) {
                            return Ok(());
                        }
                        self.measure_cell((i + round) % self.targets.len(), *row, round, keys);
                    }
                }
                self.results.rounds = self.results.rounds.max(round + 1);
            }
        }
        if first.pinned {
            sched_setaffinity(None, &everywhere).context("cannot unbind this process from a CPU")?;
            self.bind_all(&everywhere, &everywhere)?;
        }
        Ok(())
    }

    fn bind_all(&self, nodes: &CpuSet, proxies: &CpuSet) -> Result<()> {
        let nodes = self.nodes.iter().map(|p| (p, nodes));
        let proxies = self.targets.iter().filter_map(|t| t.process.as_ref()).map(|p| (p, proxies));
        for (process, cpus) in nodes.chain(proxies) {
            for tid in threads_of(process.id())? {
                let tid = rustix::process::Pid::from_raw(tid as i32);
                sched_setaffinity(tid, cpus).with_context(|| format!("cannot bind {} to a CPU", process.name()))?;
            }
        }
        Ok(())
    }

    fn measure_cell(&mut self, index: usize, row: Row, round: usize, keys: u64) {
        let peer = self.targets[index].peer.clone();
        self.bar.set_message(format!("round {}/{}: {row}, {peer}", round + 1, self.settings.rounds));
        self.bar.inc(1);
        if row.pinned && peer == Peer::Direct {
            return; // there is no proxy to isolate
        }
        match self.measure(index, row, keys) {
            Ok(sample) => self.results.add(peer, row, sample),
            Err(_) if self.settings.stop.load(Ordering::Relaxed) => {}
            Err(e) => {
                let failure = format!("{row}, {peer}, round {}: {e:#}", round + 1);
                self.bar.suspend(|| eprintln!("{failure}"));
                self.results.failures.push(failure);
            }
        }
    }

    fn measure(&mut self, index: usize, row: Row, keys: u64) -> Result<Sample> {
        let target = &self.targets[index];
        let run = |requests| {
            redis_benchmark::run(&self.benchmark, target, &row, requests, keys, self.folder, &self.settings.stop)
        };
        let (seconds, warm_up) = if self.settings.quick { (0.5, 0.1) } else { (1.5, 0.3) };
        let rate = match self.rates.get(&(index, row)) {
            Some(rate) => *rate,
            None => {
                // The first guess is for a slow proxy; the warm-up corrects it.
                let guess = if row.clients == 1 { 10e3 } else { 60e3 * (row.pipeline as f64).sqrt() };
                run((guess * warm_up) as u64)?.requests_per_second
            }
        };
        let requests = ((rate * seconds) as u64).max(2000).max(row.clients as u64 * REQUESTS_PER_CLIENT);

        let arrived_before = self.arrived(row.command)?;
        let machine_before = MachineReading::now()?;
        let (proxy_before, nodes_before) = self.readings(index)?;
        let own_before = CpuReading::of(std::process::id())?;
        let outcome = run(requests)?;
        std::thread::sleep(Duration::from_millis(20)); // closing clients costs the proxy something, too
        let (proxy_after, nodes_after) = self.readings(index)?;
        let machine_after = MachineReading::now()?;
        let own = CpuReading::of(std::process::id())?.since(&own_before);
        let arrived = self.arrived(row.command)?;

        let sent = arrived.calls.saturating_sub(arrived_before.calls);
        let missed = arrived.misses.saturating_sub(arrived_before.misses);
        ensure!(
            sent >= requests,
            "of {requests} requests only {sent} reached the nodes: the proxy returned errors or lost them"
        );
        ensure!(row.command != Command::Get || missed == 0, "{missed} of {requests} GETs did not find their key");

        let proxy = proxy_after.zip(proxy_before).map(|(after, before)| after.since(&before));
        let nodes: Duration = nodes_after.iter().zip(&nodes_before).map(|(after, before)| after.since(before)).sum();
        let (busy, ended_children, elapsed) = machine_after.since(&machine_before);
        let ours = proxy.unwrap_or_default() + nodes + ended_children + own;
        self.rates.insert((index, row), outcome.requests_per_second);
        let per_request = |cpu: Duration| cpu.as_secs_f64() * 1e6 / requests as f64;
        Ok(Sample {
            requests_per_second: outcome.requests_per_second,
            p50_ms: outcome.p50_ms,
            p99_ms: outcome.p99_ms,
            proxy_us: proxy.map(per_request),
            total_us: per_request(proxy.unwrap_or_default() + nodes),
            foreign: busy.saturating_sub(ours).as_secs_f64() / (elapsed.as_secs_f64() * self.machine_cpus),
        })
    }

    fn readings(&self, index: usize) -> Result<(Option<CpuReading>, Vec<CpuReading>)> {
        let proxy = self.targets[index].process.as_ref().map(|p| CpuReading::with_children(p.id())).transpose();
        let proxy = proxy.with_context(|| format!("{} has ended", self.targets[index].peer))?;
        let nodes = self.nodes.iter().map(|n| CpuReading::of(n.id())).collect::<Result<_>>()?;
        Ok((proxy, nodes))
    }

    /// Returns the number of requests that arrived, by the nodes' statistics.
    fn arrived(&self, command: Command) -> Result<ArrivedCounts> {
        let mut sum = ArrivedCounts::default();
        for address in &self.addresses {
            let mut client = Client::connect(*address)?;
            sum.calls += command_calls(&client.text(&[b"INFO", b"commandstats"])?, command.name());
            sum.misses += info_field(&client.text(&[b"INFO", b"stats"])?, "keyspace_misses")
                .context("INFO stats has no keyspace_misses")?;
        }
        Ok(sum)
    }

    /// Empties the nodes, because a new router could not place their keys by any map: the load's keys are at all nodes,
    /// and a smaller fleet's at the wrong ones.
    fn empty_nodes(&mut self) {
        for address in &self.addresses {
            if let Err(e) = Client::connect(*address).and_then(|mut node| node.ok(&[b"FLUSHALL"])) {
                self.results.failures.push(format!("emptying {address}: {e:#}"));
            }
        }
    }

    fn measure_memory(&mut self, recipes: &[Recipe]) {
        let mut memory = Vec::new();
        self.empty_nodes();
        for recipe in recipes.iter().filter(|r| r.peer != Peer::Direct) {
            if self.settings.stop.load(Ordering::Relaxed) {
                return;
            }
            self.bar.set_message(format!("memory: {}", recipe.peer));
            match memory::measure(recipe, &self.addresses, self.folder) {
                Ok(one) => memory.push(one),
                Err(e) => self.results.failures.push(format!("memory of {}: {e:#}", recipe.peer)),
            }
        }
        self.results.memory = Some(memory);
    }
}

#[derive(Debug, Default, Clone, Copy)]
struct ArrivedCounts {
    calls: u64,
    misses: u64,
}

/// `cmdstat_get:calls=12,usec=...` of `INFO commandstats`; a command never called is not listed.
fn command_calls(info: &str, command: &str) -> u64 {
    let mut name = String::new();
    let _ = write!(name, "cmdstat_{command}:calls="); // writing to a String cannot fail
    info.lines().find_map(|l| l.strip_prefix(name.as_str())?.split(',').next()?.parse().ok()).unwrap_or(0)
}

fn info_field(info: &str, name: &str) -> Option<u64> {
    info.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':')?.trim().parse().ok())
}

fn one_cpu(cpu: usize) -> CpuSet {
    let mut set = CpuSet::new();
    set.set(cpu);
    set
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn info_output_is_parsed() {
        let info =
            "# Commandstats\r\ncmdstat_getex:calls=7,usec=1\r\ncmdstat_get:calls=12,usec=3,usec_per_call=0.25\r\n";
        assert_eq!(command_calls(info, "get"), 12);
        assert_eq!(command_calls(info, "set"), 0);
        assert_eq!(info_field("keyspace_hits:5\r\nkeyspace_misses:3\r\n", "keyspace_misses"), Some(3));
        assert_eq!(info_field("keyspace_hits:5\r\n", "keyspace_misses"), None);
    }
}
