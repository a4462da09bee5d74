//! Batches of a leg that is copied as a whole: read at the source, stored over existing keys at the target, removed
//! there if absent at the source.
//!
//! The leg decides when keys are copied, and when copies are valid. Unlike in the default protocol, no key changes its
//! place with its batch.

use std::collections::BTreeSet;

use super::{Batch, LIST_BATCHES, Precopy, QuiesceState, REST_US, Step, TRIES};
use crate::migration::injected::Bug;
use crate::migration::{Action, BatchId, Copied, Event, Io, Key, Side, Stored};

impl Precopy {
    pub(super) fn answered(&mut self, event: Event, now_us: u64, actions: &mut Vec<Action>) {
        let (Event::Copied { batch: id, .. } | Event::Stored { batch: id, .. } | Event::Removed { batch: id }) = event
        else {
            return;
        };
        let Some(batch) = self.batches.get_mut(&id).filter(|batch| batch.is_requested) else { return };
        let refused = match (event, batch.step) {
            (Event::Copied { outcomes, .. }, Step::Copy) => {
                // Keys that do not fit are read in another batch.
                let later = batch.keys.split_off(outcomes.len().min(batch.keys.len()));
                later.into_iter().rev().for_each(|key| self.todo.push_front(key));
                let taken =
                    batch.keys.iter().zip(&outcomes).filter(|(_, copied)| matches!(copied, Copied::Taken { .. }));
                batch.there = taken.map(|(key, _)| key.clone()).collect();
                let bytes = |copied: &Copied| if let Copied::Taken { bytes } = copied { *bytes } else { 0 };
                self.progress.bytes_moved += outcomes.iter().map(bytes).sum::<u64>();
                batch.step = if batch.there.is_empty() { Step::Remove } else { Step::Store };
                outcomes.into_iter().find_map(|copied| if let Copied::Refused(why) = copied { Some(why) } else { None })
            }
            (Event::Stored { outcomes, .. }, Step::Store) => {
                // Repeated copies are already counted.
                self.progress.keys_moved += if self.rounds == 0 { outcomes.len() as u64 } else { 0 };
                batch.step = Step::Remove;
                outcomes.into_iter().find_map(|stored| if let Stored::Refused(why) = stored { Some(why) } else { None })
            }
            (Event::Removed { .. }, Step::Remove) => {
                self.batches.remove(&id);
                return;
            }
            _ => return,
        };
        batch.is_requested = false;
        let Some(why) = refused else { return };
        (batch.step, batch.not_before_us) = (Step::Copy, now_us + REST_US);
        batch.tries += 1;
        if batch.tries >= TRIES {
            self.turn_back(format!("a node refuses keys: {why}"), actions);
        }
    }

    /// Requests the next step of each batch that can proceed.
    pub(super) fn go_on_with_batches(&mut self, now_us: u64, actions: &mut Vec<Action>) {
        if self.quiet == QuiesceState::Reached {
            return;
        }
        let is_up = [Side::Source, Side::Target].map(|side| self.is_up(side));
        let mut done = Vec::new();
        for (id, batch) in &mut self.batches {
            if batch.is_requested || batch.not_before_us > now_us {
                continue;
            }
            let asked_at = if batch.step == Step::Copy { Side::Source } else { Side::Target };
            let gone: Vec<Key> =
                batch.keys.iter().filter(|key| batch.there.binary_search(key).is_err()).cloned().collect();
            if batch.step == Step::Remove && (gone.is_empty() || self.planted.is(Bug::GoneStaysCopied)) {
                done.push(*id);
                continue;
            }
            if !is_up[asked_at as usize] {
                continue;
            }
            batch.is_requested = true;
            actions.push(Action::Io(match batch.step {
                Step::Copy => Io::Copy { batch: *id, from: Side::Source, keys: batch.keys.clone() },
                Step::Store => {
                    self.has_stored = true;
                    Io::Overwrite { batch: *id, to: Side::Target, keys: batch.there.clone() }
                }
                Step::Remove => Io::Remove { batch: *id, from: Side::Target, keys: gone },
            }));
        }
        done.iter().for_each(|id| drop(self.batches.remove(id)));
    }

    pub(super) fn begin_batches(&mut self, now_us: u64, actions: &mut Vec<Action>) {
        if self.quiet != QuiesceState::No || self.target_is_dirty {
            return;
        }
        let most = self.pace.batch_keys.max(1) as usize;
        while self.batches.len() < self.pace.batches as usize {
            if self.todo.is_empty() {
                if !self.list_ended && self.lists == self.lists_old {
                    self.lists += 1;
                    actions.push(Action::List { count: self.pace.batch_keys.saturating_mul(LIST_BATCHES) });
                }
                return;
            }
            if now_us < self.last_began_us + self.pace.interval_us {
                return;
            }
            self.last_began_us = now_us;
            // Sorted and unique, for the binary search.
            let busy: BTreeSet<&Key> = self.batches.values().flat_map(|batch| &batch.keys).collect();
            let mut keys = BTreeSet::new();
            let mut later = Vec::new();
            while keys.len() < most
                && let Some(key) = self.todo.pop_front()
            {
                // A key in a batch is copied again after it.
                if busy.contains(&key) {
                    later.push(key);
                } else {
                    keys.insert(key);
                }
            }
            self.todo.extend(later);
            if keys.is_empty() {
                return;
            }
            self.last_batch = self.last_batch.wrapping_add(1);
            let batch = Batch {
                keys: keys.into_iter().collect(),
                there: Vec::new(),
                step: Step::Copy,
                is_requested: false,
                not_before_us: 0,
                tries: 0,
            };
            self.batches.insert(BatchId(self.last_batch), batch);
            self.go_on_with_batches(now_us, actions);
        }
    }

    pub(super) fn all_is_copied(&self) -> bool {
        self.list_ended && self.todo.is_empty() && self.batches.is_empty() && !self.target_is_dirty
    }
}
