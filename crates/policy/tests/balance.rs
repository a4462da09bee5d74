//! Properties of balanced placements, for all topologies and weights.

use std::collections::BTreeMap;

use proptest::prelude::{any, prop, proptest};
use proptest::strategy::Strategy;
use proptest::{prop_assert, prop_assert_eq, prop_assume};
use switchyard_policy::balance::{Shift, drain, even};
use switchyard_policy::topology::{Node, NodeId, SLOT_COUNT, Topology};

/// Nodes with weights and arbitrary slot owners.
fn placements() -> impl Strategy<Value = (Topology, BTreeMap<NodeId, u32>)> {
    (1..9_u16).prop_flat_map(|nodes| {
        let cuts = prop::collection::btree_set(1..SLOT_COUNT as u16, 0..20);
        let weights = prop::collection::vec(0..5_u32, usize::from(nodes));
        (cuts, any::<u64>(), weights).prop_map(move |(cuts, seed, weights)| {
            let starts: Vec<u16> = std::iter::once(0).chain(cuts).collect();
            let ends = starts.iter().skip(1).map(|s| s - 1).chain([SLOT_COUNT as u16 - 1]);
            let owner = |i: usize| NodeId((seed.rotate_left(i as u32 * 7) % u64::from(nodes)) as u16);
            let ranges: Vec<_> =
                starts.iter().zip(ends).enumerate().map(|(i, (start, end))| (owner(i), *start..=end)).collect();
            let all = (0..nodes).map(|i| Node { id: NodeId(i), name: format!("10.0.0.1:{i}") }).collect();
            let topology = Topology::from_parts(1, all, ranges, u32::from(nodes)).expect("a placement");
            let weights = weights.into_iter().enumerate().map(|(i, w)| (NodeId(i as u16), w)).collect();
            (topology, weights)
        })
    })
}

/// Applies the moves, and checks that each slot moves once, from its owner.
fn apply(topology: &Topology, shifts: &[Shift]) -> Topology {
    let mut seen = std::collections::BTreeSet::new();
    for shift in shifts {
        assert!(!shift.slots.is_empty() && shift.slots.is_sorted() && shift.source != shift.target);
        for slot in &shift.slots {
            assert!(seen.insert(*slot), "{slot:?} moves twice");
            assert_eq!(topology.owner(*slot), shift.source);
        }
    }
    shifts.iter().fold(topology.clone(), |t, shift| t.handed_over(&shift.slots, shift.target))
}

proptest! {
    #[test]
    fn every_node_gets_its_share_and_nothing_moves_without_need((topology, weights) in placements()) {
        let total: u64 = weights.values().map(|w| u64::from(*w)).sum();
        prop_assume!(total > 0);
        let shifts = even(&topology, &weights).expect("a node has a weight");
        let after = apply(&topology, &shifts);
        let mut least_possible = 0;
        for (node, weight) in &weights {
            let (before, has) = (topology.slots_of(*node), after.slots_of(*node));
            let exact = SLOT_COUNT as f64 * f64::from(*weight) / total as f64;
            prop_assert!((has as f64 - exact).abs() < 1.0, "{has} for {exact}");
            // Lower bound: the node must give everything above its share, rounded up.
            least_possible += before.saturating_sub(exact.ceil() as usize);
            prop_assert!(!(before > has && shifts.iter().any(|s| s.target == *node)), "a node both gives and takes");
        }
        let moved: usize = shifts.iter().map(|s| s.slots.len()).sum();
        prop_assert!(moved >= least_possible && moved <= least_possible + weights.len(), "{moved} moved, {least_possible} needed");
        prop_assert_eq!(even(&after, &weights).expect("as before"), vec![], "nothing is left to do");
        prop_assert_eq!(even(&topology, &weights).expect("as before"), shifts, "the same question, the same answer");
    }

    #[test]
    fn a_drained_node_has_nothing_and_only_it_gives((topology, weights) in placements(), which in any::<u16>()) {
        let node = NodeId(which % topology.nodes().len() as u16);
        let others: u64 = weights.iter().filter(|(id, _)| **id != node).map(|(_, w)| u64::from(*w)).sum();
        match drain(&topology, node, &weights) {
            Err(_) => prop_assert!(others == 0 && topology.slots_of(node) > 0),
            Ok(shifts) => {
                let after = apply(&topology, &shifts);
                prop_assert_eq!(after.slots_of(node), 0);
                prop_assert!(shifts.iter().all(|s| s.source == node && weights[&s.target] > 0));
                // No receiver is fuller, relative to its weight, than another would be with one more slot.
                for taker in shifts.iter().map(|s| s.target) {
                    for (other, weight) in weights.iter().filter(|(id, w)| **id != node && **w > 0) {
                        let full = after.slots_of(taker) as u64 * u64::from(*weight);
                        prop_assert!(full <= (after.slots_of(*other) as u64 + 1) * u64::from(weights[&taker]));
                    }
                }
            }
        }
    }
}
