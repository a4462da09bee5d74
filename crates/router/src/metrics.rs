//! What the router counts. Each worker writes its own counters, alone, with plain loads and stores; a scrape adds them up.
//!
//! Not a metrics library's counters: a shared, labelled counter costs more than forwarding a command does, and one cache line
//! written by two cores costs both. The library encodes at scrape time. Keys are never labels.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, LabelSetEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};
use switchyard_policy::topology::NodeId;
use switchyard_resp::command::CommandClass;

/// A number with one writer.
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

/// Four buckets per doubling, from 1 us to over a minute: a value is known to within a fifth.
const BUCKETS: usize = 4 * 27;

/// Durations in microseconds, with one writer.
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

/// How long clients have waited for replies, so far: two of them give how long lately.
#[derive(Clone, Debug)]
pub(crate) struct Waits([u64; BUCKETS]);

impl Waits {
    /// Of all workers, over commands that one node answers.
    pub(crate) fn so_far(workers: &[Arc<WorkerCounters>]) -> Self {
        let classes = [CommandClass::Read, CommandClass::Write, CommandClass::Script];
        let sum = Sum::of(workers.iter().flat_map(|w| classes.iter().map(|class| &w.total[*class as usize])));
        Self(sum.buckets)
    }

    /// What 99 of 100 did not exceed since `before`, microseconds, to within a fifth; `None` where there were too few to tell.
    pub(crate) fn p99_since(&self, before: &Self) -> Option<u64> {
        let since: Vec<u64> = self.0.iter().zip(&before.0).map(|(now, then)| now.saturating_sub(*then)).collect();
        let count: u64 = since.iter().sum();
        let mut seen = 0;
        let bucket = since.iter().position(|of_bucket| {
            seen += of_bucket;
            seen * 100 >= count * 99
        })?;
        (count >= 200).then(|| upper_bound(bucket))
    }
}

/// How long clients have waited by then, about once a second in the last half minute; only of times without a move.
#[derive(Debug, Default)]
pub(crate) struct WaitsLately(VecDeque<(Instant, Waits)>);

impl WaitsLately {
    /// Two of them are so far apart at least.
    const BETWEEN: Duration = Duration::from_secs(1);
    const KEPT: usize = 31;

    /// Takes note of how it is now, as often as there is need to.
    pub(crate) fn note(&mut self, now: Instant, waits: impl FnOnce() -> Waits) {
        if self.0.back().is_some_and(|(last, _)| now.saturating_duration_since(*last) < Self::BETWEEN) {
            return;
        }
        if self.0.len() == Self::KEPT {
            self.0.pop_front();
        }
        self.0.push_back((now, waits()));
    }

    /// A move is under way: what clients wait from here on is no measure for another one.
    pub(crate) fn forget(&mut self) {
        self.0.clear();
    }

    /// How it was when this begins: at least so long ago.
    pub(crate) fn since(&self, now: Instant, at_least: Duration) -> Option<&Waits> {
        self.0.front().filter(|(first, _)| now.saturating_duration_since(*first) >= at_least).map(|(_, waits)| waits)
    }
}

/// The first value above a bucket, microseconds.
fn upper_bound(bucket: usize) -> u64 {
    if bucket < 4 { bucket as u64 + 1 } else { (5 + (bucket as u64 & 3)) << (bucket / 4 - 1) }
}

/// Histograms of several workers, added up.
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

    /// Buckets as Prometheus has them, one per doubling from 16 us to 16 s: enough to place a percentile, few enough to store.
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
        out.push((f64::MAX, self.buckets[from..].iter().sum()));
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
    pub(crate) bytes_sent: Counter,
    pub(crate) bytes_received: Counter,
    pub(crate) connections: Counter,
    pub(crate) connects: Counter,
    pub(crate) failures: Counter,
    pub(crate) timeouts: Counter,
    /// Connections that broke with commands in flight and whose end at the node is not confirmed yet.
    pub(crate) unconfirmed: Counter,
}

/// Counters of one worker.
#[derive(Debug, Default)]
pub(crate) struct WorkerCounters {
    pub(crate) clients: Counter,
    pub(crate) accepted: Counter,
    pub(crate) rejected: Counter,
    pub(crate) cut_output: Counter,
    pub(crate) protocol_errors: Counter,
    pub(crate) handshakes_failed: Counter,
    pub(crate) logins_failed: Counter,
    pub(crate) denied: Counter,
    pub(crate) limited: Counter,
    /// Commands that took long and were not entered into the slow log, because there were too many.
    pub(crate) slow_not_entered: Counter,
    /// Subscribers disconnected because messages for them may have been missed.
    pub(crate) cut_missed: Counter,
    pub(crate) limited_connections: Counter,
    /// Channels and patterns of clients, each client's counted.
    pub(crate) subscriptions: Counter,
    /// Clients that are subscribed to something.
    pub(crate) subscribers: Counter,
    /// The worker's own subscriptions in force at nodes.
    pub(crate) upstream_subscriptions: Counter,
    pub(crate) subscriptions_lost: Counter,
    pub(crate) messages: Counter,
    /// Clients with CLIENT TRACKING.
    pub(crate) tracking: Counter,
    /// Keys that such clients have read, and how many clients have read each, added up; prefixes of those with BCAST.
    pub(crate) tracked_keys: Counter,
    pub(crate) tracked_reads: Counter,
    pub(crate) tracked_prefixes: Counter,
    pub(crate) invalidations: Counter,
    pub(crate) cut_push: Counter,
    /// Clients cut because of `memory-max`.
    pub(crate) evicted: Counter,
    /// How big the client is that goes first, near the budget; and of requests that wait for their answers although their clients were cut.
    pub(crate) memory_biggest: Counter,
    pub(crate) memory_leaving: Counter,
    pub(crate) bytes_received: Counter,
    pub(crate) bytes_sent: Counter,
    pub(crate) commands: [Counter; CommandClass::COUNT],
    pub(crate) total: [Histogram; CommandClass::COUNT],
    pub(crate) turns: Histogram,
    pub(crate) large: Counter,
    /// Commands that waited for keys to be brought home, and those of them that were refused in the end.
    pub(crate) homing: Counter,
    pub(crate) not_home: Counter,
    /// Clients whose command waits at a node.
    pub(crate) blocked: Counter,
    pub(crate) nodes: Mutex<Vec<Option<Arc<NodeCounters>>>>,
    /// The same of the replicas of each node, all together.
    pub(crate) replicas: Mutex<Vec<Option<Arc<NodeCounters>>>>,
}

impl WorkerCounters {
    /// The counters for a node, made at first use and kept as long as the worker.
    pub(crate) fn node(&self, id: NodeId) -> Arc<NodeCounters> {
        counters_of(&self.nodes, id)
    }

    /// The counters for the replicas of a node.
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

/// What a scrape sees.
pub(crate) struct Scrape {
    pub(crate) workers: Vec<Arc<WorkerCounters>>,
    /// Names by node number, and whether any worker has a connection up.
    pub(crate) nodes: Vec<(NodeId, String, bool)>,
    pub(crate) epoch: u64,
    pub(crate) uptime_s: f64,
    /// Bytes in use, and how many may be.
    pub(crate) memory: (usize, usize),
}

impl fmt::Debug for Scrape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scrape").finish_non_exhaustive()
    }
}

struct Labels<'a>(&'a [(&'a str, &'a str)]);

impl EncodeLabelSet for Labels<'_> {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> Result<(), fmt::Error> {
        for pair in self.0 {
            prometheus_client::encoding::EncodeLabel::encode(pair, encoder.encode_label())?;
        }
        Ok(())
    }
}

impl Scrape {
    /// The text that Prometheus reads.
    pub(crate) fn text(self) -> String {
        let mut registry = Registry::with_prefix("switchyard");
        registry.register_collector(Box::new(self));
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = prometheus_client::encoding::text::encode(&mut text, &registry);
        text
    }

    fn node_counters(&self, id: NodeId) -> Vec<Arc<NodeCounters>> {
        self.workers.iter().map(|w| w.node(id)).collect()
    }
}

fn total<T>(parts: &[Arc<T>], counter: impl Fn(&T) -> &Counter) -> u64 {
    parts.iter().map(|p| counter(p).get()).sum()
}

type NodeCounter = fn(&NodeCounters) -> &Counter;
type WorkerCounter = fn(&WorkerCounters) -> &Counter;

/// Counters per node: name, help, where.
const NODE_COUNTERS: &[(&str, &str, NodeCounter)] = &[
    ("node_sent_bytes", "Bytes sent to the node", |n| &n.bytes_sent),
    ("node_received_bytes", "Bytes received from the node", |n| &n.bytes_received),
    ("node_connects", "Connections established to the node", |n| &n.connects),
    ("node_connection_failures", "Connections to the node that failed or broke", |n| &n.failures),
    ("node_timeouts", "Commands that the node did not answer in time", |n| &n.timeouts),
];

/// Gauges per node.
const NODE_GAUGES: &[(&str, &str, NodeCounter)] = &[
    ("node_in_flight", "Commands sent to the node and not yet answered", |n| &n.in_flight),
    ("node_connections", "Connections to the node that are up", |n| &n.connections),
    ("node_unconfirmed_connections", "Broken connections whose commands may still run at the node", |n| &n.unconfirmed),
];

/// Counters over all clients.
const CLIENT_COUNTERS: &[(&str, &str, WorkerCounter)] = &[
    ("clients_accepted", "Client connections accepted", |w| &w.accepted),
    ("clients_rejected", "Client connections refused because of the client limit or missing descriptors", |w| &w.rejected),
    ("clients_cut_output", "Clients cut because they did not read their replies", |w| &w.cut_output),
    ("clients_handshakes_failed", "TLS handshakes with clients that failed or took too long", |w| &w.handshakes_failed),
    ("clients_logins_failed", "Logins with a wrong password or user", |w| &w.logins_failed),
    ("clients_cut_missed", "Subscribers disconnected because messages for them may have been missed", |w| &w.cut_missed),
    ("slow_commands_not_entered", "Commands that took long while more did than the slow log takes", |w| &w.slow_not_entered),
    ("clients_limited", "Commands and logins refused because of a limit of a user, a listener or keys", |w| &w.limited),
    ("clients_limited_connections", "Connections refused because of a limit of their listener", |w| &w.limited_connections),
    ("clients_denied", "Commands refused because the user may not run them", |w| &w.denied),
    ("clients_cut_push", "Subscribers cut because they did not read their messages", |w| &w.cut_push),
    ("clients_evicted", "Clients cut because more memory was in use than memory-max", |w| &w.evicted),
    ("messages", "Messages given to subscribers", |w| &w.messages),
    ("invalidations", "Invalidations given to clients with CLIENT TRACKING", |w| &w.invalidations),
    ("subscriptions_lost", "Subscriptions at nodes that were lost with a connection and had to be restored", |w| &w.subscriptions_lost),
    ("clients_protocol_errors", "Clients closed because of a protocol error", |w| &w.protocol_errors),
    ("clients_received_bytes", "Bytes received from clients", |w| &w.bytes_received),
    ("clients_sent_bytes", "Bytes sent to clients", |w| &w.bytes_sent),
    ("large_transfers", "Requests and replies that travelled on a connection of their own", |w| &w.large),
    ("home_waits", "Commands that waited for keys that were moved alone to be brought home", |w| &w.homing),
    ("home_refused", "Commands that waited for that and were refused in the end", |w| &w.not_home),
];

/// Gauges over all clients.
const CLIENT_GAUGES: &[(&str, &str, WorkerCounter)] = &[
    ("subscriptions", "Channels and patterns that clients are subscribed to", |w| &w.subscriptions),
    ("clients_subscribed", "Clients that are subscribed to a channel or pattern", |w| &w.subscribers),
    ("clients_tracking", "Clients with CLIENT TRACKING", |w| &w.tracking),
    ("tracked_keys", "Keys that clients with CLIENT TRACKING have read", |w| &w.tracked_keys),
    ("node_subscriptions", "Subscriptions of the workers in force at nodes", |w| &w.upstream_subscriptions),
];

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let classes = CommandClass::ALL;
        let per_node: Vec<_> = self.nodes.iter().map(|(id, name, up)| (name.as_str(), *up, self.node_counters(*id))).collect();

        for (name, help, counter) in NODE_COUNTERS {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for (node, _, parts) in &per_node {
                family.encode_family(&Labels(&[("node", node)]))?.encode_counter::<NoLabelSet, u64, f64>(&total(parts, counter), None)?;
            }
        }
        for (name, help, gauge) in NODE_GAUGES {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (node, _, parts) in &per_node {
                family.encode_family(&Labels(&[("node", node)]))?.encode_gauge(&(total(parts, gauge) as i64))?;
            }
        }
        let mut family =
            encoder.encode_descriptor("node_replica_requests", "Reads sent to replicas of the node", None, MetricType::Counter)?;
        for (id, name, _) in &self.nodes {
            let classes = self.workers.iter().flat_map(|w| w.replicas(*id).classes.each_ref().map(|c| c.requests.get()));
            let value: u64 = classes.sum();
            family.encode_family(&Labels(&[("node", name.as_str())]))?.encode_counter::<NoLabelSet, u64, f64>(&value, None)?;
        }
        let mut family = encoder.encode_descriptor(
            "node_replica_connections",
            "Connections to replicas of the node that are up",
            None,
            MetricType::Gauge,
        )?;
        for (id, name, _) in &self.nodes {
            let value: u64 = self.workers.iter().map(|w| w.replicas(*id).connections.get()).sum();
            family.encode_family(&Labels(&[("node", name.as_str())]))?.encode_gauge(&(value as i64))?;
        }
        let mut family = encoder.encode_descriptor("node_up", "1 where a worker has a connection to the node", None, MetricType::Gauge)?;
        for (node, up, _) in &per_node {
            family.encode_family(&Labels(&[("node", node)]))?.encode_gauge(&i64::from(*up))?;
        }
        type ClassCounter = fn(&NodeClass) -> &Counter;
        let class_counters: [(&str, &str, ClassCounter); 2] = [
            ("node_requests", "Commands sent to the node", |c| &c.requests),
            ("node_errors", "Commands that the node answered with an error, or not at all", |c| &c.errors),
        ];
        for (name, help, counter) in class_counters {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for (node, _, parts) in &per_node {
                for class in classes {
                    let value: u64 = parts.iter().map(|p| counter(&p.classes[class as usize]).get()).sum();
                    if value > 0 {
                        family
                            .encode_family(&Labels(&[("node", node), ("class", class.name())]))?
                            .encode_counter::<NoLabelSet, u64, f64>(&value, None)?;
                    }
                }
            }
        }
        let mut family = encoder.encode_descriptor(
            "node_latency",
            "Time from sending a command to the node until its reply",
            Some(&Unit::Seconds),
            MetricType::Histogram,
        )?;
        for (node, _, parts) in &per_node {
            for class in classes {
                let sum = Sum::of(parts.iter().map(|p| &p.classes[class as usize].upstream));
                if sum.count() > 0 {
                    family.encode_family(&Labels(&[("node", node), ("class", class.name())]))?.encode_histogram::<NoLabelSet>(
                        sum.sum_us as f64 / 1e6,
                        sum.count(),
                        &sum.exported(),
                        None,
                    )?;
                }
            }
        }

        for (name, help, counter) in CLIENT_COUNTERS {
            encoder
                .encode_descriptor(name, help, None, MetricType::Counter)?
                .encode_counter::<NoLabelSet, u64, f64>(&total(&self.workers, counter), None)?;
        }
        let mut family = encoder.encode_descriptor("commands", "Commands of clients, by class", None, MetricType::Counter)?;
        for class in classes {
            let value: u64 = self.workers.iter().map(|w| w.commands[class as usize].get()).sum();
            family.encode_family(&Labels(&[("class", class.name())]))?.encode_counter::<NoLabelSet, u64, f64>(&value, None)?;
        }
        let mut family = encoder.encode_descriptor(
            "command_latency",
            "Time from reading a command until its reply is handed to the client's connection",
            Some(&Unit::Seconds),
            MetricType::Histogram,
        )?;
        for class in classes {
            let sum = Sum::of(self.workers.iter().map(|w| &w.total[class as usize]));
            if sum.count() > 0 {
                family.encode_family(&Labels(&[("class", class.name())]))?.encode_histogram::<NoLabelSet>(
                    sum.sum_us as f64 / 1e6,
                    sum.count(),
                    &sum.exported(),
                    None,
                )?;
            }
        }
        let mut family =
            encoder.encode_descriptor("turn", "Time that a worker works between two waits", Some(&Unit::Seconds), MetricType::Histogram)?;
        for (index, worker) in self.workers.iter().enumerate() {
            let sum = Sum::of(std::iter::once(&worker.turns));
            family.encode_family(&Labels(&[("worker", &index.to_string())]))?.encode_histogram::<NoLabelSet>(
                sum.sum_us as f64 / 1e6,
                sum.count(),
                &sum.exported(),
                None,
            )?;
        }
        for (name, help, gauge) in CLIENT_GAUGES {
            let value = total(&self.workers, gauge) as i64;
            encoder.encode_descriptor(name, help, None, MetricType::Gauge)?.encode_gauge(&value)?;
        }
        let clients = total(&self.workers, |w| &w.clients) as i64;
        encoder.encode_descriptor("clients", "Client connections", None, MetricType::Gauge)?.encode_gauge(&clients)?;
        let blocked = total(&self.workers, |w| &w.blocked) as i64;
        encoder
            .encode_descriptor("clients_blocked", "Clients whose command waits at a node", None, MetricType::Gauge)?
            .encode_gauge(&blocked)?;
        encoder
            .encode_descriptor("topology_epoch", "Epoch of the topology in use", None, MetricType::Gauge)?
            .encode_gauge(&(self.epoch as i64))?;
        let (used, max) = self.memory;
        let max = if max == usize::MAX { 0 } else { max };
        let gauges = [("memory_used", "Memory in use", used), ("memory_max", "Memory that may be used (memory-max); 0: no bound", max)];
        for (name, help, bytes) in gauges {
            encoder.encode_descriptor(name, help, Some(&Unit::Bytes), MetricType::Gauge)?.encode_gauge(&(bytes as i64))?;
        }
        encoder.encode_descriptor("uptime", "Time since start", Some(&Unit::Seconds), MetricType::Gauge)?.encode_gauge(&self.uptime_s)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_of_the_last_half_minute_are_known_until_a_move_begins() {
        let start = Instant::now();
        let second = Duration::from_secs(1);
        let mut lately = WaitsLately::default();
        let waits = |number: u64| Waits([number; BUCKETS]);
        let first = |lately: &WaitsLately, at: Instant| lately.since(at, 3 * second).map(|waits| waits.0[0]);
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
    fn a_value_is_below_the_bound_of_its_bucket_and_not_of_the_one_before() {
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
