//! Blocking commands (BLPOP and similar) that wait at nodes or move between two nodes, over all workers. Preserves
//! their order ([`switchyard_policy::wait_queue`]).
//!
//! Only blocking commands come here: when they are sent, reissued, and finished.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use switchyard_policy::topology::Slot;
use switchyard_policy::wait_queue::{self, Turn};

use crate::lock::lock;
use crate::shared::{Mailboxes, Message};
use crate::slab::Handle;

/// Number of shards, each with its own lock.
const SHARDS: usize = 16;

/// Worker and handle of a client.
pub(crate) type ClientRef = (usize, Handle);

/// Place of a command in the queue of its slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Ticket {
    slot: Slot,
    number: u64,
}

#[derive(Debug, Default)]
pub(crate) struct WaitQueues {
    shards: [Mutex<wait_queue::WaitQueues<ClientRef>>; SHARDS],
    next: AtomicU64,
}

impl WaitQueues {
    fn shard(&self, slot: Slot) -> &Mutex<wait_queue::WaitQueues<ClientRef>> {
        &self.shards[slot.index() % SHARDS]
    }

    /// Creates a ticket. Must be called with the slot's lock held, so that later entries have higher numbers.
    fn ticket(&self, slot: Slot) -> Ticket {
        Ticket { slot, number: self.next.fetch_add(1, Ordering::Relaxed) }
    }

    /// Adds a blocking command. Returns whether it may be sent now; otherwise its worker later receives
    /// [`Message::WaitTurn`].
    pub(crate) fn enter(&self, slot: Slot, worker: usize, client: Handle) -> (Ticket, bool) {
        let mut line = lock(self.shard(slot));
        let ticket = self.ticket(slot);
        let goes = line.enter(slot, ticket.number, (worker, client));
        (ticket, goes)
    }

    /// Adds a command that cannot be sent yet, regardless of the queue.
    pub(crate) fn enter_reissued(&self, slot: Slot, worker: usize, client: Handle) -> Ticket {
        let mut line = lock(self.shard(slot));
        let ticket = self.ticket(slot);
        line.reissue(slot, ticket.number, (worker, client));
        ticket
    }

    /// Marks a waiting command to be ended at its node and reissued.
    pub(crate) fn reissue(&self, ticket: Ticket, worker: usize, client: Handle) {
        lock(self.shard(ticket.slot)).reissue(ticket.slot, ticket.number, (worker, client));
    }

    /// Records that a reissued command has returned to its worker.
    pub(crate) fn note_returned(&self, ticket: Ticket, mailboxes: &Mailboxes) {
        let next = lock(self.shard(ticket.slot)).on_ended(ticket.slot, ticket.number);
        notify(next, mailboxes);
    }

    /// Whether a reissued command may be sent to a node. If not, its worker is notified later, and workers with
    /// commands that must be reissued first are notified now.
    pub(crate) fn is_turn(&self, ticket: Ticket, mailboxes: &Mailboxes) -> bool {
        let turn = lock(self.shard(ticket.slot)).turn(ticket.slot, ticket.number);
        may_go(turn, mailboxes)
    }

    /// Like `is_turn`, and marks the command as sent if so.
    pub(crate) fn go(&self, ticket: Ticket, worker: usize, client: Handle, mailboxes: &Mailboxes) -> bool {
        let turn = lock(self.shard(ticket.slot)).try_send(ticket.slot, ticket.number, (worker, client));
        may_go(turn, mailboxes)
    }

    /// Records that the command was seen at its node. Returns the next client, to be notified at once: all later
    /// commands wait for this.
    #[must_use]
    pub(crate) fn note_seen_at_node(&self, ticket: Ticket) -> Option<ClientRef> {
        lock(self.shard(ticket.slot)).on_blocked(ticket.slot, ticket.number)
    }

    /// Moves a command to the queue of the slot that its keys have now. Returns its new place.
    pub(crate) fn place_anew(&self, ticket: Ticket, slot: Slot, mailboxes: &Mailboxes) -> Ticket {
        if slot == ticket.slot {
            return ticket;
        }
        let (state, next) = lock(self.shard(ticket.slot)).take(ticket.slot, ticket.number);
        lock(self.shard(slot)).put(slot, ticket.number, state);
        notify(next, mailboxes);
        Ticket { slot, number: ticket.number }
    }

    /// Removes a finished command.
    pub(crate) fn leave(&self, ticket: Ticket, mailboxes: &Mailboxes) {
        let next = lock(self.shard(ticket.slot)).leave(ticket.slot, ticket.number);
        notify(next, mailboxes);
    }

    /// Removes the clients of a worker.
    pub(crate) fn forget_worker(&self, worker: usize, mailboxes: &Mailboxes) {
        for shard in &self.shards {
            let next = lock(shard).forget(|(of, _)| of == worker);
            notify(next, mailboxes);
        }
    }
}

fn notify(next: impl IntoIterator<Item = ClientRef>, mailboxes: &Mailboxes) {
    for (worker, client) in next {
        mailboxes.send(worker, Message::WaitTurn { client });
    }
}

fn may_go(turn: Turn<ClientRef>, mailboxes: &Mailboxes) -> bool {
    match turn {
        Turn::Ready => true,
        Turn::After(to_recall) => {
            for (worker, client) in to_recall {
                mailboxes.send(worker, Message::Recall { client });
            }
            false
        }
    }
}
