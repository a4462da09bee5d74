//! A fleet on a continuum: each key belongs to the server where the list of servers places it. A new list overlays the
//! present ring, and the differing slots move.
//!
//! A list comes from an operator's request (a node's drain, or a balance) or from a reloaded file. The file's list is
//! queued here, because moves may be running, and the thread that reloads it must not block: it also adds and removes
//! nodes.
//! nodes.
//! The new ring is published only after recording that keys must follow it. A router killed in between continues after
//! its restart.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use switchyard_policy::balance::Shift;
use switchyard_policy::migration::MoveOptions;
use switchyard_policy::topology::{Continuum, NodeId, Server, Slot, Topology};
use tracing::{info, warn};

use super::{Operator, orders};
use crate::admin::{MoveOptionsRequest, OperationError, PlanReport, conflict};
use crate::members::MemberChange;
use crate::store::{RedbStore, StoreError, load_json, save_json};

/// Store document: whether keys must still follow the current ring.
const PENDING: &str = "ring-is-behind";

/// Retry interval for a list that could not be followed.
const AGAIN: Duration = Duration::from_secs(5);

/// The list of the file, and the pending steps.
#[derive(Debug)]
pub(super) struct ServerList(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// Servers in the file.
    listed: BTreeSet<String>,
    /// Nodes no longer in the file. They are removed when they are empty.
    leaving: BTreeSet<String>,
    /// Number of reads of the file, and the last read that was followed.
    read: u64,
    followed: u64,
    /// Whether keys must still follow the current ring.
    is_pending: bool,
    /// Last error, and the time of the next attempt.
    trouble: Option<(String, Instant)>,
}

impl ServerList {
    pub(super) fn load(store: &RedbStore) -> Result<Self, StoreError> {
        Ok(Self(Mutex::new(Inner { is_pending: load_json(store, PENDING)?, ..Inner::default() })))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a node stays only until it is empty.
    pub(super) fn is_leaving(&self, name: &str) -> bool {
        self.inner().leaving.contains(name)
    }

    fn set_behind(&self, store: &RedbStore, is_behind: bool) -> Result<(), OperationError> {
        let mut inner = self.inner();
        if inner.is_pending != is_behind {
            save_json(store, PENDING, &is_behind).map_err(|error| {
                OperationError::Failed(format!("cannot store that keys follow a new list: {error}"))
            })?;
            inner.is_pending = is_behind;
        }
        Ok(())
    }
}

impl Operator {
    /// Stores the servers in a pool's file, and the nodes no longer in it. `follow`: the file was reloaded, so keys
    /// must follow it.
    pub fn tune_list(&self, listed: &[String], leaving: &[String], follow: bool) {
        let mut inner = self.ring.inner();
        inner.listed = listed.iter().cloned().collect();
        inner.leaving = leaving.iter().cloned().collect();
        inner.read += u64::from(follow);
    }

    /// Starts moves so that keys follow the file, and removes empty nodes that are no longer in it. Called
    /// periodically.
    pub(crate) fn follow_list(&self) {
        let (is_due, leaving) = {
            let inner = self.ring.inner();
            if inner.trouble.as_ref().is_some_and(|(_, again)| Instant::now() < *again) {
                return;
            }
            (inner.read > inner.followed || inner.is_pending, inner.leaving.clone())
        };
        let followed = if is_due { self.follow_now() } else { Ok(()) };
        let left = leaving.iter().try_for_each(|name| self.release(name));
        let mut inner = self.ring.inner();
        match followed.and(left) {
            Ok(()) => inner.trouble = None,
            Err(refused) => {
                let (text, again) = (refused.text().to_owned(), Instant::now() + AGAIN);
                if inner.trouble.as_ref().is_none_or(|(known, _)| *known != text) {
                    warn!("keys do not follow the list of servers yet: {text}");
                }
                inner.trouble = Some((text, again));
            }
        }
    }

    fn follow_now(&self) -> Result<(), OperationError> {
        let how = self.moves.how(&MoveOptionsRequest::default())?;
        let _one = self.plan();
        let (listed, read) = {
            let inner = self.ring.inner();
            (inner.listed.clone(), inner.read)
        };
        // A pause delays commands.
        let has_ring = self.moves.topology_now()?.placement().continuum().is_some();
        let _pause = has_ring.then(|| self.moves.pause_colocations());
        if let Some(id) = self.moves.open_ids().first().filter(|_| has_ring) {
            return Err(conflict(format!("move {} has not ended (`switchyard moves`)", id.0)));
        }
        // Read last: the result of a move is published before the move is closed.
        let topology = self.moves.topology_now()?;
        let Some(ring) = topology.placement().continuum() else {
            self.ring.inner().followed = read;
            return Ok(());
        };
        // Without a listed server, keys of a removed server would go to too few others.
        if let Some(name) = listed.iter().find(|name| topology.nodes().all(|node| node.name != **name)) {
            return Err(conflict(format!("{name} is listed, and has not joined")));
        }
        let known: BTreeSet<&str> = ring.servers().iter().map(|server| server.name.as_str()).collect();
        let list = self.list_of(&topology, |name| listed.contains(name) || known.contains(name));
        let is_behind = self.ring.inner().is_pending;
        let report = self.apply_list(&topology, list, is_behind, how, false)?;
        self.ring.inner().followed = read;
        if !report.moves.is_empty() {
            info!("keys follow the list of servers: {}", report.notes.join("; "));
        }
        Ok(())
    }

    /// Removes a node that is no longer in the file, if it owns nothing.
    fn release(&self, name: &str) -> Result<(), OperationError> {
        let _one = self.plan();
        // A pause delays commands, so it begins only if the node seems to be unused.
        let _pause = (self.is_unused(name)? == Some(true)).then(|| self.moves.pause_colocations());
        match self.is_unused(name)? {
            Some(false) => return Ok(()),
            // A reload in the meantime may list it again.
            Some(true) if !self.ring.is_leaving(name) => return Ok(()),
            Some(true) => {
                self.list.change(MemberChange::Remove(name.to_owned())).map_err(OperationError::Failed)?;
                self.drained.set(&self.store, name, false).map_err(OperationError::Failed)?;
                info!("node {name} is no longer in the list of servers, has no keys left, and was removed");
            }
            None => {}
        }
        self.ring.inner().leaving.remove(name);
        Ok(())
    }

    /// Whether the node of this name has nothing and takes part in no move; `None` if there is no such node.
    fn is_unused(&self, name: &str) -> Result<Option<bool>, OperationError> {
        let id_in = |topology: &Topology| topology.nodes().find(|node| node.name == name).map(|node| node.id);
        let Some(id) = id_in(&*self.moves.topology_now()?) else { return Ok(None) };
        let is_moving = self.moves.involving(id).is_some();
        // Read last: the result of a move is published before the move is closed.
        let topology = self.moves.topology_now()?;
        Ok(Some(!is_moving && topology.slots_of(id) == 0 && topology.overrides_at(id) == 0))
    }

    /// Moves every node's share to it, by a ring of all nodes that may get keys.
    pub(super) fn share_by_ring(
        &self,
        topology: &Topology,
        how: MoveOptions,
        dry_run: bool,
    ) -> Result<PlanReport, OperationError> {
        self.apply_list(topology, self.list_of(topology, |_| true), true, how, dry_run)
    }

    /// Moves everything away from a node, by the ring without it.
    pub(super) fn drain_by_ring(
        &self,
        topology: &Topology,
        ring: &Continuum,
        name: &str,
        how: MoveOptions,
        dry_run: bool,
    ) -> Result<PlanReport, OperationError> {
        let stays = |other: &str| other != name && ring.servers().iter().any(|server| server.name == other);
        self.apply_list(topology, self.list_of(topology, stays), false, how, dry_run)
    }

    /// Servers of a new ring: the included nodes that may get keys.
    fn list_of(&self, topology: &Topology, includes: impl Fn(&str) -> bool) -> Vec<Server> {
        let weights = self.weights(topology);
        let server = |node: &switchyard_policy::topology::Node| {
            let weight = weights.get(&node.id).copied().filter(|weight| *weight > 0 && includes(&node.name))?;
            Some(Server { name: node.name.clone(), weight })
        };
        topology.nodes().filter_map(server).collect()
    }

    /// Overlays the ring with this list, and orders moves of the differing slots. `all`: also of slots that an operator
    /// has moved elsewhere.
    fn apply_list(
        &self,
        topology: &Topology,
        list: Vec<Server>,
        all: bool,
        how: MoveOptions,
        dry_run: bool,
    ) -> Result<PlanReport, OperationError> {
        let mut sorted = list.clone();
        sorted.sort_unstable();
        let mut present = topology.placement().continuum().map(|ring| ring.servers().to_vec()).unwrap_or_default();
        present.sort_unstable();
        let is_new = sorted != present;
        let (next, changed) = match is_new {
            true => topology
                .with_overlay(list.iter().cloned())
                .map(|over| (over.topology, over.goals.into_iter().map(|(slot, _)| slot).collect())),
            false => Ok((topology.clone(), Vec::new())),
        }
        .map_err(|error| conflict(error.to_string()))?;
        let steps = |next: &Topology, changed: &[Slot]| {
            let mut steps: Vec<_> = next
                .nodes()
                .filter(|node| !in_list(&list, &node.name))
                .flat_map(|node| Self::plan_returns(next, node.id, None, how))
                .collect();
            let shifts = shifts_to_owners(next, |slot, owner| {
                all || changed.binary_search(&slot).is_ok() || !in_list(&list, owner)
            });
            steps.extend(orders(shifts, how));
            steps
        };
        let planned = steps(&next, &changed);
        let moving: BTreeSet<Slot> =
            planned.iter().filter(|order| order.keys.is_none()).flat_map(|order| &order.slots).copied().collect();
        let share =
            next.placement().continuum().map_or(0.0, |ring| ring.share(&moving.into_iter().collect::<Vec<_>>()));
        let note = format!("about {:.1} % of the keys move to another server", share * 100.0);
        if dry_run {
            let plan = self.moves.accept_unless(true, &next, planned)?;
            return Ok(PlanReport { notes: [note].into_iter().chain(plan.notes).collect(), ..plan });
        }
        if is_new && let Err(refused) = self.moves.require_no_ejection() {
            // The ejected server may leave the list and return to it before this list is followed. Its slots are then
            // at other servers, although no list places them there.
            self.ring.set_behind(&self.store, true)?;
            return Err(refused);
        }
        self.moves.check(&next, &planned)?;
        let was_behind = self.ring.inner().is_pending;
        self.ring.set_behind(&self.store, true)?;
        let planned = match is_new {
            true => match self.moves.apply_server_list(&list) {
                Ok((next, changed)) => steps(&next, &changed),
                Err(refused) => {
                    self.ring.set_behind(&self.store, was_behind)?;
                    return Err(refused);
                }
            },
            false => planned,
        };
        let plan = self.moves.accept_checked(planned)?;
        self.ring.set_behind(&self.store, false)?;
        Ok(PlanReport { notes: [note].into_iter().chain(plan.notes).collect(), ..plan })
    }
}

fn in_list(list: &[Server], name: &str) -> bool {
    list.iter().any(|server| server.name == name)
}

/// Returns shifts of slots to the servers where the ring places them. `wanted` selects by slot and name of its owner.
fn shifts_to_owners(topology: &Topology, wanted: impl Fn(Slot, &str) -> bool) -> Vec<Shift> {
    let Some(ring) = topology.placement().continuum() else { return Vec::new() };
    let numbers: BTreeMap<&str, NodeId> = topology.nodes().map(|node| (node.name.as_str(), node.id)).collect();
    let mut by_way: BTreeMap<(NodeId, NodeId), Vec<Slot>> = BTreeMap::new();
    for slot in Slot::all().take(ring.slots()) {
        let (owner, home) = (topology.owner(slot), ring.home(slot).and_then(|home| numbers.get(home.name.as_str())));
        let name = topology.node(owner).map_or("", |node| &node.name);
        if let Some(home) = home.filter(|home| **home != owner && wanted(slot, name)) {
            by_way.entry((owner, *home)).or_default().push(slot);
        }
    }
    by_way.into_iter().map(|((source, target), slots)| Shift { source, target, slots }).collect()
}
