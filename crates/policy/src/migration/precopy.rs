//! Copies first and changes the owner once, at the end: source-driven migration, and stop-and-copy of a whole store.
//!
//! - **Source-driven** (Slacker, Remus; NetMigrate §2.2). All keys are copied while the source serves. Keys written in
//!   the meantime (the dirty set) are copied again, in rounds, until few are left. Clients wait for these last keys,
//!   then the target serves.
//! - **Stop-and-copy of a whole store**. The same without rounds: clients wait while all keys are copied, then the
//!   target serves.
//!
//! Neither is a [`super::leg::Work`], in which keys move and return one by one. Here one record decides for all keys.
//!
//! # Rules
//! 1. The source has every key until the *cut-over* is on record ([`Record::CutOver`]). Any failure before leaves the
//!    source unchanged. The copies at the target are then worthless, and are purged before the slots are copied there
//!    again.
//! 2. A key that may have been written is copied again. It is read when nothing sent earlier is in flight
//!    ([`Action::Observe`]), so the read includes the write.
//! 3. The cut-over happens when writes have stopped (the drain), and every written key is copied.
//! 4. Both nodes are the same processes from the first copy to the cut-over. Otherwise the leg starts again, or goes
//!    back.
//! 5. After the cut-over the target serves. Keys at the source are outdated: they are removed before the hand-over, or,
//!    if the source is lost, when it is back.
//! 6. The target evicts nothing from the first copy to the cut-over: evicted keys would be lost, and their names
//!    unknown.
//! 7. The outdated copies are on record before the last ones are brought up to date: neither after the final loss of
//!    the source nor after a router restart may they be served.
//!
//! The papers do not cover keys that are deleted, expire or are written by scripts. Here a key absent at the source is
//! removed at the target, and if any key may have been written ([`Event::Rewritten`]), all are copied once more while
//! clients wait.

mod batches;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use super::injected::{Bug, InjectedBug};
use super::record::{OpenLeg, StaleCopies};
use super::{
    Action, BatchId, Durability, Event, Fingerprinter, Io, Key, LegOrder, Machine, Outcome, Pace, Phase, Process,
    Progress, Record, Side, UnexpectedKeys,
};

/// Maximum number of keys left for the last round (NetMigrate's public code: the source pauses when 21 entries of its
/// log are left).
const LAST_KEYS: usize = 21;
/// Maximum number of rounds. They end earlier if a round leaves nine tenths of the keys that the previous one left.
const ROUNDS_MAX: u32 = 30;
/// Batches per list request.
const LIST_BATCHES: u32 = 10;
/// Keys per removal at the target, if the source is lost.
const REMOVE_KEYS_MAX: usize = 1000;
/// Number of attempts of a refused batch.
const TRIES: u32 = 5;
/// Interval between attempts, microseconds.
const REST_US: u64 = 100_000;
/// Outage after which a leg gives up or goes back, microseconds: of either side before the drain, and of the target
/// after it.
const PREPARE_TIMEOUT_US: u64 = 10_000_000;
const TARGET_TIMEOUT_US: u64 = 3_000_000;
/// Outage of the source after which a cut-over leg ends without it, microseconds: all keys are at the target.
const SOURCE_TIMEOUT_US: u64 = 3_000_000;
/// Maximum time that clients wait for the drain, microseconds.
const DRAIN_TIMEOUT_MAX_US: u64 = 2_000_000;
/// Outage of the source after which waiting clients receive an error, and minimum interval between errors,
/// microseconds.
const LOST_TIMEOUT_US: u64 = 2_000_000;
const REFUSE_EVERY_US: u64 = 100_000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Waits for [`Event::Met`].
    Waiting,
    /// Records the processes met.
    Meeting {
        record: u64,
    },
    /// Purges the target.
    Readying,
    /// Queries the target's count of evicted keys.
    Counting,
    /// Copies keys while the source serves; `settles`: waits for commands sent there earlier.
    Ahead {
        settles: bool,
    },
    /// Gives up: purges the target's copies.
    Cleaning,
    /// Waits for the drain. Clients wait from here on.
    Draining {
        since_us: u64,
    },
    /// Records that the drain is complete.
    Starting {
        record: u64,
    },
    /// Copies the last keys.
    Last,
    /// Records the cut-over.
    CuttingOver {
        record: u64,
    },
    /// The target serves; purges the source.
    Over,
    /// Records the decision to go back.
    RecordingReturn {
        record: u64,
    },
    /// Publishes to the workers that the source serves.
    Returning {
        drained: bool,
    },
    /// Records the owner.
    Ending {
        record: u64,
    },
    /// Waits until the topology is stored.
    HandingOver,
    Ended,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Link {
    /// The connection is on record, and may be used.
    Up,
    /// Connected; its record is not yet durable.
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
    /// Stores keys that exist at the source, then removes the absent ones.
    Store,
    Remove,
}

#[derive(Clone, Debug)]
struct Batch {
    keys: Vec<Key>,
    /// Keys that the source had.
    there: Vec<Key>,
    step: Step,
    is_requested: bool,
    not_before_us: u64,
    tries: u32,
}

/// Progress of the checks before the cut-over: the copies are durable, and both nodes are still the processes of the
/// copy. The source is checked too: had it restarted with older data, clients would have seen that, and afterwards
/// newer values from the copies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Proof {
    No,
    Securing(BatchId),
    Secured,
    /// Waits for replies of these sides.
    Confirming([bool; 2]),
    Yes,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum QuiesceState {
    No,
    Requested,
    Reached,
}

/// Machine of a leg that is copied as a whole.
#[derive(Clone)]
pub struct Precopy {
    orders: LegOrder,
    fingerprints: Fingerprinter,
    planted: InjectedBug,
    /// Copies while the source serves. Otherwise clients wait.
    ahead: bool,
    state: State,
    /// The first drain is complete: from now on clients wait until the leg has an owner.
    begun: bool,
    cut: bool,
    resumed: bool,
    /// Reason of a rollback.
    back: Option<String>,
    given_up: Option<Side>,
    links: [Link; 2],
    processes: [Option<Process>; 2],
    /// Purge in flight.
    purging: Option<Side>,
    /// The content of the target is unknown; and the leg has stored keys there.
    target_is_dirty: bool,
    has_stored: bool,
    records: u64,
    batches: BTreeMap<BatchId, Batch>,
    last_batch: u32,
    last_began_us: u64,
    todo: VecDeque<Key>,
    /// Number of list requests in flight, and how many of them belong to an earlier listing.
    lists: u32,
    lists_old: u32,
    list_ended: bool,
    /// Keys that may have been written since the last wait for earlier commands, and keys written before it.
    written: BTreeSet<Key>,
    settling: BTreeSet<Key>,
    /// Any key may have been written.
    rewritten: bool,
    rounds: u32,
    left_before: usize,
    /// In a resumed leg: copies at the target that were outdated at the end of the drain.
    behind: StaleCopies,
    /// All copies are on record as outdated, until they are removed.
    behind_is_any: bool,
    proof: Proof,
    /// Number of keys that the target's process had evicted before the first copy; `None`: unknown.
    evicted: Option<u64>,
    /// Confirm requests to the target in flight.
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
    /// Creates a leg as ordered, or resumes the open leg of an earlier router. `ahead`: in rounds while the source
    /// serves.
    #[must_use]
    pub fn new(orders: LegOrder, ahead: bool, fingerprints: Fingerprinter, resume: Option<OpenLeg>) -> Self {
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
            // Keys written since their copy are unknown after a restart.
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

    /// Returns the owner of the slots at the end.
    const fn owner(&self) -> Side {
        if self.back.is_some() { Side::Source } else { Side::Target }
    }

    fn record_end(&mut self, actions: &mut Vec<Action>) {
        let LegOrder { move_id, leg, .. } = self.orders;
        if let Some(side) = self.given_up {
            debug_assert!(side != self.owner());
            actions.push(Action::Lost { keys: Vec::new() });
        }
        let record = self.record(Record::LegEnded { move_id, leg, owner: self.owner() }, actions);
        self.state = State::Ending { record };
        self.progress.phase = Phase::Releasing;
    }

    // ---- events ----

    fn met(&mut self, source: Process, target: Process, actions: &mut Vec<Action>) {
        let LegOrder { move_id, leg, ref slots, .. } = self.orders;
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
        let LegOrder { move_id, leg, .. } = self.orders;
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
            self.turn_back(format!("the {} has become another process since keys were copied", name(side)), actions);
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
                // The result at the target does not matter: the keys are read and written again.
                (batch.step, batch.is_requested) = (Step::Copy, false);
                self.progress.repeated += 1;
            }
        }
        actions.push(Action::Reconnect { side });
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
                    self.resume(actions);
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

    /// Resumes the open leg of an earlier router at its last record.
    fn resume(&mut self, actions: &mut Vec<Action>) {
        match &self.back {
            Some(_) => self.announce_return(actions),
            // Workers have not yet seen the leg.
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
                let LegOrder { move_id, leg, .. } = self.orders;
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

    /// Copies all keys once more.
    fn restart_copy(&mut self, actions: &mut Vec<Action>) {
        (self.rewritten, self.target_is_dirty, self.proof) = (false, true, Proof::No);
        (self.progress.keys_moved, self.rounds) = (0, 0);
        self.todo.clear();
        self.list_ended = false;
        self.lists_old = self.lists;
        actions.push(Action::Relist { at: Side::Source });
    }

    /// Ends the leg if it has changed nothing, or else goes back to the source.
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
        // Batches in flight end before the purge, which uses the same connection.
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
                "the target is not abandoned: all keys have moved to it".to_owned()
            }
            (Link::Down { .. }, _) => String::new(),
            _ => format!("the {} replies, so it is not abandoned", name(side)),
        };
        if !says.is_empty() {
            actions.push(Action::Io(Io::Report { text: says }));
            return;
        }
        let why = format!("the {} was abandoned by the user", name(side));
        if !self.begun && !matches!(self.state, State::Starting { .. }) {
            return self.turn_back(why, actions);
        }
        let LegOrder { move_id, leg, .. } = self.orders;
        self.record(Record::GivenUp { move_id, leg, side }, actions);
        self.given_up = Some(side);
        match side {
            Side::Target => drop(self.back.get_or_insert(why)),
            Side::Source => {
                self.back = None;
                if matches!(self.state, State::RecordingReturn { .. } | State::Returning { .. }) {
                    // The workers may already serve from the source.
                    self.state = State::Draining { since_us: 0 };
                    actions.push(Action::Announce { double_read: None });
                }
            }
        }
    }

    // ---- actions ----

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
                if !self.begun && now_us.saturating_sub(since_us) > self.orders.drain_timeout_us =>
            {
                self.on_drain_timeout(actions);
            }
            State::Cleaning => self.clean(actions),
            State::Last => self.copy_last_keys(now_us, actions),
            State::Over => {
                let is_lost = matches!(self.links[Side::Source as usize], Link::Down { since_us } if now_us.saturating_sub(since_us) >= SOURCE_TIMEOUT_US);
                if is_lost || self.given_up == Some(Side::Source) || self.planted.is(Bug::PastNotPurged) {
                    self.record_end(actions);
                } else {
                    self.purge(Side::Source, actions);
                }
            }
            State::Returning { drained: true } => {
                // An unreachable target is purged when keys move there again.
                let is_lost = matches!(self.links[Side::Target as usize], Link::Down { since_us } if now_us.saturating_sub(since_us) >= TARGET_TIMEOUT_US);
                if self.target_is_dirty && !is_lost && self.given_up.is_none() {
                    self.purge(Side::Target, actions);
                } else if self.purging.is_none() {
                    self.record_end(actions);
                }
            }
            _ => {}
        }
        if self.quiet == QuiesceState::Requested && self.batches.values().all(|batch| !batch.is_requested) {
            // Values already read are read again.
            self.batches.values_mut().for_each(|batch| batch.step = Step::Copy);
            self.quiet = QuiesceState::Reached;
            actions.push(Action::Io(Io::Quiet));
        }
    }

    fn confirm_target(&mut self, actions: &mut Vec<Action>) {
        // A lost target is queried later, by the check that its process is the same.
        if self.is_up(Side::Target) {
            self.confirms += 1;
            actions.push(Action::Confirm { side: Side::Target });
        }
    }

    /// Handles the eviction count of the target. Evictions before the first copy do not matter.
    fn evicted(&mut self, so_far: u64, now_us: u64, actions: &mut Vec<Action>) {
        if self.state == State::Counting {
            self.evicted = Some(so_far);
            self.progress.phase = Phase::Moving;
            return match self.ahead {
                // Commands sent before the leg are on the list, and may still be in flight.
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
                    "the target has evicted keys since copying started ({more}), which may include copies: give it more memory (maxmemory), or use the \
                     protocol switchyard"
                ),
                actions,
            );
        }
    }

    /// Lets clients run again after too long a drain. The copies stay, and the next attempt has twice the time.
    fn on_drain_timeout(&mut self, actions: &mut Vec<Action>) {
        let us = self.orders.drain_timeout_us;
        if !self.ahead || us >= DRAIN_TIMEOUT_MAX_US {
            return self
                .turn_back(format!("earlier commands got no reply from the source within {} ms", us / 1000), actions);
        }
        self.orders.drain_timeout_us = us.saturating_mul(2).min(DRAIN_TIMEOUT_MAX_US);
        actions.push(Action::Withdraw);
        self.settle(actions);
    }

    fn announce(&mut self, now_us: u64, actions: &mut Vec<Action>) {
        self.state = State::Draining { since_us: now_us };
        actions.push(Action::Announce { double_read: None });
    }

    /// Starts the next round, or the drain: all keys are copied, except those written during the copy (the dirty set).
    fn next_round(&mut self, now_us: u64, actions: &mut Vec<Action>) {
        let left = self.written.len();
        let converges = left < self.left_before / 10 * 9;
        if left <= LAST_KEYS || self.rewritten || self.rounds >= ROUNDS_MAX || (self.rounds > 1 && !converges) {
            return self.announce(now_us, actions);
        }
        (self.rounds, self.left_before) = (self.rounds + 1, left);
        self.settle(actions);
    }

    /// Waits for commands sent earlier.
    fn settle(&mut self, actions: &mut Vec<Action>) {
        self.settling = std::mem::take(&mut self.written);
        self.state = State::Ahead { settles: true };
        actions.push(Action::Observe);
        self.confirm_target(actions);
        if self.planted.is(Bug::ReadAgainTooEarly) {
            self.drained(actions);
        }
    }

    fn copy_last_keys(&mut self, now_us: u64, actions: &mut Vec<Action>) {
        if self.given_up == Some(Side::Source) {
            // Values already read are stored; nothing more can be read.
            self.remove_outdated(actions);
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
            // A copy that is only read may be discarded.
            self.batches.retain(|_, batch| batch.is_requested && batch.step != Step::Copy && self.given_up.is_none());
            self.todo.clear();
            if self.batches.is_empty() {
                let LegOrder { move_id, leg, .. } = self.orders;
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
                self.restart_copy(actions);
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
                let LegOrder { move_id, leg, .. } = self.orders;
                let record = self.record(Record::CutOver { move_id, leg }, actions);
                self.state = State::CuttingOver { record };
            }
            Proof::Securing(_) | Proof::Confirming(_) => {}
        }
    }

    /// Removes outdated copies after a loss of the source. The last writes of these keys are lost, and older values
    /// must not be served.
    fn remove_outdated(&mut self, actions: &mut Vec<Action>) {
        let unread = self.batches.extract_if(.., |_, batch| batch.step == Step::Copy).flat_map(|(_, batch)| batch.keys);
        let mut past: BTreeSet<Key> = unread.chain(std::mem::take(&mut self.todo)).collect();
        past.extend(std::mem::take(&mut self.written).into_iter().chain(std::mem::take(&mut self.settling)));
        // Batches are stored concurrently: a removal must not overtake an earlier copy of its key.
        if !self.batches.is_empty() {
            self.written = past;
            return;
        }
        if past.is_empty() {
            return;
        }
        let text = format!(
            "keys whose last value was not copied ({}) are lost, and older copies of them are removed",
            past.len()
        );
        actions.push(Action::Io(Io::Report { text }));
        let past: Vec<Key> = past.into_iter().collect();
        for keys in past.chunks(REMOVE_KEYS_MAX) {
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

    fn check_outages(&mut self, now_us: u64, actions: &mut Vec<Action>) {
        let lost = |side: Side| match self.links[side as usize] {
            Link::Down { since_us } => now_us.saturating_sub(since_us),
            _ => 0,
        };
        let (source_us, target_us) = (lost(Side::Source), lost(Side::Target));
        let (side, longest_us) =
            if source_us > target_us { (Side::Source, source_us) } else { (Side::Target, target_us) };
        let waits = !matches!(self.state, State::Waiting | State::Cleaning | State::Starting { .. });
        if !self.begun && longest_us >= PREPARE_TIMEOUT_US && waits {
            return self
                .turn_back(format!("the {} did not answer for {} s", name(side), longest_us / 1_000_000), actions);
        }
        if !matches!(self.state, State::Last) {
            return;
        }
        if target_us >= TARGET_TIMEOUT_US {
            self.turn_back(format!("the target was not reached for {} s", target_us / 1_000_000), actions);
        }
        if source_us >= LOST_TIMEOUT_US && now_us.saturating_sub(self.last_refusal_us) >= REFUSE_EVERY_US {
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
                        let LegOrder { move_id, leg, .. } = self.orders;
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
            // Ignored: no key is usable at the target before the cut-over, so a pull cannot help.
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
                    self.turn_back(format!("the target cannot make keys durable: {why}"), actions);
                }
            },
            Event::Secured { .. } => {}
            Event::Confirmed { side, evicted } => {
                if side == Side::Target {
                    self.confirms = self.confirms.saturating_sub(1);
                    self.evicted(evicted, now_us, actions);
                }
                // A reply to an earlier request proves nothing.
                if let Proof::Confirming(waits) = &mut self.proof
                    && (side == Side::Source || self.confirms == 0)
                {
                    waits[side as usize] = false;
                    self.proof = if *waits == [false; 2] { Proof::Yes } else { self.proof };
                }
            }
            Event::Lost { side } => self.lost(side, now_us, actions),
            Event::Reconnected { side, process } => {
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
            Event::RollBack => self.turn_back("it was aborted by the user".to_owned(), actions),
            Event::GiveUp { side } => self.user_gives_up(side, actions),
            Event::Tick => self.check_outages(now_us, actions),
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
