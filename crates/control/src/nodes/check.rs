//! Checks of a node before keys move to or from it: other users, version, supported commands, and durability.

use std::time::{Duration, Instant};

use switchyard_policy::migration::Durability;
use switchyard_resp::units::counted;
use switchyard_router::{NodeAccess, foreign_connections};

use super::{Action, Answer, NodeConnection, PROBE_NAME, direct_clients, redis_version, routers, settled_list};

/// Minimum timeout for a reply.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(5);

/// Oldest version that supports moves.
pub(crate) const REDIS_MIN: (u32, u32) = (6, 2);

/// Test key, present at the node for at most one transaction.
const TEST_KEY: &str = "switchyard:temporary:tried";

/// Larger than any connection id.
const UNKNOWN_CLIENT_ID: &str = "9223372036854775807";

/// Error text for a refused command, with a remedy.
fn refusal_text(command: &str, error: &str) -> String {
    let is_for_want_of_a_right = error.starts_with("NOPERM") || error.to_ascii_lowercase().contains("unknown command");
    let advice = if is_for_want_of_a_right { ": let Switchyard's user run it there, under this name" } else { "" };
    format!("refuses {command}, which moves need ({error}){advice}")
}

/// Executes each command that moves need once. Returns `Err` for the first one that the node refuses.
fn check_commands(node: &mut NodeConnection, is_target: bool) -> Result<(), String> {
    // The name prevents a concurrent move check from counting this connection as a client. Not essential, so an error
    // is ignored.
    let _ = node.call(&["CLIENT", "SETNAME", PROBE_NAME]);
    // Without CLIENT KILL, the effects of a broken connection remain unknown, and the move would wait.
    let killed =
        node.call(&["CLIENT", "KILL", "ID", UNKNOWN_CLIENT_ID]).map_err(|error| format!("does not answer: {error}"))?;
    if let Some(error) = killed.error().filter(|error| !error.starts_with("ERR No such")) {
        return Err(refusal_text("CLIENT KILL", &error));
    }
    let key = TEST_KEY.as_bytes();
    if !is_target {
        // A source may be full, so nothing is stored there, and no transaction is used: a full node refuses that.
        for args in [&[&b"DUMP"[..], key][..], &[b"UNLINK", key], &[b"TIME"], &[b"SCAN", b"0", b"COUNT", b"1"]] {
            let answer = node.call(args).map_err(|error| format!("does not answer: {error}"))?;
            if let Some(error) = answer.error() {
                return Err(refusal_text(&String::from_utf8_lossy(args[0]), &error));
            }
        }
        return Ok(());
    }
    let mut do_all = |commands: &[&[&[u8]]]| -> Result<Vec<Answer>, String> {
        let mut ask = |args: &[&[u8]]| node.call(args).map_err(|error| format!("does not answer: {error}"));
        let refused = |args: &[&[u8]], error: String| refusal_text(&String::from_utf8_lossy(args[0]), &error);
        let mut first = None;
        for args in std::iter::once(&[&b"MULTI"[..]][..]).chain(commands.iter().copied()) {
            first = first.or(ask(args)?.error().map(|error| refused(args, error)));
        }
        let answers = ask(&[b"EXEC"])?;
        first = first.or(answers.error().map(|error| refused(&[b"EXEC"], error)));
        let answers = answers.items();
        let failed = commands.iter().zip(&answers).find_map(|(args, answer)| Some(refused(args, answer.error()?)));
        first.or(failed).map_or(Ok(answers), Err)
    };
    let kept = do_all(&[&[b"SET", key, b"1", b"PX", b"10000"], &[b"DUMP", key], &[b"UNLINK", key]])?;
    let dump = kept.get(1).map(|dump| dump.bytes().to_vec()).unwrap_or_default();
    do_all(&[&[b"RESTORE", key, b"10000", &dump], &[b"UNLINK", key], &[b"TIME"], &[b"SCAN", b"0", b"COUNT", b"1"]])?;
    Ok(())
}

/// Time for connections of an earlier run to disappear: workers end them when they connect to a node.
const GONE: Duration = Duration::from_secs(3);

/// Identifies this router in the names of connections.
#[derive(Clone, Debug, Default)]
pub(crate) struct RouterIdentity {
    pub(crate) site: String,
    pub(crate) run: String,
}

/// Checks a node, and returns its `run_id`. `timeout`: timeout per reply. `durability`: the guarantee that a target
/// must support.
pub(crate) fn check_node(
    access: &NodeAccess,
    timeout: Duration,
    durability: Option<Durability>,
    allow_direct_clients: bool,
    own: &RouterIdentity,
) -> Result<String, String> {
    let name = &access.name;
    let mut node = NodeConnection::open(access, timeout).map_err(|why| format!("node {name} {why}"))?;
    let mut ask = |args: &[&str]| node.call(args).map_err(|error| format!("node {name} does not answer: {error}"));
    let info = ask(&["INFO", "server"])?.text();
    let version = redis_version(&info);
    if version.is_some_and(|version| version < REDIS_MIN) {
        return Err(format!("node {name} is too old for moves: they need Redis 6.2 or later, or Valkey"));
    }
    // In cluster mode even a node with all slots refuses commands on keys of several slots, and a move handles many
    // keys at once.
    if ask(&["INFO", "cluster"])?.text().lines().any(|line| line.trim() == "cluster_enabled:1") {
        return Err(format!(
            "node {name} runs in cluster mode, where commands on keys of several slots are refused: set cluster-enabled no there"
        ));
    }
    check_commands(&mut node, durability.is_some()).map_err(|why| format!("node {name} {why}"))?;
    let mut ask = |args: &[&str]| node.call(args).map_err(|error| format!("node {name} does not answer: {error}"));
    let newer = version.is_some_and(|version| version >= (7, 2));
    match durability {
        Some(Durability::Aof) => {
            let setting = |answer: Answer| answer.items().get(1).map(|value| value.text()).unwrap_or_default();
            let on = setting(ask(&["CONFIG", "GET", "appendonly"])?);
            let always = setting(ask(&["CONFIG", "GET", "appendfsync"])?) == "always";
            if on == "no" {
                return Err(format!(
                    "node {name} has no append-only file, so it does not support durability aof: set appendonly yes, or choose memory"
                ));
            }
            if !newer && !always {
                return Err(format!(
                    "node {name} cannot report when its append-only file is on disk (WAITAOF needs Redis 7.2); set appendfsync always there, or choose \
                     durability memory"
                ));
            }
        }
        Some(Durability::Replica) => {
            let info = ask(&["INFO", "replication"])?.text();
            let connected = info
                .lines()
                .find_map(|line| line.trim().strip_prefix("connected_slaves:"))
                .and_then(|n| n.parse::<u32>().ok());
            if connected == Some(0) {
                return Err(format!("node {name} has no replica, so it does not support durability replica"));
            }
        }
        Some(Durability::Memory) | None => {}
    }
    let run_id = info.lines().find_map(|line| line.strip_prefix("run_id:")).unwrap_or_default().trim().to_owned();
    let until = Instant::now() + GONE;
    let list = loop {
        let list = ask(&["CLIENT", "LIST"])?;
        if let Some(error) = list.error() {
            if allow_direct_clients {
                return Ok(run_id);
            }
            return Err(format!(
                "node {name} does not list its clients ({error}), so it is not known whether a client writes to it past this router; allow CLIENT \
                 LIST to Switchyard's user there, or use --allow-direct-clients"
            ));
        }
        let list = list.text();
        if foreign_connections(&list, &own.site, &own.run).is_empty() {
            break list;
        }
        // Two routers with separate copies of one slot map: each would miss the keys that the other moves. No flag
        // permits that.
        if Instant::now() >= until {
            return Err(format!(
                "node {name} is used by another router with the same state directory, or a copy of it: it would not find keys that move. Stop it first. Start a router \
                 that should take over by itself with --standby (docs/high-availability.md)"
            ));
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    if allow_direct_clients {
        return Ok(run_id);
    }
    if routers(&list).iter().any(|site| *site != own.site) {
        return Err(format!(
            "node {name} is used by another router, with a state directory of its own: it would not find keys that move. Stop it first, or use \
             --allow-direct-clients"
        ));
    }
    let list = settled_list(Action::Move, || ask(&["CLIENT", "LIST"]).map(|list| list.text()))?;
    match direct_clients(&list, Action::Move).as_slice() {
        [] => Ok(run_id),
        [first, rest @ ..] => Err(format!(
            "node {name} is used past this router by {} (one is {first}): they would read and write keys that are elsewhere. Let them use the router, \
             or block them (docs/moving-data.md), or use --allow-direct-clients",
            counted(rest.len() + 1, "client")
        )),
    }
}
