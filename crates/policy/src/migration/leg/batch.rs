//! The default protocol: the life of a batch: copy, store, secure, record, remove, commit; and what becomes of it when
//! a connection breaks or a node refuses.
//!
//! A batch waits for one answer at a time, of one side or of the journal. So when a side is lost, what is unknown about
//! it is one step.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::{Hash, Hasher};

use super::shell::State;
use super::{Bug, LegCore, TRIES, Work};
use crate::migration::record::{COMMITTED, ProcessGenerations};
use crate::migration::{
    Action, BatchId, Copied, Durability, Event, Fingerprint, FingerprintSet, Io, Key, Orders, Record, Side, Stored,
};

/// How keys are fetched that somebody waits for.
#[derive(Clone, Copy, Debug)]
pub(in crate::migration) struct Pulls {
    /// Batches of them under way at once, at most.
    pub(in crate::migration) at_once: usize,
    /// Keys of a batch, at most.
    pub(in crate::migration) keys: usize,
    /// A batch begins when so many are wanted,
    pub(in crate::migration) gathers: usize,
    /// or when one has been wanted for so long, microseconds.
    pub(in crate::migration) wait_us: u64,
}

impl Default for Pulls {
    /// At once. More batches would not be faster; what is wanted meanwhile goes into the next one together.
    fn default() -> Self {
        Self { at_once: 4, keys: 64, gathers: 1, wait_us: 0 }
    }
}

/// Before the second try, microseconds; twice as long each time, up to [`REST_MAX_US`].
const REST_US: u64 = 20_000;
const REST_MAX_US: u64 = 1_000_000;

/// Why a leg goes back where the target has a key that nobody moved there.
const STRANGE: &str = "the target has a key of these slots that the move did not store there: something writes to that node past the router";

/// What is to be done next, or is being done.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Step {
    Copy,
    /// Remove from where it goes what may be there of before.
    Clear,
    Store,
    Secure,
    Record,
    Remove,
}

#[derive(Clone, Debug)]
pub(super) struct Batch {
    pub(super) keys: Vec<(Fingerprint, Key)>,
    /// Per key the bytes of what was read, if it was there.
    had: Vec<Option<u64>>,
    /// Of which process where it comes from: the era of that side.
    read_of: u32,
    /// Per key the eras of its record before this batch, if it had one.
    before: Vec<Option<ProcessGenerations>>,
    step: Step,
    /// The step was asked for and has not been answered.
    is_requested: bool,
    /// Somebody waits for it.
    wanted: bool,
    /// A record that is not durable yet, and the eras when it was written.
    record: Option<(u64, ProcessGenerations)>,
    /// The eras when the last record that is durable was written.
    on_record: Option<ProcessGenerations>,
    /// The removal was sent at least once, so where the keys come from need not have them any more.
    removal_sent: bool,
    /// A store may have left keys of it where they go.
    store_sent: bool,
    tries: u32,
    not_before_us: u64,
}

impl Batch {
    /// For [`super::identity`]; `behind` says how far a record is behind the last.
    pub(super) fn hash_with<H: Hasher>(&self, behind: impl Fn(u64) -> u64, state: &mut H) {
        (&self.keys, &self.had, self.read_of, &self.before, self.step, self.is_requested, self.wanted).hash(state);
        (self.record.map(|(number, eras)| (behind(number), eras)), self.on_record, self.removal_sent, self.store_sent)
            .hash(state);
        (self.tries, self.not_before_us).hash(state);
    }

    fn go_to(&mut self, step: Step) {
        self.step = step;
        self.is_requested = false;
    }

    fn had_any(&self) -> bool {
        self.had.iter().any(Option::is_some)
    }

    /// Its keys that may be where they go because it has stored them.
    fn may_have_stored(&self) -> impl Iterator<Item = Fingerprint> {
        let had = self.keys.iter().zip(&self.had).filter(|(_, had)| self.store_sent && had.is_some());
        had.map(|((fingerprint, _), _)| *fingerprint)
    }

    fn those_it_had(&self) -> Vec<Key> {
        self.keys.iter().zip(&self.had).filter(|(_, had)| had.is_some()).map(|((_, key), _)| key.clone()).collect()
    }
}

/// The default protocol's work.
#[derive(Clone, Default)]
pub struct Batches {
    pub(super) batches: BTreeMap<BatchId, Batch>,
    pub(super) next_batch: u32,
    /// Keys of batches.
    busy: FingerprintSet,
    /// Keys that somebody waits for and that are in no batch.
    pub(super) wanted: VecDeque<(Fingerprint, Key)>,
    wanted_set: FingerprintSet,
    pulls: Pulls,
    /// Since when some are wanted and in no batch, where they are gathered.
    pub(super) wanted_since_us: Option<u64>,
    pub(super) last_start_us: Option<u64>,
    /// It goes back to a node that cannot do what [`Orders::durability`] asks of the other.
    pub(super) relax_durability: bool,
}

impl Work for Batches {
    const SERVES: bool = true;

    fn step(&mut self, leg: &mut LegCore, event: Event, now_us: u64, actions: &mut Vec<Action>) {
        match event {
            Event::Wanted { keys } => self.want(leg, keys, actions),
            Event::Copied { batch, outcomes } => self.batch_copied(leg, batch, &outcomes, now_us, actions),
            Event::Stored { batch, outcomes } => self.batch_stored(leg, batch, &outcomes, now_us, actions),
            Event::Secured { batch, refused } => self.batch_secured(leg, batch, refused, now_us, actions),
            Event::Removed { batch } => self.batch_removed(leg, batch, actions),
            _ => debug_assert!(false, "an answer to what this protocol does not ask: {event:?}"),
        }
    }

    /// Begins batches: wanted keys first and at once, listed ones at the pace.
    fn start(&mut self, leg: &mut LegCore, now_us: u64, actions: &mut Vec<Action>) {
        if !leg.usable(Side::Source) || !leg.usable(Side::Target) {
            return;
        }
        while self.is_to_pull(now_us) && self.batches.values().filter(|batch| batch.wanted).count() < self.pulls.at_once
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

    /// The records up to that number are durable. A batch may have been begun again since: its keys are on record all
    /// the same.
    fn recorded(&mut self, leg: &mut LegCore, number: u64) {
        for batch in self.batches.values_mut() {
            let Some((_, eras)) = batch.record.take_if(|(awaited, _)| *awaited <= number) else { continue };
            batch.on_record = Some(eras);
            if batch.step == Step::Record && batch.is_requested {
                batch.go_to(Step::Remove);
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

    /// The connection to a side broke: what was asked there and not answered is unknown. What was read stays: until a
    /// key is committed nobody changes it. True where that has happened too often in the middle of the same keys: they
    /// may be the reason.
    fn lost(&mut self, leg: &mut LegCore, side: Side) -> bool {
        let (from, to) = (leg.from(), leg.to());
        let not_redone = leg.planted.is(Bug::NotRedone);
        let era = leg.link(to).era;
        let mut is_given_up = false;
        for batch in self.batches.values_mut().filter(|batch| batch.is_requested) {
            let is_on_record = batch.step == Step::Remove;
            match batch.step {
                Step::Store if side == to && not_redone => batch.go_to(Step::Secure),
                Step::Store if side == to => {
                    batch.store_sent = true;
                    batch.go_to(Step::Clear);
                }
                Step::Copy if side == from => batch.go_to(Step::Copy),
                Step::Clear | Step::Secure if side == to => batch.go_to(Step::Clear),
                // It is on record and at the other side: once more. If that has restarted since, stored once more
                // first.
                Step::Remove if side == from => {
                    let there = batch.on_record.is_some_and(|eras| eras.of(to) == era);
                    batch.go_to(if there { Step::Remove } else { Step::Clear });
                }
                _ => continue,
            }
            leg.progress.repeated += 1;
            if !is_on_record {
                batch.tries += 1;
                is_given_up |= batch.tries >= TRIES;
            }
        }
        is_given_up && !leg.rolls_back
    }

    /// Another process is at a side. If keys go there: what was stored there and not yet removed where it came from is
    /// stored once more.
    fn restarted(&mut self, leg: &mut LegCore, side: Side) {
        if side != leg.to() {
            return;
        }
        for batch in self.batches.values_mut() {
            match batch.step {
                Step::Copy => continue,
                // Sent and not answered by the other side: it is done when that answers.
                Step::Remove if batch.is_requested => continue,
                Step::Clear | Step::Store | Step::Secure | Step::Record | Step::Remove => batch.go_to(Step::Clear),
            }
            leg.progress.repeated += 1;
        }
    }

    /// On the way to rolling back: what is on record goes on to its end, what is not stays where it is.
    fn drop_for_return(&mut self, leg: &mut LegCore) {
        debug_assert_eq!(leg.state, State::Moving);
        let dropped: Vec<BatchId> = self
            .batches
            .iter()
            .filter(|(_, batch)| batch.step != Step::Remove && !batch.is_requested && batch.record.is_none())
            .filter(|(_, batch)| batch.on_record.is_none() || batch.tries >= TRIES)
            .map(|(id, _)| *id)
            .collect();
        for batch in dropped.into_iter().filter_map(|id| self.batches.remove(&id)) {
            leg.left.extend(batch.may_have_stored());
            for (fingerprint, _) in &batch.keys {
                self.busy.remove(fingerprint);
            }
        }
    }

    /// On the way to rolling back without the target: what waits for it ends here. Gives the keys on record that have
    /// never left the source: its copies are those that were read, and no removal was sent. Of other keys on record the
    /// target's copy counts, and they wait for it.
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
            let is_there = batch.step != Step::Copy && batch.read_of == source_era && !batch.removal_sent;
            for ((fingerprint, _), (had, before)) in batch.keys.iter().zip(batch.had.iter().zip(&batch.before)) {
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

    /// Without one of the sides: what has not been read, or is refused again and again, ends here. All of it, where it
    /// goes to that side.
    fn drop_without(&mut self, _leg: &mut LegCore, all: bool) {
        let is_over = |batch: &Batch| all || batch.step == Step::Copy || batch.tries >= TRIES;
        let idle =
            self.batches.extract_if(.., |_, batch| !batch.is_requested && batch.record.is_none() && is_over(batch));
        for (fingerprint, _) in idle.flat_map(|(_, batch)| batch.keys) {
            self.busy.remove(&fingerprint);
        }
    }

    fn forget_wanted(&mut self) {
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
    /// The same with another way to fetch keys that somebody waits for.
    pub(super) fn pulling(pulls: Pulls) -> Self {
        Self { pulls, ..Self::default() }
    }

    /// Whether keys that are wanted are asked for now.
    fn is_to_pull(&mut self, now_us: u64) -> bool {
        if self.wanted.is_empty() {
            self.wanted_since_us = None;
            return false;
        }
        let since_us = if self.pulls.wait_us == 0 { now_us } else { *self.wanted_since_us.get_or_insert(now_us) };
        self.wanted.len() >= self.pulls.gathers || now_us.saturating_sub(since_us) >= self.pulls.wait_us
    }

    /// Keys of the listing for a batch, busy from now on; those that have been moved meanwhile are passed over.
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

    /// Asks for the next step of a batch, as soon as it can be done; steps with nothing to do are passed.
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
                .map(|batch| self.what_to_clear(leg, batch))
                .unwrap_or_default();
            // Before the only copy is removed that may be left, it must be known that the other one is still there.
            let is_alone = leg.is_given_up(from);
            let clearable = to_usable && (from_usable || is_alone || leg.rolls_back || leg.target.era == 0);
            let Some(batch) = self.batches.get_mut(&id) else { return };
            let restarted = batch.read_of != era && !kept;
            if batch.is_requested || now_us < batch.not_before_us {
                return;
            }
            let had_any = batch.had_any();
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
                    actions.push(Action::Io(Io::Store { batch: id, to, keys: batch.those_it_had() }))
                }
                Step::Secure if durability == Durability::Memory || self.relax_durability => {
                    batch.step = Step::Record;
                    continue;
                }
                Step::Secure if to_usable => actions.push(Action::Io(Io::Secure { batch: id, at: to, durability })),
                // Not while the side is in doubt: what is on record there must not be removed as left over.
                Step::Record if to_usable && batch.record.is_none() => {
                    self.record_batch(leg, id, actions);
                    if leg.planted.is(Bug::UnlinkBeforeRecord) {
                        self.go_on_before_the_record(id);
                        continue;
                    }
                }
                // Where a side was given up nothing is asked of it.
                Step::Remove if is_alone || !had_any && !restarted => {
                    self.commit(leg, id, actions);
                    return;
                }
                Step::Remove if from_usable && to_usable => {
                    let all = || batch.keys.iter().map(|(_, key)| key.clone()).collect();
                    let committed = leg.planted.is(Bug::CommitBeforeUnlink).then(all);
                    // Another process than the one that was read may show what that had not.
                    let keys = if restarted { all() } else { batch.those_it_had() };
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
        let Orders { move_id, leg: number, .. } = leg.orders;
        let absent_too = !leg.planted.is(Bug::AbsentNotRecorded);
        let Some(batch) = self.batches.get(&id) else { return };
        let keys: Vec<Fingerprint> = batch
            .keys
            .iter()
            .zip(&batch.had)
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

    /// A planted bug's.
    fn go_on_before_the_record(&mut self, id: BatchId) {
        if let Some(batch) = self.batches.get_mut(&id) {
            batch.on_record = batch.record.map(|(_, eras)| eras);
            batch.go_to(Step::Remove);
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
        batch.before.truncate(outcomes.len());
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
        batch.had = outcomes
            .iter()
            .map(|outcome| if let Copied::Taken { bytes } = outcome { Some(*bytes) } else { None })
            .collect();
        batch.read_of = era;
        batch.go_to(Step::Clear);
        self.drive(leg, id, now_us, actions);
    }

    /// What may be where the keys go and is not theirs.
    fn what_to_clear(&self, leg: &LegCore, batch: &Batch) -> Vec<Key> {
        let (source_era, target_era) = (leg.source.era, leg.target.era);
        // It is on record that the keys are back, and the source is another process since.
        let forgot = |batch: &Batch| batch.on_record.is_some_and(|eras| eras.source != source_era);
        let clear = |fingerprint: &Fingerprint, had: bool, before: Option<ProcessGenerations>| {
            let eras = leg.away.get(fingerprint).copied();
            match (leg.rolls_back, had) {
                // The source has it and is the process that it was at the key's record: it was never removed there, so
                // never committed, and what another process at the target shows of it may be from before the leg. Not
                // where the target was made to keep it.
                (false, true) => {
                    let same = |eras: ProcessGenerations| eras.source == source_era;
                    let there = batch.read_of == source_era && !batch.removal_sent && before.is_none_or(same);
                    let kept = leg.orders.durability == Durability::Aof;
                    there
                        && !kept
                        && eras.is_some_and(|eras| same(eras) && eras.target != target_era && eras.target != COMMITTED)
                }
                // Nowhere, then, unless it is on record. To say so where it goes also shows that the process there is
                // the one that we know: it may have been replaced, and show a key of before, and nobody has noticed.
                (false, false) => before.is_none(),
                // It comes back, and what the source may have of it is older: it restarted, or it was never removed
                // there.
                (true, true) => match eras {
                    Some(eras) => eras.source != source_era || eras.target == target_era,
                    // It is on record as back: what the source kept of it counts.
                    None => false,
                },
                (true, false) => match eras {
                    Some(eras) => eras.target == COMMITTED || leg.is_stale(&eras),
                    None => forgot(batch),
                },
            }
        };
        let keys = batch.keys.iter().zip(&batch.had).zip(&batch.before);
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
        if outcomes.len() != batch.had.iter().flatten().count() {
            debug_assert!(false, "an outcome per key stored");
            return;
        }
        // The target was cleared before, so a key there is somebody else's, unless this batch, a record or a mover
        // before this one explains it. It must not take the place of the one that was read: nothing of the batch is
        // removed at the source, and the leg goes back.
        let may_be_ours = rolls_back || resumed || std::mem::replace(&mut batch.store_sent, true);
        let had = batch.before.iter().zip(&batch.had).filter(|(_, had)| had.is_some());
        let strange = had.zip(outcomes).any(|((before, _), outcome)| before.is_none() && *outcome == Stored::Exists);
        if strange && !may_be_ours {
            batch.go_to(Step::Clear);
            // Not once more: it is dropped when the leg turns, and what is removed at the target then is what was
            // stored there now.
            batch.tries = TRIES;
            batch.not_before_us = u64::MAX;
            batch.store_sent = false;
            let had = batch.keys.iter().zip(&batch.had).filter(|(_, had)| had.is_some());
            let stored = had.zip(outcomes).filter(|(_, outcome)| **outcome == Stored::Stored);
            let stored: Vec<Fingerprint> = stored.map(|(((fingerprint, _), _), _)| *fingerprint).collect();
            leg.left.extend(stored);
            leg.roll_back(STRANGE.to_owned(), actions);
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
        batch.go_to(Step::Secure);
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
            // Where the keys come from need not have what the order asks of where they go: no replica, no file. They
            // were no safer there before, and to insist would keep them from everybody for ever.
            Some(why) if rolls_back => {
                batch.go_to(Step::Record);
                self.relax_durability = true;
                actions.push(Action::Io(Io::Report {
                    text: format!("keys come back to a node that does not make them as safe as was asked: {why}"),
                }));
            }
            Some(why) => {
                self.refused(leg, id, format!("what was stored could not be made safe: {why}"), now_us, actions);
                return;
            }
            None => batch.go_to(Step::Record),
        }
        self.drive(leg, id, now_us, actions);
    }

    fn batch_removed(&mut self, leg: &mut LegCore, id: BatchId, actions: &mut Vec<Action>) {
        if let Some(batch) = self.answered(id, Step::Clear) {
            batch.go_to(Step::Store);
        } else if self.answered(id, Step::Remove).is_some() {
            self.commit(leg, id, actions);
        }
    }

    fn commit(&mut self, leg: &mut LegCore, id: BatchId, actions: &mut Vec<Action>) {
        let Some(batch) = self.batches.remove(&id) else { return };
        assert!(batch.on_record.is_some(), "a key is committed when that it moved is on record");
        for (fingerprint, _) in &batch.keys {
            self.busy.remove(fingerprint);
            if !leg.rolls_back {
                leg.away.insert(*fingerprint, ProcessGenerations { source: leg.source.era, target: COMMITTED });
            }
        }
        let had = batch.had.iter().flatten();
        leg.progress.bytes_moved += had.clone().sum::<u64>();
        let count = had.count() as u64;
        leg.progress.keys_moved += count;
        if batch.wanted {
            leg.progress.pulled += count;
        }
        actions.push(Action::Io(Io::Commit { keys: batch.keys.into_iter().map(|(_, key)| key).collect() }));
    }

    /// A node refuses: the batch rests and is begun again, and after some tries the leg goes back. On the way back
    /// there is no other way: it goes on trying.
    fn refused(&mut self, leg: &mut LegCore, id: BatchId, why: String, now_us: u64, actions: &mut Vec<Action>) {
        let Some(batch) = self.batches.get_mut(&id) else { return };
        batch.tries += 1;
        // What was read stays.
        batch.go_to(if batch.step == Step::Copy { Step::Copy } else { Step::Clear });
        let rest_us = (REST_US << batch.tries.min(16)).min(REST_MAX_US);
        batch.not_before_us = now_us + rest_us;
        let tries = batch.tries;
        if tries < TRIES {
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

    /// Begins a batch of keys that are busy by now.
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
            had: vec![None; keys.len()],
            read_of: 0,
            before: keys.iter().map(|(fingerprint, _)| leg.away.get(fingerprint).copied()).collect(),
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

    fn want(&mut self, leg: &mut LegCore, keys: Vec<Key>, actions: &mut Vec<Action>) {
        if leg.rolls_back && matches!(leg.state, State::Waiting | State::Meeting { .. } | State::Readying) {
            // After a crash of the router the workers do not know yet that the leg goes back: what is committed to them
            // now they would use at the target. They look again when they know.
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
