//! Connections of all workers to nodes, from the handshake until none of their commands can be executed any more.
//!
//! Shared rather than owned by a worker: after a panic, the worker's successor must fence the old connections. Broken
//! connections stay listed, because their commands may still be executed.

use std::sync::{Arc, Mutex};

use switchyard_policy::topology::NodeId;

use crate::lock::lock;

/// Maximum number of broken connections remembered per node. Connections to processes that have ended are never
/// settled.
const LEFT_MAX: usize = 4096;

/// A connection of a worker to a process of a node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Connection {
    pub(crate) worker: usize,
    pub(crate) node: NodeId,
    pub(crate) client_id: u64,
    pub(crate) run_id: Option<Arc<str>>,
}

#[derive(Debug)]
struct ConnectionEntry {
    connection: Connection,
    /// Closed, but the server process may still execute received commands.
    is_broken: bool,
}

/// All known connections.
#[derive(Debug, Default)]
pub(crate) struct Connections(Mutex<Vec<ConnectionEntry>>);

impl Connections {
    /// Adds a connection after its handshake.
    pub(crate) fn add(&self, connection: Connection) {
        lock(&self.0).push(ConnectionEntry { connection, is_broken: false });
    }

    /// Marks a connection that was closed with commands in flight.
    pub(crate) fn mark_broken(&self, connection: &Connection) {
        let mut all = lock(&self.0);
        let is_here = |known: &ConnectionEntry| known.is_broken && known.connection.node == connection.node;
        if all.iter().filter(|known| is_here(known)).count() >= LEFT_MAX
            && let Some(oldest) = all.iter().position(is_here)
        {
            all.remove(oldest);
        }
        all.iter_mut().filter(|known| known.connection == *connection).for_each(|known| known.is_broken = true);
    }

    /// Removes a connection whose commands can no longer be executed.
    pub(crate) fn remove(&self, connection: &Connection) {
        lock(&self.0).retain(|known| known.connection != *connection);
    }

    /// Marks all connections of a dead worker as broken. Returns them and the earlier broken connections of this
    /// worker.
    pub(crate) fn take_over_worker(&self, worker: usize) -> Vec<Connection> {
        let mut all = lock(&self.0);
        let of_worker = all.iter_mut().filter(|known| known.connection.worker == worker);
        of_worker.map(|known| (known.is_broken = true, known.connection.clone()).1).collect()
    }

    /// Returns the client ids of broken connections to a process.
    pub(crate) fn broken_at(&self, node: NodeId, run_id: &str) -> Vec<u64> {
        let all = lock(&self.0);
        all.iter()
            .filter(|known| known.is_broken && known.is_at(node, run_id))
            .map(|known| known.connection.client_id)
            .collect()
    }

    /// Removes broken connections that the process has closed.
    pub(crate) fn remove_killed(&self, node: NodeId, run_id: &str, client_ids: &[u64]) {
        lock(&self.0).retain(|known| {
            !(known.is_broken && known.is_at(node, run_id) && client_ids.contains(&known.connection.client_id))
        });
    }

    /// Drops broken connections to removed nodes.
    pub(crate) fn retain_nodes(&self, is_known: impl Fn(NodeId) -> bool) {
        lock(&self.0).retain(|known| !known.is_broken || is_known(known.connection.node));
    }
}

impl ConnectionEntry {
    fn is_at(&self, node: NodeId, run_id: &str) -> bool {
        self.connection.node == node && self.connection.run_id.as_deref() == Some(run_id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(worker: usize, client_id: u64, run_id: &str) -> Connection {
        Connection { worker, node: NodeId(1), client_id, run_id: Some(run_id.into()) }
    }

    #[test]
    fn leftovers_of_a_dead_worker_are_known_to_all() {
        let all = Connections::default();
        let (broken, open, others) = (at(0, 7, "a"), at(0, 8, "a"), at(1, 9, "a"));
        [&broken, &open, &others].into_iter().for_each(|connection| all.add(connection.clone()));
        all.mark_broken(&broken);
        assert_eq!(all.take_over_worker(0), [broken.clone(), open.clone()]);
        assert_eq!(all.take_over_worker(0), [broken.clone(), open], "its successor may die, too");
        all.remove(&broken);
        assert_eq!((all.take_over_worker(0).len(), all.broken_at(NodeId(1), "a")), (1, vec![8]));
    }

    #[test]
    fn leftovers_at_a_process_are_known_when_it_returns() {
        let all = Connections::default();
        [at(0, 7, "a"), at(0, 7, "b"), at(1, 9, "a")].into_iter().for_each(|connection| all.add(connection));
        all.mark_broken(&at(0, 7, "a"));
        // Another process may assign the same client id.
        all.remove(&at(0, 7, "b"));
        assert_eq!((all.broken_at(NodeId(1), "a"), all.broken_at(NodeId(1), "b")), (vec![7], vec![]));
        all.remove_killed(NodeId(1), "a", &[7]);
        assert_eq!(all.broken_at(NodeId(1), "a"), [0; 0]);
    }

    #[test]
    fn leftovers_of_ended_processes_are_bounded() {
        let all = Connections::default();
        for client_id in 0..LEFT_MAX as u64 + 10 {
            all.add(at(0, client_id, "a"));
            all.mark_broken(&at(0, client_id, "a"));
        }
        assert_eq!(all.take_over_worker(0).len(), LEFT_MAX);
        all.retain_nodes(|node| node != NodeId(1));
        assert_eq!(all.take_over_worker(0), []);
    }
}
