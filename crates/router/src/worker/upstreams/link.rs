//! A connection to a node: commands to send, and commands in flight, in order.
//!
//! A command is in flight from the moment its bytes are passed to the connection until its reply comes, or until the
//! node has confirmed that the connection is dead. Closing a socket ends nothing: the node executes the commands that
//! it has received. So a link that breaks with commands in flight leaves a [`Zombie`](crate::worker::upstreams::zombies::Zombie), which is
//! removed only by an answered `CLIENT KILL ID` on a newer connection, or by another `run_id`.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use switchyard_policy::ownership::OwnershipStatus;
use switchyard_policy::topology::NodeId;
use switchyard_resp::command::CommandClass;
use switchyard_resp::reply::{ReplyFollower, ReplyScan, ReplyScanner};

use super::Link;
use super::kind::{Kind, Lane, Task};
use crate::metrics::NodeCounters;
use crate::settings::RuntimeSettings;
use crate::slab::Handle;
use crate::tap::Outcome;
use crate::worker::keyed::{CommandSeq, FinishedRequest, Request};
use crate::worker::transport::{self, Received};
use crate::worker::turn::Turn;

/// Start and end of a transaction.
pub(in crate::worker) const MULTI: &[u8] = b"*1\r\n$5\r\nMULTI\r\n";
pub(in crate::worker) const EXEC: &[u8] = b"*1\r\n$4\r\nEXEC\r\n";

/// Unsent bytes of a shared connection above which clients with further commands wait, and below which they continue.
pub(in crate::worker) const UNSENT_HIGH: usize = 8 << 20;
const UNSENT_LOW: usize = UNSENT_HIGH / 2;

/// Unsent bytes of an upload above which reading from the client stops, and below which it continues.
pub(in crate::worker) const UPLOAD_HIGH: usize = 256 << 10;
const UPLOAD_LOW: usize = 64 << 10;

/// Maximum bytes of unanswered requests kept by a shared connection; above it, clients with further commands wait.
const KEPT_MAX: usize = 64 << 20;

/// Maximum size of a reply to the router's own commands, also during the handshake, and without a command.
const SHORT_MAX: usize = 1 << 20;

/// Maximum size of the list of a node's commands.
const LEARN_MAX: usize = 16 << 20;

/// Interval of checks of a connection's memory.
const SHRINK_US: u64 = 1_000_000;

/// Minimum capacity for bytes of requests, and for commands in flight.
const OUT_KEPT: usize = 4 << 10;
const PENDING_KEPT: usize = 64;

/// Receiver of a reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::worker) enum Purpose {
    /// The client, unchanged.
    Client,
    /// A client, after the command was healed once (NOSCRIPT): not again.
    ClientHealed,
    /// A gather, as part `seq`.
    Gather,
    /// None: SELECT between commands for different databases, SCRIPT LOAD before a healed EVALSHA.
    Discarded,
    /// A topic of the worker: subscribes to it.
    Subscribe,
    /// A client's UNSUBSCRIBE: earlier messages have arrived when this is answered. `seq` is the command's number.
    Sync,
    /// CLIENT TRACKING ON on a connection of subscriptions. `seq` is the generation of the prefixes.
    Track,
    /// The list of the node's commands.
    Learn,
    /// MULTI, or a command of a transaction: an error is kept for EXEC. `seq` is 0 for MULTI.
    Queued,
    /// EXEC of a client.
    Exec,
    /// EXEC after the node has refused MULTI: the commands were executed individually.
    ExecWithoutMulti,
    /// WATCH of a client.
    Watch,
    /// WAIT or WAITAOF of a client, at one of its nodes.
    Wait,
    /// The answer to CLIENT UNBLOCK for the connection `who`.
    Unblock,
    /// The answer to the query whether the client on the connection `who` waits at the node; `seq` is the query's
    /// number.
    Look,
    /// The value of a hot copy; `seq` is the fill's number.
    Fill,
    /// PTTL of the key of a hot copy, with the same `seq`.
    FillTtl,
    /// PING on a connection for fills: its reply extends the lease of hot copies.
    Beat,
    /// The answer to CLIENT KILL ID for a broken connection: confirms that its commands have ended. `seq` is the
    /// zombie's number.
    Confirm,
}

/// Whether a command may be sent again after its reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::worker) enum Again {
    Never,
    /// A read: a large reply may be fetched on another connection.
    Reads,
    /// EVALSHA or a relative: a NOSCRIPT reply can be healed.
    Heals,
}

/// A command passed to a connection. There are many: its size is five words.
#[derive(Clone, Copy, Debug)]
pub(in crate::worker) struct Pending {
    /// The client or the gather.
    pub(in crate::worker) who: Handle,
    /// Number of the client's command, or of the gather's part.
    pub(in crate::worker) seq: u32,
    /// Bytes of the request in `out`.
    pub(in crate::worker) len: u32,
    pub(in crate::worker) sent_us: u32,
    /// Low bits of the epoch at sending.
    pub(in crate::worker) epoch: u32,
    pub(in crate::worker) purpose: Purpose,
    pub(in crate::worker) class: u8,
    pub(in crate::worker) again: Again,
    /// May take as long as commands of the slow lane.
    pub(in crate::worker) is_long: bool,
    /// Number for the observers of its end.
    pub(in crate::worker) end: CommandSeq,
    /// Low bits of the generation of cacheable keys for which it has closed gates.
    pub(in crate::worker) cacheable: u32,
}

impl Pending {
    /// A request of the router whose reply is ignored.
    pub(in crate::worker) fn of_ours(turn: &Turn) -> Self {
        Self {
            who: Handle::NONE,
            seq: 0,
            len: 0,
            sent_us: turn.now_us() as u32,
            epoch: turn.routing().topology.epoch() as u32,
            purpose: Purpose::Discarded,
            class: CommandClass::Admin as u8,
            again: Again::Never,
            is_long: false,
            end: CommandSeq::NONE,
            cacheable: turn.cacheable(),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::worker) enum Phase {
    /// No connection; the next attempt is due at this time, us.
    Waiting {
        until_us: u64,
    },
    /// TCP connect in progress.
    Connecting,
    /// TLS handshake in progress.
    Securing,
    /// Connected; the handshake is in progress. No command is sent before its end.
    Handshake,
    Up,
}

/// Handling of the reply at the head of the connection.
#[derive(Clone, Copy, Debug)]
pub(in crate::worker) enum Body {
    /// Collected whole.
    Whole(ReplyScanner),
    /// Passed on to the client in pieces.
    Through(ReplyFollower),
    /// Discarded: it is fetched again on a connection for large values, or has no receiver.
    Skip(ReplyFollower),
}

/// Next part of the received bytes.
#[derive(Debug)]
pub(in crate::worker) enum Arrival {
    /// No complete reply.
    Nothing,
    /// A reply of this length.
    Reply(usize),
    /// The beginning of a reply with at least this size, too large to collect without need.
    Large(usize),
    /// Bytes of a reply that is handled in pieces: whether they are passed on, and whether they are the last.
    Piece { len: usize, passes: bool, is_last: bool },
    /// No reply, or one without a matching command.
    Senseless(String),
}

/// Result of a read.
#[derive(Debug)]
pub(in crate::worker) enum Taken {
    Bytes(usize),
    Nothing,
    /// Reading is paused.
    Paused,
    /// A signal came first.
    Interrupted,
    /// Data before our side of the handshake was done.
    Early,
    Lost(String),
}

impl Link {
    pub(super) fn new(
        node: NodeId,
        lane: Lane,
        resp3: bool,
        database: u32,
        counters: Arc<NodeCounters>,
        now_us: u64,
    ) -> Self {
        counters.mains_down.add(u64::from(lane == Lane::Main));
        Self {
            node,
            lane,
            kind: Kind::of(lane),
            address: None,
            resp3,
            downgraded: false,
            queued: Vec::new(),
            phase: Phase::Waiting { until_us: now_us },
            since_us: now_us,
            failures: 0,
            fd: None,
            tls: None,
            out: Vec::new(),
            acked: 0,
            sent: 0,
            pending: VecDeque::new(),
            expired: 0,
            first_expiry_us: 0,
            input: Vec::new(),
            received_us: now_us,
            body: Body::Whole(ReplyScanner::default()),
            streamed: 0,
            greeting: VecDeque::new(),
            standing: OwnershipStatus::Unmarked,
            client_id: 0,
            run_id: None,
            knows_data: false,
            holdings: None,
            is_loading: false,
            persists: false,
            start_database: database,
            database,
            no_touch: false,
            readable: false,
            hangup: false,
            stale: false,
            retiring: false,
            renewing: false,
            flowed_us: 0,
            writable: false,
            dirty: false,
            paused: false,
            waiters: Vec::new(),
            refused: None,
            no_multi: None,
            idle_since_us: now_us,
            needed: (0, 0),
            shrinks_at_us: now_us + SHRINK_US,
            counters,
        }
    }

    pub(in crate::worker) fn node(&self) -> NodeId {
        self.node
    }

    #[inline]
    pub(in crate::worker) fn lane(&self) -> Lane {
        self.lane
    }

    #[inline]
    pub(in crate::worker) fn phase(&self) -> Phase {
        self.phase
    }

    pub(in crate::worker) fn resp3(&self) -> bool {
        self.resp3
    }

    /// Whether it is for RESP3 clients, but the node does not support it.
    #[inline]
    pub(in crate::worker) fn is_downgraded(&self) -> bool {
        self.downgraded
    }

    /// Process of the node.
    pub(in crate::worker) fn run_id(&self) -> Option<&str> {
        self.run_id.as_deref()
    }

    /// Our client ID at the node.
    pub(in crate::worker) fn client_id(&self) -> u64 {
        self.client_id
    }

    /// Time of the last data from the node, us.
    pub(in crate::worker) fn received_us(&self) -> u64 {
        self.received_us
    }

    /// Reason why the node would refuse a transaction, if it would.
    pub(in crate::worker) fn no_multi(&self) -> Option<&str> {
        self.no_multi.as_deref()
    }

    /// Takes the node's error for a queued command of the current transaction.
    pub(in crate::worker) fn take_refusal(&mut self) -> Option<Box<[u8]>> {
        self.refused.take()
    }

    /// Whether clients wait until fewer bytes are unsent.
    #[inline]
    pub(in crate::worker) fn is_awaited(&self) -> bool {
        !self.waiters.is_empty()
    }

    /// Pauses reading, because the client does not read.
    pub(in crate::worker) fn pause(&mut self) {
        self.paused = true;
    }

    #[inline]
    pub(in crate::worker) fn is_paused(&self) -> bool {
        self.paused
    }

    /// Whether the socket may have more data.
    #[inline]
    pub(in crate::worker) fn may_be_readable(&self) -> bool {
        self.readable
    }

    /// Takes the received part of an incomplete reply, to be extended and returned by [`Self::keep_received`].
    #[inline]
    pub(in crate::worker) fn take_received(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.input)
    }

    #[inline]
    pub(in crate::worker) fn keep_received(&mut self, part: Vec<u8>) {
        self.input = part;
    }

    /// Memory of the received part of a reply, bytes.
    pub(in crate::worker) fn received_memory(&self) -> usize {
        self.input.capacity()
    }

    /// Length of the received part of a reply, bytes.
    pub(in crate::worker) fn received_len(&self) -> usize {
        self.input.len()
    }

    /// Whether the reply at the head is collected whole.
    pub(in crate::worker) fn is_collecting(&self) -> bool {
        matches!(self.body, Body::Whole(_))
    }

    /// Discards the reply at the head.
    pub(in crate::worker) fn skip_body(&mut self) {
        self.body = Body::Skip(ReplyFollower::default());
    }

    /// Passes the reply at the head on in pieces.
    pub(in crate::worker) fn pass_body_on(&mut self) {
        self.body = Body::Through(ReplyFollower::default());
    }

    pub(in crate::worker) fn passes_body_on(&self) -> bool {
        matches!(self.body, Body::Through(_))
    }

    /// Counts an error of the node.
    pub(in crate::worker) fn note_error(&self, error: &[u8]) {
        self.counters.note_error(error);
    }

    /// Time that a command waited for the socket, of the `took_us` until its reply.
    pub(in crate::worker) fn queued_us(&self, sent_us: u32, took_us: u32) -> u32 {
        let flowed = (self.flowed_us as u32).wrapping_sub(sent_us);
        if self.flowed_us > 0 && flowed <= took_us { flowed } else { 0 }
    }

    /// Returns its output and socket if the socket is writable, without TLS.
    #[inline]
    pub(in crate::worker) fn plain_output(&self) -> Option<(BorrowedFd<'_>, &[u8])> {
        let is_open = self.phase == Phase::Up && !self.retiring && self.tls.is_none();
        let fd = self.fd.as_ref().filter(|_| is_open && self.writable && self.unsent() > 0)?;
        Some((fd.as_fd(), self.to_send()))
    }

    /// After the handshake.
    pub(super) fn comes_up(&mut self) {
        self.phase = Phase::Up;
        self.counters.connections.add(1);
        self.counters.mains_down.sub(u64::from(self.lane == Lane::Main));
    }

    /// After the end of a connection that was up.
    pub(super) fn goes_down(&self) {
        self.counters.connections.sub(1);
        self.counters.mains_down.add(u64::from(self.lane == Lane::Main));
    }

    /// For a main connection that is down and not retried.
    pub(super) fn is_forgotten(&self) {
        self.counters.mains_down.sub(u64::from(self.lane == Lane::Main));
    }

    /// Whether a command may be passed to it: the link is up, or no attempt has failed since it was last up.
    #[inline]
    pub(in crate::worker) fn takes_commands(&self) -> bool {
        self.phase == Phase::Up || self.failures == 0
    }

    /// Bytes waiting for the socket.
    #[inline]
    pub(in crate::worker) fn unsent(&self) -> usize {
        self.out.len() - self.sent + self.tls.as_ref().map_or(0, |tls| usize::from(tls.has_unsent()))
    }

    /// Whether less than `high` bytes are unsent, and the unanswered requests leave room for more.
    #[inline]
    pub(in crate::worker) fn has_room(&self, high: usize) -> bool {
        self.unsent() < high && self.out.len() - self.acked < KEPT_MAX
    }

    /// Maximum size of a collected reply, if not set by its client: a node that sends without end is disconnected.
    pub(super) fn reply_max(&self, live: &RuntimeSettings) -> usize {
        if self.phase != Phase::Up {
            return SHORT_MAX;
        }
        if self.lane == Lane::Pubsub {
            // A message: as long as an argument, with its channel and pattern.
            return live.argument_max.saturating_add(SHORT_MAX);
        }
        match self.pending.front().map(|pending| pending.purpose) {
            Some(Purpose::Learn) => LEARN_MAX,
            // A reply without a receiver is discarded in pieces.
            Some(Purpose::Discarded | Purpose::Queued | Purpose::Fill) => usize::MAX,
            Some(
                Purpose::Client | Purpose::ClientHealed | Purpose::Gather | Purpose::Exec | Purpose::ExecWithoutMulti,
            ) => usize::MAX,
            _ => SHORT_MAX,
        }
    }

    /// Records that the socket has accepted `count` bytes of `out`.
    #[inline]
    pub(in crate::worker) fn note_sent(&mut self, count: usize) {
        self.counters.bytes_sent.add(count as u64);
        self.sent += count;
        if self.unsent() > 0 {
            self.writable = false;
        }
    }

    /// The number of bytes accepted by the socket is unknown: all count as sent, because the node may execute them.
    pub(in crate::worker) fn note_all_sent(&mut self) {
        self.sent = self.out.len();
    }

    /// Appends a command, after a SELECT if its database differs from that of the previous one.
    #[inline]
    pub(in crate::worker) fn push(&mut self, request: Request<'_>) {
        let (bytes, database, pending) = request.into_parts();
        if self.database != database {
            self.push_select(database, pending);
        }
        self.out.extend_from_slice(bytes);
        self.pending.push_back(Pending { len: bytes.len() as u32, ..pending });
        self.counters.in_flight.add(1);
        self.counters.classes[pending.class as usize].requests.add(1);
    }

    /// Sets CLIENT NO-TOUCH for a client. Call it before its command is pushed.
    #[inline]
    pub(in crate::worker) fn touch_as(&mut self, no_touch: bool, like: Pending) {
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
        switchyard_resp::encode::command(&mut self.out, args.iter().copied());
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

    /// Appends a part of the last pushed request, which is being uploaded. `is_end`: the last part.
    pub(in crate::worker) fn push_more(&mut self, bytes: &[u8], is_end: bool, now_us: u64) {
        debug_assert_eq!(self.task(), Task::Uploading, "a whole request is pushed");
        self.out.extend_from_slice(bytes);
        if is_end {
            self.set_task(Task::Nothing);
            if let Some(pending) = self.pending.back_mut() {
                pending.sent_us = now_us as u32;
            }
        }
    }

    /// Removes the oldest command, after its reply.
    #[inline]
    pub(in crate::worker) fn answered(&mut self, now_us: u64, is_error: bool) -> Option<FinishedRequest> {
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
    pub(in crate::worker) fn taken_out(&mut self) -> Option<FinishedRequest> {
        let pending = self.pending.pop_front()?;
        self.counters.in_flight.sub(1);
        if !self.lane.is_exclusive() {
            self.acked += pending.len as usize;
        }
        let is_expired = self.expired > 0;
        self.expired -= usize::from(is_expired);
        self.trim();
        Some(FinishedRequest::new(pending, Outcome::Certain, is_expired))
    }

    /// Removes all commands of a broken connection, and returns them. The node may execute the first `in_flight` of
    /// them.
    pub(super) fn lose(&mut self, in_flight: usize) -> impl Iterator<Item = FinishedRequest> + use<> {
        let expired = std::mem::take(&mut self.expired);
        let pending = std::mem::take(&mut self.pending);
        self.counters.in_flight.sub(pending.len() as u64);
        if self.task() == Task::Uploading {
            self.set_task(Task::Nothing);
        }
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

    /// Whether only a request that is still being uploaded is pending.
    pub(in crate::worker) fn is_only_uploading(&self) -> bool {
        self.task() == Task::Uploading && self.pending.len() == 1
    }

    /// The last pushed command.
    pub(in crate::worker) fn last_mut(&mut self) -> Option<&mut Pending> {
        self.pending.back_mut()
    }

    /// Discards the reply to the oldest command, because its client has been answered, or will be in another way.
    pub(super) fn disown_head(&mut self) {
        if let Some(pending) = self.pending.front_mut() {
            pending.purpose = Purpose::Discarded;
        }
    }

    /// Handles a refused MULTI at the head: the next EXEC belongs to this transaction.
    pub(super) fn is_not_queued(&mut self, why: &[u8]) {
        self.no_multi = Some(String::from_utf8_lossy(why).into());
        if let Some(exec) = self.pending.iter_mut().find(|pending| pending.purpose == Purpose::Exec) {
            exec.purpose = Purpose::ExecWithoutMulti;
        }
    }

    /// Moves pending commands to this epoch.
    pub(in crate::worker) fn restamp(&mut self, epoch: u32) {
        self.pending.iter_mut().for_each(|pending| pending.epoch = epoch);
    }

    /// Whether a timeout was reported for the oldest command.
    #[inline]
    pub(in crate::worker) fn is_head_expired(&self) -> bool {
        self.expired > 0
    }

    /// Marks the commands that have waited for longer than `timeout_us`, and returns them, for their timeouts to be
    /// reported. They stay pending.
    pub(super) fn expire(&mut self, now_us: u64, timeout_us: u32) -> Vec<Pending> {
        let sent_whole = self.pending.len() - usize::from(self.task() == Task::Uploading && !self.pending.is_empty());
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

    /// Bytes that wait for the socket and are not encrypted by TLS yet.
    #[inline]
    pub(in crate::worker) fn to_send(&self) -> &[u8] {
        &self.out[self.sent..]
    }

    /// Sends as much as the socket accepts. Returns the clients that waited for room, if there is some again.
    #[inline]
    pub(super) fn flush(&mut self) -> Result<Vec<Handle>, rustix::io::Errno> {
        self.dirty = false;
        if self.phase != Phase::Up || self.retiring {
            return Ok(Vec::new());
        }
        self.send()?;
        let low = if self.lane == Lane::Large { UPLOAD_LOW } else { UNSENT_LOW };
        let has_room = !self.waiters.is_empty() && self.has_room(low);
        Ok(if has_room { std::mem::take(&mut self.waiters) } else { Vec::new() })
    }

    #[inline]
    fn send(&mut self) -> Result<(), rustix::io::Errno> {
        while self.unsent() > 0 && self.writable {
            let Some(fd) = &self.fd else { break };
            match transport::send(fd, &mut self.tls, &self.out[self.sent..]) {
                Ok(count) => self.note_sent(count),
                Err(rustix::io::Errno::AGAIN) => self.writable = false,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
        if self.lane.is_exclusive() && self.sent > 0 {
            // No part of a large request is kept: it is never sent again.
            self.out.drain(..self.sent);
            self.sent = 0;
        }
        Ok(())
    }

    /// Reads once.
    #[inline]
    pub(in crate::worker) fn receive(&mut self, buffer: &mut [u8], now_us: u64) -> Taken {
        self.readable = true;
        let Some(fd) = self.fd.as_ref().filter(|_| !self.paused) else { return Taken::Paused };
        if !matches!(self.phase, Phase::Up | Phase::Handshake | Phase::Securing) {
            return Taken::Paused;
        }
        match transport::receive(fd, &mut self.tls, buffer) {
            Ok(Received { count: 0, .. }) => {
                self.counters.ended.add(1);
                Taken::Lost("the node closed the connection".to_owned())
            }
            Ok(Received { count, more }) => {
                self.counters.bytes_received.add(count as u64);
                self.received_us = now_us;
                self.readable = more || self.hangup;
                if self.phase == Phase::Securing { Taken::Early } else { Taken::Bytes(count) }
            }
            Err(rustix::io::Errno::AGAIN) => {
                self.readable = false;
                Taken::Nothing
            }
            Err(rustix::io::Errno::INTR) => Taken::Interrupted,
            Err(error) => {
                let why = self.tls.as_ref().and_then(|tls| tls.failure()).map(|why| format!("TLS: {why}"));
                Taken::Lost(why.unwrap_or_else(|| std::io::Error::from(error).to_string()))
            }
        }
    }

    /// Returns the next part of these received bytes.
    #[inline]
    pub(in crate::worker) fn arrival(&mut self, bytes: &[u8], live: &RuntimeSettings) -> Arrival {
        let passes = matches!(self.body, Body::Through(_));
        match &mut self.body {
            Body::Whole(scanner) => match scanner.scan(bytes) {
                Ok(ReplyScan::Complete(len)) => Arrival::Reply(len),
                Ok(ReplyScan::Incomplete(need)) => {
                    let (size, max) = (need.max(bytes.len()), self.reply_max(live));
                    if size > max {
                        Arrival::Senseless(format!("it sends more than {max} bytes instead of a short reply"))
                    } else if size > live.large_value {
                        Arrival::Large(size)
                    } else {
                        Arrival::Nothing
                    }
                }
                Err(error) => Arrival::Senseless(error.to_string()),
            },
            Body::Through(follower) | Body::Skip(follower) => match follower.follow(bytes) {
                Ok((len, is_last)) => {
                    self.streamed += len as u64;
                    Arrival::Piece { len, passes, is_last }
                }
                Err(error) => Arrival::Senseless(error.to_string()),
            },
        }
    }

    /// Starts the next reply.
    pub(super) fn next_body(&mut self) {
        (self.body, self.streamed) = (Body::Whole(ReplyScanner::default()), 0);
    }

    /// Removes the oldest command, after a reply in pieces.
    pub(in crate::worker) fn answered_in_pieces(&mut self, now_us: u64) -> Option<FinishedRequest> {
        let streamed = self.streamed;
        self.next_body();
        self.answered(now_us, false).map(|ended| ended.streamed(streamed))
    }

    /// Whether all sent commands are answered.
    pub(super) fn is_quiet(&self) -> bool {
        self.sent <= self.acked
    }

    /// Memory of requests, bytes.
    pub(in crate::worker) fn request_memory(&self) -> usize {
        self.out.capacity()
    }

    /// Releases the memory of answered requests.
    #[inline]
    fn trim(&mut self) {
        if self.lane.is_exclusive() {
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

    /// Makes pending commands hold gates, like new ones.
    pub(in crate::worker) fn held_by(&mut self, end: CommandSeq, armed: u32) {
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

    /// Number of commands at the front of `pending` that the node may execute although the connection ends now. An
    /// incomplete upload is never executed; it is the last one, and all before it are complete.
    pub(super) fn may_be_executed(&self) -> usize {
        if self.phase != Phase::Up {
            0
        } else if self.lane.is_exclusive() {
            self.pending.len() - usize::from(self.task() == Task::Uploading && !self.pending.is_empty())
        } else if self.sent > self.acked {
            self.pending.len()
        } else {
            0
        }
    }

    /// The request of the oldest command in flight.
    pub(in crate::worker) fn head_request(&self) -> &[u8] {
        let len = self.pending.front().map_or(0, |p| p.len as usize);
        self.out.get(self.acked..self.acked + len).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PENDING: Pending = Pending {
        who: Handle::NONE,
        seq: 0,
        len: 0,
        sent_us: 0,
        epoch: 0,
        purpose: Purpose::Discarded,
        class: 0,
        again: Again::Never,
        is_long: false,
        end: CommandSeq::NONE,
        cacheable: 0,
    };

    fn link(lane: Lane) -> Link {
        let mut link = Link::new(NodeId(0), lane, false, 0, Arc::default(), 0);
        link.phase = Phase::Up;
        link
    }

    pub(in crate::worker) fn pending(purpose: Purpose) -> Pending {
        Pending { purpose, ..PENDING }
    }

    #[test]
    fn a_link_takes_no_more_while_it_keeps_much_that_is_not_answered() {
        let mut link = link(Lane::Main);
        let request = vec![b'x'; 1 << 20];
        let mut sent = 0;
        while link.has_room(8 << 20) {
            link.push(Request::of_ours(&request, 0, pending(Purpose::Client)));
            link.note_sent(request.len());
            sent += 1;
            assert!(sent <= 64, "all is sent, and nothing is answered");
        }
        assert_eq!(sent, 64);
        assert!(link.answered(0, false).is_some());
        assert!(link.has_room(8 << 20));
    }

    #[test]
    fn commands_possibly_sent_may_be_executed() {
        let mut link = link(Lane::Main);
        link.push(Request::of_ours(b"INCR k", 0, pending(Purpose::Client)));
        assert_eq!(link.may_be_executed(), 0);
        link.note_all_sent();
        assert_eq!(link.may_be_executed(), 1);
    }

    #[test]
    fn a_node_is_believed_only_short_answers_where_no_client_has_asked() {
        let live = RuntimeSettings::default();
        let mut greeted = link(Lane::Main);
        assert_eq!(greeted.reply_max(&live), SHORT_MAX, "no request is pending");
        let answers = [
            (Purpose::Client, usize::MAX),
            (Purpose::Gather, usize::MAX),
            (Purpose::Learn, LEARN_MAX),
            (Purpose::Watch, SHORT_MAX),
            (Purpose::Confirm, SHORT_MAX),
        ];
        for (purpose, max) in answers {
            greeted.pending = [pending(purpose)].into();
            assert_eq!(greeted.reply_max(&live), max, "{purpose:?}");
        }
        greeted.phase = Phase::Handshake;
        assert_eq!(greeted.reply_max(&live), SHORT_MAX);
        assert_eq!(link(Lane::Pubsub).reply_max(&live), live.argument_max + SHORT_MAX);
    }

    #[test]
    fn no_touch_clients_leave_no_access_time_and_others_do() {
        let mut link = Link::new(NodeId(0), Lane::Main, false, 0, Arc::default(), 0);
        for (no_touch, request) in [(false, "a"), (true, "b"), (true, "c"), (false, "d")] {
            link.touch_as(no_touch, PENDING);
            link.push(Request::of_ours(request.as_bytes(), 0, PENDING));
        }
        let on = "*3\r\n$6\r\nCLIENT\r\n$8\r\nNO-TOUCH\r\n$2\r\nON\r\n";
        let off = "*3\r\n$6\r\nCLIENT\r\n$8\r\nNO-TOUCH\r\n$3\r\nOFF\r\n";
        assert_eq!(String::from_utf8_lossy(&link.out), format!("a{on}bc{off}d"));
        assert_eq!(link.pending.iter().map(|p| p.len as usize).collect::<Vec<_>>(), [1, on.len(), 1, 1, off.len(), 1]);
    }

    #[test]
    fn the_memory_of_a_burst_is_given_back() {
        let mut link = Link::new(NodeId(0), Lane::Main, false, 0, Arc::default(), 0);
        let burst = |link: &mut Link, commands: usize| {
            (0..commands).for_each(|_| link.push(Request::of_ours(&[b'x'; 100], 0, PENDING)));
            link.shrink(1);
            link.sent = link.out.len();
            (0..commands).for_each(|_| assert!(link.answered(0, false).is_some()));
        };
        burst(&mut link, 10_000);
        // Steady use keeps its memory.
        for second in 1..5 {
            burst(&mut link, 10_000);
            link.shrink(second * SHRINK_US);
            assert!(link.out.capacity() >= 1_000_000 && link.pending.capacity() >= 10_000);
        }
        for second in 5..8 {
            burst(&mut link, 10);
            link.shrink(second * SHRINK_US);
        }
        let kept = (link.out.capacity(), link.pending.capacity());
        assert!(kept.0 <= OUT_KEPT && kept.1 <= PENDING_KEPT, "{kept:?}");
    }
}
