//! Keys that live elsewhere than their slots come home because commands need them together with other keys: which moves
//! bring them, and who waits for what.
//!
//! A function of what is wanted, of where keys live and of the moves that are open; whoever asks begins these moves,
//! and asks again when something has changed. A slot takes part in one move at a time, so what it has at several nodes
//! comes home from one after the other.
//!
//! Not a decision of the workers that meet such commands: they do not know of moves that wait to begin, and several of
//! them want the same keys at once.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::topology::{MoveId, NodeId, Placement, Slot, Topology};

/// Moves that bring keys from one node to another because commands need them, at the same time. What is wanted beyond
/// that goes together in the next one, so that many commands do not begin as many moves.
pub const COLOCATE_MAX: usize = 4;

/// What a command needs to live together.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ColocationRequest {
    /// These keys, of one slot, with the other keys of the command.
    Keys(Vec<Arc<[u8]>>),
    /// All keys of a slot: the command may use any of them.
    Slot(Slot),
}

impl ColocationRequest {
    /// The slot; `None` where no key is wanted.
    fn slot(&self, topology: &Topology) -> Option<Slot> {
        match self {
            Self::Keys(keys) => keys.first().map(|key| topology.slot_of(key)),
            Self::Slot(slot) => Some(*slot),
        }
    }

    /// Those that are not at home, each with the node at which it lives.
    fn away(&self, topology: &Topology) -> Vec<(Arc<[u8]>, NodeId)> {
        match self {
            Self::Keys(keys) => {
                keys.iter().filter_map(|key| Some((Arc::clone(key), topology.exception(key)?))).collect()
            }
            Self::Slot(slot) => topology.exceptions_in(*slot).map(|(key, node)| (Arc::clone(key), node)).collect(),
        }
    }

    /// Whether it is about one of these keys, which are in order.
    #[must_use]
    pub fn concerns(&self, placement: &Placement, keys: &[Arc<[u8]>]) -> bool {
        match self {
            Self::Keys(own) => own.iter().any(|key| keys.binary_search(key).is_ok()),
            Self::Slot(slot) => keys.iter().any(|key| placement.slot_of(key) == *slot),
        }
    }
}

/// A move that is not over.
#[derive(Clone, Copy, Debug)]
pub struct Open<'a> {
    /// Its number.
    pub id: MoveId,
    /// From where.
    pub source: NodeId,
    /// To where.
    pub target: NodeId,
    /// The slots that take part, ascending.
    pub slots: &'a [Slot],
    /// Somebody has paused it.
    pub is_paused: bool,
    /// It was begun because commands need its keys.
    pub colocates: bool,
}

/// How it stands with what a command needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ColocationStatus {
    /// All of it lives where its slot is.
    Home,
    /// It is on its way, or will be.
    Wait,
    /// Its slot is part of this move, which is paused.
    Paused(MoveId),
    /// It cannot come, because this node is away.
    Away(NodeId),
}

/// A move to begin.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Colocation {
    /// Where the keys live.
    pub source: NodeId,
    /// The owner of their slots.
    pub target: NodeId,
    /// The keys, each with the place of the first who wants it.
    pub keys: BTreeMap<Arc<[u8]>, usize>,
    /// The places of all who want any of them.
    pub wanted_by: BTreeSet<usize>,
}

/// What comes of what is wanted.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Plan {
    /// How each stands.
    pub standings: Vec<ColocationStatus>,
    /// What is to begin: slots of no two of them, and of none that is open, are the same.
    pub moves: Vec<Colocation>,
}

/// Which moves bring home what is wanted.
#[must_use]
pub fn plan(
    topology: &Topology,
    wanted: &[&ColocationRequest],
    open: &[Open<'_>],
    is_away: impl Fn(NodeId) -> bool,
) -> Plan {
    let mut plan = Plan::default();
    let mut moves: BTreeMap<(NodeId, NodeId), Colocation> = BTreeMap::new();
    // From where a slot's keys come this time.
    let mut from: BTreeMap<Slot, NodeId> = BTreeMap::new();
    for (place, wanted) in wanted.iter().enumerate() {
        let Some(slot) = wanted.slot(topology) else {
            plan.standings.push(ColocationStatus::Home);
            continue;
        };
        // Also where its keys are at home by the topology: this move may take them away, and workers know of that
        // before the topology does.
        if let Some(busy) = open.iter().find(|open| open.slots.binary_search(&slot).is_ok()) {
            plan.standings.push(match [busy.source, busy.target].into_iter().find(|node| is_away(*node)) {
                _ if busy.is_paused => ColocationStatus::Paused(busy.id),
                Some(node) => ColocationStatus::Away(node),
                None => ColocationStatus::Wait,
            });
            continue;
        }
        let away = wanted.away(topology);
        let target = topology.owner(slot);
        let Some((_, first)) = away.first() else {
            plan.standings.push(ColocationStatus::Home);
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
