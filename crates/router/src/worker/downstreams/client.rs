//! A client's connection: its parts, and what concerns several of them.
//!
//! Independent of nodes: a wait for a node is a [`Stall`] with a reason, and the code that ends the reason finds the
//! clients with this stall. A stalled client is not read, so its waiting data is bounded by its socket.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use switchyard_policy::topology::NodeId;
use switchyard_resp::request::Follower;

use super::Client;
use super::identity::{Details, Identity};
use super::input::Input;
use super::replies::Replies;
use super::socket::Socket;
use super::states::{State, States};
use super::waits::{Stall, Waits};
use crate::lane::Lane;
use crate::metrics::WorkerCounters;
use crate::poll::Ready;
use crate::settings::Reads;
use crate::slab::Handle;
use crate::worker::pubsub::{Kind, Subscriber};
use crate::worker::tracking::{Tracked, shown_redirect};
use crate::worker::transactions::session::Session;
use crate::worker::transport::Tls;
use crate::worker::wait::state::{Since, Written};

/// Minimum size of a reply that is sent directly from the receive buffer if it is next. A copy would cost more than the
/// system call that it might share.
const DIRECT_MIN: usize = 8 << 10;

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

impl Client {
    pub(in crate::worker) fn new(
        fd: OwnedFd,
        tls: Option<Box<Tls>>,
        identity: Identity,
        database: u32,
        now_us: u64,
    ) -> Self {
        Self {
            socket: Socket::new(fd, tls, now_us),
            input: Input::new(),
            replies: Replies::new(),
            identity,
            states: States::default(),
            waits: Waits::new(),
            resp3: false,
            database,
            no_touch: false,
            in_multi: false,
            written: Written::default(),
            held: None,
            last_command: u16::MAX,
            active_ms: 0,
        }
    }

    // ---- parts ----

    #[inline]
    pub(in crate::worker) fn socket(&self) -> &Socket {
        &self.socket
    }

    #[inline]
    pub(in crate::worker) fn socket_mut(&mut self) -> &mut Socket {
        &mut self.socket
    }

    #[inline]
    pub(in crate::worker) fn input(&self) -> &Input {
        &self.input
    }

    #[inline]
    pub(in crate::worker) fn input_mut(&mut self) -> &mut Input {
        &mut self.input
    }

    #[inline]
    pub(in crate::worker) fn replies(&self) -> &Replies {
        &self.replies
    }

    #[inline]
    pub(in crate::worker) fn replies_mut(&mut self) -> &mut Replies {
        &mut self.replies
    }

    #[inline]
    pub(in crate::worker) fn identity(&self) -> &Identity {
        &self.identity
    }

    #[inline]
    pub(in crate::worker) fn identity_mut(&mut self) -> &mut Identity {
        &mut self.identity
    }

    #[inline]
    pub(in crate::worker) fn waits(&self) -> &Waits {
        &self.waits
    }

    #[inline]
    pub(in crate::worker) fn waits_mut(&mut self) -> &mut Waits {
        &mut self.waits
    }

    /// Returns the state of a feature.
    #[inline]
    pub(in crate::worker) fn state<T: State>(&self) -> Option<&T> {
        self.states.get()
    }

    #[inline]
    pub(in crate::worker) fn state_mut<T: State>(&mut self) -> Option<&mut T> {
        self.states.get_mut()
    }

    pub(in crate::worker) fn state_or_default<T: State + Default>(&mut self) -> &mut T {
        self.states.get_or_default()
    }

    pub(in crate::worker) fn set_state<T: State>(&mut self, state: T) {
        self.states.set(Some(Box::new(state)));
    }

    pub(in crate::worker) fn take_state<T: State>(&mut self) -> Option<Box<T>> {
        self.states.set(None)
    }

    // ---- session ----

    #[inline]
    pub(in crate::worker) fn resp3(&self) -> bool {
        self.resp3
    }

    /// Switches the protocol (HELLO).
    pub(in crate::worker) fn speak(&mut self, resp3: bool) {
        self.resp3 = resp3;
    }

    #[inline]
    pub(in crate::worker) fn database(&self) -> u32 {
        self.database
    }

    pub(in crate::worker) fn select(&mut self, database: u32) {
        self.database = database;
    }

    /// Whether reads do not count as accesses (CLIENT NO-TOUCH).
    #[inline]
    pub(in crate::worker) fn no_touch(&self) -> bool {
        self.no_touch
    }

    pub(in crate::worker) fn set_no_touch(&mut self, no_touch: bool) {
        self.no_touch = no_touch;
    }

    /// Between MULTI and EXEC.
    #[inline]
    pub(in crate::worker) fn in_multi(&self) -> bool {
        self.in_multi
    }

    pub(in crate::worker) fn set_in_multi(&mut self, in_multi: bool) {
        self.in_multi = in_multi;
    }

    pub(in crate::worker) fn is_monitor(&self) -> bool {
        self.states.is_monitor()
    }

    /// Starts or ends MONITOR. Returns whether it was on.
    pub(in crate::worker) fn set_monitor(&mut self, is_on: bool) -> bool {
        self.states.set_monitor(is_on)
    }

    /// Whether it has a state that restricts commands.
    #[inline]
    pub(in crate::worker) fn is_gated(&self) -> bool {
        self.states.is_gated()
    }

    /// Resets what RESET does, without its user and the state of features.
    pub(in crate::worker) fn reset(&mut self, database: u32) {
        self.resp3 = false;
        self.database = database;
        self.no_touch = false;
        self.replies.reset_mode();
        self.identity.rename(String::new());
        self.identity.keep(false);
    }

    /// Writes covered by WAIT.
    pub(in crate::worker) fn written(&self) -> Written {
        self.written
    }

    /// Records a write to the node, for WAIT.
    #[inline]
    pub(in crate::worker) fn note_written(&mut self, node: NodeId, since: Since) {
        self.written.add(node, since);
    }

    /// Records the result of a WAIT.
    pub(in crate::worker) fn note_waited(&mut self, written: Written) {
        self.written = written;
    }

    /// Number of the last command in the table of commands.
    pub(in crate::worker) fn last_command(&self) -> u16 {
        self.last_command
    }

    #[inline]
    pub(in crate::worker) fn note_command(&mut self, command: u16) {
        self.last_command = command;
    }

    /// Whether this is its first activity in the millisecond `window`.
    #[inline]
    pub(in crate::worker) fn is_first_in(&mut self, window: u32) -> bool {
        std::mem::replace(&mut self.active_ms, window) != window
    }

    /// Exclusive connection held for the current command, or kept for the next one.
    #[inline]
    pub(in crate::worker) fn held(&self) -> Option<Handle> {
        self.held
    }

    pub(in crate::worker) fn hold(&mut self, link: Handle) {
        self.held = Some(link);
    }

    pub(in crate::worker) fn take_held(&mut self) -> Option<Handle> {
        self.held.take()
    }

    // ---- several parts ----

    #[inline]
    pub(in crate::worker) fn stall(&self) -> Stall {
        self.waits.stall()
    }

    #[inline]
    pub(in crate::worker) fn is_stalled(&self) -> bool {
        self.waits.stall() != Stall::None
    }

    /// Number of pending replies.
    #[inline]
    pub(in crate::worker) fn in_flight(&self) -> usize {
        self.replies.in_flight()
    }

    /// Bytes waiting for the socket.
    #[inline]
    pub(in crate::worker) fn unsent(&self) -> usize {
        self.socket.unsent()
    }

    /// Adds a pending reply for the current command, and returns its number.
    #[inline]
    pub(in crate::worker) fn owe(&mut self, now_us: u64, class: u8) -> u32 {
        self.replies.owe(now_us, class)
    }

    /// Switches to `lane` if possible. Returns whether the client is on it.
    #[inline]
    pub(in crate::worker) fn may_take(&mut self, lane: Lane) -> bool {
        self.replies.may_take(lane)
    }

    /// Returns the read policy if replicas may reply to reads. A client that watches keys reads from the primary: the
    /// data of a replica may be older than the WATCH, and EXEC would succeed although the client has not seen the value
    /// that it replaces. And a replica may still return values that a tracking client has invalidated.
    pub(in crate::worker) fn replica_policy(&self) -> Option<Reads> {
        let reads = Some(self.identity.reads()).filter(|reads| *reads != Reads::Primary)?;
        (self.state::<Tracked>().is_none() && !self.state().is_some_and(Session::is_watching)).then_some(reads)
    }

    /// Records readiness of the socket. Returns whether it takes waiting output.
    #[inline]
    pub(in crate::worker) fn note_ready(&mut self, event: Ready) -> bool {
        self.input.note_ready(event);
        if event.writable {
            self.socket.note_writable();
        }
        event.writable && self.unsent() > 0
    }

    /// Reads and discards input. Returns whether the connection has ended.
    pub(in crate::worker) fn discard_input(&mut self, buffer: &mut [u8]) -> bool {
        match self.socket.discard(buffer) {
            // The client may still read pending replies.
            Ok(0) => self.in_flight() == 0 && self.unsent() == 0,
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => false,
            Err(_) => true,
        }
    }

    /// Records that the socket has accepted `count` bytes of the output.
    #[inline]
    pub(in crate::worker) fn note_sent(&mut self, count: usize, now_us: u64) {
        self.socket.note_sent(count, now_us);
        self.waits.note_sent(now_us);
    }

    /// Sends output as far as the socket accepts it. Returns whether the connection is intact.
    pub(super) fn flush(&mut self, counters: &WorkerCounters, now_us: u64) -> bool {
        self.socket.mark(false);
        while let Some(sent) = self.socket.send(self.input.is_closing() && self.in_flight() == 0) {
            match sent {
                Ok(count) => {
                    counters.bytes_sent.add(count as u64);
                    self.note_sent(count, now_us);
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(_) => return false,
            }
        }
        true
    }

    /// Takes the reply to command `seq`. The part of a large reply that the socket accepts is not copied. `failed`: the
    /// reply is an error.
    #[inline]
    pub(in crate::worker) fn give(
        &mut self,
        counters: &WorkerCounters,
        seq: u32,
        reply: &[u8],
        failed: bool,
        now_us: u64,
    ) {
        let mut reply = reply;
        if reply.len() >= DIRECT_MIN
            && self.replies.sends_next(seq)
            && self.socket.is_free()
            && let Some(sent) = self.socket.send_directly(reply, now_us)
        {
            counters.bytes_sent.add(sent as u64);
            reply = &reply[sent..];
        }
        self.replies.complete(self.socket.out(), seq, reply, failed, now_us, counters);
    }

    /// Appends a piece of the streamed reply.
    pub(in crate::worker) fn stream(&mut self, piece: &[u8]) {
        self.replies.stream(self.socket.out(), piece);
    }

    /// Completes the streamed reply.
    pub(in crate::worker) fn end_stream(&mut self, now_us: u64, counters: &WorkerCounters) {
        self.replies.end_stream(self.socket.out(), now_us, counters);
    }

    /// Appends something that is no reply.
    pub(in crate::worker) fn push_out(&mut self, parts: &[&[u8]]) {
        parts.iter().for_each(|part| self.socket.out().extend_from_slice(part));
    }

    /// Bytes of output held in memory: unsent, and parked behind pending replies.
    pub(in crate::worker) fn output_bytes(&self) -> usize {
        self.unsent() + self.replies.parked_bytes()
    }

    /// Memory of the client in bytes, without its commands at connections and gathers.
    pub(in crate::worker) fn memory(&self) -> usize {
        size_of::<Self>()
            + size_of::<Details>()
            + self.input.memory()
            + self.socket.memory()
            + self.replies.memory()
            + self.states.memory()
    }

    /// Records that its stalled command has passed its limits: it is dispatched again.
    pub(in crate::worker) fn note_counted(&mut self) {
        self.waits.note_counted(self.identity.is_counted());
    }

    /// Whether a command with a pending reply must be sent again. Later commands must wait for it, also between the end
    /// of its stall and its turn.
    pub(in crate::worker) fn has_yet_to_send(&self) -> bool {
        self.state::<Repeat>().is_some() || self.is_reissued()
    }

    /// Number of subscribed channels and patterns.
    pub(in crate::worker) fn subscribed(&self) -> usize {
        self.state().map_or(0, Subscriber::total)
    }

    /// Returns the client's flags in CLIENT LIST.
    fn flags(&self, dirty: bool) -> String {
        let mut flags = String::new();
        let mut add = |is: bool, letter: char| {
            if is {
                flags.push(letter);
            }
        };
        add(self.is_monitor(), 'O');
        add(self.subscribed() > 0, 'P');
        add(self.in_multi, 'x');
        add(self.stall() == Stall::Blocked || self.is_reissued(), 'b');
        let tracked = self.state::<Tracked>();
        add(tracked.is_some(), 't');
        add(tracked.and_then(Tracked::redirect).is_some_and(|r| r.broken), 'R');
        add(tracked.is_some_and(Tracked::is_broadcast), 'B');
        add(dirty, 'd');
        add(self.identity.unix().is_some(), 'U');
        if flags.is_empty() {
            flags.push('N');
        }
        flags
    }

    /// Returns the client's line in CLIENT LIST. `dirty`: watched keys have changed, or may have.
    pub(in crate::worker) fn describe(&self, now_us: u64, last_command: &str, dirty: bool) -> String {
        let who = &self.identity;
        let multi = self.state::<Session>().map(|s| &s.multi).filter(|_| self.in_multi);
        let addr = |a: Option<SocketAddr>| match (a, who.unix()) {
            (Some(address), _) => address.to_string(),
            (None, Some(path)) => format!("{}:0", path.display()),
            (None, None) => "?:0".into(),
        };
        let (unparsed, free) = self.input.used_and_free();
        let (lib_name, lib_ver) = who.shown_library();
        let count = |kind| self.state().map_or(0, |s: &Subscriber| s.count(kind));
        format!(
            "id={} addr={} laddr={} fd={} name={} age={} idle={} flags={} db={} sub={} psub={} ssub={} multi={} qbuf={} qbuf-free={} argv-mem=0 multi-mem={} rbs=0 rbp=0 obl=0 oll={} omem={} tot-mem={} events=r cmd={} user={} redir={} resp={} lib-name={} lib-ver={}\n",
            who.id(),
            addr(who.peer()),
            addr(who.local()),
            self.socket.raw_fd(),
            who.name(),
            who.age_us(now_us) / 1_000_000,
            self.socket.quiet_us(now_us) / 1_000_000,
            self.flags(dirty),
            self.database,
            count(Kind::Channel),
            count(Kind::Pattern),
            count(Kind::Shard),
            multi.map_or(-1, |m| m.count() as i64),
            unparsed,
            free,
            multi.map_or(0, |m| m.bytes()),
            self.in_flight(),
            self.socket.buffered(),
            self.memory(),
            last_command.to_ascii_lowercase(),
            who.user().name(),
            shown_redirect(self.state()),
            if self.resp3 { 3 } else { 2 },
            lib_name,
            lib_ver,
        )
    }
}
