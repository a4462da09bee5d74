//! Replicas of members of a cluster, as they are published to the workers.
//!
//! Apart from the servers of replicated nodes, whose primary the router follows itself: here the cluster names the
//! primary, and slots change their owner at any time. A member that has just gained slots may have sent nothing of their
//! keys to its replicas yet. So a change of the map excludes its replicas from reads, in the same snapshot, and only a
//! check that began later readmits them.

use std::collections::BTreeMap;
use std::sync::Arc;

use switchyard_policy::topology::{NodeId, Slot, Topology};

use crate::Router;
use crate::settings::Servers;
use crate::shared::RoutingSnapshot;

/// Whether a member owns a slot that it did not own before.
fn has_gained(node: NodeId, before: &Topology, after: &Topology) -> bool {
    Slot::all().any(|slot| after.owner(slot) == node && before.owner(slot) != node)
}

/// Adopts the result of a check that began at this epoch, unless the member has gained slots since.
fn adopt(all: &mut BTreeMap<NodeId, Servers>, node: NodeId, checked: Servers, epoch: u64) {
    if let Some(known) = all.get_mut(&node).filter(|known| known.gained_epoch <= epoch) {
        *known = Servers { gained_epoch: known.gained_epoch, ..checked };
    }
}

impl RoutingSnapshot {
    /// Returns the servers of members under another map.
    pub(crate) fn servers_under(&self, topology: &Topology) -> Arc<BTreeMap<NodeId, Servers>> {
        let gaining: Vec<NodeId> =
            self.servers.keys().copied().filter(|node| has_gained(*node, &self.topology, topology)).collect();
        if gaining.is_empty() {
            return Arc::clone(&self.servers);
        }
        let mut servers = (*self.servers).clone();
        for node in gaining {
            servers.insert(node, Servers { gained_epoch: topology.epoch(), ..Servers::default() });
        }
        Arc::new(servers)
    }
}

impl Router {
    /// Whether clients may read from replicas, if there are any.
    pub fn are_replicas_read(&self) -> bool {
        self.shared.are_replicas_read(&self.shared.routing().live)
    }

    /// Begins a check of the replicas of a member, which are not read until it ends. Returns the epoch of the map, or
    /// `None` for an unknown member.
    pub fn check_replicas(&self, node: NodeId) -> Option<u64> {
        let mut epoch = None;
        self.change_replicas(|topology, all| {
            if topology.node(node).is_some() {
                epoch = Some(topology.epoch());
                all.insert(node, Servers { gained_epoch: topology.epoch(), ..Servers::default() });
            }
        });
        epoch
    }

    /// Whether a check of a member's replicas that began at this epoch still counts: the member has gained no slots
    /// since.
    pub fn is_check_valid(&self, node: NodeId, epoch: u64) -> bool {
        self.shared.routing().servers.get(&node).is_some_and(|servers| servers.gained_epoch <= epoch)
    }

    /// Publishes the result of a check of a member's replicas that began at this epoch, if it still counts.
    pub fn set_replicas(&self, node: NodeId, checked: Servers, epoch: u64) {
        self.change_replicas(|_, all| adopt(all, node, checked, epoch));
    }

    /// Ends reads from replicas of a member.
    pub fn forget_replicas(&self, node: NodeId) {
        self.change_replicas(|_, all| drop(all.remove(&node)));
    }

    fn change_replicas(&self, change: impl FnOnce(&Topology, &mut BTreeMap<NodeId, Servers>)) {
        self.shared.change_routing(|routing| {
            let mut servers = (*routing.servers).clone();
            change(&routing.topology, &mut servers);
            RoutingSnapshot { servers: Arc::new(servers), ..routing.clone() }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use switchyard_policy::cluster::{Member, Shard, View};
    use switchyard_resp::command::CommandTable;

    use super::*;

    fn shard(slots: std::ops::RangeInclusive<u16>, id: &str, port: u16) -> Shard {
        let primary = Member { id: id.to_owned(), host: "10.0.0.1".to_owned(), port };
        Shard { slots, primary, replicas: Vec::new() }
    }

    fn with_replica(port: u16) -> Servers {
        Servers { readable: vec![SocketAddr::from(([10, 0, 0, 1], port))], ..Servers::default() }
    }

    #[test]
    fn replicas_of_a_member_with_new_slots_are_not_read_until_another_check() {
        let mut view = View::new(&[shard(0..=99, "a", 1), shard(100..=16383, "b", 2)], 0).expect("a view");
        let nodes = [NodeId(0), NodeId(1)];
        let before = RoutingSnapshot {
            topology: Arc::clone(view.topology()),
            live: Arc::default(),
            overrides: Arc::default(),
            commands: Arc::new(CommandTable::builtin()),
            servers: Arc::new(nodes.map(|node| (node, with_replica(node.0 + 3))).into()),
            moves: Arc::default(),
            held: None,
            configured_users: Arc::default(),
        };
        assert!(Arc::ptr_eq(&before.servers_under(view.topology()), &before.servers), "no slot has moved");
        let epoch = view.topology().epoch();
        assert!(view.moved(Slot::new(100).expect("a slot"), nodes[0]));
        let mut servers = (*before.servers_under(view.topology())).clone();
        assert_eq!(nodes.map(|node| servers[&node].readable.len()), [0, 1]);
        // A check that began before the member had the slot.
        nodes.iter().for_each(|node| adopt(&mut servers, *node, with_replica(9), epoch));
        assert_eq!(nodes.map(|node| servers[&node].readable.len()), [0, 1]);
        assert_eq!(servers[&nodes[1]].readable[0].port(), 9);
        adopt(&mut servers, nodes[0], with_replica(9), view.topology().epoch());
        assert_eq!(servers[&nodes[0]].readable.len(), 1);
        adopt(&mut servers, NodeId(7), with_replica(9), view.topology().epoch());
        assert_eq!(servers.len(), 2, "a member that has left");
    }
}
