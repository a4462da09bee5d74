//! I/O for the driver of a leg (`switchyard_policy::migration::driver`), as the router's mover is: connections, batches, journal, the stored topology, and
//! recovery after a crash. What it must get right itself is what the planted bugs of [`crate::planted`] break.

mod batches;
mod journal;
mod listing;
mod lost;
mod scope;
mod staging;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

use switchyard_policy::migration::record::{OpenLeg, Queue, Record, Replay};
use switchyard_policy::migration::{
    BatchId, Begin, Do, Driver, Durability, Event, Fingerprint, Fingerprinter, Happened, Io, Key, LegView, Orders, Outcome, Process,
    Protocol, Scope, Side,
};
use switchyard_policy::topology::{MoveId, NodeId, Slot, Stage as SlotStage, Topology, Transit, slot_of};

use self::batches::{Batch, Kind};
use self::journal::Entry;
use self::lost::Lost;
use self::staging::{Part, Stager};
use crate::node::{Cmd, KeyIx, Reply, STAGING};
use crate::planted::{Bug, Planted};
use crate::random::Random;
use crate::scenario::Scenario;
use crate::worker::{Known, View};
use crate::world::{Ev, Owner, What as Sent, World, say};

/// Keys of a SCAN.
const SCAN_KEYS: usize = 2;
/// A leg that does not begin is tried again so often.
const TRIES: u32 = 40;

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum What {
    Hello,
    Kill,
    /// With the round of the batch, and the place in it.
    Batch(BatchId, u64, usize),
    Staging(Part),
    /// Before the legs.
    List,
    /// With the number of the walk.
    Scan(u32),
    Confirm,
    /// A removal, and the walk of which it is the last part.
    PurgeRemove(Option<u32>),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Idle,
    /// That a move begins is being recorded.
    Accepting,
    /// Workers adopt that the slots are observed.
    Observing,
    Connecting,
    /// Keys are listed.
    Listing,
    /// Big keys are copied in pieces.
    Staging,
    Running,
    Over,
}

#[derive(Debug, Default)]
struct Link {
    conn: Option<u32>,
    ready: bool,
    process: Option<(u32, u64)>,
    /// Confirmations that it waits for.
    kills: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Flush {
    op: u64,
    sent: bool,
    told: u32,
}

/// A state of a key that a node may come back with, and its mark in the history.
#[derive(Clone, Debug)]
pub(crate) struct Unnoticed {
    pub(crate) node: usize,
    pub(crate) mark: (KeyIx, usize),
    /// The node was killed after the leg had asked it for the last time.
    pub(crate) is_late: bool,
}

/// The mover, and what outlives it: journal and topology.
pub(crate) struct Mover {
    stage: Stage,
    driver: Option<Driver>,
    fingerprints: Fingerprinter,
    slot: Slot,
    protocol: Protocol,
    durability: Durability,
    drain_patience_us: u64,
    source: usize,
    target: usize,
    /// Of a move of keys: which.
    scope: Option<Rc<BTreeSet<KeyIx>>>,
    move_id: u64,
    leg: u32,
    tries: u32,
    moves_left: u64,
    /// Runs while the present move is open.
    begun: bool,
    resume: Option<OpenLeg>,
    links: [Link; 2],
    /// By node: earlier connections that may still do something.
    broken: [Vec<(u32, u64)>; 2],
    /// Processes at which nothing of an earlier router is left.
    cleared: BTreeSet<u32>,
    batches: BTreeMap<BatchId, Batch>,
    rounds: u64,
    pub(crate) stager: Stager,
    /// Keys that were read and are not committed, in this leg: copies of them may be under way, also after a crash of the router.
    in_hand: BTreeSet<KeyIx>,
    /// The keys of the move: those that were listed, and those that workers have written since.
    list: BTreeSet<KeyIx>,
    /// Where the leg has not taken it yet.
    list_at: KeyIx,
    /// Workers have written keys since that nobody named: the list has not all of them.
    pub(crate) anything: bool,
    /// The process that was listed, once it is.
    listed_of: Option<u32>,
    inbox: VecDeque<Happened>,
    pumping: bool,
    /// The epoch under which workers tell what they write: the listing waits for it.
    barrier: Option<u64>,
    /// The leg, as workers are told of it.
    view: Option<LegView<Known>>,
    epoch: u64,
    flush: Option<Flush>,
    flushes: VecDeque<u64>,
    /// Durable.
    map: Topology,
    journal: Vec<Vec<u8>>,
    durable: Replay,
    /// Given to the journal, and not durable.
    queue: Queue<Entry>,
    syncing: bool,
    /// The disk of the journal has no room for beginnings; nothing can be written.
    pub(crate) disk_is_full: bool,
    pub(crate) disk_is_broken: bool,
    /// The user wants the move to end: a leg that has not begun is not tried again.
    pub(crate) aborted: bool,
    /// A side was given up.
    lost: Option<Lost>,
    /// Keys that a node may still have that was given up, should it come back.
    pub(crate) left_at: [BTreeSet<KeyIx>; 2],
    killed: [bool; 2],
    /// The processes that the machine knew when it said that a leg is over.
    met_at_end: [Option<u32>; 2],
    /// The process that has answered when the leg had nothing left to do: what it shows should it restart from then on, nobody notices.
    pub(crate) confirmed: Option<u32>,
    /// The machine has said that the leg is over: it does nothing about a process that is met later.
    is_ending: bool,
    /// States of keys that a node may come back with, as long as the machine does not know of it.
    pub(crate) unnoticed: Vec<Unnoticed>,
    pub(crate) outcomes: Vec<String>,
    pub(crate) without: Vec<Side>,
    pub(crate) last_moved: bool,
}

impl Mover {
    pub(crate) fn new(
        random: &mut Random,
        scenario: &Scenario,
        keys: &[Key],
        fingerprints: Fingerprinter,
        planted: Option<Planted>,
    ) -> Self {
        let protocol = if random.chance(scenario.stop_and_copy) { Protocol::StopAndCopy } else { Protocol::Switchyard };
        let durability = if random.chance(scenario.aof) { Durability::Aof } else { Durability::Memory };
        Self {
            stage: Stage::Idle,
            driver: None,
            fingerprints,
            slot: slot_of(&keys[0]),
            protocol,
            durability,
            drain_patience_us: random.between(5_000, 80_000),
            source: 0,
            target: 1,
            scope: None,
            move_id: 0,
            leg: 0,
            tries: 0,
            moves_left: scenario.moves,
            begun: false,
            resume: None,
            links: Default::default(),
            broken: Default::default(),
            cleared: BTreeSet::new(),
            batches: BTreeMap::new(),
            rounds: 0,
            stager: Stager::default(),
            in_hand: BTreeSet::new(),
            list: BTreeSet::new(),
            list_at: 0,
            anything: false,
            listed_of: None,
            inbox: VecDeque::new(),
            pumping: false,
            barrier: None,
            view: None,
            epoch: 1,
            flush: None,
            flushes: VecDeque::new(),
            map: first_map(slot_of(&keys[0])),
            journal: Vec::new(),
            durable: Replay::default(),
            queue: journal::queue(planted),
            syncing: false,
            disk_is_full: false,
            disk_is_broken: false,
            aborted: false,
            lost: None,
            left_at: Default::default(),
            killed: [false; 2],
            met_at_end: [None; 2],
            confirmed: None,
            is_ending: false,
            unnoticed: Vec::new(),
            outcomes: Vec::new(),
            without: Vec::new(),
            last_moved: false,
        }
    }
}

/// Node 0 owns the slot.
fn first_map(slot: Slot) -> Topology {
    let names = ["0".to_owned(), "1".to_owned()];
    Topology::even(&names).expect("two nodes").handed_over(&[slot], NodeId(0))
}

const fn ix(side: Side) -> usize {
    side as usize
}

impl World {
    pub(crate) fn mover_is_done(&self) -> bool {
        self.mover.stage == Stage::Over && self.mover.queue.all().next().is_none() && self.mover.flush.is_none()
    }

    pub(crate) fn mover_state(&self) -> String {
        let m = &self.mover;
        format!(
            "{:?}, leg {} of move {}, {:?}, flush {:?}, barrier {:?}, written {}",
            m.stage,
            m.leg,
            m.move_id,
            m.driver.as_ref().map(Driver::progress),
            m.flush,
            m.barrier,
            m.queue.all().count()
        )
    }

    pub(super) const fn node_of(&self, side: usize) -> usize {
        if side == 0 { self.mover.source } else { self.mover.target }
    }

    // Moves and legs.

    /// The leg under way, or the next one.
    pub(crate) const fn leg(&self) -> (MoveId, u32) {
        (MoveId(self.mover.move_id), self.mover.leg)
    }

    /// What workers are told; the slot is in transit, or it is not.
    pub(crate) fn view(&self, epoch: u64, stage: Option<SlotStage>) -> View {
        let m = &self.mover;
        let Some(stage) = stage else { return View::new(epoch, m.map.clone(), Default::default()) };
        let is_moving = stage != SlotStage::Observed;
        // Then all keys are where their slot is, as far as workers know.
        let taken = (is_moving && m.scope.is_none() && self.bug(Bug::ExceptionTaken))
            .then(|| m.map.keys_handed_over(&[], &self.keys, NodeId(self.owner() as u16)));
        let map = taken.as_ref().unwrap_or(&m.map);
        let (source, target) = (NodeId(m.source as u16), NodeId(m.target as u16));
        let transit = Transit { move_id: MoveId(m.move_id), source, target, stage, keys_only: m.scope.is_some() };
        let topology = map.with_transits([(transit, &[m.slot][..])]).expect("one");
        let legs = m.view.iter().filter(|_| is_moving).map(|view| (self.leg(), view.clone())).collect();
        View::new(epoch, topology, legs)
    }

    fn publish(&mut self, stage: Option<SlotStage>) -> u64 {
        self.mover.epoch += 1;
        let epoch = self.mover.epoch;
        let view = Rc::new(self.view(epoch, stage));
        for worker in 0..self.workers.len() {
            let delay = self.random.delay_us();
            self.after(delay, Ev::Adopt { worker, view: view.clone() });
        }
        epoch
    }

    pub(crate) fn next_leg(&mut self) {
        if self.mover.stage != Stage::Idle {
            return;
        }
        let resumes = self.mover.resume.as_ref().is_some_and(|open| open.moving);
        if !self.mover.begun {
            if self.mover.moves_left == 0 {
                self.mover.stage = Stage::Over;
                return;
            }
            self.mover.moves_left -= 1;
            self.mover.move_id += 1;
            (self.mover.leg, self.mover.tries, self.mover.aborted) = (0, 0, false);
            self.mover.list.clear();
            (self.mover.listed_of, self.mover.anything) = (None, false);
            self.draw_move();
            let m = &self.mover;
            let mut records = vec![Record::Begun {
                move_id: MoveId(m.move_id),
                source: NodeId(m.source as u16),
                target: NodeId(m.target as u16),
                slots: vec![m.slot],
                protocol: m.protocol,
                durability: m.durability,
            }];
            if let Some(scope) = self.mover.scope.clone() {
                let mut keys: Vec<Key> = scope.iter().map(|key| self.keys[*key].clone()).collect();
                keys.sort_unstable();
                records.push(Record::Keys { move_id: MoveId(self.mover.move_id), keys });
            }
            self.mover.stage = Stage::Accepting;
            self.write(None, records);
            return;
        }
        let skew_us = self.nodes[0].ahead_us.abs_diff(self.nodes[1].ahead_us);
        if !resumes && skew_us > self.scenario.skew && !self.bug(Bug::ClocksNotCompared) {
            say!(self, "the clocks differ by {skew_us} us");
            self.after(2_000, Ev::NextLeg);
            return;
        }
        say!(self, "leg {} of move {}: {} to {}", self.mover.leg, self.mover.move_id, self.mover.source, self.mover.target);
        self.mover.stager.begin_leg(self.planted);
        if resumes {
            self.mover.stage = Stage::Connecting;
            self.connect_both();
        } else {
            self.mover.killed = [false; 2];
            let epoch = self.publish(Some(SlotStage::Observed));
            self.mover.stage = Stage::Observing;
            if self.bug(Bug::ListedTooEarly) {
                self.observed();
            } else {
                self.mover.barrier = Some(epoch);
            }
        }
    }

    fn observed(&mut self) {
        self.mover.stage = Stage::Connecting;
        self.connect_both();
    }

    fn connect_both(&mut self) {
        for side in 0..2 {
            if self.mover.links[side].conn.is_none() {
                self.dial_mover(side);
            }
        }
    }

    /// Whether a barrier is reached: every worker has adopted the epoch, and nothing earlier is in flight.
    pub(crate) fn look_at_barrier(&mut self) {
        let of_leg = || self.mover.driver.as_ref().and_then(Driver::barrier).map(|barrier| barrier.epoch);
        let Some(epoch) = self.mover.barrier.or_else(of_leg) else { return };
        let observing = self.mover.stage == Stage::Observing;
        // What was sent to a side that is given up may be executed there; that nobody is told so any more is enough.
        self.fail_what_waits_for_the_lost();
        let lost = self.given_up().map(|side| self.node_of(ix(side)));
        let has_drained = |worker: &crate::worker::Worker| match lost {
            Some(node) => worker.has_answered(epoch, node),
            None => worker.has_drained(epoch, observing),
        };
        if self.router_up && self.workers.iter().all(has_drained) {
            say!(self, "epoch {epoch} is drained");
            if self.mover.barrier.take().is_some() {
                self.observed();
            } else {
                self.mover_hears(Happened::Drained { databases: vec![0] });
            }
        }
    }

    fn begin_machine(&mut self) {
        let m = &mut self.mover;
        m.stage = Stage::Running;
        m.is_ending = false;
        m.confirmed = None;
        let orders = Orders {
            move_id: MoveId(m.move_id),
            leg: m.leg,
            source: NodeId(m.source as u16),
            target: NodeId(m.target as u16),
            slots: vec![m.slot],
            durability: m.durability,
            drain_patience_us: m.drain_patience_us,
        };
        let scope = m.scope.as_ref().map(|scope| {
            let mut keys: Vec<Key> = scope.iter().map(|key| self.keys[*key].clone()).collect();
            keys.sort_unstable();
            Arc::new(Scope::new(keys, m.fingerprints))
        });
        let begin = Begin {
            protocol: m.protocol,
            orders,
            fingerprints: m.fingerprints,
            resume: m.resume.take(),
            keys: scope.as_ref().map(|scope| scope.keys().to_vec()),
            databases: vec![0],
            listed_of: m.listed_of.map(|process| process.to_string()),
            target_is_clean: false,
        };
        m.driver = Some(driver(begin, self.planted));
        m.view = Some(LegView::new(Arc::default(), scope, m.fingerprints));
        m.list_at = 0;
        m.batches.clear();
        m.inbox.clear();
        let met = |link: &Link| {
            let (process, client_id) = link.process.unwrap_or_default();
            Process { run_id: process.to_string(), client_id }
        };
        let (source, target) = (met(&m.links[0]), met(&m.links[1]));
        self.noticed(self.mover.source);
        self.noticed(self.mover.target);
        self.mover_event(Event::Met { source, target });
        if self.mover.flush.is_some() {
            self.mover_event(Event::Quiesce);
        }
    }

    fn leg_ended(&mut self, outcome: &Outcome) {
        let is_without = self.given_up().is_some();
        self.mover.without.extend(self.given_up().map(Side::other));
        if !is_without {
            self.look_for_what_is_left(outcome);
        }
        let left = match outcome {
            Outcome::Moved => Some(self.mover.source),
            Outcome::Returned { .. } => Some(self.mover.target),
            Outcome::NotBegun { .. } => None,
        };
        for Unnoticed { node, mark, .. } in std::mem::take(&mut self.mover.unnoticed) {
            if left == Some(node) {
                self.history.forget(&vec![mark]);
            }
        }
        self.mover.in_hand.clear();
        say!(self, "leg {} of move {} ends: {outcome:?}", self.mover.leg, self.mover.move_id);
        self.mover.driver = None;
        self.mover.view = None;
        // The driver answers who asks when it is over, too.
        let is_asked = std::mem::take(&mut self.mover.inbox).contains(&Happened::Of(Event::Quiesce));
        self.staging_is_over();
        for side in 0..2 {
            self.let_go(side);
        }
        if self.bug(Bug::ForgottenAtTheEnd) {
            self.mover.broken = Default::default();
        }
        if is_asked {
            self.flush_goes();
        }
        let has_begun = !matches!(outcome, Outcome::NotBegun { .. });
        self.mover.last_moved = *outcome == Outcome::Moved && !is_without;
        self.mover.outcomes.push(format!("{outcome:?}"));
        if !has_begun {
            self.publish(Some(SlotStage::Observed));
            self.mover.tries += 1;
        }
        self.mover.leg += 1;
        if has_begun || self.mover.aborted || self.mover.tries >= TRIES {
            let move_id = MoveId(self.mover.move_id);
            self.write(None, vec![Record::Ended { move_id }]);
            self.mover.begun = false;
            if !has_begun {
                self.publish(None);
            }
        }
        self.mover.stage = Stage::Idle;
        let when = self.random.between(500, 10_000);
        self.after(when, Ev::NextLeg);
    }

    /// Whether a leg is taken up again that has given up this side.
    fn goes_on_without(&self, side: usize) -> bool {
        self.mover.resume.as_ref().is_some_and(|open| open.given_up.map(ix) == Some(side))
    }

    // Connections.

    fn let_go(&mut self, side: usize) {
        let link = &mut self.mover.links[side];
        if let Some(conn) = link.conn.take() {
            link.ready = false;
            let process = link.process.take();
            // Where all is answered nothing is under way.
            if !self.close(conn).is_empty() {
                let node = self.node_of(side);
                self.mover.broken[node].extend(process);
            }
        }
        // Another leg may have the sides the other way round.
        self.mover.links[side].kills = 0;
    }

    pub(crate) fn dial_mover(&mut self, side: usize) {
        if self.mover.links[side].conn.is_some() || !matches!(self.mover.stage, Stage::Connecting | Stage::Listing | Stage::Running) {
            return;
        }
        let node = self.node_of(side);
        let conn = self.connect(node, Owner::Mover);
        self.mover.links[side].conn = Some(conn);
        self.mover.links[side].ready = false;
        // The mover's requests are its own kind.
        if let Some(pending) = self.conns[conn as usize].pending.front_mut() {
            pending.what = Sent::Mover(What::Hello);
        }
    }

    fn side_of(&self, conn: u32) -> Option<usize> {
        self.mover.links.iter().position(|link| link.conn == Some(conn))
    }

    fn demand(&mut self, side: usize, cmd: Cmd, what: What) {
        if let Some(conn) = self.mover.links[side].conn {
            self.send(conn, cmd, Sent::Mover(what));
        }
    }

    fn said_hello(&mut self, side: usize, process: u32, number: u64) {
        let node = self.node_of(side);
        let is_resumed = self.mover.resume.as_ref().is_some_and(|open| open.moving);
        let link = &mut self.mover.links[side];
        link.process = Some((process, number));
        let ids: Vec<u64> = self.mover.broken[node].iter().filter(|(at, _)| *at == process).map(|(_, id)| *id).collect();
        link.kills = 0;
        if !ids.is_empty() && !self.bug(Bug::ReplacedWithoutKill) {
            self.mover.links[side].kills += 1;
            self.demand(side, Cmd::Kill(ids), What::Kill);
        }
        // A router that is gone may have left something at a process that this one has not met yet.
        let spared = self.mover.cleared.contains(&process) || (self.bug(Bug::EndedOnlyForALeg) && !is_resumed);
        if !spared && !self.bug(Bug::ResumedWithoutKill) {
            self.mover.links[side].kills += 1;
            let incarnation = self.incarnation;
            self.demand(side, Cmd::KillOlder(incarnation), What::Kill);
        }
        if self.mover.links[side].kills == 0 {
            self.link_ready(side);
        }
    }

    fn link_ready(&mut self, side: usize) {
        let link = &mut self.mover.links[side];
        link.ready = true;
        let (process, client_id) = link.process.unwrap_or_default();
        let node = self.node_of(side);
        self.mover.broken[node].clear();
        self.mover.cleared.insert(process);
        if self.mover.driver.is_some() {
            if !self.mover.is_ending {
                self.noticed(node);
            }
            let side_of = if side == 0 { Side::Source } else { Side::Target };
            let process = Process { run_id: process.to_string(), client_id };
            self.mover_hears(Happened::Restored { side: side_of, process, databases: vec![0] });
        } else if self.mover.stage == Stage::Connecting && (0..2).all(|side| self.mover.links[side].ready || self.goes_on_without(side)) {
            self.connected();
        }
    }

    /// The machine knows which process is there: what that shows of keys that are not there by the journal must not count.
    fn noticed(&mut self, node: usize) {
        self.noticed_if(|unnoticed| unnoticed.node == node);
    }

    fn noticed_if(&mut self, is_its: impl Fn(&Unnoticed) -> bool) {
        for unnoticed in std::mem::take(&mut self.mover.unnoticed) {
            if !is_its(&unnoticed) {
                self.mover.unnoticed.push(unnoticed);
                continue;
            }
            let Unnoticed { node, mark, .. } = unnoticed;
            let fingerprint = self.mover.fingerprints.of(&self.keys[mark.0]);
            let open = self.mover.durable.open.values().find_map(|open| open.leg.as_ref());
            let mut away = open.is_some_and(|leg| leg.away.contains_key(&fingerprint));
            for record in self.mover.pending() {
                match record {
                    Record::Moved { keys, .. } if keys.contains(&fingerprint) => away = true,
                    Record::Returned { keys, .. } if keys.contains(&fingerprint) => away = false,
                    _ => {}
                }
            }
            // It came here, by the journal, before anybody noticed.
            let stays = if node == self.mover.target { away } else { !away && open.is_some_and(|leg| leg.rolled_back.is_some()) };
            if !stays && self.nodes[node].up {
                self.history.forget(&vec![mark]);
            }
        }
    }

    pub(crate) fn mover_broke(&mut self, conn: u32) {
        let side = self.side_of(conn);
        self.close(conn);
        let Some(side) = side else { return };
        let link = &mut self.mover.links[side];
        let ready = link.ready;
        link.conn = None;
        link.ready = false;
        let process = link.process.take();
        let node = self.node_of(side);
        self.mover.broken[node].extend(process);
        self.staging_broke(side);
        if ready && self.mover.driver.is_some() {
            say!(self, "the mover loses side {side}");
            if side == 0 {
                self.source_lost();
            }
            self.mover_hears(Happened::Lost { side: if side == 0 { Side::Source } else { Side::Target } });
        } else {
            if self.mover.stage == Stage::Listing {
                self.mover.stage = Stage::Connecting;
            }
            let delay = self.random.between(300, 3_000);
            self.after(delay, Ev::DialMover { side });
        }
    }

    pub(crate) fn mover_answered(&mut self, conn: u32, what: Sent, reply: Reply) {
        let Some(side) = self.side_of(conn) else { return };
        let Sent::Mover(what) = what else { return };
        match (what, reply) {
            (What::Hello, Reply::Hello(process, number)) => self.said_hello(side, process, number),
            (What::Kill, _) => {
                self.mover.links[side].kills -= 1;
                if self.mover.links[side].kills == 0 {
                    self.link_ready(side);
                }
            }
            (What::Batch(batch, round, at), reply) => self.batch_answered(batch, round, at, reply),
            (What::Staging(part), reply) => self.staging_answered(part, reply),
            (What::List, Reply::Scanned(keys, next)) => self.listed(keys, next),
            (What::Scan(walk), Reply::Scanned(keys, next)) => {
                let names: Vec<Key> = keys.into_iter().filter(|key| *key < STAGING).map(|key| self.keys[key].clone()).collect();
                let (map, now) = (self.mover.map.clone(), self.now);
                let cursor = next.unwrap_or_default().to_string();
                let Some(driver) = &mut self.mover.driver else { return };
                let mut to_do = Vec::new();
                driver.scanned(walk, cursor.as_bytes(), names.iter().map(|name| &name[..]), &map, now, &mut to_do);
                self.perform_all(to_do);
            }
            (What::Confirm, _) => self.mover_event(Event::Confirmed { side: if side == 0 { Side::Source } else { Side::Target } }),
            (What::PurgeRemove(None), _) => {}
            (What::PurgeRemove(Some(walk)), _) => self.mover_hears(Happened::Unlinked { walk }),
            (what, reply) => self.violated(format!("the mover: {reply:?} in answer to {what:?}")),
        }
    }

    /// The mover's connection on which the removal of a key that should not be there is under way.
    pub(crate) fn removal_under_way(&self) -> Option<u32> {
        let removes = |pending: &crate::world::Pending| matches!(pending.what, Sent::Mover(What::PurgeRemove(_)));
        let conns = self.mover.links.iter().filter_map(|link| link.conn);
        conns.into_iter().find(|conn| self.conns[*conn as usize].pending.iter().any(removes))
    }

    // What the driver says.

    pub(crate) fn mover_event(&mut self, event: Event) {
        self.mover_hears(event.into());
    }

    pub(crate) fn mover_hears(&mut self, what: Happened) {
        if self.mover.driver.is_none() {
            // While big keys are copied it is looked for between two pieces.
            if what == Happened::Of(Event::Quiesce) && self.mover.stage != Stage::Staging {
                self.flush_goes();
            }
            return;
        }
        // What was told before the drain is taken before the tails are read: that waits for the record of the drain.
        if !matches!(what, Happened::Drained { .. }) && !self.bug(Bug::ToldNotTakenInTheLeg) {
            self.staging_hears();
        }
        self.mover.inbox.push_back(what);
        self.pump();
    }

    fn pump(&mut self) {
        if std::mem::replace(&mut self.mover.pumping, true) {
            return;
        }
        while let Some(what) = self.mover.inbox.pop_front() {
            if what != Happened::Tick {
                say!(self, "driver <- {what:?}");
            }
            let now = self.now;
            let Some(driver) = &mut self.mover.driver else { break };
            let mut to_do = Vec::new();
            driver.step(what, now, &mut to_do);
            for what in to_do {
                self.perform(what);
            }
        }
        self.mover.pumping = false;
    }

    fn perform_all(&mut self, to_do: Vec<Do>) {
        self.mover.pumping = true;
        for what in to_do {
            self.perform(what);
        }
        self.mover.pumping = false;
        self.pump();
    }

    /// Tells the workers of which clients wait that more is committed.
    fn wake_workers(&mut self) {
        for worker in self.mover.view.as_ref().map(|view| view.committed().take_waiting()).unwrap_or_default() {
            let delay = self.random.delay_us();
            self.after(delay, Ev::Committed { worker });
        }
    }

    fn perform(&mut self, what: Do) {
        say!(self, "driver -> {what:?}");
        self.count_action();
        match what {
            Do::Record { numbers, records } => {
                if records.iter().any(|record| matches!(record, Record::LegEnded { .. })) {
                    self.about_to_end();
                    self.mover.is_ending = true;
                    let owner = records.iter().find_map(|record| match record {
                        Record::LegEnded { owner, .. } => Some(self.node_of(ix(*owner))),
                        _ => None,
                    });
                    // It was to be asked before.
                    self.noticed_if(|unnoticed| Some(unnoticed.node) == owner && !unnoticed.is_late);
                    self.mover.met_at_end = std::array::from_fn(|side| self.mover.links[side].process.map(|(process, _)| process));
                }
                if self.bug(Bug::JournalNotSynced) {
                    self.after(20, Ev::Mover(Happened::Recorded(numbers)));
                    self.write(None, records);
                } else {
                    self.write(Some(numbers), records);
                }
            }
            Do::View { away } => {
                let kept = self.bug(Bug::CommittedKept);
                if let Some(view) = &mut self.mover.view {
                    *view = view.turned(if kept { view.committed().clone() } else { Arc::default() }, away);
                }
            }
            Do::Publish => {
                let stage = Some(SlotStage::Moving { leg: self.mover.leg });
                // Now and then the topology cannot be changed.
                let epoch = if self.random.chance(20) { None } else { Some(self.publish(stage)) };
                self.mover_hears(Happened::Published(epoch));
            }
            Do::Withdraw => {
                self.publish(Some(SlotStage::Observed));
            }
            Do::Scan { walk, side, cursor, .. } => {
                let from = String::from_utf8(cursor).ok().and_then(|digits| digits.parse().ok()).unwrap_or_default();
                self.demand(ix(side), Cmd::Scan(from, SCAN_KEYS), What::Scan(walk));
            }
            Do::Unlink { walk, side, keys, .. } => {
                for (at, key) in keys.iter().enumerate() {
                    let last = (at + 1 == keys.len()).then_some(walk);
                    self.demand(ix(side), Cmd::Unlink(self.key_ix(key)), What::PurgeRemove(last));
                }
            }
            Do::TakeListed => {
                let taken = self.take_listed();
                self.mover_hears(Happened::Taken(taken));
            }
            Do::Io(Io::Copy { batch, from, keys }) => {
                let read: Vec<KeyIx> = keys.iter().map(|key| self.key_ix(key)).collect();
                self.mover.in_hand.extend(read);
                self.begin_batch(batch, from, &keys, Kind::Dump);
            }
            Do::Io(Io::Store { batch, to, keys }) => self.begin_batch(batch, to, &keys, Kind::Restore),
            Do::Io(Io::Secure { batch, at, .. }) => self.begin_batch(batch, at, &[], Kind::Secure),
            Do::Io(Io::Remove { batch, from, keys }) => self.begin_batch(batch, from, &keys, Kind::Remove),
            Do::Io(Io::Migrate { batch, from, keys }) => self.begin_batch(batch, from, &keys, Kind::Migrate),
            Do::Io(Io::Commit { keys }) => {
                for key in &keys {
                    let key = self.key_ix(key);
                    self.mover.in_hand.remove(&key);
                }
                self.staged_are_moved(&keys);
                let fingerprints = keys.iter().map(|key| self.mover.fingerprints.of(key));
                self.mover.view.iter().for_each(|view| view.committed().commit(fingerprints.clone()));
                self.wake_workers();
            }
            Do::CommitAll => {
                self.mover.view.iter().for_each(|view| view.committed().commit_all());
                self.wake_workers();
            }
            Do::Io(Io::Refuse { keys, .. }) => {
                let move_id = MoveId(self.mover.move_id);
                let keys: Option<Rc<Vec<Fingerprint>>> =
                    keys.map(|keys| Rc::new(keys.iter().map(|key| self.mover.fingerprints.of(key)).collect()));
                for worker in 0..self.workers.len() {
                    let delay = self.random.delay_us();
                    self.after(delay, Ev::Refused { worker, move_id, keys: keys.clone() });
                }
            }
            Do::Confirm { side } => self.demand(ix(side), Cmd::Ping, What::Confirm),
            Do::Reach { side } => {
                let delay = self.random.between(300, 3_000);
                self.after(delay, Ev::DialMover { side: ix(side) });
            }
            Do::CatchUp { .. } => {
                let delay = self.random.below(300);
                self.after(delay, Ev::Mover(Happened::CaughtUp));
            }
            Do::HandOver { to } => {
                let owner = self.node_of(ix(to));
                let delay = self.random.between(100, 1_500);
                self.after(delay, Ev::Stored { owner });
            }
            Do::RollBack { .. } => self.staging_is_over(),
            Do::Io(Io::Quiet) => self.flush_goes(),
            Do::Lost { .. } => self.is_lost(),
            Do::Io(Io::Report { .. }) => {}
            Do::Io(Io::End(outcome)) => self.leg_ended(&outcome),
        }
    }

    /// The topology is stored.
    pub(crate) fn stored(&mut self, owner: usize) {
        // Now and then it cannot be.
        let is_done = !self.random.chance(20);
        if is_done {
            self.mover.map = self.map_with_leg_at(owner);
            self.publish(None);
        }
        self.mover_hears(Happened::HandedOver(is_done));
    }
}

#[cfg(feature = "planted-bugs")]
fn driver(begin: Begin, planted: Option<Planted>) -> Driver {
    Driver::with(begin, planted.and_then(Planted::of_the_driver))
}

#[cfg(not(feature = "planted-bugs"))]
fn driver(begin: Begin, _planted: Option<Planted>) -> Driver {
    Driver::new(begin)
}
