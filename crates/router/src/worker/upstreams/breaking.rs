//! Broken and silent connections to nodes: errors for clients, and zombies.
//!
//! Separate from `nodes`, because this code is off the path of answered commands.

use std::time::Duration;

use switchyard_policy::topology::NodeId;
use switchyard_resp::command::CommandClass;
use tracing::{info, warn};

use super::kind::{Checkout, Lane};
use super::link::{Pending, Phase, Purpose};
use super::{Event, Origin, Upstreams};
use crate::busy::Busy;
use crate::slab::Handle;
use crate::worker::keyed::FinishedRequest;
use crate::worker::turn::Turn;

/// Reason for closing a silent connection.
const SILENT: &str = "the node does not answer";

/// Part of an error for a command that the node may still execute.
pub(in crate::worker) const PERHAPS: &str = "; the command may have been executed";

/// Silence after which a connection of subscriptions is probed: a vanished peer would otherwise look like one without
/// messages.
const PUBSUB_QUIET_US: u64 = 1_000_000;

impl Upstreams {
    /// Fails all pending requests of this link with an error. The node may still execute the first `in_flight` ones
    /// (see [`crate::worker::zombies`]).
    pub(super) fn fail_all(&mut self, turn: &Turn, handle: Handle, error: &str, in_flight: usize) {
        let Some(link) = self.get_mut(handle) else { return };
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
            self.emit(Event::Failed { origin, ended, in_flight, text: Some(error.to_owned()) });
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
            self.emit(Event::Failed { origin, ended, in_flight: 0, text: None });
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

    /// Records nodes that execute slow commands of this worker, before commands are checked for timeouts.
    fn note_busy(&self, turn: &Turn) {
        let timeout = turn.routing().live.command_timeout;
        let age = |sent_us: u32| Duration::from_micros(u64::from((turn.now_us() as u32).wrapping_sub(sent_us)));
        for (_, link) in self.links.iter().filter(|(_, link)| link.is_slow() && link.is_up()) {
            let is_script = |head: &Pending| head.class == CommandClass::Script as u8;
            if link.head().is_some_and(|head| Busy::explains_silence(age(head.sent_us), is_script(head), timeout)) {
                turn.shared().busy.note(link.node, turn.now_us());
            }
        }
    }

    /// `has_copies`: fills are needed. `needs_pubsub`: whether subscriptions at a node are needed.
    pub(in crate::worker) fn tick_links(
        &mut self,
        turn: &Turn,
        has_copies: bool,
        needs_pubsub: &dyn Fn(NodeId) -> bool,
    ) {
        let live = turn.routing().live.clone();
        self.note_busy(turn);
        for handle in self.links.handles() {
            let Some(link) = self.get_mut(handle) else { continue };
            let (phase, age_us) = (link.phase(), link.life.age_us(turn.now_us()));
            match phase {
                Phase::Waiting { until_us } if until_us <= turn.now_us() => self.connect(turn, handle),
                Phase::Waiting { .. } => {}
                Phase::Handshake if link.handshake.waits_for_earlier_router() => {
                    self.handshake(turn, handle).end_wait_for_earlier_router()
                }
                Phase::Connecting | Phase::Securing | Phase::Handshake => {
                    let is_late = age_us > live.connect_timeout.as_micros() as u64;
                    if is_late && !turn.shared().busy.was_busy(link.node, turn.now_us(), live.connect_timeout) {
                        let doing = match phase {
                            Phase::Connecting => "take the connection",
                            Phase::Securing => "finish the TLS handshake",
                            _ => "answer our greeting",
                        };
                        self.attempt_failed(
                            turn,
                            handle,
                            &format!("it did not {doing} within {:?} (connect-timeout)", live.connect_timeout),
                        );
                    }
                }
                Phase::Up => {
                    link.requests.shrink(turn.now_us());
                    let stale = link.life.is_stale();
                    self.tick_up(turn, handle, &live, has_copies, needs_pubsub);
                    if stale {
                        self.tick_stale(turn, handle);
                    }
                }
            }
        }
    }

    fn tick_up(
        &mut self,
        turn: &Turn,
        handle: Handle,
        live: &crate::settings::RuntimeSettings,
        has_copies: bool,
        needs_pubsub: &dyn Fn(NodeId) -> bool,
    ) {
        let Some(link) = self.get_mut(handle) else { return };
        let is_slow = link.is_slow();
        let timeout = if is_slow { live.slow_command_timeout.unwrap_or(Duration::MAX) } else { live.command_timeout };
        let timeout_us = u32::try_from(timeout.as_micros()).unwrap_or(u32::MAX);
        let is_busy = if is_slow {
            live.slow_command_timeout.is_none()
        } else {
            // Only checked if a command would time out.
            let is_old = link.head().is_some_and(|head| (turn.now_us() as u32).wrapping_sub(head.sent_us) > timeout_us);
            is_old && turn.shared().busy.was_busy(link.node, turn.now_us(), timeout)
        };
        // A node that is sending a reply is alive, however long the reply takes.
        let is_answering = link.incoming.is_arriving(turn.now_us(), timeout_us);
        let busy = is_busy
            || link.incoming.is_paused()
            || is_answering
            || turn.now_us() < link.checkout().map_or(0, Checkout::waits_until_us);
        let uploading = link.is_uploading();
        let late = if busy { Vec::new() } else { link.requests.expire(turn.now_us(), timeout_us, uploading) };
        let silent = !busy
            && link
                .requests
                .silent_since_us()
                .is_some_and(|since_us| turn.now_us().saturating_sub(since_us) > u64::from(timeout_us));
        let lane = link.lane;
        let unused = lane != Lane::Main
            && !(lane == Lane::Fills && has_copies)
            && link.is_idle()
            && link.holder() == Handle::NONE
            && link.unsent() == 0
            && link.life.is_unused(turn.now_us());
        if !link.is_idle() {
            link.life.note_use(turn.now_us());
        }
        let is_late = !late.is_empty();
        if is_late {
            let node = self.get(handle).map_or(NodeId(0), |l| l.node);
            let name = turn.node_name(node);
            if let Some(suppressed) = self.links.log(node).and_then(|log| log.late.allow(turn.now_us())) {
                warn!(node = %name, commands = late.len(), ?timeout, suppressed = suppressed.count(), "node does not answer in time");
            }
            let origin = Origin { link: handle, node, lane: Some(lane), is_up: true };
            let text = format!("NODETIMEOUT {name} did not answer within {timeout:?}{PERHAPS}");
            self.emit(Event::Late { origin, late, text });
        }
        // An upload cannot continue after its command has failed.
        if silent || (is_late && uploading) {
            // Still silent: close the connection. Its commands count as in flight until its end is confirmed.
            let frozen = self.get(handle).map(|l| (l.node, l.lane));
            self.break_link(turn, handle, SILENT);
            if let Some((node, Lane::Main)) = frozen {
                self.break_waiting(turn, node, SILENT);
            }
        } else if lane == Lane::Pubsub && self.tick_pubsub_link(turn, handle, needs_pubsub) {
            if let Some(link) = self.get_mut(handle) {
                link.life.note_use(turn.now_us());
            }
        } else if unused {
            self.drop_link(turn, handle);
        }
    }

    /// At every tick of a connection that is up: returns whether it is still needed, and probes it if it is silent.
    fn tick_pubsub_link(&mut self, turn: &Turn, link: Handle, needed: &dyn Fn(NodeId) -> bool) -> bool {
        let Some(l) = self.get(link) else { return false };
        let (node, quiet) =
            (l.node, l.is_idle() && turn.now_us().saturating_sub(l.incoming.received_us()) > PUBSUB_QUIET_US);
        let needed = needed(node);
        if needed && quiet {
            self.push_own(turn, link, &[b"PING"], Purpose::Discarded, 0);
        }
        needed
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

/// Publishes since when each node has executed a slow command of this worker.
pub(in crate::worker) fn publish_slow(turn: &Turn, up: &Upstreams) {
    let mut since_us = vec![0; turn.routing().topology.node_id_bound()];
    for (_, link) in up.links().iter().filter(|(_, link)| link.is_slow()) {
        let Some(head) = link.head().filter(|_| !link.requests.is_head_expired()) else { continue };
        let sent_us = turn.now_us().saturating_sub(u64::from((turn.now_us() as u32).wrapping_sub(head.sent_us))).max(1);
        if let Some(oldest) = since_us.get_mut(link.node.index())
            && (*oldest == 0 || sent_us < *oldest)
        {
            *oldest = sent_us;
        }
    }
    for node in turn.routing().topology.nodes() {
        turn.counters().node(node.id).slow_since_us.set(since_us[node.id.index()]);
    }
}
