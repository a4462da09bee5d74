//! The clients of a worker: which there are, which have something to be sent, and which go on in this turn.
//!
//! It knows no node.

use super::downstream::Client;
use crate::slab::{Handle, Slab};

/// The clients of a worker.
#[derive(Debug)]
pub(super) struct Clients {
    all: Slab<Client>,
    /// Those with something to be sent.
    dirty: Vec<Handle>,
    /// Those whose stall has ended.
    resumed: Vec<Handle>,
}

impl Clients {
    pub(super) fn new() -> Self {
        Self { all: Slab::new(), dirty: Vec::new(), resumed: Vec::new() }
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

    // ---- which go on ----

    /// A client is looked at again at the end of this turn.
    pub(super) fn resume(&mut self, handle: Handle) {
        self.resumed.push(handle);
    }

    pub(super) fn are_any_resumed(&self) -> bool {
        !self.resumed.is_empty()
    }

    pub(super) fn is_resumed(&self, handle: Handle) -> bool {
        self.resumed.contains(&handle)
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

    /// Those that are marked, each once. One that was flushed in the middle of the turn and has more to send since is listed twice.
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
