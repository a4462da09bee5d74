//! Keys by popularity: the hottest ones exactly, and all others as one share that is even over the backends.
//!
//! Popularity belongs to ranks, and a change exchanges the keys at the ranks, as the paper's generator does. So the
//! table for drawing ranks never changes.
//!
//! Unlike the keys of the other fleets, these have no slots and no names: a backend owns a random part of all keys.

use std::ops::Range;

use super::settings::Pattern;
use crate::Random;

/// Maximum number of ranks with keys of their own. Three times the cached items: hot-out moves the keys up by 200 ranks
/// per second, and a key must be known before it is cached.
const HEAD_MAX: usize = 1 << 15;

/// Rank of a key that is not in the head.
const NO_RANK: u32 = u32::MAX;

/// Odd number whose multiples are hashes of consecutive keys: they differ in all bits, and their keys can be computed.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Inverse of [`STEP`] modulo 2^64.
const STEP_INVERSE: u64 = inverse(STEP);

/// Returns the inverse of an odd number, by Newton's method: each round doubles the number of correct bits.
const fn inverse(odd: u64) -> u64 {
    let (mut inverse, mut round) = (odd, 0);
    while round < 5 {
        inverse = inverse.wrapping_mul(2_u64.wrapping_sub(odd.wrapping_mul(inverse)));
        round += 1;
    }
    inverse
}

/// Number of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct KeyId(u32);

impl KeyId {
    /// Hash of the key, as reports contain it.
    pub(super) fn hash(self) -> u64 {
        u64::from(self.0 + 1).wrapping_mul(STEP)
    }

    /// Place of the key in tables of all keys that are, or were, in the head.
    pub(super) fn index(self) -> usize {
        self.0 as usize
    }
}

/// A key that is, or was, in the head.
#[derive(Clone, Copy, Debug)]
pub(super) struct Key {
    rank: u32,
    /// Backend that owns it.
    pub(super) backend: u16,
    /// Whether the switch forwards its reads to the cache node.
    pub(super) has_rule: bool,
    /// Whether the cache node has it.
    pub(super) has_item: bool,
}

impl Key {
    /// Whether the cache node serves its reads.
    pub(super) fn is_hit(&self) -> bool {
        self.has_rule && self.has_item
    }
}

/// A drawn query.
#[derive(Clone, Copy, Debug)]
pub(super) struct Drawn {
    /// Key, if it has a rank of the head.
    pub(super) key: Option<KeyId>,
    pub(super) backend: u16,
    /// Uniform number from 0 to 1, independent of the key.
    pub(super) chance: f64,
}

/// Column of Walker's alias table.
#[derive(Clone, Copy, Debug)]
struct Column {
    /// Part of the column, of 2^32, that belongs to its own rank.
    own: u32,
    /// Rank of the rest.
    other: u32,
}

/// All keys.
#[derive(Clone, Debug)]
pub(super) struct KeySpace {
    /// By number.
    keys: Vec<Key>,
    by_rank: Vec<KeyId>,
    /// Share of all reads, by rank.
    shares: Vec<f64>,
    /// Share of all keys without ranks.
    tail: f64,
    columns: Vec<Column>,
    /// Draws below this number are of the head.
    head_below: u32,
    backends: u16,
    /// Numbers of the keys that the last change made popular.
    new: Range<u32>,
    placement: Random,
    changes: Random,
    draws: Random,
}

impl KeySpace {
    /// Creates keys with a Zipf distribution of exponent `zipf`, which is not 1.
    pub(super) fn new(count: f64, zipf: f64, backends: u16, seed: u64) -> Self {
        let head = (HEAD_MAX as f64).min(count) as usize;
        let weights: Vec<f64> = (1..=head).map(|rank| (rank as f64).powf(-zipf)).collect();
        // Midpoint rule: exact to six digits from 1,000 on.
        let integral = |rank: f64| (rank + 0.5).powf(1.0 - zipf) / (1.0 - zipf);
        let beyond = if count > head as f64 { integral(count) - integral(head as f64) } else { 0.0 };
        let all = weights.iter().sum::<f64>() + beyond;
        // Single precision, because `powf` may differ in the last bits between processors. All other operations are
        // exact.
        let shares: Vec<f64> = weights.iter().map(|weight| f64::from((weight / all) as f32)).collect();
        let tail = f64::from((beyond / all) as f32);
        let in_head: f64 = shares.iter().sum();
        let stream = |number: u64| Random::new(seed.wrapping_mul(8).wrapping_add(number));
        let mut space = Self {
            keys: Vec::new(),
            by_rank: Vec::new(),
            columns: columns(&shares),
            head_below: (in_head / (in_head + tail) * f64::from(u32::MAX)) as u32,
            shares,
            tail,
            backends,
            new: 0..0,
            placement: stream(1),
            changes: stream(2),
            draws: stream(3),
        };
        space.by_rank = (0..head).map(|_| space.new_key()).collect();
        space.rank_all();
        space
    }

    /// Number of keys that are, or were, in the head.
    pub(super) fn len(&self) -> usize {
        self.keys.len()
    }

    pub(super) fn key(&self, id: KeyId) -> &Key {
        &self.keys[id.0 as usize]
    }

    pub(super) fn key_mut(&mut self, id: KeyId) -> &mut Key {
        &mut self.keys[id.0 as usize]
    }

    /// Returns the key with this hash; `None` for a key that never had a rank.
    pub(super) fn find(&self, hash: u64) -> Option<KeyId> {
        let number = hash.wrapping_mul(STEP_INVERSE).wrapping_sub(1);
        (number < self.keys.len() as u64).then_some(KeyId(number as u32))
    }

    /// Keys of the head, hottest first, with their shares of all reads.
    pub(super) fn head(&self) -> impl Iterator<Item = (KeyId, f64)> + '_ {
        self.by_rank.iter().copied().zip(self.shares.iter().copied())
    }

    /// Share of all reads. Of a key without a rank nearly none.
    pub(super) fn share(&self, id: KeyId) -> f64 {
        self.shares.get(self.key(id).rank as usize).copied().unwrap_or_default()
    }

    /// Share of the keys without ranks.
    pub(super) fn tail(&self) -> f64 {
        self.tail
    }

    /// Whether the last change made the key popular.
    pub(super) fn is_of_last_change(&self, id: KeyId) -> bool {
        self.new.contains(&id.0)
    }

    /// Creates a key without a rank.
    pub(super) fn new_key(&mut self) -> KeyId {
        let backend = self.placement.below(u64::from(self.backends)) as u16;
        self.keys.push(Key { rank: NO_RANK, backend, has_rule: false, has_item: false });
        KeyId(self.keys.len() as u32 - 1)
    }

    fn rank_all(&mut self) {
        for (rank, id) in self.by_rank.iter().enumerate() {
            self.keys[id.0 as usize].rank = rank as u32;
        }
    }

    /// Changes the popularity of `count` keys at once (section 5.4). Keys that were never
    /// popular take the place of cold keys.
    pub(super) fn change(&mut self, pattern: Pattern, count: usize) {
        let head = self.by_rank.len();
        let places: Vec<usize> = match pattern {
            Pattern::HotIn => {
                self.by_rank.rotate_right(count.min(head));
                (0..count.min(head)).collect()
            }
            Pattern::HotOut => {
                self.by_rank.rotate_left(count.min(head));
                (head - count.min(head)..head).collect()
            }
            Pattern::Random { within } => {
                let within = within.min(head);
                let mut ranks: Vec<usize> = (0..within).collect();
                for place in 0..count.min(within) {
                    let other = place + self.changes.below((within - place) as u64) as usize;
                    ranks.swap(place, other);
                }
                ranks.truncate(count);
                ranks
            }
        };
        let first = self.keys.len() as u32;
        for place in places {
            let gone = self.by_rank[place];
            self.key_mut(gone).rank = NO_RANK;
            self.by_rank[place] = self.new_key();
        }
        self.new = first..self.keys.len() as u32;
        self.rank_all();
    }

    /// Draws the key of a read.
    pub(super) fn draw(&mut self) -> Drawn {
        let number = self.draws.number();
        let (low, high) = (number as u32, number >> 32);
        if low < self.head_below {
            let place = high * self.columns.len() as u64;
            let column = self.columns[(place >> 32) as usize];
            let rank = if (place as u32) < column.own { place >> 32 } else { u64::from(column.other) };
            let id = self.by_rank[rank as usize];
            let chance = f64::from(low) / f64::from(self.head_below);
            return Drawn { key: Some(id), backend: self.key(id).backend, chance };
        }
        let backend = ((high * u64::from(self.backends)) >> 32) as u16;
        let chance = f64::from(low - self.head_below) / f64::from(u32::MAX - self.head_below).max(1.0);
        Drawn { key: None, backend, chance }
    }
}

/// Builds Walker's alias table with Vose's method, in the order of the ranks.
fn columns(shares: &[f64]) -> Vec<Column> {
    let mean = shares.iter().sum::<f64>() / shares.len() as f64;
    let mut parts: Vec<f64> = shares.iter().map(|share| share / mean).collect();
    let mut columns: Vec<Column> = (0..shares.len()).map(|rank| Column { own: u32::MAX, other: rank as u32 }).collect();
    let (mut small, mut large): (Vec<usize>, Vec<usize>) = (0..shares.len()).partition(|rank| parts[*rank] < 1.0);
    while let (Some(low), Some(high)) = (small.pop(), large.last().copied()) {
        columns[low] = Column { own: (parts[low] * f64::from(u32::MAX)) as u32, other: high as u32 };
        parts[high] -= 1.0 - parts[low];
        if parts[high] < 1.0 {
            large.pop();
            small.push(high);
        }
    }
    columns
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space() -> KeySpace {
        KeySpace::new(1e10, 0.99, 128, 1)
    }

    #[test]
    fn draws_have_the_shares_of_their_ranks() {
        let mut space = space();
        let head: f64 = space.head().map(|(_, share)| share).sum();
        assert!((head + space.tail() - 1.0).abs() < 1e-5);
        let top: f64 = space.head().take(10_000).map(|(_, share)| share).sum();
        assert!((top - 0.386).abs() < 0.001, "10,000 of ten billion keys receive 38.6 %: {top}");
        let count = 400_000;
        let (mut first, mut in_top, mut in_tail, mut by_backend) = (0, 0, 0, vec![0; 128]);
        for _ in 0..count {
            let drawn = space.draw();
            assert!((0.0..=1.0).contains(&drawn.chance));
            by_backend[usize::from(drawn.backend)] += 1;
            match drawn.key {
                Some(id) => {
                    let rank = space.key(id).rank;
                    (first, in_top) = (first + i32::from(rank == 0), in_top + i32::from(rank < 10_000));
                    assert_eq!(space.find(id.hash()), Some(id));
                }
                None => in_tail += 1,
            }
        }
        let share = |found: i32| f64::from(found) / f64::from(count);
        let first_share = space.shares[0];
        assert!((share(first) - first_share).abs() < 0.002, "{} for {first_share}", share(first));
        assert!((share(in_top) - top).abs() < 0.004, "{} for {top}", share(in_top));
        assert!((share(in_tail) - space.tail()).abs() < 0.004);
        assert!(by_backend.iter().all(|found| *found > count / 400), "each backend has a part of the tail");
    }

    #[test]
    fn uniform_keys_are_all_in_the_tail() {
        let space = KeySpace::new(1e10, 0.0, 16, 1);
        assert!(space.tail() > 0.9999);
    }

    #[test]
    fn changes_exchange_the_keys_at_the_ranks() {
        let mut space = space();
        let order = |space: &KeySpace| space.by_rank.clone();
        let before = order(&space);
        space.change(Pattern::HotIn, 200);
        let after = order(&space);
        assert_eq!(after[200..], before[..before.len() - 200]);
        assert!(after[..200].iter().all(|id| space.is_of_last_change(*id) && space.share(*id) > 0.0));
        assert_eq!(space.share(before[before.len() - 1]), 0.0);
        space.change(Pattern::HotOut, 200);
        assert_eq!(order(&space)[..before.len() - 400], before[..before.len() - 400]);
        space.change(Pattern::Random { within: 1000 }, 100);
        let last = order(&space);
        let changed = (0..last.len()).filter(|rank| space.is_of_last_change(last[*rank])).collect::<Vec<_>>();
        assert!(changed.len() == 100 && changed.iter().all(|rank| *rank < 1000));
        assert_eq!((0..last.len()).filter(|rank| space.key(last[*rank]).rank as usize != *rank).count(), 0);
    }
}
