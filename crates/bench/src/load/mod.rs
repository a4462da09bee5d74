//! The load generator: threads that each drive many connections through one epoll, closed or open loop.
//!
//! *Closed loop* keeps a fixed number of requests under way per connection, and asks how fast the server can go. *Open
//! loop* sends at a given rate whatever the server does, and asks how long users wait: latency counts from the moment a
//! request was **meant** to be sent, so that a server that stalls for a second is charged for every request of that
//! second, not for one (coordinated omission).
//!
//! Plain threads and epoll, not an async runtime: the generator shares the machine with what it measures, so it must
//! cost little and its own scheduling must not show in the latencies.

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

/// When a request is sent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pace {
    /// As soon as one of the connection's replies has come.
    Closed,
    /// At this many requests per second over all connections, whatever the server does.
    Open {
        /// Requests per second.
        rate: f64,
    },
}

/// Which keys are popular.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Skew {
    /// None more than others.
    Uniform,
    /// Zipfian with this exponent, between 0 and 1 (YCSB: 0.99).
    Zipfian(f64),
    /// YCSB's scrambled Zipfian: the hot keys lie scattered.
    Scrambled,
}

/// What to do to whom.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Where the requests go.
    pub target: SocketAddr,
    /// Threads of the generator.
    pub threads: usize,
    /// Connections over all threads.
    pub connections: usize,
    /// Closed loop: requests under way per connection. Open loop: how many a connection may have under way before the
    /// next ones wait (their latency counts from when they should have been sent all the same).
    pub pipeline: usize,
    /// When a request is sent.
    pub pace: Pace,
    /// Ends by itself after this long.
    pub duration: Duration,
    /// Which commands.
    pub mix: Mix,
    /// How large the strings are.
    pub sizes: ValueSizes,
    /// How many keys (of each type).
    pub keys: u64,
    /// Which of them are popular.
    pub skew: Skew,
    /// Who may touch a key.
    pub sharing: Sharing,
    /// Keys start with this; with [`Sharing::Owned`] no other keys may.
    pub prefix: String,
    /// The fate of a command without an answer.
    pub doubt: Doubt,
    /// Same seed, same requests.
    pub seed: u64,
}

/// What happened, over an interval or a whole run.
#[derive(Debug, Clone)]
pub struct Tally {
    /// Replies, errors and wrong ones included.
    pub replies: u64,
    /// Error replies.
    pub errors: u64,
    /// Replies that no correct server could give, stale ones included.
    pub wrong: u64,
    /// Of these, values that the key had before, and must not have any more.
    pub stale: u64,
    /// Requests whose connection was lost, or that were not answered until the end.
    pub unanswered: u64,
    /// Connections lost.
    pub disconnects: u64,
    /// Latencies in nanoseconds.
    pub latency: Histogram<u64>,
}

/// Longer ones count as this long.
const MAX_LATENCY_NS: u64 = 600_000_000_000;

impl Default for Tally {
    fn default() -> Self {
        // From 1 µs, three digits: the bounds are constants that the crate accepts.
        let latency = Histogram::new_with_bounds(1000, MAX_LATENCY_NS, 3).expect("constant bounds");
        Self { replies: 0, errors: 0, wrong: 0, stale: 0, unanswered: 0, disconnects: 0, latency }
    }
}

impl Tally {
    /// Adds another interval's numbers.
    pub fn add(&mut self, other: &Self) {
        self.replies += other.replies;
        self.errors += other.errors;
        self.wrong += other.wrong;
        self.stale += other.stale;
        self.unanswered += other.unanswered;
        self.disconnects += other.disconnects;
        self.latency.add(&other.latency).expect("same bounds");
    }

    /// The latency that this share of the requests (0 to 1) did not exceed.
    pub fn quantile(&self, share: f64) -> Duration {
        Duration::from_nanos(self.latency.value_at_quantile(share))
    }

    /// The mean latency.
    pub fn mean(&self) -> Duration {
        Duration::from_nanos(self.latency.mean() as u64)
    }

    /// Whether everything was answered, without an error, and right.
    pub fn is_clean(&self) -> bool {
        self.errors == 0 && self.wrong == 0 && self.unanswered == 0 && self.disconnects == 0
    }
}

/// What one thread has counted since somebody last looked, and the first complaints in words.
#[derive(Debug, Default)]
struct Ledger {
    interval: Tally,
    complaints: Vec<String>,
    failures: Vec<Failure>,
}

/// A request that was answered with an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The error.
    pub text: String,
    /// The keys of the request.
    pub keys: Vec<Vec<u8>>,
}

/// Failures kept per thread; those beyond are only counted.
const FAILURES: usize = 100_000;

/// Complaints kept per thread: the first ones tell what went wrong, the rest only how often, which is counted.
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
    ledger.lock().unwrap_or_else(PoisonError::into_inner) // numbers only: nothing a panic could leave half done
}

/// A load that is being driven.
#[derive(Debug)]
pub struct Run {
    threads: Vec<JoinHandle<Result<()>>>,
    ledgers: Vec<Arc<Mutex<Ledger>>>,
    stop: Arc<AtomicBool>,
    started: Instant,
    total: Tally,
}

/// A load that has ended.
#[derive(Debug)]
pub struct Summary {
    /// All that happened.
    pub total: Tally,
    /// How long it took.
    pub elapsed: Duration,
    /// The first errors and wrong replies, in words.
    pub complaints: Vec<String>,
    /// Requests answered with an error that [`Run::take_failures`] has not given.
    pub failures: Vec<Failure>,
}

/// Connects and starts. Fails where the first connections cannot be made; later failures are counted.
pub fn start(settings: &Settings) -> Result<Run> {
    ensure!(settings.connections > 0 && settings.threads > 0, "a load needs at least one connection and one thread");
    ensure!(
        settings.sharing != Sharing::OneWriter || settings.connections > 1,
        "one connection writes, so there must be another that reads"
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
        let thread = std::thread::Builder::new().name(format!("load-{i}")).spawn(move || driver.drive(&theirs, &stop));
        run.threads.push(thread.context("cannot start a thread for the load")?);
        run.ledgers.push(ledger);
    }
    Ok(run)
}

impl Run {
    /// What happened since the last call.
    pub fn take_interval(&mut self) -> Tally {
        let mut interval = Tally::default();
        for ledger in &self.ledgers {
            interval.add(&std::mem::take(&mut lock(ledger).interval));
        }
        self.total.add(&interval);
        interval
    }

    /// All that happened until the last [`Self::take_interval`].
    pub fn total(&self) -> &Tally {
        &self.total
    }

    /// The requests answered with an error since the last call, at most 100,000 for each thread.
    pub fn take_failures(&mut self) -> Vec<Failure> {
        self.ledgers.iter().flat_map(|ledger| std::mem::take(&mut lock(ledger).failures)).collect()
    }

    /// Whether all threads have ended.
    pub fn is_finished(&self) -> bool {
        self.threads.iter().all(JoinHandle::is_finished)
    }

    /// Sends no more; what is under way is still waited for.
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
