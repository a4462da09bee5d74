//! FLUSHALL and FLUSHDB while data moves: what a mover has read of a node before and stores at another after would bring keys back. So the
//! movers are quiet while the nodes are flushed.

use std::collections::BTreeMap;
use std::sync::Arc;

use switchyard_policy::topology::{MoveId, NodeId};
use switchyard_resp::reply;

use super::dispatch::Flow;
use super::rounds::{Ask, Next, Procedure};
use super::upstream::Lane;
use super::{Stall, Worker};
use crate::mover::{Moves, SharedMove, Told};
use crate::slab::Handle;

/// A command that waits until movers are quiet.
#[derive(Debug)]
pub(super) struct Quieting {
    since_us: u64,
    guard: Quieted,
}

/// Movers that have been asked to be quiet. They go on when this is dropped.
#[derive(Debug)]
struct Quieted {
    ticket: u64,
    /// Each with whether it is quiet.
    movers: BTreeMap<MoveId, (Arc<SharedMove>, bool)>,
}

impl Quieted {
    /// Asks those movers that have not been asked.
    fn ask(&mut self, moves: &Moves, worker: usize) {
        for (id, mover) in &moves.by_id {
            if !self.movers.contains_key(id) {
                mover.tell(Told::Quiesce { from: worker, ticket: self.ticket });
                self.movers.insert(*id, (mover.clone(), false));
            }
        }
    }
}

impl Drop for Quieted {
    fn drop(&mut self) {
        for (mover, _) in self.movers.values() {
            mover.tell(Told::Unquiesce { ticket: self.ticket });
        }
    }
}

/// FLUSHALL at every node, with the movers quiet until all have answered.
#[derive(Debug)]
struct Flush {
    _guard: Quieted,
}

impl Procedure for Flush {
    fn next(&mut self, _: &mut Worker, _: bool, parts: Vec<Vec<u8>>) -> Next {
        let failed = parts.iter().position(|p| reply::is_error(p)).unwrap_or(0);
        Next::Done(parts.into_iter().nth(failed).unwrap_or_default())
    }
}

impl Worker {
    /// FLUSHALL or FLUSHDB while there are moves.
    #[cold]
    pub(super) fn flush_quietly(&mut self, handle: Handle, lane: Lane, raw: &[u8], class: u8) -> Flow {
        let now_us = self.now_us;
        let plan = self.plan.clone();
        let Some(client) = self.clients.get_mut(handle) else { return Flow::Close };
        if client.in_flight() > 0 {
            return Flow::Stall(Stall::Barrier);
        }
        let Some(quieting) = &mut client.quieting else {
            self.next_ticket += 1;
            // Unlike every other worker's.
            let ticket = self.next_ticket << 8 | (self.index as u64 & 0xff);
            let mut guard = Quieted { ticket, movers: BTreeMap::new() };
            guard.ask(&plan.moves, self.index);
            client.quieting = Some(Box::new(Quieting { since_us: now_us, guard }));
            self.quieting_clients.push(handle);
            return Flow::Stall(Stall::Moving);
        };
        // A move may have begun since.
        quieting.guard.ask(&plan.moves, self.index);
        let quiet = quieting.guard.movers.iter().all(|(id, (_, quiet))| *quiet || !plan.moves.by_id.contains_key(id));
        if !quiet && now_us.saturating_sub(quieting.since_us) <= plan.live.command_timeout.as_micros() as u64 {
            return Flow::Stall(Stall::Moving);
        }
        let Some(quieting) = self.clients.get_mut(handle).and_then(|c| c.quieting.take()) else { return Flow::Close };
        if !quiet {
            let text = format!(
                "TRYAGAIN data is being moved, and a move did not come to rest within {:?}; nothing was flushed",
                plan.live.command_timeout
            );
            return self.refuse(handle, class, &text);
        }
        let nodes: Vec<NodeId> = plan.topology.nodes().map(|n| n.id).collect();
        if let Some(client) = self.clients.get_mut(handle) {
            nodes.iter().for_each(|n| client.note_write(*n));
        }
        let asks = nodes.into_iter().map(|node| Ask { node, lane, requests: vec![raw.to_vec()] }).collect();
        self.begin_alone(handle, class, Box::new(Flush { _guard: quieting.guard }), asks)
    }

    /// A mover is quiet.
    pub(super) fn on_quiet(&mut self, move_id: MoveId, ticket: u64) {
        for handle in self.quieting_clients.clone() {
            let Some(quieting) = self.clients.get_mut(handle).and_then(|c| c.quieting.as_mut()) else { continue };
            if quieting.guard.ticket == ticket
                && let Some((_, quiet)) = quieting.guard.movers.get_mut(&move_id)
            {
                *quiet = true;
                if quieting.guard.movers.values().all(|(_, quiet)| *quiet) {
                    self.unstall(handle);
                }
            }
        }
    }

    /// Moves have ended, or time has passed: those who wait for quiet look again.
    pub(super) fn tick_quieting(&mut self) {
        let clients = &self.clients;
        self.quieting_clients.retain(|h| clients.get(*h).is_some_and(|c| c.quieting.is_some()));
        for handle in self.quieting_clients.clone() {
            if self.clients.get(handle).is_some_and(|c| c.stall == Stall::Moving) {
                self.unstall(handle);
            }
        }
    }
}
