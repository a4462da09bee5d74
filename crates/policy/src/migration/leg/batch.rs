//! Batches of the default protocol: copy, store, secure, record, remove, commit; and their recovery when a connection
//! breaks or a node refuses.
//!
//! A batch waits for one reply at a time, of one side or of the journal. So the loss of a side leaves at most one step
//! with an unknown result.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::{Hash, Hasher};

use super::shell::State;
use super::{ATTEMPTS_MAX, Bug, LegCore, Work};
use crate::migration::record::{COMMITTED, ProcessGenerations};
use crate::migration::{
    Action, BatchId, Copied, Durability, Event, Fingerprint, FingerprintSet, Io, Key, LegOrder, Record, Side, Stored,
};

/// Strategy to fetch requested keys.
#[derive(Clone, Copy, Debug)]
pub(in crate::migration) struct Pulls {
    /// Maximum number of their batches in flight.
    pub(in crate::migration) at_once: usize,
    /// Maximum number of keys per batch.
    pub(in crate::migration) keys: usize,
    /// Number of requested keys that starts a batch,
    pub(in crate::migration) gather_keys: usize,
    /// or the age of the oldest request that does, microseconds.
    pub(in crate::migration) wait_us: u64,
}

impl Default for Pulls {
    /// Starts at once. More batches would not be faster; keys requested in the meantime share the next batch.
    fn default() -> Self {
        Self { at_once: 4, keys: 64, gather_keys: 1, wait_us: 0 }
    }
}

/// Delay before the second attempt, microseconds. Doubles each time, up to [`RETRY_DELAY_MAX_US`].
const RETRY_DELAY_US: u64 = 20_000;
const RETRY_DELAY_MAX_US: u64 = 1_000_000;

/// Reason of a rollback if the target has a key that the move did not store.
const FOREIGN_KEY_REASON: &str =
    "the target has a key of these slots that the move did not store: a client bypasses the router";

/// Next or current step of a batch.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Step {
    Copy,
    /// Remove outdated copies at the destination.
    Clear,
    Store,
    Secure,
    Record,
    Remove,
}

#[derive(Clone, Debug)]
pub(super) struct Batch {
    pub(super) keys: Vec<(Fingerprint, Key)>,
    /// Size of the value per key, bytes; `None`: the key was absent.
    value_bytes: Vec<Option<u64>>,
    /// Generation of the process that was read.
    read_generation: u32,
    /// Generations of each key's record before this batch, if it had one.
    prior_generations: Vec<Option<ProcessGenerations>>,
    step: Step,
    /// The step is in flight.
    is_requested: bool,
    /// A client waits for the batch.
    wanted: bool,
    /// A record that is not yet durable, and the generations when it was written.
    record: Option<(u64, ProcessGenerations)>,
    /// Generations of the last durable record.
    on_record: Option<ProcessGenerations>,
    /// The removal was sent at least once, so the origin may no longer have the keys.
    removal_sent: bool,
    /// A store may have left keys at the destination.
    store_sent: bool,
    tries: u32,
    not_before_us: u64,
}

impl Batch {
    /// Hashes the batch, for [`super::identity`]; `behind` returns the distance of a record from the last one.
    pub(super) fn hash_with<H: Hasher>(&self, behind: impl Fn(u64) -> u64, state: &mut H) {
        (
            &self.keys,
            &self.value_bytes,
            self.read_generation,
            &self.prior_generations,
            self.step,
            self.is_requested,
            self.wanted,
        )
            .hash(state);
        (self.record.map(|(number, eras)| (behind(number), eras)), self.on_record, self.removal_sent, self.store_sent)
            .hash(state);
        (self.tries, self.not_before_us).hash(state);
    }

    fn set_step(&mut self, step: Step) {
        self.step = step;
        self.is_requested = false;
    }

    fn has_values(&self) -> bool {
        self.value_bytes.iter().any(Option::is_some)
    }

    /// Returns keys that the batch may have stored at the destination.
    fn may_have_stored(&self) -> impl Iterator<Item = Fingerprint> {
        let had = self.keys.iter().zip(&self.value_bytes).filter(|(_, had)| self.store_sent && had.is_some());
        had.map(|((fingerprint, _), _)| *fingerprint)
    }

    fn present_keys(&self) -> Vec<Key> {
        self.keys
            .iter()
            .zip(&self.value_bytes)
            .filter(|(_, had)| had.is_some())
            .map(|((_, key), _)| key.clone())
            .collect()
    }
}

/// Work of the default protocol.
#[derive(Clone, Default)]
pub struct Batches {
    pub(super) batches: BTreeMap<BatchId, Batch>,
    pub(super) next_batch: u32,
    /// Keys in batches.
    busy: FingerprintSet,
    /// Keys that clients wait for and that are in no batch.
    pub(super) wanted: VecDeque<(Fingerprint, Key)>,
    wanted_set: FingerprintSet,
    pulls: Pulls,
    /// When the first of `wanted` was requested, if requests are gathered.
    pub(super) wanted_since_us: Option<u64>,
    pub(super) last_start_us: Option<u64>,
    /// The leg returns to a node that cannot fulfil [`LegOrder::durability`], so it is not required there.
    pub(super) relax_durability: bool,
}

impl Work for Batches {
    const SERVES: bool = true;

    fn step(&mut self, leg: &mut LegCore, event: Event, now_us: u64, actions: &mut Vec<Action>) {
        match event {
            Event::Wanted { keys } => self.request(leg, keys, actions),
            Event::Copied { batch, outcomes } => self.batch_copied(leg, batch, &outcomes, now_us, actions),
            Event::Stored { batch, outcomes } => self.batch_stored(leg, batch, &outcomes, now_us, actions),
            Event::Secured { batch, refused } => self.batch_secured(leg, batch, refused, now_us, actions),
            Event::Removed { batch } => self.batch_removed(leg, batch, actions),
            _ => debug_assert!(false, "reply without a request of this protocol: {event:?}"),
        }
    }

    /// Starts batches: requested keys first and at once, listed keys at the configured pace.
    fn start(&mut self, leg: &mut LegCore, now_us: u64, actions: &mut Vec<Action>) {
        if !leg.usable(Side::Source) || !leg.usable(Side::Target) {
            return;
        }
        while self.should_pull(now_us)
            && self.batches.values().filter(|batch| batch.wanted).count() < self.pulls.at_once
        {
            self.wanted_since_us = None;
            let count = self.wanted.len().min(self.pulls.keys);
            let keys: Vec<(Fingerprint, Key)> = self.wanted.drain(..count).collect();
            for (fingerprint, _) in &keys {
                self.wanted_set.remove(fingerprint);
                let new = self.busy.insert(*fingerprint);
                assert!(new, "a key is in one batch at most");
            }
            self.begin(leg, keys, true, now_us, actions);
        }
        loop {
            let under_way = self.batches.values().filter(|batch| !batch.wanted).count();
            let early = self.last_start_us.is_some_and(|last| now_us.saturating_sub(last) < leg.pace.interval_us);
            if under_way >= leg.pace.batches as usize || early {
                break;
            }
            let keys = self.take_listed(leg);
            if keys.is_empty() {
                break;
            }
            self.last_start_us = Some(now_us);
            self.begin(leg, keys, false, now_us, actions);
        }
        let room = leg.pace.batch_keys as usize * leg.pace.batches.max(1) as usize;
        if !leg.list_ended && leg.lists == leg.lists_old && leg.listed.len() < room {
            leg.lists += 1;
            actions.push(Action::List { count: room as u32 });
        }
    }

    fn go_on(&mut self, leg: &mut LegCore, now_us: u64, actions: &mut Vec<Action>) {
        let idle: Vec<BatchId> =
            self.batches.iter().filter(|(_, batch)| !batch.is_requested).map(|(id, _)| *id).collect();
        for id in idle {
            self.drive(leg, id, now_us, actions);
        }
    }

    /// Applies durable records. A batch may have restarted since: its keys are on record anyway.
    fn recorded(&mut self, leg: &mut LegCore, number: u64) {
        for batch in self.batches.values_mut() {
            let Some((_, eras)) = batch.record.take_if(|(awaited, _)| *awaited <= number) else { continue };
            batch.on_record = Some(eras);
            if batch.step == Step::Record && batch.is_requested {
                batch.set_step(Step::Remove);
            }
            for (fingerprint, _) in &batch.keys {
                if leg.rolls_back {
                    leg.away.remove(fingerprint);
                } else {
                    leg.away.insert(*fingerprint, eras);
                }
            }
        }
    }

    /// Handles a broken connection to a side: the results of its requests are unknown. Copied values stay, because a
    /// key cannot change before it is committed. Returns true if this happened too often to the same keys, which may be
    /// the cause.
    fn lost(&mut self, leg: &mut LegCore, side: Side) -> bool {
        let (from, to) = (leg.from(), leg.to());
        let not_redone = leg.planted.is(Bug::NotRedone);
        let era = leg.link(to).era;
        let mut is_given_up = false;
        for batch in self.batches.values_mut().filter(|batch| batch.is_requested) {
            let is_on_record = batch.step == Step::Remove;
            match batch.step {
                Step::Store if side == to && not_redone => batch.set_step(Step::Secure),
                Step::Store if side == to => {
                    batch.store_sent = true;
                    batch.set_step(Step::Clear);
                }
                Step::Copy if side == from => batch.set_step(Step::Copy),
                Step::Clear | Step::Secure if side == to => batch.set_step(Step::Clear),
                // The keys are on record and at the other side: remove again. If that side has restarted since, store
                // them again first.
                Step::Remove if side == from => {
                    let there = batch.on_record.is_some_and(|eras| eras.of(to) == era);
                    batch.set_step(if there { Step::Remove } else { Step::Clear });
                }
                _ => continue,
            }
            leg.progress.repeated += 1;
            if !is_on_record {
                batch.tries += 1;
                is_given_up |= batch.tries >= ATTEMPTS_MAX;
            }
        }
        is_given_up && !leg.rolls_back
    }

    /// Handles a new process. If keys go there, they are stored again, unless they are already removed at their origin.
    fn restarted(&mut self, leg: &mut LegCore, side: Side) {
        if side != leg.to() {
            return;
        }
        for batch in self.batches.values_mut() {
            match batch.step {
                Step::Copy => continue,
                // The other side will reply to this removal, which completes the batch.
                Step::Remove if batch.is_requested => continue,
                Step::Clear | Step::Store | Step::Secure | Step::Record | Step::Remove => batch.set_step(Step::Clear),
            }
            leg.progress.repeated += 1;
        }
    }

    /// Before a rollback: drops batches without a record. Recorded ones are finished.
    fn drop_for_return(&mut self, leg: &mut LegCore) {
        debug_assert_eq!(leg.state, State::Moving);
        let dropped: Vec<BatchId> = self
            .batches
            .iter()
            .filter(|(_, batch)| batch.step != Step::Remove && !batch.is_requested && batch.record.is_none())
            .filter(|(_, batch)| batch.on_record.is_none() || batch.tries >= ATTEMPTS_MAX)
            .map(|(id, _)| *id)
            .collect();
        for batch in dropped.into_iter().filter_map(|id| self.batches.remove(&id)) {
            leg.left.extend(batch.may_have_stored());
            for (fingerprint, _) in &batch.keys {
                self.busy.remove(fingerprint);
            }
        }
    }

    /// Before a rollback without the target: drops batches that wait for it. Returns the keys on record that never left
    /// the source: the source still has the values read, and no removal was sent. For other keys on record only the
    /// target's copy is valid, and they wait for it.
    fn drop_without_target(&mut self, leg: &mut LegCore) -> BTreeSet<Fingerprint> {
        let (source_era, planted) = (leg.source.era, leg.planted);
        let mut never_left = BTreeSet::new();
        let dropped: Vec<BatchId> = self
            .batches
            .iter()
            .filter(|(_, batch)| !batch.is_requested && batch.record.is_none())
            .map(|(id, _)| *id)
            .collect();
        for batch in dropped.into_iter().filter_map(|id| self.batches.remove(&id)) {
            leg.left.extend(batch.may_have_stored());
            let is_there = batch.step != Step::Copy && batch.read_generation == source_era && !batch.removal_sent;
            for ((fingerprint, _), (had, before)) in
                batch.keys.iter().zip(batch.value_bytes.iter().zip(&batch.prior_generations))
            {
                self.busy.remove(fingerprint);
                let never_moved = before.is_none_or(|eras| had.is_some() && eras.source == source_era);
                let stays = (is_there && never_moved) || planted.is(Bug::ReturnedThoughRemoved);
                if stays && leg.away.get(fingerprint).is_some_and(|eras| eras.target != COMMITTED) {
                    never_left.insert(*fingerprint);
                }
            }
        }
        never_left
    }

    /// Without one of the sides: drops batches that have not been read, or are refused repeatedly. `all`: every batch,
    /// because it goes to the lost side.
    fn drop_without(&mut self, _leg: &mut LegCore, all: bool) {
        let is_over = |batch: &Batch| all || batch.step == Step::Copy || batch.tries >= ATTEMPTS_MAX;
        let idle =
            self.batches.extract_if(.., |_, batch| !batch.is_requested && batch.record.is_none() && is_over(batch));
        for (fingerprint, _) in idle.flat_map(|(_, batch)| batch.keys) {
            self.busy.remove(&fingerprint);
        }
    }

    fn drop_requests(&mut self) {
        self.wanted_since_us = None;
        self.wanted.clear();
        self.wanted_set.clear();
    }

    fn is_idle(&self) -> bool {
        self.batches.is_empty()
    }

    fn keys(&self) -> usize {
        self.wanted.len() + self.batches.values().map(|batch| batch.keys.len()).sum::<usize>()
    }
}

impl Batches {
    /// Creates the work with this strategy for requested keys.
    pub(super) fn pulling(pulls: Pulls) -> Self {
        Self { pulls, ..Self::default() }
    }

    /// Whether to fetch requested keys now.
    fn should_pull(&mut self, now_us: u64) -> bool {
        if self.wanted.is_empty() {
            self.wanted_since_us = None;
            return false;
        }
        let since_us = if self.pulls.wait_us == 0 { now_us } else { *self.wanted_since_us.get_or_insert(now_us) };
        self.wanted.len() >= self.pulls.gather_keys || now_us.saturating_sub(since_us) >= self.pulls.wait_us
    }

    /// Takes keys of the listing for a batch and marks them busy. Skips keys that have moved in the meantime.
    fn take_listed(&mut self, leg: &mut LegCore) -> Vec<(Fingerprint, Key)> {
        let mut keys = Vec::new();
        while keys.len() < leg.pace.batch_keys as usize {
            let Some(key) = leg.listed.pop_front() else { break };
            let fingerprint = leg.fingerprints.of(&key);
            let there = match leg.away.get(&fingerprint) {
                Some(eras) => !leg.rolls_back && eras.target == COMMITTED,
                None => leg.rolls_back,
            };
            if !there && !self.wanted_set.contains(&fingerprint) && self.busy.insert(fingerprint) {
                keys.push((fingerprint, key));
            }
        }
        keys
    }

    /// Requests the next step of a batch if it is possible now; skips steps with nothing to do.
    fn drive(&mut self, leg: &mut LegCore, id: BatchId, now_us: u64, actions: &mut Vec<Action>) {
        let (from, to) = (leg.from(), leg.to());
        loop {
            let (from_usable, to_usable) = (leg.usable(from), leg.usable(to));
            let durability = leg.orders.durability;
            let (era, kept) = (leg.link(from).era, leg.planted.is(Bug::LeftWhereItRestarted));
            let clear = self
                .batches
                .get(&id)
                .filter(|batch| batch.step == Step::Clear)
                .map(|batch| self.keys_to_clear(leg, batch))
                .unwrap_or_default();
            // Before a possibly last copy is removed, the other one must be known to exist.
            let is_alone = leg.is_given_up(from);
            let clearable = to_usable && (from_usable || is_alone || leg.rolls_back || leg.target.era == 0);
            let Some(batch) = self.batches.get_mut(&id) else { return };
            let restarted = batch.read_generation != era && !kept;
            if batch.is_requested || now_us < batch.not_before_us {
                return;
            }
            let had_any = batch.has_values();
            match batch.step {
                Step::Copy if from_usable => {
                    let keys = batch.keys.iter().map(|(_, key)| key.clone()).collect();
                    actions.push(Action::Io(Io::Copy { batch: id, from, keys }));
                }
                Step::Clear if clear.is_empty() => {
                    batch.step = Step::Store;
                    continue;
                }
                Step::Clear if clearable => actions.push(Action::Io(Io::Remove { batch: id, from: to, keys: clear })),
                Step::Store if !had_any => {
                    batch.step = Step::Record;
                    continue;
                }
                Step::Store if to_usable => {
                    actions.push(Action::Io(Io::Store { batch: id, to, keys: batch.present_keys() }))
                }
                Step::Secure if durability == Durability::Memory || self.relax_durability => {
                    batch.step = Step::Record;
                    continue;
                }
                Step::Secure if to_usable => actions.push(Action::Io(Io::Secure { batch: id, at: to, durability })),
                // Not while the state of the side is unknown: the purge must not remove recorded keys.
                Step::Record if to_usable && batch.record.is_none() => {
                    self.record_batch(leg, id, actions);
                    if leg.planted.is(Bug::UnlinkBeforeRecord) {
                        self.skip_record(id);
                        continue;
                    }
                }
                // Send nothing to a side that was given up.
                Step::Remove if is_alone || !had_any && !restarted => {
                    self.commit(leg, id, actions);
                    return;
                }
                Step::Remove if from_usable && to_usable => {
                    let all = || batch.keys.iter().map(|(_, key)| key.clone()).collect();
                    let committed = leg.planted.is(Bug::CommitBeforeUnlink).then(all);
                    // A new process may have keys that the process read before did not have.
                    let keys = if restarted { all() } else { batch.present_keys() };
                    batch.removal_sent = true;
                    actions.push(Action::Io(Io::Remove { batch: id, from, keys }));
                    actions.extend(committed.map(|keys| Action::Io(Io::Commit { keys })));
                }
                _ => return,
            }
            if let Some(batch) = self.batches.get_mut(&id) {
                batch.is_requested = true;
            }
            return;
        }
    }

    fn record_batch(&mut self, leg: &mut LegCore, id: BatchId, actions: &mut Vec<Action>) {
        let LegOrder { move_id, leg: number, .. } = leg.orders;
        let absent_too = !leg.planted.is(Bug::AbsentNotRecorded);
        let Some(batch) = self.batches.get(&id) else { return };
        let keys: Vec<Fingerprint> = batch
            .keys
            .iter()
            .zip(&batch.value_bytes)
            .filter(|(_, had)| absent_too || had.is_some())
            .map(|((key, _), _)| *key)
            .collect();
        let record = if leg.rolls_back {
            Record::Returned { move_id, leg: number, keys }
        } else {
            Record::Moved { move_id, leg: number, keys }
        };
        let number = leg.record(record, actions);
        let eras = leg.eras();
        if let Some(batch) = self.batches.get_mut(&id) {
            batch.record = Some((number, eras));
        }
    }

    /// Only for an injected bug.
    fn skip_record(&mut self, id: BatchId) {
        if let Some(batch) = self.batches.get_mut(&id) {
            batch.on_record = batch.record.map(|(_, eras)| eras);
            batch.set_step(Step::Remove);
        }
    }

    fn answered(&mut self, id: BatchId, step: Step) -> Option<&mut Batch> {
        self.batches.get_mut(&id).filter(|batch| batch.is_requested && batch.step == step)
    }

    fn batch_copied(
        &mut self,
        leg: &mut LegCore,
        id: BatchId,
        outcomes: &[Copied],
        now_us: u64,
        actions: &mut Vec<Action>,
    ) {
        let era = leg.link(leg.from()).era;
        let Some(batch) = self.answered(id, Step::Copy) else { return };
        if outcomes.is_empty() || outcomes.len() > batch.keys.len() {
            debug_assert!(false, "an outcome per key that was read");
            return;
        }
        let others = batch.keys.split_off(outcomes.len());
        batch.prior_generations.truncate(outcomes.len());
        let wanted = batch.wanted;
        for (fingerprint, key) in others.into_iter().rev() {
            self.busy.remove(&fingerprint);
            if !wanted {
                leg.listed.push_front(key);
            } else if self.wanted_set.insert(fingerprint) {
                self.wanted.push_front((fingerprint, key));
            }
        }
        let Some(batch) = self.batches.get_mut(&id) else { return };
        let refused = outcomes.iter().find_map(|outcome| match outcome {
            Copied::Refused(why) => Some(why.clone()),
            _ => None,
        });
        if let Some(why) = refused {
            let why = format!("a key could not be read: {why}");
            self.refused(leg, id, why, now_us, actions);
            return;
        }
        batch.value_bytes = outcomes
            .iter()
            .map(|outcome| if let Copied::Taken { bytes } = outcome { Some(*bytes) } else { None })
            .collect();
        batch.read_generation = era;
        batch.set_step(Step::Clear);
        self.drive(leg, id, now_us, actions);
    }

    /// Returns keys that may have an outdated copy at the destination.
    fn keys_to_clear(&self, leg: &LegCore, batch: &Batch) -> Vec<Key> {
        let (source_era, target_era) = (leg.source.era, leg.target.era);
        // The return of the keys is on record, and the source is another process since.
        let forgot = |batch: &Batch| batch.on_record.is_some_and(|eras| eras.source != source_era);
        let clear = |fingerprint: &Fingerprint, had: bool, before: Option<ProcessGenerations>| {
            let eras = leg.away.get(fingerprint).copied();
            match (leg.rolls_back, had) {
                // The source still has the key, in the process of its record: it was never removed there, so never
                // committed. A copy at another target process may be from before the leg. Not with `Aof`, where the
                // target has kept its copy.
                (false, true) => {
                    let same = |eras: ProcessGenerations| eras.source == source_era;
                    let there = batch.read_generation == source_era && !batch.removal_sent && before.is_none_or(same);
                    let kept = leg.orders.durability == Durability::Aof;
                    there
                        && !kept
                        && eras.is_some_and(|eras| same(eras) && eras.target != target_era && eras.target != COMMITTED)
                }
                // The key exists nowhere, unless it is on record. The removal also proves the target's process: it may
                // have been replaced unnoticed, by one with an old copy.
                (false, false) => before.is_none(),
                // The key returns, and a copy at the source is older: it restarted, or the key was never removed there.
                (true, true) => match eras {
                    Some(eras) => eras.source != source_era || eras.target == target_era,
                    // Its return is on record: the source's copy is valid.
                    None => false,
                },
                (true, false) => match eras {
                    Some(eras) => eras.target == COMMITTED || leg.is_stale(&eras),
                    None => forgot(batch),
                },
            }
        };
        let keys = batch.keys.iter().zip(&batch.value_bytes).zip(&batch.prior_generations);
        keys.filter(|(((fingerprint, _), had), before)| clear(fingerprint, had.is_some(), **before))
            .map(|(((_, key), _), _)| key.clone())
            .collect()
    }

    fn batch_stored(
        &mut self,
        leg: &mut LegCore,
        id: BatchId,
        outcomes: &[Stored],
        now_us: u64,
        actions: &mut Vec<Action>,
    ) {
        let (planted, rolls_back, resumed) = (leg.planted, leg.rolls_back, leg.resumed);
        let Some(batch) = self.answered(id, Step::Store) else { return };
        if outcomes.len() != batch.value_bytes.iter().flatten().count() {
            debug_assert!(false, "an outcome per key stored");
            return;
        }
        // The target was purged before, so an existing key is foreign, unless this batch, a record or an earlier mover
        // explains it. It must not replace the value that was read: the batch removes nothing at the source, and the
        // leg goes back.
        let may_be_ours = rolls_back || resumed || std::mem::replace(&mut batch.store_sent, true);
        let had = batch.prior_generations.iter().zip(&batch.value_bytes).filter(|(_, had)| had.is_some());
        let strange = had.zip(outcomes).any(|((before, _), outcome)| before.is_none() && *outcome == Stored::Exists);
        if strange && !may_be_ours {
            batch.set_step(Step::Clear);
            // No retry: the batch is dropped when the leg turns, and then only keys stored by this attempt are removed
            // at the target.
            batch.tries = ATTEMPTS_MAX;
            batch.not_before_us = u64::MAX;
            batch.store_sent = false;
            let had = batch.keys.iter().zip(&batch.value_bytes).filter(|(_, had)| had.is_some());
            let stored = had.zip(outcomes).filter(|(_, outcome)| **outcome == Stored::Stored);
            let stored: Vec<Fingerprint> = stored.map(|(((fingerprint, _), _), _)| *fingerprint).collect();
            leg.left.extend(stored);
            leg.roll_back(FOREIGN_KEY_REASON.to_owned(), actions);
            return;
        }
        let refused = outcomes.iter().find_map(|outcome| match outcome {
            Stored::Refused(why) => Some(why.clone()),
            _ => None,
        });
        if let Some(why) = refused {
            self.refused(leg, id, format!("a key could not be stored: {why}"), now_us, actions);
            return;
        }
        batch.set_step(Step::Secure);
        let keys: Option<Vec<Key>> =
            planted.is(Bug::CommitBeforeRecord).then(|| batch.keys.iter().map(|(_, key)| key.clone()).collect());
        actions.extend(keys.map(|keys| Action::Io(Io::Commit { keys })));
        self.drive(leg, id, now_us, actions);
    }

    fn batch_secured(
        &mut self,
        leg: &mut LegCore,
        id: BatchId,
        refused: Option<String>,
        now_us: u64,
        actions: &mut Vec<Action>,
    ) {
        let rolls_back = leg.rolls_back;
        let Some(batch) = self.answered(id, Step::Secure) else { return };
        match refused {
            // The origin of the keys may lack the required durability: no replica, no file. The keys were no safer
            // there before, and to insist would make them unavailable indefinitely.
            Some(why) if rolls_back => {
                batch.set_step(Step::Record);
                self.relax_durability = true;
                actions.push(Action::Io(Io::Report {
                    text: format!("returned keys do not have the requested durability at the source: {why}"),
                }));
            }
            Some(why) => {
                self.refused(leg, id, format!("stored keys could not be made durable: {why}"), now_us, actions);
                return;
            }
            None => batch.set_step(Step::Record),
        }
        self.drive(leg, id, now_us, actions);
    }

    fn batch_removed(&mut self, leg: &mut LegCore, id: BatchId, actions: &mut Vec<Action>) {
        if let Some(batch) = self.answered(id, Step::Clear) {
            batch.set_step(Step::Store);
        } else if self.answered(id, Step::Remove).is_some() {
            self.commit(leg, id, actions);
        }
    }

    fn commit(&mut self, leg: &mut LegCore, id: BatchId, actions: &mut Vec<Action>) {
        let Some(batch) = self.batches.remove(&id) else { return };
        assert!(batch.on_record.is_some(), "the move of a committed key is on record");
        for (fingerprint, _) in &batch.keys {
            self.busy.remove(fingerprint);
            if !leg.rolls_back {
                leg.away.insert(*fingerprint, ProcessGenerations { source: leg.source.era, target: COMMITTED });
            }
        }
        let had = batch.value_bytes.iter().flatten();
        leg.progress.bytes_moved += had.clone().sum::<u64>();
        let count = had.count() as u64;
        leg.progress.keys_moved += count;
        if batch.wanted {
            leg.progress.pulled += count;
        }
        actions.push(Action::Io(Io::Commit { keys: batch.keys.into_iter().map(|(_, key)| key).collect() }));
    }

    /// Handles a refusal: the batch is retried after a delay, and after some attempts the leg goes back. A returning
    /// leg has no alternative, so it retries without limit.
    fn refused(&mut self, leg: &mut LegCore, id: BatchId, why: String, now_us: u64, actions: &mut Vec<Action>) {
        let Some(batch) = self.batches.get_mut(&id) else { return };
        batch.tries += 1;
        // Copied values stay.
        batch.set_step(if batch.step == Step::Copy { Step::Copy } else { Step::Clear });
        let rest_us = (RETRY_DELAY_US << batch.tries.min(16)).min(RETRY_DELAY_MAX_US);
        batch.not_before_us = now_us + rest_us;
        let tries = batch.tries;
        if tries < ATTEMPTS_MAX {
            return;
        }
        if leg.rolls_back {
            let keys = batch.keys.iter().map(|(_, key)| key.clone()).collect();
            actions.push(Action::Io(Io::Refuse {
                keys: Some(keys),
                error: format!("TRYAGAIN the key is being moved back, and {why}"),
            }));
        } else {
            leg.roll_back(why, actions);
        }
    }

    /// Starts a batch of keys that are marked busy.
    fn begin(
        &mut self,
        leg: &mut LegCore,
        keys: Vec<(Fingerprint, Key)>,
        wanted: bool,
        now_us: u64,
        actions: &mut Vec<Action>,
    ) {
        let id = BatchId(self.next_batch);
        self.next_batch = self.next_batch.wrapping_add(1);
        let batch = Batch {
            value_bytes: vec![None; keys.len()],
            read_generation: 0,
            prior_generations: keys.iter().map(|(fingerprint, _)| leg.away.get(fingerprint).copied()).collect(),
            keys,
            step: Step::Copy,
            is_requested: false,
            wanted,
            record: None,
            on_record: None,
            removal_sent: false,
            store_sent: false,
            tries: 0,
            not_before_us: 0,
        };
        self.batches.insert(id, batch);
        self.drive(leg, id, now_us, actions);
    }

    fn request(&mut self, leg: &mut LegCore, keys: Vec<Key>, actions: &mut Vec<Action>) {
        if leg.rolls_back && matches!(leg.state, State::Waiting | State::Meeting { .. } | State::Readying) {
            // After a crash of the router, the workers have not yet seen that the leg goes back: they would use keys
            // committed now at the target. They check again once they have.
            return;
        }
        let mut there = Vec::new();
        for key in keys {
            let fingerprint = leg.fingerprints.of(&key);
            let committed = match leg.away.get(&fingerprint) {
                Some(eras) => !leg.rolls_back && eras.target == COMMITTED,
                None => leg.rolls_back,
            };
            if committed && !self.busy.contains(&fingerprint) {
                there.push(key);
            } else if !self.busy.contains(&fingerprint) && self.wanted_set.insert(fingerprint) {
                self.wanted.push_back((fingerprint, key));
            }
        }
        if !there.is_empty() {
            actions.push(Action::Io(Io::Commit { keys: there }));
        }
    }
}
