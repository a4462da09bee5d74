//! `switchyard-lab queues`: throughput of a job queue library by placement rules.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::Args;
use switchyard_lab::product;
use switchyard_lab::queues::{self, Settings};

use super::typed;

/// Throughput of BullMQ by a placement rule, by hash tags, and on one node
#[derive(Debug, Args)]
#[command(
    long_about = "Run BullMQ behind the router, in interleaved rounds of one run: on two nodes by the rule of its preset, on two nodes with a hash tag for \
        each queue, and on one node. Needs Node.js and npm, which installs the locked packages.\n\n\
        Takes some minutes. Nothing else should run on the machine.",
    after_long_help = "Examples:\n  \
        switchyard-lab queues --jobs 1000 --rounds 1     a functional check (its numbers mean nothing)\n  \
        switchyard-lab queues --out docs/results/any-keys.md"
)]
pub(super) struct Arguments {
    /// Queues of each of the two Node.js processes
    #[arg(long, value_name = "N", default_value_t = 8)]
    queues: usize,

    /// Jobs of each process
    #[arg(long, value_name = "N", default_value_t = 20_000)]
    jobs: usize,

    /// Rounds; each measures all ways
    #[arg(long, value_name = "N", default_value_t = 5)]
    rounds: usize,

    /// Folder of the script and of the package's lock file
    #[arg(long, value_name = "DIR", default_value = "tests-clients/queues")]
    programs: PathBuf,

    /// The router to measure [default: switchyard, in the folder of this program]
    #[arg(long, value_name = "PATH")]
    switchyard: Option<PathBuf>,

    /// Rewrite the section in this document
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Measures.
pub(super) fn run(arguments: &Arguments, stop: Arc<AtomicBool>) -> anyhow::Result<()> {
    queues::run(&Settings {
        switchyard: product::find(arguments.switchyard.as_deref())?,
        programs: arguments.programs.clone(),
        queues: arguments.queues.max(1),
        jobs: arguments.jobs.max(1),
        rounds: arguments.rounds.max(1),
        out: arguments.out.clone(),
        command_line: typed(),
        stop,
    })
}
