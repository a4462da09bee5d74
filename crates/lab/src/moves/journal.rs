//! What the journal costs: the same move with a router that waits for the disk, as it must, and with one that does not.
//!
//! The second one is for this measurement only: a power cut would lose keys. It still writes every record, so what is
//! compared is the waiting, which is what could be saved by giving up safety; the bytes are in the table of costs.

use std::time::Duration;

use anyhow::Result;

use super::{Bench, Journal};

/// Times each, in turn, so that a machine that gets slower favours neither.
const ROUNDS: usize = 3;

/// Keys per second of one way.
#[derive(Debug, Clone)]
pub(super) struct Throughput {
    /// Whether the disk was waited for.
    pub(super) journal: Journal,
    /// Keys of each move.
    pub(super) keys: u64,
    /// How long each move took.
    pub(super) times: Vec<Duration>,
    /// Times that the disk was waited for, in the last of them.
    pub(super) syncs: u64,
}

impl Throughput {
    /// The move in the middle.
    pub(super) fn median(&self) -> Duration {
        let mut times = self.times.clone();
        times.sort_unstable();
        times.get(times.len() / 2).copied().unwrap_or_default()
    }
}

impl Bench<'_> {
    pub(super) fn journal(&mut self) -> Result<()> {
        let mut kept = [Journal::Durable, Journal::NotWaitedFor].map(|journal| Throughput {
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
