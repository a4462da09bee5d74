//! A Bloom filter of complete groups, and a counting Bloom filter of groups in progress (NetMigrate, FAST 2024, section
//! 4.2); or only the first (the Bloom telemetry paper, in which a group is a key).
//!
//! Implemented here rather than with a crate: the geometry must match the published one exactly, and policy has no
//! dependencies.

use super::{Saturation, State, Tracker, wang};
use crate::migration::Fingerprint;

/// Placement of the cells of the hash functions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Layout {
    /// All functions share all cells.
    Shared,
    /// Each function has cells of its own, in equal number: a switch reads each of its arrays once per packet.
    Partitioned,
}

/// Geometry of one filter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Filter {
    /// Number of cells: bits, or 8-bit counters.
    pub cells: u64,
    /// Number of hash functions.
    pub hashes: u32,
    /// Placement of their cells.
    pub layout: Layout,
}

impl Filter {
    const fn shared(cells: u64) -> Self {
        Self { cells, hashes: 4, layout: Layout::Shared }
    }

    /// Probability that a group not added is found, after `groups` were added.
    #[must_use]
    pub fn false_positives(self, groups: u64) -> f64 {
        let added = f64::from(self.hashes) * groups as f64 / self.cells as f64;
        self.false_positives_at(-(-added).exp_m1())
    }

    /// False-positive probability if this fraction of the cells is set.
    fn false_positives_at(self, share: f64) -> f64 {
        share.powi(self.hashes as i32)
    }

    /// Returns the cells of a group.
    fn places(self, group: Fingerprint) -> impl Iterator<Item = usize> {
        let (low, high) = (group.0 as u64, (group.0 >> 64) as u64);
        (0..u64::from(self.hashes)).map(move |number| {
            let hash = u128::from(wang(wang(low ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15)) ^ high));
            // Without a remainder: the upper bits of the hash select the cell.
            let below = |cells: u64| ((hash * u128::from(cells)) >> 64) as u64;
            let place = match self.layout {
                Layout::Shared => below(self.cells),
                Layout::Partitioned => {
                    let own = self.cells / u64::from(self.hashes);
                    number * own + below(own)
                }
            };
            place as usize
        })
    }
}

/// Geometry of both filters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Bit filter of complete groups.
    pub complete: Filter,
    /// Counters; `None`: groups in progress are not tracked.
    pub under_way: Option<Filter>,
}

impl Geometry {
    /// NetMigrate's default: 512 KB of bits and 1024 KB of counters, for 2^17 groups.
    pub const NETMIGRATE: Self = Self { complete: Filter::shared(1 << 22), under_way: Some(Filter::shared(1 << 20)) };

    /// Geometry of NetMigrate's published code: four arrays of 32,768 bits, and four of 16 counters. The worst row of
    /// its Table 2.
    pub const NETMIGRATE_SHIPPED: Self = Self {
        complete: Filter { cells: 1 << 17, hashes: 4, layout: Layout::Partitioned },
        under_way: Some(Filter { cells: 1 << 6, hashes: 4, layout: Layout::Partitioned }),
    };

    /// Geometry of the Bloom telemetry paper: 125 MB for 50 million keys. The number of hash functions is not
    /// published.
    pub const BLOOM_TELEMETRY: Self = Self { complete: Filter::shared(1_000_000_000), under_way: None };

    /// NetMigrate's rule: 16 cells per group, and 16 per group in progress.
    #[must_use]
    pub const fn netmigrate(groups: u64, at_once: u64) -> Self {
        Self { complete: Filter::shared(16 * groups), under_way: Some(Filter::shared(16 * at_once)) }
    }

    /// Probability that a group that has not started gets another state, with these numbers of complete groups and
    /// groups in progress. NetMigrate's formula.
    #[must_use]
    pub fn false_positives(&self, complete: u64, under_way: u64) -> f64 {
        either(
            self.complete.false_positives(complete),
            self.under_way.map_or(0.0, |filter| filter.false_positives(under_way)),
        )
    }

    /// Memory, bytes.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        let counters = match self.under_way {
            Some(filter) => filter.cells,
            None => 0,
        };
        self.complete.cells.div_ceil(64) * 8 + counters
    }

    /// Memory per group, bits.
    #[must_use]
    pub fn bits_per_group(&self, groups: u64) -> f64 {
        self.bytes() as f64 * 8.0 / groups as f64
    }
}

/// Probability of at least one of two independent events.
fn either(one: f64, other: f64) -> f64 {
    1.0 - (1.0 - one) * (1.0 - other)
}

/// Filters with their contents.
#[derive(Clone, Debug)]
pub struct Filters {
    geometry: Geometry,
    bits: Vec<u64>,
    counters: Vec<u8>,
}

impl Filters {
    /// Creates empty filters. A filter has at least one cell, and one per function if partitioned.
    #[must_use]
    pub fn new(mut geometry: Geometry) -> Self {
        for filter in [Some(&mut geometry.complete), geometry.under_way.as_mut()].into_iter().flatten() {
            filter.hashes = filter.hashes.max(1);
            filter.cells = filter.cells.max(u64::from(filter.hashes));
        }
        let counters = geometry.under_way.map_or(0, |filter| filter.cells as usize);
        Self { geometry, bits: vec![0; geometry.complete.cells.div_ceil(64) as usize], counters: vec![0; counters] }
    }

    /// Geometry of the filters.
    #[must_use]
    pub const fn geometry(&self) -> &Geometry {
        &self.geometry
    }
}

impl Tracker for Filters {
    fn start(&mut self, group: Fingerprint) {
        for place in self.geometry.under_way.into_iter().flat_map(|filter| filter.places(group)) {
            self.counters[place] = self.counters[place].saturating_add(1);
        }
    }

    fn complete(&mut self, group: Fingerprint) {
        for place in self.geometry.complete.places(group) {
            self.bits[place / 64] |= 1 << (place % 64);
        }
        for place in self.geometry.under_way.into_iter().flat_map(|filter| filter.places(group)) {
            let counter = &mut self.counters[place];
            if *counter < u8::MAX {
                *counter = counter.saturating_sub(1);
            }
        }
    }

    fn state(&self, group: Fingerprint) -> State {
        let is_complete =
            self.geometry.complete.places(group).all(|place| self.bits[place / 64] & 1 << (place % 64) != 0);
        let is_under_way =
            self.geometry.under_way.is_some_and(|filter| filter.places(group).all(|place| self.counters[place] > 0));
        match (is_complete, is_under_way) {
            (false, false) => State::NotStarted,
            (false, true) => State::InProgress,
            (true, false) => State::Complete,
            (true, true) => State::Unsure,
        }
    }

    fn reset(&mut self) {
        self.bits.fill(0);
        self.counters.fill(0);
    }

    fn bytes(&self) -> usize {
        size_of_val(&self.bits[..]) + self.counters.len()
    }

    fn saturation(&self) -> Saturation {
        let set: u64 = self.bits.iter().map(|word| u64::from(word.count_ones())).sum();
        let complete = set as f64 / self.geometry.complete.cells as f64;
        let counting = self.counters.iter().filter(|counter| **counter > 0).count();
        let under_way = counting as f64 / self.counters.len().max(1) as f64;
        let of_counters = self.geometry.under_way.map_or(0.0, |filter| filter.false_positives_at(under_way));
        Saturation {
            complete,
            under_way,
            stuck: self.counters.iter().filter(|counter| **counter == u8::MAX).count(),
            false_positives: either(self.geometry.complete.false_positives_at(complete), of_counters),
        }
    }
}
