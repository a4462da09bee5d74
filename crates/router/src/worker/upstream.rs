//! A connection to a node: what waits to be sent, and what is in flight, in order.
//!
//! A command is in flight from the moment its bytes are handed to the connection until its reply comes, or until the
//! node has confirmed that the connection is dead. Closing a socket ends nothing: the node executes what it has
//! received. So a link that breaks with commands in flight leaves a [`Zombie`](super::zombies::Zombie) behind, which
//! only an answered `CLIENT KILL ID` on a newer connection (or another `run_id`) lays to rest.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use switchyard_policy::empty_return::Holdings;
use switchyard_policy::seat::OwnershipStatus;
use switchyard_policy::topology::NodeId;
use switchyard_resp::reply::{ReplyFollower, ReplyScan, ReplyScanner};
use switchyard_resp::translate::Shape;

use super::handshake::NodeHandshake;
use super::keyed::{CommandSeq, FinishedRequest, Request};
pub(crate) use super::kind::Lane;
use super::kind::{Kind, Task};
use crate::metrics::NodeCounters;
use crate::settings::RuntimeSettings;
use crate::slab::Handle;
use crate::tap::Outcome;
use crate::worker::transport::{self, Received, Tls};

/// What begins and ends a transaction.
pub(super) const MULTI: &[u8] = b"*1\r\n$5\r\nMULTI\r\n";
pub(super) const EXEC: &[u8] = b"*1\r\n$4\r\nEXEC\r\n";

/// Bytes unsent on a shared connection above which clients that want to add to it wait, and below which they go on.
pub(super) const UNSENT_HIGH: usize = 8 << 20;
const UNSENT_LOW: usize = UNSENT_HIGH / 2;

/// Bytes of an upload that may wait for the node's socket; then the client is not read from. And below which it is
/// again.
pub(super) const UPLOAD_HIGH: usize = 256 << 10;
const UPLOAD_LOW: usize = 64 << 10;

/// Bytes of requests that a shared connection keeps until they are answered; then clients that want to add to it wait.
const KEPT_MAX: usize = 64 << 20;

/// What a node answers to a question of our own is shorter; also whatever it says while it is greeted, and where nobody
/// asked.
const SHORT_MAX: usize = 1 << 20;

/// The list of a node's commands is shorter.
const LEARN_MAX: usize = 16 << 20;

/// How often a connection's memory is looked at.
const SHRINK_US: u64 = 1_000_000;

/// Bytes of requests, and commands in flight, that there is always room for.
const OUT_KEPT: usize = 4 << 10;
const PENDING_KEPT: usize = 64;

/// Who gets a reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Purpose {
    /// The client, as it is.
    Client,
    /// A client, after the command was healed once (NOSCRIPT): not again.
    ClientHealed,
    /// A gather, as part `seq`.
    Gather,
    /// Nobody: SELECT between commands for different databases, SCRIPT LOAD before a healed EVALSHA.
    Discarded,
    /// A topic of the worker: subscribes to it.
    Subscribe,
    /// A client's UNSUBSCRIBE: what was published before it has come when this is answered. `seq` is the command's
    /// number.
    Sync,
    /// CLIENT TRACKING ON on a connection of subscriptions. `seq` is the generation of what is tracked.
    Track,
    /// The list of the node's commands.
    Learn,
    /// MULTI, or a command of a transaction: an error is kept for EXEC. `seq` is 0 for MULTI.
    Queued,
    /// EXEC of a client.
    Exec,
    /// The same, and the node has refused MULTI: it has executed the commands one by one.
    ExecWithoutMulti,
    /// WATCH of a client.
    Watch,
    /// WAIT or WAITAOF of a client, at one of the nodes that it concerns.
    Wait,
    /// The answer to CLIENT UNBLOCK for the connection `who`.
    Unblock,
    /// The answer to the question whether the client on the connection `who` waits at the node; `seq` is the question's
    /// number.
    Look,
    /// What is to become a hot copy; `seq` is the fill's number.
    Fill,
    /// The same, of PTTL of its key.
    FillTtl,
    /// PING on a connection for fills: its reply extends the lease of hot copies.
    Beat,
    /// The answer to CLIENT KILL ID for a broken connection: confirms that its commands have ended. `seq` is the
    /// zombie's number.
    Confirm,
}

/// Whether a command may be sent again when its reply is there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Again {
    Never,
    /// It changes nothing: a large reply may be fetched on another connection.
    Reads,
    /// EVALSHA or a relative: a NOSCRIPT reply can be healed.
    Heals,
}

/// A command handed to a connection. There are many: its size is that of five words.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pending {
    /// The client or the gather.
    pub(super) who: Handle,
    /// Which command of the client, or which part of the gather.
    pub(super) seq: u32,
    /// Bytes of the request in `out`.
    pub(super) len: u32,
    pub(super) sent_us: u32,
    /// Low bits of the epoch it was sent under.
    pub(super) epoch: u32,
    pub(super) purpose: Purpose,
    pub(super) class: u8,
    pub(super) again: Again,
    /// It may take as long as commands of the slow lane.
    pub(super) is_long: bool,
    /// Who wants to hear of its end.
    pub(super) end: CommandSeq,
    /// Low bits of the generation of armed keys by which it shut gates.
    pub(super) armed: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    /// No connection; the next attempt is due at this time, us.
    Waiting {
        until_us: u64,
    },
    /// TCP connect under way.
    Connecting,
    /// TLS handshake under way.
    Securing,
    /// Connected; the node has not yet answered who we are. No command is sent before that.
    Handshake,
    Up,
}

/// How the reply at the head of the connection is taken.
#[derive(Clone, Copy, Debug)]
pub(super) enum Body {
    /// Collected whole.
    Whole(ReplyScanner),
    /// Passed on to the client piece by piece.
    Through(ReplyFollower),
    /// Thrown away: it is fetched again on a connection for large values, or nobody wants it.
    Skip(ReplyFollower),
}

/// What comes next of what a node has sent.
#[derive(Debug)]
pub(super) enum Arrival {
    /// Nothing whole.
    Nothing,
    /// A reply of so many bytes.
    Reply(usize),
    /// The beginning of a reply that will have so many bytes at least: more than is collected without need.
    Large(usize),
    /// So many bytes of a reply that is taken as it comes: whether they are passed on, and whether they are its last
    /// ones.
    Piece { len: usize, passes: bool, is_last: bool },
    /// No reply, or one that nobody can have asked for.
    Senseless(String),
}

/// What the socket has given.
#[derive(Debug)]
pub(super) enum Taken {
    Bytes(usize),
    Nothing,
    /// It is not read just now.
    Paused,
    /// A signal came first.
    Interrupted,
    /// Something before our side of the handshake was done.
    Early,
    Lost(String),
}

#[derive(Debug)]
pub(super) struct Link {
    pub(super) node: NodeId,
    pub(super) lane: Lane,
    pub(super) kind: Kind,
    /// Where it leads, or last tried to.
    pub(super) address: Option<SocketAddr>,
    pub(super) resp3: bool,
    /// For RESP3 clients, but the node does not speak it: replies are translated.
    pub(super) downgraded: bool,
    /// On such a connection: the shapes of the parts of the next EXEC's reply.
    pub(super) queued: Vec<Shape>,
    pub(super) phase: Phase,
    pub(super) since_us: u64,
    pub(super) failures: u32,
    pub(super) fd: Option<OwnedFd>,
    pub(super) tls: Option<Box<Tls>>,
    /// Requests from the oldest unanswered one on (shared lanes keep them until their reply comes, to repeat reads and
    /// heal scripts); `acked..sent` is in flight, `sent..` waits for the socket.
    out: Vec<u8>,
    acked: usize,
    sent: usize,
    pending: VecDeque<Pending>,
    /// How many at the front of `pending` have been answered with a timeout already.
    expired: usize,
    first_expiry_us: u64,
    pub(super) input: Vec<u8>,
    /// When the node last sent anything.
    pub(super) received_us: u64,
    pub(super) body: Body,
    /// Bytes of it that were taken as they came.
    streamed: u64,
    pub(super) greeting: VecDeque<NodeHandshake>,
    /// Whose mark the node had when it was greeted.
    pub(super) standing: OwnershipStatus,
    /// Our client id at the node.
    pub(super) client_id: u64,
    pub(super) run_id: Option<Arc<str>>,
    /// It was asked about its data when it was greeted.
    pub(super) knows_data: bool,
    /// The node's keys when it was greeted, if it said so.
    pub(super) holdings: Option<Holdings>,
    /// It was still loading them.
    pub(super) is_loading: bool,
    /// It keeps its data on disk.
    pub(super) persists: bool,
    /// Database that the greeting selects: the one that the first command in `out` expects to find. Kept, because
    /// commands may be waiting in `out` before there is a connection, and a reload may change the settings meanwhile.
    pub(super) start_database: u32,
    /// Database selected at the end of `out`.
    pub(super) database: u32,
    /// Whether commands at the end of `out` leave no trace of use (CLIENT NO-TOUCH). A new connection begins without.
    pub(super) no_touch: bool,
    pub(super) readable: bool,
    /// The node has closed its side; the end has to be read.
    pub(super) hangup: bool,
    /// Made with credentials that have changed since.
    pub(super) stale: bool,
    /// Nothing is sent on it any more: what is in flight is awaited, then it is made anew.
    pub(super) retiring: bool,
    /// It was up, and is being made anew.
    pub(super) renewing: bool,
    /// When the connection came up, or last took bytes again after it had been full: commands before that waited for
    /// it.
    pub(super) flowed_us: u64,
    pub(super) writable: bool,
    pub(super) dirty: bool,
    /// Reading is paused because the client does not read.
    pub(super) paused: bool,
    /// Clients that wait until fewer bytes are unsent.
    pub(super) waiters: Vec<Handle>,
    /// Why the node refused to queue a command of the transaction under way.
    pub(super) refused: Option<Box<[u8]>>,
    /// Why the node would refuse a transaction, where it would.
    pub(super) no_multi: Option<Box<str>>,
    pub(super) idle_since_us: u64,
    /// The most bytes of `out`, and commands of `pending`, seen since memory was given back last; and when it is next.
    needed: (usize, usize),
    shrinks_at_us: u64,
    pub(super) counters: Arc<NodeCounters>,
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

    /// The node has greeted it.
    pub(super) fn comes_up(&mut self) {
        self.phase = Phase::Up;
        self.counters.connections.add(1);
        self.counters.mains_down.sub(u64::from(self.lane == Lane::Main));
    }

    /// It was up, and is no more.
    pub(super) fn goes_down(&self) {
        self.counters.connections.sub(1);
        self.counters.mains_down.add(u64::from(self.lane == Lane::Main));
    }

    /// It is down, and is not tried again.
    pub(super) fn is_forgotten(&self) {
        self.counters.mains_down.sub(u64::from(self.lane == Lane::Main));
    }

    /// Whether a command may be handed over: the link is up, or may come up for the first time since it was last up.
    #[inline]
    pub(super) fn takes_commands(&self) -> bool {
        self.phase == Phase::Up || self.failures == 0
    }

    /// Bytes waiting for the socket.
    #[inline]
    pub(super) fn unsent(&self) -> usize {
        self.out.len() - self.sent + self.tls.as_ref().map_or(0, |tls| usize::from(tls.has_unsent()))
    }

    /// Whether less than `high` bytes wait for the socket, and requests kept until they are answered leave room for
    /// more.
    #[inline]
    pub(super) fn has_room(&self, high: usize) -> bool {
        self.unsent() < high && self.out.len() - self.acked < KEPT_MAX
    }

    /// How large a reply that is collected may become where that is not for the client that gets it to say: a node that
    /// sends without end is given up.
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
            // What is nobody's is thrown away as it comes.
            Some(Purpose::Discarded | Purpose::Queued | Purpose::Fill) => usize::MAX,
            Some(
                Purpose::Client | Purpose::ClientHealed | Purpose::Gather | Purpose::Exec | Purpose::ExecWithoutMulti,
            ) => usize::MAX,
            _ => SHORT_MAX,
        }
    }

    /// The socket has taken `count` bytes of `out`.
    #[inline]
    pub(super) fn note_sent(&mut self, count: usize) {
        self.counters.bytes_sent.add(count as u64);
        self.sent += count;
        if self.unsent() > 0 {
            self.writable = false;
        }
    }

    /// How much the socket has taken is not known: all of it counts as sent, because the node may execute it.
    pub(super) fn note_all_sent(&mut self) {
        self.sent = self.out.len();
    }

    /// Appends a command, behind a SELECT where it concerns another database than the one before.
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

    /// To be called before a client's command is pushed: CLIENT NO-TOUCH as that client wants it.
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

    /// A command of our own between those of clients, whose settings differ.
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

    /// More of the request that was pushed last, which is being uploaded; with its end?
    pub(super) fn push_more(&mut self, bytes: &[u8], is_end: bool, now_us: u64) {
        debug_assert_eq!(self.task(), Task::Uploading, "a whole request is pushed");
        self.out.extend_from_slice(bytes);
        if is_end {
            self.set_task(Task::Nothing);
            if let Some(pending) = self.pending.back_mut() {
                pending.sent_us = now_us as u32;
            }
        }
    }

    /// The reply to the oldest command has come.
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

    /// The same where the reply does not count: the command is sent again, or a wait was ended because we asked for it.
    #[inline]
    pub(super) fn taken_out(&mut self) -> Option<FinishedRequest> {
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

    /// The connection is lost or given up: gives all commands back. The node may execute the first `in_flight` of them.
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

    /// Takes out the transactions that wait to be sent: the node refuses them.
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

    /// Whether no command is under way.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        self.pending.is_empty()
    }

    /// The commands under way, the oldest first.
    pub(super) fn pending(&self) -> impl DoubleEndedIterator<Item = &Pending> + ExactSizeIterator {
        self.pending.iter()
    }

    /// The oldest command under way.
    #[inline]
    pub(super) fn head(&self) -> Option<&Pending> {
        self.pending.front()
    }

    /// Whether nothing is under way but a request that is still being uploaded.
    pub(super) fn is_only_uploading(&self) -> bool {
        self.task() == Task::Uploading && self.pending.len() == 1
    }

    /// The command pushed last.
    pub(super) fn last_mut(&mut self) -> Option<&mut Pending> {
        self.pending.back_mut()
    }

    /// Whoever waits for the reply to the oldest command has been answered, or will be in another way.
    pub(super) fn disown_head(&mut self) {
        if let Some(pending) = self.pending.front_mut() {
            pending.purpose = Purpose::Discarded;
        }
    }

    /// The node has refused the MULTI that it has just answered: the next EXEC is that transaction's.
    pub(super) fn is_not_queued(&mut self, why: &[u8]) {
        self.no_multi = Some(String::from_utf8_lossy(why).into());
        if let Some(exec) = self.pending.iter_mut().find(|pending| pending.purpose == Purpose::Exec) {
            exec.purpose = Purpose::ExecWithoutMulti;
        }
    }

    /// What waits at the node goes on under this epoch.
    pub(super) fn restamp(&mut self, epoch: u32) {
        self.pending.iter_mut().for_each(|pending| pending.epoch = epoch);
    }

    /// Whether those who wait for the oldest command have been told of a time-out.
    #[inline]
    pub(super) fn is_head_expired(&self) -> bool {
        self.expired > 0
    }

    /// Takes note of the commands that have waited for longer than `timeout_us`, and gives them: whoever waits is told.
    /// They stay under way.
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

    /// Since when nothing has come of a command that was given up, us; `None`: there is none.
    pub(super) fn silent_since_us(&self) -> Option<u64> {
        (self.expired > 0).then_some(self.first_expiry_us)
    }

    /// Bytes that wait for the socket, as far as they are not sealed by TLS.
    #[inline]
    pub(super) fn to_send(&self) -> &[u8] {
        &self.out[self.sent..]
    }

    /// Sends what the socket takes. Gives those who waited for room, where there is some again.
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
            // Nothing of a large request is kept: it is never sent again.
            self.out.drain(..self.sent);
            self.sent = 0;
        }
        Ok(())
    }

    /// Reads once.
    #[inline]
    pub(super) fn receive(&mut self, buffer: &mut [u8], now_us: u64) -> Taken {
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

    /// What comes next of these bytes, which the node has sent.
    #[inline]
    pub(super) fn arrival(&mut self, bytes: &[u8], live: &RuntimeSettings) -> Arrival {
        let passes = matches!(self.body, Body::Through(_));
        match &mut self.body {
            Body::Whole(scanner) => match scanner.scan(bytes) {
                Ok(ReplyScan::Complete(len)) => Arrival::Reply(len),
                Ok(ReplyScan::Incomplete(need)) => {
                    let (size, max) = (need.max(bytes.len()), self.reply_max(live));
                    if size > max {
                        Arrival::Senseless(format!("it sends more than {max} bytes where a short reply was asked for"))
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

    /// What comes next is the beginning of a reply.
    pub(super) fn next_body(&mut self) {
        (self.body, self.streamed) = (Body::Whole(ReplyScanner::default()), 0);
    }

    /// The reply that was taken as it came has ended.
    pub(super) fn answered_in_pieces(&mut self, now_us: u64) -> Option<FinishedRequest> {
        let streamed = self.streamed;
        self.next_body();
        self.answered(now_us, false).map(|ended| ended.streamed(streamed))
    }

    /// Whether nothing that was sent is unanswered.
    pub(super) fn is_quiet(&self) -> bool {
        self.sent <= self.acked
    }

    /// Bytes of memory that requests take.
    pub(super) fn request_memory(&self) -> usize {
        self.out.capacity()
    }

    /// Gives back the memory of answered requests.
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

    /// Gives back memory that a burst has left behind. To be called every tick: what was needed lately decides, so that
    /// a connection in steady use keeps what it uses.
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

    /// What waits at the node holds gates from now on, as what is sent now does.
    pub(super) fn held_by(&mut self, end: CommandSeq, armed: u32) {
        self.pending.iter_mut().for_each(|pending| pending.armed = armed);
        self.pending.back_mut().into_iter().for_each(|pending| pending.end = end);
    }

    /// The lowest epoch of what is in flight, or waits to be sent: its low bits.
    pub(super) fn oldest_epoch(&self) -> Option<u32> {
        let first = self.pending.front()?.epoch;
        // Compared as distances, because the low bits wrap.
        let least = self.pending.iter().map(|p| p.epoch.wrapping_sub(first) as i32).min().unwrap_or(0);
        Some(first.wrapping_add(least as u32))
    }

    /// How many of `pending`, from the front, the node may execute although the connection ends now. Of a request that
    /// is still being uploaded it has a part, which it never executes; that is the last one, and all before it are
    /// whole.
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
    pub(super) fn head_request(&self) -> &[u8] {
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
        armed: 0,
    };

    fn link(lane: Lane) -> Link {
        let mut link = Link::new(NodeId(0), lane, false, 0, Arc::default(), 0);
        link.phase = Phase::Up;
        link
    }

    fn pending(purpose: Purpose) -> Pending {
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
    fn what_may_have_been_sent_may_be_executed() {
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
        assert_eq!(greeted.reply_max(&live), SHORT_MAX, "nobody has asked");
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
    fn who_wants_no_trace_of_use_leaves_none_and_others_do() {
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
        // Steady use keeps what it uses.
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
