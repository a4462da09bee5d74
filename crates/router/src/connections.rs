//! The connections of all workers to nodes, each from when it was greeted until nothing that it carried can be executed
//! any more.
//!
//! Not with the worker that has them: one that panics forgets all it knows, and its successor has to see to what it had
//! sent. Nor only while they are open: a connection that broke is the more to be remembered.

use std::sync::{Arc, Mutex};

use switchyard_policy::topology::NodeId;

use crate::shared::lock;

/// Connections that were left behind at one node, as far as they are remembered. Those of processes that have ended are
/// never settled.
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
struct Known {
    connection: Connection,
    /// It is closed, and the process may still execute what it has received on it.
    is_left: bool,
}

/// All that there are.
#[derive(Debug, Default)]
pub(crate) struct Connections(Mutex<Vec<Known>>);

impl Connections {
    /// A node has greeted one.
    pub(crate) fn began(&self, connection: Connection) {
        lock(&self.0).push(Known { connection, is_left: false });
    }

    /// One was closed with commands under way.
    pub(crate) fn left(&self, connection: &Connection) {
        let mut all = lock(&self.0);
        let is_here = |known: &Known| known.is_left && known.connection.node == connection.node;
        if all.iter().filter(|known| is_here(known)).count() >= LEFT_MAX
            && let Some(oldest) = all.iter().position(is_here)
        {
            all.remove(oldest);
        }
        all.iter_mut().filter(|known| known.connection == *connection).for_each(|known| known.is_left = true);
    }

    /// Nothing that was sent on this one can be executed any more.
    pub(crate) fn ended(&self, connection: &Connection) {
        lock(&self.0).retain(|known| known.connection != *connection);
    }

    /// A worker has died: all that it had is left behind, with what it and others before it had left.
    pub(crate) fn left_by(&self, worker: usize) -> Vec<Connection> {
        let mut all = lock(&self.0);
        let of_worker = all.iter_mut().filter(|known| known.connection.worker == worker);
        of_worker.map(|known| (known.is_left = true, known.connection.clone()).1).collect()
    }

    /// The client ids of those that were left at a process.
    pub(crate) fn left_at(&self, node: NodeId, run_id: &str) -> Vec<u64> {
        let all = lock(&self.0);
        all.iter()
            .filter(|known| known.is_left && known.is_at(node, run_id))
            .map(|known| known.connection.client_id)
            .collect()
    }

    /// The process has ended those that were left at it.
    pub(crate) fn settled_at(&self, node: NodeId, run_id: &str, client_ids: &[u64]) {
        lock(&self.0).retain(|known| {
            !(known.is_left && known.is_at(node, run_id) && client_ids.contains(&known.connection.client_id))
        });
    }

    /// Nothing reaches anybody from nodes that there are no more.
    pub(crate) fn forget_foreign(&self, is_known: impl Fn(NodeId) -> bool) {
        lock(&self.0).retain(|known| !known.is_left || is_known(known.connection.node));
    }
}

impl Known {
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
        [&broken, &open, &others].into_iter().for_each(|connection| all.began(connection.clone()));
        all.left(&broken);
        assert_eq!(all.left_by(0), [broken.clone(), open.clone()]);
        assert_eq!(all.left_by(0), [broken.clone(), open], "its successor may die, too");
        all.ended(&broken);
        assert_eq!((all.left_by(0).len(), all.left_at(NodeId(1), "a")), (1, vec![8]));
    }

    #[test]
    fn leftovers_at_a_process_are_known_when_it_returns() {
        let all = Connections::default();
        [at(0, 7, "a"), at(0, 7, "b"), at(1, 9, "a")].into_iter().for_each(|connection| all.began(connection));
        all.left(&at(0, 7, "a"));
        // Another process may give the same number.
        all.ended(&at(0, 7, "b"));
        assert_eq!((all.left_at(NodeId(1), "a"), all.left_at(NodeId(1), "b")), (vec![7], vec![]));
        all.settled_at(NodeId(1), "a", &[7]);
        assert_eq!(all.left_at(NodeId(1), "a"), [0; 0]);
    }

    #[test]
    fn leftovers_at_processes_that_are_gone_are_bounded() {
        let all = Connections::default();
        for client_id in 0..LEFT_MAX as u64 + 10 {
            all.began(at(0, client_id, "a"));
            all.left(&at(0, client_id, "a"));
        }
        assert_eq!(all.left_by(0).len(), LEFT_MAX);
        all.forget_foreign(|node| node != NodeId(1));
        assert_eq!(all.left_by(0), []);
    }
}
