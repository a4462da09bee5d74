//! Slots in transit between nodes: the information that workers need in addition to the owner.
//!
//! Stored separately from the owners: without moves a lookup is one load plus one predicted branch on
//! [`Topology::is_settled`]. The owner of a slot in transit stays the source until the hand-over. The node of each
//! *key* is known to `migration`.

use super::{NodeId, SLOT_NUMBERS, Slot, Topology};

/// Move id. Never reused within a state directory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct MoveId(pub u64);

/// Progress of a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// The source serves the slot while its keys are listed. Workers report writes to the mover.
    Observed,
    /// The slot is moving in this leg. A key is served by the target once it has moved, and by no node before that.
    Moving {
        /// Leg of the move.
        leg: u32,
    },
}

/// Slots in the same stage of the same move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transit {
    /// Move id.
    pub move_id: MoveId,
    /// Source. Owns the slots while they are in transit, unless [`Self::keys_only`].
    pub source: NodeId,
    /// Target.
    pub target: NodeId,
    /// Progress.
    pub stage: Stage,
    /// Whether only the keys named by the leg move; the slots keep their owner.
    pub keys_only: bool,
}

/// The slots in transit: per slot 0, or an index into `transits` plus one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Marks {
    by_slot: Box<[u8; SLOT_NUMBERS]>,
    transits: Vec<Transit>,
}

/// More than [`Topology::TRANSITS_MAX`] transits at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TooManyTransits;

impl std::fmt::Display for TooManyTransits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "more than {} groups of slots cannot be in transit at once; let a move finish first",
            Topology::TRANSITS_MAX
        )
    }
}

impl std::error::Error for TooManyTransits {}

impl Topology {
    /// Maximum entries of [`Topology::with_transits`].
    pub const TRANSITS_MAX: usize = u8::MAX as usize;

    /// Whether no slot is in transit, so that [`Topology::owner`] is sufficient.
    #[inline]
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.marks.is_none()
    }

    /// Transit of a slot, if any.
    #[inline]
    #[must_use]
    pub fn transit(&self, slot: Slot) -> Option<&Transit> {
        let marks = self.marks.as_ref()?;
        let mark = marks.by_slot[slot.index()];
        marks.transits.get(usize::from(mark).wrapping_sub(1))
    }

    /// All transits, in the order given.
    pub fn transits(&self) -> impl Iterator<Item = &Transit> {
        self.marks.iter().flat_map(|marks| &marks.transits)
    }

    /// Returns the next topology, one epoch higher, with exactly these slots in transit. If a slot occurs twice, the
    /// later entry wins. Owners do not change. Transits are not stored: the journal of the moves is authoritative.
    ///
    /// # Errors
    /// If there are more than [`Topology::TRANSITS_MAX`].
    pub fn with_transits<'s>(
        &self,
        transits: impl IntoIterator<Item = (Transit, &'s [Slot])>,
    ) -> Result<Self, TooManyTransits> {
        let mut by_slot = Box::new([0_u8; SLOT_NUMBERS]);
        let mut all = Vec::new();
        for (transit, slots) in transits {
            if slots.is_empty() {
                continue;
            }
            all.push(transit);
            let mark = u8::try_from(all.len()).map_err(|_| TooManyTransits)?;
            for slot in slots {
                by_slot[slot.index()] = mark;
            }
        }
        let marks = (!all.is_empty()).then_some(Marks { by_slot, transits: all });
        Ok(Self { epoch: self.epoch + 1, marks, ..self.clone() })
    }

    /// Returns the next topology, one epoch higher, with `target` as the owner of `slots`, which are no longer in
    /// transit. Transits of other slots stay. Keys of `slots` at `target` lose their placement override; other
    /// overrides stay.
    #[must_use]
    pub fn handed_over(&self, slots: &[Slot], target: NodeId) -> Self {
        debug_assert!(self.node(target).is_some(), "an owner is a node");
        let mut next = self.clone();
        next.epoch += 1;
        for slot in slots {
            next.owners[slot.index()] = target;
        }
        next.settle(slots);
        next.drop_overrides_at_owner(slots);
        next
    }

    /// Ends the transit of these slots.
    pub(super) fn settle(&mut self, slots: &[Slot]) {
        let Some(marks) = &mut self.marks else { return };
        for slot in slots {
            marks.by_slot[slot.index()] = 0;
        }
        if marks.by_slot.iter().all(|mark| *mark == 0) {
            self.marks = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::crc16_slot;

    fn names(count: u16) -> Vec<String> {
        (0..count).map(|i| format!("127.0.0.1:{}", 7000 + i)).collect()
    }

    fn moving(leg: u32) -> Transit {
        Transit {
            move_id: MoveId(1),
            source: NodeId(0),
            target: NodeId(1),
            stage: Stage::Moving { leg },
            keys_only: false,
        }
    }

    #[test]
    fn a_slot_in_transit_keeps_its_owner_until_it_is_handed_over() {
        let before = Topology::even(&names(2)).expect("two nodes");
        assert!(before.is_settled());
        let slots: Vec<Slot> = [0, 1, 2].into_iter().filter_map(Slot::new).collect();
        let observed = Transit { stage: Stage::Observed, ..moving(0) };
        let during = before.with_transits([(observed, &slots[..]), (moving(0), &slots[..1])]).expect("few");
        assert_eq!(during.epoch(), before.epoch() + 1);
        assert!(!during.is_settled());
        assert_eq!(during.transit(slots[0]), Some(&moving(0)));
        assert_eq!(during.transit(slots[2]), Some(&observed));
        assert_eq!(during.transit(crc16_slot(b"foo")), None);
        assert_eq!(during.owner(slots[0]), NodeId(0));
        let after = during.handed_over(&slots[..1], NodeId(1));
        assert_eq!(after.owner(slots[0]), NodeId(1));
        assert_eq!((after.transit(slots[0]), after.transit(slots[1])), (None, Some(&observed)));
        let settled = after.handed_over(&slots, NodeId(1));
        assert!(settled.is_settled());
        assert_eq!(settled.epoch(), before.epoch() + 3);
    }

    #[test]
    fn too_many_transits_are_refused() {
        let topology = Topology::even(&names(2)).expect("two nodes");
        let slot = [Slot::new(5).expect("a slot")];
        let many = |count: u32| topology.with_transits((0..count).map(|leg| (moving(leg), &slot[..])));
        assert_eq!(many(255).expect("fit").transit(slot[0]), Some(&moving(254)));
        assert_eq!(many(256), Err(TooManyTransits));
    }
}
