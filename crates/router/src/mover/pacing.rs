//! How fast a move goes: what is seen of clients, nodes and batches, given to `switchyard_policy::migration::pace` from
//! time to time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use switchyard_policy::migration::pace::{Observation, Pacer};
use switchyard_policy::migration::{Goal, MoveOptions, Pace, Progress, Side, UserRequest};
use switchyard_policy::topology::MoveId;
use tracing::trace;

use super::run::{Mover, MoverExit};
use crate::metrics::{Waits, WorkerCounters};
use crate::shared::lock;

/// How often the pace is looked at.
const PACE: Duration = Duration::from_millis(100);

/// How often both nodes are asked how much they work.
const LOOK: Duration = Duration::from_millis(500);

/// How clients wait without the move is looked at for so long.
const LEARN: Duration = Duration::from_millis(500);

/// What was noted before the move says more than that, if it is of so long a time at least.
const LATELY: Duration = Duration::from_secs(3);

/// Where commands are few: how long clients' waits are collected.
const FEW_WAITS: Duration = Duration::from_secs(2);

/// The pace of a move.
#[derive(Debug)]
pub(super) struct Pacing {
    pacer: Pacer,
    /// Somebody waits for the end of the leg under way.
    hurried: bool,
    /// The last batch, and when and with what the pace was last changed.
    batch: Option<(u64, u32)>,
    paced: Instant,
    paced_keys: u64,
    paced_bytes: u64,
    waits: Waits,
    waited_before: Option<u64>,
    waits_from: Instant,
    /// Of the busier node, since it was last used.
    node_cpu: Option<f64>,
    looked: Instant,
}

impl Pacing {
    /// Of a move that has come so far with the routers before this one.
    pub(super) fn new(how: MoveOptions, before: &Progress, counters: &[Arc<WorkerCounters>]) -> Self {
        let now = Instant::now();
        Self {
            pacer: Pacer::new(how.goal, how.max_rate),
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
            UserRequest::Pause | UserRequest::Resume | UserRequest::Abort | UserRequest::GiveUp(_) => {}
        }
    }

    /// How fast.
    pub(super) fn pace(&self) -> Pace {
        if self.hurried { self.pacer.full_speed() } else { self.pacer.pace() }
    }

    /// Keys of a leg.
    pub(super) fn leg_keys(&self) -> u32 {
        self.pacer.leg_keys()
    }

    /// Somebody waits for the end of the leg under way, or nobody does any more.
    pub(super) fn hurry(&mut self, hurried: bool) {
        self.hurried = hurried;
    }

    /// A batch took so long from its copy to its end.
    pub(super) fn batch_ended(&mut self, length: Duration, keys: usize) {
        self.batch = Some((length.as_micros() as u64, keys as u32));
        self.pacer.batch_ended(length.as_micros() as u64, keys as u32);
    }

    /// `moving`: how long its keys have been on their way.
    pub(super) fn leg_ended(&mut self, leg: &Progress, moving: Duration) {
        self.pacer.leg_ended(leg.keys_moved, leg.bytes_moved, moving.as_micros() as u64);
    }

    /// Another pace, from time to time: as what was seen since the last one suggests. `moved`: keys and bytes of the
    /// whole move.
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
        // Where commands are few they are looked at over a longer time.
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

    /// Clients have waited as they do without the move: since then, or since it began.
    fn begin(&mut self, since: Option<&Waits>, waits: Waits) {
        self.waited_before = waits.p99_since(since.unwrap_or(&self.waits));
        self.waits = waits;
        self.waits_from = Instant::now();
        self.paced = Instant::now();
    }
}

impl Mover {
    /// Clients have felt nothing of the move so far: how long they wait without it.
    pub(super) fn learn_waits(&mut self) -> Result<(), MoverExit> {
        let began = self.shown.began();
        let lately = lock(&self.shared.waits_lately).since(began, LATELY).cloned();
        while lately.is_none() && self.life.order().how.goal != Goal::Fast && began.elapsed() < LEARN {
            self.rest(Duration::from_millis(20))?;
        }
        self.pacing.begin(lately.as_ref(), Waits::so_far(&self.shared.counters));
        Ok(())
    }

    /// Another pace, if it is time for one, with a leg under way that is so far.
    pub(super) fn new_pace(&mut self, leg: Progress) -> Option<Pace> {
        self.pacing.renew(self.id, self.shown.moved(&leg), &self.shared.counters)
    }

    /// Asks both nodes how much they work, from time to time.
    pub(super) fn look_at_nodes(&mut self) {
        if self.pacing.looked.elapsed() >= LOOK {
            self.pacing.looked = Instant::now();
            self.source.look();
            self.target.look();
        }
    }

    /// A node has told how much it has worked.
    pub(super) fn note_work(&mut self, side: Side, answers: &[Vec<u8>]) {
        if let Some(cpu) = self.end_mut(side).worked(answers) {
            self.pacing.node_cpu = Some(self.pacing.node_cpu.map_or(cpu, |other| other.max(cpu)));
        }
    }
}
