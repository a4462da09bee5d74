//! The mapping from keys to slots, as a value of the topology.
//!
//! A fleet taken over from twemproxy places its keys by ketama or modula, so the slot of a key depends on the fleet.
//! All code obtains slots from the topology or this value. An enum rather than a trait object, so that the usual case
//! (CRC16) is inlined for every command.

use std::fmt;
use std::sync::Arc;

use super::{Continuum, RuleSet, Ruled, SLOT_COUNT, Scheme, Slot, crc16_slot, slot};

/// Mapping from keys to slots.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Placement {
    /// As in Redis Cluster: CRC16 of the key or its hash tag, 16,384 slots.
    #[default]
    Crc16,
    /// As CRC16, with hash tags by rules for keys without a tag.
    Ruled(Arc<Ruled>),
    /// As in twemproxy: a place on a continuum of servers.
    Continuum(Arc<Continuum>),
}

impl Placement {
    /// Placement of a fleet with its first rule set, which may be empty.
    #[must_use]
    pub fn by_rules(rules: RuleSet) -> Self {
        if rules.is_empty() { Self::Crc16 } else { Self::Ruled(Arc::new(Ruled::first(rules))) }
    }

    /// Slot of a key.
    #[inline]
    #[must_use]
    pub fn slot_of(&self, key: &[u8]) -> Slot {
        match self {
            Self::Crc16 => crc16_slot(key),
            Self::Ruled(ruled) => ruled.slot_of(key),
            Self::Continuum(continuum) => continuum.slot_of(key),
        }
    }

    /// Slot of a sharded channel. Rules are for keys only.
    #[must_use]
    pub fn slot_of_channel(&self, channel: &[u8]) -> Slot {
        match self {
            Self::Crc16 | Self::Ruled(_) => crc16_slot(channel),
            Self::Continuum(continuum) => continuum.slot_of(channel),
        }
    }

    /// Whether the slot of a key never changes.
    #[inline]
    #[must_use]
    pub const fn is_constant(&self) -> bool {
        matches!(self, Self::Crc16)
    }

    /// The hash tag of a key, or its tag by a rule: what determines its slot, if not the whole key.
    #[must_use]
    pub fn hash_tag<'k>(&'k self, key: &'k [u8]) -> Option<&'k [u8]> {
        let part = match self {
            Self::Ruled(ruled) => return ruled.tag(key),
            Self::Crc16 => slot::tagged_part(key, b'{', b'}'),
            Self::Continuum(continuum) => continuum.hashed_part(key),
        };
        (part.len() < key.len()).then_some(part)
    }

    /// Number of slots that can have keys, starting at 0. Higher numbers are free: they have an owner in the array, but
    /// no keys.
    #[inline]
    #[must_use]
    pub fn slots(&self) -> usize {
        match self {
            Self::Crc16 => SLOT_COUNT,
            Self::Ruled(ruled) => ruled.slots(),
            Self::Continuum(continuum) => continuum.slots(),
        }
    }

    /// Whether slots are those of Redis Cluster, with or without rules, so that keys with a common hash tag share one.
    #[inline]
    #[must_use]
    pub const fn is_crc16(&self) -> bool {
        !matches!(self, Self::Continuum(_))
    }

    /// Checks that the placement is this scheme, or CRC16 (`None`).
    ///
    /// # Errors
    /// If not: nearly every key would be searched at the wrong server.
    pub fn check_scheme(&self, wanted: Option<&Scheme>) -> Result<(), OtherPlacement> {
        let stored = self.continuum().map(|continuum| *continuum.scheme());
        if stored.as_ref() == wanted { Ok(()) } else { Err(OtherPlacement { stored, wanted: wanted.copied() }) }
    }

    /// Continuum, if the placement has one.
    #[must_use]
    pub const fn continuum(&self) -> Option<&Arc<Continuum>> {
        match self {
            Self::Crc16 | Self::Ruled(_) => None,
            Self::Continuum(continuum) => Some(continuum),
        }
    }
}

/// The stored placement differs from the configured one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OtherPlacement {
    stored: Option<Scheme>,
    wanted: Option<Scheme>,
}

impl fmt::Display for OtherPlacement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |scheme: &Option<Scheme>| {
            scheme.map_or_else(|| "CRC16, as Redis Cluster does".to_owned(), |scheme| scheme.to_string())
        };
        write!(
            f,
            "by the state directory, this fleet places its keys by {}, but by the configuration by {}: nearly every key would be searched at another \
             server. Restore the first, or use another state directory (--state-dir) for another fleet",
            shown(&self.stored),
            shown(&self.wanted)
        )
    }
}

impl std::error::Error for OtherPlacement {}
