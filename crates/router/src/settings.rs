//! What the router is told: what is fixed at start, and what a reload may change.
//!
//! Types of this crate and not those of the configuration file: the router knows no file, and its tests need none.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use switchyard_policy::empty_return::Known;
use switchyard_policy::hot_copies::Knobs;
use switchyard_policy::topology::NodeId;

use crate::colocate::ColocatePort;
use crate::limits::KeyLimit;
use crate::operator::OperatorPort;
use crate::seat::FleetOwnership;
use crate::threads::Threads;
use crate::tls::{NodeTls, ServerTls};
use crate::users::{Bounds, Users};

/// A password or token. Never printed: `Debug` shows asterisks.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// What is fixed when the router starts.
#[derive(Clone, Debug)]
pub struct Settings {
    /// What clients connect to. Every worker listens on each.
    pub listen: Vec<ListenerSettings>,
    /// Worker threads; at least 1.
    pub workers: usize,
    /// Pin worker `i` to the i-th processor of the inherited set.
    pub pin: bool,
    /// Send what a turn has to send in one system call, by io_uring, where the kernel lets it.
    pub batched_sends: bool,
    /// Registry of the threads that it can serve without.
    pub threads: Threads,
    /// Names what runs of this router have in common, among the connections of a node: what an earlier run has left
    /// there is ended. Letters and digits.
    pub site: String,
    /// What is left at nodes, so that one router at a time serves them.
    pub seat: Option<Arc<FleetOwnership>>,
    /// Of nodes that have replicas: who is who, as far as it is known at start.
    pub servers: BTreeMap<NodeId, Servers>,
    /// What an earlier run has known of the nodes' processes.
    pub processes: BTreeMap<NodeId, KnownProcess>,
    /// Why no node is to be used yet, if so: until [`crate::Router::hold`] says otherwise.
    pub held: Option<String>,
    /// Who executes what workers do not.
    pub ports: Ports,
    /// What a reload may change.
    pub live: RuntimeSettings,
}

/// Who executes what workers do not, from the first client on. What nobody executes is refused.
#[derive(Clone, Debug, Default)]
pub struct Ports {
    /// `SWITCHYARD MOVE` and its relatives.
    pub operator: Option<Arc<dyn OperatorPort>>,
    /// `ACL SETUSER` and its relatives.
    pub users: Option<Arc<dyn OperatorPort>>,
    /// Brings keys home that commands need together.
    pub colocate: Option<Arc<dyn ColocatePort>>,
}

/// What clients connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenerSettings {
    /// Where.
    pub address: ListenAddress,
    /// Whether clients speak TLS there.
    pub tls: bool,
    /// Who answers the reads of its clients; `None`: as [`RuntimeSettings::reads`] says.
    pub reads: Option<Reads>,
    /// What all its clients may do together.
    pub bounds: Bounds,
    /// Connections taken per second; more are closed at once.
    pub connections_per_second: Option<u32>,
}

impl ListenerSettings {
    /// A plain listener on an address.
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

/// Where a listener is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenAddress {
    /// An IP address and a port.
    Tcp(SocketAddr),
    /// A Unix socket.
    Unix {
        /// Its file.
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

/// What may change while the router runs ([`crate::Router::reconfigure`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeSettings {
    /// Who may log in. The password of `[clients]` is the default user's.
    pub users: Arc<Users>,
    /// Database that a new client starts in.
    pub database: u32,
    /// Clients may use no other database: ejection removes keys of this one alone, so old values in another could be
    /// read.
    pub one_database: bool,
    /// Clients at once over all workers (Redis `maxclients`).
    pub max_clients: usize,
    /// Open files that the process needs besides one for each client.
    pub files_reserved: u64,
    /// A client without traffic for longer is closed; `None`: never (Redis `timeout`).
    pub client_idle_timeout: Option<Duration>,
    /// A client that has to log in and has not for so long is closed; `None`: never.
    pub login_timeout: Option<Duration>,
    /// Bytes in the heap of the process beyond which the biggest clients are cut (Redis `maxmemory-clients`, of the
    /// whole process).
    pub memory_max: usize,
    /// Bytes of replies that may wait for one client before it is cut (Redis `client-output-buffer-limit`);
    /// `usize::MAX`: no limit.
    pub client_output_limit: usize,
    /// Bytes of messages that may wait for one subscriber before it is cut (Redis `client-output-buffer-limit pubsub`).
    pub push_limit: usize,
    /// One for which more bytes than these wait for longer than `push_soft_time` is cut as well.
    pub push_soft_limit: usize,
    /// See `push_soft_limit`.
    pub push_soft_time: Duration,
    /// Which subscribers are disconnected when messages for them may have been missed.
    pub on_missed: OnMissed,
    /// Channels and patterns that one client may be subscribed to.
    pub subscriptions_max: usize,
    /// Commands of one client that may be in flight; more wait in its socket.
    pub client_pipeline_max: usize,
    /// Largest single argument accepted, bytes (Redis `proto-max-bulk-len`).
    pub argument_max: usize,
    /// Requests and replies of more bytes than this travel on a connection of their own.
    pub large_value: usize,
    /// Time to establish a connection to a node, handshake included.
    pub connect_timeout: Duration,
    /// Time in which a node must answer a command.
    pub command_timeout: Duration,
    /// The same for commands that may be slow (FLUSHALL, KEYS, SORT, EVAL and relatives); `None`: they have all the
    /// time that they need.
    pub slow_command_timeout: Option<Duration>,
    /// Longest pause between two attempts to reconnect to a node.
    pub reconnect_backoff_max: Duration,
    /// Time that commands for a lost node wait for its return, from the loss on. `None`: see [`RuntimeSettings::wait_for_return`].
    pub wait_max: Option<Duration>,
    /// Connections for large values to a node, over all workers.
    pub large_connections_max: usize,
    /// What clients of TLS listeners are shown; `None` where there is no such listener.
    pub tls: Option<ServerTls>,
    /// How often keys may be used.
    pub key_limits: Vec<KeyLimit>,
    /// Time that a client has for the TLS handshake.
    pub handshake_timeout: Duration,
    /// Commands that took at least so long are entered into the slow log; `None`: none (Redis
    /// `slowlog-log-slower-than`).
    pub slowlog_slower_than: Option<Duration>,
    /// Entries of the slow log (Redis `slowlog-max-len`).
    pub slowlog_max_len: usize,
    /// Whether entries of the slow log have the arguments of the command, or only its name.
    pub slowlog_arguments: bool,
    /// Names (or patterns) of settings that clients may set at every node by CONFIG SET.
    pub config_set: Vec<String>,
    /// Bytes that a command on keys of several slots may bring together at one node; 0: such commands are refused.
    pub cross_slot_max: usize,
    /// Values of at least so many bytes (of a node's memory) are moved in pieces; 0: all are moved whole.
    pub big_key: usize,
    /// How long a command waits for keys that live elsewhere than its other keys to be brought home; zero: it is
    /// refused.
    pub bring_home_timeout: Duration,
    /// Whether scripts are kept to the keys that they declare.
    pub check_scripts: bool,
    /// What is done with a node that comes back empty.
    pub empty_return: EmptyReturn,
    /// How the router looks to clients of a Redis Cluster; `None`: like a server without cluster support.
    pub cluster: Option<Cluster>,
    /// Connections for transactions that begin with WATCH, to a node, over all workers.
    pub watch_connections_max: usize,
    /// Connections for commands that wait at the node, over all workers.
    pub blocking_connections_max: usize,
    /// Who answers reads of new clients.
    pub reads: Reads,
    /// How hot keys and the load of slots become known.
    pub telemetry: Telemetry,
    /// Copies of what is read much.
    pub hot_copies: HotCopies,
    /// How to reach each node of the topology.
    pub nodes: BTreeMap<NodeId, NodeAccess>,
}

/// By what keys become known that are used much (SwitchKV, section 3.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reports {
    /// Both.
    Both,
    /// What was counted, once a second.
    Periodic,
    /// A key that makes up a part of the last commands to a node, at once.
    Instant,
}

/// How hot keys and the load of slots become known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Telemetry {
    /// One command in so many is counted, chosen at random; 0: none.
    pub sample: usize,
    /// The reports by which keys are chosen for hot copies.
    pub reports: Reports,
    /// Commands in a second to a node from which on it gives instant reports.
    pub instant_threshold: usize,
}

impl Default for Telemetry {
    fn default() -> Self {
        Self { sample: 16, reports: Reports::Both, instant_threshold: 2_000 }
    }
}

/// Copies of what is read much, which the router answers from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HotCopies {
    /// Whether there are any.
    pub is_on: bool,
    /// Which keys, and how many.
    pub knobs: Knobs,
    /// Bytes of one reply.
    pub reply_max: usize,
    /// How long a copy may be given at most, where keys live longer or for ever.
    pub life_max: Option<Duration>,
    /// Keys that begin with one of these are never copied.
    pub never: Vec<String>,
    /// Only keys that begin with one of these are, where there are some.
    pub only: Vec<String>,
}

impl Default for HotCopies {
    fn default() -> Self {
        Self {
            is_on: true,
            knobs: Knobs::default(),
            reply_max: 64 << 10,
            life_max: Some(Duration::from_secs(10)),
            never: Vec::new(),
            only: Vec::new(),
        }
    }
}

impl HotCopies {
    /// Whether a key may be copied, by its name.
    pub fn may_be(&self, key: &[u8]) -> bool {
        let is_in = |prefixes: &[String]| prefixes.iter().any(|prefix| key.starts_with(prefix.as_bytes()));
        !is_in(&self.never) && (self.only.is_empty() || is_in(&self.only))
    }

    /// Bytes that each of so many workers may keep. Each has copies of its own of all keys that are chosen, so no more
    /// than these are chosen, either.
    pub fn bytes_of_worker(&self, workers: usize) -> usize {
        self.knobs.bytes_max / workers.max(1)
    }
}

/// What is done with a node whose process is another one, and that has no keys where it had some.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EmptyReturn {
    /// It is served: its keys are gone.
    Serve,
    /// It is treated as down until somebody accepts it, or it has keys again.
    Hold,
    /// Held where it keeps its data on disk, and served where it does not.
    Auto,
}

/// Which subscribers are disconnected when messages for them may have been missed at a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnMissed {
    /// Those of a shard channel there; those of channels and patterns when no node serves them any more.
    Auto,
    /// All that are subscribed there.
    Disconnect,
    /// None.
    Continue,
}

/// How the router looks to clients that speak to a Redis Cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cluster {
    /// Hosts and ports that they are told of, each a member with a share of the slots. Empty: the address that the
    /// client is connected to.
    pub announce: Vec<(String, u16)>,
}

/// Who answers the reads of a client, of nodes that have replicas. What a replica answers may be older than what its
/// primary would.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Reads {
    /// The primary.
    #[default]
    Primary,
    /// A replica, or the primary where none is fit.
    PreferReplica,
    /// A replica, or an error.
    Replica,
    /// Whoever answers soonest.
    Nearest,
}

impl Reads {
    /// The policy of that name.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Primary, Self::PreferReplica, Self::Replica, Self::Nearest]
            .into_iter()
            .find(|reads| reads.name() == text)
    }

    /// Its name in configurations.
    pub fn name(self) -> &'static str {
        match self {
            Self::Primary => "primary",
            Self::PreferReplica => "prefer-replica",
            Self::Replica => "replica",
            Self::Nearest => "nearest",
        }
    }
}

/// The servers of a node that has replicas, as they are now ([`crate::Router::set_servers`]).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Servers {
    /// The primary, where it is known.
    pub primary: Option<SocketAddr>,
    /// Replicas that may be read, the nearest first.
    pub readable: Vec<SocketAddr>,
    /// The primary answers sooner than any of them.
    pub primary_is_nearest: bool,
}

/// What is known of the server process of a node that must survive the router: without it, a node that has lost its
/// keys meanwhile would be served.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KnownProcess {
    /// Its identity: another one means that it restarted.
    pub run_id: String,
    /// Its data when it was asked last.
    pub data: Known,
    /// Whether it keeps its data on disk.
    pub persists: bool,
    /// Another process is in its place, which has not what it had, and is not served.
    pub is_held: bool,
    /// Whether it keeps the mark of the router ([`crate::FleetOwnership`]).
    pub is_marked: bool,
}

/// How to reach a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeAccess {
    /// Its name in errors, logs and metrics: the address as the user wrote it.
    pub name: String,
    /// Resolved address. `None` for a node whose primary is found out at run time (see [`Servers`]), or whose name does
    /// not resolve.
    pub address: Option<SocketAddr>,
    /// Why its name does not resolve.
    pub unresolved: Option<String>,
    /// ACL user to authenticate as; `None` with a password: the default user.
    pub username: Option<String>,
    /// Password of that user.
    pub password: Option<Secret>,
    /// TLS to it; `None`: in clear.
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
            cross_slot_max: 32 << 20,
            big_key: 1 << 20,
            bring_home_timeout: Duration::from_secs(5),
            check_scripts: true,
            empty_return: EmptyReturn::Auto,
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
    /// Time that commands for a lost node wait for its return. With several nodes it is shorter by default, because the
    /// client's commands for the others wait as well, and some clients time out after 2 s.
    pub(crate) fn wait_for_return(&self, nodes: usize) -> Duration {
        self.wait_max.unwrap_or(Duration::from_secs(if nodes == 1 { 5 } else { 2 }))
    }

    /// The threshold of the slow log in the form that it is compared in: no command takes `u32::MAX` us.
    pub(crate) fn slow_us(&self) -> u32 {
        self.slowlog_slower_than.map_or(u32::MAX, |t| u32::try_from(t.as_micros()).unwrap_or(u32::MAX))
    }
}
