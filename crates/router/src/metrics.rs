//! Counters of the router. Each worker is the only writer of its own, with plain loads and stores; a scrape adds them
//! up.
//!
//! Not the counters of a metrics library: a shared, labelled counter costs more than forwarding a command, and a cache
//! line written by two cores costs both. The library only encodes at scrape time. Keys are never labels.

mod errors;
mod export;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use switchyard_policy::hot_copies::Discarded;
use switchyard_policy::topology::NodeId;
use switchyard_resp::command::CommandClass;

pub(crate) use errors::Errors;
pub(crate) use export::{NodeScrape, Scrape};

/// A counter with a single writer.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    #[inline]
    pub(crate) fn add(&self, count: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(count), Relaxed);
    }

    #[inline]
    pub(crate) fn sub(&self, count: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_sub(count), Relaxed);
    }

    #[inline]
    pub(crate) fn set(&self, value: u64) {
        self.0.store(value, Relaxed);
    }

    #[inline]
    pub(crate) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Four buckets per doubling, from 1 us to over a minute: values are accurate to 20 %.
const BUCKETS: usize = 4 * 27;

/// Histogram of durations in microseconds, with a single writer.
#[derive(Debug)]
pub(crate) struct Histogram {
    buckets: [Counter; BUCKETS],
    sum_us: Counter,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { buckets: std::array::from_fn(|_| Counter::default()), sum_us: Counter::default() }
    }
}

#[inline]
fn bucket_of(us: u64) -> usize {
    if us < 4 {
        return us as usize;
    }
    let doubling = 63 - us.leading_zeros() as usize;
    let quarter = (us >> (doubling - 2)) as usize & 3;
    ((doubling - 1) * 4 + quarter).min(BUCKETS - 1)
}

impl Histogram {
    #[inline]
    pub(crate) fn record(&self, us: u64) {
        self.buckets[bucket_of(us)].add(1);
        self.sum_us.add(us);
    }
}

/// Snapshot of a cumulative histogram of durations. The difference of two snapshots covers the time between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waits([u64; BUCKETS]);

impl Default for Waits {
    fn default() -> Self {
        Self([0; BUCKETS])
    }
}

impl Waits {
    /// Returns the durations of all workers, for commands to one node and for failed commands: an overloaded node makes
    /// commands time out.
    pub(crate) fn so_far(workers: &[Arc<WorkerCounters>]) -> Self {
        let classes = [CommandClass::Read, CommandClass::Write, CommandClass::Script];
        let sum = Sum::of(
            workers.iter().flat_map(|w| classes.iter().map(|class| &w.total[*class as usize]).chain([&w.failed])),
        );
        Self(sum.buckets)
    }

    /// Returns the 99th percentile since `before`, in microseconds, accurate to 20 %. `None` below 200 values.
    pub(crate) fn p99_since(&self, before: &Self) -> Option<u64> {
        (self.count_since(before) >= 200).then(|| self.percentile_since(before, 99))?
    }

    /// Number of values since `before`.
    #[must_use]
    pub fn count_since(&self, before: &Self) -> u64 {
        self.since(before).sum()
    }

    /// Returns a percentile since `before`, in microseconds, accurate to 20 %. `None` without values.
    #[must_use]
    pub fn percentile_since(&self, before: &Self, percent: u64) -> Option<u64> {
        let count = self.count_since(before);
        let mut seen = 0;
        let bucket = self.since(before).position(|of_bucket| {
            seen += of_bucket;
            seen * 100 >= count * percent
        })?;
        (count > 0).then(|| upper_bound(bucket))
    }

    fn since<'a>(&'a self, before: &'a Self) -> impl Iterator<Item = u64> + 'a {
        self.0.iter().zip(&before.0).map(|(now, then)| now.saturating_sub(*then))
    }

    /// Adds a value, for tests.
    pub fn note(&mut self, us: u64) {
        self.0[bucket_of(us)] += 1;
    }
}

/// Snapshots of client waits, about one per second of the last half minute. Only from times without a move.
#[derive(Debug, Default)]
pub(crate) struct RecentWaits(VecDeque<(Instant, Waits)>);

impl RecentWaits {
    /// Minimum interval between snapshots.
    const INTERVAL_MIN: Duration = Duration::from_secs(1);
    const SNAPSHOTS_MAX: usize = 31;

    /// Adds a snapshot if the last one is old enough.
    pub(crate) fn note(&mut self, now: Instant, waits: impl FnOnce() -> Waits) {
        if self.0.back().is_some_and(|(last, _)| now.saturating_duration_since(*last) < Self::INTERVAL_MIN) {
            return;
        }
        if self.0.len() == Self::SNAPSHOTS_MAX {
            self.0.pop_front();
        }
        self.0.push_back((now, waits()));
    }

    /// Discards all snapshots when a move starts, because moves increase the waits.
    pub(crate) fn forget(&mut self) {
        self.0.clear();
    }

    /// Returns the oldest snapshot if it is at least this old.
    pub(crate) fn since(&self, now: Instant, at_least: Duration) -> Option<&Waits> {
        self.0.front().filter(|(first, _)| now.saturating_duration_since(*first) >= at_least).map(|(_, waits)| waits)
    }
}

/// Returns the exclusive upper bound of a bucket, microseconds.
fn upper_bound(bucket: usize) -> u64 {
    if bucket < 4 { bucket as u64 + 1 } else { (5 + (bucket as u64 & 3)) << (bucket / 4 - 1) }
}

/// Sum of histograms of several workers.
struct Sum {
    buckets: [u64; BUCKETS],
    sum_us: u64,
}

impl Sum {
    fn of<'a>(parts: impl Iterator<Item = &'a Histogram>) -> Self {
        let mut sum = Sum { buckets: [0; BUCKETS], sum_us: 0 };
        for part in parts {
            for (total, bucket) in sum.buckets.iter_mut().zip(&part.buckets) {
                *total += bucket.get();
            }
            sum.sum_us += part.sum_us.get();
        }
        sum
    }

    fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// Returns buckets for Prometheus, one per doubling from 16 us to 16 s: fine enough for percentiles, few enough to
    /// store.
    fn exported(&self) -> Vec<(f64, u64)> {
        let mut from = 0;
        let mut out: Vec<_> = (4..=24)
            .map(|doubling| {
                let until = (doubling - 1) * 4;
                let count = self.buckets[from..until].iter().sum();
                from = until;
                ((1u64 << doubling) as f64 / 1e6, count)
            })
            .collect();
        out.push((f64::INFINITY, self.buckets[from..].iter().sum()));
        out
    }
}

/// Counters of one worker for one node and one class of commands.
#[derive(Debug, Default)]
pub(crate) struct NodeClass {
    pub(crate) requests: Counter,
    pub(crate) errors: Counter,
    pub(crate) upstream: Histogram,
}

/// Counters of one worker for one node.
#[derive(Debug, Default)]
pub(crate) struct NodeCounters {
    pub(crate) classes: [NodeClass; CommandClass::COUNT],
    pub(crate) in_flight: Counter,
    /// Commands that may write, and an upper bound of removed keys.
    pub(crate) writes: Counter,
    pub(crate) removals: Counter,
    pub(crate) bytes_sent: Counter,
    pub(crate) bytes_received: Counter,
    pub(crate) connections: Counter,
    /// Main-lane connections that are down.
    pub(crate) mains_down: Counter,
    pub(crate) connects: Counter,
    pub(crate) failures: Counter,
    /// Connections closed by the node.
    pub(crate) ended: Counter,
    pub(crate) timeouts: Counter,
    /// Connections that broke with commands in flight and have an unconfirmed end at the node.
    pub(crate) unconfirmed: Counter,
    /// Time at which the oldest slow command in flight was sent, microseconds. 0: none.
    pub(crate) slow_since_us: Counter,
    /// Refused writes by error.
    pub(crate) refusals: [Counter; WriteRefusal::ALL.len()],
}

impl NodeCounters {
    /// Counts an error reply of the node.
    #[cold]
    pub(crate) fn note_error(&self, error: &[u8]) {
        if let Some(refusal) = WriteRefusal::of(error) {
            self.refusals[refusal as usize].add(1);
        }
    }
}

/// Errors with which a node refuses all writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteRefusal {
    /// The node cannot persist its data.
    Misconf,
    /// The node has reached `maxmemory`.
    Oom,
    /// The node is a replica.
    Readonly,
    /// The node has too few replicas.
    Noreplicas,
}

impl WriteRefusal {
    /// All errors, in the order of their discriminants.
    pub const ALL: [Self; 4] = [Self::Misconf, Self::Oom, Self::Readonly, Self::Noreplicas];

    /// Error code in the reply.
    pub const fn code(self) -> &'static str {
        match self {
            Self::Misconf => "MISCONF",
            Self::Oom => "OOM",
            Self::Readonly => "READONLY",
            Self::Noreplicas => "NOREPLICAS",
        }
    }

    /// Returns the refusal of an error reply.
    fn of(error: &[u8]) -> Option<Self> {
        let code = error.strip_prefix(b"-")?.split(|b| *b == b' ').next()?;
        Self::ALL.into_iter().find(|refusal| refusal.code().as_bytes() == code)
    }
}

/// Commands to a node since the start, and the times until their replies. The difference of two values covers the time
/// between them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Commands sent to the node.
    pub requests: u64,
    /// Commands not yet answered.
    pub in_flight: u64,
    /// Times until the reply. Without commands that may block at the node, and without administrative commands.
    pub answers: Waits,
    /// Sum of these times, microseconds.
    pub answers_us: u64,
}

impl Traffic {
    /// Adds up the counters of all workers for a node.
    pub(crate) fn of(workers: &[Arc<NodeCounters>]) -> Self {
        let timed = [CommandClass::Read, CommandClass::Write, CommandClass::Script, CommandClass::Many];
        let answers =
            Sum::of(workers.iter().flat_map(|w| timed.iter().map(|class| &w.classes[*class as usize].upstream)));
        Self {
            requests: workers.iter().flat_map(|w| &w.classes).map(|class| class.requests.get()).sum(),
            in_flight: workers.iter().map(|worker| worker.in_flight.get()).sum(),
            answers: Waits(answers.buckets),
            answers_us: answers.sum_us,
        }
    }
}

/// Counters of hot copies of one worker.
#[derive(Debug, Default)]
pub(crate) struct HotCounters {
    /// Commands answered from copies.
    pub(crate) hits: Counter,
    /// Fills requested from nodes.
    pub(crate) fills: Counter,
    /// Discarded fills by reason.
    pub(crate) discarded: [Counter; Discarded::ALL.len()],
    /// Invalidations received from nodes.
    pub(crate) invalidations: Counter,
    /// Writes on lost connections whose end the node has not confirmed.
    pub(crate) in_doubt: Counter,
    /// Number of copies, and their size in bytes.
    pub(crate) copies: Counter,
    pub(crate) bytes: Counter,
}

/// Counters of one worker.
#[derive(Debug, Default)]
pub(crate) struct WorkerCounters {
    pub(crate) clients: Counter,
    pub(crate) accepted: Counter,
    pub(crate) rejected: Counter,
    pub(crate) double_reads: Counter,
    pub(crate) double_reads_missed: Counter,
    pub(crate) hot: HotCounters,
    pub(crate) cut_output: Counter,
    pub(crate) protocol_errors: Counter,
    /// Clients that closed their connections, and connections that broke.
    pub(crate) ended: Counter,
    pub(crate) broken: Counter,
    /// Parts of commands with keys at several nodes.
    pub(crate) fragments: Counter,
    pub(crate) handshakes_failed: Counter,
    pub(crate) logins_failed: Counter,
    pub(crate) denied: Counter,
    pub(crate) limited: Counter,
    /// Slow commands not logged because of the log's rate limit.
    pub(crate) slow_not_entered: Counter,
    /// Subscribers disconnected because they may have missed messages.
    pub(crate) cut_missed: Counter,
    /// Clients disconnected during a blocking command, because the node was lost or the router stopped.
    pub(crate) cut_waiting: Counter,
    pub(crate) limited_connections: Counter,
    /// Subscriptions, counted per client.
    pub(crate) subscriptions: Counter,
    /// Clients with a subscription.
    pub(crate) subscribers: Counter,
    /// Active subscriptions of the worker at nodes.
    pub(crate) upstream_subscriptions: Counter,
    pub(crate) subscriptions_lost: Counter,
    pub(crate) messages: Counter,
    /// Clients with CLIENT TRACKING.
    pub(crate) tracking: Counter,
    /// Keys read by such clients, pairs of such a key and a client, and prefixes of clients with BCAST.
    pub(crate) tracked_keys: Counter,
    pub(crate) tracked_reads: Counter,
    pub(crate) tracked_prefixes: Counter,
    pub(crate) invalidations: Counter,
    pub(crate) cut_push: Counter,
    /// Clients disconnected because of `memory-max`.
    pub(crate) evicted: Counter,
    /// Near the memory limit: size of the client to disconnect first, and of pending requests of disconnected clients.
    pub(crate) memory_biggest: Counter,
    pub(crate) memory_leaving: Counter,
    /// Answered requests of other workers for memory.
    pub(crate) memory_answers: Counter,
    pub(crate) bytes_received: Counter,
    pub(crate) bytes_sent: Counter,
    pub(crate) commands: [Counter; CommandClass::COUNT],
    /// Durations of commands without an error. Errors would make commands look fast.
    pub(crate) total: [Histogram; CommandClass::COUNT],
    /// Durations of commands with an error.
    pub(crate) failed: Histogram,
    pub(crate) errors: Errors,
    pub(crate) turns: Histogram,
    pub(crate) large: Counter,
    /// Commands that waited until their keys were at one node, and such commands that were refused.
    pub(crate) colocate_waits: Counter,
    pub(crate) colocate_refused: Counter,
    /// Calls of scripts that were repeated with keys that they had not declared.
    pub(crate) script_repeats: Counter,
    /// Clients blocked at a node.
    pub(crate) blocked: Counter,
    pub(crate) nodes: Mutex<Vec<Option<Arc<NodeCounters>>>>,
    /// Counters for all replicas of each node.
    pub(crate) replicas: Mutex<Vec<Option<Arc<NodeCounters>>>>,
}

impl WorkerCounters {
    /// Returns the counters for a node. Created at first use and kept as long as the worker.
    pub(crate) fn node(&self, id: NodeId) -> Arc<NodeCounters> {
        counters_of(&self.nodes, id)
    }

    /// Returns the counters for the replicas of a node.
    pub(crate) fn replicas(&self, id: NodeId) -> Arc<NodeCounters> {
        counters_of(&self.replicas, id)
    }
}

fn counters_of(all: &Mutex<Vec<Option<Arc<NodeCounters>>>>, id: NodeId) -> Arc<NodeCounters> {
    let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
    if all.len() <= id.index() {
        all.resize(id.index() + 1, None);
    }
    all[id.index()].get_or_insert_default().clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recent_waits_are_discarded_when_a_move_begins() {
        let start = Instant::now();
        let second = Duration::from_secs(1);
        let mut lately = RecentWaits::default();
        let waits = |number: u64| Waits([number; BUCKETS]);
        let first = |lately: &RecentWaits, at: Instant| lately.since(at, 3 * second).map(|waits| waits.0[0]);
        for quarter in 0..400 {
            lately.note(start + quarter * second / 4, || waits(u64::from(quarter)));
        }
        assert_eq!(first(&lately, start + 100 * second), Some((99 - 30) * 4), "thirty seconds before the last one");
        lately.forget();
        assert_eq!(first(&lately, start + 101 * second), None);
        lately.note(start + 101 * second, || waits(7));
        assert_eq!(first(&lately, start + 103 * second), None, "too short a time");
        assert_eq!(first(&lately, start + 104 * second), Some(7));
    }

    #[test]
    fn traffic_sums_workers_and_excludes_blocking_commands_from_times() {
        let workers = [Arc::<NodeCounters>::default(), Arc::default()];
        for (class, us) in [(CommandClass::Read, 100), (CommandClass::Many, 200), (CommandClass::Blocking, 5_000_000)] {
            workers.iter().for_each(|worker| {
                worker.classes[class as usize].requests.add(1);
                worker.classes[class as usize].upstream.record(us);
            });
        }
        let traffic = Traffic::of(&workers);
        assert_eq!((traffic.requests, traffic.answers.count_since(&Waits::default()), traffic.answers_us), (6, 4, 600));
    }

    #[test]
    fn values_are_within_the_bounds_of_their_bucket() {
        for us in (0..5000).chain([1 << 20, (1 << 20) + 7]) {
            let bucket = bucket_of(us);
            assert!(us < upper_bound(bucket), "{us}");
            assert!(bucket == 0 || us >= upper_bound(bucket - 1), "{us}");
        }
    }

    #[test]
    fn buckets_are_in_order_and_exported_whole() {
        let mut last = 0;
        for us in 0..1 << 20 {
            let bucket = bucket_of(us);
            assert!(bucket == last || bucket == last + 1, "{us}");
            last = bucket;
        }
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
        let histogram = Histogram::default();
        for us in [0, 15, 16, 17, 1000, u64::from(u32::MAX)] {
            histogram.record(us);
        }
        let sum = Sum::of(std::iter::once(&histogram));
        let exported = sum.exported();
        assert_eq!(exported[0], (16e-6, 2));
        assert_eq!(exported[1], (32e-6, 2));
        assert_eq!(exported.iter().map(|b| b.1).sum::<u64>(), sum.count());
    }
}
