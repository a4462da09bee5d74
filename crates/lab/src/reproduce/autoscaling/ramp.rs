//! The load of a small fleet grows step by step; the autoscaler adds a node if the mean response time exceeds a
//! threshold, as in the report.
//!
//! The report's servers answer slowly once they swap. Here they answer slowly once they use their share of a processor.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::json;
use switchyard_bench::table::Table;

use super::super::published::autoscaling as says;
use super::super::spread::Spread;
use super::super::watch::{check_interrupted, for_a_while};
use super::super::{Bench, Section, measure, publish};
use super::grown::GrowingFleet;
use super::{Settings, keys, load};
use crate::figure::{self, Line, Panel};
use crate::moves::generator::{self, Run};

const MARK: &str = "autoscaling-ramp";
/// Threshold of the mean response time.
const OBJECTIVE: Duration = Duration::from_millis(10);
/// Maximum number of nodes.
const MOST: usize = 4;
/// Keys: few, because the report's effect is the added node and not its moves.
const KEYS: u64 = 10_000;
/// Requests in flight for each connection, at most: enough for a response time above the objective.
const IN_FLIGHT: usize = 64;
/// Load of a step, as a share of one node's capacity, and its increase from step to step.
const STEP: f64 = 0.25;

/// A step of the load.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(in crate::reproduce) struct Step {
    /// Requests per second, as a share of one node's capacity.
    pub(in crate::reproduce) load: f64,
    mean_ms: f64,
    /// Nodes at the end of the step.
    pub(in crate::reproduce) nodes: usize,
}

/// Results of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(in crate::reproduce) struct Measured {
    /// Requests per second that one node can execute.
    capacity: f64,
    pub(in crate::reproduce) steps: Vec<Step>,
    errors: u64,
    wrong_after: u64,
}

impl Measured {
    /// Returns the load of the first step with more than `nodes` nodes, as a share of one node's capacity.
    pub(in crate::reproduce) fn load_beyond(&self, nodes: usize) -> Option<f64> {
        self.steps.iter().find(|step| step.nodes > nodes).map(|step| step.load)
    }
}

pub(super) fn run(settings: &Settings) -> Result<()> {
    let Settings { conduct, cpu, connections, phase, nodes, .. } = settings;
    let outcome = measure(
        conduct,
        &["ramp"],
        |_| json!({"experiment": "autoscaling-ramp", "cpu": cpu, "connections": connections, "seconds": phase.as_secs_f64(), "nodes": nodes.min(&MOST)}),
        |_| "the load grows step by step".to_owned(),
        |bench, _| one(bench, settings),
    )?;
    let runs: Vec<&Measured> = outcome.results.iter().flatten().collect();
    let mut table =
        Table::new(["nodes", "load of the step that added it, of one node's capacity", "load for each node before"]);
    for nodes in 1..*nodes.min(&MOST) {
        let loads = Spread::of(runs.iter().filter_map(|run| run.load_beyond(nodes)));
        let text = |by: f64| loads.map_or(String::new(), |loads| loads.text(|load| format!("{:.2}", load / by)));
        table.row([format!("{nodes} to {}", nodes + 1), text(1.0), text(nodes as f64)]);
    }
    let panel = |title: &str, y: &str, floor: Option<f64>, value: fn(&Step) -> f64| Panel {
        title: title.to_owned(),
        x: "load, of one node's capacity".to_owned(),
        y: y.to_owned(),
        floor,
        lines: runs
            .first()
            .map(|run| Line {
                name: "first round".to_owned(),
                points: run.steps.iter().map(|step| (step.load, value(step))).collect(),
            })
            .into_iter()
            .collect(),
    };
    let panels = [
        panel("Nodes", "nodes", None, |step| step.nodes as f64),
        panel("Response time", "mean of the step, ms", Some(0.1), |step| step.mean_ms),
    ];
    let bad: u64 = runs.iter().map(|run| run.errors + run.wrong_after).sum();
    let section = Section {
        notes: vec![
            format!(
                "The report, of nodes with 6 MB: \"{}\". Its threshold is a response time of 20 s.",
                says::THRESHOLD
            ),
            format!(
                "One node with {cpu} of a processor can execute {} GET and SET per second. The load grows by {STEP} of that every {} s, in an open loop. `[autoscale]` has the policy \
                 `threshold` with `max-response-time = {} ms`. Failed requests and wrong replies: {bad}.",
                Spread::of(runs.iter().map(|run| run.capacity))
                    .map_or(String::new(), |spread| spread.text(|v| format!("{v:.0}"))),
                phase.as_secs_f64(),
                OBJECTIVE.as_millis()
            ),
        ],
        tables: vec![("A node more".to_owned(), table)],
        figures: vec![(
            "autoscaling-ramp".to_owned(),
            "Nodes and response time by the load".to_owned(),
            figure::svg(&panels)?,
        )],
    };
    publish(conduct, MARK, &outcome, &section)
}

fn one(bench: &Bench<'_>, settings: &Settings) -> Result<Measured> {
    let (conduct, connections, most) = (bench.conduct, settings.connections, settings.nodes.min(MOST));
    let limits = [
        ("max-nodes", most.to_string()),
        ("max-response-time", format!("{}ms", OBJECTIVE.as_millis())),
        ("up-after", "1s".to_owned()),
        ("up-cooldown", "2s".to_owned()),
    ];
    let limits = limits.each_ref().map(|(key, value)| (*key, value.as_str()));
    let mut grown = GrowingFleet::start(bench, &limits, &["--appendonly", "no"])?;
    let entry = grown.site.entry;
    let keys = keys(0, KEYS);
    keys.fill(|_| entry, &|_| {})?;
    grown.cap(&grown.standing()?, settings.cpu)?;
    bench.order(grown.site.admin, &["autoscale", "pause"])?;
    let run = Run::start(&generator::Settings { pipeline: IN_FLIGHT, ..load(entry, &keys, connections, None) })?;
    for_a_while(&run, settings.phase / 4, &conduct.stop)?;
    let (counts, took) = for_a_while(&run, settings.phase, &conduct.stop)?;
    run.finish()?;
    let capacity = counts.tally.replies as f64 / took.as_secs_f64();
    // The autoscaler must not act on the response times of the full load.
    let calm = Run::start(&load(entry, &keys, connections, Some(capacity * STEP)))?;
    for_a_while(&calm, settings.phase, &conduct.stop)?;
    calm.finish()?;
    bench.order(grown.site.admin, &["autoscale", "resume"])?;
    let (mut steps, mut errors) = (Vec::new(), 0);
    for number in 1.. {
        let share = STEP * f64::from(number);
        let standing = grown.standing()?;
        if share > most as f64 || (standing.nodes == most && standing.stage.is_none()) {
            break;
        }
        let rate = Some(capacity * share);
        let run =
            Run::start(&generator::Settings { in_flight_max: IN_FLIGHT, ..load(entry, &keys, connections, rate) })?;
        let begun = Instant::now();
        while begun.elapsed() < settings.phase {
            check_interrupted(&conduct.stop)?;
            std::thread::sleep(Duration::from_millis(100));
            grown.cap(&grown.standing()?, settings.cpu)?;
        }
        let (counts, _) = run.finish()?;
        let tally = &counts.tally;
        errors += tally.errors + tally.wrong + tally.unanswered + tally.disconnects;
        steps.push(Step { load: share, mean_ms: tally.mean().as_secs_f64() * 1e3, nodes: grown.standing()?.nodes });
    }
    let end = Instant::now() + conduct.timeout;
    while grown.standing()?.stage.is_some() {
        ensure!(Instant::now() < end, "a change was not finished within {:?}", conduct.timeout);
        check_interrupted(&conduct.stop)?;
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(Measured { capacity, steps, errors, wrong_after: keys.count_wrong(|_| entry)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_load_of_an_added_node_is_that_of_its_step() {
        let step = |load, nodes| Step { load, mean_ms: 1.0, nodes };
        let steps = vec![step(0.5, 1), step(1.0, 2), step(1.5, 2), step(2.0, 4)];
        let run = Measured { capacity: 1.0, steps, errors: 0, wrong_after: 0 };
        assert_eq!([1, 2, 3, 4].map(|nodes| run.load_beyond(nodes)), [Some(1.0), Some(2.0), Some(2.0), None]);
    }
}
