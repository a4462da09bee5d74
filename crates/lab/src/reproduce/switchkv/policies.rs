//! The rules of admission compared: ours and the published ones, each with ours and the published limit of changes. And
//! the parameters of the trackers that the paper does not state.
//!
//! Both use the workloads of figures 15 to 19. There are two deployments: the paper's switch, with few rule updates and
//! five keys in a report; and a router without rules, which sees all counts and makes more changes.

use anyhow::Result;
use switchyard_bench::table::Table;
use switchyard_sim::fleet::switchkv::{
    Admission, Limited, Pattern, Selection, Settings as Simulation, Trackers, Updates,
};

use super::super::{Conduct, Outcome, Section, publish};
use super::changes::{HOT_IN, PATTERNS, each_second, filled, hot_in};
use super::{Measured, Run, Settings, found, mqps, shown, simulate};

const POLICIES: &str = "switchkv-policies";
const POLICIES_MARK: &str = "reproduce-switchkv-policies";
const PARAMETERS: &str = "switchkv-parameters";
const PARAMETERS_MARK: &str = "reproduce-switchkv-parameters";

/// Changed keys per second.
const RATE: usize = 200;
/// Keys that a router's report has of each node: all that the counters hold.
const ALL_KEYS: usize = 1000;

/// Pairs of rules, with their names in the configuration.
const PAIRS: [(&str, Selection, Limited); 4] = [
    ("load, additions", Selection::Load, Limited::Admissions),
    ("percentile, additions", Selection::Percentile, Limited::Admissions),
    ("load, additions-and-removals", Selection::Load, Limited::Changes),
    ("percentile, additions-and-removals", Selection::Percentile, Limited::Changes),
];

/// A place where the admission runs.
#[derive(Clone, Copy)]
struct Deployment {
    name: &'static str,
    figure: &'static str,
    trackers: Trackers,
    rules_per_second: Option<f64>,
    /// Additions per second, and with a common limit changes per second.
    per_second: (usize, usize),
}

/// The deployments. With each limit, as many changes are possible in the long run.
const DEPLOYMENTS: [Deployment; 2] = [
    Deployment {
        name: "SwitchKV's switch: 400 rules per second, reports of 5 keys",
        figure: "switch",
        trackers: Trackers::DEFAULT,
        rules_per_second: Some(400.0),
        per_second: (200, 400),
    },
    Deployment {
        name: "a router: 1,000 changes per second, reports of all counted keys",
        figure: "router",
        trackers: Trackers { listed: ALL_KEYS, reported: ALL_KEYS, ..Trackers::DEFAULT },
        rules_per_second: None,
        per_second: (500, 1000),
    },
];

impl Deployment {
    fn updates(&self, selection: Selection, limited: Limited) -> Updates {
        // Each rule has its own minimum and delay: ours the defaults of the router, the published ones the paper's.
        let (ours, published) = (Admission::of_router(), Admission::PUBLISHED);
        let least = if selection == Selection::Load { ours.least } else { published.least };
        let (per_second, delay) = match limited {
            Limited::Admissions => (self.per_second.0, ours.delay),
            Limited::Changes => (self.per_second.1, published.delay),
        };
        let admission = Admission { selection, limited, per_second, delay, least };
        let Self { rules_per_second, trackers, .. } = *self;
        Updates { rules_per_second, trackers, ..Updates::reports(true, true, admission) }
    }
}

/// Returns the workloads, with their names.
fn workloads(updates: Updates) -> Vec<(String, Simulation)> {
    let mut all = vec![("hot-in".to_owned(), hot_in(RATE, HOT_IN.1, updates, 25))];
    for (name, pattern) in PATTERNS.into_iter().filter(|(_, pattern)| *pattern != Pattern::HotIn) {
        all.push((name.to_owned(), each_second(pattern, RATE, updates, 20)));
    }
    all
}

fn runs_of_policies() -> Vec<Run> {
    let mut runs = Vec::new();
    for deployment in DEPLOYMENTS {
        for (name, selection, limited) in PAIRS {
            for (workload, settings) in workloads(deployment.updates(selection, limited)) {
                runs.push(Run::new(deployment.figure, format!("{name}, {workload}"), 0.0, settings));
            }
        }
    }
    runs
}

/// Cells of a row: the results of the workloads of one choice.
fn cells(runs: &[Run], outcome: &Outcome<Measured>, figure: &str, name: &str) -> Vec<String> {
    let of = |workload: &str| found(runs, outcome, figure, &format!("{name}, {workload}"));
    let hot = of("hot-in");
    vec![
        mqps(hot, |outcome| outcome.throughput),
        filled(hot),
        mqps(of("hot-out"), |outcome| outcome.throughput),
        mqps(of("random"), |outcome| outcome.throughput),
        shown(of("random"), 0, |measured| Some(measured.outcome.rules)),
    ]
}

const HEAD: [&str; 5] =
    ["hot-in, MQPS", "90 % of the new keys are cached, s", "hot-out, MQPS", "random, MQPS", "changes/s, random"];

/// Compares the rules.
pub(super) fn run(settings: &Settings) -> Result<()> {
    let (runs, outcome) = simulate(settings, POLICIES, runs_of_policies())?;
    let mut section = Section::default();
    for deployment in DEPLOYMENTS {
        let mut table = Table::new(["admission, limited-changes"].into_iter().chain(HEAD));
        for (name, ..) in PAIRS {
            let row = [name.to_owned()].into_iter().chain(cells(&runs, &outcome, deployment.figure, name));
            table.row(row);
        }
        section.tables.push((format!("Admission at {}", deployment.name), table));
    }
    publish(&settings.conduct, POLICIES_MARK, &outcome, &section)
}

/// Returns the published updates with other values of the parameters that the paper does not state, one at a time.
fn variants() -> Vec<(String, Updates, f64)> {
    let default = Trackers::DEFAULT;
    let rise = Simulation::default().rise;
    let mut all = vec![("as in the figures".to_owned(), Updates::PUBLISHED, rise)];
    let mut vary =
        |name: String, trackers: Trackers| all.push((name, Updates { trackers, ..Updates::PUBLISHED }, rise));
    for alpha in [0.2, 0.8, 1.0] {
        vary(format!("alpha {alpha}"), Trackers { alpha, ..default });
    }
    for counters in [100, 300, 4000] {
        vary(format!("N {counters}"), Trackers { counters, ..default });
    }
    for listed in [5, 20, 1000] {
        vary(format!("k {listed}"), Trackers { listed, ..default });
    }
    for instant_load in [0.0, 0.9] {
        vary(format!("instant reports from {instant_load} of the limit on"), Trackers { instant_load, ..default });
    }
    for sample in [1, 16] {
        vary(format!("one query in {sample} enters the log"), Trackers { sample, ..default });
    }
    vary("all backends report at the same time".to_owned(), Trackers { phases: 1, ..default });
    for delay in [1.0, 5.0] {
        let updates = Updates::reports(true, true, Admission { delay, ..Admission::PUBLISHED });
        all.push((format!("removals wait for {delay} s"), updates, rise));
    }
    for rise in [0.005, 0.05] {
        all.push((format!("the sender's rate rises by {} %", rise * 100.0), Updates::PUBLISHED, rise));
    }
    all
}

fn runs_of_parameters() -> Vec<Run> {
    let mut runs = Vec::new();
    for (name, updates, rise) in variants() {
        for (workload, settings) in workloads(updates) {
            // The first change of hot-in is enough here.
            let settings = Simulation { rise, seconds: settings.seconds.min(14), ..settings };
            runs.push(Run::new("parameters", format!("{name}, {workload}"), 0.0, settings));
        }
    }
    runs
}

/// Varies the parameters, with one seed.
pub(super) fn parameters(settings: &Settings) -> Result<()> {
    let settings = Settings { conduct: Conduct { repeat: 1, ..settings.conduct.clone() }, ..settings.clone() };
    let (runs, outcome) = simulate(&settings, PARAMETERS, runs_of_parameters())?;
    let mut table = Table::new(["parameter"].into_iter().chain(HEAD));
    for (name, ..) in variants() {
        table.row([name.clone()].into_iter().chain(cells(&runs, &outcome, "parameters", &name)));
    }
    let tables = vec![("Parameters that the paper does not state".to_owned(), table)];
    publish(&settings.conduct, PARAMETERS_MARK, &outcome, &Section { tables, ..Section::default() })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn runs_are_unique() {
        for runs in [runs_of_policies(), runs_of_parameters()] {
            let names: BTreeSet<_> = runs.iter().map(|run| (run.figure, &run.name)).collect();
            assert_eq!(names.len(), runs.len());
        }
    }
}
