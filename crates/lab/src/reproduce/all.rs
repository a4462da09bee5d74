//! All experiments whose results the book compares with published ones, with the settings of the recorded results.
//!
//! A time budget ends between two runs. The next call resumes there, because results are kept; experiments without a
//! complete set come first in both.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, ensure};

use super::book::{self, Paper};
use super::netmigrate::{self, Figures, Load};
use super::{BudgetUsed, Conduct, autoscaling, bloom, capped, makris, published, switchkv, tuning};

/// The settings of a reproduction.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Common settings. `keep` is the folder of results, and `out` is ignored.
    pub conduct: Conduct,
    /// Folder with the book, `reproduction.md`, and with the pages of the experiments in `results`. `None` prints the
    /// book.
    pub docs: Option<PathBuf>,
    /// Only the experiments of these papers; empty for all.
    pub only: Vec<Paper>,
    /// Toy size: each experiment ends in seconds, and its values mean nothing.
    pub is_smoke: bool,
}

/// An experiment of a paper.
struct Experiment {
    paper: Paper,
    /// Name of the page in `docs/results`.
    page: &'static str,
    /// Number of different runs at toy size.
    smoke_runs: usize,
    run: fn(Conduct, Size) -> Result<()>,
}

/// Recorded, or at toy size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Size {
    Recorded,
    Smoke,
}

impl Size {
    fn or<T>(self, recorded: T, smoke: T) -> T {
        if self == Self::Recorded { recorded } else { smoke }
    }
}

/// The protocols of NetMigrate's evaluation, and the default one.
const PROTOCOLS: [&str; 7] = [
    "switchyard",
    "source",
    "rocksteady (paper)",
    "netmigrate (paper)",
    "fulva (paper)",
    "netmigrate-short (paper)",
    "netmigrate-medium (paper)",
];

/// All experiments, in the order in which the budget is used.
const EXPERIMENTS: [Experiment; 11] = [
    // A simulation, in minutes.
    Experiment { paper: Paper::Switchkv, page: "switchkv.md", smoke_runs: 16, run: switchkv },
    Experiment { paper: Paper::Report, page: "autoscaling.md", smoke_runs: 7, run: nodes },
    Experiment { paper: Paper::Report, page: "autoscaling.md", smoke_runs: 1, run: join },
    Experiment { paper: Paper::Report, page: "autoscaling.md", smoke_runs: 1, run: fill },
    Experiment { paper: Paper::Report, page: "autoscaling.md", smoke_runs: 4, run: queries },
    Experiment { paper: Paper::Report, page: "autoscaling.md", smoke_runs: 1, run: ramp },
    Experiment { paper: Paper::Makris, page: "planner.md", smoke_runs: 1, run: makris },
    Experiment { paper: Paper::Bloom, page: "migration-protocols.md", smoke_runs: 2, run: bloom },
    Experiment { paper: Paper::Netmigrate, page: "migration-protocols.md", smoke_runs: 5, run: netmigrate },
    Experiment { paper: Paper::Netmigrate, page: "migration-protocols.md", smoke_runs: 2, run: tuning },
    Experiment { paper: Paper::Netmigrate, page: "migration-protocols.md", smoke_runs: 1, run: curves },
];

/// The load of moves between limited servers. A connection waits for each reply, and a limited server pauses for up to
/// nine tenths of each period of 10 ms. With 32 connections, nearly all wait for the slower server, so the other one is
/// hardly used and no protocol can be faster than its source. The rate of both servers times such a pause is about 512.
fn load(size: Size) -> Load {
    Load {
        keys: size.or(200_000, 2000),
        connections: size.or(512, 4),
        control: size.or(Duration::from_secs(4), Duration::from_millis(200)),
    }
}

fn switchkv(conduct: Conduct, size: Size) -> Result<()> {
    switchkv::run(&switchkv::Settings { conduct, only: Vec::new(), is_toy: size == Size::Smoke })
}

fn netmigrate(conduct: Conduct, size: Size) -> Result<()> {
    netmigrate::run(&netmigrate::Settings {
        conduct,
        load: load(size),
        writes: size.or(vec![0.0, 5.0, 10.0, 20.0, 30.0], vec![10.0]),
        source_cpu: published::SHARES.map(Some).to_vec(),
        target_cpu: vec![Some(published::SHARES[0])],
        only: PROTOCOLS.map(str::to_owned).to_vec(),
        figures: Figures::Grid,
    })
}

/// One run each, because the ratios come from the grid.
fn curves(conduct: Conduct, size: Size) -> Result<()> {
    netmigrate::run(&netmigrate::Settings {
        conduct: Conduct { repeat: 1, ..conduct },
        load: Load { keys: size.or(2_000_000, 2000), ..load(size) },
        writes: vec![5.0],
        source_cpu: published::SHARES.map(Some).to_vec(),
        target_cpu: vec![Some(published::SHARES[0])],
        only: PROTOCOLS.map(str::to_owned).to_vec(),
        figures: Figures::Curves,
    })
}

fn tuning(conduct: Conduct, size: Size) -> Result<()> {
    tuning::run(&tuning::Settings {
        conduct,
        load: load(size),
        writes_percent: 5.0,
        source_cpu: Some(published::SHARES[0]),
        target_cpu: Some(published::SHARES[0]),
    })
}

fn bloom(conduct: Conduct, size: Size) -> Result<()> {
    bloom::run(&bloom::Settings {
        conduct,
        scale: bloom::Scale {
            keys: size.or(500_000, 2000),
            value: 2000,
            queries: size.or(750_000, 2000),
            rate: size.or(15_000.0, 2000.0),
            connections: size.or(32, 4),
            targets: 5,
        },
    })
}

fn makris(conduct: Conduct, size: Size) -> Result<()> {
    makris::run(&makris::Settings {
        conduct,
        cpu: size.or(0.05, 0.5),
        clients: size.or(16, 4),
        of_knee: size.or(vec![0.5, 0.8, 1.0, 1.2], vec![1.0]),
        phase: Duration::from_secs(size.or(8, 1)),
        rates_max: size.or(40, 2),
    })
}

fn nodes(conduct: Conduct, size: Size) -> Result<()> {
    autoscaling::run(&report(conduct, size, "nodes"))
}

fn join(conduct: Conduct, size: Size) -> Result<()> {
    autoscaling::run(&autoscaling::Settings { keys: size.or(2_000_000, 20_000), ..report(conduct, size, "join") })
}

fn fill(conduct: Conduct, size: Size) -> Result<()> {
    autoscaling::run(&autoscaling::Settings {
        keys: size.or(autoscaling::KEYS, 25_000),
        ..report(conduct, size, "fill")
    })
}

fn queries(conduct: Conduct, size: Size) -> Result<()> {
    autoscaling::run(&autoscaling::Settings {
        keys: size.or(autoscaling::KEYS, 1000),
        ..report(conduct, size, "queries")
    })
}

fn ramp(conduct: Conduct, size: Size) -> Result<()> {
    let phase = Duration::from_secs(size.or(5, 1));
    autoscaling::run(&autoscaling::Settings { nodes: size.or(4, 2), phase, ..report(conduct, size, "ramp") })
}

fn report(conduct: Conduct, size: Size, experiment: &str) -> autoscaling::Settings {
    autoscaling::Settings {
        conduct,
        cpu: 0.05,
        join_cpu: Some(0.25),
        connections: size.or(32, 8),
        phase: size.or(Duration::from_secs(4), Duration::from_millis(400)),
        keys: size.or(autoscaling::KEYS, 10_000),
        fill_rate: size.or(1000.0, 5000.0),
        nodes: size.or(autoscaling::NODES, 3),
        only: vec![experiment.to_owned()],
    }
}

/// Does the missing runs within the budget, and rewrites the pages of complete experiments and the book.
///
/// # Errors
/// If an experiment fails, a file cannot be read or written, or the user interrupts.
pub fn run(settings: &Settings) -> Result<()> {
    let Settings { conduct, docs, only, is_smoke } = settings;
    let size = if *is_smoke { Size::Smoke } else { Size::Recorded };
    let is_selected = |one: &&Experiment| only.is_empty() || only.contains(&one.paper);
    let has_servers = EXPERIMENTS.iter().filter(is_selected).any(|one| one.paper != Paper::Switchkv);
    ensure!(
        size == Size::Smoke || !has_servers || capped::is_possible(),
        "the recorded experiments limit servers by cgroups, which needs root and cgroups of version 1 or 2; --smoke works without"
    );
    let mut end = Ok(());
    for experiment in EXPERIMENTS.iter().filter(is_selected) {
        let conduct = Conduct {
            out: docs.as_ref().map(|docs| docs.join("results").join(experiment.page)),
            runs_max: size.or(usize::MAX, experiment.smoke_runs),
            attempts: size.or(3, 1),
            is_capped: size == Size::Recorded || capped::is_possible(),
            ..conduct.clone()
        };
        match (experiment.run)(conduct, size) {
            Ok(()) => {}
            Err(e) if e.is::<BudgetUsed>() => {
                eprintln!("{e}");
                break;
            }
            Err(e) => {
                end = Err(e);
                break;
            }
        }
    }
    write_book(&conduct.keep, docs.as_deref())?;
    end
}

/// Writes the book from kept results only.
///
/// # Errors
/// If a file cannot be read or written.
pub fn write_book(results: &Path, docs: Option<&Path>) -> Result<()> {
    match docs {
        Some(docs) => {
            let document = docs.join("reproduction.md");
            book::write(results, &document)?;
            eprintln!("wrote {}", document.display());
        }
        None => print!("{}", book::text(results)?),
    }
    Ok(())
}
