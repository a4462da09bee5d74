//! Operations on a fleet: validates a request, refuses it with a remedy, or orders it.
//!
//! Command line, admin API and RESP all end here. [`Moves`] executes the orders.

mod autoscale;
mod commands;
mod hot_copies;
mod hot_keys;
mod keys;
mod load;
mod map;
mod misplaced;
mod nodes;
mod planner;
mod resp;
mod ring;
mod rules;
mod unused;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use serde::Serialize;
use serde_json::Value;
use switchyard_policy::balance::Shift;
use switchyard_policy::migration::{Cause, MoveOptions, MoveOrder};
use switchyard_policy::topology::{MoveId, NodeId, Slot, Topology};
use switchyard_resp::units::counted;
use tracing::info;

use crate::admin::{
    Abandon, AutoscaleRequest, BalanceRequest, HotCopiesOrder, MoveRequest, NodeRequest, Operation, OperationError,
    PlanReport, PlanRequest, RulesOrder, SteerRequest, conflict, invalid,
};
use crate::autoscale::Autoscaler;
use crate::members::{Drained, NodeList};
use crate::moves::{ColocationPause, Moves, source_ops_max};
use crate::nodes::{NodeAddress, parse_endpoint};
use crate::planner::Planner;
use crate::running::Running;
use crate::store::RedbStore;

pub use commands::CommandThread;
pub(crate) use hot_keys::hot_keys_report;
pub(crate) use load::{load_report, observed};
use map::ranges_text;
pub(crate) use map::{location_report, slots_report, text_of};
pub use resp::listen;
use ring::ServerList;
use rules::RuleAdoption;
use unused::UnusedKeys;

fn json(value: &impl Serialize) -> Result<Value, OperationError> {
    serde_json::to_value(value).map_err(|error| OperationError::Failed(error.to_string()))
}

/// Performs operations on one fleet.
#[derive(Debug)]
pub struct Operator {
    moves: Arc<Moves>,
    running: Arc<Running>,
    store: Arc<RedbStore>,
    list: Arc<dyn NodeList>,
    drained: Arc<Drained>,
    ring: ServerList,
    rules: RuleAdoption,
    unused: UnusedKeys,
    /// Names of the configured nodes.
    listed: RwLock<BTreeSet<String>>,
    /// Weights by node name.
    weights: RwLock<BTreeMap<String, u32>>,
    /// Configured capacities in requests per second, by node name.
    capacities: RwLock<BTreeMap<String, u64>>,
    planner: Planner,
    autoscaler: Autoscaler,
    /// Serializes planning of operations.
    planning: Mutex<()>,
}

impl Operator {
    /// Opens the operator of a fleet. `directory` is its state directory; `list` changes its list of nodes.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn open(
        directory: &Path,
        moves: Arc<Moves>,
        running: Arc<Running>,
        store: Arc<RedbStore>,
        list: Arc<dyn NodeList>,
    ) -> anyhow::Result<Arc<Self>> {
        let drained = Arc::clone(moves.drained());
        let ring = ServerList::load(&store)?;
        let rules = RuleAdoption::load(&store)?;
        let planner = Planner::open(Arc::clone(&store))?;
        let autoscaler = Autoscaler::open(Arc::clone(&store), directory.to_owned())?;
        let (unused, listed, weights, capacities, planning) = <_>::default();
        Ok(Arc::new(Self {
            moves,
            running,
            store,
            list,
            drained,
            ring,
            rules,
            unused,
            listed,
            weights,
            capacities,
            planner,
            autoscaler,
            planning,
        }))
    }

    /// Applies the present configuration of the nodes.
    pub fn tune(&self, nodes: &[NodeAddress]) {
        let weights = nodes.iter().map(|node| (node.name.clone(), node.weight)).collect();
        *self.weights.write().unwrap_or_else(PoisonError::into_inner) = weights;
        let capacities = nodes.iter().filter_map(|node| Some((node.name.clone(), node.capacity?))).collect();
        *self.capacities.write().unwrap_or_else(PoisonError::into_inner) = capacities;
    }

    fn plan(&self) -> MutexGuard<'_, ()> {
        self.planning.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Performs an operation, and writes it to the audit log.
    pub(crate) fn operate(&self, operation: Operation, who: &str) -> Result<Value, OperationError> {
        let only_looks = matches!(
            operation,
            Operation::Moves
                | Operation::Slots
                | Operation::Misplaced
                | Operation::Where(_)
                | Operation::Colocation { .. }
                | Operation::HotKeys { .. }
                | Operation::Load
                | Operation::HotCopies
                | Operation::Plan(PlanRequest { apply: false, .. })
                | Operation::PlanHistory { .. }
                | Operation::Replay { .. }
                | Operation::Automation
                | Operation::Autoscale
                | Operation::Rules
                | Operation::CheckRules(_)
                | Operation::LearnRules { .. }
                | Operation::SteerRules(RulesOrder::Adopt { dry_run: true, .. })
                | Operation::Balance(BalanceRequest { dry_run: true, .. })
                | Operation::DrainNode(NodeRequest { dry_run: true, .. })
        );
        let told = describe(&operation);
        let outcome = self.execute(operation, who);
        match &outcome {
            Err(refused) => info!(target: "audit", who, "refused: {told}: {}", refused.text()),
            Ok(_) if only_looks => {}
            Ok(_) => info!(target: "audit", who, "asked: {told}"),
        }
        outcome
    }

    fn execute(&self, operation: Operation, who: &str) -> Result<Value, OperationError> {
        let plan = match operation {
            Operation::Moves => return json(&self.moves.report()),
            Operation::Slots => return json(&slots_report(&*self.moves.topology_now()?)),
            Operation::Misplaced => return json(&self.misplaced()?),
            Operation::Where(keys) => return json(&location_report(&*self.moves.topology_now()?, &keys)),
            Operation::Colocation { named } => return json(&self.moves.colocation_report(named)?),
            Operation::HotKeys { keys, named } => return json(&self.hot_keys(keys, named)?),
            Operation::Load => return json(&self.load()?),
            Operation::HotCopies => return json(&self.hot_copies()?),
            Operation::SteerHotCopies(order) => return json(&self.steer_hot_copies(&order)?),
            Operation::Plan(request) => return json(&self.plan_now(&request, who)?),
            Operation::PlanHistory { named } => return json(&self.plan_history(named)),
            Operation::Replay { id, named } => return json(&self.replay(id, named)?),
            Operation::Autoscale => return json(&self.autoscale()?),
            Operation::SteerAutoscale(request) => return json(&self.steer_autoscale(&request)?),
            Operation::Automation => return json(&self.automation()),
            Operation::SteerAutomation(request) => return json(&self.steer_automation(&request)?),
            Operation::Rules => return json(&self.rules()?),
            Operation::CheckRules(keys) => return json(&self.check_rules(&keys)?),
            Operation::LearnRules { named } => return json(&self.learn_rules(named)?),
            Operation::SteerRules(order) => return json(&self.steer_rules(order)?),
            Operation::Steer { id, mut what } => {
                if let SteerRequest::SourceOpsMax(Some(max)) = &mut what {
                    let source = self.moves.source_of(MoveId(id))?;
                    *max = self.resolved_source_ops(max, Some(&source))?;
                }
                return json(&self.moves.steer(MoveId(id), &what)?);
            }
            Operation::Move(request) => self.begin_one(&request),
            Operation::AddNode(request) => self.add_listed(&request),
            Operation::DrainNode(request) => self.drain_node(&request),
            Operation::UndrainNode(request) => self.undrain_node(&request),
            Operation::RemoveNode(request) => self.remove_node(&request),
            Operation::Balance(request) => self.balance(&request),
            Operation::Upgrade => return Err(conflict(NO_UPGRADE)),
        };
        json(&plan?)
    }

    /// Whether a node was drained, and gets no slots.
    pub(crate) fn is_drained(&self, name: &str) -> bool {
        self.drained.has(name)
    }

    /// Returns the limit of a source as a number, if it is a share of the capacity of this node.
    fn resolved_source_ops(&self, max: &str, source: Option<&str>) -> Result<String, OperationError> {
        let capacities = self.capacities.read().unwrap_or_else(PoisonError::into_inner);
        let capacity = source.and_then(|source| capacities.get(source)).copied();
        source_ops_max(max, capacity).map(|max| max.to_string())
    }

    fn begin_one(&self, request: &MoveRequest) -> Result<PlanReport, OperationError> {
        let mut how = request.how.clone();
        if let Some(max) = how.paper.as_mut().and_then(|paper| paper.source_ops_max.as_mut()) {
            let topology = self.moves.topology_now()?;
            let source = node_named(&topology, &request.from).ok().map(|source| self.moves.name(source));
            *max = self.resolved_source_ops(max, source.as_deref())?;
        }
        let how = self.moves.how(&how)?;
        let _one = self.plan();
        let topology = self.moves.topology_now()?;
        if request.keys.is_some() || request.home {
            if how.paper.is_some() {
                return Err(invalid(
                    "protocols as published (--mode paper) move whole slots, not keys without their slots",
                ));
            }
            return self.begin_keys(&topology, request, how);
        }
        if request.to.is_empty() {
            return Err(invalid("to which node?"));
        }
        let target = node_named(&topology, &request.to)?;
        let source = if request.from.is_empty() { None } else { Some(node_named(&topology, &request.from)?) };
        self.check_not_drained(target)?;
        if source == Some(target) {
            return Err(invalid(format!("source and target are the same node, {}", request.from)));
        }
        let slots = match (&request.slots, request.all, source) {
            (Some(_), true, _) => return Err(invalid("give slots, or all, not both")),
            (None, false, _) => {
                return Err(invalid("which slots? Give slots, such as 0-100,200, or all, or a pattern of keys"));
            }
            (None, true, None) => return Err(invalid("name the source node of all these slots")),
            (None, true, Some(source)) => topology.slots().filter(|slot| topology.owner(*slot) == source).collect(),
            (Some(text), false, _) => parse_slots(text, topology.placement().slots()).map_err(invalid)?,
        };
        if let Some(source) = source {
            let foreign: Vec<Slot> = slots.iter().copied().filter(|slot| topology.owner(*slot) != source).collect();
            if let Some(first) = foreign.first() {
                return Err(conflict(format!(
                    "{} of these {} slots do not belong to {}: slot {} is owned by {}. It owns {}",
                    foreign.len(),
                    slots.len(),
                    request.from,
                    first.number(),
                    self.moves.name(topology.owner(*first)),
                    ranges_text(&topology, source),
                )));
            }
        }
        let mut by_owner: BTreeMap<NodeId, Vec<Slot>> = BTreeMap::new();
        for slot in slots {
            by_owner.entry(topology.owner(slot)).or_default().push(slot);
        }
        by_owner.remove(&target);
        if by_owner.is_empty() {
            return Err(conflict(match source {
                Some(_) => format!("{} owns no slots, so there is nothing to move", request.from),
                None => format!("{} owns all of these slots, so there is nothing to move", request.to),
            }));
        }
        let shifts = by_owner.into_iter().map(|(source, slots)| Shift { source, target, slots }).collect();
        self.moves.accept_unless(request.dry_run, &topology, orders(shifts, how))
    }

    fn balance(&self, request: &BalanceRequest) -> Result<PlanReport, OperationError> {
        let how = self.moves.how(&request.how)?;
        let _one = self.plan();
        match request.by.as_deref() {
            None | Some("slots") => {}
            Some("load") => return self.balance_by_load(how, request.dry_run),
            Some(other) => return Err(invalid(format!("by: {other:?} is neither slots nor load"))),
        }
        let (_pause, topology) = self.check_no_open_moves("the slots are balanced")?;
        self.share(&topology, how, request.dry_run)
    }

    /// Fails if moves are in progress. Moves for commands are awaited instead, and none starts during the pause. Returns
    /// the map with the results of all these moves: an older map would lack keys that they have brought to a node.
    fn check_no_open_moves(&self, before: &str) -> Result<(ColocationPause<'_>, Arc<Topology>), OperationError> {
        let pause = self.moves.pause_colocations();
        let open: Vec<String> = self.moves.open_ids().iter().map(|id| id.0.to_string()).collect();
        if open.is_empty() {
            // Read last: the result of a move is published before the move is closed.
            return Ok((pause, self.moves.topology_now()?));
        }
        Err(conflict(format!(
            "moves are in progress ({}): let them end before {before} (`switchyard moves watch`), or end them with `switchyard moves abort ID`",
            open.join(", ")
        )))
    }

    fn weights(&self, topology: &Topology) -> BTreeMap<NodeId, u32> {
        let weights = self.weights.read().unwrap_or_else(PoisonError::into_inner);
        let goes = |name: &str| self.drained.has(name) || self.ring.is_leaving(name);
        let weight = |name: &str| if goes(name) { 0 } else { weights.get(name).copied().unwrap_or(1) };
        topology.nodes().map(|node| (node.id, weight(&node.name))).collect()
    }
}

/// Reason why the process is not replaced while it serves.
const NO_UPGRADE: &str = "a router in front of standalone nodes is upgraded by a restart (`systemctl restart switchyard`): \
    its ownership of the nodes allows one process at a time. A standby shortens the interruption, see \
    docs/high-availability.md. In front of a cluster, `switchyard upgrade` interrupts no client";

/// Describes an operation for the audit log.
pub(crate) fn describe(operation: &Operation) -> String {
    match operation {
        Operation::Move(request) => {
            let what = match (&request.keys, &request.slots) {
                (None, _) if request.home => "keys that live there without their slots".to_owned(),
                // Names of keys must not be disclosed.
                (Some(_), _) => "keys of a pattern".to_owned(),
                (None, _) if request.all => "all slots".to_owned(),
                (None, slots) => format!("slots {}", slots.as_deref().unwrap_or("?")),
            };
            let to = if request.home { "home" } else { &request.to };
            let from = if request.from.is_empty() { "all nodes that have them" } else { &request.from };
            format!("move {what} from {from} to {to}{}", if request.dry_run { ", only planned" } else { "" })
        }
        Operation::Moves => "moves".to_owned(),
        Operation::Slots => "slots".to_owned(),
        Operation::Misplaced => "keys that the slot map looks for elsewhere".to_owned(),
        Operation::Colocation { .. } => "keys that commands have brought together".to_owned(),
        Operation::HotKeys { .. } => "keys that are used most".to_owned(),
        Operation::Load => "the load of nodes and slots".to_owned(),
        Operation::HotCopies => "hot copies".to_owned(),
        Operation::Plan(request) => match (request.undo, request.apply) {
            (Some(id), _) => format!("move back what decision {id} of the planner has moved"),
            (None, true) => "carry out the plan of the planner".to_owned(),
            (None, false) => "the planner's current plan".to_owned(),
        },
        Operation::PlanHistory { .. } => "decisions of the planner".to_owned(),
        Operation::Replay { id, .. } => format!("decision {id} of the planner once more"),
        Operation::Autoscale => "target number of nodes".to_owned(),
        Operation::SteerAutoscale(AutoscaleRequest { verb, nodes: Some(nodes) }) => format!("autoscale {verb} {nodes}"),
        Operation::SteerAutoscale(request) => format!("autoscale {}", request.verb),
        Operation::Automation => "whether the planner acts".to_owned(),
        Operation::SteerAutomation(request) => format!("automation {}", request.verb),
        Operation::Rules => "placement rules".to_owned(),
        Operation::CheckRules(keys) => format!("the rules for {}", counted(keys.len(), "key")),
        Operation::LearnRules { .. } => "placement rules for keys that are used together".to_owned(),
        Operation::SteerRules(order) => match order {
            RulesOrder::Adopt { dry_run: true, .. } => "adopt placement rules, only planned".to_owned(),
            RulesOrder::Adopt { .. } => "adopt placement rules".to_owned(),
            RulesOrder::Pause(true) => "pause the adoption of placement rules".to_owned(),
            RulesOrder::Pause(false) => "resume the adoption of placement rules".to_owned(),
            RulesOrder::Abandon => "abandon the adoption of placement rules".to_owned(),
        },
        Operation::SteerHotCopies(order) => match order {
            HotCopiesOrder::EvictKey(_) => "evict the hot copies of a key".to_owned(),
            HotCopiesOrder::EvictPrefix(_) => "evict the hot copies of a prefix".to_owned(),
            HotCopiesOrder::EvictAll => "evict all hot copies".to_owned(),
            HotCopiesOrder::Suspend(true) => "switch hot copies off".to_owned(),
            HotCopiesOrder::Suspend(false) => "switch hot copies on".to_owned(),
        },
        Operation::Upgrade => "upgrade".to_owned(),
        Operation::Where(keys) => {
            format!("where {} {}", counted(keys.len(), "key"), if keys.len() == 1 { "is" } else { "are" })
        }
        Operation::Steer { id, what } => match what {
            SteerRequest::Pause => format!("pause move {id}"),
            SteerRequest::Resume => format!("resume move {id}"),
            SteerRequest::Abort(request) => {
                let without = match request.abandon {
                    None => "",
                    Some(Abandon::Source) => ", abandoning its source",
                    Some(Abandon::Target) => ", abandoning its target",
                };
                format!("abort move {id}{without}{}", if request.dry_run { ", only planned" } else { "" })
            }
            SteerRequest::Goal(goal) => format!("move {id} with the goal {goal}"),
            SteerRequest::MaxRate(Some(max)) => format!("move {id} with at most {max} bytes per second"),
            SteerRequest::MaxRate(None) => format!("move {id} with its goal's rate"),
            SteerRequest::SourceOpsMax(max) => {
                format!("move {id} with source-ops-max {}", max.as_deref().unwrap_or("none"))
            }
        },
        Operation::AddNode(request) => {
            format!("add node {}{}", request.address, if request.rebalance { " and rebalance" } else { "" })
        }
        Operation::DrainNode(request) => {
            format!("drain node {}{}", request.address, if request.dry_run { ", only planned" } else { "" })
        }
        Operation::UndrainNode(request) => format!("undrain node {}", request.address),
        Operation::RemoveNode(request) => format!("remove node {}", request.address),
        Operation::Balance(request) => format!("balance{}", if request.dry_run { ", only planned" } else { "" }),
    }
}

/// Orders of whole slots, as if requested by an operator.
fn orders(shifts: Vec<Shift>, how: MoveOptions) -> Vec<MoveOrder> {
    let order = |Shift { source, target, slots }| MoveOrder {
        source,
        target,
        slots,
        keys: None,
        how,
        cause: Cause::Requested(None),
    };
    shifts.into_iter().map(order).collect()
}

fn node_named(topology: &Topology, name: &str) -> Result<NodeId, OperationError> {
    // The port may be omitted, as in the configuration.
    let full = parse_endpoint(name).unwrap_or_else(|_| name.to_owned());
    let found = topology.nodes().find(|node| node.name == name || node.name == full);
    found.map(|node| node.id).ok_or_else(|| {
        let known: Vec<&str> = topology.nodes().map(|node| node.name.as_str()).collect();
        invalid(format!("there is no node {name:?}; known nodes: {}", known.join(", ")))
    })
}

/// Parses slots like `0-100,200` in ascending order. `count` is the number of slots in the map.
pub(crate) fn parse_slots(text: &str, count: usize) -> Result<Vec<Slot>, String> {
    let mut slots = BTreeSet::new();
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let form =
            || format!("{part:?} is not a range of slots: write numbers from 0 to {}, such as 0-100,200", count - 1);
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |text: &str| {
            text.trim().parse().ok().and_then(Slot::new).filter(|slot| slot.index() < count).ok_or_else(form)
        };
        let (first, last) = (number(first)?, number(last)?);
        if first > last {
            return Err(form());
        }
        slots.extend((first.number()..=last.number()).filter_map(Slot::new));
    }
    if slots.is_empty() { Err(format!("{text:?} names no slots")) } else { Ok(slots.into_iter().collect()) }
}

#[cfg(test)]
mod tests {
    use switchyard_policy::topology::SLOT_COUNT;

    use super::*;

    #[test]
    fn slots_are_read_as_they_are_shown() {
        for (text, shown) in
            [("5", "5"), ("0-3,7", "0-3,7"), ("7,0-3,2-5", "0-5,7"), (" 1 , 2 ", "1-2"), ("0-16383", "0-16383")]
        {
            assert_eq!(parse_slots(text, SLOT_COUNT).map(|slots| text_of(&slots)), Ok(shown.to_owned()), "{text}");
        }
        for text in ["", ",", "16384", "5-3", "-1", "a", "1-2-3", "1..3"] {
            assert!(parse_slots(text, SLOT_COUNT).is_err(), "{text}");
        }
    }
}
