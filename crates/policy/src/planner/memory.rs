//! Moves slots away from nodes with too little memory.
//!
//! Separate from the remedies for load. Pieces are chosen by bytes freed relative to the requests moved. No single keys
//! move, because the planner knows the sizes of hot keys only.

use std::collections::{BTreeMap, BTreeSet};

use super::{Fleet, Need, Place, Previous, Problem, SlotAt, State, Step, StepSubject};
use crate::topology::{NodeId, Slot};

/// Percent of `maxmemory`: a node above `FULL` is relieved down to `GOAL`, and targets stay below `TARGET`.
const FULL: u64 = 90;
const GOAL: u64 = 85;
const TARGET: u64 = 80;

/// Steps that free memory, and whether they bring every node below [`FULL`].
pub(super) struct Relief {
    pub(super) steps: Vec<Step>,
    pub(super) is_complete: bool,
}

/// Percentage of a node's memory limit; `None` without `maxmemory`.
fn part(place: &Place<'_>, percent: u64) -> Option<u64> {
    let (_, most) = place.node.memory.filter(|(_, most)| *most > 0)?;
    Some(most / 100 * percent)
}

/// Used bytes of a node, and the bytes above which it is relieved.
pub(super) fn use_and_limit(place: &Place<'_>) -> Option<(u64, u64)> {
    Some((place.node.memory?.0, part(place, FULL)?))
}

/// Nodes with too little memory, fullest first.
pub(super) fn full(fleet: &Fleet<'_>) -> Vec<NodeId> {
    let over = |place: &&Place<'_>| {
        place.node.state == State::Ready
            && place.limit > 0.0
            && use_and_limit(place).is_some_and(|(used, limit)| used > limit)
    };
    let mut full: Vec<&Place<'_>> = fleet.nodes.values().filter(over).collect();
    let fullness =
        |place: &Place<'_>| use_and_limit(place).map_or(0.0, |(used, limit)| used as f64 / limit.max(1) as f64);
    full.sort_by(|one, other| fullness(other).total_cmp(&fullness(one)).then(one.node.id.cmp(&other.node.id)));
    full.into_iter().map(|place| place.node.id).collect()
}

/// Adds steps that move idle slots to nodes with room. `steps`: the plan so far.
pub(super) fn relieve(problem: &Problem, previous: &Previous, fleet: &Fleet<'_>, steps: &[Step]) -> Relief {
    let mut loads: BTreeMap<NodeId, f64> = fleet.nodes.iter().map(|(id, place)| (*id, place.load)).collect();
    let mut used: BTreeMap<NodeId, u64> =
        fleet.nodes.iter().map(|(id, place)| (*id, place.node.memory.map_or(0, |(used, _)| used))).collect();
    let mut taken: BTreeSet<Slot> = previous.slots.iter().copied().collect();
    let mut bytes_left = problem.knobs.bytes_max;
    let mut sources: BTreeSet<NodeId> = BTreeSet::new();
    for step in steps {
        *loads.entry(step.from).or_default() -= step.load;
        *loads.entry(step.to).or_default() += step.load;
        *used.entry(step.from).or_default() -= step.bytes.min(used[&step.from]);
        *used.entry(step.to).or_default() += step.bytes;
        bytes_left = bytes_left.saturating_sub(step.bytes);
        sources.extend([step.from, step.to]);
        match &step.what {
            StepSubject::Key { slot, .. } => drop(taken.insert(*slot)),
            StepSubject::Slots(slots) => taken.extend(slots),
        }
    }
    let mut of_keys: BTreeMap<Slot, f64> = BTreeMap::new();
    for key in problem.keys.iter().filter(|key| key.at == key.home) {
        *of_keys.entry(key.slot).or_default() += key.load();
    }
    let mut relief = Relief { steps: Vec::new(), is_complete: true };
    // A node takes part in one move at a time: nodes of other steps are relieved in a later round.
    for id in full(fleet).into_iter().filter(|id| !sources.contains(id)) {
        let goal = part(&fleet.nodes[&id], GOAL).unwrap_or(u64::MAX);
        let load_of = |slot: &SlotAt| slot.load + of_keys.get(&slot.slot).copied().unwrap_or_default();
        let mut slots: Vec<&SlotAt> = problem.slots.iter().filter(|slot| slot.at == id && slot.bytes > 0).collect();
        slots.sort_by(|one, other| load_of(one).total_cmp(&load_of(other)).then(one.slot.cmp(&other.slot)));
        let mut moved: BTreeMap<NodeId, (Vec<Slot>, f64, u64)> = BTreeMap::new();
        for slot in slots {
            if used[&id] <= goal {
                break;
            }
            let load = load_of(slot);
            let fits = |place: &&Place<'_>| {
                let to = place.node.id;
                to != id
                    && !sources.contains(&to)
                    && place.node.state == State::Ready
                    && place.limit > 0.0
                    && loads[&to] + load <= place.goal.max(place.least)
                    && part(place, TARGET).is_none_or(|most| used[&to] + slot.bytes <= most)
            };
            let fullness = |place: &&Place<'_>| {
                part(place, 100).map_or(0.0, |most| used[&place.node.id] as f64 / most.max(1) as f64)
            };
            let by_fullness = |one: &&Place<'_>, other: &&Place<'_>| {
                fullness(one).total_cmp(&fullness(other)).then(one.node.id.cmp(&other.node.id))
            };
            let target = fleet.nodes.values().filter(fits).min_by(by_fullness).map(|place| place.node.id);
            let Some(to) = target.filter(|_| slot.bytes <= bytes_left && taken.insert(slot.slot)) else { continue };
            bytes_left -= slot.bytes;
            *loads.entry(id).or_default() -= load;
            *loads.entry(to).or_default() += load;
            *used.entry(id).or_default() -= slot.bytes.min(used[&id]);
            *used.entry(to).or_default() += slot.bytes;
            let all = moved.entry(to).or_default();
            all.0.push(slot.slot);
            (all.1, all.2) = (all.1 + load, all.2 + slot.bytes);
        }
        relief.is_complete &= use_and_limit(&fleet.nodes[&id]).is_none_or(|(_, limit)| used[&id] <= limit);
        relief.steps.extend(moved.into_iter().map(|(to, (mut slots, load, bytes))| {
            slots.sort_unstable();
            Step { what: StepSubject::Slots(slots), from: id, to, load, bytes, need: Need::Memory }
        }));
    }
    for step in &relief.steps {
        assert!(
            part(&fleet.nodes[&step.to], TARGET).is_none_or(|most| used[&step.to] <= most),
            "a target keeps room for its own keys"
        );
    }
    relief
}
