//! INFO: sums over the nodes and figures of the router, in Redis's sections and field names, so that tools for a single
//! server can read a fleet.
//!
//! Nodes are queried for the required sections, and each reply is parsed on arrival, so little work is left at the end
//! of the gather. Results are cached for [`FRESH_US`], because clients query in bursts: many libraries send INFO with
//! every new connection.

mod command;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::Ordering;

use switchyard_resp::reply;

use super::turn::Turn;
use crate::lock::lock;
use crate::metrics::Errors;
use crate::metrics::{Counter, HotCounters};
use crate::pubsub::Kind;
use crate::shared::RoutingSnapshot;
use crate::single_node_usage::Limited;

/// Maximum age of cached results, microseconds. A client that has written since gets new ones.
const FRESH_US: u64 = 100_000;

/// Sections of INFO without arguments.
const DEFAULT: &[&str] = &[
    "server",
    "clients",
    "memory",
    "persistence",
    "stats",
    "replication",
    "cpu",
    "errorstats",
    "cluster",
    "keyspace",
    "hot_copies",
    "switchyard",
];

/// Fields of nodes that are summed, by section.
const SUMMED: &[(&str, &[&str])] = &[
    (
        "memory",
        &[
            "used_memory",
            "used_memory_rss",
            "used_memory_peak",
            "used_memory_overhead",
            "used_memory_startup",
            "used_memory_dataset",
            "used_memory_scripts",
            "total_system_memory",
            "maxmemory",
            "mem_not_counted_for_evict",
            "lazyfree_pending_objects",
            "lazyfreed_objects",
        ],
    ),
    (
        "persistence",
        &["rdb_changes_since_last_save", "rdb_bgsave_in_progress", "aof_enabled", "aof_rewrite_in_progress"],
    ),
    (
        "stats",
        &[
            "expired_keys",
            "evicted_keys",
            "keyspace_hits",
            "keyspace_misses",
            "instantaneous_ops_per_sec",
            "total_reads_processed",
        ],
    ),
    ("cpu", &["used_cpu_sys", "used_cpu_user"]),
];

/// Fields of the section `memory` that are similar on all nodes: the maximum is shown.
const LARGEST: [&str; 3] = ["number_of_cached_scripts", "number_of_functions", "number_of_libraries"];

/// Fields with the minimum shown. A node that is not loading serves, and libraries would wait for the slowest.
const SMALLEST: [&str; 1] = ["loading"];

/// Texts of the section `memory` that are shown if all nodes agree.
const AGREED: &[&str] = &["mem_allocator", "maxmemory_policy"];

/// Summed figures of the section `clients` that only nodes know.
const BLOCKING_KEYS: [&str; 2] = ["total_blocking_keys", "total_blocking_keys_on_nokey"];

/// Sections queried from nodes. The last one is small and only shows which nodes reply.
const ASKED: [&str; 8] = ["clients", "memory", "persistence", "stats", "cpu", "commandstats", "keyspace", "cluster"];
const WHO_ANSWERS: u16 = 1 << (ASKED.len() - 1);

/// Figures of a line `name:a=1,b=2`, in order.
type Figures = Vec<(String, f64)>;

/// Sums of the nodes' replies.
#[derive(Debug, Default)]
pub(super) struct Digest {
    /// Sections of [`ASKED`], as bits.
    sections: u16,
    queried_us: u64,
    answering: usize,
    sums: BTreeMap<&'static str, f64>,
    largest: BTreeMap<&'static str, f64>,
    smallest: BTreeMap<&'static str, f64>,
    agreed: BTreeMap<&'static str, String>,
    /// Lines of `commandstats`.
    statistics: BTreeMap<String, Figures>,
    /// By database: keys, keys with a TTL, sum of their TTLs in milliseconds.
    databases: BTreeMap<u32, (u64, u64, u64)>,
}

impl Digest {
    /// Adds a node's reply.
    pub(super) fn take(&mut self, answer: &[u8]) {
        if reply::is_error(answer) {
            return;
        }
        let Some(text) = reply::text(answer) else { return };
        self.answering += 1;
        self.add(text);
    }

    /// Adds the figures of a node's INFO.
    pub(super) fn add(&mut self, text: &[u8]) {
        for line in String::from_utf8_lossy(text).lines() {
            let Some((name, value)) = line.split_once(':') else { continue };
            if name.starts_with("cmdstat_") {
                self.take_statistics(name, value);
            } else if let Some(number) = name.strip_prefix("db").and_then(|number| number.parse().ok()) {
                self.take_database(number, value);
            } else {
                self.take_field(name, value.trim());
            }
        }
    }

    fn take_field(&mut self, name: &str, value: &str) {
        let of = |names: &[&'static str]| names.iter().find(|known| **known == name).copied();
        if let Some(name) = SUMMED.iter().find_map(|(_, names)| of(names)).or_else(|| of(&BLOCKING_KEYS)) {
            if let Ok(value) = value.parse::<f64>() {
                *self.sums.entry(name).or_default() += value;
            }
        } else if let Some(name) = of(&LARGEST) {
            if let Ok(value) = value.parse::<f64>() {
                let largest = self.largest.entry(name).or_insert(value);
                *largest = largest.max(value);
            }
        } else if let Some(name) = of(&SMALLEST) {
            if let Ok(value) = value.parse::<f64>() {
                let smallest = self.smallest.entry(name).or_insert(value);
                *smallest = smallest.min(value);
            }
        } else if let Some(name) = of(AGREED) {
            let said = self.agreed.entry(name).or_insert_with(|| value.to_owned());
            if said != value {
                // No single value is true for the fleet.
                "nodes differ".clone_into(said);
            }
        }
    }

    fn take_statistics(&mut self, name: &str, figures: &str) {
        let line = match self.statistics.get_mut(name) {
            Some(line) => line,
            None => self.statistics.entry(name.to_owned()).or_default(),
        };
        for (figure, value) in figures.split(',').filter_map(|f| f.split_once('=')) {
            let Ok(value) = value.trim().parse::<f64>() else { continue };
            match line.iter_mut().find(|(known, _)| known == figure) {
                Some((_, sum)) => *sum += value,
                None => line.push((figure.to_owned(), value)),
            }
        }
    }

    fn take_database(&mut self, number: u32, fields: &str) {
        let field = |name: &str| {
            let of = |f: &str| f.trim().strip_prefix(name)?.strip_prefix('=')?.parse::<u64>().ok();
            fields.split(',').find_map(of).unwrap_or(0)
        };
        let entry = self.databases.entry(number).or_default();
        entry.0 += field("keys");
        entry.1 += field("expires");
        entry.2 += field("avg_ttl") * field("expires");
    }

    /// Returns `cmdstat_get:calls=1,...` of all nodes; `usec_per_call` is recomputed.
    fn statistics(&self) -> Vec<(String, String)> {
        let show = |(name, figures): (&String, &Figures)| {
            let of =
                |wanted: &str| figures.iter().find(|(figure, _)| figure == wanted).map_or(0.0, |(_, value)| *value);
            let shown = figures.iter().map(|(figure, value)| match figure.as_str() {
                "usec_per_call" => format!("usec_per_call={:.2}", of("usec") / of("calls").max(1.0)),
                _ => format!("{figure}={}", format_number(*value)),
            });
            (name.clone(), shown.collect::<Vec<_>>().join(","))
        };
        self.statistics.iter().map(show).collect()
    }

    /// Returns `db0:keys=3,expires=1,avg_ttl=20` of all nodes (the average by keys with a TTL). Excludes staging keys
    /// of movers, which all have a TTL.
    fn keyspace(&self, temporary: &BTreeMap<u32, u64>) -> Vec<(String, String)> {
        let line = |(number, (keys, expires, ttl)): (&u32, &(u64, u64, u64))| {
            let ours = temporary.get(number).copied().unwrap_or(0);
            let (clients, clients_expiring) = (keys.saturating_sub(ours), expires.saturating_sub(ours));
            let average = if clients_expiring == 0 { 0 } else { ttl / expires };
            (clients > 0).then(|| {
                (format!("db{number}"), format!("keys={clients},expires={clients_expiring},avg_ttl={average}"))
            })
        };
        self.databases.iter().filter_map(line).collect()
    }
}

/// Whether INFO with these arguments, in lower case, shows a section.
fn shows(wanted: &[String], section: &str) -> bool {
    let is_named = |name: &str| wanted.iter().any(|s| s == name);
    is_named("all")
        || is_named("everything")
        || is_named(section)
        || ((wanted.is_empty() || is_named("default")) && DEFAULT.contains(&section))
}

fn human(bytes: f64) -> String {
    let units = ["B", "K", "M", "G", "T"];
    let power = (bytes.max(1.0).log2() / 10.0).floor().clamp(0.0, 4.0);
    format!("{:.2}{}", bytes / 1024f64.powf(power), units[power as usize])
}

/// Returns the section about hot copies.
fn hot_copies_fields(turn: &Turn) -> Vec<(&'static str, String)> {
    let hot = &turn.shared().hot;
    let total = |of: fn(&HotCounters) -> &Counter| turn.shared().counters.iter().map(|w| of(&w.hot).get()).sum::<u64>();
    let discarded: u64 = turn.shared().counters.iter().flat_map(|w| w.hot.discarded.iter()).map(Counter::get).sum();
    vec![
        ("hot_copies_answer", u8::from(turn.routing().live.hot_copies.is_on && !hot.is_suspended()).to_string()),
        ("hot_copies_keys", hot.keys().to_string()),
        ("hot_copies", total(|of| &of.copies).to_string()),
        ("hot_copies_bytes", total(|of| &of.bytes).to_string()),
        ("hot_copies_hits", total(|of| &of.hits).to_string()),
        ("hot_copies_fills", total(|of| &of.fills).to_string()),
        ("hot_copies_discarded", discarded.to_string()),
        ("hot_copies_invalidations", total(|of| &of.invalidations).to_string()),
        ("hot_copies_unconfirmed_writes", total(|of| &of.in_doubt).to_string()),
    ]
}

fn format_number(value: f64) -> String {
    if value.fract() == 0.0 { format!("{value:.0}") } else { format!("{value:.6}") }
}

/// Returns the errors sent to clients since the last CONFIG RESETSTAT, by code. Not from nodes: they include errors
/// of the router's own commands, and lack its refusals.
fn error_counts(turn: &Turn) -> BTreeMap<String, u64> {
    let before = lock(&turn.shared().errors_before);
    let since = |(code, count): (String, u64)| {
        let count = count - before.get(&code).copied().unwrap_or(0).min(count);
        (count > 0).then_some((code, count))
    };
    Errors::of_all(&turn.shared().counters).into_iter().filter_map(since).collect()
}

/// Returns the text of INFO from the nodes' replies.
pub(super) fn info_text(turn: &Turn, digest: &Digest, wanted: &[String]) -> String {
    let shows = |section: &str| shows(wanted, section);
    let sum = |field: &str| digest.sums.get(field).copied();
    let workers = &turn.shared().counters;
    let total = |counter: fn(&crate::metrics::WorkerCounters) -> &Counter| {
        workers.iter().map(|w| counter(w).get()).sum::<u64>()
    };
    let commands: u64 = workers.iter().flat_map(|w| w.commands.iter()).map(Counter::get).sum();
    let errors = error_counts(turn);
    let uptime = turn.shared().uptime().as_secs();
    let routing = &turn.routing();
    let mut text = String::new();
    let mut sections: Vec<(&str, Vec<(String, String)>)> = Vec::new();
    let mut add = |section: &'static str, fields: Vec<(&str, String)>| {
        sections.push((section, fields.into_iter().map(|(k, v)| (k.to_string(), v)).collect()));
    };
    let nodes = lock(&turn.shared().nodes);
    let compatible = oldest(routing.topology.nodes().filter_map(|n| Some(nodes.get(&n.id)?.redis_version.as_str())));
    drop(nodes);
    let (server, version) = fleet_version(turn, routing);
    let mut identity = vec![("redis_version", compatible)];
    if server == "valkey" {
        identity.extend([("server_name", server.to_string()), ("valkey_version", version)]);
    }
    let process = {
        vec![
            ("redis_mode", if routing.live.cluster.is_some() { "cluster" } else { "standalone" }.into()),
            ("switchyard_version", env!("CARGO_PKG_VERSION").into()),
            ("os", format!("{} {}", std::env::consts::OS, std::env::consts::ARCH)),
            ("arch_bits", usize::BITS.to_string()),
            ("multiplexing_api", "epoll".into()),
            ("process_id", std::process::id().to_string()),
            ("run_id", turn.shared().incarnation.clone()),
            ("tcp_port", turn.shared().port.to_string()),
            ("uptime_in_seconds", uptime.to_string()),
            ("uptime_in_days", (uptime / 86400).to_string()),
            ("io_threads_active", u8::from(workers.len() > 1).to_string()),
        ]
    };
    identity.extend(process);
    add("server", identity);
    let mut clients = vec![
        ("connected_clients", turn.shared().clients.load(Ordering::Relaxed).to_string()),
        ("maxclients", routing.live.max_clients.to_string()),
        ("blocked_clients", total(|w| &w.blocked).to_string()),
        ("tracking_clients", total(|w| &w.tracking).to_string()),
        ("pubsub_clients", total(|w| &w.subscribers).to_string()),
    ];
    clients.extend(BLOCKING_KEYS.into_iter().filter_map(|field| Some((field, format_number(sum(field)?)))));
    add("clients", clients);
    for (section, fields) in SUMMED {
        let mut list: Vec<(&str, String)> = fields.iter().filter_map(|f| Some((*f, format_number(sum(f)?)))).collect();
        match *section {
            "memory" => {
                list.push(("used_memory_human", human(sum("used_memory").unwrap_or(0.0))));
                let (used, max) = (crate::memory::heap_used(), routing.live.memory_max);
                list.push(("switchyard_used_memory", used.to_string()));
                list.push(("switchyard_used_memory_human", human(used as f64)));
                list.push(("switchyard_memory_max", if max == usize::MAX { 0 } else { max }.to_string()));
                list.extend(
                    LARGEST.into_iter().filter_map(|field| Some((field, format_number(*digest.largest.get(field)?)))),
                );
                list.extend(AGREED.iter().filter_map(|field| Some((*field, digest.agreed.get(field)?.clone()))));
            }
            "persistence" => {
                let smallest =
                    SMALLEST.into_iter().filter_map(|field| Some((field, format_number(*digest.smallest.get(field)?))));
                list.splice(0..0, smallest);
            }
            "stats" => {
                list.push(("total_error_replies", errors.values().sum::<u64>().to_string()));
                list.push(("total_connections_received", total(|w| &w.accepted).to_string()));
                list.push(("rejected_connections", total(|w| &w.rejected).to_string()));
                list.push(("total_commands_processed", commands.to_string()));
                list.push(("total_net_input_bytes", total(|w| &w.bytes_received).to_string()));
                list.push(("total_net_output_bytes", total(|w| &w.bytes_sent).to_string()));
                let cut = total(|w| &w.cut_output) + total(|w| &w.cut_push);
                list.push(("client_output_buffer_limit_disconnections", cut.to_string()));
                list.push(("evicted_clients", total(|w| &w.evicted).to_string()));
                for (field, kind) in [
                    ("pubsub_channels", Kind::Channel),
                    ("pubsub_patterns", Kind::Pattern),
                    ("pubsubshard_channels", Kind::Shard),
                ] {
                    list.push((field, turn.shared().subscriptions.count(kind).to_string()));
                }
                list.push(("tracking_total_keys", total(|w| &w.tracked_keys).to_string()));
                list.push(("tracking_total_items", total(|w| &w.tracked_reads).to_string()));
                list.push(("tracking_total_prefixes", total(|w| &w.tracked_prefixes).to_string()));
            }
            _ => {}
        }
        add(section, list);
    }
    sections.push(("commandstats", digest.statistics()));
    let shown = errors.iter().map(|(code, count)| (format!("errorstat_{code}"), format!("count={count}")));
    sections.push(("errorstats", shown.collect()));
    let mut add = |section: &'static str, fields: Vec<(&str, String)>| {
        sections.push((section, fields.into_iter().map(|(k, v)| (k.to_string(), v)).collect()));
    };
    add("replication", vec![("role", "master".into()), ("connected_slaves", "0".into())]);
    add("cluster", vec![("cluster_enabled", u8::from(routing.live.cluster.is_some()).to_string())]);
    let mut temporary: BTreeMap<u32, u64> = BTreeMap::new();
    if shows("keyspace") {
        routing.moves.by_id.values().for_each(|mover| mover.count_temporary(&mut temporary));
    }
    sections.push(("keyspace", digest.keyspace(&temporary)));
    let hot_copies = if shows("hot_copies") { hot_copies_fields(turn) } else { Vec::new() };
    sections.push(("hot_copies", hot_copies.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()));
    sections.push((
        "switchyard",
        if shows("switchyard") { own_fields(turn, digest, total(|w| &w.large)) } else { Vec::new() },
    ));
    for (section, fields) in sections.iter().filter(|(s, _)| shows(s)) {
        let mut title = (*section).to_string();
        title[..1].make_ascii_uppercase();
        let title = if *section == "cpu" { "CPU".into() } else { title };
        let _ = write!(text, "{}# {title}\r\n", if text.is_empty() { "" } else { "\r\n" });
        for (name, value) in fields {
            let _ = write!(text, "{name}:{value}\r\n");
        }
    }
    text
}

/// Returns the section about the router and its nodes.
fn own_fields(turn: &Turn, digest: &Digest, large: u64) -> Vec<(String, String)> {
    let (topology, workers) = (&turn.routing().topology, &turn.shared().counters);
    let mut own: Vec<(String, String)> = vec![
        ("commands_version".into(), crate::operator::COMMANDS_VERSION.to_string()),
        ("workers".into(), workers.len().to_string()),
        ("topology_epoch".into(), topology.epoch().to_string()),
        ("nodes".into(), topology.nodes().len().to_string()),
        ("nodes_answering".into(), digest.answering.to_string()),
        ("batched_sends".into(), if turn.sends_batched() { "yes" } else { "no" }.into()),
        ("large_transfers".into(), large.to_string()),
    ];
    let mut limited: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for Limited { command, limit, count } in turn.shared().alone.all() {
        limited
            .entry(format!("limited_{}", command.to_ascii_lowercase()))
            .or_default()
            .push(format!("{}={count}", limit.name()));
    }
    own.extend(limited.into_iter().map(|(name, counts)| (name, counts.join(","))));
    let mut slots = vec![0_u32; topology.node_id_bound()];
    topology.slots().for_each(|slot| slots[topology.owner(slot).index()] += 1);
    for node in topology.nodes() {
        let in_flight: u64 = workers.iter().map(|w| w.node(node.id).in_flight.get()).sum();
        let (state, version) = turn.shared().with_facts(node.id, |facts| {
            (if facts.failure.is_some() { "down" } else { "up" }, format!("{} {}", facts.flavour, facts.version))
        });
        let (name, slots) = (&node.name, slots[node.id.index()]);
        own.push((
            format!("node{}", node.id.0),
            format!("addr={name},state={state},slots={slots},version={version},in_flight={in_flight}"),
        ));
    }
    own
}

/// Returns the oldest of some versions, or a default if none is known yet.
pub(super) fn oldest<'v>(versions: impl Iterator<Item = &'v str>) -> String {
    let parts = |version: &&str| {
        let mut parts = version.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
        [(); 4].map(|()| parts.next().unwrap_or(0))
    };
    versions.filter(|version| !version.is_empty()).min_by_key(parts).unwrap_or("7.0.0").to_owned()
}

/// Returns the server name and version shown to clients: Valkey if all nodes are Valkey, and the oldest version,
/// because features that it lacks cannot be relied on.
pub(super) fn fleet_version(turn: &Turn, routing: &RoutingSnapshot) -> (&'static str, String) {
    let nodes = lock(&turn.shared().nodes);
    let known =
        || routing.topology.nodes().filter_map(|node| nodes.get(&node.id)).filter(|facts| !facts.version.is_empty());
    if known().next().is_some() && known().all(|facts| facts.flavour == "valkey") {
        return ("valkey", oldest(known().map(|facts| facts.version.as_str())));
    }
    ("redis", oldest(known().map(|facts| facts.redis_version.as_str())))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::{Digest, human, shows};

    fn digest(texts: &[&str]) -> Digest {
        let mut digest = Digest::default();
        for text in texts {
            digest.take(format!("${}\r\n{text}\r\n", text.len()).as_bytes());
        }
        digest.take(b"-NOPERM no\r\n");
        assert_eq!(digest.answering, texts.len());
        digest
    }

    #[test]
    fn words_are_shown_where_all_nodes_agree() {
        let digest = digest(&[
            "# Memory\r\nused_memory:3\r\nnumber_of_functions:2\r\nmem_allocator:jemalloc-5.3.0\r\nmaxmemory_policy:noeviction\r\nother:1\r\n",
            "used_memory:4\r\nnumber_of_functions:1\r\nmaxmemory_policy:allkeys-lru\r\n",
        ]);
        assert_eq!((digest.sums["used_memory"], digest.largest["number_of_functions"]), (7.0, 2.0));
        let agreed: Vec<_> = digest.agreed.into_iter().collect();
        assert_eq!(
            agreed,
            [("maxmemory_policy", "nodes differ".to_owned()), ("mem_allocator", "jemalloc-5.3.0".to_owned())]
        );
    }

    #[test]
    fn a_fleet_is_loading_where_no_node_serves() {
        let said = |texts: &[&str]| digest(texts).smallest.get("loading").copied();
        assert_eq!(said(&["# Persistence\r\nloading:1\r\n", "loading:0\r\n"]), Some(0.0));
        assert_eq!(said(&["loading:1\r\n", "loading:1\r\n"]), Some(1.0));
    }

    #[test]
    fn statistics_of_commands_add_up() {
        let texts = [
            "# Commandstats\r\ncmdstat_get:calls=3,usec=3,usec_per_call=1.00,rejected_calls=0,failed_calls=1\r\n",
            "cmdstat_get:calls=1,usec=7,usec_per_call=7.00,rejected_calls=2,failed_calls=0\r\ncmdstat_set:calls=1,usec=1,usec_per_call=1.00\r\n",
        ];
        let pair = |name: &str, figures: &str| (name.to_string(), figures.to_string());
        let commands = [
            pair("cmdstat_get", "calls=4,usec=10,usec_per_call=2.50,rejected_calls=2,failed_calls=1"),
            pair("cmdstat_set", "calls=1,usec=1,usec_per_call=1.00"),
        ];
        assert_eq!(digest(&texts).statistics(), commands);
    }

    #[test]
    fn keys_of_all_nodes_add_up() {
        let texts = [
            "# Keyspace\r\ndb0:keys=3,expires=1,avg_ttl=10\r\n",
            "db0:keys=2,expires=3,avg_ttl=30\r\ndb5:keys=1,expires=0,avg_ttl=0\r\n",
        ];
        let merged = digest(&texts).keyspace(&BTreeMap::new());
        assert_eq!(merged[0], ("db0".into(), "keys=5,expires=4,avg_ttl=25".into()));
        assert_eq!(merged[1].0, "db5");
        let without = digest(&texts).keyspace(&BTreeMap::from([(0, 3), (5, 1)]));
        assert_eq!(
            without,
            [("db0".to_owned(), "keys=2,expires=1,avg_ttl=25".to_owned())],
            "the movers' own keys are not counted"
        );
        assert_eq!(human(1536.0), "1.50K");
    }

    #[test]
    fn a_section_is_shown_where_it_is_named_or_of_those_that_always_are() {
        let shown =
            |words: &[&str], section| shows(&words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>(), section);
        assert!(shown(&[], "memory") && !shown(&[], "commandstats") && shown(&["all"], "commandstats"));
        assert!(shown(&["cpu"], "cpu") && !shown(&["cpu"], "memory") && shown(&["cpu", "default"], "memory"));
    }
}
