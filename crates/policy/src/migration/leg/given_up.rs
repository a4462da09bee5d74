//! A side that the user declares lost for good: the leg ends at the other side, with the keys it has.
//!
//! - **The target.** The leg goes back as after a loss of its target, but without waiting for keys on record as moved:
//!   they are lost, unless the source still has them and they never left it.
//! - **The source.** Nothing more can be read. Values already read are still stored, the keys at the target are served,
//!   and the target owns the slots. A leg that was going back turns again, so that no command sent to the source can
//!   get a reply after the hand-over.
//!
//! A lost side that comes back serves no client: it does not own the slots, and the next leg that meets it purges it.

use super::{Bug, Leg, QuiesceState, State, Work, name};
use crate::migration::{Action, Io, LegOrder, Phase, Record, Side};

/// Returns the reason of the end, for display.
pub(super) fn why(side: Side) -> String {
    format!("the {} was abandoned by the user", name(side))
}

impl<W: Work> Leg<W> {
    pub(super) fn user_gives_up(&mut self, side: Side, actions: &mut Vec<Action>) {
        if self.shell.given_up.is_some()
            || matches!(self.shell.state, State::Ending { .. } | State::HandingOver | State::Ended)
        {
            return;
        }
        if !self.shell.is_lost(side) {
            actions
                .push(Action::Io(Io::Report { text: format!("the {} replies, so it is not abandoned", name(side)) }));
            return;
        }
        if !self.shell.has_started && !matches!(self.shell.state, State::Starting { .. }) {
            self.shell.give_up(why(side), actions);
            return;
        }
        let LegOrder { move_id, leg, .. } = self.shell.orders;
        let record = self.shell.record(Record::GivenUp { move_id, leg, side }, actions);
        (self.shell.given_up, self.shell.given_up_record) = (Some(side), Some(record));
        match side {
            Side::Target if !self.shell.rolls_back => {
                self.shell.rollback_reason.get_or_insert_with(|| why(side));
            }
            // There is no source to return to. A rollback already started turns again.
            Side::Source if !self.shell.rolls_back && !matches!(self.shell.state, State::RecordingRollback { .. }) => {
                self.shell.rollback_reason = None
            }
            Side::Source | Side::Target => {}
        }
    }

    /// Ends the leg without the lost side, once nothing is in flight at the other side.
    pub(super) fn go_on_without(&mut self, now_us: u64, actions: &mut Vec<Action>) {
        let Some(side) = self.shell.given_up.filter(|side| self.shell.is_given_up(*side)) else { return };
        let is_at_the_wrong_end = side == Side::Source && self.shell.rolls_back;
        self.work.drop_without(&mut self.shell, is_at_the_wrong_end);
        if !self.work.is_idle() || self.shell.quiet != QuiesceState::No {
            return;
        }
        if is_at_the_wrong_end && !self.shell.planted.is(Bug::GivenUpWithoutDrain) {
            self.shell.rolls_back = false;
            self.shell.rollback_reason = None;
            self.shell.progress.phase = Phase::Moving;
            if W::SERVES {
                self.shell.state = State::Draining { since_us: now_us };
                actions.push(Action::Announce { double_read: None });
                return;
            }
        }
        if !self.shell.usable(side.other()) || !self.shell.is_confirmed(side.other(), actions) {
            return;
        }
        (self.shell.rolls_back, self.shell.listed, self.shell.list_ended) =
            (side == Side::Target, Default::default(), true);
        let keys = if W::SERVES { self.shell.away_now() } else { self.shell.may_have_moved() };
        actions.push(Action::Lost {
            keys: if self.shell.rolls_back { keys.iter().copied().collect() } else { Vec::new() },
        });
        self.shell.record_end(actions);
    }
}
