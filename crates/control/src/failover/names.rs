//! Names of the servers of nodes that have replicas: a name may lead elsewhere than it did, or not resolve yet.
//!
//! A name is looked up again while the server that it led to is silent. A look-up may take its time, so it is made on a
//! thread for such work. The watch of the node decides what a new address means. The health of nodes looks up the names
//! of nodes without replicas ([`crate::health`]): these need no decision.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use switchyard_policy::failover::Event;
use tokio::sync::mpsc;
use tracing::info;

use super::Watched;
use crate::running::Running;

/// Outcomes that may wait; each name has one look-up under way at most.
const QUEUE: usize = 64;

/// A name of a node, by the places of both.
type Place = (usize, usize);

/// A look-up that has ended.
pub(super) struct Found {
    place: Place,
    address: Result<SocketAddr, String>,
}

/// Look-ups of names.
pub(super) struct Names {
    under_way: BTreeSet<Place>,
    sender: mpsc::Sender<Found>,
    found: mpsc::Receiver<Found>,
}

impl Names {
    pub(super) fn new() -> Self {
        let (sender, found) = mpsc::channel(QUEUE);
        Self { under_way: BTreeSet::new(), sender, found }
    }

    /// Begins to look up the names that lead nowhere, or to servers that are silent.
    pub(super) fn look_up(&mut self, watched: &[Watched]) {
        for (index, node) in watched.iter().enumerate() {
            for (number, name) in node.names.iter().enumerate() {
                let is_in_doubt = name.address.is_none_or(|address| node.watch.is_silent(&address));
                if !is_in_doubt || !self.under_way.insert((index, number)) {
                    continue;
                }
                let (endpoint, sender) = (name.endpoint.clone(), self.sender.clone());
                tokio::task::spawn_blocking(move || {
                    let found = Found { place: (index, number), address: endpoint.resolve() };
                    // Nobody listens any more where the watching has ended.
                    let _ = sender.blocking_send(found);
                });
            }
        }
    }

    /// The next look-up that ends.
    pub(super) async fn found(&mut self) -> Option<Found> {
        self.found.recv().await
    }

    /// Takes note of where a name leads. Gives the place of the node, and what its watch should know; `None` where that
    /// is no news, or another node's server.
    pub(super) fn note(
        &mut self,
        found: Found,
        watched: &mut [Watched],
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
        info!(node = %node.name, server = %name.endpoint, address = %to, "the name of a server leads to another address now");
        Some((index, Event::Renamed { from, to, is_first: name.is_first }))
    }
}
