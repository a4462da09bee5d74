//! I/O for the driver of a leg (`switchyard_policy::migration::driver`), modelled on the router's mover: connections,
//! batches, journal, stored topology, and recovery after a crash. The planted bugs of [`crate::injected`] break this
//! code.

mod batches;
mod journal;
mod life;
mod listing;
mod lost;
mod perform;
#[cfg(feature = "research")]
mod published;
mod scope;
mod staging;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

use switchyard_policy::migration::life::Step;
use switchyard_policy::migration::published::Paper;
use switchyard_policy::migration::record::{OpenMove, Queue, Record, Replay};
use switchyard_policy::migration::{
    BatchId, Begin, Driver, DriverEvent, Durability, Event, Fingerprinter, Key, LegOrder, LegView, Legs,
    MoveStateMachine, Outcome, Pace, Process, Protocol, Scope, Side,
};
use switchyard_policy::topology::{MoveId, NodeId, Placement, Slot, Stage as SlotStage, Topology, Transit};

use self::batches::{Batch, Late};
use self::journal::Entry;
use self::lost::Lost;
use self::staging::{Part, Stager};
use crate::injected::{Bug, Planted};
use crate::node::{Cmd, KeyIx, Reply, STAGING};
use crate::random::Random;
use crate::scenario::Scenario;
use crate::worker::{Known, Tracked, View};
use crate::world::{Ev, Owner, What as Sent, World, say};

/// Keys per SCAN.
const SCAN_KEYS: usize = 2;
/// Failed starts of a leg after which its move is aborted.
const FAILED_STARTS_MAX: u32 = 40;

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum What {
    Hello,
    Kill,
    /// Round of the batch, and position in it.
    Batch(BatchId, u64, usize),
    Staging(Part),
    /// Listing before the legs.
    List,
    /// Number of the walk.
    Scan(u32),
    Confirm,
    /// A removal, with its walk if it is the last part of one.
    PurgeRemove(Option<u32>),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Idle,
    /// The start of a move is being recorded.
    Accepting,
    Resting,
    /// Workers are adopting the observed slots.
    Observing,
    /// A connection to a node is being made.
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
    /// Outstanding confirmations of CLIENT KILL, and the client ids that they end.
    kills: u32,
    ends: Vec<u64>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct Flush {
    op: u64,
    sent: bool,
    reply_count: u32,
    /// Movers that have quiesced.
    quiet: BTreeSet<Lane>,
}

/// State of a key that a restarted node may return, and its mark in the history.
#[derive(Clone, Debug)]
pub(crate) struct Unnoticed {
    pub(crate) node: usize,
    pub(crate) mark: (KeyIx, usize),
    /// The node was killed after the last request of the leg.
    pub(crate) is_late: bool,
}

/// Index of a mover.
pub(crate) type Lane = usize;

/// State that moves share and that outlives them: topology, journal, FLUSHALL, old connections.
pub(crate) struct Fleet {
    fingerprints: Fingerprinter,
    epoch: u64,
    last_move: u64,
    /// By node: earlier connections that may still execute commands.
    broken: [Vec<(u32, u64)>; 2],
    /// Processes where the connections of earlier routers have ended.
    cleared: BTreeSet<u32>,
    flush: Option<Flush>,
    flushes: VecDeque<u64>,
    /// Durable state.
    map: Topology,
    journal: Vec<Vec<u8>>,
    durable: Replay,
    /// Submitted to the journal and not yet durable.
    queue: Queue<Entry>,
    syncing: bool,
    /// The journal's disk has no room for the start of moves and legs, or accepts no write at all.
    pub(crate) disk_is_full: bool,
    pub(crate) disk_is_broken: bool,
    /// Keys that an abandoned node may still have if it returns.
    pub(crate) left_at: [BTreeSet<KeyIx>; 2],
    pub(crate) outcomes: Vec<String>,
    pub(crate) without: Vec<Side>,
}

impl Fleet {
    pub(crate) fn new(map: Topology, planted: Option<Planted>) -> Self {
        Self {
            fingerprints: Fingerprinter::new(7),
            epoch: 1,
            last_move: 0,
            broken: Default::default(),
            cleared: BTreeSet::new(),
            flush: None,
            flushes: VecDeque::new(),
            map,
            journal: Vec::new(),
            durable: Replay::default(),
            queue: journal::queue(planted),
            syncing: false,
            disk_is_full: false,
            disk_is_broken: false,
            left_at: Default::default(),
            outcomes: Vec::new(),
            without: Vec::new(),
        }
    }
}

/// Keys of a move: listed at first, or written by workers since.
#[derive(Debug, Default)]
struct List {
    keys: BTreeSet<KeyIx>,
    /// First key that the leg has not taken.
    at: KeyIx,
    /// Slots with undeclared writes, for which the list is incomplete.
    anything: BTreeSet<Slot>,
    /// Listed process, once the listing is complete.
    of: Option<u32>,
    /// Whether all keys are listed, or named by the move.
    is_whole: bool,
}

/// State of a leg for the checkers.
#[derive(Debug, Default)]
pub(crate) struct Watched {
    /// Keys that were read and are not committed: copies may be in flight, even after a crash of the router.
    in_hand: BTreeSet<KeyIx>,
    /// Keys of the leg's slots that lived elsewhere when it began.
    apart: BTreeSet<KeyIx>,
    /// Nodes that were killed since the leg began.
    killed: [bool; 2],
    /// Processes that the machine knew when it ended the leg.
    met_at_end: [Option<u32>; 2],
    /// Process that replied when the leg had nothing left to do. Its restart goes unnoticed from then on.
    pub(crate) confirmed: Option<u32>,
    /// The machine has ended the leg and ignores processes that it meets later.
    is_ending: bool,
    /// States of keys that a restarted node may return, as long as the machine does not know of the restart.
    pub(crate) unnoticed: Vec<Unnoticed>,
    /// The last leg has moved its keys to the target.
    pub(crate) moved: bool,
}

/// Published state of a move's slots.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SlotView {
    Nothing,
    /// The remaining slots are being listed.
    Observed,
    /// The slots of the leg move; the other listed slots are still observed.
    Moving,
    /// The leg has ended; the other listed slots are still observed.
    Rest,
}

/// A mover, which executes one move after the other for its own slots.
pub(crate) struct Mover {
    stage: Stage,
    driver: Option<Driver>,
    /// Slots that only this mover moves.
    all_slots: Vec<Slot>,
    /// Remaining slots of the current move, and the slots of the leg.
    slots: Vec<Slot>,
    leg_slots: Vec<Slot>,
    protocol: Protocol,
    /// Set if the protocol runs as published.
    paper: Option<Paper>,
    durability: Durability,
    /// Databases that had keys.
    databases: BTreeSet<u32>,
    source: usize,
    target: usize,
    /// Names of the keys, for a move without slots.
    scope: Option<Rc<BTreeSet<KeyIx>>>,
    move_id: u64,
    leg: u32,
    tries: u32,
    moves_left: u64,
    /// State machine of the current move, its current step, and the number of the step.
    life: Option<MoveStateMachine>,
    step: Option<Step>,
    turn: u64,
    /// Start of the wait for the workers' drain.
    requested_us: u64,
    /// Journal state of a move that the previous router left.
    resume: Option<OpenMove>,
    links: [Link; 2],
    batches: BTreeMap<BatchId, Batch>,
    /// Late reads, by round.
    late: BTreeMap<u64, Late>,
    rounds: u64,
    pub(crate) stager: Stager,
    list: List,
    inbox: VecDeque<DriverEvent>,
    pumping: bool,
    /// Epoch under which workers report their writes. The listing waits for it.
    barrier: Option<u64>,
    /// Published state of the slots and of the leg.
    shown: SlotView,
    view: Option<LegView<Known>>,
    /// Set if a side was abandoned.
    lost: Option<Lost>,
    pub(crate) watched: Watched,
}

impl Mover {
    pub(crate) fn new(random: &mut Random, scenario: &Scenario, lane: Lane, all_slots: Vec<Slot>) -> Self {
        let protocols = [
            (scenario.stop_and_copy, Protocol::StopAndCopy),
            (scenario.source, Protocol::Source),
            (scenario.freeze, Protocol::FreezeAndCopy),
            (scenario.rocksteady, Protocol::Rocksteady),
            (scenario.netmigrate, Protocol::NetMigrate),
            (scenario.fulva, Protocol::Fulva),
            (scenario.bloom, Protocol::Bloom),
        ];
        // Draws nothing for a chance of 0, so that the seeds of other scenarios keep their runs.
        let drawn = protocols.into_iter().find(|(chance, _)| *chance > 0 && random.chance(*chance));
        let protocol = drawn.map_or(Protocol::Switchyard, |(_, protocol)| protocol);
        #[cfg(feature = "research")]
        let paper = published::drawn(random, scenario, protocol);
        #[cfg(not(feature = "research"))]
        let paper = None;
        let durability = if random.chance(scenario.aof) { Durability::Aof } else { Durability::Memory };
        Self {
            stage: Stage::Idle,
            driver: None,
            slots: Vec::new(),
            leg_slots: Vec::new(),
            all_slots,
            protocol,
            paper,
            durability,
            databases: BTreeSet::new(),
            source: 0,
            target: 1,
            scope: None,
            move_id: 0,
            leg: 0,
            tries: 0,
            moves_left: scenario.moves,
            life: None,
            step: None,
            turn: 0,
            requested_us: 0,
            resume: None,
            links: Default::default(),
            batches: BTreeMap::new(),
            late: BTreeMap::new(),
            rounds: 0,
            stager: Stager::of(lane),
            list: List::default(),
            inbox: VecDeque::new(),
            pumping: false,
            barrier: None,
            shown: SlotView::Nothing,
            view: None,
            lost: None,
            watched: Watched::default(),
        }
    }

    /// Remaining slots of the move, without the slots of the leg.
    fn rest(&self) -> Vec<Slot> {
        self.slots.iter().copied().filter(|slot| !self.leg_slots.contains(slot)).collect()
    }

    /// Transit of the slots of the move.
    fn transits(&self) -> Vec<(SlotStage, Vec<Slot>)> {
        let rest =
            Some((SlotStage::Observed, self.rest())).filter(|(_, slots)| self.list.is_whole && !slots.is_empty());
        match self.shown {
            SlotView::Nothing => Vec::new(),
            SlotView::Observed => Some((SlotStage::Observed, self.slots.clone()))
                .filter(|(_, slots)| !slots.is_empty())
                .into_iter()
                .collect(),
            SlotView::Moving => {
                std::iter::once((SlotStage::Moving { leg: self.leg }, self.leg_slots.clone())).chain(rest).collect()
            }
            SlotView::Rest => rest.into_iter().collect(),
        }
    }

    /// Id of the current or next leg.
    pub(crate) const fn leg(&self) -> (MoveId, u32) {
        (MoveId(self.move_id), self.leg)
    }

    const fn node_of(&self, side: usize) -> usize {
        if side == 0 { self.source } else { self.target }
    }

    const fn transit(&self, stage: SlotStage) -> Transit {
        let (source, target) = (NodeId(self.source as u16), NodeId(self.target as u16));
        Transit { move_id: MoveId(self.move_id), source, target, stage, keys_only: self.scope.is_some() }
    }
}

const fn ix(side: Side) -> usize {
    side as usize
}

impl World {
    pub(crate) fn mover_is_done(&self) -> bool {
        let are_over = self.movers.iter().all(|mover| mover.stage == Stage::Over);
        are_over && self.fleet.queue.all().next().is_none() && self.fleet.flush.is_none()
    }

    pub(crate) fn mover_state(&self) -> String {
        let of = |m: &Mover| {
            let progress = m.driver.as_ref().map(Driver::progress);
            format!("{:?}, leg {} of move {}, {progress:?}, barrier {:?}", m.stage, m.leg, m.move_id, m.barrier)
        };
        let movers: Vec<String> = self.movers.iter().map(of).collect();
        format!("{}; flush {:?}, written {}", movers.join("; "), self.fleet.flush, self.fleet.queue.all().count())
    }

    // Moves and legs.

    /// Builds the view for the workers: the map with the slots in transit. `reply_count` is the mover whose move has
    /// changed.
    pub(crate) fn view(&self, told: Option<Lane>) -> View {
        let (mut map, mut transits, mut legs) = (self.fleet.map.clone(), Vec::new(), Legs::default());
        let drops = |at: Lane| told.is_some_and(|lane| at != lane) && self.bug(Bug::OtherLegDropped);
        for (_, m) in self.movers.iter().enumerate().filter(|(at, _)| !drops(*at)) {
            let is_moving = m.shown == SlotView::Moving;
            if is_moving && m.scope.is_none() && self.bug(Bug::OverrideTaken) {
                // Then workers assume that all keys are where their slot is.
                let keys = self.keys.iter().filter(|key| m.leg_slots.contains(&self.fleet.map.slot_of(key)));
                map = map.keys_handed_over(&[], keys, NodeId(m.source as u16));
            }
            let of_move = m.transits().into_iter().filter(|(stage, _)| {
                !(is_moving && *stage == SlotStage::Observed && self.bug(Bug::LaterSlotsNotObserved))
            });
            transits.extend(of_move.map(|(stage, slots)| (m.transit(stage), slots)));
            legs.extend(m.view.iter().filter(|_| is_moving).map(|view| (m.leg(), view.clone())));
        }
        let transits: Vec<_> = transits.iter().map(|(transit, slots)| (*transit, &slots[..])).collect();
        let topology = if transits.is_empty() { map } else { map.with_transits(transits).expect("few") };
        let topology =
            if self.bug(Bug::OldSlotsServed) { topology.with_stored_placement(Placement::Crc16) } else { topology };
        View::new(self.fleet.epoch, topology, legs)
    }

    /// Publishes the transit of a move's slots to the workers.
    fn publish(&mut self, lane: Lane, shown: SlotView) -> u64 {
        self.movers[lane].shown = shown;
        self.fleet.epoch += 1;
        let epoch = self.fleet.epoch;
        let view = Rc::new(self.view(Some(lane)));
        for worker in 0..self.workers.len() {
            let delay = self.random.delay_us();
            self.after(delay, Ev::Adopt { worker, view: view.clone() });
        }
        epoch
    }

    /// Checks the barriers. A barrier is reached if every worker has adopted the epoch and no earlier command is in
    /// flight.
    pub(crate) fn look_at_barriers(&mut self) {
        (0..self.movers.len()).for_each(|lane| self.look_at_barrier(lane));
    }

    fn look_at_barrier(&mut self, lane: Lane) {
        let of_leg = || self.movers[lane].driver.as_ref().and_then(Driver::barrier).map(|barrier| barrier.epoch);
        let Some(epoch) = self.movers[lane].barrier.or_else(of_leg) else { return };
        let observing = self.movers[lane].shown == SlotView::Observed;
        // An abandoned side may execute earlier commands. It suffices that no client receives the replies.
        self.fail_commands_for_lost_node(lane);
        let lost = self.given_up(lane).map(|side| self.movers[lane].node_of(ix(side)));
        let has_drained = |worker: &crate::worker::Worker| match lost {
            Some(node) => worker.has_answered(epoch, node),
            None => worker.has_drained(epoch, observing),
        };
        if self.router_up && self.workers.iter().all(has_drained) {
            // Both nodes are queried for their databases, so a dead one is noticed here at the latest.
            let unheard: Vec<u32> = (0..2)
                .filter(|side| self.movers[lane].links[*side].ready && !self.is_process_alive(lane, *side))
                .filter_map(|side| self.movers[lane].links[side].conn)
                .collect();
            if self.movers[lane].barrier.is_none() && !unheard.is_empty() {
                return unheard.into_iter().for_each(|conn| self.after(500, Ev::Broke { conn }));
            }
            say!(self, "epoch {epoch} is drained");
            if self.movers[lane].barrier.take().is_some() {
                if let Some(came) = self.observed(lane) {
                    self.on_step_result(lane, came);
                }
            } else {
                let now = self.databases_in_use(lane);
                let early = self.movers[lane].driver.as_ref().map(|driver| driver.databases().to_vec());
                let databases = early.filter(|_| self.bug(Bug::DatabasesAskedEarly)).unwrap_or(now);
                self.on_mover_event(lane, DriverEvent::Drained { databases });
            }
        }
    }

    /// Whether the process that accepted the connection still replies.
    fn is_process_alive(&self, lane: Lane, side: usize) -> bool {
        self.movers[lane].links[side].conn.is_some_and(|conn| self.conns[conn as usize].node_alive)
    }

    /// Queries INFO keyspace of the connected nodes. A database that had keys once stays in the list.
    fn databases_in_use(&mut self, lane: Lane) -> Vec<u32> {
        let names = self.names();
        let connected: Vec<usize> = (0..2).filter(|side| self.movers[lane].links[*side].ready).collect();
        for side in connected {
            let node = self.movers[lane].node_of(side);
            if !self.is_process_alive(lane, side) {
                continue;
            }
            let found = self.nodes[node].keys.range(..STAGING).map(|(key, _)| (key / names) as u32);
            self.movers[lane].databases.extend(found);
        }
        self.movers[lane].databases.iter().copied().collect()
    }

    fn begin_machine(&mut self, lane: Lane) {
        let apart = (0..self.keys.len()).filter(|key| !self.is_own(lane, *key)).collect();
        let databases = self.databases_in_use(lane);
        let m = &mut self.movers[lane];
        m.watched.apart = apart;
        m.stage = Stage::Running;
        m.watched.is_ending = false;
        m.watched.confirmed = None;
        let orders = LegOrder {
            move_id: MoveId(m.move_id),
            leg: m.leg,
            source: NodeId(m.source as u16),
            target: NodeId(m.target as u16),
            slots: m.leg_slots.clone(),
            durability: m.durability,
            drain_timeout_us: m.life.as_ref().map_or(0, MoveStateMachine::drain_timeout_us),
        };
        let resume = m.life.as_ref().and_then(|life| life.open().cloned());
        let was = resume.as_ref().map(|open| [open.source.clone(), open.target.clone()]);
        let scope = m.scope.as_ref().map(|scope| {
            let names = scope.iter().map(|key| self.keys[*key].clone());
            let mut keys: Vec<Key> = names.filter(|key| m.leg_slots.contains(&self.fleet.map.slot_of(key))).collect();
            keys.sort_unstable();
            Arc::new(Scope::new(keys, self.fleet.fingerprints))
        });
        let begin = Begin {
            protocol: m.protocol,
            paper: m.paper,
            orders,
            fingerprints: self.fleet.fingerprints,
            resume,
            keys: scope.as_ref().map(|scope| scope.keys().to_vec()),
            databases,
            listed_run_id: m.list.of.map(|process| process.to_string()),
            target_is_clean: false,
        };
        m.driver = Some(driver(begin, self.planted));
        let tracked = m.paper.map(|paper| Tracked(Rc::new(RefCell::new(paper.tracker()))));
        let rules = m.paper.map(|paper| paper.rules(m.protocol, MoveId(m.move_id)));
        m.view = Some(LegView::new(Known::tracked(tracked), scope, self.fleet.fingerprints).as_published(rules));
        m.list.at = 0;
        m.batches.clear();
        m.late.clear();
        m.inbox.clear();
        // A missing side is met when it returns. Until then it counts as the recorded process, lost.
        let met = |side: usize| match (&m.links[side], &was) {
            (Link { ready: false, .. }, Some(was)) => was[side].clone(),
            (link, _) => {
                let (process, client_id) = link.process.unwrap_or_default();
                Process { run_id: process.to_string(), client_id }
            }
        };
        let (source, target) = (met(0), met(1));
        let missing: Vec<usize> = (0..2).filter(|side| !m.links[*side].ready).collect();
        for side in (0..2).filter(|side| !missing.contains(side)) {
            self.on_process_known(lane, self.movers[lane].node_of(side));
        }
        if self.movers[lane].paper.is_some() {
            // Some keys after others, so that a copy is partial for some time.
            let pace =
                Pace { batch_keys: 1 + self.random.below(3) as u32, batches: 1, interval_us: self.random.below(2_000) };
            self.mover_event(lane, Event::Pace(pace));
        }
        self.mover_event(lane, Event::Met { source, target });
        for side in missing {
            self.on_mover_event(lane, DriverEvent::Lost { side: if side == 0 { Side::Source } else { Side::Target } });
        }
        if self.movers[lane].life.as_ref().is_some_and(MoveStateMachine::is_aborted) {
            self.mover_event(lane, Event::RollBack);
        }
        if let Some(side) = self.steered_without(lane) {
            self.mover_event(lane, Event::GiveUp { side });
        }
        if self.fleet.flush.is_some() {
            self.mover_event(lane, Event::Quiesce);
        }
    }

    fn leg_ended(&mut self, lane: Lane, outcome: &Outcome) {
        let is_without = self.given_up(lane).is_some();
        self.note_left_at_target(lane, outcome);
        self.fleet.without.extend(self.given_up(lane).map(Side::other));
        if !is_without {
            self.check_keys_left(lane, outcome);
        }
        let left = match outcome {
            Outcome::Moved => Some(self.movers[lane].source),
            Outcome::Returned { .. } => Some(self.movers[lane].target),
            Outcome::NotBegun { .. } => None,
        };
        for unnoticed in std::mem::take(&mut self.movers[lane].watched.unnoticed) {
            if !self.is_of_leg(lane, unnoticed.mark.0) {
                self.movers[lane].watched.unnoticed.push(unnoticed);
            } else if left == Some(unnoticed.node) {
                self.history.forget(&vec![unnoticed.mark]);
            }
        }
        self.movers[lane].watched.in_hand.clear();
        say!(self, "leg {} of move {} ends: {outcome:?}", self.movers[lane].leg, self.movers[lane].move_id);
        self.movers[lane].driver = None;
        self.movers[lane].view = None;
        // A request to quiesce is also answered at the end of the leg.
        let is_asked = std::mem::take(&mut self.movers[lane].inbox).contains(&DriverEvent::Of(Event::Quiesce));
        self.staging_is_over(lane);
        if is_asked {
            self.on_quiesced(lane);
        }
        self.movers[lane].watched.moved = *outcome == Outcome::Moved && !is_without;
        self.fleet.outcomes.push(format!("{outcome:?}"));
        if matches!(outcome, Outcome::NotBegun { .. }) {
            self.publish(lane, SlotView::Observed);
        }
        self.continue_life(lane, outcome.clone());
    }

    // Connections.

    fn release_link(&mut self, lane: Lane, side: usize) {
        let link = &mut self.movers[lane].links[side];
        if let Some(conn) = link.conn.take() {
            link.ready = false;
            let process = link.process.take();
            // Without pending replies nothing is in flight.
            if !self.close(conn).is_empty() {
                let node = self.movers[lane].node_of(side);
                self.fleet.broken[node].extend(process);
            }
        }
        // The next leg may have the sides the other way round.
        self.movers[lane].links[side].kills = 0;
    }

    pub(crate) fn dial_mover(&mut self, lane: Lane, side: usize) {
        if self.movers[lane].links[side].conn.is_some()
            || !matches!(self.movers[lane].stage, Stage::Connecting | Stage::Running)
        {
            return;
        }
        let node = self.movers[lane].node_of(side);
        let conn = self.connect(node, Owner::Mover(lane));
        self.movers[lane].links[side].conn = Some(conn);
        self.movers[lane].links[side].ready = false;
        // Marks the handshake as a request of the mover.
        if let Some(pending) = self.conns[conn as usize].pending.front_mut() {
            pending.what = Sent::Mover(What::Hello);
        }
    }

    fn side_of(&self, lane: Lane, conn: u32) -> Option<usize> {
        self.movers[lane].links.iter().position(|link| link.conn == Some(conn))
    }

    fn demand(&mut self, lane: Lane, side: usize, cmd: Cmd, what: What) {
        if let Some(conn) = self.movers[lane].links[side].conn {
            self.send(conn, cmd, Sent::Mover(what));
        }
    }

    fn on_hello(&mut self, lane: Lane, side: usize, process: u32, number: u64) {
        let node = self.movers[lane].node_of(side);
        let is_resumed = self.movers[lane].has_open_leg();
        let link = &mut self.movers[lane].links[side];
        link.process = Some((process, number));
        let ids: Vec<u64> =
            self.fleet.broken[node].iter().filter(|(at, _)| *at == process).map(|(_, id)| *id).collect();
        link.kills = 0;
        link.ends.clone_from(&ids);
        if !ids.is_empty() && !self.bug(Bug::ReplacedWithoutKill) {
            self.movers[lane].links[side].kills += 1;
            self.demand(lane, side, Cmd::Kill(ids), What::Kill);
        }
        // A dead router may have left commands at a process that this router has not met.
        let spared = self.fleet.cleared.contains(&process) || (self.bug(Bug::EndedOnlyForALeg) && !is_resumed);
        if !spared && !self.bug(Bug::ResumedWithoutKill) {
            self.movers[lane].links[side].kills += 1;
            let incarnation = self.incarnation;
            self.demand(lane, side, Cmd::KillOlder(incarnation), What::Kill);
        }
        if self.movers[lane].links[side].kills == 0 {
            self.link_ready(lane, side);
        }
    }

    fn link_ready(&mut self, lane: Lane, side: usize) {
        let link = &mut self.movers[lane].links[side];
        link.ready = true;
        let (process, client_id) = link.process.unwrap_or_default();
        let node = self.movers[lane].node_of(side);
        // Other connections may have broken since.
        let ended = std::mem::take(&mut self.movers[lane].links[side].ends);
        self.fleet.broken[node].retain(|(at, id)| *at == process && !ended.contains(id));
        self.fleet.cleared.insert(process);
        if self.movers[lane].driver.is_some() {
            if !self.movers[lane].watched.is_ending {
                self.on_process_known(lane, node);
            }
            let side_of = if side == 0 { Side::Source } else { Side::Target };
            let process = Process { run_id: process.to_string(), client_id };
            if !self.bug(Bug::UnusableKeptAtReturn) {
                self.drop_unusable(lane);
            }
            let databases = self.databases_in_use(lane);
            self.on_mover_event(lane, DriverEvent::Restored { side: side_of, process, databases });
        } else {
            self.reached(lane, side, true);
        }
    }

    /// Records that the machine knows the process at a node, so that outdated keys of the node must not count.
    fn on_process_known(&mut self, lane: Lane, node: usize) {
        self.noticed_if(lane, |unnoticed| unnoticed.node == node);
    }

    fn noticed_if(&mut self, lane: Lane, is_its: impl Fn(&Unnoticed) -> bool) {
        for unnoticed in std::mem::take(&mut self.movers[lane].watched.unnoticed) {
            if !is_its(&unnoticed) {
                self.movers[lane].watched.unnoticed.push(unnoticed);
                continue;
            }
            let Unnoticed { node, mark, .. } = unnoticed;
            let fingerprint = self.fleet.fingerprints.of(&self.keys[mark.0]);
            let open = self.open_leg(lane);
            let mut away = open.is_some_and(|leg| leg.cut_over || leg.away.contains_key(&fingerprint));
            for record in self.fleet.pending() {
                match record {
                    Record::Moved { keys, .. } | Record::Committed { keys, .. } if keys.contains(&fingerprint) => {
                        away = true
                    }
                    Record::CutOver { .. } => away = true,
                    Record::Returned { keys, .. } if keys.contains(&fingerprint) => away = false,
                    _ => {}
                }
            }
            // By the journal, the key came here before the restart was noticed.
            let stays = if node == self.movers[lane].target {
                away
            } else {
                !away && open.is_some_and(|leg| leg.rolled_back.is_some())
            };
            if !stays && self.nodes[node].up {
                self.history.forget(&vec![mark]);
            }
        }
    }

    pub(crate) fn mover_broke(&mut self, lane: Lane, conn: u32) {
        let side = self.side_of(lane, conn);
        self.close(conn);
        let Some(side) = side else { return };
        let link = &mut self.movers[lane].links[side];
        let ready = link.ready;
        link.conn = None;
        link.ready = false;
        let process = link.process.take();
        let node = self.movers[lane].node_of(side);
        self.fleet.broken[node].extend(process);
        self.staging_broke(lane, side);
        if ready && self.movers[lane].driver.is_some() {
            say!(self, "the mover loses side {side}");
            if side == 0 {
                self.source_lost(lane);
            }
            self.on_mover_event(lane, DriverEvent::Lost { side: if side == 0 { Side::Source } else { Side::Target } });
        } else if self.movers[lane].driver.is_some() {
            let delay = self.random.between(300, 3_000);
            self.after(delay, Ev::DialMover { lane, side });
        } else {
            self.reached(lane, side, false);
        }
    }

    pub(crate) fn mover_answered(&mut self, lane: Lane, conn: u32, what: Sent, reply: Reply) {
        let Some(side) = self.side_of(lane, conn) else { return };
        let Sent::Mover(what) = what else { return };
        match (what, reply) {
            (What::Hello, Reply::Hello(process, number)) => self.on_hello(lane, side, process, number),
            (What::Kill, _) => {
                self.movers[lane].links[side].kills -= 1;
                if self.movers[lane].links[side].kills == 0 {
                    self.link_ready(lane, side);
                }
            }
            (What::Batch(batch, round, at), reply) => self.batch_answered(lane, batch, round, at, reply),
            (What::Staging(part), reply) => self.staging_answered(lane, part, reply),
            (What::List, Reply::Scanned(keys, next)) => self.listed(lane, keys, next),
            (What::Scan(walk), Reply::Scanned(keys, next)) => {
                let names: Vec<Key> =
                    keys.into_iter().filter(|key| *key < STAGING).map(|key| self.keys[key].clone()).collect();
                let (map, now) = (self.fleet.map.clone(), self.now);
                let cursor = next.unwrap_or_default().to_string();
                let Some(driver) = &mut self.movers[lane].driver else { return };
                let mut to_do = Vec::new();
                driver.scanned(walk, cursor.as_bytes(), names.iter().map(|name| &name[..]), &map, now, &mut to_do);
                self.perform_all(lane, to_do);
            }
            (What::Confirm, _) => {
                let side = if side == 0 { Side::Source } else { Side::Target };
                self.mover_event(lane, Event::Confirmed { side, evicted: 0 });
            }
            (What::PurgeRemove(None), _) => {}
            (What::PurgeRemove(Some(walk)), _) => self.on_mover_event(lane, DriverEvent::Unlinked { walk }),
            (what, reply) => self.violated(format!("the mover: {reply:?} as the reply to {what:?}")),
        }
    }

    /// Returns a mover's connection with the removal of an unexpected key in flight.
    pub(crate) fn removal_under_way(&self) -> Option<(Lane, u32)> {
        let removes = |pending: &crate::world::Pending| matches!(pending.what, Sent::Mover(What::PurgeRemove(_)));
        let of = |(lane, mover): (Lane, &Mover)| {
            mover.links.iter().filter_map(|link| link.conn).map(|conn| (lane, conn)).collect::<Vec<_>>()
        };
        let mut conns = self.movers.iter().enumerate().flat_map(of);
        conns.find(|(_, conn)| self.conns[*conn as usize].pending.iter().any(removes))
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
