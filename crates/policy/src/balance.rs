//! Balances slots over nodes by weight, with as few moves as possible.
//!
//! Counts slots rather than load; the planner considers measured load. Deterministic, and a balanced topology gives no
//! moves.

use std::collections::BTreeMap;
use std::fmt;

use crate::topology::{NodeId, Slot, Topology};

/// Slots that move together from one node to another.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Shift {
    /// Current owner.
    pub source: NodeId,
    /// New owner.
    pub target: NodeId,
    /// The slots, ascending; never empty.
    pub slots: Vec<Slot>,
}

/// Reason why no balance exists.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum BalanceError {
    /// Every node has weight 0.
    NoWeight,
}

impl fmt::Display for BalanceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoWeight => f.write_str("no node may have slots; add a node, or give one a weight above 0"),
        }
    }
}

impl std::error::Error for BalanceError {}

/// Returns moves that give every node slots in proportion to its weight, to within one slot. Weights default to 1; 0
/// means no slots.
///
/// Changes as few owners as possible: a node gives only its excess, and a remainder of the division stays with nodes
/// that already have it.
///
/// # Errors
/// If no node has a weight above 0.
pub fn even(topology: &Topology, weights: &BTreeMap<NodeId, u32>) -> Result<Vec<Shift>, BalanceError> {
    let members: Vec<Member> = topology
        .nodes()
        .map(|node| Member {
            id: node.id,
            weight: u64::from(weights.get(&node.id).copied().unwrap_or(1)),
            has: topology.slots_of(node.id),
        })
        .collect();
    Ok(shifts(topology, &members, &shares(&members, topology.placement().slots())?))
}

/// Returns moves that drain a node. Each slot goes to the node with the fewest slots relative to its weight. Nothing
/// moves between the other nodes.
///
/// # Errors
/// If no other node has a weight above 0.
pub fn drain(topology: &Topology, node: NodeId, weights: &BTreeMap<NodeId, u32>) -> Result<Vec<Shift>, BalanceError> {
    let weight = |id| if id == node { 0 } else { u64::from(weights.get(&id).copied().unwrap_or(1)) };
    let members: Vec<Member> =
        topology.nodes().map(|n| Member { id: n.id, weight: weight(n.id), has: topology.slots_of(n.id) }).collect();
    let mut wanted: Vec<usize> = members.iter().map(|m| m.has).collect();
    let Some(leaving) = members.iter().position(|m| m.id == node) else { return Ok(Vec::new()) };
    for _ in 0..std::mem::take(&mut wanted[leaving]) {
        let takers = (0..members.len()).filter(|i| members[*i].weight > 0);
        // Fullness after receiving the slot, as a fraction: (has + 1) / weight.
        let full = |i: usize| (wanted[i] as u64 + 1, members[i].weight);
        let least = takers.min_by(|a, b| {
            let ((has_a, weight_a), (has_b, weight_b)) = (full(*a), full(*b));
            (has_a * weight_b).cmp(&(has_b * weight_a)).then(a.cmp(b))
        });
        wanted[least.ok_or(BalanceError::NoWeight)?] += 1;
    }
    Ok(shifts(topology, &members, &wanted))
}

struct Member {
    id: NodeId,
    weight: u64,
    has: usize,
}

/// Number of slots per member.
fn shares(members: &[Member], slots: usize) -> Result<Vec<usize>, BalanceError> {
    let weights: u64 = members.iter().map(|m| m.weight).sum();
    if weights == 0 {
        return Err(BalanceError::NoWeight);
    }
    let exact: Vec<u128> = members.iter().map(|m| u128::from(m.weight) * slots as u128).collect();
    let mut shares: Vec<usize> = exact.iter().map(|e| (e / u128::from(weights)) as usize).collect();
    let odd = slots - shares.iter().sum::<usize>();
    let mut order: Vec<usize> = (0..members.len()).filter(|i| !exact[*i].is_multiple_of(u128::from(weights))).collect();
    order.sort_by_key(|i| {
        (members[*i].has <= shares[*i], std::cmp::Reverse(exact[*i] % u128::from(weights)), members[*i].id)
    });
    for i in order.into_iter().take(odd) {
        shares[i] += 1;
    }
    Ok(shares)
}

/// Moves excess slots to members below their share. Members give from the end of their slots.
fn shifts(topology: &Topology, members: &[Member], wanted: &[usize]) -> Vec<Shift> {
    let mut lacking: Vec<(NodeId, usize)> =
        members.iter().zip(wanted).filter(|(m, w)| m.has < **w).map(|(m, w)| (m.id, w - m.has)).collect();
    let mut shifts = Vec::new();
    for (member, wanted) in members.iter().zip(wanted).filter(|(m, w)| m.has > **w) {
        let mut owned: Vec<Slot> = topology.slots().filter(|slot| topology.owner(*slot) == member.id).collect();
        let mut given = owned.split_off(*wanted);
        while let Some((target, room)) = lacking.first_mut().filter(|_| !given.is_empty()) {
            let rest = given.split_off(given.len().min(*room));
            *room -= given.len();
            shifts.push(Shift { source: member.id, target: *target, slots: std::mem::replace(&mut given, rest) });
            if *room == 0 {
                lacking.remove(0);
            }
        }
    }
    shifts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(count: u16) -> Vec<String> {
        (0..count).map(|i| format!("127.0.0.1:{}", 7000 + i)).collect()
    }

    fn moved(topology: &Topology, shifts: &[Shift]) -> Topology {
        shifts.iter().fold(topology.clone(), |t, shift| t.handed_over(&shift.slots, shift.target))
    }

    #[test]
    fn a_node_that_joins_gets_its_share_and_no_slot_moves_twice() {
        let two = Topology::even(&names(2)).expect("two nodes");
        let three = Topology::place(Some(&two), &names(3)).expect("joins").topology;
        let shifts = even(&three, &BTreeMap::new()).expect("weights");
        assert!(shifts.iter().all(|s| s.target == NodeId(2)));
        assert_eq!(shifts.iter().map(|s| s.slots.len()).sum::<usize>(), 5461);
        let after = moved(&three, &shifts);
        assert_eq!([0, 1, 2].map(|i| after.slots_of(NodeId(i))), [5462, 5461, 5461]);
        assert_eq!(even(&after, &BTreeMap::new()), Ok(vec![]));
    }

    #[test]
    fn a_drained_node_gives_to_the_nodes_with_the_fewest_slots() {
        let two = Topology::even(&names(2)).expect("two nodes");
        let three = Topology::place(Some(&two), &names(3)).expect("joins").topology;
        let shifts = drain(&three, NodeId(0), &BTreeMap::new()).expect("two are left");
        assert!(shifts.iter().all(|s| (s.source, s.target) == (NodeId(0), NodeId(2))), "{shifts:?}");
        assert_eq!(moved(&three, &shifts).slots_of(NodeId(2)), 8192);
        let one = Topology::even(&names(1)).expect("a node");
        assert_eq!(drain(&one, NodeId(0), &BTreeMap::new()), Err(BalanceError::NoWeight));
    }
}
