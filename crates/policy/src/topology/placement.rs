//! How a key becomes a slot: a value that a topology has, and not a function of the program.
//!
//! A fleet that was twemproxy's has its keys where ketama or modula put them, so "the slot of a key" has several
//! answers. Whoever needs a slot asks the topology, or this value of it: an enum and not a trait object, so that the
//! usual answer (CRC16) stays inlined on the path of every command.

use std::fmt;
use std::sync::Arc;

use super::{Continuum, SLOT_COUNT, Scheme, Slot, crc16_slot, slot};

/// How a fleet's keys become slots.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Placement {
    /// As Redis Cluster does: CRC16 of the key or of its hash tag, and 16,384 slots.
    #[default]
    Crc16,
    /// As twemproxy does: a place on a continuum of servers.
    Continuum(Arc<Continuum>),
}

impl Placement {
    /// The slot of a key (or channel).
    #[inline]
    #[must_use]
    pub fn slot_of(&self, key: &[u8]) -> Slot {
        match self {
            Self::Crc16 => crc16_slot(key),
            Self::Continuum(continuum) => continuum.slot_of(key),
        }
    }

    /// The part of a key that alone decides its slot, if that is not all of it.
    #[must_use]
    pub fn hash_tag<'k>(&self, key: &'k [u8]) -> Option<&'k [u8]> {
        let part = match self {
            Self::Crc16 => slot::tagged_part(key, b'{', b'}'),
            Self::Continuum(continuum) => continuum.hashed_part(key),
        };
        (part.len() < key.len()).then_some(part)
    }

    /// So many slots from the first can have keys. The others are free numbers: they have an owner in the array, and no
    /// key.
    #[inline]
    #[must_use]
    pub fn slots(&self) -> usize {
        match self {
            Self::Crc16 => SLOT_COUNT,
            Self::Continuum(continuum) => continuum.slots(),
        }
    }

    /// Whether slots are those of Redis Cluster, so that code of clients may rely on keys with a common hash tag
    /// sharing one.
    #[inline]
    #[must_use]
    pub const fn is_crc16(&self) -> bool {
        matches!(self, Self::Crc16)
    }

    /// Whether it may serve the keys of a fleet that wants this scheme, or CRC16 (`None`).
    ///
    /// # Errors
    /// If it is another one: then nearly every key would be looked for at another server than the one that has it.
    pub fn is_wanted(&self, wanted: Option<&Scheme>) -> Result<(), OtherPlacement> {
        let stored = self.continuum().map(|continuum| *continuum.scheme());
        if stored.as_ref() == wanted { Ok(()) } else { Err(OtherPlacement { stored, wanted: wanted.copied() }) }
    }

    /// Its continuum, if it has one.
    #[must_use]
    pub const fn continuum(&self) -> Option<&Arc<Continuum>> {
        match self {
            Self::Crc16 => None,
            Self::Continuum(continuum) => Some(continuum),
        }
    }
}

/// A fleet places its keys in another way than is wanted now.
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
            "the state directory says that this fleet places its keys by {}, and the configuration wants {}: nearly every key would be looked for at another \
             server. Go back to the first, or use another state directory (--state-dir) for another fleet",
            shown(&self.stored),
            shown(&self.wanted)
        )
    }
}

impl std::error::Error for OtherPlacement {}
