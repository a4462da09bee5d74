//! Tests of the planner: properties of all plans on random problems, and choices in simple cases.

use std::collections::BTreeSet;

use proptest::prelude::*;
use switchyard_policy::planner::{
    Advice, KeyAt, Knobs, Need, Node, OverLimitNode, OverLimitReason, PinnedReason, Plan, Policy, Previous, Problem,
    Review, SlotAt, State, Step, StepSubject, Verdict, held, review, solve,
};
use switchyard_policy::topology::{NodeId, Slot};

fn node(id: u16, load: f64) -> Node {
    Node {
        id: NodeId(id),
        load,
        lasting: load,
        weight: 1,
        capacity: None,
        memory: None,
        keys: 1000,
        state: State::Ready,
    }
}

fn knobs() -> Knobs {
    Knobs { least_set: Some(500.0), ..Knobs::default() }
}

fn slot(number: u16, at: u16, load: f64) -> SlotAt {
    SlotAt { slot: Slot::new(number).expect("a slot"), at: NodeId(at), load, bytes: 10_000 }
}

fn key(name: &str, number: u16, at: u16, writes: f64) -> KeyAt {
    let slot = Slot::new(number).expect("a slot");
    let (at, key) = (NodeId(at), name.as_bytes().into());
    KeyAt { key, slot, at, home: at, reads: 0.0, writes, copied: 0.0, bytes: 100, is_cold: false, stays: None }
}

fn after(plan: &Plan) -> Vec<f64> {
    plan.nodes.iter().map(|node| node.after).collect()
}

/// The problem after the execution of a plan, with unchanged load.
fn carried_out(problem: &Problem, plan: &Plan) -> Problem {
    let mut next = problem.clone();
    for step in &plan.steps {
        match &step.what {
            StepSubject::Key { key, .. } => {
                next.keys
                    .iter_mut()
                    .filter(|known| known.key == *key)
                    .for_each(|known| (known.at, known.is_cold) = (step.to, false));
            }
            StepSubject::Slots(slots) => {
                let slots: BTreeSet<&Slot> = slots.iter().collect();
                next.slots.iter_mut().filter(|known| slots.contains(&known.slot)).for_each(|known| known.at = step.to);
                for key in next.keys.iter_mut().filter(|key| slots.contains(&key.slot)) {
                    if key.at == key.home {
                        key.at = step.to;
                    }
                    key.home = step.to;
                }
            }
        }
    }
    for (node, outlook) in next.nodes.iter_mut().zip(&plan.nodes) {
        let copied: f64 = next.keys.iter().filter(|key| key.at == node.id).map(|key| key.copied).sum();
        (node.load, node.lasting) = (outlook.after + copied, outlook.after + copied);
    }
    next
}

fn problems() -> impl Strategy<Value = Problem> {
    let load = prop_oneof![Just(0.0), 0.0..100.0_f64, 100.0..5000.0_f64];
    let keys =
        prop::collection::vec((0..200_u16, any::<u8>(), load.clone(), 0.0..500.0_f64, 1..100_000_u64, 0..12_u8), 0..30);
    let nodes =
        prop::collection::vec((0..4_u32, prop::option::of(1000.0..20_000.0_f64), 0..8_u8, 0..1_000_000_u64), 1..7);
    let slots = prop::collection::vec(load, 200);
    (nodes, slots, keys, 0..5_u8).prop_map(|(nodes, slots, keys, few)| {
        let count = nodes.len();
        let at = |number: usize| NodeId((number * 7 % 13 % count) as u16);
        let slots: Vec<SlotAt> = slots
            .iter()
            .enumerate()
            .map(|(number, load)| SlotAt {
                slot: Slot::new(number as u16).expect("a slot"),
                at: at(number),
                load: *load,
                bytes: (*load * 3.0) as u64,
            })
            .collect();
        let keys: Vec<KeyAt> = keys
            .into_iter()
            .enumerate()
            .map(|(number, (slot, lives, reads, writes, bytes, kind))| {
                let home = at(usize::from(slot));
                let at = if lives < 60 { NodeId(u16::from(lives) % count as u16) } else { home };
                let copied = if kind == 1 { reads } else { 0.0 };
                let stays = match kind {
                    2 => Some(PinnedReason::Tagged),
                    3 => Some(PinnedReason::Moving),
                    _ => None,
                };
                let slot = Slot::new(slot).expect("a slot");
                KeyAt {
                    key: format!("key:{number}").into_bytes().into(),
                    slot,
                    at,
                    home,
                    reads,
                    writes,
                    copied,
                    bytes,
                    is_cold: kind == 4,
                    stays,
                }
            })
            .collect();
        let nodes = nodes
            .into_iter()
            .enumerate()
            .map(|(number, (weight, capacity, state, memory))| {
                let id = NodeId(number as u16);
                let of_slots: f64 = slots.iter().filter(|slot| slot.at == id).map(|slot| slot.load).sum();
                let load =
                    of_slots + keys.iter().filter(|key| key.at == id).map(|key| key.reads + key.writes).sum::<f64>();
                let state = match state {
                    0 => State::Busy,
                    1 => State::Down,
                    2 => State::Leaving,
                    _ => State::Ready,
                };
                let lasting = if memory % 8 == 0 { load / 2.0 } else { load };
                Node { id, load, lasting, weight, capacity, memory: Some((memory / 2, memory)), keys: 100, state }
            })
            .collect();
        let bytes_max = if few == 0 { 5000 } else { 1 << 30 };
        Problem { nodes, slots, keys, knobs: Knobs { keys_max: usize::from(few) * 5, bytes_max, ..knobs() } }
    })
}

/// `solve`, or `solve` with a bug.
type Solve<'a> = &'a dyn Fn(&Problem, &Previous) -> Plan;

/// Checks the properties of a plan that `solve` does not assert itself.
fn may_be_carried_out(problem: &Problem, recent: &[usize], solve: Solve<'_>) -> Result<(), TestCaseError> {
    let name = |number: &usize| problem.keys.get(*number).map(|key| key.key.clone());
    let slots = recent.iter().map(|number| Slot::new(*number as u16).expect("a slot")).collect();
    let previous = Previous { keys: recent.iter().filter_map(name).collect(), slots, over: Vec::new() };
    let plan = solve(problem, &previous);
    prop_assert_eq!(&plan, &solve(problem, &previous));
    let state = |id: NodeId| problem.nodes.iter().find(|node| node.id == id).map(|node| node.state);
    let may_go = |is_recent: bool, from: NodeId| !is_recent || state(from) == Some(State::Leaving);
    let (mut slots, mut keys) = (BTreeSet::new(), BTreeSet::new());
    for Step { what, from, to, .. } in &plan.steps {
        prop_assert!(from != to && state(*to) == Some(State::Ready));
        prop_assert!(matches!(state(*from), Some(State::Ready | State::Leaving)));
        match what {
            StepSubject::Slots(moved) => {
                for slot in moved {
                    prop_assert!(slots.insert(*slot), "no slot moves twice");
                    prop_assert!(problem.slots.iter().any(|known| known.slot == *slot && known.at == *from));
                    prop_assert!(may_go(previous.slots.contains(slot), *from), "recently moved keys and slots stay");
                }
            }
            StepSubject::Key { key, .. } => {
                prop_assert!(keys.insert(key.clone()), "no key moves twice");
                let known = problem.keys.iter().find(|known| known.key == *key).expect("a key of the problem");
                prop_assert_eq!(known.at, *from);
                prop_assert!(may_go(known.stays == Some(PinnedReason::Moving), *from));
                prop_assert!(may_go(previous.keys.contains(key), *from), "recently moved keys and slots stay");
            }
        }
    }
    let bytes: u64 = plan.steps.iter().map(|step| step.bytes).sum();
    prop_assert!(
        keys.len() <= problem.knobs.keys_max && bytes <= problem.knobs.bytes_max,
        "homecomings keep to the budget, too"
    );
    prop_assert_eq!((plan.price.keys, plan.price.bytes), (keys.len(), bytes));
    prop_assert_eq!(plan.nodes.len(), problem.nodes.len());
    for (node, outlook) in problem.nodes.iter().zip(&plan.nodes) {
        prop_assert_eq!((node.id, node.load), (outlook.node, outlook.before));
        let lasts = node.load.min(node.lasting) > outlook.limit.max(problem.knobs.least(node));
        if plan.verdict == Verdict::Relieved && node.state == State::Ready && node.weight > 0 && lasts {
            prop_assert!(outlook.after <= outlook.limit * (1.0 + 1e-9) + 1e-6, "{outlook:?} is over its limit");
        }
        let is_touched = plan.steps.iter().any(|step| step.from == node.id || step.to == node.id);
        if !is_touched && !problem.keys.iter().any(|key| key.at == node.id && key.copied > 0.0) {
            prop_assert_eq!(node.load, outlook.after, "the newest look counts");
        }
        let comes = plan
            .steps
            .iter()
            .filter(|step| step.to == node.id && !matches!(step.what, StepSubject::Key { is_cold: true, .. }));
        let sources: BTreeSet<NodeId> = comes.map(|step| step.from).collect();
        let fullness = |load: f64, limit: f64| if load <= 0.0 { 0.0 } else { load / limit };
        for source in plan
            .nodes
            .iter()
            .filter(|outlook| sources.contains(&outlook.node) && state(outlook.node) == Some(State::Ready))
        {
            let after = fullness(outlook.after, outlook.limit);
            prop_assert!(
                after <= fullness(source.before, source.limit) + 1e-6,
                "{outlook:?} ends worse than {source:?} was"
            );
        }
    }
    Ok(())
}

/// Checks that the plan for the predicted load is empty: no oscillation.
fn needs_no_other_plan(problem: &Problem, solve: Solve<'_>) -> Result<(), TestCaseError> {
    let mut problem = problem.clone();
    problem
        .nodes
        .iter_mut()
        .for_each(|node| (node.state, node.weight, node.lasting) = (State::Ready, node.weight.max(1), node.load));
    problem.keys.iter_mut().for_each(|key| key.is_cold = false);
    let plan = solve(&problem, &Previous::default());
    if plan.verdict != Verdict::Relieved {
        return Ok(());
    }
    let plan = solve(&carried_out(&problem, &plan), &Previous::default());
    let moved = plan.steps.iter().filter(|step| !matches!(step.what, StepSubject::Key { is_cold: true, .. })).count();
    prop_assert_eq!((plan.verdict, moved), (Verdict::Fine, 0));
    Ok(())
}

fn recent() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(0..30_usize, 0..4)
}

proptest! {
    #[test]
    fn plans_are_executable(problem in problems(), recent in recent()) {
        may_be_carried_out(&problem, &recent, &solve)?;
    }

    #[test]
    fn an_executed_plan_needs_no_other(problem in problems()) {
        needs_no_other_plan(&problem, &solve)?;
    }
}

#[cfg(feature = "planted-bugs")]
#[test]
fn planted_bugs_are_found() {
    use proptest::test_runner::{Config, TestRunner};
    use switchyard_policy::planner::{Bug, solve_wrongly};

    let bugs = [
        Bug::WorseThanBefore,
        Bug::InfeasibleTakenForFeasible,
        Bug::Oscillation,
        Bug::ForgottenCooldown,
        Bug::StaleObservation,
    ];
    for bug in bugs {
        let config = Config { cases: 20_000, failure_persistence: None, max_shrink_iters: 0, ..Config::default() };
        let found =
            TestRunner::new_with_rng(config, proptest::test_runner::TestRng::deterministic_rng(Default::default()))
                .run(&(problems(), recent()), |(problem, recent)| {
                    let solve = |problem: &Problem, previous: &Previous| solve_wrongly(problem, previous, bug);
                    may_be_carried_out(&problem, &recent, &solve)?;
                    needs_no_other_plan(&problem, &solve)
                });
        let why = found.expect_err("a planted bug is found").to_string();
        println!("{bug:?}: {}", why.lines().next().unwrap_or_default());
    }
}

fn skewed() -> Problem {
    let nodes = vec![node(0, 8000.0), node(1, 2000.0), node(2, 2000.0)];
    let slots = (0..60).map(|number| slot(number, number % 3, 100.0)).collect();
    let keys = vec![key("a", 0, 0, 2100.0), key("b", 3, 0, 1800.0), key("c", 6, 0, 500.0)];
    Problem { nodes, slots, keys, knobs: knobs() }
}

#[test]
fn the_hottest_keys_go_to_nodes_with_room() {
    let plan = solve(&skewed(), &Previous::default());
    assert_eq!(plan.verdict, Verdict::Relieved, "{plan:?}");
    assert!(after(&plan).iter().all(|load| (load - 4000.0).abs() <= 400.0), "{:?}", plan.nodes);
    // Two keys of a hundred bytes are cheaper than tens of slots.
    assert_eq!((plan.price.slots, plan.price.keys <= 3), (0, true), "{plan:?}");
    assert!(plan.alternatives.iter().all(|other| !other.relieves || other.price.total >= plan.price.total));
}

#[test]
fn a_node_without_hot_keys_is_relieved_by_slots() {
    let mut problem = skewed();
    problem.keys.clear();
    problem.slots =
        (0..60).map(|number| slot(number, number % 3, if number % 3 == 0 { 400.0 } else { 100.0 })).collect();
    let plan = solve(&problem, &Previous::default());
    assert_eq!((plan.verdict, plan.price.keys), (Verdict::Relieved, 0));
    assert!(after(&plan).iter().all(|load| *load <= 4400.0));
}

#[test]
fn a_spike_and_a_node_between_goal_and_limit_cause_no_move() {
    let mut problem = skewed();
    problem.nodes[0].lasting = 3000.0;
    assert_eq!(solve(&problem, &Previous::default()).verdict, Verdict::Fine);
    // 4,300 with a share of 4,000: below the limit of 4,400, above the goal of 4,200.
    problem.nodes = vec![node(0, 4300.0), node(1, 3700.0), node(2, 4000.0)];
    assert_eq!(solve(&problem, &Previous::default()).verdict, Verdict::Fine);
    let over = Previous { over: vec![NodeId(0)], ..Previous::default() };
    assert_ne!(solve(&problem, &over).verdict, Verdict::Fine);
}

#[test]
fn a_key_or_tag_above_every_limit_is_named_and_nothing_moves() {
    let named = |problem: &Problem| {
        let plan = solve(problem, &Previous::default());
        assert_eq!((plan.verdict, &plan.steps[..], &plan.alternatives[..]), (Verdict::NoneFound, &[][..], &[][..]));
        let [Advice::Unsplittable { key: Some(key), slot: Some(slot), is_slot, load, .. }] = &plan.advice[..] else {
            panic!("{plan:?}")
        };
        (key.clone(), slot.number(), *is_slot, *load)
    };
    let mut problem = skewed();
    problem.keys = vec![key("a", 0, 0, 7500.0), key("b", 3, 0, 400.0)];
    assert_eq!(named(&problem), (b"a"[..].into(), 0, false, 7500.0));
    // Twenty keys with one hash tag, and the slot's other keys.
    problem.keys = (0..20)
        .map(|at| KeyAt {
            stays: Some(PinnedReason::Tagged),
            ..key(&format!("{{t}}:{at}"), 3, 0, 350.0 + f64::from(at))
        })
        .collect();
    assert_eq!(named(&problem), (b"{t}:19"[..].into(), 3, true, 7290.0));
    // A node with enough room takes the slot.
    problem.nodes[2].capacity = Some(20_000.0);
    assert!(!solve(&problem, &Previous::default()).steps.is_empty());
}

#[test]
fn each_node_that_stays_over_its_limit_has_a_reason() {
    let of = |problem: &Problem, previous: &Previous| -> Vec<(u16, OverLimitReason)> {
        held(problem, previous).into_iter().map(|held| (held.node.0, held.why)).collect()
    };
    let none = Previous::default();
    assert_eq!(of(&skewed(), &none), []);
    let with = |change: fn(&mut Problem)| {
        let mut problem = skewed();
        change(&mut problem);
        problem
    };
    assert_eq!(
        of(&with(|problem| problem.knobs.least_set = Some(9000.0)), &none),
        [(0, OverLimitReason::Floor(9000.0))]
    );
    assert_eq!(of(&with(|problem| problem.nodes[0].lasting = 100.0), &none), [(0, OverLimitReason::Brief)]);
    assert_eq!(of(&with(|problem| problem.nodes[0].state = State::Busy), &none), [(0, OverLimitReason::Busy)]);
    assert_eq!(of(&with(|problem| problem.knobs.bytes_max = 10), &none), [(0, OverLimitReason::Budget)]);
    assert_eq!(
        of(&with(|problem| problem.keys = vec![key("a", 0, 0, 7500.0)]), &none),
        [(0, OverLimitReason::Unsplittable)]
    );
    let keys = with(|problem| problem.slots.clear());
    let recent = Previous { keys: keys.keys.iter().map(|key| key.key.clone()).collect(), ..Previous::default() };
    assert_eq!(of(&keys, &recent), [(0, OverLimitReason::Cooldown)]);
    assert_eq!(
        of(&with(|problem| (problem.slots.clear(), problem.keys.clear()).0), &none),
        [(0, OverLimitReason::NoRoom)]
    );
}

#[test]
fn a_node_without_capacity_has_a_higher_floor() {
    let mut problem = skewed();
    problem.knobs.least_set = None;
    for (load, is_over) in [(4900.0, false), (5100.0, true)] {
        (problem.nodes[0].load, problem.nodes[0].lasting) = (load, load);
        assert_eq!(solve(&problem, &Previous::default()).verdict != Verdict::Fine, is_over, "{load}");
    }
    problem.nodes.iter_mut().for_each(|node| (node.load, node.capacity) = (node.load / 8.0, Some(600.0)));
    problem.nodes[0].lasting = problem.nodes[0].load;
    assert_ne!(solve(&problem, &Previous::default()).verdict, Verdict::Fine);
}

#[test]
fn a_node_without_remedy_does_not_block_others() {
    let nodes = vec![node(0, 9000.0), node(1, 4000.0), node(2, 500.0), node(3, 500.0)];
    // Node 0 has one key that no node can take.
    let keys = vec![key("a", 0, 0, 9000.0), key("b", 1, 1, 900.0), key("c", 5, 1, 800.0)];
    let mut problem = Problem { nodes, slots: Vec::new(), keys, knobs: knobs() };
    problem.nodes.iter_mut().for_each(|node| node.capacity = Some(3000.0));
    let plan = solve(&problem, &Previous::default());
    assert_eq!(plan.verdict, Verdict::Partly);
    assert!(!plan.steps.is_empty() && plan.steps.iter().all(|step| step.from == NodeId(1)), "{plan:?}");
    assert!(plan.nodes[1].after <= plan.nodes[1].limit);
}

#[test]
fn a_node_of_weight_0_gets_and_gives_nothing() {
    let mut problem = skewed();
    (problem.nodes[1].weight, problem.nodes[1].capacity) = (0, Some(9000.0));
    let plan = solve(&problem, &Previous::default());
    assert!(
        !plan.steps.is_empty() && plan.steps.iter().all(|step| step.from == NodeId(0) && step.to == NodeId(2)),
        "{plan:?}"
    );
}

#[test]
fn a_key_served_by_hot_copies_does_not_move() {
    let mut problem = skewed();
    (problem.nodes[0].load, problem.nodes[0].lasting) = (6400.0, 6400.0);
    for key in &mut problem.keys {
        (key.reads, key.writes, key.copied) = (key.writes, 0.0, key.writes);
    }
    let plan = solve(&problem, &Previous::default());
    assert_eq!((plan.verdict, plan.steps.len()), (Verdict::Fine, 0), "{plan:?}");
}

#[test]
fn a_cold_key_returns_and_a_recently_moved_one_stays() {
    let mut problem = skewed();
    problem.nodes.iter_mut().for_each(|node| (node.load, node.lasting) = (4000.0, 4000.0));
    problem.keys = vec![
        KeyAt { at: NodeId(1), is_cold: true, ..key("a", 0, 0, 1.0) },
        KeyAt { at: NodeId(1), ..key("b", 3, 0, 1.0) },
    ];
    let plan = solve(&problem, &Previous::default());
    let [Step { what: StepSubject::Key { key, is_cold: true, .. }, from, to, .. }] = plan.steps.as_slice() else {
        panic!("{plan:?}")
    };
    assert_eq!((&**key, *from, *to), (&b"a"[..], NodeId(1), NodeId(0)));
    let recent = Previous { keys: vec![b"a"[..].into()], ..Previous::default() };
    assert!(solve(&problem, &recent).steps.is_empty());
}

#[test]
fn a_node_being_removed_gives_everything() {
    let mut problem = skewed();
    problem.nodes[2].state = State::Leaving;
    problem.keys.push(KeyAt { at: NodeId(2), ..key("d", 9, 0, 10.0) });
    let plan = solve(&problem, &Previous::default());
    let gone: usize = plan
        .steps
        .iter()
        .filter(|step| step.from == NodeId(2))
        .map(|step| if let StepSubject::Slots(slots) = &step.what { slots.len() } else { 1 })
        .sum();
    assert_eq!((gone, plan.verdict), (21, Verdict::Relieved), "{plan:?}");
    // Also without any load.
    problem.nodes.iter_mut().for_each(|node| (node.load, node.lasting) = (0.0, 0.0));
    problem.slots.iter_mut().for_each(|slot| slot.load = 0.0);
    problem.keys.clear();
    let plan = solve(&problem, &Previous::default());
    assert_eq!((plan.verdict, plan.price.slots), (Verdict::Relieved, 20), "{plan:?}");
    // A slot that fits nowhere stays, and the node is not empty.
    problem.nodes[0].memory = Some((100, 100));
    problem.nodes[1].memory = Some((100_000, 180_000));
    let plan = solve(&problem, &Previous::default());
    assert!(plan.verdict == Verdict::Partly && plan.price.slots == 6, "{plan:?}");
}

#[test]
fn capacities_show_missing_and_excess_nodes() {
    let mut problem = skewed();
    problem.nodes.iter_mut().for_each(|node| node.capacity = Some(4000.0));
    let plan = solve(&problem, &Previous::default());
    assert!(
        plan.advice
            .iter()
            .any(|advice| matches!(advice, Advice::AddNode { missing } if (missing - 1200.0).abs() < 1.0)),
        "{plan:?}"
    );
    problem.nodes.iter_mut().for_each(|node| node.capacity = Some(40_000.0));
    let plan = solve(&problem, &Previous::default());
    assert_eq!(plan.verdict, Verdict::Fine);
    assert!(matches!(plan.advice.as_slice(), [Advice::RemoveNode { node: NodeId(1) }]), "{plan:?}");
}

/// The paper's workload: 98, 1, and 1 % of the load, over twenty keys by Zipf.
#[test]
fn each_policy_of_the_paper_follows_its_description() {
    let shares: Vec<f64> = (1..=20).map(|rank| 1.0 / f64::from(rank)).collect();
    let all: f64 = shares.iter().sum();
    let keys: Vec<KeyAt> = shares
        .iter()
        .enumerate()
        .map(|(rank, share)| {
            key(
                &format!("k{rank:02}"),
                rank as u16,
                if rank == 18 {
                    1
                } else if rank == 19 {
                    2
                } else {
                    0
                },
                20_000.0 * share / all,
            )
        })
        .collect();
    let load = |id: u16| keys.iter().filter(|key| key.at == NodeId(id)).map(KeyAt::load).sum::<f64>();
    let nodes = (0..3).map(|id| node(id, load(id))).collect();
    let problem = |policy| Problem { nodes, slots: Vec::new(), keys: keys.clone(), knobs: Knobs { policy, ..knobs() } };
    let problem = problem(Policy::Switchyard);
    let of = |policy| solve(&Problem { knobs: Knobs { policy, ..knobs() }, ..problem.clone() }, &Previous::default());
    #[cfg(feature = "research")]
    {
        let printed = of(Policy::MakrisPrinted);
        assert_eq!(
            (printed.steps.len(), &printed.steps[0].what),
            (1, &StepSubject::Key { key: b"k00"[..].into(), slot: Slot::FIRST, is_cold: false })
        );
    }
    for policy in [Policy::MakrisFfd, Policy::MakrisSafe, Policy::Switchyard] {
        let plan = of(policy);
        assert_eq!(plan.verdict, Verdict::Relieved, "{policy:?}");
        assert!(after(&plan).iter().all(|load| *load <= 20_000.0 / 3.0 * 1.1 + 1e-6), "{policy:?}: {:?}", plan.nodes);
    }
    // A key that fits nowhere: the text moves it, the fit test keeps it.
    let mut big = problem;
    big.keys[0].writes += 15_000.0;
    (big.nodes[0].load, big.nodes[0].lasting) = (big.nodes[0].load + 15_000.0, big.nodes[0].lasting + 15_000.0);
    let moves_it = |policy| {
        let plan = solve(&Problem { knobs: Knobs { policy, ..knobs() }, ..big.clone() }, &Previous::default());
        plan.steps.iter().any(|step| matches!(&step.what, StepSubject::Key { key, .. } if **key == *b"k00"))
    };
    assert_eq!([Policy::MakrisFfd, Policy::MakrisSafe, Policy::Switchyard].map(moves_it), [true, false, false]);
}

/// The largest fleet: less than a second in a release build, a few seconds here.
#[test]
fn a_large_fleet_is_solved() {
    let nodes = (0..2048)
        .map(|id| Node { capacity: Some(4000.0), ..node(id, if id % 16 == 0 { 6300.0 } else { 1000.0 }) })
        .collect();
    let slots =
        (0..16384).map(|number| slot(number, number % 2048, if number % 16 == 0 { 600.0 } else { 120.0 })).collect();
    let keys = (0..10_000_u32).map(|number| {
        key(
            &format!("k{number}"),
            (number % 16384) as u16,
            (number % 2048) as u16,
            if number % 16 == 0 { 300.0 } else { 5.0 },
        )
    });
    let knobs = Knobs { keys_max: 10_000, ..knobs() };
    let plan = solve(&Problem { nodes, slots, keys: keys.collect(), knobs }, &Previous::default());
    assert_eq!(plan.verdict, Verdict::Relieved);
}

/// Node 0 uses 168 of 100 MB, node 1 has 60 MB free, and node 2 is at eight tenths. Each slot of node 0 takes 1 MB.
fn short_of_memory() -> Problem {
    const MB: u64 = 1 << 20;
    let mut problem = skewed();
    problem.keys.clear();
    problem.slots =
        (0..168).map(|number| SlotAt { bytes: MB, ..slot(number, 0, if number == 5 { 900.0 } else { 0.5 }) }).collect();
    for (node, (used, most)) in problem.nodes.iter_mut().zip([(168, 100), (190, 1000), (80, 100)]) {
        (node.load, node.lasting, node.memory) = (1000.0, 1000.0, Some((used * MB, most * MB)));
    }
    problem
}

#[test]
fn a_node_without_memory_gives_its_idle_slots_to_one_with_room() {
    let problem = short_of_memory();
    let plan = solve(&problem, &Previous::default());
    let [Step { what: StepSubject::Slots(slots), from: NodeId(0), to: NodeId(1), need: Need::Memory, .. }] =
        plan.steps.as_slice()
    else {
        panic!("{plan:?}")
    };
    assert_eq!((plan.verdict, slots.len()), (Verdict::Relieved, 83), "down to 85 of 100 MB");
    assert!(slots.iter().all(|slot| slot.number() != 5), "the busy slot stays");
    // The review depends on the memory freed.
    let mut later = problem.clone();
    later.nodes[0].memory = Some((90 << 20, 100 << 20));
    assert!(matches!(review(&later, &plan, 1.0), Review::Helped(_)));
    assert!(matches!(review(&problem, &plan, 1.0), Review::Unhelpful(_)));
    // Recently moved slots stay.
    let recent = Previous { slots: problem.slots.iter().map(|slot| slot.slot).collect(), ..Previous::default() };
    assert_eq!(solve(&problem, &recent).verdict, Verdict::NoneFound);
}

#[test]
fn a_node_without_memory_is_named_if_no_node_has_room() {
    let mut problem = short_of_memory();
    problem.nodes[1].memory = problem.nodes[2].memory;
    let plan = solve(&problem, &Previous::default());
    assert_eq!((plan.verdict, plan.steps.len()), (Verdict::NoneFound, 0));
    assert_eq!(
        held(&problem, &Previous::default()),
        [OverLimitNode { node: NodeId(0), why: OverLimitReason::NoMemory }]
    );
    // A full cache that evicts keys has no free memory at any node, so nothing moves.
    problem.nodes.iter_mut().for_each(|node| node.memory = Some((100 << 20, 100 << 20)));
    assert!(solve(&problem, &Previous::default()).steps.is_empty());
}
