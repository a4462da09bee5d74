//! Replies of a client: pending ones in the order of commands, and those parked behind earlier ones.

use std::collections::VecDeque;

use switchyard_policy::topology::NodeId;
use switchyard_resp::command::CommandClass;

use crate::lane::Lane;
use crate::metrics::WorkerCounters;
use crate::reigns::bit_of;

/// Maximum expected bytes of pending replies per client.
const EXPECTED_BYTES_MAX: usize = 8 << 20;

/// Assumed size of a reply before the first one. Otherwise the first pipeline of a client could request gigabytes,
/// which would delay all clients of the shared connection, even after the client has gone.
const REPLY_MEAN_FIRST: usize = 64 << 10;

/// A pending reply, not received or parked behind earlier replies.
#[derive(Clone, Copy, Debug)]
struct PendingReply {
    /// Time at which the command was read, in microseconds of the worker's clock.
    at_us: u32,
    /// Start in the parking buffer, which may exceed 4 GiB. With a length of 0 the reply has not been received (no
    /// reply is empty).
    start: usize,
    len: usize,
    class: u8,
    /// CLIENT REPLY OFF or SKIP: the reply must not be sent.
    muted: bool,
    /// The reply is an error.
    failed: bool,
}

impl PendingReply {
    /// Records the duration of the command.
    #[inline]
    fn finish(&self, now_us: u64, counters: &WorkerCounters) {
        let histogram = if self.failed { &counters.failed } else { &counters.total[self.class as usize] };
        histogram.record(u64::from((now_us as u32).wrapping_sub(self.at_us)));
    }
}

/// State of CLIENT REPLY.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::worker) enum ReplyMode {
    On,
    Off,
    SkipNext,
}

#[derive(Debug)]
pub(in crate::worker) struct Replies {
    mode: ReplyMode,
    pending: VecDeque<PendingReply>,
    /// Running mean of reply sizes, bytes.
    mean: usize,
    /// Nodes with commands in flight, as bits by number modulo 64. All bits: unknown. Only valid with commands in
    /// flight.
    under_way_at: u64,
    /// Number of the command whose reply is at the front of `pending`.
    first: u32,
    parked: Vec<u8>,
    parked_count: u32,
    /// Lane of the commands in flight.
    lane: Lane,
    /// Part of a large reply has been sent: the rest must follow.
    is_streaming: bool,
    /// Time of the last command that may change state at a node.
    wrote_us: u64,
}

impl Replies {
    pub(super) fn new() -> Self {
        Self {
            mode: ReplyMode::On,
            pending: VecDeque::new(),
            mean: REPLY_MEAN_FIRST,
            under_way_at: 0,
            first: 0,
            parked: Vec::new(),
            parked_count: 0,
            lane: Lane::Main,
            is_streaming: false,
            wrote_us: 0,
        }
    }

    /// Number of pending replies.
    #[inline]
    pub(in crate::worker) fn in_flight(&self) -> usize {
        self.pending.len()
    }

    /// Whether another command may be sent before pending replies arrive. Limits the number of commands and the
    /// expected bytes of their replies, because a started reply must be received even if the client has gone.
    #[inline]
    pub(in crate::worker) fn has_room(&self, commands_max: usize) -> bool {
        self.in_flight() < commands_max && self.in_flight() * self.mean < EXPECTED_BYTES_MAX
    }

    /// Whether `seq` is the last command read.
    pub(in crate::worker) fn is_last(&self, seq: u32) -> bool {
        seq == self.last()
    }

    /// Whether `seq` is the command whose reply is sent next.
    pub(in crate::worker) fn is_first(&self, seq: u32) -> bool {
        seq == self.first && !self.pending.is_empty()
    }

    /// Number of the next command to be read.
    #[inline]
    pub(in crate::worker) fn next_seq(&self) -> u32 {
        self.first.wrapping_add(self.pending.len() as u32)
    }

    /// Number of the command to be answered next.
    pub(in crate::worker) fn first(&self) -> u32 {
        self.first
    }

    /// Number of the last command read.
    #[inline]
    pub(in crate::worker) fn last(&self) -> u32 {
        self.next_seq().wrapping_sub(1)
    }

    /// Adds a pending reply for the current command, and returns its number.
    #[inline]
    pub(in crate::worker) fn owe(&mut self, now_us: u64, class: u8) -> u32 {
        let muted = self.mode != ReplyMode::On;
        if self.mode == ReplyMode::SkipNext {
            self.mode = ReplyMode::On;
        }
        if class != CommandClass::Read as u8 && class != CommandClass::Local as u8 {
            self.wrote_us = now_us;
        }
        self.under_way_at = u64::MAX;
        self.pending.push_back(PendingReply { at_us: now_us as u32, start: 0, len: 0, class, muted, failed: false });
        self.last()
    }

    /// Removes the pending reply of the last command, which is dispatched again.
    pub(in crate::worker) fn take_back(&mut self) {
        // CLIENT REPLY SKIP concerns the command when it is dispatched again.
        if self.pending.pop_back().is_some_and(|owed| owed.muted) && self.mode == ReplyMode::On {
            self.mode = ReplyMode::SkipNext;
        }
    }

    /// Adds a pending reply for a command to this node, or (`None`) to none.
    #[inline]
    pub(in crate::worker) fn owe_at(&mut self, node: Option<NodeId>, now_us: u64, class: u8) -> u32 {
        let before = if self.in_flight() == 0 { 0 } else { self.under_way_at };
        let seq = self.owe(now_us, class);
        self.under_way_at = before | node.map_or(0, bit_of);
        seq
    }

    /// Whether a command of the client may be in flight at the node. A later command on the same path is executed after
    /// it.
    #[inline]
    pub(in crate::worker) fn is_under_way_at(&self, node: NodeId) -> bool {
        self.in_flight() > 0 && self.under_way_at & bit_of(node) != 0
    }

    /// Adds a pending reply that is sent although replies are off: subscription confirmations count as messages.
    pub(in crate::worker) fn owe_push(&mut self, now_us: u64, class: u8) -> u32 {
        let seq = self.owe(now_us, class);
        if let Some(owed) = self.pending.back_mut() {
            owed.muted = false;
        }
        seq
    }

    /// Part of a large reply has been sent: the rest must follow.
    pub(in crate::worker) fn is_streaming(&self) -> bool {
        self.is_streaming
    }

    /// Starts to stream the first pending reply, which is too large to collect. `failed`: it is an error.
    pub(in crate::worker) fn begin_stream(&mut self, failed: bool) {
        self.is_streaming = true;
        if let Some(owed) = self.pending.front_mut() {
            owed.failed = failed;
        }
    }

    /// Appends a piece of the streamed reply.
    pub(in crate::worker) fn stream(&self, out: &mut Vec<u8>, piece: &[u8]) {
        if self.pending.front().is_some_and(|o| !o.muted) {
            out.extend_from_slice(piece);
        }
    }

    /// Completes the streamed reply.
    pub(in crate::worker) fn end_stream(&mut self, out: &mut Vec<u8>, now_us: u64, counters: &WorkerCounters) {
        self.is_streaming = false;
        self.complete(out, self.first, b"", false, now_us, counters);
    }

    /// Takes the reply to command `seq`, or its unsent rest. Earlier replies may still be pending. `failed`: the reply
    /// is an error.
    #[inline]
    pub(super) fn complete(
        &mut self,
        out: &mut Vec<u8>,
        seq: u32,
        reply: &[u8],
        failed: bool,
        now_us: u64,
        counters: &WorkerCounters,
    ) {
        let place = seq.wrapping_sub(self.first) as usize;
        let Some(owed) = self.pending.get_mut(place) else {
            debug_assert!(false, "reply to a command that is not in flight");
            return;
        };
        owed.failed |= failed;
        if place > 0 {
            if !owed.muted {
                owed.start = self.parked.len();
                self.parked.extend_from_slice(reply);
            }
            owed.len = reply.len();
            self.parked_count += 1;
            return;
        }
        if !owed.muted {
            out.extend_from_slice(reply);
        }
        self.mean = (self.mean * 7 + reply.len()) / 8;
        owed.finish(now_us, counters);
        self.pop_front();
        while self.parked_count > 0 {
            let Some(next) = self.pending.front().copied().filter(|o| o.len > 0) else { break };
            if !next.muted {
                out.extend_from_slice(&self.parked[next.start..next.start + next.len]);
            }
            next.finish(now_us, counters);
            self.parked_count -= 1;
            self.pop_front();
        }
        if self.parked_count == 0 && !self.parked.is_empty() {
            self.parked.clear();
            self.parked.shrink_to(64 << 10);
        } else if self.parked.len() > 1 << 20 {
            self.compact_parked();
        }
    }

    #[inline]
    fn pop_front(&mut self) {
        self.pending.pop_front();
        self.first = self.first.wrapping_add(1);
        if self.pending.is_empty() && self.pending.capacity() > 1024 {
            self.pending.shrink_to(64);
        }
    }

    /// Drops parked replies that have been sent. Otherwise a client that always pipelines would grow the buffer without
    /// bound.
    #[cold]
    fn compact_parked(&mut self) {
        let live: usize = self.pending.iter().filter(|o| o.len > 0 && !o.muted).map(|o| o.len).sum();
        if live * 2 > self.parked.len() {
            return;
        }
        let mut kept = Vec::with_capacity(live);
        for owed in self.pending.iter_mut().filter(|o| o.len > 0 && !o.muted) {
            let start = std::mem::replace(&mut owed.start, kept.len());
            kept.extend_from_slice(&self.parked[start..start + owed.len]);
        }
        self.parked = kept;
    }

    /// Whether the reply to `seq` is next, and replies are on.
    pub(super) fn sends_next(&self, seq: u32) -> bool {
        seq == self.first && self.pending.front().is_some_and(|o| !o.muted)
    }

    /// Suppresses the replies from command `seq` on. They are still awaited, so that the connection closes after the
    /// earlier ones.
    pub(super) fn drop_replies_from(&mut self, seq: u32) {
        let place = seq.wrapping_sub(self.first) as usize;
        self.pending.iter_mut().skip(place).for_each(|owed| owed.muted = true);
    }

    /// Whether a command on `lane` is possible with the commands in flight.
    pub(in crate::worker) fn can_take(&self, lane: Lane) -> bool {
        self.lane == lane || self.in_flight() == 0
    }

    /// Switches to `lane` if possible. Returns whether the client is on it.
    pub(in crate::worker) fn may_take(&mut self, lane: Lane) -> bool {
        if self.lane != lane {
            if self.in_flight() > 0 {
                return false;
            }
            self.lane = lane;
        }
        true
    }

    /// Puts the client on `lane`, without commands in flight or with those of the same node.
    pub(in crate::worker) fn take_lane(&mut self, lane: Lane) {
        self.lane = lane;
    }

    /// Whether the commands in flight are on connections shared by clients.
    pub(in crate::worker) fn is_on_shared_lane(&self) -> bool {
        matches!(self.lane, Lane::Main | Lane::Slow | Lane::Replica)
    }

    /// Whether commands are in flight on `lane`.
    pub(in crate::worker) fn are_under_way_on(&self, lane: Lane) -> bool {
        self.lane == lane && self.in_flight() > 0
    }

    /// Sets the mode of CLIENT REPLY and returns the previous one.
    pub(in crate::worker) fn set_mode(&mut self, mode: ReplyMode) -> ReplyMode {
        std::mem::replace(&mut self.mode, mode)
    }

    /// CLIENT REPLY SKIP. Without effect if replies are off: it would turn them on again.
    pub(in crate::worker) fn skip_next(&mut self) {
        if self.mode == ReplyMode::On {
            self.mode = ReplyMode::SkipNext;
        }
    }

    /// Ends CLIENT REPLY OFF, as RESET does. A pending SKIP is still applied, as by a server.
    pub(in crate::worker) fn reset_mode(&mut self) {
        if self.mode == ReplyMode::Off {
            self.mode = ReplyMode::On;
        }
    }

    /// Records that a command in flight may change state at a node.
    pub(in crate::worker) fn note_write(&mut self, now_us: u64) {
        self.wrote_us = now_us;
    }

    /// Time of the last command that may have changed state at a node, us. `None`: there was none.
    pub(in crate::worker) fn wrote_us(&self) -> Option<u64> {
        (self.wrote_us > 0).then_some(self.wrote_us)
    }

    /// Bytes parked behind pending replies.
    pub(super) fn parked_bytes(&self) -> usize {
        self.parked.len()
    }

    /// Memory in bytes.
    pub(super) fn memory(&self) -> usize {
        self.parked.capacity() + self.pending.capacity() * size_of::<PendingReply>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_parked_beyond_four_gigabytes_are_those_sent() {
        let counters = WorkerCounters::default();
        let (mut replies, mut out) = (Replies::new(), Vec::new());
        let (first, second) = (replies.owe(0, 0), replies.owe(0, 0));
        // As if this much were parked already. Untouched pages use no memory.
        replies.parked = vec![0; (4 << 30) + 4096];
        replies.parked.truncate((4 << 30) + 8);
        replies.complete(&mut out, second, b"+second\r\n", false, 0, &counters);
        replies.complete(&mut out, first, b"+first\r\n", false, 0, &counters);
        assert_eq!(out.escape_ascii().to_string(), "+first\\r\\n+second\\r\\n");
    }
}
