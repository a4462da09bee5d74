//! Which keys of each node are used most: what SwitchKV's trackers report (NSDI 2016, section 3.3).
//!
//! - [`Segment`] counts what one worker sends to one node in one segment of time, a second say. It knows a bounded
//!   number of keys, and costs the same for each use.
//! - [`Board`] adds the segments of all workers, and weighs them over time: the paper's periodic report.
//! - [`Recent`] has the last commands of one worker to one node, and notices a key among them at once: the paper's
//!   instant report.
//!
//! Workers share no counters. Each fills segments of its own, and hands them over when they end.
//!
//! A key is a hash here, of its name and its database ([`Identity`]). Whoever calls makes it with a seed of his own, so
//! that nobody can make keys that fall together. The name is kept for people, as far as it is short.
//!
//! What a hot copy answers counts for the key, and not for the node.
//!
//! Not a count-min sketch, nor HeavyKeeper: those say how often a given key was used, and have to be asked with its
//! name. Space-saving holds the keys, and what it says of one is never more than was seen.

mod board;
mod recent;
mod segment;

pub use board::{Board, Hot, HotNode, Rates, Weights};
pub use recent::{Notices, Recent};
pub use segment::{AccessKind, Counted, Counts, KeyAccess, Segment};

/// Which key is used: a name in a database.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Identity<'k> {
    /// What stands for both.
    pub hash: u64,
    /// The database.
    pub database: u32,
    /// The name.
    pub key: &'k [u8],
}

impl<'k> Identity<'k> {
    /// Of a key whose name has this hash, in any database. In the first one it keeps it.
    #[must_use]
    pub const fn new(hash_of_name: u64, database: u32, key: &'k [u8]) -> Self {
        // Only whoever knows the seed of the hash can make names that fall together, here too.
        Self { hash: hash_of_name ^ (database as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15), database, key }
    }
}

impl std::fmt::Debug for Identity<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x} in database {}", self.hash, self.database)
    }
}

/// Bytes of a name that are kept. Of a longer one nothing is: half a name is no key.
pub const NAME_MAX: usize = 64;

/// The name of a key, without an allocation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Name {
    bytes: [u8; NAME_MAX],
    len: u8,
}

impl Name {
    /// None is kept.
    pub const NONE: Self = Self { bytes: [0; NAME_MAX], len: 0 };

    /// That of a key.
    #[must_use]
    pub fn of(key: &[u8]) -> Self {
        let mut name = Self::NONE;
        if let Some(place) = name.bytes.get_mut(..key.len()) {
            place.copy_from_slice(key);
            name.len = key.len() as u8;
        }
        name
    }

    /// The key, where it is kept. One without any bytes is not told apart from one that is too long.
    #[must_use]
    pub fn key(&self) -> Option<&[u8]> {
        Some(&self.bytes[..usize::from(self.len)]).filter(|key| !key.is_empty())
    }
}

impl std::fmt::Debug for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Names of keys do not belong into logs.
        write!(f, "a name of {} bytes", self.len)
    }
}
