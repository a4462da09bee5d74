//! The `switchyard-lab` command: parses the command line, runs one verb, and converts its result to an exit code.

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
