//! Parameters of NetMigrate, as in its section 6.3: bytes of the counting filter, bits of the filter, and number of
//! groups. Also the goals of the move. The presets of section 6.2 are kinds of moves of [`super::ways`].

use anyhow::Result;
use serde_json::json;
use switchyard_bench::table::Table;

use super::netmigrate::{COLUMNS, Cell, Load, Measured, columns, of_before, one};
use super::published::{BY_BITS, BY_COUNTING, BY_GROUPS, Tuned};
use super::spread::Spread;
use super::{Conduct, Section, measure, publish};
use crate::figure::{self, Line, Panel};

const MARK: &str = "reproduce-tuning";

/// Settings of the experiment.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Common settings.
    pub conduct: Conduct,
    /// Keys and load.
    pub load: Load,
    /// Share of writes, in percent.
    pub writes_percent: f64,
    /// Share of a processor for the source; `None` for no limit.
    pub source_cpu: Option<f64>,
    /// Share of a processor for the target; `None` for no limit.
    pub target_cpu: Option<f64>,
}

/// One value of a parameter.
#[derive(Debug, Clone, PartialEq)]
struct Setting {
    name: String,
    /// Position on the axis.
    at: f64,
    flags: Vec<String>,
    published: Option<Tuned>,
}

/// Compared values of a parameter. The first is the reference.
#[derive(Debug, Clone, PartialEq)]
struct Knob {
    title: &'static str,
    axis: Option<&'static str>,
    settings: Vec<Setting>,
}

fn paper(more: &[&str]) -> Vec<String> {
    let flags = ["--protocol", "netmigrate", "--mode", "paper", "--allow-key-loss"];
    flags.iter().chain(more).map(|word| (*word).to_owned()).collect()
}

/// Returns the arguments of a move whose counting filter has this many bytes.
pub(super) fn counting(bytes: u32) -> Vec<String> {
    paper(&["--goal", "fast", "--bits", "32", "--counting-bytes", &bytes.to_string()])
}

/// Returns the arguments of a move whose filter has this many bits for each group.
pub(super) fn bits(bits: u32) -> Vec<String> {
    paper(&["--goal", "fast", "--bits", &bits.to_string()])
}

/// Returns the arguments of a move with this power of two of groups.
pub(super) fn groups(power: u32) -> Vec<String> {
    paper(&["--goal", "fast", "--groups", &(1_u32 << power).to_string()])
}

fn knobs() -> Vec<Knob> {
    let mut goals = Vec::new();
    for goal in ["fast", "balanced", "gentle"] {
        let safe = ["--protocol", "netmigrate", "--goal", goal].map(str::to_owned).to_vec();
        for (mode, flags) in [("paper", paper(&["--goal", goal])), ("safe", safe)] {
            goals.push(Setting { name: format!("{goal}, {mode}"), at: 0.0, flags, published: None });
        }
    }
    let of_table = |table: &[(u32, Tuned)], name: fn(u32) -> String, flags: fn(u32) -> Vec<String>| {
        let setting = |(value, published): &(u32, Tuned)| Setting {
            name: name(*value),
            at: f64::from(*value),
            flags: flags(*value),
            published: Some(*published),
        };
        table.iter().map(setting).collect()
    };
    vec![
        Knob {
            title: "Bytes of the counting filter (Table 2)",
            axis: Some("bytes"),
            settings: of_table(&BY_COUNTING, |bytes| format!("{bytes} B"), counting),
        },
        Knob {
            title: "Bits of the filter for each group (Table 2)",
            axis: Some("bits"),
            settings: of_table(&BY_BITS, |bits| format!("{bits} bits"), bits),
        },
        Knob {
            title: "Number of groups (Table 3)",
            axis: Some("groups, powers of 2"),
            settings: of_table(&BY_GROUPS, |power| format!("2^{power} groups"), groups),
        },
        Knob { title: "Goals of the move", axis: None, settings: goals },
    ]
}

/// Does the missing measurements, prints all, and rewrites the section of the document.
///
/// # Errors
/// If a server cannot be started, a move ends early, or the user interrupts.
pub fn run(settings: &Settings) -> Result<()> {
    let Settings { conduct, load, .. } = settings;
    let cell = Cell {
        writes_percent: settings.writes_percent,
        source_cpu: settings.source_cpu,
        target_cpu: settings.target_cpu,
    };
    let knobs = knobs();
    let runs: Vec<(usize, &Setting)> = knobs
        .iter()
        .enumerate()
        .flat_map(|(at, knob)| knob.settings.iter().map(move |setting| (at, setting)))
        .collect();
    let outcome = measure(
        conduct,
        &runs,
        |(_, setting)| json!({"experiment": "tuning", "load": load, "cell": cell, "flags": setting.flags}),
        |(_, setting)| format!("{}, {}", setting.name, cell.title()),
        |bench, (_, setting)| {
            let flags: Vec<&str> = setting.flags.iter().map(String::as_str).collect();
            one(bench, load, cell, &flags)
        },
    )?;
    let mut section = Section { notes: vec![format!("NetMigrate, {}.", cell.title())], ..Section::default() };
    let mut panels = Vec::new();
    for (at, knob) in knobs.iter().enumerate() {
        let all: Vec<(&Setting, &[Measured])> = runs
            .iter()
            .zip(&outcome.results)
            .filter(|((of, _), _)| *of == at)
            .map(|((_, s), r)| (*s, r.as_slice()))
            .collect();
        section.tables.push((knob.title.to_owned(), table(&all)));
        if let Some(axis) = knob.axis {
            panels.push(panel(knob.title, axis, &all));
        }
    }
    section.figures.push((
        "netmigrate-tuning".to_owned(),
        "Throughput by bytes of the counting filter, bits of the filter and number of groups, as a share of the first row".to_owned(),
        figure::svg(&panels)?,
    ));
    publish(conduct, MARK, &outcome, &section)
}

/// Returns the median throughput, as a share of the throughput before the move.
fn throughput(all: &[Measured]) -> Option<f64> {
    Spread::of(all.iter().map(of_before)).map(|spread| spread.median)
}

/// Returns the percent of the first value's throughput: ours, and the paper's.
fn of_first(all: &[(&Setting, &[Measured])], at: usize) -> (Option<f64>, Option<f64>) {
    let ours = |at: usize| all.get(at).and_then(|(_, measured)| throughput(measured));
    let theirs = |at: usize| all.get(at).and_then(|(setting, _)| Some(setting.published?.throughput));
    let share = |this: Option<f64>, first: Option<f64>| this.zip(first).map(|(this, first)| 100.0 * this / first);
    (share(ours(at), ours(0)), share(theirs(at), theirs(0)))
}

fn table(all: &[(&Setting, &[Measured])]) -> Table {
    let is_published = all.iter().any(|(setting, _)| setting.published.is_some());
    let mut head = vec!["setting"];
    head.extend(COLUMNS);
    if is_published {
        head.extend(["of first row", "published of first row", "published p99 ms", "published extra"]);
    }
    let mut table = Table::new(head);
    for (at, (setting, measured)) in all.iter().enumerate() {
        let mut row = vec![setting.name.clone()];
        row.extend(columns(measured));
        if let Some(published) = setting.published {
            let (ours, theirs) = of_first(all, at);
            let percent = |share: Option<f64>| share.map_or(String::new(), |share| format!("{share:.0} %"));
            row.extend([
                percent(ours),
                percent(theirs),
                format!("{}", published.p99_ms),
                format!("{} %", published.extra_clients),
            ]);
        }
        table.row(row);
    }
    table
}

fn panel(title: &str, axis: &str, all: &[(&Setting, &[Measured])]) -> Panel {
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for (at, (setting, _)) in all.iter().enumerate() {
        let (here, there) = of_first(all, at);
        ours.extend(here.map(|share| (setting.at, share)));
        theirs.extend(there.map(|share| (setting.at, share)));
    }
    let line = |name: &str, points| Line { name: name.to_owned(), points };
    Panel {
        title: title.to_owned(),
        x: axis.to_owned(),
        y: "throughput, % of the first row".to_owned(),
        floor: None,
        lines: vec![line("here", ours), line("published", theirs)],
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn settings_are_unique_and_published_ones_have_numbers() {
        for knob in knobs() {
            let names: BTreeSet<_> = knob.settings.iter().map(|setting| &setting.name).collect();
            let flags: BTreeSet<_> = knob.settings.iter().map(|setting| &setting.flags).collect();
            assert_eq!((names.len(), flags.len()), (knob.settings.len(), knob.settings.len()), "{}", knob.title);
            assert!(
                knob.settings.iter().all(|setting| setting.published.is_some() == knob.axis.is_some()),
                "{}",
                knob.title
            );
        }
    }

    #[test]
    fn ratios_are_of_the_first_row() {
        let knobs = knobs();
        let all: Vec<(&Setting, &[Measured])> =
            knobs[1].settings.iter().map(|setting| (setting, [].as_slice())).collect();
        assert_eq!(of_first(&all, 0), (None, Some(100.0)));
        assert!((of_first(&all, 5).1.expect("published") - 86.57).abs() < 0.01);
        assert_eq!(panel("t", "x", &all).lines[1].points.len(), 6);
    }
}
