//! Nodes that join, are drained and leave.

use std::time::Duration;

use switchyard_policy::balance;
use switchyard_policy::migration::MoveOptions;
use switchyard_policy::topology::{MoveId, NodeId, Topology};
use switchyard_resp::units::{counted, describe_size};
use switchyard_router::{Link, NodeAccess, Router};
use tracing::{error, warn};

use super::{Operator, node_named, orders};
use crate::admin::{AddNodeRequest, NodeRequest, OperationError, PlanReport, conflict, invalid};
use crate::members::{FleetFacts, MemberChange, align_settings};
use crate::nodes::check::check_node;
use crate::nodes::parse_endpoint;

impl Operator {
    pub(super) fn drain_node(&self, request: &NodeRequest) -> Result<PlanReport, OperationError> {
        let how = self.moves.how(&request.how)?;
        let _one = self.plan();
        let node = node_named(&*self.moves.topology_now()?, &request.address)?;
        let (_pause, topology) = self.check_no_open_moves("a node is drained")?;
        // Regardless of the result of the moves, the node gets no slots until an operator undrains it.
        let mut weights = self.weights(&topology);
        weights.insert(node, 0);
        let shifts = balance::drain(&topology, node, &weights).map_err(|error| self.no_weight(&error))?;
        if (!shifts.is_empty() || topology.overrides_at(node) > 0)
            && let Some(way) = self.unreachable_remedy(node)
        {
            return Err(conflict(way));
        }
        let name = self.moves.name(node);
        let accept = |dry_run| {
            if let Some(ring) = topology.placement().continuum() {
                return self.drain_by_ring(&topology, ring, &name, how, dry_run);
            }
            // Placement overrides leave the node, too.
            let mut moves = Self::plan_returns(&topology, node, None, how);
            moves.extend(orders(shifts, how));
            self.moves.accept_unless(dry_run, &topology, moves)
        };
        if request.dry_run {
            let room = self.missing_room(&topology, node);
            return accept(true).map(|plan| PlanReport { notes: plan.notes.into_iter().chain(room).collect(), ..plan });
        }
        let was = self.drained.has(&name);
        self.drained.set(&self.store, &name, true).map_err(OperationError::Failed)?;
        let accepted = accept(false);
        if accepted.is_err() && !was {
            self.drained.set(&self.store, &name, false).map_err(OperationError::Failed)?;
        }
        accepted
    }

    /// Memory that the other nodes lack for this node's keys. A tenth of their `maxmemory` stays free, as in every
    /// plan.
    fn missing_room(&self, topology: &Topology, node: NodeId) -> Option<String> {
        let load = self.observed(topology, 0);
        let used = load.nodes.get(&node)?.memory?;
        let takers = topology.nodes().filter(|other| other.id != node && !self.drained.has(&other.name));
        // A node without a limit, or of unknown use, has room.
        let room = takers.map(|other| {
            let server = load.nodes.get(&other.id)?;
            let most = server.memory_max.filter(|most| *most > 0)?;
            Some((most - most / 10).saturating_sub(server.memory?))
        });
        let room = room.sum::<Option<u64>>()?;
        (used > room).then(|| {
            format!(
                "room is missing: {} uses {} of memory, and the others have room for {} (a tenth of their maxmemory stays free). Raise their maxmemory, or add a node",
                self.moves.name(node),
                describe_size(used),
                describe_size(room)
            )
        })
    }

    /// Refuses moves to a drained node, which would be a mistake.
    pub(super) fn check_not_drained(&self, target: NodeId) -> Result<(), OperationError> {
        let name = self.moves.name(target);
        if self.drained.has(&name) {
            return Err(conflict(format!(
                "{name} is drained, so nothing moves to it; first: switchyard nodes undrain {name}"
            )));
        }
        Ok(())
    }

    /// Remedy for an unreachable node with data, which cannot be moved away.
    pub(super) fn unreachable_remedy(&self, node: NodeId) -> Option<String> {
        let status = self.running.with(Router::status)?;
        let node = status.nodes.into_iter().find(|status| status.id == node)?;
        let Link::Down(why) = node.link else { return None };
        Some(format!(
            "{0} cannot be used now ({why}), so nothing can be moved away from it. Drain it when it can. If it is permanently lost, put a server in its \
             place, with a backup or empty: at {0} itself; or elsewhere, listed under `replicas` of this node in the configuration, then a reload (SIGHUP) and \
             `switchyard nodes accept {0}`. After that it can be drained and removed (docs/dead-server.md)",
            node.name
        ))
    }

    /// Lets a drained node receive slots again.
    pub(super) fn undrain_node(&self, request: &NodeRequest) -> Result<PlanReport, OperationError> {
        let _one = self.plan();
        let topology = self.moves.topology_now()?;
        let node = node_named(&topology, &request.address)?;
        let name = self.moves.name(node);
        if !self.drained.has(&name) {
            return Err(conflict(format!(
                "{name} is not drained; nodes get slots by `switchyard balance` and `switchyard move`"
            )));
        }
        self.drained.set(&self.store, &name, false).map_err(OperationError::Failed)?;
        let goes_on =
            |id: MoveId| format!("move {0} continues and empties it; `switchyard moves abort {0}` ends that", id.0);
        Ok(PlanReport { notes: self.moves.leaving(node).into_iter().map(goes_on).collect(), ..PlanReport::default() })
    }

    /// Moves every node's share of the slots to it, or (dry run) returns the moves.
    pub(super) fn share(
        &self,
        topology: &Topology,
        how: MoveOptions,
        dry_run: bool,
    ) -> Result<PlanReport, OperationError> {
        if !topology.placement().is_crc16() {
            return self.share_by_ring(topology, how, dry_run);
        }
        let shifts = balance::even(topology, &self.weights(topology)).map_err(|error| self.no_weight(&error))?;
        self.moves.accept_unless(dry_run, topology, orders(shifts, how))
    }

    fn no_weight(&self, error: &balance::BalanceError) -> OperationError {
        let drained = self.drained.all();
        conflict(match drained.is_empty() {
            true => error.to_string(),
            false => format!(
                "{error}, or allow one to get slots again with `switchyard nodes undrain` (drained: {})",
                drained.join(", ")
            ),
        })
    }

    pub(super) fn remove_node(&self, request: &NodeRequest) -> Result<PlanReport, OperationError> {
        let _one = self.plan();
        let node = node_named(&*self.moves.topology_now()?, &request.address)?;
        let _pause = self.moves.pause_colocations();
        if let Some(id) = self.moves.involving(node) {
            return Err(conflict(format!(
                "{} takes part in move {1}; wait for its end, or end it with `switchyard moves abort {1}`",
                request.address, id.0
            )));
        }
        // Read last: the result of a move is published before the move is closed.
        let topology = self.moves.topology_now()?;
        let (slots, overrides) = (topology.slots_of(node), topology.overrides_at(node));
        if (slots > 0 || overrides > 0)
            && let Some(way) = self.unreachable_remedy(node)
        {
            return Err(conflict(way));
        }
        if slots > 0 {
            return Err(conflict(format!(
                "{0} still owns {1}; first: switchyard nodes drain {0}",
                request.address,
                counted(slots, "slot")
            )));
        }
        if overrides > 0 {
            return Err(conflict(format!(
                "{1} {2} moved to {0} without the slots; first: switchyard nodes drain {0}",
                request.address,
                counted(overrides, "key"),
                if overrides == 1 { "was" } else { "were" }
            )));
        }
        if topology.nodes().len() == 1 {
            return Err(conflict("it is the only node"));
        }
        let name = self.moves.name(node);
        self.list.change(MemberChange::Remove(name.clone())).map_err(OperationError::Failed)?;
        self.drained.set(&self.store, &name, false).map_err(OperationError::Failed)?;
        Ok(PlanReport::default())
    }

    /// Adds a server as a node, with its share of the slots if requested. On an error nothing has changed.
    pub(super) fn add_node(&self, request: &AddNodeRequest) -> Result<PlanReport, OperationError> {
        let how = self.moves.how(&request.how)?;
        let _one = self.plan();
        let topology = self.moves.topology_now()?;
        let name = parse_endpoint(&request.address).map_err(|why| invalid(format!("{:?}: {why}", request.address)))?;
        if topology.nodes().any(|node| node.name == name) {
            if !request.rebalance {
                return Err(conflict(format!(
                    "{name} is a node already; `switchyard balance` gives it its share of the slots"
                )));
            }
            let _pause = self.check_no_open_moves("it gets its share of the slots")?;
            // An operator who names a drained node here intends it to get slots again.
            let was_drained = self.drained.has(&name);
            self.drained.set(&self.store, &name, false).map_err(OperationError::Failed)?;
            let given = self.start_share_moves(how);
            if given.is_err() && was_drained {
                self.drained.set(&self.store, &name, true).map_err(OperationError::Failed)?;
            }
            return given;
        }
        let before = "a node joins and gets its share of the slots";
        if request.rebalance {
            drop(self.check_no_open_moves(before)?);
        }
        let notes = self.check_newcomer(&topology, &name, request, how)?;
        self.list.change(MemberChange::Add(name.clone())).map_err(OperationError::Failed)?;
        let settled = self.wait_for_link(&name).and_then(|()| {
            // Adjust settings before the node gets slots.
            let settings = self.make_alike(&name);
            if !request.rebalance {
                return Ok((settings, PlanReport::default()));
            }
            // Not earlier, because no keys are brought together during the pause.
            let _pause = self.check_no_open_moves(before)?;
            Ok((settings, self.start_share_moves(how)?))
        });
        match settled {
            Ok((settings, plan)) => {
                Ok(PlanReport { notes: notes.into_iter().chain(settings).chain(plan.notes).collect(), ..plan })
            }
            Err(refused) => Err(self.revert_join(&name, refused)),
        }
    }

    pub(super) fn start_share_moves(&self, how: MoveOptions) -> Result<PlanReport, OperationError> {
        let topology = self.moves.topology_now()?;
        self.share(&topology, how, false)
    }

    /// Checks a server before it joins. `how`: options of the moves, if it gets slots at once.
    fn check_newcomer(
        &self,
        topology: &Topology,
        name: &str,
        request: &AddNodeRequest,
        how: MoveOptions,
    ) -> Result<Vec<String>, OperationError> {
        let place = self.list.find(name).map_err(conflict)?;
        let timeout = self.moves.timeout();
        let fleet = FleetFacts::of(&self.running, topology, self.moves.site(), timeout);
        let fleet = fleet.ok_or_else(|| OperationError::Unavailable("the router is stopping".to_owned()))?;
        let (access, _, mut notes) = fleet.check_server(&place, timeout).map_err(conflict)?;
        if request.rebalance {
            check_node(&access, timeout, Some(how.durability), how.direct_clients, &self.moves.own())
                .map_err(conflict)?;
        }
        match fleet.limits() {
            None => {}
            Some(limits) if request.allow_limits => notes.push(format!("from now on these meet limits: {limits}")),
            Some(limits) => {
                return Err(conflict(format!(
                    "since the router started, clients have used commands that one node serves and two do not: {limits}. docs/commands.md shows what to do \
                     instead; --allow-limits adds the node anyway{}",
                    self.proposal_text(topology)
                )));
            }
        }
        Ok(notes)
    }

    /// Compares the settings of a node that has just joined with the others, and sets some of them. Returns and logs
    /// notes for the operator.
    fn make_alike(&self, name: &str) -> Vec<String> {
        let known = self.running.with(|router| (router.node_access(), router.config_set()));
        let Some((access, config_set)) = known else { return Vec::new() };
        let (new, others): (Vec<NodeAccess>, Vec<NodeAccess>) =
            access.into_values().partition(|access| access.name == name);
        let notes: Vec<String> =
            new.iter().flat_map(|server| align_settings(server, &others, &config_set, self.moves.timeout())).collect();
        notes.iter().for_each(|note| warn!("node {note}"));
        notes
    }

    /// Waits up to 5 s until a new node is connected. Returns the connection error otherwise.
    fn wait_for_link(&self, name: &str) -> Result<(), OperationError> {
        let mut why = "does not answer the router's workers yet".to_owned();
        for _ in 0..100 {
            let link = self
                .running
                .with(|router| router.status().nodes.into_iter().find(|node| node.name == name).map(|node| node.link));
            match link.flatten() {
                Some(Link::Up) => return Ok(()),
                Some(Link::Down(reason)) => why = format!("cannot be used: {reason}"),
                _ => {}
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Err(OperationError::Failed(format!("{name} {why}")))
    }

    /// Removes a node again, because a step after its addition failed. It owns nothing.
    fn revert_join(&self, name: &str, refused: OperationError) -> OperationError {
        let outcome = match self.list.change(MemberChange::Remove(name.to_owned())) {
            Ok(()) => format!("{name} was not added"),
            Err(why) => {
                error!("node {name} was added, and cannot be removed again: {why}");
                format!(
                    "{name} was added, and cannot be removed again ({why}): when that is fixed, switchyard nodes remove {name}"
                )
            }
        };
        refused.map(|text| format!("{text}; {outcome}"))
    }
}
