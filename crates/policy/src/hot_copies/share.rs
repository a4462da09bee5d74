//! Limits the part of a worker's turn spent on hits. One pipeline can request thousands of large replies, all available
//! immediately, which would block the worker's other clients.

/// Maximum bytes for one client per run.
const RUN_BYTES_MAX: usize = 1 << 20;

/// Bytes for all clients per turn after which each run is limited to [`CLIENT_BYTES_MIN`].
const TURN: usize = 8 << 20;

/// Bytes for one client per run once [`TURN`] is used up.
const CLIENT_BYTES_MIN: usize = 64 << 10;

/// Bytes served from copies in the current turn.
#[derive(Clone, Copy, Debug, Default)]
pub struct TurnBudget {
    turn_us: u64,
    in_turn: usize,
    in_run: usize,
}

impl TurnBudget {
    /// Starts a run: the worker processes commands of one client, in the turn that began at `turn_us`.
    #[inline]
    pub fn begin(&mut self, turn_us: u64) {
        if self.turn_us != turn_us {
            *self = Self { turn_us, ..Self::default() };
        }
        self.in_run = 0;
    }

    /// Counts the bytes of a hit.
    #[inline]
    pub fn record(&mut self, bytes: usize) {
        self.in_run += bytes;
        self.in_turn += bytes;
    }

    /// Whether the run must end, so that other clients are served first.
    #[inline]
    #[must_use]
    pub const fn is_over(&self) -> bool {
        self.in_run >= RUN_BYTES_MAX || (self.in_turn >= TURN && self.in_run >= CLIENT_BYTES_MIN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hits of 60 kB for one client in a run.
    fn run(share: &mut TurnBudget, turn_us: u64) -> usize {
        share.begin(turn_us);
        let mut hits = 0;
        while !share.is_over() && hits < 10_000 {
            share.record(60_000);
            hits += 1;
        }
        hits
    }

    #[test]
    fn a_turn_is_bounded_for_any_number_of_requests() {
        let mut share = TurnBudget::default();
        let hits: usize = (0..20).map(|_| run(&mut share, 1)).sum();
        assert!(hits * 60_000 < TURN + 2 * RUN_BYTES_MAX + 20 * 2 * 60_000, "{hits}");
        assert!(run(&mut share, 1) >= 1, "every client gets a hit in each turn");
        assert_eq!(run(&mut share, 2), RUN_BYTES_MAX.div_ceil(60_000), "another turn");
    }
}
