//! The autoscaler: decides how many nodes a fleet should have, one node at a time.
//!
//! [`decide`] takes what was observed, the knobs and its own [`State`], and gives a [`Decision`] with its reasons. A
//! policy only judges whether the fleet has too much or too little to do: [`threshold`], [`static_metric`] and
//! [`model`], one file each. All else holds for each of them, so it is here:
//!
//! - **Bounds.** Never below `nodes_min` or the [`schedule`], never above `nodes_max`.
//! - **Patience.** A judgement must last, and a change is followed by a pause.
//! - **One change.** Each decision has the number of the change that it would begin. [`State::bind`] accepts a number
//!   once, so any number of triggers at once adds one node (the single-instance binding of Rodriguez and Buyya 2018).
//! - **Memory.** A node goes only if the others have memory for its data.
//!
//! Measures are those of the whole fleet. A single node with too much to do is the planner's task: another node would
//! not help it.
//!
//! Not a controller that aims at a set point: nodes are few and whole, a change takes seconds to minutes, and people
//! must be able to follow each decision.

mod clock;
mod model;
mod schedule;
mod static_metric;
mod threshold;

use serde::{Deserialize, Serialize};

use crate::topology::NodeId;

pub use clock::{Clock, Now};
pub use schedule::Schedule;

/// Milliseconds: a duration, or a time of one of the two clocks of [`Now`].
pub type Millis = u64;

/// The rule that judges the load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// Mean response time, CPU or memory above a limit.
    #[default]
    Threshold,
    /// The same limits without a window; only the provisioning interval and the down epoch bound it (Rodriguez and
    /// Buyya 2018).
    Static,
    /// So many nodes as the measured capacity of one says.
    Model,
}

/// How to decide.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Knobs {
    /// The rule.
    pub policy: Policy,
    /// Never fewer nodes.
    pub nodes_min: usize,
    /// Never more nodes.
    pub nodes_max: usize,
    /// Too much to do must last so long, milliseconds. `static` does not wait.
    pub up_after: Millis,
    /// Too little to do must last so long, milliseconds. `static` does not wait.
    pub down_after: Millis,
    /// Pause between a change and the next addition: the provisioning interval.
    pub up_pause: Millis,
    /// Pause between a change and the next removal: the down epoch.
    pub down_pause: Millis,
    /// Limit of the mean response time, microseconds.
    pub response_us: f64,
    /// Limit of the mean use of a processor by a server: 1.0 is one processor.
    pub cpu: f64,
    /// Limit of memory in use, as a part of what the servers may use.
    pub memory: f64,
    /// A node goes only if without it every measure is below this part of its limit.
    pub calm: f64,
    /// Requests in a second that one node answers in time. For `model`.
    pub capacity: Option<f64>,
    /// Part of the capacity that is kept free.
    pub headroom: f64,
    /// The least number of nodes by weekday and time.
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
            up_pause: 30_000,
            down_pause: 300_000,
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

/// A node as it was observed. `None`: not known.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// Its number.
    pub id: NodeId,
    /// Requests in a second.
    pub requests: Option<f64>,
    /// Mean response time, microseconds. `None` also where nothing was answered.
    pub mean_us: Option<f64>,
    /// Processors that its server keeps busy.
    pub cpu: Option<f64>,
    /// Bytes that its server uses, and may use (0: no limit).
    pub memory: Option<(u64, u64)>,
    /// It can be used.
    pub is_up: bool,
    /// A provisioner has started it, and can stop it.
    pub may_go: bool,
}

/// The fleet as it was observed.
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

    /// Mean response time over all answers; 0 where there were none.
    fn mean_us(&self) -> Option<f64> {
        let requests = self.requests()?;
        let time: f64 = self.nodes.iter().filter_map(|node| Some(node.mean_us? * node.requests?)).sum();
        Some(if requests > 0.0 { time / requests } else { 0.0 })
    }

    /// Processors in use, all servers together.
    fn cpu(&self) -> Option<f64> {
        self.nodes.iter().map(|node| node.cpu).sum()
    }

    /// Bytes in use and allowed, all servers together; none where one is not known or has no limit.
    fn memory(&self) -> Option<(u64, u64)> {
        let all: Option<Vec<(u64, u64)>> =
            self.nodes.iter().map(|node| node.memory.filter(|(_, most)| *most > 0)).collect();
        let all = all.filter(|all| !all.is_empty())?;
        Some(all.into_iter().fold((0, 0), |(used, most), node| (used + node.0, most + node.1)))
    }

    /// Whether the others have memory for what this node has, with a tenth left.
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

    /// The node whose removal costs least: of those that may go, the one with the fewest bytes to move.
    ///
    /// # Errors
    /// The reason why none can go now.
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

/// The longest pause after failures, milliseconds, if the configuration has no longer one.
const PAUSE_MAX: Millis = 3_600_000;

/// The memory of [`decide`] between two looks. Kept over a restart.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Since when the fleet has had too much to do.
    above: Option<Millis>,
    /// Since when it has had too little.
    below: Option<Millis>,
    /// The end of the latest change.
    changed: Option<Millis>,
    /// The number of latest changes in a row that were given up.
    #[serde(default)]
    failures: u32,
    /// The number of the next change.
    next: u64,
    /// The change that is under way.
    under_way: Option<u64>,
}

impl State {
    /// Begins the change of this number. False: it has begun before, or another one is under way, and nothing is to be
    /// done.
    #[must_use]
    pub fn bind(&mut self, key: u64) -> bool {
        if key != self.next || self.under_way.is_some() {
            return false;
        }
        self.under_way = Some(key);
        self.next += 1;
        true
    }

    /// The number that the next change has.
    #[must_use]
    pub fn next(&self) -> u64 {
        self.next
    }

    /// The change that is under way has ended: well, or it was given up.
    pub fn ended(&mut self, now: Millis, has_failed: bool) {
        let (next, failures) = (self.next, if has_failed { self.failures.saturating_add(1) } else { 0 });
        *self = Self { changed: Some(now), failures, next, ..Self::default() };
    }

    /// The rest of the pause before the next node is added, if the latest change was given up.
    #[must_use]
    pub fn failed_pause(&self, now: Millis, knobs: &Knobs) -> Option<Millis> {
        let left = || Some(self.changed? + self.grown(knobs.up_pause)).and_then(|end| end.checked_sub(now));
        (self.failures > 0).then(left).flatten().filter(|left| *left > 0)
    }

    /// A pause after a change. It doubles with each further failure in a row, up to an hour.
    fn grown(&self, pause: Millis) -> Millis {
        pause.saturating_mul(1 << self.failures.saturating_sub(1).min(16)).min(PAUSE_MAX.max(pause))
    }

    /// Takes over a state of an earlier run. `last`: the last recorded moment of that run. Afterwards all waits count
    /// from times of the new run.
    pub fn resume(&mut self, last: Now, now: Now) {
        for since in [&mut self.above, &mut self.below, &mut self.changed].into_iter().flatten() {
            // A wall clock that went back between the runs starts the wait again.
            *since = last.to_wall(*since).min(now.run);
        }
    }
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum What {
    /// Nothing.
    Stay,
    /// Add one node.
    Add,
    /// Remove this node.
    Remove(NodeId),
}

/// A decision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// What to do.
    pub what: What,
    /// The number of the change that it begins: the same one for all decisions until it has begun.
    pub key: u64,
    /// Why, the most important reason first.
    pub reasons: Vec<Reason>,
}

impl Decision {
    /// Clients wait for it: the fleet has too much to do. A moderate speed would be the wrong one for moves then, as it
    /// makes way for clients.
    #[must_use]
    pub fn is_urgent(&self) -> bool {
        let is_load = |reason: &Reason| {
            matches!(reason, Reason::Slow(..) | Reason::Busy(..) | Reason::Full(..) | Reason::Short(..))
        };
        self.what == What::Add && self.reasons.iter().any(is_load)
    }
}

/// Why something is done, or not.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// The mean response time is above its limit: microseconds both.
    Slow(f64, f64),
    /// The servers' mean use of a processor is above its limit.
    Busy(f64, f64),
    /// Memory in use, as a part of what may be used, is above its limit.
    Full(f64, f64),
    /// So many requests in a second need more nodes: the requests, and the nodes.
    Short(f64, usize),
    /// Without one node every measure would be below this part of its limit.
    Calm(f64),
    /// So many requests in a second need fewer nodes: the requests, and the nodes.
    Ample(f64, usize),
    /// Neither too much to do nor too little.
    Fine,
    /// No measure is known yet.
    Unmeasured,
    /// The policy `model` has no capacity.
    NoCapacity,
    /// The fleet must have so many nodes, by the schedule or by the bound.
    Minimum(usize, bool),
    /// The fleet may not have more.
    Maximum(usize),
    /// It has lasted for the first time, and must last for the second: milliseconds.
    Lasts(Millis, Millis),
    /// The latest change was not long ago: milliseconds that are left of the pause.
    Pause(Millis),
    /// This change is under way.
    UnderWay(u64),
    /// No node leaves while this one cannot be used.
    Down(NodeId),
    /// The others have no memory for the data of this node, or their memory is not known.
    NoMemory(NodeId),
    /// No node was started by a provisioner.
    NoneMayGo,
}

/// The judgement of a policy, before the common rules.
#[derive(Clone, Debug, PartialEq)]
enum Judgement {
    TooMuch(Vec<Reason>),
    Fine(Vec<Reason>),
    TooLittle(Vec<Reason>),
}

/// The time that a judgement of a policy must last.
#[derive(Clone, Copy, Debug)]
struct Patience {
    up: Millis,
    down: Millis,
}

/// Returns the least number of nodes at this wall time, and whether the schedule determines it.
#[must_use]
pub fn minimum(knobs: &Knobs, wall: Millis) -> (usize, bool) {
    match knobs.schedule.minimum(wall).map(|least| least.min(knobs.nodes_max)) {
        Some(least) if least > knobs.nodes_min => (least, true),
        _ => (knobs.nodes_min.min(knobs.nodes_max), false),
    }
}

/// Decides what to do now, and remembers in `state` what it saw.
#[must_use]
pub fn decide(observed: &Observed, knobs: &Knobs, state: &mut State) -> Decision {
    let (what, reasons) = judged(observed, knobs, state);
    Decision { what, key: state.next, reasons }
}

fn judged(observed: &Observed, knobs: &Knobs, state: &mut State) -> (What, Vec<Reason>) {
    if let Some(key) = state.under_way {
        return (What::Stay, vec![Reason::UnderWay(key)]);
    }
    let (count, now) = (observed.nodes.len(), observed.now.run);
    let (least, scheduled) = minimum(knobs, observed.now.wall);
    if count < least {
        let reasons = vec![Reason::Minimum(least, scheduled)];
        // A provisioner that has just failed is not asked again at once.
        return match (state.failures > 0).then(|| pause_left(state, now, knobs.up_pause)).flatten() {
            Some(why) => (What::Stay, with(reasons, why)),
            None => (What::Add, reasons),
        };
    }
    if count > knobs.nodes_max {
        let why = Reason::Maximum(knobs.nodes_max);
        return removal(observed, vec![why]);
    }
    let (judgement, patience) = match knobs.policy {
        Policy::Threshold => {
            (threshold::judge(observed, knobs), Patience { up: knobs.up_after, down: knobs.down_after })
        }
        Policy::Static => (static_metric::judge(observed, knobs), Patience { up: 0, down: 0 }),
        Policy::Model => (model::judge(observed, knobs), Patience { up: knobs.up_after, down: knobs.down_after }),
    };
    match judgement {
        Judgement::Fine(reasons) => {
            (state.above, state.below) = (None, None);
            (What::Stay, reasons)
        }
        Judgement::TooMuch(reasons) => {
            state.below = None;
            let since = *state.above.get_or_insert(now);
            match hindered(state, now, since, patience.up, knobs.up_pause)
                .or((count >= knobs.nodes_max).then_some(Reason::Maximum(count)))
            {
                None => (What::Add, reasons),
                Some(why) => (What::Stay, with(reasons, why)),
            }
        }
        Judgement::TooLittle(reasons) => {
            state.above = None;
            let since = *state.below.get_or_insert(now);
            if count <= least {
                return (What::Stay, with(reasons, Reason::Minimum(least, scheduled)));
            }
            match hindered(state, now, since, patience.down, knobs.down_pause) {
                None => removal(observed, reasons),
                Some(why) => (What::Stay, with(reasons, why)),
            }
        }
    }
}

fn with(mut reasons: Vec<Reason>, why: Reason) -> Vec<Reason> {
    reasons.push(why);
    reasons
}

fn removal(observed: &Observed, reasons: Vec<Reason>) -> (What, Vec<Reason>) {
    match observed.cheapest() {
        Ok(node) => (What::Remove(node), reasons),
        Err(why) => (What::Stay, with(reasons, why)),
    }
}

/// Time that has to pass first.
fn hindered(state: &State, now: Millis, since: Millis, patience: Millis, pause: Millis) -> Option<Reason> {
    let lasted = now.saturating_sub(since);
    if lasted < patience {
        return Some(Reason::Lasts(lasted, patience));
    }
    pause_left(state, now, pause)
}

/// The rest of the pause after the latest change.
fn pause_left(state: &State, now: Millis, pause: Millis) -> Option<Reason> {
    let (passed, pause) = (now.saturating_sub(state.changed?), state.grown(pause));
    (passed < pause).then(|| Reason::Pause(pause - passed))
}
