//! Moves of keys without their slots (`switchyard move --keys`): selection and targets.
//!
//! The keys are selected when the move is requested, and recorded with it. So their number, whether they fit, and the
//! affected slots are known at once, and keys created later under a matching name are not included. The mover's own
//! listing would not do: keys known only while the move runs cannot be checked against other moves, and the move could
//! fail long after its acceptance.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use switchyard_policy::migration::{Cause, Key, MoveOptions, MoveOrder, Protocol, is_temporary};
use switchyard_policy::topology::{MOVE_KEY_BYTES_MAX, MOVE_KEYS_MAX, NodeId, Placement, Topology};
use switchyard_resp::glob;
use switchyard_resp::units::counted;
use switchyard_router::Router;

use super::{Operator, node_named};
use crate::admin::{MoveRequest, OperationError, PlanReport, conflict, invalid};
use crate::moves::check_size;
use crate::nodes::NodeConnection;

/// Timeout for one reply of a node.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Timeout of the search for matching keys, because the client waits for it.
const SEARCH: Duration = Duration::from_secs(45);

impl Operator {
    /// Starts moves of keys, or (dry run) plans them. The caller holds the planning lock.
    pub(super) fn begin_keys(
        &self,
        topology: &Topology,
        request: &MoveRequest,
        how: MoveOptions,
    ) -> Result<PlanReport, OperationError> {
        if request.slots.is_some() || request.all {
            return Err(invalid("give slots, or keys, not both"));
        }
        if how.protocol != Protocol::Switchyard {
            return Err(invalid("single keys move by the protocol switchyard only"));
        }
        let source = if request.from.is_empty() { None } else { Some(node_named(topology, &request.from)?) };
        let sources = || source.map_or_else(|| topology.nodes_with_keys(), |source| vec![source]);
        let orders: Vec<MoveOrder> = match (&request.keys, request.home) {
            (pattern, true) => {
                if !request.to.is_empty() {
                    return Err(invalid("home determines the target: the owners of the slots"));
                }
                sources()
                    .into_iter()
                    .flat_map(|source| Self::plan_returns(topology, source, pattern.as_deref(), how))
                    .collect()
            }
            (Some(pattern), false) => {
                if request.to.is_empty() {
                    return Err(invalid("to which node?"));
                }
                let target = node_named(topology, &request.to)?;
                self.check_not_drained(target)?;
                if source == Some(target) {
                    return Err(invalid(format!("source and target are the same node, {}", request.from)));
                }
                let by_source: Vec<(NodeId, BTreeSet<Key>)> = match source {
                    // A single key is at a single node.
                    None if is_plain(pattern) => {
                        vec![(topology.node_of(pattern.as_bytes()), [Key::from(pattern.as_bytes())].into())]
                    }
                    _ => {
                        let matching = |source| Ok((source, self.matching(topology, source, pattern)?));
                        sources().into_iter().filter(|source| *source != target).map(matching).collect::<Result<
                            Vec<_>,
                            OperationError,
                        >>(
                        )?
                    }
                };
                by_source.iter().try_for_each(|(_, keys)| check_size(keys.iter()))?;
                let all: BTreeSet<Key> = by_source.iter().flat_map(|(_, keys)| keys).cloned().collect();
                self.check_room(topology, &all, target)?;
                let away = by_source.into_iter().filter(|(source, _)| *source != target);
                away.filter_map(|(source, keys)| order(topology.placement(), source, target, keys, Some(pattern), how))
                    .collect()
            }
            (None, false) => return Err(invalid("which keys?")),
        };
        if orders.is_empty() {
            let from = if source.is_some() { request.from.as_str() } else { "any node" };
            return Err(conflict(match request.home {
                true => {
                    format!("no keys (that match) live at {from} without their slots, so there is nothing to return")
                }
                false if source.is_none() => {
                    format!("no key matches, or each that does lives at {} already", request.to)
                }
                false => format!("no key that lives at {from} matches, so there is nothing to move"),
            }));
        }
        let (orders, left) = without_shared_slots(topology.placement(), orders);
        let away = orders.iter().filter(|_| !request.home).filter_map(|order| order.keys.clone());
        let mut notes: Vec<String> = away.filter_map(|keys| self.moves.colocations().warning(&keys)).collect();
        if left > 0 {
            notes.push(format!(
                "left out: {}, because others of their slots move from another node: retry when these moves have ended",
                counted(left, "key")
            ));
        }
        let plan = self.moves.accept_unless(request.dry_run, topology, orders)?;
        Ok(PlanReport { notes: notes.into_iter().chain(plan.notes).collect(), ..plan })
    }

    /// Returns moves that return a node's placement overrides to the slot owners: one per owner, or several if the keys
    /// of one exceed the limits of a move. No two moves have a slot in common, so of a slot whose own keys exceed them,
    /// some stay.
    pub(super) fn plan_returns(
        topology: &Topology,
        node: NodeId,
        pattern: Option<&str>,
        how: MoveOptions,
    ) -> Vec<MoveOrder> {
        let mut by_owner: BTreeMap<NodeId, Vec<KeyGroup>> = BTreeMap::new();
        for slot in topology.slots() {
            let is_wanted = |(key, at): &(&Key, NodeId)| {
                *at == node && pattern.is_none_or(|pattern| glob::matches_key(pattern.as_bytes(), key))
            };
            let mut of_slot = KeyGroup::default();
            topology.overrides_in(slot).filter(is_wanted).for_each(|(key, _)| of_slot.add(key));
            if of_slot.keys.is_empty() {
                continue;
            }
            let groups = by_owner.entry(topology.owner(slot)).or_default();
            match groups.last_mut().filter(|group| group.has_room_for(of_slot.keys.len(), of_slot.bytes)) {
                Some(group) => of_slot.keys.iter().for_each(|key| group.add(key)),
                None => groups.push(of_slot),
            }
        }
        let orders = |(owner, groups): (NodeId, Vec<KeyGroup>)| {
            let order = move |group: KeyGroup| order(topology.placement(), node, owner, group.keys, pattern, how);
            groups.into_iter().filter_map(order)
        };
        by_owner.into_iter().flat_map(orders).collect()
    }

    /// Keys of a node that match. A pattern without special characters is used as a name, whether the key exists or
    /// not.
    fn matching(&self, topology: &Topology, source: NodeId, pattern: &str) -> Result<BTreeSet<Key>, OperationError> {
        if is_plain(pattern) {
            let at = topology.node_of(pattern.as_bytes());
            if at != source {
                return Err(conflict(format!(
                    "that key lives at {}, not at {}",
                    self.moves.name(at),
                    self.moves.name(source)
                )));
            }
            return Ok([Key::from(pattern.as_bytes())].into());
        }
        // Placement overrides are known even if the keys do not exist now.
        let known = topology
            .placement_overrides()
            .filter(|(key, at)| *at == source && glob::matches_key(pattern.as_bytes(), key));
        let mut found: BTreeSet<Key> = known.map(|(key, _)| Arc::clone(key)).collect();
        let failed = |why: String| OperationError::Failed(format!("node {} {why}", self.moves.name(source)));
        let access = self.running.with(Router::node_access).unwrap_or_default();
        let access = access.get(&source).ok_or_else(|| failed("has no known address".to_owned()))?;
        let mut node = NodeConnection::open(access, TIMEOUT).map_err(failed)?;
        let began = Instant::now();
        let mut ask = |args: &[&[u8]]| {
            if began.elapsed() > SEARCH {
                return Err(failed(format!(
                    "has too many keys: the search for matching ones takes longer than {SEARCH:?}; name the keys individually"
                )));
            }
            let answer = node.call(args).map_err(|error| failed(format!("does not answer: {error}")))?;
            match answer.error() {
                Some(error) => Err(failed(format!("refuses {}: {error}", String::from_utf8_lossy(args[0])))),
                None => Ok(answer),
            }
        };
        let info = ask(&[b"INFO", b"keyspace"])?.text();
        let databases: Vec<u32> =
            info.lines().filter_map(|line| line.strip_prefix("db")?.split(':').next()?.parse().ok()).collect();
        for database in databases {
            ask(&[b"SELECT", database.to_string().as_bytes()])?;
            let mut cursor = b"0".to_vec();
            loop {
                let answer = ask(&[b"SCAN", &cursor, b"MATCH", pattern.as_bytes(), b"COUNT", b"1000"])?;
                let [next, page] = &answer.items()[..] else {
                    return Err(failed("answers SCAN in an unknown form".to_owned()));
                };
                for key in page.items() {
                    // A key that is stored there without living there is a leftover.
                    if !is_temporary(key.bytes()) && topology.node_of(key.bytes()) == source {
                        found.insert(key.bytes().into());
                    }
                }
                if found.len() > MOVE_KEYS_MAX {
                    check_size(found.iter())?;
                }
                cursor = next.bytes().to_vec();
                if cursor == b"0" {
                    break;
                }
            }
        }
        Ok(found)
    }

    /// Checks that the limit of placement overrides permits these keys at `target`, in addition to the present
    /// overrides and those of open moves.
    pub(super) fn check_room(
        &self,
        topology: &Topology,
        keys: &BTreeSet<Key>,
        target: NodeId,
    ) -> Result<(), OperationError> {
        let open = self.moves.open_keys();
        let all = keys.iter().chain(open.iter().flat_map(|keys| keys.iter()));
        topology.room_for_overrides(all.map(|key| &**key), target).map_err(|error| conflict(error.to_string()))
    }
}

/// Keys of one move, within its limits.
#[derive(Default)]
struct KeyGroup {
    keys: BTreeSet<Key>,
    bytes: usize,
}

impl KeyGroup {
    fn has_room_for(&self, keys: usize, bytes: usize) -> bool {
        self.keys.len() + keys <= MOVE_KEYS_MAX && self.bytes + bytes <= MOVE_KEY_BYTES_MAX
    }

    /// Adds a key, if there is room for it.
    fn add(&mut self, key: &Key) {
        if self.has_room_for(1, key.len()) && self.keys.insert(Arc::clone(key)) {
            self.bytes += key.len();
        }
    }
}

/// Removes keys so that no two orders share a slot. Returns the number of removed keys.
pub(super) fn without_shared_slots(placement: &Placement, orders: Vec<MoveOrder>) -> (Vec<MoveOrder>, usize) {
    let (mut taken, mut left) = (BTreeSet::new(), 0);
    let mut some = |found: MoveOrder| {
        // Whole slots first, so that none of their keys moves elsewhere.
        if found.keys.is_none() {
            taken.extend(found.slots.iter().copied());
            return Some(found);
        }
        let keys: BTreeSet<Key> = found.keys.iter().flat_map(|keys| keys.iter()).cloned().collect();
        let all = keys.len();
        let free: BTreeSet<Key> = keys.into_iter().filter(|key| !taken.contains(&placement.slot_of(key))).collect();
        left += all - free.len();
        taken.extend(free.iter().map(|key| placement.slot_of(key)));
        let keys: Arc<[Key]> = free.into_iter().collect();
        (!keys.is_empty()).then(|| MoveOrder {
            slots: MoveOrder::slots_of(placement, &keys),
            keys: Some(keys),
            ..found
        })
    };
    let orders = orders.into_iter().filter_map(&mut some).collect();
    (orders, left)
}

/// Whether a pattern is the name of a single key.
fn is_plain(pattern: &str) -> bool {
    !pattern.contains(['*', '?', '[', '\\'])
}

/// Returns a move of these keys, if there are any.
pub(super) fn order(
    placement: &Placement,
    source: NodeId,
    target: NodeId,
    keys: BTreeSet<Key>,
    pattern: Option<&str>,
    how: MoveOptions,
) -> Option<MoveOrder> {
    let keys: Arc<[Key]> = keys.into_iter().collect();
    let cause = Cause::Requested(pattern.map(str::to_owned));
    (!keys.is_empty()).then(|| MoveOrder {
        source,
        target,
        slots: MoveOrder::slots_of(placement, &keys),
        keys: Some(keys),
        how,
        cause,
    })
}

#[cfg(test)]
mod tests {
    use switchyard_policy::topology::Slot;

    use super::*;

    #[test]
    fn no_two_moves_have_a_slot_in_common() {
        let keys = |names: &[&str]| names.iter().map(|name| Key::from(name.as_bytes())).collect::<BTreeSet<_>>();
        let how = MoveOptions::default();
        let one = order(&Placement::Crc16, NodeId(0), NodeId(2), keys(&["{a}1", "{b}1"]), None, how);
        let other = order(&Placement::Crc16, NodeId(1), NodeId(2), keys(&["{a}2", "{a}3", "{c}1"]), None, how);
        let none = order(&Placement::Crc16, NodeId(3), NodeId(2), keys(&["{b}2"]), None, how);
        let (orders, left) =
            without_shared_slots(&Placement::Crc16, [one, other, none].into_iter().flatten().collect());
        assert_eq!((orders.len(), left), (2, 3));
        let slots: Vec<Slot> = orders.iter().flat_map(|order| order.slots.clone()).collect();
        assert_eq!(slots.iter().collect::<BTreeSet<_>>().len(), slots.len());
        assert_eq!(orders[1].keys.as_deref().map(<[Key]>::len), Some(1));
    }

    #[test]
    fn placement_overrides_return_to_their_slot_owners() {
        let names: Vec<String> = (0..3).map(|i| format!("127.0.0.1:{}", 7000 + i)).collect();
        let topology = Topology::even(&names).expect("three nodes");
        let keys: Vec<Key> =
            (0..30).map(|i| format!("{}:{i}", if i % 3 == 0 { "a" } else { "b" }).into_bytes().into()).collect();
        let away = keys.iter().filter(|key| topology.owner_of(key) != NodeId(2));
        let parted = topology.keys_handed_over(&[], away, NodeId(2));
        let home = Operator::plan_returns(&parted, NodeId(2), None, MoveOptions::default());
        assert_eq!(home.iter().map(|order| (order.source.0, order.target.0)).collect::<Vec<_>>(), [(2, 0), (2, 1)]);
        let mut after = parted.clone();
        for order in &home {
            let keys = order.keys.clone().expect("of keys");
            assert!(keys.iter().all(|key| order.slots.binary_search(&Placement::Crc16.slot_of(key)).is_ok()));
            after = after.keys_handed_over(&order.slots, keys.iter(), order.target);
        }
        assert!(!after.has_overrides());
        let some = Operator::plan_returns(&parted, NodeId(2), Some("a:*"), MoveOptions::default());
        assert!(
            some.iter()
                .flat_map(|order| order.keys.iter().flat_map(|keys| keys.iter()))
                .all(|key| key.starts_with(b"a:"))
        );
        assert!(Operator::plan_returns(&parted, NodeId(1), None, MoveOptions::default()).is_empty());
    }

    #[test]
    fn returns_beyond_the_limits_of_a_move_are_several_moves() {
        let names: Vec<String> = (0..2).map(|i| format!("127.0.0.1:{}", 7000 + i)).collect();
        let topology = Topology::even(&names).expect("two nodes");
        let long = |number: u32| Key::from(format!("{number}{}", "x".repeat(MOVE_KEY_BYTES_MAX / 3)).into_bytes());
        let keys: Vec<Key> = (0..).map(long).filter(|key| topology.owner_of(key) == NodeId(0)).take(5).collect();
        let parted = topology.keys_handed_over(&[], &keys, NodeId(1));
        let home = Operator::plan_returns(&parted, NodeId(1), None, MoveOptions::default());
        let sizes: Vec<usize> = home.iter().filter_map(|order| order.keys.as_deref().map(<[Key]>::len)).collect();
        assert_eq!(sizes, [2, 2, 1]);
        let slots: Vec<Slot> = home.iter().flat_map(|order| order.slots.clone()).collect();
        assert_eq!(slots.iter().collect::<BTreeSet<_>>().len(), slots.len(), "no two moves share a slot");
    }
}
