//! A side that is lost for good: the user says so, and the leg ends at the other one with what is there.
//!
//! - **The target.** The leg goes back as it does when its target is lost. Then it does not wait for what is away: these keys are lost, but for those that the
//!   source still shows and that never left it.
//! - **The source.** Nothing more can be read. What was read is still stored, what is at the target is served, and the target owns the slots. A leg that
//!   was going back turns once more, so that nothing that was sent to the source can be answered after the slots are handed over.
//!
//! What a lost side does later, should it come back, reaches nobody: it does not own the slots, and the next leg that meets it purges it.

use super::{Bug, Leg, Quiet, State, name};
use crate::migration::{Action, Fingerprint, Orders, Phase, Record, Side};

/// Why the leg ends, for people.
pub(super) fn why(side: Side) -> String {
    format!("the {} was given up by the user", name(side))
}

impl Leg {
    /// Whether nothing of that side is waited for: it can be used, or it is lost for good.
    pub(super) fn usable_or_given_up(&self, side: Side) -> bool {
        self.usable(side) || self.given_up == Some(side)
    }

    pub(super) fn user_gives_up(&mut self, side: Side, actions: &mut Vec<Action>) {
        if self.given_up.is_some() || matches!(self.state, State::Ending { .. } | State::HandingOver | State::Ended) {
            return;
        }
        if !self.is_lost(side) {
            actions.push(Action::Report { text: format!("the {} answers, so it is not given up", name(side)) });
            return;
        }
        if !self.begun && !matches!(self.state, State::Starting { .. }) {
            self.give_up(why(side), actions);
            return;
        }
        let Orders { move_id, leg, .. } = self.orders;
        self.record(Record::GivenUp { move_id, leg, side }, actions);
        self.given_up = Some(side);
        match side {
            Side::Target if !self.rolls_back => {
                self.back.get_or_insert_with(|| why(side));
            }
            // There is nothing to go back to. Where that is decided already, it turns once more.
            Side::Source if !self.rolls_back && !matches!(self.state, State::RecordingRollback { .. }) => self.back = None,
            Side::Source | Side::Target => {}
        }
    }

    /// Ends the leg without that side, as soon as nothing is under way at the other.
    pub(super) fn go_on_without(&mut self, side: Side, now_us: u64, actions: &mut Vec<Action>) {
        let is_at_the_wrong_end = side == Side::Source && self.rolls_back;
        self.drop_what_cannot_be_done(is_at_the_wrong_end);
        if !self.batches.is_empty() || self.quiet != Quiet::No {
            return;
        }
        if is_at_the_wrong_end && !self.planted.is(Bug::GivenUpWithoutDrain) {
            self.rolls_back = false;
            self.back = None;
            self.progress.phase = Phase::Moving;
            self.state = State::Draining { since_us: now_us };
            actions.push(Action::Announce);
            return;
        }
        if !self.usable(side.other()) {
            return;
        }
        (self.rolls_back, self.listed, self.list_ended) = (side == Side::Target, Default::default(), true);
        let mut keys: Vec<Fingerprint> = if self.rolls_back { self.away.keys().copied().collect() } else { Vec::new() };
        keys.sort_unstable();
        actions.push(Action::Lost { keys });
        self.record_end(actions);
    }
}
