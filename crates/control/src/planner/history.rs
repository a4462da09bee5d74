//! History of decisions with their input: each is a document in the state directory, and the newest replaces the
//! oldest.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use switchyard_policy::planner::{Plan, Previous, Problem};
use tracing::warn;

use crate::store::{RedbStore, load_json, save_json};

/// Number of stored decisions. A large one takes some hundred kilobytes.
const KEPT: u64 = 64;

/// A decision.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Decision {
    /// Time of the decision, in seconds since 1970.
    pub(crate) at: u64,
    pub(crate) by: String,
    pub(crate) problem: Problem,
    pub(crate) previous: Previous,
    pub(crate) plan: Plan,
    /// Moves that were started for it.
    pub(crate) moves: Option<Vec<u64>>,
    /// Outcome of the moves.
    pub(crate) outcome: Option<String>,
}

impl Decision {
    pub(crate) fn of(by: &str, problem: Problem, previous: Previous, plan: Plan) -> Self {
        Self { at: unix_seconds(), by: by.to_owned(), problem, previous, plan, moves: None, outcome: None }
    }

    /// Drops the input except for the policy's settings.
    fn in_short(self) -> Self {
        Self {
            problem: Problem { knobs: self.problem.knobs, ..Problem::default() },
            previous: Previous::default(),
            ..self
        }
    }
}

pub(super) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The last decisions by number, without their input, which is only in the store.
#[derive(Debug, Default)]
pub(crate) struct History(BTreeMap<u64, Decision>);

fn document(place: u64) -> String {
    format!("planner-decision-{}", place % KEPT)
}

/// Reads a decision with its input, if it is still stored and legible.
pub(super) fn read(store: &RedbStore, id: u64) -> Option<Decision> {
    read_place(store, id).filter(|(kept, _)| *kept == id).map(|(_, decision)| decision)
}

/// Reads a document. An illegible decision must not prevent the start.
fn read_place(store: &RedbStore, place: u64) -> Option<(u64, Decision)> {
    load_json(store, &document(place)).unwrap_or_else(|error| {
        warn!("a decision of the planner is left out of its history: {error}");
        None
    })
}

fn write(store: &RedbStore, id: u64, decision: &Decision) {
    // A decision that cannot be stored is carried out all the same, because its moves are recorded.
    if let Err(error) = save_json(store, &document(id), &Some((id, decision))) {
        warn!("decision {id} of the planner cannot be stored: {error}");
    }
}

impl History {
    /// Loads the stored decisions. Passes each one with its input to `each`, oldest first.
    pub(super) fn load(store: &RedbStore, mut each: impl FnMut(u64, &Decision)) -> Self {
        let all: BTreeMap<u64, Decision> = (0..KEPT).filter_map(|place| read_place(store, place)).collect();
        all.iter().for_each(|(id, decision)| each(*id, decision));
        Self(all.into_iter().map(|(id, decision)| (id, decision.in_short())).collect())
    }

    pub(super) fn add(&mut self, store: &RedbStore, decision: Decision) -> u64 {
        let id = self.0.last_key_value().map_or(0, |(last, _)| *last) + 1;
        self.0.retain(|old, _| old + KEPT > id);
        write(store, id, &decision);
        self.0.insert(id, decision.in_short());
        id
    }

    /// Stores the moves of a decision, and returns the decision.
    pub(super) fn record_moves(&mut self, store: &RedbStore, id: u64, moves: Vec<u64>) -> Option<Decision> {
        self.change(store, id, |decision| decision.moves = Some(moves.clone()));
        self.0.get(&id).cloned()
    }

    pub(super) fn record_outcome(&mut self, store: &RedbStore, id: u64, outcome: String) {
        self.change(store, id, |decision| decision.outcome = Some(outcome.clone()));
    }

    fn change(&mut self, store: &RedbStore, id: u64, how: impl Fn(&mut Decision)) {
        let Some(decision) = self.0.get_mut(&id) else { return };
        how(decision);
        if let Some(mut kept) = read(store, id) {
            how(&mut kept);
            write(store, id, &kept);
        }
    }

    pub(super) fn newest_first(&self) -> Vec<(u64, Decision)> {
        self.0.iter().rev().map(|(id, decision)| (*id, decision.clone())).collect()
    }
}
