//! Decisions, with what they were made on: each is a document of its own in the state directory, and the newest takes the place of the oldest.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use switchyard_policy::planner::{Plan, Previous, Problem};
use tracing::warn;

use crate::store::{RedbStore, StoreError, load_as, save_as};

/// Decisions that are kept. A large one takes some hundred kilobytes.
const KEPT: u64 = 64;

/// A decision.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Decision {
    /// Seconds since 1970.
    pub(crate) at: u64,
    pub(crate) by: String,
    pub(crate) problem: Problem,
    pub(crate) previous: Previous,
    pub(crate) plan: Plan,
    /// The moves that were begun for it.
    pub(crate) moves: Option<Vec<u64>>,
    /// The outcome.
    pub(crate) outcome: Option<String>,
}

impl Decision {
    pub(crate) fn of(by: &str, problem: Problem, previous: Previous, plan: Plan) -> Self {
        let at = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Self { at, by: by.to_owned(), problem, previous, plan, moves: None, outcome: None }
    }
}

/// The last decisions, by number.
#[derive(Debug, Default)]
pub(crate) struct History(BTreeMap<u64, Decision>);

fn document(id: u64) -> String {
    format!("planner-decision-{}", id % KEPT)
}

impl History {
    /// The decisions on record.
    pub(super) fn load(store: &RedbStore) -> Result<Self, StoreError> {
        let of_place = |place| load_as::<Option<(u64, Decision)>>(store, &document(place));
        let all: Vec<_> = (0..KEPT).map(of_place).collect::<Result<_, _>>()?;
        Ok(Self(all.into_iter().flatten().collect()))
    }

    pub(super) fn add(&mut self, store: &RedbStore, decision: Decision) -> u64 {
        let id = self.0.last_key_value().map_or(0, |(last, _)| *last) + 1;
        self.0.retain(|old, _| old + KEPT > id);
        self.0.insert(id, decision);
        self.save(store, id);
        id
    }

    pub(super) fn begun(&mut self, store: &RedbStore, id: u64, moves: Vec<u64>) {
        if let Some(decision) = self.0.get_mut(&id) {
            decision.moves = Some(moves);
            self.save(store, id);
        }
    }

    pub(super) fn ended(&mut self, store: &RedbStore, id: u64, outcome: String) {
        if let Some(decision) = self.0.get_mut(&id) {
            decision.outcome = Some(outcome);
            self.save(store, id);
        }
    }

    fn save(&self, store: &RedbStore, id: u64) {
        // A decision that is not kept is carried out all the same: its moves are on record.
        if let Err(error) = save_as(store, &document(id), &self.0.get(&id).map(|decision| (id, decision))) {
            warn!("decision {id} of the planner cannot be kept: {error}");
        }
    }

    pub(super) fn is_by(&self, id: u64, by: &str) -> bool {
        self.0.get(&id).is_some_and(|decision| decision.by == by)
    }

    pub(super) fn newest_first(&self) -> Vec<(u64, Decision)> {
        self.0.iter().rev().map(|(id, decision)| (*id, decision.clone())).collect()
    }
}
