//! The keys of a move as they were listed, and what is known of that: of which process they are, whether these are all,
//! and whether the target has none.

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;

use switchyard_policy::migration::Key;
use switchyard_policy::topology::Slot;
use tracing::warn;

use super::spool::Spool;

/// The list of the keys of a move.
#[derive(Debug)]
pub(super) struct List {
    spool: Spool,
    /// Slots with keys that are not listed: scripts may have written some that they do not name, or the list could not
    /// be written.
    incomplete: BTreeSet<Slot>,
    /// The process whose keys these are (its `run_id`). Another one may have keys again that this one had not.
    of: Option<String>,
    is_whole: bool,
    /// The target has no keys of the slots that are left.
    target_is_clean: bool,
    /// Keys found while they were listed, and those that had moved before.
    found: u64,
    moved_before: u64,
}

impl List {
    /// An empty one, whose files are in `directory`.
    pub(super) fn new(directory: PathBuf) -> Self {
        Self {
            spool: Spool::new(directory),
            incomplete: BTreeSet::new(),
            of: None,
            is_whole: false,
            target_is_clean: false,
            found: 0,
            moved_before: 0,
        }
    }

    /// The keys of a process are about to be listed, of a move that has moved so many.
    pub(super) fn begin(&mut self, of: Option<String>, moved: u64) {
        (self.of, self.found, self.moved_before) = (of, 0, moved);
    }

    /// All keys are listed.
    pub(super) fn end(&mut self) {
        self.is_whole = true;
    }

    /// A key was found.
    pub(super) fn find(&mut self, slot: Slot, key: &[u8]) {
        self.found += 1;
        self.add(slot, key);
    }

    /// A key may be there.
    pub(super) fn add(&mut self, slot: Slot, key: &[u8]) {
        if let Err(unlisted) = self.spool.add(slot, key) {
            let (error, slots) = (unlisted.error, unlisted.slots);
            warn!(%error, slots = slots.len(), "the list of keys cannot be written and stays in memory; for these slots that is too much, and their node is asked again");
            self.incomplete.extend(slots);
        }
    }

    /// Any key of a slot may be there.
    pub(super) fn add_anything(&mut self, slot: Slot) {
        self.incomplete.insert(slot);
    }

    /// These slots have left.
    pub(super) fn forget(&mut self, slots: &[Slot]) {
        self.spool.forget(slots);
    }

    /// The keys of these slots.
    pub(super) fn keys(&self, slots: &[Slot]) -> io::Result<Vec<Key>> {
        self.spool.keys(slots)
    }

    /// Calls `with` with each key of these slots.
    pub(super) fn for_each(&self, slots: &[Slot], with: impl FnMut(Slot, &[u8])) -> io::Result<()> {
        self.spool.for_each(slots, with)
    }

    /// How many keys of a slot are listed.
    pub(super) fn count(&self, slot: Slot) -> u32 {
        self.spool.count(slot)
    }

    /// Whether a slot has keys that are not listed.
    pub(super) fn lacks_some(&self, slot: Slot) -> bool {
        self.incomplete.contains(&slot)
    }

    /// The process whose keys these are, once they are being listed.
    pub(super) fn of(&self) -> Option<&str> {
        self.of.as_deref()
    }

    /// Whether all are listed.
    pub(super) fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// Keys of the whole move, as far as they are listed.
    pub(super) fn total(&self) -> u64 {
        self.moved_before + self.found
    }

    /// Whether the target has no keys of the slots that are left.
    pub(super) fn target_is_clean(&self) -> bool {
        self.target_is_clean
    }

    /// The target was looked through; or it may have others again.
    pub(super) fn set_target_is_clean(&mut self, is_clean: bool) {
        self.target_is_clean = is_clean;
    }
}
