//! Throughput of a cache whose content stays: tables 1 and 2, and figures 9 to 14.
//!
//! Figure 13 has latencies, which are machines that a query passes here. A real network with namespaces was rejected:
//! without a way to delay packets, two processors would measure their scheduler.

use anyhow::Result;
use switchyard_bench::table::Table;
use switchyard_sim::fleet::switchkv::{Architecture, Outcome as Simulated, Settings as Simulation, Written};

use super::super::{Outcome, Section, plain, publish};
use super::{Measured, Run, Settings, draw, found, lines, mqps, of_figure, shown, simulate, table};
use crate::figure::{Line, Panel};

pub(in crate::reproduce) const EXPERIMENT: &str = "switchkv-steady";
const MARK: &str = "reproduce-switchkv-steady";

/// Workloads of figures 9 and 10. The text has uniform and 0.99.
const ZIPF: [f64; 4] = [0.0, 0.9, 0.95, 0.99];
/// Numbers of cached items of figure 11. The text has 10,000.
const ITEMS: [usize; 11] = [1, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000];
/// Shares of writes of figure 12, in percent.
const WRITES: [u32; 7] = [0, 5, 10, 20, 50, 80, 100];
/// Numbers of backends of figure 14. The text has 64 and 400.
const BACKENDS: [u16; 9] = [16, 32, 64, 128, 192, 256, 400, 512, 640];
/// Numbers of cached items to try in figure 14; the best one counts.
const BEST_OF: [usize; 12] = [20, 50, 70, 100, 140, 200, 300, 500, 700, 1000, 3000, 10_000];

/// Architectures, with their names in the figures.
pub(in crate::reproduce) const ARCHITECTURES: [(&str, Architecture); 3] = [
    ("SwitchKV", Architecture::SwitchKv),
    ("look-aside", Architecture::LookAside),
    ("look-through", Architecture::LookThrough),
];

/// Names of lines that the book uses.
pub(in crate::reproduce) const NO_CACHE: &str = "no cache";
pub(in crate::reproduce) const CACHE: &str = "10,000 items";

/// Returns the name of a workload.
pub(in crate::reproduce) fn workload(zipf: f64) -> String {
    if zipf == 0.0 { "uniform".to_owned() } else { format!("Zipf {}", plain(zipf)) }
}

/// Returns the name of a line of figure 12.
pub(in crate::reproduce) fn written(written: Written) -> &'static str {
    match written {
        Written::Uniform => "writes of uniform keys",
        Written::Skewed => "writes of Zipf 0.99 keys",
    }
}

fn runs() -> Vec<Run> {
    let default = Simulation::default();
    let mut runs = Vec::new();
    for zipf in ZIPF {
        let settings = Simulation { zipf, items: 0, ..default };
        runs.push(Run::new("9", workload(zipf), zipf, settings));
        runs.push(Run::new("10", NO_CACHE, zipf, settings));
        runs.push(Run::new("10", CACHE, zipf, Simulation { zipf, ..default }));
    }
    for items in ITEMS {
        runs.push(Run::new("11", "Zipf 0.99", items as f64, Simulation { items, ..default }));
    }
    for kind in [Written::Uniform, Written::Skewed] {
        for percent in WRITES {
            let settings = Simulation { writes: f64::from(percent) / 100.0, written: kind, ..default };
            runs.push(Run::new("12", written(kind), f64::from(percent), settings));
        }
    }
    for (name, architecture) in ARCHITECTURES {
        let of = |settings: Simulation| Simulation { architecture, ..settings };
        // As many keys as items, so that each is cached.
        runs.push(Run::new("13a", name, 0.0, of(Simulation { keys: 10_000.0, ..default })));
        runs.push(Run::new("13b", name, 0.0, of(Simulation { items: 0, zipf: 0.0, ..default })));
        runs.push(Run::new("13c", name, 0.0, of(default)));
        for backends in BACKENDS {
            let limits = Simulation { backends, backend_limit: 50_000.0, cache_limit: 5e6, ..default };
            let run = Run::new("14", name, f64::from(backends), of(limits));
            runs.push(Run { items: BEST_OF.to_vec(), ..run });
        }
    }
    runs
}

fn throughput(outcome: &Simulated) -> f64 {
    outcome.throughput / 1e6
}

fn panel(title: &str, x: &str, y: &str, lines: Vec<Line>) -> Panel {
    Panel { title: title.to_owned(), x: x.to_owned(), y: y.to_owned(), floor: None, lines }
}

/// Does the missing runs, prints all, and rewrites the section of the document.
pub(super) fn run(settings: &Settings) -> Result<()> {
    let (runs, outcome) = simulate(settings, EXPERIMENT, runs())?;
    let of = |figure| of_figure(&runs, &outcome, figure);
    let mut section = Section::default();
    let percent = |measured: &[Measured], value: fn(&Simulated) -> f64| {
        shown(measured, 1, |measured| Some(100.0 * value(&measured.outcome)))
    };
    section.tables.push(("Table 1: machines that a query passes".to_owned(), architectures(&runs, &outcome)));
    section.tables.push(("Table 2: settings".to_owned(), defaults()));
    section.tables.push((
        "Figure 9: load of the backends without a cache".to_owned(),
        table(
            &["reads", "busiest backend : mean", "KQPS of the busiest", "KQPS of the median", "KQPS of the least"],
            of("9"),
            |run, measured| {
                let at = |place: fn(usize) -> usize| {
                    shown(measured, 1, |measured| {
                        let mut all = measured.outcome.by_backend.clone();
                        all.sort_by(f64::total_cmp);
                        all.get(place(all.len().saturating_sub(1))).map(|rate| rate / 1e3)
                    })
                };
                let busiest = shown(measured, 2, |measured| Some(measured.outcome.busiest));
                vec![run.name.clone(), busiest, at(|last| last), at(|last| last / 2), at(|_| 0)]
            },
        ),
    ));
    section.tables.push((
        "Figure 10: throughput with and without a cache".to_owned(),
        table(&["reads", "cache", "MQPS", "of these by the cache", "hits, %"], of("10"), |run, measured| {
            vec![
                workload(run.at),
                run.name.clone(),
                mqps(measured, |outcome| outcome.throughput),
                mqps(measured, |outcome| outcome.throughput * outcome.by_cache),
                percent(measured, |outcome| outcome.hits),
            ]
        }),
    ));
    section.tables.push((
        "Figure 11: throughput by the number of cached items".to_owned(),
        table(&["items", "MQPS", "of these by the cache", "hits, %"], of("11"), |run, measured| {
            vec![
                plain(run.at),
                mqps(measured, |outcome| outcome.throughput),
                mqps(measured, |outcome| outcome.throughput * outcome.by_cache),
                percent(measured, |outcome| outcome.hits),
            ]
        }),
    ));
    section.tables.push((
        "Figure 12: throughput by the share of writes".to_owned(),
        table(&["written keys", "writes, %", "MQPS"], of("12"), |run, measured| {
            vec![run.name.clone(), plain(run.at), mqps(measured, |outcome| outcome.throughput)]
        }),
    ));
    section.tables.push((
        "Figure 14: throughput by the number of backends".to_owned(),
        table(&["architecture", "backends", "MQPS", "cached items"], of("14"), |run, measured| {
            vec![
                run.name.clone(),
                plain(run.at),
                mqps(measured, |outcome| outcome.throughput),
                shown(measured, 0, |measured| Some(measured.items as f64)),
            ]
        }),
    ));
    let spread = of("9").filter_map(|(run, measured)| {
        let mut all = measured.first()?.outcome.by_backend.clone();
        all.sort_by(|one, other| other.total_cmp(one));
        let points = all.iter().enumerate().map(|(place, rate)| (place as f64 + 1.0, rate / 1e3)).collect();
        Some(Line { name: run.name.clone(), points })
    });
    draw(
        &mut section,
        "switchkv-cache",
        "Throughput of each backend without a cache, and of the system by the workload and the number of cached items (figures 9 to 11)",
        &[
            panel("Figure 9: backends, no cache", "backend, busiest first", "KQPS", spread.collect()),
            panel("Figure 10", "Zipf exponent", "MQPS", lines(of("10"), |x| x, throughput)),
            panel("Figure 11", "items, power of ten", "MQPS", lines(of("11"), f64::log10, throughput)),
        ],
    )?;
    draw(
        &mut section,
        "switchkv-scale",
        "Throughput by the share of writes and by the number of backends (figures 12 and 14)",
        &[
            panel("Figure 12", "writes, %", "MQPS", lines(of("12"), |x| x, throughput)),
            panel("Figure 14", "backends", "MQPS", lines(of("14"), |x| x, throughput)),
        ],
    )?;
    publish(&settings.conduct, MARK, &outcome, &section)
}

/// Table 1, from the runs of figure 13.
fn architectures(runs: &[Run], outcome: &Outcome<Measured>) -> Table {
    let mut table = Table::new([
        "architecture",
        "cached keys",
        "uncached keys",
        "mean, Zipf 0.99",
        "p99, Zipf 0.99",
        "queries that the cache processes, %",
        "MQPS, Zipf 0.99",
    ]);
    for (name, _) in ARCHITECTURES {
        let machines = |figure: &str, digits: usize, value: fn(&Simulated) -> f64| {
            shown(found(runs, outcome, figure, name), digits, |measured| Some(value(&measured.outcome)))
        };
        table.row([
            name.to_owned(),
            machines("13a", 0, |outcome| outcome.transits.0),
            machines("13b", 0, |outcome| outcome.transits.0),
            machines("13c", 2, |outcome| outcome.transits.0),
            machines("13c", 0, |outcome| outcome.transits.1),
            machines("13c", 1, |outcome| 100.0 * outcome.at_cache),
            mqps(found(runs, outcome, "13c", name), |outcome| outcome.throughput),
        ]);
    }
    table
}

/// Table 2, with the parameters that the text states elsewhere.
fn defaults() -> Table {
    let settings = Simulation::default();
    let mut table = Table::of_text(["setting", "value"]);
    table.row(["backends", &settings.backends.to_string()]);
    table.row(["limit of a backend, queries/s", &plain(settings.backend_limit)]);
    table.row(["limit of the cache node, queries/s", &plain(settings.cache_limit)]);
    table.row(["keys", &plain(settings.keys)]);
    table.row(["reads", &workload(settings.zipf)]);
    table.row(["cached items", &settings.items.to_string()]);
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_unique() {
        Run::assert_unique(&runs(), EXPERIMENT);
    }
}
