//! Policies compared in simulated fleets ([`switchyard_sim::fleet`]): tables over seeds, and figures over time.
//!
//! Unlike the other experiments it measures no router. Its results depend only on the scenario, the seeds and the code,
//! except for the wall time.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use indicatif::ProgressBar;
use switchyard_bench::table::Table;
use switchyard_sim::fleet::scenario::BUILT_IN;
use switchyard_sim::fleet::{MEASURES, Point, Policies, Run, Scenario, Spread, run as simulate};

use crate::document::{replace_between_marks, today};
use crate::figure::{self, Line, Panel};
use crate::procfs::describe_machine;

/// Points of a line in a figure. More of them are averaged.
const POINTS_MAX: usize = 240;

/// Seconds from which on the axis of a figure is in hours.
const HOURS_FROM: f64 = 7200.0;

/// Settings of a comparison.
#[derive(Debug)]
pub struct Settings {
    /// Scenario: a built-in name, or a file.
    pub scenario: String,
    /// Policies to compare. Empty: those of the scenario.
    pub policies: Vec<String>,
    /// Number of seeds. `None`: that of the scenario.
    pub seeds: Option<u64>,
    /// Number of nodes at the start. Load and workers change in proportion. `None`: that of the scenario.
    pub nodes: Option<usize>,
    /// Number of threads.
    pub threads: usize,
    /// File of the figure.
    pub svg: Option<PathBuf>,
    /// Document whose section is rewritten. The figure goes to `figures` in its folder.
    pub out: Option<PathBuf>,
    /// Command line of this run, for the document.
    pub command_line: String,
}

/// A value over time.
struct Curve {
    y: &'static str,
    of: fn(&Point) -> f64,
}

/// Results of the same policies with all seeds.
struct Compared {
    policies: Policies,
    runs: Vec<Run>,
}

/// Simulates, prints a table, and writes the figure.
///
/// # Errors
/// If the scenario or a policy is not understood, a file cannot be read or written, or a goal of the scenario is missed.
pub fn run(settings: &Settings) -> Result<()> {
    let mut scenario = read(&settings.scenario)?;
    if let Some(nodes) = settings.nodes {
        resize(&mut scenario, nodes)?;
    }
    let policies = match settings.policies.is_empty() {
        true => vec![Policies::of_scenario()],
        false => settings.policies.iter().map(|text| Policies::parse(text)).collect::<Result<_, _>>()?,
    };
    let seeds = settings.seeds.unwrap_or(scenario.seeds).max(1);
    let compared = simulate_all(&scenario, policies, seeds, settings.threads)?;
    let text = table(&compared).to_text();
    println!("{}: {} nodes, {seeds} seeds\n\n{text}", scenario.name, scenario.nodes.count);
    let title = format!("{}, {} nodes", scenario.name, scenario.nodes.count);
    let svg = figure::svg(&panels(&title, &scenario, &compared))?;
    if let Some(path) = &settings.svg {
        write(path, &svg)?;
    }
    if let Some(out) = &settings.out {
        rewrite(out, settings, &scenario, seeds, &compared, &svg)?;
    }
    let missed: Vec<String> = compared.iter().flat_map(|compared| missed(&scenario, compared)).collect();
    ensure!(missed.is_empty(), "{} misses its goals: {}", scenario.name, missed.join("; "));
    Ok(())
}

fn read(name: &str) -> Result<Scenario> {
    if let Some((name, text)) = BUILT_IN.iter().find(|(known, _)| *known == name) {
        return Scenario::parse(name, text).map_err(|why| anyhow!("{name}: {why}"));
    }
    let known: Vec<&str> = BUILT_IN.iter().map(|(name, _)| *name).collect();
    let path = Path::new(name);
    let text = fs::read_to_string(path)
        .with_context(|| format!("{name} is neither a scenario of the program ({}) nor a file", known.join(", ")))?;
    let stem = path.file_stem().map_or_else(|| name.into(), |stem| stem.to_string_lossy());
    Scenario::parse(&stem, &text).map_err(|why| anyhow!("{name}: {why}"))
}

/// Changes the number of nodes. Load, workers, cache nodes and the bounds of the autoscaler change in proportion.
fn resize(scenario: &mut Scenario, nodes: usize) -> Result<()> {
    if nodes == 0 {
        bail!("a fleet has at least one node");
    }
    let factor = nodes as f64 / scenario.nodes.count as f64;
    let scaled = |count: f64| ((count * factor).round() as usize).max(1);
    scenario.nodes.count = nodes;
    scenario.load.rate *= factor;
    if let Some(router) = &mut scenario.router {
        router.workers = scaled(f64::from(router.workers)) as u32;
    }
    if let Some(cache) = &mut scenario.cache {
        cache.count = scaled(f64::from(cache.count)) as u32;
    }
    if let Some(autoscale) = &mut scenario.autoscale {
        (autoscale.min_nodes, autoscale.max_nodes) =
            (scaled(autoscale.min_nodes as f64), scaled(autoscale.max_nodes as f64));
    }
    scenario.check().map_err(|why| anyhow!("with {nodes} nodes: {why}"))
}

/// Runs all seeds of all policies on several threads.
fn simulate_all(scenario: &Scenario, policies: Vec<Policies>, seeds: u64, threads: usize) -> Result<Vec<Compared>> {
    let scenarios: Vec<Scenario> = policies.iter().map(|policies| policies.apply(scenario)).collect();
    let jobs: Vec<(usize, u64)> =
        (0..scenarios.len()).flat_map(|policy| (1..=seeds).map(move |seed| (policy, seed))).collect();
    let results: Vec<Mutex<Option<Run>>> = jobs.iter().map(|_| Mutex::new(None)).collect();
    let next = AtomicUsize::new(0);
    let bar = ProgressBar::new(jobs.len() as u64);
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, jobs.len()) {
            scope.spawn(|| {
                while let Some(number) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|at| *at < jobs.len()) {
                    let (policy, seed) = jobs[number];
                    let run = simulate(&scenarios[policy], seed, None);
                    *results[number].lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(run);
                    bar.inc(1);
                }
            });
        }
    });
    bar.finish_and_clear();
    let mut runs = results
        .into_iter()
        .map(|result| result.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner))
        .collect::<Option<Vec<Run>>>()
        .context("a run has no result")?
        .into_iter();
    let of = |policies| Compared { policies, runs: runs.by_ref().take(seeds as usize).collect() };
    Ok(policies.into_iter().map(of).collect())
}

/// Bounds of the scenario that its own policies miss.
fn missed(scenario: &Scenario, compared: &Compared) -> Vec<String> {
    if !compared.policies.is_of_scenario() {
        return Vec::new();
    }
    let seeds = (1..).zip(&compared.runs);
    seeds
        .flat_map(|(seed, run): (u32, _)| {
            scenario.goal.missed(run).into_iter().map(move |what| format!("seed {seed}: {what}"))
        })
        .collect()
}

fn table(compared: &[Compared]) -> Table {
    let head = std::iter::once("mean (least to most)").chain(compared.iter().map(|compared| compared.policies.name()));
    let mut table = Table::new(head);
    let mut row = |name: &str, of: &dyn Fn(&Run) -> f64| {
        let cells = compared.iter().map(|compared| Spread::of(compared.runs.iter().map(of)).text());
        table.row(std::iter::once(name.to_owned()).chain(cells));
    };
    for measure in MEASURES {
        row(measure.name, &|run| (measure.of)(run));
    }
    row("wall time without solve, s", &|run| run.wall.as_secs_f64());
    row("wall time of solve, s", &|run| run.solving.as_secs_f64());
    table
}

/// Averages neighbours, so that at most [`POINTS_MAX`] points remain.
fn averaged(points: &[Point], of: fn(&Point) -> f64, seconds_of_unit: f64) -> Vec<(f64, f64)> {
    let size = points.len().div_ceil(POINTS_MAX).max(1);
    let mean = |chunk: &[Point]| chunk.iter().map(of).sum::<f64>() / chunk.len() as f64;
    points.chunks(size).filter_map(|chunk| Some((chunk.last()?.at / seconds_of_unit, mean(chunk)))).collect()
}

/// The first seed of all policies over time. Omits what never happens.
fn panels(title: &str, scenario: &Scenario, compared: &[Compared]) -> Vec<Panel> {
    let (x, unit) = if scenario.duration >= HOURS_FROM { ("time, hours", 3600.0) } else { ("time, seconds", 1.0) };
    let curve = |y, of| Curve { y, of };
    let all = [
        curve("requests served, thousands/s", |point| point.served / 1e3),
        curve("load of the fullest node / mean", |point| point.max_over_mean),
        curve("hits, %", |point| 100.0 * point.hits),
        curve("requests lost, %", |point| 100.0 * point.lost),
        curve("nodes", |point| point.nodes),
    ];
    let first = |compared: &Compared| compared.runs.first().map(|run| run.points.clone()).unwrap_or_default();
    let panel = |Curve { y, of }: Curve| {
        let lines = compared.iter().map(|compared| Line {
            name: compared.policies.name().to_owned(),
            points: averaged(&first(compared), of, unit),
        });
        let lines: Vec<Line> = lines.collect();
        let values = || lines.iter().flat_map(|line| &line.points).map(|(_, value)| *value);
        let is_constant = values().all(|value| Some(value) == values().next());
        (!is_constant).then(|| Panel {
            title: title.to_owned(),
            x: x.to_owned(),
            y: y.to_owned(),
            floor: None,
            lines: lines.clone(),
        })
    };
    all.into_iter().filter_map(panel).collect()
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Rewrites the section of this scenario and number of nodes.
fn rewrite(
    out: &Path,
    settings: &Settings,
    scenario: &Scenario,
    seeds: u64,
    compared: &[Compared],
    svg: &str,
) -> Result<()> {
    let name = format!("fleet-{}-{}", scenario.name, scenario.nodes.count);
    let folder = out.parent().unwrap_or(Path::new("")).join("figures");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    write(&folder.join(format!("{name}.svg")), svg)?;
    let document = fs::read_to_string(out).with_context(|| format!("cannot read {}", out.display()))?;
    let text = format!(
        "Simulated on {} by `{}`, {seeds} seeds; wall times: {}.\n\n![{}, {} nodes, over time](figures/{name}.svg)\n\n{}",
        today(),
        settings.command_line,
        describe_machine(),
        scenario.name,
        scenario.nodes.count,
        table(compared).to_markdown(),
    );
    write(out, &replace_between_marks(&document, &name, &text)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_and_workers_grow_with_the_nodes() {
        let mut scenario = read("step").expect("a scenario");
        let before = scenario.clone();
        resize(&mut scenario, before.nodes.count * 4).expect("more nodes");
        assert_eq!(scenario.load.rate, before.load.rate * 4.0);
        let workers = |scenario: &Scenario| scenario.router.map(|router| router.workers);
        assert_eq!(workers(&scenario), workers(&before).map(|workers| workers * 4));
        assert!(resize(&mut scenario, 0).is_err() && resize(&mut scenario, 5000).is_err());
        assert!(read("no-such-scenario").is_err_and(|error| error.to_string().contains("flash-crowd")));
    }

    #[test]
    fn comparison_has_a_column_per_policy_and_a_figure() {
        let mut scenario = read("weekly").expect("a scenario");
        (scenario.duration, scenario.warm_up) = (7200.0, 600.0);
        scenario.bin = 600.0;
        let policies = ["autoscale=off", "autoscale=model"].map(|text| Policies::parse(text).expect("a policy"));
        let compared = simulate_all(&scenario, policies.to_vec(), 2, 2).expect("runs");
        let text = table(&compared).to_text();
        assert!(text.contains("autoscale=off") && text.contains("autoscale=model") && text.contains(" to "), "{text}");
        let svg = figure::svg(&panels("weekly", &scenario, &compared)).expect("a figure");
        assert!(svg.contains("requests served") && !svg.contains("hits, %"), "nothing is hit without copies: {svg}");
    }
}
