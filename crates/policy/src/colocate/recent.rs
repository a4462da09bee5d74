//! Keys that were brought together recently. A request that takes one of them elsewhere takes its whole group along, so
//! commands with common keys do not move a key back and forth.
//!
//! Not stored: after a restart, one more move per group can be necessary. Groups of commands that find their keys
//! together are unknown here, because such commands send no request.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Time for which a group is remembered after its last move, milliseconds. Two groups with a common key exchange it at
/// most once in this time, because a request within it merges them.
const KEPT_MS: u64 = 60_000;

/// Maximum number of remembered keys. The groups with the oldest moves are forgotten first.
const KEYS_MAX: usize = 65_536;

/// Maximum number of keys of a group. When one of them moves, the others move along.
pub(super) const GROUP_KEYS_MAX: usize = 1024;

/// Maximum length of a remembered name, in bytes. It bounds the memory.
const NAME_BYTES_MAX: usize = 1024;

/// Keys of a group.
type Group = BTreeSet<Arc<[u8]>>;

/// Groups of keys that were brought together recently. A key is in one group at most.
#[derive(Clone, Debug, Default)]
pub struct RecentGroups {
    /// Groups, in the order of their last moves, with the times of these moves.
    groups: BTreeMap<u64, (u64, Group)>,
    /// Number of the group of each key.
    of: BTreeMap<Arc<[u8]>, u64>,
    next: u64,
}

impl RecentGroups {
    /// Remembers that these keys were brought together now. They leave their earlier groups. If they are more than a group
    /// may have, the first ones are remembered.
    pub fn note(&mut self, all: impl IntoIterator<Item = Arc<[u8]>>, now_ms: u64) {
        let number = self.next;
        self.next += 1;
        let mut keys = BTreeSet::new();
        let mut all = all.into_iter().filter(|key| key.len() <= NAME_BYTES_MAX);
        while keys.len() < GROUP_KEYS_MAX
            && let Some(key) = all.next()
        {
            keys.insert(key);
        }
        for key in &keys {
            let before = self.of.insert(Arc::clone(key), number);
            if let Some(before) = before
                && let Some((_, group)) = self.groups.get_mut(&before)
            {
                group.remove(key);
            }
        }
        self.groups.insert(number, (now_ms, keys));
        let is_old = |at_ms: u64| now_ms.saturating_sub(at_ms) > KEPT_MS;
        while let Some(first) = self.groups.first_entry() {
            let (at_ms, keys) = first.get();
            if !keys.is_empty() && !is_old(*at_ms) && self.of.len() <= KEYS_MAX {
                break;
            }
            for key in first.remove().1 {
                self.of.remove(&key);
            }
        }
    }

    /// Groups with the times of their last moves, the latest first.
    pub fn latest(&self) -> impl Iterator<Item = (u64, &BTreeSet<Arc<[u8]>>)> {
        self.groups.values().rev().filter(|(_, keys)| !keys.is_empty()).map(|(at_ms, keys)| (*at_ms, keys))
    }

    /// Returns the group of a key, with its number.
    pub(super) fn of(&self, key: &[u8]) -> Option<(u64, &Group)> {
        let number = self.of.get(key)?;
        self.groups.get(number).map(|(_, keys)| (*number, keys))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(names: &[&str]) -> Vec<Arc<[u8]>> {
        names.iter().map(|name| Arc::from(name.as_bytes())).collect()
    }

    fn of(recent: &RecentGroups, name: &str) -> Option<Vec<String>> {
        let (_, group) = recent.of(name.as_bytes())?;
        Some(group.iter().map(|key| String::from_utf8_lossy(key).into_owned()).collect())
    }

    #[test]
    fn a_key_is_in_the_group_of_its_last_move_until_that_is_old() {
        let mut recent = RecentGroups::default();
        recent.note(keys(&["a", "b", "c"]), 0);
        recent.note(keys(&["c", "d"]), 10);
        assert_eq!(of(&recent, "a"), Some(vec!["a".to_owned(), "b".to_owned()]));
        assert_eq!(of(&recent, "c"), Some(vec!["c".to_owned(), "d".to_owned()]));
        assert_eq!(recent.latest().map(|(at_ms, group)| (at_ms, group.len())).collect::<Vec<_>>(), [(10, 2), (0, 2)]);
        recent.note(keys(&["e"]), KEPT_MS + 5);
        assert_eq!((of(&recent, "a"), of(&recent, "d").map(|group| group.len())), (None, Some(2)));
    }

    #[test]
    fn the_memory_of_groups_is_bounded() {
        let mut recent = RecentGroups::default();
        for group in 0..100 {
            recent.note((0..2000).map(|n| Arc::from(format!("{group}:{n}").as_bytes())), group);
            assert!(recent.of.len() <= KEYS_MAX);
        }
        assert_eq!(of(&recent, "0:0"), None);
        let long = "x".repeat(NAME_BYTES_MAX + 1);
        recent.note(keys(&[&long]), 100);
        assert_eq!(of(&recent, &long), None);
        let (_, last) = recent.of(b"99:0").expect("the last one");
        assert_eq!(last.len(), GROUP_KEYS_MAX);
        assert_eq!(recent.groups.values().map(|(_, keys)| keys.len()).sum::<usize>(), recent.of.len());
    }
}
