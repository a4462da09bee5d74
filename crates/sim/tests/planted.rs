//! Every planted bug is found, which shows that the checkers see violations.
//!
//! Run with `cargo test -p switchyard-sim --features planted-bugs --test planted`; `-- --nocapture` prints the seeds.

#![cfg(feature = "planted-bugs")]

use switchyard_policy::migration::Bug as Machine;
use switchyard_sim::explore::{Bounds, explore};
use switchyard_sim::{Bug, Planted, Scenario, sweep};

/// Seeds tried in each scenario until the bug is found.
const SEEDS: u64 = 20_000;

/// Bugs of copying in pieces: other scenarios have no big keys.
const STAGING: &[Machine] = &[
    Machine::StagedWithoutBarrier,
    Machine::TouchedNotReadAgain,
    Machine::TailReadTooEarly,
    Machine::PieceWrittenLate,
    Machine::ChangeAsAWholeUnheard,
    Machine::TailNotReadInTheLeg,
    Machine::StagedAtAnotherProcess,
    Machine::NotCounted,
    Machine::GoneIsRenamed,
];

/// Bugs of legs of several slots, and of moves of several legs.
const SLOTS: &[Planted] = &[
    Planted::Around(Bug::LaterSlotsNotObserved),
    Planted::Around(Bug::HandedOverTooEarly),
    Planted::Machine(Machine::SlotForgotten),
    Planted::Machine(Machine::SlotNotPurged),
];

/// Bugs of protocols that copy all keys first.
const PRECOPY: &[Machine] = &[
    Machine::ReadAgainTooEarly,
    Machine::LastWritesForgotten,
    Machine::GoneStaysCopied,
    Machine::CopiedFromAnother,
    Machine::PastNotPurged,
];

/// Bugs of hot copies that need arbitrary writes.
const HOT_ROUGH: &[Bug] = &[
    Bug::FlushRaisesNothing,
    Bug::RenamedToForgotten,
    Bug::ScriptRaisesItsKeys,
    Bug::BlockedRaisesNothing,
    Bug::BlockedRaisesOnce,
];

/// Other bugs of hot copies.
const HOT: &[Bug] = &[
    Bug::WriteRaisesNothing,
    Bug::RaisedLate,
    Bug::OneCounter,
    Bug::KeptBesideAWrite,
    Bug::WaitersAreToldThePast,
    Bug::FilledBeforeAllCacheable,
    Bug::FilledBesideOlderWrites,
    Bug::UncacheableAtOnce,
    Bug::GatesBeforeStayOpen,
    Bug::OpenedAtTimeOut,
    Bug::DoubtfulIsOver,
    Bug::LifeForgotten,
    Bug::PanicForgetsWhatWasSent,
    Bug::AnotherProcessUnnoticed,
];

/// Bugs of several moves at once.
const MOVERS: &[Planted] = &[
    Planted::Around(Bug::FlushWaitsForOne),
    Planted::Around(Bug::OtherLegDropped),
    Planted::Around(Bug::FirstMoveTakenUp),
    Planted::Around(Bug::MapMadeBefore),
];

#[test]
fn each_bug_is_found_within_twenty_thousand_seeds() {
    std::panic::set_hook(Box::new(|_| {}));
    let scenarios =
        |names: &[&str]| -> Vec<Scenario> { names.iter().filter_map(|name| Scenario::built_in(name)).collect() };
    let (others, watch) = (scenarios(&["rough", "forgetful", "calm", "exceptions", "given-up"]), scenarios(&["watch"]));
    let (staging, stop_and_copy) = (scenarios(&["staging"]), scenarios(&["stop-and-copy"]));
    let (full_disk, lost, clocks) = (scenarios(&["full-disk"]), scenarios(&["lost"]), scenarios(&["clocks"]));
    let (slots, movers, in_vain) = (scenarios(&["slots"]), scenarios(&["movers"]), scenarios(&["in-vain"]));
    let movers_forget = scenarios(&["movers-forget"]);
    let (databases, netmigrate) = (scenarios(&["databases"]), scenarios(&["netmigrate"]));
    let (hot, hot_rough) = (scenarios(&["hot"]), scenarios(&["hot-rough"]));
    let (hot_moves, hot_returns) = (scenarios(&["hot-moves"]), scenarios(&["hot-returns"]));
    let precopy = scenarios(&["precopy", "precopy-forgetful"]);
    let mut missed = Vec::new();
    for planted in Planted::ALL {
        // Other scenarios have no WATCH.
        let of_watches = matches!(planted, Planted::Around(Bug::WatchForgotten | Bug::WatchStays | Bug::WatchReturns));
        let of_staging = matches!(planted, Planted::Around(Bug::ToldNotTakenInTheLeg | Bug::TailReadBeforeTheLeg))
            || matches!(planted, Planted::Machine(bug) if STAGING.contains(bug));
        let of_a_target_that_dies =
            matches!(planted, Planted::Machine(Machine::GoneIsRenamed | Machine::StagedAtAnotherProcess))
                || *planted == Planted::Around(Bug::UnusableKeptAtReturn);
        let of_copies = |bugs: &[Bug]| matches!(planted, Planted::Around(bug) if bugs.contains(bug));
        let found = if of_watches {
            &watch
        } else if of_copies(HOT) {
            &hot
        } else if of_copies(HOT_ROUGH) {
            &hot_rough
        } else if *planted == Planted::Around(Bug::ServedOnItsWay) {
            &hot_moves
        } else if *planted == Planted::Around(Bug::NotPlacedAnew) {
            &hot_returns
        } else if of_a_target_that_dies {
            &in_vain
        } else if of_staging {
            &staging
        } else if matches!(planted, Planted::Machine(bug) if PRECOPY.contains(bug)) {
            &precopy
        } else if SLOTS.contains(planted) {
            &slots
        } else if MOVERS.contains(planted) {
            &movers
        } else if matches!(planted, Planted::Machine(Machine::LegOvertaken | Machine::GivenUpStays)) {
            &full_disk
        } else if *planted == Planted::Machine(Machine::GivenUpBeforeRecord) {
            &movers_forget
        } else if *planted == Planted::Machine(Machine::GivenUpWithoutDrain) {
            // Other scenarios abandon no node.
            &lost
        } else if matches!(
            planted,
            Planted::Around(Bug::DatabasesAskedEarly) | Planted::Machine(Machine::WalkedWhileAway)
        ) {
            &databases
        } else if matches!(planted, Planted::Around(Bug::DoubleReadBelieved | Bug::DoubleReadOfAnyProcess)) {
            &netmigrate
        } else if *planted == Planted::Around(Bug::ClocksNotCompared) {
            &clocks
        } else if *planted == Planted::Machine(Machine::CommittedAtTheOther) {
            // The only protocol that rolls back without publishing to the workers.
            &stop_and_copy
        } else {
            &others
        }
        .iter()
        .find_map(|scenario| {
            let run = sweep(scenario, Some(*planted), 0, SEEDS, 2, |_| {})?;
            Some((scenario.name.clone(), run))
        });
        match found {
            Some((scenario, run)) => {
                let what = run.violation.unwrap_or_default();
                println!("{planted:?}: {scenario}, seed {}: {}", run.seed, what.lines().next().unwrap_or_default());
            }
            None => {
                println!("{planted:?}: NOT FOUND");
                missed.push(planted);
            }
        }
    }
    let _ = std::panic::take_hook();
    assert!(missed.is_empty(), "not found: {missed:?}");
}

/// The exhaustive search also finds bugs that need no clock, expiry or data loss, with the fewest steps.
#[test]
fn the_search_through_all_orders_finds_bugs() {
    let base = Bounds { keys: 1, ..Bounds::default() };
    let (cut, restart) = (Bounds { cuts: 1, ..base }, Bounds { restarts: 1, ..base });
    let (crash, turn) = (Bounds { crashes: 1, ..base }, Bounds { turns: 1, ..base });
    let planted = [
        (Planted::Machine(Machine::NoDrain), base),
        (Planted::Machine(Machine::NoPurge), base),
        (Planted::Machine(Machine::CommitBeforeRecord), crash),
        (Planted::Machine(Machine::UnlinkBeforeRecord), crash),
        (Planted::Machine(Machine::HandOverWithKeysLeft), base),
        (Planted::Machine(Machine::NoPurgeAfterRestart), restart),
        (Planted::Machine(Machine::NotRedone), cut),
        (Planted::Machine(Machine::AbsentNotRecorded), crash),
        (Planted::Machine(Machine::RollbackWithoutDrain), turn),
        (Planted::Around(Bug::ClosedCountsAsDrained), cut),
        (Planted::Around(Bug::ReplacedWithoutKill), cut),
        (Planted::Around(Bug::ResumedWithoutKill), crash),
        (Planted::Around(Bug::JournalNotSynced), crash),
        (Planted::Around(Bug::CommittedKept), turn),
    ];
    for (planted, bounds) in planted {
        let searched = explore(bounds, Some(planted), 1_000_000);
        let Some((what, way)) = searched.violation else {
            panic!("{planted:?}: not found in {} states", searched.states)
        };
        println!("{planted:?}: {} states, {} steps: {what}", searched.states, way.len());
    }
}
