//! `switchyard-lab moves`: what moving slots costs and whom it disturbs, beside `redis-cli --cluster reshard`.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use switchyard_bench::numbers::time_flag;
use switchyard_lab::moves::{self, Part, Settings};
use switchyard_lab::product;

use super::{typed, words};

/// Moves beside `redis-cli --cluster reshard`: how fast, and what clients notice
#[derive(Debug, Args)]
#[command(
    long_about = "Start two Redis servers with the router in front, and a Redis Cluster of two; fill both with the same keys; move half of \
        the slots from the first server to the second, by `switchyard move` and by `redis-cli --cluster reshard`; without load (how \
        fast), under load (what clients notice), and under writes to the moving slots (does it end). Also what DUMP, RESTORE and \
        UNLINK alone take, which is a floor for every way of moving.\n\n\
        Takes many minutes at full size; meanwhile nothing else should run on the machine.",
    after_long_help = "Examples:\n  \
        switchyard-lab moves --quick                      does everything work? (its numbers compare nothing)\n  \
        switchyard-lab moves --out docs/results/migration.md  everything, and into the document\n  \
        switchyard-lab moves --only fast --baseline-only  only redis-cli, and the floor"
)]
#[command(args_override_self = true)]
pub(super) struct Arguments {
    /// Keys of 64 B (of 1 KiB: a fifth, of 64 KiB: a two hundredth) [default: 1000000; with --quick: 20000]
    #[arg(long, value_name = "N")]
    keys: Option<u64>,

    /// Few keys, short times: to see whether everything works
    #[arg(long)]
    quick: bool,

    /// Only these parts: fast, unnoticed, converges, big, journal [default: all]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    only: Vec<String>,

    /// Only redis-cli and the floor, not the router's own moves
    #[arg(long)]
    baseline_only: bool,

    /// What the router's moves care about where there is a load; without one it is fast
    #[arg(long, value_name = "GOAL", default_value = "balanced")]
    goal: String,

    /// Settings of --cluster-pipeline to try; the best one is compared with
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "10,100,1000")]
    pipelines: Vec<u32>,

    /// How long the load runs before a move begins, and again after it [default: 30s; with --quick: 2s]
    #[arg(long, value_name = "TIME", value_parser = time_flag)]
    control: Option<Duration>,

    /// Share of what can be had that the load takes
    #[arg(long, value_name = "SHARE", default_value_t = 0.7)]
    load: f64,

    /// Connections of the load
    #[arg(long, value_name = "N", default_value_t = 32)]
    connections: usize,

    /// Writes per second to the moving slots, where convergence is tried
    #[arg(long, value_name = "N", default_value_t = 30_000.0)]
    writes: f64,

    /// How often convergence is tried [default: 100; with --quick: 3]
    #[arg(long, value_name = "N")]
    repeats: Option<u32>,

    /// Further flags of `serve` for the router, e.g. '--workers 2'
    #[arg(long, value_name = "FLAGS", default_value = "", hide_default_value = true)]
    serve_args: String,

    /// The router to measure [default: switchyard, beside this program]
    #[arg(long, value_name = "PATH")]
    switchyard: Option<PathBuf>,

    /// Rewrite the section in this document
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Measures. What could not be measured is an error at the end, after everything else.
pub(super) fn run(arguments: &Arguments, stop: Arc<AtomicBool>) -> anyhow::Result<()> {
    let quick = arguments.quick;
    let part = |name: &String| {
        let found = Part::ALL.iter().find(|(_, n)| n == name).map(|(part, _)| *part);
        found.with_context(|| format!("no part \"{name}\"; there are {}", Part::ALL.map(|(_, n)| n).join(", ")))
    };
    let only = arguments.only.iter().map(part).collect::<anyhow::Result<Vec<_>>>()?;
    let results = moves::run(&Settings {
        switchyard: product::find(arguments.switchyard.as_deref())?,
        serve_args: words(&arguments.serve_args),
        goal: arguments.goal.clone(),
        parts: if only.is_empty() { Part::ALL.map(|(part, _)| part).to_vec() } else { only },
        keys: arguments.keys.unwrap_or(if quick { 20_000 } else { 1_000_000 }),
        baseline_only: arguments.baseline_only,
        pipelines: arguments.pipelines.clone(),
        control: arguments.control.unwrap_or(Duration::from_secs(if quick { 2 } else { 30 })),
        load: arguments.load,
        connections: arguments.connections,
        writes: arguments.writes,
        repeats: arguments.repeats.unwrap_or(if quick { 3 } else { 100 }),
        out: arguments.out.clone(),
        command_line: typed(),
        stop,
    })?;
    anyhow::ensure!(results.failures().is_empty(), "{} measurements failed; see above", results.failures().len());
    Ok(())
}
