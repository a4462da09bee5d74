//! State of a waiting command that may be reissued at another node.

use switchyard_policy::topology::NodeId;

use crate::wait_queues::Ticket;

/// Location of a waiting command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// At a node.
    There,
    /// Reissued, and not yet shown as waiting: number of the last query, and time of sending, us.
    Sent { look: u32, since_us: u64 },
    /// Reissued, but the node was sent a request to end its wait.
    Ending,
    /// At the router, until its keys are where it can wait for them.
    Here,
}

/// A command that waits.
#[derive(Debug)]
pub(in crate::worker) struct Waiting {
    pub(super) request: Vec<u8>,
    pub(super) seq: u32,
    pub(super) ticket: Ticket,
    /// Time of its own timeout, us.
    pub(super) until_us: Option<u64>,
    pub(super) state: State,
    /// Streams that it reads from their ends on (`$`), by the index of that argument, with their ends when the wait was
    /// ended.
    pub(super) ends: Vec<(usize, Option<Vec<u8>>)>,
    /// Member of a cluster that a redirect named for this command only (`ASK`).
    pub(super) asked: Option<NodeId>,
    /// Time before which it is not issued again, us.
    pub(super) not_before_us: u64,
    /// Set when CLIENT UNBLOCK was answered for this wait: whether with `ERROR`.
    pub(super) unblocked: Option<bool>,
}

impl Waiting {
    /// Used bytes.
    pub(in crate::worker) fn memory(&self) -> usize {
        size_of::<Self>() + self.request.capacity()
    }

    /// Records that a client has ended this wait, if any; with `ERROR`?
    pub(in crate::worker) fn note_unblocked(&mut self, by: Option<bool>) {
        self.unblocked = self.unblocked.or(by);
    }
}

impl Waiting {
    /// Whether the node was sent a request to end its wait, so that it can be reissued.
    pub(in crate::worker) fn is_ending(&self) -> bool {
        self.state == State::Ending
    }

    pub(in crate::worker) fn request(&self) -> &[u8] {
        &self.request
    }

    /// Number of the command within its client.
    pub(in crate::worker) fn seq(&self) -> u32 {
        self.seq
    }
}
