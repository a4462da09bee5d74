//! Selects the node where keys come together.
//!
//! Requests with common keys, directly or through others, form a group with one target. The first criterion that decides:
//! 1. the target that the oldest request requires;
//! 2. the node of keys that cannot move now;
//! 3. the node of most keys. A key with a placement override counts twice, because it has been brought there. Keys that
//!    were recently together with one of the group count as well;
//! 4. the node that owns most of their slots;
//! 5. the lowest number.
//!
//! The load of nodes is not a criterion: it changes, and a group must keep its target. Moves to the target only add to its
//! votes, so a request whose keys arrive in several moves keeps it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::recent::GROUP_KEYS_MAX;
use super::{Fleet, Request};
use crate::topology::NodeId;

/// Target of a group.
pub(super) struct Target {
    pub(super) node: NodeId,
    /// Keys that were recently together with keys of the group, and are at the target, or come along because these move.
    /// With the requested keys they are at most [`GROUP_KEYS_MAX`]: a group remembers no more.
    pub(super) along: BTreeSet<Arc<[u8]>>,
}

/// Arguments for a node.
#[derive(Default)]
struct Votes {
    /// Keys that cannot move now.
    fixed: usize,
    /// Keys, those with a placement override twice.
    keys: usize,
    /// Keys in slots of the node.
    slots: usize,
}

/// Groups requests by common keys. Returns the group of each request, and the targets of the groups that have keys.
pub(super) fn targets(fleet: &Fleet<'_>, requests: &[Request]) -> (Vec<usize>, BTreeMap<usize, Target>) {
    let group_of = groups(requests);
    // Keys and the required node, by group.
    type Members<'a> = (BTreeSet<&'a Arc<[u8]>>, Option<NodeId>);
    let mut members: BTreeMap<usize, Members<'_>> = BTreeMap::new();
    for (request, group) in requests.iter().zip(&group_of) {
        let (keys, at) = members.entry(*group).or_default();
        keys.extend(&request.keys);
        *at = at.or(request.at);
    }
    let of_group = |(group, (keys, at))| Some((group, target(fleet, &keys, at)?));
    let targets = members.into_iter().filter_map(of_group).collect();
    (group_of, targets)
}

/// Returns for each request the number of its group: the index of the group's first request.
fn groups(requests: &[Request]) -> Vec<usize> {
    fn first(group: &mut [usize], mut place: usize) -> usize {
        while group[place] != place {
            group[place] = group[group[place]];
            place = group[place];
        }
        place
    }
    let mut group: Vec<usize> = (0..requests.len()).collect();
    let mut first_with: BTreeMap<&[u8], usize> = BTreeMap::new();
    for (place, request) in requests.iter().enumerate() {
        for key in &request.keys {
            let known = *first_with.entry(key).or_insert(place);
            let (one, other) = (first(&mut group, known), first(&mut group, place));
            group[one.max(other)] = one.min(other);
        }
    }
    (0..requests.len()).map(|place| first(&mut group, place)).collect()
}

/// Returns the target of these keys. `None` without keys.
fn target(fleet: &Fleet<'_>, keys: &BTreeSet<&Arc<[u8]>>, required: Option<NodeId>) -> Option<Target> {
    let topology = fleet.topology;
    let recent: BTreeMap<u64, &BTreeSet<Arc<[u8]>>> = keys.iter().filter_map(|key| fleet.recent.of(key)).collect();
    let node = required.or_else(|| {
        let mut votes: BTreeMap<NodeId, Votes> = BTreeMap::new();
        let mut owners = Vec::new();
        for key in keys.iter().copied() {
            let slot = topology.slot_of(key);
            let (at, owner) = (topology.lives_at_in_slot(slot, key), topology.owner(slot));
            let votes = votes.entry(at).or_default();
            votes.fixed += usize::from(fleet.is_fixed(slot));
            votes.keys += 1 + usize::from(at != owner);
            owners.push(owner);
        }
        for key in recent.values().flat_map(|group| group.iter()).filter(|key| !keys.contains(key)) {
            let (at, owner) = (topology.node_of(key), topology.owner_of(key));
            if let Some(votes) = votes.get_mut(&at) {
                votes.keys += 1 + usize::from(at != owner);
            }
        }
        for owner in owners {
            votes.entry(owner).and_modify(|votes| votes.slots += 1);
        }
        let rank = |(node, votes): &(NodeId, Votes)| {
            let (is_here, may_receive) = (!fleet.away.contains(node), !fleet.drained.contains(node));
            (is_here, votes.fixed, may_receive, votes.keys, votes.slots, Reverse(*node))
        };
        votes.into_iter().max_by_key(rank).map(|(node, _)| node)
    })?;
    let is_there = |key: &Arc<[u8]>| topology.node_of(key) == node;
    let along = recent.into_values().flat_map(|group| {
        let moves = group.iter().any(|key| keys.contains(&key) && !is_there(key));
        group.iter().filter(move |key| !keys.contains(key) && (moves || is_there(key)))
    });
    let room = GROUP_KEYS_MAX.saturating_sub(keys.len());
    Some(Target { node, along: along.take(room).cloned().collect() })
}
