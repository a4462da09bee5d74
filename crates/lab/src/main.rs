//! The `switchyard-lab` command: reads the command line, runs one verb, and turns how it went into an exit code.

mod cli;

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    match cli::run(&cli::Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // All causes on one line, outermost first.
            eprintln!("switchyard-lab: {error:#}");
            ExitCode::FAILURE
        }
    }
}
