//! The load of a fleet as it was measured: the one value by which planner, autoscaler and simulator decide.
//!
//! The router counts ([`SlotCount`], and its own counters of nodes); control takes two looks and makes rates of them. Nothing here knows where the numbers come from, so
//! a simulator fills the same value.
//!
//! Rates are for each second. `None`: nobody has said, or it is too long ago.

use std::collections::BTreeMap;

use crate::telemetry::HotNode;
use crate::topology::{NodeId, SLOT_COUNT, Slot};

/// Times from sending a command to its answer, microseconds, without commands that may wait at the node.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Answers {
    /// The mean.
    pub mean_us: f64,
    /// Half of them took no longer, to within a fifth.
    pub p50_us: u64,
    /// 99 of 100 took no longer, to within a fifth.
    pub p99_us: u64,
}

/// The load of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct NodeLoad {
    /// Commands sent to it.
    pub requests: Option<f64>,
    /// Its answers. None also if nothing was answered.
    pub answers: Option<Answers>,
    /// Commands sent and not yet answered.
    pub in_flight: u64,
    /// Processors that its server keeps busy: 1.0 is one.
    pub cpu: Option<f64>,
    /// Bytes that the server uses.
    pub memory: Option<u64>,
    /// Bytes that it may use; 0: no limit.
    pub memory_max: Option<u64>,
    /// Keys in all its databases.
    pub keys: Option<u64>,
    /// Keys evicted for want of memory.
    pub evictions: Option<f64>,
    /// Its clients, those of the router among them.
    pub clients: Option<u64>,
    /// Bytes that its slowest replica is behind.
    pub replica_lag: Option<u64>,
}

/// Commands that concern a slot, counted since the router's start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotCount {
    /// Uses of its keys.
    pub commands: u64,
    /// Uses that may write, of these.
    pub writes: u64,
    /// Bytes of commands and answers.
    pub bytes: u64,
}

impl SlotCount {
    /// Both together.
    pub fn add(&mut self, other: Self) {
        self.commands += other.commands;
        self.writes += other.writes;
        self.bytes += other.bytes;
    }
}

/// The load of a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SlotLoad {
    /// Uses of its keys.
    pub commands: f64,
    /// Uses that may write, of these.
    pub writes: f64,
    /// Bytes of commands and answers.
    pub bytes: f64,
}

/// The rates of all slots, weighed over time as those of keys are ([`crate::telemetry::Weights`]).
#[derive(Clone, Debug)]
pub struct SlotRates {
    before: Vec<SlotCount>,
    rates: Vec<SlotLoad>,
}

impl Default for SlotRates {
    fn default() -> Self {
        Self { before: vec![SlotCount::default(); SLOT_COUNT], rates: vec![SlotLoad::default(); SLOT_COUNT] }
    }
}

impl SlotRates {
    /// Share of the newest look. A slot is one of many and its count a sample, so it is smaller than that of keys: the last ten seconds count.
    const NEWEST: f64 = 0.2;

    /// All slots were counted again, so many seconds after the last time. `counts` has a place for each slot; a count that fell has begun anew.
    pub fn counted(&mut self, counts: Vec<SlotCount>, seconds: f64) {
        if counts.len() != SLOT_COUNT || seconds <= 0.0 {
            return;
        }
        for ((rate, before), now) in self.rates.iter_mut().zip(&self.before).zip(&counts) {
            let weigh = |rate: &mut f64, before: u64, now: u64| {
                *rate += Self::NEWEST * (now.saturating_sub(before) as f64 / seconds - *rate);
            };
            weigh(&mut rate.commands, before.commands, now.commands);
            weigh(&mut rate.writes, before.writes, now.writes);
            weigh(&mut rate.bytes, before.bytes, now.bytes);
        }
        self.before = counts;
    }

    /// By slot.
    #[must_use]
    pub fn rates(&self) -> &[SlotLoad] {
        &self.rates
    }
}

/// All that is known of a fleet's load.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ObservedLoad {
    /// Each node of the fleet.
    pub nodes: BTreeMap<NodeId, NodeLoad>,
    /// Each slot; none before they were counted twice.
    pub slots: Vec<SlotLoad>,
    /// The keys that are used most, by node.
    pub keys: Vec<HotNode>,
}

impl ObservedLoad {
    /// The load of a slot.
    #[must_use]
    pub fn slot(&self, slot: Slot) -> SlotLoad {
        self.slots.get(slot.index()).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_have_rates_that_follow_the_load() {
        let mut rates = SlotRates::default();
        let mut counts = vec![SlotCount::default(); SLOT_COUNT];
        for _ in 0..40 {
            counts[7].add(SlotCount { commands: 500, writes: 100, bytes: 9000 });
            rates.counted(counts.clone(), 0.5);
        }
        let SlotLoad { commands, writes, bytes } = rates.rates()[7];
        assert!(
            (commands - 1000.0).abs() < 1.0 && (writes - 200.0).abs() < 1.0 && (bytes - 18_000.0).abs() < 10.0,
            "{commands} {writes} {bytes}"
        );
        assert_eq!(rates.rates()[8], SlotLoad::default());
        // A router that began anew counts from nothing.
        rates.counted(vec![SlotCount::default(); SLOT_COUNT], 0.5);
        assert!(rates.rates()[7].commands < commands);
        for _ in 0..60 {
            rates.counted(counts.clone(), 0.5);
        }
        assert!(rates.rates()[7].commands < 1.0);
    }
}
