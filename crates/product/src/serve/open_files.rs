//! Limit on open files: each client and each connection to a node needs a file, and the usual limit is only 1024.
//!
//! Like Redis, raises the limit as required by `max-clients`. If the system refuses, lowers `max-clients` and logs
//! that. Otherwise `accept` would fail later, with clients waiting.

use switchyard_router::{RuntimeSettings, open_files};

/// Files besides clients and connections to nodes: logs, state, admin port and its clients, plus a reserve.
const OWN_FILES: u64 = 64;
/// Per worker: epoll instance, eventfd, and a reserve.
const FILES_PER_WORKER: u64 = 8;
/// Connections of a worker to a node, without those for large values: the pipelined one, the slow lane, and one being
/// replaced.
const CONNECTIONS_PER_NODE: u64 = 3;

/// Number of files needed without clients.
fn reserve(live: &RuntimeSettings, nodes: usize, workers: usize, listeners: usize) -> u64 {
    let large = nodes as u64 * live.large_connections_max as u64;
    OWN_FILES + large + workers as u64 * (FILES_PER_WORKER + listeners as u64 + nodes as u64 * CONNECTIONS_PER_NODE)
}

/// Number of dedicated connections for blocking commands and WATCH. Not part of the reserve: each belongs to one
/// client, and a client without a free file gets an error.
fn exclusive(live: &RuntimeSettings, nodes: usize) -> u64 {
    let each = live.watch_connections_max.saturating_add(live.blocking_connections_max);
    (each.saturating_mul(nodes)).min(live.max_clients) as u64
}

/// Raises the limit for `live.max_clients`, or lowers `live.max_clients` to the limit. Returns a log message if it was
/// lowered.
pub(super) fn make_room(
    live: &mut RuntimeSettings,
    nodes: usize,
    workers: usize,
    listeners: usize,
) -> Result<Option<String>, String> {
    let reserve = reserve(live, nodes, workers, listeners);
    let wanted = reserve + live.max_clients as u64 + exclusive(live, nodes);
    let limit = open_files::raise(wanted);
    live.files_reserved = reserve;
    let Some(allowed) = clients_allowed(limit, reserve, live.max_clients) else {
        return Err(format!(
            "the limit of open files is {limit}, and {reserve} are needed for {nodes} nodes and {workers} workers alone; \
             raise it with `ulimit -n` (LimitNOFILE= in systemd)"
        ));
    };
    if allowed == live.max_clients {
        return Ok(None);
    }
    let sentence = format!(
        "max-clients lowered from {} to {allowed}: the limit of open files is {limit} and the system refused to raise it to \
         {wanted}; raise it with `ulimit -n` (LimitNOFILE= in systemd)",
        live.max_clients
    );
    live.max_clients = allowed;
    Ok(Some(sentence))
}

/// Number of clients that fit, at most `wanted`. `None` if there is no room for any.
fn clients_allowed(limit: u64, reserve: u64, wanted: usize) -> Option<usize> {
    let room = usize::try_from(limit.saturating_sub(reserve)).unwrap_or(usize::MAX);
    (room > 0).then(|| room.min(wanted))
}

#[cfg(test)]
mod tests {
    use rustix::process::{Resource, getrlimit};

    use super::*;

    #[test]
    fn clients_get_the_remaining_files() {
        assert_eq!(clients_allowed(1024, 100, 10_000), Some(924));
        assert_eq!(clients_allowed(20_000, 100, 10_000), Some(10_000));
        assert_eq!(clients_allowed(100, 100, 10_000), None);
        assert_eq!(clients_allowed(u64::MAX, 100, 10_000), Some(10_000));
    }

    #[test]
    fn more_nodes_and_workers_need_more_files() {
        let live = RuntimeSettings::default();
        let few = reserve(&live, 2, 1, 1);
        assert!(few >= OWN_FILES + 2 * (CONNECTIONS_PER_NODE + 16));
        assert!(reserve(&live, 3, 1, 1) > few && reserve(&live, 2, 2, 1) > few && reserve(&live, 2, 1, 2) > few);
    }

    #[test]
    fn the_limit_is_raised_for_one_more_client() {
        let before = getrlimit(Resource::Nofile);
        let mut live = RuntimeSettings { max_clients: 100, ..RuntimeSettings::default() };
        assert_eq!(make_room(&mut live, 1, 1, 1), Ok(None));
        assert_eq!(live.max_clients, 100);
        let after = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        assert!(after >= before.current.unwrap_or(u64::MAX), "never lowered");
    }
}
