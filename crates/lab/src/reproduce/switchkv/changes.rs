//! Throughput while the popularity of keys changes: figures 15 to 19.

use anyhow::Result;
use switchyard_sim::fleet::switchkv::{
    Admission, Changes, Method, Outcome as Simulated, POINT_S, Pattern, Settings as Simulation, Updates,
};

use super::super::{Section, plain, publish};
use super::steady::NO_CACHE;
use super::{Measured, Run, Settings, draw, found, lines, mqps, of_figure, shown, simulate, table};
use crate::figure::{Line, Panel};

pub(in crate::reproduce) const EXPERIMENT: &str = "switchkv-changes";
const MARK: &str = "reproduce-switchkv-changes";

/// Items of the cache, among which the random pattern replaces keys.
const ITEMS: usize = 10_000;
/// Time of the first change of hot-in, in seconds, and the interval. The text has the interval of figure 15.
pub(in crate::reproduce) const HOT_IN: (f64, f64) = (5.0, 10.0);
/// Interval of the changes of figure 18, in seconds. Not in the text.
const BURST_EVERY: f64 = 15.0;
/// Part of the throughput before the change that counts as recovered.
pub(in crate::reproduce) const RECOVERED: f64 = 0.9;
/// Changed keys per second of figure 19. The text has 200 and "more than 10000".
const RATES: [u32; 8] = [10, 50, 100, 200, 400, 1000, 10_000, 20_000];

/// Names of lines.
pub(in crate::reproduce) const BOTH: &str = "periodic and instant reports";
pub(in crate::reproduce) const PERIODIC: &str = "periodic reports";
pub(in crate::reproduce) const INSTANT: &str = "instant reports";
pub(in crate::reproduce) const EVERY_KEY: &str = "every queried key";
pub(in crate::reproduce) const BUFFER: &str = "with a rule buffer";
pub(in crate::reproduce) const NO_BUFFER: &str = "without a rule buffer";
pub(in crate::reproduce) const UNCHANGED: &str = "no changes";

/// Patterns of figure 19, with their names.
pub(in crate::reproduce) const PATTERNS: [(&str, Pattern); 3] =
    [("hot-in", Pattern::HotIn), ("hot-out", Pattern::HotOut), ("random", Pattern::Random { within: ITEMS })];

/// Returns an experiment with changes of this many keys each second.
pub(super) fn each_second(pattern: Pattern, keys: usize, updates: Updates, seconds: u32) -> Simulation {
    let changes = Changes { pattern, keys, first: 0.0, every: 1.0 };
    Simulation { changes: Some(changes), updates: Some(updates), seconds, ..Simulation::default() }
}

/// Returns an experiment in which keys become the hottest ones from time to time.
pub(super) fn hot_in(keys: usize, every: f64, updates: Updates, seconds: u32) -> Simulation {
    let changes = Changes { pattern: Pattern::HotIn, keys, first: HOT_IN.0, every };
    Simulation { changes: Some(changes), updates: Some(updates), seconds, ..Simulation::default() }
}

fn runs() -> Vec<Run> {
    let reports = |periodic, instant| Updates::reports(periodic, instant, Admission::PUBLISHED);
    let both = Updates::PUBLISHED;
    let every_key = Updates { method: Method::EveryKey, ..both };
    let mut runs = Vec::new();
    let unchanged = Simulation { updates: Some(both), seconds: 10, ..Simulation::default() };
    runs.push(Run::new("none", UNCHANGED, 0.0, unchanged));
    runs.push(Run::new("none", NO_CACHE, 0.0, Simulation { items: 0, ..Simulation::default() }));
    for (name, updates) in [(EVERY_KEY, every_key), (PERIODIC, reports(true, false)), (BOTH, both)] {
        runs.push(Run::new("15", name, 0.0, hot_in(200, HOT_IN.1, updates, 35)));
    }
    for (name, updates) in [(INSTANT, reports(false, true)), (BOTH, both)] {
        runs.push(Run::new("16", name, 0.0, each_second(Pattern::HotOut, 200, updates, 70)));
    }
    for (name, updates) in [(PERIODIC, reports(true, false)), (INSTANT, reports(false, true)), (BOTH, both)] {
        runs.push(Run::new("17", name, 0.0, each_second(Pattern::Random { within: ITEMS }, 200, updates, 30)));
    }
    for (name, delay) in [(NO_BUFFER, 0.0), (BUFFER, Admission::PUBLISHED.delay)] {
        let updates = Updates::reports(true, true, Admission { delay, ..Admission::PUBLISHED });
        runs.push(Run::new("18", name, 0.0, hot_in(600, BURST_EVERY, updates, 35)));
    }
    for (name, pattern) in PATTERNS {
        for rate in RATES {
            runs.push(Run::new("19", name, f64::from(rate), each_second(pattern, rate as usize, both, 15)));
        }
    }
    runs
}

/// Times of the changes in a run of hot-in that has a second before each and one after it.
pub(in crate::reproduce) fn changes_of(outcome: &Simulated, every: f64) -> impl Iterator<Item = f64> + '_ {
    let end = outcome.served.len() as f64 * POINT_S;
    (0..).map(move |number| HOT_IN.0 + f64::from(number) * every).take_while(move |at| at + 2.0 < end)
}

/// Returns for each change the throughput in the second after it, relative to that in the second before.
pub(in crate::reproduce) fn drops(outcome: &Simulated, every: f64) -> Vec<f64> {
    changes_of(outcome, every).map(|at| outcome.mean(at, at + 1.0) / outcome.mean(at - 1.0, at)).collect()
}

/// Returns for each change the time until the throughput is [`RECOVERED`], in seconds; the interval, if it is not
/// before the next change.
pub(in crate::reproduce) fn recoveries(outcome: &Simulated, every: f64) -> Vec<f64> {
    let first = changes_of(outcome, every).next();
    // Before the first change nothing else has reduced it.
    let level = first.map_or(0.0, |at| RECOVERED * outcome.mean(at - 1.0, at));
    let changes = changes_of(outcome, every);
    changes.map(|at| outcome.recovered(at, level).filter(|time| *time < every).unwrap_or(every)).collect()
}

fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// Does the missing runs, prints all, and rewrites the section of the document.
pub(super) fn run(settings: &Settings) -> Result<()> {
    let (runs, outcome) = simulate(settings, EXPERIMENT, runs())?;
    let of = |figure| of_figure(&runs, &outcome, figure);
    let mut section = Section::default();
    let steady = found(&runs, &outcome, "none", UNCHANGED);
    section.notes.push(format!(
        "Without changes: {} MQPS. *Drop* is the throughput in the second after a change, relative to the second before. \
         *Recovered* is the time until the mean of half a second is {} % of the throughput before the first change.",
        mqps(steady, |outcome| outcome.throughput),
        RECOVERED * 100.0
    ));
    for (figure, title, every) in [
        ("15", "Figure 15: 200 cold keys become the hottest ones every ten seconds", HOT_IN.1),
        ("18", "Figure 18: 600 cold keys become the hottest ones every fifteen seconds", BURST_EVERY),
    ] {
        section.tables.push((
            title.to_owned(),
            table(
                &["updates", "MQPS", "drop", "recovered, s", "90 % of the new keys are cached, s", "rules/s"],
                of(figure),
                |run, measured| {
                    vec![
                        run.name.clone(),
                        mqps(measured, |outcome| outcome.throughput),
                        shown(measured, 2, |measured| mean(&drops(&measured.outcome, every))),
                        shown(measured, 1, |measured| mean(&recoveries(&measured.outcome, every))),
                        filled(measured),
                        shown(measured, 0, |measured| Some(measured.outcome.rules)),
                    ]
                },
            ),
        ));
    }
    for (figure, title, from) in [
        ("16", "Figure 16: each second the 200 hottest keys become cold", 50.0),
        ("17", "Figure 17: each second cold keys replace 200 of the 10,000 hottest ones", 10.0),
    ] {
        let from_text = format!("MQPS from {from} s on");
        section.tables.push((
            title.to_owned(),
            table(
                &["updates", "MQPS", &from_text, "least MQPS of a second", "rules/s"],
                of(figure),
                |run, measured| {
                    vec![
                        run.name.clone(),
                        mqps(measured, |outcome| outcome.throughput),
                        mqps(measured, |outcome| outcome.mean(from, f64::INFINITY)),
                        mqps(measured, |outcome| least(outcome, from)),
                        shown(measured, 0, |measured| Some(measured.outcome.rules)),
                    ]
                },
            ),
        ));
    }
    section.tables.push((
        "Figure 19: mean throughput by the number of changed keys".to_owned(),
        table(&["pattern", "keys/s", "MQPS", "keys added/s"], of("19"), |run, measured| {
            vec![
                run.name.clone(),
                plain(run.at),
                mqps(measured, |outcome| outcome.throughput),
                shown(measured, 0, |measured| Some(measured.outcome.added)),
            ]
        }),
    ));
    let over_time = |figure: &'static str, title: &str| Panel {
        title: title.to_owned(),
        x: "seconds".to_owned(),
        y: "MQPS".to_owned(),
        floor: None,
        lines: of(figure).filter_map(|(run, measured)| Some(series(&run.name, &measured.first()?.outcome))).collect(),
    };
    draw(
        &mut section,
        "switchkv-hot-in",
        "Throughput over time while cold keys become the hottest ones (figures 15 and 18), of one seed",
        &[over_time("15", "Figure 15: 200 keys, hot-in"), over_time("18", "Figure 18: 600 keys, hot-in")],
    )?;
    draw(
        &mut section,
        "switchkv-changes",
        "Throughput over time while 200 keys change each second (figures 16 and 17), of one seed",
        &[over_time("16", "Figure 16: hot-out"), over_time("17", "Figure 17: random")],
    )?;
    let by_rate = Panel {
        title: "Figure 19".to_owned(),
        x: "changed keys/s, power of ten".to_owned(),
        y: "MQPS".to_owned(),
        floor: None,
        lines: lines(of("19"), f64::log10, |outcome| outcome.throughput / 1e6),
    };
    draw(
        &mut section,
        "switchkv-rates",
        "Mean throughput by pattern and number of changed keys per second (figure 19)",
        &[by_rate],
    )?;
    publish(&settings.conduct, MARK, &outcome, &section)
}

/// Formats the time until the cache has the new keys; `never` if that takes longer than the interval in a change.
pub(super) fn filled(measured: &[Measured]) -> String {
    if measured.iter().any(|measured| measured.outcome.filled.contains(&None)) {
        return "not before the next change".to_owned();
    }
    shown(measured, 2, |measured| mean(&measured.outcome.filled.iter().copied().flatten().collect::<Vec<_>>()))
}

/// Least throughput of a second, from a time on.
fn least(outcome: &Simulated, from: f64) -> f64 {
    let end = (outcome.served.len() as f64 * POINT_S) as u32;
    let seconds = (from as u32..end).map(f64::from);
    seconds.map(|second| outcome.mean(second, second + 1.0)).fold(f64::INFINITY, f64::min)
}

fn series(name: &str, outcome: &Simulated) -> Line {
    let points = outcome.served.iter().enumerate();
    let points = points.map(|(number, rate)| ((number as f64 + 1.0) * POINT_S, rate / 1e6)).collect();
    Line { name: name.to_owned(), points }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_unique() {
        Run::assert_unique(&runs(), EXPERIMENT);
    }

    #[test]
    fn drops_and_recoveries_are_of_each_change() {
        let mut outcome =
            switchyard_sim::fleet::switchkv::run(&Simulation { backends: 2, ..Simulation::default() }, 1, None);
        // Changes at 5 and 15 s; the second one is never recovered.
        outcome.served = (0..200)
            .map(|point| match point {
                50..60 => 4.0,
                60..65 => 8.0,
                150.. => 6.0,
                _ => 10.0,
            })
            .collect();
        assert_eq!(drops(&outcome, 10.0), [0.4, 0.6]);
        assert_eq!(recoveries(&outcome, 10.0), [1.3, 10.0]);
        assert_eq!(least(&outcome, 0.0), 4.0);
    }
}
