//! What surrounds the machine of a leg in the router: connections, listing, batches, journal, the stored topology, and recovery after a crash. It does
//! what the machine says and tells it what came of it; what it must get right itself is what the planted bugs of [`crate::planted`] break.

mod batches;
mod journal;
mod lost;
mod scope;
mod staging;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

use switchyard_policy::migration::record::{OpenLeg, Queue, Record, Replay};
use switchyard_policy::migration::{
    Action, BatchId, Durability, Event, Fingerprint, Fingerprinter, Key, Leg, Machine, Orders, Outcome, Process, Protocol, Side,
    StopAndCopy, Wrong, are_all_there,
};
use switchyard_policy::topology::{MoveId, NodeId, Slot, Topology, slot_of};

use self::batches::{Batch, Kind};
use self::journal::Entry;
use self::lost::Lost;
use self::staging::{Part, Stager};
use crate::node::{Cmd, KeyIx, Reply};
use crate::planted::{Bug, Planted};
use crate::random::Random;
use crate::scenario::Scenario;
use crate::worker::{Stage as ViewStage, View};
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
    Scan(u64),
    PurgeScan,
    PurgeRemove,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Idle,
    /// That a move begins is being recorded.
    Accepting,
    /// Workers adopt that the slots are observed.
    Observing,
    Connecting,
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

#[derive(Debug, Default)]
struct Listing {
    at: usize,
    number: u64,
    queue: VecDeque<KeyIx>,
    next: Option<KeyIx>,
    done: bool,
    asked: bool,
    /// In the place of an earlier one.
    again: bool,
    /// Counts of keys wanted by the machine.
    waiting: VecDeque<u32>,
}

#[derive(Debug)]
struct Purge {
    side: usize,
    wrong: Wrong,
    /// What is asked and not answered.
    left: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Flush {
    op: u64,
    sent: bool,
    told: u32,
}

/// The mover, and what outlives it: journal and topology.
pub(crate) struct Mover {
    stage: Stage,
    machine: Option<Box<dyn Machine>>,
    fingerprints: Fingerprinter,
    names: BTreeMap<Fingerprint, KeyIx>,
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
    listing: Listing,
    noted: BTreeSet<KeyIx>,
    purge: Option<Purge>,
    inbox: VecDeque<Event>,
    pumping: bool,
    barrier: Option<u64>,
    uid: u64,
    /// Where workers use the keys that are committed under it.
    workers_use: Side,
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
    /// Records of the leg that are durable: so many from the first.
    recorded: u64,
    /// The user wants the move to end: a leg that has not begun is not tried again.
    pub(crate) aborted: bool,
    /// A side was given up.
    lost: Option<Lost>,
    /// Keys that a node may still have that was given up, should it come back.
    pub(crate) left_at: [BTreeSet<KeyIx>; 2],
    killed: [bool; 2],
    /// The processes that the machine knew when it said that a leg is over.
    met_at_end: [Option<u32>; 2],
    /// The machine has said that the leg is over: it does nothing about a process that is met later.
    is_ending: bool,
    /// States of keys that a node may come back with, as long as the machine does not know of it.
    pub(crate) unnoticed: Vec<(usize, (KeyIx, usize))>,
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
            machine: None,
            fingerprints,
            names: keys.iter().enumerate().map(|(ix, key)| (fingerprints.of(key), ix)).collect(),
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
            listing: Listing::default(),
            noted: BTreeSet::new(),
            purge: None,
            inbox: VecDeque::new(),
            pumping: false,
            barrier: None,
            uid: 0,
            workers_use: Side::Target,
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
            recorded: 0,
            aborted: false,
            lost: None,
            left_at: Default::default(),
            killed: [false; 2],
            met_at_end: [None; 2],
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
            m.machine.as_ref().map(|machine| machine.progress()),
            m.flush,
            m.barrier,
            m.queue.all().count()
        )
    }

    pub(super) const fn node_of(&self, side: usize) -> usize {
        if side == 0 { self.mover.source } else { self.mover.target }
    }

    // Moves and legs.

    pub(super) fn view(&self, epoch: u64, stage: ViewStage) -> View {
        let places = (0..self.keys.len()).map(|key| self.lives_at(key)).collect();
        let scope = self.mover.scope.clone().filter(|_| stage != ViewStage::Settled);
        View { epoch, stage, owner: self.owner(), places: Rc::new(places), scope }
    }

    fn publish(&mut self, stage: ViewStage) -> u64 {
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
        say!(self, "leg {} of move {}: {} to {}", self.mover.leg, self.mover.move_id, self.mover.source, self.mover.target);
        self.mover.noted.clear();
        self.mover.stager.begin_leg(self.planted);
        if resumes {
            self.mover.stage = Stage::Connecting;
            self.connect_both();
        } else {
            self.mover.killed = [false; 2];
            let epoch = self.publish(ViewStage::Observed);
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

    /// A barrier is reached: every worker has adopted the epoch, and nothing earlier is in flight.
    pub(crate) fn look_at_barrier(&mut self) {
        let Some(epoch) = self.mover.barrier else { return };
        let observing = self.mover.stage == Stage::Observing;
        // What was sent to a side that is given up may be executed there; that nobody is told so any more is enough.
        self.fail_what_waits_for_the_lost();
        let lost = self.given_up().map(|side| self.node_of(ix(side)));
        let has_drained = |worker: &crate::worker::Worker| match lost {
            Some(node) => worker.has_answered(epoch, node),
            None => worker.has_drained(epoch, observing),
        };
        if self.router_up && self.workers.iter().all(has_drained) {
            self.mover.barrier = None;
            say!(self, "epoch {epoch} is drained");
            match self.mover.stage {
                Stage::Observing => self.observed(),
                Stage::Running => self.mover_event(Event::Drained),
                _ => {}
            }
        }
    }

    fn begin_machine(&mut self) {
        let m = &mut self.mover;
        m.stage = Stage::Running;
        m.is_ending = false;
        let orders = Orders {
            move_id: MoveId(m.move_id),
            leg: m.leg,
            source: NodeId(m.source as u16),
            target: NodeId(m.target as u16),
            slots: vec![m.slot],
            durability: m.durability,
            drain_patience_us: m.drain_patience_us,
        };
        let resume = m.resume.take();
        let machine: Box<dyn Machine> = match m.protocol {
            Protocol::StopAndCopy => Box::new(StopAndCopy::new(orders, m.fingerprints, resume)),
            Protocol::Switchyard => Box::new(planted(Leg::new(orders, m.fingerprints, resume), self.planted)),
        };
        let m = &mut self.mover;
        m.machine = Some(machine);
        m.recorded = 0;
        m.batches.clear();
        m.purge = None;
        m.inbox.clear();
        let met = |link: &Link| {
            let (process, client_id) = link.process.unwrap_or_default();
            Process { run_id: process.to_string(), client_id }
        };
        let (source, target) = (met(&m.links[0]), met(&m.links[1]));
        self.noticed(self.mover.source);
        self.noticed(self.mover.target);
        let m = &mut self.mover;
        let number = m.listing.number + 1;
        let named = m.scope.iter().flat_map(|scope| scope.iter().copied());
        let (queue, done) = (named.collect(), m.scope.is_some());
        m.listing = Listing { number, queue, done, next: (!done).then_some(0), ..Listing::default() };
        self.scan();
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
        for (at, mark) in std::mem::take(&mut self.mover.unnoticed) {
            if left == Some(at) {
                self.history.forget(&vec![mark]);
            }
        }
        self.mover.in_hand.clear();
        say!(self, "leg {} of move {} ends: {outcome:?}", self.mover.leg, self.mover.move_id);
        self.mover.machine = None;
        self.mover.inbox.clear();
        self.mover.barrier = None;
        self.staging_is_over();
        for side in 0..2 {
            self.let_go(side);
        }
        if self.bug(Bug::ForgottenAtTheEnd) {
            self.mover.broken = Default::default();
        }
        if self.mover.flush.is_some_and(|flush| !flush.sent) {
            self.flush_goes();
        }
        let has_begun = !matches!(outcome, Outcome::NotBegun { .. });
        self.mover.last_moved = *outcome == Outcome::Moved && !is_without;
        self.mover.outcomes.push(format!("{outcome:?}"));
        if !has_begun {
            self.publish(ViewStage::Settled);
            self.mover.tries += 1;
        }
        self.mover.leg += 1;
        if has_begun || self.mover.aborted || self.mover.tries >= TRIES {
            let move_id = MoveId(self.mover.move_id);
            self.write(None, vec![Record::Ended { move_id }]);
            self.mover.begun = false;
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
        if self.mover.links[side].conn.is_some() || !matches!(self.mover.stage, Stage::Connecting | Stage::Running) {
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
        if self.mover.machine.is_some() {
            if !self.mover.is_ending {
                self.noticed(node);
            }
            let side_of = if side == 0 { Side::Source } else { Side::Target };
            self.mover_event(Event::Restored { side: side_of, process: Process { run_id: process.to_string(), client_id } });
            if self.mover.listing.at == side && !self.mover.listing.done && !self.mover.listing.asked {
                self.mover.listing.next = Some(0);
                self.scan();
            }
        } else if self.mover.stage == Stage::Connecting && (0..2).all(|side| self.mover.links[side].ready || self.goes_on_without(side)) {
            self.connected();
        }
    }

    /// The machine knows which process is there: what that shows of keys that are not there by the journal must not count.
    fn noticed(&mut self, node: usize) {
        for (at, mark) in std::mem::take(&mut self.mover.unnoticed) {
            if at != node {
                self.mover.unnoticed.push((at, mark));
                continue;
            }
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
        if self.mover.listing.at == side {
            self.mover.listing.asked = false;
        }
        self.mover.purge.take_if(|purge| purge.side == side);
        self.staging_broke(side);
        if ready && self.mover.machine.is_some() {
            say!(self, "the mover loses side {side}");
            if side == 0 {
                self.refuse_reading_again();
            }
            self.mover_event(Event::Lost { side: if side == 0 { Side::Source } else { Side::Target } });
        } else {
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
            (What::Scan(number), Reply::Scanned(keys, next)) => {
                let keys: Vec<KeyIx> = keys.into_iter().filter(|key| self.is_own(*key)).collect();
                let listing = &mut self.mover.listing;
                if listing.number == number {
                    listing.asked = false;
                    listing.queue.extend(keys);
                    listing.next = next;
                    listing.done = next.is_none();
                    self.scan();
                    self.tell_listed();
                }
            }
            (What::PurgeScan, Reply::Scanned(keys, next)) => {
                let gone: Vec<KeyIx> = keys.into_iter().filter(|key| self.is_wrong(*key)).collect();
                let Some(purge) = &mut self.mover.purge else { return };
                purge.left += gone.len();
                purge.left -= usize::from(next.is_none());
                for key in gone {
                    self.demand(side, Cmd::Unlink(key), What::PurgeRemove);
                }
                if let Some(next) = next {
                    self.demand(side, Cmd::Scan(next, SCAN_KEYS), What::PurgeScan);
                }
                self.purge_goes_on();
            }
            (What::PurgeRemove, _) => {
                if let Some(purge) = &mut self.mover.purge {
                    purge.left -= 1;
                }
                self.purge_goes_on();
            }
            (what, reply) => self.violated(format!("the mover: {reply:?} in answer to {what:?}")),
        }
    }

    /// The mover's connection on which the removal of a key that should not be there is under way.
    pub(crate) fn removal_under_way(&self) -> Option<u32> {
        let conn = self.mover.links[self.mover.purge.as_ref()?.side].conn?;
        let removes = |pending: &crate::world::Pending| pending.what == Sent::Mover(What::PurgeRemove);
        self.conns[conn as usize].pending.iter().any(removes).then_some(conn)
    }

    fn purge_goes_on(&mut self) {
        if self.mover.purge.as_ref().is_some_and(|purge| purge.left == 0) {
            self.mover.purge = None;
            self.mover_event(Event::Purged);
        }
    }

    // Listing.

    fn scan(&mut self) {
        let listing = &mut self.mover.listing;
        let (side, number) = (listing.at, listing.number);
        // A listing that is begun again waits until keys are asked for: those are written down to which workers have not heard of the leg are in it then.
        let early = listing.again && listing.waiting.is_empty();
        if listing.done || listing.asked || early || !self.mover.links[side].ready {
            return;
        }
        if let Some(next) = listing.next {
            listing.asked = true;
            self.demand(side, Cmd::Scan(next, SCAN_KEYS), What::Scan(number));
        }
    }

    pub(crate) fn mover_notes(&mut self, keys: &[KeyIx]) {
        let own: Vec<KeyIx> = keys.iter().copied().filter(|key| self.is_own(*key)).collect();
        self.mover.noted.extend(own);
    }

    fn tell_listed(&mut self) {
        loop {
            let listing = &mut self.mover.listing;
            if listing.done {
                let noted = std::mem::take(&mut self.mover.noted);
                listing.queue.extend(noted);
            }
            let Some(count) = listing.waiting.front().copied().filter(|_| listing.done || !listing.queue.is_empty()) else { return };
            listing.waiting.pop_front();
            let count = listing.queue.len().min(count as usize);
            let keys: Vec<Key> = listing.queue.drain(..count).map(|key| self.keys[key].clone()).collect();
            let end = listing.done && listing.queue.is_empty();
            self.mover_event(Event::Listed { keys, end });
        }
    }

    // What the machine says.

    pub(crate) fn mover_event(&mut self, event: Event) {
        if self.mover.machine.is_none() {
            // While big keys are copied it is looked for between two pieces.
            if event == Event::Quiesce && self.mover.stage != Stage::Staging {
                self.flush_goes();
            }
            return;
        }
        // What was told before the drain is taken before the tails are read: that waits for the record of the drain.
        if event != Event::Drained && !self.bug(Bug::ToldNotTakenInTheLeg) {
            self.staging_hears();
        }
        self.mover.inbox.push_back(event);
        if std::mem::replace(&mut self.mover.pumping, true) {
            return;
        }
        let mut actions = Vec::new();
        while let Some(event) = self.mover.inbox.pop_front() {
            if event != Event::Tick {
                say!(self, "machine <- {event:?}");
            }
            let Some(machine) = &mut self.mover.machine else { break };
            machine.step(event, self.now, &mut actions);
            for action in actions.drain(..) {
                say!(self, "machine -> {action:?}");
                self.count_action();
                self.perform(action);
            }
        }
        self.mover.pumping = false;
    }

    fn tell_workers(&mut self, keys: &[Key]) {
        let uid = self.mover.uid;
        let keys: Rc<Vec<KeyIx>> = Rc::new(keys.iter().map(|key| self.key_ix(key)).collect());
        for worker in 0..self.workers.len() {
            let delay = self.random.delay_us();
            self.after(delay, Ev::Committed { worker, uid, keys: keys.clone() });
        }
    }

    fn perform(&mut self, action: Action) {
        match action {
            Action::Record { number, record } => {
                if matches!(record, Record::LegEnded { .. }) {
                    self.about_to_end();
                    self.mover.is_ending = true;
                    self.mover.met_at_end = std::array::from_fn(|side| self.mover.links[side].process.map(|(process, _)| process));
                }
                self.write(Some(number), vec![record]);
                if self.bug(Bug::JournalNotSynced) {
                    self.after(20, Ev::Mover(Event::Recorded(number)));
                }
            }
            Action::Announce => {
                self.mover.uid += 1;
                self.mover.workers_use = Side::Target;
                let stage = ViewStage::Moving { uid: self.mover.uid, target: self.mover.target };
                self.mover.barrier = Some(self.publish(stage));
            }
            Action::Withdraw => {
                self.mover.barrier = None;
                self.publish(ViewStage::Settled);
            }
            Action::RollBack { away, .. } => {
                self.staging_is_over();
                self.mover.uid += 1;
                self.mover.workers_use = Side::Source;
                let away = away.iter().filter_map(|key| self.mover.names.get(key).copied()).collect();
                let stage = ViewStage::RolledBack { uid: self.mover.uid, source: self.mover.source, away };
                self.mover.barrier = Some(self.publish(stage));
            }
            Action::Purge { side, wrong } => {
                self.mover.purge = Some(Purge { side: ix(side), wrong, left: 1 });
                self.demand(ix(side), Cmd::Scan(0, SCAN_KEYS), What::PurgeScan);
            }
            Action::List { count } => {
                self.mover.listing.waiting.push_back(count);
                self.scan();
                self.tell_listed();
            }
            Action::Relist { at } => {
                let before = std::mem::take(&mut self.mover.listing);
                let named = self.mover.scope.iter().flat_map(|scope| scope.iter().copied());
                let (queue, done) = (named.collect(), self.mover.scope.is_some());
                let number = before.number + 1;
                self.mover.listing =
                    Listing { at: ix(at), number, queue, done, next: (!done).then_some(0), again: true, ..Listing::default() };
                for _ in before.waiting {
                    self.mover_event(Event::Listed { keys: Vec::new(), end: false });
                }
                self.scan();
            }
            Action::Copy { batch, from, keys } => {
                let read: Vec<KeyIx> = keys.iter().map(|key| self.key_ix(key)).collect();
                self.mover.in_hand.extend(read);
                self.begin_batch(batch, from, &keys, Kind::Dump);
            }
            Action::Store { batch, to, keys } => self.begin_batch(batch, to, &keys, Kind::Restore),
            Action::Secure { batch, at, .. } => self.begin_batch(batch, at, &[], Kind::Secure),
            Action::Remove { batch, from, keys } => self.begin_batch(batch, from, &keys, Kind::Remove),
            Action::Migrate { batch, from, keys } => self.begin_batch(batch, from, &keys, Kind::Migrate),
            Action::Commit { keys } => {
                for key in &keys {
                    let key = self.key_ix(key);
                    self.mover.in_hand.remove(&key);
                }
                self.staged_are_moved(&keys);
                self.tell_workers(&keys);
            }
            Action::Refuse { keys, .. } => {
                let keys = keys.map(|keys| Rc::new(keys.iter().map(|key| self.key_ix(key)).collect()));
                for worker in 0..self.workers.len() {
                    let delay = self.random.delay_us();
                    self.after(delay, Ev::Refused { worker, keys: keys.clone() });
                }
            }
            Action::Restore { side } => {
                let delay = self.random.between(300, 3_000);
                self.after(delay, Ev::DialMover { side: ix(side) });
            }
            Action::HandOver { to } => {
                self.commit_all(to);
                let owner = self.node_of(ix(to));
                let delay = self.random.between(100, 1_500);
                self.after(delay, Ev::Stored { owner });
            }
            Action::Quiet => self.flush_goes(),
            Action::Lost { .. } => self.is_lost(),
            Action::Report { .. } => {}
            Action::End(outcome) => self.leg_ended(&outcome),
        }
    }

    /// As the router does it before the topology is stored: who waits need not wait for that.
    fn commit_all(&mut self, owner: Side) {
        if !are_all_there(self.mover.workers_use, owner) && !self.bug(Bug::CommittedAtTheOther) {
            return;
        }
        let uid = self.mover.uid;
        for worker in 0..self.workers.len() {
            let delay = self.random.delay_us();
            self.after(delay, Ev::CommittedAll { worker, uid });
        }
    }

    /// The topology is stored.
    pub(crate) fn stored(&mut self, owner: usize) {
        self.mover.map = self.map_with_leg_at(owner);
        self.publish(ViewStage::Settled);
        self.mover_event(Event::HandedOver);
    }
}

#[cfg(feature = "planted-bugs")]
pub(crate) fn planted(leg: Leg, planted: Option<Planted>) -> Leg {
    match planted {
        Some(Planted::Machine(bug)) => leg.with(Some(bug)),
        _ => leg,
    }
}

#[cfg(not(feature = "planted-bugs"))]
pub(crate) fn planted(leg: Leg, _planted: Option<Planted>) -> Leg {
    leg
}
