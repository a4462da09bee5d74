//! Where a command goes, given its keys and the topology.
//!
//! A function of its arguments and nothing else: the worker hands in keys and gets nodes back. What a command *is* (where its
//! keys are, whether it may be split) is the command table's knowledge and does not appear here.

use crate::topology::{NodeId, Slot, Topology, slot_of};

/// Where a command must be executed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Route {
    /// At this node: the owner of this slot, which all keys share, or where they live as exceptions.
    Owner(Slot, NodeId),
    /// It names no key: any node will do.
    Anywhere,
    /// Its keys lie in different slots, so no node may execute it.
    CrossSlot,
    /// Its keys share this slot, but not all of them live at one node: some are exceptions.
    Parted(Slot),
}

/// Routes a command that must be executed at one node: its keys must share a slot, as in a Redis Cluster. Keys in different slots
/// are refused even where one node owns both today, because a move may part them tomorrow.
#[inline]
pub fn route<'k>(topology: &Topology, mut keys: impl Iterator<Item = &'k [u8]> + Clone) -> Route {
    let all = keys.clone();
    let Some(first) = keys.next() else { return Route::Anywhere };
    let slot = slot_of(first);
    if !keys.all(|key| slot_of(key) == slot) {
        return Route::CrossSlot;
    }
    if topology.is_exceptional(slot) { route_exceptional(topology, slot, all) } else { Route::Owner(slot, topology.owner(slot)) }
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

/// Splits a command over the nodes at which its keys live; parts are in order of first use, and every key is in exactly one.
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

/// Chooses a node for a command that any node can answer: round robin by `turn` over those that are up, or `None` where none is.
pub fn anywhere(topology: &Topology, turn: usize, is_up: impl Fn(NodeId) -> bool) -> Option<NodeId> {
    let count = topology.nodes().len();
    let start = turn.checked_rem(count)?;
    let from_start = topology.nodes().skip(start).chain(topology.nodes().take(start));
    from_start.map(|node| node.id).find(|id| is_up(*id))
}

/// A SCAN cursor over all nodes: the node's own cursor, the place of the node in the topology's order, and what is needed to find keys that
/// change their node meanwhile; in one integer that fits the 53 bits that clients in JavaScript can hold. 0 starts and ends a scan.
///
/// A key that moves from a node not yet looked at to one that was is missed by one pass over the nodes, although it was there all the time. So
/// when a pass is over, the nodes that received keys since the scan began are looked at again: by then such a key has arrived.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScanCursor {
    /// Place of the node among the nodes, by number.
    pub place: u16,
    /// 0: over all nodes; later ones over those that have received keys.
    pub pass: u8,
    /// Which moves count: low bits of the number of the first one. 0: there was none, and all count.
    pub stamp: u8,
    /// The node's own cursor.
    pub inner: u64,
}

/// Bits for the place of a node: as many as [`crate::topology::MAX_NODES`] needs.
const PLACE_BITS: u32 = 10;
const PASS_BITS: u32 = 2;
const STAMP_BITS: u32 = 8;
const OUTER_BITS: u32 = PLACE_BITS + PASS_BITS + STAMP_BITS;

/// A move, as a scan sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Movement {
    /// The number of the move.
    pub number: u64,
    /// Whose keys it takes.
    pub source: NodeId,
    /// Who gets them.
    pub target: NodeId,
    /// It is not over.
    pub is_under_way: bool,
}

impl ScanCursor {
    /// The last pass: keys that are moved on from node to node as often are not followed any further.
    pub const LAST_PASS: u8 = (1 << PASS_BITS) - 1;

    /// A scan that begins now. `moves` in the order of their numbers: all that are under way, and the last that there were.
    pub fn start(moves: &[Movement]) -> Self {
        let first = moves.iter().find(|m| m.is_under_way).map(|m| m.number);
        let stamp = first.or_else(|| moves.last().map(|m| m.number + 1)).unwrap_or(0);
        Self { place: 0, pass: 0, stamp: stamp as u8, inner: 0 }
    }

    /// Takes a client's cursor apart; `None` where no node can be meant.
    pub fn decode(cursor: u64, nodes: usize) -> Option<Self> {
        let place = (cursor & ((1 << PLACE_BITS) - 1)) as u16;
        let pass = (cursor >> PLACE_BITS) as u8 & Self::LAST_PASS;
        let stamp = (cursor >> (PLACE_BITS + PASS_BITS)) as u8;
        (usize::from(place) < nodes).then_some(Self { place, pass, stamp, inner: cursor >> OUTER_BITS })
    }

    /// The cursor for the client; `None` where the node's is too large to carry (a table of more than 2^33 buckets).
    pub fn encode(self) -> Option<u64> {
        let outer = u64::from(self.stamp) << (PLACE_BITS + PASS_BITS) | u64::from(self.pass) << PLACE_BITS | u64::from(self.place);
        (self.inner < 1 << (53 - OUTER_BITS)).then_some(self.inner << OUTER_BITS | outer)
    }

    /// The moves that count for this scan. `None`: some of them are forgotten, so any node may have received keys.
    fn counting(self, moves: &[Movement]) -> Option<&[Movement]> {
        let Some(last) = moves.last() else { return if self.stamp == 0 { Some(&[]) } else { None } };
        if self.stamp == 0 {
            return Some(moves);
        }
        // The stamp may be that of the move that comes next.
        let back = (last.number + 1).wrapping_sub(u64::from(self.stamp)) & 0xff;
        let first = (last.number + 1).saturating_sub(back);
        let is_known = moves.first().is_some_and(|m| m.number <= first) || first == last.number + 1;
        is_known.then(|| &moves[moves.partition_point(|m| m.number < first)..])
    }

    /// Where to go on after the node at `place` answered with `inner`; `None`: the scan is over.
    pub fn next(self, inner: u64, nodes: &[NodeId], moves: &[Movement]) -> Option<Self> {
        if inner > 0 {
            return Some(Self { inner, ..self });
        }
        let counting = self.counting(moves);
        let received = |node: NodeId| counting.is_none_or(|moves| moves.iter().any(|m| m.target == node));
        let places = |from: usize, pass: u8| {
            let mut rest = nodes.iter().enumerate().skip(from);
            let found = rest.find(|(_, node)| pass == 0 || received(**node))?;
            Some(Self { place: found.0 as u16, pass, stamp: self.stamp, inner: 0 })
        };
        if let Some(next) = places(usize::from(self.place) + 1, self.pass) {
            return Some(next);
        }
        // Once more where keys have gone on from a node that had received them.
        let again = match counting {
            _ if self.pass == Self::LAST_PASS => false,
            Some(moves) if self.pass > 0 => moves.iter().any(|m| received(m.source)),
            Some(moves) => !moves.is_empty(),
            None => self.pass == 0,
        };
        again.then(|| places(0, self.pass + 1)).flatten()
    }
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
        assert!(matches!(route(&topology, [&b"{a}1"[..], b"{a}2"].into_iter()), Route::Owner(_, node) if node == owner));
        assert_eq!(route(&topology, [&b"a"[..], b"b"].into_iter()), Route::CrossSlot);
        assert_eq!(route(&topology, std::iter::empty()), Route::Anywhere);
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

    fn nodes() -> [NodeId; 3] {
        [NodeId(0), NodeId(1), NodeId(2)]
    }

    /// Every node needs two steps: its own cursor goes 0 -> 7 -> 0. `moves` are those known at each step.
    fn visited(moves: impl Fn(usize) -> Vec<Movement>) -> Vec<(u8, u16, u64)> {
        let mut at = ScanCursor::start(&moves(0));
        let mut visited = Vec::new();
        for step in 0.. {
            visited.push((at.pass, at.place, at.inner));
            assert!(step < 100, "it ends");
            let next = at.next(if at.inner == 0 { 7 } else { 0 }, &nodes(), &moves(step));
            let Some(next) = next else { break };
            let cursor = next.encode().expect("small cursors");
            assert_ne!(cursor, 0, "0 ends a scan");
            at = ScanCursor::decode(cursor, 3).expect("a node");
        }
        visited
    }

    fn movement(number: u64, source: u16, target: u16, is_under_way: bool) -> Movement {
        Movement { number, source: NodeId(source), target: NodeId(target), is_under_way }
    }

    #[test]
    fn a_scan_visits_every_node_once_and_ends() {
        let once = [(0, 0, 0), (0, 0, 7), (0, 1, 0), (0, 1, 7), (0, 2, 0), (0, 2, 7)];
        assert_eq!(visited(|_| Vec::new()), once);
        assert_eq!(visited(|_| vec![movement(5, 2, 0, false)]), once, "a move that was over before");
        assert_eq!(ScanCursor::decode(3, 3), None);
        assert_eq!(ScanCursor { place: 0, pass: 0, stamp: 0, inner: 1 << 33 }.encode(), None);
    }

    #[test]
    fn nodes_that_received_keys_since_are_visited_again() {
        let again = |moves: Vec<Movement>| -> Vec<(u8, u16)> {
            let all = visited(|step| if step == 0 { Vec::new() } else { moves.clone() });
            all.into_iter().filter(|(pass, _, inner)| *pass > 0 && *inner == 0).map(|(pass, place, _)| (pass, place)).collect()
        };
        assert_eq!(again(vec![movement(1, 2, 0, true)]), [(1, 0)]);
        assert_eq!(again(vec![movement(1, 2, 0, false), movement(2, 0, 1, true)]), [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]);
        // One that was under way from the beginning.
        let under_way = |_| vec![movement(3, 0, 1, false), movement(259, 2, 0, true), movement(260, 1, 2, false)];
        let all: Vec<_> = visited(under_way).into_iter().filter(|(pass, _, _)| *pass == 1).map(|(_, place, _)| place).collect();
        assert_eq!(all, [0, 0, 2, 2]);
    }

    #[test]
    fn where_moves_are_forgotten_every_node_is_visited_again() {
        let at = ScanCursor { place: 2, pass: 0, stamp: 9, inner: 7 };
        let next = at.next(0, &nodes(), &[]).expect("another pass");
        assert_eq!((next.pass, next.place), (1, 0));
        let late = [movement(300, 0, 1, false)];
        assert_eq!(at.next(0, &nodes(), &late).map(|n| (n.pass, n.place)), Some((1, 0)));
        let last = ScanCursor { pass: 1, ..at };
        assert_eq!(last.next(0, &nodes(), &[]), None);
    }
}
