//! All protocols of migration side by side, as NetMigrate (FAST 2024, section 6) compares them: the same keys, load and servers, and for each protocol a move of
//! everything that the first server has. Beside what the paper measures stands how many replies were wrong.
//!
//! A cell is a share of writes and what the source may use of a processor. What was measured is kept in a file, a line for each protocol in each cell: an
//! interrupted run goes on there.

mod capped;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use switchyard_bench::load::Tally;
use switchyard_bench::random::{Popularity, YCSB_THETA};
use switchyard_bench::table::Table;

use self::capped::Capped;
use crate::document::{replace_between_marks, today};
use crate::moves::admin::{self, Order, Standing};
use crate::moves::generator;
use crate::moves::site::{Programs, Routed, keys_at, version_of};
use crate::moves::{Keys, Layout, Run};
use crate::procfs::describe_machine;

const MARK: &str = "reproduce-netmigrate";
/// How often replies are counted: the longest time without any is as exact as this.
const LOOK: Duration = Duration::from_millis(5);
/// How often a move is asked about.
const ASK: Duration = Duration::from_millis(50);

/// Protocols, with the arguments of `switchyard move` that choose them.
pub const PROTOCOLS: [(&str, &[&str]); 11] = [
    ("switchyard", &["--goal", "fast"]),
    ("source", &["--protocol", "source", "--goal", "fast"]),
    ("freeze-and-copy", &["--protocol", "freeze-and-copy", "--goal", "fast"]),
    ("stop-and-copy", &["--protocol", "stop-and-copy", "--goal", "fast", "--allow-key-loss"]),
    ("rocksteady", &["--protocol", "rocksteady", "--goal", "fast"]),
    ("netmigrate", &["--protocol", "netmigrate", "--goal", "fast"]),
    ("fulva", &["--protocol", "fulva", "--goal", "fast"]),
    ("rocksteady (paper)", &["--protocol", "rocksteady", "--goal", "fast", "--mode", "paper", "--allow-key-loss"]),
    ("netmigrate (paper)", &["--protocol", "netmigrate", "--goal", "fast", "--mode", "paper", "--allow-key-loss"]),
    ("fulva (paper)", &["--protocol", "fulva", "--goal", "fast", "--mode", "paper", "--allow-key-loss"]),
    ("bloom (paper)", &["--protocol", "bloom", "--goal", "fast", "--mode", "paper", "--allow-key-loss"]),
];

/// What to measure.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The product's binary.
    pub switchyard: PathBuf,
    /// Keys of 64 bytes, all of which move.
    pub keys: u64,
    /// Shares of writes.
    pub writes: Vec<f64>,
    /// What the source may use of a processor, in each cell; empty: all that there is.
    pub source_cpu: Vec<f64>,
    /// What the target may use of a processor.
    pub target_cpu: Option<f64>,
    /// Connections of the load, with one request under way each.
    pub connections: usize,
    /// How long the load runs before a move begins.
    pub control: Duration,
    /// A move may take so long at most.
    pub patience: Duration,
    /// Only these protocols; empty: all.
    pub only: Vec<String>,
    /// Where results are kept.
    pub keep: PathBuf,
    /// The document whose section is rewritten.
    pub out: Option<PathBuf>,
    /// What the user typed, for the document.
    pub command_line: String,
    /// Set when the run shall end early.
    pub stop: Arc<AtomicBool>,
}

/// A share of writes, and what the source may use of a processor.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Cell {
    writes: f64,
    source_cpu: Option<f64>,
}

impl Cell {
    fn name(&self) -> String {
        let cpu = self.source_cpu.map_or("not limited".to_owned(), |cpu| format!("{cpu:.2} processors"));
        format!("writes {:.0} %, source {cpu}", self.writes * 100.0)
    }
}

/// One protocol in one cell: requests per second, milliseconds, seconds and replies.
#[derive(Debug, Clone, PartialEq)]
struct Measured {
    before: f64,
    during: f64,
    p50_ms: f64,
    p99_ms: f64,
    seconds: f64,
    longest_gap_ms: f64,
    replies: u64,
    wrong: u64,
    errors: u64,
    wrong_after: u64,
}

impl Measured {
    fn to_json(&self, key: &str) -> Value {
        let Self { before, during, p50_ms, p99_ms, seconds, longest_gap_ms, replies, wrong, errors, wrong_after } = self;
        json!({
            "what": key, "before": before, "during": during, "p50_ms": p50_ms, "p99_ms": p99_ms, "seconds": seconds,
            "longest_gap_ms": longest_gap_ms, "replies": replies, "wrong": wrong, "errors": errors, "wrong_after": wrong_after,
        })
    }

    fn of_json(line: &Value) -> Option<(String, Self)> {
        let number = |name: &str| line[name].as_f64();
        let count = |name: &str| line[name].as_u64();
        let measured = Self {
            before: number("before")?,
            during: number("during")?,
            p50_ms: number("p50_ms")?,
            p99_ms: number("p99_ms")?,
            seconds: number("seconds")?,
            longest_gap_ms: number("longest_gap_ms")?,
            replies: count("replies")?,
            wrong: count("wrong")?,
            errors: count("errors")?,
            wrong_after: count("wrong_after")?,
        };
        Some((line["what"].as_str()?.to_owned(), measured))
    }
}

/// Measures what is not in the file of results yet, prints all, and rewrites the section of the document.
///
/// # Errors
/// If a server cannot be started, a move ends early, or the user interrupts.
pub fn netmigrate(settings: &Settings) -> Result<()> {
    let programs = Programs::find(&settings.switchyard)?;
    switchyard_bench::process::raise_file_limit();
    let folder = tempfile::Builder::new().prefix("switchyard-reproduce-").tempdir().context("cannot create a temporary folder")?;
    let known = std::fs::read_to_string(&settings.keep).unwrap_or_default();
    let lines = known.lines().filter_map(|line| serde_json::from_str(line).ok());
    let mut results: BTreeMap<String, Measured> = lines.filter_map(|line: Value| Measured::of_json(&line)).collect();
    let cpus: Vec<Option<f64>> =
        if settings.source_cpu.is_empty() { vec![None] } else { settings.source_cpu.iter().copied().map(Some).collect() };
    let cells: Vec<Cell> =
        cpus.into_iter().flat_map(|source_cpu| settings.writes.iter().map(move |writes| Cell { writes: *writes, source_cpu })).collect();
    let wanted = |name: &str| settings.only.is_empty() || settings.only.iter().any(|only| only == name);
    let todo: Vec<(Cell, &str, &[&str])> = cells
        .iter()
        .flat_map(|cell| PROTOCOLS.iter().filter(|(name, _)| wanted(name)).map(move |(name, how)| (*cell, *name, *how)))
        .filter(|(cell, name, _)| !results.contains_key(&key(settings, cell, name)))
        .collect();
    let bar = ProgressBar::new(todo.len() as u64);
    bar.set_style(
        ProgressStyle::with_template("{elapsed_precise} [{bar:30}] {pos}/{len}, {eta} left: {msg}")
            .unwrap_or_else(|_| ProgressStyle::default_bar()),
    );
    bar.enable_steady_tick(Duration::from_millis(200));
    let mut version = String::new();
    for (number, (cell, name, how)) in todo.into_iter().enumerate() {
        let text = format!("{name}, {}", cell.name());
        if bar.is_hidden() {
            eprintln!("{text}"); // no terminal: a line per step
        }
        bar.set_message(text.clone());
        let site = Routed::start(&programs, &[], &format!("site{number}"), folder.path())?;
        version = version_of(site.addresses[0])?;
        let measured = measure(settings, &programs, &site, cell, how).with_context(|| text)?;
        let key = key(settings, &cell, name);
        let mut file = std::fs::OpenOptions::new().create(true).append(true).open(&settings.keep)?;
        writeln!(file, "{}", measured.to_json(&key)).with_context(|| format!("cannot write {}", settings.keep.display()))?;
        results.insert(key, measured);
        bar.inc(1);
    }
    bar.finish_and_clear();
    let tables: Vec<(String, Table)> = cells.iter().map(|cell| (cell.name(), table(settings, cell, &results))).collect();
    for (title, table) in &tables {
        print!("\n{title}\n\n{}", table.to_text());
    }
    if let Some(out) = &settings.out {
        let document = std::fs::read_to_string(out).with_context(|| format!("cannot read {}", out.display()))?;
        let servers = if version.is_empty() { String::new() } else { format!(" Servers: {version}.") };
        let mut section = format!("Measured on {} by `{}` on: {}.{servers}\n", today(), settings.command_line, describe_machine());
        for (title, table) in &tables {
            let _ = write!(section, "\n### {title}\n\n{}", table.to_markdown());
        }
        std::fs::write(out, replace_between_marks(&document, MARK, &section)?)
            .with_context(|| format!("cannot write {}", out.display()))?;
    }
    Ok(())
}

/// What names a result: another number of keys is another measurement.
fn key(settings: &Settings, cell: &Cell, protocol: &str) -> String {
    let target = settings.target_cpu.map_or(String::new(), |cpu| format!(", target {cpu:.2}"));
    format!("{protocol}; {}{target}; {} keys, {} connections", cell.name(), settings.keys, settings.connections)
}

fn measure(settings: &Settings, programs: &Programs, site: &Routed, cell: Cell, how: &[&str]) -> Result<Measured> {
    let layout = Arc::new(Layout::new(1 << 10));
    let numbers: Vec<u64> = (0..).filter(|number| layout.is_in_first_half(*number)).take(settings.keys as usize).collect();
    let keys = Arc::new(Keys::new(numbers, 64, &layout));
    keys.fill(|_| site.entry, &|_| {})?;
    let ids = site.process_ids();
    let _source = cell.source_cpu.map(|cpu| Capped::new(ids[0], cpu)).transpose()?;
    let _target = settings.target_cpu.map(|cpu| Capped::new(ids[1], cpu)).transpose()?;
    let load = generator::Settings {
        nodes: vec![site.entry],
        cluster: false,
        connections: settings.connections,
        rate: None,
        pipeline: 1,
        keys: keys.clone(),
        popularity: Popularity::zipfian(keys.count() as u64, YCSB_THETA),
        writes: cell.writes,
        seed: 1,
    };
    let run = Run::start(&load)?;
    std::thread::sleep(Duration::from_secs(1));
    run.take();
    let begun = Instant::now();
    while begun.elapsed() < settings.control {
        stopped(settings)?;
        std::thread::sleep(ASK);
    }
    let before = run.take().tally.replies as f64 / begun.elapsed().as_secs_f64();
    let more: Vec<String> = how.iter().map(|word| (*word).to_owned()).collect();
    let slots = format!("0-{}", layout.each() - 1);
    let order = Order { from: site.addresses[0], to: site.addresses[1], slots: Some(&slots), keys: None, more: &more };
    let begun = Instant::now();
    let id = admin::begin(&programs.switchyard, site.admin, &order)?;
    let (mut tally, mut longest, mut last_reply, mut asked) = (Tally::default(), Duration::ZERO, Instant::now(), Instant::now());
    let seconds = loop {
        let now = run.take().tally;
        if now.replies > 0 {
            longest = longest.max(last_reply.elapsed());
            last_reply = Instant::now();
        }
        tally.add(&now);
        if asked.elapsed() >= ASK {
            stopped(settings)?;
            asked = Instant::now();
            match admin::standing(&admin::report(site.admin)?, id)? {
                Standing::Done => break begun.elapsed().as_secs_f64(),
                Standing::Stopped(why) => anyhow::bail!("the move stopped: {why}"),
                Standing::Open => {}
            }
            ensure!(begun.elapsed() < settings.patience, "the move was not done within {:?}", settings.patience);
        }
        std::thread::sleep(LOOK);
    };
    tally.add(&run.take().tally);
    run.finish()?;
    let left = keys_at(site.addresses[0])?;
    ensure!(left == 0, "{left} keys are left at the source");
    let at = |quantile: f64| tally.latency.value_at_quantile(quantile) as f64 / 1e6;
    Ok(Measured {
        before,
        during: tally.replies as f64 / seconds,
        p50_ms: at(0.5),
        p99_ms: at(0.99),
        seconds,
        longest_gap_ms: longest.max(last_reply.elapsed()).as_secs_f64() * 1e3,
        replies: tally.replies,
        wrong: tally.wrong,
        errors: tally.errors + tally.unanswered + tally.disconnects,
        wrong_after: keys.count_wrong(|_| site.entry)?,
    })
}

fn table(settings: &Settings, cell: &Cell, results: &BTreeMap<String, Measured>) -> Table {
    let head = [
        "protocol",
        "requests/s",
        "of before",
        "p50 ms",
        "p99 ms",
        "seconds",
        "longest gap ms",
        "wrong replies",
        "errors",
        "keys wrong after",
    ];
    let mut table = Table::new(head);
    for (name, _) in PROTOCOLS {
        let Some(one) = results.get(&key(settings, cell, name)) else { continue };
        table.row([
            name.to_owned(),
            format!("{:.0}", one.during),
            format!("{:.0} %", 100.0 * one.during / one.before),
            format!("{:.2}", one.p50_ms),
            format!("{:.2}", one.p99_ms),
            format!("{:.2}", one.seconds),
            format!("{:.0}", one.longest_gap_ms),
            format!("{} of {}", one.wrong, one.replies),
            one.errors.to_string(),
            one.wrong_after.to_string(),
        ]);
    }
    table
}

fn stopped(settings: &Settings) -> Result<()> {
    ensure!(!settings.stop.load(Ordering::Relaxed), "interrupted; what was measured is in {}", settings.keep.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_kept_as_they_are() {
        let measured = Measured {
            before: 1.5,
            during: 2.5,
            p50_ms: 0.5,
            p99_ms: 7.0,
            seconds: 3.0,
            longest_gap_ms: 12.0,
            replies: 7,
            wrong: 1,
            errors: 0,
            wrong_after: 2,
        };
        assert_eq!(Measured::of_json(&measured.to_json("a")), Some(("a".to_owned(), measured)));
    }
}
