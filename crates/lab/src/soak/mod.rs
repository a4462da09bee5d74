//! Cycles of real servers, a real router, clients that record histories, moves, and faults; and the checks after each
//! cycle.
//!
//! In some cycles no moves are ordered: a fourth server joins and leaves, by the autoscaler. In others placement rules
//! are adopted and removed between the moves. In others some clients use keys of several nodes together.
//!
//! A cycle has three servers with an append-only file and fsync always, the router, fixed keys, and clients on shared
//! keys. Slots move from node to node, while a process is killed (SIGKILL) and restarted, or stopped for a while
//! (SIGSTOP). Afterwards every history must be linearizable; every fixed key must exist once, with its content and time
//! to live; and no other key may exist, so none has come back.
//!
//! The seed of a cycle decides everything except the timing of the processes.

mod adoption;
mod apart;
mod fixed;
mod visitor;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use switchyard_bench::random::{Rng, mix};

use crate::history::{self, Kind};
use crate::moves::admin::{self, MoveState, Order};
use crate::site::Site;
use adoption::Adoptions;
use apart::ApartClients;
use visitor::Visitor;

/// Number of servers in a cycle.
const NODES: usize = 3;
/// Time limit of the recovery after the last fault.
const RECOVERY: Duration = Duration::from_secs(90);

/// A fault during moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Fault {
    /// No fault. Then no client may receive an error.
    None,
    /// SIGKILL of the source.
    KillSource,
    /// SIGKILL of the target.
    KillTarget,
    /// SIGKILL of the router.
    KillRouter,
    /// SIGSTOP of the source, for a while.
    StopSource,
    /// SIGSTOP of the target, for a while.
    StopTarget,
    /// SIGSTOP of the router, for a while.
    StopRouter,
}

impl Fault {
    /// All faults, with their names on the command line.
    pub const ALL: [(Self, &'static str); 7] = [
        (Self::None, "none"),
        (Self::KillSource, "kill-source"),
        (Self::KillTarget, "kill-target"),
        (Self::KillRouter, "kill-router"),
        (Self::StopSource, "stop-source"),
        (Self::StopTarget, "stop-target"),
        (Self::StopRouter, "stop-router"),
    ];

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(fault, _)| *fault == self).map_or("", |(_, name)| name)
    }
}

/// Variations of a cycle besides its fault: the code paths that moves can take. Flags of the user follow these, and
/// win.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    /// Threads of the router. One thread has no hand-over between workers.
    workers: u64,
    /// Every list and long string moves in pieces, while clients append to it.
    in_pieces: bool,
    /// The target confirms durability before the source's copy is removed.
    aof: bool,
    /// A second node moves its slots away at the same time.
    two_moves: bool,
    /// Every other move takes single keys without their slots.
    keys: bool,
    /// A fourth server joins and leaves, instead of moves.
    visits: bool,
    /// Placement rules are adopted and removed between moves.
    adopts: bool,
    /// Some clients use keys of several nodes together.
    apart: bool,
}

/// Half of the keys of every type, but no keys of transactions of one slot, which must stay together.
const SOME_KEYS: &str = "[ahf]*[02468]";

impl Shape {
    fn of(seed: u64) -> Self {
        let mut rng = Rng::new(mix(seed ^ 0x5a4e));
        Self {
            workers: 1 + rng.below(3),
            in_pieces: rng.below(2) == 0,
            aof: rng.below(4) == 0,
            two_moves: rng.below(3) == 0,
            keys: rng.below(3) == 0,
            visits: rng.below(4) == 0,
            adopts: rng.below(3) == 0,
            apart: rng.below(3) == 0,
        }
    }

    fn serve_args(self) -> Vec<String> {
        let mut args = vec!["--workers".to_owned(), self.workers.to_string()];
        if self.in_pieces {
            args.extend(["--set", "moves.big-key=512"].map(str::to_owned));
        }
        args
    }

    fn move_args(self) -> Vec<String> {
        let mut args = Vec::new();
        if self.aof {
            args.extend(["--durability", "aof"].map(str::to_owned));
        }
        if !self.in_pieces {
            // Writes of such clients to a key in pieces would go unnoticed, so with this flag all keys move whole.
            args.push("--allow-direct-clients".to_owned());
        }
        args
    }
}

/// Settings of a run.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Path of the router's binary.
    pub switchyard: PathBuf,
    /// Path of the built `tests-clients/history-check`.
    pub checker: PathBuf,
    /// Time after which no new cycle begins.
    pub time: Duration,
    /// Maximum number of cycles.
    pub cycles: u64,
    /// Duration of the clients' work in a cycle.
    pub cycle: Duration,
    /// Faults, one for each cycle in turn.
    pub faults: Vec<Fault>,
    /// Whether slots move. Faults occur in any case.
    pub moves: bool,
    /// Whether placement rules are adopted in every cycle, not only in some.
    pub adoptions: bool,
    /// Whether clients use keys of several nodes together in every cycle, not only in some.
    pub apart: bool,
    /// Number of fixed keys.
    pub keys: u64,
    /// Number of clients.
    pub clients: usize,
    /// Further arguments of `serve`.
    pub serve_args: Vec<String>,
    /// Further arguments of `switchyard move`.
    pub move_args: Vec<String>,
    /// Seed of the first cycle, incremented for each next one.
    pub seed: u64,
    /// Folder for the cycles' files. The files of a failed cycle are kept.
    pub keep: PathBuf,
    /// Set to end the run early.
    pub stop: Arc<AtomicBool>,
}

/// Counts of a cycle, or of all.
#[derive(Debug, Clone, Default)]
pub struct Tally {
    /// Finished cycles.
    pub cycles: u64,
    /// Finished moves.
    pub moves: u64,
    /// Moves that stopped early.
    pub moves_stopped: u64,
    /// Keys moved in pieces.
    pub in_pieces: u64,
    /// Servers that joined and left.
    pub visits: u64,
    /// Adoptions of placement rules.
    pub adoptions: u64,
    /// Injected faults.
    pub faults: u64,
    /// Operations in the histories.
    pub operations: u64,
    /// Operations with unknown outcome.
    pub unknown: u64,
    /// Error replies, and requests without a reply: only in cycles with faults.
    pub errors: u64,
    /// Steps of clients with keys of several nodes.
    pub apart: u64,
}

impl Tally {
    fn add(&mut self, other: &Self) {
        self.cycles += other.cycles;
        self.moves += other.moves;
        self.moves_stopped += other.moves_stopped;
        self.in_pieces += other.in_pieces;
        self.visits += other.visits;
        self.adoptions += other.adoptions;
        self.faults += other.faults;
        self.operations += other.operations;
        self.unknown += other.unknown;
        self.errors += other.errors;
        self.apart += other.apart;
    }
}

/// Runs cycles until the time has passed, or one fails. Reports the progress to `show`.
pub fn run(settings: &Settings, show: &dyn Fn(&str, &Tally)) -> Result<Tally> {
    ensure!(!settings.faults.is_empty(), "at least one kind of fault is needed (none is one)");
    switchyard_bench::process::raise_file_limit();
    std::fs::create_dir_all(&settings.keep).with_context(|| format!("cannot create {}", settings.keep.display()))?;
    let started = Instant::now();
    let mut total = Tally::default();
    while started.elapsed() < settings.time && total.cycles < settings.cycles && !settings.stop.load(Ordering::Relaxed)
    {
        let seed = settings.seed + total.cycles;
        let fault = settings.faults[(seed % settings.faults.len() as u64) as usize];
        let folder = tempfile::Builder::new()
            .prefix("switchyard-soak-")
            .tempdir_in(&settings.keep)
            .with_context(|| format!("cannot create a folder in {}", settings.keep.display()))?;
        match cycle(settings, seed, fault, folder.path(), &|what| {
            show(&format!("cycle {seed}, {}: {what}", fault.name()), &total)
        }) {
            Ok(one) => total.add(&one),
            // The error of an interrupted cycle means nothing.
            Err(_) if settings.stop.load(Ordering::Relaxed) => break,
            Err(e) => {
                let kept = folder.keep();
                let name = fault.name();
                return Err(e.context(format!(
                    "cycle {seed} ({name}) failed; its files are in {}; repeat it with --seed {seed} --cycles 1",
                    kept.display()
                )));
            }
        }
    }
    Ok(total)
}

fn cycle(settings: &Settings, seed: u64, fault: Fault, folder: &Path, show: &dyn Fn(&str)) -> Result<Tally> {
    let mut rng = Rng::new(mix(seed));
    show("starting");
    let shape = Shape::of(seed);
    let mut serve_args = shape.serve_args();
    let move_args: Vec<String> = shape.move_args().into_iter().chain(settings.move_args.iter().cloned()).collect();
    let visitor = (shape.visits && settings.moves && !settings.adoptions).then(|| Visitor::new(folder));
    let adopts = (shape.adopts && settings.moves && visitor.is_none()) || settings.adoptions;
    let mut adoptions = adopts.then(|| Adoptions::new(move_args.clone()));
    if visitor.is_some() {
        serve_args.extend(Visitor::serve_args(folder)?);
    }
    if adoptions.is_some() {
        serve_args.extend(Adoptions::serve_args(folder)?);
    }
    serve_args.extend(settings.serve_args.iter().cloned());
    let mut site = Site::start(&settings.switchyard, &serve_args, NODES, folder)?;
    fixed::fill(site.entry(), settings.keys)?;
    let recording = history::start(&history::Settings {
        targets: vec![site.entry()],
        duration: settings.cycle + RECOVERY, // ended by us
        clients: settings.clients,
        kinds: Kind::ALL.to_vec(),
        timeout: if fault == Fault::None { Duration::from_secs(10) } else { Duration::from_millis(700) },
        pause: Duration::from_millis(1),
        seed,
        prefix: "h:".to_owned(),
        folder: folder.join("histories"),
        clean: true,
    })?;
    let apart = (shape.apart || settings.apart).then(|| ApartClients::start(site.entry(), seed, fault != Fault::None));
    let apart = apart.transpose()?;
    let mut tally = Tally { cycles: 1, ..Tally::default() };
    let begun = Instant::now();
    let mut round = 0;
    std::thread::sleep(Duration::from_millis(300));
    // A client that has found a violation has ended.
    while begun.elapsed() < settings.cycle && apart.as_ref().is_none_or(ApartClients::all_continue) {
        ensure!(!settings.stop.load(Ordering::Relaxed), "interrupted");
        if let Some(visitor) = &visitor {
            for comes in [true, false] {
                show(&format!(
                    "{} operations, a fourth server {}",
                    recording.tally().operations,
                    if comes { "comes" } else { "goes" }
                ));
                let disturb = |site: &mut Site| inject_during_visit(site, visitor, fault, &mut rng);
                visitor.change(&settings.switchyard, &mut site, comes, disturb, &settings.stop)?;
                tally.faults += u64::from(fault != Fault::None);
                tally.visits += u64::from(!comes);
            }
            continue;
        }
        let (from, to) = busiest_and_another(&site, &mut rng)?;
        if let Some(adoptions) = adoptions.as_mut().filter(|_| round % 2 == 0) {
            show(&format!("{} operations, an adoption of rules", recording.tally().operations));
            adoptions.begin(&settings.switchyard, &site)?;
            if fault != Fault::None {
                std::thread::sleep(Duration::from_millis(rng.below(900)));
                inject(&mut site, fault, from, to, &mut rng)?;
                tally.faults += 1;
            }
            if rng.below(4) == 0 {
                std::thread::sleep(Duration::from_millis(rng.below(300)));
                adoptions.abandon(&settings.switchyard, &site, fault != Fault::None)?;
            }
            adoptions.wait(&site, &settings.stop)?;
            tally.adoptions += 1;
            round += 1;
            continue;
        }
        show(&format!("{} operations, moving from node {from} to node {to}", recording.tally().operations));
        let mut moves = Vec::new();
        if settings.moves {
            let third = (0..NODES)
                .find(|node| *node != from && *node != to)
                .filter(|node| shape.two_moves && site.keys_of(*node).is_ok_and(|keys| keys > 0));
            let keys = Some(SOME_KEYS).filter(|_| (shape.keys || apart.is_some()) && round % 4 < 2);
            for source in [Some(from), third].into_iter().flatten() {
                let order = Order { from: site.node(source), to: site.node(to), slots: None, keys, more: &move_args };
                match begin(settings, &site, &order) {
                    Ok(id) => moves.push(id),
                    // The node has only keys of slots elsewhere, no key matches, another move has keys of the same slots, or
                    // a command has taken such keys away.
                    Err(e)
                        if (shape.keys || apart.is_some())
                            && ["nothing to move", "is part of move", "in the meantime; retry"]
                                .iter()
                                .any(|why| format!("{e:#}").contains(why)) => {}
                    Err(e) => return Err(e),
                }
            }
            round += 1;
        }
        if fault != Fault::None {
            std::thread::sleep(Duration::from_millis(rng.below(900)));
            inject(&mut site, fault, from, to, &mut rng)?;
            tally.faults += 1;
        }
        if moves.is_empty() {
            std::thread::sleep(Duration::from_millis(500));
        }
        for id in moves {
            let (standing, in_pieces) = wait_until_over(&site, id, &settings.stop)?;
            tally.in_pieces += in_pieces;
            match standing {
                MoveState::Stopped(why) if fault == Fault::None => bail!("move {id} stopped, without a fault: {why}"),
                MoveState::Stopped(_) => tally.moves_stopped += 1,
                _ => tally.moves += 1,
            }
        }
    }
    recording.stop();
    show("reading everything once more");
    tally.apart = apart.map_or(Ok(0), ApartClients::finish)?;
    let summary = recording.finish()?;
    tally.operations = summary.tally.operations;
    tally.unknown = summary.tally.unknown;
    tally.errors =
        summary.tally.error_replies() + summary.tally.unknown + summary.tally.reads_failed + summary.tally.not_sent;
    ensure!(
        summary.tally.unread == 0,
        "{} objects of the histories cannot be read: {:?}",
        summary.tally.unread,
        summary.tally
    );
    fixed::check(site.entry(), settings.keys)?;
    let held = (0..NODES).map(|node| site.keys_of(node)).collect::<Result<Vec<_>>>()?;
    ensure!(
        held.iter().sum::<u64>() == settings.keys,
        "{} keys are correct through the router, but the nodes have {held:?}: some were restored, or exist twice",
        settings.keys
    );
    show("looking for an order");
    let output =
        Command::new(&settings.checker).arg("-pictures").arg(folder).args(&summary.files).stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("cannot run the checker {}", settings.checker.display()))?;
    ensure!(
        output.status.success(),
        "the histories are not linearizable, or not known to be ({}):\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout).lines().take(60).collect::<Vec<_>>().join("\n")
    );
    if fault == Fault::None && !summary.tally.is_clean() {
        bail!("clients got errors although nothing was broken: {:?}", summary.tally);
    }
    Ok(tally)
}

/// Begins a move. Retries while our own closed connections to the nodes still count as direct clients.
fn begin(settings: &Settings, site: &Site, order: &Order<'_>) -> Result<u64> {
    let end = Instant::now() + Duration::from_secs(5);
    loop {
        match admin::begin(&settings.switchyard, site.admin(), order) {
            Err(e) if Instant::now() < end && format!("{e:#}").contains("--allow-direct-clients") => {
                std::thread::sleep(Duration::from_millis(50))
            }
            outcome => return outcome,
        }
    }
}

/// Returns the node with most keys, and any other.
fn busiest_and_another(site: &Site, rng: &mut Rng) -> Result<(usize, usize)> {
    let held = (0..NODES).map(|node| site.keys_of(node)).collect::<Result<Vec<_>>>()?;
    let from = (0..NODES).max_by_key(|node| held[*node]).unwrap_or(0);
    let to = (from + 1 + rng.below(NODES as u64 - 1) as usize) % NODES;
    Ok((from, to))
}

fn inject(site: &mut Site, fault: Fault, from: usize, to: usize, rng: &mut Rng) -> Result<()> {
    let pause = Duration::from_millis(100 + rng.below(2400));
    match fault {
        Fault::None => Ok(()),
        Fault::KillSource => site.restart_node(from, pause / 4),
        Fault::KillTarget => site.restart_node(to, pause / 4),
        Fault::KillRouter => site.restart_router(pause / 4),
        Fault::StopSource => site.hold(site.node_process(from), pause),
        Fault::StopTarget => site.hold(site.node_process(to), pause),
        Fault::StopRouter => site.hold(site.router_process(), pause),
    }
}

/// Injects a fault while a server joins or leaves. That server counts as the target.
fn inject_during_visit(site: &mut Site, visitor: &Visitor, fault: Fault, rng: &mut Rng) -> Result<()> {
    std::thread::sleep(Duration::from_millis(rng.below(2500)));
    match fault {
        Fault::KillTarget => visitor.kill(),
        Fault::StopTarget => {
            if let Some(id) = visitor.process() {
                site.hold(Some(id), Duration::from_millis(100 + rng.below(2400)))?;
            }
        }
        fault => inject(site, fault, rng.below(NODES as u64) as usize, 0, rng)?,
    }
    Ok(())
}

/// Waits for the end of a move. Returns its final state, and the number of keys moved in pieces.
fn wait_until_over(site: &Site, id: u64, stop: &AtomicBool) -> Result<(MoveState, u64)> {
    let end = Instant::now() + RECOVERY;
    loop {
        let standing = admin::report(site.admin())
            .and_then(|report| Ok((admin::state_of(&report, id)?, admin::moved_in_pieces(&report, id))));
        match standing {
            Ok((MoveState::Open, _)) if Instant::now() > end => bail!("move {id} has not ended after {RECOVERY:?}"),
            Ok((MoveState::Open, _)) => {}
            Ok(over) => return Ok(over),
            Err(e) if Instant::now() > end => return Err(e),
            Err(_) => {} // the router is coming up
        }
        ensure!(!stop.load(Ordering::Relaxed), "interrupted");
        std::thread::sleep(Duration::from_millis(20));
    }
}
