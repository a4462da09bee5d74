//! The simulator of fleets compared with real servers: the same keys, load and policies on both.
//!
//! The text of a scenario is for servers that serve 1,000 requests per second. A round first measures the real service
//! rate and the time of a move. Then it runs each scenario, scaled to this rate, on new servers and in the simulator. So a machine that slows
//! down between rounds affects both alike. A sender that adapts its rate to the losses becomes clients that wait for
//! each reply: both send as much as the fullest node serves.

mod real;
mod series;

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, ensure};
use switchyard_bench::process;
use switchyard_bench::table::Table;
use switchyard_sim::fleet::{Scenario, Spread, run as simulate};

use self::real::{Bench, CLIENTS, Servers};
use self::series::{AFTER, BEFORE, EVENNESS, HITS, Measure, Series, THROUGHPUT, UNTIL_BALANCED};
use crate::document::{replace_between_marks, today};
use crate::figure::{self, Line, Panel};
use crate::moves::site::Programs;
use crate::procfs::{ProcessorTime, describe_machine};
use crate::reproduce::capped;

const MARK: &str = "fleet-validate";

/// Difference up to which the simulator counts as right, in percent of the real value.
const CLOSE: f64 = 10.0;

/// Time for the service rate of one server.
const RATE_TIME: Duration = Duration::from_millis(2000);

/// Length of a scenario at toy size, as a part of its time.
const SMOKE: f64 = 0.05;

/// A compared scenario.
#[derive(Debug)]
struct Case {
    name: &'static str,
    title: &'static str,
    text: &'static str,
    measures: &'static [Measure],
}

const CASES: [Case; 3] = [
    Case {
        name: "skewed",
        title: "Skewed reads without hot copies and planner",
        text: include_str!("skewed.toml"),
        measures: &[THROUGHPUT, EVENNESS],
    },
    Case {
        name: "copied",
        title: "The same load with hot copies",
        text: include_str!("copied.toml"),
        measures: &[THROUGHPUT, HITS, EVENNESS],
    },
    Case {
        name: "shifted",
        title: "Two fifths of the load move to one node, with the planner",
        text: include_str!("shifted.toml"),
        measures: &[THROUGHPUT, BEFORE, UNTIL_BALANCED, AFTER],
    },
];

/// Settings of a validation.
#[derive(Debug)]
pub struct Settings {
    /// Path of the router's binary.
    pub switchyard: PathBuf,
    /// Rounds. Each runs all scenarios.
    pub repeat: u32,
    /// Share of a processor for each server.
    pub cpu: f64,
    /// Short runs, without limits if they are impossible here: a functional check.
    pub is_smoke: bool,
    /// Document whose section is rewritten. The figure goes to `figures` in its folder.
    pub out: Option<PathBuf>,
    /// Command line of this run, for the document.
    pub command_line: String,
    /// Set to end the run early.
    pub stop: Arc<AtomicBool>,
}

/// A scenario on real servers and in the simulator.
#[derive(Debug)]
struct Pair {
    real: Series,
    simulated: Series,
}

/// Results of all rounds.
#[derive(Debug, Default)]
struct Results {
    /// By round.
    servers: Vec<Servers>,
    /// By case and round.
    pairs: [Vec<Pair>; CASES.len()],
    errors: u64,
    /// Greatest share of all processors that other programs used in a run, apart from the servers and the router.
    disturbed: f64,
}

/// Runs all scenarios on real servers and in the simulator, prints the tables, and rewrites the section.
///
/// # Errors
/// If a server cannot be started or limited, or the user interrupts.
pub fn run(settings: &Settings) -> Result<()> {
    let is_limited = capped::is_possible();
    ensure!(
        is_limited || settings.is_smoke,
        "limits on servers need root and cgroups of version 1 or 2; --smoke works without"
    );
    let programs = Programs::find(&settings.switchyard, None)?;
    process::raise_file_limit();
    capped::remove_leftovers();
    let folder = tempfile::Builder::new()
        .prefix("switchyard-validate-")
        .tempdir()
        .context("cannot create a temporary folder")?;
    let bench = Bench::new(&programs, folder.path(), is_limited.then_some(settings.cpu), &settings.stop);
    let mut results = Results::default();
    for round in 1..=settings.repeat.max(1) {
        measure_round(settings, &bench, round, &mut results)?;
    }
    let mut text = results.notes(settings, &bench);
    println!("{text}");
    for (case, pairs) in CASES.iter().zip(&results.pairs) {
        let table = table(case, pairs);
        println!("\n{}\n\n{}", case.title, table.to_text());
        text.push_str(&format!("\n\n### {}\n\n{}", case.title, table.to_markdown()));
    }
    let Some(out) = &settings.out else { return Ok(()) };
    let figures = out.parent().unwrap_or_else(|| std::path::Path::new("")).join("figures");
    fs::create_dir_all(&figures).with_context(|| format!("cannot create {}", figures.display()))?;
    let svg = figures.join(format!("{MARK}.svg"));
    fs::write(&svg, results.figure()?).with_context(|| format!("cannot write {}", svg.display()))?;
    text.push_str(&format!("\n![Load of the fullest node over time, real and simulated](figures/{MARK}.svg)\n"));
    let document = fs::read_to_string(out).with_context(|| format!("cannot read {}", out.display()))?;
    fs::write(out, replace_between_marks(&document, MARK, &text)?)
        .with_context(|| format!("cannot write {}", out.display()))
}

/// Measures the servers, and runs all scenarios with the results.
fn measure_round(settings: &Settings, bench: &Bench<'_>, round: u32, results: &mut Results) -> Result<()> {
    let (time, part) = if settings.is_smoke { (RATE_TIME / 5, SMOKE) } else { (RATE_TIME, 1.0) };
    let servers = bench.measure_servers(&scaled(&CASES[0], (1.0, 1.0), 0.0, part)?, u64::from(round), time)?;
    // The least time: the command line and the interval of polls are no part of a move.
    let measured = (servers.rate.mean, servers.move_seconds.least);
    eprintln!("round {round}: {:.0} requests/s of each server, {:.2} s for a move", measured.0, measured.1);
    results.servers.push(servers);
    // The planner steps once per interval. Steps of the load at different times of its interval show the mean delay.
    let later = f64::from(round - 1) / f64::from(settings.repeat.max(1));
    for (case, pairs) in CASES.iter().zip(&mut results.pairs) {
        let scenario = scaled(case, measured, later, part)?;
        let before = ProcessorTime::now()?;
        let run = bench.run(&scenario, u64::from(round)).with_context(|| case.title)?;
        results.disturbed = results.disturbed.max(ProcessorTime::now()?.share_of_others_since(before));
        results.errors += run.errors;
        let simulated = Series::simulated(&simulate(&scenario, u64::from(round), None));
        let pair = Pair { real: run.series, simulated };
        for measure in case.measures {
            let (real, simulated) = ((measure.of)(&pair.real), (measure.of)(&pair.simulated));
            eprintln!("round {round}, {}: {} {real:.4}, simulated {simulated:.4}", case.name, measure.name);
        }
        pairs.push(pair);
    }
    Ok(())
}

/// Returns the scenario for servers with this service rate and time of a move, in seconds. Its events are `later` seconds
/// later if they are not at the start, and all its times are shortened to `part` of them.
fn scaled(case: &Case, (service_rate, move_seconds): (f64, f64), later: f64, part: f64) -> Result<Scenario> {
    let mut scenario = Scenario::parse(case.name, case.text).map_err(|why| anyhow!("{}: {why}", case.name))?;
    let factor = service_rate / scenario.nodes.service_rate;
    scenario.nodes.service_rate *= factor;
    // Mean time of a request by Little's law, if the clients wait at all servers alike. A fill of a copy takes as long.
    scenario.nodes.base_us = 1e6 * CLIENTS as f64 / (scenario.nodes.count as f64 * service_rate);
    scenario.load.rate *= factor;
    scenario.moves.start = move_seconds;
    scenario.duration *= part;
    scenario.warm_up *= part;
    for event in scenario.events.iter_mut().filter(|event| event.at > 0.0) {
        event.at = (event.at + later) * part;
    }
    scenario.check().map_err(|why| anyhow!("{}: {why}", case.name))?;
    Ok(scenario)
}

/// Difference of the simulator's mean from the real one, in percent.
fn difference(real: Spread, simulated: Spread) -> f64 {
    100.0 * (simulated.mean / real.mean - 1.0)
}

fn table(case: &Case, pairs: &[Pair]) -> Table {
    let mut table = Table::new(["mean (least to most)", "real", "simulated", "difference", "within 10 %"]);
    for measure in case.measures {
        let of = |series: fn(&Pair) -> &Series| Spread::of(pairs.iter().map(|pair| (measure.of)(series(pair))));
        let (real, simulated) = (of(|pair| &pair.real), of(|pair| &pair.simulated));
        let difference = difference(real, simulated);
        let verdict = if difference.abs() <= CLOSE { "yes" } else { "no" };
        let cells = [measure.name.to_owned(), real.text(), simulated.text(), format!("{difference:+.1} %")];
        table.row(cells.into_iter().chain([verdict.to_owned()]));
    }
    table
}

impl Results {
    /// Conditions of the measurement.
    fn notes(&self, settings: &Settings, bench: &Bench<'_>) -> String {
        let limit = bench.cpu.map_or("no limit".to_owned(), |cpu| format!("{cpu} of a processor"));
        let of = |of: fn(&Servers) -> f64| Spread::of(self.servers.iter().map(of));
        let (least, most) = (of(|servers| servers.rate.least).least, of(|servers| servers.rate.most).most);
        format!(
            "Measured on {} by `{}`: {}. {} rounds; each server has {limit}, and serves {} requests/s (single servers: \
             {least:.0} to {most:.0}). A move of a slot takes {} s. {} requests failed. Other programs used at most {:.0} \
             % of the processors.",
            today(),
            settings.command_line,
            describe_machine(),
            self.servers.len(),
            of(|servers| servers.rate.mean).text(),
            of(|servers| servers.move_seconds.least).text(),
            self.errors,
            100.0 * self.disturbed
        )
    }

    /// The first round of the scenarios over time.
    fn figure(&self) -> Result<String> {
        let line = |name: &str, series: &Series| Line {
            name: name.to_owned(),
            points: series.samples.iter().map(|sample| (sample.at, sample.max_over_mean)).collect(),
        };
        let panels = CASES.iter().zip(&self.pairs).filter_map(|(case, pairs)| {
            let pair = pairs.first()?;
            Some(Panel {
                title: case.name.to_owned(),
                x: "time, seconds".to_owned(),
                y: "load of the fullest node / mean".to_owned(),
                floor: None,
                lines: vec![line("real", &pair.real), line("simulated", &pair.simulated)],
            })
        });
        figure::svg(&panels.collect::<Vec<_>>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scenarios_scale_with_the_service_rate() {
        for case in &CASES {
            let (text, scenario) = (scaled(case, (1000.0, 0.4), 0.0, 1.0), scaled(case, (3000.0, 0.2), 0.5, 1.0));
            let (text, scenario) = (text.expect("valid"), scenario.expect("valid"));
            let of = |scenario: &Scenario| (scenario.nodes.service_rate, scenario.moves.start);
            assert_eq!((of(&text), of(&scenario)), ((1000.0, 0.4), (3000.0, 0.2)));
            assert!((scenario.load.rate / text.load.rate - 3.0).abs() < 1e-9);
            assert!((text.nodes.base_us / scenario.nodes.base_us - 3.0).abs() < 1e-9);
            let later: Vec<f64> =
                scenario.events.iter().zip(&text.events).map(|(event, text)| event.at - text.at).collect();
            assert!(later.iter().all(|later| [0.0, 0.5].contains(later)), "{later:?}");
            scaled(case, (3000.0, 0.2), 0.5, SMOKE).expect("valid at toy size");
        }
    }

    #[test]
    fn table_marks_differences_beyond_the_bound() {
        let series = |served: f64| Series {
            samples: vec![series::Sample { at: 1.0, served, hits: 0.0, max_over_mean: 1.5 }],
            bin: 1.0,
            event_at: 0.0,
        };
        let pairs = [100.0, 120.0].map(|served| Pair { real: series(served), simulated: series(served * 1.2) });
        let text = table(&CASES[0], &pairs).to_text();
        let rows: Vec<&str> = text.lines().collect();
        assert!(
            rows[2].contains("110 (100 to 120)") && rows[2].contains("+20.0 %") && rows[2].ends_with("no"),
            "{text}"
        );
        assert!(rows[3].contains("+0.0 %") && rows[3].ends_with("yes"), "{text}");
    }
}
