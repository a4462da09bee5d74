//! Nodes with replicas: following the primary, and reading from replicas.
//!
//! The roles are decided elsewhere (`policy::failover`) and come with the snapshot. A change of primary is a hard cut:
//! connections to the old one are closed at once, because its later acknowledgements are lost when it becomes a
//! replica. A replica that is no longer fit for reads gets no new commands; those in flight are answered.

use std::net::SocketAddr;

use switchyard_policy::topology::NodeId;
use tracing::debug;

use super::link::Phase;
use super::{Link, Upstreams};
use crate::lane::Lane;
use crate::settings::{Reads, ReplicaMember, Servers};
use crate::shared::RoutingSnapshot;
use crate::slab::Handle;
use crate::worker::turn::Turn;

/// Delay before another attempt to reach a replica.
const RETRY_US: u64 = 1_000_000;

impl RoutingSnapshot {
    /// Returns the address of a connection to a node: `replica`, or the primary, if it is known.
    pub(crate) fn address_of(&self, node: NodeId, replica: Option<SocketAddr>) -> Option<SocketAddr> {
        match (replica, self.followed(node)) {
            (Some(replica), _) => Some(replica),
            (None, Some(servers)) => servers.primary,
            (None, None) => self.live.nodes.get(&node).and_then(|access| access.address),
        }
    }

    /// Servers of a node whose primary the router follows itself. A cluster names its primaries.
    pub(crate) fn followed(&self, node: NodeId) -> Option<&Servers> {
        self.servers.get(&node).filter(|_| !self.topology.is_of_cluster())
    }

    /// A replica as a member of a cluster.
    pub(crate) fn replica_member(&self, node: NodeId, replica: SocketAddr) -> Option<&ReplicaMember> {
        self.servers.get(&node)?.members.get(&replica)
    }
}

impl Upstreams {
    /// Closes connections to servers that have changed their role.
    pub(in crate::worker) fn follow_servers(&mut self, turn: &Turn) {
        for handle in self.links.handles() {
            let Some(link) = self.get_mut(handle) else { continue };
            let (node, phase) = (link.node, link.phase());
            if let Some(replica) = link.replica {
                let is_readable = turn.routing().servers.get(&node).is_some_and(|s| s.readable.contains(&replica));
                if !is_readable && phase != Phase::Up {
                    self.replica_failed(turn, handle, "it is no longer read");
                    self.drop_link(turn, handle);
                }
                continue;
            }
            let Some(servers) = turn.routing().followed(node) else { continue };
            if link.address == servers.primary {
                continue;
            }
            let primary = servers.primary.map_or_else(|| "unknown".into(), |primary| primary.to_string());
            match phase {
                // A main connection that breaks is reconnected at once, to the new address.
                Phase::Up => self.break_link(turn, handle, &format!("its primary is now {primary}")),
                Phase::Waiting { .. } => {
                    link.life.set_failed(false);
                    self.connect(turn, handle);
                }
                _ => {
                    link.socket.close(turn);
                    link.handshake.abort();
                    link.incoming.clear();
                    link.life.set_failed(false);
                    self.connect(turn, handle);
                }
            }
        }
    }

    /// Returns the connection to a replica for a read, or `None` for the primary. Returns an error if the read policy
    /// allows only replicas and none can be reached.
    pub(in crate::worker) fn replica_for(
        &mut self,
        turn: &Turn,
        client: Handle,
        reads: Reads,
        resp3: bool,
        node: NodeId,
    ) -> Result<Option<Handle>, String> {
        let servers = turn.routing().servers.get(&node);
        let readable = servers.map_or(&[][..], |s| &s.readable);
        if reads == Reads::Primary || (reads == Reads::Nearest && servers.is_none_or(|s| s.primary_is_nearest)) {
            return Ok(None);
        }
        // A client stays with one replica as long as possible: another replica may be further behind, and the client
        // would see older data.
        let first = if reads == Reads::Nearest { 0 } else { client.index as usize };
        for place in 0..readable.len() {
            let link = self.replica_link(turn, node, readable[(first + place) % readable.len()], resp3, reads);
            if self.get(link).is_some_and(|l| l.takes_commands()) {
                return Ok(Some(link));
            }
        }
        match reads {
            Reads::Replica => {
                Err(format!("NODEDOWN no replica of {} can be read (reads = \"replica\")", turn.node_name(node)))
            }
            _ => Ok(None),
        }
    }

    fn replica_link(&mut self, turn: &Turn, node: NodeId, address: SocketAddr, resp3: bool, reads: Reads) -> Handle {
        if let Some(handle) = self.links.replica(node, address, resp3) {
            return handle;
        }
        let mut link = Link::new(
            node,
            Lane::Replica,
            resp3,
            turn.routing().live.database,
            turn.counters().replicas(node),
            turn.now_us(),
        );
        link.replica = Some(address);
        // Clients that may read from the primary do so until the connection is up.
        link.life.set_failed(reads != Reads::Replica);
        let handle = self.links.insert_replica(link, address);
        self.connect(turn, handle);
        handle
    }

    /// Handles a failed attempt to reach a replica. Reads go elsewhere until another attempt succeeds.
    pub(super) fn replica_failed(&mut self, turn: &Turn, handle: Handle, why: &str) {
        let Some(link) = self.get_mut(handle) else { return };
        link.socket.close(turn);
        link.life.wait_until(turn.now_us() + RETRY_US);
        let (node, replica) = (link.node, link.replica);
        let name = turn.node_name(node);
        let replica = replica.map_or_else(String::new, |r| r.to_string());
        debug!(node = %name, replica, reason = why, "replica cannot be reached");
        self.fail_all(turn, handle, &format!("NODEDOWN replica {replica} of {name} cannot be reached: {why}"), 0);
    }
}
