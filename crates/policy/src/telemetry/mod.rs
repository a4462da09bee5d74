//! Finds the hottest keys of each node, as SwitchKV's trackers do (NSDI 2016, section 3.3).
//!
//! - [`Segment`] counts the commands of one worker to one node during one segment, such as a second. It holds a limited
//!   number of keys, and each use has constant cost.
//! - [`Board`] aggregates the segments of all workers over time: the paper's periodic report.
//! - [`Recent`] holds the last commands of one worker to one node, and detects a frequent key immediately: the paper's
//!   instant report.
//!
//! Workers share no counters. Each fills its own segments and delivers them at their end.
//!
//! A key is represented by a hash of its name and database ([`Identity`]). The caller's seed is secret, so clients
//! cannot construct collisions. Short names are kept for display.
//!
//! A hit counts for the key, but not for the node.
//!
//! Space-saving rather than a count-min sketch or HeavyKeeper: those return the count of a given key and do not list
//! keys. The observed count of a key is never too high.

mod board;
mod recent;
mod segment;

pub use board::{Board, Bug, HotKey, HotNode, Rates, Weights};
pub use recent::{Notices, Recent};
pub use segment::{AccessKind, Counted, Counts, KeyAccess, Segment};

/// A key: a name in a database.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Identity<'k> {
    /// Hash of name and database.
    pub hash: u64,
    /// Database number.
    pub database: u32,
    /// Key name.
    pub key: &'k [u8],
}

impl<'k> Identity<'k> {
    /// Creates the identity of a key with this name hash. In database 0 the hash stays the same.
    #[must_use]
    pub const fn new(hash_of_name: u64, database: u32, key: &'k [u8]) -> Self {
        // Without the secret seed of the name hash, collisions cannot be constructed here either.
        Self { hash: hash_of_name ^ (database as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15), database, key }
    }
}

impl std::fmt::Debug for Identity<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x} in database {}", self.hash, self.database)
    }
}

/// Maximum stored name, in bytes. Longer names are omitted, because a truncated name would be another key.
pub const NAME_MAX: usize = 64;

/// Key name, stored inline.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Name {
    bytes: [u8; NAME_MAX],
    len: u8,
}

impl Name {
    /// No name.
    pub const NONE: Self = Self { bytes: [0; NAME_MAX], len: 0 };

    /// Name of a key, or [`Self::NONE`] if too long.
    #[must_use]
    pub fn of(key: &[u8]) -> Self {
        let mut name = Self::NONE;
        if let Some(place) = name.bytes.get_mut(..key.len()) {
            place.copy_from_slice(key);
            name.len = key.len() as u8;
        }
        name
    }

    /// The name, if stored. An empty name is returned as `None` too.
    #[must_use]
    pub fn key(&self) -> Option<&[u8]> {
        Some(&self.bytes[..usize::from(self.len)]).filter(|key| !key.is_empty())
    }
}

impl std::fmt::Debug for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Key names must not appear in logs.
        write!(f, "a name of {} bytes", self.len)
    }
}
