//! Tests of the moves that return keys to their slot owner.

use std::sync::Arc;

use switchyard_policy::colocate::{COLOCATE_MAX, ColocationRequest, ColocationStatus, Open, Plan, plan};
use switchyard_policy::topology::{MoveId, NodeId, Slot, Topology, crc16_slot};

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

fn propose(topology: &Topology, wanted: &[ColocationRequest], open: &[Open<'_>], away: &[NodeId]) -> Plan {
    plan(topology, &wanted.iter().collect::<Vec<_>>(), open, |node| away.contains(&node))
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
        [ColocationStatus::Wait, ColocationStatus::Wait, ColocationStatus::AtSlotOwner, ColocationStatus::AtSlotOwner]
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
            assert_eq!((plan.standings, plan.moves.len()), (vec![ColocationStatus::AtSlotOwner; 2], 0));
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
    let open = Open { id: MoveId(7), source: home, target: near, slots: &slots, is_paused: false, colocates: false };
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
        .map(|slots| Open { id: MoveId(1), source: near, target: home, slots, is_paused: false, colocates: true })
        .collect();
    let plan = propose(&topology, &[keys(&["{a}1"])], &open, &[]);
    assert_eq!((plan.standings, plan.moves.len()), (vec![ColocationStatus::Wait], 0));
    let plan = propose(&topology, &[keys(&["{a}1"])], &open[1..], &[]);
    assert_eq!((plan.standings, plan.moves.len()), (vec![ColocationStatus::Wait], 1));
    // Moves without colocation do not count.
    let others: Vec<Open<'_>> = open.iter().map(|open| Open { colocates: false, ..*open }).collect();
    assert_eq!(propose(&topology, &[keys(&["{a}1"])], &others, &[]).moves.len(), 1);
}
