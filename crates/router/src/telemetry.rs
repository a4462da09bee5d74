//! What all workers have counted of the keys that they send to nodes ([`switchyard_policy::telemetry`]).
//!
//! Each worker hands over its own segments once a second. The first of them then ends the segment for all.

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Mutex;
use std::time::Instant;

use switchyard_policy::load::SlotCount;
use switchyard_policy::migration::Fingerprinter;
use switchyard_policy::telemetry::{Board, Counts, HotNode, Weights};
use switchyard_policy::topology::{NodeId, SLOT_COUNT, Slot};

use crate::shared::lock;

/// The counts of a worker, of a sample.
#[derive(Debug)]
pub(crate) struct Counted {
    /// One command in so many was counted: each worker counts as few as its load allows.
    pub(crate) one_in: u32,
    /// A segment has ended. Else the worker only hands over what it has, because that is much.
    pub(crate) ends: bool,
    pub(crate) nodes: Vec<(NodeId, Counts)>,
    /// Slots of which something was counted.
    pub(crate) slots: Vec<(Slot, SlotCount)>,
}

/// What workers share, once a second.
#[derive(Debug)]
pub(crate) struct SharedBoard {
    /// Makes hashes of keys, so that nobody outside can make some that fall together.
    pub(crate) fingerprints: Fingerprinter,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    board: Board,
    /// Of the segment that is under way, scaled to all commands.
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
            slots: vec![SlotCount::default(); SLOT_COUNT],
            since: Instant::now(),
        };
        Self { fingerprints: Fingerprinter::new(half(0) << 64 | half(1)), inner: Mutex::new(inner) }
    }
}

impl SharedBoard {
    /// What a worker has counted since it said so last. `ends`: it is the one that ends segments.
    pub(crate) fn take(&self, counted: Counted, ends: bool) {
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

    /// By slot, since the start: an estimate for all commands.
    pub(crate) fn slots(&self) -> Vec<SlotCount> {
        lock(&self.inner).slots.clone()
    }

    /// The nodes that are used, each with so many of its keys.
    pub(crate) fn nodes(&self, keys: usize) -> Vec<HotNode> {
        lock(&self.inner).board.nodes(keys).collect()
    }
}
