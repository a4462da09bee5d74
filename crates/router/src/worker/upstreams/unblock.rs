//! End of the wait of a blocking command by CLIENT UNBLOCK: its state on the connection, and the clients that requested
//! it.

use switchyard_policy::topology::NodeId;
use switchyard_resp::encode;

use super::Upstreams;
use super::link::Phase;
use super::pending::Purpose;
use crate::lane::Lane;
use crate::shared::{Mailboxes, Message};
use crate::slab::Handle;
use crate::worker::turn::Turn;

/// State of a CLIENT UNBLOCK for the command on a connection.
#[derive(Debug, Default)]
pub(in crate::worker) struct Unblock {
    /// Use `ERROR` instead of `TIMEOUT`.
    error: bool,
    /// Sent to the node, and not answered yet.
    is_queried: bool,
    /// The blocking command has been answered.
    over: bool,
    /// Clients that have requested it, each with whether by `ERROR`.
    askers: Vec<(Asker, bool)>,
}

/// Destination of the reply to a CLIENT UNBLOCK.
#[derive(Clone, Copy, Debug)]
pub(in crate::worker) struct Asker {
    pub(in crate::worker) from: usize,
    pub(in crate::worker) gather: Handle,
    pub(in crate::worker) part: u32,
}

impl Asker {
    pub(in crate::worker) fn answer(self, mailboxes: &Mailboxes, answer: &[u8]) {
        let Self { from, gather, part } = self;
        mailboxes.send(from, Message::Answer { gather, part, reply: answer.to_vec() });
    }
}

impl Unblock {
    /// Adds a client that requests the end. `error`: by `ERROR` instead of `TIMEOUT`.
    pub(in crate::worker) fn add(&mut self, asker: Asker, error: bool) {
        self.askers.push((asker, error));
    }

    /// Requests the end, for a client or (`None`) for the router. Returns whether it must be sent.
    pub(in crate::worker) fn request(&mut self, error: bool, asker: Option<Asker>) -> bool {
        self.error |= error;
        self.askers.extend(asker.map(|asker| (asker, error)));
        !self.is_queried
    }

    /// Records that CLIENT UNBLOCK was sent. Returns its reason.
    pub(in crate::worker) fn sent(&mut self) -> &'static [u8] {
        self.is_queried = true;
        if self.error { b"ERROR" } else { b"TIMEOUT" }
    }

    /// Records the reply to CLIENT UNBLOCK. Returns whether the blocking command has been answered.
    pub(in crate::worker) fn replied(&mut self) -> bool {
        self.is_queried = false;
        self.over
    }

    /// Records that the blocking command has been answered. Returns whether a reply to CLIENT UNBLOCK is pending.
    pub(super) fn end(&mut self) -> bool {
        self.over = true;
        self.is_queried
    }

    /// Whether it was too early, and must be sent again.
    pub(in crate::worker) fn is_to_be_sent(&self) -> bool {
        !self.is_queried && !self.over
    }

    /// Form of the first request by a client: whether by `ERROR`.
    pub(in crate::worker) fn wanted(&self) -> Option<bool> {
        self.askers.first().map(|(_, error)| *error)
    }

    /// Replies to all requesting clients with the number of ended waits.
    pub(in crate::worker) fn answer(&self, mailboxes: &Mailboxes, count: i64) {
        let mut bytes = Vec::new();
        encode::integer(&mut bytes, count);
        for (asker, _) in &self.askers {
            asker.answer(mailboxes, &bytes);
        }
    }

    /// Takes the clients that have requested it so far. Empty if only the router has.
    pub(in crate::worker) fn take_askers(&mut self) -> Vec<(Asker, bool)> {
        std::mem::take(&mut self.askers)
    }
}

/// Interval of liveness probes to a node with waiting clients and no other traffic.
const PROBE_US: u64 = 1_000_000;

/// Pending unblocks and probes of a worker.
#[derive(Debug, Default)]
pub(in crate::worker) struct Unblocks {
    /// Connections whose CLIENT UNBLOCK was too early and must be repeated.
    pub(in crate::worker) again: Vec<Handle>,
    next_probe_us: u64,
}

impl Unblocks {
    pub(in crate::worker) fn is_empty(&self) -> bool {
        self.again.is_empty()
    }
}

/// Probes nodes with waiting clients and no other traffic.
pub(in crate::worker) fn tick_blocked(turn: &Turn, up: &mut Upstreams) {
    if turn.now_us() < up.unblocks().next_probe_us {
        return;
    }
    up.unblocks().next_probe_us = turn.now_us() + PROBE_US;
    let mut nodes: Vec<NodeId> =
        up.links().iter().filter(|(_, l)| l.lane() == Lane::Blocking && !l.is_idle()).map(|(_, l)| l.node()).collect();
    nodes.sort_unstable();
    nodes.dedup();
    let live = &turn.routing().live;
    let command_timeout = live.command_timeout;
    let timeout_us = (2 * live.command_timeout + live.connect_timeout).as_micros() as u64;
    for node in nodes {
        let Some(main) = up.links().main(node) else { continue };
        let Some(link) = up.get(main) else { continue };
        let is_busy = turn.shared().busy.was_busy(node, turn.now_us(), command_timeout);
        if link.phase() != Phase::Up
            && !is_busy
            && turn.now_us().saturating_sub(link.incoming().received_us()) > timeout_us
        {
            up.break_waiting(turn, node, "the node can no longer be reached");
        } else if link.phase() == Phase::Up && link.is_idle() {
            up.push_own(turn, main, &[b"PING"], Purpose::Discarded, 0);
        }
    }
}
