//! What all workers have counted of the keys that they send to nodes ([`switchyard_policy::telemetry`]).
//!
//! Each worker hands over its own segments once a second. The first of them then ends the segment for all.

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Mutex;
use std::time::Instant;

use switchyard_policy::migration::Fingerprinter;
use switchyard_policy::telemetry::{Board, Counts, HotNode, Weights};
use switchyard_policy::topology::NodeId;

use crate::shared::lock;

/// One command in so many is counted.
pub(crate) const ONE_IN: u32 = 16;

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
    counts: BTreeMap<NodeId, Counts>,
    since: Instant,
}

impl Default for SharedBoard {
    fn default() -> Self {
        let half = |number: u8| u128::from(RandomState::new().hash_one(number));
        let inner = Inner { board: Board::new(Weights::default()), counts: BTreeMap::new(), since: Instant::now() };
        Self { fingerprints: Fingerprinter::new(half(0) << 64 | half(1)), inner: Mutex::new(inner) }
    }
}

impl SharedBoard {
    /// What a worker has counted since it said so last. `ends`: it is the one that ends segments.
    pub(crate) fn take(&self, counts: Vec<(NodeId, Counts)>, ends: bool) {
        let mut inner = lock(&self.inner);
        for (node, more) in counts {
            inner.counts.entry(node).or_default().add(more);
        }
        if ends {
            let counts = std::mem::take(&mut inner.counts);
            let us = std::mem::replace(&mut inner.since, Instant::now()).elapsed().as_micros() as u64;
            inner.board.segment(counts, ONE_IN, us);
        }
    }

    /// The nodes that are used, each with so many of its keys.
    pub(crate) fn nodes(&self, keys: usize) -> Vec<HotNode> {
        lock(&self.inner).board.nodes(keys).collect()
    }
}
