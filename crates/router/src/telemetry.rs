//! Counts of keys sent to nodes, collected from all workers ([`switchyard_policy::telemetry`]).
//!
//! Each worker hands over its segment once a second. The first worker then ends the segment for all.

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Mutex;
use std::time::Instant;

use switchyard_policy::load::SlotCount;
use switchyard_policy::migration::Fingerprinter;
use switchyard_policy::telemetry::{Board, Counts, HotNode, Weights};
use switchyard_policy::topology::{NodeId, SLOT_NUMBERS, Slot};

use crate::lock::lock;

/// Sampled counts of a worker.
#[derive(Debug)]
pub(crate) struct WorkerCounts {
    /// Sampling rate: one of this many commands was counted. Each worker adapts it to its load.
    pub(crate) one_in: u32,
    /// Whether the segment ends. Otherwise the counts are handed over early because they are large.
    pub(crate) ends: bool,
    pub(crate) nodes: Vec<(NodeId, Counts)>,
    /// Counted slots.
    pub(crate) slots: Vec<(Slot, SlotCount)>,
}

/// Counts of all workers.
#[derive(Debug)]
pub(crate) struct SharedBoard {
    /// Keyed hash of key names, so that clients cannot produce collisions.
    pub(crate) fingerprints: Fingerprinter,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    board: Board,
    /// Counts of the current segment, scaled to all commands.
    counts: BTreeMap<NodeId, Counts>,
    /// By slot, since the start, scaled to all commands.
    slots: Vec<SlotCount>,
    since: Instant,
}

impl Default for SharedBoard {
    fn default() -> Self {
        let half = |number: u8| u128::from(RandomState::new().hash_one(number));
        let inner = Inner {
            board: Board::new(Weights::default()),
            counts: BTreeMap::new(),
            slots: vec![SlotCount::default(); SLOT_NUMBERS],
            since: Instant::now(),
        };
        Self { fingerprints: Fingerprinter::new(half(0) << 64 | half(1)), inner: Mutex::new(inner) }
    }
}

impl SharedBoard {
    /// Adds counts of a worker since its last call. `ends`: ends the segment for all workers.
    pub(crate) fn take(&self, counted: WorkerCounts, ends: bool) {
        let mut inner = lock(&self.inner);
        let scale = |count: u64| count * u64::from(counted.one_in);
        for (slot, more) in counted.slots {
            let SlotCount { commands, writes, bytes, samples } = more;
            inner.slots[slot.index()].add(SlotCount {
                commands: scale(commands),
                writes: scale(writes),
                bytes: scale(bytes),
                samples,
            });
        }
        for (node, more) in counted.nodes {
            inner.counts.entry(node).or_default().add(more.scaled(counted.one_in));
        }
        if ends {
            let counts = std::mem::take(&mut inner.counts);
            let us = std::mem::replace(&mut inner.since, Instant::now()).elapsed().as_micros() as u64;
            inner.board.segment(counts, us);
        }
    }

    /// Returns the estimated commands by slot since the start.
    pub(crate) fn slots(&self) -> Vec<SlotCount> {
        lock(&self.inner).slots.clone()
    }

    /// Returns the nodes in use, each with up to `keys` hot keys.
    pub(crate) fn nodes(&self, keys: usize) -> Vec<HotNode> {
        lock(&self.inner).board.nodes(keys).collect()
    }
}
