//! Sizes of the keys of a move. Big keys must be known before their leg begins.
//!
//! If nearly all keys are strings, STRLEN is used: it costs the node less than MEMORY USAGE. STRLEN ignores the reserve
//! of a string's allocation, so it only proves that a string is small. All other keys need MEMORY USAGE.
//!
//! Sizes are queried with the listing. With the goal `fast`, they are queried per leg instead, while the previous leg
//! runs: during the listing only the source has work, and a processor may be idle.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use switchyard_policy::migration::pace::keys_that_fit;
use switchyard_policy::migration::{Goal, Key, Phase, Protocol, Side};
use switchyard_policy::topology::{Placement, Slot};
use switchyard_resp::reply;
use tracing::warn;

use super::big::Big;
use super::connection::{Connection, error_text};
use super::run::{Mover, MoverExit};
use super::spool::Spool;

/// Keys per query.
const AT_ONCE: usize = 1000;

/// Keys per query during a leg, whose own commands wait behind it.
const AT_ONCE_IN_LEG: usize = 300;

/// Number of keys sampled with STRLEN to find out whether keys are strings.
const SAMPLE: usize = 50;

/// A string needs at most three times its length in memory, plus its key and this many bytes.
const OVERHEAD_MAX: u64 = 512;

/// Keys of one size query.
#[derive(Debug)]
pub(super) struct Page {
    pub(super) database: u32,
    /// Buffer with the names: a SCAN reply, or a copy from the spool.
    text: Arc<Vec<u8>>,
    keys: Vec<(Slot, Range<usize>)>,
    /// Number of leading keys that are queried with STRLEN.
    by_length: usize,
    /// Number of replies so far.
    answered: usize,
    /// All keys need MEMORY USAGE.
    by_memory_usage: bool,
    /// Possibly big keys, queried next with MEMORY USAGE.
    unsure: Vec<(Slot, Range<usize>)>,
}

impl Page {
    /// `keys`: slot of each key, and place of its name in `text`.
    pub(super) fn new(database: u32, text: Arc<Vec<u8>>, keys: Vec<(Slot, Range<usize>)>) -> Self {
        Self { database, text, keys, by_length: 0, answered: 0, by_memory_usage: false, unsure: Vec::new() }
    }

    pub(super) fn len(&self) -> usize {
        self.keys.len()
    }

    pub(super) fn is_answered(&self) -> bool {
        self.answered == self.keys.len()
    }

    /// Requests all sizes. Returns whether a SELECT was sent first.
    pub(super) fn request(&self, connection: &mut Connection) -> bool {
        let selected = connection.select(self.database);
        for (number, (_, at)) in self.keys.iter().enumerate() {
            let key = &self.text[at.clone()];
            if number < self.by_length {
                connection.push(&[b"STRLEN", key]);
            } else {
                connection.push(&[b"MEMORY", b"USAGE", key]);
            }
        }
        selected
    }

    /// Processes the next reply.
    pub(super) fn take(&mut self, answer: &[u8], lengths: &mut Lengths, big: &mut Big) {
        let limit = big.limit();
        let Some((slot, at)) = self.keys.get(self.answered).cloned() else { return };
        lengths.note(slot, answer, limit);
        let key = &self.text[at.clone()];
        if self.answered >= self.by_length {
            big.note_listed(slot, key, self.database, answer);
        } else if !lengths.is_small(key, answer, limit) || big.has_some_of(slot) {
            self.unsure.push((slot, at));
        }
        self.answered += 1;
    }

    /// Returns the page of keys that need a second query. Call it after all replies.
    pub(super) fn rest(self) -> Option<Self> {
        (!self.unsure.is_empty())
            .then(|| Self { by_memory_usage: true, ..Self::new(self.database, self.text, self.unsure) })
    }
}

/// Statistics from the replies to STRLEN.
#[derive(Debug, Default)]
pub(super) struct Lengths {
    /// STRLEN must not be used.
    refused: bool,
    strings: usize,
    others: usize,
    /// Number of replies about small keys, and the sum of their bytes.
    by_slot: BTreeMap<Slot, (u64, u64)>,
    largest: u64,
}

impl Lengths {
    /// Chooses between STRLEN and MEMORY USAGE for a page.
    pub(super) fn choose(&self, mut page: Page) -> Page {
        page.by_length = match self.strings + self.others {
            _ if self.refused || page.by_memory_usage => 0,
            known if known < SAMPLE => page.len().min(SAMPLE),
            known if self.strings * 10 >= known * 9 => page.len(),
            _ => 0,
        };
        page
    }

    fn note(&mut self, slot: Slot, answer: &[u8], limit: u64) {
        let bytes = reply::integer(answer).and_then(|bytes| u64::try_from(bytes).ok());
        if let Some(bytes) = bytes.filter(|bytes| *bytes < limit) {
            let (answers, sum) = self.by_slot.entry(slot).or_default();
            (*answers, *sum) = (*answers + 1, *sum + bytes);
            self.largest = self.largest.max(bytes);
        }
    }

    /// Returns how many leading keys fit into a batch, by the average sizes of their slots. Big keys are staged and do
    /// not count.
    pub(super) fn first_that_fit(&self, placement: &Placement, keys: &[Key]) -> usize {
        // Usual case: even the largest size fits.
        if keys_that_fit(keys.iter().map(|_| self.largest)) >= keys.len() {
            return keys.len();
        }
        let of = |key: &Key| self.by_slot.get(&placement.slot_of(key)).map_or(0, |(answers, sum)| sum / answers);
        keys_that_fit(keys.iter().map(of))
    }

    /// Whether the reply to STRLEN proves that the key is small.
    fn is_small(&mut self, key: &[u8], answer: &[u8], limit: u64) -> bool {
        if answer.starts_with(b"-WRONGTYPE") {
            self.others += 1;
            return false;
        }
        self.refused |= reply::is_error(answer);
        let Some(length) = reply::integer(answer).and_then(|length| u64::try_from(length).ok()) else { return false };
        self.strings += 1;
        length.saturating_mul(3).saturating_add(key.len() as u64 * 2 + OVERHEAD_MAX) < limit
    }
}

/// Pending size queries.
#[derive(Debug, Default)]
pub(super) struct Sizes {
    pub(super) lengths: Lengths,
    /// Slots with listed keys without a size query, and their only database.
    due: BTreeSet<Slot>,
    database: u32,
    /// Slots of the next leg without a query, in order.
    ahead: VecDeque<Slot>,
    /// Slots with queries in progress, and the remaining pages.
    under_way: Vec<Slot>,
    pages: VecDeque<Page>,
    /// A page is in flight.
    is_requested: bool,
}

impl Sizes {
    /// Drops queries without replies.
    pub(super) fn drop_requested(&mut self) {
        self.ahead.clear();
        self.under_way.clear();
        self.pages.clear();
        self.is_requested = false;
    }
}

impl Mover {
    /// Resets the sizes before a listing. Returns whether sizes should be queried with it.
    pub(super) fn sizes_with_listing(&mut self, databases: &[u32]) -> bool {
        // STRLEN counts as an access, which would distort the statistics of a node that evicts by use.
        let counts_uses = ["lru", "lfu"].iter().any(|by| self.source.policy.contains(by));
        self.sizes = Sizes { lengths: Lengths { refused: counts_uses, ..Lengths::default() }, ..Sizes::default() };
        if !self.big.matters() || self.sizes_are_refused() {
            return false;
        }
        let &[database] = databases else { return true };
        if self.life.order().how.goal != Goal::Fast || self.life.order().how.protocol != Protocol::Switchyard {
            return true;
        }
        self.sizes.due = self.life.slots_left().clone();
        self.sizes.database = database;
        false
    }

    /// Queries the sizes of the next leg's keys that were not queried during the last leg.
    pub(super) fn measure_next_leg(&mut self) -> Result<(), MoverExit> {
        self.sizes.drop_requested();
        loop {
            let due: Vec<Slot> = self.next_leg(&[]).into_iter().filter(|slot| self.sizes.due.contains(slot)).collect();
            if due.is_empty() {
                return Ok(());
            }
            self.shown.set_activity("querying the sizes of keys");
            self.sizes.ahead = due.into();
            while let Some(page) = self.next_page(AT_ONCE) {
                let asked = Instant::now();
                let Some(connection) = &mut self.source.connection else { return Err(MoverExit::Lost) };
                let selected = page.request(connection);
                let (answers, _) = self.collect()?;
                if let Err(why) = self.sizes_answered(page, selected, &answers) {
                    return Err(MoverExit::Stop(format!("{} {why}", self.name(self.life.order().source))));
                }
                self.while_paused()?;
                match self.life.order().how.goal {
                    Goal::Fast => {}
                    Goal::Balanced => self.rest(asked.elapsed())?,
                    Goal::Gentle => self.rest(asked.elapsed() * 4)?,
                }
            }
        }
    }

    /// Prepares size queries for the next leg, at the start of a leg.
    pub(super) fn measure_ahead(&mut self, is_ours: &[bool]) {
        self.sizes.drop_requested();
        if self.life.order().how.goal == Goal::Fast && !self.sizes.due.is_empty() {
            self.sizes.ahead =
                self.next_leg(is_ours).into_iter().filter(|slot| self.sizes.due.contains(slot)).collect();
        }
    }

    /// Sends the next size query if the leg is moving keys and none is in flight.
    pub(super) fn go_on_measuring(&mut self, phase: Phase) {
        let rests = self.pacing.pace().batches == 0 || !self.tickets.is_empty();
        if rests
            || self.sizes.is_requested
            || phase != Phase::Moving
            || self.life.order().how.goal != Goal::Fast
            || self.source.connection.is_none()
        {
            return;
        }
        if let Some(page) = self.next_page(AT_ONCE_IN_LEG) {
            self.sizes.is_requested = true;
            self.source.query_sizes(page);
        }
    }

    /// Processes sizes. `selected`: the first reply is for a SELECT.
    ///
    /// # Errors
    /// If the node refuses the database.
    pub(super) fn sizes_answered(&mut self, mut page: Page, selected: bool, answers: &[Vec<u8>]) -> Result<(), String> {
        self.sizes.is_requested = false;
        let (before, answers) = answers.split_at(usize::from(selected).min(answers.len()));
        if let Some(error) = before.iter().find(|answer| reply::is_error(answer)) {
            return Err(format!("refuses a database: {}", error_text(error)));
        }
        answers.iter().for_each(|answer| page.take(answer, &mut self.sizes.lengths, &mut self.big));
        if let Some(rest) = page.rest() {
            self.sizes.pages.push_front(rest);
        }
        Ok(())
    }

    /// Returns the next page to query. `None` if no slots remain.
    fn next_page(&mut self, keys_max: usize) -> Option<Page> {
        loop {
            if let Some(page) = self.sizes.pages.pop_front() {
                return Some(self.sizes.lengths.choose(page));
            }
            for slot in std::mem::take(&mut self.sizes.under_way) {
                self.sizes.due.remove(&slot);
            }
            if self.sizes_are_refused() {
                self.sizes.due.clear();
                self.sizes.ahead.clear();
            }
            let slots = Spool::leading_part(self.sizes.ahead.make_contiguous()).to_vec();
            if slots.is_empty() {
                return None;
            }
            self.sizes.ahead.drain(..slots.len());
            let mut pages = VecDeque::new();
            let (mut text, mut keys) = (Vec::new(), Vec::new());
            let database = self.sizes.database;
            let outcome = self.list.for_each(&slots, |slot, key| {
                keys.push((slot, text.len()..text.len() + key.len()));
                text.extend_from_slice(key);
                if keys.len() == keys_max {
                    pages.push_back(Page::new(
                        database,
                        Arc::new(std::mem::take(&mut text)),
                        std::mem::take(&mut keys),
                    ));
                }
            });
            if let Err(error) = outcome {
                // The leg then finds its keys by SCAN, and moves big keys whole.
                warn!(%error, "the list of keys cannot be read: their sizes are unknown");
            }
            if !keys.is_empty() {
                pages.push_back(Page::new(database, Arc::new(text), keys));
            }
            self.sizes.pages = pages;
            self.sizes.under_way = slots;
        }
    }

    /// Drops queries in flight if the source is lost.
    pub(super) fn sizes_unknown(&mut self, side: Side) {
        if side == Side::Source {
            self.sizes.drop_requested();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(names: &[&str]) -> Page {
        let mut text = Vec::new();
        let places = names.iter().map(|name| {
            let from = text.len();
            text.extend_from_slice(name.as_bytes());
            (switchyard_policy::topology::crc16_slot(name.as_bytes()), from..text.len())
        });
        let keys = places.collect();
        Page::new(0, Arc::new(text), keys)
    }

    #[test]
    fn possibly_big_keys_are_measured_by_memory_usage() {
        let (mut lengths, mut big) = (Lengths::default(), Big::new(Some(100_000)));
        let mut first = lengths.choose(page(&["small", "long", "hash", "refused"]));
        assert_eq!(first.by_length, 4);
        for answer in [":100\r\n", ":40000\r\n", "-WRONGTYPE Operation against a key\r\n", "-NOPERM no\r\n"] {
            first.take(answer.as_bytes(), &mut lengths, &mut big);
        }
        assert!(first.is_answered());
        let again = first.rest().expect("three are left");
        let mut again = Lengths::default().choose(again);
        assert_eq!((again.len(), again.by_length), (3, 0));
        for answer in [":140000\r\n", ":100000\r\n", ":99999\r\n"] {
            again.take(answer.as_bytes(), &mut lengths, &mut big);
        }
        assert!(again.rest().is_none());
        let slot = |name: &str| switchyard_policy::topology::crc16_slot(name.as_bytes());
        assert_eq!(["small", "long", "hash", "refused"].map(|name| big.bytes_of(slot(name))), [0, 140_000, 100_000, 0]);
        assert_eq!(lengths.choose(page(&["more"])).by_length, 0, "a node that refuses it is not queried again");
    }

    #[test]
    fn batches_end_at_the_estimated_size_limit() {
        let mut lengths = Lengths::default();
        let keys: Vec<Key> = (0..1_000)
            .map(|n| format!("{{{}}}:{n}", if n < 100 { "small" } else { "large" }).as_bytes().into())
            .collect();
        assert_eq!(lengths.first_that_fit(&Placement::Crc16, &keys), 1_000, "nothing is known");
        for (tag, answer) in
            [("small", ":64\r\n"), ("large", ":1000000\r\n"), ("large", ":1048576\r\n"), ("large", ":-1\r\n")]
        {
            lengths.note(Placement::Crc16.slot_of(tag.as_bytes()), answer.as_bytes(), 1 << 20);
        }
        assert_eq!(lengths.first_that_fit(&Placement::Crc16, &keys), 104);
        assert_eq!(lengths.first_that_fit(&Placement::Crc16, &keys[..100]), 100);
    }

    #[test]
    fn lengths_are_not_queried_if_many_keys_are_not_strings() {
        let names: Vec<String> = (0..200).map(|n| format!("key:{n}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        for (strings, then) in [(50, 200), (45, 200), (44, 0), (0, 0)] {
            let mut lengths = Lengths::default();
            let mut first = lengths.choose(page(&names));
            assert_eq!(first.by_length, SAMPLE);
            for number in 0..SAMPLE {
                let answer: &[u8] = if number < strings { b":64\r\n" } else { b"-WRONGTYPE no\r\n" };
                first.take(answer, &mut lengths, &mut Big::new(Some(1 << 20)));
            }
            assert_eq!(lengths.choose(page(&names)).by_length, then, "of {SAMPLE} keys {strings} are strings");
        }
    }
}
