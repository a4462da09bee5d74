//! Protocols as published, including their flaws: NetMigrate (FAST 2024), Rocksteady and Fulva as in NetMigrate's
//! presets, and the Bloom telemetry paper. They exist for comparison with the others, on the same nodes and under the
//! same load.
//!
//! A switch routes each command by the [`Tracker`](super::tracker) state of its *group*: a range of hashes, or (Bloom
//! telemetry) the key itself. Nothing waits for commands in flight, and copies overwrite existing keys. [`Published`]
//! is the mover's side, [`Rules`] the switch's.
//!
//! # Flaws
//! All are stated in the papers or visible in the authors' code; see `docs/design/published-protocols.md`.
//! 1. **A copy overwrites a newer write.** A client writes at the target while the key's copy is in flight.
//! 2. **A deleted key returns.** DELETE removes nothing at the target, then the copy arrives; or a double read finds
//!    the source's value.
//! 3. **A late write overwrites a newer one.** Writes sent to the source before their group started are shipped
//!    afterwards.
//! 4. **A write depends on a value that has not arrived.** INCR, APPEND and SETNX at the target start without it.
//! 5. **A group returns to S1.** The counting filter reports a group as in progress that has not started. This ends
//!    when the other group completes; then writes made at the target in between are not found.
//! 6. **The filter is trusted** (Bloom telemetry): a key that is a false positive is nil. A write to the source after
//!    the copy is lost.
//!
//! Compiled only with the feature `research`; `unpublished.rs` replaces this module in the product.
//!
//! A router that restarts loses the tracker; the move then restarts with the first group. There is no rollback.

mod leg;
mod source_ops;

use super::record::OpenLeg;
use super::tracker::{Geometry, Kind, Pair, State, Tracker, group};
use super::{Fingerprint, Fingerprinter, LegOrder, Machine, Protocol};
use crate::topology::MoveId;

pub use super::view::Way;
pub use leg::Published;
pub use source_ops::SourceShare;

/// Settings of a published protocol.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Paper {
    /// Tracker of the groups' state.
    pub tracker: Kind,
    /// Number of groups, or of expected keys if each key is a group.
    pub groups: u32,
    /// Groups in progress at a time (the paper's parallel workers).
    pub at_once: u8,
    /// Filter bits per group.
    pub bits: u8,
    /// Size of the counting filter of groups in progress, bytes; each counter has one. `None`: 16 for each of these
    /// groups.
    pub counting_bytes: Option<u32>,
    /// Bloom telemetry: keys not in the filter are forwarded to the source. Otherwise all commands go to the target,
    /// the paper's other variant.
    pub forwards: bool,
}

impl Paper {
    /// Returns the settings of a protocol that has a published mode.
    ///
    /// NetMigrate: 2^17 groups for 256 million keys, four groups in progress at a time, and 32 bits for each (section
    /// 6.1); our fleets need fewer groups. Bloom telemetry: 125 MB for 50 million keys.
    #[must_use]
    pub const fn of(protocol: Protocol) -> Option<Self> {
        let ranges = Self {
            tracker: Kind::BloomAndCounting,
            groups: 1 << 10,
            at_once: 4,
            bits: 32,
            counting_bytes: None,
            forwards: true,
        };
        match protocol {
            Protocol::NetMigrate => Some(ranges),
            // Their trackers are exact.
            Protocol::Rocksteady | Protocol::Fulva => Some(Self { tracker: Kind::Exact, ..ranges }),
            Protocol::Bloom => Some(Self { tracker: Kind::Bloom, groups: 1 << 20, bits: 20, ..ranges }),
            Protocol::Switchyard | Protocol::StopAndCopy | Protocol::Source | Protocol::FreezeAndCopy => None,
        }
    }

    /// Returns the filter geometry: `bits` for each group, and `counting_bytes` counters.
    #[must_use]
    pub const fn geometry(&self) -> Geometry {
        let mut geometry = Geometry::netmigrate(self.groups as u64, self.at_once as u64);
        geometry.complete.cells = self.groups as u64 * self.bits as u64;
        if let (Some(bytes), Some(counting)) = (self.counting_bytes, &mut geometry.under_way) {
            counting.cells = bytes as u64;
        }
        geometry
    }

    /// Returns the routing rules of a move.
    #[must_use]
    pub const fn rules(&self, protocol: Protocol, move_id: MoveId) -> Rules {
        Rules::new(protocol, self, Pair::of(move_id))
    }

    /// Creates an empty tracker.
    #[must_use]
    pub fn tracker(&self) -> Box<dyn Tracker> {
        self.tracker.tracker(self.geometry())
    }

    /// Creates the machine of a leg, with the open leg of an earlier router.
    pub(super) fn machine(
        &self,
        protocol: Protocol,
        orders: LegOrder,
        fingerprints: Fingerprinter,
        resume: Option<&OpenLeg>,
    ) -> Box<dyn Machine> {
        let rules = self.rules(protocol, orders.move_id);
        Box::new(Published::new(orders, self, rules, fingerprints, resume))
    }
}

/// Routing rules of the switch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rules {
    protocol: Protocol,
    groups: u32,
    forwards: bool,
    repairs: bool,
    pair: Pair,
}

impl Rules {
    /// Creates the rules of a protocol. Pairs that share a tracker have different numbers.
    #[must_use]
    pub const fn new(protocol: Protocol, paper: &Paper, pair: Pair) -> Self {
        let repairs = matches!((protocol, paper.tracker), (Protocol::NetMigrate | Protocol::Bloom, Kind::Adaptive));
        Self {
            protocol,
            groups: if paper.groups == 0 { 1 } else { paper.groups },
            forwards: paper.forwards,
            repairs,
            pair,
        }
    }

    /// Whether errors found in the tracker are corrected (which the Bloom telemetry paper does not specify).
    #[must_use]
    pub const fn repairs(&self) -> bool {
        self.repairs
    }

    /// Whether each key is a group.
    #[must_use]
    pub const fn by_key(&self) -> bool {
        matches!(self.protocol, Protocol::Bloom)
    }

    /// Returns the number of the key's range. The papers' groups are adjacent buckets of the source's hash table, which
    /// an unmodified server does not expose. Here they are ranges of the fingerprint, and one SCAN lists all of them.
    #[must_use]
    pub const fn number(&self, key: Fingerprint) -> u32 {
        (((key.0 as u64) as u128 * self.groups as u128) >> 64) as u32
    }

    /// Returns the group of a range number.
    #[must_use]
    pub fn range(&self, number: u32) -> Fingerprint {
        group(self.pair, u64::from(number))
    }

    /// Returns the group of a key.
    #[must_use]
    pub fn group(&self, key: Fingerprint) -> Fingerprint {
        if self.by_key() { group(self.pair, key.0 as u64) } else { self.range(self.number(key)) }
    }

    /// Fetch rate of double reads: every n-th has its key fetched; 0: none.
    #[must_use]
    pub const fn fetches_one_in(&self) -> u32 {
        if matches!(self.protocol, Protocol::Fulva) { super::fulva::FETCH_ONE_IN } else { 0 }
    }

    /// Whether writes sent to the source before their group starts are shipped afterwards.
    pub(super) const fn ships_late_writes(&self) -> bool {
        !self.by_key()
    }

    /// Returns the destination of a command for a key of a group (NetMigrate, section 4.2).
    #[must_use]
    pub const fn route(&self, state: State, writes: bool) -> Way {
        let state = match self.protocol {
            // The target owns all keys from the start, and pulls those it lacks: the preset with all groups in the
            // filter.
            Protocol::Rocksteady => State::Complete,
            // Ownership moves at once, and both nodes are read: the preset with all groups in progress.
            Protocol::Fulva if !matches!(state, State::Complete) => State::InProgress,
            Protocol::Bloom if !self.forwards => return Way::Target,
            // A read that finds nothing at the target reveals an error of the filter.
            Protocol::Bloom if self.repairs && !writes && matches!(state, State::Complete) => return Way::Pull,
            // The filter is the only state.
            Protocol::Bloom => return if matches!(state, State::Complete) { Way::Target } else { Way::Source },
            _ => state,
        };
        match (state, writes) {
            (State::NotStarted, _) => Way::Source,
            (_, true) => Way::Target,
            (State::InProgress | State::Unsure, false) => Way::Both,
            (State::Complete, false) if matches!(self.protocol, Protocol::Fulva) => Way::Target,
            (State::Complete, false) => Way::Pull,
        }
    }
}
