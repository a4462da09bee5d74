//! The life of a batch: copy, store, secure, record, remove, admit; and what becomes of it when a connection breaks or a node refuses.
//!
//! A batch waits for one answer at a time, of one side or of the journal. So when a side is lost, what is unknown about it is one step.

use std::collections::BTreeSet;

use super::{ADMITTED, Bug, Leg, REST_MAX_US, REST_US, State, TRIES, WANTED_BATCHES, WANTED_KEYS};
use crate::migration::record::Eras;
use crate::migration::{Action, BatchId, Copied, Durability, Fingerprint, Key, Orders, Record, Side, Stored};

/// What is to be done next, or is being done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    Copy,
    /// Remove from where it goes what may be there of before.
    Clear,
    Store,
    Secure,
    Record,
    Remove,
}

#[derive(Debug)]
pub(super) struct Batch {
    pub(super) keys: Vec<(Fingerprint, Key)>,
    /// Per key the bytes of what was read, if it was there.
    had: Vec<Option<u64>>,
    /// Keys to clear.
    clear: Vec<Key>,
    step: Step,
    /// The step was asked for and has not been answered.
    asked: bool,
    /// Somebody waits for it.
    wanted: bool,
    /// A record that is not durable yet, and the eras when it was written.
    record: Option<(u64, Eras)>,
    /// The record was awaited, and the next step may follow.
    on_record: bool,
    /// The removal was sent at least once.
    committed: bool,
    tries: u32,
    not_before_us: u64,
}

impl Batch {
    fn go_to(&mut self, step: Step) {
        self.step = step;
        self.asked = false;
    }

    fn those_it_had(&self) -> Vec<Key> {
        self.keys.iter().zip(&self.had).filter(|(_, had)| had.is_some()).map(|((_, key), _)| key.clone()).collect()
    }
}

impl Leg {
    /// Begins batches: wanted keys first and at once, listed ones at the pace.
    pub(super) fn start_batches(&mut self, now_us: u64, actions: &mut Vec<Action>) {
        if !self.usable(Side::Source) || !self.usable(Side::Target) {
            return;
        }
        while !self.wanted.is_empty() && self.batches.values().filter(|batch| batch.wanted).count() < WANTED_BATCHES {
            let count = self.wanted.len().min(WANTED_KEYS);
            let keys: Vec<(Fingerprint, Key)> = self.wanted.drain(..count).collect();
            for (fingerprint, _) in &keys {
                self.wanted_set.remove(fingerprint);
            }
            self.start(keys, true, now_us, actions);
        }
        loop {
            let under_way = self.batches.values().filter(|batch| !batch.wanted).count();
            let early = self.last_start_us.is_some_and(|last| now_us.saturating_sub(last) < self.pace.interval_us);
            if under_way >= self.pace.batches as usize || early {
                break;
            }
            let keys = self.take_listed();
            if keys.is_empty() {
                break;
            }
            self.last_start_us = Some(now_us);
            self.start(keys, false, now_us, actions);
        }
        let room = self.pace.batch_keys as usize * self.pace.batches.max(1) as usize;
        if !self.list_ended && self.lists == self.lists_old && self.listed.len() < room {
            self.lists += 1;
            actions.push(Action::List { count: room as u32 });
        }
    }

    /// Keys of the listing for a batch; those that have been moved meanwhile are passed over.
    fn take_listed(&mut self) -> Vec<(Fingerprint, Key)> {
        let mut keys = Vec::new();
        let mut seen = BTreeSet::new();
        while keys.len() < self.pace.batch_keys as usize {
            let Some(key) = self.listed.pop_front() else { break };
            let fingerprint = self.fingerprints.of(&key);
            let there = match self.away.get(&fingerprint) {
                Some(eras) => !self.turned && eras.target == ADMITTED,
                None => self.turned,
            };
            if !there && !self.busy.contains(&fingerprint) && !self.wanted_set.contains(&fingerprint) && seen.insert(fingerprint) {
                keys.push((fingerprint, key));
            }
        }
        keys
    }

    fn start(&mut self, keys: Vec<(Fingerprint, Key)>, wanted: bool, now_us: u64, actions: &mut Vec<Action>) {
        for (fingerprint, _) in &keys {
            let new = self.busy.insert(*fingerprint);
            assert!(new, "a key is in one batch at most");
        }
        let id = BatchId(self.next_batch);
        self.next_batch = self.next_batch.wrapping_add(1);
        let batch = Batch {
            had: vec![None; keys.len()],
            keys,
            clear: Vec::new(),
            step: Step::Copy,
            asked: false,
            wanted,
            record: None,
            on_record: false,
            committed: false,
            tries: 0,
            not_before_us: 0,
        };
        self.batches.insert(id, batch);
        self.drive(id, now_us, actions);
    }

    pub(super) fn drive_batches(&mut self, now_us: u64, actions: &mut Vec<Action>) {
        let idle: Vec<BatchId> = self.batches.iter().filter(|(_, batch)| !batch.asked).map(|(id, _)| *id).collect();
        for id in idle {
            self.drive(id, now_us, actions);
        }
    }

    /// Asks for the next step of a batch, as soon as it can be done; steps with nothing to do are passed.
    fn drive(&mut self, id: BatchId, now_us: u64, actions: &mut Vec<Action>) {
        let (from, to) = (self.from(), self.to());
        loop {
            let (from_usable, to_usable) = (self.usable(from), self.usable(to));
            let durability = self.orders.durability;
            let Some(batch) = self.batches.get_mut(&id) else { return };
            if batch.asked || now_us < batch.not_before_us {
                return;
            }
            let had = batch.those_it_had();
            match batch.step {
                Step::Copy if from_usable => {
                    let keys = batch.keys.iter().map(|(_, key)| key.clone()).collect();
                    actions.push(Action::Copy { batch: id, from, keys });
                }
                Step::Clear if batch.clear.is_empty() => {
                    batch.step = Step::Store;
                    continue;
                }
                Step::Clear if to_usable => actions.push(Action::Remove { batch: id, from: to, keys: batch.clear.clone() }),
                Step::Store if had.is_empty() => {
                    batch.step = Step::Record;
                    continue;
                }
                Step::Store if to_usable => actions.push(Action::Store { batch: id, to, keys: had }),
                Step::Secure if durability == Durability::Memory => {
                    batch.step = Step::Record;
                    continue;
                }
                Step::Secure if to_usable => actions.push(Action::Secure { batch: id, at: to, durability }),
                // Not while the side is in doubt: what is on record there must not be removed as left over.
                Step::Record if to_usable && batch.record.is_none() => {
                    self.record_batch(id, actions);
                    if self.planted.is(Bug::UnlinkBeforeRecord) {
                        self.go_on_before_the_record(id);
                        continue;
                    }
                }
                Step::Remove if had.is_empty() => {
                    self.admit(id, actions);
                    return;
                }
                Step::Remove if from_usable && to_usable => {
                    batch.committed = true;
                    let admitted = self.planted.is(Bug::AdmitBeforeUnlink).then(|| batch.keys.iter().map(|(_, key)| key.clone()).collect());
                    actions.push(Action::Remove { batch: id, from, keys: had });
                    actions.extend(admitted.map(|keys| Action::Admit { keys }));
                }
                _ => return,
            }
            if let Some(batch) = self.batches.get_mut(&id) {
                batch.asked = true;
            }
            return;
        }
    }

    fn record_batch(&mut self, id: BatchId, actions: &mut Vec<Action>) {
        let Orders { move_id, leg, .. } = self.orders;
        let absent_too = !self.planted.is(Bug::AbsentNotRecorded);
        let Some(batch) = self.batches.get(&id) else { return };
        let keys: Vec<Fingerprint> =
            batch.keys.iter().zip(&batch.had).filter(|(_, had)| absent_too || had.is_some()).map(|((key, _), _)| *key).collect();
        let record = if self.turned { Record::Returned { move_id, leg, keys } } else { Record::Moved { move_id, leg, keys } };
        let number = self.record(record, actions);
        let eras = Eras { source: self.source.era, target: self.target.era };
        if let Some(batch) = self.batches.get_mut(&id) {
            batch.record = Some((number, eras));
        }
    }

    /// A planted bug's.
    fn go_on_before_the_record(&mut self, id: BatchId) {
        if let Some(batch) = self.batches.get_mut(&id) {
            batch.on_record = true;
            batch.go_to(Step::Remove);
        }
    }

    fn answered(&mut self, id: BatchId, step: Step) -> Option<&mut Batch> {
        self.batches.get_mut(&id).filter(|batch| batch.asked && batch.step == step)
    }

    pub(super) fn batch_copied(&mut self, id: BatchId, outcomes: &[Copied], now_us: u64, actions: &mut Vec<Action>) {
        let (turned, source_era, target_era) = (self.turned, self.source.era, self.target.era);
        let Some(batch) = self.answered(id, Step::Copy) else { return };
        if outcomes.len() != batch.keys.len() {
            debug_assert!(false, "an outcome per key");
            return;
        }
        let refused = outcomes.iter().find_map(|outcome| match outcome {
            Copied::Refused(why) => Some(why.clone()),
            _ => None,
        });
        if let Some(why) = refused {
            let why = format!("a key could not be read: {why}");
            self.refused(id, why, now_us, actions);
            return;
        }
        batch.had = outcomes.iter().map(|outcome| if let Copied::Taken { bytes } = outcome { Some(*bytes) } else { None }).collect();
        let keys = batch.keys.clone();
        let had = batch.had.clone();
        let clear = keys
            .iter()
            .zip(had)
            .filter(|((fingerprint, _), had)| {
                let on_record = self.away.get(fingerprint);
                match (had, on_record) {
                    // The source has it and is the process that it was at the key's record: it was never removed there, so never admitted, and
                    // what another process at the target shows of it may be from before the leg.
                    (Some(_), Some(eras)) if !turned => eras.source == source_era && eras.target != target_era && eras.target != ADMITTED,
                    // It comes back, and what the source shows after a restart is older.
                    (Some(_), Some(eras)) => eras.source != source_era,
                    (Some(_), None) => false,
                    // Nowhere, then. To say so where it goes also shows that the process there is the one that we know: it may have been
                    // replaced, and show a key of before, and nobody has noticed.
                    (None, None) => !turned,
                    (None, Some(eras)) => turned && (eras.target == ADMITTED || self.is_stale(eras)),
                }
            })
            .map(|((_, key), _)| key.clone())
            .collect();
        if let Some(batch) = self.batches.get_mut(&id) {
            batch.clear = clear;
            batch.go_to(Step::Clear);
        }
        self.drive(id, now_us, actions);
    }

    pub(super) fn batch_stored(&mut self, id: BatchId, outcomes: &[Stored], now_us: u64, actions: &mut Vec<Action>) {
        let planted = self.planted;
        let Some(batch) = self.answered(id, Step::Store) else { return };
        if outcomes.len() != batch.had.iter().flatten().count() {
            debug_assert!(false, "an outcome per key stored");
            return;
        }
        let refused = outcomes.iter().find_map(|outcome| match outcome {
            Stored::Refused(why) => Some(why.clone()),
            _ => None,
        });
        if let Some(why) = refused {
            self.refused(id, format!("a key could not be stored: {why}"), now_us, actions);
            return;
        }
        batch.go_to(Step::Secure);
        let keys: Option<Vec<Key>> = planted.is(Bug::AdmitBeforeRecord).then(|| batch.keys.iter().map(|(_, key)| key.clone()).collect());
        actions.extend(keys.map(|keys| Action::Admit { keys }));
        self.drive(id, now_us, actions);
    }

    pub(super) fn batch_secured(&mut self, id: BatchId, refused: Option<String>, now_us: u64, actions: &mut Vec<Action>) {
        let Some(batch) = self.answered(id, Step::Secure) else { return };
        if let Some(why) = refused {
            self.refused(id, format!("what was stored could not be made safe: {why}"), now_us, actions);
            return;
        }
        batch.go_to(Step::Record);
        self.drive(id, now_us, actions);
    }

    /// The records up to that number are durable. A batch may have been begun again since: its keys are on record all the same.
    pub(super) fn batches_recorded(&mut self, number: u64) {
        for batch in self.batches.values_mut() {
            let Some((_, eras)) = batch.record.take_if(|(awaited, _)| *awaited <= number) else { continue };
            if batch.step == Step::Record && batch.asked {
                batch.on_record = true;
                batch.go_to(Step::Remove);
            }
            for (fingerprint, _) in &batch.keys {
                if self.turned {
                    self.away.remove(fingerprint);
                } else {
                    self.away.insert(*fingerprint, eras);
                }
            }
        }
    }

    pub(super) fn batch_removed(&mut self, id: BatchId, actions: &mut Vec<Action>) {
        if let Some(batch) = self.answered(id, Step::Clear) {
            batch.go_to(Step::Store);
        } else if self.answered(id, Step::Remove).is_some() {
            self.admit(id, actions);
        }
    }

    fn admit(&mut self, id: BatchId, actions: &mut Vec<Action>) {
        let Some(batch) = self.batches.remove(&id) else { return };
        assert!(batch.on_record, "a key is admitted when that it moved is on record");
        for (fingerprint, _) in &batch.keys {
            self.busy.remove(fingerprint);
            if !self.turned {
                self.away.insert(*fingerprint, Eras { source: self.source.era, target: ADMITTED });
            }
        }
        let had = batch.had.iter().flatten();
        self.progress.bytes_moved += had.clone().sum::<u64>();
        let count = had.count() as u64;
        self.progress.keys_moved += count;
        if batch.wanted {
            self.progress.pulled += count;
        }
        actions.push(Action::Admit { keys: batch.keys.into_iter().map(|(_, key)| key).collect() });
    }

    /// A node refuses: the batch rests and is begun again, and after some tries the leg goes back. On the way back there is no other way: it goes on trying.
    fn refused(&mut self, id: BatchId, why: String, now_us: u64, actions: &mut Vec<Action>) {
        let Some(batch) = self.batches.get_mut(&id) else { return };
        batch.tries += 1;
        batch.go_to(Step::Copy);
        let rest_us = (REST_US << batch.tries.min(16)).min(REST_MAX_US);
        batch.not_before_us = now_us + rest_us;
        let tries = batch.tries;
        if tries < TRIES {
            return;
        }
        if self.turned {
            let keys = batch.keys.iter().map(|(_, key)| key.clone()).collect();
            actions.push(Action::Refuse { keys: Some(keys), error: format!("TRYAGAIN the key is being moved back, and {why}") });
        } else {
            self.turn_back(why, actions);
        }
    }

    /// On the way to turning back: what is on record goes on to its end, what is not stays where it is.
    pub(super) fn drop_what_is_not_on_record(&mut self) {
        debug_assert_eq!(self.state, State::Moving);
        let dropped: Vec<BatchId> = self
            .batches
            .iter()
            .filter(|(_, batch)| batch.step != Step::Remove && !batch.asked && batch.record.is_none())
            .map(|(id, _)| *id)
            .collect();
        for id in dropped {
            let Some(batch) = self.batches.remove(&id) else { continue };
            for (fingerprint, _) in &batch.keys {
                self.busy.remove(fingerprint);
            }
        }
    }

    /// The connection to a side broke: what was asked there and not answered is unknown.
    pub(super) fn redo_after_loss(&mut self, side: Side) {
        let (from, to) = (self.from(), self.to());
        let not_redone = self.planted.is(Bug::NotRedone);
        for batch in self.batches.values_mut().filter(|batch| batch.asked) {
            match batch.step {
                Step::Store if side == to && not_redone => batch.go_to(Step::Secure),
                Step::Copy if side == from => batch.go_to(Step::Copy),
                Step::Clear | Step::Store | Step::Secure if side == to => batch.go_to(Step::Copy),
                // It is on record and at the other side: once more.
                Step::Remove if side == from => {
                    batch.go_to(Step::Remove);
                }
                _ => continue,
            }
            self.progress.repeated += 1;
        }
    }

    /// Another process is at a side: what was stored there and not yet removed where it came from is stored once more.
    pub(super) fn redo_after_restart(&mut self, side: Side) {
        if side != self.to() {
            return;
        }
        for batch in self.batches.values_mut() {
            let stored = match batch.step {
                Step::Copy | Step::Clear | Step::Store | Step::Secure => false,
                Step::Record => true,
                // Sent and not answered by the other side: it is done when that answers.
                Step::Remove => !batch.asked,
            };
            if stored {
                batch.on_record = false;
                batch.go_to(Step::Copy);
                self.progress.repeated += 1;
            }
        }
    }
}
