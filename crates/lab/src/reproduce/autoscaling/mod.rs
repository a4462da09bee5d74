//! Experiments of the report on auto-scaling of key-value stores (Raman, IIT Kanpur) with Switchyard, and a load that
//! rises and falls.
//!
//! - [`nodes`]: one to six nodes without limits, with little processor time, and with little memory.
//! - [`join`]: time of a node's join, by the number of nodes.
//! - [`fill`]: a fleet of 6 MB nodes grows while it is filled.
//! - [`queries`]: time of 10 to 100,000 queries, also behind nutcracker.
//! - [`ramp`]: a fleet grows with its load, by the response time.
//! - [`surge`]: four times the load at once, and its end. The report has no such experiment.
//!
//! The report limits containers; here a cgroup limits processor time, and `maxmemory` memory. Beyond its limit the
//! report's server swapped; ours evicts keys.

pub(super) mod fill;
mod grown;
pub(super) mod join;
pub(super) mod nodes;
pub(super) mod queries;
pub(super) mod ramp;
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

/// Names of the experiments, in order.
pub const EXPERIMENTS: [&str; 6] = ["nodes", "join", "fill", "queries", "ramp", "surge"];

/// Bytes of a value: with its key about 128, the mean of the report's keys of 64 and values of 1 to 128.
const VALUE: usize = 104;
/// Keys, as in the report.
pub(super) const KEYS: u64 = 100_000;
/// Maximum number of nodes, as in the report.
pub(super) const NODES: usize = 6;
/// Memory of a small node.
const MEMORY: &str = "6mb";

/// Settings of the experiments.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Common settings.
    pub conduct: Conduct,
    /// Share of a processor for a limited server.
    pub cpu: f64,
    /// Share of a processor for each server of the experiment join; `None` for no limit.
    pub join_cpu: Option<f64>,
    /// Connections of the load.
    pub connections: usize,
    /// Duration of each phase.
    pub phase: Duration,
    /// Number of keys.
    pub keys: u64,
    /// Keys written per second while a fleet is filled.
    pub fill_rate: f64,
    /// Maximum number of nodes.
    pub nodes: usize,
    /// Names of [`EXPERIMENTS`] to do; empty for all.
    pub only: Vec<String>,
}

/// Does the missing measurements, prints all, and rewrites the sections of the document.
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
            "queries" => queries::run(settings)?,
            "ramp" => ramp::run(settings)?,
            _ => surge::run(settings)?,
        }
    }
    Ok(())
}

/// Returns arguments of a router with one worker that neither moves nor copies keys by itself.
fn router(more: &[String]) -> Vec<String> {
    let quiet = ["--workers", "1", "--set", "planner.mode=off", "--set", "hot-copies.mode=off"].map(str::to_owned);
    quiet.into_iter().chain(more.iter().cloned()).collect()
}

/// Returns keys that are spread over all slots, however few they are. The slot of a key is its number's remainder, so
/// neighbours are far apart.
pub(super) fn keys(from: u64, count: u64) -> Arc<Keys> {
    const STEP: u64 = 10_127; // 16,384 by the golden ratio, and odd
    Arc::new(Keys::new((from..from + count).map(|at| at * STEP).collect(), VALUE, &Arc::new(Layout::new(HALF))))
}

/// Returns a load of 90 % GET and 10 % SET over all keys equally. A `rate` of `None` is a closed loop.
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
        in_flight_max: generator::IN_FLIGHT_MAX,
        keys: keys.clone(),
        popularity: Popularity::uniform(keys.count() as u64),
        writes: 0.1,
        drops: 0.0,
        seed: 1,
    }
}
