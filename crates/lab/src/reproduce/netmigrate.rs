//! All migration protocols compared as in NetMigrate (FAST 2024, section 6): the same keys, load and servers, and for
//! each a move of everything that the first server has. The number of wrong replies is added to the paper's measures.
//!
//! A cell of the grid is a share of writes, and the shares of a processor for source and target.

use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::json;
use switchyard_bench::random::{Popularity, YCSB_THETA};
use switchyard_bench::table::Table;
use switchyard_bench::wire;

use super::published::{self, Row};
use super::spread::Spread;
use super::watch::{Second, Served, for_a_while, until_done};
use super::ways::{SOURCE_OPS_MAX, WAYS, Way};
use super::{Bench, Conduct, NO_COPIES, Section, measure, plain, publish};
use crate::figure::{self, Line, Panel};
use crate::moves::admin::{self, Order};
use crate::moves::generator;
use crate::moves::site::{Routed, keys_at};
use crate::moves::{Keys, Layout, Run};

const VALUE: usize = 64;
/// Number of slots of each server.
const SLOTS: u16 = 1 << 10;
/// Shares of the source's capacity of the presets of `switchyard move --source-ops-max`.
const PRESETS: [(&str, f64); 2] = [("short", 0.23), ("medium", 0.54)];
/// Percent of writes of section 6.2.
const PRESET_WRITES: f64 = 5.0;
/// Duration of the load before anything is counted.
const WARM_UP: Duration = Duration::from_secs(1);

/// Settings of the experiment.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Common settings.
    pub conduct: Conduct,
    /// Keys and load.
    pub load: Load,
    /// Shares of writes, in percent.
    pub writes: Vec<f64>,
    /// Shares of a processor for the source; `None` for no limit.
    pub source_cpu: Vec<Option<f64>>,
    /// Shares of a processor for the target; `None` for no limit.
    pub target_cpu: Vec<Option<f64>>,
    /// Names of the kinds of moves; empty for all.
    pub only: Vec<String>,
    /// The content of the figures.
    pub figures: Figures,
}

/// The content of the figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Figures {
    /// Throughput and p99 by the share of writes (Tables 5 and 7).
    Grid,
    /// Throughput, p50 and p99 by the seconds of the move (Figures 4 to 6).
    Curves,
}

impl Figures {
    /// Name of the experiment.
    fn experiment(self) -> &'static str {
        match self {
            Self::Grid => "netmigrate",
            Self::Curves => "netmigrate-curves",
        }
    }
}

/// Keys and load of a run.
#[derive(Debug, Clone, Serialize)]
pub struct Load {
    /// Keys of 64 bytes, all of which move.
    pub keys: u64,
    /// Connections of the load, with one request in flight each.
    pub connections: usize,
    /// Duration of the load before a move begins.
    pub control: Duration,
}

/// A cell of the grid.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Cell {
    pub(super) writes_percent: f64,
    pub(super) source_cpu: Option<f64>,
    pub(super) target_cpu: Option<f64>,
}

impl Cell {
    pub(super) fn title(&self) -> String {
        format!("writes {} %, {}", plain(self.writes_percent), self.servers())
    }

    fn servers(&self) -> String {
        let share =
            |cpu: Option<f64>| cpu.map_or("not limited".to_owned(), |cpu| format!("{} of a processor", plain(cpu)));
        format!("source {}, target {}", share(self.source_cpu), share(self.target_cpu))
    }
}

/// Results of one run. `before` and `during` are requests per second.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Measured {
    pub(super) before: f64,
    pub(super) during: f64,
    pub(super) p50_ms: f64,
    pub(super) p99_ms: f64,
    pub(super) seconds: f64,
    pub(super) longest_gap_ms: f64,
    /// GET and SET that servers executed beyond one per request, in percent of the requests.
    pub(super) extra_percent: f64,
    /// Bytes received and sent by both servers for each key, beyond the cost of the requests.
    pub(super) bytes_per_key: f64,
    pub(super) replies: u64,
    /// Replies with nil, and with an older value.
    pub(super) lost: u64,
    pub(super) stale: u64,
    pub(super) errors: u64,
    pub(super) wrong_after: u64,
    /// The mean of the time before the move, and then each second of the move.
    pub(super) curve: Vec<Second>,
}

/// Does the missing measurements, prints all, and rewrites the section of the document.
///
/// # Errors
/// If a server cannot be started, a move ends early, or the user interrupts.
pub fn run(settings: &Settings) -> Result<()> {
    let cells = cells(settings);
    let wanted = |way: &&Way| settings.only.is_empty() || settings.only.iter().any(|only| only == way.name);
    let runs: Vec<(Cell, &Way)> = cells
        .iter()
        .flat_map(|cell| WAYS.iter().filter(wanted).map(move |way| (*cell, way)))
        .filter(|(cell, way)| !way.has_preset() || settings.figures == Figures::Curves || has_presets(cell, settings))
        .collect();
    let outcome = measure(
        &settings.conduct,
        &runs,
        |(cell, way)| json!({"experiment": settings.figures.experiment(), "load": settings.load, "cell": cell, "flags": way.flags}),
        |(cell, way)| format!("{}, {}", way.name, cell.title()),
        |bench, (cell, way)| one(bench, &settings.load, *cell, way.flags),
    )?;
    let of = |cell: &Cell| -> Vec<(&Way, &[Measured])> {
        let of_cell = runs.iter().zip(&outcome.results).filter(|((c, _), _)| c == cell);
        of_cell.map(|((_, way), results)| (*way, results.as_slice())).collect()
    };
    let mut section = Section::default();
    for cell in &cells {
        let title = cell.title();
        let title = format!("{}{}", title[..1].to_uppercase(), &title[1..]);
        section.tables.push((title, table(cell, &of(cell))));
    }
    match settings.figures {
        Figures::Grid => section.figures = grid(&cells, of)?,
        Figures::Curves => section.figures = curves(&cells, of)?,
    }
    publish(&settings.conduct, &format!("reproduce-{}", settings.figures.experiment()), &outcome, &section)
}

/// File name, caption and content of a figure.
type Figure = (String, String, String);

fn grid<'a>(cells: &[Cell], of: impl Fn(&Cell) -> Vec<(&'a Way, &'a [Measured])>) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for (name, shows, y, floor, value) in [
        (
            "netmigrate-throughput",
            "Throughput during the move, relative to the throughput before",
            "requests/s, % of the rate before",
            None,
            of_before as fn(&Measured) -> f64,
        ),
        ("netmigrate-p99", "p99 during the move", "p99, ms", Some(0.1), |m| m.p99_ms),
    ] {
        let panels = panels(cells, y, floor, |cell| {
            of(cell)
                .into_iter()
                .filter_map(|(way, all)| Some((way.name, Spread::of(all.iter().map(value))?.median)))
                .collect()
        });
        figures.push((name.to_owned(), shows.to_owned(), figure::svg(&panels)?));
    }
    Ok(figures)
}

/// Returns the curves of the first repetition. Second 0 is the mean of the time before the move.
fn curves<'a>(cells: &[Cell], of: impl Fn(&Cell) -> Vec<(&'a Way, &'a [Measured])>) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for (name, shows, y, value) in [
        ("netmigrate-curve-throughput", "Throughput", "requests/s", (|second| second.rate) as fn(&Second) -> f64),
        ("netmigrate-curve-p50", "p50", "p50, ms", |second| second.p50_ms),
        ("netmigrate-curve-p99", "p99", "p99, ms", |second| second.p99_ms),
    ] {
        let panels: Vec<Panel> = cells
            .iter()
            .map(|cell| Panel {
                title: cell.servers(),
                x: "seconds of the move".to_owned(),
                y: y.to_owned(),
                floor: None,
                lines: of(cell)
                    .into_iter()
                    .filter_map(|(way, all)| {
                        let points = all.first()?.curve.iter().enumerate();
                        let points = points.map(|(second, of_second)| (second as f64, value(of_second))).collect();
                        Some(Line { name: way.name.to_owned(), points })
                    })
                    .collect(),
            })
            .collect();
        figures.push((name.to_owned(), format!("{shows} by the seconds of the move"), figure::svg(&panels)?));
    }
    Ok(figures)
}

/// Whether the paper has values of its presets in this cell (section 6.2).
fn has_presets(cell: &Cell, settings: &Settings) -> bool {
    cell.writes_percent == PRESET_WRITES && settings.source_cpu.first() == Some(&cell.source_cpu)
}

/// Replaces a preset of the limit of the source's commands by its share of the source's capacity, in requests per
/// second. The router knows presets only with a configured capacity.
fn with_limit(flags: &[&str], capacity: f64) -> Vec<String> {
    let limit = |word: &&str| {
        let share = PRESETS.iter().find(|(name, _)| name == word).filter(|_| flags.contains(&SOURCE_OPS_MAX));
        share.map_or((*word).to_owned(), |(_, share)| format!("{:.0}", (share * capacity).max(1.0)))
    };
    flags.iter().map(limit).collect()
}

fn cells(settings: &Settings) -> Vec<Cell> {
    let mut cells = Vec::new();
    for target_cpu in &settings.target_cpu {
        for source_cpu in &settings.source_cpu {
            for writes in &settings.writes {
                cells.push(Cell { writes_percent: *writes, source_cpu: *source_cpu, target_cpu: *target_cpu });
            }
        }
    }
    cells
}

/// Returns a panel for each pair of servers, with the share of writes along it.
fn panels<'a>(
    cells: &[Cell],
    y: &str,
    floor: Option<f64>,
    values: impl Fn(&Cell) -> Vec<(&'a str, f64)>,
) -> Vec<Panel> {
    let mut panels: Vec<Panel> = Vec::new();
    for cell in cells {
        let title = cell.servers();
        if panels.last().is_none_or(|panel| panel.title != title) {
            panels.push(Panel { title, x: "writes, %".to_owned(), y: y.to_owned(), floor, lines: Vec::new() });
        }
        let Some(panel) = panels.last_mut() else { continue };
        for (name, value) in values(cell) {
            match panel.lines.iter_mut().find(|line| line.name == name) {
                Some(line) => line.points.push((cell.writes_percent, value)),
                None => panel.lines.push(Line { name: name.to_owned(), points: vec![(cell.writes_percent, value)] }),
            }
        }
    }
    panels
}

/// Does one run: everything that the first server has moves to the second, under load.
pub(super) fn one(bench: &Bench<'_>, load: &Load, cell: Cell, flags: &[&str]) -> Result<Measured> {
    let Conduct { timeout, stop, .. } = bench.conduct;
    let site = Routed::start(&bench.programs, &NO_COPIES.map(str::to_owned), &bench.name(), bench.folder)?;
    let layout = Arc::new(Layout::new(SLOTS));
    let numbers: Vec<u64> = (0..).filter(|number| layout.is_in_first_half(*number)).take(load.keys as usize).collect();
    let keys = Arc::new(Keys::new(numbers, VALUE, &layout));
    keys.fill(|_| site.entry, &|_| {})?;
    let ids = site.process_ids();
    let _source = cell.source_cpu.map(|cpu| bench.cap_all(&ids[..1], cpu)).transpose()?;
    let _target = cell.target_cpu.map(|cpu| bench.cap_all(&ids[1..2], cpu)).transpose()?;
    let run = Run::start(&generator::Settings {
        nodes: vec![site.entry],
        cluster: false,
        connections: load.connections,
        rate: None,
        pipeline: 1,
        in_flight_max: generator::IN_FLIGHT_MAX,
        keys: keys.clone(),
        popularity: Popularity::zipfian(keys.count() as u64, YCSB_THETA),
        writes: cell.writes_percent / 100.0,
        drops: 0.0,
        seed: 1,
    })?;
    for_a_while(&run, WARM_UP, stop)?;
    let served = Served::by(&site.addresses)?;
    let (before, control) = for_a_while(&run, load.control, stop)?;
    let bytes_per_request =
        Served::by(&site.addresses)?.since(served).bytes as f64 / before.tally.replies.max(1) as f64;
    // The source is the limit of the load.
    let more = with_limit(flags, before.tally.replies as f64 / control.as_secs_f64());
    let slots = format!("0-{}", layout.each() - 1);
    let order = Order { from: site.addresses[0], to: site.addresses[1], slots: Some(&slots), keys: None, more: &more };
    // Replies are counted before servers are queried, here as at the end: requests in between cancel out.
    let begun = Instant::now();
    run.take();
    let served = Served::by(&site.addresses)?;
    let id = admin::begin(&bench.programs.switchyard, site.admin, &order)?;
    let watched = until_done(&run, site.admin, &[id], begun, *timeout, stop)?;
    let served = Served::by(&site.addresses)?.since(served);
    run.finish()?;
    let left = keys_at(site.addresses[0])?;
    ensure!(left == 0, "{left} keys are left at the source");
    let tally = &watched.counts.tally;
    let (seconds, replies) = (watched.took.as_secs_f64(), tally.replies as f64);
    Ok(Measured {
        before: before.tally.replies as f64 / control.as_secs_f64(),
        during: replies / seconds,
        p50_ms: watched.latency_ms(0.5),
        p99_ms: watched.latency_ms(0.99),
        seconds,
        longest_gap_ms: watched.longest_gap_ms(),
        extra_percent: 100.0 * (served.commands as f64 - replies) / replies.max(1.0),
        bytes_per_key: (served.bytes as f64 - replies * bytes_per_request) / load.keys as f64,
        replies: tally.replies,
        lost: watched.counts.missing,
        stale: tally.wrong - watched.counts.missing,
        errors: tally.errors + tally.unanswered + tally.disconnects,
        wrong_after: keys.count_wrong(|_| site.entry)?,
        curve: [Second::of(&before, control)].into_iter().chain(watched.curve).collect(),
    })
}

/// Mean bytes of GET and of SET of a key at the source, with the reply.
static BYTES: LazyLock<[f64; 2]> = LazyLock::new(|| {
    let layout = Layout::new(SLOTS);
    let value = [b'x'; VALUE];
    let (mut gets, mut sets) = (Vec::new(), Vec::new());
    for number in 0..u64::from(SLOTS) {
        let name = layout.name(number);
        wire::encode(&mut gets, &[b"GET", name.as_bytes()]);
        gets.extend_from_slice(format!("${VALUE}\r\n").as_bytes());
        gets.extend_from_slice(&value);
        gets.extend_from_slice(b"\r\n");
        wire::encode(&mut sets, &[b"SET", name.as_bytes(), &value]);
        sets.extend_from_slice(b"+OK\r\n");
    }
    [gets, sets].map(|bytes| bytes.len() as f64 / f64::from(SLOTS))
});

/// Returns the mean bytes of a query and its reply, with this percent of writes.
pub(super) fn bytes_per_query(writes_percent: f64) -> f64 {
    let [get, set] = *BYTES;
    get + (set - get) * writes_percent / 100.0
}

pub(super) fn of_before(one: &Measured) -> f64 {
    100.0 * one.during / one.before
}

/// Returns the cells of a row that do not depend on the experiment.
pub(super) fn columns(all: &[Measured]) -> [String; 11] {
    let text = |value: fn(&Measured) -> f64, show: fn(f64) -> String| {
        Spread::of(all.iter().map(value)).map_or(String::new(), |spread| spread.text(show))
    };
    let sum = |value: fn(&Measured) -> u64| all.iter().map(value).sum::<u64>();
    [
        text(|m| m.during, |v| format!("{v:.0}")),
        text(of_before, |v| format!("{v:.0} %")),
        text(|m| m.p50_ms, |v| format!("{v:.2}")),
        text(|m| m.p99_ms, |v| format!("{v:.2}")),
        text(|m| m.seconds, |v| format!("{v:.2}")),
        text(|m| m.longest_gap_ms, |v| format!("{v:.0}")),
        text(|m| m.extra_percent, |v| format!("{:.2} %", if v.abs() < 0.005 { 0.0 } else { v })),
        text(|m| m.bytes_per_key, |v| format!("{v:.0}")),
        format!("{} + {} of {}", sum(|m| m.lost), sum(|m| m.stale), sum(|m| m.replies)),
        sum(|m| m.errors).to_string(),
        sum(|m| m.wrong_after).to_string(),
    ]
}

/// Heads of [`columns`].
pub(super) const COLUMNS: [&str; 11] = [
    "requests/s",
    "of before",
    "p50 ms",
    "p99 ms",
    "seconds",
    "downtime ms",
    "extra commands",
    "bytes/key",
    "lost + stale",
    "errors",
    "keys wrong after",
];

fn table(cell: &Cell, ways: &[(&Way, &[Measured])]) -> Table {
    let published = |row: Row| published::numbers(row, cell.writes_percent, cell.source_cpu);
    let is_published = published(Row::Source).is_some();
    let mut head = vec!["way"];
    head.extend(COLUMNS);
    head.extend(["x source", "p99 x source"]);
    if is_published {
        head.extend(["published x source", "published p99 x source", "published extra"]);
    }
    let mut table = Table::new(head);
    let median =
        |all: &[Measured], value: fn(&Measured) -> f64| Spread::of(all.iter().map(value)).map(|spread| spread.median);
    let source =
        ways.iter().find(|(way, _)| way.published == Some(Row::Source)).map(|(_, all)| *all).unwrap_or_default();
    let ratio = |all: &[Measured], value: fn(&Measured) -> f64| {
        median(all, value).zip(median(source, value)).map_or(String::new(), |(this, of)| format!("{:.2}", this / of))
    };
    for (way, all) in ways {
        let mut row = vec![way.name.to_owned()];
        row.extend(columns(all));
        row.extend([ratio(all, |m| m.during), ratio(all, |m| m.p99_ms)]);
        if let Some((here, source)) = way.published.and_then(published).zip(published(Row::Source)) {
            row.push(format!("{:.2}", here.throughput / source.throughput));
            row.push(format!("{:.2}", here.p99_ms / source.p99_ms));
            row.push(format!("{} % + {} %", here.extra_clients, plain_small(here.extra_servers)));
        }
        table.row(row);
    }
    table
}

fn plain_small(value: f64) -> String {
    if value != 0.0 && value < 1e-3 { format!("{value:e}") } else { plain(value) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured() -> Measured {
        Measured {
            before: 200.0,
            during: 100.0,
            p50_ms: 0.5,
            p99_ms: 7.0,
            seconds: 3.0,
            longest_gap_ms: 12.0,
            extra_percent: -0.001,
            bytes_per_key: 200.0,
            replies: 7,
            lost: 1,
            stale: 2,
            errors: 0,
            wrong_after: 2,
            curve: vec![Second { rate: 200.0, lost_percent: 0.0, p50_ms: 0.4, p99_ms: 2.0 }],
        }
    }

    fn cell(writes_percent: f64) -> Cell {
        Cell { writes_percent, source_cpu: Some(published::SHARES[0]), target_cpu: None }
    }

    #[test]
    fn results_survive_serialization() {
        let text = serde_json::to_string(&measured()).expect("JSON");
        assert_eq!(serde_json::from_str::<Measured>(&text).expect("JSON"), measured());
    }

    #[test]
    fn cell_names_are_unique() {
        assert_ne!(cell(0.0).title(), cell(0.5).title());
        assert_ne!(json!(cell(0.0)), json!(cell(0.5)));
        assert_ne!(json!(cell(0.0)), json!(Cell { target_cpu: Some(0.5), ..cell(0.0) }));
    }

    #[test]
    fn presets_are_shares_of_the_capacity() {
        let of = |name: &str| {
            let way = WAYS.iter().find(|way| way.name == name).expect("a way");
            with_limit(way.flags, 10_000.0).last().cloned()
        };
        assert_eq!(of("netmigrate-short (paper)"), Some("2300".to_owned()));
        assert_eq!(of("netmigrate-medium (paper)"), Some("5400".to_owned()));
        assert_eq!(of("netmigrate (paper)"), Some("--allow-key-loss".to_owned()));
    }

    #[test]
    fn published_columns_appear_only_if_numbers_exist() {
        let all = [measured()];
        let ways: Vec<(&Way, &[Measured])> = WAYS.iter().map(|way| (way, all.as_slice())).collect();
        let with = table(&cell(10.0), &ways).to_text();
        assert!(
            with.contains("published x source")
                && with.contains("10.9 % + 0 %")
                && with.contains("0.005 % + 3.27e-5 %"),
            "{with}"
        );
        assert!(with.contains("0.00 %") && !with.contains("-0.00"), "{with}");
        assert!(!table(&cell(5.0), &ways).to_text().contains("published"));
    }

    #[test]
    fn each_pair_of_servers_has_a_panel() {
        let other = Cell { source_cpu: Some(published::SHARES[2]), ..cell(0.0) };
        let panels = panels(&[cell(0.0), cell(5.0), other], "y", None, |_| vec![("a", 1.0)]);
        let points: Vec<usize> = panels.iter().map(|panel| panel.lines[0].points.len()).collect();
        assert_eq!(points, [2, 1]);
    }
}
