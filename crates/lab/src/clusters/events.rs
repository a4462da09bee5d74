//! Requests through the router while its cluster or the router itself changes, at half of the rate that it achieves.

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
    for (number, change) in Change::ALL.into_iter().enumerate() {
        settings.check_interrupted()?;
        eprintln!("{}", change.title());
        let folder = folder.join(format!("change-{number}"));
        std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let mut members = Members::start(programs, &folder)?;
        let storage = ["--storage-cluster".to_owned(), members.addresses[0].to_string()];
        let router = |number| Proxy::switchyard(programs, &format!("router-{number}"), &storage, &folder);
        let mut routers: Vec<Proxy> = (0..change.routers()).map(router).collect::<Result<_>>()?;
        let most = load(&routers[..1], Pace::Closed, settings.seconds.min(5), "most")?;
        let started = Instant::now();
        let most = finish(most)?;
        let rate = (most.replies as f64 / started.elapsed().as_secs_f64() / 2.0).round();
        let pace = Pace::Open { rate: rate / routers.len() as f64 };
        let before = finish(load(&routers, pace, settings.seconds, "before")?)?;
        let during = load(&routers, pace, settings.seconds, "during")?;
        std::thread::sleep(Duration::from_secs(1));
        let effect = change.apply(programs, &mut members, &mut routers)?;
        let mut during = finish(during)?;
        during.add(&effect.visits);
        table.row(cells(change, rate, &before, &during, effect.served));
    }
    Ok(table)
}

/// Starts a load on each router.
fn load(routers: &[Proxy], pace: Pace, seconds: u64, phase: &str) -> Result<Vec<load::Run>> {
    let start = |(number, router): (usize, &Proxy)| {
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
            prefix: format!("{phase}:{number}:"),
            doubt: load::Doubt::Lasting,
            seed: 7,
        })
    };
    routers.iter().enumerate().map(start).collect()
}

/// Waits for the end of loads. Returns the sum of their results.
fn finish(runs: Vec<load::Run>) -> Result<Tally> {
    let mut total = Tally::default();
    for run in runs {
        let done = run.finish()?;
        done.complaints.iter().for_each(|complaint| eprintln!("  {complaint}"));
        total.add(&done.total);
    }
    Ok(total)
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

/// A change of the cluster or of the routers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    Reshard,
    FailOver,
    Kill,
    Upgrade,
}

/// Effect of a change, other than on the load.
#[derive(Debug, Default)]
struct Effect {
    /// Time between a promotion and the next reply for its slots, after a kill.
    served: Option<Duration>,
    /// Requests on connections of their own. Their latencies are not recorded, because they include the connecting.
    visits: Tally,
}

impl Change {
    const ALL: [Self; 4] = [Self::Reshard, Self::FailOver, Self::Kill, Self::Upgrade];

    fn title(self) -> &'static str {
        match self {
            Self::Reshard => "1,000 slots by `redis-cli --cluster reshard`",
            Self::FailOver => "`CLUSTER FAILOVER`",
            Self::Kill => "`kill -9` of a primary",
            Self::Upgrade => "`switchyard upgrade` of two routers in turn",
        }
    }

    /// Number of routers, which share the load.
    fn routers(self) -> usize {
        if self == Self::Upgrade { 2 } else { 1 }
    }

    fn apply(self, programs: &Programs, members: &mut Members, routers: &mut [Proxy]) -> Result<Effect> {
        match self {
            Self::Reshard => members.reshard(programs, SLOTS).map(|()| Effect::default()),
            Self::FailOver => members.fail_over(0).map(|()| Effect::default()),
            Self::Kill => Ok(Effect { served: Some(killed(members, routers[0].address)?), ..Effect::default() }),
            Self::Upgrade => Ok(Effect { visits: upgraded(programs, routers)?, ..Effect::default() }),
        }
    }
}

/// Upgrades the routers in turn, while a client of each connects for every request: the load stays at the
/// former processes.
fn upgraded(programs: &Programs, routers: &mut [Proxy]) -> Result<Tally> {
    let is_over = &AtomicBool::new(false);
    let addresses: Vec<SocketAddr> = routers.iter().map(|router| router.address).collect();
    std::thread::scope(|scope| {
        let visit = |address| scope.spawn(move || visits(address, is_over));
        let visitors: Vec<_> = addresses.into_iter().map(visit).collect();
        let done = routers.iter_mut().try_for_each(|router| router.upgrade(programs));
        std::thread::sleep(Duration::from_secs(1));
        is_over.store(true, Ordering::Relaxed);
        let mut all = Tally::default();
        for visitor in visitors {
            all.add(&visitor.join().map_err(|_| anyhow::anyhow!("a client panicked"))?);
        }
        done.map(|()| all)
    })
}

/// Sends requests, each on a connection of its own, until `is_over`.
fn visits(address: SocketAddr, is_over: &AtomicBool) -> Tally {
    let mut tally = Tally::default();
    while !is_over.load(Ordering::Relaxed) {
        let done = Client::connect(address).and_then(|mut client| client.ok(&[b"SET", b"visit", b"v"]));
        match done {
            Ok(()) => tally.replies += 1,
            Err(error) => {
                if tally.errors == 0 {
                    eprintln!("  {error:#}");
                }
                tally.errors += 1;
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    tally
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
