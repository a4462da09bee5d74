//! Exhaustive search through all orders of events for one leg, two workers, two nodes and one or two keys: breadth
//! first through the states of a small world with the real state machine of a leg. A violation is found with the fewest
//! steps; if none is found, none exists within the bounds.
//!
//! Complements the seeded world ([`crate::run`]), because random runs never reach some orders. A separate model,
//! because states with clocks never repeat: no clocks, expiry or refusals, no data loss, and a limited number of
//! faults.
//!
//! The check needs no history: each key has one true value, left by the last executed command. Every command on the key
//! must see that value, on any node. At the end the owner has all keys and the other node none.

mod model;

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};

use self::model::{Choice, State};
use crate::injected::Planted;

/// Limits of a search: keys and faults.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Bounds {
    /// Keys: 1 or 2.
    pub keys: usize,
    /// Connections that break: of a worker or of the mover.
    pub cuts: u8,
    /// kill -9 of a node, which restarts with its data.
    pub restarts: u8,
    /// kill -9 of the router.
    pub crashes: u8,
    /// Rollbacks by the operator.
    pub turns: u8,
}

/// Result of a search.
#[derive(Clone, Debug)]
pub struct Searched {
    /// Number of reachable states.
    pub states: u64,
    /// Number of final states.
    pub ends: u64,
    /// First violation, and the steps that lead to it.
    pub violation: Option<(String, Vec<String>)>,
    /// Stopped at the maximum number of states.
    pub unfinished: bool,
}

/// Visits every reachable state, up to about `states_max`.
#[must_use]
pub fn explore(bounds: Bounds, planted: Option<Planted>, states_max: usize) -> Searched {
    let mut seen = HashSet::new();
    // Predecessor of each state, and the choice that led to it.
    let mut steps: Vec<(u32, Option<Choice>)> = Vec::new();
    let mut searched = Searched { states: 0, ends: 0, violation: None, unfinished: false };
    let first = State::new(bounds, planted);
    seen.insert(identity(&first));
    steps.push((0, None));
    let mut frontier = vec![(0_u32, first)];
    while !frontier.is_empty() {
        let mut next = Vec::new();
        for (number, state) in frontier {
            let choices = state.choices();
            let over = state.is_over();
            searched.ends += u64::from(over);
            let mut wrong = None;
            if !over && !choices.iter().any(|choice| !choice.is_fault()) {
                wrong = Some((number, "no event is possible, but the leg has not ended".to_owned()));
            }
            for choice in choices {
                let mut after = state.clone();
                let outcome = after.apply(choice);
                if seen.insert(identity(&after)) {
                    steps.push((number, Some(choice)));
                    let reached = steps.len() as u32 - 1;
                    next.push((reached, after));
                }
                if let Err(what) = outcome {
                    steps.push((number, Some(choice)));
                    wrong = Some((steps.len() as u32 - 1, what));
                }
                if wrong.is_some() {
                    break;
                }
            }
            if let Some((reached, what)) = wrong {
                searched.violation = Some((what, way_to(&steps, reached)));
                searched.states = seen.len() as u64;
                return searched;
            }
        }
        if seen.len() > states_max {
            searched.unfinished = !next.is_empty();
            break;
        }
        frontier = next;
    }
    searched.states = seen.len() as u64;
    searched
}

/// Two 64-bit hashes, against collisions among millions of states.
fn identity(state: &State) -> u128 {
    let mut low = DefaultHasher::new();
    state.hash(&mut low);
    let mut high = DefaultHasher::new();
    0x5eed_u64.hash(&mut high);
    state.hash(&mut high);
    u128::from(high.finish()) << 64 | u128::from(low.finish())
}

fn way_to(steps: &[(u32, Option<Choice>)], mut at: u32) -> Vec<String> {
    let mut way = Vec::new();
    while let (from, Some(choice)) = &steps[at as usize] {
        way.push(format!("{choice:?}"));
        at = *from;
    }
    way.reverse();
    way
}
