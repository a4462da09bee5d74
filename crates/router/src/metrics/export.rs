//! Metrics output: adds up the counters of all workers and encodes them in the Prometheus text format.
//!
//! Each help text must be understandable alone, because tools show it without the others.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, LabelSetEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};
use switchyard_policy::hot_copies::Discarded;
use switchyard_policy::topology::NodeId;
use switchyard_resp::command::CommandClass;

use super::{Counter, Errors, Histogram, NodeClass, NodeCounters, Sum, WorkerCounters};
use crate::exclusive_bounds::{ExclusiveBounds, KINDS};
use crate::mover::Moved;
use crate::single_node_usage::Limited;

/// Input of a scrape.
pub(crate) struct Scrape {
    pub(crate) workers: Vec<Arc<WorkerCounters>>,
    pub(crate) nodes: Vec<NodeScrape>,
    pub(crate) epoch: u64,
    pub(crate) uptime_s: f64,
    /// Bytes in use, and their limit.
    pub(crate) memory: (usize, usize),
    /// Limit of client connections.
    pub(crate) clients_max: usize,
    pub(crate) moved: Moved,
    /// Number of cacheable keys, and whether hot copies are enabled and not suspended.
    pub(crate) hot: (u64, bool),
    /// Commands that only work because there is a single node.
    pub(crate) limited: Vec<Limited>,
    /// Limit of exclusive connections per node and kind.
    pub(crate) exclusive_max: [usize; KINDS],
}

/// Input of a scrape for one node.
pub(crate) struct NodeScrape {
    pub(crate) id: NodeId,
    /// Earlier ids of the node. Their counters are included, so that sums never decrease.
    pub(crate) before: Vec<NodeId>,
    pub(crate) name: String,
    /// A worker has a connection to the node.
    pub(crate) is_up: bool,
    /// Owned slots, and keys with a placement override for this node.
    pub(crate) slots: usize,
    pub(crate) placement_overrides: usize,
    pub(crate) exclusive_bounds: Arc<ExclusiveBounds>,
}

impl NodeScrape {
    /// Returns the current id and all earlier ids.
    fn numbers(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.before.iter().copied().chain([self.id])
    }
}

impl fmt::Debug for Scrape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scrape").finish_non_exhaustive()
    }
}

/// Labels of a sample.
struct Labels(Vec<(&'static str, String)>);

impl EncodeLabelSet for Labels {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> fmt::Result {
        for (name, value) in &self.0 {
            prometheus_client::encoding::EncodeLabel::encode(&(*name, value.as_str()), encoder.encode_label())?;
        }
        Ok(())
    }
}

/// A labelled value.
type Sample<T> = (Labels, T);

fn unlabelled<T>(value: T) -> [Sample<T>; 1] {
    [(Labels(Vec::new()), value)]
}

fn of<T>(name: &'static str, label: &str, value: T) -> Sample<T> {
    (Labels(vec![(name, label.to_owned())]), value)
}

fn total<T>(parts: &[Arc<T>], counter: impl Fn(&T) -> &Counter) -> u64 {
    parts.iter().map(|p| counter(p).get()).sum()
}

type NodeCounter = fn(&NodeCounters) -> &Counter;
type WorkerCounter = fn(&WorkerCounters) -> &Counter;
type ClassCounter = fn(&NodeClass) -> &Counter;
type MovedFigure = fn(&Moved) -> u64;

/// Counters per node: name, help, field.
const NODE_COUNTERS: &[(&str, &str, NodeCounter)] = &[
    ("node_sent_bytes", "Bytes sent to the node", |n| &n.bytes_sent),
    ("node_received_bytes", "Bytes received from the node", |n| &n.bytes_received),
    ("node_connects", "Connections established to the node", |n| &n.connects),
    ("node_connection_failures", "Connections to the node that failed or broke", |n| &n.failures),
    ("node_connections_ended", "Connections that the node has closed", |n| &n.ended),
    ("node_timeouts", "Commands that the node did not answer in time", |n| &n.timeouts),
];

const NODE_GAUGES: &[(&str, &str, NodeCounter)] = &[
    ("node_in_flight", "Commands sent to the node and not yet answered", |n| &n.in_flight),
    ("node_connections", "Connections to the node that are up", |n| &n.connections),
    ("node_unconfirmed_connections", "Broken connections whose commands may still run at the node", |n| &n.unconfirmed),
];

const CLASS_COUNTERS: &[(&str, &str, ClassCounter)] = &[
    ("node_requests", "Commands sent to the node", |c| &c.requests),
    ("node_errors", "Commands that the node answered with an error, or not at all", |c| &c.errors),
];

/// Counters of clients, over all workers.
const CLIENT_COUNTERS: &[(&str, &str, WorkerCounter)] = &[
    ("clients_accepted", "Client connections accepted", |w| &w.accepted),
    ("clients_rejected", "Client connections refused because of the client limit or missing descriptors", |w| {
        &w.rejected
    }),
    ("moves_double_reads", "Reads sent to source and target of a move at once (--protocol netmigrate or fulva)", |w| {
        &w.double_reads
    }),
    ("moves_double_reads_missed", "Double reads that found the key at neither node, so that they waited for it", |w| {
        &w.double_reads_missed
    }),
    ("hot_copies_hits", "Commands that the router has answered from hot copies", |w| &w.hot.hits),
    ("clients_handshakes_failed", "TLS handshakes with clients that failed or took too long", |w| &w.handshakes_failed),
    ("clients_logins_failed", "Logins with a wrong password or user", |w| &w.logins_failed),
    ("slowlog_dropped", "Slow commands that were not logged because of the rate limit of the slow log", |w| {
        &w.slow_not_entered
    }),
    ("clients_limited", "Commands and logins refused because of a limit of a user, a listener or keys", |w| &w.limited),
    ("clients_limited_connections", "Client connections refused because of a limit of their listener", |w| {
        &w.limited_connections
    }),
    ("clients_denied", "Commands refused because the user may not run them", |w| &w.denied),
    ("clients_evicted", "Clients disconnected because memory use exceeded memory-max", |w| &w.evicted),
    ("messages", "Published messages delivered to subscribers", |w| &w.messages),
    ("invalidations", "Invalidations delivered to clients with CLIENT TRACKING", |w| &w.invalidations),
    ("subscriptions_lost", "Subscriptions at nodes that were lost with a connection and had to be restored", |w| {
        &w.subscriptions_lost
    }),
    ("clients_protocol_errors", "Clients closed because of a protocol error", |w| &w.protocol_errors),
    ("clients_closed", "Clients that have closed their connections", |w| &w.ended),
    ("clients_reset", "Clients whose connections broke", |w| &w.broken),
    ("fragments", "Parts of commands whose keys are at several nodes", |w| &w.fragments),
    ("clients_received_bytes", "Bytes received from clients", |w| &w.bytes_received),
    ("clients_sent_bytes", "Bytes sent to clients", |w| &w.bytes_sent),
    ("large_transfers", "Requests and replies that used a separate connection because of their size", |w| &w.large),
    ("colocate_waits", "Commands that waited until their keys were at one node", |w| &w.colocate_waits),
    ("script_repeats", "Calls of scripts that were repeated with keys that they had not declared", |w| {
        &w.script_repeats
    }),
    ("hot_copies_fills", "Reads sent to nodes to fill a hot copy", |w| &w.hot.fills),
    ("hot_copies_invalidations", "Invalidations received from nodes for keys with hot copies", |w| {
        &w.hot.invalidations
    }),
    ("colocate_refused", "Commands refused because their keys could not be brought to one node", |w| {
        &w.colocate_refused
    }),
];

/// Clients that the router has disconnected, by reason.
const DISCONNECTED: [(&str, WorkerCounter); 4] = [
    ("output", |w| &w.cut_output),
    ("push", |w| &w.cut_push),
    ("missed", |w| &w.cut_missed),
    ("waiting", |w| &w.cut_waiting),
];

/// Gauges of clients, over all workers.
const CLIENT_GAUGES: &[(&str, &str, WorkerCounter)] = &[
    ("clients", "Client connections", |w| &w.clients),
    ("clients_blocked", "Clients whose command waits at a node", |w| &w.blocked),
    ("subscriptions", "Channels and patterns that clients are subscribed to", |w| &w.subscriptions),
    ("clients_subscribed", "Clients that are subscribed to a channel or pattern", |w| &w.subscribers),
    ("clients_tracking", "Clients with CLIENT TRACKING", |w| &w.tracking),
    ("tracked_keys", "Keys that clients with CLIENT TRACKING have read", |w| &w.tracked_keys),
    ("hot_copies", "Hot copies that workers keep", |w| &w.hot.copies),
    (
        "hot_copies_unconfirmed_writes",
        "Writes of keys with hot copies that a lost connection may still execute: their keys have no copies until then",
        |w| &w.hot.in_doubt,
    ),
    ("node_subscriptions", "Subscriptions of the workers in force at nodes", |w| &w.upstream_subscriptions),
];

/// Counters of all moves.
const MOVED: &[(&str, &str, MovedFigure)] = &[
    ("moves_slots_moved", "Slots that moves have handed over to another node", |moved| moved.slots),
    ("moves_keys_moved", "Keys that moves have moved", |moved| moved.keys),
    ("moves_bytes_moved", "Bytes of serialised values that moves have moved", |moved| moved.bytes),
    ("moves_keys_pulled", "Keys that moves have moved early because a command needed them", |moved| moved.pulled),
    ("moves_batches_repeated", "Batches that moves have repeated because their outcome was unknown", |moved| {
        moved.repeated
    }),
    ("moves_big_keys_in_pieces", "Big keys that moves have moved in pieces", |moved| moved.big_in_pieces),
    ("moves_big_keys_whole", "Big keys that moves have moved whole", |moved| moved.big_whole),
];

/// Label values of exclusive connections.
const EXCLUSIVE: [&str; KINDS] = ["large", "watch", "blocking"];

impl Scrape {
    /// Returns the Prometheus text format.
    pub(crate) fn text(self) -> String {
        let mut registry = Registry::with_prefix("switchyard");
        registry.register_collector(Box::new(self));
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = prometheus_client::encoding::text::encode(&mut text, &registry);
        text
    }

    fn node_counters(&self, node: &NodeScrape) -> Vec<Arc<NodeCounters>> {
        node.numbers().flat_map(|id| self.workers.iter().map(move |w| w.node(id))).collect()
    }

    /// Adds up a histogram of all workers.
    fn sum_of(&self, histogram: impl Fn(&WorkerCounters) -> &Histogram) -> Sum {
        Sum::of(self.workers.iter().map(|worker| histogram(worker)))
    }
}

/// Writes metric families.
struct Page<'a>(DescriptorEncoder<'a>);

impl Page<'_> {
    /// Writes a family, also without samples, so that its existence is visible.
    fn family<T>(
        &mut self,
        (name, help, unit): (&str, &str, Option<&Unit>),
        kind: MetricType,
        samples: impl IntoIterator<Item = Sample<T>>,
        encode: impl Fn(MetricEncoder<'_>, &T) -> fmt::Result,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, unit, kind)?;
        for (labels, value) in samples {
            if labels.0.is_empty() {
                return encode(family, &value); // no further sample is possible
            }
            encode(family.encode_family(&labels)?, &value)?;
        }
        Ok(())
    }

    fn counters(&mut self, name: &str, help: &str, samples: impl IntoIterator<Item = Sample<u64>>) -> fmt::Result {
        self.family((name, help, None), MetricType::Counter, samples, |mut to, value| {
            to.encode_counter::<NoLabelSet, u64, f64>(value, None)
        })
    }

    fn gauges(&mut self, name: &str, help: &str, samples: impl IntoIterator<Item = Sample<u64>>) -> fmt::Result {
        self.family((name, help, None), MetricType::Gauge, samples, |mut to, value| to.encode_gauge(&(*value as i64)))
    }

    /// Writes histograms. Empty ones are omitted.
    fn histograms(&mut self, name: &str, help: &str, samples: impl IntoIterator<Item = Sample<Sum>>) -> fmt::Result {
        let known = samples.into_iter().filter(|(_, sum)| sum.count() > 0);
        self.family((name, help, Some(&Unit::Seconds)), MetricType::Histogram, known, |mut to, sum| {
            to.encode_histogram::<NoLabelSet>(sum.sum_us as f64 / 1e6, sum.count(), &sum.exported(), None)
        })
    }
}

impl Collector for Scrape {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut page = Page(encoder);
        self.encode_nodes(&mut page)?;
        self.encode_clients(&mut page)?;
        for (name, help, figure) in MOVED {
            page.counters(name, help, unlabelled(figure(&self.moved)))?;
        }
        page.gauges("topology_epoch", "Epoch of the topology in use", unlabelled(self.epoch))?;
        let (used, max) = self.memory;
        let max = if max == usize::MAX { 0 } else { max };
        let gauges = [
            ("memory_used", "Memory in use by the router", used),
            ("hot_copies", "Memory used by hot copies", total(&self.workers, |w| &w.hot.bytes) as usize),
            ("memory_max", "Memory that the router may use (memory-max); 0 without a limit", max),
        ];
        for (name, help, bytes) in gauges {
            page.family(
                (name, help, Some(&Unit::Bytes)),
                MetricType::Gauge,
                unlabelled(bytes as i64),
                |mut to, value| to.encode_gauge(value),
            )?;
        }
        page.family(
            ("uptime", "Time since the router started", Some(&Unit::Seconds)),
            MetricType::Gauge,
            unlabelled(self.uptime_s),
            |mut to, value| to.encode_gauge(value),
        )
    }
}

impl Scrape {
    fn encode_nodes(&self, page: &mut Page<'_>) -> fmt::Result {
        let nodes: Vec<_> = self.nodes.iter().map(|node| (node, self.node_counters(node))).collect();
        let by_node = |value: &dyn Fn(&NodeScrape) -> u64| -> Vec<Sample<u64>> {
            self.nodes.iter().map(|node| of("node", &node.name, value(node))).collect()
        };
        page.gauges("node_up", "1 if a worker has a connection to the node", by_node(&|node| u64::from(node.is_up)))?;
        page.gauges("node_slots", "Slots that the node owns", by_node(&|node| node.slots as u64))?;
        let help = "Keys with a placement override for the node";
        page.gauges("node_placement_overrides", help, by_node(&|node| node.placement_overrides as u64))?;
        for (name, help, counter) in NODE_COUNTERS {
            page.counters(name, help, nodes.iter().map(|(node, parts)| of("node", &node.name, total(parts, counter))))?;
        }
        for (name, help, gauge) in NODE_GAUGES {
            page.gauges(name, help, by_node(&|node| self.workers.iter().map(|w| gauge(&w.node(node.id)).get()).sum()))?;
        }
        let by_kind = |value: &dyn Fn(&NodeScrape, usize) -> u64| -> Vec<Sample<u64>> {
            let labels =
                |node: &NodeScrape, kind: &str| Labels(vec![("node", node.name.clone()), ("kind", kind.to_owned())]);
            let kinds = |node| EXCLUSIVE.iter().enumerate().map(move |(place, kind)| (node, place, *kind));
            self.nodes
                .iter()
                .flat_map(kinds)
                .map(|(node, place, kind)| (labels(node, kind), value(node, place)))
                .collect()
        };
        let help = "Exclusive connections to the node (one client at a time), by kind";
        page.gauges(
            "node_exclusive_connections",
            help,
            by_kind(&|node, kind| node.exclusive_bounds.open(kind) as u64),
        )?;
        let help = "Limit of exclusive connections to the node (one client at a time), by kind";
        let most = |node: &NodeScrape, kind: usize| node.exclusive_bounds.bound(self.exclusive_max[kind]) as u64;
        page.gauges("node_exclusive_connections_max", help, by_kind(&most))?;
        let of_replicas = |value: &dyn Fn(&NodeCounters) -> u64, id: NodeId| -> u64 {
            self.workers.iter().map(|w| value(&w.replicas(id))).sum()
        };
        let requests = |replicas: &NodeCounters| replicas.classes.iter().map(|class| class.requests.get()).sum();
        let all_requests = |node: &NodeScrape| node.numbers().map(|id| of_replicas(&requests, id)).sum();
        page.counters("node_replica_requests", "Reads sent to replicas of the node", by_node(&all_requests))?;
        let help = "Connections to replicas of the node that are up";
        page.gauges(
            "node_replica_connections",
            help,
            by_node(&|node| of_replicas(&|replicas| replicas.connections.get(), node.id)),
        )?;

        let by_class = nodes.iter().flat_map(|(node, parts)| CommandClass::ALL.map(|class| (node, class, parts)));
        let labels = |node: &NodeScrape, class: CommandClass| {
            Labels(vec![("node", node.name.clone()), ("class", class.name().to_owned())])
        };
        for (name, help, counter) in CLASS_COUNTERS {
            let values = by_class.clone().map(|(node, class, parts)| {
                let value: u64 = parts.iter().map(|part| counter(&part.classes[class as usize]).get()).sum();
                (labels(node, class), value)
            });
            page.counters(name, help, values.filter(|(_, value)| *value > 0))?;
        }
        let latencies = by_class.map(|(node, class, parts)| {
            (labels(node, class), Sum::of(parts.iter().map(|part| &part.classes[class as usize].upstream)))
        });
        page.histograms("node_latency", "Time from sending a command to the node until its reply", latencies)
    }

    fn encode_clients(&self, page: &mut Page<'_>) -> fmt::Result {
        for (name, help, counter) in CLIENT_COUNTERS {
            page.counters(name, help, unlabelled(total(&self.workers, counter)))?;
        }
        for (name, help, gauge) in CLIENT_GAUGES {
            page.gauges(name, help, unlabelled(total(&self.workers, gauge)))?;
        }
        let disconnected = DISCONNECTED.map(|(reason, counter)| of("reason", reason, total(&self.workers, counter)));
        page.counters("clients_disconnected", "Clients that the router has disconnected, by reason", disconnected)?;
        let help = "Discarded fills of hot copies, by reason";
        let discarded = Discarded::ALL
            .map(|reason| of("reason", reason.name(), total(&self.workers, |w| &w.hot.discarded[reason as usize])));
        page.counters("hot_copies_discarded", help, discarded)?;
        let (keys, is_on) = self.hot;
        page.gauges("hot_copies_keys", "Cacheable keys", unlabelled(keys))?;
        page.gauges(
            "hot_copies_enabled",
            "1 if hot copies are enabled and not suspended",
            unlabelled(u64::from(is_on)),
        )?;
        page.gauges("clients_max", "Limit of client connections (max-clients)", unlabelled(self.clients_max as u64))?;
        let errors = Errors::of_all(&self.workers);
        page.counters(
            "errors",
            "Errors sent to clients, by code",
            errors.iter().map(|(code, count)| of("code", code, *count)),
        )?;
        let limited = self.limited.iter().map(|Limited { command, limit, count }| {
            (Labels(vec![("command", command.clone()), ("limit", limit.name().to_owned())]), *count)
        });
        page.counters(
            "multi_node_incompatible_commands",
            "Commands that only work because there is a single node, by reason",
            limited,
        )?;
        let classes = CommandClass::ALL;
        let commands =
            classes.map(|class| of("class", class.name(), total(&self.workers, |w| &w.commands[class as usize])));
        page.counters("commands", "Commands of clients, by class", commands)?;
        page.histograms(
            "command_latency",
            "Time from reading a command until its reply is handed to the client's connection, for commands answered without an error",
            classes.map(|class| of("class", class.name(), self.sum_of(|worker| &worker.total[class as usize]))),
        )?;
        page.histograms(
            "failed_command_latency",
            "Time from reading a command until its reply is handed to the client's connection, for commands answered with an error",
            unlabelled(self.sum_of(|worker| &worker.failed)),
        )?;
        let help = "Time that a worker is busy between two waits, over all workers";
        page.histograms("worker_loop_duration", help, unlabelled(self.sum_of(|worker| &worker.turns)))?;
        let busy = self
            .workers
            .iter()
            .enumerate()
            .map(|(number, worker)| of("worker", &number.to_string(), worker.turns.sum_us.get() as f64 / 1e6));
        let help = "Time that the worker was busy; its rate is the worker's CPU use";
        page.family(("worker_busy_time", help, Some(&Unit::Seconds)), MetricType::Counter, busy, |mut to, value| {
            to.encode_counter::<NoLabelSet, f64, f64>(value, None)
        })
    }
}
