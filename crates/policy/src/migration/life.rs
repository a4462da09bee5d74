//! Steps of a move around its legs, from the first connection to the final check.
//!
//! [`MoveStateMachine::begin`] returns the first [`Step`]; [`MoveStateMachine::on_result`] takes the result of a step
//! ([`StepResult`]) and returns the next one. One step runs at a time, and no call blocks. The mover executes the
//! steps. It forwards user requests as they arrive ([`MoveStateMachine::on_user_request`]), and abandons a step that
//! they cut short ([`MoveStateMachine::is_cut_short`]). A leg is one step, with its own machine ([`super::Driver`]).
//!
//! ```text
//! Connect - Clocks - Leg                                    open leg of an earlier router
//! Connect - Check - LearnWaits - List - Functions
//!   - HandleRequests - Measure - Clocks - Room - Stage - Leg  for each leg; if it could not start:
//!                                                             Rest - Observe - HandleRequests
//!   - CheckSource - End
//! ```
//!
//! Rules
//! 1. Keys of a leg that is open when the router ends are unusable. So that leg comes first, and neither a user request
//!    nor a clock difference ends the move before it.
//! 2. A step that loses a node it needs is repeated after both nodes are connected again. A leg that has not started is
//!    cut again; a started leg survives the loss.
//! 3. Slots that have moved stay moved. An abort ends the move before its next step, unless nothing is left to move.

use std::collections::BTreeSet;

use super::record::{OpenLeg, OpenMove};
use super::{Goal, MoveOrder, Outcome, Side};
use crate::topology::Slot;

/// Interval between two attempts to reach a node, microseconds.
const CONNECT_INTERVAL_US: u64 = 300_000;
/// Outage of the target after which an open leg of an earlier router continues without it, microseconds.
const TARGET_TIMEOUT_US: u64 = 3_000_000;
/// Interval between two comparisons of differing clocks, microseconds.
const CLOCK_CHECK_INTERVAL_US: u64 = 300_000;
/// Interval between two checks whether the move is still paused, microseconds.
const PAUSE_CHECK_INTERVAL_US: u64 = 50_000;
/// Minimum interval between two attempts of a leg that could not start, microseconds; and the same as a multiple of the
/// time that clients may have waited for it.
const LEG_RETRY_MIN_US: u64 = 250_000;
const LEG_RETRY_FACTOR: u64 = 8;
/// Time limit of a drain, microseconds: the default, and the maximum. Clients wait during a drain.
const DRAIN_TIMEOUT_US: u64 = 40_000;
const DRAIN_TIMEOUT_MAX_US: u64 = 2_000_000;
/// Approximate maximum size of the big keys staged for one leg, bytes.
const LEG_BIG_BYTES: u64 = 512 << 20;

/// Reason shown for a move that the user aborted.
const ABORTED: &str = "aborted by the user";
/// Activity shown while an open leg is resumed.
const RESUMING_LEG: &str = "resuming the open leg";

/// User request to a running move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UserRequest {
    /// Finish the current leg, and start no other.
    Pause,
    /// Continue after a pause.
    Resume,
    /// Roll back the current leg, or finish it if less is left that way, without a rate limit; start no other leg, and
    /// end the move.
    Abort,
    /// [`UserRequest::Abort`] without waiting for this side, which is lost for good.
    GiveUp(Side),
    /// Change the goal.
    Goal(Goal),
    /// Limit the rate, bytes per second; `None`: the rate follows from the goal.
    MaxRate(Option<u64>),
    /// Limit the client commands per second that the source serves of keys in transit; `None`: no limit.
    SourceOpsMax(Option<u32>),
}

/// Result of a move.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum MoveEnd {
    /// All slots belong to the target.
    Done,
    /// The move stopped, with a reason. Moved slots stay moved, the others stay at the source.
    Stopped(String),
}

/// Initial state of a [`MoveStateMachine`].
#[derive(Clone, Debug)]
pub struct Begin {
    /// Slots to move, nodes and options.
    pub order: MoveOrder,
    /// Names of source and target, for display.
    pub names: [String; 2],
    /// State that an earlier router left.
    pub resume: Option<OpenMove>,
    /// The user aborted the move: only finish its open leg.
    pub aborted: bool,
    /// Side that the user has declared lost for good.
    pub give_up: Option<Side>,
}

/// Slots that change owner together, and the number of their leg.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LegSlots {
    /// Leg number.
    pub number: u32,
    /// The slots, ascending.
    pub slots: Vec<Slot>,
}

/// Next step of the mover. Its result is [`StepResult::Done`], unless documented otherwise. [`StepResult::Lost`],
/// [`StepResult::Refused`] and [`StepResult::Aborted`] are possible for every step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// Connect to that side, if not connected, and close leftover connections at its node. One attempt:
    /// [`StepResult::Refused`] has the reason of a failure.
    Connect {
        /// Side to reach.
        side: Side,
        /// Step after both sides are reached.
        then: Box<Step>,
    },
    /// Wait, and accept user requests. An abort ends the wait.
    Rest {
        /// Duration, microseconds.
        us: u64,
        /// Activity shown while waiting.
        activity: String,
        /// Step after the wait.
        then: Box<Step>,
    },
    /// Check whether both nodes meet the requirements of the move.
    Check,
    /// Measure how long clients wait for replies without the move.
    LearnWaits,
    /// Let workers report written keys, wait until earlier commands have ended ([`MoveStateMachine::drained`]), list
    /// the keys, and remove leftovers at the target.
    List,
    /// Copy functions and scripts from the source to the target.
    Functions,
    /// Handle pending user requests. Nothing is in flight at the nodes.
    HandleRequests,
    /// Measure the keys of the next leg, and cut it by their size ([`MoveStateMachine::cut`]). [`StepResult::LegSlots`]
    /// follows.
    Measure,
    /// Compare the clocks of both nodes. [`StepResult::Refused`] if they differ.
    Clocks(LegSlots),
    /// Check whether the target has enough free memory.
    Room(LegSlots),
    /// Copy big keys ahead.
    Stage(LegSlots),
    /// Run a leg to its end, or resume [`MoveStateMachine::open`]. [`StepResult::Ended`] follows; [`StepResult::Lost`]
    /// only before the leg has started.
    Leg(LegSlots),
    /// Wait until commands sent to the source earlier have ended, and report how long that took
    /// ([`MoveStateMachine::drained`]). No client is held back.
    Observe,
    /// Check whether the source still has keys of moved slots.
    CheckSource,
    /// The move has ended.
    End(MoveEnd),
}

/// Result of a step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StepResult {
    /// The step succeeded.
    Done,
    /// The slots of the next leg.
    Cut(Vec<Slot>),
    /// The leg has ended.
    Ended(Outcome),
    /// A required node is not connected.
    Lost,
    /// The step failed, with the reason.
    Refused(String),
    /// The step was abandoned because [`MoveStateMachine::is_cut_short`].
    Aborted,
}

/// Keys of a move, per slot.
pub trait ListedKeys {
    /// Number of listed keys in the slot.
    fn keys(&self, slot: Slot) -> u32;
    /// Size of the big keys in the slot, bytes.
    fn big_bytes(&self, slot: Slot) -> u64;
    /// Whether the slot has keys that are not listed, so that its node must be listed again.
    fn lacks_some(&self, slot: Slot) -> bool;
}

/// State machine of a move.
#[derive(Debug)]
pub struct MoveStateMachine {
    order: MoveOrder,
    names: [String; 2],
    slots_left: BTreeSet<Slot>,
    /// Open leg of an earlier router, until it has ended.
    open: Option<OpenLeg>,
    next_leg: u32,
    /// Current step.
    requested: Step,
    /// Time at which an open leg began to wait for its nodes, and the sides that this round did not reach, with the
    /// activity to show.
    since_us: u64,
    missing: Vec<(Side, String)>,
    paused: bool,
    aborted: bool,
    give_up: Option<Side>,
    /// Side without which a leg has ended, with the maximum number of lost keys.
    lost: Option<(Side, u64)>,
    /// Time until earlier commands at the source had ended, as last measured.
    drain_us: u64,
    /// Number of legs in a row that could not start. Each doubles the drain limit, because a leg may wait longer than
    /// measured.
    failed_leg_starts: u32,
}

impl MoveStateMachine {
    /// Creates a move. Returns it with its first step.
    #[must_use]
    pub fn begin(begin: Begin, now_us: u64) -> (Self, Step) {
        let Begin { order, names, resume, aborted, give_up } = begin;
        let (handed_over, next_leg, open) =
            resume.map_or((Vec::new(), 0, None), |resume| (resume.handed_over, resume.next_leg, resume.leg));
        let slots_left = order.slots.iter().copied().filter(|slot| handed_over.binary_search(slot).is_err()).collect();
        let mut life = Self {
            order,
            names,
            slots_left,
            open: open.filter(|leg| leg.moving),
            next_leg,
            requested: Step::Check,
            since_us: now_us,
            missing: Vec::new(),
            paused: false,
            aborted,
            give_up,
            lost: None,
            drain_us: 0,
            failed_leg_starts: 0,
        };
        life.requested = life.resume_open_leg().unwrap_or_else(|| reach(life.or_final_check(Step::Check)));
        let first = life.requested.clone();
        (life, first)
    }

    /// Returns the next step after the result of the current one, at `now_us` (microseconds on any monotonic clock).
    pub fn on_result(&mut self, came: StepResult, now_us: u64) -> Step {
        let asked = self.requested.clone();
        self.requested = match came {
            StepResult::Done => self.done(asked, now_us),
            StepResult::Cut(slots) => Step::Clocks(LegSlots { number: self.next_leg, slots }),
            StepResult::Ended(outcome) => self.leg_ended(asked, outcome),
            StepResult::Lost => self.node_lost(asked, now_us),
            StepResult::Refused(why) => self.refused(asked, why, now_us),
            StepResult::Aborted => stopped(ABORTED),
        };
        self.requested.clone()
    }

    fn done(&mut self, asked: Step, now_us: u64) -> Step {
        match asked {
            Step::Connect { side, then } => self.reached(side, None, then, now_us),
            Step::Rest { then, .. } => *then,
            Step::Check => Step::LearnWaits,
            Step::LearnWaits => Step::List,
            Step::List => Step::Functions,
            Step::Functions => self.next(),
            Step::HandleRequests if self.is_paused() => rest(PAUSE_CHECK_INTERVAL_US, "paused", Step::HandleRequests),
            Step::HandleRequests => Step::Measure,
            Step::Clocks(cut) if self.open.is_some() => Step::Leg(cut),
            Step::Clocks(cut) => Step::Room(cut),
            Step::Room(cut) => Step::Stage(cut),
            Step::Stage(cut) => Step::Leg(cut),
            Step::Observe if self.drain_us > DRAIN_TIMEOUT_MAX_US => {
                let doing =
                    format!("waiting for {}: earlier commands took {} s", self.names[0], self.drain_us / 1_000_000);
                rest(LEG_RETRY_MIN_US, &doing, Step::Observe)
            }
            Step::Observe => Step::HandleRequests,
            Step::CheckSource => Step::End(MoveEnd::Done),
            // Unreachable: these steps have other results.
            Step::Measure | Step::Leg(_) | Step::End(_) => asked,
        }
    }

    fn node_lost(&mut self, asked: Step, now_us: u64) -> Step {
        match asked {
            Step::Connect { side, then } => {
                self.reached(side, Some("its connection was lost".to_owned()), then, now_us)
            }
            // A side that is not connected is checked after it reconnects: the leg may have to go back without it.
            Step::Clocks(cut) if self.open.is_some() => Step::Leg(cut),
            Step::Leg(_) => {
                self.since_us = now_us + CONNECT_INTERVAL_US;
                // Keys of an open leg may be at either node, so the loss of a node does not end the move.
                let open = self.resume_open_leg().map(|again| rest(CONNECT_INTERVAL_US, RESUMING_LEG, again));
                open.unwrap_or_else(|| reach(Step::HandleRequests))
            }
            again => reach(again),
        }
    }

    fn refused(&mut self, asked: Step, why: String, now_us: u64) -> Step {
        match asked {
            Step::Connect { side, then } => self.reached(side, Some(why), then, now_us),
            // An open leg cannot be left unfinished, so it waits.
            again @ Step::Clocks(_) if self.open.is_some() => {
                rest(CLOCK_CHECK_INTERVAL_US, &format!("waiting: {why}"), again)
            }
            _ => stopped(&why),
        }
    }

    /// Handles the result of an attempt to reach a side.
    fn reached(&mut self, side: Side, refused: Option<String>, then: Box<Step>, now_us: u64) -> Step {
        let waiting = refused.map(|why| format!("waiting for {}: {why}", self.names[side as usize]));
        let Some(open) = &self.open else {
            return match waiting {
                Some(waiting) if self.aborted => stopped(&waiting),
                Some(waiting) => rest(CONNECT_INTERVAL_US, &waiting, Step::Connect { side, then }),
                None if side == Side::Source => Step::Connect { side: Side::Target, then },
                None => *then,
            };
        };
        self.missing.extend(waiting.map(|waiting| (side, waiting)));
        if side == Side::Source && open.given_up != Some(Side::Target) {
            return Step::Connect { side: Side::Target, then };
        }
        // Clients wait for the keys of the open leg, so no user request ends it. It continues without an unreachable
        // target, because the source has keys to serve, and without a side that the user has given up. After the
        // cut-over it continues without its source.
        let is_patient = now_us.saturating_sub(self.since_us) < TARGET_TIMEOUT_US;
        let is_past = |side| side == Side::Source && open.cut_over;
        let can_do_without =
            |side| is_past(side) || !is_patient && (side == Side::Target || self.give_up == Some(side));
        let missing = std::mem::take(&mut self.missing);
        match &missing[..] {
            [] => *then,
            [(side, _)] if can_do_without(*side) => *then,
            [.., (_, waiting)] => rest(CONNECT_INTERVAL_US, waiting, connect_for(open)),
        }
    }

    /// Returns the step that resumes the open leg, if there is one.
    fn resume_open_leg(&self) -> Option<Step> {
        self.open.as_ref().map(connect_for)
    }

    /// Handles the end of a leg.
    fn leg_ended(&mut self, asked: Step, outcome: Outcome) -> Step {
        let Step::Leg(cut) = asked else { return asked };
        let was_open = self.open.take().is_some();
        self.next_leg = self.next_leg.max(cut.number + 1);
        if outcome == Outcome::Moved {
            self.failed_leg_starts = 0;
            cut.slots.iter().for_each(|slot| {
                self.slots_left.remove(slot);
            });
        }
        if let Some((side, keys)) = self.lost {
            let what = match side {
                Side::Target => {
                    format!("at most {keys} key{} moved there before are lost", if keys == 1 { "" } else { "s" })
                }
                Side::Source => "its keys of the moving slots are lost".to_owned(),
            };
            return stopped(&format!("{} was abandoned: {what}", self.names[side as usize]));
        }
        match outcome {
            Outcome::Returned { why } => stopped(&why),
            Outcome::Moved if self.aborted && !self.slots_left.is_empty() => stopped(ABORTED),
            Outcome::Moved if was_open => self.or_final_check(Step::Check),
            Outcome::Moved => self.next(),
            Outcome::NotBegun { why } if was_open => stopped(&why),
            Outcome::NotBegun { why } => {
                let us = LEG_RETRY_MIN_US.max(self.drain_timeout_us() * LEG_RETRY_FACTOR);
                self.failed_leg_starts += 1;
                rest(us, &format!("trying again: {why}"), Step::Observe)
            }
        }
    }

    /// Returns the first step of the next leg, or the final check.
    fn next(&self) -> Step {
        self.or_final_check(Step::HandleRequests)
    }

    /// Returns `step`, or the final check if all slots have moved.
    fn or_final_check(&self, step: Step) -> Step {
        if self.slots_left.is_empty() { Step::CheckSource } else { step }
    }

    // ---- events during a step ----

    /// Applies a user request.
    pub fn on_user_request(&mut self, steer: UserRequest) {
        match steer {
            UserRequest::Pause => self.paused = true,
            UserRequest::Resume => self.paused = false,
            UserRequest::Goal(goal) => self.order.how.goal = goal,
            UserRequest::MaxRate(rate) => self.order.how.max_rate = rate,
            UserRequest::SourceOpsMax(max) => self.order.how.source_ops_max = max,
            UserRequest::Abort => self.aborted = true,
            UserRequest::GiveUp(side) => (self.aborted, self.give_up) = (true, Some(side)),
        }
    }

    /// Records how long commands sent to the source earlier took to end, microseconds. The next leg may hold clients
    /// back for twice that.
    pub fn drained(&mut self, took_us: u64) {
        self.drain_us = took_us;
    }

    /// Records that the current leg ends without this side, which was given up, with the maximum number of lost keys.
    pub fn record_loss(&mut self, side: Side, keys: u64) {
        self.lost = Some((side, keys));
    }

    // ---- state ----

    /// Move order, with the current goal and rate.
    #[must_use]
    pub const fn order(&self) -> &MoveOrder {
        &self.order
    }

    /// Slots that the source still owns.
    #[must_use]
    pub const fn slots_left(&self) -> &BTreeSet<Slot> {
        &self.slots_left
    }

    /// Open leg of an earlier router, until it has ended. No client can use its keys.
    #[must_use]
    pub const fn open(&self) -> Option<&OpenLeg> {
        self.open.as_ref()
    }

    /// Whether the user has paused the move and not aborted it.
    #[must_use]
    pub const fn is_paused(&self) -> bool {
        self.paused && !self.aborted
    }

    /// Whether the user has aborted the move.
    #[must_use]
    pub const fn is_aborted(&self) -> bool {
        self.aborted
    }

    /// Whether an abort takes effect now. Not during an open leg, because clients wait for its keys, and not after all
    /// slots have moved. The current step is abandoned ([`StepResult::Aborted`]), unless it is a leg.
    #[must_use]
    pub fn is_cut_short(&self) -> bool {
        self.aborted && self.open.is_none() && !self.slots_left.is_empty()
    }

    /// Side that the user has declared lost for good.
    #[must_use]
    pub const fn give_up(&self) -> Option<Side> {
        self.give_up
    }

    /// Maximum number of keys lost with a side that was given up.
    #[must_use]
    pub fn keys_lost(&self) -> u64 {
        self.lost.map_or(0, |(_, keys)| keys)
    }

    /// Time that a leg may hold clients back before it moves, microseconds. Doubles after each leg that could not
    /// start.
    #[must_use]
    pub fn drain_timeout_us(&self) -> u64 {
        let us = self.drain_us.saturating_mul(2).clamp(DRAIN_TIMEOUT_US, DRAIN_TIMEOUT_MAX_US);
        us.saturating_mul(1 << self.failed_leg_starts.min(16)).min(DRAIN_TIMEOUT_MAX_US)
    }

    /// Returns the slots of the next leg: whole slots, up to `keys_max` keys. `without`: slots of the current leg.
    pub fn cut(&self, listed: &impl ListedKeys, keys_max: u32, without: &[bool]) -> Vec<Slot> {
        let mut slots = Vec::new();
        let mut keys = 0;
        let mut big_bytes = 0;
        if self.order.how.is_one_leg() {
            return self.slots_left.iter().copied().collect();
        }
        let left = self.slots_left.iter().filter(|slot| !without.get(slot.index()).is_some_and(|without| *without));
        // Slots in which scripts write undeclared keys come last and together: they must be listed again.
        let (last, first): (Vec<Slot>, Vec<Slot>) = left.partition(|slot| listed.lacks_some(**slot));
        for slot in if first.is_empty() { last } else { first } {
            let (of_slot, big_of_slot) = (listed.keys(slot), listed.big_bytes(slot));
            if !slots.is_empty()
                && (keys + of_slot > keys_max || (big_of_slot > 0 && big_bytes + big_of_slot > LEG_BIG_BYTES))
            {
                break;
            }
            keys += of_slot;
            big_bytes += big_of_slot;
            slots.push(slot);
        }
        slots
    }
}

/// Reaches both nodes without a time limit, then continues with `then`.
fn reach(then: Step) -> Step {
    Step::Connect { side: Side::Source, then: Box::new(then) }
}

/// Reaches the nodes that an open leg needs, then resumes it.
fn connect_for(open: &OpenLeg) -> Step {
    let side = if open.given_up == Some(Side::Source) { Side::Target } else { Side::Source };
    Step::Connect { side, then: Box::new(Step::Clocks(LegSlots { number: open.leg, slots: open.slots.clone() })) }
}

fn rest(us: u64, doing: &str, then: Step) -> Step {
    Step::Rest { us, activity: doing.to_owned(), then: Box::new(then) }
}

fn stopped(why: &str) -> Step {
    Step::End(MoveEnd::Stopped(why.to_owned()))
}
