//! Runs one leg: performs the actions of its driver (`switchyard_policy::migration::driver`) and reports the events.
//!
//! The steps between legs are in `run`. All decisions are in the driver, so that the simulator runs the same ones.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use switchyard_policy::migration::staging::{Event as OfStaged, Place};
use switchyard_policy::migration::{
    BatchId, Begin, Driver, DriverAction, DriverEvent, Event, Fingerprint, Io, Key, LegOrder, LegView, Outcome, Record,
    Side,
};
use switchyard_policy::topology::{NodeId, Slot, Stage};
use switchyard_resp::reply;
use switchyard_resp::units::counted;
use tracing::{debug, warn};

use super::connection::field;
use super::replicas::CatchingUp;
use super::run::{Mover, MoverExit};
use super::side::{self, Content, DurabilityResult, Form, NodeRequest, REPLICAS_TRIES, UsageKind};
use super::spool::Spool;
use super::{MoverMessage, SharedLeg, UserRequest};
use crate::shared::Message;

/// Maximum interval between two ticks of the driver.
const TICK: Duration = Duration::from_millis(1);

/// Missing keys are recorded in the leg like moved keys. Above this count the leg ends as soon as possible.
const ABSENT_MAX: u64 = 100_000;

/// A leg in progress.
pub(super) struct Run {
    pub(super) number: u32,
    pub(super) slots: Vec<Slot>,
    pub(super) driver: Driver,
    /// Events not yet passed to the driver.
    pub(super) events: VecDeque<DriverEvent>,
    /// Start, number of keys, and source side of each batch in progress.
    begun: HashMap<BatchId, (Instant, usize, Side)>,
    pub(super) view: LegView<SharedLeg>,
    /// Set after all keys have moved, while replicas that will be read catch up before the hand-over.
    pub(super) catching_up: Option<CatchingUp>,
    /// Values read and not yet removed from where they were read. Needed to store them again.
    pub(super) contents: HashMap<BatchId, Vec<(Key, Vec<Content>)>>,
    /// Big keys of batches that are moved whole: type, bytes, reason.
    pub(super) whole: HashMap<BatchId, Vec<(&'static str, u64, String)>>,
    /// Databases of the source without expiring keys. After the drain, no other client writes the leg's keys there.
    databases_without_expiry: Vec<u32>,
    /// Whether the last batch contained only strings.
    strings: bool,
    /// Number of slots already taken from the key list.
    taken: usize,
    next_tick: Instant,
    /// Set when the drain has completed.
    moving_since: Option<Instant>,
    /// Keys committed.
    committed: u64,
    /// Keys with a value already counted for the data-loss guard.
    counted: u64,
    outcome: Option<Outcome>,
}

impl Run {
    /// Returns the databases of a side in which no key of the leg expires.
    pub(super) fn lasting(&self, side: Side) -> &[u32] {
        if side == Side::Source { &self.databases_without_expiry } else { &[] }
    }

    /// Queues a protocol event for the driver.
    pub(super) fn on_event(&mut self, event: Event) {
        self.events.push_back(event.into());
    }
}

impl Mover {
    /// Runs a leg to its end.
    pub(super) fn run_leg(&mut self, number: u32, slots: Vec<Slot>) -> Result<Outcome, MoverExit> {
        let resume = self.life.open().cloned();
        self.shown.set_activity(if resume.is_some() { "resuming the open leg" } else { "moving" });
        let databases = self.databases_in_use()?;
        // A side that is not connected is represented by its last known process, marked as lost.
        let met = |end: &side::SideConnection| end.connection.as_ref().map(|connection| connection.process.clone());
        let (source_was, target_was) = resume.as_ref().map(|open| (open.source.clone(), open.target.clone())).unzip();
        let Some(source) = met(&self.source).or(source_was) else { return Err(MoverExit::Lost) };
        let Some(target) = met(&self.target).or(target_was) else { return Err(MoverExit::Lost) };
        let scope = self.scope_of(&slots);
        let order = self.life.order();
        let driver = Driver::new(Begin {
            protocol: order.how.protocol,
            paper: order.how.paper,
            orders: LegOrder {
                move_id: self.id,
                leg: number,
                source: order.source,
                target: order.target,
                slots: slots.clone(),
                durability: order.how.durability,
                drain_timeout_us: self.life.drain_timeout_us(),
            },
            fingerprints: self.fingerprints,
            resume,
            keys: scope.as_ref().map(|scope| scope.keys().to_vec()),
            databases,
            listed_run_id: self.list.of().map(str::to_owned),
            target_is_clean: self.list.target_is_clean(),
        });
        let order = self.life.order();
        let rules = order.how.paper.map(|paper| paper.rules(order.how.protocol, self.id));
        let tracker = order.how.paper.map(|paper| self.shared.tracker(&paper));
        let mut run = Run {
            number,
            driver,
            events: VecDeque::new(),
            begun: HashMap::new(),
            view: LegView::new(Arc::new(SharedLeg::tracked(tracker)), scope, self.fingerprints).as_published(rules),
            catching_up: None,
            contents: HashMap::new(),
            whole: HashMap::new(),
            databases_without_expiry: Vec::new(),
            strings: self.strings,
            taken: 0,
            next_tick: Instant::now(),
            moving_since: None,
            committed: 0,
            counted: 0,
            outcome: None,
            slots,
        };
        run.on_event(Event::Met { source, target });
        let missing = [Side::Source, Side::Target].into_iter().filter(|side| self.end(*side).connection.is_none());
        run.events.extend(missing.map(|side| DriverEvent::Lost { side }));
        if self.life.is_aborted() {
            run.on_event(Event::RollBack);
        }
        if let Some(side) = self.life.give_up() {
            run.on_event(Event::GiveUp { side });
        }
        self.pacing.hurry(self.life.is_aborted());
        run.on_event(Event::Pace(self.pacing.pace()));
        if !self.tickets.is_empty() {
            run.on_event(Event::Quiesce);
        }
        (self.source.slow, self.target.slow) = (0, 0);
        self.measure_ahead(run.driver.is_ours());
        let outcome = loop {
            if self.is_stopped() {
                return Err(MoverExit::RouterStops);
            }
            let mut busy = self.receive(&mut run);
            for side in [Side::Source, Side::Target] {
                busy |= self.take_answers(&mut run, side);
                self.restore(&mut run, side);
            }
            self.check_drain(&mut run);
            self.go_on_measuring(run.driver.progress().phase);
            self.go_on_catching_up(&mut run);
            self.discard_in_leg();
            if Instant::now() >= run.next_tick {
                run.next_tick = Instant::now() + TICK;
                run.events.push_back(DriverEvent::Tick);
            }
            busy |= !run.events.is_empty();
            while let Some(what) = run.events.pop_front() {
                let mut to_do = Vec::new();
                run.driver.step(what, self.now_us(), &mut to_do);
                self.perform(&mut run, to_do);
            }
            if let Some(outcome) = run.outcome.take() {
                break outcome;
            }
            let mut progress = run.driver.progress();
            progress.away *= u64::from(self.database_count.max(1));
            self.publish_if_due(Some(progress));
            self.look_at_nodes();
            if let Some(pace) = self.new_pace(run.driver.progress()) {
                run.on_event(Event::Pace(pace));
            }
            if !busy {
                self.wait(Duration::from_millis(1));
            }
        };
        self.await_pending_replies();
        let progress = run.driver.progress();
        self.pacing.leg_ended(&progress, run.moving_since.map_or(Duration::ZERO, |since| since.elapsed()));
        self.shown.leg_ended(&progress, outcome == Outcome::Moved);
        self.shared.change_moves(|moves| {
            moves.legs.remove(&(self.id, number));
        });
        if !matches!(outcome, Outcome::Moved | Outcome::NotBegun { .. }) {
            self.mark_target_outdated();
        }
        if !matches!(outcome, Outcome::Moved) {
            self.list.set_target_is_clean(matches!(outcome, Outcome::NotBegun { .. }) && run.driver.target_is_clean());
        }
        // The reason for a rollback is logged at its start.
        debug!(move_id = self.id.0, leg = number, slots = run.slots.len(), keys = progress.keys_moved, outcome = ?outcome, "a leg has ended");
        Ok(outcome)
    }

    /// Waits for replies of queries sent during the leg. Between legs, each query must be alone on its connection.
    fn await_pending_replies(&mut self) {
        let timeout = self.timeout();
        for side in [Side::Source, Side::Target] {
            while !self.end(side).is_idle() && !self.is_stopped() {
                match self.end_mut(side).exchange(timeout) {
                    Ok(done) if done.is_empty() => self.wait(Duration::from_millis(1)),
                    Ok(done) => done.into_iter().for_each(|(ask, answers)| match ask {
                        NodeRequest::Look => self.note_load(side, &answers),
                        // Unknown sizes are queried again before their leg.
                        NodeRequest::Sizes { page, selected } => drop(self.sizes_answered(page, selected, &answers)),
                        _ => {}
                    }),
                    Err(why) => {
                        warn!(
                            move_id = self.id.0,
                            node = self.name(self.end(side).node),
                            reason = why,
                            "a mover has lost its connection"
                        );
                        self.end_mut(side).fail();
                    }
                }
            }
        }
    }

    fn perform(&mut self, run: &mut Run, to_do: Vec<DriverAction>) {
        to_do.into_iter().for_each(|what| self.act(run, what));
    }

    fn act(&mut self, run: &mut Run, what: DriverAction) {
        match what {
            DriverAction::Record { numbers, records } => {
                let (own, leg) = (self.own.clone(), run.number);
                let databases = run.driver.databases().len() as u32;
                if databases > self.database_count
                    && records.iter().any(|record| matches!(record, Record::LegMoving { .. }))
                {
                    self.database_count = databases;
                    self.host.databases(self.id, databases);
                }
                self.shown.records(records.len());
                self.host.record(
                    records,
                    Box::new(move |outcome| own.notify(MoverMessage::Recorded { leg, numbers, outcome })),
                );
            }
            DriverAction::View { away, double_read } => {
                run.view =
                    run.view.with_direction(Arc::new(run.view.committed().empty_with_tracker()), away, double_read)
            }
            DriverAction::Publish => {
                let epoch = self.publish_leg(run);
                run.events.push_back(DriverEvent::Published(epoch));
            }
            DriverAction::Observe => {
                let epoch = self
                    .publish_observed()
                    .inspect_err(|why| debug!(reason = why, "the topology cannot be changed now"))
                    .ok();
                epoch.into_iter().for_each(|epoch| self.shared.want_drained(epoch));
                run.events.push_back(DriverEvent::Published(epoch));
            }
            DriverAction::Withdraw => {
                self.shared.change_moves(|moves| {
                    moves.legs.remove(&(self.id, run.number));
                });
                self.publish_observed_or_retry();
            }
            DriverAction::Scan { walk, side, database, cursor } => self.end_mut(side).scan(walk, database, &cursor),
            DriverAction::Unlink { walk, side, database, keys } => self.end_mut(side).purge(walk, &keys, database),
            DriverAction::TakeListed => {
                let taken = self.take_listed(run);
                run.events.push_back(DriverEvent::Taken(taken));
            }
            DriverAction::Io(Io::Copy { batch, from, keys }) => {
                run.contents.remove(&batch);
                run.begun.insert(batch, (Instant::now(), keys.len(), from));
                self.staged(run, OfStaged::Copying { batch });
                run.whole.remove(&batch);
                self.copy(run, batch, from, keys);
            }
            DriverAction::Io(Io::Store { batch, to, keys }) => {
                let usage = self.usage();
                let read = run.contents.get(&batch).map(Vec::as_slice).unwrap_or_default();
                assert!(read.iter().map(|(key, _)| key).eq(&keys), "stored keys equal the keys read");
                let contents: Vec<(&Key, &[Content])> =
                    read.iter().map(|(key, contents)| (key, contents.as_slice())).collect();
                let all = contents.iter().flat_map(|(key, of_key)| of_key.iter().map(move |content| (*key, content)));
                let staged = all.filter(|(_, content)| content.form == Form::Staged);
                let staged: Vec<Place> = staged.map(|(key, content)| (key.clone(), content.database)).collect();
                self.end_mut(to).store(batch, &contents, usage);
                self.staged(run, OfStaged::Storing { batch, keys, staged });
            }
            DriverAction::Io(Io::Overwrite { batch, to, keys }) => {
                let (usage, databases) = (self.usage(), run.driver.databases().to_vec());
                let read = run.contents.get(&batch).map(Vec::as_slice).unwrap_or_default();
                assert!(read.iter().map(|(key, _)| key).eq(&keys), "stored keys equal the keys read");
                let contents: Vec<(&Key, &[Content])> =
                    read.iter().map(|(key, contents)| (key, contents.as_slice())).collect();
                self.end_mut(to).overwrite(batch, &contents, usage, &databases);
            }
            DriverAction::Io(Io::Secure { batch, at, durability }) => {
                if !self.end_mut(at).secure(batch, durability, 0) {
                    run.on_event(Event::Secured { batch, refused: None });
                }
            }
            DriverAction::Io(Io::Remove { batch, from, keys }) => {
                self.end_mut(from).remove(batch, &keys, run.driver.databases())
            }
            DriverAction::Io(Io::Migrate { batch, from, keys }) => {
                let routing = self.shared.routing();
                let to = self.end(from.other()).node;
                let Some((address, access)) = routing.address_of(to, None).zip(routing.live.nodes.get(&to)) else {
                    return run.on_event(Event::Migrated {
                        batch,
                        refused: Some("the other node has no address".to_owned()),
                    });
                };
                self.end_mut(from).migrate(batch, &keys, run.driver.databases(), address, access);
            }
            DriverAction::Io(Io::Commit { keys }) => {
                let fingerprints: Vec<Fingerprint> = keys.iter().map(|key| self.fingerprints.of(key)).collect();
                keys.iter().for_each(|key| self.on_committed(key));
                run.committed += keys.len() as u64;
                if run.committed - run.driver.progress().keys_moved.min(run.committed) > ABSENT_MAX {
                    self.pacing.hurry(true);
                }
                self.late_keys.note(&fingerprints, run.driver.is_returning());
                self.count_moved(run, if run.driver.is_returning() { Side::Source } else { Side::Target });
                run.view.committed().commit(fingerprints);
                self.wake_workers(run.view.committed());
            }
            DriverAction::CommitAll => {
                run.view.committed().commit_all();
                self.wake_workers(run.view.committed());
            }
            DriverAction::Io(Io::Refuse { keys, error }) => {
                let keys =
                    keys.map(|keys| keys.iter().map(|key| self.fingerprints.of(key)).collect::<Arc<[Fingerprint]>>());
                let error: Arc<str> = error.into();
                for mailbox in self.shared.mailboxes.iter() {
                    mailbox.send(Message::Refused { move_id: self.id, keys: keys.clone(), error: error.clone() });
                }
            }
            DriverAction::Confirm { side } => self.end_mut(side).confirm(),
            DriverAction::Reconnect { side } => {
                self.end_mut(side).next_try.get_or_insert_with(Instant::now);
            }
            DriverAction::CatchUp { side } => self.catch_up(run, side),
            DriverAction::HandOver { to } => {
                if to == Side::Target {
                    self.count_moved(run, to);
                }
                let owner = self.end(to).node;
                self.hand_over(run, owner);
            }
            DriverAction::Io(Io::Quiet) => self.report_quiesced(),
            DriverAction::RollBack { why } => {
                self.shown.set_activity(format!("rolling back: {why}"));
                warn!("move {}: leg {} is rolled back to its source: {why}", self.id.0, run.number);
                run.contents.clear();
                self.staging.drop_all();
            }
            DriverAction::Lost { side, keys } => {
                let most = keys.len() as u64 * u64::from(self.database_count.max(1));
                self.life.record_loss(side, most);
                self.host.lost(self.id, self.end(side).node, &keys, most);
            }
            DriverAction::Io(Io::Track { groups, complete }) => run.view.committed().track(groups, complete),
            DriverAction::Io(Io::CorrectTracker { group, truth }) => {
                run.view.committed().correct_tracker(group, truth);
                self.wake_workers(run.view.committed());
            }
            DriverAction::Io(Io::Report { text }) => {
                warn!(move_id = self.id.0, leg = run.number, "{text}");
                self.shown.set_activity(text);
            }
            DriverAction::Io(Io::End(outcome)) => run.outcome = Some(outcome),
        }
    }

    /// Counts moved keys at their new side before clients use them there, because a node may return empty before the
    /// next query of its key count.
    fn count_moved(&self, run: &mut Run, to: Side) {
        let moved = run.driver.progress().keys_moved;
        let more = moved.saturating_sub(std::mem::replace(&mut run.counted, moved));
        for (side, stored, removed) in [(to, more, 0), (to.other(), 0, more)] {
            let end = self.end(side);
            let Some(connection) = &end.connection else { continue };
            self.shared.with_facts(end.node, |facts| {
                if facts.run_id.as_deref() == Some(&connection.process.run_id) {
                    facts.data.moved(stored, removed);
                }
            });
        }
    }

    /// Publishes to all workers that the slots are moving or going back. Returns the epoch, or `None` if the topology
    /// cannot be changed now.
    fn publish_leg(&mut self, run: &Run) -> Option<u64> {
        let id = self.id;
        let view = run.view.clone();
        self.shared.change_moves(|moves| {
            moves.legs.insert((id, run.number), view);
        });
        let transit = |stage| self.transit(stage);
        let mut transits = vec![(transit(Stage::Moving { leg: run.number }), run.slots.clone())];
        let rest: Vec<Slot> =
            self.life.slots_left().iter().copied().filter(|slot| !run.driver.is_ours()[slot.index()]).collect();
        if self.list.is_whole() && !rest.is_empty() {
            transits.push((transit(Stage::Observed), rest));
        }
        match self.host.set_transits(id, transits) {
            Ok(epoch) => {
                self.shared.want_drained(epoch);
                Some(epoch)
            }
            Err(why) => {
                self.shown.set_activity(format!("the topology cannot be changed now: {why}"));
                None
            }
        }
    }

    fn hand_over(&mut self, run: &Run, owner: NodeId) {
        let (own, leg) = (self.own.clone(), run.number);
        let done = Box::new(move |outcome| own.notify(MoverMessage::HandedOver { leg, outcome }));
        let keys = run.view.scope().map(|scope| scope.keys());
        self.host.hand_over(self.id, &run.slots, keys, owner, done);
    }

    /// Returns the next keys of the leg from the list, and whether these are the last. `None` if the list is
    /// incomplete.
    fn take_listed(&mut self, run: &mut Run) -> Option<(Vec<Key>, bool)> {
        // Messages about writes before the drain have been handled. Some of these writes may not have named their keys.
        if run.slots.iter().any(|slot| self.list.is_incomplete(*slot)) {
            return None;
        }
        let slots = Spool::leading_part(run.slots.get(run.taken..)?);
        match self.list.keys(slots) {
            Ok(keys) => {
                run.taken += slots.len();
                Some((keys, run.taken == run.slots.len()))
            }
            Err(error) => {
                warn!(%error, "the list of keys cannot be read: the keys are listed again");
                None
            }
        }
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

    /// Handles messages from workers, the journal and operators. Returns whether there were any.
    fn receive(&mut self, run: &mut Run) -> bool {
        let told = self.own.drain_messages();
        let any = !told.is_empty();
        for what in told {
            match what {
                MoverMessage::Wanted { leg, mut keys } if leg == run.number => {
                    self.keep_own(&mut keys);
                    run.on_event(Event::Wanted { keys });
                }
                MoverMessage::WantedWhole { leg } if leg == run.number => {
                    self.pacing.hurry(true);
                    run.on_event(Event::Pace(self.pacing.pace()));
                }
                MoverMessage::Recorded { leg, numbers, outcome } if leg == run.number => match outcome {
                    Ok(()) => run.events.push_back(DriverEvent::Recorded(numbers)),
                    Err(why) => {
                        // The journal retries until the router stops. The records take no effect; the next start
                        // resumes the leg.
                        tracing::error!(
                            move_id = self.id.0,
                            leg,
                            reason = why,
                            "the journal of moves cannot be written: the leg waits"
                        );
                        self.shown.set_activity(format!("the journal cannot be written: {why}"));
                    }
                },
                MoverMessage::HandedOver { leg, outcome } if leg == run.number => {
                    run.events.push_back(DriverEvent::HandedOver(outcome.is_ok()));
                    if let Err(why) = outcome {
                        self.shown.set_activity(format!("the topology cannot be stored: {why}"));
                    }
                }
                MoverMessage::CaughtUp { leg, outcome } if leg == run.number => self.caught_up(run, outcome),
                MoverMessage::Written(mut keys) if self.life.order().how.copies_while_served() => {
                    self.keep_own(&mut keys);
                    run.on_event(Event::Written { keys: keys.clone() });
                    self.note(MoverMessage::Written(keys));
                }
                MoverMessage::WrittenAnything(slot) if self.life.order().how.copies_while_served() => {
                    run.on_event(Event::Rewritten);
                    self.note(MoverMessage::WrittenAnything(slot));
                }
                MoverMessage::Quiesce { from, ticket, flushes } => {
                    self.tickets.insert(ticket, from);
                    if flushes {
                        self.staging.touched_all();
                        run.on_event(Event::Rewritten);
                    }
                    run.on_event(Event::Quiesce);
                }
                MoverMessage::Unquiesce { ticket } => {
                    self.tickets.remove(&ticket);
                    if self.tickets.is_empty() {
                        run.on_event(Event::Resume);
                    }
                }
                MoverMessage::Steer(steer) => {
                    self.steer(steer);
                    if matches!(steer, UserRequest::Abort | UserRequest::GiveUp(_)) {
                        self.pacing.hurry(true);
                        run.on_event(Event::RollBack);
                    }
                    if let UserRequest::GiveUp(side) = steer {
                        run.on_event(Event::GiveUp { side });
                    }
                    run.on_event(Event::Pace(self.pacing.pace()));
                }
                other => self.note(other),
            }
        }
        any
    }

    /// Handles the replies of a side.
    fn take_answers(&mut self, run: &mut Run, side: Side) -> bool {
        let timeout = self.timeout();
        let done = match self.end_mut(side).exchange(timeout) {
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
                // The node is connected and would reply the same at once.
                self.end_mut(side).try_later();
                break;
            }
        }
        any
    }

    fn lose(&mut self, run: &mut Run, side: Side, why: &str) {
        let name = self.name(self.end(side).node);
        warn!(move_id = self.id.0, node = name, reason = why, "a mover has lost its connection");
        self.shown.set_activity(format!("waiting for {name}: {why}"));
        self.end_mut(side).fail();
        if side == Side::Target {
            self.list.set_target_is_clean(false);
        }
        if side == Side::Source {
            self.staged(run, OfStaged::SourceLost);
        }
        self.on_position_lost(run, side);
        self.sizes_unknown(side);
        run.events.push_back(DriverEvent::Lost { side });
    }

    fn answered(&mut self, run: &mut Run, side: Side, ask: NodeRequest, answers: Vec<Vec<u8>>) -> Result<(), String> {
        let refused =
            |answers: &[Vec<u8>]| answers.iter().find(|a| reply::is_error(a)).map(|a| super::connection::error_text(a));
        match ask {
            NodeRequest::Copy { batch, reading } => {
                let mut reading = reading;
                let again = reading.again.take();
                let read = side::copied(reading, answers)?;
                if let Some(places) = again {
                    self.read_again(run, batch, places, read);
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
                let there: Vec<_> =
                    read.keys.into_iter().zip(read.contents).filter(|(_, contents)| !contents.is_empty()).collect();
                if !there.is_empty() {
                    run.contents.insert(batch, there);
                }
                run.on_event(Event::Copied { batch, outcomes: read.outcomes });
            }
            NodeRequest::Store { batch, places, so_far, over: true } => {
                let (outcomes, _) = side::stored(places, so_far, &answers)?;
                run.contents.remove(&batch);
                if let Some((began, keys, _)) = run.begun.remove(&batch) {
                    self.pacing.batch_ended(began.elapsed(), keys);
                    run.on_event(Event::Pace(self.pacing.pace()));
                }
                run.on_event(Event::Stored { batch, outcomes });
            }
            NodeRequest::Store { batch, places, so_far, over: false } => {
                let (outcomes, again) = side::stored(places, so_far, &answers)?;
                self.end_mut(side).only_one_by_one |=
                    !again.is_empty() && answers.iter().any(|answer| answer.starts_with(b"-NOPERM"));
                if again.is_empty() {
                    self.staged(run, OfStaged::Stored { batch, outcomes });
                } else {
                    // Only the first store of a whole batch uses one command for all keys.
                    let read = run.contents.get(&batch).map(Vec::as_slice).unwrap_or_default();
                    assert_eq!(read.len(), outcomes.len(), "stored keys equal the keys read");
                    let contents: Vec<(&Key, &[Content])> =
                        read.iter().map(|(key, contents)| (key, contents.as_slice())).collect();
                    self.end_mut(side).store_one_by_one(batch, &contents, &again, outcomes);
                }
            }
            NodeRequest::Finish { batch, step, items } => self.staged_answered(run, batch, step, items, &answers),
            NodeRequest::Discard(_) => {}
            NodeRequest::Confirm => {
                let stats = answers
                    .last()
                    .and_then(|answer| reply::text(answer))
                    .map(String::from_utf8_lossy)
                    .unwrap_or_default();
                let evicted = field(&stats, "evicted_keys").and_then(|keys| keys.parse().ok()).unwrap_or(0);
                run.on_event(Event::Confirmed { side, evicted });
            }
            NodeRequest::Position => self.on_position(run, &answers),
            NodeRequest::Secure { batch, durability, tried } => {
                let refused = match side::secured(durability, &answers) {
                    DurabilityResult::Is(safe) => safe.err(),
                    DurabilityResult::Fewer { replicas, .. } if tried < REPLICAS_TRIES => {
                        let end = self.end_mut(side);
                        end.replicas = replicas.max(1);
                        end.secure(batch, durability, tried + 1);
                        return Ok(());
                    }
                    DurabilityResult::Fewer { acknowledged, replicas } => Some(format!(
                        "{acknowledged} of {} acknowledged it within 2 s",
                        counted(replicas as usize, "replica")
                    )),
                };
                run.on_event(Event::Secured { batch, refused });
            }
            NodeRequest::Remove { batch } => {
                if let Some(why) = refused(&answers) {
                    return Err(format!("it refuses to remove keys: {why}"));
                }
                // Removed from where it was read, so no further store can be needed. Otherwise the removal only cleared
                // the destination.
                if let Some((began, keys, _)) = run.begun.get(&batch).copied().filter(|(.., from)| *from == side) {
                    run.begun.remove(&batch);
                    run.contents.remove(&batch);
                    self.pacing.batch_ended(began.elapsed(), keys);
                    for (kind, bytes, why) in run.whole.remove(&batch).unwrap_or_default() {
                        self.note_whole(kind, bytes, began.elapsed().as_micros() as u64, &why);
                    }
                    run.on_event(Event::Pace(self.pacing.pace()));
                }
                run.on_event(Event::Removed { batch });
            }
            NodeRequest::Migrate { batch } => {
                run.contents.remove(&batch);
                // The target's error is inside the source's error text.
                let refused =
                    refused(&answers).map(|why| why.find("BUSYKEY").map_or(why.clone(), |at| why[at..].to_owned()));
                run.on_event(Event::Migrated { batch, refused });
            }
            NodeRequest::Scan { walk } => {
                if let Some(why) = refused(&answers) {
                    return Err(format!("it refuses SCAN: {why}"));
                }
                let answer = answers.last().map(Vec::as_slice).unwrap_or_default();
                let (cursor, keys) = side::scanned(answer).ok_or("its reply to SCAN is not a cursor with keys")?;
                let topology = self.shared.routing().topology.clone();
                let mut to_do = Vec::new();
                run.driver.scanned(walk, &cursor, keys.into_iter(), &topology, self.now_us(), &mut to_do);
                self.perform(run, to_do);
            }
            NodeRequest::Look => self.note_load(side, &answers),
            NodeRequest::Sizes { page, selected } => {
                return self.sizes_answered(page, selected, &answers).map_err(|why| format!("it {why}"));
            }
            NodeRequest::Purge { walk } => {
                if let Some(why) = refused(&answers) {
                    return Err(format!("it refuses to remove keys: {why}"));
                }
                run.events.push_back(DriverEvent::Unlinked { walk });
            }
        }
        Ok(())
    }

    /// Reconnects to a lost side.
    fn restore(&mut self, run: &mut Run, side: Side) {
        if self.end(side).connection.is_some() || self.end(side).next_try.is_none_or(|at| Instant::now() < at) {
            return;
        }
        // Differing clocks do not end a leg. It waits until they are corrected.
        let reached = self.reach(side).and_then(|()| self.clocks_differ().map_or(Ok(()), Err));
        match reached {
            Ok(()) => {
                let databases = self.databases_in_use().unwrap_or_else(|_| run.driver.databases().to_vec());
                // A new process may have expiring keys in other databases.
                run.databases_without_expiry.clear();
                self.drop_unusable(run.driver.is_ours());
                if let Some(connection) = &self.end(side).connection {
                    run.events.push_back(DriverEvent::Restored {
                        side,
                        process: connection.process.clone(),
                        databases,
                    });
                    self.shown.set_activity("moving");
                }
            }
            Err(why) => {
                self.shown.set_activity(format!("waiting for {}: {why}", self.name(self.end(side).node)));
                self.end_mut(side).fail();
                self.end_mut(side).try_later();
            }
        }
    }

    fn check_drain(&mut self, run: &mut Run) {
        let Some(barrier) = run.driver.barrier() else { return };
        let node = self.end(barrier.side).node;
        let has_drained = match barrier.is_lost {
            true => self.shared.drained_of_the_lost(barrier.epoch, node),
            false => self.shared.drained_source(barrier.epoch, node),
        };
        // Writes before the drain were reported before it completed.
        if has_drained {
            self.receive(run);
        }
        // The databases with keys are final only after the last write. The query must be alone on its connection.
        if !has_drained || !self.source.is_idle() || !self.target.is_idle() {
            return;
        }
        // A lost side is detected where its replies are handled.
        let Ok(databases) = self.databases_in_use() else { return };
        if !run.driver.is_returning() && self.remove_outdated(&run.slots).is_err() {
            return;
        }
        // Direct clients, and writes during the copy, can set a TTL at any time.
        let how = self.life.order().how;
        if !run.driver.is_returning() && !how.direct_clients && !how.copies_while_served() {
            run.databases_without_expiry.clone_from(&self.databases_without_expiry);
        }
        run.moving_since = run.moving_since.or(Some(Instant::now()));
        run.events.push_back(DriverEvent::Drained { databases });
    }

    /// Returns the plain form for strings, if this loses no usage or metadata.
    pub(super) fn form(&self, run: &Run) -> Form {
        let plain =
            run.strings && self.usage().is_none() && !self.source.notifies_changes && !self.target.notifies_changes;
        if plain { Form::Plain } else { Form::Serialised }
    }

    /// Returns which usage data of keys to copy. Only useful if both nodes keep it.
    pub(super) fn usage(&self) -> Option<UsageKind> {
        let both = |what: &str| self.source.policy.contains(what) && self.target.policy.contains(what);
        if both("lfu") {
            Some(UsageKind::Frequency)
        } else if both("lru") {
            Some(UsageKind::Idle)
        } else {
            None
        }
    }
}
