//! What a fleet of one node takes and a fleet of two would not: counted by command while there is one node, so that
//! whoever adds the second knows beforehand.
//!
//! A worker counts for itself ([`Tally`]) and adds that to what all have counted ([`SingleNodeUsage`]) now and then: a client's
//! command takes no lock.
//!
//! Not a log of commands: an application calls the same few in the same way, and their names and numbers are what its
//! owner needs.

use std::collections::BTreeMap;
use std::sync::Mutex;

use crate::shared::lock;

/// A limit that a command would meet if there were two nodes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Limit {
    /// Its keys are in several slots.
    Slots,
    /// It uses keys that it does not name, or its text is not one that is run before several nodes.
    Unnamed,
    /// It runs code that is not proved to keep to the keys that it names: an error only where it does not.
    Unproved,
    /// It concerns every node, and they cannot execute it at one instant: `SWAPDB`, and what concerns every node in a
    /// transaction.
    EveryNode,
}

impl Limit {
    /// Its name in metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Slots => "slots",
            Self::Unnamed => "unnamed-keys",
            Self::Unproved => "unproved-code",
            Self::EveryNode => "every-node",
        }
    }

    /// What is so of the commands counted.
    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            Self::Slots => "keys of several slots",
            Self::Unnamed => "keys that it does not name",
            Self::Unproved => "code that may use keys that it does not name: an error where it does",
            Self::EveryNode => "it concerns every node at one instant",
        }
    }

    /// The answer to EXEC where another node has joined since such a command was queued.
    pub(crate) const fn aborted(self) -> &'static str {
        match self {
            Self::Slots => {
                "EXECABORT Transaction discarded because of: CROSSSLOT Keys in the transaction don't hash to the same slot, and another node has joined since"
            }
            Self::Unnamed | Self::Unproved => {
                "EXECABORT Transaction discarded because of: a command in it may use keys that it does not name, and another node has joined since"
            }
            Self::EveryNode => {
                "EXECABORT Transaction discarded because of: a command in it concerns every node, and another node has joined since. Call it outside of MULTI"
            }
        }
    }
}

/// How often a command would have met a limit.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Limited {
    /// The command's name.
    pub command: String,
    /// Which limit.
    pub limit: Limit,
    /// How often, since the router has started.
    pub count: u64,
}

/// What one worker has counted and not yet added.
#[derive(Debug, Default)]
pub(crate) struct Tally(Vec<Limited>);

impl Tally {
    /// A command was sent that would have met a limit.
    pub(crate) fn note(&mut self, command: &str, limit: Limit) {
        match self.0.iter_mut().find(|known| known.limit == limit && known.command == command) {
            Some(known) => known.count += 1,
            None => self.0.push(Limited { command: command.to_owned(), limit, count: 1 }),
        }
    }

    /// Adds it to what all have counted.
    #[inline]
    pub(crate) fn add_to(&mut self, all: &SingleNodeUsage) {
        if !self.0.is_empty() {
            let mut sums = lock(&all.0);
            for Limited { command, limit, count } in self.0.drain(..) {
                *sums.entry((command, limit)).or_default() += count;
            }
        }
    }
}

/// What all workers have counted.
#[derive(Debug, Default)]
pub(crate) struct SingleNodeUsage(Mutex<BTreeMap<(String, Limit), u64>>);

impl SingleNodeUsage {
    /// By command.
    pub(crate) fn counted(&self) -> Vec<Limited> {
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
        assert_eq!(all.counted(), []);
        one.add_to(&all);
        other.add_to(&all);
        one.add_to(&all);
        let of = |limit, count| Limited { command: "EVAL".to_owned(), limit, count };
        assert_eq!(all.counted(), [of(Limit::Slots, 1), of(Limit::Unproved, 3)]);
    }
}
