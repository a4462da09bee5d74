//! Observes a run: replies during moves, and the counts of the servers.
//!
//! Servers count commands themselves (INFO). That includes reads that the router sends to both nodes, which clients do
//! not notice.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::moves::admin::{self, MoveState};
use crate::moves::generator::{Counts, Run};
use crate::moves::site::info;

/// Interval between polls of moves, and so the precision of their duration.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Interval of a curve.
const CURVE_INTERVAL: Duration = Duration::from_secs(1);

/// Observations until the last move has finished.
#[derive(Debug)]
pub(super) struct Watched {
    pub(super) counts: Counts,
    pub(super) took: Duration,
    /// Each second of the move, without the last, incomplete one.
    pub(super) curve: Vec<Second>,
}

/// Replies of one second.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct Second {
    /// Replies per second.
    pub(super) rate: f64,
    /// Share of the replies that found nothing, in percent.
    pub(super) lost_percent: f64,
    pub(super) p50_ms: f64,
    pub(super) p99_ms: f64,
}

impl Second {
    pub(super) fn of(counts: &Counts, time: Duration) -> Self {
        let milliseconds = |quantile: f64| counts.tally.quantile(quantile).as_secs_f64() * 1e3;
        Self {
            rate: counts.tally.replies as f64 / time.as_secs_f64(),
            lost_percent: 100.0 * counts.missing as f64 / counts.tally.replies.max(1) as f64,
            p50_ms: milliseconds(0.5),
            p99_ms: milliseconds(0.99),
        }
    }
}

impl Watched {
    pub(super) fn longest_gap_ms(&self) -> f64 {
        self.counts.longest_gap.as_secs_f64() * 1e3
    }

    pub(super) fn latency_ms(&self, quantile: f64) -> f64 {
        self.counts.tally.quantile(quantile).as_secs_f64() * 1e3
    }
}

/// Watches the load until all these moves are done.
pub(super) fn until_done(
    run: &Run,
    site: SocketAddr,
    moves: &[u64],
    begun: Instant,
    timeout: Duration,
    stop: &AtomicBool,
) -> Result<Watched> {
    let (mut counts, mut curve, mut last) = (Counts::default(), Vec::new(), begun);
    let took = loop {
        check_interrupted(stop)?;
        if are_done(site, moves)? {
            break begun.elapsed();
        }
        ensure!(begun.elapsed() < timeout, "the moves did not end within {timeout:?}; --patience extends the time");
        if last.elapsed() >= CURVE_INTERVAL {
            let (of_second, now) = (run.take(), Instant::now());
            curve.push(Second::of(&of_second, now - last));
            counts.add(&of_second);
            last = now;
        }
        std::thread::sleep(POLL_INTERVAL);
    };
    counts.add(&run.take());
    Ok(Watched { counts, took, curve })
}

fn are_done(site: SocketAddr, moves: &[u64]) -> Result<bool> {
    let report = admin::report(site)?;
    let mut done = true;
    for id in moves {
        match admin::state_of(&report, *id)? {
            MoveState::Done => {}
            MoveState::Stopped(why) => bail!("move {id} stopped: {why}"),
            MoveState::Open => done = false,
        }
    }
    Ok(done)
}

/// Lets the load run for this time. Returns the counts and the exact time.
pub(super) fn for_a_while(run: &Run, time: Duration, stop: &AtomicBool) -> Result<(Counts, Duration)> {
    run.take();
    let begun = Instant::now();
    while begun.elapsed() < time {
        check_interrupted(stop)?;
        std::thread::sleep(POLL_INTERVAL.min(time));
    }
    Ok((run.take(), begun.elapsed()))
}

pub(super) fn check_interrupted(stop: &AtomicBool) -> Result<()> {
    ensure!(
        !stop.load(Ordering::Relaxed),
        "interrupted; finished runs are stored, and the same command resumes after them"
    );
    Ok(())
}

/// Counts of all servers together, since their start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Served {
    /// GET and SET, which the load sends. The mover copies by other commands, except for a single key that a client
    /// waits for.
    pub(super) commands: u64,
    /// Bytes received and sent.
    pub(super) bytes: u64,
}

impl Served {
    pub(super) fn by(servers: &[SocketAddr]) -> Result<Self> {
        let mut all = Self::default();
        for server in servers {
            for section in ["stats", "commandstats"] {
                let one = Self::of_info(&info(*server, section)?);
                all = Self { commands: all.commands + one.commands, bytes: all.bytes + one.bytes };
            }
        }
        Ok(all)
    }

    fn of_info(text: &str) -> Self {
        let sum = |names: [&str; 2]| {
            let values = text.lines().filter_map(|line| names.iter().find_map(|name| line.strip_prefix(name)));
            values.filter_map(|value| value.split(',').next()?.trim().parse::<u64>().ok()).sum()
        };
        Self {
            commands: sum(["cmdstat_get:calls=", "cmdstat_set:calls="]),
            bytes: sum(["total_net_input_bytes:", "total_net_output_bytes:"]),
        }
    }

    pub(super) fn since(self, earlier: Self) -> Self {
        Self {
            commands: self.commands.saturating_sub(earlier.commands),
            bytes: self.bytes.saturating_sub(earlier.bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_counters_are_parsed() {
        let text = "# Commandstats\r\ncmdstat_get:calls=7,usec=1\r\ncmdstat_getex:calls=100,usec=1\r\ncmdstat_set:calls=2,usec=3\r\n";
        assert_eq!(Served::of_info(text), Served { commands: 9, bytes: 0 });
        let text = "total_net_input_bytes:10\r\ntotal_net_output_bytes:5\r\ntotal_net_repl_input_bytes:99\r\n";
        assert_eq!(Served::of_info(text), Served { commands: 0, bytes: 15 });
    }
}
