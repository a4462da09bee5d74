//! `switchyard-lab moves`: cost of moving slots and effect on clients, compared with `redis-cli --cluster reshard`.

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

/// Compare moves with `redis-cli --cluster reshard` and `CLUSTER MIGRATESLOTS`: speed, and effect on clients
#[derive(Debug, Args)]
#[command(
    long_about = "Start two Redis servers with the router in front, and a Redis Cluster of two; fill both with the same keys; move half of \
        the slots from the first server to the second, by `switchyard move` and by `redis-cli --cluster reshard`: without load \
        (speed), under load (effect on clients), and under writes to the moving slots (whether it ends). With servers that have it, also by \
        CLUSTER MIGRATESLOTS. Also the cost of DUMP, RESTORE and \
        UNLINK alone, which is a floor for every way to move, and an adoption of placement rules.\n\n\
        Takes many minutes at full size. Nothing else should run on the machine.",
    after_long_help = "Examples:\n  \
        switchyard-lab moves --quick                      a functional check (its numbers mean nothing)\n  \
        switchyard-lab moves --out docs/results/migration.md  everything, written to the document\n  \
        switchyard-lab moves --only fast --baseline-only  only redis-cli, and the floor\n  \
        switchyard-lab moves --only adoption --out docs/results/any-keys.md  adoption of placement rules"
)]
#[command(args_override_self = true)]
pub(super) struct Arguments {
    /// Keys of 64 B (of 1 KiB: a fifth, of 64 KiB: a two hundredth) [default: 1000000; with --quick: 20000]
    #[arg(long, value_name = "N")]
    keys: Option<u64>,

    /// Few keys and short times, to check that everything works
    #[arg(long)]
    quick: bool,

    /// Only these parts: fast, unnoticed, converges, big, journal, adoption [default: all]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    only: Vec<String>,

    /// Only redis-cli and the floor, not the router's own moves
    #[arg(long)]
    baseline_only: bool,

    /// Goal of the router's moves under load; without load it is fast
    #[arg(long, value_name = "GOAL", default_value = "balanced")]
    goal: String,

    /// Values of --cluster-pipeline to try; the best one is used in the comparison
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "10,100,1000")]
    pipelines: Vec<u32>,

    /// Duration of the load before a move, and again after it [default: 30s; with --quick: 2s]
    #[arg(long, value_name = "TIME", value_parser = time_flag)]
    control: Option<Duration>,

    /// Load as a share of the capacity
    #[arg(long, value_name = "SHARE", default_value_t = 0.7)]
    load: f64,

    /// Connections of the load
    #[arg(long, value_name = "N", default_value_t = 32)]
    connections: usize,

    /// Writes per second to the moving slots, in convergence tests
    #[arg(long, value_name = "N", default_value_t = 30_000.0)]
    writes: f64,

    /// Number of convergence tests [default: 100; with --quick: 3]
    #[arg(long, value_name = "N")]
    repeats: Option<u32>,

    /// Further flags of `serve` for the router, e.g. '--workers 2'
    #[arg(long, value_name = "FLAGS", default_value = "", hide_default_value = true)]
    serve_args: String,

    /// The router to measure [default: switchyard, in the folder of this program]
    #[arg(long, value_name = "PATH")]
    switchyard: Option<PathBuf>,

    /// The server program [default: redis-server or valkey-server of PATH]; Valkey 9 is also measured with CLUSTER
    /// MIGRATESLOTS
    #[arg(long, value_name = "PATH")]
    server: Option<PathBuf>,

    /// Rewrite the section in this document
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Measures. Failed measurements are an error at the end, after everything else.
pub(super) fn run(arguments: &Arguments, stop: Arc<AtomicBool>) -> anyhow::Result<()> {
    let quick = arguments.quick;
    let part = |name: &String| {
        let found = Part::ALL.iter().find(|(_, n)| n == name).map(|(part, _)| *part);
        found.with_context(|| format!("no part \"{name}\"; available: {}", Part::ALL.map(|(_, n)| n).join(", ")))
    };
    let only = arguments.only.iter().map(part).collect::<anyhow::Result<Vec<_>>>()?;
    let results = moves::run(&Settings {
        switchyard: product::find(arguments.switchyard.as_deref())?,
        server: arguments.server.clone(),
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
