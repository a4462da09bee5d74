//! New credentials for a node: its connections are replaced one at a time, and no command is lost.
//!
//! A shared connection is renewed between two commands: commands in flight are answered on the old one, later ones wait
//! in its buffer and are sent on the new one. So a client's commands keep their order, as on a first connection. It
//! costs a pause of the longest command in flight plus a connect.
//!
//! There is no second connection in parallel, because two connections to a node have no order between them.

use switchyard_policy::topology::NodeId;
use tracing::info;

use super::Upstreams;
use crate::lane::Lane;
use crate::settings::RuntimeSettings;
use crate::slab::Handle;
use crate::worker::turn::Turn;

impl Upstreams {
    /// Marks the connections to nodes whose user, password or TLS has changed.
    pub(in crate::worker) fn mark_stale(&mut self, turn: &Turn, before: &RuntimeSettings) {
        let live = turn.routing().live.clone();
        let changed = |node: NodeId| match (before.nodes.get(&node), live.nodes.get(&node)) {
            (Some(old), Some(new)) => {
                (&old.username, &old.password, &old.tls) != (&new.username, &new.password, &new.tls)
            }
            _ => false,
        };
        for handle in self.links.handles() {
            // A connection with subscriptions stays: a new one would miss messages in between.
            let renews = |lane: Lane| {
                lane.is_exclusive() || matches!(lane, Lane::Main | Lane::Slow | Lane::Replica | Lane::Fills)
            };
            if let Some(link) = self.get_mut(handle).filter(|l| l.is_up() && renews(l.lane) && changed(l.node)) {
                link.life.becomes_stale();
            }
        }
    }

    /// Renews a connection as soon as no command is affected.
    pub(super) fn tick_stale(&mut self, turn: &Turn, handle: Handle) {
        let Some(link) = self.get_mut(handle) else { return };
        if link.lane.is_exclusive() {
            // Its holder keeps it; after that it is not reused.
            if link.holder() == Handle::NONE && link.is_idle() {
                self.drop_link(turn, handle);
            }
            return;
        }
        if link.lane == Lane::Fills {
            // Reads that wait for a fill are answered by the node. The next fill opens a new connection.
            self.drop_link(turn, handle);
            return;
        }
        if !link.life.is_retiring() && link.unsent() == 0 {
            link.life.retire();
            // Later commands are sent on the new connection.
            link.requests.continue_on_another();
        }
        if !link.life.is_retiring() || !link.requests.is_quiet() {
            return;
        }
        let (node, lane, connection) = (link.node, link.lane, link.connection(turn.index()));
        link.socket.close_with_notice(turn);
        link.incoming.clear();
        link.incoming.next_body();
        link.goes_down();
        link.life.is_replaced();
        if lane != Lane::Replica {
            turn.shared().connections.remove(&connection);
        }
        info!(node = %turn.node_name(node), "reconnecting with the new credentials");
        self.connect(turn, handle);
    }
}
