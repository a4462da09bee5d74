//! The report on auto-scaling of key-value stores (Raman, IIT Kanpur): its experiments behind Switchyard, and a load
//! that rises and falls.
//!
//! - [`nodes`]: one to six nodes without limits, with little processor time, and with little memory.
//! - [`join`]: how long a node takes to join, by the number of nodes.
//! - [`fill`]: a fleet of 6 MB nodes grows while it is filled.
//! - [`surge`]: four times the load at once, and its end. The report has no such experiment.
//!
//! The report limits containers; here a cgroup limits processor time, and `maxmemory` memory: beyond its limit the
//! report's server was swapped, ours forgets keys.

mod fill;
mod grown;
mod join;
mod nodes;
mod surge;

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use switchyard_bench::random::Popularity;

use super::Conduct;
use crate::moves::Layout;
use crate::moves::generator::{self, Keys};
use crate::moves::site::HALF;
pub(super) use join::moves_of;

/// The experiments, in their order.
pub const EXPERIMENTS: [&str; 4] = ["nodes", "join", "fill", "surge"];

/// Bytes of a value: with its key some 128, as the report's keys of 64 and values of 1 to 128 have on average.
const VALUE: usize = 104;
/// Keys, as in the report.
const KEYS: u64 = 100_000;
/// The most nodes, as in the report.
const NODES: usize = 6;
/// Memory of a node that has little of it.
const MEMORY: &str = "6mb";

/// What to measure.
#[derive(Debug, Clone)]
pub struct Settings {
    /// How.
    pub conduct: Conduct,
    /// Part of a processor that a limited server gets.
    pub cpu: f64,
    /// Connections of the load.
    pub connections: usize,
    /// The time that each phase is watched.
    pub phase: Duration,
    /// Only these of [`EXPERIMENTS`]; none: all.
    pub only: Vec<String>,
}

/// Measures what is not kept yet, prints all, and rewrites the sections of the document.
///
/// # Errors
/// If a server cannot be started, or the user interrupts.
pub fn run(settings: &Settings) -> Result<()> {
    for experiment in EXPERIMENTS {
        if !settings.only.is_empty() && !settings.only.iter().any(|only| only == experiment) {
            continue;
        }
        match experiment {
            "nodes" => nodes::run(settings)?,
            "join" => join::run(settings)?,
            "fill" => fill::run(settings)?,
            _ => surge::run(settings)?,
        }
    }
    Ok(())
}

/// Arguments of a router with one worker that neither moves nor copies keys by itself.
fn router(more: &[String]) -> Vec<String> {
    let quiet = ["--workers", "1", "--set", "planner.mode=off", "--set", "hot-copies.mode=off"].map(str::to_owned);
    quiet.into_iter().chain(more.iter().cloned()).collect()
}

/// Keys that are spread over all slots, however few there are. The slot of a key is its number's remainder, so
/// neighbours in number are a far step apart.
pub(super) fn keys(from: u64, count: u64) -> Arc<Keys> {
    const STEP: u64 = 10_127; // 16,384 by the golden ratio, and odd
    Arc::new(Keys::new((from..from + count).map(|at| at * STEP).collect(), VALUE, &Arc::new(Layout::new(HALF))))
}

/// A load of GET, and of SET for a tenth, over all keys alike. `rate`: `None` is a closed loop.
pub(super) fn load(
    entry: std::net::SocketAddr,
    keys: &Arc<Keys>,
    connections: usize,
    rate: Option<f64>,
) -> generator::Settings {
    generator::Settings {
        nodes: vec![entry],
        cluster: false,
        connections,
        rate,
        pipeline: 1,
        under_way_max: generator::UNDER_WAY_MAX,
        keys: keys.clone(),
        popularity: Popularity::uniform(keys.count() as u64),
        writes: 0.1,
        seed: 1,
    }
}
