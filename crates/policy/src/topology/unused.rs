//! Selects keys that return to their slots' owners: if the directory is nearly full, the unused ones.
//!
//! Second chance: a hand goes around the slots and clears the marks of use that lookups set. A key without a mark was
//! not used since the last visit. The hand turns slowly while there is room, and otherwise until it has found enough
//! keys, but not more than a part of the circle at once. A list in the order of use would need a write to shared memory
//! for each lookup.

use std::sync::Arc;

use super::slot::slot_at;
use super::{MOVE_KEY_BYTES_MAX, NodeId, OVERRIDE_BYTES_MAX, OVERRIDES_MAX, Slot, Topology};

/// Part of both limits of the directory that is kept free for new overrides: one of 16. If less is free, keys return
/// until it is one of 8, so that their moves are few.
const RESERVE: usize = 16;
const FREED: usize = 8;

/// Maximum part of the slots that the hand visits at once to find keys: one of 12.
const CIRCLE: usize = 12;

/// Maximum number of keys that [`UnusedOverrides::advance`] returns: a move of them is short, so commands that need their
/// slots do not wait long.
const RETURNED_MAX: usize = 4096;

/// The hand.
#[derive(Clone, Default, Debug)]
pub struct UnusedOverrides {
    /// Next slot.
    hand: usize,
    /// Less than the reserve was free, and keys return until enough is.
    is_freeing: bool,
}

impl UnusedOverrides {
    /// Advances the hand over `share` of the slots, from 0 to 1, or over more of them to find enough keys. Returns keys
    /// there that were not used since the last visit, with their nodes: as many as must return, at most [`RETURNED_MAX`].
    /// `is_busy`: keys of this slot at this node cannot move now.
    pub fn advance(
        &mut self,
        topology: &Topology,
        share: f64,
        is_busy: impl Fn(Slot, NodeId) -> bool,
    ) -> Vec<(Arc<[u8]>, NodeId)> {
        let beyond = |free: usize| {
            let beyond = |used: usize, max: usize| used.saturating_sub(max - max / free);
            (beyond(topology.override_count(), OVERRIDES_MAX), beyond(topology.override_bytes(), OVERRIDE_BYTES_MAX))
        };
        self.is_freeing = beyond(RESERVE) != (0, 0) || self.is_freeing && beyond(FREED) != (0, 0);
        let (mut keys, mut bytes) = if self.is_freeing { beyond(FREED) } else { (0, 0) };
        let (mut found, mut found_bytes) = (Vec::new(), 0);
        let slots = topology.placement().slots();
        let due = ((slots as f64 * share).ceil() as usize).min(slots);
        for visited in 0..due.max(slots / CIRCLE) {
            let is_enough = keys.max(bytes) == 0 || found.len() >= RETURNED_MAX || found_bytes >= MOVE_KEY_BYTES_MAX;
            if visited >= due && is_enough {
                break;
            }
            let slot = slot_at(self.hand % slots);
            self.hand = (self.hand + 1) % slots;
            for (key, node) in topology.take_unused_overrides(slot) {
                let fits = found.len() < RETURNED_MAX && found_bytes + key.len() <= MOVE_KEY_BYTES_MAX;
                if keys.max(bytes) > 0 && fits && !is_busy(slot, node) {
                    (keys, bytes) = (keys.saturating_sub(1), bytes.saturating_sub(key.len()));
                    found_bytes += key.len();
                    found.push((Arc::clone(key), node));
                }
            }
        }
        found
    }
}
