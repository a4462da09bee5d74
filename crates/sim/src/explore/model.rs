//! The small world of a search: the possible events in a state, and their effects.
//!
//! A worker has one client, which sends one command at a time. Commands and the mover's requests wait in pipes until
//! their node executes them. A broken pipe stays until the node confirms its end; until then its content may be
//! executed.

use std::collections::{BTreeMap, VecDeque};
use std::hash::{Hash, Hasher};

use switchyard_policy::migration::record::{Record, Replay};
use switchyard_policy::migration::{
    Action, BatchId, Copied, Durability, Event, Fingerprinter, Io, Key, Leg, LegOrder, Machine, Outcome, Process, Side,
    Stored,
};
use switchyard_policy::topology::{MoveId, NodeId, crc16_slot};

use super::Bounds;
use crate::injected::{Bug, Planted, is_injected};

/// A value; 0 if the key is missing.
type Value = u8;
const KEYS: usize = 2;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Op {
    Read(usize),
    Write(usize, Value),
    Remove(usize),
}

impl Op {
    const fn key(self) -> usize {
        match self {
            Self::Read(key) | Self::Write(key, _) | Self::Remove(key) => key,
        }
    }
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum View {
    Settled(usize),
    Moving,
    /// Keys that must return.
    RolledBack([bool; KEYS]),
}

/// A command with a chosen node and epoch.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct InFlightCommand {
    op: Op,
    node: usize,
    epoch: u32,
    process: u32,
    /// The connection broke.
    orphan: bool,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Worker {
    view: View,
    epoch: u32,
    committed: [bool; KEYS],
    /// Published and not yet adopted.
    views: VecDeque<(u32, View)>,
    /// Committed keys with their epoch, not yet received.
    unreported: VecDeque<(u32, usize)>,
    request_count: usize,
    /// Command of the client, in flight unless it waits for its key.
    current: Option<Op>,
    waits: bool,
    flying: Vec<InFlightCommand>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Kind {
    Copy,
    Store(Value),
    Remove,
    /// Keys to remove.
    Purge([bool; KEYS]),
}

/// A request of the mover: batch, position in the batch, key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Request {
    batch: u32,
    at: usize,
    key: usize,
    kind: Kind,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum Link {
    /// Requests not yet executed, and replies not yet received.
    Up {
        requests: VecDeque<Request>,
        answers: VecDeque<(Request, Value)>,
    },
    Down,
}

impl Link {
    const fn new() -> Self {
        Self::Up { requests: VecDeque::new(), answers: VecDeque::new() }
    }
}

/// Requests on a broken connection of the mover.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Pipe {
    node: usize,
    process: u32,
    requests: VecDeque<Request>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
struct Batch {
    keys: Vec<usize>,
    answers: Vec<Option<Value>>,
    /// Values that were read, by key.
    read: [Value; KEYS],
}

/// A possible event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Choice {
    Ask(usize),
    Adopt(usize),
    Hear(usize),
    /// A node executes a worker's command: worker, position in its commands in flight.
    Execute(usize, usize),
    /// A worker receives the confirmation that a broken connection is dead.
    Confirm(usize, usize),
    Drained,
    /// A node executes the mover's next request.
    Serve(usize),
    /// A node executes a request from a broken connection.
    ServeLate(usize),
    Answer(usize),
    Sync,
    Restore(usize),
    Stored,
    Meet,
    CutWorker(usize, usize),
    CutMover(usize),
    Restart(usize),
    /// Whether the unsynced records are on the disk.
    Crash(bool),
    RollBack,
}

impl Choice {
    pub(super) const fn is_fault(self) -> bool {
        matches!(self, Self::CutWorker(..) | Self::CutMover(_) | Self::Restart(_) | Self::Crash(_) | Self::RollBack)
    }
}

#[derive(Clone)]
pub(super) struct State {
    bounds: Bounds,
    planted: Option<Planted>,
    truth: [Value; KEYS],
    nodes: [[Value; KEYS]; 2],
    processes: [u32; 2],
    workers: [Worker; 2],
    epoch: u32,
    /// The epoch whose drain the machine waits for.
    barrier: Option<u32>,
    leg: Option<Leg>,
    links: [Link; 2],
    late: Vec<Pipe>,
    batches: BTreeMap<u32, Batch>,
    written: Vec<(u64, Record)>,
    replay: Replay,
    /// Owner in the topology that is being stored.
    storing: Option<usize>,
    ended: Option<Outcome>,
    /// Faults so far.
    used: Bounds,
}

impl Hash for State {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (&self.truth, &self.nodes, &self.processes, &self.workers, self.epoch, self.barrier).hash(state);
        (&self.leg, &self.links, &self.late, self.storing, self.used).hash(state);
        for (id, batch) in &self.batches {
            (id, batch).hash(state);
        }
        // Records implement no `Hash`, and there are few.
        format!("{:?}{:?}{:?}", self.written, self.replay, self.ended).hash(state);
    }
}

/// Commands of a worker's client during the leg: one client writes, the other removes, both read.
fn program(worker: usize, keys: usize) -> Vec<Op> {
    let other = keys - 1;
    if worker == 0 { vec![Op::Write(0, 2), Op::Read(other)] } else { vec![Op::Remove(other), Op::Read(0)] }
}

fn keys() -> [Key; KEYS] {
    [Key::from(&b"{t}0"[..]), Key::from(&b"{t}1"[..])]
}

fn ix(key: &Key) -> usize {
    usize::from(key[3] - b'0')
}

const fn side_of(node: usize) -> Side {
    if node == 0 { Side::Source } else { Side::Target }
}

impl State {
    pub(super) fn new(bounds: Bounds, planted: Option<Planted>) -> Self {
        let worker = Worker {
            view: View::Settled(0),
            epoch: 1,
            committed: [false; KEYS],
            views: VecDeque::new(),
            unreported: VecDeque::new(),
            request_count: 0,
            current: None,
            waits: false,
            flying: Vec::new(),
        };
        let mut truth = [0; KEYS];
        truth[0] = 1;
        let mut state = Self {
            bounds,
            planted,
            truth,
            // The target has a key left from an earlier use.
            nodes: [truth, [9, 0]],
            processes: [1, 1],
            workers: [worker.clone(), worker],
            epoch: 1,
            barrier: None,
            leg: None,
            links: [Link::new(), Link::new()],
            late: Vec::new(),
            batches: BTreeMap::new(),
            written: Vec::new(),
            replay: Replay::default(),
            storing: None,
            ended: None,
            used: Bounds::default(),
        };
        let orders = state.orders();
        let begun = Record::Begun {
            move_id: orders.move_id,
            source: orders.source,
            target: orders.target,
            slots: orders.slots,
            protocol: switchyard_policy::migration::Protocol::Switchyard,
            durability: Durability::Memory,
        };
        // Cannot contradict an empty journal.
        let _ = state.replay.apply(&begun);
        state
    }

    fn orders(&self) -> LegOrder {
        LegOrder {
            move_id: MoveId(1),
            leg: 0,
            source: NodeId(0),
            target: NodeId(1),
            slots: vec![crc16_slot(&keys()[0])],
            durability: Durability::Memory,
            drain_timeout_us: u64::MAX,
        }
    }

    fn bug(&self, bug: Bug) -> bool {
        is_injected(self.planted, bug)
    }

    pub(super) fn is_over(&self) -> bool {
        let idle = |(ix, worker): (usize, &Worker)| {
            worker.current.is_none()
                && worker.flying.is_empty()
                && worker.request_count == program(ix, self.bounds.keys).len()
        };
        self.ended.is_some() && self.workers.iter().enumerate().all(idle)
    }

    pub(super) fn choices(&self) -> Vec<Choice> {
        let mut all = Vec::new();
        for (w, worker) in self.workers.iter().enumerate() {
            if worker.current.is_none() && worker.request_count < program(w, self.bounds.keys).len() {
                all.push(Choice::Ask(w));
            }
            if !worker.views.is_empty() {
                all.push(Choice::Adopt(w));
            }
            if worker.unreported.front().is_some_and(|(epoch, _)| *epoch <= worker.epoch) {
                all.push(Choice::Hear(w));
            }
            for (f, flying) in worker.flying.iter().enumerate() {
                if flying.process == self.processes[flying.node] {
                    all.push(Choice::Execute(w, f));
                    if !flying.orphan && self.used.cuts < self.bounds.cuts {
                        all.push(Choice::CutWorker(w, f));
                    }
                }
                if flying.orphan {
                    all.push(Choice::Confirm(w, f));
                }
            }
        }
        if let Some(epoch) = self.barrier
            && self
                .workers
                .iter()
                .all(|worker| worker.epoch >= epoch && worker.flying.iter().all(|flying| flying.epoch >= epoch))
        {
            all.push(Choice::Drained);
        }
        for (side, link) in self.links.iter().enumerate() {
            match link {
                Link::Up { requests, answers } => {
                    if !requests.is_empty() {
                        all.push(Choice::Serve(side));
                    }
                    if !answers.is_empty() {
                        all.push(Choice::Answer(side));
                    }
                    if self.leg.is_some() && self.used.cuts < self.bounds.cuts {
                        all.push(Choice::CutMover(side));
                    }
                }
                Link::Down if self.leg.is_some() => all.push(Choice::Restore(side)),
                Link::Down => {}
            }
            if self.used.restarts < self.bounds.restarts {
                all.push(Choice::Restart(side));
            }
        }
        all.extend((0..self.late.len()).map(Choice::ServeLate));
        if !self.written.is_empty() {
            all.push(Choice::Sync);
        }
        if self.storing.is_some() {
            all.push(Choice::Stored);
        }
        if self.leg.is_none() && self.ended.is_none() {
            all.push(Choice::Meet);
        }
        if self.ended.is_none() && self.used.crashes < self.bounds.crashes {
            all.push(Choice::Crash(false));
            if !self.written.is_empty() {
                all.push(Choice::Crash(true));
            }
        }
        if self.leg.is_some() && self.used.turns < self.bounds.turns {
            all.push(Choice::RollBack);
        }
        all
    }

    /// Applies an event. Returns a violation as an error.
    pub(super) fn apply(&mut self, choice: Choice) -> Result<(), String> {
        match choice {
            Choice::Ask(w) => {
                let op = program(w, self.bounds.keys)[self.workers[w].request_count];
                self.workers[w].request_count += 1;
                self.workers[w].current = Some(op);
                self.look(w)
            }
            Choice::Adopt(w) => {
                let kept = self.bug(Bug::CommittedKept);
                let worker = &mut self.workers[w];
                if let Some((epoch, view)) = worker.views.pop_front() {
                    worker.epoch = epoch;
                    worker.view = view;
                    if !kept {
                        worker.committed = [false; KEYS];
                    }
                }
                self.look_again(w)
            }
            Choice::Hear(w) => {
                let kept = self.bug(Bug::CommittedKept);
                let worker = &mut self.workers[w];
                // Commits from before the rollback no longer count.
                if let Some((epoch, key)) = worker.unreported.pop_front()
                    && (epoch == worker.epoch || kept)
                {
                    worker.committed[key] = true;
                }
                self.look_again(w)
            }
            Choice::Execute(w, f) => {
                let flying = self.workers[w].flying.remove(f);
                self.execute(w, flying)?;
                if flying.orphan {
                    // The worker does not know of the execution: in flight until the end of the connection is
                    // confirmed.
                    self.workers[w].flying.push(InFlightCommand { process: 0, ..flying });
                } else {
                    self.workers[w].current = None;
                }
                Ok(())
            }
            Choice::Confirm(w, f) => {
                self.workers[w].flying.remove(f);
                Ok(())
            }
            Choice::Drained => {
                self.barrier = None;
                self.step(Event::Drained)
            }
            Choice::Serve(side) => {
                let Link::Up { requests, .. } = &mut self.links[side] else { return Ok(()) };
                let Some(request) = requests.pop_front() else { return Ok(()) };
                let answer = self.serve(side, request);
                if let Link::Up { answers, .. } = &mut self.links[side] {
                    answers.push_back((request, answer));
                }
                Ok(())
            }
            Choice::ServeLate(p) => {
                let Some(request) = self.late[p].requests.pop_front() else { return Ok(()) };
                self.serve(self.late[p].node, request);
                self.late.retain(|pipe| !pipe.requests.is_empty());
                Ok(())
            }
            Choice::Answer(side) => {
                let Link::Up { answers, .. } = &mut self.links[side] else { return Ok(()) };
                let Some((request, answer)) = answers.pop_front() else { return Ok(()) };
                self.answered(request, answer)
            }
            Choice::Sync => {
                let number = self.written.last().map(|(number, _)| *number);
                self.keep()?;
                number.map_or(Ok(()), |number| self.step(Event::Recorded(number)))
            }
            Choice::Restore(side) => {
                if !self.bug(Bug::ReplacedWithoutKill) {
                    self.late.retain(|pipe| pipe.node != side);
                }
                self.links[side] = Link::new();
                let process = self.process(side);
                self.step(Event::Reconnected { side: side_of(side), process })
            }
            Choice::Stored => {
                if let Some(owner) = self.storing.take() {
                    self.publish(View::Settled(owner));
                }
                self.step(Event::HandedOver)
            }
            Choice::Meet => self.meet(),
            Choice::CutWorker(w, f) => {
                self.used.cuts += 1;
                let worker = &mut self.workers[w];
                worker.flying[f].orphan = true;
                worker.current = None;
                if self.bug(Bug::ClosedCountsAsDrained) {
                    // Forgotten, although it may be executed.
                    self.workers[w].flying[f].epoch = u32::MAX;
                }
                Ok(())
            }
            Choice::CutMover(side) => {
                self.used.cuts += 1;
                self.lose(side, true)
            }
            Choice::Restart(node) => {
                self.used.restarts += 1;
                self.processes[node] += 1;
                self.late.retain(|pipe| pipe.node != node);
                for worker in &mut self.workers {
                    // The worker meets another process: nothing of the old one is in flight.
                    if worker.flying.iter().any(|flying| flying.node == node && !flying.orphan) {
                        worker.current = None;
                    }
                    worker.flying.retain(|flying| flying.node != node);
                }
                self.lose(node, false)
            }
            Choice::Crash(kept) => self.crash(kept),
            Choice::RollBack => {
                self.used.turns += 1;
                self.step(Event::RollBack)
            }
        }
    }

    // Workers.

    fn look_again(&mut self, w: usize) -> Result<(), String> {
        if self.workers[w].waits { self.look(w) } else { Ok(()) }
    }

    fn look(&mut self, w: usize) -> Result<(), String> {
        let worker = &mut self.workers[w];
        let Some(op) = worker.current else { return Ok(()) };
        let key = op.key();
        let place = match &worker.view {
            View::Settled(owner) => Some(*owner),
            View::Moving => worker.committed[key].then_some(1),
            View::RolledBack(away) => (!away[key] || worker.committed[key]).then_some(0),
        };
        worker.waits = place.is_none();
        match place {
            Some(node) => {
                let (epoch, process) = (worker.epoch, self.processes[node]);
                worker.flying.push(InFlightCommand { op, node, epoch, process, orphan: false });
                Ok(())
            }
            None => self.step(Event::Wanted { keys: vec![keys()[key].clone()] }),
        }
    }

    fn execute(&mut self, w: usize, InFlightCommand { op, node, .. }: InFlightCommand) -> Result<(), String> {
        let key = op.key();
        let (has, truth) = (self.nodes[node][key], self.truth[key]);
        if has != truth {
            return Err(format!("worker {w}: {op:?} is executed at node {node}, which has {has} instead of {truth}"));
        }
        match op {
            Op::Read(_) => {}
            Op::Write(_, value) => self.nodes[node][key] = value,
            Op::Remove(_) => self.nodes[node][key] = 0,
        }
        self.truth[key] = self.nodes[node][key];
        Ok(())
    }

    fn publish(&mut self, view: View) {
        self.epoch += 1;
        for worker in &mut self.workers {
            worker.views.push_back((self.epoch, view.clone()));
        }
    }

    // The mover.

    fn process(&mut self, node: usize) -> Process {
        Process { run_id: self.processes[node].to_string(), client_id: 0 }
    }

    fn meet(&mut self) -> Result<(), String> {
        if !self.bug(Bug::ResumedWithoutKill) {
            self.late.clear();
            for worker in &mut self.workers {
                worker.flying.retain(|flying| !flying.orphan);
            }
        }
        let open = self.replay.open.values().next().and_then(|open| open.leg.clone());
        self.links = [Link::new(), Link::new()];
        let leg = Leg::new(self.orders(), Fingerprinter::new(7), open);
        self.leg = Some(planted(leg, self.planted));
        let (source, target) = (self.process(0), self.process(1));
        self.step(Event::Met { source, target })
    }

    /// Closes a connection and drops the replies in flight. Requests in flight may still arrive, unless the node is
    /// dead.
    fn lose(&mut self, side: usize, alive: bool) -> Result<(), String> {
        let Link::Up { requests, .. } = std::mem::replace(&mut self.links[side], Link::Down) else { return Ok(()) };
        if alive && !requests.is_empty() {
            self.late.push(Pipe { node: side, process: self.processes[side], requests });
        }
        self.step(Event::Lost { side: side_of(side) })
    }

    fn crash(&mut self, kept: bool) -> Result<(), String> {
        self.used.crashes += 1;
        if kept {
            self.keep()?;
        }
        self.written.clear();
        self.leg = None;
        self.barrier = None;
        self.storing = None;
        self.batches.clear();
        for side in 0..2 {
            let Link::Up { requests, .. } = std::mem::replace(&mut self.links[side], Link::Down) else { continue };
            if !requests.is_empty() {
                self.late.push(Pipe { node: side, process: self.processes[side], requests });
            }
        }
        let open = self.replay.open.values().next();
        // A leg that has ended by the journal: with the target, or back with the source.
        let ended =
            open.filter(|open| open.leg.is_none() && open.next_leg > 0).map(|open| !open.handed_over.is_empty());
        let moving = open.is_some_and(|open| open.leg.as_ref().is_some_and(|leg| leg.moving));
        self.epoch += 1;
        let view = if moving { View::Moving } else { View::Settled(usize::from(ended == Some(true))) };
        for worker in &mut self.workers {
            worker.flying.iter_mut().for_each(|flying| flying.orphan = true);
            (worker.epoch, worker.view, worker.committed) = (self.epoch, view.clone(), [false; KEYS]);
            (worker.current, worker.waits) = (None, false);
            worker.views.clear();
            worker.unreported.clear();
        }
        if let Some(moved) = ended {
            // The next mover ends old connections, but there is none here.
            self.late.clear();
            self.workers.iter_mut().for_each(|worker| worker.flying.clear());
            self.ended = Some(if moved { Outcome::Moved } else { Outcome::Returned { why: String::new() } });
            return self.check_end(usize::from(moved));
        }
        Ok(())
    }

    fn keep(&mut self) -> Result<(), String> {
        for (_, record) in std::mem::take(&mut self.written) {
            self.replay.apply(&record).map_err(|error| format!("the journal contradicts itself: {error}"))?;
        }
        Ok(())
    }

    fn serve(&mut self, node: usize, Request { key, kind, .. }: Request) -> Value {
        let here = &mut self.nodes[node][key];
        match kind {
            Kind::Copy => *here,
            Kind::Store(value) => {
                let replace = is_injected(self.planted, Bug::RestoreReplace);
                if *here == 0 || replace {
                    *here = value;
                }
                0
            }
            Kind::Remove => std::mem::take(here),
            Kind::Purge(wrong) => {
                for (value, _) in self.nodes[node].iter_mut().zip(wrong).filter(|(_, wrong)| *wrong) {
                    *value = 0;
                }
                0
            }
        }
    }

    fn answered(&mut self, request: Request, answer: Value) -> Result<(), String> {
        if let Kind::Purge(_) = request.kind {
            return self.step(Event::Purged);
        }
        let Some(batch) = self.batches.get_mut(&request.batch) else { return Ok(()) };
        batch.answers[request.at] = Some(answer);
        if request.kind == Kind::Copy {
            batch.read[request.key] = answer;
        }
        if batch.answers.iter().any(Option::is_none) {
            return Ok(());
        }
        let id = BatchId(request.batch);
        let event = match request.kind {
            Kind::Copy => {
                let outcome = |value: &Option<Value>| {
                    if value.unwrap_or(0) == 0 { Copied::Absent } else { Copied::Taken { bytes: 1 } }
                };
                Event::Copied { batch: id, outcomes: batch.answers.iter().map(outcome).collect() }
            }
            // An existing key makes no difference to the machine.
            Kind::Store(_) => Event::Stored { batch: id, outcomes: vec![Stored::Stored; batch.answers.len()] },
            Kind::Remove | Kind::Purge(_) => Event::Removed { batch: id },
        };
        self.step(event)
    }

    fn request(&mut self, side: Side, batch: BatchId, keys: &[Key], kind: impl Fn(Value) -> Kind) {
        let entry = self.batches.entry(batch.0).or_default();
        entry.keys = keys.iter().map(ix).collect();
        entry.answers = vec![None; keys.len()];
        let Link::Up { requests, .. } = &mut self.links[side as usize] else { return };
        for (at, key) in entry.keys.iter().enumerate() {
            requests.push_back(Request { batch: batch.0, at, key: *key, kind: kind(entry.read[*key]) });
        }
    }

    /// Passes an event to the machine, and executes the resulting actions.
    fn step(&mut self, event: Event) -> Result<(), String> {
        let mut events = VecDeque::from([event]);
        let mut actions = Vec::new();
        while let Some(event) = events.pop_front() {
            let Some(leg) = &mut self.leg else { return Ok(()) };
            leg.step(event, 0, &mut actions);
            for action in actions.drain(..) {
                self.perform(action, &mut events)?;
            }
        }
        Ok(())
    }

    fn away(
        &self,
        fingerprints: &std::collections::BTreeSet<switchyard_policy::migration::Fingerprint>,
    ) -> [bool; KEYS] {
        keys().map(|key| fingerprints.contains(&Fingerprinter::new(7).of(&key)))
    }

    fn perform(&mut self, action: Action, events: &mut VecDeque<Event>) -> Result<(), String> {
        match action {
            Action::Record { number, record } => {
                self.written.push((number, record));
                if self.bug(Bug::JournalNotSynced) {
                    events.push_back(Event::Recorded(number));
                }
            }
            Action::Announce { .. } => {
                self.publish(View::Moving);
                self.barrier = Some(self.epoch);
            }
            Action::Withdraw => {
                self.barrier = None;
                self.publish(View::Settled(0));
            }
            Action::RollBack { away, .. } => {
                let away = self.away(&away);
                self.publish(View::RolledBack(away));
                self.barrier = Some(self.epoch);
            }
            Action::Purge { side, wrong } => {
                let wrong = keys().map(|key| wrong.has(Fingerprinter::new(7).of(&key)));
                if let Link::Up { requests, .. } = &mut self.links[side as usize] {
                    requests.push_back(Request { batch: u32::MAX, at: 0, key: 0, kind: Kind::Purge(wrong) });
                }
            }
            // Listed at once: after the drain only the mover changes the node.
            Action::List { .. } => {
                let from = usize::from(matches!(self.last_view(), View::RolledBack(_)));
                let there = keys().into_iter().filter(|key| self.nodes[from][ix(key)] != 0).collect();
                events.push_back(Event::Listed { keys: there, end: true });
            }
            // Of protocols that copy all keys first.
            Action::Observe | Action::CommitAll | Action::Io(Io::Overwrite { .. }) => {}
            Action::Relist { .. } | Action::Lost { .. } => {}
            Action::Io(
                Io::Refuse { .. } | Io::Report { .. } | Io::Quiet | Io::Track { .. } | Io::CorrectTracker { .. },
            ) => {}
            Action::Io(Io::Copy { batch, from, keys }) => {
                self.batches.remove(&batch.0);
                self.request(from, batch, &keys, |_| Kind::Copy);
            }
            Action::Io(Io::Store { batch, to, keys }) => self.request(to, batch, &keys, Kind::Store),
            Action::Io(Io::Remove { batch, from, keys }) => self.request(from, batch, &keys, |_| Kind::Remove),
            Action::Io(Io::Commit { keys }) => {
                for worker in &mut self.workers {
                    worker.unreported.extend(keys.iter().map(|key| (self.epoch, ix(key))));
                }
            }
            // A restart is noticed at once.
            Action::Confirm { side } => events.push_back(Event::Confirmed { side, evicted: 0 }),
            Action::Reconnect { .. } => {}
            Action::HandOver { to } => self.storing = Some(to as usize),
            Action::Io(Io::Secure { .. } | Io::Migrate { .. }) => {
                return Err(format!("it requests {action:?}, which is not permitted"));
            }
            Action::Io(Io::End(outcome)) => {
                self.leg = None;
                self.batches.clear();
                // No request is unanswered, so the connections need no end.
                let owner = usize::from(outcome == Outcome::Moved);
                self.ended = Some(outcome);
                return self.check_end(owner);
            }
        }
        Ok(())
    }

    /// Last published view, adopted or not.
    fn last_view(&self) -> &View {
        self.workers[0].views.back().map_or(&self.workers[0].view, |(_, view)| view)
    }

    /// Checks that the owner has everything and the other node nothing.
    fn check_end(&self, owner: usize) -> Result<(), String> {
        let begun = !matches!(self.ended, Some(Outcome::NotBegun { .. }));
        if self.nodes[owner] != self.truth {
            return Err(format!(
                "the leg has ended ({:?}), but its owner has {:?} instead of {:?}",
                self.ended, self.nodes[owner], self.truth
            ));
        }
        if begun && self.nodes[1 - owner] != [0; KEYS] {
            return Err(format!(
                "the leg has ended ({:?}), but the other node still has {:?}",
                self.ended,
                self.nodes[1 - owner]
            ));
        }
        Ok(())
    }
}

#[cfg(feature = "planted-bugs")]
fn planted(leg: Leg, planted: Option<Planted>) -> Leg {
    match planted {
        Some(Planted::Machine(bug)) => leg.with(Some(bug)),
        _ => leg,
    }
}

#[cfg(not(feature = "planted-bugs"))]
fn planted(leg: Leg, _planted: Option<Planted>) -> Leg {
    leg
}
