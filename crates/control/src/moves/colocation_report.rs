//! Report of co-location: keys that commands have brought together, groups, moves and refusals.
//!
//! The thread that starts the moves owns most of this state, so it is queried, rather than shared under a lock that a plan
//! would hold.

use std::collections::{BTreeSet, VecDeque};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use switchyard_policy::migration::Key;
use switchyard_router::ColocateRequest;

use super::Moves;
use super::colocate::ColocationEvent;
use crate::admin::{
    ColocatedKeyReport, ColocationRefusalReport, ColocationReport, ColocationWaitReport, KeyGroupReport, OperationError,
};

/// Maximum number of remembered refusals. They are listed completely.
const REFUSALS_MAX: usize = ColocationReport::LISTED_MAX;

/// Number of keys of a group whose names are listed.
const NAMES_MAX: usize = 4;

/// Maximum length of a listed name, in bytes.
const NAME_BYTES_MAX: usize = 64;

/// Maximum wait for the thread, which may be recording moves.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// A refused request.
#[derive(Clone, Debug)]
struct Refusal {
    at: Instant,
    command: String,
    keys: Option<usize>,
    why: String,
}

/// The latest refused requests, oldest first.
#[derive(Clone, Debug, Default)]
pub(super) struct Refusals(VecDeque<Refusal>);

impl Refusals {
    /// Remembers a refusal.
    pub(super) fn note(&mut self, request: &ColocateRequest, why: &str) {
        if self.0.len() == REFUSALS_MAX {
            self.0.pop_front();
        }
        let (command, keys) = (request.command().to_owned(), request.wanted().key_count());
        self.0.push_back(Refusal { at: Instant::now(), command, keys, why: why.to_owned() });
    }
}

/// A remembered group.
#[derive(Debug)]
pub(super) struct GroupState {
    /// Time since its last move.
    pub(super) age: Duration,
    /// Number of keys.
    pub(super) count: usize,
    /// First keys, for display.
    pub(super) first: Vec<Key>,
}

impl GroupState {
    pub(super) fn new(age: Duration, keys: &BTreeSet<Key>) -> Self {
        Self { age, count: keys.len(), first: keys.iter().take(NAMES_MAX).cloned().collect() }
    }
}

/// State of the thread.
#[derive(Debug)]
pub(super) struct ColocatorState {
    /// The latest groups, and the number of all.
    pub(super) groups: (Vec<GroupState>, usize),
    /// The oldest waiting commands, and the number of all.
    pub(super) waiting: (Vec<ColocationWaitReport>, usize),
    pub(super) refusals: Refusals,
}

/// Returns a printable name, shortened.
fn shown(key: &Key) -> String {
    let cut = key.len() > NAME_BYTES_MAX;
    let name = &key[..key.len().min(NAME_BYTES_MAX)];
    format!("{}{}", name.escape_ascii(), if cut { "..." } else { "" })
}

impl Moves {
    /// Returns the report. `named`: with names of keys, which only some clients may read.
    ///
    /// # Errors
    /// If the router is not serving, or the thread does not reply.
    pub(crate) fn colocation_report(&self, named: bool) -> Result<ColocationReport, OperationError> {
        let topology = self.topology_now()?;
        let (reply, state) = mpsc::sync_channel(1);
        self.colocations.notify(ColocationEvent::Report(reply));
        let state = state.recv_timeout(REPLY_TIMEOUT).map_err(|_| {
            OperationError::Unavailable("the thread that brings keys together does not reply; see the log".to_owned())
        })?;
        let brought: Vec<_> = self
            .colocations
            .latest()
            .into_iter()
            .filter_map(|(at, key, commands)| topology.placement_override(&key).map(|node| (at, key, commands, node)))
            .collect();
        let keys = brought.iter().take(ColocationReport::LISTED_MAX).map(|(at, key, commands, node)| {
            let slot = topology.slot_of(key);
            ColocatedKeyReport {
                key: named.then(|| shown(key)),
                slot: slot.number(),
                owner: self.name(topology.owner(slot)),
                node: self.name(*node),
                commands: commands.to_string(),
                seconds_ago: at.elapsed().as_secs(),
            }
        });
        let group = |group: &GroupState| {
            let nodes: BTreeSet<_> = group.first.iter().map(|key| topology.lives_at(key)).collect();
            KeyGroupReport {
                keys: group.count as u64,
                names: if named { group.first.iter().map(shown).collect() } else { Vec::new() },
                nodes: nodes.into_iter().map(|node| self.name(node)).collect(),
                seconds_ago: group.age.as_secs(),
            }
        };
        let refusal = |refusal: &Refusal| ColocationRefusalReport {
            command: refusal.command.clone(),
            keys: refusal.keys.map(|keys| keys as u64),
            reason: refusal.why.clone(),
            seconds_ago: refusal.at.elapsed().as_secs(),
        };
        let moves = self.report();
        let moves = moves.moves.into_iter().chain(moves.ended.into_iter().rev());
        Ok(ColocationReport {
            overrides: topology.override_count() as u64,
            brought: brought.len() as u64,
            keys: keys.collect(),
            groups_total: state.groups.1 as u64,
            groups: state.groups.0.iter().map(group).collect(),
            waiting_total: state.waiting.1 as u64,
            waiting: state.waiting.0,
            moves: moves.filter(|m| !m.home_for.is_empty()).take(ColocationReport::LISTED_MAX).collect(),
            refusals: state.refusals.0.iter().rev().map(refusal).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_are_shortened_and_escaped() {
        assert_eq!(shown(&Key::from(&b"a\xff"[..])), "a\\xff");
        assert_eq!(shown(&Key::from(vec![b'x'; 65])), format!("{}...", "x".repeat(64)));
    }
}
