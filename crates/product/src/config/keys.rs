//! Table of all configuration keys: section, names, reader, printer, and whether a reload applies the key.
//!
//! The file reader, the flags, `check-config`, the reload and the reference in `docs/configuration.md` all use this
//! table. A new setting is one entry here, plus a flag if it deserves one.

use std::path::Path;
use std::time::Duration;

use switchyard_control::autoscale;
use switchyard_control::moves::{DURABILITIES, keyword_of, parse_keyword};
use switchyard_control::planner::{Mode, POLICIES};
use switchyard_policy::hot_copies::{Limited, Selection};
use switchyard_policy::migration::Goal;
use switchyard_resp::units::{format_size, format_time};
use switchyard_router::{CrossSlot, KEY_RATE_MAX, OnDataLoss, OnMissed, Reads, Reports};

use super::listener::{LimitConfig, ListenerConfig, parse_mode};
use super::memory::MemoryMax;
use super::placement::{Adopt, RuleConfig, read_preset};
use super::raw::Raw;
use super::secret::SecretForm;
use super::storage::read_mappings;
use super::tls::ClientAuth;
use super::{Config, Endpoint, LogFormat, LogLevel, NODE_PORT, NodeConfig};

/// Modes of the planner. Two have other names in front of a cluster.
const PLANNER_MODES: [(Mode, &str); 5] =
    [(Mode::Off, "off"), (Mode::Observe, "observe"), (Mode::On, "on"), (Mode::Observe, "advise"), (Mode::On, "act")];

/// Section of the file that contains a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Section {
    /// Before the first `[section]`.
    Top,
    Clients,
    Nodes,
    /// A cluster as storage.
    Storage,
    Admin,
    Log,
    /// Server certificates for clients.
    Tls,
    Cluster,
    Scripts,
    Moves,
    Telemetry,
    HotCopies,
    Placement,
    Planner,
    Autoscale,
    AutoscaleLocal,
    AutoscaleStandby,
    AutoscaleCommand,
    /// A `[[node]]` table.
    Node,
    /// A `[[listener]]` table.
    Listener,
    /// A `[[limit]]` table.
    Limit,
    /// A `[[placement.rule]]` table.
    Rule,
}

impl Section {
    /// Name in the file, without brackets. Empty for the top level.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Section::Top => "",
            Section::Clients => "clients",
            Section::Nodes => "nodes",
            Section::Storage => "storage",
            Section::Admin => "admin",
            Section::Log => "log",
            Section::Tls => "tls",
            Section::Cluster => "cluster",
            Section::Scripts => "scripts",
            Section::Moves => "moves",
            Section::Telemetry => "telemetry",
            Section::HotCopies => "hot-copies",
            Section::Placement => "placement",
            Section::Planner => "planner",
            Section::Autoscale => "autoscale",
            Section::AutoscaleLocal => "autoscale.local",
            Section::AutoscaleStandby => "autoscale.standby",
            Section::AutoscaleCommand => "autoscale.command",
            Section::Node => "node",
            Section::Listener => "listener",
            Section::Limit => "limit",
            Section::Rule => "placement.rule",
        }
    }

    /// Returns the subsection `name` of `outer`: a table or a list of tables.
    pub(crate) fn within(outer: Section, name: &str) -> Option<Section> {
        let is_it = |section: &Section| section.name().split_once('.') == Some((outer.name(), name));
        Self::TABLES.into_iter().chain(Self::LISTS).find(is_it)
    }

    /// Phrase for error messages, for example "in [[node]]".
    pub(crate) fn spoken(self) -> String {
        match self {
            Section::Top => "at the top level".to_owned(),
            many if Self::LISTS.contains(&many) => format!("in [[{}]]", many.name()),
            other => format!("in [{}]", other.name()),
        }
    }

    /// Sections that can occur several times, as `[[name]]`.
    pub(crate) const LISTS: [Section; 4] = [Section::Node, Section::Listener, Section::Limit, Section::Rule];

    /// Sections that are plain tables, in display order.
    pub(crate) const TABLES: [Section; 17] = [
        Section::Clients,
        Section::Tls,
        Section::Nodes,
        Section::Storage,
        Section::Scripts,
        Section::Moves,
        Section::Telemetry,
        Section::HotCopies,
        Section::Placement,
        Section::Planner,
        Section::Autoscale,
        Section::AutoscaleLocal,
        Section::AutoscaleStandby,
        Section::AutoscaleCommand,
        Section::Cluster,
        Section::Admin,
        Section::Log,
    ];
}

/// When a changed value takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AppliesOn {
    /// With SIGHUP.
    Reload,
    /// With the next start.
    Restart,
}

/// A key of the main configuration ([`CONFIG`]) or of a `[[...]]` table.
pub(crate) struct Key<T: 'static> {
    pub(crate) section: Section,
    pub(crate) name: &'static str,
    pub(crate) takes: AppliesOn,
    /// Names of this setting in other programs, for the hint when one of them is used.
    pub(crate) elsewhere: &'static [&'static str],
    /// Sentence for the reference.
    pub(crate) help: &'static str,
    /// Example value, if the default is not a useful one.
    pub(crate) example: &'static str,
    /// Whether errors must not repeat the value.
    pub(crate) secret: bool,
    /// Parses a value. Relative paths are resolved against the given folder. The error lists the allowed values.
    pub(crate) set: fn(&mut T, &Raw, &Path) -> Result<(), String>,
    /// The value as TOML. `None` if it is not set.
    pub(crate) show: fn(&T) -> Option<String>,
}

impl<T> Key<T> {
    /// Full name, for example `clients.max-clients`, as used in origins, errors and `--set`.
    pub(crate) fn path(&self) -> String {
        match self.section {
            Section::Top => self.name.to_owned(),
            section => format!("{}.{}", section.name(), self.name),
        }
    }
}

fn quoted(text: impl std::fmt::Display) -> Option<String> {
    // Debug formatting of a str escapes everything that TOML basic strings require.
    Some(toml::Value::String(text.to_string()).to_string())
}

fn size(bytes: usize) -> Option<String> {
    quoted(format_size(bytes as u64))
}

fn time(time: Duration) -> Option<String> {
    quoted(format_time(time))
}

fn list<T: std::fmt::Display>(items: &[T]) -> Option<String> {
    Some(format!("[{}]", items.iter().filter_map(quoted).collect::<Vec<_>>().join(", ")))
}

const MS: Duration = Duration::from_millis(1);
const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(86_400);
const KB: u64 = 1 << 10;
const GB: u64 = 1 << 30;

/// Default port of Sentinels.
const SENTINEL_PORT: u16 = 26379;

const ON_DATA_LOSS: [(OnDataLoss, &str); 3] =
    [(OnDataLoss::Serve, "serve"), (OnDataLoss::Hold, "hold"), (OnDataLoss::Auto, "auto")];

fn read_reads(raw: &Raw) -> Result<Reads, String> {
    let text = raw.text()?;
    Reads::parse(text).ok_or_else(|| format!("{text:?} is not primary, prefer-replica, replica or nearest"))
}

fn read_master(raw: &Raw) -> Result<String, String> {
    let name = raw.text()?;
    if name.is_empty() || !name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b)) {
        return Err(format!("{name:?} is not a name that Sentinel accepts: letters, digits, and . _ -"));
    }
    Ok(name.to_owned())
}

/// Reads a percentage as a fraction.
fn read_part(raw: &Raw) -> Result<f64, String> {
    Ok(raw.count(1..=100)? as f64 / 100.0)
}

fn show_part(part: &f64) -> Option<String> {
    Some(format!("{:.0}", part * 100.0))
}

fn read_ms(raw: &Raw) -> Result<u64, String> {
    Ok(raw.time(Duration::ZERO..=7 * DAY)?.as_millis() as u64)
}

fn read_us(raw: &Raw) -> Result<f64, String> {
    Ok(raw.time(MS..=HOUR)?.as_micros() as f64)
}

fn read_ports(raw: &Raw) -> Result<(u16, u16), String> {
    let text = raw.text()?;
    let ports =
        text.split_once('-').and_then(|(first, last)| Some((first.trim().parse().ok()?, last.trim().parse().ok()?)));
    ports
        .filter(|(first, last): &(u16, u16)| *first > 0 && first <= last)
        .ok_or_else(|| format!("{text:?} is no range of ports: write 7101-7199"))
}

/// Maximum nodes that Redis Cluster recommends. Each address also needs slots.
const ANNOUNCED_MAX: usize = 1000;

fn read_announced(raw: &Raw) -> Result<Vec<Endpoint>, String> {
    let texts = raw.texts()?;
    if texts.len() > ANNOUNCED_MAX {
        return Err(format!(
            "{} addresses are too many: at most {ANNOUNCED_MAX}, like nodes of a Redis Cluster",
            texts.len()
        ));
    }
    texts.iter().map(|text| Endpoint::parse(text, None)).collect()
}

fn read_words(raw: &Raw) -> Result<Vec<String>, String> {
    Ok(raw.texts()?.into_iter().filter(|word| !word.is_empty()).collect())
}

fn read_lower_case(raw: &Raw) -> Result<Vec<String>, String> {
    Ok(raw.texts()?.iter().map(|name| name.to_ascii_lowercase()).collect())
}

/// 0 in the file means unlimited (`usize::MAX`).
fn read_output_limit(raw: &Raw) -> Result<usize, String> {
    let limit = raw.size(0..=0).or_else(|_| raw.size(64 * KB..=64 * GB))?;
    Ok(if limit == 0 { usize::MAX } else { limit })
}

fn show_output_limit(limit: &usize) -> Option<String> {
    size(if *limit == usize::MAX { 0 } else { *limit })
}

fn read_rate(raw: &Raw) -> Result<Option<u64>, String> {
    Ok(Some(raw.rate(64 * GB)?).filter(|rate| *rate > 0))
}

/// Calls `read`. Needed so that the compiler infers the types of the closures of [`key!`].
fn read<T>(raw: &Raw, read: impl Fn(&Raw) -> Result<T, String>) -> Result<T, String> {
    read(raw)
}

/// Calls `show`, for the same reason as [`read`].
fn show<'v, T>(value: &'v T, show: impl Fn(&'v T) -> Option<String>) -> Option<String> {
    show(value)
}

/// Builds a key: the kind of the value selects how it is read and shown.
macro_rules! key {
    ($row:tt switch {} $($field:ident).+) => { key!($row by { Raw::switch, |on| Some(on.to_string()) } $($field).+) };
    ($row:tt word { $words:expr } $($field:ident).+) => {
        key!($row by { |raw| parse_keyword(&$words, raw.text()?), |value| quoted(keyword_of(&$words, *value)) } $($field).+)
    };
    ($row:tt count { $range:expr } $($field:ident).+) => {
        key!($row by { |raw| Ok(raw.count($range)? as _), |count| Some(count.to_string()) } $($field).+)
    };
    ($row:tt size { $range:expr } $($field:ident).+) => { key!($row by { |raw| raw.size($range), |bytes| size(*bytes) } $($field).+) };
    ($row:tt time { $range:expr } $($field:ident).+) => { key!($row by { |raw| raw.time($range), |set| time(*set) } $($field).+) };
    ($row:tt time_or_never { $range:expr } $($field:ident).+) => {
        key!($row by { |raw| Ok(Some(raw.time($range)?).filter(|set| !set.is_zero())), |set| time(set.unwrap_or_default()) } $($field).+)
    };
    ($row:tt texts {} $($field:ident).+) => { key!($row by { Raw::texts, |texts| list(texts) } $($field).+) };
    ($row:tt endpoints { $port:expr } $($field:ident).+) => {
        key!($row by { |raw| raw.endpoints($port), |all| if all.is_empty() { None } else { list(all) } } $($field).+)
    };
    ($row:tt text {} $($field:ident).+) => { key!($row optional { |raw| Ok(raw.text()?.to_owned()), quoted } $($field).+) };
    ($row:tt optional_count { $range:expr } $($field:ident).+) => {
        key!($row optional { |raw| Ok(raw.count($range)? as _), |count| Some(count.to_string()) } $($field).+)
    };
    ($row:tt optional_time { $range:expr } $($field:ident).+) => { key!($row optional { |raw| raw.time($range), |set| time(*set) } $($field).+) };
    // Not shown unless set.
    ($row:tt optional { $read:expr, $show:expr } $($field:ident).+) => {
        key!($row set { false
            |table, raw, _| { table.$($field).+ = Some(read(raw, $read)?); Ok(()) },
            |table| table.$($field).+.as_ref().and_then(|value| show(value, $show))
        })
    };
    ($row:tt by { $read:expr, $show:expr } $($field:ident).+) => {
        key!($row set { false
            |table, raw, _| { table.$($field).+ = read(raw, $read)?; Ok(()) },
            |table| show(&table.$($field).+, $show)
        })
    };
    ($row:tt folder {} $($field:ident).+) => {
        key!($row set { false
            |table, raw, base| { table.$($field).+ = base.join(raw.text()?); Ok(()) },
            |table| quoted(table.$($field).+.display())
        })
    };
    ($row:tt file {} $($field:ident).+) => {
        key!($row set { false
            |table, raw, base| { table.$($field).+ = Some(base.join(raw.text()?)); Ok(()) },
            |table| table.$($field).+.as_ref().and_then(|path| quoted(path.display()))
        })
    };
    // A secret has three keys that share a field: inline, from a file, from the environment.
    ($row:tt secret { $form:ident } $($field:ident).+) => {
        key!($row set { true
            |table, raw, base| {
                let text = raw.text()?;
                table.$($field).+ = Some(match SecretForm::$form {
                    SecretForm::File => SecretForm::File.source(&base.join(text).to_string_lossy()),
                    form => form.source(text),
                });
                Ok(())
            },
            |table| table.$($field).+.as_ref().filter(|source| source.form() == SecretForm::$form).and_then(|source| quoted(source.shown()))
        })
    };
    ({ $section:ident $name:literal $takes:ident [$($elsewhere:literal),*] [$($example:literal)?] $help:literal }
        set { $secret:literal $set:expr, $show:expr }) => {
        Key {
            section: Section::$section,
            name: $name,
            takes: AppliesOn::$takes,
            elsewhere: &[$($elsewhere),*],
            help: $help,
            example: concat!($($example)?),
            secret: $secret,
            set: $set,
            show: $show,
        }
    };
}

/// A table of keys. Each row has the name, when a change takes effect, names in other programs, the kind of the value,
/// the field, an example if the default is not a useful one, and the help text.
macro_rules! keys {
    ($(#[$doc:meta])* $keys:ident: $table:ty; $([$section:ident] $(
        $name:literal $takes:ident $elsewhere:tt $kind:ident $(($($how:tt)*))? $($field:ident).+ $(= $example:literal)?,
            $help:literal;
    )*)*) => {
        $(#[$doc])*
        pub(crate) static $keys: &[Key<$table>] = &[
            $($(key!({ $section $name $takes $elsewhere [$($example)?] $help } $kind { $($($how)*)? } $($field).+),)*)*
        ];
    };
}

keys! {
    /// Keys of all sections except the `[[...]]` tables, in display order.
    CONFIG: Config;

    [Top]
    "listen" Restart ["bind", "port", "address", "listen_addr"] by(Raw::listen_places, |places| list(places)) listen,
        "Address for clients: one, or a list. HOST:PORT, tls://HOST:PORT for TLS, or unix:/path for a Unix socket. A listener that \
         needs options gets a [[listener]] table.";
    "workers" Restart ["threads", "io-threads", "worker-threads", "server-threads"] count(1..=1024) workers,
        "Worker threads. The default is one for each processor that the process may use.";
    "pin" Restart ["server-cpulist", "cpu-affinity"] switch pin,
        "Pin each worker to a separate processor. Useful if the router has the machine, or a fixed share of it, to itself.";
    "batched-sends" Restart ["io-uring", "io_uring", "uring"] switch batched_sends,
        "Send all replies of a turn in one system call, by io_uring, if the kernel provides and permits it; otherwise, and with false, \
         one by one.";
    "state-dir" Restart ["dir", "data-dir"] folder state_dir,
        "Folder of the slot map and other state that must survive a restart. The default is $STATE_DIRECTORY (set by systemd), else \
         $XDG_STATE_HOME/switchyard, else ~/.local/state/switchyard.";
    "shutdown-timeout" Reload ["drain-timeout", "grace-period"] time(Duration::ZERO..=HOUR) shutdown_timeout,
        "Maximum time that SIGTERM waits for commands in flight before it disconnects their clients.";
    "memory-max" Reload ["maxmemory", "maxmemory-clients"] by(MemoryMax::read, quoted) memory_max,
        "Memory that the process may use: a size, or a percentage of the memory of the machine or its control group. Beyond it, the clients that \
         use the most are closed, the largest first. 0: no limit.";
    "allow-open-listener" Restart ["protected-mode"] switch allow_open_listener,
        "Listen on addresses that other machines can reach, although clients need no password.";

    [Clients]
    "password" Reload ["requirepass", "auth", "redis-auth"] secret(Inline) client_password = "\"...\"",
        "The password that clients must give with AUTH or HELLO, in clear text. Prefer one of the next two keys, which keep it out of this file.";
    "password-file" Reload [] secret(File) client_password = "\"/run/secrets/password\"",
        "File with the password that clients must give with AUTH or HELLO.";
    "password-env" Reload [] secret(Env) client_password = "\"SWITCHYARD_SECRET\"",
        "Environment variable with the password that clients must give with AUTH or HELLO.";
    "users-file" Reload [] file users_file = "\"/etc/switchyard/users\"",
        "File with the users that may log in, what they may do, and hashes of their passwords: see docs/security.md. With it, a client \
         needs a user name, unless the file has a line for the default user.";
    "default-user-rules" Reload [] by(read_words, |words| list(words)) default_user_rules,
        "Permissions of clients that have not named a user, in the syntax of the users file: [\"-@dangerous\", \"-keys\"]; \
         [\"operator\"] lets them change the fleet. Not together with a line for the default user there. Empty: they may do everything except \
         that.";
    "login-timeout" Reload ["auth-timeout"] time_or_never(Duration::ZERO..=HOUR) runtime.login_timeout,
        "Timeout for a client's login; then its connection is closed. 0s: no timeout.";
    "database" Reload ["redis_db", "db"] count(0..=i32::MAX as u64) runtime.database,
        "Database that a new client starts in.";
    "max-clients" Reload ["maxclients", "client_connections", "max-connections"] count(1..=10_000_000) runtime.max_clients,
        "Maximum number of clients; further clients are refused with Redis's error.";
    "idle-timeout" Reload ["timeout", "client-timeout"] time_or_never(Duration::ZERO..=DAY * 365) runtime.client_idle_timeout,
        "A client without traffic for longer is closed. 0s: never.";
    "output-limit" Reload ["client-output-buffer-limit"] by(read_output_limit, show_output_limit) runtime.client_output_limit,
        "Bytes of replies that may wait for a client before it is closed. 0: no limit per client; memory-max limits all clients together.";
    "push-limit" Reload ["pubsub-output-limit", "message-limit"] size(64 * KB..=64 * GB) runtime.push_limit,
        "Bytes of messages that may wait for one subscriber before it is disconnected.";
    "push-soft-limit" Reload ["pubsub-output-soft-limit"] size(KB..=64 * GB) runtime.push_soft_limit,
        "A subscriber for which more bytes of messages than these wait for longer than push-soft-time is disconnected as well.";
    "push-soft-time" Reload ["pubsub-output-soft-time"] time(MS * 200..=DAY) runtime.push_soft_time,
        "Maximum time that a subscriber may exceed push-soft-limit.";
    "on-missed-messages" Reload [] word([(OnMissed::Auto, "auto"), (OnMissed::Disconnect, "disconnect"), (OnMissed::Continue, "continue")]) runtime.on_missed,
        "Which subscribers are disconnected when messages for them may have been missed, because a node's connection was lost. auto: subscribers of a shard \
         channel there; subscribers of channels and patterns when no node serves them. disconnect: all that are subscribed there, so that each \
         notices it. continue: none.";
    "subscriptions-max" Reload ["max-subscriptions"] count(1..=100_000_000) runtime.subscriptions_max,
        "Channels and patterns that one client may be subscribed to.";
    "pipeline-max" Reload [] count(1..=1_000_000) runtime.client_pipeline_max,
        "Commands of one client that may be in flight; more wait in its socket.";
    "argument-max" Reload ["proto-max-bulk-len"] size(KB..=4 * GB) runtime.argument_max,
        "Largest single argument (key or value) that is accepted. The nodes' proto-max-bulk-len must allow it too.";
    "cross-slot" Reload [] word([(CrossSlot::CoLocate, "co-locate"), (CrossSlot::Refuse, "refuse")]) runtime.cross_slot,
        "Treatment of commands, transactions and scripts that need keys of several nodes at one node. co-locate: the keys are brought to one node, and stay there. \
         refuse: CROSSSLOT if the keys are in several slots, as by a Redis Cluster.";
    "cross-slot-max" Reload [] size(0..=GB) runtime.cross_slot_max,
        "Bytes of keys that a command with several source keys (SUNION, ZINTERSTORE, BITOP, COPY) may collect on one node if \
         they are at several nodes. 0: no keys are collected; the command is treated like others (cross-slot).";
    "reads" Reload ["read-from", "readfrom", "read-preference"] by(read_reads, |reads| quoted(reads.name())) runtime.reads,
        "Servers for reads from nodes with replicas: primary; prefer-replica (the primary if no replica is usable); replica (otherwise an \
         error); nearest. A replica's reply may be older than the last write. Applies to new connections.";

    [Tls]
    "cert-file" Reload ["tls-cert-file"] file tls.certificate = "\"/etc/switchyard/cert.pem\"",
        "Certificate for TLS listeners, followed by its chain to an authority: PEM.";
    "key-file" Reload ["tls-key-file"] file tls.key = "\"/etc/switchyard/key.pem\"",
        "Private key of that certificate: PEM.";
    "client-ca-file" Reload ["tls-client-ca-file"] file tls.client_ca = "\"/etc/switchyard/client-ca.pem\"",
        "Authorities whose certificates clients may show: PEM.";
    "client-auth" Reload ["tls-auth-clients"] word(ClientAuth::ALL) tls.client_auth,
        "off: no client certificate is requested; optional: a certificate must be valid if there is one; required: without a valid one the \
         handshake fails.";
    "handshake-timeout" Reload [] time(MS * 100..=HOUR) runtime.handshake_timeout,
        "Time that a client has for the TLS handshake.";

    [Nodes]
    "password" Reload ["masterauth", "primaryauth", "redis_auth"] secret(Inline) nodes_password = "\"...\"",
        "The password for every node without a password of its own, in clear text. Prefer one of the next two keys, which keep it out of this file.";
    "password-file" Reload [] secret(File) nodes_password = "\"/run/secrets/password\"",
        "File with the password for every node without a password of its own.";
    "password-env" Reload [] secret(Env) nodes_password = "\"SWITCHYARD_SECRET\"",
        "Environment variable with the password for every node without a password of its own.";
    "username" Reload ["masteruser", "primaryuser", "user"] text nodes_username = "\"switchyard\"",
        "ACL user for every node without a user of its own.";
    "connect-timeout" Reload ["connection-timeout"] time(MS..=HOUR) runtime.connect_timeout,
        "Time to establish a connection to a node, authentication included.";
    "command-timeout" Reload ["timeout", "op-timeout", "server-timeout"] time(MS..=HOUR) runtime.command_timeout,
        "Timeout of a node's reply to a command; then the client gets an error that names the node.";
    "slow-command-timeout" Reload ["busy-reply-threshold", "lua-time-limit"] time_or_never(Duration::ZERO..=DAY) runtime.slow_command_timeout,
        "The same timeout for commands that may be slow: FLUSHALL, KEYS, SORT, EVAL and their relatives. 0s: no timeout, as at a server. \
         Commands queued behind them at the node do not time out.";
    "reconnect-backoff-max" Reload ["server-retry-timeout", "server_retry_timeout"] time(MS * 10..=HOUR) runtime.reconnect_backoff_max,
        "Longest pause between two attempts to reconnect to a node that is down.";
    "wait-max" Reload [] optional_time(Duration::ZERO..=HOUR) runtime.wait_max = "\"2s\"",
        "Time that commands for a node that was lost wait for its return, from the loss on. Then they get NODEDOWN at once; with one node their connection is closed instead, also for \
         NODELOST. Without it, 5s with one node, 2s with several, 0s for pools of twemproxy. 0s: commands do not wait, and no connection is closed.";
    "large-value" Reload [] size(16 * KB..=GB) runtime.large_value,
        "Requests and replies of more bytes than this use a separate connection, so that they do not delay other clients.";
    "large-connections-max" Reload ["server_connections"] count(1..=10_000) runtime.large_connections_max,
        "Connections for large values to each node, over all workers.";
    "watch-connections-max" Reload [] count(1..=100_000) runtime.watch_connections_max,
        "Connections for transactions that begin with WATCH to each node, over all workers. A connection is used from WATCH to EXEC.";
    "blocking-connections-max" Reload [] count(1..=100_000) runtime.blocking_connections_max,
        "Connections for commands that wait at the node (BLPOP, XREAD BLOCK, WAIT), over all workers: the maximum number of clients that wait there at \
         once.";
    "config-set" Reload [] by(read_lower_case, |names| list(names)) runtime.config_set,
        "Names of settings, or patterns such as \"maxmemory*\", that clients may change at every node by CONFIG SET. Settings that belong \
         to one node (ports, files, passwords) are refused all the same. A node that joins gets notify-keyspace-events and \
         maxmemory-policy of the other nodes if the list has these names.";
    "on-data-loss" Reload ["empty-return"] word(ON_DATA_LOSS) runtime.on_data_loss,
        "Treatment of a node that restarted and lost its keys. serve: it is served, its keys are lost. hold: it is \
         treated as down until SWITCHYARD ACCEPT, or until it has them again. auto: hold if it stores its data on disk (appendonly, \
         save) and commands of the last second cannot have removed the keys, else serve.";
    "tls" Reload ["tls-replication", "tls-cluster"] switch nodes_tls.on,
        "Use TLS for every node, unless its [[node]] table sets tls.";
    "tls-ca-file" Reload [] file nodes_tls.ca = "\"/etc/switchyard/ca.pem\"",
        "Authorities that sign the nodes' certificates: PEM. Without it, the authorities that the system trusts.";
    "tls-cert-file" Reload [] file nodes_tls.certificate = "\"/etc/switchyard/client.pem\"",
        "Client certificate for nodes: PEM. Without it, no certificate is sent.";
    "tls-key-file" Reload [] file nodes_tls.key = "\"/etc/switchyard/client.key\"",
        "Private key of that certificate: PEM.";
    "tls-server-name" Reload [] text nodes_tls.server_name = "\"redis.internal\"",
        "Name that the certificates of all servers must have. Without it, each server's certificate must have the server's own host name \
         or IP address, as [[node]] or the Sentinels name it.";
    "tls-insecure" Reload ["insecure", "skip-verify"] switch nodes_tls.insecure,
        "Accept any certificate from nodes. An attacker in the network can then read and change everything: for trials only.";
    "sentinel-tls" Reload ["sentinels-tls"] switch sentinel_tls,
        "Talk to the Sentinels over TLS, with the authorities and the certificate of nodes.tls-...; each Sentinel's certificate must name \
         its host as listed in sentinels.";
    "sentinel-username" Reload ["sentinel-user"] text sentinel_username = "\"switchyard\"",
        "ACL user at the Sentinels; without one, the default user.";
    "sentinel-password" Reload [] secret(Inline) sentinel_password = "\"...\"",
        "The password at the Sentinels, in clear text. Prefer one of the next two keys, which keep it out of this file.";
    "sentinel-password-file" Reload [] secret(File) sentinel_password = "\"/run/secrets/sentinel-password\"",
        "File with the password at the Sentinels.";
    "sentinel-password-env" Reload [] secret(Env) sentinel_password = "\"SWITCHYARD_SECRET\"",
        "Environment variable with the password at the Sentinels.";

    [Storage]
    "cluster" Restart ["cluster-nodes", "startup-nodes"] endpoints(Some(NODE_PORT)) storage.cluster = "[\"redis-1:6379\"]",
        "Some members of a Redis or Valkey Cluster, which is the storage in place of nodes: see docs/clusters.md. The other members are found.";
    "addresses" Restart ["address-map", "nat-map"] by(read_mappings, |all| if all.is_empty() { None } else { list(all) }) storage.addresses = "[\"10.0.0.5:6379=nat:7001\"]",
        "Addresses to use in place of addresses that members report, for networks with address translation or tunnels: REPORTED=USED.";
    "wait-max" Reload [] optional_time(Duration::ZERO..=HOUR) storage.wait_max = "\"5s\"",
        "Time that commands wait for an owner of their slot, during a failover for example. Then they get NODEDOWN. Without it, 5s.";
    "drain-max" Reload [] optional_time(Duration::ZERO..=DAY) storage.drain_max = "\"10m\"",
        "Maximum time for which a process that was replaced by `switchyard upgrade` serves the clients that it has. Then they are \
         disconnected as by SIGTERM. Without it, 10m.";

    [Scripts]
    "undeclared-keys" Reload ["allow-cross-slot-keys"] word([(true, "refuse"), (false, "allow")]) runtime.check_scripts,
        "refuse: a script or function that accesses a key outside the slots of its declared keys gets an \
         error. allow: it can access all keys at the node of its declared keys.";

    [Moves]
    "goal" Reload ["speed", "priority"] word(Goal::ALL) moves.how.goal,
        "Default priority of moves: fast, balanced or gentle.";
    "max-rate" Reload ["bandwidth", "rate-limit"] by(read_rate, |rate| size(rate.unwrap_or(0) as usize)) moves.how.max_rate,
        "Maximum number of bytes per second that a move copies, with a unit, such as 20mb. 0: as fast as the goal allows.";
    "durability" Reload [] word(DURABILITIES) moves.how.durability,
        "Required durability at the target before a key leaves its source: memory (the target has replied), aof (its append-only file is \
         on disk), replica (its replicas have it).";
    "per-node-max" Reload [] count(1..=16) moves.per_node_max,
        "Maximum number of concurrent moves of a node, as source or as target; more wait.";
    "big-key" Reload ["large-key", "big-keys"] size(0..=GB) runtime.big_key,
        "Values that take at least this many bytes of a node's memory are copied in pieces, so that commands wait only for a piece. 0: none.";
    "colocate-timeout" Reload ["bring-home-timeout", "home-timeout"] time(Duration::ZERO..=HOUR) runtime.colocate_timeout,
        "Maximum time that a command waits until its keys are brought to one node. 0s: no keys are moved for commands, and those that need it are refused with \
         CROSSSLOT.";

    [Telemetry]
    "sample" Reload ["sampling-rate"] count(0..=1024) runtime.telemetry.sample,
        "Sampling of commands to find hot keys and the load of slots: one in this number, chosen at random; under high load fewer, about 8,000 per second on each worker. 1: all. 0: none, and no key is hot.";
    "reports" Reload [] word([(Reports::Both, "both"), (Reports::Periodic, "periodic"), (Reports::Instant, "instant")]) runtime.telemetry.reports,
        "Reports that select keys for hot copies: periodic (the counts, once a second), instant (a key that makes up nine of the last 200 commands to a busy \
         node, at once), or both.";
    "instant-threshold" Reload [] count(1..=100_000_000) runtime.telemetry.instant_threshold,
        "Commands per second to a node above which it sends instant reports.";

    [HotCopies]
    "mode" Reload ["enabled"] word([(true, "auto"), (false, "off")]) runtime.hot_copies.is_on,
        "auto: the router serves the most-read keys from its own copies, which are never stale. off: every read goes to a node.";
    "promise" Reload [] word([(false, "exact"), (true, "bounded")]) runtime.hot_copies.is_bounded,
        "exact: copies are never stale. bounded: in front of a cluster, a copy is what the owner would have returned within staleness-max. There, copies are \
         off without it.";
    "staleness-max" Reload [] time(Duration::from_millis(50)..=Duration::from_secs(60)) runtime.hot_copies.staleness_max,
        "Bound for copies with promise = \"bounded\". Each used key is confirmed by a TOUCH every third of this time.";
    "admission" Reload [] word([(Selection::Load, "load"), (Selection::Percentile, "percentile"), (Selection::All, "all")]) runtime.hot_copies.knobs.selection,
        "load: copies of keys with at least min-reads-per-second; a key replaces another one if it is clearly hotter. percentile: as SwitchKV does, copies of \
         keys with more reads than the lowest tenth of the keys that have copies; a key that is no longer read keeps its copies until its place is needed. \
         all: copies of every key that is read, for tests and comparisons.";
    "memory" Reload ["maxmemory"] size(64 * KB..=64 * GB) runtime.hot_copies.knobs.bytes_max,
        "Maximum number of bytes of all copies. Copies are removed first when memory is short.";
    "keys-max" Reload [] count(1..=1_000_000) runtime.hot_copies.knobs.keys_max,
        "Keys that may have copies at a time. Then a key of an instant report replaces the coldest one.";
    "min-reads-per-second" Reload ["reads-min", "threshold"] count(1..=10_000_000) runtime.hot_copies.knobs.min_reads_per_second,
        "Minimum number of reads per second of a key to be copied, plus four for each write.";
    "admissions-per-second" Reload ["adds-max", "update-rate"] count(1..=100_000) runtime.hot_copies.knobs.admissions_per_second,
        "Maximum number of keys added per second, or of all changes: see limited-changes.";
    "limited-changes" Reload ["budget"] word([(Limited::Admissions, "additions"), (Limited::Changes, "additions-and-removals")]) runtime.hot_copies.knobs.limited,
        "Changes that admissions-per-second limits. additions: removals are free. additions-and-removals: both together, as SwitchKV's switch does. \
         Additions come first, and a removal waits for up to deletion-delay, or twice that under lasting changes.";
    "deletion-delay" Reload ["stays"] time(Duration::ZERO..=HOUR) runtime.hot_copies.knobs.deletion_delay,
        "Time that a key keeps its copies when it is no longer read often (admission = \"load\"), and that a removal waits for additions (limited-changes).";
    "value-max" Reload [] size(KB..=16 << 20) runtime.hot_copies.reply_max,
        "Replies of more bytes than this are not copied.";
    "ttl" Reload ["life-max"] time_or_never(Duration::ZERO..=DAY) runtime.hot_copies.ttl,
        "Longest life of a copy; then its node is read again. Limits the effect of changes that bypass the router and that the node does not report (SWAPDB, DEBUG, a loaded dump). 0s: as long as \
         the key lives.";
    "exclude" Reload ["never"] texts runtime.hot_copies.exclude,
        "Prefixes of keys that are never copied.";
    "allow" Reload ["include", "prefixes"] texts runtime.hot_copies.only,
        "If set, only keys with one of these prefixes are copied.";

    [Placement]
    "adopt" Reload [] word([(Adopt::Ask, "ask"), (Adopt::Auto, "auto")]) adopt_rules,
        "ask: changed rules move keys after `switchyard rules adopt`. auto: they move keys after a start or reload, and without configured rules \
         the router adopts rules that it has learned.";

    [Planner]
    "mode" Reload ["enabled"] word(PLANNER_MODES) planner.mode,
        "off: the load is not evaluated. observe: the planner decides, but only reports its decisions (`switchyard plan`). on: it moves keys and slots by itself. \
         advise and act: other words for observe and on, for a cluster.";
    "policy" Reload [] word(POLICIES) planner.policy,
        "Policy: switchyard (the cheapest of several ways, with a fit test), or as Makris et al. do: makris-ffd, makris-safe.";
    "interval" Reload ["period"] time(Duration::from_millis(100)..=HOUR) planner.interval,
        "Interval between evaluations of the load.";
    "window" Reload [] optional_time(Duration::from_millis(500)..=HOUR) planner.window = "\"3s\"",
        "Time that a node must be over its limit before the planner acts. Shorter peaks are ignored. Without it, 3s, and 1m in front of a cluster, where \
         a move costs more.";
    "headroom" Reload ["margin"] count(1..=80) planner.headroom,
        "Percentage of a node's capacity that is kept free. Without a capacity, the percentage above its even share.";
    "min-requests" Reload ["threshold"] optional_count(0..=100_000_000) planner.least = "1000",
        "A node with fewer requests per second is never relieved. Not set: 500 with a `capacity`, and 5000 without.";
    "max-keys-per-minute" Reload [] count(0..=65_536) planner.keys_per_minute,
        "Maximum number of single keys moved per minute.";
    "max-bytes-per-hour" Reload [] size(0..=1024 * GB) planner.bytes_per_hour,
        "Maximum number of bytes moved per hour.";

    [Autoscale]
    "mode" Reload ["enabled"] word(Mode::ALL) autoscale.mode,
        "off: the number of nodes changes only on request. observe: the autoscaler decides, but only reports its decisions (`switchyard autoscale`). on: it adds and removes nodes.";
    "policy" Reload [] word(autoscale::POLICIES) autoscale.knobs.policy,
        "Policy: threshold (a measure over its limit for a while), static (at once, with pauses), model (by the capacity of one node), learned (a decision tree, trained on \
         the load of past weeks), or predictive (a forecast with daily and weekly seasons). The last two act like threshold for the first 15 days.";
    "min-nodes" Reload ["min", "minimum"] count(1..=1024) autoscale.knobs.nodes_min,
        "Minimum number of nodes.";
    "max-nodes" Reload ["max", "maximum"] count(1..=1024) autoscale.knobs.nodes_max,
        "Maximum number of nodes.";
    "max-response-time" Reload ["latency"] by(read_us, |us| time(Duration::from_micros(*us as u64))) autoscale.knobs.response_us,
        "A mean response time above this adds a node.";
    "max-cpu" Reload ["cpu"] by(read_part, show_part) autoscale.knobs.cpu,
        "Percentage of a processor that a server uses: a mean above this adds a node.";
    "max-memory" Reload ["memory"] by(read_part, show_part) autoscale.knobs.memory,
        "Percentage of maxmemory in use: a value above this adds a node.";
    "calm" Reload [] by(read_part, show_part) autoscale.knobs.calm,
        "A node is removed only if every measure would then be below this percentage of its limit.";
    "capacity" Reload [] optional(|raw| Ok(raw.count(1..=1_000_000_000)? as f64), |rate| Some(format!("{rate:.0}"))) autoscale.knobs.capacity = "50000",
        "Requests per second that one node answers in time; `switchyard bench capacity` measures it. The policy model needs it; learned and predictive otherwise derive it from max-cpu.";
    "headroom" Reload ["margin"] by(read_part, show_part) autoscale.knobs.headroom,
        "Percentage of the capacity that is kept free, for the policies that use `capacity`.";
    "up-after" Reload [] by(read_ms, |ms| time(Duration::from_millis(*ms))) autoscale.knobs.up_after,
        "Duration of high load before a node is added. The policy static does not wait.";
    "down-after" Reload [] by(read_ms, |ms| time(Duration::from_millis(*ms))) autoscale.knobs.down_after,
        "Duration of low load before a node is removed. The policy static does not wait.";
    "up-cooldown" Reload ["up-pause", "cooldown"] by(read_ms, |ms| time(Duration::from_millis(*ms))) autoscale.knobs.up_cooldown,
        "Pause between a change and the next node that is added.";
    "down-cooldown" Reload ["down-pause"] by(read_ms, |ms| time(Duration::from_millis(*ms))) autoscale.knobs.down_cooldown,
        "Pause between a change and the next node that is removed.";
    "schedule" Reload [] by(|raw| autoscale::Schedule::parse(&raw.texts()?), |schedule| list(schedule.texts())) autoscale.knobs.schedule,
        "Minimum number of nodes by weekday and time in UTC, such as \"Fri 18:00 at least 6\" and \"daily 08:00 at least 3\". A line holds until the next.";
    "notify" Reload ["webhook"] by(Raw::command_line, |words| list(words)) autoscale.notify,
        "A program and its arguments. It gets each decision, end and failure as a line of JSON.";

    [AutoscaleLocal]
    "command" Reload [] by(Raw::command_line, |words| list(words)) autoscale.local.command,
        "Command line to start a server on this machine: a program and its arguments, with the placeholders {port} and {dir}.";
    "ports" Reload [] by(read_ports, |(first, last)| quoted(format!("{first}-{last}"))) autoscale.local.ports,
        "Range of ports for these servers.";
    "directory" Reload ["dir"] file autoscale.local.directory = "\"/srv/switchyard-servers\"",
        "Folder of the directories of new servers. The default is the state directory's path with -servers added, so that a full disk need not hit both.";

    [AutoscaleStandby]
    "servers" Reload [] texts autoscale.standby,
        "Servers that run, have no keys, and join when they are needed: HOST:PORT each.";

    [AutoscaleCommand]
    "run" Reload [] by(Raw::command_line, |words| list(words)) autoscale.command.run,
        "A program and its arguments. It starts and stops servers on request; a request is a line of JSON (docs/autoscaling.md).";
    "timeout" Reload [] time(Duration::from_secs(1)..=HOUR) autoscale.command.timeout,
        "Timeout of the program.";

    [Cluster]
    "emulate" Reload ["cluster-enabled", "enabled"] switch cluster_emulate,
        "Act as a Redis Cluster for clients: answer CLUSTER, READONLY and ASKING, and report cluster_enabled:1 in INFO.";
    "announce" Reload ["cluster-announce-ip", "cluster-announce-hostname"] by(read_announced, |all| list(all)) cluster_announce,
        "Addresses of the routers that are announced to cluster clients, the same list in every router; each gets a share of the slots. The \
         default is the address that the client is connected to.";

    [Admin]
    "listen" Restart ["bind", "port", "address"] by(|raw| raw.endpoint(None), quoted) admin_listen,
        "Address of the admin API, metrics and health checks. Addresses that other machines can reach need a token here; otherwise a token is created in \
         the state directory for requests that change something.";
    "host-names" Restart ["allowed-hosts", "server-name"] texts admin_host_names,
        "Names by which browsers and tools address the admin port, in addition to localhost and IP addresses, which are always allowed. Requests \
         for other names are refused, so that no web page can reach it through its own domain name.";
    "token" Reload ["password", "secret"] secret(Inline) admin_token = "\"...\"",
        "The bearer token required by the admin port, in clear text. Prefer one of the next two keys, which keep it out of this file.";
    "token-file" Reload [] secret(File) admin_token = "\"/run/secrets/token\"",
        "File with the bearer token required by the admin port.";
    "token-env" Reload [] secret(Env) admin_token = "\"SWITCHYARD_SECRET\"",
        "Environment variable with the bearer token required by the admin port.";
    "tls" Restart ["https"] switch admin_tls,
        "Serve the admin port over HTTPS, with the certificate of [tls].";
    "tls-client-ca-file" Reload [] file admin_client_ca = "\"/etc/switchyard/admin-ca.pem\"",
        "Authorities that sign the certificates of the admin port's clients: PEM. Without it, no client certificate is required.";

    [Log]
    "level" Reload ["loglevel", "verbosity"] by(|raw| LogLevel::parse(raw.text()?), |level| quoted(&level.0)) log_level,
        "error, warn, info, debug or trace; or levels by module, such as \"info,switchyard_router=debug\".";
    "format" Restart ["logformat"] word([(LogFormat::Text, "text"), (LogFormat::Json, "json")]) log_format,
        "text for display, json for machines; both go to stderr.";
    "slowlog-log-slower-than" Reload ["slowlog-slower-than"] optional(|raw| raw.time(Duration::ZERO..=HOUR), |least| time(*least)) runtime.slowlog_slower_than,
        "Minimum duration of a command to be entered into the slow log (SLOWLOG GET). 0s: all.";
    "slowlog-max-len" Reload [] count(0..=1_000_000) runtime.slowlog_max_len,
        "Entries of the slow log; 0 disables it.";
    "slowlog-arguments" Reload [] switch runtime.slowlog_arguments,
        "Whether the slow log has the arguments of commands (at most 32, of 128 bytes each), or only their names.";
}

keys! {
    /// Keys of a `[[listener]]` table.
    LISTENER: ListenerConfig;

    [Listener]
    "address" Restart ["listen", "bind"] optional(Raw::listen_place, quoted) place = "\"unix:/run/switchyard/socket\"",
        "Address to listen on: HOST:PORT, tls://HOST:PORT or unix:/path.";
    "tls" Restart [] optional(Raw::switch, |on| Some(on.to_string())) tls = "true",
        "Speak TLS, with the certificate of [tls].";
    "mode" Restart ["unixsocketperm"] optional(|raw| parse_mode(raw.text()?), |mode| quoted(format!("{mode:o}"))) mode = "\"660\"",
        "Permissions of a Unix socket, in octal and in quotes. Default: only the user that Switchyard runs as.";
    "connections" Restart [] optional_count(1..=10_000_000) bounds.connections = "1000",
        "Maximum number of open connections.";
    "connections-per-second" Restart [] optional_count(1..=10_000_000) connections_per_second = "1000",
        "New connections per second; further connections are closed at once.";
    "requests-per-second" Restart [] optional_count(1..=100_000_000) bounds.requests_per_second = "1000",
        "Commands per second of all clients of this listener; further commands get an error.";
    "bytes-in-flight" Restart [] optional(|raw| Ok(raw.size(KB..=64 * GB)? as u64), |most| size(*most as usize)) bounds.bytes_in_flight = "\"256mb\"",
        "Bytes of commands not yet answered and of replies not yet read, of all its clients together.";
    "reads" Restart [] optional(read_reads, |reads| quoted(reads.name())) reads = "\"prefer-replica\"",
        "Servers for reads of this listener's clients, if different from clients.reads.";
}

keys! {
    /// Keys of a `[[limit]]` table.
    LIMIT: LimitConfig;

    [Limit]
    "prefix" Reload ["pattern"] by(|raw| Ok(raw.text()?.to_owned()), quoted) prefix = "\"tenant-a:\"",
        "Prefix of the keys, in bytes; without it, all keys.";
    "requests-per-second" Reload [] optional_count(1..=100_000_000) requests_per_second = "1000",
        "Commands per second on all these keys together; further commands get an error that begins with LIMITED.";
    "key-requests-per-second" Reload [] optional_count(1..=u64::from(KEY_RATE_MAX)) key_requests_per_second = "1000",
        "Commands per second on each of these keys.";
}

keys! {
    /// Keys of a `[[placement.rule]]` table.
    RULE: RuleConfig;

    [Rule]
    "preset" Reload ["library"] optional(read_preset, |preset| quoted(preset.name)) preset = "\"bullmq\"",
        "The rules for a library: bullmq, bull, sidekiq, horizon, celery, rq or arq. Instead of keys.";
    "keys" Reload ["pattern", "patterns", "prefix"] texts keys = "[\"bull:{queue}:*\"]",
        "Patterns of key names: literal text, at most one capture in braces, and * only at the end. {x} ends at the first occurrence of the \
         character after it, {x...} at the last one. Keys with the same captured text share a slot.";
    "tag" Reload ["hash-tag"] optional(|raw| Ok(raw.text()?.to_owned()), quoted) tag = "\"sidekiq\"",
        "One tag for all keys of these patterns, which then have no capture: all of them share a slot.";
}

keys! {
    /// Keys of a `[[node]]` table.
    NODE: NodeConfig;

    [Node]
    "address" Reload ["server", "host", "addr", "url", "listen", "name"] optional(|raw| raw.endpoint(Some(NODE_PORT)), quoted) address = "\"127.0.0.1:7001\"",
        "Address of the node. Its text is also the node's name: in errors, in metrics and in the slot map.";
    "username" Reload ["user", "masteruser"] text username = "\"switchyard\"",
        "ACL user to authenticate as; without one, the default user.";
    "tls" Reload [] optional(Raw::switch, |on| Some(on.to_string())) tls = "true",
        "Whether to use TLS for this node. Default: the setting in [nodes].";
    "tls-server-name" Reload [] text tls_server_name = "\"redis-a.internal\"",
        "Name that the certificates of this node's servers must have, instead of their own host names or IP addresses.";
    "password" Reload ["auth", "requirepass", "masterauth"] secret(Inline) password = "\"...\"",
        "The password of this node, in clear text. Prefer one of the next two keys, which keep it out of this file.";
    "password-file" Reload [] secret(File) password = "\"/run/secrets/password\"",
        "File with the password of this node.";
    "password-env" Reload [] secret(Env) password = "\"SWITCHYARD_SECRET\"",
        "Environment variable with the password of this node.";
    "replicas" Reload ["slaves", "replica"] endpoints(Some(NODE_PORT)) replicas = "[\"127.0.0.1:7101\"]",
        "Replicas of this node. A promoted replica is followed; reads from replicas go to these.";
    "sentinel-master" Reload ["master-name", "sentinel-primary", "master"] optional(read_master, quoted) sentinel_master = "\"mymaster\"",
        "In place of an address: the name under which Sentinels know this node. It is also the node's name.";
    "sentinels" Reload ["sentinel"] endpoints(Some(SENTINEL_PORT)) sentinels = "[\"127.0.0.1:26379\"]",
        "Sentinels that know the primary of this node; together with sentinel-master.";
    "capacity" Reload ["max-requests"] optional_count(1..=100_000_000) capacity = "50000",
        "Requests per second that this node answers in time. The planner keeps its load below this; without a capacity it evens the load.";
    "weight" Reload ["slots"] optional_count(0..=10_000) weight = "2",
        "Share of the slots that `switchyard balance` gives this node, relative to the other nodes (default 1; 0: none).";
}
