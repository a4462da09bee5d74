//! Tests of the moves that bring keys together: at the owner of their slot, or keys of several slots at one node.

use std::collections::BTreeSet;
use std::sync::Arc;

use proptest::prelude::{any, prop, proptest};
use switchyard_policy::colocate::{
    COLOCATE_MAX, ColocationRequest, ColocationStatus, Fleet, Open, Plan, RecentGroups, plan,
};
use switchyard_policy::topology::{
    MOVE_KEYS_MAX, MoveId, NodeId, OVERRIDES_MAX, Slot, Stage, Topology, Transit, crc16_slot,
};

type Key = Arc<[u8]>;

fn key(name: &str) -> Key {
    name.as_bytes().into()
}

fn keys(names: &[&str]) -> ColocationRequest {
    ColocationRequest::Keys(names.iter().map(|name| key(name)).collect())
}

/// The node `steps` after the slot owner of these keys.
fn node(topology: &Topology, steps: u16) -> NodeId {
    NodeId((topology.owner_of(b"{a}").0 + steps) % 3)
}

/// Three nodes, and a slot with three keys at the two other nodes.
fn parted() -> Topology {
    let names: Vec<String> = (0..3).map(|i| format!("127.0.0.1:{}", 7000 + i)).collect();
    let before = Topology::even(&names).expect("three nodes");
    let (near, far) = (node(&before, 1), node(&before, 2));
    before.keys_handed_over(&[], [&key("{a}1"), &key("{a}2")], near).keys_handed_over(&[], [&key("{a}3")], far)
}

/// State of the fleet besides the topology.
#[derive(Default)]
struct FleetState {
    pinned: BTreeSet<Slot>,
    away: BTreeSet<NodeId>,
    drained: BTreeSet<NodeId>,
    recent: RecentGroups,
}

fn plan_with(topology: &Topology, wanted: &[ColocationRequest], open: &[Open<'_>], state: &FleetState) -> Plan {
    let FleetState { pinned, away, drained, recent } = state;
    plan(&Fleet { topology, open, pinned, away, drained, recent }, &wanted.iter().collect::<Vec<_>>())
}

fn propose(topology: &Topology, wanted: &[ColocationRequest], open: &[Open<'_>], away: &[NodeId]) -> Plan {
    let state = FleetState { away: away.iter().copied().collect(), ..FleetState::default() };
    plan_with(topology, wanted, open, &state)
}

fn moves_of(plan: &Plan) -> Vec<(NodeId, NodeId, Vec<String>)> {
    let names = |keys: Vec<&Key>| keys.into_iter().map(|key| String::from_utf8_lossy(key).into_owned()).collect();
    plan.moves.iter().map(|m| (m.source, m.target, names(m.keys.keys().collect()))).collect()
}

#[test]
fn only_required_keys_return_and_once_for_all_requests() {
    let topology = parted();
    let (home, near) = (node(&topology, 0), node(&topology, 1));
    let plan = propose(&topology, &[keys(&["{a}1"]), keys(&["{a}1"]), keys(&["{a}cold"]), keys(&[])], &[], &[]);
    assert_eq!(
        plan.standings,
        [ColocationStatus::Wait, ColocationStatus::Wait, ColocationStatus::Together, ColocationStatus::Together]
    );
    assert_eq!(moves_of(&plan), [(near, home, vec!["{a}1".to_owned()])]);
    assert_eq!(plan.moves[0].keys[&key("{a}1")], 0);
    assert_eq!(plan.moves[0].wanted_by, [0, 1].into());
}

#[test]
fn keys_at_several_nodes_return_from_one_node_after_the_other() {
    let topology = parted();
    let slot = crc16_slot(b"{a}");
    let (home, near, far) = (node(&topology, 0), node(&topology, 1), node(&topology, 2));
    let wanted = [ColocationRequest::Slot(slot), keys(&["{a}3"])];
    let mut now = topology;
    let mut sources = Vec::new();
    loop {
        let plan = propose(&now, &wanted, &[], &[]);
        let [one] = &plan.moves[..] else {
            assert_eq!((plan.standings, plan.moves.len()), (vec![ColocationStatus::Together; 2], 0));
            break;
        };
        assert_eq!(one.target, home);
        sources.push(one.source);
        now = now.keys_handed_over(&[slot], one.keys.keys(), home);
    }
    sources.sort_unstable();
    let mut both = [near, far];
    both.sort_unstable();
    assert_eq!(sources, both);
    assert!(!now.has_overrides());
}

#[test]
fn a_slot_in_a_move_is_waited_for_or_reported_as_stuck() {
    let topology = parted();
    let slots = [crc16_slot(b"{a}")];
    let (home, near, far) = (node(&topology, 0), node(&topology, 1), node(&topology, 2));
    let open = Open {
        id: MoveId(7),
        source: home,
        target: near,
        slots: &slots,
        keys_only: false,
        is_paused: false,
        colocates: false,
    };
    let paused = Open { is_paused: true, ..open };
    for (open, away, standing) in [
        (open, &[][..], ColocationStatus::Wait),
        (open, &[far][..], ColocationStatus::Wait),
        (open, &[near][..], ColocationStatus::Away(near)),
        (paused, &[][..], ColocationStatus::Paused(MoveId(7))),
        (paused, &[near][..], ColocationStatus::Paused(MoveId(7))),
    ] {
        // Also for keys at their slot owner: this move may take them away.
        let plan = propose(&topology, &[keys(&["{a}1"]), keys(&["{a}cold"])], &[open], away);
        assert_eq!((plan.standings, plan.moves.len()), (vec![standing; 2], 0));
    }
    for away in [home, near] {
        let plan = propose(&topology, &[keys(&["{a}1"])], &[], &[away]);
        assert_eq!((plan.standings, plan.moves.len()), (vec![ColocationStatus::Away(away)], 0));
    }
    let plan = propose(&topology, &[keys(&["{a}1"])], &[], &[far]);
    assert_eq!((plan.standings, plan.moves.len()), (vec![ColocationStatus::Wait], 1));
}

#[test]
fn many_requests_do_not_start_as_many_moves() {
    let topology = parted();
    let (home, near) = (node(&topology, 0), node(&topology, 1));
    let others: Vec<[Slot; 1]> = (0..COLOCATE_MAX as u16)
        .map(|n| [Slot::new((crc16_slot(b"{a}").number() + 1 + n) % 16384).expect("a slot")])
        .collect();
    let open: Vec<Open<'_>> = others
        .iter()
        .map(|slots| Open {
            id: MoveId(1),
            source: near,
            target: home,
            slots,
            keys_only: true,
            is_paused: false,
            colocates: true,
        })
        .collect();
    let plan = propose(&topology, &[keys(&["{a}1"])], &open, &[]);
    assert_eq!((plan.standings, plan.moves.len()), (vec![ColocationStatus::Wait], 0));
    let plan = propose(&topology, &[keys(&["{a}1"])], &open[1..], &[]);
    assert_eq!((plan.standings, plan.moves.len()), (vec![ColocationStatus::Wait], 1));
    // Moves without colocation do not count.
    let others: Vec<Open<'_>> = open.iter().map(|open| Open { colocates: false, ..*open }).collect();
    assert_eq!(propose(&topology, &[keys(&["{a}1"])], &others, &[]).moves.len(), 1);
}

fn several(names: &[&str]) -> ColocationRequest {
    ColocationRequest::Several { keys: names.iter().map(|name| key(name)).collect(), at: None }
}

/// Three nodes, and a key of each: keys 0, 3, 6, ... are in slots of the first node, and so on. No two share a slot.
fn spread(count: usize) -> (Topology, Vec<String>) {
    let names: Vec<String> = (0..3).map(|i| format!("127.0.0.1:{}", 7000 + i)).collect();
    let topology = Topology::even(&names).expect("three nodes");
    let (mut keys, mut slots) = (Vec::new(), BTreeSet::new());
    let mut candidates = (0..).map(|n| format!("k{n}"));
    while keys.len() < count {
        let name = candidates.next().expect("endless");
        let is_next = topology.owner_of(name.as_bytes()) == NodeId((keys.len() % 3) as u16);
        if is_next && slots.insert(crc16_slot(name.as_bytes())) {
            keys.push(name);
        }
    }
    (topology, keys)
}

fn at(topology: &Topology, name: &str, node: u16) -> Topology {
    topology.keys_handed_over(&[], [&key(name)], NodeId(node))
}

/// Targets of the moves, each with its number of keys.
fn targets_of(plan: &Plan) -> Vec<(u16, usize)> {
    plan.moves.iter().map(|m| (m.target.0, m.keys.len())).collect()
}

#[test]
fn keys_of_several_slots_come_to_the_node_of_most_of_them() {
    let (topology, k) = spread(9);
    let names = |places: &[usize]| several(&places.iter().map(|place| k[*place].as_str()).collect::<Vec<_>>());
    let target = |topology: &Topology, wanted: ColocationRequest, state: &FleetState| {
        let plan = plan_with(topology, &[wanted], &[], state);
        let targets: BTreeSet<u16> = plan.moves.iter().map(|m| m.target.0).collect();
        assert_eq!((&plan.standings[..], targets.len()), (&[ColocationStatus::Wait][..], 1));
        targets.first().copied()
    };
    let usual = FleetState::default();
    assert_eq!(target(&topology, names(&[0, 1, 4]), &usual), Some(1), "two keys against one");
    assert_eq!(target(&topology, names(&[2, 1]), &usual), Some(1), "the lowest number");
    let placed = at(&topology, &k[0], 2);
    assert_eq!(target(&placed, names(&[0, 1]), &usual), Some(2), "a placement override counts twice");
    let placed = at(&at(&topology, &k[0], 1), &k[1], 2);
    assert_eq!(target(&placed, names(&[0, 1]), &usual), Some(1), "the owner of one of the slots");
    let drained = FleetState { drained: [NodeId(1)].into(), ..FleetState::default() };
    assert_eq!(target(&topology, names(&[0, 1, 4]), &drained), Some(0));
    let watched = ColocationRequest::Several { keys: [0, 1, 4].map(|n: usize| key(&k[n])).into(), at: Some(NodeId(2)) };
    assert_eq!(target(&topology, watched, &usual), Some(2));
    // Without moves at the target, or with a node that is away.
    let together = at(&at(&topology, &k[0], 1), &k[2], 1);
    let plan = plan_with(&together, &[names(&[0, 1, 2]), names(&[0, 3])], &[], &usual);
    assert_eq!((plan.standings[0], targets_of(&plan)), (ColocationStatus::Together, vec![(1, 1)]));
    let away = FleetState { away: [NodeId(1)].into(), ..FleetState::default() };
    let plan = plan_with(&topology, &[names(&[0, 1]), names(&[0, 2])], &[], &away);
    assert_eq!(plan.standings, [ColocationStatus::Away(NodeId(1)), ColocationStatus::Wait]);
    assert_eq!(targets_of(&plan), [(0, 1)]);
}

#[test]
fn requests_with_common_keys_share_a_target() {
    let (topology, k) = spread(6);
    let wanted =
        [several(&[&k[0], &k[1]]), several(&[&k[1], &k[2]]), several(&[&k[2], &k[4]]), several(&[&k[3], &k[5]])];
    let plan = propose(&topology, &wanted, &[], &[]);
    assert_eq!(plan.standings, [ColocationStatus::Wait; 4]);
    // The first three: keys 0, 1, 2 and 4 come to node 1. The last one: key 5 comes to node 0.
    assert_eq!(targets_of(&plan), [(1, 1), (0, 1), (1, 1)]);
    let sizes = plan.groups.iter().map(|group| group.keys.iter().collect::<BTreeSet<_>>().len());
    assert_eq!(sizes.collect::<Vec<_>>(), [4, 2]);
    // Keys that return to their slot's owner decide for the others.
    let parted = at(&topology, &k[0], 2);
    let plan = propose(&parted, &[several(&[&k[0], &k[1]]), keys(&[&k[0]])], &[], &[]);
    assert_eq!(targets_of(&plan), [(0, 1), (0, 1)]);
}

#[test]
fn an_older_request_gets_its_keys_first() {
    let (topology, k) = spread(6);
    let slots = [crc16_slot(k[1].as_bytes())];
    let colocates = Open {
        id: MoveId(3),
        source: NodeId(1),
        target: NodeId(0),
        slots: &slots,
        keys_only: true,
        is_paused: false,
        colocates: true,
    };
    // The first request waits for the second key. Until then, the younger one must not take the first key.
    let wanted = [
        ColocationRequest::Several { keys: vec![key(&k[0]), key(&k[1])], at: Some(NodeId(0)) },
        ColocationRequest::Several { keys: vec![key(&k[0]), key(&k[2])], at: Some(NodeId(2)) },
    ];
    let plan = propose(&topology, &wanted, &[colocates], &[]);
    assert_eq!((plan.standings, plan.moves.len()), (vec![ColocationStatus::Wait; 2], 0));
    // But not if it may wait for long.
    let long = Open { colocates: false, ..colocates };
    let plan = propose(&topology, &wanted, &[long], &[]);
    assert_eq!(targets_of(&plan), [(2, 1)]);
}

#[test]
fn clients_that_watch_at_different_nodes_do_not_exchange_their_keys() {
    let (topology, k) = spread(6);
    let at_node = |places: &[usize], node: u16| ColocationRequest::Several {
        keys: places.iter().map(|place| key(&k[*place])).collect(),
        at: Some(NodeId(node)),
    };
    let wanted = [at_node(&[0, 1], 0), at_node(&[0, 1], 1)];
    let plan = propose(&topology, &wanted, &[], &[]);
    assert_eq!((&plan.standings[..], targets_of(&plan)), (&[ColocationStatus::Wait; 2][..], vec![(0, 1)]));
    // Nor are the keys of a client that is about to use them taken away.
    let arrived = at(&topology, &k[1], 0);
    let plan = propose(&arrived, &wanted, &[], &[]);
    assert_eq!((plan.standings, plan.moves.len()), (vec![ColocationStatus::Together, ColocationStatus::Wait], 0));
    let plan = propose(&arrived, &wanted[1..], &[], &[]);
    assert_eq!(targets_of(&plan), [(1, 2)], "later they come");
}

#[test]
fn keys_come_to_those_that_cannot_move_now() {
    let (topology, k) = spread(9);
    let slot = |place: usize| crc16_slot(k[place].as_bytes());
    // A move of slots, for example of a drained node, may take hours.
    let slots = [slot(1)];
    let open = Open {
        id: MoveId(3),
        source: NodeId(1),
        target: NodeId(2),
        slots: &slots,
        keys_only: false,
        is_paused: false,
        colocates: false,
    };
    let wanted = [several(&[&k[0], &k[1], &k[3]])];
    let drained = FleetState { drained: [NodeId(1)].into(), ..FleetState::default() };
    let paused = Open { is_paused: true, ..open };
    for open in [open, paused] {
        let plan = plan_with(&topology, &wanted, &[open], &drained);
        assert_eq!((plan.standings[0], targets_of(&plan)), (ColocationStatus::Wait, vec![(1, 2)]));
    }
    // While its leg is in transit, the key may be at either node.
    let stage = Stage::Moving { leg: 0 };
    let transit = Transit { move_id: open.id, source: open.source, target: open.target, stage, keys_only: false };
    let moving = topology.with_transits([(transit, &slots[..])]).expect("few");
    let plan = plan_with(&moving, &wanted, &[open], &drained);
    assert_eq!((plan.standings[0], plan.moves.len()), (ColocationStatus::Wait, 0));
    // Two of them at different nodes.
    let mut slots = [slot(0), slot(1)];
    slots.sort_unstable();
    let plan = plan_with(&topology, &wanted, &[Open { slots: &slots, ..paused }], &drained);
    assert_eq!((plan.standings[0], plan.moves.len()), (ColocationStatus::Paused(open.id), 0));
    // A client is about to use its keys.
    let pinned = FleetState { pinned: [slot(2)].into(), ..FleetState::default() };
    let plan = plan_with(&topology, &[several(&[&k[0], &k[2]]), several(&[&k[1], &k[2]])], &[], &pinned);
    assert_eq!(targets_of(&plan), [(2, 1), (2, 1)]);
    let pinned = FleetState { pinned: [slot(2), slot(1)].into(), ..FleetState::default() };
    let plan = plan_with(&topology, &[several(&[&k[1], &k[2]])], &[], &pinned);
    assert_eq!((plan.standings[0], plan.moves.len()), (ColocationStatus::Wait, 0));
}

#[test]
fn groups_that_alternate_are_merged() {
    let (topology, k) = spread(9);
    let mut state = FleetState::default();
    let mut now = topology;
    let groups = [several(&[&k[0], &k[1], &k[4]]), several(&[&k[0], &k[2], &k[5]]), several(&[&k[0], &k[3]])];
    let mut moved = Vec::new();
    for time in 0..9 {
        let plan = plan_with(&now, &groups[time % 3..=time % 3], &[], &state);
        moved.push(plan.moves.iter().map(|m| m.keys.len()).sum::<usize>());
        for one in &plan.moves {
            now = now.keys_handed_over(&[], one.keys.keys(), one.target);
        }
        plan.groups.into_iter().for_each(|group| state.recent.note(group.keys, time as u64));
    }
    // The second group takes the first one along or comes to it, and the third one follows. Then no key moves.
    assert_eq!(moved[3..], [0; 6], "{moved:?}");
    let nodes: BTreeSet<NodeId> = [0, 1, 2, 3, 4, 5].iter().map(|place| now.lives_at(k[*place].as_bytes())).collect();
    assert_eq!(nodes.len(), 1);
    // A client watches one of the keys elsewhere: the others follow.
    let watched = ColocationRequest::Several { keys: vec![key(&k[0]), key(&k[8])], at: Some(NodeId(2)) };
    assert_eq!(targets_of(&plan_with(&now, &[watched], &[], &state)), [(2, 1), (2, 5)]);
}

#[test]
fn keys_that_come_along_are_bounded_and_no_part_of_required_moves() {
    let (topology, k) = spread(6000);
    // Two groups at the first node, each as large as a group may be.
    let group = |from: usize| (from..from + 1024).map(|n| key(&k[3 * n]));
    let mut state = FleetState::default();
    state.recent.note(group(0), 0);
    state.recent.note(group(900), 1);
    let requested = [0, 2700, 1].map(|n: usize| key(&k[n]));
    let wanted = ColocationRequest::Several { keys: requested.into(), at: Some(NodeId(1)) };
    let plan = plan_with(&topology, std::slice::from_ref(&wanted), &[], &state);
    let [required, along] = &plan.moves[..] else { panic!("two moves: {:?}", targets_of(&plan)) };
    assert_eq!((required.keys.len(), required.wanted_by.len()), (2, 1));
    assert_eq!((along.keys.len(), along.wanted_by.len()), (1024 - 3, 0));
    assert_eq!(plan.groups[0].keys.iter().collect::<BTreeSet<_>>().len(), 1024);
    // They take neither the last move that may be in progress, nor keys that a client is about to use.
    let slots: Vec<[Slot; 1]> = (0..COLOCATE_MAX - 2).map(|n| [crc16_slot(k[2 + 3 * n].as_bytes())]).collect();
    let open: Vec<Open<'_>> = slots
        .iter()
        .map(|slots| Open {
            id: MoveId(1),
            source: NodeId(0),
            target: NodeId(1),
            slots,
            keys_only: true,
            is_paused: false,
            colocates: true,
        })
        .collect();
    assert_eq!(targets_of(&plan_with(&topology, std::slice::from_ref(&wanted), &open, &state)), [(1, 2)]);
    // Nor do they use the second half of the directory of placement overrides.
    let others: Vec<Key> = (0..OVERRIDES_MAX / 2).map(|n| key(&format!("{{{}}}{n:05}", k[4]))).collect();
    let full = topology.keys_handed_over(&[], &others, NodeId(2));
    assert_eq!(targets_of(&plan_with(&full, std::slice::from_ref(&wanted), &[], &state)), [(1, 2)]);
    let pinned = FleetState { pinned: (1..800).map(|n| crc16_slot(k[3 * n].as_bytes())).collect(), ..state };
    let plan = plan_with(&topology, &[wanted], &[], &pinned);
    let along: usize = plan.moves[1..].iter().map(|m| m.keys.len()).sum();
    assert!(along < 1024 - 3 && plan.moves[0].keys.len() == 2, "{:?}", targets_of(&plan));
}

#[test]
fn more_keys_than_a_move_may_have_return_in_several_moves() {
    let topology = parted();
    let many: Vec<Key> = (0..=MOVE_KEYS_MAX).map(|number| key(&format!("{{a}}!{number:05}"))).collect();
    let full = topology.keys_handed_over(&[], &many, node(&topology, 1));
    let request = [ColocationRequest::Slot(crc16_slot(b"a"))];
    let first = propose(&full, &request, &[], &[]);
    assert_eq!(first.moves.iter().map(|m| m.keys.len()).collect::<Vec<_>>(), [MOVE_KEYS_MAX]);
    let next = full.keys_handed_over(&[], first.moves[0].keys.keys(), first.moves[0].target);
    assert_eq!(propose(&next, &request, &[], &[]).moves[0].keys.len(), 3, "the rest at this node");
}

proptest! {
    /// Clients that need random keys together, with moves that end in any order.
    #[test]
    fn every_request_gets_its_keys_together(
        sets in prop::collection::vec(prop::collection::vec(0_usize..15, 1..5), 1..30),
        parted in prop::collection::vec((0_usize..15, 0_u16..3), 0..8),
        choices in prop::collection::vec(any::<usize>(), 0..60),
    ) {
        // Of the last three keys, each shares a slot with one of the first three.
        let (topology, mut k) = spread(12);
        for place in 0..3 {
            let tagged = format!("{{{}}}x", k[place]);
            k.push(tagged);
        }
        let mut now = parted.iter().fold(topology, |now, (place, node)| at(&now, &k[*place], *node));
        let mut state = FleetState::default();
        let mut waiting: Vec<ColocationRequest> = sets
            .iter()
            .map(|set| set.iter().map(|place| k[*place].as_str()).collect::<BTreeSet<_>>())
            .map(|names| several(&names.into_iter().collect::<Vec<_>>()))
            .collect();
        /// Id, source, target, slots and keys of a move.
        type Running = (MoveId, NodeId, NodeId, Vec<Slot>, Vec<Key>);
        let mut open: Vec<Running> = Vec::new();
        let (mut next, mut steps) = (0, 0);
        let mut choices = choices.into_iter();
        while !waiting.is_empty() {
            steps += 1;
            assert!(steps < 2000, "no progress: {waiting:?}");
            let choice = choices.next().unwrap_or(0);
            if choice % 3 == 1 && !open.is_empty() {
                let (_, _, target, slots, keys) = open.remove(choice / 3 % open.len());
                now = now.keys_handed_over(&slots, &keys, target);
                continue;
            }
            let under_way: Vec<Open<'_>> = open
                .iter()
                .map(|(id, source, target, slots, _)| Open {
                    id: *id,
                    source: *source,
                    target: *target,
                    slots,
                    keys_only: true,
                    is_paused: false,
                    colocates: true,
                })
                .collect();
            let plan = plan_with(&now, &waiting, &under_way, &state);
            let mut taken: BTreeSet<Slot> = open.iter().flat_map(|(_, _, _, slots, _)| slots.iter().copied()).collect();
            for one in plan.moves {
                let keys: Vec<Key> = one.keys.into_keys().collect();
                assert!(keys.iter().all(|key| now.lives_at(key) == one.source && one.source != one.target));
                let slots: BTreeSet<Slot> = keys.iter().map(|key| crc16_slot(key)).collect();
                assert!(slots.iter().all(|slot| taken.insert(*slot)), "a slot of two moves");
                next += 1;
                open.push((MoveId(next), one.source, one.target, slots.into_iter().collect(), keys));
            }
            plan.groups.into_iter().for_each(|group| state.recent.note(group.keys, steps));
            let mut standings = plan.standings.into_iter();
            waiting.retain(|wanted| {
                let is_together = standings.next() == Some(ColocationStatus::Together);
                if let ColocationRequest::Several { keys, .. } = wanted && is_together {
                    let nodes: BTreeSet<NodeId> = keys.iter().map(|key| now.lives_at(key)).collect();
                    assert_eq!(nodes.len(), 1);
                }
                !is_together
            });
            if choice == 0 && !open.is_empty() {
                let (_, _, target, slots, keys) = open.remove(0);
                now = now.keys_handed_over(&slots, &keys, target);
            }
        }
    }
}
