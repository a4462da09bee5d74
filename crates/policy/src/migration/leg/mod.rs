//! The default protocol: keys move in batches and on demand, and are served throughout. See the rules in the module above.
//!
//! What a leg does is decided in three places: [`Leg::step`] takes note of an event, [`Leg::advance`] does what the state allows (it is
//! called after every event, and finds by itself what is possible now), and [`batch`] is the life of one batch. There is no table of
//! (state, event) pairs: connections break in every state, and what has to be asked again is the same everywhere.
//!
//! # Who has a key: `away`
//! The keys on record as moved, each with the *eras* of its record: how often each side had been another process by then. From these follows
//! what a node that restarted shows wrongly:
//! - The source shows a key on record from an earlier era of its own: stale, and removed ([`Action::Purge`] of the source). Unless the target
//!   restarted as well since then and need not have kept it, and the key was never committed: then it is copied again, and that is reported.
//! - The target shows what is not on record: left over, and removed ([`Action::Purge`] of the target), before anything is stored there.
//! - The source has a key on record from its present era: its removal was not done, so it was never committed, and it is moved as if it had not been.

mod batch;
mod given_up;
mod identity;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use self::batch::Batch;
use super::planted::{Bug, Planted};
use super::record::{Eras, OpenLeg};
use super::{
    Action, BatchId, Event, Fingerprint, FingerprintMap, FingerprintSet, Fingerprinter, Key, Machine, Orders, Outcome, Pace, Phase,
    Process, Progress, Record, Side, Wrong,
};

/// Until somebody says otherwise ([`Event::Pace`]).
const PACE_AT_START: Pace = Pace { batch_keys: 100, batches: 1, interval_us: 0 };
/// Batches of wanted keys under way at once. More would not be faster; what is wanted meanwhile goes into the next one together.
const WANTED_BATCHES: usize = 4;
/// Keys of a batch of wanted keys, at most.
const WANTED_KEYS: usize = 64;
/// A side that is lost for longer than this has those who wait for keys told so, microseconds.
const LOST_PATIENCE_US: u64 = 2_000_000;
/// Between two such tellings, microseconds.
const REFUSE_EVERY_US: u64 = 100_000;
/// A leg goes back when its target is lost for so long, microseconds: whoever waits for a key that the source still has is served there then.
const TARGET_PATIENCE_US: u64 = 3_000_000;
/// A leg that has not begun gives up when a side is lost for so long, microseconds.
const PREPARE_PATIENCE_US: u64 = 10_000_000;
/// A batch that a node refuses, or over which a connection breaks, is tried so often before the leg rolls back.
const TRIES: u32 = 5;
/// Before the second try, microseconds; twice as long each time, up to [`REST_MAX_US`].
const REST_US: u64 = 20_000;
const REST_MAX_US: u64 = 1_000_000;

/// A side, as the leg knows it.
#[derive(Clone, Debug, Default)]
struct Link {
    process: Option<Process>,
    state: LinkState,
    /// How often another process was met.
    era: u32,
    /// What it may show and should not.
    dirt: Dirt,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
enum Dirt {
    #[default]
    None,
    /// What this leg has stored there and not put on record: [`Leg::left`]. What else is there is somebody else's, and stays.
    Left,
    /// It is another process than before, or keeps what another router or another leg has left: anything.
    Anything,
}

impl Dirt {
    const fn anything_if(it_may_be: bool) -> Self {
        if it_may_be { Self::Anything } else { Self::None }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum LinkState {
    /// The connection may be used: it is on record.
    Up,
    /// It broke at that time, and a new one is asked for.
    Down { since_us: u64 },
    /// There is none yet.
    #[default]
    Unmet,
    /// There is a connection, and this record of it is not durable yet: it is not used before.
    Meeting { record: u64 },
}

/// In the place of the target's era: committed, so the target's state of it is the only one, whatever happens to the target.
const COMMITTED: u32 = u32::MAX;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// For [`Event::Met`].
    Waiting,
    /// The processes met are being recorded.
    Meeting { record: u64 },
    /// Nodes are being purged; then the workers are told.
    Readying,
    /// The workers drain.
    Draining { since_us: u64 },
    /// That the drain is complete is being recorded.
    Starting { record: u64 },
    /// Keys move, forwards or back.
    Moving,
    /// The decision to go back is being recorded.
    RecordingRollback { record: u64 },
    /// The workers are told that it goes back.
    AnnouncingRollback,
    /// That all keys are at the owner is being recorded.
    Ending { record: u64 },
    /// The topology is being stored.
    HandingOver,
    /// Over.
    Ended,
}

/// The machine of a leg.
#[derive(Clone)]
pub struct Leg {
    orders: Orders,
    fingerprints: Fingerprinter,
    planted: Planted,
    state: State,
    /// A leg that a router before this one has begun.
    resumed: bool,
    /// The drain was complete once: from then on a leg is moved or returned.
    begun: bool,
    /// Why it is to go back, if it is; it has turned when `turned`.
    back: Option<String>,
    rolls_back: bool,
    /// The side that is lost for good ([`given_up`]).
    given_up: Option<Side>,
    /// It goes back to a node that cannot do what [`Orders::durability`] asks of the other.
    as_safe_as_it_was: bool,
    source: Link,
    target: Link,
    /// A purge that is not answered.
    purging: Option<Side>,
    records: u64,
    away: FingerprintMap<Eras>,
    /// What batches that were dropped may have stored at the target.
    left: BTreeSet<Fingerprint>,
    batches: BTreeMap<BatchId, Batch>,
    next_batch: u32,
    /// Keys of batches.
    busy: FingerprintSet,
    /// Keys that somebody waits for and that are in no batch.
    wanted: VecDeque<(Fingerprint, Key)>,
    wanted_set: FingerprintSet,
    listed: VecDeque<Key>,
    /// Listings asked for and not answered, and of those the ones that belong to an earlier listing.
    lists: u32,
    lists_old: u32,
    list_ended: bool,
    pace: Pace,
    last_start_us: Option<u64>,
    last_refusal_us: u64,
    quiet: Quiet,
    progress: Progress,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Quiet {
    No,
    Asked,
    Reached,
}

impl Leg {
    /// A leg as ordered, or one that was under way when the router before this one ended.
    #[must_use]
    pub fn new(orders: Orders, fingerprints: Fingerprinter, resume: Option<OpenLeg>) -> Self {
        let mut leg = Self {
            orders,
            fingerprints,
            planted: Planted::default(),
            state: State::Waiting,
            resumed: false,
            begun: false,
            back: None,
            rolls_back: false,
            given_up: None,
            as_safe_as_it_was: false,
            source: Link::default(),
            target: Link::default(),
            purging: None,
            records: 0,
            away: FingerprintMap::default(),
            left: BTreeSet::new(),
            batches: BTreeMap::new(),
            next_batch: 0,
            busy: FingerprintSet::default(),
            wanted: VecDeque::new(),
            wanted_set: FingerprintSet::default(),
            listed: VecDeque::new(),
            lists: 0,
            lists_old: 0,
            list_ended: false,
            pace: PACE_AT_START,
            last_start_us: None,
            last_refusal_us: 0,
            quiet: Quiet::No,
            progress: Progress::NONE,
        };
        // One that was not moving begins again: until then it changes nothing but what the target has left over.
        if let Some(open) = resume.filter(|open| open.moving) {
            leg.resumed = true;
            leg.begun = true;
            leg.rolls_back = open.rolled_back.is_some();
            leg.back = open.rolled_back;
            leg.given_up = open.given_up;
            leg.source = Link { process: Some(open.source), era: open.eras.source, ..Link::default() };
            leg.target = Link { process: Some(open.target), era: open.eras.target, ..Link::default() };
            leg.away = open.away.into_iter().collect();
        }
        leg
    }

    /// The same with a bug in it, for tests of the simulator.
    #[cfg(feature = "planted-bugs")]
    #[must_use]
    pub fn with(mut self, bug: Option<Bug>) -> Self {
        self.planted = Planted(bug);
        self
    }

    pub(super) const fn planted(mut self, planted: Planted) -> Self {
        self.planted = planted;
        self
    }

    const fn link(&self, side: Side) -> &Link {
        match side {
            Side::Source => &self.source,
            Side::Target => &self.target,
        }
    }

    fn link_mut(&mut self, side: Side) -> &mut Link {
        match side {
            Side::Source => &mut self.source,
            Side::Target => &mut self.target,
        }
    }

    /// Whether keys may be read, stored and removed there.
    fn usable(&self, side: Side) -> bool {
        let link = self.link(side);
        link.state == LinkState::Up && link.dirt == Dirt::None
    }

    /// Where keys come from and where they go to, at present.
    const fn from(&self) -> Side {
        if self.rolls_back { Side::Target } else { Side::Source }
    }

    const fn to(&self) -> Side {
        self.from().other()
    }

    fn record(&mut self, record: Record, actions: &mut Vec<Action>) -> u64 {
        self.records += 1;
        actions.push(Action::Record { number: self.records, record });
        self.records
    }

    fn end(&mut self, outcome: Outcome, actions: &mut Vec<Action>) {
        debug_assert!(self.batches.is_empty(), "a leg ends with nothing under way");
        self.state = State::Ended;
        self.progress.phase = Phase::Ended;
        actions.push(Action::End(outcome));
    }

    /// The first process at each side, or the first that a resumed leg meets.
    fn met(&mut self, source: Process, target: Process, actions: &mut Vec<Action>) {
        if self.state != State::Waiting {
            debug_assert!(false, "met once");
            return;
        }
        if self.resumed {
            for (side, process) in [(Side::Source, source), (Side::Target, target)] {
                match self.given_up == Some(side) {
                    true => self.link_mut(side).state = LinkState::Down { since_us: 0 },
                    false => self.restored(side, process, actions),
                }
            }
            if self.given_up == Some(Side::Target) && !self.rolls_back {
                self.back.get_or_insert_with(|| given_up::why(Side::Target));
            }
            // The router before this one may have ended before it had purged.
            if self.target.era > 0 {
                self.target.dirt = Dirt::Anything;
            }
            if self.away.values().any(|eras| eras.source != self.source.era) {
                self.source.dirt = Dirt::Anything;
            }
            self.report_lost_and_found(actions);
            self.state = State::Meeting { record: self.records };
        } else {
            let Orders { move_id, leg, ref slots, .. } = self.orders;
            let record = Record::LegBegun { move_id, leg, slots: slots.clone(), source: source.clone(), target: target.clone() };
            let record = self.record(record, actions);
            let state = LinkState::Meeting { record };
            self.source = Link { process: Some(source), state, ..Link::default() };
            self.target = Link { process: Some(target), state, dirt: Dirt::anything_if(!self.planted.is(Bug::NoPurge)), ..Link::default() };
            self.state = State::Meeting { record };
        }
    }

    fn restored(&mut self, side: Side, process: Process, actions: &mut Vec<Action>) {
        if matches!(self.state, State::Ending { .. } | State::HandingOver) {
            // The leg's last record is written: what comes after it would belong to no leg. And nothing is asked of the nodes any more.
            return;
        }
        let Orders { move_id, leg, .. } = self.orders;
        let record = self.record(Record::Met { move_id, leg, side, process: process.clone() }, actions);
        let link = self.link_mut(side);
        let changed = link.process.as_ref().is_some_and(|before| before.run_id != process.run_id);
        link.process = Some(process);
        link.state = LinkState::Meeting { record };
        if !changed {
            return;
        }
        self.link_mut(side).era += 1;
        match side {
            Side::Target => {
                self.target.dirt = Dirt::anything_if(!self.planted.is(Bug::NoPurgeAfterRestart));
                self.record_committed_again(actions);
            }
            Side::Source => {
                self.source.dirt = Dirt::anything_if(!self.away.is_empty() && !self.planted.is(Bug::PresenceIsHistory));
            }
        }
        if self.state == State::Waiting {
            return;
        }
        if side == Side::Source {
            self.report_lost_and_found(actions);
        }
        if side == self.from() && !self.planted.is(Bug::NotListedAgain) {
            self.relist(side, actions);
        }
        self.redo_after_restart(side);
    }

    /// Another process is at the target. That keys are committed is known to nobody but us: put on record anew, they are at this process for good also after
    /// a crash of the router, and what a source that restarts shows of them is past.
    fn record_committed_again(&mut self, actions: &mut Vec<Action>) {
        let mut keys: Vec<Fingerprint> = self.away.iter().filter(|(_, eras)| eras.target == COMMITTED).map(|(key, _)| *key).collect();
        keys.sort_unstable();
        let back = self.rolls_back || matches!(self.state, State::RecordingRollback { .. });
        if keys.is_empty() || back {
            return;
        }
        let Orders { move_id, leg, .. } = self.orders;
        let record = self.record(Record::Moved { move_id, leg, keys }, actions);
        self.target.state = LinkState::Meeting { record };
    }

    /// What is on record, was never committed as far as is known, and need not be at either node as it was: both restarted since.
    fn report_lost_and_found(&self, actions: &mut Vec<Action>) {
        let doubtful = self.away.values().filter(|eras| eras.source != self.source.era && !self.is_stale(eras)).count();
        if doubtful > 0 {
            actions.push(Action::Report {
                text: format!(
                    "both nodes are other processes than those that {doubtful} keys were moved between: what the source shows of these keys and the target has not is moved again, and may be older than what clients wrote last"
                ),
            });
        }
    }

    /// Whether the source, if it shows a key with such a record, shows what is past.
    fn is_stale(&self, eras: &Eras) -> bool {
        let kept = eras.target == COMMITTED || eras.target == self.target.era || self.orders.durability == super::Durability::Aof;
        eras.source != self.source.era && kept
    }

    fn relist(&mut self, at: Side, actions: &mut Vec<Action>) {
        self.listed.clear();
        self.list_ended = false;
        self.lists_old = self.lists;
        actions.push(Action::Relist { at });
    }

    fn lost(&mut self, side: Side, now_us: u64, actions: &mut Vec<Action>) {
        if matches!(self.state, State::Ended | State::Waiting) || matches!(self.link(side).state, LinkState::Down { .. }) {
            return;
        }
        self.link_mut(side).state = LinkState::Down { since_us: now_us };
        if self.purging == Some(side) {
            self.purging = None;
        }
        let is_given_up = self.redo_after_loss(side);
        actions.push(Action::Restore { side });
        if is_given_up {
            self.roll_back(format!("the {} was lost {TRIES} times in the middle of the same keys", name(side)), actions);
        }
    }

    /// The record of that number is durable, and with it all before.
    fn recorded(&mut self, number: u64, actions: &mut Vec<Action>) {
        for link in [&mut self.source, &mut self.target] {
            if matches!(link.state, LinkState::Meeting { record } if record <= number) {
                link.state = LinkState::Up;
            }
        }
        self.batches_recorded(number);
        match self.state {
            State::Meeting { record } if record <= number => self.state = State::Readying,
            State::Starting { record } if record <= number => {
                self.begun = true;
                self.state = State::Moving;
            }
            State::RecordingRollback { record } if record <= number => self.announce_rollback(actions),
            State::Ending { record } if record <= number => {
                self.state = State::HandingOver;
                actions.push(Action::HandOver { to: self.to() });
            }
            _ => {}
        }
    }

    /// Decides to go back. `never_left`: keys on record that the source still has, and that nobody has used elsewhere. They are back with the decision.
    fn record_rollback(&mut self, never_left: BTreeSet<Fingerprint>, actions: &mut Vec<Action>) {
        let Orders { move_id, leg, .. } = self.orders;
        let why = self.back.clone().unwrap_or_default();
        let mut record = self.record(Record::RolledBack { move_id, leg, why }, actions);
        self.away.retain(|key, _| !never_left.contains(key));
        if !never_left.is_empty() {
            record = self.record(Record::Returned { move_id, leg, keys: never_left.into_iter().collect() }, actions);
        }
        self.state = State::RecordingRollback { record };
    }

    fn announce_rollback(&mut self, actions: &mut Vec<Action>) {
        self.rolls_back = true;
        self.state = State::AnnouncingRollback;
        self.progress.phase = Phase::Returning;
        // Whoever waits looks again, and finds another answer.
        self.wanted.clear();
        self.wanted_set.clear();
        // What was stored and is not on record stays behind. Of what a router before this one has stored nobody knows.
        let is_known = !self.resumed && self.target.dirt == Dirt::None;
        self.target.dirt = if is_known { Dirt::Left } else { Dirt::Anything };
        let why = self.back.clone().unwrap_or_default();
        actions.push(Action::RollBack { why, away: self.away_now() });
        if self.planted.is(Bug::RollbackWithoutDrain) {
            self.drained(actions);
        }
    }

    fn away_now(&self) -> Arc<BTreeSet<Fingerprint>> {
        Arc::new(self.away.keys().copied().collect())
    }

    fn want(&mut self, keys: Vec<Key>, actions: &mut Vec<Action>) {
        if self.rolls_back && matches!(self.state, State::Waiting | State::Meeting { .. } | State::Readying) {
            // After a crash of the router the workers do not know yet that the leg goes back: what is committed to them now they would use at the target.
            // They look again when they know.
            return;
        }
        let mut there = Vec::new();
        for key in keys {
            let fingerprint = self.fingerprints.of(&key);
            let committed = match self.away.get(&fingerprint) {
                Some(eras) => !self.rolls_back && eras.target == COMMITTED,
                None => self.rolls_back,
            };
            if committed && !self.busy.contains(&fingerprint) {
                there.push(key);
            } else if !self.busy.contains(&fingerprint) && self.wanted_set.insert(fingerprint) {
                self.wanted.push_back((fingerprint, key));
            }
        }
        if !there.is_empty() {
            actions.push(Action::Commit { keys: there });
        }
    }

    fn listed(&mut self, keys: Vec<Key>, end: bool) {
        self.lists = self.lists.saturating_sub(1);
        if self.lists_old > 0 {
            // An earlier listing's: its keys do no harm, but its end means nothing. After a turn its keys are those of the other side.
            self.lists_old -= 1;
            return;
        }
        self.listed.extend(keys);
        self.list_ended |= end;
    }

    fn roll_back(&mut self, why: String, actions: &mut Vec<Action>) {
        if self.given_up.is_some() {
            return;
        }
        match self.state {
            State::Moving | State::Starting { .. } if self.back.is_none() => self.back = Some(why),
            State::Readying if self.resumed && self.back.is_none() => self.back = Some(why),
            State::Draining { .. } if self.begun && self.back.is_none() => self.back = Some(why),
            State::Waiting | State::Meeting { .. } if !self.resumed => self.give_up(why, actions),
            State::Readying | State::Draining { .. } if !self.begun => self.give_up(why, actions),
            State::Waiting | State::Meeting { .. } if self.back.is_none() => self.back = Some(why),
            _ => {}
        }
    }

    /// Nothing was changed yet, and nothing will be.
    fn give_up(&mut self, why: String, actions: &mut Vec<Action>) {
        debug_assert!(!self.begun);
        if matches!(self.state, State::Draining { .. }) {
            actions.push(Action::Withdraw);
        }
        self.end(Outcome::NotBegun { why }, actions);
    }

    /// A user's wish to go back is met by going on, when that is less: everything is listed, and fewer keys are left than would have to come back.
    fn user_rolls_back(&mut self, actions: &mut Vec<Action>) {
        let left = self.under_way();
        let is_calm = self.source.era + self.target.era == 0 && self.usable(Side::Source) && self.usable(Side::Target);
        if self.state == State::Moving && self.list_ended && left < self.away.len() && is_calm {
            actions.push(Action::Report { text: format!("nearly done: {left} keys at most are left, so the leg goes on to its end") });
            return;
        }
        self.roll_back("it was told to end".to_owned(), actions);
    }

    fn is_lost(&self, side: Side) -> bool {
        matches!(self.link(side).state, LinkState::Down { .. })
    }

    /// Whoever waits for a node that does not answer is told so. If only the target is lost, the leg goes back: what the source has is served there.
    fn refuse_if_lost(&mut self, now_us: u64, actions: &mut Vec<Action>) {
        let lost = [Side::Source, Side::Target].into_iter().find_map(|side| match self.link(side).state {
            LinkState::Down { since_us } if now_us.saturating_sub(since_us) >= LOST_PATIENCE_US => Some((side, since_us)),
            _ => None,
        });
        let Some((side, since_us)) = lost else { return };
        let lost_us = now_us - since_us;
        if !self.begun {
            let waits = matches!(self.state, State::Readying | State::Meeting { .. } | State::Draining { .. });
            if lost_us >= PREPARE_PATIENCE_US && waits {
                let name = name(side);
                self.give_up(format!("the {name} did not answer for {} s", lost_us / 1_000_000), actions);
            }
            return;
        }
        if side == Side::Target && !self.rolls_back && self.back.is_none() {
            if lost_us >= TARGET_PATIENCE_US {
                self.roll_back(format!("the target has not answered for {} s", lost_us / 1_000_000), actions);
            }
            return;
        }
        if now_us.saturating_sub(self.last_refusal_us) < REFUSE_EVERY_US {
            return;
        }
        self.last_refusal_us = now_us;
        self.wanted.clear();
        self.wanted_set.clear();
        let name = name(side);
        let error = format!(
            "NODEDOWN the key is being moved and the {name} of the move has not answered for {} s; the command was not executed, try again",
            lost_us / 1_000_000
        );
        actions.push(Action::Refuse { keys: None, error });
    }

    /// Does what is possible now.
    fn advance(&mut self, now_us: u64, actions: &mut Vec<Action>) {
        match self.state {
            State::Readying => {
                self.purge(actions);
                let is_lost = self.is_lost(Side::Target);
                if self.rolls_back && is_lost {
                    self.announce_rollback(actions);
                } else if self.begun && self.back.is_some() && is_lost {
                    self.record_rollback(BTreeSet::new(), actions);
                } else if self.usable_or_given_up(Side::Source) && self.usable(Side::Target) {
                    if self.rolls_back {
                        self.announce_rollback(actions);
                    } else {
                        self.state = State::Draining { since_us: now_us };
                        actions.push(Action::Announce);
                        if self.planted.is(Bug::NoDrain) {
                            self.drained(actions);
                        }
                    }
                }
            }
            State::Draining { since_us } => {
                self.purge(actions);
                if !self.begun && now_us.saturating_sub(since_us) > self.orders.drain_patience_us {
                    let ms = self.orders.drain_patience_us / 1000;
                    self.give_up(format!("commands sent to the source earlier were not answered within {ms} ms"), actions);
                }
            }
            State::Moving => {
                self.purge(actions);
                self.drive_batches(now_us, actions);
                if self.back.is_some() && !self.rolls_back {
                    self.drop_what_is_not_on_record();
                    if self.is_lost(Side::Target) {
                        let never_left = self.drop_what_the_target_is_needed_for();
                        if self.batches.is_empty() {
                            self.record_rollback(never_left, actions);
                        }
                    } else if self.batches.is_empty() && self.usable(Side::Source) && self.usable(Side::Target) {
                        self.record_rollback(BTreeSet::new(), actions);
                    }
                } else if let Some(side) = self.given_up {
                    self.go_on_without(side, now_us, actions);
                } else if self.quiet == Quiet::No {
                    self.start_batches(now_us, actions);
                    self.finish(actions);
                }
            }
            State::AnnouncingRollback => self.purge(actions),
            State::Waiting | State::Meeting { .. } | State::Starting { .. } | State::RecordingRollback { .. } => {}
            State::Ending { .. } | State::HandingOver | State::Ended => {}
        }
        if self.quiet == Quiet::Asked && (self.batches.is_empty() || self.planted.is(Bug::FlushWithoutQuiet)) && self.state != State::Ended
        {
            self.quiet = Quiet::Reached;
            actions.push(Action::Quiet);
        }
    }

    fn purge(&mut self, actions: &mut Vec<Action>) {
        if self.purging.is_some() {
            return;
        }
        // What the source may keep depends on whether the target is who it was.
        let dirty = [Side::Target, Side::Source].into_iter().find(|side| {
            let comes_first = *side == Side::Target || self.usable_or_given_up(Side::Target);
            self.link(*side).dirt != Dirt::None && self.link(*side).state == LinkState::Up && comes_first
        });
        let Some(side) = dirty else { return };
        let wrong = match (side, self.target.dirt) {
            (Side::Target, Dirt::Left) => {
                Wrong::These(Arc::new(self.left.iter().filter(|key| !self.away.contains_key(key)).copied().collect()))
            }
            (Side::Target, _) => Wrong::AllBut(self.away_now()),
            (Side::Source, _) => {
                Wrong::These(Arc::new(self.away.iter().filter(|(_, eras)| self.is_stale(eras)).map(|(key, _)| *key).collect()))
            }
        };
        self.purging = Some(side);
        actions.push(Action::Purge { side, wrong });
    }

    fn purged(&mut self) {
        if let Some(side) = self.purging.take() {
            self.link_mut(side).dirt = Dirt::None;
        }
    }

    fn drained(&mut self, actions: &mut Vec<Action>) {
        match self.state {
            State::Draining { .. } if self.begun => {
                self.state = State::Moving;
                self.progress.phase = Phase::Moving;
            }
            State::Draining { .. } => {
                let Orders { move_id, leg, .. } = self.orders;
                let record = self.record(Record::LegMoving { move_id, leg }, actions);
                self.state = State::Starting { record };
                self.progress.phase = Phase::Moving;
            }
            State::AnnouncingRollback => {
                self.state = State::Moving;
                self.relist(Side::Target, actions);
            }
            _ => {}
        }
    }

    /// All keys are there: the slots may be handed over.
    fn finish(&mut self, actions: &mut Vec<Action>) {
        let usable = self.usable(Side::Source) && self.usable(Side::Target);
        let early = self.planted.is(Bug::HandOverWithKeysLeft);
        if !usable || !(self.list_ended || early) || !self.listed.is_empty() || !self.wanted.is_empty() || !self.batches.is_empty() {
            return;
        }
        let owner = self.to();
        self.record_end(actions);
        if self.planted.is(Bug::HandOverBeforeRecord) {
            self.state = State::HandingOver;
            actions.push(Action::HandOver { to: owner });
        }
    }

    fn record_end(&mut self, actions: &mut Vec<Action>) {
        let Orders { move_id, leg, .. } = self.orders;
        let record = self.record(Record::LegEnded { move_id, leg, owner: self.to() }, actions);
        self.state = State::Ending { record };
        self.progress.phase = Phase::Releasing;
    }

    /// What is listed or wanted, and in batches.
    fn under_way(&self) -> usize {
        self.listed.len() + self.wanted.len() + self.batches.values().map(|batch| batch.keys.len()).sum::<usize>()
    }
}

const fn name(side: Side) -> &'static str {
    match side {
        Side::Source => "source",
        Side::Target => "target",
    }
}

impl Machine for Leg {
    fn step(&mut self, event: Event, now_us: u64, actions: &mut Vec<Action>) {
        if self.state == State::Ended {
            return;
        }
        match event {
            Event::Met { source, target } => self.met(source, target, actions),
            Event::Recorded(number) => self.recorded(number, actions),
            Event::Drained => self.drained(actions),
            Event::Purged => self.purged(),
            Event::Listed { keys, end } => self.listed(keys, end),
            Event::Wanted { keys } => self.want(keys, actions),
            Event::Copied { batch, outcomes } => self.batch_copied(batch, &outcomes, now_us, actions),
            Event::Stored { batch, outcomes } => self.batch_stored(batch, &outcomes, now_us, actions),
            Event::Secured { batch, refused } => self.batch_secured(batch, refused, now_us, actions),
            Event::Removed { batch } => self.batch_removed(batch, actions),
            // An answer to what this protocol does not ask.
            Event::Migrated { .. } => debug_assert!(false, "nothing was migrated"),
            Event::Lost { side } => self.lost(side, now_us, actions),
            Event::Restored { side, process } => {
                if matches!(self.link(side).state, LinkState::Down { .. }) && self.given_up != Some(side) {
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
            Event::Quiesce => self.quiet = Quiet::Asked,
            Event::Resume => self.quiet = Quiet::No,
            Event::Pace(pace) => self.pace = Pace { batch_keys: pace.batch_keys.max(1), ..pace },
            Event::RollBack => self.user_rolls_back(actions),
            Event::GiveUp { side } => self.user_gives_up(side, actions),
            Event::Tick => self.refuse_if_lost(now_us, actions),
        }
        self.advance(now_us, actions);
    }

    fn progress(&self) -> Progress {
        let goes_back = self.rolls_back || self.back.is_some();
        let left = if goes_back { self.away.len() } else { self.under_way() };
        Progress { left: left as u64, given_up: self.given_up, ..self.progress }
    }
}
