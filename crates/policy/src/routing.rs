//! Where a command goes, given its keys and the topology.
//!
//! A function of its arguments and nothing else: the worker hands in keys and gets nodes back. What a command *is*
//! (where its keys are, whether it may be split) is the command table's knowledge and does not appear here.

use crate::topology::{NodeId, Slot, Topology};

/// Where a command must be executed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Route {
    /// At this node: the owner of this slot, which all keys share, or where they live as exceptions.
    Owner(Slot, NodeId),
    /// At this node: its keys are in different slots, and the node has every key.
    Together(NodeId),
    /// It names no key: any node will do.
    Anywhere,
    /// Its keys lie in different slots, so no node may execute it.
    CrossSlot,
    /// Its keys share this slot, but not all of them live at one node: some are exceptions.
    Parted(Slot),
}

/// Routes a command that must be executed at one node: its keys must share a slot, as in a Redis Cluster, unless there
/// is one node only. Several nodes refuse keys in different slots even where one node owns both today, because a move
/// may part them tomorrow.
#[inline]
pub fn route<'k>(topology: &Topology, mut keys: impl Iterator<Item = &'k [u8]> + Clone) -> Route {
    let all = keys.clone();
    let Some(first) = keys.next() else { return Route::Anywhere };
    let slot = topology.slot_of(first);
    if !keys.all(|key| topology.slot_of(key) == slot) {
        return topology.only_node().map_or(Route::CrossSlot, Route::Together);
    }
    if topology.is_exceptional(slot) {
        route_exceptional(topology, slot, all)
    } else {
        Route::Owner(slot, topology.owner(slot))
    }
}

/// The same for keys of one slot that has exceptions.
#[cold]
fn route_exceptional<'k>(topology: &Topology, slot: Slot, mut keys: impl Iterator<Item = &'k [u8]>) -> Route {
    let node = keys.next().map_or_else(|| topology.owner(slot), |key| topology.lives_at_of(slot, key));
    if keys.all(|key| topology.lives_at_of(slot, key) == node) { Route::Owner(slot, node) } else { Route::Parted(slot) }
}

/// The part of a split command that goes to one node: which of its keys, by their place among the keys.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Part {
    /// Who executes the part.
    pub node: NodeId,
    /// Places of its keys among the command's keys, ascending.
    pub keys: Vec<u32>,
}

/// Splits a command over the nodes at which its keys live; parts are in order of first use, and every key is in exactly
/// one.
pub fn split<'k>(topology: &Topology, keys: impl Iterator<Item = &'k [u8]>) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    // Index of a node's part plus one, by node number: a command of a million keys must not search a list for each.
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

/// Chooses a node for a command that any node can answer: round robin by `turn` over those that are up, or `None` where
/// none is.
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
    fn keys_of_one_slot_go_to_its_owner_and_others_nowhere() {
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
            (two.keepers(), route(&two, keys())),
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
    fn any_node_that_is_up_takes_its_turn() {
        let topology = three();
        let chosen: Vec<_> = (0..4).map(|turn| anywhere(&topology, turn, |id| id.0 != 1).map(|id| id.0)).collect();
        assert_eq!(chosen, [Some(0), Some(2), Some(2), Some(0)]);
        assert_eq!(anywhere(&topology, 0, |_| false), None);
    }
}
