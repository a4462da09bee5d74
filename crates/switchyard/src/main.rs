//! The `switchyard` command: reads the command line, runs one subcommand, and turns how it went into an exit code.

mod cli;
mod config;
mod doctor;
mod serve;

use std::process::ExitCode;
use std::{panic, process};

use switchyard_router::CountedHeap;

use crate::cli::Cli;

/// The system's allocator keeps the freed memory of large values in the arena of the thread that freed it. jemalloc
/// returns it, and workers do not contend for it. Allocated bytes are counted for `memory-max`.
#[global_allocator]
static ALLOCATOR: CountedHeap<tikv_jemallocator::Jemalloc> = CountedHeap(tikv_jemallocator::Jemalloc);

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

fn main() -> ExitCode {
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
