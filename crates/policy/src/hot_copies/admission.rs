//! Chooses the cacheable keys by load, with SwitchKV's bounds (NSDI 2016, section 3.3): few changes per second,
//! admission before eviction, and a delay before a cold key is evicted, because it may become hot again.
//!
//! A key written nearly as often as it is read is not admitted: each write discards its copies.

use std::collections::BTreeMap;
use std::time::Duration;

use super::hash_of_name;
use crate::injected::InjectedBug;
use crate::telemetry::HotNode;
use crate::topology::{Placement, Slot};

/// Parameters of the admission.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Knobs {
    /// Admit every key that is read, whatever its load. For tests and comparisons.
    pub all: bool,
    /// Maximum number of keys.
    pub keys_max: usize,
    /// Maximum bytes of all replies, by the reply sizes of the last step.
    pub bytes_max: usize,
    /// Minimum reads per second to admit a key.
    pub min_reads_per_second: usize,
    /// Maximum number of keys admitted per second, by requests and by load together.
    pub admissions_per_second: usize,
    /// Time for which a cold key remains admitted.
    pub deletion_delay: Duration,
}

impl Default for Knobs {
    fn default() -> Self {
        Self {
            all: false,
            keys_max: 10_000,
            bytes_max: 64 << 20,
            min_reads_per_second: 100,
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
            if !knobs.all && hot.rates.commands() < f64::from(one_in) * SAMPLES_MIN {
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
}

/// The admitted keys, with their observed load.
#[derive(Clone, Debug, Default)]
pub struct Admission {
    keys: BTreeMap<u64, AdmittedKey>,
    allowance: Allowance,
    planted: InjectedBug<Bug>,
}

impl Admission {
    /// Creates an admission with an injected bug.
    #[cfg(feature = "planted-bugs")]
    #[must_use]
    pub fn with_bug(bug: Option<Bug>) -> Self {
        Self { planted: InjectedBug::new(bug), ..Self::default() }
    }

    /// Admits keys immediately, within `keys_max` and `admissions_per_second`. Returns the keys admitted.
    pub fn admit_now(
        &mut self,
        wanted: impl IntoIterator<Item = (u64, Slot)>,
        knobs: &Knobs,
        now_us: u64,
    ) -> Vec<(u64, Slot)> {
        let mut more = Vec::new();
        let most = self.allowance.at(knobs.admissions_per_second, now_us);
        for (hash, slot) in wanted {
            if self.keys.contains_key(&hash) || self.keys.len() >= knobs.keys_max || more.len() >= most {
                continue;
            }
            let seen = Admitted { hash, slot, reads: 0.0, writes: 0.0, bytes: 0 };
            // Evicted after `deletion_delay` unless its load rises.
            self.keys.insert(hash, AdmittedKey { seen, cold_since_us: Some(now_us) });
            more.push((hash, slot));
        }
        self.allowance.take(more.len());
        more
    }

    /// Evicts all keys.
    pub fn forget(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.keys).into_keys().collect()
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
            let is_warm =
                now.is_some_and(|now| knobs.all || now.worth() >= knobs.min_reads_per_second as f64 * KEEP_FRACTION);
            key.seen = now.unwrap_or(Admitted { reads: 0.0, writes: 0.0, ..key.seen });
            key.cold_since_us = if is_warm { None } else { key.cold_since_us.or(Some(now_us)) };
        }
        let mut new: Vec<&Admitted> = seen
            .values()
            .filter(|key| {
                !self.keys.contains_key(&key.hash) && (knobs.all || key.worth() >= knobs.min_reads_per_second as f64)
            })
            // Larger than the limit: no eviction can make room for it.
            .filter(|key| key.bytes <= knobs.bytes_max as u64)
            .collect();
        new.sort_unstable_by(|one, other| other.worth().total_cmp(&one.worth()).then(one.hash.cmp(&other.hash)));
        let most = if admits { self.allowance.at(knobs.admissions_per_second, now_us) } else { 0 };
        new.truncate(most);
        // Eviction order: longest cold first, then lowest worth.
        let mut out: Vec<(u64, Option<u64>, f64, u64)> =
            self.keys.iter().map(|(hash, key)| (*hash, key.cold_since_us, key.seen.worth(), key.seen.bytes)).collect();
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
                if cold.is_none() && worth * REPLACE_FACTOR > key.worth() {
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
        self.allowance.take(more.len());
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
        (more, less)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(hash: u64, reads: f64, writes: f64) -> Admitted {
        Admitted { hash, slot: Slot::new(1).expect("a slot"), reads, writes, bytes: 100 }
    }

    const KNOBS: Knobs = Knobs {
        all: false,
        keys_max: 2,
        bytes_max: 1000,
        min_reads_per_second: 100,
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
        assert_eq!(admission.admit_now([(5, slot), (5, slot), (6, slot), (7, slot)], &KNOBS, 0).len(), 2);
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
        let at_once: usize = (0..40).map(|n| admission.admit_now(asked(n), &knobs, n * 5_000).len()).sum();
        assert_eq!(at_once, 11, "a second's worth, and one in the 0.2 s");
        let many = (1000..1100).map(|hash| key(hash, 500.0, 0.0));
        assert_eq!(admission.step(many.clone(), &knobs, true, 600_000).0.len(), 5);
        assert_eq!(admission.step(many, &knobs, false, 9_000_000).0.len(), 0);
        assert_eq!(admission.admit_now(asked(90), &knobs, 9_000_000).len(), 10, "not more than a second's worth");
    }
}
