//! Four times the load at once: time until responses are within the objective again. And after its end: time until the
//! node is drained and stopped.
//!
//! No paper has this. The load is a part of one node's capacity, which is measured first, so that each machine gets the
//! same step.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::json;
use switchyard_bench::load::Tally;
use switchyard_bench::numbers::thousands;
use switchyard_bench::table::Table;

use super::super::spread::Spread;
use super::super::watch::{check_interrupted, for_a_while};
use super::super::{Bench, Section, measure, publish};
use super::grown::{AutoscalerState, GrowingFleet};
use super::{Settings, keys, load};
use crate::figure::{self, Line, Panel};
use crate::moves::generator::{self, Run};

const MARK: &str = "autoscaling-surge";
/// Numbers of keys. Half of them move to the new node, so they decide how soon it helps.
const SIZES: [u64; 2] = [10_000, 100_000];
/// Initial load as a part of one node's capacity; then four times as much.
const PART: f64 = 0.3;
/// Pipeline depth while the capacity is measured, because a server with many requests at once serves more.
const PIPELINE: usize = 16;
/// Mean response time that the autoscaler must keep.
const OBJECTIVE: Duration = Duration::from_millis(10);
/// Delays and cooldowns of the autoscaler.
const UP_AFTER: &str = "1s";
const UP_COOLDOWN: &str = "10s";
const DOWN_AFTER: Duration = Duration::from_secs(5);
const DOWN_COOLDOWN: Duration = Duration::from_secs(15);
/// Interval between samples.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(250);
/// Time for which responses must stay within the objective.
const LASTS: Duration = Duration::from_secs(5);
/// Maximum requests in flight per connection, as in clients with pools. Further ones wait there, and their clocks run.
const UNDER_WAY: usize = 64;
/// The goals: seconds beyond the provisioning time, and seconds after the down epoch.
const GOAL_UP: f64 = 10.0;
const GOAL_DOWN: f64 = 60.0;

/// A sample: seconds since the surge, mean response time in milliseconds, and number of nodes.
type Sample = (f64, f64, usize);

/// Results of a run. Times are seconds since the load rose.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Measured {
    /// Capacity of one node, in requests per second.
    capacity: f64,
    /// Decision to add a node.
    decided: f64,
    /// Start of the new server.
    started: f64,
    /// Join of the new node.
    joined: f64,
    /// End of the moves to the new node.
    filled: f64,
    /// Start of the time with responses within the objective.
    well: f64,
    most_nodes: usize,
    /// Fall of the load.
    fell: f64,
    /// Earliest removal of a node, after `down-after` and `down-cooldown`.
    may_go: f64,
    /// Decision to remove a node.
    goes: f64,
    /// The node has no keys.
    drained: f64,
    /// Stop of the server.
    ended: f64,
    errors: u64,
    wrong_after: u64,
    looks: Vec<Sample>,
}

impl Measured {
    /// Returns the time from the decision until the new server has joined.
    fn provisioning(&self) -> f64 {
        self.joined - self.decided
    }
}

pub(super) fn run(settings: &Settings) -> Result<()> {
    let Settings { conduct, cpu, connections, phase, .. } = settings;
    let outcome = measure(
        conduct,
        &SIZES,
        |size| json!({"experiment": "autoscaling-surge", "cpu": cpu, "connections": connections, "seconds": phase.as_secs_f64(), "keys": size}),
        |size| format!("four times the load at once, {} keys", thousands(*size)),
        |bench, size| one(bench, settings, *size),
    )?;
    let header = SIZES.map(|size| format!("s, {} keys", thousands(size)));
    let mut stages = Table::new(["".to_owned()].into_iter().chain(header).chain(["after".to_owned()]));
    let text = |runs: &[Measured], value: &dyn Fn(&Measured) -> f64| {
        Spread::of(runs.iter().map(value))
            .map_or(String::new(), |spread| spread.text(|seconds| format!("{seconds:.1}")))
    };
    let mut row = |what: &str, value: &dyn Fn(&Measured) -> f64, after: &str| {
        let sizes = outcome.results.iter().map(|runs| text(runs, value));
        stages.row([what.to_owned()].into_iter().chain(sizes).chain([after.to_owned()]));
    };
    row("the autoscaler decides to add a node", &|run| run.decided, "the load rose");
    row("its server runs", &|run| run.started, "the load rose");
    row("it has joined", &|run| run.joined, "the load rose");
    row("it has its share of the slots", &|run| run.filled, "the load rose");
    row("response times are within the objective from then on", &|run| run.well, "the load rose");
    row(
        "a node may be removed: `down-after` and `down-cooldown` have passed",
        &|run| run.may_go - run.fell,
        "the load fell",
    );
    row("the autoscaler decides to remove it", &|run| run.goes - run.may_go, "it may be removed");
    row("it is drained", &|run| run.drained - run.may_go, "it may be removed");
    row("its server is stopped", &|run| run.ended - run.may_go, "it may be removed");
    let mut goals = Table::new(["goal", "here", "met"]);
    let met = |all: bool| if all { "yes" } else { "no" }.to_owned();
    for (size, runs) in SIZES.iter().zip(&outcome.results) {
        let size = thousands(*size);
        goals.row([
            format!("{size} keys: within the objective in less than the provisioning time + {GOAL_UP:.0} s"),
            format!(
                "{} s, with {} s of provisioning",
                text(runs, &|run| run.well),
                text(runs, &Measured::provisioning)
            ),
            met(runs.iter().all(|run| run.well < run.provisioning() + GOAL_UP)),
        ]);
        goals.row([
            format!("{size} keys: a node is drained and stopped within {GOAL_DOWN:.0} s after the down epoch"),
            format!("{} s", text(runs, &|run| run.ended - run.may_go)),
            met(runs.iter().all(|run| run.ended - run.may_go < GOAL_DOWN)),
        ]);
    }
    let all: Vec<Measured> = outcome.results.iter().flatten().cloned().collect();
    let bad = all.iter().map(|run| run.errors + run.wrong_after).sum::<u64>();
    goals.row(["no failed request and no wrong reply".to_owned(), bad.to_string(), met(bad == 0)]);
    let mut panels = Vec::new();
    let firsts: Vec<(u64, &Measured)> =
        SIZES.into_iter().zip(&outcome.results).filter_map(|(size, runs)| Some((size, runs.first()?))).collect();
    if !firsts.is_empty() {
        let panel = |title: &str, y: &str, floor: Option<f64>, value: fn(&Sample) -> f64| {
            let line = |(size, run): &(u64, &Measured)| Line {
                name: format!("{} keys", thousands(*size)),
                points: highest(&run.looks, value),
            };
            let lines = firsts.iter().map(line).collect();
            Panel { title: title.to_owned(), x: "s since the load rose".to_owned(), y: y.to_owned(), floor, lines }
        };
        panels.push(panel("Response time", "mean, ms", Some(0.1), |look| look.1));
        panels.push(panel("Nodes", "nodes", None, |look| look.2 as f64));
    }
    let section = Section {
        notes: vec![format!(
            "One node with {cpu} of a processor can execute {} GET and SET per second, {} at a time. The load is {PART} of that, then suddenly four times as high; later it falls to the first value. \
             Requests come in an open loop: their times count from when they should have been sent. `[autoscale]` has the policy `threshold` with `max-response-time = {} ms`, \
             `up-after = {UP_AFTER}`, `up-cooldown = {UP_COOLDOWN}`, `down-after = {} s` and `down-cooldown = {} s`; servers come by `[autoscale.local]`, with the same part of a processor. \
             The maximum number of nodes was {}. The first node is overloaded while it moves half of its keys away, so the time until relief depends on their number.",
            Spread::of(all.iter().map(|run| run.capacity))
                .map_or(String::new(), |spread| spread.text(|value| thousands(value as u64))),
            connections * PIPELINE,
            OBJECTIVE.as_millis(),
            DOWN_AFTER.as_secs(),
            DOWN_COOLDOWN.as_secs(),
            all.iter().map(|run| run.most_nodes).max().unwrap_or(0),
        )],
        tables: vec![("Goals".to_owned(), goals), ("Stages".to_owned(), stages)],
        figures: vec![(
            "autoscaling-surge".to_owned(),
            "Response time and nodes while the load rises and falls".to_owned(),
            figure::svg(&panels)?,
        )],
    };
    publish(conduct, MARK, &outcome, &section)
}

/// Returns the highest value of every second.
fn highest(looks: &[Sample], value: fn(&Sample) -> f64) -> Vec<(f64, f64)> {
    let mut points: Vec<(f64, f64)> = Vec::new();
    for look in looks {
        let at = look.0.floor();
        match points.last_mut() {
            Some(last) if last.0 == at => last.1 = last.1.max(value(look)),
            _ => points.push((at, value(look))),
        }
    }
    points
}

/// Both loads, the fleet, and the samples.
struct Watch<'a> {
    bench: &'a Bench<'a>,
    grown: GrowingFleet,
    cpu: f64,
    runs: Vec<Run>,
    rose: Instant,
    looks: Vec<Sample>,
    errors: u64,
}

impl Watch<'_> {
    fn count(&mut self, tally: &Tally) {
        self.errors += tally.errors + tally.wrong + tally.unanswered + tally.disconnects;
    }

    /// Returns the seconds since the load rose.
    fn now(&self) -> f64 {
        self.rose.elapsed().as_secs_f64()
    }

    /// Converts milliseconds since 1970 to seconds since the load rose.
    fn seconds_at(&self, at: u64) -> f64 {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
        self.now() - now.saturating_sub(at) as f64 / 1e3
    }

    /// Waits for the next sample, and takes it.
    fn take_sample(&mut self) -> Result<AutoscalerState> {
        check_interrupted(&self.bench.conduct.stop)?;
        ensure!(
            self.rose.elapsed() < self.bench.conduct.timeout,
            "the change was not finished within {:?}",
            self.bench.conduct.timeout
        );
        std::thread::sleep(SAMPLE_INTERVAL);
        let mut both = Tally::default();
        self.runs.iter().for_each(|run| both.add(&run.take().tally));
        self.count(&both);
        let standing = self.grown.standing()?;
        self.grown.cap(&standing, self.cpu)?;
        let mean = match both.replies {
            // Without any reply, the responses take at least the interval.
            0 => SAMPLE_INTERVAL,
            _ => both.mean(),
        };
        self.looks.push((self.now(), mean.as_secs_f64() * 1e3, standing.nodes));
        Ok(standing)
    }

    /// Returns the start of the last period with responses within the objective.
    fn well_since(&self) -> Option<f64> {
        well_since(&self.looks)
    }
}

fn well_since(looks: &[Sample]) -> Option<f64> {
    let good = looks.iter().rev().take_while(|(_, mean_ms, _)| *mean_ms <= OBJECTIVE.as_secs_f64() * 1e3);
    good.last().map(|(at, ..)| *at)
}

fn one(bench: &Bench<'_>, settings: &Settings, size: u64) -> Result<Measured> {
    let (conduct, connections) = (bench.conduct, settings.connections);
    let limits = [
        ("max-nodes", "4".to_owned()),
        ("max-response-time", format!("{}ms", OBJECTIVE.as_millis())),
        ("up-after", UP_AFTER.to_owned()),
        ("up-cooldown", UP_COOLDOWN.to_owned()),
        ("down-after", format!("{}s", DOWN_AFTER.as_secs())),
        ("down-cooldown", format!("{}s", DOWN_COOLDOWN.as_secs())),
    ];
    let limits = limits.each_ref().map(|(key, value)| (*key, value.as_str()));
    let mut grown = GrowingFleet::start(bench, &limits, &["--appendonly", "no"])?;
    let entry = grown.site.entry;
    // Separate keys for each load, because it checks its reads and must know all writes.
    let [base, more] = [keys(0, size / 2), keys(size, size / 2)];
    for keys in [&base, &more] {
        keys.fill(|_| entry, &|_| {})?;
    }
    let standing = grown.standing()?;
    grown.cap(&standing, settings.cpu)?;
    bench.order(grown.site.admin, &["autoscale", "pause"])?;
    let run = Run::start(&generator::Settings { pipeline: PIPELINE, ..load(entry, &base, connections, None) })?;
    for_a_while(&run, settings.phase / 4, &conduct.stop)?;
    let (counts, took) = for_a_while(&run, settings.phase, &conduct.stop)?;
    run.finish()?;
    let capacity = counts.tally.replies as f64 / took.as_secs_f64();
    let rate = capacity * PART;
    let paced = |keys, rate| {
        Run::start(&generator::Settings { in_flight_max: UNDER_WAY, ..load(entry, keys, connections, Some(rate)) })
    };
    let calm = paced(&base, rate)?;
    for_a_while(&calm, settings.phase, &conduct.stop)?;
    bench.order(grown.site.admin, &["autoscale", "resume"])?;
    for_a_while(&calm, settings.phase, &conduct.stop)?;
    ensure!(
        grown.standing()?.events.iter().all(|event| event.kind != "decided"),
        "a node was added before the load rose: is the machine busy?"
    );
    let surge = paced(&more, rate * 3.0)?;
    let mut watch = Watch {
        bench,
        grown,
        cpu: settings.cpu,
        runs: vec![calm, surge],
        rose: Instant::now(),
        looks: Vec::new(),
        errors: 0,
    };

    let [mut started, mut joined] = [None, None];
    let (standing, well) = loop {
        let standing = watch.take_sample()?;
        let stage = standing.stage.as_deref().unwrap_or_default();
        let now = watch.now();
        started = started.or_else(|| (!standing.started.is_empty()).then_some(now));
        joined =
            joined.or_else(|| stage.contains("share").then_some(now)).or_else(|| (standing.nodes > 1).then_some(now));
        let well =
            watch.well_since().filter(|since| now - since >= LASTS.as_secs_f64().max(settings.phase.as_secs_f64()));
        match well {
            Some(well) if standing.nodes > 1 && standing.stage.is_none() => break (standing, well),
            _ => {}
        }
    };
    let oldest = |kind: &str| {
        standing
            .events
            .iter()
            .rev()
            .find(|event| event.kind == kind)
            .map_or(f64::NAN, |event| watch.seconds_at(event.at))
    };
    let (decided, filled) = (oldest("decided"), oldest("done"));
    let changed =
        standing.events.iter().find(|event| event.kind == "done").map_or(0.0, |event| watch.seconds_at(event.at));
    let most_nodes = standing.nodes;

    // The load falls.
    let (last, _) = watch.runs.remove(1).finish()?;
    watch.count(&last.tally);
    let fell = watch.now();
    let may_go = (fell + DOWN_AFTER.as_secs_f64()).max(changed + DOWN_COOLDOWN.as_secs_f64());
    let mut drained = None;
    let standing = loop {
        let standing = watch.take_sample()?;
        let stage = standing.stage.as_deref().unwrap_or_default();
        drained = drained.or_else(|| {
            (stage.contains("leaving") || stage.contains("stopped") || standing.nodes < most_nodes).then(|| watch.now())
        });
        if standing.nodes < most_nodes && standing.stage.is_none() {
            break standing;
        }
    };
    let newest = |kind: &str| {
        standing.events.iter().find(|event| event.kind == kind).map_or(f64::NAN, |event| watch.seconds_at(event.at))
    };
    let (goes, ended) = (newest("decided"), newest("done"));
    let (last, _) = watch.runs.remove(0).finish()?;
    watch.count(&last.tally);
    let wrong_after = base.count_wrong(|_| entry)? + more.count_wrong(|_| entry)?;
    Ok(Measured {
        capacity,
        decided,
        started: started.unwrap_or(f64::NAN),
        joined: joined.unwrap_or(f64::NAN),
        filled,
        well,
        most_nodes,
        fell,
        may_go,
        goes,
        drained: drained.unwrap_or(f64::NAN),
        ended,
        errors: watch.errors,
        wrong_after,
        looks: watch.looks,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figure_has_the_highest_value_of_each_second() {
        let looks = [(0.5, 3.0, 1), (0.9, 90.0, 1), (1.0, 20.0, 2), (3.1, 1.0, 2)];
        assert_eq!(highest(&looks, |look| look.1), [(0.0, 90.0), (1.0, 20.0), (3.0, 1.0)]);
    }

    #[test]
    fn recovery_begins_after_the_last_slow_response() {
        assert_eq!(well_since(&[]), None);
        assert_eq!(well_since(&[(0.5, 3.0, 1), (1.0, 90.0, 1)]), None);
        assert_eq!(well_since(&[(0.5, 3.0, 1), (1.0, 90.0, 1), (1.5, 10.0, 2), (2.0, 1.0, 2)]), Some(1.5));
    }
}
