//! Constructs topologies: even at first, later from stored parts, reconciled with the configured nodes.
//!
//! The stored map has priority over the node list, because it states where the keys are. So nothing here moves a slot:
//! a joining node has no slots at first, and a node with slots cannot be dropped from the list.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;

use super::directory::Directory;
use super::slot::UNUSED_OWNER;
use super::{
    Continuum, ContinuumError, Node, NodeId, Overlay, Placement, SLOT_COUNT, SLOT_NUMBERS, Server, Slot, Topology,
};

/// Maximum nodes of a topology.
pub const MAX_NODES: usize = 1024;

/// Highest possible node id plus one.
const ID_END: u32 = u16::MAX as u32 + 1;

/// Result of [`Topology::place`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Placed {
    /// Topology to use, and to store if [`Placed::changed`].
    pub topology: Topology,
    /// Whether the topology differs from the stored one, or none was stored.
    pub changed: bool,
    /// New nodes without slots, to be reported to the operator. Empty at the first placement, in which every node gets
    /// slots.
    pub joined: Vec<NodeId>,
    /// Stored nodes that had no slots and are no longer configured.
    pub removed: Vec<Node>,
}

/// Reason why the configured nodes cannot be placed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PlaceError {
    /// The list of nodes is empty.
    NoNodes,
    /// More nodes than [`MAX_NODES`].
    TooManyNodes {
        /// Number of configured nodes.
        given: usize,
    },
    /// A node is listed twice.
    Duplicate {
        /// Address of the node.
        name: String,
    },
    /// Stored nodes with slots are not listed.
    OwnersMissing {
        /// The nodes, each with its number of slots.
        missing: Vec<(String, usize)>,
    },
    /// Stored nodes with placement overrides are not listed.
    OverridesMissing {
        /// The nodes, each with its number of keys.
        missing: Vec<(String, usize)>,
    },
    /// 65536 nodes have joined this state directory over time.
    NoNumberLeft,
}

impl fmt::Display for PlaceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoNodes => f.write_str("no nodes are given; name at least one Redis or Valkey server (--node HOST:PORT)"),
            Self::TooManyNodes { given } => write!(f, "{given} nodes are given, but at most {MAX_NODES} can be used"),
            Self::Duplicate { name } => write!(f, "node {name} is given twice; name each server once"),
            Self::OwnersMissing { missing } => {
                let list: Vec<String> = missing
                    .iter()
                    .map(|(name, slots)| format!("{name} ({slots} slot{})", if *slots == 1 { "" } else { "s" }))
                    .collect();
                let (plural, it, its) = if list.len() == 1 { ("node", "it", "its") } else { ("nodes", "them", "their") };
                write!(
                    f,
                    "by the state directory, {plural} {} still own{} keys, but the list of nodes lacks {it}; \
                     add {it} again, or move {its} slots to other nodes first. If this state directory belongs to other nodes, give the right \
                     one (--state-dir)",
                    list.join(", "),
                    if list.len() == 1 { "s" } else { "" },
                )
            }
            Self::OverridesMissing { missing } => {
                let list: Vec<String> = missing.iter().map(|(name, keys)| format!("{name} ({keys} keys)")).collect();
                write!(
                    f,
                    "by the state directory, keys were moved to {} by `switchyard move --keys`, but the list of nodes lacks it; add it \
                     again, and return them first (`switchyard move --from NODE --home`, or `switchyard nodes drain NODE`)",
                    list.join(", "),
                )
            }
            Self::NoNumberLeft => f.write_str(
                "65536 nodes have joined this state directory, and no number is left for another; use a new state directory",
            ),
        }
    }
}

impl std::error::Error for PlaceError {}

/// Reason why a server list cannot be applied to the continuum.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum OverlayError {
    /// The fleet uses CRC16 placement.
    NoContinuum,
    /// Slots are in transit.
    Moving,
    /// This server is not among the nodes.
    NoNode(String),
    /// The two lists are incompatible.
    Continuum(ContinuumError),
}

impl fmt::Display for OverlayError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoContinuum => f.write_str(
                "this fleet places keys by CRC16 and has no list of servers; move slots instead (switchyard move)",
            ),
            Self::Moving => f.write_str(
                "a move is in progress; let it finish, or cancel it (switchyard move --cancel), and try again",
            ),
            Self::NoNode(name) => write!(f, "server {name} has not joined the fleet; add it first"),
            Self::Continuum(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for OverlayError {}

/// Reason why stored parts are no topology: the store is damaged, or another program wrote it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PartsError {
    /// Epochs start at 1.
    EpochZero,
    /// No node, or more than [`MAX_NODES`].
    NodeCount(usize),
    /// Two nodes with this id.
    NumberTwice(NodeId),
    /// Two nodes with this address.
    NameTwice(String),
    /// A node id is not below the next id, or the next id is out of range.
    NextId {
        /// Next id, as stored.
        next_id: u32,
    },
    /// A range is empty or ends after the last slot.
    BadRange(RangeInclusive<u16>),
    /// A range has an unknown owner.
    UnknownOwner {
        /// The range.
        range: RangeInclusive<u16>,
        /// Owner as stored.
        owner: NodeId,
    },
    /// Two ranges contain this slot.
    OwnedTwice(u16),
    /// No range contains this slot.
    NotOwned(u16),
    /// A key of this slot has a placement override to an unknown node.
    OverrideAtUnknown {
        /// The slot.
        slot: u16,
        /// Node id as stored.
        node: NodeId,
    },
    /// A placement override names the slot owner.
    OverrideAtOwner {
        /// The slot.
        slot: u16,
    },
    /// Two placement overrides for the same key of this slot.
    OverrideTwice {
        /// The slot.
        slot: u16,
    },
    /// More placement overrides than allowed, or too long names.
    OverrideCount(usize),
}

impl fmt::Display for PartsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::EpochZero => f.write_str("its epoch is 0"),
            Self::NodeCount(count) => write!(f, "it has {count} nodes instead of 1 to {MAX_NODES}"),
            Self::NumberTwice(id) => write!(f, "two nodes have the number {}", id.0),
            Self::NameTwice(name) => write!(f, "two nodes have the address {name}"),
            Self::NextId { next_id } => {
                write!(f, "the number for the next node, {next_id}, is not above those given and at most {ID_END}")
            }
            Self::BadRange(range) => write!(f, "{}-{} is not a slot range", range.start(), range.end()),
            Self::UnknownOwner { range, owner } => {
                write!(
                    f,
                    "slots {}-{} belong to node number {}, which does not exist",
                    range.start(),
                    range.end(),
                    owner.0
                )
            }
            Self::OwnedTwice(slot) => write!(f, "slot {slot} has two owners"),
            Self::NotOwned(slot) => write!(f, "slot {slot} has no owner"),
            Self::OverrideAtUnknown { slot, node } => {
                write!(f, "a key of slot {slot} is at node number {}, which does not exist", node.0)
            }
            Self::OverrideAtOwner { slot } => {
                write!(f, "a key of slot {slot} has a placement override to the slot's owner")
            }
            Self::OverrideTwice { slot } => write!(f, "a key of slot {slot} has two placement overrides"),
            Self::OverrideCount(count) => {
                write!(f, "{count} placement overrides are too many, or their key names are too long")
            }
        }
    }
}

impl std::error::Error for PartsError {}

/// Result of [`Topology::with_overlay`].
#[derive(Clone, Debug)]
pub struct OverlaidTopology {
    /// New topology.
    pub topology: Topology,
    /// New slot numbers, each with a slot that it was split from.
    pub parts: Vec<(Slot, Slot)>,
    /// Slots that the list assigns to other servers than before, each with its new server.
    pub goals: Vec<(Slot, NodeId)>,
}

impl Topology {
    /// Returns the first placement: one contiguous range per node, with sizes that differ by at most one slot.
    ///
    /// Ranges are assigned in the order of names, so the same nodes give the same map in any list order: two routers,
    /// or a router without its state directory, agree. Ids follow the order of the list, in which the user expects the
    /// nodes.
    ///
    /// # Errors
    /// If `names` is empty, has duplicates, or is longer than [`MAX_NODES`].
    pub fn even(names: &[String]) -> Result<Self, PlaceError> {
        check_names(names)?;
        Ok(Self::even_of_any_size(names))
    }

    /// Like [`Topology::even`] with distinct names, without the limit of [`MAX_NODES`]: simulated fleets are larger. The
    /// router could not serve them, because the cursors of SCAN have no room for the index of the node.
    #[must_use]
    pub fn even_of_any_size(names: &[String]) -> Self {
        let nodes: Vec<Node> =
            names.iter().enumerate().map(|(i, name)| Node { id: NodeId(i as u16), name: name.clone() }).collect();
        let mut by_name: Vec<&Node> = nodes.iter().collect();
        by_name.sort_by(|a, b| a.name.cmp(&b.name));
        let mut owners = Box::new([UNUSED_OWNER; SLOT_NUMBERS]);
        for (i, node) in by_name.iter().enumerate() {
            let start = i * SLOT_COUNT / by_name.len();
            let end = (i + 1) * SLOT_COUNT / by_name.len();
            owners[start..end].fill(node.id);
        }
        Self::unmoved(Placement::Crc16, nodes, owners)
    }

    /// Returns the first placement on a continuum: one node per server, owning the slots that the list assigns to it.
    /// Free numbers belong to the first node.
    #[must_use]
    pub fn on_continuum(continuum: Arc<Continuum>) -> Self {
        let nodes: Vec<Node> = (0..)
            .map(NodeId)
            .zip(continuum.servers())
            .map(|(id, server)| Node { id, name: server.name.clone() })
            .collect();
        let numbers: BTreeMap<&str, NodeId> = nodes.iter().map(|node| (node.name.as_str(), node.id)).collect();
        let mut owners = Box::new([UNUSED_OWNER; SLOT_NUMBERS]);
        for (slot, owner) in Slot::all().zip(owners.iter_mut()) {
            *owner =
                continuum.home(slot).and_then(|home| numbers.get(home.name.as_str())).copied().unwrap_or(NodeId(0));
        }
        Self::unmoved(Placement::Continuum(continuum), nodes, owners)
    }

    /// Returns the topology of epoch 1, without moves and exceptions.
    fn unmoved(placement: Placement, nodes: Vec<Node>, owners: Box<[NodeId; SLOT_NUMBERS]>) -> Self {
        let next_id = nodes.len() as u32;
        Self {
            epoch: 1,
            placement,
            nodes,
            owners,
            next_id,
            marks: None,
            directory: Directory::default(),
            receivers: None,
        }
    }

    /// Returns the topology with the stored placement. Must precede the placement overrides.
    #[must_use]
    pub fn with_stored_placement(self, placement: Placement) -> Self {
        debug_assert!(!self.has_overrides(), "overrides are kept by slot");
        Self { placement, ..self }
    }

    /// Returns the next topology, one epoch higher, after applying this server list to the continuum. No key changes
    /// its owner. Nodes for all servers must exist.
    ///
    /// # Errors
    /// If there is no continuum, slots are in transit, a server is no node, or as [`Continuum::overlaid`].
    pub fn with_overlay(&self, servers: impl IntoIterator<Item = Server>) -> Result<OverlaidTopology, OverlayError> {
        let Placement::Continuum(continuum) = &self.placement else { return Err(OverlayError::NoContinuum) };
        if !self.is_settled() {
            return Err(OverlayError::Moving);
        }
        let Overlay { continuum, split, parts, changed } =
            continuum.overlaid(servers, |slot| self.owner(slot)).map_err(OverlayError::Continuum)?;
        let numbers: BTreeMap<&str, NodeId> = self.nodes.iter().map(|node| (node.name.as_str(), node.id)).collect();
        if let Some(server) = continuum.servers().iter().find(|server| !numbers.contains_key(server.name.as_str())) {
            return Err(OverlayError::NoNode(server.name.clone()));
        }
        let goals = changed
            .iter()
            .filter_map(|slot| Some((*slot, *numbers.get(continuum.home(*slot)?.name.as_str())?)))
            .collect();
        let mut next =
            Self { epoch: self.epoch + 1, placement: Placement::Continuum(Arc::new(continuum)), ..self.clone() };
        for (slot, owner) in split {
            next.owners[slot.index()] = owner;
        }
        next.rebuild_overrides();
        Ok(OverlaidTopology { topology: next, parts, goals })
    }

    /// Reconciles the stored topology, if any, with the configured nodes.
    ///
    /// Without a stored one this is [`Topology::even`]. Otherwise no slot changes its owner. Configured nodes that are
    /// not stored join with a new id and no slots. Stored nodes that are not configured are removed, or an error if
    /// they have slots. The order of the list has no meaning. The epoch increases by one on any change.
    ///
    /// # Errors
    /// As [`Topology::even`], and if a node with slots is not configured.
    pub fn place(stored: Option<&Self>, wanted: &[String]) -> Result<Placed, PlaceError> {
        let Some(stored) = stored else {
            return Ok(Placed {
                topology: Self::even(wanted)?,
                changed: true,
                joined: Vec::new(),
                removed: Vec::new(),
            });
        };
        check_names(wanted)?;
        let names: BTreeSet<&String> = wanted.iter().collect();
        let (mut nodes, removed): (Vec<Node>, Vec<Node>) =
            stored.nodes.iter().cloned().partition(|node| names.contains(&node.name));
        let missing: Vec<(String, usize)> = removed
            .iter()
            .map(|node| (node.name.clone(), stored.slots_of(node.id)))
            .filter(|(_, slots)| *slots > 0)
            .collect();
        if !missing.is_empty() {
            return Err(PlaceError::OwnersMissing { missing });
        }
        let missing: Vec<(String, usize)> = removed
            .iter()
            .map(|node| (node.name.clone(), stored.overrides_at(node.id)))
            .filter(|(_, keys)| *keys > 0)
            .collect();
        if !missing.is_empty() {
            return Err(PlaceError::OverridesMissing { missing });
        }
        let known: BTreeSet<&String> = stored.nodes.iter().map(|node| &node.name).collect();
        let mut next_id = stored.next_id;
        let mut joined = Vec::new();
        for name in wanted.iter().filter(|name| !known.contains(name)) {
            let id = NodeId(u16::try_from(next_id).map_err(|_| PlaceError::NoNumberLeft)?);
            next_id += 1;
            joined.push(id);
            nodes.push(Node { id, name: name.clone() });
        }
        let changed = !joined.is_empty() || !removed.is_empty();
        let epoch = stored.epoch + u64::from(changed);
        let mut owners = stored.owners.clone();
        // Free numbers have no keys, so they need no move.
        if let (Some(removed_ids), Some(node)) = (non_empty(&removed), nodes.first()) {
            let free = &mut owners[stored.placement.slots()..];
            free.iter_mut().filter(|owner| removed_ids.contains(owner)).for_each(|owner| *owner = node.id);
        }
        let topology = Self {
            epoch,
            placement: stored.placement.clone(),
            nodes,
            owners,
            next_id,
            marks: stored.marks.clone(),
            directory: stored.directory.clone(),
            receivers: stored.receivers.clone(),
        };
        Ok(Placed { topology, changed, joined, removed })
    }

    /// Builds a topology from stored parts and validates it: every slot has exactly one owner, every owner is a node,
    /// names and ids are unique, and `next_id` is above all ids.
    ///
    /// # Errors
    /// The first problem found.
    pub fn from_parts(
        epoch: u64,
        mut nodes: Vec<Node>,
        ranges: impl IntoIterator<Item = (NodeId, RangeInclusive<u16>)>,
        next_id: u32,
    ) -> Result<Self, PartsError> {
        if epoch == 0 {
            return Err(PartsError::EpochZero);
        }
        if nodes.is_empty() || nodes.len() > MAX_NODES {
            return Err(PartsError::NodeCount(nodes.len()));
        }
        nodes.sort_by_key(|node| node.id);
        let mut names = BTreeSet::new();
        let mut numbers = BTreeSet::new();
        for node in &nodes {
            if !numbers.insert(node.id) {
                return Err(PartsError::NumberTwice(node.id));
            }
            if !names.insert(&node.name) {
                return Err(PartsError::NameTwice(node.name.clone()));
            }
            if u32::from(node.id.0) >= next_id {
                return Err(PartsError::NextId { next_id });
            }
        }
        if next_id > ID_END {
            return Err(PartsError::NextId { next_id });
        }
        let mut owners: Vec<Option<NodeId>> = vec![None; SLOT_NUMBERS];
        for (owner, range) in ranges {
            if range.is_empty() || usize::from(*range.end()) >= SLOT_NUMBERS {
                return Err(PartsError::BadRange(range));
            }
            if !numbers.contains(&owner) {
                return Err(PartsError::UnknownOwner { range, owner });
            }
            for slot in range {
                if owners[usize::from(slot)].replace(owner).is_some() {
                    return Err(PartsError::OwnedTwice(slot));
                }
            }
        }
        let mut map = Box::new([UNUSED_OWNER; SLOT_NUMBERS]);
        for (slot, owner) in owners.into_iter().enumerate() {
            map[slot] = match owner {
                None if slot >= SLOT_COUNT => UNUSED_OWNER,
                owner => owner.ok_or(PartsError::NotOwned(slot as u16))?,
            };
        }
        Ok(Self {
            epoch,
            placement: Placement::Crc16,
            nodes,
            owners: map,
            next_id,
            marks: None,
            directory: Directory::default(),
            receivers: None,
        })
    }
}

/// Ids of these nodes, or `None` if there are none.
fn non_empty(nodes: &[Node]) -> Option<BTreeSet<NodeId>> {
    (!nodes.is_empty()).then(|| nodes.iter().map(|node| node.id).collect())
}

fn check_names(names: &[String]) -> Result<(), PlaceError> {
    if names.is_empty() {
        return Err(PlaceError::NoNodes);
    }
    if names.len() > MAX_NODES {
        return Err(PlaceError::TooManyNodes { given: names.len() });
    }
    let mut seen = BTreeSet::new();
    match names.iter().find(|name| !seen.insert(*name)) {
        Some(name) => Err(PlaceError::Duplicate { name: name.clone() }),
        None => Ok(()),
    }
}
