//! Popularity of keys: the hottest ones exactly, all others aggregated by slot.
//!
//! A share of the requests belongs to a rank, and changes of popularity exchange the keys at the ranks. So the tail keeps
//! its load when keys leave or enter the head: among millions of keys, 200 do not matter.
//!
//! Shares have single precision, because `powf` may differ in the last bits between processors, and a decision must not
//! depend on that.

use switchyard_policy::telemetry;
use switchyard_policy::topology::{SLOT_COUNT, Slot, Topology};

use super::draw::{Draws, Stream};
use super::scenario::{Churn, ChurnKind, Event, Keys};
use crate::Random;

/// Ranks whose slots are drawn one by one. Of a Zipf distribution of 0.9 over ten million keys, the ones beyond differ
/// by less than a percent of a slot's load.
const DRAWN: f64 = 262_144.0;

/// A key with its own rate.
#[derive(Clone, Debug)]
pub(super) struct Key {
    pub(super) name: Box<[u8]>,
    /// The name as in reports.
    pub(super) label: telemetry::Name,
    pub(super) hash: u64,
    pub(super) slot: Slot,
    /// Share of all requests.
    pub(super) share: f64,
    /// Share of writes in its requests.
    pub(super) writes: f64,
}

/// All keys.
#[derive(Clone, Debug)]
pub(super) struct KeySpace {
    /// The head, and then the keys of events.
    keys: Vec<Key>,
    /// Place of the key at each rank of the head.
    order: Vec<usize>,
    /// Share of each rank of the head, if no event takes a part.
    by_rank: Vec<f64>,
    /// Share of each slot's other keys, if no event takes a part.
    tail: Vec<f64>,
    /// Part of all requests that goes to the head and the tail.
    rest: f64,
    /// First place and share of each event's keys.
    events: Vec<(usize, usize)>,
    writes: f64,
    next: u64,
}

/// Sum of 1 / r^zipf over the ranks above `from` and up to `to`: midpoint rule, exact to six digits from 1,000 on.
fn tail_sum(from: f64, to: f64, zipf: f64) -> f64 {
    let (low, high) = (from + 0.5, to + 0.5);
    match zipf == 1.0 {
        true => (high / low).ln(),
        false => (high.powf(1.0 - zipf) - low.powf(1.0 - zipf)) / (1.0 - zipf),
    }
}

fn rounded(share: f64) -> f64 {
    f64::from(share as f32)
}

impl KeySpace {
    pub(super) fn new(keys: &Keys, events: &[Event], topology: &Topology, seed: u64) -> Self {
        let drawn = DRAWN.min(keys.count).max(keys.head as f64) as usize;
        let raw: Vec<f64> = (1..=drawn).map(|rank| (rank as f64).powf(-keys.zipf)).collect();
        let beyond = if keys.count > drawn as f64 { tail_sum(drawn as f64, keys.count, keys.zipf) } else { 0.0 };
        let all = raw.iter().sum::<f64>() + beyond;
        let by_rank: Vec<f64> = raw[..keys.head].iter().map(|share| rounded(share / all)).collect();
        let mut tail = vec![beyond / SLOT_COUNT as f64 / all; SLOT_COUNT];
        let mut draws = Draws::new(seed, Stream::Tail);
        for share in &raw[keys.head..] {
            tail[draws.below(SLOT_COUNT)] += share / all;
        }
        tail.iter_mut().for_each(|share| *share = rounded(*share));
        let mut space = Self {
            keys: Vec::new(),
            order: (0..keys.head).collect(),
            by_rank,
            tail,
            rest: 1.0,
            events: Vec::new(),
            writes: keys.writes,
            next: 0,
        };
        for _ in 0..keys.head {
            let key = space.new_key(topology, None, keys.writes);
            space.keys.push(key);
        }
        for event in events {
            space.events.push((space.keys.len(), event.keys));
            for _ in 0..event.keys {
                let key = space.new_key(topology, event.node, event.writes.unwrap_or(keys.writes));
                space.keys.push(key);
            }
        }
        space.share_out(&vec![0.0; events.len()]);
        space
    }

    pub(super) fn keys(&self) -> &[Key] {
        &self.keys
    }

    /// Places of the head by rank.
    pub(super) fn hottest(&self) -> &[usize] {
        &self.order
    }

    /// Share of the slot's keys that have no rate of their own.
    pub(super) fn tail(&self, slot: usize) -> f64 {
        self.tail[slot] * self.rest
    }

    /// Creates a key with a new name; its slot belongs to the node with this number, if given.
    fn new_key(&mut self, topology: &Topology, node: Option<u16>, writes: f64) -> Key {
        loop {
            let number = self.next;
            self.next += 1;
            let name = format!("key:{number}").into_bytes();
            let slot = topology.slot_of(&name);
            if node.is_some_and(|node| topology.owner(slot).0 != node) {
                continue;
            }
            let (label, hash) = (telemetry::Name::of(&name), Random::new(number).number());
            return Key { name: name.into(), label, hash, slot, share: 0.0, writes };
        }
    }

    /// Assigns these parts of all requests to the keys of the events, evenly, and the rest to the other keys.
    pub(super) fn share_out(&mut self, events: &[f64]) {
        self.rest = 1.0 - events.iter().sum::<f64>();
        for (share, (first, count)) in events.iter().zip(&self.events) {
            for key in &mut self.keys[*first..first + count] {
                key.share = share / (*count).max(1) as f64;
            }
        }
        for (place, share) in self.order.iter().zip(&self.by_rank) {
            self.keys[*place].share = share * self.rest;
        }
    }

    /// Changes the popularity. Returns the places that have another key now.
    pub(super) fn churn(&mut self, churn: &Churn, topology: &Topology, draws: &mut Draws) -> Vec<usize> {
        let head = self.order.len();
        let count = churn.keys.min(head);
        let replaced: Vec<usize> = match churn.kind {
            ChurnKind::HotIn => {
                self.order.rotate_right(count);
                self.order[..count].to_vec()
            }
            ChurnKind::HotOut => {
                self.order.rotate_left(count);
                self.order[head - count..].to_vec()
            }
            ChurnKind::Random => {
                // The first of a random permutation.
                let mut ranks: Vec<usize> = (0..churn.within.clamp(count, head)).collect();
                for place in 0..count {
                    let other = place + draws.below(ranks.len() - place);
                    ranks.swap(place, other);
                }
                ranks[..count].iter().map(|rank| self.order[*rank]).collect()
            }
        };
        for place in &replaced {
            self.keys[*place] = self.new_key(topology, None, self.writes);
        }
        for (place, share) in self.order.iter().zip(&self.by_rank) {
            self.keys[*place].share = share * self.rest;
        }
        replaced
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn topology() -> Topology {
        Topology::even(&["a".into(), "b".into()]).expect("nodes")
    }

    fn keys(count: f64, zipf: f64, head: usize) -> Keys {
        Keys { count, zipf, head, bytes: 100.0, writes: 0.1, growth: 0.0 }
    }

    fn sum(space: &KeySpace) -> f64 {
        space.keys().iter().map(|key| key.share).sum::<f64>()
            + (0..SLOT_COUNT).map(|slot| space.tail(slot)).sum::<f64>()
    }

    #[test]
    fn shares_sum_to_one_and_follow_the_ranks() {
        for (count, zipf, head) in [(1e7, 0.9, 500), (1e10, 0.99, 10_000), (1000.0, 1.0, 1000), (5000.0, 0.0, 10)] {
            let space = KeySpace::new(&keys(count, zipf, head), &[], &topology(), 1);
            assert!((sum(&space) - 1.0).abs() < 1e-5, "{} of {count} keys", sum(&space));
            let share = |rank: usize| space.keys()[space.hottest()[rank]].share;
            assert!((share(0) / share(1) - 2.0_f64.powf(zipf)).abs() < 1e-5);
        }
        // SwitchKV: 10,000 copies serve 38.6 % of a Zipf distribution of 0.99 over ten billion keys.
        let space = KeySpace::new(&keys(1e10, 0.99, 10_000), &[], &topology(), 1);
        let head: f64 = space.keys().iter().map(|key| key.share).sum();
        assert!((head - 0.386).abs() < 0.001, "{head}");
    }

    #[test]
    fn changes_keep_the_shares_of_all_ranks() {
        let topology = topology();
        let mut space = KeySpace::new(&keys(1e6, 0.9, 100), &[], &topology, 1);
        let mut draws = Draws::new(1, Stream::Churn);
        let shares =
            |space: &KeySpace| -> Vec<f64> { space.hottest().iter().map(|place| space.keys()[*place].share).collect() };
        let names = |space: &KeySpace| -> Vec<Box<[u8]>> {
            space.hottest().iter().map(|place| space.keys()[*place].name.clone()).collect()
        };
        let (before, first) = (shares(&space), names(&space));
        let churn = |kind| Churn { kind, keys: 10, every: 1.0, within: 50 };
        space.churn(&churn(ChurnKind::HotIn), &topology, &mut draws);
        assert_eq!((&names(&space)[10..], shares(&space)), (&first[..90], before.clone()));
        space.churn(&churn(ChurnKind::HotOut), &topology, &mut draws);
        assert_eq!((&names(&space)[..90], shares(&space)), (&first[..90], before.clone()));
        let replaced = space.churn(&churn(ChurnKind::Random), &topology, &mut draws);
        let known: BTreeSet<Box<[u8]>> = first.into_iter().collect();
        let fresh = names(&space)[..50].iter().filter(|name| !known.contains(*name)).count();
        assert_eq!((fresh, replaced.len(), shares(&space)), (10, 10, before));
    }

    #[test]
    fn events_take_their_part_from_all_others() {
        let topology = topology();
        let event = Event {
            at: 0.0,
            until: None,
            ramp: 0.0,
            factor: 1.0,
            share: 0.3,
            keys: 3,
            writes: Some(1.0),
            node: Some(1),
        };
        let mut space = KeySpace::new(&keys(1e6, 0.9, 100), &[event], &topology, 1);
        space.share_out(&[0.3]);
        assert!((sum(&space) - 1.0).abs() < 1e-5);
        let own = &space.keys()[100..];
        assert!(own.iter().all(|key| topology.owner(key.slot).0 == 1 && key.writes == 1.0 && key.share == 0.3 / 3.0));
    }
}
