//! Connections of a worker to the nodes: all connections, their roles, and those with unsent output.
//!
//! Independent of clients. Code that needs both sides is in other modules.

use std::net::SocketAddr;
use std::sync::Arc;

use switchyard_policy::topology::NodeId;

use super::keyed::{FinishedRequest, Request};
use super::log_throttle::LogThrottle;
use super::outage::Outages;
use super::pool::Pool;
use super::turn::Turn;
use super::upstream::{Lane, Link, Phase};
use crate::exclusive_bounds::ExclusiveBounds;
use crate::slab::{Handle, Slab};
use crate::tap::Outcome;

/// Connections to one node, by role.
#[derive(Debug, Default)]
struct NodeLinks {
    /// By protocol version, like `slow` and the connections to replicas.
    main: [Option<Handle>; 2],
    slow: [Option<Handle>; 2],
    pubsub: Option<Handle>,
    fills: Option<Handle>,
    replicas: Vec<(SocketAddr, [Option<Handle>; 2])>,
    /// Exclusive connections, by `Lane::outage`.
    pools: [Pool; 3],
    /// Limits of these over all workers. Known after the first request.
    exclusive_bounds: Option<Arc<ExclusiveBounds>>,
    log: NodeLog,
}

/// Throttled logs about a node.
#[derive(Debug, Default)]
pub(super) struct NodeLog {
    pub(super) late: LogThrottle,
    pub(super) lost: LogThrottle,
}

#[derive(Debug)]
pub(super) struct Links {
    all: Slab<Box<Link>>,
    /// By node number.
    nodes: Vec<NodeLinks>,
    /// Connections with unsent output.
    dirty: Vec<Handle>,
    /// Requests whose connection was gone when they were passed to it.
    severed: Vec<FinishedRequest>,
    outages: Outages,
}

impl Links {
    pub(super) fn new() -> Self {
        Self {
            all: Slab::new(),
            nodes: Vec::new(),
            dirty: Vec::new(),
            severed: Vec::new(),
            outages: Outages::default(),
        }
    }

    #[inline]
    pub(super) fn get(&self, handle: Handle) -> Option<&Link> {
        self.all.get(handle).map(|link| &**link)
    }

    #[inline]
    pub(super) fn get_mut(&mut self, handle: Handle) -> Option<&mut Link> {
        self.all.get_mut(handle).map(|link| &mut **link)
    }

    /// Returns the link if it is up.
    pub(super) fn up(&self, handle: Handle) -> Option<&Link> {
        self.get(handle).filter(|link| link.phase == Phase::Up)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Handle, &Link)> {
        self.all.iter().map(|(handle, link)| (handle, &**link))
    }

    pub(super) fn handles(&self) -> Vec<Handle> {
        self.all.handles()
    }

    // ---- roles ----

    /// Makes room for nodes below this number.
    pub(super) fn know_nodes(&mut self, bound: usize) {
        self.nodes.resize_with(self.nodes.len().max(bound), Default::default);
    }

    /// Adds an exclusive connection.
    pub(super) fn insert(&mut self, link: Link) -> Handle {
        self.all.insert(Box::new(link))
    }

    /// Returns the connection of a shared lane.
    #[inline]
    pub(super) fn shared(&self, node: NodeId, lane: Lane, resp3: bool) -> Option<Handle> {
        let node = self.nodes.get(node.index())?;
        match lane {
            Lane::Main => node.main[usize::from(resp3)],
            Lane::Pubsub => node.pubsub,
            Lane::Fills => node.fills,
            _ => node.slow[usize::from(resp3)],
        }
    }

    /// Adds the missing connection of a shared lane.
    pub(super) fn insert_shared(&mut self, link: Link) -> Handle {
        let (node, lane, resp3) = (link.node, link.lane, link.resp3);
        let handle = self.insert(link);
        let node = &mut self.nodes[node.index()];
        let place = match lane {
            Lane::Main => &mut node.main[usize::from(resp3)],
            Lane::Pubsub => &mut node.pubsub,
            Lane::Fills => &mut node.fills,
            _ => &mut node.slow[usize::from(resp3)],
        };
        *place = Some(handle);
        handle
    }

    /// Returns the connection to a replica.
    pub(super) fn replica(&self, node: NodeId, address: SocketAddr, resp3: bool) -> Option<Handle> {
        let replicas = &self.nodes.get(node.index())?.replicas;
        replicas.iter().find(|(known, _)| *known == address)?.1[usize::from(resp3)]
    }

    /// Adds a missing connection to a replica.
    pub(super) fn insert_replica(&mut self, link: Link, address: SocketAddr) -> Handle {
        let (node, resp3) = (link.node, link.resp3);
        let handle = self.insert(link);
        let replicas = &mut self.nodes[node.index()].replicas;
        let at = replicas.iter().position(|(known, _)| *known == address).unwrap_or_else(|| {
            replicas.push((address, [None; 2]));
            replicas.len() - 1
        });
        replicas[at].1[usize::from(resp3)] = Some(handle);
        handle
    }

    /// Removes a connection from all tables except its pool.
    pub(super) fn remove(&mut self, handle: Handle) -> Option<Box<Link>> {
        let link = self.all.remove(handle)?;
        if let Some(node) = self.nodes.get_mut(link.node.index()) {
            let replicas = node.replicas.iter_mut().flat_map(|(_, places)| places);
            let shared = node.main.iter_mut().chain(&mut node.slow).chain([&mut node.pubsub, &mut node.fills]);
            shared.chain(replicas).filter(|place| **place == Some(handle)).for_each(|place| *place = None);
            node.replicas.retain(|(_, places)| places.iter().any(Option::is_some));
        }
        Some(link)
    }

    /// Returns the main connection of RESP2, in any state.
    pub(super) fn main(&self, node: NodeId) -> Option<Handle> {
        self.shared(node, Lane::Main, false)
    }

    /// Returns a connected main connection to this process of the node.
    pub(super) fn main_to(&self, node: NodeId, run_id: Option<&str>) -> Option<Handle> {
        let mains = self.nodes.get(node.index())?.main;
        mains.into_iter().flatten().find(|main| self.up(*main).is_some_and(|link| link.run_id.as_deref() == run_id))
    }

    /// Returns the connected connection for subscriptions.
    pub(super) fn pubsub(&self, node: NodeId) -> Option<Handle> {
        self.shared(node, Lane::Pubsub, true).filter(|link| self.up(*link).is_some())
    }

    /// Returns the connected connections for subscriptions of all nodes.
    pub(super) fn pubsubs(&self) -> Vec<Handle> {
        self.nodes.iter().filter_map(|node| node.pubsub).filter(|link| self.up(*link).is_some()).collect()
    }

    /// Whether commands to a node would be executed at once, as far as this worker knows.
    pub(super) fn is_up(&self, node: NodeId) -> bool {
        let mains = self.nodes.get(node.index()).map(|node| node.main).unwrap_or_default();
        mains.iter().flatten().any(|main| self.get(*main).is_some_and(|link| link.phase == Phase::Up || link.renewing))
    }

    /// Returns the nodes that may have keys, and all other connected nodes.
    pub(super) fn reachable(&self, turn: &Turn) -> Vec<NodeId> {
        let all = turn.routing().topology.nodes().map(|node| node.id);
        all.filter(|node| turn.data_nodes().has(*node) || self.is_up(*node)).collect()
    }

    /// Outages of nodes.
    #[inline]
    pub(super) fn outages(&self) -> &Outages {
        &self.outages
    }

    /// Mutable access for `outage`.
    pub(super) fn outages_mut(&mut self) -> &mut Outages {
        &mut self.outages
    }

    /// Whether commands to a node may be sent: it is up, or its first reconnect since then is in progress.
    pub(super) fn takes_commands(&self, node: NodeId) -> bool {
        let mains = self.nodes.get(node.index()).map(|node| node.main).unwrap_or_default();
        mains.iter().flatten().any(|main| self.get(*main).is_some_and(Link::takes_commands))
    }

    /// Returns the pool of an exclusive lane.
    pub(super) fn pool(&self, node: NodeId, lane: Lane) -> Option<&Pool> {
        self.nodes.get(node.index())?.pools.get(lane.pool()?)
    }

    pub(super) fn pool_mut(&mut self, node: NodeId, lane: Lane) -> Option<&mut Pool> {
        self.nodes.get_mut(node.index())?.pools.get_mut(lane.pool()?)
    }

    /// Returns all pools.
    pub(super) fn pools_mut(&mut self) -> impl Iterator<Item = (NodeId, Lane, &mut Pool)> {
        let lanes = [Lane::Large, Lane::Watch, Lane::Blocking];
        let nodes = self.nodes.iter_mut().enumerate();
        nodes.flat_map(move |(number, node)| {
            node.pools.iter_mut().zip(lanes).map(move |(pool, lane)| (NodeId(number as u16), lane, pool))
        })
    }

    /// Returns the limits of exclusive connections to a node over all workers. `ask` provides them the first time.
    pub(super) fn exclusive_bounds(
        &mut self,
        node: NodeId,
        ask: impl FnOnce() -> Arc<ExclusiveBounds>,
    ) -> Option<&ExclusiveBounds> {
        Some(self.nodes.get_mut(node.index())?.exclusive_bounds.get_or_insert_with(ask))
    }

    pub(super) fn log(&mut self, node: NodeId) -> Option<&mut NodeLog> {
        self.nodes.get_mut(node.index()).map(|node| &mut node.log)
    }

    // ---- output ----

    /// Passes a request to a connection. Without the connection, the request ends ([`Self::take_severed`]), because its
    /// end may be observed.
    #[inline]
    pub(super) fn push(&mut self, handle: Handle, request: Request<'_>) {
        match self.get_mut(handle) {
            Some(link) => link.push(request),
            None => self.severed.push(FinishedRequest::new(request.into_parts().2, Outcome::Never, false)),
        }
        self.mark(handle);
    }

    /// Takes the requests whose connection was gone.
    #[inline]
    pub(super) fn take_severed(&mut self) -> Option<Vec<FinishedRequest>> {
        (!self.severed.is_empty()).then(|| std::mem::take(&mut self.severed))
    }

    /// Marks a connection as having unsent output.
    #[inline]
    pub(super) fn mark(&mut self, handle: Handle) {
        if let Some(link) = self.all.get_mut(handle)
            && !link.dirty
        {
            link.dirty = true;
            self.dirty.push(handle);
        }
    }

    /// Whether a client must wait before it adds to this connection. If so, it is resumed later.
    pub(super) fn is_full(&mut self, handle: Handle, client: Handle, high: usize) -> bool {
        let Some(link) = self.get_mut(handle).filter(|link| !link.has_room(high)) else { return false };
        if !link.waiters.contains(&client) {
            link.waiters.push(client);
        }
        self.mark(handle);
        true
    }

    /// Number of marked connections.
    pub(super) const fn marked_count(&self) -> usize {
        self.dirty.len()
    }

    /// Returns each marked connection once. A connection that was flushed within the turn and has new output is in the
    /// list twice.
    pub(super) fn marked(&mut self) -> impl Iterator<Item = (Handle, &Link)> {
        let all = &mut self.all;
        self.dirty.retain(|handle| all.get_mut(*handle).is_some_and(|link| std::mem::take(&mut link.dirty)));
        let all = &self.all;
        self.dirty.iter().filter_map(|handle| Some((*handle, &**all.get(*handle)?)))
    }

    /// Takes the list of marked connections.
    pub(super) fn take_marked(&mut self) -> Vec<Handle> {
        std::mem::take(&mut self.dirty)
    }

    /// Returns the emptied list for reuse.
    pub(super) fn recycle_marked(&mut self, list: Vec<Handle>) {
        debug_assert!(list.is_empty());
        if self.dirty.is_empty() {
            self.dirty = list;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::upstream::{Again, Pending, Purpose};
    use super::*;
    use crate::worker::keyed::CommandSeq;

    #[test]
    fn a_request_whose_connection_is_gone_is_over() {
        let mut links = Links::new();
        let pending = Pending {
            who: Handle::NONE,
            seq: 7,
            len: 0,
            sent_us: 0,
            epoch: 0,
            purpose: Purpose::Client,
            class: 0,
            again: Again::Never,
            is_long: false,
            end: CommandSeq::NONE,
            cacheable: 0,
        };
        links.push(Handle::NONE, Request::of_ours(b"SET k v", 0, pending));
        let strays = links.take_severed().expect("one");
        assert_eq!((strays.len(), strays[0].outcome()), (1, Outcome::Never));
        assert!(links.take_severed().is_none());
    }
}
