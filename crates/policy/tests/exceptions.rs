//! Tests of placement overrides: the directory and routing.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::{any, prop, proptest};
use proptest::prop_assert_eq;
use switchyard_policy::routing::{Route, route, split};
use switchyard_policy::topology::{
    MoveId, Node, NodeId, OVERRIDE_BYTES_MAX, OVERRIDES_MAX, PartsError, PlaceError, Slot, Stage, Topology, Transit,
    UnusedOverrides, crc16_slot,
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
    let long = long_names(OVERRIDE_BYTES_MAX + 1);
    assert_eq!(stored(long.into_iter().map(|k| (k, away)).collect()), Err(PartsError::OverrideCount(3)));
}

/// Three names in the slot of `a`, of this size together.
fn long_names(bytes: usize) -> Vec<Arc<[u8]>> {
    let name = |number: usize| {
        let mut name = format!("{{a}}{number}").into_bytes();
        name.resize(bytes / 3 + usize::from(number < bytes % 3), b'x');
        name.into()
    };
    (0..3).map(name).collect()
}

#[test]
fn overrides_are_bounded() {
    let topology = three();
    let (home, away) = (topology.owner_of(b"a"), other(&topology, b"a"));
    let keys = |count: usize| std::iter::repeat_n(&b"{a}x"[..], count);
    assert_eq!(topology.room_for_overrides(keys(OVERRIDES_MAX), away), Ok(()));
    assert!(topology.room_for_overrides(keys(OVERRIDES_MAX + 1), away).is_err());
    assert_eq!(topology.room_for_overrides(keys(OVERRIDES_MAX + 1), home), Ok(()), "home is always possible");
    let full = topology.keys_handed_over(&[], &long_names(OVERRIDE_BYTES_MAX - 4), away);
    assert_eq!(full.room_for_overrides(keys(1), away), Ok(()));
    let error = full.room_for_overrides(keys(2), away).expect_err("full");
    assert_eq!((error.existing, error.requested), (3, 2));
    assert!(error.to_string().contains("--home"), "{error}");
}

#[test]
fn only_unused_keys_return_from_a_nearly_full_directory() {
    let first = three();
    let away = other(&first, b"a");
    let short: Vec<Arc<[u8]>> = (0..500).map(|i| key(&format!("{{a}}{i}{}", "x".repeat(40_000)))).collect();
    // The three longest names do not fit a move, and stay.
    let full = first.keys_handed_over(&[], &long_names(OVERRIDE_BYTES_MAX - (26 << 20)), away);
    let full = full.keys_handed_over(&[], &short, away);
    let use_half = || short.iter().step_by(2).for_each(|name| assert_eq!(full.lives_at(name), away));
    let mut unused = UnusedOverrides::default();
    assert_eq!(unused.advance(&full, 1.0, |_, _| false), [], "new entries count as used");
    use_half();
    assert_eq!(unused.advance(&full, 1.0, |slot, _| slot == crc16_slot(b"a")), [], "another move has the slot");
    use_half();
    // Its turn comes in the course of a circle, however slowly the hand turns.
    let mut steps = (0..13).map(|_| unused.advance(&full, 0.0, |_, _| false));
    let found = steps.find(|found| !found.is_empty()).expect("the hand has visited all slots");
    let is_unused = |name: &Arc<[u8]>| short.iter().position(|other| other == name).is_some_and(|at| at % 2 == 1);
    assert!(found.iter().all(|(name, node)| is_unused(name) && *node == away));
    let returned: usize = found.iter().map(|(name, _)| name.len()).sum();
    let excess = full.override_bytes() - (OVERRIDE_BYTES_MAX - OVERRIDE_BYTES_MAX / 8);
    assert!(returned >= excess && returned < excess + 40_100, "{returned} instead of {excess}");
    let rest = full.keys_handed_over(&[], found.iter().map(|(name, _)| name), first.owner_of(b"a"));
    assert_eq!(unused.advance(&rest, 1.0, |_, _| false), [], "there is room again");
    let again = rest.keys_handed_over(&[], found.iter().take(50).map(|(name, _)| name), away);
    assert_eq!(unused.advance(&again, 1.0, |_, _| false), [], "the reserve is free");
}

#[test]
fn keys_change_nodes_only_in_moving_slots() {
    let before = three();
    let (one, two) = (key("{a}1"), key("{b}2"));
    let (slots, away) = ([crc16_slot(&one)], other(&before, &one));
    let transit = Transit {
        move_id: MoveId(1),
        source: before.owner_of(&one),
        target: away,
        stage: Stage::Moving { leg: 0 },
        keys_only: true,
    };
    let observed = before.with_transits([(Transit { stage: Stage::Observed, ..transit }, &slots[..])]).expect("one");
    let moving = before.with_transits([(transit, &slots[..])]).expect("one");
    let after = |topology: &Topology| topology.keys_handed_over(&slots, [&one], away);
    assert!(after(&moving).moves_only_held_keys_since(&moving));
    assert!(
        !after(&observed).moves_only_held_keys_since(&observed) && !after(&before).moves_only_held_keys_since(&before)
    );
    let both = moving.keys_handed_over(&slots, [&one, &two], away);
    assert_eq!(both.moves_only_held_keys_since(&moving), before.owner_of(&two) == away);
    // A slot that arrives at the node of an override does not move its key.
    let parted = after(&moving);
    assert!(parted.handed_over(&slots, away).moves_only_held_keys_since(&parted));
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

/// One change of many overrides.
#[test]
fn a_change_among_many_overrides_lists_only_the_change() {
    const MANY: usize = 100_000;
    let keys: Vec<Arc<[u8]>> = (0..MANY).map(|number| key(&format!("key:{number}"))).collect();
    let alone =
        |topology: &Topology| keys.iter().map(|key| (Arc::clone(key), other(topology, key))).collect::<Vec<_>>();
    let first = three();
    let full = first.clone().with_stored_overrides(alone(&first)).expect("as many as may be");
    assert_eq!(full.override_count(), MANY);
    let home = full.owner_of(&keys[7]);
    let next = full.keys_handed_over(&[], [&keys[7]], home);
    assert_eq!(next.overrides_since(&full), [(Arc::clone(&keys[7]), None)]);
    assert_eq!(full.overrides_since(&next), [(Arc::clone(&keys[7]), Some(other(&full, &keys[7])))]);
    assert_eq!(next.override_count(), MANY - 1);
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

    /// Many keys of few slots, which divide the slots' parts of the trie.
    #[test]
    fn crowded_slots_equal_a_plain_map(steps in prop::collection::vec((0..2000_u32, 1..400_u32, 0..3_u16), 1..12)) {
        let name = |number: u32| key(&format!("{{{}}}{number}", number % 3));
        let first = three();
        let (mut topology, mut plain) = (first.clone(), BTreeMap::new());
        for (from, count, target) in steps {
            let keys: Vec<Arc<[u8]>> = (from..from + count).map(name).collect();
            let before = topology.clone();
            topology = topology.keys_handed_over(&[], &keys, NodeId(target));
            let was: BTreeMap<Arc<[u8]>, NodeId> = plain.clone();
            plain.extend(keys.into_iter().map(|key| (key, NodeId(target))));
            plain.retain(|key, node| topology.owner_of(key) != *node);
            for number in 0..2400 {
                let name = name(number);
                prop_assert_eq!(topology.placement_override(&name), plain.get(&name).copied());
            }
            let changed = plain.iter().filter(|(key, node)| was.get(*key) != Some(*node)).count();
            let removed = was.keys().filter(|key| !plain.contains_key(*key)).count();
            prop_assert_eq!(topology.overrides_since(&before).len(), changed + removed);
            let again = first.clone().with_stored_overrides(plain.clone()).expect("valid").at_epoch(topology.epoch());
            prop_assert_eq!(&again, &topology, "equal whatever the history");
        }
    }
}
