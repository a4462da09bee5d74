//! Check after the last leg: keys that the source still has in slots that have left it.

use switchyard_policy::migration::{Fingerprint, Key, Side};
use switchyard_policy::topology::Slot;
use switchyard_resp::reply;
use tracing::warn;

use super::LateKeys;
use super::moved::Moved;
use super::run::{Mover, MoverExit};

/// Fingerprints of moved keys kept until the end. Above this limit, late keys can no longer be told apart.
const REMEMBERED_MAX: usize = 20_000_000;

/// State of keys found at the source after their slots have left it.
#[derive(Debug)]
pub(super) struct LateKeyCheck {
    moved: Moved,
    /// Whether `moved` is complete.
    is_complete: bool,
    /// Server process of the source at the start of the move.
    first_source: Option<String>,
    /// Slots, ascending, in which an earlier move may have left keys at the source.
    leftovers: Vec<Slot>,
    late: LateKeys,
}

impl LateKeyCheck {
    /// `is_resumed`: the keys moved by an earlier router process are unknown.
    pub(super) fn new(is_resumed: bool, leftovers: Vec<Slot>) -> Self {
        Self {
            moved: Moved::default(),
            is_complete: !is_resumed,
            first_source: None,
            leftovers,
            late: LateKeys::default(),
        }
    }

    /// Records the server process of the source at the first connection.
    pub(super) fn note_source_process(&mut self, run_id: &str) {
        self.first_source.get_or_insert_with(|| run_id.to_owned());
    }

    /// Records keys that have moved, or have returned.
    pub(super) fn note(&mut self, keys: &[Fingerprint], back: bool) {
        if back {
            self.moved.forget(keys);
        } else if self.moved.count < REMEMBERED_MAX {
            self.moved.note(keys);
        } else {
            self.is_complete = false;
        }
    }

    /// Whether this move has moved the key. `None` if unknown.
    fn was_moved(&mut self, key: Fingerprint) -> Option<bool> {
        if self.moved.contains(key) { Some(true) } else { self.is_complete.then_some(false) }
    }

    pub(super) fn late(&self) -> LateKeys {
        self.late
    }
}

impl Mover {
    /// Finds keys at the source in slots that have left it, and removes or moves each one if this is certainly right.
    pub(super) fn check_late_keys(&mut self) -> Result<(), MoverExit> {
        self.shown.set_activity("searching the source for late keys");
        let unchanged = self.is_first_source();
        let slots: Vec<Slot> = self.life.order().slots.clone();
        self.walk(Side::Source, slots, |mover, database, keys| {
            keys.into_iter().try_for_each(|key| mover.handle_late_key(database, &key, unchanged))
        })?;
        self.log_late_keys();
        Ok(())
    }

    pub(super) fn is_first_source(&self) -> bool {
        self.source.connection.as_ref().map(|connection| &connection.process.run_id)
            == self.late_keys.first_source.as_ref()
    }

    /// Removes, moves or leaves a key that the source still has. `unchanged`: the source is still the process of the
    /// start.
    pub(super) fn handle_late_key(&mut self, database: u32, key: &Key, unchanged: bool) -> Result<(), MoverExit> {
        // A key with a placement override: this copy is older.
        let stale =
            self.life.order().keys.is_none() && self.shared.routing().topology.placement_override(key).is_some();
        match self.late_keys.was_moved(self.fingerprints.of(key)) {
            known if stale || known == Some(true) => {
                self.unlink(Side::Source, std::slice::from_ref(key))?;
                self.late_keys.late.removed += 1;
            }
            // In slots with leftovers, the key may be an old copy from a node that was given up.
            Some(false)
                if unchanged && self.late_keys.leftovers.binary_search(&self.placement.slot_of(key)).is_err() =>
            {
                let moved = self.move_late(database, key)?;
                let late = &mut self.late_keys.late;
                *(if moved { &mut late.moved } else { &mut late.left }) += 1;
            }
            _ => self.late_keys.late.left += 1,
        }
        Ok(())
    }

    /// Logs the late keys.
    pub(super) fn log_late_keys(&self) {
        let late = self.late_keys.late;
        if late != LateKeys::default() {
            warn!(
                move_id = self.id.0,
                moved = late.moved,
                removed = late.removed,
                left = late.left,
                "the source had keys of slots that had left it: a client bypasses the router"
            );
        }
    }

    /// Moves a key that was written past the router, unless the target has a value. Returns false if the key was left.
    fn move_late(&mut self, database: u32, key: &Key) -> Result<bool, MoverExit> {
        self.call(Side::Source, &[b"MULTI"])?;
        self.call(Side::Source, &[b"PTTL", key])?;
        self.call(Side::Source, &[b"DUMP", key])?;
        let answer = self.call(Side::Source, &[b"EXEC"])?;
        if reply::is_error(&answer) {
            return Ok(false);
        }
        let mut parts = reply::elements(&answer);
        let ttl = parts.next().and_then(reply::integer).unwrap_or(-2);
        let Some(dump) = parts.next().filter(|d| !reply::is_null(d)).and_then(reply::text).map(<[u8]>::to_vec) else {
            return Ok(true);
        };
        if ttl == -2 || !self.select(Side::Target, database)? {
            return Ok(ttl == -2);
        }
        let ttl = if ttl < 0 { "0".to_owned() } else { ttl.max(1).to_string() };
        let stored = self.call(Side::Target, &[b"RESTORE", key, ttl.as_bytes(), &dump])?;
        if reply::is_error(&stored) {
            return Ok(false); // the target has a value that clients use
        }
        self.unlink(Side::Source, std::slice::from_ref(key))?;
        Ok(true)
    }
}
