//! Protocols as they were published, wrong where they are wrong: NetMigrate (FAST 2024), Rocksteady and Fulva as
//! NetMigrate's presets have them, and the Bloom telemetry paper. They are here to be measured beside the others, on
//! the same nodes and under the same load.
//!
//! A switch sees each command, and sends it by what a [`Tracker`](super::tracker) says of its *group*: a range of
//! hashes, or (Bloom telemetry) the key itself. Nothing waits for what is in flight, and copies are stored over what is
//! there. [`Published`] is the mover's side of it, and [`Rules`] the switch's.
//!
//! # What is wrong with them
//! Their papers say it, or their authors' code; `docs/design/published-protocols.md` has where.
//! 1. **A copy overwrites a newer write.** A client writes at the target while the key's copy is on its way.
//! 2. **A deleted key comes back.** DELETE removes nothing at the target, and then the copy comes; or a double read
//!    finds the source's value.
//! 3. **A late write overwrites a newer one.** What the source was sent before its group started is shipped afterwards.
//! 4. **A write depends on a value that has not come.** INCR, APPEND and SETNX at the target begin with nothing.
//! 5. **A group goes back to S1.** The counting filter calls a group under way that has not started. When the other
//!    group completes, it does so no more, and what was written at the target meanwhile is not looked for there.
//! 6. **A filter is believed** (Bloom telemetry): a key that the filter has by mistake is nil. A write to the source
//!    after the copy is lost.
//!
//! A router that restarts forgets the tracker; the move then begins again with the first group. There is no way back to
//! the source.

mod leg;

use super::tracker::{Geometry, Kind, Pair, State, group};
use super::{Fingerprint, Protocol};

pub use leg::Published;

/// How a published protocol is set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Paper {
    /// What remembers where groups are.
    pub tracker: Kind,
    /// How many groups. Where each key is one: how many keys are expected.
    pub groups: u32,
    /// Groups that are under way at once (the paper's parallel workers).
    pub at_once: u8,
    /// Bits of the filter for each group.
    pub bits: u8,
    /// Bloom telemetry: what is not in the filter is forwarded to the source. Otherwise everything is asked of the
    /// target alone, the paper's other arm.
    pub forwards: bool,
}

impl Paper {
    /// The protocols that have such a mode, with what their papers set.
    ///
    /// NetMigrate: 2^17 groups for 256 million keys, of which four are under way at once, and 32 bits for each (section
    /// 6.1); a fleet of our size has fewer groups. Bloom telemetry: 125 MB for 50 million keys.
    #[must_use]
    pub const fn of(protocol: Protocol) -> Option<Self> {
        let ranges = Self { tracker: Kind::BloomAndCounting, groups: 1 << 10, at_once: 4, bits: 32, forwards: true };
        match protocol {
            Protocol::NetMigrate => Some(ranges),
            // What they remember they remember exactly.
            Protocol::Rocksteady | Protocol::Fulva => Some(Self { tracker: Kind::Exact, ..ranges }),
            Protocol::Bloom => Some(Self { tracker: Kind::Bloom, groups: 1 << 20, bits: 20, ..ranges }),
            Protocol::Switchyard | Protocol::StopAndCopy | Protocol::Source | Protocol::FreezeAndCopy => None,
        }
    }

    /// The geometry of its filters: so many bits for each group, and 16 counters for each that is under way at one
    /// time.
    #[must_use]
    pub const fn geometry(&self) -> Geometry {
        let mut geometry = Geometry::netmigrate(self.groups as u64, self.at_once as u64);
        geometry.complete.cells = self.groups as u64 * self.bits as u64;
        geometry
    }
}

/// Where a command is sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// To the source.
    Source,
    /// To the target.
    Target,
    /// A read, to both: the target's answer counts where it shows the key, and else the source's.
    Both,
    /// A read, to the target; where that does not have the key it is fetched, and asked again.
    Pull,
}

/// What the switch goes by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rules {
    protocol: Protocol,
    groups: u32,
    forwards: bool,
    repairs: bool,
    pair: Pair,
}

impl Rules {
    /// Those of a protocol. Pairs that share a tracker have different numbers.
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

    /// Whether the tracker is told where it was found to err (what the Bloom telemetry paper leaves to others).
    #[must_use]
    pub const fn repairs(&self) -> bool {
        self.repairs
    }

    /// Whether each key is a group.
    #[must_use]
    pub const fn by_key(&self) -> bool {
        matches!(self.protocol, Protocol::Bloom)
    }

    /// The number of the range that a key belongs to. The papers' groups are adjacent buckets of the source's own hash
    /// table, which an unmodified server does not show: here they are ranges of our own hash, and one SCAN lists them
    /// all.
    #[must_use]
    pub const fn number(&self, key: Fingerprint) -> u32 {
        (((key.0 as u64) as u128 * self.groups as u128) >> 64) as u32
    }

    /// The group of that number.
    #[must_use]
    pub fn range(&self, number: u32) -> Fingerprint {
        group(self.pair, u64::from(number))
    }

    /// A key's group.
    #[must_use]
    pub fn group(&self, key: Fingerprint) -> Fingerprint {
        if self.by_key() { group(self.pair, key.0 as u64) } else { self.range(self.number(key)) }
    }

    /// Of so many double reads one has its key fetched; 0: none.
    #[must_use]
    pub const fn fetches_one_in(&self) -> u32 {
        if matches!(self.protocol, Protocol::Fulva) { super::fulva::FETCH_ONE_IN } else { 0 }
    }

    /// Whether what the source is sent before a group starts is shipped afterwards.
    pub(super) const fn ships_late_writes(&self) -> bool {
        !self.by_key()
    }

    /// Where a command for a key of a group is sent (NetMigrate, section 4.2).
    #[must_use]
    pub const fn way(&self, state: State, writes: bool) -> Way {
        let state = match self.protocol {
            // The target owns everything from the beginning, and pulls what it lacks: the preset in which the filter
            // has all.
            Protocol::Rocksteady => State::Complete,
            // Ownership at once, and both are read: the preset in which everything is under way.
            Protocol::Fulva if !matches!(state, State::Complete) => State::UnderWay,
            Protocol::Bloom if !self.forwards => return Way::Target,
            // A read that finds nothing at the target shows where the filter errs.
            Protocol::Bloom if self.repairs && !writes && matches!(state, State::Complete) => return Way::Pull,
            // It knows nothing but its filter.
            Protocol::Bloom => return if matches!(state, State::Complete) { Way::Target } else { Way::Source },
            _ => state,
        };
        match (state, writes) {
            (State::NotStarted, _) => Way::Source,
            (_, true) => Way::Target,
            (State::UnderWay | State::Unsure, false) => Way::Both,
            (State::Complete, false) if matches!(self.protocol, Protocol::Fulva) => Way::Target,
            (State::Complete, false) => Way::Pull,
        }
    }
}
