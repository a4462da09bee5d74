//! Advice of the policies that look ahead: [`Advisor`] has the history of a fleet and the model that is trained on it.
//!
//! Training takes some hundred milliseconds and happens every [`TRAINED_EVERY`] minutes; advice is computed once per
//! minute, and all other calls return the last one. So the caller's loop stays cheap, and needs no thread.
//!
//! Separate from [`State`](super::State): that one is copied and stored with each change, the history is a thousand
//! times as large. A restart restores only the history, because the model follows from it.
//!
//! A policy that looks ahead never does less than `threshold`: if a limit is exceeded, a node is added as by `threshold`.
//! Without enough history, without the capacity of a node, or if its predictions were too low recently, `threshold`
//! decides alone.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::forecast::{COVERED, FORECAST_MIN, Forecast};
use super::history::{History, MINUTE};
use super::injected::{Bug, InjectedBug};
use super::learned::{self, Trees};
use super::{Delays, Judgement, Knobs, Millis, Observed, Policy, Reason, predictive, with};

/// Interval of training, in minutes. Patterns change over days, and the present deviation is measured each minute.
const TRAINED_EVERY: u64 = 6 * 60;

/// Time to add a node before the first one was added, in milliseconds.
const STARTUP_DEFAULT: Millis = 180_000;

/// Maximum measured duration of a change, in milliseconds. A longer one was waiting for something else.
const CHANGE_MAX: Millis = 3_600_000;

/// Weight of a shorter change in the mean duration. A longer one counts at once, because a late node costs more than an
/// early one.
const SHORTER: f64 = 0.2;

/// Weight of the latest prediction in the confidence: a mean over about half a day.
const LATEST: f64 = 1.0 / 720.0;

/// Minimum confidence. Below this, the load has left its pattern.
const CONFIDENCE_MIN: f64 = 0.7;

/// Maximum number of predictions that wait for their minute.
const PENDING_MAX: usize = 1440;

/// Fraction of the memory limit that stays free after a removal, so that an addition does not follow.
const MEMORY_SPARE: f64 = 0.1;

/// Action of an advice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// No change now.
    Stay,
    /// Add a node.
    Add,
    /// Remove a node.
    Remove,
}

/// Expected load, the reason for an advice.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outlook {
    /// Requests per second that will rarely be exceeded.
    pub requests: f64,
    /// Nodes for these.
    pub nodes: usize,
    /// Beginning of the time to which this applies, in milliseconds from now.
    pub from: Millis,
    /// End of that time, in milliseconds from now.
    pub to: Millis,
    /// Time to add a node, as measured, in milliseconds.
    pub startup: Millis,
    /// Fraction of the recent predictions that were high enough, 0 to 1.
    pub confidence: f64,
}

/// Advice for one observation.
#[derive(Clone, Debug, PartialEq)]
pub enum Advice {
    /// None for this reason: `threshold` decides.
    Unavailable(Reason),
    /// A step, with its reason.
    Step(Step, Reason),
}

/// Change in progress.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Progress {
    /// None, or one that has failed.
    #[default]
    Idle,
    /// A node is being added, until it has its share.
    Adding,
    /// A node is being removed, until its server is stopped.
    Removing,
}

/// Durations in minutes, rounded up, at least one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Changes {
    /// From the start of an addition until the node has its share.
    pub(super) startup: usize,
    /// From the start of a removal until the server has stopped.
    pub(super) drain: usize,
    /// From the start of an addition until the next addition.
    pub(super) after_add: usize,
    /// From the start of a removal until the next addition.
    pub(super) after_remove: usize,
}

/// Facts about the present, for both policies.
pub(super) struct Present<'a> {
    pub(super) observed: &'a Observed,
    pub(super) knobs: &'a Knobs,
    pub(super) history: &'a History,
    /// Requests per second that one node should serve.
    pub(super) room: f64,
    pub(super) changes: Changes,
    /// Time to add a node, as measured.
    pub(super) startup: Millis,
    confidence: f64,
}

impl Present<'_> {
    pub(super) fn count(&self) -> usize {
        self.observed.nodes.len().max(1)
    }

    /// Current minute, which has no record yet.
    pub(super) fn minute(&self) -> u64 {
        self.observed.now.wall / MINUTE
    }

    /// Whole nodes for a need, and for the data in memory.
    pub(super) fn nodes_for(&self, need: f64) -> usize {
        let filled = self.observed.memory().map_or(0.0, |(used, most)| {
            used as f64 / most as f64 * self.count() as f64 / (self.knobs.memory * (1.0 - MEMORY_SPARE))
        });
        (need.max(filled).ceil() as usize).max(1)
    }

    /// An outlook with the facts that do not depend on the policy.
    pub(super) fn outlook(&self) -> Outlook {
        let (startup, confidence) = (self.startup, self.confidence);
        Outlook { requests: 0.0, nodes: 0, from: 0, to: 0, startup, confidence }
    }
}

/// Measured durations of changes.
#[derive(Debug, Default)]
struct ChangeTimes {
    startup: Option<Millis>,
    drain: Option<Millis>,
    /// Change in progress, and its start on the clock of the run.
    begun: Option<(Progress, Millis)>,
    /// Number of nodes before it.
    count: usize,
}

impl ChangeTimes {
    fn observe(&mut self, observed: &Observed, progress: Progress) {
        let (run, count) = (observed.now.run, observed.nodes.len());
        if let Some((ended, since)) = self.begun.take_if(|(begun, _)| *begun != progress) {
            let took = run.saturating_sub(since).min(CHANGE_MAX);
            match ended {
                Progress::Adding if count > self.count => self.startup = Some(smoothed(self.startup, took)),
                Progress::Removing if count < self.count => self.drain = Some(smoothed(self.drain, took)),
                _ => {}
            }
        }
        match progress {
            Progress::Idle => self.count = count,
            _ if self.begun.is_none() => self.begun = Some((progress, run)),
            _ => {}
        }
    }

    fn startup(&self) -> Millis {
        self.startup.unwrap_or(STARTUP_DEFAULT)
    }

    fn changes(&self, knobs: &Knobs) -> Changes {
        let minutes = |ms: Millis| (ms.div_ceil(MINUTE) as usize).max(1);
        let (startup, drain) = (self.startup(), self.drain.unwrap_or(self.startup()));
        Changes {
            startup: minutes(startup),
            drain: minutes(drain),
            after_add: minutes(startup + knobs.up_cooldown),
            after_remove: minutes(drain + knobs.up_cooldown),
        }
    }
}

fn smoothed(before: Option<Millis>, took: Millis) -> Millis {
    match before {
        Some(before) if took < before => (before as f64 + SHORTER * (took as f64 - before as f64)) as Millis,
        _ => took,
    }
}

/// Fraction of the recent predictions that were high enough.
#[derive(Debug)]
struct Coverage {
    share: f64,
    /// First and last minute of each prediction, and its number of nodes.
    pending: VecDeque<(u64, u64, f64)>,
}

impl Default for Coverage {
    fn default() -> Self {
        Self { share: COVERED, pending: VecDeque::new() }
    }
}

impl Coverage {
    fn predict(&mut self, from: u64, to: u64, nodes: f64) {
        if self.pending.len() < PENDING_MAX {
            self.pending.push_back((from, to, nodes));
        }
    }

    /// Compares predictions with the minutes that have passed before `now`. Missing minutes prove nothing.
    fn settle(&mut self, history: &History, room: f64, knobs: &Knobs, now: u64) {
        while let Some((from, to, nodes)) = self.pending.pop_front_if(|(_, to, _)| *to < now) {
            let needs = (from..=to).filter_map(|minute| history.need(minute, room, knobs));
            if let Some(need) = needs.max_by(f64::total_cmp) {
                self.share += LATEST * (f64::from(u8::from(need <= nodes)) - self.share);
            }
        }
    }
}

/// Model of a policy.
#[derive(Debug)]
enum Model {
    Learned(Box<Trees>),
    Predictive(Box<Forecast>),
}

/// A trained model.
#[derive(Debug)]
struct Trained {
    /// Minute of the training.
    at: u64,
    knobs: Knobs,
    /// Requests per second that one node should serve.
    room: Option<f64>,
    /// `None`: the history has too many gaps.
    model: Option<Model>,
}

/// History of a fleet, and the model that is trained on it. One per fleet.
#[derive(Debug, Default)]
pub struct Advisor {
    history: History,
    times: ChangeTimes,
    trained: Option<Trained>,
    coverage: Coverage,
    /// Latest advice, with the minute and the number of nodes that it is for.
    latest: Option<(u64, usize, Advice)>,
    bug: InjectedBug,
}

impl Advisor {
    /// Returns an advisor with a bug, for tests.
    #[cfg(feature = "planted-bugs")]
    #[must_use]
    pub fn with_bug(bug: Bug) -> Self {
        Self { bug: InjectedBug::new(Some(bug)), ..Self::default() }
    }

    /// Restores the history from the documents of an earlier run, in any order. `wall`: the present wall time. Returns
    /// the number of illegible documents.
    #[must_use]
    pub fn restore(documents: impl IntoIterator<Item = Vec<u8>>, wall: Millis) -> (Self, usize) {
        let (history, illegible) = History::restore(documents, wall);
        let times = ChangeTimes { startup: history.startup(), ..ChangeTimes::default() };
        (Self { history, times, ..Self::default() }, illegible)
    }

    /// Documents to store, with the number of the day since 1970. A day replaces itself, and the day [`HISTORY_DAYS`]
    /// earlier.
    ///
    /// [`HISTORY_DAYS`]: super::HISTORY_DAYS
    pub fn unsaved(&self) -> impl Iterator<Item = (u64, Vec<u8>)> {
        self.history.unsaved()
    }

    /// Notes that the document of a day is stored.
    pub fn saved(&mut self, day: u64) {
        self.history.saved(day);
    }

    /// Records an observation. For all observations, also during a change.
    pub fn observe(&mut self, observed: &Observed, progress: Progress) {
        self.times.observe(observed, progress);
        self.history.observe(observed, self.times.startup());
    }

    /// Returns the advice for an observation that was recorded. `None` for policies that need none. Trains the model if
    /// that is due.
    pub fn advise(&mut self, observed: &Observed, knobs: &Knobs) -> Option<Advice> {
        if !matches!(knobs.policy, Policy::Learned | Policy::Predictive) {
            self.trained = None;
            return None;
        }
        let (minute, count) = (observed.now.wall / MINUTE, observed.nodes.len());
        let is_trained_for = self.trained.as_ref().is_some_and(|trained| trained.knobs == *knobs);
        let latest = self.latest.as_ref().filter(|(at, nodes, _)| (*at, *nodes) == (minute, count) && is_trained_for);
        if let Some((_, _, advice)) = latest {
            return Some(advice.clone());
        }
        let advice = self.new_advice(observed, knobs);
        self.latest = Some((minute, count, advice.clone()));
        Some(advice)
    }

    fn new_advice(&mut self, observed: &Observed, knobs: &Knobs) -> Advice {
        let minute = observed.now.wall / MINUTE;
        let too_short = Reason::NoHistory(self.history.known() * MINUTE, FORECAST_MIN * MINUTE);
        if self.history.known() < FORECAST_MIN {
            return Advice::Unavailable(too_short);
        }
        let is_due = self
            .trained
            .as_ref()
            .is_none_or(|trained| trained.at.abs_diff(minute) >= TRAINED_EVERY || trained.knobs != *knobs);
        if is_due {
            self.train(minute, knobs);
        }
        let Some(Trained { room: Some(room), model, .. }) = &self.trained else {
            return Advice::Unavailable(Reason::UnknownCapacity);
        };
        let Some(model) = model else { return Advice::Unavailable(too_short) };
        self.coverage.settle(&self.history, *room, knobs, minute);
        let present = Present {
            observed,
            knobs,
            history: &self.history,
            room: *room,
            changes: self.changes(knobs),
            startup: self.times.startup(),
            confidence: self.coverage.share,
        };
        let advice = match model {
            Model::Predictive(forecast) => {
                let lead = present.changes.startup as u64;
                if let Some(nodes) = predictive::predicted(forecast, &present, lead) {
                    self.coverage.predict(minute + lead, minute + lead, nodes);
                }
                let (step, outlook) = predictive::advise(forecast, &present);
                Advice::Step(step, Reason::Forecast(outlook))
            }
            Model::Learned(trees) => match trees.predict(&present) {
                Some(needs) => {
                    let to = minute + learned::window(present.startup, knobs, 1);
                    needs.first().into_iter().for_each(|need| self.coverage.predict(minute, to, need.nodes));
                    let (step, outlook) = learned::advise(&needs, &present);
                    Advice::Step(step, Reason::Learned(outlook))
                }
                None => Advice::Unavailable(Reason::Unmeasured),
            },
        };
        let share = self.coverage.share;
        if share < CONFIDENCE_MIN { Advice::Unavailable(Reason::Unreliable(share)) } else { advice }
    }

    fn changes(&self, knobs: &Knobs) -> Changes {
        if self.bug.is(Bug::ChangesTakeNoTime) {
            return Changes { startup: 1, drain: 1, after_add: 1, after_remove: 1 };
        }
        self.times.changes(knobs)
    }

    fn train(&mut self, minute: u64, knobs: &Knobs) {
        let before = self.trained.take();
        if before.is_none_or(|before| before.knobs.policy != knobs.policy) {
            self.coverage = Coverage::default();
        }
        let room = self.history.room(knobs);
        let model = room.and_then(|room| match knobs.policy {
            Policy::Learned => {
                let has_hindsight = !self.bug.is(Bug::LabelsWithoutHindsight);
                Trees::fit(&self.history, room, knobs, has_hindsight).map(|trees| Model::Learned(Box::new(trees)))
            }
            _ => Forecast::fit(&self.history).map(|forecast| Model::Predictive(Box::new(forecast))),
        });
        self.trained = Some(Trained { at: minute, knobs: knobs.clone(), room, model });
    }
}

/// Judgement by an advice. `usual` is that of `threshold`, with the configured delays.
pub(super) fn judge(usual: Judgement, delays: Delays, advice: Option<&Advice>) -> (Judgement, Delays) {
    let no_history = Advice::Unavailable(Reason::NoHistory(0, FORECAST_MIN * MINUTE));
    match (advice.unwrap_or(&no_history).clone(), usual) {
        (Advice::Unavailable(why), Judgement::Fine(reasons)) => (Judgement::Fine(with(reasons, why)), delays),
        (Advice::Unavailable(why), Judgement::TooMuch(reasons)) => (Judgement::TooMuch(with(reasons, why)), delays),
        (Advice::Unavailable(why), Judgement::TooLittle(reasons)) => (Judgement::TooLittle(with(reasons, why)), delays),
        // The margin of the prediction replaces the delay of an addition.
        (Advice::Step(Step::Add, why), Judgement::TooMuch(reasons)) => {
            (Judgement::TooMuch(with(reasons, why)), Delays { up: 0, ..delays })
        }
        (Advice::Step(Step::Add, why), _) => (Judgement::TooMuch(vec![why]), Delays { up: 0, ..delays }),
        (Advice::Step(_, why), Judgement::TooMuch(reasons)) => (Judgement::TooMuch(with(reasons, why)), delays),
        (Advice::Step(Step::Remove, why), _) => (Judgement::TooLittle(vec![why]), delays),
        (Advice::Step(Step::Stay, why), _) => (Judgement::Fine(vec![why]), delays),
    }
}
