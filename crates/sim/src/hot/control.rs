//! Publishes the cacheable keys to the workers, changes them from time to time, and publishes the workers' progress.

use std::rc::Rc;
use std::sync::Arc;

use switchyard_policy::hot_copies::{CacheableSet, Discarded, GateId, Gates, WriteHolds};
use switchyard_policy::topology::{NodeId, crc16_slot};

use super::{LIMITS, Leaving, Published, Table, WorkerGates};
use crate::injected::{Bug, is_injected};
use crate::world::{Ev, Owner, World, say};

/// Timeout of a fill.
const LATE_US: u64 = 20_000;

impl World {
    /// Draws whether a run has hot copies, and their options.
    pub(crate) fn draw_hot(&mut self) {
        let chance = self.scenario.hot;
        if chance > 0 && self.random.chance(chance) {
            self.hot.is_on = true;
            self.hot.serves_observed = self.random.chance(500);
            self.hot.one_gate = self.random.chance(150);
        }
    }

    fn new_table(&mut self) -> Rc<Table> {
        let one_counter = self.bug(Bug::OneCounter);
        Table::new(self.random.number(), one_counter)
    }

    /// Starts without cacheable keys in a new router process.
    pub(crate) fn hot_begins(&mut self) {
        if !self.hot.is_on {
            return;
        }
        let gates = self.new_table();
        self.hot.set = Arc::default();
        self.hot.met = [None; 2];
        self.hot.leaving.clear();
        self.hot.published = vec![Published { adopted: 0, oldest: [0; 2] }; self.workers.len()];
        for worker in 0..self.workers.len() {
            let of = &mut self.workers[worker].hot;
            of.gates = gates.clone();
            of.copies.limit(LIMITS.0, LIMITS.1);
            self.after(100, Ev::HotTurn { worker });
        }
        self.hot.gates = gates;
        let when = self.random.below(1_000);
        self.after(when, Ev::Arm);
    }

    /// Makes some keys cacheable and others no longer.
    pub(crate) fn arm(&mut self) {
        let mut more = Vec::new();
        let mut less = Vec::new();
        for key in 0..self.names() {
            let hash = self.hot.hash(&self.keys[key]);
            let is_armed = self.hot.set.get(hash).is_some();
            if !is_armed && self.random.chance(700) {
                more.push((hash, crc16_slot(&self.keys[key])));
            } else if is_armed && self.random.chance(250) {
                less.push(hash);
            }
        }
        let set = Arc::new(self.hot.set.next(more, less.iter().copied()));
        // Workers with the new set no longer raise these gates, while others still have copies: shut until all have the
        // set.
        if !self.bug(Bug::UncacheableAtOnce) {
            let held: Vec<GateId> = less.into_iter().map(GateId::of_key).collect();
            let gates = self.hot.gates.clone();
            held.iter().for_each(|gate| gates.raise(*gate));
            self.hot.leaving.push(Leaving { since: set.generation(), held, gates });
        }
        self.publish_cacheable(set);
        let when = self.random.between(500, 8_000);
        self.after(when, Ev::Arm);
    }

    fn publish_cacheable(&mut self, set: Arc<CacheableSet>) {
        say!(self, "armed: {set:?}");
        self.hot.set = set.clone();
        for worker in 0..self.workers.len() {
            let (delay, set, gates) = (self.random.delay_us(), set.clone(), self.hot.gates.clone());
            self.after(delay, Ev::AdoptArmed { worker, set, gates });
        }
    }

    /// Switches a worker to another set.
    pub(crate) fn adopt_cacheable(&mut self, ix: usize, set: &Arc<CacheableSet>, gates: Rc<Table>) {
        let of = &mut self.workers[ix].hot;
        if set.generation() <= of.copies.set().generation() {
            return;
        }
        if !Rc::ptr_eq(&of.gates, &gates) {
            // Gates of the old table stay raised, because they are no longer used.
            of.holds = WriteHolds::default();
            of.gates = gates;
        }
        of.copies.adopt(set);
        say!(self, "worker {ix} uses generation {}", set.generation());
        // A command blocked at a node may write at any time: raise its gates under the new set.
        let waiting: Vec<(u64, usize)> =
            self.workers[ix].waiting_at_nodes().map(|(op, conn)| (op, self.conns[conn as usize].node)).collect();
        for (op, node) in waiting {
            let Some(command) = self.ops.get(&op) else { continue };
            if self.workers[ix].hot.sent.contains_key(&(op, node)) {
                let raised = self.raised(ix, &command.op, node);
                if !self.bug(Bug::BlockedRaisesOnce) {
                    self.raise(ix, op, node, raised);
                }
                self.workers[ix].hot.sent.insert((op, node), set.generation());
            }
        }
        self.hot.published[ix].adopted = set.generation();
    }

    fn publish_worker(&mut self, ix: usize) {
        let of = &self.workers[ix].hot;
        self.hot.published[ix].oldest = [of.oldest(0), of.oldest(1)];
        let all = self.hot.published.iter().map(|of| of.adopted).min().unwrap_or_default();
        for leaving in self.hot.leaving.extract_if(.., |leaving| leaving.since <= all) {
            leaving.held.iter().for_each(|gate| leaving.gates.lower(*gate));
        }
    }

    /// Runs the part of a worker's turn that does not concern commands.
    pub(crate) fn hot_turn(&mut self, ix: usize) {
        self.publish_worker(ix);
        self.workers[ix].hot.gates.lower_all();
        let now = self.now;
        let of = &mut self.workers[ix].hot;
        let late: Vec<u32> = of.copies.fills_before(now.saturating_sub(LATE_US)).map(|(number, _)| number).collect();
        for number in late {
            self.workers[ix].hot.copies.discard_fill(number, Discarded::Lost);
            self.dispatch_fill_waiters(ix, number);
        }
        match self.random.below(100) {
            0 => self.workers[ix].hot.copies.clear(),
            1 => drop(self.workers[ix].hot.copies.sweep(1)),
            _ => {}
        }
        let when = self.random.between(50, 1_000);
        self.after(when, Ev::HotTurn { worker: ix });
    }

    /// Drops copies of keys that moved or are moving.
    pub(crate) fn hot_drop_moved(&mut self, ix: usize) {
        if !self.hot.is_on || self.bug(Bug::ServedOnItsWay) || self.bug(Bug::NotPlacedAnew) {
            return;
        }
        let serves_observed = self.hot.serves_observed;
        let worker = &mut self.workers[ix];
        let mut copies = std::mem::take(&mut worker.hot.copies);
        copies.update_placement(|key, _| worker.place_of_copies(key, serves_observed));
        worker.hot.copies = copies;
    }

    /// Panics a worker: its holds, copies and connections are lost.
    pub(crate) fn panic(&mut self, ix: usize) {
        if !self.hot.is_on || !self.router_up {
            return;
        }
        let WorkerGates { fills, .. } = &mut self.workers[ix].hot;
        let waiting: Vec<u32> = fills.keys().copied().collect();
        let of = &mut self.workers[ix].hot;
        (of.holds, of.copies) = Default::default();
        if is_injected(self.planted, Bug::PanicForgetsWhatWasSent) {
            of.sent.clear();
        }
        of.copies.limit(LIMITS.0, LIMITS.1);
        waiting.into_iter().for_each(|number| self.dispatch_fill_waiters(ix, number));
        let is_its = |owner| match owner {
            Owner::Worker(worker)
            | Owner::Blocking(worker, _)
            | Owner::Watching(worker, _)
            | Owner::Filling(worker) => worker == ix,
            Owner::Mover(_) => false,
        };
        for conn in 0..self.conns.len() {
            if self.conns[conn].owner_alive && is_its(self.conns[conn].owner) {
                self.after(0, Ev::Broke { conn: conn as u32 });
            }
        }
        self.hot.published[ix] = Published { adopted: 0, oldest: [0; 2] };
        // Workers with the old gates do not see the writes of workers with the new gates.
        if !self.bug(Bug::GatesBeforeStayOpen) {
            (0..2).for_each(|node| self.hot.gates.raise(GateId::of_node(NodeId(node))));
        }
        self.hot.gates = self.new_table();
        let set = Arc::new(self.hot.set.renewed());
        self.publish_cacheable(set);
    }
}
