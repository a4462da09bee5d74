//! Configuration: a TOML file, flags, or both, read into one [`Config`] that records the origin of each value.
//!
//! Does not use serde. Deriving would be shorter, but could not report every mistake at once, suggest the nearest key
//! of the *right* section, treat flags and file alike, or report the origin of values in `check-config` and at reload.

mod file;
mod keys;
mod listener;
mod memory;
mod nearest;
mod placement;
mod raw;
mod secret;
mod show;
mod standby;
mod storage;
mod tls;
mod twemproxy;

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use switchyard_control::autoscale::AutoscaleConfig;
use switchyard_control::moves::MovesConfig;
pub(crate) use switchyard_control::nodes::{
    Endpoint, NODE_PORT, NodeAddress, SentinelAddress, SentinelPlace, ServerName,
};
use switchyard_control::planner::{Mode, PlannerConfig};
use switchyard_policy::autoscale::Policy;
use switchyard_router::{Cluster, CrossSlot, ListenerSettings, RuntimeSettings, Secret, ServerTls, Users};
use tracing_subscriber::filter::{LevelFilter, Targets};

pub(crate) use keys::AppliesOn;
pub(crate) use listener::ListenPlace;
use listener::{LimitConfig, ListenerConfig};
use memory::MemoryMax;
use placement::{Adopt, RuleConfig};
pub(crate) use raw::Raw;
pub(crate) use secret::SecretSource;
pub(crate) use show::{Change, example, render};
pub(crate) use storage::ClusterPlaces;
use storage::StorageConfig;
pub(crate) use switchyard_resp::units::{counted, plural};
use tls::{NodeFiles, ServerFiles};
pub(crate) use tls::{certificates_in, provider, trusted_certificates};
pub(crate) use twemproxy::{Names, PoolConfig, Pools, Shared};

/// Default port for clients. Next to Redis's port, so that both can run on one machine.
pub(crate) const DATA_PORT: u16 = 6380;
/// Default port of the admin API.
pub(crate) const ADMIN_PORT: u16 = 6381;

/// Format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LogFormat {
    Text,
    Json,
}

/// Filter for log lines: a level, or levels by module (`info,switchyard_router=debug`).
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LogLevel(Targets);

impl LogLevel {
    fn parse(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "{text:?} is not error, warn, info, debug, trace or a filter such as \"info,switchyard_router=debug\""
            )
        };
        // `Targets` would accept an unknown word as the name of a module: `loud` would disable all logs.
        let is_level = |part: &str| {
            ["error", "warn", "info", "debug", "trace", "off"].contains(&part.trim().to_ascii_lowercase().as_str())
        };
        if !text.split(',').all(|part| part.contains('=') || is_level(part)) {
            return Err(wrong());
        }
        // Spaces around a part would become part of a module name, and disable its logs.
        let parts: Vec<&str> = text.split(',').map(|part| part.trim()).collect();
        if parts.iter().any(|part| part.starts_with('=') || part.ends_with('=') || part.contains(char::is_whitespace)) {
            return Err(wrong());
        }
        parts.join(",").parse().map(Self).map_err(|_| wrong())
    }

    pub(crate) fn filter(&self) -> Targets {
        self.0.clone()
    }
}

/// Source of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// `switchyard.toml:7`
    File { name: String, line: usize },
    /// `--workers`
    Flag(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::File { name, line } => write!(f, "{name}:{line}"),
            Origin::Flag(flag) => f.write_str(flag),
        }
    }
}

/// A node as configured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeConfig {
    /// Name of the node in twemproxy's configuration, if it differs from the address.
    name: Option<String>,
    /// Set in every valid configuration, unless `sentinel_master` is set.
    address: Option<Endpoint>,
    username: Option<String>,
    password: Option<SecretSource>,
    tls: Option<bool>,
    tls_server_name: Option<String>,
    replicas: Vec<Endpoint>,
    sentinel_master: Option<String>,
    sentinels: Vec<Endpoint>,
    weight: Option<u32>,
    capacity: Option<u64>,
    origin: Option<Origin>,
}

impl NodeConfig {
    /// Checks the replication settings for contradictions.
    fn check_replication(&self) -> Result<(), &'static str> {
        match (&self.sentinel_master, &self.address) {
            (Some(_), Some(_)) => Err("sentinel-master replaces address; remove one of them"),
            (Some(_), None) if self.sentinels.is_empty() => {
                Err("sentinel-master needs sentinels = [\"HOST:26379\", ...]")
            }
            (Some(_), None) if !self.replicas.is_empty() => Err("its Sentinels know its replicas; remove replicas"),
            (None, _) if !self.sentinels.is_empty() => {
                Err("sentinels need sentinel-master, the name of the node at the Sentinels")
            }
            _ => Ok(()),
        }
    }

    /// Name of the node: in twemproxy's file or at the Sentinels, otherwise its address as written.
    fn name(&self) -> Option<String> {
        self.name
            .clone()
            .or_else(|| self.sentinel_master.clone())
            .or_else(|| self.address.as_ref().map(ToString::to_string))
    }
}

/// The complete configuration, before names are resolved and secrets read.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) listen: Vec<ListenPlace>,
    listeners: Vec<ListenerConfig>,
    limits: Vec<LimitConfig>,
    rules: Vec<RuleConfig>,
    adopt_rules: Adopt,
    tls: ServerFiles,
    pub(crate) workers: usize,
    pub(crate) pin: bool,
    pub(crate) batched_sends: bool,
    pub(crate) state_dir: PathBuf,
    pub(crate) shutdown_timeout: Duration,
    memory_max: MemoryMax,
    pub(crate) allow_open_listener: bool,
    pub(crate) admin_listen: Endpoint,
    pub(crate) admin_token: Option<SecretSource>,
    pub(crate) admin_host_names: Vec<String>,
    pub(crate) admin_tls: bool,
    admin_client_ca: Option<PathBuf>,
    pub(crate) log_level: LogLevel,
    pub(crate) log_format: LogFormat,
    cluster_emulate: bool,
    cluster_announce: Vec<Endpoint>,
    client_password: Option<SecretSource>,
    users_file: Option<PathBuf>,
    default_user_rules: Vec<String>,
    nodes_username: Option<String>,
    sentinel_username: Option<String>,
    sentinel_password: Option<SecretSource>,
    sentinel_tls: bool,
    nodes_password: Option<SecretSource>,
    nodes_tls: NodeFiles,
    nodes: Vec<NodeConfig>,
    storage: StorageConfig,
    pub(crate) moves: MovesConfig,
    pub(crate) planner: PlannerConfig,
    /// The twemproxy pool, if the configuration came from twemproxy's file.
    pub(crate) pool: Option<PoolConfig>,
    pub(crate) autoscale: AutoscaleConfig,
    /// Limits and timeouts for the router. [`Config::resolve`] sets the other fields.
    runtime: RuntimeSettings,
    /// Origins by key path. A missing entry means the default.
    origins: BTreeMap<String, Origin>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: vec![ListenPlace::Tcp { endpoint: Endpoint::new("127.0.0.1", DATA_PORT), tls: false }],
            listeners: Vec::new(),
            limits: Vec::new(),
            rules: Vec::new(),
            adopt_rules: Adopt::Ask,
            tls: ServerFiles::default(),
            workers: std::thread::available_parallelism().map_or(1, usize::from),
            pin: false,
            batched_sends: true,
            state_dir: default_state_dir(|name| std::env::var_os(name).map(PathBuf::from)),
            shutdown_timeout: Duration::from_secs(10),
            memory_max: MemoryMax::Percent(50),
            allow_open_listener: false,
            admin_listen: Endpoint::new("127.0.0.1", ADMIN_PORT),
            admin_token: None,
            admin_host_names: Vec::new(),
            admin_tls: false,
            admin_client_ca: None,
            log_level: LogLevel(Targets::new().with_default(LevelFilter::INFO)),
            log_format: LogFormat::Text,
            cluster_emulate: false,
            cluster_announce: Vec::new(),
            client_password: None,
            users_file: None,
            default_user_rules: Vec::new(),
            nodes_username: None,
            sentinel_username: None,
            sentinel_password: None,
            sentinel_tls: false,
            nodes_password: None,
            nodes_tls: NodeFiles::default(),
            nodes: Vec::new(),
            storage: StorageConfig::default(),
            moves: MovesConfig::default(),
            planner: PlannerConfig::default(),
            pool: None,
            autoscale: AutoscaleConfig::default(),
            runtime: RuntimeSettings::default(),
            origins: BTreeMap::new(),
        }
    }
}

impl Config {
    /// Whether the state directory is the default one.
    pub(crate) fn has_default_state_dir(&self) -> bool {
        self.state_dir == default_state_dir(|name| std::env::var_os(name).map(PathBuf::from))
    }
}

/// systemd sets `$STATE_DIRECTORY` for `StateDirectory=`, as folders separated by colons.
fn default_state_dir(env: impl Fn(&str) -> Option<PathBuf>) -> PathBuf {
    let set = |name| env(name).filter(|path| !path.as_os_str().is_empty());
    if let Some(folders) = set("STATE_DIRECTORY")
        && let Some(first) = folders.to_string_lossy().split(':').next()
    {
        return PathBuf::from(first);
    }
    // The XDG specification requires that relative paths are ignored.
    match set("XDG_STATE_HOME").filter(|path| path.is_absolute()) {
        Some(folder) => folder.join("switchyard"),
        None => match set("HOME") {
            Some(home) => home.join(".local/state/switchyard"),
            None => PathBuf::from("/var/lib/switchyard"),
        },
    }
}

/// A mistake in the configuration, with its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Problem {
    /// For example `switchyard.toml:7` or `--workers`. `None` if the mistake has no place.
    pub(crate) place: Option<String>,
    pub(crate) text: String,
}

impl Problem {
    fn at(origin: &Origin, text: impl Into<String>) -> Self {
        Self { place: Some(origin.to_string()), text: text.into() }
    }

    fn new(text: impl Into<String>) -> Self {
        Self { place: None, text: text.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            Some(place) => write!(f, "{place}: {}", self.text),
            None => f.write_str(&self.text),
        }
    }
}

/// All mistakes in a configuration. Never empty.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Problems(pub(crate) Vec<Problem>);

impl Problems {
    /// A single mistake without a place.
    pub(crate) fn of(text: &str) -> Self {
        Self(vec![Problem::new(text)])
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))
    }
}

impl std::error::Error for Problems {}

/// A value from a flag. Takes precedence over the file.
#[derive(Clone, Debug)]
pub(crate) struct Override {
    /// The flag as written: `--workers`.
    pub(crate) flag: String,
    /// Path of the key: `clients.max-clients`, or `node` for the list of nodes.
    pub(crate) path: String,
    pub(crate) value: Raw,
}

/// Inputs of the configuration. `serve` keeps them, because each reload reads them again.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sources {
    pub(crate) file: Option<PathBuf>,
    pub(crate) overrides: Vec<Override>,
    /// twemproxy's configuration file, and the name of the chosen pool.
    pub(crate) twemproxy: Option<(PathBuf, Option<String>)>,
}

/// Configuration file, if the command line names neither a file nor nodes.
const DEFAULT_FILE: &str = "/etc/switchyard.toml";

/// Returns the default file if it exists.
pub(crate) fn default_file() -> Option<PathBuf> {
    if_exists(Path::new(DEFAULT_FILE))
}

/// Returns `None` only if the file does not exist. An unreadable file is reported when it is read.
fn if_exists(path: &Path) -> Option<PathBuf> {
    let is_missing = path.symlink_metadata().is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound);
    (!is_missing).then(|| path.to_owned())
}

impl Sources {
    /// Reads the file and applies the flags. Reports all mistakes, not only the first.
    pub(crate) fn read(&self) -> Result<Config, Problems> {
        let text = match &self.file {
            None => None,
            Some(path) => match std::fs::read_to_string(path) {
                Ok(text) => Some((path.as_path(), text)),
                Err(error) => {
                    let is_default = path == Path::new(DEFAULT_FILE);
                    let advice = if is_default {
                        ". It is the default file: run this as a user with read access, or give -c"
                    } else {
                        ""
                    };
                    let text = format!("cannot read the configuration file {}: {error}{advice}", path.display());
                    return Err(Problems(vec![Problem::new(text)]));
                }
            },
        };
        self.read_text(text.as_ref().map(|(path, text)| (*path, text.as_str())))
    }

    /// Returns each pool of twemproxy's file with its configuration, if there are several and none was chosen.
    pub(crate) fn several_pools(&self) -> Result<Option<Vec<(String, Config)>>, Problems> {
        let Some((path, None)) = &self.twemproxy else { return Ok(None) };
        let pools = Pools::read(path)?;
        let names = pools.names();
        if names.len() < 2 {
            return Ok(None);
        }
        if let Some(change) = self.overrides.iter().find(|change| change.path == "listen") {
            let text = format!(
                "{} is for one pool, and {} has several: each listens on the address in the file",
                change.flag,
                path.display()
            );
            return Err(Problems(vec![Problem::new(text)]));
        }
        let of_pool = |name: &str| {
            let sources = Self { twemproxy: Some((path.clone(), Some(name.to_owned()))), ..self.clone() };
            Ok((name.to_owned(), sources.read()?))
        };
        names.into_iter().map(of_pool).collect::<Result<_, Problems>>().map(Some)
    }

    /// Names of the pools in twemproxy's configuration. Empty if the file cannot be read.
    pub(crate) fn pool_names(&self) -> Vec<String> {
        let pools = self.twemproxy.as_ref().and_then(|(path, _)| Pools::read(path).ok());
        pools.map_or_else(Vec::new, |pools| pools.names().into_iter().map(str::to_owned).collect())
    }

    fn read_text(&self, file: Option<(&Path, &str)>) -> Result<Config, Problems> {
        let mut config = Config::default();
        let mut problems = Vec::new();
        if let Some((path, text)) = file {
            file::apply(path, text, &mut config, &mut problems);
        }
        if let Some((path, pool)) = &self.twemproxy {
            Pools::read(path)?.apply(pool.as_deref(), &mut config, &mut problems);
        }
        for change in &self.overrides {
            config.apply_override(change, &mut problems);
        }
        if let Some(pool) = &config.pool {
            config.state_dir = pool.state_dir(&config.state_dir);
            config.admin_listen = pool.admin(&config.admin_listen);
            if !config.rules.is_empty() {
                problems.push(Problem::new(
                    "[[placement.rule]]: the keys of a twemproxy pool are placed by its list of servers, without rules",
                ));
            }
            if config.cluster_emulate {
                problems.push(config.problem(
                    "cluster.emulate",
                    "a twemproxy pool has no Redis Cluster slots: clients use it like a single server",
                ));
            }
        }
        // Combinations of values are checked only if each value is valid.
        if problems.is_empty() {
            problems.extend(config.rule_set().err().into_iter().flat_map(|problems| problems.0));
            config.check_storage(&mut problems);
            config.check_nodes(&mut problems);
        }
        if problems.is_empty() { Ok(config) } else { Err(Problems(problems)) }
    }
}

impl Config {
    /// Timeout for a node's reply (`nodes.command-timeout`).
    pub(crate) fn command_timeout(&self) -> Duration {
        self.runtime.command_timeout
    }

    fn apply_override(&mut self, change: &Override, problems: &mut Vec<Problem>) {
        let origin = Origin::Flag(change.flag.clone());
        if change.path == "node" {
            match change.value.endpoints(Some(NODE_PORT)) {
                Ok(addresses) => {
                    // A node that is also in the file keeps its other settings, such as its password.
                    let described = std::mem::take(&mut self.nodes);
                    self.nodes = addresses
                        .into_iter()
                        .map(|address| {
                            let known = described.iter().find(|node| node.address.as_ref() == Some(&address));
                            NodeConfig {
                                address: Some(address),
                                origin: Some(origin.clone()),
                                ..known.cloned().unwrap_or_default()
                            }
                        })
                        .collect();
                }
                Err(text) => problems.push(Problem::at(&origin, text)),
            }
            return;
        }
        let Some(key) = keys::CONFIG.iter().find(|key| key.path() == change.path) else {
            problems.push(Problem::at(&origin, nearest::unknown_path(&change.path)));
            return;
        };
        match (key.set)(self, &change.value, Path::new("")) {
            Ok(()) => {
                // `--password-file` replaces `password` in the file: the forms of a secret share a field.
                if key.secret {
                    let stem = nearest::stem(key.name);
                    self.origins.retain(|path, _| {
                        path.rsplit_once('.')
                            .is_none_or(|(section, name)| section != key.section.name() || nearest::stem(name) != stem)
                    });
                }
                self.origins.insert(key.path(), origin);
            }
            Err(text) => problems.push(Problem::at(&origin, text)),
        }
    }

    fn check_nodes(&self, problems: &mut Vec<Problem>) {
        if let Err(why) = self.autoscale.provisioner() {
            problems.push(self.problem("autoscale.local.command", why));
        }
        if self.autoscale.knobs.nodes_min > self.autoscale.knobs.nodes_max {
            problems.push(self.problem("autoscale.min-nodes", "min-nodes is more than max-nodes"));
        }
        let command = &self.autoscale.local.command;
        if !command.is_empty() && !command.iter().any(|word| word.contains("{port}")) {
            problems
                .push(self.problem("autoscale.local.command", "{port} is missing: each server needs a separate port"));
        }
        if command.windows(2).any(|words| words == ["--daemonize", "yes"]) {
            let why = "a server in the background cannot be supervised: omit --daemonize";
            problems.push(self.problem("autoscale.local.command", why));
        }
        if self.autoscale.mode != Mode::Off
            && self.autoscale.knobs.policy == Policy::Model
            && self.autoscale.knobs.capacity.is_none()
        {
            let why = "the policy \"model\" needs capacity: measure it with `switchyard bench capacity`";
            problems.push(self.problem("autoscale.policy", why));
        }
        if self.nodes.is_empty() && !self.is_of_cluster() {
            problems.push(Problem::new(
                "no node is given; name the Redis or Valkey servers to route to with --node 127.0.0.1:7001 (once for each), \
                 or some members of a cluster with --storage-cluster 127.0.0.1:7001, or give a configuration file (-c /etc/switchyard.toml) that has\n  [[node]]\n  address = \"127.0.0.1:7001\"",
            ));
        }
        let mut seen = BTreeMap::new();
        for node in &self.nodes {
            let (Some(name), Some(origin)) = (node.name(), &node.origin) else {
                continue;
            };
            if let Err(text) = node.check_replication() {
                problems.push(Problem::at(origin, format!("the node {name}: {text}")));
            }
            match seen.insert(name.clone(), origin) {
                Some(first) if first != origin => {
                    problems.push(Problem::at(origin, format!("the node {name} is given twice, first at {first}")));
                }
                Some(_) => problems.push(Problem::at(origin, format!("the node {name} is given twice"))),
                None => {}
            }
        }
    }

    /// Origin of a key. `None` for a default.
    fn origin(&self, path: &str) -> Option<&Origin> {
        self.origins.get(path)
    }

    fn problem(&self, path: &str, text: impl Into<String>) -> Problem {
        Problem { place: self.origin(path).map(ToString::to_string), text: text.into() }
    }

    /// Applies nodes that were added or removed at run time. The state directory stores them, not the file. Returns the
    /// removed nodes that are still in the configuration.
    ///
    /// # Errors
    /// If a stored address is invalid.
    pub(crate) fn apply_membership(&mut self, added: &[String], removed: &[String]) -> Result<Vec<String>, Problems> {
        let mut ignored = Vec::new();
        self.nodes.retain(|node| {
            let name = node.name().filter(|name| removed.contains(name));
            ignored.extend(name.clone());
            name.is_none()
        });
        for name in added {
            if self.nodes.iter().any(|node| node.name().as_ref() == Some(name)) {
                continue;
            }
            let address = Endpoint::parse(name, Some(NODE_PORT)).map_err(|why| {
                Problems(vec![Problem::new(format!(
                    "the node {name}, which was added by `switchyard nodes add`: {why}"
                ))])
            })?;
            let origin = Some(Origin::Flag("switchyard nodes add".to_owned()));
            self.nodes.push(NodeConfig { address: Some(address), origin, ..NodeConfig::default() });
        }
        Ok(ignored)
    }

    /// Adds nodes that are still leaving but no longer in the pool's file, with the given addresses.
    pub(crate) fn keep_leaving(&mut self, leaving: &BTreeMap<String, String>) -> Result<(), Problems> {
        for (name, address) in leaving {
            let problem = |why| {
                Problems(vec![Problem::new(format!(
                    "the node {name}, which is leaving the pool, has the recorded address {address}: {why}"
                ))])
            };
            let address = Some(Endpoint::parse(address, Some(NODE_PORT)).map_err(problem)?);
            let origin = Some(Origin::Flag("an earlier list of servers".to_owned()));
            self.nodes.push(NodeConfig { name: Some(name.clone()), address, origin, ..NodeConfig::default() });
        }
        Ok(())
    }

    /// Addresses by node name, for nodes that have an address.
    pub(crate) fn node_addresses(&self) -> BTreeMap<String, String> {
        self.nodes.iter().filter_map(|node| Some((node.name()?, node.address.as_ref()?.to_string()))).collect()
    }

    /// Names of the nodes, in file order.
    pub(crate) fn node_names(&self) -> Vec<String> {
        self.nodes.iter().filter_map(NodeConfig::name).collect()
    }

    /// Applies the log level of the environment. It overrides the default and the file, but not a flag.
    pub(crate) fn prefer_log_level(&mut self, from_environment: Option<&str>) {
        if let Some(text) = from_environment
            && !matches!(self.origin("log.level"), Some(Origin::Flag(_)))
            && let Ok(level) = LogLevel::parse(text)
        {
            self.log_level = level;
            self.origins.insert("log.level".to_owned(), Origin::Flag("RUST_LOG".to_owned()));
        }
    }

    /// Copies the settings that need a restart from the running configuration, so that later checks and comparisons use
    /// the effective values.
    pub(crate) fn keep_until_restart(&mut self, running: &Config) {
        self.listen.clone_from(&running.listen);
        self.listeners.clone_from(&running.listeners);
        self.workers = running.workers;
        self.pin = running.pin;
        self.batched_sends = running.batched_sends;
        self.state_dir.clone_from(&running.state_dir);
        self.storage.cluster.clone_from(&running.storage.cluster);
        self.storage.addresses.clone_from(&running.storage.addresses);
        self.allow_open_listener = running.allow_open_listener;
        self.admin_listen.clone_from(&running.admin_listen);
        self.admin_host_names.clone_from(&running.admin_host_names);
        self.admin_tls = running.admin_tls;
        self.log_format = running.log_format;
    }

    /// Resolves host names, reads secrets, and checks the settings that depend on them.
    ///
    /// `known` returns the previous address of a node. A name that fails to resolve at a reload keeps that address,
    /// with a warning: a brief DNS failure must not prevent a reload.
    pub(crate) fn resolve(&self, known: impl Fn(&str) -> Option<SocketAddr>) -> Result<Resolved, Problems> {
        let mut problems = Vec::new();
        let mut warnings = Vec::new();
        let mut tls_warnings = Vec::new();
        let mut secret = |source: &Option<SecretSource>, stem: &str, problems: &mut Vec<Problem>| {
            let source = source.as_ref()?;
            if let Some(path) = source.readable_by_others() {
                warnings.push(format!(
                    "the secret in {} is readable by all users of this machine; chmod 600 it",
                    path.display()
                ));
            }
            match source.read() {
                Ok(secret) => Some(secret),
                Err(error) => {
                    problems.push(self.problem(&format!("{stem}{}", source.form().suffix()), error.to_string()));
                    None
                }
            }
        };
        let password = secret(&self.client_password, "clients.password", &mut problems);
        let admin_token = secret(&self.admin_token, "admin.token", &mut problems);
        let nodes_password = secret(&self.nodes_password, "nodes.password", &mut problems);
        let sentinel_password = secret(&self.sentinel_password, "nodes.sentinel-password", &mut problems);
        let any_tls = self.sentinel_tls
            || self.nodes.iter().any(|node| node.tls.unwrap_or(self.nodes_tls.on))
            || self.is_of_cluster() && self.nodes_tls.on;
        let nodes_tls = match any_tls.then(|| self.nodes_tls.build(&mut tls_warnings)).transpose() {
            Ok(tls) => tls,
            Err(text) => {
                problems.push(self.problem("nodes.tls", text));
                None
            }
        };
        let (mut nodes, mut not_found) = (Vec::new(), Vec::new());
        let mut by_address: BTreeMap<SocketAddr, String> = BTreeMap::new();
        for node in &self.nodes {
            let Some(name) = node.name() else { continue };
            let place = node.origin.as_ref().map(ToString::to_string);
            let mut unresolved = None;
            let address = match node.address.as_ref().map(|endpoint| (endpoint.resolve(), known(&name))) {
                None => None,
                Some((Ok(address), _)) => Some(address),
                Some((Err(why), Some(address))) => {
                    warnings.push(format!("node {name}: {why}; keeping {address}"));
                    Some(address)
                }
                Some((Err(why), None)) => {
                    not_found.push(Problem { place: place.clone(), text: why.clone() });
                    unresolved = Some(why);
                    None
                }
            };
            let (mut replicas, mut names) = (Vec::new(), Vec::new());
            let mut note_name = |endpoint: &Endpoint, address, is_first| {
                if endpoint.is_name() {
                    names.push(ServerName { endpoint: endpoint.clone(), address, is_first });
                }
            };
            if !node.replicas.is_empty() {
                node.address.iter().for_each(|endpoint| note_name(endpoint, address, true));
            }
            for endpoint in &node.replicas {
                let found = endpoint.resolve();
                note_name(endpoint, found.as_ref().ok().copied(), false);
                match found {
                    Ok(address) => replicas.push(address),
                    // Not an error: the other replicas can serve.
                    Err(why) => warnings
                        .push(format!("node {name}: replica {endpoint} is not used until its name resolves: {why}")),
                }
            }
            let mut sentinels = Vec::new();
            for endpoint in &node.sentinels {
                let tls = nodes_tls
                    .as_ref()
                    .filter(|_| self.sentinel_tls)
                    .map(|shared| NodeFiles::node(shared, endpoint.host()));
                match tls.transpose() {
                    Ok(tls) => sentinels.push(SentinelPlace { endpoint: endpoint.clone(), tls }),
                    Err(text) => problems.push(Problem { place: place.clone(), text }),
                }
            }
            let mut twice = None;
            for address in address.iter().chain(&replicas) {
                if address.port() == 0 {
                    twice = Some(format!("the node {name} has port 0, which is not a valid port"));
                } else if let Some(other) = by_address.insert(*address, name.clone()) {
                    twice = Some(format!("the nodes {other} and {name} are the same server, {address}; name it once"));
                }
            }
            if let Some(text) = twice {
                problems.push(Problem { place, text });
                continue;
            }
            let tls = nodes_tls.as_ref().filter(|_| node.tls.unwrap_or(self.nodes_tls.on)).map(|shared| {
                let given = node.tls_server_name.as_deref().or(self.nodes_tls.server_name.as_deref());
                match given.or(node.address.as_ref().filter(|_| node.replicas.is_empty()).map(Endpoint::host)) {
                    Some(name) => NodeFiles::node(shared, name),
                    None => NodeFiles::servers(shared, names.iter().map(|name| (name.endpoint.host(), name.address))),
                }
            });
            let tls = tls
                .transpose()
                .map_err(|text| problems.push(Problem { place: place.clone(), text }))
                .unwrap_or_default();
            let own = node.password.as_ref().map(|source| {
                let read = source.read().map_err(|error| problems.push(Problem { place, text: error.to_string() }));
                if let Some(path) = source.readable_by_others() {
                    warnings.push(format!(
                        "the secret in {} is readable by all users of this machine; chmod 600 it",
                        path.display()
                    ));
                }
                read.ok()
            });
            nodes.push(NodeAddress {
                name,
                address,
                unresolved,
                username: node.username.clone().or_else(|| self.nodes_username.clone()),
                password: own.unwrap_or_else(|| nodes_password.clone()),
                tls,
                replicas,
                names,
                sentinel: node.sentinel_master.clone().map(|master| SentinelAddress {
                    master,
                    sentinels,
                    username: self.sentinel_username.clone(),
                    password: sentinel_password.clone(),
                }),
                weight: node.weight.unwrap_or(1),
                capacity: node.capacity,
            });
        }
        let ejection = self
            .pool
            .as_ref()
            .and_then(|pool| pool.ejection(&self.nodes, &nodes, &mut Names::default(), &mut warnings));
        let others = problems.len();
        let users = self.resolve_users(password.as_ref(), &mut tls_warnings, &mut problems);
        // If the users have mistakes, their effect is unknown: assume that clients must log in.
        let is_guarded = problems.len() > others || !users.default_user().is_open();
        let listen = self.resolve_listen(is_guarded, &mut problems);
        let tls = self.resolve_tls(&listen, &mut tls_warnings, &mut problems);
        let admin_tls = match self.admin_tls.then(|| self.tls.for_admin(self.admin_client_ca.as_deref())).transpose() {
            Ok(tls) => tls,
            Err(text) => {
                problems.push(self.problem("admin.tls", text));
                None
            }
        };
        warnings.append(&mut tls_warnings);
        if admin_token.as_ref().is_some_and(|token| !token.0.bytes().all(|b| b.is_ascii_graphic())) {
            let text =
                "the token of the admin port must be visible ASCII characters without spaces: it is sent in a header";
            let form = self.admin_token.as_ref().map_or("", |source| source.form().suffix());
            problems.push(self.problem(&format!("admin.token{form}"), text));
        }
        let admin = self.resolve_admin(admin_token.is_some(), &listen, &mut problems);
        match admin {
            Some(admin) if problems.is_empty() => {
                let announce = self.cluster_announce.iter().map(Endpoint::parts).collect();
                let cluster = self.cluster_emulate.then_some(Cluster { announce });
                let live = RuntimeSettings {
                    users: Arc::new(users),
                    key_limits: self.limits.iter().map(LimitConfig::settings).collect(),
                    tls,
                    cluster,
                    memory_max: self.memory_max.bytes(),
                    one_database: ejection.is_some(),
                    // A server that has keys of other servers' slots is never ejected.
                    cross_slot: if ejection.is_some() { CrossSlot::Refuse } else { self.runtime.cross_slot },
                    ..self.runtime.clone()
                };
                let cluster = self.cluster_places(nodes_password, nodes_tls);
                let live = if cluster.is_some() { self.settings_of_cluster(live) } else { live };
                Ok(Resolved {
                    listen,
                    admin,
                    admin_token,
                    admin_tls,
                    live,
                    nodes,
                    cluster,
                    ejection,
                    not_found,
                    warnings,
                })
            }
            _ => Err(Problems(problems)),
        }
    }

    /// All listeners: `listen` and the `[[listener]]` tables. The default of `listen` is not used if there is a table.
    fn all_listeners(&self) -> Vec<ListenerConfig> {
        let plain = self.listeners.is_empty() || self.origin("listen").is_some();
        let listed = self.listen.iter().filter(|_| plain).cloned().map(ListenerConfig::at);
        listed.chain(self.listeners.iter().cloned()).collect()
    }

    pub(crate) fn users_file(&self) -> Option<&Path> {
        self.users_file.as_deref()
    }

    /// Reads only the users, from the configuration and the users file.
    pub(crate) fn users(&self) -> Result<Users, Problems> {
        let mut problems = Vec::new();
        let password = self.client_password.as_ref().map(SecretSource::read).transpose();
        let password = password.unwrap_or_else(|error| {
            problems.push(self.problem("clients.password", error.to_string()));
            None
        });
        let users = self.resolve_users(password.as_ref(), &mut Vec::new(), &mut problems);
        if problems.is_empty() { Ok(users) } else { Err(Problems(problems)) }
    }

    /// Checks whether clients may connect without a password: only if the listeners are local, or the configuration
    /// allows it.
    pub(crate) fn check_open_access(&self) -> Result<(), Problems> {
        let mut problems = Vec::new();
        self.resolve_listen(false, &mut problems);
        if problems.is_empty() { Ok(()) } else { Err(Problems(problems)) }
    }

    fn resolve_users(
        &self,
        password: Option<&Secret>,
        warnings: &mut Vec<String>,
        problems: &mut Vec<Problem>,
    ) -> Users {
        let users = self.listed_users(password, warnings, problems);
        users.with_default_rules(&self.default_user_rules).unwrap_or_else(|error| {
            problems.push(self.problem("clients.default-user-rules", error.text));
            Users::without_file(password)
        })
    }

    fn listed_users(
        &self,
        password: Option<&Secret>,
        warnings: &mut Vec<String>,
        problems: &mut Vec<Problem>,
    ) -> Users {
        let Some(path) = &self.users_file else { return Users::without_file(password) };
        let shown = path.display();
        if secret::others_may_write(path) {
            problems.push(self.problem(
                "clients.users-file",
                format!("{shown} is writable by all users of this machine; chmod 600 it"),
            ));
        } else if secret::others_may_read(path) {
            warnings.push(format!(
                "the password hashes in {shown} are readable by all users of this machine; chmod 600 it"
            ));
        }
        let read = std::fs::read_to_string(path).map_err(|error| {
            problems.push(self.problem("clients.users-file", format!("cannot read {shown}: {error}")));
        });
        let Ok(text) = read else { return Users::without_file(password) };
        Users::from_file(&text, password).unwrap_or_else(|errors| {
            problems.extend(errors.into_iter().map(|error| match error.line {
                0 => self.problem("clients.users-file", error.text),
                line => Problem { place: Some(format!("{shown}:{line}")), text: error.text },
            }));
            Users::without_file(password)
        })
    }

    fn resolve_tls(
        &self,
        listen: &[ListenerSettings],
        warnings: &mut Vec<String>,
        problems: &mut Vec<Problem>,
    ) -> Option<ServerTls> {
        if !self.tls.is_given() && !listen.iter().any(|listener| listener.tls) {
            return None;
        }
        self.tls.for_clients(warnings).map_err(|text| problems.push(self.problem("tls.cert-file", text))).ok()
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Resolved {
    pub(crate) listen: Vec<ListenerSettings>,
    pub(crate) admin: SocketAddr,
    pub(crate) admin_token: Option<Secret>,
    pub(crate) admin_tls: Option<ServerTls>,
    /// Without the nodes: their ids are not known here.
    pub(crate) live: RuntimeSettings,
    pub(crate) nodes: Vec<NodeAddress>,
    /// Access to the cluster that is the storage. `None`: the storage are the nodes.
    pub(crate) cluster: Option<ClusterPlaces>,
    /// Ejection rule, for a twemproxy pool that owns its servers.
    pub(crate) ejection: Option<switchyard_policy::eject::Rule>,
    /// Nodes with names that do not resolve. They are down until the names resolve.
    not_found: Vec<Problem>,
    /// Notes for the log that do not prevent the start.
    pub(crate) warnings: Vec<String>,
}

impl Resolved {
    /// Turns unresolved names into errors, for callers that need the address of every node at once.
    pub(crate) fn require_resolved(self) -> Result<Self, Problems> {
        if self.not_found.is_empty() { Ok(self) } else { Err(Problems(self.not_found)) }
    }

    /// All warnings, including names that do not resolve yet.
    pub(crate) fn warnings(&self) -> impl Iterator<Item = String> {
        let not_found =
            self.not_found.iter().map(|problem| format!("{problem}; the node is down until its name resolves"));
        self.warnings.iter().cloned().chain(not_found)
    }
}

#[cfg(test)]
mod tests;
