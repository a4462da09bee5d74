//! A scenario of a fleet as TOML: nodes, keys, load over time, and the settings of the policies.
//!
//! Text rather than code, so that a new scenario is one file and needs no build. Times are in seconds, sizes in bytes,
//! rates per second.

use std::time::Duration;

use serde::Deserialize;
use switchyard_policy::autoscale;
use switchyard_policy::hot_copies::{self, Selection};
use switchyard_policy::planner::{self, Mode, PlannerConfig};

/// Built-in scenarios: name and text.
pub const BUILT_IN: &[(&str, &str)] = &[
    ("step", include_str!("../../scenarios/fleet/step.toml")),
    ("diurnal", include_str!("../../scenarios/fleet/diurnal.toml")),
    ("weekly", include_str!("../../scenarios/fleet/weekly.toml")),
    ("hot-in", include_str!("../../scenarios/fleet/hot-in.toml")),
    ("hot-out", include_str!("../../scenarios/fleet/hot-out.toml")),
    ("random-replacement", include_str!("../../scenarios/fleet/random-replacement.toml")),
    ("flash-crowd", include_str!("../../scenarios/fleet/flash-crowd.toml")),
    ("slow-growth", include_str!("../../scenarios/fleet/slow-growth.toml")),
    ("noise", include_str!("../../scenarios/fleet/noise.toml")),
    ("ahead", include_str!("../../scenarios/fleet/ahead.toml")),
    ("six-weeks", include_str!("../../scenarios/fleet/six-weeks.toml")),
    ("etc", include_str!("../../scenarios/fleet/etc.toml")),
    ("crowd", include_str!("../../scenarios/fleet/crowd.toml")),
    ("day", include_str!("../../scenarios/fleet/day.toml")),
    ("large", include_str!("../../scenarios/fleet/large.toml")),
];

/// Maximum number of nodes.
const NODES_MAX: usize = 4096;

/// A scenario.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Scenario {
    /// Name of the scenario.
    #[serde(skip)]
    pub name: String,
    /// Simulated time.
    pub duration: f64,
    /// Length of a slice: all rates are constant in it.
    pub slice: f64,
    /// Time at the start that the results leave out.
    #[serde(default)]
    pub warm_up: f64,
    /// Length of a bin: each point of the results is the average of one.
    #[serde(default = "minute")]
    pub bin: f64,
    /// Default number of seeds.
    #[serde(default = "three")]
    pub seeds: u64,
    /// The nodes.
    pub nodes: Nodes,
    /// The router. `None`: without a limit, and with one worker.
    pub router: Option<Router>,
    /// Cache nodes that serve the hits instead of the router.
    pub cache: Option<Cache>,
    /// The keys.
    pub keys: Keys,
    /// The load over time.
    pub load: Load,
    /// Random variations of the load.
    #[serde(default)]
    pub noise: Noise,
    /// Periodic changes of the hottest keys.
    pub churn: Option<Churn>,
    /// Single changes of the load.
    #[serde(default, rename = "event")]
    pub events: Vec<Event>,
    /// Anomalies at random times.
    #[serde(default, rename = "anomaly")]
    pub anomalies: Vec<Anomaly>,
    /// Sampling of commands.
    #[serde(default)]
    pub telemetry: Telemetry,
    /// Hot copies. `None`: off.
    pub copies: Option<Copies>,
    /// The planner. `None`: off.
    pub planner: Option<Planner>,
    /// The autoscaler. `None`: off.
    pub autoscale: Option<Autoscale>,
    /// A bound in place of the autoscaler, by [`Policies`](super::Policies) only.
    #[serde(skip)]
    pub bound: Option<Bound>,
    /// Speed of moves.
    #[serde(default)]
    pub moves: Moves,
    /// Bounds that the results of every seed must keep.
    #[serde(default)]
    pub goal: Goal,
}

/// The nodes: queues with a service rate.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Nodes {
    /// Number of nodes at the start.
    pub count: usize,
    /// Requests that a node serves per second.
    pub service_rate: f64,
    /// Longest wait in the queue. Requests beyond are lost.
    #[serde(default = "queue")]
    pub queue: f64,
    /// Capacity that the operator has configured for the planner. `None`: nodes are evened out.
    pub capacity: Option<f64>,
    /// `maxmemory` of a node. 0: none.
    #[serde(default)]
    pub memory: u64,
    /// Time of a request without a queue, in microseconds.
    #[serde(default = "base_us")]
    pub base_us: f64,
    /// Mean response time above which a bin violates the objective, in microseconds. A bin that loses a thousandth of
    /// its requests violates it as well.
    #[serde(default = "objective_us")]
    pub objective_us: f64,
}

/// The router.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Router {
    /// Number of workers, over all routers. Each has copies of its own.
    pub workers: u32,
    /// Processor time of a worker for a request that a copy serves, in microseconds.
    pub hit_us: f64,
    /// Processor time for a forwarded request, in microseconds.
    pub forward_us: f64,
}

/// Cache nodes.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Cache {
    /// Number of cache nodes. Keys are spread evenly over them.
    pub count: u32,
    /// Hits that one serves per second.
    pub service_rate: f64,
}

/// The keys.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Keys {
    /// Number of keys.
    pub count: f64,
    /// Exponent of their popularity: the key of rank r gets a share proportional to 1 / r^zipf. 0: all are alike.
    pub zipf: f64,
    /// Number of hottest keys that are simulated one by one. The others are aggregated by slot.
    pub head: usize,
    /// Size of a key with its value.
    #[serde(default = "key_bytes")]
    pub bytes: f64,
    /// Share of writes in the requests of each key.
    #[serde(default)]
    pub writes: f64,
    /// Growth of the number of keys, per hour, as a part of the number at the start.
    #[serde(default)]
    pub growth: f64,
}

/// The load over time.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Load {
    /// Mean requests per second, over all keys.
    pub rate: f64,
    /// The sender.
    #[serde(default)]
    pub sender: Sender,
    /// Load over the day, relative to the mean: equidistant points, joined by lines. Empty: constant.
    #[serde(default)]
    pub daily: Vec<f64>,
    /// Length of a day.
    #[serde(default = "day")]
    pub day: f64,
    /// Load by weekday, Monday first, relative to the mean. Empty: constant.
    #[serde(default)]
    pub weekly: Vec<f64>,
    /// Growth per hour, as a part of the mean.
    #[serde(default)]
    pub growth: f64,
}

/// Reaction of clients to lost requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sender {
    /// None: an open loop.
    #[default]
    Open,
    /// The rate is adapted after each slice so that between 0.5 and 1 % are lost: the greatest throughput of the fleet
    /// (SwitchKV, section 5.1).
    Adaptive,
}

/// Random variations, normally distributed and drawn again each period.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Noise {
    /// Standard deviation of the load of each slot, as a part of it.
    pub slots: f64,
    /// Standard deviation of the load of the whole fleet.
    pub total: f64,
    /// Standard deviation of a slow deviation of the whole fleet, which fades in `drift-time`.
    pub drift: f64,
    /// Time after which a third of a slow deviation remains.
    pub drift_time: f64,
    /// Standard deviation of the load of a day.
    pub days: f64,
    /// The period.
    pub period: f64,
}

impl Default for Noise {
    fn default() -> Self {
        Self { slots: 0.0, total: 0.0, drift: 0.0, drift_time: 3600.0, days: 0.0, period: 60.0 }
    }
}

/// Changes of the hottest keys (SwitchKV, section 5.4).
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Churn {
    /// Pattern of the changes.
    pub kind: ChurnKind,
    /// Number of keys that change at once.
    pub keys: usize,
    /// Interval of the changes.
    pub every: f64,
    /// For `random`: the number of hottest keys among which the changed ones are.
    #[serde(default)]
    pub within: usize,
}

/// Pattern of changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ChurnKind {
    /// Cold keys become the hottest ones.
    HotIn,
    /// The hottest keys become cold.
    HotOut,
    /// Random keys of the hottest become cold, and cold keys take their ranks.
    Random,
}

/// A change of the load that begins at a time.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Event {
    /// Begin.
    pub at: f64,
    /// End. `None`: it stays.
    pub until: Option<f64>,
    /// Time in which it grows and ends.
    #[serde(default)]
    pub ramp: f64,
    /// Requests of the whole fleet, relative to those without the event.
    #[serde(default = "one")]
    pub factor: f64,
    /// Part of all requests that goes to keys of the event.
    #[serde(default)]
    pub share: f64,
    /// Number of these keys.
    #[serde(default)]
    pub keys: usize,
    /// Share of writes in their requests. `None`: as all keys.
    pub writes: Option<f64>,
    /// Node whose slots they have. `None`: any slots.
    pub node: Option<u16>,
}

/// An anomaly that comes once in each week, at a random time.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Anomaly {
    /// Duration.
    pub lasts: f64,
    /// Time in which it grows and ends.
    #[serde(default)]
    pub ramp: f64,
    /// Requests of the whole fleet, relative to those without it.
    #[serde(default = "one")]
    pub factor: f64,
    /// Whether the autoscaler gets no measures.
    #[serde(default)]
    pub silent: bool,
}

/// A policy that no router can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Bound {
    /// The fewest nodes that keep the objective, by a known load.
    Foresight,
    /// Enough nodes for the highest load without variations, at all times.
    StaticPeak,
}

/// Sampling of commands by the workers (`router::worker::telemetry` has the same defaults).
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Telemetry {
    /// One command in this many is counted, at least.
    pub sample: u32,
    /// Commands that a worker counts per second, about. With more load it counts a smaller part.
    pub counted: f64,
    /// Commands that a worker checks per second for instant reports.
    pub noticed: f64,
    /// Requests per second of a node from which on its keys are reported instantly.
    pub instant_threshold: f64,
}

impl Default for Telemetry {
    fn default() -> Self {
        Self { sample: 16, counted: 4096.0, noticed: 8192.0, instant_threshold: 2000.0 }
    }
}

/// Reports that hot copies use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reports {
    /// Counts of each second, and frequent keys at once.
    #[default]
    Both,
    /// Counts of each second.
    Periodic,
    /// Frequent keys at once.
    Instant,
}

/// Hot copies.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Copies {
    /// Reports that lead to admissions.
    pub reports: Reports,
    /// Every key that is reported is admitted, whatever its load.
    pub all: bool,
    /// Maximum number of keys.
    pub keys_max: usize,
    /// Maximum bytes of all copies.
    pub bytes_max: usize,
    /// Minimum reads per second of a key.
    pub min_reads_per_second: usize,
    /// Maximum number of keys admitted per second.
    pub admissions_per_second: usize,
    /// Time for which a cold key remains admitted.
    pub deletion_delay: f64,
    /// Maximum age of a copy.
    pub ttl: f64,
    /// The hottest keys have copies at the start.
    pub prefilled: bool,
}

impl Default for Copies {
    fn default() -> Self {
        let knobs = hot_copies::Knobs::default();
        Self {
            reports: Reports::Both,
            all: false,
            keys_max: knobs.keys_max,
            bytes_max: knobs.bytes_max,
            min_reads_per_second: knobs.min_reads_per_second,
            admissions_per_second: knobs.admissions_per_second,
            deletion_delay: knobs.deletion_delay.as_secs_f64(),
            ttl: 10.0,
            prefilled: false,
        }
    }
}

impl Copies {
    /// Settings of the admission. Each worker has its own copies of all keys, so they share the bytes.
    pub(super) fn knobs(&self, workers: u32) -> hot_copies::Knobs {
        let default = hot_copies::Knobs::default();
        hot_copies::Knobs {
            selection: if self.all { Selection::All } else { default.selection },
            limited: default.limited,
            keys_max: self.keys_max,
            bytes_max: self.bytes_max / workers.max(1) as usize,
            min_reads_per_second: self.min_reads_per_second,
            admissions_per_second: self.admissions_per_second,
            deletion_delay: seconds(self.deletion_delay),
        }
    }
}

/// The planner, as `[planner]` of the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Planner {
    /// Algorithm that selects the remedies.
    pub policy: planner::Policy,
    /// Interval between steps.
    pub interval: f64,
    /// Time for which a node must exceed its limit.
    pub window: f64,
    /// Part of each limit that is kept free, in percent.
    pub headroom: usize,
    /// Requests per second below which a node is never relieved.
    pub min_requests: Option<usize>,
    /// Maximum number of keys moved per minute.
    pub max_keys_per_minute: usize,
    /// Maximum bytes moved per hour.
    pub max_bytes_per_hour: usize,
}

impl Default for Planner {
    fn default() -> Self {
        let PlannerConfig { policy, interval, window, headroom, least, keys_per_minute, bytes_per_hour, .. } =
            PlannerConfig::default();
        Self {
            policy,
            interval: interval.as_secs_f64(),
            window: window.unwrap_or(Duration::from_secs(3)).as_secs_f64(),
            headroom,
            min_requests: least,
            max_keys_per_minute: keys_per_minute,
            max_bytes_per_hour: bytes_per_hour,
        }
    }
}

impl Planner {
    pub(super) fn config(&self) -> PlannerConfig {
        PlannerConfig {
            mode: Mode::On,
            policy: self.policy,
            interval: seconds(self.interval),
            window: Some(seconds(self.window)),
            headroom: self.headroom,
            least: self.min_requests,
            keys_per_minute: self.max_keys_per_minute,
            bytes_per_hour: self.max_bytes_per_hour,
        }
    }
}

/// The autoscaler, as `[autoscale]` of the configuration. The nodes at the start are an operator's, and stay.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Autoscale {
    /// Load policy.
    pub policy: autoscale::Policy,
    /// Minimum number of nodes.
    pub min_nodes: usize,
    /// Maximum number of nodes.
    pub max_nodes: usize,
    /// Time from the decision until the server of a new node is ready.
    pub start_up: f64,
    /// Duration of overload before a node is added.
    pub up_after: f64,
    /// Duration of underuse before a node is removed.
    pub down_after: f64,
    /// Time between a change and the next addition.
    pub up_cooldown: f64,
    /// Time between a change and the next removal.
    pub down_cooldown: f64,
    /// Limit of the mean response time, in microseconds.
    pub max_response_us: f64,
    /// Limit of the utilization, as a fraction of the service rate.
    pub max_cpu: f64,
    /// Limit of the used memory, as a fraction.
    pub max_memory: f64,
    /// A node is removed only if every measure would then be below this fraction of its limit.
    pub calm: f64,
    /// Requests per second that one node can serve. For `model`, `learned` and `predictive`.
    pub capacity: Option<f64>,
    /// Fraction of the capacity to keep free.
    pub headroom: f64,
    /// Part of the observations that lack all measures.
    pub unobserved: f64,
}

impl Default for Autoscale {
    fn default() -> Self {
        let knobs = autoscale::Knobs::default();
        let of = |millis: autoscale::Millis| millis as f64 / 1e3;
        Self {
            policy: knobs.policy,
            min_nodes: knobs.nodes_min,
            max_nodes: knobs.nodes_max,
            start_up: 5.0,
            up_after: of(knobs.up_after),
            down_after: of(knobs.down_after),
            up_cooldown: of(knobs.up_cooldown),
            down_cooldown: of(knobs.down_cooldown),
            max_response_us: knobs.response_us,
            max_cpu: knobs.cpu,
            max_memory: knobs.memory,
            calm: knobs.calm,
            capacity: knobs.capacity,
            headroom: knobs.headroom,
            unobserved: 0.0,
        }
    }
}

impl Autoscale {
    pub(super) fn knobs(&self) -> autoscale::Knobs {
        let of = |seconds: f64| (seconds * 1e3) as autoscale::Millis;
        autoscale::Knobs {
            policy: self.policy,
            nodes_min: self.min_nodes,
            nodes_max: self.max_nodes,
            up_after: of(self.up_after),
            down_after: of(self.down_after),
            up_cooldown: of(self.up_cooldown),
            down_cooldown: of(self.down_cooldown),
            response_us: self.max_response_us,
            cpu: self.max_cpu,
            memory: self.max_memory,
            calm: self.calm,
            capacity: self.capacity,
            headroom: self.headroom,
            ..autoscale::Knobs::default()
        }
    }
}

/// Speed of moves. The defaults are those of `--goal balanced` under load, and of `--goal fast`, for values of 64 B
/// (docs/results/migration.md).
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Moves {
    /// Time from the order until the first key moves.
    pub start: f64,
    /// Keys that are listed per second before slots move: all keys of the source.
    pub listed: f64,
    /// Keys moved per second.
    pub keys: f64,
    /// Keys moved per second if clients wait for the move.
    pub urgent_keys: f64,
    /// Bytes moved per second, at most.
    pub bytes: f64,
    /// Requests at the source, and at the target, that cost as much time as moving a key does there.
    pub cost: f64,
}

impl Default for Moves {
    fn default() -> Self {
        Self { start: 0.4, listed: 500_000.0, keys: 15_600.0, urgent_keys: 103_000.0, bytes: 68e6, cost: 0.5 }
    }
}

/// Bounds of the results. A missing one is not checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Goal {
    /// Minimum part of the bins in which the fullest node has at most 1.2 times the mean.
    pub balanced_min: Option<f64>,
    /// Maximum part of the requests that is lost.
    pub lost_max: Option<f64>,
    /// Minimum part of the requests that copies serve.
    pub hits_min: Option<f64>,
    /// Minimum number of requests served per second.
    pub served_min: Option<f64>,
    /// Maximum part of the bins that violate the objective.
    pub violations_max: Option<f64>,
    /// Maximum number of decisions of the planner.
    pub decisions_max: Option<f64>,
    /// Maximum number of moves that were reversed within their cooldown.
    pub reversals_max: Option<f64>,
    /// Maximum number of nodes added and removed.
    pub resizes_max: Option<f64>,
    /// Minimum number of nodes added and removed.
    pub resizes_min: Option<f64>,
    /// Maximum hours of nodes.
    pub node_hours_max: Option<f64>,
}

fn minute() -> f64 {
    60.0
}

fn three() -> u64 {
    3
}

fn one() -> f64 {
    1.0
}

fn day() -> f64 {
    86_400.0
}

fn queue() -> f64 {
    0.05
}

fn base_us() -> f64 {
    200.0
}

fn objective_us() -> f64 {
    5_000.0
}

fn key_bytes() -> f64 {
    200.0
}

pub(super) fn seconds(seconds: f64) -> Duration {
    Duration::from_micros((seconds * 1e6).round() as u64)
}

impl Scenario {
    /// Returns a built-in scenario.
    #[must_use]
    pub fn built_in(name: &str) -> Option<Self> {
        let (name, text) = BUILT_IN.iter().find(|(known, _)| *known == name)?;
        Self::parse(name, text).ok()
    }

    /// Parses a scenario.
    ///
    /// # Errors
    /// The first line that is not understood, or a value out of its range.
    pub fn parse(name: &str, text: &str) -> Result<Self, String> {
        let mut scenario: Self = toml::from_str(text).map_err(|error| error.to_string())?;
        scenario.name = name.to_owned();
        scenario.check()?;
        Ok(scenario)
    }

    /// Checks the ranges of all values.
    ///
    /// # Errors
    /// The first value out of its range.
    pub fn check(&self) -> Result<(), String> {
        let head = self.keys.head as f64;
        let events = self.events.iter();
        let churned = self.churn.map_or(0, |churn| churn.keys.max(churn.within));
        let checks = [
            (self.slice >= 0.001 && self.slice <= 60.0, "slice must be from 0.001 to 60"),
            (self.duration >= self.slice, "duration must be at least one slice"),
            (self.duration <= 1e8, "duration must be at most 1e8"),
            (self.warm_up >= 0.0 && self.warm_up < self.duration, "warm-up must be below the duration"),
            (self.bin >= self.slice, "bin must be at least one slice"),
            (self.seeds >= 1, "seeds must be at least 1"),
            ((1..=NODES_MAX).contains(&self.nodes.count), "nodes.count must be from 1 to 4096"),
            (self.nodes.service_rate > 0.0, "nodes.service-rate must be above 0"),
            (self.nodes.queue >= 0.0, "nodes.queue must not be negative"),
            (head >= 1.0 && head <= self.keys.count, "keys.head must be from 1 to keys.count"),
            (self.keys.head <= 1 << 20, "keys.head must be at most 1,048,576"),
            ((0.0..=4.0).contains(&self.keys.zipf), "keys.zipf must be from 0 to 4"),
            ((0.0..=1.0).contains(&self.keys.writes), "keys.writes must be from 0 to 1"),
            (self.load.rate > 0.0, "load.rate must be above 0"),
            (self.load.day > 0.0, "load.day must be above 0"),
            (matches!(self.load.weekly.len(), 0 | 7), "load.weekly needs seven values"),
            (self.noise.period > 0.0 && self.noise.drift_time > 0.0, "the times of noise must be above 0"),
            (
                self.anomalies.iter().all(|anomaly| anomaly.lasts + anomaly.ramp <= 604_800.0),
                "an anomaly must be shorter than a week",
            ),
            (self.router.is_none_or(|router| router.workers > 0), "router.workers must be above 0"),
            (self.cache.is_none_or(|cache| cache.count > 0), "cache.count must be above 0"),
            (self.churn.is_none_or(|churn| churn.every > 0.0), "churn.every must be above 0"),
            (churned <= self.keys.head, "churn concerns more keys than keys.head"),
            (self.telemetry.sample >= 1, "telemetry.sample must be at least 1"),
            (self.telemetry.counted >= 1.0 && self.telemetry.noticed >= 1.0, "telemetry must count something"),
            (
                events.clone().map(|event| event.share).sum::<f64>() <= 1.0,
                "the events' shares must be at most 1 together",
            ),
            (events.clone().all(|event| event.share <= 0.0 || event.keys > 0), "an event with a share needs keys"),
            (
                events.clone().all(|event| event.node.is_none_or(|node| usize::from(node) < self.nodes.count)),
                "an event's node is none of the nodes",
            ),
            (
                self.autoscale.as_ref().is_none_or(|scaling| scaling.max_nodes.max(self.nodes.count) <= 1024),
                "autoscale is for up to 1,024 nodes",
            ),
            (self.moves.keys > 0.0 && self.moves.urgent_keys > 0.0, "moves need a speed"),
            (self.moves.bytes > 0.0 && self.moves.listed > 0.0, "moves need a speed"),
        ];
        match checks.into_iter().find(|(is_met, _)| !is_met) {
            Some((_, what)) => Err(what.to_owned()),
            None => Ok(()),
        }
    }

    /// Number of workers with copies of their own. Cache nodes hold each key once.
    pub(super) fn copies_of_a_key(&self) -> u32 {
        match (self.cache, self.router) {
            (Some(_), _) | (_, None) => 1,
            (None, Some(router)) => router.workers,
        }
    }

    /// Number of workers that sample.
    pub(super) fn workers(&self) -> u32 {
        self.router.map_or(1, |router| router.workers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_scenarios_are_valid() {
        for (name, text) in BUILT_IN {
            Scenario::parse(name, text).unwrap_or_else(|error| panic!("{name}: {error}"));
        }
    }

    #[test]
    fn wrong_values_and_unknown_names_are_refused() {
        let (_, text) = BUILT_IN[0];
        for (wrong, expected) in [
            (text.replace("slice = 1", "slice = 61"), "slice must be"),
            (format!("{text}\n[moon]\nphase = 1\n"), "moon"),
            (text.replace("[nodes]", "[nodes]\ncores = 3"), "cores"),
        ] {
            let error = Scenario::parse("wrong", &wrong).expect_err(expected);
            assert!(error.contains(expected), "{error}");
        }
    }
}
