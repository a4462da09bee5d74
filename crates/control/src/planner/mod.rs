//! Observes the load, decides by [`switchyard_policy::planner`], starts moves, and evaluates their effect.
//!
//! Holds the state that the policy lacks: loads of the window, recent moves, the spent budget, and the numbered
//! decisions. Starts nothing itself: [`crate::operator`] makes the orders, with the same checks as for operators.
//!
//! One decision is carried out at a time. After its moves and a further window, the load is compared with the
//! prediction. A decision that did not help is reverted. After three such decisions in a row the planner pauses. An
//! operator's plan is compared, too, but never reverted.
//!
//! After a restart, the history provides budgets, cooldowns and the decision in progress.

mod history;
mod messages;
mod problem;
mod rest;
#[cfg(test)]
mod tests;
mod thread;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use switchyard_policy::load::ObservedLoad;
use switchyard_policy::planner::{
    Effect, Knobs, Name, Node, Plan, Policy, Previous, Problem, Review, State, Step, StepSubject, Verdict, fullest_at,
    nodes_of, revert, review, solve,
};
use switchyard_policy::topology::{MoveId, NodeId, Slot, Topology};
use switchyard_resp::units::describe_size;

use crate::store::{RedbStore, StoreError};

pub(crate) use history::{Decision, History};
pub(crate) use messages::Words;
pub(crate) use problem::{FleetContext, KEYS, names};
use problem::{LoadHistory, LoadSample, load_of};
use rest::{PauseReason, PauseState};
pub(crate) use thread::PLANNER;
pub use thread::PlannerThread;

/// Maximum age of loads that are compared with each other.
const LOAD_AGE_MAX: Duration = Duration::from_secs(60);

/// Cooldown of moved keys and slots.
const KEY_COOLDOWN: Duration = Duration::from_secs(60);
const SLOT_COOLDOWN: Duration = Duration::from_secs(300);

/// Period in which earlier decisions at a node raise the evidence that its next one needs, so that a noisy load does
/// not cause moves back and forth.
const STEADY_FOR: Duration = Duration::from_secs(300);

/// Time without significant use after which a key that the planner has moved returns to its slot owner.
const COLD_AFTER: Duration = Duration::from_secs(60);

/// Minimum interval between such returns, each of several keys.
const RETURN_INTERVAL: Duration = Duration::from_secs(60);

/// Fraction of a node's mean load below which a key is cold.
const COLD: f64 = 0.005;

/// Author of the planner's own decisions.
const OWN: &str = "planner";

/// Author of a decision that reverts another.
const TAKES_BACK: &str = "planner: takes back";

/// Pause at a node after a refused move, initially and at most. Doubles with each refusal.
const REFUSED_RESTS: Duration = Duration::from_secs(10);
const REFUSED_RESTS_MAX: Duration = Duration::from_secs(600);

/// Duration after which moves are reported as the reason for waiting.
const LONG: Duration = Duration::from_secs(60);

/// Minimum interval between history entries for the same decision while nothing is started.
const HISTORY_INTERVAL: Duration = Duration::from_secs(60);

/// Whether the planner decides, and acts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Does nothing.
    Off,
    /// Decides, and only reports the plan.
    #[default]
    Observe,
    /// Decides and acts.
    On,
}

impl Mode {
    /// All modes, with their names in the configuration.
    pub const ALL: [(Self, &'static str); 3] = [(Self::Off, "off"), (Self::Observe, "observe"), (Self::On, "on")];
}

/// All policies, with their names in the configuration.
pub const POLICIES: &[(Policy, &str)] = &[
    (Policy::Switchyard, "switchyard"),
    #[cfg(feature = "research")]
    (Policy::MakrisPrinted, "makris-printed"),
    (Policy::MakrisFfd, "makris-ffd"),
    (Policy::MakrisSafe, "makris-safe"),
];

/// Settings of the planner.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannerConfig {
    /// Whether the planner acts.
    pub mode: Mode,
    /// Policy in use.
    pub policy: Policy,
    /// Interval between planning steps.
    pub interval: Duration,
    /// Time for which a node must exceed its limit. `None`: 3 s, and longer for members of a cluster.
    pub window: Option<Duration>,
    /// Part of each limit that is kept free, in percent.
    pub headroom: usize,
    /// Requests per second below which a node is never relieved. `None`: [`Knobs::LEAST`].
    pub least: Option<usize>,
    /// Maximum number of keys moved per minute.
    pub keys_per_minute: usize,
    /// Maximum number of bytes moved per hour.
    pub bytes_per_hour: usize,
}

impl Default for PlannerConfig {
    fn default() -> Self {
        Self {
            mode: Mode::Observe,
            policy: Policy::Switchyard,
            interval: Duration::from_secs(1),
            window: None,
            headroom: 10,
            least: None,
            keys_per_minute: 600,
            bytes_per_hour: 10 << 30,
        }
    }
}

impl PlannerConfig {
    /// Time for which a standalone node must exceed its limit.
    fn window(&self) -> Duration {
        self.window.unwrap_or(Duration::from_secs(3))
    }
}

/// Persistent state in addition to the decisions.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct PersistedState {
    /// Whether an operator has disabled all automation.
    is_off: bool,
    /// Keys that the planner has moved away from their slots. Other placement overrides are an operator's, and stay.
    relocated: Relocated,
    /// Number of consecutive failed decisions.
    #[serde(default)]
    failures: u32,
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

/// A decision in progress.
#[derive(Clone, Debug)]
struct Change {
    decision: u64,
    kind: Kind,
    plan: Plan,
    /// Utilization of the fullest affected node at the time of the decision, as a fraction of its limit.
    before: f64,
    since: Instant,
    stage: Stage,
}

/// Author and purpose of a decision, which determine whether it may be reverted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A decision of the planner.
    Own,
    /// A decision of the planner that reverts another. The opposite has just been tried.
    Revert,
    /// An operator's plan.
    Requested,
    /// Return of cold keys. It relieves no node, so there is nothing to compare.
    ReturnCold,
}

impl Kind {
    fn of(by: &str, plan: &Plan) -> Self {
        match (by, plan.verdict) {
            (OWN, Verdict::Fine) => Self::ReturnCold,
            (OWN, _) => Self::Own,
            (TAKES_BACK, _) => Self::Revert,
            _ => Self::Requested,
        }
    }
}

#[derive(Clone, Debug)]
enum Stage {
    /// The moves have not ended.
    Moves(Vec<MoveId>),
    /// The moves have ended, and the load settles until this time.
    Settles(Instant),
}

#[derive(Debug, Default)]
struct Inner {
    config: PlannerConfig,
    kept: PersistedState,
    history: History,
    seen: VecDeque<LoadSample>,
    keys: BTreeMap<Name, Instant>,
    slots: BTreeMap<Slot, Instant>,
    over: Vec<NodeId>,
    /// Relocated keys with little use, and the time since when.
    cold: BTreeMap<Name, Instant>,
    homecoming_at: Option<Instant>,
    spent: VecDeque<(Instant, usize, u64)>,
    /// Nodes of recent decisions.
    relieved: VecDeque<(Instant, BTreeSet<NodeId>)>,
    /// Nodes that refused a move: end of the pause, and number of refusals.
    refused: BTreeMap<NodeId, (Instant, u32)>,
    in_progress: Vec<Change>,
    rests: PauseState,
    /// Decisions that have ended since the start, by outcome.
    outcomes: BTreeMap<&'static str, u64>,
    noted: Option<(Instant, Vec<(NodeId, NodeId)>)>,
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
    inner: Mutex<Inner>,
}

impl Planner {
    /// Opens the planner with its stored state.
    pub(crate) fn open(store: Arc<RedbStore>) -> Result<Self, StoreError> {
        let mut inner = Inner { kept: crate::store::load_json(&*store, KEPT)?, ..Inner::default() };
        let now = (Instant::now(), history::unix_seconds());
        inner.history = History::load(&store, |id, decision| inner.resume(now, id, decision));
        inner.rests.failed(now.0, inner.kept.failures);
        Ok(Self { store, inner: Mutex::new(inner) })
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn tune(&self, config: &PlannerConfig) {
        self.inner().config = config.clone();
    }

    pub(crate) fn config(&self) -> PlannerConfig {
        self.inner().config.clone()
    }

    /// State of the planner, for reports and metrics.
    pub(crate) fn standing(&self, now: Instant) -> Standing {
        let inner = self.inner();
        let rests = inner.rest(now).map(|rest| rest.text());
        Standing { mode: inner.config.mode, rests, over: inner.over.clone(), outcomes: inner.outcomes.clone() }
    }

    /// Logs the reason why it does not act, once per reason.
    pub(crate) fn log_rest(&self, now: Instant) {
        let mut inner = self.inner();
        let rest = inner.rest(now).filter(|_| inner.config.mode == Mode::On);
        inner.rests.log(rest.as_ref());
    }

    /// Whether an operator has disabled all automation.
    pub(crate) fn is_off(&self) -> bool {
        self.inner().kept.is_off
    }

    /// Disables or enables automation, durably.
    pub(crate) fn switch(&self, is_off: bool) -> Result<(), String> {
        let mut inner = self.inner();
        let kept = PersistedState { is_off, failures: 0, ..inner.kept.clone() };
        self.keep(&mut inner, kept)?;
        inner.rests = PauseState::default();
        Ok(())
    }

    /// Whether there is nothing to decide or to evaluate.
    pub(crate) fn is_idle(&self) -> bool {
        let inner = self.inner();
        inner.config.mode == Mode::Off && inner.in_progress.is_empty()
    }

    fn keep(&self, inner: &mut Inner, kept: PersistedState) -> Result<(), String> {
        crate::store::save_json(&*self.store, KEPT, &kept)
            .map_err(|error| format!("the planner cannot store its state: {error}"))?;
        inner.kept = kept;
        Ok(())
    }

    /// Records a measurement of the load.
    pub(crate) fn note(&self, now: Instant, topology: &Topology, load: &ObservedLoad) {
        let mut inner = self.inner();
        let nodes: BTreeMap<NodeId, f64> = topology.nodes().map(|node| (node.id, load_of(load, node.id))).collect();
        let mean = nodes.values().sum::<f64>() / nodes.len().max(1) as f64;
        inner.seen.push_back(LoadSample { at: now, epoch: topology.epoch(), nodes });
        let kept = inner.config.window().max(LOAD_AGE_MAX);
        // Keep an additional load, so that they span the whole window.
        while inner.seen.get(1).is_some_and(|seen| now.saturating_duration_since(seen.at) >= kept) {
            inner.seen.pop_front();
        }
        let used: BTreeMap<&[u8], f64> = load
            .keys
            .iter()
            .flat_map(|node| &node.keys)
            .filter_map(|hot| Some((hot.name.key()?, hot.rates.commands())))
            .fold(BTreeMap::new(), |mut used, (key, rate)| {
                *used.entry(key).or_default() += rate;
                used
            });
        let is_cold = |key: &Name| used.get(&**key).is_none_or(|rate| *rate < mean * COLD);
        let Inner { kept, cold, .. } = &mut *inner;
        cold.retain(|key, _| kept.relocated.0.contains_key(key) && is_cold(key));
        for key in kept.relocated.0.keys().filter(|key| is_cold(key)) {
            cold.entry(key.clone()).or_insert(now);
        }
    }

    /// Returns the planning problem, and the recent moves.
    pub(crate) fn problem(
        &self,
        now: Instant,
        topology: &Topology,
        load: &ObservedLoad,
        around: &FleetContext,
    ) -> (Problem, Previous) {
        let mut inner = self.inner();
        inner.forget(now);
        let (knobs, cold) = (inner.knobs(now), inner.cold_now(now));
        let decisions = |node: NodeId| inner.relieved.iter().filter(|(_, nodes)| nodes.contains(&node)).count();
        let looks = LoadHistory { seen: &inner.seen, window: inner.config.window(), decisions: &decisions };
        let mut problem = problem::problem(topology, load, &looks, around, &cold, knobs);
        let rests = |node: &&mut Node| inner.refused.get(&node.id).is_some_and(|(until, _)| now < *until);
        for node in problem.nodes.iter_mut().filter(|node| node.state == State::Ready).filter(rests) {
            node.state = State::Busy;
        }
        let previous = Previous {
            keys: inner.keys.keys().cloned().collect(),
            slots: inner.slots.keys().copied().collect(),
            over: inner.over.clone(),
        };
        (problem, previous)
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
        // Read this before evaluating failures, so that the last of several failures is reverted, too.
        let acts = inner.acts(now);
        if let Some((id, plan)) = self.evaluate_ended(&mut inner, now, acts, problem, is_open) {
            return Next::Begin(id, plan);
        }
        if !inner.in_progress.is_empty() || inner.config.mode == Mode::Off {
            return Next::Rest;
        }
        let plan = solve(problem, &previous);
        inner.over = match plan.verdict {
            Verdict::Fine => Vec::new(),
            _ => plan.nodes.iter().filter(|node| node.before > node.limit).map(|node| node.node).collect(),
        };
        if plan.steps.is_empty() && plan.verdict == Verdict::Fine {
            inner.noted = None;
            return Next::Rest;
        }
        let acts = inner.acts(now) && !plan.steps.is_empty();
        let ways: Vec<(NodeId, NodeId)> =
            plan.steps.iter().map(|step| (step.from, step.to)).collect::<BTreeSet<_>>().into_iter().collect();
        let is_news = inner
            .noted
            .as_ref()
            .is_none_or(|(at, known)| now.saturating_duration_since(*at) >= HISTORY_INTERVAL && *known != ways);
        if !acts && !is_news {
            return Next::Rest;
        }
        inner.noted = Some((now, ways));
        let id = self.record(&mut inner, Decision::of(OWN, problem.clone(), previous, plan.clone()));
        if acts { Next::Begin(id, plan) } else { Next::Rest }
    }

    /// Evaluates the decisions whose moves have ended. Returns a plan that reverts a failed decision, if `acts`.
    fn evaluate_ended(
        &self,
        inner: &mut Inner,
        now: Instant,
        acts: bool,
        problem: &Problem,
        is_open: impl Fn(MoveId) -> bool,
    ) -> Option<(u64, Plan)> {
        let settled_at = now + inner.config.window() + inner.config.interval;
        let mut next = None;
        for mut change in std::mem::take(&mut inner.in_progress) {
            match &change.stage {
                Stage::Moves(moves) if moves.iter().any(|id| is_open(*id)) => inner.in_progress.push(change),
                Stage::Moves(_) if change.kind == Kind::ReturnCold => {
                    inner.history.record_outcome(&self.store, change.decision, "done".to_owned())
                }
                Stage::Moves(_) => {
                    change.stage = Stage::Settles(settled_at);
                    inner.in_progress.push(change);
                }
                Stage::Settles(until) if now < *until => inner.in_progress.push(change),
                Stage::Settles(_) => next = self.judge(inner, now, acts, problem, &change).or(next),
            }
        }
        next
    }

    /// Records the outcome of a decision. Returns a plan that reverts it, if needed.
    fn judge(
        &self,
        inner: &mut Inner,
        now: Instant,
        acts: bool,
        problem: &Problem,
        change: &Change,
    ) -> Option<(u64, Plan)> {
        let went = |effect: Effect| {
            let requests = (effect.promised > 0.0).then(|| {
                format!(
                    "the fullest of its nodes went from {:.0} to {:.0} % of its limit, and {:.0} of {:.0} requests/s left the relieved nodes",
                    change.before * 100.0,
                    effect.after * 100.0,
                    effect.relief.max(0.0),
                    effect.promised
                )
            });
            let bytes = effect.bytes.map(|(promised, relief)| {
                format!(
                    "{} of {} left the nodes with too little memory",
                    describe_size(relief),
                    describe_size(promised)
                )
            });
            requests.into_iter().chain(bytes).collect::<Vec<_>>().join("; ")
        };
        let mut failures = inner.kept.failures;
        let review = review(problem, &change.plan, change.before);
        inner.count(match review {
            Review::Helped(_) => "helped",
            Review::Gone(_) => "load-ended",
            Review::Unhelpful(_) => "failed",
            Review::Unclear => "not-compared",
        });
        let (outcome, back) = match (review, change.kind) {
            (Review::Unclear, _) => (
                "its moves have ended; one of its nodes is down or takes part in another move, so nothing was compared"
                    .to_owned(),
                None,
            ),
            (Review::Gone(effect), _) => (format!("{}; the load that was moved has ended", went(effect)), None),
            (Review::Helped(effect), kind) => {
                failures = if kind == Kind::Own { 0 } else { failures };
                (went(effect), None)
            }
            (Review::Unhelpful(effect), Kind::Own) => {
                failures += 1;
                let back = if acts { revert(problem, &change.plan.steps) } else { Err("the planner does not act now") };
                match back {
                    Ok(plan) => (format!("{}: it has failed, and is undone", went(effect)), Some(plan)),
                    Err(why) => (format!("{}: it has failed, and stays: {why}", went(effect)), None),
                }
            }
            (Review::Unhelpful(effect), _) => (went(effect), None),
        };
        inner.history.record_outcome(&self.store, change.decision, outcome);
        if failures != inner.kept.failures {
            let kept = PersistedState { failures, ..inner.kept.clone() };
            self.keep(inner, kept).unwrap_or_else(|why| tracing::warn!("{why}"));
            inner.rests.failed(now, failures);
        }
        let plan = back?;
        Some((self.record(inner, Decision::of(TAKES_BACK, problem.clone(), Previous::default(), plan.clone())), plan))
    }

    fn record(&self, inner: &mut Inner, decision: Decision) -> u64 {
        inner.history.add(&self.store, decision)
    }

    /// Whether a decision reverts another, and so was not solved for.
    pub(crate) fn is_revert(by: &str) -> bool {
        by == TAKES_BACK
    }

    /// Records an operator's plan, and returns its number.
    pub(crate) fn record_requested(&self, by: &str, problem: Problem, previous: Previous, plan: Plan) -> u64 {
        self.record(&mut self.inner(), Decision::of(by, problem, previous, plan))
    }

    /// Records the started moves of a decision.
    pub(crate) fn begun(&self, now: Instant, decision: u64, before: f64, moves: Vec<MoveId>) {
        let mut inner = self.inner();
        let Some(Decision { by, plan, .. }) =
            inner.history.record_moves(&self.store, decision, moves.iter().map(|id| id.0).collect())
        else {
            return;
        };
        let kind = Kind::of(&by, &plan);
        let away = plan.steps.iter().filter_map(|step| match &step.what {
            StepSubject::Key { key, is_cold: false, .. } => Some((key.clone(), Some(step.to))),
            _ => None,
        });
        let mut kept = inner.kept.clone();
        kept.relocated.0.extend(away);
        if kept.relocated != inner.kept.relocated {
            self.keep(&mut inner, kept).unwrap_or_else(|why| tracing::warn!("{why}"));
        }
        let nodes = nodes_of(&plan.steps);
        inner.refused.retain(|node, _| !nodes.contains(node));
        inner.remember(now, &plan);
        inner.in_progress.push(Change { decision, kind, plan, before, since: now, stage: Stage::Moves(moves) });
    }

    /// Records that the moves of a decision were refused, which pauses moves at these nodes.
    pub(crate) fn refused(&self, now: Instant, decision: u64, nodes: impl IntoIterator<Item = NodeId>, why: &str) {
        let mut inner = self.inner();
        for node in nodes {
            let times = inner.refused.get(&node).map_or(0, |(_, times)| *times);
            let rest = REFUSED_RESTS.saturating_mul(1 << times.min(16)).min(REFUSED_RESTS_MAX);
            inner.refused.insert(node, (now + rest, times + 1));
        }
        inner.count("refused");
        inner.history.record_outcome(&self.store, decision, format!("refused: {why}"));
    }

    /// Forgets keys that have left the node to which the planner has moved them: they have returned to their slots, or
    /// an operator has moved them. `node_of` returns the node of a placement override. Keys of a decision in progress
    /// may still be in transit, and are retained.
    pub(crate) fn keep_relocated(&self, node_of: impl Fn(&[u8]) -> Option<NodeId>) {
        let mut inner = self.inner();
        let key_of = |step: &Step| match &step.what {
            StepSubject::Key { key, .. } => Some(key.clone()),
            StepSubject::Slots(_) => None,
        };
        let moving: BTreeSet<Name> =
            inner.in_progress.iter().flat_map(|change| change.plan.steps.iter().filter_map(key_of)).collect();
        let mut relocated = inner.kept.relocated.clone();
        relocated.0.retain(|key, node| {
            if moving.contains(key) {
                return true;
            }
            let found = node_of(key);
            let is_there = found.is_some() && (node.is_none() || *node == found);
            *node = found;
            is_there
        });
        if relocated != inner.kept.relocated {
            inner.cold.retain(|key, _| relocated.0.contains_key(key));
            let kept = PersistedState { relocated, ..inner.kept.clone() };
            if let Err(why) = self.keep(&mut inner, kept) {
                tracing::warn!("{why}");
            }
        }
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
    /// Reason why it does not act, or not soon.
    fn rest(&self, now: Instant) -> Option<PauseReason> {
        let failures = self.kept.failures;
        let waits = || {
            self.in_progress.iter().find_map(|Change { decision, since, stage, .. }| match stage {
                Stage::Moves(moves) if now.saturating_duration_since(*since) >= LONG => {
                    Some(PauseReason::Waits { decision: *decision, moves: moves.clone() })
                }
                _ => None,
            })
        };
        match self.rests.left(now) {
            _ if self.kept.is_off => Some(PauseReason::Off),
            Some(left) => Some(PauseReason::Failed { failures, left }),
            None => waits(),
        }
    }

    fn acts(&self, now: Instant) -> bool {
        self.config.mode == Mode::On && !matches!(self.rest(now), Some(PauseReason::Off | PauseReason::Failed { .. }))
    }

    fn count(&mut self, outcome: &'static str) {
        *self.outcomes.entry(outcome).or_default() += 1;
    }

    /// Records the cooldown of the plan's keys and slots, and charges the budgets.
    fn remember(&mut self, at: Instant, plan: &Plan) {
        for step in &plan.steps {
            match &step.what {
                StepSubject::Key { key, .. } => self.keys.extend([(key.clone(), at)]),
                StepSubject::Slots(slots) => self.slots.extend(slots.iter().map(|slot| (*slot, at))),
            }
        }
        if plan.steps.iter().any(|step| matches!(step.what, StepSubject::Key { is_cold: true, .. })) {
            self.homecoming_at = Some(at);
        }
        self.spent.push_back((at, plan.price.keys, plan.price.bytes));
        if plan.verdict != Verdict::Fine {
            self.relieved.push_back((at, nodes_of(&plan.steps)));
        }
    }

    /// Restores a stored decision after a restart. Called with the present time on both clocks, oldest decision first.
    fn resume(&mut self, (now, unix): (Instant, u64), id: u64, decision: &Decision) {
        let Some(moves) = &decision.moves else { return };
        let at = now.checked_sub(Duration::from_secs(unix.saturating_sub(decision.at))).unwrap_or(now);
        self.remember(at, &decision.plan);
        if decision.outcome.is_none() {
            let (kind, plan) = (Kind::of(&decision.by, &decision.plan), decision.plan.clone());
            let before = fullest_at(&decision.problem, &nodes_of(&plan.steps));
            let stage = Stage::Moves(moves.iter().copied().map(MoveId).collect());
            self.in_progress.push(Change { decision: id, kind, plan, before, since: now, stage });
        }
    }

    fn forget(&mut self, now: Instant) {
        let is_within = |at: &Instant, time: Duration| now.saturating_duration_since(*at) < time;
        self.keys.retain(|_, at| is_within(at, KEY_COOLDOWN));
        self.slots.retain(|_, at| is_within(at, SLOT_COOLDOWN));
        self.spent.retain(|(at, ..)| is_within(at, Duration::from_secs(3600)));
        self.relieved.retain(|(at, _)| is_within(at, STEADY_FOR));
        self.refused.retain(|_, (until, _)| is_within(until, REFUSED_RESTS_MAX));
    }

    /// Settings of the policy, with the remaining budgets.
    fn knobs(&self, now: Instant) -> Knobs {
        let minute = self.spent.iter().filter(|(at, ..)| now.saturating_duration_since(*at).as_secs() < 60);
        let keys: usize = minute.map(|(_, keys, _)| keys).sum();
        let bytes: u64 = self.spent.iter().map(|(.., bytes)| bytes).sum();
        Knobs {
            policy: self.config.policy,
            headroom: self.config.headroom as f64 / 100.0,
            least_set: self.config.least.map(|least| least as f64),
            keys_max: self.config.keys_per_minute.saturating_sub(keys),
            bytes_max: (self.config.bytes_per_hour as u64).saturating_sub(bytes),
        }
    }

    fn cold_now(&self, now: Instant) -> BTreeSet<Name> {
        if self.homecoming_at.is_some_and(|at| now.saturating_duration_since(at) < RETURN_INTERVAL) {
            return BTreeSet::new();
        }
        let is_due = |since: &Instant| now.saturating_duration_since(*since) >= COLD_AFTER;
        self.cold
            .iter()
            .filter(|(_, since)| is_due(since))
            .map(|(key, _)| key.clone())
            .take(self.config.keys_per_minute)
            .collect()
    }
}
