//! Big keys: keys for which a DUMP and RESTORE would block all clients of their nodes.
//!
//! The size of every key is queried once, with the listing or before its leg ([`super::sizes`]), and again before its
//! leg if it was written since. An average is no substitute: it hides the one large key.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use switchyard_policy::migration::staging::Place;
use switchyard_policy::migration::{Key, Side};
use switchyard_policy::topology::Slot;
use switchyard_resp::reply;
use tracing::warn;

use super::run::{Mover, MoverExit};

/// Written keys kept in memory. Above this limit, all keys of their slots are measured again.
const WRITTEN_MAX: usize = 500_000;
/// Size queries per round trip.
const AT_ONCE: usize = 500;

/// Big keys of a move, for status output.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BigKeys {
    /// Moved in pieces.
    pub in_pieces: u64,
    /// Moved whole. Commands for the key, and all others at its nodes, waited.
    pub whole: u64,
    /// Longest duration of a key that was moved whole, microseconds.
    pub whole_us_max: u64,
    /// Type, size, duration and reason of the last key that was moved whole. Empty if none.
    pub whole_last: String,
    /// Big keys being copied in pieces now.
    pub in_progress: Vec<BigKey>,
}

/// A big key that is being copied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BigKey {
    /// hash, set, zset, list or string.
    pub kind: &'static str,
    /// Memory at the source, bytes.
    pub bytes: u64,
    /// Bytes copied so far.
    pub copied: u64,
    /// The first pass has read the whole value. Later passes read elements changed since.
    pub is_read: bool,
    /// Restarts of the copy because the whole value was replaced.
    pub restarts: u32,
}

/// A big key.
#[derive(Debug)]
pub(super) struct BigKeyState {
    pub(super) bytes: u64,
    /// Reason why it is moved whole, if it is.
    pub(super) whole: Option<String>,
}

/// The big keys of a move that have not moved yet.
#[derive(Debug)]
pub(super) struct Big {
    /// Minimum size of a big key in bytes, as of the listing. `None`: no key is big.
    limit: Option<u64>,
    found: BTreeMap<Slot, BTreeMap<Place, BigKeyState>>,
    /// Keys written since their size was queried.
    written: HashMap<Slot, HashSet<Key>>,
    written_count: usize,
    /// Slots with too many written keys to record.
    unknown: BTreeSet<Slot>,
    refused: bool,
    pub(super) shown: BigKeys,
}

impl Big {
    pub(super) fn new(limit: Option<u64>) -> Self {
        Self {
            limit,
            found: BTreeMap::new(),
            written: HashMap::new(),
            written_count: 0,
            unknown: BTreeSet::new(),
            refused: false,
            shown: BigKeys::default(),
        }
    }

    pub(super) fn set_limit(&mut self, limit: Option<u64>) {
        self.limit = limit;
    }

    pub(super) fn matters(&self) -> bool {
        self.limit.is_some()
    }

    /// Minimum size of a big key in bytes.
    pub(super) fn limit(&self) -> u64 {
        self.limit.unwrap_or(u64::MAX)
    }

    pub(super) fn note_written(&mut self, slot: Slot, key: Key) {
        if self.unknown.contains(&slot) {
            return;
        }
        if self.written_count >= WRITTEN_MAX {
            self.written_count -= self.written.remove(&slot).map_or(0, |keys| keys.len());
            self.unknown.insert(slot);
        } else if self.written.entry(slot).or_default().insert(key) {
            self.written_count += 1;
        }
    }

    /// Returns the big keys of the slots.
    pub(super) fn of<'b>(&'b self, slots: &'b [Slot]) -> impl Iterator<Item = (&'b Place, &'b BigKeyState)> {
        slots.iter().filter_map(|slot| self.found.get(slot)).flatten()
    }

    pub(super) fn bytes_of(&self, slot: Slot) -> u64 {
        self.found.get(&slot).map_or(0, |found| found.values().map(|found| found.bytes).sum())
    }

    pub(super) fn has_some_of(&self, slot: Slot) -> bool {
        self.found.contains_key(&slot)
    }

    pub(super) fn get(&self, slot: Slot, place: &Place) -> Option<&BigKeyState> {
        self.found.get(&slot)?.get(place)
    }

    pub(super) fn get_mut(&mut self, slot: Slot, place: &Place) -> Option<&mut BigKeyState> {
        self.found.get_mut(&slot)?.get_mut(place)
    }

    pub(super) fn forget(&mut self, slot: Slot, place: &Place) {
        if let Some(found) = self.found.get_mut(&slot) {
            found.remove(place);
        }
    }

    pub(super) fn forget_slots(&mut self, slots: &[Slot]) {
        for slot in slots {
            self.found.remove(slot);
            self.unknown.remove(slot);
            self.written_count -= self.written.remove(slot).map_or(0, |keys| keys.len());
        }
    }

    /// Records the size of a key that was just listed. Small keys, nearly all, are not stored.
    pub(super) fn note_listed(&mut self, slot: Slot, key: &[u8], database: u32, answer: &[u8]) {
        let limit = self.limit();
        let is_small =
            reply::integer(answer).is_some_and(|bytes| u64::try_from(bytes).is_ok_and(|bytes| bytes < limit));
        if !is_small || self.found.contains_key(&slot) {
            self.note_size(slot, (key.into(), database), answer);
        }
    }

    /// Records the size of a key.
    pub(super) fn note_size(&mut self, slot: Slot, place: Place, answer: &[u8]) {
        let limit = self.limit();
        self.refused |= reply::is_error(answer);
        match reply::integer(answer).and_then(|bytes| u64::try_from(bytes).ok()) {
            Some(bytes) if bytes >= limit => {
                let found =
                    self.found.entry(slot).or_default().entry(place).or_insert(BigKeyState { bytes, whole: None });
                found.bytes = bytes;
            }
            _ => self.forget(slot, &place),
        }
    }
}

impl Mover {
    /// Requests the size of a key, if sizes matter. Returns whether a command was sent.
    pub(super) fn query_size(&mut self, key: &Key) -> bool {
        if self.big.refused || !self.big.matters() {
            return false;
        }
        let Some(connection) = &mut self.source.connection else { return false };
        connection.push(&[b"MEMORY", b"USAGE", key]);
        true
    }

    /// Logs, once, that the node refuses size queries.
    pub(super) fn log_refused_sizes(&mut self, was_refused: bool) {
        if self.big.refused && !was_refused {
            let name = self.name(self.life.order().source);
            warn!(
                move_id = self.id.0,
                node = name,
                "the node refuses MEMORY USAGE, so big keys are unknown: they move whole, and commands wait. Allow the command for Switchyard's user"
            );
        }
    }

    pub(super) fn sizes_are_refused(&self) -> bool {
        self.big.refused
    }

    /// Queries the sizes of keys written since their slots were listed.
    pub(super) fn measure_written(&mut self, slots: &[Slot]) -> Result<(), MoverExit> {
        if self.big.refused || !self.big.matters() {
            return Ok(());
        }
        let mut keys: Vec<Key> = Vec::new();
        let mut unknown = Vec::new();
        for slot in slots {
            if self.big.unknown.remove(slot) {
                unknown.push(*slot);
            }
            let written = self.big.written.remove(slot).unwrap_or_default();
            self.big.written_count -= written.len();
            // Keys being copied are already known to be big.
            keys.extend(written);
        }
        if !unknown.is_empty() {
            keys.extend(self.list.keys(&unknown).unwrap_or_default());
        }
        for database in self.databases_in_use()? {
            if keys.is_empty() {
                break;
            }
            self.select(Side::Source, database)?;
            for some in keys.chunks(AT_ONCE) {
                some.iter().for_each(|key| {
                    self.query_size(key);
                });
                let (answers, _) = self.collect()?;
                for (key, answer) in some.iter().zip(&answers) {
                    self.big.note_size(self.placement.slot_of(key), (key.clone(), database), answer);
                }
                self.handle_messages_when_quiesced()?;
            }
        }
        Ok(())
    }

    /// Records and logs a big key that was moved whole, and the delay of clients at its nodes.
    pub(super) fn note_whole(&mut self, kind: &str, bytes: u64, us: u64, why: &str) {
        let shown = &mut self.big.shown;
        shown.whole += 1;
        shown.whole_us_max = shown.whole_us_max.max(us);
        shown.whole_last = format!("a {kind} of {bytes} bytes, {} ms: {why}", us.div_ceil(1000));
        warn!(
            move_id = self.id.0,
            kind,
            bytes,
            us,
            reason = why,
            "a big key was moved whole: commands for it, and others at its nodes, waited"
        );
    }
}
