//! List of the keys of a move, and its state: source process, completeness, and whether the target has no keys.

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;

use switchyard_policy::migration::Key;
use switchyard_policy::topology::Slot;
use tracing::warn;

use super::spool::Spool;

#[derive(Debug)]
pub(super) struct List {
    spool: Spool,
    /// Slots with unlisted keys: scripts may have written undeclared keys, or the list could not be written.
    incomplete: BTreeSet<Slot>,
    /// `run_id` of the listed process. Another process may have keys again that were deleted here.
    of: Option<String>,
    is_whole: bool,
    /// The target has no keys of the remaining slots.
    target_is_clean: bool,
    /// Keys found by the listing, and keys moved before it.
    found: u64,
    moved_before: u64,
}

impl List {
    /// Returns an empty list with its files in `directory`.
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

    /// Starts the listing of a process. `moved`: keys moved so far.
    pub(super) fn begin(&mut self, of: Option<String>, moved: u64) {
        (self.of, self.found, self.moved_before) = (of, 0, moved);
    }

    /// Marks the listing as complete.
    pub(super) fn end(&mut self) {
        self.is_whole = true;
    }

    /// Adds a key found by the listing.
    pub(super) fn add_listed(&mut self, slot: Slot, key: &[u8]) {
        self.found += 1;
        self.add(slot, key);
    }

    /// Adds a key that may have been written.
    pub(super) fn add(&mut self, slot: Slot, key: &[u8]) {
        if let Err(unlisted) = self.spool.add(slot, key) {
            let (error, slots) = (unlisted.error, unlisted.slots);
            warn!(%error, slots = slots.len(), "the list of keys cannot be written and stays in memory; these slots exceed the memory limit, and are listed again later");
            self.incomplete.extend(slots);
        }
    }

    /// Marks a slot in which any key may have been written.
    pub(super) fn add_anything(&mut self, slot: Slot) {
        self.incomplete.insert(slot);
    }

    /// Drops the keys of slots that have left.
    pub(super) fn forget(&mut self, slots: &[Slot]) {
        self.spool.forget(slots);
    }

    /// Returns the keys of these slots.
    pub(super) fn keys(&self, slots: &[Slot]) -> io::Result<Vec<Key>> {
        self.spool.keys(slots)
    }

    pub(super) fn for_each(&self, slots: &[Slot], with: impl FnMut(Slot, &[u8])) -> io::Result<()> {
        self.spool.for_each(slots, with)
    }

    /// Number of listed keys of a slot.
    pub(super) fn count_in_slot(&self, slot: Slot) -> u32 {
        self.spool.count_in_slot(slot)
    }

    /// Whether a slot may have unlisted keys.
    pub(super) fn is_incomplete(&self, slot: Slot) -> bool {
        self.incomplete.contains(&slot)
    }

    /// `run_id` of the listed process. `None` before the listing.
    pub(super) fn of(&self) -> Option<&str> {
        self.of.as_deref()
    }

    /// Whether the listing is complete.
    pub(super) fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// Keys of the whole move listed so far.
    pub(super) fn total(&self) -> u64 {
        self.moved_before + self.found
    }

    /// Whether the target has no keys of the remaining slots.
    pub(super) fn target_is_clean(&self) -> bool {
        self.target_is_clean
    }

    pub(super) fn set_target_is_clean(&mut self, is_clean: bool) {
        self.target_is_clean = is_clean;
    }
}
