//! Model of hot copies (`switchyard_policy::hot_copies`) in the workers: gates shared by all workers, cacheable keys,
//! fills on separate connections, and the published progress of each worker. Planted bugs break every duty of this
//! model.
//!
//! No client writes past the router, so nodes send no invalidations. Workers are interleaved between events. Within an
//! event, the load of a gate may come before or after another worker's pending lowering of the gate.

mod control;
mod fill;

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

use switchyard_policy::hot_copies::{
    CacheableSet, Copies, Gate, GateId, Gates, Read, ReadRequest, WriteHolds, WriteOutcome,
};
use switchyard_policy::migration::{Fingerprinter, Key};
use switchyard_policy::topology::{NodeId, crc16_slot};

use crate::clients::Command;
use crate::injected::{Bug, is_injected};
use crate::node::{Cmd, KeyIx, Op, Reply};
use crate::random::Random;
use crate::world::{Ev, What, World, say};

/// Limits in bytes: all copies of a worker, and one copy.
const LIMITS: (usize, usize) = (1 << 20, 1 << 10);

/// Request bytes of every read. Key and database are compared separately.
const REQUEST: &[u8] = b"GET";

/// Gates shared by the workers of a process.
#[derive(Debug)]
pub(crate) struct Table {
    gates: RefCell<BTreeMap<GateId, u64>>,
    /// Gates that workers are about to lower.
    late: RefCell<VecDeque<GateId>>,
    rng: RefCell<Random>,
    one_counter: bool,
}

impl Table {
    fn new(seed: u64, one_counter: bool) -> Rc<Self> {
        Rc::new(Self {
            gates: RefCell::default(),
            late: RefCell::default(),
            rng: RefCell::new(Random::new(seed)),
            one_counter,
        })
    }

    fn change(&self, gate: GateId, what: u64) {
        let mut gates = self.gates.borrow_mut();
        let state = gates.entry(gate).or_default();
        *state = state.wrapping_add(what);
    }

    fn lower_one(&self) -> bool {
        let Some(gate) = self.late.borrow_mut().pop_front() else { return false };
        // Without a version, the raise leaves no trace.
        self.change(gate, if self.one_counter { u64::MAX } else { Gate::LOWER });
        true
    }

    fn lower_all(&self) {
        while self.lower_one() {}
    }
}

impl Gates for Table {
    fn load(&self, gate: GateId) -> Gate {
        if self.rng.borrow_mut().chance(300) {
            self.lower_one();
        }
        Gate(self.gates.borrow().get(&gate).copied().unwrap_or(0))
    }

    fn add(&self, gate: GateId, what: u64) {
        if what == Gate::RAISE {
            return self.change(gate, what);
        }
        self.late.borrow_mut().push_back(gate);
        if self.rng.borrow_mut().chance(700) {
            self.lower_all();
        }
    }
}

/// Published progress of a worker.
#[derive(Clone, Debug)]
struct Published {
    /// Adopted generation.
    adopted: u64,
    /// By node: oldest generation with an unfinished command.
    oldest: [u64; 2],
}

/// Gates of keys that are no longer cacheable: shut until every worker has adopted the change.
#[derive(Debug)]
struct Leaving {
    since: u64,
    held: Vec<GateId>,
    gates: Rc<Table>,
}

/// State shared by workers.
#[derive(Debug)]
pub(crate) struct Hot {
    pub(crate) is_on: bool,
    /// Whether a key is served while its slot is only observed.
    serves_observed: bool,
    /// Whether all keys share one gate.
    one_gate: bool,
    gates: Rc<Table>,
    set: Arc<CacheableSet>,
    /// Known processes, by node.
    met: [Option<u32>; 2],
    leaving: Vec<Leaving>,
    published: Vec<Published>,
    /// For the checker: data lost by a node whose new process the router has not met.
    pub(crate) unmet: [Vec<(KeyIx, usize)>; 2],
    /// Reads served by copies, and stored fills.
    pub(crate) hits: u64,
    pub(crate) kept: u64,
}

impl Default for Hot {
    fn default() -> Self {
        Self {
            is_on: false,
            serves_observed: false,
            one_gate: false,
            gates: Table::new(0, false),
            set: Arc::default(),
            met: [None; 2],
            leaving: Vec::new(),
            published: Vec::new(),
            unmet: Default::default(),
            hits: 0,
            kept: 0,
        }
    }
}

impl Hot {
    fn hash(&self, name: &Key) -> u64 {
        let hash = Fingerprinter::new(7).of(name).0 as u64;
        if self.one_gate { hash & 0xf_ffff | 77 << 20 } else { hash }
    }
}

#[derive(Debug, Default)]
struct FillLink {
    conn: Option<u32>,
    ready: bool,
}

/// Hot-copy state of one worker.
#[derive(Debug)]
pub(crate) struct WorkerGates {
    gates: Rc<Table>,
    copies: Copies,
    holds: WriteHolds,
    /// Generation of each unfinished command, by command and node.
    sent: BTreeMap<(u64, usize), u64>,
    links: [FillLink; 2],
    /// Key of each fill, and the commands that wait for it.
    fills: BTreeMap<u32, (KeyIx, Vec<u64>)>,
}

impl Default for WorkerGates {
    fn default() -> Self {
        Self {
            gates: Table::new(0, false),
            copies: Copies::default(),
            holds: WriteHolds::default(),
            sent: BTreeMap::new(),
            links: Default::default(),
            fills: BTreeMap::new(),
        }
    }
}

impl WorkerGates {
    /// Oldest generation with an unfinished command at a node, or the worker's own generation. Later commands are not
    /// older.
    fn oldest(&self, node: usize) -> u64 {
        let sent = self.sent.iter().filter(|((_, at), _)| *at == node).map(|(_, generation)| *generation);
        sent.fold(self.copies.set().generation(), u64::min)
    }
}

/// Sequence number of a write at a node.
const fn end_of(op: u64, node: usize) -> u64 {
    op * 2 + node as u64
}

fn encode(reply: &Reply) -> Vec<u8> {
    match reply {
        Reply::Value(None) => b"_".to_vec(),
        Reply::Value(Some(list)) => {
            list.iter().flat_map(|number| number.to_le_bytes()).fold(vec![b'*'], |mut bytes, byte| {
                bytes.push(byte);
                bytes
            })
        }
        _ => b"-".to_vec(),
    }
}

fn decode(bytes: &[u8]) -> Reply {
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |number, byte| number << 8 | u32::from(*byte));
    Reply::Value((bytes.first() == Some(&b'*')).then(|| bytes[1..].chunks(4).map(number).collect()))
}

impl World {
    /// Start of the worker's turn, less than 500 µs ago. Its clock was not read since.
    fn turn(&mut self) -> u64 {
        self.now.saturating_sub(self.random.below(500))
    }

    /// Collects the keys that a write may change, as far as the command shows.
    fn written(&self, op: &Op, out: &mut Vec<KeyIx>) {
        match op {
            Op::Rename(from, to, _) => {
                out.push(*from);
                out.extend((!self.bug(Bug::RenamedToForgotten)).then_some(*to));
            }
            Op::Pop(_) if self.bug(Bug::BlockedRaisesNothing) => {}
            Op::Several(ops) => ops.iter().filter(|op| !op.is_read()).for_each(|op| self.written(op, out)),
            _ => op.keys(out),
        }
    }

    /// Returns the gates that a command raises, by its worker's set of cacheable keys.
    fn raised(&self, ix: usize, op: &Op, node: usize) -> Vec<GateId> {
        if op.is_read() || self.bug(Bug::WriteRaisesNothing) {
            return Vec::new();
        }
        if *op == Op::Flush {
            return if self.bug(Bug::FlushRaisesNothing) {
                Vec::new()
            } else {
                vec![GateId::of_node(NodeId(node as u16))]
            };
        }
        let set = self.workers[ix].hot.copies.set();
        let mut keys = Vec::new();
        self.written(op, &mut keys);
        if matches!(op, Op::Script(_) | Op::Function(..)) && !self.bug(Bug::ScriptRaisesItsKeys) {
            return keys.iter().flat_map(|key| set.gates_in(crc16_slot(&self.keys[*key]))).collect();
        }
        let hashes = keys.iter().map(|key| self.hot.hash(&self.keys[*key]));
        hashes.filter(|hash| set.get(*hash).is_some()).map(GateId::of_key).collect()
    }

    /// Raises the gates of a command before it is sent.
    pub(crate) fn hot_sends(&mut self, op: u64, node: usize) {
        if !self.hot.is_on {
            return;
        }
        let Some(command) = self.ops.get(&op) else { return };
        let ix = command.worker;
        let raised = self.raised(ix, &command.op, node);
        let of = &mut self.workers[ix].hot;
        let generation = of.copies.set().generation();
        of.sent.entry((op, node)).or_insert(generation);
        if is_injected(self.planted, Bug::RaisedLate) {
            let delay = self.random.delay_us();
            return self.after(delay, Ev::RaiseLate { worker: ix, op, node, raised });
        }
        self.raise(ix, op, node, raised);
    }

    pub(crate) fn raise_late(&mut self, ix: usize, op: u64, node: usize, raised: Vec<GateId>) {
        if self.workers[ix].hot.sent.contains_key(&(op, node)) {
            self.raise(ix, op, node, raised);
        }
    }

    fn raise(&mut self, ix: usize, op: u64, node: usize, raised: Vec<GateId>) {
        if raised.is_empty() {
            return;
        }
        say!(self, "worker {ix}: command {op} raises {raised:?}");
        let of = &mut self.workers[ix].hot;
        of.holds.sent(&*of.gates, end_of(op, node), NodeId(node as u16), raised);
    }

    /// Handles the end of a command at a node: answered, never received, or its connection broke.
    pub(crate) fn hot_over(&mut self, ix: usize, op: u64, node: usize, how: WriteOutcome) {
        if !self.hot.is_on {
            return;
        }
        let how = if self.bug(Bug::DoubtfulIsOver) { WriteOutcome::Certain } else { how };
        let of = &mut self.workers[ix].hot;
        of.holds.over(&*of.gates, end_of(op, node), how);
        if how == WriteOutcome::Certain {
            of.sent.remove(&(op, node));
        }
    }

    /// Handles the confirmed end of a connection or process with these commands.
    pub(crate) fn hot_confirmed(&mut self, ix: usize, ops: &[u64], node: usize) {
        ops.iter().for_each(|op| {
            self.workers[ix].hot.sent.remove(&(*op, node));
        });
    }

    /// Ends the unconfirmed writes at a node.
    pub(crate) fn hot_settles(&mut self, ix: usize, node: usize) {
        let of = &mut self.workers[ix].hot;
        of.holds.settle(&*of.gates, |at| at.index() == node);
    }

    /// Times out a client's wait.
    pub(crate) fn time_out(&mut self, op: u64) {
        let Some(command) = self.ops.get(&op) else { return };
        let ix = command.worker;
        let nodes: Vec<usize> = (0..2).filter(|node| self.workers[ix].hot.sent.contains_key(&(op, *node))).collect();
        let is_plain = !matches!(command.op, Op::Flush | Op::Pop(_) | Op::Watch(_) | Op::Exec(..) | Op::Script(_));
        if !is_plain || command.load || !command.sent || nodes.len() != 1 || !self.workers[ix].is_plain(op) {
            return;
        }
        self.on_disconnect(op);
        if self.bug(Bug::OpenedAtTimeOut) {
            let of = &mut self.workers[ix].hot;
            of.holds.over(&*of.gates, end_of(op, nodes[0]), WriteOutcome::Certain);
        }
    }

    /// Handles a connection to a process, before anything is sent to it.
    pub(crate) fn hot_meets(&mut self, node: usize, process: u32) {
        if !self.hot.is_on || self.hot.met[node] == Some(process) {
            return;
        }
        self.hot.met[node] = Some(process);
        if !self.bug(Bug::AnotherProcessUnnoticed) {
            self.hot.gates.renew(GateId::of_node(NodeId(node as u16)));
        }
        for mark in std::mem::take(&mut self.hot.unmet[node]) {
            self.history.record_end(mark, self.now);
        }
    }

    /// Sends a heartbeat to a node if one is due.
    fn beat(&mut self, ix: usize, node: usize) {
        let (now, at) = (self.now, NodeId(node as u16));
        let of = &mut self.workers[ix].hot;
        let is_due = of.copies.beats().due(now).any(|due| due == at);
        if let Some(conn) = of.links[node].conn.filter(|_| is_due && of.links[node].ready) {
            of.copies.beats().sent(at, now);
            self.send(conn, Cmd::Ping, What::Beat);
        }
    }

    /// Serves a read from a copy, or queues it behind a fill. Returns false if the node must serve it.
    pub(crate) fn hot_read(&mut self, op: u64, node: usize) -> bool {
        let Some(Command { op: Op::Get(key), worker, fill_failed: false, .. }) = self.ops.get(&op) else {
            return false;
        };
        let (key, ix) = (*key, *worker);
        if !self.hot.is_on {
            return false;
        }
        let (name, at) = (self.keys[key].clone(), NodeId(node as u16));
        let serves_observed = self.hot.serves_observed;
        if self.workers[ix].place_of_copies(&name, serves_observed) != Some(at) && !self.bug(Bug::ServedOnItsWay) {
            return false;
        }
        let (turn, now, database) = (self.turn(), self.now, (key / self.names()) as u32);
        self.beat(ix, node);
        let asked =
            ReadRequest { hash: self.hot.hash(&name), key: &name, database, request: REQUEST, node: at, resp3: true };
        let (early, beside) = (self.bug(Bug::FilledBeforeAllCacheable), self.bug(Bug::FilledBesideOlderWrites));
        let Self { workers, hot, .. } = self;
        let may_fill = |since| {
            let is_ready = |of: &Published| if of.adopted < since { early } else { beside || of.oldest[node] >= since };
            hot.published.iter().all(is_ready)
        };
        let of = &mut workers[ix].hot;
        let gates = of.gates.clone();
        match of.copies.read(&*gates, asked, turn, || now, may_fill) {
            Read::Hit(bytes) => {
                let reply = decode(bytes);
                self.hot.hits += 1;
                say!(self, "worker {ix}: a copy serves command {op}");
                self.on_reply(op, node, reply);
                true
            }
            Read::Wait(number) => match of.fills.get_mut(&number) {
                Some((_, waiting)) => {
                    waiting.push(op);
                    true
                }
                None => false,
            },
            Read::Miss | Read::NotCacheable => false,
            Read::Fill => {
                let Some(conn) = of.links[node].conn.filter(|_| of.links[node].ready) else {
                    self.dial_fill(ix, node);
                    return false;
                };
                let Some(number) = of.copies.begin(&*gates, asked, (turn, now)) else { return false };
                of.fills.insert(number, (key, vec![op]));
                say!(self, "worker {ix}: fill {number} of key {key} starts for command {op}");
                self.send(conn, Cmd::Pttl(key), What::FillTtl(number));
                self.send(conn, Cmd::Client(Op::Get(key)), What::Fill(number));
                true
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_replies_decode_unchanged() {
        for value in [None, Some(vec![]), Some(vec![7]), Some(vec![u32::MAX, 0, 1 << 31])] {
            assert_eq!(decode(&encode(&Reply::Value(value.clone()))), Reply::Value(value));
        }
    }
}
