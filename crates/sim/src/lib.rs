//! A seeded simulator that runs the state machines of `switchyard_policy::migration` against failing nodes, broken
//! connections and a restarting router. Independent checkers then verify that clients could not have noticed.
//!
//! Workers, nodes and the mover's I/O are models, because real sockets and clocks are not reproducible. The decisions
//! are made by the real code. A seed and a scenario determine a run completely.
//!
//! [`fleet`] simulates whole fleets by rates rather than single commands, to judge planner, autoscaler and hot copies.

mod clients;
pub mod explore;
pub mod fleet;
mod history;
mod hot;
mod injected;
pub mod linear;
mod mover;
pub mod node;
mod random;
pub mod scenario;
pub mod take_over;
mod worker;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

pub use injected::{Bug, Planted};
pub use random::Random;
pub use scenario::Scenario;

use switchyard_policy::migration::Side;

use crate::node::{Persistence, STAGING};
use crate::world::World;

/// Result of a run.
#[derive(Clone, Debug)]
pub struct Run {
    /// Seed of the run.
    pub seed: u64,
    /// First violation found, over several lines.
    pub violation: Option<String>,
    /// Simulated duration, in microseconds.
    pub took_us: u64,
    /// Result of each leg.
    pub outcomes: Vec<String>,
    /// Sides abandoned by legs, which decides the owner of the remaining keys.
    pub without: Vec<Side>,
    /// Keys whose history was too ambiguous to check.
    pub unchecked: u64,
    /// Number of actions of the mover.
    pub actions: u64,
    /// Reads served by hot copies.
    pub hits: u64,
    /// Fills whose reply was stored.
    pub kept: u64,
    /// Transactions executed because the watched key had not changed.
    pub executed: u64,
    /// Keys moved in pieces.
    pub in_pieces: u64,
    /// Keys planned to move in pieces but moved whole.
    pub whole: u64,
    /// Log of events, if requested.
    pub trace: Vec<String>,
}

/// Runs one seed of a scenario.
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
        world.violation = violation.or_else(|| find_keys_left(&world)).or_else(|| find_leaked_staging(&world));
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

/// Returns a violation if keys of moved slots remain at the old node.
fn find_keys_left(world: &World) -> Option<String> {
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
    (!left.is_empty()).then(|| format!("the old node still has {left:?}"))
}

/// Returns a violation if a staging key has no expiry.
fn find_leaked_staging(world: &World) -> Option<String> {
    let mut left = world.nodes.iter().flat_map(|node| node.keys.range(STAGING..));
    left.find(|(_, entry)| entry.expires_us.is_none()).map(|(name, _)| format!("the staging key {name} never expires"))
}

/// Runs `seeds` seeds, starting at `from`, on `threads` threads, and calls `progress` after each. Returns the failed
/// run with the lowest seed, after all started runs have finished.
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
