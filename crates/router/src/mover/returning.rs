//! Return of slots to a node that was ejected. If its server process is still the same, it keeps the keys that were not
//! written elsewhere in the meantime.
//!
//! The order proves correctness. The keys at the target are listed together with the keys of the source. When a leg has
//! drained, every worker has recorded all its writes to the source. Then the target's keys of these slots are checked
//! once, and keys that may have changed elsewhere are removed. Only then does the leg start. So no remaining key is
//! also at the source, or was written or deleted since. If this router ends before that, the next one has no list, and
//! removes all of them (`purge_target`).

use std::path::PathBuf;
use std::sync::Arc;

use switchyard_policy::migration::{Key, Side};
use switchyard_policy::topology::Slot;
use tracing::warn;

use super::run::{Mover, MoverExit};
use super::spool::Spool;
use crate::away::Away;

/// Names per command.
const AT_ONCE: usize = 500;

/// Keys that the target of a move may keep.
pub(super) struct Returning {
    away: Arc<Away>,
    directory: PathBuf,
    /// Keys found at the target. `None` if they could not be listed.
    found: Option<Spool>,
    kept: u64,
    removed: u64,
}

impl Returning {
    /// Stores list files in `directory`.
    pub(super) fn new(away: Arc<Away>, directory: PathBuf) -> Self {
        let found = Some(Spool::new(directory.clone()));
        Self { away, directory, found, kept: 0, removed: 0 }
    }

    /// Starts a new list of the target's keys.
    pub(super) fn begin(&mut self) {
        self.found = Some(Spool::new(self.directory.clone()));
    }

    /// Whether a key found at the target may stay until its leg begins. `process`: `run_id` of the target.
    pub(super) fn may_stay(&mut self, process: &str, slot: Slot, key: &[u8]) -> bool {
        let may_stay = self.away.has(slot) && self.away.is_current(process, key);
        if may_stay
            && let Some(found) = &mut self.found
            && let Err(unlisted) = found.add(slot, key)
        {
            warn!(error = %unlisted.error, "the target's keys cannot be listed: all of them are removed");
            self.found = None;
        }
        may_stay
    }
}

impl Mover {
    /// Whether a key found at the target, in a slot of the move, may stay there until its leg begins.
    pub(super) fn may_stay(&mut self, slot: Slot, key: &[u8]) -> bool {
        let Some(process) = self.target.connection.as_ref().map(|connection| &connection.process.run_id) else {
            return false;
        };
        // Leftovers of an earlier move are stale.
        let is_left = self.leftovers.binary_search(&slot).is_ok();
        !is_left && self.returning.as_mut().is_some_and(|returning| returning.may_stay(process, slot, key))
    }

    /// Removes outdated keys of a leg's slots at the target. Must be called when the slots have drained, before the leg
    /// starts.
    pub(super) fn remove_outdated(&mut self, slots: &[Slot]) -> Result<(), MoverExit> {
        let Some(returning) = &self.returning else { return Ok(()) };
        let Some(process) = self.target.connection.as_ref().map(|connection| connection.process.run_id.clone()) else {
            return Err(MoverExit::Lost);
        };
        let away = Arc::clone(&returning.away);
        let found = returning.found.as_ref().and_then(|found| {
            found
                .keys(slots)
                .inspect_err(|error| warn!(%error, "the target's keys cannot be read: all of them are removed"))
                .ok()
        });
        let Some(found) = found else {
            return self.walk(Side::Target, slots.iter().copied(), |mover, _, keys| mover.unlink(Side::Target, &keys));
        };
        let database = self.shared.routing().live.database;
        let outdated: Vec<Key> = found.iter().filter(|key| !away.is_current(&process, key)).cloned().collect();
        if !outdated.is_empty() && self.select(Side::Target, database)? {
            outdated.chunks(AT_ONCE).try_for_each(|keys| self.unlink(Side::Target, keys))?;
        }
        if let Some(returning) = &mut self.returning {
            // A name may be listed twice, so both are upper bounds.
            returning.removed += outdated.len() as u64;
            returning.kept += (found.len() - outdated.len()) as u64;
            if let Some(found) = &mut returning.found {
                found.forget(slots);
            }
        }
        Ok(())
    }

    /// Marks all keys of the target as outdated: after a rollback it may have copies of keys in use at the source.
    pub(super) fn mark_target_outdated(&self) {
        self.returning.iter().for_each(|returning| returning.away.note_any());
    }

    /// Returns the numbers of kept and of removed keys at the target.
    pub(super) fn kept(&self) -> Option<(u64, u64)> {
        self.returning.as_ref().map(|returning| (returning.kept, returning.removed))
    }
}
