//! `switchyard-lab together`: cost of keys of several nodes in one command.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::Args;
use switchyard_lab::product;
use switchyard_lab::together::{self, Settings};

use super::typed;

/// Cost of keys of several nodes in one command: first and later uses
#[derive(Debug, Args)]
#[command(
    long_about = "Measure how fast the router brings keys of two nodes together for a command, and what later commands with these keys cost, \
        compared with keys that a hash tag keeps together. Both alternate in one run.\n\n\
        Takes some minutes. Nothing else should run on the machine.",
    after_long_help = "Examples:\n  \
        switchyard-lab together --pairs 20 --groups 50 --seconds 1 --rounds 1   a functional check (its numbers mean nothing)\n  \
        switchyard-lab together --out docs/results/any-keys.md"
)]
pub(super) struct Arguments {
    /// Pairs of keys whose first use is timed
    #[arg(long, value_name = "N", default_value_t = 200)]
    pairs: u64,

    /// Groups of ten keys for the measured rate of first uses
    #[arg(long, value_name = "N", default_value_t = 2000)]
    groups: u64,

    /// Duration of each measured load, seconds; the load before it takes twice as long
    #[arg(long, value_name = "N", default_value_t = 15)]
    seconds: u64,

    /// Rounds; each measures all ways
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,

    /// The router to measure [default: switchyard, in the folder of this program]
    #[arg(long, value_name = "PATH")]
    switchyard: Option<PathBuf>,

    /// Rewrite the section in this document
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Measures.
pub(super) fn run(arguments: &Arguments, stop: Arc<AtomicBool>) -> anyhow::Result<()> {
    together::run(&Settings {
        switchyard: product::find(arguments.switchyard.as_deref())?,
        pairs: arguments.pairs.max(1),
        groups: arguments.groups.max(1),
        seconds: arguments.seconds.max(1),
        rounds: arguments.rounds.max(1),
        out: arguments.out.clone(),
        command_line: typed(),
        stop,
    })
}
