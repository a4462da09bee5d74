//! Routes a command by its keys and the topology.
//!
//! A pure function: the worker passes keys and receives nodes. The command table knows the key positions, and whether a
//! command may be split.

use std::collections::BTreeMap;

use crate::topology::{NodeId, Slot, Topology};

/// Destination of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Route {
    /// The node that has all keys: the owner of their slot, or the node of their placement overrides.
    Owner(Slot, NodeId),
    /// The node that has all keys, although they are in different slots.
    Together(NodeId),
    /// Any node: the command has no keys.
    Anywhere,
    /// None: the keys are in different slots and at different nodes, or the nodes are members of a cluster.
    CrossSlot,
    /// None: the keys share a slot, but some have placement overrides at other nodes.
    Parted(Slot),
}

/// Routes a command that needs one node: the node that has all its keys at this epoch. A move that separates them waits
/// for the end of the command, because the drain barrier counts commands by node and epoch.
#[inline]
pub fn route<'k>(topology: &Topology, mut keys: impl Iterator<Item = &'k [u8]> + Clone) -> Route {
    let all = keys.clone();
    let Some(first) = keys.next() else { return Route::Anywhere };
    let slot = topology.slot_of(first);
    if !keys.all(|key| topology.slot_of(key) == slot) {
        return route_several(topology, all);
    }
    if topology.has_override(slot) {
        route_override(topology, slot, all)
    } else {
        Route::Owner(slot, topology.owner(slot))
    }
}

/// Routes keys of several slots.
#[cold]
fn route_several<'k>(topology: &Topology, keys: impl Iterator<Item = &'k [u8]> + Clone) -> Route {
    common_node(topology, keys).map_or(Route::CrossSlot, Route::Together)
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

/// Returns the node that can execute a command with all these keys: their common node. Members of a cluster accept only keys of
/// one slot. `None` without keys.
#[inline]
pub fn common_node<'k>(topology: &Topology, keys: impl Iterator<Item = &'k [u8]> + Clone) -> Option<NodeId> {
    if topology.is_of_cluster() {
        let mut slots = keys.map(|key| topology.slot_of(key));
        let first = slots.next()?;
        return slots.all(|slot| slot == first).then(|| topology.owner(first));
    }
    let mut nodes = keys.map(|key| topology.lives_at(key));
    let first = nodes.next()?;
    nodes.all(|node| node == first).then_some(first)
}

/// Splits a command by the nodes of its keys, or by their slots for members of a cluster. Parts are in order of first
/// use. Every key is in exactly one part.
pub fn split<'k>(topology: &Topology, keys: impl Iterator<Item = &'k [u8]>) -> Vec<Part> {
    if topology.is_of_cluster() {
        return split_by_slot(topology, keys);
    }
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

fn split_by_slot<'k>(topology: &Topology, keys: impl Iterator<Item = &'k [u8]>) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    let mut part_of = BTreeMap::new();
    for (place, key) in keys.enumerate() {
        let slot = topology.slot_of(key);
        let number = *part_of.entry(slot).or_insert_with(|| {
            parts.push(Part { node: topology.owner(slot), keys: Vec::new() });
            parts.len() - 1
        });
        parts[number].keys.push(place as u32);
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
    fn keys_go_to_the_node_that_has_all_of_them() {
        let topology = three();
        let owner = topology.owner_of(b"{a}1");
        assert!(
            matches!(route(&topology, [&b"{a}1"[..], b"{a}2"].into_iter()), Route::Owner(_, node) if node == owner)
        );
        let keys = || [&b"a"[..], b"b"].into_iter();
        assert_eq!(route(&topology, keys()), Route::CrossSlot);
        assert_eq!(route(&topology, std::iter::empty()), Route::Anywhere);
        let to = topology.owner_of(b"b");
        let moved = topology.keys_handed_over(&[], [&std::sync::Arc::from(&b"a"[..])], to);
        assert_eq!(route(&moved, keys()), Route::Together(to));
        assert_eq!(
            route(&moved.of_cluster(Vec::new()), keys()),
            Route::CrossSlot,
            "a member accepts keys of one slot only"
        );
    }

    #[test]
    fn the_only_node_takes_keys_of_several_slots() {
        let names = ["127.0.0.1:7001".to_owned(), "127.0.0.1:7002".to_owned()];
        let one = Topology::even(&names[..1]).expect("one node");
        let keys = || [&b"a"[..], b"b"].into_iter();
        assert_eq!(route(&one, keys()), Route::Together(NodeId(0)));
        assert!(matches!(route(&one, [&b"{a}1"[..], b"{a}2"].into_iter()), Route::Owner(..)));
        let two = Topology::place(Some(&one), &names).expect("one joins").topology;
        assert_eq!((two.nodes_with_keys(), route(&two, keys())), (vec![NodeId(0)], Route::Together(NodeId(0))));
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
    fn members_of_a_cluster_get_a_part_per_slot() {
        let topology = three().of_cluster(Vec::new());
        let keys = [&b"{a}1"[..], b"b", b"{a}2", b"c", b"b"];
        let parts = split(&topology, keys.iter().copied());
        assert_eq!(parts.iter().map(|part| part.keys.clone()).collect::<Vec<_>>(), [vec![0, 2], vec![1, 4], vec![3]]);
        assert!(parts.iter().all(|part| part.node == topology.owner_of(keys[part.keys[0] as usize])));
        assert_eq!(common_node(&topology, keys.iter().copied()), None);
        let one = [&b"{a}1"[..], b"{a}2"];
        assert_eq!(common_node(&topology, one.iter().copied()), Some(topology.owner_of(b"a")));
        let of_one_node = Topology::even(&["127.0.0.1:7001".to_owned()]).expect("one node");
        assert_eq!(common_node(&of_one_node, keys.iter().copied()), Some(NodeId(0)));
        assert_eq!(common_node(&of_one_node.of_cluster(Vec::new()), keys.iter().copied()), None);
    }

    #[test]
    fn nodes_that_are_up_take_turns() {
        let topology = three();
        let chosen: Vec<_> = (0..4).map(|turn| anywhere(&topology, turn, |id| id.0 != 1).map(|id| id.0)).collect();
        assert_eq!(chosen, [Some(0), Some(2), Some(2), Some(0)]);
        assert_eq!(anywhere(&topology, 0, |_| false), None);
    }
}
