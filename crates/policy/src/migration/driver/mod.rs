//! A running leg: the machine of its protocol, and all decisions around it. Listing, purges, publishing to workers, the
//! drain and the hand-over are the same for all protocols.
//!
//! Consumes events ([`DriverEvent`]) and returns actions ([`DriverAction`]); no call blocks. The movers of the router
//! and of the simulator execute the actions and report the results. Values of keys do not pass through here: a batch is
//! a number, and the mover holds its values.

mod listing;

use std::collections::{BTreeSet, VecDeque};
use std::ops::RangeInclusive;
use std::sync::Arc;

use self::listing::{Listing, Purge, Walk};
use super::injected::{Bug, InjectedBug};
use super::published::Paper;
use super::record::OpenLeg;
use super::{
    Action, DoubleRead, Event, Fingerprint, Fingerprinter, Io, Key, Leg, LegOrder, Machine, Precopy, Process, Progress,
    Protocol, Record, Side, StopAndCopy, is_temporary,
};
use crate::topology::{SLOT_NUMBERS, Topology};

/// Delay before a failed publication is retried, microseconds.
const PUBLISH_RETRY_US: u64 = 50_000;
/// Delay before a failed write of the topology is retried, microseconds.
const HAND_OVER_RETRY_US: u64 = 500_000;
/// Maximum number of keys per removal.
const REMOVE_KEYS_MAX: usize = 1000;

/// Initial state of a [`Driver`].
#[derive(Debug)]
pub struct Begin {
    /// Protocol of the move.
    pub protocol: Protocol,
    /// Published variant of the protocol, if requested.
    pub paper: Option<Paper>,
    /// Parameters of the leg.
    pub orders: LegOrder,
    /// Hash of keys, shared with the workers.
    pub fingerprints: Fingerprinter,
    /// State that an earlier router left.
    pub resume: Option<OpenLeg>,
    /// The only keys of the slots that move; `None`: all.
    pub keys: Option<Vec<Key>>,
    /// Databases that may have keys of the leg.
    pub databases: Vec<u32>,
    /// `run_id` of the source process whose keys the mover has listed; later writes are added to that list. Another
    /// process may have keys that this one did not have.
    pub listed_run_id: Option<String>,
    /// Whether the target has no keys of the leg's slots.
    pub target_is_clean: bool,
}

/// Input of a [`Driver`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DriverEvent {
    /// Event for the protocol: a batch result, requested keys, or a user request.
    Of(Event),
    /// [`DriverAction::Record`] with these numbers is durable.
    Recorded(RangeInclusive<u64>),
    /// [`DriverAction::Publish`] is done, under this epoch; `None`: publishing is not possible now.
    Published(Option<u64>),
    /// The condition of [`Driver::barrier`] holds. Writes have stopped, so the databases with keys are final.
    Drained {
        /// Database numbers.
        databases: Vec<u32>,
    },
    /// Reply to [`DriverAction::TakeListed`]: more keys, and whether they are the last; `None`: the list is unreliable.
    Taken(Option<(Vec<Key>, bool)>),
    /// [`DriverAction::Unlink`] is done.
    Unlinked {
        /// Number of the purge's scan.
        walk: u32,
    },
    /// See [`Event::Lost`].
    Lost {
        /// Side of the connection.
        side: Side,
    },
    /// See [`Event::Reconnected`].
    Restored {
        /// Side of the connection.
        side: Side,
        /// Process now serving at that side.
        process: Process,
        /// Databases that may have keys of the leg.
        databases: Vec<u32>,
    },
    /// [`DriverAction::CatchUp`] is done.
    CaughtUp,
    /// [`DriverAction::HandOver`] is done, or failed (`false`).
    HandedOver(bool),
    /// Time passes: sent at least every 10 ms.
    Tick,
}

impl From<Event> for DriverEvent {
    fn from(event: Event) -> Self {
        Self::Of(event)
    }
}

/// Output of a [`Driver`], executed in order. See [`Action`] for the requests of a protocol.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DriverAction {
    /// Make the records durable in one write; [`DriverEvent::Recorded`] follows.
    Record {
        /// Record numbers.
        numbers: RangeInclusive<u64>,
        /// Records, one per number.
        records: Vec<Record>,
    },
    /// Key state for the next [`DriverAction::Publish`]: no key is committed, and either keys go to the target, or the
    /// keys in `away` return and all others are at the source.
    View {
        /// Keys that return to the source.
        away: Option<Arc<BTreeSet<Fingerprint>>>,
        /// Permits reads of keys in transit at both sides, under its condition.
        double_read: Option<Arc<DoubleRead>>,
    },
    /// Publish the state to every worker; [`DriverEvent::Published`] follows.
    Publish,
    /// Publish again that the source serves and writes are reported; [`DriverEvent::Published`] follows.
    Observe,
    /// Publish to every worker that the slots do not move.
    Withdraw,
    /// Send one SCAN; [`Driver::scanned`] follows.
    Scan {
        /// Scan number.
        walk: u32,
        /// Side to scan.
        side: Side,
        /// Database number.
        database: u32,
        /// SCAN cursor.
        cursor: Vec<u8>,
    },
    /// Remove unexpected keys; [`DriverEvent::Unlinked`] follows.
    Unlink {
        /// Number of the purge's scan.
        walk: u32,
        /// Side to remove from.
        side: Side,
        /// Database number.
        database: u32,
        /// Keys to remove.
        keys: Vec<Key>,
    },
    /// Return more keys of the list; [`DriverEvent::Taken`] follows.
    TakeListed,
    /// All keys are committed, also keys never listed.
    CommitAll,
    /// [`Action::Confirm`]; [`Event::Confirmed`] follows.
    Confirm {
        /// Side to query.
        side: Side,
    },
    /// Connect to that side again; [`DriverEvent::Reconnected`] follows eventually.
    Reconnect {
        /// Side to reconnect.
        side: Side,
    },
    /// Wait until the readable replicas of that side have the moved keys; [`DriverEvent::CaughtUp`] follows.
    CatchUp {
        /// Side of the replicas.
        side: Side,
    },
    /// Store and publish the topology in which that side owns the slots; [`DriverEvent::HandedOver`] follows.
    HandOver {
        /// New owner.
        to: Side,
    },
    /// The leg changes direction: discard values read and staged. [`DriverAction::View`] follows.
    RollBack {
        /// Reason, for display.
        why: String,
    },
    /// [`Action::Lost`].
    Lost {
        /// Side that was given up.
        side: Side,
        /// Maximum set of lost keys.
        keys: Vec<Fingerprint>,
    },
    /// Request of the protocol. Only [`Io::QuiesceState`] may follow [`Io::End`].
    Io(Io),
}

/// Drain condition of a leg: every worker has adopted this epoch, and nothing sent to `side` under an earlier epoch is
/// in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Barrier {
    /// Epoch that all workers must adopt.
    pub epoch: u64,
    /// Side that serves the keys until then.
    pub side: Side,
    /// `side` was given up: only commands whose clients still wait count as in flight.
    pub is_lost: bool,
}

/// Progress of publishing to the workers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum PublishState {
    Nothing,
    Requested(Stage),
    Retry { stage: Stage, at_us: u64 },
    Draining { epoch: u64 },
}

/// State of the slots, as published to the workers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Observed,
    Moving,
}

/// Progress of the hand-over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum HandoverState {
    Nothing,
    CatchingUp { to: Side },
    Requested { to: Side },
    Again { to: Side, at_us: u64 },
}

/// State machine of a running leg.
pub struct Driver {
    machine: Box<dyn Machine>,
    planted: InjectedBug,
    fingerprints: Fingerprinter,
    /// Indexed by slot.
    is_in_leg: Vec<bool>,
    keys: Option<Vec<Key>>,
    databases: Vec<u32>,
    inbox: VecDeque<Event>,
    /// Number of durable records, from the first.
    recorded: u64,
    /// Workers use committed keys there.
    to: Side,
    is_up: [bool; 2],
    publishing: PublishState,
    handover: HandoverState,
    listing: Listing,
    listed_of: Option<String>,
    listed: VecDeque<Key>,
    /// List requests of the protocol, as numbers of keys.
    lists: VecDeque<u32>,
    purge: Option<Purge>,
    walks: u32,
    /// Nothing was stored at the target, and its content is known.
    target_is_clean: bool,
    is_over: bool,
}

impl Driver {
    /// Creates a leg. Its first event must be [`Event::Met`].
    #[must_use]
    pub fn new(begin: Begin) -> Self {
        Self::planted(begin, InjectedBug::default())
    }

    /// [`Driver::new`] with an injected bug, for tests of the simulator.
    #[cfg(feature = "planted-bugs")]
    #[must_use]
    pub fn with(begin: Begin, bug: Option<Bug>) -> Self {
        Self::planted(begin, InjectedBug::new(bug))
    }

    fn planted(begin: Begin, planted: InjectedBug) -> Self {
        let Begin {
            protocol,
            paper,
            orders,
            fingerprints,
            resume,
            keys,
            databases,
            listed_run_id: listed_of,
            target_is_clean,
        } = begin;
        let mut is_ours = vec![false; SLOT_NUMBERS];
        orders.slots.iter().for_each(|slot| is_ours[slot.index()] = true);
        // Keys named by the move replace the list.
        let listing = match (&keys, &listed_of) {
            (Some(_), _) => Listing::Named,
            (None, Some(_)) => Listing::Prepared { asked: false },
            (None, None) => Listing::Walked(Walk::new(0, Side::Source, &databases)),
        };
        let machine: Box<dyn Machine> = match (paper, protocol) {
            (Some(paper), _) => paper.machine(protocol, orders, fingerprints, resume.as_ref()),
            (None, Protocol::Switchyard | Protocol::Bloom) => {
                Box::new(<Leg>::new(orders, fingerprints, resume).planted(planted))
            }
            (None, Protocol::Rocksteady) => {
                Box::new(<Leg>::new(orders, fingerprints, resume).pulling(super::rocksteady::PULLS).planted(planted))
            }
            (None, Protocol::NetMigrate) => {
                Box::new(<Leg>::new(orders, fingerprints, resume).reading_both(0).planted(planted))
            }
            (None, Protocol::Fulva) => Box::new(
                <Leg>::new(orders, fingerprints, resume).reading_both(super::fulva::FETCH_ONE_IN).planted(planted),
            ),
            (None, Protocol::StopAndCopy) => {
                Box::new(Leg::<StopAndCopy>::new(orders, fingerprints, resume).planted(planted))
            }
            (None, Protocol::Source) => Box::new(Precopy::new(orders, true, fingerprints, resume).planted(planted)),
            (None, Protocol::FreezeAndCopy) => {
                Box::new(Precopy::new(orders, false, fingerprints, resume).planted(planted))
            }
        };
        Self {
            machine,
            planted,
            fingerprints,
            is_in_leg: is_ours,
            keys,
            databases,
            inbox: VecDeque::new(),
            recorded: 0,
            to: Side::Target,
            is_up: [true; 2],
            publishing: PublishState::Nothing,
            handover: HandoverState::Nothing,
            listing,
            listed_of,
            listed: VecDeque::new(),
            lists: VecDeque::new(),
            purge: None,
            walks: 0,
            target_is_clean,
            is_over: false,
        }
    }

    /// Returns the progress of the leg.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.machine.progress()
    }

    /// Slots of the leg, as flags indexed by slot.
    #[must_use]
    pub fn is_ours(&self) -> &[bool] {
        &self.is_in_leg
    }

    /// Databases that may have keys of the leg.
    #[must_use]
    pub fn databases(&self) -> &[u32] {
        &self.databases
    }

    /// Whether the leg returns to the source.
    #[must_use]
    pub const fn is_returning(&self) -> bool {
        matches!(self.to, Side::Source)
    }

    /// Whether nothing was stored at the target and its content is known.
    #[must_use]
    pub const fn target_is_clean(&self) -> bool {
        self.target_is_clean
    }

    /// Drain condition, while the leg waits for workers.
    #[must_use]
    pub fn barrier(&self) -> Option<Barrier> {
        let PublishState::Draining { epoch } = self.publishing else { return None };
        let side = self.to.other();
        Some(Barrier { epoch, side, is_lost: self.machine.progress().given_up == Some(side) })
    }

    /// Handles an event at `now_us` (microseconds on any monotonic clock) and appends the resulting actions.
    pub fn step(&mut self, what: DriverEvent, now_us: u64, out: &mut Vec<DriverAction>) {
        match what {
            DriverEvent::Of(event) => {
                if let Event::Met { source, .. } = &event
                    && self.listed_of.as_ref() != Some(&source.run_id)
                {
                    // Only a scan after the drain counts; the protocol requests no keys before.
                    self.taken(None);
                }
                self.inbox.push_back(event);
            }
            DriverEvent::Recorded(numbers) => {
                // The protocol treats the last number as covering all. A record out of order must not count, because
                // the next start reads the journal in order.
                assert_eq!(*numbers.start(), self.recorded + 1, "records of a leg are durable in their order");
                self.recorded = *numbers.end();
                self.inbox.push_back(Event::Recorded(self.recorded));
            }
            DriverEvent::Published(epoch) => {
                if let PublishState::Requested(stage) = self.publishing {
                    let again = PublishState::Retry { stage, at_us: now_us + PUBLISH_RETRY_US };
                    self.publishing = epoch.map_or(again, |epoch| PublishState::Draining { epoch });
                }
            }
            DriverEvent::Drained { databases } if matches!(self.publishing, PublishState::Draining { .. }) => {
                self.publishing = PublishState::Nothing;
                self.listing.restart_with(&databases);
                self.databases = databases;
                self.inbox.push_back(Event::Drained);
            }
            DriverEvent::Drained { .. } => {}
            DriverEvent::Taken(taken) => self.taken(taken),
            DriverEvent::Unlinked { walk } => {
                if let Some(purge) = self.purge.as_mut().filter(|purge| purge.walk.number == walk) {
                    purge.removals = purge.removals.saturating_sub(1);
                }
            }
            DriverEvent::Lost { side } => {
                self.is_up[side as usize] = false;
                self.listing.lost(side);
                self.purge.take_if(|purge| purge.walk.side == side);
                self.target_is_clean &= side == Side::Source;
                self.inbox.push_back(Event::Lost { side });
            }
            DriverEvent::Restored { side, process, databases } => {
                self.is_up[side as usize] = true;
                if !self.planted.is(Bug::WalkedWhileAway) {
                    self.listing.add_databases(&databases);
                }
                self.databases = databases;
                self.inbox.push_back(Event::Reconnected { side, process });
            }
            DriverEvent::CaughtUp => {
                if let HandoverState::CatchingUp { to } = self.handover {
                    self.hand_over(to, out);
                }
            }
            DriverEvent::HandedOver(is_done) => {
                if let HandoverState::Requested { to } = self.handover {
                    match is_done {
                        true => self.inbox.push_back(Event::HandedOver),
                        false => self.handover = HandoverState::Again { to, at_us: now_us + HAND_OVER_RETRY_US },
                    }
                }
            }
            DriverEvent::Tick => {
                self.check_deadlines(now_us, out);
                self.inbox.push_back(Event::Tick);
            }
        }
        self.advance(now_us, out);
    }

    /// Handles the keys and the next cursor of a [`DriverAction::Scan`]. `topology`: the current one.
    pub fn scanned<'k>(
        &mut self,
        walk: u32,
        cursor: &[u8],
        keys: impl Iterator<Item = &'k [u8]>,
        topology: &Topology,
        now_us: u64,
        out: &mut Vec<DriverAction>,
    ) {
        // A key with a placement override does not move with its slot.
        let purge = self.purge.as_mut().filter(|purge| purge.walk.number == walk);
        let ignored = if purge.is_some() { Bug::OverridePurged } else { Bug::OverrideTaken };
        let moves = |key: &[u8]| topology.placement_override(key).is_none() || self.planted.is(ignored);
        let forgets = self.planted.is(if purge.is_some() { Bug::SlotNotPurged } else { Bug::SlotForgotten });
        let last = || {
            self.is_in_leg.iter().rposition(|is_ours| *is_ours).filter(|last| self.is_in_leg[..*last].contains(&true))
        };
        let forgotten = forgets.then(last).flatten();
        let is_ours = |slot: usize| self.is_in_leg[slot] && forgotten != Some(slot);
        let ours: Vec<Key> = keys
            .filter(|key| is_ours(topology.slot_of(key).index()) && !is_temporary(key) && moves(key))
            .map(Key::from)
            .collect();
        if let Some(purge) = purge {
            let fingerprints = self.fingerprints;
            out.extend(purge.scanned(cursor, ours, |key| fingerprints.of(key)));
        } else if self.listing.scanned(walk, cursor) {
            self.listed.extend(ours);
        }
        self.advance(now_us, out);
    }

    fn check_deadlines(&mut self, now_us: u64, out: &mut Vec<DriverAction>) {
        if let PublishState::Retry { stage, at_us } = self.publishing
            && now_us >= at_us
        {
            self.publish(stage, out);
        }
        if let HandoverState::Again { to, at_us } = self.handover
            && now_us >= at_us
        {
            self.hand_over(to, out);
        }
    }

    /// Delivers queued events, then advances scans and lists, until nothing changes.
    fn advance(&mut self, now_us: u64, out: &mut Vec<DriverAction>) {
        loop {
            while let Some(event) = self.inbox.pop_front() {
                self.step_machine(event, now_us, out);
            }
            if self.is_over {
                return;
            }
            self.walk(out);
            self.serve_lists(out);
            if self.inbox.is_empty() {
                return;
            }
        }
    }

    /// Steps the protocol. All records of one step become durable together.
    fn step_machine(&mut self, event: Event, now_us: u64, out: &mut Vec<DriverAction>) {
        let mut actions = Vec::new();
        self.machine.step(event, now_us, &mut actions);
        let mut first: Option<usize> = None;
        for action in actions {
            match action {
                Action::Record { number, record } => {
                    if let Some(DriverAction::Record { numbers, records }) = first.and_then(|at| out.get_mut(at)) {
                        *numbers = *numbers.start()..=number;
                        records.push(record);
                    } else {
                        first = Some(out.len());
                        out.push(DriverAction::Record { numbers: number..=number, records: vec![record] });
                    }
                }
                other => self.execute(other, out),
            }
        }
    }

    fn execute(&mut self, action: Action, out: &mut Vec<DriverAction>) {
        let what = match action {
            Action::Record { .. } => return,
            Action::Announce { double_read } => {
                self.to = Side::Target;
                out.push(DriverAction::View { away: None, double_read });
                return self.publish(Stage::Moving, out);
            }
            Action::RollBack { why, away } => {
                self.to = Side::Source;
                out.extend([
                    DriverAction::RollBack { why },
                    DriverAction::View { away: Some(away), double_read: None },
                ]);
                return self.publish(Stage::Moving, out);
            }
            Action::Observe => return self.publish(Stage::Observed, out),
            Action::CommitAll => DriverAction::CommitAll,
            Action::Withdraw => {
                self.publishing = PublishState::Nothing;
                DriverAction::Withdraw
            }
            Action::Purge { side, wrong } => return self.begin_purge(side, wrong),
            Action::List { count } => return self.lists.push_back(count),
            Action::Relist { at } => return self.relist(at),
            Action::Io(io) => {
                match io {
                    Io::Store { .. } | Io::Overwrite { .. } | Io::Migrate { .. } => self.target_is_clean = false,
                    Io::End(_) => self.is_over = true,
                    _ => {}
                }
                DriverAction::Io(io)
            }
            Action::Confirm { side } => DriverAction::Confirm { side },
            Action::Reconnect { side } => DriverAction::Reconnect { side },
            Action::HandOver { to } => {
                // Clients need not wait until the topology is stored, unless workers would look for the keys at the
                // other side.
                if self.to == to || self.planted.is(Bug::CommittedAtTheOther) {
                    out.push(DriverAction::CommitAll);
                }
                self.handover = HandoverState::CatchingUp { to };
                DriverAction::CatchUp { side: to }
            }
            Action::Lost { keys } => match self.machine.progress().given_up {
                Some(side) => DriverAction::Lost { side, keys },
                None => return,
            },
        };
        out.push(what);
    }

    fn publish(&mut self, stage: Stage, out: &mut Vec<DriverAction>) {
        self.publishing = PublishState::Requested(stage);
        out.push(if stage == Stage::Moving { DriverAction::Publish } else { DriverAction::Observe });
    }

    fn hand_over(&mut self, to: Side, out: &mut Vec<DriverAction>) {
        self.handover = HandoverState::Requested { to };
        out.push(DriverAction::HandOver { to });
    }
}
