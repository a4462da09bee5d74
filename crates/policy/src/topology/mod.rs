//! Placement: key -> slot -> owner, at an epoch.
//!
//! A [`Topology`] is an immutable value. A change of placement creates the next one, one epoch higher, and publishes
//! it. Workers swap a pointer and never lock. The owner of every slot is stored in an array rather than computed from
//! the node list (modulo, ring, rendezvous): a lookup is one load, a slot can move alone, and joining or leaving nodes
//! move no slots by themselves. [`Topology::place`] reconciles the stored map with the configured nodes.

mod continuum;
mod directory;
mod first;
mod hashes;
mod overlay;
mod overrides;
mod place;
mod placement;
mod presets;
mod ruled;
mod rules;
mod slot;
mod transit;
mod unused;

use std::ops::RangeInclusive;

pub use continuum::{
    Continuum, ContinuumError, Distribution, FIRST_SLOTS_MAX, PLACES_MAX, Scheme, Server, StoredContinuum,
};
pub use first::{First, Fit, Sample, judge};
pub use hashes::Hash;
pub use overlay::Overlay;
pub use overrides::{MOVE_KEY_BYTES_MAX, MOVE_KEYS_MAX, OVERRIDE_BYTES_MAX, OVERRIDES_MAX, TooManyOverrides};
pub use place::{MAX_NODES, OverlaidTopology, OverlayError, PartsError, PlaceError, Placed};
pub use placement::{OtherPlacement, Placement};
pub use presets::{PRESETS, Preset};
pub use ruled::{ADOPTION_OWNERS_MAX, AdoptionError, AdoptionGoal, Ruled, StoredRules, StoredRulesError};
pub use rules::{CaptureEnd, PATTERN_BYTES_MAX, PATTERNS_MAX, Pattern, Rule, RuleError, RuleMatch, RuleSet};
pub use slot::{SLOT_COUNT, SLOT_NUMBERS, Slot, crc16_slot};
pub use transit::{MoveId, Stage, TooManyTransits, Transit};
pub use unused::UnusedOverrides;

/// Node id. Constant within a state directory and never reused, so it is valid as an array index (see
/// [`Topology::node_id_bound`]) and in journals. Ids of removed nodes leave gaps.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, serde::Serialize, serde::Deserialize)]
pub struct NodeId(pub u16);

impl NodeId {
    /// Returns the id as an array index.
    #[inline]
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A Redis or Valkey server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Node {
    /// Node id.
    pub id: NodeId,
    /// Address as configured, `host:port`: identity across restarts, and name in messages and metrics.
    pub name: String,
}

/// Slot owners at an epoch. Every slot has exactly one owner, which is one of the nodes.
#[derive(Clone, PartialEq, Eq)]
pub struct Topology {
    epoch: u64,
    placement: Placement,
    /// By id.
    nodes: Vec<Node>,
    /// By slot. Passages that are not in use have [`slot::UNUSED_OWNER`].
    owners: Box<[NodeId; SLOT_NUMBERS]>,
    /// Id of the next node; above all ids ever used. 65536: none is left.
    next_id: u32,
    /// Slots in transit; `None` if there are none.
    marks: Option<transit::Marks>,
    /// Placement overrides.
    directory: directory::Directory,
    /// Members of a cluster that own no slots, but may have keys of slots that migrate. `None` if the nodes are no
    /// members of a cluster, which decides where slots are.
    receivers: Option<Vec<NodeId>>,
}

impl Topology {
    /// Epoch, from 1. Increases with every change.
    #[inline]
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns the topology with at least this epoch: later epochs may have been used without being stored.
    #[must_use]
    pub fn at_epoch(mut self, epoch: u64) -> Self {
        self.epoch = self.epoch.max(epoch);
        self
    }

    /// Mapping from keys to slots.
    #[inline]
    #[must_use]
    pub const fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Slot of a key or channel.
    #[inline]
    #[must_use]
    pub fn slot_of(&self, key: &[u8]) -> Slot {
        self.placement.slot_of(key)
    }

    /// Slots that can have keys, in order. The other numbers are free; their owners have no meaning.
    pub fn slots(&self) -> impl DoubleEndedIterator<Item = Slot> + Clone + use<> {
        (0..self.placement.slots()).map(slot::slot_at)
    }

    /// Owner of a slot.
    #[inline]
    #[must_use]
    pub fn owner(&self, slot: Slot) -> NodeId {
        self.owners[slot.index()]
    }

    /// Owner of the slot of a key or channel. For the node of a key, see [`Topology::lives_at`].
    #[inline]
    #[must_use]
    pub fn owner_of(&self, key: &[u8]) -> NodeId {
        self.owner(self.slot_of(key))
    }

    /// Node with this id, unless removed.
    #[must_use]
    pub fn node(&self, id: NodeId) -> Option<&Node> {
        let place = self.nodes.binary_search_by_key(&id, |node| node.id).ok()?;
        Some(&self.nodes[place])
    }

    /// Nodes by id, including nodes without slots.
    pub fn nodes(&self) -> impl ExactSizeIterator<Item = &Node> {
        self.nodes.iter()
    }

    /// Marks the nodes as members of a Redis or Valkey Cluster ([`crate::cluster`]). `receivers`: members that own no
    /// slots, but may have keys of slots that migrate to them.
    #[must_use]
    pub fn of_cluster(self, receivers: Vec<NodeId>) -> Self {
        Self { receivers: Some(receivers), ..self }
    }

    /// Whether the nodes are members of a cluster. They refuse commands with keys of several slots, and redirect those
    /// for slots of other members.
    #[inline]
    #[must_use]
    pub const fn is_of_cluster(&self) -> bool {
        self.receivers.is_some()
    }

    /// The only node, if no slot is in transit and no key has a placement override. Then every command can be executed
    /// there, whatever its keys. Never a member of a cluster.
    #[inline]
    #[must_use]
    pub fn only_node(&self) -> Option<NodeId> {
        match self.nodes.as_slice() {
            [node] if self.is_settled() && !self.has_overrides() && !self.is_of_cluster() => Some(node.id),
            _ => None,
        }
    }

    /// Highest node id plus one: the length of an array indexed by [`NodeId`]. Entries of removed nodes stay unused.
    #[must_use]
    pub fn node_id_bound(&self) -> usize {
        self.nodes.last().map_or(0, |node| node.id.index() + 1)
    }

    /// Id of the next node, for the store; 65536 if none is left.
    #[must_use]
    pub fn next_id(&self) -> u32 {
        self.next_id
    }

    /// Number of slots of a node.
    #[must_use]
    pub fn slots_of(&self, id: NodeId) -> usize {
        self.in_use().iter().filter(|&&owner| owner == id).count()
    }

    /// Owners of the slots that can have keys.
    fn in_use(&self) -> &[NodeId] {
        &self.owners[..self.placement.slots()]
    }

    /// Slots of a node, as maximal ranges in order.
    #[must_use]
    pub fn ranges_of(&self, id: NodeId) -> Vec<RangeInclusive<u16>> {
        self.ranges_in_use().filter(|(owner, _)| *owner == id).map(|(_, range)| range).collect()
    }

    /// Returns the nodes that may have keys, by id: slot owners, source and target of moves, nodes with placement
    /// overrides, and members to which slots migrate. Commands about all keys need no other nodes.
    #[must_use]
    pub fn nodes_with_keys(&self) -> Vec<NodeId> {
        let mut keeps = vec![false; self.node_id_bound()];
        // Slots in [`Stage::Observed`] still have all keys at the owner.
        let moving = self.transits().filter(|transit| matches!(transit.stage, Stage::Moving { .. }));
        let moving = moving.flat_map(|transit| [transit.source, transit.target]);
        let receivers = self.receivers.iter().flatten().copied();
        // `for_each` runs one loop for each part of the chain. The slots are many.
        self.in_use().iter().copied().chain(moving).chain(self.directory.nodes()).chain(receivers).for_each(|node| {
            if let Some(keeps) = keeps.get_mut(node.index()) {
                *keeps = true;
            }
        });
        self.nodes.iter().map(|node| node.id).filter(|id| keeps[id.index()]).collect()
    }

    /// Slots that can have keys, as maximal ranges of one owner, in order.
    pub fn ranges_in_use(&self) -> impl Iterator<Item = (NodeId, RangeInclusive<u16>)> {
        ranges(self.in_use())
    }

    /// The slots of Redis Cluster, and passages in use, as maximal ranges of one owner, in order, for
    /// [`Topology::from_parts`]. Includes free numbers.
    pub fn ranges(&self) -> impl Iterator<Item = (NodeId, RangeInclusive<u16>)> {
        ranges(&self.owners[..self.placement.slots().max(SLOT_COUNT)])
    }
}

fn ranges(owners: &[NodeId]) -> impl Iterator<Item = (NodeId, RangeInclusive<u16>)> {
    let mut start = 0_u16;
    owners.chunk_by(|a, b| a == b).map(move |run| {
        let end = start + (run.len() - 1) as u16;
        let range = start..=end;
        start = end.wrapping_add(1);
        (run[0], range)
    })
}

/// Prints ranges rather than 16384 numbers.
impl std::fmt::Debug for Topology {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Topology")
            .field("epoch", &self.epoch)
            .field("placement", &self.placement)
            .field("nodes", &self.nodes)
            .field("ranges", &self.ranges().collect::<Vec<_>>())
            .field("next_id", &self.next_id)
            .field("transits", &self.transits().collect::<Vec<_>>())
            .field("overrides", &self.override_count())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn keys_are_at_owners_overrides_and_ends_of_moves() {
        let names: Vec<String> = (0..6).map(|i| format!("127.0.0.1:{}", 7000 + i)).collect();
        let two = Topology::even(&names[..2]).expect("two nodes");
        let six = Topology::place(Some(&two), &names).expect("four join").topology;
        let keepers = |topology: &Topology| topology.nodes_with_keys().iter().map(|node| node.0).collect::<Vec<_>>();
        assert_eq!(keepers(&six), [0, 1], "a joined node has no keys yet");
        let slot = six.ranges_of(NodeId(0)).first().and_then(|range| Slot::new(*range.start())).expect("a slot");
        let to = |target, stage| Transit {
            move_id: MoveId(1),
            source: NodeId(0),
            target: NodeId(target),
            stage,
            keys_only: false,
        };
        let observed = six.with_transits([(to(2, Stage::Observed), &[slot][..])]).expect("few");
        assert_eq!(keepers(&observed), [0, 1], "nothing has left its source");
        let moving = six.with_transits([(to(3, Stage::Moving { leg: 0 }), &[slot][..])]).expect("few");
        assert_eq!(keepers(&moving), [0, 1, 3]);
        assert_eq!(keepers(&moving.handed_over(&[slot], NodeId(3))), [0, 1, 3]);
        let key: Arc<[u8]> = b"alone".as_slice().into();
        assert_eq!(keepers(&six.keys_handed_over(&[], [&key], NodeId(5))), [0, 1, 5]);
        let all: Vec<Slot> = Slot::all().filter(|slot| six.owner(*slot) == NodeId(0)).collect();
        assert_eq!(keepers(&six.handed_over(&all, NodeId(1))), [1], "a node that was drained keeps nothing");
        assert_eq!(keepers(&six.of_cluster(vec![NodeId(4)])), [0, 1, 4], "slots of the cluster migrate there");
    }
}
