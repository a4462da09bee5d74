//! Experiments of papers, on this machine: a module for each paper, and their common parts here.
//!
//! A *run* is one kind of move in one cell of a grid: its own servers and router, a load, and moves. Each run is stored
//! in a file when it ends, so that an interrupted reproduction resumes there. A round does all runs before one is
//! repeated, so that a machine that slows down affects all alike.
//!
//! - [`netmigrate`]: all protocols in a grid of writes and processor time (NetMigrate, FAST 2024, section 6).
//! - [`tuning`]: sizes of filters, numbers of groups, and goals (its section 6.3).
//! - [`alone`]: evenness of the nodes' load, with the planner off and on, while the hot keys change.
//! - [`makris`]: load and response times of nodes before and after moves of single keys (Makris et al., figures 3 to 8,
//!   table I).
//! - [`autoscaling`]: nodes with and without limits, and their number under a changing load (the report on
//!   auto-scaling).
//! - [`bloom`]: queries lost with and without a filter (Bloom telemetry, section 3).
//! - [`pool`]: a server joins a pool of twemproxy's configuration.
//! - [`switchkv`]: a switch with a cache node in front of many backends, by simulation (SwitchKV, sections 5.2 to 5.4).
//! - [`all`]: all experiments with published values, in a budget of time, and the book of their results.
//! - `book`: the rows of the book, their values and verdicts.

pub mod all;
pub mod alone;
pub mod autoscaling;
pub mod bloom;
mod book;
pub(crate) mod capped;
mod kept;
pub mod makris;
pub mod netmigrate;
pub mod pool;
mod published;
pub(crate) mod spread;
pub mod switchkv;
pub mod tuning;
mod watch;
pub mod ways;
mod written;

use std::cell::Cell;
use std::fmt::Write as _;
use std::fs;
use std::hash::{DefaultHasher, Hasher as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use switchyard_bench::process;
use switchyard_bench::table::Table;

pub use self::book::Paper;
use self::capped::Capped;
pub use self::capped::SHARE_LEAST;
use self::kept::StoredResults;
use crate::document::{replace_between_marks, today};
use crate::moves::site::{Programs, version_of};
use crate::procfs::{ProcessorTime, describe_machine};

/// Arguments of a router that answers no read itself, as in the papers on migration.
const NO_COPIES: [&str; 2] = ["--set", "hot-copies.mode=off"];

/// Common settings of all reproductions.
#[derive(Debug, Clone)]
pub struct Conduct {
    /// Path of the router's binary.
    pub switchyard: PathBuf,
    /// Repetitions of each run.
    pub repeat: u32,
    /// Time limit of the moves of a run.
    pub timeout: Duration,
    /// Folder of results, with a file for each experiment.
    pub keep: PathBuf,
    /// Maximum number of different runs of an experiment. The others have no result.
    pub runs_max: usize,
    /// Maximum number of repetitions of a run that other programs disturb.
    pub attempts: usize,
    /// Whether servers are limited. Without it, limits are only recorded as settings.
    pub is_capped: bool,
    /// End of the time budget: no run begins after it.
    pub deadline: Option<Instant>,
    /// Document whose section is rewritten. Figures go to `figures` in its folder.
    pub out: Option<PathBuf>,
    /// Command line of this run, for the document.
    pub command_line: String,
    /// Set to end the run early.
    pub stop: Arc<AtomicBool>,
}

/// The time budget has ended. Finished runs are stored.
#[derive(Debug)]
pub(crate) struct BudgetUsed;

impl std::fmt::Display for BudgetUsed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the time budget has ended; finished runs are stored, and the same command resumes after them")
    }
}

impl std::error::Error for BudgetUsed {}

/// Common state of the runs.
#[derive(Debug)]
struct Bench<'a> {
    conduct: &'a Conduct,
    programs: Programs,
    folder: &'a Path,
    sites: Cell<u32>,
}

impl Bench<'_> {
    /// Returns a name for the servers of another run.
    fn name(&self) -> String {
        self.sites.set(self.sites.get() + 1);
        format!("site{}", self.sites.get())
    }

    /// Limits each process to this number of processors, until the result is dropped.
    fn cap_all(&self, processes: &[u32], processors: f64) -> Result<Vec<Capped>> {
        let wanted = processes.iter().filter(|_| self.conduct.is_capped);
        wanted.map(|process| Capped::new(*process, processors)).collect()
    }

    /// Runs a verb of `switchyard` at the router with this admin port, and returns its output.
    fn order(&self, admin: SocketAddr, words: &[&str]) -> Result<String> {
        let output = Command::new(&self.programs.switchyard).args(words).args(["--admin", &admin.to_string()]).output();
        let output = output.with_context(|| format!("cannot run `switchyard {}`", words.join(" ")))?;
        ensure!(
            output.status.success(),
            "`switchyard {}`: {}",
            words.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

/// Results of each run, by round.
#[derive(Debug)]
struct Outcome<R> {
    results: Vec<Vec<R>>,
    measured_by: String,
    first_date: String,
    last_date: String,
}

/// Does all runs that the file of results lacks. `what` has everything that determines a run's result; `title` is for
/// display.
fn measure<J, R: Serialize + DeserializeOwned>(
    conduct: &Conduct,
    runs: &[J],
    what: impl Fn(&J) -> Value,
    title: impl Fn(&J) -> String,
    run: impl Fn(&Bench<'_>, &J) -> Result<R>,
) -> Result<Outcome<R>> {
    let programs = Programs::find(&conduct.switchyard, None)?;
    process::raise_file_limit();
    capped::remove_leftovers();
    let folder = tempfile::Builder::new()
        .prefix("switchyard-reproduce-")
        .tempdir()
        .context("cannot create a temporary folder")?;
    let measured_by = measured_by(&programs, folder.path())?;
    let whats: Vec<Value> = runs.iter().map(&what).take(conduct.runs_max).collect();
    let experiment = match whats.first() {
        Some(what) => what["experiment"].as_str().context("an experiment has no name")?.to_owned(),
        None => bail!("no run is selected"),
    };
    let rounds = conduct.repeat.max(1);
    let mut kept = StoredResults::open(&conduct.keep, &experiment, measured_by.clone())?;
    kept.plan(&whats, rounds)?;
    let all: Vec<(usize, u32)> = (0..rounds).flat_map(|round| (0..whats.len()).map(move |at| (at, round))).collect();
    let bench = Bench { conduct, programs, folder: folder.path(), sites: Cell::new(0) };
    // Disturbed runs are repeated after the others, when the machine may be idle again.
    for attempt in 1..=conduct.attempts.max(1) {
        let due: Vec<_> = all.iter().copied().filter(|(at, round)| kept.is_due(&whats[*at], *round, attempt)).collect();
        if attempt == 1 && due.len() < all.len() {
            eprintln!(
                "{experiment}: {} of {} runs are kept in {}",
                all.len() - due.len(),
                all.len(),
                conduct.keep.display()
            );
        } else if attempt > 1 && !due.is_empty() {
            eprintln!("{experiment}: other programs disturbed {} runs, which are repeated", due.len());
        }
        let bar = progress(&experiment, due.len());
        for (at, round) in due {
            if conduct.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(BudgetUsed.into());
            }
            let text = title(&runs[at]);
            if bar.is_hidden() {
                eprintln!("{experiment}: {text}"); // no terminal: a line per step
            }
            bar.set_message(text.clone());
            let before = ProcessorTime::now()?;
            let result = run(&bench, &runs[at]).with_context(|| text)?;
            let disturbed = ProcessorTime::now()?.share_of_others_since(before);
            kept.add(&whats[at], round, today(), disturbed, &result)?;
            bar.inc(1);
        }
        bar.finish_and_clear();
    }
    Ok(collect(&kept, &whats, rounds, runs.len(), measured_by))
}

/// Collects the results of all runs, by round. `runs`: number of runs; only the first ones, in `whats`, have results.
fn collect<R: DeserializeOwned>(
    kept: &StoredResults,
    whats: &[Value],
    rounds: u32,
    runs: usize,
    measured_by: String,
) -> Outcome<R> {
    let mut outcome = Outcome { results: Vec::new(), measured_by, first_date: String::new(), last_date: String::new() };
    for what in whats {
        let found: Vec<(R, &str)> = (0..rounds).filter_map(|round| kept.find(what, round)).collect();
        for (_, date) in &found {
            if outcome.first_date.is_empty() || *date < outcome.first_date.as_str() {
                outcome.first_date = (*date).to_owned();
            }
            outcome.last_date = outcome.last_date.max((*date).to_owned());
        }
        outcome.results.push(found.into_iter().map(|(result, _)| result).collect());
    }
    outcome.results.resize_with(runs, Vec::new);
    outcome
}

fn progress(experiment: &str, runs: usize) -> ProgressBar {
    let bar = ProgressBar::new(runs as u64).with_prefix(experiment.to_owned());
    bar.set_style(
        ProgressStyle::with_template("{prefix}: {elapsed_precise} [{bar:30}] {pos}/{len}, {eta} left: {msg}")
            .unwrap_or_else(|_| ProgressStyle::default_bar()),
    );
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

/// Returns router, servers and machine. A router without a commit gets a hash, because two such builds can have one version.
///
/// A build of a commit has no hash: its bytes depend on the folder of the build, so another machine could not continue a
/// set of runs.
fn measured_by(programs: &Programs, folder: &Path) -> Result<String> {
    let output =
        Command::new(&programs.switchyard).arg("--version").output().context("cannot run `switchyard --version`")?;
    let mut version = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if version.ends_with("-dirty)") || version.ends_with("(unknown)") {
        let mut hasher = DefaultHasher::new();
        hasher.write(
            &fs::read(&programs.switchyard)
                .with_context(|| format!("cannot read {}", programs.switchyard.display()))?,
        );
        version += &format!(" (build {:08x})", hasher.finish() >> 32);
    }
    let (_server, address) = process::start_redis(&programs.server, "version", folder)?;
    Ok(format!("{version}; {}; {}", version_of(address)?, describe_machine()))
}

/// Content of a section of the document.
#[derive(Debug, Default)]
struct Section {
    /// Lines below the line with date and machine.
    notes: Vec<String>,
    tables: Vec<(String, Table)>,
    /// File name, caption, and content.
    figures: Vec<(String, String, String)>,
}

/// Prints the tables, and rewrites the section of the document, if one is given.
fn publish<R>(conduct: &Conduct, mark: &str, outcome: &Outcome<R>, section: &Section) -> Result<()> {
    for (title, table) in &section.tables {
        print!("\n{title}\n\n{}", table.to_text());
    }
    for note in &section.notes {
        println!("\n{note}");
    }
    let Some(out) = &conduct.out else { return Ok(()) };
    let Outcome { measured_by, first_date, last_date, .. } = outcome;
    let when = if first_date == last_date { first_date.clone() } else { format!("{first_date} to {last_date}") };
    let mut text = format!("Measured on {when} by `{}`: {measured_by}.\n", conduct.command_line);
    for note in &section.notes {
        let _ = write!(text, "\n{note}\n");
    }
    let folder = out.parent().unwrap_or(Path::new("")).join("figures");
    for (name, shows, svg) in &section.figures {
        fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let path = folder.join(format!("{name}.svg"));
        fs::write(&path, svg).with_context(|| format!("cannot write {}", path.display()))?;
        let _ = write!(text, "\n![{shows}](figures/{name}.svg)\n");
    }
    for (title, table) in &section.tables {
        let _ = write!(text, "\n### {title}\n\n{}", table.to_markdown());
    }
    rewrite_section(out, mark, &text)
}

/// Replaces the section of a document between its marks.
fn rewrite_section(out: &Path, mark: &str, text: &str) -> Result<()> {
    let document = fs::read_to_string(out).with_context(|| format!("cannot read {}", out.display()))?;
    let document =
        replace_between_marks(&document, mark, text).with_context(|| format!("cannot rewrite {}", out.display()))?;
    fs::write(out, document).with_context(|| format!("cannot write {}", out.display()))?;
    eprintln!("wrote the section {mark} to {}", out.display());
    Ok(())
}

/// Formats a number without insignificant digits.
fn plain(value: f64) -> String {
    format!("{}", format!("{value:.6}").parse::<f64>().unwrap_or(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn publishing_a_section_writes_its_figures() {
        let folder = tempfile::tempdir().expect("a folder");
        let out = folder.path().join("page.md");
        fs::write(&out, "# Page\n<!-- reproduce-x:begin -->\n<!-- reproduce-x:end -->\n").expect("written");
        let conduct = Conduct {
            switchyard: PathBuf::new(),
            repeat: 1,
            timeout: Duration::ZERO,
            keep: PathBuf::new(),
            runs_max: usize::MAX,
            attempts: 1,
            is_capped: true,
            deadline: None,
            out: Some(out.clone()),
            command_line: "lab x".to_owned(),
            stop: Arc::default(),
        };
        let outcome: Outcome<u64> = Outcome {
            results: Vec::new(),
            measured_by: "this".to_owned(),
            first_date: "2026-01-01".to_owned(),
            last_date: "2026-01-02".to_owned(),
        };
        let mut table = Table::new(["a", "b"]);
        table.row(["1", "2"]);
        let section = Section {
            notes: vec!["Note.".to_owned()],
            tables: vec![("Title".to_owned(), table)],
            figures: vec![("x".to_owned(), "Lines".to_owned(), "<svg/>".to_owned())],
        };
        publish(&conduct, "reproduce-x", &outcome, &section).expect("published");
        let text = fs::read_to_string(&out).expect("a page");
        for part in
            ["2026-01-01 to 2026-01-02 by `lab x`: this.", "Note.", "![Lines](figures/x.svg)", "### Title", "| 1"]
        {
            assert!(text.contains(part), "{part} is not in {text}");
        }
        assert_eq!(fs::read_to_string(folder.path().join("figures/x.svg")).expect("a figure"), "<svg/>");
    }

    #[test]
    fn numbers_have_only_significant_digits() {
        assert_eq!([0.5, 10.0, 0.1 * 3.0, 0.95].map(plain), ["0.5", "10", "0.3", "0.95"]);
    }
}
