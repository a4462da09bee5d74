//! Counts of sampled commands, as the workers make them, for the telemetry of `policy`.
//!
//! The sampling is a model of `router::worker::telemetry`: each worker counts one command in N, and adapts N to its
//! load. The numbers of samples are drawn from their distribution rather than command by command. The aggregation over
//! time is the production code ([`Board`], [`SlotRates`]).
//!
//! Only keys with a rate of their own are named. A worker would also name some keys of the tail, each with one or two
//! samples, which no policy uses. A slice longer than a second is sampled in its last [`SECONDS_MAX`] seconds: older
//! counts would have little weight.

use std::collections::BTreeMap;

use switchyard_policy::load::{SlotCount, SlotLoad, SlotRates};
use switchyard_policy::telemetry::{Board, Counted, Counts, HotNode};
use switchyard_policy::topology::{NodeId, SLOT_NUMBERS};

use super::draw::Draws;
use super::keys::Key;
use super::scenario::Telemetry as Settings;

/// Length of a segment, in seconds.
const SEGMENT: f64 = 1.0;

/// Segments that a long slice is sampled in.
const SECONDS_MAX: f64 = 8.0;

/// Greatest N of one command in N.
const ONE_IN_MAX: f64 = 4096.0;

/// Maximum number of counted keys of all nodes together, and minimum and maximum per node.
const KEYS: usize = 12_288;
const KEYS_OF_NODE: (usize, usize) = (256, 4096);

/// Requests per second of a key that reach the router.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct KeyRate {
    /// Commands to the node for reads, including the commands that fill copies.
    pub(super) reads: f64,
    /// Reads served from copies.
    pub(super) hits: f64,
    /// Writes.
    pub(super) writes: f64,
}

/// Telemetry of all workers.
#[derive(Clone, Debug)]
pub(super) struct Telemetry {
    settings: Settings,
    workers: f64,
    reply_bytes: f64,
    board: Board,
    slots: SlotRates,
    counts: Vec<SlotCount>,
    /// Requests since the last segment: by place of the key, and of the other keys by slot.
    keys: Vec<KeyRate>,
    tail: Vec<f64>,
    all: f64,
    seconds: f64,
    /// One command in this many is counted in this segment.
    one_in: f64,
}

/// Requests of a slice.
pub(super) struct Flow<'a> {
    pub(super) seconds: f64,
    pub(super) keys: &'a [Key],
    pub(super) rates: &'a [KeyRate],
    /// Node of each key.
    pub(super) nodes: &'a [NodeId],
    /// Requests per second of each slot's other keys.
    pub(super) tail: &'a [f64],
}

impl Telemetry {
    pub(super) fn new(settings: Settings, workers: u32, reply_bytes: f64, board: Board) -> Self {
        Self {
            settings,
            workers: f64::from(workers),
            reply_bytes,
            board,
            slots: SlotRates::default(),
            counts: vec![SlotCount::default(); SLOT_NUMBERS],
            keys: Vec::new(),
            tail: Vec::new(),
            all: 0.0,
            seconds: 0.0,
            one_in: f64::from(settings.sample),
        }
    }

    /// Adds the requests of a slice, and ends segments. Returns whether one has ended.
    pub(super) fn note(&mut self, flow: &Flow<'_>, draws: &mut Draws) -> bool {
        if self.seconds == 0.0 && flow.seconds >= SEGMENT {
            let segments = (flow.seconds / SEGMENT).round().clamp(1.0, SECONDS_MAX) as u32;
            for _ in 0..segments {
                self.add(flow, SEGMENT);
                self.end_segment(flow, draws);
            }
            return true;
        }
        self.add(flow, flow.seconds);
        // Sums of slices such as 0.01 are inexact.
        let is_over = self.seconds >= SEGMENT - flow.seconds / 2.0;
        if is_over {
            self.end_segment(flow, draws);
        }
        is_over
    }

    /// Forgets the requests of a place that has another key now.
    pub(super) fn forget(&mut self, place: usize) {
        if let Some(rate) = self.keys.get_mut(place) {
            *rate = KeyRate::default();
        }
    }

    fn add(&mut self, flow: &Flow<'_>, seconds: f64) {
        self.keys.resize(flow.rates.len(), KeyRate::default());
        self.tail.resize(flow.tail.len(), 0.0);
        let mut all = 0.0;
        for (sum, rate) in self.keys.iter_mut().zip(flow.rates) {
            sum.reads += rate.reads * seconds;
            sum.hits += rate.hits * seconds;
            sum.writes += rate.writes * seconds;
            all += rate.reads + rate.hits + rate.writes;
        }
        for (sum, rate) in self.tail.iter_mut().zip(flow.tail) {
            *sum += rate * seconds;
            all += rate;
        }
        self.all += all * seconds;
        self.seconds += seconds;
    }

    /// Draws the samples of the segment, and adds them to the board and to the slots.
    fn end_segment(&mut self, flow: &Flow<'_>, draws: &mut Draws) {
        let one_in = self.one_in as u32;
        let mut nodes: BTreeMap<NodeId, Counts> = BTreeMap::new();
        for ((sum, key), node) in self.keys.iter_mut().zip(flow.keys).zip(flow.nodes) {
            let KeyRate { reads, hits, writes } = std::mem::take(sum);
            let mut draw = |requests: f64| draws.poisson(requests / self.one_in);
            let (reads, hits, writes) = (draw(reads), draw(hits), draw(writes));
            if reads + hits + writes == 0 {
                continue;
            }
            let counts = nodes.entry(*node).or_default();
            counts.uses += reads + writes;
            counts.hits += hits;
            let bytes = (reads + hits + writes) * key.name.len() as u64;
            counts.keys.push(Counted {
                hash: key.hash,
                database: 0,
                name: key.label,
                reads: reads as u32,
                hits: hits as u32,
                writes: writes as u32,
                bytes,
                reply_bytes: (reads + hits) * self.reply_bytes as u64,
                us: 0,
                error: 0,
            });
            // Hits are not counted by slot: their nodes do not see them.
            let samples = reads + writes;
            self.counts[key.slot.index()].add(SlotCount {
                commands: samples * u64::from(one_in),
                writes: writes * u64::from(one_in),
                bytes: 0,
                samples,
            });
        }
        for (count, sum) in self.counts.iter_mut().zip(&mut self.tail) {
            let samples = draws.poisson(std::mem::take(sum) / self.one_in);
            count.commands += samples * u64::from(one_in);
            count.samples += samples;
        }
        let keys_max = (KEYS / nodes.len().max(1)).clamp(KEYS_OF_NODE.0, KEYS_OF_NODE.1);
        let us = (self.seconds * 1e6).round() as u64;
        for counts in nodes.values_mut() {
            if counts.keys.len() > keys_max {
                counts.keys.sort_by_key(|key| (std::cmp::Reverse(key.seen()), key.hash));
                counts.keys.truncate(keys_max);
            }
        }
        let scaled = nodes.into_iter().map(|(node, counts)| (node, counts.scaled(one_in))).collect();
        self.board.segment(scaled, us);
        self.slots.counted(self.counts.clone(), self.seconds);
        let wanted = self.all / self.seconds / self.workers / self.settings.counted;
        self.one_in = wanted.floor().min(ONE_IN_MAX).max(f64::from(self.settings.sample));
        (self.all, self.seconds) = (0.0, 0.0);
    }

    /// Loads of all slots.
    pub(super) fn slots(&self) -> Vec<SlotLoad> {
        self.slots.rates().to_vec()
    }

    /// The hottest keys of each node.
    pub(super) fn hottest(&self, keys: usize) -> Vec<HotNode> {
        self.board.nodes(keys).collect()
    }
}

#[cfg(test)]
mod tests {
    use switchyard_policy::telemetry::Weights;
    use switchyard_policy::topology::Topology;

    use super::super::draw::Stream;
    use super::super::keys::KeySpace;
    use super::super::scenario::Keys;
    use super::*;

    #[test]
    fn rates_of_keys_and_slots_are_estimated_without_bias() {
        let topology = Topology::even(&["a".into()]).expect("a node");
        let keys = Keys { count: 1e6, zipf: 0.9, head: 50, bytes: 100.0, writes: 0.0, growth: 0.0 };
        let space = KeySpace::new(&keys, &[], &topology, 1);
        let rate = 200_000.0;
        let rates: Vec<KeyRate> =
            space.keys().iter().map(|key| KeyRate { reads: rate * key.share, ..KeyRate::default() }).collect();
        let tail: Vec<f64> = topology.slots().map(|slot| rate * space.tail(slot.index())).collect();
        let nodes = vec![NodeId(0); rates.len()];
        for seconds in [0.01, 1.0, 60.0] {
            let flow = Flow { seconds, keys: space.keys(), rates: &rates, nodes: &nodes, tail: &tail };
            let mut telemetry = Telemetry::new(Settings::default(), 4, 100.0, Board::new(Weights::default()));
            let mut draws = Draws::new(1, Stream::Samples);
            let ended = (0..(30.0 / seconds).ceil() as u32).filter(|_| telemetry.note(&flow, &mut draws)).count();
            assert!(ended == 30 || seconds > 1.0, "{ended} segments with slices of {seconds} s");
            let hot = telemetry.hottest(10);
            let (found, true_rate) = (hot[0].keys[0].rates.reads, rates[space.hottest()[0]].reads);
            assert!((found / true_rate - 1.0).abs() < 0.1, "{found} for {true_rate}");
            let slots: f64 = telemetry.slots().iter().map(|slot| slot.commands).sum();
            // A slice of a minute is sampled in eight segments, after which the slow average has five sixths.
            assert!(seconds > 1.0 || (slots / rate - 1.0).abs() < 0.02, "{slots} for {rate}");
        }
    }
}
