//! Ejects a failed server: other servers get its slots at once, without its keys. Moves bring the slots back.
//!
//! An ejection is no move: a move transfers every key and so needs its source. Here the source does not reply, and a
//! pool configured with `auto_eject_hosts` gives up its keys. While a node is ejected, other moves avoid the node and
//! its slots.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use switchyard_policy::eject::is_misplaced_at;
use switchyard_policy::migration::{Cause, Key, MoveOptions, MoveOrder, is_temporary};
use switchyard_policy::topology::{MoveId, NodeId, Slot, Stage, Topology, Transit};
use switchyard_resp::units::counted;
use switchyard_router::{NodeAccess, Router};
use tracing::info;

use super::Moves;
use super::copies::ProbeConnection;
use crate::admin::{Abandon, AbortRequest, MoveOptionsRequest, OperationError, PlanReport, conflict};

/// `COUNT` of a SCAN.
const PAGE: &[u8] = b"1000";

/// Interval between checks whether all commands sent to the node have ended.
const LOOK: Duration = Duration::from_millis(5);

/// Servers about to get slots of another server, with the connections on which their misplaced keys of these slots were
/// removed.
pub(crate) struct StandIns<'a> {
    /// Map from which the division of the slots was computed.
    planned_by: &'a Topology,
    connections: Vec<ProbeConnection<'a>>,
}

impl StandIns<'_> {
    /// Fails unless each server is still the same process: a restarted one may have loaded the misplaced keys from its
    /// disk.
    fn check_same_processes(&mut self) -> Result<(), String> {
        self.connections.iter_mut().try_for_each(|asked| asked.query(&[b"PING"]).map(drop))
    }
}

impl Moves {
    /// Refuses moves from now on that involve these nodes, or the slots that will return to them.
    pub(crate) fn set_ejected(&self, ejected: BTreeMap<NodeId, Vec<Slot>>) {
        self.state().ejected = ejected;
    }

    /// Fails if one of these moves involves an ejected node.
    pub(super) fn check_not_ejected(&self, orders: &[MoveOrder]) -> Result<(), OperationError> {
        let ejected = self.state().ejected.clone();
        for (node, slots) in ejected {
            let slots: BTreeSet<Slot> = slots.into_iter().collect();
            let concerns = |order: &MoveOrder| {
                order.nodes().contains(&node) || order.slots.iter().any(|slot| slots.contains(slot))
            };
            if orders.iter().any(concerns) {
                return Err(conflict(self.ejected_text(node)));
            }
        }
        Ok(())
    }

    /// Fails if any node is ejected.
    pub(crate) fn require_no_ejection(&self) -> Result<(), OperationError> {
        let first = self.state().ejected.keys().next().copied();
        first.map_or(Ok(()), |node| Err(conflict(self.ejected_text(node))))
    }

    fn ejected_text(&self, node: NodeId) -> String {
        let name = self.name(node);
        format!(
            "{name} is ejected (auto_eject_hosts), and its slots return to it: wait for that, or remove {name} from the list of servers"
        )
    }

    /// Returns the targets of the open moves of a node, and whether one of these moves is in progress.
    pub(crate) fn moves_at(&self, node: NodeId) -> (Vec<NodeId>, bool) {
        let state = self.state();
        let at = state.open.values().filter(|planned| planned.order.nodes().contains(&node));
        (at.map(|planned| planned.order.target).collect(), state.is_involved(node))
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Ends the moves that involve a node, without it. Its keys in transit are lost.
    pub(crate) fn end_without(&self, node: NodeId) -> Result<(), OperationError> {
        let at: Vec<(MoveId, Abandon)> = {
            let state = self.state();
            let at = state.open.iter().filter(|(_, planned)| planned.order.nodes().contains(&node));
            at.map(|(id, planned)| (*id, if planned.order.source == node { Abandon::Source } else { Abandon::Target }))
                .collect()
        };
        // Abort every move, even if another abort fails. Repeat an abort if the mover had not noticed the loss yet.
        let end = |(id, abandon)| {
            self.abort(id, AbortRequest { abandon: Some(abandon), ..AbortRequest::default() }).map(drop)
        };
        at.into_iter().map(end).fold(Ok(()), Result::and)
    }

    /// Prepares nodes to stand in for another.
    pub(crate) fn stand_ins<'a>(
        &self,
        to: &BTreeMap<NodeId, Vec<Slot>>,
        planned_by: &'a Topology,
        access: &'a BTreeMap<NodeId, NodeAccess>,
    ) -> Result<StandIns<'a>, String> {
        let one = |(node, slots): (&NodeId, &Vec<Slot>)| self.stand_in(*node, slots, planned_by, access);
        Ok(StandIns { planned_by, connections: to.iter().map(one).collect::<Result<_, String>>()? })
    }

    /// Prepares a node to stand in for these slots: ends this router's earlier connections there, and removes the
    /// node's keys of these slots.
    ///
    /// Such keys are misplaced, perhaps from an earlier ejection, and must not be read. No client writes them in the
    /// meantime, because their owner does not reply.
    fn stand_in<'a>(
        &self,
        node: NodeId,
        slots: &[Slot],
        planned_by: &Topology,
        access: &'a BTreeMap<NodeId, NodeAccess>,
    ) -> Result<ProbeConnection<'a>, String> {
        let access = access.get(&node).ok_or_else(|| format!("the address of {} is not known", self.name(node)))?;
        let (mut asked, process) = self.connect(access)?;
        // A removal still in flight would delete a key that a client is about to write there.
        for broken in self.running.with(|router| router.broken_connections(node)).unwrap_or_default() {
            asked.kill_connection(&broken, &process)?;
            self.running.with(|router| router.note_confirmed_connection(node, broken));
        }
        let mut remove = || -> Result<usize, String> {
            // A pool's clients cannot select other databases.
            let (database, mut removed, mut cursor) = (self.own_database(), 0, b"0".to_vec());
            asked.select(database)?;
            loop {
                let answer = asked.query(&[b"SCAN", &cursor, b"COUNT", PAGE])?;
                let [next, page] = &answer.items()[..] else {
                    return Err(format!("node {}: a reply to SCAN of unknown form", asked.node.name));
                };
                let keys: Vec<Key> = page.items().iter().map(|key| Key::from(key.bytes())).collect();
                // Use the current map. No move of this node starts before the ejection has ended, so the map stays
                // valid until these keys are removed.
                let topology = self.topology_now().map_err(|refused| refused.text().to_owned())?;
                if topology.placement() != planned_by.placement() {
                    return Err("the list of servers has changed".to_owned());
                }
                let misplaced: Vec<&Key> = keys
                    .iter()
                    .filter(|key| !is_temporary(key) && is_misplaced_at(&topology, node, slots, key))
                    .collect();
                if !misplaced.is_empty() {
                    asked.unlink(database, &misplaced)?;
                    removed += misplaced.len();
                }
                cursor = next.bytes().to_vec();
                if cursor == b"0" {
                    break;
                }
                if self.is_stopping() {
                    return Err("the router is stopping".to_owned());
                }
            }
            Ok(removed)
        };
        match remove() {
            Ok(removed) => {
                if removed > 0 {
                    let name = &access.name;
                    info!(
                        "node {name}: removed {} that another server had ({name} stands in for it)",
                        counted(removed, "misplaced key")
                    );
                }
                Ok(asked)
            }
            Err(why) => {
                // The node may still execute the command. No other node relies on this one before the end of the
                // connection is confirmed.
                self.running.with(|router: &Router| router.note_broken_connection(node, process));
                Err(why)
            }
        }
    }

    /// Transfers the slots of an unresponsive node to others, all at once. Requests for them wait, at most `bound`,
    /// until nothing sent to the node can be answered any more, nor executed at the stand-ins. `keep` makes durable
    /// which slots must return; `forget` undoes that.
    pub(crate) fn eject(
        &self,
        node: NodeId,
        to: &BTreeMap<NodeId, Vec<Slot>>,
        mut stand_ins: StandIns<'_>,
        bound: Duration,
        keep: impl FnOnce() -> Result<(), String>,
        forget: impl FnOnce(),
    ) -> Result<(), String> {
        let id = {
            // No move that involves the node may be recorded in the meantime.
            let _one = self.recording.lock().unwrap_or_else(PoisonError::into_inner);
            if self.involving(node).is_some() {
                return Err("it takes part in a move".to_owned());
            }
            let topology = self.topology_now().map_err(|refused| refused.text().to_owned())?;
            let is_owner = to.values().flatten().all(|slot| topology.owner(*slot) == node);
            if !is_owner || topology.placement() != stand_ins.planned_by.placement() {
                return Err("its slots have changed in the meantime".to_owned());
            }
            self.state().ejected.entry(node).or_default().extend(to.values().flatten());
            self.ledger.next_move()
        };
        let transits = to
            .iter()
            .map(|(target, slots)| {
                let transit = Transit {
                    move_id: id,
                    source: node,
                    target: *target,
                    stage: Stage::Moving { leg: 0 },
                    keys_only: false,
                };
                (transit, slots.clone())
            })
            .collect();
        // Record at the stand-ins that older copies of the state directory have become invalid.
        let seats = self.running.ownerships();
        let told = seats.map(|seats| seats.leg_begins(&self.running, to.keys().copied()));
        let _until_it_is_in_transit = told.transpose()?;
        // Before any worker can send a write to a stand-in: the epoch below is published later.
        let slots: Vec<Slot> = to.values().flatten().copied().collect();
        self.running.with(|router| router.note_slots_ejected(node, &slots, self.ledger.fingerprinter()));
        let epoch = self.placement.set_transits(id, transits)?;
        let is_drained = || {
            let is_confirmed = |router: &Router| to.keys().all(|other| router.has_no_unconfirmed_connections(*other));
            self.running.with(|router| router.drained_lost_node(epoch, node) && is_confirmed(router)).unwrap_or(false)
        };
        let end = Instant::now() + bound;
        let outcome = loop {
            if is_drained() {
                let raised = || seats.map_or(Ok(()), |seats| seats.raise_version());
                self.running.with(|router| router.note_keys_left_behind(node));
                break stand_ins.check_same_processes().and_then(|()| keep()).and_then(|()| {
                    raised().and_then(|()| self.placement.hand_over_to(id, to)).inspect_err(|_| forget())
                });
            }
            if Instant::now() >= end || self.is_stopping() {
                break Err(format!("commands sent to it, or to its stand-ins, have not ended within {bound:?}"));
            }
            std::thread::sleep(LOOK);
        };
        if outcome.is_err() {
            // The node owns the slots as before.
            self.placement.set_transits(id, Vec::new())?;
        }
        outcome
    }

    /// Starts moves that return slots to an ejected node. If the node is still the same process, it keeps the keys that
    /// were not written elsewhere in the meantime ([`switchyard_policy::eject::Elsewhere`]). Otherwise its keys of the
    /// slots are removed first.
    pub(crate) fn bring_back(
        self: &Arc<Self>,
        node: NodeId,
        from: BTreeMap<NodeId, Vec<Slot>>,
    ) -> Result<PlanReport, OperationError> {
        let access = self.running.with(Router::node_access).unwrap_or_default();
        let access = access
            .get(&node)
            .ok_or_else(|| OperationError::Failed(format!("the address of {} is not known", self.name(node))))?;
        // Keys are about to be removed there. The checks of moves detect direct clients, but not ownership records of
        // other routers.
        self.connect(access).map_err(conflict)?;
        let how =
            MoveOptions { purge_target: true, direct_clients: false, ..self.how(&MoveOptionsRequest::default())? };
        let order =
            |(source, slots)| MoveOrder { source, target: node, slots, keys: None, how, cause: Cause::Requested(None) };
        let orders: Vec<MoveOrder> = from.into_iter().map(order).collect();
        let topology = self.topology_now()?;
        self.check_conflicts(&orders)?;
        self.check_nodes_served(&orders)?;
        self.check_nodes(&topology, &orders)?;
        let _one = self.recording.lock().unwrap_or_else(PoisonError::into_inner);
        self.record_orders(orders)
    }
}
