//! `switchyard-lab reproduce`: experiments of papers, on this machine.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use clap::{Args, Subcommand};
use switchyard_bench::numbers::time_flag;
use switchyard_lab::product;
use switchyard_lab::reproduce::bloom::{self, Scale};
use switchyard_lab::reproduce::netmigrate::{self, Figures, Load};
use switchyard_lab::reproduce::ways::WAYS;
use switchyard_lab::reproduce::{Conduct, SHARE_LEAST, tuning};
use switchyard_lab::reproduce::{Paper, all, alone, autoscaling, makris, pool, switchkv};

use super::typed;

/// Experiments of papers, on this machine
#[derive(Debug, Args)]
pub(super) struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    All(All),
    Netmigrate(Netmigrate),
    Tuning(Tuning),
    Bloom(Bloom),
    Makris(Makris),
    Alone(Alone),
    Autoscaling(Autoscaling),
    Pool(Pool),
    Switchkv(Switchkv),
}

/// A share of a processor; `None` without a limit.
#[derive(Debug, Clone, Copy)]
struct Share(Option<f64>);

fn share(text: &str) -> Result<Share, String> {
    if text == "none" {
        return Ok(Share(None));
    }
    let share: f64 = text
        .parse()
        .map_err(|_| format!("a share of a processor must be a number such as 0.5, or none, not {text}"))?;
    if (SHARE_LEAST..=64.0).contains(&share) {
        return Ok(Share(Some(share)));
    }
    Err(format!("a share of a processor must be between {SHARE_LEAST} and 64, not {text}"))
}

fn percent(text: &str) -> Result<f64, String> {
    let percent: f64 =
        text.parse().map_err(|_| format!("a share of writes must be a number of percent, not {text}"))?;
    if (0.0..=100.0).contains(&percent) {
        Ok(percent)
    } else {
        Err(format!("a share of writes must be between 0 and 100 percent, not {text}"))
    }
}

fn of_knee(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share: &f64| (0.01..=10.0).contains(share));
    share.ok_or_else(|| format!("a share of the sustained rate must be a number from 0.01 to 10, not {text}"))
}

/// Flags of all experiments.
#[derive(Debug, Args)]
struct Shared {
    /// Repetitions of each run; the tables show median, minimum and maximum
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    repeat: u32,

    /// Time limit of the moves of a run
    #[arg(long, value_name = "TIME", value_parser = time_flag, default_value = "30m")]
    timeout: Duration,

    /// Folder of results, with a file for each experiment and a line for each run; lines of other settings, builds and
    /// machines are left alone
    #[arg(long, value_name = "FOLDER", default_value = "reproduce-results")]
    keep: PathBuf,

    /// The router to measure [default: switchyard, in the folder of this program]
    #[arg(long, value_name = "PATH")]
    switchyard: Option<PathBuf>,

    /// Rewrite the section in this document, and its figures in the same folder
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

impl Shared {
    /// Like `conduct`, for experiments with protocols or policies that only research builds have.
    fn research(&self, stop: Arc<AtomicBool>) -> anyhow::Result<Conduct> {
        let conduct = self.conduct(stop)?;
        product::require_research(&conduct.switchyard)?;
        Ok(conduct)
    }

    fn conduct(&self, stop: Arc<AtomicBool>) -> anyhow::Result<Conduct> {
        Ok(Conduct {
            switchyard: product::find(self.switchyard.as_deref())?,
            repeat: self.repeat,
            timeout: self.timeout,
            keep: self.keep.clone(),
            runs_max: usize::MAX,
            attempts: 3,
            is_capped: true,
            deadline: None,
            out: self.out.clone(),
            command_line: typed(),
            stop,
        })
    }
}

/// Every experiment with published values, in a budget of time; and the book of all results
#[derive(Debug, Args)]
#[command(
    long_about = "Does the runs of all experiments that are missing in the folder of results, as far as the budget allows, and rewrites docs/reproduction.md and the pages \
        of complete experiments. The next call resumes there. A result counts only for the same build and machine.\n\n\
        The experiments limit servers by cgroups, which needs root. Nothing else should run on the machine: a run that other programs disturb is marked, and repeated \
        at the end.",
    after_long_help = "Examples:\n  \
        switchyard-lab reproduce all --smoke                      every experiment at toy size, in a minute\n  \
        switchyard-lab reproduce all --budget 75m                 in the root of the repository\n  \
        switchyard-lab reproduce all --only netmigrate --budget 75m\n  \
        switchyard-lab reproduce all --book-only                  docs/reproduction.md from the stored results"
)]
struct All {
    /// Time after which no run begins [default: no limit]
    #[arg(long, value_name = "TIME", value_parser = time_flag)]
    budget: Option<Duration>,

    /// Only the experiments of these papers
    #[arg(long, value_name = "PAPERS", value_delimiter = ',')]
    only: Vec<Paper>,

    /// Toy size, without limits if the machine supports none: shows that each experiment works, and prints the book
    #[arg(long, conflicts_with = "budget")]
    smoke: bool,

    /// Measure nothing, and rewrite the book from the stored results
    #[arg(long, conflicts_with_all = ["smoke", "budget", "only"])]
    book_only: bool,

    /// Repetitions of each run; a range of values needs three
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    repeat: u32,

    /// Folder of results [default: docs/results/data; with --smoke: a temporary one]
    #[arg(long, value_name = "FOLDER")]
    keep: Option<PathBuf>,

    /// The router to measure [default: switchyard, in the folder of this program]
    #[arg(long, value_name = "PATH")]
    switchyard: Option<PathBuf>,
}

impl All {
    fn run(&self, stop: Arc<AtomicBool>) -> anyhow::Result<()> {
        const DOCS: &str = "docs";
        let temporary = tempfile::tempdir().context("cannot create a temporary folder")?;
        let keep = match &self.keep {
            Some(keep) => keep.clone(),
            None if self.smoke => temporary.path().to_owned(),
            None => Path::new(DOCS).join("results/data"),
        };
        if self.book_only {
            return all::write_book(&keep, Some(Path::new(DOCS)));
        }
        let shared = Shared {
            repeat: if self.smoke { 1 } else { self.repeat },
            timeout: Duration::from_secs(30 * 60),
            keep,
            switchyard: self.switchyard.clone(),
            out: None,
        };
        let deadline = self.budget.map(|budget| Instant::now() + budget);
        all::run(&all::Settings {
            conduct: Conduct { deadline, ..shared.research(stop)? },
            docs: (!self.smoke).then(|| PathBuf::from(DOCS)),
            only: self.only.clone(),
            is_smoke: self.smoke,
        })
    }
}

/// Keys and load of NetMigrate's experiments.
#[derive(Debug, Args)]
struct LoadFlags {
    /// Fewer keys and cells: some ten minutes
    #[arg(long, conflicts_with = "full")]
    quick: bool,

    /// 2,000,000 keys
    #[arg(long)]
    full: bool,

    /// Keys of 64 B, all of which move [default: 500000; with --quick: 100000; with --full: 2000000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1000..=100_000_000))]
    keys: Option<u64>,

    /// Connections of the load, with one request in flight each
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    connections: u32,

    /// Duration of the load before a move begins [default: 5s; with --quick: 2s]
    #[arg(long, value_name = "TIME", value_parser = time_flag)]
    control: Option<Duration>,
}

impl LoadFlags {
    fn load(&self) -> Load {
        let keys = if self.full { 2_000_000 } else { 500_000 };
        Load {
            keys: self.keys.unwrap_or(if self.quick { 100_000 } else { keys }),
            connections: self.connections as usize,
            control: self.control.unwrap_or(Duration::from_secs(if self.quick { 2 } else { 5 })),
        }
    }
}

/// All protocols of migration side by side, under the same load (NetMigrate, FAST 2024, section 6)
#[derive(Debug, Args)]
#[command(
    long_about = "For each protocol, safe and as published: two Redis servers with the router in front, keys of 64 bytes, Zipf 0.99, one request in flight on each \
        connection; then all keys of the first server move to the second. Replies are checked: lost ones found nothing, stale ones are older than the last \
        acknowledged write.\n\n\
        Each run is stored in a file, so that the same command resumes after an interruption. Nothing else should run on the machine.",
    after_long_help = "Examples:\n  \
        switchyard-lab reproduce netmigrate --quick\n  \
        switchyard-lab reproduce netmigrate --quick --source-cpu none --target-cpu none     without root\n  \
        switchyard-lab reproduce netmigrate --repeat 3 --out docs/results/migration-protocols.md"
)]
struct Netmigrate {
    #[command(flatten)]
    load: LoadFlags,

    /// Shares of writes, in percent [default: 0,5,10,20,30; with --quick: 0,10]
    #[arg(long, value_name = "PERCENT", value_delimiter = ',', value_parser = percent)]
    writes: Vec<f64>,

    /// Shares of a processor for the source, or none for no limit (a limit needs root) [default: 0.25,0.175,0.1;
    /// with --quick: 0.25,0.1]
    #[arg(long, value_name = "SHARE", value_delimiter = ',', value_parser = share)]
    source_cpu: Vec<Share>,

    /// Shares of a processor for the target, or none
    #[arg(long, value_name = "SHARE", value_delimiter = ',', value_parser = share, default_value = "0.25")]
    target_cpu: Vec<Share>,

    /// Figures by the seconds of the moves instead of by the share of writes
    #[arg(long)]
    curves: bool,

    /// Only these kinds of moves [default: all]
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = WAYS.map(|way| way.name))]
    only: Vec<String>,

    #[command(flatten)]
    shared: Shared,
}

/// NetMigrate with other filters, groups and goals (NetMigrate, FAST 2024, section 6.3)
#[derive(Debug, Args)]
#[command(
    long_about = "NetMigrate as published, with the filters of the paper's table 2 and the groups of its table 3; and with the goals fast, balanced and gentle.",
    after_long_help = "Examples:\n  \
        switchyard-lab reproduce tuning --quick\n  \
        switchyard-lab reproduce tuning --repeat 3 --out docs/results/migration-protocols.md"
)]
struct Tuning {
    #[command(flatten)]
    load: LoadFlags,

    /// Share of writes, in percent
    #[arg(long, value_name = "PERCENT", value_parser = percent, default_value = "5")]
    writes: f64,

    /// Share of a processor for the source, or none for no limit (a limit needs root)
    #[arg(long, value_name = "SHARE", value_parser = share, default_value = "0.25")]
    source_cpu: Share,

    /// Share of a processor for the target, or none
    #[arg(long, value_name = "SHARE", value_parser = share, default_value = "0.25")]
    target_cpu: Share,

    #[command(flatten)]
    shared: Shared,
}

/// Load and response times before and after single keys have moved (Makris et al., figures 3 to 8, table I)
#[derive(Debug, Args)]
#[command(
    long_about = "Three servers, and twenty keys by Zipf, nearly all at the first server. The planner moves keys by each policy of the paper, and by Switchyard's own.",
    after_long_help = "Examples:\n  \
        switchyard-lab reproduce makris\n  \
        switchyard-lab reproduce makris --cpu 0.03 --of-knee 0.5,1 --out docs/results/planner.md"
)]
struct Makris {
    /// Share of a processor for each server (a limit needs root)
    #[arg(long, value_name = "SHARE", default_value_t = 0.05)]
    cpu: f64,

    /// Clients of the load, with one connection and one request in flight each
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1000))]
    clients: u32,

    /// Rates of the load, as shares of the rate that one server sustains: each policy runs at each of them
    #[arg(long, value_name = "SHARES", value_delimiter = ',', default_value = "0.5,0.8,1,1.2", value_parser = of_knee)]
    of_knee: Vec<f64>,

    /// Duration of each phase
    #[arg(long, value_name = "TIME", value_parser = time_flag, default_value = "8s")]
    phase: Duration,

    #[command(flatten)]
    shared: Shared,
}

/// Evenness of the load while the hot keys change, with the planner off and on
#[derive(Debug, Args)]
#[command(
    long_about = "Four servers; half of the load goes to eight keys of one node, and every 30 s to eight of another. The planner is off, and then on.",
    after_long_help = "Examples:\n  \
        switchyard-lab reproduce alone\n  \
        switchyard-lab reproduce alone --out docs/results/planner.md"
)]
struct Alone {
    /// Share of a processor for each server (a limit needs root)
    #[arg(long, value_name = "SHARE", default_value_t = 0.1)]
    cpu: f64,

    /// Connections of the load
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=1000))]
    connections: u32,

    /// Time for which the same keys are hot
    #[arg(long, value_name = "TIME", value_parser = time_flag, default_value = "30s")]
    change: Duration,

    /// Number of sets of hot keys, in sequence
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=100))]
    changes: u32,

    #[command(flatten)]
    shared: Shared,
}

/// Nodes with and without limits, their joins, and their number under a changing load (Raman, IIT Kanpur)
#[derive(Debug, Args)]
#[command(
    long_about = "nodes: throughput, response time and hits of one to six nodes without limits, with little processor time and with little memory. join: time for a node to join, by \
        the number of nodes. fill: a fleet of 6 MB nodes grows while it is filled. queries: time of 10 to 100,000 queries, also behind nutcracker. ramp: a fleet grows with its load. surge: four times the load at once, and its end.",
    after_long_help = "Examples:\n  \
        switchyard-lab reproduce autoscaling\n  \
        switchyard-lab reproduce autoscaling --only join,surge\n  \
        switchyard-lab reproduce autoscaling --repeat 3 --out docs/results/autoscaling.md"
)]
struct Autoscaling {
    /// Share of a processor for a limited server (a limit needs root)
    #[arg(long, value_name = "SHARE", default_value_t = 0.05)]
    cpu: f64,

    /// Connections of the load
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=1000))]
    connections: u32,

    /// Duration of each phase
    #[arg(long, value_name = "TIME", value_parser = time_flag, default_value = "4s")]
    phase: Duration,

    /// Share of a processor for each server of the experiment join, or none for no limit
    #[arg(long, value_name = "SHARE", value_parser = share, default_value = "none")]
    join_cpu: Share,

    /// Keys of the experiments nodes, join and fill
    #[arg(long, value_name = "N", default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(1000..=100_000_000))]
    keys: u64,

    /// Only these experiments [default: all]
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = autoscaling::EXPERIMENTS)]
    only: Vec<String>,

    #[command(flatten)]
    shared: Shared,
}

/// Effect on clients while a sixth server joins a pool of twemproxy's configuration
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
        switchyard-lab reproduce pool\n  \
        switchyard-lab reproduce pool --repeat 3 --out docs/results/twemproxy.md")]
struct Pool {
    /// Keys of the pool
    #[arg(long, value_name = "N", default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(1000..=100_000_000))]
    keys: u64,

    /// Requests per second
    #[arg(long, value_name = "N", default_value_t = 5000, value_parser = clap::value_parser!(u32).range(1..))]
    rate: u32,

    /// Connections of the load
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    connections: u32,

    /// Duration of the load before the join
    #[arg(long, value_name = "TIME", value_parser = time_flag, default_value = "15s")]
    control: Duration,

    #[command(flatten)]
    shared: Shared,
}

/// Queries lost with and without a filter (Bloom telemetry, figures 1 and 2)
#[derive(Debug, Args)]
#[command(
    long_about = "Keys of 2 KB move from one server to five, by five concurrent moves that share a filter, under load: without the filter, with filter and \
        forwarding, and by the default protocol. A query is lost if it found nothing: all keys exist.",
    after_long_help = "Examples:\n  \
        switchyard-lab reproduce bloom --quick\n  \
        switchyard-lab reproduce bloom --repeat 3 --out docs/results/migration-protocols.md"
)]
struct Bloom {
    /// A tenth of the keys and queries: some ten minutes
    #[arg(long)]
    quick: bool,

    /// Keys, all of which move [default: 500000; with --quick: 50000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1000..=100_000_000))]
    keys: Option<u64>,

    /// Approximate number of queries during the moves [default: 750000; with --quick: 75000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1000..))]
    queries: Option<u64>,

    /// Queries per second; the moves are paced to end with the queries
    #[arg(long, value_name = "N", default_value_t = 8000)]
    rate: u32,

    /// Connections of the load
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    connections: u32,

    #[command(flatten)]
    shared: Shared,
}

/// A switch with a cache node in front of 128 backends, by simulation (SwitchKV, NSDI 2016, section 5)
#[derive(Debug, Args)]
#[command(
    long_about = "steady: throughput with and without the cache, by its size, the share of writes and the number of backends (tables 1 and 2, figures 9 to 14). \
        changes: throughput while the popularity of keys changes (figures 15 to 19). policies: the rules of admission, ours and the published ones. \
        parameters: other values of those that the paper does not state.\n\n\
        Neither a router nor servers are started. The results depend on the seeds only, and are the same on each machine.",
    after_long_help = "Examples:\n  \
        switchyard-lab reproduce switchkv --smoke                                        in seconds\n  \
        switchyard-lab reproduce switchkv --only steady\n  \
        switchyard-lab reproduce switchkv --keep docs/results/data --out docs/results/switchkv.md"
)]
struct Switchkv {
    /// Only these experiments [default: all]
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = switchkv::EXPERIMENTS)]
    only: Vec<String>,

    /// Seeds; the tables show median, minimum and maximum
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    seeds: u32,

    /// Toy size: shows that each experiment works
    #[arg(long, conflicts_with_all = ["seeds", "out"])]
    smoke: bool,

    /// Folder of results [default: reproduce-results; with --smoke: none is stored]
    #[arg(long, value_name = "FOLDER")]
    keep: Option<PathBuf>,

    /// Rewrite the sections in this document, and their figures in the same folder
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

impl Switchkv {
    fn conduct(&self, stop: Arc<AtomicBool>, temporary: &Path) -> Conduct {
        let default = if self.smoke { temporary.to_owned() } else { PathBuf::from("reproduce-results") };
        Conduct {
            switchyard: PathBuf::new(),
            repeat: if self.smoke { 1 } else { self.seeds },
            timeout: Duration::ZERO,
            keep: self.keep.clone().unwrap_or(default),
            runs_max: if self.smoke { 12 } else { usize::MAX },
            attempts: 1,
            is_capped: false,
            deadline: None,
            out: self.out.clone(),
            command_line: typed(),
            stop,
        }
    }

    fn run(&self, stop: Arc<AtomicBool>) -> anyhow::Result<()> {
        let temporary = tempfile::tempdir().context("cannot create a temporary folder")?;
        switchkv::run(&switchkv::Settings {
            conduct: self.conduct(stop, temporary.path()),
            only: self.only.clone(),
            is_toy: self.smoke,
        })
    }
}

pub(super) fn run(arguments: &Arguments, stop: Arc<AtomicBool>) -> anyhow::Result<()> {
    match &arguments.what {
        What::All(of) => of.run(stop),
        What::Netmigrate(of) => netmigrate::run(&of.settings(stop)?),
        What::Tuning(of) => tuning::run(&tuning::Settings {
            conduct: of.shared.research(stop)?,
            load: of.load.load(),
            writes_percent: of.writes,
            source_cpu: of.source_cpu.0,
            target_cpu: of.target_cpu.0,
        }),
        What::Makris(of) => makris::run(&makris::Settings {
            conduct: of.shared.research(stop)?,
            cpu: of.cpu,
            clients: of.clients as usize,
            of_knee: of.of_knee.clone(),
            phase: of.phase,
            rates_max: 40,
        }),
        What::Alone(of) => alone::run(&alone::Settings {
            conduct: of.shared.conduct(stop)?,
            cpu: of.cpu,
            connections: of.connections as usize,
            change: of.change,
            changes: of.changes,
        }),
        What::Autoscaling(of) => autoscaling::run(&autoscaling::Settings {
            conduct: of.shared.conduct(stop)?,
            cpu: of.cpu,
            join_cpu: of.join_cpu.0,
            connections: of.connections as usize,
            phase: of.phase,
            keys: of.keys,
            fill_rate: 1000.0,
            nodes: 6,
            only: of.only.clone(),
        }),
        What::Pool(of) => pool::run(&pool::Settings {
            conduct: of.shared.conduct(stop)?,
            keys: of.keys,
            rate: f64::from(of.rate),
            connections: of.connections as usize,
            control: of.control,
        }),
        What::Switchkv(of) => of.run(stop),
        What::Bloom(of) => {
            ensure!(of.rate > 0, "--rate 0: without queries nothing can be lost");
            let (keys, queries) = if of.quick { (50_000, 75_000) } else { (500_000, 750_000) };
            bloom::run(&bloom::Settings {
                conduct: of.shared.research(stop)?,
                scale: Scale {
                    keys: of.keys.unwrap_or(keys),
                    value: 2000,
                    queries: of.queries.unwrap_or(queries),
                    rate: f64::from(of.rate),
                    connections: of.connections as usize,
                    targets: 5,
                },
            })
        }
    }
}

impl Netmigrate {
    fn settings(&self, stop: Arc<AtomicBool>) -> anyhow::Result<netmigrate::Settings> {
        let quick = self.load.quick;
        let shares = |given: &[Share]| given.iter().map(|share| share.0).collect::<Vec<_>>();
        let mut writes = self.writes.clone();
        if writes.is_empty() {
            writes = if quick { vec![0.0, 10.0] } else { vec![0.0, 5.0, 10.0, 20.0, 30.0] };
        }
        let mut source_cpu = shares(&self.source_cpu);
        if source_cpu.is_empty() {
            source_cpu = if quick { vec![Some(0.25), Some(0.1)] } else { vec![Some(0.25), Some(0.175), Some(0.1)] };
        }
        let is_safe = |way: &String| WAYS.iter().any(|known| known.name == way && !known.loses_keys());
        let only_safe = !self.only.is_empty() && self.only.iter().all(is_safe);
        Ok(netmigrate::Settings {
            conduct: if only_safe { self.shared.conduct(stop)? } else { self.shared.research(stop)? },
            load: self.load.load(),
            writes,
            source_cpu,
            target_cpu: shares(&self.target_cpu),
            only: self.only.clone(),
            figures: if self.curves { Figures::Curves } else { Figures::Grid },
        })
    }
}
