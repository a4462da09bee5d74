//! What anybody can cause is said at most once a second, with how often it was not said.

/// What anybody can cause is logged at most so often per worker.
const RARELY_US: u64 = 1_000_000;

/// Keeps what anybody can cause from filling the log.
#[derive(Debug, Default)]
pub(super) struct Rarely {
    next_us: u64,
    untold: u64,
}

impl Rarely {
    /// Whether to say so now: then with how many times it was not said since the last.
    pub(super) fn tell(&mut self, now_us: u64) -> Option<Untold> {
        if now_us < self.next_us {
            self.untold += 1;
            return None;
        }
        self.next_us = now_us + RARELY_US;
        Some(Untold(std::mem::take(&mut self.untold)))
    }
}

/// How many times something was not said.
pub(super) struct Untold(u64);

impl Untold {
    /// For a field of a log line, which is left out where there is nothing to tell.
    pub(super) fn told(&self) -> Option<u64> {
        (self.0 > 0).then_some(self.0)
    }
}
