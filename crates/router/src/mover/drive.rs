//! A leg: steps its machine with what happened, and does what it says.

use std::collections::{HashMap, VecDeque};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

use switchyard_policy::migration::staging::Storing;
use switchyard_policy::migration::{
    Action, BatchId, Event, Fingerprint, Key, Leg, Machine, Orders, Outcome, Protocol, Side, StopAndCopy, Wrong, is_temporary,
};
use switchyard_policy::topology::{NodeId, SLOT_COUNT, Slot, Stage, slot_of};
use switchyard_resp::reply;
use tracing::{debug, warn};

use super::replicas::CatchingUp;
use super::run::{Halt, Mover};
use super::side::{self, Ask, Content, Form, Use};
use super::spool::Spool;
use super::{LegView, SharedLeg, Steer, Told};
use crate::shared::Message;

/// The machine is told that time passes at least so often.
const TICK: Duration = Duration::from_millis(1);

/// Keys that nobody has are remembered in a leg as those are that have moved. After so many it ends as soon as it can.
const ABSENT_MAX: u64 = 100_000;

/// Where the keys of the leg come from.
#[derive(Debug)]
enum Listing {
    /// From the spool, as they are asked for: of the leg's slots from this one on.
    Spooled(usize),
    /// The move names them.
    Named,
    /// They are in `listed`.
    Whole,
    /// From the node, as it is walked through.
    Walked(Walk),
}

/// A walk through the keys of the leg at a node.
#[derive(Debug)]
struct Walk {
    side: Side,
    databases: Vec<u32>,
    cursor: Vec<u8>,
    /// A SCAN is under way.
    asked: bool,
    /// Removals under way.
    removals: usize,
    /// Keys to be removed, where they are known without walking.
    named: Vec<Key>,
}

impl Walk {
    fn is_over(&self) -> bool {
        self.databases.is_empty() && !self.asked && self.removals == 0 && self.named.is_empty()
    }
}

/// A leg under way.
pub(super) struct Run {
    pub(super) number: u32,
    pub(super) slots: Vec<Slot>,
    pub(super) is_ours: Vec<bool>,
    machine: Box<dyn Machine>,
    /// When batches were begun, of how many keys they are, and where these are read.
    begun: HashMap<BatchId, (Instant, usize, Side)>,
    pub(super) events: VecDeque<Event>,
    /// Records of the leg that are durable: so many from the first.
    recorded: u64,
    pub(super) view: LegView,
    /// The epoch that every worker has to know, and the node at which nothing older may be in flight.
    drain: Option<(u64, NodeId)>,
    /// The transits could not be published yet.
    publish_again: Option<Instant>,
    hand_over_again: Option<(Instant, NodeId)>,
    /// All has moved; the slots are handed over when replicas have it that may be read then.
    pub(super) catching_up: Option<CatchingUp>,
    /// What was read and is not yet gone from where it was read, of the keys that are there: it may have to be stored again.
    pub(super) contents: HashMap<BatchId, Vec<(Key, Vec<Content>)>>,
    /// Batches with staged keys, as they are being stored.
    pub(super) storing: HashMap<BatchId, Storing>,
    /// Big keys of batches that are moved whole: type, bytes, why.
    pub(super) whole: HashMap<BatchId, Vec<(&'static str, u64, String)>>,
    pub(super) databases: Vec<u32>,
    /// Those of the source in which no key expires. Nobody else writes the leg's keys there once it has drained.
    lasting: Vec<u32>,
    /// What was read last were strings.
    strings: bool,
    lists: VecDeque<u32>,
    listed: VecDeque<Key>,
    listing: Listing,
    purge: Option<(Walk, Wrong)>,
    /// Something was stored at the target, or what it has is not known.
    target_touched: bool,
    next_tick: Instant,
    /// The drain was complete.
    moving_since: Option<Instant>,
    /// Keys committed.
    committed: u64,
    outcome: Option<Outcome>,
}

impl Run {
    /// The databases of a side in which no key of the leg expires.
    pub(super) fn lasting(&self, side: Side) -> &[u32] {
        if side == Side::Source { &self.lasting } else { &[] }
    }
}

impl Mover {
    /// Does a leg to its end. `fresh`: its keys are in the spool.
    pub(super) fn run_leg(
        &mut self,
        number: u32,
        slots: Vec<Slot>,
        resume: Option<switchyard_policy::migration::record::OpenLeg>,
        fresh: bool,
    ) -> Result<Outcome, Halt> {
        let databases = self.databases_in_use()?;
        let order = &self.order;
        let orders = Orders {
            move_id: order.id,
            leg: number,
            source: order.source,
            target: order.target,
            slots: slots.clone(),
            durability: order.durability,
            drain_patience_us: self.drain_patience.as_micros() as u64,
        };
        let mut is_ours = vec![false; SLOT_COUNT];
        slots.iter().for_each(|slot| is_ours[slot.index()] = true);
        let recorded = resume.as_ref().map(|open| (open.source.clone(), open.target.clone()));
        let restarted = self.source.connection.as_ref().map(|c| &c.process.run_id) != self.listed_of.as_ref();
        let whole = !fresh || restarted;
        let walk =
            Walk { side: Side::Source, databases: databases.clone(), cursor: b"0".to_vec(), asked: false, removals: 0, named: Vec::new() };
        let mut run = Run {
            number,
            is_ours,
            machine: match order.protocol {
                Protocol::Switchyard => Box::new(Leg::new(orders, order.fingerprints, resume)),
                Protocol::StopAndCopy => Box::new(StopAndCopy::new(orders, order.fingerprints, resume)),
            },
            begun: HashMap::new(),
            events: VecDeque::new(),
            recorded: 0,
            view: LegView { shared: Arc::default(), away: None, scope: self.scope_of(&slots) },
            drain: None,
            publish_again: None,
            hand_over_again: None,
            catching_up: None,
            contents: HashMap::new(),
            storing: HashMap::new(),
            whole: HashMap::new(),
            databases,
            lasting: Vec::new(),
            strings: self.strings,
            lists: VecDeque::new(),
            listed: VecDeque::new(),
            // Only what is walked through after the drain is complete counts; the machine asks for nothing before. Where keys are named they are the list.
            listing: if order.keys.is_some() {
                Listing::Named
            } else if whole {
                Listing::Walked(walk)
            } else {
                Listing::Spooled(0)
            },
            purge: None,
            target_touched: !fresh || !self.target_is_clean,
            next_tick: Instant::now(),
            moving_since: None,
            committed: 0,
            outcome: None,
            slots,
        };
        // One that is not there is met when it is there again. Until then the process is there that was, and is lost.
        let met = |end: &side::End| end.connection.as_ref().map(|connection| connection.process.clone());
        let (source_was, target_was) = recorded.unzip();
        let Some(source) = met(&self.source).or(source_was) else { return Err(Halt::Lost) };
        let Some(target) = met(&self.target).or(target_was) else { return Err(Halt::Lost) };
        run.events.push_back(Event::Met { source, target });
        let missing = [Side::Source, Side::Target].into_iter().filter(|side| self.end(*side).connection.is_none());
        run.events.extend(missing.map(|side| Event::Lost { side }));
        if self.is_aborted() {
            run.events.push_back(Event::RollBack);
        }
        run.events.extend(self.give_up.map(|side| Event::GiveUp { side }));
        self.hurry(self.is_aborted());
        run.events.push_back(Event::Pace(self.pace()));
        if !self.tickets.is_empty() {
            run.events.push_back(Event::Quiesce);
        }
        (self.source.slow, self.target.slow) = (0, 0);
        self.measure_ahead(&run.is_ours);
        let outcome = loop {
            if self.is_stopped() {
                return Err(Halt::RouterStops);
            }
            let mut busy = self.hear(&mut run);
            for side in [Side::Source, Side::Target] {
                busy |= self.take_answers(&mut run, side);
                self.restore(&mut run, side);
            }
            self.check_drain(&mut run);
            self.go_on_walking(&mut run);
            self.go_on_measuring(run.machine.progress().phase);
            self.serve_lists(&mut run);
            self.retry_publishing(&mut run);
            self.go_on_catching_up(&mut run);
            self.discard_in_leg();
            if Instant::now() >= run.next_tick {
                run.next_tick = Instant::now() + TICK;
                run.events.push_back(Event::Tick);
            }
            busy |= !run.events.is_empty();
            while let Some(event) = run.events.pop_front() {
                self.step(&mut run, event);
            }
            if let Some(outcome) = run.outcome.take() {
                break outcome;
            }
            self.show(Some(run.machine.progress()));
            self.look_at_nodes();
            if let Some(pace) = self.new_pace(run.machine.progress()) {
                run.events.push_back(Event::Pace(pace));
            }
            if !busy {
                self.wait(Duration::from_millis(1));
            }
        };
        self.hear_out();
        let progress = run.machine.progress();
        self.ended_legs(progress, outcome == Outcome::Moved, run.moving_since.map_or(Duration::ZERO, |since| since.elapsed()));
        self.shared.change_moves(|moves| {
            moves.legs.remove(&(self.order.id, number));
        });
        if !matches!(outcome, Outcome::Moved) {
            self.target_is_clean = matches!(outcome, Outcome::NotBegun { .. }) && !run.target_touched;
        }
        // Why one goes back is told where that begins.
        debug!(move_id = self.order.id.0, leg = number, slots = run.slots.len(), keys = progress.keys_moved, outcome = ?outcome, "a leg has ended");
        Ok(outcome)
    }

    /// What was asked beside the leg is answered before anything else is asked: between legs questions are alone on their connection.
    fn hear_out(&mut self) {
        let patience = self.patience();
        for side in [Side::Source, Side::Target] {
            while !self.end(side).is_idle() && !self.is_stopped() {
                match self.end_mut(side).exchange(patience) {
                    Ok(done) if done.is_empty() => self.wait(Duration::from_millis(1)),
                    Ok(done) => done.into_iter().for_each(|(ask, answers)| match ask {
                        Ask::Look => self.note_work(side, &answers),
                        // What is not known of them is asked again before their leg.
                        Ask::Sizes { page, selected } => drop(self.sizes_answered(page, selected, &answers)),
                        _ => {}
                    }),
                    Err(why) => {
                        warn!(move_id = self.order.id.0, node = self.name(self.end(side).node), why, "a mover has lost its connection");
                        self.end_mut(side).fail();
                    }
                }
            }
        }
    }

    fn step(&mut self, run: &mut Run, event: Event) {
        let mut actions = Vec::new();
        run.machine.step(event, self.now_us(), &mut actions);
        let mut records = Vec::new();
        let mut numbers: Option<RangeInclusive<u64>> = None;
        for action in actions {
            match action {
                Action::Record { number, record } => {
                    let first = numbers.map_or(number, |numbers| *numbers.start());
                    numbers = Some(first..=number);
                    records.push(record);
                }
                other => self.act(run, other),
            }
        }
        if let Some(numbers) = numbers {
            let (own, leg) = (self.own.clone(), run.number);
            self.records += records.len() as u64;
            self.order.host.record(records, Box::new(move |outcome| own.tell(Told::Recorded { leg, numbers, outcome })));
        }
    }

    fn act(&mut self, run: &mut Run, action: Action) {
        match action {
            Action::Record { .. } => {}
            Action::Announce => {
                if run.view.away.is_some() {
                    // It was going back.
                    run.view = LegView { shared: Arc::default(), away: None, scope: run.view.scope.take() };
                }
                self.announce(run);
            }
            Action::Withdraw => {
                run.drain = None;
                self.shared.change_moves(|moves| {
                    moves.legs.remove(&(self.order.id, run.number));
                });
                self.publish_observed_or_retry();
            }
            Action::Purge { side, wrong } => {
                let has_none = match &wrong {
                    Wrong::AllBut(right) => side == Side::Target && right.is_empty() && !run.target_touched,
                    Wrong::These(wrong) => wrong.is_empty(),
                };
                if has_none {
                    run.events.push_back(Event::Purged);
                } else {
                    let mut walk = self.walk_at(side);
                    if let Some(scope) = &run.view.scope {
                        // No other key of the slots is any business of this leg's.
                        walk.databases.clear();
                        let is_wrong = |key: &&Key| wrong.has(self.order.fingerprints.of(key));
                        walk.named = scope.keys.iter().filter(is_wrong).cloned().collect();
                    }
                    run.purge = Some((walk, wrong));
                }
            }
            Action::List { count } => run.lists.push_back(count),
            Action::Relist { at } => {
                run.listed.clear();
                // Who asked for keys of the listing before gets none, and nothing of the new one.
                let none = Event::Listed { keys: Vec::new(), end: false };
                run.events.extend(std::mem::take(&mut run.lists).into_iter().map(|_| none.clone()));
                run.listing = if run.view.scope.is_some() { Listing::Named } else { Listing::Walked(self.walk_at(at)) };
            }
            Action::Copy { batch, from, keys } => {
                run.contents.remove(&batch);
                run.begun.insert(batch, (Instant::now(), keys.len(), from));
                run.storing.remove(&batch);
                run.whole.remove(&batch);
                self.copy(run, batch, from, keys);
            }
            Action::Store { batch, to, keys } => {
                run.target_touched = true;
                let usage = self.usage();
                let read = run.contents.get(&batch).map(Vec::as_slice).unwrap_or_default();
                assert!(read.iter().map(|(key, _)| key).eq(&keys), "what is stored is what was read");
                let contents: Vec<(&Key, &[Content])> = read.iter().map(|(key, contents)| (key, contents.as_slice())).collect();
                let is_staged = |content: &Content| content.form == Form::Staged;
                if contents.iter().any(|(_, of_key)| of_key.iter().any(is_staged)) {
                    run.storing.insert(batch, Storing::of(keys));
                }
                self.end_mut(to).store(batch, &contents, usage);
            }
            Action::Secure { batch, at, durability } => {
                if !self.end_mut(at).secure(batch, durability) {
                    run.events.push_back(Event::Secured { batch, refused: None });
                }
            }
            Action::Remove { batch, from, keys } => {
                self.end_mut(from).remove(batch, &keys, &run.databases);
            }
            Action::Migrate { batch, from, keys } => {
                run.target_touched = true;
                let plan = self.shared.plan();
                let to = self.end(from.other()).node;
                let Some((address, access)) = plan.address_of(to, None).zip(plan.live.nodes.get(&to)) else {
                    run.events.push_back(Event::Migrated { batch, refused: Some("the other node has no address".to_owned()) });
                    return;
                };
                let databases = run.databases.clone();
                self.end_mut(from).migrate(batch, &keys, &databases, address, access);
            }
            Action::Commit { keys } => {
                let fingerprints: Vec<Fingerprint> = keys.iter().map(|key| self.order.fingerprints.of(key)).collect();
                keys.iter().for_each(|key| self.staged_is_moved(key));
                run.committed += keys.len() as u64;
                if run.committed - run.machine.progress().keys_moved.min(run.committed) > ABSENT_MAX {
                    self.hurry(true);
                }
                self.note_moved(&fingerprints, run.view.away.is_some());
                run.view.shared.commit(fingerprints);
                self.wake_workers(&run.view.shared);
            }
            Action::Refuse { keys, error } => {
                let keys = keys.map(|keys| keys.iter().map(|key| self.order.fingerprints.of(key)).collect::<Arc<[Fingerprint]>>());
                let error: Arc<str> = error.into();
                for mailbox in self.shared.mailboxes.iter() {
                    mailbox.send(Message::Refused { move_id: self.order.id, keys: keys.clone(), error: error.clone() });
                }
            }
            Action::Restore { side } => {
                self.end_mut(side).next_try.get_or_insert_with(Instant::now);
            }
            Action::HandOver { to } => {
                run.view.commit_all(to);
                self.wake_workers(&run.view.shared);
                self.catch_up(run, to);
            }
            Action::Quiet => self.say_quiet(),
            Action::RollBack { why, away } => {
                self.doing = format!("going back: {why}");
                warn!("move {}: what is under way (batch {}) goes back to its source: {why}", self.order.id.0, run.number);
                run.view = LegView { shared: Arc::new(SharedLeg::default()), away: Some(away), scope: run.view.scope.take() };
                run.contents.clear();
                run.storing.clear();
                self.staging.drop_all();
                self.announce(run);
            }
            Action::Lost { keys } => {
                let Some(side) = run.machine.progress().given_up else { return };
                self.lost = Some((side, keys.len() as u64));
                self.order.host.lost(self.order.id, self.end(side).node, &keys);
            }
            Action::Report { text } => {
                warn!(move_id = self.order.id.0, leg = run.number, "{text}");
                self.doing = text;
            }
            Action::End(outcome) => run.outcome = Some(outcome),
        }
    }

    /// Makes every worker know that the slots are moving, or going back.
    fn announce(&mut self, run: &mut Run) {
        let id = self.order.id;
        let view = run.view.clone();
        self.shared.change_moves(|moves| {
            moves.legs.insert((id, run.number), view);
        });
        let transit = |stage| self.transit(stage);
        let mut transits = vec![(transit(Stage::Moving { leg: run.number }), run.slots.clone())];
        let rest: Vec<Slot> = self.slots_left.iter().copied().filter(|slot| !run.is_ours[slot.index()]).collect();
        if self.is_listed && !rest.is_empty() {
            transits.push((transit(Stage::Observed), rest));
        }
        match self.order.host.set_transits(id, transits) {
            Ok(epoch) => {
                run.publish_again = None;
                // Where the keys are used until then.
                let node = self.end(run.view.to().other()).node;
                run.drain = Some((epoch, node));
                self.shared.want_drained(epoch);
            }
            Err(why) => {
                self.doing = format!("the topology cannot be changed now: {why}");
                run.publish_again = Some(Instant::now() + Duration::from_millis(50));
            }
        }
    }

    fn retry_publishing(&mut self, run: &mut Run) {
        if run.publish_again.is_some_and(|at| Instant::now() >= at) {
            self.announce(run);
        }
        if let Some((at, owner)) = run.hand_over_again
            && Instant::now() >= at
        {
            run.hand_over_again = None;
            self.hand_over(run, owner);
        }
    }

    pub(super) fn hand_over(&mut self, run: &Run, owner: NodeId) {
        let (own, leg) = (self.own.clone(), run.number);
        let done = Box::new(move |outcome| own.tell(Told::HandedOver { leg, owner, outcome }));
        let keys = run.view.scope.as_ref().map(|scope| &scope.keys[..]);
        self.order.host.hand_over(self.order.id, &run.slots, keys, owner, done);
    }

    fn wake_workers(&self, leg: &SharedLeg) {
        let waiting = leg.take_waiting();
        if waiting == 0 {
            return;
        }
        for (worker, mailbox) in self.shared.mailboxes.iter().enumerate() {
            if waiting & (1 << (worker % 64)) != 0 {
                mailbox.send(Message::Committed);
            }
        }
    }

    /// Takes what workers, the journal and the user say.
    fn hear(&mut self, run: &mut Run) -> bool {
        let told = self.own.take_told();
        let any = !told.is_empty();
        for what in told {
            match what {
                Told::Wanted { leg, mut keys } if leg == run.number => {
                    self.keep_own(&mut keys);
                    run.events.push_back(Event::Wanted { keys });
                }
                Told::WantedWhole { leg } if leg == run.number => {
                    self.hurry(true);
                    run.events.push_back(Event::Pace(self.pace()));
                }
                Told::Recorded { leg, numbers, outcome } if leg == run.number => match outcome {
                    Ok(()) => {
                        // The machine takes the last one for all. What is not in order is not relied upon: the next start reads what is there.
                        assert_eq!(*numbers.start(), run.recorded + 1, "records of a leg are durable in their order");
                        run.recorded = *numbers.end();
                        run.events.push_back(Event::Recorded(run.recorded));
                    }
                    Err(why) => {
                        // Whoever keeps the records tries until the router stops. Nothing of it takes effect; the next start takes the leg up.
                        tracing::error!(move_id = self.order.id.0, leg, why, "the journal of moves cannot be written: the leg waits");
                        self.doing = format!("the journal cannot be written: {why}");
                    }
                },
                Told::HandedOver { leg, owner, outcome } if leg == run.number => match outcome {
                    Ok(()) => run.events.push_back(Event::HandedOver),
                    Err(why) => {
                        self.doing = format!("the topology cannot be stored: {why}");
                        run.hand_over_again = Some((Instant::now() + Duration::from_millis(500), owner));
                    }
                },
                Told::CaughtUp { leg, outcome } if leg == run.number => self.caught_up(run, outcome),
                Told::Quiesce { from, ticket, flushes } => {
                    self.tickets.insert(ticket, from);
                    if flushes {
                        self.staging.touched_all();
                    }
                    run.events.push_back(Event::Quiesce);
                }
                Told::Unquiesce { ticket } => {
                    self.tickets.remove(&ticket);
                    if self.tickets.is_empty() {
                        run.events.push_back(Event::Resume);
                    }
                }
                Told::Steer(steer) => {
                    if self.steer(steer) {
                        self.hurry(true);
                        run.events.push_back(Event::RollBack);
                    }
                    if let Steer::GiveUp(side) = steer {
                        run.events.push_back(Event::GiveUp { side });
                    }
                    run.events.push_back(Event::Pace(self.pace()));
                }
                other => self.note(other),
            }
        }
        any
    }

    /// Takes the answers of a side.
    fn take_answers(&mut self, run: &mut Run, side: Side) -> bool {
        let patience = self.patience();
        let done = match self.end_mut(side).exchange(patience) {
            Ok(done) => done,
            Err(why) => {
                self.lose(run, side, &why);
                return true;
            }
        };
        let any = !done.is_empty();
        for (ask, answers) in done {
            if let Err(why) = self.answered(run, side, ask, answers) {
                self.lose(run, side, &why);
                // It is there, and will say the same in the next millisecond.
                self.end_mut(side).try_later();
                break;
            }
        }
        any
    }

    fn lose(&mut self, run: &mut Run, side: Side, why: &str) {
        let name = self.name(self.end(side).node);
        warn!(move_id = self.order.id.0, node = name, why, "a mover has lost its connection");
        self.doing = format!("waiting for {name}: {why}");
        self.end_mut(side).fail();
        // What was walked through stays; what was asked is asked again.
        if let Listing::Walked(walk) = &mut run.listing
            && walk.side == side
        {
            walk.asked = false;
        }
        if run.purge.as_ref().is_some_and(|(walk, _)| walk.side == side) {
            run.purge = None;
        }
        if side == Side::Target {
            run.target_touched = true;
            self.target_is_clean = false;
        }
        if side == Side::Source {
            self.cannot_read_again(run);
        }
        self.position_unknown(run, side);
        self.sizes_unknown(side);
        run.events.push_back(Event::Lost { side });
    }

    fn answered(&mut self, run: &mut Run, side: Side, ask: Ask, answers: Vec<Vec<u8>>) -> Result<(), String> {
        let refused = |answers: &[Vec<u8>]| answers.iter().find(|a| reply::is_error(a)).map(|a| super::connection::error_text(a));
        match ask {
            Ask::Copy { batch, reading } => {
                let again = reading.again;
                let read = side::copied(reading, answers)?;
                if again {
                    self.read_again(run, batch, read);
                    return Ok(());
                }
                let Some(mut read) = self.copy_others(run, batch, side, read) else { return Ok(()) };
                run.strings = read.are_strings();
                self.strings = run.strings;
                let bytes_per_key = read.bytes_per_key();
                let end = self.end_mut(side);
                end.bytes_per_key = bytes_per_key;
                end.only_one_by_one |= read.only_one_by_one;
                if self.cuts_batches() {
                    read.cut();
                }
                if let Some((_, keys, _)) = run.begun.get_mut(&batch) {
                    *keys = read.keys.len();
                }
                self.note_big(run, batch, &read);
                let there: Vec<_> = read.keys.into_iter().zip(read.contents).filter(|(_, contents)| !contents.is_empty()).collect();
                if !there.is_empty() {
                    run.contents.insert(batch, there);
                }
                run.events.push_back(Event::Copied { batch, outcomes: read.outcomes });
            }
            Ask::Store { batch, places, so_far } => {
                let (outcomes, again) = side::stored(places, so_far, &answers)?;
                self.end_mut(side).only_one_by_one |= !again.is_empty() && answers.iter().any(|answer| answer.starts_with(b"-NOPERM"));
                if again.is_empty() {
                    self.stored(run, batch, side, outcomes);
                } else {
                    // Only what is stored for the first time is stored together: that of the whole batch.
                    let read = run.contents.get(&batch).map(Vec::as_slice).unwrap_or_default();
                    assert_eq!(read.len(), outcomes.len(), "what is stored is what was read");
                    let contents: Vec<(&Key, &[Content])> = read.iter().map(|(key, contents)| (key, contents.as_slice())).collect();
                    self.end_mut(side).store_one_by_one(batch, &contents, &again, outcomes);
                }
            }
            Ask::Finish { batch, step, items } => self.staged_answered(run, batch, side, step, items, &answers),
            Ask::Discard => {}
            Ask::Position => self.position_known(run, &answers),
            Ask::Secure { batch, durability } => {
                let refused = side::secured(durability, answers.last().map(Vec::as_slice).unwrap_or_default());
                run.events.push_back(Event::Secured { batch, refused });
            }
            Ask::Remove { batch } => {
                if let Some(why) = refused(&answers) {
                    return Err(format!("it refuses to remove keys: {why}"));
                }
                // Gone from where it was read, so it need not be stored again. Else it was only cleared where it goes.
                if let Some((began, keys, _)) = run.begun.get(&batch).copied().filter(|(.., from)| *from == side) {
                    run.begun.remove(&batch);
                    run.contents.remove(&batch);
                    self.note_batch(began.elapsed(), keys);
                    for (kind, bytes, why) in run.whole.remove(&batch).unwrap_or_default() {
                        self.note_whole(kind, bytes, began.elapsed().as_micros() as u64, &why);
                    }
                    run.events.push_back(Event::Pace(self.pace()));
                }
                run.events.push_back(Event::Removed { batch });
            }
            Ask::Migrate { batch } => {
                run.contents.remove(&batch);
                // The target's own error is in the middle of the source's.
                let refused = refused(&answers).map(|why| why.find("BUSYKEY").map_or(why.clone(), |at| why[at..].to_owned()));
                run.events.push_back(Event::Migrated { batch, refused });
            }
            Ask::Scan { purges } => {
                if let Some(why) = refused(&answers) {
                    return Err(format!("it refuses SCAN: {why}"));
                }
                let answer = answers.last().map(Vec::as_slice).unwrap_or_default();
                let (cursor, keys) = side::scanned(answer).ok_or("it answered SCAN with something else than a cursor and keys")?;
                let topology = self.shared.plan().topology.clone();
                // A key that lives elsewhere than its slot does not move with it, and stays where it is.
                let is_ours = |key: &&[u8]| run.is_ours[slot_of(key).index()] && !is_temporary(key) && topology.exception(key).is_none();
                let keys = keys.into_iter().filter(is_ours).map(Key::from);
                if purges {
                    let Some((walk, wrong)) = &mut run.purge else { return Ok(()) };
                    let wrong: Vec<Key> = keys.filter(|key| wrong.has(self.order.fingerprints.of(key))).collect();
                    let database = walk.databases.last().copied().unwrap_or(0);
                    walk.take(cursor);
                    if !wrong.is_empty() {
                        walk.removals += 1;
                        self.end_mut(side).purge(&wrong, database);
                    }
                } else if let Listing::Walked(walk) = &mut run.listing
                    && walk.side == side
                    && walk.asked
                {
                    run.listed.extend(keys);
                    walk.take(cursor);
                }
            }
            Ask::Look => self.note_work(side, &answers),
            Ask::Sizes { page, selected } => return self.sizes_answered(page, selected, &answers).map_err(|why| format!("it {why}")),
            Ask::Purge => {
                if let Some(why) = refused(&answers) {
                    return Err(format!("it refuses to remove keys: {why}"));
                }
                if let Some((walk, _)) = &mut run.purge {
                    walk.removals = walk.removals.saturating_sub(1);
                }
            }
        }
        Ok(())
    }

    /// Reaches a side again that was lost.
    fn restore(&mut self, run: &mut Run, side: Side) {
        if self.end(side).connection.is_some() || self.end(side).next_try.is_none_or(|at| Instant::now() < at) {
            return;
        }
        // A leg does not end because of clocks: it waits until they are set right.
        let reached = self.reach(side).and_then(|()| self.clocks_differ().map_or(Ok(()), Err));
        match reached {
            Ok(()) => {
                if let Ok(databases) = self.databases_in_use() {
                    run.databases = databases;
                }
                // Another process may have other keys than were asked about.
                run.lasting.clear();
                self.drop_unusable(&run.is_ours);
                if let Some(connection) = &self.end(side).connection {
                    run.events.push_back(Event::Restored { side, process: connection.process.clone() });
                    self.doing = "moving".to_owned();
                }
            }
            Err(why) => {
                self.doing = format!("waiting for {}: {why}", self.name(self.end(side).node));
                self.end_mut(side).fail();
                self.end_mut(side).try_later();
            }
        }
    }

    fn check_drain(&mut self, run: &mut Run) {
        let Some((epoch, node)) = run.drain else { return };
        let given_up = run.machine.progress().given_up.map(|side| self.end(side).node);
        let has_drained = match given_up == Some(node) {
            true => self.shared.drained_of_the_lost(epoch, node),
            false => self.shared.drained_source(epoch, node),
        };
        if !has_drained {
            return;
        }
        // Which databases have keys can be told now that nothing is written; a question alone on its connection.
        if !self.source.is_idle() || !self.target.is_idle() {
            return;
        }
        match self.databases_in_use() {
            Ok(databases) => {
                run.databases.clone_from(&databases);
                // Who goes past us may give a key its time at any moment.
                if run.view.away.is_none() && !self.order.direct_clients {
                    run.lasting.clone_from(&self.lasting);
                }
                if let Listing::Walked(walk) = &mut run.listing
                    && !walk.asked
                {
                    walk.databases = databases;
                }
            }
            // A side is lost: it is found out where its answers are taken.
            Err(_) => return,
        }
        run.drain = None;
        run.moving_since = Some(Instant::now());
        run.events.push_back(Event::Drained);
    }

    fn go_on_walking(&mut self, run: &mut Run) {
        let purging = run.purge.is_some();
        if let Some((walk, _)) = &mut run.purge {
            if walk.is_over() {
                run.purge = None;
                run.events.push_back(Event::Purged);
            } else if !walk.named.is_empty() {
                if self.end(walk.side).connection.is_some() {
                    let (side, named) = (walk.side, std::mem::take(&mut walk.named));
                    for database in run.databases.iter().copied() {
                        for part in named.chunks(1000) {
                            walk.removals += 1;
                            self.end_mut(side).purge(part, database);
                        }
                    }
                }
            } else if !walk.asked
                && let Some(database) = walk.databases.last().copied()
                && self.end(walk.side).connection.is_some()
            {
                walk.asked = true;
                let (side, cursor) = (walk.side, walk.cursor.clone());
                self.end_mut(side).scan(database, &cursor, true);
            }
        }
        // As far as keys are asked for, and no faster.
        let wanted = run.lists.front().is_some_and(|count| run.listed.len() < *count as usize);
        if let Listing::Walked(walk) = &mut run.listing
            && wanted
            && !walk.asked
            && !purging
            && let Some(database) = walk.databases.last().copied()
            && self.end(walk.side).connection.is_some()
        {
            walk.asked = true;
            let (side, cursor) = (walk.side, walk.cursor.clone());
            self.end_mut(side).scan(database, &cursor, false);
        }
    }

    fn serve_lists(&mut self, run: &mut Run) {
        while let Some(count) = run.lists.front().copied() {
            if matches!(run.listing, Listing::Named) {
                let named = run.view.scope.iter().flat_map(|scope| scope.keys.iter().cloned());
                run.listed = named.collect();
                run.listing = Listing::Whole;
            }
            // Keys that nobody named may have been written until the drain, and what was told of that is heard by now.
            if matches!(run.listing, Listing::Spooled(_)) && run.slots.iter().any(|slot| self.anything.contains(slot)) {
                run.listing = Listing::Walked(Walk { databases: run.databases.clone(), ..self.walk_at(Side::Source) });
            }
            while let Listing::Spooled(from) = run.listing
                && run.listed.len() < count as usize
            {
                let slots = Spool::together(&run.slots[from..]);
                match self.spool.keys(slots) {
                    Ok(keys) => {
                        run.listed.extend(keys);
                        let next = from + slots.len();
                        run.listing = if next < run.slots.len() { Listing::Spooled(next) } else { Listing::Whole };
                    }
                    Err(error) => {
                        // The node knows its keys as well.
                        warn!(%error, "the list of keys cannot be read: the keys are listed again");
                        let databases = run.databases.clone();
                        run.listing = Listing::Walked(Walk { databases, ..self.walk_at(Side::Source) });
                    }
                }
            }
            let ended = match &run.listing {
                Listing::Whole => true,
                Listing::Walked(walk) => walk.is_over(),
                Listing::Named | Listing::Spooled(_) => false,
            };
            if !ended && run.listed.len() < count as usize {
                return;
            }
            run.lists.pop_front();
            let take = run.listed.len().min(count as usize);
            let keys: Vec<Key> = run.listed.drain(..take).collect();
            run.events.push_back(Event::Listed { keys, end: ended && run.listed.is_empty() });
        }
    }

    /// Strings are read and stored as such, where nothing is lost by it.
    pub(super) fn form(&self, run: &Run) -> Form {
        let plain = run.strings && self.usage().is_none() && !self.source.tells_changes && !self.target.tells_changes;
        if plain { Form::Plain } else { Form::Serialised }
    }

    /// A walk through a side, from its beginning.
    fn walk_at(&self, side: Side) -> Walk {
        Walk { side, databases: self.all_databases(), cursor: b"0".to_vec(), asked: false, removals: 0, named: Vec::new() }
    }

    /// How keys were used is worth asking only where both nodes keep that.
    pub(super) fn usage(&self) -> Option<Use> {
        let both = |what: &str| self.source.policy.contains(what) && self.target.policy.contains(what);
        if both("lfu") {
            Some(Use::Frequency)
        } else if both("lru") {
            Some(Use::Idle)
        } else {
            None
        }
    }
}

impl Walk {
    /// A SCAN was answered with this cursor.
    fn take(&mut self, cursor: Vec<u8>) {
        self.asked = false;
        if cursor == b"0" {
            self.databases.pop();
        }
        self.cursor = cursor;
    }
}
