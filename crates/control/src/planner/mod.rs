//! Stores what the planner decides: its state, and the numbered decisions with their outcomes.
//!
//! [`switchyard_policy::planner::Cycle`] observes the load, decides, and evaluates the effect. It starts nothing, and
//! neither does this module: [`crate::operator`] makes the orders, with the same checks as for operators.
//!
//! After a restart, the history provides budgets, cooldowns and the decision in progress.

mod history;
mod messages;
mod rest;
#[cfg(test)]
mod tests;
mod thread;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use switchyard_policy::load::ObservedLoad;
use switchyard_policy::planner::{
    Author, Cycle, DurableState, Effect, Ended, Name, Next as CycleNext, Plan, Policy, Previous, Problem, Review,
    Started, fullest_at, nodes_of, solve,
};
pub(crate) use switchyard_policy::planner::{FleetContext, KEYS, names};
pub use switchyard_policy::planner::{Mode, PlannerConfig};
use switchyard_policy::topology::{MoveId, NodeId, Topology};
use switchyard_resp::units::describe_size;

use crate::store::{RedbStore, StoreError};

pub(crate) use history::{Decision, History};
pub(crate) use messages::Words;
use rest::LoggedReason;
pub(crate) use thread::PLANNER;
pub use thread::PlannerThread;

/// Author of the planner's own decisions.
const OWN: &str = "planner";

/// Author of a decision that reverts another.
const TAKES_BACK: &str = "planner: takes back";

/// All policies, with their names in the configuration.
pub const POLICIES: &[(Policy, &str)] = &[
    (Policy::Switchyard, "switchyard"),
    #[cfg(feature = "research")]
    (Policy::MakrisPrinted, "makris-printed"),
    (Policy::MakrisFfd, "makris-ffd"),
    (Policy::MakrisSafe, "makris-safe"),
];

/// Persistent state in addition to the decisions.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct PersistedState {
    /// Whether an operator has disabled all automation.
    is_off: bool,
    /// Keys that the planner has moved away from their slots. Other placement overrides are an operator's, and stay.
    relocated: Relocated,
    /// Number of consecutive failed decisions.
    #[serde(default)]
    failures: u32,
}

impl PersistedState {
    fn of(cycle: &Cycle) -> Self {
        let DurableState { relocated, failures } = cycle.durable().clone();
        Self { is_off: cycle.is_off(), relocated: Relocated(relocated), failures }
    }

    fn restore(self, cycle: &mut Cycle, now: Duration) {
        let Self { is_off, relocated: Relocated(relocated), failures } = self;
        cycle.restore(now, DurableState { relocated, failures }, is_off);
    }
}

/// Keys by name, with the node that the planner has moved them to. `None`: an earlier version did not record the node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "Vec<Record>", into = "Vec<Record>")]
struct Relocated(BTreeMap<Name, Option<NodeId>>);

/// Entry of [`Relocated`] in the store. Names are bytes, which cannot be keys of a JSON object.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Record {
    At(Name, NodeId),
    Before(Name),
}

impl From<Vec<Record>> for Relocated {
    fn from(records: Vec<Record>) -> Self {
        let entry = |record| match record {
            Record::At(key, node) => (key, Some(node)),
            Record::Before(key) => (key, None),
        };
        Self(records.into_iter().map(entry).collect())
    }
}

impl From<Relocated> for Vec<Record> {
    fn from(relocated: Relocated) -> Self {
        let entry = |(key, node): (Name, Option<NodeId>)| match node {
            Some(node) => Record::At(key, node),
            None => Record::Before(key),
        };
        relocated.0.into_iter().map(entry).collect()
    }
}

const KEPT: &str = "planner";

fn author_of(by: &str) -> Author {
    match by {
        OWN => Author::Planner,
        TAKES_BACK => Author::Revert,
        _ => Author::Operator,
    }
}

#[derive(Debug, Default)]
struct Inner {
    cycle: Cycle,
    /// State in the store.
    stored: PersistedState,
    history: History,
    logged: LoggedReason,
    /// Decisions that have ended since the start, by outcome.
    outcomes: BTreeMap<&'static str, u64>,
}

#[derive(Debug)]
pub(crate) enum Next {
    /// Nothing to do.
    Rest,
    /// Start these moves, and report their ids.
    Begin(u64, Plan),
}

/// All outcomes of decisions.
pub(crate) const OUTCOMES: [&str; 5] = ["helped", "load-ended", "failed", "not-compared", "refused"];

/// State of the planner, for reports and metrics.
#[derive(Debug)]
pub(crate) struct Standing {
    pub(crate) mode: Mode,
    /// Reason why it does not act, regardless of the mode.
    pub(crate) rests: Option<String>,
    /// Nodes above their limit at the latest measurement.
    pub(crate) over: Vec<NodeId>,
    /// Decisions that have ended since the start, by outcome.
    pub(crate) outcomes: BTreeMap<&'static str, u64>,
}

/// Planner of a fleet.
#[derive(Debug)]
pub(crate) struct Planner {
    store: Arc<RedbStore>,
    /// Start of this run, on both clocks. Decisions of earlier runs are stored with wall time.
    started: (Instant, Duration),
    inner: Mutex<Inner>,
}

impl Planner {
    /// Opens the planner with its stored state.
    pub(crate) fn open(store: Arc<RedbStore>) -> Result<Self, StoreError> {
        let stored: PersistedState = crate::store::load_json(&*store, KEPT)?;
        let now = Duration::from_secs(history::unix_seconds());
        let mut inner = Inner { stored: stored.clone(), ..Inner::default() };
        stored.restore(&mut inner.cycle, now);
        let cycle = &mut inner.cycle;
        inner.history = History::load(&store, |id, decision| resume(cycle, now, id, decision));
        Ok(Self { store, started: (Instant::now(), now), inner: Mutex::new(inner) })
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Time of the cycle: wall time at the start of the run plus monotonic time since.
    fn at(&self, now: Instant) -> Duration {
        self.started.1 + now.saturating_duration_since(self.started.0)
    }

    pub(crate) fn tune(&self, config: &PlannerConfig) {
        self.inner().cycle.tune(config);
    }

    pub(crate) fn config(&self) -> PlannerConfig {
        self.inner().cycle.config().clone()
    }

    /// State of the planner, for reports and metrics.
    pub(crate) fn standing(&self, now: Instant) -> Standing {
        let inner = self.inner();
        let rests = inner.cycle.pause_reason(self.at(now)).map(|reason| rest::text(&reason));
        Standing {
            mode: inner.cycle.config().mode,
            rests,
            over: inner.cycle.over().to_vec(),
            outcomes: inner.outcomes.clone(),
        }
    }

    /// Logs the reason why it does not act, once per reason.
    pub(crate) fn log_rest(&self, now: Instant) {
        let mut inner = self.inner();
        let is_on = inner.cycle.config().mode == Mode::On;
        let reason = inner.cycle.pause_reason(self.at(now)).filter(|_| is_on);
        inner.logged.log(reason.as_ref());
    }

    /// Whether an operator has disabled all automation.
    pub(crate) fn is_off(&self) -> bool {
        self.inner().cycle.is_off()
    }

    /// Disables or enables automation, durably.
    pub(crate) fn switch(&self, is_off: bool) -> Result<(), String> {
        let mut inner = self.inner();
        let stored = PersistedState { is_off, failures: 0, ..PersistedState::of(&inner.cycle) };
        self.store_state(&mut inner, stored)?;
        inner.cycle.switch(is_off);
        inner.logged = LoggedReason::default();
        Ok(())
    }

    /// Whether there is nothing to decide or to evaluate.
    pub(crate) fn is_idle(&self) -> bool {
        self.inner().cycle.is_idle()
    }

    fn store_state(&self, inner: &mut Inner, state: PersistedState) -> Result<(), String> {
        crate::store::save_json(&*self.store, KEPT, &state)
            .map_err(|error| format!("the planner cannot store its state: {error}"))?;
        inner.stored = state;
        Ok(())
    }

    /// Stores the state if it has changed. After an error the next call tries again.
    fn save(&self, inner: &mut Inner) {
        let state = PersistedState::of(&inner.cycle);
        if state != inner.stored
            && let Err(why) = self.store_state(inner, state)
        {
            tracing::warn!("{why}");
        }
    }

    /// Records a measurement of the load.
    pub(crate) fn note(&self, now: Instant, topology: &Topology, load: &ObservedLoad) {
        self.inner().cycle.note(self.at(now), topology, load);
    }

    /// Returns the planning problem, and the recent moves.
    pub(crate) fn problem(
        &self,
        now: Instant,
        topology: &Topology,
        load: &ObservedLoad,
        around: &FleetContext,
    ) -> (Problem, Previous) {
        self.inner().cycle.problem(self.at(now), topology, load, around)
    }

    /// Performs a planning step, and returns the next action. `is_open`: whether a move has not ended.
    pub(crate) fn step(
        &self,
        now: Instant,
        problem: &Problem,
        previous: Previous,
        is_open: impl Fn(MoveId) -> bool,
    ) -> Next {
        let mut inner = self.inner();
        let (ended, next) = inner.cycle.step(self.at(now), problem, &previous, is_open, solve);
        for ended in &ended {
            inner.count(ended);
            inner.history.record_outcome(&self.store, ended.decision, outcome(ended));
        }
        self.save(&mut inner);
        let mut record = |by, previous, plan: &Plan| {
            inner.history.add(&self.store, Decision::of(by, problem.clone(), previous, plan.clone()))
        };
        match next {
            CycleNext::Rest => Next::Rest,
            CycleNext::Record(plan) => {
                record(OWN, previous, &plan);
                Next::Rest
            }
            // A plan that reverts another was not solved for.
            CycleNext::Begin(Author::Revert, plan) => Next::Begin(record(TAKES_BACK, Previous::default(), &plan), plan),
            CycleNext::Begin(_, plan) => Next::Begin(record(OWN, previous, &plan), plan),
        }
    }

    /// Whether a decision reverts another, and so was not solved for.
    pub(crate) fn is_revert(by: &str) -> bool {
        by == TAKES_BACK
    }

    /// Records an operator's plan, and returns its number.
    pub(crate) fn record_requested(&self, by: &str, problem: Problem, previous: Previous, plan: Plan) -> u64 {
        self.inner().history.add(&self.store, Decision::of(by, problem, previous, plan))
    }

    /// Records the started moves of a decision.
    pub(crate) fn begun(&self, now: Instant, decision: u64, before: f64, moves: Vec<MoveId>) {
        let mut inner = self.inner();
        let numbers = moves.iter().map(|id| id.0).collect();
        let Some(Decision { by, plan, .. }) = inner.history.record_moves(&self.store, decision, numbers) else {
            return;
        };
        inner.cycle.begun(self.at(now), Started { decision, author: author_of(&by), plan, before, moves });
        self.save(&mut inner);
    }

    /// Records that the moves of a decision were refused, which pauses moves at these nodes.
    pub(crate) fn refused(&self, now: Instant, decision: u64, nodes: impl IntoIterator<Item = NodeId>, why: &str) {
        let mut inner = self.inner();
        inner.cycle.refused(self.at(now), nodes);
        *inner.outcomes.entry("refused").or_default() += 1;
        inner.history.record_outcome(&self.store, decision, format!("refused: {why}"));
    }

    /// Forgets keys that have left the node to which the planner has moved them: they have returned to their slots, or
    /// an operator has moved them. `node_of` returns the node of a placement override.
    pub(crate) fn keep_relocated(&self, node_of: impl Fn(&[u8]) -> Option<NodeId>) {
        let mut inner = self.inner();
        inner.cycle.keep_relocated(node_of);
        self.save(&mut inner);
    }

    /// Decisions, the newest first, without their input.
    pub(crate) fn decisions(&self) -> Vec<(u64, Decision)> {
        self.inner().history.newest_first()
    }

    /// Returns a decision with its input.
    pub(crate) fn decision(&self, id: u64) -> Option<Decision> {
        history::read(&self.store, id)
    }
}

impl Inner {
    fn count(&mut self, ended: &Ended) {
        let outcome = match ended.review {
            None => return,
            Some(Review::Helped(_)) => "helped",
            Some(Review::Gone(_)) => "load-ended",
            Some(Review::Unhelpful(_)) => "failed",
            Some(Review::Unclear) => "not-compared",
        };
        *self.outcomes.entry(outcome).or_default() += 1;
    }
}

/// Restores a stored decision after a restart. Called with wall time, oldest decision first.
fn resume(cycle: &mut Cycle, now: Duration, id: u64, decision: &Decision) {
    let Some(moves) = &decision.moves else { return };
    let started = Started {
        decision: id,
        author: author_of(&decision.by),
        plan: decision.plan.clone(),
        before: fullest_at(&decision.problem, &nodes_of(&decision.plan.steps)),
        moves: moves.iter().copied().map(MoveId).collect(),
    };
    cycle.resume(now, Duration::from_secs(decision.at).min(now), started, decision.outcome.is_some());
}

/// Describes the end of a decision, for the history.
fn outcome(ended: &Ended) -> String {
    let went = |effect: Effect| {
        let requests = (effect.promised > 0.0).then(|| {
            format!(
                "the fullest of its nodes went from {:.0} to {:.0} % of its limit, and {:.0} of {:.0} requests/s left the relieved nodes",
                ended.before * 100.0,
                effect.after * 100.0,
                effect.relief.max(0.0),
                effect.promised
            )
        });
        let bytes = effect.bytes.map(|(promised, relief)| {
            format!("{} of {} left the nodes with too little memory", describe_size(relief), describe_size(promised))
        });
        requests.into_iter().chain(bytes).collect::<Vec<_>>().join("; ")
    };
    match (ended.review, ended.undone) {
        (None, _) => "done".to_owned(),
        (Some(Review::Unclear), _) => {
            "its moves have ended; one of its nodes is down or takes part in another move, so nothing was compared"
                .to_owned()
        }
        (Some(Review::Gone(effect)), _) => format!("{}; the load that was moved has ended", went(effect)),
        (Some(Review::Unhelpful(effect)), Some(Ok(()))) => {
            format!("{}: it has failed, and is undone", went(effect))
        }
        (Some(Review::Unhelpful(effect)), Some(Err(why))) => {
            format!("{}: it has failed, and stays: {why}", went(effect))
        }
        (Some(Review::Helped(effect) | Review::Unhelpful(effect)), _) => went(effect),
    }
}
