//! A leg: meeting, records, purge, repeated listing, rollback, pause and end, the same for all protocols. See the rules
//! in the parent module. The [`Work`] of a protocol handles the keys; that of the default protocol, [`batch`], moves
//! them in batches and on demand, and serves them throughout.
//!
//! Three places decide the actions of a leg: [`Leg::step`] records an event, [`Leg::advance`] does whatever the state
//! permits (it is called after every event), and [`Work`] drives the batches. There is no table of (state, event)
//! pairs: connections break in every state, and requests are repeated in the same way in all of them.
//!
//! # Location of keys: `away`
//! The map holds the keys on record as moved, each with the *process generations* of its record: how often each side
//! had changed its process before. From these follows which keys of a restarted node are wrong:
//! - The source has a key on record from an earlier generation of the source: stale, and removed ([`Action::Purge`] of
//!   the source). Exception: the target restarted as well and need not have kept the key, and it was never committed.
//!   Then it is copied again, and this is reported.
//! - The target has a key that is not on record: a leftover, removed ([`Action::Purge`] of the target) before anything
//!   is stored there.
//! - The source has a key on record from its present generation: it was not removed, so it was never committed. It
//!   moves as if it had no record.
//!   is moved as if it had not been.

mod batch;
mod given_up;
mod identity;
mod shell;

use std::collections::BTreeSet;

pub(super) use self::batch::{Batches, Pulls};
pub(super) use self::shell::LegCore;
use self::shell::{Confirmation, Link, LinkState, PurgeState, QuiesceState, State, name};
use super::injected::{Bug, InjectedBug};
use super::record::OpenLeg;
use super::{
    Action, Event, Fingerprint, Fingerprinter, Io, LegOrder, Machine, Outcome, Pace, Phase, Process, Progress, Record,
    Side,
};

/// Outage of a side after which waiting clients receive an error, microseconds.
const REFUSE_AFTER_US: u64 = 2_000_000;
/// Minimum interval between such errors, microseconds.
const REFUSE_EVERY_US: u64 = 100_000;
/// Outage of the target after which a leg goes back, microseconds. Then the source serves waiting clients from the keys
/// it still has.
const TARGET_TIMEOUT_US: u64 = 3_000_000;
/// Outage of a side after which a leg that has not started gives up, microseconds.
const PREPARE_TIMEOUT_US: u64 = 10_000_000;
/// Number of attempts of a batch that a node refuses, or that a broken connection interrupts, before the leg rolls
/// back.
const ATTEMPTS_MAX: u32 = 5;

/// Handling of keys by a protocol. The methods record an event, or take all steps that are possible now.
pub trait Work {
    /// Whether keys are served at their new place ([`Io::Commit`]), and a moving key is on record before its old copy
    /// is removed. Otherwise all keys wait for the end of the leg.
    const SERVES: bool;

    /// Handles a batch result, or requested keys.
    fn step(&mut self, leg: &mut LegCore, event: Event, now_us: u64, actions: &mut Vec<Action>);
    /// Advances the batches in flight.
    fn go_on(&mut self, leg: &mut LegCore, now_us: u64, actions: &mut Vec<Action>);
    /// Starts batches, and requests more keys of the listing.
    fn start(&mut self, leg: &mut LegCore, now_us: u64, actions: &mut Vec<Action>);
    /// Handles that all records up to `number` are durable.
    fn recorded(&mut self, leg: &mut LegCore, number: u64);
    /// Handles a broken connection to a side: repeats the interrupted requests. Returns true if they failed too often
    /// and the leg should go back.
    fn lost(&mut self, leg: &mut LegCore, side: Side) -> bool;
    /// Handles a new process at a side.
    fn restarted(&mut self, leg: &mut LegCore, side: Side);
    /// Drops batches that a rollback need not finish.
    fn drop_for_return(&mut self, _leg: &mut LegCore) {}
    /// Drops batches for a rollback without the target. Returns the keys on record that never left the source.
    fn drop_without_target(&mut self, leg: &mut LegCore) -> BTreeSet<Fingerprint>;
    /// Drops batches that need a side that is lost for good. `all`: every batch without a pending record, because the
    /// leg turns again.
    fn drop_without(&mut self, leg: &mut LegCore, all: bool);
    /// Drops the requested keys: no client waits any more.
    fn drop_requests(&mut self) {}
    /// Whether no batch exists.
    fn is_idle(&self) -> bool;
    /// Number of keys in batches and requested.
    fn keys(&self) -> usize;
}

/// State machine of a leg.
#[derive(Clone)]
pub struct Leg<W = Batches> {
    shell: LegCore,
    work: W,
}

impl<W: Work + Default> Leg<W> {
    /// Creates a leg as ordered, or resumes the open leg of an earlier router.
    #[must_use]
    pub fn new(orders: LegOrder, fingerprints: Fingerprinter, resume: Option<OpenLeg>) -> Self {
        Self { shell: LegCore::new(orders, fingerprints, resume, W::SERVES), work: W::default() }
    }
}

impl Leg {
    /// Replaces the strategy for requested keys.
    #[must_use]
    pub(super) fn pulling(self, pulls: Pulls) -> Self {
        Self { work: Batches::pulling(pulls), ..self }
    }

    /// Enables double reads; every `fetches_one_in`-th of them fetches its key (0: none).
    #[must_use]
    pub(super) fn reading_both(mut self, fetches_one_in: u32) -> Self {
        self.shell.double_reads = Some(fetches_one_in);
        self
    }
}

impl<W: Work> Leg<W> {
    /// Injects a bug, for tests of the simulator.
    #[cfg(feature = "planted-bugs")]
    #[must_use]
    pub fn with(mut self, bug: Option<Bug>) -> Self {
        self.shell.planted = InjectedBug::new(bug);
        self
    }

    pub(super) const fn planted(mut self, planted: InjectedBug) -> Self {
        self.shell.planted = planted;
        self
    }

    /// Handles the first process at each side, or the first that a resumed leg meets.
    fn met(&mut self, source: Process, target: Process, actions: &mut Vec<Action>) {
        if self.shell.state != State::Waiting {
            debug_assert!(false, "met once");
            return;
        }
        if self.shell.resumed {
            for (side, process) in [(Side::Source, source), (Side::Target, target)] {
                match self.shell.given_up == Some(side) {
                    true => self.shell.link_mut(side).state = LinkState::Down { since_us: 0 },
                    false => self.restored(side, process, actions),
                }
            }
            if self.shell.given_up == Some(Side::Target) && !self.shell.rolls_back {
                self.shell.rollback_reason.get_or_insert_with(|| given_up::why(Side::Target));
            }
            // The earlier router may have ended before its purge.
            if self.shell.target.era > 0 {
                self.shell.target.purge_state = PurgeState::Anything;
            }
            if self.shell.away.values().any(|eras| eras.source != self.shell.source.era) {
                self.shell.source.purge_state = PurgeState::Anything;
            }
            self.shell.report_doubtful_keys(actions);
            self.shell.state = State::Meeting { record: self.shell.records };
        } else {
            let LegOrder { move_id, leg, ref slots, .. } = self.shell.orders;
            let record =
                Record::LegBegun { move_id, leg, slots: slots.clone(), source: source.clone(), target: target.clone() };
            let record = self.shell.record(record, actions);
            let state = LinkState::Meeting { record };
            self.shell.source = Link { process: Some(source), state, ..Link::default() };
            self.shell.target = Link {
                process: Some(target),
                state,
                purge_state: PurgeState::anything_if(!self.shell.planted.is(Bug::NoPurge)),
                ..Link::default()
            };
            self.shell.state = State::Meeting { record };
        }
    }

    fn restored(&mut self, side: Side, process: Process, actions: &mut Vec<Action>) {
        if matches!(self.shell.state, State::Ending { .. } | State::HandingOver) {
            // The last record is written, so a further record would belong to no leg. No node is queried any more.
            return;
        }
        let LegOrder { move_id, leg, .. } = self.shell.orders;
        let record = self.shell.record(Record::Met { move_id, leg, side, process: process.clone() }, actions);
        let link = self.shell.link_mut(side);
        let changed = link.process.as_ref().is_some_and(|before| before.run_id != process.run_id);
        link.process = Some(process);
        link.state = LinkState::Meeting { record };
        if !changed {
            return;
        }
        self.shell.link_mut(side).era += 1;
        match side {
            Side::Target => {
                self.shell.target.purge_state =
                    PurgeState::anything_if(!self.shell.planted.is(Bug::NoPurgeAfterRestart));
                self.shell.rerecord_committed(actions);
            }
            Side::Source => {
                self.shell.source.purge_state = PurgeState::anything_if(
                    !self.shell.away.is_empty() && !self.shell.planted.is(Bug::PresenceIsHistory),
                );
            }
        }
        if self.shell.state == State::Waiting {
            return;
        }
        if side == Side::Source {
            self.shell.report_doubtful_keys(actions);
        }
        if side == self.shell.from() && !self.shell.planted.is(Bug::NotListedAgain) {
            self.shell.relist(side, actions);
        }
        self.work.restarted(&mut self.shell, side);
    }

    fn lost(&mut self, side: Side, now_us: u64, actions: &mut Vec<Action>) {
        if matches!(self.shell.state, State::Ended | State::Waiting)
            || matches!(self.shell.link(side).state, LinkState::Down { .. })
        {
            return;
        }
        self.shell.link_mut(side).state = LinkState::Down { since_us: now_us };
        if self.shell.purging == Some(side) {
            self.shell.purging = None;
        }
        if self.shell.confirmation == Confirmation::Requested(side) {
            self.shell.confirmation = Confirmation::No;
        }
        let is_given_up = self.work.lost(&mut self.shell, side);
        actions.push(Action::Reconnect { side });
        if is_given_up {
            self.shell.roll_back(
                format!("the {} was lost {ATTEMPTS_MAX} times in the middle of the same keys; it may refuse values as large as these", name(side)),
                actions,
            );
        }
    }

    /// Handles that all records up to `number` are durable.
    fn recorded(&mut self, number: u64, actions: &mut Vec<Action>) {
        for link in [&mut self.shell.source, &mut self.shell.target] {
            if matches!(link.state, LinkState::Meeting { record } if record <= number) {
                link.state = LinkState::Up;
            }
        }
        self.shell.given_up_record.take_if(|record| *record <= number);
        self.work.recorded(&mut self.shell, number);
        match self.shell.state {
            State::Meeting { record } if record <= number => self.shell.state = State::Readying,
            State::Starting { record } if record <= number => {
                self.shell.has_started = true;
                self.shell.state = State::Moving;
            }
            State::RecordingRollback { record } if record <= number => self.announce_rollback(actions),
            State::Ending { record } if record <= number => {
                self.shell.state = State::HandingOver;
                actions.push(Action::HandOver { to: self.shell.to() });
            }
            _ => {}
        }
    }

    fn announce_rollback(&mut self, actions: &mut Vec<Action>) {
        self.shell.rolls_back = true;
        self.shell.progress.phase = Phase::Returning;
        if !W::SERVES {
            // Workers need not know: clients keep waiting.
            self.shell.state = State::Moving;
            self.shell.relist(Side::Target, actions);
            return;
        }
        self.shell.state = State::AnnouncingRollback;
        // Waiting commands are checked again, with another result.
        self.work.drop_requests();
        // Copies without a record stay behind. Those of an earlier router are unknown.
        let is_known = !self.shell.resumed && self.shell.target.purge_state == PurgeState::None;
        self.shell.target.purge_state = if is_known { PurgeState::Left } else { PurgeState::Anything };
        let why = self.shell.rollback_reason.clone().unwrap_or_default();
        actions.push(Action::RollBack { why, away: self.shell.away_now() });
        if self.shell.planted.is(Bug::RollbackWithoutDrain) {
            self.drained(actions);
        }
    }

    /// Handles a rollback request of the user. The leg continues instead if that is less work: all keys are listed, and
    /// fewer are left than would have to return.
    fn user_rolls_back(&mut self, actions: &mut Vec<Action>) {
        let left = self.under_way();
        let is_calm = self.shell.source.era + self.shell.target.era == 0
            && self.shell.usable(Side::Source)
            && self.shell.usable(Side::Target);
        if self.shell.state == State::Moving && self.shell.list_ended && left < self.shell.away.len() && is_calm {
            actions.push(Action::Io(Io::Report {
                text: format!(
                    "nearly done: at most {left} keys are left, so the leg is finished instead of rolled back"
                ),
            }));
            return;
        }
        self.shell.roll_back("it was aborted by the user".to_owned(), actions);
    }

    /// Returns an error to clients that wait for an unreachable node. If only the target is lost, the leg goes back,
    /// and the source serves the keys it still has.
    fn refuse_if_lost(&mut self, now_us: u64, actions: &mut Vec<Action>) {
        let lost = [Side::Source, Side::Target].into_iter().find_map(|side| match self.shell.link(side).state {
            LinkState::Down { since_us } if now_us.saturating_sub(since_us) >= REFUSE_AFTER_US => {
                Some((side, since_us))
            }
            _ => None,
        });
        let Some((side, since_us)) = lost else { return };
        let lost_us = now_us - since_us;
        if !self.shell.has_started {
            let waits = matches!(self.shell.state, State::Readying | State::Meeting { .. } | State::Draining { .. });
            if lost_us >= PREPARE_TIMEOUT_US && waits {
                let name = name(side);
                self.shell.give_up(format!("the {name} did not answer for {} s", lost_us / 1_000_000), actions);
            }
            return;
        }
        if side == Side::Target && !self.shell.rolls_back && self.shell.rollback_reason.is_none() {
            if lost_us >= TARGET_TIMEOUT_US {
                self.shell.roll_back(format!("the target was not reached for {} s", lost_us / 1_000_000), actions);
            }
            return;
        }
        if now_us.saturating_sub(self.shell.last_refusal_us) < REFUSE_EVERY_US {
            return;
        }
        self.shell.last_refusal_us = now_us;
        self.work.drop_requests();
        let name = name(side);
        let error = format!(
            "NODEDOWN the key is being moved, and the move has not reached its {name} for {} s; the command was not executed, try again",
            lost_us / 1_000_000
        );
        actions.push(Action::Io(Io::Refuse { keys: None, error }));
    }

    /// Does whatever the state permits now.
    fn advance(&mut self, now_us: u64, actions: &mut Vec<Action>) {
        match self.shell.state {
            State::Readying => {
                self.shell.purge(actions);
                let is_lost = self.shell.is_lost(Side::Target);
                if !W::SERVES && self.shell.given_up.is_some() {
                    self.go_on_without(now_us, actions);
                } else if !W::SERVES && self.shell.usable(Side::Source) && self.shell.usable(Side::Target) {
                    self.announce(now_us, actions);
                } else if !W::SERVES {
                    // Wait for both sides.
                } else if self.shell.rolls_back && is_lost {
                    self.announce_rollback(actions);
                } else if self.shell.has_started && self.shell.rollback_reason.is_some() && is_lost {
                    self.shell.record_rollback(BTreeSet::new(), actions);
                } else if self.shell.usable_or_given_up(Side::Source) && self.shell.usable(Side::Target) {
                    if self.shell.rolls_back {
                        self.announce_rollback(actions);
                    } else {
                        self.announce(now_us, actions);
                    }
                }
            }
            State::Draining { since_us } => {
                self.shell.purge(actions);
                if !self.shell.has_started && now_us.saturating_sub(since_us) > self.shell.orders.drain_timeout_us {
                    let ms = self.shell.orders.drain_timeout_us / 1000;
                    self.shell
                        .give_up(format!("earlier commands got no reply from the source within {ms} ms"), actions);
                }
            }
            State::Moving => {
                self.shell.purge(actions);
                self.work.go_on(&mut self.shell, now_us, actions);
                if self.shell.rollback_reason.is_some() && !self.shell.rolls_back {
                    self.work.drop_for_return(&mut self.shell);
                    if self.shell.is_lost(Side::Target) {
                        let never_left = self.work.drop_without_target(&mut self.shell);
                        if self.work.is_idle() {
                            self.shell.record_rollback(never_left, actions);
                        }
                    } else if self.work.is_idle() && self.shell.usable(Side::Source) && self.shell.usable(Side::Target)
                    {
                        self.shell.record_rollback(BTreeSet::new(), actions);
                    }
                } else if self.shell.given_up.is_some() {
                    self.go_on_without(now_us, actions);
                } else if self.shell.quiet == QuiesceState::No {
                    self.work.start(&mut self.shell, now_us, actions);
                    self.finish(actions);
                }
            }
            State::AnnouncingRollback => self.shell.purge(actions),
            State::Waiting | State::Meeting { .. } | State::Starting { .. } | State::RecordingRollback { .. } => {}
            State::Ending { .. } | State::HandingOver | State::Ended => {}
        }
        if self.shell.quiet == QuiesceState::Requested
            && (self.work.is_idle() || self.shell.planted.is(Bug::FlushWithoutQuiet))
        {
            self.shell.quiet = QuiesceState::Reached;
            actions.push(Action::Io(Io::Quiet));
        }
    }

    fn drained(&mut self, actions: &mut Vec<Action>) {
        match self.shell.state {
            State::Draining { .. } if self.shell.has_started => {
                self.shell.state = State::Moving;
                self.shell.progress.phase = if self.shell.rolls_back { Phase::Returning } else { Phase::Moving };
                if self.shell.rolls_back {
                    self.shell.relist(Side::Target, actions);
                }
            }
            State::Draining { .. } => {
                let LegOrder { move_id, leg, .. } = self.shell.orders;
                let record = self.shell.record(Record::LegMoving { move_id, leg }, actions);
                self.shell.state = State::Starting { record };
                self.shell.progress.phase = Phase::Moving;
            }
            State::AnnouncingRollback => {
                self.shell.state = State::Moving;
                self.shell.relist(Side::Target, actions);
            }
            _ => {}
        }
    }

    /// Records the end when all keys have arrived, so that the slots are handed over.
    fn finish(&mut self, actions: &mut Vec<Action>) {
        let usable = self.shell.usable(Side::Source) && self.shell.usable(Side::Target);
        let early = self.shell.planted.is(Bug::HandOverWithKeysLeft);
        if !usable || !(self.shell.list_ended || early) || !self.shell.listed.is_empty() || self.work.keys() > 0 {
            return;
        }
        let owner = self.shell.to();
        if !early && !self.shell.is_confirmed(owner, actions) {
            return;
        }
        self.shell.record_end(actions);
        if self.shell.planted.is(Bug::HandOverBeforeRecord) {
            self.shell.state = State::HandingOver;
            actions.push(Action::HandOver { to: owner });
        }
    }

    fn announce(&mut self, now_us: u64, actions: &mut Vec<Action>) {
        self.shell.state = State::Draining { since_us: now_us };
        actions.push(Action::Announce { double_read: self.shell.double_read() });
        if self.shell.planted.is(Bug::NoDrain) {
            self.drained(actions);
        }
    }

    /// Number of keys listed, requested and in batches.
    fn under_way(&self) -> usize {
        self.shell.listed.len() + self.work.keys()
    }
}

impl<W: Work> Machine for Leg<W> {
    fn step(&mut self, event: Event, now_us: u64, actions: &mut Vec<Action>) {
        if self.shell.state == State::Ended {
            if event == Event::Quiesce {
                actions.push(Action::Io(Io::Quiet));
            }
            return;
        }
        match event {
            Event::Met { source, target } => self.met(source, target, actions),
            Event::Recorded(number) => self.recorded(number, actions),
            Event::Drained => self.drained(actions),
            Event::Purged => self.shell.purged(),
            Event::Listed { keys, end } => self.shell.listed(keys, end),
            Event::Wanted { .. }
            | Event::Copied { .. }
            | Event::Stored { .. }
            | Event::Secured { .. }
            | Event::Removed { .. }
            | Event::Migrated { .. } => self.work.step(&mut self.shell, event, now_us, actions),
            Event::Lost { side } => self.lost(side, now_us, actions),
            Event::Reconnected { side, process } => {
                if matches!(self.shell.link(side).state, LinkState::Down { .. }) && self.shell.given_up != Some(side) {
                    self.restored(side, process, actions);
                }
            }
            Event::Confirmed { side, .. } => {
                if self.shell.confirmation == Confirmation::Requested(side) {
                    self.shell.confirmation = Confirmation::Yes(side);
                }
            }
            Event::HandedOver => {
                if self.shell.state == State::HandingOver {
                    let outcome = match self.shell.rollback_reason.take() {
                        Some(why) if self.shell.rolls_back => Outcome::Returned { why },
                        _ => Outcome::Moved,
                    };
                    self.shell.end(outcome, actions);
                }
            }
            Event::Quiesce => self.shell.quiet = QuiesceState::Requested,
            Event::Resume => self.shell.quiet = QuiesceState::No,
            Event::Pace(pace) => self.shell.pace = Pace { batch_keys: pace.batch_keys.max(1), ..pace },
            Event::RollBack => self.user_rolls_back(actions),
            Event::GiveUp { side } => self.user_gives_up(side, actions),
            // Keys written before the drain are on the list.
            Event::Written { .. } | Event::Rewritten => {}
            Event::Tick => self.refuse_if_lost(now_us, actions),
        }
        self.advance(now_us, actions);
        if matches!(self.shell.confirmation, Confirmation::Yes(_)) {
            // A confirmation is valid for one step only: later actions need a new one.
            self.shell.confirmation = Confirmation::No;
        }
        debug_assert!(self.shell.state != State::Ended || self.work.is_idle(), "a leg ends without batches in flight");
    }

    fn progress(&self) -> Progress {
        let goes_back = self.shell.rolls_back || self.shell.rollback_reason.is_some();
        let away = self.shell.away.len();
        let left = if goes_back { away } else { self.under_way() };
        Progress { left: left as u64, away: away as u64, given_up: self.shell.given_up, ..self.shell.progress }
    }
}
