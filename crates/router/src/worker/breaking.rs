//! Broken and silent connections to nodes: errors for clients, and zombies.
//!
//! Separate from `nodes`, because this code is off the path of answered commands.

use std::time::Duration;

use switchyard_policy::topology::NodeId;
use switchyard_resp::command::CommandClass;
use switchyard_resp::encode;
use tracing::{info, warn};

use super::Worker;
use super::handshake::{NodeHandshake, end_wait_for_earlier_router};
use super::hot_copies::{filled, link_lost};
use super::keyed::FinishedRequest;
use super::kind::Task;
use super::outage;
use super::output::deliver_of_node;
use super::upstream::{Body, Lane, Pending, Phase, Purpose};
use crate::busy::Busy;
use crate::slab::Handle;

/// Reason for closing a silent connection.
const SILENT: &str = "the node does not answer";

/// Part of an error for a command that the node may still execute.
pub(super) const PERHAPS: &str = "; the command may have been executed";

/// Idle time after which connections for the slow lane and large values are closed.
const IDLE_US: u64 = 30_000_000;

/// Fails requests whose connection was lost before they were passed to it.
#[cold]
pub(super) fn fail_severed(worker: &mut Worker, strays: Vec<FinishedRequest>) {
    let mut error = Vec::new();
    encode::error(&mut error, "NODELOST the connection was lost before the command was sent");
    for ended in strays {
        let pending = worker.over(ended, b"");
        worker.fail_pending(Handle::NONE, pending, &error);
    }
}

impl Worker {
    /// Replies with an error to all pending requests of this link. The text tells whether a command may still be
    /// executed, as the first `in_flight` ones may (see [`super::zombies`]).
    pub(super) fn fail_all(&mut self, handle: Handle, error: &str, in_flight: usize) {
        let Some(link) = self.links.get_mut(handle) else { return };
        let lost = link.lose(in_flight);
        link.start_database = self.turn.routing().live.database;
        link.database = link.start_database;
        link.no_touch = false;
        link.input = Vec::new();
        link.greeting.clear();
        link.next_body();
        let waiters = std::mem::take(&mut link.waiters);
        let (mut not_executed, mut perhaps_executed) = (Vec::new(), Vec::new());
        encode::error(&mut not_executed, error);
        encode::error(&mut perhaps_executed, &format!("{error}{PERHAPS}"));
        for (place, ended) in lost.enumerate() {
            let is_expired = ended.is_expired;
            let pending = self.over(ended, b"");
            if let Some(link) = self.links.get(handle) {
                link.counters.classes[pending.class as usize].errors.add(1);
            }
            if !is_expired {
                let bytes = if place < in_flight { &perhaps_executed } else { &not_executed };
                self.fail_pending(handle, pending, bytes);
            }
        }
        for waiter in waiters {
            self.unstall(waiter);
        }
    }

    pub(super) fn fail_pending(&mut self, handle: Handle, pending: Pending, error: &[u8]) {
        match pending.purpose {
            Purpose::Client
            | Purpose::ClientHealed
            | Purpose::Exec
            | Purpose::ExecWithoutMulti
            | Purpose::Watch
            | Purpose::Wait => {
                let holds = self.clients.get(pending.who).is_some_and(|c| c.held == Some(handle));
                let streamed = self.clients.get(pending.who).is_some_and(|c| c.streaming && c.is_first(pending.seq));
                if holds && let Some(client) = self.clients.get_mut(pending.who) {
                    client.held = None;
                    if let Some(upload) = client.upload.as_deref_mut() {
                        upload.link = None;
                    }
                }
                if pending.purpose == Purpose::Watch {
                    self.fail_watch(pending.who);
                } else if pending.purpose == Purpose::Wait {
                    self.forget_waiting(pending.who);
                }
                let lane = self.links.get(handle).map(|link| link.lane);
                if streamed {
                    // Half a reply has been sent, so the connection must be closed.
                    self.close_client(pending.who);
                } else if lane == Some(Lane::Blocking) {
                    self.end_as_a_server_would(pending.who, pending.seq);
                } else if lane == Some(Lane::Replica) {
                    // The node itself may be up.
                    deliver_of_node(self, pending.who, pending.seq, error);
                } else {
                    self.deliver(pending.who, pending.seq, error);
                }
            }
            Purpose::Gather => self.gather_part(pending.who, pending.seq, error),
            Purpose::Unblock => self.on_unblock(pending.who, error),
            Purpose::Look => self.on_look(pending.who, pending.seq, error),
            // After a lost connection, its topics are handled together.
            Purpose::Subscribe if self.links.get(handle).is_some_and(|l| l.phase == Phase::Up) => {
                let node = self.links.get(handle).map_or(NodeId(0), |l| l.node);
                self.subscribe_timed_out(pending.who, node);
            }
            Purpose::Track if self.links.get(handle).is_some_and(|l| l.phase == Phase::Up) => {
                let node = self.links.get(handle).map_or(NodeId(0), |l| l.node);
                self.on_tracking_answer(node, pending.seq, error);
            }
            Purpose::Fill => filled(self, pending.seq, error, true),
            Purpose::Sync => self.unsubscribe_synced(pending.who, pending.seq),
            Purpose::Discarded
            | Purpose::Learn
            | Purpose::Confirm
            | Purpose::Queued
            | Purpose::Subscribe
            | Purpose::Track
            | Purpose::FillTtl
            | Purpose::Beat => {}
        }
    }

    /// Closes a lost or silent connection.
    pub(super) fn break_link(&mut self, handle: Handle, why: &str) {
        let Some(link) = self.links.get_mut(handle) else { return };
        if link.phase != Phase::Up {
            self.attempt_failed(handle, why);
            return;
        }
        link.downgraded = false;
        link.goes_down();
        let in_flight = link.may_be_executed();
        let (node, lane) = (link.node, link.lane);
        // The connection of a removed node does not count as a failure.
        let known = self.turn.routing().topology.node(node).is_some();
        link.counters.failures.add(u64::from(known));
        self.leave_behind(handle);
        let Some(link) = self.links.get_mut(handle) else { return };
        if let Some(fd) = link.fd.take() {
            if let Some(tls) = &mut link.tls {
                tls.notify_close(&fd);
            }
            self.poll.remove(&fd);
        }
        link.tls = None;
        link.stale = false;
        link.retiring = false;
        link.phase = Phase::Waiting { until_us: self.turn.now_us() };
        if lane == Lane::Main {
            outage::lost(self, node);
        }
        let name = self.turn.node_name(node);
        let log = self.links.log(node).filter(|_| known);
        if let Some(suppressed) = log.and_then(|log| log.lost.allow(self.turn.now_us())) {
            info!(node = %name, reason = why, in_flight, suppressed = suppressed.count(), "lost a connection to node");
        }
        self.fail_all(handle, &format!("NODELOST connection to {name} was lost: {why}"), in_flight);
        self.zombies.forget_killer(handle);
        if lane == Lane::Main && known {
            // Since then a module may have been loaded, or the server replaced.
            self.turn.shared().with_facts(node, |f| f.commands = crate::shared::Commands::Unknown);
            self.connect(handle);
        } else {
            self.drop_link(handle);
        }
        // Zombies need a newer connection; the main one is only newer if it is replaced.
        self.ensure_killer(node);
        if lane == Lane::Pubsub {
            self.pubsub_link_lost(node);
        }
        if lane == Lane::Fills {
            link_lost(self, node);
        }
        if lane.is_exclusive() {
            self.wake(node, lane);
        }
    }

    /// Records, before a connection is closed, that the node may still execute its commands.
    fn leave_behind(&mut self, handle: Handle) {
        let Some(link) = self.links.get(handle).filter(|link| link.phase == Phase::Up && link.lane != Lane::Replica)
        else {
            return;
        };
        let (node, connection) = (link.node, link.connection(self.turn.index()));
        let Some(low) = link.oldest_epoch().filter(|_| link.may_be_executed() > 0) else {
            return self.turn.shared().connections.remove(&connection);
        };
        self.turn.shared().connections.mark_broken(&connection);
        let epoch = self.turn.routing().topology.epoch();
        let epoch = epoch - u64::from((epoch as u32).wrapping_sub(low));
        let armed = link.head().map_or(0, |head| head.cacheable);
        self.zombies.add(connection, epoch, armed);
        self.count_zombies(node);
    }

    /// Ensures that every zombie is being killed. The main connection may be older than the zombie: the node has
    /// completed both handshakes, so it knows the zombie as a client, and an answered KILL has ended it.
    fn ensure_killer(&mut self, node: NodeId) {
        let Some(main) = self.links.main(node) else { return };
        let Some(run_id) = self.links.up(main).map(|link| link.run_id.clone()) else { return };
        if self.zombies.lacks_killer(node) {
            self.kill_zombies(node, main, run_id.as_deref());
        }
    }

    /// Removes a link without pending replies from the tables. Its unconfirmed commands remain recorded.
    pub(super) fn drop_link(&mut self, handle: Handle) {
        self.leave_behind(handle);
        let Some(mut link) = self.links.remove(handle) else { return };
        for ended in link.lose(link.may_be_executed()) {
            let pending = self.over(ended, b"");
            if pending.purpose == Purpose::Fill {
                filled(self, pending.seq, b"", true);
            }
        }
        if link.lane == Lane::Fills {
            link_lost(self, link.node);
        }
        if let Some(fd) = &link.fd {
            self.poll.remove(fd);
            if link.phase == Phase::Up {
                link.goes_down();
            }
        }
        link.is_forgotten();
        if link.lane.is_exclusive() {
            self.exclusive_gone(handle, &link);
        }
        if let Some(unblock) = link.checkout().and_then(|loan| loan.unblock.as_ref()) {
            unblock.answer(&self.turn.shared().mailboxes, 0);
        }
        self.ensure_killer(link.node);
    }

    /// Records nodes that execute slow commands of this worker, before commands are checked for timeouts.
    fn note_busy(&self) {
        let timeout = self.turn.routing().live.command_timeout;
        let age = |sent_us: u32| Duration::from_micros(u64::from((self.turn.now_us() as u32).wrapping_sub(sent_us)));
        for (_, link) in self.links.iter().filter(|(_, link)| link.is_slow() && link.phase == Phase::Up) {
            let is_script = |head: &Pending| head.class == CommandClass::Script as u8;
            if link.head().is_some_and(|head| Busy::explains_silence(age(head.sent_us), is_script(head), timeout)) {
                self.turn.shared().busy.note(link.node, self.turn.now_us());
            }
        }
    }

    pub(super) fn tick_links(&mut self) {
        let live = self.turn.routing().live.clone();
        self.note_busy();
        for handle in self.links.handles() {
            let Some(link) = self.links.get_mut(handle) else { continue };
            let age_us = self.turn.now_us().saturating_sub(link.since_us);
            match link.phase {
                Phase::Waiting { until_us } if until_us <= self.turn.now_us() => self.connect(handle),
                Phase::Waiting { .. } => {}
                Phase::Handshake if matches!(link.greeting.front(), Some(NodeHandshake::Waits(_))) => {
                    end_wait_for_earlier_router(self, handle)
                }
                Phase::Connecting | Phase::Securing | Phase::Handshake => {
                    let is_late = age_us > live.connect_timeout.as_micros() as u64;
                    if is_late && !self.turn.shared().busy.was_busy(link.node, self.turn.now_us(), live.connect_timeout)
                    {
                        let doing = match link.phase {
                            Phase::Connecting => "take the connection",
                            Phase::Securing => "finish the TLS handshake",
                            _ => "answer our greeting",
                        };
                        self.attempt_failed(
                            handle,
                            &format!("it did not {doing} within {:?} (connect-timeout)", live.connect_timeout),
                        );
                    }
                }
                Phase::Up => {
                    link.shrink(self.turn.now_us());
                    let stale = link.stale;
                    self.tick_up(handle, &live);
                    if stale {
                        self.tick_stale(handle);
                    }
                }
            }
        }
    }

    /// Publishes since when each node has executed a slow command of this worker.
    pub(super) fn publish_slow(&self) {
        let mut since_us = vec![0; self.turn.routing().topology.node_id_bound()];
        for (_, link) in self.links.iter().filter(|(_, link)| link.is_slow()) {
            let Some(head) = link.head().filter(|_| !link.is_head_expired()) else { continue };
            let sent_us = self
                .turn
                .now_us()
                .saturating_sub(u64::from((self.turn.now_us() as u32).wrapping_sub(head.sent_us)))
                .max(1);
            if let Some(oldest) = since_us.get_mut(link.node.index())
                && (*oldest == 0 || sent_us < *oldest)
            {
                *oldest = sent_us;
            }
        }
        for node in self.turn.routing().topology.nodes() {
            self.turn.counters().node(node.id).slow_since_us.set(since_us[node.id.index()]);
        }
    }

    fn tick_up(&mut self, handle: Handle, live: &crate::settings::RuntimeSettings) {
        let Some(link) = self.links.get_mut(handle) else { return };
        let is_slow = link.is_slow();
        let timeout = if is_slow { live.slow_command_timeout.unwrap_or(Duration::MAX) } else { live.command_timeout };
        let timeout_us = u32::try_from(timeout.as_micros()).unwrap_or(u32::MAX);
        let is_busy = if is_slow {
            live.slow_command_timeout.is_none()
        } else {
            // Only checked if a command would time out.
            let is_old =
                link.head().is_some_and(|head| (self.turn.now_us() as u32).wrapping_sub(head.sent_us) > timeout_us);
            is_old && self.turn.shared().busy.was_busy(link.node, self.turn.now_us(), timeout)
        };
        // A node that is sending a reply is alive, however long the reply takes.
        let mid_reply = !link.input.is_empty() || !matches!(link.body, Body::Whole(_));
        let is_answering = mid_reply && self.turn.now_us().saturating_sub(link.received_us) < u64::from(timeout_us);
        let busy = is_busy || link.paused || is_answering || self.turn.now_us() < link.waits_until_us();
        let uploading = link.task() == Task::Uploading;
        let late = if busy { Vec::new() } else { link.expire(self.turn.now_us(), timeout_us) };
        let silent = !busy
            && link
                .silent_since_us()
                .is_some_and(|since_us| self.turn.now_us().saturating_sub(since_us) > u64::from(timeout_us));
        let lane = link.lane;
        let unused = lane != Lane::Main
            && !(lane == Lane::Fills && self.observers.hot.has_copies())
            && link.is_idle()
            && link.holder() == Handle::NONE
            && link.unsent() == 0
            && self.turn.now_us().saturating_sub(link.idle_since_us) > IDLE_US;
        if !link.is_idle() {
            link.idle_since_us = self.turn.now_us();
        }
        let is_late = !late.is_empty();
        if is_late {
            let node = self.links.get(handle).map_or(NodeId(0), |l| l.node);
            let name = self.turn.node_name(node);
            if let Some(suppressed) = self.links.log(node).and_then(|log| log.late.allow(self.turn.now_us())) {
                warn!(node = %name, commands = late.len(), ?timeout, suppressed = suppressed.count(), "node does not answer in time");
            }
            let mut error = Vec::new();
            encode::error(&mut error, &format!("NODETIMEOUT {name} did not answer within {timeout:?}{PERHAPS}"));
            for pending in late {
                self.fail_pending(handle, pending, &error);
            }
        }
        // An upload cannot continue after its command has failed.
        if silent || (is_late && uploading) {
            // Still silent: close the connection. Its commands count as in flight until its end is confirmed.
            let frozen = self.links.get(handle).map(|l| (l.node, l.lane));
            self.break_link(handle, SILENT);
            if let Some((node, Lane::Main)) = frozen {
                self.break_waiting(node, SILENT);
            }
        } else if lane == Lane::Pubsub && self.tick_pubsub_link(handle) {
            if let Some(link) = self.links.get_mut(handle) {
                link.idle_since_us = self.turn.now_us();
            }
        } else if unused {
            self.drop_link(handle);
        }
    }
}
