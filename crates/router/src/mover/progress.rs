//! What a mover shows of its move: how far it is, which node it waits for, and for how long it has come no further.

use std::time::{Duration, Instant};

use switchyard_policy::migration::{Phase, Progress, Side};

use super::run::Mover;
use super::{BigKeys, MoveEnd};
use crate::shared::lock;

/// How often progress is published.
const SHOW: Duration = Duration::from_millis(100);

/// How a move went lately.
#[derive(Debug)]
pub(super) struct Shown {
    at: Instant,
    /// Keys and bytes when the rate was last taken.
    rate_from: (Instant, u64, u64),
    rates: (f64, f64),
    /// Since when a side is not connected.
    unconnected: [Option<Instant>; 2],
    /// How far it was, and since when it is no further.
    came: ((u64, usize, u64, Option<Phase>), Instant),
}

impl Shown {
    /// Of a move that has done so much with the routers before this one.
    pub(super) fn new(keys: u64, bytes: u64) -> Self {
        let now = Instant::now();
        Self { at: now, rate_from: (now, keys, bytes), rates: (0.0, 0.0), unconnected: [None; 2], came: ((0, 0, 0, None), now) }
    }
}

impl Mover {
    /// Publishes progress, from time to time.
    pub(super) fn show(&mut self, leg: Option<Progress>) {
        if self.shown.at.elapsed() < SHOW {
            return;
        }
        self.shown.at = Instant::now();
        self.publish_progress(leg);
        self.follow_primaries();
    }

    /// A node has another primary: the connection to the old one is worth nothing.
    fn follow_primaries(&mut self) {
        let plan = self.shared.plan();
        for side in [Side::Source, Side::Target] {
            let end = self.end_mut(side);
            let address = plan.address_of(end.node, None);
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
        let keys = self.before.keys_moved + now.keys_moved;
        let bytes = self.before.bytes_moved + now.bytes_moved;
        // Of a leg that goes back only what has not come back yet has moved.
        let moved = if now.phase == Phase::Returning { self.before.keys_moved + now.left.min(now.keys_moved) } else { keys };
        let (from, keys_then, bytes_then) = self.shown.rate_from;
        let seconds = from.elapsed().as_secs_f64();
        if seconds >= 1.0 {
            self.shown.rates = (keys.saturating_sub(keys_then) as f64 / seconds, bytes.saturating_sub(bytes_then) as f64 / seconds);
            self.shown.rate_from = (Instant::now(), keys, bytes);
        }
        let total = self.moved_before_listing + self.listed;
        let left = total.saturating_sub(moved);
        let lost = self.note_unconnected();
        let is_at = (keys, self.life.slots_left().len(), self.listed, leg.map(|leg| leg.phase));
        if self.shown.came.0 != is_at || self.life.is_paused() {
            self.shown.came = (is_at, Instant::now());
        }
        let mut progress = lock(&self.own.progress);
        let before = progress.clone();
        progress.doing.clone_from(&self.doing);
        progress.phase = leg.map(|leg| leg.phase);
        progress.paused = self.life.is_paused();
        progress.slots_done = (self.life.order().slots.len() - self.life.slots_left().len()) as u32;
        progress.aborting = self.life.is_aborted();
        progress.leg_left = leg.map(|leg| leg.left);
        progress.lost = lost;
        progress.keys_lost = self.life.keys_lost();
        progress.idle_seconds = self.shown.came.1.elapsed().as_secs_f64();
        progress.keys_listed = total;
        progress.listed = self.is_listed;
        progress.keys_moved = moved;
        progress.bytes_moved = bytes;
        progress.pulled = self.before.pulled + now.pulled;
        progress.repeated = self.before.repeated + now.repeated;
        progress.late = self.late;
        progress.big = BigKeys { under_way: self.staging.shown(), ..self.big.shown.clone() };
        lock(&self.shared.moved).grow(&before, &progress);
        progress.keys_per_second = self.shown.rates.0;
        progress.bytes_per_second = self.shown.rates.1;
        progress.seconds_left = (self.is_listed && self.shown.rates.0 > 0.0).then(|| left as f64 / self.shown.rates.0);
        progress.seconds = self.seconds_before + self.began.elapsed().as_secs_f64();
        progress.records = self.records;
    }

    /// The side that is not connected, for how many seconds: the one that has been so for longer.
    fn note_unconnected(&mut self) -> Option<(Side, f64)> {
        let sides = [Side::Source, Side::Target];
        for (at, side) in sides.into_iter().enumerate() {
            let is_connected = self.end(side).connection.is_some();
            self.shown.unconnected[at] = if is_connected { None } else { self.shown.unconnected[at].or(Some(Instant::now())) };
        }
        let since = sides.into_iter().zip(self.shown.unconnected).filter_map(|(side, since)| Some((side, since?.elapsed().as_secs_f64())));
        since.max_by(|(_, one), (_, other)| one.total_cmp(other))
    }

    pub(super) fn finish(&mut self, end: &MoveEnd) {
        self.doing = match end {
            MoveEnd::Done => "done".to_owned(),
            MoveEnd::Stopped(why) => why.clone(),
        };
        self.publish_progress(None);
        lock(&self.own.progress).end = Some(end.clone());
        // Who waited for quiet need not.
        self.say_quiet();
    }
}
