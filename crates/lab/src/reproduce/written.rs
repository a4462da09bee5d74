//! One key that is only written becomes 60 % of its node's load: how soon the planner has moved it to another node. A copy would not help it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use switchyard_bench::client::Client;
use switchyard_bench::random::Rng;

use super::Bench;
use super::alone::Settings;
use super::capped::Capped;
use super::makris::pause;
use crate::moves::site::Routed;

const NODES: usize = 4;
const COLD: u64 = 20_000;
const HOT: &[u8] = b"written";

/// Of all requests; so the key is 60 % of what its node gets: 3 / 11 of (3 / 11 + 8 / 11 / 4).
const SHARE: f64 = 3.0 / 11.0;

/// Longer is not waited for.
const PATIENCE: Duration = Duration::from_secs(60);

/// A run.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Written {
    /// From the first write of the key until it has left its node; seconds.
    pub(super) relocated: f64,
    pub(super) errors: u64,
}

/// Waits until the key has moved.
pub(super) fn one(bench: &Bench<'_>, settings: &Settings) -> Result<Written> {
    let args = ["--set", "planner.mode=on", "--workers", "1"].map(str::to_owned);
    let site = Routed::start_many(&bench.programs, &args, NODES, &bench.name(), bench.folder)?;
    let mut through = Client::connect(site.entry)?;
    through.ok(&[b"SET", HOT, b"x"])?;
    let mut home = None;
    for address in &site.addresses {
        let mut node = Client::connect(*address)?;
        if node.integer(&[b"EXISTS", HOT])? == 1 {
            home = Some(node);
        }
    }
    let mut home = home.context("the key is at no node")?;
    let _capped: Vec<Capped> = site.process_ids().iter().map(|id| Capped::new(*id, settings.cpu)).collect::<Result<_>>()?;
    let (stop, is_hot, errors) = (AtomicBool::new(false), AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for seed in 0..settings.connections {
            let (site, stop, is_hot, errors) = (&site, &stop, &is_hot, &errors);
            scope.spawn(move || {
                let mut rng = Rng::new(seed as u64 + 1);
                let Ok(mut client) = Client::connect(site.entry) else { return };
                while !stop.load(Ordering::Relaxed) {
                    let cold = format!("cold:{}", rng.below(COLD));
                    let key = if is_hot.load(Ordering::Relaxed) && rng.unit() < SHARE { HOT } else { cold.as_bytes() };
                    errors.fetch_add(u64::from(client.ok(&[b"SET", key, &[b'x'; 64]]).is_err()), Ordering::Relaxed);
                }
            });
        }
        let relocated = (|| {
            pause(bench, Duration::from_secs(5))?;
            is_hot.store(true, Ordering::Relaxed);
            let begun = Instant::now();
            while home.integer(&[b"EXISTS", HOT])? == 1 && begun.elapsed() < PATIENCE {
                pause(bench, Duration::from_millis(50))?;
            }
            Ok::<_, anyhow::Error>(begun.elapsed().as_secs_f64())
        })();
        stop.store(true, Ordering::Relaxed);
        Ok(Written { relocated: relocated?, errors: errors.load(Ordering::Relaxed) })
    })
}
