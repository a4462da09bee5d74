//! Requests on a connection: bytes for the socket, and the commands in flight, in order.

use std::collections::VecDeque;
use std::sync::Arc;

use switchyard_resp::encode;

use super::pending::{Again, EXEC, MULTI, Pending, Purpose};
use crate::metrics::NodeCounters;
use crate::slab::Handle;
use crate::tap::Outcome;
use crate::worker::command::CommandSeq;
use crate::worker::keyed::{FinishedRequest, Request};

/// Maximum bytes of unanswered requests kept by a shared connection; above it, clients with further commands wait.
const KEPT_MAX: usize = 64 << 20;

/// Interval of checks of a connection's memory.
pub(super) const SHRINK_US: u64 = 1_000_000;

/// Minimum capacity for bytes of requests, and for commands in flight.
const OUT_KEPT: usize = 4 << 10;
const PENDING_KEPT: usize = 64;

/// Requests that are unsent or unanswered.
#[derive(Debug)]
pub(in crate::worker) struct Requests {
    /// Requests from the oldest unanswered one on (shared lanes keep them until their reply comes, to repeat reads and
    /// heal scripts); `acked..sent` is in flight, `sent..` waits for the socket.
    out: Vec<u8>,
    acked: usize,
    sent: usize,
    /// Exclusive connections keep no part of a request that is sent.
    keeps_sent: bool,
    pending: VecDeque<Pending>,
    /// Number of commands at the front of `pending` that were already answered with a timeout.
    expired: usize,
    first_expiry_us: u64,
    /// Database selected by the handshake, as expected by the first command in `out`. Stored, because commands may be
    /// waiting in `out` before there is a connection, and a reload may change the settings in the meantime.
    start_database: u32,
    /// Database selected at the end of `out`.
    database: u32,
    /// CLIENT NO-TOUCH at the end of `out`. Off on a new connection.
    no_touch: bool,
    /// Maximum bytes of `out`, and commands of `pending`, since memory was last released; and the time of the next
    /// release.
    needed: (usize, usize),
    shrinks_at_us: u64,
    counters: Arc<NodeCounters>,
}

impl Requests {
    pub(super) fn new(database: u32, keeps_sent: bool, counters: Arc<NodeCounters>, now_us: u64) -> Self {
        Self {
            out: Vec::new(),
            acked: 0,
            sent: 0,
            keeps_sent,
            pending: VecDeque::new(),
            expired: 0,
            first_expiry_us: 0,
            start_database: database,
            database,
            no_touch: false,
            needed: (0, 0),
            shrinks_at_us: now_us + SHRINK_US,
            counters,
        }
    }

    pub(super) fn counters(&self) -> &NodeCounters {
        &self.counters
    }

    // ---- bytes ----

    /// Bytes that wait for the socket and are not encrypted by TLS yet.
    #[inline]
    pub(in crate::worker) fn to_send(&self) -> &[u8] {
        &self.out[self.sent..]
    }

    /// Whether the unanswered requests leave room for more.
    #[inline]
    pub(super) fn has_room(&self) -> bool {
        self.out.len() - self.acked < KEPT_MAX
    }

    /// Records that the socket has accepted `count` bytes of `out`.
    #[inline]
    pub(super) fn note_sent(&mut self, count: usize) {
        self.counters.bytes_sent.add(count as u64);
        self.sent += count;
    }

    /// The number of bytes accepted by the socket is unknown: all count as sent, because the node may execute them.
    pub(super) fn note_all_sent(&mut self) {
        self.sent = self.out.len();
    }

    /// Discards sent bytes that are not kept: no part of a large request is sent again.
    #[inline]
    pub(super) fn discard_sent(&mut self) {
        if !self.keeps_sent && self.sent > 0 {
            self.out.drain(..self.sent);
            self.sent = 0;
        }
    }

    /// Whether all sent commands are answered.
    pub(super) fn is_quiet(&self) -> bool {
        self.sent <= self.acked
    }

    /// Memory of requests, bytes.
    pub(in crate::worker) fn memory(&self) -> usize {
        self.out.capacity()
    }

    /// Releases the memory of answered requests.
    #[inline]
    fn trim(&mut self) {
        if !self.keeps_sent {
            return; // keeps nothing once it is sent
        }
        if self.acked == self.out.len() {
            self.out.clear();
            self.acked = 0;
            self.sent = 0;
        } else if self.acked > 256 << 10 && self.acked * 2 > self.out.len() {
            self.out.drain(..self.acked);
            self.sent -= self.acked;
            self.acked = 0;
        }
    }

    /// Releases memory after a burst. Call it at every tick: the recent maximum decides, so that a connection in steady
    /// use keeps its memory.
    pub(super) fn shrink(&mut self, now_us: u64) {
        self.needed.0 = self.needed.0.max(self.out.len());
        self.needed.1 = self.needed.1.max(self.pending.len());
        if now_us < self.shrinks_at_us {
            return;
        }
        self.shrinks_at_us = now_us + SHRINK_US;
        let (out, pending) = std::mem::take(&mut self.needed);
        if self.out.capacity() > OUT_KEPT && self.out.capacity() > 4 * out {
            self.out.shrink_to(2 * out);
        }
        if self.pending.capacity() > PENDING_KEPT && self.pending.capacity() > 4 * pending {
            self.pending.shrink_to(2 * pending);
        }
    }

    // ---- settings of the connection ----

    /// Database that the handshake selects.
    pub(super) fn start_database(&self) -> u32 {
        self.start_database
    }

    /// Database that the next command finds selected.
    pub(in crate::worker) fn database(&self) -> u32 {
        self.database
    }

    /// Expects a new connection in this database.
    pub(super) fn restart(&mut self, database: u32) {
        self.start_database = database;
        self.database = database;
        self.no_touch = false;
    }

    /// Expects that a new connection begins in the state of this one. Later commands are sent there.
    pub(super) fn continue_on_another(&mut self) {
        self.start_database = self.database;
        self.no_touch = false;
    }

    /// Sets CLIENT NO-TOUCH for a client. Call it before its command is pushed.
    #[inline]
    pub(super) fn touch_as(&mut self, no_touch: bool, like: Pending) {
        if self.no_touch != no_touch {
            self.no_touch = no_touch;
            self.push_setting(&[b"CLIENT", b"NO-TOUCH", if no_touch { b"ON" } else { b"OFF" }], like);
        }
    }

    #[cold]
    fn push_select(&mut self, database: u32, like: Pending) {
        self.push_setting(&[b"SELECT", database.to_string().as_bytes()], like);
        self.database = database;
    }

    /// Adds a command of the router between those of clients, whose settings differ.
    #[cold]
    fn push_setting(&mut self, args: &[&[u8]], like: Pending) {
        let before = self.out.len();
        encode::command(&mut self.out, args.iter().copied());
        let len = (self.out.len() - before) as u32;
        self.pending.push_back(Pending {
            who: Handle::NONE,
            seq: 0,
            len,
            purpose: Purpose::Discarded,
            again: Again::Never,
            is_long: false,
            end: CommandSeq::NONE,
            ..like
        });
        self.counters.in_flight.add(1);
    }

    // ---- commands ----

    /// Appends a command, after a SELECT if its database differs from that of the previous one.
    #[inline]
    pub(super) fn push(&mut self, request: Request<'_>) {
        let (bytes, database, pending) = request.into_parts();
        if self.database != database {
            self.push_select(database, pending);
        }
        self.out.extend_from_slice(bytes);
        self.pending.push_back(Pending { len: bytes.len() as u32, ..pending });
        self.counters.in_flight.add(1);
        self.counters.classes[pending.class as usize].requests.add(1);
    }

    /// Appends a part of the last pushed request. `is_end`: the last part.
    pub(super) fn extend(&mut self, bytes: &[u8], is_end: bool, now_us: u64) {
        self.out.extend_from_slice(bytes);
        if is_end && let Some(pending) = self.pending.back_mut() {
            pending.sent_us = now_us as u32;
        }
    }

    /// Removes the oldest command, after its reply.
    #[inline]
    pub(super) fn answered(&mut self, now_us: u64, is_error: bool) -> Option<FinishedRequest> {
        let pending = self.pending.front()?;
        let class = &self.counters.classes[pending.class as usize];
        class.upstream.record(u64::from((now_us as u32).wrapping_sub(pending.sent_us)));
        if is_error {
            class.errors.add(1);
        }
        self.taken_out()
    }

    /// Removes the oldest command without counting its reply: it is sent again, or its wait was ended by the router.
    #[inline]
    pub(super) fn taken_out(&mut self) -> Option<FinishedRequest> {
        let pending = self.pending.pop_front()?;
        self.counters.in_flight.sub(1);
        if self.keeps_sent {
            self.acked += pending.len as usize;
            self.sent = self.sent.max(self.acked); // see `is_head_unsent`
        }
        let is_expired = self.expired > 0;
        self.expired -= usize::from(is_expired);
        self.trim();
        Some(FinishedRequest::new(pending, Outcome::Certain, is_expired))
    }

    /// Returns the bytes of each pending command of a client, outside of transactions; `None` for the others.
    pub(super) fn of_clients(&self) -> Vec<Option<Box<[u8]>>> {
        let mut at = self.acked;
        let bytes = |pending: &Pending| {
            let from = at;
            at += pending.len as usize;
            let is_plain = matches!(pending.purpose, Purpose::Client | Purpose::ClientHealed | Purpose::Gather);
            self.out.get(from..at).filter(|bytes| is_plain && *bytes != EXEC).map(Box::from)
        };
        self.pending.iter().map(bytes).collect()
    }

    /// Removes all commands of a broken connection, and returns them. The node may execute the first `in_flight` of
    /// them.
    pub(super) fn lose(&mut self, in_flight: usize) -> impl Iterator<Item = FinishedRequest> + use<> {
        let expired = std::mem::take(&mut self.expired);
        let pending = std::mem::take(&mut self.pending);
        self.counters.in_flight.sub(pending.len() as u64);
        self.out = Vec::new();
        self.acked = 0;
        self.sent = 0;
        pending.into_iter().enumerate().map(move |(place, pending)| {
            FinishedRequest::new(
                pending,
                if place < in_flight { Outcome::Doubtful } else { Outcome::Never },
                place < expired,
            )
        })
    }

    /// Removes unsent transactions, because the node refuses them.
    pub(super) fn take_transactions(&mut self) -> Vec<FinishedRequest> {
        let (requests, pending) = (std::mem::take(&mut self.out), std::mem::take(&mut self.pending));
        let (mut at, mut in_multi, mut told) = (self.acked, false, 0);
        (self.acked, self.sent) = (0, 0);
        let mut refused = Vec::new();
        for (place, pending) in pending.into_iter().enumerate() {
            let request = &requests[at..at + pending.len as usize];
            at += request.len();
            in_multi |= request == MULTI;
            if !in_multi {
                self.out.extend_from_slice(request);
                self.pending.push_back(pending);
                continue;
            }
            self.counters.in_flight.sub(1);
            let is_expired = place < self.expired;
            told += usize::from(is_expired);
            refused.push(FinishedRequest::new(pending, Outcome::Never, is_expired));
            in_multi = request != EXEC;
        }
        self.expired -= told;
        refused
    }

    /// Whether no command is pending.
    #[inline]
    pub(in crate::worker) fn is_idle(&self) -> bool {
        self.pending.is_empty()
    }

    /// The pending commands, oldest first.
    pub(in crate::worker) fn pending(&self) -> impl DoubleEndedIterator<Item = &Pending> + ExactSizeIterator {
        self.pending.iter()
    }

    /// The oldest pending command.
    #[inline]
    pub(in crate::worker) fn head(&self) -> Option<&Pending> {
        self.pending.front()
    }

    /// Whether a part of the oldest command is not sent. A reply to it is a protocol error, such as a too long argument,
    /// and the node discards whatever follows. So the connection must break after this reply.
    #[inline]
    pub(in crate::worker) fn is_head_unsent(&self) -> bool {
        self.keeps_sent && self.pending.front().is_some_and(|head| self.sent < self.acked + head.len as usize)
    }

    /// The request of the oldest command in flight.
    pub(in crate::worker) fn head_request(&self) -> &[u8] {
        let len = self.pending.front().map_or(0, |p| p.len as usize);
        self.out.get(self.acked..self.acked + len).unwrap_or_default()
    }

    /// The last pushed command.
    pub(super) fn last_mut(&mut self) -> Option<&mut Pending> {
        self.pending.back_mut()
    }

    /// Discards the reply to the oldest command, because its client has been answered, or will be in another way.
    pub(super) fn disown_head(&mut self) {
        if let Some(pending) = self.pending.front_mut() {
            pending.purpose = Purpose::Discarded;
        }
    }

    /// Handles a refused MULTI at the head: the next EXEC belongs to this transaction.
    pub(super) fn expect_exec_without_multi(&mut self) {
        if let Some(exec) = self.pending.iter_mut().find(|pending| pending.purpose == Purpose::Exec) {
            exec.purpose = Purpose::ExecWithoutMulti;
        }
    }

    /// Moves pending commands to this epoch.
    pub(super) fn restamp(&mut self, epoch: u32) {
        self.pending.iter_mut().for_each(|pending| pending.epoch = epoch);
    }

    /// Makes pending commands hold gates, like new ones.
    pub(super) fn held_by(&mut self, end: CommandSeq, armed: u32) {
        self.pending.iter_mut().for_each(|pending| pending.cacheable = armed);
        self.pending.back_mut().into_iter().for_each(|pending| pending.end = end);
    }

    /// Low bits of the lowest epoch of the pending commands.
    pub(in crate::worker) fn oldest_epoch(&self) -> Option<u32> {
        let first = self.pending.front()?.epoch;
        // Compared as distances, because the low bits wrap.
        let least = self.pending.iter().map(|p| p.epoch.wrapping_sub(first) as i32).min().unwrap_or(0);
        Some(first.wrapping_add(least as u32))
    }

    // ---- timeouts ----

    /// Whether a timeout was reported for the oldest command.
    #[inline]
    pub(in crate::worker) fn is_head_expired(&self) -> bool {
        self.expired > 0
    }

    /// Marks the commands that have waited for longer than `timeout_us`, and returns them, for their timeouts to be
    /// reported. They stay pending. `is_uploading`: the timeout of the last one has not started.
    pub(super) fn expire(&mut self, now_us: u64, timeout_us: u32, is_uploading: bool) -> Vec<Pending> {
        let sent_whole = self.complete(is_uploading);
        let mut late = Vec::new();
        while let Some(pending) = self.pending.get(self.expired)
            && self.expired < sent_whole
            && (now_us as u32).wrapping_sub(pending.sent_us) > timeout_us
        {
            if self.expired == 0 {
                self.first_expiry_us = now_us;
            }
            late.push(*pending);
            self.expired += 1;
            self.counters.timeouts.add(1);
        }
        late
    }

    /// Time since when there was no reply to an expired command, us; `None`: there is none.
    pub(super) fn silent_since_us(&self) -> Option<u64> {
        (self.expired > 0).then_some(self.first_expiry_us)
    }

    /// Number of pending commands, without the last one if it is being uploaded.
    fn complete(&self, is_uploading: bool) -> usize {
        self.pending.len() - usize::from(is_uploading && !self.pending.is_empty())
    }

    /// Number of commands at the front of `pending` that the node may execute although the connection ends now. An
    /// incomplete upload is never executed; it is the last one, and all before it are complete.
    pub(super) fn may_be_executed(&self, is_uploading: bool) -> usize {
        if !self.keeps_sent {
            self.complete(is_uploading)
        } else if self.sent > self.acked {
            self.pending.len()
        } else {
            0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::upstreams::link::tests::pending;

    #[test]
    fn no_touch_clients_leave_no_access_time_and_others_do() {
        let mut requests = Requests::new(0, true, Arc::default(), 0);
        for (no_touch, request) in [(false, "a"), (true, "b"), (true, "c"), (false, "d")] {
            requests.touch_as(no_touch, pending(Purpose::Discarded));
            requests.push(Request::of_ours(request.as_bytes(), 0, pending(Purpose::Discarded)));
        }
        let on = "*3\r\n$6\r\nCLIENT\r\n$8\r\nNO-TOUCH\r\n$2\r\nON\r\n";
        let off = "*3\r\n$6\r\nCLIENT\r\n$8\r\nNO-TOUCH\r\n$3\r\nOFF\r\n";
        assert_eq!(String::from_utf8_lossy(&requests.out), format!("a{on}bc{off}d"));
        assert_eq!(
            requests.pending.iter().map(|p| p.len as usize).collect::<Vec<_>>(),
            [1, on.len(), 1, 1, off.len(), 1]
        );
    }

    #[test]
    fn a_reply_before_the_end_of_its_request_leaves_the_next_ones_unsent() {
        let mut requests = Requests::new(0, true, Arc::default(), 0);
        requests.push(Request::of_ours(&[b'x'; 600_000], 0, pending(Purpose::Client)));
        requests.push(Request::of_ours(b"next", 0, pending(Purpose::Client)));
        requests.note_sent(1000);
        assert!(requests.is_head_unsent());
        assert!(requests.answered(0, true).is_some());
        assert_eq!(requests.to_send(), b"next");
        assert_eq!(
            requests.lose(requests.may_be_executed(false)).map(|r| r.outcome()).collect::<Vec<_>>(),
            [Outcome::Never]
        );
        requests.push(Request::of_ours(b"last", 0, pending(Purpose::Client)));
        requests.note_sent(1);
        assert!(requests.is_head_unsent());
        requests.note_sent(3);
        assert!(!requests.is_head_unsent());
    }

    #[test]
    fn the_memory_of_a_burst_is_given_back() {
        let mut requests = Requests::new(0, true, Arc::default(), 0);
        let burst = |requests: &mut Requests, commands: usize| {
            (0..commands).for_each(|_| requests.push(Request::of_ours(&[b'x'; 100], 0, pending(Purpose::Discarded))));
            requests.shrink(1);
            requests.sent = requests.out.len();
            (0..commands).for_each(|_| assert!(requests.answered(0, false).is_some()));
        };
        burst(&mut requests, 10_000);
        // Steady use keeps its memory.
        for second in 1..5 {
            burst(&mut requests, 10_000);
            requests.shrink(second * SHRINK_US);
            assert!(requests.out.capacity() >= 1_000_000 && requests.pending.capacity() >= 10_000);
        }
        for second in 5..8 {
            burst(&mut requests, 10);
            requests.shrink(second * SHRINK_US);
        }
        let kept = (requests.out.capacity(), requests.pending.capacity());
        assert!(kept.0 <= OUT_KEPT && kept.1 <= PENDING_KEPT, "{kept:?}");
    }
}
