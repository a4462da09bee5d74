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
        self.change_replicas(|_, all| {
            if let Some(known) = all.get_mut(&node).filter(|known| known.gained_epoch <= epoch) {
                *known = Servers { gained_epoch: known.gained_epoch, ..checked };
            }
        });
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
    use switchyard_policy::cluster::{Member, Shard, View};

    use super::*;

    fn shard(slots: std::ops::RangeInclusive<u16>, id: &str, port: u16) -> Shard {
        let primary = Member { id: id.to_owned(), host: "10.0.0.1".to_owned(), port };
        Shard { slots, primary, replicas: Vec::new() }
    }

    #[test]
    fn only_members_with_new_slots_have_gained() {
        let mut view = View::new(&[shard(0..=99, "a", 1), shard(100..=16383, "b", 2)], 0).expect("a view");
        let before = Arc::clone(view.topology());
        assert!(view.moved(Slot::new(100).expect("a slot"), NodeId(0)));
        let after = view.topology();
        assert_eq!([0, 1].map(|node| has_gained(NodeId(node), &before, after)), [true, false]);
        assert_eq!([0, 1].map(|node| has_gained(NodeId(node), after, &before)), [false, true]);
    }
}
