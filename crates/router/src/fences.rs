//! Connections to nodes with an unconfirmed end: their commands may still be executed.
//!
//! Closing a socket does not cancel bytes in flight. Broken connections of movers are recorded here per node, across
//! legs, moves and aborts, until the node confirms their end on a newer connection. Connections of earlier router
//! processes are found by their name, and killed at the first contact with a node, before any other command. (Workers
//! fence their own connections: `worker::zombies`.)
//!
//! If the pending commands store functions, clients cannot change functions until the end is confirmed, and no
//! functions are copied from or to this node.

use std::collections::BTreeMap;
use std::sync::Mutex;

use switchyard_policy::migration::Process;
use switchyard_policy::topology::NodeId;

use crate::function_turns::{CopyTurn, Doubt};
use crate::lock::lock;

/// Unconfirmed connections by node.
#[derive(Debug, Default)]
pub(crate) struct Fences(Mutex<BTreeMap<NodeId, Fence>>);

#[derive(Debug, Default)]
struct Fence {
    /// Broken connections, with the doubt if they were storing functions.
    broken: Vec<(Process, Option<Doubt>)>,
    /// `run_id` of the process that has no connections of an earlier router.
    cleared: Option<String>,
    /// `run_id` of the process that refuses the query.
    refused: Option<String>,
}

impl Fences {
    /// Records a connection that broke, or was dropped with commands in flight.
    pub(crate) fn add_broken(&self, node: NodeId, process: Process) {
        let mut fences = lock(&self.0);
        let broken = &mut fences.entry(node).or_default().broken;
        if broken.iter().all(|(known, _)| *known != process) {
            broken.push((process, None));
        }
    }

    /// Records a connection that broke while storing functions. Blocks changes of functions until its end is confirmed.
    pub(crate) fn add_broken_with_functions(&self, node: NodeId, process: Process, turn: CopyTurn) {
        let mut fences = lock(&self.0);
        let broken = &mut fences.entry(node).or_default().broken;
        broken.retain(|(known, _)| *known != process);
        broken.push((process, Some(turn.leave_doubt())));
    }

    /// Returns broken connections that were storing functions.
    pub(crate) fn with_functions(&self) -> Vec<(NodeId, Process)> {
        let fences = lock(&self.0);
        let of = |(node, fence): (&NodeId, &Fence)| {
            let with_doubt = fence.broken.iter().filter(|(_, doubt)| doubt.is_some());
            with_doubt.map(|(process, _)| (*node, process.clone())).collect::<Vec<_>>()
        };
        fences.iter().flat_map(of).collect()
    }

    /// Returns the connections of a node with an unconfirmed end.
    pub(crate) fn broken(&self, node: NodeId) -> Vec<Process> {
        let fences = lock(&self.0);
        fences.get(&node).into_iter().flat_map(|fence| &fence.broken).map(|(process, _)| process.clone()).collect()
    }

    /// Removes connections after the node has confirmed their end or was replaced by another process.
    pub(crate) fn remove_broken(&self, node: NodeId, ended: &[Process]) {
        if let Some(fence) = lock(&self.0).get_mut(&node) {
            fence.broken.retain(|(process, _)| !ended.contains(process));
        }
    }

    /// Whether this process has no connections of an earlier router.
    pub(crate) fn is_cleared(&self, node: NodeId, run_id: &str) -> bool {
        lock(&self.0).get(&node).is_some_and(|fence| fence.cleared.as_deref() == Some(run_id))
    }

    /// Whether the process has neither been cleared nor refused the query.
    pub(crate) fn is_query_useful(&self, node: NodeId, run_id: &str) -> bool {
        let knows = |of: &Option<String>| of.as_deref() == Some(run_id);
        !lock(&self.0).get(&node).is_some_and(|fence| knows(&fence.cleared) || knows(&fence.refused))
    }

    /// Records that the process refuses the query. Code that requires [`Self::is_cleared`] cannot proceed there.
    pub(crate) fn note_refused(&self, node: NodeId, run_id: &str) {
        lock(&self.0).entry(node).or_default().refused = Some(run_id.to_owned());
    }

    /// Records that no connections of an earlier router are left.
    pub(crate) fn set_cleared(&self, node: NodeId, run_id: &str) {
        lock(&self.0).entry(node).or_default().cleared = Some(run_id.to_owned());
    }
}

/// Returns the client ids in a CLIENT LIST reply that belong to earlier processes of this router: same site, other
/// incarnation.
pub fn foreign_connections(list: &str, site: &str, incarnation: &str) -> Vec<u64> {
    let field = |line: &str, name: &str| {
        line.split(' ').find_map(|field| field.strip_prefix(name)).unwrap_or_default().to_owned()
    };
    let of_site = format!("switchyard-{site}-");
    let own = format!("{of_site}{incarnation}-");
    let is_left = |line: &&str| {
        let name = field(line, "name=");
        name.starts_with(&of_site) && !name.starts_with(&own)
    };
    list.lines().filter(is_left).filter_map(|line| field(line, "id=").parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::function_turns::FunctionTurns;

    #[test]
    fn broken_connections_are_listed_until_their_end_is_confirmed() {
        let fences = Fences::default();
        let process = |run_id: &str, client_id| Process { run_id: run_id.to_owned(), client_id };
        let (node, other) = (NodeId(0), NodeId(1));
        for (at, number) in [(node, 1), (node, 1), (node, 2), (other, 1)] {
            fences.add_broken(at, process("a", number));
        }
        assert_eq!(fences.broken(node), [process("a", 1), process("a", 2)]);
        let known = fences.broken(node);
        // A connection breaks while others are being confirmed.
        fences.add_broken(node, process("a", 3));
        fences.remove_broken(node, &known);
        assert_eq!((fences.broken(node), fences.broken(other)), (vec![process("a", 3)], vec![process("a", 1)]));
        assert!(!fences.is_cleared(node, "a") && fences.is_query_useful(node, "a"));
        fences.note_refused(node, "a");
        assert!(
            !fences.is_cleared(node, "a") && !fences.is_query_useful(node, "a") && fences.is_query_useful(node, "b")
        );
        fences.set_cleared(node, "a");
        assert!(fences.is_cleared(node, "a") && !fences.is_cleared(node, "b") && !fences.is_cleared(other, "a"));
    }

    #[test]
    fn function_changes_wait_for_connections_that_store_functions() {
        let (fences, turns) = (Fences::default(), FunctionTurns::default());
        let process = |client_id| Process { run_id: "a".to_owned(), client_id };
        let node = NodeId(0);
        fences.add_broken(node, process(1));
        fences.add_broken(node, process(2));
        fences.add_broken_with_functions(node, process(2), turns.begin_copy().expect("free"));
        fences.add_broken(node, process(2));
        assert_eq!((fences.broken(node).len(), fences.with_functions()), (2, vec![(node, process(2))]));
        fences.remove_broken(node, &[process(1)]);
        assert!(turns.begin_change().is_none() && turns.begin_copy().is_some());
        fences.remove_broken(node, &[process(2)]);
        assert!(turns.begin_change().is_some() && fences.with_functions().is_empty());
    }

    #[test]
    fn only_connections_of_other_runs_are_killed() {
        let list = "id=3 addr=10.0.0.1:5 name=switchyard-5ite-1f-a0-0 db=0\n\
             id=4 addr=10.0.0.1:6 name=switchyard-5ite-2f-b0-mover-7 db=0\n\
             id=5 addr=10.0.0.1:7 name=switchyard-0the-1f-a0-0 db=0\n\
             id=6 addr=10.0.0.1:8 name=application db=0\n\
             id=7 addr=10.0.0.1:9 name= db=0\n";
        assert_eq!(foreign_connections(list, "5ite", "2f-b0"), [3]);
        assert_eq!(foreign_connections(list, "5ite", "2f-b"), [3, 4], "a name that only begins alike is another run");
    }
}
