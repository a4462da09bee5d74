//! A Bloom filter of groups that are complete, and a counting one of those under way (NetMigrate, FAST 2024, section
//! 4.2); or the first alone (the Bloom telemetry paper, where a group is a key).
//!
//! Written here and not taken from a crate: the geometry has to be the published one to the cell, and policy has no
//! dependencies.

use super::{Saturation, State, Tracker, wang};
use crate::migration::Fingerprint;

/// Where the cells of the hash functions are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Layout {
    /// All functions use all cells.
    Shared,
    /// Each function has cells of its own, as many as the others: a switch reads each of its arrays once for a packet.
    Partitioned,
}

/// The geometry of one filter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Filter {
    /// How many cells: bits, or counters of eight bits.
    pub cells: u64,
    /// How many hash functions.
    pub hashes: u32,
    /// Where their cells are.
    pub layout: Layout,
}

impl Filter {
    const fn shared(cells: u64) -> Self {
        Self { cells, hashes: 4, layout: Layout::Shared }
    }

    /// How often a group that was not added is found in it when so many were.
    #[must_use]
    pub fn false_positives(self, groups: u64) -> f64 {
        let added = f64::from(self.hashes) * groups as f64 / self.cells as f64;
        self.false_positives_at(-(-added).exp_m1())
    }

    /// The same where that share of its cells is set.
    fn false_positives_at(self, share: f64) -> f64 {
        share.powi(self.hashes as i32)
    }

    /// The cells of a group.
    fn places(self, group: Fingerprint) -> impl Iterator<Item = usize> {
        let (low, high) = (group.0 as u64, (group.0 >> 64) as u64);
        (0..u64::from(self.hashes)).map(move |number| {
            let hash = u128::from(wang(wang(low ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15)) ^ high));
            // Without a remainder: the upper bits of the hash say which part of the cells it is.
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

/// The geometry of both.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Bits.
    pub complete: Filter,
    /// Counters; `None`: what is under way is not known.
    pub under_way: Option<Filter>,
}

impl Geometry {
    /// NetMigrate's default: 512 KB of bits and 1024 KB of counters, for 2^17 groups.
    pub const NETMIGRATE: Self = Self { complete: Filter::shared(1 << 22), under_way: Some(Filter::shared(1 << 20)) };

    /// What NetMigrate's published code has: four arrays of 32,768 bits, and four of 16 counters. The worst row of its
    /// Table 2.
    pub const NETMIGRATE_SHIPPED: Self = Self {
        complete: Filter { cells: 1 << 17, hashes: 4, layout: Layout::Partitioned },
        under_way: Some(Filter { cells: 1 << 6, hashes: 4, layout: Layout::Partitioned }),
    };

    /// The Bloom telemetry paper's: 125 MB, for 50 million keys. How many hash functions it has is not said.
    pub const BLOOM_TELEMETRY: Self = Self { complete: Filter::shared(1_000_000_000), under_way: None };

    /// NetMigrate's rule: sixteen cells for each group, and sixteen for each that is under way at one time.
    #[must_use]
    pub const fn netmigrate(groups: u64, at_once: u64) -> Self {
        Self { complete: Filter::shared(16 * groups), under_way: Some(Filter::shared(16 * at_once)) }
    }

    /// How often a group that has not started is called something else, when so many are complete and so many under
    /// way. NetMigrate's formula.
    #[must_use]
    pub fn false_positives(&self, complete: u64, under_way: u64) -> f64 {
        either(
            self.complete.false_positives(complete),
            self.under_way.map_or(0.0, |filter| filter.false_positives(under_way)),
        )
    }

    /// Bytes of memory.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        let counters = match self.under_way {
            Some(filter) => filter.cells,
            None => 0,
        };
        self.complete.cells.div_ceil(64) * 8 + counters
    }

    /// Bits of memory for each of so many groups.
    #[must_use]
    pub fn bits_per_group(&self, groups: u64) -> f64 {
        self.bytes() as f64 * 8.0 / groups as f64
    }
}

/// One of two things that do not depend on each other.
fn either(one: f64, other: f64) -> f64 {
    1.0 - (1.0 - one) * (1.0 - other)
}

/// The filters.
#[derive(Clone, Debug)]
pub struct Filters {
    geometry: Geometry,
    bits: Vec<u64>,
    counters: Vec<u8>,
}

impl Filters {
    /// Empty ones. A filter has one cell at least, and one for each function where they are partitioned.
    #[must_use]
    pub fn new(mut geometry: Geometry) -> Self {
        for filter in [Some(&mut geometry.complete), geometry.under_way.as_mut()].into_iter().flatten() {
            filter.hashes = filter.hashes.max(1);
            filter.cells = filter.cells.max(u64::from(filter.hashes));
        }
        let counters = geometry.under_way.map_or(0, |filter| filter.cells as usize);
        Self { geometry, bits: vec![0; geometry.complete.cells.div_ceil(64) as usize], counters: vec![0; counters] }
    }

    /// Their geometry.
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
            (false, true) => State::UnderWay,
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
