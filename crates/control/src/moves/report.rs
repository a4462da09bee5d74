//! Reports of moves: for the API, and as metrics.

use switchyard_policy::migration::{Cause, Goal, Phase, Protocol};
use switchyard_policy::topology::MoveId;
use switchyard_resp::units::counted;

use super::Moves;
use super::aborting::UnreachableSide;
use super::colocate::report_of;
use super::messages::{DURABILITIES, keyword_of};
use super::queue::Planned;
use crate::admin::{BigKeyReport, JournalReport, MoveReport, MoveState, MovesReport};
use crate::metrics::Page;

/// Progress in percent: by keys after listing, else by slots.
fn percent(report: &MoveReport) -> f64 {
    let part = |done: u64, all: u64| if all == 0 { 0.0 } else { 100.0 * done.min(all) as f64 / all as f64 };
    let slots = part(report.slots_done, report.slots);
    if report.listed { part(report.keys_moved, report.keys_listed).max(slots) } else { slots }
}

/// Adds the metrics of moves that both kinds of storage have.
pub(crate) fn add_state_metrics(page: &mut Page, moves: &[MoveReport], (done, stopped): (u64, u64), in_trouble: usize) {
    let open = |state| moves.iter().filter(|m| m.state == state).count() as f64;
    page.gauge("moves_running", "Moves in progress", open(MoveState::Running));
    page.gauge("moves_paused", "Moves paused by an operator", open(MoveState::Paused));
    page.gauge("moves_aborting", "Moves that end because an operator has aborted them", open(MoveState::Aborting));
    page.gauge("moves_queued", "Moves that wait until their nodes are free", open(MoveState::Queued));
    let left = moves.iter().map(|m| m.slots - m.slots_done.min(m.slots)).sum::<u64>();
    page.gauge("moves_slots_left", "Slots that moves have yet to hand over", left as f64);
    let help = "Moves that have ended, by how: done, or stopped early";
    page.counters("moves_ended", help, "how", [("done", done as f64), ("stopped", stopped as f64)]);
    let help = "Moves that wait for a lost node, cannot start, or have made no progress for a minute";
    page.gauge("moves_in_trouble", help, in_trouble as f64);
}

impl Moves {
    pub(crate) fn report(&self) -> MovesReport {
        self.refresh();
        let state = self.state();
        let journal = self.ledger.status();
        let mut moves: Vec<MoveReport> = state.open.iter().map(|(id, planned)| self.report_of(*id, planned)).collect();
        let ended = state.ended.iter().cloned().collect();
        drop(state);
        if let Some(error) = &journal.write_error {
            // No move gets past its next record, regardless of its activity.
            moves.iter_mut().filter(|m| m.state == MoveState::Running).for_each(|m| m.activity.clone_from(error));
        }
        let journal = JournalReport {
            bytes: journal.bytes,
            records: journal.entries,
            syncs: journal.syncs,
            length: journal.length,
            write_error: journal.write_error,
        };
        MovesReport { moves, ended, journal, brought_home: self.colocations.report(), ..MovesReport::default() }
    }

    pub(super) fn report_of(&self, id: MoveId, planned: &Planned) -> MoveReport {
        let progress = planned.progress.as_ref();
        let waits = match (&planned.trouble, planned.steering.paused) {
            (Some(trouble), _) if !planned.begun => format!("cannot start: {trouble}"),
            _ if !planned.begun && planned.resume.as_ref().is_some_and(|resume| resume.leg.is_some()) => {
                "resumes after a restart".to_owned()
            }
            (_, true) if planned.was_begun() && !planned.begun => "paused".to_owned(),
            (_, true) if !planned.begun => "paused before it started".to_owned(),
            _ if !planned.begun => "waits until its nodes are free".to_owned(),
            _ => "begins".to_owned(),
        };
        let leg_left = self.abort_state(id, planned).leg_left;
        let activity = match progress {
            Some(progress) if progress.phase == Some(Phase::Returning) && !planned.steering.aborting => {
                format!("{}, rolling back", progress.activity)
            }
            Some(progress) => progress.activity.clone(),
            None => waits,
        };
        let activity = match leg_left.filter(|_| planned.steering.aborting) {
            Some(left) if progress.is_some_and(|progress| progress.lost == [None; 2]) => {
                format!("aborting: {} left", counted(left, "key"))
            }
            Some(left) => format!("aborting: {} left; {activity}", counted(left, "key")),
            None => activity,
        };
        let state = match planned.begun {
            _ if planned.steering.aborting => MoveState::Aborting,
            _ if planned.steering.paused => MoveState::Paused,
            true => MoveState::Running,
            false => MoveState::Queued,
        };
        let order = &planned.order;
        let (pattern, home_for) = match &order.cause {
            Cause::Requested(pattern) => (pattern.clone(), Vec::new()),
            Cause::Needed(by) => (None, report_of(by)),
            Cause::Planned => (None, Vec::new()),
        };
        let mut report = MoveReport {
            id: id.0,
            from: self.name(order.source),
            to: self.name(order.target),
            state,
            activity,
            protocol: keyword_of(&Protocol::ALL, order.how.protocol).to_owned(),
            durability: keyword_of(&DURABILITIES, order.how.durability).to_owned(),
            goal: keyword_of(&Goal::ALL, order.how.goal).to_owned(),
            max_rate: order.how.max_rate,
            source_ops_max: order.how.source_ops_max,
            keys: order.keys.as_ref().map(|keys| keys.len() as u64),
            pattern,
            home_for,
            planned: order.cause == Cause::Planned,
            slots: order.slots.len() as u64,
            slots_done: planned.resume.as_ref().map_or(0, |resume| resume.handed_over.len() as u64),
            keys_moved: planned.so_far.keys_moved,
            bytes_moved: planned.so_far.bytes_moved,
            pulled: planned.so_far.pulled,
            repeated: planned.so_far.repeated,
            keys_lost: planned.lost.unwrap_or(0),
            seconds: planned.so_far.seconds,
            ..MoveReport::default()
        };
        if let Some(progress) = progress {
            report.slots_done = u64::from(progress.slots_done);
            report.keys_listed = progress.keys_listed;
            report.listed = progress.listed;
            report.keys_moved = progress.keys_moved;
            report.bytes_moved = progress.bytes_moved;
            report.leg_keys_left = leg_left;
            report.waits_for = UnreachableSide::awaited(planned, 0.0)
                .filter(|_| leg_left.is_some())
                .map(|unreached| self.name(unreached.node));
            report.keys_lost = report.keys_lost.max(progress.keys_lost);
            report.idle_seconds = progress.idle_seconds;
            report.pulled = progress.pulled;
            report.repeated = progress.repeated;
            report.late_moved = progress.late.moved;
            report.late_removed = progress.late.removed;
            report.late_left = progress.late.left;
            report.big_in_pieces = progress.big.in_pieces;
            report.big_whole = progress.big.whole;
            report.big_whole_max_us = progress.big.whole_us_max;
            report.big_whole_last.clone_from(&progress.big.whole_last);
            let big = progress.big.in_progress.iter();
            report.big = big
                .map(|big| BigKeyReport {
                    kind: big.kind.to_owned(),
                    bytes: big.bytes,
                    copied: big.copied,
                    is_read: big.is_read,
                    restarts: big.restarts,
                })
                .collect();
            report.holds = progress.holds.count;
            report.hold_p50_us = progress.holds.p50_us;
            report.hold_p99_us = progress.holds.p99_us;
            report.hold_max_us = progress.holds.max_us;
            report.keys_per_second = progress.keys_per_second;
            report.bytes_per_second = progress.bytes_per_second;
            report.seconds_left = progress.seconds_left;
            report.seconds = progress.seconds;
        }
        report.percent = percent(&report);
        report
    }

    /// Adds metrics of moves, in addition to the router's counters.
    pub(crate) fn add_metrics(&self, page: &mut Page) {
        let report = self.report();
        let most = |field: fn(&MoveReport) -> u64| report.moves.iter().map(field).max().unwrap_or(0) as f64;
        let ended = {
            let state = self.state();
            (state.done, state.stopped)
        };
        let warnings = self.warnings();
        let in_trouble = warnings.iter().filter(|warning| warning.id.is_some()).count();
        add_state_metrics(page, &report.moves, ended, in_trouble);
        let help = "Longest time that a move in progress has held a command back";
        page.gauge("moves_hold_max_seconds", help, most(|m| m.hold_max_us) / 1e6);
        let help = "Time that a move in progress has held commands back, 99th percentile; maximum over moves";
        page.gauge("moves_hold_p99_seconds", help, most(|m| m.hold_p99_us) / 1e6);
        let help = "Longest time for moving a big key whole, over moves in progress";
        page.gauge("moves_big_key_whole_max_seconds", help, most(|m| m.big_whole_max_us) / 1e6);
        let help = "Slots in transit with unusable keys, because a node of their move does not reply";
        page.gauge("moves_lost_slots", help, warnings.iter().map(|warning| warning.slots).sum::<u64>() as f64);
        let help = "1 while the state directory cannot be written, or lacks space for a new move";
        page.gauge("state_directory_trouble", help, f64::from(u8::from(self.disk_trouble().is_some())));
        let journal = &report.journal;
        page.counter("moves_journal_bytes", "Bytes written to the journal of moves", journal.bytes as f64);
        page.counter("moves_journal_records", "Records made durable in the journal of moves", journal.records as f64);
        page.counter(
            "moves_journal_syncs",
            "Times that the journal of moves has waited for the disk",
            journal.syncs as f64,
        );
        page.gauge("moves_journal_length_bytes", "Length of the journal of moves", journal.length as f64);
        let trouble = f64::from(u8::from(journal.write_error.is_some()));
        page.gauge("moves_journal_trouble", "1 while the journal of moves cannot be written", trouble);
        let homes: Vec<_> =
            report.brought_home.iter().map(|home| (home.command.to_ascii_lowercase(), home.keys as f64)).collect();
        let help = "Keys brought to others because a command needed them together, by command";
        page.counters(
            "moves_brought_home_keys",
            help,
            "command",
            homes.iter().map(|(command, keys)| (command.as_str(), *keys)),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_counts_slots_until_all_keys_are_listed() {
        let report = MoveReport { slots: 100, slots_done: 25, keys_moved: 1500, ..MoveReport::default() };
        assert_eq!(percent(&report), 25.0);
        assert_eq!(percent(&MoveReport { listed: true, keys_listed: 3000, ..report.clone() }), 50.0);
        assert_eq!(
            percent(&MoveReport { listed: true, keys_listed: 1000, ..report }),
            100.0,
            "keys created in the meantime"
        );
        assert_eq!(percent(&MoveReport::default()), 0.0);
    }
}
