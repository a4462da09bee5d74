//! Routes a command by its keys and the topology.
//!
//! A pure function: the worker passes keys and receives nodes. The command table knows the key positions, and whether a
//! command may be split.

use crate::topology::{NodeId, Slot, Topology};

/// Destination of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Route {
    /// The node that has all keys: the owner of their slot, or the node of their placement overrides.
    Owner(Slot, NodeId),
    /// The only node. The keys are in different slots.
    Together(NodeId),
    /// Any node: the command has no keys.
    Anywhere,
    /// None: the keys are in different slots.
    CrossSlot,
    /// None: the keys share a slot, but some have placement overrides at other nodes.
    Parted(Slot),
}

/// Routes a command that needs one node. With several nodes the keys must share a slot, as in Redis Cluster, even if
/// one node currently owns all slots of the command: a move may separate them at any time.
#[inline]
pub fn route<'k>(topology: &Topology, mut keys: impl Iterator<Item = &'k [u8]> + Clone) -> Route {
    let all = keys.clone();
    let Some(first) = keys.next() else { return Route::Anywhere };
    let slot = topology.slot_of(first);
    if !keys.all(|key| topology.slot_of(key) == slot) {
        return topology.only_node().map_or(Route::CrossSlot, Route::Together);
    }
    if topology.has_override(slot) {
        route_override(topology, slot, all)
    } else {
        Route::Owner(slot, topology.owner(slot))
    }
}

/// Routes keys of one slot with placement overrides.
#[cold]
fn route_override<'k>(topology: &Topology, slot: Slot, mut keys: impl Iterator<Item = &'k [u8]>) -> Route {
    let node = keys.next().map_or_else(|| topology.owner(slot), |key| topology.lives_at_in_slot(slot, key));
    if keys.all(|key| topology.lives_at_in_slot(slot, key) == node) {
        Route::Owner(slot, node)
    } else {
        Route::Parted(slot)
    }
}

/// The part of a split command for one node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Part {
    /// Node that executes the part.
    pub node: NodeId,
    /// Indexes into the command's keys, ascending.
    pub keys: Vec<u32>,
}

/// Splits a command by the nodes of its keys. Parts are in order of first use. Every key is in exactly one part.
pub fn split<'k>(topology: &Topology, keys: impl Iterator<Item = &'k [u8]>) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    // Index of a node's part plus one, by node id. A search per key would be slow for a command with a million keys.
    let mut part_of = vec![0_u16; topology.node_id_bound()];
    for (place, key) in keys.enumerate() {
        let node = topology.lives_at(key);
        let known = &mut part_of[node.index()];
        if *known == 0 {
            parts.push(Part { node, keys: Vec::new() });
            *known = parts.len() as u16;
        }
        parts[usize::from(*known) - 1].keys.push(place as u32);
    }
    parts
}

/// Selects a node for a command that any node can execute: round robin by `turn` over the nodes that are up. Returns
/// `None` if no node is up.
pub fn anywhere(topology: &Topology, turn: usize, is_up: impl Fn(NodeId) -> bool) -> Option<NodeId> {
    let count = topology.nodes().len();
    let start = turn.checked_rem(count)?;
    let from_start = topology.nodes().skip(start).chain(topology.nodes().take(start));
    from_start.map(|node| node.id).find(|id| is_up(*id))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn three() -> Topology {
        let names: Vec<String> = (1..=3).map(|i| format!("127.0.0.1:700{i}")).collect();
        Topology::even(&names).expect("three nodes")
    }

    #[test]
    fn keys_of_one_slot_go_to_its_owner_and_others_are_refused() {
        let topology = three();
        let owner = topology.owner_of(b"{a}1");
        assert!(
            matches!(route(&topology, [&b"{a}1"[..], b"{a}2"].into_iter()), Route::Owner(_, node) if node == owner)
        );
        assert_eq!(route(&topology, [&b"a"[..], b"b"].into_iter()), Route::CrossSlot);
        assert_eq!(route(&topology, std::iter::empty()), Route::Anywhere);
    }

    #[test]
    fn the_only_node_takes_keys_of_several_slots() {
        let names = ["127.0.0.1:7001".to_owned(), "127.0.0.1:7002".to_owned()];
        let one = Topology::even(&names[..1]).expect("one node");
        let keys = || [&b"a"[..], b"b"].into_iter();
        assert_eq!(route(&one, keys()), Route::Together(NodeId(0)));
        assert!(matches!(route(&one, [&b"{a}1"[..], b"{a}2"].into_iter()), Route::Owner(..)));
        let two = Topology::place(Some(&one), &names).expect("one joins").topology;
        assert_eq!(
            (two.nodes_with_keys(), route(&two, keys())),
            (vec![NodeId(0)], Route::CrossSlot),
            "the second may own something soon"
        );
    }

    #[test]
    fn a_split_command_keeps_every_key_once_and_in_order() {
        let topology = three();
        let keys: Vec<Vec<u8>> = (0..100).map(|i| format!("key:{i}").into_bytes()).collect();
        let parts = split(&topology, keys.iter().map(Vec::as_slice));
        assert_eq!(parts.len(), 3);
        let mut seen: Vec<u32> = parts.iter().flat_map(|p| p.keys.clone()).collect();
        for part in &parts {
            assert!(part.keys.is_sorted());
            assert!(part.keys.iter().all(|k| topology.owner_of(&keys[*k as usize]) == part.node));
        }
        seen.sort_unstable();
        assert_eq!(seen, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn nodes_that_are_up_take_turns() {
        let topology = three();
        let chosen: Vec<_> = (0..4).map(|turn| anywhere(&topology, turn, |id| id.0 != 1).map(|id| id.0)).collect();
        assert_eq!(chosen, [Some(0), Some(2), Some(2), Some(0)]);
        assert_eq!(anywhere(&topology, 0, |_| false), None);
    }
}
