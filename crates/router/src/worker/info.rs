//! INFO: the nodes' figures added up and the router's own, in Redis's sections and field names, so that tools made for one server
//! read a fleet.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::Ordering;

use switchyard_resp::reply;

use super::Worker;
use super::local::oldest;
use crate::metrics::Counter;
use crate::pubsub::Kind;

/// Sections that INFO shows when none is named.
const DEFAULT: &[&str] =
    &["server", "clients", "memory", "persistence", "stats", "replication", "cpu", "errorstats", "cluster", "keyspace", "switchyard"];

/// Fields of the nodes that add up to a figure of the fleet, by section.
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
    ("persistence", &["loading", "rdb_changes_since_last_save", "rdb_bgsave_in_progress", "aof_enabled", "aof_rewrite_in_progress"]),
    (
        "stats",
        &[
            "expired_keys",
            "evicted_keys",
            "keyspace_hits",
            "keyspace_misses",
            "total_error_replies",
            "instantaneous_ops_per_sec",
            "total_reads_processed",
        ],
    ),
    ("cpu", &["used_cpu_sys", "used_cpu_user"]),
];

/// Fields of the section `memory` about what every node has alike: the largest figure is the fleet's.
const LARGEST: [&str; 3] = ["number_of_cached_scripts", "number_of_functions", "number_of_libraries"];

/// Words of the section `memory` that are shown where every node says the same.
const AGREED: &[&str] = &["mem_allocator", "maxmemory_policy"];

fn human(bytes: f64) -> String {
    let units = ["B", "K", "M", "G", "T"];
    let power = (bytes.max(1.0).log2() / 10.0).floor().clamp(0.0, 4.0);
    format!("{:.2}{}", bytes / 1024f64.powf(power), units[power as usize])
}

impl Worker {
    /// The text of INFO from the nodes' `INFO all` replies.
    pub(super) fn info_text(&self, parts: &[Vec<u8>], wanted: &[String]) -> String {
        let texts: Vec<String> = parts
            .iter()
            .filter(|p| !reply::is_error(p))
            .filter_map(|p| reply::text(p))
            .map(|t| String::from_utf8_lossy(t).into_owned())
            .collect();
        let everything = wanted.iter().any(|s| s == "all" || s == "everything");
        let shows = |section: &str| {
            everything
                || wanted.iter().any(|s| s == section)
                || ((wanted.is_empty() || wanted.iter().any(|s| s == "default")) && DEFAULT.contains(&section))
        };
        let values = |field: &str| -> Vec<f64> {
            let prefix = format!("{field}:");
            texts.iter().filter_map(|t| t.lines().find_map(|l| l.strip_prefix(&prefix))?.trim().parse().ok()).collect()
        };
        let sum = |field: &str| values(field).iter().sum::<f64>();
        let workers = &self.shared.counters;
        let total = |counter: fn(&crate::metrics::WorkerCounters) -> &Counter| workers.iter().map(|w| counter(w).get()).sum::<u64>();
        let commands: u64 = workers.iter().flat_map(|w| w.commands.iter()).map(Counter::get).sum();
        let uptime = self.shared.uptime().as_secs();
        let plan = &self.plan;
        let mut text = String::new();
        let mut sections: Vec<(&str, Vec<(String, String)>)> = Vec::new();
        let mut add = |section: &'static str, fields: Vec<(&str, String)>| {
            sections.push((section, fields.into_iter().map(|(k, v)| (k.to_string(), v)).collect()));
        };
        let compatible = oldest(
            plan.topology
                .nodes()
                .map(|n| self.shared.with_facts(n.id, |f| f.redis_version.clone()))
                .filter(|v| !v.is_empty())
                .collect::<Vec<_>>()
                .iter(),
        );
        let (server, version) = self.fleet_version(plan);
        let mut identity = vec![("redis_version", compatible)];
        if server == "valkey" {
            identity.extend([("server_name", server.to_string()), ("valkey_version", version)]);
        }
        let process = {
            vec![
                ("redis_mode", if plan.live.cluster.is_some() { "cluster" } else { "standalone" }.into()),
                ("switchyard_version", env!("CARGO_PKG_VERSION").into()),
                ("os", format!("{} {}", std::env::consts::OS, std::env::consts::ARCH)),
                ("arch_bits", usize::BITS.to_string()),
                ("multiplexing_api", "epoll".into()),
                ("process_id", std::process::id().to_string()),
                ("run_id", self.shared.incarnation.clone()),
                ("tcp_port", self.shared.port.to_string()),
                ("uptime_in_seconds", uptime.to_string()),
                ("uptime_in_days", (uptime / 86400).to_string()),
                ("io_threads_active", u8::from(workers.len() > 1).to_string()),
            ]
        };
        identity.extend(process);
        add("server", identity);
        let mut clients = vec![
            ("connected_clients", self.shared.clients.load(Ordering::Relaxed).to_string()),
            ("maxclients", plan.live.max_clients.to_string()),
            ("blocked_clients", total(|w| &w.blocked).to_string()),
            ("tracking_clients", total(|w| &w.tracking).to_string()),
            ("pubsub_clients", total(|w| &w.subscribers).to_string()),
        ];
        for field in ["total_blocking_keys", "total_blocking_keys_on_nokey"] {
            if !values(field).is_empty() {
                clients.push((field, format_number(sum(field))));
            }
        }
        add("clients", clients);
        for (section, fields) in SUMMED {
            let mut list: Vec<(&str, String)> =
                fields.iter().filter(|f| !values(f).is_empty()).map(|f| (*f, format_number(sum(f)))).collect();
            match *section {
                "memory" => {
                    list.push(("used_memory_human", human(sum("used_memory"))));
                    for field in LARGEST {
                        list.extend(values(field).into_iter().reduce(f64::max).map(|value| (field, format_number(value))));
                    }
                    for field in AGREED {
                        list.extend(agreed(&texts, field).map(|value| (*field, value)));
                    }
                }
                "stats" => {
                    list.push(("total_connections_received", total(|w| &w.accepted).to_string()));
                    list.push(("rejected_connections", total(|w| &w.rejected).to_string()));
                    list.push(("total_commands_processed", commands.to_string()));
                    list.push(("total_net_input_bytes", total(|w| &w.bytes_received).to_string()));
                    list.push(("total_net_output_bytes", total(|w| &w.bytes_sent).to_string()));
                    let cut = total(|w| &w.cut_output) + total(|w| &w.cut_push);
                    list.push(("client_output_buffer_limit_disconnections", cut.to_string()));
                    for (field, kind) in
                        [("pubsub_channels", Kind::Channel), ("pubsub_patterns", Kind::Pattern), ("pubsubshard_channels", Kind::Shard)]
                    {
                        list.push((field, self.shared.subscriptions.count(kind).to_string()));
                    }
                    list.push(("tracking_total_keys", total(|w| &w.tracked_keys).to_string()));
                    list.push(("tracking_total_items", total(|w| &w.tracked_reads).to_string()));
                    list.push(("tracking_total_prefixes", total(|w| &w.tracked_prefixes).to_string()));
                }
                _ => {}
            }
            add(section, list);
        }
        sections.push(("commandstats", merged(&texts, "cmdstat_")));
        sections.push(("errorstats", merged(&texts, "errorstat_")));
        let mut add = |section: &'static str, fields: Vec<(&str, String)>| {
            sections.push((section, fields.into_iter().map(|(k, v)| (k.to_string(), v)).collect()));
        };
        add("replication", vec![("role", "master".into()), ("connected_slaves", "0".into())]);
        add("cluster", vec![("cluster_enabled", u8::from(plan.live.cluster.is_some()).to_string())]);
        let mut temporary: BTreeMap<u32, u64> = BTreeMap::new();
        plan.moves.by_id.values().for_each(|mover| mover.count_temporary(&mut temporary));
        sections.push(("keyspace", keyspace(&texts, &temporary)));
        let mut own: Vec<(String, String)> = vec![
            ("workers".into(), workers.len().to_string()),
            ("topology_epoch".into(), plan.topology.epoch().to_string()),
            ("nodes".into(), plan.topology.nodes().len().to_string()),
            ("nodes_answering".into(), texts.len().to_string()),
            ("batched_sends".into(), if self.send_batch.is_some() { "yes" } else { "no" }.into()),
            ("large_transfers".into(), total(|w| &w.large).to_string()),
        ];
        for node in plan.topology.nodes() {
            let facts = self.shared.with_facts(node.id, |f| f.clone());
            let in_flight: u64 = workers.iter().map(|w| w.node(node.id).in_flight.get()).sum();
            let state = if facts.failure.is_some() { "down" } else { "up" };
            own.push((
                format!("node{}", node.id.0),
                format!(
                    "addr={},state={state},slots={},version={} {},in_flight={in_flight}",
                    node.name,
                    plan.topology.slots_of(node.id),
                    facts.flavour,
                    facts.version
                ),
            ));
        }
        sections.push(("switchyard", own));
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
}

fn format_number(value: f64) -> String {
    if value.fract() == 0.0 { format!("{value:.0}") } else { format!("{value:.6}") }
}

/// `db0:keys=3,expires=1,avg_ttl=20` of every node, added up (the average by the number of keys that expire). Without so many that movers have made for
/// themselves, all of which expire.
fn keyspace(texts: &[String], temporary: &BTreeMap<u32, u64>) -> Vec<(String, String)> {
    let mut databases: BTreeMap<u32, (u64, u64, u64)> = BTreeMap::new();
    for line in texts.iter().flat_map(|t| t.lines()) {
        let Some((number, fields)) = line.strip_prefix("db").and_then(|l| l.trim().split_once(':')) else { continue };
        let Ok(number) = number.parse() else { continue };
        let field = |name: &str| fields.split(',').find_map(|f| f.strip_prefix(name)?.strip_prefix('=')?.parse::<u64>().ok()).unwrap_or(0);
        let entry = databases.entry(number).or_default();
        entry.0 += field("keys");
        entry.1 += field("expires");
        entry.2 += field("avg_ttl") * field("expires");
    }
    let line = |(number, (keys, expires, ttl)): (u32, (u64, u64, u64))| {
        let ours = temporary.get(&number).copied().unwrap_or(0);
        let (clients, clients_expiring) = (keys.saturating_sub(ours), expires.saturating_sub(ours));
        let average = if clients_expiring == 0 { 0 } else { ttl / expires };
        (clients > 0).then(|| (format!("db{number}"), format!("keys={clients},expires={clients_expiring},avg_ttl={average}")))
    };
    databases.into_iter().filter_map(line).collect()
}

/// A word that every node says of itself. Where they say different things, `nodes differ`: no one of them is true of the whole.
fn agreed(texts: &[String], field: &str) -> Option<String> {
    let mut said = texts.iter().filter_map(|t| t.lines().find_map(|l| l.strip_prefix(field)?.strip_prefix(':'))).map(str::trim);
    let first = said.next()?;
    Some(if said.all(|other| other == first) { first } else { "nodes differ" }.to_owned())
}

/// Lines `PREFIXname:a=1,b=2` of every node, their figures added up by name; `usec_per_call` is computed anew.
fn merged(texts: &[String], prefix: &str) -> Vec<(String, String)> {
    let mut lines: BTreeMap<&str, Vec<(&str, f64)>> = BTreeMap::new();
    for line in texts.iter().flat_map(|t| t.lines()).filter(|l| l.starts_with(prefix)) {
        let Some((name, figures)) = line.split_once(':') else { continue };
        let line = lines.entry(name).or_default();
        for (figure, value) in figures.split(',').filter_map(|f| f.split_once('=')) {
            let Ok(value) = value.trim().parse::<f64>() else { continue };
            match line.iter_mut().find(|(known, _)| *known == figure) {
                Some((_, sum)) => *sum += value,
                None => line.push((figure, value)),
            }
        }
    }
    let show = |(name, figures): (&str, Vec<(&str, f64)>)| {
        let of = |wanted: &str| figures.iter().find(|(figure, _)| *figure == wanted).map_or(0.0, |(_, value)| *value);
        let shown = figures.iter().map(|(figure, value)| match *figure {
            "usec_per_call" => format!("usec_per_call={:.2}", of("usec") / of("calls").max(1.0)),
            _ => format!("{figure}={}", format_number(*value)),
        });
        (name.to_string(), shown.collect::<Vec<_>>().join(","))
    };
    lines.into_iter().map(show).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::{agreed, human, keyspace, merged};

    #[test]
    fn words_are_shown_where_all_nodes_agree() {
        let texts =
            ["mem_allocator:jemalloc-5.3.0\r\nmaxmemory_policy:noeviction\r\n".to_string(), "maxmemory_policy:allkeys-lru\r\n".to_string()];
        assert_eq!(agreed(&texts, "mem_allocator").as_deref(), Some("jemalloc-5.3.0"));
        assert_eq!(agreed(&texts, "maxmemory_policy").as_deref(), Some("nodes differ"));
        assert_eq!(agreed(&texts, "other"), None);
    }

    #[test]
    fn statistics_of_commands_and_errors_add_up() {
        let texts = [
            "# Commandstats\r\ncmdstat_get:calls=3,usec=3,usec_per_call=1.00,rejected_calls=0,failed_calls=1\r\nerrorstat_ERR:count=2\r\n".to_string(),
            "cmdstat_get:calls=1,usec=7,usec_per_call=7.00,rejected_calls=2,failed_calls=0\r\ncmdstat_set:calls=1,usec=1,usec_per_call=1.00\r\nerrorstat_ERR:count=3\r\nerrorstat_OOM:count=1\r\n"
                .to_string(),
        ];
        let pair = |name: &str, figures: &str| (name.to_string(), figures.to_string());
        let commands = [
            pair("cmdstat_get", "calls=4,usec=10,usec_per_call=2.50,rejected_calls=2,failed_calls=1"),
            pair("cmdstat_set", "calls=1,usec=1,usec_per_call=1.00"),
        ];
        assert_eq!(merged(&texts, "cmdstat_"), commands);
        assert_eq!(merged(&texts, "errorstat_"), [pair("errorstat_ERR", "count=5"), pair("errorstat_OOM", "count=1")]);
    }

    #[test]
    fn keys_of_all_nodes_add_up() {
        let texts = [
            "# Keyspace\r\ndb0:keys=3,expires=1,avg_ttl=10\r\n".to_string(),
            "db0:keys=2,expires=3,avg_ttl=30\r\ndb5:keys=1,expires=0,avg_ttl=0\r\n".to_string(),
        ];
        let merged = keyspace(&texts, &BTreeMap::new());
        assert_eq!(merged[0], ("db0".into(), "keys=5,expires=4,avg_ttl=25".into()));
        assert_eq!(merged[1].0, "db5");
        let without = keyspace(&texts, &BTreeMap::from([(0, 3), (5, 1)]));
        assert_eq!(
            without,
            [("db0".to_owned(), "keys=2,expires=1,avg_ttl=25".to_owned())],
            "what movers have made for themselves is nobody's"
        );
        assert_eq!(human(1536.0), "1.50K");
    }
}
