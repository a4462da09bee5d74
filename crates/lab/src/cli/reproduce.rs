//! `switchyard-lab reproduce`: what the papers measured, on this machine.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::ensure;
use clap::{Args, Subcommand};
use switchyard_bench::numbers::time_flag;
use switchyard_lab::product;
use switchyard_lab::reproduce::{self, PROTOCOLS, Settings};

use super::typed;

/// What the papers measured, on this machine
#[derive(Debug, Args)]
pub(super) struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Netmigrate(Netmigrate),
}

/// All protocols of migration side by side, under the same load (NetMigrate, FAST 2024, section 6)
#[derive(Debug, Args)]
#[command(
    long_about = "For each protocol, safe and as published: two Redis servers with the router in front, keys of 64 bytes, Zipf 0.99, one request under way on each \
        connection; then everything that the first server has moves to the second. Replies are checked: the last columns count those that were wrong.\n\n\
        Results are kept in a file, so that an interrupted run goes on where it was. Nothing else should run on the machine meanwhile.",
    after_long_help = "Examples:\n  \
        switchyard-lab reproduce netmigrate --quick                       does everything work?\n  \
        switchyard-lab reproduce netmigrate --source-cpu 0.5,0.35,0.2 --target-cpu 0.5\n  \
        switchyard-lab reproduce netmigrate --out docs/results/migration-protocols.md"
)]
struct Netmigrate {
    /// Few keys and one cell: to see whether everything works
    #[arg(long)]
    quick: bool,

    /// Keys, all of which move [default: 500000; with --quick: 20000]
    #[arg(long, value_name = "N")]
    keys: Option<u64>,

    /// Shares of writes, in percent [default: 0,5,10,20,30; with --quick: 10]
    #[arg(long, value_name = "PERCENT", value_delimiter = ',')]
    writes: Vec<f64>,

    /// What the source may use of a processor, in each cell (needs root) [default: not limited]
    #[arg(long, value_name = "SHARE", value_delimiter = ',')]
    source_cpu: Vec<f64>,

    /// What the target may use of a processor (needs root) [default: not limited]
    #[arg(long, value_name = "SHARE")]
    target_cpu: Option<f64>,

    /// Connections of the load
    #[arg(long, value_name = "N", default_value_t = 32)]
    connections: usize,

    /// How long the load runs before a move begins [default: 5s; with --quick: 1s]
    #[arg(long, value_name = "TIME", value_parser = time_flag)]
    control: Option<Duration>,

    /// A move may take so long at most
    #[arg(long, value_name = "TIME", value_parser = time_flag, default_value = "15m")]
    patience: Duration,

    /// Only these protocols [default: all]
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = PROTOCOLS.map(|(name, _)| name))]
    only: Vec<String>,

    /// Where results are kept
    #[arg(long, value_name = "FILE", default_value = "reproduce-netmigrate.jsonl")]
    keep: PathBuf,

    /// The router to measure [default: switchyard, beside this program]
    #[arg(long, value_name = "PATH")]
    switchyard: Option<PathBuf>,

    /// Rewrite the section in this document
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub(super) fn run(arguments: &Arguments, stop: Arc<AtomicBool>) -> anyhow::Result<()> {
    let What::Netmigrate(arguments) = &arguments.what;
    let quick = arguments.quick;
    let shares = arguments.source_cpu.iter().chain(&arguments.target_cpu);
    ensure!(shares.clone().all(|share| (0.01..=64.0).contains(share)), "a share of a processor is between 0.01 and 64");
    ensure!(arguments.writes.iter().all(|share| (0.0..=100.0).contains(share)), "a share of writes is between 0 and 100 percent");
    let writes = match &arguments.writes[..] {
        [] if quick => vec![10.0],
        [] => vec![0.0, 5.0, 10.0, 20.0, 30.0],
        some => some.to_vec(),
    };
    reproduce::netmigrate(&Settings {
        switchyard: product::find(arguments.switchyard.as_deref())?,
        keys: arguments.keys.unwrap_or(if quick { 20_000 } else { 500_000 }).max(1000),
        writes: writes.into_iter().map(|percent| percent / 100.0).collect(),
        source_cpu: arguments.source_cpu.clone(),
        target_cpu: arguments.target_cpu,
        connections: arguments.connections.max(1),
        control: arguments.control.unwrap_or(Duration::from_secs(if quick { 1 } else { 5 })),
        patience: arguments.patience,
        only: arguments.only.clone(),
        keep: arguments.keep.clone(),
        out: arguments.out.clone(),
        command_line: typed(),
        stop,
    })
}
