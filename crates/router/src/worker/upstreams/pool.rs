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
use std::sync::Arc;

use switchyard_policy::topology::NodeId;

use super::kind::{Checkout, Task};
use super::pending::Purpose;
use super::unblock::Unblock;
use super::{Event, Link, Upstreams};
use crate::exclusive_bounds::ExclusiveBounds;
use crate::lane::Lane;
use crate::shared::Message;
use crate::slab::Handle;
use crate::worker::turn::Turn;

/// Maximum number of simultaneous connection attempts of a pool. Thousands of clients may begin to wait at once (after
/// a start of the router or of a node): more attempts than the node's backlog (511) and its single thread can handle
/// would delay each other.
const COMING_MAX: usize = 128;

/// With at most this many free or connecting, connections are made in advance for clients that will need one soon.
const AHEAD_MIN: usize = 32;

/// Pause of connecting in advance after the node has refused such a connection, us.
const AHEAD_REST_US: u64 = 1_000_000;

/// Exclusive connections of a worker to one node.
#[derive(Debug, Default)]
struct NodePools {
    /// By `Lane::pool`.
    pools: [Pool; 3],
    /// Limits of these over all workers. Known after the first request.
    exclusive_bounds: Option<Arc<ExclusiveBounds>>,
}

/// A client in line.
#[derive(Clone, Copy, Debug)]
struct Waiter {
    client: Handle,
    resp3: bool,
    since_us: u64,
}

/// The exclusive connections of one kind to one node.
#[derive(Debug, Default)]
struct Pool {
    /// Number of connections in any state.
    open: usize,
    /// Number of them that have never been up: RESP2, RESP3.
    coming: [usize; 2],
    /// Up and unused. The last used one is used next, so that surplus connections become idle.
    free: Vec<Handle>,
    /// Clients in line.
    waiters: VecDeque<Waiter>,
    /// One was closed for waiting workers: none is opened before they have had their turn.
    has_yielded: bool,
    /// No connecting in advance before this time, us.
    ahead_rests_until_us: u64,
}

/// The pools of a worker, by node number.
#[derive(Debug, Default)]
pub(super) struct Pools {
    nodes: Vec<NodePools>,
}

impl Pools {
    /// Makes room for nodes below this number.
    pub(super) fn know_nodes(&mut self, bound: usize) {
        self.nodes.resize_with(self.nodes.len().max(bound), Default::default);
    }

    /// Returns the pool of an exclusive lane.
    fn get(&self, node: NodeId, lane: Lane) -> Option<&Pool> {
        self.nodes.get(node.index())?.pools.get(lane.pool()?)
    }

    fn get_mut(&mut self, node: NodeId, lane: Lane) -> Option<&mut Pool> {
        self.nodes.get_mut(node.index())?.pools.get_mut(lane.pool()?)
    }

    /// Returns all pools.
    fn iter_mut(&mut self) -> impl Iterator<Item = (NodeId, Lane, &mut Pool)> {
        let lanes = [Lane::Large, Lane::Watch, Lane::Blocking];
        let nodes = self.nodes.iter_mut().enumerate();
        nodes.flat_map(move |(number, node)| {
            node.pools.iter_mut().zip(lanes).map(move |(pool, lane)| (NodeId(number as u16), lane, pool))
        })
    }

    /// Returns the counts of exclusive connections of all workers to the node.
    fn bounds(&mut self, turn: &Turn, node: NodeId) -> Option<&ExclusiveBounds> {
        let bounds = &mut self.nodes.get_mut(node.index())?.exclusive_bounds;
        Some(bounds.get_or_insert_with(|| turn.shared().exclusive_bounds(node)))
    }

    /// Publishes whether clients of this worker wait for room. Returns whether this is a change.
    fn set_waiting_for_room(&mut self, turn: &Turn, node: NodeId, lane: Lane, waits: bool) -> bool {
        let (worker, place) = (turn.index(), lane.pool());
        place
            .is_some_and(|place| self.bounds(turn, node).is_some_and(|bounds| bounds.set_waiting(worker, place, waits)))
    }

    /// Whether to close a connection that has become free, because other workers have clients in line and this one
    /// exceeds its share.
    fn is_above_share(&mut self, turn: &Turn, node: NodeId, lane: Lane) -> bool {
        let (worker, bound) = (turn.index(), bound(turn, lane).0);
        let (Some(place), Some(open)) = (lane.pool(), self.get(node, lane).map(|pool| pool.open)) else {
            return false;
        };
        self.bounds(turn, node).is_some_and(|bounds| bounds.is_above_share(worker, place, open, bound))
    }

    /// Updates the pool after an exclusive connection was removed.
    pub(super) fn remove(&mut self, turn: &Turn, handle: Handle, link: &Link) {
        if let Some(pool) = self.get_mut(link.node, link.lane) {
            pool.open = pool.open.saturating_sub(1);
            let coming = &mut pool.coming[usize::from(link.resp3)];
            let was_coming = link.checkout().is_some_and(Checkout::is_coming);
            *coming = coming.saturating_sub(usize::from(was_coming));
            pool.free.retain(|h| *h != handle);
        }
        let (worker, Some(place)) = (turn.index(), link.lane.pool()) else { return };
        let waiting = self.bounds(turn, link.node).map_or(0, |bounds| bounds.release(worker, place));
        for worker in (0..turn.shared().mailboxes.len())
            .filter(|worker| *worker != turn.index() && waiting & (1 << (worker % 64)) != 0)
        {
            turn.shared().mailboxes.send(worker, Message::ConnectionAvailable { node: link.node });
        }
    }

    /// Removes a client from all lines.
    pub(super) fn leave(&mut self, handle: Handle) {
        for (_, _, pool) in self.iter_mut() {
            pool.waiters.retain(|waiter| waiter.client != handle);
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

/// A pool with access to the connections.
#[derive(Debug)]
pub(in crate::worker) struct ExclusivePool<'a> {
    up: &'a mut Upstreams,
    turn: &'a Turn,
    node: NodeId,
    lane: Lane,
}

impl ExclusivePool<'_> {
    fn pool_mut(&mut self) -> Option<&mut Pool> {
        self.up.pools.get_mut(self.node, self.lane)
    }

    /// Takes a free connection of this protocol out of the pool.
    pub(in crate::worker) fn take_free(&mut self, resp3: bool) -> Option<Handle> {
        let (up, node, lane) = (&mut *self.up, self.node, self.lane);
        let is_fit = |link: &Link| link.is_up() && link.resp3 == resp3;
        let at = up.pools.get(node, lane)?.free.iter().rposition(|handle| up.get(*handle).is_some_and(is_fit))?;
        let handle = up.pools.get_mut(node, lane)?.free.remove(at);
        up.get_mut(handle)?.checkout_mut()?.lend(Handle::NONE);
        Some(handle)
    }

    /// Puts a client in line.
    pub(in crate::worker) fn wait(&mut self, client: Handle, resp3: bool) {
        let Self { turn, .. } = *self;
        let since_us = turn.now_us();
        if let Some(pool) = self.pool_mut() {
            pool.waiters.push_back(Waiter { client, resp3, since_us });
        }
        self.grow(resp3);
    }

    /// Passes free connections to clients in line, and opens connections for the remaining ones.
    pub(super) fn wake(&mut self) {
        let Self { turn, node, lane, .. } = *self;
        while let Some(front) = self.pool_mut().and_then(|p| p.waiters.front().copied()) {
            let Waiter { client, resp3, .. } = front;
            if let Some(link) = self.take_free(resp3) {
                let checkout = self.up.get_mut(link).and_then(Link::checkout_mut);
                checkout.into_iter().for_each(|checkout| checkout.lend(client));
                self.up.emit(Event::Granted { client, link });
            } else if turn.node_fails(node) {
                self.up.emit(Event::Refused { client, text: None });
            } else {
                self.grow(resp3);
                return;
            }
            self.pool_mut().map(|p| p.waiters.pop_front());
        }
        self.up.pools.set_waiting_for_room(turn, node, lane, false);
    }

    /// Opens one more connection, if it is needed and the bound allows it, or if a free one of the other protocol can
    /// be closed for it.
    fn grow(&mut self, resp3: bool) {
        let Self { turn, node, lane, .. } = *self;
        let Some(pool) = self.pool_mut() else { return };
        let [of_resp2, of_resp3] = pool.coming;
        let alike = if resp3 { of_resp3 } else { of_resp2 };
        // Connections that come up trigger the next ones.
        if alike > 0 && (alike >= COMING_MAX || of_resp2 + of_resp3 >= pool.waiters.len()) {
            return;
        }
        let has_yielded = pool.has_yielded;
        if !has_yielded && self.open(resp3, false) {
            return;
        }
        if let Some(other) = self.pool_mut().and_then(|pool| pool.free.pop()) {
            self.up.drop_link(turn, other);
            if self.open(resp3, false) {
                return;
            }
        }
        if self.up.pools.set_waiting_for_room(turn, node, lane, true) {
            want_room(turn, node, lane);
        }
    }

    /// Returns false if there is no room for it.
    fn open(&mut self, resp3: bool, is_ahead: bool) -> bool {
        let Self { turn, node, lane, .. } = *self;
        let (worker, bound) = (turn.index(), bound(turn, lane).0);
        let Some(place) = lane.pool() else { return false };
        if !self.up.pools.bounds(turn, node).is_some_and(|bounds| bounds.take(worker, place, bound)) {
            return false;
        }
        // If the next one finds no room, this is a change, and the other workers are notified again.
        self.up.pools.set_waiting_for_room(turn, node, lane, false);
        let Some(pool) = self.pool_mut() else { return false };
        pool.open += 1;
        pool.coming[usize::from(resp3)] += 1;
        let mut link =
            Link::new(node, lane, resp3, turn.routing().live.database, turn.counters().node(node), turn.now_us());
        link.checkout_mut().into_iter().for_each(|checkout| checkout.set_coming(is_ahead));
        let link = self.up.links.insert(link);
        self.up.connect(turn, link);
        true
    }

    /// Opens connections in advance for clients that will need one soon but not at the same time: otherwise each would
    /// wait for its own connection, and with it all clients behind it. They belong to no client: the first in line gets
    /// one regardless of the length of the line. `how_many` returns the demand, up to a maximum.
    pub(in crate::worker) fn make_ahead(&mut self, resp3: bool, how_many: impl FnOnce(usize) -> usize) {
        let Self { turn, node, lane, .. } = *self;
        let (bound, Some(place)) = (bound(turn, lane).0, lane.pool()) else { return };
        let Some(room) = self.up.pools.bounds(turn, node).map(|bounds| bounds.available(place, bound)) else { return };
        let Some(pool) = self.up.pools.get(node, lane) else { return };
        let free = pool.free.iter().filter(|h| self.up.get(**h).is_some_and(|l| l.resp3 == resp3)).count();
        let (there, coming) = (free + pool.coming[usize::from(resp3)], pool.coming[0] + pool.coming[1]);
        let most = COMING_MAX.saturating_sub(coming.max(there)).min(room);
        let rests = turn.now_us() < pool.ahead_rests_until_us;
        if there >= AHEAD_MIN || most == 0 || rests || pool.has_yielded || turn.node_fails(node) {
            return;
        }
        for _ in there..how_many(there + most).min(there + most) {
            if !self.open(resp3, true) {
                return;
            }
        }
    }

    /// Handles a connection that is up for the first time.
    pub(super) fn link_is_up(&mut self, handle: Handle) {
        let Some(link) = self.up.get_mut(handle) else { return };
        let (resp3, is_coming) = (link.resp3, link.checkout().is_some_and(Checkout::is_coming));
        link.checkout_mut().into_iter().for_each(|checkout| checkout.lend(Handle::NONE));
        if is_coming && let Some(pool) = self.pool_mut() {
            let coming = &mut pool.coming[usize::from(resp3)];
            *coming = coming.saturating_sub(1);
        }
        self.up.release(self.turn, handle);
    }

    /// Handles a failed attempt to open a connection: the client in line for which it was made gets the
    /// error. The others keep waiting for returned connections, unless the node is unreachable.
    pub(super) fn link_failed(&mut self, handle: Handle, why: &str) {
        let Self { turn, node, lane, .. } = *self;
        let Some(link) = self.up.get(handle) else { return };
        let is_ahead = link.checkout().is_some_and(Checkout::is_coming_ahead);
        self.up.drop_link(turn, handle);
        let rests_until_us = turn.now_us() + AHEAD_REST_US;
        if let Some(pool) = self.pool_mut().filter(|_| is_ahead) {
            pool.ahead_rests_until_us = rests_until_us;
        }
        // For clients in line now, another attempt is made and answers them. If the node is lost, commands that would
        // block there end as at a server.
        let is_lost = turn.node_fails(node) || lane == Lane::Blocking && !self.up.links.is_up(node);
        if is_ahead || is_lost {
            self.wake();
            return;
        }
        let (_, what, _) = bound(turn, lane);
        let text = format!("NODEBUSY {} accepts no connection for {what}: {why}", turn.node_name(node));
        if let Some(first) = self.pool_mut().and_then(|p| p.waiters.pop_front()) {
            self.up.emit(Event::Refused { client: first.client, text: Some(text) });
        }
    }

    /// Closes an unused connection for other workers that wait.
    pub(in crate::worker) fn make_room(&mut self) {
        let Self { turn, node, lane, .. } = *self;
        // Of this kind first. If the node accepts no more connections at all, another kind makes room as well.
        let is_full = self.up.pools.bounds(turn, node).is_some_and(ExclusiveBounds::is_full);
        for lane in [lane, Lane::Large, Lane::Watch, Lane::Blocking].into_iter().take(if is_full { 4 } else { 1 }) {
            let unused = self
                .up
                .pools
                .get_mut(node, lane)
                .filter(|pool| pool.waiters.is_empty())
                .and_then(|pool| pool.free.first().copied());
            if let Some(unused) = unused {
                return self.up.drop_link(turn, unused);
            }
        }
    }
}

impl Upstreams {
    /// Returns the pool of a lane.
    pub(in crate::worker) fn pool<'a>(&'a mut self, turn: &'a Turn, node: NodeId, lane: Lane) -> ExclusivePool<'a> {
        ExclusivePool { up: self, turn, node, lane }
    }

    /// Removes a client from all lines.
    pub(in crate::worker) fn leave_pools(&mut self, client: Handle) {
        self.pools.leave(client);
    }

    /// Handles the message of another worker that a connection to the node was closed.
    pub(in crate::worker) fn room_was_made(&mut self, turn: &Turn, node: NodeId) {
        for lane in [Lane::Large, Lane::Watch, Lane::Blocking] {
            if let Some(pool) = self.pools.get_mut(node, lane) {
                pool.has_yielded = false;
            }
            self.pool(turn, node, lane).wake();
        }
    }

    /// After a complete reply on an exclusive connection: if it was the last one, the connection is free again.
    pub(in crate::worker) fn after_exclusive_reply(&mut self, turn: &Turn, handle: Handle) {
        let Some(link) = self.get(handle) else { return };
        if !link.lane.is_exclusive() || !link.is_idle() || link.task() == Task::Watching {
            return;
        }
        let client = link.holder();
        self.emit(Event::Released { client, link: handle });
        self.release(turn, handle);
    }

    /// Passes a connection that is up or free to the first client in line.
    pub(in crate::worker) fn release(&mut self, turn: &Turn, handle: Handle) {
        let Some(link) = self.get_mut(handle) else { return };
        let (node, lane, is_up) = (link.node, link.lane, link.is_up() && link.is_idle());
        let Some(checkout) = link.checkout_mut().filter(|checkout| is_up && checkout.is_releasable()) else { return };
        // A pending CLIENT UNBLOCK could end the wait of the next client.
        if checkout.unblock_mut().is_some_and(Unblock::end) {
            return;
        }
        checkout.end_unblock(&turn.shared().mailboxes, 0);
        if self.pools.is_above_share(turn, node, lane) {
            // No command is on it, and the other workers are notified of the room.
            if let Some(pool) = self.pools.get_mut(node, lane) {
                pool.has_yielded = true;
            }
            self.drop_link(turn, handle);
            return self.pool(turn, node, lane).wake();
        }
        let Some(link) = self.get_mut(handle) else { return };
        link.incoming.unpause();
        link.life.note_use(turn.now_us());
        link.checkout_mut().into_iter().for_each(Checkout::release);
        if let Some(pool) = self.pools.get_mut(node, lane) {
            pool.free.push(handle);
        }
        self.pool(turn, node, lane).wake();
    }

    /// Releases the connection of a client that is gone, or does not need it any more. Without effect if another client
    /// holds it.
    pub(in crate::worker) fn abandon(&mut self, turn: &Turn, client: Handle, handle: Handle) {
        let Some(link) = self.get_mut(handle).filter(|link| link.holder() == client) else { return };
        let (node, lane) = (link.node, link.lane);
        let midway = link.incoming.is_paused() || !link.incoming.is_collecting();
        if link.is_uploading() {
            // The node has half a command, which it never executes without the rest. Earlier commands are complete.
            self.drop_link(turn, handle);
            self.pool(turn, node, lane).wake();
        } else if midway || (lane == Lane::Large && link.unsent() > 0 && !link.is_idle()) {
            self.break_link(turn, handle, "the client disconnected in the middle of a large value");
        } else if link.task() == Task::Watching {
            if let Some(checkout) = link.checkout_mut() {
                checkout.end_task();
                checkout.lend(Handle::NONE);
            }
            self.push_own(turn, handle, &[b"UNWATCH"], Purpose::Discarded, 0);
        } else if link.is_idle() {
            self.release(turn, handle);
        } else if lane == Lane::Blocking {
            self.emit(Event::Abandoned { link: handle });
        }
        // Otherwise the reply is awaited: commands are in flight until then.
    }

    /// Answers clients that have waited too long.
    pub(in crate::worker) fn tick_pools(&mut self, turn: &Turn) {
        let timeout_us = turn.routing().live.command_timeout.as_micros() as u64;
        let mut late = Vec::new();
        let mut waited_for = Vec::new();
        for (node, lane, pool) in self.pools.iter_mut().filter(|(_, _, pool)| !pool.waiters.is_empty()) {
            pool.waiters.retain(|waiter| {
                let is_late = turn.now_us().saturating_sub(waiter.since_us) > timeout_us
                    && !turn.shared().busy.was_busy(node, turn.now_us(), turn.routing().live.command_timeout);
                if is_late {
                    late.push((waiter.client, node, lane));
                }
                !is_late
            });
            waited_for.push((node, lane));
        }
        for (waiter, node, lane) in late {
            let (bound, what, key) = bound(turn, lane);
            let bound = self.pools.bounds(turn, node).map_or(bound, |bounds| bounds.bound(bound));
            let text = format!(
                "NODEBUSY {}: no connection for {what} became free within {:?} ({key} {bound})",
                turn.node_name(node),
                turn.routing().live.command_timeout,
            );
            self.emit(Event::Refused { client: waiter, text: Some(text) });
        }
        for (node, lane) in waited_for {
            if let Some(pool) = self.pools.get_mut(node, lane) {
                pool.has_yielded = false;
            }
            if lane == Lane::Watch {
                self.emit(Event::WatchAwaited { node });
            }
            if self.pools.set_waiting_for_room(turn, node, lane, false)
                && self.pools.set_waiting_for_room(turn, node, lane, true)
            {
                want_room(turn, node, lane);
            }
            // As many as may connect at the same time, because some earlier attempts may have failed.
            for _ in 0..COMING_MAX {
                let before = self.pools.get_mut(node, lane).map(|p| p.coming);
                self.pool(turn, node, lane).wake();
                if self.pools.get_mut(node, lane).map(|p| p.coming) == before {
                    break;
                }
            }
        }
    }
}
