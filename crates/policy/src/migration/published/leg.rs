//! The mover of a published protocol.
//!
//! All slots form one leg. Groups start in numeric order, several at once: their keys are read and stored over existing
//! ones, then the group is complete. Pulled keys and late writes are copied besides. When all groups are complete, the
//! target has every key, the source is purged, and the slots are handed over. If clients keep creating keys at the
//! source, this happens after a few checks anyway.
//!
//! The core of [`super::super::leg`] is not used: it can return keys, and relies on records of moved keys. Here only
//! the start and the end of a leg are on record.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use super::Rules;
use crate::migration::record::OpenLeg;
use crate::migration::tracker;
use crate::migration::{
    Action, BatchId, Copied, Event, Fingerprinter, Io, Key, LegOrder, Machine, Outcome, Pace, Phase, Process, Progress,
    Record, Side, Stored, UnexpectedKeys,
};

/// Number of keys pulled together, and maximum wait of the first for others, microseconds (NetMigrate's `rpc.h`: 16, or
/// 100 ms).
const PULLS: usize = 16;
const PULL_AFTER_US: u64 = 100_000;
/// Time during which a pulled key is not pulled again, microseconds.
const PULLED_FOR_US: u64 = 10_000_000;
/// Interval between late-write shipments, microseconds.
const SHIP_EVERY_US: u64 = 100_000;
/// Batches per list request.
const LIST_BATCHES: u32 = 10;
/// Delay before a refused batch is retried, microseconds, and the number of attempts. Without a rollback, the leg ends
/// without the refused keys.
const REST_US: u64 = 100_000;
const TRIES: u8 = 5;
/// Number of checks for new keys after everything is complete. Clients may pull and create keys at the source
/// indefinitely.
const SETTLES: u8 = 3;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Waits for [`Event::Met`].
    Waiting,
    Meeting {
        record: u64,
    },
    /// Publishes the rules to the workers.
    Announcing,
    Starting {
        record: u64,
    },
    Listing,
    Moving,
    /// All groups are complete: waits for earlier commands at the source.
    Settling,
    /// Records the cut-over. From here on the source is not searched for keys.
    CuttingOver {
        record: u64,
    },
    /// Finishes the batches in flight, then purges the source.
    Cleaning,
    Ending {
        record: u64,
        owner: Side,
    },
    HandingOver,
    Ended,
}

/// Reason of a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum CopyReason {
    /// The group is in progress; `None` if each key is a group.
    Group(Option<u32>),
    Pulled,
    Late,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    Copy,
    Store,
    /// Late writes only: removes keys that the source no longer has.
    Remove,
}

#[derive(Clone, Debug)]
struct Batch {
    why: CopyReason,
    keys: Vec<Key>,
    there: Vec<Key>,
    step: Step,
    is_requested: bool,
    not_before_us: u64,
    tries: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum QuiesceState {
    No,
    Requested,
    Reached,
}

/// Machine of a published protocol.
#[derive(Clone)]
pub struct Published {
    orders: LegOrder,
    rules: Rules,
    fingerprints: Fingerprinter,
    groups: u32,
    at_once: usize,
    state: State,
    resumed: bool,
    /// [`Record::CutOver`] is on record.
    cut: bool,
    /// Number of times that everything was complete.
    settles: u8,
    /// Last batch to wait for, when nothing is left to start. Later batches have newer keys.
    awaited: Option<BatchId>,
    /// The side is not connected.
    is_down: [bool; 2],
    given_up: Option<Side>,
    /// Keys of groups that have not started, by group; and the first of these groups.
    listed: BTreeMap<u32, BTreeSet<Key>>,
    /// Number of keys in `listed`. A sum per step would be quadratic in the number of groups.
    keys_listed: usize,
    next_group: u32,
    /// Number of keys left per group in progress.
    under_way: BTreeMap<u32, usize>,
    /// Keys to copy.
    todo: VecDeque<(Option<u32>, Key)>,
    /// If each key is a group: all keys ever listed, and whether they are at the target.
    known: BTreeMap<Key, bool>,
    lists: u32,
    list_ended: bool,
    late: BTreeSet<Key>,
    shipped_us: u64,
    pulls: Vec<Key>,
    pulls_since_us: u64,
    pulled: BTreeSet<Key>,
    pulled_since_us: u64,
    batches: BTreeMap<BatchId, Batch>,
    last_batch: u32,
    last_began_us: u64,
    purging: bool,
    records: u64,
    quiet: QuiesceState,
    pace: Pace,
    progress: Progress,
}

impl Published {
    /// Creates a leg as ordered. An open leg of an earlier router starts again.
    #[must_use]
    pub fn new(
        orders: LegOrder,
        paper: &super::Paper,
        rules: Rules,
        fingerprints: Fingerprinter,
        resume: Option<&OpenLeg>,
    ) -> Self {
        Self {
            orders,
            rules,
            fingerprints,
            groups: paper.groups.max(1),
            at_once: usize::from(paper.at_once.max(1)),
            state: State::Waiting,
            resumed: resume.is_some_and(|open| open.moving),
            cut: resume.is_some_and(|open| open.cut_over),
            settles: 0,
            awaited: None,
            is_down: [false; 2],
            given_up: resume.and_then(|open| open.given_up),
            listed: BTreeMap::new(),
            keys_listed: 0,
            next_group: 0,
            under_way: BTreeMap::new(),
            todo: VecDeque::new(),
            known: BTreeMap::new(),
            lists: 0,
            list_ended: false,
            late: BTreeSet::new(),
            shipped_us: 0,
            pulls: Vec::new(),
            pulls_since_us: 0,
            pulled: BTreeSet::new(),
            pulled_since_us: 0,
            batches: BTreeMap::new(),
            last_batch: 0,
            last_began_us: 0,
            purging: false,
            records: 0,
            quiet: QuiesceState::No,
            pace: Pace { batch_keys: 100, batches: 1, interval_us: 0 },
            progress: Progress::NONE,
        }
    }

    fn record(&mut self, record: Record, actions: &mut Vec<Action>) -> u64 {
        self.records += 1;
        actions.push(Action::Record { number: self.records, record });
        self.records
    }

    fn met(&mut self, source: Process, target: Process, actions: &mut Vec<Action>) {
        let LegOrder { move_id, leg, ref slots, .. } = self.orders;
        let record = if self.resumed {
            self.record(Record::Met { move_id, leg, side: Side::Source, process: source }, actions);
            Record::Met { move_id, leg, side: Side::Target, process: target }
        } else {
            Record::LegBegun { move_id, leg, slots: slots.clone(), source, target }
        };
        let record = self.record(record, actions);
        self.state = State::Meeting { record };
    }

    fn recorded(&mut self, number: u64, actions: &mut Vec<Action>) {
        match self.state {
            State::Meeting { record } if record <= number => {
                self.state = State::Announcing;
                actions.push(Action::Announce { double_read: None });
            }
            State::Starting { record } if record <= number => {
                self.state = State::Listing;
                self.progress.phase = Phase::Moving;
            }
            State::CuttingOver { record } if record <= number => {
                self.cut = true;
                self.clean(actions);
            }
            State::Ending { record, owner } if record <= number => {
                self.state = State::HandingOver;
                actions.push(Action::HandOver { to: owner });
            }
            _ => {}
        }
    }

    /// Handles that the workers have adopted the rules, and earlier commands have ended. With several workers, this is
    /// how a router changes its state atomically.
    fn drained(&mut self, actions: &mut Vec<Action>) {
        if self.state == State::Settling {
            self.state = State::Moving;
            if self.is_done() || self.settles >= SETTLES {
                let LegOrder { move_id, leg, .. } = self.orders;
                let record = self.record(Record::CutOver { move_id, leg }, actions);
                self.state = State::CuttingOver { record };
            }
        } else if self.state == State::Announcing && self.cut {
            self.clean(actions);
        } else if self.state == State::Announcing {
            let LegOrder { move_id, leg, .. } = self.orders;
            let record =
                if self.resumed { self.records } else { self.record(Record::LegMoving { move_id, leg }, actions) };
            self.state = State::Starting { record };
            if self.resumed {
                self.recorded(record, actions);
            }
        }
    }

    /// Commits all keys, since the target has every key: waiting clients are served there.
    fn clean(&mut self, actions: &mut Vec<Action>) {
        self.state = State::Cleaning;
        self.progress.phase = Phase::Moving;
        self.pulls.clear();
        actions.push(Action::CommitAll);
    }

    fn number_of(&self, key: &[u8]) -> u32 {
        self.rules.number(self.fingerprints.of(key))
    }

    /// Records keys of the source. Duplicates are allowed.
    fn note_listed(&mut self, keys: Vec<Key>) {
        for key in keys {
            if self.rules.by_key() {
                if !self.known.contains_key(&key) {
                    self.known.insert(key.clone(), false);
                    self.todo.push_back((None, key));
                }
                continue;
            }
            let number = self.number_of(&key);
            // A key of a started group is copied like a late write.
            if number >= self.next_group {
                self.keys_listed += usize::from(self.listed.entry(number).or_default().insert(key));
            } else {
                self.late.insert(key);
            }
        }
    }

    fn written(&mut self, keys: Vec<Key>) {
        if self.rules.ships_late_writes() || matches!(self.state, State::Announcing | State::Listing) {
            self.note_listed(keys);
        } else {
            // Existing copies stay as they are.
            let new = keys.into_iter().filter(|key| !self.known.contains_key(key)).collect();
            self.note_listed(new);
        }
    }

    /// Returns the actual state of a key's group.
    fn truth(&self, key: &Key) -> tracker::State {
        let number = self.number_of(key);
        match (self.rules.by_key(), self.known.get(key)) {
            (true, Some(true)) => tracker::State::Complete,
            (true, _) => tracker::State::NotStarted,
            (false, _) if number >= self.next_group => tracker::State::NotStarted,
            (false, _) if self.under_way.contains_key(&number) => tracker::State::InProgress,
            (false, _) => tracker::State::Complete,
        }
    }

    fn wanted(&mut self, keys: Vec<Key>, now_us: u64, actions: &mut Vec<Action>) {
        for key in keys {
            // The target did not have the key, so the tracker was wrong.
            let truth = self.truth(&key);
            if self.rules.repairs() && truth != tracker::State::Complete {
                let group = self.rules.group(self.fingerprints.of(&key));
                actions.push(Action::Io(Io::CorrectTracker { group, truth }));
                if truth == tracker::State::NotStarted {
                    continue;
                }
            }
            if self.pulled.contains(&key) {
                actions.push(Action::Io(Io::Commit { keys: vec![key] }));
            } else if !self.pulls.contains(&key) {
                self.pulls_since_us = if self.pulls.is_empty() { now_us } else { self.pulls_since_us };
                self.pulls.push(key);
            }
        }
    }

    fn answered(&mut self, event: Event, now_us: u64, actions: &mut Vec<Action>) {
        let (Event::Copied { batch: id, .. } | Event::Stored { batch: id, .. } | Event::Removed { batch: id }) = event
        else {
            return;
        };
        let Some(batch) = self.batches.get_mut(&id).filter(|batch| batch.is_requested) else { return };
        batch.is_requested = false;
        let mut refused_keys: Vec<Key> = Vec::new();
        let refused = match event {
            Event::Copied { outcomes, .. } => {
                let later = batch.keys.split_off(outcomes.len().min(batch.keys.len()));
                let why = batch.why;
                let taken =
                    batch.keys.iter().zip(&outcomes).filter(|(_, copied)| matches!(copied, Copied::Taken { .. }));
                batch.there = taken.map(|(key, _)| key.clone()).collect();
                batch.step = Step::Store;
                let no = batch.keys.iter().zip(&outcomes).filter(|(_, copied)| matches!(copied, Copied::Refused(_)));
                refused_keys.extend(no.map(|(key, _)| key.clone()));
                let bytes = |copied: &Copied| if let Copied::Taken { bytes } = copied { *bytes } else { 0 };
                self.progress.bytes_moved += outcomes.iter().map(bytes).sum::<u64>();
                for key in later.into_iter().rev() {
                    match why {
                        CopyReason::Group(number) => self.todo.push_front((number, key)),
                        CopyReason::Pulled => self.pulls.push(key),
                        CopyReason::Late => drop(self.late.insert(key)),
                    }
                }
                outcomes.into_iter().find_map(|copied| if let Copied::Refused(why) = copied { Some(why) } else { None })
            }
            Event::Stored { outcomes, .. } => {
                batch.step = Step::Remove;
                let no = batch.there.iter().zip(&outcomes).filter(|(_, stored)| matches!(stored, Stored::Refused(_)));
                refused_keys.extend(no.map(|(key, _)| key.clone()));
                outcomes.into_iter().find_map(|stored| if let Stored::Refused(why) = stored { Some(why) } else { None })
            }
            _ => return self.finished(id, actions),
        };
        let Some(batch) = self.batches.get_mut(&id) else { return };
        let Some(why) = refused else { return };
        (batch.step, batch.not_before_us) = (Step::Copy, now_us + REST_US);
        batch.tries += 1;
        let text = if batch.tries < TRIES {
            format!("a node refuses keys, which are retried: {why}")
        } else {
            let of = batch.why;
            batch.keys.retain(|key| !refused_keys.contains(key));
            if let CopyReason::Group(Some(number)) = of {
                let left = self.under_way.entry(number).or_default();
                *left = left.saturating_sub(refused_keys.len());
            }
            let count = refused_keys.len();
            if of == CopyReason::Pulled {
                actions.push(Action::Io(Io::Commit { keys: refused_keys }));
            }
            format!("{count} keys are lost, because a node refused them {TRIES} times: {why}")
        };
        actions.push(Action::Io(Io::Report { text }));
    }

    /// Handles a batch that has reached the target.
    fn finished(&mut self, id: BatchId, actions: &mut Vec<Action>) {
        let Some(batch) = self.batches.remove(&id) else { return };
        match batch.why {
            CopyReason::Group(number) => {
                self.progress.keys_moved += batch.there.len() as u64;
                match number {
                    Some(number) => {
                        let left = self.under_way.entry(number).or_default();
                        *left = left.saturating_sub(batch.keys.len());
                        if *left == 0 {
                            self.complete(number, actions);
                        }
                    }
                    None => {
                        self.known.extend(batch.there.iter().map(|key| (key.clone(), true)));
                        let groups =
                            batch.there.iter().map(|key| self.rules.group(self.fingerprints.of(key))).collect();
                        actions.push(Action::Io(Io::Track { groups, complete: true }));
                    }
                }
            }
            CopyReason::Pulled => {
                self.progress.pulled += batch.there.len() as u64;
                self.pulled.extend(batch.keys.iter().cloned());
                actions.push(Action::Io(Io::Commit { keys: batch.keys }));
            }
            CopyReason::Late => {}
        }
    }

    fn complete(&mut self, number: u32, actions: &mut Vec<Action>) {
        self.under_way.remove(&number);
        actions.push(Action::Io(Io::Track { groups: vec![self.rules.range(number)], complete: true }));
    }

    fn start_groups(&mut self, actions: &mut Vec<Action>) {
        // Here only single keys can be complete: each number would be a further false positive of the filter.
        if self.rules.by_key() {
            return;
        }
        while self.under_way.len() < self.at_once && self.next_group < self.groups {
            let number = self.next_group;
            self.next_group += 1;
            actions.push(Action::Io(Io::Track { groups: vec![self.rules.range(number)], complete: false }));
            let keys = self.listed.remove(&number).unwrap_or_default();
            self.keys_listed -= keys.len();
            self.under_way.insert(number, keys.len());
            if keys.is_empty() {
                self.complete(number, actions);
            }
            self.todo.extend(keys.into_iter().map(|key| (Some(number), key)));
        }
    }

    fn begin(&mut self, why: CopyReason, keys: Vec<Key>) {
        self.last_batch = self.last_batch.wrapping_add(1);
        let keys: BTreeSet<Key> = keys.into_iter().collect();
        let batch = Batch {
            why,
            keys: keys.into_iter().collect(),
            there: Vec::new(),
            step: Step::Copy,
            is_requested: false,
            not_before_us: 0,
            tries: 0,
        };
        self.batches.insert(BatchId(self.last_batch), batch);
    }

    /// Requests the next step of each batch that can proceed.
    fn go_on_with_batches(&mut self, now_us: u64, actions: &mut Vec<Action>) {
        let mut done = Vec::new();
        for (id, batch) in
            self.batches.iter_mut().filter(|(_, batch)| !batch.is_requested && batch.not_before_us <= now_us)
        {
            let gone = || -> Vec<Key> { batch.keys.iter().filter(|key| !batch.there.contains(key)).cloned().collect() };
            let io = match batch.step {
                Step::Copy if !self.is_down[Side::Source as usize] => {
                    Io::Copy { batch: *id, from: Side::Source, keys: batch.keys.clone() }
                }
                Step::Copy => continue,
                Step::Store if batch.there.is_empty() => {
                    batch.step = Step::Remove;
                    continue;
                }
                _ if self.is_down[Side::Target as usize] => continue,
                // A pulled value is older than a client's write at the target, so it must not replace it.
                Step::Store if batch.why == CopyReason::Pulled => {
                    Io::Store { batch: *id, to: Side::Target, keys: batch.there.clone() }
                }
                Step::Store => Io::Overwrite { batch: *id, to: Side::Target, keys: batch.there.clone() },
                Step::Remove if batch.why == CopyReason::Late && batch.there.len() < batch.keys.len() => {
                    Io::Remove { batch: *id, from: Side::Target, keys: gone() }
                }
                Step::Remove => {
                    done.push(*id);
                    continue;
                }
            };
            batch.is_requested = true;
            actions.push(Action::Io(io));
        }
        done.into_iter().for_each(|id| self.finished(id, actions));
    }

    fn begin_batches(&mut self, now_us: u64, actions: &mut Vec<Action>) {
        if self.pulls.len() >= PULLS || !self.pulls.is_empty() && now_us >= self.pulls_since_us + PULL_AFTER_US {
            let keys = std::mem::take(&mut self.pulls);
            self.begin(CopyReason::Pulled, keys);
        }
        if now_us >= self.pulled_since_us + PULLED_FOR_US {
            (self.pulled_since_us, self.pulled) = (now_us, BTreeSet::new());
        }
        if !self.late.is_empty()
            && now_us >= self.shipped_us + SHIP_EVERY_US
            && !self.batches.values().any(|batch| batch.why == CopyReason::Late)
        {
            self.shipped_us = now_us;
            let keys: Vec<Key> =
                std::iter::from_fn(|| self.late.pop_first()).take(self.pace.batch_keys.max(1) as usize).collect();
            self.begin(CopyReason::Late, keys);
        }
        self.start_groups(actions);
        while let Some((number, _)) = self.todo.front() {
            let number = *number;
            let under_way = self.batches.values().filter(|batch| matches!(batch.why, CopyReason::Group(_))).count();
            if under_way >= self.pace.batches as usize || now_us < self.last_began_us + self.pace.interval_us {
                break;
            }
            self.last_began_us = now_us;
            let mut keys = Vec::new();
            while keys.len() < self.pace.batch_keys.max(1) as usize
                && self.todo.front().is_some_and(|(of, _)| *of == number)
            {
                keys.extend(self.todo.pop_front().map(|(_, key)| key));
            }
            self.begin(CopyReason::Group(number), keys);
            self.start_groups(actions);
        }
        self.go_on_with_batches(now_us, actions);
    }

    /// Whether all listed keys are at the target or in batches.
    fn is_complete(&self) -> bool {
        let groups = self.rules.by_key() || self.next_group >= self.groups && self.under_way.is_empty();
        groups && self.list_ended && self.todo.is_empty()
    }

    /// Whether the batches that existed when everything was complete have ended.
    fn is_settled(&mut self) -> bool {
        let awaited = *self.awaited.get_or_insert(BatchId(self.last_batch));
        self.batches.range(..=awaited).next().is_none()
    }

    fn is_empty(&self) -> bool {
        self.todo.is_empty() && self.batches.is_empty() && self.late.is_empty()
    }

    fn is_done(&self) -> bool {
        self.is_complete() && self.is_empty()
    }

    fn end_at(&mut self, owner: Side, actions: &mut Vec<Action>) {
        let LegOrder { move_id, leg, .. } = self.orders;
        let record = self.record(Record::LegEnded { move_id, leg, owner }, actions);
        self.state = State::Ending { record, owner };
        self.progress.phase = Phase::Releasing;
    }

    /// Whether nothing has changed that would have to be undone.
    fn may_withdraw(&self) -> bool {
        !self.resumed && matches!(self.state, State::Waiting | State::Meeting { .. } | State::Announcing)
    }

    /// Ends the leg before its start.
    fn withdraw(&mut self, why: String, actions: &mut Vec<Action>) {
        if self.state == State::Announcing {
            actions.push(Action::Withdraw);
        }
        self.end(Outcome::NotBegun { why }, actions);
    }

    fn end(&mut self, outcome: Outcome, actions: &mut Vec<Action>) {
        self.state = State::Ended;
        self.progress.phase = Phase::Ended;
        actions.push(Action::Io(Io::End(outcome)));
        if self.quiet == QuiesceState::Requested {
            actions.push(Action::Io(Io::Quiet));
        }
    }

    fn give_up(&mut self, side: Side, actions: &mut Vec<Action>) {
        let is_ending = matches!(self.state, State::Waiting | State::Ending { .. } | State::HandingOver | State::Ended);
        if is_ending || self.given_up.is_some() || !self.is_down[side as usize] {
            let text = "a side is abandoned only if it does not reply".to_owned();
            return actions.push(Action::Io(Io::Report { text }));
        }
        if self.may_withdraw() {
            return self.withdraw("the user abandoned a node before anything had moved".to_owned(), actions);
        }
        let LegOrder { move_id, leg, .. } = self.orders;
        self.record(Record::GivenUp { move_id, leg, side }, actions);
        self.given_up = Some(side);
        self.batches.clear();
        actions.push(Action::Lost { keys: Vec::new() });
        self.end_at(side.other(), actions);
    }

    fn advance(&mut self, now_us: u64, actions: &mut Vec<Action>) {
        if self.quiet == QuiesceState::Requested && self.batches.values().all(|batch| !batch.is_requested) {
            self.batches.values_mut().for_each(|batch| batch.step = Step::Copy);
            self.quiet = QuiesceState::Reached;
            actions.push(Action::Io(Io::Quiet));
        }
        if self.quiet != QuiesceState::No {
            return;
        }
        match self.state {
            State::Listing | State::Moving => {
                if !self.list_ended && self.lists == 0 {
                    self.lists = 1;
                    actions.push(Action::List { count: self.pace.batch_keys.saturating_mul(LIST_BATCHES) });
                }
                // Groups are known when all keys are listed. If each key is a group, it is copied at once.
                if self.state == State::Listing && (self.list_ended || self.rules.by_key()) {
                    self.state = State::Moving;
                }
                match self.state {
                    State::Moving => self.begin_batches(now_us, actions),
                    // Clients may pull before that (Rocksteady).
                    _ => {
                        if !self.pulls.is_empty() && now_us >= self.pulls_since_us + PULL_AFTER_US {
                            let keys = std::mem::take(&mut self.pulls);
                            self.begin(CopyReason::Pulled, keys);
                        }
                        self.go_on_with_batches(now_us, actions);
                    }
                }
                if self.state == State::Moving && self.is_complete() && self.is_settled() {
                    self.state = State::Settling;
                    self.settles += 1;
                    self.awaited = None;
                    actions.push(Action::Announce { double_read: None });
                }
            }
            State::Settling | State::CuttingOver { .. } => self.begin_batches(now_us, actions),
            State::Cleaning if !self.is_empty() => self.begin_batches(now_us, actions),
            State::Cleaning if !self.purging && !self.is_down[Side::Source as usize] => {
                self.purging = true;
                actions.push(Action::Purge { side: Side::Source, wrong: UnexpectedKeys::AllBut(Arc::default()) });
            }
            _ => {}
        }
    }
}

impl Machine for Published {
    fn step(&mut self, event: Event, now_us: u64, actions: &mut Vec<Action>) {
        if self.state == State::Ended {
            if event == Event::Quiesce {
                actions.push(Action::Io(Io::Quiet));
            }
            return;
        }
        match event {
            Event::Met { source, target } => self.met(source, target, actions),
            Event::Recorded(number) => self.recorded(number, actions),
            Event::Drained => self.drained(actions),
            Event::Listed { keys, end } => {
                self.lists = self.lists.saturating_sub(1);
                self.list_ended |= end;
                self.note_listed(keys);
            }
            Event::Wanted { keys } => self.wanted(keys, now_us, actions),
            Event::Written { keys } => self.written(keys),
            Event::Copied { .. } | Event::Stored { .. } | Event::Removed { .. } => {
                self.answered(event, now_us, actions)
            }
            Event::Purged => {
                if self.state == State::Cleaning {
                    self.end_at(Side::Target, actions);
                }
            }
            Event::Lost { side } => {
                if !std::mem::replace(&mut self.is_down[side as usize], true) && self.state != State::Waiting {
                    self.purging &= side != Side::Source;
                    for batch in self
                        .batches
                        .values_mut()
                        .filter(|batch| batch.is_requested && (batch.step == Step::Copy) == (side == Side::Source))
                    {
                        (batch.step, batch.is_requested) = (Step::Copy, false);
                        self.progress.repeated += 1;
                    }
                    actions.push(Action::Reconnect { side });
                }
            }
            Event::Reconnected { side, process } => {
                if self.is_down[side as usize]
                    && self.given_up != Some(side)
                    && !matches!(self.state, State::Ending { .. } | State::HandingOver)
                {
                    let LegOrder { move_id, leg, .. } = self.orders;
                    self.is_down[side as usize] = false;
                    self.record(Record::Met { move_id, leg, side, process }, actions);
                }
            }
            Event::HandedOver => {
                if self.state == State::HandingOver {
                    let why = "the target was abandoned by the user".to_owned();
                    let returned = self.given_up == Some(Side::Target);
                    self.end(if returned { Outcome::Returned { why } } else { Outcome::Moved }, actions);
                }
            }
            Event::Quiesce => self.quiet = QuiesceState::Requested,
            Event::Resume => self.quiet = QuiesceState::No,
            Event::Pace(pace) => self.pace = pace,
            Event::RollBack if self.may_withdraw() => self.withdraw("it was aborted by the user".to_owned(), actions),
            Event::RollBack => {
                let text = "a protocol as published has no rollback: the move continues".to_owned();
                actions.push(Action::Io(Io::Report { text }));
            }
            Event::GiveUp { side } => self.give_up(side, actions),
            // The papers do not cover commands with undeclared keys.
            Event::Rewritten
            | Event::Migrated { .. }
            | Event::Secured { .. }
            | Event::Confirmed { .. }
            | Event::Tick => {}
        }
        if self.state != State::Ended {
            self.advance(now_us, actions);
        }
    }

    fn progress(&self) -> Progress {
        let left = self.keys_listed
            + self.todo.len()
            + self.batches.values().map(|batch| batch.keys.len()).sum::<usize>()
            + self.late.len();
        Progress { left: left as u64, given_up: self.given_up, ..self.progress }
    }
}
