//! How fast keys move: as fast as the goal allows, and slower as soon as clients or nodes feel it.
//!
//! Two things are steered apart. The *size of a batch* follows from how much longer a batch takes with every key in it:
//! commands for its keys wait so long. (What a batch takes whatever is in it - the journal, the way to the nodes, the
//! clients' commands before it - no smaller batch makes shorter; in very small ones it would only have to be paid for
//! every key.) The *rate* grows quickly while nobody feels it, is cut where somebody does, comes back quickly to a part
//! of where that was and goes on by small steps from there (as in TCP: several moves that share a node then find their
//! shares by themselves). How large a part and how small the steps is the goal's: what clients notice of a move as a
//! whole is mostly the moments in which it is felt, so the gentler the goal the rarer they are. A fixed rate would be
//! too slow at night and too fast at noon.
//!
//! What does not get better when the move slows down is not the move's doing: a load that has grown, a neighbour on the
//! machine. It is then what clients have without the move, and the measure from there on. Without that rule a move that
//! begins in a quiet minute would nearly stand still in a busy one, and last all the longer.

use super::{Goal, Pace};

/// What was seen since the last time.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Observation {
    /// What clients wait for their replies now, microseconds (the same statistic as `before_us`). `None`: there were
    /// too few commands to tell.
    pub clients_us: Option<u64>,
    /// The same before the move began.
    pub before_us: Option<u64>,
    /// The busier node's share of a processor, 0 to 1 of the one that its commands run on.
    pub node_cpu: Option<f64>,
    /// How long batches took lately from their copy to their commit, microseconds, and of how many keys they were.
    pub batch_us: Option<u64>,
    /// Keys of these batches.
    pub batch_keys: u32,
    /// Keys moved since the last time.
    pub keys: u64,
    /// Bytes moved since the last time.
    pub bytes: u64,
    /// How long it was, microseconds.
    pub interval_us: u64,
}

/// What a goal bears.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// What clients wait, as a multiple of before, and beyond that.
    factor: f64,
    slack_us: f64,
    node_cpu: f64,
    /// A batch takes about so long.
    batch_us: f64,
    batches: u32,
    /// Keys of a leg.
    leg_keys: f64,
    /// Keys per second at the beginning.
    start: f64,
    /// Keys per second, at least: a move that is felt all the time still comes to its end. As long as nothing is known
    /// of the nodes.
    least: f64,
    /// The same once it is: this share of what batches reach where nothing holds them up.
    least_share: f64,
    /// To so much of the rate that was felt it comes back quickly.
    back: f64,
    /// By so much it goes on from there, ten times a second.
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
            // With more of them what is known of each is in no cache any more, which costs more than the drains of
            // smaller legs.
            leg_keys: 65_536.0,
            start: 200_000.0,
            least: 2_000.0,
            least_share: 0.25,
            back: 0.8,
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
            least: 2_000.0,
            least_share: 0.15,
            back: 0.7,
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
            least: 50.0,
            least_share: 0.01,
            back: 0.5,
            step: 0.005,
        },
    }
}

/// Keys per second, at most: more than servers can do.
const RATE_MAX: f64 = 2_000_000.0;
const BATCH_MIN: f64 = 1.0;
const BATCH_MAX: f64 = 1_000.0;
/// Bytes of a batch, about: what the mover has in memory of it, and what a node has in its buffers.
const BATCH_BYTES: f64 = 4_194_304.0;

/// Of keys with so many bytes each, how many of the first ones make a batch: values may be larger than those were by
/// which its keys were counted. One at least.
#[must_use]
pub fn first_that_fit(bytes: impl Iterator<Item = u64>) -> usize {
    let sums = bytes.scan(0.0, |sum, bytes| {
        *sum += bytes as f64;
        Some(*sum)
    });
    sums.take_while(|sum| *sum <= BATCH_BYTES).count().max(1)
}

/// A key adds so much to a batch at least, microseconds, where it is too little to be measured.
const KEY_US_MIN: f64 = 20.0;
/// All keys of a batch may add this part to the time that it takes whatever is in it, also where that is more than the
/// goal's.
const KEYS_PART: f64 = 0.1;

/// A leg takes about so long: whoever needs all of it waits until it is over.
const LEG_US: f64 = 1_500_000.0;
/// Bytes of a leg, about.
const LEG_BYTES: f64 = 67_108_864.0;
/// Keys of a leg as long as nothing is known, and how quickly legs grow then.
const LEG_FIRST: f64 = 1_024.0;
const LEG_GROWTH: f64 = 8.0;

/// How quickly batches of one size end where little holds them up.
#[derive(Clone, Copy, Debug, Default)]
struct Quickest {
    /// Zero until there was one.
    us: f64,
    keys: f64,
    /// How many there were, and the number of the last one.
    seen: u32,
    last: u64,
}

/// What a batch takes whatever is in it, and what each key adds. Whatever else happens on the machine makes batches
/// longer, never shorter, so the quickest ones of a size tell what they take, and those of different sizes what a key
/// does.
#[derive(Clone, Debug, Default)]
struct BatchCost {
    /// By doublings of the number of keys.
    sizes: [Quickest; 11],
    batches: u64,
}

impl BatchCost {
    /// Sizes that were not seen for so many batches are forgotten.
    const MEMORY: u64 = 1_000;
    /// The quickest of fewer may have been held up, too.
    const ENOUGH: u32 = 3;

    fn learn(&mut self, keys: u32, us: u64) {
        self.batches += 1;
        let doublings = (keys.max(1).ilog2() as usize).min(self.sizes.len() - 1);
        let (keys, us) = (f64::from(keys), us.max(1) as f64);
        let of_size = &mut self.sizes[doublings];
        if of_size.us == 0.0 || us < of_size.us {
            (of_size.us, of_size.keys) = (us, keys);
        } else {
            // What was possible once may be so no more.
            of_size.us += 0.002 * (us.min(2.0 * of_size.us) - of_size.us);
            of_size.keys += 0.002 * (keys - of_size.keys);
        }
        of_size.seen = of_size.seen.saturating_add(1);
        of_size.last = self.batches;
    }

    fn known(&self) -> impl DoubleEndedIterator<Item = &Quickest> {
        self.sizes.iter().filter(|size| size.seen >= Self::ENOUGH && self.batches - size.last < Self::MEMORY)
    }

    /// What a batch takes at least, and each key in it, microseconds. `None` until two sizes are known.
    fn split(&self) -> Option<(f64, f64)> {
        let (small, large) = (self.known().next()?, self.known().next_back()?);
        let each = large.us / large.keys;
        if large.keys < 2.0 * small.keys {
            return None;
        }
        // At a node with more to do than it can, a batch waits for a second, and a key in it adds next to nothing.
        let per_key_us = ((large.us - small.us) / (large.keys - small.keys)).clamp((0.02 * each).min(KEY_US_MIN), each);
        Some((large.us - per_key_us * large.keys, per_key_us))
    }

    /// Whether it is known how long a batch of about so many keys takes.
    fn knows(&self, keys: f64) -> bool {
        let doublings = ((keys as u32).max(1).ilog2() as usize).min(self.sizes.len() - 1);
        let size = &self.sizes[doublings];
        size.seen >= Self::ENOUGH && self.batches - size.last < Self::MEMORY
    }

    /// Keys of a batch whose keys add so much to it, microseconds, or a part of what it takes anyway. `None` until that
    /// is known.
    fn keys_within(&self, batch_us: f64) -> Option<f64> {
        let (fixed_us, per_key_us) = self.split()?;
        Some((batch_us.max(KEYS_PART * fixed_us) / per_key_us).clamp(BATCH_MIN, BATCH_MAX))
    }

    /// Keys per second that can be had, one batch of this size after the other.
    fn reach(&self, batch_us: f64) -> Option<f64> {
        let seen = self.known().map(|size| size.keys * 1e6 / size.us).max_by(f64::total_cmp)?;
        let split = self.split().zip(self.keys_within(batch_us));
        Some(split.map_or(seen, |((fixed_us, per_key_us), keys)| seen.max(keys * 1e6 / (fixed_us + per_key_us * keys))))
    }
}

/// How it was when something began to be felt.
#[derive(Clone, Copy, Debug)]
struct Episode {
    rate: f64,
    clients_us: f64,
    node_cpu: f64,
}

/// Steers the pace of a move. One for a whole move: what it has found out outlives its legs.
#[derive(Clone, Debug)]
pub struct Pacer {
    goal: Goal,
    bytes_per_second_max: Option<u64>,
    /// Keys per second.
    rate: f64,
    /// The rate that was felt last; `None` until then, and once it has been left behind.
    felt_at: Option<f64>,
    /// What clients wait without the move, microseconds, and what nodes work, as far as is known by now.
    base_us: Option<f64>,
    base_cpu: f64,
    /// It is felt, and has been since the rate was this.
    episode: Option<Episode>,
    /// Looks in a row in which it was felt.
    in_a_row: u32,
    /// Keys, microseconds and looks since it was last seen whether the rate is used.
    since: (u64, u64, u32),
    batch_keys: f64,
    bytes_per_key: f64,
    cost: BatchCost,
    /// Keys of a leg that takes as long as it may, as the last one went.
    leg_keys: f64,
}

impl Pacer {
    /// For a move with this goal, and so many bytes per second at most.
    #[must_use]
    pub fn new(goal: Goal, bytes_per_second_max: Option<u64>) -> Self {
        let start = limits(goal).start;
        Self {
            goal,
            bytes_per_second_max,
            rate: start,
            felt_at: None,
            base_us: None,
            base_cpu: 0.0,
            episode: None,
            in_a_row: 0,
            since: (0, 0, 0),
            batch_keys: 16.0,
            bytes_per_key: 64.0,
            cost: BatchCost::default(),
            leg_keys: LEG_FIRST,
        }
    }

    /// Another goal from now on.
    pub fn set_goal(&mut self, goal: Goal) {
        if goal != self.goal {
            self.goal = goal;
            self.felt_at = None;
            self.episode = None;
        }
    }

    /// A batch of so many keys took so long from its copy to its commit. Until somebody has felt something, batches
    /// grow as fast as they end: the first ones are small only because nothing is known.
    pub fn batch_ended(&mut self, batch_us: u64, keys: u32) {
        self.cost.learn(keys, batch_us);
        let room = batch_us as f64 * 2.0 < limits(self.goal).batch_us;
        if self.felt_at.is_none() && room && f64::from(keys) >= self.batch_keys.floor() {
            self.batch_keys = (self.batch_keys * 1.5).clamp(BATCH_MIN, BATCH_MAX);
        }
    }

    /// Goes on with another bound of bytes per second.
    pub fn set_max_rate(&mut self, bytes_per_second_max: Option<u64>) {
        self.bytes_per_second_max = bytes_per_second_max;
    }

    /// The time of a batch that no key in it adds to, microseconds; 0 until it is known.
    fn fixed_us(&self) -> f64 {
        self.cost.split().map_or(0.0, |(fixed_us, _)| fixed_us)
    }

    /// Keys per second, at least. A share of what can be had, and not a number for all: where a thousand small keys per
    /// second are nothing, a thousand of 64 KiB are much; and how much longer a move takes that is felt all the time is
    /// then bounded as well.
    fn least(&self) -> f64 {
        let Limits { least, least_share, batch_us, .. } = limits(self.goal);
        self.cost.reach(batch_us).map_or(least, |reach| reach * least_share)
    }

    /// How much of what the goal bears was seen: above 1 it is too much.
    fn share(&self, seen: &Observation) -> f64 {
        let limits = limits(self.goal);
        let base_us = self.base_us.or(seen.before_us.map(|us| us as f64));
        let clients = seen
            .clients_us
            .zip(base_us)
            .map_or(0.0, |(now, base)| now as f64 / (base * limits.factor + limits.slack_us));
        let node = seen.node_cpu.map_or(0.0, |cpu| cpu / limits.node_cpu.max(self.base_cpu * 1.1));
        // A batch of one key that is slow is a large key; going slower makes it no smaller.
        let batch = seen.batch_us.filter(|_| seen.batch_keys > 1);
        // Until it is known what a batch takes whatever is in it, a slow one is a reason for smaller ones, and none for
        // a slower rate.
        let batch = batch
            .zip(self.cost.split())
            .map_or(0.0, |(us, (fixed_us, _))| us as f64 / (4.0 * (limits.batch_us + fixed_us)));
        clients.max(node).max(batch)
    }

    /// It was felt: slower. Or it has been felt as much at a fraction of the rate, and is not ours.
    fn felt(&mut self, seen: &Observation) {
        let clients_us = seen.clients_us.unwrap_or(0) as f64;
        let node_cpu = seen.node_cpu.unwrap_or(0.0);
        let episode = *self.episode.get_or_insert(Episode { rate: self.rate, clients_us, node_cpu });
        self.felt_at = Some(episode.rate);
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

    /// Nobody feels it: faster, as far as the rate was used, for only that is known to be borne.
    fn borne(&mut self, seen: &Observation) {
        self.episode = None;
        if let (Some(base), Some(now), Some(before)) = (self.base_us, seen.clients_us, seen.before_us) {
            // What was taken for the usual state of things gets better; and from time to time it is found out anew
            // whether it is that.
            let (now, before) = (now as f64, before as f64);
            let less = if now < base { 0.1 * (base - now) } else { 0.0 };
            self.base_us = Some((base - less - 0.005 * (base - before)).max(before));
        }
        // A look between the ends of two slow batches says nothing.
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
        let Limits { start, back, step, .. } = limits(self.goal);
        self.rate = match self.felt_at {
            None => self.rate * 1.5,
            Some(felt_at) if self.rate < (back - 0.1) * felt_at => (self.rate * 1.25).min(back * felt_at),
            // As much for each look; but what twice as much does has to be seen first.
            Some(_) => (self.rate + (self.rate * step + start.min(self.rate) * step / 2.0) * f64::from(looks))
                .min(2.0 * self.rate),
        };
        self.felt_at = self.felt_at.filter(|felt_at| self.rate < 1.5 * felt_at);
    }

    /// The pace that follows from what was seen. To be asked several times a second.
    #[must_use]
    pub fn observe(&mut self, seen: &Observation) -> Pace {
        let limits = limits(self.goal);
        let share = self.share(seen);
        self.in_a_row = if share > 1.0 { self.in_a_row + 1 } else { 0 };
        // A little too much once is chance.
        if share > 2.0 || self.in_a_row >= 2 {
            self.felt(seen);
        } else if share <= 1.0 {
            self.borne(seen);
        }
        self.rate = self.rate.clamp(self.least().min(RATE_MAX), RATE_MAX);
        if seen.keys > 0 {
            self.bytes_per_key += 0.3 * (seen.bytes as f64 / seen.keys as f64 - self.bytes_per_key);
        }
        if let Some(batch_us) = seen.batch_us.filter(|_| seen.batch_keys > 0) {
            // Those of one size tell nothing of others: so it leaves none before it is known, and does not go on to the
            // smallest one without knowing better.
            let all_alike = (f64::from(seen.batch_keys) * limits.batch_us / (batch_us as f64).max(1.0)).max(4.0);
            let all_alike = if self.cost.knows(self.batch_keys) { all_alike } else { all_alike.max(self.batch_keys) };
            let fits = self.cost.keys_within(limits.batch_us).unwrap_or(all_alike);
            self.batch_keys = fits.clamp(self.batch_keys * 0.5, self.batch_keys * 1.5).clamp(BATCH_MIN, BATCH_MAX);
        }
        self.pace()
    }

    /// A leg of so many keys, with so many bytes, has moved in so long.
    pub fn leg_ended(&mut self, keys: u64, bytes: u64, us: u64) {
        if keys > 0 {
            let (keys, us) = (keys as f64, us.max(1) as f64);
            self.leg_keys = (keys * LEG_US / us).clamp(1.0, LEG_GROWTH * keys.max(self.leg_keys));
            self.bytes_per_key = self.bytes_per_key.max(bytes as f64 / keys);
        }
    }

    /// Keys of the next leg, at most: few enough that it takes a second or two, whatever the goal.
    #[must_use]
    pub fn leg_keys(&self) -> u32 {
        let Pace { batch_keys, interval_us, .. } = self.pace();
        let at_this_rate = f64::from(batch_keys) * LEG_US / interval_us.max(1) as f64;
        let of_bytes = LEG_BYTES / self.bytes_per_key.max(1.0);
        limits(self.goal).leg_keys.min(self.leg_keys).min(at_this_rate).min(of_bytes).max(1.0) as u32
    }

    /// The pace where commands wait for the end of the leg under way: as fast as it goes, whatever the goal and the
    /// bound.
    #[must_use]
    pub fn hurried(&self) -> Pace {
        let batch_keys = (BATCH_BYTES / self.bytes_per_key.max(1.0)).clamp(BATCH_MIN, BATCH_MAX);
        Pace { batch_keys: batch_keys as u32, batches: limits(Goal::Fast).batches, interval_us: 0 }
    }

    /// The pace as it stands.
    #[must_use]
    pub fn pace(&self) -> Pace {
        let mut rate = self.rate;
        if let Some(bytes) = self.bytes_per_second_max {
            rate = rate.min(bytes as f64 / self.bytes_per_key.max(1.0));
        }
        let rate = rate.max(0.1);
        // A slow rate is kept with small batches instead of rare large ones; but with no smaller ones than reach it.
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
            assert_eq!(first_that_fit(bytes.iter().copied()), fit, "{} keys", bytes.len());
        }
    }

    #[test]
    fn legs_take_a_second_or_two_whatever_the_goal() {
        for (goal, most) in [(Goal::Fast, 65_536), (Goal::Balanced, 4_096), (Goal::Gentle, 1_024)] {
            // Small keys, at 300,000 a second: as many as the goal allows, once that is known.
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
            // Large and quick: so many bytes and no more.
            pacer.leg_ended(1_000, 1_000 << 20, 1_000);
            assert_eq!(pacer.leg_keys(), 64);
        }
        let slow = Pacer::new(Goal::Fast, Some(6_400));
        assert_eq!(slow.leg_keys(), 150, "a hundred keys a second");
        assert!(slow.hurried().interval_us == 0 && slow.hurried().batch_keys > 100);
    }

    fn rate(pace: Pace) -> f64 {
        f64::from(pace.batch_keys) * 1e6 / pace.interval_us.max(1) as f64
    }

    /// A node that bears `bearable` keys per second: more makes clients wait 10 ms, where 1 ms was usual.
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
    fn it_finds_what_is_borne_and_stays_below() {
        for bearable in [10_000.0, 30_000.0, 300_000.0] {
            let mut pacer = Pacer::new(Goal::Balanced, None);
            settle(&mut pacer, bearable, 100);
            let rates = settle(&mut pacer, bearable, 200);
            let mean = rates.iter().sum::<f64>() / rates.len() as f64;
            let felt = rates.iter().filter(|rate| **rate > bearable).count();
            assert!(mean > 0.5 * bearable && mean < bearable, "{bearable}: {mean}");
            assert!(felt < 40, "{bearable}: felt in {felt} of 200");
            // It gets less, and later more.
            let less = settle(&mut pacer, bearable / 4.0, 100);
            assert!(less[50..].iter().sum::<f64>() / 50.0 < bearable / 4.0);
            let more = settle(&mut pacer, bearable, 400);
            assert!(more[300..].iter().sum::<f64>() / 100.0 > bearable / 2.0);
        }
    }

    #[test]
    fn what_takes_long_goes_in_small_batches() {
        let mut pacer = Pacer::new(Goal::Balanced, None);
        let mut pace = pacer.pace();
        for _ in 0..50 {
            // A millisecond per key. A batch is smaller where a leg ends.
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
    fn what_a_batch_costs_whatever_is_in_it_makes_none_smaller() {
        let mut pacer = Pacer::new(Goal::Balanced, None);
        let mut pace = pacer.pace();
        for n in 0..400_u32 {
            // Batches end where a leg ends, so some are smaller. Each takes 5 ms for the journal and what stands before
            // it, and 20 us a key.
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
    fn a_node_with_too_much_to_do_still_gives_its_keys_away() {
        for (goal, least) in [(Goal::Fast, 1_000.0), (Goal::Balanced, 100.0)] {
            for before_us in [5_000, 300_000] {
                let mut pacer = Pacer::new(goal, None);
                let mut pace = pacer.pace();
                // Batches under way: their end in looks, and their keys.
                let mut under_way: Vec<(u64, u32)> = Vec::new();
                let (mut moved, mut credit) = (0_u64, 0.0);
                for n in 0..900_u64 {
                    let mut ended = (0, 0);
                    under_way.retain(|(end, keys)| {
                        let is_over = *end <= n;
                        if is_over {
                            // Each waits for a second behind the commands of clients.
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
    fn a_rate_in_bytes_is_kept() {
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
    fn it_never_stands_still() {
        let mut pacer = Pacer::new(Goal::Gentle, None);
        let mut pace = pacer.pace();
        for _ in 0..1000 {
            pace = pacer.observe(&Observation { node_cpu: Some(1.0), ..Observation::default() });
            assert!(rate(pace) >= 40.0, "{pace:?}");
        }
        assert!(pace.batches >= 1 && pace.batch_keys >= 1 && rate(pace) >= 40.0, "{pace:?}");
    }

    #[test]
    fn what_is_felt_all_the_time_costs_no_more_than_a_share_of_what_can_be_had() {
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
                    // Every fourth batch is held up by something.
                    let held_up = if n % 4 == 0 { 30_000 } else { 0 };
                    pacer.batch_ended(u64::from(pace.batch_keys) * us_per_key + held_up, pace.batch_keys);
                }
                // Always worse, so that it is never taken for the usual state of things for long.
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
    fn what_is_not_the_moves_doing_does_not_stop_it() {
        let mut pacer = Pacer::new(Goal::Balanced, None);
        settle(&mut pacer, 20_000.0, 100);
        // Clients wait five times as long, whatever the move does, as long as it does less than it did.
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
        // And when the trouble is over, what is felt is measured as before.
        settle(&mut pacer, 20_000.0, 100);
        let felt = settle(&mut pacer, 5_000.0, 200);
        assert!(felt[100..].iter().sum::<f64>() / 100.0 < 5_000.0, "{felt:?}");
    }

    #[test]
    fn chance_is_not_answered() {
        let mut pacer = Pacer::new(Goal::Balanced, None);
        let mut pace = pacer.pace();
        for n in 0..100 {
            // Every third look is a little too high.
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
