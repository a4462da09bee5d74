//! `switchyard check-config`: prints the effective configuration of `serve`, or all mistakes.

use clap::Args;

use super::Failure;
use super::flags::ConfigFlags;
use crate::config::{self, Config, Problems};

/// Check a configuration and show the effective values
#[derive(Debug, Args)]
#[command(
    long_about = "Check a configuration, and print every value that `switchyard serve` would run with. Each has a comment with its origin: a line of the \
        file, a flag, or the default. Secrets are printed as ***. All mistakes are reported at once.\n\n\
        Give it the same file and flags as serve. It starts nothing, and connects to no node. It looks up host names and reads the files of secrets, as a start \
        or a reload does.",
    after_long_help = "Examples:\n  \
        switchyard check-config -c /etc/switchyard.toml\n  \
        switchyard check-config -c /etc/switchyard.toml --workers 4    with the flags of serve\n  \
        switchyard check-config --example > switchyard.toml            a file with every key, to start from\n\n\
        Exit codes: 0 valid; 2 invalid: every problem is on stderr with its line"
)]
pub(crate) struct Arguments {
    #[command(flatten)]
    flags: ConfigFlags,

    /// Print a configuration file with every key, its default and its meaning
    #[arg(long)]
    example: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    if arguments.example {
        print!("{}", config::example());
        return Ok(());
    }
    print(&arguments.flags)
}

/// Prints the effective configuration, also for `serve --test-conf`.
pub(crate) fn print(flags: &ConfigFlags) -> Result<(), Failure> {
    let sources = flags.sources();
    match sources.several_pools()? {
        Some(pools) => pools.into_iter().try_for_each(|(name, config)| {
            println!("# pool {name}");
            print_one(config)
        }),
        None => print_one(sources.read()?),
    }
}

fn print_one(mut config: Config) -> Result<(), Failure> {
    config.prefer_log_level(std::env::var("RUST_LOG").ok().as_deref());
    let resolved = config.resolve(|_| None)?.require_resolved()?;
    // The number of nodes can be checked without the state directory, which a running router has locked. A cluster shows
    // its members itself.
    if !config.is_of_cluster() {
        switchyard_policy::topology::Topology::even(&config.node_names())
            .map_err(|error| Problems(vec![config::Problem { place: None, text: error.to_string() }]))?;
    }
    for warning in resolved.warnings() {
        eprintln!("warning: {warning}");
    }
    print!("{}", config::render(&config));
    Ok(())
}
