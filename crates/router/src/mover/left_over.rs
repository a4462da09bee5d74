//! What earlier moves have left at the target, in slots that are to move there: it is removed, because it is there a
//! second time, at the source.
//!
//! The source is asked. A few keys that it has not are keys that clients have deleted. Where it lacks most, these are
//! no leftovers but all that is left: servers were restored from snapshots of before the earlier move, say. Then
//! nothing is removed before somebody has looked.

use switchyard_policy::migration::{Key, Side};
use switchyard_resp::units::counted;
use tracing::info;

use super::run::{Mover, MoverExit};

/// So many keys that only the target has, and more than both have, are no accident.
const ONLY_THERE_MIN: usize = 20;

/// Whether so many keys of slots that a node does not own, which their owners lack, are more than clients have deleted
/// there: beside so many that their owners have.
#[must_use]
pub const fn are_all_that_is_left(only_there: usize, twice: usize) -> bool {
    only_there >= ONLY_THERE_MIN && only_there > twice
}

/// So many names are remembered before it is decided.
const REMEMBERED_MAX: usize = 100_000;

/// Names of one question.
const AT_ONCE: usize = 500;

#[derive(Debug, Default)]
pub(super) struct OrphanedKeys {
    /// Removed: the source has them, too, or clients have deleted them there.
    removed: usize,
    /// With their database: the source has none of them.
    only_there: Vec<(u32, Key)>,
}

impl Mover {
    /// Removes what the target has of these keys of a database, as far as the source has them as well.
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
                false if self.select(Side::Source, database)? => self.there(Side::Source, keys)?,
                false => Vec::new(),
            };
            // In the order of `keys`.
            let mut twice = at_source.iter().peekable();
            let only_there =
                keys.iter().filter(|key| twice.next_if_eq(key).is_none()).map(|key| (database, key.clone()));
            left.only_there.extend(only_there);
            if !at_source.is_empty() && self.select(Side::Target, database)? {
                self.unlink(Side::Target, &at_source)?;
                left.removed += at_source.len();
            }
            if left.only_there.len() >= REMEMBERED_MAX {
                self.decide(left)?;
            }
        }
        Ok(())
    }

    /// All was looked at.
    pub(super) fn end_left_over(&mut self, mut left: OrphanedKeys) -> Result<(), MoverExit> {
        self.decide(&mut left)?;
        if left.removed > 0 {
            info!(move_id = self.id.0, keys = left.removed, "removed what was left over at the target");
        }
        Ok(())
    }

    /// Removes what only the target has, or refuses to.
    fn decide(&mut self, left: &mut OrphanedKeys) -> Result<(), MoverExit> {
        let only_there = std::mem::take(&mut left.only_there);
        if are_all_that_is_left(only_there.len(), left.removed) {
            return Err(MoverExit::Stop(format!(
                "{} still has {} of slots that it does not own, and {}, which owns them, has them not: they are what a node that was given up has kept, or servers were restored \
                 from snapshots of different times (docs/backup.md), or clients have deleted them since. Save them if they matter; then let the move remove them (--purge-target)",
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
