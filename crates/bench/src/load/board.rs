//! Versions of keys with one writer and many readers: bounds for the result of each read.
//!
//! A shared key is linearizable if there is one order of its commands. With one writer and increasing versions, this is
//! easy to check. After a version was acknowledged or read, each read sent later returns this version or a newer one.
//! No read returns a version that the writer has not sent.

use std::sync::atomic::{AtomicU32, Ordering};

/// Versions by key; 0 is nil.
#[derive(Debug)]
pub struct Board(Vec<Versions>);

#[derive(Debug, Default)]
struct Versions {
    /// Newest version sent.
    begun: AtomicU32,
    /// Newest version acknowledged or read.
    seen: AtomicU32,
}

impl Board {
    /// Creates the board for `keys` keys, none of which exists.
    pub fn new(keys: u64) -> Self {
        Self((0..keys).map(|_| Versions::default()).collect())
    }

    /// Records a version before it is sent.
    pub(super) fn begin(&self, key: usize, version: u32) {
        if let Some(versions) = self.0.get(key) {
            versions.begun.fetch_max(version, Ordering::SeqCst);
        }
    }

    /// Newest version sent.
    pub(super) fn begun(&self, key: usize) -> u32 {
        self.0.get(key).map_or(0, |versions| versions.begun.load(Ordering::SeqCst))
    }

    /// Records a version as acknowledged or read.
    pub(super) fn see(&self, key: usize, version: u32) {
        if let Some(versions) = self.0.get(key) {
            versions.seen.fetch_max(version, Ordering::SeqCst);
        }
    }

    /// Newest version acknowledged or read: the minimum for a read sent now.
    pub(super) fn seen(&self, key: usize) -> u32 {
        self.0.get(key).map_or(0, |versions| versions.seen.load(Ordering::SeqCst))
    }
}
