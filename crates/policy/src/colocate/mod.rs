//! Plans the moves that bring keys to one node because commands need them together.
//!
//! A pure function of the requests, the key locations, and the open moves. The caller starts the moves and calls again
//! after a change. A slot takes part in one move at a time, so its keys at several nodes move one node after the other.
//!
//! Keys of one slot return to its owner: two commands could need the same key at two nodes, but the owner is unique. Keys
//! of several slots come to the node that has most of them. Requests with common keys form a group with one target, and
//! groups that alternate are merged ([`RecentGroups`]), so requests do not take keys from each other forever. An older
//! request gets its keys first, and they stay until its client has used them ([`Fleet::pinned`]).
//!
//! Not decided by the workers that receive the commands: they do not see queued moves, and several may need the same
//! keys at the same time.

mod recent;
mod target;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::topology::{
    MOVE_KEY_BYTES_MAX, MOVE_KEYS_MAX, MoveId, NodeId, OVERRIDES_MAX, Placement, Slot, Stage, Topology,
};
pub use recent::RecentGroups;
use target::{Target, targets};

/// Maximum concurrent colocation moves per pair of nodes. Further requests are combined in the next move, so that many
/// commands do not start as many moves.
pub const COLOCATE_MAX: usize = 4;

/// Maximum keys of several slots that are brought together for one command or transaction.
pub const REQUEST_KEYS_MAX: usize = 1024;

/// Maximum total length of the names of these keys, in bytes.
pub const REQUEST_BYTES_MAX: usize = 1 << 20;

/// Number of placement overrides above which no key comes along that needs a new one. The other half of the directory is
/// left for requests.
const ALONG_OVERRIDES_MAX: usize = OVERRIDES_MAX / 2;

/// Keys that a command needs at one node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ColocationRequest {
    /// Keys of one slot, to be joined with the other keys of the command at the slot owner.
    Keys(Vec<Arc<[u8]>>),
    /// All keys of a slot: the command may use any of them.
    Slot(Slot),
    /// All keys of a command, in several slots.
    Several {
        /// All keys of the command, including keys at the target.
        keys: Vec<Arc<[u8]>>,
        /// The required target: the client watches keys there. `None`: any node.
        at: Option<NodeId>,
    },
}

impl ColocationRequest {
    /// Slots of the request.
    #[must_use]
    pub fn slots(&self, placement: &Placement) -> BTreeSet<Slot> {
        match self {
            Self::Keys(keys) | Self::Several { keys, .. } => keys.iter().map(|key| placement.slot_of(key)).collect(),
            Self::Slot(slot) => [*slot].into(),
        }
    }

    /// Number of named keys; `None`: all keys of a slot.
    #[must_use]
    pub fn key_count(&self) -> Option<usize> {
        match self {
            Self::Keys(keys) | Self::Several { keys, .. } => Some(keys.len()),
            Self::Slot(_) => None,
        }
    }

    /// Whether the request includes one of `keys`, which must be sorted.
    #[must_use]
    pub fn concerns(&self, placement: &Placement, keys: &[Arc<[u8]>]) -> bool {
        match self {
            Self::Keys(own) | Self::Several { keys: own, .. } => own.iter().any(|key| keys.binary_search(key).is_ok()),
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
    /// Whether only named keys of the slots move.
    pub keys_only: bool,
    /// Whether an operator has paused the move.
    pub is_paused: bool,
    /// Whether the move was started for colocation.
    pub colocates: bool,
}

/// State of the fleet that a plan depends on.
#[derive(Clone, Copy, Debug)]
pub struct Fleet<'a> {
    /// Locations of keys, as last published.
    pub topology: &'a Topology,
    /// Moves that have not ended.
    pub open: &'a [Open<'a>],
    /// Slots whose keys stay where they are: a client has waited for some of them, and is about to use them.
    pub pinned: &'a BTreeSet<Slot>,
    /// Nodes that cannot be used now.
    pub away: &'a BTreeSet<NodeId>,
    /// Drained nodes. They receive keys only if other keys cannot leave them now.
    pub drained: &'a BTreeSet<NodeId>,
    /// Keys that were brought together recently.
    pub recent: &'a RecentGroups,
}

impl<'a> Fleet<'a> {
    /// The open move of a slot.
    fn busy(&self, slot: Slot) -> Option<&'a Open<'a>> {
        self.open.iter().find(|open| open.slots.binary_search(&slot).is_ok())
    }

    /// Whether the keys of a slot cannot move now, but stay usable where they are.
    fn is_fixed(&self, slot: Slot) -> bool {
        self.pinned.contains(&slot) || self.busy(slot).is_some_and(|open| !open.keys_only)
    }

    /// State of a request that needs a slot of this move.
    fn status(&self, busy: &Open<'_>) -> ColocationStatus {
        match [busy.source, busy.target].into_iter().find(|node| self.away.contains(node)) {
            _ if busy.is_paused => ColocationStatus::Paused(busy.id),
            Some(node) => ColocationStatus::Away(node),
            None => ColocationStatus::Wait,
        }
    }

    /// Number of colocation moves in progress between these nodes.
    fn running(&self, between: (NodeId, NodeId)) -> usize {
        self.open.iter().filter(|open| open.colocates && (open.source, open.target) == between).count()
    }
}

/// State of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ColocationStatus {
    /// All keys are at one node; those of one slot at its owner.
    Together,
    /// The keys are in transit, or will be.
    Wait,
    /// A slot is part of this paused move.
    Paused(MoveId),
    /// The keys cannot move because this node is away.
    Away(NodeId),
}

/// A move to begin.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Colocation {
    /// Node that has the keys.
    pub source: NodeId,
    /// Node that receives the keys.
    pub target: NodeId,
    /// The keys, each with the index of the first request for it, or of the request that it comes along with.
    pub keys: BTreeMap<Arc<[u8]>, usize>,
    /// Indexes of all requests for any of the keys. Empty if they come along: then no request needs the move.
    pub wanted_by: BTreeSet<usize>,
    /// Total size of the names, in bytes.
    bytes: usize,
}

impl Colocation {
    fn empty((source, target): (NodeId, NodeId)) -> Self {
        Self { source, target, keys: BTreeMap::new(), wanted_by: BTreeSet::new(), bytes: 0 }
    }

    /// Adds a key. Returns false if the move has the maximum size: then the key follows in the next one.
    fn add(&mut self, key: &Arc<[u8]>, place: usize) -> bool {
        if self.keys.contains_key(key) {
            return true;
        }
        let fits = self.keys.len() < MOVE_KEYS_MAX && self.bytes + key.len() <= MOVE_KEY_BYTES_MAX;
        if fits {
            self.bytes += key.len();
            self.keys.insert(Arc::clone(key), place);
        }
        fits
    }
}

/// Result of [`plan`].
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Plan {
    /// State of each request, in the order of the requests.
    pub standings: Vec<ColocationStatus>,
    /// Moves to start, those of keys that come along last. Their slots are disjoint from each other and from open
    /// moves.
    pub moves: Vec<Colocation>,
    /// Groups whose keys are together after these moves.
    pub groups: Vec<Group>,
}

/// Keys that are together after the moves of a plan.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Group {
    /// Indexes of the requests whose moves start.
    pub wanted_by: Vec<usize>,
    /// The keys, for [`RecentGroups::note`]: the requested ones first.
    pub keys: Vec<Arc<[u8]>>,
}

/// A request, with the keys that it concerns at present.
struct Request {
    keys: Vec<Arc<[u8]>>,
    /// The slot, if the keys return to its owner.
    slot: Option<Slot>,
    /// The required target.
    at: Option<NodeId>,
}

impl Request {
    fn new(wanted: &ColocationRequest, topology: &Topology) -> Self {
        let of_slot = |keys, slot: Option<Slot>| Self { keys, slot, at: slot.map(|slot| topology.owner(slot)) };
        match wanted {
            ColocationRequest::Keys(keys) => of_slot(keys.clone(), keys.first().map(|key| topology.slot_of(key))),
            ColocationRequest::Slot(slot) => {
                let mut keys: Vec<Arc<[u8]>> = topology.overrides_in(*slot).map(|(key, _)| Arc::clone(key)).collect();
                keys.sort_unstable();
                // The others follow when these are at the owner.
                keys.truncate(MOVE_KEYS_MAX);
                of_slot(keys, Some(*slot))
            }
            ColocationRequest::Several { keys, at } => Self { keys: keys.clone(), slot: None, at: *at },
        }
    }
}

/// Returns the moves that colocate the requested keys. `wanted`: longest waiting first.
#[must_use]
pub fn plan(fleet: &Fleet<'_>, wanted: &[&ColocationRequest]) -> Plan {
    let requests: Vec<Request> = wanted.iter().map(|wanted| Request::new(wanted, fleet.topology)).collect();
    let (group_of, targets) = targets(fleet, &requests);
    let mut draft = Draft {
        fleet,
        moves: BTreeMap::new(),
        along: BTreeMap::new(),
        between: BTreeMap::new(),
        between_along: BTreeMap::new(),
        stays: BTreeSet::new(),
        reserved: BTreeSet::new(),
    };
    let mut standings = Vec::new();
    // Requests whose moves start, by group.
    let mut begun: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (place, request) in requests.iter().enumerate() {
        let Some(node) = request.at.or_else(|| Some(targets.get(&group_of[place])?.node)) else {
            standings.push(ColocationStatus::Together);
            continue;
        };
        let (standing, starts) = draft.add(place, request, node);
        standings.push(standing);
        if starts {
            begun.entry(group_of[place]).or_default().push(place);
        }
    }
    let mut groups = Vec::new();
    for (group, places) in begun {
        let Some(target) = targets.get(&group) else { continue };
        let own = places.iter().flat_map(|place| requests[*place].keys.iter().cloned());
        let keys = own.chain(draft.take_along(places[0], target)).collect();
        groups.push(Group { wanted_by: places, keys });
    }
    // A name that no move may have leaves its move empty.
    let moves =
        draft.moves.into_values().chain(draft.along.into_values()).filter(|colocation| !colocation.keys.is_empty());
    Plan { standings, moves: moves.collect(), groups }
}

/// A plan in preparation.
struct Draft<'a> {
    fleet: &'a Fleet<'a>,
    moves: BTreeMap<(NodeId, NodeId), Colocation>,
    /// Moves of keys that come along. Separate, so that requests neither wait for these keys nor fail because of them.
    along: BTreeMap<(NodeId, NodeId), Colocation>,
    /// Source and target of the keys of each slot in `moves`.
    between: BTreeMap<Slot, (NodeId, NodeId)>,
    /// The same for `along`.
    between_along: BTreeMap<Slot, (NodeId, NodeId)>,
    /// Slots whose keys at this node stay there, because earlier requests need some of them there. Requests with common
    /// keys and different targets, as after WATCH, would otherwise exchange their keys.
    stays: BTreeSet<(Slot, NodeId)>,
    /// Slots that earlier requests wait for, without a move of these requests.
    reserved: BTreeSet<Slot>,
}

impl Draft<'_> {
    /// Adds the moves of a request, all or none. Returns the state of the request, and whether its moves start.
    fn add(&mut self, place: usize, request: &Request, target: NodeId) -> (ColocationStatus, bool) {
        let topology = self.fleet.topology;
        // Also if the topology has no override for the slot: this move may add one, and workers apply that before the
        // topology does.
        if let Some(busy) = request.slot.and_then(|slot| self.fleet.busy(slot)) {
            self.reserve_if(busy.colocates, request);
            return (self.fleet.status(busy), false);
        }
        // Keys to move, and slots of the others. A wait is short if it is for other requests.
        let (mut parted, mut arrived, mut waits, mut is_short) = (Vec::new(), Vec::new(), false, true);
        for key in &request.keys {
            let slot = topology.slot_of(key);
            let at = topology.lives_at_in_slot(slot, key);
            let busy = self.fleet.busy(slot);
            if at == target {
                // Such a move takes the key away, or has moved it already.
                let leaves = |open: &&Open<'_>| open.source == target && (open.keys_only || is_moving(topology, slot));
                if let Some(busy) = busy.filter(leaves) {
                    (waits, is_short) = (true, is_short && busy.colocates);
                }
                arrived.push((slot, at));
                continue;
            }
            if let Some(away) = [at, target].into_iter().find(|node| self.fleet.away.contains(node)) {
                return (ColocationStatus::Away(away), false);
            }
            if let Some(busy) = busy {
                match self.fleet.status(busy) {
                    ColocationStatus::Wait => (waits, is_short) = (true, is_short && busy.colocates),
                    stuck => return (stuck, false),
                }
            }
            let is_taken = self.between.get(&slot).is_some_and(|(_, to)| *to != target);
            waits |= is_taken
                || self.reserved.contains(&slot)
                || self.stays.contains(&(slot, at))
                || self.fleet.pinned.contains(&slot)
                || self.fleet.running((at, target)) >= COLOCATE_MAX;
            parted.push((key, slot, at));
        }
        if waits {
            self.reserve_if(is_short, request);
            return (ColocationStatus::Wait, false);
        }
        self.stays.extend(arrived);
        if parted.is_empty() {
            return (ColocationStatus::Together, false);
        }
        let mut starts = false;
        for (key, slot, at) in parted {
            starts |= self.move_key(place, key, slot, (at, target));
        }
        (ColocationStatus::Wait, starts)
    }

    /// Lets later requests not take the slots of a request that waits.
    fn reserve_if(&mut self, condition: bool, request: &Request) {
        if condition {
            self.reserved.extend(request.keys.iter().map(|key| self.fleet.topology.slot_of(key)));
        }
    }

    /// Adds a key to the move between these nodes. Returns false if its slot takes part in a different move, or the move is
    /// full: then the key follows later.
    fn move_key(&mut self, place: usize, key: &Arc<[u8]>, slot: Slot, between: (NodeId, NodeId)) -> bool {
        if *self.between.entry(slot).or_insert(between) != between {
            return false;
        }
        let colocation = self.moves.entry(between).or_insert_with(|| Colocation::empty(between));
        let is_added = colocation.add(key, place);
        if is_added {
            colocation.wanted_by.insert(place);
        }
        is_added
    }

    /// Adds moves of keys that were together with the keys of a group, as far as these are free. Returns the keys that
    /// will be at its target. Must be called after the last [`add`](Self::add).
    fn take_along(&mut self, place: usize, target: &Target) -> Vec<Arc<[u8]>> {
        let topology = self.fleet.topology;
        let mut arriving = Vec::new();
        for key in &target.along {
            let slot = topology.slot_of(key);
            let at = topology.lives_at_in_slot(slot, key);
            let between = (at, target.node);
            if at != target.node {
                if !self.may_come_along(key, slot, between) {
                    continue;
                }
                let colocation = self.along.entry(between).or_insert_with(|| Colocation::empty(between));
                if !colocation.add(key, place) {
                    continue;
                }
                self.between_along.insert(slot, between);
            }
            arriving.push(Arc::clone(key));
        }
        arriving
    }

    /// Whether a key may move between these nodes although no request needs it.
    fn may_come_along(&self, key: &[u8], slot: Slot, between: (NodeId, NodeId)) -> bool {
        let (fleet, topology) = (self.fleet, self.fleet.topology);
        let is_new = topology.placement_override(key).is_none();
        let is_elsewhere = self.between_along.get(&slot).is_some_and(|other| *other != between);
        // One of the moves is left for requests.
        let planned = || fleet.running(between) + usize::from(self.moves.contains_key(&between));
        !is_elsewhere
            && !fleet.away.contains(&between.0)
            && !fleet.pinned.contains(&slot)
            && !self.reserved.contains(&slot)
            && !self.stays.contains(&(slot, between.0))
            && !self.between.contains_key(&slot)
            && fleet.busy(slot).is_none()
            && !(is_new && topology.override_count() >= ALONG_OVERRIDES_MAX)
            && (self.along.contains_key(&between) || planned() + 1 < COLOCATE_MAX)
    }
}

/// Whether keys of the slot are in transit: they may be at either node.
fn is_moving(topology: &Topology, slot: Slot) -> bool {
    topology.transit(slot).is_some_and(|transit| matches!(transit.stage, Stage::Moving { .. }))
}
