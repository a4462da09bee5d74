//! A connection to a node: commands to send, and commands in flight, in order.
//!
//! A command is in flight from the moment its bytes are passed to the connection until its reply comes, or until the
//! node has confirmed that the connection is dead. Closing a socket ends nothing: the node executes the commands that
//! it has received. So a link that breaks with commands in flight leaves a [`Zombie`](crate::worker::upstreams::zombies::Zombie), which is
//! removed only by an answered `CLIENT KILL ID` on a newer connection, or by another `run_id`.

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rustix::io::Errno;
use switchyard_policy::topology::NodeId;

use super::Link;
use super::handshake::HandshakeState;
use super::incoming::Incoming;
use super::kind::Checkout;
use super::lifecycle::Lifecycle;
use super::pending::{Pending, Purpose};
use super::queued::Transaction;
use super::requests::Requests;
use super::socket::Socket;
use crate::lane::Lane;
use crate::metrics::NodeCounters;
use crate::settings::RuntimeSettings;
use crate::slab::Handle;
use crate::worker::command::CommandSeq;
use crate::worker::keyed::{FinishedRequest, Request};

/// Unsent bytes of a shared connection above which clients with further commands wait, and below which they continue.
pub(in crate::worker) const UNSENT_HIGH: usize = 8 << 20;
const UNSENT_LOW: usize = UNSENT_HIGH / 2;

/// Unsent bytes of an upload above which reading from the client stops, and below which it continues.
pub(in crate::worker) const UPLOAD_HIGH: usize = 256 << 10;
const UPLOAD_LOW: usize = 64 << 10;

/// Maximum size of a reply to the router's own commands, also during the handshake, and without a command.
const SHORT_MAX: usize = 1 << 20;

/// Maximum size of the list of a node's commands.
const LEARN_MAX: usize = 16 << 20;

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
            checkout: lane.is_exclusive().then(Checkout::new),
            replica: None,
            address: None,
            resp3,
            downgraded: false,
            is_distrusted: false,
            life: Lifecycle::new(now_us),
            socket: Socket::default(),
            requests: Requests::new(database, !lane.is_exclusive(), counters, now_us),
            incoming: Incoming::new(now_us),
            handshake: HandshakeState::new(),
            transaction: Transaction::default(),
            dirty: false,
            waiters: Vec::new(),
        }
    }

    pub(in crate::worker) fn node(&self) -> NodeId {
        self.node
    }

    #[inline]
    pub(in crate::worker) fn lane(&self) -> Lane {
        self.lane
    }

    pub(in crate::worker) fn resp3(&self) -> bool {
        self.resp3
    }

    /// Whether it is for RESP3 clients, but the node does not support it.
    #[inline]
    pub(in crate::worker) fn is_downgraded(&self) -> bool {
        self.downgraded
    }

    /// Whether only redirects on this connection count.
    #[inline]
    pub(in crate::worker) fn is_distrusted(&self) -> bool {
        self.is_distrusted
    }

    /// Discards all replies on this connection from now on, except redirects.
    pub(in crate::worker) fn distrust(&mut self) {
        self.is_distrusted = true;
    }

    /// Address of the replica.
    pub(in crate::worker) fn replica(&self) -> Option<SocketAddr> {
        self.replica
    }

    #[inline]
    pub(in crate::worker) fn phase(&self) -> Phase {
        self.life.phase()
    }

    #[inline]
    pub(super) fn is_up(&self) -> bool {
        self.life.is_up()
    }

    /// Whether a command may be passed to it: the link is up, or no attempt has failed since it was last up.
    #[inline]
    pub(in crate::worker) fn takes_commands(&self) -> bool {
        self.life.takes_commands()
    }

    /// Requests that are unsent or unanswered.
    #[inline]
    pub(in crate::worker) fn requests(&self) -> &Requests {
        &self.requests
    }

    /// Data received from the node.
    #[inline]
    pub(in crate::worker) fn incoming(&self) -> &Incoming {
        &self.incoming
    }

    /// Process of the node.
    pub(in crate::worker) fn run_id(&self) -> Option<&str> {
        self.handshake.run_id().map(|run_id| &**run_id)
    }

    /// Our client ID at the node.
    pub(in crate::worker) fn client_id(&self) -> u64 {
        self.handshake.client_id()
    }

    /// Reason why the node would refuse a transaction, if it would.
    pub(in crate::worker) fn no_multi(&self) -> Option<&str> {
        self.transaction.no_multi()
    }

    /// Takes the node's error for a queued command of the current transaction.
    pub(in crate::worker) fn take_refusal(&mut self) -> Option<Box<[u8]>> {
        self.transaction.take_refusal()
    }

    pub(in crate::worker) fn counters(&self) -> &NodeCounters {
        self.requests.counters()
    }

    /// After the handshake.
    pub(super) fn comes_up(&mut self, now_us: u64) {
        self.life.comes_up(now_us);
        self.socket.flows_since(now_us);
        self.counters().connections.add(1);
        self.counters().mains_down.sub(u64::from(self.lane == Lane::Main));
        self.counters().connects.add(1);
    }

    /// After the end of a connection that was up.
    pub(super) fn goes_down(&self) {
        self.counters().connections.sub(1);
        self.counters().mains_down.add(u64::from(self.lane == Lane::Main));
    }

    /// For a main connection that is down and not retried.
    pub(super) fn is_forgotten(&self) {
        self.counters().mains_down.sub(u64::from(self.lane == Lane::Main));
    }

    // ---- output ----

    /// Bytes waiting for the socket.
    #[inline]
    pub(in crate::worker) fn unsent(&self) -> usize {
        self.requests.to_send().len() + usize::from(self.socket.has_unsent())
    }

    /// Whether less than `high` bytes are unsent, and the unanswered requests leave room for more.
    #[inline]
    pub(in crate::worker) fn has_room(&self, high: usize) -> bool {
        self.unsent() < high && self.requests.has_room()
    }

    /// Whether clients wait until fewer bytes are unsent.
    #[inline]
    pub(in crate::worker) fn is_awaited(&self) -> bool {
        !self.waiters.is_empty()
    }

    /// Appends a command, after a SELECT if its database differs from that of the previous one.
    #[inline]
    pub(in crate::worker) fn push(&mut self, request: Request<'_>) {
        self.requests.push(request);
    }

    /// Sets CLIENT NO-TOUCH for a client. Call it before its command is pushed.
    #[inline]
    pub(in crate::worker) fn touch_as(&mut self, no_touch: bool, like: Pending) {
        self.requests.touch_as(no_touch, like);
    }

    /// Appends a part of the last pushed request, which is being uploaded. `is_end`: the last part.
    pub(in crate::worker) fn push_more(&mut self, bytes: &[u8], is_end: bool, now_us: u64) {
        debug_assert!(self.is_uploading(), "a whole request is pushed");
        self.requests.extend(bytes, is_end, now_us);
        if is_end {
            self.checkout_mut().into_iter().for_each(Checkout::end_task);
        }
    }

    /// Returns its output and socket if the socket is writable, without TLS.
    #[inline]
    pub(in crate::worker) fn plain_output(&self) -> Option<(BorrowedFd<'_>, &[u8])> {
        let bytes = self.requests.to_send();
        let socket = self.socket.plain().filter(|_| self.life.sends() && !bytes.is_empty())?;
        Some((socket, bytes))
    }

    /// Records that the socket has accepted `count` bytes of the output.
    #[inline]
    pub(in crate::worker) fn note_sent(&mut self, count: usize) {
        self.requests.note_sent(count);
        if self.unsent() > 0 {
            self.socket.is_full();
        }
    }

    /// The number of bytes accepted by the socket is unknown: all count as sent, because the node may execute them.
    pub(in crate::worker) fn note_all_sent(&mut self) {
        self.requests.note_all_sent();
    }

    /// Sends as much as the socket accepts. Returns the clients that waited for room, if there is some again.
    #[inline]
    pub(super) fn flush(&mut self) -> Result<Vec<Handle>, Errno> {
        self.dirty = false;
        if !self.life.sends() {
            return Ok(Vec::new());
        }
        while self.unsent() > 0 {
            let Some(count) = self.socket.send(self.requests.to_send())? else { break };
            self.note_sent(count);
        }
        self.requests.discard_sent();
        let low = if self.lane == Lane::Large { UPLOAD_LOW } else { UNSENT_LOW };
        let has_room = !self.waiters.is_empty() && self.has_room(low);
        Ok(if has_room { std::mem::take(&mut self.waiters) } else { Vec::new() })
    }

    // ---- input ----

    /// Reads once.
    #[inline]
    pub(in crate::worker) fn receive(&mut self, buffer: &mut [u8], now_us: u64) -> Taken {
        self.socket.postpone();
        let phase = self.phase();
        if self.incoming.is_paused() || !matches!(phase, Phase::Up | Phase::Handshake | Phase::Securing) {
            return Taken::Paused;
        }
        match self.socket.receive(buffer) {
            None => Taken::Paused,
            Some(Ok(0)) => {
                self.counters().ended.add(1);
                Taken::Lost("the node closed the connection".to_owned())
            }
            Some(Ok(count)) => {
                self.counters().bytes_received.add(count as u64);
                self.incoming.note_received(now_us);
                if phase == Phase::Securing { Taken::Early } else { Taken::Bytes(count) }
            }
            Some(Err(Errno::AGAIN)) => Taken::Nothing,
            Some(Err(Errno::INTR)) => Taken::Interrupted,
            Some(Err(error)) => Taken::Lost(self.socket.error_text(error)),
        }
    }

    /// Whether the socket may have more data.
    #[inline]
    pub(in crate::worker) fn may_be_readable(&self) -> bool {
        self.socket.is_readable()
    }

    /// Takes the received part of an incomplete reply, to be extended and returned by [`Self::keep_received`].
    #[inline]
    pub(in crate::worker) fn take_received(&mut self) -> Vec<u8> {
        self.incoming.take()
    }

    #[inline]
    pub(in crate::worker) fn keep_received(&mut self, part: Vec<u8>) {
        self.incoming.keep(part);
    }

    /// Pauses reading, because the client does not read.
    pub(in crate::worker) fn pause(&mut self) {
        self.incoming.pause();
    }

    /// Returns the next part of these received bytes.
    #[inline]
    pub(in crate::worker) fn arrival(&mut self, bytes: &[u8], live: &RuntimeSettings) -> Arrival {
        let (phase, lane, requests) = (self.life.phase(), self.lane, &self.requests);
        let max = || reply_max(phase, lane, requests.head().map(|head| head.purpose), live);
        self.incoming.arrival(bytes, live.large_value, max)
    }

    /// Discards the reply at the head.
    pub(in crate::worker) fn skip_body(&mut self) {
        self.incoming.skip_body();
    }

    /// Passes the reply at the head on in pieces.
    pub(in crate::worker) fn pass_body_on(&mut self) {
        self.incoming.pass_body_on();
    }

    // ---- commands ----

    /// The oldest pending command.
    #[inline]
    pub(in crate::worker) fn head(&self) -> Option<&Pending> {
        self.requests.head()
    }

    /// Whether a part of the oldest command is not sent, so that a reply to it is a protocol error.
    #[inline]
    pub(in crate::worker) fn is_head_unsent(&self) -> bool {
        self.requests.is_head_unsent()
    }

    /// Whether no command is pending.
    #[inline]
    pub(in crate::worker) fn is_idle(&self) -> bool {
        self.requests.is_idle()
    }

    /// The last pushed command.
    pub(in crate::worker) fn last_mut(&mut self) -> Option<&mut Pending> {
        self.requests.last_mut()
    }

    /// Moves pending commands to this epoch.
    pub(in crate::worker) fn restamp(&mut self, epoch: u32) {
        self.requests.restamp(epoch);
    }

    /// Makes pending commands hold gates, like new ones.
    pub(in crate::worker) fn held_by(&mut self, end: CommandSeq, armed: u32) {
        self.requests.held_by(end, armed);
    }

    /// Removes the oldest command, after its reply.
    #[inline]
    pub(in crate::worker) fn answered(&mut self, now_us: u64, is_error: bool) -> Option<FinishedRequest> {
        self.requests.answered(now_us, is_error)
    }

    /// Removes the oldest command, after a reply in pieces.
    pub(in crate::worker) fn answered_in_pieces(&mut self, now_us: u64) -> Option<FinishedRequest> {
        let streamed = self.incoming.next_body();
        self.answered(now_us, false).map(|ended| ended.streamed(streamed))
    }

    /// Removes the oldest command without counting its reply: it is sent again, or its wait was ended by the router.
    #[inline]
    pub(in crate::worker) fn taken_out(&mut self) -> Option<FinishedRequest> {
        self.requests.taken_out()
    }

    /// Discards the reply to the oldest command, because its client has been answered, or will be in another way.
    pub(in crate::worker) fn skip_head(&mut self) {
        self.skip_body();
        self.requests.disown_head();
    }

    /// Whether only a request that is still being uploaded is pending.
    pub(in crate::worker) fn is_only_uploading(&self) -> bool {
        self.is_uploading() && self.requests.pending().len() == 1
    }

    /// Time that a command waited for the socket, of the `took_us` until its reply.
    pub(in crate::worker) fn queued_us(&self, sent_us: u32, took_us: u32) -> u32 {
        self.socket.queued_us(sent_us, took_us)
    }

    /// Number of pending commands, from the oldest one on, that the node may execute although the connection ends now.
    pub(super) fn may_be_executed(&self) -> usize {
        if self.is_up() { self.requests.may_be_executed(self.is_uploading()) } else { 0 }
    }

    /// Removes all commands of a broken connection, and returns them. The node may execute the first `in_flight` of
    /// them.
    pub(super) fn lose(&mut self, in_flight: usize) -> impl Iterator<Item = FinishedRequest> + use<> {
        if self.is_uploading() {
            self.checkout_mut().into_iter().for_each(Checkout::end_task);
        }
        self.requests.lose(in_flight)
    }
}

/// Maximum size of a collected reply to a request for `purpose`, if not set by its client: a node that sends without
/// end is disconnected.
fn reply_max(phase: Phase, lane: Lane, purpose: Option<Purpose>, live: &RuntimeSettings) -> usize {
    if phase != Phase::Up {
        return SHORT_MAX;
    }
    if lane == Lane::Pubsub {
        // A message: as long as an argument, with its channel and pattern.
        return live.argument_max.saturating_add(SHORT_MAX);
    }
    match purpose {
        Some(Purpose::Learn) => LEARN_MAX,
        // A reply without a receiver is discarded in pieces.
        Some(Purpose::Discarded | Purpose::Queued | Purpose::Fill) => usize::MAX,
        Some(Purpose::Client | Purpose::ClientHealed | Purpose::Gather | Purpose::Exec | Purpose::ExecWithoutMulti) => {
            usize::MAX
        }
        _ => SHORT_MAX,
    }
}

#[cfg(test)]
pub(in crate::worker) mod tests {
    use super::*;
    use crate::worker::upstreams::pending::Again;

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
        link.life.comes_up(0);
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
        let max = |phase, purpose| reply_max(phase, Lane::Main, purpose, &live);
        assert_eq!(max(Phase::Up, None), SHORT_MAX, "no request is pending");
        let answers = [
            (Purpose::Client, usize::MAX),
            (Purpose::Gather, usize::MAX),
            (Purpose::Learn, LEARN_MAX),
            (Purpose::Watch, SHORT_MAX),
            (Purpose::Confirm, SHORT_MAX),
        ];
        for (purpose, expected) in answers {
            assert_eq!(max(Phase::Up, Some(purpose)), expected, "{purpose:?}");
        }
        assert_eq!(max(Phase::Handshake, Some(Purpose::Client)), SHORT_MAX);
        assert_eq!(reply_max(Phase::Up, Lane::Pubsub, None, &live), live.argument_max + SHORT_MAX);
    }
}
