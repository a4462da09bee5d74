//! One key that is only written becomes 60 % of its node's load: time until the planner has moved it to another node. A
//! copy would not help it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use switchyard_bench::client::Client;
use switchyard_bench::random::Rng;
use switchyard_bench::wire::Reply;

use super::Bench;
use super::alone::Settings;
use super::makris::pause;
use crate::moves::admin;
use crate::moves::site::{Routed, Servers};

const NODES: usize = 4;
const COLD: u64 = 20_000;
const HOT_NAME: &str = "written";
const HOT: &[u8] = HOT_NAME.as_bytes();

/// Requests per second: a node's capacity in the router's configuration, the load of the key, of the other keys of its
/// node, and of each other node. The node is over its capacity, and another node has room for the key.
const CAPACITY: u64 = 5000;
const OF_KEY: f64 = 3000.0;
const OF_SAME_NODE: f64 = 2000.0;
const OF_OTHERS: f64 = 1000.0;
const ALL: f64 = OF_KEY + OF_SAME_NODE + OF_OTHERS * (NODES - 1) as f64;

/// Title of the table.
pub(super) const TITLE: &str =
    "A key that is only written: 3,000 of its node's 5,000 requests/s, and each node takes 5,000 less a tenth";

/// Time limit of the wait.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Results of a run.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Written {
    /// Seconds from the first write of the key until it has left its node.
    pub(super) relocated: f64,
    pub(super) errors: u64,
}

/// Does one run, until the key has moved.
pub(super) fn one(bench: &Bench<'_>, settings: &Settings) -> Result<Written> {
    let args = ["--set", "planner.mode=on", "--workers", "1"].map(str::to_owned);
    let servers = Servers { capacity: Some(CAPACITY), ..Servers::plain(NODES) };
    let site = Routed::start_servers(&bench.programs, &args, &servers, &bench.name(), bench.folder)?;
    let mut through = Client::connect(site.entry)?;
    through.ok(&[b"SET", HOT, b"x"])?;
    // Keys of each node; the one with the hot key comes first. No connection to a node stays open, because the planner
    // moves nothing while clients go past the router.
    let mut cold: Vec<Vec<String>> = Vec::new();
    let mut home = None;
    for number in 0..COLD {
        through.ok(&[b"SET", format!("cold:{number}").as_bytes(), b"x"])?;
    }
    for address in &site.addresses {
        let mut node = Client::connect(*address)?;
        let keys: Vec<String> = node.call(&[b"KEYS", b"cold:*"], |reply| match reply {
            Reply::Array(items) => {
                let name = |item: &Reply<'_>| {
                    if let Reply::Bulk(name) = item { String::from_utf8(name.to_vec()).ok() } else { None }
                };
                items.iter().filter_map(name).collect()
            }
            _ => Vec::new(),
        })?;
        let is_home = node.integer(&[b"EXISTS", HOT])? == 1;
        if is_home {
            home = Some(address.to_string());
        }
        cold.insert(if is_home { 0 } else { cold.len() }, keys);
    }
    let home = home.context("no node has the hot key")?;
    ensure!(cold.iter().all(|keys| !keys.is_empty()), "each node has keys");
    let is_at_home = || -> Result<bool> {
        let found = admin::get(site.admin, &format!("/api/v1/where?key={HOT_NAME}"))?;
        Ok(found["keys"][0]["node"] == home.as_str())
    };
    ensure!(is_at_home()?, "the router knows the hot key elsewhere than at its node");
    let _capped = bench.cap_all(&site.process_ids(), settings.cpu)?;
    let (stop, errors) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for seed in 0..settings.connections {
            let (site, stop, errors, cold) = (&site, &stop, &errors, &cold);
            scope.spawn(move || {
                let mut rng = Rng::new(seed as u64 + 1);
                let Ok(mut client) = Client::connect(site.entry) else { return };
                let gap = Duration::from_secs_f64(settings.connections as f64 / ALL);
                let mut due = Instant::now();
                while !stop.load(Ordering::Relaxed) {
                    wait_turn(&mut rng, &mut due, gap);
                    let at = rng.unit() * ALL;
                    let keys = match at - OF_KEY {
                        of_node if of_node < OF_SAME_NODE => &cold[0],
                        _ => &cold[1 + rng.below(NODES as u64 - 1) as usize],
                    };
                    let key = if at < OF_KEY { HOT } else { keys[rng.below(keys.len() as u64) as usize].as_bytes() };
                    errors.fetch_add(u64::from(client.ok(&[b"SET", key, &[b'x'; 64]]).is_err()), Ordering::Relaxed);
                }
            });
        }
        let relocated = (|| {
            // No load before, because the planner would even it out.
            let begun = Instant::now();
            while is_at_home()? && begun.elapsed() < TIMEOUT {
                pause(bench, Duration::from_millis(50))?;
            }
            Ok::<_, anyhow::Error>(begun.elapsed().as_secs_f64())
        })();
        stop.store(true, Ordering::Relaxed);
        Ok(Written { relocated: relocated?, errors: errors.load(Ordering::Relaxed) })
    })
}

/// Waits for a client's next request. Requests arrive at random. Lost time is not made up: a client that had to wait
/// sends its next request at once.
fn wait_turn(rng: &mut Rng, due: &mut Instant, gap: Duration) {
    *due = (*due + gap.mul_f64(-(1.0 - rng.unit()).ln())).max(Instant::now());
    std::thread::sleep(due.saturating_duration_since(Instant::now()));
}
