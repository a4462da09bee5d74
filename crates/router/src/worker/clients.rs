//! The clients' side of a worker: accepting, reading, finding commands in what was read, sending replies, closing.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use rustix::net::{RecvFlags, SendFlags, SocketFlags};
use switchyard_resp::reply;
use switchyard_resp::request::{Limits, ProtocolError, Scan, Scanner, inline_to_multibulk};
use tracing::{debug, warn};

use super::dispatch::Flow;
use super::downstream::{Client, Details, ReplyMode, Stall};
use super::transport::{self, Received, Tls};
use super::{OUTPUT_HIGH, Worker};
use crate::limits::Share;
use crate::poll::Token;
use crate::settings::ListenAddress;
use crate::slab::{Handle, Slab};
use crate::users::Bounds;

/// A reply of at least this size is sent from where it was received, if it is its turn: a copy would cost more than the system call
/// that it might share.
const DIRECT_MIN: usize = 8 << 10;

/// Clients accepted per turn and listener, so that a storm of connections does not stall those that are there.
const ACCEPTS_PER_TURN: usize = 64;

/// The same for a socket that other workers accept from too: who takes few leaves some for the others.
const ACCEPTS_PER_TURN_SHARED: usize = 4;

/// What anybody can cause is logged at most so often per worker.
const RARELY_US: u64 = 1_000_000;

/// Memory of a quiet client's buffers above this is given back.
const QUIET_CAPACITY: usize = 4 << 10;

/// Bytes of one request that are collected when it cannot be passed on as it comes (Redis `client-query-buffer-limit`).
const REQUEST_MAX: usize = 1 << 30;

/// Keeps what anybody can cause from filling the log.
#[derive(Debug, Default)]
pub(super) struct Rarely {
    next_us: u64,
    untold: u64,
}

impl Rarely {
    /// Whether to say so now: then with how many times it was not said since the last.
    pub(super) fn tell(&mut self, now_us: u64) -> Option<Untold> {
        if now_us < self.next_us {
            self.untold += 1;
            return None;
        }
        self.next_us = now_us + RARELY_US;
        Some(Untold(std::mem::take(&mut self.untold)))
    }
}

/// How many times something was not said.
pub(super) struct Untold(u64);

impl Untold {
    /// For a field of a log line, which is left out where there is nothing to tell.
    pub(super) fn told(&self) -> Option<u64> {
        (self.0 > 0).then_some(self.0)
    }
}

impl Worker {
    pub(super) fn accept(&mut self, index: usize) {
        if !self.accepting {
            return;
        }
        let accepts = if self.listeners[index].is_shared() { ACCEPTS_PER_TURN_SHARED } else { ACCEPTS_PER_TURN };
        for _ in 0..accepts {
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            match rustix::net::acceptfrom_with(&self.listeners[index], flags) {
                Ok((fd, peer)) => self.greet_client(index, fd, peer.and_then(|p| p.try_into().ok())),
                Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => {}
                Err(rustix::io::Errno::MFILE | rustix::io::Errno::NFILE) => {
                    // Without a descriptor the connection cannot even be refused: give up the spare one for that.
                    self.spare = None;
                    if let Ok(fd) = rustix::net::accept_with(&self.listeners[index], flags) {
                        self.refuse_connection(&fd, "ERR max number of clients reached");
                        self.counters.rejected.add(1);
                    }
                    self.spare = spare_descriptor();
                    return;
                }
                Err(_) => return,
            }
        }
    }

    fn greet_client(&mut self, listener: usize, fd: OwnedFd, peer: Option<std::net::SocketAddr>) {
        let live = self.plan.live.clone();
        let settings = self.listeners[listener].settings.clone();
        let mut share = None;
        if settings.bounds != Bounds::default() || settings.connections_per_second.is_some() {
            let name = format!("listener:{}", self.listeners[listener].number);
            let account = self.shared.limits.account(&name);
            let too_fast = settings.connections_per_second.is_some_and(|rate| account.accepts.take(rate, self.now_us).is_err());
            share = Share::connect(self.part_of(name), settings.bounds.connections).filter(|_| !too_fast).map(Box::new);
            if share.is_none() {
                self.counters.limited_connections.add(1);
                if !settings.tls {
                    self.refuse_connection(&fd, "LIMITED this listener takes no more connections now; try again");
                }
                return;
            }
        }
        if self.shared.clients.fetch_add(1, Ordering::Relaxed) >= live.max_clients {
            self.shared.clients.fetch_sub(1, Ordering::Relaxed);
            self.counters.rejected.add(1);
            if !settings.tls {
                self.refuse_connection(&fd, "ERR max number of clients reached");
            }
            return;
        }
        let tls = match (settings.tls, &live.tls) {
            (false, _) => None,
            (true, Some(tls)) => Tls::accept(tls.config.clone()).ok(),
            (true, None) => None,
        };
        if settings.tls && tls.is_none() {
            // Never in clear where TLS was asked for.
            self.shared.clients.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        let unix = match &settings.address {
            ListenAddress::Tcp(_) => {
                let _ = rustix::net::sockopt::set_tcp_nodelay(&fd, true);
                let _ = rustix::net::sockopt::set_socket_keepalive(&fd, true);
                // As Redis: a client whose host is gone is found out after some ten minutes, not after the system's two hours. It may be
                // waiting in a blocking command.
                let _ = rustix::net::sockopt::set_tcp_keepidle(&fd, std::time::Duration::from_secs(300));
                let _ = rustix::net::sockopt::set_tcp_keepintvl(&fd, std::time::Duration::from_secs(100));
                let _ = rustix::net::sockopt::set_tcp_keepcnt(&fd, 3);
                None
            }
            ListenAddress::Unix { path, .. } => Some(path.clone()),
        };
        let details = Box::new(Details {
            id: self.shared.next_client_id.fetch_add(1, Ordering::Relaxed),
            peer,
            local: rustix::net::getsockname(&fd).ok().and_then(|a| a.try_into().ok()),
            unix,
            name: String::new(),
            lib_name: String::new(),
            lib_ver: String::new(),
            created_us: self.now_us,
            stranger_since_us: self.now_us,
            no_evict: false,
        });
        let mut client = Client::new(fd, tls, live.users.default_user().clone(), settings, live.database, self.now_us, details);
        client.listener_share = share;
        let handle = self.clients.insert(client);
        let user = self.plan.live.users.default_user().clone();
        let open = user.is_open();
        if self.become_user(handle, user, open).is_err() {
            // The default user has all the connections it may have: others can still log in.
            self.counters.limited_connections.add(1);
        }
        let registered = self.clients.get(handle).map(|c| self.poll.add(&c.fd, Token::Client(handle)));
        if !matches!(registered, Some(Ok(()))) {
            self.clients.remove(handle);
            self.shared.clients.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        self.counters.accepted.add(1);
        self.counters.clients.add(1);
    }

    /// Reads once. What is left in the socket is read in the next turn, so that one busy client does not hold up the others.
    pub(super) fn read_client(&mut self, handle: Handle) {
        let Some(client) = self.clients.get_mut(handle) else { return };
        client.readable = true;
        if client.stall != Stall::None || client.closing || client.half_closed {
            if client.closing {
                self.discard_input(handle);
            } else if (client.stall == Stall::Blocked || client.is_recalled()) && client.hangup {
                // As Redis: nobody waits on behalf of a client that has gone, whatever it sent behind the command.
                self.close_client(handle);
            }
            return;
        }
        self.batching.note(client);
        client.last_used_us = self.now_us;
        let mut buffer = std::mem::take(&mut self.read_buffer);
        let handshaking = client.is_handshaking();
        let read = transport::receive(&client.fd, &mut client.tls, &mut buffer);
        match read {
            Ok(Received { count: 0, .. }) => {
                // The client may still read: commands in flight are answered before the connection is closed.
                client.half_closed = true;
                self.close_if_done(handle);
            }
            Ok(Received { count, more }) => {
                self.counters.bytes_received.add(count as u64);
                client.readable = more || client.hangup;
                if client.readable {
                    self.unread.push(Token::Client(handle));
                }
                self.take_input(handle, &buffer[..count]);
            }
            Err(rustix::io::Errno::AGAIN) => client.readable = false,
            Err(rustix::io::Errno::INTR) => self.unread.push(Token::Client(handle)),
            Err(_) => {
                if handshaking {
                    let why = client.tls.as_ref().and_then(|tls| tls.failure());
                    self.handshake_failed(handle, why.as_deref().unwrap_or("it closed the connection"));
                }
                self.close_client(handle);
            }
        }
        self.read_buffer = buffer;
    }

    /// Counts a failed TLS handshake, and says so from time to time: anybody can cause as many as they like.
    pub(super) fn handshake_failed(&mut self, handle: Handle, why: &str) {
        self.counters.handshakes_failed.add(1);
        let Some(untold) = self.handshake_log.tell(self.now_us) else { return };
        let Some(client) = self.clients.get(handle) else { return };
        let from = client.details.peer.map_or_else(|| "a Unix socket".to_owned(), |peer| peer.to_string());
        warn!(from, why, untold = untold.told(), "a client's TLS handshake failed");
    }

    /// A client that is being closed is still read from, so that the error it is sent is not lost to a reset.
    fn discard_input(&mut self, handle: Handle) {
        let Some(client) = self.clients.get_mut(handle) else { return };
        let mut buffer = std::mem::take(&mut self.read_buffer);
        // Below TLS: nobody looks at it.
        if matches!(rustix::net::recv(&client.fd, &mut buffer[..], RecvFlags::empty()), Ok((_, 0)) | Err(_)) && client.unsent() == 0 {
            self.close_client(handle);
        }
        self.read_buffer = buffer;
    }

    fn take_input(&mut self, handle: Handle, bytes: &[u8]) {
        let Some(client) = self.clients.get_mut(handle) else { return };
        if client.input.is_empty() {
            let taken = self.process(handle, bytes);
            if let Some(client) = self.clients.get_mut(handle)
                && taken < bytes.len()
            {
                client.input.extend_from_slice(&bytes[taken..]);
                client.input_at = 0;
            }
        } else {
            let missing = client.scanner.as_ref().map_or(0, |scanner| scanner.missing(&client.input[client.input_at..]));
            make_room(&mut client.input, bytes.len(), missing);
            client.input.extend_from_slice(bytes);
            self.process_input(handle);
        }
    }

    /// Looks at the client's own buffer.
    fn process_input(&mut self, handle: Handle) {
        let Some(client) = self.clients.get_mut(handle) else { return };
        let mut input = std::mem::take(&mut client.input);
        let at = client.input_at;
        let taken = at + self.process(handle, &input[at..]);
        let Some(client) = self.clients.get_mut(handle) else { return };
        if taken == input.len() {
            input.clear();
            if input.capacity() > QUIET_CAPACITY {
                input = Vec::new();
            }
            client.input_at = 0;
        } else if taken > 64 << 10 && taken * 2 > input.len() {
            input.drain(..taken);
            client.input_at = 0;
        } else {
            client.input_at = taken;
        }
        client.input = input;
    }

    pub(super) fn resume_client(&mut self, handle: Handle) {
        let Some(client) = self.clients.get_mut(handle) else { return };
        if client.is_recalled() && client.stall != Stall::Exclusive {
            self.issue_again(handle);
            return;
        }
        // First of all: between the end of the wait and now, more input may have ended in another stall, which only the repeat's reply ends.
        if client.repeat.is_some() && (client.stall == Stall::Exclusive || !self.run_repeat(handle)) {
            return;
        }
        self.go_on_waiting(handle);
        let Some(client) = self.clients.get_mut(handle) else { return };
        if client.stall != Stall::None {
            return;
        }
        if client.input_at < client.input.len() {
            self.process_input(handle);
        }
        if let Some(client) = self.clients.get_mut(handle)
            && client.stall == Stall::None
        {
            if client.readable {
                self.unread.push(Token::Client(handle));
            }
            self.close_if_done(handle);
        }
    }

    /// Executes the commands at the start of `bytes` and returns how many bytes they took.
    fn process(&mut self, handle: Handle, bytes: &[u8]) -> usize {
        let Some(client) = self.clients.get_mut(handle) else { return 0 };
        let plan = self.plan.clone();
        let mut scanner = std::mem::take(&mut self.scanner);
        if let Some(kept) = client.scanner.take() {
            scanner = *kept;
        }
        let mut pos = 0;
        let mut failed = None;
        while let Some(client) = self.clients.get_mut(handle) {
            if client.stall != Stall::None || client.closing {
                break;
            }
            if client.upload.is_some() {
                match self.upload(handle, &plan, &bytes[pos..]) {
                    Ok((taken, done)) => {
                        pos += taken;
                        if done {
                            continue;
                        }
                        break;
                    }
                    Err(error) => {
                        failed = Some(error);
                        break;
                    }
                }
            }
            if pos == bytes.len() {
                break;
            }
            if !client.has_room(plan.live.client_pipeline_max) {
                self.stall(handle, Stall::Pipeline);
                break;
            }
            if client.unsent() > OUTPUT_HIGH {
                if !client.writes_first && !self.flush_client(handle) {
                    self.stall(handle, Stall::Output);
                    break;
                }
                // Few bytes read can be commands with large replies.
                self.watch_memory();
            }
            let Some(client) = self.clients.get_mut(handle) else { break };
            let limits = Limits {
                argument_max: plan.live.argument_max,
                large: if client.buffer_large { usize::MAX } else { plan.live.large_value },
                authenticated: client.authenticated,
            };
            let flow = match scanner.scan(&bytes[pos..], &limits) {
                Ok(Scan::Complete { len, canonical }) => {
                    let raw = &bytes[pos..pos + len];
                    let args = scanner.args(raw);
                    let flow = if canonical {
                        self.dispatch(&plan, handle, raw, &args)
                    } else {
                        let mut again = Vec::with_capacity(len);
                        switchyard_resp::encode::command(&mut again, args.iter().collect::<Vec<_>>());
                        let mut rescan = Scanner::default();
                        let _ = rescan.scan(&again, &limits);
                        self.dispatch(&plan, handle, &again, &rescan.args(&again))
                    };
                    (flow, len)
                }
                Ok(Scan::Inline { len }) => {
                    let mut again = Vec::new();
                    match inline_to_multibulk(&bytes[pos..pos + len], &mut again) {
                        Ok(()) if again.is_empty() => (Flow::Next, len),
                        Ok(()) => {
                            let mut rescan = Scanner::default();
                            let _ = rescan.scan(&again, &Limits { authenticated: true, large: usize::MAX, ..limits });
                            (self.dispatch(&plan, handle, &again, &rescan.args(&again)), len)
                        }
                        Err(error) => {
                            failed = Some(error);
                            break;
                        }
                    }
                }
                Ok(Scan::Empty { len }) => (Flow::Next, len),
                Ok(Scan::Incomplete) => break,
                Ok(Scan::Large { data, len, after }) => {
                    let header = &bytes[pos..pos + data];
                    match self.dispatch_large(&plan, handle, header, &scanner.args(header), len, after) {
                        Flow::Buffer => {
                            client_mut(&mut self.clients, handle, |c| c.buffer_large = true);
                            continue;
                        }
                        flow => (flow, data),
                    }
                }
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            };
            match flow {
                (Flow::Next, len) => {
                    pos += len;
                    scanner.reset();
                    client_mut(&mut self.clients, handle, |c| c.buffer_large = false);
                }
                (Flow::Stall(why), _) => {
                    scanner.reset();
                    if why != Stall::Exclusive {
                        self.stall(handle, why);
                    } // else it is in the queue for a connection, or was woken from it already
                    break;
                }
                (Flow::Close | Flow::Buffer, len) => {
                    pos += len;
                    scanner.reset();
                    break;
                }
            }
        }
        if let Some(error) = failed {
            scanner.reset();
            self.protocol_error(handle, error);
            pos = bytes.len();
        }
        if let Some(client) = self.clients.get_mut(handle) {
            if client.closing {
                pos = bytes.len();
            } else if bytes.len() - pos > REQUEST_MAX {
                scanner.reset();
                self.protocol_error(handle, ProtocolError::TooLarge);
                pos = bytes.len();
            } else if scanner.is_mid_command() && bytes.len() - pos > 16 << 10 {
                // Worth keeping: a small command is scanned again from its start.
                client.scanner = Some(Box::new(std::mem::take(&mut scanner)));
            }
        }
        scanner.reset();
        self.scanner = scanner;
        pos
    }

    pub(super) fn stall(&mut self, handle: Handle, why: Stall) {
        if let Some(client) = self.clients.get_mut(handle) {
            match (client.stall == Stall::Blocked, why == Stall::Blocked) {
                (false, true) => self.counters.blocked.add(1),
                (true, false) => self.counters.blocked.sub(1),
                _ => {}
            }
            client.stall = why;
            client.stalled_at_us = self.now_us;
        }
    }

    /// Ends a stall; the client goes on in this turn.
    pub(super) fn unstall(&mut self, handle: Handle) {
        let mut over = None;
        if let Some(client) = self.clients.get_mut(handle)
            && client.stall != Stall::None
        {
            // A client that does not read, or sends without end, keeps itself waiting, and one in a blocking command is meant to.
            if !matches!(client.stall, Stall::Output | Stall::Pipeline | Stall::Blocked) {
                client.waited = (client.next_seq(), self.now_us.saturating_sub(client.stalled_at_us) as u32);
            }
            if client.stall == Stall::Blocked {
                self.counters.blocked.sub(1);
                over = client.waiting.take();
            }
            client.stall = Stall::None;
            self.resumed.push(handle);
        }
        if let Some(waiting) = over {
            self.leave_line(&waiting);
        }
    }

    fn protocol_error(&mut self, handle: Handle, error: ProtocolError) {
        self.counters.protocol_errors.add(1);
        let Some(client) = self.clients.get_mut(handle) else { return };
        debug!(client = client.details.id, %error, "closing a client");
        client.reply_mode = ReplyMode::On;
        let mut reply = std::mem::take(&mut self.scratch);
        reply.clear();
        switchyard_resp::encode::line(&mut reply, b'-', &error.reply_text());
        match self.give_up_upload(handle) {
            Some(seq) => self.deliver(handle, seq, &reply),
            None => self.answer(handle, 0, &reply),
        }
        self.scratch = reply;
        self.close_after_replies(handle);
    }

    /// Tells a connection that is not taken why.
    fn refuse_connection(&self, fd: &OwnedFd, error: &str) {
        let mut reply = Vec::new();
        switchyard_resp::encode::error(&mut reply, error);
        self.counters.errors.count(&reply);
        let _ = rustix::net::send(fd, &reply, SendFlags::NOSIGNAL);
    }

    /// Gives a client the reply to the command just read.
    pub(super) fn answer(&mut self, handle: Handle, class: u8, reply: &[u8]) {
        if let Some(client) = self.clients.get_mut(handle) {
            let seq = client.owe(self.now_us, class);
            self.deliver(handle, seq, reply);
        }
    }

    /// Gives a client the reply to command `seq`, and lets it go on where it waited for that.
    pub(super) fn deliver(&mut self, handle: Handle, seq: u32, reply: &[u8]) {
        let Some(client) = self.clients.get_mut(handle) else { return };
        let whole = reply;
        let failed = reply::is_error(whole);
        if failed {
            self.counters.errors.count(whole);
        }
        let mut reply = reply;
        if reply.len() >= DIRECT_MIN
            && client.takes_directly(seq)
            && let Ok(sent) = transport::send(&client.fd, &mut client.tls, reply)
        {
            self.counters.bytes_sent.add(sent as u64);
            client.last_used_us = self.now_us;
            client.writable = sent == reply.len();
            reply = &reply[sent..];
        }
        client.complete(seq, reply, failed, self.now_us, &self.counters);
        if !client.dirty {
            client.dirty = true;
            self.dirty_clients.push(handle);
        }
        if client.gated {
            self.settle_own_write(handle, seq, whole);
        }
        self.after_delivery(handle);
    }

    #[inline]
    pub(super) fn after_delivery(&mut self, handle: Handle) {
        let Some(client) = self.clients.get_mut(handle) else { return };
        let gated = client.gated;
        let go_on = match client.stall {
            Stall::Barrier | Stall::Blocked => client.in_flight() == 0,
            Stall::Pipeline => client.in_flight() == 0 || client.has_room(self.plan.live.client_pipeline_max / 2),
            _ => false,
        };
        if gated {
            self.release_invalidations(handle);
            self.release_messages(handle);
        }
        if go_on {
            self.unstall(handle);
        }
    }

    pub(super) fn flush_clients(&mut self) {
        let mut dirty = std::mem::take(&mut self.dirty_clients);
        for handle in dirty.drain(..) {
            self.flush_client(handle);
        }
        if self.dirty_clients.is_empty() {
            self.dirty_clients = dirty;
        }
    }

    /// Sends what the client is owed, as far as its socket takes it; true where nothing is left.
    pub(super) fn flush_client(&mut self, handle: Handle) -> bool {
        let Some(client) = self.clients.get_mut(handle) else { return true };
        client.dirty = false;
        let mut broken = false;
        while client.unsent() > 0 && client.writable {
            let bytes = &client.out[client.out_sent..];
            let sent = if client.closing && client.in_flight() == 0 {
                transport::send_last(&client.fd, &mut client.tls, bytes)
            } else {
                transport::send(&client.fd, &mut client.tls, bytes)
            };
            match sent {
                Ok(count) => {
                    self.counters.bytes_sent.add(count as u64);
                    client.note_sent(count, self.now_us);
                }
                Err(rustix::io::Errno::AGAIN) => client.writable = false,
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => {
                    broken = true;
                    break;
                }
            }
        }
        if broken {
            self.close_client(handle);
            return true;
        }
        let done = client.unsent() == 0;
        if done {
            client.out.clear();
            client.out_sent = 0;
            if client.out.capacity() > QUIET_CAPACITY && client.in_flight() == 0 {
                client.out = Vec::new();
            }
        } else if client.out_sent > OUTPUT_HIGH {
            client.out.drain(..client.out_sent);
            client.out_sent = 0;
        }
        if client.output_bytes() > self.plan.live.client_output_limit {
            warn!(
                client = client.details.id,
                bytes = client.output_bytes(),
                "cutting a client that does not read its replies (output-limit)"
            );
            self.counters.cut_output.add(1);
            self.close_client(handle);
            return true;
        }
        let client_unsent = client.unsent();
        if let Some(held) = client.held
            && client_unsent < OUTPUT_HIGH / 4
        {
            self.unpause_link(held);
        }
        if let Some(client) = self.clients.get_mut(handle) {
            if client_unsent <= OUTPUT_HIGH / 2 {
                client.writes_first = false;
            }
            if client.stall == Stall::Output && client_unsent <= OUTPUT_HIGH / 2 {
                self.unstall(handle);
            } else if done && (client.closing || client.half_closed) {
                self.close_if_done(handle);
            }
        }
        done
    }

    /// Closes the connection once all replies owed so far have been sent.
    pub(super) fn close_after_replies(&mut self, handle: Handle) {
        if let Some(client) = self.clients.get_mut(handle) {
            client.closing = true;
            client.input = Vec::new();
            client.input_at = 0;
            if !client.dirty {
                client.dirty = true;
                self.dirty_clients.push(handle);
            }
        }
    }

    pub(super) fn close_if_done(&mut self, handle: Handle) {
        let Some(client) = self.clients.get_mut(handle) else { return };
        if !(client.closing || client.half_closed) || client.in_flight() > 0 || client.unsent() > 0 {
            return;
        }
        let waits = client.stall != Stall::None || (client.half_closed && self.resumed.contains(&handle));
        if !client.closing && waits {
            return;
        }
        if client.closing && !client.half_closed {
            // Let the client read the last reply: a close with unread input in our socket would reset the connection.
            transport::finish(&client.fd, &mut client.tls);
            let mut sink = [0u8; 4096];
            for _ in 0..256 {
                if !matches!(rustix::net::recv(&client.fd, &mut sink[..], RecvFlags::empty()), Ok((_, 1..))) {
                    break;
                }
            }
        }
        self.close_client(handle);
    }

    pub(super) fn close_client(&mut self, handle: Handle) {
        let Some(mut client) = self.clients.remove(handle) else { return };
        if let Some(tls) = &mut client.tls {
            tls.notify_close(&client.fd);
        }
        self.poll.remove(&client.fd);
        self.shared.clients.fetch_sub(1, Ordering::Relaxed);
        self.counters.clients.sub(1);
        if client.stall == Stall::Blocked {
            self.counters.blocked.sub(1);
        }
        if let Some(waiting) = &client.waiting {
            self.leave_line(waiting);
        }
        let watched = client.session.as_ref().and_then(|s| s.watch.as_ref()).map(|w| w.link);
        for held in client.held.into_iter().chain(watched) {
            if self.links.get(held).is_some_and(|l| l.holder == handle) {
                self.abandon(held);
            }
        }
        if client.monitor {
            self.end_monitor(handle);
        }
        if client.tracked.is_some() {
            self.end_tracking(handle);
        }
        if let Some(subscriber) = client.pubsub {
            self.forget_subscriber(handle, &subscriber);
        }
    }
}

/// Makes room for `more` bytes in a buffer that collects a request, of which `missing` are known to be still to come. A vector that grows by itself
/// doubles: a request of 80 MB would take up to 160, as chance has it, and its client be taken for a bigger one than it is (`memory-max`).
fn make_room(buffer: &mut Vec<u8>, more: usize, missing: usize) {
    if missing > 0 && buffer.capacity() - buffer.len() < more {
        // Not all at once, because what is declared need not come. Not too little, because each time all may have to be copied.
        buffer.reserve_exact(missing.clamp(buffer.len() / 4, buffer.len()).max(more));
    }
}

fn client_mut(clients: &mut Slab<Client>, handle: Handle, change: impl FnOnce(&mut Client)) {
    if let Some(client) = clients.get_mut(handle) {
        change(client);
    }
}

pub(super) fn spare_descriptor() -> Option<OwnedFd> {
    rustix::fs::open("/dev/null", rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC, rustix::fs::Mode::empty()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_is_collected_takes_little_more_than_it_needs_and_few_copies() {
        let declared = 80 << 20;
        for first in [45, 1000, 16 << 10, 64_000, 82_000, 128 << 10] {
            let (mut buffer, mut grown) = (Vec::with_capacity(first), 0);
            buffer.resize(first, 0u8);
            while buffer.len() < declared {
                let piece = (128 << 10).min(declared - buffer.len());
                let (before, missing) = (buffer.capacity(), declared - buffer.len());
                make_room(&mut buffer, piece, missing);
                buffer.resize(buffer.len() + piece, 0);
                grown += usize::from(buffer.capacity() != before);
                assert!(buffer.capacity() <= (2 * buffer.len()).max(first + (128 << 10)), "{} for {}", buffer.capacity(), buffer.len());
            }
            assert!(buffer.capacity() <= declared + declared / 4, "{} after {first}", buffer.capacity());
            assert!(grown <= 25, "copied {grown} times after {first}");
        }
    }
}
