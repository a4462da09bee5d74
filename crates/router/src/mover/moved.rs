//! Fingerprints of the keys that a move has moved, for keys that appear at the source afterwards.
//!
//! A list rather than a set: most moves never look up a key, and a set needs several times the memory.

use switchyard_policy::migration::{Fingerprint, FingerprintSet};

/// Fingerprints of moved keys. Sorted at the first lookup.
#[derive(Debug, Default)]
pub(super) struct Moved {
    pub(super) count: usize,
    /// Unsorted, in chunks: a single growing vector would be copied repeatedly and reserve up to twice its size.
    unsorted: Vec<Vec<Fingerprint>>,
    all: FingerprintSet,
}

impl Moved {
    pub(super) fn note(&mut self, mut keys: &[Fingerprint]) {
        self.count += keys.len();
        while !keys.is_empty() {
            if self.unsorted.last().is_none_or(|piece| piece.len() == piece.capacity()) {
                self.unsorted.push(Vec::with_capacity(4096));
            }
            let Some(piece) = self.unsorted.last_mut() else { return };
            let (now, then) = keys.split_at(keys.len().min(piece.capacity() - piece.len()));
            piece.extend_from_slice(now);
            keys = then;
        }
    }

    fn sort(&mut self) {
        self.unsorted.drain(..).for_each(|piece| self.all.extend(piece));
    }

    pub(super) fn forget(&mut self, keys: &[Fingerprint]) {
        self.sort();
        keys.iter().for_each(|key| {
            self.all.remove(key);
        });
    }

    pub(super) fn contains(&mut self, key: Fingerprint) -> bool {
        self.sort();
        self.all.contains(&key)
    }
}
