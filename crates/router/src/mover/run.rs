//! The thread of a move: does step after step of its life (`switchyard_policy::migration::life`), and tells what came of it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use switchyard_policy::migration::life::{Begin, Came, Life, Listed, Step};
use switchyard_policy::migration::pace::{Observation, Pacer};
use switchyard_policy::migration::{Fingerprint, Fingerprinter, Goal, Outcome, Pace, Progress, Side};
use switchyard_policy::topology::{MoveId, NodeId, Slot, Stage, slot_of};
use tracing::{error, trace, warn};

use super::big::Big;
use super::connection::Connection;
use super::moved::Moved;
use super::progress::Shown;
use super::side::End;
use super::sizes::Sizes;
use super::spool::Spool;
use super::staging::Staging;
use super::{Host, MoveEnd, MoveTask, SharedMove, Steer, Told};
use crate::metrics::Waits;
use crate::shared::{Message, Shared, lock};

/// Fingerprints of moved keys that are remembered until the end; beyond it what is found late can no longer be told apart.
const REMEMBERED_MAX: usize = 20_000_000;

/// How often the pace is looked at.
const PACE: Duration = Duration::from_millis(100);

/// How often both nodes are asked how much they work.
const LOOK: Duration = Duration::from_millis(500);

/// How clients wait without the move is looked at for so long.
const LEARN: Duration = Duration::from_millis(500);

/// What was noted before the move says more than that, if it is of so long a time at least.
const LATELY: Duration = Duration::from_secs(3);

/// Where commands are few: how long clients' waits are collected.
const FEW_WAITS: Duration = Duration::from_secs(2);

/// Why a mover does not go on.
#[derive(Debug)]
pub(super) enum Halt {
    /// The router stops: the journal knows where the move is.
    RouterStops,
    /// A node is not connected where it has to be: reach it and try again.
    Lost,
    /// The user wants the move to end.
    Aborted,
    /// What was asked for cannot be, and why.
    Stop(String),
}

/// A move under way.
pub(super) struct Mover {
    pub(super) shared: Arc<Shared>,
    pub(super) own: Arc<SharedMove>,
    pub(super) id: MoveId,
    pub(super) host: Arc<dyn Host>,
    pub(super) fingerprints: Fingerprinter,
    /// What is done next, and what the user wants.
    pub(super) life: Life,
    /// Slots, ascending, in which an earlier move of ours may have left keys: at the target, and at the source.
    pub(super) leftovers: Vec<Slot>,
    pub(super) leftovers_at_source: Vec<Slot>,
    pub(super) source: End,
    pub(super) target: End,
    pub(super) spool: Spool,
    pub(super) big: Big,
    pub(super) sizes: Sizes,
    /// From how many bytes a key is big, as it was when the keys were listed.
    pub(super) big_limit_now: Option<u64>,
    pub(super) staging: Staging,
    /// Whether fields of hashes at the source can have times to live, once that is known.
    pub(super) mortal_fields: Option<bool>,
    /// Slots in which scripts may have written keys that they do not name.
    pub(super) anything: BTreeSet<Slot>,
    /// A router before this one has begun the move.
    pub(super) is_resumed: bool,
    pub(super) is_listed: bool,
    /// The target has no keys of the slots that are left.
    pub(super) target_is_clean: bool,
    /// Who asked for quiet: workers, by ticket.
    pub(super) tickets: BTreeMap<u64, usize>,
    pub(super) doing: String,
    pub(super) records: u64,
    databases: BTreeSet<u32>,
    /// Databases of the source in which no key expired when it was asked last.
    pub(super) lasting: Vec<u32>,
    /// What was read last were strings.
    pub(super) strings: bool,
    /// Somebody waits for the end of the leg under way.
    hurried: bool,
    moved: Moved,
    /// Whether `moved` has all of them.
    remembers_all: bool,
    /// Of legs that have ended.
    pub(super) before: Progress,
    pub(super) began: Instant,
    /// So many seconds the move took with the routers before this one.
    pub(super) seconds_before: f64,
    pub(super) shown: Shown,
    pub(super) listed: u64,
    /// Keys that had moved when the rest was listed.
    pub(super) moved_before_listing: u64,
    pub(super) late: super::LateKeys,
    pacer: Pacer,
    /// The last batch, and when and with what the pace was last changed.
    batch: Option<(u64, u32)>,
    paced: Instant,
    paced_keys: u64,
    paced_bytes: u64,
    waits: Waits,
    waited_before: Option<u64>,
    waits_from: Instant,
    /// Of the busier node, since it was last used.
    node_cpu: Option<f64>,
    looked: Instant,
    /// The process whose keys are in the spool. Another one may have keys again that this one had not.
    pub(super) listed_of: Option<String>,
    /// The process that the source was when the move began.
    pub(super) first_source: Option<String>,
}

/// The thread of a move.
pub(super) fn run(shared: Arc<Shared>, own: Arc<SharedMove>, task: MoveTask) {
    let id = task.id;
    let host = task.host.clone();
    let (mut mover, first) = Mover::new(shared.clone(), own, task);
    let end = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let end = mover.live(first);
        // A router that stops leaves what it has begun to the next one.
        if end.is_some() {
            mover.discard_all();
        }
        end
    }));
    mover.source.let_go();
    mover.target.let_go();
    let end = match end {
        Ok(Some(end)) => end,
        Ok(None) => return,
        Err(_) => {
            error!(move_id = id.0, "a mover panicked. This is a bug, please report it; a restart of the router takes the move up again");
            MoveEnd::Stopped("the mover panicked: a restart of the router takes the move up again".to_owned())
        }
    };
    let is_moving = mover.life.open().is_some() || shared.plan().moves.legs.keys().any(|(of, _)| *of == id);
    if !is_moving && let Err(why) = host.set_transits(id, Vec::new()) {
        warn!(move_id = id.0, why, "the topology still has slots of a move that has ended");
    }
    mover.finish(&end);
    shared.change_moves(|moves| {
        moves.by_id.remove(&id);
        // Of a leg that is left open nothing is used before another mover publishes it again.
        moves.legs.retain(|(of, _), _| *of != id);
    });
    host.ended(id, &end);
}

impl Mover {
    fn new(shared: Arc<Shared>, own: Arc<SharedMove>, task: MoveTask) -> (Self, Step) {
        let MoveTask { id, order, leftovers, leftovers_at_source, aborted, give_up, so_far, fingerprints, resume, host } = task;
        if let Some(leg) = resume.as_ref().and_then(|resume| resume.leg.as_ref()) {
            shared.fences.broke(order.source, leg.source.clone());
            shared.fences.broke(order.target, leg.target.clone());
        }
        let spool = Spool::new(host.spool_directory().join(format!("move-{}", id.0)));
        let names = order.nodes().map(|node| name(&shared, node));
        let is_resumed = resume.is_some();
        let (life, first) = Life::begin(Begin { order, names, resume, aborted, give_up }, shared.uptime().as_micros() as u64);
        let (order, now) = (life.order(), Instant::now());
        let mover = Self {
            source: End::new(order.source, shared.fences.clone()),
            target: End::new(order.target, shared.fences.clone()),
            spool,
            big: Big::default(),
            sizes: Sizes::default(),
            big_limit_now: Some(shared.plan().live.big_key as u64).filter(|limit| *limit > 0),
            staging: Staging::default(),
            mortal_fields: None,
            anything: BTreeSet::new(),
            is_resumed,
            is_listed: false,
            target_is_clean: false,
            tickets: BTreeMap::new(),
            doing: "connecting".to_owned(),
            records: 0,
            databases: BTreeSet::new(),
            lasting: Vec::new(),
            strings: false,
            hurried: false,
            moved: Moved::default(),
            remembers_all: !is_resumed,
            before: Progress {
                keys_moved: so_far.keys_moved,
                bytes_moved: so_far.bytes_moved,
                pulled: so_far.pulled,
                repeated: so_far.repeated,
                ..Progress::NONE
            },
            began: now,
            seconds_before: so_far.seconds,
            shown: Shown::new(so_far.keys_moved, so_far.bytes_moved),
            listed: 0,
            moved_before_listing: 0,
            late: super::LateKeys::default(),
            pacer: Pacer::new(order.how.goal, order.how.max_rate),
            batch: None,
            paced: now,
            paced_keys: so_far.keys_moved,
            paced_bytes: so_far.bytes_moved,
            waits: Waits::so_far(&shared.counters),
            waits_from: now,
            node_cpu: None,
            looked: now,
            waited_before: None,
            listed_of: None,
            first_source: None,
            shared,
            own,
            id,
            host,
            fingerprints,
            leftovers,
            leftovers_at_source,
            life,
        };
        (mover, first)
    }

    /// Does step after step. `None`: the router stops, and the journal knows where the move is.
    fn live(&mut self, mut step: Step) -> Option<MoveEnd> {
        loop {
            if let Step::End(end) = step {
                return Some(end);
            }
            let came = match self.do_step(step) {
                Ok(came) => came,
                Err(Halt::RouterStops) => return None,
                Err(Halt::Lost) => Came::Lost,
                Err(Halt::Aborted) => Came::Aborted,
                Err(Halt::Stop(why)) => Came::Refused(why),
            };
            step = self.life.came(came, self.now_us());
        }
    }

    fn do_step(&mut self, step: Step) -> Result<Came, Halt> {
        let of_keys = self.life.order().keys.is_some();
        match step {
            Step::Reach { side, .. } => self.try_to_reach(side)?,
            Step::Rest { us, doing, .. } => {
                self.doing = doing;
                self.rest(Duration::from_micros(us))?;
            }
            Step::Check => self.check()?,
            Step::LearnWaits => self.learn_waits()?,
            Step::List if of_keys => self.list_named()?,
            Step::List => self.list()?,
            // Now that nothing is under way that does not know of the move.
            Step::Functions => self.give_functions()?,
            Step::Hear => self.pump()?,
            Step::Measure => {
                self.measure_next()?;
                return Ok(Came::Cut(self.next_leg(&[])));
            }
            Step::Clocks(_) => self.check_clocks()?,
            Step::Room(cut) => self.has_room(&cut.slots)?,
            Step::Stage(cut) => self.stage(&cut.slots)?,
            Step::Leg(cut) => {
                let outcome = self.run_leg(cut.number, cut.slots.clone())?;
                if outcome == Outcome::Moved {
                    self.forget_slots(&cut.slots);
                }
                return Ok(Came::Ended(outcome));
            }
            Step::Observe => self.observe()?,
            Step::LookBehind if of_keys => self.look_behind_keys()?,
            Step::LookBehind => self.look_behind()?,
            Step::End(_) => {}
        }
        Ok(Came::Done)
    }

    // ---- what the outside says ----

    pub(super) fn is_stopped(&self) -> bool {
        self.shared.stop.load(Ordering::Relaxed)
    }

    pub(super) fn now_us(&self) -> u64 {
        self.shared.uptime().as_micros() as u64
    }

    pub(super) fn patience(&self) -> Duration {
        self.shared.plan().live.command_timeout
    }

    pub(super) fn name(&self, node: NodeId) -> String {
        name(&self.shared, node)
    }

    /// Takes what a user wants.
    pub(super) fn steer(&mut self, steer: Steer) {
        self.life.steer(steer);
        match steer {
            Steer::Goal(goal) => self.pacer.set_goal(goal),
            Steer::MaxRate(rate) => self.pacer.set_max_rate(rate),
            Steer::Pause | Steer::Resume | Steer::Abort | Steer::GiveUp(_) => {}
        }
    }

    /// Takes what has nothing to do with the leg under way.
    pub(super) fn note(&mut self, what: Told) {
        match what {
            Told::Written(mut keys) => {
                self.keep_own(&mut keys);
                for key in keys {
                    let slot = slot_of(&key);
                    self.spool_key(slot, &key);
                    self.staging.written(&key);
                    self.big.note_written(slot, key);
                }
            }
            Told::Touched { key, elements } => self.staging.touched(&key, elements),
            Told::WrittenAnything(slot) => {
                self.anything.insert(slot);
                self.staging.touched_slot(slot);
            }
            Told::Quiesce { from, ticket, flushes } => {
                self.tickets.insert(ticket, from);
                if flushes {
                    self.staging.touched_all();
                }
                self.say_quiet();
            }
            Told::Unquiesce { ticket } => {
                self.tickets.remove(&ticket);
            }
            Told::Steer(steer) => self.steer(steer),
            // Of a leg that has ended.
            Told::Wanted { .. } | Told::WantedWhole { .. } | Told::Recorded { .. } | Told::CaughtUp { .. } | Told::HandedOver { .. } => {}
        }
    }

    pub(super) fn spool_key(&mut self, slot: Slot, key: &[u8]) {
        if let Err(unlisted) = self.spool.add(slot, key) {
            let (error, slots) = (unlisted.error, unlisted.slots);
            warn!(%error, slots = slots.len(), "the list of keys cannot be written and stays in memory; for these slots that is too much, and their node is asked again");
            self.anything.extend(slots);
        }
    }

    /// Nothing is under way.
    pub(super) fn say_quiet(&self) {
        self.own.share_temporary(self.staging.names());
        for (ticket, worker) in &self.tickets {
            self.shared.mailboxes.send(*worker, Message::Quiet { move_id: self.id, ticket: *ticket });
        }
    }

    /// Between two steps that take long: what was said meanwhile.
    pub(super) fn pump(&mut self) -> Result<(), Halt> {
        loop {
            self.listen()?;
            if self.life.is_cut_short() {
                return Err(Halt::Aborted);
            }
            if self.tickets.is_empty() {
                return Ok(());
            }
            self.wait(Duration::from_millis(5));
        }
    }

    /// The same without waiting. True where nothing more is to be asked of the nodes now.
    pub(super) fn listen(&mut self) -> Result<bool, Halt> {
        if self.is_stopped() {
            return Err(Halt::RouterStops);
        }
        for what in self.own.take_told() {
            self.note(what);
        }
        self.show(None);
        Ok(self.life.is_paused() || !self.tickets.is_empty())
    }

    pub(super) fn while_paused(&mut self) -> Result<(), Halt> {
        self.pump()?;
        while self.life.is_paused() {
            self.doing = "paused".to_owned();
            self.wait(Duration::from_millis(50));
            self.pump()?;
        }
        Ok(())
    }

    /// Waits so long, and hears what is said. An abort that comes ends it.
    pub(super) fn rest(&mut self, length: Duration) -> Result<(), Halt> {
        let (until, aborted) = (Instant::now() + length, self.life.is_aborted());
        while Instant::now() < until && self.life.is_aborted() == aborted {
            self.pump()?;
            self.wait(until.saturating_duration_since(Instant::now()).min(Duration::from_millis(20)));
        }
        Ok(())
    }

    /// Waits until a node or anybody else says something.
    pub(super) fn wait(&self, at_most: Duration) {
        let mut fds = vec![PollFd::new(&self.own.wake, PollFlags::IN)];
        fds.extend([&self.source, &self.target].into_iter().filter_map(|end| end.connection.as_ref()).map(Connection::poll_fd));
        let timeout = Timespec { tv_sec: at_most.as_secs() as i64, tv_nsec: at_most.subsec_nanos().into() };
        // A failure shows where the sockets are used.
        let _ = poll(&mut fds, Some(&timeout));
    }

    // ---- nodes ----

    pub(super) fn end(&self, side: Side) -> &End {
        match side {
            Side::Source => &self.source,
            Side::Target => &self.target,
        }
    }

    pub(super) fn end_mut(&mut self, side: Side) -> &mut End {
        match side {
            Side::Source => &mut self.source,
            Side::Target => &mut self.target,
        }
    }

    /// Connects to a side, and has it confirm that earlier connections of the mover are dead.
    pub(super) fn reach(&mut self, side: Side) -> Result<(), String> {
        let plan = self.shared.plan();
        let node = self.end(side).node;
        let access = plan.live.nodes.get(&node).ok_or("no address is configured for it")?;
        let address = plan.address_of(node, None).ok_or("no Sentinel has named its primary yet")?;
        let patience = plan.live.connect_timeout;
        let name = self.shared.connection_name(format_args!("mover-{}", self.id.0));
        let mut connection = Connection::open(access, address, &name, patience)?;
        let fences = &self.shared.fences;
        let broken = fences.broken(node);
        for dead in &broken {
            // Another process has none of the old one's connections.
            if dead.run_id == connection.process.run_id {
                connection.kill(dead.client_id, patience)?;
            }
        }
        fences.ended(node, &broken);
        if !fences.is_cleared(node, &connection.process.run_id) {
            connection.end_strangers(&self.shared.site, &self.shared.incarnation, patience)?;
            fences.cleared(node, &connection.process.run_id);
        }
        if let Some(seat) = &self.shared.seat {
            connection.take_seat(seat, &access.name, (&self.shared.site, &self.shared.incarnation), patience)?;
        }
        if side == Side::Target {
            // It was looked through before; who answers now may be another process, with keys of long ago.
            self.target_is_clean = false;
        }
        if side == Side::Source {
            self.first_source.get_or_insert_with(|| connection.process.run_id.clone());
        }
        let end = self.end_mut(side);
        end.next_try = None;
        end.connection = Some(connection);
        end.learn(patience).inspect_err(|_| end.fail())?;
        // Another process may be on another machine.
        self.ask_clock(side).map_err(|halt| match halt {
            Halt::Stop(why) => why,
            Halt::Lost | Halt::Aborted | Halt::RouterStops => "its connection was lost".to_owned(),
        })
    }

    /// Connects to a side that is not connected: one attempt.
    fn try_to_reach(&mut self, side: Side) -> Result<(), Halt> {
        if self.end(side).connection.as_ref().is_some_and(Connection::is_lost) {
            self.end_mut(side).fail();
        }
        if self.end(side).connection.is_some() {
            return Ok(());
        }
        self.pump()?;
        self.reach(side).map_err(|why| {
            self.end_mut(side).fail();
            Halt::Stop(why)
        })
    }

    /// All databases that have keys at either node, as far as a question can be asked now.
    pub(super) fn databases_in_use(&mut self) -> Result<Vec<u32>, Halt> {
        let patience = self.patience();
        for side in [Side::Source, Side::Target] {
            let end = self.end_mut(side);
            if end.connection.is_none() || !end.is_idle() {
                continue;
            }
            let Ok(found) = end.databases(patience) else { return Err(Halt::Lost) };
            self.databases.extend(found.iter().map(|(database, _)| *database));
            if side == Side::Source {
                self.lasting = found.into_iter().filter_map(|(database, expires)| (!expires).then_some(database)).collect();
            }
        }
        Ok(self.all_databases())
    }

    pub(super) fn all_databases(&self) -> Vec<u32> {
        self.databases.iter().copied().collect()
    }

    /// Asks, alone.
    pub(super) fn call(&mut self, side: Side, args: &[&[u8]]) -> Result<Vec<u8>, Halt> {
        let patience = self.patience();
        let end = self.end_mut(side);
        let Some(connection) = &mut end.connection else { return Err(Halt::Lost) };
        let why = match connection.call(args, patience) {
            Ok(answer) => return Ok(answer),
            Err(why) => why,
        };
        end.fail();
        let name = self.name(self.end(side).node);
        warn!(move_id = self.id.0, node = name, why, "a mover has lost its connection");
        self.doing = format!("waiting for {name}: {why}");
        Err(Halt::Lost)
    }

    /// Has what follows on this connection concern a database. Refused: it has none of that number.
    pub(super) fn select(&mut self, side: Side, database: u32) -> Result<bool, Halt> {
        if self.end(side).connection.as_ref().is_some_and(|c| c.database() == database) {
            return Ok(true);
        }
        let number = database.to_string();
        let answer = self.call(side, &[b"SELECT", number.as_bytes()])?;
        let selected = !switchyard_resp::reply::is_error(&answer);
        if selected && let Some(connection) = &mut self.end_mut(side).connection {
            connection.is_in(database);
        }
        Ok(selected)
    }

    // ---- listing and legs ----

    pub(super) fn publish_observed(&self) -> Result<u64, String> {
        self.host.set_transits(self.id, vec![(self.transit(Stage::Observed), self.life.slots_left().iter().copied().collect())])
    }

    /// After a leg that has not begun. If it cannot be now, clients wait until the next leg is published.
    pub(super) fn publish_observed_or_retry(&mut self) {
        for _ in 0..50 {
            match self.publish_observed() {
                Ok(_) => return,
                Err(why) => {
                    self.doing = format!("the topology cannot be changed now: {why}");
                    self.wait(Duration::from_millis(20));
                }
            }
        }
    }

    /// The slots of the next leg. `without`: those that are in the one under way.
    pub(super) fn next_leg(&self, without: &[bool]) -> Vec<Slot> {
        self.life.cut(self, self.pacer.leg_keys(), without)
    }

    /// They belong to the target.
    fn forget_slots(&mut self, slots: &[Slot]) {
        self.spool.forget(slots);
        self.big.forget_slots(slots);
        self.forget_staged(slots);
    }

    pub(super) fn note_moved(&mut self, keys: &[Fingerprint], back: bool) {
        if back {
            self.moved.forget(keys);
        } else if self.moved.count < REMEMBERED_MAX {
            self.moved.note(keys);
        } else {
            self.remembers_all = false;
        }
    }

    /// Whether a key was moved by us; `None`: that cannot be told any more.
    pub(super) fn was_moved(&mut self, key: Fingerprint) -> Option<bool> {
        if self.moved.contains(key) { Some(true) } else { self.remembers_all.then_some(false) }
    }

    pub(super) fn late(&self) -> super::LateKeys {
        self.late
    }

    pub(super) fn note_late(&mut self, change: impl FnOnce(&mut super::LateKeys)) {
        change(&mut self.late);
    }

    // ---- pace and progress ----

    /// By all legs that have ended.
    pub(super) fn keys_moved(&self) -> u64 {
        self.before.keys_moved
    }

    /// How fast.
    pub(super) fn pace(&self) -> Pace {
        if self.hurried { self.pacer.hurried() } else { self.pacer.pace() }
    }

    /// Somebody waits for the end of the leg under way, or nobody does any more.
    pub(super) fn hurry(&mut self, hurried: bool) {
        self.hurried = hurried;
    }

    /// A batch took so long from its copy to its end.
    pub(super) fn note_batch(&mut self, length: Duration, keys: usize) {
        self.batch = Some((length.as_micros() as u64, keys as u32));
        self.pacer.batch_ended(length.as_micros() as u64, keys as u32);
    }

    /// Another pace, from time to time: as what was seen since the last one suggests.
    pub(super) fn new_pace(&mut self, now: Progress) -> Option<Pace> {
        let interval = self.paced.elapsed();
        if interval < PACE {
            return None;
        }
        let waits = Waits::so_far(&self.shared.counters);
        let keys = self.before.keys_moved + now.keys_moved;
        let bytes = self.before.bytes_moved + now.bytes_moved;
        let (batch_us, batch_keys) = self.batch.take().map_or((None, 0), |(us, keys)| (Some(us), keys));
        let clients_us = waits.p99_since(&self.waits);
        let seen = Observation {
            clients_us,
            before_us: self.waited_before,
            node_cpu: self.node_cpu.take(),
            batch_us,
            batch_keys,
            keys: keys.saturating_sub(self.paced_keys),
            bytes: bytes.saturating_sub(self.paced_bytes),
            interval_us: interval.as_micros() as u64,
        };
        // Where commands are few they are looked at over a longer time.
        if clients_us.is_some() || self.waits_from.elapsed() >= FEW_WAITS {
            self.waits = waits;
            self.waits_from = Instant::now();
        }
        self.paced = Instant::now();
        (self.paced_keys, self.paced_bytes) = (keys, bytes);
        let _ = self.pacer.observe(&seen);
        trace!(move_id = self.id.0, ?seen, pacer = ?self.pacer, "paced");
        Some(self.pace())
    }

    /// Clients have felt nothing of the move so far: how long they wait without it.
    fn learn_waits(&mut self) -> Result<(), Halt> {
        let lately = lock(&self.shared.waits_lately).since(self.began, LATELY).cloned();
        while lately.is_none() && self.life.order().how.goal != Goal::Fast && self.began.elapsed() < LEARN {
            self.rest(Duration::from_millis(20))?;
        }
        let waits = Waits::so_far(&self.shared.counters);
        self.waited_before = waits.p99_since(lately.as_ref().unwrap_or(&self.waits));
        self.waits = waits;
        self.waits_from = Instant::now();
        self.paced = Instant::now();
        Ok(())
    }

    /// Asks both nodes how much they work, from time to time.
    pub(super) fn look_at_nodes(&mut self) {
        if self.looked.elapsed() >= LOOK {
            self.looked = Instant::now();
            self.source.look();
            self.target.look();
        }
    }

    /// A node has told how much it has worked.
    pub(super) fn note_work(&mut self, side: Side, answers: &[Vec<u8>]) {
        if let Some(cpu) = self.end_mut(side).worked(answers) {
            self.node_cpu = Some(self.node_cpu.map_or(cpu, |other| other.max(cpu)));
        }
    }

    /// `moving`: how long its keys have been on their way. `moved`: they stay where they went.
    pub(super) fn ended_legs(&mut self, leg: Progress, moved: bool, moving: Duration) {
        self.pacer.leg_ended(leg.keys_moved, leg.bytes_moved, moving.as_micros() as u64);
        if moved {
            self.before.keys_moved += leg.keys_moved;
            self.before.bytes_moved += leg.bytes_moved;
        }
        self.before.pulled += leg.pulled;
        self.before.repeated += leg.repeated;
    }
}

impl Listed for Mover {
    fn keys(&self, slot: Slot) -> u32 {
        self.spool.count(slot)
    }

    fn big_bytes(&self, slot: Slot) -> u64 {
        self.big.bytes_of(slot)
    }

    fn lacks_some(&self, slot: Slot) -> bool {
        self.anything.contains(&slot)
    }
}

fn name(shared: &Shared, node: NodeId) -> String {
    shared.plan().topology.node(node).map_or_else(|| "a removed node".into(), |n| n.name.clone())
}
