//! Detects clients that use a node directly, and so would not notice that a key has moved.

use std::collections::BTreeSet;
use std::fmt;
use std::thread;
use std::time::Duration;

use switchyard_resp::command::{CommandTable, Flags, Handling};

/// Prefix of the names of routers' connections, before the identifier of the state directory.
const ROUTER: &str = "switchyard-";

/// Name of short-lived connections that check a node.
pub const PROBE_NAME: &str = "switchyard-doctor";

/// Names of our other read-only connections.
const OWN_READERS: [&str; 2] = [PROBE_NAME, "switchyard-standby"];

/// Last commands of monitoring programs and of `redis-cli` before its first command, with all subcommands. A client may
/// have used keys a moment ago, but a monitoring program repeats these commands, so only these do not forbid a removal.
const MONITORING: [&str; 11] = [
    "info",
    "config",
    "slowlog",
    "latency",
    "memory",
    "role",
    "command",
    "client|list",
    "client|info",
    "client|id",
    "client|getname",
];

/// Further last commands that do not forbid a move: health checks, replica handshakes, and administration.
const HARMLESS_FOR_MOVES: [&str; 23] = [
    "",
    "null",
    "ping",
    "echo",
    "time",
    "client",
    "acl",
    "dbsize",
    "lastsave",
    "save",
    "bgsave",
    "bgrewriteaof",
    "debug",
    "function",
    "module",
    "cluster",
    "replicaof",
    "slaveof",
    "failover",
    "replconf",
    "psync",
    "sync",
    "quit",
];

/// Prefix of the names of Sentinel's connections.
const SENTINEL: &str = "sentinel-";

/// Repetitions of CLIENT LIST while a client may be in its handshake, or about to disconnect.
const REPETITIONS: usize = 3;

/// Pause before each repetition. A handshake takes a few round trips.
const PAUSE: Duration = Duration::from_millis(50);

/// An action that other clients of the node forbid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// A move of keys. Clients that do not use keys are ignored.
    Move,
    /// The removal of keys that seem unused, or the stop of a server. Every client forbids it, unless all signs
    /// indicate monitoring.
    Removal,
}

/// A client of a node that does not belong to this router.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectClient {
    /// Remote address.
    pub address: String,
    /// Connection name.
    pub name: String,
    /// User name.
    pub user: String,
    /// Last command.
    pub command: String,
    /// Whether that command may write.
    pub writes: bool,
}

impl fmt::Display for DirectClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.address)?;
        if !self.name.is_empty() {
            write!(f, ", named {}", self.name)?;
        }
        if !self.user.is_empty() && self.user != "default" {
            write!(f, ", user {}", self.user)?;
        }
        write!(f, ", last command {}", self.command)
    }
}

/// Returns the clients in a reply to CLIENT LIST that forbid an action. Excludes replicas and routers; [`routers`]
/// finds the latter.
pub fn direct_clients(list: &str, action: Action) -> Vec<DirectClient> {
    let table = CommandTable::builtin();
    list.lines().filter_map(|line| direct_client(&table, line, action)).map(|(client, _)| client).collect()
}

/// Repeats CLIENT LIST until no client seems to be in its handshake or about to disconnect, within a few repetitions.
/// This router's own connections have no name yet during their handshake.
///
/// # Errors
/// Errors of `list`, which requests the reply.
pub(crate) fn settled_list<E>(action: Action, mut list: impl FnMut() -> Result<String, E>) -> Result<String, E> {
    let table = CommandTable::builtin();
    let mut found = list()?;
    for _ in 0..REPETITIONS {
        let mut clients = found
            .lines()
            .filter_map(|line| direct_client(&table, line, action))
            .map(|(_, uses_keys)| uses_keys)
            .peekable();
        if clients.peek().is_none() || clients.any(|uses_keys| uses_keys) {
            break;
        }
        thread::sleep(PAUSE);
        found = list()?;
    }
    Ok(found)
}

/// Returns the client of a line of CLIENT LIST if it forbids an action, and whether its last command uses keys.
fn direct_client(table: &CommandTable, line: &str, action: Action) -> Option<(DirectClient, bool)> {
    let field =
        |name: &str| line.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('=')).unwrap_or_default();
    // Replicas, the primary, and MONITOR.
    let other_role = field("flags").contains(['S', 'M', 'O']);
    let name = field("name");
    if line.trim().is_empty() || site_of(name).is_some() || OWN_READERS.contains(&name) || other_role {
        return None;
    }
    let command = field("cmd").to_ascii_lowercase();
    // An unknown command belongs to a module and may write.
    let known = table.by_name(&command);
    let uses_keys = match known {
        Some(known) => matches!(known.handling, Handling::Keyed | Handling::Split(_)) || known.flags.has(Flags::WRITE),
        None => !command.is_empty() && command != "null",
    };
    let is_in = |list: &[&str]| {
        list.iter().any(|name| command.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('|')))
    };
    // In a transaction, blocked, subscribed or tracking keys: here the last command does not reveal the use.
    let is_engaged = field("flags").contains(['x', 'b', 'P', 't', 'd']);
    let is_onlooker = match action {
        _ if name.starts_with(SENTINEL) => !uses_keys,
        _ if is_engaged => false,
        Action::Removal => is_in(&MONITORING),
        Action::Move => is_in(&MONITORING) || is_in(&HARMLESS_FOR_MOVES),
    };
    let client = || DirectClient {
        address: field("addr").to_owned(),
        name: name.to_owned(),
        user: field("user").to_owned(),
        writes: known.is_none_or(|known| !known.flags.has(Flags::READONLY)),
        command: command.clone(),
    };
    (!is_onlooker).then(|| (client(), uses_keys))
}

/// Routers in a reply to CLIENT LIST, identified by their state directories.
pub fn routers(list: &str) -> BTreeSet<String> {
    let names = list.lines().filter_map(|line| line.split(' ').find_map(|word| word.strip_prefix("name=")));
    names.filter_map(site_of).map(str::to_owned).collect()
}

/// Identifier of the state directory in a router's connection name.
fn site_of(name: &str) -> Option<&str> {
    let mut parts = name.strip_prefix(ROUTER)?.split('-');
    let site = parts.next()?;
    // The run and the owner of the connection follow.
    (site.len() == 8 && site.bytes().all(|byte| byte.is_ascii_hexdigit()) && parts.count() >= 3).then_some(site)
}

/// Major and minor version of Redis from INFO, or the compatible one.
pub fn redis_version(info: &str) -> Option<(u32, u32)> {
    let text = info.lines().find_map(|line| line.trim().strip_prefix("redis_version:"))?;
    let mut parts = text.split('.').map(|part| part.parse().ok());
    Some((parts.next()??, parts.next()??))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_clients_that_use_keys_count() {
        let list = "id=3 addr=10.0.0.1:5 laddr=10.0.0.9:6379 name= flags=N cmd=set user=default resp=2\n\
            id=4 addr=10.0.0.1:6 name=switchyard-0a1b2c3d-1f-62-0 flags=N cmd=set user=default\n\
            id=5 addr=10.0.0.2:6 name= flags=S cmd=replconf user=default\n\
            id=6 addr=10.0.0.3:6 name=prometheus flags=N cmd=info user=default\n\
            id=7 addr=10.0.0.3:7 name=worker flags=N cmd=get user=app\n\
            id=8 addr=10.0.0.3:8 name= flags=N cmd=NULL user=default\n\
            id=9 addr=10.0.0.3:9 name= flags=N cmd=client|list user=default\n\
            id=10 addr=10.0.0.4:1 name= flags=b cmd=blpop user=default\n\
            id=11 addr=10.0.0.4:2 name= flags=N cmd=xgroup|create user=default\n\
            id=12 addr=10.0.0.4:3 name= flags=N cmd=json.set user=default\n\
            id=13 addr=10.0.0.4:4 name=switchyard-doctor flags=N cmd=get user=default\n\
            id=14 addr=10.0.0.4:5 name=switchyard-shop flags=N cmd=hset user=default\n\n";
        let found: Vec<(String, bool)> =
            direct_clients(list, Action::Move).into_iter().map(|c| (c.command, c.writes)).collect();
        let expected = [
            ("set", true),
            ("get", false),
            ("blpop", true),
            ("xgroup|create", true),
            ("json.set", true),
            ("hset", true),
        ];
        assert_eq!(found, expected.map(|(command, writes)| (command.to_owned(), writes)));
        assert_eq!(
            direct_clients(list, Action::Move)[1].to_string(),
            "10.0.0.3:7, named worker, user app, last command get"
        );
    }

    #[test]
    fn a_client_with_any_sign_of_use_forbids_a_removal() {
        let forbids = |command: &str, flags: &str, name: &str, action: Action| {
            !direct_clients(
                &format!("id=3 addr=10.0.0.1:5 name={name} flags={flags} cmd={command} user=default\n"),
                action,
            )
            .is_empty()
        };
        for command in [
            "exec",
            "multi",
            "watch",
            "select",
            "auth",
            "hello",
            "subscribe",
            "eval",
            "scan",
            "publish",
            "reset",
            "script|load",
        ] {
            assert!(forbids(command, "N", "", Action::Removal) && forbids(command, "N", "", Action::Move), "{command}");
        }
        for command in [
            "ping",
            "NULL",
            "quit",
            "dbsize",
            "client|setinfo",
            "client|setname",
            "client|tracking",
            "client",
            "replconf",
        ] {
            assert!(
                forbids(command, "N", "", Action::Removal) && !forbids(command, "N", "", Action::Move),
                "{command}"
            );
        }
        for command in [
            "info",
            "config|get",
            "slowlog|get",
            "latency|histogram",
            "memory|stats",
            "role",
            "command|docs",
            "client|list",
        ] {
            assert!(
                !forbids(command, "N", "", Action::Removal) && !forbids(command, "N", "", Action::Move),
                "{command}"
            );
            assert!(forbids(command, "x", "", Action::Removal), "{command} in a transaction");
        }
        for command in ["ping", "publish", "info", "subscribe"] {
            assert!(!forbids(command, "P", "sentinel-0a1b2c3d-cmd", Action::Removal), "{command} of Sentinel");
        }
        assert!(forbids("get", "N", "sentinel-0a1b2c3d-cmd", Action::Removal));
    }

    #[test]
    fn handshakes_are_awaited_and_uses_are_not() {
        let line = |command: &str| format!("id=3 addr=10.0.0.1:5 name= flags=N cmd={command} user=default\n");
        let settled = |commands: &[&str]| {
            let mut left = commands.iter();
            let list = settled_list(Action::Removal, || left.next().map(|command| line(command)).ok_or(()));
            (list, left.len())
        };
        assert_eq!(settled(&["auth", "ping", "info", "get"]), (Ok(line("info")), 1));
        assert_eq!(settled(&["get", "info"]), (Ok(line("get")), 1), "a short use is a use");
        assert_eq!(settled(&["ping"; 9]), (Ok(line("ping")), 9 - 1 - REPETITIONS));
        assert_eq!(settled(&["auth"]), (Err(()), 0));
    }

    #[test]
    fn routers_are_detected_by_connection_names() {
        let list = "id=4 addr=10.0.0.1:6 name=switchyard-0a1b2c3d-1f-62-0 flags=N cmd=set\n\
            id=5 addr=10.0.0.1:7 name=switchyard-0a1b2c3d-1f-62-mover flags=N cmd=get\n\
            id=6 addr=10.0.0.1:8 name=switchyard-doctor flags=N cmd=client\nid=7 addr=10.0.0.1:9 name=switchyard-deadbeef flags=N\n";
        assert_eq!(routers(list).into_iter().collect::<Vec<_>>(), ["0a1b2c3d"]);
    }

    #[test]
    fn versions_are_read() {
        assert_eq!(redis_version("# Server\r\nredis_version:7.2.4\r\nserver_name:valkey\r\n"), Some((7, 2)));
        assert_eq!(redis_version("redis_mode:standalone\r\n"), None);
    }
}
