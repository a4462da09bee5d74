//! Plans the moves that return keys to their slot owner because commands need them together with other keys.
//!
//! A pure function of the requests, the key locations, and the open moves. The caller starts the moves and calls again
//! after a change. A slot takes part in one move at a time, so its keys at several nodes return one node after the
//! other.
//!
//! Not decided by the workers that receive the commands: they do not see queued moves, and several may need the same
//! keys at the same time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::topology::{MoveId, NodeId, Placement, Slot, Topology};

/// Maximum concurrent colocation moves per pair of nodes. Further requests are combined in the next move, so that many
/// commands do not start as many moves.
pub const COLOCATE_MAX: usize = 4;

/// Keys that a command needs at one node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ColocationRequest {
    /// Keys of one slot, to be joined with the other keys of the command.
    Keys(Vec<Arc<[u8]>>),
    /// All keys of a slot: the command may use any of them.
    Slot(Slot),
}

impl ColocationRequest {
    /// Slot of the request; `None` if it has no key.
    fn slot(&self, topology: &Topology) -> Option<Slot> {
        match self {
            Self::Keys(keys) => keys.first().map(|key| topology.slot_of(key)),
            Self::Slot(slot) => Some(*slot),
        }
    }

    /// Keys with a placement override, with their current node.
    fn misplaced(&self, topology: &Topology) -> Vec<(Arc<[u8]>, NodeId)> {
        match self {
            Self::Keys(keys) => {
                keys.iter().filter_map(|key| Some((Arc::clone(key), topology.placement_override(key)?))).collect()
            }
            Self::Slot(slot) => topology.overrides_in(*slot).map(|(key, node)| (Arc::clone(key), node)).collect(),
        }
    }

    /// Whether the request includes one of `keys`, which must be sorted.
    #[must_use]
    pub fn concerns(&self, placement: &Placement, keys: &[Arc<[u8]>]) -> bool {
        match self {
            Self::Keys(own) => own.iter().any(|key| keys.binary_search(key).is_ok()),
            Self::Slot(slot) => keys.iter().any(|key| placement.slot_of(key) == *slot),
        }
    }
}

/// A move that has not ended.
#[derive(Clone, Copy, Debug)]
pub struct Open<'a> {
    /// Move id.
    pub id: MoveId,
    /// Current node of the keys.
    pub source: NodeId,
    /// Node that receives the keys.
    pub target: NodeId,
    /// The slots that take part, ascending.
    pub slots: &'a [Slot],
    /// Whether an operator has paused the move.
    pub is_paused: bool,
    /// Whether the move was started for colocation.
    pub colocates: bool,
}

/// State of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ColocationStatus {
    /// All keys are at their slot owner.
    AtSlotOwner,
    /// The keys are in transit, or will be.
    Wait,
    /// The slot is part of this paused move.
    Paused(MoveId),
    /// The keys cannot move because this node is away.
    Away(NodeId),
}

/// A move to begin.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Colocation {
    /// Node that has the keys.
    pub source: NodeId,
    /// Owner of the keys' slots.
    pub target: NodeId,
    /// The keys, each with the index of the first request for it.
    pub keys: BTreeMap<Arc<[u8]>, usize>,
    /// Indexes of all requests for any of the keys.
    pub wanted_by: BTreeSet<usize>,
}

/// Result of [`plan`].
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Plan {
    /// State of each request, in the order of the requests.
    pub standings: Vec<ColocationStatus>,
    /// Moves to start. Their slots are disjoint from each other and from open moves.
    pub moves: Vec<Colocation>,
}

/// Returns the moves that colocate the requested keys.
#[must_use]
pub fn plan(
    topology: &Topology,
    wanted: &[&ColocationRequest],
    open: &[Open<'_>],
    is_away: impl Fn(NodeId) -> bool,
) -> Plan {
    let mut plan = Plan::default();
    let mut moves: BTreeMap<(NodeId, NodeId), Colocation> = BTreeMap::new();
    // Node from which the keys of each slot return first.
    let mut from: BTreeMap<Slot, NodeId> = BTreeMap::new();
    for (place, wanted) in wanted.iter().enumerate() {
        let Some(slot) = wanted.slot(topology) else {
            plan.standings.push(ColocationStatus::AtSlotOwner);
            continue;
        };
        // Also if the topology has no override for the slot: this move may add one, and workers apply that before the
        // topology does.
        if let Some(busy) = open.iter().find(|open| open.slots.binary_search(&slot).is_ok()) {
            plan.standings.push(match [busy.source, busy.target].into_iter().find(|node| is_away(*node)) {
                _ if busy.is_paused => ColocationStatus::Paused(busy.id),
                Some(node) => ColocationStatus::Away(node),
                None => ColocationStatus::Wait,
            });
            continue;
        }
        let away = wanted.misplaced(topology);
        let target = topology.owner(slot);
        let Some((_, first)) = away.first() else {
            plan.standings.push(ColocationStatus::AtSlotOwner);
            continue;
        };
        if let Some(node) = away.iter().map(|(_, node)| *node).chain([target]).find(|node| is_away(*node)) {
            plan.standings.push(ColocationStatus::Away(node));
            continue;
        }
        plan.standings.push(ColocationStatus::Wait);
        let source = from.get(&slot).copied().unwrap_or(*first);
        let under_way =
            open.iter().filter(|open| open.colocates && (open.source, open.target) == (source, target)).count();
        if under_way >= COLOCATE_MAX {
            continue;
        }
        from.insert(slot, source);
        for (key, _) in away.into_iter().filter(|(_, node)| *node == source) {
            let colocation = moves.entry((source, target)).or_insert_with(|| Colocation {
                source,
                target,
                keys: BTreeMap::new(),
                wanted_by: BTreeSet::new(),
            });
            colocation.keys.entry(key).or_insert(place);
            colocation.wanted_by.insert(place);
        }
    }
    plan.moves = moves.into_values().collect();
    plan
}
