//! The directory of placement overrides: a persistent map from names of keys to nodes.
//!
//! A topology has one, and workers read it without locks. It is a trie with 32 branches per level, over the number of
//! the slot (three levels) and then the hash of the name: the keys of a slot are one subtree, and a slot of any number of
//! keys is divided further. At its ends are small hash tables. A change copies the path to its table, and the table.
//! Directories share everything else, so changes, comparisons and deallocations cost in proportion to the change.
//!
//! A table has a tag of one byte per place, eight in a word. A key without an entry costs the loads of the path, whose
//! upper levels stay in the cache, and one word of tags. This needs no filter, which would saturate or be rebuilt.
//!
//! Not one table for all keys: each change would copy a million entries. Not a copy in each worker, updated by
//! a list of changes: it multiplies the memory, and its order relative to the topology would need a second protocol.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rapidhash::v3::rapidhash_v3;

use super::{NodeId, SLOT_NUMBERS, Slot};

/// Bits of a path per level.
const LEVEL_BITS: u32 = 5;
const BRANCHES: usize = 1 << LEVEL_BITS;

/// Levels for the number of the slot. Tables are below them, so they contain keys of one slot.
const SLOT_LEVELS: u32 = 3;

/// Bits of a path for the hash.
const HASH_BITS: u32 = u64::BITS - LEVEL_BITS * SLOT_LEVELS;

/// Levels of the trie. The rest of the path, four bits, selects the first group of a table.
const LEVELS: u32 = 12;

/// Places of a table, in groups of eight. The lowest 12 bits of a path determine group and tag, and only the levels
/// from the tenth on use them too.
const GROUPS: usize = 16;

/// Maximum entries of a table: three quarters of its places. A million entries in 16,384 slots fill half of them.
const TABLE_MAX: usize = 96;

const _: () = assert!(SLOT_NUMBERS == 1 << (LEVEL_BITS * SLOT_LEVELS), "the levels of slots have all numbers");

/// Each byte 1.
const ONES: u64 = 0x0101_0101_0101_0101;

/// Sets the highest bit of each zero byte. May also set it for higher bytes, but only if a zero byte exists.
#[inline]
const fn zero_bytes(word: u64) -> u64 {
    word.wrapping_sub(ONES) & !word & (ONES << 7)
}

/// Position in the trie: slot number in the highest 15 bits, hash of the name below.
#[derive(Clone, Copy, Debug)]
struct Path(u64);

impl Path {
    #[inline]
    fn of_slot(slot: Slot) -> Self {
        Self((slot.index() as u64) << HASH_BITS)
    }

    /// A hash without a secret. A lookup compares names with a common path one by one, so a collection of them delays
    /// only commands for these names.
    #[inline]
    fn of(slot: Slot, key: &[u8]) -> Self {
        Self(Self::of_slot(slot).0 | rapidhash_v3(key) >> (u64::BITS - HASH_BITS))
    }

    #[inline]
    const fn branch(self, level: u32) -> usize {
        (self.0 << (LEVEL_BITS * level) >> (u64::BITS - LEVEL_BITS)) as usize
    }

    #[inline]
    const fn group(self) -> usize {
        self.0 as usize % GROUPS
    }

    /// Tag; 0 is that of a free place.
    #[inline]
    const fn tag(self) -> u8 {
        let tag = (self.0 >> 4) as u8;
        if tag == 0 { 1 } else { tag }
    }
}

/// A key and its node.
#[derive(Debug)]
struct Entry {
    key: Arc<[u8]>,
    node: NodeId,
    /// Set by lookups of workers, and cleared by [`Directory::take_unused`]. Directories with a common table share it. A
    /// copy of the table may miss a concurrent use: then a used key may return to its slot's owner, which is correct.
    is_used: AtomicBool,
}

impl Clone for Entry {
    fn clone(&self) -> Self {
        let is_used = AtomicBool::new(self.is_used.load(Ordering::Relaxed));
        Self { key: Arc::clone(&self.key), node: self.node, is_used }
    }
}

impl Entry {
    /// Counts as used, so that a new entry stays for one pass of [`super::UnusedOverrides`].
    const fn new(key: Arc<[u8]>, node: NodeId) -> Self {
        Self { key, node, is_used: AtomicBool::new(true) }
    }

    fn place(&self) -> (&Arc<[u8]>, NodeId) {
        (&self.key, self.node)
    }
}

/// A hash table of 1 to [`TABLE_MAX`] entries.
#[derive(Debug)]
struct Table {
    /// Tags of eight places each.
    tags: [u64; GROUPS],
    /// Index of each place's entry.
    places: [[u8; 8]; GROUPS],
    entries: Box<[Entry]>,
}

impl Table {
    fn new(entries: Vec<Entry>) -> Self {
        debug_assert!(entries.len() <= TABLE_MAX, "a place is free in every table");
        let (mut tags, mut places) = ([[0_u8; 8]; GROUPS], [[0_u8; 8]; GROUPS]);
        for (number, entry) in entries.iter().enumerate() {
            let path = Path::of(Slot::FIRST, &entry.key);
            let mut group = path.group();
            let place = loop {
                match tags[group].iter().position(|tag| *tag == 0) {
                    Some(place) => break place,
                    None => group = (group + 1) % GROUPS,
                }
            };
            tags[group][place] = path.tag();
            places[group][place] = number as u8;
        }
        Self { tags: tags.map(u64::from_le_bytes), places, entries: entries.into() }
    }

    fn find(&self, path: Path, key: &[u8]) -> Option<&Entry> {
        let wanted = u64::from(path.tag()) * ONES;
        let mut group = path.group();
        loop {
            let tags = self.tags[group];
            let mut matching = zero_bytes(tags ^ wanted);
            while matching != 0 {
                let place = matching.trailing_zeros() as usize / 8;
                let entry = &self.entries[usize::from(self.places[group][place])];
                if *entry.key == *key {
                    return Some(entry);
                }
                matching &= matching - 1;
            }
            // An entry goes to the first free place from its group on.
            if zero_bytes(tags) != 0 {
                return None;
            }
            group = (group + 1) % GROUPS;
        }
    }
}

type Branches = [Option<Node>; BRANCHES];

/// A part of the trie; never empty. The kind is stored next to the pointer, so that a table costs no access to its head.
#[derive(Clone, Debug)]
enum Node {
    Fork(Arc<Branches>),
    Table(Arc<Table>),
    /// More than [`TABLE_MAX`] names with one path.
    List(Arc<Vec<Entry>>),
}

impl Node {
    /// Returns the part of the trie for these entries of a slot at a level; `None` without entries.
    fn of(entries: Vec<Entry>, level: u32) -> Option<Self> {
        match entries.len() {
            0 => None,
            1..=TABLE_MAX => Some(Self::Table(Arc::new(Table::new(entries)))),
            _ if level == LEVELS => Some(Self::List(Arc::new(entries))),
            _ => {
                let mut parts: [Vec<Entry>; BRANCHES] = std::array::from_fn(|_| Vec::new());
                for entry in entries {
                    parts[Path::of(Slot::FIRST, &entry.key).branch(level)].push(entry);
                }
                Some(Self::Fork(Arc::new(parts.map(|part| Self::of(part, level + 1)))))
            }
        }
    }

    fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Fork(one), Self::Fork(other)) => Arc::ptr_eq(one, other),
            (Self::Table(one), Self::Table(other)) => Arc::ptr_eq(one, other),
            (Self::List(one), Self::List(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }

    /// Returns this part of the trie, at this level, with changes in the order of their keys.
    fn changed(node: Option<&Self>, level: u32, changes: Vec<Change>) -> Option<Self> {
        let mut branches = match node {
            _ if changes.is_empty() => return node.cloned(),
            Some(Self::Fork(branches)) => Branches::clone(branches),
            None if level < SLOT_LEVELS => [const { None }; BRANCHES],
            Some(Self::Table(_) | Self::List(_)) | None => {
                let is_kept = |entry: &&Entry| changes.binary_search_by(|change| change.key.cmp(&entry.key)).is_err();
                let mut entries: Vec<Entry> = Entries::of(node).filter(is_kept).cloned().collect();
                entries.extend(changes.into_iter().filter_map(|change| Some(Entry::new(change.key, change.node?))));
                return Self::of(entries, level);
            }
        };
        let mut parts: [Vec<Change>; BRANCHES] = std::array::from_fn(|_| Vec::new());
        for change in changes {
            parts[change.path.branch(level)].push(change);
        }
        for (branch, part) in branches.iter_mut().zip(parts).filter(|(_, part)| !part.is_empty()) {
            *branch = Self::changed(branch.as_ref(), level + 1, part);
        }
        branches.iter().any(Option::is_some).then(|| Self::Fork(Arc::new(branches)))
    }

    /// Adds the entries of `now` that `then` lacks or has at another node, and (`None`) the names of those removed.
    fn differences(now: Option<&Self>, then: Option<&Self>, found: &mut Vec<(Arc<[u8]>, Option<NodeId>)>) {
        match (now, then) {
            (Some(now), Some(then)) if now.is_same(then) => {}
            (Some(Self::Fork(now)), Some(Self::Fork(then))) => {
                let branches = now.iter().zip(then.iter());
                branches.for_each(|(now, then)| Self::differences(now.as_ref(), then.as_ref(), found));
            }
            (now, then) => {
                let [now, then] =
                    [now, then].map(|node| Entries::of(node).map(Entry::place).collect::<BTreeMap<_, _>>());
                let new = now.iter().filter(|(key, node)| then.get(*key) != Some(*node));
                found.extend(new.map(|(key, node)| (Arc::clone(key), Some(*node))));
                found.extend(then.keys().filter(|key| !now.contains_key(*key)).map(|key| (Arc::clone(key), None)));
            }
        }
    }
}

/// The entries of a part of the trie, by slot.
struct Entries<'d> {
    nodes: Vec<&'d Node>,
    entries: std::slice::Iter<'d, Entry>,
}

impl<'d> Entries<'d> {
    fn of(node: Option<&'d Node>) -> Self {
        Self { nodes: Vec::from_iter(node), entries: [].iter() }
    }
}

impl<'d> Iterator for Entries<'d> {
    type Item = &'d Entry;

    fn next(&mut self) -> Option<&'d Entry> {
        loop {
            if let Some(entry) = self.entries.next() {
                return Some(entry);
            }
            match self.nodes.pop()? {
                Node::Fork(branches) => self.nodes.extend(branches.iter().rev().flatten()),
                Node::Table(table) => self.entries = table.entries.iter(),
                Node::List(entries) => self.entries = entries.iter(),
            }
        }
    }
}

/// A change of one entry.
#[derive(Debug)]
struct Change {
    path: Path,
    key: Arc<[u8]>,
    /// `None` removes the entry.
    node: Option<NodeId>,
}

/// Changes by name, each with the slot of the key. `None` removes an entry.
pub(super) type Changes = BTreeMap<Arc<[u8]>, (Slot, Option<NodeId>)>;

/// The directory. A copy shares all entries.
#[derive(Clone, Default, Debug)]
pub(super) struct Directory {
    root: Option<Node>,
    /// Number of entries by node; above 0.
    counts: BTreeMap<NodeId, usize>,
    /// Total size of all names.
    bytes: usize,
}

/// Marks of use do not count.
impl PartialEq for Directory {
    fn eq(&self, other: &Self) -> bool {
        self.counts == other.counts && self.bytes == other.bytes && self.since(other).is_empty()
    }
}

impl Eq for Directory {}

impl Directory {
    #[inline]
    pub(super) const fn is_empty(&self) -> bool {
        self.root.is_none()
    }

    /// Node of an entry.
    #[inline]
    pub(super) fn find(&self, slot: Slot, key: &[u8]) -> Option<NodeId> {
        if self.is_empty() { None } else { self.entry(slot, key).map(|entry| entry.node) }
    }

    /// Node of an entry, which then counts as used.
    #[inline]
    pub(super) fn find_used(&self, slot: Slot, key: &[u8]) -> Option<NodeId> {
        if self.is_empty() {
            return None;
        }
        let entry = self.entry(slot, key)?;
        // Mostly set already, so that workers do not take the memory from each other.
        if !entry.is_used.load(Ordering::Relaxed) {
            entry.is_used.store(true, Ordering::Relaxed);
        }
        Some(entry.node)
    }

    fn entry(&self, slot: Slot, key: &[u8]) -> Option<&Entry> {
        let mut node = self.of_slot(slot)?;
        let path = Path::of(slot, key);
        let mut level = SLOT_LEVELS;
        loop {
            match node {
                Node::Fork(branches) => node = branches[path.branch(level)].as_ref()?,
                Node::Table(table) => return table.find(path, key),
                Node::List(entries) => return entries.iter().find(|entry| *entry.key == *key),
            }
            level += 1;
        }
    }

    /// Part of the trie with the keys of a slot.
    #[inline]
    fn of_slot(&self, slot: Slot) -> Option<&Node> {
        let path = Path::of_slot(slot);
        let mut node = self.root.as_ref()?;
        for level in 0..SLOT_LEVELS {
            let Node::Fork(branches) = node else { return None };
            node = branches[path.branch(level)].as_ref()?;
        }
        Some(node)
    }

    /// Whether a slot has entries.
    #[inline]
    pub(super) fn has(&self, slot: Slot) -> bool {
        self.of_slot(slot).is_some()
    }

    /// Entries of a slot.
    pub(super) fn in_slot(&self, slot: Slot) -> impl Iterator<Item = (&Arc<[u8]>, NodeId)> {
        Entries::of(self.of_slot(slot)).map(Entry::place)
    }

    /// All entries, by slot.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&Arc<[u8]>, NodeId)> {
        Entries::of(self.root.as_ref()).map(Entry::place)
    }

    /// Clears the marks of use in a slot. Returns the entries that had none.
    pub(super) fn take_unused(&self, slot: Slot) -> impl Iterator<Item = (&Arc<[u8]>, NodeId)> {
        Entries::of(self.of_slot(slot)).filter(|entry| !entry.is_used.swap(false, Ordering::Relaxed)).map(Entry::place)
    }

    /// Number of entries.
    pub(super) fn count(&self) -> usize {
        self.counts.values().sum()
    }

    /// Number of entries for a node.
    pub(super) fn count_at(&self, node: NodeId) -> usize {
        self.counts.get(&node).copied().unwrap_or(0)
    }

    /// Nodes with entries.
    pub(super) fn nodes(&self) -> impl Iterator<Item = NodeId> {
        self.counts.keys().copied()
    }

    /// Total size of all names.
    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the directory with these changes.
    pub(super) fn with(&self, changes: Changes) -> Self {
        let mut next = self.clone();
        let mut effective = Vec::new();
        for (key, (slot, node)) in changes {
            let before = self.find(slot, &key);
            if before == node {
                continue;
            }
            if let Some(before) = before {
                next.bytes -= key.len();
                if let Some(count) = next.counts.get_mut(&before) {
                    *count -= 1;
                }
            }
            if let Some(node) = node {
                next.bytes += key.len();
                *next.counts.entry(node).or_default() += 1;
            }
            effective.push(Change { path: Path::of(slot, &key), key, node });
        }
        next.counts.retain(|_, count| *count > 0);
        next.root = Node::changed(self.root.as_ref(), 0, effective);
        next
    }

    /// Changes since an earlier directory: entries with a new node, and (`None`) removed ones.
    pub(super) fn since(&self, earlier: &Self) -> Vec<(Arc<[u8]>, Option<NodeId>)> {
        let mut found = Vec::new();
        Node::differences(self.root.as_ref(), earlier.root.as_ref(), &mut found);
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_one_path_are_found_in_their_list() {
        let names: Vec<Arc<[u8]>> = (0..3 * TABLE_MAX).map(|number| number.to_string().into_bytes().into()).collect();
        let entries = names.iter().map(|name| Entry::new(Arc::clone(name), NodeId(1))).collect();
        // As if all paths were equal: below the last level, nothing distinguishes them.
        let mut node = Node::of(entries, LEVELS);
        assert!(matches!(node, Some(Node::List(_))));
        let slot = Slot::FIRST;
        for level in (0..SLOT_LEVELS).rev() {
            let mut branches = [const { None }; BRANCHES];
            branches[Path::of_slot(slot).branch(level)] = node;
            node = Some(Node::Fork(Arc::new(branches)));
        }
        let directory = Directory { root: node, ..Directory::default() };
        assert!(names.iter().all(|name| directory.find(slot, name) == Some(NodeId(1))));
        assert_eq!((directory.find(slot, b"another"), directory.in_slot(slot).count()), (None, names.len()));
    }

    #[test]
    fn a_change_of_one_entry_shares_the_rest() {
        let slot = |number: u16| Slot::new(number).expect("a slot");
        let name = |number: u16| Arc::from(number.to_string().into_bytes());
        let all = (0..5_000).map(|number| (name(number), (slot(number % 2_000), Some(NodeId(1))))).collect();
        let before = Directory::default().with(all);
        let after = before.with([(name(7), (slot(7), None))].into());
        let tables = |directory: &Directory| {
            let (mut nodes, mut tables) = (Vec::from_iter(&directory.root), Vec::new());
            while let Some(node) = nodes.pop() {
                match node {
                    Node::Fork(branches) => nodes.extend(branches.iter().flatten()),
                    Node::Table(table) => tables.push(Arc::as_ptr(table)),
                    Node::List(_) => panic!("the paths differ"),
                }
            }
            tables.sort_unstable();
            tables
        };
        let (old, new) = (tables(&before), tables(&after));
        assert_eq!(new.iter().filter(|table| old.binary_search(table).is_err()).count(), 1);
        assert_eq!((old.len(), new.len(), after.count()), (2_000, 2_000, 4_999));
        assert!(
            before
                .with([(name(7), (slot(7), Some(NodeId(1))))].into())
                .root
                .expect("full")
                .is_same(before.root.as_ref().expect("full"))
        );
    }
}
