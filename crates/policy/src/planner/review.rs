//! Reviews a decision: whether it helped, and whether to revert it.
//!
//! Only the nodes of the decision count. Others may be full for other reasons, which a new plan addresses.

use std::collections::{BTreeMap, BTreeSet};

use super::{Fleet, InjectedBug, Name, Need, Plan, Price, Problem, State, Step, StepSubject, Verdict};
use crate::topology::NodeId;

/// Relative changes below this are noise.
const NOISE: f64 = 0.02;

/// Result of a decision.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Review {
    /// The nodes are less full than before, or below their limits, with most of the promised relief.
    Helped(Effect),
    /// The nodes lost most of the promised load, but the load of the moved keys has ended and other load has replaced
    /// it.
    Gone(Effect),
    /// The nodes are as full as before, or less than half of the promised relief was achieved.
    Unhelpful(Effect),
    /// One of the nodes is down, removed, or part of another move.
    Unclear,
}

/// Measured effect of a decision.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Effect {
    /// Load of the fullest of its nodes, relative to its limit.
    pub after: f64,
    /// Promised relief of the sources, in requests per second.
    pub promised: f64,
    /// Measured relief of the sources, in requests per second; negative if their load rose. Growth of the whole fleet
    /// is factored out.
    pub relief: f64,
    /// Promised and measured relief of nodes with too little memory, in bytes. `None`: the decision did not concern
    /// memory.
    pub bytes: Option<(u64, u64)>,
}

/// Returns the nodes of these steps.
#[must_use]
pub fn nodes_of(steps: &[Step]) -> BTreeSet<NodeId> {
    steps.iter().flat_map(|step| [step.from, step.to]).collect()
}

/// Returns the load of the fullest of these nodes, relative to its limit. Nodes below their minimum load or with limit
/// 0 do not count.
#[must_use]
pub fn fullest_at(problem: &Problem, nodes: &BTreeSet<NodeId>) -> f64 {
    fullest(&Fleet::of(problem, InjectedBug::default()), nodes, &BTreeMap::new())
}

/// Like [`fullest_at`], with changed loads.
fn fullest(fleet: &Fleet<'_>, nodes: &BTreeSet<NodeId>, shifted: &BTreeMap<NodeId, f64>) -> f64 {
    let fullness = |id: &NodeId| {
        let place = fleet.nodes.get(id).filter(|place| place.limit > 0.0)?;
        let load = place.load + shifted.get(id).copied().unwrap_or_default();
        (load >= place.least).then(|| place.fullness(load))
    };
    nodes.iter().filter_map(fullness).fold(0.0, f64::max)
}

/// Compares the current load with that before a decision. `before`: [`fullest_at`] its nodes at that time.
#[must_use]
pub fn review(problem: &Problem, plan: &Plan, before: f64) -> Review {
    let fleet = Fleet::of(problem, InjectedBug::default());
    let nodes = nodes_of(&plan.steps);
    let is_quiet = |id: &NodeId| {
        fleet.nodes.get(id).is_some_and(|place| matches!(place.node.state, State::Ready | State::Leaving))
    };
    if !nodes.iter().all(is_quiet) {
        return Review::Unclear;
    }
    let after = fullest(&fleet, &nodes, &BTreeMap::new());
    let (promised, relief) = relief(problem, plan);
    let bytes = bytes(problem, plan);
    let effect = Effect { after, promised, relief, bytes };
    let for_requests = || plan.steps.iter().filter(|step| step.need == Need::Requests);
    let moved: f64 = for_requests().map(|step| step.load).sum();
    let seen: f64 = for_requests().map(|step| load_now(problem, step)).sum();
    match () {
        () if relief < promised / 2.0 || bytes.is_some_and(|(promised, relief)| relief < promised / 2) => {
            Review::Unhelpful(effect)
        }
        () if for_requests().next().is_none() => Review::Helped(effect),
        () if after < before * (1.0 - NOISE) || after <= 1.0 + NOISE => Review::Helped(effect),
        () if seen < moved / 2.0 => Review::Gone(effect),
        () => Review::Unhelpful(effect),
    }
}

/// Promised and measured relief of the sources, in requests per second.
fn relief(problem: &Problem, plan: &Plan) -> (f64, f64) {
    let mut given: BTreeMap<NodeId, f64> = BTreeMap::new();
    for step in plan.steps.iter().filter(|step| step.need == Need::Requests) {
        *given.entry(step.from).or_default() += step.load;
        *given.entry(step.to).or_default() -= step.load;
    }
    given.retain(|_, load| *load > 0.0);
    let of = |loads: &mut dyn Iterator<Item = (NodeId, f64)>| {
        loads.fold((0.0, 0.0), |(all, own), (id, load)| {
            (all + load, own + if given.contains_key(&id) { load } else { 0.0 })
        })
    };
    let (all_before, before) = of(&mut plan.nodes.iter().map(|node| (node.node, node.before)));
    let (all_now, now) = of(&mut problem.nodes.iter().map(|node| (node.id, node.load)));
    let growth = if all_before > 0.0 { (all_now / all_before).max(1.0) } else { 1.0 };
    (given.values().sum(), before - now / growth)
}

/// Promised and measured relief of nodes with too little memory, in bytes.
fn bytes(problem: &Problem, plan: &Plan) -> Option<(u64, u64)> {
    let steps = || plan.steps.iter().filter(|step| step.need == Need::Memory);
    let sources: BTreeSet<NodeId> = steps().map(|step| step.from).collect();
    let before: u64 =
        plan.nodes.iter().filter(|node| sources.contains(&node.node)).filter_map(|node| Some(node.memory?.0)).sum();
    let now: u64 =
        problem.nodes.iter().filter(|node| sources.contains(&node.id)).filter_map(|node| Some(node.memory?.0)).sum();
    steps().next().is_some().then(|| (steps().map(|step| step.bytes).sum(), before.saturating_sub(now)))
}

/// Returns the plan that reverts a decision.
///
/// # Errors
/// The reason not to revert: the budget is used up, memory is full, or it would not help.
pub fn revert(problem: &Problem, steps: &[Step]) -> Result<Plan, &'static str> {
    let fleet = Fleet::of(problem, InjectedBug::default());
    let is_there = |step: &&Step| match &step.what {
        StepSubject::Key { key, .. } => of_key(problem, key).is_none_or(|known| known.at == step.to),
        StepSubject::Slots(_) => true,
    };
    let back = |step: &Step| Step { from: step.to, to: step.from, load: load_now(problem, step), ..step.clone() };
    let steps: Vec<Step> = steps.iter().filter(is_there).map(back).collect();
    let (plan, shifted, bytes) = plan_of(&fleet, steps);
    let Plan { steps, price, .. } = &plan;
    let nodes = nodes_of(steps);
    let place = |id: &NodeId| fleet.nodes.get(id);
    match () {
        () if steps.is_empty() => Err("none of its keys are where it moved them"),
        () if price.keys > problem.knobs.keys_max || price.bytes > problem.knobs.bytes_max => {
            Err("the budget does not permit to revert it")
        }
        () if !nodes.iter().all(|id| place(id).is_some_and(|place| place.node.state == State::Ready)) => {
            Err("one of its nodes cannot take part in a move now")
        }
        () if bytes.iter().any(|(to, bytes)| place(to).is_some_and(|place| !place.has_memory(0, *bytes))) => {
            Err("it no longer fits into the memory of the node that it came from")
        }
        () if fullest(&fleet, &nodes, &shifted) >= fullest(&fleet, &nodes, &BTreeMap::new()) * (1.0 - NOISE) => {
            Err("reverting it would not help either")
        }
        () => Ok(plan),
    }
}

/// Returns the plan that reverts these steps on an operator's request, whether it helps or not.
///
/// # Errors
/// If one of the nodes cannot take part in a move, or its memory is full.
pub fn undo(problem: &Problem, steps: Vec<Step>) -> Result<Plan, &'static str> {
    let fleet = Fleet::of(problem, InjectedBug::default());
    let back = |step: Step| Step { from: step.to, to: step.from, load: load_now(problem, &step), ..step };
    let (plan, _, bytes) = plan_of(&fleet, steps.into_iter().map(back).collect());
    let place = |id: &NodeId| fleet.nodes.get(id);
    match () {
        () if !nodes_of(&plan.steps)
            .iter()
            .all(|id| place(id).is_some_and(|place| matches!(place.node.state, State::Ready))) =>
        {
            Err("one of its nodes has left, is down, or takes part in a move now")
        }
        () if bytes.iter().any(|(to, bytes)| place(to).is_some_and(|place| !place.has_memory(0, *bytes))) => {
            Err("it no longer fits into the memory of the node that it came from")
        }
        () => Ok(plan),
    }
}

/// The plan with these steps, the load change of each node, and the bytes that it receives.
fn plan_of(fleet: &Fleet<'_>, steps: Vec<Step>) -> (Plan, BTreeMap<NodeId, f64>, BTreeMap<NodeId, u64>) {
    let mut price = Price::default();
    let (mut shifted, mut bytes) = (BTreeMap::new(), BTreeMap::new());
    for step in &steps {
        match &step.what {
            StepSubject::Key { .. } => price.add_key(step.bytes),
            StepSubject::Slots(slots) => {
                price = Price {
                    bytes: price.bytes + step.bytes,
                    slots: price.slots + slots.len(),
                    total: price.total + step.bytes as f64,
                    ..price
                };
            }
        }
        *shifted.entry(step.from).or_default() -= step.load;
        *shifted.entry(step.to).or_default() += step.load;
        *bytes.entry(step.to).or_default() += step.bytes;
    }
    let nodes = fleet.outlook(&steps);
    (
        Plan { verdict: Verdict::Partly, nodes, steps, price, alternatives: Vec::new(), advice: Vec::new() },
        shifted,
        bytes,
    )
}

fn of_key<'p>(problem: &'p Problem, key: &Name) -> Option<&'p super::KeyAt> {
    problem.keys.iter().find(|known| known.key == *key)
}

/// Current load of a moved key or slots. A problem lists slots only while their node is overloaded, so slots count with
/// their previous load.
fn load_now(problem: &Problem, step: &Step) -> f64 {
    match &step.what {
        StepSubject::Key { key, .. } => of_key(problem, key).map_or(0.0, |known| known.load()),
        StepSubject::Slots(_) => step.load,
    }
}

#[cfg(test)]
mod tests {
    use super::super::{KeyAt, Knobs, Node, Outlook};
    use super::*;
    use crate::topology::Slot;

    fn node(id: u16, load: f64, state: State) -> Node {
        Node {
            id: NodeId(id),
            load,
            lasting: load,
            weight: 1,
            capacity: Some(1000.0),
            memory: Some((100, 1000)),
            keys: 10,
            state,
        }
    }

    fn key(at: u16, writes: f64) -> KeyAt {
        let (slot, at, home) = (Slot::new(7).expect("a slot"), NodeId(at), NodeId(0));
        KeyAt {
            key: b"k"[..].into(),
            slot,
            at,
            home,
            reads: 0.0,
            writes,
            copied: 0.0,
            bytes: 100,
            is_cold: false,
            stays: None,
        }
    }

    /// A key of 400 requests moved from node 0, which had `before`, to node 1; node 2 is always overloaded. Limits are
    /// 900.
    fn moved(before: f64, loads: [f64; 2], key_now: f64) -> (Problem, Plan) {
        let nodes =
            vec![node(0, loads[0], State::Ready), node(1, loads[1], State::Ready), node(2, 5000.0, State::Ready)];
        let key = key(1, key_now);
        let what = StepSubject::Key { key: key.key.clone(), slot: key.slot, is_cold: false };
        let steps = vec![Step { what, from: NodeId(0), to: NodeId(1), load: 400.0, bytes: 100, need: Need::Requests }];
        let outlook = |(id, before)| Outlook { node: NodeId(id), before, after: 0.0, limit: 900.0, memory: None };
        let nodes_then = [(0, before), (1, 100.0), (2, 5000.0)].map(outlook).to_vec();
        let plan = Plan {
            verdict: Verdict::Relieved,
            steps,
            price: Price::default(),
            nodes: nodes_then,
            alternatives: vec![],
            advice: vec![],
        };
        (Problem { nodes, slots: Vec::new(), keys: vec![key], knobs: Knobs::default() }, plan)
    }

    #[test]
    fn a_node_outside_the_decision_does_not_count() {
        let (mut problem, plan) = moved(1200.0, [850.0, 800.0], 400.0);
        assert!(matches!(review(&problem, &plan, 1.3), Review::Helped(_)));
        // A node with weight 0 that still has load does not count either.
        problem.nodes[0].weight = 0;
        assert!(fullest_at(&problem, &nodes_of(&plan.steps)) < 1.0);
    }

    #[test]
    fn noise_around_a_limit_is_no_failure() {
        let (problem, plan) = moved(1200.0, [910.0, 500.0], 400.0);
        assert!(matches!(review(&problem, &plan, 1.02), Review::Helped(_)));
    }

    #[test]
    fn less_than_half_of_the_promised_relief_is_a_failure() {
        // The load decreased, but by less than the 400 requests promised.
        let (problem, plan) = moved(1300.0, [1150.0, 250.0], 400.0);
        let Review::Unhelpful(Effect { promised, relief, .. }) = review(&problem, &plan, 1.44) else {
            panic!("it has failed")
        };
        assert_eq!((promised, relief), (400.0, 150.0));
        // A load that has ended is a failure too if the node's total is unchanged: the moved key was not the cause.
        let (problem, plan) = moved(1300.0, [1300.0, 100.0], 0.0);
        assert!(matches!(review(&problem, &plan, 1.44), Review::Unhelpful(_)));
        // The load of the whole fleet has doubled: the node would have 2,600.
        let (mut problem, plan) = moved(1300.0, [1700.0, 1000.0], 800.0);
        problem.nodes[2].load = 10_100.0;
        let Review::Unhelpful(Effect { relief, .. }) = review(&problem, &plan, 1.44) else {
            panic!("it is over its limit")
        };
        assert_eq!(relief, 450.0);
    }

    #[test]
    fn a_node_that_is_down_or_moving_makes_the_review_unclear() {
        for state in [State::Down, State::Busy] {
            let (mut problem, plan) = moved(2000.0, [2000.0, 500.0], 400.0);
            problem.nodes[1].state = state;
            assert_eq!(review(&problem, &plan, 1.3), Review::Unclear);
        }
    }

    #[test]
    fn a_decision_is_reverted_only_if_that_helps() {
        // The target is fuller than the source was: the key returns.
        let (problem, plan) = moved(1080.0, [500.0, 1300.0], 400.0);
        assert!(matches!(review(&problem, &plan, 1.2), Review::Unhelpful(_)));
        let back = revert(&problem, &plan.steps).expect("a plan");
        assert_eq!((back.steps[0].from, back.steps[0].to, back.price.keys), (NodeId(1), NodeId(0), 1));
        // The source is as full as before for other reasons, and the key would add to that.
        let (problem, plan) = moved(1080.0, [1100.0, 500.0], 400.0);
        assert!(matches!(review(&problem, &plan, 1.2), Review::Unhelpful(_)));
        assert_eq!(revert(&problem, &plan.steps), Err("reverting it would not help either"));
        // The key's load has ended, and another load has filled the target.
        let (problem, plan) = moved(1080.0, [680.0, 1300.0], 10.0);
        assert!(matches!(review(&problem, &plan, 1.2), Review::Gone(_)));
    }

    #[test]
    fn a_revert_needs_budget_and_memory() {
        let (mut problem, Plan { steps, .. }) = moved(1080.0, [500.0, 1300.0], 400.0);
        problem.knobs.keys_max = 0;
        assert!(revert(&problem, &steps).is_err_and(|why| why.contains("budget")));
        problem.knobs = Knobs { bytes_max: 99, ..Knobs::default() };
        assert!(revert(&problem, &steps).is_err_and(|why| why.contains("budget")));
        problem.knobs = Knobs::default();
        problem.nodes[0].memory = Some((850, 1000));
        assert!(revert(&problem, &steps).is_err_and(|why| why.contains("memory")));
    }
}
