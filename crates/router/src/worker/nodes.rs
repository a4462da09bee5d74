//! The worker's connections to the nodes: connecting, sending, receiving. What happens when one breaks or is silent is in `breaking`.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use switchyard_policy::topology::NodeId;
use switchyard_resp::reply::{ReplyScan, ReplyScanner};
use switchyard_resp::{encode, reply};
use tracing::{debug, warn};

use super::keyed::{Call, Keyed, Request, Ticket};
use super::transport::{self, Received, Tls};
use super::upstream::{Body, Lane, Link, Pending, Phase, Purpose};
use super::{Stall, Worker};
use crate::poll::{Ready, Token};
use crate::slab::Handle;

/// Bytes unsent on a shared connection above which clients that want to add to it wait.
const UNSENT_HIGH: usize = 8 << 20;

/// A link that took commands again below this.
const UNSENT_LOW: usize = UNSENT_HIGH / 2;

const BACKOFF_FIRST_US: u64 = 50_000;

impl Worker {
    /// Connects to nodes that there is no connection to yet, so that the first command finds it.
    pub(super) fn connect_main(&mut self) {
        let plan = self.plan.clone();
        self.note_keepers();
        self.links.know_nodes(plan.topology.node_id_bound());
        for node in plan.topology.nodes() {
            let _ = self.shared_link(node.id, Lane::Main, false);
        }
    }

    /// Closes connections to nodes that the topology no longer has. Such a node owns nothing: what may still be in flight there is a part of
    /// a command to all nodes, and whatever it does reaches nobody, so its zombies are forgotten too.
    pub(super) fn drop_foreign_links(&mut self) {
        let gone: Vec<Handle> =
            self.links.iter().filter(|(_, link)| self.plan.topology.node(link.node).is_none()).map(|(handle, _)| handle).collect();
        for handle in gone {
            self.break_link(handle, "the node was removed");
            // Where it was not up it would be tried again, for ever.
            self.drop_link(handle);
        }
        self.zombies.forget_foreign(&self.plan.topology);
    }

    /// The connection of a shared lane, made (not necessarily up) where there is none.
    pub(super) fn shared_link(&mut self, node: NodeId, lane: Lane, resp3: bool) -> Handle {
        if let Some(handle) = self.links.shared(node, lane, resp3) {
            return handle;
        }
        let mut link = Link::new(node, lane, resp3, self.plan.live.database, self.counters.node(node), self.now_us);
        // A second connection to a node known to be down waits for its turn like the first.
        link.failures = u32::from(self.shared.with_facts(node, |f| f.failure.is_some()));
        let handle = self.links.insert_shared(link);
        self.connect(handle);
        handle
    }

    pub(super) fn connect(&mut self, handle: Handle) {
        let Some(link) = self.links.get_mut(handle) else { return };
        let Some(access) = self.plan.live.nodes.get(&link.node) else {
            self.attempt_failed(handle, "no address is configured for it");
            return;
        };
        let Some(address) = self.plan.address_of(link.node, link.replica) else {
            self.attempt_failed(handle, "no Sentinel has named its primary yet");
            return;
        };
        let tls = access.tls.as_ref().map(|tls| Tls::connect(tls.config.clone(), tls.name.clone())).transpose();
        let tls = match tls {
            Ok(tls) => tls,
            Err(error) => {
                self.attempt_failed(handle, &format!("TLS: {error}"));
                return;
            }
        };
        link.address = Some(address);
        match start_connect(address) {
            Ok(fd) => {
                link.tls = tls;
                link.phase = Phase::Connecting;
                link.since_us = self.now_us;
                link.readable = false;
                link.hangup = false;
                link.writable = false;
                let added = self.poll.add(&fd, Token::Link(handle));
                link.fd = Some(fd);
                if let Err(error) = added {
                    self.attempt_failed(handle, &error.to_string());
                }
            }
            Err(error) => self.attempt_failed(handle, &error.to_string()),
        }
    }

    /// An attempt to connect ended without a connection.
    pub(super) fn attempt_failed(&mut self, handle: Handle, why: &str) {
        let Some(link) = self.links.get_mut(handle) else { return };
        link.failures += 1;
        link.renewing = false;
        link.counters.failures.add(1);
        let (node, lane, failures) = (link.node, link.lane, link.failures);
        if lane == Lane::Replica {
            self.replica_failed(handle, why);
            return;
        }
        let name = self.node_name(node);
        // One connection too many, at a node that serves: that concerns those in line for it, not the node.
        let serves = lane.is_exclusive() && self.node_is_up(node);
        let news = !serves
            && self.plan.topology.node(node).is_some()
            && self.shared.with_facts(node, |facts| {
                facts.tried = true;
                facts.failure.replace(why.to_string()).as_deref() != Some(why)
            });
        if news {
            warn!(node = %name, why, "node cannot be reached; trying again with increasing pauses");
        }
        self.fail_all(handle, &format!("NODEDOWN {name} cannot be reached: {why}"), 0);
        if lane.is_exclusive() {
            self.exclusive_failed(handle, why);
            return;
        }
        if lane == Lane::Pubsub {
            self.pubsub_link_failed(node);
        }
        let backoff_max = self.plan.live.reconnect_backoff_max.as_micros() as u64;
        let mut backoff = (BACKOFF_FIRST_US << failures.min(10)).min(backoff_max);
        // Workers and routers that lost a node together should not come back together.
        backoff -= (self.now_us ^ u64::from(handle.index)) % (backoff / 4).max(1);
        if let Some(link) = self.links.get_mut(handle) {
            link.downgraded = false;
            if let Some(fd) = link.fd.take() {
                self.poll.remove(&fd);
            }
            link.tls = None;
            link.phase = Phase::Waiting { until_us: self.now_us + backoff };
        }
    }

    pub(super) fn node_name(&self, node: NodeId) -> String {
        self.plan.topology.node(node).map_or_else(|| "a removed node".into(), |n| n.name.clone())
    }

    /// Why a node takes no commands, as an error reply's text.
    pub(super) fn down_text(&self, node: NodeId) -> String {
        let why = self.shared.with_facts(node, |f| f.failure.clone()).unwrap_or_else(|| "not connected".into());
        format!("NODEDOWN {} cannot be reached: {why}", self.node_name(node))
    }

    pub(super) fn on_link_ready(&mut self, handle: Handle, event: Ready) {
        let Ready { readable, writable, hangup, .. } = event;
        let Some(link) = self.links.get_mut(handle) else { return };
        link.hangup |= hangup;
        if link.phase == Phase::Connecting {
            if !writable && !readable {
                return;
            }
            let failed = link.fd.as_ref().map(rustix::net::sockopt::socket_error);
            match failed {
                Some(Ok(Ok(()))) => self.secure_link(handle),
                Some(Ok(Err(error)) | Err(error)) => self.attempt_failed(handle, &io::Error::from(error).to_string()),
                None => {}
            }
        }
        let Some(link) = self.links.get_mut(handle) else { return };
        if writable {
            link.writable = true;
            if link.phase == Phase::Securing {
                self.drive_handshake(handle);
            } else if link.unsent() > 0 {
                link.flowed_us = self.now_us;
                self.links.mark(handle);
            }
        }
        if readable {
            self.read_link(handle);
        }
    }

    /// Sends a command of our own, without keys.
    pub(super) fn push_own(&mut self, handle: Handle, args: &[&[u8]], purpose: Purpose, seq: u32) {
        self.push_own_for(handle, Handle::NONE, args, purpose, seq);
    }

    /// The same, about somebody.
    pub(super) fn push_own_for(&mut self, handle: Handle, who: Handle, args: &[&[u8]], purpose: Purpose, seq: u32) {
        let Some(link) = self.links.get(handle) else { return };
        let pending = Pending { who, purpose, seq, ..self.own_pending() };
        let mut request = Vec::new();
        encode::command(&mut request, args.iter().copied());
        let request = Request::of_ours(&request, link.database, pending);
        self.links.push(handle, request);
    }

    /// The same in a transaction and a database, with keys. Nobody waits for the reply.
    pub(super) fn push_own_queued(&mut self, handle: Handle, database: u32, args: &[&[u8]]) {
        let Some(node) = self.links.get(handle).map(|link| link.node) else { return };
        let mut request = Vec::new();
        encode::command(&mut request, args.iter().copied());
        let request = self.pass_queued(Keyed { call: Call::Bytes(&request), node, database }, &request, self.own_pending());
        self.links.push(handle, request);
    }

    /// Ends such a transaction, which is about somebody.
    pub(super) fn push_own_exec(&mut self, handle: Handle, who: Handle, database: u32, purpose: Purpose) {
        let pending = Pending { who, purpose, ..self.own_pending() };
        let request = self.pass_exec(database, pending);
        self.links.push(handle, request);
    }

    fn own_pending(&self) -> Pending {
        Pending {
            who: Handle::NONE,
            seq: 0,
            len: 0,
            sent_us: self.now_us as u32,
            epoch: self.plan.topology.epoch() as u32,
            purpose: Purpose::Nobody,
            class: switchyard_resp::command::CommandClass::Admin as u8,
            repeatable: false,
            by_sha: false,
            ticket: Ticket::NONE,
        }
    }

    /// Asks the node to kill the connections that broke, on one that is newer than all of them.
    pub(super) fn kill_zombies(&mut self, node: NodeId, handle: Handle, run_id: Option<&str>) {
        for (number, client_id) in self.zombies.ask(node, handle, run_id) {
            self.push_own(handle, &[b"CLIENT", b"KILL", b"ID", client_id.to_string().as_bytes()], Purpose::Confirm, number);
        }
        self.count_zombies(node);
    }

    pub(super) fn count_zombies(&self, node: NodeId) {
        self.counters.node(node).unconfirmed.set(self.zombies.count_at(node));
    }

    fn on_own_reply(&mut self, pending: Pending, node: NodeId, answer: &[u8]) {
        match pending.purpose {
            Purpose::Confirm if reply::is_error(answer) && !answer.starts_with(b"-ERR No such") => {
                warn!(node = %self.node_name(node), error = %reply::told_error(answer), "node refuses CLIENT KILL ID: what a broken connection left unanswered there stays unconfirmed (allow the command to our user)");
            }
            Purpose::Confirm => {
                self.zombies.end(pending.seq);
                self.count_zombies(node);
            }
            Purpose::Learn => self.learn(node, answer),
            Purpose::Nobody if reply::is_error(answer) => {
                debug!(node = %self.node_name(node), error = %reply::told_error(answer), "node refuses a command of our own");
            }
            _ => {}
        }
    }

    // ---- sending and receiving ----

    pub(super) fn flush_links(&mut self) {
        let mut marked = self.links.take_marked();
        for handle in marked.drain(..) {
            // A connection that broke just now may have begun a round on this one.
            self.tell_movers();
            self.flush_link(handle);
        }
        self.links.reuse(marked);
    }

    fn flush_link(&mut self, handle: Handle) {
        let Some(link) = self.links.get_mut(handle) else { return };
        link.dirty = false;
        if link.phase != Phase::Up || link.retiring {
            return;
        }
        if let Err(error) = link.send() {
            self.break_link(handle, &io::Error::from(error).to_string());
            return;
        }
        let low = if link.lane == Lane::Large { super::large::UPLOAD_LOW } else { UNSENT_LOW };
        if link.has_room(low) && !link.waiters.is_empty() {
            for waiter in std::mem::take(&mut link.waiters) {
                if self.clients.get(waiter).is_some_and(|c| c.stall == Stall::Upstream) {
                    self.unstall(waiter);
                }
            }
        }
    }

    /// Whether a client must wait before it adds to this link; then it is told when it may.
    pub(super) fn link_is_full(&mut self, handle: Handle, client: Handle, high: usize) -> bool {
        let Some(link) = self.links.get_mut(handle) else { return false };
        if link.has_room(high) {
            return false;
        }
        if !link.waiters.contains(&client) {
            link.waiters.push(client);
        }
        self.links.mark(handle);
        true
    }

    pub(super) const UNSENT_HIGH: usize = UNSENT_HIGH;

    pub(super) fn read_link(&mut self, handle: Handle) {
        let Some(link) = self.links.get_mut(handle) else { return };
        link.readable = true;
        if link.paused || !matches!(link.phase, Phase::Up | Phase::Greeting | Phase::Securing) {
            return;
        }
        let Some(fd) = link.fd.as_ref() else { return };
        let mut input = std::mem::take(&mut link.input);
        let mut buffer = std::mem::take(&mut self.read_buffer);
        let result = transport::receive(fd, &mut link.tls, &mut buffer);
        match result {
            Ok(Received { count: 0, .. }) => {
                link.input = input;
                self.break_link(handle, "the node closed the connection");
            }
            Ok(Received { count, more }) => {
                link.counters.bytes_received.add(count as u64);
                link.received_us = self.now_us;
                link.readable = more || link.hangup;
                if link.phase == Phase::Securing {
                    link.input = input;
                    self.read_buffer = buffer;
                    self.attempt_failed(handle, "it sent data before our greeting");
                    return;
                }
                let more = link.readable;
                let kept = if input.is_empty() {
                    let taken = self.take_replies(handle, &buffer[..count]);
                    input.extend_from_slice(&buffer[taken..count]);
                    input
                } else {
                    input.extend_from_slice(&buffer[..count]);
                    let taken = self.take_replies(handle, &input);
                    input.drain(..taken);
                    if input.is_empty() && input.capacity() > 64 << 10 { Vec::new() } else { input }
                };
                if let Some(link) = self.links.get_mut(handle) {
                    link.input = kept;
                    if more && !link.paused {
                        self.unread.push(Token::Link(handle));
                    }
                }
            }
            Err(rustix::io::Errno::AGAIN) => {
                link.readable = false;
                link.input = input;
                if link.phase == Phase::Securing {
                    self.drive_handshake(handle);
                }
            }
            Err(rustix::io::Errno::INTR) => {
                link.input = input;
                self.unread.push(Token::Link(handle));
            }
            Err(error) => {
                link.input = input;
                let why = link.tls.as_ref().and_then(|tls| tls.failure()).map(|why| format!("TLS: {why}"));
                self.break_link(handle, &why.unwrap_or_else(|| io::Error::from(error).to_string()));
            }
        }
        self.read_buffer = buffer;
    }

    /// Looks again at what has come of a reply that nobody waits for any more.
    pub(super) fn read_again(&mut self, handle: Handle) {
        let Some(link) = self.links.get_mut(handle) else { return };
        let mut input = std::mem::take(&mut link.input);
        let taken = self.take_replies(handle, &input);
        input.drain(..taken);
        input.shrink_to_fit();
        if let Some(link) = self.links.get_mut(handle) {
            link.input = input;
        }
    }

    /// The TCP connection is there: on to TLS, or to the greeting.
    fn secure_link(&mut self, handle: Handle) {
        let Some(link) = self.links.get_mut(handle) else { return };
        if link.tls.is_none() {
            self.greet_node(handle);
            return;
        }
        link.phase = Phase::Securing;
        self.drive_handshake(handle);
    }

    /// Sends what the handshake has to say; greets the node once the two sides have agreed.
    fn drive_handshake(&mut self, handle: Handle) {
        let Some(link) = self.links.get_mut(handle) else { return };
        let (Some(fd), Some(tls)) = (&link.fd, &mut link.tls) else { return };
        if let Err(error) = tls.drive(fd) {
            self.attempt_failed(handle, &io::Error::from(error).to_string());
        } else if !tls.is_handshaking() {
            self.greet_node(handle);
        }
    }

    /// Takes the replies at the start of `bytes`; returns how many bytes they took.
    fn take_replies(&mut self, handle: Handle, bytes: &[u8]) -> usize {
        let mut pos = 0;
        while pos < bytes.len() {
            let Some(link) = self.links.get_mut(handle) else { return bytes.len() };
            if !matches!(link.phase, Phase::Up | Phase::Greeting) {
                return bytes.len(); // given up because of an earlier reply of the same read; a main connection is on its way again
            }
            let rest = &bytes[pos..];
            match &mut link.body {
                Body::Whole(scanner) => match scanner.scan(rest) {
                    Ok(ReplyScan::Complete(len)) => {
                        pos += len;
                        self.on_reply(handle, &rest[..len]);
                    }
                    Ok(ReplyScan::Incomplete(need)) => {
                        let size = need.max(rest.len());
                        let live = &self.plan.live;
                        let max = link.reply_max(live);
                        if size > max {
                            self.break_link(handle, &format!("it sends more than {max} bytes where a short reply was asked for"));
                            return bytes.len();
                        }
                        // A reply that is translated must be whole.
                        let whole = link.downgraded && rest[0] == b'*' && size <= live.client_output_limit;
                        let head = link.head().copied();
                        let is_kept = whole && head.is_some_and(|head| self.is_awaited(&head));
                        if size > self.plan.live.large_value && !is_kept && self.take_large(handle, size, rest) {
                            continue;
                        }
                        break;
                    }
                    Err(error) => {
                        self.break_link(handle, &error.to_string());
                        return bytes.len();
                    }
                },
                Body::Through(follower) | Body::Skip(follower) => match follower.follow(rest) {
                    Ok((taken, done)) => {
                        let through = matches!(link.body, Body::Through(_));
                        pos += taken;
                        if through {
                            self.pass_piece(handle, &rest[..taken]);
                        }
                        if done {
                            self.end_body(handle);
                        } else {
                            break;
                        }
                    }
                    Err(error) => {
                        self.break_link(handle, &error.to_string());
                        return bytes.len();
                    }
                },
            }
        }
        pos
    }

    /// The streamed or skipped reply is complete.
    fn end_body(&mut self, handle: Handle) {
        let Some(link) = self.links.get_mut(handle) else { return };
        let through = matches!(link.body, Body::Through(_));
        link.body = Body::Whole(ReplyScanner::default());
        if link.head().is_some_and(|head| self.slow.is_slow((self.now_us as u32).wrapping_sub(head.sent_us))) {
            self.note_slow(handle);
        }
        let Some(link) = self.links.get_mut(handle) else { return };
        let Some(ended) = link.answered(self.now_us, false) else { return };
        let is_awaited = !link.waiters.is_empty();
        let expired = ended.is_expired;
        let is_exclusive = link.lane.is_exclusive();
        let pending = self.over(ended, b"");
        if is_awaited {
            self.links.mark(handle); // whether those who wait may go on is looked at where it is flushed
        }
        if !expired && is_exclusive {
            self.note_slow_exclusive(handle, pending);
        }
        if through && !expired {
            let counters = self.counters.clone();
            if let Some(client) = self.clients.get_mut(pending.who) {
                client.end_stream(self.now_us, &counters);
                self.clients.mark(pending.who);
                self.after_delivery(pending.who);
            }
        }
        self.after_exclusive_reply(handle);
    }

    /// What a client is told in place of an error that would send it to another address: past the router, and with its password.
    #[cold]
    fn in_place_of_redirect(&self, handle: Handle, error: &[u8]) -> Option<Vec<u8>> {
        let text = reply::text(error)?;
        if !text.starts_with(b"MOVED ") && !text.starts_with(b"ASK ") {
            return None;
        }
        let node = self.node_name(self.links.get(handle)?.node);
        let mut out = Vec::new();
        encode::error(
            &mut out,
            &format!("ERR {node} would send this client to another server: it runs in cluster mode, as no node of Switchyard may"),
        );
        Some(out)
    }

    fn on_reply(&mut self, handle: Handle, answer: &[u8]) {
        let Some(link) = self.links.get_mut(handle) else { return };
        if link.phase == Phase::Greeting {
            self.on_greeting(handle, answer);
            return;
        }
        if link.lane == Lane::Pubsub {
            self.on_pubsub_reply(handle, answer);
            return;
        }
        if answer[0] == b'>' {
            return; // out of band: nothing of ours
        }
        let raised = if link.downgraded { self.raised(handle, answer) } else { None };
        let answer = raised.as_deref().unwrap_or(answer);
        let Some(link) = self.links.get_mut(handle) else { return };
        let Some(head) = link.head() else {
            self.break_link(handle, "it sent a reply that nobody asked for");
            return;
        };
        if self.slow.is_slow((self.now_us as u32).wrapping_sub(head.sent_us)) {
            self.note_slow(handle);
        }
        let is_error = reply::is_error(answer);
        let instead = if is_error { self.in_place_of_redirect(handle, answer) } else { None };
        let answer = instead.as_deref().unwrap_or(answer);
        if is_error && (answer.starts_with(b"-NOSCRIPT") && self.heal_script(handle) || self.take_recalled(handle, answer)) {
            return;
        }
        let Some(link) = self.links.get_mut(handle) else { return };
        let Some(ended) = link.answered(self.now_us, is_error) else { return };
        let is_awaited = !link.waiters.is_empty();
        let (node, lane, expired) = (link.node, link.lane, ended.is_expired);
        let pending = self.over(ended, answer);
        if is_awaited {
            self.links.mark(handle); // whether those who wait may go on is looked at where it is flushed
        }
        if !expired {
            if lane.is_exclusive() {
                self.note_slow_exclusive(handle, pending);
            }
            match pending.purpose {
                Purpose::Client | Purpose::ClientHealed if is_error && pending.by_sha => {
                    let shown = self.with_own_sha(answer);
                    self.deliver(pending.who, pending.seq, &shown);
                }
                Purpose::Client | Purpose::ClientHealed => self.deliver(pending.who, pending.seq, answer),
                Purpose::Gather => self.gather_part(pending.who, pending.seq, answer),
                Purpose::Exec => self.on_exec(handle, pending, answer),
                Purpose::Watch => self.on_watch(pending, answer),
                Purpose::Wait => self.on_wait(handle, pending, answer),
                Purpose::Nobody | Purpose::Learn | Purpose::Confirm | Purpose::Queued | Purpose::Unblock | Purpose::Look => {}
                Purpose::Subscribe | Purpose::Sync | Purpose::Track => {}
            }
        }
        match pending.purpose {
            Purpose::Nobody | Purpose::Learn | Purpose::Confirm => self.on_own_reply(pending, node, answer),
            Purpose::Queued => self.on_queued(handle, pending, is_error, answer),
            Purpose::Unblock => self.on_unblock(pending.who, answer),
            Purpose::Look => self.on_look(pending.who, pending.seq, answer),
            _ => {}
        }
        if lane.is_exclusive() {
            self.after_exclusive_reply(handle);
        }
    }
}

fn start_connect(address: std::net::SocketAddr) -> io::Result<OwnedFd> {
    use socket2::{Domain, Protocol, Socket, TcpKeepalive, Type};
    let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking().cloexec(), Some(Protocol::TCP))?;
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_keepalive(
        &TcpKeepalive::new().with_time(std::time::Duration::from_secs(15)).with_interval(std::time::Duration::from_secs(5)),
    )?;
    match socket.connect(&address.into()) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::INPROGRESS.raw_os_error()) => {}
        Err(error) => return Err(error),
    }
    let _ = socket.as_fd();
    Ok(OwnedFd::from(socket))
}
