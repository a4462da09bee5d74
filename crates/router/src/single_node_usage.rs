//! Commands that a fleet of one node accepts and a fleet of two would reject. Counted by command while there is one
//! node, so that operators know the effect before they add a second.
//!
//! Each worker has its own counts ([`Tally`]) and regularly adds them to the shared ones ([`SingleNodeUsage`]), so a
//! client's command takes no lock.
//!
//! Counts rather than a log: an application repeats the same few commands, and operators need their names and counts.

use std::collections::BTreeMap;
use std::sync::Mutex;

use crate::lock::lock;

/// Reason why a command would fail with two nodes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Limit {
    /// The keys are in several slots.
    Slots,
    /// The command uses undeclared keys, or its code is not accepted with several nodes.
    Unnamed,
    /// The command runs code that may use undeclared keys. Fails only if it does.
    Unproved,
    /// The command must affect all nodes at one instant: `SWAPDB`, and all-node commands in a transaction.
    EveryNode,
}

impl Limit {
    /// Value of the metrics label.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Slots => "slots",
            Self::Unnamed => "unnamed-keys",
            Self::Unproved => "unproved-code",
            Self::EveryNode => "every-node",
        }
    }

    /// Description for operators.
    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            Self::Slots => "keys of several slots",
            Self::Unnamed => "undeclared keys",
            Self::Unproved => "code that may use undeclared keys: an error if it does",
            Self::EveryNode => "must affect all nodes at one instant",
        }
    }

    /// Reply to EXEC if a node has joined since such a command was queued.
    pub(crate) const fn aborted(self) -> &'static str {
        match self {
            Self::Slots => {
                "EXECABORT Transaction discarded because of: CROSSSLOT Keys in the transaction don't hash to the same slot, and another node has joined since"
            }
            Self::Unnamed | Self::Unproved => {
                "EXECABORT Transaction discarded because of: a command in it may use undeclared keys, and another node has joined since"
            }
            Self::EveryNode => {
                "EXECABORT Transaction discarded because of: a command in it concerns every node, and another node has joined since. Call it outside of MULTI"
            }
        }
    }
}

/// Number of commands that would have failed with two nodes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Limited {
    /// Command name.
    pub command: String,
    /// Reason of the failures.
    pub limit: Limit,
    /// Number of commands since the start of the router.
    pub count: u64,
}

/// Counts of one worker, not yet added to the shared ones.
#[derive(Debug, Default)]
pub(crate) struct Tally(Vec<Limited>);

impl Tally {
    /// Counts a command that was sent and would fail with two nodes.
    pub(crate) fn note(&mut self, command: &str, limit: Limit) {
        match self.0.iter_mut().find(|known| known.limit == limit && known.command == command) {
            Some(known) => known.count += 1,
            None => self.0.push(Limited { command: command.to_owned(), limit, count: 1 }),
        }
    }

    /// Adds the counts to the shared ones.
    #[inline]
    pub(crate) fn drain_into(&mut self, all: &SingleNodeUsage) {
        if !self.0.is_empty() {
            let mut sums = lock(&all.0);
            for Limited { command, limit, count } in self.0.drain(..) {
                *sums.entry((command, limit)).or_default() += count;
            }
        }
    }
}

/// Counts of all workers.
#[derive(Debug, Default)]
pub(crate) struct SingleNodeUsage(Mutex<BTreeMap<(String, Limit), u64>>);

impl SingleNodeUsage {
    /// Returns the counts by command and limit.
    pub(crate) fn all(&self) -> Vec<Limited> {
        lock(&self.0)
            .iter()
            .map(|((command, limit), count)| Limited { command: command.clone(), limit: *limit, count: *count })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_counts_add_up_by_command_and_limit() {
        let all = SingleNodeUsage::default();
        let (mut one, mut other) = (Tally::default(), Tally::default());
        one.note("EVAL", Limit::Unproved);
        one.note("EVAL", Limit::Slots);
        one.note("EVAL", Limit::Unproved);
        other.note("EVAL", Limit::Unproved);
        assert_eq!(all.all(), []);
        one.drain_into(&all);
        other.drain_into(&all);
        one.drain_into(&all);
        let of = |limit, count| Limited { command: "EVAL".to_owned(), limit, count };
        assert_eq!(all.all(), [of(Limit::Slots, 1), of(Limit::Unproved, 3)]);
    }
}
