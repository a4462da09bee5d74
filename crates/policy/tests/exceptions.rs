//! Tests of placement overrides: the directory and routing.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::{any, prop, proptest};
use proptest::prop_assert_eq;
use switchyard_policy::routing::{Route, route, split};
use switchyard_policy::topology::{
    MoveId, Node, NodeId, OVERRIDES_MAX, PartsError, PlaceError, Slot, Stage, Topology, Transit, crc16_slot,
};

fn three() -> Topology {
    let names: Vec<String> = (0..3).map(|i| format!("127.0.0.1:{}", 7000 + i)).collect();
    Topology::even(&names).expect("three nodes")
}

fn key(name: &str) -> Arc<[u8]> {
    name.as_bytes().into()
}

/// A node that does not own the key's slot.
fn other(topology: &Topology, key: &[u8]) -> NodeId {
    NodeId((topology.owner_of(key).0 + 1) % 3)
}

#[test]
fn a_key_moves_elsewhere_and_returns() {
    let before = three();
    let hot = key("{a}hot");
    let (home, away) = (before.owner_of(&hot), other(&before, &hot));
    assert!(!before.has_overrides());
    let slots = [crc16_slot(&hot)];
    let transit =
        Transit { move_id: MoveId(1), source: home, target: away, stage: Stage::Moving { leg: 0 }, keys_only: true };
    let during = before.with_transits([(transit, &slots[..])]).expect("one");
    let after = during.keys_handed_over(&slots, [&hot], away);
    assert_eq!(after.epoch(), during.epoch() + 1);
    assert!(after.is_settled() && after.has_overrides() && after.has_override(slots[0]));
    assert_eq!((after.lives_at(&hot), after.placement_override(&hot)), (away, Some(away)));
    assert_eq!((after.owner_of(&hot), after.lives_at(b"{a}cold")), (home, home), "the slot and its other keys stay");
    assert_eq!((after.overrides_at(away), after.overrides_at(home)), (1, 0));
    assert_eq!(after.placement_overrides().collect::<Vec<_>>(), [(&hot, away)]);
    assert_eq!(route(&after, [&b"{a}hot"[..]].into_iter()), Route::Owner(slots[0], away));
    assert_eq!(route(&after, [&b"{a}hot"[..], b"{a}cold"].into_iter()), Route::Parted(slots[0]));
    assert_eq!(route(&after, [&b"{a}cold"[..], b"{a}warm"].into_iter()), Route::Owner(slots[0], home));
    let parts = split(&after, [&b"{a}cold"[..], b"{a}hot", b"{a}warm"].into_iter());
    assert_eq!(
        parts.iter().map(|p| (p.node, p.keys.clone())).collect::<Vec<_>>(),
        [(home, vec![0, 2]), (away, vec![1])]
    );

    let further = NodeId(3 - home.0 - away.0);
    assert_eq!(after.keys_handed_over(&slots, [&hot], further).lives_at(&hot), further);
    let back = after.keys_handed_over(&slots, [&hot], home);
    assert!(!back.has_overrides());
    assert_eq!(back.lives_at(&hot), home);
}

#[test]
fn a_slot_that_moves_to_an_overrides_node_drops_the_override() {
    let before = three();
    let (one, two) = (key("{a}1"), key("{a}2"));
    let home = before.owner_of(&one);
    let [near, far] = [1, 2].map(|step| NodeId((home.0 + step) % 3));
    let slots = [crc16_slot(&one)];
    let parted = before.keys_handed_over(&slots, [&one], near).keys_handed_over(&slots, [&two], far);
    let moved = parted.handed_over(&slots, near);
    assert_eq!((moved.lives_at(&one), moved.placement_override(&one)), (near, None));
    assert_eq!((moved.lives_at(&two), moved.placement_override(&two)), (far, Some(far)), "others stay where they are");
    assert_eq!(moved.lives_at(b"{a}3"), near);
    let elsewhere = Slot::new((slots[0].number() + 1) % 16384).expect("a slot");
    assert_eq!(parted.handed_over(&[elsewhere], near).placement_overrides().count(), 2);
}

#[test]
fn a_node_with_placement_overrides_stays_in_the_list() {
    let all: Vec<String> = (0..3).map(|i| format!("127.0.0.1:{}", 7000 + i)).collect();
    let two = Topology::even(&all[..2]).expect("two nodes");
    let three = Topology::place(Some(&two), &all).expect("one joins").topology;
    let hot = key("hot");
    let with = three.keys_handed_over(&[], [&hot], NodeId(2));
    let missing = vec![("127.0.0.1:7002".to_owned(), 1)];
    assert_eq!(Topology::place(Some(&with), &all[..2]), Err(PlaceError::OverridesMissing { missing }));
    let home = with.keys_handed_over(&[], [&hot], with.owner_of(&hot));
    assert!(Topology::place(Some(&home), &all[..2]).is_ok());
    let kept = Topology::place(Some(&with), &[all, vec!["127.0.0.1:7003".to_owned()]].concat()).expect("another joins");
    assert_eq!(kept.topology.lives_at(&hot), NodeId(2));
}

#[test]
fn stored_overrides_are_validated() {
    let topology = three();
    let (a, b) = (key("a"), key("b"));
    let (slot, away) = (crc16_slot(&a).number(), other(&topology, &a));
    let stored = |entries: Vec<(Arc<[u8]>, NodeId)>| topology.clone().with_stored_overrides(entries);
    let good = stored(vec![(b.clone(), other(&topology, &b)), (a.clone(), away)]).expect("good");
    assert_eq!(
        (good.lives_at(&a), good.lives_at(&b), good.placement_overrides().count()),
        (away, other(&topology, &b), 2)
    );
    assert_eq!(stored(vec![(a.clone(), NodeId(7))]), Err(PartsError::OverrideAtUnknown { slot, node: NodeId(7) }));
    assert_eq!(stored(vec![(a.clone(), topology.owner_of(&a))]), Err(PartsError::OverrideAtOwner { slot }));
    assert_eq!(stored(vec![(a.clone(), away), (a, away)]), Err(PartsError::OverrideTwice { slot }));
    let many = (0..=OVERRIDES_MAX).map(|i| key(&format!("{{a}}{i}")));
    assert_eq!(stored(many.map(|k| (k, away)).collect()), Err(PartsError::OverrideCount(OVERRIDES_MAX + 1)));
}

#[test]
fn overrides_are_bounded() {
    let topology = three();
    let away = other(&topology, b"a");
    let many: Vec<Arc<[u8]>> = (0..OVERRIDES_MAX).map(|i| key(&format!("{{a}}{i}"))).collect();
    let keys = |count: usize| many[..count].iter().map(|k| &k[..]);
    assert_eq!(topology.room_for_overrides(keys(OVERRIDES_MAX), away), Ok(()));
    let full = topology.keys_handed_over(&[], &many, away);
    let error = full.room_for_overrides([&b"{a}more"[..]], away).expect_err("full");
    assert_eq!((error.existing, error.requested), (OVERRIDES_MAX, 1));
    assert!(error.to_string().contains("--home"), "{error}");
    assert_eq!(
        full.room_for_overrides(keys(OVERRIDES_MAX), topology.owner_of(b"a")),
        Ok(()),
        "home is always possible"
    );
    let long = vec![b'x'; 17 << 20];
    assert!(topology.room_for_overrides([&long[..]], other(&topology, &long)).is_err());
}

proptest! {
    /// After any moves, a key is at the node of its last move, and the directory contains exactly the keys that are not
    /// at their slot owner.
    #[test]
    fn overrides_follow_a_model_through_moves(steps in prop::collection::vec((any::<bool>(), 0_u16..12, 0_u16..3), 0..40)) {
        let keys: Vec<Arc<[u8]>> = (0..12).map(|i| key(&format!("{{{}}}{i}", i % 4))).collect();
        let mut topology = three();
        let mut lives: BTreeMap<Arc<[u8]>, NodeId> = keys.iter().map(|k| (k.clone(), topology.owner_of(k))).collect();
        for (slot_moves, which, node) in steps {
            let (moved, node) = (&keys[usize::from(which)], NodeId(node));
            let slot = crc16_slot(moved);
            if slot_moves {
                let owner = topology.owner(slot);
                for (k, at) in lives.iter_mut().filter(|(k, at)| crc16_slot(k) == slot && **at == owner) {
                    prop_assert_eq!(topology.placement_override(k), None);
                    *at = node;
                }
                topology = topology.handed_over(&[slot], node);
            } else {
                lives.insert(moved.clone(), node);
                topology = topology.keys_handed_over(&[slot], [moved], node);
            }
            for (k, at) in &lives {
                prop_assert_eq!(topology.lives_at(k), *at);
                prop_assert_eq!(topology.placement_override(k), (topology.owner_of(k) != *at).then_some(*at));
            }
            let nodes: Vec<Node> = topology.nodes().cloned().collect();
            let stored: Vec<(Arc<[u8]>, NodeId)> = topology.placement_overrides().map(|(k, n)| (k.clone(), n)).collect();
            let rebuilt = Topology::from_parts(topology.epoch(), nodes, topology.ranges(), topology.next_id())
                .and_then(|rebuilt| rebuilt.with_stored_overrides(stored));
            prop_assert_eq!(rebuilt.as_ref(), Ok(&topology), "the parts are the whole");
        }
    }
}

/// One change with the maximum number of overrides.
#[test]
fn a_change_among_many_overrides_lists_only_the_change() {
    let keys: Vec<Arc<[u8]>> = (0..OVERRIDES_MAX).map(|number| key(&format!("key:{number}"))).collect();
    let alone =
        |topology: &Topology| keys.iter().map(|key| (Arc::clone(key), other(topology, key))).collect::<Vec<_>>();
    let first = three();
    let full = first.clone().with_stored_overrides(alone(&first)).expect("as many as may be");
    assert_eq!(full.override_count(), OVERRIDES_MAX);
    let home = full.owner_of(&keys[7]);
    let next = full.keys_handed_over(&[], [&keys[7]], home);
    assert_eq!(next.overrides_since(&full), [(Arc::clone(&keys[7]), None)]);
    assert_eq!(full.overrides_since(&next), [(Arc::clone(&keys[7]), Some(other(&full, &keys[7])))]);
    assert_eq!(next.override_count(), OVERRIDES_MAX - 1);
}

proptest! {
    /// Compares the directory with a plain map through moves of keys and slots. The difference from any earlier state
    /// converts that state into the later one.
    #[test]
    fn the_directory_equals_a_plain_map(steps in prop::collection::vec((prop::collection::vec(0..40_u8, 0..6), 0..3_u16, any::<bool>()), 1..12)) {
        let mut topology = three();
        let mut plain: BTreeMap<Arc<[u8]>, NodeId> = BTreeMap::new();
        let mut states = vec![(topology.clone(), plain.clone())];
        for (names, target, moves_slots) in steps {
            let keys: Vec<Arc<[u8]>> = names.iter().map(|name| key(&format!("{{{}}}{name}", name % 7))).collect();
            let target = NodeId(target);
            if moves_slots {
                let mut slots: Vec<Slot> = keys.iter().map(|key| crc16_slot(key)).filter(|slot| topology.owner(*slot) != target).collect();
                slots.sort_unstable();
                slots.dedup();
                topology = topology.handed_over(&slots, target);
            } else {
                topology = topology.keys_handed_over(&[], &keys, target);
                plain.extend(keys.iter().map(|key| (Arc::clone(key), target)));
            }
            plain.retain(|key, node| topology.owner_of(key) != *node);
            let listed: BTreeMap<Arc<[u8]>, NodeId> = topology.placement_overrides().map(|(key, node)| (Arc::clone(key), node)).collect();
            prop_assert_eq!(&listed, &plain);
            for node in 0..3 {
                let there = plain.values().filter(|at| **at == NodeId(node)).count();
                prop_assert_eq!(topology.overrides_at(NodeId(node)), there);
            }
            prop_assert_eq!(topology.override_count(), plain.len());
            for (earlier, was) in &states {
                let mut made = was.clone();
                for (key, node) in topology.overrides_since(earlier) {
                    match node {
                        Some(node) => prop_assert_eq!(made.insert(Arc::clone(&key), node) == Some(node), false, "it changed"),
                        None => prop_assert_eq!(made.remove(&key).is_some(), true, "it was there"),
                    }
                }
                prop_assert_eq!(&made, &plain);
            }
            states.push((topology.clone(), plain.clone()));
        }
    }
}
