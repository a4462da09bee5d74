//! Requests through the router while its cluster changes, at half of the rate that it achieves.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use switchyard_bench::client::Client;
use switchyard_bench::load::{self, Pace, Sharing, Skew, Tally, ValueSizes};
use switchyard_bench::numbers::{millis, thousands};
use switchyard_bench::table::Table;

use super::Settings;
use super::site::{Members, PRIMARIES, Proxy};
use crate::moves::site::Programs;

/// Slots of a reshard.
const SLOTS: u32 = 1000;
const CONNECTIONS: usize = 32;
const KEYS: u64 = 20_000;

/// Measures each change on a new cluster, because some end a member. Returns the table.
pub(super) fn run(settings: &Settings, programs: &Programs, folder: &Path) -> Result<Table> {
    let mut table = Table::new([
        "change",
        "requests/s",
        "replies",
        "errors",
        "without a reply",
        "wrong",
        "p99.9 before, ms",
        "p99.9 during, ms",
        "served again after the promotion, ms",
    ]);
    for (number, change) in [Change::Reshard, Change::FailOver, Change::Kill].into_iter().enumerate() {
        settings.check_interrupted()?;
        eprintln!("{}", change.title());
        let folder = folder.join(format!("change-{number}"));
        std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let mut members = Members::start(programs, &folder)?;
        let storage = ["--storage-cluster".to_owned(), members.addresses[0].to_string()];
        let router = Proxy::switchyard(programs, "router", &storage, &folder)?;
        let load = |pace: Pace, seconds: u64, prefix: &str| -> Result<load::Run> {
            load::start(&load::Settings {
                target: router.address,
                threads: 1,
                connections: CONNECTIONS,
                pipeline: if pace == Pace::Closed { 1 } else { 1000 },
                pace,
                duration: Duration::from_secs(seconds),
                mix: "get=80,set=20".parse()?,
                sizes: ValueSizes::fixed(64),
                keys: KEYS,
                skew: Skew::Uniform,
                sharing: Sharing::Owned,
                prefix: prefix.to_owned(),
                doubt: load::Doubt::Lasting,
                seed: 7,
            })
        };
        let most = load(Pace::Closed, settings.seconds.min(5), "most:")?.finish()?;
        let rate = (most.total.replies as f64 / most.elapsed.as_secs_f64() / 2.0).round();
        let before = load(Pace::Open { rate }, settings.seconds, "before:")?.finish()?.total;
        let during = load(Pace::Open { rate }, settings.seconds, "during:")?;
        std::thread::sleep(Duration::from_secs(1));
        let served = change.apply(programs, &mut members, router.address)?;
        let during = during.finish()?;
        during.complaints.iter().for_each(|complaint| eprintln!("  {complaint}"));
        table.row(cells(change, rate, &before, &during.total, served));
    }
    Ok(table)
}

fn cells(change: Change, rate: f64, before: &Tally, during: &Tally, served: Option<Duration>) -> [String; 9] {
    [
        change.title().to_owned(),
        thousands(rate as u64),
        thousands(during.replies),
        thousands(during.errors),
        thousands(during.unanswered),
        thousands(during.wrong),
        millis(before.quantile(0.999)),
        millis(during.quantile(0.999)),
        served.map_or_else(String::new, millis),
    ]
}

/// A change of the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    Reshard,
    FailOver,
    Kill,
}

impl Change {
    fn title(self) -> &'static str {
        match self {
            Self::Reshard => "1,000 slots by `redis-cli --cluster reshard`",
            Self::FailOver => "`CLUSTER FAILOVER`",
            Self::Kill => "`kill -9` of a primary",
        }
    }

    /// Returns the time between a promotion and the next reply for its slots, after a kill.
    fn apply(self, programs: &Programs, members: &mut Members, router: SocketAddr) -> Result<Option<Duration>> {
        match self {
            Self::Reshard => members.reshard(programs, SLOTS).map(|()| None),
            Self::FailOver => members.fail_over(0).map(|()| None),
            Self::Kill => killed(members, router).map(Some),
        }
    }
}

/// Kills the first primary while a client writes a key of it.
fn killed(members: &mut Members, router: SocketAddr) -> Result<Duration> {
    let mut client = Client::connect(router)?;
    let key = key_of(members, &mut client)?;
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Times of the successful writes.
        let writer = scope.spawn(|| {
            let mut times = Vec::new();
            while !is_over.load(Ordering::Relaxed) {
                match client.ok(&[b"SET", key.as_bytes(), b"v"]) {
                    Ok(()) => times.push(Instant::now()),
                    Err(_) => std::thread::sleep(Duration::from_millis(1)),
                }
            }
            times
        });
        let promoted = members.kill(0);
        std::thread::sleep(Duration::from_secs(2));
        is_over.store(true, Ordering::Relaxed);
        let times = writer.join().map_err(|_| anyhow::anyhow!("the writer panicked"))?;
        let promoted = promoted?;
        let next = times.into_iter().find(|time| *time >= promoted);
        Ok(next.context("no write succeeded after the promotion")?.duration_since(promoted))
    })
}

/// Returns a key that the first primary has.
fn key_of(members: &Members, client: &mut Client) -> Result<String> {
    for number in 0..100 * PRIMARIES {
        let key = format!("probe:{number}");
        client.ok(&[b"SET", key.as_bytes(), b"v"])?;
        let mut owner = Client::connect(members.addresses[0])?;
        if owner.integer(&[b"EXISTS", key.as_bytes()]).is_ok_and(|count| count == 1) {
            return Ok(key);
        }
    }
    ensure!(false, "the keys are at other primaries than the first");
    Ok(String::new())
}
