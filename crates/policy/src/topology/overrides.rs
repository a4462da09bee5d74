//! Placement overrides: keys that live elsewhere than their slot.
//!
//! A directory of these keys only, by slot, and one bit per slot that has any. A key of a slot without overrides costs
//! one branch if there are none at all, and one bit test otherwise. Stores names rather than fingerprints, to find keys
//! by pattern and the keys that must leave a node. An entry does not imply that the key exists: a deleted key is
//! created again at the same node. Only moves add or remove entries.
//!
//! Not a map of key ranges or patterns, because a pattern would include keys that were never moved.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use super::{NodeId, PartsError, SLOT_NUMBERS, Slot, Topology};

/// Maximum placement overrides of a topology.
pub const OVERRIDES_MAX: usize = 65_536;

/// Maximum total size of their names, in bytes.
pub const EXCEPTION_BYTES_MAX: usize = 16 << 20;

const WORDS: usize = SLOT_NUMBERS / 64;

/// Slots per page.
const PAGE: usize = 128;

/// A key and its node.
type PlacedKey = (Arc<[u8]>, NodeId);

/// Sorted keys of a slot; never empty.
type Keys = Arc<[PlacedKey]>;

/// Changed slots during an update.
type BySlot = BTreeMap<Slot, Vec<PlacedKey>>;

/// Consecutive slots.
type Page = [Option<Keys>; PAGE];

/// The directory. Every key in it lives at another node than its slot owner.
///
/// Topologies share unchanged pages. So an update and a comparison cost only the changed pages and the keys of their
/// slots.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct PlacementOverrides {
    /// One bit per slot.
    marked: Box<[u64; WORDS]>,
    pages: Box<[Option<Arc<Page>>; SLOT_NUMBERS / PAGE]>,
    /// Number of keys by node; entries are above 0.
    counts: BTreeMap<NodeId, usize>,
    /// Total size of all names.
    bytes: usize,
}

impl PlacementOverrides {
    fn new() -> Self {
        Self {
            marked: Box::new([0; WORDS]),
            pages: Box::new([const { None }; SLOT_NUMBERS / PAGE]),
            counts: BTreeMap::new(),
            bytes: 0,
        }
    }

    #[inline]
    fn has(&self, slot: Slot) -> bool {
        self.marked[slot.index() / 64] & (1 << (slot.index() % 64)) != 0
    }

    #[cold]
    fn find(&self, slot: Slot, key: &[u8]) -> Option<NodeId> {
        let keys = self.keys(slot);
        let place = keys.binary_search_by(|(known, _)| known[..].cmp(key)).ok()?;
        Some(keys[place].1)
    }

    fn keys(&self, slot: Slot) -> &[PlacedKey] {
        let page = self.pages[slot.index() / PAGE].as_ref();
        page.and_then(|page| page[slot.index() % PAGE].as_deref()).unwrap_or_default()
    }

    /// Replaces the keys of a slot.
    fn put(&mut self, slot: Slot, keys: Vec<PlacedKey>) {
        let was: Vec<NodeId> = self.keys(slot).iter().map(|(_, node)| *node).collect();
        for node in was {
            if let Some(count) = self.counts.get_mut(&node) {
                *count -= 1;
                if *count == 0 {
                    self.counts.remove(&node);
                }
            }
        }
        self.bytes -= self.keys(slot).iter().map(|(key, _)| key.len()).sum::<usize>();
        for (key, node) in &keys {
            *self.counts.entry(*node).or_default() += 1;
            self.bytes += key.len();
        }
        let (word, bit) = (slot.index() / 64, 1 << (slot.index() % 64));
        let page = &mut self.pages[slot.index() / PAGE];
        if keys.is_empty() {
            self.marked[word] &= !bit;
            if let Some(page) = page {
                Arc::make_mut(page)[slot.index() % PAGE] = None;
            }
        } else {
            self.marked[word] |= bit;
            let page = page.get_or_insert_with(|| Arc::new([const { None }; PAGE]));
            Arc::make_mut(page)[slot.index() % PAGE] = Some(keys.into());
        }
        // Equal directories are represented equally, whatever their history.
        if page.as_ref().is_some_and(|page| page.iter().all(Option::is_none)) {
            *page = None;
        }
    }

    /// Returns `None` if empty.
    fn or_none(self) -> Option<Arc<Self>> {
        (!self.counts.is_empty()).then(|| Arc::new(self))
    }

    fn count(&self) -> usize {
        self.counts.values().sum()
    }
}

/// Whether both have the same keys at the same nodes. Fast if shared.
fn are_alike(one: Option<&Keys>, other: Option<&Keys>) -> bool {
    match (one, other) {
        (Some(one), Some(other)) => Arc::ptr_eq(one, other) || one == other,
        (one, other) => one.is_none() && other.is_none(),
    }
}

/// The placement overrides would exceed a limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TooManyOverrides {
    /// Existing overrides.
    pub existing: usize,
    /// Requested additional overrides.
    pub requested: usize,
}

impl fmt::Display for TooManyOverrides {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { existing: there, requested: asked } = self;
        write!(
            f,
            "{asked} more placement overrides, besides the present {there}, exceed the limit: {OVERRIDES_MAX}, with key names of {} MiB together. \
             Move whole slots instead (--slots), choose a pattern that matches fewer keys, or return other keys first (--home)",
            EXCEPTION_BYTES_MAX >> 20
        )
    }
}

impl std::error::Error for TooManyOverrides {}

impl Topology {
    /// Whether any key has a placement override.
    #[inline]
    #[must_use]
    pub fn has_overrides(&self) -> bool {
        self.overrides.is_some()
    }

    /// Whether keys of this slot have placement overrides.
    #[inline]
    #[must_use]
    pub fn has_override(&self, slot: Slot) -> bool {
        self.overrides.as_ref().is_some_and(|overrides| overrides.has(slot))
    }

    /// Node of a key with a placement override.
    #[must_use]
    pub fn placement_override(&self, key: &[u8]) -> Option<NodeId> {
        let overrides = self.overrides.as_ref()?;
        let slot = self.slot_of(key);
        if overrides.has(slot) { overrides.find(slot, key) } else { None }
    }

    /// Node of a key: the node of its placement override, or the owner of its slot. For channels, which have no
    /// overrides, see [`Topology::owner_of`].
    #[inline]
    #[must_use]
    pub fn lives_at(&self, key: &[u8]) -> NodeId {
        self.lives_at_in_slot(self.slot_of(key), key)
    }

    /// Like [`Self::lives_at`], for a known slot.
    #[inline]
    pub(crate) fn lives_at_in_slot(&self, slot: Slot, key: &[u8]) -> NodeId {
        let owner = self.owner(slot);
        match &self.overrides {
            Some(overrides) if overrides.has(slot) => overrides.find(slot, key).unwrap_or(owner),
            _ => owner,
        }
    }

    /// All placement overrides, by slot and then by name.
    pub fn placement_overrides(&self) -> impl Iterator<Item = (&Arc<[u8]>, NodeId)> {
        let pages = self.overrides.iter().flat_map(|overrides| overrides.pages.iter()).flatten();
        pages.flat_map(|page| page.iter()).flatten().flat_map(|keys| keys.iter()).map(|(key, node)| (key, *node))
    }

    /// Number of placement overrides.
    #[must_use]
    pub fn override_count(&self) -> usize {
        self.overrides.as_ref().map_or(0, |overrides| overrides.count())
    }

    /// Placement overrides of one slot, by name.
    pub fn overrides_in(&self, slot: Slot) -> impl Iterator<Item = (&Arc<[u8]>, NodeId)> {
        self.overrides.iter().flat_map(move |overrides| overrides.keys(slot)).map(|(key, node)| (key, *node))
    }

    /// Changes since an earlier topology: keys with a new node, and (`None`) keys without an override now. Cost is
    /// proportional to the changes if this topology was derived from the earlier one.
    #[must_use]
    pub fn overrides_since(&self, earlier: &Self) -> Vec<(Arc<[u8]>, Option<NodeId>)> {
        let page = |topology: &Self, number: usize| {
            topology.overrides.as_ref().and_then(|overrides| overrides.pages[number].clone())
        };
        let mut changes = Vec::new();
        for number in 0..SLOT_NUMBERS / PAGE {
            let (now, then) = (page(self, number), page(earlier, number));
            if now.as_ref().zip(then.as_ref()).is_some_and(|(now, then)| Arc::ptr_eq(now, then)) {
                continue;
            }
            for place in 0..PAGE {
                let keys = |page: &Option<Arc<Page>>| page.as_ref().and_then(|page| page[place].clone());
                let (now, then) = (keys(&now), keys(&then));
                if are_alike(now.as_ref(), then.as_ref()) {
                    continue;
                }
                let (now, then) = (now.as_deref().unwrap_or_default(), then.as_deref().unwrap_or_default());
                let find = |keys: &[PlacedKey], key: &Arc<[u8]>| {
                    keys.binary_search_by(|(known, _)| known.cmp(key)).ok().map(|place| keys[place].1)
                };
                changes.extend(
                    now.iter()
                        .filter(|(key, node)| find(then, key) != Some(*node))
                        .map(|(key, node)| (Arc::clone(key), Some(*node))),
                );
                changes.extend(
                    then.iter().filter(|(key, _)| find(now, key).is_none()).map(|(key, _)| (Arc::clone(key), None)),
                );
            }
        }
        changes
    }

    /// Whether the placement overrides of this slot differ between the two topologies.
    #[must_use]
    pub fn overrides_differ(&self, other: &Self, slot: Slot) -> bool {
        match (&self.overrides, &other.overrides) {
            (None, None) => false,
            (Some(one), Some(another)) if Arc::ptr_eq(one, another) => false,
            _ if !self.has_override(slot) && !other.has_override(slot) => false,
            _ => !self.overrides_in(slot).eq(other.overrides_in(slot)),
        }
    }

    /// Number of keys with a placement override to this node.
    #[must_use]
    pub fn overrides_at(&self, node: NodeId) -> usize {
        self.overrides.as_ref().and_then(|overrides| overrides.counts.get(&node).copied()).unwrap_or(0)
    }

    /// Checks the limits for placement overrides of these keys at `target`. Assumes that none of them has one already.
    ///
    /// # Errors
    /// If they are too many, or their names too long.
    pub fn room_for_overrides<'k>(
        &self,
        keys: impl IntoIterator<Item = &'k [u8]>,
        target: NodeId,
    ) -> Result<(), TooManyOverrides> {
        let (mut asked, mut bytes) = (0, 0);
        for key in keys {
            if self.owner_of(key) != target {
                asked += 1;
                bytes += key.len();
            }
        }
        let (there, bytes_there) =
            self.overrides.as_ref().map_or((0, 0), |overrides| (overrides.count(), overrides.bytes));
        let fits = asked == 0 || (there + asked <= OVERRIDES_MAX && bytes_there + bytes <= EXCEPTION_BYTES_MAX);
        if fits { Ok(()) } else { Err(TooManyOverrides { existing: there, requested: asked }) }
    }

    /// Returns the next topology, one epoch higher, with these keys at `target`: with placement overrides, or without
    /// if `target` owns their slot. `slots` are no longer in transit and keep their owner.
    #[must_use]
    pub fn keys_handed_over<'k>(
        &self,
        slots: &[Slot],
        keys: impl IntoIterator<Item = &'k Arc<[u8]>>,
        target: NodeId,
    ) -> Self {
        debug_assert!(self.node(target).is_some(), "a key lives at a node");
        let mut next = self.clone();
        next.epoch += 1;
        next.settle(slots);
        let mut overrides = next.overrides.take().map_or_else(PlacementOverrides::new, Arc::unwrap_or_clone);
        let mut changed: BySlot = BTreeMap::new();
        for key in keys {
            let slot = next.slot_of(key);
            let of_slot = changed.entry(slot).or_insert_with(|| overrides.keys(slot).to_vec());
            let place = of_slot.binary_search_by(|(known, _)| known.cmp(key));
            match (place, next.owners[slot.index()] == target) {
                (Ok(place), true) => drop(of_slot.remove(place)),
                (Ok(place), false) => of_slot[place].1 = target,
                (Err(_), true) => {}
                (Err(place), false) => of_slot.insert(place, (Arc::clone(key), target)),
            }
        }
        changed.into_iter().for_each(|(slot, keys)| overrides.put(slot, keys));
        next.overrides = overrides.or_none();
        next
    }

    /// After an owner change of slots, removes overrides for keys at the new owner.
    pub(super) fn drop_overrides_at_owner(&mut self, slots: &[Slot]) {
        let Some(overrides) = &self.overrides else { return };
        if !slots.iter().any(|slot| overrides.has(*slot)) {
            return;
        }
        let mut overrides = PlacementOverrides::clone(overrides);
        for slot in slots.iter().filter(|slot| self.has_override(**slot)) {
            let owner = self.owners[slot.index()];
            let kept = overrides.keys(*slot).iter().filter(|(_, node)| *node != owner).cloned().collect();
            overrides.put(*slot, kept);
        }
        self.overrides = overrides.or_none();
    }

    /// After a continuum change, keeps the same keys at the same nodes under their new slots.
    pub(super) fn rebuild_overrides(&mut self) {
        let Some(overrides) = self.overrides.take() else { return };
        let all = overrides
            .pages
            .iter()
            .flatten()
            .flat_map(|page| page.iter())
            .flatten()
            .flat_map(|keys| keys.iter().cloned());
        let mut by_slot: BySlot = BTreeMap::new();
        for (key, node) in all {
            by_slot.entry(self.slot_of(&key)).or_default().push((key, node));
        }
        let mut anew = PlacementOverrides::new();
        for (slot, mut keys) in by_slot {
            keys.sort_unstable();
            anew.put(slot, keys);
        }
        self.overrides = anew.or_none();
    }

    /// Adds the stored placement overrides.
    ///
    /// # Errors
    /// The first problem: a duplicate key, an unknown node, a key at its slot owner, or too many keys.
    pub fn with_stored_overrides(
        mut self,
        stored: impl IntoIterator<Item = (Arc<[u8]>, NodeId)>,
    ) -> Result<Self, PartsError> {
        let nodes: BTreeSet<NodeId> = self.nodes.iter().map(|node| node.id).collect();
        let mut by_slot: BySlot = BTreeMap::new();
        let (mut count, mut bytes) = (0, 0);
        for (key, node) in stored {
            let slot = self.slot_of(&key);
            if !nodes.contains(&node) {
                return Err(PartsError::OverrideAtUnknown { slot: slot.number(), node });
            }
            if self.owners[slot.index()] == node {
                return Err(PartsError::OverrideAtOwner { slot: slot.number() });
            }
            count += 1;
            bytes += key.len();
            by_slot.entry(slot).or_default().push((key, node));
        }
        if count > OVERRIDES_MAX || bytes > EXCEPTION_BYTES_MAX {
            return Err(PartsError::OverrideCount(count));
        }
        let mut overrides = PlacementOverrides::new();
        for (slot, mut keys) in by_slot {
            keys.sort_unstable();
            if keys.windows(2).any(|pair| pair[0].0 == pair[1].0) {
                return Err(PartsError::OverrideTwice { slot: slot.number() });
            }
            overrides.put(slot, keys);
        }
        self.overrides = overrides.or_none();
        Ok(self)
    }
}
