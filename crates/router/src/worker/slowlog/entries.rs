//! Entries of a worker for the slow log, as kept by the command hook.

use crate::slow_log::SlowEntry;
use crate::worker::log_throttle::LogThrottle;

/// Entries of a worker for the log.
#[derive(Debug)]
pub(in crate::worker) struct SlowCommands {
    /// Threshold, us.
    from_us: u32,
    /// The bucket of entries that may be made ([`switchyard_policy::limits`]).
    pub(super) full_at_ns: u64,
    /// Entries that wait for the log's lock.
    pub(super) waiting: Vec<SlowEntry>,
    pub(super) log: LogThrottle,
}

impl SlowCommands {
    pub(in crate::worker) fn new(from_us: u32) -> Self {
        Self { from_us, full_at_ns: 0, waiting: Vec::new(), log: LogThrottle::default() }
    }

    pub(in crate::worker) const fn set_threshold(&mut self, from_us: u32) {
        self.from_us = from_us;
    }

    /// Whether any command can be slow.
    pub(in crate::worker) const fn is_on(&self) -> bool {
        self.from_us < u32::MAX
    }

    #[inline]
    pub(in crate::worker) const fn is_slow(&self, took_us: u32) -> bool {
        took_us >= self.from_us
    }
}
