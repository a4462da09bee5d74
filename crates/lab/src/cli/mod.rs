//! The command line: one module for each verb, with its arguments, help and action.

mod clusters;
mod history;
mod hot_keys;
mod moves;
mod peers;
mod queues;
mod reproduce;
mod sim;
mod soak;
mod together;

use clap::{Parser, Subcommand};
use switchyard_bench::interrupt;

/// Measurements and trials of Switchyard, for its developers.
#[derive(Debug, Parser)]
#[command(
    name = "switchyard-lab",
    version,
    propagate_version = true,
    max_term_width = 100,
    long_about = "Measurements and tests of Switchyard, for its developers: comparison with other proxies and with moves of Redis Cluster, histories, \
        cycles of faults, and the simulator of moves.\n\n\
        It is not needed to run the router, and is in no package. It may install the proxies that it measures.",
    after_long_help = "Exit codes:\n  \
        0  it worked, and nothing was found\n  \
        1  it failed or found something: the message names the problem, the place and the remedy\n  \
        2  the command line is wrong"
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Peers(peers::Arguments),
    Moves(moves::Arguments),
    Queues(queues::Arguments),
    Together(together::Arguments),
    Clusters(clusters::Arguments),
    Reproduce(reproduce::Arguments),
    HotKeys(hot_keys::Arguments),
    History(history::Arguments),
    Soak(soak::Arguments),
    Sim(sim::Arguments),
}

/// Runs the verb of the command line.
pub(crate) fn run(cli: &Cli) -> anyhow::Result<()> {
    match &cli.verb {
        Verb::Peers(arguments) => peers::run(arguments, interrupt::flag()?),
        Verb::Moves(arguments) => moves::run(arguments, interrupt::flag()?),
        Verb::Queues(arguments) => queues::run(arguments, interrupt::flag()?),
        Verb::Together(arguments) => together::run(arguments, interrupt::flag()?),
        Verb::Clusters(arguments) => clusters::run(arguments, interrupt::flag()?),
        Verb::Reproduce(arguments) => reproduce::run(arguments, interrupt::flag()?),
        Verb::HotKeys(arguments) => hot_keys::run(arguments, interrupt::flag()?),
        Verb::History(arguments) => history::run(arguments, &*interrupt::flag()?),
        Verb::Soak(arguments) => soak::run(arguments, interrupt::flag()?),
        Verb::Sim(arguments) => sim::run(arguments),
    }
}

fn words(flags: &str) -> Vec<String> {
    flags.split_ascii_whitespace().map(str::to_owned).collect()
}

/// Returns the command line, without the folders of the user's machine.
fn typed() -> String {
    let short = |arg: String| match arg.rsplit_once('/') {
        Some((folder, name)) if folder.starts_with('/') => name.to_owned(),
        _ => arg,
    };
    std::env::args().map(short).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::Cli;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
