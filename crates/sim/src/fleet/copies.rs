//! Hot copies: the admission of `policy`, and the part of the reads that copies serve.
//!
//! The admission runs as in `router::hot_copies::coordinator`: once a second on the counts, and at once for frequent
//! keys, which [`Recent`] finds among the last commands to a node. The ring holds the commands of all workers here, the
//! workers' rings each a part of them.
//!
//! Copies themselves are a formula for each holder: a worker, or the cache node of the key. While a write is at the node,
//! reads are forwarded. After it, or the end of its time to live, the next read fills the copy, and costs the node two
//! commands. Reads wait for the fill, and are hits unless a write spoils it; then they are forwarded. Reads, writes and
//! ends are Poisson processes, and a write takes as long as a fill.

use std::collections::BTreeMap;

use switchyard_policy::hot_copies::{Admission, Admitted, Knobs};
use switchyard_policy::telemetry::{HotNode, Recent};
use switchyard_policy::topology::{NodeId, Placement, Slot};

use super::draw::Draws;
use super::keys::{Key, KeySpace};
use super::scenario::{Copies as Settings, Reports, Telemetry};
use super::telemetry::KeyRate;

/// Interval between evaluations of the counts, in microseconds.
const STEP_US: u64 = 1_000_000;

/// Commands to the node for a read that fills a copy.
const FILL_COMMANDS: f64 = 2.0;

/// Writes at the node at a time, on average, from which on the key is practically always being written.
const WRITES_MAX: f64 = 50.0;

/// Part of a node's requests from which on a key can be frequent: more than 8 of 200. Keys below half of that are not
/// distinguished.
const FREQUENT_MIN: f64 = 0.02;

/// Seconds of a slice that are checked for frequent keys, at most.
const CHECKED_MAX: f64 = 1.0;

/// Commands of a slice that are checked per node, at most: ten times the size of the ring.
const CHECKED_OF_NODE: u64 = 2000;

/// Hot copies of a fleet.
#[derive(Clone, Debug)]
pub(super) struct HotCopies {
    settings: Settings,
    knobs: Knobs,
    holders: f64,
    /// Duration of a fill, in seconds.
    fill: f64,
    admission: Admission,
    /// Places of the keys, by hash.
    places: BTreeMap<u64, usize>,
    /// Whether the key of a place has copies.
    is_copied: Vec<bool>,
    recent: BTreeMap<NodeId, Recent>,
    next_step_us: u64,
}

impl HotCopies {
    /// Creates copies without keys. `fill_us`: duration of a fill, in microseconds.
    pub(super) fn new(settings: Settings, holders: u32, fill_us: f64, space: &KeySpace, admission: Admission) -> Self {
        let places = space.keys().iter().enumerate().map(|(place, key)| (key.hash, place)).collect();
        Self {
            knobs: settings.knobs(holders),
            settings,
            holders: f64::from(holders),
            fill: fill_us / 1e6,
            admission,
            places,
            is_copied: vec![false; space.keys().len()],
            recent: BTreeMap::new(),
            next_step_us: STEP_US,
        }
    }

    /// Admits the hottest keys before the start. `rate`: requests per second.
    pub(super) fn prefill(&mut self, space: &KeySpace, rate: f64, bytes: u64) {
        let admitted = |place: &usize| {
            let key = &space.keys()[*place];
            let reads = rate * key.share * (1.0 - key.writes);
            Admitted { hash: key.hash, slot: key.slot, reads, writes: rate * key.share * key.writes, bytes }
        };
        let knobs = Knobs { admissions_per_second: self.knobs.keys_max, ..self.knobs };
        let hottest: Vec<Admitted> = space.hottest().iter().take(self.knobs.keys_max).map(admitted).collect();
        let (more, less) = self.admission.step(hottest, &knobs, true, 0);
        self.publish(&more, &less);
    }

    fn publish(&mut self, more: &[(u64, Slot)], less: &[u64]) {
        let hashes = more.iter().map(|(hash, _)| (*hash, true)).chain(less.iter().map(|hash| (*hash, false)));
        for (hash, is_copied) in hashes {
            if let Some(place) = self.places.get(&hash) {
                self.is_copied[*place] = is_copied;
            }
        }
    }

    /// Records that a place has another key now. `before`: hash of the former key.
    pub(super) fn replace(&mut self, place: usize, before: u64, key: &Key) {
        self.places.remove(&before);
        self.places.insert(key.hash, place);
        self.is_copied[place] = false;
    }

    /// Returns the rates of a key at its node and at the copies.
    pub(super) fn rate(&self, place: usize, reads: f64, writes: f64) -> KeyRate {
        if !self.is_copied[place] || reads <= 0.0 {
            return KeyRate { reads, hits: 0.0, writes };
        }
        let (each, ends) = (reads / self.holders, writes + 1.0 / self.settings.ttl);
        let at_once = (writes * self.fill).min(WRITES_MAX);
        let spoiled = at_once / (1.0 + at_once);
        // Time without a pause between writes: the busy period of a queue with infinitely many servers.
        let written = if writes > 0.0 { at_once.exp_m1() / writes } else { 0.0 };
        let after_write = spoiled + (1.0 - spoiled) * writes / ends;
        // Reads per fill: the one that fills, hits, and forwarded ones.
        let hits = (1.0 - spoiled) * each * (self.fill + 1.0 / ends);
        let forwarded = each * (spoiled * self.fill + after_write * written);
        let fills = reads / (1.0 + hits + forwarded);
        KeyRate { reads: fills * (FILL_COMMANDS + forwarded), hits: fills * hits, writes }
    }

    /// Checks the commands of a slice for frequent keys without copies, and admits these. Nodes without such keys need
    /// no check.
    pub(super) fn check_recent(&mut self, slice: &Slice<'_>, telemetry: &Telemetry, now_us: u64, draws: &mut Draws) {
        if self.settings.reports == Reports::Periodic {
            return;
        }
        let all: f64 = slice.loads.iter().sum();
        let checked = (telemetry.noticed * f64::from(slice.workers)).min(all) * slice.seconds.min(CHECKED_MAX);
        self.recent
            .retain(|node, _| slice.loads.get(node.index()).is_some_and(|load| *load >= telemetry.instant_threshold));
        let mut candidates: BTreeMap<NodeId, Vec<(f64, usize)>> = BTreeMap::new();
        for (place, (rate, node)) in slice.rates.iter().zip(slice.nodes).enumerate() {
            let at_node = rate.reads + rate.writes;
            let load = slice.loads[node.index()];
            let is_candidate = !self.is_copied[place] && at_node > load * FREQUENT_MIN;
            if is_candidate && load >= telemetry.instant_threshold {
                candidates.entry(*node).or_default().push((at_node / load, place));
            }
        }
        let mut wanted = Vec::new();
        for (node, candidates) in candidates {
            let recent = self.recent.entry(node).or_insert_with(|| Recent::for_workers(1));
            let count = draws.poisson(checked * slice.loads[node.index()] / all).min(CHECKED_OF_NODE);
            for _ in 0..count {
                let mut at = draws.unit();
                let found = candidates.iter().find(|(part, _)| {
                    at -= part;
                    at < 0.0
                });
                let (hash, place) = match found {
                    Some((_, place)) => (slice.keys[*place].hash, Some(*place)),
                    // One of many others: practically never the same again among the last 200.
                    None => (at.to_bits(), None),
                };
                if recent.note(hash).is_some()
                    && let Some(place) = place.filter(|place| !self.is_copied[*place])
                {
                    wanted.push((hash, slice.keys[place].slot));
                }
            }
        }
        self.admission.admit_now(wanted, &self.knobs, now_us);
    }

    /// Makes the changes that wait, and once a second evaluates the counts. `hottest` returns the keys in use.
    pub(super) fn step(&mut self, now_us: u64, placement: &Placement, hottest: impl FnOnce() -> Vec<HotNode>) {
        let (more, less) = if now_us < self.next_step_us {
            self.admission.proceed(&self.knobs, now_us)
        } else {
            self.next_step_us = now_us + STEP_US;
            let seen = Admitted::observed(hottest(), placement, &self.knobs, |_| true);
            let admits = self.settings.reports != Reports::Instant;
            self.admission.step(seen, &self.knobs, admits, now_us)
        };
        self.publish(&more, &less);
    }
}

/// Requests of a slice.
pub(super) struct Slice<'a> {
    pub(super) seconds: f64,
    pub(super) workers: u32,
    pub(super) keys: &'a [Key],
    pub(super) rates: &'a [KeyRate],
    /// Node of each key.
    pub(super) nodes: &'a [NodeId],
    /// Requests per second of each node, by its number.
    pub(super) loads: &'a [f64],
}

#[cfg(test)]
mod tests {
    use switchyard_policy::topology::Topology;

    use super::super::draw::Stream;
    use super::super::scenario::Keys;
    use super::*;

    fn space() -> (Topology, KeySpace) {
        let topology = Topology::even(&["a".into()]).expect("a node");
        let keys = Keys { count: 1e6, zipf: 0.99, head: 100, bytes: 100.0, writes: 0.0, growth: 0.0 };
        let space = KeySpace::new(&keys, &[], &topology, 1);
        (topology, space)
    }

    #[test]
    fn writes_and_holders_reduce_the_hits() {
        let (_, space) = space();
        let copies = |holders| {
            let mut copies = HotCopies::new(Settings::default(), holders, 200.0, &space, Admission::default());
            copies.prefill(&space, 1e6, 100);
            copies
        };
        let one = copies(1);
        let place = space.hottest()[0];
        let hits = |copies: &HotCopies, writes| copies.rate(place, 1000.0, writes).hits;
        // One read fills; the others wait for the 200 us of the fill, or come in the 10 s of the copy.
        let others = 1000.0 * 10.0002;
        assert!((hits(&one, 0.0) - 1000.0 * others / (others + 1.0)).abs() < 1e-6);
        assert!(hits(&one, 100.0) < hits(&one, 10.0) && hits(&copies(8), 10.0) < hits(&one, 10.0));
        // Few fills are spoiled, so most reads without a hit are two commands; with many writes nearly all are spoiled.
        let commands = |writes| {
            let rate = one.rate(place, 1000.0, writes);
            rate.reads / (1000.0 - rate.hits)
        };
        assert!(commands(1.0) > 1.8 && commands(1e6) < 1.01, "{} and {}", commands(1.0), commands(1e6));
    }

    #[test]
    fn a_frequent_key_has_copies_before_the_next_report() {
        let (topology, space) = space();
        let mut copies = HotCopies::new(Settings::default(), 1, 200.0, &space, Admission::default());
        let rate = 10_000.0;
        let rates: Vec<KeyRate> = space.keys().iter().map(|key| copies.rate(0, rate * key.share, 0.0)).collect();
        let nodes = vec![NodeId(0); rates.len()];
        let loads = [rate];
        let mut draws = Draws::new(1, Stream::Samples);
        let slice = Slice { seconds: 0.2, workers: 1, keys: space.keys(), rates: &rates, nodes: &nodes, loads: &loads };
        copies.step(100_000, topology.placement(), Vec::new);
        copies.check_recent(&slice, &Telemetry::default(), 200_000, &mut draws);
        copies.step(200_000, topology.placement(), Vec::new);
        // Of all requests, 6.5 % are for the first key, and 0.65 % for the tenth.
        assert!(copies.is_copied[space.hottest()[0]] && !copies.is_copied[space.hottest()[9]]);
        copies.step(1_100_000, topology.placement(), Vec::new);
        copies.step(12_000_000, topology.placement(), Vec::new);
        assert!(!copies.is_copied.contains(&true), "evicted after the delay, because no count confirms it");
    }
}
