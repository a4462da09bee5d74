//! State of a leg that all protocols need: processes and links, records, purges, direction.
//!
//! Separate from `Leg`, so that [`super::Work`] methods can borrow it without the work itself.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use crate::migration::injected::{Bug, InjectedBug};
use crate::migration::record::{COMMITTED, OpenLeg, ProcessGenerations};
use crate::migration::{
    Action, DoubleRead, Durability, Fingerprint, FingerprintMap, Fingerprinter, Io, Key, LegOrder, Outcome, Pace,
    Phase, Process, Progress, Record, Side, UnexpectedKeys,
};

/// Limits until the first [`crate::migration::Event::Pace`].
const PACE_AT_START: Pace = Pace { batch_keys: 100, batches: 1, interval_us: 0 };

/// State of a side.
#[derive(Clone, Debug, Default)]
pub(super) struct Link {
    pub(super) process: Option<Process>,
    pub(super) state: LinkState,
    /// Process generation: number of process changes seen by the leg.
    pub(super) era: u32,
    /// Unexpected keys that must be purged before use.
    pub(super) purge_state: PurgeState,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub(super) enum PurgeState {
    #[default]
    None,
    /// Only keys that this leg stored there without a record: [`Leg::left`]. Other keys are foreign, and stay.
    Left,
    /// Any key: the process changed, or has leftovers of another router or leg.
    Anything,
}

impl PurgeState {
    pub(super) const fn anything_if(it_may_be: bool) -> Self {
        if it_may_be { Self::Anything } else { Self::None }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum LinkState {
    /// The connection is on record, and may be used.
    Up,
    /// The connection broke at that time, and a new one is requested.
    Down { since_us: u64 },
    /// No connection yet.
    #[default]
    Unmet,
    /// Connected, but not usable before this record of the connection is durable.
    Meeting { record: u64 },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// Waits for [`Event::Met`].
    Waiting,
    /// Records the processes met.
    Meeting { record: u64 },
    /// Purges nodes, before publishing to the workers.
    Readying,
    /// Waits for the drain.
    Draining { since_us: u64 },
    /// Records that the drain is complete.
    Starting { record: u64 },
    /// Keys move, forwards or back.
    Moving,
    /// Records the decision to go back.
    RecordingRollback { record: u64 },
    /// Publishes the rollback to the workers.
    AnnouncingRollback,
    /// Records that all keys are at the owner.
    Ending { record: u64 },
    /// Waits until the topology is stored.
    HandingOver,
    /// Finished.
    Ended,
}

/// Whether a side has replied since nothing is left to do. A process that restarted unnoticed may have keys that were
/// purged before, and a leg that stores nothing sends it no other request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Confirmation {
    No,
    Requested(Side),
    /// Confirmed in this step.
    Yes(Side),
}

/// A leg without the [`super::Work`] of its protocol.
#[derive(Clone)]
pub struct LegCore {
    /// Keys are served at their new place. Otherwise they wait for the end of the leg, and the location of unrecorded
    /// keys is unknown.
    pub(super) serves: bool,
    /// Enables double reads; every n-th of them fetches its key (0: none).
    pub(super) double_reads: Option<u32>,
    pub(in crate::migration) orders: LegOrder,
    pub(in crate::migration) fingerprints: Fingerprinter,
    pub(super) planted: InjectedBug,
    pub(super) state: State,
    /// The leg was started by an earlier router.
    pub(super) resumed: bool,
    /// The first drain is complete: from now on the leg ends as moved or returned.
    pub(super) has_started: bool,
    /// Reason of a planned rollback, which takes effect with `rolls_back`.
    pub(super) rollback_reason: Option<String>,
    pub(in crate::migration) rolls_back: bool,
    /// Side that is lost for good ([`given_up`]).
    pub(in crate::migration) given_up: Option<Side>,
    /// Record of that, until it is durable. Before that, the leg does nothing that a leg with both sides would not do,
    /// because after a crash it would be one.
    pub(super) given_up_record: Option<u64>,
    pub(super) source: Link,
    pub(super) target: Link,
    /// Purge in flight.
    pub(super) purging: Option<Side>,
    pub(super) records: u64,
    pub(in crate::migration) away: FingerprintMap<ProcessGenerations>,
    /// Keys that dropped batches may have stored at the target, or moved there.
    pub(in crate::migration) left: BTreeSet<Fingerprint>,
    pub(in crate::migration) listed: VecDeque<Key>,
    /// Number of list requests in flight, and how many of them belong to an earlier listing.
    pub(in crate::migration) lists: u32,
    pub(in crate::migration) lists_old: u32,
    pub(in crate::migration) list_ended: bool,
    pub(in crate::migration) pace: Pace,
    pub(super) last_refusal_us: u64,
    pub(super) quiet: QuiesceState,
    pub(super) confirmation: Confirmation,
    pub(in crate::migration) progress: Progress,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum QuiesceState {
    No,
    Requested,
    Reached,
}

impl LegCore {
    pub(super) fn new(orders: LegOrder, fingerprints: Fingerprinter, resume: Option<OpenLeg>, serves: bool) -> Self {
        let mut leg = Self {
            serves,
            double_reads: None,
            orders,
            fingerprints,
            planted: InjectedBug::default(),
            state: State::Waiting,
            resumed: false,
            has_started: false,
            rollback_reason: None,
            rolls_back: false,
            given_up: None,
            given_up_record: None,
            source: Link::default(),
            target: Link::default(),
            purging: None,
            records: 0,
            away: FingerprintMap::default(),
            left: BTreeSet::new(),
            listed: VecDeque::new(),
            lists: 0,
            lists_old: 0,
            list_ended: false,
            pace: PACE_AT_START,
            last_refusal_us: 0,
            quiet: QuiesceState::No,
            confirmation: Confirmation::No,
            progress: Progress::NONE,
        };
        // A leg that was not moving starts again: it has changed nothing, except for leftovers at the target.
        if let Some(open) = resume.filter(|open| open.moving) {
            leg.resumed = true;
            leg.has_started = true;
            leg.rolls_back = open.rolled_back.is_some();
            leg.rollback_reason = open.rolled_back;
            leg.given_up = open.given_up;
            leg.source = Link { process: Some(open.source), era: open.eras.source, ..Link::default() };
            leg.target = Link { process: Some(open.target), era: open.eras.target, ..Link::default() };
            leg.away = open.away.into_iter().collect();
        }
        leg
    }

    pub(super) const fn link(&self, side: Side) -> &Link {
        match side {
            Side::Source => &self.source,
            Side::Target => &self.target,
        }
    }

    pub(super) fn link_mut(&mut self, side: Side) -> &mut Link {
        match side {
            Side::Source => &mut self.source,
            Side::Target => &mut self.target,
        }
    }

    /// Returns the condition of double reads, if enabled and both sides are usable: neither may have outdated values.
    pub(super) fn double_read(&self) -> Option<Arc<DoubleRead>> {
        let fetches_one_in = self.double_reads.filter(|_| self.usable(Side::Source) && self.usable(Side::Target))?;
        let (source, target) = (self.source.process.as_ref()?, self.target.process.as_ref()?);
        Some(Arc::new(DoubleRead::between(source, target, fetches_one_in)))
    }

    /// Whether keys may be read, stored and removed there.
    pub(in crate::migration) fn usable(&self, side: Side) -> bool {
        let link = self.link(side);
        link.state == LinkState::Up && link.purge_state == PurgeState::None
    }

    /// Whether the leg does not wait for that side: it is usable, or lost for good.
    pub(super) fn usable_or_given_up(&self, side: Side) -> bool {
        self.usable(side) || self.is_given_up(side)
    }

    /// Whether that side is given up, and this is on record.
    pub(in crate::migration) fn is_given_up(&self, side: Side) -> bool {
        self.given_up == Some(side) && (self.given_up_record.is_none() || self.planted.is(Bug::GivenUpBeforeRecord))
    }

    /// Current origin of the keys.
    pub(in crate::migration) const fn from(&self) -> Side {
        if self.rolls_back { Side::Target } else { Side::Source }
    }

    pub(super) const fn to(&self) -> Side {
        self.from().other()
    }

    pub(in crate::migration) fn record(&mut self, record: Record, actions: &mut Vec<Action>) -> u64 {
        self.records += 1;
        actions.push(Action::Record { number: self.records, record });
        self.records
    }

    pub(super) fn end(&mut self, outcome: Outcome, actions: &mut Vec<Action>) {
        self.state = State::Ended;
        self.progress.phase = Phase::Ended;
        actions.push(Action::Io(Io::End(outcome)));
    }

    /// Records the committed keys again after a change of the target's process. Otherwise only this router would know
    /// that they belong to the new process. With the record, this survives a crash of the router, and copies at a
    /// restarted source are stale.
    pub(super) fn rerecord_committed(&mut self, actions: &mut Vec<Action>) {
        let mut keys: Vec<Fingerprint> =
            self.away.iter().filter(|(_, eras)| eras.target == COMMITTED).map(|(key, _)| *key).collect();
        keys.sort_unstable();
        let back = self.rolls_back || matches!(self.state, State::RecordingRollback { .. });
        if keys.is_empty() || back {
            return;
        }
        if self.orders.durability == Durability::Memory {
            let count = keys.len();
            actions.push(Action::Io(Io::Report {
                text: format!(
                    "the target is another process than before. Of {count} keys moved to the previous one, those that it lacks are lost: with durability memory \
                     no move waits until keys are durable (with aof and replica it does)"
                ),
            }));
        }
        let LegOrder { move_id, leg, .. } = self.orders;
        let record = self.record(Record::Committed { move_id, leg, keys }, actions);
        self.target.state = LinkState::Meeting { record };
    }

    /// Reports recorded keys that may be outdated at both nodes: never committed, as far as known, and both nodes have
    /// restarted since.
    pub(super) fn report_doubtful_keys(&self, actions: &mut Vec<Action>) {
        let doubtful = self.away.values().filter(|eras| eras.source != self.source.era && !self.is_stale(eras)).count();
        if doubtful > 0 {
            actions.push(Action::Io(Io::Report {
                text: format!(
                    "both nodes have restarted since {doubtful} keys were moved: keys that the source has and the target lacks are moved again, and may be older than the last write"
                ),
            }));
        }
    }

    /// Whether a copy at the source is stale, given the generations of the key's record.
    pub(super) fn is_stale(&self, eras: &ProcessGenerations) -> bool {
        let kept = !self.serves
            || eras.target == COMMITTED
            || eras.target == self.target.era
            || self.orders.durability == Durability::Aof;
        eras.source != self.source.era && kept
    }

    pub(super) fn relist(&mut self, at: Side, actions: &mut Vec<Action>) {
        self.listed.clear();
        self.list_ended = false;
        self.lists_old = self.lists;
        actions.push(Action::Relist { at });
    }

    /// Decides to go back. `never_left`: keys on record that the source still has, and that were used nowhere else.
    /// They are back with the decision.
    pub(super) fn record_rollback(&mut self, never_left: BTreeSet<Fingerprint>, actions: &mut Vec<Action>) {
        let LegOrder { move_id, leg, .. } = self.orders;
        let why = self.rollback_reason.clone().unwrap_or_default();
        let mut record = self.record(Record::RolledBack { move_id, leg, why }, actions);
        self.away.retain(|key, _| !never_left.contains(key));
        if !never_left.is_empty() {
            record = self.record(Record::Returned { move_id, leg, keys: never_left.into_iter().collect() }, actions);
        }
        self.state = State::RecordingRollback { record };
    }

    pub(super) fn away_now(&self) -> Arc<BTreeSet<Fingerprint>> {
        Arc::new(self.away.keys().copied().collect())
    }

    pub(super) fn listed(&mut self, keys: Vec<Key>, end: bool) {
        self.lists = self.lists.saturating_sub(1);
        if self.lists_old > 0 {
            // A reply to an earlier listing: its end does not count, and after a turn its keys are those of the other
            // side.
            self.lists_old -= 1;
            return;
        }
        self.listed.extend(keys);
        self.list_ended |= end;
    }

    pub(in crate::migration) fn roll_back(&mut self, why: String, actions: &mut Vec<Action>) {
        if self.given_up.is_some() {
            return;
        }
        match self.state {
            State::Moving | State::Starting { .. } if self.rollback_reason.is_none() => {
                self.rollback_reason = Some(why)
            }
            State::Readying if self.resumed && self.rollback_reason.is_none() => self.rollback_reason = Some(why),
            State::Draining { .. } if self.has_started && self.rollback_reason.is_none() => {
                self.rollback_reason = Some(why)
            }
            State::Waiting | State::Meeting { .. } if !self.resumed => self.give_up(why, actions),
            State::Readying | State::Draining { .. } if !self.has_started => self.give_up(why, actions),
            State::Waiting | State::Meeting { .. } if self.rollback_reason.is_none() => {
                self.rollback_reason = Some(why)
            }
            _ => {}
        }
    }

    /// Ends the leg with nothing changed.
    pub(super) fn give_up(&mut self, why: String, actions: &mut Vec<Action>) {
        debug_assert!(!self.has_started);
        if matches!(self.state, State::Draining { .. }) {
            actions.push(Action::Withdraw);
        }
        self.end(Outcome::NotBegun { why }, actions);
    }

    pub(super) fn is_lost(&self, side: Side) -> bool {
        matches!(self.link(side).state, LinkState::Down { .. })
    }

    pub(super) fn purge(&mut self, actions: &mut Vec<Action>) {
        if self.purging.is_some() {
            return;
        }
        // The target comes first: which keys the source may retain depends on the target's process.
        let dirty = [Side::Target, Side::Source].into_iter().find(|side| {
            let comes_first = *side == Side::Target || self.usable_or_given_up(Side::Target);
            self.link(*side).purge_state != PurgeState::None && self.link(*side).state == LinkState::Up && comes_first
        });
        let Some(side) = dirty else { return };
        let wrong = match (side, self.target.purge_state) {
            (Side::Target, PurgeState::Left) => UnexpectedKeys::These(Arc::new(
                self.left.iter().filter(|key| !self.away.contains_key(key)).copied().collect(),
            )),
            (Side::Target, _) => {
                UnexpectedKeys::AllBut(if self.serves { self.away_now() } else { self.may_have_moved() })
            }
            (Side::Source, _) => {
                let is_stale = |(key, eras): &(&Fingerprint, &ProcessGenerations)| {
                    self.is_stale(eras) && (self.serves || !self.left.contains(key))
                };
                UnexpectedKeys::These(Arc::new(self.away.iter().filter(is_stale).map(|(key, _)| *key).collect()))
            }
        };
        self.purging = Some(side);
        actions.push(Action::Purge { side, wrong });
    }

    pub(super) fn purged(&mut self) {
        if let Some(side) = self.purging.take() {
            self.link_mut(side).purge_state = PurgeState::None;
        }
    }

    /// Whether a side has just confirmed its process. Sends the query if necessary.
    pub(super) fn is_confirmed(&mut self, side: Side, actions: &mut Vec<Action>) -> bool {
        if self.confirmation == Confirmation::Yes(side) || self.planted.is(Bug::EndedUnconfirmed) {
            return true;
        }
        if self.confirmation != Confirmation::Requested(side) {
            self.confirmation = Confirmation::Requested(side);
            actions.push(Action::Confirm { side });
        }
        false
    }

    pub(super) fn record_end(&mut self, actions: &mut Vec<Action>) {
        let LegOrder { move_id, leg, .. } = self.orders;
        let record = self.record(Record::LegEnded { move_id, leg, owner: self.to() }, actions);
        self.state = State::Ending { record };
        self.progress.phase = Phase::Releasing;
    }

    /// Current process generations of both sides.
    pub(in crate::migration) const fn eras(&self) -> ProcessGenerations {
        ProcessGenerations { source: self.source.era, target: self.target.era }
    }

    /// Keys on record, and keys that may have moved without a record.
    pub(super) fn may_have_moved(&self) -> Arc<BTreeSet<Fingerprint>> {
        Arc::new(self.away.keys().chain(&self.left).copied().collect())
    }
}

pub(super) const fn name(side: Side) -> &'static str {
    match side {
        Side::Source => "source",
        Side::Target => "target",
    }
}
