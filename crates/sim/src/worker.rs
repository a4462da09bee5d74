//! Workers as decision 0011 has them: each works by the view that it has adopted, knows of committed keys what it has been told, and counts what is
//! in flight by the epoch in which its place was chosen. What they do with bytes is left out.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use switchyard_policy::migration::Event;

use crate::node::{Cmd, KeyIx, Op, Reply};
use crate::planted::{Bug, Garden};
use crate::world::{Ev, Owner, What, World, say};

/// What the router has published about the slots, under its epoch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct View {
    pub(crate) epoch: u64,
    pub(crate) stage: Stage,
    /// The owner of the slot, and where each key lives.
    pub(crate) owner: usize,
    pub(crate) places: Rc<Vec<usize>>,
    /// Where only some keys move: which.
    pub(crate) scope: Option<Rc<BTreeSet<KeyIx>>>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Stage {
    /// Every key is where it lives.
    Settled,
    /// The same, and writes are told to the mover.
    Observed,
    /// Keys are at the target once they are committed.
    Moving { uid: u64, target: usize },
    /// Keys of `away` are at the source once they are committed, all others at once.
    RolledBack { uid: u64, source: usize, away: BTreeSet<KeyIx> },
}

impl View {
    /// At the beginning: one node has all keys.
    pub(crate) fn first(keys: usize) -> Self {
        Self { epoch: 1, stage: Stage::Settled, owner: 0, places: Rc::new(vec![0; keys]), scope: None }
    }

    /// Whether a key moves with the leg under way.
    fn moves(&self, key: KeyIx, garden: Garden) -> bool {
        match &self.scope {
            Some(scope) => scope.contains(&key),
            None => self.places[key] == self.owner || garden.is(Bug::ExceptionTaken),
        }
    }
}

/// A connection that broke with commands on it: until the node has confirmed its end, they are in flight.
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
    /// Commands whose place is chosen and that wait for the connection.
    queue: Vec<u64>,
    zombies: Vec<Zombie>,
}

/// A command whose place is chosen.
#[derive(Debug)]
pub(crate) struct Flying {
    pub(crate) epoch: u64,
    /// Nodes that have not answered.
    parts: u32,
    /// Its own connection, if it waits.
    blocking: Option<u32>,
}

/// A worker.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) view: Rc<View>,
    links: [Link; 2],
    committed: BTreeSet<KeyIx>,
    committed_uid: u64,
    /// Every key is committed, also those that nobody has named.
    committed_all: bool,
    pub(crate) flying: BTreeMap<u64, Flying>,
    /// Commands that wait for keys.
    waiting: BTreeSet<u64>,
}

enum Choice {
    Node(usize),
    /// Its keys do not live together.
    Parted,
    Wait(Vec<KeyIx>),
}

impl Worker {
    pub(crate) fn new(view: Rc<View>) -> Self {
        Self {
            view,
            links: Default::default(),
            committed: BTreeSet::new(),
            committed_uid: 0,
            committed_all: false,
            flying: BTreeMap::new(),
            waiting: BTreeSet::new(),
        }
    }

    /// Nothing chosen under an epoch before this one is in flight, and the epoch is adopted. Whether the workers only begin to note what they write:
    /// then commands that wait for an element do no harm, they make no key.
    pub(crate) fn has_drained(&self, epoch: u64, observing: bool) -> bool {
        let harmless = |flying: &Flying| observing && flying.blocking.is_some();
        self.view.epoch >= epoch && self.flying.values().all(|flying| flying.epoch >= epoch || harmless(flying))
    }

    /// The same where a node is lost for good: what a connection to it has left behind reaches nobody.
    pub(crate) fn has_answered(&self, epoch: u64, lost: usize) -> bool {
        let is_left = |op: &u64| self.links[lost].zombies.iter().any(|zombie| zombie.ops.contains(op));
        self.view.epoch >= epoch && self.flying.iter().all(|(op, flying)| flying.epoch >= epoch || is_left(op))
    }

    /// Commands whose place is this node, and that wait for a connection to it.
    pub(crate) fn take_waiting_for(&mut self, node: usize) -> Vec<u64> {
        std::mem::take(&mut self.links[node].queue)
    }

    /// Gives one back.
    pub(crate) fn wait_for(&mut self, node: usize, op: u64) {
        self.links[node].queue.push(op);
    }

    fn choose(&self, op: &Op, garden: Garden) -> Choice {
        let view = &*self.view;
        let mut keys = Vec::new();
        op.keys(&mut keys);
        let moves = |key: &KeyIx| view.moves(*key, garden);
        let (uid, to) = match &view.stage {
            Stage::Settled | Stage::Observed => (0, None),
            Stage::Moving { uid, target } => (*uid, Some(*target)),
            Stage::RolledBack { uid, source, .. } => (*uid, Some(*source)),
        };
        let known = uid == self.committed_uid;
        let is_missing = |key: &KeyIx| {
            let must_come = match &view.stage {
                Stage::Settled | Stage::Observed => false,
                Stage::Moving { .. } => moves(key),
                Stage::RolledBack { away, .. } => away.contains(key),
            };
            must_come && !(known && (self.committed_all || self.committed.contains(key)))
        };
        let missing: Vec<KeyIx> = keys.iter().copied().filter(is_missing).collect();
        let one_is_enough = garden.is(Bug::OneKeyIsEnough) && missing.len() < keys.len() && matches!(view.stage, Stage::Moving { .. });
        if !missing.is_empty() && !one_is_enough {
            return Choice::Wait(missing);
        }
        let lives_at = |key: &KeyIx| if garden.is(Bug::ExceptionForgotten) { view.owner } else { view.places[*key] };
        let mut nodes = keys.iter().map(|key| to.filter(|_| moves(key)).unwrap_or_else(|| lives_at(key)));
        let first = nodes.next().unwrap_or(view.owner);
        if nodes.all(|node| node == first) { Choice::Node(first) } else { Choice::Parted }
    }

    /// Where a key is used, once it is there.
    pub(crate) fn uses_at(&self, key: KeyIx, garden: Garden) -> usize {
        let to = match self.view.stage {
            Stage::Settled | Stage::Observed => None,
            Stage::Moving { target, .. } => Some(target),
            Stage::RolledBack { source, .. } => Some(source),
        };
        to.filter(|_| self.view.moves(key, garden)).unwrap_or(self.view.places[key])
    }
}

impl World {
    /// A command is looked at, from its beginning.
    pub(crate) fn look(&mut self, op: u64) {
        let Some(command) = self.ops.get(&op) else { return };
        let ix = command.worker;
        if command.op == Op::Flush {
            self.flush_asked(op);
            return;
        }
        let choice = self.workers[ix].choose(&command.op, self.garden);
        let mut keys = Vec::new();
        command.op.keys(&mut keys);
        let writes = !command.op.is_read();
        match choice {
            Choice::Node(node) => {
                self.workers[ix].waiting.remove(&op);
                if writes && matches!(self.workers[ix].view.stage, Stage::Observed) && !self.bug(Bug::WritesNotNoted) {
                    self.tell_mover(op, &keys);
                }
                self.choose(ix, op, node);
            }
            Choice::Parted => {
                self.workers[ix].waiting.remove(&op);
                self.client_parted(op);
            }
            Choice::Wait(keys) => {
                say!(self, "worker {ix}: command {op} waits for {keys:?}");
                self.workers[ix].waiting.insert(op);
                let keys = keys.iter().map(|key| self.keys[*key].clone()).collect();
                self.after(5, Ev::Mover(Event::Wanted { keys }.into()));
            }
        }
    }

    fn choose(&mut self, ix: usize, op: u64, node: usize) {
        let epoch = self.workers[ix].view.epoch;
        self.workers[ix].flying.insert(op, Flying { epoch, parts: 1, blocking: None });
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

    /// EXEC goes on the connection that watches, and only if the key has been used nowhere else since, and the connection is still there.
    fn exec(&mut self, ix: usize, op: u64, node: usize) {
        let watch = self.clients[self.ops[&op].client].watch.as_ref();
        let conn = watch.map(|watch| watch.conn).filter(|conn| self.conns[*conn as usize].owner_alive);
        let holds = watch.is_some_and(|watch| !watch.failed && watch.node == node);
        match conn {
            Some(conn) if holds || self.bug(Bug::WatchStays) => self.transmit(op, conn),
            _ if self.bug(Bug::WatchForgotten) => self.transmit_or_queue(ix, op, node),
            _ => {
                self.workers[ix].flying.remove(&op);
                self.client_told(op, node, Reply::Value(None));
            }
        }
    }

    fn transmit_or_queue(&mut self, ix: usize, op: u64, node: usize) {
        let link = &self.workers[ix].links[node];
        if let Some(conn) = link.conn.filter(|_| link.ready || self.garden.is(Bug::SentBeforeHandshake)) {
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
            if self.garden.is(Bug::SentBeforeHandshake) {
                for op in std::mem::take(&mut self.workers[ix].links[node].queue) {
                    self.transmit(op, conn);
                }
            }
        }
    }

    pub(crate) fn worker_answered(&mut self, ix: usize, conn: u32, what: What, reply: Reply) {
        let node = self.conns[conn as usize].node;
        match (what, reply) {
            (What::Hello, Reply::Hello(process, _)) => match self.conns[conn as usize].owner {
                Owner::Blocking(_, op) | Owner::Watching(_, op) => self.transmit(op, conn),
                _ => self.link_is_up(ix, node, conn, process),
            },
            (What::Kill(ops), _) => {
                // Asked twice, it is confirmed twice: what is done is not done again.
                let zombies = &mut self.workers[ix].links[node].zombies;
                let ended: Vec<u64> =
                    zombies.extract_if(.., |zombie| zombie.ops.iter().any(|op| ops.contains(op))).flat_map(|zombie| zombie.ops).collect();
                for op in ended {
                    self.landed(ix, op);
                }
            }
            (What::Unblock, _) => {}
            (What::Command(op), reply) => {
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
                        self.after(delay, Ev::AskAgain { op });
                    }
                    reply => {
                        self.client_told(op, node, reply);
                        self.landed(ix, op);
                    }
                }
            }
            (what, reply) => self.violated(format!("worker {ix}: {reply:?} in answer to {what:?}")),
        }
    }

    /// The node had no script: it is told, and asked again. The place stays chosen.
    pub(crate) fn ask_again(&mut self, op: u64) {
        let Some(command) = self.ops.get(&op) else { return };
        let (ix, node) = (command.worker, command.node);
        let epoch = self.workers[ix].view.epoch;
        self.workers[ix].flying.entry(op).or_insert(Flying { epoch, parts: 1, blocking: None });
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
        // A process that is gone executes nothing.
        for op in gone.into_iter().flat_map(|zombie| zombie.ops) {
            self.landed(ix, op);
        }
        for op in queue {
            let epoch = self.workers[ix].view.epoch;
            self.workers[ix].flying.entry(op).or_insert(Flying { epoch, parts: 1, blocking: None });
            if !bug || self.ops.get(&op).is_some_and(|command| !command.sent) {
                self.transmit(op, conn);
            }
        }
    }

    /// A command is in flight no more at one node.
    pub(crate) fn landed(&mut self, ix: usize, op: u64) {
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
                    self.client_untold(op);
                    ops.push(op);
                }
                // Not confirmed: the next connection asks again.
                What::Kill(_) | What::Hello | What::Unblock | What::Mover(_) => {}
            }
        }
        // What was never sent looks for another place.
        let unsent = match owner {
            Owner::Blocking(_, op) | Owner::Watching(_, op) if hello => Some(op),
            _ => None,
        };
        let zombie = accepted.filter(|_| !hello && !ops.is_empty() && !self.bug(Bug::ClosedCountsAsDrained));
        match zombie {
            Some(accepted) => self.workers[ix].links[node].zombies.push(Zombie { accepted, ops }),
            None => ops.into_iter().for_each(|op| self.landed(ix, op)),
        }
        if let Owner::Worker(_) = owner {
            let link = &mut self.workers[ix].links[node];
            link.conn = None;
            link.ready = false;
        } else if let Some((conn, process)) = self.live_link(ix, node) {
            // The link is up already: it confirms at once.
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

    /// The worker takes over what was published.
    pub(crate) fn adopt(&mut self, ix: usize, view: Rc<View>) {
        let worker = &mut self.workers[ix];
        if view.epoch <= worker.view.epoch {
            return;
        }
        let uid = match view.stage {
            Stage::Moving { uid, .. } | Stage::RolledBack { uid, .. } => uid,
            _ => 0,
        };
        if uid != worker.committed_uid && !(self.garden.is(Bug::CommittedKept) && uid != 0) {
            worker.committed.clear();
        }
        worker.committed_all &= uid == worker.committed_uid;
        worker.committed_uid = uid;
        worker.view = view;
        self.look_at_watches(ix);
        say!(self, "worker {ix} adopts {:?}", self.workers[ix].view);
        self.unblock_again(ix);
        self.look_at_waiting(ix);
    }

    /// What is watched where it is not used any more may change without the node's knowing.
    fn look_at_watches(&mut self, ix: usize) {
        if self.bug(Bug::WatchReturns) {
            return;
        }
        let (worker, garden, workers) = (&self.workers[ix], self.garden, self.workers.len());
        for client in self.clients.iter_mut().filter(|client| client.number % workers == ix) {
            if let Some(watch) = &mut client.watch {
                watch.failed |= worker.uses_at(watch.key, garden) != watch.node;
            }
        }
    }

    fn look_at_waiting(&mut self, ix: usize) {
        let waiting: Vec<u64> = self.workers[ix].waiting.iter().copied().collect();
        for op in waiting {
            self.look(op);
        }
    }

    pub(crate) fn committed(&mut self, ix: usize, uid: u64, keys: &[KeyIx]) {
        if self.workers[ix].committed_uid == uid {
            self.workers[ix].committed.extend(keys);
            self.look_at_waiting(ix);
        }
    }

    pub(crate) fn committed_all(&mut self, ix: usize, uid: u64) {
        if self.workers[ix].committed_uid == uid {
            self.workers[ix].committed_all = true;
            self.look_at_waiting(ix);
        }
    }

    pub(crate) fn refused(&mut self, ix: usize, keys: Option<&Vec<KeyIx>>) {
        let waiting: Vec<u64> = self.workers[ix].waiting.iter().copied().collect();
        for op in waiting {
            let mut its = Vec::new();
            if let Some(command) = self.ops.get(&op) {
                command.op.keys(&mut its);
            }
            if keys.is_none_or(|keys| its.iter().any(|key| keys.contains(key))) {
                self.workers[ix].waiting.remove(&op);
                self.client_refused(op);
            }
        }
    }

    /// Commands that wait at a node since an earlier epoch are ended there, and looked at again.
    pub(crate) fn unblock_again(&mut self, ix: usize) {
        let worker = &self.workers[ix];
        if matches!(worker.view.stage, Stage::Settled | Stage::Observed) || self.bug(Bug::BlockedNotParked) {
            return;
        }
        let epoch = worker.view.epoch;
        let blocked: Vec<(u64, u32)> =
            worker.flying.iter().filter(|(_, f)| f.epoch < epoch).filter_map(|(op, f)| Some((*op, f.blocking?))).collect();
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

    /// FLUSHALL goes to both nodes.
    pub(crate) fn flush_everywhere(&mut self, op: u64) {
        let Some(command) = self.ops.get(&op) else { return };
        let ix = command.worker;
        let epoch = self.workers[ix].view.epoch;
        self.workers[ix].flying.insert(op, Flying { epoch, parts: 2, blocking: None });
        for node in 0..2 {
            self.transmit_or_queue(ix, op, node);
        }
    }
}
