//! Life of a move: executes its steps (`switchyard_policy::migration::life`), like the thread of the router's mover,
//! and reports their results.
//!
//! The clock of a move is 100 times as fast as the world's, because its rests are longer than a run.

use switchyard_policy::migration::life::{Begin, LegSlots, Step, StepResult};
use switchyard_policy::migration::record::{OpenMove, Record};
use switchyard_policy::migration::{
    Cause, Event, MoveOptions, MoveOrder, MoveStateMachine, Outcome, Side, UserRequest,
};
use switchyard_policy::topology::{MoveId, NodeId};

use super::{FAILED_STARTS_MAX, Lane, Mover, SlotView, Stage, ix};
use crate::injected::Bug;
use crate::world::{Ev, World, say};

/// Speed of a move's clock relative to the world's.
const FAST: u64 = 100;

impl Mover {
    /// Whether a leg that the previous router left is current or next.
    pub(super) fn has_open_leg(&self) -> bool {
        self.life.as_ref().is_some_and(|life| life.open().is_some())
    }

    pub(super) fn are_both_ready(&self) -> bool {
        self.links.iter().all(|link| link.ready)
    }

    pub(super) fn how(&self) -> MoveOptions {
        MoveOptions {
            protocol: self.protocol,
            durability: self.durability,
            paper: self.paper,
            ..MoveOptions::default()
        }
    }

    fn order(&self) -> MoveOrder {
        let how = self.how();
        let (source, target) = (NodeId(self.source as u16), NodeId(self.target as u16));
        MoveOrder { source, target, slots: self.slots.clone(), keys: None, how, cause: Cause::Requested(None) }
    }
}

impl World {
    /// Begins the next move, or resumes the open one of the journal.
    pub(crate) fn next_move(&mut self, lane: Lane) {
        if self.movers[lane].stage != Stage::Idle {
            return;
        }
        if let Some(open) = self.movers[lane].resume.take() {
            self.live(lane, Some(open));
            return;
        }
        if self.movers[lane].moves_left == 0 {
            self.movers[lane].stage = Stage::Over;
            return;
        }
        self.movers[lane].moves_left -= 1;
        self.fleet.last_move += 1;
        self.movers[lane].move_id = self.fleet.last_move;
        self.draw_move(lane);
        let m = &self.movers[lane];
        let keys = m.scope.as_ref().map(|scope| {
            let mut keys: Vec<_> = scope.iter().map(|key| self.keys[*key].clone()).collect();
            keys.sort_unstable();
            keys.into()
        });
        let records = MoveOrder { keys, ..m.order() }.records(MoveId(m.move_id));
        self.movers[lane].stage = Stage::Accepting;
        self.write(lane, None, records);
    }

    /// Begins a move that is on record.
    pub(super) fn live(&mut self, lane: Lane, resume: Option<OpenMove>) {
        let resume =
            if self.bug(Bug::OpenLegForgotten) { resume.map(|open| OpenMove { leg: None, ..open }) } else { resume };
        let m = &mut self.movers[lane];
        (m.tries, m.list) = (0, super::List::default());
        let names = ["source", "target"].map(str::to_owned);
        let begin = Begin { order: m.order(), names, resume, aborted: false, give_up: None };
        let (life, step) = MoveStateMachine::begin(begin, self.now * FAST);
        m.life = Some(life);
        self.do_steps(lane, step);
    }

    /// Handles the result of the current step.
    pub(super) fn on_step_result(&mut self, lane: Lane, came: StepResult) {
        let now = self.now * FAST;
        self.movers[lane].barrier = None;
        let Some(life) = &mut self.movers[lane].life else { return };
        let step = life.on_result(came, now);
        self.do_steps(lane, step);
    }

    /// Executes steps until one takes time.
    fn do_steps(&mut self, lane: Lane, mut step: Step) {
        loop {
            say!(self, "move {}: {step:?}", self.movers[lane].move_id);
            self.movers[lane].turn += 1;
            self.movers[lane].step = Some(step.clone());
            // Staging and legs report by themselves that they have quiesced.
            if self.fleet.flush.is_some() && !matches!(step, Step::Stage(_) | Step::Leg(_)) {
                self.on_quiesced(lane);
            }
            // A leg ends in another way.
            let is_left = !matches!(step, Step::Leg(_) | Step::End(_)) && self.is_cut_short(lane);
            let came = if is_left { Some(StepResult::Aborted) } else { self.do_step(lane, step) };
            let (Some(came), Some(life)) = (came, &mut self.movers[lane].life) else { return };
            step = life.on_result(came, self.now * FAST);
        }
    }

    /// Executes a step. Returns its result, or `None` if that comes later.
    fn do_step(&mut self, lane: Lane, step: Step) -> Option<StepResult> {
        let ready = self.movers[lane].are_both_ready();
        match step {
            Step::Connect { side, .. } => {
                self.movers[lane].stage = Stage::Connecting;
                let link = &self.movers[lane].links[ix(side)];
                if link.ready {
                    return Some(StepResult::Done);
                }
                if link.conn.is_none() {
                    self.dial_mover(lane, ix(side));
                }
                None
            }
            Step::Rest { us, .. } => {
                self.movers[lane].stage = Stage::Resting;
                let (turn, us) = (self.movers[lane].turn, us / FAST);
                let delay = self.random.between(us / 4, us);
                self.after(delay, Ev::Rested { lane, turn });
                None
            }
            Step::HandleRequests => Some(StepResult::Done),
            Step::Leg(cut) => self.do_leg(lane, &cut),
            Step::End(_) => {
                self.end_move(lane);
                None
            }
            _ if !ready => Some(StepResult::Lost),
            Step::Check | Step::LearnWaits | Step::Functions | Step::Room(_) | Step::CheckSource => {
                Some(StepResult::Done)
            }
            Step::List | Step::Observe => {
                let epoch = self.publish(lane, SlotView::Observed);
                self.movers[lane].stage = Stage::Observing;
                if self.bug(Bug::ListedTooEarly) {
                    return self.observed(lane);
                }
                self.movers[lane].barrier = Some(epoch);
                self.movers[lane].requested_us = self.now;
                None
            }
            Step::Measure => {
                self.draw_leg(lane);
                self.movers[lane].stager.begin_leg(self.planted);
                Some(StepResult::Cut(self.movers[lane].leg_slots.clone()))
            }
            Step::Clocks(_) => {
                let skew_us = self.nodes[0].ahead_us.abs_diff(self.nodes[1].ahead_us);
                let differ = skew_us > self.scenario.skew && !self.bug(Bug::ClocksNotCompared);
                Some(if differ {
                    StepResult::Refused(format!("the clocks differ by {skew_us} us"))
                } else {
                    StepResult::Done
                })
            }
            Step::Stage(_) => self.stage_big(lane),
        }
    }

    /// Continues after the drain: workers report their writes, and no earlier command is in flight.
    pub(super) fn observed(&mut self, lane: Lane) -> Option<StepResult> {
        let (now, asked_us) = (self.now, self.movers[lane].requested_us);
        let m = &mut self.movers[lane];
        m.life.iter_mut().for_each(|life| life.drained(now.saturating_sub(asked_us)));
        if m.step == Some(Step::List) && !m.are_both_ready() {
            return Some(StepResult::Lost);
        }
        if m.step == Some(Step::List) && m.scope.is_none() {
            self.list(lane);
            return None;
        }
        m.list.is_whole = true;
        Some(StepResult::Done)
    }

    fn do_leg(&mut self, lane: Lane, cut: &LegSlots) -> Option<StepResult> {
        let m = &mut self.movers[lane];
        m.leg = cut.number;
        m.leg_slots.clone_from(&cut.slots);
        if !m.has_open_leg() {
            if !m.are_both_ready() {
                return Some(StepResult::Lost);
            }
            m.watched.killed = [false; 2];
        }
        self.begin_machine(lane);
        None
    }

    /// Ends a rest.
    pub(crate) fn rested(&mut self, lane: Lane, turn: u64) {
        if self.router_up && self.movers[lane].turn == turn && self.movers[lane].stage == Stage::Resting {
            self.on_step_result(lane, StepResult::Done);
        }
    }

    /// Handles an established or broken connection outside of a leg.
    pub(super) fn reached(&mut self, lane: Lane, side: usize, is_there: bool) {
        let asks = matches!(self.movers[lane].step, Some(Step::Connect { side: asked, .. }) if ix(asked) == side);
        match self.movers[lane].stage {
            Stage::Connecting if asks && is_there => self.on_step_result(lane, StepResult::Done),
            Stage::Connecting if asks => {
                self.on_step_result(lane, StepResult::Refused("its connection broke".to_owned()))
            }
            Stage::Listing if !is_there => self.on_step_result(lane, StepResult::Lost),
            // Noticed at the next use.
            _ => {}
        }
    }

    fn is_cut_short(&self, lane: Lane) -> bool {
        self.movers[lane].life.as_ref().is_some_and(MoveStateMachine::is_cut_short)
    }

    /// Passes an operator's request to the current move.
    pub(crate) fn steer(&mut self, lane: Lane, steer: UserRequest) {
        let Some(life) = &mut self.movers[lane].life else { return };
        life.on_user_request(steer);
        if self.movers[lane].driver.is_some() {
            self.mover_event(lane, Event::RollBack);
            if let UserRequest::GiveUp(side) = steer {
                self.mover_event(lane, Event::GiveUp { side });
            }
        } else if self.is_cut_short(lane) {
            self.on_step_result(lane, StepResult::Aborted);
        }
    }

    /// Continues a move after the end of a leg.
    pub(super) fn continue_life(&mut self, lane: Lane, outcome: Outcome) {
        let m = &mut self.movers[lane];
        match &outcome {
            Outcome::Moved => {
                // Published already.
                (m.slots, m.shown) = (m.rest(), SlotView::Observed);
                m.tries = 0;
            }
            Outcome::NotBegun { .. } => m.tries += 1,
            Outcome::Returned { .. } => {}
        }
        if m.tries >= FAILED_STARTS_MAX {
            m.life.iter_mut().for_each(|life| life.on_user_request(UserRequest::Abort));
        }
        self.on_step_result(lane, StepResult::Ended(outcome));
    }

    fn end_move(&mut self, lane: Lane) {
        let move_id = MoveId(self.movers[lane].move_id);
        self.staging_is_over(lane);
        for side in 0..2 {
            self.release_link(lane, side);
        }
        if self.bug(Bug::ForgottenAtTheEnd) {
            self.fleet.broken = Default::default();
        }
        self.write(lane, None, vec![Record::Ended { move_id }]);
        (self.movers[lane].life, self.movers[lane].step) = (None, None);
        self.movers[lane].list = super::List::default();
        self.movers[lane].leg_slots.clear();
        if !self.movers[lane].transits().is_empty() {
            self.publish(lane, SlotView::Nothing);
        }
        self.movers[lane].shown = SlotView::Nothing;
        self.movers[lane].stage = Stage::Idle;
        let when = self.random.between(500, 10_000);
        self.after(when, Ev::NextMove { lane });
    }

    /// Returns the side of the current leg that the operator has abandoned.
    pub(super) fn steered_without(&self, lane: Lane) -> Option<Side> {
        self.movers[lane].life.as_ref().and_then(MoveStateMachine::give_up)
    }
}
