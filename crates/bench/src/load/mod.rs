//! The load generator: threads with many connections each on one epoll, closed or open loop.
//!
//! A *closed loop* keeps a fixed number of requests in flight per connection, to measure the maximum throughput. An
//! *open loop* sends at a given rate independent of the server, to measure the latency for users. Latency counts from
//! the time at which a request was **due**, so that a stall of a second affects every request of that second rather
//! than one (coordinated omission).
//!
//! Threads and epoll rather than an async runtime: the generator shares the machine with the server under test, so it
//! must be cheap, and its own scheduling must not affect the latencies.

mod board;
mod doubt;
mod engine;
mod mix;
mod workload;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use hdrhistogram::Histogram;

pub use self::board::Board;
pub use self::doubt::Doubt;
pub use self::mix::{LIST_LIMIT, MGET_KEYS, Mix, Op, ValueSizes};
pub use self::workload::{Pending, Script, Sharing, Verdict, Workload, keys_of_each};
use crate::random::Popularity;

/// Timing of requests.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pace {
    /// As soon as a reply of the connection has arrived.
    Closed,
    /// At this rate over all connections, independent of the server.
    Open {
        /// Requests per second.
        rate: f64,
    },
}

/// Popularity of keys.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Skew {
    /// All keys are equally popular.
    Uniform,
    /// Zipfian with this exponent, between 0 and 1 (YCSB: 0.99).
    Zipfian(f64),
    /// YCSB's scrambled Zipfian: hot keys are scattered.
    Scrambled,
}

/// Parameters of a load.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Server under test.
    pub target: SocketAddr,
    /// Threads of the generator.
    pub threads: usize,
    /// Connections over all threads.
    pub connections: usize,
    /// Closed loop: requests in flight per connection. Open loop: maximum requests in flight per connection; further
    /// ones wait, and their latency still counts from their due time.
    pub pipeline: usize,
    /// Timing of requests.
    pub pace: Pace,
    /// Duration of the load.
    pub duration: Duration,
    /// Frequencies of commands.
    pub mix: Mix,
    /// Sizes of strings.
    pub sizes: ValueSizes,
    /// Number of keys, for each type.
    pub keys: u64,
    /// Popularity of keys.
    pub skew: Skew,
    /// Assignment of keys to connections.
    pub sharing: Sharing,
    /// Prefix of all keys; with [`Sharing::Owned`] no other program may use it.
    pub prefix: String,
    /// Possible execution time of a command without a reply.
    pub doubt: Doubt,
    /// Equal seeds give equal requests.
    pub seed: u64,
}

/// Results of an interval or a whole run.
#[derive(Debug, Clone)]
pub struct Tally {
    /// Replies, including errors and wrong ones.
    pub replies: u64,
    /// Error replies.
    pub errors: u64,
    /// Replies impossible for a correct server, including stale ones.
    pub wrong: u64,
    /// Wrong replies with an earlier value of the key.
    pub stale: u64,
    /// Requests without a reply: connection lost, or no reply until the end.
    pub unanswered: u64,
    /// Connections lost.
    pub disconnects: u64,
    /// Latencies in nanoseconds.
    pub latency: Histogram<u64>,
}

/// Maximum recorded latency.
const MAX_LATENCY_NS: u64 = 600_000_000_000;

impl Default for Tally {
    fn default() -> Self {
        // From 1 µs with three digits; the crate accepts these constant bounds.
        let latency = Histogram::new_with_bounds(1000, MAX_LATENCY_NS, 3).expect("constant bounds");
        Self { replies: 0, errors: 0, wrong: 0, stale: 0, unanswered: 0, disconnects: 0, latency }
    }
}

impl Tally {
    /// Adds the results of another interval.
    pub fn add(&mut self, other: &Self) {
        self.replies += other.replies;
        self.errors += other.errors;
        self.wrong += other.wrong;
        self.stale += other.stale;
        self.unanswered += other.unanswered;
        self.disconnects += other.disconnects;
        self.latency.add(&other.latency).expect("same bounds");
    }

    /// Latency not exceeded by this share of the requests (0 to 1).
    pub fn quantile(&self, share: f64) -> Duration {
        Duration::from_nanos(self.latency.value_at_quantile(share))
    }

    /// Mean latency.
    pub fn mean(&self) -> Duration {
        Duration::from_nanos(self.latency.mean() as u64)
    }

    /// Whether every request had a correct reply.
    pub fn is_clean(&self) -> bool {
        self.errors == 0 && self.wrong == 0 && self.unanswered == 0 && self.disconnects == 0
    }
}

/// Results of one thread since the last query, and its first complaints as text.
#[derive(Debug, Default)]
struct Ledger {
    interval: Tally,
    complaints: Vec<String>,
    failures: Vec<Failure>,
}

/// A request with an error reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Error text.
    pub text: String,
    /// Keys of the request.
    pub keys: Vec<Vec<u8>>,
}

/// Maximum failures kept per thread; further ones are only counted.
const FAILURES: usize = 100_000;

/// Maximum complaints kept per thread: the first ones describe the problem, the others are only counted.
const COMPLAINTS: usize = 5;

impl Ledger {
    fn fail(&mut self, text: &[u8], keys: impl FnOnce() -> Vec<Vec<u8>>) {
        if self.failures.len() < FAILURES {
            self.failures.push(Failure { text: String::from_utf8_lossy(text).into_owned(), keys: keys() });
        }
    }

    fn complain(&mut self, text: String) {
        if self.complaints.len() < COMPLAINTS {
            self.complaints.push(text);
        }
    }
}

fn lock(ledger: &Mutex<Ledger>) -> MutexGuard<'_, Ledger> {
    ledger.lock().unwrap_or_else(PoisonError::into_inner) // numbers only: a panic cannot leave them inconsistent
}

/// A running load.
#[derive(Debug)]
pub struct Run {
    threads: Vec<JoinHandle<Result<()>>>,
    ledgers: Vec<Arc<Mutex<Ledger>>>,
    stop: Arc<AtomicBool>,
    started: Instant,
    total: Tally,
}

/// A finished load.
#[derive(Debug)]
pub struct Summary {
    /// Results of the whole run.
    pub total: Tally,
    /// Duration of the run.
    pub elapsed: Duration,
    /// First errors and wrong replies, as text.
    pub complaints: Vec<String>,
    /// Requests with an error reply not yet returned by [`Run::take_failures`].
    pub failures: Vec<Failure>,
}

/// Connects and starts the load. Returns an error if the first connections fail; later failures are counted.
pub fn start(settings: &Settings) -> Result<Run> {
    ensure!(settings.connections > 0 && settings.threads > 0, "a load needs at least one connection and one thread");
    ensure!(
        settings.sharing != Sharing::OneWriter || settings.connections > 1,
        "one connection writes, so another must read"
    );
    ensure!(settings.pipeline > 0, "a pipeline holds at least one request");
    if let Pace::Open { rate } = settings.pace {
        ensure!(rate.is_finite() && rate > 0.0, "an open loop needs a rate above 0 requests/s, not {rate}");
    }
    let connections = settings.connections as u64;
    let keys = keys_of_each(settings.sharing, connections, settings.keys);
    let popularity = match settings.skew {
        Skew::Uniform => Popularity::uniform(keys),
        Skew::Zipfian(theta) => {
            ensure!(
                theta > 0.0 && theta < 1.0,
                "the Zipfian exponent must lie between 0 and 1 (both excluded), not {theta}"
            );
            Popularity::zipfian(keys, theta)
        }
        Skew::Scrambled => Popularity::scrambled(keys),
    };
    let workload = Arc::new(Workload {
        mix: settings.mix,
        sizes: settings.sizes.clone(),
        sharing: settings.sharing,
        popularity,
        prefix: settings.prefix.clone(),
        doubt: settings.doubt,
        board: Board::new(if settings.sharing == Sharing::OneWriter { keys } else { 0 }),
    });
    let threads = settings.threads.min(settings.connections);
    let mut drivers = Vec::new();
    for thread in 0..threads {
        let scripts = (thread as u64..connections)
            .step_by(threads)
            .map(|i| Script::new(workload.clone(), settings.seed, i, connections, settings.keys));
        drivers.push(engine::Driver::connect(settings, scripts, thread, threads)?);
    }
    let mut run = Run {
        threads: Vec::new(),
        ledgers: Vec::new(),
        stop: Arc::default(),
        started: Instant::now(),
        total: Tally::default(),
    };
    for (i, driver) in drivers.into_iter().enumerate() {
        let ledger = Arc::<Mutex<Ledger>>::default();
        let (theirs, stop) = (ledger.clone(), run.stop.clone());
        let thread = std::thread::Builder::new().name(format!("load-{i}")).spawn(move || driver.run(&theirs, &stop));
        run.threads.push(thread.context("cannot start a thread for the load")?);
        run.ledgers.push(ledger);
    }
    Ok(run)
}

impl Run {
    /// Returns the results since the last call.
    pub fn take_interval(&mut self) -> Tally {
        let mut interval = Tally::default();
        for ledger in &self.ledgers {
            interval.add(&std::mem::take(&mut lock(ledger).interval));
        }
        self.total.add(&interval);
        interval
    }

    /// Results until the last [`Self::take_interval`].
    pub fn total(&self) -> &Tally {
        &self.total
    }

    /// Returns the requests with an error reply since the last call, at most 100,000 per thread.
    pub fn take_failures(&mut self) -> Vec<Failure> {
        self.ledgers.iter().flat_map(|ledger| std::mem::take(&mut lock(ledger).failures)).collect()
    }

    /// Whether all threads have ended.
    pub fn is_finished(&self) -> bool {
        self.threads.iter().all(JoinHandle::is_finished)
    }

    /// Stops sending; replies to requests in flight are still awaited.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Waits for the end.
    pub fn finish(mut self) -> Result<Summary> {
        for thread in std::mem::take(&mut self.threads) {
            thread.join().map_err(|_| anyhow::anyhow!("a thread of the load generator panicked"))??;
        }
        let elapsed = self.started.elapsed();
        self.take_interval();
        let failures = self.take_failures();
        let complaints = self.ledgers.iter().flat_map(|l| std::mem::take(&mut lock(l).complaints)).collect();
        Ok(Summary { total: std::mem::take(&mut self.total), elapsed, complaints, failures })
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.stop();
    }
}
