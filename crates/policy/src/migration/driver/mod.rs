//! A leg under way: the machine of its protocol, and everything around it that is decided and not I/O. Listing,
//! purging, telling the workers, the drain, and handing the slots over are the same for each protocol.
//!
//! Events in ([`DriverEvent`]), actions out ([`DriverAction`]), and no call that waits. The router's mover and the simulator's do
//! what it says, and tell what came of it. Values of keys never pass through here: a batch has a number, and what was
//! read for it stays with whoever read it.

mod listing;

use std::collections::{BTreeSet, VecDeque};
use std::ops::RangeInclusive;
use std::sync::Arc;

use self::listing::{Listing, Purge, Walk};
use super::planted::{Bug, InjectedBug};
use super::published::{Paper, Published, Rules};
use super::record::OpenLeg;
use super::tracker::Pair;
use super::{
    Action, DoubleRead, Event, Fingerprint, Fingerprinter, Io, Key, Leg, Machine, Orders, Precopy, Process, Progress,
    Protocol, Record, Side, StopAndCopy, is_temporary,
};
use crate::topology::{SLOT_COUNT, Topology};

/// The workers could not be told: until the next attempt, microseconds.
const PUBLISH_AGAIN_US: u64 = 50_000;
/// The topology could not be stored: until the next attempt, microseconds.
const HAND_OVER_AGAIN_US: u64 = 500_000;
/// Keys of one removal, at most.
const REMOVED_AT_ONCE: usize = 1000;

/// What a leg begins with.
#[derive(Debug)]
pub struct Begin {
    /// How.
    pub protocol: Protocol,
    /// That protocol as it was published.
    pub paper: Option<Paper>,
    /// What.
    pub orders: Orders,
    /// Makes fingerprints.
    pub fingerprints: Fingerprinter,
    /// Where it stood when the router before this one ended.
    pub resume: Option<OpenLeg>,
    /// Only these keys of its slots move.
    pub keys: Option<Vec<Key>>,
    /// Databases that may have keys of it.
    pub databases: Vec<u32>,
    /// The process at the source (its `run_id`) of which whoever does the I/O has a list of keys, to which it adds what
    /// is written. Another process may have keys again that this one had not.
    pub listed_of: Option<String>,
    /// The target has no keys of its slots.
    pub target_is_clean: bool,
}

/// What happened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DriverEvent {
    /// Something that the protocol alone has to know: an answer about a batch, keys that are wanted, a request of the
    /// user.
    Of(Event),
    /// [`DriverAction::Record`] with these numbers is durable.
    Recorded(RangeInclusive<u64>),
    /// [`DriverAction::Publish`] is done, under this epoch; `None`: it cannot be done now.
    Published(Option<u64>),
    /// What [`Driver::barrier`] waits for is so. These databases have keys now that nothing is written.
    Drained {
        /// Their numbers.
        databases: Vec<u32>,
    },
    /// [`DriverAction::TakeListed`]: further keys, and whether there are no more; `None`: the list cannot be relied upon.
    Taken(Option<(Vec<Key>, bool)>),
    /// [`DriverAction::Unlink`] is done.
    Unlinked {
        /// Of which walk.
        walk: u32,
    },
    /// As [`Event::Lost`].
    Lost {
        /// The side.
        side: Side,
    },
    /// As [`Event::Restored`].
    Restored {
        /// The side.
        side: Side,
        /// Who answers there now.
        process: Process,
        /// Databases that may have keys of the leg.
        databases: Vec<u32>,
    },
    /// [`DriverAction::CatchUp`] is done.
    CaughtUp,
    /// [`DriverAction::HandOver`] is done, or could not be (`false`).
    HandedOver(bool),
    /// Time passes. At least every 10 ms.
    Tick,
}

impl From<Event> for DriverEvent {
    fn from(event: Event) -> Self {
        Self::Of(event)
    }
}

/// What to do, in this order. [`Action`] says more about those that the protocol asks for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DriverAction {
    /// Make these durable, all together; [`DriverEvent::Recorded`] follows.
    Record {
        /// Their numbers.
        numbers: RangeInclusive<u64>,
        /// What.
        records: Vec<Record>,
    },
    /// From the next [`DriverAction::Publish`] on: no key is committed, and keys go to the target; or `away` come back, and all
    /// others are at the source.
    View {
        /// The keys that come back.
        away: Option<Arc<BTreeSet<Fingerprint>>>,
        /// Keys on their way may be read at both sides, under this condition.
        double_read: Option<Arc<DoubleRead>>,
    },
    /// Have every worker know it; [`DriverEvent::Published`] follows.
    Publish,
    /// Publish once more that the source serves and what is written is told; [`DriverEvent::Published`] follows.
    Observe,
    /// Have every worker know that the slots are not moving.
    Withdraw,
    /// One SCAN; [`Driver::scanned`] follows.
    Scan {
        /// Of which walk.
        walk: u32,
        /// Where.
        side: Side,
        /// In which database.
        database: u32,
        /// From where on.
        cursor: Vec<u8>,
    },
    /// Remove keys that should not be there; [`DriverEvent::Unlinked`] follows.
    Unlink {
        /// Of which walk.
        walk: u32,
        /// Where.
        side: Side,
        /// In which database.
        database: u32,
        /// Which.
        keys: Vec<Key>,
    },
    /// Some more of the list; [`DriverEvent::Taken`] follows.
    TakeListed,
    /// Every key is where workers use those that are committed, also those that nobody has named.
    CommitAll,
    /// [`Action::Confirm`]; [`Event::Confirmed`] follows.
    Confirm {
        /// The side.
        side: Side,
    },
    /// Connect to that side again; [`DriverEvent::Restored`] follows, sooner or later.
    Reach {
        /// The side.
        side: Side,
    },
    /// Wait until replicas of that side that are read have what was moved; [`DriverEvent::CaughtUp`] follows.
    CatchUp {
        /// The side.
        side: Side,
    },
    /// Store and publish the topology in which that side owns the slots; [`DriverEvent::HandedOver`] follows.
    HandOver {
        /// The side.
        to: Side,
    },
    /// The leg turns: what was read or staged of keys is worth nothing. [`DriverAction::View`] follows.
    RollBack {
        /// Why, for people.
        why: String,
    },
    /// [`Action::Lost`].
    Lost {
        /// The side that was given up.
        side: Side,
        /// The keys.
        keys: Vec<Fingerprint>,
    },
    /// What the protocol asks for. After [`Io::End`] comes nothing but [`Io::Quiet`].
    Io(Io),
}

/// What a leg waits for before it goes on: every worker knows this epoch, and nothing that was sent to that side under
/// an earlier one is in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Barrier {
    /// The epoch.
    pub epoch: u64,
    /// Where the keys are used until then.
    pub side: Side,
    /// That side was given up: only answers count that a client could still get.
    pub is_lost: bool,
}

/// How far telling the workers is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum PublishState {
    Nothing,
    Requested(Stage),
    Again { stage: Stage, at_us: u64 },
    Draining { epoch: u64 },
}

/// What the workers are told of the slots.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Observed,
    Moving,
}

/// How far handing the slots over is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum HandoverState {
    Nothing,
    CatchingUp { to: Side },
    Requested { to: Side },
    Again { to: Side, at_us: u64 },
}

/// A leg under way.
pub struct Driver {
    machine: Box<dyn Machine>,
    planted: InjectedBug,
    fingerprints: Fingerprinter,
    /// By slot.
    is_ours: Vec<bool>,
    keys: Option<Vec<Key>>,
    databases: Vec<u32>,
    inbox: VecDeque<Event>,
    /// So many records from the first are durable.
    recorded: u64,
    /// Where workers use the keys that are committed.
    to: Side,
    is_up: [bool; 2],
    telling: PublishState,
    handing: HandoverState,
    listing: Listing,
    listed_of: Option<String>,
    listed: VecDeque<Key>,
    /// Asked for by the protocol: how many keys each.
    lists: VecDeque<u32>,
    purge: Option<Purge>,
    walks: u32,
    /// Nothing was stored at the target, and what it has is known.
    target_is_clean: bool,
    is_over: bool,
}

impl Driver {
    /// A leg; [`Event::Met`] is the first that it is told.
    #[must_use]
    pub fn new(begin: Begin) -> Self {
        Self::planted(begin, InjectedBug::default())
    }

    /// The same with a bug in it, for tests of the simulator.
    #[cfg(feature = "planted-bugs")]
    #[must_use]
    pub fn with(begin: Begin, bug: Option<Bug>) -> Self {
        Self::planted(begin, InjectedBug::new(bug))
    }

    fn planted(begin: Begin, planted: InjectedBug) -> Self {
        let Begin { protocol, paper, orders, fingerprints, resume, keys, databases, listed_of, target_is_clean } =
            begin;
        let mut is_ours = vec![false; SLOT_COUNT];
        orders.slots.iter().for_each(|slot| is_ours[slot.index()] = true);
        // Where keys are named they are the list.
        let listing = match (&keys, &listed_of) {
            (Some(_), _) => Listing::Named,
            (None, Some(_)) => Listing::Kept { asked: false },
            (None, None) => Listing::Walked(Walk::new(0, Side::Source, &databases)),
        };
        let machine: Box<dyn Machine> = match (paper, protocol) {
            (Some(paper), _) => {
                let rules = Rules::new(protocol, &paper, Pair::of(orders.move_id));
                Box::new(Published::new(orders, &paper, rules, fingerprints, resume.as_ref()))
            }
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
            is_ours,
            keys,
            databases,
            inbox: VecDeque::new(),
            recorded: 0,
            to: Side::Target,
            is_up: [true; 2],
            telling: PublishState::Nothing,
            handing: HandoverState::Nothing,
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

    /// How far the leg is.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.machine.progress()
    }

    /// Its slots, by number.
    #[must_use]
    pub fn is_ours(&self) -> &[bool] {
        &self.is_ours
    }

    /// Databases that may have keys of it.
    #[must_use]
    pub fn databases(&self) -> &[u32] {
        &self.databases
    }

    /// Whether it goes back.
    #[must_use]
    pub const fn goes_back(&self) -> bool {
        matches!(self.to, Side::Source)
    }

    /// Whether nothing was stored at the target, and what it has is known.
    #[must_use]
    pub const fn target_is_clean(&self) -> bool {
        self.target_is_clean
    }

    /// What it waits for, if it waits for workers.
    #[must_use]
    pub fn barrier(&self) -> Option<Barrier> {
        let PublishState::Draining { epoch } = self.telling else { return None };
        let side = self.to.other();
        Some(Barrier { epoch, side, is_lost: self.machine.progress().given_up == Some(side) })
    }

    /// Takes note of what happened at `now_us` (microseconds on any clock that does not go back) and says what to do.
    pub fn step(&mut self, what: DriverEvent, now_us: u64, out: &mut Vec<DriverAction>) {
        match what {
            DriverEvent::Of(event) => {
                if let Event::Met { source, .. } = &event
                    && self.listed_of.as_ref() != Some(&source.run_id)
                {
                    // What is walked through after the drain counts; the protocol asks for nothing before.
                    self.taken(None);
                }
                self.inbox.push_back(event);
            }
            DriverEvent::Recorded(numbers) => {
                // The protocol takes the last one for all. What is not in order is not relied upon: the next start
                // reads what is there.
                assert_eq!(*numbers.start(), self.recorded + 1, "records of a leg are durable in their order");
                self.recorded = *numbers.end();
                self.inbox.push_back(Event::Recorded(self.recorded));
            }
            DriverEvent::Published(epoch) => {
                if let PublishState::Requested(stage) = self.telling {
                    let again = PublishState::Again { stage, at_us: now_us + PUBLISH_AGAIN_US };
                    self.telling = epoch.map_or(again, |epoch| PublishState::Draining { epoch });
                }
            }
            DriverEvent::Drained { databases } if matches!(self.telling, PublishState::Draining { .. }) => {
                self.telling = PublishState::Nothing;
                self.listing.begin_with(&databases);
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
                    self.listing.goes_on_with(&databases);
                }
                self.databases = databases;
                self.inbox.push_back(Event::Restored { side, process });
            }
            DriverEvent::CaughtUp => {
                if let HandoverState::CatchingUp { to } = self.handing {
                    self.hand_over(to, out);
                }
            }
            DriverEvent::HandedOver(is_done) => {
                if let HandoverState::Requested { to } = self.handing {
                    match is_done {
                        true => self.inbox.push_back(Event::HandedOver),
                        false => self.handing = HandoverState::Again { to, at_us: now_us + HAND_OVER_AGAIN_US },
                    }
                }
            }
            DriverEvent::Tick => {
                self.look_at_deadlines(now_us, out);
                self.inbox.push_back(Event::Tick);
            }
        }
        self.go_on(now_us, out);
    }

    /// [`DriverAction::Scan`] was answered with these keys, and with the cursor to go on from. `topology`: as it is.
    pub fn scanned<'k>(
        &mut self,
        walk: u32,
        cursor: &[u8],
        keys: impl Iterator<Item = &'k [u8]>,
        topology: &Topology,
        now_us: u64,
        out: &mut Vec<DriverAction>,
    ) {
        // A key that lives elsewhere than its slot does not move with it, and stays where it is.
        let purge = self.purge.as_mut().filter(|purge| purge.walk.number == walk);
        let ignored = if purge.is_some() { Bug::ExceptionPurged } else { Bug::ExceptionTaken };
        let moves = |key: &[u8]| topology.exception(key).is_none() || self.planted.is(ignored);
        let forgets = self.planted.is(if purge.is_some() { Bug::SlotNotPurged } else { Bug::SlotForgotten });
        let last =
            || self.is_ours.iter().rposition(|is_ours| *is_ours).filter(|last| self.is_ours[..*last].contains(&true));
        let forgotten = forgets.then(last).flatten();
        let is_ours = |slot: usize| self.is_ours[slot] && forgotten != Some(slot);
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
        self.go_on(now_us, out);
    }

    fn look_at_deadlines(&mut self, now_us: u64, out: &mut Vec<DriverAction>) {
        if let PublishState::Again { stage, at_us } = self.telling
            && now_us >= at_us
        {
            self.publish(stage, out);
        }
        if let HandoverState::Again { to, at_us } = self.handing
            && now_us >= at_us
        {
            self.hand_over(to, out);
        }
    }

    /// Does what is possible now.
    fn go_on(&mut self, now_us: u64, out: &mut Vec<DriverAction>) {
        loop {
            while let Some(event) = self.inbox.pop_front() {
                self.give(event, now_us, out);
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

    /// Steps the protocol. What it records in one step is durable together.
    fn give(&mut self, event: Event, now_us: u64, out: &mut Vec<DriverAction>) {
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
                other => self.act(other, out),
            }
        }
    }

    fn act(&mut self, action: Action, out: &mut Vec<DriverAction>) {
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
                self.telling = PublishState::Nothing;
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
            Action::Restore { side } => DriverAction::Reach { side },
            Action::HandOver { to } => {
                // Clients that wait for the leg need not wait until the topology is stored; unless workers would look
                // for the keys at the other side.
                if self.to == to || self.planted.is(Bug::CommittedAtTheOther) {
                    out.push(DriverAction::CommitAll);
                }
                self.handing = HandoverState::CatchingUp { to };
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
        self.telling = PublishState::Requested(stage);
        out.push(if stage == Stage::Moving { DriverAction::Publish } else { DriverAction::Observe });
    }

    fn hand_over(&mut self, to: Side, out: &mut Vec<DriverAction>) {
        self.handing = HandoverState::Requested { to };
        out.push(DriverAction::HandOver { to });
    }
}
