//! Meaning of the move journal: open moves, assigned move ids, and keys that moves have left at nodes.
//!
//! Lies between policy, which defines the records, and [`crate::journal`], which stores bytes. It keeps the entries of
//! a compacted journal in memory, so that the file can be rewritten without entries that no restart needs: the keys of
//! ended legs.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use switchyard_policy::migration::record::{Kind, Replay};
use switchyard_policy::migration::{Fingerprinter, Record, Side};
use switchyard_policy::topology::{MoveId, NodeId, Slot};

use crate::journal::{Content, Done, Journal, JournalError, JournalStatus, Sync};
use crate::store::{Store, StoreError, load_json, save_json};

/// Store document of the journal's identity, which must not be in the journal itself.
const IDENTITY: &str = "moves";

/// First byte of an entry: a policy record, or the summary of compacted records.
const RECORD: u8 = 0;
const SUMMARY: u8 = 1;

/// Minimum length for compaction while moves are open, in bytes.
const LENGTH_MIN: u64 = 4 << 20;

/// Minimum length for compaction after a move while no move is open, in bytes. Short moves may follow each other
/// quickly, and each compaction waits for the disk three times.
const IDLE_LENGTH_MIN: u64 = 64 << 10;

/// Maximum wait for the journal when slots are split. No move is open then, so only a failing disk delays the journal.
const SPLIT_TIMEOUT: Duration = Duration::from_secs(10);

/// Errors of opening the ledger.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// The journal cannot be used.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The store cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The journal's entries contradict each other.
    #[error(
        "the journal of moves in {directory} is contradictory: {what}. It records which keys have moved, so nothing is guessed: replace the \
         whole state directory by a copy from a backup, or see `switchyard recover --help`"
    )]
    Contradiction {
        /// The state directory.
        directory: String,
        /// The contradiction.
        what: String,
    },
    /// The journal contains an entry that this version does not support.
    #[error(
        "the journal of moves in {directory} contains data that Switchyard {} does not support: {what}. Switchyard {} has written it; use that version, \
         or a later one",
        crate::VERSION,
        version.as_deref().unwrap_or("of a later version"),
    )]
    Unknown {
        /// The state directory.
        directory: String,
        /// Description of the entry.
        what: String,
        /// Newest version that has written to the directory, if known.
        version: Option<String>,
    },
    /// The system's random source cannot be read.
    #[error("cannot read random numbers from the system: {0}")]
    Random(std::io::Error),
}

/// Generated once per state directory.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Identity {
    /// Identity of the journal, in hexadecimal.
    journal: String,
    /// Secret of the fingerprints, in hexadecimal.
    secret: String,
}

/// Summary of the compacted records.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PersistedState {
    /// Highest assigned move id.
    last: u64,
    /// By node: ranges of slots whose keys moves have taken away.
    left: BTreeMap<u16, Vec<(u16, u16)>>,
    /// By node: ranges of slots with unused copies.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    copies: BTreeMap<u16, Vec<(u16, u16)>>,
}

#[derive(Debug, Default)]
struct State {
    last: u64,
    left: BTreeMap<NodeId, BTreeSet<Slot>>,
    /// Slots whose unused copies may be at a node, with a number that changes with each leg that adds some.
    copies: BTreeMap<NodeId, (u64, BTreeSet<Slot>)>,
    numbers: u64,
    open: BTreeMap<MoveId, OpenEntries>,
}

/// An open move, with its entries in a compacted journal.
#[derive(Debug)]
struct OpenEntries {
    source: NodeId,
    target: NodeId,
    /// Only some keys of the slots move, so earlier moves may have left others at its nodes.
    keys_only: bool,
    /// Whether the target receives copies of keys before any other record.
    copies_first: bool,
    entries: Vec<Entry>,
    legs: BTreeMap<u32, OpenLeg>,
}

/// An open leg.
#[derive(Debug)]
struct OpenLeg {
    slots: Vec<Slot>,
    /// Whether its keys may have moved.
    moving: bool,
    /// The leg ends without its target, which keeps its keys.
    target_given_up: bool,
    /// The leg ends without its source, which may have the only copy of some keys.
    source_given_up: bool,
}

#[derive(Debug)]
struct Entry {
    /// Leg after which the entry is useless.
    until_end_of: Option<u32>,
    /// Leg that this entry starts.
    begins: Option<u32>,
    bytes: Vec<u8>,
}

fn site_of(fingerprints: Fingerprinter) -> String {
    format!("{:08x}", fingerprints.of(b"switchyard:site").0 >> 96)
}

fn number_in(store: &dyn Store, text: &str) -> Result<u128, StoreError> {
    u128::from_str_radix(text, 16)
        .map_err(|error| store.damaged_document(IDENTITY, &format!("{text:?} is not a number: {error}")))
}

/// The open ledger.
#[derive(Debug)]
pub struct Ledger {
    journal: Journal,
    fingerprinter: Fingerprinter,
    state: Arc<Mutex<State>>,
}

/// An opened ledger, with the moves that were open.
#[derive(Debug)]
pub struct OpenedLedger {
    /// The ledger.
    pub ledger: Ledger,
    /// Moves that were open when it was closed.
    pub replay: Replay,
    /// Size of a torn last group in bytes, which was removed.
    pub torn: u64,
}

impl Ledger {
    /// Opens the journal in `directory`, whose store is `store`.
    ///
    /// # Errors
    /// If journal or store cannot be used, or the journal contradicts itself.
    pub fn open(directory: &Path, store: &dyn Store, sync: Sync) -> Result<OpenedLedger, LedgerError> {
        let mut identity: Identity = load_json(store, IDENTITY)?;
        let known = !identity.journal.is_empty();
        if !known {
            let word = || random().map(|number| format!("{number:032x}")).map_err(LedgerError::Random);
            identity = Identity { journal: word()?, secret: word()? };
        }
        let number = |text: &str| number_in(store, text);
        let state = Arc::<Mutex<State>>::default();
        let shared = Arc::clone(&state);
        // Updated when entries are durable, so the memory agrees with the file.
        let whole = Box::new(move || shared.lock().unwrap_or_else(PoisonError::into_inner).content());
        let opened = Journal::open(directory, number(&identity.journal)?, known, sync, whole)?;
        if !known {
            save_json(store, IDENTITY, &identity)?;
        }
        let contradiction =
            |what: String| LedgerError::Contradiction { directory: directory.display().to_string(), what };
        let unknown = |what: String| LedgerError::Unknown {
            directory: directory.display().to_string(),
            what,
            version: store.newest_version(),
        };
        let mut found = State::default();
        let mut replay = Replay::default();
        for entry in &opened.entries {
            match entry.split_first() {
                Some((&SUMMARY, kept)) => {
                    let kept: PersistedState =
                        serde_json::from_slice(kept).map_err(|error| unknown(error.to_string()))?;
                    replay.last = replay.last.max(kept.last);
                    found.restore(kept);
                }
                Some((&RECORD, bytes)) => {
                    // Checksums exclude damage, so an unreadable record is from another version.
                    let record = Record::decode(bytes).map_err(|error| unknown(error.to_string()))?;
                    replay.apply(&record).map_err(|error| contradiction(error.to_string()))?;
                    found.note(&record, entry);
                }
                _ => return Err(unknown("an entry of no known kind".into())),
            }
        }
        *state.lock().unwrap_or_else(PoisonError::into_inner) = found;
        let ledger =
            Self { journal: opened.journal, fingerprinter: Fingerprinter::new(number(&identity.secret)?), state };
        Ok(OpenedLedger { ledger, replay, torn: opened.torn })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Identifies this state directory at nodes, without disclosing its secret.
    #[must_use]
    pub fn site(&self) -> String {
        site_of(self.fingerprinter)
    }

    /// Identifier of the store's directory. `None` if no router has used it yet.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn site_in(store: &dyn Store) -> Result<Option<String>, LedgerError> {
        let identity: Identity = load_json(store, IDENTITY)?;
        if identity.secret.is_empty() {
            return Ok(None);
        }
        Ok(Some(site_of(Fingerprinter::new(number_in(store, &identity.secret)?))))
    }

    /// Fingerprint function, keyed by the secret of this state directory.
    #[must_use]
    pub fn fingerprinter(&self) -> Fingerprinter {
        self.fingerprinter
    }

    /// Returns a new move id.
    pub fn next_move(&self) -> MoveId {
        let mut state = self.state();
        state.last += 1;
        MoveId(state.last)
    }

    /// Slots whose keys may be at the node although it does not own them, because moves took them away from it.
    #[must_use]
    pub fn leftover_slots(&self, node: NodeId) -> Vec<Slot> {
        self.state().left.get(&node).map(|slots| slots.iter().copied().collect()).unwrap_or_default()
    }

    /// Slots with possible unused copies by node, ascending, and a number that changes with each leg that adds copies.
    #[must_use]
    pub fn copies(&self) -> BTreeMap<NodeId, (u64, Vec<Slot>)> {
        let state = self.state();
        let some = state.copies.iter().filter(|(_, (_, slots))| !slots.is_empty());
        some.map(|(node, (number, slots))| (*node, (*number, slots.iter().copied().collect()))).collect()
    }

    /// Records that a node has no unused copies left, unless the number has changed. A restart may restore the entry.
    pub fn clear_copies(&self, node: NodeId, number: u64) {
        let mut state = self.state();
        if state.copies.get(&node).is_some_and(|(of, _)| *of == number) {
            state.copies.remove(&node);
            drop(state);
            self.compact(0);
        }
    }

    /// Assigns parts of old slots to new ones, while no move is open: a node that may have keys of a slot may have keys
    /// of its parts. `parts`: pairs of new and old slot. Returns when this is durable: with the map of the new slots but
    /// without this record, a restart would consider such keys misplaced, and delete them.
    ///
    /// # Errors
    /// If the journal cannot be written within [`SPLIT_TIMEOUT`]. Then the new slots must not be used.
    pub fn split(&self, parts: &[(Slot, Slot)]) -> Result<(), String> {
        let mut state = self.state();
        // Entries of new slots are from an attempt that has failed.
        state.forget_slots(&parts.iter().map(|(new, _)| *new).collect());
        let parts_of = |slots: &BTreeSet<Slot>| -> Vec<Slot> {
            parts.iter().filter(|(_, old)| slots.contains(old)).map(|(new, _)| *new).collect()
        };
        let copies: Vec<(NodeId, Vec<Slot>)> =
            state.copies.iter().map(|(node, (_, slots))| (*node, parts_of(slots))).collect();
        copies.iter().filter(|(_, new)| !new.is_empty()).for_each(|(node, new)| state.add_possible_copies(*node, new));
        for slots in state.left.values_mut() {
            let new = parts_of(slots);
            slots.extend(new);
        }
        drop(state);
        self.write_now()
    }

    /// Forgets what earlier moves have left in slots that have no keys now, before their numbers are used again. Returns
    /// when this is durable.
    ///
    /// # Errors
    /// As [`Ledger::split`].
    pub fn forget_slots(&self, slots: &[Slot]) -> Result<(), String> {
        self.state().forget_slots(&slots.iter().copied().collect());
        self.write_now()
    }

    /// Rewrites the journal, and waits for it.
    fn write_now(&self) -> Result<(), String> {
        let (told, outcome) = mpsc::sync_channel(1);
        let state = Arc::clone(&self.state);
        self.journal.replace(
            Box::new(move |_| Some(state.lock().unwrap_or_else(PoisonError::into_inner).content())),
            // Fails only if this function no longer waits.
            Box::new(move |written| drop(told.send(written))),
        );
        outcome.recv_timeout(SPLIT_TIMEOUT).unwrap_or_else(|_| Err("it is busy".to_owned()))
    }

    /// Compacts the journal if that saves enough. `idle_min`: minimum length for compaction while no move is open, in
    /// bytes.
    fn compact(&self, idle_min: u64) {
        let state = Arc::clone(&self.state);
        self.journal.replace(
            Box::new(move |length| {
                let state = state.lock().unwrap_or_else(PoisonError::into_inner);
                state.should_compact(length, idle_min).then(|| state.content())
            }),
            Box::new(|outcome| {
                if let Err(error) = outcome {
                    tracing::warn!("the journal of moves cannot be compacted now: {error}");
                }
            }),
        );
    }

    /// Makes records of a move durable, after all its earlier ones; then calls `done` on the journal's thread. Several
    /// moves may begin together.
    ///
    /// A move is refused if there is no room to end it. A leg, and later records of its move, wait for room to end the
    /// leg; other records wait for room.
    pub fn record(&self, records: Vec<Record>, done: Done) {
        let kind = Kind::of(&records);
        let Some(of) = records.first().map(Record::move_id) else { return done(Ok(())) };
        assert!(kind == Kind::StartsMove || records.iter().all(|record| record.move_id() == of), "records of one move");
        let entry = |record: &Record| {
            let mut entry = vec![RECORD];
            record.encode(&mut entry);
            entry
        };
        let entries: Vec<Vec<u8>> = records.iter().map(entry).collect();
        let gives_up = |record: &Record| matches!(record, Record::LegBegun { leg, .. } if *leg > 0);
        let shorter = records
            .iter()
            .any(|record| matches!(record, Record::LegEnded { .. } | Record::Ended { .. }) || gives_up(record));
        let state = Arc::clone(&self.state);
        let noted = entries.clone();
        // Runs on the journal's thread.
        let durable = move |outcome: Result<(), String>| {
            if outcome.is_ok() {
                let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
                records.iter().zip(&noted).for_each(|(record, entry)| state.note(record, entry));
            }
            done(outcome);
        };
        self.journal.append(of, entries, kind, Box::new(durable));
        if shorter {
            self.compact(IDLE_LENGTH_MIN);
        }
    }

    /// State and statistics of the journal.
    #[must_use]
    pub fn status(&self) -> JournalStatus {
        self.journal.status()
    }
}

fn random() -> std::io::Result<u128> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)?;
    Ok(u128::from_le_bytes(bytes))
}

impl State {
    fn restore(&mut self, kept: PersistedState) {
        self.last = self.last.max(kept.last);
        for (node, ranges) in kept.left {
            self.left.entry(NodeId(node)).or_default().extend(slots_in(ranges));
        }
        for (node, ranges) in kept.copies {
            self.add_possible_copies(NodeId(node), &slots_in(ranges));
        }
    }

    /// Removes all entries of slots that have had no keys.
    fn forget_slots(&mut self, unused: &BTreeSet<Slot>) {
        let copies = self.copies.values_mut().map(|(_, slots)| slots);
        copies.for_each(|slots| slots.retain(|slot| !unused.contains(slot)));
        self.left.values_mut().for_each(|slots| slots.retain(|slot| !unused.contains(slot)));
    }

    fn note(&mut self, record: &Record, bytes: &[u8]) {
        let add = |state: &mut Self, move_id: &MoveId, until_end_of| {
            if let Some(open) = state.open.get_mut(move_id) {
                let begins = if let Record::LegBegun { leg, .. } = record { Some(*leg) } else { None };
                open.entries.push(Entry { until_end_of, begins, bytes: bytes.to_vec() });
            }
        };
        match record {
            Record::Begun { move_id, source, target, protocol, .. } => {
                self.last = self.last.max(move_id.0);
                let open = OpenEntries {
                    source: *source,
                    target: *target,
                    keys_only: false,
                    copies_first: protocol.copies_first(),
                    entries: Vec::new(),
                    legs: BTreeMap::new(),
                };
                self.open.insert(*move_id, open);
                add(self, move_id, None);
            }
            Record::Keys { move_id, .. } => {
                if let Some(open) = self.open.get_mut(move_id) {
                    open.keys_only = true;
                }
                add(self, move_id, None);
            }
            Record::LegBegun { move_id, leg, slots, .. } => {
                if let Some(open) = self.open.get_mut(move_id) {
                    // This record abandons earlier legs that never moved keys.
                    let given_up =
                        |leg: Option<u32>| leg.and_then(|leg| open.legs.get(&leg)).is_some_and(|leg| !leg.moving);
                    open.entries.retain(|entry| !given_up(entry.begins) && !given_up(entry.until_end_of));
                    open.legs.retain(|_, leg| leg.moving);
                    open.legs.insert(
                        *leg,
                        OpenLeg { slots: slots.clone(), moving: false, target_given_up: false, source_given_up: false },
                    );
                    if open.copies_first {
                        let target = open.target;
                        self.left.entry(target).or_default().extend(slots.iter().copied());
                        self.add_possible_copies(target, slots);
                    }
                }
                add(self, move_id, None);
            }
            Record::LegMoving { move_id, leg } => {
                if let Some(leg) = self.open.get_mut(move_id).and_then(|open| open.legs.get_mut(leg)) {
                    leg.moving = true;
                }
                add(self, move_id, None);
            }
            Record::GivenUp { move_id, leg, side } => {
                if let Some(leg) = self.open.get_mut(move_id).and_then(|open| open.legs.get_mut(leg)) {
                    leg.target_given_up |= *side == Side::Target;
                    leg.source_given_up |= *side == Side::Source;
                }
                add(self, move_id, Some(*leg));
            }
            Record::Met { move_id, leg, .. }
            | Record::Moved { move_id, leg, .. }
            | Record::Committed { move_id, leg, .. }
            | Record::RolledBack { move_id, leg, .. }
            | Record::CutOver { move_id, leg }
            | Record::Behind { move_id, leg, .. }
            | Record::Returned { move_id, leg, .. } => add(self, move_id, Some(*leg)),
            Record::LegEnded { move_id, leg, owner } => {
                add(self, move_id, None);
                let Some(open) = self.open.get_mut(move_id) else { return };
                open.entries.retain(|entry| entry.until_end_of != Some(*leg));
                let Some(OpenLeg { slots, moving, target_given_up, source_given_up }) = open.legs.remove(leg) else {
                    return;
                };
                // A leg that rolls back ends when its target has no keys of the leg left, so keys found there later are
                // not from this move.
                let leaves_some = moving && (*owner == Side::Target || target_given_up);
                let (owner, other) = match owner {
                    Side::Source => (open.source, open.target),
                    Side::Target => (open.target, open.source),
                };
                let (keys_only, copies_first) = (open.keys_only, open.copies_first);
                if leaves_some {
                    self.left.entry(other).or_default().extend(slots.iter().copied());
                }
                if !keys_only {
                    let is_other = |slot: &Slot| slots.binary_search(slot).is_err();
                    self.left.entry(owner).or_default().retain(is_other);
                    if let Some((_, copies)) = self.copies.get_mut(&owner) {
                        copies.retain(is_other);
                    }
                }
                // The node may have been down when its copies should have been removed.
                if copies_first && !source_given_up {
                    self.add_possible_copies(other, &slots);
                }
            }
            Record::Ended { move_id } => drop(self.open.remove(move_id)),
        }
    }

    fn add_possible_copies(&mut self, node: NodeId, slots: &[Slot]) {
        self.numbers += 1;
        let (number, copies) = self.copies.entry(node).or_default();
        *number = self.numbers;
        copies.extend(slots.iter().copied());
    }

    fn should_compact(&self, length: u64, idle_min: u64) -> bool {
        let needed: usize = self.open.values().flat_map(|open| &open.entries).map(|entry| entry.bytes.len()).sum();
        let min = if self.open.is_empty() { idle_min } else { LENGTH_MIN.max(4 * needed as u64) };
        length > min
    }

    /// Returns the compacted journal.
    fn content(&self) -> Content {
        let left = self
            .left
            .iter()
            .filter(|(_, slots)| !slots.is_empty())
            .map(|(node, slots)| (node.0, ranges(slots)))
            .collect();
        let mut kept = vec![SUMMARY];
        let copies = self.copies.iter().filter(|(_, (_, slots))| !slots.is_empty());
        let copies = copies.map(|(node, (_, slots))| (node.0, ranges(slots))).collect();
        let document =
            serde_json::to_vec(&PersistedState { last: self.last, left, copies }).expect("numbers are always JSON");
        kept.extend_from_slice(&document);
        let open = self.open.values().flat_map(|open| &open.entries).map(|entry| entry.bytes.clone());
        Content { entries: std::iter::once(kept).chain(open).collect(), is_open: !self.open.is_empty() }
    }
}

fn slots_in(ranges: Vec<(u16, u16)>) -> Vec<Slot> {
    ranges.into_iter().flat_map(|(first, last)| first..=last).filter_map(Slot::new).collect()
}

fn ranges(slots: &BTreeSet<Slot>) -> Vec<(u16, u16)> {
    let numbers: Vec<u16> = slots.iter().map(|slot| slot.number()).collect();
    numbers.chunk_by(|a, b| a + 1 == *b).map(|run| (run[0], run[run.len() - 1])).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use switchyard_policy::migration::{Durability, Fingerprint, Process, Protocol};

    use super::*;
    use crate::store::RedbStore;

    const MOVE: MoveId = MoveId(1);

    fn slots(range: std::ops::Range<u16>) -> Vec<Slot> {
        range.filter_map(Slot::new).collect()
    }

    fn begun(id: MoveId) -> Record {
        Record::Begun {
            move_id: id,
            source: NodeId(0),
            target: NodeId(1),
            slots: slots(0..20),
            protocol: Protocol::Switchyard,
            durability: Durability::Memory,
        }
    }

    fn process(name: &str) -> Process {
        Process { run_id: name.to_owned(), client_id: 7 }
    }

    fn leg(number: u32, range: std::ops::Range<u16>) -> [Record; 2] {
        [
            Record::LegBegun {
                move_id: MOVE,
                leg: number,
                slots: slots(range),
                source: process("a"),
                target: process("b"),
            },
            Record::LegMoving { move_id: MOVE, leg: number },
        ]
    }

    fn moved(leg: u32, keys: u128) -> Record {
        Record::Moved { move_id: MOVE, leg, keys: (0..keys).map(Fingerprint).collect() }
    }

    fn record(ledger: &Ledger, records: &[Record]) {
        let (told, outcome) = channel();
        ledger.record(records.to_vec(), Box::new(move |result| told.send(result).expect("waited for")));
        outcome.recv().expect("an outcome").expect("written");
    }

    fn open(directory: &Path) -> (OpenedLedger, RedbStore) {
        let store = RedbStore::open(directory).expect("a store");
        (Ledger::open(directory, &store, Sync::Always).expect("a ledger"), store)
    }

    #[test]
    fn legs_that_never_moved_keys_leave_no_entries() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let (opened, store) = open(dir.path());
        let ledger = opened.ledger;
        record(&ledger, &[begun(MOVE)]);
        record(&ledger, &leg(0, 0..10));
        record(&ledger, &[Record::LegEnded { move_id: MOVE, leg: 0, owner: Side::Target }]);
        for number in 1..=800 {
            record(&ledger, &leg(number, 10..5_000)[..1]);
        }
        {
            let state = ledger.state();
            assert_eq!(
                (state.open[&MOVE].legs.len(), state.open[&MOVE].entries.len()),
                (1, 5),
                "the move, the leg that moved, the last attempt"
            );
        }
        assert!(ledger.status().length < 5 << 20, "the file does not grow: {:?}", ledger.status());
        record(&ledger, &leg(800, 10..5_000)[1..]);
        drop((ledger, store));
        let (opened, _store) = open(dir.path());
        let open_move = &opened.replay.open[&MOVE];
        assert_eq!((open_move.handed_over.len(), open_move.next_leg), (10, 801));
        assert!(open_move.leg.as_ref().is_some_and(|leg| leg.leg == 800 && leg.moving && leg.slots.len() == 4_990));
    }

    #[test]
    fn open_moves_and_leftover_slots_survive_a_restart() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let (opened, store) = open(dir.path());
        assert_eq!(opened.replay, Replay::default());
        let ledger = opened.ledger;
        assert_eq!(ledger.next_move(), MOVE);
        let secret = ledger.fingerprinter().of(b"key");
        record(&ledger, &[begun(MOVE)]);
        record(&ledger, &leg(0, 0..10));
        record(&ledger, &[moved(0, 3), Record::LegEnded { move_id: MOVE, leg: 0, owner: Side::Target }]);
        record(&ledger, &leg(1, 10..20));
        record(&ledger, &[moved(1, 5)]);
        drop((ledger, store));

        let (opened, store) = open(dir.path());
        let open_move = &opened.replay.open[&MOVE];
        assert_eq!((open_move.handed_over.len(), open_move.leg.as_ref().map(|l| l.slots.len())), (10, Some(10)));
        assert_eq!(opened.ledger.leftover_slots(NodeId(0)), slots(0..10));
        assert_eq!(opened.ledger.fingerprinter().of(b"key"), secret, "the secret is made once");
        let before = opened.replay.clone();
        // A compacted journal has the same meaning.
        let shorter = opened.ledger.state().content();
        opened.ledger.journal.replace(Box::new(|_| Some(shorter)), Box::new(|outcome| outcome.expect("replaced")));
        drop((opened, store));
        let (opened, store) = open(dir.path());
        assert_eq!(opened.replay, before);
        record(&opened.ledger, &[Record::LegEnded { move_id: MOVE, leg: 1, owner: Side::Source }]);
        record(&opened.ledger, &leg(2, 10..15));
        record(&opened.ledger, &[Record::GivenUp { move_id: MOVE, leg: 2, side: Side::Target }]);
        record(
            &opened.ledger,
            &[Record::LegEnded { move_id: MOVE, leg: 2, owner: Side::Source }, Record::Ended { move_id: MOVE }],
        );
        let longer = opened.ledger.status().length;
        opened.ledger.compact(0);
        drop((opened, store));

        let (opened, _store) = open(dir.path());
        assert!(opened.replay.open.is_empty());
        assert_eq!(opened.ledger.next_move(), MoveId(2), "numbers are never given twice");
        assert_eq!(opened.ledger.leftover_slots(NodeId(0)), slots(0..10));
        let left = slots(10..15);
        assert_eq!(
            opened.ledger.leftover_slots(NodeId(1)),
            left,
            "a leg that went back has left nothing, unless its target was given up"
        );
        let length = opened.ledger.status().length;
        assert!(length < 300 && length < longer, "only these are kept: {length} of {longer} bytes");
        // Keys left of a slot may be keys of its parts.
        let slot = |number| Slot::new(number).expect("a slot");
        opened.ledger.split(&[(slot(700), slot(3)), (slot(701), slot(12)), (slot(702), slot(99))]).expect("written");
        drop((opened, _store));
        let (opened, _store) = open(dir.path());
        assert_eq!(opened.ledger.leftover_slots(NodeId(0)), [slots(0..10), slots(700..701)].concat());
        assert_eq!(opened.ledger.leftover_slots(NodeId(1)), [slots(10..15), slots(701..702)].concat());
    }

    #[test]
    fn split_of_slots_fails_if_it_cannot_be_recorded() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let (opened, _store) = open(dir.path());
        let ledger = opened.ledger;
        record(&ledger, &[begun(MOVE)]);
        record(&ledger, &leg(0, 0..10));
        record(
            &ledger,
            &[Record::LegEnded { move_id: MOVE, leg: 0, owner: Side::Target }, Record::Ended { move_id: MOVE }],
        );
        let slot = |number| Slot::new(number).expect("a slot");
        // Compactions finish before the file system refuses the next one.
        ledger.split(&[(slot(800), slot(99))]).expect("written");
        let next = dir.path().join("moves.journal.new");
        std::fs::create_dir(&next).expect("made");
        assert!(ledger.split(&[(slot(700), slot(3))]).is_err());
        std::fs::remove_dir(&next).expect("removed");
        // The number is then used for a part of another slot.
        ledger.split(&[(slot(700), slot(99)), (slot(701), slot(4))]).expect("written");
        assert_eq!(ledger.leftover_slots(NodeId(0)), [slots(0..10), slots(701..702)].concat());
    }

    #[test]
    fn records_of_a_newer_version_are_refused_and_name_the_version() {
        let mut with_more = Vec::new();
        Record::Ended { move_id: MOVE }.encode(&mut with_more);
        with_more.push(1);
        for (what, entry) in [
            ("a kind of entry", vec![200, 1]),
            ("a version of records", vec![RECORD, 200, 8, 1]),
            ("a kind of record", vec![RECORD, 1, 200, 1]),
            ("a field more", [&[RECORD][..], &with_more].concat()),
            ("an unknown field of the summary", [&[SUMMARY][..], br#"{"last":1,"left":{},"colours":[]}"#].concat()),
        ] {
            let dir = tempfile::tempdir().expect("a temporary directory");
            let (opened, store) = open(dir.path());
            let (told, outcome) = channel();
            opened.ledger.journal.append(
                switchyard_policy::topology::MoveId(1),
                vec![entry],
                Kind::Required,
                Box::new(move |result| told.send(result).expect("waited for")),
            );
            outcome.recv().expect("an outcome").expect("written");
            drop((opened, store));
            let store = RedbStore::open(dir.path()).expect("a store");
            let error = Ledger::open(dir.path(), &store, Sync::Always).map(|_| ()).expect_err(what);
            assert!(matches!(error, LedgerError::Unknown { .. }), "{what}: {error:?}");
            let text = error.to_string();
            let has_written = format!("Switchyard {} has written it; use that version", crate::VERSION);
            assert!(text.contains(&has_written) && !text.contains("damaged"), "{what}: {text}");
        }
    }

    #[test]
    fn a_move_of_keys_keeps_their_names_and_does_not_clear_a_slot() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let (opened, store) = open(dir.path());
        // An earlier move has taken the slots from node 1.
        record(
            &opened.ledger,
            &[Record::Begun {
                move_id: MoveId(7),
                source: NodeId(1),
                target: NodeId(0),
                slots: slots(0..10),
                protocol: Protocol::Switchyard,
                durability: Durability::Memory,
            }],
        );
        let LegRecords(begun_leg, moving) = LegRecords::of(MoveId(7));
        record(
            &opened.ledger,
            &[
                begun_leg,
                moving,
                Record::LegEnded { move_id: MoveId(7), leg: 0, owner: Side::Target },
                Record::Ended { move_id: MoveId(7) },
            ],
        );
        assert_eq!(opened.ledger.leftover_slots(NodeId(1)), slots(0..10));

        let names: Vec<switchyard_policy::migration::Key> = vec![b"a"[..].into(), b"b"[..].into()];
        record(&opened.ledger, &[begun(MOVE), Record::Keys { move_id: MOVE, keys: names.clone() }]);
        record(&opened.ledger, &leg(0, 0..10));
        record(&opened.ledger, &[Record::LegEnded { move_id: MOVE, leg: 0, owner: Side::Target }]);
        assert_eq!(
            opened.ledger.leftover_slots(NodeId(1)),
            slots(0..10),
            "other keys of these slots may still be left there"
        );
        let shorter = opened.ledger.state().content();
        opened.ledger.journal.replace(Box::new(|_| Some(shorter)), Box::new(|outcome| outcome.expect("replaced")));
        drop((opened, store));
        let (opened, _store) = open(dir.path());
        assert_eq!(opened.replay.open[&MOVE].keys.as_deref(), Some(&names[..]));
        assert_eq!(opened.replay.open[&MOVE].handed_over, slots(0..10));
    }

    /// Records that start a leg of slots 0 to 9.
    struct LegRecords(Record, Record);

    impl LegRecords {
        fn of(move_id: MoveId) -> Self {
            let begun =
                Record::LegBegun { move_id, leg: 0, slots: slots(0..10), source: process("a"), target: process("b") };
            Self(begun, Record::LegMoving { move_id, leg: 0 })
        }
    }

    #[test]
    fn a_journal_that_contradicts_itself_is_refused() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let (opened, store) = open(dir.path());
        record(&opened.ledger, &[moved(0, 1)]);
        drop(opened);
        let error = Ledger::open(dir.path(), &store, Sync::Always).expect_err("no such move").to_string();
        assert!(error.contains("is contradictory"), "{error}");
    }
}
