//! From the configured nodes to the router's topology: stored slot map, node numbers and addresses. A map is stored
//! before it is published; slots in transit are in the journal of moves instead.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, bail};
use switchyard_policy::migration::Key;
use switchyard_policy::topology::{
    AdoptionError, MoveId, NodeId, OverlaidTopology, Scheme, Server, Slot, Stage, Topology, Transit,
};
use switchyard_router::NodeAccess;
use tracing::debug;

use crate::nodes::NodeAddress;
use crate::running::Running;
use crate::store::{RedbStore, Store, load_json, save_json};

/// Store document with an epoch that no map has reached yet.
const EPOCHS: &str = "epochs";

/// Number of epochs reserved by one write to the store. Maps that differ only in transit are published often and not
/// stored.
const EPOCHS_RESERVED: u64 = 100;

/// The current slot map, which only this type changes. A change is stored before it is published.
///
/// Slots in transit are not stored: the journal of moves is the authority on them, and a mover sets them again after a
/// restart.
#[derive(Debug)]
pub struct Placement {
    store: Arc<RedbStore>,
    running: Arc<Running>,
    map: Mutex<Map>,
}

#[derive(Debug, Default)]
struct Map {
    topology: Option<Arc<Topology>>,
    /// Slots in transit, by move.
    transits: BTreeMap<MoveId, Vec<(Transit, Vec<Slot>)>>,
    /// Source and target of open moves. These nodes cannot be removed.
    taking_part: BTreeMap<MoveId, [NodeId; 2]>,
    /// The first start has not examined the nodes' keys yet: the map serves no key, and is not stored.
    is_provisional: bool,
    /// Minimum epoch of the next start, so that no epoch is used twice.
    epoch_min: u64,
}

impl Map {
    /// Reserves epochs, so that the next start begins above this one. A failure is ignored, because no decision
    /// compares epochs of two starts.
    fn reserve_epochs(&mut self, store: &RedbStore, epoch: u64) {
        if epoch < self.epoch_min {
            return;
        }
        let free_from = epoch + EPOCHS_RESERVED;
        match save_json(store, EPOCHS, &free_from) {
            Ok(()) => self.epoch_min = free_from,
            Err(error) => debug!("the epoch may fall at the next start: {error}"),
        }
    }
}

/// Result of applying a list of nodes.
#[derive(Debug)]
pub struct AppliedNodes {
    /// Current map.
    pub topology: Arc<Topology>,
    /// Names of new nodes, which own no slots.
    pub joined: Vec<String>,
    /// Numbers and names of removed nodes.
    pub removed: Vec<(NodeId, String)>,
    /// Whether the map differs from the previous one.
    pub changed: bool,
}

impl Placement {
    /// Opens the state directory, which no other process may use. Publishes changes to the router in `running`, once it
    /// serves.
    pub fn open(directory: &Path, running: Arc<Running>) -> anyhow::Result<Self> {
        let store = Arc::new(RedbStore::open(directory)?);
        let free_from = load_json(&*store, EPOCHS)?;
        let topology = store.load_topology()?.map(|stored| Arc::new(stored.at_epoch(free_from)));
        Ok(Self { store, running, map: Mutex::new(Map { topology, epoch_min: free_from, ..Map::default() }) })
    }

    /// The store, which also contains other modules' documents.
    pub fn store(&self) -> &Arc<RedbStore> {
        &self.store
    }

    /// Counts this start.
    pub fn next_incarnation(&self) -> anyhow::Result<u64> {
        Ok(self.store.next_incarnation()?)
    }

    fn map(&self) -> MutexGuard<'_, Map> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Current map. `None` before the first placement.
    pub fn topology(&self) -> Option<Arc<Topology>> {
        self.map().topology.clone()
    }

    /// Fails if the configuration requires another placement of keys than the map has.
    pub fn check_scheme(&self, wanted: Option<&Scheme>) -> anyhow::Result<()> {
        match &self.map().topology {
            Some(topology) => Ok(topology.placement().check_scheme(wanted)?),
            None => Ok(()),
        }
    }

    /// Sets the map of a first start. A provisional map is stored when it is confirmed.
    pub fn begin(&self, topology: Topology, is_provisional: bool) -> anyhow::Result<()> {
        let mut map = self.map();
        if !is_provisional {
            self.store.save_topology(&topology).context("cannot keep the slot map")?;
        }
        (map.topology, map.is_provisional) = (Some(Arc::new(topology)), is_provisional);
        Ok(())
    }

    /// Replaces the provisional map by one that fits the nodes' keys.
    pub(crate) fn confirm(&self, topology: Topology) -> anyhow::Result<()> {
        let mut map = self.map();
        self.store.save_topology(&topology).context("cannot keep the slot map")?;
        let topology = Arc::new(topology);
        (map.topology, map.is_provisional) = (Some(Arc::clone(&topology)), false);
        self.running.publish(topology);
        Ok(())
    }

    /// Whether the first start has not examined the nodes' keys yet.
    pub(crate) fn is_provisional(&self) -> bool {
        self.map().is_provisional
    }

    /// Updates the map for the configured nodes, and makes it durable. Calls `before` before publishing it, so that new
    /// nodes are reachable when the map is published.
    pub fn apply_nodes(&self, wanted: &[String], before: impl FnOnce(&AppliedNodes)) -> anyhow::Result<AppliedNodes> {
        let mut map = self.map();
        let placed = Topology::place(map.topology.as_deref(), wanted)?;
        for node in &placed.removed {
            if let Some(id) = map.taking_part.iter().find(|(_, nodes)| nodes.contains(&node.id)).map(|(id, _)| id.0) {
                bail!(
                    "node {} takes part in move {id}, so it must stay in the list; see `switchyard moves`",
                    node.name
                );
            }
        }
        if map.is_provisional && placed.changed {
            bail!(
                "this is a first start, and the keys of each node are not known yet: restart to use another list of nodes"
            );
        }
        let topology = match &map.topology {
            Some(stored) if !placed.changed => Arc::clone(stored),
            _ => {
                self.store.save_topology(&placed.topology).context("cannot keep the slot map")?;
                Arc::new(placed.topology)
            }
        };
        map.topology = Some(Arc::clone(&topology));
        let name = |id| topology.node(id).map(|node| node.name.clone());
        let settled = AppliedNodes {
            joined: placed.joined.iter().filter_map(|id| name(*id)).collect(),
            removed: placed.removed.into_iter().map(|node| (node.id, node.name)).collect(),
            changed: placed.changed,
            topology: Arc::clone(&topology),
        };
        before(&settled);
        if settled.changed {
            self.running.publish(topology);
        }
        Ok(settled)
    }

    /// Overlays the continuum with a list of servers ([`Topology::with_overlay`]). `split` receives new slots, each
    /// with the old slot that it is a part of, before any other use of them. If it fails, the map stays. Returns the
    /// new map, and the slots that change servers.
    pub(crate) fn lay_over(
        &self,
        list: &[Server],
        split: impl FnOnce(&[(Slot, Slot)]) -> Result<(), String>,
    ) -> anyhow::Result<(Arc<Topology>, Vec<Slot>)> {
        let mut map = self.map();
        let Some(topology) = map.topology.as_deref().filter(|_| !map.is_provisional) else {
            bail!("there is no slot map yet")
        };
        if !map.transits.is_empty() {
            bail!("a move is in progress: the list of servers waits for it");
        }
        let OverlaidTopology { topology: next, parts, goals } = topology.with_overlay(list.iter().cloned())?;
        if let Err(why) = split(&parts) {
            bail!(
                "the journal of moves in the state directory cannot record the slots of the new list: {why}; make room for the directory, and check its disk"
            );
        }
        self.store.save_topology(&next).context("cannot keep the slot map")?;
        let next = Arc::new(next);
        map.topology = Some(Arc::clone(&next));
        self.running.publish(Arc::clone(&next));
        Ok((next, goals.into_iter().map(|(slot, _)| slot).collect()))
    }

    /// Publishes a change of the placement rules. `forget` receives the slots that start to have keys, before any use of
    /// them. If it fails, the map stays.
    pub(crate) fn change_rules(
        &self,
        change: impl FnOnce(&Topology) -> Result<Topology, AdoptionError>,
        forget: impl FnOnce(&[Slot]) -> Result<(), String>,
    ) -> anyhow::Result<Arc<Topology>> {
        let mut map = self.map();
        let Some(topology) = map.topology.as_deref().filter(|_| !map.is_provisional) else {
            bail!("there is no slot map yet")
        };
        if !map.transits.is_empty() {
            bail!("a move is in progress: rules change between moves");
        }
        let next = change(topology)?;
        let added: Vec<Slot> = next.slots().skip(topology.slots().count()).collect();
        if !added.is_empty()
            && let Err(why) = forget(&added)
        {
            bail!(
                "the journal of moves in the state directory cannot record the change: {why}; make room for the directory, and check its disk"
            );
        }
        self.store.save_topology(&next).context("cannot keep the slot map")?;
        let next = Arc::new(next);
        map.topology = Some(Arc::clone(&next));
        self.running.publish(Arc::clone(&next));
        Ok(next)
    }

    /// Retains source and target as nodes until the move has ended.
    pub(crate) fn retain_nodes(&self, id: MoveId, nodes: [NodeId; 2]) {
        self.map().taking_part.insert(id, nodes);
    }

    /// Ends the retention of a move's nodes.
    pub(crate) fn release_nodes(&self, id: MoveId) {
        self.map().taking_part.remove(&id);
    }

    /// Whether keys of the move may be at another node than the map states.
    pub(crate) fn is_in_transit(&self, id: MoveId) -> bool {
        self.map()
            .transits
            .get(&id)
            .is_some_and(|transits| transits.iter().any(|(t, _)| matches!(t.stage, Stage::Moving { .. })))
    }

    /// Whether keys of any move are in transit.
    pub(crate) fn is_moving(&self) -> bool {
        self.map().transits.values().flatten().any(|(transit, _)| matches!(transit.stage, Stage::Moving { .. }))
    }

    /// Sets the slots in transit of this move, replacing earlier ones. Returns the epoch of that map.
    pub(crate) fn set_transits(&self, id: MoveId, transits: Vec<(Transit, Vec<Slot>)>) -> Result<u64, String> {
        let mut map = self.map();
        let Some(topology) = map.topology.clone() else { return Err("there is no slot map yet".to_owned()) };
        let before = map.transits.insert(id, transits);
        let all = map.transits.values().flatten().map(|(transit, slots)| (*transit, slots.as_slice()));
        match topology.with_transits(all) {
            Ok(next) => {
                map.reserve_epochs(&self.store, next.epoch());
                let next = Arc::new(next);
                map.transits.retain(|_, transits| !transits.is_empty());
                map.topology = Some(Arc::clone(&next));
                self.running.publish(Arc::clone(&next));
                Ok(next.epoch())
            }
            Err(error) => {
                match before {
                    Some(before) => map.transits.insert(id, before),
                    None => map.transits.remove(&id),
                };
                Err(error.to_string())
            }
        }
    }

    /// Makes `owner` the owner of these slots or, with `keys`, places the given keys of these slots there. Ends the
    /// transit of the slots.
    pub(crate) fn hand_over(
        &self,
        id: MoveId,
        slots: &[Slot],
        keys: Option<&[Key]>,
        owner: NodeId,
    ) -> Result<(), String> {
        let mut map = self.map();
        let Some(topology) = map.topology.clone().filter(|topology| topology.node(owner).is_some()) else {
            return Err(format!("there is no node number {}", owner.0));
        };
        let next = match keys {
            None => topology.handed_over(slots, owner),
            Some(keys) => {
                let of_slots = keys.iter().filter(|key| slots.binary_search(&topology.slot_of(key)).is_ok());
                topology.keys_handed_over(slots, of_slots, owner)
            }
        };
        self.store_and_publish(&mut map, id, slots, next)
    }

    /// Makes each of these nodes the owner of its slots, atomically. Ends the transit of the slots.
    pub(crate) fn hand_over_to(&self, id: MoveId, to: &BTreeMap<NodeId, Vec<Slot>>) -> Result<(), String> {
        let mut map = self.map();
        let Some(topology) = map.topology.clone() else { return Err("there is no slot map yet".to_owned()) };
        if let Some(node) = to.keys().find(|node| topology.node(**node).is_none()) {
            return Err(format!("there is no node number {}", node.0));
        }
        let next = to.iter().fold((*topology).clone(), |topology, (node, slots)| topology.handed_over(slots, *node));
        let mut slots: Vec<Slot> = to.values().flatten().copied().collect();
        slots.sort_unstable();
        self.store_and_publish(&mut map, id, &slots, next)
    }

    /// Stores and publishes a map in which these slots of a move are no longer in transit.
    fn store_and_publish(&self, map: &mut Map, id: MoveId, slots: &[Slot], next: Topology) -> Result<(), String> {
        self.store.save_topology(&next).map_err(|error| format!("cannot keep the slot map: {error}"))?;
        let next = Arc::new(next);
        if let Some(transits) = map.transits.get_mut(&id) {
            for (_, of_leg) in transits.iter_mut() {
                of_leg.retain(|slot| slots.binary_search(slot).is_err());
            }
            transits.retain(|(_, of_leg)| !of_leg.is_empty());
        }
        map.transits.retain(|_, transits| !transits.is_empty());
        map.topology = Some(Arc::clone(&next));
        self.running.publish(next);
        Ok(())
    }
}

/// Access data of each node of the topology, by its number. Every node has an address, because the topology was made
/// from their names.
pub fn access(topology: &Topology, addresses: &[NodeAddress]) -> BTreeMap<NodeId, NodeAccess> {
    let by_name: BTreeMap<&str, &NodeAddress> = addresses.iter().map(|node| (node.name.as_str(), node)).collect();
    topology
        .nodes()
        .filter_map(|node| {
            let found = by_name.get(node.name.as_str())?;
            Some((node.id, found.access()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use switchyard_policy::topology::{Continuum, Distribution};

    use super::*;

    fn named(ports: &[u16]) -> Vec<String> {
        ports.iter().map(|port| format!("127.0.0.1:{port}")).collect()
    }

    /// Returns the addresses.
    fn addresses(names: &[String]) -> Vec<NodeAddress> {
        let one =
            |name: &String| NodeAddress { name: name.clone(), address: name.parse().ok(), ..NodeAddress::default() };
        names.iter().map(one).collect()
    }

    #[test]
    fn the_map_survives_a_restart_and_nodes_keep_their_numbers() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let first = named(&[7001, 7002]);
        let before = {
            let placement = Placement::open(dir.path(), Arc::default()).expect("opens");
            assert_eq!(placement.next_incarnation().expect("counts"), 1);
            let settled = placement.apply_nodes(&first, |_| {}).expect("places");
            assert!(settled.changed && settled.joined.is_empty() && settled.removed.is_empty());
            let refused = Placement::open(dir.path(), Arc::default()).map(|_| ()).expect_err("locked").to_string();
            assert!(refused.contains("in use"), "{refused}");
            settled.topology
        };

        let second = named(&[7003, 7002, 7001]);
        let placement = Placement::open(dir.path(), Arc::default()).expect("opens again");
        assert_eq!(placement.next_incarnation().expect("counts"), 2);
        let settled = placement.apply_nodes(&second, |_| {}).expect("places");
        assert_eq!(settled.joined, ["127.0.0.1:7003"]);
        assert_eq!(settled.topology.epoch(), before.epoch() + 1);
        assert_eq!(settled.topology.ranges().collect::<Vec<_>>(), before.ranges().collect::<Vec<_>>(), "nothing moved");

        let access = access(&settled.topology, &addresses(&second));
        for (number, port) in [(0, 7001), (1, 7002), (2, 7003)] {
            assert_eq!(access[&NodeId(number)].address.map(|a| a.port()), Some(port));
        }

        let error = placement.apply_nodes(&named(&[7003]), |_| {}).expect_err("owners are missing").to_string();
        assert!(error.contains("127.0.0.1:7001") && error.contains("slots"), "{error}");
        let settled = placement.apply_nodes(&first, |_| {}).expect("the node without slots may go");
        assert_eq!(settled.removed, [(NodeId(2), "127.0.0.1:7003".to_owned())]);
        let unchanged = placement.apply_nodes(&first, |_| {}).expect("places");
        assert!(!unchanged.changed && Arc::ptr_eq(&unchanged.topology, &settled.topology));
    }

    #[test]
    fn list_of_servers_is_used_after_its_new_slots_are_recorded() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let names = named(&[7001, 7002, 7003, 7004]);
        let servers = |count| names[..count].iter().map(|name| Server { name: name.clone(), weight: 1 });
        let scheme = Scheme { distribution: Distribution::Modula, ..Scheme::default() };
        let first = Continuum::new(scheme, servers(2)).expect("a continuum");
        let placement = Placement::open(dir.path(), Arc::default()).expect("opens");
        placement.begin(Topology::on_continuum(Arc::new(first)), false).expect("stored");
        let before = placement.apply_nodes(&names, |_| {}).expect("places").topology;
        let list: Vec<Server> = servers(4).collect();
        let refused = placement.lay_over(&list, |_| Err("no space".to_owned())).map(|_| ()).expect_err("refused");
        assert!(refused.to_string().contains("no space"), "{refused}");
        assert!(placement.topology().is_some_and(|now| Arc::ptr_eq(&now, &before)), "the map stays");
        // This continuum equals a new one of the same list, so it does not show that slots were split.
        let mut parts = Vec::new();
        let record = |new: &[(Slot, Slot)]| {
            parts.extend(new.iter().map(|(new, old)| (new.number(), old.number())));
            Ok(())
        };
        let (next, _) = placement.lay_over(&list, record).expect("used");
        assert_eq!(
            next.placement().continuum().map(|now| &**now),
            Some(&Continuum::new(scheme, list).expect("a continuum"))
        );
        assert_eq!(parts, [(2, 0), (3, 1)]);
    }

    #[test]
    fn moves_are_published_at_once_and_stored_after_arrival() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let nodes = named(&[7001, 7002]);
        let placement = Placement::open(dir.path(), Arc::default()).expect("opens");
        let before = placement.apply_nodes(&nodes, |_| {}).expect("places").topology;
        let slots: Vec<Slot> = (0..10).filter_map(Slot::new).collect();
        let (id, source, target) = (MoveId(1), NodeId(0), NodeId(1));
        placement.retain_nodes(id, [source, target]);
        let transit = Transit { move_id: id, source, target, stage: Stage::Moving { leg: 0 }, keys_only: false };
        let epoch = placement.set_transits(id, vec![(transit, slots.clone())]).expect("few");
        assert_eq!(epoch, before.epoch() + 1);
        assert!(placement.is_in_transit(id));
        let other = Transit { move_id: MoveId(2), ..transit };
        placement.set_transits(MoveId(2), vec![(other, vec![Slot::new(20).expect("a slot")])]).expect("few");
        assert_eq!(placement.topology().expect("a map").transit(slots[3]), Some(&transit), "others' transits stay");
        let stored = || placement.store().load_topology().expect("readable").expect("there");
        assert_eq!(stored().owner(slots[0]), source);
        placement.hand_over(id, &slots, None, target).expect("stored");
        let now = placement.topology().expect("a map");
        assert_eq!((now.owner(slots[0]), now.transit(slots[0])), (target, None));
        assert_eq!(now.transit(Slot::new(20).expect("a slot")), Some(&other));
        assert_eq!(stored().owner(slots[9]), target);
        assert!(!placement.is_in_transit(id));

        // Epochs that were published but not stored count as well: the next start reuses no epoch.
        for _ in 0..EPOCHS_RESERVED + 1 {
            placement.set_transits(MoveId(2), vec![(other, vec![Slot::new(20).expect("a slot")])]).expect("few");
        }
        placement.set_transits(MoveId(2), Vec::new()).expect("none");
        let last = placement.topology().expect("a map").epoch();
        drop(placement);
        let placement = Placement::open(dir.path(), Arc::default()).expect("opens again");
        let again = placement.apply_nodes(&nodes, |_| {}).expect("places").topology;
        assert!(again.epoch() > last, "{} after {last}", again.epoch());
        assert_eq!(again.owner(slots[9]), target);
        placement.hand_over(id, &slots, None, source).expect("stored under a higher epoch");
    }

    #[test]
    fn nodes_of_open_moves_cannot_be_removed() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let nodes = named(&[7001]);
        let placement = Placement::open(dir.path(), Arc::default()).expect("opens");
        placement.apply_nodes(&nodes, |_| {}).expect("places");
        placement.apply_nodes(&named(&[7001, 7002]), |_| {}).expect("joins");
        placement.retain_nodes(MoveId(4), [NodeId(0), NodeId(1)]);
        let error = placement.apply_nodes(&nodes, |_| {}).expect_err("the target of a move").to_string();
        assert!(error.contains("takes part in move 4"), "{error}");
        placement.release_nodes(MoveId(4));
        placement.apply_nodes(&nodes, |_| {}).expect("it may go now");
    }
}
