//! The product without its `main`: the command line, the configuration, the wiring of a router, and doctor.
//!
//! A crate of its own, because Cargo optimizes a whole crate for size or for speed. No client command passes through
//! this code, but the level of the last crate, `switchyard`, also applies to the router's code at link time.

mod cli;
mod config;
mod doctor;
mod serve;

use std::process::ExitCode;
use std::{panic, process};

use crate::cli::Cli;

/// Commit of the build, or `unknown`; with `-dirty` if files had changed since.
pub const COMMIT: &str = env!("SWITCHYARD_COMMIT");

/// Exits quietly when stdout is closed, as in `switchyard nodes | head`: `println!` would panic.
fn end_without_readers() {
    let usual = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        if info
            .payload_as_str()
            .is_some_and(|text| text.starts_with("failed printing to stdout") && text.contains("Broken pipe"))
        {
            process::exit(141);
        }
        usual(info);
    }));
}

/// Reads the command line, runs a subcommand, and returns the exit code.
#[must_use]
pub fn run() -> ExitCode {
    end_without_readers();
    let cli = Cli::read();
    let ended = cli::run(cli);
    serve::flush_log();
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("{failure}");
            ExitCode::from(failure.code())
        }
    }
}
