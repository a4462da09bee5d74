//! `switchyard demo`: demonstrates Switchyard on this machine with real servers, the real router and a checked load,
//! without any setup.
//!
//! [`stage`] starts the processes, [`loads`] has the clients, [`story`] the events, and [`narrator`] and [`svg`] the
//! output.

mod loads;
mod narrator;
mod stage;
mod story;
mod svg;

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;
use switchyard_bench::interrupt;

use self::narrator::Narrator;
use self::stage::Stage;
use super::Failure;

/// Show what Switchyard does: a story of six acts, with real Redis servers on this machine
#[derive(Debug, Args)]
#[command(
    long_about = "Start two Redis (or Valkey) servers and the router in a temporary folder, drive a load through the router, and report what \
        happens: a hot key is served by the router, another key is moved, a server is started, one is killed and returns, one is \
        drained and stopped. The planner, the hot copies and the autoscaler of the router do that on their own; only the pauses between their \
        checks are short.\n\n\
        Every reply is checked: each key has one writer, so every expected reply is known. The demo fails on a wrong value, a stale value, or an error for a \
        key of a running server. Nothing is left behind: the servers end with the demo, and their folder is removed.",
    after_long_help = "Examples:\n  \
        switchyard demo                   the story, about a minute\n  \
        switchyard demo --hold            keep it running afterwards, to try it with redis-cli\n  \
        switchyard demo --rate 500        on a slow machine\n  \
        switchyard demo --svg demo.svg    and a picture of it\n\n\
        Exit codes: 0 every act succeeded, and every reply was correct; 1 otherwise, or a start failed"
)]
pub(crate) struct Arguments {
    /// Keep servers and router running after the story, until Ctrl-C
    #[arg(long)]
    hold: bool,

    /// Requests per second at the start; later rates are in proportion
    #[arg(long, value_name = "N", default_value_t = 2000, value_parser = clap::value_parser!(u32).range(100..=100_000))]
    rate: u32,

    /// Port of the router [default: 6380, or a free port if that is in use]
    #[arg(long, value_name = "PORT")]
    port: Option<u16>,

    /// Port of the router's admin API [default: 6381, or a free port if that is in use]
    #[arg(long, value_name = "PORT")]
    admin_port: Option<u16>,

    /// Number of worker threads of the router
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    workers: u16,

    /// Number of connections of each part of the load
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u16).range(2..=10_000))]
    connections: u16,

    /// Write the story as a picture of a terminal
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let stop = interrupt::flag()?;
    let mut narrator = Narrator::start();
    let mut stage = Stage::set(arguments, &mut narrator)?;
    let told = story::run(&mut stage, &mut narrator, arguments, &stop);
    // Also after a failure: the router's last log lines may have the reason.
    let ended = stage.strike();
    narrator.finish();
    let told = told.map(|()| match &arguments.svg {
        Some(file) => std::fs::write(file, svg::picture(narrator.lines()))
            .with_context(|| format!("cannot write {}", file.display())),
        None => Ok(()),
    })?;
    told?;
    ended?;
    Ok(())
}
