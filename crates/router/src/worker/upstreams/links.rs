//! All connections of a worker to the nodes, and those with a role, by node.

use std::net::SocketAddr;

use switchyard_policy::topology::NodeId;

use super::Link;
use super::kind::Task;
use crate::lane::Lane;
use crate::slab::{Handle, Slab};
use crate::worker::log_throttle::LogThrottle;
use crate::worker::turn::Turn;

/// Connections to one node, by role.
#[derive(Debug, Default)]
struct NodeLinks {
    /// By protocol version, like `slow` and the connections to replicas.
    main: [Option<Handle>; 2],
    slow: [Option<Handle>; 2],
    pubsub: Option<Handle>,
    fills: Option<Handle>,
    replicas: Vec<(SocketAddr, [Option<Handle>; 2])>,
    log: NodeLog,
}

/// Throttled logs about a node.
#[derive(Debug, Default)]
pub(super) struct NodeLog {
    pub(super) late: LogThrottle,
    pub(super) lost: LogThrottle,
}

/// All connections, in any state.
#[derive(Debug)]
pub(in crate::worker) struct Links {
    all: Slab<Box<Link>>,
    /// By node number.
    nodes: Vec<NodeLinks>,
}

impl Links {
    pub(super) fn new() -> Self {
        Self { all: Slab::new(), nodes: Vec::new() }
    }

    #[inline]
    pub(in crate::worker) fn get(&self, handle: Handle) -> Option<&Link> {
        self.all.get(handle).map(|link| &**link)
    }

    #[inline]
    pub(super) fn get_mut(&mut self, handle: Handle) -> Option<&mut Link> {
        self.all.get_mut(handle).map(|link| &mut **link)
    }

    /// Returns the link if it is up.
    pub(in crate::worker) fn up(&self, handle: Handle) -> Option<&Link> {
        self.get(handle).filter(|link| link.is_up())
    }

    pub(in crate::worker) fn iter(&self) -> impl Iterator<Item = (Handle, &Link)> {
        self.all.iter().map(|(handle, link)| (handle, &**link))
    }

    pub(in crate::worker) fn handles(&self) -> Vec<Handle> {
        self.all.handles()
    }

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
    pub(in crate::worker) fn shared(&self, node: NodeId, lane: Lane, resp3: bool) -> Option<Handle> {
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
    pub(in crate::worker) fn main(&self, node: NodeId) -> Option<Handle> {
        self.shared(node, Lane::Main, false)
    }

    /// Returns a connected main connection to this process of the node.
    pub(in crate::worker) fn main_to(&self, node: NodeId, run_id: Option<&str>) -> Option<Handle> {
        let mains = self.nodes.get(node.index())?.main;
        mains.into_iter().flatten().find(|main| self.up(*main).is_some_and(|link| link.run_id() == run_id))
    }

    /// Returns the connected connection for subscriptions.
    pub(in crate::worker) fn pubsub(&self, node: NodeId) -> Option<Handle> {
        self.shared(node, Lane::Pubsub, true).filter(|link| self.up(*link).is_some())
    }

    /// Returns the connected connections for subscriptions of all nodes.
    pub(in crate::worker) fn pubsubs(&self) -> Vec<Handle> {
        self.nodes.iter().filter_map(|node| node.pubsub).filter(|link| self.up(*link).is_some()).collect()
    }

    /// Whether commands to a node would be executed at once, as far as this worker knows.
    pub(in crate::worker) fn is_up(&self, node: NodeId) -> bool {
        let mains = self.nodes.get(node.index()).map(|node| node.main).unwrap_or_default();
        mains.iter().flatten().any(|main| self.get(*main).is_some_and(|link| link.life.is_serving()))
    }

    /// Returns the nodes that may have keys, and all other connected nodes.
    pub(in crate::worker) fn reachable(&self, turn: &Turn) -> Vec<NodeId> {
        let all = turn.routing().topology.nodes().map(|node| node.id);
        all.filter(|node| turn.data_nodes().has(*node) || self.is_up(*node)).collect()
    }

    /// Whether commands to any node would be executed at once.
    pub(in crate::worker) fn is_any_up(&self, turn: &Turn) -> bool {
        turn.routing().topology.nodes().any(|node| self.is_up(node.id))
    }

    /// Whether commands to a node may be sent: it is up, or its first reconnect since then is in progress.
    pub(in crate::worker) fn takes_commands(&self, node: NodeId) -> bool {
        let mains = self.nodes.get(node.index()).map(|node| node.main).unwrap_or_default();
        mains.iter().flatten().any(|main| self.get(*main).is_some_and(Link::takes_commands))
    }

    pub(super) fn log(&mut self, node: NodeId) -> Option<&mut NodeLog> {
        self.nodes.get_mut(node.index()).map(|node| &mut node.log)
    }

    /// Whether the node still watches on this connection for this client.
    pub(in crate::worker) fn is_watching(&self, handle: Handle, link: Handle, node: NodeId) -> bool {
        let is_up = |l: &Link| l.is_up() && l.node == node && !l.requests.is_head_expired();
        let watches = |l: &Link| is_up(l) && l.task() == Task::Watching && l.holder() == handle;
        self.get(link).is_some_and(watches)
    }
}
