//! Leftovers of earlier moves at the target, in slots that move there. They are removed, because the source has the
//! current copies.
//!
//! The source confirms this. A few keys that it lacks were deleted by clients. If it lacks most of them, the target may
//! have the only copies, for example after a restore from older snapshots. Then nothing is removed until an operator
//! decides.

use switchyard_policy::migration::{Key, Side};
use switchyard_resp::units::counted;
use tracing::info;

use super::run::{Mover, MoverExit};

/// Minimum number of keys that only the target has to stop the move, if they are also more than the keys that both
/// have.
const ONLY_THERE_MIN: usize = 20;

/// Whether a node has suspiciously many keys that the owners of their slots lack. `only_at_target`: keys that the
/// owners lack. `twice`: keys that the owners have, too.
#[must_use]
pub const fn may_be_only_copies(only_there: usize, twice: usize) -> bool {
    only_there >= ONLY_THERE_MIN && only_there > twice
}

/// Undecided names kept in memory.
const REMEMBERED_MAX: usize = 100_000;

/// Names per query.
const AT_ONCE: usize = 500;

#[derive(Debug, Default)]
pub(super) struct OrphanedKeys {
    /// Removed keys: also at the source, or deleted there by clients.
    removed: usize,
    /// Keys that the source lacks, with their database.
    only_at_target: Vec<(u32, Key)>,
}

impl Mover {
    /// Removes these leftover keys if the source has them. Remembers the others for `decide`.
    pub(super) fn remove_left_over(
        &mut self,
        left: &mut OrphanedKeys,
        database: u32,
        keys: &[Key],
    ) -> Result<(), MoverExit> {
        for keys in keys.chunks(AT_ONCE) {
            let told_to = self.life.order().how.purge_target;
            let at_source = match told_to {
                true => keys.to_vec(),
                false if self.select(Side::Source, database)? => self.existing_keys(Side::Source, keys)?,
                false => Vec::new(),
            };
            // Same order as `keys`.
            let mut twice = at_source.iter().peekable();
            let only_there =
                keys.iter().filter(|key| twice.next_if_eq(key).is_none()).map(|key| (database, key.clone()));
            left.only_at_target.extend(only_there);
            if !at_source.is_empty() && self.select(Side::Target, database)? {
                self.unlink(Side::Target, &at_source)?;
                left.removed += at_source.len();
            }
            if left.only_at_target.len() >= REMEMBERED_MAX {
                self.decide(left)?;
            }
        }
        Ok(())
    }

    /// Decides about the remaining names and logs the count.
    pub(super) fn end_left_over(&mut self, mut left: OrphanedKeys) -> Result<(), MoverExit> {
        self.decide(&mut left)?;
        if left.removed > 0 {
            info!(move_id = self.id.0, keys = left.removed, "removed leftovers at the target");
        }
        Ok(())
    }

    /// Removes the keys that only the target has, or stops the move.
    fn decide(&mut self, left: &mut OrphanedKeys) -> Result<(), MoverExit> {
        let only_there = std::mem::take(&mut left.only_at_target);
        if may_be_only_copies(only_there.len(), left.removed) {
            return Err(MoverExit::Stop(format!(
                "{} still has {} of slots that it does not own, and {}, which owns them, lacks them: an abandoned node has kept them, or servers were restored \
                 from snapshots of different times (docs/backup.md), or clients have since deleted them. Save them if needed; then let the move remove them (--purge-target)",
                self.name(self.life.order().target),
                counted(only_there.len(), "key"),
                self.name(self.life.order().source),
            )));
        }
        for of_database in only_there.chunk_by(|(one, _), (other, _)| one == other) {
            if self.select(Side::Target, of_database[0].0)? {
                let keys: Vec<Key> = of_database.iter().map(|(_, key)| key.clone()).collect();
                for keys in keys.chunks(AT_ONCE) {
                    self.unlink(Side::Target, keys)?;
                    left.removed += keys.len();
                }
            }
        }
        Ok(())
    }
}
