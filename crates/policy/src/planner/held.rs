//! Reasons why a plan leaves nodes over their limits.
//!
//! Separate from [`solve`] because only reports need them: a reason such as a cooldown is found by solving again
//! without it.

use super::{Fleet, InjectedBug, Policy, Previous, Problem, State, memory, solve, unsplittable};
use crate::topology::NodeId;

/// A node left over its limit by a plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OverLimitNode {
    /// The node.
    pub node: NodeId,
    /// The reason.
    pub why: OverLimitReason,
}

/// Reason to leave a node over its limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum OverLimitReason {
    /// The node is down.
    Down,
    /// The node takes part in a move, or has just refused one.
    Busy,
    /// The node has fewer requests per second than this floor.
    Floor(f64),
    /// Excess that is too short, or not distinguishable from noise.
    Brief,
    /// One key or slot alone exceeds the limit: [`super::Advice::Unsplittable`].
    Unsplittable,
    /// Suitable keys or slots have moved recently.
    Cooldown,
    /// The budget of keys or bytes is used up.
    Budget,
    /// No movable key or slot fits at another node.
    NoRoom,
    /// The node uses more than nine tenths of its `maxmemory`, and no other node has room for its slots.
    NoMemory,
}

/// A plan counts as better if it leaves less than this fraction of the load.
const BETTER: f64 = 0.98;

/// Returns the nodes left over their limits by the plan of [`solve`], each with the reason.
#[must_use]
pub fn held(problem: &Problem, previous: &Previous) -> Vec<OverLimitNode> {
    let after = |problem: &Problem, previous: &Previous, node: NodeId| {
        let plan = solve(problem, previous);
        plan.nodes.iter().find(|outlook| outlook.node == node).map_or(0.0, |outlook| outlook.after)
    };
    let fleet = Fleet::of(problem, InjectedBug::default());
    let plan = solve(problem, previous);
    let over = plan.nodes.iter().filter(|outlook| outlook.limit > 0.0 && outlook.after > outlook.limit);
    let why = |id: NodeId, load: f64| {
        let place = &fleet.nodes[&id];
        let most = if previous.over.contains(&id) { place.goal } else { place.limit };
        let is_better = |problem: &Problem, previous: &Previous| after(problem, previous, id) < load * BETTER;
        let over_only = Previous { over: previous.over.clone(), ..Previous::default() };
        let mut unbounded = problem.clone();
        (unbounded.knobs.keys_max, unbounded.knobs.bytes_max) = (usize::MAX, u64::MAX);
        match place.node.state {
            State::Down => OverLimitReason::Down,
            State::Busy => OverLimitReason::Busy,
            _ if place.load < place.least => OverLimitReason::Floor(place.least),
            _ if place.load.min(place.node.lasting) <= most => OverLimitReason::Brief,
            _ if problem.knobs.policy == Policy::Switchyard && unsplittable(problem, &fleet, id).is_some() => {
                OverLimitReason::Unsplittable
            }
            _ if is_better(problem, &over_only) => OverLimitReason::Cooldown,
            _ if is_better(&unbounded, previous) => OverLimitReason::Budget,
            _ => OverLimitReason::NoRoom,
        }
    };
    let over: Vec<OverLimitNode> =
        over.map(|outlook| OverLimitNode { node: outlook.node, why: why(outlook.node, outlook.after) }).collect();
    let gives = |id: &NodeId| plan.steps.iter().any(|step| step.from == *id);
    let full = memory::full(&fleet).into_iter().filter(|id| !gives(id) && over.iter().all(|held| held.node != *id));
    let full: Vec<OverLimitNode> = full.map(|node| OverLimitNode { node, why: OverLimitReason::NoMemory }).collect();
    over.into_iter().chain(full).collect()
}
