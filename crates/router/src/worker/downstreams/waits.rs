//! Stalls of a client, and what its next command must know about the waits that it has behind it.
//!
//! A stalled command is dispatched again from its start. So the state of a feature's wait outlives the stall, and is
//! in [`States`](super::states::States) rather than in the variants of [`Stall`].

/// Reason why no further command of a client is processed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::worker) enum Stall {
    /// Not stalled.
    None,
    /// The next command needs another lane: wait until the commands in flight are answered.
    Barrier,
    /// Too many commands in flight.
    Pipeline,
    /// Too many bytes of unread replies.
    Output,
    /// Too many unsent bytes on the connection to a node.
    Upstream,
    /// Waiting for an exclusive connection.
    Exclusive,
    /// Blocked at a node.
    Blocked,
    /// CLIENT PAUSE.
    Paused,
    /// The command is unknown, and the query for a node's commands is pending.
    Learning,
    /// A password is being checked.
    Login,
    /// Libraries of its command are being checked.
    Libraries,
    /// A fill for its key is in progress.
    Fill,
    /// Keys of its command are in transit to another node.
    Keys,
    /// Keys needed together are returning to their slot owner.
    Colocation,
    /// Movers are quiescing, or functions are being copied.
    Quiet,
    /// A reissued blocking command waits for its turn at another node.
    Turn,
    /// The source of its keys serves no more commands now, by the limit of a move.
    SourceOps,
    /// A required node is lost. Lasts until its return, or for `nodes.wait-max` after the loss.
    Outage,
}

impl Stall {
    /// Stalls that one event ends for many clients, and that are therefore listed.
    pub(in crate::worker) const LISTED: [Stall; 5] =
        [Stall::Keys, Stall::Colocation, Stall::Quiet, Stall::Turn, Stall::Outage];

    /// Index in `LISTED`.
    pub(super) fn list(self) -> Option<usize> {
        Self::LISTED.iter().position(|stall| *stall == self)
    }
}

/// Stall of a client, and notes about earlier waits of its command.
#[derive(Debug)]
pub(in crate::worker) struct Waits {
    stall: Stall,
    /// Membership in the lists of `Downstreams::stalled`, one bit each.
    listed: u8,
    stalled_at_us: u64,
    /// Last stalled command and the duration of its stall in microseconds, for the slow log.
    last: (u32, u32),
    /// Error after a wait for an exclusive connection.
    refusal: Option<Box<str>>,
    /// The command has waited for a fill. Without a copy now, the node replies.
    has_had_fill: bool,
    /// The stalled command was already counted against limits.
    was_counted: bool,
    /// The command has waited for the list of a node's commands.
    has_learned: bool,
}

impl Waits {
    pub(super) fn new() -> Self {
        Self {
            stall: Stall::None,
            listed: 0,
            stalled_at_us: 0,
            last: (0, 0),
            refusal: None,
            has_had_fill: false,
            was_counted: false,
            has_learned: false,
        }
    }

    #[inline]
    pub(super) fn stall(&self) -> Stall {
        self.stall
    }

    /// Starts a stall. Returns the place of the list to which the client must be added, if any.
    pub(super) fn begin(&mut self, why: Stall, now_us: u64) -> Option<usize> {
        self.stall = why;
        self.stalled_at_us = now_us;
        let list = why.list().filter(|list| self.listed & (1 << list) == 0)?;
        self.listed |= 1 << list;
        Some(list)
    }

    /// Ends the stall before the command `next`, and returns it.
    pub(super) fn end(&mut self, next: u32, now_us: u64) -> Stall {
        // Excludes waits caused by the client itself: unread output, a full pipeline, and blocking commands.
        if !matches!(self.stall, Stall::Output | Stall::Pipeline | Stall::Blocked) {
            self.last = (next, self.stalled_us(now_us) as u32);
        }
        std::mem::replace(&mut self.stall, Stall::None)
    }

    /// Ends the stall without a resumption: the client is resumed already, and its next stall is determined again.
    pub(in crate::worker) fn forget(&mut self) {
        self.stall = Stall::None;
    }

    /// Whether it is in this stall. If not, it is no longer in the list of it.
    pub(super) fn stays_listed(&mut self, why: Stall, list: usize) -> bool {
        if self.stall != why {
            self.listed &= !(1 << list);
        }
        self.stall == why
    }

    /// Records that the client has read output.
    #[inline]
    pub(super) fn note_sent(&mut self, now_us: u64) {
        self.stalled_at_us = now_us;
    }

    /// Time since the beginning of its stall, or since it last read output, us.
    pub(in crate::worker) fn stalled_us(&self, now_us: u64) -> u64 {
        now_us.saturating_sub(self.stalled_at_us)
    }

    /// Time that the command `seq` was stalled before it was sent, us.
    pub(in crate::worker) fn held_us(&self, seq: u32) -> u32 {
        if self.last.0 == seq { self.last.1 } else { 0 }
    }

    /// Keeps the error after a wait for an exclusive connection. `None`: keeps an earlier one.
    pub(in crate::worker) fn refuse(&mut self, text: Option<String>) {
        self.refusal = text.map(Into::into).or(self.refusal.take());
    }

    /// Takes the error after a wait for an exclusive connection.
    pub(in crate::worker) fn take_refusal(&mut self) -> Option<Box<str>> {
        self.refusal.take()
    }

    /// Records that the command has waited for a fill.
    pub(in crate::worker) fn fill_over(&mut self) {
        self.has_had_fill = true;
    }

    /// Whether the command has waited for a fill. Resets this.
    #[inline]
    pub(in crate::worker) fn take_fill(&mut self) -> bool {
        std::mem::take(&mut self.has_had_fill)
    }

    /// Records whether the command was counted against limits.
    pub(super) fn note_counted(&mut self, was_counted: bool) {
        self.was_counted = was_counted;
    }

    /// Whether the command was already counted against limits. Resets this.
    pub(in crate::worker) fn take_counted(&mut self) -> bool {
        std::mem::take(&mut self.was_counted)
    }

    /// Whether the command waits for the list of a node's commands, for which the worker has `asked`: a client waits
    /// for it once.
    pub(in crate::worker) fn may_learn(&mut self, asked: bool) -> bool {
        asked && !std::mem::replace(&mut self.has_learned, asked)
    }
}
