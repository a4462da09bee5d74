//! Exclusive connections to a node, for one client at a time: acquired late, returned clean, bounded, and closed when
//! idle.
//!
//! Each worker has three pools per node, because each kind of use would starve the others: large values (seconds),
//! WATCH until EXEC (the client's thinking time), and commands that wait at the node (possibly without end). Each has
//! its own bound over all workers ([`crate::exclusive_bounds`]). If the bound is reached and no connection is free, a
//! client waits in line, and gets NODEBUSY after `nodes.command-timeout`.
//!
//! There is no new connection per transaction or blocking command: connecting and the handshake cost more than the
//! command, and a thousand new connections per second would take up a node completely.

use std::collections::VecDeque;

use switchyard_policy::topology::NodeId;
use switchyard_resp::translate::Shape;

use super::dispatch::Flow;
use super::keyed::{Call, CommandSeq, KeyedCommand};
use super::kind::{CheckoutOwner, Task};
use super::links::Links;
use super::upstream::{Again, Body, Lane, Link, Pending, Phase, Purpose};
use super::{Stall, Worker};
use crate::exclusive_bounds::ExclusiveBounds;
use crate::shared::Message;
use crate::slab::Handle;
use crate::worker::translate::shape_of;
use crate::worker::turn::Turn;

/// Maximum number of simultaneous connection attempts of a pool. Thousands of clients may begin to wait at once (after
/// a start of the router or of a node): more attempts than the node's backlog (511) and its single thread can handle
/// would delay each other.
const COMING_MAX: usize = 128;

/// With at most this many free or connecting, connections are made in advance for clients that will need one soon.
const AHEAD_MIN: usize = 32;

/// Pause of connecting in advance after the node has refused such a connection, us.
const AHEAD_REST_US: u64 = 1_000_000;

/// The exclusive connections of one kind to one node.
#[derive(Debug, Default)]
pub(super) struct Pool {
    /// Number of connections in any state.
    open: usize,
    /// Number of them that have never been up: RESP2, RESP3.
    coming: [usize; 2],
    /// Up and unused. The last used one is used next, so that surplus connections become idle.
    free: Vec<Handle>,
    /// Clients in line.
    waiters: VecDeque<Handle>,
    /// One was closed for waiting workers: none is opened before they have had their turn.
    has_yielded: bool,
    /// No connecting in advance before this time, us.
    ahead_rests_until_us: u64,
}

/// Result of a client's request for a connection.
#[derive(Debug)]
pub(super) enum Acquired {
    Link(Handle),
    /// The client waits in line.
    Wait,
    Refused(String),
}

impl Links {
    /// Takes a free connection of this protocol out of the pool.
    fn take_free(&mut self, node: NodeId, lane: Lane, resp3: bool) -> Option<Handle> {
        let is_fit = |link: &Link| link.phase == Phase::Up && link.resp3 == resp3;
        let at = self.pool(node, lane)?.free.iter().rposition(|handle| self.get(*handle).is_some_and(is_fit))?;
        let handle = self.pool_mut(node, lane)?.free.remove(at);
        self.get_mut(handle)?.set_holder(Handle::NONE);
        Some(handle)
    }
}

impl Worker {
    /// Acquires an exclusive connection for a command, or returns the flow of the command without one.
    pub(super) fn take_exclusive(&mut self, handle: Handle, node: NodeId, lane: Lane) -> Result<Acquired, Flow> {
        let Some(client) = self.clients.get_mut(handle) else { return Err(Flow::Close) };
        if !client.may_take(lane) || self.holds_elsewhere(handle, node) {
            return Err(Flow::Stall(Stall::Barrier));
        }
        match self.acquire(handle, node, lane) {
            Acquired::Wait => Err(Flow::Stall(Stall::Exclusive)),
            acquired => Ok(acquired),
        }
    }

    /// Whether commands of the client are in flight on an exclusive connection to another node. A client has at most
    /// one such connection at a time. With two, a reply on one could come too early and pause it, and nothing would
    /// resume it. And a third command to the first node would take a third connection and overtake commands on the
    /// first.
    fn holds_elsewhere(&self, handle: Handle, node: NodeId) -> bool {
        self.clients.get(handle).is_some_and(|client| {
            client.in_flight() > 0
                && client.held.and_then(|held| self.links.get(held)).is_some_and(|link| link.node != node)
        })
    }

    /// Returns the counts of exclusive connections of all workers to the node.
    fn exclusive_bounds(&mut self, node: NodeId) -> Option<&ExclusiveBounds> {
        let shared = &self.turn.shared();
        self.links.exclusive_bounds(node, || shared.exclusive_bounds(node))
    }

    /// Closes an unused connection for other workers that wait.
    pub(super) fn make_room(&mut self, node: NodeId, lane: Lane) {
        // Of this kind first. If the node accepts no more connections at all, another kind makes room as well.
        let is_full = self.exclusive_bounds(node).is_some_and(ExclusiveBounds::is_full);
        for lane in [lane, Lane::Large, Lane::Watch, Lane::Blocking].into_iter().take(if is_full { 4 } else { 1 }) {
            let unused = self
                .links
                .pool_mut(node, lane)
                .filter(|pool| pool.waiters.is_empty())
                .and_then(|pool| pool.free.first().copied());
            if let Some(unused) = unused {
                return self.drop_link(unused);
            }
        }
    }

    /// Handles the message of another worker that a connection to the node was closed.
    pub(super) fn room_was_made(&mut self, node: NodeId) {
        for lane in [Lane::Large, Lane::Watch, Lane::Blocking] {
            if let Some(pool) = self.links.pool_mut(node, lane) {
                pool.has_yielded = false;
            }
            self.wake(node, lane);
        }
    }

    /// Publishes whether clients of this worker wait for room. Returns whether this is a change.
    fn set_waiting_for_room(&mut self, node: NodeId, lane: Lane, waits: bool) -> bool {
        let (worker, place) = (self.turn.index(), lane.pool());
        place.is_some_and(|place| {
            self.exclusive_bounds(node).is_some_and(|bounds| bounds.set_waiting(worker, place, waits))
        })
    }

    /// Returns a free connection, or puts the client in line.
    pub(super) fn acquire(&mut self, handle: Handle, node: NodeId, lane: Lane) -> Acquired {
        let Some(client) = self.clients.get_mut(handle) else { return Acquired::Wait };
        let resp3 = client.resp3;
        if let Some(refusal) = client.refusal.take() {
            return Acquired::Refused(refusal.into());
        }
        if let Some(held) = client.held {
            let fits = |l: &Link| {
                l.node == node && l.lane == lane && l.resp3 == resp3 && l.phase == Phase::Up && l.holder() == handle
            };
            if self.links.get(held).is_some_and(fits) {
                return Acquired::Link(held);
            }
            if client.in_flight() == 0 {
                // Kept for a command that now goes elsewhere.
                client.held = None;
                if self.links.get(held).is_some_and(|l| l.holder() == handle) {
                    self.abandon(held);
                }
            }
        }
        if self.turn.node_fails(node) {
            return Acquired::Refused(self.turn.down_text(node));
        }
        if let Some(link) = self.links.take_free(node, lane, resp3) {
            return Acquired::Link(link);
        }
        if let Some(pool) = self.links.pool_mut(node, lane) {
            pool.waiters.push_back(handle);
        }
        // Before connecting: an attempt that fails at once answers clients in line.
        self.stall(handle, Stall::Exclusive);
        self.grow(node, lane, resp3);
        Acquired::Wait
    }

    /// Opens one more connection, if it is needed and the bound allows it, or if a free one of the other protocol can
    /// be closed for it.
    fn grow(&mut self, node: NodeId, lane: Lane, resp3: bool) {
        let Some(pool) = self.links.pool_mut(node, lane) else { return };
        let [of_resp2, of_resp3] = pool.coming;
        let alike = if resp3 { of_resp3 } else { of_resp2 };
        // Connections that come up trigger the next ones.
        if alike > 0 && (alike >= COMING_MAX || of_resp2 + of_resp3 >= pool.waiters.len()) {
            return;
        }
        let has_yielded = pool.has_yielded;
        if !has_yielded && self.open_exclusive(node, lane, resp3, false) {
            return;
        }
        if let Some(other) = self.links.pool_mut(node, lane).and_then(|pool| pool.free.pop()) {
            self.drop_link(other);
            if self.open_exclusive(node, lane, resp3, false) {
                return;
            }
        }
        if self.set_waiting_for_room(node, lane, true) {
            want_room(&self.turn, node, lane);
        }
    }

    /// Returns false if there is no room for it.
    fn open_exclusive(&mut self, node: NodeId, lane: Lane, resp3: bool, is_ahead: bool) -> bool {
        let (worker, bound) = (self.turn.index(), bound(&self.turn, lane).0);
        let Some(place) = lane.pool() else { return false };
        if !self.exclusive_bounds(node).is_some_and(|bounds| bounds.take(worker, place, bound)) {
            return false;
        }
        // If the next one finds no room, this is a change, and the other workers are notified again.
        self.set_waiting_for_room(node, lane, false);
        let Some(pool) = self.links.pool_mut(node, lane) else { return false };
        pool.open += 1;
        pool.coming[usize::from(resp3)] += 1;
        let mut link = Link::new(
            node,
            lane,
            resp3,
            self.turn.routing().live.database,
            self.turn.counters().node(node),
            self.turn.now_us(),
        );
        link.checkout_mut().into_iter().for_each(|loan| loan.owner = CheckoutOwner::Coming { is_ahead });
        let link = self.links.insert(link);
        self.connect(link);
        true
    }

    /// Opens connections in advance for clients that will need one soon but not at the same time: otherwise each would
    /// wait for its own connection, and with it all clients behind it. They belong to no client: the first in line gets
    /// one regardless of the length of the line. `how_many` returns the demand, up to a maximum.
    pub(super) fn make_ahead(
        &mut self,
        node: NodeId,
        lane: Lane,
        resp3: bool,
        how_many: impl FnOnce(&Self, usize) -> usize,
    ) {
        let (bound, Some(place)) = (bound(&self.turn, lane).0, lane.pool()) else { return };
        let Some(room) = self.exclusive_bounds(node).map(|bounds| bounds.available(place, bound)) else { return };
        let Some(pool) = self.links.pool(node, lane) else { return };
        let free = pool.free.iter().filter(|h| self.links.get(**h).is_some_and(|l| l.resp3 == resp3)).count();
        let (there, coming) = (free + pool.coming[usize::from(resp3)], pool.coming[0] + pool.coming[1]);
        let most = COMING_MAX.saturating_sub(coming.max(there)).min(room);
        let rests = self.turn.now_us() < pool.ahead_rests_until_us;
        if there >= AHEAD_MIN || most == 0 || rests || pool.has_yielded || self.turn.node_fails(node) {
            return;
        }
        for _ in there..how_many(self, there + most).min(there + most) {
            if !self.open_exclusive(node, lane, resp3, true) {
                return;
            }
        }
    }

    /// Puts a request, or its beginning, on the connection that `handle` has acquired. `seq`: number of a command whose
    /// reply is already pending.
    pub(super) fn push_exclusive(
        &mut self,
        handle: Handle,
        link_handle: Handle,
        call: Call<'_>,
        request: &[u8],
        class: u8,
        seq: Option<u32>,
    ) {
        let epoch = self.turn.routing().topology.epoch() as u32;
        let Some(client) = self.clients.get_mut(handle) else { return };
        let seq = seq.unwrap_or_else(|| client.owe(self.turn.now_us(), class));
        client.held = Some(link_handle);
        let (database, no_touch) = (client.database, client.no_touch);
        let downgraded = self.links.get(link_handle).is_some_and(|l| l.downgraded);
        let shape = if downgraded { shape_of(&self.turn, request) } else { Shape::Plain };
        let Some(link) = self.links.get_mut(link_handle) else { return };
        let node = link.node;
        link.refused = None;
        let Some(loan) = link.checkout_mut() else { return };
        loan.owner = CheckoutOwner::Held(handle);
        loan.task = Task::Nothing;
        loan.shape = shape;
        loan.began_with.clear();
        if self.slow.is_on() {
            loan.began_with.extend_from_slice(&request[..request.len().min(super::slowlog::KEPT)]);
        }
        let pending = Pending {
            who: handle,
            seq,
            len: 0,
            sent_us: self.turn.now_us() as u32,
            epoch,
            purpose: Purpose::Client,
            class,
            again: Again::Never,
            is_long: false,
            end: CommandSeq::NONE,
            cacheable: self.observers.hot.generation() as u32,
        };
        link.touch_as(no_touch, pending);
        let request = self.pass(KeyedCommand { call, node, database }, request, pending);
        self.links.push(link_handle, request);
    }

    /// Handles an exclusive connection that is up for the first time.
    pub(super) fn exclusive_up(&mut self, handle: Handle) {
        let Some(link) = self.links.get_mut(handle) else { return };
        let (node, lane, resp3) = (link.node, link.lane, link.resp3);
        let is_coming = link.checkout().is_some_and(|loan| matches!(loan.owner, CheckoutOwner::Coming { .. }));
        link.set_holder(Handle::NONE);
        if is_coming && let Some(pool) = self.links.pool_mut(node, lane) {
            let coming = &mut pool.coming[usize::from(resp3)];
            *coming = coming.saturating_sub(1);
        }
        self.release(handle);
    }

    /// Passes a connection that is up or free to the first client in line.
    pub(super) fn release(&mut self, handle: Handle) {
        let Some(link) = self.links.get_mut(handle) else { return };
        let (node, lane, is_up) = (link.node, link.lane, link.phase == Phase::Up && link.is_idle());
        let Some(loan) = link
            .checkout_mut()
            .filter(|loan| is_up && loan.task != Task::Watching && loan.owner != CheckoutOwner::Free)
        else {
            return;
        };
        if let Some(unblock) = &mut loan.unblock {
            // A pending CLIENT UNBLOCK could end the wait of the next client.
            unblock.over = true;
            if unblock.is_queried {
                return;
            }
            self.end_unblock(handle, 0);
        }
        if self.is_above_share(handle) {
            // No command is on it, and the other workers are notified of the room.
            if let Some(pool) = self.links.pool_mut(node, lane) {
                pool.has_yielded = true;
            }
            self.drop_link(handle);
            return self.wake(node, lane);
        }
        let Some(link) = self.links.get_mut(handle) else { return };
        link.paused = false;
        link.idle_since_us = self.turn.now_us();
        if let Some(loan) = link.checkout_mut() {
            loan.owner = CheckoutOwner::Free;
            loan.slow = false;
        }
        if let Some(pool) = self.links.pool_mut(node, lane) {
            pool.free.push(handle);
        }
        self.wake(node, lane);
    }

    /// Whether to close a connection that has become free, because other workers have clients in line and this one
    /// exceeds its share.
    fn is_above_share(&mut self, handle: Handle) -> bool {
        let Some((node, lane)) = self.links.get(handle).map(|link| (link.node, link.lane)) else { return false };
        let (worker, bound) = (self.turn.index(), bound(&self.turn, lane).0);
        let (Some(place), Some(open)) = (lane.pool(), self.links.pool_mut(node, lane).map(|pool| pool.open)) else {
            return false;
        };
        self.exclusive_bounds(node).is_some_and(|bounds| bounds.is_above_share(worker, place, open, bound))
    }

    /// Passes free connections to clients in line, and opens connections for the remaining ones.
    pub(super) fn wake(&mut self, node: NodeId, lane: Lane) {
        while let Some(front) = self.links.pool_mut(node, lane).and_then(|p| p.waiters.front().copied()) {
            let Some(resp3) = self.clients.get(front).filter(|c| c.stall == Stall::Exclusive).map(|c| c.resp3) else {
                self.links.pool_mut(node, lane).map(|p| p.waiters.pop_front());
                continue;
            };
            if let Some(link) = self.links.take_free(node, lane, resp3) {
                if let Some(link) = self.links.get_mut(link) {
                    link.set_holder(front);
                }
                if let Some(client) = self.clients.get_mut(front) {
                    client.held = Some(link);
                }
                self.links.pool_mut(node, lane).map(|p| p.waiters.pop_front());
                self.unstall(front);
                continue;
            }
            if self.turn.node_fails(node) {
                // It retries, and is answered at once.
                self.links.pool_mut(node, lane).map(|p| p.waiters.pop_front());
                self.unstall(front);
                continue;
            }
            self.grow(node, lane, resp3);
            return;
        }
        self.set_waiting_for_room(node, lane, false);
    }

    /// Answers the first client in line with this error.
    fn refuse_first(&mut self, node: NodeId, lane: Lane, text: String) {
        while let Some(first) = self.links.pool_mut(node, lane).and_then(|p| p.waiters.pop_front()) {
            if let Some(client) = self.clients.get_mut(first).filter(|c| c.stall == Stall::Exclusive) {
                client.refusal = Some(text.into());
                self.unstall(first);
                return;
            }
        }
    }

    /// Handles a failed attempt to open an exclusive connection: the client in line for which it was made gets the
    /// error. The others keep waiting for returned connections, unless the node is unreachable.
    pub(super) fn exclusive_failed(&mut self, handle: Handle, why: &str) {
        let Some(link) = self.links.get(handle) else { return };
        let is_ahead = link.checkout().is_some_and(|loan| loan.owner == CheckoutOwner::Coming { is_ahead: true });
        let (node, lane) = (link.node, link.lane);
        self.drop_link(handle);
        let rests_until_us = self.turn.now_us() + AHEAD_REST_US;
        if let Some(pool) = self.links.pool_mut(node, lane).filter(|_| is_ahead) {
            pool.ahead_rests_until_us = rests_until_us;
        }
        // For clients in line now, another attempt is made and answers them. If the node is lost, commands that would
        // block there end as at a server.
        let is_lost = self.turn.node_fails(node) || lane == Lane::Blocking && !self.links.is_up(node);
        if is_ahead || is_lost {
            self.wake(node, lane);
            return;
        }
        let (_, what, _) = bound(&self.turn, lane);
        let text = format!("NODEBUSY {} accepts no connection for {what}: {why}", self.turn.node_name(node));
        self.refuse_first(node, lane, text);
    }

    /// Updates the pool after an exclusive connection was removed.
    pub(super) fn exclusive_gone(&mut self, handle: Handle, link: &Link) {
        if let Some(pool) = self.links.pool_mut(link.node, link.lane) {
            pool.open = pool.open.saturating_sub(1);
            let coming = &mut pool.coming[usize::from(link.resp3)];
            let was_coming = link.checkout().is_some_and(|loan| matches!(loan.owner, CheckoutOwner::Coming { .. }));
            *coming = coming.saturating_sub(usize::from(was_coming));
            pool.free.retain(|h| *h != handle);
        }
        let (worker, Some(place)) = (self.turn.index(), link.lane.pool()) else { return };
        let waiting = self.exclusive_bounds(link.node).map_or(0, |bounds| bounds.release(worker, place));
        for worker in (0..self.turn.shared().mailboxes.len())
            .filter(|worker| *worker != self.turn.index() && waiting & (1 << (worker % 64)) != 0)
        {
            self.turn.shared().mailboxes.send(worker, Message::ConnectionAvailable { node: link.node });
        }
    }

    /// After a complete reply on an exclusive connection: if it was the last one, the connection is free again.
    pub(super) fn after_exclusive_reply(&mut self, handle: Handle) {
        let Some(link) = self.links.get_mut(handle) else { return };
        if !link.lane.is_exclusive() || !link.is_idle() || link.task() == Task::Watching {
            return;
        }
        if let Some(client) = self.clients.get_mut(link.holder())
            && client.held == Some(handle)
        {
            client.held = None;
        }
        self.release(handle);
    }

    /// Returns a connection that this client has acquired but does not need.
    pub(super) fn give_back(&mut self, handle: Handle, link_handle: Handle) {
        if let Some(client) = self.clients.get_mut(handle).filter(|c| c.held == Some(link_handle)) {
            client.held = None;
        }
        if self.links.get(link_handle).is_some_and(|l| l.holder() == handle || l.holder() == Handle::NONE) {
            self.release(link_handle);
        }
    }

    /// Removes a client from all lines.
    pub(super) fn leave_pools(&mut self, handle: Handle) {
        for (_, _, pool) in self.links.pools_mut() {
            pool.waiters.retain(|waiter| *waiter != handle);
        }
    }

    /// Returns the connection that a client holds, if it is unused.
    pub(super) fn give_back_unused(&mut self, handle: Handle) {
        let held = self.clients.get(handle).and_then(|client| client.held);
        let is_unused = |link: &Link| link.is_idle() && link.task() == Task::Nothing && link.holder() == handle;
        if let Some(held) = held.filter(|held| self.links.get(*held).is_some_and(is_unused)) {
            self.give_back(handle, held);
        }
    }

    /// Returns a connection that a client got while in line, if it leads to a node that is no longer its destination.
    pub(super) fn give_back_of_another(&mut self, handle: Handle, node: NodeId) {
        let held = self.clients.get(handle).and_then(|c| c.held);
        if let Some(held) = held.filter(|held| self.links.get(*held).is_none_or(|l| l.node != node)) {
            self.give_back(handle, held);
        }
    }

    /// Releases the connection of a client that is gone, or does not need it any more.
    pub(super) fn abandon(&mut self, handle: Handle) {
        let Some(link) = self.links.get_mut(handle) else { return };
        let (node, lane) = (link.node, link.lane);
        let midway = link.paused || !matches!(link.body, Body::Whole(_));
        if link.task() == Task::Uploading {
            // The node has half a command, which it never executes without the rest. Earlier commands are complete.
            self.drop_link(handle);
            self.wake(node, lane);
        } else if midway || (lane == Lane::Large && link.unsent() > 0 && !link.is_idle()) {
            self.break_link(handle, "the client disconnected in the middle of a large value");
        } else if link.task() == Task::Watching {
            link.set_task(Task::Nothing);
            link.set_holder(Handle::NONE);
            self.push_own(handle, &[b"UNWATCH"], Purpose::Discarded, 0);
        } else if link.is_idle() {
            self.release(handle);
        } else if lane == Lane::Blocking {
            self.unblock(handle, false, None);
        }
        // Otherwise the reply is awaited: commands are in flight until then.
    }

    /// Answers clients that have waited too long.
    pub(super) fn tick_pools(&mut self) {
        let timeout_us = self.turn.routing().live.command_timeout.as_micros() as u64;
        let mut late = Vec::new();
        let mut waited_for = Vec::new();
        for (node, lane, pool) in self.links.pools_mut().filter(|(_, _, pool)| !pool.waiters.is_empty()) {
            pool.waiters.retain(|waiter| {
                let Some(client) = self.clients.get(*waiter).filter(|c| c.stall == Stall::Exclusive) else {
                    return false;
                };
                let is_late = self.turn.now_us().saturating_sub(client.stalled_at_us) > timeout_us
                    && !self.turn.shared().busy.was_busy(
                        node,
                        self.turn.now_us(),
                        self.turn.routing().live.command_timeout,
                    );
                if is_late {
                    late.push((*waiter, node, lane));
                }
                !is_late
            });
            waited_for.push((node, lane));
        }
        for (waiter, node, lane) in late {
            let (bound, what, key) = bound(&self.turn, lane);
            let bound = self.exclusive_bounds(node).map_or(bound, |bounds| bounds.bound(bound));
            let text = format!(
                "NODEBUSY {}: no connection for {what} became free within {:?} ({key} {bound})",
                self.turn.node_name(node),
                self.turn.routing().live.command_timeout,
            );
            if let Some(client) = self.clients.get_mut(waiter) {
                client.refusal = Some(text.into());
            }
            self.unstall(waiter);
        }
        for (node, lane) in waited_for {
            if let Some(pool) = self.links.pool_mut(node, lane) {
                pool.has_yielded = false;
            }
            if lane == Lane::Watch {
                self.reissue_watches(node);
            }
            if self.set_waiting_for_room(node, lane, false) && self.set_waiting_for_room(node, lane, true) {
                want_room(&self.turn, node, lane);
            }
            // As many as may connect at the same time, because some earlier attempts may have failed.
            for _ in 0..COMING_MAX {
                let before = self.links.pool_mut(node, lane).map(|p| p.coming);
                self.wake(node, lane);
                if self.links.pool_mut(node, lane).map(|p| p.coming) == before {
                    break;
                }
            }
        }
    }
}

/// Returns the configured bound of a kind over all workers, its purpose, and its key.
fn bound(turn: &Turn, lane: Lane) -> (usize, &'static str, &'static str) {
    let live = &turn.routing().live;
    match lane {
        Lane::Blocking => (live.blocking_connections_max, "blocking commands", "blocking-connections-max"),
        Lane::Watch => (live.watch_connections_max, "transactions", "watch-connections-max"),
        _ => (live.large_connections_max, "large values", "large-connections-max"),
    }
}

/// Requests room from other workers, for clients in line.
fn want_room(turn: &Turn, node: NodeId, lane: Lane) {
    for worker in (0..turn.shared().mailboxes.len()).filter(|worker| *worker != turn.index()) {
        turn.shared().mailboxes.send(worker, Message::CloseUnused { node, lane });
    }
}
