//! `switchyard-lab clusters`: the router in front of a Redis or Valkey Cluster.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::Args;
use switchyard_lab::{clusters, product};

use super::typed;

/// Measure the router in front of a cluster: CPU per request, and requests during changes
#[derive(Debug, Args)]
#[command(
    long_about = "Start a cluster of three primaries with a replica each, and three plain servers. Measure the CPU per request of the \
        router in front of both, and of Envoy (PyPI) in front of the cluster. Then send requests at half of the achieved rate while \
        slots move, a replica takes over, a primary is killed, and two routers are upgraded.\n\n\
        Takes about ten minutes. Nothing else should run on the machine.",
    after_long_help = "Examples:\n  \
        switchyard-lab clusters --out docs/results/clusters.md\n  \
        switchyard-lab clusters --quick            a functional check (two minutes; its numbers mean nothing)\n  \
        switchyard-lab clusters --server valkey-server"
)]
pub(super) struct Arguments {
    /// Rounds of the measurement of CPU [default: 5; with --quick: 1]
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,

    /// Few requests, to check that everything works
    #[arg(long)]
    quick: bool,

    /// Server program [default: redis-server or valkey-server on PATH]
    #[arg(long, value_name = "PATH")]
    server: Option<PathBuf>,

    /// The router to measure [default: switchyard, in the folder of this program]
    #[arg(long, value_name = "PATH")]
    switchyard: Option<PathBuf>,

    /// Do not install Envoy
    #[arg(long)]
    no_install: bool,

    /// Rewrite the tables in this document
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Measures.
pub(super) fn run(arguments: &Arguments, stop: Arc<AtomicBool>) -> anyhow::Result<()> {
    clusters::run(&clusters::Settings {
        switchyard: product::find(arguments.switchyard.as_deref())?,
        server: arguments.server.clone(),
        rounds: arguments.rounds.unwrap_or(if arguments.quick { 1 } else { 5 }),
        requests: if arguments.quick { 20_000 } else { 200_000 },
        seconds: if arguments.quick { 5 } else { 20 },
        install: !arguments.no_install,
        out: arguments.out.clone(),
        command_line: typed(),
        stop,
    })
}
