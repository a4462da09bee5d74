//! Runs every scenario with up to a thousand seeds, without a violation. `make sim` tries many more.

use std::sync::atomic::{AtomicU64, Ordering};

use switchyard_policy::migration::Side;
use switchyard_sim::{Run, Scenario, sweep};

/// Seeds of each scenario.
const SEEDS: u64 = 1_000;

/// Checks a scenario. Returns the number of executed transactions with WATCH.
fn clean(name: &str, seeds: u64) -> u64 {
    clean_and(name, seeds, |_| {})
}

/// Checks a scenario, and calls `look` after each run.
fn clean_and(name: &str, seeds: u64, look: impl Fn(&Run) + Sync) -> u64 {
    let scenario = Scenario::built_in(name).expect("it comes with the simulator");
    let [moved, unchecked, actions, executed] = std::array::from_fn(|_| AtomicU64::new(0));
    let found = sweep(&scenario, None, 0, seeds, 2, |run| {
        look(run);
        moved.fetch_add(run.outcomes.iter().filter(|outcome| *outcome == "Moved").count() as u64, Ordering::Relaxed);
        unchecked.fetch_add(run.unchecked, Ordering::Relaxed);
        actions.fetch_add(run.actions, Ordering::Relaxed);
        executed.fetch_add(run.executed, Ordering::Relaxed);
    });
    if let Some(run) = found {
        panic!("{name}, seed {}: {}", run.seed, run.violation.unwrap_or_default());
    }
    // A scenario without any activity would pass, too.
    assert!(moved.into_inner() > seeds, "{name}: legs were moved");
    assert!(actions.into_inner() > 20 * seeds, "{name}: movers were busy");
    assert!(unchecked.into_inner() * 100 < seeds, "{name}: nearly all histories were checked");
    executed.into_inner()
}

#[test]
fn calm() {
    clean("calm", SEEDS);
}

#[test]
fn rough() {
    clean("rough", SEEDS);
}

#[test]
fn forgetful() {
    clean("forgetful", SEEDS);
}

#[test]
fn databases() {
    clean("databases", SEEDS);
}

#[test]
fn netmigrate() {
    clean("netmigrate", SEEDS);
}

#[test]
fn fulva() {
    clean("fulva", SEEDS);
}

#[test]
fn rocksteady() {
    clean("rocksteady", SEEDS);
}

#[test]
fn precopy() {
    clean("precopy", SEEDS);
}

#[test]
fn precopy_forgetful() {
    clean("precopy-forgetful", SEEDS);
}

#[test]
fn stop_and_copy() {
    clean("stop-and-copy", SEEDS);
}

/// MIGRATE removes keys at the source before anything is on record, so a restart of the target in the middle loses
/// keys. The router therefore uses it only if that is allowed. After a fix of the protocol, add killed nodes to its
/// scenario and delete this test.
#[test]
fn stop_and_copy_loses_keys_if_nodes_are_killed() {
    let text = switchyard_sim::scenario::BUILT_IN
        .iter()
        .find(|(name, _)| *name == "stop-and-copy")
        .expect("it comes with the simulator")
        .1;
    let scenario =
        Scenario::parse("stop-and-copy with kills", &format!("{text}\nkill-node = 500")).expect("a scenario");
    let found = sweep(&scenario, None, 0, 10_000, 2, |_| {}).and_then(|run| run.violation);
    assert!(
        found.as_ref().is_some_and(|what| what.contains("no order fits")),
        "acknowledged writes are lost: {found:?}"
    );
}

#[test]
fn full_disk() {
    clean("full-disk", SEEDS);
}

#[test]
fn clocks() {
    clean("clocks", SEEDS);
}

#[test]
fn exceptions() {
    clean("exceptions", SEEDS);
}

#[test]
fn adoptions_of_rules() {
    clean("adoptions", SEEDS);
}

#[test]
fn given_up() {
    clean("given-up", SEEDS);
}

#[test]
fn lost() {
    let [to_source, to_target] = std::array::from_fn(|_| AtomicU64::new(0));
    clean_and("lost", SEEDS, |run| {
        to_source
            .fetch_add(run.without.iter().filter(|owner| **owner == Side::Source).count() as u64, Ordering::Relaxed);
        to_target
            .fetch_add(run.without.iter().filter(|owner| **owner == Side::Target).count() as u64, Ordering::Relaxed);
    });
    let [to_source, to_target] = [to_source.into_inner(), to_target.into_inner()];
    assert!(
        to_source > SEEDS / 17 && to_target > SEEDS / 17,
        "legs end without either side: {to_source} and {to_target}"
    );
}

#[test]
fn watch() {
    let executed = clean("watch", SEEDS);
    assert!(executed > SEEDS, "not every EXEC returned nil: {executed}");
}

#[test]
fn staging() {
    let (in_pieces, whole) = (AtomicU64::new(0), AtomicU64::new(0));
    clean_and("staging", SEEDS, |run| {
        in_pieces.fetch_add(run.in_pieces, Ordering::Relaxed);
        whole.fetch_add(run.whole, Ordering::Relaxed);
    });
    let (in_pieces, whole) = (in_pieces.into_inner(), whole.into_inner());
    println!("staging: {in_pieces} keys moved in pieces, {whole} moved whole instead");
    assert!(in_pieces > SEEDS / 5 && whole > SEEDS / 10, "both are tried: {in_pieces} in pieces, {whole} whole");
}

#[test]
fn slots() {
    let legs = AtomicU64::new(0);
    clean_and("slots", SEEDS, |run| {
        legs.fetch_add(run.outcomes.len() as u64, Ordering::Relaxed);
    });
    let legs = legs.into_inner();
    assert!(legs > 11 * SEEDS / 2, "moves are cut into legs: {legs}");
}

#[test]
fn movers() {
    clean("movers", SEEDS);
}

#[test]
fn movers_between_nodes_that_lose_data() {
    clean("movers-forget", SEEDS);
}

#[test]
fn a_seed_determines_the_run() {
    let scenario = Scenario::built_in("rough").expect("it comes with the simulator");
    for seed in 0..20 {
        let first = switchyard_sim::run(seed, &scenario, None, true);
        let second = switchyard_sim::run(seed, &scenario, None, true);
        assert_eq!(first.trace, second.trace, "seed {seed}");
        assert!(!first.trace.is_empty());
    }
}

/// Checks a scenario with hot copies: copies are stored, and a thousand runs have at least `hits_in_a_thousand` hits.
fn hot(name: &str, seeds: u64, hits_in_a_thousand: u64) {
    let scenario = Scenario::built_in(name).expect("it comes with the simulator");
    let [hits, kept, moved, unchecked] = std::array::from_fn(|_| AtomicU64::new(0));
    let found = sweep(&scenario, None, 0, seeds, 2, |run| {
        hits.fetch_add(run.hits, Ordering::Relaxed);
        kept.fetch_add(run.kept, Ordering::Relaxed);
        moved.fetch_add(run.outcomes.iter().filter(|outcome| *outcome == "Moved").count() as u64, Ordering::Relaxed);
        unchecked.fetch_add(run.unchecked, Ordering::Relaxed);
    });
    if let Some(run) = found {
        panic!("{name}, seed {}: {}", run.seed, run.violation.unwrap_or_default());
    }
    let [hits, kept, moved, unchecked] = [hits, kept, moved, unchecked].map(AtomicU64::into_inner);
    println!("{name}: {hits} hits, {kept} copies, {moved} legs");
    assert!(
        hits * 1000 > hits_in_a_thousand * seeds && kept > 10 * seeds,
        "{name}: copies are stored and served: {kept} and {hits}"
    );
    assert!(moved > seeds || scenario.moves == 0, "{name}: legs were moved");
    assert!(unchecked * 100 < seeds, "{name}: nearly all histories were checked");
}

#[test]
fn hot_copies() {
    hot("hot", 1_000, 10_000);
}

#[test]
fn hot_copies_while_keys_move() {
    hot("hot-moves", 500, 4_000);
}

#[test]
fn hot_copies_of_keys_that_move_away_and_return() {
    hot("hot-returns", 500, 20_000);
}

#[test]
fn hot_copies_with_arbitrary_writes() {
    hot("hot-rough", 700, 2_000);
}

#[test]
fn in_vain() {
    clean("in-vain", SEEDS);
}
