//! A worker: one thread that owns its listeners, its clients and its connections to the nodes, and shares nothing on the path of
//! a command.
//!
//! A turn of the loop: wait; read from everybody who has something; then one write per node, then one write per client. Everything
//! that the commands of one turn have in common is paid once per turn: the clock is read once, and a node gets the commands of all
//! clients in one system call.
//!
//! Under load a turn waits a moment before it looks (`Batching`): it then finds more to do, and every system call carries more. With
//! few active clients it never waits, because that would tax the quiet.

mod client_commands;
mod dispatch;
mod downstream;
mod gather;
mod info;
mod large;
mod local;
mod nodes;
mod upstream;

use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::net::{RecvFlags, SendFlags, SocketFlags};
use switchyard_policy::topology::NodeId;
use switchyard_resp::request::{Limits, ProtocolError, Scan, Scanner, inline_to_multibulk};
use tracing::{debug, warn};

use crate::metrics::WorkerCounters;
use crate::poll::{Poll, Ready, Token};
use crate::shared::{Message, Plan, Shared};
use crate::slab::{Handle, Slab};
use dispatch::Flow;
use downstream::{Client, Details, ReplyMode, Stall};
use gather::Gather;
use upstream::{Link, Zombie};

/// Bytes read from a socket at once. Large enough for a batch of replies, small enough for the second-level cache.
const READ_SIZE: usize = 128 << 10;

/// Clients accepted per turn and listener, so that a storm of connections does not stall those that are there.
const ACCEPTS_PER_TURN: usize = 64;

/// How often timeouts are looked at.
const TICK: Duration = Duration::from_millis(20);

/// How often clients are looked at for idleness and patience: there may be tens of thousands.
const CLIENT_TICK_US: u64 = 200_000;

/// A client that owes reading this much is given no further command until it has read.
const OUTPUT_HIGH: usize = 1 << 20;

/// After this long without progress a client over `OUTPUT_HIGH` is taken for one that writes its whole pipeline before it reads:
/// its commands go on, up to its output limit.
const OUTPUT_PATIENCE_US: u64 = 200_000;

/// Memory of a quiet client's buffers above this is given back.
const QUIET_CAPACITY: usize = 4 << 10;

/// The main connections to a node, by protocol, and the others.
#[derive(Debug, Default)]
struct NodeLinks {
    main: [Option<Handle>; 2],
    slow: [Option<Handle>; 2],
    large: Vec<Handle>,
    /// Clients that wait for one of `large`.
    large_waiters: std::collections::VecDeque<Handle>,
}

/// Decides whether to wait a moment before looking for events, so that a turn finds more of them (measured: 30-40 % less CPU per
/// request with many active clients, and a longer wait for each with few).
#[derive(Debug, Default)]
struct Batching {
    /// The current millisecond, and the clients seen active in it so far.
    window: u32,
    seen: u32,
    /// The same of the last full millisecond.
    active: u32,
}

impl Batching {
    /// Fewer active clients than this are never made to wait.
    const CLIENTS_MIN: u32 = 24;
    const PAUSE: Duration = Duration::from_micros(50);

    fn turn(&mut self, now_us: u64) {
        let window = (now_us / 1000) as u32;
        if window != self.window {
            self.active = if window == self.window.wrapping_add(1) { self.seen } else { 0 };
            self.seen = 0;
            self.window = window;
        }
    }

    #[inline]
    fn note(&mut self, client: &mut Client) {
        if client.active_ms != self.window {
            client.active_ms = self.window;
            self.seen += 1;
        }
    }

    fn pause_wanted(&self) -> bool {
        self.active.max(self.seen) >= Self::CLIENTS_MIN
    }
}

#[derive(Debug)]
pub(crate) struct Worker {
    index: usize,
    shared: Arc<Shared>,
    counters: Arc<WorkerCounters>,
    plan: Arc<Plan>,
    generation: u64,
    poll: Poll,
    listeners: Vec<TcpListener>,
    /// Given up for a moment to accept and refuse a client when descriptors have run out.
    spare: Option<OwnedFd>,
    accepting: bool,
    clients: Slab<Client>,
    links: Slab<Box<Link>>,
    /// By node number.
    routes: Vec<NodeLinks>,
    gathers: Slab<Gather>,
    zombies: Vec<Zombie>,
    next_zombie: u32,
    /// Hashes of keys whose values were found to be large, by hash modulo its length; 0 is nobody.
    large_keys: Box<[u64]>,
    large_keys_known: u32,
    read_buffer: Vec<u8>,
    scanner: Scanner,
    keys: Vec<u32>,
    scratch: Vec<u8>,
    /// Microseconds since the router's start, read once per turn.
    now_us: u64,
    next_tick_us: u64,
    next_client_tick_us: u64,
    turn_of_nodes: usize,
    batching: Batching,
    dirty_clients: Vec<Handle>,
    dirty_links: Vec<Handle>,
    /// Clients whose stall has ended.
    resumed: Vec<Handle>,
    /// Connections that were not read to the end.
    unread: Vec<Token>,
    /// Scripts whose SHA-1 this worker has handed in already, by hash of their body.
    scripts_seen: std::collections::HashSet<u64>,
}

impl Worker {
    pub(crate) fn new(index: usize, shared: Arc<Shared>, listeners: Vec<TcpListener>) -> std::io::Result<Self> {
        let poll = Poll::new()?;
        poll.add(&shared.mailboxes[index].wake, Token::Wake)?;
        for (number, listener) in listeners.iter().enumerate() {
            poll.add(listener, Token::Listener(number as u32))?;
        }
        let plan = shared.plan();
        Ok(Self {
            index,
            counters: shared.counters[index].clone(),
            generation: shared.generation.load(Ordering::Acquire),
            plan,
            shared,
            poll,
            listeners,
            spare: spare_descriptor(),
            accepting: true,
            clients: Slab::new(),
            links: Slab::new(),
            routes: Vec::new(),
            gathers: Slab::new(),
            zombies: Vec::new(),
            next_zombie: 0,
            large_keys: vec![0; 1024].into(),
            large_keys_known: 0,
            read_buffer: vec![0; READ_SIZE],
            scanner: Scanner::default(),
            keys: Vec::new(),
            scratch: Vec::new(),
            now_us: 0,
            next_tick_us: 0,
            next_client_tick_us: 0,
            turn_of_nodes: index,
            batching: Batching::default(),
            dirty_clients: Vec::new(),
            dirty_links: Vec::new(),
            resumed: Vec::new(),
            unread: Vec::new(),
            scripts_seen: std::collections::HashSet::new(),
        })
    }

    /// Runs until the router stops.
    pub(crate) fn run(mut self) -> std::io::Result<()> {
        // The default slack of 50 us would double the pause of `Batching`.
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
        let mut ready = Vec::new();
        let mut events = Vec::new();
        self.read_clock();
        self.connect_main();
        loop {
            let pending_work = !self.unread.is_empty() || !self.resumed.is_empty();
            let timeout = if pending_work {
                Duration::ZERO
            } else {
                if self.batching.pause_wanted() {
                    pause(Batching::PAUSE);
                }
                self.until_tick()
            };
            self.poll.wait(Some(timeout), &mut events, &mut ready)?;
            self.read_clock();
            let began = self.now_us;
            self.batching.turn(self.now_us);
            if self.shared.generation.load(Ordering::Acquire) != self.generation {
                self.adopt_plan();
            }
            let unread = std::mem::take(&mut self.unread);
            for token in unread {
                self.on_ready(Ready { token, readable: true, writable: false, hangup: false });
            }
            for event in &ready {
                self.on_ready(*event);
            }
            self.finish_turn();
            if self.now_us >= self.next_tick_us {
                self.tick();
                self.finish_turn();
            }
            if self.shared.draining.load(Ordering::Relaxed) && self.drained() {
                return Ok(());
            }
            if !ready.is_empty() {
                self.counters.turns.record(self.clock_us().saturating_sub(began));
            }
        }
    }

    fn clock_us(&self) -> u64 {
        self.shared.started.elapsed().as_micros() as u64
    }

    fn read_clock(&mut self) {
        self.now_us = self.clock_us();
    }

    fn until_tick(&self) -> Duration {
        let busy = self.clients.len() > 0 || self.links.iter().any(|(_, l)| l.phase != upstream::Phase::Up) || self.shared.draining.load(Ordering::Relaxed);
        if busy { Duration::from_micros(self.next_tick_us.saturating_sub(self.now_us)) } else { Duration::from_millis(500) }
    }

    fn on_ready(&mut self, event: Ready) {
        match event.token {
            Token::Client(handle) => {
                let Some(client) = self.clients.get_mut(handle) else { return };
                client.hangup |= event.hangup;
                client.writable |= event.writable;
                if event.writable && client.unsent() > 0 && !client.dirty {
                    client.dirty = true;
                    self.dirty_clients.push(handle);
                }
                if event.readable {
                    self.read_client(handle);
                }
            }
            Token::Link(handle) => self.on_link_ready(handle, event),
            Token::Listener(index) => self.accept(index as usize),
            Token::Wake => {
                for message in self.shared.clone().mailboxes[self.index].take() {
                    self.on_message(message);
                }
            }
        }
    }

    /// Sends what the turn has produced: to the nodes first, because they have work to do with it.
    fn finish_turn(&mut self) {
        // A flush can end a stall, and a resumed client has more to send. What is left after some rounds waits for the next turn.
        for _ in 0..8 {
            let resumed = std::mem::take(&mut self.resumed);
            for handle in resumed {
                self.resume_client(handle);
            }
            self.flush_links();
            self.flush_clients();
            if self.resumed.is_empty() {
                break;
            }
        }
    }

    // ---- clients: accept, read, write, close ----

    fn accept(&mut self, index: usize) {
        if !self.accepting {
            return;
        }
        for _ in 0..ACCEPTS_PER_TURN {
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            match rustix::net::acceptfrom_with(&self.listeners[index], flags) {
                Ok((fd, peer)) => self.greet_client(fd, peer.and_then(|p| p.try_into().ok())),
                Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => {}
                Err(rustix::io::Errno::MFILE | rustix::io::Errno::NFILE) => {
                    // Without a descriptor the connection cannot even be refused: give up the spare one for that.
                    self.spare = None;
                    if let Ok(fd) = rustix::net::accept_with(&self.listeners[index], flags) {
                        refuse(&fd, "ERR max number of clients reached");
                        self.counters.rejected.add(1);
                    }
                    self.spare = spare_descriptor();
                    return;
                }
                Err(_) => return,
            }
        }
    }

    fn greet_client(&mut self, fd: OwnedFd, peer: Option<std::net::SocketAddr>) {
        let live = &self.plan.live;
        if self.shared.clients.fetch_add(1, Ordering::Relaxed) >= live.max_clients {
            self.shared.clients.fetch_sub(1, Ordering::Relaxed);
            self.counters.rejected.add(1);
            refuse(&fd, "ERR max number of clients reached");
            return;
        }
        let _ = rustix::net::sockopt::set_tcp_nodelay(&fd, true);
        let _ = rustix::net::sockopt::set_socket_keepalive(&fd, true);
        let details = Box::new(Details {
            id: self.shared.next_client_id.fetch_add(1, Ordering::Relaxed),
            peer,
            local: rustix::net::getsockname(&fd).ok().and_then(|a| a.try_into().ok()),
            name: String::new(),
            lib_name: String::new(),
            lib_ver: String::new(),
            created_us: self.now_us,
            no_evict: false,
            no_touch: false,
        });
        let client = Client::new(fd, live.password.is_none(), live.database, self.now_us, details);
        let handle = self.clients.insert(client);
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
    fn read_client(&mut self, handle: Handle) {
        let Some(client) = self.clients.get_mut(handle) else { return };
        client.readable = true;
        if client.stall != Stall::None || client.closing || client.half_closed {
            if client.closing {
                self.discard_input(handle);
            }
            return;
        }
        self.batching.note(client);
        client.last_used_us = self.now_us;
        let mut buffer = std::mem::take(&mut self.read_buffer);
        let read = rustix::net::recv(&client.fd, &mut buffer[..], RecvFlags::empty());
        match read {
            Ok((_, 0)) => {
                // The client may still read: commands in flight are answered before the connection is closed.
                client.half_closed = true;
                self.close_if_done(handle);
            }
            Ok((_, count)) => {
                self.counters.bytes_received.add(count as u64);
                client.readable = count == buffer.len() || client.hangup;
                if client.readable {
                    self.unread.push(Token::Client(handle));
                }
                self.take_input(handle, &buffer[..count]);
            }
            Err(rustix::io::Errno::AGAIN) => client.readable = false,
            Err(rustix::io::Errno::INTR) => self.unread.push(Token::Client(handle)),
            Err(_) => self.close_client(handle),
        }
        self.read_buffer = buffer;
    }

    /// A client that is being closed is still read from, so that the error it is sent is not lost to a reset.
    fn discard_input(&mut self, handle: Handle) {
        let Some(client) = self.clients.get_mut(handle) else { return };
        let mut buffer = std::mem::take(&mut self.read_buffer);
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

    fn resume_client(&mut self, handle: Handle) {
        let Some(client) = self.clients.get_mut(handle) else { return };
        if client.stall != Stall::None {
            return;
        }
        if client.repeat.is_some() && !self.run_repeat(handle) {
            return;
        }
        let Some(client) = self.clients.get_mut(handle) else { return };
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
        let plan = self.plan.clone();
        let mut scanner = std::mem::take(&mut self.scanner);
        let Some(client) = self.clients.get_mut(handle) else { return 0 };
        if let Some(kept) = client.scanner.take() {
            scanner = *kept;
        }
        let mut pos = 0;
        let mut failed = None;
        loop {
            let Some(client) = self.clients.get_mut(handle) else { break };
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
            if client.in_flight() >= plan.live.client_pipeline_max {
                self.stall(handle, Stall::Pipeline);
                break;
            }
            if client.unsent() > OUTPUT_HIGH && !client.writes_first && !self.flush_client(handle) {
                self.stall(handle, Stall::Output);
                break;
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
                    if why != Stall::Large {
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

    fn stall(&mut self, handle: Handle, why: Stall) {
        if let Some(client) = self.clients.get_mut(handle) {
            client.stall = why;
            client.stalled_at_us = self.now_us;
        }
    }

    /// Ends a stall; the client goes on in this turn.
    fn unstall(&mut self, handle: Handle) {
        if let Some(client) = self.clients.get_mut(handle)
            && client.stall != Stall::None
        {
            client.stall = Stall::None;
            self.resumed.push(handle);
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
        self.answer(handle, 0, &reply);
        self.scratch = reply;
        self.close_after_replies(handle);
    }

    /// Gives a client the reply to the command just read.
    fn answer(&mut self, handle: Handle, class: u8, reply: &[u8]) {
        if let Some(client) = self.clients.get_mut(handle) {
            let seq = client.owe(self.now_us, class);
            self.deliver(handle, seq, reply);
        }
    }

    /// Gives a client the reply to command `seq`, and lets it go on where it waited for that.
    fn deliver(&mut self, handle: Handle, seq: u32, reply: &[u8]) {
        let Some(client) = self.clients.get_mut(handle) else { return };
        client.complete(seq, reply, self.now_us, &self.counters);
        if !client.dirty {
            client.dirty = true;
            self.dirty_clients.push(handle);
        }
        self.after_delivery(handle);
    }

    #[inline]
    fn after_delivery(&mut self, handle: Handle) {
        let Some(client) = self.clients.get_mut(handle) else { return };
        let go_on = match client.stall {
            Stall::None | Stall::Output | Stall::Upstream | Stall::Large => false,
            Stall::Barrier => client.in_flight() == 0,
            Stall::Pipeline => client.in_flight() <= self.plan.live.client_pipeline_max / 2,
        };
        if go_on {
            self.unstall(handle);
        }
    }

    fn flush_clients(&mut self) {
        let mut dirty = std::mem::take(&mut self.dirty_clients);
        for handle in dirty.drain(..) {
            self.flush_client(handle);
        }
        if self.dirty_clients.is_empty() {
            self.dirty_clients = dirty;
        }
    }

    /// Sends what the client is owed, as far as its socket takes it; true where nothing is left.
    fn flush_client(&mut self, handle: Handle) -> bool {
        let Some(client) = self.clients.get_mut(handle) else { return true };
        client.dirty = false;
        let mut broken = false;
        while client.unsent() > 0 && client.writable {
            match rustix::net::send(&client.fd, &client.out[client.out_sent..], SendFlags::NOSIGNAL) {
                Ok(count) => {
                    self.counters.bytes_sent.add(count as u64);
                    client.out_sent += count;
                    client.last_used_us = self.now_us;
                    client.stalled_at_us = self.now_us;
                    if client.unsent() > 0 {
                        // A short write means a full socket; epoll tells when it has room.
                        client.writable = false;
                    }
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
            warn!(client = client.details.id, bytes = client.output_bytes(), "cutting a client that does not read its replies (client-output-limit)");
            self.counters.cut_output.add(1);
            self.close_client(handle);
            return true;
        }
        let client_unsent = client.unsent();
        if let Some(large) = client.large
            && client_unsent < OUTPUT_HIGH / 4
        {
            self.unpause_link(large);
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
    fn close_after_replies(&mut self, handle: Handle) {
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

    fn close_if_done(&mut self, handle: Handle) {
        let Some(client) = self.clients.get(handle) else { return };
        if !(client.closing || client.half_closed) || client.in_flight() > 0 || client.unsent() > 0 {
            return;
        }
        let waits = client.stall != Stall::None || (client.half_closed && self.resumed.contains(&handle));
        if !client.closing && waits {
            return;
        }
        if client.closing && !client.half_closed {
            // Let the client read the last reply: a close with unread input in our socket would reset the connection.
            let _ = rustix::net::shutdown(&client.fd, rustix::net::Shutdown::Write);
            let mut sink = [0u8; 4096];
            for _ in 0..256 {
                if !matches!(rustix::net::recv(&client.fd, &mut sink[..], RecvFlags::empty()), Ok((_, 1..))) {
                    break;
                }
            }
        }
        self.close_client(handle);
    }

    fn close_client(&mut self, handle: Handle) {
        let Some(client) = self.clients.remove(handle) else { return };
        self.poll.remove(&client.fd);
        self.shared.clients.fetch_sub(1, Ordering::Relaxed);
        self.counters.clients.sub(1);
        if let Some(large) = client.large {
            self.abandon_large(large);
        }
    }

    // ---- plan, ticks, drain ----

    fn adopt_plan(&mut self) {
        self.generation = self.shared.generation.load(Ordering::Acquire);
        self.plan = self.shared.plan();
        self.connect_main();
        self.drop_foreign_links();
    }

    fn tick(&mut self) {
        self.next_tick_us = self.now_us + TICK.as_micros() as u64;
        self.tick_links();
        self.publish_drained();
        if self.now_us >= self.next_client_tick_us {
            self.next_client_tick_us = self.now_us + CLIENT_TICK_US;
            self.tick_clients();
        }
    }

    fn tick_clients(&mut self) {
        let idle_us = self.plan.live.client_idle_timeout.map(|t| t.as_micros() as u64);
        let mut late = Vec::new();
        for (handle, client) in self.clients.iter() {
            let stalled = self.now_us.saturating_sub(client.stalled_at_us);
            if client.stall == Stall::Output && stalled > OUTPUT_PATIENCE_US {
                late.push((handle, false));
            } else if client.in_flight() == 0 && idle_us.is_some_and(|idle| self.now_us.saturating_sub(client.last_used_us) > idle) {
                late.push((handle, true));
            } else if client.large.is_some() && self.now_us.saturating_sub(client.last_used_us) > LARGE_PATIENCE_US {
                late.push((handle, true));
            } else if (client.closing || client.half_closed) && self.now_us.saturating_sub(client.last_used_us) > CLOSING_PATIENCE_US {
                late.push((handle, true));
            }
        }
        for (handle, close) in late {
            if close {
                self.close_client(handle);
            } else if let Some(client) = self.clients.get_mut(handle) {
                client.writes_first = true;
                self.unstall(handle);
            }
        }
        self.tick_large();
    }

    /// The drain barrier: publishes the oldest epoch under which something is still in flight.
    fn publish_drained(&self) {
        let epoch = self.plan.topology.epoch();
        let oldest_link = self.links.iter().filter_map(|(_, link)| link.pending.front()).map(|p| {
            // Epochs in flight are near the current one: their low bits say which.
            epoch - u64::from((epoch as u32).wrapping_sub(p.epoch))
        });
        let oldest = oldest_link.chain(self.zombies.iter().map(|z| z.epoch)).min().unwrap_or(epoch).min(epoch);
        self.shared.drained[self.index].store(oldest, Ordering::Release);
    }

    /// During a drain: closes clients that are owed nothing, and says whether all are gone.
    fn drained(&mut self) -> bool {
        if self.accepting {
            self.accepting = false;
            for listener in &self.listeners {
                self.poll.remove(listener);
            }
            self.listeners.clear();
        }
        let stop = self.shared.stop.load(Ordering::Relaxed);
        for handle in self.clients.handles() {
            let Some(client) = self.clients.get(handle) else { continue };
            let idle = client.in_flight() == 0 && client.unsent() == 0 && client.upload.is_none();
            if idle || stop {
                if !idle {
                    self.shared.cut.fetch_add(1, Ordering::Relaxed);
                }
                self.close_client(handle);
            }
        }
        self.clients.len() == 0
    }

    fn on_message(&mut self, message: Message) {
        match message {
            Message::Answer { gather, part, reply } => self.gather_part(gather, part, &reply),
            Message::List { filter, from, gather, part } => {
                let reply = self.list_clients(&filter);
                self.shared.mailboxes[from].send(Message::Answer { gather, part, reply });
            }
            Message::Kill { filter, from, gather, part } => {
                let reply = self.kill_clients(&filter);
                self.shared.mailboxes[from].send(Message::Answer { gather, part, reply });
            }
        }
    }

    /// Whether any worker has a connection to the node that is up.
    fn node_is_up(&self, node: NodeId) -> bool {
        self.routes.get(node.index()).is_some_and(|r| {
            r.main.iter().flatten().any(|h| self.links.get(*h).is_some_and(|l| l.phase == upstream::Phase::Up))
        })
    }
}

/// A client that is being closed and neither reads nor goes away is dropped after this long.
const CLOSING_PATIENCE_US: u64 = 10_000_000;

/// A client that holds a connection for large values and neither sends nor reads is cut after this long: others wait for it.
const LARGE_PATIENCE_US: u64 = 60_000_000;

/// Bytes of one request that are collected when it cannot be passed on as it comes (Redis `client-query-buffer-limit`).
const REQUEST_MAX: usize = 1 << 30;

fn client_mut(clients: &mut Slab<Client>, handle: Handle, change: impl FnOnce(&mut Client)) {
    if let Some(client) = clients.get_mut(handle) {
        change(client);
    }
}

fn pause(duration: Duration) {
    let _ = rustix::thread::nanosleep(&rustix::time::Timespec { tv_sec: 0, tv_nsec: i64::from(duration.subsec_nanos()) });
}

fn spare_descriptor() -> Option<OwnedFd> {
    rustix::fs::open("/dev/null", rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC, rustix::fs::Mode::empty()).ok()
}

fn refuse(fd: &OwnedFd, error: &str) {
    let mut reply = Vec::new();
    switchyard_resp::encode::error(&mut reply, error);
    let _ = rustix::net::send(fd, &reply, SendFlags::NOSIGNAL);
}
