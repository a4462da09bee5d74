//! The network between processes: connections, messages in flight and delays. Messages of a connection stay in order,
//! and a sent message may arrive after the loss of its connection.

use std::collections::VecDeque;

use super::{Conn, Ev, Owner, Pending, What, World, say};
use crate::node::{Cmd, Reply};

impl World {
    pub(crate) fn connect(&mut self, node: usize, owner: Owner) -> u32 {
        let conn = self.conns.len() as u32;
        self.conns.push(Conn {
            node,
            owner,
            incarnation: self.incarnation,
            accepted: None,
            node_alive: true,
            owner_alive: true,
            pending: VecDeque::new(),
            sent: 0,
            arrived: 0,
            cut_after: u64::MAX,
            held_until_us: self.inbound_blocked_until[node],
            inbox: VecDeque::new(),
            last_to_node_us: 0,
            last_to_owner_us: 0,
            drops_outbound: false,
        });
        self.send(conn, Cmd::Hello, What::Hello);
        conn
    }

    pub(crate) fn send(&mut self, conn: u32, cmd: Cmd, what: What) {
        self.requests += 1;
        let request = self.requests;
        let (now, delay) = (self.now, self.delay_on(conn));
        let c = &mut self.conns[conn as usize];
        c.pending.push_back(Pending { request, what, sent_us: now });
        c.sent += 1;
        let time = (now + delay).max(c.last_to_node_us);
        c.last_to_node_us = time;
        let number = c.sent;
        self.at(time, Ev::ToNode { conn, number, request, cmd });
    }

    /// Delay of a message on a connection. Some fills are slow, so that moves begin and end during them.
    pub(super) fn delay_on(&mut self, conn: u32) -> u64 {
        let delay = self.random.delay_us();
        let is_slow = matches!(self.conns[conn as usize].owner, Owner::Filling(_))
            && self.random.chance(self.scenario.slow_fills);
        if is_slow { delay + self.random.between(500, 12_000) } else { delay }
    }

    pub(super) fn reply(&mut self, conn: u32, request: u64, reply: Reply) {
        let delay = self.delay_on(conn);
        let c = &mut self.conns[conn as usize];
        let time = (self.now + delay).max(c.last_to_owner_us);
        c.last_to_owner_us = time;
        let until = self.outbound_blocked_until[c.node];
        if !c.drops_outbound && self.now < until {
            c.drops_outbound = true;
            // Retransmission failed.
            self.at(until + delay, Ev::Broke { conn });
        }
        if self.conns[conn as usize].drops_outbound {
            return;
        }
        self.at(time, Ev::ToOwner { conn, request, reply });
    }

    /// Marks a connection as closed by its owner, and returns its pending requests. Sent messages may still arrive.
    pub(crate) fn close(&mut self, conn: u32) -> Vec<Pending> {
        let c = &mut self.conns[conn as usize];
        c.owner_alive = false;
        c.pending.drain(..).collect()
    }

    /// Breaks a connection at an arbitrary message.
    pub(super) fn cut(&mut self, conn: u32) {
        let (now, lost, late) = (self.now, self.random.chance(500), self.random.chance(500));
        let hold = self.random.below(60_000);
        let c = &mut self.conns[conn as usize];
        if !c.owner_alive {
            return;
        }
        if lost && c.sent > c.arrived {
            c.cut_after = c.arrived + self.random.below(c.sent - c.arrived);
        }
        if late {
            c.held_until_us = c.held_until_us.max(now + hold);
        }
        say!(self, "connection {conn} breaks");
        self.on_break(conn);
    }

    pub(super) fn arrive(&mut self, conn: u32, number: u64, request: u64, cmd: Cmd) {
        let node = self.conns[conn as usize].node;
        let c = &mut self.conns[conn as usize];
        if !c.node_alive || number > c.cut_after {
            return;
        }
        c.arrived = number;
        let process = self.nodes[node].process;
        match c.accepted {
            None if !self.nodes[node].up => {
                c.node_alive = false;
                let delay = self.random.delay_us();
                self.after(delay, Ev::Broke { conn });
                return;
            }
            Some((accepted, _)) if !self.nodes[node].up || accepted != process => {
                c.node_alive = false;
                return;
            }
            _ => {}
        }
        let c = &mut self.conns[conn as usize];
        if self.nodes[node].stopped || self.now < c.held_until_us || !c.inbox.is_empty() {
            c.inbox.push_back((request, cmd));
            if self.now < c.held_until_us && c.inbox.len() == 1 {
                let until = c.held_until_us;
                self.at(until, Ev::Release { conn });
            }
            return;
        }
        self.execute(conn, request, cmd);
    }

    pub(super) fn release(&mut self, conn: u32) {
        let c = &self.conns[conn as usize];
        if self.nodes[c.node].stopped || self.now < c.held_until_us {
            if self.now < c.held_until_us {
                let until = c.held_until_us;
                self.at(until, Ev::Release { conn });
            }
            return;
        }
        while let Some((request, cmd)) = self.conns[conn as usize].inbox.pop_front() {
            if !self.conns[conn as usize].node_alive {
                break;
            }
            self.execute(conn, request, cmd);
        }
    }
}
