//! Queues of clients blocked on keys of a slot (`BLPOP` and similar). Preserves their order when the slot changes its
//! node.
//!
//! Redis serves the clients blocked on a key in order of arrival. When their slot moves, the waits end at one node and
//! start at another, over connections of several workers, which have no order between them. Each wait therefore has a
//! ticket. Two rules keep the waits at a node in ticket order, whenever workers learn of the move:
//!
//! - No wait is sent while one with a **lower** ticket is *recalled*: ended, and not yet confirmed to be blocked at a
//!   node again. Having been sent is not enough: commands on one connection can arrive after later commands on another.
//! - No recalled wait is sent while one with a **higher** ticket may be at a node: that wait is recalled first. This
//!   happens if a leg was withdrawn after some workers had recalled their waits, and before others learned of it.
//!
//! Per slot rather than per key, because a command may wait for several keys, whose orders must agree. A wait for keys of
//! several slots has the same ticket in the queue of each: it is sent when it may be in all of them.

use std::collections::BTreeMap;

use crate::topology::Slot;

/// Waits of some slots. `W` identifies the client of a wait.
#[derive(Clone, Debug)]
pub struct WaitQueues<W> {
    /// Recalled waits, by slot and ticket.
    reissued: BTreeMap<(Slot, u64), W>,
    /// Waits that may be at a node, recalled or not.
    at_nodes: BTreeMap<(Slot, u64), W>,
}

impl<W> Default for WaitQueues<W> {
    fn default() -> Self {
        Self { reissued: BTreeMap::new(), at_nodes: BTreeMap::new() }
    }
}

/// A wait on its way to the queue of another slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WaitState<W> {
    reissued: Option<W>,
    at_node: Option<W>,
}

/// Whether a recalled wait may be sent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Turn<W> {
    /// The wait may be sent to a node.
    Ready,
    /// Waits with higher tickets may be at a node. Those listed must be recalled first.
    After(Vec<W>),
}

impl<W: Copy> WaitQueues<W> {
    /// Whether a new wait, whose ticket is above all others of its slot, may be sent now.
    pub fn is_first(&self, slot: Slot, ticket: u64) -> bool {
        self.reissued.range((slot, 0)..(slot, ticket)).next().is_none()
    }

    /// Adds a wait: sent, or recalled. A recalled one stays with its worker.
    pub fn add(&mut self, slot: Slot, ticket: u64, whose: W, is_sent: bool) {
        if is_sent { &mut self.at_nodes } else { &mut self.reissued }.insert((slot, ticket), whose);
    }

    /// Marks a wait as recalled, before it is ended at its node.
    pub fn reissue(&mut self, slot: Slot, ticket: u64, whose: W) {
        self.reissued.insert((slot, ticket), whose);
    }

    /// Records that a node has ended a wait. Returns the wait that may be sent next.
    pub fn on_ended(&mut self, slot: Slot, ticket: u64) -> Option<W> {
        self.at_nodes.remove(&(slot, ticket));
        self.first(slot)
    }

    /// Whether a wait held by its worker may be sent to a node.
    pub fn turn(&self, slot: Slot, ticket: u64) -> Turn<W> {
        if !self.is_first(slot, ticket) {
            return Turn::After(Vec::new());
        }
        let mut behind = self.at_nodes.range((slot, ticket + 1)..=(slot, u64::MAX)).peekable();
        if behind.peek().is_none() {
            return Turn::Ready;
        }
        Turn::After(behind.filter(|(place, _)| !self.reissued.contains_key(place)).map(|(_, whose)| *whose).collect())
    }

    /// Records a recalled wait as sent, when its turn has come. It stays recalled until [`Self::on_blocked`].
    pub fn send(&mut self, slot: Slot, ticket: u64, whose: W) {
        self.at_nodes.insert((slot, ticket), whose);
    }

    /// Records that a wait is blocked at its node. Returns the wait that may be sent next.
    pub fn on_blocked(&mut self, slot: Slot, ticket: u64) -> Option<W> {
        self.reissued.remove(&(slot, ticket));
        self.first(slot)
    }

    /// Removes a finished wait. Returns the wait that may be sent next.
    pub fn leave(&mut self, slot: Slot, ticket: u64) -> Option<W> {
        self.reissued.remove(&(slot, ticket));
        self.on_ended(slot, ticket)
    }

    /// Removes a wait whose keys are in another slot now. Returns its state for [`Self::put`], and the wait that may be
    /// sent next.
    pub fn take(&mut self, slot: Slot, ticket: u64) -> (WaitState<W>, Option<W>) {
        let state = WaitState {
            reissued: self.reissued.remove(&(slot, ticket)),
            at_node: self.at_nodes.remove(&(slot, ticket)),
        };
        (state, self.first(slot))
    }

    /// Adds a wait with its state in the queue of another slot. Its ticket keeps its place among the other tickets.
    pub fn put(&mut self, slot: Slot, ticket: u64, state: WaitState<W>) {
        self.reissued.extend(state.reissued.map(|whose| ((slot, ticket), whose)));
        self.at_nodes.extend(state.at_node.map(|whose| ((slot, ticket), whose)));
    }

    /// Removes the waits for which `gone` returns true. Returns the waits that may be sent next, one per slot.
    pub fn forget(&mut self, gone: impl Fn(W) -> bool) -> Vec<W> {
        self.reissued.retain(|_, whose| !gone(*whose));
        self.at_nodes.retain(|_, whose| !gone(*whose));
        let mut first: BTreeMap<Slot, W> = BTreeMap::new();
        for ((slot, _), whose) in &self.reissued {
            first.entry(*slot).or_insert(*whose);
        }
        first.into_values().collect()
    }

    /// The recalled wait with the lowest ticket.
    fn first(&self, slot: Slot) -> Option<W> {
        self.reissued.range((slot, 0)..=(slot, u64::MAX)).next().map(|(_, whose)| *whose)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop, proptest};

    use super::*;

    fn slot() -> Slot {
        Slot::new(7).expect("a slot")
    }

    /// Adds a wait. Returns whether it may be sent now.
    fn enter<W: Copy>(queues: &mut WaitQueues<W>, slot: Slot, ticket: u64, whose: W) -> bool {
        let goes = queues.is_first(slot, ticket);
        queues.add(slot, ticket, whose, goes);
        goes
    }

    /// Sends a recalled wait, if its turn has come.
    fn try_send<W: Copy>(queues: &mut WaitQueues<W>, slot: Slot, ticket: u64, whose: W) -> Turn<W> {
        let turn = queues.turn(slot, ticket);
        if matches!(turn, Turn::Ready) {
            queues.send(slot, ticket, whose);
        }
        turn
    }

    #[test]
    fn a_wait_keeps_its_place_in_the_queue_of_another_slot() {
        let other = Slot::new(9).expect("a slot");
        let mut queues = WaitQueues::default();
        assert!(enter(&mut queues, slot(), 1, "a") && enter(&mut queues, other, 2, "b"));
        let (state, next) = queues.take(slot(), 1);
        assert_eq!(next, None);
        queues.put(other, 1, state);
        // The later wait is recalled before the earlier one is sent again.
        queues.reissue(other, 1, "a");
        assert_eq!(queues.on_ended(other, 1), Some("a"));
        assert_eq!(queues.turn(other, 1), Turn::After(vec!["b"]));
    }

    /// State of a wait in the model.
    #[derive(Clone, Copy, PartialEq, Debug)]
    enum At {
        Node(usize),
        /// Recall requested, not yet confirmed by the node.
        Ending(usize),
        Here,
        /// Sent again, not yet confirmed.
        Sent(usize),
        Over,
    }

    impl At {
        fn node(self) -> Option<usize> {
            match self {
                At::Node(node) | At::Ending(node) | At::Sent(node) => Some(node),
                At::Here | At::Over => None,
            }
        }
    }

    /// Workers, two nodes, and a slot that moves between the nodes; moves may be withdrawn.
    #[derive(Debug)]
    struct World {
        wait_queues: WaitQueues<usize>,
        /// Worker and state, by ticket.
        waits: Vec<(usize, At)>,
        /// Blocked waits at each node, in the order of service.
        queues: [Vec<usize>; 2],
        /// By epoch: the slot's node, and whether it may be used there already.
        epochs: Vec<(usize, bool)>,
        /// Adopted epoch per worker, and its waits still to check under that epoch.
        workers: Vec<(usize, Vec<usize>)>,
        /// Recalls requested from workers.
        requested: Vec<usize>,
    }

    impl World {
        fn new(workers: usize) -> World {
            World {
                wait_queues: WaitQueues::default(),
                waits: Vec::new(),
                queues: [Vec::new(), Vec::new()],
                epochs: vec![(0, true)],
                workers: vec![(0, Vec::new()); workers],
                requested: Vec::new(),
            }
        }

        fn newest(&self) -> (usize, bool) {
            self.epochs[self.epochs.len() - 1]
        }

        /// Whether the old node has no waits and can receive none.
        fn is_drained(&self) -> bool {
            let place = self.newest().0;
            self.workers.iter().all(|(epoch, to_look_at)| epoch + 1 == self.epochs.len() && to_look_at.is_empty())
                && self.waits.iter().all(|(_, at)| at.node().is_none_or(|node| node == place))
        }

        /// Node to which a worker may send commands.
        fn place(&self, worker: usize) -> Option<usize> {
            let (epoch, to_look_at) = &self.workers[worker];
            let (place, open) = self.epochs[*epoch];
            (open && to_look_at.is_empty()).then_some(place)
        }

        fn arrive(&mut self, ticket: usize, node: usize) {
            assert!(self.queues[node].iter().all(|other| *other < ticket), "{ticket} was overtaken: {self:?}");
            self.queues[node].push(ticket);
        }

        fn is_queued(&self, ticket: usize) -> bool {
            self.queues.iter().any(|queue| queue.contains(&ticket))
        }

        /// One of the waits that satisfy the predicate.
        fn any(&self, number: usize, is: impl Fn(usize, usize, At) -> bool) -> Option<usize> {
            let found: Vec<usize> =
                (0..self.waits.len()).filter(|t| is(*t, self.waits[*t].0, self.waits[*t].1)).collect();
            (!found.is_empty()).then(|| found[number % found.len()])
        }

        /// Performs the event with this number, if possible.
        fn step(&mut self, what: usize, number: usize) -> Option<()> {
            let worker = number % self.workers.len();
            match what {
                // A new wait.
                0 if self.waits.len() < 30 => {
                    let place = self.place(worker)?;
                    let ticket = self.waits.len();
                    let goes = enter(&mut self.wait_queues, slot(), ticket as u64, ticket);
                    self.waits.push((worker, if goes { At::Node(place) } else { At::Here }));
                    if goes {
                        self.arrive(ticket, place);
                    }
                }
                // The slot starts to move to the other node.
                1 if self.newest().1 && self.epochs.len() < 20 => self.epochs.push((1 - self.newest().0, false)),
                // The move is withdrawn.
                2 if !self.newest().1 => self.epochs.push((1 - self.newest().0, true)),
                // The move is complete.
                3 if self.is_drained() => self.epochs.last_mut()?.1 = true,
                4 if self.workers[worker].1.is_empty() && self.workers[worker].0 + 1 < self.epochs.len() => {
                    let own = (0..self.waits.len()).filter(|t| self.waits[*t].0 == worker).collect();
                    self.workers[worker] = (self.epochs.len() - 1, own);
                }
                5 => {
                    let (epoch, to_look_at) = &mut self.workers[worker];
                    let (ticket, epoch) = (to_look_at.pop()?, *epoch);
                    if let At::Node(node) | At::Sent(node) = self.waits[ticket].1
                        && node != self.epochs[epoch].0
                    {
                        self.wait_queues.reissue(slot(), ticket as u64, ticket);
                        self.waits[ticket].1 = At::Ending(node);
                    }
                }
                // A node ends a wait.
                6 => {
                    let ticket = self.any(number, |t, _, at| matches!(at, At::Ending(_)) && self.is_queued(t))?;
                    self.queues.iter_mut().for_each(|queue| queue.retain(|t| *t != ticket));
                    self.waits[ticket].1 = At::Here;
                    self.wait_queues.on_ended(slot(), ticket as u64);
                }
                7 => {
                    let ticket = self.any(number, |_, worker, at| at == At::Here && self.place(worker).is_some())?;
                    let place = self.place(self.waits[ticket].0)?;
                    match try_send(&mut self.wait_queues, slot(), ticket as u64, ticket) {
                        Turn::Ready => self.waits[ticket].1 = At::Sent(place),
                        Turn::After(to_recall) => self.requested.extend(to_recall),
                    }
                }
                // A sent wait arrives, in any order.
                8 => {
                    let ticket =
                        self.any(number, |t, _, at| matches!(at, At::Sent(_) | At::Ending(_)) && !self.is_queued(t))?;
                    self.arrive(ticket, self.waits[ticket].1.node()?);
                }
                // The wait is confirmed.
                9 => {
                    let ticket = self.any(number, |t, _, at| matches!(at, At::Sent(_)) && self.is_queued(t))?;
                    self.waits[ticket].1 = At::Node(self.waits[ticket].1.node()?);
                    self.wait_queues.on_blocked(slot(), ticket as u64);
                }
                // The first wait receives its element.
                10 => {
                    let queue = &mut self.queues[number % 2];
                    if !queue.is_empty() {
                        let ticket = queue.remove(0);
                        self.waits[ticket].1 = At::Over;
                        self.wait_queues.leave(slot(), ticket as u64);
                    }
                }
                11 => {
                    let ticket = self.requested.pop()?;
                    if let At::Node(node) | At::Sent(node) = self.waits[ticket].1 {
                        self.wait_queues.reissue(slot(), ticket as u64, ticket);
                        self.waits[ticket].1 = At::Ending(node);
                    }
                }
                _ => {}
            }
            Some(())
        }
    }

    proptest! {
        #[test]
        fn waits_keep_their_order(workers in 1_usize..4, steps in prop::collection::vec((0_usize..12, any::<usize>()), 0..400)) {
            let mut world = World::new(workers);
            for (what, number) in steps {
                world.step(what, number);
            }
            // And every wait arrives.
            for number in 0..500 {
                (3..12).filter(|what| *what != 10).for_each(|what| {
                    world.step(what, number);
                });
            }
            assert!(world.waits.iter().all(|(_, at)| matches!(at, At::Node(_) | At::Over)), "{world:?}");
        }
    }

    #[test]
    fn a_sent_wait_stays_recalled_until_it_is_confirmed() {
        let mut wait_queues = WaitQueues::default();
        assert!(enter(&mut wait_queues, slot(), 1, 'a') && enter(&mut wait_queues, slot(), 2, 'b'));
        wait_queues.reissue(slot(), 1, 'a');
        wait_queues.reissue(slot(), 2, 'b');
        assert_eq!(wait_queues.on_ended(slot(), 2), Some('a'));
        assert_eq!(wait_queues.on_ended(slot(), 1), Some('a'));
        assert!(wait_queues.turn(slot(), 2) == Turn::After(vec![]) && !enter(&mut wait_queues, slot(), 3, 'c'));
        assert_eq!(try_send(&mut wait_queues, slot(), 1, 'a'), Turn::Ready);
        assert_eq!(try_send(&mut wait_queues, slot(), 2, 'b'), Turn::After(vec![]));
        let other = Slot::new(8).expect("a slot");
        assert!(enter(&mut wait_queues, other, 4, 'd'), "another slot is another line");
        assert_eq!(wait_queues.on_blocked(slot(), 1), Some('b'));
        assert_eq!(try_send(&mut wait_queues, slot(), 2, 'b'), Turn::Ready);
        assert_eq!(wait_queues.forget(|whose| whose == 'b'), ['c']);
        assert_eq!(try_send(&mut wait_queues, slot(), 3, 'c'), Turn::Ready);
        assert_eq!(wait_queues.leave(slot(), 3), None);
    }

    #[test]
    fn a_later_wait_at_the_node_is_recalled_first() {
        let mut wait_queues = WaitQueues::default();
        assert!(enter(&mut wait_queues, slot(), 1, 'a') && enter(&mut wait_queues, slot(), 2, 'b'));
        wait_queues.reissue(slot(), 1, 'a');
        wait_queues.on_ended(slot(), 1);
        assert_eq!(wait_queues.turn(slot(), 1), Turn::After(vec!['b']));
        wait_queues.reissue(slot(), 2, 'b');
        assert_eq!(try_send(&mut wait_queues, slot(), 1, 'a'), Turn::After(vec![]));
        assert_eq!(wait_queues.on_ended(slot(), 2), Some('a'));
        assert_eq!(try_send(&mut wait_queues, slot(), 1, 'a'), Turn::Ready);
    }
}
