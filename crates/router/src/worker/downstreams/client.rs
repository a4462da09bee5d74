//! A client's connection: partial input, pending replies in order, and its stall.
//!
//! Independent of nodes: a wait for a node is a [`Stall`] with a reason, and the code that ends the reason finds the
//! clients with this stall. A stalled client is not read, so its waiting data is bounded by its socket.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use rustix::net::RecvFlags;
use switchyard_policy::topology::NodeId;
use switchyard_resp::command::CommandClass;
use switchyard_resp::request::Follower;

use super::Client;
use crate::metrics::WorkerCounters;
use crate::poll::{Poll, Ready, Token};
use crate::reigns::bit_of;
use crate::settings::ListenerSettings;
use crate::settings::Reads;
use crate::slab::Handle;
use crate::users::User;
use crate::worker::pubsub::{Kind, Subscriber};
use crate::worker::tracking::{Tracked, shown_redirect};
use crate::worker::transport;
use crate::worker::transport::{Received, Tls};
use crate::worker::upstreams::kind::Lane;
use crate::worker::wait::Written;

/// Maximum expected bytes of pending replies per client.
const EXPECTED_BYTES_MAX: usize = 8 << 20;

/// Assumed size of a reply before the first one. Otherwise the first pipeline of a client could request gigabytes,
/// which would delay all clients of the shared connection, even after the client has gone.
const REPLY_MEAN_FIRST: usize = 64 << 10;

/// A pending reply, not received or parked behind earlier replies.
#[derive(Clone, Copy, Debug)]
pub(in crate::worker) struct PendingReply {
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

/// Reason why no further command of a client is processed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::worker) enum Stall {
    /// Not stalled.
    None,
    /// The next command needs another lane: wait until the commands in flight are answered.
    Barrier,
    /// Too many commands in flight.
    Pipeline,
    /// Too many bytes of unread replies.
    Output,
    /// Too many unsent bytes on the connection to a node.
    Upstream,
    /// Waiting for an exclusive connection.
    Exclusive,
    /// Blocked at a node.
    Blocked,
    /// CLIENT PAUSE.
    Paused,
    /// The command is unknown, and the query for a node's commands is pending.
    Learning,
    /// A password is being checked.
    Login,
    /// A fill for its key is in progress.
    Fill,
    /// Keys of its command are in transit to another node.
    Keys,
    /// Keys needed together are returning to their slot owner.
    Colocation,
    /// Movers are quiescing, or functions are being copied.
    Quiet,
    /// A reissued blocking command waits for its turn at another node.
    Turn,
    /// A required node is lost. Lasts until its return, or for `nodes.wait-max` after the loss.
    Outage,
}

impl Stall {
    /// Stalls that one event ends for many clients, and that are therefore listed.
    pub(in crate::worker) const LISTED: [Stall; 5] =
        [Stall::Keys, Stall::Colocation, Stall::Quiet, Stall::Turn, Stall::Outage];

    /// Index in `LISTED`.
    pub(super) fn list(self) -> Option<usize> {
        Self::LISTED.iter().position(|stall| *stall == self)
    }
}

/// A large request being streamed from the client to a node.
#[derive(Debug)]
pub(in crate::worker) struct Upload {
    /// `None` after the connection to the node is lost: the rest of the request is discarded.
    pub(in crate::worker) link: Option<Handle>,
    pub(in crate::worker) follower: Follower,
    /// Whether Redis classifies the command as possibly writing.
    pub(in crate::worker) writes: bool,
    /// Hashes of keys that it may write. Their gates are raised again when the upload is complete.
    pub(in crate::worker) keys: Box<[u64]>,
}

/// A read to repeat on a connection for large values.
#[derive(Debug)]
pub(in crate::worker) struct Repeat {
    pub(in crate::worker) node: NodeId,
    /// Low bits of the epoch in which the node was chosen.
    pub(in crate::worker) epoch: u32,
    pub(in crate::worker) seq: u32,
    pub(in crate::worker) class: u8,
    pub(in crate::worker) request: Vec<u8>,
}

/// State of CLIENT REPLY.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::worker) enum ReplyMode {
    On,
    Off,
    SkipNext,
}

/// Fields that are not used on the fast path.
#[derive(Debug)]
pub(in crate::worker) struct Details {
    pub(in crate::worker) id: u64,
    pub(in crate::worker) peer: Option<SocketAddr>,
    pub(in crate::worker) local: Option<SocketAddr>,
    /// Path of the Unix socket of its listener.
    pub(in crate::worker) unix: Option<PathBuf>,
    pub(in crate::worker) name: String,
    pub(in crate::worker) lib_name: String,
    pub(in crate::worker) lib_ver: String,
    pub(in crate::worker) created_us: u64,
    /// Start of the time limit for the login, if one is required.
    pub(in crate::worker) stranger_since_us: u64,
    pub(in crate::worker) no_evict: bool,
}

impl Client {
    pub(in crate::worker) fn new(
        fd: OwnedFd,
        tls: Option<Box<Tls>>,
        user: Arc<User>,
        listener: Arc<ListenerSettings>,
        database: u32,
        now_us: u64,
        details: Box<Details>,
    ) -> Self {
        Self {
            fd,
            tls,
            resp3: false,
            authenticated: false,
            user,
            guard: crate::worker::login::guard::STRANGER,
            verdict: None,
            listener,
            no_touch: false,
            listener_share: None,
            user_share: None,
            charged: 0,
            reply_mode: ReplyMode::On,
            database,
            reads: Reads::Primary,
            behind_since_us: 0,
            input: Vec::new(),
            input_at: 0,
            scanner: None,
            upload: None,
            buffer_large: false,
            out: Vec::new(),
            out_sent: 0,
            pending: VecDeque::new(),
            reply_mean: REPLY_MEAN_FIRST,
            under_way_at: 0,
            first: 0,
            parked: Vec::new(),
            parked_count: 0,
            lane: Lane::Main,
            stall: Stall::None,
            listed: 0,
            stalled_at_us: 0,
            waited: (0, 0),
            held: None,
            in_multi: false,
            written: Written::default(),
            session: None,
            streaming: false,
            repeat: None,
            has_waited_for_fill: false,
            was_counted: false,
            moving: None,
            colocate_wait: None,
            waiting: None,
            quieting: None,
            refusal: None,
            readable: true,
            hangup: false,
            writable: true,
            dirty: false,
            half_closed: false,
            closing: false,
            writes_first: false,
            waited_for_learning: false,
            active_ms: 0,
            last_command: u16::MAX,
            last_used_us: now_us,
            wrote_us: 0,
            gated: false,
            pubsub: None,
            monitor: false,
            tracked: None,
            details,
        }
    }

    /// Returns the read policy if replicas may reply to reads. A client that watches keys reads from the primary: the
    /// data of a replica may be older than the WATCH, and EXEC would succeed although the client has not seen the value
    /// that it replaces. And a replica may still return values that a tracking client has invalidated.
    pub(in crate::worker) fn replica_policy(&self) -> Option<Reads> {
        Some(self.reads).filter(|reads| *reads != Reads::Primary && self.tracked.is_none() && !self.watches())
    }

    /// Registers its socket.
    pub(in crate::worker) fn register(&self, poll: &Poll, handle: Handle) -> io::Result<()> {
        poll.add(&self.fd, Token::Client(handle))
    }

    /// Records readiness of the socket. Returns whether it takes waiting output.
    #[inline]
    pub(in crate::worker) fn note_ready(&mut self, event: Ready) -> bool {
        self.hangup |= event.hangup;
        self.writable |= event.writable;
        event.writable && self.unsent() > 0
    }

    /// Reads once.
    #[inline]
    pub(in crate::worker) fn receive(&mut self, buffer: &mut [u8], now_us: u64) -> Result<Received, rustix::io::Errno> {
        self.last_used_us = now_us;
        transport::receive(&self.fd, &mut self.tls, buffer)
    }

    /// Reads and discards input. Returns whether the connection has ended.
    pub(in crate::worker) fn discard_input(&mut self, buffer: &mut [u8]) -> bool {
        // Below TLS, because the content is ignored.
        match rustix::net::recv(&self.fd, &mut *buffer, RecvFlags::empty()) {
            // The client may still read pending replies.
            Ok((_, 0)) => self.in_flight() == 0 && self.unsent() == 0,
            Ok(_) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => false,
            Err(_) => true,
        }
    }

    /// Reason of a failed TLS handshake.
    pub(in crate::worker) fn tls_failure(&self) -> Option<String> {
        self.tls.as_ref().and_then(|tls| tls.failure())
    }

    /// Returns its output and socket if the socket is writable, without TLS.
    #[inline]
    pub(in crate::worker) fn plain_output(&self) -> Option<(BorrowedFd<'_>, &[u8])> {
        let sends = self.tls.is_none() && self.writable && self.unsent() > 0;
        sends.then(|| (self.fd.as_fd(), &self.out[self.out_sent..]))
    }

    /// Appends something that is no reply.
    pub(in crate::worker) fn push_out(&mut self, parts: &[&[u8]]) {
        parts.iter().for_each(|part| self.out.extend_from_slice(part));
    }

    /// Part of a large reply has been sent: the rest must follow.
    pub(in crate::worker) fn is_streaming(&self) -> bool {
        self.streaming
    }

    /// Whether it writes its whole pipeline before it reads.
    pub(in crate::worker) fn writes_first(&self) -> bool {
        self.writes_first
    }

    pub(in crate::worker) fn set_writes_first(&mut self, writes_first: bool) {
        self.writes_first = writes_first;
    }

    /// Records since when more than `soft` bytes of messages are unread.
    pub(in crate::worker) fn note_behind(&mut self, soft: usize, now_us: u64) {
        if self.unsent() > soft && self.behind_since_us == 0 {
            self.behind_since_us = now_us.max(1);
        }
    }

    /// Whether more than `soft` bytes of messages are still unread after `soft_us`. `None`: this time has not passed, or
    /// the client was not behind.
    pub(in crate::worker) fn is_still_behind(&self, soft: usize, soft_us: u64, now_us: u64) -> Option<bool> {
        let is_more = self.unsent() > soft;
        let is_long = now_us.saturating_sub(self.behind_since_us) > soft_us;
        (self.behind_since_us > 0 && (!is_more || is_long)).then_some(is_more)
    }

    /// Records that the client has read its messages.
    pub(in crate::worker) fn catches_up(&mut self) {
        self.behind_since_us = 0;
    }

    /// Time since the beginning of its stall, or since it last read output, us.
    pub(in crate::worker) fn stalled_us(&self, now_us: u64) -> u64 {
        now_us.saturating_sub(self.stalled_at_us)
    }

    /// Time since its last traffic, us.
    pub(in crate::worker) fn quiet_us(&self, now_us: u64) -> u64 {
        now_us.saturating_sub(self.last_used_us)
    }

    /// Time that the command `seq` was stalled before it was sent, us.
    pub(in crate::worker) fn held_us(&self, seq: u32) -> u32 {
        if self.waited.0 == seq { self.waited.1 } else { 0 }
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
        self.in_flight() < commands_max && self.in_flight() * self.reply_mean < EXPECTED_BYTES_MAX
    }

    /// Whether `seq` is the last command read.
    pub(in crate::worker) fn is_last(&self, seq: u32) -> bool {
        seq == self.first.wrapping_add(self.pending.len() as u32).wrapping_sub(1)
    }

    /// Whether `seq` is the command whose reply is sent next.
    pub(in crate::worker) fn is_first(&self, seq: u32) -> bool {
        seq == self.first && !self.pending.is_empty()
    }

    /// Number of the next command to be read.
    pub(in crate::worker) fn next_seq(&self) -> u32 {
        self.first.wrapping_add(self.pending.len() as u32)
    }

    /// Bytes waiting for the socket. Unwritten TLS records count as one byte, because rustls does not report their
    /// size.
    #[inline]
    pub(in crate::worker) fn unsent(&self) -> usize {
        self.out.len() - self.out_sent + self.tls.as_ref().map_or(0, |tls| usize::from(tls.has_unsent()))
    }

    /// Whether the TLS handshake is incomplete.
    pub(in crate::worker) fn is_handshaking(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.is_handshaking())
    }

    /// Records that the socket has accepted `count` bytes of `out`.
    #[inline]
    pub(in crate::worker) fn note_sent(&mut self, count: usize, now_us: u64) {
        self.out_sent += count;
        self.last_used_us = now_us;
        self.stalled_at_us = now_us;
        if self.unsent() > 0 {
            // A short write means a full socket; epoll reports when it is writable.
            self.writable = false;
        }
    }

    /// Bytes of output held in memory: unsent, and parked behind pending replies.
    pub(in crate::worker) fn output_bytes(&self) -> usize {
        self.unsent() + self.parked.len()
    }

    /// Memory of the client in bytes, without its commands at connections and gathers.
    pub(in crate::worker) fn memory(&self) -> usize {
        size_of::<Self>()
            + size_of::<Details>()
            + self.input.capacity()
            + self.out.capacity()
            + self.parked.capacity()
            + self.pending.capacity() * size_of::<PendingReply>()
            + self.scanner.as_ref().map_or(0, |scanner| scanner.memory())
            + self.repeat.as_ref().map_or(0, |repeat| repeat.request.capacity())
            + self.waiting.as_ref().map_or(0, |waiting| waiting.memory())
            + self.session.as_ref().map_or(0, |session| session.multi.memory())
            + self.pubsub.as_ref().map_or(0, |subscriber| subscriber.memory())
            + self.tracked.as_ref().map_or(0, |tracked| tracked.memory())
    }

    /// Adds a pending reply for the current command, and returns its number.
    #[inline]
    pub(in crate::worker) fn owe(&mut self, now_us: u64, class: u8) -> u32 {
        let muted = self.reply_mode != ReplyMode::On;
        if self.reply_mode == ReplyMode::SkipNext {
            self.reply_mode = ReplyMode::On;
        }
        if class != CommandClass::Read as u8 && class != CommandClass::Local as u8 {
            self.wrote_us = now_us;
        }
        self.under_way_at = u64::MAX;
        self.pending.push_back(PendingReply { at_us: now_us as u32, start: 0, len: 0, class, muted, failed: false });
        self.first.wrapping_add(self.pending.len() as u32).wrapping_sub(1)
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

    /// Whether a command with a pending reply must be sent again. Later commands must wait for it, also between the end
    /// of its stall and its turn.
    pub(in crate::worker) fn has_yet_to_send(&self) -> bool {
        self.repeat.is_some() || self.is_reissued()
    }

    /// Whether the client is stalled with more input, and does not read the large reply on its exclusive connection.
    pub(in crate::worker) fn writes_before_it_reads(&self) -> bool {
        let has_more = self.readable || self.input_at < self.input.len();
        self.held.is_some() && self.stall != Stall::None && has_more && self.unsent() > 0 && !self.writes_first
    }

    /// Number of the command to be answered next.
    pub(in crate::worker) fn first_pending(&self) -> u32 {
        self.first
    }

    /// Number of the last command read.
    pub(in crate::worker) fn last_pending(&self) -> u32 {
        self.first.wrapping_add(self.pending.len() as u32).wrapping_sub(1)
    }

    /// Call it after a change of the fields below.
    pub(in crate::worker) fn update_gate(&mut self) {
        self.gated = self.pubsub.is_some() || self.monitor || self.tracked.is_some();
    }

    /// Number of subscribed channels and patterns.
    pub(in crate::worker) fn subscribed(&self) -> usize {
        self.pubsub.as_deref().map_or(0, Subscriber::total)
    }

    /// Returns the command whose reply must precede a message that arrives now.
    pub(in crate::worker) fn holds_messages(&self) -> Option<u32> {
        match self.pubsub.as_deref() {
            Some(subscriber) => subscriber.holds(self.first, self.streaming),
            None => self.streaming.then_some(self.first),
        }
    }

    /// Takes the reply to command `seq`, or its unsent rest. Earlier replies may still be pending. `failed`: the reply
    /// is an error.
    #[inline]
    pub(super) fn complete(&mut self, seq: u32, reply: &[u8], failed: bool, now_us: u64, counters: &WorkerCounters) {
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
            self.out.extend_from_slice(reply);
        }
        self.reply_mean = (self.reply_mean * 7 + reply.len()) / 8;
        owed.finish(now_us, counters);
        self.pop_front();
        while self.parked_count > 0 {
            let Some(next) = self.pending.front().copied().filter(|o| o.len > 0) else { break };
            if !next.muted {
                self.out.extend_from_slice(&self.parked[next.start..next.start + next.len]);
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

    /// Whether the reply to `seq` can be written directly to the socket: it is next, no output is before it, and
    /// replies are on.
    pub(super) fn takes_directly(&self, seq: u32) -> bool {
        seq == self.first && self.writable && self.unsent() == 0 && self.pending.front().is_some_and(|o| !o.muted)
    }

    /// Starts to stream the first pending reply, which is too large to collect. `failed`: it is an error.
    pub(in crate::worker) fn begin_stream(&mut self, failed: bool) {
        self.streaming = true;
        if let Some(owed) = self.pending.front_mut() {
            owed.failed = failed;
        }
    }

    /// Appends a piece of the streamed reply.
    pub(in crate::worker) fn stream(&mut self, piece: &[u8]) {
        if self.pending.front().is_some_and(|o| !o.muted) {
            self.out.extend_from_slice(piece);
        }
    }

    /// Completes the streamed reply.
    pub(in crate::worker) fn end_stream(&mut self, now_us: u64, counters: &WorkerCounters) {
        self.streaming = false;
        self.complete(self.first, b"", false, now_us, counters);
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

    /// Returns the client's flags in CLIENT LIST.
    fn flags(&self, dirty: bool) -> String {
        let mut flags = String::new();
        let mut add = |is: bool, letter: char| {
            if is {
                flags.push(letter);
            }
        };
        add(self.monitor, 'O');
        add(self.subscribed() > 0, 'P');
        add(self.in_multi, 'x');
        add(self.stall == Stall::Blocked || self.is_reissued(), 'b');
        let tracked = self.tracked.as_deref();
        add(tracked.is_some(), 't');
        add(tracked.and_then(Tracked::redirect).is_some_and(|r| r.broken), 'R');
        add(tracked.is_some_and(Tracked::is_broadcast), 'B');
        add(dirty, 'd');
        add(self.details.unix.is_some(), 'U');
        if flags.is_empty() {
            flags.push('N');
        }
        flags
    }

    /// Returns the client's line in CLIENT LIST. `dirty`: watched keys have changed, or may have.
    pub(in crate::worker) fn describe(&self, now_us: u64, last_command: &str, dirty: bool) -> String {
        let d = &self.details;
        let multi = self.session.as_ref().map(|s| &s.multi).filter(|_| self.in_multi);
        let addr = |a: Option<SocketAddr>| match (a, &d.unix) {
            (Some(address), _) => address.to_string(),
            (None, Some(path)) => format!("{}:0", path.display()),
            (None, None) => "?:0".into(),
        };
        let count = |kind| self.pubsub.as_deref().map_or(0, |s| s.count(kind));
        format!(
            "id={} addr={} laddr={} fd={} name={} age={} idle={} flags={} db={} sub={} psub={} ssub={} multi={} qbuf={} qbuf-free={} argv-mem=0 multi-mem={} rbs=0 rbp=0 obl=0 oll={} omem={} tot-mem={} events=r cmd={} user={} redir={} resp={} lib-name={} lib-ver={}\n",
            d.id,
            addr(d.peer),
            addr(d.local),
            std::os::fd::AsRawFd::as_raw_fd(&self.fd),
            d.name,
            now_us.saturating_sub(d.created_us) / 1_000_000,
            now_us.saturating_sub(self.last_used_us) / 1_000_000,
            self.flags(dirty),
            self.database,
            count(Kind::Channel),
            count(Kind::Pattern),
            count(Kind::Shard),
            multi.map_or(-1, |m| m.count() as i64),
            self.input.len() - self.input_at,
            self.input.capacity() - self.input.len(),
            multi.map_or(0, |m| m.bytes()),
            self.in_flight(),
            self.out.len(),
            self.memory(),
            last_command.to_ascii_lowercase(),
            self.user.name(),
            shown_redirect(self.tracked.as_deref()),
            if self.resp3 { 3 } else { 2 },
            d.lib_name,
            d.lib_ver,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client() -> Client {
        let fd = rustix::fs::open("/dev/null", rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty()).expect("/dev/null");
        let details = Details {
            id: 1,
            peer: None,
            local: None,
            unix: None,
            name: String::new(),
            lib_name: String::new(),
            lib_ver: String::new(),
            created_us: 0,
            no_evict: false,
            stranger_since_us: 0,
        };
        let listener = Arc::new(ListenerSettings::tcp(([127, 0, 0, 1], 0).into()));
        Client::new(fd, None, crate::users::Users::default().default_user().clone(), listener, 0, 0, Box::new(details))
    }

    #[test]
    fn replies_parked_beyond_four_gigabytes_are_those_sent() {
        let counters = WorkerCounters::default();
        let mut client = client();
        let (first, second) = (client.owe(0, 0), client.owe(0, 0));
        // As if this much were parked already. Untouched pages use no memory.
        client.parked = vec![0; (4 << 30) + 4096];
        client.parked.truncate((4 << 30) + 8);
        client.complete(second, b"+second\r\n", false, 0, &counters);
        client.complete(first, b"+first\r\n", false, 0, &counters);
        assert_eq!(client.out.escape_ascii().to_string(), "+first\\r\\n+second\\r\\n");
    }
}
