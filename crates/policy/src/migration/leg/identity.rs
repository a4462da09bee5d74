//! Equality of two machines: the same future behaviour. Used by a search through all orders of events (`crates/sim`),
//! which skips states it has visited.
//!
//! Written by hand: growing numbers (of records, of batches) are hashed relative to the last one, and progress counters
//! not at all. Otherwise no state would ever repeat.

use std::hash::{Hash, Hasher};

use super::{Leg, LegCore, Link, LinkState, State};
use crate::migration::Fingerprint;
use crate::migration::record::ProcessGenerations;

impl LegCore {
    fn hash_link<H: Hasher>(&self, link: &Link, state: &mut H) {
        link.process.as_ref().map(|process| (&process.run_id, process.client_id)).hash(state);
        (link.era, link.purge_state).hash(state);
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
        let Self { shell: leg, work } = self;
        let behind = |record: u64| leg.records - record;
        match leg.state {
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
        (
            leg.resumed,
            leg.has_started,
            leg.rolls_back,
            (leg.given_up, leg.given_up_record),
            work.relax_durability,
            &leg.rollback_reason,
            leg.purging,
            leg.quiet as u8,
        )
            .hash(state);
        leg.hash_link(&leg.source, state);
        leg.hash_link(&leg.target, state);
        let mut away: Vec<(Fingerprint, ProcessGenerations)> =
            leg.away.iter().map(|(key, eras)| (*key, *eras)).collect();
        away.sort_unstable_by_key(|(key, _)| *key);
        away.hash(state);
        leg.left.hash(state);
        for (id, batch) in &work.batches {
            work.next_batch.wrapping_sub(id.0).hash(state);
            batch.hash_with(behind, state);
        }
        (&work.wanted, &leg.listed, leg.lists, leg.lists_old, leg.list_ended).hash(state);
        (
            leg.pace.batch_keys,
            leg.pace.batches,
            leg.pace.interval_us,
            (work.last_start_us, work.wanted_since_us),
            leg.last_refusal_us,
        )
            .hash(state);
    }
}
