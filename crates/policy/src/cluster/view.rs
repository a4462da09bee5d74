//! The members of a cluster by number, and the owners of its slots, as last reported.
//!
//! A [`NodeId`] is a member at an address. Members that lose all their slots, or are no longer reported, keep their
//! number for [`LINGER_MS`], because commands may still be in flight there; their replies redirect these commands. A
//! reported member with a new id at a known address replaces the earlier one at once, because addresses are reused.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;

use super::Place;
use crate::topology::{MAX_NODES, Node, NodeId, PartsError, SLOT_COUNT, Slot, Topology};

/// Time for which a member without slots keeps its number. Above any time that a command may be in flight by default.
const LINGER_MS: u64 = 60_000;

/// A member, as reported.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Member {
    /// Id in the cluster (`CLUSTER MYID`).
    pub id: String,
    /// Host name or IP address for clients.
    pub host: String,
    /// Port for clients.
    pub port: u16,
}

impl Member {
    /// Address, as in logs, errors and reports.
    #[must_use]
    pub fn name(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }
}

/// Slots of one primary: a line of `CLUSTER SLOTS`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Shard {
    /// The slots, below [`SLOT_COUNT`].
    pub slots: RangeInclusive<u16>,
    /// Owner of the slots.
    pub primary: Member,
    /// Replicas of the owner, as far as the member that reports can reach them.
    pub replicas: Vec<Member>,
}

/// Reasons why a report is not usable.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ViewError {
    /// No slot has an owner.
    Empty,
    /// A range of slots is empty, or exceeds the slots of a cluster.
    BadRange(RangeInclusive<u16>),
    /// The members exceed what a router serves, in total or since its start.
    TooMany,
}

impl fmt::Display for ViewError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("no member of the cluster owns a slot"),
            Self::BadRange(range) => write!(f, "it reports the slots {}-{}", range.start(), range.end()),
            Self::TooMany => write!(f, "it has had too many members: at most {MAX_NODES} at once"),
        }
    }
}

impl std::error::Error for ViewError {}

/// A member with a number.
#[derive(Clone, Debug)]
struct Known {
    member: Member,
    /// Last time at which it owned a slot, milliseconds.
    owned_ms: u64,
    /// Ids of its replicas when it last owned a slot.
    replicas: BTreeSet<String>,
    /// One of its replicas has all its slots.
    is_replaced: bool,
}

impl Known {
    fn new(member: &Member, owned_ms: u64) -> Self {
        Self { member: member.clone(), owned_ms, replicas: BTreeSet::new(), is_replaced: false }
    }
}

/// The map of a cluster.
#[derive(Clone, Debug)]
pub struct View {
    known: BTreeMap<NodeId, Known>,
    owners: Vec<NodeId>,
    next_id: u32,
    topology: Arc<Topology>,
}

impl View {
    /// Begins with a first report. A slot without an owner counts as a slot of any member, and the member refuses
    /// commands for it.
    /// `now_ms`: time in milliseconds, by any clock.
    ///
    /// # Errors
    /// If the report is not usable.
    pub fn new(shards: &[Shard], now_ms: u64) -> Result<Self, ViewError> {
        let first = shards.first().ok_or(ViewError::Empty)?;
        let known = BTreeMap::from([(NodeId(0), Known::new(&first.primary, now_ms))]);
        let owners = vec![NodeId(0); SLOT_COUNT];
        let topology = Arc::new(built(1, &known, &owners, 1).map_err(|_| ViewError::TooMany)?);
        let mut view = Self { known, owners, next_id: 1, topology };
        view.adopt(shards, now_ms)?;
        Ok(view)
    }

    /// The map as a topology, whose epoch rises with every change.
    #[must_use]
    pub fn topology(&self) -> &Arc<Topology> {
        &self.topology
    }

    /// The members, by number.
    pub fn members(&self) -> impl Iterator<Item = (NodeId, &Member)> {
        self.known.iter().map(|(node, known)| (*node, &known.member))
    }

    /// Members that own no slots because one of their replicas has replaced them, in a failover for example.
    pub fn replaced(&self) -> impl Iterator<Item = NodeId> {
        self.known.iter().filter(|(_, known)| known.is_replaced).map(|(node, _)| *node)
    }

    /// The member with this number.
    #[must_use]
    pub fn member(&self, node: NodeId) -> Option<&Member> {
        self.known.get(&node).map(|known| &known.member)
    }

    /// Members to which a report gives slots of others. Members learn of changes at different times, so such a report must
    /// be confirmed by these members: each knows its own slots.
    #[must_use]
    pub fn gaining(&self, shards: &[Shard]) -> BTreeSet<Member> {
        let is_new = |shard: &&Shard| {
            let owner = |slot: u16| self.owners.get(usize::from(slot)).and_then(|owner| self.member(*owner));
            shard.slots.clone().any(|slot| owner(slot) != Some(&shard.primary))
        };
        shards.iter().filter(is_new).map(|shard| shard.primary.clone()).collect()
    }

    /// Adopts a report. A slot that the report does not name keeps its owner. This member refuses the slot's commands, and
    /// they wait. Returns whether anything has changed. After an error nothing has.
    ///
    /// # Errors
    /// If the report is not usable.
    pub fn adopt(&mut self, shards: &[Shard], now_ms: u64) -> Result<bool, ViewError> {
        if shards.is_empty() {
            return Err(ViewError::Empty);
        }
        let is_bad = |range: &RangeInclusive<u16>| range.is_empty() || usize::from(*range.end()) >= SLOT_COUNT;
        if let Some(shard) = shards.iter().find(|shard| is_bad(&shard.slots)) {
            return Err(ViewError::BadRange(shard.slots.clone()));
        }
        let (mut known, mut owners, mut next_id) = (self.known.clone(), self.owners.clone(), self.next_id);
        for Shard { slots, primary, .. } in shards {
            let number = known.iter().find(|(_, known)| known.member == *primary).map(|(number, _)| *number);
            let number = match number {
                Some(number) => number,
                None => {
                    // The number of a former member would name another process, or an unused address.
                    let is_former = |other: &Member| {
                        other.id == primary.id || (&other.host, other.port) == (&primary.host, primary.port)
                    };
                    known.retain(|_, known| !is_former(&known.member));
                    let number = u16::try_from(next_id).map(NodeId).map_err(|_| ViewError::TooMany)?;
                    next_id += 1;
                    known.insert(number, Known::new(primary, now_ms));
                    number
                }
            };
            for slot in slots.clone() {
                owners[usize::from(slot)] = number;
            }
        }
        // A slot that was not reported may belong to a replaced member.
        let some = known.iter().find(|(_, known)| known.member == shards[0].primary).map(|(number, _)| *number);
        let some = some.ok_or(ViewError::Empty)?;
        owners.iter_mut().filter(|owner| !known.contains_key(owner)).for_each(|owner| *owner = some);
        let mut owns = vec![false; next_id as usize];
        owners.iter().for_each(|owner| owns[owner.index()] = true);
        let owners_ids: BTreeSet<&str> = shards.iter().map(|shard| shard.primary.id.as_str()).collect();
        known.retain(|number, known| {
            if owns[number.index()] {
                known.owned_ms = now_ms;
                known.is_replaced = false;
                let own = shards.iter().filter(|shard| shard.primary.id == known.member.id);
                let replicas = own.flat_map(|shard| &shard.replicas);
                known.replicas = replicas.map(|replica| replica.id.clone()).collect();
            } else {
                known.is_replaced = known.replicas.iter().any(|id| owners_ids.contains(id.as_str()));
            }
            owns[number.index()] || now_ms.saturating_sub(known.owned_ms) < LINGER_MS
        });
        let is_replaced = |known: &BTreeMap<NodeId, Known>| -> Vec<NodeId> {
            known.iter().filter(|(_, known)| known.is_replaced).map(|(node, _)| *node).collect()
        };
        let is_changed = owners != self.owners
            || !known.keys().eq(self.known.keys())
            || is_replaced(&known) != is_replaced(&self.known);
        if is_changed {
            self.topology =
                Arc::new(built(self.topology.epoch() + 1, &known, &owners, next_id).map_err(|_| ViewError::TooMany)?);
        }
        (self.known, self.owners, self.next_id) = (known, owners, next_id);
        Ok(is_changed)
    }

    /// Finds the member at an address. `from`: the member that sent the redirect.
    #[must_use]
    pub fn find(&self, place: Place<'_>, from: NodeId) -> Option<NodeId> {
        let host = place.host.or_else(|| self.member(from).map(|member| member.host.as_str()))?;
        let is_there = |member: &Member| member.port == place.port && member.host.eq_ignore_ascii_case(host);
        self.known.iter().find(|(_, known)| is_there(&known.member)).map(|(number, _)| *number)
    }

    /// Adopts the owner of one slot, from a redirect. Returns whether anything has changed.
    pub fn moved(&mut self, slot: Slot, owner: NodeId) -> bool {
        let Some(before) = self.owners.get(slot.index()).copied() else { return false };
        if before == owner || !self.known.contains_key(&owner) {
            return false;
        }
        self.owners[slot.index()] = owner;
        match built(self.topology.epoch() + 1, &self.known, &self.owners, self.next_id) {
            Ok(topology) => self.topology = Arc::new(topology),
            Err(_) => self.owners[slot.index()] = before,
        }
        self.owners[slot.index()] == owner
    }
}

fn built(epoch: u64, known: &BTreeMap<NodeId, Known>, owners: &[NodeId], next_id: u32) -> Result<Topology, PartsError> {
    let nodes = known.iter().map(|(id, known)| Node { id: *id, name: known.member.name() }).collect();
    let mut ranges: Vec<(NodeId, RangeInclusive<u16>)> = Vec::new();
    for (slot, owner) in (0..).zip(owners) {
        match ranges.last_mut().filter(|(last, _)| last == owner) {
            Some((_, range)) => *range = *range.start()..=slot,
            None => ranges.push((*owner, slot..=slot)),
        }
    }
    Ok(Topology::from_parts(epoch, nodes, ranges, next_id)?.of_cluster())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(id: &str, port: u16) -> Member {
        Member { id: id.to_owned(), host: "10.0.0.1".to_owned(), port }
    }

    fn shard(slots: RangeInclusive<u16>, id: &str, port: u16) -> Shard {
        Shard { slots, primary: member(id, port), replicas: Vec::new() }
    }

    fn two() -> View {
        View::new(&[shard(0..=8191, "a", 1), shard(8192..=16383, "b", 2)], 0).expect("a view")
    }

    fn owner(view: &View, slot: u16) -> &str {
        let node = view.topology().owner(Slot::new(slot).expect("a slot"));
        &view.member(node).expect("a member").id
    }

    #[test]
    fn a_report_gives_each_slot_its_owner() {
        let view = two();
        assert_eq!((owner(&view, 0), owner(&view, 8191), owner(&view, 8192)), ("a", "a", "b"));
        assert_eq!(view.topology().node(NodeId(1)).map(|node| node.name.as_str()), Some("10.0.0.1:2"));
        assert_eq!(view.topology().only_node(), None);
    }

    #[test]
    fn a_cluster_of_one_member_has_no_only_node() {
        let view = View::new(&[shard(0..=16383, "a", 1)], 0).expect("a view");
        assert_eq!((view.topology().nodes().len(), view.topology().only_node()), (1, None));
    }

    #[test]
    fn slots_without_a_reported_owner_keep_theirs() {
        let mut view = two();
        assert_eq!(view.adopt(&[shard(0..=99, "b", 2)], 1), Ok(true));
        assert_eq!((owner(&view, 99), owner(&view, 100), owner(&view, 9000)), ("b", "a", "b"));
        assert_eq!(view.gaining(&[shard(0..=99, "b", 2), shard(100..=8191, "a", 1)]), BTreeSet::new());
        assert_eq!(view.gaining(&[shard(99..=100, "b", 2)]), BTreeSet::from([member("b", 2)]));
        assert_eq!(view.adopt(&[], 2), Err(ViewError::Empty));
        let empty = RangeInclusive::new(9, 8);
        assert_eq!(view.adopt(&[shard(empty.clone(), "b", 2)], 2), Err(ViewError::BadRange(empty)));
        assert_eq!(view.adopt(&[shard(0..=16384, "b", 2)], 2), Err(ViewError::BadRange(0..=16384)));
    }

    #[test]
    fn members_without_slots_keep_their_number_for_a_while() {
        let mut view = two();
        let all = [shard(0..=16383, "a", 1)];
        assert_eq!(view.adopt(&all, 1000), Ok(true));
        assert!(view.member(NodeId(1)).is_some(), "commands may be in flight there");
        assert_eq!((view.adopt(&all, LINGER_MS - 1), view.adopt(&all, LINGER_MS)), (Ok(false), Ok(true)));
        assert!(view.member(NodeId(1)).is_none());
        assert_eq!(view.adopt(&[shard(0..=16383, "b", 2)], LINGER_MS), Ok(true));
        assert!(view.member(NodeId(2)).is_some(), "numbers are not reused");
    }

    #[test]
    fn another_member_at_a_known_address_gets_a_number_of_its_own() {
        let mut view = two();
        assert_eq!(view.adopt(&[shard(0..=8191, "a", 1), shard(8192..=16383, "c", 2)], 1), Ok(true));
        assert_eq!((owner(&view, 9000), view.member(NodeId(1)).is_none()), ("c", true));
        // A member with another address.
        assert_eq!(view.adopt(&[shard(0..=8191, "a", 3), shard(8192..=16383, "c", 2)], 2), Ok(true));
        assert_eq!(view.members().map(|(node, member)| (node.0, member.port)).collect::<Vec<_>>(), [(2, 2), (3, 3)]);
    }

    #[test]
    fn a_member_is_replaced_when_its_replica_has_its_slots() {
        let first = Shard { replicas: vec![member("r", 3)], ..shard(0..=8191, "a", 1) };
        let others = shard(8192..=16383, "b", 2);
        let mut view = View::new(&[first.clone(), others.clone()], 0).expect("a view");
        assert_eq!(view.adopt(&[shard(0..=8191, "r", 3), others.clone()], 1), Ok(true));
        assert_eq!(view.replaced().collect::<Vec<_>>(), [NodeId(0)]);
        assert_eq!(view.adopt(&[shard(0..=8191, "r", 3), others.clone()], 1), Ok(false));
        assert_eq!(view.adopt(&[first, others], 2), Ok(true));
        assert_eq!(view.replaced().collect::<Vec<_>>(), []);
        // Its slots were migrated.
        assert_eq!(view.adopt(&[shard(0..=16383, "b", 2)], 3), Ok(true));
        assert_eq!(view.replaced().collect::<Vec<_>>(), []);
    }

    #[test]
    fn a_redirect_changes_the_owner_of_one_slot_once() {
        let mut view = two();
        let place = |host, port| Place { host, port };
        assert_eq!(view.find(place(Some("10.0.0.1"), 2), NodeId(0)), Some(NodeId(1)));
        assert_eq!(view.find(place(None, 2), NodeId(0)), Some(NodeId(1)));
        assert_eq!(view.find(place(Some("10.0.0.2"), 2), NodeId(0)), None);
        let slot = Slot::new(7).expect("a slot");
        let epoch = view.topology().epoch();
        assert!(view.moved(slot, NodeId(1)) && !view.moved(slot, NodeId(1)) && !view.moved(slot, NodeId(9)));
        assert_eq!((owner(&view, 7), owner(&view, 6), owner(&view, 8)), ("b", "a", "a"));
        assert_eq!(view.topology().epoch(), epoch + 1);
    }
}
