//! Watches the load, decides by [`switchyard_policy::planner`], has moves begun, and looks at what came of them.
//!
//! It has the memory that the policy has not: the looks of the window, the latest moves, the budget spent, and the decisions with their numbers.
//! It begins nothing itself: [`crate::operator`] makes the orders, with the same checks as for people.
//!
//! One decision at a time is carried out. When its moves have ended and a window has passed, the load is compared with what was predicted. A decision that did not help is taken
//! back, and after three in a row nothing more is done until somebody says so.

mod history;
mod problem;
mod thread;
mod words;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use switchyard_policy::load::ObservedLoad;
use switchyard_policy::planner::{Knobs, Name, Outlook, Plan, Policy, Previous, Price, Problem, Step, Verdict, What, fullest, solve};
use switchyard_policy::topology::{MoveId, NodeId, Slot, Topology};

use crate::store::{RedbStore, StoreError};

pub(crate) use history::{Decision, History};
pub(crate) use problem::{Around, KEYS, names};
use problem::{Seen, load_of};
pub use thread::PlannerThread;
pub(crate) use words::Words;

/// Moved keys and slots stay for so long.
const KEY_RESTS: Duration = Duration::from_secs(60);
const SLOT_RESTS: Duration = Duration::from_secs(300);

/// A key that the planner has moved goes home when it has not been used to speak of for so long.
const COLD_AFTER: Duration = Duration::from_secs(60);

/// Keys go home together, so often at most.
const HOMECOMINGS: Duration = Duration::from_secs(60);

/// A key is cold with less than such a part of the mean load of a node.
const COLD: f64 = 0.005;

/// The author of a decision that takes back another one.
const TAKES_BACK: &str = "planner: takes back";

/// So many decisions in a row that did not help, and it rests.
const FAILURES_MAX: u32 = 3;

/// The same decision is noted so often at most, while nothing is begun.
const NOTED_EVERY: Duration = Duration::from_secs(60);

/// Whether it decides, and acts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// It looks at nothing.
    Off,
    /// It decides, and says what it would do.
    #[default]
    Observe,
    /// It acts.
    On,
}

impl Mode {
    /// All, with their names in the configuration.
    pub const ALL: [(Self, &'static str); 3] = [(Self::Off, "off"), (Self::Observe, "observe"), (Self::On, "on")];
}

/// All policies, with their names in the configuration.
pub const POLICIES: [(Policy, &str); 4] = [
    (Policy::Switchyard, "switchyard"),
    (Policy::MakrisPrinted, "makris-printed"),
    (Policy::MakrisFfd, "makris-ffd"),
    (Policy::MakrisSafe, "makris-safe"),
];

/// Settings of the planner.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannerConfig {
    /// Whether it acts.
    pub mode: Mode,
    /// By which policy.
    pub policy: Policy,
    /// The time between two looks.
    pub interval: Duration,
    /// A node has to be over its limit for so long.
    pub window: Duration,
    /// Percent of a limit that are kept free.
    pub headroom: usize,
    /// A node with fewer requests in a second is never relieved.
    pub least: usize,
    /// Keys that may be moved in a minute.
    pub keys_per_minute: usize,
    /// Bytes that may be moved in an hour.
    pub bytes_per_hour: usize,
}

impl Default for PlannerConfig {
    fn default() -> Self {
        Self {
            mode: Mode::Observe,
            policy: Policy::Switchyard,
            interval: Duration::from_secs(1),
            window: Duration::from_secs(3),
            headroom: 10,
            least: 500,
            keys_per_minute: 600,
            bytes_per_hour: 10 << 30,
        }
    }
}

/// State that outlasts a restart, beside the decisions.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Kept {
    /// Somebody has switched all automation off.
    is_off: bool,
    /// Keys that the planner has moved away from their slots. Others were moved by people, and stay.
    relocated: BTreeSet<Name>,
}

const KEPT: &str = "planner";

/// A decision that is being carried out.
#[derive(Clone, Debug)]
enum AtWork {
    /// These moves are not over.
    Moves { decision: u64, moves: Vec<MoveId>, steps: Vec<Step>, before: f64 },
    /// They are: the load settles until then.
    Settles { decision: u64, until: Instant, steps: Vec<Step>, before: f64 },
}

#[derive(Debug, Default)]
struct Inner {
    config: PlannerConfig,
    kept: Kept,
    history: History,
    seen: VecDeque<Seen>,
    keys: BTreeMap<Name, Instant>,
    slots: BTreeMap<Slot, Instant>,
    over: Vec<NodeId>,
    /// Relocated keys that are little used, and since when.
    cold: BTreeMap<Name, Instant>,
    homecoming_at: Option<Instant>,
    spent: VecDeque<(Instant, usize, u64)>,
    at_work: Option<AtWork>,
    failures: u32,
    /// It met an error of its own.
    is_broken: bool,
    noted: Option<(Instant, Vec<(NodeId, NodeId)>)>,
}

/// The next thing to do.
#[derive(Debug)]
pub(crate) enum Next {
    /// Nothing.
    Rest,
    /// Begin these moves, and say which they are.
    Begin(u64, Plan),
}

/// The planner of a fleet.
#[derive(Debug)]
pub(crate) struct Planner {
    store: Arc<RedbStore>,
    inner: Mutex<Inner>,
}

impl Planner {
    /// With what is on record.
    pub(crate) fn open(store: Arc<RedbStore>) -> Result<Self, StoreError> {
        let (kept, history) = (crate::store::load_as(&*store, KEPT)?, History::load(&store)?);
        Ok(Self { store, inner: Mutex::new(Inner { kept, history, ..Inner::default() }) })
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

    /// Why it does not act, where its mode says that it should; its mode.
    pub(crate) fn rests(&self) -> (Mode, Option<String>) {
        let inner = self.inner();
        (inner.config.mode, inner.rests())
    }

    /// It met an error of its own, and decides no more.
    pub(crate) fn has_failed(&self) {
        self.inner().is_broken = true;
    }

    /// Whether somebody has switched all automation off.
    pub(crate) fn is_off(&self) -> bool {
        self.inner().kept.is_off
    }

    /// Automation is switched on or off, for good.
    pub(crate) fn switch(&self, is_off: bool) -> Result<(), String> {
        let mut inner = self.inner();
        inner.failures = 0;
        let kept = Kept { is_off, ..inner.kept.clone() };
        self.keep(&mut inner, kept)
    }

    fn keep(&self, inner: &mut Inner, kept: Kept) -> Result<(), String> {
        crate::store::save_as(&*self.store, KEPT, &kept).map_err(|error| format!("the planner cannot keep what it did: {error}"))?;
        inner.kept = kept;
        Ok(())
    }

    /// The load was measured.
    pub(crate) fn note(&self, now: Instant, topology: &Topology, load: &ObservedLoad) {
        let mut inner = self.inner();
        let nodes: BTreeMap<NodeId, f64> = topology.nodes().map(|node| (node.id, load_of(load, node.id))).collect();
        let mean = nodes.values().sum::<f64>() / nodes.len().max(1) as f64;
        inner.seen.push_back(Seen { at: now, nodes });
        let window = inner.config.window;
        // One more than the window has, so that there is a whole one.
        while inner.seen.get(1).is_some_and(|seen| now.saturating_duration_since(seen.at) >= window) {
            inner.seen.pop_front();
        }
        let used: BTreeMap<&[u8], f64> =
            load.keys.iter().flat_map(|node| &node.keys).filter_map(|hot| Some((hot.name.key()?, hot.rates.commands()))).fold(
                BTreeMap::new(),
                |mut used, (key, rate)| {
                    *used.entry(key).or_default() += rate;
                    used
                },
            );
        let is_cold = |key: &Name| used.get(&**key).is_none_or(|rate| *rate < mean * COLD);
        let Inner { kept, cold, .. } = &mut *inner;
        cold.retain(|key, _| kept.relocated.contains(key) && is_cold(key));
        for key in kept.relocated.iter().filter(|key| is_cold(key)) {
            cold.entry(key.clone()).or_insert(now);
        }
    }

    /// The problem to decide, with the latest moves.
    pub(crate) fn problem(&self, now: Instant, topology: &Topology, load: &ObservedLoad, around: &Around) -> (Problem, Previous) {
        let mut inner = self.inner();
        inner.forget(now);
        let knobs = inner.knobs();
        let cold = inner.cold_now(now);
        let problem = problem::problem(topology, load, &inner.seen, inner.config.window, around, &cold, knobs);
        let previous =
            Previous { keys: inner.keys.keys().cloned().collect(), slots: inner.slots.keys().copied().collect(), over: inner.over.clone() };
        (problem, previous)
    }

    /// Looks at how it stands: what to do next by itself. `is_open`: a move is not over.
    pub(crate) fn step(&self, now: Instant, problem: Problem, previous: Previous, is_open: impl Fn(MoveId) -> bool) -> Next {
        let mut inner = self.inner();
        if let Some(take_back) = self.look_back(&mut inner, now, &problem, is_open) {
            return take_back;
        }
        if inner.at_work.is_some() || inner.config.mode == Mode::Off {
            return Next::Rest;
        }
        let plan = solve(&problem, &previous);
        inner.over = match plan.verdict {
            Verdict::Fine => Vec::new(),
            _ => plan.nodes.iter().filter(|node| node.before > node.limit).map(|node| node.node).collect(),
        };
        if plan.steps.is_empty() && plan.verdict == Verdict::Fine {
            inner.noted = None;
            return Next::Rest;
        }
        let acts = inner.config.mode == Mode::On && inner.rests().is_none() && !plan.steps.is_empty();
        let ways: Vec<(NodeId, NodeId)> = plan.steps.iter().map(|step| (step.from, step.to)).collect::<BTreeSet<_>>().into_iter().collect();
        let is_news = inner.noted.as_ref().is_none_or(|(at, known)| now.saturating_duration_since(*at) >= NOTED_EVERY && *known != ways);
        if !acts && !is_news {
            return Next::Rest;
        }
        inner.noted = Some((now, ways));
        let id = self.record(&mut inner, Decision::of("planner", problem, previous, plan.clone()));
        if acts { Next::Begin(id, plan) } else { Next::Rest }
    }

    /// Moves that are over are compared with what was predicted.
    fn look_back(&self, inner: &mut Inner, now: Instant, problem: &Problem, is_open: impl Fn(MoveId) -> bool) -> Option<Next> {
        if matches!(&inner.at_work, Some(AtWork::Settles { until, .. }) if now < *until) {
            return None;
        }
        match inner.at_work.take()? {
            AtWork::Moves { decision, moves, steps, before } => {
                let is_over = !moves.iter().any(|id| is_open(*id));
                let until = now + inner.config.window + inner.config.interval;
                inner.at_work = Some(match is_over {
                    true => AtWork::Settles { decision, until, steps, before },
                    false => AtWork::Moves { decision, moves, steps, before },
                });
                None
            }
            AtWork::Settles { decision, steps, before, .. } => {
                let after = fullest(problem);
                let (predicted, seen) = moved_load(problem, &steps);
                let words = format!("the fullest node went from {:.0} to {:.0} % of its limit", before * 100.0, after * 100.0);
                // The opposite of what was taken back has just been tried.
                let is_taken_back = inner.history.is_by(decision, TAKES_BACK);
                let judged = match () {
                    () if is_taken_back => Ok(words),
                    () if after < before * 0.98 || after <= 1.0 => Ok(words),
                    () if seen < predicted / 2.0 => Ok(format!("{words}; the load that was moved is gone")),
                    () => Err(words),
                };
                let (outcome, helped) = match judged {
                    Ok(words) => (words, true),
                    Err(words) => (format!("{words}: it did not help, and is taken back"), false),
                };
                inner.history.ended(&self.store, decision, outcome);
                if helped {
                    inner.failures = if is_taken_back { inner.failures } else { 0 };
                    return None;
                }
                inner.failures += 1;
                let reversed: Vec<Step> = steps.into_iter().map(|step| Step { from: step.to, to: step.from, ..step }).collect();
                let previous = Previous::default();
                let plan = taken_back(problem, reversed);
                let id = self.record(inner, Decision::of(TAKES_BACK, problem.clone(), previous, plan.clone()));
                Some(Next::Begin(id, plan))
            }
        }
    }

    fn record(&self, inner: &mut Inner, decision: Decision) -> u64 {
        inner.history.add(&self.store, decision)
    }

    /// Somebody asks for a plan to be carried out: its number.
    pub(crate) fn asked(&self, by: &str, problem: Problem, previous: Previous, plan: Plan) -> u64 {
        self.record(&mut self.inner(), Decision::of(by, problem, previous, plan))
    }

    /// Its moves were begun, or refused.
    pub(crate) fn begun(&self, now: Instant, decision: u64, plan: &Plan, problem_fullest: f64, moves: Result<Vec<MoveId>, String>) {
        let mut inner = self.inner();
        for step in &plan.steps {
            match &step.what {
                What::Key { key, .. } => inner.keys.extend([(key.clone(), now)]),
                What::Slots(slots) => inner.slots.extend(slots.iter().map(|slot| (*slot, now))),
            }
        }
        match moves {
            Ok(moves) => {
                let mut kept = inner.kept.clone();
                let mut keys = 0;
                for step in &plan.steps {
                    if let What::Key { key, is_cold, .. } = &step.what {
                        keys += 1;
                        match is_cold {
                            true => kept.relocated.remove(key),
                            false => kept.relocated.insert(key.clone()),
                        };
                    }
                }
                if plan.steps.iter().any(|step| matches!(step.what, What::Key { is_cold: true, .. })) {
                    inner.homecoming_at = Some(now);
                }
                if let Err(why) = self.keep(&mut inner, kept) {
                    tracing::warn!("{why}");
                }
                inner.spent.push_back((now, keys, plan.price.bytes));
                inner.history.begun(&self.store, decision, moves.iter().map(|id| id.0).collect());
                // A homecoming relieves nobody, so there is nothing to look back at.
                if plan.verdict != Verdict::Fine {
                    inner.at_work = Some(AtWork::Moves { decision, moves, steps: plan.steps.clone(), before: problem_fullest });
                }
            }
            Err(why) => inner.history.ended(&self.store, decision, format!("refused: {why}")),
        }
    }

    /// Keys that live away from their slots no more.
    pub(crate) fn keep_relocated(&self, is_away: impl Fn(&[u8]) -> bool) {
        let mut inner = self.inner();
        if inner.at_work.is_none() && inner.kept.relocated.iter().any(|key| !is_away(key)) {
            let relocated = inner.kept.relocated.iter().filter(|key| is_away(key)).cloned().collect();
            let kept = Kept { relocated, ..inner.kept.clone() };
            if let Err(why) = self.keep(&mut inner, kept) {
                tracing::warn!("{why}");
            }
        }
    }

    /// Decisions, the newest first.
    pub(crate) fn decisions(&self) -> Vec<(u64, Decision)> {
        self.inner().history.newest_first()
    }
}

impl Inner {
    fn rests(&self) -> Option<String> {
        match () {
            () if self.is_broken => Some("it met an error of its own (see the log), and rests until the router is started anew".to_owned()),
            () if self.kept.is_off => Some("automation is switched off (`switchyard automation on`)".to_owned()),
            () if self.failures >= FAILURES_MAX => Some(format!(
                "{FAILURES_MAX} decisions in a row did not help: look at `switchyard plan history`, then `switchyard automation on`"
            )),
            () => None,
        }
    }

    fn forget(&mut self, now: Instant) {
        self.keys.retain(|_, at| now.saturating_duration_since(*at) < KEY_RESTS);
        self.slots.retain(|_, at| now.saturating_duration_since(*at) < SLOT_RESTS);
        self.spent.retain(|(at, ..)| now.saturating_duration_since(*at) < Duration::from_secs(3600));
    }

    /// The knobs, with the rest of the budget.
    fn knobs(&self) -> Knobs {
        let last = self.spent.back().map(|(at, ..)| *at);
        let minute = self.spent.iter().filter(|(at, ..)| last.is_some_and(|last| last.saturating_duration_since(*at).as_secs() < 60));
        let keys: usize = minute.map(|(_, keys, _)| keys).sum();
        let bytes: u64 = self.spent.iter().map(|(.., bytes)| bytes).sum();
        Knobs {
            policy: self.config.policy,
            headroom: self.config.headroom as f64 / 100.0,
            least: self.config.least as f64,
            keys_max: self.config.keys_per_minute.saturating_sub(keys),
            bytes_max: (self.config.bytes_per_hour as u64).saturating_sub(bytes),
        }
    }

    fn cold_now(&self, now: Instant) -> BTreeSet<Name> {
        if self.homecoming_at.is_some_and(|at| now.saturating_duration_since(at) < HOMECOMINGS) {
            return BTreeSet::new();
        }
        let is_due = |since: &Instant| now.saturating_duration_since(*since) >= COLD_AFTER;
        self.cold.iter().filter(|(_, since)| is_due(since)).map(|(key, _)| key.clone()).take(self.config.keys_per_minute).collect()
    }
}

/// A plan of these steps, whatever else would be better.
fn taken_back(problem: &Problem, steps: Vec<Step>) -> Plan {
    let price = steps.iter().fold(Price::default(), |price, step| {
        let (keys, slots) = match &step.what {
            What::Key { .. } => (1, 0),
            What::Slots(slots) => (0, slots.len()),
        };
        let bytes = price.bytes + step.bytes;
        Price { bytes, keys: price.keys + keys, slots: price.slots + slots, total: bytes as f64 }
    });
    let shift = |id: NodeId| -> f64 {
        let of = |step: &Step| {
            if step.to == id {
                step.load
            } else if step.from == id {
                -step.load
            } else {
                0.0
            }
        };
        steps.iter().map(of).sum()
    };
    let solved = solve(problem, &Previous::default());
    let nodes = solved.nodes.iter().map(|node| Outlook { after: (node.before + shift(node.node)).max(0.0), ..*node }).collect();
    Plan { verdict: Verdict::Partly, nodes, steps, price, alternatives: Vec::new(), advice: solved.advice }
}

/// Requests in a second that were to go with these steps, and those that are there now.
fn moved_load(problem: &Problem, steps: &[Step]) -> (f64, f64) {
    let predicted = steps.iter().map(|step| step.load).sum();
    let of_key = |key: &Name| problem.keys.iter().filter(|known| known.key == *key).map(|known| known.reads + known.writes).sum::<f64>();
    // Slots of a node that is not full any more are not in the problem: they count as they were.
    let seen = steps.iter().map(|step| match &step.what {
        What::Key { key, .. } => of_key(key),
        What::Slots(_) => step.load,
    });
    (predicted, seen.sum())
}
