//! Settings of the router: some fixed at start, others changed by a reload.
//!
//! Separate from the types of the configuration file: the router and its tests need no file.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use switchyard_policy::data_loss::Known;
use switchyard_policy::hot_copies::Knobs;
use switchyard_policy::topology::NodeId;

use crate::cluster::ClusterMap;
use crate::colocate::ColocatePort;
use crate::limits::KeyLimit;
use crate::operator::OperatorPort;
use crate::ownership::FleetOwnership;
use crate::threads::Threads;
use crate::tls::{NodeTls, ServerTls};
use crate::users::{Bounds, Users};

/// A password or token. `Debug` prints asterisks.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// Settings that are fixed at start.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Listeners. Every worker listens on each.
    pub listen: Vec<ListenerSettings>,
    /// Worker threads; at least 1.
    pub workers: usize,
    /// Pin worker `i` to the i-th processor of the inherited set.
    pub pin: bool,
    /// Send the output of a turn in one system call, by io_uring, if the kernel allows it.
    pub batched_sends: bool,
    /// Registry of the auxiliary threads.
    pub threads: Threads,
    /// Identifies connections of all runs of this router at a node, so that a run can kill connections of an earlier
    /// one. Letters and digits.
    pub site: String,
    /// Ownership record at the nodes, so that one router at a time serves them.
    pub ownership: Option<Arc<FleetOwnership>>,
    /// Primary and replicas of replicated nodes, as far as known at start.
    pub servers: BTreeMap<NodeId, Servers>,
    /// Facts about the nodes' processes from an earlier run.
    pub processes: BTreeMap<NodeId, KnownProcess>,
    /// Reason why no node may be used, if so. Lifted by [`crate::Router::hold`].
    pub held_reason: Option<String>,
    /// Handlers of commands that workers do not execute.
    pub ports: Ports,
    /// Map of the cluster whose members the nodes are. `None`: standalone nodes.
    pub cluster_map: Option<Arc<ClusterMap>>,
    /// Settings that a reload may change.
    pub live: RuntimeSettings,
}

/// Handlers of commands that workers do not execute, available from the first client on. Commands without a handler are
/// refused.
#[derive(Clone, Debug, Default)]
pub struct Ports {
    /// `SWITCHYARD MOVE` and related commands.
    pub operator: Option<Arc<dyn OperatorPort>>,
    /// `ACL SETUSER` and related commands.
    pub users: Option<Arc<dyn OperatorPort>>,
    /// Moves keys back to their slot owner if a command needs them together.
    pub colocate: Option<Arc<dyn ColocatePort>>,
}

/// A listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenerSettings {
    /// Address.
    pub address: ListenAddress,
    /// Whether clients use TLS.
    pub tls: bool,
    /// Read policy of the listener's clients. `None`: [`RuntimeSettings::reads`].
    pub reads: Option<Reads>,
    /// Limits for all its clients together.
    pub bounds: Bounds,
    /// Maximum accepted connections per second. Further connections are closed at once.
    pub connections_per_second: Option<u32>,
}

impl ListenerSettings {
    /// Returns a listener without TLS.
    pub fn tcp(address: SocketAddr) -> Self {
        Self {
            address: ListenAddress::Tcp(address),
            tls: false,
            reads: None,
            bounds: Bounds::default(),
            connections_per_second: None,
        }
    }
}

/// Address of a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenAddress {
    /// An IP address and a port.
    Tcp(SocketAddr),
    /// A Unix socket.
    Unix {
        /// Path of the socket file.
        path: PathBuf,
        /// Permissions of the file.
        mode: u32,
    },
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ListenAddress::Tcp(address) => address.fmt(f),
            ListenAddress::Unix { path, .. } => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Settings that may change while the router runs ([`crate::Router::reconfigure`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeSettings {
    /// Users and their permissions. The password of `[clients]` is the default user's.
    pub users: Arc<Users>,
    /// Initial database of a new client.
    pub database: u32,
    /// Clients may use no other database: a cluster has no other. Ejection removes only keys of this one, so stale values
    /// in other databases could be read.
    pub one_database: bool,
    /// Maximum clients over all workers (Redis `maxclients`).
    pub max_clients: usize,
    /// Open files that the process needs in addition to one per client.
    pub files_reserved: u64,
    /// Idle time after which a client is closed. `None`: never (Redis `timeout`).
    pub client_idle_timeout: Option<Duration>,
    /// Maximum time until a client that must log in has done so. `None`: no limit.
    pub login_timeout: Option<Duration>,
    /// Maximum bytes in the heap of the process. Above it the biggest clients are disconnected (Redis
    /// `maxmemory-clients`, for the whole process).
    pub memory_max: usize,
    /// Maximum bytes of queued replies per client, which is disconnected above it (Redis `client-output-buffer-limit`).
    /// `usize::MAX`: no limit.
    pub client_output_limit: usize,
    /// Maximum bytes of queued messages per subscriber, which is disconnected above it (Redis
    /// `client-output-buffer-limit pubsub`).
    pub push_limit: usize,
    /// Queued bytes per subscriber that must not persist for longer than `push_soft_time`.
    pub push_soft_limit: usize,
    /// Maximum time above `push_soft_limit`.
    pub push_soft_time: Duration,
    /// Subscribers to disconnect if they may have missed messages.
    pub on_missed: OnMissed,
    /// Maximum channels and patterns per client.
    pub subscriptions_max: usize,
    /// Maximum commands in flight per client. Further commands wait in its socket.
    pub client_pipeline_max: usize,
    /// Maximum size of an argument, bytes (Redis `proto-max-bulk-len`).
    pub argument_max: usize,
    /// Size in bytes above which a request or reply uses an exclusive connection.
    pub large_value: usize,
    /// Timeout of a connection attempt to a node, including the handshake.
    pub connect_timeout: Duration,
    /// Timeout of a command at a node.
    pub command_timeout: Duration,
    /// Timeout of commands that may be slow (FLUSHALL, KEYS, SORT, EVAL and similar). `None`: no timeout.
    pub slow_command_timeout: Option<Duration>,
    /// Maximum delay between two attempts to reconnect to a node.
    pub reconnect_backoff_max: Duration,
    /// Time after a node's loss during which commands wait for its return. `None`: see
    /// [`RuntimeSettings::wait_for_return`].
    pub wait_max: Option<Duration>,
    /// Maximum connections for large values per node, over all workers.
    pub large_connections_max: usize,
    /// Certificates for TLS listeners. `None` without such a listener.
    pub tls: Option<ServerTls>,
    /// Rate limits of keys.
    pub key_limits: Vec<KeyLimit>,
    /// Timeout of a client's TLS handshake.
    pub handshake_timeout: Duration,
    /// Minimum duration of commands in the slow log. `None`: disabled (Redis `slowlog-log-slower-than`).
    pub slowlog_slower_than: Option<Duration>,
    /// Maximum entries of the slow log (Redis `slowlog-max-len`).
    pub slowlog_max_len: usize,
    /// Whether slow log entries contain the arguments of the command, or only its name.
    pub slowlog_arguments: bool,
    /// Names (or patterns) of settings that clients may set at all nodes with CONFIG SET.
    pub config_set: Vec<String>,
    /// Treatment of commands that need keys of several nodes at one node.
    pub cross_slot: CrossSlot,
    /// Maximum bytes that a command on keys of several slots may collect at one node. 0: its keys are not collected.
    pub cross_slot_max: usize,
    /// Minimum size of values that are moved in pieces, in bytes of the node's memory. 0: none.
    pub big_key: usize,
    /// Maximum time that a command waits until its keys are at one node. Zero: no keys are moved for commands.
    pub colocate_timeout: Duration,
    /// Whether scripts may use only declared keys.
    pub check_scripts: bool,
    /// Treatment of a node that returns empty.
    pub on_data_loss: OnDataLoss,
    /// Appearance for Redis Cluster clients. `None`: a server without cluster support.
    pub cluster: Option<Cluster>,
    /// Maximum connections for transactions with WATCH per node, over all workers.
    pub watch_connections_max: usize,
    /// Maximum connections for blocking commands per node, over all workers.
    pub blocking_connections_max: usize,
    /// Initial read policy of clients.
    pub reads: Reads,
    /// Detection of hot keys and of the load of slots.
    pub telemetry: Telemetry,
    /// Copies of hot keys.
    pub hot_copies: HotCopies,
    /// Access to each node of the topology.
    pub nodes: BTreeMap<NodeId, NodeAccess>,
}

/// Sources of reports about hot keys (SwitchKV, section 3.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reports {
    /// Periodic and instant reports.
    Both,
    /// Counts, once a second.
    Periodic,
    /// A key with a large part of the last commands to a node, at once.
    Instant,
}

/// Detection of hot keys and of the load of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Telemetry {
    /// Sampling: one command of this many is counted, at random. 0: none.
    pub sample: usize,
    /// Reports used to choose keys for hot copies.
    pub reports: Reports,
    /// Minimum commands per second to a node for instant reports.
    pub instant_threshold: usize,
}

impl Default for Telemetry {
    fn default() -> Self {
        Self { sample: 16, reports: Reports::Both, instant_threshold: 2_000 }
    }
}

/// Copies of hot keys, from which the router answers reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HotCopies {
    /// Whether hot copies are enabled.
    pub is_on: bool,
    /// Whether hits have a bound, because others write the same keys. Otherwise copies are never stale.
    pub is_bounded: bool,
    /// The bound: a hit returns what the owner would have returned within this time.
    pub staleness_max: Duration,
    /// Selection and number of keys.
    pub knobs: Knobs,
    /// Maximum size of a copied reply, bytes.
    pub reply_max: usize,
    /// Maximum age of a copy, for keys with a longer TTL or none.
    pub ttl: Option<Duration>,
    /// Prefixes of keys that are never copied.
    pub exclude: Vec<String>,
    /// Prefixes of keys that may be copied. Empty: all.
    pub only: Vec<String>,
}

impl Default for HotCopies {
    fn default() -> Self {
        Self {
            is_on: true,
            is_bounded: false,
            staleness_max: Duration::from_secs(1),
            knobs: Knobs::default(),
            reply_max: 64 << 10,
            ttl: Some(Duration::from_secs(10)),
            exclude: Vec::new(),
            only: Vec::new(),
        }
    }
}

impl HotCopies {
    /// The bound of hits. `None`: copies are never stale.
    pub fn staleness(&self) -> Option<Duration> {
        self.is_bounded.then_some(self.staleness_max)
    }

    /// Whether the name of a key allows copies.
    pub fn allows_key(&self, key: &[u8]) -> bool {
        let is_in = |prefixes: &[String]| prefixes.iter().any(|prefix| key.starts_with(prefix.as_bytes()));
        !is_in(&self.exclude) && (self.only.is_empty() || is_in(&self.only))
    }

    /// Maximum bytes of copies per worker. Each worker has its own copies of all chosen keys, so this also limits the
    /// chosen keys.
    pub fn bytes_of_worker(&self, workers: usize) -> usize {
        self.knobs.bytes_max / workers.max(1)
    }
}

/// Treatment of a node whose new process has no keys although the old one had some.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnDataLoss {
    /// Serve: the keys are lost.
    Serve,
    /// Treat it as down until an operator accepts it, or it has keys again.
    Hold,
    /// Hold a node that persists its data, serve any other.
    Auto,
}

/// Treatment of commands, transactions and scripts that need keys of several nodes at one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CrossSlot {
    /// The keys are brought to one node. Members of a cluster refuse them all the same.
    CoLocate,
    /// Refused if the keys are in several slots, as by a Redis Cluster.
    Refuse,
}

/// Subscribers to disconnect if they may have missed messages of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnMissed {
    /// Subscribers of a shard channel of the node; subscribers of channels and patterns if no node serves them any
    /// more.
    Auto,
    /// All with a subscription at the node.
    Disconnect,
    /// None.
    Continue,
}

/// Appearance for Redis Cluster clients.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cluster {
    /// Announced hosts and ports, each with a share of the slots. Empty: the address that the client is connected to.
    pub announce: Vec<(String, u16)>,
}

/// Read policy for replicated nodes. A replica may return older values than its primary.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Reads {
    /// The primary.
    #[default]
    Primary,
    /// A replica, or the primary if no replica is fit.
    PreferReplica,
    /// A replica, or an error.
    Replica,
    /// The server with the lowest latency.
    Nearest,
}

impl Reads {
    /// Returns the policy with this name.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Primary, Self::PreferReplica, Self::Replica, Self::Nearest]
            .into_iter()
            .find(|reads| reads.name() == text)
    }

    /// Name in configurations.
    pub fn name(self) -> &'static str {
        match self {
            Self::Primary => "primary",
            Self::PreferReplica => "prefer-replica",
            Self::Replica => "replica",
            Self::Nearest => "nearest",
        }
    }
}

/// Current servers of a replicated node ([`crate::Router::set_servers`]).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Servers {
    /// Primary, if known.
    pub primary: Option<SocketAddr>,
    /// Readable replicas, nearest first.
    pub readable: Vec<SocketAddr>,
    /// The primary has a lower latency than all of them.
    pub primary_is_nearest: bool,
    /// In front of a cluster: the readable replicas as members.
    pub members: BTreeMap<SocketAddr, ReplicaMember>,
    /// In front of a cluster: epoch of the map in which the primary last gained slots.
    pub gained_epoch: u64,
}

/// A replica that is a member of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaMember {
    /// Id in the cluster (`CLUSTER MYID`).
    pub id: String,
    /// TLS settings. `None`: plain TCP.
    pub tls: Option<NodeTls>,
}

/// Facts about a node's server process that must survive the router: without them, a node that has lost its keys while
/// the router was down would be served.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KnownProcess {
    /// `run_id`. Changes with a restart.
    pub run_id: String,
    /// Amount of data at the last query.
    pub data: Known,
    /// Whether it persists its data.
    pub persists: bool,
    /// Whether another process without this data has replaced it. Then the node is not served.
    pub is_held: bool,
    /// Whether it stores the ownership record of the router ([`crate::FleetOwnership`]).
    pub has_ownership_record: bool,
}

/// Access to a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeAccess {
    /// Name in errors, logs and metrics: the address as configured.
    pub name: String,
    /// Resolved address. `None` if the primary is determined at run time (see [`Servers`]), or the name does not
    /// resolve.
    pub address: Option<SocketAddr>,
    /// Error of the name resolution.
    pub unresolved: Option<String>,
    /// ACL user. `None` with a password: the default user.
    pub username: Option<String>,
    /// Password of that user.
    pub password: Option<Secret>,
    /// TLS settings. `None`: plain TCP.
    pub tls: Option<NodeTls>,
}

impl Default for RuntimeSettings {
    fn default() -> Self {
        Self {
            users: Arc::default(),
            database: 0,
            one_database: false,
            max_clients: 10_000,
            files_reserved: 0,
            client_idle_timeout: None,
            login_timeout: Some(Duration::from_secs(60)),
            memory_max: usize::MAX,
            client_output_limit: usize::MAX,
            push_limit: 32 << 20,
            push_soft_limit: 8 << 20,
            push_soft_time: Duration::from_secs(60),
            on_missed: OnMissed::Auto,
            subscriptions_max: 100_000,
            client_pipeline_max: 4096,
            argument_max: 512 << 20,
            large_value: 1 << 20,
            connect_timeout: Duration::from_secs(2),
            command_timeout: Duration::from_secs(5),
            slow_command_timeout: None,
            reconnect_backoff_max: Duration::from_secs(2),
            wait_max: None,
            large_connections_max: 64,
            tls: None,
            key_limits: Vec::new(),
            handshake_timeout: Duration::from_secs(10),
            slowlog_slower_than: Some(Duration::from_millis(10)),
            slowlog_max_len: 128,
            slowlog_arguments: true,
            config_set: Vec::new(),
            cross_slot: CrossSlot::CoLocate,
            cross_slot_max: 32 << 20,
            big_key: 1 << 20,
            colocate_timeout: Duration::from_secs(5),
            check_scripts: true,
            on_data_loss: OnDataLoss::Auto,
            cluster: None,
            watch_connections_max: 256,
            blocking_connections_max: 5000,
            reads: Reads::Primary,
            telemetry: Telemetry::default(),
            hot_copies: HotCopies::default(),
            nodes: BTreeMap::new(),
        }
    }
}

impl RuntimeSettings {
    /// Time after a node's loss during which commands wait for its return. Shorter by default with several nodes,
    /// because the client's commands for other nodes wait as well, and some clients time out after 2 s.
    pub(crate) fn wait_for_return(&self, nodes: usize) -> Duration {
        self.wait_max.unwrap_or(Duration::from_secs(if nodes == 1 { 5 } else { 2 }))
    }

    /// Threshold of the slow log in microseconds, capped at `u32::MAX`, which no command reaches.
    pub(crate) fn slow_us(&self) -> u32 {
        self.slowlog_slower_than.map_or(u32::MAX, |t| u32::try_from(t.as_micros()).unwrap_or(u32::MAX))
    }
}

/// Returns the reason why clients may not use a database, if so.
pub(crate) fn other_database(live: &RuntimeSettings, database: u32) -> Option<String> {
    (live.one_database && database != live.database).then(|| {
        format!(
            "ERR Switchyard serves only database {} in front of a cluster, or of a pool that ejects servers (auto_eject_hosts). Do not select another",
            live.database
        )
    })
}
