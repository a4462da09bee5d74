//! The planning cycle: observes the load, decides, and evaluates the effect of each decision.
//!
//! Holds the state that [`super::solve`] lacks: loads of the window, recent moves, the spent budget, and decisions in
//! progress. The caller measures the load, orders the moves and stores the decisions. So the router
//! (`control::planner`) and the fleet simulator (`sim::fleet`) run the same cycle.
//!
//! One decision is carried out at a time. After its moves and a further window, the load is compared with the
//! prediction. A decision that did not help is reverted. After three such decisions in a row the planner pauses. An
//! operator's plan is compared, too, but never reverted.
//!
//! Times are durations since a moment that the caller chooses once.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::problem::{self, FleetContext, LoadHistory, LoadSample, load_of};
use super::{
    Knobs, Name, Node, Plan, Policy, Previous, Problem, Review, State, Step, StepSubject, Verdict, nodes_of, revert,
    review,
};
use crate::load::ObservedLoad;
use crate::topology::{MoveId, NodeId, Slot, Topology};

/// Maximum age of loads that are compared with each other.
const LOAD_AGE_MAX: Duration = Duration::from_secs(60);

/// Cooldown of moved keys.
pub const KEY_COOLDOWN: Duration = Duration::from_secs(60);

/// Cooldown of moved slots.
pub const SLOT_COOLDOWN: Duration = Duration::from_secs(300);

/// Period in which earlier decisions at a node raise the evidence that its next one needs, so that a noisy load does
/// not cause moves back and forth.
const STEADY_FOR: Duration = Duration::from_secs(300);

/// Time without significant use after which a key that the planner has moved returns to its slot owner.
const COLD_AFTER: Duration = Duration::from_secs(60);

/// Minimum interval between such returns, each of several keys.
const RETURN_INTERVAL: Duration = Duration::from_secs(60);

/// Fraction of a node's mean load below which a key is cold.
const COLD: f64 = 0.005;

/// Pause at a node after a refused move, initially and at most. Doubles with each refusal.
const REFUSED_RESTS: Duration = Duration::from_secs(10);
const REFUSED_RESTS_MAX: Duration = Duration::from_secs(600);

/// Duration after which moves are reported as the reason for waiting.
const LONG: Duration = Duration::from_secs(60);

/// Minimum interval between records of the same decision while nothing is started.
const HISTORY_INTERVAL: Duration = Duration::from_secs(60);

/// Consecutive failures after which the planner pauses.
const FAILURES_MAX: u32 = 3;

/// Pause after the last of these failures, and the maximum pause. Each further failure doubles it.
const PAUSE: Duration = Duration::from_secs(60);
const PAUSE_MAX: Duration = Duration::from_secs(3600);

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

/// State that a restart must not lose, in addition to the decisions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DurableState {
    /// Keys that the planner has moved away from their slots, with the node that it has moved them to. `None`: the node
    /// is not known. Other placement overrides are an operator's, and stay.
    pub relocated: BTreeMap<Name, Option<NodeId>>,
    /// Number of consecutive failed decisions.
    pub failures: u32,
}

/// Author of a decision, which determines whether it may be reverted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Author {
    /// The planner.
    Planner,
    /// The planner, to revert a decision of its own. The opposite has just been tried.
    Revert,
    /// An operator.
    Operator,
}

/// A decision whose moves were started.
#[derive(Clone, Debug, PartialEq)]
pub struct Started {
    /// Number of the decision.
    pub decision: u64,
    /// Author of the decision.
    pub author: Author,
    /// The plan.
    pub plan: Plan,
    /// Utilization of the fullest affected node at the time of the decision ([`super::fullest_at`]).
    pub before: f64,
    /// The moves.
    pub moves: Vec<MoveId>,
}

impl Started {
    /// Whether the plan only returns cold keys. That relieves no node, so there is nothing to compare.
    fn is_return(&self) -> bool {
        self.author == Author::Planner && self.plan.verdict == Verdict::Fine
    }
}

/// A decision in progress.
#[derive(Clone, Debug)]
struct Change {
    started: Started,
    since: Duration,
    stage: Stage,
}

#[derive(Clone, Copy, Debug)]
enum Stage {
    /// The moves have not ended.
    Moves,
    /// The moves have ended, and the load settles until this time.
    Settles(Duration),
}

/// End of a decision.
#[derive(Clone, Debug, PartialEq)]
pub struct Ended {
    /// Number of the decision.
    pub decision: u64,
    /// Utilization of the fullest affected node at the time of the decision.
    pub before: f64,
    /// Result of the comparison. `None`: cold keys have returned.
    pub review: Option<Review>,
    /// Whether a failed decision is reverted, or the reason why not. `None`: it has not failed, or may not be reverted.
    pub undone: Option<Result<(), &'static str>>,
}

/// Next action.
#[derive(Clone, Debug, PartialEq)]
pub enum Next {
    /// Nothing to do.
    Rest,
    /// Record this plan, which is not carried out.
    Record(Plan),
    /// Start the moves of this plan ([`Cycle::begun`], [`Cycle::refused`]).
    Begin(Author, Plan),
}

/// Reason why the planner does not act, or not soon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PauseReason {
    /// An operator has disabled all automation.
    Off,
    /// Decisions have failed in a row. The planner pauses and then retries.
    Failed {
        /// Number of these decisions.
        failures: u32,
        /// Remaining pause.
        left: Duration,
    },
    /// Moves of a decision take long, or are paused.
    Waits {
        /// Number of the decision.
        decision: u64,
        /// All moves of the decision.
        moves: Vec<MoveId>,
    },
}

/// State of the planning cycle of a fleet.
#[derive(Clone, Debug, Default)]
pub struct Cycle {
    config: PlannerConfig,
    is_off: bool,
    durable: DurableState,
    seen: VecDeque<LoadSample>,
    /// Keys and slots that moved recently, with the times of the decisions.
    keys: BTreeMap<Name, Duration>,
    slots: BTreeMap<Slot, Duration>,
    over: Vec<NodeId>,
    /// Relocated keys with little use, and the time since when.
    cold: BTreeMap<Name, Duration>,
    homecoming_at: Option<Duration>,
    spent: VecDeque<(Duration, usize, u64)>,
    /// Nodes of recent decisions.
    relieved: VecDeque<(Duration, BTreeSet<NodeId>)>,
    /// Nodes that refused a move: end of the pause, and number of refusals.
    refused: BTreeMap<NodeId, (Duration, u32)>,
    in_progress: Vec<Change>,
    /// End of the pause after failures.
    paused_until: Option<Duration>,
    noted: Option<(Duration, Vec<(NodeId, NodeId)>)>,
}

impl Cycle {
    /// Applies settings.
    pub fn tune(&mut self, config: &PlannerConfig) {
        self.config = config.clone();
    }

    /// Current settings.
    #[must_use]
    pub fn config(&self) -> &PlannerConfig {
        &self.config
    }

    /// State to store.
    #[must_use]
    pub fn durable(&self) -> &DurableState {
        &self.durable
    }

    /// Restores the stored state. `is_off`: whether an operator has disabled all automation.
    pub fn restore(&mut self, now: Duration, durable: DurableState, is_off: bool) {
        (self.durable, self.is_off) = (durable, is_off);
        self.pause_after_failures(now);
    }

    /// Restores a decision of an earlier run, made at the time `at`. Call it for each one, oldest first. `has_ended`:
    /// whether its outcome is known.
    pub fn resume(&mut self, now: Duration, at: Duration, started: Started, has_ended: bool) {
        self.remember(at, &started.plan);
        if !has_ended {
            self.in_progress.push(Change { started, since: now, stage: Stage::Moves });
        }
    }

    /// Disables or enables all automation, for an operator. Forgets failures.
    pub fn switch(&mut self, is_off: bool) {
        (self.is_off, self.durable.failures, self.paused_until) = (is_off, 0, None);
    }

    /// Whether an operator has disabled all automation.
    #[must_use]
    pub fn is_off(&self) -> bool {
        self.is_off
    }

    /// Whether there is nothing to decide or to evaluate.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.config.mode == Mode::Off && self.in_progress.is_empty()
    }

    /// Nodes above their limit at the latest decision.
    #[must_use]
    pub fn over(&self) -> &[NodeId] {
        &self.over
    }

    /// Records a measurement of the load.
    pub fn note(&mut self, now: Duration, topology: &Topology, load: &ObservedLoad) {
        let mut nodes = vec![0.0; topology.node_id_bound()];
        for node in topology.nodes() {
            nodes[node.id.index()] = load_of(load, node.id);
        }
        let mean = nodes.iter().sum::<f64>() / topology.nodes().len().max(1) as f64;
        self.seen.push_back(LoadSample { at: now, epoch: topology.epoch(), nodes });
        let kept = self.config.window().max(LOAD_AGE_MAX);
        // Keep an additional load, so that they span the whole window.
        while self.seen.get(1).is_some_and(|seen| now.saturating_sub(seen.at) >= kept) {
            self.seen.pop_front();
        }
        let relocated = &self.durable.relocated;
        let mut used: BTreeMap<&[u8], f64> = BTreeMap::new();
        for hot in load.keys.iter().flat_map(|node| &node.keys) {
            if let Some(key) = hot.name.key().filter(|key| relocated.contains_key(*key)) {
                *used.entry(key).or_default() += hot.rates.commands();
            }
        }
        let is_cold = |key: &Name| used.get(&**key).is_none_or(|rate| *rate < mean * COLD);
        self.cold.retain(|key, _| relocated.contains_key(key) && is_cold(key));
        for key in relocated.keys().filter(|key| is_cold(key)) {
            self.cold.entry(key.clone()).or_insert(now);
        }
    }

    /// Returns the planning problem, and the recent moves.
    pub fn problem(
        &mut self,
        now: Duration,
        topology: &Topology,
        load: &ObservedLoad,
        context: &FleetContext,
    ) -> (Problem, Previous) {
        self.forget(now);
        let (knobs, cold) = (self.knobs(now), self.cold_now(now));
        let decisions = |node: NodeId| self.relieved.iter().filter(|(_, nodes)| nodes.contains(&node)).count();
        let looks = LoadHistory { seen: &self.seen, window: self.config.window(), decisions: &decisions };
        let mut problem = problem::problem(topology, load, &looks, context, &cold, knobs);
        let rests = |node: &&mut Node| self.refused.get(&node.id).is_some_and(|(until, _)| now < *until);
        for node in problem.nodes.iter_mut().filter(|node| node.state == State::Ready).filter(rests) {
            node.state = State::Busy;
        }
        let previous = Previous {
            keys: self.keys.keys().cloned().collect(),
            slots: self.slots.keys().copied().collect(),
            over: self.over.clone(),
        };
        (problem, previous)
    }

    /// Performs a planning step. Returns the decisions that have ended, and the next action. `is_open`: whether a move
    /// has not ended. `solve`: [`super::solve`], a parameter so that tests can measure and replace it.
    pub fn step(
        &mut self,
        now: Duration,
        problem: &Problem,
        previous: &Previous,
        is_open: impl Fn(MoveId) -> bool,
        solve: impl FnOnce(&Problem, &Previous) -> Plan,
    ) -> (Vec<Ended>, Next) {
        // Read this before evaluating failures, so that the last of several failures is reverted, too.
        let acts = self.acts(now);
        let (ended, back) = self.evaluate_ended(now, acts, problem, is_open);
        if let Some(plan) = back {
            return (ended, Next::Begin(Author::Revert, plan));
        }
        if !self.in_progress.is_empty() || self.config.mode == Mode::Off {
            return (ended, Next::Rest);
        }
        let plan = solve(problem, previous);
        self.over = match plan.verdict {
            Verdict::Fine => Vec::new(),
            _ => plan.nodes.iter().filter(|node| node.before > node.limit).map(|node| node.node).collect(),
        };
        if plan.steps.is_empty() && plan.verdict == Verdict::Fine {
            self.noted = None;
            return (ended, Next::Rest);
        }
        let acts = self.acts(now) && !plan.steps.is_empty();
        let ways: Vec<(NodeId, NodeId)> =
            plan.steps.iter().map(|step| (step.from, step.to)).collect::<BTreeSet<_>>().into_iter().collect();
        let is_news =
            self.noted.as_ref().is_none_or(|(at, known)| now.saturating_sub(*at) >= HISTORY_INTERVAL && *known != ways);
        if !acts && !is_news {
            return (ended, Next::Rest);
        }
        self.noted = Some((now, ways));
        (ended, if acts { Next::Begin(Author::Planner, plan) } else { Next::Record(plan) })
    }

    /// Evaluates the decisions whose moves have ended. Returns a plan that reverts a failed decision, if `acts`.
    fn evaluate_ended(
        &mut self,
        now: Duration,
        acts: bool,
        problem: &Problem,
        is_open: impl Fn(MoveId) -> bool,
    ) -> (Vec<Ended>, Option<Plan>) {
        let settled_at = now + self.config.window() + self.config.interval;
        let (mut all, mut next) = (Vec::new(), None);
        for mut change in std::mem::take(&mut self.in_progress) {
            match change.stage {
                Stage::Moves if change.started.moves.iter().any(|id| is_open(*id)) => self.in_progress.push(change),
                Stage::Moves if change.started.is_return() => {
                    let Started { decision, before, .. } = change.started;
                    all.push(Ended { decision, before, review: None, undone: None });
                }
                Stage::Moves => {
                    change.stage = Stage::Settles(settled_at);
                    self.in_progress.push(change);
                }
                Stage::Settles(until) if now < until => self.in_progress.push(change),
                Stage::Settles(_) => {
                    let (ended, plan) = self.judge(now, acts, problem, &change.started);
                    all.push(ended);
                    next = plan.or(next);
                }
            }
        }
        (all, next)
    }

    /// Compares the effect of a decision with its promise. Returns a plan that reverts it, if needed.
    fn judge(&mut self, now: Duration, acts: bool, problem: &Problem, started: &Started) -> (Ended, Option<Plan>) {
        let Started { decision, author, before, plan, .. } = started;
        let review = review(problem, plan, *before);
        let failures = match (&review, author) {
            (Review::Helped(_), Author::Planner) => 0,
            (Review::Unhelpful(_), Author::Planner) => self.durable.failures + 1,
            _ => self.durable.failures,
        };
        let back = match (&review, author) {
            (Review::Unhelpful(_), Author::Planner) if acts => Some(revert(problem, &plan.steps)),
            (Review::Unhelpful(_), Author::Planner) => Some(Err("the planner does not act now")),
            _ => None,
        };
        if failures != self.durable.failures {
            self.durable.failures = failures;
            self.pause_after_failures(now);
        }
        let undone = back.as_ref().map(|back| back.as_ref().map(|_| ()).map_err(|why| *why));
        let ended = Ended { decision: *decision, before: *before, review: Some(review), undone };
        (ended, back.and_then(Result::ok))
    }

    /// Records the started moves of a decision.
    pub fn begun(&mut self, now: Duration, started: Started) {
        let away = started.plan.steps.iter().filter_map(|step| match &step.what {
            StepSubject::Key { key, is_cold: false, .. } => Some((key.clone(), Some(step.to))),
            _ => None,
        });
        self.durable.relocated.extend(away);
        let nodes = nodes_of(&started.plan.steps);
        self.refused.retain(|node, _| !nodes.contains(node));
        self.remember(now, &started.plan);
        self.in_progress.push(Change { started, since: now, stage: Stage::Moves });
    }

    /// Records that moves were refused, which pauses moves at these nodes.
    pub fn refused(&mut self, now: Duration, nodes: impl IntoIterator<Item = NodeId>) {
        for node in nodes {
            let times = self.refused.get(&node).map_or(0, |(_, times)| *times);
            let rest = REFUSED_RESTS.saturating_mul(1 << times.min(16)).min(REFUSED_RESTS_MAX);
            self.refused.insert(node, (now + rest, times + 1));
        }
    }

    /// Forgets keys that have left the node to which the planner has moved them: they have returned to their slots, or
    /// an operator has moved them. `node_of` returns the node of a placement override. Keys of a decision in progress
    /// may still be in transit, and are retained.
    pub fn keep_relocated(&mut self, node_of: impl Fn(&[u8]) -> Option<NodeId>) {
        let key_of = |step: &Step| match &step.what {
            StepSubject::Key { key, .. } => Some(key.clone()),
            StepSubject::Slots(_) => None,
        };
        let moving: BTreeSet<Name> =
            self.in_progress.iter().flat_map(|change| change.started.plan.steps.iter().filter_map(key_of)).collect();
        let relocated = &mut self.durable.relocated;
        relocated.retain(|key, node| {
            if moving.contains(key) {
                return true;
            }
            let found = node_of(key);
            let is_there = found.is_some() && (node.is_none() || *node == found);
            *node = found;
            is_there
        });
        self.cold.retain(|key, _| relocated.contains_key(key));
    }

    /// Returns the reason why the planner does not act, or not soon.
    #[must_use]
    pub fn pause_reason(&self, now: Duration) -> Option<PauseReason> {
        let waits = || {
            self.in_progress.iter().find_map(|Change { started, since, stage }| match stage {
                Stage::Moves if now.saturating_sub(*since) >= LONG => {
                    Some(PauseReason::Waits { decision: started.decision, moves: started.moves.clone() })
                }
                _ => None,
            })
        };
        let left = self.paused_until.and_then(|until| until.checked_sub(now)).filter(|left| !left.is_zero());
        match left {
            _ if self.is_off => Some(PauseReason::Off),
            Some(left) => Some(PauseReason::Failed { failures: self.durable.failures, left }),
            None => waits(),
        }
    }

    fn acts(&self, now: Duration) -> bool {
        let is_paused = matches!(self.pause_reason(now), Some(PauseReason::Off | PauseReason::Failed { .. }));
        self.config.mode == Mode::On && !is_paused
    }

    /// Starts the pause after the present number of consecutive failures. Ends it below [`FAILURES_MAX`].
    fn pause_after_failures(&mut self, now: Duration) {
        let pause = |more: u32| PAUSE.saturating_mul(1 << more.min(16)).min(PAUSE_MAX);
        self.paused_until = self.durable.failures.checked_sub(FAILURES_MAX).map(|more| now + pause(more));
    }

    /// Records the cooldown of the plan's keys and slots, and charges the budgets.
    fn remember(&mut self, at: Duration, plan: &Plan) {
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

    fn forget(&mut self, now: Duration) {
        let is_within = |at: &Duration, time: Duration| now.saturating_sub(*at) < time;
        self.keys.retain(|_, at| is_within(at, KEY_COOLDOWN));
        self.slots.retain(|_, at| is_within(at, SLOT_COOLDOWN));
        self.spent.retain(|(at, ..)| is_within(at, Duration::from_secs(3600)));
        self.relieved.retain(|(at, _)| is_within(at, STEADY_FOR));
        self.refused.retain(|_, (until, _)| is_within(until, REFUSED_RESTS_MAX));
    }

    /// Settings of the policy, with the remaining budgets.
    fn knobs(&self, now: Duration) -> Knobs {
        let minute = self.spent.iter().filter(|(at, ..)| now.saturating_sub(*at).as_secs() < 60);
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

    fn cold_now(&self, now: Duration) -> BTreeSet<Name> {
        if self.homecoming_at.is_some_and(|at| now.saturating_sub(at) < RETURN_INTERVAL) {
            return BTreeSet::new();
        }
        let is_due = |since: &Duration| now.saturating_sub(*since) >= COLD_AFTER;
        self.cold
            .iter()
            .filter(|(_, since)| is_due(since))
            .map(|(key, _)| key.clone())
            .take(self.config.keys_per_minute)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{KeyAt, solve};
    use super::*;

    /// Limits are 900. Node 0 has a key with 400 requests that fits at node 1.
    fn problem(loads: [f64; 2], at: u16, knobs: Knobs) -> Problem {
        let node = |(id, load): (u16, f64)| Node {
            id: NodeId(id),
            load,
            lasting: load,
            weight: 1,
            capacity: Some(1000.0),
            memory: None,
            keys: 10,
            state: State::Ready,
        };
        let (slot, at, home) = (Slot::new(7).expect("a slot"), NodeId(at), NodeId(0));
        let key = KeyAt {
            key: b"k"[..].into(),
            slot,
            at,
            home,
            reads: 0.0,
            writes: 400.0,
            copied: 0.0,
            bytes: 100,
            is_cold: false,
            stays: None,
        };
        let nodes = [(0, loads[0]), (1, loads[1])].map(node).to_vec();
        Problem { nodes, slots: Vec::new(), keys: vec![key], knobs: Knobs { least_set: Some(100.0), ..knobs } }
    }

    fn acting() -> Cycle {
        let mut cycle = Cycle::default();
        cycle.tune(&PlannerConfig { mode: Mode::On, ..PlannerConfig::default() });
        cycle
    }

    fn seconds(count: u64) -> Duration {
        Duration::from_secs(count)
    }

    /// Performs a step after all moves have ended.
    fn step(cycle: &mut Cycle, at: Duration, problem: &Problem) -> (Vec<Ended>, Next) {
        cycle.step(at, problem, &Previous::default(), |_| false, solve)
    }

    fn begin(cycle: &mut Cycle, at: Duration, decision: u64, author: Author, plan: Plan) {
        cycle.begun(at, Started { decision, author, plan, before: 1.2, moves: vec![MoveId(decision)] });
    }

    #[test]
    fn a_failed_decision_is_reverted_once_and_counts() {
        let mut cycle = acting();
        let (before, worse) =
            (problem([1100.0, 300.0], 0, Knobs::default()), problem([500.0, 1300.0], 1, Knobs::default()));
        let (_, Next::Begin(Author::Planner, plan)) = step(&mut cycle, seconds(1), &before) else {
            panic!("nothing was started")
        };
        begin(&mut cycle, seconds(1), 1, Author::Planner, plan);
        assert_eq!(step(&mut cycle, seconds(10), &worse), (Vec::new(), Next::Rest), "the load settles");
        let (ended, Next::Begin(Author::Revert, back)) = step(&mut cycle, seconds(20), &worse) else {
            panic!("it is taken back")
        };
        assert_eq!((ended[0].decision, ended[0].undone, cycle.durable().failures), (1, Some(Ok(())), 1));
        begin(&mut cycle, seconds(20), 2, Author::Revert, back);
        step(&mut cycle, seconds(30), &worse);
        let (ended, next) = step(&mut cycle, seconds(40), &problem([1300.0, 900.0], 0, Knobs::default()));
        assert_eq!((ended[0].undone, cycle.durable().failures), (None, 1));
        assert!(!matches!(next, Next::Begin(Author::Revert, _)));
    }

    #[test]
    fn the_pause_doubles_with_each_failure_up_to_an_hour() {
        let mut cycle = acting();
        let mut after = |failures| {
            cycle.restore(seconds(5), DurableState { failures, ..DurableState::default() }, false);
            match cycle.pause_reason(seconds(5)) {
                Some(PauseReason::Failed { left, .. }) => Some(left.as_secs()),
                _ => None,
            }
        };
        assert_eq!(
            [after(2), after(3), after(4), after(9), after(100), after(0)],
            [None, Some(60), Some(120), Some(3600), Some(3600), None]
        );
    }

    #[test]
    fn budgets_return_after_a_minute_and_an_hour() {
        let mut cycle = acting();
        cycle.tune(&PlannerConfig { keys_per_minute: 1, bytes_per_hour: 100, ..cycle.config().clone() });
        let (_, Next::Begin(_, plan)) = step(&mut cycle, seconds(1), &problem([1100.0, 300.0], 0, Knobs::default()))
        else {
            panic!("nothing was started")
        };
        begin(&mut cycle, seconds(1), 1, Author::Planner, plan);
        let mut left = |after: u64| {
            cycle.forget(seconds(1 + after));
            let knobs = cycle.knobs(seconds(1 + after));
            (knobs.keys_max, knobs.bytes_max)
        };
        assert_eq!([left(59), left(61), left(3601)], [(0, 0), (1, 0), (1, 100)]);
    }

    #[test]
    fn refusals_pause_a_node_for_twice_as_long_each_time() {
        let mut cycle = acting();
        let rests =
            |cycle: &Cycle, at: u64| cycle.refused.get(&NodeId(1)).is_some_and(|(until, _)| seconds(at) < *until);
        cycle.refused(seconds(0), [NodeId(1)]);
        assert!(rests(&cycle, 9) && !rests(&cycle, 10));
        cycle.refused(seconds(0), [NodeId(1)]);
        assert!(rests(&cycle, 19) && !rests(&cycle, 20));
        assert!(cycle.keys.is_empty() && cycle.spent.is_empty(), "a refused move has no cooldown");
    }
}
