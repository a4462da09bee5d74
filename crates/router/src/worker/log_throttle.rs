//! What anybody can cause is said at most once a second, with how often it was not said.

/// What anybody can cause is logged at most so often per worker.
const RARELY_US: u64 = 1_000_000;

/// Keeps what anybody can cause from filling the log.
#[derive(Debug, Default)]
pub(super) struct LogThrottle {
    next_us: u64,
    suppressed: u64,
}

impl LogThrottle {
    /// Whether to say so now: then with how many times it was not said since the last.
    pub(super) fn allow(&mut self, now_us: u64) -> Option<Suppressed> {
        if now_us < self.next_us {
            self.suppressed += 1;
            return None;
        }
        self.next_us = now_us + RARELY_US;
        Some(Suppressed(std::mem::take(&mut self.suppressed)))
    }
}

/// How many times something was not said.
pub(super) struct Suppressed(u64);

impl Suppressed {
    /// For a field of a log line, which is left out where there is nothing to tell.
    pub(super) fn count(&self) -> Option<u64> {
        (self.0 > 0).then_some(self.0)
    }
}
