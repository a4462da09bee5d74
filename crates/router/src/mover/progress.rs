//! Progress reports of a move: totals, rates, current activity, and time without progress.

use std::time::{Duration, Instant};

use switchyard_policy::migration::{Phase, Progress, Side};

use super::big::BigKeys;
use super::run::Mover;
use super::{MoveEnd, MoveTotals};
use crate::lock::lock;

/// Interval of progress reports.
const SHOW: Duration = Duration::from_millis(100);

/// Progress and recent rates of a move.
#[derive(Debug)]
pub(super) struct ProgressReport {
    /// Current activity, for display.
    activity: String,
    /// Totals of ended legs.
    before: Progress,
    began: Instant,
    /// Seconds spent in earlier router processes.
    seconds_before: f64,
    records: u64,
    at: Instant,
    /// Time, keys and bytes at the last rate computation.
    rate_from: (Instant, u64, u64),
    rates: (f64, f64),
    /// Start of the current outage of source and target.
    unconnected: [Option<Instant>; 2],
    /// Last position with progress, and its time.
    last_progress: ((u64, usize, u64, Option<Phase>), Instant),
}

impl ProgressReport {
    /// Starts from the totals of earlier router processes.
    pub(super) fn new(so_far: &MoveTotals) -> Self {
        let now = Instant::now();
        let &MoveTotals { keys_moved, bytes_moved, pulled, repeated, seconds } = so_far;
        Self {
            activity: "connecting".to_owned(),
            before: Progress { keys_moved, bytes_moved, pulled, repeated, ..Progress::NONE },
            began: now,
            seconds_before: seconds,
            records: 0,
            at: now,
            rate_from: (now, keys_moved, bytes_moved),
            rates: (0.0, 0.0),
            unconnected: [None; 2],
            last_progress: ((0, 0, 0, None), now),
        }
    }

    /// Sets the current activity, for display.
    pub(super) fn set_activity(&mut self, activity: impl Into<String>) {
        self.activity = activity.into();
    }

    /// Counts records that are about to be written.
    pub(super) fn records(&mut self, count: usize) {
        self.records += count as u64;
    }

    /// `moved`: the keys stay at the target.
    pub(super) fn leg_ended(&mut self, leg: &Progress, moved: bool) {
        if moved {
            self.before.keys_moved += leg.keys_moved;
            self.before.bytes_moved += leg.bytes_moved;
        }
        self.before.pulled += leg.pulled;
        self.before.repeated += leg.repeated;
    }

    /// Start of the move in this process.
    pub(super) fn began(&self) -> Instant {
        self.began
    }

    /// Totals of ended legs.
    pub(super) fn before(&self) -> &Progress {
        &self.before
    }

    /// Keys and bytes moved, including the current leg.
    pub(super) fn moved(&self, leg: &Progress) -> (u64, u64) {
        (self.before.keys_moved + leg.keys_moved, self.before.bytes_moved + leg.bytes_moved)
    }
}

impl Mover {
    /// Publishes progress every `SHOW`, and checks for changed primaries.
    pub(super) fn publish_if_due(&mut self, leg: Option<Progress>) {
        if self.shown.at.elapsed() < SHOW {
            return;
        }
        self.shown.at = Instant::now();
        self.publish_progress(leg);
        self.follow_primaries();
    }

    /// Abandons connections to servers that are no longer the primary of their node.
    fn follow_primaries(&mut self) {
        let routing = self.shared.routing();
        for side in [Side::Source, Side::Target] {
            let end = self.end_mut(side);
            let address = routing.address_of(end.node, None);
            if let Some(connection) = &mut end.connection
                && address.is_some_and(|address| address != connection.address)
            {
                connection.abandon();
            }
        }
    }

    fn publish_progress(&mut self, leg: Option<Progress>) {
        self.own.share_temporary(self.staging.names());
        let now = leg.unwrap_or(Progress::NONE);
        let before = self.shown.before;
        let (keys, bytes) = self.shown.moved(&now);
        // In a leg that goes back, only keys not yet returned count as moved.
        let moved = if now.phase == Phase::Returning { before.keys_moved + now.left.min(now.keys_moved) } else { keys };
        let (from, keys_then, bytes_then) = self.shown.rate_from;
        let seconds = from.elapsed().as_secs_f64();
        if seconds >= 1.0 {
            self.shown.rates =
                (keys.saturating_sub(keys_then) as f64 / seconds, bytes.saturating_sub(bytes_then) as f64 / seconds);
            self.shown.rate_from = (Instant::now(), keys, bytes);
        }
        let total = self.list.total();
        let left = total.saturating_sub(moved);
        let lost = self.note_unconnected();
        let is_at = (keys, self.life.slots_left().len(), total, leg.map(|leg| leg.phase));
        if self.shown.last_progress.0 != is_at || self.life.is_paused() {
            self.shown.last_progress = (is_at, Instant::now());
        }
        let mut progress = lock(&self.own.progress);
        let shown_before = progress.clone();
        progress.activity.clone_from(&self.shown.activity);
        progress.phase = leg.map(|leg| leg.phase);
        progress.paused = self.life.is_paused();
        progress.slots_done = (self.life.order().slots.len() - self.life.slots_left().len()) as u32;
        progress.aborting = self.life.is_aborted();
        progress.leg_left = leg.map(|leg| leg.left);
        progress.leg_away = leg.map(|leg| leg.away);
        progress.lost = lost;
        progress.keys_lost = self.life.keys_lost();
        progress.idle_seconds = self.shown.last_progress.1.elapsed().as_secs_f64();
        progress.keys_listed = total;
        progress.listed = self.list.is_whole();
        progress.keys_moved = moved;
        progress.bytes_moved = bytes;
        progress.pulled = before.pulled + now.pulled;
        progress.repeated = before.repeated + now.repeated;
        progress.late = self.late_keys.late();
        progress.big = BigKeys { in_progress: self.staging.shown(), ..self.big.shown.clone() };
        lock(&self.shared.moved).grow(&shown_before, &progress);
        progress.keys_per_second = self.shown.rates.0;
        progress.bytes_per_second = self.shown.rates.1;
        progress.seconds_left =
            (self.list.is_whole() && self.shown.rates.0 > 0.0).then(|| left as f64 / self.shown.rates.0);
        progress.seconds = self.shown.seconds_before + self.shown.began.elapsed().as_secs_f64();
        progress.records = self.shown.records;
    }

    /// Returns the seconds since the connection to each side was lost.
    fn note_unconnected(&mut self) -> [Option<f64>; 2] {
        for (at, side) in [Side::Source, Side::Target].into_iter().enumerate() {
            let is_connected = self.end(side).connection.is_some();
            self.shown.unconnected[at] =
                if is_connected { None } else { self.shown.unconnected[at].or(Some(Instant::now())) };
        }
        self.shown.unconnected.map(|since| since.map(|since| since.elapsed().as_secs_f64()))
    }

    pub(super) fn finish(&mut self, end: &MoveEnd) {
        self.shown.set_activity(match end {
            MoveEnd::Done => "done",
            MoveEnd::Stopped(why) => why,
        });
        self.publish_progress(None);
        lock(&self.own.progress).end = Some(end.clone());
        // Releases workers that wait for a quiesce.
        self.report_quiesced();
    }
}
