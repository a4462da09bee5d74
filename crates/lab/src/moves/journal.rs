//! Cost of the journal: the same move with a router that waits for the disk, as it must, and with one that does not.
//!
//! The second mode exists only for this measurement: a power cut would lose keys. It still writes every record, so the
//! difference is the wait, which is the possible gain from giving up safety. The bytes are in the table of costs.

use std::time::Duration;

use anyhow::Result;

use super::{Bench, Journal};

/// Moves in each mode, interleaved so that a machine that slows down favours neither.
const ROUNDS: usize = 3;

/// Moves in one mode.
#[derive(Debug, Clone)]
pub(super) struct Throughput {
    /// Whether the router waits for the disk.
    pub(super) journal: Journal,
    /// Keys of each move.
    pub(super) keys: u64,
    /// Duration of each move.
    pub(super) times: Vec<Duration>,
    /// Disk syncs of the last move.
    pub(super) syncs: u64,
}

impl Throughput {
    /// Median duration of a move.
    pub(super) fn median(&self) -> Duration {
        let mut times = self.times.clone();
        times.sort_unstable();
        times.get(times.len() / 2).copied().unwrap_or_default()
    }
}

impl Bench<'_> {
    pub(super) fn journal(&mut self) -> Result<()> {
        let mut kept = [Journal::Durable, Journal::Unsynced].map(|journal| Throughput {
            journal,
            keys: 0,
            times: Vec::new(),
            syncs: 0,
        });
        for round in 1..=ROUNDS {
            for way in &mut kept {
                let outcome = self.move_unloaded(64, self.settings.keys, "fast", way.journal);
                if let Some((keys, took, cost)) =
                    self.attempt(&format!("round {round} with the journal {:?}", way.journal), outcome)?
                {
                    way.keys = keys;
                    way.times.push(took);
                    way.syncs = cost.syncs;
                }
            }
        }
        self.results.kept = kept.into_iter().filter(|way| !way.times.is_empty()).collect();
        Ok(())
    }
}
