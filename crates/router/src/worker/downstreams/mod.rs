//! Clients of a worker: all clients, and the lists of clients with output, with a stall, and to resume in this turn.
//! Independent of nodes.

pub(super) mod client;
pub(super) mod identity;
pub(super) mod input;
pub(super) mod output;
pub(super) mod replies;
pub(super) mod socket;
pub(super) mod states;
pub(super) mod waits;

use std::collections::VecDeque;
use std::sync::Arc;

use switchyard_resp::request::Scanner;

use super::accept::state::Acceptor;
use super::log_throttle::LogThrottle;
use super::multi_local::state::CapturedReply;
use super::quotas::state::Accounts;
use super::reissued::state::Waiting;
use super::wait::state::Written;
use crate::metrics::WorkerCounters;
use crate::slab::{Handle, Slab};
use identity::Identity;
use input::Input;
use replies::Replies;
use socket::Socket;
use states::States;
use waits::{Stall, Waits};

/// A client's connection. See [`client`].
#[derive(Debug)]
pub(super) struct Client {
    socket: Socket,
    input: Input,
    replies: Replies,
    identity: Identity,
    states: States,
    waits: Waits,
    resp3: bool,
    database: u32,
    /// Reads do not count as accesses (CLIENT NO-TOUCH).
    no_touch: bool,
    /// Between MULTI and EXEC.
    in_multi: bool,
    /// Writes covered by WAIT.
    written: Written,
    /// Exclusive connection held for the current command, or kept for the next one.
    held: Option<Handle>,
    last_command: u16,
    /// Millisecond of its last activity, for batching.
    active_ms: u32,
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
        match (client.stall() == Stall::Blocked, why == Stall::Blocked) {
            (false, true) => self.counters.blocked.add(1),
            (true, false) => self.counters.blocked.sub(1),
            _ => {}
        }
        if let Some(list) = client.waits.begin(why, now_us) {
            self.stalled[list].push(handle);
        }
    }

    /// Ends a stall; the client resumes in this turn. Returns its blocking command, if any.
    pub(super) fn end_stall(&mut self, handle: Handle, now_us: u64) -> Option<Box<Waiting>> {
        let client = self.all.get_mut(handle).filter(|client| client.is_stalled())?;
        let mut over = None;
        if client.waits.end(client.replies.next_seq(), now_us) == Stall::Blocked {
            self.counters.blocked.sub(1);
            over = client.take_state();
        }
        self.resume(handle);
        over
    }

    /// Returns the clients with this stall, which is one of `Stall::LISTED`.
    pub(super) fn stalled(&mut self, why: Stall) -> Vec<Handle> {
        let Some(list) = why.list() else { return Vec::new() };
        let all = &mut self.all;
        self.stalled[list]
            .retain(|handle| all.get_mut(*handle).is_some_and(|client| client.waits.stays_listed(why, list)));
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
            && !client.socket.mark(true)
        {
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
        self.dirty.retain(|handle| all.get_mut(*handle).is_some_and(|client| client.socket.mark(false)));
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
