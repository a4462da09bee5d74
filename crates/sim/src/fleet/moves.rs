//! Moves of slots and keys, with measured durations.
//!
//! A model of the mover: a move starts when both nodes are free, lists the source's keys, and hands over its slots in
//! order, at a measured speed. It costs both nodes a measured part of their time. The protocol itself is
//! simulated elsewhere in this crate.

use std::collections::{BTreeMap, BTreeSet};

use switchyard_policy::planner::{Name, Step, StepSubject};
use switchyard_policy::topology::{MoveId, NodeId, Slot, Topology};

use super::scenario::Moves as Speeds;

/// Longest part of a slice in which no move starts, in seconds: in a slice of a minute, a node takes part in many moves.
const PART: f64 = 2.0;

/// Keys or slots of a move.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Subject {
    Keys(Vec<Name>),
    Slots(Vec<Slot>),
}

/// A move to start.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Order {
    pub(super) source: NodeId,
    pub(super) target: NodeId,
    pub(super) subject: Subject,
    /// Clients wait for it.
    pub(super) is_urgent: bool,
}

/// Part of a move that has reached its target.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct HandOver {
    pub(super) target: NodeId,
    pub(super) subject: Subject,
}

/// Present size of the data.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) keys_of_slot: f64,
    pub(super) bytes_of_key: f64,
}

#[derive(Clone, Debug)]
struct Running {
    /// Time from which on keys move.
    from: f64,
    /// Number of slots handed over.
    done: usize,
    /// Keys that have reached the target.
    moved: f64,
}

#[derive(Clone, Debug)]
struct Job {
    order: Order,
    running: Option<Running>,
}

/// All open moves.
#[derive(Clone, Debug)]
pub(super) struct Moves {
    speeds: Speeds,
    open: BTreeMap<MoveId, Job>,
    last: u64,
    /// Keys and slots moved, and bytes, since the start.
    pub(super) keys: u64,
    pub(super) slots: u64,
    pub(super) bytes: f64,
}

impl Moves {
    pub(super) fn new(speeds: Speeds) -> Self {
        Self { speeds, open: BTreeMap::new(), last: 0, keys: 0, slots: 0, bytes: 0.0 }
    }

    /// Adds moves, and returns their ids.
    pub(super) fn order(&mut self, orders: Vec<Order>) -> Vec<MoveId> {
        let first = self.last + 1;
        self.last += orders.len() as u64;
        let ids = (first..=self.last).map(MoveId);
        self.open.extend(ids.clone().zip(orders.into_iter().map(|order| Job { order, running: None })));
        ids.collect()
    }

    pub(super) fn is_open(&self, id: MoveId) -> bool {
        self.open.contains_key(&id)
    }

    pub(super) fn is_idle(&self) -> bool {
        self.open.is_empty()
    }

    /// Nodes that take part in an open move.
    pub(super) fn busy(&self) -> BTreeSet<NodeId> {
        self.open.values().flat_map(|job| [job.order.source, job.order.target]).collect()
    }

    /// Keys per second of a move.
    fn speed(&self, order: &Order, sizes: Sizes) -> f64 {
        let keys = if order.is_urgent { self.speeds.urgent_keys } else { self.speeds.keys };
        keys.min(self.speeds.bytes / sizes.bytes_of_key.max(1.0))
    }

    /// Starts the moves whose nodes are free, at most one per node, in the order of their ids. `keys_at`: number of keys
    /// of a node.
    fn start(&mut self, at: f64, keys_at: impl Fn(NodeId) -> f64) {
        let nodes = |job: &Job| [job.order.source, job.order.target];
        let mut taken: BTreeSet<NodeId> =
            self.open.values().filter(|job| job.running.is_some()).flat_map(nodes).collect();
        for job in self.open.values_mut().filter(|job| job.running.is_none()) {
            if nodes(job).iter().any(|node| taken.contains(node)) {
                continue;
            }
            taken.extend(nodes(job));
            let listing = match job.order.subject {
                Subject::Slots(_) => keys_at(job.order.source) / self.speeds.listed,
                Subject::Keys(_) => 0.0,
            };
            job.running = Some(Running { from: at + self.speeds.start + listing, done: 0, moved: 0.0 });
        }
    }

    /// Advances all moves by a slice that begins at `at`. Returns the keys and slots that have reached their targets, and
    /// the requests per second that the moves cost each node in this slice.
    pub(super) fn advance(
        &mut self,
        at: f64,
        seconds: f64,
        sizes: Sizes,
        keys_at: impl Fn(NodeId) -> f64,
    ) -> (Vec<HandOver>, BTreeMap<NodeId, f64>) {
        let (mut done, mut moved): (Vec<HandOver>, BTreeMap<NodeId, f64>) = Default::default();
        let parts = (seconds / PART).ceil().max(1.0);
        for part in 0..parts as u32 {
            if self.is_idle() {
                break;
            }
            let at = at + f64::from(part) * seconds / parts;
            self.start(at, &keys_at);
            for handed in self.advance_part(at, seconds / parts, sizes, &mut moved) {
                match (done.last_mut(), handed) {
                    // Consecutive arrivals at a node are one change of the placement.
                    (
                        Some(HandOver { target, subject: Subject::Slots(slots) }),
                        HandOver { target: next, subject: Subject::Slots(more) },
                    ) if *target == next => slots.extend(more),
                    (_, handed) => done.push(handed),
                }
            }
        }
        let costs = moved.into_iter().map(|(node, keys)| (node, keys * self.speeds.cost / seconds));
        (done, costs.collect())
    }

    /// Advances all running moves. Adds the keys that each node sends or receives.
    fn advance_part(
        &mut self,
        at: f64,
        seconds: f64,
        sizes: Sizes,
        keys_of_nodes: &mut BTreeMap<NodeId, f64>,
    ) -> Vec<HandOver> {
        let (mut done, mut ended) = (Vec::new(), Vec::new());
        let speeds: Vec<f64> = self.open.values().map(|job| self.speed(&job.order, sizes)).collect();
        for ((id, job), speed) in self.open.iter_mut().zip(speeds) {
            let Some(running) = &mut job.running else { continue };
            let active = (at + seconds - running.from.max(at)).max(0.0);
            let Order { source, target, ref subject, .. } = job.order;
            let (all, keys_of_one) = match subject {
                Subject::Keys(keys) => (keys.len(), 1.0),
                Subject::Slots(slots) => (slots.len(), sizes.keys_of_slot),
            };
            let before = running.moved;
            running.moved = (before + active * speed).min(all as f64 * keys_of_one);
            let moved = running.moved - before;
            self.bytes += moved * sizes.bytes_of_key;
            for node in [source, target] {
                *keys_of_nodes.entry(node).or_default() += moved;
            }
            // Rounding must not leave the last slot behind.
            let reached = match active > 0.0 {
                true if keys_of_one > 0.0 => ((running.moved / keys_of_one + 1e-6) as usize).min(all),
                true => all,
                false => 0,
            };
            let subject = match subject {
                Subject::Slots(slots) => Subject::Slots(slots[running.done.min(reached)..reached].to_vec()),
                // A placement override takes effect at the end of its move.
                Subject::Keys(_) if reached < all => Subject::Keys(Vec::new()),
                Subject::Keys(keys) => Subject::Keys(keys.clone()),
            };
            running.done = running.done.max(reached);
            match &subject {
                Subject::Slots(slots) => self.slots += slots.len() as u64,
                Subject::Keys(keys) => self.keys += keys.len() as u64,
            }
            let is_empty = matches!(&subject, Subject::Slots(slots) if slots.is_empty())
                || matches!(&subject, Subject::Keys(keys) if keys.is_empty());
            if !is_empty {
                done.push(HandOver { target, subject });
            }
            if reached == all {
                ended.push(*id);
            }
        }
        ended.iter().for_each(|id| drop(self.open.remove(id)));
        done
    }
}

/// Converts the steps of a plan to orders, as `control::operator` does: keys with the same source and target become one
/// move, keys move first, and no two orders share a slot.
pub(super) fn orders_of(steps: &[Step], topology: &Topology) -> Vec<Order> {
    let mut keys: BTreeMap<(NodeId, NodeId), Vec<Name>> = BTreeMap::new();
    let mut orders = Vec::new();
    let mut taken: BTreeSet<Slot> = BTreeSet::new();
    let order = |source, target, subject| Order { source, target, subject, is_urgent: false };
    for step in steps {
        if let StepSubject::Slots(slots) = &step.what {
            taken.extend(slots);
            orders.push(order(step.from, step.to, Subject::Slots(slots.clone())));
        }
    }
    for step in steps {
        if let StepSubject::Key { key, .. } = &step.what
            && !taken.contains(&topology.slot_of(key))
        {
            keys.entry((step.from, step.to)).or_default().push(key.clone());
        }
    }
    let keys = keys.into_iter().map(|((source, target), keys)| order(source, target, Subject::Keys(keys)));
    keys.chain(orders).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: Sizes = Sizes { keys_of_slot: 100.0, bytes_of_key: 50.0 };

    fn moves() -> Moves {
        Moves::new(Speeds { start: 1.0, listed: 1e9, keys: 100.0, ..Speeds::default() })
    }

    fn slots(source: u16, target: u16, numbers: std::ops::Range<u16>) -> Order {
        let slots = numbers.filter_map(Slot::new).collect();
        Order { source: NodeId(source), target: NodeId(target), subject: Subject::Slots(slots), is_urgent: false }
    }

    #[test]
    fn slots_arrive_one_after_the_other() {
        let mut moves = moves();
        moves.order(vec![slots(0, 1, 0..3)]);
        let arrived: Vec<usize> = (0..5)
            .map(|second| {
                let (done, _) = moves.advance(f64::from(second), 1.0, SIZES, |_| 0.0);
                done.iter().map(|done| if let Subject::Slots(slots) = &done.subject { slots.len() } else { 0 }).sum()
            })
            .collect();
        assert_eq!((arrived, moves.slots, moves.bytes), (vec![0, 1, 1, 1, 0], 3, 15_000.0));
        assert!(moves.is_idle());
    }

    #[test]
    fn a_node_takes_part_in_one_move_at_a_time() {
        let mut moves = moves();
        moves.order(vec![slots(0, 1, 0..1), slots(1, 2, 1..2), slots(3, 4, 2..3)]);
        let targets = |done: Vec<HandOver>| done.iter().map(|done| done.target.0).collect::<Vec<_>>();
        let mut step = |second: u32| targets(moves.advance(f64::from(second), 1.0, SIZES, |_| 0.0).0);
        assert_eq!([step(0), step(1), step(2), step(3)], [vec![], vec![1, 4], vec![], vec![2]]);
    }

    #[test]
    fn both_nodes_pay_for_the_keys() {
        let mut moves = moves();
        moves.order(vec![slots(0, 1, 0..2)]);
        let (_, costs) = moves.advance(0.0, 2.0, SIZES, |_| 0.0);
        let cost = 100.0 * Speeds::default().cost / 2.0;
        assert_eq!(costs, BTreeMap::from([(NodeId(0), cost), (NodeId(1), cost)]));
    }
}
