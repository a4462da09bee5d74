//! Queries everything that the checks need from a node.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use switchyard_control::nodes::{Action, Answer, NodeConnection, Server, direct_clients, functions, routers};

use super::NodeFacts;

/// Timeout of a query.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// Commands that the router or its clients need, called with arguments that change nothing.
const TRIED: &[(&str, &[&str])] = &[
    ("CLIENT ID", &["CLIENT", "ID"]),
    ("CLIENT KILL", &["CLIENT", "KILL", "ID", "9007199254740991"]),
    ("CLIENT SETNAME", &["CLIENT", "SETNAME", "switchyard-doctor"]),
    ("INFO", &["INFO", "server"]),
    ("SELECT", &["SELECT", "0"]),
    ("COMMAND", &["COMMAND", "COUNT"]),
    ("SCAN", &["SCAN", "0", "COUNT", "1"]),
    ("DBSIZE", &["DBSIZE"]),
    ("GET", &["GET", "switchyard:doctor"]),
    ("DUMP", &["DUMP", "switchyard:doctor"]),
    ("RESTORE", &["RESTORE", "switchyard:doctor", "0", "x"]),
    ("UNLINK", &["UNLINK", "switchyard:doctor"]),
    ("MEMORY USAGE", &["MEMORY", "USAGE", "switchyard:doctor"]),
    ("SCRIPT LOAD", &["SCRIPT", "EXISTS", "0000000000000000000000000000000000000000"]),
    // An error reply, so that this call is not counted as a call of the application (`application::stats`).
    ("EVAL", &["EVAL", "return 1", "-1"]),
    ("FUNCTION LIST", &["FUNCTION", "LIST"]),
    ("FUNCTION DUMP", &["FUNCTION", "STATS"]),
    ("PUBLISH", &["PUBSUB", "NUMPAT"]),
    ("CLIENT TRACKING", &["CLIENT", "TRACKING", "OFF"]),
    ("PTTL", &["PTTL", "switchyard:doctor"]),
    ("TOUCH", &["TOUCH", "switchyard:doctor"]),
    ("ACL USERS", &["ACL", "USERS"]),
    ("ACL GETUSER", &["ACL", "GETUSER", "switchyard-doctor"]),
    // No server has this rule, so no user is created.
    ("ACL SETUSER", &["ACL", "SETUSER", "switchyard-doctor", "no-such-rule"]),
];

/// Commands that are sometimes renamed.
const NAMES: &str = "ACL CLIENT COMMAND CONFIG DBSIZE DEL DUMP EVAL EVALSHA FLUSHALL FLUSHDB GET INFO KEYS MULTI RESTORE SCAN SCRIPT SELECT SET \
     SUBSCRIBE UNLINK";

/// Settings used by the checks.
const SETTINGS: &str = "appendonly databases maxclients maxmemory maxmemory-policy notify-keyspace-events proto-max-bulk-len protected-mode save timeout \
     tracking-table-max-keys";

fn pairs(text: &str) -> BTreeMap<String, String> {
    text.lines().filter_map(|l| l.trim().split_once(':')).map(|(k, v)| (k.to_owned(), v.to_owned())).collect()
}

fn now_ms() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| i64::try_from(t.as_millis()).unwrap_or(i64::MAX))
}

/// Queries one server.
pub(crate) fn look(server: &Server) -> NodeFacts {
    let access = &server.access;
    let mut seen = NodeFacts {
        name: access.name.clone(),
        loopback: access.address.is_some_and(|a| a.ip().is_loopback()),
        authenticates: access.password.is_some(),
        replica_of: server.replica_of,
        ..NodeFacts::default()
    };
    let mut connection = match NodeConnection::open(access, REPLY_TIMEOUT) {
        Ok(connection) => connection,
        Err(failure) => {
            seen.failure = Some(failure);
            return seen;
        }
    };
    if let Err(error) = query_all(&mut connection, &mut seen) {
        seen.failure = Some(format!("stopped answering: {error}"));
    }
    seen
}

fn query_all(connection: &mut NodeConnection, seen: &mut NodeFacts) -> std::io::Result<()> {
    let asked = now_ms();
    let time = connection.call(&["TIME"])?;
    let answered = now_ms();
    if let [seconds, micros] = time.items().as_slice()
        && let (Ok(seconds), Ok(micros)) = (seconds.text().parse::<i64>(), micros.text().parse::<i64>())
    {
        seen.clock = Some((seconds * 1000 + micros / 1000 - (asked + answered) / 2, answered - asked));
    }
    let info = connection.call(&["INFO"])?;
    if info.error().is_none() {
        seen.info = pairs(&info.text());
    }
    for name in SETTINGS.split(' ') {
        let answer = connection.call(&["CONFIG", "GET", name])?;
        match (answer.error(), answer.items().as_slice()) {
            (Some(error), _) => seen.config_error = Some(error),
            (None, [name, value]) => drop(seen.config.insert(name.text(), value.text())),
            _ => {}
        }
    }
    let names: Vec<&str> = ["COMMAND", "INFO"].into_iter().chain(NAMES.split(' ')).collect();
    let known = connection.call(&names)?;
    if known.error().is_none() {
        seen.missing = NAMES
            .split(' ')
            .zip(known.items())
            .filter(|(_, row)| row.is_null())
            .map(|(name, _)| name.to_owned())
            .collect();
    }
    for (name, args) in TRIED {
        if let Some(error) = connection.call(args)?.error().filter(|e| e.starts_with("NOPERM")) {
            seen.refused.push(((*name).to_owned(), error));
        }
    }
    seen.functions = functions(connection);
    let modules = connection.call(&["MODULE", "LIST"])?;
    for module in modules.items() {
        let fields = module.items();
        let name = fields.iter().position(|f| f.text() == "name").and_then(|at| fields.get(at + 1));
        seen.modules.extend(name.map(Answer::text));
    }
    seen.modules.sort();
    let clients = connection.call(&["CLIENT", "LIST"])?;
    if clients.error().is_none() {
        seen.direct = direct_clients(&clients.text(), Action::Move);
        seen.routers = routers(&clients.text());
    }
    Ok(())
}
