//! Broken connections to nodes: errors for clients, and zombies.
//!
//! Separate from `tick`, which finds silent connections, and from the path of answered commands.

use switchyard_policy::topology::NodeId;
use tracing::info;

use super::kind::Checkout;
use super::{Event, Origin, Upstreams};
use crate::lane::Lane;
use crate::slab::Handle;
use crate::worker::keyed::FinishedRequest;
use crate::worker::turn::Turn;

/// Part of an error for a command that the node may still execute.
pub(in crate::worker) const PERHAPS: &str = "; the command may have been executed";

impl Upstreams {
    /// Fails all pending requests of this link with an error. The node may still execute the first `in_flight` ones
    /// (see [`crate::worker::zombies`]).
    pub(super) fn fail_all(&mut self, turn: &Turn, handle: Handle, error: &str, in_flight: usize) {
        let Some(link) = self.get_mut(handle) else { return };
        let is_repeatable =
            turn.routing().topology.is_of_cluster() && matches!(link.lane, Lane::Main | Lane::Slow | Lane::Replica);
        let requests = if is_repeatable { link.requests.of_clients() } else { Vec::new() };
        let ended: Vec<FinishedRequest> = link.lose(in_flight).collect();
        link.requests.restart(turn.routing().live.database);
        link.incoming.restart();
        link.handshake.abort();
        for request in &ended {
            link.counters().classes[usize::from(request.class())].errors.add(1);
        }
        let origin = Origin { link: handle, node: link.node, lane: Some(link.lane), is_up: false };
        let waiters = std::mem::take(&mut link.waiters);
        if !ended.is_empty() {
            self.emit(Event::Failed { origin, ended, in_flight, text: Some(error.to_owned()), requests });
        }
        for client in waiters {
            self.emit(Event::Room { client });
        }
    }

    /// Closes a lost or silent connection.
    pub(in crate::worker) fn break_link(&mut self, turn: &Turn, handle: Handle, why: &str) {
        let Some(link) = self.get_mut(handle) else { return };
        if !link.is_up() {
            self.attempt_failed(turn, handle, why);
            return;
        }
        link.downgraded = false;
        link.is_distrusted = false;
        link.goes_down();
        let in_flight = link.may_be_executed();
        let (node, lane) = (link.node, link.lane);
        // The connection of a removed node does not count as a failure.
        let known = turn.routing().topology.node(node).is_some();
        link.counters().failures.add(u64::from(known));
        self.leave_behind(turn, handle);
        let Some(link) = self.get_mut(handle) else { return };
        link.socket.close_with_notice(turn);
        link.life.breaks(turn.now_us());
        if lane == Lane::Main {
            self.begin_outage(turn, node);
        }
        let name = turn.node_name(node);
        let log = self.links.log(node).filter(|_| known);
        if let Some(suppressed) = log.and_then(|log| log.lost.allow(turn.now_us())) {
            info!(node = %name, reason = why, in_flight, suppressed = suppressed.count(), "lost a connection to node");
        }
        self.fail_all(turn, handle, &format!("NODELOST connection to {name} was lost: {why}"), in_flight);
        self.zombies.forget_killer(handle);
        if lane == Lane::Main && known {
            // Since then a module may have been loaded, or the server replaced.
            turn.shared().with_facts(node, |f| f.commands = crate::shared::Commands::Unknown);
            self.connect(turn, handle);
        } else {
            self.drop_link(turn, handle);
        }
        // Zombies need a newer connection; the main one is only newer if it is replaced.
        self.ensure_killer(turn, node);
        if lane == Lane::Pubsub {
            self.emit(Event::PubsubLost { node });
        }
        if lane.is_exclusive() {
            self.pool(turn, node, lane).wake();
        }
    }

    /// Records, before a connection is closed, that the node may still execute its commands.
    fn leave_behind(&mut self, turn: &Turn, handle: Handle) {
        let Some(link) = self.get(handle).filter(|link| link.is_up() && link.lane != Lane::Replica) else {
            return;
        };
        let (node, connection) = (link.node, link.connection(turn.index()));
        let Some(low) = link.requests.oldest_epoch().filter(|_| link.may_be_executed() > 0) else {
            return turn.shared().connections.remove(&connection);
        };
        turn.shared().connections.mark_broken(&connection);
        let epoch = turn.routing().topology.epoch();
        let epoch = epoch - u64::from((epoch as u32).wrapping_sub(low));
        let armed = link.head().map_or(0, |head| head.cacheable);
        self.zombies.add(connection, epoch, armed);
        self.zombies.publish_count(turn, node);
    }

    /// Ensures that every zombie is being killed. The main connection may be older than the zombie: the node has
    /// completed both handshakes, so it knows the zombie as a client, and an answered KILL has ended it.
    fn ensure_killer(&mut self, turn: &Turn, node: NodeId) {
        let Some(main) = self.links.main(node) else { return };
        let Some(run_id) = self.links.up(main).map(|link| link.run_id().map(str::to_owned)) else { return };
        if self.zombies.lacks_killer(node) {
            self.kill_zombies(turn, node, main, run_id.as_deref());
        }
    }

    /// Removes a link without pending replies from the tables. Its unconfirmed commands remain recorded.
    pub(super) fn drop_link(&mut self, turn: &Turn, handle: Handle) {
        self.leave_behind(turn, handle);
        let Some(mut link) = self.links.remove(handle) else { return };
        let ended: Vec<FinishedRequest> = link.lose(link.may_be_executed()).collect();
        if !ended.is_empty() {
            let origin = Origin { link: handle, node: link.node, lane: Some(link.lane), is_up: false };
            self.emit(Event::Failed { origin, ended, in_flight: 0, text: None, requests: Vec::new() });
        }
        if link.lane == Lane::Fills {
            self.emit(Event::FillsLost { node: link.node });
        }
        if link.socket.close(turn) && link.is_up() {
            link.goes_down();
        }
        link.is_forgotten();
        if link.lane.is_exclusive() {
            self.pools.remove(turn, handle, &link);
        }
        if let Some(unblock) = link.checkout().and_then(Checkout::unblock) {
            unblock.answer(&turn.shared().mailboxes, 0);
        }
        self.ensure_killer(turn, link.node);
    }

    /// Closes all waiting connections to a node whose main connection has timed out.
    pub(in crate::worker) fn break_waiting(&mut self, turn: &Turn, node: NodeId, why: &str) {
        let waiting: Vec<Handle> = self
            .links
            .iter()
            .filter(|(_, l)| l.lane == Lane::Blocking && l.node == node && l.is_up() && !l.is_idle())
            .map(|(h, _)| h)
            .collect();
        for link in waiting {
            self.break_link(turn, link, why);
        }
    }
}
