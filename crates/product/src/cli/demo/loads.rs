//! Clients of the demo: several concurrent loads with separate keys, all checked.

use std::net::SocketAddr;
use std::time::Duration;

use switchyard_bench::load::{self, Doubt, Failure, Mix, Pace, Run, Sharing, Skew, Tally, ValueSizes};
use switchyard_bench::random::YCSB_THETA;

/// Maximum number of requests in flight per connection.
const PIPELINE: usize = 16;
/// Number of keys of each type.
const KEYS: u64 = 20_000;
/// Minimum number of connections to the hot key.
const READERS: usize = 20;
/// Longer than any story, because every load is stopped explicitly.
const FOREVER: Duration = Duration::from_secs(24 * 3600);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// Base load: all commands, with a skewed distribution of keys.
    Daily,
    /// Many connections read one key, and one writes it.
    Read,
    /// Two keys are written all the time.
    Written,
    /// Additional load on all keys.
    Rush,
}

impl Part {
    /// Requests per second, in addition to the base load.
    pub(super) fn rate(self, start: u32) -> f64 {
        let times = match self {
            Self::Daily | Self::Written => 1.0,
            Self::Read => 1.5,
            Self::Rush => 3.0,
        };
        f64::from(start) * times
    }
}

/// All running loads.
pub(super) struct Loads {
    target: SocketAddr,
    connections: usize,
    start: u32,
    running: Vec<(Part, Run)>,
    ended: Tally,
    failures: Vec<Failure>,
    complaints: Vec<String>,
}

impl Loads {
    pub(super) fn new(target: SocketAddr, connections: u16, start: u32) -> Self {
        let (running, failures, complaints) = (Vec::new(), Vec::new(), Vec::new());
        Self {
            target,
            connections: usize::from(connections),
            start,
            running,
            ended: Tally::default(),
            failures,
            complaints,
        }
    }

    /// Starts a part with a unique key `prefix`.
    pub(super) fn begin(&mut self, part: Part, prefix: &str) -> anyhow::Result<()> {
        let (connections, mix, keys, skew, sharing) = match part {
            Part::Daily => (self.connections, Mix::default(), KEYS, Skew::Zipfian(YCSB_THETA), Sharing::Owned),
            // One connection writes. A key with more than one write per five commands gets no copies.
            Part::Read => (self.connections.max(READERS), Mix::default(), 1, Skew::Uniform, Sharing::OneWriter),
            Part::Written => (2, "incr=1".parse()?, 2, Skew::Uniform, Sharing::Owned),
            Part::Rush => (self.connections, Mix::default(), KEYS, Skew::Uniform, Sharing::Owned),
        };
        let settings = load::Settings {
            target: self.target,
            threads: 1, // more threads would compete with the router for the few processors of a demo machine
            connections,
            pipeline: PIPELINE,
            pace: Pace::Open { rate: part.rate(self.start) },
            duration: FOREVER,
            mix,
            sizes: "64:80,512:15,4096:5".parse::<ValueSizes>()?,
            keys,
            skew,
            sharing,
            prefix: prefix.to_owned(),
            doubt: Doubt::Brief,
            seed: part as u64 + 1,
        };
        self.running.push((part, load::start(&settings)?));
        Ok(())
    }

    /// Ends a part when all of its requests have replies.
    pub(super) fn end(&mut self, part: Part) -> anyhow::Result<()> {
        let Some(at) = self.running.iter().position(|(running, _)| *running == part) else { return Ok(()) };
        let (_, run) = self.running.swap_remove(at);
        run.stop();
        let summary = run.finish()?;
        self.ended.add(&summary.total);
        self.failures.extend(summary.failures);
        self.complaints.extend(summary.complaints);
        Ok(())
    }

    /// Ends all parts.
    pub(super) fn end_all(&mut self) -> anyhow::Result<()> {
        let parts: Vec<Part> = self.running.iter().map(|(part, _)| *part).collect();
        self.running.iter().for_each(|(_, run)| run.stop());
        parts.into_iter().try_for_each(|part| self.end(part))
    }

    /// Returns the tally since the previous call.
    pub(super) fn look(&mut self) -> Tally {
        let mut interval = Tally::default();
        for (_, run) in &mut self.running {
            interval.add(&run.take_interval());
        }
        interval
    }

    /// Total up to the last call of [`Loads::look`].
    pub(super) fn total(&self) -> Tally {
        let mut total = self.ended.clone();
        self.running.iter().for_each(|(_, run)| total.add(run.total()));
        total
    }

    /// Returns the requests that failed since the last call.
    pub(super) fn take_failures(&mut self) -> Vec<Failure> {
        let mut failures = std::mem::take(&mut self.failures);
        self.running.iter_mut().for_each(|(_, run)| failures.extend(run.take_failures()));
        failures
    }

    /// First errors and wrong replies of ended parts, as text.
    pub(super) fn complaints(&self) -> &[String] {
        &self.complaints
    }
}
