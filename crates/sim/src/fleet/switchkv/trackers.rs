//! Trackers of the backends and of the cache node: the production code of `policy::telemetry`, fed with counts.
//!
//! Each backend has a [`Recent`] for instant reports, and a [`Board`] smooths its counts of a second for periodic ones.
//! The cache node counts its hits in the same way. Backends are not synchronized: their segments end in several phases
//! of the second.
//!
//! The counts are drawn from their distribution, because single queries would be some ten million per simulated second.
//! So the counters are exact, and have the most queried keys of a segment. Only a log with keys that may be frequent
//! receives single queries. Keys without ranks are not counted: they are queried too rarely for a report.
//!
//! A key that has just been cached has a load at both: the part before at its backend, the part after at the cache
//! node. As in the router, its load is the sum. The paper does not state the first load of a cached key.

use std::collections::BTreeMap;

use switchyard_policy::hot_copies::Admitted;
use switchyard_policy::telemetry::{Board, Counted, Counts, Name, Recent, Weights};
use switchyard_policy::topology::{NodeId, Slot};

use super::super::draw::{Draws, Stream};
use super::keys::{KeyId, KeySpace};
use super::settings;

/// Length of a segment, in microseconds.
const SEGMENT_US: u64 = 1_000_000;

/// The only node on the cache node's board.
const CACHE: NodeId = NodeId(0);

/// Part of a backend's queries from which on a key can be frequent. With this part, more than 8 of 200 occur once in
/// about a million times.
const FREQUENT_MIN: f64 = 0.005;

/// A key with its load, in queries per second.
type Load = (u64, f64);

/// Load of a backend in a slice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Backend {
    /// Share of all reads that are sent to it.
    pub(super) share: f64,
    /// Part of them that it serves.
    pub(super) served: f64,
    /// Whether it has enough load for instant reports.
    pub(super) is_busy: bool,
}

/// Expected number of reads of a key since they were last counted.
#[derive(Clone, Copy, Debug, Default)]
struct Expected {
    at_backend: f64,
    at_cache: f64,
}

/// All trackers.
#[derive(Clone, Debug)]
pub(super) struct Trackers {
    settings: settings::Trackers,
    draws: Draws,
    /// By [`KeyId::index`].
    expected: Vec<Expected>,
    /// Logs of recent queries, by backend.
    recent: Vec<Recent>,
    /// Boards of the backends of each phase.
    boards: Vec<Board>,
    /// Lists of loads of the backends of each phase.
    listed: Vec<Vec<Load>>,
    cache_board: Board,
    /// Loads of cached keys at the cache node.
    cached: Vec<Load>,
}

impl Trackers {
    pub(super) fn new(settings: settings::Trackers, backends: u16, seed: u64) -> Self {
        let board = |keys_max| Board::new(Weights { newest: settings.alpha, keys_max });
        Self {
            settings,
            draws: Draws::new(seed, Stream::Samples),
            expected: Vec::new(),
            recent: (0..backends).map(|_| Recent::for_workers(1)).collect(),
            boards: (0..settings.phases).map(|_| board(settings.listed)).collect(),
            listed: vec![Vec::new(); settings.phases as usize],
            cache_board: board(usize::MAX),
            cached: Vec::new(),
        }
    }

    /// Adds the reads of a slice. `reads`: number of all that were sent.
    pub(super) fn count(&mut self, space: &KeySpace, reads: f64, backends: &[Backend]) {
        self.expected.resize(space.len(), Expected::default());
        for (id, share) in space.head() {
            let key = space.key(id);
            let expected = &mut self.expected[id.index()];
            if key.is_hit() {
                expected.at_cache += reads * share;
            } else {
                expected.at_backend += reads * share * backends[usize::from(key.backend)].served;
            }
        }
    }

    /// Whether the cache node served a read of the key since the last call.
    pub(super) fn was_read(&mut self, id: KeyId) -> bool {
        let expected = self.expected.get_mut(id.index()).map(|expected| std::mem::take(&mut expected.at_cache));
        self.draws.poisson(expected.unwrap_or_default()) > 0
    }

    /// Logs the queries of a slice at busy backends. Returns the uncached keys that are frequent among the recent
    /// queries of their backends, so that they are reported instantly.
    pub(super) fn frequent(&mut self, space: &KeySpace, reads: f64, backends: &[Backend]) -> Vec<u64> {
        let mut candidates: Vec<Vec<(f64, u64)>> = vec![Vec::new(); backends.len()];
        let least = FREQUENT_MIN * backends.iter().map(|backend| backend.share).fold(f64::INFINITY, f64::min);
        for (id, share) in space.head().take_while(|(_, share)| *share >= least) {
            let key = space.key(id);
            let place = usize::from(key.backend);
            let part = share / backends[place].share;
            if !key.is_hit() && backends[place].is_busy && part >= FREQUENT_MIN {
                candidates[place].push((part, id.hash()));
            }
        }
        let mut frequent = Vec::new();
        for (place, candidates) in candidates.iter().enumerate().filter(|(_, candidates)| !candidates.is_empty()) {
            let Backend { share, served, .. } = backends[place];
            for _ in 0..self.draws.poisson(reads * share * served / f64::from(self.settings.sample)) {
                let mut at = self.draws.unit();
                let found = candidates.iter().find(|(part, _)| {
                    at -= part;
                    at < 0.0
                });
                // One of many others: practically never the same again among the last 200.
                let hash = found.map_or(at.to_bits(), |(_, hash)| *hash);
                if self.recent[place].note(hash).is_some() && found.is_some() {
                    frequent.push(hash);
                }
            }
        }
        frequent
    }

    /// Ends the segments of the backends of a phase, and with the first phase the segment of the cache node. Returns the
    /// reports of the backends: their hottest uncached keys.
    pub(super) fn report(&mut self, phase: usize, space: &KeySpace) -> Vec<Load> {
        let mut counts: BTreeMap<NodeId, Counts> = BTreeMap::new();
        let mut hits = Counts::default();
        for (id, _) in space.head() {
            let Some(expected) = self.expected.get_mut(id.index()) else { continue };
            let backend = space.key(id).backend;
            if usize::from(backend) % self.boards.len() == phase {
                let reads = self.draws.poisson(std::mem::take(&mut expected.at_backend));
                add(counts.entry(NodeId(backend)).or_default(), id, reads, 0);
            }
            if phase == 0 {
                add(&mut hits, id, 0, self.draws.poisson(std::mem::take(&mut expected.at_cache)));
            }
        }
        for counts in counts.values_mut() {
            counts.keys.sort_by_key(|key| std::cmp::Reverse(key.reads));
            counts.keys.truncate(self.settings.counters);
        }
        let board = &mut self.boards[phase];
        board.segment(counts, SEGMENT_US);
        let (mut reports, mut listed) = (Vec::new(), Vec::new());
        for node in board.nodes(self.settings.listed) {
            let mut reported = 0;
            for key in node.keys {
                let load = (key.hash, key.rates.commands());
                if is_cached(space, key.hash) {
                    listed.push(load);
                } else if reported < self.settings.reported {
                    reported += 1;
                    reports.push(load);
                }
            }
        }
        self.listed[phase] = listed;
        if phase == 0 {
            self.cache_board.segment(BTreeMap::from([(CACHE, hits)]), SEGMENT_US);
            let keys = self.cache_board.nodes(usize::MAX).flat_map(|node| node.keys);
            self.cached = keys.map(|key| (key.hash, key.rates.commands())).collect();
        }
        reports
    }

    /// Returns the loads of all cached keys, and of reported ones, in the order of their hashes.
    pub(super) fn seen(&self, space: &KeySpace, reports: Vec<Load>) -> Vec<Admitted> {
        let listed = self.listed.iter().flatten().chain(&self.cached);
        let mut all: Vec<Load> = listed.copied().filter(|(hash, _)| is_cached(space, *hash)).collect();
        all.extend(reports);
        all.sort_unstable_by(|one, other| one.0.cmp(&other.0).then(one.1.total_cmp(&other.1)));
        all.dedup_by(|other, first| {
            let is_same = other.0 == first.0;
            if is_same {
                first.1 += other.1;
            }
            is_same
        });
        all.into_iter().map(|load| admitted(load.0, load.1)).collect()
    }
}

/// Adds the count of a key.
fn add(counts: &mut Counts, id: KeyId, reads: u64, hits: u64) {
    counts.one_in = 1;
    counts.uses += reads;
    counts.hits += hits;
    if reads + hits > 0 {
        counts.keys.push(Counted {
            hash: id.hash(),
            database: 0,
            name: Name::NONE,
            reads: reads as u32,
            hits: hits as u32,
            writes: 0,
            bytes: 0,
            reply_bytes: 0,
            us: 0,
            error: 0,
        });
    }
}

/// Creates the load of a key that is only read.
pub(super) fn admitted(hash: u64, reads: f64) -> Admitted {
    Admitted { hash, slot: Slot::FIRST, reads, writes: 0.0, bytes: 0 }
}

fn is_cached(space: &KeySpace, hash: u64) -> bool {
    space.find(hash).is_some_and(|id| space.key(id).has_item)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTINGS: settings::Trackers =
        settings::Trackers { sample: 1, phases: 2, reported: 2, ..settings::Trackers::DEFAULT };

    fn cache(space: &mut KeySpace, id: KeyId) {
        let key = space.key_mut(id);
        (key.has_rule, key.has_item) = (true, true);
    }

    #[test]
    fn backends_report_their_hottest_uncached_keys() {
        let mut space = KeySpace::new(1e6, 0.99, 4, 1);
        let hottest: Vec<KeyId> = space.head().map(|(id, _)| id).take(8).collect();
        cache(&mut space, hottest[0]);
        let mut trackers = Trackers::new(SETTINGS, 4, 1);
        let busy = [Backend { share: 0.25, served: 1.0, is_busy: true }; 4];
        let frequent = trackers.frequent(&space, 100_000.0, &busy);
        assert!(frequent.contains(&hottest[1].hash()) && !frequent.contains(&hottest[0].hash()));
        let idle = busy.map(|backend| Backend { is_busy: false, ..backend });
        assert_eq!(trackers.frequent(&space, 100_000.0, &idle), []);
        trackers.count(&space, 100_000.0, &busy);
        let reports: Vec<Load> = (0..2).flat_map(|phase| trackers.report(phase, &space)).collect();
        assert_eq!(reports.len(), 8, "two of each backend");
        let load = |id: KeyId, of: &[Load]| of.iter().find(|load| load.0 == id.hash()).map(|load| load.1);
        // Half of the newest segment.
        let expected = 0.5 * 100_000.0 * space.share(hottest[1]);
        let found = load(hottest[1], &reports).expect("the hottest uncached key is reported");
        assert!((found / expected - 1.0).abs() < 0.1, "{found} for {expected}");
        let seen = trackers.seen(&space, reports);
        let of_cached = seen.iter().find(|key| key.hash == hottest[0].hash()).expect("the cached key");
        assert!(of_cached.reads > found && seen.len() == 9);
    }

    #[test]
    fn a_newly_cached_key_has_the_load_of_both_trackers() {
        let mut space = KeySpace::new(1e6, 0.99, 4, 1);
        let (first, share) = space.head().next().expect("a key");
        let mut trackers = Trackers::new(settings::Trackers { phases: 1, ..SETTINGS }, 4, 1);
        let backends = [Backend { share: 0.25, served: 0.5, is_busy: false }; 4];
        trackers.count(&space, 50_000.0, &backends);
        cache(&mut space, first);
        trackers.count(&space, 50_000.0, &backends);
        trackers.report(0, &space);
        let seen = trackers.seen(&space, Vec::new());
        // A backend serves half, and the cache node all.
        let expected = 0.5 * 75_000.0 * share;
        assert!(seen.len() == 1 && (seen[0].reads / expected - 1.0).abs() < 0.1, "{seen:?} for {expected}");
        trackers.count(&space, 50_000.0, &backends);
        assert_eq!([trackers.was_read(first), trackers.was_read(first)], [true, false]);
    }
}
