//! Cost of moving slots, and its effect on clients: the router's moves compared with `redis-cli --cluster reshard`, and
//! with `CLUSTER MIGRATESLOTS` if the servers have it, on a Redis Cluster with the same data, load and machine, in one
//! run.
//!
//! Everything is measured from outside, over sockets and /proc. Both sides move the same slots between two servers of
//! the same version with the same keys, under the same generator at the same rate.

pub mod admin;
mod adoption;
mod big;
pub(crate) mod generator;
mod journal;
mod limit;
mod report;
pub(crate) mod site;
pub mod slot;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use switchyard_bench::random::{Popularity, YCSB_THETA};

pub use self::generator::{Counts, Keys, Layout, Run};
use self::limit::Limit;
use self::site::{Cluster, ClusterMove, Journal, Programs, Routed, keys_at, version_of};
use self::slot::SLOTS;
use crate::procfs::{MachineReading, resident_bytes};

/// A part of the measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Moves without load: keys and bytes per second.
    Fast,
    /// Moves under load: effect on clients.
    Unnoticed,
    /// Moves under writes to the moving slots: whether they finish.
    Converges,
    /// A big hash moves while it is read and written: longest hold of a command.
    Big,
    /// Cost of the wait for the disk.
    Journal,
    /// Adoption of placement rules: keys per second, and effect on clients.
    Adoption,
}

impl Part {
    /// All parts, with their names on the command line.
    pub const ALL: [(Self, &'static str); 6] = [
        (Self::Fast, "fast"),
        (Self::Unnoticed, "unnoticed"),
        (Self::Converges, "converges"),
        (Self::Big, "big"),
        (Self::Journal, "journal"),
        (Self::Adoption, "adoption"),
    ];
}

/// Settings of a run.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Path of the router's binary.
    pub switchyard: PathBuf,
    /// Path of the server program, if not the installed one.
    pub server: Option<PathBuf>,
    /// Further arguments of `serve`.
    pub serve_args: Vec<String>,
    /// Goal (`--goal`) of moves under load; without load it is `fast`.
    pub goal: String,
    /// Parts to measure.
    pub parts: Vec<Part>,
    /// Keys of 64 B; larger values have fewer.
    pub keys: u64,
    /// Measures only the peer and the floor, not our own moves.
    pub baseline_only: bool,
    /// Values of `--cluster-pipeline` to try.
    pub pipelines: Vec<u32>,
    /// Duration of the load before a move and again after it, as the reference.
    pub control: Duration,
    /// Load as a share of the capacity, 0 to 1.
    pub load: f64,
    /// Connections of the load.
    pub connections: usize,
    /// Writes per second in convergence tests.
    pub writes: f64,
    /// Number of convergence tests.
    pub repeats: u32,
    /// The document whose section is rewritten.
    pub out: Option<PathBuf>,
    /// Command line of this run, for the document.
    pub command_line: String,
    /// Set to end the run early.
    pub stop: Arc<AtomicBool>,
}

/// Sizes of values in bytes, with the divisor for the number of keys.
const SIZES: [(usize, u64); 3] = [(64, 1), (1024, 5), (65_536, 200)];
/// Minimum keys per slot: a million keys in all slots of a cluster are 61 per slot.
const KEYS_PER_SLOT: u64 = 60;
/// Maximum duration of a move.
const TIMEOUT: Duration = Duration::from_secs(900);

/// Speed of one kind of move, without load.
#[derive(Debug, Clone)]
struct Speed {
    size: usize,
    way: String,
    slots: u16,
    keys: u64,
    took: Duration,
    /// Cost of our own moves.
    cost: Option<Cost>,
}

#[derive(Debug, Clone, Copy)]
struct Cost {
    memory_before: u64,
    memory_peak: u64,
    /// Bytes of the journal.
    journal: u64,
    /// Number of disk syncs.
    syncs: u64,
}

impl Speed {
    fn keys_per_second(&self) -> f64 {
        self.keys as f64 / self.took.as_secs_f64()
    }
}

/// Observations of clients, without and with a move.
#[derive(Debug, Clone)]
struct LoadedMove {
    way: String,
    rate: f64,
    capacity: f64,
    /// Before the move and after it.
    control: Counts,
    control_time: Duration,
    moving: Counts,
    moving_time: Duration,
    /// Duration of the same move without load.
    unloaded: Option<Duration>,
    /// Keys without their last value afterwards.
    wrong_after: u64,
    complaints: Vec<String>,
}

/// Moves under writes.
#[derive(Debug, Clone, Default)]
struct ConvergenceTest {
    tried: u32,
    done: u32,
    rate: f64,
    keys: u64,
    times: Vec<Duration>,
    errors: u64,
    wrong: u64,
    failures: Vec<String>,
}

/// All results.
#[derive(Debug, Default)]
pub struct Results {
    version: String,
    speeds: Vec<Speed>,
    limits: Vec<(usize, Limit)>,
    noticed: Vec<LoadedMove>,
    converged: Option<ConvergenceTest>,
    big: Option<big::BigMove>,
    kept: Vec<journal::Throughput>,
    adoptions: Vec<adoption::Adoptions>,
    failures: Vec<String>,
    foreign: Option<f64>,
}

impl Results {
    /// Descriptions of failed measurements.
    pub fn failures(&self) -> &[String] {
        &self.failures
    }

    /// The fastest `redis-cli --cluster reshard` with values of this size.
    fn best_reshard(&self, size: usize) -> Option<&Speed> {
        let of_size = self.speeds.iter().filter(|s| s.size == size && s.way.starts_with("redis-cli"));
        of_size.max_by(|a, b| a.keys_per_second().total_cmp(&b.keys_per_second()))
    }
}

struct Bench<'a> {
    settings: &'a Settings,
    programs: Programs,
    /// Whether the servers have `CLUSTER MIGRATESLOTS`.
    migrateslots: bool,
    folder: &'a Path,
    bar: ProgressBar,
    results: Results,
    sites: u32,
}

/// Measures, prints, and rewrites the section of the document.
pub fn run(settings: &Settings) -> Result<Results> {
    ensure!(settings.keys >= 200, "--keys must be at least 200");
    let programs = Programs::find(&settings.switchyard, settings.server.as_deref())?;
    switchyard_bench::process::raise_file_limit();
    let folder =
        tempfile::Builder::new().prefix("switchyard-moves-").tempdir().context("cannot create a temporary folder")?;
    let migrateslots = programs.has_migrateslots(folder.path())?;
    let bar = ProgressBar::new_spinner();
    bar.set_style(
        ProgressStyle::with_template("{elapsed_precise} {spinner} {msg}")
            .unwrap_or_else(|_| ProgressStyle::default_spinner()),
    );
    bar.enable_steady_tick(Duration::from_millis(200));
    let (folder, results) = (folder.path(), Results::default());
    let mut bench = Bench { settings, programs, migrateslots, folder, bar, results, sites: 0 };
    let wants = |part| settings.parts.contains(&part);
    if wants(Part::Fast) {
        for (size, fewer) in SIZES {
            bench.fast(size, (settings.keys / fewer).max(200))?;
        }
    }
    if wants(Part::Unnoticed) {
        bench.unnoticed()?;
    }
    if wants(Part::Converges) && !settings.baseline_only {
        bench.converges()?;
    }
    if wants(Part::Big) && !settings.baseline_only {
        bench.big()?;
    }
    if wants(Part::Journal) && !settings.baseline_only {
        bench.journal()?;
    }
    if wants(Part::Adoption) && !settings.baseline_only {
        bench.adoption()?;
    }
    bench.bar.finish_and_clear();
    let results = bench.results;
    print!("{}", report::text(settings, &results));
    if settings.stop.load(Ordering::Relaxed) {
        bail!("interrupted; nothing was written");
    }
    if let Some(out) = &settings.out {
        report::write(out, settings, &results)?;
        eprintln!("wrote the section to {}", out.display());
    }
    Ok(results)
}

impl Bench<'_> {
    fn print(&self, text: String) {
        if self.bar.is_hidden() {
            eprintln!("{text}"); // no terminal: a line per step, so that a log shows where it is
        }
        self.bar.set_message(text);
    }

    fn name(&mut self, kind: &str) -> String {
        self.sites += 1;
        format!("{kind}{}", self.sites)
    }

    fn stopped(&self) -> Result<()> {
        stopped(&self.settings.stop)
    }

    /// Records a failure for the report. Only an interruption ends the run.
    fn attempt<T>(&mut self, what: &str, outcome: Result<T>) -> Result<Option<T>> {
        match outcome {
            Ok(value) => Ok(Some(value)),
            Err(e) => {
                self.stopped()?;
                let failure = format!("{what}: {e:#}");
                self.bar.suspend(|| eprintln!("{failure}"));
                self.results.failures.push(failure);
                Ok(None)
            }
        }
    }

    fn fast(&mut self, size: usize, keys: u64) -> Result<()> {
        let reshards = self.settings.pipelines.iter().map(|&pipeline| ClusterMove::Reshard { pipeline });
        let ways: Vec<_> = reshards.chain(self.migrateslots.then_some(ClusterMove::MigrateSlots)).collect();
        for way in ways {
            let outcome = self.cluster_unloaded(size, keys, way);
            if let Some((moved, took)) = self.attempt(&format!("{way}, {size} B"), outcome)? {
                let (way, slots) = (way.to_string(), layout(keys).each());
                self.results.speeds.push(Speed { size, way, slots, keys: moved, took, cost: None });
            }
        }
        let outcome = self.limit(size, keys);
        if let Some(limit) = self.attempt(&format!("DUMP, RESTORE, UNLINK, {size} B"), outcome)? {
            self.results.limits.push((size, limit));
        }
        if !self.settings.baseline_only {
            let outcome = self.move_unloaded(size, keys, "fast", Journal::Durable);
            if let Some((moved, took, cost)) = self.attempt(&format!("switchyard move, {size} B"), outcome)? {
                let way = "switchyard move --goal fast".to_owned();
                self.results.speeds.push(Speed {
                    size,
                    way,
                    slots: layout(keys).each(),
                    keys: moved,
                    took,
                    cost: Some(cost),
                });
            }
        }
        Ok(())
    }

    fn cluster_unloaded(&mut self, size: usize, keys: u64, way: ClusterMove) -> Result<(u64, Duration)> {
        let layout = layout(keys);
        let name = self.name("cluster");
        let cluster = Cluster::start(&self.programs, &name, self.folder)?;
        self.note_version(cluster.addresses[0])?;
        let data = Keys::new((0..keys).collect(), size, &layout);
        self.fill(&data, |slot| cluster.owner(slot), &name)?;
        let before = keys_at(cluster.addresses[0])?;
        self.print(format!("{way}, {size} B: {before} keys"));
        let took = cluster.relocate(&self.programs, way, layout.each(), self.folder, || self.stopped())?;
        self.all_moved(before, keys, cluster.addresses[0], cluster.addresses[1])?;
        Ok((before as u64, took))
    }

    fn move_unloaded(&mut self, size: usize, keys: u64, goal: &str, journal: Journal) -> Result<(u64, Duration, Cost)> {
        let layout = layout(keys);
        let name = self.name("routed");
        let site = Routed::start_with(&self.programs, &self.settings.serve_args, journal, &name, self.folder)?;
        self.note_version(site.addresses[0])?;
        let data = Keys::new((0..keys).collect(), size, &layout);
        self.fill(&data, |_| site.entry, &name)?;
        let before = keys_at(site.addresses[0])?;
        let router = site.router.id();
        let mut cost = Cost { memory_before: resident_bytes(router)?, memory_peak: 0, journal: 0, syncs: 0 };
        self.print(format!("switchyard move, {size} B: {before} keys"));
        let (took, _) = site.move_slots(&self.programs, (0, 1), goal, &slots_of(&layout), TIMEOUT, || {
            cost.memory_peak = cost.memory_peak.max(resident_bytes(router)?);
            self.stopped()
        })?;
        (cost.journal, cost.syncs) = site.journal()?;
        self.all_moved(before, keys, site.addresses[0], site.addresses[1])?;
        let wrong = data.count_wrong(|_| site.entry)?;
        ensure!(wrong == 0, "{wrong} of {keys} keys were lost or changed by the move");
        Ok((before as u64, took, cost))
    }

    /// Checks that the source had keys, and that the target has all keys now.
    fn all_moved(&self, before: i64, keys: u64, source: SocketAddr, target: SocketAddr) -> Result<()> {
        let (left, there) = (keys_at(source)?, keys_at(target)?);
        ensure!(before > 0, "the source had no keys to move");
        ensure!(
            left == 0 && there == keys as i64,
            "after the move {left} keys are left at the source, and {there} of {keys} at the target"
        );
        Ok(())
    }

    fn limit(&mut self, size: usize, keys: u64) -> Result<Limit> {
        let name = self.name("plain");
        let (_source, from) =
            switchyard_bench::process::start_redis(&self.programs.server, &format!("{name}-0"), self.folder)?;
        let (_target, to) =
            switchyard_bench::process::start_redis(&self.programs.server, &format!("{name}-1"), self.folder)?;
        let layout = layout(keys);
        let numbers: Vec<u64> = (0..keys).filter(|n| layout.is_in_first_half(*n)).collect();
        let data = Keys::new(numbers.clone(), size, &layout);
        self.fill(&data, |_| from, &name)?;
        let names: Vec<String> = numbers.into_iter().map(|n| layout.name(n)).collect();
        self.print(format!("DUMP, RESTORE, UNLINK of {} keys of {size} B", names.len()));
        limit::measure(from, to, &names, size, &|_| {})
    }

    fn fill(&self, data: &Keys, owner: impl Fn(u16) -> SocketAddr, name: &str) -> Result<()> {
        self.print(format!("{name}: filling with {} keys of {} B", data.count(), data.size()));
        data.fill(owner, &|_| {})?;
        self.stopped()
    }

    fn note_version(&mut self, address: SocketAddr) -> Result<()> {
        if self.results.version.is_empty() {
            self.results.version = version_of(address)?;
        }
        Ok(())
    }

    fn unnoticed(&mut self) -> Result<()> {
        let keys = self.settings.keys;
        let mut rate = None;
        if !self.settings.baseline_only {
            let goal = self.settings.goal.clone();
            let outcome = self.move_unloaded(64, keys, &goal, Journal::Durable);
            let unloaded = self.attempt("switchyard move without load", outcome)?.map(|(_, took, _)| took);
            let outcome = self.move_under_load(unloaded);
            if let Some(noticed) = self.attempt("switchyard move under load", outcome)? {
                rate = Some(noticed.rate);
                self.results.noticed.push(noticed);
            }
        }
        let best = self.results.best_reshard(64).map(|s| s.way.clone());
        let pipeline =
            best.and_then(|way| way.rsplit(' ').next()?.parse().ok()).unwrap_or_else(|| self.settings.pipelines[0]);
        let migrateslots = self.migrateslots.then_some(ClusterMove::MigrateSlots);
        for way in std::iter::once(ClusterMove::Reshard { pipeline }).chain(migrateslots) {
            let outcome = self.cluster_unloaded(64, keys, way);
            let unloaded = self.attempt(&format!("{way} without load"), outcome)?.map(|(_, took)| took);
            let outcome = self.cluster_under_load(way, rate, unloaded);
            if let Some(noticed) = self.attempt(&format!("{way} under load"), outcome)? {
                self.results.noticed.push(noticed);
            }
        }
        Ok(())
    }

    fn load(&self, nodes: Vec<SocketAddr>, cluster: bool, keys: &Arc<Keys>) -> generator::Settings {
        generator::Settings {
            nodes,
            cluster,
            connections: self.settings.connections,
            rate: None,
            pipeline: 4,
            in_flight_max: generator::IN_FLIGHT_MAX,
            keys: keys.clone(),
            popularity: Popularity::zipfian(keys.count() as u64, YCSB_THETA),
            writes: 0.05,
            drops: 0.0,
            seed: 1,
        }
    }

    fn move_under_load(&mut self, unloaded: Option<Duration>) -> Result<LoadedMove> {
        let layout = layout(self.settings.keys);
        let name = self.name("routed");
        let site = Routed::start(&self.programs, &self.settings.serve_args, &name, self.folder)?;
        self.note_version(site.addresses[0])?;
        let data = Arc::new(Keys::new((0..self.settings.keys).collect(), 64, &layout));
        self.fill(&data, |_| site.entry, &name)?;
        let before = keys_at(site.addresses[0])?;
        let load = self.load(vec![site.entry], false, &data);
        let goal = self.settings.goal.clone();
        let way = format!("switchyard move --goal {goal}");
        let (programs, stop) = (self.programs.clone(), self.settings.stop.clone());
        let mut noticed =
            self.under_load(way, load, None, unloaded, site.process_ids(), Some(site.router.id()), || {
                site.move_slots(&programs, (0, 1), &goal, &slots_of(&layout), TIMEOUT, || stopped(&stop))
                    .map(|(took, _)| took)
            })?;
        self.all_moved(before, self.settings.keys, site.addresses[0], site.addresses[1])?;
        noticed.wrong_after = data.count_wrong(|_| site.entry)?;
        Ok(noticed)
    }

    fn cluster_under_load(
        &mut self,
        way: ClusterMove,
        rate: Option<f64>,
        unloaded: Option<Duration>,
    ) -> Result<LoadedMove> {
        let layout = layout(self.settings.keys);
        let name = self.name("cluster");
        let cluster = Cluster::start(&self.programs, &name, self.folder)?;
        self.note_version(cluster.addresses[0])?;
        let data = Arc::new(Keys::new((0..self.settings.keys).collect(), 64, &layout));
        self.fill(&data, |slot| cluster.owner(slot), &name)?;
        let before = keys_at(cluster.addresses[0])?;
        let load = self.load(cluster.addresses.clone(), true, &data);
        let (programs, folder, stop) = (self.programs.clone(), self.folder.to_owned(), self.settings.stop.clone());
        let noticed = self.under_load(way.to_string(), load, rate, unloaded, cluster.process_ids(), None, || {
            cluster.relocate(&programs, way, layout.each(), &folder, || stopped(&stop))
        })?;
        self.all_moved(before, self.settings.keys, cluster.addresses[0], cluster.addresses[1])?;
        Ok(noticed)
    }

    /// Measures the capacity, then the load without a move, with one, and without one again.
    #[allow(clippy::too_many_arguments)] // these arguments differ between the two kinds of moves
    fn under_load(
        &mut self,
        way: String,
        load: generator::Settings,
        rate: Option<f64>,
        unloaded: Option<Duration>,
        servers: Vec<u32>,
        router: Option<u32>,
        relocate: impl FnOnce() -> Result<Duration>,
    ) -> Result<LoadedMove> {
        self.print(format!("{way}: capacity without a move"));
        let run = Run::start(&load)?;
        self.pause(Duration::from_secs(1))?;
        run.take();
        let begun = Instant::now();
        self.pause(Duration::from_secs(3))?;
        let capacity = run.take().tally.replies as f64 / begun.elapsed().as_secs_f64();
        run.finish()?;
        let rate = rate.unwrap_or(capacity * self.settings.load);
        self.print(format!("{way}: {rate:.0} requests/s without a move"));
        let run = Run::start(&generator::Settings { rate: Some(rate), seed: 2, ..load })?;
        self.pause(Duration::from_secs(2))?;
        run.take();
        let begun = Instant::now();
        let machine = MachineReading::now()?;
        let cpu = |pids: &[u32]| pids.iter().filter_map(|p| crate::procfs::CpuReading::of(*p).ok()).collect::<Vec<_>>();
        let pids: Vec<u32> = servers.into_iter().chain(router).chain([std::process::id()]).collect();
        let cpu_before = cpu(&pids);
        self.pause(self.settings.control)?;
        let mut control_time = begun.elapsed();
        let mut control = run.take();
        let (busy, _, period) = MachineReading::now()?.since(&machine);
        let ours: Duration = cpu(&pids).iter().zip(&cpu_before).map(|(now, then)| now.since(then)).sum();
        let cpus = std::thread::available_parallelism().map_or(1.0, |n| n.get() as f64);
        let foreign = busy.saturating_sub(ours).as_secs_f64() / (period.as_secs_f64() * cpus);
        self.results.foreign = Some(self.results.foreign.map_or(foreign, |f| f.max(foreign)));
        self.print(format!("{way}: {rate:.0} requests/s during the move"));
        let begun = Instant::now();
        let outcome = relocate();
        let moving_time = begun.elapsed();
        let moving = run.take();
        // The speed of a shared machine may change within minutes, so the reference is measured on both sides of the
        // move.
        self.print(format!("{way}: {rate:.0} requests/s after the move"));
        self.pause(Duration::from_secs(2))?;
        run.take();
        let begun = Instant::now();
        self.pause(self.settings.control)?;
        control_time += begun.elapsed();
        control.tally.add(&run.take().tally);
        let (_, complaints) = run.finish()?;
        outcome?;
        Ok(LoadedMove {
            way,
            rate,
            capacity,
            control,
            control_time,
            moving,
            moving_time,
            unloaded,
            wrong_after: 0,
            complaints,
        })
    }

    fn pause(&self, time: Duration) -> Result<()> {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.stopped()?;
            std::thread::sleep(Duration::from_millis(50).min(end.saturating_duration_since(Instant::now())));
        }
        Ok(())
    }

    fn converges(&mut self) -> Result<()> {
        let name = self.name("routed");
        let site = Routed::start(&self.programs, &self.settings.serve_args, &name, self.folder)?;
        self.note_version(site.addresses[0])?;
        let keys = self.settings.keys.min(100_000);
        let layout = layout(keys);
        let numbers: Vec<u64> = (0..).filter(|n| layout.is_in_first_half(*n)).take(keys as usize).collect();
        let data = Arc::new(Keys::new(numbers, 64, &layout));
        self.fill(&data, |_| site.entry, &name)?;
        let mut converged = ConvergenceTest { rate: self.settings.writes, keys, ..ConvergenceTest::default() };
        for round in 0..self.settings.repeats {
            self.stopped()?;
            self.print(format!(
                "{:.0} writes/s into the moving slots: {} of {}",
                self.settings.writes,
                round + 1,
                self.settings.repeats
            ));
            let settings = generator::Settings {
                rate: Some(self.settings.writes),
                popularity: Popularity::uniform(keys),
                writes: 1.0,
                drops: 0.0,
                seed: u64::from(round) + 10,
                ..self.load(vec![site.entry], false, &data)
            };
            let run = Run::start(&settings)?;
            self.pause(Duration::from_millis(500))?;
            let (from, to) = if round % 2 == 0 { (0, 1) } else { (1, 0) };
            let goal = &self.settings.goal;
            let timeout = Duration::from_secs(120);
            let outcome =
                site.move_slots(&self.programs, (from, to), goal, &slots_of(&layout), timeout, || self.stopped());
            let (counts, complaints) = run.finish()?;
            converged.tried += 1;
            converged.errors += counts.tally.errors + counts.tally.unanswered + counts.tally.disconnects;
            let left = keys_at(site.addresses[from])?;
            let wrong = data.count_wrong(|_| site.entry)? + counts.tally.wrong;
            converged.wrong += wrong;
            match outcome {
                Ok((took, _)) if left == 0 && wrong == 0 => {
                    converged.done += 1;
                    converged.times.push(took);
                }
                Ok(_) => converged
                    .failures
                    .push(format!("round {}: {left} keys left at the source, {wrong} wrong", round + 1)),
                Err(e) => {
                    converged.failures.push(format!("round {}: {e:#}", round + 1));
                    break; // the owner of the slots is unknown
                }
            }
            converged.failures.extend(complaints.into_iter().take(1));
        }
        self.results.converged = Some(converged);
        Ok(())
    }
}

/// Returns a layout with enough keys in each slot.
fn layout(keys: u64) -> Arc<Layout> {
    let slots = (keys / KEYS_PER_SLOT).max(2).ilog2();
    Arc::new(Layout::new(1 << slots.saturating_sub(1).min((SLOTS / 2).ilog2())))
}

/// Returns the slots of the first half that have keys, in the format of `switchyard move --slots`.
fn slots_of(layout: &Layout) -> String {
    format!("0-{}", layout.each() - 1)
}

fn stopped(stop: &AtomicBool) -> Result<()> {
    ensure!(!stop.load(Ordering::Relaxed), "interrupted");
    Ok(())
}
