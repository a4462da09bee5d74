//! The clients of the demo: several loads at once, each with keys of its own, each checked.

use std::net::SocketAddr;
use std::time::Duration;

use switchyard_bench::load::{self, Doubt, Failure, Mix, Pace, Run, Sharing, Skew, Tally, ValueSizes};
use switchyard_bench::random::YCSB_THETA;

/// Requests that one connection may have under way.
const PIPELINE: usize = 16;
/// Keys of each type.
const KEYS: u64 = 20_000;
/// Connections to the key that everybody reads, at least.
const READERS: usize = 20;
/// Longer than any story: each load is stopped.
const FOREVER: Duration = Duration::from_secs(24 * 3600);

/// A part of the load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// All the time: all commands, some keys more than others.
    Daily,
    /// Many read one key, and one writes it.
    Read,
    /// Two keys are written all the time.
    Written,
    /// More of everything.
    Rush,
}

impl Part {
    /// Requests per second, beside those of the start.
    pub(super) fn rate(self, start: u32) -> f64 {
        let times = match self {
            Self::Daily | Self::Written => 1.0,
            Self::Read => 1.5,
            Self::Rush => 3.0,
        };
        f64::from(start) * times
    }
}

/// All of them together.
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

    /// Begins a part. Its keys begin with `prefix`, as no others do.
    pub(super) fn begin(&mut self, part: Part, prefix: &str) -> anyhow::Result<()> {
        let (connections, mix, keys, skew, sharing) = match part {
            Part::Daily => (self.connections, Mix::default(), KEYS, Skew::Zipfian(YCSB_THETA), Sharing::Owned),
            // One of them writes. A key that is written more often than one time in five is none for copies.
            Part::Read => (self.connections.max(READERS), Mix::default(), 1, Skew::Uniform, Sharing::OneWriter),
            Part::Written => (2, "incr=1".parse()?, 2, Skew::Uniform, Sharing::Owned),
            Part::Rush => (self.connections, Mix::default(), KEYS, Skew::Uniform, Sharing::Owned),
        };
        let settings = load::Settings {
            target: self.target,
            threads: 1, // more would take from the router what they measure: machines that run demos are small
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

    /// Ends a part, once all of its requests have their answers.
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

    /// Ends all of them.
    pub(super) fn end_all(&mut self) -> anyhow::Result<()> {
        let parts: Vec<Part> = self.running.iter().map(|(part, _)| *part).collect();
        self.running.iter().for_each(|(_, run)| run.stop());
        parts.into_iter().try_for_each(|part| self.end(part))
    }

    /// The tally since the last look.
    pub(super) fn look(&mut self) -> Tally {
        let mut interval = Tally::default();
        for (_, run) in &mut self.running {
            interval.add(&run.take_interval());
        }
        interval
    }

    /// All that happened until the last look.
    pub(super) fn total(&self) -> Tally {
        let mut total = self.ended.clone();
        self.running.iter().for_each(|(_, run)| total.add(run.total()));
        total
    }

    /// The requests that were answered with an error since the last call.
    pub(super) fn take_failures(&mut self) -> Vec<Failure> {
        let mut failures = std::mem::take(&mut self.failures);
        self.running.iter_mut().for_each(|(_, run)| failures.extend(run.take_failures()));
        failures
    }

    /// The first errors and wrong replies of those that have ended, in words.
    pub(super) fn complaints(&self) -> &[String] {
        &self.complaints
    }
}
