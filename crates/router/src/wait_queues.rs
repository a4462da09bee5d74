//! Who waits at nodes (BLPOP and relatives) and is on the way between two of them, over all workers: so that nobody
//! overtakes anybody ([`switchyard_policy::wait_queue`]).
//!
//! Only commands that may wait come here: when they are sent and when they are over, and between that when they are
//! recalled.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use switchyard_policy::topology::Slot;
use switchyard_policy::wait_queue::{self, Turn};

use crate::shared::{Mailboxes, Message, lock};
use crate::slab::Handle;

/// Parts of the table, each behind a lock of its own.
const SHARDS: usize = 16;

/// A client of a worker.
pub(crate) type ClientRef = (usize, Handle);

/// A wait's place among those of its slot.
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

    /// Drawn under the lock of the slot: whoever comes into the queue later has the higher number.
    fn ticket(&self, slot: Slot) -> Ticket {
        Ticket { slot, number: self.next.fetch_add(1, Ordering::Relaxed) }
    }

    /// A command of this client begins to wait. The second is true where it is sent to its node now; else its worker is
    /// told when it may be ([`Message::Turn`]).
    pub(crate) fn enter(&self, slot: Slot, worker: usize, client: Handle) -> (Ticket, bool) {
        let mut line = lock(self.shard(slot));
        let ticket = self.ticket(slot);
        let goes = line.enter(slot, ticket.number, (worker, client));
        (ticket, goes)
    }

    /// The same for one that cannot be sent yet, whoever waits.
    pub(crate) fn enter_recalled(&self, slot: Slot, worker: usize, client: Handle) -> Ticket {
        let mut line = lock(self.shard(slot));
        let ticket = self.ticket(slot);
        line.recall(slot, ticket.number, (worker, client));
        ticket
    }

    /// A wait is to be ended at its node, and to begin again.
    pub(crate) fn recall(&self, ticket: Ticket, worker: usize, client: Handle) {
        lock(self.shard(ticket.slot)).recall(ticket.slot, ticket.number, (worker, client));
    }

    /// A recalled wait is with its worker.
    pub(crate) fn is_back(&self, ticket: Ticket, mailboxes: &Mailboxes) {
        let next = lock(self.shard(ticket.slot)).on_ended(ticket.slot, ticket.number);
        notify(next, mailboxes);
    }

    /// Whether a recalled wait may be sent to a node. If not, its worker is told when it may, and those of others who
    /// have to be recalled first.
    pub(crate) fn is_turn(&self, ticket: Ticket, mailboxes: &Mailboxes) -> bool {
        let turn = lock(self.shard(ticket.slot)).turn(ticket.slot, ticket.number);
        is_its(turn, mailboxes)
    }

    /// The same, and where it may, it is sent.
    pub(crate) fn go(&self, ticket: Ticket, worker: usize, client: Handle, mailboxes: &Mailboxes) -> bool {
        let turn = lock(self.shard(ticket.slot)).try_send(ticket.slot, ticket.number, (worker, client));
        is_its(turn, mailboxes)
    }

    /// It was seen at its node. Whose turn it may be now, to be told at once: all behind it wait for that.
    #[must_use]
    pub(crate) fn seen(&self, ticket: Ticket) -> Option<ClientRef> {
        lock(self.shard(ticket.slot)).on_blocked(ticket.slot, ticket.number)
    }

    /// It is over.
    pub(crate) fn leave(&self, ticket: Ticket, mailboxes: &Mailboxes) {
        let next = lock(self.shard(ticket.slot)).leave(ticket.slot, ticket.number);
        notify(next, mailboxes);
    }

    /// The clients of a worker are gone.
    pub(crate) fn forget_worker(&self, worker: usize, mailboxes: &Mailboxes) {
        for shard in &self.shards {
            let next = lock(shard).forget(|(of, _)| of == worker);
            notify(next, mailboxes);
        }
    }
}

fn notify(next: impl IntoIterator<Item = ClientRef>, mailboxes: &Mailboxes) {
    for (worker, client) in next {
        mailboxes.send(worker, Message::Turn { client });
    }
}

fn is_its(turn: Turn<ClientRef>, mailboxes: &Mailboxes) -> bool {
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
