//! The connections of a worker to the nodes: which there are, which of them is the one for what, and which have
//! something to send.
//!
//! It knows no client. What connections carry for clients, and what happens to these, is in the rooms that see both
//! sides.

use std::net::SocketAddr;
use std::sync::Arc;

use switchyard_policy::topology::NodeId;

use super::keyed::{FinishedRequest, Request};
use super::log_throttle::LogThrottle;
use super::outage::Outages;
use super::pool::Pool;
use super::upstream::{Lane, Link, Phase};
use crate::exclusive_bounds::ExclusiveBounds;
use crate::slab::{Handle, Slab};
use crate::tap::Outcome;

/// The connections to one node, by what they are for.
#[derive(Debug, Default)]
struct NodeLinks {
    /// By protocol, as `slow` and those of replicas.
    main: [Option<Handle>; 2],
    slow: [Option<Handle>; 2],
    pubsub: Option<Handle>,
    fills: Option<Handle>,
    replicas: Vec<(SocketAddr, [Option<Handle>; 2])>,
    /// Those that one client has alone, by `Lane::pool`.
    pools: [Pool; 3],
    /// What all workers have of these; known once one was wanted.
    exclusive_bounds: Option<Arc<ExclusiveBounds>>,
    log: NodeLog,
}

/// What is said of a node at most so often.
#[derive(Debug, Default)]
pub(super) struct NodeLog {
    pub(super) late: LogThrottle,
    pub(super) lost: LogThrottle,
}

/// The connections of a worker.
#[derive(Debug)]
pub(super) struct Links {
    all: Slab<Box<Link>>,
    /// By node number.
    nodes: Vec<NodeLinks>,
    /// Those with something to send.
    dirty: Vec<Handle>,
    /// Requests whose connection was gone when they were handed over.
    strays: Vec<FinishedRequest>,
    outages: Outages,
}

impl Links {
    pub(super) fn new() -> Self {
        Self { all: Slab::new(), nodes: Vec::new(), dirty: Vec::new(), strays: Vec::new(), outages: Outages::default() }
    }

    #[inline]
    pub(super) fn get(&self, handle: Handle) -> Option<&Link> {
        self.all.get(handle).map(|link| &**link)
    }

    #[inline]
    pub(super) fn get_mut(&mut self, handle: Handle) -> Option<&mut Link> {
        self.all.get_mut(handle).map(|link| &mut **link)
    }

    /// The link, where it is up.
    pub(super) fn up(&self, handle: Handle) -> Option<&Link> {
        self.get(handle).filter(|link| link.phase == Phase::Up)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Handle, &Link)> {
        self.all.iter().map(|(handle, link)| (handle, &**link))
    }

    pub(super) fn handles(&self) -> Vec<Handle> {
        self.all.handles()
    }

    // ---- which is for what ----

    /// The topology has nodes up to this number.
    pub(super) fn know_nodes(&mut self, bound: usize) {
        self.nodes.resize_with(self.nodes.len().max(bound), Default::default);
    }

    /// A connection that one client at a time has alone.
    pub(super) fn insert(&mut self, link: Link) -> Handle {
        self.all.insert(Box::new(link))
    }

    /// The connection of a shared lane.
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

    /// Adds the connection of a shared lane, where there is none.
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

    /// The connection to a replica.
    pub(super) fn replica(&self, node: NodeId, address: SocketAddr, resp3: bool) -> Option<Handle> {
        let replicas = &self.nodes.get(node.index())?.replicas;
        replicas.iter().find(|(known, _)| *known == address)?.1[usize::from(resp3)]
    }

    /// Adds the connection to a replica, where there is none.
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

    /// Removes a connection from all tables but its pool's.
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

    /// The main connection of RESP2, in whatever state.
    pub(super) fn main(&self, node: NodeId) -> Option<Handle> {
        self.shared(node, Lane::Main, false)
    }

    /// A main connection to this process of the node, where one is up.
    pub(super) fn main_to(&self, node: NodeId, run_id: Option<&str>) -> Option<Handle> {
        let mains = self.nodes.get(node.index())?.main;
        mains.into_iter().flatten().find(|main| self.up(*main).is_some_and(|link| link.run_id.as_deref() == run_id))
    }

    /// The connection of subscriptions, where it is up.
    pub(super) fn pubsub(&self, node: NodeId) -> Option<Handle> {
        self.shared(node, Lane::Pubsub, true).filter(|link| self.up(*link).is_some())
    }

    /// Those of all nodes.
    pub(super) fn pubsubs(&self) -> Vec<Handle> {
        self.nodes.iter().filter_map(|node| node.pubsub).filter(|link| self.up(*link).is_some()).collect()
    }

    /// Whether commands to a node are executed at once, as far as this worker knows.
    pub(super) fn is_up(&self, node: NodeId) -> bool {
        let mains = self.nodes.get(node.index()).map(|node| node.main).unwrap_or_default();
        mains.iter().flatten().any(|main| self.get(*main).is_some_and(|link| link.phase == Phase::Up || link.renewing))
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

    /// Whether commands to a node may be handed over: it is up, or is being connected for the first time since it was
    /// last up.
    pub(super) fn takes_commands(&self, node: NodeId) -> bool {
        let mains = self.nodes.get(node.index()).map(|node| node.main).unwrap_or_default();
        mains.iter().flatten().any(|main| self.get(*main).is_some_and(Link::takes_commands))
    }

    /// The pool of an exclusive lane.
    pub(super) fn pool(&self, node: NodeId, lane: Lane) -> Option<&Pool> {
        self.nodes.get(node.index())?.pools.get(lane.pool()?)
    }

    /// The same, to be changed.
    pub(super) fn pool_mut(&mut self, node: NodeId, lane: Lane) -> Option<&mut Pool> {
        self.nodes.get_mut(node.index())?.pools.get_mut(lane.pool()?)
    }

    /// All pools.
    pub(super) fn pools_mut(&mut self) -> impl Iterator<Item = (NodeId, Lane, &mut Pool)> {
        let lanes = [Lane::Large, Lane::Watch, Lane::Blocking];
        let nodes = self.nodes.iter_mut().enumerate();
        nodes.flat_map(move |(number, node)| {
            node.pools.iter_mut().zip(lanes).map(move |(pool, lane)| (NodeId(number as u16), lane, pool))
        })
    }

    /// What all workers have of exclusive connections to a node; `ask` says it the first time.
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

    // ---- which have something to send ----

    /// Hands a request to a connection. One whose connection is gone is over ([`Self::take_strays`]), because somebody
    /// waits for its end.
    #[inline]
    pub(super) fn push(&mut self, handle: Handle, request: Request<'_>) {
        match self.get_mut(handle) {
            Some(link) => link.push(request),
            None => self.strays.push(FinishedRequest::new(request.into_parts().2, Outcome::Never, false)),
        }
        self.mark(handle);
    }

    /// The requests that found their connection gone.
    #[inline]
    pub(super) fn take_strays(&mut self) -> Option<Vec<FinishedRequest>> {
        (!self.strays.is_empty()).then(|| std::mem::take(&mut self.strays))
    }

    /// A connection has something to send.
    #[inline]
    pub(super) fn mark(&mut self, handle: Handle) {
        if let Some(link) = self.all.get_mut(handle)
            && !link.dirty
        {
            link.dirty = true;
            self.dirty.push(handle);
        }
    }

    /// Whether a client must wait before it adds to this connection; then it is told when it may.
    pub(super) fn is_full(&mut self, handle: Handle, client: Handle, high: usize) -> bool {
        let Some(link) = self.get_mut(handle).filter(|link| !link.has_room(high)) else { return false };
        if !link.waiters.contains(&client) {
            link.waiters.push(client);
        }
        self.mark(handle);
        true
    }

    /// How many are marked.
    pub(super) const fn marked_count(&self) -> usize {
        self.dirty.len()
    }

    /// Those that are marked, each once. One that was flushed in the middle of the turn and has more to send since is
    /// listed twice.
    pub(super) fn marked(&mut self) -> impl Iterator<Item = (Handle, &Link)> {
        let all = &mut self.all;
        self.dirty.retain(|handle| all.get_mut(*handle).is_some_and(|link| std::mem::take(&mut link.dirty)));
        let all = &self.all;
        self.dirty.iter().filter_map(|handle| Some((*handle, &**all.get(*handle)?)))
    }

    /// Takes the list of marked ones.
    pub(super) fn take_marked(&mut self) -> Vec<Handle> {
        std::mem::take(&mut self.dirty)
    }

    /// Gives the list back, empty, to be filled again.
    pub(super) fn reuse(&mut self, list: Vec<Handle>) {
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
            armed: 0,
        };
        links.push(Handle::NONE, Request::of_ours(b"SET k v", 0, pending));
        let strays = links.take_strays().expect("one");
        assert_eq!((strays.len(), strays[0].outcome()), (1, Outcome::Never));
        assert!(links.take_strays().is_none());
    }
}
