//! Log lines that any client can cause: at most one per second, with the number of suppressed ones.

/// Minimum interval of such log lines per worker.
const RARELY_US: u64 = 1_000_000;

/// Limits log lines that any client can cause.
#[derive(Debug, Default)]
pub(super) struct LogThrottle {
    next_us: u64,
    suppressed: u64,
}

impl LogThrottle {
    /// Returns whether to log now: then with the number of lines suppressed since the last one.
    pub(super) fn allow(&mut self, now_us: u64) -> Option<Suppressed> {
        if now_us < self.next_us {
            self.suppressed += 1;
            return None;
        }
        self.next_us = now_us + RARELY_US;
        Some(Suppressed(std::mem::take(&mut self.suppressed)))
    }
}

/// Number of suppressed log lines.
pub(super) struct Suppressed(u64);

impl Suppressed {
    /// For a field of a log line; omitted if nothing was suppressed.
    pub(super) fn count(&self) -> Option<u64> {
        (self.0 > 0).then_some(self.0)
    }
}
