//! SwitchKV (NSDI 2016) by simulation ([`switchyard_sim::fleet::switchkv`]): its tables 1 and 2, and figures 9 to 19.
//!
//! - [`steady`]: throughput of a cache whose content stays (tables 1 and 2, figures 9 to 14).
//! - [`changes`]: throughput while the popularity of keys changes (figures 15 to 19).
//! - [`policies`]: Switchyard's admission and the published one under these changes, and the parameters that the paper
//!   does not state.
//!
//! A simulation rather than servers: the paper's 128 backends with 100,000 queries per second each are rate limits, too.
//!
//! Results depend on settings, seed and model only. So their origin names the version of the model, and no machine and
//! no build: a stored result stays valid until the model changes. A repetition is another seed.

pub(super) mod changes;
pub(super) mod policies;
pub(super) mod steady;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Instant;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use switchyard_bench::table::Table;
use switchyard_sim::fleet::switchkv::{self, MODEL, Outcome as Simulated};

use super::kept::{ResultSet, StoredResults};
use super::spread::Spread;
use super::{BudgetUsed, Conduct, Outcome, Section, book, collect, progress, rewrite_section};
use crate::document::today;
use crate::figure::{self, Line, Panel};

/// Names of the experiments, in order.
pub const EXPERIMENTS: [&str; 4] = ["steady", "changes", "policies", "parameters"];

/// Mark of the comparison with the paper.
const MARK: &str = "reproduce-switchkv";

/// Divisor of the number of backends, of cached items, and of changed keys at toy size.
const TOY: u16 = 16;

/// Maximum number of keys at toy size.
const TOY_KEYS: f64 = 1e4;

/// Settings of the experiments.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Common settings. The repetitions are seeds; neither the router nor limits of servers are used.
    pub conduct: Conduct,
    /// Only these experiments; empty for all.
    pub only: Vec<String>,
    /// Toy size: a few backends for a second. The values mean nothing.
    pub is_toy: bool,
}

/// A point of a figure.
#[derive(Debug, Clone)]
struct Run {
    /// Number of the figure, or name of the comparison.
    figure: &'static str,
    /// Name of the line.
    name: String,
    /// Position on the horizontal axis.
    at: f64,
    settings: switchkv::Settings,
    /// Numbers of cached items to try; the greatest throughput counts. Empty: the number of the settings.
    items: Vec<usize>,
}

impl Run {
    fn new(figure: &'static str, name: impl Into<String>, at: f64, settings: switchkv::Settings) -> Self {
        Self { figure, name: name.into(), at, settings, items: Vec::new() }
    }

    /// Asserts that no two runs have the same settings and name, so that each has a stored result of its own.
    #[cfg(test)]
    fn assert_unique(runs: &[Self], experiment: &str) {
        let names: std::collections::BTreeSet<String> =
            runs.iter().map(|run| run.what(experiment).to_string()).collect();
        assert_eq!(names.len(), runs.len());
    }

    /// Everything that determines the result.
    fn what(&self, experiment: &str) -> Value {
        let Self { figure, name, at, settings, items } = self;
        json!({
            "experiment": experiment, "model": MODEL, "figure": figure, "name": name, "at": at, "settings": settings,
            "items": items,
        })
    }

    fn simulate(&self, seed: u64) -> Measured {
        let of = |items| {
            let outcome = switchkv::run(&switchkv::Settings { items, ..self.settings }, seed, None);
            Measured { items, outcome }
        };
        let all = self.items.iter().copied().map(of);
        let best = all.max_by(|one, other| one.outcome.throughput.total_cmp(&other.outcome.throughput));
        let mut measured = best.unwrap_or_else(|| of(self.settings.items));
        // Only these figures show them.
        if !matches!(self.figure, "15" | "16" | "17" | "18") {
            measured.outcome.served.clear();
        }
        if self.figure != "9" {
            measured.outcome.by_backend.clear();
        }
        measured
    }

    /// Reduces the run to toy size.
    fn toy(mut self) -> Self {
        let small = |count: usize| (count / usize::from(TOY)).max(1);
        let settings = &mut self.settings;
        settings.backends = (settings.backends / TOY).max(2);
        settings.items = settings.items.min(small(settings.items).max(100));
        (settings.seconds, settings.keys) = (1, settings.keys.min(TOY_KEYS));
        if let Some(changes) = &mut settings.changes {
            changes.keys = small(changes.keys);
            (changes.first, changes.every) = (0.2, 0.3);
        }
        self.items.truncate(2);
        self
    }
}

/// Result of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Measured {
    /// Number of cached items.
    pub(super) items: usize,
    pub(super) outcome: Simulated,
}

/// Returns the repetitions of the run with this figure and name.
pub(super) fn of_run(set: &ResultSet, figure: &str, name: &str) -> Vec<Measured> {
    set.of::<Measured>(|what| what["figure"] == figure && what["name"] == name).into_iter().flatten().collect()
}

/// Returns the repetitions of the run with this figure, name and position.
pub(super) fn at(set: &ResultSet, figure: &str, name: &str, at: f64) -> Vec<Measured> {
    let is_it = |what: &Value| what["figure"] == figure && what["name"] == name && what["at"].as_f64() == Some(at);
    set.of::<Measured>(is_it).into_iter().flatten().collect()
}

/// Does the missing runs, prints all, and rewrites the sections of the document.
///
/// # Errors
/// If a file cannot be read or written, or the user interrupts.
pub fn run(settings: &Settings) -> Result<()> {
    let is_wanted = |name: &str| settings.only.is_empty() || settings.only.iter().any(|only| only == name);
    for name in EXPERIMENTS.into_iter().filter(|name| is_wanted(name)) {
        match name {
            "steady" => steady::run(settings)?,
            "changes" => changes::run(settings)?,
            "policies" => policies::run(settings)?,
            _ => policies::parameters(settings)?,
        }
    }
    let compared = book::compared(&settings.conduct.keep, book::Paper::Switchkv)?;
    print!("\nCompared with the paper\n\n{}", compared.to_text());
    match &settings.conduct.out {
        Some(out) => rewrite_section(out, MARK, &compared.to_markdown()),
        None => Ok(()),
    }
}

/// Does the missing runs of an experiment on all processors, and stores them in their order.
fn simulate(settings: &Settings, experiment: &str, runs: Vec<Run>) -> Result<(Vec<Run>, Outcome<Measured>)> {
    let Settings { conduct, is_toy, .. } = settings;
    let runs: Vec<Run> = if *is_toy { runs.into_iter().map(Run::toy).collect() } else { runs };
    let measured_by = format!("a simulation (model {MODEL}), with the same results on each machine");
    let whats: Vec<Value> = runs.iter().take(conduct.runs_max).map(|run| run.what(experiment)).collect();
    let rounds = conduct.repeat.max(1);
    let mut kept = StoredResults::open(&conduct.keep, experiment, measured_by.clone())?;
    kept.plan(&whats, rounds)?;
    let all = (0..rounds).flat_map(|round| (0..whats.len()).map(move |place| (place, round)));
    let due: Vec<(usize, u32)> = all.filter(|(place, round)| kept.is_due(&whats[*place], *round, 1)).collect();
    let bar = progress(experiment, due.len());
    let next = AtomicUsize::new(0);
    let is_over =
        || conduct.stop.load(Ordering::Relaxed) || conduct.deadline.is_some_and(|deadline| Instant::now() >= deadline);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let stored = std::thread::scope(|scope| {
        let (sender, receiver) = mpsc::channel();
        for _ in 0..threads {
            let (sender, runs, due, next, is_over) = (sender.clone(), &runs, &due, &next, &is_over);
            scope.spawn(move || {
                while !is_over() {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let Some((place, round)) = due.get(number) else { return };
                    let measured = runs[*place].simulate(u64::from(*round) + 1);
                    if sender.send((number, measured)).is_err() {
                        return;
                    }
                }
            });
        }
        drop(sender);
        let (mut ready, mut stored) = (BTreeMap::new(), 0);
        for (number, measured) in receiver {
            ready.insert(number, measured);
            while let Some(measured) = ready.remove(&stored) {
                let (place, round) = due[stored];
                bar.set_message(format!("figure {}, {}", runs[place].figure, runs[place].name));
                kept.add(&whats[place], round, today(), 0.0, &measured)?;
                bar.inc(1);
                stored += 1;
            }
        }
        Ok::<usize, anyhow::Error>(stored)
    })?;
    bar.finish_and_clear();
    ensure!(!conduct.stop.load(Ordering::Relaxed), "interrupted");
    if stored < due.len() {
        return Err(BudgetUsed.into());
    }
    let outcome = collect(&kept, &whats, rounds, runs.len(), measured_by);
    Ok((runs, outcome))
}

/// Runs of a figure with their repetitions.
fn of_figure<'r>(
    runs: &'r [Run],
    outcome: &'r Outcome<Measured>,
    figure: &'r str,
) -> impl Iterator<Item = (&'r Run, &'r [Measured])> {
    let all = runs.iter().zip(&outcome.results).filter(|(_, measured)| !measured.is_empty());
    all.map(|(run, measured)| (run, measured.as_slice())).filter(move |(run, _)| run.figure == figure)
}

/// Returns the repetitions of the run with this figure and name.
fn found<'r>(runs: &[Run], outcome: &'r Outcome<Measured>, figure: &str, name: &str) -> &'r [Measured] {
    let place = runs.iter().position(|run| run.figure == figure && run.name == name);
    place.map_or(&[], |place| &outcome.results[place])
}

/// Formats a value of all repetitions.
fn shown(measured: &[Measured], digits: usize, value: impl Fn(&Measured) -> Option<f64>) -> String {
    Spread::of(measured.iter().filter_map(value))
        .map_or_else(String::new, |spread| spread.text(|value| format!("{value:.digits$}")))
}

/// Formats a rate of all repetitions, in millions of queries per second.
fn mqps(measured: &[Measured], value: impl Fn(&Simulated) -> f64) -> String {
    shown(measured, 2, |measured| Some(value(&measured.outcome) / 1e6))
}

/// Median of a value of all repetitions.
fn median(measured: &[Measured], value: impl Fn(&Simulated) -> f64) -> Option<f64> {
    Spread::of(measured.iter().map(|measured| value(&measured.outcome))).map(|spread| spread.median)
}

/// Returns a line of a figure for each name, in order, with the medians of a value.
fn lines<'r>(
    of_figure: impl Iterator<Item = (&'r Run, &'r [Measured])>,
    x: impl Fn(f64) -> f64,
    value: impl Fn(&Simulated) -> f64,
) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    for (run, measured) in of_figure {
        let point = median(measured, &value).map(|y| (x(run.at), y));
        match lines.iter_mut().find(|line| line.name == run.name) {
            Some(line) => line.points.extend(point),
            None => lines.push(Line { name: run.name.clone(), points: point.into_iter().collect() }),
        }
    }
    lines
}

/// Adds a figure, unless no run has a point of it, as at toy size.
fn draw(section: &mut Section, name: &str, shows: &str, panels: &[Panel]) -> Result<()> {
    if panels.iter().flat_map(|panel| &panel.lines).any(|line| !line.points.is_empty()) {
        section.figures.push((name.to_owned(), shows.to_owned(), figure::svg(panels)?));
    }
    Ok(())
}

/// Creates a table with one row for each run of a figure.
fn table<'r>(
    head: &[&str],
    of_figure: impl Iterator<Item = (&'r Run, &'r [Measured])>,
    cells: impl Fn(&Run, &[Measured]) -> Vec<String>,
) -> Table {
    let mut table = Table::new(head.iter().copied());
    for (run, measured) in of_figure {
        table.row(cells(run, measured));
    }
    table
}
