//! The life of a move around its legs: what comes next, from the first connection to the last look.
//!
//! [`MoveStateMachine::begin`] says the first [`Step`], and [`MoveStateMachine::came`] the next one, by what came of the last ([`StepResult`]). One
//! step is under way at a time, and no call waits. The mover does the steps. It tells what the user asks meanwhile
//! ([`MoveStateMachine::steer`]), and leaves a step that this cuts short ([`MoveStateMachine::is_cut_short`]). A leg is one step of it, and has
//! a machine of its own ([`super::Driver`]).
//!
//! ```text
//! Reach - Clocks - Leg                                    a leg that a router before this one has left
//! Reach - Check - LearnWaits - List - Functions
//!       - Hear - Measure - Clocks - Room - Stage - Leg    for each leg; one that has not begun: Rest - Observe - Hear ...
//!       - LookBehind - End
//! ```
//!
//! # The rules
//! 1. Nobody can use the keys of a leg that is under way when the router ends. So that leg comes first, and neither a
//!    request of the user nor clocks that differ end the move before it is over.
//! 2. A step that needs a node which is lost is done again when both are reached. A leg that has not begun is cut anew;
//!    one that has begun outlives that.
//! 3. Slots that have moved stay moved. An abort ends the move before its next step, unless there is nothing left to
//!    move.

use std::collections::BTreeSet;

use super::record::{OpenLeg, OpenMove};
use super::{Goal, MoveOrder, Outcome, Side};
use crate::topology::Slot;

/// Between two attempts to reach a node, microseconds.
const REACH_REST_US: u64 = 300_000;
/// A leg that a router before this one has left goes on without its target when that was not reached for so long,
/// microseconds.
const TARGET_PATIENCE_US: u64 = 3_000_000;
/// Between two looks at clocks that differ, microseconds.
const CLOCKS_REST_US: u64 = 300_000;
/// Between two looks whether the move is still paused, microseconds.
const PAUSED_REST_US: u64 = 50_000;
/// Between two attempts of a leg that could not begin, at least, microseconds; and as a multiple of what clients may
/// have waited for it.
const LEG_REST_US: u64 = 250_000;
const LEG_REST_FACTOR: u64 = 8;
/// Workers may take so long to drain, where nothing else is known, and never more than that, microseconds: clients wait
/// meanwhile.
const DRAIN_PATIENCE_US: u64 = 40_000;
const DRAIN_PATIENCE_MAX_US: u64 = 2_000_000;
/// Bytes of big keys that are staged for one leg, about.
const LEG_BIG_BYTES: u64 = 512 << 20;

/// Why a move ends that nobody wants any more.
const ABORTED: &str = "aborted by the user";
/// What people are told while an open leg is taken up.
const GOING_ON: &str = "going on with the leg that was under way";

/// What a user may do to a move under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Steer {
    /// End the leg under way, and start no further one.
    Pause,
    /// Go on.
    Resume,
    /// Turn the leg under way back, or let it end where that is less, as fast as it goes; start no other, and end the
    /// move.
    Abort,
    /// The same, without waiting for this side, which is lost for good.
    GiveUp(Side),
    /// Go on with another goal.
    Goal(Goal),
    /// Go on with so many bytes per second at most; `None`: as the goal says.
    MaxRate(Option<u64>),
}

/// How a move ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum MoveEnd {
    /// All slots belong to the target.
    Done,
    /// It stopped: what was moved stays moved, the rest stays where it was. With the reason.
    Stopped(String),
}

/// What a move begins with.
#[derive(Clone, Debug)]
pub struct Begin {
    /// What.
    pub order: MoveOrder,
    /// The names of source and target, for people.
    pub names: [String; 2],
    /// Where it stood when the router before this one ended.
    pub resume: Option<OpenMove>,
    /// It only ends what is under way: the user wants no more of it.
    pub aborted: bool,
    /// The side that is lost for good, says the user.
    pub give_up: Option<Side>,
}

/// Slots that change their owner together, and the number of their leg.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LegSlots {
    /// The number.
    pub number: u32,
    /// The slots, ascending.
    pub slots: Vec<Slot>,
}

/// What is to be done next. [`StepResult::Done`] follows where nothing else is said; [`StepResult::Lost`], [`StepResult::Refused`] and
/// [`StepResult::Aborted`] may follow each.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// Connect to that side, if it is not connected, and have the node end what earlier connections may still do. One
    /// attempt: [`StepResult::Refused`] says why it failed.
    Reach {
        /// The side.
        side: Side,
        /// What comes when both are reached.
        then: Box<Step>,
    },
    /// Wait, and hear what is said meanwhile. An abort that comes then ends it.
    Rest {
        /// How long, microseconds.
        us: u64,
        /// What people are told meanwhile.
        doing: String,
        /// What comes then.
        then: Box<Step>,
    },
    /// Look whether both nodes can do it.
    Check,
    /// Learn how long clients wait for their replies without the move.
    LearnWaits,
    /// Have the workers tell what they write, wait until what they sent before is answered ([`MoveStateMachine::drained`]), list
    /// the keys, and see to it that the target has none of them.
    List,
    /// Give the target the functions and scripts of the source.
    Functions,
    /// Hear what was said. Nothing is under way at the nodes.
    Hear,
    /// Learn how big the keys of the next leg are, and cut it by that ([`MoveStateMachine::cut`]). [`StepResult::LegSlots`] follows.
    Measure,
    /// Ask both nodes what time it is. [`StepResult::Refused`] where they differ.
    Clocks(LegSlots),
    /// Look whether the target has room.
    Room(LegSlots),
    /// Copy big keys ahead.
    Stage(LegSlots),
    /// Do a leg to its end. [`StepResult::Ended`] follows; [`StepResult::Lost`] only before it has begun. Where [`MoveStateMachine::open`] is
    /// one, go on with that.
    Leg(LegSlots),
    /// Wait until what was sent to the source earlier is answered, and tell how long that took ([`MoveStateMachine::drained`]).
    /// Nobody is held back for that.
    Observe,
    /// Look whether the source still has keys of what has moved.
    LookBehind,
    /// The move is over.
    End(MoveEnd),
}

/// What came of a step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StepResult {
    /// It is done.
    Done,
    /// The slots of the next leg.
    Cut(Vec<Slot>),
    /// The leg has ended.
    Ended(Outcome),
    /// A node is not connected where it has to be.
    Lost,
    /// It cannot be done, and why.
    Refused(String),
    /// It was left because [`MoveStateMachine::is_cut_short`].
    Aborted,
}

/// What is known of the keys of a move, slot by slot.
pub trait Listed {
    /// How many a slot has.
    fn keys(&self, slot: Slot) -> u32;
    /// Bytes of its big ones.
    fn big_bytes(&self, slot: Slot) -> u64;
    /// Whether a slot has others that are not listed, so that its node is asked again.
    fn lacks_some(&self, slot: Slot) -> bool;
}

/// A move.
#[derive(Debug)]
pub struct MoveStateMachine {
    order: MoveOrder,
    names: [String; 2],
    slots_left: BTreeSet<Slot>,
    /// A leg that a router before this one has left, until it has ended.
    open: Option<OpenLeg>,
    next_leg: u32,
    /// What is under way.
    requested: Step,
    /// Since when an open leg waits for its nodes, and those that were not reached in this round, with what people are
    /// told.
    since_us: u64,
    missing: Vec<(Side, String)>,
    paused: bool,
    aborted: bool,
    give_up: Option<Side>,
    /// A leg has ended without this side, and so many keys are lost, at most.
    lost: Option<(Side, u64)>,
    /// What was sent to the source earlier took so long to be answered when that was looked at last.
    drain_us: u64,
    /// So many legs in turn have not begun: what a leg waits for may take longer than what was looked at.
    failed_leg_starts: u32,
}

impl MoveStateMachine {
    /// A move, and its first step.
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
        life.requested = life.open_again().unwrap_or_else(|| reach(life.look_or(Step::Check)));
        let first = life.requested.clone();
        (life, first)
    }

    /// What comes next, by what came of the last step, at `now_us` (microseconds on any clock that does not go back).
    pub fn came(&mut self, came: StepResult, now_us: u64) -> Step {
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
            Step::Reach { side, then } => self.reached(side, None, then, now_us),
            Step::Rest { then, .. } => *then,
            Step::Check => Step::LearnWaits,
            Step::LearnWaits => Step::List,
            Step::List => Step::Functions,
            Step::Functions => self.next(),
            Step::Hear if self.is_paused() => rest(PAUSED_REST_US, "paused", Step::Hear),
            Step::Hear => Step::Measure,
            Step::Clocks(cut) if self.open.is_some() => Step::Leg(cut),
            Step::Clocks(cut) => Step::Room(cut),
            Step::Room(cut) => Step::Stage(cut),
            Step::Stage(cut) => Step::Leg(cut),
            Step::Observe if self.drain_us > DRAIN_PATIENCE_MAX_US => {
                let doing = format!(
                    "waiting for {}: commands sent to it earlier took {} s",
                    self.names[0],
                    self.drain_us / 1_000_000
                );
                rest(LEG_REST_US, &doing, Step::Observe)
            }
            Step::Observe => Step::Hear,
            Step::LookBehind => Step::End(MoveEnd::Done),
            // They end otherwise.
            Step::Measure | Step::Leg(_) | Step::End(_) => asked,
        }
    }

    fn node_lost(&mut self, asked: Step, now_us: u64) -> Step {
        match asked {
            Step::Reach { side, then } => self.reached(side, Some("its connection was lost".to_owned()), then, now_us),
            // A side that is not connected is asked when it is: the leg may have to go back without it.
            Step::Clocks(cut) if self.open.is_some() => Step::Leg(cut),
            Step::Leg(_) => {
                self.since_us = now_us + REACH_REST_US;
                // Keys of an open leg may be anywhere: a move does not end with that.
                let open = self.open_again().map(|again| rest(REACH_REST_US, GOING_ON, again));
                open.unwrap_or_else(|| reach(Step::Hear))
            }
            again => reach(again),
        }
    }

    fn refused(&mut self, asked: Step, why: String, now_us: u64) -> Step {
        match asked {
            Step::Reach { side, then } => self.reached(side, Some(why), then, now_us),
            // It cannot be left as it is, so it waits.
            again @ Step::Clocks(_) if self.open.is_some() => rest(CLOCKS_REST_US, &format!("waiting: {why}"), again),
            _ => stopped(&why),
        }
    }

    /// An attempt to reach a side is over.
    fn reached(&mut self, side: Side, refused: Option<String>, then: Box<Step>, now_us: u64) -> Step {
        let waiting = refused.map(|why| format!("waiting for {}: {why}", self.names[side as usize]));
        let Some(open) = &self.open else {
            return match waiting {
                Some(waiting) if self.aborted => stopped(&waiting),
                Some(waiting) => rest(REACH_REST_US, &waiting, Step::Reach { side, then }),
                None if side == Side::Source => Step::Reach { side: Side::Target, then },
                None => *then,
            };
        };
        self.missing.extend(waiting.map(|waiting| (side, waiting)));
        if side == Side::Source && open.given_up != Some(Side::Target) {
            return Step::Reach { side: Side::Target, then };
        }
        // Clients wait for its keys: it goes on whatever the user wishes. It goes on without a target that does not
        // answer, because the source has keys that can be served; without a side that the user has given up; and
        // without its source, where all of it is at the target.
        let is_patient = now_us.saturating_sub(self.since_us) < TARGET_PATIENCE_US;
        let is_past = |side| side == Side::Source && open.cut_over;
        let can_do_without =
            |side| is_past(side) || !is_patient && (side == Side::Target || self.give_up == Some(side));
        let missing = std::mem::take(&mut self.missing);
        match &missing[..] {
            [] => *then,
            [(side, _)] if can_do_without(*side) => *then,
            [.., (_, waiting)] => rest(REACH_REST_US, waiting, reach_for(open)),
        }
    }

    /// Where there is an open leg, the step by which it is taken up.
    fn open_again(&self) -> Option<Step> {
        self.open.as_ref().map(reach_for)
    }

    /// A leg has ended.
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
                    format!("lost is at most {keys} key{}, moved there before", if keys == 1 { "" } else { "s" })
                }
                Side::Source => "what it had of the slots that were moving is lost".to_owned(),
            };
            return stopped(&format!("{} was given up: {what}", self.names[side as usize]));
        }
        match outcome {
            Outcome::Returned { why } => stopped(&why),
            Outcome::Moved if self.aborted && !self.slots_left.is_empty() => stopped(ABORTED),
            Outcome::Moved if was_open => self.look_or(Step::Check),
            Outcome::Moved => self.next(),
            Outcome::NotBegun { why } if was_open => stopped(&why),
            Outcome::NotBegun { why } => {
                let us = LEG_REST_US.max(self.drain_patience_us() * LEG_REST_FACTOR);
                self.failed_leg_starts += 1;
                rest(us, &format!("trying again: {why}"), Step::Observe)
            }
        }
    }

    /// The next leg, if there is one.
    fn next(&self) -> Step {
        self.look_or(Step::Hear)
    }

    /// This, unless all has moved.
    fn look_or(&self, step: Step) -> Step {
        if self.slots_left.is_empty() { Step::LookBehind } else { step }
    }

    // ---- what is told meanwhile ----

    /// The user asks for something.
    pub fn steer(&mut self, steer: Steer) {
        match steer {
            Steer::Pause => self.paused = true,
            Steer::Resume => self.paused = false,
            Steer::Goal(goal) => self.order.how.goal = goal,
            Steer::MaxRate(rate) => self.order.how.max_rate = rate,
            Steer::Abort => self.aborted = true,
            Steer::GiveUp(side) => (self.aborted, self.give_up) = (true, Some(side)),
        }
    }

    /// What was sent to the source earlier took so long to be answered, microseconds: the next leg may hold clients
    /// back for twice that.
    pub fn drained(&mut self, took_us: u64) {
        self.drain_us = took_us;
    }

    /// The leg under way ends without this side, which was given up: so many keys are lost, at most.
    pub fn lose(&mut self, side: Side, keys: u64) {
        self.lost = Some((side, keys));
    }

    // ---- how it is ----

    /// What was ordered, with the goal and the rate as they are now.
    #[must_use]
    pub const fn order(&self) -> &MoveOrder {
        &self.order
    }

    /// Slots that the source still owns.
    #[must_use]
    pub const fn slots_left(&self) -> &BTreeSet<Slot> {
        &self.slots_left
    }

    /// The leg that a router before this one has left, until it has ended: its keys are used by nobody.
    #[must_use]
    pub const fn open(&self) -> Option<&OpenLeg> {
        self.open.as_ref()
    }

    /// The user has paused it, and does not want it to end.
    #[must_use]
    pub const fn is_paused(&self) -> bool {
        self.paused && !self.aborted
    }

    /// The user wants it to end.
    #[must_use]
    pub const fn is_aborted(&self) -> bool {
        self.aborted
    }

    /// The user wants it to end, and nothing stands against it: clients wait for the keys of an open leg, and what has
    /// all moved is not undone. The step under way is left ([`StepResult::Aborted`]), but for a leg.
    #[must_use]
    pub fn is_cut_short(&self) -> bool {
        self.aborted && self.open.is_none() && !self.slots_left.is_empty()
    }

    /// The side that is lost for good, says the user.
    #[must_use]
    pub const fn give_up(&self) -> Option<Side> {
        self.give_up
    }

    /// Keys that were lost with a side that was given up, at most.
    #[must_use]
    pub fn keys_lost(&self) -> u64 {
        self.lost.map_or(0, |(_, keys)| keys)
    }

    /// For so long a leg may hold clients back before it moves, microseconds: twice as long after each leg that has not
    /// begun.
    #[must_use]
    pub fn drain_patience_us(&self) -> u64 {
        let us = self.drain_us.saturating_mul(2).clamp(DRAIN_PATIENCE_US, DRAIN_PATIENCE_MAX_US);
        us.saturating_mul(1 << self.failed_leg_starts.min(16)).min(DRAIN_PATIENCE_MAX_US)
    }

    /// The slots of the next leg: whole ones, as many as have `keys_max` keys. `without`: those that are in the one
    /// under way.
    pub fn cut(&self, listed: &impl Listed, keys_max: u32, without: &[bool]) -> Vec<Slot> {
        let mut slots = Vec::new();
        let mut keys = 0;
        let mut big_bytes = 0;
        if self.order.how.is_one_leg() {
            return self.slots_left.iter().copied().collect();
        }
        let left = self.slots_left.iter().filter(|slot| !without.get(slot.index()).is_some_and(|without| *without));
        // Those in which scripts write what they do not name come last and together: their keys have to be listed once
        // more.
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

/// Both nodes are reached, however long that takes, and then this is done.
fn reach(then: Step) -> Step {
    Step::Reach { side: Side::Source, then: Box::new(then) }
}

/// The nodes of an open leg are reached, as far as it needs them, and then it goes on.
fn reach_for(open: &OpenLeg) -> Step {
    let side = if open.given_up == Some(Side::Source) { Side::Target } else { Side::Source };
    Step::Reach { side, then: Box::new(Step::Clocks(LegSlots { number: open.leg, slots: open.slots.clone() })) }
}

fn rest(us: u64, doing: &str, then: Step) -> Step {
    Step::Rest { us, doing: doing.to_owned(), then: Box::new(then) }
}

fn stopped(why: &str) -> Step {
    Step::End(MoveEnd::Stopped(why.to_owned()))
}
