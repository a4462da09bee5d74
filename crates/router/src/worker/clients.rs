//! The clients of a worker: which there are, which have something to be sent, which are held up, and which go on in
//! this turn.
//!
//! It knows no node.

use std::sync::Arc;

use super::downstream::{Client, Stall};
use super::reissued::Waiting;
use crate::metrics::WorkerCounters;
use crate::slab::{Handle, Slab};

/// The clients of a worker.
#[derive(Debug)]
pub(super) struct Clients {
    all: Slab<Client>,
    /// Those with something to be sent.
    dirty: Vec<Handle>,
    /// Those whose stall has ended.
    resumed: Vec<Handle>,
    /// The same in the next turn.
    later: Vec<Handle>,
    /// Clients by their stall in `Stall::LISTED`, and some whose stall has ended (`Client::listed`).
    stalled: [Vec<Handle>; Stall::LISTED.len()],
    counters: Arc<WorkerCounters>,
}

impl Clients {
    pub(super) fn new(counters: Arc<WorkerCounters>) -> Self {
        Self {
            all: Slab::new(),
            dirty: Vec::new(),
            resumed: Vec::new(),
            later: Vec::new(),
            stalled: Default::default(),
            counters,
        }
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

    // ---- which are held up ----

    /// No further command of a client is looked at.
    pub(super) fn stall(&mut self, handle: Handle, why: Stall, now_us: u64) {
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

    /// Ends a stall; the client goes on in this turn. Gives the command that has waited at a node until now.
    pub(super) fn unstall(&mut self, handle: Handle, now_us: u64) -> Option<Box<Waiting>> {
        let client = self.all.get_mut(handle).filter(|client| client.stall != Stall::None)?;
        // A client that does not read, or sends without end, keeps itself waiting, and one in a blocking command is
        // meant to.
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

    /// The clients with this stall, one of `Stall::LISTED`.
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

    // ---- which go on ----

    /// A client is looked at again at the end of this turn.
    pub(super) fn resume(&mut self, handle: Handle) {
        self.resumed.push(handle);
    }

    /// It has had its share of this turn: it is looked at again in the next one.
    pub(super) fn resume_later(&mut self, handle: Handle) {
        self.later.push(handle);
    }

    /// A turn begins: says whether clients of the one before go on in it.
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

    // ---- which have something to be sent ----

    /// A client has something to be sent.
    #[inline]
    pub(super) fn mark(&mut self, handle: Handle) {
        if let Some(client) = self.all.get_mut(handle)
            && !client.dirty
        {
            client.dirty = true;
            self.dirty.push(handle);
        }
    }

    /// How many are marked.
    pub(super) const fn marked_count(&self) -> usize {
        self.dirty.len()
    }

    /// Those that are marked, each once. One that was flushed in the middle of the turn and has more to send since is
    /// listed twice.
    pub(super) fn marked(&mut self) -> impl Iterator<Item = (Handle, &Client)> {
        let all = &mut self.all;
        self.dirty.retain(|handle| all.get_mut(*handle).is_some_and(|client| std::mem::take(&mut client.dirty)));
        let all = &self.all;
        self.dirty.iter().filter_map(|handle| Some((*handle, all.get(*handle)?)))
    }

    /// Takes the list of marked ones.
    pub(super) fn take_marked(&mut self) -> Vec<Handle> {
        std::mem::take(&mut self.dirty)
    }

    /// Gives the list back, empty, to be filled again.
    pub(super) fn reuse(&mut self, list: Vec<Handle>) {
        debug_assert!(list.is_empty());
        if self.dirty.is_empty() {
            self.dirty = list;
        }
    }
}
