//! Fleets: the results of all built-in scenarios, which must reach their goals and equal the stored ones.
//!
//! After an intended change of a policy, write the results again and review the difference:
//! `SWITCHYARD_REWRITE_GOLDEN=1 cargo nextest run -p switchyard-sim --test fleet`.

use std::path::PathBuf;

use switchyard_sim::Random;
use switchyard_sim::fleet::scenario::{Churn, ChurnKind, Copies, Planner};
use switchyard_sim::fleet::{KeyLoad, Planted, Policies, Run, Scenario, golden, keys_at, run};

fn scenario(name: &str) -> Scenario {
    Scenario::built_in(name).unwrap_or_else(|| panic!("there is no scenario {name}"))
}

fn runs(scenario: &Scenario, planted: Option<Planted>) -> Vec<Run> {
    (1..=scenario.seeds).map(|seed| run(scenario, seed, planted)).collect()
}

fn missed(scenario: &Scenario, runs: &[Run]) -> Vec<String> {
    runs.iter().flat_map(|run| scenario.goal.missed(run)).collect()
}

/// Compares the results of a scenario with the stored ones, and checks its goals.
fn check(name: &str) {
    let scenario = scenario(name);
    let runs = runs(&scenario, None);
    let found = golden(&runs);
    println!("{name}:\n{found}");
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("scenarios/fleet/{name}.txt"));
    if std::env::var_os("SWITCHYARD_REWRITE_GOLDEN").is_some() {
        std::fs::write(&path, &found).expect("the results are written");
    }
    let missed = missed(&scenario, &runs);
    assert!(missed.is_empty(), "{name} misses its goals: {missed:?}\n{found}");
    let stored = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(found, stored, "{name}: the results differ from {} (see the head of this test)", path.display());
}

macro_rules! scenarios_keep_their_results {
    ($($test:ident: $name:literal,)*) => {
        $(
            #[test]
            fn $test() {
                check($name);
            }
        )*
    };
}

scenarios_keep_their_results! {
    step_keeps_its_results_and_goals: "step",
    diurnal_keeps_its_results_and_goals: "diurnal",
    weekly_keeps_its_results_and_goals: "weekly",
    hot_in_keeps_its_results_and_goals: "hot-in",
    hot_out_keeps_its_results_and_goals: "hot-out",
    random_replacement_keeps_its_results_and_goals: "random-replacement",
    flash_crowd_keeps_its_results_and_goals: "flash-crowd",
    slow_growth_keeps_its_results_and_goals: "slow-growth",
    noise_keeps_its_results_and_goals: "noise",
}

/// The scenario `ahead` with another policy.
fn ahead(policy: &str) -> Scenario {
    Policies::parse(&format!("autoscale={policy}")).expect("a policy").apply(&scenario("ahead"))
}

#[test]
fn policies_that_look_ahead_reach_goals_that_threshold_misses() {
    let missed_by = |policy: &str| {
        let scenario = ahead(policy);
        let runs = runs(&scenario, None);
        println!("{policy}:\n{}", golden(&runs));
        missed(&scenario, &runs)
    };
    let [learned, predictive, threshold] = ["learned", "predictive", "threshold"].map(missed_by);
    assert!(learned.is_empty() && predictive.is_empty(), "learned: {learned:?}, predictive: {predictive:?}");
    assert!(!threshold.is_empty());
}

/// A run without its wall time.
fn reproducible(run: Run) -> Run {
    Run { wall: std::time::Duration::ZERO, solving: std::time::Duration::ZERO, ..run }
}

#[test]
fn keys_at_a_time_have_the_shares_of_the_events() {
    let mut scenario = scenario("step");
    scenario.keys.count = scenario.keys.head as f64;
    let [before, after] = [0.0, 60.0].map(|at| keys_at(&scenario, 1, at));
    let sum = |keys: &[KeyLoad]| keys.iter().map(|key| key.share).sum::<f64>();
    let of_event = |keys: &[KeyLoad]| sum(&keys[scenario.keys.head..]);
    assert!((sum(&before) - 1.0).abs() < 1e-5 && (sum(&after) - 1.0).abs() < 1e-5);
    assert!(of_event(&before) == 0.0 && (of_event(&after) - 0.25).abs() < 1e-9);
    assert!(before.iter().map(|key| &key.name).eq(after.iter().map(|key| &key.name)));
    assert!(after[scenario.keys.head..].iter().all(|key| key.writes == 1.0));
}

#[test]
fn a_seed_determines_a_run() {
    let mut scenario = scenario("flash-crowd");
    scenario.duration = 320.0;
    let [one, again, other] = [1, 1, 2].map(|seed| reproducible(run(&scenario, seed, None)));
    assert!(one == again && one != other);
}

#[test]
fn policies_do_not_change_the_load() {
    let mut with = scenario("noise");
    with.duration = 200.0;
    let mut without = with.clone();
    (without.planner, without.copies, without.autoscale) = (None, None, None);
    let offered = |scenario: &Scenario| -> Vec<f64> {
        run(scenario, 3, None).points.iter().map(|point| point.offered.round()).collect()
    };
    assert_eq!(offered(&with), offered(&without));
}

/// Random small fleets. Every request is served, lost, or waits at the end; no panic, no reversed move.
#[test]
fn no_request_disappears_in_random_fleets() {
    for seed in 0..16 {
        let mut draws = Random::new(seed);
        let mut scenario = scenario("step");
        let mut between = |low: u64, high: u64| draws.between(low, high) as f64;
        scenario.nodes.count = between(1, 12) as usize;
        (scenario.events[0].node, scenario.events[0].at) = (None, 14.0);
        scenario.events[0].share = between(0, 90) / 100.0;
        scenario.keys.zipf = between(0, 12) / 10.0;
        scenario.keys.head = between(10, 600) as usize;
        scenario.keys.writes = between(0, 10) / 10.0;
        scenario.load.rate = between(100, 900_000);
        scenario.nodes.capacity = (between(0, 1) > 0.0).then_some(50_000.0);
        scenario.copies = (between(0, 1) > 0.0).then(Copies::default);
        scenario.planner = (between(0, 3) > 0.0).then(Planner::default);
        scenario.slice = [0.1, 1.0, 7.0][between(0, 2) as usize];
        scenario.bin = 14.0;
        scenario.churn = (between(0, 1) > 0.0).then_some(Churn {
            kind: [ChurnKind::HotIn, ChurnKind::HotOut, ChurnKind::Random][between(0, 2) as usize],
            keys: between(1, 10) as usize,
            every: between(1, 30),
            within: 10,
        });
        (scenario.duration, scenario.warm_up) = (42.0, 0.0);
        scenario.check().unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        let run = run(&scenario, seed, None);
        let sum = |of: fn(&switchyard_sim::fleet::Point) -> f64| run.points.iter().map(of).sum::<f64>() * scenario.bin;
        let offered = sum(|point| point.offered);
        let ended = sum(|point| point.served) + sum(|point| point.lost * point.offered);
        let waiting = scenario.nodes.count as f64 * scenario.nodes.service_rate * scenario.nodes.queue;
        // Single precision of shares; and the commands that fill copies wait as well.
        let missing = offered - ended;
        assert!(missing.abs() <= waiting + offered * 1e-3, "seed {seed}: {missing} of {offered} are missing");
        assert!(run.reversals == 0 || run.reverts > 0, "seed {seed}: a move was reversed although it had helped");
    }
}

#[cfg(feature = "planted-bugs")]
mod planted {
    use switchyard_policy::{autoscale, hot_copies, planner, telemetry};

    use super::*;

    /// Each bug with the scenario whose goals it violates.
    #[test]
    fn planted_bugs_violate_the_goals_of_a_scenario() {
        let bugs = [
            ("hot-out", Planted::Telemetry(telemetry::Bug::NoDecay)),
            ("hot-out", Planted::Admission(hot_copies::Bug::NoEviction)),
            ("step", Planted::Planner(planner::Bug::StaleObservation)),
            ("noise", Planted::Autoscaler(autoscale::Bug::DelayForgotten)),
        ];
        let ahead = [
            (ahead("predictive"), Planted::Autoscaler(autoscale::Bug::ChangesTakeNoTime)),
            (ahead("learned"), Planted::Autoscaler(autoscale::Bug::LabelsWithoutHindsight)),
        ];
        let mut unseen = Vec::new();
        for (scenario, bug) in bugs.map(|(name, bug)| (scenario(name), bug)).into_iter().chain(ahead) {
            let missed = missed(&scenario, &runs(&scenario, Some(bug)));
            println!("{bug:?}: {}: {missed:?}", scenario.name);
            if missed.is_empty() {
                unseen.push(bug);
            }
        }
        assert!(unseen.is_empty(), "no goal is missed with {unseen:?}");
    }
}
