//! Keys that live elsewhere than their slot: the exceptions.
//!
//! A directory of these keys and no others, by slot, and a bit per slot that says whether it has any. So a key of a slot without exceptions costs one
//! branch more while there are none at all, and one bit while there are some. Names and not fingerprints: what is asked of it is also which keys
//! match a pattern, and which ones have to leave a node. An entry says nothing of whether the key exists: a key that was deleted where it lives is made
//! anew there. Only a move makes an entry or takes one away.
//!
//! Not a second map of key ranges or patterns: a pattern would also be about keys that nobody has moved.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use super::{NodeId, PartsError, SLOT_COUNT, Slot, Topology};

/// The most exceptions that a topology may have.
pub const EXCEPTIONS_MAX: usize = 65_536;

/// The most bytes that their names may have together.
pub const EXCEPTION_BYTES_MAX: usize = 16 << 20;

const WORDS: usize = SLOT_COUNT / 64;

/// Of slots that have any: keys in order, each with its node.
type BySlot = BTreeMap<Slot, Vec<(Arc<[u8]>, NodeId)>>;

/// The directory. Every key in it lives at another node than the owner of its slot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Exceptions {
    /// A bit per slot.
    marked: Box<[u64; WORDS]>,
    by_slot: BySlot,
}

impl Exceptions {
    fn new(by_slot: BySlot) -> Option<Arc<Self>> {
        if by_slot.is_empty() {
            return None;
        }
        let mut marked = Box::new([0; WORDS]);
        for slot in by_slot.keys() {
            marked[slot.index() / 64] |= 1 << (slot.index() % 64);
        }
        Some(Arc::new(Self { marked, by_slot }))
    }

    #[inline]
    fn has(&self, slot: Slot) -> bool {
        self.marked[slot.index() / 64] & (1 << (slot.index() % 64)) != 0
    }

    #[cold]
    fn find(&self, slot: Slot, key: &[u8]) -> Option<NodeId> {
        let keys = self.by_slot.get(&slot)?;
        let place = keys.binary_search_by(|(known, _)| known[..].cmp(key)).ok()?;
        Some(keys[place].1)
    }
}

/// There would be more exceptions than can be kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TooManyExceptions {
    /// How many there are.
    pub there: usize,
    /// How many more were asked for.
    pub asked: usize,
}

impl fmt::Display for TooManyExceptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { there, asked } = self;
        write!(
            f,
            "{asked} keys cannot live elsewhere than their slots, beside the {there} that do: at most {EXCEPTIONS_MAX} can, with names of {} MiB together. \
             Move whole slots instead (--slots), choose a pattern that matches fewer keys, or bring others home first (--home)",
            EXCEPTION_BYTES_MAX >> 20
        )
    }
}

impl std::error::Error for TooManyExceptions {}

impl Topology {
    /// Whether any key lives elsewhere than its slot.
    #[inline]
    #[must_use]
    pub fn has_exceptions(&self) -> bool {
        self.exceptions.is_some()
    }

    /// Whether keys of this slot live elsewhere.
    #[inline]
    #[must_use]
    pub fn is_exceptional(&self, slot: Slot) -> bool {
        self.exceptions.as_ref().is_some_and(|exceptions| exceptions.has(slot))
    }

    /// Where a key lives, if not at the owner of its slot.
    #[must_use]
    pub fn exception(&self, key: &[u8]) -> Option<NodeId> {
        let exceptions = self.exceptions.as_ref()?;
        let slot = self.slot_of(key);
        if exceptions.has(slot) { exceptions.find(slot, key) } else { None }
    }

    /// The node at which a key lives: that of its exception, or else the owner of its slot. For channels, which have no exceptions, see
    /// [`Topology::owner_of`].
    #[inline]
    #[must_use]
    pub fn lives_at(&self, key: &[u8]) -> NodeId {
        self.lives_at_of(self.slot_of(key), key)
    }

    /// The same, where the slot is known.
    #[inline]
    pub(crate) fn lives_at_of(&self, slot: Slot, key: &[u8]) -> NodeId {
        let owner = self.owner(slot);
        match &self.exceptions {
            Some(exceptions) if exceptions.has(slot) => exceptions.find(slot, key).unwrap_or(owner),
            _ => owner,
        }
    }

    /// All exceptions, by slot and then by name: the key and where it lives.
    pub fn exceptions(&self) -> impl Iterator<Item = (&Arc<[u8]>, NodeId)> {
        self.exceptions.iter().flat_map(|exceptions| exceptions.by_slot.values()).flatten().map(|(key, node)| (key, *node))
    }

    /// The exceptions of one slot, by name.
    pub fn exceptions_in(&self, slot: Slot) -> impl Iterator<Item = (&Arc<[u8]>, NodeId)> {
        self.exceptions.iter().filter_map(move |exceptions| exceptions.by_slot.get(&slot)).flatten().map(|(key, node)| (key, *node))
    }

    /// Whether other keys of this slot live elsewhere by `other` than by this topology, or they live at other nodes.
    #[must_use]
    pub fn parts_otherwise(&self, other: &Self, slot: Slot) -> bool {
        match (&self.exceptions, &other.exceptions) {
            (None, None) => false,
            (Some(one), Some(another)) if Arc::ptr_eq(one, another) => false,
            _ if !self.is_exceptional(slot) && !other.is_exceptional(slot) => false,
            _ => !self.exceptions_in(slot).eq(other.exceptions_in(slot)),
        }
    }

    /// How many keys live at a node though their slot does not.
    #[must_use]
    pub fn exceptions_at(&self, node: NodeId) -> usize {
        self.exceptions().filter(|(_, at)| *at == node).count()
    }

    /// Whether these keys could live at `target` beside the exceptions that there are. Counted as if none of them were one already.
    ///
    /// # Errors
    /// If they are too many, or their names too long.
    pub fn room_for_exceptions<'k>(&self, keys: impl IntoIterator<Item = &'k [u8]>, target: NodeId) -> Result<(), TooManyExceptions> {
        let (mut asked, mut bytes) = (0, 0);
        for key in keys {
            if self.owner_of(key) != target {
                asked += 1;
                bytes += key.len();
            }
        }
        let (mut there, mut bytes_there) = (0, 0);
        for (key, _) in self.exceptions() {
            there += 1;
            bytes_there += key.len();
        }
        let fits = asked == 0 || (there + asked <= EXCEPTIONS_MAX && bytes_there + bytes <= EXCEPTION_BYTES_MAX);
        if fits { Ok(()) } else { Err(TooManyExceptions { there, asked }) }
    }

    /// The next topology, one epoch higher, in which these keys live at `target`: as exceptions, or (where it owns their slot) as all others. `slots` are
    /// in transit no more; they keep their owner.
    #[must_use]
    pub fn keys_handed_over<'k>(&self, slots: &[Slot], keys: impl IntoIterator<Item = &'k Arc<[u8]>>, target: NodeId) -> Self {
        debug_assert!(self.node(target).is_some(), "a key lives at a node");
        let mut next = self.clone();
        next.epoch += 1;
        next.settle(slots);
        let mut by_slot = next.exceptions.take().map(Arc::unwrap_or_clone).map(|exceptions| exceptions.by_slot).unwrap_or_default();
        for key in keys {
            let slot = next.slot_of(key);
            let of_slot = by_slot.entry(slot).or_default();
            let place = of_slot.binary_search_by(|(known, _)| known.cmp(key));
            match (place, next.owners[slot.index()] == target) {
                (Ok(place), true) => drop(of_slot.remove(place)),
                (Ok(place), false) => of_slot[place].1 = target,
                (Err(_), true) => {}
                (Err(place), false) => of_slot.insert(place, (Arc::clone(key), target)),
            }
        }
        by_slot.retain(|_, keys| !keys.is_empty());
        next.exceptions = Exceptions::new(by_slot);
        next
    }

    /// After slots have changed their owner: keys that live at it are exceptions no more.
    pub(super) fn drop_exceptions_at_owner(&mut self, slots: &[Slot]) {
        let Some(exceptions) = &self.exceptions else { return };
        if !slots.iter().any(|slot| exceptions.has(*slot)) {
            return;
        }
        let mut by_slot = exceptions.by_slot.clone();
        for slot in slots {
            let owner = self.owners[slot.index()];
            if let Some(keys) = by_slot.get_mut(slot) {
                keys.retain(|(_, node)| *node != owner);
            }
        }
        by_slot.retain(|_, keys| !keys.is_empty());
        self.exceptions = Exceptions::new(by_slot);
    }

    /// After the continuum has changed: the same keys live at the same nodes, under the slots that they have now.
    pub(super) fn sort_exceptions_anew(&mut self) {
        let Some(exceptions) = self.exceptions.take() else { return };
        let mut by_slot: BySlot = BTreeMap::new();
        for (key, node) in Arc::unwrap_or_clone(exceptions).by_slot.into_values().flatten() {
            by_slot.entry(self.slot_of(&key)).or_default().push((key, node));
        }
        by_slot.values_mut().for_each(|keys| keys.sort_unstable());
        self.exceptions = Exceptions::new(by_slot);
    }

    /// This topology with the exceptions that were stored beside it.
    ///
    /// # Errors
    /// The first thing that is wrong: a key twice, a node that does not exist, a key that lives at its slot's owner, or too many.
    pub fn with_stored_exceptions(mut self, stored: impl IntoIterator<Item = (Arc<[u8]>, NodeId)>) -> Result<Self, PartsError> {
        let nodes: BTreeSet<NodeId> = self.nodes.iter().map(|node| node.id).collect();
        let mut by_slot: BySlot = BTreeMap::new();
        let (mut count, mut bytes) = (0, 0);
        for (key, node) in stored {
            let slot = self.slot_of(&key);
            if !nodes.contains(&node) {
                return Err(PartsError::ExceptionAtUnknown { slot: slot.number(), node });
            }
            if self.owners[slot.index()] == node {
                return Err(PartsError::ExceptionAtOwner { slot: slot.number() });
            }
            count += 1;
            bytes += key.len();
            by_slot.entry(slot).or_default().push((key, node));
        }
        if count > EXCEPTIONS_MAX || bytes > EXCEPTION_BYTES_MAX {
            return Err(PartsError::ExceptionCount(count));
        }
        for (slot, keys) in &mut by_slot {
            keys.sort_unstable();
            if keys.windows(2).any(|pair| pair[0].0 == pair[1].0) {
                return Err(PartsError::ExceptionTwice { slot: slot.number() });
            }
        }
        self.exceptions = Exceptions::new(by_slot);
        Ok(self)
    }
}
