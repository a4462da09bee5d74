//! The part of a worker's turn that hits may take. A pipeline of a client can ask for thousands of large replies at
//! once, and each is there at once: without a bound one client's pipeline keeps all others of its worker waiting.

/// Bytes that one client is given at a time.
const RUN_BYTES_MAX: usize = 1 << 20;

/// Bytes that all are given in a turn before each has to do with [`CLIENT_BYTES_MIN`].
const TURN: usize = 8 << 20;

/// Bytes that a client is given in a turn of many.
const CLIENT_BYTES_MIN: usize = 64 << 10;

/// What was given in the turn under way.
#[derive(Clone, Copy, Debug, Default)]
pub struct TurnBudget {
    turn_us: u64,
    in_turn: usize,
    in_run: usize,
}

impl TurnBudget {
    /// Commands of a client are looked at, in the turn that began then.
    #[inline]
    pub fn begin(&mut self, turn_us: u64) {
        if self.turn_us != turn_us {
            *self = Self { turn_us, ..Self::default() };
        }
        self.in_run = 0;
    }

    /// The client is given a copy of so many bytes.
    #[inline]
    pub fn give(&mut self, bytes: usize) {
        self.in_run += bytes;
        self.in_turn += bytes;
    }

    /// The others are to have their turn first.
    #[inline]
    #[must_use]
    pub const fn is_over(&self) -> bool {
        self.in_run >= RUN_BYTES_MAX || (self.in_turn >= TURN && self.in_run >= CLIENT_BYTES_MIN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hits of 60 kB that a client gets before others have their turn.
    fn run(share: &mut TurnBudget, turn_us: u64) -> usize {
        share.begin(turn_us);
        let mut hits = 0;
        while !share.is_over() && hits < 10_000 {
            share.give(60_000);
            hits += 1;
        }
        hits
    }

    #[test]
    fn a_turn_has_an_end_however_much_is_asked_for() {
        let mut share = TurnBudget::default();
        let hits: usize = (0..20).map(|_| run(&mut share, 1)).sum();
        assert!(hits * 60_000 < TURN + 2 * RUN_BYTES_MAX + 20 * 2 * 60_000, "{hits}");
        assert!(run(&mut share, 1) >= 1, "everybody gets something in each turn");
        assert_eq!(run(&mut share, 2), RUN_BYTES_MAX.div_ceil(60_000), "another turn");
    }
}
