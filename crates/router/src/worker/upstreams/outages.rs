//! Nodes that a worker has lost, with the times of their losses.

use switchyard_policy::topology::NodeId;

use super::{Event, Upstreams};
use crate::shared::RoutingSnapshot;
use crate::worker::turn::Turn;

/// Nodes that are lost, as long as commands wait for them.
#[derive(Debug, Default)]
pub(in crate::worker) struct Outages {
    /// Each node with the time of its loss, in microseconds of the worker's clock.
    lost: Vec<(NodeId, u64)>,
}

impl Outages {
    /// Whether commands wait for a node.
    #[inline]
    pub(in crate::worker) fn has(&self, node: NodeId) -> bool {
        self.lost.iter().any(|(lost, _)| *lost == node)
    }

    /// Whether commands wait for any node.
    #[inline]
    pub(in crate::worker) fn any(&self) -> bool {
        !self.lost.is_empty()
    }

    /// Records a loss. A node that is lost already keeps the time of its first loss.
    fn begin(&mut self, node: NodeId, now_us: u64) {
        if !self.has(node) {
            self.lost.push((node, now_us));
        }
    }

    /// Ends the outages that `is_over` names by node and time of the loss. Returns whether there were any.
    fn end(&mut self, is_over: impl Fn(NodeId, u64) -> bool) -> bool {
        let before = self.lost.len();
        self.lost.retain(|(node, since_us)| !is_over(*node, *since_us));
        self.lost.len() < before
    }
}

/// Time that commands wait after a loss, in microseconds.
pub(in crate::worker) fn wait_us(routing: &RoutingSnapshot) -> u64 {
    routing.live.wait_for_return(routing.topology.nodes().len()).as_micros() as u64
}

impl Upstreams {
    /// Records that a main connection to a node has ended. With a second main connection that is up, the node is not
    /// lost.
    pub(super) fn begin_outage(&mut self, turn: &Turn, node: NodeId) {
        let routing = turn.routing();
        if self.links.is_up(node) || routing.topology.node(node).is_none() || wait_us(routing) == 0 {
            return;
        }
        self.outages.begin(node, turn.now_us());
    }

    /// A main connection to a node is up: its commands are dispatched.
    pub(super) fn end_outage(&mut self, node: NodeId) {
        if self.outages.end(|lost, _| lost == node) {
            self.emit(Event::OutageOver);
        }
    }

    /// Ends the outages whose time has passed.
    pub(in crate::worker) fn tick_outages(&mut self, turn: &Turn) {
        if !self.outages().any() {
            return;
        }
        let (now_us, wait_us) = (turn.now_us(), wait_us(turn.routing()));
        if self.outages.end(|_, since_us| now_us.saturating_sub(since_us) >= wait_us) {
            self.emit(Event::OutageOver);
        }
    }

    /// Dispatches waiting commands by a new snapshot: their keys may have a new owner, and `nodes.wait-max` may have
    /// changed.
    pub(in crate::worker) fn adopt_outages(&mut self, turn: &Turn) {
        if !self.outages().any() {
            return;
        }
        let routing = turn.routing();
        let (now_us, wait_us) = (turn.now_us(), wait_us(routing));
        self.outages
            .end(|node, since_us| routing.topology.node(node).is_none() || now_us.saturating_sub(since_us) >= wait_us);
        self.emit(Event::OutageOver);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::settings::RuntimeSettings;

    #[test]
    fn the_time_of_the_wait_depends_on_the_number_of_nodes_unless_it_is_set() {
        let (unset, off) = (
            RuntimeSettings::default(),
            RuntimeSettings { wait_max: Some(Duration::ZERO), ..RuntimeSettings::default() },
        );
        let seconds = |live: &RuntimeSettings| [1, 2, 9].map(|nodes| live.wait_for_return(nodes).as_secs());
        assert_eq!((seconds(&unset), seconds(&off)), ([5, 2, 2], [0, 0, 0]));
    }

    #[test]
    fn an_outage_counts_from_the_first_loss_of_its_node() {
        let mut outages = Outages::default();
        outages.begin(NodeId(1), 100);
        outages.begin(NodeId(2), 150);
        outages.begin(NodeId(1), 200);
        let is_over = |_: NodeId, since_us: u64| since_us + 50 <= 150;
        assert!(outages.end(is_over) && !outages.has(NodeId(1)) && outages.has(NodeId(2)));
        assert!(!outages.end(is_over) && outages.any());
        assert!(outages.end(|node, _| node == NodeId(2)) && !outages.any());
    }
}
