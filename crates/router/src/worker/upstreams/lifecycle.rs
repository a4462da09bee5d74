//! Life cycle of a connection: from its first attempt over reconnects to its replacement.

use super::link::Phase;

/// Idle time after which connections for the slow lane and large values are closed.
const IDLE_US: u64 = 30_000_000;

/// State of a connection and of the attempts to make it.
#[derive(Debug)]
pub(super) struct Lifecycle {
    phase: Phase,
    /// Start of the attempt, or of the handshake.
    since_us: u64,
    /// Failed attempts since it was last up.
    failures: u32,
    /// Connected with credentials that have changed since.
    stale: bool,
    /// No more commands are sent: it is replaced after the replies to commands in flight.
    retiring: bool,
    /// Was up, and is being reconnected.
    renewing: bool,
    idle_since_us: u64,
}

impl Lifecycle {
    pub(super) fn new(now_us: u64) -> Self {
        let phase = Phase::Waiting { until_us: now_us };
        Self {
            phase,
            since_us: now_us,
            failures: 0,
            stale: false,
            retiring: false,
            renewing: false,
            idle_since_us: now_us,
        }
    }

    #[inline]
    pub(super) fn phase(&self) -> Phase {
        self.phase
    }

    #[inline]
    pub(super) fn is_up(&self) -> bool {
        self.phase == Phase::Up
    }

    /// Whether commands would be executed at once: the connection is up, or is being replaced.
    pub(super) fn is_serving(&self) -> bool {
        self.is_up() || self.renewing
    }

    /// Whether a command may be passed to it: the link is up, or no attempt has failed since it was last up.
    #[inline]
    pub(super) fn takes_commands(&self) -> bool {
        self.is_up() || self.failures == 0
    }

    /// Whether commands may be sent now.
    #[inline]
    pub(super) fn sends(&self) -> bool {
        self.is_up() && !self.retiring
    }

    /// Time since the start of the attempt, or of the handshake, us.
    pub(super) fn age_us(&self, now_us: u64) -> u64 {
        now_us.saturating_sub(self.since_us)
    }

    /// Starts an attempt.
    pub(super) fn connects(&mut self, now_us: u64) {
        (self.phase, self.since_us) = (Phase::Connecting, now_us);
    }

    /// Starts the TLS handshake.
    pub(super) fn secures(&mut self) {
        self.phase = Phase::Securing;
    }

    /// Starts the handshake with the node.
    pub(super) fn greets(&mut self, now_us: u64) {
        (self.phase, self.since_us) = (Phase::Handshake, now_us);
    }

    pub(super) fn comes_up(&mut self, now_us: u64) {
        self.phase = Phase::Up;
        self.renewing = false;
        self.failures = 0;
        self.idle_since_us = now_us;
    }

    /// Makes the next attempt at this time.
    pub(super) fn wait_until(&mut self, until_us: u64) {
        self.phase = Phase::Waiting { until_us };
    }

    /// After the end of a connection that was up.
    pub(super) fn breaks(&mut self, now_us: u64) {
        (self.stale, self.retiring) = (false, false);
        self.wait_until(now_us);
    }

    /// Counts a failed attempt. Returns the number of failures, and whether the connection was being replaced.
    pub(super) fn fails(&mut self) -> (u32, bool) {
        self.failures += 1;
        (self.failures, std::mem::take(&mut self.renewing))
    }

    /// Starts with a failed attempt, or without one: commands wait for the next attempt.
    pub(super) fn set_failed(&mut self, has_failed: bool) {
        self.failures = u32::from(has_failed);
    }

    /// Records that its credentials have changed.
    pub(super) fn becomes_stale(&mut self) {
        self.stale = true;
    }

    pub(super) fn is_stale(&self) -> bool {
        self.stale
    }

    /// Sends nothing more before it is replaced.
    pub(super) fn retire(&mut self) {
        self.retiring = true;
    }

    pub(super) fn is_retiring(&self) -> bool {
        self.retiring
    }

    /// After it was closed for a replacement.
    pub(super) fn is_replaced(&mut self) {
        (self.stale, self.retiring, self.renewing) = (false, false, true);
    }

    /// Records that it is needed.
    pub(super) fn note_use(&mut self, now_us: u64) {
        self.idle_since_us = now_us;
    }

    /// Whether it was not needed for long.
    pub(super) fn is_unused(&self, now_us: u64) -> bool {
        now_us.saturating_sub(self.idle_since_us) > IDLE_US
    }
}
