//! Host names of servers of nodes with replicas: a name may resolve to another address than before, or not yet.
//!
//! A name is looked up again while its last server is silent. Look-ups may be slow, so they run on blocking threads.
//! The node's monitor decides what a new address means. Names of nodes without replicas need no decision;
//! [`crate::health`] looks them up.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use switchyard_policy::failover::Event;
use tokio::sync::mpsc;
use tracing::info;

use super::MonitoredNode;
use crate::running::Running;

/// Capacity for results. Each name is resolved at most once at a time.
const QUEUE: usize = 64;

/// Index of the node, and of the name within the node.
type Place = (usize, usize);

/// Result of resolving a name.
pub(super) struct Resolution {
    place: Place,
    address: Result<SocketAddr, String>,
}

pub(super) struct Names {
    under_way: BTreeSet<Place>,
    sender: mpsc::Sender<Resolution>,
    found: mpsc::Receiver<Resolution>,
}

impl Names {
    pub(super) fn new() -> Self {
        let (sender, found) = mpsc::channel(QUEUE);
        Self { under_way: BTreeSet::new(), sender, found }
    }

    /// Starts look-ups of names without a server, or with a silent one.
    pub(super) fn start_resolving(&mut self, watched: &[MonitoredNode]) {
        for (index, node) in watched.iter().enumerate() {
            for (number, name) in node.names.iter().enumerate() {
                let is_in_doubt = name.address.is_none_or(|address| node.watch.is_silent(&address));
                if !is_in_doubt || !self.under_way.insert((index, number)) {
                    continue;
                }
                let (endpoint, sender) = (name.endpoint.clone(), self.sender.clone());
                tokio::task::spawn_blocking(move || {
                    let found = Resolution { place: (index, number), address: endpoint.resolve() };
                    // Sending fails if the monitoring has ended.
                    let _ = sender.blocking_send(found);
                });
            }
        }
    }

    /// Waits for the next result.
    pub(super) async fn found(&mut self) -> Option<Resolution> {
        self.found.recv().await
    }

    /// Stores the address of a name. Returns the index of the node and the event for its monitor, or `None` if the
    /// address is unchanged or belongs to another node's server.
    pub(super) fn note(
        &mut self,
        found: Resolution,
        watched: &mut [MonitoredNode],
        running: &Running,
    ) -> Option<(usize, Event<SocketAddr>)> {
        self.under_way.remove(&found.place);
        let (index, number) = found.place;
        let to = found.address.ok()?;
        let of_others = watched
            .iter()
            .enumerate()
            .filter(|(other, _)| *other != index)
            .any(|(_, node)| node.watch.servers().any(|known| *known == to));
        let node = watched.get_mut(index)?;
        let id = node.node;
        let is_primary_of_another = running
            .with(|router| {
                router.node_access().iter().any(|(other, access)| *other != id && access.address == Some(to))
            })
            .unwrap_or(false);
        let name = node
            .names
            .get_mut(number)
            .filter(|name| name.address != Some(to) && !of_others && !is_primary_of_another)?;
        let from = name.address.replace(to);
        if let Some(tls) = &node.access.tls {
            tls.note_host(to, name.endpoint.host());
        }
        info!(node = %node.name, server = %name.endpoint, address = %to, "the name of a server resolves to another address now");
        Some((index, Event::Renamed { from, to, is_first: name.is_first }))
    }
}
