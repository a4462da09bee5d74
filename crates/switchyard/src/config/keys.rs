//! Every key of the configuration, as data: its section, its words, how it is read, how it is shown, and whether a
//! reload applies it.
//!
//! The file reader, the flags, `check-config`, the reload and the reference in `docs/configuration.md` all walk this one
//! table, so a new setting is one entry here (and, if it is worth one, a flag).

use std::path::Path;
use std::time::Duration;

use switchyard_resp::units::{format_size, format_time};

use super::listener::{LimitConfig, ListenerConfig};
use super::memory::MemoryMax;
use super::operator_keys::{CLUSTER, CROSS_SLOT, NODES_SET, SCRIPTS, SLOW_LOG};
use super::raw::Raw;
use super::secret::SecretForm;
use super::{Config, NodeConfig};

/// Where a key stands in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Section {
    /// Before the first `[section]`.
    Top,
    Clients,
    Nodes,
    Admin,
    Log,
    /// Certificates that clients are shown.
    Tls,
    Cluster,
    Scripts,
    Moves,
    /// One of the `[[node]]` tables.
    Node,
    /// One of the `[[listener]]` tables.
    Listener,
    /// One of the `[[limit]]` tables.
    Limit,
}

impl Section {
    /// Its name in the file, without brackets; empty for the top.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Section::Top => "",
            Section::Clients => "clients",
            Section::Nodes => "nodes",
            Section::Admin => "admin",
            Section::Log => "log",
            Section::Tls => "tls",
            Section::Cluster => "cluster",
            Section::Scripts => "scripts",
            Section::Moves => "moves",
            Section::Node => "node",
            Section::Listener => "listener",
            Section::Limit => "limit",
        }
    }

    /// How a sentence refers to it.
    pub(crate) fn spoken(self) -> String {
        match self {
            Section::Top => "at the top level".to_owned(),
            Section::Node => "in [[node]]".to_owned(),
            Section::Listener => "in [[listener]]".to_owned(),
            Section::Limit => "in [[limit]]".to_owned(),
            other => format!("in [{}]", other.name()),
        }
    }

    /// The sections that are plain tables, in the order in which they are shown.
    pub(crate) const TABLES: [Section; 8] =
        [Section::Clients, Section::Tls, Section::Nodes, Section::Scripts, Section::Moves, Section::Cluster, Section::Admin, Section::Log];
}

/// When a changed value takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Takes {
    /// With SIGHUP.
    Reload,
    /// With the next start.
    Restart,
}

/// One key, of the whole configuration ([`keys`]) or of a node ([`node_keys`]).
pub(crate) struct Key<T: 'static> {
    pub(crate) section: Section,
    pub(crate) name: &'static str,
    pub(crate) takes: Takes,
    /// What other programs call the same thing; somebody who writes that is told our word.
    pub(crate) elsewhere: &'static [&'static str],
    /// One sentence for the reference.
    pub(crate) help: &'static str,
    /// An example where the default cannot be one.
    pub(crate) example: &'static str,
    /// Whether the value must not be repeated in errors.
    pub(crate) secret: bool,
    /// Reads a value; relative paths are taken from the given folder. The error says what is allowed.
    pub(crate) set: fn(&mut T, &Raw, &Path) -> Result<(), String>,
    /// The value as TOML, `None` where it is not set.
    pub(crate) show: fn(&T) -> Option<String>,
}

impl<T> Key<T> {
    /// `clients.max-clients`: how origins, errors and `--set` call it.
    pub(crate) fn path(&self) -> String {
        match self.section {
            Section::Top => self.name.to_owned(),
            section => format!("{}.{}", section.name(), self.name),
        }
    }
}

pub(super) fn quoted(text: impl std::fmt::Display) -> Option<String> {
    // Debug of a str escapes what TOML's basic strings want escaped: quotes, backslashes, control characters.
    Some(toml::Value::String(text.to_string()).to_string())
}

pub(super) fn size(bytes: usize) -> Option<String> {
    quoted(format_size(bytes as u64))
}

pub(super) fn time(time: Duration) -> Option<String> {
    quoted(format_time(time))
}

pub(super) fn list(items: impl Iterator<Item = String>) -> Option<String> {
    Some(format!("[{}]", items.filter_map(quoted).collect::<Vec<_>>().join(", ")))
}

const MS: Duration = Duration::from_millis(1);
pub(super) const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(86_400);
const KB: u64 = 1 << 10;
pub(super) const GB: u64 = 1 << 30;

/// The three keys of a secret: itself, in a file, in the environment.
macro_rules! secret {
    ($type:ty, $section:expr, $takes:expr, $field:ident, $name:literal, $whose:literal, $elsewhere:expr) => {
        [
            secret!(@one $type, $section, $takes, $field, $name, SecretForm::Inline, $elsewhere,
                concat!("The ", $whose, ", in clear. Better kept out of this file, by one of the next two keys."), "\"...\""),
            secret!(@one $type, $section, $takes, $field, concat!($name, "-file"), SecretForm::File, &[],
                concat!("File with the ", $whose, "."), concat!("\"/run/secrets/", $name, "\"")),
            secret!(@one $type, $section, $takes, $field, concat!($name, "-env"), SecretForm::Env, &[],
                concat!("Environment variable with the ", $whose, "."), "\"SWITCHYARD_SECRET\""),
        ]
    };
    (@one $type:ty, $section:expr, $takes:expr, $field:ident, $name:expr, $form:expr, $elsewhere:expr, $help:expr, $example:expr) => {
        Key::<$type> {
            section: $section,
            name: $name,
            takes: $takes,
            elsewhere: $elsewhere,
            help: $help,
            example: $example,
            secret: true,
            set: |config, raw, base| {
                let text = raw.text()?;
                config.$field = Some(match $form {
                    SecretForm::File => $form.source(&base.join(text).to_string_lossy()),
                    _ => $form.source(text),
                });
                Ok(())
            },
            show: |config| config.$field.as_ref().filter(|source| source.form() == $form).and_then(|source| quoted(source.shown())),
        }
    };
}

const CLIENT_PASSWORD: [Key<Config>; 3] = secret!(
    Config,
    Section::Clients,
    Takes::Reload,
    client_password,
    "password",
    "password that clients must give with AUTH or HELLO",
    &["requirepass", "auth", "redis-auth"]
);

const NODES_PASSWORD: [Key<Config>; 3] = secret!(
    Config,
    Section::Nodes,
    Takes::Reload,
    nodes_password,
    "password",
    "password for every node that has none of its own",
    &["masterauth", "primaryauth", "redis_auth"]
);

const NODE_PASSWORD: [Key<NodeConfig>; 3] = secret!(
    NodeConfig,
    Section::Node,
    Takes::Reload,
    password,
    "password",
    "password of this node",
    &["auth", "requirepass", "masterauth"]
);

/// An entry with what most have: not secret, no example needed, applied by a reload.
macro_rules! key {
    ($section:expr, $name:literal, $takes:expr, $elsewhere:expr, $help:expr, $set:expr, $show:expr $(, $example:literal)?) => {
        Key {
            section: $section,
            name: $name,
            takes: $takes,
            elsewhere: $elsewhere,
            help: $help,
            example: concat!($($example)?),
            secret: false,
            set: $set,
            show: $show,
        }
    };
}
pub(super) use key;

const TOP: &[Key<Config>] = &[
    key!(
        Section::Top,
        "listen",
        Takes::Restart,
        &["bind", "port", "address", "listen_addr"],
        "What clients connect to: one, or a list. HOST:PORT, tls://HOST:PORT for TLS, or unix:/path for a Unix socket. A listener \
         that needs options gets a [[listener]] table.",
        |config, raw, _| {
            config.listen = raw.listen_places()?;
            Ok(())
        },
        |config| list(config.listen.iter().map(ToString::to_string))
    ),
    key!(
        Section::Top,
        "workers",
        Takes::Restart,
        &["threads", "io-threads", "worker-threads", "server-threads"],
        "Worker threads. The default is one for each processor that the process may use.",
        |config, raw, _| {
            config.workers = raw.count(1..=1024)? as usize;
            Ok(())
        },
        |config| Some(config.workers.to_string())
    ),
    key!(
        Section::Top,
        "pin",
        Takes::Restart,
        &["server-cpulist", "cpu-affinity"],
        "Pin each worker to a processor of its own. Good where the router has the machine, or its share of it, to itself.",
        |config, raw, _| {
            config.pin = raw.switch()?;
            Ok(())
        },
        |config| Some(config.pin.to_string())
    ),
    key!(
        Section::Top,
        "batched-sends",
        Takes::Restart,
        &["io-uring", "io_uring", "uring"],
        "Send all replies of a turn in one system call, by io_uring, where the kernel has it and lets it be used; else, and with false, one by one.",
        |config, raw, _| {
            config.batched_sends = raw.switch()?;
            Ok(())
        },
        |config| Some(config.batched_sends.to_string())
    ),
    key!(
        Section::Top,
        "state-dir",
        Takes::Restart,
        &["dir", "data-dir"],
        "Folder of the slot map and of what must survive a restart. The default is $STATE_DIRECTORY (set by systemd), \
         else $XDG_STATE_HOME/switchyard, else ~/.local/state/switchyard.",
        |config, raw, base| {
            config.state_dir = base.join(raw.text()?);
            Ok(())
        },
        |config| quoted(config.state_dir.display())
    ),
    key!(
        Section::Top,
        "shutdown-timeout",
        Takes::Reload,
        &["drain-timeout", "grace-period"],
        "How long SIGTERM waits for commands in flight before it cuts their clients.",
        |config, raw, _| {
            config.shutdown_timeout = raw.time(Duration::ZERO..=HOUR)?;
            Ok(())
        },
        |config| time(config.shutdown_timeout)
    ),
    key!(
        Section::Top,
        "memory-max",
        Takes::Reload,
        &["maxmemory", "maxmemory-clients"],
        "Memory that the process may use: a size, or a share of what the machine or its control group has. Beyond it the clients that take \
         the most are cut, the biggest first. 0: no bound.",
        |config, raw, _| {
            config.memory_max = MemoryMax::read(raw)?;
            Ok(())
        },
        |config| quoted(config.memory_max)
    ),
    key!(
        Section::Top,
        "allow-open-listener",
        Takes::Restart,
        &["protected-mode"],
        "Listen on addresses that others can reach although clients need no password.",
        |config, raw, _| {
            config.allow_open_listener = raw.switch()?;
            Ok(())
        },
        |config| Some(config.allow_open_listener.to_string())
    ),
];

/// A key that is the path of a file.
macro_rules! file_key {
    ($type:ty, $section:expr, $name:literal, $help:expr, $example:literal, $($field:ident).+) => {
        Key::<$type> {
            section: $section,
            name: $name,
            takes: Takes::Reload,
            elsewhere: &[concat!("tls-", $name)],
            help: $help,
            example: $example,
            secret: false,
            set: |config, raw, base| {
                config.$($field).+ = Some(base.join(raw.text()?));
                Ok(())
            },
            show: |config| config.$($field).+.as_ref().and_then(|path| quoted(path.display())),
        }
    };
}

mod security;

const CLIENTS: &[Key<Config>] = &[
    key!(
        Section::Clients,
        "database",
        Takes::Reload,
        &["redis_db", "db"],
        "Database that a new client starts in.",
        |config, raw, _| {
            config.live.database = raw.count(0..=i32::MAX as u64)? as u32;
            Ok(())
        },
        |config| Some(config.live.database.to_string())
    ),
    key!(
        Section::Clients,
        "max-clients",
        Takes::Reload,
        &["maxclients", "client_connections", "max-connections"],
        "Clients at once; one more is refused with the error that Redis gives.",
        |config, raw, _| {
            config.live.max_clients = raw.count(1..=10_000_000)? as usize;
            Ok(())
        },
        |config| Some(config.live.max_clients.to_string())
    ),
    key!(
        Section::Clients,
        "idle-timeout",
        Takes::Reload,
        &["timeout", "client-timeout"],
        "A client without traffic for longer is closed. 0s: never.",
        |config, raw, _| {
            config.live.client_idle_timeout = Some(raw.time(Duration::ZERO..=DAY * 365)?).filter(|time| !time.is_zero());
            Ok(())
        },
        |config| time(config.live.client_idle_timeout.unwrap_or_default())
    ),
    key!(
        Section::Clients,
        "output-limit",
        Takes::Reload,
        &["client-output-buffer-limit"],
        "Bytes of replies that may wait for one client before it is cut. 0: no limit of its own; memory-max bounds all clients together.",
        |config, raw, _| {
            let limit = raw.size(0..=0).or_else(|_| raw.size(64 * KB..=64 * GB))?;
            config.live.client_output_limit = Some(limit).filter(|limit| *limit > 0).unwrap_or(usize::MAX);
            Ok(())
        },
        |config| size(Some(config.live.client_output_limit).filter(|limit| *limit < usize::MAX).unwrap_or(0))
    ),
    key!(
        Section::Clients,
        "push-limit",
        Takes::Reload,
        &["pubsub-output-limit", "message-limit"],
        "Bytes of messages that may wait for one subscriber before it is cut.",
        |config, raw, _| {
            config.live.push_limit = raw.size(64 * KB..=64 * GB)?;
            Ok(())
        },
        |config| size(config.live.push_limit)
    ),
    key!(
        Section::Clients,
        "push-soft-limit",
        Takes::Reload,
        &["pubsub-output-soft-limit"],
        "A subscriber for which more bytes of messages than these wait for longer than push-soft-time is cut as well.",
        |config, raw, _| {
            config.live.push_soft_limit = raw.size(KB..=64 * GB)?;
            Ok(())
        },
        |config| size(config.live.push_soft_limit)
    ),
    key!(
        Section::Clients,
        "push-soft-time",
        Takes::Reload,
        &["pubsub-output-soft-time"],
        "How long a subscriber may be over push-soft-limit.",
        |config, raw, _| {
            config.live.push_soft_time = raw.time(MS * 200..=DAY)?;
            Ok(())
        },
        |config| time(config.live.push_soft_time)
    ),
    key!(
        Section::Clients,
        "on-missed-messages",
        Takes::Reload,
        &[],
        "What becomes of a subscriber when messages for it may have been missed, because a node's connection was lost. disconnect: its \
         connection is closed, as that of a client of one server is when the server is lost; it subscribes again and knows. continue: it stays, \
         and is not told.",
        |config, raw, _| {
            config.live.missed_disconnects = match raw.text()? {
                "disconnect" => true,
                "continue" => false,
                other => return Err(format!("{other:?} is not disconnect or continue")),
            };
            Ok(())
        },
        |config| quoted(if config.live.missed_disconnects { "disconnect" } else { "continue" })
    ),
    key!(
        Section::Clients,
        "subscriptions-max",
        Takes::Reload,
        &["max-subscriptions"],
        "Channels and patterns that one client may be subscribed to.",
        |config, raw, _| {
            config.live.subscriptions_max = raw.count(1..=100_000_000)? as usize;
            Ok(())
        },
        |config| Some(config.live.subscriptions_max.to_string())
    ),
    key!(
        Section::Clients,
        "pipeline-max",
        Takes::Reload,
        &[],
        "Commands of one client that may be in flight; more wait in its socket.",
        |config, raw, _| {
            config.live.client_pipeline_max = raw.count(1..=1_000_000)? as usize;
            Ok(())
        },
        |config| Some(config.live.client_pipeline_max.to_string())
    ),
    key!(
        Section::Clients,
        "argument-max",
        Takes::Reload,
        &["proto-max-bulk-len"],
        "Largest single argument (key or value) that is accepted. The nodes' proto-max-bulk-len must allow it too.",
        |config, raw, _| {
            config.live.argument_max = raw.size(KB..=4 * GB)?;
            Ok(())
        },
        |config| size(config.live.argument_max)
    ),
];

const NODES: &[Key<Config>] = &[
    key!(
        Section::Nodes,
        "username",
        Takes::Reload,
        &["masteruser", "primaryuser", "user"],
        "ACL user for every node that has none of its own.",
        |config, raw, _| {
            config.nodes_username = Some(raw.text()?.to_owned());
            Ok(())
        },
        |config| config.nodes_username.as_ref().and_then(quoted),
        "\"switchyard\""
    ),
    key!(
        Section::Nodes,
        "connect-timeout",
        Takes::Reload,
        &["connection-timeout"],
        "Time to establish a connection to a node, authentication included.",
        |config, raw, _| {
            config.live.connect_timeout = raw.time(MS..=HOUR)?;
            Ok(())
        },
        |config| time(config.live.connect_timeout)
    ),
    key!(
        Section::Nodes,
        "command-timeout",
        Takes::Reload,
        &["timeout", "op-timeout", "server-timeout"],
        "Time in which a node must answer a command; after it the client gets an error that names the node.",
        |config, raw, _| {
            config.live.command_timeout = raw.time(MS..=HOUR)?;
            Ok(())
        },
        |config| time(config.live.command_timeout)
    ),
    key!(
        Section::Nodes,
        "slow-command-timeout",
        Takes::Reload,
        &["busy-reply-threshold", "lua-time-limit"],
        "The same for commands that may be slow: KEYS, SORT, EVAL and their relatives.",
        |config, raw, _| {
            config.live.slow_command_timeout = raw.time(MS..=DAY)?;
            Ok(())
        },
        |config| time(config.live.slow_command_timeout)
    ),
    key!(
        Section::Nodes,
        "reconnect-backoff-max",
        Takes::Reload,
        &["server-retry-timeout", "server_retry_timeout"],
        "Longest pause between two attempts to reconnect to a node that is down.",
        |config, raw, _| {
            config.live.reconnect_backoff_max = raw.time(MS * 10..=HOUR)?;
            Ok(())
        },
        |config| time(config.live.reconnect_backoff_max)
    ),
    key!(
        Section::Nodes,
        "large-value",
        Takes::Reload,
        &[],
        "Requests and replies of more bytes than this travel on a connection of their own, so that they stall nobody.",
        |config, raw, _| {
            config.live.large_value = raw.size(16 * KB..=GB)?;
            Ok(())
        },
        |config| size(config.live.large_value)
    ),
    key!(
        Section::Nodes,
        "large-connections-max",
        Takes::Reload,
        &["server_connections"],
        "Connections for large values to each node, over all workers.",
        |config, raw, _| {
            config.live.large_connections_max = raw.count(1..=10_000)? as usize;
            Ok(())
        },
        |config| Some(config.live.large_connections_max.to_string())
    ),
    key!(
        Section::Nodes,
        "watch-connections-max",
        Takes::Reload,
        &[],
        "Connections for transactions that begin with WATCH to each node, over all workers. One is held from WATCH to EXEC.",
        |config, raw, _| {
            config.live.watch_connections_max = raw.count(1..=100_000)? as usize;
            Ok(())
        },
        |config| Some(config.live.watch_connections_max.to_string())
    ),
    key!(
        Section::Nodes,
        "blocking-connections-max",
        Takes::Reload,
        &[],
        "Connections for commands that wait at the node (BLPOP, XREAD BLOCK, WAIT), over all workers: so many clients can wait there at once.",
        |config, raw, _| {
            config.live.blocking_connections_max = raw.count(1..=100_000)? as usize;
            Ok(())
        },
        |config| Some(config.live.blocking_connections_max.to_string())
    ),
];

// Below the macros that they use.
mod admin;
pub(crate) mod moves;
mod replication;

/// The keys of everything but `[[node]]`, in the order in which they are shown.
static GROUPS: &[&[Key<Config>]] = &[
    TOP,
    &CLIENT_PASSWORD,
    security::USERS_FILE,
    CLIENTS,
    CROSS_SLOT,
    replication::READS,
    security::TLS,
    &NODES_PASSWORD,
    NODES,
    NODES_SET,
    security::NODES_TLS,
    replication::SENTINEL,
    &replication::SENTINEL_PASSWORD,
    SCRIPTS,
    moves::MOVES,
    CLUSTER,
    admin::ADMIN,
    &admin::ADMIN_TOKEN,
    admin::ADMIN_TLS,
    admin::LOG,
    SLOW_LOG,
];

/// The keys of everything but `[[node]]`, in the order in which they are shown.
pub(crate) fn keys() -> impl Iterator<Item = &'static Key<Config>> {
    GROUPS.iter().copied().flatten()
}

const NODE: &[Key<NodeConfig>] = &[
    key!(
        Section::Node,
        "address",
        Takes::Reload,
        &["server", "host", "addr", "url", "listen", "name"],
        "Address of the node. Its text is also the node's name: in errors, in metrics and in the slot map.",
        |node, raw, _| {
            node.address = Some(raw.endpoint(Some(super::NODE_PORT))?);
            Ok(())
        },
        |node| node.address.as_ref().and_then(quoted),
        "\"127.0.0.1:7001\""
    ),
    key!(
        Section::Node,
        "username",
        Takes::Reload,
        &["user", "masteruser"],
        "ACL user to authenticate as; without one, the default user.",
        |node, raw, _| {
            node.username = Some(raw.text()?.to_owned());
            Ok(())
        },
        |node| node.username.as_ref().and_then(quoted),
        "\"switchyard\""
    ),
    key!(
        Section::Node,
        "tls",
        Takes::Reload,
        &[],
        "Speak TLS to this node, or not; without it, as [nodes] says.",
        |node, raw, _| {
            node.tls = Some(raw.switch()?);
            Ok(())
        },
        |node| node.tls.map(|on| on.to_string()),
        "true"
    ),
    key!(
        Section::Node,
        "tls-server-name",
        Takes::Reload,
        &[],
        "Name that this node's certificate must have, where it is not the host of its address.",
        |node, raw, _| {
            node.tls_server_name = Some(raw.text()?.to_owned());
            Ok(())
        },
        |node| node.tls_server_name.as_ref().and_then(quoted),
        "\"redis-a.internal\""
    ),
];

/// The keys of one `[[listener]]` table.
pub(crate) fn listener_keys() -> impl Iterator<Item = &'static Key<ListenerConfig>> {
    security::LISTENER.iter().chain(replication::LISTENER_READS)
}

/// The keys of one `[[limit]]` table.
pub(crate) fn limit_keys() -> impl Iterator<Item = &'static Key<LimitConfig>> {
    security::LIMIT.iter()
}

/// The keys of one `[[node]]` table.
pub(crate) fn node_keys() -> impl Iterator<Item = &'static Key<NodeConfig>> {
    static GROUPS: &[&[Key<NodeConfig>]] = &[NODE, &NODE_PASSWORD, replication::NODE_REPLICAS, moves::NODE_WEIGHT];
    GROUPS.iter().copied().flatten()
}
