//! Blocking commands (BLPOP and similar) that wait at nodes or move between two nodes, over all workers. Preserves
//! their order ([`switchyard_policy::wait_queue`]).
//!
//! A command with keys in several slots has one ticket, with a place in the queue of each slot, drawn under all their
//! locks. It proceeds when it may in every queue, and no two commands wait for each other, because tickets are in one
//! order.
//!
//! Only blocking commands come here: when they are sent, reissued, and finished.

use std::array;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use switchyard_policy::topology::Slot;
use switchyard_policy::wait_queue::{self, Turn};

use crate::lock::lock;
use crate::shared::{Mailboxes, Message};
use crate::slab::Handle;

/// Number of shards, each with its own lock.
const SHARDS: usize = 16;

/// Worker and handle of a client.
pub(crate) type ClientRef = (usize, Handle);

/// Slots of the keys of a command; almost always one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum QueueSlots {
    One(Slot),
    /// Ascending.
    Several(Arc<[Slot]>),
}

impl QueueSlots {
    /// Slots of a command's keys. `None` without keys.
    pub(crate) fn of(slots: &BTreeSet<Slot>) -> Option<Self> {
        let first = *slots.first()?;
        Some(if slots.len() == 1 { Self::One(first) } else { Self::Several(slots.iter().copied().collect()) })
    }

    fn all(&self) -> &[Slot] {
        match self {
            Self::One(slot) => std::slice::from_ref(slot),
            Self::Several(slots) => slots,
        }
    }
}

/// Place of a command in the queues of its slots.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Ticket {
    slots: QueueSlots,
    number: u64,
}

type Shard = wait_queue::WaitQueues<ClientRef>;

#[derive(Debug, Default)]
pub(crate) struct WaitQueues {
    shards: [Mutex<Shard>; SHARDS],
    next: AtomicU64,
}

/// Locked queues of some slots.
struct Locked<'a>([Option<MutexGuard<'a, Shard>>; SHARDS]);

impl Locked<'_> {
    /// Calls `with` for each of these slots, with its queue.
    fn each<T>(&mut self, slots: &[Slot], mut with: impl FnMut(&mut Shard, Slot) -> T) -> Vec<T> {
        let of_slot = |slot: &Slot| Some(with(self.0[slot.index() % SHARDS].as_deref_mut()?, *slot));
        slots.iter().filter_map(of_slot).collect()
    }

    /// Whether a recalled command may be sent, by all its queues.
    fn turn(&mut self, ticket: &Ticket) -> Turn<ClientRef> {
        let mut before: Vec<ClientRef> = Vec::new();
        let mut is_ready = true;
        for turn in self.each(ticket.slots.all(), |queues, slot| queues.turn(slot, ticket.number)) {
            match turn {
                Turn::Ready => {}
                Turn::After(others) => {
                    is_ready = false;
                    before.extend(others.into_iter().filter(|other| !before.contains(other)).collect::<Vec<_>>());
                }
            }
        }
        if is_ready { Turn::Ready } else { Turn::After(before) }
    }
}

impl WaitQueues {
    /// Locks the queues of these slots, in the order of their shards.
    fn lock(&self, slots: &[Slot]) -> Locked<'_> {
        let has = |shard: usize| slots.iter().any(|slot| slot.index() % SHARDS == shard);
        Locked(array::from_fn(|shard| has(shard).then(|| lock(&self.shards[shard]))))
    }

    /// Creates a ticket. Must be called with the locks of its slots held, so that later entries have higher numbers.
    fn ticket(&self, slots: QueueSlots) -> Ticket {
        Ticket { slots, number: self.next.fetch_add(1, Ordering::Relaxed) }
    }

    /// Adds a blocking command. Returns whether it may be sent now; otherwise its worker later receives
    /// [`Message::WaitTurn`].
    pub(crate) fn enter(&self, slots: QueueSlots, worker: usize, client: Handle) -> (Ticket, bool) {
        let mut locked = self.lock(slots.all());
        let ticket = self.ticket(slots);
        let number = ticket.number;
        let may_go = locked.each(ticket.slots.all(), |queues, slot| queues.is_first(slot, number));
        let goes = may_go.into_iter().all(|goes| goes);
        locked.each(ticket.slots.all(), |queues, slot| queues.add(slot, number, (worker, client), goes));
        drop(locked);
        (ticket, goes)
    }

    /// Adds a command that cannot be sent yet, regardless of the queues.
    pub(crate) fn enter_reissued(&self, slots: QueueSlots, worker: usize, client: Handle) -> Ticket {
        let mut locked = self.lock(slots.all());
        let ticket = self.ticket(slots);
        locked.each(ticket.slots.all(), |queues, slot| queues.add(slot, ticket.number, (worker, client), false));
        drop(locked);
        ticket
    }

    /// Calls `with` for each queue of a command, under all their locks.
    fn each<T>(&self, ticket: &Ticket, mut with: impl FnMut(&mut Shard, Slot, u64) -> T) -> Vec<T> {
        let slots = ticket.slots.all();
        self.lock(slots).each(slots, |queues, slot| with(queues, slot, ticket.number))
    }

    /// Marks a waiting command to be ended at its node and reissued.
    pub(crate) fn reissue(&self, ticket: &Ticket, worker: usize, client: Handle) {
        self.each(ticket, |queues, slot, number| queues.reissue(slot, number, (worker, client)));
    }

    /// Records that a reissued command has returned to its worker.
    pub(crate) fn note_returned(&self, ticket: &Ticket, mailboxes: &Mailboxes) {
        let next = self.each(ticket, wait_queue::WaitQueues::on_ended);
        notify(next.into_iter().flatten(), mailboxes);
    }

    /// Whether a reissued command may be sent to a node. If not, its worker is notified later, and workers with
    /// commands that must be reissued first are notified now.
    pub(crate) fn is_turn(&self, ticket: &Ticket, mailboxes: &Mailboxes) -> bool {
        let turn = self.lock(ticket.slots.all()).turn(ticket);
        may_go(turn, mailboxes)
    }

    /// Like `is_turn`, and marks the command as sent if so.
    pub(crate) fn go(&self, ticket: &Ticket, worker: usize, client: Handle, mailboxes: &Mailboxes) -> bool {
        let mut locked = self.lock(ticket.slots.all());
        let turn = locked.turn(ticket);
        if turn == Turn::Ready {
            locked.each(ticket.slots.all(), |queues, slot| queues.send(slot, ticket.number, (worker, client)));
        }
        drop(locked);
        may_go(turn, mailboxes)
    }

    /// Records that the command was seen at its node. Returns the next clients, to be notified at once: all later
    /// commands wait for this.
    #[must_use]
    pub(crate) fn note_seen_at_node(&self, ticket: &Ticket) -> Vec<ClientRef> {
        self.each(ticket, wait_queue::WaitQueues::on_blocked).into_iter().flatten().collect()
    }

    /// Moves a command to the queues of the slots that its keys have now. Returns its new place.
    pub(crate) fn place_anew(&self, ticket: &Ticket, slots: QueueSlots, mailboxes: &Mailboxes) -> Ticket {
        if slots == ticket.slots {
            return ticket.clone();
        }
        let all = [ticket.slots.all(), slots.all()].concat();
        let mut locked = self.lock(&all);
        let taken = locked.each(ticket.slots.all(), |queues, slot| queues.take(slot, ticket.number));
        let (states, next): (Vec<_>, Vec<_>) = taken.into_iter().unzip();
        if let Some(state) = states.first() {
            // It is the same in all queues.
            locked.each(slots.all(), |queues, slot| queues.put(slot, ticket.number, *state));
        }
        drop(locked);
        notify(next.into_iter().flatten(), mailboxes);
        Ticket { slots, number: ticket.number }
    }

    /// Removes a finished command.
    pub(crate) fn leave(&self, ticket: &Ticket, mailboxes: &Mailboxes) {
        let next = self.each(ticket, wait_queue::WaitQueues::leave);
        notify(next.into_iter().flatten(), mailboxes);
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

#[cfg(test)]
mod tests {
    use super::*;

    fn slots(numbers: &[u16]) -> QueueSlots {
        let slots = numbers.iter().filter_map(|number| Slot::new(*number)).collect();
        QueueSlots::of(&slots).expect("some slots")
    }

    fn client(index: u32) -> Handle {
        Handle { index, ..Handle::NONE }
    }

    #[test]
    fn a_wait_for_several_slots_has_its_place_in_each_queue() {
        let (queues, mailboxes) = (WaitQueues::default(), Mailboxes::new(1).expect("mailboxes"));
        let enter = |numbers: &[u16], index| queues.enter(slots(numbers), 0, client(index));
        // 18 is in the shard of 2.
        let (first, goes) = enter(&[1, 2, 18], 1);
        let (one, one_goes) = enter(&[1], 2);
        assert!(goes && one_goes);
        // Its keys are moved: no later wait passes it in any of the queues.
        queues.reissue(&first, 0, client(1));
        queues.note_returned(&first, &mailboxes);
        for number in [1, 2, 18] {
            let (later, goes) = enter(&[number], 10);
            assert!(!goes && !queues.is_turn(&later, &mailboxes), "{number}");
            queues.leave(&later, &mailboxes);
        }
        assert!(enter(&[3], 11).1, "another queue");
        // A later wait at its node is recalled first.
        assert!(!queues.go(&first, 0, client(1), &mailboxes));
        queues.reissue(&one, 0, client(2));
        queues.note_returned(&one, &mailboxes);
        assert!(queues.go(&first, 0, client(1), &mailboxes) && !queues.is_turn(&one, &mailboxes));
        assert_eq!(queues.note_seen_at_node(&first), [(0, client(2))]);
        assert!(queues.is_turn(&one, &mailboxes));
        queues.leave(&first, &mailboxes);
        queues.leave(&one, &mailboxes);
        assert!(enter(&[1, 2, 18], 12).1);
    }

    #[test]
    fn a_wait_keeps_its_place_in_the_queues_of_other_slots() {
        let (queues, mailboxes) = (WaitQueues::default(), Mailboxes::new(1).expect("mailboxes"));
        let (first, _) = queues.enter(slots(&[1, 2]), 0, client(1));
        queues.reissue(&first, 0, client(1));
        queues.note_returned(&first, &mailboxes);
        let first = queues.place_anew(&first, slots(&[2, 40]), &mailboxes);
        let (_, goes) = queues.enter(slots(&[1]), 0, client(2));
        assert!(goes, "it has left that queue");
        for number in [2, 40] {
            assert!(!queues.enter(slots(&[number]), 0, client(3)).1, "{number}");
        }
        assert!(queues.go(&first, 0, client(1), &mailboxes));
    }
}
