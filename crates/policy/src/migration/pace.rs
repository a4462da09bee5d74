//! Pace of a move: as fast as the goal allows, and slower once clients or nodes are affected.
//!
//! Batch size and rate are controlled separately. The *batch size* follows from the time that each key adds to a batch,
//! because commands for its keys wait that long. Its fixed cost (the journal, the way to the nodes, commands queued
//! before it) does not shrink with the batch; tiny batches would pay it for every key. The *rate* grows quickly while
//! nothing is affected. On an effect it is cut, returns quickly to a part of the old rate, and then grows in small
//! steps (as in TCP: moves that share a node converge to fair shares). The goal determines that part and the steps:
//! clients mostly notice the moments of overload, so a gentler goal makes them rarer. A fixed rate would be too slow at
//! night and too fast at noon.
//!
//! If a slower move does not help, the move is not the cause: the load has grown, or another program uses the machine.
//! Then the present state becomes the baseline. Otherwise a move that starts in a quiet minute would almost stop in a
//! busy one, and last longer.
//!
//! The published protocols have no control of this kind: their workers copy as fast as both nodes can, and some
//! protocols slow their clients by design, which a control would misread as an effect of the move's rate. So the goal
//! `fast` of a published protocol has the batches of NetMigrate's testbed, which runs all of them, and no limit of the
//! rate ([`Pacer::published`]). Other goals apply to it as to any move.

use super::{Goal, Pace};

/// Measurements since the last call.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Observation {
    /// Time that clients wait for replies now, microseconds (same statistic as `before_us`). `None`: too few commands.
    pub clients_us: Option<u64>,
    /// Time that clients waited before the move, microseconds.
    pub before_us: Option<u64>,
    /// CPU use of the busier node, as a fraction of the core that executes its commands.
    pub node_cpu: Option<f64>,
    /// Time of recent batches from copy to commit, microseconds.
    pub batch_us: Option<u64>,
    /// Keys per recent batch.
    pub batch_keys: u32,
    /// Keys moved since the last call.
    pub keys: u64,
    /// Bytes moved since the last call.
    pub bytes: u64,
    /// Time since the last call, microseconds.
    pub interval_us: u64,
}

/// Limits of a goal.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// Limit of the clients' waiting time: a multiple of the baseline, plus `slack_us`.
    factor: f64,
    slack_us: f64,
    node_cpu: f64,
    /// Target duration of a batch.
    batch_us: f64,
    batches: u32,
    /// Maximum number of keys of a leg.
    leg_keys: f64,
    /// Initial rate, keys per second.
    start: f64,
    /// Minimum rate, keys per second, while the speed of the nodes is unknown. A move that always affects clients still
    /// ends.
    rate_min: f64,
    /// Minimum rate otherwise, as a fraction of the reachable rate.
    rate_min_share: f64,
    /// Fraction of the affecting rate that is regained quickly.
    regain: f64,
    /// Growth per step after that, ten steps per second.
    step: f64,
}

const fn limits(goal: Goal) -> Limits {
    match goal {
        Goal::Fast => Limits {
            factor: 4.0,
            slack_us: 5_000.0,
            node_cpu: 1.1,
            batch_us: 20_000.0,
            batches: 4,
            // More keys exceed the CPU caches, which costs more than the drains of smaller legs.
            leg_keys: 65_536.0,
            start: 200_000.0,
            rate_min: 2_000.0,
            rate_min_share: 0.25,
            regain: 0.8,
            step: 0.02,
        },
        Goal::Balanced => Limits {
            factor: 1.15,
            slack_us: 200.0,
            node_cpu: 0.9,
            batch_us: 2_000.0,
            batches: 2,
            leg_keys: 4_096.0,
            start: 2_000.0,
            rate_min: 2_000.0,
            rate_min_share: 0.15,
            regain: 0.7,
            step: 0.012,
        },
        Goal::Gentle => Limits {
            factor: 1.1,
            slack_us: 100.0,
            node_cpu: 0.7,
            batch_us: 2_000.0,
            batches: 1,
            leg_keys: 1_024.0,
            start: 500.0,
            rate_min: 50.0,
            rate_min_share: 0.01,
            regain: 0.5,
            step: 0.005,
        },
    }
}

/// Maximum rate, keys per second: more than servers reach.
const RATE_MAX: f64 = 2_000_000.0;
const BATCH_MIN: f64 = 1.0;
const BATCH_MAX: f64 = 1_000.0;
/// Approximate maximum size of a batch, bytes, in the mover's memory and in the buffers of a node.
const BATCH_BYTES: f64 = 4_194_304.0;

/// Number of first keys that fit into a batch, by their sizes: values may be larger than assumed when the batch was
/// cut. At least 1.
#[must_use]
pub fn keys_that_fit(bytes: impl Iterator<Item = u64>) -> usize {
    let sums = bytes.scan(0.0, |sum, bytes| {
        *sum += bytes as f64;
        Some(*sum)
    });
    sums.take_while(|sum| *sum <= BATCH_BYTES).count().max(1)
}

/// Number of pairs in a message, and of workers, in NetMigrate's testbed.
const PUBLISHED_BATCH_KEYS: f64 = 21.0;
const PUBLISHED_BATCHES: u32 = 4;

/// Minimum time that a key adds to a batch, microseconds, if it is too short to measure.
const KEY_US_MIN: f64 = 20.0;
/// Time that all keys of a batch may add, as a fraction of its fixed time. Allowed even above the limit of the goal.
const KEYS_PART: f64 = 0.1;

/// Target duration of a leg, microseconds: commands that need all of it wait for its end.
const LEG_US: f64 = 1_500_000.0;
/// Approximate maximum size of a leg, bytes.
const LEG_BYTES: f64 = 67_108_864.0;
/// Keys of the first leg, and the maximum growth factor from leg to leg.
const LEG_FIRST: f64 = 1_024.0;
const LEG_GROWTH: f64 = 8.0;

/// Shortest duration of batches of a size class.
#[derive(Clone, Copy, Debug, Default)]
struct ShortestBatches {
    /// Zero before the first batch.
    us: f64,
    keys: f64,
    /// Number of batches in this class, and number of the last one.
    seen: u32,
    last: u64,
}

/// Cost model of batches: fixed time and time per key. Other load only makes batches longer, so the shortest ones of a
/// size show its cost, and different sizes show the cost of a key.
#[derive(Clone, Debug, Default)]
struct BatchCost {
    /// Size classes, by doublings of the number of keys.
    sizes: [ShortestBatches; 11],
    batches: u64,
}

impl BatchCost {
    /// Number of batches after which an unseen size class expires.
    const MEMORY: u64 = 1_000;
    /// Minimum number of batches of a class: the shortest of fewer may have been delayed.
    const ENOUGH: u32 = 3;

    fn learn(&mut self, keys: u32, us: u64) {
        self.batches += 1;
        let doublings = (keys.max(1).ilog2() as usize).min(self.sizes.len() - 1);
        let (keys, us) = (f64::from(keys), us.max(1) as f64);
        let of_size = &mut self.sizes[doublings];
        if of_size.us == 0.0 || us < of_size.us {
            (of_size.us, of_size.keys) = (us, keys);
        } else {
            // The minimum rises slowly, because conditions may have worsened.
            of_size.us += 0.002 * (us.min(2.0 * of_size.us) - of_size.us);
            of_size.keys += 0.002 * (keys - of_size.keys);
        }
        of_size.seen = of_size.seen.saturating_add(1);
        of_size.last = self.batches;
    }

    fn known(&self) -> impl DoubleEndedIterator<Item = &ShortestBatches> {
        self.sizes.iter().filter(|size| size.seen >= Self::ENOUGH && self.batches - size.last < Self::MEMORY)
    }

    /// Minimum fixed time of a batch and time per key, microseconds. `None` until two sizes are known.
    fn split(&self) -> Option<(f64, f64)> {
        let (small, large) = (self.known().next()?, self.known().next_back()?);
        let each = large.us / large.keys;
        if large.keys < 2.0 * small.keys {
            return None;
        }
        // At an overloaded node a batch waits for a second, so a key adds almost nothing.
        let per_key_us = ((large.us - small.us) / (large.keys - small.keys)).clamp((0.02 * each).min(KEY_US_MIN), each);
        Some((large.us - per_key_us * large.keys, per_key_us))
    }

    /// Whether the duration of batches of about this size is known.
    fn knows(&self, keys: f64) -> bool {
        let doublings = ((keys as u32).max(1).ilog2() as usize).min(self.sizes.len() - 1);
        let size = &self.sizes[doublings];
        size.seen >= Self::ENOUGH && self.batches - size.last < Self::MEMORY
    }

    /// Number of keys that may add this time to a batch, microseconds, or a fraction of its fixed time. `None` while
    /// unknown.
    fn keys_within(&self, batch_us: f64) -> Option<f64> {
        let (fixed_us, per_key_us) = self.split()?;
        Some((batch_us.max(KEYS_PART * fixed_us) / per_key_us).clamp(BATCH_MIN, BATCH_MAX))
    }

    /// Reachable rate with one batch of this size after another, keys per second.
    fn reach(&self, batch_us: f64) -> Option<f64> {
        let seen = self.known().map(|size| size.keys * 1e6 / size.us).max_by(f64::total_cmp)?;
        let split = self.split().zip(self.keys_within(batch_us));
        Some(split.map_or(seen, |((fixed_us, per_key_us), keys)| seen.max(keys * 1e6 / (fixed_us + per_key_us * keys))))
    }
}

/// State at the start of an effect.
#[derive(Clone, Copy, Debug)]
struct Episode {
    rate: f64,
    clients_us: f64,
    node_cpu: f64,
}

/// Controls the pace of a move, across all its legs.
#[derive(Clone, Debug)]
pub struct Pacer {
    goal: Goal,
    is_published: bool,
    bytes_per_second_max: Option<u64>,
    /// Keys per second.
    rate: f64,
    /// Rate at the last effect; `None` before the first, and once clearly exceeded.
    affecting_rate: Option<f64>,
    /// Baseline of the clients' waiting time, microseconds, and of the nodes' CPU use, as far as known.
    base_us: Option<f64>,
    base_cpu: f64,
    /// The present effect and the state at its start.
    episode: Option<Episode>,
    /// Consecutive observations with an effect.
    consecutive: u32,
    /// Keys, microseconds and observations since the last check whether the rate is used.
    since: (u64, u64, u32),
    batch_keys: f64,
    bytes_per_key: f64,
    cost: BatchCost,
    /// Keys of a leg of the maximum duration, at the speed of the last leg.
    leg_keys: f64,
}

impl Pacer {
    /// Creates a pacer with a goal and an optional limit, bytes per second.
    #[must_use]
    pub fn new(goal: Goal, bytes_per_second_max: Option<u64>) -> Self {
        let start = limits(goal).start;
        Self {
            goal,
            is_published: false,
            bytes_per_second_max,
            rate: start,
            affecting_rate: None,
            base_us: None,
            base_cpu: 0.0,
            episode: None,
            consecutive: 0,
            since: (0, 0, 0),
            batch_keys: 16.0,
            bytes_per_key: 64.0,
            cost: BatchCost::default(),
            leg_keys: LEG_FIRST,
        }
    }

    /// Paces a protocol as published.
    #[must_use]
    pub fn published(self) -> Self {
        Self { is_published: true, ..self }
    }

    /// Whether effects on clients and nodes limit the rate.
    fn is_controlled(&self) -> bool {
        !self.is_published || self.goal != Goal::Fast
    }

    /// Changes the goal.
    pub fn set_goal(&mut self, goal: Goal) {
        if goal != self.goal {
            self.goal = goal;
            self.affecting_rate = None;
            self.episode = None;
        }
    }

    /// Records a batch: time from copy to commit, and number of keys. Before the first effect, short batches make the
    /// next ones larger: the first are small only because nothing is known.
    pub fn batch_ended(&mut self, batch_us: u64, keys: u32) {
        self.cost.learn(keys, batch_us);
        let room = batch_us as f64 * 2.0 < limits(self.goal).batch_us;
        if self.affecting_rate.is_none() && room && f64::from(keys) >= self.batch_keys.floor() {
            self.batch_keys = (self.batch_keys * 1.5).clamp(BATCH_MIN, BATCH_MAX);
        }
    }

    /// Changes the limit, bytes per second.
    pub fn set_max_rate(&mut self, bytes_per_second_max: Option<u64>) {
        self.bytes_per_second_max = bytes_per_second_max;
    }

    /// Fixed time of a batch, microseconds; 0 while unknown.
    fn fixed_us(&self) -> f64 {
        self.cost.split().map_or(0.0, |(fixed_us, _)| fixed_us)
    }

    /// Minimum rate, keys per second. A fraction of the reachable rate rather than a constant: 1,000 small keys per
    /// second are few, 1,000 keys of 64 KiB are many. This also bounds the delay of a move that always affects clients.
    fn least(&self) -> f64 {
        let Limits { rate_min: least, rate_min_share: least_share, batch_us, .. } = limits(self.goal);
        self.cost.reach(batch_us).map_or(least, |reach| reach * least_share)
    }

    /// Effect as a fraction of the goal's limits; above 1 it is too much.
    fn share(&self, seen: &Observation) -> f64 {
        let limits = limits(self.goal);
        let base_us = self.base_us.or(seen.before_us.map(|us| us as f64));
        let clients = seen
            .clients_us
            .zip(base_us)
            .map_or(0.0, |(now, base)| now as f64 / (base * limits.factor + limits.slack_us));
        let node = seen.node_cpu.map_or(0.0, |cpu| cpu / limits.node_cpu.max(self.base_cpu * 1.1));
        // A slow batch of one key is a large key, which a slower rate does not change.
        let batch = seen.batch_us.filter(|_| seen.batch_keys > 1);
        // While the fixed time of a batch is unknown, a slow batch calls for smaller ones, not for a slower rate.
        let batch = batch
            .zip(self.cost.split())
            .map_or(0.0, |(us, (fixed_us, _))| us as f64 / (4.0 * (limits.batch_us + fixed_us)));
        clients.max(node).max(batch)
    }

    /// Reacts to an effect: reduces the rate. If a fraction of the rate had the same effect, the move is not the cause,
    /// and the baseline rises.
    fn on_effect(&mut self, seen: &Observation) {
        let clients_us = seen.clients_us.unwrap_or(0) as f64;
        let node_cpu = seen.node_cpu.unwrap_or(0.0);
        let episode = *self.episode.get_or_insert(Episode { rate: self.rate, clients_us, node_cpu });
        self.affecting_rate = Some(episode.rate);
        self.since = (0, 0, 0);
        let slow = self.rate <= 0.05 * episode.rate || self.rate <= self.least();
        if slow && clients_us >= 0.8 * episode.clients_us && node_cpu >= episode.node_cpu - 0.1 {
            self.base_us = seen.clients_us.map(|us| us as f64).or(self.base_us);
            self.base_cpu = node_cpu;
            self.rate = 0.8 * episode.rate;
            self.episode = None;
            return;
        }
        self.rate *= 0.6;
    }

    /// Reacts to the absence of effects: raises the rate, if it was used, because only then it is known to be harmless.
    fn on_no_effect(&mut self, seen: &Observation) {
        self.episode = None;
        if let (Some(base), Some(now), Some(before)) = (self.base_us, seen.clients_us, seen.before_us) {
            // The baseline sinks when the wait does, and is also lowered slowly to test whether it still applies.
            let (now, before) = (now as f64, before as f64);
            let less = if now < base { 0.1 * (base - now) } else { 0.0 };
            self.base_us = Some((base - less - 0.005 * (base - before)).max(before));
        }
        // An interval between the ends of two slow batches shows nothing.
        self.since.0 += seen.keys;
        self.since.1 += seen.interval_us;
        self.since.2 += 1;
        let (keys, interval_us, looks) = self.since;
        if (interval_us as f64) < 2.0 * self.fixed_us() {
            return;
        }
        self.since = (0, 0, 0);
        if interval_us == 0 || (keys as f64) * 1e6 < 0.7 * self.rate * interval_us as f64 {
            return;
        }
        let Limits { start, regain: back, step, .. } = limits(self.goal);
        self.rate = match self.affecting_rate {
            None => self.rate * 1.5,
            Some(felt_at) if self.rate < (back - 0.1) * felt_at => (self.rate * 1.25).min(back * felt_at),
            // One step per observation, but at most double: the effect must be observed first.
            Some(_) => (self.rate + (self.rate * step + start.min(self.rate) * step / 2.0) * f64::from(looks))
                .min(2.0 * self.rate),
        };
        self.affecting_rate = self.affecting_rate.filter(|felt_at| self.rate < 1.5 * felt_at);
    }

    /// Returns the pace that follows from the measurements. Call several times a second.
    #[must_use]
    pub fn observe(&mut self, seen: &Observation) -> Pace {
        let limits = limits(self.goal);
        let share = self.share(seen);
        self.consecutive = if share > 1.0 { self.consecutive + 1 } else { 0 };
        // A single small excess is chance.
        if !self.is_controlled() {
            self.consecutive = 0;
        } else if share > 2.0 || self.consecutive >= 2 {
            self.on_effect(seen);
        } else if share <= 1.0 {
            self.on_no_effect(seen);
        }
        self.rate = self.rate.clamp(self.least().min(RATE_MAX), RATE_MAX);
        if seen.keys > 0 {
            self.bytes_per_key += 0.3 * (seen.bytes as f64 / seen.keys as f64 - self.bytes_per_key);
        }
        if let Some(batch_us) = seen.batch_us.filter(|_| seen.batch_keys > 0) {
            // One batch size predicts nothing about others: keep near the size until it is known, and do not shrink to
            // the smallest one blindly.
            let all_alike = (f64::from(seen.batch_keys) * limits.batch_us / (batch_us as f64).max(1.0)).max(4.0);
            let all_alike = if self.cost.knows(self.batch_keys) { all_alike } else { all_alike.max(self.batch_keys) };
            let fits = self.cost.keys_within(limits.batch_us).unwrap_or(all_alike);
            self.batch_keys = fits.clamp(self.batch_keys * 0.5, self.batch_keys * 1.5).clamp(BATCH_MIN, BATCH_MAX);
        }
        self.pace()
    }

    /// Records a leg: its keys, bytes and duration in microseconds.
    pub fn leg_ended(&mut self, keys: u64, bytes: u64, us: u64) {
        if keys > 0 {
            let (keys, us) = (keys as f64, us.max(1) as f64);
            self.leg_keys = (keys * LEG_US / us).clamp(1.0, LEG_GROWTH * keys.max(self.leg_keys));
            self.bytes_per_key = self.bytes_per_key.max(bytes as f64 / keys);
        }
    }

    /// Maximum number of keys of the next leg: it takes a second or two, whatever the goal.
    #[must_use]
    pub fn leg_keys(&self) -> u32 {
        let Pace { batch_keys, interval_us, .. } = self.pace();
        let at_this_rate = f64::from(batch_keys) * LEG_US / interval_us.max(1) as f64;
        let of_bytes = LEG_BYTES / self.bytes_per_key.max(1.0);
        limits(self.goal).leg_keys.min(self.leg_keys).min(at_this_rate).min(of_bytes).max(1.0) as u32
    }

    /// Pace while commands wait for the end of the leg: full speed, regardless of goal and limit.
    #[must_use]
    pub fn full_speed(&self) -> Pace {
        let batch_keys = (BATCH_BYTES / self.bytes_per_key.max(1.0)).clamp(BATCH_MIN, BATCH_MAX);
        Pace { batch_keys: batch_keys as u32, batches: limits(Goal::Fast).batches, interval_us: 0 }
    }

    /// Current pace.
    #[must_use]
    pub fn pace(&self) -> Pace {
        let rate_max = self.bytes_per_second_max.map(|bytes| (bytes as f64 / self.bytes_per_key.max(1.0)).max(0.1));
        if !self.is_controlled() {
            let batch_keys = PUBLISHED_BATCH_KEYS.min(BATCH_BYTES / self.bytes_per_key.max(1.0)).max(1.0) as u32;
            let interval_us = rate_max.map_or(0.0, |rate| f64::from(batch_keys) * 1e6 / rate);
            return Pace { batch_keys, batches: PUBLISHED_BATCHES, interval_us: interval_us as u64 };
        }
        let rate = rate_max.unwrap_or(RATE_MAX).min(self.rate).max(0.1);
        // Small batches rather than rare large ones produce a slow rate, but no smaller than the rate needs.
        let batches = limits(self.goal).batches;
        let of_rate = rate * (self.fixed_us() / 1e6 / f64::from(batches)).max(0.05);
        let batch_keys =
            self.batch_keys.min(BATCH_BYTES / self.bytes_per_key.max(1.0)).min(of_rate.max(1.0)).floor().max(1.0);
        let interval_us = batch_keys * 1e6 / rate;
        Pace { batch_keys: batch_keys as u32, batches, interval_us: interval_us as u64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_has_as_many_keys_as_its_bytes_allow() {
        let mb = 1 << 20;
        for (bytes, fit) in [
            (vec![], 1),
            (vec![100 * mb; 3], 1),
            (vec![mb; 1_000], 4),
            (vec![64; 1_000], 1_000),
            (vec![1, 5 * mb, 1], 1),
        ] {
            assert_eq!(keys_that_fit(bytes.iter().copied()), fit, "{} keys", bytes.len());
        }
    }

    #[test]
    fn legs_take_a_second_or_two_whatever_the_goal() {
        for (goal, most) in [(Goal::Fast, 65_536), (Goal::Balanced, 4_096), (Goal::Gentle, 1_024)] {
            // Small keys, at 300,000 a second: the limit of the goal applies.
            let mut pacer = Pacer::new(goal, None);
            assert!(pacer.leg_keys() <= 1_024, "nothing is known yet");
            for _ in 0..3 {
                let keys = u64::from(pacer.leg_keys());
                pacer.leg_ended(keys, keys * 100, keys * 10 / 3);
                pacer.rate = 300_000.0;
                pacer.batch_keys = 1_000.0;
            }
            assert_eq!(pacer.leg_keys(), most);
            // Large ones: 20 MB a second.
            let keys = u64::from(pacer.leg_keys());
            pacer.leg_ended(keys, keys << 16, (keys << 16) / 20);
            assert!(pacer.leg_keys() <= 460, "{goal:?}: {} keys of 64 KiB", pacer.leg_keys());
            // Large and quick: limited by bytes.
            pacer.leg_ended(1_000, 1_000 << 20, 1_000);
            assert_eq!(pacer.leg_keys(), 64);
        }
        let slow = Pacer::new(Goal::Fast, Some(6_400));
        assert_eq!(slow.leg_keys(), 150, "a hundred keys a second");
        assert!(slow.full_speed().interval_us == 0 && slow.full_speed().batch_keys > 100);
    }

    fn rate(pace: Pace) -> f64 {
        f64::from(pace.batch_keys) * 1e6 / pace.interval_us.max(1) as f64
    }

    /// A node with a limit of `bearable` keys per second: above it, clients wait 10 ms instead of 1 ms.
    fn settle(pacer: &mut Pacer, bearable: f64, rounds: usize) -> Vec<f64> {
        let mut rates = Vec::new();
        let mut pace = pacer.pace();
        for _ in 0..rounds {
            let now = rate(pace);
            rates.push(now);
            let seen = Observation {
                clients_us: Some(if now > bearable { 10_000 } else { 1_000 }),
                before_us: Some(1_000),
                batch_us: Some(u64::from(pace.batch_keys) * 20 + 200),
                batch_keys: pace.batch_keys,
                keys: (now * 0.2) as u64,
                bytes: (now * 0.2) as u64 * 100,
                interval_us: 200_000,
                ..Observation::default()
            };
            pace = pacer.observe(&seen);
        }
        rates
    }

    #[test]
    fn a_published_protocol_keeps_its_pace_unless_the_goal_limits_it() {
        let mut pacer = Pacer::new(Goal::Fast, None).published();
        let published = pacer.pace();
        assert_eq!(published, Pace { batch_keys: 21, batches: 4, interval_us: 0 });
        let affected = Observation {
            clients_us: Some(100_000),
            before_us: Some(1_000),
            keys: 10_000,
            bytes: 640_000,
            interval_us: 100_000,
            ..Observation::default()
        };
        for _ in 0..20 {
            assert_eq!(pacer.observe(&affected), published);
        }
        pacer.set_max_rate(Some(13_440));
        assert_eq!(pacer.pace().interval_us, 100_000, "10 batches of 21 keys of 64 bytes per second");
        pacer.set_goal(Goal::Gentle);
        pacer.set_max_rate(None);
        let before = rate(pacer.pace());
        for _ in 0..3 {
            let _ = pacer.observe(&affected);
        }
        assert!(rate(pacer.pace()) < 0.5 * before);
    }

    #[test]
    fn the_rate_converges_below_the_limit_of_the_node() {
        for bearable in [10_000.0, 30_000.0, 300_000.0] {
            let mut pacer = Pacer::new(Goal::Balanced, None);
            settle(&mut pacer, bearable, 100);
            let rates = settle(&mut pacer, bearable, 200);
            let mean = rates.iter().sum::<f64>() / rates.len() as f64;
            let felt = rates.iter().filter(|rate| **rate > bearable).count();
            assert!(mean > 0.5 * bearable && mean < bearable, "{bearable}: {mean}");
            assert!(felt < 40, "{bearable}: felt in {felt} of 200");
            // The limit falls, and rises again.
            let less = settle(&mut pacer, bearable / 4.0, 100);
            assert!(less[50..].iter().sum::<f64>() / 50.0 < bearable / 4.0);
            let more = settle(&mut pacer, bearable, 400);
            assert!(more[300..].iter().sum::<f64>() / 100.0 > bearable / 2.0);
        }
    }

    #[test]
    fn slow_keys_are_moved_in_small_batches() {
        let mut pacer = Pacer::new(Goal::Balanced, None);
        let mut pace = pacer.pace();
        for _ in 0..50 {
            // A millisecond per key. The last batch of a leg is smaller.
            for keys in [pace.batch_keys, pace.batch_keys.div_ceil(3), pace.batch_keys] {
                pacer.batch_ended(u64::from(keys) * 1_000, keys);
            }
            let batch_us = Some(u64::from(pace.batch_keys) * 1_000);
            pace = pacer.observe(&Observation {
                batch_us,
                batch_keys: pace.batch_keys,
                keys: 100_000,
                interval_us: 100_000,
                ..Observation::default()
            });
        }
        assert!((1..=3).contains(&pace.batch_keys), "{pace:?}");
    }

    #[test]
    fn fixed_batch_cost_does_not_shrink_batches() {
        let mut pacer = Pacer::new(Goal::Balanced, None);
        let mut pace = pacer.pace();
        for n in 0..400_u32 {
            // Some batches are smaller because a leg ends. Each takes 5 ms for the journal and queued commands, and 20
            // us a key.
            let keys = if n % 3 == 0 { pace.batch_keys.div_ceil(2) } else { pace.batch_keys };
            let batch_us = 5_000 + u64::from(keys) * 20 + if n % 10 == 0 { 40_000 } else { 0 };
            pacer.batch_ended(batch_us, keys);
            pace = pacer.observe(&Observation {
                batch_us: Some(batch_us),
                batch_keys: keys,
                keys: 1_000,
                bytes: 64_000,
                interval_us: 100_000,
                ..Observation::default()
            });
        }
        assert!((50..=200).contains(&pace.batch_keys), "{pace:?}");
    }

    #[test]
    fn an_overloaded_node_still_moves_keys_at_a_minimum_rate() {
        for (goal, least) in [(Goal::Fast, 1_000.0), (Goal::Balanced, 100.0)] {
            for before_us in [5_000, 300_000] {
                let mut pacer = Pacer::new(goal, None);
                let mut pace = pacer.pace();
                // Batches in flight: the observation that ends them, and their keys.
                let mut under_way: Vec<(u64, u32)> = Vec::new();
                let (mut moved, mut credit) = (0_u64, 0.0);
                for n in 0..900_u64 {
                    let mut ended = (0, 0);
                    under_way.retain(|(end, keys)| {
                        let is_over = *end <= n;
                        if is_over {
                            // Each waits for a second behind commands of clients.
                            let us = 1_000_000 + u64::from(*keys) * 50 + n % 7 * 20_000;
                            pacer.batch_ended(us, *keys);
                            ended = (us, *keys);
                            moved += u64::from(*keys);
                        }
                        !is_over
                    });
                    credit = (credit + rate(pace) * 0.1).min(f64::from(pace.batch_keys * pace.batches));
                    while under_way.len() < pace.batches as usize && credit >= f64::from(pace.batch_keys) {
                        credit -= f64::from(pace.batch_keys);
                        under_way.push((n + 10 + n % 2, pace.batch_keys));
                    }
                    let (batch_us, keys) = ended;
                    pace = pacer.observe(&Observation {
                        clients_us: Some(300_000 + n % 5 * 10_000),
                        before_us: Some(before_us),
                        node_cpu: Some(0.1),
                        batch_us: (keys > 0).then_some(batch_us),
                        batch_keys: keys,
                        keys: u64::from(keys),
                        bytes: u64::from(keys) * 100,
                        interval_us: 100_000,
                    });
                    if n == 300 {
                        moved = 0;
                    }
                }
                let rate = moved as f64 / 60.0;
                assert!(rate > least, "{goal:?}, {before_us} us before: {rate} keys per second, {pace:?}");
            }
        }
    }

    #[test]
    fn the_byte_rate_limit_is_respected() {
        let mut pacer = Pacer::new(Goal::Fast, Some(1_000_000));
        let mut pace = pacer.pace();
        for _ in 0..50 {
            let keys = (rate(pace) * 0.2) as u64;
            pace = pacer.observe(&Observation {
                keys,
                bytes: keys * 10_000,
                interval_us: 200_000,
                ..Observation::default()
            });
        }
        let bytes = rate(pace) * 10_000.0;
        assert!((900_000.0..1_050_000.0).contains(&bytes), "{bytes} bytes per second, {pace:?}");
    }

    #[test]
    fn the_rate_never_drops_to_zero() {
        let mut pacer = Pacer::new(Goal::Gentle, None);
        let mut pace = pacer.pace();
        for _ in 0..1000 {
            pace = pacer.observe(&Observation { node_cpu: Some(1.0), ..Observation::default() });
            assert!(rate(pace) >= 40.0, "{pace:?}");
        }
        assert!(pace.batches >= 1 && pace.batch_keys >= 1 && rate(pace) >= 40.0, "{pace:?}");
    }

    #[test]
    fn permanent_overload_leaves_a_share_of_the_reachable_rate() {
        for (goal, us_per_key, least, most) in [
            (Goal::Balanced, 20, 6_000.0, 9_000.0),
            (Goal::Balanced, 1_000, 100.0, 200.0),
            (Goal::Gentle, 20, 400.0, 600.0),
        ] {
            let mut pacer = Pacer::new(goal, None);
            let mut clients_us = 2_000;
            let mut pace = pacer.pace();
            for n in 0..300_u64 {
                for _ in 0..10 {
                    // Every fourth batch is delayed.
                    let held_up = if n % 4 == 0 { 30_000 } else { 0 };
                    pacer.batch_ended(u64::from(pace.batch_keys) * us_per_key + held_up, pace.batch_keys);
                }
                // Always worse, so that it never becomes the baseline for long.
                clients_us += 400;
                pace = pacer.observe(&Observation {
                    clients_us: Some(clients_us),
                    before_us: Some(1_000),
                    ..Observation::default()
                });
                assert!(n < 100 || rate(pace) > least, "{goal:?}, {us_per_key} us a key: {pace:?}");
            }
            let lowest = (0..50).map(|_| {
                clients_us = clients_us * 11 / 10;
                rate(pacer.observe(&Observation {
                    clients_us: Some(clients_us),
                    before_us: Some(1_000),
                    ..Observation::default()
                }))
            });
            let lowest = lowest.fold(f64::MAX, f64::min);
            assert!(lowest > least && lowest < most, "{goal:?}, {us_per_key} us a key: {lowest}");
        }
    }

    #[test]
    fn overload_with_other_causes_does_not_stop_the_move() {
        let mut pacer = Pacer::new(Goal::Balanced, None);
        settle(&mut pacer, 20_000.0, 100);
        // Clients wait five times as long at any rate below the previous one.
        let mut pace = pacer.pace();
        let mut rates = Vec::new();
        for _ in 0..200 {
            let now = rate(pace);
            rates.push(now);
            pace = pacer.observe(&Observation {
                clients_us: Some(if now > 20_000.0 { 20_000 } else { 5_000 }),
                before_us: Some(1_000),
                keys: (now * 0.2) as u64,
                interval_us: 200_000,
                ..Observation::default()
            });
        }
        let mean = rates[50..].iter().sum::<f64>() / 150.0;
        assert!(mean > 8_000.0, "{mean}");
        // Afterwards the old baseline applies again.
        settle(&mut pacer, 20_000.0, 100);
        let felt = settle(&mut pacer, 5_000.0, 200);
        assert!(felt[100..].iter().sum::<f64>() / 100.0 < 5_000.0, "{felt:?}");
    }

    #[test]
    fn single_outliers_do_not_reduce_the_rate() {
        let mut pacer = Pacer::new(Goal::Balanced, None);
        let mut pace = pacer.pace();
        for n in 0..100 {
            // Every third observation is slightly too high.
            let clients_us = Some(if n % 3 == 0 { 1_900 } else { 1_000 });
            let keys = (rate(pace) * 0.2) as u64;
            let seen = Observation {
                clients_us,
                before_us: Some(1_000),
                keys,
                interval_us: 200_000,
                ..Observation::default()
            };
            pace = pacer.observe(&seen);
        }
        assert!(rate(pace) > 100_000.0, "{pace:?}");
    }
}
