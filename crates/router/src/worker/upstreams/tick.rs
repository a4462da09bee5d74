//! Periodic checks of all connections: attempts that are due, and commands without a reply.

use std::time::Duration;

use switchyard_policy::topology::NodeId;
use switchyard_resp::command::CommandClass;
use tracing::warn;

use super::breaking::PERHAPS;
use super::kind::Checkout;
use super::link::Phase;
use super::links::Links;
use super::pending::{Pending, Purpose};
use super::{Event, Origin, Upstreams};
use crate::busy::Busy;
use crate::lane::Lane;
use crate::settings::RuntimeSettings;
use crate::slab::Handle;
use crate::worker::turn::Turn;

/// Reason for closing a silent connection.
const SILENT: &str = "the node does not answer";

/// Silence after which a connection of subscriptions is probed: a vanished peer would otherwise look like one without
/// messages.
const PUBSUB_QUIET_US: u64 = 1_000_000;

impl Upstreams {
    /// `has_copies`: fills are needed. `needs_pubsub`: whether subscriptions at a node are needed.
    pub(in crate::worker) fn tick_links(
        &mut self,
        turn: &Turn,
        has_copies: bool,
        needs_pubsub: &dyn Fn(NodeId) -> bool,
    ) {
        note_busy(turn, &self.links);
        let mut tick = Tick { up: self, turn, live: &turn.routing().live, has_copies, needs_pubsub };
        for handle in tick.up.links.handles() {
            tick.tick(handle);
        }
    }
}

/// Check of all connections.
struct Tick<'a> {
    up: &'a mut Upstreams,
    turn: &'a Turn,
    live: &'a RuntimeSettings,
    has_copies: bool,
    needs_pubsub: &'a dyn Fn(NodeId) -> bool,
}

impl Tick<'_> {
    fn tick(&mut self, handle: Handle) {
        let (turn, live) = (self.turn, self.live);
        let Some(link) = self.up.get_mut(handle) else { return };
        let (phase, age_us) = (link.phase(), link.life.age_us(turn.now_us()));
        match phase {
            Phase::Waiting { until_us } if until_us <= turn.now_us() => self.up.connect(turn, handle),
            Phase::Waiting { .. } => {}
            Phase::Handshake if link.handshake.waits_for_earlier_router() => {
                self.up.handshake(turn, handle).end_wait_for_earlier_router()
            }
            Phase::Connecting | Phase::Securing | Phase::Handshake => {
                let is_late = age_us > live.connect_timeout.as_micros() as u64;
                if is_late && !turn.shared().busy.was_busy(link.node, turn.now_us(), live.connect_timeout) {
                    let doing = match phase {
                        Phase::Connecting => "take the connection",
                        Phase::Securing => "finish the TLS handshake",
                        _ => "answer our greeting",
                    };
                    self.up.attempt_failed(
                        turn,
                        handle,
                        &format!("it did not {doing} within {:?} (connect-timeout)", live.connect_timeout),
                    );
                }
            }
            Phase::Up => {
                link.requests.shrink(turn.now_us());
                let stale = link.life.is_stale();
                self.tick_up(handle);
                if stale {
                    self.up.tick_stale(turn, handle);
                }
            }
        }
    }

    fn tick_up(&mut self, handle: Handle) {
        let (turn, live) = (self.turn, self.live);
        let Some(link) = self.up.get_mut(handle) else { return };
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
            && !(lane == Lane::Fills && self.has_copies)
            && link.is_idle()
            && link.holder() == Handle::NONE
            && link.unsent() == 0
            && link.life.is_unused(turn.now_us());
        if !link.is_idle() {
            link.life.note_use(turn.now_us());
        }
        let is_late = !late.is_empty();
        if is_late {
            let node = self.up.get(handle).map_or(NodeId(0), |l| l.node);
            let name = turn.node_name(node);
            if let Some(suppressed) = self.up.links.log(node).and_then(|log| log.late.allow(turn.now_us())) {
                warn!(node = %name, commands = late.len(), ?timeout, suppressed = suppressed.count(), "node does not answer in time");
            }
            let origin = Origin { link: handle, node, lane: Some(lane), is_up: true };
            let text = format!("NODETIMEOUT {name} did not answer within {timeout:?}{PERHAPS}");
            self.up.emit(Event::Late { origin, late, text });
        }
        // An upload cannot continue after its command has failed.
        if silent || (is_late && uploading) {
            // Still silent: close the connection. Its commands count as in flight until its end is confirmed.
            let frozen = self.up.get(handle).map(|l| (l.node, l.lane));
            self.up.break_link(turn, handle, SILENT);
            if let Some((node, Lane::Main)) = frozen {
                self.up.break_waiting(turn, node, SILENT);
            }
        } else if lane == Lane::Pubsub && self.tick_pubsub(handle) {
            if let Some(link) = self.up.get_mut(handle) {
                link.life.note_use(turn.now_us());
            }
        } else if unused {
            self.up.drop_link(turn, handle);
        }
    }

    /// At every tick of a connection that is up: returns whether it is still needed, and probes it if it is silent.
    fn tick_pubsub(&mut self, link: Handle) -> bool {
        let turn = self.turn;
        let Some(l) = self.up.get(link) else { return false };
        let (node, quiet) =
            (l.node, l.is_idle() && turn.now_us().saturating_sub(l.incoming.received_us()) > PUBSUB_QUIET_US);
        let needed = (self.needs_pubsub)(node);
        if needed && quiet {
            self.up.push_own(turn, link, &[b"PING"], Purpose::Discarded, 0);
        }
        needed
    }
}

/// Records nodes that execute slow commands of this worker, before commands are checked for timeouts.
fn note_busy(turn: &Turn, links: &Links) {
    let timeout = turn.routing().live.command_timeout;
    let age = |sent_us: u32| Duration::from_micros(u64::from((turn.now_us() as u32).wrapping_sub(sent_us)));
    for (_, link) in links.iter().filter(|(_, link)| link.is_slow() && link.is_up()) {
        let is_script = |head: &Pending| head.class == CommandClass::Script as u8;
        if link.head().is_some_and(|head| Busy::explains_silence(age(head.sent_us), is_script(head), timeout)) {
            turn.shared().busy.note(link.node, turn.now_us());
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
