//! The proxies: their binaries, configurations and starts.
//!
//! Each has one worker thread, the two nodes (or one, if it cannot route) and otherwise its defaults, as for a user who
//! follows its manual. Limits that would end a connection in the middle of a run are lifted, because the comparison is
//! of speed.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use switchyard_bench::process::{self, Process};

/// A system between redis-benchmark and the nodes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Peer {
    /// Our own router. A variant has a name and further arguments of `serve`.
    Switchyard {
        /// Empty for the router as it is.
        variant: String,
    },
    /// predixy, from a binary that the user has.
    Predixy,
    /// twemproxy.
    Twemproxy,
    /// Envoy's redis_proxy.
    Envoy,
    /// HAProxy in TCP mode: it forwards to one node and reads nothing.
    Haproxy,
    /// No proxy, one node: the reference.
    Direct,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Switchyard { variant } if variant.is_empty() => f.write_str("switchyard"),
            Self::Switchyard { variant } => write!(f, "switchyard {variant}"),
            Self::Predixy => f.write_str("predixy"),
            Self::Twemproxy => f.write_str("twemproxy"),
            Self::Envoy => f.write_str("envoy"),
            Self::Haproxy => f.write_str("haproxy-tcp"),
            Self::Direct => f.write_str("direct"),
        }
    }
}

impl Peer {
    /// Returns our router with this many nodes, for a comparison with itself.
    pub(super) fn before(nodes: usize) -> Self {
        Self::Switchyard { variant: format!("{nodes} nodes") }
    }

    /// Our router without further arguments.
    pub const SWITCHYARD: Self = Self::Switchyard { variant: String::new() };

    /// Whether the peer is another project's proxy.
    pub fn is_other_proxy(&self) -> bool {
        matches!(self, Self::Predixy | Self::Twemproxy | Self::Envoy | Self::Haproxy)
    }
}

/// A started peer.
#[derive(Debug)]
pub(super) struct Target {
    /// Name of the peer.
    pub peer: Peer,
    /// Listening address.
    pub address: SocketAddr,
    /// Listening address for TLS, if the load uses TLS.
    pub tls: Option<SocketAddr>,
    /// `None` for [`Peer::Direct`].
    pub process: Option<Process>,
    /// Reported version.
    pub version: String,
}

/// Settings for the start of a peer.
#[derive(Debug, Clone)]
pub(super) struct Recipe {
    /// Name of the peer.
    pub peer: Peer,
    /// Path of the binary; empty for [`Peer::Direct`].
    pub program: PathBuf,
    /// Further arguments (of our router's `serve`).
    pub extra: Vec<String>,
    /// Whether clients connect by TLS (to our router).
    pub tls: bool,
    /// Number of nodes in use, from the first.
    pub nodes: usize,
    /// Number of pools, if the peer is started with twemproxy's configuration. The load goes to the first one.
    pub pools: Option<usize>,
}

/// Adds a TLS listener with a new certificate to our router. Returns its address.
fn add_tls(command: &mut Command, name: &str, folder: &Path) -> Result<SocketAddr> {
    let openssl =
        process::find_program(&["openssl"]).context("openssl, which makes the certificate, is not on PATH")?;
    let at = |ending: &str| folder.join(format!("{name}.{ending}"));
    let (certificate, key, config) = (at("pem"), at("key"), at("toml"));
    let made = Command::new(openssl)
        .args(
            "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost".split(' '),
        )
        .arg("-out")
        .arg(&certificate)
        .arg("-keyout")
        .arg(&key)
        .output()
        .context("cannot run openssl")?;
    ensure!(made.status.success(), "openssl made no certificate: {}", String::from_utf8_lossy(&made.stderr));
    let text = format!("[tls]\ncert-file = {certificate:?}\nkey-file = {key:?}\n");
    std::fs::write(&config, text).with_context(|| format!("cannot write {}", config.display()))?;
    let address = process::free_address()?;
    command.arg("--config").arg(config).args(["--listen", &format!("tls://{address}")]);
    Ok(address)
}

impl Recipe {
    /// Starts the peer in front of its share of `nodes`, and waits until it replies. `name` distinguishes instances of
    /// one peer.
    pub(super) fn start(&self, name: &str, nodes: &[SocketAddr], folder: &Path) -> Result<Target> {
        let nodes = nodes.get(..self.nodes).context("there are not as many nodes")?;
        let first = *nodes.first().context("a proxy needs a node")?;
        if self.peer == Peer::Direct {
            return Ok(Target { peer: Peer::Direct, address: first, tls: None, process: None, version: String::new() });
        }
        let version = self.version();
        // Another process may take the free port before it is bound: try again.
        for attempt in 1.. {
            let address = process::free_address()?;
            let mut command = self.command(name, address, nodes, folder)?;
            let tls = if self.tls { Some(add_tls(&mut command, name, folder)?) } else { None };
            let mut process = Process::start(name, &command, folder)?;
            match process.wait_ready(address).and_then(|()| check(address)) {
                Ok(()) => {
                    return Ok(Target { peer: self.peer.clone(), address, tls, process: Some(process), version });
                }
                Err(e) if attempt == 2 => return Err(e),
                Err(_) => {}
            }
        }
        unreachable!("the second attempt returns")
    }

    fn command(&self, name: &str, address: SocketAddr, nodes: &[SocketAddr], folder: &Path) -> Result<Command> {
        let mut command = Command::new(&self.program);
        let config = |ending: &str, text: String| -> Result<PathBuf> {
            let path = folder.join(format!("{name}.{ending}"));
            std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
            Ok(path)
        };
        match &self.peer {
            Peer::Direct => bail!("there is nothing to start without a proxy"),
            Peer::Switchyard { .. } if self.pools.is_some() => {
                let path = config("yml", twemproxy_config(&self.pools(address)?, nodes))?;
                command.args(["serve", "--allow-other-router", "--workers", "1", "--twemproxy-config"]).arg(path);
                command.args(["--admin", &process::free_address()?.to_string()]);
                command.arg("--state-dir").arg(folder.join(format!("{name}-state"))).args(&self.extra);
            }
            Peer::Switchyard { .. } => {
                let state = folder.join(format!("{name}-state"));
                // All measured routers share the nodes.
                command.args(["serve", "--allow-other-router", "--listen", &address.to_string()]);
                if !self.extra.iter().any(|flag| flag.starts_with("--workers")) {
                    command.args(["--workers", "1"]);
                }
                command.args(["--admin", &process::free_address()?.to_string()]).arg("--state-dir").arg(state);
                for node in nodes {
                    command.args(["--node", &node.to_string()]);
                }
                command.args(&self.extra);
            }
            Peer::Twemproxy => {
                let stats = process::free_port()?.to_string();
                let path = config("yml", twemproxy_config(&self.pools(address)?, nodes))?;
                command.arg("-c").arg(path).args(["-s", &stats, "-a", "127.0.0.1", "-v", "2"]);
            }
            Peer::Envoy => {
                let path = config("yaml", envoy_config(address, nodes, false))?;
                command.arg("-c").arg(path).args(["--concurrency", "1", "--disable-hot-restart", "-l", "error"]);
            }
            Peer::Haproxy => {
                let path = config("cfg", haproxy_config(address, nodes))?;
                command.arg("-f").arg(path).arg("-db");
            }
            Peer::Predixy => {
                command.arg(config("conf", predixy_config(address, nodes))?);
            }
        }
        Ok(command)
    }

    /// Returns the addresses of the pools.
    fn pools(&self, first: SocketAddr) -> Result<Vec<SocketAddr>> {
        let others = 1..self.pools.unwrap_or(1);
        std::iter::once(Ok(first)).chain(others.map(|_| process::free_address())).collect()
    }

    /// Returns the version number that the binary prints, or the first line of its output.
    fn version(&self) -> String {
        let flag = match self.peer {
            Peer::Twemproxy => "-V",
            Peer::Haproxy => "-v",
            _ => "--version",
        };
        let Ok(output) = Command::new(&self.program).arg(flag).output() else {
            return String::new();
        };
        let text = if output.stdout.is_empty() { output.stderr } else { output.stdout };
        let text = String::from_utf8_lossy(&text);
        let line = text.lines().map(str::trim).find(|l| !l.is_empty()).unwrap_or_default();
        // All peers print it as the first word with digits and dots.
        let number = line
            .split(|c: char| c.is_whitespace() || matches!(c, '/' | '-' | ','))
            .find(|w| w.contains('.') && w.starts_with(|c: char| c.is_ascii_digit()));
        number.unwrap_or(line).to_owned()
    }
}

/// Checks that a written value can be read back, because a proxy with fast errors would look best.
fn check(address: SocketAddr) -> Result<()> {
    let mut client = switchyard_bench::client::Client::connect(address)?;
    for i in 0..32 {
        let (key, value) = (format!("switchyard-bench:{i}"), format!("value {i}"));
        client.ok(&[b"SET", key.as_bytes(), value.as_bytes()])?;
        let got = client.text(&[b"GET", key.as_bytes()])?;
        ensure!(got == value, "{address} replied \"{got}\" for {key}, but \"{value}\" had been set");
    }
    Ok(())
}

/// Returns a configuration in which each pool has its share of the nodes.
fn twemproxy_config(pools: &[SocketAddr], nodes: &[SocketAddr]) -> String {
    let of_pool = nodes.len() / pools.len();
    let pool = |(number, (address, nodes)): (usize, (&SocketAddr, &[SocketAddr]))| {
        let servers: String = nodes.iter().enumerate().map(|(i, node)| format!("    - {node}:1 node{i}\n")).collect();
        twemproxy_pool(number, *address, &servers)
    };
    pools.iter().zip(nodes.chunks(of_pool)).enumerate().map(pool).collect()
}

fn twemproxy_pool(number: usize, address: SocketAddr, servers: &str) -> String {
    format!(
        "bench{number}:\n  listen: {address}\n  redis: true\n  hash: fnv1a_64\n  distribution: ketama\n  preconnect: true\n  \
         auto_eject_hosts: false\n  backlog: 1024\n  servers:\n{servers}"
    )
}

/// Returns Envoy's configuration in front of nodes, or of the members of a cluster.
pub(crate) fn envoy_config(address: SocketAddr, nodes: &[SocketAddr], is_cluster: bool) -> String {
    let socket = |a: &SocketAddr| format!("{{socket_address: {{address: {}, port_value: {}}}}}", a.ip(), a.port());
    let endpoints: Vec<_> = nodes.iter().map(|node| format!("{{endpoint: {{address: {}}}}}", socket(node))).collect();
    let discovery = match is_cluster {
        true => {
            r#"connect_timeout: 1s
    lb_policy: CLUSTER_PROVIDED
    cluster_type:
      name: envoy.clusters.redis
      typed_config:
        "@type": type.googleapis.com/envoy.extensions.clusters.redis.v3.RedisClusterConfig
        cluster_refresh_rate: 5s"#
        }
        false => {
            "type: STATIC
    lb_policy: RING_HASH"
        }
    };
    format!(
        r#"static_resources:
  listeners:
  - address: {listen}
    filter_chains:
    - filters:
      - name: envoy.filters.network.redis_proxy
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.redis_proxy.v3.RedisProxy
          stat_prefix: redis
          settings: {{op_timeout: 5s, enable_redirection: {is_cluster}}}
          prefix_routes: {{catch_all_route: {{cluster: nodes}}}}
  clusters:
  - name: nodes
    {discovery}
    circuit_breakers: {{thresholds: [{{max_connections: 20000, max_pending_requests: 20000, max_requests: 20000}}]}}
    load_assignment: {{cluster_name: nodes, endpoints: [{{lb_endpoints: [{endpoints}]}}]}}
"#,
        listen = socket(&address),
        endpoints = endpoints.join(", "),
    )
}

fn haproxy_config(address: SocketAddr, nodes: &[SocketAddr]) -> String {
    let node = nodes.first().map_or_else(String::new, |n| format!("  server node0 {n}\n"));
    format!(
        "global\n  nbthread 1\n  maxconn 4000\ndefaults\n  mode tcp\n  timeout connect 5s\n  timeout client 10m\n  timeout server 10m\n\
         frontend clients\n  bind {address}\n  default_backend nodes\nbackend nodes\n{node}"
    )
}

fn predixy_config(address: SocketAddr, nodes: &[SocketAddr]) -> String {
    let groups: String =
        nodes.iter().enumerate().map(|(i, node)| format!("    Group node{i} {{\n        + {node}\n    }}\n")).collect();
    format!(
        "Name bench\nBind {address}\nWorkerThreads 1\nClientTimeout 0\nAuthority {{\n    Auth {{\n        Mode admin\n    }}\n}}\n\
         StandaloneServerPool {{\n    Databases 1\n    Hash crc16\n    HashTag \"{{}}\"\n    Distribution modula\n    \
         MasterReadPriority 60\n    RefreshMethod fixed\n    ServerTimeout 0\n{groups}}}\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each configuration names every node it must, and where to listen.
    #[test]
    fn configurations_name_the_nodes() {
        let at = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let nodes = [at(7001), at(7002)];
        for text in [twemproxy_config(&[at(9)], &nodes), predixy_config(at(9), &nodes)] {
            for part in ["127.0.0.1:9", "127.0.0.1:7001", "127.0.0.1:7002"] {
                assert!(text.contains(part), "{part} in\n{text}");
            }
        }
        for (is_cluster, discovery) in [(false, "type: STATIC"), (true, "name: envoy.clusters.redis")] {
            let text = envoy_config(at(9), &nodes, is_cluster);
            let parts = ["port_value: 9}", "port_value: 7001", "port_value: 7002", discovery];
            assert!(parts.iter().all(|part| text.contains(part)), "{text}");
        }
        let text = haproxy_config(at(9), &nodes);
        assert!(text.contains("server node0 127.0.0.1:7001") && text.contains("bind 127.0.0.1:9"), "{text}");
    }
}
