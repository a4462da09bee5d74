//! Versions of keys that one connection writes and others read: what a read must see at least, and may see at most.
//!
//! A key that all may use is linearizable if there is one order of its commands. With one writer, whose versions grow,
//! that is easy to check. Once a version was acknowledged or read, each read that is sent later gives it or a newer
//! one. No read gives a version that the writer has not sent.

use std::sync::atomic::{AtomicU32, Ordering};

/// The versions of each key; 0 is nil.
#[derive(Debug)]
pub struct Board(Vec<Versions>);

#[derive(Debug, Default)]
struct Versions {
    /// The newest that was sent.
    begun: AtomicU32,
    /// The newest that was acknowledged or read.
    seen: AtomicU32,
}

impl Board {
    /// For so many keys, none of which exists.
    pub fn new(keys: u64) -> Self {
        Self((0..keys).map(|_| Versions::default()).collect())
    }

    /// A version is about to be sent.
    pub(super) fn begin(&self, key: usize, version: u32) {
        if let Some(versions) = self.0.get(key) {
            versions.begun.fetch_max(version, Ordering::SeqCst);
        }
    }

    /// The newest that was sent.
    pub(super) fn begun(&self, key: usize) -> u32 {
        self.0.get(key).map_or(0, |versions| versions.begun.load(Ordering::SeqCst))
    }

    /// A version was acknowledged or read.
    pub(super) fn see(&self, key: usize, version: u32) {
        if let Some(versions) = self.0.get(key) {
            versions.seen.fetch_max(version, Ordering::SeqCst);
        }
    }

    /// The newest that was acknowledged or read: a read that is sent now must not give an older one.
    pub(super) fn seen(&self, key: usize) -> u32 {
        self.0.get(key).map_or(0, |versions| versions.seen.load(Ordering::SeqCst))
    }
}
