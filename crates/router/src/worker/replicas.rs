//! Nodes with replicas: following the primary, and reading from replicas.
//!
//! The roles are decided elsewhere (`policy::failover`) and come with the snapshot. A change of primary is a hard cut:
//! connections to the old one are closed at once, because its later acknowledgements are lost when it becomes a
//! replica. A replica that is no longer fit for reads gets no new commands; those in flight are answered.

use std::net::SocketAddr;

use switchyard_policy::topology::NodeId;
use tracing::debug;

use super::Worker;
use super::upstream::{Lane, Link, Phase};
use crate::settings::Reads;
use crate::shared::RoutingSnapshot;
use crate::slab::Handle;

/// Delay before another attempt to reach a replica.
const RETRY_US: u64 = 1_000_000;

impl RoutingSnapshot {
    /// Returns the address of a connection to a node: `replica`, or the primary, if it is known.
    pub(crate) fn address_of(&self, node: NodeId, replica: Option<SocketAddr>) -> Option<SocketAddr> {
        match (replica, self.servers.get(&node)) {
            (Some(replica), _) => Some(replica),
            (None, Some(servers)) => servers.primary,
            (None, None) => self.live.nodes.get(&node).and_then(|access| access.address),
        }
    }
}

impl Worker {
    /// Closes connections to servers that have changed their role.
    pub(super) fn follow_servers(&mut self) {
        for handle in self.links.handles() {
            let Some(link) = self.links.get_mut(handle) else { continue };
            let (node, phase) = (link.node, link.phase);
            if let Some(replica) = link.replica() {
                let is_readable = self.turn.routing().servers.get(&node).is_some_and(|s| s.readable.contains(&replica));
                if !is_readable && phase != Phase::Up {
                    self.replica_failed(handle, "it is no longer read");
                    self.drop_link(handle);
                }
                continue;
            }
            let Some(servers) = self.turn.routing().servers.get(&node) else { continue };
            if link.address == servers.primary {
                continue;
            }
            let primary = servers.primary.map_or_else(|| "unknown".into(), |primary| primary.to_string());
            match phase {
                // A main connection that breaks is reconnected at once, to the new address.
                Phase::Up => self.break_link(handle, &format!("its primary is now {primary}")),
                Phase::Waiting { .. } => {
                    link.failures = 0;
                    self.connect(handle);
                }
                _ => {
                    if let Some(fd) = link.fd.take() {
                        self.poll.remove(&fd);
                    }
                    link.greeting.clear();
                    link.input.clear();
                    link.failures = 0;
                    self.connect(handle);
                }
            }
        }
    }

    /// Returns the connection for a read of `client`: one to a replica, or `None` for the primary. Returns an error if
    /// the client's read policy allows only replicas and none can be reached. A client that watches keys reads from the
    /// primary: the data of a replica may be older than the WATCH, and EXEC would succeed although the client has not
    /// seen the value that it replaces.
    pub(super) fn replica_for(&mut self, client: Handle, node: NodeId) -> Result<Option<Handle>, String> {
        let Some((reads, resp3)) = self.clients.get(client).filter(|c| !c.watches()).map(|c| (c.reads, c.resp3)) else {
            return Ok(None);
        };
        if self.clients.get(client).is_some_and(|c| c.tracked.is_some()) {
            return Ok(None); // a replica may still return values that the client has invalidated
        }
        let routing = self.turn.routing().clone();
        let servers = routing.servers.get(&node);
        let readable = servers.map_or(&[][..], |s| &s.readable);
        if reads == Reads::Primary || (reads == Reads::Nearest && servers.is_none_or(|s| s.primary_is_nearest)) {
            return Ok(None);
        }
        // A client stays with one replica as long as possible: another replica may be further behind, and the client
        // would see older data.
        let first = if reads == Reads::Nearest { 0 } else { client.index as usize };
        for place in 0..readable.len() {
            let link = self.replica_link(node, readable[(first + place) % readable.len()], resp3, reads);
            if self.links.get(link).is_some_and(|l| l.takes_commands()) {
                return Ok(Some(link));
            }
        }
        match reads {
            Reads::Replica => {
                Err(format!("NODEDOWN no replica of {} can be read (reads = \"replica\")", self.turn.node_name(node)))
            }
            _ => Ok(None),
        }
    }

    /// Returns the connection to a replica. Creates it, not necessarily connected, if it is missing.
    fn replica_link(&mut self, node: NodeId, address: SocketAddr, resp3: bool, reads: Reads) -> Handle {
        if let Some(handle) = self.links.replica(node, address, resp3) {
            return handle;
        }
        let link = Link::new(
            node,
            Lane::Replica,
            resp3,
            self.turn.routing().live.database,
            self.turn.counters().replicas(node),
            self.turn.now_us(),
        );
        let mut link = Link::to_replica(address, link);
        // Clients that may read from the primary do so until the connection is up.
        link.failures = u32::from(reads != Reads::Replica);
        let handle = self.links.insert_replica(link, address);
        self.connect(handle);
        handle
    }

    /// Handles a failed attempt to reach a replica. Reads go elsewhere until another attempt succeeds.
    pub(super) fn replica_failed(&mut self, handle: Handle, why: &str) {
        let Some(link) = self.links.get_mut(handle) else { return };
        if let Some(fd) = link.fd.take() {
            self.poll.remove(&fd);
        }
        link.phase = Phase::Waiting { until_us: self.turn.now_us() + RETRY_US };
        let (node, replica) = (link.node, link.replica());
        let name = self.turn.node_name(node);
        let replica = replica.map_or_else(String::new, |r| r.to_string());
        debug!(node = %name, replica, reason = why, "replica cannot be reached");
        self.fail_all(handle, &format!("NODEDOWN replica {replica} of {name} cannot be reached: {why}"), 0);
    }
}
