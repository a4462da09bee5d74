//! `switchyard check-config`: what `serve` would run with, or everything that is wrong with it.

use clap::Args;

use super::Failure;
use super::flags::ConfigFlags;
use crate::config::{self, Problems};

/// Check a configuration and show what it comes to
#[derive(Debug, Args)]
#[command(
    long_about = "Check a configuration and show what it comes to: every value with where it came from (file and line, flag, \
        or default). Secrets are shown as ***. Takes the flags of serve.\n\n\
        Host names are looked up and secrets are read, so what passes here is what a reload would take.",
    after_long_help = "Examples:\n  \
        switchyard check-config -c /etc/switchyard.toml\n  \
        switchyard check-config -c /etc/switchyard.toml --workers 4    with the flags that serve gets\n  \
        switchyard check-config --example > switchyard.toml            a file with every key, to start from\n\n\
        Exit codes: 0 good; 2 wrong, every problem is on stderr with its line"
)]
pub(crate) struct Arguments {
    #[command(flatten)]
    flags: ConfigFlags,

    /// Print a configuration file with every key, its default and its meaning
    #[arg(long)]
    example: bool,
}

/// Prints the effective configuration.
pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    if arguments.example {
        print!("{}", config::example());
        return Ok(());
    }
    print(&arguments.flags)
}

/// The same for `serve --test-conf`.
pub(crate) fn print(flags: &ConfigFlags) -> Result<(), Failure> {
    let mut config = flags.sources().read()?;
    config.prefer_log_level(std::env::var("RUST_LOG").ok().as_deref());
    let resolved = config.resolve(|_| None)?;
    // More than the number of nodes can be known without the state directory, which a running router has locked.
    switchyard_policy::topology::Topology::even(&config.node_names())
        .map_err(|error| Problems(vec![config::Problem { place: None, text: error.to_string() }]))?;
    for warning in &resolved.warnings {
        eprintln!("warning: {warning}");
    }
    print!("{}", config::render(&config));
    Ok(())
}
