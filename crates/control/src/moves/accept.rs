//! Accepts orders: checks the nodes, records the move, and queues it. Also changes accepted moves.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, mpsc};
use std::time::Duration;

use switchyard_policy::migration::{Goal, Key, MoveOptions, MoveOrder, Protocol, Record};
use switchyard_policy::topology::{
    AdoptionGoal, MOVE_KEY_BYTES_MAX, MOVE_KEYS_MAX, MoveId, NodeId, RuleSet, Server, Slot, Topology,
};
use switchyard_router::{Router, UserRequest};

use super::Moves;
use super::colocate::ColocationEvent;
use super::messages::{DURABILITIES, NO_RESEARCH, parse_keyword};
use super::options::Options;
use super::published;
use super::queue::Planned;
use crate::admin::{
    MoveOptionsRequest, MovesReport, OperationError, PlanReport, PlannedReport, SteerRequest, conflict, invalid,
};
use crate::nodes::check::{RouterIdentity, TIMEOUT, check_node};
use crate::nodes::fit::is_older;
use crate::operator::text_of;

/// Maximum number of keys of a short move.
const SHORT_MOVE_KEYS: usize = 1024;

/// Timeout for the journal to record a move.
const RECORD_BOUND: Duration = Duration::from_secs(10);

/// A change of the placement rules.
#[derive(Debug)]
pub(crate) enum RulesChange {
    /// Begin the adoption of a set.
    Begin(RuleSet),
    /// Change the set that is in force after the adoption.
    Goal(AdoptionGoal),
    /// End the adoption, whose keys are all at their nodes.
    End,
}

/// Returns the protocol of a request, or the configured one.
fn protocol(request: &MoveOptionsRequest, configured: Protocol) -> Result<Protocol, OperationError> {
    let Some(word) = &request.protocol else { return Ok(configured) };
    let (offered, research): (Vec<_>, Vec<_>) =
        Protocol::ALL.into_iter().partition(|(protocol, _)| protocol.is_offered());
    if research.iter().any(|(_, name)| name == word) {
        return Err(invalid(format!("protocol {word} loses keys, and {NO_RESEARCH}")));
    }
    parse_keyword(&offered, word).map_err(|error| invalid(format!("protocol: {error}")))
}

/// Fails if one move cannot have these keys.
pub(crate) fn check_size<'k>(keys: impl ExactSizeIterator<Item = &'k Key>) -> Result<(), OperationError> {
    if keys.len() <= MOVE_KEYS_MAX && keys.map(|key| key.len()).sum::<usize>() <= MOVE_KEY_BYTES_MAX {
        return Ok(());
    }
    Err(conflict(format!(
        "more than {MOVE_KEYS_MAX} keys, or keys with names of more than {} MiB together, cannot be one move: choose a pattern that matches fewer keys, or move whole slots (--slots)",
        MOVE_KEY_BYTES_MAX >> 20
    )))
}

/// Fails if slots would move during an adoption of rules other than by it: passages are made for the owners that slots
/// had when it started.
fn check_adoption(topology: &Topology, orders: &[MoveOrder]) -> Result<(), OperationError> {
    if !topology.is_adopting() {
        return Ok(());
    }
    let goals: BTreeMap<Slot, NodeId> = topology.adoption_moves().into_iter().collect();
    let waits = |order: &MoveOrder| {
        order.keys.is_none() && order.slots.iter().any(|slot| goals.get(slot) != Some(&order.target))
    };
    if orders.iter().any(waits) {
        return Err(conflict(
            "an adoption of placement rules is in progress, and slots move after its end: see `switchyard rules list`",
        ));
    }
    Ok(())
}

impl Moves {
    /// Current map, if moves are possible now.
    pub(crate) fn topology_now(&self) -> Result<Arc<Topology>, OperationError> {
        if self.placement.is_provisional() {
            let why = "this is a first start, and the keys of each node are not known yet: `switchyard status` shows the node that does not reply";
            return Err(OperationError::Unavailable(why.to_owned()));
        }
        let serving = self.running.with(|_| ()).is_some() && !self.stopping.load(Ordering::Acquire);
        let topology = self.placement.topology().filter(|_| serving);
        topology.ok_or_else(|| {
            OperationError::Unavailable("the router is not serving: it is starting or shutting down".to_owned())
        })
    }

    /// Returns the options of a move: the request's, completed from the configuration.
    pub(crate) fn how(&self, request: &MoveOptionsRequest) -> Result<MoveOptions, OperationError> {
        let tuning = self.tuning.read().unwrap_or_else(PoisonError::into_inner);
        fn chosen<T: Copy>(
            what: &str,
            all: &[(T, &str)],
            word: Option<&String>,
            otherwise: T,
        ) -> Result<T, OperationError> {
            word.map_or(Ok(otherwise), |word| parse_keyword(all, word))
                .map_err(|error| invalid(format!("{what}: {error}")))
        }
        let config = tuning.config.how;
        let how = MoveOptions {
            goal: chosen("goal", &Goal::ALL, request.goal.as_ref(), config.goal)?,
            max_rate: request.max_rate.filter(|rate| *rate > 0).or(config.max_rate),
            durability: chosen("durability", &DURABILITIES, request.durability.as_ref(), config.durability)?,
            protocol: protocol(request, config.protocol)?,
            direct_clients: request.allow_direct_clients,
            purge_target: request.purge_target,
            source_ops_max: None,
            paper: None,
        };
        let how = MoveOptions { paper: published::paper(request, &how)?, ..how };
        let max = request.paper.as_ref().and_then(|paper| paper.source_ops_max.as_ref());
        let Some(max) = max else { return Ok(how) };
        published::check_source_ops(&how)?;
        Ok(MoveOptions { source_ops_max: Some(published::source_ops_max(max, None)?), ..how })
    }

    /// Returns the name of the source of a move that has not ended.
    pub(crate) fn source_of(&self, id: MoveId) -> Result<String, OperationError> {
        let state = self.state();
        let source = state.open.get(&id).map(|planned| planned.order.source).ok_or_else(|| state.not_open(id))?;
        drop(state);
        Ok(self.name(source))
    }

    /// Changes a move that has not ended.
    pub(crate) fn steer(&self, id: MoveId, what: &SteerRequest) -> Result<MovesReport, OperationError> {
        let steer = match what {
            SteerRequest::Pause => UserRequest::Pause,
            SteerRequest::Resume => UserRequest::Resume,
            SteerRequest::Abort(request) => return self.abort(id, *request),
            SteerRequest::Goal(word) => {
                UserRequest::Goal(parse_keyword(&Goal::ALL, word).map_err(|error| invalid(format!("goal: {error}")))?)
            }
            SteerRequest::MaxRate(rate) => UserRequest::MaxRate(rate.filter(|rate| *rate > 0)),
            SteerRequest::SourceOpsMax(max) => {
                UserRequest::SourceOpsMax(max.as_ref().map(|max| published::source_ops_max(max, None)).transpose()?)
            }
        };
        let in_order = self.in_order();
        let begun = {
            let mut state = self.state();
            let not_open = state.not_open(id);
            let planned = state.open.get_mut(&id).ok_or(not_open)?;
            if planned.steering.aborting {
                return Err(conflict(format!(
                    "move {} is being aborted and cannot be resumed; start a new move",
                    id.0
                )));
            }
            match steer {
                UserRequest::Pause => planned.steering.paused = true,
                UserRequest::Resume => planned.steering.paused = false,
                UserRequest::Goal(goal) => planned.order.how.goal = goal,
                UserRequest::MaxRate(rate) => planned.order.how.max_rate = rate,
                UserRequest::SourceOpsMax(max) => {
                    published::check_source_ops(&planned.order.how)?;
                    planned.order.how.source_ops_max = max;
                }
                UserRequest::Abort | UserRequest::GiveUp(_) => {}
            }
            planned.begun
        };
        if begun {
            self.running.with(|router| router.steer_move(id, steer));
        }
        self.save_options_in(&in_order);
        drop(in_order);
        self.wake();
        self.colocations.notify(ColocationEvent::Look);
        Ok(self.report())
    }

    fn planned(&self, id: Option<MoveId>, order: &MoveOrder) -> PlannedReport {
        PlannedReport {
            id: id.map(|id| id.0),
            from: self.name(order.source),
            to: self.name(order.target),
            slots: order.slots.len() as u64,
            ranges: text_of(&order.slots),
            keys: order.keys.as_ref().map(|keys| keys.len() as u64),
        }
    }

    /// Accepts moves, or (dry run) only plans them.
    pub(crate) fn accept_unless(
        self: &Arc<Self>,
        dry_run: bool,
        topology: &Topology,
        orders: Vec<MoveOrder>,
    ) -> Result<PlanReport, OperationError> {
        if !dry_run {
            return self.accept(topology, orders);
        }
        self.check_nodes_served(&orders)?;
        let moves = orders.iter().map(|order| self.planned(None, order)).collect();
        Ok(PlanReport { dry_run, moves, notes: self.older_targets(&orders) })
    }

    /// Checks all preconditions and records moves. All orders must have the same options.
    pub(crate) fn accept(
        self: &Arc<Self>,
        topology: &Topology,
        orders: Vec<MoveOrder>,
    ) -> Result<PlanReport, OperationError> {
        self.check(topology, &orders)?;
        self.accept_checked(orders)
    }

    /// Checks all preconditions.
    pub(crate) fn check(&self, topology: &Topology, orders: &[MoveOrder]) -> Result<(), OperationError> {
        check_adoption(topology, orders)?;
        self.check_not_ejected(orders)?;
        self.check_conflicts(orders)?;
        self.check_nodes_served(orders)?;
        self.check_nodes(topology, orders)
    }

    /// Computes the continuum of a new list of servers and publishes the new map. Returns the map, and the slots that
    /// change servers.
    pub(crate) fn apply_server_list(&self, list: &[Server]) -> Result<(Arc<Topology>, Vec<Slot>), OperationError> {
        let _pause = self.pause_colocations();
        // No move may be recorded in the meantime, because its slots would be slots of the old map.
        let _one = self.recording.lock().unwrap_or_else(PoisonError::into_inner);
        self.require_no_ejection()?;
        if let Some(id) = self.open_ids().first() {
            return Err(conflict(format!("move {} is in progress: the list of servers waits for it", id.0)));
        }
        self.placement
            .lay_over(list, |parts| self.ledger.split(parts))
            .map_err(|error| OperationError::Failed(format!("{error:#}")))
    }

    /// Changes the placement rules and publishes the new map. Moves no key.
    pub(crate) fn change_rules(&self, change: RulesChange) -> Result<Arc<Topology>, OperationError> {
        let _pause = self.pause_colocations();
        // As for a list of servers, slots of a recorded move keep their meaning.
        let _one = self.recording.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(id) = self.open_ids().first() {
            return Err(conflict(format!("move {} is in progress: rules change between moves", id.0)));
        }
        let topology = self.topology_now()?;
        let is_member = |node: &NodeId| topology.node(*node).is_some();
        let left: Vec<String> =
            self.ledger.copies().into_keys().filter(is_member).map(|node| self.name(node)).collect();
        if !left.is_empty() {
            return Err(conflict(format!(
                "copies that earlier moves left at {} are being removed: rules change afterwards",
                left.join(", ")
            )));
        }
        self.placement
            .change_rules(
                |topology| match change {
                    RulesChange::Begin(rules) => topology.with_adoption(rules),
                    RulesChange::Goal(goal) => topology.with_adoption_goal(goal),
                    RulesChange::End => topology.with_adoption_ended(),
                },
                |unused| self.ledger.forget_slots(unused),
            )
            .map_err(|error| OperationError::Failed(format!("{error:#}")))
    }

    /// Fails if a node of a move is held because it returned without its data: keys moved there would be lost when its
    /// data is restored, and its missing keys would count as deleted.
    pub(super) fn check_nodes_served(&self, orders: &[MoveOrder]) -> Result<(), OperationError> {
        let held = self.running.with(switchyard_router::Router::held_nodes).unwrap_or_default();
        match orders.iter().flat_map(MoveOrder::nodes).find_map(|node| Some((node, held.get(&node)?))) {
            None => Ok(()),
            Some((node, why)) => Err(conflict(format!("no move to or from {} can start now: {why}", self.name(node)))),
        }
    }

    /// Warns about targets older than their source, because they may not be able to read the source's keys.
    fn older_targets(&self, orders: &[MoveOrder]) -> Vec<String> {
        let nodes = self.running.with(|router| router.status().nodes).unwrap_or_default();
        let version = |id: NodeId| nodes.iter().find(|node| node.id == id)?.version.as_deref();
        let pairs: BTreeSet<(NodeId, NodeId)> = orders.iter().map(|order| (order.source, order.target)).collect();
        let note = |(source, target): (NodeId, NodeId)| {
            let (from, to) = (version(source)?, version(target)?);
            is_older(to, from).then(|| {
                format!(
                    "{} is {to}, older than {} ({from}): it may refuse keys from there. If it does, the move stops with the reason",
                    self.name(target),
                    self.name(source)
                )
            })
        };
        pairs.into_iter().filter_map(note).collect()
    }

    /// Fails if another move has these slots, or the journal accepts no records.
    pub(super) fn check_conflicts(&self, orders: &[MoveOrder]) -> Result<(), OperationError> {
        {
            let state = self.state();
            for (id, planned) in &state.open {
                let taken: BTreeSet<Slot> = planned.order.slots.iter().copied().collect();
                if let Some(slot) = orders.iter().flat_map(|order| &order.slots).find(|slot| taken.contains(slot)) {
                    return Err(conflict(format!(
                        "slot {} is part of move {}, which is in progress; see `switchyard moves`",
                        slot.number(),
                        id.0
                    )));
                }
            }
        }
        let error = self.ledger.status().write_error;
        if let Some(error) = error {
            return Err(OperationError::Failed(error));
        }
        Ok(())
    }

    /// Records moves whose nodes have just been checked, unless the state they were planned on has changed.
    pub(crate) fn accept_checked(self: &Arc<Self>, orders: Vec<MoveOrder>) -> Result<PlanReport, OperationError> {
        let _one = self.recording.lock().unwrap_or_else(PoisonError::into_inner);
        self.check_not_ejected(&orders)?;
        self.record_orders(orders)
    }

    /// Records moves, while the caller holds `recording`.
    pub(super) fn record_orders(self: &Arc<Self>, orders: Vec<MoveOrder>) -> Result<PlanReport, OperationError> {
        let topology = self.topology_now()?;
        check_adoption(&topology, &orders)?;
        self.check_conflicts(&orders)?;
        orders.iter().filter_map(|order| order.keys.as_ref()).try_for_each(|keys| check_size(keys.iter()))?;
        if let Some(order) = orders.iter().find(|order| !order.is_at_source(&topology)) {
            let source = self.name(order.source);
            return Err(conflict(format!(
                "some of these slots or keys have left {source} by another move in the meantime; retry"
            )));
        }
        let is_of_this_map = |order: &MoveOrder| {
            order.keys.as_ref().is_none_or(|keys| order.slots == MoveOrder::slots_of(topology.placement(), keys))
        };
        if !orders.iter().all(is_of_this_map) {
            return Err(conflict(
                "the placement of keys has changed in the meantime, and keys have other slots; retry",
            ));
        }
        let moves: BTreeMap<MoveId, Planned> =
            orders.into_iter().map(|order| (self.ledger.next_move(), Planned::new(order))).collect();
        let reports = moves.iter().map(|(id, planned)| self.planned(Some(*id), &planned.order)).collect();
        let orders: Vec<MoveOrder> = moves.values().map(|planned| planned.order.clone()).collect();
        let notes = self.older_targets(&orders);
        self.queue_moves(moves).map_err(OperationError::Failed)?;
        Ok(PlanReport { dry_run: false, moves: reports, notes })
    }

    /// Records moves and queues them.
    pub(super) fn queue_moves(self: &Arc<Self>, moves: BTreeMap<MoveId, Planned>) -> Result<(), String> {
        // Options first: a recorded move without options would continue with other ones after a crash. A short move for
        // waiting clients needs none ([`Options::of_short_move`]).
        let is_long = |planned: &Planned| planned.order.needed_keys().is_none_or(|keys| keys.len() > SHORT_MOVE_KEYS);
        if moves.values().any(is_long) {
            self.beside().extend(moves.iter().map(|(id, planned)| (*id, Options::of(planned))));
            self.try_save_options().inspect_err(|_| self.beside().retain(|id, _| !moves.contains_key(id)))?;
        }
        for (id, planned) in &moves {
            self.placement.retain_nodes(*id, planned.order.nodes());
        }
        let records = moves.iter().flat_map(|(id, planned)| planned.order.records(*id)).collect();
        if let Err(why) = self.record_with_timeout(records, moves.keys().copied().collect()) {
            for id in moves.keys() {
                self.placement.release_nodes(*id);
            }
            return Err(why);
        }
        {
            let mut state = self.state();
            self.beside().retain(|id, _| !moves.contains_key(id));
            state.open.extend(moves);
        }
        self.wake();
        self.colocations.notify(ColocationEvent::Look);
        Ok(())
    }

    /// Records moves with a timeout. A record that becomes durable after the timeout is ended at once, because the
    /// client has received an error.
    fn record_with_timeout(self: &Arc<Self>, records: Vec<Record>, ids: Vec<MoveId>) -> Result<(), String> {
        let (told, outcome) = mpsc::sync_channel(1);
        let waits = Arc::new(AtomicBool::new(true));
        let (moves, still) = (Arc::clone(self), Arc::clone(&waits));
        let done = move |outcome: Result<(), String>| {
            let is_late = !still.swap(false, Ordering::AcqRel);
            match &outcome {
                Ok(()) if is_late => ids.into_iter().for_each(|id| moves.record_end(id)),
                Ok(()) => {}
                Err(_) => moves.beside().retain(|id, _| !ids.contains(id)),
            }
            drop(told.send(outcome));
        };
        self.ledger.record(records, Box::new(done));
        match outcome.recv_timeout(RECORD_BOUND) {
            Ok(outcome) => outcome,
            Err(_) if waits.swap(false, Ordering::AcqRel) => {
                let error = self.ledger.status().write_error;
                Err(error.map_or_else(
                    || "the journal of moves does not answer".to_owned(),
                    |t| t + "; this move was not started",
                ))
            }
            // The record completed at the last moment.
            Err(_) => outcome.recv().unwrap_or_else(|error| Err(error.to_string())),
        }
    }

    pub(super) fn check_nodes(&self, topology: &Topology, orders: &[MoveOrder]) -> Result<(), OperationError> {
        let Some(how) = orders.first().map(|order| &order.how) else { return Ok(()) };
        let targets: BTreeSet<NodeId> = orders.iter().map(|order| order.target).collect();
        let nodes: BTreeSet<NodeId> = orders.iter().flat_map(MoveOrder::nodes).collect();
        debug_assert!(nodes.iter().all(|id| topology.node(*id).is_some()));
        let mut met: BTreeMap<String, NodeId> = BTreeMap::new();
        for id in nodes {
            let run_id = self.check_move_node(id, targets.contains(&id), how)?;
            // If both are one server, the target's existing keys would be the source's own.
            if !run_id.is_empty()
                && let Some(other) = met.insert(run_id, id)
            {
                return Err(conflict(format!(
                    "{} and {} are one server under two names, so nothing can move between them; remove one of them from the configuration",
                    self.name(other),
                    self.name(id)
                )));
            }
        }
        Ok(())
    }

    /// Checks whether keys may move to or from a node, and returns its `run_id`. Blocks until the node replies.
    pub(super) fn check_move_node(
        &self,
        id: NodeId,
        is_target: bool,
        how: &MoveOptions,
    ) -> Result<String, OperationError> {
        let access = self.running.with(Router::node_access).unwrap_or_default();
        let Some(access) = access.get(&id) else {
            return Err(OperationError::Failed(format!("the address of {} is not known", self.name(id))));
        };
        check_node(access, self.timeout(), is_target.then_some(how.durability), how.direct_clients, &self.own())
            .map_err(conflict)
    }

    /// Timeout for a node's reply.
    pub fn timeout(&self) -> Duration {
        self.tuning.read().unwrap_or_else(PoisonError::into_inner).timeout.max(TIMEOUT)
    }

    /// Names of this router's connections.
    pub(crate) fn own(&self) -> RouterIdentity {
        let run = self.running.with(|router| router.run_id().to_owned()).unwrap_or_default();
        RouterIdentity { site: self.site(), run }
    }
}
