//! SwitchKV's instant report: detects a key that makes up a large part of the last commands to a node, without waiting
//! for the end of a segment.
//!
//! The commands form a ring of hashes. A table of counters, shared by colliding keys, holds their frequencies. If a
//! counter is high enough, the ring is searched, so no key is reported by mistake.

use std::collections::BTreeMap;

/// Counters. More than the commands in the ring, so that few keys share one.
const CELLS: usize = 1024;

/// The ring is searched if a counter is at the threshold or a multiple of this above it, so that a key that stays hot
/// does not cost a search each time. A key that shares its counter is detected later by at most this many uses.
const SEARCH_INTERVAL: u8 = 8;

/// The last commands of one worker to one node.
#[derive(Clone, Debug)]
pub struct Recent {
    ring: Vec<u32>,
    at: usize,
    is_full: bool,
    counts: Box<[u8; CELLS]>,
    threshold: u8,
}

impl Recent {
    /// The paper's threshold (more than 8 of the last 200 commands for one key), divided over `workers`, each of which
    /// sees a share of the commands. [`Notices`] applies the full threshold to the sum.
    #[must_use]
    pub fn for_workers(workers: usize) -> Self {
        let workers = workers.max(1);
        Self::new(200_usize.div_ceil(workers), 9_usize.div_ceil(workers) as u8)
    }

    /// Reports keys with `threshold` uses among the last `commands` (at most 255).
    #[must_use]
    pub fn new(commands: usize, threshold: u8) -> Self {
        let ring = vec![0; commands.clamp(1, 255)];
        Self { ring, at: 0, is_full: false, counts: Box::new([0; CELLS]), threshold: threshold.max(1) }
    }

    /// Records a use. Returns the key's count among the last commands if it reaches the threshold; not on every use.
    #[inline]
    pub fn note(&mut self, hash: u64) -> Option<u8> {
        let hash = (hash ^ hash >> 32) as u32;
        let cell = |hash: u32| hash as usize % CELLS;
        let old = std::mem::replace(&mut self.ring[self.at], hash);
        if self.is_full {
            self.counts[cell(old)] -= 1;
        }
        self.at += 1;
        if self.at == self.ring.len() {
            (self.at, self.is_full) = (0, true);
        }
        self.counts[cell(hash)] += 1;
        match self.counts[cell(hash)].checked_sub(self.threshold) {
            Some(above) if above.is_multiple_of(SEARCH_INTERVAL) => self.count(hash),
            _ => None,
        }
    }

    #[cold]
    fn count(&self, hash: u32) -> Option<u8> {
        let known = if self.is_full { &self.ring[..] } else { &self.ring[..self.at] };
        let count = known.iter().filter(|known| **known == hash).count() as u8;
        (count >= self.threshold).then_some(count)
    }
}

/// Sums the counts of one key over all workers.
#[derive(Clone, Debug, Default)]
pub struct Notices(BTreeMap<u64, BTreeMap<usize, u8>>);

impl Notices {
    /// The paper's threshold: more than 8 of the last 200.
    const ENOUGH: u32 = 9;

    /// Records the count of a key at a worker. Returns whether the sum over workers reaches the threshold, and then
    /// resets the key.
    pub fn add(&mut self, worker: usize, hash: u64, count: u8) -> bool {
        let of_key = self.0.entry(hash).or_default();
        of_key.insert(worker, count);
        let is_enough = of_key.values().map(|count| u32::from(*count)).sum::<u32>() >= Self::ENOUGH;
        if is_enough {
            self.0.remove(&hash);
        }
        is_enough
    }

    /// Drops all counts, so that old ones are not added to new ones.
    pub fn forget(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_workers_are_summed() {
        let mut notices = Notices::default();
        assert!(notices.add(0, 1, 9), "one alone has seen enough");
        assert!(!notices.add(0, 2, 3) && !notices.add(0, 2, 4) && !notices.add(1, 2, 3));
        assert!(!notices.add(2, 3, 8), "another key");
        assert!(notices.add(3, 2, 2), "4, 3 and 2");
        assert!(!notices.add(0, 3, 0));
        notices.forget();
        assert!(!notices.add(0, 3, 1));
    }

    #[test]
    fn a_key_is_reported_at_its_ninth_use_among_two_hundred() {
        let mut recent = Recent::for_workers(1);
        let mut others = 1_u64..;
        let mut noticed = Vec::new();
        for number in 0..400_u64 {
            // Every 23rd command: nine of them are within 185.
            let hash = if number % 23 == 0 { u64::MAX } else { others.next().unwrap_or_default() << 40 | number };
            noticed.extend(recent.note(hash).map(|count| (number, hash, count)));
        }
        assert_eq!(noticed.first(), Some(&(8 * 23, u64::MAX, 9)));
        assert!(noticed.iter().all(|(_, hash, _)| *hash == u64::MAX));
        // Every 26th: never more than eight.
        let mut recent = Recent::for_workers(1);
        let rare =
            (0..4000_u64).filter_map(|number| recent.note(if number % 26 == 0 { u64::MAX } else { number << 20 | 1 }));
        assert_eq!(rare.count(), 0);
    }

    #[test]
    fn keys_that_share_a_counter_are_distinguished() {
        let mut recent = Recent::new(100, 9);
        for number in 0..1000_u64 {
            assert_eq!(recent.note((number % 20 * CELLS as u64) | 7), None, "each is five of a hundred");
        }
    }

    #[test]
    fn thresholds_are_divided_over_workers() {
        let mut of_four = Recent::for_workers(4);
        let noticed: Vec<_> =
            (0..50_u64).filter_map(|number| of_four.note(if number % 10 == 0 { 5 } else { 1000 + number })).collect();
        assert_eq!(noticed, [3], "nine of two hundred are three of fifty at one of them at least");
    }
}
