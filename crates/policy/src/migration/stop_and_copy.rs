//! The baseline: the source's own `MIGRATE`, key by key of a leg, while commands for the leg's keys wait until it is over.
//!
//! So `redis-cli --cluster reshard` moves a slot, with the difference that clients wait here where there they are sent back and forth (`ASK`) and
//! commands of several keys fail (`TRYAGAIN`). Drain, purge and journal are those of the default protocol: without them it would be a different
//! comparison. What it cannot have is what `MIGRATE` lacks: when its own connection to the target times out, what it sent may
//! still be executed there later, and nobody can end that connection but the source.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use super::record::{Eras, OpenLeg};
use super::{
    Action, BatchId, Copied, Event, Fingerprint, Fingerprinter, Key, Machine, Orders, Outcome, Pace, Phase, Process, Progress, Record,
    Side, Wrong,
};

/// `--cluster-pipeline` of redis-cli.
const BATCH_KEYS: u32 = 10;
/// A batch that is refused is tried so often before the leg goes back.
const TRIES: u32 = 5;
/// Why a leg ends of which a side is lost for good.
const GIVEN_UP: &str = "a node was given up by the user";
/// Between two tries, microseconds.
const REST_US: u64 = 100_000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Link {
    Unmet,
    Meeting { record: u64 },
    Up,
    Down,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Waiting,
    Meeting { record: u64 },
    Readying,
    Draining { since_us: u64 },
    Starting { record: u64 },
    Moving,
    RecordingRollback { record: u64 },
    Ending { record: u64 },
    HandingOver,
    Ended,
}

/// What is asked about the one batch under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    Migrate,
    /// The target has a key already: look which keys the node still has.
    Look,
    /// Those it still has are removed where they were to go.
    Clear,
    Record {
        record: u64,
    },
}

#[derive(Debug)]
struct Batch {
    keys: Vec<Key>,
    still_there: Vec<Key>,
    step: Step,
    asked: bool,
    not_before_us: u64,
    tries: u32,
}

/// The machine of a leg that stops and copies.
pub struct StopAndCopy {
    orders: Orders,
    fingerprints: Fingerprinter,
    state: State,
    begun: bool,
    back: Option<String>,
    rolls_back: bool,
    /// The side that is lost for good.
    given_up: Option<Side>,
    links: [Link; 2],
    processes: [Option<Process>; 2],
    eras: Eras,
    dirty: [bool; 2],
    purging: Option<Side>,
    records: u64,
    away: BTreeMap<Fingerprint, Eras>,
    listed: VecDeque<Key>,
    lists: u32,
    lists_old: u32,
    list_ended: bool,
    batch: Option<Batch>,
    next_batch: u32,
    pace: Pace,
    quiet_asked: bool,
    quiet: bool,
    progress: Progress,
}

impl StopAndCopy {
    /// A leg as ordered, or one that was under way when the router before this one ended.
    #[must_use]
    pub fn new(orders: Orders, fingerprints: Fingerprinter, resume: Option<OpenLeg>) -> Self {
        let mut leg = Self {
            orders,
            fingerprints,
            state: State::Waiting,
            begun: false,
            back: None,
            rolls_back: false,
            given_up: None,
            links: [Link::Unmet; 2],
            processes: [None, None],
            eras: Eras { source: 0, target: 0 },
            dirty: [false; 2],
            purging: None,
            records: 0,
            away: BTreeMap::new(),
            listed: VecDeque::new(),
            lists: 0,
            lists_old: 0,
            list_ended: false,
            batch: None,
            next_batch: 0,
            pace: Pace { batch_keys: BATCH_KEYS, batches: 1, interval_us: 0 },
            quiet_asked: false,
            quiet: false,
            progress: Progress::NONE,
        };
        if let Some(open) = resume.filter(|open| open.moving) {
            leg.begun = true;
            leg.rolls_back = open.rolled_back.is_some();
            leg.back = open.rolled_back;
            leg.given_up = open.given_up;
            leg.processes = [Some(open.source), Some(open.target)];
            leg.eras = open.eras;
            leg.away = open.away;
        }
        leg
    }

    const fn from(&self) -> Side {
        if self.rolls_back { Side::Target } else { Side::Source }
    }

    fn link(&self, side: Side) -> Link {
        self.links[side as usize]
    }

    fn usable(&self) -> bool {
        self.links == [Link::Up; 2] && self.dirty == [false; 2]
    }

    fn record(&mut self, record: Record, actions: &mut Vec<Action>) -> u64 {
        self.records += 1;
        actions.push(Action::Record { number: self.records, record });
        self.records
    }

    fn end(&mut self, outcome: Outcome, actions: &mut Vec<Action>) {
        self.state = State::Ended;
        self.progress.phase = Phase::Ended;
        actions.push(Action::End(outcome));
    }

    fn met(&mut self, source: Process, target: Process, actions: &mut Vec<Action>) {
        if self.begun {
            for (side, process) in [(Side::Source, source), (Side::Target, target)] {
                match self.given_up == Some(side) {
                    true => self.links[side as usize] = Link::Down,
                    false => self.restored(side, process, actions),
                }
            }
            self.dirty[Side::Target as usize] |= self.eras.target > 0;
            self.dirty[Side::Source as usize] |= self.away.values().any(|eras| eras.source != self.eras.source);
        } else {
            let Orders { move_id, leg, ref slots, .. } = self.orders;
            let record = Record::LegBegun { move_id, leg, slots: slots.clone(), source: source.clone(), target: target.clone() };
            let record = self.record(record, actions);
            self.links = [Link::Meeting { record }; 2];
            self.processes = [Some(source), Some(target)];
            self.dirty[Side::Target as usize] = true;
        }
        self.state = State::Meeting { record: self.records };
    }

    fn restored(&mut self, side: Side, process: Process, actions: &mut Vec<Action>) {
        if matches!(self.state, State::Ending { .. } | State::HandingOver) {
            // The leg's last record is written.
            return;
        }
        let Orders { move_id, leg, .. } = self.orders;
        let record = self.record(Record::Met { move_id, leg, side, process: process.clone() }, actions);
        self.links[side as usize] = Link::Meeting { record };
        let before = self.processes[side as usize].replace(process.clone());
        if before.is_some_and(|before| before.run_id != process.run_id) {
            match side {
                Side::Source => self.eras.source += 1,
                Side::Target => self.eras.target += 1,
            }
            self.dirty[side as usize] = side == Side::Target || !self.away.is_empty();
            if side == self.from() && self.state != State::Waiting {
                self.relist(actions);
            }
        }
    }

    fn relist(&mut self, actions: &mut Vec<Action>) {
        self.listed.clear();
        self.list_ended = false;
        self.lists_old = self.lists;
        actions.push(Action::Relist { at: self.from() });
    }

    fn recorded(&mut self, number: u64, actions: &mut Vec<Action>) {
        for link in &mut self.links {
            if matches!(link, Link::Meeting { record } if *record <= number) {
                *link = Link::Up;
            }
        }
        if let Some(batch) = self.batch.take_if(|batch| matches!(batch.step, Step::Record { record } if record <= number)) {
            for key in &batch.keys {
                let fingerprint = self.fingerprints.of(key);
                if self.rolls_back {
                    self.away.remove(&fingerprint);
                } else {
                    self.away.insert(fingerprint, self.eras);
                }
            }
            self.progress.keys_moved += batch.keys.len() as u64;
        }
        match self.state {
            State::Meeting { record } if record <= number => self.state = State::Readying,
            State::Starting { record } if record <= number => {
                self.begun = true;
                self.state = State::Moving;
                self.progress.phase = Phase::Moving;
            }
            State::RecordingRollback { record } if record <= number => {
                self.rolls_back = true;
                self.state = State::Moving;
                self.progress.phase = Phase::Returning;
                self.batch = None;
                self.relist(actions);
            }
            State::Ending { record } if record <= number => {
                self.state = State::HandingOver;
                actions.push(Action::HandOver { to: self.from().other() });
            }
            _ => {}
        }
    }

    fn advance(&mut self, now_us: u64, actions: &mut Vec<Action>) {
        let Orders { move_id, leg, .. } = self.orders;
        if matches!(self.state, State::Readying | State::Moving) {
            self.purge(actions);
        }
        match self.state {
            State::Readying | State::Moving if self.given_up.is_some() => self.end_without(actions),
            State::Readying if self.usable() => {
                self.state = State::Draining { since_us: now_us };
                actions.push(Action::Announce);
            }
            State::Draining { since_us } if !self.begun && now_us.saturating_sub(since_us) > self.orders.drain_patience_us => {
                actions.push(Action::Withdraw);
                let why = "commands sent to the source earlier were not answered in time".to_owned();
                self.end(Outcome::NotBegun { why }, actions);
            }
            State::Moving if self.usable() => {
                if self.batch.is_none() && self.back.is_some() && !self.rolls_back {
                    let why = self.back.clone().unwrap_or_default();
                    let record = self.record(Record::RolledBack { move_id, leg, why }, actions);
                    self.state = State::RecordingRollback { record };
                } else if self.batch.is_none() && !self.quiet_asked {
                    self.start(actions);
                }
                self.drive(now_us, actions);
            }
            _ => {}
        }
        if self.quiet_asked && !self.quiet && self.batch.is_none() {
            self.quiet = true;
            actions.push(Action::Quiet);
        }
    }

    /// The user says that a side is lost for good.
    fn give_up(&mut self, side: Side, actions: &mut Vec<Action>) {
        let is_ending = matches!(self.state, State::Ending { .. } | State::HandingOver);
        if self.given_up.is_some() || is_ending || self.link(side) != Link::Down {
            return;
        }
        if self.begun || matches!(self.state, State::Starting { .. }) {
            let Orders { move_id, leg, .. } = self.orders;
            self.record(Record::GivenUp { move_id, leg, side }, actions);
            self.given_up = Some(side);
        } else {
            self.withdraw(GIVEN_UP, actions);
        }
    }

    /// Ends the leg at the side that is left, as soon as nothing is under way there. Nobody uses its keys at either side before.
    fn end_without(&mut self, actions: &mut Vec<Action>) {
        let Some(left) = self.given_up.map(Side::other) else { return };
        let is_usable = self.link(left) == Link::Up && !self.dirty[left as usize];
        if !is_usable || self.quiet_asked || self.batch.as_ref().is_some_and(|batch| batch.asked) {
            return;
        }
        self.rolls_back = left == Side::Source;
        self.back = self.rolls_back.then(|| GIVEN_UP.to_owned());
        let of_batch = self.batch.take().into_iter().flat_map(|batch| batch.keys).map(|key| self.fingerprints.of(&key));
        let mut keys: Vec<Fingerprint> = self.away.keys().copied().chain(of_batch).collect();
        keys.sort_unstable();
        keys.dedup();
        actions.push(Action::Lost { keys: if self.rolls_back { keys } else { Vec::new() } });
        let Orders { move_id, leg, .. } = self.orders;
        let record = self.record(Record::LegEnded { move_id, leg, owner: left }, actions);
        self.state = State::Ending { record };
        self.progress.phase = Phase::Releasing;
    }

    /// Ends a leg that has changed nothing.
    fn withdraw(&mut self, why: &str, actions: &mut Vec<Action>) {
        if matches!(self.state, State::Draining { .. }) {
            actions.push(Action::Withdraw);
        }
        self.end(Outcome::NotBegun { why: why.to_owned() }, actions);
    }

    fn purge(&mut self, actions: &mut Vec<Action>) {
        let side = [Side::Target, Side::Source]
            .into_iter()
            .find(|side| self.dirty[*side as usize] && self.link(*side) == Link::Up)
            .filter(|_| self.purging.is_none());
        if let Some(side) = side {
            self.purging = Some(side);
            // Of what is on record, what the source shows again is past: it had left for good.
            let stale = |eras: &Eras| side == Side::Target || eras.source != self.eras.source;
            let away: BTreeSet<Fingerprint> = self.away.iter().filter(|(_, eras)| stale(eras)).map(|(key, _)| *key).collect();
            let wrong = if side == Side::Target { Wrong::AllBut(Arc::new(away)) } else { Wrong::These(Arc::new(away)) };
            actions.push(Action::Purge { side, wrong });
        }
    }

    fn start(&mut self, actions: &mut Vec<Action>) {
        let Orders { move_id, leg, .. } = self.orders;
        let count = self.listed.len().min(self.pace.batch_keys as usize);
        if count > 0 && self.pace.batches > 0 {
            let mut keys: Vec<Key> = self.listed.drain(..count).collect();
            keys.sort();
            keys.dedup();
            self.next_batch = self.next_batch.wrapping_add(1);
            self.batch = Some(Batch { keys, still_there: Vec::new(), step: Step::Migrate, asked: false, not_before_us: 0, tries: 0 });
        } else if !self.list_ended {
            if self.lists == self.lists_old && self.pace.batches > 0 {
                self.lists += 1;
                actions.push(Action::List { count: self.pace.batch_keys.saturating_mul(10) });
            }
        } else if self.listed.is_empty() {
            let owner = self.from().other();
            let record = self.record(Record::LegEnded { move_id, leg, owner }, actions);
            self.state = State::Ending { record };
            self.progress.phase = Phase::Releasing;
        }
    }

    fn drive(&mut self, now_us: u64, actions: &mut Vec<Action>) {
        let (from, id) = (self.from(), BatchId(self.next_batch));
        let Some(batch) = self.batch.as_mut().filter(|batch| !batch.asked && batch.not_before_us <= now_us) else { return };
        batch.asked = true;
        match batch.step {
            Step::Migrate => actions.push(Action::Migrate { batch: id, from, keys: batch.keys.clone() }),
            Step::Look => actions.push(Action::Copy { batch: id, from, keys: batch.keys.clone() }),
            Step::Clear => actions.push(Action::Remove { batch: id, from: from.other(), keys: batch.still_there.clone() }),
            Step::Record { .. } => {
                let Orders { move_id, leg, .. } = self.orders;
                let keys = batch.keys.iter().map(|key| self.fingerprints.of(key)).collect();
                let record = if self.rolls_back { Record::Returned { move_id, leg, keys } } else { Record::Moved { move_id, leg, keys } };
                let record = self.record(record, actions);
                if let Some(batch) = &mut self.batch {
                    batch.step = Step::Record { record };
                }
            }
        }
    }

    fn under_way(&mut self, id: BatchId, step: Step) -> Option<&mut Batch> {
        let current = BatchId(self.next_batch);
        self.batch.as_mut().filter(|batch| id == current && batch.asked && batch.step == step)
    }

    fn migrated(&mut self, id: BatchId, refused: Option<String>, now_us: u64) {
        let rolls_back = self.rolls_back;
        let Some(batch) = self.under_way(id, Step::Migrate) else { return };
        batch.asked = false;
        match refused {
            None => batch.step = Step::Record { record: u64::MAX },
            Some(why) if why.starts_with("BUSYKEY") => batch.step = Step::Look,
            Some(why) => {
                batch.tries += 1;
                batch.not_before_us = now_us + REST_US;
                if batch.tries >= TRIES && !rolls_back {
                    self.batch = None;
                    self.back.get_or_insert(format!("the source could not migrate keys: {why}"));
                }
            }
        }
    }
}

impl Machine for StopAndCopy {
    fn step(&mut self, event: Event, now_us: u64, actions: &mut Vec<Action>) {
        if self.state == State::Ended {
            return;
        }
        match event {
            Event::Met { source, target } => self.met(source, target, actions),
            Event::Recorded(number) => self.recorded(number, actions),
            Event::Drained => {
                if let State::Draining { .. } = self.state {
                    let Orders { move_id, leg, .. } = self.orders;
                    if self.begun {
                        self.state = State::Moving;
                        self.progress.phase = if self.rolls_back { Phase::Returning } else { Phase::Moving };
                        if self.rolls_back {
                            self.relist(actions);
                        }
                    } else {
                        let record = self.record(Record::LegMoving { move_id, leg }, actions);
                        self.state = State::Starting { record };
                    }
                }
            }
            Event::Purged => {
                if let Some(side) = self.purging.take() {
                    self.dirty[side as usize] = false;
                }
            }
            Event::Listed { keys, end } => {
                self.lists = self.lists.saturating_sub(1);
                if self.lists_old > 0 {
                    self.lists_old -= 1;
                } else {
                    self.listed.extend(keys);
                    self.list_ended |= end;
                }
            }
            // They wait until the leg is over.
            Event::Wanted { .. } => {}
            Event::Migrated { batch, refused } => self.migrated(batch, refused, now_us),
            Event::Copied { batch, outcomes } => {
                if let Some(batch) = self.under_way(batch, Step::Look) {
                    let there = batch.keys.iter().zip(&outcomes).filter(|(_, outcome)| !matches!(outcome, Copied::Absent));
                    batch.still_there = there.map(|(key, _)| key.clone()).collect();
                    batch.step = Step::Clear;
                    batch.asked = false;
                }
            }
            Event::Removed { batch } => {
                if let Some(batch) = self.under_way(batch, Step::Clear) {
                    batch.step = Step::Migrate;
                    batch.asked = false;
                }
            }
            Event::Stored { .. } | Event::Secured { .. } => debug_assert!(false, "nothing was stored"),
            Event::Lost { side } => {
                if matches!(self.link(side), Link::Up | Link::Meeting { .. }) {
                    self.links[side as usize] = Link::Down;
                    self.purging.take_if(|purging| *purging == side);
                    let from = self.from();
                    // What the node did with the other one is unknown. To migrate again is harmless: what is gone stays gone.
                    let unknown = |batch: &&mut Batch| batch.asked && !matches!(batch.step, Step::Record { .. });
                    let asked_at = |step: Step| if step == Step::Clear { from.other() } else { from };
                    let redone = |batch: &&mut Batch| asked_at(batch.step) == side;
                    if let Some(batch) = self.batch.as_mut().filter(unknown).filter(redone) {
                        batch.step = Step::Migrate;
                        batch.asked = false;
                        self.progress.repeated += 1;
                    }
                    actions.push(Action::Restore { side });
                }
            }
            Event::Restored { side, process } => {
                if self.link(side) == Link::Down && self.given_up != Some(side) {
                    self.restored(side, process, actions);
                }
            }
            Event::HandedOver => {
                if self.state == State::HandingOver {
                    let outcome = match self.back.take() {
                        Some(why) if self.rolls_back => Outcome::Returned { why },
                        _ => Outcome::Moved,
                    };
                    self.end(outcome, actions);
                }
            }
            Event::Quiesce => (self.quiet_asked, self.quiet) = (true, false),
            Event::Resume => (self.quiet_asked, self.quiet) = (false, false),
            Event::Pace(pace) => self.pace = Pace { batch_keys: pace.batch_keys.max(1), ..pace },
            Event::RollBack => match self.state {
                State::Ending { .. } | State::HandingOver => {}
                _ if self.begun || matches!(self.state, State::Starting { .. }) => {
                    self.back.get_or_insert("it was told to end".to_owned());
                }
                _ => self.withdraw("it was told to end", actions),
            },
            Event::GiveUp { side } => self.give_up(side, actions),
            Event::Tick => {}
        }
        if self.state != State::Ended {
            self.advance(now_us, actions);
        }
    }

    fn progress(&self) -> Progress {
        let left = if self.rolls_back || self.back.is_some() { self.away.len() } else { self.listed.len() };
        Progress { left: left as u64, given_up: self.given_up, ..self.progress }
    }
}
