//! Legs without a side that is lost for good, after the operator abandons it: the commands in flight there, and the
//! lost keys for the checker.

use std::collections::BTreeSet;

use switchyard_policy::migration::record::Record;
use switchyard_policy::migration::{Fingerprint, Side, UserRequest};

use super::{Lane, Stage, ix};
use crate::node::{KeyIx, Op};
use crate::world::{World, say};

/// An abandoned side.
#[derive(Clone, Debug)]
pub(super) struct Lost {
    /// Time of the operator's request.
    since_us: u64,
    /// Keys that are lost if the other side does not have them, once the machine has ended the leg.
    doubtful: BTreeSet<KeyIx>,
}

impl World {
    /// Abandons a node, if a current leg has lost it.
    pub(crate) fn give_up(&mut self, node: usize) -> bool {
        (0..self.movers.len()).filter(|lane| self.gives_up(*lane, node)).count() > 0
    }

    fn gives_up(&mut self, lane: Lane, node: usize) -> bool {
        let Some(side) = (0..2).find(|side| self.movers[lane].node_of(*side) == node) else { return false };
        if self.movers[lane].driver.is_none()
            || self.movers[lane].stage != Stage::Running
            || self.movers[lane].links[side].ready
        {
            return false;
        }
        say!(self, "the operator abandons node {node}");
        let now = self.now;
        self.movers[lane].lost.get_or_insert_with(|| Lost { since_us: now, doubtful: BTreeSet::new() });
        self.steer(lane, UserRequest::GiveUp(if side == 0 { Side::Source } else { Side::Target }));
        true
    }

    /// Returns the side that the current leg has abandoned.
    pub(super) fn given_up(&self, lane: Lane) -> Option<Side> {
        self.movers[lane].driver.as_ref().and_then(|driver| driver.progress().given_up)
    }

    /// Fails the commands that wait for a connection to an abandoned node, like the router does if a node is down.
    pub(crate) fn fail_commands_for_lost_node(&mut self, lane: Lane) {
        let Some(side) = self.given_up(lane) else { return };
        let node = self.movers[lane].node_of(ix(side));
        for worker in 0..self.workers.len() {
            for op in self.workers[worker].take_waiting_for(node) {
                let Some(command) = self.ops.get(&op) else { continue };
                if command.op == Op::Flush {
                    self.workers[worker].wait_for(node, op);
                } else if command.sent {
                    self.on_disconnect(op);
                    self.on_landed(worker, op);
                } else {
                    self.client_refused(op);
                    self.on_landed(worker, op);
                }
            }
        }
    }

    /// Records the keys in doubt when the machine ends a leg without a side.
    pub(super) fn is_lost(&mut self, lane: Lane) {
        let Some(side) = self.given_up(lane) else { return };
        let away: BTreeSet<Fingerprint> = {
            let leg = self.open_leg(lane);
            let mut away: BTreeSet<Fingerprint> = leg.into_iter().flat_map(|leg| leg.away.keys().copied()).collect();
            for record in self.fleet.pending() {
                match record {
                    Record::Moved { keys, .. } | Record::Committed { keys, .. } => away.extend(keys.iter().copied()),
                    Record::Returned { keys, .. } => away.retain(|key| !keys.contains(key)),
                    _ => {}
                }
            }
            away
        };
        let is_gone =
            |key: &KeyIx| away.contains(&self.fleet.fingerprints.of(&self.keys[*key])) == (side == Side::Target);
        let doubtful = (0..self.keys.len()).filter(|key| self.is_own(lane, *key)).filter(is_gone).collect();
        let m = &mut self.movers[lane];
        m.life.iter_mut().for_each(|life| life.record_loss(side, away.len() as u64));
        if let Some(lost) = &mut m.lost {
            lost.doubtful = doubtful;
        }
    }

    /// Handles the recorded end of a leg. Keys that the lost side may have had are lost, unless the owner has them.
    pub(super) fn note_lost(&mut self, lane: Lane, owner: Side) {
        let (node, now) = (self.movers[lane].node_of(ix(owner)), self.now);
        let own: BTreeSet<KeyIx> = (0..self.keys.len()).filter(|key| self.is_own(lane, *key)).collect();
        // The node was purged when the leg began.
        self.fleet.left_at[node].retain(|key| !own.contains(key));
        let Some(lost) = self.movers[lane].lost.take() else { return };
        if self.given_up(lane).is_none() && self.movers[lane].driver.is_some() {
            return;
        }
        self.fleet.left_at[1 - node].extend(own);
        for key in lost.doubtful {
            let at = &self.nodes[node];
            let there = if at.up { &at.keys } else { &at.disk };
            let there = there.get(&key).filter(|entry| entry.expires_us.is_none_or(|end| end > self.clock(node)));
            // A node that restarted from an older snapshot counts with that state.
            let shown = there.map(|entry| self.in_time(node, entry.clone()));
            say!(self, "key {key} is lost, except {shown:?}");
            self.history.reverts_between(key, shown, lost.since_us, now);
        }
    }
}
