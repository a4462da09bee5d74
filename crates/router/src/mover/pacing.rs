//! Pace of a move: collects measurements of clients, nodes and batches for `switchyard_policy::migration::pace`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use switchyard_policy::migration::pace::{Observation, Pacer};
use switchyard_policy::migration::{Goal, MoveOptions, Pace, Progress, Protocol, Side, UserRequest};
use switchyard_policy::topology::MoveId;
use tracing::trace;

use super::run::{Mover, MoverExit};
use crate::lock::lock;
use crate::metrics::{Waits, WorkerCounters};

/// Interval between changes of the pace.
const PACE: Duration = Duration::from_millis(100);

/// Interval between load queries to both nodes.
const LOAD_INTERVAL: Duration = Duration::from_millis(500);

/// Duration of the baseline measurement of client waits, before the move.
const BASELINE: Duration = Duration::from_millis(500);

/// Minimum duration of earlier wait records to replace the baseline measurement.
const EARLIER_MIN: Duration = Duration::from_secs(3);

/// Maximum collection time of client waits if commands are few.
const FEW_WAITS: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct Pacing {
    pacer: Pacer,
    /// A client waits for the end of the current leg.
    hurried: bool,
    /// Last batch: duration in microseconds and keys. Then time, keys and bytes at the last change of the pace.
    batch: Option<(u64, u32)>,
    paced: Instant,
    paced_keys: u64,
    paced_bytes: u64,
    waits: Waits,
    waited_before: Option<u64>,
    waits_from: Instant,
    /// CPU use of the busier node since the last observation.
    node_cpu: Option<f64>,
    looked: Instant,
}

impl Pacing {
    /// `before`: totals of earlier router processes.
    pub(super) fn new(how: MoveOptions, before: &Progress, counters: &[Arc<WorkerCounters>]) -> Self {
        let now = Instant::now();
        let pacer = Pacer::new(how.goal, how.max_rate);
        // `source` has no paper mode, because its published form loses nothing.
        let is_published = how.paper.is_some() || how.protocol == Protocol::Source;
        Self {
            pacer: if is_published { pacer.published() } else { pacer },
            hurried: false,
            batch: None,
            paced: now,
            paced_keys: before.keys_moved,
            paced_bytes: before.bytes_moved,
            waits: Waits::so_far(counters),
            waited_before: None,
            waits_from: now,
            node_cpu: None,
            looked: now,
        }
    }

    pub(super) fn steer(&mut self, steer: UserRequest) {
        match steer {
            UserRequest::Goal(goal) => self.pacer.set_goal(goal),
            UserRequest::MaxRate(rate) => self.pacer.set_max_rate(rate),
            UserRequest::SourceOpsMax(_)
            | UserRequest::Pause
            | UserRequest::Resume
            | UserRequest::Abort
            | UserRequest::GiveUp(_) => {}
        }
    }

    pub(super) fn pace(&self) -> Pace {
        if self.hurried { self.pacer.full_speed() } else { self.pacer.pace() }
    }

    /// Returns the number of keys of the next leg.
    pub(super) fn leg_keys(&self) -> u32 {
        self.pacer.leg_keys()
    }

    /// Sets whether a client waits for the end of the current leg.
    pub(super) fn hurry(&mut self, hurried: bool) {
        self.hurried = hurried;
    }

    /// Records the duration of a batch, from its copy to its end.
    pub(super) fn batch_ended(&mut self, length: Duration, keys: usize) {
        self.batch = Some((length.as_micros() as u64, keys as u32));
        self.pacer.batch_ended(length.as_micros() as u64, keys as u32);
    }

    /// `moving`: time since the drain of the leg.
    pub(super) fn leg_ended(&mut self, leg: &Progress, moving: Duration) {
        self.pacer.leg_ended(leg.keys_moved, leg.bytes_moved, moving.as_micros() as u64);
    }

    /// Returns a new pace every `PACE`, from the measurements since the last one. `moved`: keys and bytes of the whole
    /// move.
    fn renew(&mut self, id: MoveId, moved: (u64, u64), counters: &[Arc<WorkerCounters>]) -> Option<Pace> {
        let interval = self.paced.elapsed();
        if interval < PACE {
            return None;
        }
        let waits = Waits::so_far(counters);
        let (keys, bytes) = moved;
        let (batch_us, batch_keys) = self.batch.take().map_or((None, 0), |(us, keys)| (Some(us), keys));
        let clients_us = waits.p99_since(&self.waits);
        let seen = Observation {
            clients_us,
            before_us: self.waited_before,
            node_cpu: self.node_cpu.take(),
            batch_us,
            batch_keys,
            keys: keys.saturating_sub(self.paced_keys),
            bytes: bytes.saturating_sub(self.paced_bytes),
            interval_us: interval.as_micros() as u64,
        };
        // With few commands, waits are collected over a longer time.
        if clients_us.is_some() || self.waits_from.elapsed() >= FEW_WAITS {
            self.waits = waits;
            self.waits_from = Instant::now();
        }
        self.paced = Instant::now();
        (self.paced_keys, self.paced_bytes) = (keys, bytes);
        let _ = self.pacer.observe(&seen);
        trace!(move_id = id.0, ?seen, pacer = ?self.pacer, "paced");
        Some(self.pace())
    }

    /// Sets the baseline of client waits. `since`: start of earlier records, if there are enough.
    fn begin(&mut self, since: Option<&Waits>, waits: Waits) {
        self.waited_before = waits.p99_since(since.unwrap_or(&self.waits));
        self.waits = waits;
        self.waits_from = Instant::now();
        self.paced = Instant::now();
    }
}

impl Mover {
    /// Measures the baseline of client waits, before the move affects clients.
    pub(super) fn measure_baseline(&mut self) -> Result<(), MoverExit> {
        let began = self.shown.began();
        let lately = lock(&self.shared.recent_waits).since(began, EARLIER_MIN).cloned();
        while lately.is_none() && self.life.order().how.goal != Goal::Fast && began.elapsed() < BASELINE {
            self.rest(Duration::from_millis(20))?;
        }
        self.pacing.begin(lately.as_ref(), Waits::so_far(&self.shared.counters));
        Ok(())
    }

    /// Returns a new pace if it is due.
    pub(super) fn new_pace(&mut self, leg: Progress) -> Option<Pace> {
        self.pacing.renew(self.id, self.shown.moved(&leg), &self.shared.counters)
    }

    /// Queries the load of both nodes every `LOAD_INTERVAL`.
    pub(super) fn look_at_nodes(&mut self) {
        if self.pacing.looked.elapsed() >= LOAD_INTERVAL {
            self.pacing.looked = Instant::now();
            self.source.request_load();
            self.target.request_load();
        }
    }

    /// Records the load of a node from its reply.
    pub(super) fn note_load(&mut self, side: Side, answers: &[Vec<u8>]) {
        if let Some(cpu) = self.end_mut(side).cpu_share(answers) {
            self.pacing.node_cpu = Some(self.pacing.node_cpu.map_or(cpu, |other| other.max(cpu)));
        }
    }
}
