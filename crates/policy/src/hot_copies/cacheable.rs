//! The cacheable keys: one set for all workers, versioned by generation.

use std::collections::BTreeMap;
#[expect(
    clippy::disallowed_types,
    reason = "with a hasher of our own their order is the same in every run, and nothing depends on it"
)]
use std::collections::HashMap;
use std::hash::BuildHasherDefault;

use super::GateId;
use crate::migration::FingerprintHasher;
use crate::telemetry::Identity;
use crate::topology::Slot;

/// Map by key hash.
#[expect(clippy::disallowed_types, reason = "as above")]
pub(super) type ByHash<V> = HashMap<u64, V, BuildHasherDefault<FingerprintHasher>>;

/// Converts between the hash of a key name and the hash of the key in `database`.
#[must_use]
pub fn hash_of_name(hash: u64, database: u32) -> u64 {
    // The step is its own inverse.
    Identity::new(hash, database, b"").hash
}

/// A cacheable key. Every write of the key raises its gate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheableKeys {
    /// Slot of the key.
    pub slot: Slot,
    /// Generation in which the key became cacheable.
    pub since: u64,
}

/// The cacheable keys by name hash. A name used in several databases is one key here.
#[derive(Clone, Debug, Default)]
pub struct CacheableSet {
    generation: u64,
    keys: ByHash<CacheableKeys>,
    by_slot: BTreeMap<Slot, Vec<u64>>,
}

impl CacheableSet {
    /// Number of this set. Increases with each set.
    #[must_use]
    pub const fn generation(&self) -> u64 {
        self.generation
    }

    /// Whether no key is cacheable.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Number of keys.
    #[must_use]
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Returns the key with this hash, if cacheable.
    #[inline]
    #[must_use]
    pub fn get(&self, hash: u64) -> Option<&CacheableKeys> {
        self.keys.get(&hash)
    }

    /// All keys, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &CacheableKeys)> {
        self.keys.iter().map(|(hash, armed)| (*hash, armed))
    }

    /// Gates of the keys in a slot, which a script for the slot may write.
    pub fn gates_in(&self, slot: Slot) -> impl Iterator<Item = GateId> + '_ {
        self.by_slot.get(&slot).into_iter().flatten().map(|hash| GateId::of_key(*hash))
    }

    /// Returns the next generation: without `less`, then with `more`. A key already present keeps its `since`.
    #[must_use]
    pub fn next(&self, more: impl IntoIterator<Item = (u64, Slot)>, less: impl IntoIterator<Item = u64>) -> Self {
        let mut next = Self { generation: self.generation + 1, ..self.clone() };
        for hash in less {
            next.keys.remove(&hash);
        }
        for (hash, slot) in more {
            next.keys.entry(hash).or_insert(CacheableKeys { slot, since: next.generation });
        }
        next.by_slot.clear();
        for (hash, armed) in &next.keys {
            next.by_slot.entry(armed.slot).or_default().push(*hash);
        }
        next
    }

    /// Returns the next generation with the same keys as if they were new. Used with new gates after a worker panic:
    /// gates raised by the lost worker would never be lowered.
    #[must_use]
    pub fn renewed(&self) -> Self {
        let empty = Self { generation: self.generation, ..Self::default() };
        empty.next(self.iter().map(|(hash, armed)| (hash, armed.slot)), [])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(number: u16) -> Slot {
        Slot::new(number).expect("a slot")
    }

    #[test]
    fn a_key_that_stays_keeps_the_generation_in_which_it_came() {
        let first = CacheableSet::default().next([(7, slot(1)), (8, slot(2))], []);
        let second = first.next([(7, slot(1)), (9, slot(1))], [8]);
        assert_eq!((first.generation(), second.generation()), (1, 2));
        assert_eq!(second.get(7), Some(&CacheableKeys { slot: slot(1), since: 1 }));
        assert_eq!(second.get(9), Some(&CacheableKeys { slot: slot(1), since: 2 }));
        assert_eq!((second.get(8), second.len()), (None, 2));
        assert_eq!((second.gates_in(slot(1)).count(), second.gates_in(slot(2)).count()), (2, 0));
        assert!(second.next([], [7, 9]).is_empty());
        assert!(second.renewed().iter().all(|(_, armed)| armed.since == 3));
    }

    #[test]
    fn a_key_that_is_removed_and_added_again_is_new() {
        let back = CacheableSet::default().next([(7, slot(1))], []).next([], [7]).next([(7, slot(1))], []);
        assert_eq!(back.get(7).map(|armed| armed.since), Some(3));
    }

    #[test]
    fn a_name_has_one_hash_in_all_databases() {
        for database in [0, 1, 15] {
            assert_eq!(hash_of_name(Identity::new(77, database, b"k").hash, database), 77);
        }
    }
}
