//! Copies first, one change of owner at the end: source-driven migration, and stop-and-copy of a whole store.
//!
//! - **Source-driven** (Slacker, Remus; NetMigrate §2.2). All keys are copied while the source serves. What clients
//!   write meanwhile is copied again, in rounds, until little is left. For that little everybody waits, and then the
//!   target serves.
//! - **Stop-and-copy of a whole store**. The same without rounds: everybody waits, all keys are copied, and then the
//!   target serves.
//!
//! Neither is a [`super::leg::Work`]: there keys change their place one by one and are brought back one by one. Here
//! one record decides for all.
//!
//! # The rules
//! 1. The source has every key until the *cut* is on record ([`Record::CutOver`]). Whatever goes wrong before leaves
//!    the source as it is. What the target has by then is worth nothing, and is purged before the slots are copied
//!    there again.
//! 2. A key that may have been written is copied again. It is read when nothing that was sent before is in flight
//!    ([`Action::Observe`]), so the read sees the write.
//! 3. The cut comes when nobody writes (the drain), and every key that was written is copied.
//! 4. Both nodes are the same processes from the first copy to the cut. If one is not, the leg begins again, or goes
//!    back.
//! 5. After the cut the target serves. What the source shows is past: it is removed before the slots are handed over,
//!    or, where the source is lost, when it is back.
//! 6. The target evicts nothing from the first copy to the cut: what it evicts would be lost, and nobody could tell
//!    which keys those were.
//! 7. Which copies are past is on record before the last ones are brought up to date: a source that is lost for good,
//!    and a router that was restarted, must not have them served.
//!
//! The papers do not say what happens to keys that are deleted, expire or are written by scripts. Here a key that the
//! source has not is removed at the target, and where any key may have been written ([`Event::Rewritten`]) all are
//! copied once more while everybody waits.

mod batches;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use super::planted::{Bug, InjectedBug};
use super::record::{OpenLeg, StaleCopies};
use super::{
    Action, BatchId, Durability, Event, Fingerprinter, Io, Key, Machine, Orders, Outcome, Pace, Phase, Process,
    Progress, Record, Side, UnexpectedKeys,
};

/// So few keys are left for the last round, at most (NetMigrate's public code: the source pauses when 21 entries of its
/// log are left).
const LAST_KEYS: usize = 21;
/// So many rounds at most; and a round that leaves nine tenths of what the one before left is the last but one.
const ROUNDS_MAX: u32 = 30;
/// Keys that are asked for at once, in batches.
const LIST_BATCHES: u32 = 10;
/// Keys of one removal at the target where the source is lost.
const PAST_AT_ONCE: usize = 1000;
/// A batch that a node refuses is tried so often.
const TRIES: u32 = 5;
/// Between two tries, microseconds.
const REST_US: u64 = 100_000;
/// Before the drain a side may be lost for so long, microseconds; and a target after it.
const PREPARE_PATIENCE_US: u64 = 10_000_000;
const TARGET_PATIENCE_US: u64 = 3_000_000;
/// After the cut the source may be lost for so long, microseconds: all keys are at the target.
const PAST_PATIENCE_US: u64 = 3_000_000;
/// Clients wait for the drain so long at most, microseconds.
const DRAIN_PATIENCE_MAX_US: u64 = 2_000_000;
/// Those who wait for a source that is lost for so long are told so, and not more often than this, microseconds.
const LOST_PATIENCE_US: u64 = 2_000_000;
const REFUSE_EVERY_US: u64 = 100_000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// For [`Event::Met`].
    Waiting,
    /// The processes met are being recorded.
    Meeting {
        record: u64,
    },
    /// The target is being purged.
    Readying,
    /// The target is asked how many keys it has evicted so far.
    Counting,
    /// Keys are copied while the source serves; or what was sent to it before is awaited.
    Ahead {
        settles: bool,
    },
    /// It gives up, and the target is purged of what was copied ahead.
    Cleaning,
    /// Everybody waits from here on. The workers drain.
    Draining {
        since_us: u64,
    },
    /// That the drain is complete is being recorded.
    Starting {
        record: u64,
    },
    /// The last keys are copied.
    Last,
    /// The cut is being recorded.
    CuttingOver {
        record: u64,
    },
    /// The target serves; the source is being purged.
    Over,
    /// The decision to go back is being recorded.
    RecordingReturn {
        record: u64,
    },
    /// The workers are told that the source serves.
    Returning {
        drained: bool,
    },
    /// The owner is being recorded.
    Ending {
        record: u64,
    },
    /// The topology is being stored.
    HandingOver,
    Ended,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Link {
    /// It may be used: it is on record.
    Up,
    /// There is a connection, and its record is not durable.
    Meeting {
        record: u64,
    },
    Down {
        since_us: u64,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    Copy,
    /// Those that were there are stored, then those that were not there are removed.
    Store,
    Remove,
}

#[derive(Clone, Debug)]
struct Batch {
    keys: Vec<Key>,
    /// Those that the source had.
    there: Vec<Key>,
    step: Step,
    is_requested: bool,
    not_before_us: u64,
    tries: u32,
}

/// How far making the copies safe is, and asking both nodes whether they are the processes that have been copied
/// between. The source is asked, too: had it come back with older data, clients would have seen that, and then the
/// copies of what it had before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Proof {
    No,
    Securing(BatchId),
    Secured,
    /// These have yet to answer.
    Confirming([bool; 2]),
    Yes,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum QuiesceState {
    No,
    Requested,
    Reached,
}

/// The machine of a leg that is copied as a whole.
#[derive(Clone)]
pub struct Precopy {
    orders: Orders,
    fingerprints: Fingerprinter,
    planted: InjectedBug,
    /// While the source serves; otherwise everybody waits.
    ahead: bool,
    state: State,
    /// The drain was complete once: from then on everybody waits until the leg has an owner.
    begun: bool,
    cut: bool,
    resumed: bool,
    /// Why it goes back, if it does.
    back: Option<String>,
    given_up: Option<Side>,
    links: [Link; 2],
    processes: [Option<Process>; 2],
    /// The side that is being purged.
    purging: Option<Side>,
    /// What the target has is not known; and it has something of this leg.
    target_is_dirty: bool,
    has_stored: bool,
    records: u64,
    batches: BTreeMap<BatchId, Batch>,
    last_batch: u32,
    last_began_us: u64,
    todo: VecDeque<Key>,
    /// Listings asked for and not answered, and of those the ones that belong to an earlier listing.
    lists: u32,
    lists_old: u32,
    list_ended: bool,
    /// Keys that may have been written since what was sent before was awaited, and those that were written before that.
    written: BTreeSet<Key>,
    settling: BTreeSet<Key>,
    /// Any key may have been written.
    rewritten: bool,
    rounds: u32,
    left_before: usize,
    /// Of a leg that is taken up: copies at the target that were past when the drain was complete.
    behind: StaleCopies,
    /// All copies are past, says the record: until they are removed.
    behind_is_any: bool,
    proof: Proof,
    /// So many keys the target's process had evicted before the first copy; `None`: not known.
    evicted: Option<u64>,
    /// Questions to the target that are not answered.
    confirms: u32,
    quiet: QuiesceState,
    pace: Pace,
    last_refusal_us: u64,
    progress: Progress,
}

const fn name(side: Side) -> &'static str {
    match side {
        Side::Source => "source",
        Side::Target => "target",
    }
}

impl Precopy {
    /// A leg as ordered, or one that was under way when the router before this one ended. `ahead`: in rounds while the
    /// source serves.
    #[must_use]
    pub fn new(orders: Orders, ahead: bool, fingerprints: Fingerprinter, resume: Option<OpenLeg>) -> Self {
        let open = resume.filter(|open| open.moving);
        let mut leg = Self {
            orders,
            fingerprints,
            planted: InjectedBug::default(),
            ahead,
            state: State::Waiting,
            begun: open.is_some(),
            cut: false,
            resumed: open.is_some(),
            back: None,
            given_up: None,
            links: [Link::Down { since_us: 0 }; 2],
            processes: [None, None],
            purging: None,
            target_is_dirty: true,
            has_stored: false,
            records: 0,
            batches: BTreeMap::new(),
            last_batch: 0,
            last_began_us: 0,
            todo: VecDeque::new(),
            lists: 0,
            lists_old: 0,
            list_ended: false,
            written: BTreeSet::new(),
            settling: BTreeSet::new(),
            rewritten: false,
            rounds: 0,
            left_before: usize::MAX,
            behind: StaleCopies::NONE,
            behind_is_any: false,
            proof: Proof::No,
            evicted: None,
            confirms: 0,
            quiet: QuiesceState::No,
            pace: Pace { batch_keys: 100, batches: 1, interval_us: 0 },
            last_refusal_us: 0,
            progress: Progress::NONE,
        };
        if let Some(open) = open {
            leg.cut = open.cut_over;
            leg.given_up = open.given_up;
            leg.behind = open.behind;
            leg.processes = [Some(open.source), Some(open.target)];
            // What was written since its copy nobody remembers.
            let goes_back = !leg.cut && leg.given_up != Some(Side::Source);
            leg.back = goes_back.then(|| open.rolled_back.unwrap_or_else(|| "the router was restarted".to_owned()));
        }
        leg
    }

    pub(super) const fn planted(mut self, planted: InjectedBug) -> Self {
        self.planted = planted;
        self
    }

    fn is_up(&self, side: Side) -> bool {
        self.links[side as usize] == Link::Up
    }

    fn record(&mut self, record: Record, actions: &mut Vec<Action>) -> u64 {
        self.records += 1;
        actions.push(Action::Record { number: self.records, record });
        self.records
    }

    fn end(&mut self, outcome: Outcome, actions: &mut Vec<Action>) {
        self.state = State::Ended;
        self.progress.phase = Phase::Ended;
        self.batches.clear();
        actions.push(Action::Io(Io::End(outcome)));
        if self.quiet == QuiesceState::Requested {
            actions.push(Action::Io(Io::Quiet));
        }
    }

    /// Who owns the slots afterwards.
    const fn owner(&self) -> Side {
        if self.back.is_some() { Side::Source } else { Side::Target }
    }

    fn record_end(&mut self, actions: &mut Vec<Action>) {
        let Orders { move_id, leg, .. } = self.orders;
        if let Some(side) = self.given_up {
            debug_assert!(side != self.owner());
            actions.push(Action::Lost { keys: Vec::new() });
        }
        let record = self.record(Record::LegEnded { move_id, leg, owner: self.owner() }, actions);
        self.state = State::Ending { record };
        self.progress.phase = Phase::Releasing;
    }

    // ---- what happens ----

    fn met(&mut self, source: Process, target: Process, actions: &mut Vec<Action>) {
        let Orders { move_id, leg, ref slots, .. } = self.orders;
        if self.resumed {
            for (side, process) in [(Side::Source, source), (Side::Target, target)] {
                if self.given_up != Some(side) {
                    self.restored(side, process, actions);
                }
            }
            self.state = State::Meeting { record: self.records };
            return;
        }
        let record =
            Record::LegBegun { move_id, leg, slots: slots.clone(), source: source.clone(), target: target.clone() };
        let record = self.record(record, actions);
        self.links = [Link::Meeting { record }; 2];
        self.processes = [Some(source), Some(target)];
        self.state = State::Meeting { record };
    }

    fn restored(&mut self, side: Side, process: Process, actions: &mut Vec<Action>) {
        if matches!(self.state, State::Ending { .. } | State::HandingOver | State::Ended) {
            return;
        }
        let Orders { move_id, leg, .. } = self.orders;
        let record = self.record(Record::Met { move_id, leg, side, process: process.clone() }, actions);
        self.links[side as usize] = Link::Meeting { record };
        let before = self.processes[side as usize].replace(process);
        let changed = before.is_some_and(|before| {
            Some(before.run_id) != self.processes[side as usize].as_ref().map(|now| now.run_id.clone())
        });
        if changed
            && !self.cut
            && !matches!(self.state, State::CuttingOver { .. })
            && !self.planted.is(Bug::CopiedFromAnother)
        {
            self.turn_back(format!("the {} is another process since keys were copied", name(side)), actions);
        }
    }

    fn lost(&mut self, side: Side, now_us: u64, actions: &mut Vec<Action>) {
        if matches!(self.state, State::Ended | State::Waiting) || matches!(self.links[side as usize], Link::Down { .. })
        {
            return;
        }
        self.links[side as usize] = Link::Down { since_us: now_us };
        self.purging.take_if(|purged| *purged == side);
        self.proof = Proof::No;
        if side == Side::Target {
            self.confirms = 0;
            self.state = if self.state == State::Counting { State::Readying } else { self.state };
        }
        for batch in self.batches.values_mut() {
            let asked_at = if batch.step == Step::Copy { Side::Source } else { Side::Target };
            if batch.is_requested && asked_at == side {
                // What the target did with it does not matter: it is read and written once more.
                (batch.step, batch.is_requested) = (Step::Copy, false);
                self.progress.repeated += 1;
            }
        }
        actions.push(Action::Restore { side });
    }

    fn recorded(&mut self, number: u64, actions: &mut Vec<Action>) {
        for link in &mut self.links {
            if matches!(link, Link::Meeting { record } if *record <= number) {
                *link = Link::Up;
            }
        }
        match self.state {
            State::Meeting { record } if record <= number => {
                self.state = State::Readying;
                if self.resumed {
                    self.take_up(actions);
                }
            }
            State::Starting { record } if record <= number => {
                self.begun = true;
                self.state = State::Last;
            }
            State::CuttingOver { record } if record <= number => {
                self.cut = true;
                self.state = State::Over;
                actions.push(Action::CommitAll);
            }
            State::RecordingReturn { record } if record <= number => self.announce_return(actions),
            State::Ending { record } if record <= number => {
                self.state = State::HandingOver;
                actions.push(Action::HandOver { to: self.owner() });
            }
            _ => {}
        }
    }

    /// A leg that a router before this one has left goes on where its records end.
    fn take_up(&mut self, actions: &mut Vec<Action>) {
        match &self.back {
            Some(_) => self.announce_return(actions),
            // Workers know nothing of the leg yet.
            None => {
                self.state = State::Draining { since_us: 0 };
                actions.push(Action::Announce { double_read: None });
            }
        }
    }

    fn announce_return(&mut self, actions: &mut Vec<Action>) {
        self.state = State::Returning { drained: false };
        self.progress.phase = Phase::Returning;
        self.target_is_dirty = true;
        let why = self.back.clone().unwrap_or_default();
        actions.push(Action::RollBack { why, away: Arc::default() });
    }

    fn drained(&mut self, actions: &mut Vec<Action>) {
        match self.state {
            State::Ahead { settles: true } => {
                self.state = State::Ahead { settles: false };
                let settled = std::mem::take(&mut self.settling);
                self.todo.extend(settled);
            }
            State::Draining { .. } if self.cut => {
                self.state = State::Over;
                actions.push(Action::CommitAll);
            }
            State::Draining { .. } if self.begun => self.state = State::Last,
            State::Draining { .. } => {
                let Orders { move_id, leg, .. } = self.orders;
                let mut record = self.record(Record::LegMoving { move_id, leg }, actions);
                if !self.planted.is(Bug::LastWritesForgotten) {
                    let settled = std::mem::take(&mut self.settling);
                    self.todo.extend(settled.into_iter().chain(std::mem::take(&mut self.written)));
                }
                let keys = match self.rewritten && self.has_stored {
                    true => StaleCopies::Any,
                    false if !self.has_stored => StaleCopies::NONE,
                    false => StaleCopies::These(self.todo.iter().map(|key| self.fingerprints.of(key)).collect()),
                };
                if keys != StaleCopies::NONE {
                    self.behind_is_any = keys == StaleCopies::Any;
                    record = self.record(Record::Behind { move_id, leg, keys }, actions);
                }
                self.state = State::Starting { record };
            }
            State::Returning { .. } => self.state = State::Returning { drained: true },
            _ => {}
        }
    }

    /// All is copied once more.
    fn begin_anew(&mut self, actions: &mut Vec<Action>) {
        (self.rewritten, self.target_is_dirty, self.proof) = (false, true, Proof::No);
        (self.progress.keys_moved, self.rounds) = (0, 0);
        self.todo.clear();
        self.list_ended = false;
        self.lists_old = self.lists;
        actions.push(Action::Relist { at: Side::Source });
    }

    /// It does not go on: nothing was changed yet, or the source serves again.
    fn turn_back(&mut self, why: String, actions: &mut Vec<Action>) {
        match self.state {
            _ if self.cut || self.given_up.is_some() => {}
            State::Waiting | State::Meeting { .. } | State::Readying | State::Counting | State::Ahead { .. }
                if !self.begun =>
            {
                self.give_up(why, actions)
            }
            State::Draining { .. } if !self.begun => {
                actions.push(Action::Withdraw);
                self.give_up(why, actions);
            }
            State::Starting { .. }
            | State::Last
            | State::Draining { .. }
            | State::Meeting { .. }
            | State::Readying
            | State::Counting => {
                self.back.get_or_insert(why);
            }
            _ => {}
        }
    }

    fn give_up(&mut self, why: String, actions: &mut Vec<Action>) {
        // What is under way is answered before the purge: it goes behind that on the same connection.
        self.batches.clear();
        self.target_is_dirty |= self.has_stored;
        (self.back, self.state) = (Some(why), State::Cleaning);
        self.clean(actions);
    }

    fn clean(&mut self, actions: &mut Vec<Action>) {
        if self.has_stored && self.target_is_dirty && !matches!(self.links[Side::Target as usize], Link::Down { .. }) {
            return self.purge(Side::Target, actions);
        }
        let why = self.back.take().unwrap_or_default();
        self.end(Outcome::NotBegun { why }, actions);
    }

    fn user_gives_up(&mut self, side: Side, actions: &mut Vec<Action>) {
        if self.given_up.is_some() || matches!(self.state, State::Ending { .. } | State::HandingOver) {
            return;
        }
        let says = match (self.links[side as usize], side) {
            (Link::Down { .. }, Side::Target) if self.cut => {
                "all keys have moved to the target already, and stay its own".to_owned()
            }
            (Link::Down { .. }, _) => String::new(),
            _ => format!("the {} answers, so it is not given up", name(side)),
        };
        if !says.is_empty() {
            actions.push(Action::Io(Io::Report { text: says }));
            return;
        }
        let why = format!("the {} was given up by the user", name(side));
        if !self.begun && !matches!(self.state, State::Starting { .. }) {
            return self.turn_back(why, actions);
        }
        let Orders { move_id, leg, .. } = self.orders;
        self.record(Record::GivenUp { move_id, leg, side }, actions);
        self.given_up = Some(side);
        match side {
            Side::Target => drop(self.back.get_or_insert(why)),
            Side::Source => {
                self.back = None;
                if matches!(self.state, State::RecordingReturn { .. } | State::Returning { .. }) {
                    // Workers were told that the source serves.
                    self.state = State::Draining { since_us: 0 };
                    actions.push(Action::Announce { double_read: None });
                }
            }
        }
    }

    // ---- what is possible now ----

    fn purge(&mut self, side: Side, actions: &mut Vec<Action>) {
        self.purge_of(side, UnexpectedKeys::AllBut(Arc::default()), actions);
    }

    fn purge_of(&mut self, side: Side, wrong: UnexpectedKeys, actions: &mut Vec<Action>) {
        if self.purging.is_none() && self.is_up(side) && self.quiet == QuiesceState::No {
            self.purging = Some(side);
            actions.push(Action::Purge { side, wrong });
        }
    }

    fn advance(&mut self, now_us: u64, actions: &mut Vec<Action>) {
        match self.state {
            State::Readying => {
                if self.target_is_dirty {
                    self.purge(Side::Target, actions);
                } else if self.is_up(Side::Source) && self.is_up(Side::Target) {
                    self.state = State::Counting;
                    self.confirm_target(actions);
                }
            }
            State::Ahead { settles: true } => {}
            State::Ahead { settles: false } => {
                self.go_on_with_batches(now_us, actions);
                self.begin_batches(now_us, actions);
                if self.all_is_copied() && self.quiet == QuiesceState::No {
                    self.next_round(now_us, actions);
                }
            }
            State::Draining { since_us }
                if !self.begun && now_us.saturating_sub(since_us) > self.orders.drain_patience_us =>
            {
                self.drains_too_slowly(actions);
            }
            State::Cleaning => self.clean(actions),
            State::Last => self.go_on_with_the_last(now_us, actions),
            State::Over => {
                let is_lost = matches!(self.links[Side::Source as usize], Link::Down { since_us } if now_us.saturating_sub(since_us) >= PAST_PATIENCE_US);
                if is_lost || self.given_up == Some(Side::Source) || self.planted.is(Bug::PastNotPurged) {
                    self.record_end(actions);
                } else {
                    self.purge(Side::Source, actions);
                }
            }
            State::Returning { drained: true } => {
                // Who does not answer is purged when keys move there again.
                let is_lost = matches!(self.links[Side::Target as usize], Link::Down { since_us } if now_us.saturating_sub(since_us) >= TARGET_PATIENCE_US);
                if self.target_is_dirty && !is_lost && self.given_up.is_none() {
                    self.purge(Side::Target, actions);
                } else if self.purging.is_none() {
                    self.record_end(actions);
                }
            }
            _ => {}
        }
        if self.quiet == QuiesceState::Requested && self.batches.values().all(|batch| !batch.is_requested) {
            // What was read before is read again.
            self.batches.values_mut().for_each(|batch| batch.step = Step::Copy);
            self.quiet = QuiesceState::Reached;
            actions.push(Action::Io(Io::Quiet));
        }
    }

    fn confirm_target(&mut self, actions: &mut Vec<Action>) {
        // One that is lost is asked when it is proven that it is the same process.
        if self.is_up(Side::Target) {
            self.confirms += 1;
            actions.push(Action::Confirm { side: Side::Target });
        }
    }

    /// The target has evicted so many keys. What it evicted before the first copy was none of them.
    fn evicted(&mut self, so_far: u64, now_us: u64, actions: &mut Vec<Action>) {
        if self.state == State::Counting {
            self.evicted = Some(so_far);
            self.progress.phase = Phase::Moving;
            return match self.ahead {
                // What was sent before the leg is on the list, and may not have been done.
                true => self.settle(actions),
                false => self.announce(now_us, actions),
            };
        }
        let Some(more) = self.evicted.and_then(|before| so_far.checked_sub(before)).filter(|more| *more > 0) else {
            return;
        };
        if matches!(self.state, State::Ahead { .. } | State::Draining { .. } | State::Starting { .. } | State::Last)
            && !self.cut
        {
            self.turn_back(
                format!(
                    "the target has evicted keys since copying began ({more}), and copies may be among them: give it more memory (maxmemory), or use the \
                     protocol switchyard"
                ),
                actions,
            );
        }
    }

    /// Clients have waited for the drain long enough. What was copied ahead stays, and the next attempt has twice the
    /// time.
    fn drains_too_slowly(&mut self, actions: &mut Vec<Action>) {
        let us = self.orders.drain_patience_us;
        if !self.ahead || us >= DRAIN_PATIENCE_MAX_US {
            return self.turn_back(
                format!("commands sent to the source earlier were not answered within {} ms", us / 1000),
                actions,
            );
        }
        self.orders.drain_patience_us = us.saturating_mul(2).min(DRAIN_PATIENCE_MAX_US);
        actions.push(Action::Withdraw);
        self.settle(actions);
    }

    fn announce(&mut self, now_us: u64, actions: &mut Vec<Action>) {
        self.state = State::Draining { since_us: now_us };
        actions.push(Action::Announce { double_read: None });
    }

    /// All is copied but for what was written meanwhile.
    fn next_round(&mut self, now_us: u64, actions: &mut Vec<Action>) {
        let left = self.written.len();
        let converges = left < self.left_before / 10 * 9;
        if left <= LAST_KEYS || self.rewritten || self.rounds >= ROUNDS_MAX || (self.rounds > 1 && !converges) {
            return self.announce(now_us, actions);
        }
        (self.rounds, self.left_before) = (self.rounds + 1, left);
        self.settle(actions);
    }

    /// What was sent before is awaited.
    fn settle(&mut self, actions: &mut Vec<Action>) {
        self.settling = std::mem::take(&mut self.written);
        self.state = State::Ahead { settles: true };
        actions.push(Action::Observe);
        self.confirm_target(actions);
        if self.planted.is(Bug::ReadAgainTooEarly) {
            self.drained(actions);
        }
    }

    fn go_on_with_the_last(&mut self, now_us: u64, actions: &mut Vec<Action>) {
        if self.given_up == Some(Side::Source) {
            // What was read is stored; nothing more can be read.
            self.drop_what_is_past(actions);
            self.go_on_with_batches(now_us, actions);
            if let Some(wrong) = self.behind.wrong() {
                return self.purge_of(Side::Target, wrong, actions);
            }
            if self.batches.is_empty() && self.quiet == QuiesceState::No && self.is_up(Side::Target) {
                self.record_end(actions);
            }
            return;
        }
        if self.back.is_some() {
            // What is only read may be read in vain.
            self.batches.retain(|_, batch| batch.is_requested && batch.step != Step::Copy && self.given_up.is_none());
            self.todo.clear();
            if self.batches.is_empty() {
                let Orders { move_id, leg, .. } = self.orders;
                let why = self.back.clone().unwrap_or_default();
                let record = self.record(Record::RolledBack { move_id, leg, why }, actions);
                self.state = State::RecordingReturn { record };
            }
            return;
        }
        if self.target_is_dirty {
            return self.purge(Side::Target, actions);
        }
        self.go_on_with_batches(now_us, actions);
        if self.rewritten {
            if self.batches.is_empty() {
                self.begin_anew(actions);
                self.purge(Side::Target, actions);
            }
            return;
        }
        self.begin_batches(now_us, actions);
        if !self.all_is_copied()
            || !self.is_up(Side::Source)
            || !self.is_up(Side::Target)
            || self.quiet != QuiesceState::No
        {
            return;
        }
        match self.proof {
            Proof::No if self.orders.durability != Durability::Memory => {
                self.last_batch = self.last_batch.wrapping_add(1);
                let (batch, durability) = (BatchId(self.last_batch), self.orders.durability);
                self.proof = Proof::Securing(batch);
                actions.push(Action::Io(Io::Secure { batch, at: Side::Target, durability }));
            }
            Proof::No | Proof::Secured => {
                self.proof = Proof::Confirming([true; 2]);
                actions.push(Action::Confirm { side: Side::Source });
                self.confirm_target(actions);
            }
            Proof::Yes => {
                let Orders { move_id, leg, .. } = self.orders;
                let record = self.record(Record::CutOver { move_id, leg }, actions);
                self.state = State::CuttingOver { record };
            }
            Proof::Securing(_) | Proof::Confirming(_) => {}
        }
    }

    /// The source is lost: keys of which the target has what they were before their last write are lost, and must not
    /// be served as they were.
    fn drop_what_is_past(&mut self, actions: &mut Vec<Action>) {
        let unread = self.batches.extract_if(.., |_, batch| batch.step == Step::Copy).flat_map(|(_, batch)| batch.keys);
        let mut past: BTreeSet<Key> = unread.chain(std::mem::take(&mut self.todo)).collect();
        past.extend(std::mem::take(&mut self.written).into_iter().chain(std::mem::take(&mut self.settling)));
        // Batches are stored at once, in no order: a removal must not come before an earlier copy of its key.
        if !self.batches.is_empty() {
            self.written = past;
            return;
        }
        if past.is_empty() {
            return;
        }
        let text = format!(
            "keys that had not been copied as they were last ({}) are lost, and earlier copies of them are removed",
            past.len()
        );
        actions.push(Action::Io(Io::Report { text }));
        let past: Vec<Key> = past.into_iter().collect();
        for keys in past.chunks(PAST_AT_ONCE) {
            self.last_batch = self.last_batch.wrapping_add(1);
            let batch = Batch {
                keys: keys.to_vec(),
                there: Vec::new(),
                step: Step::Remove,
                is_requested: false,
                not_before_us: 0,
                tries: 0,
            };
            self.batches.insert(BatchId(self.last_batch), batch);
        }
    }

    fn look_at_losses(&mut self, now_us: u64, actions: &mut Vec<Action>) {
        let lost = |side: Side| match self.links[side as usize] {
            Link::Down { since_us } => now_us.saturating_sub(since_us),
            _ => 0,
        };
        let (source_us, target_us) = (lost(Side::Source), lost(Side::Target));
        let (side, longest_us) =
            if source_us > target_us { (Side::Source, source_us) } else { (Side::Target, target_us) };
        let waits = !matches!(self.state, State::Waiting | State::Cleaning | State::Starting { .. });
        if !self.begun && longest_us >= PREPARE_PATIENCE_US && waits {
            return self
                .turn_back(format!("the {} did not answer for {} s", name(side), longest_us / 1_000_000), actions);
        }
        if !matches!(self.state, State::Last) {
            return;
        }
        if target_us >= TARGET_PATIENCE_US {
            self.turn_back(format!("the target was not reached for {} s", target_us / 1_000_000), actions);
        }
        if source_us >= LOST_PATIENCE_US && now_us.saturating_sub(self.last_refusal_us) >= REFUSE_EVERY_US {
            self.last_refusal_us = now_us;
            let error = format!(
                "NODEDOWN the key is being moved, and the move has not reached its source for {} s; the command was not executed, try again",
                source_us / 1_000_000
            );
            actions.push(Action::Io(Io::Refuse { keys: None, error }));
        }
    }
}

impl Machine for Precopy {
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
            Event::Purged => match self.purging.take() {
                Some(Side::Source) => self.record_end(actions),
                Some(Side::Target) => {
                    (self.target_is_dirty, self.behind) = (false, StaleCopies::NONE);
                    if std::mem::take(&mut self.behind_is_any) {
                        let Orders { move_id, leg, .. } = self.orders;
                        self.record(Record::Behind { move_id, leg, keys: StaleCopies::NONE }, actions);
                    }
                }
                None => {}
            },
            Event::Listed { keys, end } => {
                self.lists = self.lists.saturating_sub(1);
                if self.lists_old > 0 {
                    self.lists_old -= 1;
                } else {
                    self.todo.extend(keys);
                    self.list_ended |= end;
                }
            }
            // Who wants a key waits for all.
            Event::Wanted { .. } | Event::Migrated { .. } => {}
            Event::Written { keys } => self.written.extend(keys),
            Event::Rewritten => self.rewritten = true,
            Event::Copied { .. } | Event::Stored { .. } | Event::Removed { .. } => {
                self.answered(event, now_us, actions)
            }
            Event::Secured { batch, refused } if self.proof == Proof::Securing(batch) => match refused {
                None => self.proof = Proof::Secured,
                Some(why) => {
                    self.proof = Proof::No;
                    self.turn_back(format!("the target cannot make keys safe: {why}"), actions);
                }
            },
            Event::Secured { .. } => {}
            Event::Confirmed { side, evicted } => {
                if side == Side::Target {
                    self.confirms = self.confirms.saturating_sub(1);
                    self.evicted(evicted, now_us, actions);
                }
                // An answer to an earlier question proves nothing.
                if let Proof::Confirming(waits) = &mut self.proof
                    && (side == Side::Source || self.confirms == 0)
                {
                    waits[side as usize] = false;
                    self.proof = if *waits == [false; 2] { Proof::Yes } else { self.proof };
                }
            }
            Event::Lost { side } => self.lost(side, now_us, actions),
            Event::Restored { side, process } => {
                if matches!(self.links[side as usize], Link::Down { .. }) && self.given_up != Some(side) {
                    self.restored(side, process, actions);
                }
            }
            Event::HandedOver => {
                if self.state == State::HandingOver {
                    let outcome = self.back.take().map_or(Outcome::Moved, |why| Outcome::Returned { why });
                    self.end(outcome, actions);
                }
            }
            Event::Quiesce => self.quiet = QuiesceState::Requested,
            Event::Resume => self.quiet = QuiesceState::No,
            Event::Pace(pace) => self.pace = pace,
            Event::RollBack => self.turn_back("it was told to end".to_owned(), actions),
            Event::GiveUp { side } => self.user_gives_up(side, actions),
            Event::Tick => self.look_at_losses(now_us, actions),
        }
        if self.state != State::Ended {
            self.advance(now_us, actions);
        }
    }

    fn progress(&self) -> Progress {
        let in_batches: usize = self.batches.values().map(|batch| batch.keys.len()).sum();
        let left = self.todo.len() + self.written.len() + self.settling.len() + in_batches;
        Progress { left: left as u64, given_up: self.given_up, ..self.progress }
    }
}
