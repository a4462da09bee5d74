//! The simulator: the machines of `switchyard_policy::migration` in a world with a seed, where nodes are killed,
//! connections break in the middle and the router comes back, and checkers that know nothing of the machines say
//! whether clients could have noticed.
//!
//! Model workers, model nodes and a model of the mover's I/O instead of the real ones: those have sockets and clocks,
//! so a run of theirs cannot be had twice. The decisions are the real ones. One seed and one scenario are one run, for
//! ever.

mod clients;
pub mod explore;
mod history;
mod hot;
pub mod linear;
mod mover;
pub mod node;
mod planted;
mod random;
pub mod scenario;
pub mod take_over;
mod worker;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

pub use planted::{Bug, Planted};
pub use random::Random;
pub use scenario::Scenario;

use switchyard_policy::migration::Side;

use crate::node::{Persistence, STAGING};
use crate::world::World;

/// What came of a run.
#[derive(Clone, Debug)]
pub struct Run {
    /// Its seed.
    pub seed: u64,
    /// What was wrong, if anything: several lines.
    pub violation: Option<String>,
    /// How long it was, microseconds of its own time.
    pub took_us: u64,
    /// How each leg ended.
    pub outcomes: Vec<String>,
    /// Legs that ended without one of their sides: who owns what is left.
    pub without: Vec<Side>,
    /// Keys whose history had too many possibilities to be checked.
    pub unchecked: u64,
    /// What the mover did, in numbers of actions.
    pub actions: u64,
    /// Reads that were answered by copies, and fills that were kept.
    pub hits: u64,
    /// The fills.
    pub kept: u64,
    /// Transactions that were executed because a watched key had not changed.
    pub executed: u64,
    /// Keys moved in pieces.
    pub in_pieces: u64,
    /// Keys that were to be moved in pieces and were moved whole.
    pub whole: u64,
    /// What happened, if it was asked for.
    pub trace: Vec<String>,
}

/// One run.
#[must_use]
pub fn run(seed: u64, scenario: &Scenario, planted: Option<Planted>, trace: bool) -> Run {
    let mut world = World::new(seed, scenario, planted, trace);
    let panicked = catch_unwind(AssertUnwindSafe(|| world.run())).err();
    if let Some(panic) = panicked {
        let text =
            panic.downcast_ref::<String>().cloned().or(panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        world.violated(format!("panic: {}", text.unwrap_or_default()));
    }
    let mut unchecked = 0;
    if world.violation.is_none() {
        let (violation, unknown) = world.history.check();
        unchecked = unknown;
        world.violation = violation.or_else(|| left_behind(&world)).or_else(|| find_leaked_staging(&world));
    }
    Run {
        seed,
        violation: world.violation,
        took_us: world.now,
        outcomes: world.fleet.outcomes,
        without: world.fleet.without,
        unchecked,
        actions: world.actions,
        hits: world.hot.hits,
        kept: world.hot.kept,
        executed: world.executed,
        in_pieces: world.movers.iter().map(|mover| mover.stager.in_pieces).sum(),
        whole: world.movers.iter().map(|mover| mover.stager.whole).sum(),
        trace: world.trace.unwrap_or_default(),
    }
}

/// One owner: after a move nothing of the slots is left at the other node.
fn left_behind(world: &World) -> Option<String> {
    (0..world.movers.len()).find_map(|lane| left_behind_by(world, lane))
}

fn left_behind_by(world: &World, lane: usize) -> Option<String> {
    if !world.movers[lane].watched.moved || world.nodes.iter().any(|node| node.persistence != Persistence::Always) {
        return None;
    }
    let at = world.node_left(lane);
    let alive = world.nodes[at]
        .keys
        .range(..STAGING)
        .filter(|(_, entry)| entry.expires_us.is_none_or(|end| end > world.clock(at)));
    let is_left =
        |key| world.lives_at(key) != at && world.has_left(lane, key) && !world.fleet.left_at[at].contains(&key);
    let left: Vec<_> = alive.filter(|(key, _)| is_left(**key)).collect();
    (!left.is_empty()).then(|| format!("the node that they have left still has {left:?}"))
}

/// Whatever is left of what is copied in pieces ends by itself.
fn find_leaked_staging(world: &World) -> Option<String> {
    let mut left = world.nodes.iter().flat_map(|node| node.keys.range(STAGING..));
    left.find(|(_, entry)| entry.expires_us.is_none()).map(|(name, _)| format!("the staging key {name} stays for ever"))
}

/// Runs with the seeds from `from` on, so many, on `threads` threads; `progress` is told after each. Returns the first
/// that was wrong, by its seed, after the runs that had begun have ended.
pub fn sweep(
    scenario: &Scenario,
    planted: Option<Planted>,
    from: u64,
    seeds: u64,
    threads: usize,
    progress: impl Fn(&Run) + Sync,
) -> Option<Run> {
    let next = AtomicU64::new(from);
    let end = from.saturating_add(seeds);
    let first_wrong = AtomicU64::new(u64::MAX);
    let wrong = std::sync::Mutex::new(None::<Run>);
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end || seed > first_wrong.load(Ordering::Relaxed) {
                        return;
                    }
                    let run = run(seed, scenario, planted, false);
                    progress(&run);
                    if run.violation.is_some() && first_wrong.fetch_min(seed, Ordering::Relaxed) > seed {
                        *wrong.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(run);
                    }
                }
            });
        }
    });
    wrong.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)
}
