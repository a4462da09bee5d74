//! The autoscaler: decides the number of nodes of a fleet, one node at a time.
//!
//! [`decide`] takes observations, parameters, and its own [`State`], and returns a [`Decision`] with reasons. A policy
//! only judges whether the fleet is overloaded or underused: [`threshold`], [`static_metric`], and [`model`]. The
//! policies `learned` and `predictive` look ahead: their judgement is the [`Advice`] of an [`Advisor`], which has the
//! history of the fleet. Common to all policies:
//!
//! - **Bounds.** Never below `nodes_min` or the [`schedule`], never above `nodes_max`.
//! - **Delay.** A judgement must last, and each change is followed by a cooldown.
//! - **One change.** Each decision has the number of the change that it would start. [`State::bind`] accepts a number
//!   once, so any number of concurrent triggers adds one node (the single-instance binding of Rodriguez and Buyya
//!   2018).
//! - **Memory.** A node is removed only if the others have memory for its data.
//!
//! Measures are fleet-wide. A single overloaded node is the planner's task: an additional node would not help it.
//!
//! Not a set-point controller: nodes are few and indivisible, a change takes seconds to minutes, and operators must be
//! able to follow each decision.

mod advice;
mod clock;
mod forecast;
mod history;
mod injected;
mod learned;
mod model;
mod predictive;
mod schedule;
mod static_metric;
mod threshold;

use serde::{Deserialize, Serialize};

use crate::topology::NodeId;

pub use advice::{Advice, Advisor, Outlook, Progress, Step};
pub use clock::{Clock, Now};
pub use history::HISTORY_DAYS;
pub use injected::Bug;
use injected::InjectedBug;
pub use schedule::Schedule;

/// Milliseconds: a duration, or a time on one of the two clocks of [`Now`].
pub type Millis = u64;

/// Judges the load of the fleet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// Mean response time, CPU, or memory above a limit.
    #[default]
    Threshold,
    /// The limits of `threshold` without a delay, bounded only by the provisioning interval and the down epoch
    /// (Rodriguez and Buyya 2018).
    Static,
    /// Number of nodes derived from the measured capacity of one node.
    Model,
    /// Number of nodes for the next start-up time, predicted by a decision tree that is trained on the history.
    Learned,
    /// Sequence of changes of minimum cost for a forecast with daily and weekly seasons (P-Store, SIGMOD 2018).
    Predictive,
}

/// Parameters of the autoscaler.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Knobs {
    /// Load policy.
    pub policy: Policy,
    /// Minimum number of nodes.
    pub nodes_min: usize,
    /// Maximum number of nodes.
    pub nodes_max: usize,
    /// Duration of overload before a node is added, in milliseconds. Ignored by `static`.
    pub up_after: Millis,
    /// Duration of underuse before a node is removed, in milliseconds. Ignored by `static`.
    pub down_after: Millis,
    /// Cooldown between a change and the next addition, in milliseconds: the provisioning interval.
    pub up_cooldown: Millis,
    /// Cooldown between a change and the next removal, in milliseconds: the down epoch.
    pub down_cooldown: Millis,
    /// Limit of the mean response time, in microseconds.
    pub response_us: f64,
    /// Limit of the mean CPU use per server: 1.0 is one core.
    pub cpu: f64,
    /// Limit of the used memory, as a fraction of the servers' limits.
    pub memory: f64,
    /// A node is removed only if every measure would then be below this fraction of its limit.
    pub calm: f64,
    /// Requests per second that one node can serve with acceptable latency. For `model`, `learned` and `predictive`; the
    /// last two estimate it without this.
    pub capacity: Option<f64>,
    /// Fraction of the capacity to keep free.
    pub headroom: f64,
    /// Minimum number of nodes by weekday and time.
    pub schedule: Schedule,
}

impl Default for Knobs {
    fn default() -> Self {
        Self {
            policy: Policy::Threshold,
            nodes_min: 1,
            nodes_max: 8,
            up_after: 10_000,
            down_after: 300_000,
            up_cooldown: 30_000,
            down_cooldown: 300_000,
            response_us: 5_000.0,
            cpu: 0.8,
            memory: 0.8,
            calm: 0.5,
            capacity: None,
            headroom: 0.2,
            schedule: Schedule::default(),
        }
    }
}

/// Observation of a node. `None`: unknown.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// Node id.
    pub id: NodeId,
    /// Requests per second.
    pub requests: Option<f64>,
    /// Mean response time in microseconds. `None` also without replies.
    pub mean_us: Option<f64>,
    /// CPU use of the server, in cores.
    pub cpu: Option<f64>,
    /// Used bytes and memory limit (0: no limit).
    pub memory: Option<(u64, u64)>,
    /// Whether the node is usable.
    pub is_up: bool,
    /// Whether a provisioner started the node and can stop it.
    pub may_go: bool,
}

/// Observation of the fleet.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Observed {
    /// Time of the observation.
    pub now: Now,
    /// All nodes.
    pub nodes: Vec<Node>,
}

impl Observed {
    fn requests(&self) -> Option<f64> {
        self.nodes.iter().map(|node| node.requests).sum()
    }

    /// Mean response time over all replies; 0 without replies.
    fn mean_us(&self) -> Option<f64> {
        let requests = self.requests()?;
        let time: f64 = self.nodes.iter().filter_map(|node| Some(node.mean_us? * node.requests?)).sum();
        Some(if requests > 0.0 { time / requests } else { 0.0 })
    }

    /// CPU use of all servers, in cores.
    fn cpu(&self) -> Option<f64> {
        self.nodes.iter().map(|node| node.cpu).sum()
    }

    /// Used bytes and memory limit of all servers; `None` if unknown for one, or without limit.
    fn memory(&self) -> Option<(u64, u64)> {
        let all: Option<Vec<(u64, u64)>> =
            self.nodes.iter().map(|node| node.memory.filter(|(_, most)| *most > 0)).collect();
        let all = all.filter(|all| !all.is_empty())?;
        Some(all.into_iter().fold((0, 0), |(used, most), node| (used + node.0, most + node.1)))
    }

    /// Whether the other nodes have memory for this node's data, with a tenth left.
    fn fits_without(&self, leaving: &Node) -> bool {
        let others: Vec<&Node> = self.nodes.iter().filter(|node| node.id != leaving.id).collect();
        let Some((used, _)) = leaving.memory else { return false };
        let more = used / others.len().max(1) as u64;
        !others.is_empty()
            && others.iter().all(|node| match node.memory {
                Some((_, 0)) => true,
                Some((used, most)) => used.saturating_add(more) <= most - most / 10,
                None => false,
            })
    }

    /// Returns the removable node with the fewest bytes to move.
    ///
    /// # Errors
    /// The reason why none can be removed now.
    pub fn cheapest(&self) -> Result<NodeId, Reason> {
        if let Some(down) = self.nodes.iter().find(|node| !node.is_up) {
            return Err(Reason::Down(down.id));
        }
        let bytes = |node: &&Node| (node.memory.map_or(u64::MAX, |(used, _)| used), std::cmp::Reverse(node.id));
        let mut may_go: Vec<&Node> = self.nodes.iter().filter(|node| node.may_go).collect();
        may_go.sort_by_key(bytes);
        let first = may_go.first().ok_or(Reason::NoneMayGo)?;
        may_go.iter().find(|node| self.fits_without(node)).map(|node| node.id).ok_or(Reason::NoMemory(first.id))
    }
}

/// Maximum pause after failures in milliseconds, unless the configured pause is longer.
const PAUSE_MAX: Millis = 3_600_000;

/// State of [`decide`]. Survives a restart.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Start of the current overload.
    above: Option<Millis>,
    /// Start of the current underuse.
    below: Option<Millis>,
    /// End of the last change.
    changed: Option<Millis>,
    /// Number of consecutive failed changes up to the last one.
    #[serde(default)]
    failures: u32,
    /// Number of the next change.
    next: u64,
    /// Number of the change in progress.
    under_way: Option<u64>,
    #[serde(skip)]
    planted: InjectedBug,
}

impl State {
    /// Creates a state with an injected bug.
    #[cfg(feature = "planted-bugs")]
    #[must_use]
    pub fn with_bug(bug: Option<Bug>) -> Self {
        Self { planted: InjectedBug::new(bug), ..Self::default() }
    }

    /// Starts the change with this number. Returns false, and changes nothing, if the number was used before or a
    /// change is in progress.
    #[must_use]
    pub fn bind(&mut self, key: u64) -> bool {
        if key != self.next || self.under_way.is_some() {
            return false;
        }
        self.under_way = Some(key);
        self.next += 1;
        true
    }

    /// Number of the next change.
    #[must_use]
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Records the end of the change in progress, successful or given up.
    pub fn ended(&mut self, now: Millis, has_failed: bool) {
        let (next, failures) = (self.next, if has_failed { self.failures.saturating_add(1) } else { 0 });
        *self = Self { changed: Some(now), failures, next, planted: self.planted, ..Self::default() };
    }

    /// Remaining pause before the next addition, if the last change failed.
    #[must_use]
    pub fn failed_pause(&self, now: Millis, knobs: &Knobs) -> Option<Millis> {
        let left = || Some(self.changed? + self.backed_off(knobs.up_cooldown)).and_then(|end| end.checked_sub(now));
        (self.failures > 0).then(left).flatten().filter(|left| *left > 0)
    }

    /// Cooldown after a change. Doubles with each further consecutive failure, up to an hour.
    fn backed_off(&self, pause: Millis) -> Millis {
        pause.saturating_mul(1 << self.failures.saturating_sub(1).min(16)).min(PAUSE_MAX.max(pause))
    }

    /// Takes over the state of an earlier run. `last`: the last recorded moment of that run. Afterwards all waits use
    /// times of the new run.
    pub fn resume(&mut self, last: Now, now: Now) {
        for since in [&mut self.above, &mut self.below, &mut self.changed].into_iter().flatten() {
            // If the wall clock went back between the runs, the wait starts again.
            *since = last.to_wall(*since).min(now.run);
        }
    }
}

/// Action of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SizeChange {
    /// No change.
    Stay,
    /// Add one node.
    Add,
    /// Remove this node.
    Remove(NodeId),
}

/// Result of [`decide`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// Action.
    pub what: SizeChange,
    /// Number of the change: the same for all decisions until it has started.
    pub key: u64,
    /// Reasons, most important first.
    pub reasons: Vec<Reason>,
}

impl Decision {
    /// Whether clients wait for the change because the fleet is overloaded. Moves must then not run at moderate speed,
    /// which yields to clients.
    #[must_use]
    pub fn is_urgent(&self) -> bool {
        let is_load = |reason: &Reason| {
            matches!(reason, Reason::Slow(..) | Reason::Busy(..) | Reason::Full(..) | Reason::Short(..))
        };
        self.what == SizeChange::Add && self.reasons.iter().any(is_load)
    }
}

/// Reason for a decision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// Mean response time, above its limit; both in microseconds.
    Slow(f64, f64),
    /// Mean CPU use per server, above its limit.
    Busy(f64, f64),
    /// Used memory as a fraction of the servers' limits, above its limit.
    Full(f64, f64),
    /// Requests per second, and the higher number of nodes that they need.
    Short(f64, usize),
    /// Without one node, every measure would be below this fraction of its limit.
    Calm(f64),
    /// Requests per second, and the lower number of nodes that they need.
    Ample(f64, usize),
    /// Neither overloaded nor underused.
    Fine,
    /// No measure is known yet.
    Unmeasured,
    /// The policy `model` has no capacity.
    NoCapacity,
    /// Minimum number of nodes, and whether the schedule determines it.
    Minimum(usize, bool),
    /// Maximum number of nodes.
    Maximum(usize),
    /// Duration of the judgement and its required duration, in milliseconds.
    Lasts(Millis, Millis),
    /// Remaining cooldown after the last change, in milliseconds.
    Pause(Millis),
    /// Number of the change in progress.
    UnderWay(u64),
    /// No node is removed while this node is unusable.
    Down(NodeId),
    /// The other nodes have too little or unknown memory for the data of this node.
    NoMemory(NodeId),
    /// No node was started by a provisioner.
    NoneMayGo,
    /// Expected load, by the forecast of `predictive`.
    Forecast(Outlook),
    /// Expected load, by the decision tree of `learned`.
    Learned(Outlook),
    /// Duration of the history and its required duration, in milliseconds. Until then `threshold` decides.
    NoHistory(Millis, Millis),
    /// The capacity of a node is neither configured nor measured, so `threshold` decides.
    UnknownCapacity,
    /// Fraction of the recent predictions that were high enough. It is too low, so `threshold` decides.
    Unreliable(f64),
}

/// Judgement of a policy, before the common rules.
#[derive(Clone, Debug, PartialEq)]
enum Judgement {
    TooMuch(Vec<Reason>),
    Fine(Vec<Reason>),
    TooLittle(Vec<Reason>),
}

/// Required duration of a judgement.
#[derive(Clone, Copy, Debug)]
struct Delays {
    up: Millis,
    down: Millis,
}

/// Returns the minimum number of nodes at this wall time, and whether the schedule determines it.
#[must_use]
pub fn minimum(knobs: &Knobs, wall: Millis) -> (usize, bool) {
    match knobs.schedule.minimum(wall).map(|least| least.min(knobs.nodes_max)) {
        Some(least) if least > knobs.nodes_min => (least, true),
        _ => (knobs.nodes_min.min(knobs.nodes_max), false),
    }
}

/// Decides the next action, and records the observation in `state`. Without a history, so `learned` and `predictive`
/// decide like `threshold`.
#[must_use]
pub fn decide(observed: &Observed, knobs: &Knobs, state: &mut State) -> Decision {
    decide_advised(observed, knobs, state, None)
}

/// Decides the next action like [`decide`], with the advice of [`Advisor::advise`] for this observation.
#[must_use]
pub fn decide_advised(observed: &Observed, knobs: &Knobs, state: &mut State, advice: Option<&Advice>) -> Decision {
    let (what, reasons) = judged(observed, knobs, state, advice);
    Decision { what, key: state.next, reasons }
}

fn judged(observed: &Observed, knobs: &Knobs, state: &mut State, advice: Option<&Advice>) -> (SizeChange, Vec<Reason>) {
    if let Some(key) = state.under_way {
        return (SizeChange::Stay, vec![Reason::UnderWay(key)]);
    }
    let (count, now) = (observed.nodes.len(), observed.now.run);
    let (least, scheduled) = minimum(knobs, observed.now.wall);
    if count < least {
        let reasons = vec![Reason::Minimum(least, scheduled)];
        // After a failure, a pause precedes the next request to the provisioner.
        return match (state.failures > 0).then(|| pause_left(state, now, knobs.up_cooldown)).flatten() {
            Some(why) => (SizeChange::Stay, with(reasons, why)),
            None => (SizeChange::Add, reasons),
        };
    }
    if count > knobs.nodes_max {
        let why = Reason::Maximum(knobs.nodes_max);
        return removal(observed, vec![why]);
    }
    let patient = Delays { up: knobs.up_after, down: knobs.down_after };
    let (judgement, timeout) = match knobs.policy {
        Policy::Threshold => (threshold::judge(observed, knobs), patient),
        Policy::Static => (static_metric::judge(observed, knobs), Delays { up: 0, down: 0 }),
        Policy::Model => (model::judge(observed, knobs), patient),
        Policy::Learned | Policy::Predictive => advice::judge(threshold::judge(observed, knobs), patient, advice),
    };
    match judgement {
        Judgement::Fine(reasons) => {
            (state.above, state.below) = (None, None);
            (SizeChange::Stay, reasons)
        }
        Judgement::TooMuch(reasons) => {
            state.below = None;
            let since = *state.above.get_or_insert(now);
            match delay_left(state, now, since, timeout.up, knobs.up_cooldown)
                .or((count >= knobs.nodes_max).then_some(Reason::Maximum(count)))
            {
                None => (SizeChange::Add, reasons),
                Some(why) => (SizeChange::Stay, with(reasons, why)),
            }
        }
        Judgement::TooLittle(reasons) => {
            state.above = None;
            let since = *state.below.get_or_insert(now);
            if count <= least {
                return (SizeChange::Stay, with(reasons, Reason::Minimum(least, scheduled)));
            }
            match delay_left(state, now, since, timeout.down, knobs.down_cooldown) {
                None => removal(observed, reasons),
                Some(why) => (SizeChange::Stay, with(reasons, why)),
            }
        }
    }
}

fn with(mut reasons: Vec<Reason>, why: Reason) -> Vec<Reason> {
    reasons.push(why);
    reasons
}

fn removal(observed: &Observed, reasons: Vec<Reason>) -> (SizeChange, Vec<Reason>) {
    match observed.cheapest() {
        Ok(node) => (SizeChange::Remove(node), reasons),
        Err(why) => (SizeChange::Stay, with(reasons, why)),
    }
}

/// Returns the delay or cooldown that has not passed yet.
fn delay_left(state: &State, now: Millis, since: Millis, timeout: Millis, pause: Millis) -> Option<Reason> {
    let lasted = now.saturating_sub(since);
    if lasted < timeout && !state.planted.is(Bug::DelayForgotten) {
        return Some(Reason::Lasts(lasted, timeout));
    }
    pause_left(state, now, pause)
}

/// The remaining cooldown after the last change.
fn pause_left(state: &State, now: Millis, pause: Millis) -> Option<Reason> {
    let (passed, pause) = (now.saturating_sub(state.changed?), state.backed_off(pause));
    (passed < pause).then(|| Reason::Pause(pause - passed))
}
