//! A decision in hindsight: whether it helped, and whether it is worth to be taken back.
//!
//! Only the nodes of the decision count. Others may be full for reasons of their own, and a new plan is the answer to those.

use std::collections::{BTreeMap, BTreeSet};

use super::{Fleet, Name, Plan, Planted, Price, Problem, State, Step, Verdict, What};
use crate::topology::NodeId;

/// Changes by less than such a part are noise.
const NOISE: f64 = 0.02;

/// The result of a decision.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Review {
    /// Its nodes are less full than they were, or under their limits.
    Helped {
        /// The fullest of its nodes, as a part of its limit.
        after: f64,
    },
    /// Most of the load that was moved has ended.
    Gone {
        /// The fullest of its nodes, as a part of its limit.
        after: f64,
    },
    /// Its nodes are as full as they were, or fuller.
    Unhelpful {
        /// The fullest of its nodes, as a part of its limit.
        after: f64,
    },
    /// One of its nodes is down, has gone, or takes part in another move.
    Unclear,
}

/// The nodes of these steps.
#[must_use]
pub fn nodes_of(steps: &[Step]) -> BTreeSet<NodeId> {
    steps.iter().flat_map(|step| [step.from, step.to]).collect()
}

/// The fullest of these nodes, as a part of its limit. Nodes with next to nothing to do, and those that are to have nothing, do not count.
#[must_use]
pub fn fullest_at(problem: &Problem, nodes: &BTreeSet<NodeId>) -> f64 {
    fullest(&Fleet::of(problem, Planted::default()), nodes, &BTreeMap::new())
}

/// The same, if loads differed by so much.
fn fullest(fleet: &Fleet<'_>, nodes: &BTreeSet<NodeId>, shifted: &BTreeMap<NodeId, f64>) -> f64 {
    let fullness = |id: &NodeId| {
        let place = fleet.nodes.get(id).filter(|place| place.limit > 0.0)?;
        let load = place.load + shifted.get(id).copied().unwrap_or_default();
        (load >= fleet.least).then(|| place.fullness(load))
    };
    nodes.iter().filter_map(fullness).fold(0.0, f64::max)
}

/// Compares the load now with that before a decision. `before`: [`fullest_at`] its nodes then.
#[must_use]
pub fn review(problem: &Problem, steps: &[Step], before: f64) -> Review {
    let fleet = Fleet::of(problem, Planted::default());
    let nodes = nodes_of(steps);
    let is_quiet = |id: &NodeId| fleet.nodes.get(id).is_some_and(|place| matches!(place.node.state, State::Ready | State::Leaving));
    if !nodes.iter().all(is_quiet) {
        return Review::Unclear;
    }
    let after = fullest(&fleet, &nodes, &BTreeMap::new());
    let predicted: f64 = steps.iter().map(|step| step.load).sum();
    let seen: f64 = steps.iter().map(|step| load_now(problem, step)).sum();
    match () {
        () if after < before * (1.0 - NOISE) || after <= 1.0 + NOISE => Review::Helped { after },
        () if seen < predicted / 2.0 => Review::Gone { after },
        () => Review::Unhelpful { after },
    }
}

/// The plan that takes a decision back.
///
/// # Errors
/// A reason to leave things as they are: the budget is spent, memory is full, or it would not help.
pub fn take_back(problem: &Problem, steps: &[Step]) -> Result<Plan, &'static str> {
    let fleet = Fleet::of(problem, Planted::default());
    let is_there = |step: &&Step| match &step.what {
        What::Key { key, .. } => of_key(problem, key).is_none_or(|known| known.at == step.to),
        What::Slots(_) => true,
    };
    let back = |step: &Step| Step { from: step.to, to: step.from, load: load_now(problem, step), ..step.clone() };
    let steps: Vec<Step> = steps.iter().filter(is_there).map(back).collect();
    let mut price = Price::default();
    let (mut shifted, mut bytes): (BTreeMap<NodeId, f64>, BTreeMap<NodeId, u64>) = Default::default();
    for step in &steps {
        match &step.what {
            What::Key { .. } => price.add_key(step.bytes),
            What::Slots(slots) => {
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
    let nodes = nodes_of(&steps);
    let place = |id: &NodeId| fleet.nodes.get(id);
    match () {
        () if steps.is_empty() => Err("nothing of it is where it was put"),
        () if price.keys > problem.knobs.keys_max || price.bytes > problem.knobs.bytes_max => {
            Err("the budget does not allow to take it back")
        }
        () if !nodes.iter().all(|id| place(id).is_some_and(|place| place.node.state == State::Ready)) => {
            Err("one of its nodes cannot take part in a move now")
        }
        () if bytes.iter().any(|(to, bytes)| place(to).is_some_and(|place| !place.has_memory(0, *bytes))) => {
            Err("it no longer fits into the memory of the node that it came from")
        }
        () if fullest(&fleet, &nodes, &shifted) >= fullest(&fleet, &nodes, &BTreeMap::new()) * (1.0 - NOISE) => {
            Err("taking it back would not help either")
        }
        () => {
            let nodes = fleet.outlook(&steps);
            Ok(Plan { verdict: Verdict::Partly, nodes, steps, price, alternatives: Vec::new(), advice: Vec::new() })
        }
    }
}

fn of_key<'p>(problem: &'p Problem, key: &Name) -> Option<&'p super::KeyAt> {
    problem.keys.iter().find(|known| known.key == *key)
}

/// The load now of something that was moved. Slots are in a problem only while their node is full: they count as they were.
fn load_now(problem: &Problem, step: &Step) -> f64 {
    match &step.what {
        What::Key { key, .. } => of_key(problem, key).map_or(0.0, |known| known.load()),
        What::Slots(_) => step.load,
    }
}

#[cfg(test)]
mod tests {
    use super::super::{KeyAt, Knobs, Node};
    use super::*;
    use crate::topology::Slot;

    fn node(id: u16, load: f64, state: State) -> Node {
        Node { id: NodeId(id), load, lasting: load, weight: 1, capacity: Some(1000.0), memory: Some((100, 1000)), keys: 10, state }
    }

    fn key(at: u16, writes: f64) -> KeyAt {
        let (slot, at, home) = (Slot::new(7).expect("a slot"), NodeId(at), NodeId(0));
        KeyAt { key: b"k"[..].into(), slot, at, home, reads: 0.0, writes, copied: 0.0, bytes: 100, is_cold: false, stays: None }
    }

    /// A key of 400 requests went from node 0 to node 1; the third node is overfull whatever happens. Limits are 900.
    fn moved(loads: [f64; 2], key_now: f64) -> (Problem, Vec<Step>) {
        let nodes = vec![node(0, loads[0], State::Ready), node(1, loads[1], State::Ready), node(2, 5000.0, State::Ready)];
        let key = key(1, key_now);
        let what = What::Key { key: key.key.clone(), slot: key.slot, is_cold: false };
        let steps = vec![Step { what, from: NodeId(0), to: NodeId(1), load: 400.0, bytes: 100 }];
        (Problem { nodes, slots: Vec::new(), keys: vec![key], knobs: Knobs::default() }, steps)
    }

    #[test]
    fn a_node_outside_of_a_decision_does_not_count() {
        let (mut problem, steps) = moved([850.0, 800.0], 400.0);
        assert!(matches!(review(&problem, &steps, 1.3), Review::Helped { .. }));
        // Nor does one that is to have nothing, and still has something.
        problem.nodes[0].weight = 0;
        assert!(fullest_at(&problem, &nodes_of(&steps)) < 1.0);
    }

    #[test]
    fn noise_around_a_limit_is_no_failure() {
        let (problem, steps) = moved([910.0, 500.0], 400.0);
        assert!(matches!(review(&problem, &steps, 1.02), Review::Helped { .. }));
    }

    #[test]
    fn a_node_that_is_down_or_moves_leaves_it_open() {
        for state in [State::Down, State::Busy] {
            let (mut problem, steps) = moved([2000.0, 500.0], 400.0);
            problem.nodes[1].state = state;
            assert_eq!(review(&problem, &steps, 1.3), Review::Unclear);
        }
    }

    #[test]
    fn it_is_taken_back_only_where_that_helps() {
        // The target is fuller than the source was: the key goes back.
        let (problem, steps) = moved([500.0, 1300.0], 400.0);
        assert!(matches!(review(&problem, &steps, 1.2), Review::Unhelpful { .. }));
        let plan = take_back(&problem, &steps).expect("a plan");
        assert_eq!((plan.steps[0].from, plan.steps[0].to, plan.price.keys), (NodeId(1), NodeId(0), 1));
        // The source is as full as before for other reasons: the key would only add to that.
        let (problem, steps) = moved([1100.0, 500.0], 400.0);
        assert!(matches!(review(&problem, &steps, 1.2), Review::Unhelpful { .. }));
        assert_eq!(take_back(&problem, &steps), Err("taking it back would not help either"));
        // Its load has ended.
        let (problem, steps) = moved([1100.0, 500.0], 10.0);
        assert!(matches!(review(&problem, &steps, 1.2), Review::Gone { .. }));
    }

    #[test]
    fn to_take_it_back_takes_budget_and_memory() {
        let (mut problem, steps) = moved([500.0, 1300.0], 400.0);
        problem.knobs.keys_max = 0;
        assert!(take_back(&problem, &steps).is_err_and(|why| why.contains("budget")));
        problem.knobs = Knobs { bytes_max: 99, ..Knobs::default() };
        assert!(take_back(&problem, &steps).is_err_and(|why| why.contains("budget")));
        problem.knobs = Knobs::default();
        problem.nodes[0].memory = Some((850, 1000));
        assert!(take_back(&problem, &steps).is_err_and(|why| why.contains("memory")));
    }
}
