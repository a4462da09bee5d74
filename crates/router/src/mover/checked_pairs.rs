//! Connections that ended moves leave to the next move between the same nodes.
//!
//! A move for a waiting client has few keys, and two connections with their checks take longer than these keys. So such
//! a move leaves both connections to the next one, together with the results of its checks. Only as a pair: the checks
//! compare two server processes, and a connection stays with one process. After [`VALID`] the pair is closed, so that
//! later moves read changed settings of the nodes. A thread per pair of nodes would save the thread's start, too, but
//! each move would share its state with earlier ones.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use switchyard_policy::migration::{Durability, Side};
use switchyard_policy::topology::NodeId;

use super::MoveEnd;
use super::connection::{Connection, check_role};
use super::run::Mover;
use super::side::SideConnection;
use crate::lock::lock;
use crate::ownership::Admission;

/// Validity of the checks of a pair.
const VALID: Duration = Duration::from_secs(2);

/// Maximum number of unused pairs.
const PAIRS_MAX: usize = 16;

/// Unused pairs of connections.
#[derive(Debug, Default)]
pub(crate) struct CheckedPairs(Mutex<Vec<CheckedPair>>);

/// Idle connections to two nodes that meet the requirements of a move.
#[derive(Debug)]
struct CheckedPair {
    checks: NodeChecks,
    durability: Durability,
    source: SideConnection,
    target: SideConnection,
}

/// Checks of both nodes of a move, with its current connections.
#[derive(Clone, Debug)]
pub(super) struct NodeChecks {
    at: Instant,
    /// An earlier move made the checks.
    pub(super) is_earlier: bool,
    /// Number of changes of the known scripts when the target had all of them.
    pub(super) scripts: Option<u64>,
}

impl CheckedPairs {
    fn take(&self, source: NodeId, target: NodeId, durability: Durability) -> Option<CheckedPair> {
        let mut pairs = lock(&self.0);
        pairs.retain(CheckedPair::is_valid);
        let fits =
            |pair: &CheckedPair| (pair.source.node, pair.target.node, pair.durability) == (source, target, durability);
        let place = pairs.iter().position(fits)?;
        Some(pairs.swap_remove(place))
    }

    fn add(&self, pair: CheckedPair) {
        let mut pairs = lock(&self.0);
        if pairs.len() < PAIRS_MAX && pair.is_valid() {
            pairs.push(pair);
        }
    }

    /// Closes the connections of pairs that are no longer valid.
    pub(crate) fn close_expired(&self) {
        lock(&self.0).retain(CheckedPair::is_valid);
    }
}

impl CheckedPair {
    fn is_valid(&self) -> bool {
        self.checks.at.elapsed() < VALID
    }

    /// Whether both servers are primaries now: a server that becomes a replica keeps its connections.
    fn are_primaries(&mut self, timeout: Duration) -> bool {
        let mut connections: Vec<_> = [&mut self.source, &mut self.target]
            .into_iter()
            .filter_map(|end| end.connection.as_mut())
            .filter_map(|connection| connection.send(&[b"ROLE"]).is_ok().then_some(connection))
            .collect();
        let roles = connections.iter_mut().map(|connection| connection.receive_reply(timeout));
        roles.filter(|role| role.as_ref().is_ok_and(|role| check_role(role).is_ok())).count() == 2
    }
}

impl NodeChecks {
    /// Checks that have just succeeded.
    pub(super) fn now() -> Self {
        Self { at: Instant::now(), is_earlier: false, scripts: None }
    }
}

impl Mover {
    /// Uses the connections of an earlier move, if this move may.
    pub(super) fn take_checked_pair(&mut self) {
        let order = self.life.order();
        if order.needed_keys().is_none() || self.is_resumed {
            return;
        }
        let pair = self.shared.checked_pairs.take(order.source, order.target, order.how.durability);
        let Some(mut pair) = pair else { return };
        let timeout = self.timeout();
        if ![&mut pair.source, &mut pair.target].into_iter().all(|end| self.can_use(end))
            || !pair.are_primaries(timeout)
        {
            return;
        }
        self.checks = Some(NodeChecks { is_earlier: true, ..pair.checks });
        (self.source, self.target) = (pair.source, pair.target);
        if let Some(connection) = &self.source.connection {
            self.late_keys.note_source_process(&connection.process.run_id);
        }
    }

    /// Whether a new connection would lead to the same process without a wait.
    fn can_use(&self, end: &mut SideConnection) -> bool {
        let (node, routing) = (end.node, self.shared.routing());
        let Some(connection) = end.connection.as_mut() else { return false };
        let run_id = &connection.process.run_id;
        let seat = self.shared.ownership.as_ref();
        routing.address_of(node, None) == Some(connection.address)
            && routing.live.nodes.get(&node) == Some(&connection.access)
            && self.check_serving_process(node, run_id).is_ok()
            && self.shared.fences.broken(node).is_empty()
            && self.shared.fences.is_cleared(node, run_id)
            && seat.is_none_or(|seat| seat.admission(node, run_id) == Admission::Admitted)
            && connection.is_open()
    }

    /// Leaves the connections to the next move between these nodes, if this move has ended well.
    pub(super) fn leave_checked_pair(&mut self, end: &MoveEnd) {
        let order = self.life.order();
        let (Some(checks), Some(_), MoveEnd::Done) = (&self.checks, order.needed_keys(), end) else { return };
        let (checks, durability) = (checks.clone(), order.how.durability);
        if ![Side::Source, Side::Target].into_iter().all(|side| self.end(side).is_unused()) {
            return;
        }
        let new = |node| SideConnection::new(node, self.shared.fences.clone());
        let (no_source, no_target) = (new(self.source.node), new(self.target.node));
        self.shared.checked_pairs.add(CheckedPair {
            checks,
            durability,
            source: std::mem::replace(&mut self.source, no_source),
            target: std::mem::replace(&mut self.target, no_target),
        });
    }
}

impl Connection {
    /// Whether the node has neither closed this idle connection nor sent anything.
    fn is_open(&mut self) -> bool {
        let mut replies = Vec::new();
        // The replies to its last selections may have been ignored.
        self.forget_database();
        self.unanswered == 0 && self.exchange(&mut replies).is_ok() && replies.is_empty()
    }
}
