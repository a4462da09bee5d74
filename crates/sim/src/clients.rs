//! Clients: each sends one command at a time and records the reply.

use crate::history::Marks;
use crate::injected::Bug;
use crate::node::{KeyIx, Op, Reply, Watched};
use crate::world::{Ev, World, say};

/// Number of possible fields of a hash.
pub(crate) const FIELDS: u64 = 6;

#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) number: usize,
    left: u64,
    pub(crate) current: Option<u64>,
    /// Watched key between WATCH and EXEC.
    pub(crate) watch: Option<Watch>,
}

/// A key that a client watches.
#[derive(Debug)]
pub(crate) struct Watch {
    pub(crate) key: KeyIx,
    /// Connection with the WATCH.
    pub(crate) conn: u32,
    pub(crate) node: usize,
    since_us: u64,
    /// Value read since WATCH.
    seen: Option<Option<Vec<u32>>>,
    /// The key has been used at another node since.
    pub(crate) failed: bool,
}

impl Client {
    pub(crate) const fn new(number: usize, commands: u64) -> Self {
        Self { number, left: commands, current: None, watch: None }
    }
}

/// A command without a reply.
#[derive(Debug)]
pub(crate) struct Command {
    pub(crate) client: usize,
    pub(crate) worker: usize,
    pub(crate) op: Op,
    /// Bytes may have left the router.
    pub(crate) sent: bool,
    /// SCRIPT LOAD precedes the command.
    pub(crate) load: bool,
    /// Node for the repeated command.
    pub(crate) node: usize,
    /// Both nodes were read, and neither had the key.
    pub(crate) missed: bool,
    /// The fill that it waited for failed.
    pub(crate) fill_failed: bool,
    marks: Marks,
    /// The client received an error: unknown outcome.
    is_unknown: bool,
}

impl World {
    pub(crate) fn client_continues(&mut self, ix: usize) {
        let client = &self.clients[ix];
        if client.current.is_some() || !self.router_up {
            return;
        }
        if let Some(watch) = &client.watch {
            let op = match &watch.seen {
                None => Op::Get(watch.key),
                Some(seen) => {
                    let value = self.next_op as u32 * 10 + 1;
                    Op::Exec(watch.key, Watched { since_us: watch.since_us, seen: seen.clone(), value })
                }
            };
            self.send_op(ix, op);
        } else if client.left > 0 {
            self.clients[ix].left -= 1;
            let op = self.draw(ix);
            self.send_op(ix, op);
        }
    }

    fn send_op(&mut self, ix: usize, op: Op) {
        self.next_op += 1;
        let number = self.next_op;
        let mut marks = Marks::new();
        let by = format!("client {ix}");
        self.history.on_request(&op, self.now, &by, &mut marks);
        say!(self, "client {ix}: {op:?} is command {number}");
        let worker = self.clients[ix].number % self.workers.len();
        self.clients[ix].current = Some(number);
        self.ops.insert(
            number,
            Command {
                client: ix,
                worker,
                op,
                sent: false,
                load: false,
                node: 0,
                missed: false,
                fill_failed: false,
                marks,
                is_unknown: false,
            },
        );
        if self.scenario.impatient > 0 && self.random.chance(self.scenario.impatient) {
            let when = self.random.between(100, 4_000);
            self.after(when, Ev::Impatient { op: number });
        }
        self.look(number);
    }

    fn draw(&mut self, ix: usize) -> Op {
        let keys = self.keys.len() as u64;
        let mut unique = self.next_op as u32 * 10;
        let scenario = self.scenario.clone();
        let random = &mut self.random;
        let key = random.below(keys) as KeyIx;
        // Another key of its slot.
        let beside = |random: &mut crate::random::Random, key: KeyIx| {
            let (name, first) = (key as u64 % scenario.keys, key as u64 / scenario.keys * scenario.keys);
            let (slot, slots) = (name % scenario.slots, scenario.slots);
            (first + slot + slots * random.below((scenario.keys - slot).div_ceil(slots))) as KeyIx
        };
        if random.chance(scenario.flush / 10) {
            return Op::Flush;
        }
        if scenario.watch > 0 && random.chance(scenario.watch) {
            return Op::Watch(key);
        }
        if scenario.renames > 0 && random.chance(scenario.renames) {
            let to = beside(random, key);
            return if to == key { Op::Get(key) } else { Op::Rename(key, to, unique) };
        }
        if scenario.hot > 0 && random.chance(scenario.ttl / 20) {
            return Op::Expire(key, random.between(1_000, 20_000));
        }
        if scenario.hot > 0 && random.chance(450) {
            return Op::Get(key);
        }
        // Only one client blocks, so that others remain to add elements.
        if ix == 0 && random.chance(scenario.blocking / 3) {
            return Op::Pop(key);
        }
        // Commands on keys copied in pieces declare their keys.
        let undeclared = scenario.parts == 0 && scenario.undeclared > 0 && random.chance(scenario.undeclared);
        let mut one = |random: &mut crate::random::Random, key: KeyIx| {
            unique += 1;
            if scenario.parts > 0 && random.chance(scenario.parts) {
                let field = random.below(FIELDS) as u32;
                return match random.below(100) {
                    0..=24 => Op::Get(key),
                    25..=69 => Op::Put(key, field, unique),
                    70..=87 => Op::Cut(key, field),
                    88..=93 => Op::Del(key),
                    _ => Op::Expire(key, random.between(1_000, 30_000)),
                };
            }
            let kind = random.below(100);
            if scenario.only > 0 && kind >= 50 {
                return match scenario.only {
                    1 => Op::Get(key),
                    2 => Op::Set(key, unique, None),
                    3 => Op::Del(key),
                    _ => Op::Incr(key),
                };
            }
            match kind {
                _ if scenario.only > 0 => Op::Get(key),
                0..=34 => Op::Get(key),
                35..=54 => {
                    let ttl = random.chance(scenario.ttl).then(|| random.between(1_000, 30_000));
                    Op::Set(key, unique, ttl)
                }
                55..=69 => Op::Incr(key),
                70..=84 => Op::Del(key),
                _ => Op::Push(key, unique),
            }
        };
        match random.below(100) {
            _ if undeclared => {
                let named = beside(random, key);
                Op::Function(named, Box::new(one(random, key)))
            }
            0..=74 => one(random, key),
            _ if scenario.only > 0 => one(random, key),
            75..=89 => {
                let count = random.between(2, 3.min(keys.max(2)));
                let mut all: Vec<KeyIx> = (0..count).map(|_| beside(random, key)).collect();
                all.sort_unstable();
                all.dedup();
                let reads = random.chance(500);
                Op::Several(all.into_iter().map(|key| if reads { Op::Get(key) } else { one(random, key) }).collect())
            }
            _ => Op::Script(Box::new(one(random, key))),
        }
    }

    fn finish_command(&mut self, ix: usize, op: u64) {
        if self.clients[ix].current == Some(op) {
            self.clients[ix].current = None;
            // Watching clients sometimes pause, so that keys move in the meantime.
            let long = self.clients[ix].watch.is_some() && self.random.chance(300);
            let when =
                if long { self.random.between(2_500, 60_000) } else { self.random.between(10, self.scenario.think) };
            self.after(when, Ev::Client { client: ix });
        }
    }

    /// Records a node's confirmation of WATCH.
    pub(crate) fn client_watches(&mut self, op: u64, conn: u32) {
        let Some(Command { client, worker, op: Op::Watch(key), .. }) = self.ops.get(&op) else { return };
        let (client, key, node) = (*client, *key, self.conns[conn as usize].node);
        let moved = self.workers[*worker].uses_at(&self.keys[key]) != node;
        let failed = moved && !self.bug(Bug::WatchReturns);
        self.clients[client].watch = Some(Watch { key, conn, node, since_us: self.now, seen: None, failed });
    }

    /// Ends a client's watch, if there is one.
    fn unwatch(&mut self, ix: usize) {
        if let Some(watch) = self.clients[ix].watch.take()
            && self.conns[watch.conn as usize].owner_alive
        {
            self.close(watch.conn);
        }
    }

    /// Updates a client's watch after a reply: stores the value read, or ends the watch.
    fn update_watch(&mut self, ix: usize, op: &Op, reply: &Reply) {
        match (op, reply) {
            (Op::Watch(_), Reply::Ok) => {}
            (Op::Get(_), Reply::Value(seen)) => {
                if let Some(watch) = &mut self.clients[ix].watch {
                    watch.seen = Some(seen.clone());
                }
            }
            _ => self.unwatch(ix),
        }
        self.executed += u64::from(matches!((op, reply), (Op::Exec(..), Reply::Ok)));
    }

    /// Handles the reply to a command, or to a part of it.
    pub(crate) fn on_reply(&mut self, op: u64, node: usize, reply: Reply) {
        let now = self.now;
        let Some(command) = self.ops.get_mut(&op) else { return };
        if command.op == Op::Flush {
            let _ = node;
            self.on_flush_reply(op);
            return;
        }
        let Some(command) = self.ops.remove(&op) else { return };
        say!(self, "command {op}: {reply:?}");
        let is_refused = reply == Reply::Oom || reply == Reply::Error && !matches!(command.op, Op::Incr(_));
        // EXEC with a nil reply has done nothing.
        if is_refused || matches!((&command.op, &reply), (Op::Exec(..), Reply::Value(None))) {
            self.history.forget(&command.marks);
        } else if !command.is_unknown {
            self.history.on_reply(&command.marks, &reply, now);
        }
        self.update_watch(command.client, &command.op, &reply);
        self.finish_command(command.client, op);
    }

    /// Completes a FLUSHALL after all nodes have replied.
    pub(crate) fn flush_done(&mut self, op: u64) {
        let now = self.now;
        if let Some(command) = self.ops.remove(&op) {
            if !command.is_unknown {
                self.history.on_reply(&command.marks, &Reply::Ok, now);
            }
            self.finish_command(command.client, op);
        }
    }

    /// Fails a command whose connection broke: its outcome is unknown.
    pub(crate) fn on_disconnect(&mut self, op: u64) {
        let faulty = self.faulty;
        let Some(command) = self.ops.get_mut(&op) else { return };
        if !faulty {
            self.violated(format!("command {op} has no reply although nothing is broken"));
            return;
        }
        command.is_unknown = true;
        let (client, flush) = (command.client, command.op == Op::Flush);
        say!(self, "command {op}: unknown outcome");
        self.unwatch(client);
        if !flush {
            self.ops.remove(&op);
        }
        self.finish_command(client, op);
    }

    /// Rejects a command that was not executed.
    pub(crate) fn client_refused(&mut self, op: u64) {
        let Some(command) = self.ops.remove(&op) else { return };
        if !self.faulty {
            self.violated(format!("command {op} is refused although nothing is broken"));
        }
        say!(self, "command {op}: refused");
        self.history.forget(&command.marks);
        self.unwatch(command.client);
        self.finish_command(command.client, op);
    }

    /// Rejects a command whose keys are on different nodes. Nothing was executed.
    pub(crate) fn client_cross_node(&mut self, op: u64) {
        let Some(command) = self.ops.remove(&op) else { return };
        say!(self, "command {op}: its keys are on different nodes");
        self.history.forget(&command.marks);
        self.unwatch(command.client);
        self.finish_command(command.client, op);
    }

    /// Drops all client connections after a crash of the router.
    pub(crate) fn clients_cut_off(&mut self) {
        for (_, command) in std::mem::take(&mut self.ops) {
            if !command.sent {
                self.history.forget(&command.marks);
            }
        }
        for client in &mut self.clients {
            client.current = None;
            client.watch = None;
        }
    }

    /// Whether all clients have finished, except for those blocked on an empty list.
    pub(crate) fn clients_are_done(&self) -> bool {
        self.clients.iter().all(|client| match client.current {
            None => client.left == 0 && client.watch.is_none(),
            Some(op) => self.ops.get(&op).is_some_and(|command| matches!(command.op, Op::Pop(_))) && !self.can_pop(op),
        }) && self.ops.values().all(|command| matches!(command.op, Op::Pop(_)))
    }

    fn can_pop(&self, op: u64) -> bool {
        let Some(Command { op: Op::Pop(key), .. }) = self.ops.get(&op) else { return true };
        let node = self.lives_at(*key);
        self.nodes[node].keys.get(key).is_some_and(|entry| entry.expires_us.is_none_or(|end| end > self.clock(node)))
    }

    /// Reads every key once, at the end.
    pub(crate) fn read_everything(&mut self) {
        for key in 0..self.keys.len() {
            self.clients.push(Client::new(key, 0));
            let client = self.clients.len() - 1;
            self.send_op(client, Op::Get(key));
        }
    }
}
