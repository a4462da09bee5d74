//! Protocols as published: the checkers find their known gaps, which shows that they are as published, and nothing
//! else: clients that only read see everything.

use switchyard_sim::{Scenario, run};

const SEEDS: u64 = 100;

/// Commands of the clients: `only` of the scenario.
const READS: u32 = 1;
const SETS: u32 = 2;
const DELETES: u32 = 3;
const COUNTS: u32 = 4;

/// Tracker: `exact` of the scenario.
const PUBLISHED: u32 = 0;
const EXACT: u32 = 1;
const ADAPTIVE: u32 = 2;

/// Returns the number of runs with a violation, and the first violation.
fn wrong(protocol: &str, only: u32, tracker: u32) -> (usize, String) {
    let base = include_str!("../scenarios/published.txt");
    let text = format!("{base}netmigrate = 0\n{protocol} = 1000\nonly = {only}\nexact = {tracker}\n");
    let scenario = Scenario::parse("published", &text).expect("it is a scenario");
    let runs: Vec<_> = (0..SEEDS).map(|seed| run(seed, &scenario, None, false)).collect();
    let moved = runs.iter().flat_map(|run| &run.outcomes).filter(|outcome| *outcome == "Moved").count() as u64;
    assert!(moved * 100 > SEEDS * 2 * 95, "{protocol}: legs were moved");
    let found: Vec<String> = runs.into_iter().filter_map(|run| run.violation).collect();
    (found.len(), found.into_iter().next().unwrap_or_default())
}

#[test]
fn clients_that_only_read_see_every_key() {
    for protocol in ["netmigrate", "rocksteady", "fulva"] {
        for tracker in [PUBLISHED, EXACT] {
            let (count, first) = wrong(protocol, READS, tracker);
            assert_eq!(count, 0, "{protocol}: {first}");
        }
    }
    let (count, first) = wrong("netmigrate", READS, ADAPTIVE);
    assert_eq!(count, 0, "netmigrate: {first}");
    // Unlike the published filter, these trackers never cause a false nil.
    for tracker in [EXACT, ADAPTIVE] {
        let (count, first) = wrong("bloom", READS, tracker);
        assert_eq!(count, 0, "bloom: {first}");
    }
}

#[test]
fn each_hole_is_found() {
    for (hole, protocol, only, tracker) in [
        ("a copy overwrites a newer write", "netmigrate", SETS, EXACT),
        ("a copy overwrites a newer write", "rocksteady", SETS, EXACT),
        ("a copy overwrites a newer write", "fulva", SETS, EXACT),
        ("a deleted key comes back", "netmigrate", DELETES, EXACT),
        ("a deleted key comes back", "rocksteady", DELETES, EXACT),
        ("a deleted key comes back", "fulva", DELETES, EXACT),
        ("a write depends on a missing key", "netmigrate", COUNTS, EXACT),
        ("a write depends on a missing key", "rocksteady", COUNTS, EXACT),
        ("a write depends on a missing key", "fulva", COUNTS, EXACT),
        ("a write at the source after the copy is lost", "bloom", SETS, EXACT),
        ("a filter is believed", "bloom", READS, PUBLISHED),
    ] {
        let (count, first) = wrong(protocol, only, tracker);
        assert!(count > 3, "{protocol}: {hole}, and {count} runs found it");
        assert!(first.contains("no order fits the replies"), "{protocol}: {first}");
    }
}
