//! The simulated world: the event queue, network, nodes and faults.
//!
//! Everything that takes time is an event in one queue, ordered by time and then by insertion. A connection is a pair
//! of ordered pipes that can break at any message. Messages sent before the break still arrive, possibly much later,
//! and the node executes them although no owner is left to receive the reply.

mod faults;
mod network;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

use switchyard_policy::hot_copies::{CacheableSet, GateId};
use switchyard_policy::migration::{DriverEvent, Event, Fingerprint, Key};
use switchyard_policy::topology::{MoveId, NodeId, Slot, Topology, crc16_slot};

use crate::clients::Client;
use crate::history::History;
use crate::hot::{Hot, Table};
use crate::injected::{Bug, Planted, is_injected};
use crate::mover::{Fleet, Lane, Mover, What as MoverWhat};
use crate::node::{Cmd, Entry, KeyIx, Node, Op, Persistence, Reply, part};
use crate::random::Random;
use crate::scenario::Scenario;
use crate::worker::{View, Worker};

/// Longest wait for a reply before the owner closes the connection.
const TIMEOUT_US: u64 = 25_000;
/// Interval between sweeps for late replies.
const SWEEP_US: u64 = 5_000;
/// A run that is longer has got stuck.
const END_US: u64 = 60_000_000;

/// Owner of a connection to a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Owner {
    /// A worker, shared by all its clients.
    Worker(usize),
    /// A worker, for one blocking command.
    Blocking(usize, u64),
    /// A worker, for a client that watches a key, with the number of its WATCH.
    Watching(usize, u64),
    Mover(Lane),
    /// A worker, for fills of hot copies.
    Filling(usize),
}

/// Purpose of a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum What {
    Hello,
    /// Ends broken connections of a worker and their commands.
    Kill(Vec<u64>),
    Unblock,
    Command(u64),
    /// PTTL of a fill, with the number of the fill.
    FillTtl(u32),
    Fill(u32),
    /// Heartbeat of a connection for fills.
    Beat,
    Mover(MoverWhat),
}

/// A request without a reply yet.
#[derive(Clone, Debug)]
pub(crate) struct Pending {
    pub(crate) request: u64,
    pub(crate) what: What,
    pub(crate) sent_us: u64,
}

pub(crate) struct Conn {
    pub(crate) node: usize,
    pub(crate) owner: Owner,
    pub(crate) incarnation: u32,
    /// Process that accepted the connection, and the client id that it assigned.
    pub(crate) accepted: Option<(u32, u64)>,
    pub(crate) node_alive: bool,
    pub(crate) owner_alive: bool,
    pub(crate) pending: VecDeque<Pending>,
    sent: u64,
    arrived: u64,
    /// Messages with a higher number are lost.
    cut_after: u64,
    /// No message is delivered to the node before.
    held_until_us: u64,
    /// Delivered messages that the node cannot execute yet.
    inbox: VecDeque<(u64, Cmd)>,
    last_to_node_us: u64,
    last_to_owner_us: u64,
    /// A reply was lost, so no later reply arrives.
    drops_outbound: bool,
}

/// A fault, or an operator's request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    KillNode(usize),
    KillRouter,
    Stop(usize),
    Cut,
    CutAll(usize),
    Mute(usize),
    Deaf(usize),
    Full(usize),
    RollBack,
    GiveUp,
    Lose(usize),
    Snapshot(usize),
    FullDisk,
    BrokenDisk,
    Panic,
}

#[derive(Debug)]
pub(crate) enum Ev {
    ToNode { conn: u32, number: u64, request: u64, cmd: Cmd },
    ToOwner { conn: u32, request: u64, reply: Reply },
    Broke { conn: u32 },
    Release { conn: u32 },
    Adopt { worker: usize, view: Rc<View> },
    Committed { worker: usize },
    Refused { worker: usize, move_id: MoveId, keys: Option<Rc<Vec<Fingerprint>>> },
    Wanted { of: (MoveId, u32), keys: Vec<Key> },
    Mover(Lane, DriverEvent),
    Synced,
    DiskRepaired,
    Stored { lane: Lane, owner: usize, before: Option<Box<Topology>> },
    Dial { worker: usize, node: usize },
    DialMover { lane: Lane, side: usize },
    NextMove { lane: Lane },
    Rested { lane: Lane, turn: u64 },
    Staging { lane: Lane },
    Resend { op: u64 },
    Dispatch { op: u64 },
    Client { client: usize },
    Fault(Fault),
    StartNode(usize),
    StartRouter,
    Continue(usize),
    InboundRestored(usize),
    MemoryFreed(usize),
    SetClock { node: usize, ahead_us: u64 },
    Arm,
    AdoptArmed { worker: usize, set: Arc<CacheableSet>, gates: Rc<Table> },
    HotTurn { worker: usize },
    RaiseLate { worker: usize, op: u64, node: usize, raised: Vec<GateId> },
    Impatient { op: u64 },
    Sweep,
}

struct At {
    time: u64,
    order: u64,
    incarnation: u32,
    ev: Ev,
}

impl PartialEq for At {
    fn eq(&self, other: &Self) -> bool {
        (self.time, self.order) == (other.time, other.order)
    }
}
impl Eq for At {}
impl PartialOrd for At {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for At {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.time, self.order).cmp(&(other.time, other.order))
    }
}

pub(crate) struct World {
    pub(crate) now: u64,
    queue: BinaryHeap<Reverse<At>>,
    order: u64,
    pub(crate) random: Random,
    pub(crate) scenario: Scenario,
    pub(crate) planted: Option<Planted>,
    pub(crate) nodes: [Node; 2],
    outbound_blocked_until: [u64; 2],
    inbound_blocked_until: [u64; 2],
    processes: u32,
    pub(crate) conns: Vec<Conn>,
    requests: u64,
    pub(crate) router_up: bool,
    pub(crate) incarnation: u32,
    pub(crate) workers: Vec<Worker>,
    pub(crate) hot: Hot,
    pub(crate) fleet: Fleet,
    pub(crate) movers: Vec<Mover>,
    pub(crate) clients: Vec<Client>,
    pub(crate) ops: BTreeMap<u64, crate::clients::Command>,
    pub(crate) next_op: u64,
    pub(crate) history: History,
    pub(crate) keys: Vec<Key>,
    /// Faults triggered by the mover's nth action.
    at_action: Vec<(u64, Fault)>,
    /// Faults triggered when a leg is about to end.
    at_end: Vec<Fault>,
    pub(crate) actions: u64,
    /// Executed transactions of clients with WATCH.
    pub(crate) executed: u64,
    pub(crate) faults_left: u64,
    pub(crate) faulty: bool,
    pub(crate) trace: Option<Vec<String>>,
    pub(crate) violation: Option<String>,
    pub(crate) finishing: bool,
}

macro_rules! say {
    ($world:expr, $($text:tt)*) => {
        if $world.trace.is_some() {
            let text = format!($($text)*);
            $world.note(text);
        }
    };
}
pub(crate) use say;

impl World {
    pub(crate) fn new(seed: u64, scenario: &Scenario, planted: Option<Planted>, trace: bool) -> Self {
        let mut random = Random::new(seed);
        let mut persistence =
            || if random.chance(scenario.durable) { Persistence::Always } else { Persistence::Snapshots };
        let mut nodes = [Node::new(persistence(), 1), Node::new(persistence(), 2)];
        if scenario.skew > 0 {
            nodes.iter_mut().for_each(|node| node.ahead_us = random.below(scenario.skew + 1));
        }
        let skew_us = nodes[0].ahead_us.abs_diff(nodes[1].ahead_us);
        let tag = |number: u64| char::from(b't' + (number % scenario.slots) as u8);
        // Rules are for names without a hash tag. Without rules each of these has a slot of its own.
        let name = |number: u64| match scenario.adoptions {
            0 => format!("{{{}}}{number}", tag(number)),
            _ => format!("{}--{number}", tag(number)),
        };
        let names: Vec<Key> = (0..scenario.keys).map(|number| Key::from(name(number).into_bytes())).collect();
        let keys: Vec<Key> = (0..scenario.databases).flat_map(|_| names.clone()).collect();
        let of_tags = if scenario.adoptions > 0 { scenario.keys } else { scenario.slots };
        let mut slots: Vec<Slot> = keys.iter().take(of_tags as usize).map(|key| crc16_slot(key)).collect();
        slots.sort_unstable();
        let names = ["0".to_owned(), "1".to_owned()];
        let mut map = Topology::even(&names).expect("two nodes").handed_over(&slots, NodeId(0));
        let mut movers = Vec::new();
        for lane in 0..scenario.movers as usize {
            let own: Vec<Slot> = slots.iter().copied().skip(lane).step_by(scenario.movers as usize).collect();
            if lane > 0 && scenario.wrong_clock == 0 && random.chance(500) {
                map = map.handed_over(&own, NodeId(1));
            }
            movers.push(Mover::new(&mut random, scenario, lane, own));
        }
        let mut world = Self {
            now: 0,
            queue: BinaryHeap::new(),
            order: 0,
            random,
            scenario: scenario.clone(),
            planted,
            nodes,
            outbound_blocked_until: [0; 2],
            inbound_blocked_until: [0; 2],
            processes: 2,
            conns: Vec::new(),
            requests: 0,
            router_up: true,
            incarnation: 1,
            workers: Vec::new(),
            hot: Hot::default(),
            fleet: Fleet::new(map, planted),
            movers,
            clients: Vec::new(),
            ops: BTreeMap::new(),
            next_op: 0,
            history: History::new(keys.len(), skew_us),
            keys,
            at_action: Vec::new(),
            at_end: Vec::new(),
            actions: 0,
            executed: 0,
            faults_left: 0,
            faulty: false,
            trace: trace.then(Vec::new),
            violation: None,
            finishing: false,
        };
        world.begin();
        world
    }

    fn begin(&mut self) {
        let view = Rc::new(self.view(None));
        self.workers = (0..self.scenario.workers).map(|_| Worker::new(view.clone())).collect();
        self.draw_hot();
        self.hot_begins();
        // Initial keys. With several databases, some runs use only the first.
        let only_first = self.scenario.databases > 1 && self.random.chance(600);
        for key in 0..if only_first { self.names() } else { self.keys.len() } {
            let at = self.lives_at(key);
            if self.random.chance(500) {
                let value = if self.scenario.parts > 0 { self.draw_big(key) } else { vec![1_000 + key as u32] };
                let node = &mut self.nodes[at];
                node.keys.insert(key, Entry { value: value.clone(), expires_us: None });
                node.disk = node.keys.clone();
                self.history.begins_with(key, value);
            }
        }
        if self.random.chance(self.scenario.leftovers) {
            for key in 0..if only_first { self.names() } else { self.keys.len() } {
                if self.random.chance(400) {
                    let entry = Entry { value: vec![9_000 + key as u32], expires_us: None };
                    let at = 1 - self.lives_at(key);
                    self.nodes[at].keys.insert(key, entry);
                }
            }
            self.nodes.iter_mut().for_each(|node| node.disk = node.keys.clone());
        }
        self.clients =
            (0..self.scenario.clients).map(|number| Client::new(number as usize, self.scenario.commands)).collect();
        for client in 0..self.clients.len() {
            let when = self.random.below(3_000);
            self.after(when, Ev::Client { client });
        }
        if self.scenario.wrong_clock > 0 && self.random.chance(self.scenario.wrong_clock) {
            let right = self.nodes[1].ahead_us;
            self.nodes[1].ahead_us += self.random.between(10_000, 50_000);
            let when = self.random.below(60_000);
            self.after(when, Ev::SetClock { node: 1, ahead_us: right });
        }
        self.draw_faults();
        for lane in 0..self.movers.len() {
            let when = self.random.below(4_000);
            self.after(when, Ev::NextMove { lane });
        }
        self.after(SWEEP_US, Ev::Sweep);
    }

    /// Returns the initial elements of a hash or a list.
    fn draw_big(&mut self, key: KeyIx) -> Vec<u32> {
        let count = self.random.between(3, crate::clients::FIELDS) as u32;
        let of_hash = self.random.chance(700);
        let first = 1_000 + 10 * key as u32;
        (0..count).map(|at| if of_hash { part(at, first + at) } else { first + at }).collect()
    }

    fn draw_faults(&mut self) {
        let s = self.scenario.clone();
        let mut faults = Vec::new();
        type Make = fn(usize) -> Fault;
        let kinds: [(u64, Make); 12] = [
            (s.kill_node, Fault::KillNode),
            (s.kill_router, |_| Fault::KillRouter),
            (s.stop, Fault::Stop),
            (s.cut, |_| Fault::Cut),
            (s.cut_all, Fault::CutAll),
            (s.drops_outbound, Fault::Mute),
            (s.delays_inbound, Fault::Deaf),
            (s.full, Fault::Full),
            (s.roll_back, |_| Fault::RollBack),
            (s.full_disk, |_| Fault::FullDisk),
            (s.broken_disk, |_| Fault::BrokenDisk),
            (s.panics, |_| Fault::Panic),
        ];
        for (chance, make) in kinds {
            // Draws no number without panics, so that recorded seeds keep their runs.
            if (chance > 0 || make(0) != Fault::Panic) && self.random.chance(chance) {
                for _ in 0..self.random.between(1, 3) {
                    let node = self.random.below(2) as usize;
                    faults.push(make(node));
                }
            }
        }
        if s.give_up > 0 && self.random.chance(s.give_up) {
            faults.push(Fault::GiveUp);
        }
        if s.lose > 0 && self.random.chance(s.lose) {
            let node = self.random.below(2) as usize;
            faults.push(Fault::Lose(node));
        }
        self.faulty = faults.iter().any(|fault| *fault != Fault::RollBack) || s.impatient > 0;
        for node in 0..2 {
            if self.nodes[node].persistence == Persistence::Snapshots {
                for _ in 0..self.random.below(3) {
                    faults.push(Fault::Snapshot(node));
                }
            }
        }
        self.faults_left = faults.len() as u64;
        for fault in faults {
            if s.moves == 0 {
                let when = self.random.below(40_000);
                self.after(when, Ev::Fault(fault));
            } else if matches!(fault, Fault::KillRouter | Fault::KillNode(_)) && self.random.chance(250) {
                self.at_end.push(fault);
            } else if self.random.chance(600) {
                let action = self.random.between(1, 60);
                self.at_action.push((action, fault));
            } else {
                let when = self.random.below(60_000);
                self.after(when, Ev::Fault(fault));
            }
        }
    }

    /// Counts an action of the mover and schedules the faults that it triggers.
    pub(crate) fn count_action(&mut self) {
        self.actions += 1;
        let actions = self.actions;
        let now: Vec<Fault> = self.at_action.extract_if(.., |(at, _)| *at <= actions).map(|(_, fault)| fault).collect();
        for fault in now {
            let when = self.random.below(300);
            self.after(when, Ev::Fault(fault));
        }
    }

    /// Schedules a fault for the time in which the end of a leg is recorded, stored and published.
    pub(crate) fn about_to_end(&mut self) {
        if let Some(fault) = self.at_end.pop() {
            let when = self.random.below(3_000);
            self.after(when, Ev::Fault(fault));
        }
    }

    pub(crate) fn note(&mut self, text: String) {
        let now = self.now;
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{now:>9} {text}"));
        }
    }

    pub(crate) fn violated(&mut self, text: String) {
        say!(self, "VIOLATION {text}");
        self.violation.get_or_insert(text);
    }

    pub(crate) fn after(&mut self, delay_us: u64, ev: Ev) {
        self.at(self.now + delay_us, ev);
    }

    fn at(&mut self, time: u64, ev: Ev) {
        self.order += 1;
        let incarnation = self.incarnation;
        self.queue.push(Reverse(At { time, order: self.order, incarnation, ev }));
    }

    /// Number of key names. The key `name` in database `d` has the index `name + d * names()`.
    pub(crate) fn names(&self) -> usize {
        self.scenario.keys as usize
    }

    /// Index of a name, equal to the index of its key in database 0.
    pub(crate) fn key_ix(&self, key: &Key) -> KeyIx {
        std::str::from_utf8(&key[3..]).ok().and_then(|digits| digits.parse().ok()).unwrap_or_default()
    }

    /// Time on a node's clock.
    pub(crate) fn clock(&self, node: usize) -> u64 {
        self.now + self.nodes[node].ahead_us
    }

    /// Converts an entry's expiry from the node's clock to world time.
    pub(crate) fn in_time(&self, node: usize, entry: Entry) -> Entry {
        Entry { expires_us: entry.expires_us.map(|end| end.saturating_sub(self.nodes[node].ahead_us)), ..entry }
    }

    fn execute(&mut self, conn: u32, request: u64, cmd: Cmd) {
        let ix = self.conns[conn as usize].node;
        let now = self.clock(ix);
        if !self.nodes[ix].up {
            self.conns[conn as usize].node_alive = false;
            return;
        }
        self.nodes[ix].expire(now);
        self.nodes[ix].touch(&[]);
        say!(self, "node {ix}: {cmd:?} (connection {conn})");
        let node = &mut self.nodes[ix];
        let mut grown = Vec::new();
        let mut named = Vec::new();
        if let Cmd::Client(op) | Cmd::Loaded(op) = &cmd
            && !op.is_read()
        {
            op.uses(&mut named);
        }
        let renamed = if let Cmd::Client(Op::Rename(_, _, token)) = cmd { Some(token) } else { None };
        let reply = match cmd {
            Cmd::Hello => {
                let number = node.next_client;
                node.next_client += 1;
                let process = node.process;
                self.conns[conn as usize].accepted = Some((process, number));
                // A worker that connects to a node first ends the connections of earlier routers there.
                let leaves_it = is_injected(self.planted, Bug::ResumedWithoutKill)
                    || is_injected(self.planted, Bug::EndedOnlyForALeg);
                if !leaves_it && !matches!(self.conns[conn as usize].owner, Owner::Mover(_)) {
                    self.kill_older(ix, self.conns[conn as usize].incarnation);
                }
                Reply::Hello(process, number)
            }
            Cmd::Kill(ids) => {
                let process = node.process;
                for c in &mut self.conns {
                    if c.node == ix && c.accepted.is_some_and(|(at, id)| at == process && ids.contains(&id)) {
                        c.node_alive = false;
                        c.inbox.clear();
                    }
                }
                self.forget_blocked(ix);
                Reply::Ok
            }
            Cmd::KillOlder(incarnation) => {
                self.kill_older(ix, incarnation);
                Reply::Ok
            }
            Cmd::Unblock(id) => {
                let process = node.process;
                let at = node
                    .blocked
                    .iter()
                    .position(|(conn, ..)| self.conns[*conn as usize].accepted == Some((process, id)));
                if let Some(at) = at {
                    let (conn, request, _) = node.blocked.remove(at);
                    self.reply(conn, request, Reply::Unblocked);
                }
                Reply::Ok
            }
            Cmd::Client(op) => {
                if let Op::Pop(key) = op {
                    match node.execute(&op, now) {
                        Some(reply) => reply,
                        None => {
                            node.blocked.push((conn, request, key));
                            return;
                        }
                    }
                } else {
                    op.uses(&mut grown);
                    match node.execute_watched(conn, &op, now).or_else(|| node.execute(&op, now)) {
                        Some(reply) => reply,
                        None => Reply::Error,
                    }
                }
            }
            Cmd::Loaded(op) => {
                node.script = true;
                op.uses(&mut grown);
                node.execute(&op, now).unwrap_or(Reply::Error)
            }
            Cmd::Pttl(key) => Reply::Number(node.pttl(key, now)),
            Cmd::Scan(from, count, end) => node.scan(from, count, end),
            Cmd::Dump(key) => Reply::Dumped(node.keys.get(&key).cloned()),
            Cmd::Restore(key, entry) => {
                grown.push(key);
                node.restore(key, entry, false, now)
            }
            Cmd::Replace(key, entry) => {
                grown.push(key);
                node.restore(key, entry, true, now)
            }
            Cmd::Unlink(key) => Reply::Number(node.keys.remove(&key).is_some().into()),
            Cmd::Ping => {
                if let Owner::Mover(lane) = self.conns[conn as usize].owner {
                    self.movers[lane].watched.confirmed = Some(node.process);
                }
                Reply::Ok
            }
            Cmd::WaitAof => {
                node.disk = node.keys.clone();
                Reply::Ok
            }
            Cmd::Migrate(keys) => self.migrate(ix, &keys),
            cmd => {
                if let Cmd::Rename(_, key, _) = cmd {
                    grown.push(key);
                }
                node.in_pieces(&cmd, now).unwrap_or(Reply::Error)
            }
        };
        if let (Some(token), Reply::Dumped(Some(entry))) = (renamed, &reply) {
            let entry = self.in_time(ix, entry.clone());
            self.history.renamed(token, entry);
        }
        self.reply(conn, request, reply);
        for key in grown {
            while let Some((waiter, request, reply)) = self.nodes[ix].wake(key, now) {
                say!(self, "node {ix}: key {key} wakes connection {waiter}");
                self.reply(waiter, request, reply);
            }
        }
        self.nodes[ix].touch(&named);
        // MIGRATE changes both nodes.
        self.nodes[1 - ix].touch(&[]);
    }

    fn kill_older(&mut self, ix: usize, incarnation: u32) {
        for c in &mut self.conns {
            if c.node == ix && c.incarnation < incarnation {
                c.node_alive = false;
                c.inbox.clear();
            }
        }
        self.forget_blocked(ix);
    }

    fn forget_blocked(&mut self, ix: usize) {
        let conns = &self.conns;
        self.nodes[ix].blocked.retain(|(conn, ..)| conns[*conn as usize].node_alive);
    }

    /// Moves keys one at a time, like the node: a refusal leaves the earlier keys moved.
    fn migrate(&mut self, ix: usize, keys: &[KeyIx]) -> Reply {
        let now = self.now;
        for key in keys {
            let Some(entry) = self.nodes[ix].keys.get(key).cloned() else { continue };
            let target = &mut self.nodes[1 - ix];
            if !target.up || target.stopped || now < self.inbound_blocked_until[1 - ix] {
                return Reply::Error;
            }
            let now = now + target.ahead_us;
            target.expire(now);
            match target.restore(*key, entry, false, now) {
                Reply::Ok => self.nodes[ix].keys.remove(key),
                refused => return refused,
            };
        }
        Reply::Ok
    }

    fn handle(&mut self, ev: Ev) {
        match ev {
            Ev::ToNode { conn, number, request, cmd } => self.arrive(conn, number, request, cmd),
            Ev::ToOwner { conn, request, reply } => {
                if self.conns[conn as usize].owner_alive {
                    self.answered(conn, request, reply);
                }
            }
            Ev::Broke { conn } => {
                if self.conns[conn as usize].owner_alive {
                    self.on_break(conn);
                }
            }
            Ev::Release { conn } => self.release(conn),
            Ev::Adopt { worker, view } => self.adopt(worker, view),
            Ev::Committed { worker } => self.redispatch_waiting(worker, false),
            Ev::Refused { worker, move_id, keys } => self.refused(worker, move_id, keys.as_ref().map(|keys| &keys[..])),
            Ev::Wanted { of, keys } => {
                if let Some(lane) = self.movers.iter().position(|mover| mover.leg() == of) {
                    self.on_mover_event(lane, Event::Wanted { keys }.into());
                }
            }
            Ev::Mover(lane, what) => self.on_mover_event(lane, what),
            Ev::Synced => self.synced(),
            Ev::DiskRepaired => self.disk_is_well(),
            Ev::Stored { lane, owner, before } => self.stored(lane, owner, before),
            Ev::Dial { worker, node } => self.dial(worker, node),
            Ev::DialMover { lane, side } => self.dial_mover(lane, side),
            Ev::NextMove { lane } => self.next_move(lane),
            Ev::Rested { lane, turn } => self.rested(lane, turn),
            Ev::Staging { lane } => self.staging_is_due(lane),
            Ev::Resend { op } => self.send_again(op),
            Ev::Dispatch { op } => self.look(op),
            Ev::Client { client } => self.client_continues(client),
            Ev::Fault(fault) => self.fault(fault),
            Ev::StartNode(ix) => {
                self.processes += 1;
                let (process, now) = (self.processes, self.clock(ix));
                self.nodes[ix].start(process, now);
                say!(self, "node {ix} starts as process {process}: {:?}", self.nodes[ix].keys);
            }
            Ev::StartRouter => self.start_router(),
            Ev::Continue(ix) => {
                self.nodes[ix].stopped = false;
                self.release_all(ix);
            }
            Ev::InboundRestored(ix) => self.release_all(ix),
            Ev::MemoryFreed(ix) => self.nodes[ix].full = false,
            Ev::SetClock { node, ahead_us } => self.nodes[node].ahead_us = ahead_us,
            Ev::Arm => self.arm(),
            Ev::AdoptArmed { worker, set, gates } => self.adopt_cacheable(worker, &set, gates),
            Ev::HotTurn { worker } => self.hot_turn(worker),
            Ev::RaiseLate { worker, op, node, raised } => self.raise_late(worker, op, node, raised),
            Ev::Impatient { op } => self.time_out(op),
            Ev::Sweep => self.sweep(),
        }
    }

    fn release_all(&mut self, ix: usize) {
        for conn in 0..self.conns.len() {
            if self.conns[conn].node == ix && self.conns[conn].node_alive && !self.conns[conn].inbox.is_empty() {
                self.release(conn as u32);
            }
        }
    }

    fn answered(&mut self, conn: u32, request: u64, reply: Reply) {
        let c = &mut self.conns[conn as usize];
        let Some(pending) = c.pending.pop_front() else {
            self.violated(format!("connection {conn}: a reply without a request"));
            return;
        };
        if pending.request != request {
            self.violated(format!("connection {conn}: the reply to request {request} came for {}", pending.request));
            return;
        }
        match c.owner {
            Owner::Mover(lane) => self.mover_answered(lane, conn, pending.what, reply),
            Owner::Filling(worker) => self.fill_answered(worker, conn, pending.what, reply),
            Owner::Worker(worker) | Owner::Blocking(worker, _) | Owner::Watching(worker, _) => {
                self.worker_answered(worker, conn, pending.what, reply)
            }
        }
    }

    fn on_break(&mut self, conn: u32) {
        match self.conns[conn as usize].owner {
            Owner::Mover(lane) => self.mover_broke(lane, conn),
            Owner::Filling(worker) => self.fill_broke(worker, conn),
            Owner::Worker(worker) | Owner::Blocking(worker, _) | Owner::Watching(worker, _) => {
                self.worker_broke(worker, conn)
            }
        }
    }

    fn sweep(&mut self) {
        let late: Vec<u32> = (0..self.conns.len())
            .filter(|conn| {
                let c = &self.conns[*conn];
                let waits = matches!(c.owner, Owner::Blocking(..));
                c.owner_alive
                    && c.pending.front().is_some_and(|pending| {
                        let forever = waits && matches!(pending.what, What::Command(_)) && c.node_alive;
                        !forever && self.now - pending.sent_us > TIMEOUT_US
                    })
            })
            .map(|conn| conn as u32)
            .collect();
        for conn in late {
            say!(self, "connection {conn} is silent and is abandoned");
            self.on_break(conn);
        }
        for worker in 0..self.workers.len() {
            self.unblock_outdated(worker);
        }
        (0..self.movers.len()).for_each(|lane| self.on_mover_event(lane, DriverEvent::Tick));
        let every = if self.now > 300_000 { 10 * SWEEP_US } else { SWEEP_US };
        self.after(every, Ev::Sweep);
    }

    /// Runs to the end. Drops events of a killed router, but not those of nodes and network.
    pub(crate) fn run(&mut self) {
        while let Some(Reverse(At { time, incarnation, ev, .. })) = self.queue.pop() {
            self.now = time;
            let of_router = !matches!(
                ev,
                Ev::ToNode { .. }
                    | Ev::ToOwner { .. }
                    | Ev::Release { .. }
                    | Ev::Fault(_)
                    | Ev::StartNode(_)
                    | Ev::StartRouter
                    | Ev::Continue(_)
                    | Ev::InboundRestored(_)
                    | Ev::MemoryFreed(_)
                    | Ev::SetClock { .. }
                    | Ev::DiskRepaired
            );
            if of_router && incarnation != self.incarnation {
                continue;
            }
            self.handle(ev);
            self.look_at_barriers();
            if self.violation.is_some() {
                return;
            }
            if self.is_over() {
                if self.finishing {
                    return;
                }
                self.finishing = true;
                self.read_everything();
            }
            if self.now > END_US {
                let text = self.stuck_report();
                self.violated(format!("the run does not end: {text}"));
            }
        }
        let text = self.stuck_report();
        self.violated(format!("no event is left: {text}"));
    }

    fn is_over(&mut self) -> bool {
        if self.faults_left > 0 && self.now > 200_000 {
            // Drop faults whose trigger never occurred.
            self.faults_left -= (self.at_action.len() + self.at_end.len()) as u64;
            self.at_action.clear();
            self.at_end.clear();
        }
        self.faults_left == 0
            && self.router_up
            && self.nodes.iter().all(|node| node.up && !node.stopped)
            && self.mover_is_done()
            && self.clients_are_done()
    }

    fn stuck_report(&self) -> String {
        let clients: Vec<String> = self.ops.values().map(|command| format!("{:?}", command.op)).collect();
        format!("mover: {}; commands: {}", self.mover_state(), clients.join(", "))
    }

    pub(crate) fn bug(&self, bug: Bug) -> bool {
        is_injected(self.planted, bug)
    }
}
