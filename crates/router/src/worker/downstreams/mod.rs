//! Clients of a worker: all clients, and the lists of clients with output, with a stall, and to resume in this turn.
//! Independent of nodes.

pub(super) mod client;
pub(super) mod output;

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::accept::Acceptor;
use super::colocate::ColocateWait;
use super::downstreams::client::{Details, PendingReply, Repeat, ReplyMode, Stall, Upload};
use super::log_throttle::LogThrottle;
use super::login::Verdict;
use super::multi_local::CapturedReply;
use super::pubsub::Subscriber;
use super::quiesce::QuiesceWait;
use super::quotas::Accounts;
use super::reissued::Waiting;
use super::tracking::Tracked;
use super::transactions::Session;
use super::transit::Moving;
use super::transport::Tls;
use super::upstreams::kind::Lane;
use super::wait::Written;
use crate::limits::ClientQuota;
use crate::metrics::WorkerCounters;
use crate::settings::{ListenerSettings, Reads};
use crate::slab::{Handle, Slab};
use crate::users::User;
use switchyard_resp::request::Scanner;

/// A client's connection. See [`client`].
#[derive(Debug)]
pub(super) struct Client {
    fd: OwnedFd,
    tls: Option<Box<Tls>>,
    pub(super) resp3: bool,
    pub(super) authenticated: bool,
    /// Current user. The default user before a login.
    pub(super) user: Arc<User>,
    /// Reasons to check its commands, as bits of `login::guard`. 0: none.
    pub(super) guard: u8,
    pub(super) verdict: Option<Box<Verdict>>,
    pub(super) listener: Arc<ListenerSettings>,
    /// Usage of limits of its listener and its user, if they have limits.
    pub(super) listener_share: Option<Box<ClientQuota>>,
    pub(super) user_share: Option<Box<ClientQuota>>,
    /// Bytes of commands charged since the client last had no pending reply.
    pub(super) charged: usize,
    pub(super) reply_mode: ReplyMode,
    pub(super) database: u32,
    /// Reads do not count as accesses (CLIENT NO-TOUCH).
    pub(super) no_touch: bool,
    /// Read policy.
    pub(super) reads: Reads,
    /// Time since which queued messages exceed `push_soft_limit`. 0: they do not.
    behind_since_us: u64,
    /// Received bytes, unparsed from `input_at` on.
    pub(super) input: Vec<u8>,
    pub(super) input_at: usize,
    /// State of the scan of an incomplete command with many arguments.
    pub(super) scanner: Option<Box<Scanner>>,
    pub(super) upload: Option<Box<Upload>>,
    /// A large request must be complete before it can be split or routed.
    pub(super) buffer_large: bool,
    out: Vec<u8>,
    out_sent: usize,
    pending: VecDeque<PendingReply>,
    /// Running mean of reply sizes, bytes.
    reply_mean: usize,
    /// Nodes with commands in flight, as bits by number modulo 64. All bits: unknown. Only valid with commands in
    /// flight.
    under_way_at: u64,
    /// Number of the command whose reply is at the front of `pending`.
    first: u32,
    parked: Vec<u8>,
    parked_count: u32,
    /// Lane of the commands in flight.
    pub(super) lane: Lane,
    pub(super) stall: Stall,
    /// Membership in the lists of `Clients::stalled`, one bit each.
    listed: u8,
    stalled_at_us: u64,
    /// Last stalled command and the duration of its stall in microseconds, for the slow log.
    waited: (u32, u32),
    /// Exclusive connection held for the current command, or kept for the next one.
    pub(super) held: Option<Handle>,
    /// Between MULTI and EXEC.
    pub(super) in_multi: bool,
    /// Writes covered by WAIT.
    pub(super) written: Written,
    /// State of transactions and WAIT. Created on first use.
    pub(super) session: Option<Box<Session>>,
    /// Part of a large reply has been sent: the rest must follow.
    streaming: bool,
    /// A read with a large reply, to repeat on a connection for large values.
    pub(super) repeat: Option<Box<Repeat>>,
    /// The command has waited for a fill. Without a copy now, the node answers.
    pub(super) has_waited_for_fill: bool,
    /// The stalled command was already counted against limits.
    pub(super) was_counted: bool,
    /// Wait of its command for keys that are being moved.
    pub(super) moving: Option<Box<Moving>>,
    /// Wait of its command for keys to return to their slot owner.
    pub(super) colocate_wait: Option<Box<ColocateWait>>,
    /// A command that is blocked at a node, and may have to be reissued at a different one.
    pub(super) waiting: Option<Box<Waiting>>,
    /// Wait of its command for quiesced movers.
    pub(super) quieting: Option<Box<QuiesceWait>>,
    /// Error after a wait for an exclusive connection.
    pub(super) refusal: Option<Box<str>>,
    /// The socket may be readable.
    pub(super) readable: bool,
    /// The client has closed its side; the end must still be read.
    pub(super) hangup: bool,
    /// The socket is writable.
    writable: bool,
    /// Whether it is in the list of clients to flush.
    dirty: bool,
    /// The client will send nothing more. Close after all pending replies are sent.
    pub(super) half_closed: bool,
    /// Close after `out` is sent. Ignore further input.
    pub(super) closing: bool,
    /// The client writes its whole pipeline before it reads. It is not stalled for unread output, only disconnected at
    /// its limit.
    writes_first: bool,
    pub(super) waited_for_learning: bool,
    pub(super) active_ms: u32,
    pub(super) last_command: u16,
    last_used_us: u64,
    /// Time of the last command that may change state at a node.
    pub(super) wrote_us: u64,
    /// In a state that restricts commands. Checked once per command.
    pub(super) gated: bool,
    pub(super) pubsub: Option<Box<Subscriber>>,
    pub(super) monitor: bool,
    pub(super) tracked: Option<Box<Tracked>>,
    pub(super) details: Box<Details>,
}

/// Change of a client that concerns connections to nodes or features. The loop passes each event to them.
#[derive(Debug)]
pub(super) enum ClientEvent {
    Closed {
        handle: Handle,
        client: Box<Client>,
    },
    /// The client does not need this connection, which it has acquired.
    GivesBack {
        client: Handle,
        link: Handle,
    },
    /// The client no longer needs the node's activity on this connection.
    Abandons {
        client: Handle,
        link: Handle,
    },
    /// The client no longer waits for an exclusive connection.
    LeavesLine {
        client: Handle,
    },
    /// The client has read most of its output: its exclusive connection is read again.
    Drained {
        link: Handle,
    },
    /// The reply to a write proves that the client knows the new values of these keys.
    OwnWrite {
        client: Handle,
        keys: Vec<Box<[u8]>>,
    },
}

#[derive(Debug)]
pub(super) struct Downstreams {
    all: Slab<Client>,
    /// Clients with unsent output.
    dirty: Vec<Handle>,
    /// Clients whose stall has ended.
    resumed: Vec<Handle>,
    /// Clients to resume in the next turn.
    later: Vec<Handle>,
    /// Clients by their stall in `Stall::LISTED`, including some whose stall has ended (`Client::listed`).
    stalled: [Vec<Handle>; Stall::LISTED.len()],
    counters: Arc<WorkerCounters>,
    /// Clients that were not read to the end.
    unread: Vec<Handle>,
    /// Captured reply of a local command in a transaction.
    pub(super) caught: CapturedReply,
    events: VecDeque<ClientEvent>,
    pub(super) door: Acceptor,
    pub(super) accounts: Accounts,
    /// For reuse: scanner of commands that arrive whole.
    pub(super) scanner: Scanner,
    pub(super) http_log: LogThrottle,
    pub(super) login_log: LogThrottle,
}

impl Downstreams {
    pub(super) fn new(counters: Arc<WorkerCounters>, door: Acceptor) -> Self {
        Self {
            all: Slab::new(),
            dirty: Vec::new(),
            resumed: Vec::new(),
            later: Vec::new(),
            stalled: Default::default(),
            counters,
            unread: Vec::new(),
            caught: CapturedReply::default(),
            events: VecDeque::new(),
            door,
            accounts: Accounts::default(),
            scanner: Scanner::default(),
            http_log: LogThrottle::default(),
            login_log: LogThrottle::default(),
        }
    }

    /// Returns the next event.
    #[inline]
    pub(super) fn next_event(&mut self) -> Option<ClientEvent> {
        self.events.pop_front()
    }

    pub(super) fn emit(&mut self, event: ClientEvent) {
        self.events.push_back(event);
    }

    /// Reads a client again in the next turn.
    #[inline]
    pub(super) fn read_later(&mut self, handle: Handle) {
        self.unread.push(handle);
    }

    pub(super) fn has_unread(&self) -> bool {
        !self.unread.is_empty()
    }

    pub(super) fn take_unread(&mut self) -> Vec<Handle> {
        std::mem::take(&mut self.unread)
    }

    #[inline]
    pub(super) fn get(&self, handle: Handle) -> Option<&Client> {
        self.all.get(handle)
    }

    #[inline]
    pub(super) fn get_mut(&mut self, handle: Handle) -> Option<&mut Client> {
        self.all.get_mut(handle)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Handle, &Client)> {
        self.all.iter()
    }

    pub(super) fn handles(&self) -> Vec<Handle> {
        self.all.handles()
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn insert(&mut self, client: Client) -> Handle {
        self.all.insert(client)
    }

    pub(super) fn remove(&mut self, handle: Handle) -> Option<Client> {
        self.all.remove(handle)
    }

    // ---- exclusive connections ----

    /// Records that a client no longer holds this connection.
    pub(super) fn forget_held(&mut self, client: Handle, link: Handle) {
        if let Some(client) = self.all.get_mut(client).filter(|client| client.held == Some(link)) {
            client.held = None;
        }
    }

    /// Returns a connection that a client has acquired but does not need.
    pub(super) fn give_back(&mut self, client: Handle, link: Handle) {
        self.forget_held(client, link);
        self.emit(ClientEvent::GivesBack { client, link });
    }

    // ---- stalls ----

    /// Stops processing further commands of a client.
    pub(super) fn begin_stall(&mut self, handle: Handle, why: Stall, now_us: u64) {
        let Some(client) = self.all.get_mut(handle) else { return };
        match (client.stall == Stall::Blocked, why == Stall::Blocked) {
            (false, true) => self.counters.blocked.add(1),
            (true, false) => self.counters.blocked.sub(1),
            _ => {}
        }
        client.stall = why;
        client.stalled_at_us = now_us;
        if let Some(list) = why.list()
            && client.listed & (1 << list) == 0
        {
            client.listed |= 1 << list;
            self.stalled[list].push(handle);
        }
    }

    /// Ends a stall; the client resumes in this turn. Returns its blocking command, if any.
    pub(super) fn end_stall(&mut self, handle: Handle, now_us: u64) -> Option<Box<Waiting>> {
        let client = self.all.get_mut(handle).filter(|client| client.stall != Stall::None)?;
        // Excludes waits caused by the client itself: unread output, a full pipeline, and blocking commands.
        if !matches!(client.stall, Stall::Output | Stall::Pipeline | Stall::Blocked) {
            client.waited = (client.next_seq(), now_us.saturating_sub(client.stalled_at_us) as u32);
        }
        let mut over = None;
        if client.stall == Stall::Blocked {
            self.counters.blocked.sub(1);
            over = client.waiting.take();
        }
        client.stall = Stall::None;
        self.resume(handle);
        over
    }

    /// Returns the clients with this stall, which is one of `Stall::LISTED`.
    pub(super) fn stalled(&mut self, why: Stall) -> Vec<Handle> {
        let Some(list) = why.list() else { return Vec::new() };
        let all = &mut self.all;
        self.stalled[list].retain(|handle| {
            let Some(client) = all.get_mut(*handle) else { return false };
            if client.stall != why {
                client.listed &= !(1 << list);
            }
            client.stall == why
        });
        self.stalled[list].clone()
    }

    // ---- resumption ----

    /// Schedules a client for the end of this turn.
    pub(super) fn resume(&mut self, handle: Handle) {
        self.resumed.push(handle);
    }

    /// Schedules a client for the next turn, because it has used its share of this one.
    pub(super) fn resume_later(&mut self, handle: Handle) {
        self.later.push(handle);
    }

    /// Starts a turn. Returns whether clients were postponed to it.
    pub(super) fn begin_turn(&mut self) -> bool {
        self.resumed.append(&mut self.later);
        self.are_any_resumed()
    }

    pub(super) fn are_any_resumed(&self) -> bool {
        !self.resumed.is_empty()
    }

    pub(super) fn is_resumed(&self, handle: Handle) -> bool {
        self.resumed.contains(&handle) || self.later.contains(&handle)
    }

    pub(super) fn take_resumed(&mut self) -> Vec<Handle> {
        std::mem::take(&mut self.resumed)
    }

    // ---- output ----

    /// Marks a client as having unsent output.
    #[inline]
    pub(super) fn mark(&mut self, handle: Handle) {
        if let Some(client) = self.all.get_mut(handle)
            && !client.dirty
        {
            client.dirty = true;
            self.dirty.push(handle);
        }
    }

    /// Number of marked clients.
    pub(super) const fn marked_count(&self) -> usize {
        self.dirty.len()
    }

    /// Returns each marked client once. A client that was flushed within the turn and has new output is in the list
    /// twice.
    pub(super) fn marked(&mut self) -> impl Iterator<Item = (Handle, &Client)> {
        let all = &mut self.all;
        self.dirty.retain(|handle| all.get_mut(*handle).is_some_and(|client| std::mem::take(&mut client.dirty)));
        let all = &self.all;
        self.dirty.iter().filter_map(|handle| Some((*handle, all.get(*handle)?)))
    }

    /// Takes the list of marked clients.
    pub(super) fn take_marked(&mut self) -> Vec<Handle> {
        std::mem::take(&mut self.dirty)
    }

    /// Returns the emptied list for reuse.
    pub(super) fn recycle_marked(&mut self, list: Vec<Handle>) {
        debug_assert!(list.is_empty());
        if self.dirty.is_empty() {
            self.dirty = list;
        }
    }
}
