//! After the last leg: whether the source still has keys of what has left it, and what can be known to be right for
//! them.

use switchyard_policy::migration::{Fingerprint, Key, Side};
use switchyard_policy::topology::Slot;
use switchyard_resp::reply;
use tracing::warn;

use super::LateKeys;
use super::moved::Moved;
use super::run::{Mover, MoverExit};

/// Fingerprints of moved keys that are remembered until the end; beyond it what is found late can no longer be told
/// apart.
const REMEMBERED_MAX: usize = 20_000_000;

/// What is known of keys that are found at the source after their slots have left it.
#[derive(Debug)]
pub(super) struct LateKeyCheck {
    moved: Moved,
    /// Whether `moved` has all of them.
    remembers_all: bool,
    /// The process that the source was when the move began.
    first_source: Option<String>,
    /// Slots, ascending, in which an earlier move of ours may have left keys there.
    leftovers: Vec<Slot>,
    late: LateKeys,
}

impl LateKeyCheck {
    /// `is_resumed`: what a router before this one has moved is not known.
    pub(super) fn new(is_resumed: bool, leftovers: Vec<Slot>) -> Self {
        Self {
            moved: Moved::default(),
            remembers_all: !is_resumed,
            first_source: None,
            leftovers,
            late: LateKeys::default(),
        }
    }

    /// The source is reached.
    pub(super) fn met(&mut self, run_id: &str) {
        self.first_source.get_or_insert_with(|| run_id.to_owned());
    }

    /// Keys have moved, or are back.
    pub(super) fn note(&mut self, keys: &[Fingerprint], back: bool) {
        if back {
            self.moved.forget(keys);
        } else if self.moved.count < REMEMBERED_MAX {
            self.moved.note(keys);
        } else {
            self.remembers_all = false;
        }
    }

    /// Whether a key was moved by us; `None`: that cannot be told any more.
    fn was_moved(&mut self, key: Fingerprint) -> Option<bool> {
        if self.moved.contains(key) { Some(true) } else { self.remembers_all.then_some(false) }
    }

    /// What was found so far.
    pub(super) fn late(&self) -> LateKeys {
        self.late
    }
}

impl Mover {
    /// Looks whether the source still has keys of the slots that have left it, and does with them what can be known to
    /// be right.
    pub(super) fn check_late_keys(&mut self) -> Result<(), MoverExit> {
        self.shown.set_activity("looking for keys left behind");
        let unchanged = self.is_first_source();
        let slots: Vec<Slot> = self.life.order().slots.clone();
        self.walk(Side::Source, slots, |mover, database, keys| {
            keys.into_iter().try_for_each(|key| mover.settle_late(database, &key, unchanged))
        })?;
        self.log_late_keys();
        Ok(())
    }

    /// Whether the source is the process that the move began with.
    pub(super) fn is_first_source(&self) -> bool {
        self.source.connection.as_ref().map(|connection| &connection.process.run_id)
            == self.late_keys.first_source.as_ref()
    }

    /// Does with a key that the source still has what can be known to be right. `unchanged`: it is the process that the
    /// move began with.
    pub(super) fn settle_late(&mut self, database: u32, key: &Key, unchanged: bool) -> Result<(), MoverExit> {
        // Of a key that lives elsewhere than its slot this is a copy of earlier.
        let stale = self.life.order().keys.is_none() && self.shared.plan().topology.exception(key).is_some();
        match self.late_keys.was_moved(self.fingerprints.of(key)) {
            known if stale || known == Some(true) => {
                self.unlink(Side::Source, std::slice::from_ref(key))?;
                self.late_keys.late.removed += 1;
            }
            // Neither of one that a node which was given up has kept of earlier.
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

    /// Says what was found late.
    pub(super) fn log_late_keys(&self) {
        let late = self.late_keys.late;
        if late != LateKeys::default() {
            warn!(
                move_id = self.id.0,
                moved = late.moved,
                removed = late.removed,
                left = late.left,
                "the source had keys of slots that had left it: somebody writes to it past the router"
            );
        }
    }

    /// Moves a key that was written past us, where nobody has it yet.
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
            return Ok(false); // there is one: clients use that
        }
        self.unlink(Side::Source, std::slice::from_ref(key))?;
        Ok(true)
    }
}
