//! Properties of placements for all node lists.

use std::ops::RangeInclusive;

use proptest::prelude::{any, prop, proptest};
use proptest::strategy::Strategy;
use proptest::{prop_assert, prop_assert_eq};
use switchyard_policy::topology::{MAX_NODES, Node, NodeId, PartsError, PlaceError, SLOT_COUNT, Slot, Topology};

fn names(count: usize) -> Vec<String> {
    (0..count).map(|i| format!("10.0.0.{}:{}", i % 256, 7000 + i)).collect()
}

fn list(names: &[&str]) -> Vec<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

fn name_of_owner(topology: &Topology, slot: Slot) -> &str {
    &topology.node(topology.owner(slot)).expect("owners are nodes").name
}

/// Checks the invariants of a topology, slot by slot.
fn check(topology: &Topology) {
    let mut total = 0;
    for node in topology.nodes() {
        assert!(node.id.index() < topology.node_id_bound());
        assert!(u32::from(node.id.0) < topology.next_id());
        assert_eq!(topology.node(node.id), Some(node));
        let owned: Vec<u16> = Slot::all().filter(|&slot| topology.owner(slot) == node.id).map(Slot::number).collect();
        assert_eq!(topology.slots_of(node.id), owned.len());
        let ranges = topology.ranges_of(node.id);
        let listed: Vec<u16> = ranges.iter().cloned().flatten().collect();
        assert_eq!(listed, owned, "ranges of {} in order", node.name);
        assert!(ranges.is_sorted_by(|a, b| a.end() + 1 < *b.start()), "ranges are maximal");
        total += owned.len();
    }
    assert_eq!(total, SLOT_COUNT, "every owner is a node");
    let ids: Vec<NodeId> = topology.nodes().map(|node| node.id).collect();
    assert!(ids.is_sorted_by(|a, b| a < b), "nodes are in order of their numbers");
    let rebuilt = Topology::from_parts(
        topology.epoch(),
        topology.nodes().cloned().collect(),
        topology.ranges(),
        topology.next_id(),
    );
    assert_eq!(rebuilt.as_ref(), Ok(topology), "the parts are the whole");
}

#[test]
fn even_is_even_for_every_count() {
    for count in (1..=70).chain([100, 127, 128, 129, 500, 1000, MAX_NODES]) {
        let topology = Topology::even(&names(count)).unwrap();
        check(&topology);
        let sizes: Vec<usize> = topology.nodes().map(|node| topology.slots_of(node.id)).collect();
        let (min, max) = (sizes.iter().min().unwrap(), sizes.iter().max().unwrap());
        assert!(max - min <= 1, "{count} nodes: between {min} and {max} slots");
        assert!(topology.nodes().all(|node| topology.ranges_of(node.id).len() == 1));
        assert_eq!(topology.epoch(), 1);
        assert_eq!(topology.node_id_bound(), count);
    }
}

#[test]
fn numbers_follow_the_list_and_slots_follow_the_names() {
    let topology = Topology::even(&list(&["b:1", "a:1"])).unwrap();
    assert_eq!(topology.node(NodeId(0)).unwrap().name, "b:1");
    assert_eq!(topology.ranges_of(NodeId(0)), [8192..=16383]);
    assert_eq!(topology.ranges_of(NodeId(1)), [0..=8191]);
    assert_eq!(topology.owner_of(b"foo"), NodeId(0)); // slot 12182
    assert_eq!(topology.node(NodeId(2)), None);
    assert!(topology.ranges_of(NodeId(2)).is_empty());
}

#[test]
fn invalid_node_lists_are_refused() {
    for place in [Topology::even as fn(&[String]) -> _, |names| {
        let stored = Topology::even(&list(&["a:1"]))?;
        Topology::place(Some(&stored), names).map(|placed| placed.topology)
    }] {
        assert_eq!(place(&[]), Err(PlaceError::NoNodes));
        assert_eq!(place(&list(&["a:1", "b:1", "a:1"])), Err(PlaceError::Duplicate { name: "a:1".into() }));
        assert_eq!(place(&names(MAX_NODES + 1)), Err(PlaceError::TooManyNodes { given: MAX_NODES + 1 }));
    }
}

#[test]
fn a_node_joins_without_slots_and_leaves_again() {
    let first = Topology::place(None, &list(&["a:1", "b:1"])).unwrap();
    assert!(first.changed && first.joined.is_empty() && first.removed.is_empty());

    let second = Topology::place(Some(&first.topology), &list(&["c:1", "b:1", "a:1"])).unwrap();
    assert!(second.changed);
    assert_eq!(second.joined, [NodeId(2)]);
    assert_eq!(second.topology.slots_of(NodeId(2)), 0);
    assert_eq!(second.topology.epoch(), 2);
    assert!(Slot::all().all(|slot| first.topology.owner(slot) == second.topology.owner(slot)));

    let third = Topology::place(Some(&second.topology), &list(&["a:1", "b:1"])).unwrap();
    assert_eq!(third.removed, [Node { id: NodeId(2), name: "c:1".into() }]);
    assert_eq!(third.topology.epoch(), 3);
    assert_eq!(third.topology.node(NodeId(2)), None);

    // Its id is never used again, not even for the same node.
    let fourth = Topology::place(Some(&third.topology), &list(&["a:1", "b:1", "c:1"])).unwrap();
    assert_eq!(fourth.joined, [NodeId(3)]);
    assert_eq!(fourth.topology.node_id_bound(), 4);
    check(&fourth.topology);
}

#[test]
fn a_node_with_slots_cannot_be_dropped() {
    let stored = Topology::even(&list(&["a:1", "b:1", "c:1"])).unwrap();
    let error = Topology::place(Some(&stored), &list(&["b:1", "d:1"])).unwrap_err();
    assert_eq!(error, PlaceError::OwnersMissing { missing: vec![("a:1".into(), 5461), ("c:1".into(), 5462)] });
    let text = error.to_string();
    assert!(text.contains("a:1 (5461 slots), c:1 (5462 slots)"), "{text}");
    assert!(text.contains("add them again"), "{text}");
    let text = Topology::place(Some(&stored), &list(&["b:1", "a:1"])).unwrap_err().to_string();
    assert!(text.contains("node c:1 (5462 slots) still owns"), "{text}");
}

#[test]
fn numbers_run_out_with_an_error() {
    let nodes = vec![Node { id: NodeId(u16::MAX - 1), name: "a:1".into() }];
    let stored = Topology::from_parts(7, nodes, [(NodeId(u16::MAX - 1), 0..=16383)], 65535).unwrap();
    let last = Topology::place(Some(&stored), &list(&["a:1", "b:1"])).unwrap().topology;
    assert_eq!(last.node(NodeId(u16::MAX)).unwrap().name, "b:1");
    check(&last);
    assert_eq!(Topology::place(Some(&last), &list(&["a:1", "b:1", "c:1"])), Err(PlaceError::NoNumberLeft));
}

#[test]
fn invalid_parts_are_refused() {
    let node = |id: u16, name: &str| Node { id: NodeId(id), name: name.into() };
    let two = || vec![node(0, "a:1"), node(1, "b:1")];
    let halves = [(NodeId(0), 0..=8191), (NodeId(1), 8192..=16383)];
    let build = Topology::from_parts;
    assert!(build(1, two(), halves.clone(), 2).is_ok());
    assert_eq!(build(0, two(), halves.clone(), 2), Err(PartsError::EpochZero));
    assert_eq!(build(1, vec![], halves.clone(), 2), Err(PartsError::NodeCount(0)));
    assert_eq!(
        build(1, vec![node(1, "a:1"), node(1, "b:1")], halves.clone(), 2),
        Err(PartsError::NumberTwice(NodeId(1)))
    );
    assert_eq!(
        build(1, vec![node(0, "a:1"), node(1, "a:1")], halves.clone(), 2),
        Err(PartsError::NameTwice("a:1".into()))
    );
    assert_eq!(build(1, two(), halves.clone(), 1), Err(PartsError::NextId { next_id: 1 }));
    assert_eq!(build(1, two(), halves, 65537), Err(PartsError::NextId { next_id: 65537 }));
    let ranges = |ranges: &[(u16, u16, u16)]| {
        let ranges: Vec<_> = ranges.iter().map(|&(id, from, to)| (NodeId(id), from..=to)).collect();
        Topology::from_parts(1, two(), ranges, 2)
    };
    assert_eq!(ranges(&[(0, 0, 32768)]), Err(PartsError::BadRange(0..=32768)));
    let backwards = RangeInclusive::new(9, 8);
    assert_eq!(ranges(&[(0, 9, 8)]), Err(PartsError::BadRange(backwards)));
    assert_eq!(ranges(&[(2, 0, 16383)]), Err(PartsError::UnknownOwner { range: 0..=16383, owner: NodeId(2) }));
    assert_eq!(ranges(&[(0, 0, 10), (1, 10, 16383)]), Err(PartsError::OwnedTwice(10)));
    assert_eq!(ranges(&[(0, 0, 10), (1, 12, 16383)]), Err(PartsError::NotOwned(11)));
    assert_eq!(ranges(&[]), Err(PartsError::NotOwned(0)));
}

/// Arbitrary maps, not only contiguous ones: an owner for each of 64 stripes of 256 slots.
fn any_map() -> impl Strategy<Value = Topology> {
    (1..12_u16, prop::collection::vec(any::<u16>(), 64), any::<u32>()).prop_map(|(count, stripes, epoch)| {
        // Ids with gaps, as after removals.
        let nodes = (0..count).map(|i| Node { id: NodeId(i * 3 + 1), name: format!("n{i}:1") });
        let ranges = stripes.iter().enumerate().map(|(i, owner)| {
            let start = i as u16 * 256;
            (NodeId((owner % count) * 3 + 1), start..=start + 255)
        });
        let next_id = u32::from(count) * 3 + 5;
        Topology::from_parts(u64::from(epoch) + 1, nodes.collect(), ranges, next_id).unwrap()
    })
}

proptest! {
    #[test]
    fn the_same_nodes_in_any_order_give_the_same_map(
        names in prop::collection::btree_set("[a-c]{1,3}:[0-9]{1,4}", 1..40),
        seed in any::<u64>(),
    ) {
        let sorted: Vec<String> = names.into_iter().collect();
        let mut shuffled = sorted.clone();
        // A shuffle determined by the seed.
        shuffled.sort_by_key(|name| name.bytes().fold(seed, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3)));
        let (one, other) = (Topology::even(&sorted).unwrap(), Topology::even(&shuffled).unwrap());
        check(&other);
        for slot in Slot::all() {
            prop_assert_eq!(name_of_owner(&one, slot), name_of_owner(&other, slot));
        }
    }

    #[test]
    fn placing_again_changes_nothing(
        stored in any_map(),
        extra in prop::collection::btree_set("x[0-9]{1,3}:1", 0..6),
        drop_idle in any::<bool>(),
        reverse in any::<bool>(),
    ) {
        check(&stored);
        let mut wanted: Vec<String> = stored
            .nodes()
            .filter(|node| !(drop_idle && stored.slots_of(node.id) == 0))
            .map(|node| node.name.clone())
            .collect();
        wanted.extend(extra);
        if reverse {
            wanted.reverse();
        }
        let placed = Topology::place(Some(&stored), &wanted).unwrap();
        check(&placed.topology);
        prop_assert_eq!(placed.topology.epoch(), stored.epoch() + u64::from(placed.changed));
        prop_assert_eq!(placed.changed, placed.topology != stored);
        prop_assert!(Slot::all().all(|slot| placed.topology.owner(slot) == stored.owner(slot)));
        let mut have: Vec<&String> = placed.topology.nodes().map(|node| &node.name).collect();
        let mut want: Vec<&String> = wanted.iter().collect();
        have.sort();
        want.sort();
        prop_assert_eq!(have, want);
        for id in &placed.joined {
            prop_assert_eq!(stored.node(*id), None);
            prop_assert_eq!(placed.topology.slots_of(*id), 0);
        }

        wanted.rotate_left(1);
        let again = Topology::place(Some(&placed.topology), &wanted).unwrap();
        prop_assert!(!again.changed && again.joined.is_empty() && again.removed.is_empty());
        prop_assert_eq!(again.topology, placed.topology);
    }
}
