//! Model of the router's workers as in decision 0011: each uses the view that it has adopted, and counts commands in
//! flight by the epoch in which their node was chosen. `switchyard_policy::migration` decides routing, waiting and
//! reports to movers, as in the real workers. Bytes are not modelled.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

use switchyard_policy::hot_copies::WriteOutcome;
use switchyard_policy::migration::tracker::{State, Tracker};
use switchyard_policy::migration::{
    Committed, Decision, Fingerprint, Key, KeyLookup, Legs, Waits, Wanted, is_late, moved, observed,
};
use switchyard_policy::routing::{Route, route};
use switchyard_policy::topology::{MoveId, NodeId, Stage, Topology};

use crate::injected::{Bug, Planted, is_injected};
use crate::node::{Cmd, KeyIx, Op, Reply};
use crate::world::{Ev, Owner, What, World, say};

/// The committed keys of a leg, as mover and workers share them.
#[derive(Debug, Default)]
pub(crate) struct Known {
    keys: RefCell<BTreeSet<Fingerprint>>,
    all: Cell<bool>,
    /// Workers with waiting clients.
    waiting: RefCell<BTreeSet<usize>>,
    /// Tracker of a published protocol.
    tracked: Option<Tracked>,
}

/// A tracker that moves share.
#[derive(Clone)]
pub(crate) struct Tracked(pub(crate) Rc<RefCell<Box<dyn Tracker>>>);

impl std::fmt::Debug for Tracked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a tracker")
    }
}

impl Known {
    #[allow(clippy::arc_with_non_send_sync)] // views hold it so, and everything here is one thread
    pub(crate) fn tracked(tracked: Option<Tracked>) -> Arc<Self> {
        Arc::new(Self { tracked, ..Self::default() })
    }

    /// Returns an instance with the same tracker and no committed keys.
    pub(crate) fn without_commits(&self) -> Arc<Self> {
        Self::tracked(self.tracked.clone())
    }

    pub(crate) fn track(&self, groups: Vec<Fingerprint>, complete: bool) {
        let Some(Tracked(tracker)) = &self.tracked else { return };
        let mut tracker = tracker.borrow_mut();
        groups.into_iter().for_each(|group| if complete { tracker.complete(group) } else { tracker.start(group) });
    }

    pub(crate) fn found(&self, group: Fingerprint, truth: State) {
        if let Some(Tracked(tracker)) = &self.tracked {
            tracker.borrow_mut().correct(group, truth);
        }
    }

    pub(crate) fn commit(&self, keys: impl IntoIterator<Item = Fingerprint>) {
        self.keys.borrow_mut().extend(keys);
    }

    pub(crate) fn commit_all(&self) {
        self.all.set(true);
    }

    /// Takes the workers to notify of the keys committed so far.
    pub(crate) fn take_waiting(&self) -> BTreeSet<usize> {
        self.waiting.take()
    }
}

impl Committed for Known {
    fn has(&self, key: Fingerprint) -> bool {
        self.keys.borrow().contains(&key)
    }

    fn has_all(&self) -> bool {
        self.all.get()
    }

    fn state(&self, group: Fingerprint) -> State {
        self.tracked.as_ref().map_or(State::NotStarted, |Tracked(tracker)| tracker.borrow().state(group))
    }

    fn will_wait(&self, worker: usize) {
        self.waiting.borrow_mut().insert(worker);
    }
}

/// Published routing state.
#[derive(Debug)]
pub(crate) struct View {
    pub(crate) epoch: u64,
    topology: Topology,
    legs: Legs<Known>,
    /// Topology after the hand-over of moving keys, if there are any.
    moved: Option<Topology>,
}

impl View {
    pub(crate) fn new(epoch: u64, topology: Topology, legs: Legs<Known>) -> Self {
        let moved = moved(&topology, &legs);
        Self { epoch, topology, legs, moved }
    }

    /// Topology for a command whose keys have all arrived.
    fn moved(&self) -> &Topology {
        self.moved.as_ref().unwrap_or(&self.topology)
    }

    fn has_moving_slots(&self) -> bool {
        self.topology.transits().any(|transit| matches!(transit.stage, Stage::Moving { .. }))
    }
}

/// A broken connection, whose commands are in flight until the node confirms its end.
#[derive(Debug)]
struct Zombie {
    accepted: (u32, u64),
    ops: Vec<u64>,
}

#[derive(Debug, Default)]
struct Link {
    conn: Option<u32>,
    ready: bool,
    dialing: bool,
    /// Commands with a chosen node that wait for the connection.
    queue: Vec<u64>,
    zombies: Vec<Zombie>,
}

/// A command with a chosen node.
#[derive(Debug)]
pub(crate) struct InFlightCommand {
    pub(crate) epoch: u64,
    /// Number of nodes that have not replied.
    parts: u32,
    /// Own connection of a blocking command.
    blocking: Option<u32>,
    /// Nodes and replies of a double read: source, then target.
    double_read: Option<Vec<(usize, Option<Reply>)>>,
    /// Double read of a published protocol: a key that neither node has is absent.
    as_published: bool,
}

impl InFlightCommand {
    fn one(epoch: u64) -> Self {
        Self { epoch, parts: 1, blocking: None, double_read: None, as_published: false }
    }
}

#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) view: Rc<View>,
    links: [Link; 2],
    pub(crate) flying: BTreeMap<u64, InFlightCommand>,
    /// Commands that wait for keys.
    waiting: BTreeMap<u64, Waits<Known>>,
    /// Hot copies and their state.
    pub(crate) hot: crate::hot::WorkerGates,
}

impl Worker {
    pub(crate) fn new(view: Rc<View>) -> Self {
        Self {
            view,
            links: Default::default(),
            flying: BTreeMap::new(),
            waiting: BTreeMap::new(),
            hot: Default::default(),
        }
    }

    /// Whether the epoch is adopted and no command of an earlier epoch is in flight. With `observing`, while workers
    /// only start to record writes, blocked commands are ignored because they create no key.
    pub(crate) fn has_drained(&self, epoch: u64, observing: bool) -> bool {
        let harmless = |flying: &InFlightCommand| observing && flying.blocking.is_some();
        self.view.epoch >= epoch && self.flying.values().all(|flying| flying.epoch >= epoch || harmless(flying))
    }

    /// Like [`Self::has_drained`] if a node is lost for good: commands of its zombies are ignored, because their
    /// replies reach no client.
    pub(crate) fn has_answered(&self, epoch: u64, lost: usize) -> bool {
        let is_left = |op: &u64| self.links[lost].zombies.iter().any(|zombie| zombie.ops.contains(op));
        self.view.epoch >= epoch && self.flying.iter().all(|(op, flying)| flying.epoch >= epoch || is_left(op))
    }

    /// Takes the commands that wait for a connection to this node.
    pub(crate) fn take_waiting_for(&mut self, node: usize) -> Vec<u64> {
        std::mem::take(&mut self.links[node].queue)
    }

    /// Returns a command to the queue of a node.
    pub(crate) fn wait_for(&mut self, node: usize, op: u64) {
        self.links[node].queue.push(op);
    }

    /// Returns the node for a command whose keys are all available. `None` if the keys are on different nodes. `used`: the
    /// keys that the command uses, if it may use undeclared ones. It is executed at the owner of the slot, and the router
    /// names the keys that it may not use there. The real router repeats the command with these keys instead.
    fn place<'k>(
        &self,
        mut keys: impl Iterator<Item = &'k [u8]> + Clone,
        is_moving: bool,
        used: &[Key],
        planted: Option<Planted>,
    ) -> Option<usize> {
        let topology = if is_moving { self.view.moved() } else { &self.view.topology };
        let is_elsewhere = |key: &[u8]| topology.placement_override(key).is_some();
        let is_named = used.iter().any(|key| is_elsewhere(key)) && !is_injected(planted, Bug::ElsewhereNotNamed);
        if is_named || !used.is_empty() && keys.clone().any(is_elsewhere) {
            return None;
        }
        if is_injected(planted, Bug::OverrideForgotten) {
            return keys.next().map(|key| topology.owner_of(key).index());
        }
        match route(topology, keys) {
            Route::Owner(_, node) | Route::Together(node) => Some(node.index()),
            Route::Parted(_) | Route::Anywhere | Route::CrossSlot => None,
        }
    }

    /// Returns the node of a key for its hot copies. `None` while the key moves.
    pub(crate) fn place_of_copies(&self, key: &[u8], serves_observed: bool) -> Option<NodeId> {
        let topology = &self.view.topology;
        let stays = topology
            .transit(topology.slot_of(key))
            .is_none_or(|transit| serves_observed && transit.stage == Stage::Observed);
        stays.then(|| topology.lives_at(key))
    }

    /// Commands blocked at a node, with their connections.
    pub(crate) fn waiting_at_nodes(&self) -> impl Iterator<Item = (u64, u32)> + '_ {
        self.flying.iter().filter_map(|(op, flying)| Some((*op, flying.blocking?)))
    }

    /// Whether a command went to one node and does not block there.
    pub(crate) fn is_plain(&self, op: u64) -> bool {
        self.flying.get(&op).is_some_and(|flying| flying.blocking.is_none() && flying.double_read.is_none())
    }

    /// Returns the node that uses a key once the key has arrived.
    pub(crate) fn uses_at(&self, key: &[u8]) -> usize {
        self.view.moved().lives_at(key).index()
    }
}

impl World {
    /// Dispatches a command from the beginning.
    pub(crate) fn look(&mut self, op: u64) {
        let Some(command) = self.ops.get(&op) else { return };
        let ix = command.worker;
        if command.op == Op::Flush {
            self.on_flush_request(op);
            return;
        }
        let mut keys = Vec::new();
        command.op.keys(&mut keys);
        let (writes, undeclared) = (!command.op.is_read(), command.op.uses_undeclared());
        let mut used = Vec::new();
        if undeclared {
            command.op.uses(&mut used);
        }
        let name = |key: &KeyIx| self.keys[*key].clone();
        let (names, used): (Vec<Key>, Vec<Key>) = (keys.iter().map(name).collect(), used.iter().map(name).collect());
        let names = names.iter().map(|name| &name[..]);
        let (missed, is_get) = (command.missed, matches!(command.op, Op::Get(_)));
        let is_moving = loop {
            let worker = &self.workers[ix];
            let may_ask = is_get && !missed && !worker.waiting.contains_key(&op);
            let View { topology, legs, .. } = &*worker.view;
            let mut look = look(self.planted);
            names.clone().for_each(|name| look.key(topology, legs, name, writes, || undeclared));
            match look.decide(topology, legs, false, || may_ask) {
                Decision::Settled => break false,
                Decision::Moved | Decision::Split(_) => break true,
                Decision::Ask(nodes) => {
                    let conns: Option<Vec<u32>> =
                        nodes.iter().map(|node| Some(self.live_link(ix, node.index())?.0)).collect();
                    return match conns {
                        Some(conns) => self.double_read(ix, op, conns, true),
                        None => {
                            nodes.into_iter().for_each(|node| self.dial(ix, node.index()));
                            self.after(300, Ev::Dispatch { op });
                        }
                    };
                }
                Decision::DoubleRead(nodes, read) => {
                    let met = nodes.into_iter().zip([&read.source, &read.target]);
                    if let Some(conns) = met.map(|(node, process)| self.conn_to(ix, node, process)).collect() {
                        // More often than in the router, for coverage.
                        if read.fetches_one_in > 0
                            && self.random.chance(300)
                            && let Some((of, key)) = look.fetched()
                        {
                            self.after(5, Ev::Wanted { of, keys: vec![key] });
                        }
                        return self.double_read(ix, op, conns, false);
                    }
                }
                Decision::Wait => {}
            }
            let worker = &mut self.workers[ix];
            if let Some(wanted) = worker.waiting.entry(op).or_default().begin(look, ix) {
                say!(self, "worker {ix}: command {op} waits for {wanted:?}");
                for (of, what) in wanted {
                    if let Wanted::Keys(keys) = what {
                        self.after(5, Ev::Wanted { of, keys });
                    }
                }
                return;
            }
        };
        self.workers[ix].waiting.remove(&op);
        let Some(node) = self.workers[ix].place(names.clone(), is_moving, &used, self.planted) else {
            self.client_cross_node(op);
            return;
        };
        if self.hot_read(op, node) {
            return;
        }
        if writes && !self.bug(Bug::WritesNotNoted) {
            let topology = &self.workers[ix].view.topology;
            let mut by_move = BTreeMap::<MoveId, Vec<KeyIx>>::new();
            for key in keys {
                if let Some(transit) = observed(topology, &self.keys[key], NodeId(node as u16)) {
                    by_move.entry(transit.move_id).or_default().push(key);
                }
            }
            for (move_id, keys) in by_move {
                self.notify_mover(move_id, op, &keys, undeclared);
            }
        }
        self.choose(ix, op, node);
    }

    /// Returns the connection to a node for a double read, if the leg has met its process.
    fn conn_to(&self, ix: usize, node: NodeId, met: &str) -> Option<u32> {
        let (conn, process) = self.live_link(ix, node.index())?;
        (process.to_string() == met || self.bug(Bug::DoubleReadOfAnyProcess)).then_some(conn)
    }

    fn double_read(&mut self, ix: usize, op: u64, conns: Vec<u32>, as_published: bool) {
        let epoch = self.workers[ix].view.epoch;
        let asked: Vec<_> = conns.iter().map(|conn| (self.conns[*conn as usize].node, None)).collect();
        let parts = asked.len() as u32;
        self.workers[ix].flying.insert(
            op,
            InFlightCommand { parts, double_read: Some(asked), as_published, ..InFlightCommand::one(epoch) },
        );
        say!(self, "worker {ix}: command {op} is sent on {conns:?}");
        conns.into_iter().for_each(|conn| self.transmit(op, conn));
    }

    /// Handles the reply of one node to a double read.
    fn double_read_answered(&mut self, ix: usize, op: u64, node: usize, reply: Reply) {
        if !self.ops.contains_key(&op) {
            // The client has already received an error: unknown outcome.
            return self.on_landed(ix, op);
        }
        let Some(flying) = self.workers[ix].flying.get_mut(&op) else { return };
        let believes_absence = flying.as_published && flying.double_read.as_ref().is_some_and(|asked| asked.len() > 1);
        let Some(asked) = flying.double_read.as_mut() else { return };
        if let Some(part) = asked.iter_mut().find(|part| part.0 == node) {
            part.1 = Some(reply);
        }
        let answers: Option<Vec<Reply>> = asked.iter().map(|(_, answer)| answer.clone()).collect();
        self.on_landed(ix, op);
        let Some(answers) = answers else { return };
        let shown = answers.into_iter().rev().find(|answer| matches!(answer, Reply::Value(Some(_))));
        match shown {
            Some(reply) => self.on_reply(op, node, reply),
            None if believes_absence || self.bug(Bug::DoubleReadBelieved) => {
                self.on_reply(op, node, Reply::Value(None))
            }
            None => {
                if let Some(command) = self.ops.get_mut(&op) {
                    command.missed = true;
                }
                self.look(op);
            }
        }
    }

    fn choose(&mut self, ix: usize, op: u64, node: usize) {
        let epoch = self.workers[ix].view.epoch;
        self.workers[ix].flying.insert(op, InFlightCommand::one(epoch));
        if matches!(self.ops[&op].op, Op::Pop(_)) {
            let conn = self.connect(node, Owner::Blocking(ix, op));
            if let Some(flying) = self.workers[ix].flying.get_mut(&op) {
                flying.blocking = Some(conn);
            }
            return;
        }
        match self.ops[&op].op {
            Op::Watch(_) => {
                self.connect(node, Owner::Watching(ix, op));
            }
            Op::Exec(..) => self.exec(ix, op, node),
            _ => self.transmit_or_queue(ix, op, node),
        }
    }

    /// Sends EXEC on the watching connection, unless it is closed or the key has been used elsewhere since WATCH.
    fn exec(&mut self, ix: usize, op: u64, node: usize) {
        let watch = self.clients[self.ops[&op].client].watch.as_ref();
        let conn = watch.map(|watch| watch.conn).filter(|conn| self.conns[*conn as usize].owner_alive);
        let holds = watch.is_some_and(|watch| !watch.failed && watch.node == node);
        match conn {
            Some(conn) if holds || self.bug(Bug::WatchStays) => self.transmit(op, conn),
            _ if self.bug(Bug::WatchForgotten) => self.transmit_or_queue(ix, op, node),
            _ => {
                self.workers[ix].flying.remove(&op);
                self.on_reply(op, node, Reply::Value(None));
            }
        }
    }

    fn transmit_or_queue(&mut self, ix: usize, op: u64, node: usize) {
        let link = &self.workers[ix].links[node];
        if let Some(conn) = link.conn.filter(|_| link.ready || is_injected(self.planted, Bug::SentBeforeHandshake)) {
            self.transmit(op, conn);
            return;
        }
        if self.bug(Bug::WaitingIsNotInFlight) {
            self.workers[ix].flying.remove(&op);
        }
        self.workers[ix].links[node].queue.push(op);
        self.dial(ix, node);
    }

    fn transmit(&mut self, op: u64, conn: u32) {
        self.hot_sends(op, self.conns[conn as usize].node);
        let Some(command) = self.ops.get_mut(&op) else { return };
        command.sent = true;
        let cmd = if command.load { Cmd::Loaded(command.op.clone()) } else { Cmd::Client(command.op.clone()) };
        self.send(conn, cmd, What::Command(op));
    }

    pub(crate) fn dial(&mut self, ix: usize, node: usize) {
        let link = &mut self.workers[ix].links[node];
        link.dialing = false;
        if link.conn.is_none() {
            let conn = self.connect(node, Owner::Worker(ix));
            let link = &mut self.workers[ix].links[node];
            link.conn = Some(conn);
            link.ready = false;
            if is_injected(self.planted, Bug::SentBeforeHandshake) {
                for op in std::mem::take(&mut self.workers[ix].links[node].queue) {
                    self.transmit(op, conn);
                }
            }
        }
    }

    pub(crate) fn worker_answered(&mut self, ix: usize, conn: u32, what: What, reply: Reply) {
        let node = self.conns[conn as usize].node;
        match (what, reply) {
            (What::Hello, Reply::Hello(process, _)) => {
                self.hot_meets(node, process);
                match self.conns[conn as usize].owner {
                    Owner::Blocking(_, op) | Owner::Watching(_, op) => self.transmit(op, conn),
                    _ => self.link_is_up(ix, node, conn, process),
                }
            }
            (What::Kill(ops), _) => {
                // A repeated CLIENT KILL is confirmed twice; the second confirmation finds no zombie.
                let zombies = &mut self.workers[ix].links[node].zombies;
                let ended: Vec<u64> = zombies
                    .extract_if(.., |zombie| zombie.ops.iter().any(|op| ops.contains(op)))
                    .flat_map(|zombie| zombie.ops)
                    .collect();
                let is_all = zombies.is_empty();
                self.hot_confirmed(ix, &ended, node);
                for op in ended {
                    self.on_landed(ix, op);
                }
                if is_all {
                    self.hot_settles(ix, node);
                }
            }
            (What::Unblock, _) => {}
            (What::Command(op), reply)
                if self.workers[ix].flying.get(&op).is_some_and(|flying| flying.double_read.is_some()) =>
            {
                self.hot_over(ix, op, node, WriteOutcome::Certain);
                self.double_read_answered(ix, op, node, reply);
            }
            (What::Command(op), reply) => {
                if reply != Reply::NoScript {
                    self.hot_over(ix, op, node, WriteOutcome::Certain);
                }
                let blocking = matches!(self.conns[conn as usize].owner, Owner::Blocking(..));
                if blocking {
                    self.close(conn);
                }
                if matches!(self.conns[conn as usize].owner, Owner::Watching(..)) && reply == Reply::Ok {
                    self.client_watches(op, conn);
                }
                match reply {
                    Reply::Unblocked => {
                        self.workers[ix].flying.remove(&op);
                        self.look(op);
                    }
                    Reply::NoScript => {
                        if let Some(command) = self.ops.get_mut(&op) {
                            command.load = true;
                            if let Op::Script(inner) = &command.op {
                                command.op = (**inner).clone();
                            }
                            command.node = node;
                        }
                        if self.bug(Bug::AskedAgainIsNotInFlight) {
                            self.workers[ix].flying.remove(&op);
                        }
                        let delay = self.random.delay_us();
                        self.after(delay, Ev::Resend { op });
                    }
                    reply => {
                        self.note_late(ix, op, node);
                        self.on_reply(op, node, reply);
                        self.on_landed(ix, op);
                    }
                }
            }
            (what, reply) => self.violated(format!("worker {ix}: {reply:?} as the reply to {what:?}")),
        }
    }

    /// Reports a finished write to the mover if its group may have started since, under a published protocol.
    fn note_late(&mut self, ix: usize, op: u64, node: usize) {
        let Some(command) = self.ops.get(&op).filter(|command| !command.op.is_read()) else { return };
        let mut keys = Vec::new();
        command.op.keys(&mut keys);
        let view = self.workers[ix].view.clone();
        for key in keys {
            if let Some(transit) = is_late(&view.topology, &view.legs, &self.keys[key], NodeId(node as u16)) {
                self.notify_mover(transit.move_id, op, &[key], false);
            }
        }
    }

    /// Sends a command again to the same node, after SCRIPT LOAD.
    pub(crate) fn send_again(&mut self, op: u64) {
        let Some(command) = self.ops.get(&op) else { return };
        let (ix, node) = (command.worker, command.node);
        let epoch = self.workers[ix].view.epoch;
        self.workers[ix].flying.entry(op).or_insert(InFlightCommand::one(epoch));
        self.transmit_or_queue(ix, op, node);
    }

    fn link_is_up(&mut self, ix: usize, node: usize, conn: u32, process: u32) {
        let bug = self.bug(Bug::SentBeforeHandshake);
        let link = &mut self.workers[ix].links[node];
        link.ready = true;
        let queue = std::mem::take(&mut link.queue);
        let (here, gone): (Vec<Zombie>, Vec<Zombie>) =
            std::mem::take(&mut link.zombies).into_iter().partition(|zombie| zombie.accepted.0 == process);
        if !here.is_empty() {
            let ids = here.iter().map(|zombie| zombie.accepted.1).collect();
            let ops = here.iter().flat_map(|zombie| zombie.ops.iter().copied()).collect();
            self.workers[ix].links[node].zombies = here;
            self.send(conn, Cmd::Kill(ids), What::Kill(ops));
        }
        // A dead process executes nothing.
        let gone: Vec<u64> = gone.into_iter().flat_map(|zombie| zombie.ops).collect();
        self.hot_confirmed(ix, &gone, node);
        for op in gone {
            self.on_landed(ix, op);
        }
        if self.workers[ix].links[node].zombies.is_empty() {
            self.hot_settles(ix, node);
        }
        for op in queue {
            let epoch = self.workers[ix].view.epoch;
            self.workers[ix].flying.entry(op).or_insert(InFlightCommand::one(epoch));
            if !bug || self.ops.get(&op).is_some_and(|command| !command.sent) {
                self.transmit(op, conn);
            }
        }
    }

    /// Records that a command is no longer in flight at one node.
    pub(crate) fn on_landed(&mut self, ix: usize, op: u64) {
        let Some(flying) = self.workers[ix].flying.get_mut(&op) else { return };
        flying.parts -= 1;
        if flying.parts == 0 {
            self.workers[ix].flying.remove(&op);
            self.flush_landed(op);
        } else if self.bug(Bug::FlushHalfAwaited) {
            self.flush_landed(op);
        }
    }

    pub(crate) fn worker_broke(&mut self, ix: usize, conn: u32) {
        let (node, owner, accepted) = {
            let c = &self.conns[conn as usize];
            (c.node, c.owner, c.accepted)
        };
        let hello = self.conns[conn as usize].pending.front().is_some_and(|pending| pending.what == What::Hello);
        let lost = self.close(conn);
        let mut ops = Vec::new();
        for pending in lost {
            match pending.what {
                What::Command(op) => {
                    self.on_disconnect(op);
                    ops.push(op);
                }
                // Without a confirmation, the next connection sends CLIENT KILL again.
                What::Kill(_)
                | What::Hello
                | What::Unblock
                | What::Mover(_)
                | What::FillTtl(_)
                | What::Fill(_)
                | What::Beat => {}
            }
        }
        // A command that was never sent is dispatched again.
        let unsent = match owner {
            Owner::Blocking(_, op) | Owner::Watching(_, op) if hello => Some(op),
            _ => None,
        };
        let zombie = accepted.filter(|_| !hello && !ops.is_empty() && !self.bug(Bug::ClosedCountsAsDrained));
        let how = if zombie.is_some() { WriteOutcome::Doubtful } else { WriteOutcome::Certain };
        ops.iter().for_each(|op| self.hot_over(ix, *op, node, how));
        match zombie {
            Some(accepted) => self.workers[ix].links[node].zombies.push(Zombie { accepted, ops }),
            None => ops.into_iter().for_each(|op| self.on_landed(ix, op)),
        }
        if let Owner::Worker(_) = owner {
            let link = &mut self.workers[ix].links[node];
            link.conn = None;
            link.ready = false;
        } else if let Some((conn, process)) = self.live_link(ix, node) {
            // The link is up and can confirm the end at once.
            self.link_is_up(ix, node, conn, process);
        }
        if let Some(op) = unsent {
            self.workers[ix].flying.remove(&op);
            self.look(op);
        }
        let link = &mut self.workers[ix].links[node];
        let needed = !link.queue.is_empty() || !link.zombies.is_empty();
        if needed && link.conn.is_none() && !link.dialing {
            link.dialing = true;
            let delay = self.random.between(300, 4_000);
            self.after(delay, Ev::Dial { worker: ix, node });
        }
    }

    fn live_link(&self, ix: usize, node: usize) -> Option<(u32, u32)> {
        let link = &self.workers[ix].links[node];
        let conn = link.conn.filter(|_| link.ready)?;
        self.conns[conn as usize].accepted.map(|(process, _)| (conn, process))
    }

    /// Adopts a published view.
    pub(crate) fn adopt(&mut self, ix: usize, view: Rc<View>) {
        let worker = &mut self.workers[ix];
        if view.epoch <= worker.view.epoch {
            return;
        }
        worker.view = view;
        self.hot_drop_moved(ix);
        self.fail_stale_watches(ix);
        say!(self, "worker {ix} adopts {:?}", self.workers[ix].view);
        self.notify_again(ix);
        self.unblock_outdated(ix);
        self.redispatch_waiting(ix, true);
    }

    /// Reports the possible writes of blocked commands to the movers, as of now.
    fn notify_again(&mut self, ix: usize) {
        let waiting: Vec<(u64, u32)> = self.workers[ix]
            .flying
            .iter()
            .filter_map(|(op, flying)| Some((*op, self.conns[flying.blocking? as usize].node as u32)))
            .collect();
        for (op, node) in waiting {
            let mut keys = Vec::new();
            if let Some(command) = self.ops.get(&op) {
                command.op.keys(&mut keys);
            }
            let topology = self.workers[ix].view.topology.clone();
            for key in keys {
                if let Some(transit) = observed(&topology, &self.keys[key], NodeId(node as u16)) {
                    self.notify_mover(transit.move_id, op, &[key], false);
                }
            }
        }
    }

    /// Fails watches whose key is now used at another node, because the watching node would miss a change there.
    fn fail_stale_watches(&mut self, ix: usize) {
        if self.bug(Bug::WatchReturns) {
            return;
        }
        let (worker, keys, workers) = (&self.workers[ix], &self.keys, self.workers.len());
        for client in self.clients.iter_mut().filter(|client| client.number % workers == ix) {
            if let Some(watch) = &mut client.watch {
                watch.failed |= worker.uses_at(&keys[watch.key]) != watch.node;
            }
        }
    }

    /// Dispatches waiting commands again: all, or only the ones whose keys have arrived.
    pub(crate) fn redispatch_waiting(&mut self, ix: usize, all: bool) {
        let waiting = &self.workers[ix].waiting;
        waiting.values().for_each(|waits| waits.register_again(ix));
        let due: Vec<u64> = waiting.iter().filter(|(_, waits)| all || waits.is_over()).map(|(op, _)| *op).collect();
        due.into_iter().for_each(|op| self.look(op));
    }

    pub(crate) fn refused(&mut self, ix: usize, move_id: MoveId, keys: Option<&[Fingerprint]>) {
        let concerned: Vec<u64> = self.workers[ix]
            .waiting
            .extract_if(.., |_, waits| waits.concerns(move_id, keys))
            .map(|(op, _)| op)
            .collect();
        concerned.into_iter().for_each(|op| self.client_refused(op));
    }

    /// Ends commands blocked at a node since an earlier epoch, and dispatches them again.
    pub(crate) fn unblock_outdated(&mut self, ix: usize) {
        let worker = &self.workers[ix];
        if !worker.view.has_moving_slots() || self.bug(Bug::BlockedNotParked) {
            return;
        }
        let epoch = worker.view.epoch;
        let blocked: Vec<(u64, u32)> = worker
            .flying
            .iter()
            .filter(|(_, f)| f.epoch < epoch)
            .filter_map(|(op, f)| Some((*op, f.blocking?)))
            .collect();
        for (op, conn) in blocked {
            let c = &self.conns[conn as usize];
            if !c.owner_alive {
                continue;
            }
            let node = c.node;
            let sent = self.ops.get(&op).is_some_and(|command| command.sent);
            match c.accepted {
                Some((_, id)) if sent => match self.live_link(ix, node) {
                    Some((link, _)) => self.send(link, Cmd::Unblock(id), What::Unblock),
                    None => self.dial(ix, node),
                },
                _ => {
                    self.close(conn);
                    self.workers[ix].flying.remove(&op);
                    self.look(op);
                }
            }
        }
    }

    /// Sends FLUSHALL to both nodes.
    pub(crate) fn flush_everywhere(&mut self, op: u64) {
        let Some(command) = self.ops.get(&op) else { return };
        let ix = command.worker;
        let epoch = self.workers[ix].view.epoch;
        self.workers[ix].flying.insert(op, InFlightCommand { parts: 2, ..InFlightCommand::one(epoch) });
        for node in 0..2 {
            self.transmit_or_queue(ix, op, node);
        }
    }
}

#[cfg(feature = "planted-bugs")]
fn look(planted: Option<Planted>) -> KeyLookup<Known> {
    match planted {
        Some(Planted::Machine(bug)) => KeyLookup::default().with(Some(bug)),
        _ => KeyLookup::default(),
    }
}

#[cfg(not(feature = "planted-bugs"))]
fn look(_planted: Option<Planted>) -> KeyLookup<Known> {
    KeyLookup::default()
}
