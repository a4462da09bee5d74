//! Placement overrides: keys that live elsewhere than their slot.
//!
//! The [directory](super::directory) has only these keys. It stores names rather than fingerprints, to find keys by
//! pattern and the keys that must leave a node. An entry does not imply that the key exists: a deleted key is created
//! again at the same node.
//!
//! The directory is a value of its own, but part of the topology: an entry takes effect together with the end of its
//! slot's transit, or with the slot's new owner. Published apart, workers could combine a directory with another
//! topology than its own. The node of a key changes only while the key is held, so only if its slot was
//! [moving](super::Stage::Moving): [`Topology::moves_only_held_keys_since`].
//!
//! Not a map of key ranges or patterns, because a pattern would include keys that were never moved.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use super::directory::{Changes, Directory};
use super::{NodeId, PartsError, Slot, Stage, Topology};

/// Maximum placement overrides of a topology: a million.
pub const OVERRIDES_MAX: usize = 1 << 20;

/// Maximum total size of their names, in bytes.
pub const OVERRIDE_BYTES_MAX: usize = 128 << 20;

/// Maximum keys of one move of keys. Their names are one record of the journal, and while they move, each worker places
/// all of them at the target in a topology of its own.
pub const MOVE_KEYS_MAX: usize = 65_536;

/// Maximum total size of the names of one move of keys, in bytes.
pub const MOVE_KEY_BYTES_MAX: usize = 16 << 20;

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
            OVERRIDE_BYTES_MAX >> 20
        )
    }
}

impl std::error::Error for TooManyOverrides {}

impl Topology {
    /// Whether any key has a placement override.
    #[inline]
    #[must_use]
    pub fn has_overrides(&self) -> bool {
        !self.directory.is_empty()
    }

    /// Whether keys of this slot have placement overrides.
    #[inline]
    #[must_use]
    pub fn has_override(&self, slot: Slot) -> bool {
        self.directory.has(slot)
    }

    /// Node of a key with a placement override.
    #[must_use]
    pub fn placement_override(&self, key: &[u8]) -> Option<NodeId> {
        if self.directory.is_empty() { None } else { self.directory.find(self.slot_of(key), key) }
    }

    /// Node of a key: the node of its placement override, or the owner of its slot. The override then counts as used,
    /// for [`super::UnusedOverrides`]. For channels, which have no overrides, see [`Topology::owner_of`].
    #[inline]
    #[must_use]
    pub fn lives_at(&self, key: &[u8]) -> NodeId {
        self.lives_at_in_slot(self.slot_of(key), key)
    }

    /// Like [`Self::lives_at`], without counting as a use: for decisions and reports.
    #[must_use]
    pub fn node_of(&self, key: &[u8]) -> NodeId {
        self.placement_override(key).unwrap_or_else(|| self.owner_of(key))
    }

    /// Like [`Self::lives_at`], for a known slot.
    #[inline]
    pub(crate) fn lives_at_in_slot(&self, slot: Slot, key: &[u8]) -> NodeId {
        self.directory.find_used(slot, key).unwrap_or_else(|| self.owner(slot))
    }

    /// All placement overrides, by slot.
    pub fn placement_overrides(&self) -> impl Iterator<Item = (&Arc<[u8]>, NodeId)> {
        self.directory.iter()
    }

    /// Number of placement overrides.
    #[must_use]
    pub fn override_count(&self) -> usize {
        self.directory.count()
    }

    /// Total size of the names of placement overrides, in bytes.
    #[must_use]
    pub fn override_bytes(&self) -> usize {
        self.directory.bytes()
    }

    /// Placement overrides of one slot.
    pub fn overrides_in(&self, slot: Slot) -> impl Iterator<Item = (&Arc<[u8]>, NodeId)> {
        self.directory.in_slot(slot)
    }

    /// Clears the marks of use of a slot's overrides. Returns those without a use since the last call.
    pub(super) fn take_unused_overrides(&self, slot: Slot) -> impl Iterator<Item = (&Arc<[u8]>, NodeId)> {
        self.directory.take_unused(slot)
    }

    /// Changes since an earlier topology: keys with a new node, and (`None`) keys without an override now. A key whose
    /// slot has changed may be in both lists. Cost is proportional to the changes if this topology was derived from the
    /// earlier one.
    #[must_use]
    pub fn overrides_since(&self, earlier: &Self) -> Vec<(Arc<[u8]>, Option<NodeId>)> {
        self.directory.since(&earlier.directory)
    }

    /// Whether each key whose override differs from an earlier topology, the one published before, is at the same node
    /// as before or was in a moving slot. Workers hold the keys of such a slot until they have adopted the next topology.
    #[must_use]
    pub fn moves_only_held_keys_since(&self, earlier: &Self) -> bool {
        self.overrides_since(earlier).iter().all(|(key, _)| {
            let was_held = || {
                let transit = earlier.transit(earlier.slot_of(key));
                transit.is_some_and(|transit| matches!(transit.stage, Stage::Moving { .. }))
            };
            self.node_of(key) == earlier.node_of(key) || was_held()
        })
    }

    /// Number of keys with a placement override to this node.
    #[must_use]
    pub fn overrides_at(&self, node: NodeId) -> usize {
        self.directory.count_at(node)
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
        let (mut requested, mut bytes) = (0, 0);
        for key in keys {
            if self.owner_of(key) != target {
                requested += 1;
                bytes += key.len();
            }
        }
        let existing = self.override_count();
        let fits = existing + requested <= OVERRIDES_MAX && self.override_bytes() + bytes <= OVERRIDE_BYTES_MAX;
        if requested == 0 || fits { Ok(()) } else { Err(TooManyOverrides { existing, requested }) }
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
        let change = |key: &Arc<[u8]>| {
            let slot = self.slot_of(key);
            (Arc::clone(key), (slot, (self.owner(slot) != target).then_some(target)))
        };
        next.directory = self.directory.with(keys.into_iter().map(change).collect());
        next
    }

    /// After an owner change of slots, removes overrides for keys at the new owner.
    pub(super) fn drop_overrides_at_owner(&mut self, slots: &[Slot]) {
        if self.directory.is_empty() {
            return;
        }
        let at_owner = |slot: &Slot| {
            let (slot, owner) = (*slot, self.owner(*slot));
            let found = self.overrides_in(slot).filter(move |(_, node)| *node == owner);
            found.map(move |(key, _)| (Arc::clone(key), (slot, None)))
        };
        let changes: Changes = slots.iter().flat_map(at_owner).collect();
        self.directory = self.directory.with(changes);
    }

    /// After a change of the keys' slots, keeps the same keys at the same nodes under their new slots.
    pub(super) fn rebuild_overrides(&mut self) {
        let all = self.placement_overrides().map(|(key, node)| (Arc::clone(key), (self.slot_of(key), Some(node))));
        self.directory = Directory::default().with(all.collect());
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
        let mut all = Changes::new();
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
            if all.insert(key, (slot, Some(node))).is_some() {
                return Err(PartsError::OverrideTwice { slot: slot.number() });
            }
        }
        if count > OVERRIDES_MAX || bytes > OVERRIDE_BYTES_MAX {
            return Err(PartsError::OverrideCount(count));
        }
        self.directory = Directory::default().with(all);
        Ok(self)
    }
}
