//! A scenario on real servers: capped servers behind the router, the scenario's load, and counts over time.
//!
//! A read is LPOS of an absent element in a list of [`ITEMS`]. It costs the server some ten times as much as GET, so the
//! service rate hardly depends on the number of commands that the server receives at once, as it does for GET. The
//! router, the clients and all servers share few processors; only the servers must be the bottleneck.
//!
//! Servers count the commands themselves. Replies that no server sent are hits.

use std::cell::Cell;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use switchyard_bench::client::Client;
use switchyard_bench::random::Rng;
use switchyard_bench::wire::Reply;
use switchyard_sim::fleet::scenario::{Event, Sender};
use switchyard_sim::fleet::{KeyLoad, Scenario, Spread, keys_at};

use super::series::{Sample, Series};
use crate::moves::site::{Programs, Routed};
use crate::moves::slot::{SLOTS, slot_of};
use crate::reproduce::capped::Capped;

/// Clients, with one connection and one request in flight each. Enough that the fullest server always has requests, and
/// few enough that it replies within the 50 ms after which a router forwards reads instead of filling a copy.
pub(super) const CLIENTS: usize = 64;

/// Items of each list.
const ITEMS: usize = 2000;

/// Time limit of a move of one slot.
const MOVE_TIMEOUT: Duration = Duration::from_secs(30);

/// The item of all lists, and one that none has.
const ITEM: &[u8] = b"x";
const ABSENT: &[u8] = b"y";

/// Commands of the load, as named in INFO.
const COUNTED: [&str; 2] = ["cmdstat_lpos:calls=", "cmdstat_lset:calls="];

/// Servers and routers of all runs.
#[derive(Debug)]
pub(super) struct Bench<'a> {
    programs: &'a Programs,
    folder: &'a Path,
    /// Share of a processor for each server. `None`: no limit.
    pub(super) cpu: Option<f64>,
    stop: &'a AtomicBool,
    sites: Cell<u32>,
}

/// Measured parameters of the servers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Servers {
    /// Requests served per second, over the servers.
    pub(super) rate: Spread,
    /// Time of a move of a slot, in seconds. Nearly all of it passes before the first key moves.
    pub(super) move_seconds: Spread,
}

/// Servers with the keys of a scenario, behind a router with its policies.
#[derive(Debug)]
struct Site {
    routed: Routed,
    _limits: Vec<Capped>,
}

/// Replies and errors of all clients.
#[derive(Debug, Default)]
struct Counts {
    replies: AtomicU64,
    errors: AtomicU64,
    is_over: AtomicBool,
}

/// Requests of all clients.
#[derive(Debug)]
struct Requests {
    keys: Vec<KeyLoad>,
    /// Begin of each phase, and the sum of the shares of the keys up to each one.
    phases: Vec<(Duration, Vec<f64>)>,
    /// Mean time between two requests of a client. `None`: the next one follows the reply.
    gap: Option<Duration>,
}

/// Counters at a time.
#[derive(Debug)]
struct Reading {
    at: Instant,
    replies: u64,
    /// Commands of each server, and their time.
    nodes: Vec<(Instant, u64)>,
}

/// A measured run.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) series: Series,
    /// Error replies and lost connections.
    pub(super) errors: u64,
}

impl<'a> Bench<'a> {
    pub(super) fn new(programs: &'a Programs, folder: &'a Path, cpu: Option<f64>, stop: &'a AtomicBool) -> Self {
        Self { programs, folder, cpu, stop, sites: Cell::new(0) }
    }

    /// Starts servers and router, and fills the servers before they are limited.
    fn start(&self, scenario: &Scenario, keys: &[KeyLoad]) -> Result<Site> {
        self.sites.set(self.sites.get() + 1);
        let name = format!("site{}", self.sites.get());
        let count = scenario.nodes.count;
        let routed = Routed::start_many(self.programs, &serve_args(scenario), count, &name, self.folder)?;
        let mut client = Client::connect(routed.entry)?;
        let mut push = vec![ITEM; 2 + ITEMS];
        push[0] = b"RPUSH";
        for key in keys {
            push[1] = &key.name;
            client.integer(&push).context("cannot fill the servers")?;
        }
        let limited = |id: u32| self.cpu.map(|cpu| Capped::new(id, cpu));
        let limits = routed.process_ids().into_iter().filter_map(limited).collect::<Result<_>>()?;
        Ok(Site { routed, _limits: limits })
    }

    fn pause(&self, until: Instant) -> Result<()> {
        while Instant::now() < until {
            ensure!(!self.stop.load(Ordering::Relaxed), "interrupted; nothing was written");
            std::thread::sleep(until.saturating_duration_since(Instant::now()).min(Duration::from_millis(50)));
        }
        Ok(())
    }

    /// Measures the servers: moves of slots, and the service rate of each. All clients read and write its keys, evenly, so that no key is hot.
    /// `time`: duration of the measurement of a server. Its first quarter does not count.
    pub(super) fn measure_servers(&self, scenario: &Scenario, seed: u64, time: Duration) -> Result<Servers> {
        let mut scenario = scenario.clone();
        (scenario.copies, scenario.planner) = (None, None);
        let keys = keys_at(&scenario, seed, 0.0);
        let site = self.start(&scenario, &keys)?;
        let mut rates = Vec::new();
        for node in 0..scenario.nodes.count {
            let is_its = |key: &&KeyLoad| node_of(key, scenario.nodes.count) == node;
            let requests = Requests::even(keys.iter().filter(is_its).cloned().collect());
            let (rate, errors) = under_load(site.routed.entry, &requests, |began, counts| {
                self.pause(began + time / 4)?;
                let (from, before) = (Instant::now(), counts.replies.load(Ordering::Relaxed));
                self.pause(began + time)?;
                let replies = counts.replies.load(Ordering::Relaxed) - before;
                Ok(replies as f64 / from.elapsed().as_secs_f64())
            })?;
            ensure!(errors == 0, "{errors} requests failed while the service rates were measured");
            rates.push(rate);
        }
        let mut moves = Vec::new();
        for slot in ["0", "1", "2"] {
            let tick = || self.pause(Instant::now());
            let (took, _) = site.routed.move_slots(self.programs, (0, 1), "balanced", slot, MOVE_TIMEOUT, tick)?;
            moves.push(took.as_secs_f64());
        }
        Ok(Servers { rate: Spread::of(rates), move_seconds: Spread::of(moves) })
    }

    /// Runs the scenario.
    pub(super) fn run(&self, scenario: &Scenario, seed: u64) -> Result<Measured> {
        let requests = Requests::of(scenario, seed)?;
        let site = self.start(scenario, &requests.keys)?;
        let addresses = &site.routed.addresses;
        let mut nodes: Vec<Client> = addresses.iter().map(|node| Client::connect(*node)).collect::<Result<_>>()?;
        let (samples, errors) = under_load(site.routed.entry, &requests, |began, counts| {
            let mut samples = Vec::new();
            let mut before = Reading::now(&mut nodes, counts)?;
            for bin in 1..=(scenario.duration / scenario.bin).round() as u32 {
                self.pause(began + Duration::from_secs_f64(scenario.bin) * bin)?;
                let now = Reading::now(&mut nodes, counts)?;
                samples.push(now.since(&before, began));
                before = now;
            }
            samples.retain(|sample| sample.at > scenario.warm_up);
            Ok(samples)
        })?;
        let event_at = scenario.events.first().map_or(0.0, |event| event.at);
        Ok(Measured { series: Series { samples, bin: scenario.bin, event_at }, errors })
    }
}

/// Number of the node that owns a key at the start: each has the same number of consecutive slots.
fn node_of(key: &KeyLoad, nodes: usize) -> usize {
    let slot = usize::from(slot_of(&key.name));
    // Nodes begin at the slot `number * SLOTS / nodes`, rounded down.
    (0..nodes).rfind(|number| number * usize::from(SLOTS) / nodes <= slot).unwrap_or_default()
}

/// Arguments of a router with the policies of the scenario.
fn serve_args(scenario: &Scenario) -> Vec<String> {
    let mut sets = vec![format!("telemetry.sample={}", scenario.telemetry.sample)];
    match &scenario.copies {
        Some(copies) => sets.extend([
            format!("hot-copies.keys-max={}", copies.keys_max),
            format!("hot-copies.min-reads-per-second={}", copies.min_reads_per_second),
        ]),
        None => sets.push("hot-copies.mode=off".to_owned()),
    }
    match &scenario.planner {
        Some(planner) => {
            sets.push("planner.mode=on".to_owned());
            sets.extend(planner.min_requests.map(|least| format!("planner.min-requests={least}")));
        }
        None => sets.push("planner.mode=off".to_owned()),
    }
    let workers = scenario.router.map_or(1, |router| router.workers);
    let sets = sets.into_iter().flat_map(|set| ["--set".to_owned(), set]);
    sets.chain(["--workers".to_owned(), workers.to_string()]).collect()
}

impl Requests {
    /// Requests of a scenario with a constant load, except for events that begin and end at once.
    fn of(scenario: &Scenario, seed: u64) -> Result<Self> {
        ensure!(
            scenario.keys.head as f64 == scenario.keys.count && scenario.events.iter().all(|event| event.ramp == 0.0),
            "a scenario for real servers names all keys, and its events have no ramp"
        );
        let of_event = |event: &Event| [Some(event.at), event.until];
        let mut begins: Vec<f64> = scenario.events.iter().flat_map(of_event).flatten().chain([0.0]).collect();
        begins.sort_by(f64::total_cmp);
        begins.dedup();
        let phase = |begin: f64| (Duration::from_secs_f64(begin), sums(&keys_at(scenario, seed, begin)));
        let gap = match scenario.load.sender {
            Sender::Open => Some(Duration::from_secs_f64(CLIENTS as f64 / scenario.load.rate)),
            Sender::Adaptive => None,
        };
        Ok(Self { keys: keys_at(scenario, seed, 0.0), phases: begins.into_iter().map(phase).collect(), gap })
    }

    /// As many requests as possible for these keys, evenly.
    fn even(mut keys: Vec<KeyLoad>) -> Self {
        let share = 1.0 / keys.len().max(1) as f64;
        keys.iter_mut().for_each(|key| key.share = share);
        Self { phases: vec![(Duration::ZERO, sums(&keys))], keys, gap: None }
    }

    /// Draws the key of a request at this time since the start.
    fn draw(&self, at: Duration, rng: &mut Rng) -> &KeyLoad {
        let phase = self.phases.partition_point(|(begin, _)| *begin <= at).max(1) - 1;
        let (sums, unit) = (&self.phases[phase].1, rng.unit());
        &self.keys[sums.partition_point(|sum| *sum <= unit).min(self.keys.len() - 1)]
    }
}

/// Sum of the shares up to each key. The last is 1, because shares are rounded.
fn sums(keys: &[KeyLoad]) -> Vec<f64> {
    let all: f64 = keys.iter().map(|key| key.share).sum();
    let sum = |sum: &mut f64, key: &KeyLoad| {
        *sum += key.share / all;
        Some(*sum)
    };
    keys.iter().scan(0.0, sum).collect()
}

/// Runs all clients while `watch` observes them from the given start. Returns its result, and the number of errors.
fn under_load<T>(
    entry: SocketAddr,
    requests: &Requests,
    watch: impl FnOnce(Instant, &Counts) -> Result<T>,
) -> Result<(T, u64)> {
    ensure!(!requests.keys.is_empty(), "a load needs keys");
    let (began, counts) = (Instant::now(), Counts::default());
    let watched = std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let counts = &counts;
            scope.spawn(move || send(entry, requests, (began, client), counts));
        }
        let watched = watch(began, &counts);
        counts.is_over.store(true, Ordering::Relaxed);
        watched
    })?;
    Ok((watched, counts.errors.load(Ordering::Relaxed)))
}

/// Sends the requests of one client until the end, or until its connection is lost.
fn send(entry: SocketAddr, requests: &Requests, (began, number): (Instant, usize), counts: &Counts) {
    let mut rng = Rng::new(number as u64 + 1);
    let Ok(mut client) = Client::connect(entry) else {
        counts.errors.fetch_add(1, Ordering::Relaxed);
        return;
    };
    let mut due = began;
    while !counts.is_over.load(Ordering::Relaxed) {
        if let Some(gap) = requests.gap {
            // Requests arrive at random, independently of replies.
            due += gap.mul_f64(-(1.0 - rng.unit()).ln());
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
        }
        let key = requests.draw(began.elapsed(), &mut rng);
        let write: [&[u8]; 4] = [b"LSET", &key.name, b"0", ITEM];
        let read: [&[u8]; 3] = [b"LPOS", &key.name, ABSENT];
        let is_write = rng.unit() < key.writes;
        let command: &[&[u8]] = if is_write { &write } else { &read };
        match client.call(command, |reply| matches!(reply, Reply::Nil | Reply::Status(_))) {
            Ok(true) => counts.replies.fetch_add(1, Ordering::Relaxed),
            Ok(false) => counts.errors.fetch_add(1, Ordering::Relaxed),
            Err(_) => {
                counts.errors.fetch_add(1, Ordering::Relaxed);
                return;
            }
        };
    }
}

impl Reading {
    fn now(nodes: &mut [Client], counts: &Counts) -> Result<Self> {
        let calls = |node: &mut Client| Ok((Instant::now(), calls_of(&node.text(&[b"INFO", b"commandstats"])?)));
        let (at, replies) = (Instant::now(), counts.replies.load(Ordering::Relaxed));
        Ok(Self { at, replies, nodes: nodes.iter_mut().map(calls).collect::<Result<_>>()? })
    }

    /// Averages since an earlier reading. `began`: start of the load.
    fn since(&self, before: &Self, began: Instant) -> Sample {
        let rate = |count: u64, time: Duration| count as f64 / time.as_secs_f64().max(1e-9);
        let of_node = |((at, calls), (since, before)): (&(Instant, u64), &(Instant, u64))| {
            rate(calls.saturating_sub(*before), at.saturating_duration_since(*since))
        };
        let nodes: Vec<f64> = self.nodes.iter().zip(&before.nodes).map(of_node).collect();
        let served = rate(self.replies - before.replies, self.at.saturating_duration_since(before.at));
        let of_nodes: f64 = nodes.iter().sum();
        let mean = of_nodes / nodes.len().max(1) as f64;
        Sample {
            at: self.at.saturating_duration_since(began).as_secs_f64(),
            served,
            hits: served - of_nodes,
            max_over_mean: nodes.iter().copied().fold(0.0, f64::max) / mean.max(1e-9),
        }
    }
}

/// Returns the number of counted commands in a server's INFO.
fn calls_of(info: &str) -> u64 {
    let calls = |line: &str| {
        let text = COUNTED.iter().find_map(|name| line.strip_prefix(name))?;
        text.split(',').next()?.parse::<u64>().ok()
    };
    info.lines().filter_map(calls).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::validate::{CASES, scaled};

    #[test]
    fn a_router_has_the_policies_of_the_scenario() {
        let args = |name: &str| {
            let case = CASES.iter().find(|case| case.name == name).expect("a case");
            serve_args(&scaled(case, (1000.0, 0.4), 0.0, 1.0).expect("valid")).join(" ")
        };
        let [skewed, copied, shifted] = ["skewed", "copied", "shifted"].map(args);
        assert!(skewed.contains("hot-copies.mode=off") && skewed.contains("planner.mode=off"), "{skewed}");
        assert!(copied.contains("min-reads-per-second=50") && copied.contains("planner.mode=off"), "{copied}");
        assert!(shifted.contains("hot-copies.mode=off") && shifted.contains("planner.min-requests=500"), "{shifted}");
    }

    #[test]
    fn requests_follow_the_shares_of_each_phase() {
        let case = CASES.iter().find(|case| case.name == "shifted").expect("a case");
        let scenario = scaled(case, (1000.0, 0.4), 0.0, 1.0).expect("valid");
        let requests = Requests::of(&scenario, 1).expect("requests");
        let mut rng = Rng::new(1);
        let mut hot = |at: f64| {
            let is_hot = |_: &u32| {
                let key = requests.draw(Duration::from_secs_f64(at), &mut rng);
                requests.keys[scenario.keys.head..].iter().any(|hot| hot.name == key.name)
            };
            (0..4000_u32).filter(is_hot).count()
        };
        let [before, after] = [14.9, 15.0].map(&mut hot);
        // Binomial with standard deviation 31: six of them.
        assert!(before == 0 && after.abs_diff(1600) < 186, "{before} before and {after} after");
        let nodes = scenario.nodes.count;
        assert!(requests.keys[scenario.keys.head..].iter().all(|key| node_of(key, nodes) == 0));
    }

    #[test]
    fn server_counters_are_parsed() {
        let text = "# Commandstats\r\ncmdstat_lpos:calls=7,usec=1\r\ncmdstat_get:calls=100,usec=1\r\ncmdstat_lset:calls=2,usec=3\r\n";
        assert_eq!(calls_of(text), 9);
    }
}
