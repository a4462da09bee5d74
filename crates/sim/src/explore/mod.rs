//! Every order in which things can happen, for one leg, two workers, two nodes and one or two keys: breadth first
//! through all states of a small world in which the leg's machine is the real one. What it finds it finds with the
//! fewest steps; what it does not find is not there, within its bounds.
//!
//! Beside the world with seeds ([`crate::run`]) because chance reaches some orders never. Not the same world: that one
//! has time, and states with clocks in them never come twice. Here are no clocks, no lives of keys and no refusals;
//! nodes keep what they have, and what may go wrong is counted in advance.
//!
//! The rule that is checked needs no history: there is one truth about each key, which is what the command that was
//! executed last has left. Whoever executes a command on a key, wherever, must have that truth. At the end the owner
//! has all of it and the other node nothing.

mod model;

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};

use self::model::{Choice, State};
use crate::planted::Planted;

/// What may go wrong, in all of a run.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Bounds {
    /// Keys: 1 or 2.
    pub keys: usize,
    /// Connections that break: of a worker or of the mover.
    pub cuts: u8,
    /// kill -9 of a node, which comes back with what it had.
    pub restarts: u8,
    /// kill -9 of the router.
    pub crashes: u8,
    /// The user goes back.
    pub turns: u8,
}

/// What came of a search.
#[derive(Clone, Debug)]
pub struct Searched {
    /// States that can be reached.
    pub states: u64,
    /// Of them those in which all is over.
    pub ends: u64,
    /// What is wrong in one of them, and how it is reached.
    pub violation: Option<(String, Vec<String>)>,
    /// There are more states than were to be looked at.
    pub unfinished: bool,
}

/// Looks at every state that can be reached, at most at so many.
#[must_use]
pub fn explore(bounds: Bounds, planted: Option<Planted>, states_max: usize) -> Searched {
    let mut seen = HashSet::new();
    // How each state was reached: from which, and by what.
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
                wrong = Some((number, "nothing can happen any more, and it is not over".to_owned()));
            }
            for choice in choices {
                let mut after = state.clone();
                let outcome = after.take(choice);
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

/// Two halves, so that of millions of states no two are taken for one.
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
