//! Who waits for keys of a slot (BLPOP and relatives), in the order in which they began: nobody overtakes anybody when
//! the slot changes its node.
//!
//! Redis serves those who wait for one key first come first served. When their slot moves, the waits end at one node
//! and begin at another, on connections of several workers, which have no order between them. So each wait has a
//! ticket, and two rules make the order at a node that of the tickets, whatever workers know of the move and when:
//!
//! - Nobody is sent to a node while somebody with a **lower** ticket is *recalled*: its wait was ended, and it is not
//!   yet seen to wait at a node again. That it was sent is not enough: what was sent on one connection can arrive
//!   behind what was sent later on another.
//! - Nobody who was recalled is sent to a node while somebody with a **higher** ticket may be at one: that one is
//!   recalled first. So it is where a leg was withdrawn, and some workers had recalled their waits already while others
//!   never heard of it.
//!
//! Per slot and not per key, because a command may wait for several keys, and the orders of all of them have to fit
//! together.

use std::collections::BTreeMap;

use crate::topology::Slot;

/// The waits of some slots. `W` says whose a wait is.
#[derive(Clone, Debug)]
pub struct WaitQueues<W> {
    /// By slot and ticket: those that are recalled.
    reissued: BTreeMap<(Slot, u64), W>,
    /// Those that may be at a node, recalled or not.
    at_nodes: BTreeMap<(Slot, u64), W>,
}

impl<W> Default for WaitQueues<W> {
    fn default() -> Self {
        Self { reissued: BTreeMap::new(), at_nodes: BTreeMap::new() }
    }
}

/// Whether it is the turn of a wait that is recalled.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Turn<W> {
    /// It may be sent to a node.
    Its,
    /// When others have arrived, which have to be recalled first, as far as they are named here.
    Others(Vec<W>),
}

impl<W: Copy> WaitQueues<W> {
    /// A command begins to wait, with a ticket above all others of its slot. True where it is sent to its node now;
    /// else it is recalled, and with its worker.
    pub fn enter(&mut self, slot: Slot, ticket: u64, whose: W) -> bool {
        let goes = !self.is_any_reissued(slot, ticket);
        if goes { &mut self.at_nodes } else { &mut self.reissued }.insert((slot, ticket), whose);
        goes
    }

    /// A wait is to be ended at its node, to begin again: it is recalled from now on.
    pub fn recall(&mut self, slot: Slot, ticket: u64, whose: W) {
        self.reissued.insert((slot, ticket), whose);
    }

    /// A node has ended a wait: it is with its worker. Whose turn it may be now.
    pub fn is_back(&mut self, slot: Slot, ticket: u64) -> Option<W> {
        self.at_nodes.remove(&(slot, ticket));
        self.first(slot)
    }

    /// Whether a wait that is with its worker may be sent to a node.
    pub fn turn(&self, slot: Slot, ticket: u64) -> Turn<W> {
        if self.is_any_reissued(slot, ticket) {
            return Turn::Others(Vec::new());
        }
        let mut behind = self.at_nodes.range((slot, ticket + 1)..=(slot, u64::MAX)).peekable();
        if behind.peek().is_none() {
            return Turn::Its;
        }
        Turn::Others(behind.filter(|(place, _)| !self.reissued.contains_key(place)).map(|(_, whose)| *whose).collect())
    }

    /// The same, and where it may, it is sent: it stays recalled until it is seen.
    pub fn go(&mut self, slot: Slot, ticket: u64, whose: W) -> Turn<W> {
        let turn = self.turn(slot, ticket);
        if matches!(turn, Turn::Its) {
            self.at_nodes.insert((slot, ticket), whose);
        }
        turn
    }

    /// A wait was seen at its node. Whose turn it may be now.
    pub fn seen(&mut self, slot: Slot, ticket: u64) -> Option<W> {
        self.reissued.remove(&(slot, ticket));
        self.first(slot)
    }

    /// A wait is over, whatever ended it. Whose turn it may be now.
    pub fn leave(&mut self, slot: Slot, ticket: u64) -> Option<W> {
        self.reissued.remove(&(slot, ticket));
        self.is_back(slot, ticket)
    }

    /// Those of whom this is true are gone. Whose turn it may be now, in each slot.
    pub fn forget(&mut self, gone: impl Fn(W) -> bool) -> Vec<W> {
        self.reissued.retain(|_, whose| !gone(*whose));
        self.at_nodes.retain(|_, whose| !gone(*whose));
        let mut first: BTreeMap<Slot, W> = BTreeMap::new();
        for ((slot, _), whose) in &self.reissued {
            first.entry(*slot).or_insert(*whose);
        }
        first.into_values().collect()
    }

    fn is_any_reissued(&self, slot: Slot, before: u64) -> bool {
        self.reissued.range((slot, 0)..(slot, before)).next().is_some()
    }

    /// The first of those that are recalled.
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

    /// Where a wait of the model is.
    #[derive(Clone, Copy, PartialEq, Debug)]
    enum At {
        Node(usize),
        /// Its end was asked for.
        Ending(usize),
        Here,
        /// Sent again, and not seen.
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

    /// Workers, two nodes, and a slot that goes from one to the other and back, or does not go after all.
    #[derive(Debug)]
    struct World {
        wait_queues: WaitQueues<usize>,
        /// By ticket: its worker, and where it is.
        waits: Vec<(usize, At)>,
        /// Who waits at each node, as it serves them.
        queues: [Vec<usize>; 2],
        /// By epoch: where the slot is used, and whether it may be used there already.
        epochs: Vec<(usize, bool)>,
        /// The epoch that each worker has adopted, and which of its waits it has still to look at under that.
        workers: Vec<(usize, Vec<usize>)>,
        /// Those that workers were asked to recall.
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

        /// Nothing is at the node that the slot leaves, and nothing can come there any more.
        fn is_drained(&self) -> bool {
            let place = self.newest().0;
            self.workers.iter().all(|(epoch, to_look_at)| epoch + 1 == self.epochs.len() && to_look_at.is_empty())
                && self.waits.iter().all(|(_, at)| at.node().is_none_or(|node| node == place))
        }

        /// Where a worker may send commands.
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

        /// One of the waits of which this is true.
        fn any(&self, number: usize, is: impl Fn(usize, usize, At) -> bool) -> Option<usize> {
            let found: Vec<usize> =
                (0..self.waits.len()).filter(|t| is(*t, self.waits[*t].0, self.waits[*t].1)).collect();
            (!found.is_empty()).then(|| found[number % found.len()])
        }

        /// Does the `what`th of the things that can happen, if it can.
        fn step(&mut self, what: usize, number: usize) -> Option<()> {
            let worker = number % self.workers.len();
            match what {
                // Somebody begins to wait.
                0 if self.waits.len() < 30 => {
                    let place = self.place(worker)?;
                    let ticket = self.waits.len();
                    let goes = self.wait_queues.enter(slot(), ticket as u64, ticket);
                    self.waits.push((worker, if goes { At::Node(place) } else { At::Here }));
                    if goes {
                        self.arrive(ticket, place);
                    }
                }
                // The slot begins to go to the other node.
                1 if self.newest().1 && self.epochs.len() < 20 => self.epochs.push((1 - self.newest().0, false)),
                // It does not after all.
                2 if !self.newest().1 => self.epochs.push((1 - self.newest().0, true)),
                // It has gone.
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
                        self.wait_queues.recall(slot(), ticket as u64, ticket);
                        self.waits[ticket].1 = At::Ending(node);
                    }
                }
                // A node ends a wait.
                6 => {
                    let ticket = self.any(number, |t, _, at| matches!(at, At::Ending(_)) && self.is_queued(t))?;
                    self.queues.iter_mut().for_each(|queue| queue.retain(|t| *t != ticket));
                    self.waits[ticket].1 = At::Here;
                    self.wait_queues.is_back(slot(), ticket as u64);
                }
                7 => {
                    let ticket = self.any(number, |_, worker, at| at == At::Here && self.place(worker).is_some())?;
                    let place = self.place(self.waits[ticket].0)?;
                    match self.wait_queues.go(slot(), ticket as u64, ticket) {
                        Turn::Its => self.waits[ticket].1 = At::Sent(place),
                        Turn::Others(to_recall) => self.requested.extend(to_recall),
                    }
                }
                // What was sent arrives: in any order.
                8 => {
                    let ticket =
                        self.any(number, |t, _, at| matches!(at, At::Sent(_) | At::Ending(_)) && !self.is_queued(t))?;
                    self.arrive(ticket, self.waits[ticket].1.node()?);
                }
                // It is seen.
                9 => {
                    let ticket = self.any(number, |t, _, at| matches!(at, At::Sent(_)) && self.is_queued(t))?;
                    self.waits[ticket].1 = At::Node(self.waits[ticket].1.node()?);
                    self.wait_queues.seen(slot(), ticket as u64);
                }
                // Who is first gets what it waits for.
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
                        self.wait_queues.recall(slot(), ticket as u64, ticket);
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
        fn nobody_overtakes_anybody(workers in 1_usize..4, steps in prop::collection::vec((0_usize..12, any::<usize>()), 0..400)) {
            let mut world = World::new(workers);
            for (what, number) in steps {
                world.step(what, number);
            }
            // And everybody arrives.
            for number in 0..500 {
                (3..12).filter(|what| *what != 10).for_each(|what| {
                    world.step(what, number);
                });
            }
            assert!(world.waits.iter().all(|(_, at)| matches!(at, At::Node(_) | At::Over)), "{world:?}");
        }
    }

    #[test]
    fn who_was_sent_is_recalled_until_it_is_seen() {
        let mut wait_queues = WaitQueues::default();
        assert!(wait_queues.enter(slot(), 1, 'a') && wait_queues.enter(slot(), 2, 'b'));
        wait_queues.recall(slot(), 1, 'a');
        wait_queues.recall(slot(), 2, 'b');
        assert_eq!(wait_queues.is_back(slot(), 2), Some('a'));
        assert_eq!(wait_queues.is_back(slot(), 1), Some('a'));
        assert!(wait_queues.turn(slot(), 2) == Turn::Others(vec![]) && !wait_queues.enter(slot(), 3, 'c'));
        assert_eq!(wait_queues.go(slot(), 1, 'a'), Turn::Its);
        assert_eq!(wait_queues.go(slot(), 2, 'b'), Turn::Others(vec![]));
        let other = Slot::new(8).expect("a slot");
        assert!(wait_queues.enter(other, 4, 'd'), "another slot is another line");
        assert_eq!(wait_queues.seen(slot(), 1), Some('b'));
        assert_eq!(wait_queues.go(slot(), 2, 'b'), Turn::Its);
        assert_eq!(wait_queues.forget(|whose| whose == 'b'), ['c']);
        assert_eq!(wait_queues.go(slot(), 3, 'c'), Turn::Its);
        assert_eq!(wait_queues.leave(slot(), 3), None);
    }

    #[test]
    fn who_is_behind_at_the_node_is_recalled_first() {
        let mut wait_queues = WaitQueues::default();
        assert!(wait_queues.enter(slot(), 1, 'a') && wait_queues.enter(slot(), 2, 'b'));
        wait_queues.recall(slot(), 1, 'a');
        wait_queues.is_back(slot(), 1);
        assert_eq!(wait_queues.turn(slot(), 1), Turn::Others(vec!['b']));
        wait_queues.recall(slot(), 2, 'b');
        assert_eq!(wait_queues.go(slot(), 1, 'a'), Turn::Others(vec![]));
        assert_eq!(wait_queues.is_back(slot(), 2), Some('a'));
        assert_eq!(wait_queues.go(slot(), 1, 'a'), Turn::Its);
    }
}
