//! When two machines are the same: they will do the same from now on. For a search through all that can happen (`crates/sim`), which passes over what it
//! has seen.
//!
//! Written by hand, because numbers that only go up (of records, of batches) count by how far they are behind, and what is only shown (progress) not at
//! all: otherwise no state would ever come again.

use std::hash::{Hash, Hasher};

use super::{Leg, Link, LinkState, State};
use crate::migration::Fingerprint;
use crate::migration::record::Eras;

impl Leg {
    fn hash_link<H: Hasher>(&self, link: &Link, state: &mut H) {
        link.process.as_ref().map(|process| (&process.run_id, process.client_id)).hash(state);
        (link.era, link.dirt).hash(state);
        match link.state {
            LinkState::Up => 0_u32.hash(state),
            LinkState::Down { since_us } => (1, since_us).hash(state),
            LinkState::Unmet => 2_u32.hash(state),
            LinkState::Meeting { record } => (3, self.records.saturating_sub(record)).hash(state),
        }
    }
}

impl Hash for Leg {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let behind = |record: u64| self.records - record;
        match self.state {
            State::Waiting => (0, 0).hash(state),
            State::Meeting { record } => (1, behind(record)).hash(state),
            State::Readying => (2, 0).hash(state),
            State::Draining { since_us } => (3, since_us).hash(state),
            State::Starting { record } => (4, behind(record)).hash(state),
            State::Moving => (5, 0).hash(state),
            State::RecordingRollback { record } => (6, behind(record)).hash(state),
            State::AnnouncingRollback => (7, 0).hash(state),
            State::Ending { record } => (8, behind(record)).hash(state),
            State::HandingOver => (9, 0).hash(state),
            State::Ended => (10, 0).hash(state),
        }
        (self.resumed, self.begun, self.rolls_back, self.given_up, self.as_safe_as_it_was, &self.back, self.purging, self.quiet as u8)
            .hash(state);
        self.hash_link(&self.source, state);
        self.hash_link(&self.target, state);
        let mut away: Vec<(Fingerprint, Eras)> = self.away.iter().map(|(key, eras)| (*key, *eras)).collect();
        away.sort_unstable_by_key(|(key, _)| *key);
        away.hash(state);
        self.left.hash(state);
        for (id, batch) in &self.batches {
            self.next_batch.wrapping_sub(id.0).hash(state);
            batch.hash_with(behind, state);
        }
        (&self.wanted, &self.listed, self.lists, self.lists_old, self.list_ended).hash(state);
        (self.pace.batch_keys, self.pace.batches, self.pace.interval_us, self.last_start_us, self.last_refusal_us).hash(state);
    }
}
