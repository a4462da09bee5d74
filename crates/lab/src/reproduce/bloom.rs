//! Queries lost with and without a filter, as counted in the Bloom telemetry paper (section 3, figures 1 and 2): keys
//! of 2 KB move from one server to five, and each query goes to the target of its key. Without a filter it finds
//! nothing if the key has not moved. With the filter, keys that it lacks are read from the source.
//!
//! Mapping of the paper's experiment: it has 50 million keys and 750,000 queries in a quarter of an hour; here are 0.5
//! million keys, and the same number of queries during the whole move. Its ten threads on each side are five concurrent
//! moves, one for each target, with the batch size of the goal `fast`. The rate of the moves is bounded so that they
//! take as long as the queries. Its destination server decides; here the router does, by one filter for all five moves.
//!
//! A query is *lost* if it is a read that found nothing, because all keys exist. The paper does not define lost writes,
//! so no write counts as lost. The effect of writes shows in the values read: *stale* values are older than
//! acknowledged ones.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::json;
use switchyard_bench::random::Popularity;
use switchyard_bench::table::Table;

use super::published::{BLOOM_BY_WRITES, BLOOM_BY_ZIPF, BLOOM_NIL_PERCENT, Improvement};
use super::spread::Spread;
use super::watch::{Second, for_a_while, until_done};
use super::{Bench, Conduct, NO_COPIES, Section, measure, plain, publish};
use crate::figure::{self, Line, Panel};
use crate::moves::admin::{self, Order};
use crate::moves::generator;
use crate::moves::site::{Routed, keys_at};
use crate::moves::{Keys, Layout, Run};

const MARK: &str = "reproduce-bloom";
/// Number of slots with keys, divided equally among the targets.
const SLOTS: u16 = 1000;
/// Duration of the load before the moves begin.
const CONTROL: Duration = Duration::from_secs(2);
/// Position of zero in the figure, in percent.
const FLOOR: f64 = 1e-4;

/// Settings of the experiment.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Common settings.
    pub conduct: Conduct,
    /// Keys, load and moves.
    pub scale: Scale,
}

/// Keys, load and moves of a run.
#[derive(Debug, Clone, Serialize)]
pub struct Scale {
    /// Keys, all of which move.
    pub keys: u64,
    /// Bytes of a value.
    pub value: usize,
    /// Approximate number of queries during the moves.
    pub queries: u64,
    /// Queries per second.
    pub rate: f64,
    /// Connections of the load.
    pub connections: usize,
    /// Number of servers that the keys move to.
    pub targets: u16,
}

/// Share of queries that the load drops before it sends them, in percent. The text does not explain most losses of the
/// paper's arm with a filter; dropped packets would be one explanation. The second share is the middle of the shares that
/// would lead to its ratios; the book shows the whole curve.
pub(super) const DROPS_PERCENT: [f64; 2] = [0.0, 14.0];

impl Scale {
    /// Returns the bytes per second of each move that let the moves end with the queries.
    fn bytes_per_second(&self) -> u64 {
        let seconds = self.queries as f64 / self.rate;
        (self.keys as f64 * self.value as f64 / f64::from(self.targets) / seconds).ceil() as u64
    }
}

/// A point of the figures.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Cell {
    pub(super) zipf: f64,
    pub(super) writes_percent: f64,
    pub(super) drops_percent: f64,
}

/// Figure 1 by writes, and figure 2 by Zipf, without dropped queries. They share a cell.
fn cells() -> Vec<Cell> {
    let drops_percent = DROPS_PERCENT[0];
    let by_writes = [1.0, 2.0, 3.0, 4.0, 5.0].map(|writes_percent| Cell { zipf: 0.9, writes_percent, drops_percent });
    let by_zipf = [0.95, 0.99].map(|zipf| Cell { zipf, writes_percent: 5.0, drops_percent });
    by_writes.into_iter().chain(by_zipf).collect()
}

/// The ends of both figures, with dropped queries. Other shares of drops are computed, because a dropped query is lost
/// in both variants.
fn cells_with_drops() -> Vec<Cell> {
    let ends = [(0.9, 1.0), (0.9, 5.0), (0.99, 5.0)];
    ends.map(|(zipf, writes_percent)| Cell { zipf, writes_percent, drops_percent: DROPS_PERCENT[1] }).into()
}

pub(super) fn is_in_figure_1(cell: &Cell) -> bool {
    cell.zipf == 0.9
}

pub(super) fn is_in_figure_2(cell: &Cell) -> bool {
    cell.writes_percent == 5.0
}

/// A compared variant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Variant {
    name: &'static str,
    pub(super) flags: &'static [&'static str],
}

pub(super) const WITHOUT: Variant = Variant {
    name: "no filter",
    flags: &["--protocol", "bloom", "--mode", "paper", "--no-forwarding", "--allow-key-loss"],
};
pub(super) const WITH: Variant =
    Variant { name: "filter and forwarding", flags: &["--protocol", "bloom", "--mode", "paper", "--allow-key-loss"] };
pub(super) const SAFE: Variant = Variant { name: "switchyard", flags: &["--protocol", "switchyard"] };
const ARMS: [Variant; 3] = [WITHOUT, WITH, SAFE];

/// Results of one run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Measured {
    /// Replies and dropped queries.
    pub(super) queries: u64,
    /// Reads that found nothing, and dropped queries.
    lost: u64,
    stale: u64,
    errors: u64,
    wrong_after: u64,
    seconds: f64,
    before: f64,
    during: f64,
    p50_ms: f64,
    p99_ms: f64,
    longest_gap_ms: f64,
    curve: Vec<Second>,
}

pub(super) fn lost_percent(one: &Measured) -> f64 {
    100.0 * one.lost as f64 / one.queries.max(1) as f64
}

/// Returns the percent of queries lost between the first second with a loss and the last one. Before, the source serves
/// all queries; afterwards, the targets have all keys.
fn lost_while_moving_percent(one: &Measured) -> f64 {
    let is_lossy = |second: &Second| second.lost_percent > 0.0;
    let bounds = one.curve.iter().position(is_lossy).zip(one.curve.iter().rposition(is_lossy));
    let seconds = bounds.map_or(&[][..], |(first, last)| &one.curve[first..=last]);
    let replies: f64 = seconds.iter().map(|second| second.rate).sum();
    seconds.iter().map(|second| second.rate * second.lost_percent).sum::<f64>() / replies.max(1.0)
}

/// Returns the expected percent of queries that find nothing without a filter, if keys move at a constant rate and in an
/// order that does not depend on their popularity.
pub(super) fn lost_without_filter(keys: u64, queries: u64, cell: &Cell) -> f64 {
    let (keys, queries, writes) = (keys as f64, queries as f64, cell.writes_percent / 100.0);
    let (mut popularity, mut lost) = (0.0, Vec::new());
    let mut rank = 1.0;
    while rank <= keys {
        // Ranks above 1000 in groups of a thousandth of the rank.
        let count = (rank / 1000.0).floor().max(1.0).min(keys - rank + 1.0);
        let share = (rank + (count - 1.0) / 2.0).powf(-cell.zipf);
        popularity += count * share;
        lost.push((count, share));
        rank += count;
    }
    let lost = lost.iter().map(|(count, share)| {
        // The mean over the move of (share of keys not moved) * (probability of no write before).
        let written = writes * queries * share / popularity;
        let absent = if written < 1e-3 {
            0.5 - written / 6.0
        } else {
            1.0 / written + (-written).exp_m1() / (written * written)
        };
        count * share / popularity * absent
    });
    100.0 * (1.0 - writes) * lost.sum::<f64>()
}

fn median(all: &[Measured], value: fn(&Measured) -> f64) -> Option<f64> {
    Spread::of(all.iter().map(value)).map(|spread| spread.median)
}

/// Does the missing measurements, prints all, and rewrites the section of the document.
///
/// # Errors
/// If a server cannot be started, a move ends early, or the user interrupts.
pub fn run(settings: &Settings) -> Result<()> {
    let Settings { conduct, scale } = settings;
    let cells = cells();
    let mut runs: Vec<(Cell, Variant)> = cells.iter().flat_map(|cell| ARMS.map(|arm| (*cell, arm))).collect();
    let with_drops = cells_with_drops();
    runs.extend(with_drops.iter().flat_map(|cell| [WITHOUT, WITH].map(|arm| (*cell, arm))));
    let outcome = measure(
        conduct,
        &runs,
        |(cell, arm)| json!({"experiment": "bloom", "scale": scale, "cell": cell, "flags": arm.flags}),
        |(Cell { zipf, writes_percent, drops_percent }, arm)| {
            format!("{}, Zipf {zipf}, writes {writes_percent} %, {drops_percent} % dropped", arm.name)
        },
        |bench, (cell, arm)| one(bench, scale, *cell, *arm),
    )?;
    let of = |cell: &Cell, arm: Variant| -> &[Measured] {
        let at = runs.iter().position(|run| *run == (*cell, arm));
        at.and_then(|at| outcome.results.get(at)).map(Vec::as_slice).unwrap_or_default()
    };
    let mut section = Section { notes: vec![describe(scale)], ..Section::default() };
    section.tables.push(("Queries lost".to_owned(), losses(scale, &cells, of)));
    section.tables.push(("Dropped queries".to_owned(), drops(&with_drops, of)));
    let all: Vec<Cell> = cells.iter().chain(&with_drops).copied().collect();
    section.tables.push(("Cost of each run".to_owned(), costs(&all, of)));
    let mut panels = vec![
        panel("Figure 1: Zipf 0.9", "writes, % of queries", &cells, is_in_figure_1, |cell| cell.writes_percent, of),
        panel("Figure 2: writes 5 %", "Zipf", &cells, is_in_figure_2, |cell| cell.zipf, of),
    ];
    panels.push(by_drops(&with_drops, of));
    panels.push(over_time(&cells[0], of));
    let shows =
        "Share of queries lost by writes and by Zipf, ratio of the losses by dropped queries, and losses over time"
            .to_owned();
    section.figures.push(("bloom".to_owned(), shows, figure::svg(&panels)?));
    publish(conduct, MARK, &outcome, &section)
}

fn describe(scale: &Scale) -> String {
    format!(
        "{} keys with values of {} B move to {} servers by as many moves at once, each at {} bytes per second at most. {} connections send {} queries per second.",
        scale.keys,
        scale.value,
        scale.targets,
        scale.bytes_per_second(),
        scale.connections,
        plain(scale.rate)
    )
}

/// Returns the ratio of the median losses without and with the filter.
fn improvement(without: &[Measured], with: &[Measured]) -> String {
    match (median(without, lost_percent), median(with, lost_percent)) {
        (Some(without), Some(with)) if with > 0.0 => two_digits(without / with),
        (Some(without), Some(_)) if without > 0.0 => "none lost with it".to_owned(),
        _ => String::new(),
    }
}

/// Percent of queries lost if this percent is dropped in addition to `lost` percent of the others.
fn with_drop(lost: f64, dropped: f64) -> f64 {
    dropped + (100.0 - dropped) * lost / 100.0
}

/// Returns the table of measured and computed ratios with dropped queries.
fn drops<'a>(cells: &[Cell], of: impl Fn(&Cell, Variant) -> &'a [Measured]) -> Table {
    let mut table = Table::new([
        "Zipf",
        "writes",
        "dropped",
        WITHOUT.name,
        WITH.name,
        "no filter : filter",
        "computed from no drops",
    ]);
    let percent = |all: &[Measured]| {
        let spread = Spread::of(all.iter().map(lost_percent));
        spread.map_or(String::new(), |spread| spread.text(|value| format!("{value:.2} %")))
    };
    for cell in cells {
        let undropped = Cell { drops_percent: DROPS_PERCENT[0], ..*cell };
        let lost = |arm: Variant| median(of(&undropped, arm), lost_percent);
        let computed = lost(WITHOUT).zip(lost(WITH)).map_or(String::new(), |(without, with)| {
            two_digits(with_drop(without, cell.drops_percent) / with_drop(with, cell.drops_percent))
        });
        table.row([
            plain(cell.zipf),
            format!("{} %", plain(cell.writes_percent)),
            format!("{} %", plain(cell.drops_percent)),
            percent(of(cell, WITHOUT)),
            percent(of(cell, WITH)),
            improvement(of(cell, WITHOUT), of(cell, WITH)),
            computed,
        ]);
    }
    table
}

/// Returns the ratio of the losses by the share of dropped queries: computed from runs without drops, and measured.
fn by_drops<'a>(cells: &[Cell], of: impl Fn(&Cell, Variant) -> &'a [Measured]) -> Panel {
    let mut lines = Vec::new();
    for cell in cells {
        let name = format!("Zipf {}, writes {} %", plain(cell.zipf), plain(cell.writes_percent));
        let undropped = Cell { drops_percent: DROPS_PERCENT[0], ..*cell };
        let lost = |cell: &Cell, arm: Variant| median(of(cell, arm), lost_percent);
        if let Some((without, with)) = lost(&undropped, WITHOUT).zip(lost(&undropped, WITH)) {
            let ratio = |dropped: f64| with_drop(without, dropped) / with_drop(with, dropped);
            let points = (1..=20).map(|dropped| (f64::from(dropped), ratio(f64::from(dropped)))).collect();
            lines.push(Line { name: format!("{name}, computed"), points });
        }
        if let Some((without, with)) = lost(cell, WITHOUT).zip(lost(cell, WITH)) {
            lines.push(Line { name: format!("{name}, measured"), points: vec![(cell.drops_percent, without / with)] });
        }
    }
    Panel {
        title: "Dropped queries".to_owned(),
        x: "queries dropped, %".to_owned(),
        y: "queries lost, no filter : filter".to_owned(),
        floor: Some(1.0),
        lines,
    }
}

/// Returns the losses of the first repetition by the seconds of the move.
fn over_time<'a>(cell: &Cell, of: impl Fn(&Cell, Variant) -> &'a [Measured]) -> Panel {
    let line = |arm: Variant| {
        let curve = of(cell, arm).first().map(|run| run.curve.as_slice()).unwrap_or_default();
        let points = curve.iter().enumerate().map(|(second, point)| (second as f64, point.lost_percent));
        Line { name: arm.name.to_owned(), points: points.collect() }
    };
    Panel {
        title: format!("Zipf {}, writes {} %", plain(cell.zipf), plain(cell.writes_percent)),
        x: "seconds of the move".to_owned(),
        y: "queries lost, %".to_owned(),
        floor: None,
        lines: ARMS.map(line).into(),
    }
}

/// Rounds to two digits, because few queries are lost with the filter.
fn two_digits(value: f64) -> String {
    let unit = 10_f64.powf(value.log10().floor() - 1.0);
    plain((value / unit).round() * unit)
}

fn losses<'a>(scale: &Scale, cells: &[Cell], of: impl Fn(&Cell, Variant) -> &'a [Measured]) -> Table {
    let percent = |all: &[Measured]| {
        let spread = Spread::of(all.iter().map(lost_percent));
        spread.map_or(String::new(), |spread| spread.text(|value| format!("{value:.4} %")))
    };
    let while_moving = |all: &[Measured]| {
        let spread = Spread::of(all.iter().map(lost_while_moving_percent));
        spread.map_or(String::new(), |spread| spread.text(|value| format!("{value:.1} %")))
    };
    let in_vain = format!("published nil (< {BLOOM_NIL_PERCENT} %)");
    let mut table = Table::new([
        "figure",
        "Zipf",
        "writes",
        WITHOUT.name,
        "while keys move",
        "computed",
        WITH.name,
        SAFE.name,
        "no filter : filter",
        "published",
        &in_vain,
    ]);
    for cell in cells {
        let with = of(cell, WITH);
        let figures: [(&str, bool, Improvement); 2] =
            [("1", is_in_figure_1(cell), BLOOM_BY_WRITES), ("2", is_in_figure_2(cell), BLOOM_BY_ZIPF)];
        for (figure, _, published) in figures.into_iter().filter(|(_, is_in, _)| *is_in) {
            table.row([
                figure.to_owned(),
                plain(cell.zipf),
                format!("{} %", plain(cell.writes_percent)),
                percent(of(cell, WITHOUT)),
                while_moving(of(cell, WITHOUT)),
                format!("{:.1} %", lost_without_filter(scale.keys, scale.queries, cell)),
                percent(with),
                percent(of(cell, SAFE)),
                improvement(of(cell, WITHOUT), with),
                format!("{} ({} to {})", published.mean, published.least, published.most),
                match Spread::of(with.iter().map(lost_percent)) {
                    Some(spread) if spread.most < BLOOM_NIL_PERCENT => "less".to_owned(),
                    Some(_) => "more".to_owned(),
                    None => String::new(),
                },
            ]);
        }
    }
    table
}

fn costs<'a>(cells: &[Cell], of: impl Fn(&Cell, Variant) -> &'a [Measured]) -> Table {
    let head = [
        "arm",
        "Zipf",
        "writes",
        "dropped",
        "queries",
        "lost",
        "stale",
        "errors",
        "keys wrong after",
        "seconds",
        "queries/s",
        "before",
        "p50 ms",
        "p99 ms",
        "downtime ms",
    ];
    let mut table = Table::new(head);
    for arm in ARMS {
        for cell in cells.iter().filter(|cell| !of(cell, arm).is_empty()) {
            let all = of(cell, arm);
            let text = |value: fn(&Measured) -> f64, digits: usize| {
                Spread::of(all.iter().map(value))
                    .map_or(String::new(), |spread| spread.text(|value| format!("{value:.digits$}")))
            };
            table.row([
                arm.name.to_owned(),
                plain(cell.zipf),
                format!("{} %", plain(cell.writes_percent)),
                format!("{} %", plain(cell.drops_percent)),
                text(|m| m.queries as f64, 0),
                text(|m| m.lost as f64, 0),
                text(|m| m.stale as f64, 0),
                text(|m| m.errors as f64, 0),
                text(|m| m.wrong_after as f64, 0),
                text(|m| m.seconds, 1),
                text(|m| m.during, 0),
                text(|m| m.before, 0),
                text(|m| m.p50_ms, 2),
                text(|m| m.p99_ms, 2),
                text(|m| m.longest_gap_ms, 0),
            ]);
        }
    }
    table
}

fn panel<'a>(
    title: &str,
    x: &str,
    cells: &[Cell],
    is_in: fn(&Cell) -> bool,
    at: fn(&Cell) -> f64,
    of: impl Fn(&Cell, Variant) -> &'a [Measured],
) -> Panel {
    let line = |arm: Variant| {
        let points = cells
            .iter()
            .filter(|cell| is_in(cell))
            .filter_map(|cell| Some((at(cell), median(of(cell, arm), lost_percent)?)));
        Line { name: arm.name.to_owned(), points: points.collect() }
    };
    Panel {
        title: title.to_owned(),
        x: x.to_owned(),
        y: format!("queries lost, % (0 is drawn at {FLOOR})"),
        floor: Some(FLOOR),
        lines: ARMS.map(line).into(),
    }
}

fn one(bench: &Bench<'_>, scale: &Scale, cell: Cell, arm: Variant) -> Result<Measured> {
    let Conduct { timeout, stop, .. } = bench.conduct;
    let together = format!("moves.per-node-max={}", scale.targets);
    let args = ["--set", &together].into_iter().chain(NO_COPIES).map(str::to_owned).collect::<Vec<_>>();
    let count = 1 + usize::from(scale.targets);
    let site = Routed::start_many(&bench.programs, &args, count, &bench.name(), bench.folder)?;
    let layout = Arc::new(Layout::new(SLOTS));
    let numbers: Vec<u64> = (0..).filter(|number| layout.is_in_first_half(*number)).take(scale.keys as usize).collect();
    let keys = Arc::new(Keys::new(numbers, scale.value, &layout));
    keys.fill(|_| site.entry, &|_| {})?;
    let source = site.addresses[0];
    let at_source = keys_at(source)?;
    ensure!(at_source == scale.keys as i64, "the source has {at_source} of {} keys before anything moves", scale.keys);
    let run = Run::start(&generator::Settings {
        nodes: vec![site.entry],
        cluster: false,
        connections: scale.connections,
        rate: Some(scale.rate),
        pipeline: 1,
        in_flight_max: generator::IN_FLIGHT_MAX,
        keys: keys.clone(),
        popularity: Popularity::zipfian(keys.count() as u64, cell.zipf),
        writes: cell.writes_percent / 100.0,
        drops: cell.drops_percent / 100.0,
        seed: 1,
    })?;
    let (before, control) = for_a_while(&run, CONTROL, stop)?;
    let mut more: Vec<String> = arm.flags.iter().map(|word| (*word).to_owned()).collect();
    more.extend(["--goal", "fast", "--max-rate"].map(str::to_owned));
    more.push(format!("{}b", scale.bytes_per_second()));
    if arm != SAFE {
        // The paper's filter: 125 MB for 50 million keys.
        more.extend(["--groups".to_owned(), scale.keys.to_string(), "--bits".to_owned(), "20".to_owned()]);
    }
    let each = layout.each() / scale.targets;
    run.take();
    let begun = Instant::now();
    let mut moves = Vec::new();
    for (at, target) in (0..scale.targets).zip(&site.addresses[1..]) {
        let last = if at + 1 == scale.targets { layout.each() - 1 } else { (at + 1) * each - 1 };
        let slots = format!("{}-{last}", at * each);
        let order = Order { from: source, to: *target, slots: Some(&slots), keys: None, more: &more };
        moves.push(admin::begin(&bench.programs.switchyard, site.admin, &order)?);
    }
    let watched = until_done(&run, site.admin, &moves, begun, *timeout, stop)?;
    run.finish()?;
    let left = keys_at(source)?;
    ensure!(left == 0, "{left} keys are left at the source");
    let tally = &watched.counts.tally;
    Ok(Measured {
        queries: tally.replies + watched.counts.dropped,
        lost: watched.counts.missing + watched.counts.dropped,
        stale: tally.wrong - watched.counts.missing,
        errors: tally.errors + tally.unanswered + tally.disconnects,
        wrong_after: keys.count_wrong(|_| site.entry)?,
        seconds: watched.took.as_secs_f64(),
        before: before.tally.replies as f64 / control.as_secs_f64(),
        during: tally.replies as f64 / watched.took.as_secs_f64(),
        p50_ms: watched.latency_ms(0.5),
        p99_ms: watched.latency_ms(0.99),
        longest_gap_ms: watched.longest_gap_ms(),
        curve: watched.curve,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(lost: u64) -> Measured {
        Measured {
            queries: 1000,
            lost,
            stale: 0,
            errors: 0,
            wrong_after: 0,
            seconds: 1.0,
            before: 1.0,
            during: 1.0,
            p50_ms: 1.0,
            p99_ms: 1.0,
            longest_gap_ms: 1.0,
            curve: Vec::new(),
        }
    }

    fn scale() -> Scale {
        Scale { keys: 500_000, value: 2000, queries: 750_000, rate: 10_000.0, connections: 32, targets: 5 }
    }

    #[test]
    fn results_survive_serialization() {
        let text = serde_json::to_string(&measured(3)).expect("JSON");
        assert_eq!(serde_json::from_str::<Measured>(&text).expect("JSON"), measured(3));
    }

    #[test]
    fn losses_while_keys_move_exclude_both_ends_of_a_run() {
        let second = |lost_percent: f64| Second { rate: 10.0, lost_percent, p50_ms: 1.0, p99_ms: 1.0 };
        let run = Measured { curve: [0.0, 60.0, 0.0, 30.0, 0.0].map(second).into(), ..measured(180) };
        assert!((lost_while_moving_percent(&run) - 30.0).abs() < 1e-9);
    }

    #[test]
    fn the_figures_have_the_papers_points() {
        let cells = cells();
        let of = |_: &Cell, _: Variant| -> &[Measured] { &[] };
        assert_eq!(cells.iter().filter(|cell| is_in_figure_1(cell)).count(), 5);
        assert_eq!(cells.iter().filter(|cell| is_in_figure_2(cell)).count(), 3);
        assert!(
            panel("t", "x", &cells, is_in_figure_2, |cell| cell.zipf, of)
                .lines
                .iter()
                .all(|line| line.points.is_empty())
        );
        let [without, with] = [[measured(300)], [measured(0)]];
        let of = |_: &Cell, arm: Variant| -> &[Measured] { if arm == WITHOUT { &without } else { &with } };
        let panel = panel("t", "x", &cells, is_in_figure_2, |cell| cell.zipf, of);
        assert_eq!(panel.lines[0].points, [(0.9, 30.0), (0.95, 30.0), (0.99, 30.0)]);
        assert_eq!(panel.lines[2].points[0], (0.9, 0.0));
        // A row for each point of either figure.
        let text = losses(&scale(), &cells, of).to_text();
        assert_eq!(text.matches("none lost with it").count(), 8, "{text}");
        assert_eq!(text.matches("3.837 (3.367 to 4.367)").count(), 3, "{text}");
    }

    #[test]
    fn improvements_are_ratios_of_medians() {
        assert_eq!(improvement(&[measured(300), measured(100), measured(200)], &[measured(2)]), "100");
        assert_eq!([46_551.7, 3.84, 0.5].map(two_digits), ["47000", "3.8", "0.5"]);
        assert_eq!(improvement(&[measured(300)], &[]), "");
        assert_eq!(improvement(&[measured(0)], &[measured(0)]), "");
    }

    #[test]
    fn dropped_queries_are_lost_in_addition() {
        assert_eq!(with_drop(30.0, 0.0), 30.0);
        assert_eq!(with_drop(0.0, 14.0), 14.0);
        assert!((with_drop(30.0, 14.0) - 39.8).abs() < 1e-9);
        let cells = cells_with_drops();
        let [without, with] = [[measured(300)], [measured(0)]];
        let of = |_: &Cell, arm: Variant| -> &[Measured] { if arm == WITHOUT { &without } else { &with } };
        let text = drops(&cells, of).to_text();
        assert_eq!(text.matches("none lost with it").count(), cells.len(), "{text}");
        assert_eq!(text.matches("2.8").count(), cells.len(), "{text}");
        assert_eq!(by_drops(&cells, of).lines[0].points[13], (14.0, with_drop(30.0, 14.0) / 14.0));
    }

    #[test]
    fn moves_take_as_long_as_the_queries() {
        assert_eq!(scale().bytes_per_second(), 2_666_667);
    }
}
