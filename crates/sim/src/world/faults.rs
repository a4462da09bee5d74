//! Executes scheduled faults: killed nodes and routers, broken connections, and nodes that are silent, unreachable,
//! stopped or out of memory.

use super::{Ev, Fault, Owner, SWEEP_US, World, say};
use switchyard_policy::migration::UserRequest;

use crate::mover::Unnoticed;
use crate::node::Persistence;

impl World {
    pub(super) fn fault(&mut self, fault: Fault) {
        say!(self, "FAULT {fault:?}");
        self.faults_left -= 1;
        match fault {
            Fault::KillNode(ix) => {
                if self.nodes[ix].up {
                    self.kill_node(ix);
                }
            }
            Fault::KillRouter => {
                if self.router_up {
                    self.kill_router();
                    let when = self.random.between(1_000, 20_000);
                    self.after(when, Ev::StartRouter);
                }
            }
            Fault::Stop(ix) => {
                if self.nodes[ix].up {
                    self.nodes[ix].stopped = true;
                    let when = self.random.between(5_000, 90_000);
                    self.after(when, Ev::Continue(ix));
                }
            }
            Fault::Cut => {
                let open: Vec<u32> = (0..self.conns.len())
                    .filter(|conn| self.conns[*conn].owner_alive)
                    .map(|conn| conn as u32)
                    .collect();
                let movers: Vec<u32> = open
                    .iter()
                    .copied()
                    .filter(|conn| matches!(self.conns[*conn as usize].owner, Owner::Mover(_)))
                    .collect();
                let choice = if self.random.chance(500) && !movers.is_empty() { movers } else { open };
                if !choice.is_empty() {
                    let conn = choice[self.random.below(choice.len() as u64) as usize];
                    self.cut(conn);
                }
            }
            Fault::CutAll(ix) => {
                let open =
                    (0..self.conns.len()).filter(|conn| self.conns[*conn].owner_alive && self.conns[*conn].node == ix);
                for conn in open.collect::<Vec<_>>() {
                    self.cut(conn as u32);
                }
            }
            Fault::Mute(ix) => self.outbound_blocked_until[ix] = self.now + self.random.between(5_000, 60_000),
            Fault::Deaf(ix) => {
                let until = self.now + self.random.between(5_000, 60_000);
                self.inbound_blocked_until[ix] = until;
                for conn in 0..self.conns.len() {
                    let c = &mut self.conns[conn];
                    if c.node == ix && c.node_alive {
                        c.held_until_us = c.held_until_us.max(until);
                    }
                }
                self.at(until, Ev::InboundRestored(ix));
            }
            Fault::Full(ix) => {
                self.nodes[ix].full = true;
                let long = self.random.chance(300);
                let when = self.random.between(5_000, if long { 3_000_000 } else { 60_000 });
                self.after(when, Ev::MemoryFreed(ix));
            }
            Fault::RollBack => {
                let lane = self.draw_lane();
                self.steer(lane, UserRequest::Abort);
            }
            Fault::FullDisk | Fault::BrokenDisk => {
                *(if fault == Fault::FullDisk {
                    &mut self.fleet.disk_is_full
                } else {
                    &mut self.fleet.disk_is_broken
                }) = true;
                let long = self.random.chance(300);
                let when = self.random.between(5_000, if long { 1_000_000 } else { 60_000 });
                self.after(when, Ev::DiskRepaired);
            }
            Fault::Panic => {
                let worker = self.random.below(self.workers.len() as u64) as usize;
                self.panic(worker);
            }
            Fault::GiveUp => match self.removal_under_way() {
                Some((lane, conn)) => {
                    self.cut(conn);
                    self.steer(lane, UserRequest::Abort);
                }
                None if self.mover_is_done() => {}
                None => {
                    self.faults_left += 1;
                    self.after(100, Ev::Fault(fault));
                }
            },
            Fault::Lose(ix) => {
                if !self.give_up(ix) && !self.mover_is_done() {
                    // Too early: retry.
                    self.faults_left += 1;
                    self.after(300, Ev::Fault(fault));
                }
            }
            Fault::Snapshot(ix) => {
                if self.nodes[ix].up {
                    let now = self.clock(ix);
                    self.nodes[ix].expire(now);
                    self.nodes[ix].disk = self.nodes[ix].keys.clone();
                }
            }
        }
    }

    fn draw_lane(&mut self) -> usize {
        if self.movers.len() > 1 { self.random.below(self.movers.len() as u64) as usize } else { 0 }
    }

    fn kill_node(&mut self, ix: usize) {
        let before = std::mem::take(&mut self.nodes[ix].keys);
        self.nodes[ix].keys = before.clone();
        self.nodes[ix].kill();
        self.note_reverted(ix, &before);
        self.note_keys_that_may_move_again(ix);
        for conn in 0..self.conns.len() {
            let c = &mut self.conns[conn];
            if c.node == ix && c.node_alive && c.accepted.is_some() {
                c.node_alive = false;
                c.inbox.clear();
                if c.owner_alive && self.random.chance(800) {
                    let delay = self.random.delay_us();
                    self.after(delay, Ev::Broke { conn: conn as u32 });
                }
            }
        }
        // Sometimes longer than a leg waits for its target.
        let long = self.scenario.away > 0 && self.random.chance(self.scenario.away);
        let when = if long { self.random.between(2_000_000, 5_000_000) } else { self.random.between(1_000, 40_000) };
        if long && self.scenario.lose > 0 && self.random.chance(self.scenario.lose) {
            let early = if self.random.chance(500) { 100_000 } else { 4_000_000 };
            let given_up = self.random.between(1_000, early);
            self.faults_left += 1;
            self.after(given_up, Ev::Fault(Fault::Lose(ix)));
        }
        self.after(when, Ev::StartNode(ix));
    }

    /// Records for the checker that a node lost data and returned to the state on its disk.
    fn note_reverted(&mut self, ix: usize, before: &crate::node::Keys) {
        if self.nodes[ix].persistence == Persistence::Always {
            return;
        }
        for key in 0..self.keys.len() {
            let disk = self.nodes[ix].disk.get(&key).cloned();
            if disk.as_ref() == before.get(&key) && !self.history.may_change(key) {
                continue;
            }
            let place = self.place_of(key, ix, before.contains_key(&key));
            // Copies of the dead process may serve reads until the router meets its successor.
            let is_unmet = self.hot.is_on && place == crate::history::Place::Here;
            let until = if is_unmet { crate::history::Place::Doubtful } else { place };
            let mark = self.history.reverts(key, disk.map(|entry| self.in_time(ix, entry)), self.now, until);
            if let Some(mark) = mark.filter(|_| is_unmet) {
                let unmet = &mut self.hot.unmet[ix];
                let past: Vec<_> = unmet.extract_if(.., |before| before.0 == key).collect();
                unmet.push(mark);
                self.history.forget(&past);
            }
            if place == crate::history::Place::UntilNoticed {
                let lane = self.lane_of(key);
                let watched = &mut self.movers[lane].watched;
                let is_late = watched.confirmed == Some(self.nodes[ix].process);
                watched.unnoticed.extend(mark.map(|mark| Unnoticed { node: ix, mark, is_late }));
            }
        }
    }

    fn kill_router(&mut self) {
        say!(self, "the router is killed");
        self.router_up = false;
        for conn in 0..self.conns.len() {
            if self.conns[conn].owner_alive {
                self.conns[conn].pending.clear();
                self.conns[conn].owner_alive = false;
                if self.random.chance(300) {
                    let until = self.now + self.random.below(60_000);
                    let c = &mut self.conns[conn];
                    c.held_until_us = c.held_until_us.max(until);
                }
            }
        }
        self.mover_killed();
        self.clients_cut_off();
        self.incarnation += 1;
    }

    pub(super) fn start_router(&mut self) {
        say!(self, "the router starts");
        self.router_up = true;
        self.recover();
        for client in 0..self.clients.len() {
            let when = self.random.below(2_000);
            self.after(when, Ev::Client { client });
        }
        self.after(SWEEP_US, Ev::Sweep);
    }
}
