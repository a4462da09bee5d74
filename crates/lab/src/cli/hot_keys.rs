//! `switchyard-lab hot-keys`: the gain from hot copies.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::Args;
use switchyard_lab::hot_keys::{self, Part};
use switchyard_lab::product;

use super::typed;

/// Gain from hot copies, and their cost if no key is hot
#[derive(Debug, Args)]
#[command(
    long_about = "Four measurements, in interleaved rounds of one run: one hot key through the router and at \
        redis-server itself; a fleet of capped servers under a skewed load, with copies and without; 200 keys that become hot at \
        once; and the cost of the router without hot keys, with copies on and off.\n\n\
        Takes about half an hour. Nothing else should run on the machine. Capped servers need root, for cgroups.",
    after_long_help = "Examples:\n  \
        switchyard-lab hot-keys --out docs/results/hot-keys.md\n  \
        switchyard-lab hot-keys --part one --quick       a functional check (its numbers mean nothing)"
)]
pub(super) struct Arguments {
    /// Only this part; may be repeated [default: all]
    #[arg(long, value_enum)]
    part: Vec<Part>,

    /// Few rounds and short measurements, to check that everything works
    #[arg(long)]
    quick: bool,

    /// The router to measure [default: switchyard, in the folder of this program]
    #[arg(long, value_name = "PATH")]
    switchyard: Option<PathBuf>,

    /// Rewrite the tables in this document
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Measures.
pub(super) fn run(arguments: &Arguments, stop: Arc<AtomicBool>) -> anyhow::Result<()> {
    let all = [Part::One, Part::Fleet, Part::Surge, Part::Idle];
    hot_keys::run(&hot_keys::Settings {
        switchyard: product::find(arguments.switchyard.as_deref())?,
        parts: if arguments.part.is_empty() { all.to_vec() } else { arguments.part.clone() },
        quick: arguments.quick,
        out: arguments.out.clone(),
        command_line: typed(),
        stop,
    })
}
