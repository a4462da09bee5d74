//! Chooses the cacheable keys by load, with SwitchKV's bounds (NSDI 2016, section 3.3): few changes per second,
//! admission before eviction, and a delay before a cold key is evicted, because it may become hot again.
//!
//! A key written nearly as often as it is read is not admitted: each write discards its copies.
//!
//! The rule that selects keys ([`Selection`]) and the changes that are limited ([`Limited`]) each have two forms: ours,
//! and the published one. docs/results/switchkv.md compares all four pairs.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use serde::Serialize;

use super::change_queue::{Budget, ChangeQueue};
use super::hash_of_name;
use crate::injected::InjectedBug;
use crate::telemetry::HotNode;
use crate::topology::{Placement, Slot};

/// Rule that selects the keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Selection {
    /// Keys with at least [`Knobs::min_reads_per_second`]. If there is no room, a key replaces a cold one, or one with
    /// clearly less load.
    #[default]
    Load,
    /// SwitchKV (NSDI 2016, section 3.3.1): keys with more load than the lowest tenth of the admitted ones. Each
    /// replaces the key with the least load. A cold key stays until its place is needed.
    Percentile,
    /// Every key that is read, whatever its load. For tests and comparisons.
    All,
}

/// Changes that [`Knobs::admissions_per_second`] limits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Limited {
    /// Admissions. Evictions are free and immediate.
    #[default]
    Admissions,
    /// SwitchKV (NSDI 2016, section 3.3.3): admissions and evictions together. Admissions come first, and an eviction
    /// waits for at most [`Knobs::deletion_delay`], or twice that if changes last longer.
    Changes,
}

/// Parameters of the admission.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Knobs {
    /// Rule that selects the keys.
    pub selection: Selection,
    /// Maximum number of keys.
    pub keys_max: usize,
    /// Maximum bytes of all replies, by the reply sizes of the last step.
    pub bytes_max: usize,
    /// Minimum reads per second to admit a key.
    pub min_reads_per_second: usize,
    /// Changes that are limited.
    pub limited: Limited,
    /// Maximum number of keys admitted per second, by requests and by load together; or of all changes per second.
    pub admissions_per_second: usize,
    /// Time for which a cold key remains admitted, and for which an eviction waits for admissions.
    pub deletion_delay: Duration,
}

impl Default for Knobs {
    fn default() -> Self {
        Self {
            selection: Selection::Load,
            keys_max: 10_000,
            bytes_max: 64 << 20,
            min_reads_per_second: 100,
            limited: Limited::Admissions,
            admissions_per_second: 1_000,
            deletion_delay: Duration::from_secs(10),
        }
    }
}

/// Reads per write that a key needs. A write discards the copy, and the next fill costs the node two commands on a
/// separate connection. With two reads per write, a fleet under 30 % writes had less throughput than without copies.
const READS_PER_WRITE: f64 = 4.0;

/// An admitted key is cold below this fraction of the load required for admission.
const KEEP_FRACTION: f64 = 0.5;

/// Load of a key relative to the admitted key that it replaces, at least.
const REPLACE_FACTOR: f64 = 1.25;

/// One in this many admitted keys has less load than SwitchKV's threshold: the 10th percentile.
const PERCENTILE: usize = 10;

/// Urgency of requested keys. Of keys that are admitted by their load, it is the load.
const REQUESTED: u64 = u64::MAX;

/// Minimum sampled commands per second for a reliable rate: one or two samples may be chance, whatever number of uses
/// they represent.
const SAMPLES_MIN: f64 = 4.0;

/// Observed load of a key.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Admitted {
    /// Hash of the key name.
    pub hash: u64,
    /// Slot of the key.
    pub slot: Slot,
    /// Reads per second, from copies and from the node.
    pub reads: f64,
    /// Writes per second.
    pub writes: f64,
    /// Size of a reply, in bytes.
    pub bytes: u64,
}

impl Admitted {
    /// Reads saved per second by a copy. Negative for a key with too many writes.
    fn worth(&self) -> f64 {
        self.reads - READS_PER_WRITE * self.writes
    }

    /// Order of admissions that wait, hottest first.
    fn urgency(&self) -> u64 {
        self.worth().max(0.0) as u64
    }

    /// Returns the load of all keys that `allows` accepts by name, in the order of their hashes. A key in several
    /// databases counts as one.
    pub fn observed(
        nodes: impl IntoIterator<Item = HotNode>,
        placement: &Placement,
        knobs: &Knobs,
        allows: impl Fn(&[u8]) -> bool,
    ) -> Vec<Self> {
        let mut all: Vec<Self> = Vec::new();
        for (one_in, hot) in nodes.into_iter().flat_map(|node| node.keys.into_iter().map(move |key| (node.one_in, key)))
        {
            let is_certain = hot.rates.commands() >= f64::from(one_in) * SAMPLES_MIN;
            if knobs.selection != Selection::All && !is_certain {
                continue;
            }
            // A name that was too long to store has no slot and no prefix.
            let Some(key) = hot.name.key().filter(|key| allows(key)) else { continue };
            let bytes = (hot.rates.reply_bytes / hot.rates.commands().max(1.0)) as u64;
            all.push(Self {
                hash: hash_of_name(hot.hash, hot.database),
                slot: placement.slot_of(key),
                reads: hot.rates.reads + hot.rates.hits,
                writes: hot.rates.writes,
                bytes,
            });
        }
        all.sort_unstable_by_key(|key| key.hash);
        all.dedup_by(|other, first| {
            let is_same = other.hash == first.hash;
            if is_same {
                (first.reads, first.writes, first.bytes) =
                    (first.reads + other.reads, first.writes + other.writes, first.bytes + other.bytes);
            }
            is_same
        });
        all
    }
}

#[derive(Clone, Copy, Debug)]
struct AdmittedKey {
    seen: Admitted,
    /// Time since which the key has been cold, in microseconds.
    cold_since_us: Option<u64>,
}

impl AdmittedKey {
    /// Creates a key with unknown load. It is evicted after the delay unless its load rises.
    fn requested(hash: u64, slot: Slot, now_us: u64) -> Self {
        let seen = Admitted { hash, slot, reads: 0.0, writes: 0.0, bytes: 0 };
        Self { seen, cold_since_us: Some(now_us) }
    }
}

/// Allowance of admissions: it grows with time, up to the admissions of one second.
#[derive(Clone, Copy, Debug, Default)]
struct Allowance {
    left: f64,
    at_us: Option<u64>,
}

impl Allowance {
    /// Returns the whole admissions that are left at this time.
    fn at(&mut self, per_second: usize, now_us: u64) -> usize {
        let rate = per_second as f64;
        let seconds = self.at_us.replace(now_us).map_or(1.0, |at| now_us.saturating_sub(at) as f64 / 1e6);
        self.left = (self.left + seconds * rate).min(rate);
        self.left as usize
    }

    fn take(&mut self, count: usize) {
        self.left = (self.left - count as f64).max(0.0);
    }
}

/// A bug of the admission that tests can inject, to show that they would detect it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(not(feature = "planted-bugs"), allow(unreachable_pub))]
pub enum Bug {
    /// No key is ever evicted.
    NoEviction,
    /// With [`Limited::Changes`], evictions come before admissions.
    EvictionsFirst,
}

/// The admitted keys, with their observed load.
#[derive(Clone, Debug, Default)]
pub struct Admission {
    /// With keys that wait to be admitted, and without keys that wait to be evicted.
    keys: BTreeMap<u64, AdmittedKey>,
    allowance: Allowance,
    /// Changes in [`Limited::Changes`].
    queue: ChangeQueue,
    /// Keys of the last step in the order of eviction, to make room for requested keys. Some may be gone.
    evictable: VecDeque<u64>,
    planted: InjectedBug<Bug>,
}

impl Admission {
    /// Creates an admission with an injected bug.
    #[cfg(feature = "planted-bugs")]
    #[must_use]
    pub fn with_bug(bug: Option<Bug>) -> Self {
        Self { planted: InjectedBug::new(bug), ..Self::default() }
    }

    /// Admits requested keys within `admissions_per_second`. If no place is free, a key takes that of a cold or little
    /// read one. The changes are queued, and [`Self::proceed`] or [`Self::step`] returns them.
    pub fn admit_now(&mut self, wanted: impl IntoIterator<Item = (u64, Slot)>, knobs: &Knobs, now_us: u64) {
        let most = self.allowance.at(knobs.admissions_per_second, now_us);
        let mut count = 0;
        for (hash, slot) in wanted {
            if self.keys.contains_key(&hash) {
                continue;
            }
            let may_wait = match knobs.limited {
                Limited::Admissions => count < most,
                // As many keys as a second admits may wait. A key that stays hot is requested again.
                Limited::Changes => self.queue.additions() < knobs.admissions_per_second || self.displace(REQUESTED),
            };
            if may_wait && self.make_room(knobs, now_us) {
                self.keys.insert(hash, AdmittedKey::requested(hash, slot, now_us));
                self.queue.add(hash, slot, REQUESTED);
                count += 1;
            }
        }
        if knobs.limited == Limited::Admissions {
            self.allowance.take(count);
        }
    }

    /// Returns the number of keys, hottest first, that may wait in addition to the waiting ones.
    fn may_wait_too(&mut self, new: &[&Admitted], knobs: &Knobs) -> usize {
        for (place, key) in new.iter().enumerate() {
            let is_free = self.queue.additions() + place < knobs.admissions_per_second;
            if !is_free && !self.displace(key.urgency()) {
                return place;
            }
        }
        new.len()
    }

    /// Cancels the admission of a waiting key that is less urgent than this. Returns whether there was one.
    fn displace(&mut self, urgency: u64) -> bool {
        self.queue.displace(urgency).is_some_and(|hash| self.keys.remove(&hash).is_some())
    }

    /// Evicts the first evictable key if no place is free. Returns whether a place is free.
    fn make_room(&mut self, knobs: &Knobs, now_us: u64) -> bool {
        while self.keys.len() >= knobs.keys_max {
            let Some(hash) = self.evictable.pop_front() else { return false };
            if self.keys.remove(&hash).is_some() {
                self.queue.remove(hash, now_us);
            }
        }
        true
    }

    /// Whether changes wait, so that [`Self::proceed`] should be called soon.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Makes the queued changes that their limit allows at this time: with [`Limited::Admissions`], all. Returns the keys
    /// admitted and the keys evicted.
    pub fn proceed(&mut self, knobs: &Knobs, now_us: u64) -> (Vec<(u64, Slot)>, Vec<u64>) {
        match knobs.limited {
            Limited::Admissions => self.queue.flush(),
            Limited::Changes => {
                let budget = Budget {
                    per_second: knobs.admissions_per_second,
                    keys_max: knobs.keys_max,
                    delay_us: knobs.deletion_delay.as_micros() as u64,
                };
                self.queue.proceed(budget, self.keys.len(), now_us, self.planted.is(Bug::EvictionsFirst))
            }
        }
    }

    /// Evicts all keys.
    pub fn forget(&mut self) -> Vec<u64> {
        let keys = std::mem::take(&mut self.keys).into_keys();
        let mut gone: Vec<u64> = keys.filter(|hash| !self.queue.is_new(*hash)).collect();
        gone.extend(self.queue.clear());
        self.evictable.clear();
        gone
    }

    /// Returns the load that a key needs for admission, in reads per second. Of the places of all keys, a free one
    /// counts as a key without load.
    fn threshold(&self, knobs: &Knobs) -> f64 {
        let least = knobs.min_reads_per_second as f64;
        let free = knobs.keys_max.saturating_sub(self.keys.len());
        let place = match knobs.selection {
            Selection::Load => None,
            Selection::All => return f64::NEG_INFINITY,
            Selection::Percentile => (knobs.keys_max / PERCENTILE).checked_sub(free),
        };
        // The load of a key that waits means nothing yet.
        let admitted = self.keys.iter().filter(|(hash, _)| !self.queue.is_new(**hash));
        let mut loads: Vec<f64> = admitted.map(|(_, key)| key.seen.worth()).collect();
        match place.filter(|place| *place < loads.len()) {
            Some(place) => loads.select_nth_unstable_by(place, f64::total_cmp).1.max(least),
            None => least,
        }
    }

    /// Updates the set from the load of all keys in use. `admits`: whether keys are admitted by their load. Returns the keys
    /// admitted and the keys evicted.
    pub fn step(
        &mut self,
        seen: impl IntoIterator<Item = Admitted>,
        knobs: &Knobs,
        admits: bool,
        now_us: u64,
    ) -> (Vec<(u64, Slot)>, Vec<u64>) {
        let seen: BTreeMap<u64, Admitted> = seen.into_iter().map(|key| (key.hash, key)).collect();
        for (hash, key) in &mut self.keys {
            let now = seen.get(hash).copied();
            let least = knobs.min_reads_per_second as f64 * KEEP_FRACTION;
            let is_warm = match knobs.selection {
                Selection::Load => now.is_some_and(|now| now.worth() >= least),
                Selection::Percentile => true,
                Selection::All => now.is_some(),
            };
            key.seen = now.unwrap_or(Admitted { reads: 0.0, writes: 0.0, ..key.seen });
            let is_warm = is_warm || self.queue.is_new(*hash);
            key.cold_since_us = if is_warm { None } else { key.cold_since_us.or(Some(now_us)) };
        }
        let threshold = self.threshold(knobs);
        let mut new: Vec<&Admitted> = seen
            .values()
            .filter(|key| !self.keys.contains_key(&key.hash) && key.worth() >= threshold)
            // Larger than the limit: no eviction can make room for it.
            .filter(|key| key.bytes <= knobs.bytes_max as u64)
            .collect();
        new.sort_unstable_by(|one, other| other.worth().total_cmp(&one.worth()).then(one.hash.cmp(&other.hash)));
        let most = match knobs.limited {
            _ if !admits => 0,
            Limited::Admissions => self.allowance.at(knobs.admissions_per_second, now_us),
            Limited::Changes => knobs.admissions_per_second,
        };
        new.truncate(most);
        if knobs.limited == Limited::Changes {
            let count = self.may_wait_too(&new, knobs);
            new.truncate(count);
        }
        let replace_factor = if knobs.selection == Selection::Percentile { 1.0 } else { REPLACE_FACTOR };
        // Eviction order: longest cold first, then lowest worth. Not of keys that wait.
        let admitted = self.keys.iter().filter(|(hash, _)| !self.queue.is_new(**hash));
        let mut out: Vec<(u64, Option<u64>, f64, u64)> =
            admitted.map(|(hash, key)| (*hash, key.cold_since_us, key.seen.worth(), key.seen.bytes)).collect();
        out.sort_unstable_by(|one, other| {
            let order = |cold: &Option<u64>| cold.unwrap_or(u64::MAX);
            order(&one.1).cmp(&order(&other.1)).then(one.2.total_cmp(&other.2)).then(one.0.cmp(&other.0))
        });
        if self.planted.is(Bug::NoEviction) {
            out.clear();
        }
        let mut out = out.into_iter().peekable();
        let mut bytes: u64 = self.keys.values().map(|key| key.seen.bytes).sum();
        let (mut more, mut less) = (Vec::new(), Vec::new());
        let is_over = |count: usize, bytes: u64| count > knobs.keys_max || bytes > knobs.bytes_max as u64;
        for key in new {
            let mut freed = 0;
            let mut leaving = Vec::new();
            while is_over(self.keys.len() + 1 - leaving.len(), bytes + key.bytes - freed) {
                let Some((hash, cold, worth, size)) = out.peek().copied() else { break };
                if cold.is_none() && worth * replace_factor > key.worth() {
                    break;
                }
                leaving.push(hash);
                freed += size;
                out.next();
            }
            let fits = !is_over(self.keys.len() + 1 - leaving.len(), bytes + key.bytes - freed);
            bytes -= freed;
            leaving.iter().for_each(|hash| {
                self.keys.remove(hash);
            });
            less.extend(leaving);
            if fits {
                bytes += key.bytes;
                self.keys.insert(key.hash, AdmittedKey { seen: *key, cold_since_us: None });
                more.push((key.hash, key.slot));
            }
        }
        let stays = self.planted.is(Bug::NoEviction);
        let is_past = |key: &AdmittedKey| {
            !stays
                && key
                    .cold_since_us
                    .is_some_and(|since_us| now_us.saturating_sub(since_us) > knobs.deletion_delay.as_micros() as u64)
        };
        less.extend(self.keys.extract_if(.., |_, key| is_past(key)).map(|(hash, _)| hash));
        while is_over(self.keys.len(), bytes) {
            let Some((hash, ..)) = out.next() else { break };
            if let Some(gone) = self.keys.remove(&hash) {
                bytes = bytes.saturating_sub(gone.seen.bytes);
                less.push(hash);
            }
        }
        self.evictable = out.map(|(hash, ..)| hash).collect();
        if knobs.limited == Limited::Admissions {
            self.allowance.take(more.len());
        }
        for (hash, slot) in more {
            let urgency = self.keys.get(&hash).map_or(0, |key| key.seen.urgency());
            self.queue.add(hash, slot, urgency);
        }
        less.drain(..).for_each(|hash| self.queue.remove(hash, now_us));
        self.proceed(knobs, now_us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(hash: u64, reads: f64, writes: f64) -> Admitted {
        Admitted { hash, slot: Slot::new(1).expect("a slot"), reads, writes, bytes: 100 }
    }

    const KNOBS: Knobs = Knobs {
        selection: Selection::Load,
        keys_max: 2,
        bytes_max: 1000,
        min_reads_per_second: 100,
        limited: Limited::Admissions,
        admissions_per_second: 10_000_000,
        deletion_delay: Duration::from_millis(1),
    };

    fn hashes(keys: Vec<(u64, Slot)>) -> Vec<u64> {
        keys.into_iter().map(|(hash, _)| hash).collect()
    }

    #[test]
    fn frequently_read_keys_are_admitted_unless_written_as_often() {
        let mut admission = Admission::default();
        let (more, less) = admission.step(
            [key(1, 500.0, 0.0), key(2, 5000.0, 1230.0), key(3, 90.0, 0.0), key(4, 300.0, 10.0)],
            &KNOBS,
            true,
            0,
        );
        assert_eq!((hashes(more), less), (vec![1, 4], vec![]));
    }

    #[test]
    fn a_key_replaces_the_coldest_one_only_if_clearly_hotter() {
        let mut admission = Admission::default();
        admission.step([key(1, 500.0, 0.0), key(2, 200.0, 0.0)], &KNOBS, true, 0);
        let (more, less) =
            admission.step([key(1, 500.0, 0.0), key(2, 200.0, 0.0), key(3, 240.0, 0.0)], &KNOBS, true, 1);
        assert_eq!((hashes(more), less), (vec![], vec![]));
        let (more, less) =
            admission.step([key(1, 500.0, 0.0), key(2, 200.0, 0.0), key(3, 300.0, 0.0)], &KNOBS, true, 2);
        assert_eq!((hashes(more), less), (vec![3], vec![2]));
    }

    #[test]
    fn a_cold_key_is_evicted_after_a_delay() {
        let mut admission = Admission::default();
        admission.step([key(1, 500.0, 0.0)], &KNOBS, true, 0);
        assert_eq!(admission.step([key(1, 60.0, 0.0)], &KNOBS, true, 5_000).1, []);
        assert_eq!(admission.step([], &KNOBS, true, 6_000).1, []);
        assert_eq!(admission.step([], &KNOBS, true, 7_000).1, []);
        assert_eq!(admission.step([], &KNOBS, true, 7_001).1, [1]);
        assert!(admission.keys.is_empty());
    }

    #[test]
    fn limits_of_keys_and_bytes_hold() {
        let mut admission = Admission::default();
        let large = Admitted { bytes: 990, ..key(9, 9e6, 0.0) };
        admission.step([key(1, 500.0, 0.0), key(2, 600.0, 0.0)], &KNOBS, true, 0);
        let (more, less) = admission.step([key(1, 500.0, 0.0), key(2, 600.0, 0.0), large], &KNOBS, true, 1);
        assert_eq!((hashes(more), less, admission.keys.len()), (vec![9], vec![1, 2], 1));
        let many = (0..100).map(|hash| key(hash, 1e3 + hash as f64, 0.0));
        for now in 2..50 {
            admission.step(many.clone(), &KNOBS, true, now);
            let bytes: u64 = admission.keys.values().map(|key| key.seen.bytes).sum();
            assert!(admission.keys.len() <= 2 && bytes <= 1000);
        }
    }

    #[test]
    fn a_key_larger_than_the_limit_evicts_no_other_key() {
        let mut admission = Admission::default();
        let huge = Admitted { bytes: 1001, ..key(9, 9e6, 0.0) };
        let others = [key(1, 500.0, 0.0), key(2, 600.0, 0.0)];
        admission.step(others, &KNOBS, true, 0);
        let (more, less) = admission.step(others.into_iter().chain([huge]), &KNOBS, true, 1);
        assert_eq!((hashes(more), less, admission.keys.len()), (vec![], vec![], 2));
    }

    #[test]
    fn a_requested_key_is_admitted_immediately_and_evicted_if_cold() {
        let mut admission = Admission::default();
        let slot = Slot::new(3).expect("a slot");
        admission.admit_now([(5, slot), (5, slot), (6, slot), (7, slot)], &KNOBS, 0);
        assert_eq!(admission.proceed(&KNOBS, 0).0.len(), 2);
        let (_, less) = admission.step([key(5, 1000.0, 0.0)], &KNOBS, true, 1_001);
        assert_eq!(less, [6]);
    }

    #[test]
    fn requests_and_load_share_the_admissions_of_a_second() {
        let knobs = Knobs { keys_max: 100, admissions_per_second: 10, bytes_max: 100_000, ..KNOBS };
        let slot = Slot::new(3).expect("a slot");
        let mut admission = Admission::default();
        // Requests every 5 ms.
        let asked = |n: u64| (n * 20..n * 20 + 20).map(move |hash| (hash, slot));
        let mut requested = |n: u64, now_us| {
            admission.admit_now(asked(n), &knobs, now_us);
            admission.proceed(&knobs, now_us).0.len()
        };
        let at_once: usize = (0..40).map(|n| requested(n, n * 5_000)).sum();
        assert_eq!(at_once, 11, "a second's worth, and one in the 0.2 s");
        let many = (1000..1100).map(|hash| key(hash, 500.0, 0.0));
        assert_eq!(admission.step(many.clone(), &knobs, true, 600_000).0.len(), 5);
        assert_eq!(admission.step(many, &knobs, false, 9_000_000).0.len(), 0);
        admission.admit_now(asked(90), &knobs, 9_000_000);
        assert_eq!(admission.proceed(&knobs, 9_000_000).0.len(), 10, "not more than a second's worth");
    }

    /// A full set of 100 keys with loads of 1,000 to 1,099, in the order of their hashes.
    fn full(knobs: &Knobs) -> (Admission, Vec<Admitted>) {
        let mut admission = Admission::default();
        let keys: Vec<Admitted> = (0..100).map(|hash| key(hash, 1000.0 + hash as f64, 0.0)).collect();
        admission.step(keys.clone(), knobs, true, 0);
        while admission.is_waiting() {
            admission.proceed(knobs, 1_000_000);
        }
        assert_eq!(admission.keys.len(), 100);
        (admission, keys)
    }

    const PUBLISHED: Knobs = Knobs {
        selection: Selection::Percentile,
        limited: Limited::Changes,
        keys_max: 100,
        bytes_max: 1 << 20,
        admissions_per_second: 1000,
        deletion_delay: Duration::from_secs(1),
        ..KNOBS
    };

    #[test]
    fn keys_above_the_tenth_percentile_replace_the_least_loaded_ones() {
        let knobs = Knobs { limited: Limited::Admissions, ..PUBLISHED };
        let (mut admission, mut keys) = full(&knobs);
        keys.extend([key(200, 1009.5, 0.0), key(201, 1010.0, 0.0), key(202, 1010.5, 0.0)]);
        let (more, less) = admission.step(keys.clone(), &knobs, true, 2_000_000);
        assert_eq!((hashes(more), less), (vec![201, 202], vec![0, 1]), "the threshold is 1,010");
        // A key without load stays until its place is needed.
        keys.retain(|key| key.hash != 50);
        assert_eq!(admission.step(keys.clone(), &knobs, true, 900_000_000), (vec![], vec![]));
        keys.push(key(203, 2000.0, 0.0));
        let (more, less) = admission.step(keys, &knobs, true, 901_000_000);
        assert_eq!((hashes(more), less), (vec![203], vec![50]));
    }

    #[test]
    fn requested_keys_take_the_place_of_the_least_loaded_ones() {
        let slot = Slot::FIRST;
        let knobs = Knobs { limited: Limited::Admissions, ..PUBLISHED };
        let (mut ours, keys) = full(&knobs);
        ours.step(keys.clone(), &knobs, true, 2_000_000);
        ours.admit_now([(300, slot), (301, slot), (300, slot)], &knobs, 2_000_000);
        let (more, less) = ours.proceed(&knobs, 2_000_000);
        assert_eq!((hashes(more), less, ours.keys.len()), (vec![301, 300], vec![0, 1], 100));
        let (mut published, _) = full(&PUBLISHED);
        published.step(keys, &PUBLISHED, true, 2_000_000);
        published.admit_now([(300, slot), (301, slot), (300, slot)], &PUBLISHED, 2_000_000);
        assert_eq!(published.proceed(&PUBLISHED, 2_000_000).0.len(), 1);
        let (more, less) = published.proceed(&PUBLISHED, 2_010_000);
        assert_eq!((hashes(more), less), (vec![300], vec![0, 1]), "admissions come first, and the newest one before");
        assert_eq!((published.is_waiting(), published.forget().len()), (false, 100));
    }

    #[test]
    fn a_key_requested_again_before_its_eviction_keeps_its_copies() {
        let knobs = Knobs { limited: Limited::Admissions, ..PUBLISHED };
        let (mut admission, keys) = full(&knobs);
        admission.step(keys.clone(), &knobs, true, 2_000_000);
        admission.admit_now([(300, Slot::FIRST), (0, Slot::FIRST)], &knobs, 2_000_000);
        let (more, less) = admission.proceed(&knobs, 2_000_000);
        assert_eq!((hashes(more), less), (vec![300], vec![1]), "key 0 was evicted for key 300, and returned");
        admission.admit_now([(301, Slot::FIRST)], &knobs, 2_500_000);
        let hot = keys.into_iter().map(|key| if key.hash == 2 { self::key(2, 9000.0, 0.0) } else { key });
        let (more, less) = admission.step(hot, &knobs, true, 3_000_000);
        let both: Vec<u64> = hashes(more).into_iter().filter(|hash| less.contains(hash)).collect();
        assert_eq!((both, less.contains(&2), admission.keys.contains_key(&2)), (vec![], false, true));
    }

    #[test]
    fn hotter_keys_take_the_places_of_waiting_ones() {
        let knobs = Knobs { admissions_per_second: 2, ..PUBLISHED };
        let (mut admission, mut keys) = full(&PUBLISHED);
        admission.step(keys.clone(), &knobs, true, 2_000_000);
        keys.extend([key(200, 1200.0, 0.0), key(201, 1300.0, 0.0), key(202, 1250.0, 0.0), key(203, 1100.0, 0.0)]);
        // One of the two hottest is admitted at once, and the other one waits.
        assert_eq!(hashes(admission.step(keys.clone(), &knobs, true, 3_000_000).0), [201]);
        keys.push(key(204, 5000.0, 0.0));
        admission.admit_now([(300, Slot::FIRST)], &knobs, 3_000_000);
        admission.step(keys, &knobs, true, 3_000_000);
        let made: Vec<u64> =
            (1..=4).flat_map(|half| hashes(admission.proceed(&knobs, 3_000_000 + half * 500_000).0)).collect();
        assert_eq!(made, [300, 204]);
        assert_eq!((admission.keys.len(), admission.keys.contains_key(&202)), (100, false));
    }

    #[test]
    fn all_changes_share_one_limit_and_a_reload_makes_the_waiting_ones() {
        let knobs = Knobs { admissions_per_second: 100, ..PUBLISHED };
        let (mut admission, mut keys) = full(&knobs);
        admission.step(keys.clone(), &knobs, true, 2_000_000);
        keys.extend((500..600).map(|hash| key(hash, 5000.0, 0.0)));
        let (mut more, mut less) = admission.step(keys.clone(), &knobs, true, 3_000_000);
        for slice in 1..=50 {
            let made = admission.proceed(&knobs, 3_000_000 + slice * 10_000);
            more.extend(made.0);
            less.extend(made.1);
        }
        assert_eq!((more.len(), less.len()), (51, 0), "1 at once, and 50 in half a second");
        let made = admission.proceed(&Knobs { limited: Limited::Admissions, ..knobs }, 3_500_000);
        assert_eq!((made.0.len(), made.1.len()), (49, 100));
        assert_eq!(admission.forget().len(), 100);
    }
}
