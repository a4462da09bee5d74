//! Reads twemproxy's configuration file, and converts each pool to a configuration of Switchyard.
//!
//! `policy::twemproxy` parses the file. This module maps its values to Switchyard's keys.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use switchyard_policy::eject::Rule;
use switchyard_policy::topology::{Continuum, Scheme, Server};
use switchyard_policy::twemproxy::{FileError, Listen, Pool, PoolServer, parse};
use switchyard_router::Secret;

use super::listener::ListenerConfig;
use super::{Config, Endpoint, ListenPlace, NodeAddress, NodeConfig, Origin, Problem, Problems, SecretSource};

/// A file that was parsed without problems.
#[derive(Clone, Debug)]
pub(crate) struct Pools {
    name: String,
    pools: Vec<Pool>,
}

impl Pools {
    pub(crate) fn read(path: &Path) -> Result<Self, Problems> {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|error| {
            Problems(vec![Problem::new(format!("cannot read twemproxy's configuration {name}: {error}"))])
        })?;
        Self::parse(&name, &text)
    }

    /// Parses the content of the file `name`.
    pub(crate) fn parse(name: &str, text: &str) -> Result<Self, Problems> {
        let problem = |FileError { line, text }: FileError| match line {
            Some(line) => Problem::at(&Origin::File { name: name.to_owned(), line }, text),
            None => Problem { place: Some(name.to_owned()), text },
        };
        let pools = parse(text).map_err(|mistakes| Problems(mistakes.into_iter().map(problem).collect()))?;
        Ok(Self { name: name.to_owned(), pools })
    }

    /// Names of the pools, in file order.
    pub(crate) fn names(&self) -> Vec<&str> {
        self.pools.iter().map(|pool| pool.name.as_str()).collect()
    }

    /// Returns a pool and its position in the file. Without a name, the file must have a single pool.
    pub(crate) fn choose(&self, name: Option<&str>) -> Result<(usize, &Pool), Problems> {
        let found = match name {
            Some(name) => self.pools.iter().position(|pool| pool.name == name),
            None => (self.pools.len() == 1).then_some(0),
        };
        found.map(|at| (at, &self.pools[at])).ok_or_else(|| {
            let text = match name {
                Some(name) => format!("there is no pool '{name}'"),
                None => "there are several pools: restart to serve all of them, or choose one with --twemproxy-pool"
                    .to_owned(),
            };
            Problems(vec![Problem {
                place: Some(self.name.clone()),
                text: format!("{text} (there are: {})", self.names().join(", ")),
            }])
        })
    }

    /// Returns the other pools of the file, each with the addresses of its servers.
    fn others(&self, at: usize) -> Vec<(String, Vec<Endpoint>)> {
        let addresses =
            |pool: &Pool| pool.servers.iter().map(|server| Endpoint::new(&server.host, server.port)).collect();
        let others = self.pools.iter().enumerate().filter(|(other, _)| *other != at);
        others.map(|(_, pool)| (pool.name.clone(), addresses(pool))).collect()
    }

    /// Copies the settings of a pool into a configuration.
    pub(super) fn apply(&self, pool: Option<&str>, config: &mut Config, problems: &mut Vec<Problem>) {
        let (at, pool) = match self.choose(pool) {
            Ok(found) => found,
            Err(wrong) => return problems.extend(wrong.0),
        };
        let origin = |line| Origin::File { name: self.name.clone(), line };
        let line = pool.line;
        config.listen = Vec::new();
        let (place, mode) = match &pool.listen {
            Listen::Tcp { host, port } => (ListenPlace::Tcp { endpoint: Endpoint::new(host, *port), tls: false }, None),
            Listen::Unix { path, mode } => (ListenPlace::Unix(path.into()), *mode),
        };
        config.listeners = vec![ListenerConfig { mode, origin: Some(origin(line)), ..ListenerConfig::at(place) }];
        config.pool = Some(PoolConfig {
            number: at as u16,
            name: pool.name.clone(),
            scheme: pool.scheme,
            ejection: pool.ejection,
            servers: Vec::new(),
            others: self.others(at),
        });
        config.runtime.database = pool.database;
        if let Some(timeout) = pool.timeout {
            config.runtime.command_timeout = timeout;
            config.runtime.connect_timeout = timeout;
            // nutcracker has no notion of slow commands. Without a limit, a server that hangs in a slow command would
            // count as busy and never be ejected.
            config.runtime.slow_command_timeout = Some(timeout);
        }
        // nutcracker replies with an error at once. Its clients and its ejection rely on that. A value from our own
        // file or a flag takes precedence.
        config.runtime.wait_max.get_or_insert(Duration::ZERO);
        if let Some(most) = pool.client_connections {
            config.runtime.max_clients = most as usize;
        }
        if let Some(password) = &pool.password {
            let secret = || Some(SecretSource::Inline(Secret(password.clone())));
            (config.client_password, config.nodes_password) = (secret(), secret());
        }
        let servers: Vec<Server> = pool.servers.iter().map(|server| server.server.clone()).collect();
        if let Err(error) = Continuum::new(pool.scheme, servers.iter().cloned()) {
            problems.push(Problem::at(&origin(line), error.to_string()));
        }
        config.nodes = pool
            .servers
            .iter()
            .map(|PoolServer { server, host, port, line }| NodeConfig {
                name: Some(server.name.clone()),
                address: Some(Endpoint::new(host, *port)),
                weight: Some(server.weight),
                origin: Some(origin(*line)),
                ..NodeConfig::default()
            })
            .collect();
        if let Some(config) = &mut config.pool {
            config.servers = servers;
        }
    }
}

/// The twemproxy pool of a configuration: placement of keys, servers and ejection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PoolConfig {
    /// Position in the file, from 0.
    number: u16,
    name: String,
    pub(crate) scheme: Scheme,
    /// Ejection rule, if the file enables ejection.
    ejection: Option<Rule>,
    pub(crate) servers: Vec<Server>,
    /// Other pools of the file, each with the addresses of its servers.
    others: Vec<(String, Vec<Endpoint>)>,
}

/// Servers that a pool shares with other pools of the file. Keys of the other pools could look like misplaced keys of
/// this pool, so no such key is removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Shared {
    pool: String,
    /// Name of each shared server in this pool, with the name of another pool that has the server.
    servers: Vec<(String, String)>,
    /// Server names that do not resolve. Each may be an alias of a server of this pool.
    unresolved: BTreeSet<String>,
}

/// Cache of resolved host names. Each name is looked up once.
#[derive(Debug)]
pub(crate) struct Names {
    look_up: fn(&str) -> Option<IpAddr>,
    /// `None` if the lookup failed or timed out.
    known: BTreeMap<String, Option<IpAddr>>,
}

impl Default for Names {
    fn default() -> Self {
        Self::with(|host| Endpoint::new(host, 0).resolve().ok().map(|address| address.ip()))
    }
}

impl Names {
    fn with(look_up: fn(&str) -> Option<IpAddr>) -> Self {
        Self { look_up, known: BTreeMap::new() }
    }

    /// Looks up the unknown hosts in parallel within [`LOOK_UP_TIME`]: a dead name server delays each request by many
    /// seconds.
    fn look_up<'a>(&mut self, servers: impl Iterator<Item = &'a Endpoint>) {
        let accepted_host_names: BTreeSet<String> = servers
            .filter(|server| server.is_name() && !self.known.contains_key(server.host()))
            .map(|server| server.host().to_owned())
            .collect();
        let (sender, found) = mpsc::channel();
        let threads = accepted_host_names.len().min(LOOK_UPS);
        self.known.extend(accepted_host_names.iter().map(|host| (host.clone(), None)));
        let left = Arc::new(Mutex::new(accepted_host_names.into_iter()));
        for _ in 0..threads {
            let (sender, left, look_up) = (sender.clone(), Arc::clone(&left), self.look_up);
            let next = move || left.lock().unwrap_or_else(PoisonError::into_inner).next();
            let all = move || {
                while let Some(host) = next() {
                    let address = look_up(&host);
                    let _ = sender.send((host, address));
                }
            };
            // If no thread could be started, its names count as unresolved.
            let _ = std::thread::Builder::new().name("look-up".to_owned()).spawn(all);
        }
        drop(sender);
        let end = Instant::now() + LOOK_UP_TIME;
        while let Ok(answer) = found.recv_timeout(end.saturating_duration_since(Instant::now())) {
            self.known.extend([answer]);
        }
    }

    fn address(&self, server: &Endpoint) -> Option<SocketAddr> {
        if !server.is_name() {
            return server.resolve().ok();
        }
        self.known.get(server.host()).copied().flatten().map(|ip| SocketAddr::new(ip, server.parts().1))
    }
}

/// Maximum number of concurrent lookups.
const LOOK_UPS: usize = 64;

/// Maximum time to resolve the servers of other pools, which delays the start.
const LOOK_UP_TIME: Duration = Duration::from_secs(2);

impl Shared {
    /// Returns why the list of shared servers may be incomplete, if so.
    pub(crate) fn doubt(&self) -> Option<String> {
        let names: Vec<&str> = self.unresolved.iter().map(String::as_str).collect();
        (!names.is_empty()).then(|| {
            let (pool, names) = (&self.pool, names.join(", "));
            format!("names of servers do not resolve ({names}), so pool {pool} may share servers with other pools of the file")
        })
    }

    /// Whether no shared server was found.
    pub(crate) fn is_none(&self) -> bool {
        self.servers.is_empty()
    }

    /// Error for `--misplaced-keys remove`.
    pub(crate) fn refusal(&self) -> Problems {
        let text = format!(
            "--misplaced-keys remove is refused: {self}, so keys of the other pool would be deleted. Omit --misplaced-keys remove, or give each pool separate servers"
        );
        Problems(vec![Problem::new(text)])
    }
}

impl std::fmt::Display for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let servers: Vec<String> =
            self.servers.iter().map(|(server, other)| format!("{server} with pool {other}")).collect();
        write!(f, "pool {} shares servers with other pools of the file ({})", self.pool, servers.join(", "))
    }
}

/// Maps the IPv6 loopback address to the IPv4 one, because most servers listen on both.
fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        ip if ip == Ipv6Addr::LOCALHOST => SocketAddr::from((Ipv4Addr::LOCALHOST, address.port())),
        ip => SocketAddr::new(ip, address.port()),
    }
}

impl Config {
    /// Servers shared with other pools. `None` if this is not a twemproxy pool.
    pub(crate) fn shared_servers(&self, names: &mut Names) -> Option<Shared> {
        let own: Vec<_> = self.nodes.iter().filter_map(|node| Some((node.address.as_ref()?, None))).collect();
        Some(self.pool.as_ref()?.shared(&own, names))
    }
}

impl PoolConfig {
    /// Name in the file.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// State directory of the pool, below the common one.
    pub(crate) fn state_dir(&self, all: &Path) -> PathBuf {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let plain: String = self
            .name
            .bytes()
            .map(|byte| if is_plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02x}") })
            .collect();
        // Prevents that a pool's name leads out of the folder.
        all.join(plain.strip_prefix('.').map_or(plain.clone(), |rest| format!("%2e{rest}")))
    }

    /// Admin port of the pool. The ports of all pools are consecutive, in file order.
    pub(crate) fn admin(&self, first: &Endpoint) -> Endpoint {
        let (host, port) = first.parts();
        if port == 0 { first.clone() } else { Endpoint::new(&host, port.saturating_add(self.number)) }
    }

    /// Returns the servers that other pools of the file also have. `own` has the servers of this pool, with addresses
    /// if known.
    fn shared(&self, own: &[(&Endpoint, Option<SocketAddr>)], names: &mut Names) -> Shared {
        let all =
            self.others.iter().flat_map(|(pool, endpoints)| endpoints.iter().map(move |endpoint| (pool, endpoint)));
        let (named, others): (Vec<_>, Vec<_>) =
            all.partition(|(_, endpoint)| own.iter().any(|(own, _)| own == endpoint));
        let mut servers: Vec<(String, String)> =
            named.into_iter().map(|(pool, endpoint)| (endpoint.to_string(), pool.clone())).collect();
        let mut unresolved = BTreeSet::new();
        if !others.is_empty() {
            let unknown = own.iter().filter(|(_, address)| address.is_none()).map(|(own, _)| *own);
            names.look_up(unknown.chain(others.iter().map(|(_, endpoint)| *endpoint)));
            let mut address = |endpoint: &Endpoint, known: Option<SocketAddr>| {
                let address = known.or_else(|| names.address(endpoint)).map(canonical);
                if address.is_none() {
                    unresolved.insert(endpoint.host().to_owned());
                }
                address
            };
            let own: Vec<_> = own.iter().map(|(own, known)| (own, address(own, *known))).collect();
            for (pool, endpoint) in others {
                let other = address(endpoint, None);
                let same = own.iter().find(|(_, own)| own.is_some() && *own == other);
                servers.extend(same.map(|(own, _)| (own.to_string(), pool.clone())));
            }
        }
        Shared { pool: self.name.clone(), servers, unresolved }
    }

    /// Returns the ejection rule, and adds warnings for the operator. `resolved` has the nodes of this pool with their
    /// current addresses. Without ejection no names are looked up, since that may take long.
    pub(super) fn ejection(
        &self,
        nodes: &[NodeConfig],
        resolved: &[NodeAddress],
        names: &mut Names,
        warnings: &mut Vec<String>,
    ) -> Option<Rule> {
        let rule = self.ejection?;
        let now = |node: &NodeConfig| resolved.iter().find(|known| Some(&known.name) == node.name().as_ref())?.address;
        let own: Vec<_> = nodes.iter().filter_map(|node| Some((node.address.as_ref()?, now(node)))).collect();
        let shared = self.shared(&own, names);
        if !shared.is_none() {
            warnings.push(format!(
                "auto_eject_hosts has no effect: {shared}, and the return of an ejected server would delete keys of the other pool. Give each pool separate servers"
            ));
            return None;
        }
        if let Some(doubt) = shared.doubt() {
            warnings.push(format!("auto_eject_hosts has no effect: {doubt}. Reload (SIGHUP) when they do"));
            return None;
        }
        warnings.push(format!(
            "pool {}: auto_eject_hosts is a rule of caches: while a server is ejected, others serve its keys, and keys that only it has are answered with nil",
            self.name
        ));
        Some(rule)
    }

    /// Continuum of the servers.
    pub(crate) fn continuum(&self) -> Result<Continuum, Problems> {
        Continuum::new(self.scheme, self.servers.iter().cloned())
            .map_err(|error| Problems(vec![Problem::new(error.to_string())]))
    }
}

#[cfg(test)]
mod tests {
    use switchyard_policy::topology::{Distribution, Hash};

    use super::*;

    const GOOD: &str = "alpha:\n  listen: 127.0.0.1:22121\n  hash: fnv1a_64\n  hash_tag: \"{}\"\n  distribution: ketama\n  auto_eject_hosts: true\n  timeout: 400\n  \
        redis: true\n  redis_auth: secret\n  redis_db: 3\n  servers:\n   - 127.0.0.1:6379:1 one\n   - 127.0.0.1:6380:2\n   - cache:11211:1\n\n\
        beta:\n  listen: /run/beta.sock 0666\n  hash: crc16\n  distribution: modula\n  redis: true\n  server_failure_limit: 2\n  servers:\n   - 10.0.0.1:6379:1\n";

    #[test]
    fn pools_share_a_server_by_any_of_its_names() {
        let pool = |name: &str, port: u16, server: &str| {
            format!(
                "{name}:\n  listen: 127.0.0.1:{port}\n  redis: true\n  auto_eject_hosts: true\n  servers:\n   - 127.0.0.9:7009:1\n   - {server}:1\n"
            )
        };
        for (server, is_shared) in [
            ("127.0.0.1:7001", true),
            ("localhost:7001", true),
            ("::1:7001", true),
            ("127.0.0.1:7002", false),
            ("127.0.0.2:7001", false),
        ] {
            let text = pool("a", 1, "127.0.0.1:7001") + &pool("b", 2, server).replace("   - 127.0.0.9:7009:1\n", "");
            let pools = Pools::parse("n.yml", &text).expect("good");
            let mut config = Config::default();
            pools.apply(Some("a"), &mut config, &mut Vec::new());
            let resolved = config.resolve(|_| None).expect("resolved");
            let shared = config.shared_servers(&mut Names::default()).expect("a pool");
            assert_eq!((resolved.ejection.is_none(), !shared.is_none()), (is_shared, is_shared), "{server}");
            let off = "auto_eject_hosts has no effect: pool a shares servers with other pools of the file (127.0.0.1:7001 with pool b)";
            assert_eq!(
                resolved.warnings().any(|warning| warning.starts_with(off)),
                is_shared,
                "{server}: {:?}",
                resolved.warnings
            );
            assert!(
                !is_shared
                    || shared.refusal().to_string().contains("--misplaced-keys remove is refused: pool a shares")
            );
        }
    }

    #[test]
    fn names_of_other_pools_are_looked_up_for_an_ejection_alone() {
        let pool = |name: &str, ejects: bool, servers: &str| {
            format!(
                "{name}:\n  listen: /run/{name}.sock\n  redis: true\n  auto_eject_hosts: {ejects}\n  servers:\n{servers}"
            )
        };
        let others = "   - slow-1:1:1\n   - slow-1:2:1\n   - slow-2:1:1\n   - quick:1:1\n";
        let ejection = |ejects: bool, others: &str, look_up: fn(&str) -> Option<IpAddr>| {
            let text = pool("a", ejects, "   - 127.0.0.1:7001:1\n") + &pool("b", false, others);
            let mut config = Config::default();
            Pools::parse("n.yml", &text).expect("good").apply(Some("a"), &mut config, &mut Vec::new());
            let mut warnings = Vec::new();
            let rule = config.pool.as_ref().expect("a pool").ejection(
                &config.nodes,
                &[],
                &mut Names::with(look_up),
                &mut warnings,
            );
            (rule.is_some(), warnings.concat())
        };
        let none = |host: &str| -> Option<IpAddr> { panic!("{host} is looked up") };
        assert_eq!(ejection(false, others, none), (false, String::new()));
        let (is_on, warning) = ejection(true, "   - 127.0.0.1:7001:1\n   - 127.0.0.2:7001:1\n", none);
        assert!(
            !is_on && warning.contains("shares servers with other pools of the file (127.0.0.1:7001 with pool b)"),
            "{warning}"
        );
        // A name server that never replies.
        let dead = |host: &str| match host {
            "quick" => Some(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1))),
            _ => loop {
                std::thread::park();
            },
        };
        let (is_on, warning) = ejection(true, others, dead);
        assert!(!is_on && warning.contains("do not resolve (slow-1, slow-2), so pool a may share"), "{warning}");
        assert!(ejection(true, others, |_| Some(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)))).0);
    }

    #[test]
    fn a_file_of_twemproxy_becomes_a_configuration() {
        let pools = Pools::parse("n.yml", GOOD).expect("good");
        assert_eq!(pools.names(), ["alpha", "beta"]);
        let mut config = Config::default();
        pools.apply(Some("alpha"), &mut config, &mut Vec::new());
        assert_eq!(config.node_names(), ["one", "127.0.0.1:6380", "cache"]);
        assert_eq!(config.command_timeout(), Duration::from_millis(400));
        assert_eq!(config.runtime.slow_command_timeout, Some(Duration::from_millis(400)));
        assert_eq!(config.runtime.wait_max, Some(Duration::ZERO));
        let shown = crate::config::render(&config);
        let placed = "\n# Keys of pool alpha are placed by these values of twemproxy's file:\n# hash = fnv1a_64\n# distribution = ketama\n# hash_tag = \"{}\"\n\
            # server one = 127.0.0.1:6379, weight 1\n# server 127.0.0.1:6380 = 127.0.0.1:6380, weight 2\n# server cache = cache:11211, weight 1\n";
        assert!(shown.ends_with(placed), "{shown}");
        pools.apply(Some("beta"), &mut config, &mut Vec::new());
        assert!(
            crate::config::render(&config).contains("# hash = crc16\n# distribution = modula\n# hash_tag = none\n")
        );
        assert_eq!(config.node_names(), ["10.0.0.1:6379"]);
        let pool = config.pool.expect("a pool");
        assert_eq!(pool.scheme, Scheme { hash: Hash::Crc16, tag: None, distribution: Distribution::Modula });
        assert_eq!(pool.state_dir(Path::new("s")), Path::new("s/beta"));
        assert_eq!(pool.admin(&Endpoint::new("127.0.0.1", 6381)).to_string(), "127.0.0.1:6382");
        assert!(pools.choose(None).expect_err("several").to_string().contains("alpha, beta"));
    }
}
