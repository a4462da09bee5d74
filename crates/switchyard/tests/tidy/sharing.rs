//! State shared by workers, and a check that a forwarded command uses none of it.
//!
//! A contended atomic read-modify-write or lock costs nothing on two processors, but dominates on sixteen, so no
//! benchmark on a small machine shows it. This module lists every such operation reachable from a worker, with its
//! frequency. The check finds unlisted operations, including clones of an `Arc` that all workers share.

use crate::Files;
use crate::code::only_code;

/// Operations of a worker on memory that other threads write. Method names stand for the locks inside.
const SHARES: &[&str] = &[
    "lock(",
    "try_lock(",
    ".fetch_",
    "compare_exchange",
    ".swap(",
    "with_facts(",
    "shared().wait_queues",
    "shared().routing(",
    "user.clone(",
    "users.clone(",
    "live.clone(",
    "topology.clone(",
];

/// Files on the path of clients' commands. They may contain only listed operations.
const PLACES: &[&str] = &[
    "crates/router/src/worker/",
    "crates/router/src/users/",
    "crates/router/src/hot_copies/state.rs",
    "crates/router/src/limits.rs",
    "crates/router/src/metrics.rs",
];

/// Path below `crates/router/src`, number of operations, and when they occur.
const LISTED: &[(&str, usize, &str)] = &[
    (
        "hot_copies/state.rs",
        16,
        "1 add to a gate: when a write of a cacheable key begins and ends, and all workers read the gate for their hits. \
         2 on the published set: a worker adopts a set, the coordinator publishes one. 2 on removed keys: the \
         coordinator. 2 on requested keys: a key that is read often, or any key without a copy with the setting \
         that makes all keys cacheable; a stop. 1 on noticed keys: a key is frequent among a worker's last commands. \
         2 on nodes without copies: a connection for fills begins, an operator's report. 4 on the gates: a node's \
         process is replaced, an operator evicts or suspends. 2 more: an operator's report",
    ),
    (
        "limits.rs",
        8,
        "a slice of a rate or of bytes is used up, a client comes or goes: at most SLICES_PERCENT of the counted operations",
    ),
    ("metrics.rs", 1, "a worker meets a node for the first time"),
    ("users/change.rs", 1, "ACL SETUSER"),
    ("users/queue.rs", 3, "ACL SETUSER"),
    ("users/login.rs", 7, "AUTH and HELLO, by a client that logs in"),
    ("worker/accept.rs", 6, "a client connects"),
    ("worker/acl.rs", 3, "ACL LOG, ACL SETUSER"),
    ("worker/blocking.rs", 1, "a command that waits for a key begins"),
    ("worker/upstreams/breaking.rs", 1, "a connection breaks"),
    ("worker/client_commands.rs", 1, "CLIENT TRACKING"),
    ("worker/cluster.rs", 1, "CLUSTER"),
    ("worker/cross_slot.rs", 3, "a command of several steps on keys of different nodes"),
    ("worker/dispatch.rs", 1, "a command that the table does not know"),
    ("worker/gather.rs", 1, "the first use of a database"),
    ("worker/upstreams/handshake.rs", 10, "a connection to a node is opened"),
    ("worker/info.rs", 4, "INFO; the version that HELLO shows"),
    ("worker/info/command.rs", 1, "INFO"),
    ("worker/local.rs", 3, "HELLO, AUTH, CONFIG RESETSTAT"),
    ("worker/login.rs", 5, "a client logs in, users have changed, or a command is refused by the rules of its user"),
    ("worker/memory.rs", 1, "there is more than memory-max"),
    ("worker/mod.rs", 1, "a client is cut as the router stops"),
    ("worker/monitor.rs", 3, "MONITOR begins or ends"),
    ("worker/upstreams/connect.rs", 2, "there is no connection to the node, or another process has replaced its own"),
    ("worker/outage.rs", 1, "SCAN while a node is lost"),
    ("worker/downstreams/output.rs", 1, "a client goes"),
    ("worker/pause.rs", 3, "CLIENT PAUSE"),
    ("worker/reissued.rs", 8, "a command that waits for a key of a move"),
    ("worker/upstreams/renew.rs", 1, "at every tick"),
    ("worker/scan.rs", 7, "SCAN"),
    ("worker/scripts.rs", 7, "a script that this worker has not met, SCRIPT, and one that a node lacks"),
    ("worker/slowlog.rs", 5, "SLOWLOG, and at a tick after slow commands: a bounded number per second"),
    ("worker/turn.rs", 2, "there is no connection to the node"),
    ("worker/transactions.rs", 1, "EXEC after EVALSHA: SCRIPT FLUSH at another worker counts"),
    ("worker/transactions/rehearsal.rs", 1, "EXEC with EVALSHA of a script that must be rehearsed"),
];

/// Reports every use of shared state that is not listed.
pub(crate) fn workers_share_nothing_per_command(files: &Files) -> Vec<String> {
    let mut complaints = Vec::new();
    for (path, text) in files.rust().filter(|(path, _)| PLACES.iter().any(|place| path.starts_with(place))) {
        let code = only_code(text);
        let code = code.split("#[cfg(test)]").next().unwrap_or_default();
        let found: Vec<String> = code
            .lines()
            .enumerate()
            .flat_map(|(number, line)| uses(line).map(move |use_| format!("{}: {use_}", number + 1)))
            .collect();
        let below = path.strip_prefix("crates/router/src/").unwrap_or(path);
        let listed = LISTED.iter().find(|(of, ..)| *of == below).map_or(0, |(_, count, _)| *count);
        if found.len() != listed {
            complaints.push(format!(
                "{path} has {} uses of what workers share, and {listed} are listed: {found:?}. A forwarded command must need none of them: keep a part for \
                 each worker, or list it in tidy/sharing.rs with when it happens",
                found.len()
            ));
        }
    }
    complaints
}

fn uses(line: &str) -> impl Iterator<Item = &'static str> {
    let is_used = |what: &str| {
        let part_of_name = |before: &str| before.ends_with(|c: char| c.is_alphanumeric() || c == '_');
        line.match_indices(what).any(|(at, _)| what.starts_with('.') || !part_of_name(&line[..at]))
    };
    SHARES.iter().copied().filter(move |what| is_used(what)).collect::<Vec<_>>().into_iter()
}
