//! The members of a cluster by number, and the owners of its slots, as last reported.
//!
//! A [`NodeId`] is a member at an address. Members that lose all their slots, or are no longer reported, keep their
//! number for [`LINGER_MS`], because commands may still be in flight there; their replies redirect these commands. A
//! reported member with a new id at a known address replaces the earlier one at once, because addresses are reused.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;

use super::{Claims, Peer, Place};
use crate::topology::{MAX_NODES, Node, NodeId, PartsError, SLOT_COUNT, Slot, Topology};

/// Time for which a member without slots keeps its number. Above any time that a command may be in flight by default.
const LINGER_MS: u64 = 60_000;

/// Time for which the target of a migration keeps its number without slots: a slot may have many keys.
const TARGET_LINGER_MS: u64 = 3_600_000;

/// Maximum number of further addresses of a member.
const PLACES_MAX: usize = 4;

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

/// Effects of the slots that members claim.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Adopted {
    /// Slots whose keys migrate one by one, in order.
    pub open: Vec<OpenSlot>,
    /// Slots that may have left their owner and returned since its last claims: its configuration epoch has changed, or
    /// these claims are its first.
    pub returned: Vec<Slot>,
    /// Members that may have keys, and that no report contains yet.
    pub unknown: BTreeSet<Peer>,
    /// Owners of slots whose claims are not present.
    pub missing: BTreeSet<NodeId>,
    /// The owner of a slot has changed.
    pub is_changed: bool,
}

/// A slot whose keys migrate one by one from one member to another.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct OpenSlot {
    /// Source.
    pub from: NodeId,
    /// Target.
    pub to: NodeId,
    /// The slot.
    pub slot: Slot,
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
    /// Configuration epoch, as last claimed.
    epoch: Option<u64>,
    /// The address is from a redirect or from another member, and no report contains the member yet. A slot migrates
    /// there, so it may have keys.
    is_added: bool,
    /// Further addresses in redirects: the IP address of a member that is reported by its host name, for example.
    places: Vec<(String, u16)>,
}

impl Known {
    fn new(member: &Member, owned_ms: u64) -> Self {
        let (replicas, places) = (BTreeSet::new(), Vec::new());
        Self { member: member.clone(), owned_ms, replicas, is_replaced: false, epoch: None, is_added: false, places }
    }

    fn is_at(&self, host: &str, port: u16) -> bool {
        let own = std::iter::once((&self.member.host, self.member.port));
        let all = own.chain(self.places.iter().map(|(host, port)| (host, *port)));
        all.into_iter().any(|(of, at)| at == port && of.eq_ignore_ascii_case(host))
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
        let mut is_renamed = false;
        for Shard { slots, primary, .. } in shards {
            let is_it = |of: &Known| of.member == *primary || of.is_added && of.member.id == primary.id;
            let number = known.iter_mut().find(|(_, known)| is_it(known));
            let number = match number {
                Some((number, known)) => {
                    known.is_added = false;
                    if known.member != *primary {
                        let added = std::mem::replace(&mut known.member, primary.clone());
                        known.places.push((added.host, added.port));
                        is_renamed = true;
                    }
                    *number
                }
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
            let linger_ms = if known.is_added { TARGET_LINGER_MS } else { LINGER_MS };
            owns[number.index()] || now_ms.saturating_sub(known.owned_ms) < linger_ms
        });
        let is_replaced = |known: &BTreeMap<NodeId, Known>| -> Vec<NodeId> {
            known.iter().filter(|(_, known)| known.is_replaced).map(|(node, _)| *node).collect()
        };
        let is_changed = is_renamed
            || owners != self.owners
            || !known.keys().eq(self.known.keys())
            || is_replaced(&known) != is_replaced(&self.known);
        if is_changed {
            self.topology =
                Arc::new(built(self.topology.epoch() + 1, &known, &owners, next_id).map_err(|_| ViewError::TooMany)?);
        }
        (self.known, self.owners, self.next_id) = (known, owners, next_id);
        Ok(is_changed)
    }

    /// Adopts the slots that members claim. Of several members that claim a slot, the one with the greatest configuration
    /// epoch is its owner, as in the cluster.
    pub fn adopt_claims(&mut self, claims: &[(NodeId, Claims)]) -> Adopted {
        let mut adopted = Adopted::default();
        let mut open: BTreeMap<Slot, (NodeId, NodeId)> = BTreeMap::new();
        let mut claimed: BTreeMap<u16, (u64, NodeId)> = BTreeMap::new();
        let claims = || claims.iter().filter(|(node, _)| self.known.contains_key(node));
        for (node, claims) in claims() {
            for slot in claims.slots.iter().cloned().flatten() {
                let of = claimed.entry(slot).or_insert((claims.epoch, *node));
                *of = (*of).max((claims.epoch, *node));
            }
        }
        // The source of a migration determines the target of its keys.
        for (node, claims) in claims() {
            for (slot, source) in &claims.importing {
                // A source in no report owns no slot, or other members show it: the mark is left from a failover.
                if let Some(source) = self.number(&source.id) {
                    open.insert(*slot, (source, *node));
                }
            }
        }
        for (node, claims) in claims() {
            for (slot, target) in &claims.migrating {
                match self.number(&target.id) {
                    Some(target) => _ = open.insert(*slot, (*node, target)),
                    None => _ = adopted.unknown.insert(target.clone()),
                }
            }
        }
        let is_open = |(slot, (from, to))| (from != to).then_some(OpenSlot { from, to, slot });
        adopted.open = open.into_iter().filter_map(is_open).collect();
        for (node, claims) in claims() {
            let before = self.known.get(node).and_then(|known| known.epoch);
            for other in &claims.others {
                match self.number(&other.id) {
                    Some(other) => _ = adopted.missing.insert(other),
                    None => _ = adopted.unknown.insert(other.clone()),
                }
            }
            if before != Some(claims.epoch) {
                adopted.returned.extend(claims.slots.iter().cloned().flatten().filter_map(Slot::new));
            }
        }
        let epochs: Vec<(NodeId, u64)> = claims().map(|(node, claims)| (*node, claims.epoch)).collect();
        for (node, epoch) in &epochs {
            self.known.entry(*node).and_modify(|known| known.epoch = Some(*epoch));
        }
        let mut owners = self.owners.clone();
        claimed.into_iter().for_each(|(slot, (_, owner))| owners[usize::from(slot)] = owner);
        adopted.is_changed = self.change_owners(owners);
        adopted.missing.extend(&self.owners);
        epochs.iter().for_each(|(node, _)| _ = adopted.missing.remove(node));
        adopted
    }

    /// Adds a member that owns no slots, as the target of a migration. A member with a known id gets another address.
    /// Returns whether anything has changed.
    pub fn add(&mut self, member: &Member, now_ms: u64) -> bool {
        let place = (member.host.clone(), member.port);
        if let Some(number) = self.number(&member.id) {
            let Some(known) = self.known.get_mut(&number) else { return false };
            let is_new = !known.is_at(&member.host, member.port) && known.places.len() < PLACES_MAX;
            known.places.extend(is_new.then_some(place));
            return is_new;
        }
        let Ok(number) = u16::try_from(self.next_id).map(NodeId) else { return false };
        let mut known = self.known.clone();
        // The number of a former member at this address would name another process.
        known.retain(|_, known| (&known.member.host, known.member.port) != (&member.host, member.port));
        if self.owners.iter().any(|owner| !known.contains_key(owner)) {
            return false;
        }
        known.insert(number, Known { is_added: true, ..Known::new(member, now_ms) });
        let Ok(topology) = built(self.topology.epoch() + 1, &known, &self.owners, self.next_id + 1) else {
            return false;
        };
        (self.known, self.topology, self.next_id) = (known, Arc::new(topology), self.next_id + 1);
        true
    }

    fn number(&self, id: &str) -> Option<NodeId> {
        self.known.iter().find(|(_, known)| known.member.id == id).map(|(node, _)| *node)
    }

    /// Finds the member at an address. `from`: the member that sent the redirect.
    #[must_use]
    pub fn find(&self, place: Place<'_>, from: NodeId) -> Option<NodeId> {
        let host = place.host.or_else(|| self.member(from).map(|member| member.host.as_str()))?;
        self.known.iter().find(|(_, known)| known.is_at(host, place.port)).map(|(number, _)| *number)
    }

    /// Adopts the owner of one slot, from a redirect. Returns whether anything has changed.
    pub fn moved(&mut self, slot: Slot, owner: NodeId) -> bool {
        let Some(before) = self.owners.get(slot.index()).copied() else { return false };
        if before == owner || !self.known.contains_key(&owner) {
            return false;
        }
        let mut owners = self.owners.clone();
        owners[slot.index()] = owner;
        self.change_owners(owners)
    }

    /// Returns whether anything has changed.
    fn change_owners(&mut self, owners: Vec<NodeId>) -> bool {
        if owners == self.owners {
            return false;
        }
        let Ok(topology) = built(self.topology.epoch() + 1, &self.known, &owners, self.next_id) else { return false };
        (self.owners, self.topology) = (owners, Arc::new(topology));
        true
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
    let receivers = known.iter().filter(|(_, known)| known.is_added).map(|(id, _)| *id).collect();
    Ok(Topology::from_parts(epoch, nodes, ranges, next_id)?.of_cluster(receivers))
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

    fn slot(number: u16) -> Slot {
        Slot::new(number).expect("a slot")
    }

    fn peer(id: &str) -> Peer {
        Peer { id: id.to_owned(), place: Some(("10.0.0.1".to_owned(), 9)) }
    }

    #[test]
    fn claims_change_owners_and_show_open_slots() {
        let mut view = two();
        let (a, b) = (NodeId(0), NodeId(1));
        let first =
            Claims { epoch: 1, slots: vec![10..=8191], migrating: vec![(slot(20), peer("b"))], ..Claims::default() };
        let second = Claims {
            epoch: 2,
            slots: vec![0..=9, 8192..=16383, 8000..=8000],
            importing: vec![(slot(20), peer("a")), (slot(21), peer("new"))],
            others: vec![peer("a"), peer("other")],
            migrating: vec![],
        };
        let adopted = view.adopt_claims(&[(b, second.clone()), (a, first)]);
        let open = vec![OpenSlot { from: a, to: b, slot: slot(20) }];
        let unknown = BTreeSet::from([peer("other")]);
        assert_eq!((adopted.open, adopted.unknown, adopted.is_changed), (open, unknown, true));
        assert_eq!((owner(&view, 9), owner(&view, 10), owner(&view, 8000)), ("b", "a", "b"), "by the greater epoch");
        let again = view.adopt_claims(&[(b, second), (NodeId(7), Claims::default())]);
        assert_eq!((again.is_changed, again.missing), (false, BTreeSet::from([a])));
        // A member that owned no slots when the others were queried.
        assert!(view.add(&member("other", 3), 1));
        let all = Claims { epoch: 3, slots: vec![0..=16383], others: vec![peer("other")], ..Claims::default() };
        assert!(view.adopt_claims(&[(a, all)]).missing.contains(&NodeId(2)));
    }

    #[test]
    fn a_changed_epoch_shows_that_slots_may_have_returned() {
        let mut view = two();
        let claims = |epoch| Claims { epoch, slots: vec![0..=2], ..Claims::default() };
        let all: Vec<Slot> = (0..=2).map(slot).collect();
        assert_eq!(view.adopt_claims(&[(NodeId(0), claims(1))]).returned, all);
        assert_eq!(view.adopt_claims(&[(NodeId(0), claims(1))]).returned, []);
        assert_eq!(view.adopt_claims(&[(NodeId(0), claims(3))]).returned, all);
        assert_eq!(view.adopt_claims(&[(NodeId(0), claims(3))]).returned, []);
    }

    #[test]
    fn a_member_without_slots_is_found_and_keeps_its_number() {
        let mut view = two();
        let place = |host, port| Place { host: Some(host), port };
        let new = NodeId(2);
        assert!(view.add(&member("c", 3), 5) && !view.add(&member("c", 3), 5));
        assert_eq!(view.find(place("10.0.0.1", 3), NodeId(0)), Some(new));
        assert!(view.topology().nodes_with_keys().contains(&new), "it may have keys of open slots");
        // By its name.
        assert!(view.add(&Member { host: "Host".to_owned(), ..member("c", 3) }, 5));
        assert_eq!(view.find(place("host", 3), NodeId(0)), Some(new));
        // It is the target of a migration.
        let leaves = Claims { epoch: 1, migrating: vec![(slot(0), peer("c"))], ..Claims::default() };
        let open = vec![OpenSlot { from: NodeId(0), to: new, slot: slot(0) }];
        assert_eq!(view.adopt_claims(&[(NodeId(0), leaves)]).open, open);
        assert!(view.moved(slot(0), new));
        let named = Shard { primary: Member { host: "host".to_owned(), ..member("c", 3) }, ..shard(0..=0, "c", 3) };
        assert_eq!(view.adopt(&[named, shard(1..=8191, "a", 1), shard(8192..=16383, "b", 2)], 6), Ok(true));
        assert_eq!(view.find(place("10.0.0.1", 3), NodeId(0)), Some(new));
        assert_eq!(view.member(new).map(|member| member.host.as_str()), Some("host"));
        assert!(!view.add(&member("d", 1), 7), "an owner is at this address");
    }

    #[test]
    fn a_redirect_changes_the_owner_of_one_slot_once() {
        let mut view = two();
        let place = |host, port| Place { host, port };
        assert_eq!(view.find(place(Some("10.0.0.1"), 2), NodeId(0)), Some(NodeId(1)));
        assert_eq!(view.find(place(None, 2), NodeId(0)), Some(NodeId(1)));
        assert_eq!(view.find(place(Some("10.0.0.2"), 2), NodeId(0)), None);
        let slot = slot(7);
        let epoch = view.topology().epoch();
        assert!(view.moved(slot, NodeId(1)) && !view.moved(slot, NodeId(1)) && !view.moved(slot, NodeId(9)));
        assert_eq!((owner(&view, 7), owner(&view, 6), owner(&view, 8)), ("b", "a", "a"));
        assert_eq!(view.topology().epoch(), epoch + 1);
    }
}
