//! twemproxy's stats port, with nutcracker's names: each connection receives one JSON document, and is closed.
//!
//! One port for all pools, as in nutcracker. Each pool is a separate process, so its admin port is queried on every
//! connection. The counts come from the metrics page rather than a separate interface. Names without a count are
//! omitted, because 0 would be wrong.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, anyhow};
use serde::ser::{Serialize, SerializeMap, Serializer};
use tracing::{info, warn};

use crate::cli::{AdminClient, Failure};
use crate::config::{Config, Endpoint};

/// Default port of nutcracker.
const PORT: u16 = 22222;

/// Timeout of a query. A pool that does not reply in time is omitted.
const QUERY_TIMEOUT: Duration = Duration::from_secs(2);

/// Timeout for writing to a client.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// The bound port, before it serves.
pub(super) struct StatsPort(TcpListener);

/// The pools in the document, in file order.
#[derive(Clone)]
pub(super) struct ShownPools(Arc<[ShownPool]>);

struct ShownPool {
    name: String,
    config: Config,
    /// Address of the admin port. `None` while the pool does not serve.
    admin: Mutex<Option<SocketAddr>>,
}

impl StatsPort {
    /// Binds the address of the command line, if there is one.
    pub(super) fn bind(place: Option<&str>) -> Result<Option<Self>, Failure> {
        let Some(text) = place else { return Ok(None) };
        let address = Endpoint::parse(text, Some(PORT)).and_then(|endpoint| endpoint.resolve());
        let address = address.map_err(|why| anyhow!("--twemproxy-stats: {why}"))?;
        let listener = TcpListener::bind(address)
            .map_err(|why| super::explain_listen(address, "stats", "--twemproxy-stats", why))?;
        Ok(Some(Self(listener)))
    }

    /// Serves until the process ends.
    pub(super) fn serve(self, pools: ShownPools) -> anyhow::Result<()> {
        info!("twemproxy's stats are on {}", self.0.local_addr().context("the stats port has no address")?);
        let started = Instant::now();
        let serve = move || {
            for stream in self.0.incoming() {
                let answered = stream.and_then(|stream| answer(stream, &document(&pools, started)));
                if let Err(error) = answered {
                    // Avoids a busy loop, for example without free descriptors.
                    warn!(%error, "a client of the stats port got no reply");
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
        };
        std::thread::Builder::new().name("twemproxy-stats".to_owned()).spawn(serve).context("cannot start a thread")?;
        Ok(())
    }
}

impl ShownPools {
    pub(super) fn new(pools: impl IntoIterator<Item = (String, Config)>) -> Self {
        Self(pools.into_iter().map(|(name, config)| ShownPool { name, config, admin: Mutex::new(None) }).collect())
    }

    /// Records the admin address of a pool, or `None` when its process has ended.
    pub(super) fn note(&self, number: usize, admin: Option<SocketAddr>) {
        if let Some(pool) = self.0.get(number) {
            *pool.admin.lock().unwrap_or_else(PoisonError::into_inner) = admin;
        }
    }
}

impl ShownPool {
    fn counts(&self) -> anyhow::Result<Counts> {
        let admin = *self.admin.lock().unwrap_or_else(PoisonError::into_inner);
        let admin = admin.ok_or_else(|| anyhow!("its process does not serve"))?;
        Ok(Counts::of(&AdminClient::at(&self.config, admin, QUERY_TIMEOUT)?.get("/metrics")?))
    }
}

fn answer(mut stream: TcpStream, document: &str) -> std::io::Result<()> {
    stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
    stream.write_all(document.as_bytes())
}

/// Counts of a metrics page, by name and by node or code. Samples that differ only in other labels are summed.
struct Counts(BTreeMap<(String, String), u64>);

impl Counts {
    fn of(page: &str) -> Self {
        let mut counts = BTreeMap::new();
        for (name, label, value) in page.lines().filter_map(sample) {
            *counts.entry((name, label)).or_default() += value;
        }
        Self(counts)
    }

    fn get(&self, name: &str, label: &str) -> u64 {
        self.0.get(&(format!("switchyard_{name}"), label.to_owned())).copied().unwrap_or(0)
    }

    fn all(&self, name: &str) -> u64 {
        self.get(name, "")
    }

    fn nodes(&self) -> impl Iterator<Item = &str> {
        self.0.keys().filter(|(name, _)| name == "switchyard_node_up").map(|(_, node)| node.as_str())
    }

    /// Sum over all nodes.
    fn of_nodes(&self, name: &str) -> u64 {
        self.nodes().map(|node| self.get(name, node)).sum()
    }
}

/// Parses a line of a metrics page: name, label `node` or `code`, value. `None` for comments and non-integer values.
fn sample(line: &str) -> Option<(String, String, u64)> {
    let (series, value) = line.rsplit_once(' ')?;
    let value = value.parse().ok()?;
    let Some((name, labels)) = series.split_once('{') else { return Some((series.to_owned(), String::new(), value)) };
    let mut rest = labels.strip_suffix('}')?;
    let mut found = String::new();
    while let Some((label, after)) = rest.split_once("=\"") {
        let mut text = String::new();
        let mut letters = after.char_indices();
        let end = loop {
            match letters.next()? {
                (at, '"') => break at,
                (_, '\\') => match letters.next()?.1 {
                    'n' => text.push('\n'),
                    other => text.push(other),
                },
                (_, other) => text.push(other),
            }
        };
        if label == "node" || label == "code" {
            found = text;
        }
        rest = after[end + 1..].trim_start_matches(',');
    }
    Some((name.to_owned(), found, value))
}

/// A JSON map that preserves nutcracker's order, for readers.
struct Map(Vec<(String, Item)>);

enum Item {
    Text(String),
    Number(u64),
    Flag(bool),
    Map(Map),
}

impl Serialize for Map {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        self.0.iter().try_for_each(|(name, item)| map.serialize_entry(name, item))?;
        map.end()
    }
}

impl Serialize for Item {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Text(text) => serializer.serialize_str(text),
            Self::Number(number) => serializer.serialize_u64(*number),
            Self::Flag(flag) => serializer.serialize_bool(*flag),
            Self::Map(map) => map.serialize(serializer),
        }
    }
}

fn numbers<const N: usize>(of: [(&str, u64); N]) -> Vec<(String, Item)> {
    of.map(|(name, number)| (name.to_owned(), Item::Number(number))).into()
}

fn document(pools: &ShownPools, started: Instant) -> String {
    // In parallel, so that a slow pool does not delay the others.
    let counts: Vec<anyhow::Result<Counts>> = std::thread::scope(|scope| {
        let asked: Vec<_> = pools.0.iter().map(|pool| scope.spawn(|| pool.counts())).collect();
        asked.into_iter().map(|asked| asked.join().unwrap_or_else(|_| Err(anyhow!("the query panicked")))).collect()
    });
    let sum = |of: fn(&Counts) -> u64| counts.iter().flatten().map(of).sum::<u64>();
    let text = |name: &str, text: &str| (name.to_owned(), Item::Text(text.to_owned()));
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let mut all = vec![
        text("service", "switchyard"),
        text("source", host.trim_end()),
        text("version", env!("CARGO_PKG_VERSION")),
    ];
    all.extend(numbers([
        ("uptime", started.elapsed().as_secs()),
        ("timestamp", SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()),
        (
            "total_connections",
            sum(|counts| counts.all("clients_accepted_total") + counts.of_nodes("node_connects_total")),
        ),
        ("curr_connections", sum(|counts| counts.all("clients") + counts.of_nodes("node_connections"))),
    ]));
    for (pool, counts) in pools.0.iter().zip(&counts) {
        let shown = match counts {
            Ok(counts) => of_pool(counts),
            Err(why) => {
                warn!("twemproxy's stats lack pool {}: {why:#}", pool.name);
                Map(vec![("unreachable".to_owned(), Item::Flag(true))])
            }
        };
        all.push((pool.name.clone(), Item::Map(shown)));
    }
    serde_json::to_string(&Map(all)).unwrap_or_default() + "\n"
}

fn of_pool(counts: &Counts) -> Map {
    let mut pool = numbers([
        ("client_eof", counts.all("clients_closed_total")),
        ("client_err", counts.all("clients_reset_total") + counts.all("clients_protocol_errors_total")),
        ("client_connections", counts.all("clients")),
        ("server_ejects", counts.of_nodes("node_ejections_total")),
        ("forward_error", counts.get("errors_total", "NODEDOWN")),
        ("fragments", counts.all("fragments_total")),
    ]);
    pool.extend(counts.nodes().map(|node| (node.to_owned(), Item::Map(of_server(counts, node)))));
    Map(pool)
}

fn of_server(counts: &Counts, node: &str) -> Map {
    let of = |name: &str| counts.get(name, node);
    let ended = of("node_connections_ended_total");
    Map(numbers([
        ("server_eof", ended),
        ("server_err", of("node_connection_failures_total").saturating_sub(ended)),
        ("server_timedout", of("node_timeouts_total")),
        ("server_connections", of("node_connections")),
        // nutcracker uses microseconds.
        ("server_ejected_at", of("node_ejected_at_seconds").saturating_mul(1_000_000)),
        ("requests", of("node_requests_total")),
        ("request_bytes", of("node_sent_bytes_total")),
        ("responses", of("node_latency_seconds_count")),
        ("response_bytes", of("node_received_bytes_total")),
        ("out_queue", of("node_in_flight")),
    ]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_summed_by_node() {
        let page = "# HELP switchyard_node_up x\nswitchyard_node_up{node=\"a \\\"b\\\\\"} 1\nswitchyard_node_up{node=\"c\"} 0\n\
            switchyard_node_requests_total{node=\"c\",class=\"read\"} 5\nswitchyard_node_requests_total{node=\"c\",class=\"write\"} 6\n\
            switchyard_errors_total{code=\"NODEDOWN\"} 3\nswitchyard_clients 2\nswitchyard_uptime_seconds 0.5\n# EOF\n";
        let counts = Counts::of(page);
        assert_eq!(counts.nodes().collect::<Vec<_>>(), ["a \"b\\", "c"]);
        assert_eq!((counts.get("node_requests_total", "c"), counts.of_nodes("node_requests_total")), (11, 11));
        assert_eq!(
            (counts.get("errors_total", "NODEDOWN"), counts.all("clients"), counts.all("uptime_seconds")),
            (3, 2, 0)
        );
    }
}
