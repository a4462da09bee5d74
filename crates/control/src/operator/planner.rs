//! Connects the planner to the fleet: collects its input, and starts its moves as `switchyard move` would, with the
//! same checks.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use switchyard_policy::load::ObservedLoad;
use switchyard_policy::migration::{Cause, Key, MoveOptions, MoveOrder};
use switchyard_policy::planner::{
    Plan, Policy, Previous, Problem, State, Step, StepSubject, fullest_at, held, nodes_of, solve, undo,
};
use switchyard_policy::topology::{MoveId, NodeId, Placement, Slot, Topology};
use switchyard_router::{Link, Router};
use tracing::{info, warn};

use super::keys::without_shared_slots;
use super::{Operator, node_named};
use crate::admin::{
    AutomationReport, AutomationRequest, DecisionReport, HistoryReport, MoveOptionsRequest, OperationError, PlanReport,
    PlanRequest, conflict, invalid,
};
use crate::planner::{
    Decision, FleetContext, KEYS, Mode, Next, PLANNER, POLICIES, Planner, PlannerConfig, Standing, Words, names,
};

impl Operator {
    /// Applies the planner's settings.
    pub fn tune_planner(&self, config: &PlannerConfig) {
        self.planner.tune(config);
    }

    /// Interval between planning steps.
    pub(crate) fn planner_interval(&self) -> Duration {
        self.planner.config().interval
    }

    /// Measures the load and performs the planner's next step.
    pub(crate) fn plan_step(&self) {
        let Ok(topology) = self.moves.topology_now() else { return };
        let (load, now) = (self.observed(&topology, KEYS), Instant::now());
        self.planner.note(now, &topology, &load);
        self.planner.log_rest(now);
        self.return_unused_keys(&topology, now);
        self.planner.keep_relocated(|key| topology.placement_override(key));
        if self.planner.is_idle() {
            return;
        }
        let _one = self.plan();
        let (problem, previous) = self.planner.problem(now, &topology, &load, &self.around(&topology, &load));
        let open: BTreeSet<MoveId> = self.moves.open_ids().into_iter().collect();
        let full = |plan: &Plan| fullest_at(&problem, &nodes_of(&plan.steps));
        if let Next::Begin(decision, plan) = self.planner.step(now, &problem, previous, |id| open.contains(&id)) {
            match self.begin_plan(&topology, &plan, false) {
                Ok(begun) => {
                    info!(
                        "the planner starts {} moves (decision {decision}: `switchyard plan history`)",
                        begun.moves.len()
                    );
                    self.planner.begun(now, decision, full(&plan), ids(&begun));
                }
                Err((nodes, refused)) => {
                    warn!("the planner cannot carry out its decision (decision {decision}): {}", refused.text());
                    self.planner.refused(now, decision, nodes, refused.text());
                }
            }
        }
    }

    fn around(&self, topology: &Topology, load: &ObservedLoad) -> FleetContext {
        let capacities = self.capacities.read().unwrap_or_else(PoisonError::into_inner);
        let status = self.running.with(Router::status);
        let is_down = |link: &Option<Link>| !matches!(link, Some(Link::Up));
        let down = status
            .iter()
            .flat_map(|status| &status.nodes)
            .filter(|node| is_down(&Some(node.link.clone())))
            .map(|node| node.id);
        let copies = self.running.with(Router::hot_copies).is_some_and(|copies| copies.is_on && !copies.is_suspended);
        let needed = |key: &&[u8]| self.moves.colocations().warning(&[Key::from(*key)]).is_some();
        FleetContext {
            weights: self.weights(topology),
            capacities: topology
                .nodes()
                .filter_map(|node| Some((node.id, *capacities.get(&node.name)? as f64)))
                .collect(),
            busy: topology.nodes().map(|node| node.id).filter(|node| self.moves.involving(*node).is_some()).collect(),
            down: down.collect(),
            leaving: BTreeSet::new(),
            needed: names(load).filter(needed).map(Into::into).collect(),
            copies,
        }
    }

    /// Returns a plan for the present load. With `apply`, starts its moves.
    pub(super) fn plan_now(&self, request: &PlanRequest, who: &str) -> Result<DecisionReport, OperationError> {
        let _one = self.plan();
        if let Some(id) = request.undo {
            return self.undo(id, request, who);
        }
        let topology = self.moves.topology_now()?;
        let (load, now) = (self.observed(&topology, KEYS), Instant::now());
        let mut around = self.around(&topology, &load);
        let leaver = request.without.as_ref().map(|name| node_named(&topology, name)).transpose()?;
        if let Some(node) = leaver {
            self.may_leave(&topology, node, &around, request.apply)?;
            around.leaving.insert(node);
        }
        let (mut problem, mut previous) = self.planner.problem(now, &topology, &load, &around);
        self.adapt(&mut problem, &mut previous, request)?;
        let plan = solve(&problem, &previous);
        let policy = problem.knobs.policy;
        let name = |node| self.moves.name(node);
        let words = Words { name: &name, named: request.named };
        let held = words.held(&held(&problem, &previous));
        let mut report = DecisionReport { by: who.to_owned(), held, ..words.plan(&plan, policy) };
        if request.apply {
            if request.load.is_some() {
                return Err(invalid("an assumed load is no reason to move anything: omit `load`, or `apply`"));
            }
            if plan.steps.is_empty() {
                let reasons: Vec<String> =
                    std::iter::once(report.message).chain(report.held).chain(report.advice).collect();
                return Err(conflict(format!("there is nothing to do: {}", reasons.join("; "))));
            }
            let before = fullest_at(&problem, &nodes_of(&plan.steps));
            let begun =
                self.leaving(leaver, || self.begin_plan(&topology, &plan, false).map_err(|(_, refused)| refused))?;
            let id = self.planner.record_requested(who, problem, previous, plan);
            self.planner.begun(now, id, before, ids(&begun));
            (report.id, report.applied) = (Some(id), Some(begun));
        }
        Ok(report)
    }

    /// Moves back the keys and slots of a decision that are still where it has moved them.
    fn undo(&self, id: u64, request: &PlanRequest, who: &str) -> Result<DecisionReport, OperationError> {
        let decision = self.decision(id)?;
        let topology = self.moves.topology_now()?;
        let begun = decision.moves.iter().flatten().copied().map(MoveId);
        let open = self.moves.open_ids();
        match begun.clone().find(|begun| open.contains(begun)) {
            Some(MoveId(number)) => {
                return Err(conflict(format!(
                    "move {number} of decision {id} has not ended: wait for it (`switchyard moves watch`), or abort it (`switchyard moves abort {number}`)"
                )));
            }
            None if begun.count() == 0 => {
                return Err(conflict(format!("decision {id} was not carried out, so nothing can be moved back")));
            }
            None => {}
        }
        let is_there = |slot: &Slot, to: NodeId| topology.owner(*slot) == to && topology.transit(*slot).is_none();
        let there = |step: Step| match step.what {
            StepSubject::Key { ref key, slot, .. } => {
                (topology.lives_at(key) == step.to && topology.transit(slot).is_none()).then_some(step)
            }
            StepSubject::Slots(all) => {
                let (count, slots) =
                    (all.len() as u64, all.into_iter().filter(|slot| is_there(slot, step.to)).collect::<Vec<_>>());
                let bytes = step.bytes * slots.len() as u64 / count.max(1);
                (!slots.is_empty()).then_some(Step { what: StepSubject::Slots(slots), bytes, ..step })
            }
        };
        let steps: Vec<Step> = decision.plan.steps.into_iter().filter_map(there).collect();
        if steps.is_empty() {
            return Err(conflict(format!(
                "nothing that decision {id} moved is still at its target, so nothing can be moved back"
            )));
        }
        let (load, now) = (self.observed(&topology, KEYS), Instant::now());
        let (problem, previous) = self.planner.problem(now, &topology, &load, &self.around(&topology, &load));
        let plan =
            undo(&problem, steps).map_err(|why| conflict(format!("decision {id} cannot be undone now: {why}")))?;
        let begun = self.begin_plan(&topology, &plan, false).map_err(|(_, refused)| refused)?;
        let (name, by) = (|node| self.moves.name(node), format!("{who}, to undo decision {id}"));
        let report = Words { name: &name, named: request.named }.plan(&plan, problem.knobs.policy);
        let before = fullest_at(&problem, &nodes_of(&plan.steps));
        let undone = self.planner.record_requested(&by, problem, previous, plan);
        self.planner.begun(now, undone, before, ids(&begun));
        Ok(DecisionReport {
            id: Some(undone),
            by,
            message: format!("decision {id} is moved back"),
            applied: Some(begun),
            ..report
        })
    }

    fn decision(&self, id: u64) -> Result<Decision, OperationError> {
        let found = self.planner.decision(id);
        found.ok_or_else(|| {
            invalid(format!("there is no decision {id}, or no longer: `switchyard plan history` lists the last 64"))
        })
    }

    /// Checks whether a plan is possible for a leaving node.
    fn may_leave(
        &self,
        topology: &Topology,
        node: NodeId,
        around: &FleetContext,
        applies: bool,
    ) -> Result<(), OperationError> {
        let name = self.moves.name(node);
        match () {
            () if around.down.contains(&node) => {
                Err(conflict(self.unreachable_remedy(node).unwrap_or_else(|| format!("{name} cannot be used now"))))
            }
            () if around.busy.contains(&node) => Err(conflict(format!(
                "{name} takes part in a move, so nothing else can be planned for it: wait for its end (`switchyard moves`)"
            ))),
            () if applies && topology.placement().continuum().is_some() => {
                Err(conflict(format!("the list of servers determines where keys are: switchyard nodes drain {name}")))
            }
            () => Ok(()),
        }
    }

    /// Drains a leaving node before its moves start, so that it gets no more slots.
    fn leaving(
        &self,
        leaver: Option<NodeId>,
        begin: impl FnOnce() -> Result<PlanReport, OperationError>,
    ) -> Result<PlanReport, OperationError> {
        let Some(name) = leaver.map(|node| self.moves.name(node)).filter(|name| !self.drained.has(name)) else {
            return begin();
        };
        self.drained.set(&self.store, &name, true).map_err(OperationError::Failed)?;
        let begun = begin();
        if begun.is_err() {
            self.drained.set(&self.store, &name, false).map_err(OperationError::Failed)?;
        }
        begun
    }

    /// Applies the overrides of a manual request. Unlike the planner, it does not wait whether a load lasts.
    fn adapt(
        &self,
        problem: &mut Problem,
        previous: &mut Previous,
        request: &PlanRequest,
    ) -> Result<(), OperationError> {
        if let Some(word) = &request.policy {
            let known = POLICIES.iter().find(|(_, name)| name == word);
            let all: Vec<&str> = POLICIES.iter().map(|(_, name)| *name).collect();
            problem.knobs.policy =
                known.ok_or_else(|| invalid(format!("policy: {word:?} is none of {}", all.join(", "))))?.0;
        }
        let times = request.load.unwrap_or(1.0);
        if !(0.0..=1000.0).contains(&times) {
            return Err(invalid(format!("load: {times} is not between 0 and 1000")));
        }
        for node in &mut problem.nodes {
            node.load *= times;
            node.lasting = node.load;
        }
        problem.slots.iter_mut().for_each(|slot| slot.load *= times);
        for key in &mut problem.keys {
            (key.reads, key.writes, key.copied) = (key.reads * times, key.writes * times, key.copied * times);
        }
        if problem.nodes.iter().any(|node| node.state == State::Leaving) {
            *previous = Previous::default();
        }
        Ok(())
    }

    /// Starts the moves of a plan, or (dry run) returns them. An error comes with the affected nodes.
    fn begin_plan(
        &self,
        topology: &Topology,
        plan: &Plan,
        dry_run: bool,
    ) -> Result<PlanReport, (BTreeSet<NodeId>, OperationError)> {
        let all = |refused| (nodes_of(&plan.steps), refused);
        let how = self.moves.how(&MoveOptionsRequest::default()).map_err(all)?;
        let orders = orders_of(topology.placement(), &plan.steps, how);
        for order in &orders {
            let room = || match &order.keys {
                Some(keys) => self.check_room(topology, &keys.iter().cloned().collect(), order.target),
                None => Ok(()),
            };
            self.check_not_drained(order.target)
                .and_then(|()| room())
                .map_err(|refused| (BTreeSet::from([order.target]), refused))?;
        }
        self.moves.accept_unless(dry_run, topology, orders).map_err(all)
    }

    /// Balances nodes by load, regardless of the planner's mode.
    pub(super) fn balance_by_load(&self, how: MoveOptions, dry_run: bool) -> Result<PlanReport, OperationError> {
        let (_pause, topology) = self.check_no_open_moves("the load is balanced")?;
        let (load, now) = (self.observed(&topology, KEYS), Instant::now());
        let (mut problem, mut previous) = self.planner.problem(now, &topology, &load, &self.around(&topology, &load));
        self.adapt(&mut problem, &mut previous, &PlanRequest::default())?;
        // Move only slots, which the published policies do not support.
        (problem.knobs.policy, problem.knobs.keys_max) = (Policy::Switchyard, 0);
        let plan = solve(&problem, &previous);
        let name = |node| self.moves.name(node);
        let message = Words { name: &name, named: false }.plan(&plan, problem.knobs.policy).message;
        let plan = self.moves.accept_unless(dry_run, &topology, orders_of(topology.placement(), &plan.steps, how))?;
        Ok(PlanReport { notes: std::iter::once(message).chain(plan.notes).collect(), ..plan })
    }

    pub(super) fn plan_history(&self, named: bool) -> HistoryReport {
        let name = |node| self.moves.name(node);
        let words = Words { name: &name, named };
        let decisions = self.planner.decisions();
        HistoryReport {
            automation: self.automation(),
            decisions: decisions.iter().map(|(id, decision)| words.decision(*id, decision)).collect(),
        }
    }

    /// Repeats a decision on its stored input.
    pub(super) fn replay(&self, id: u64, named: bool) -> Result<DecisionReport, OperationError> {
        let decision = self.decision(id)?;
        let Decision { at, by, problem, previous, plan, .. } = decision;
        let name = |node| self.moves.name(node);
        // An undo is based on the previous decision, which is its reason.
        let plan = if Planner::is_revert(&by) { plan } else { solve(&problem, &previous) };
        Ok(DecisionReport { id: Some(id), at, by, ..Words { name: &name, named }.plan(&plan, problem.knobs.policy) })
    }

    pub(super) fn automation(&self) -> AutomationReport {
        let Standing { mode, rests, over, outcomes } = self.planner.standing(Instant::now());
        let is_stopped = self.running.threads().is_stopped(PLANNER);
        let rests = is_stopped
            .then(|| "its thread has stopped after an internal error: see the log, and restart the router".to_owned())
            .or(rests);
        let word = Mode::ALL.iter().find(|(known, _)| *known == mode).map_or("", |(_, word)| word);
        AutomationReport {
            acts: mode == Mode::On && rests.is_none(),
            mode: word.to_owned(),
            rests,
            over: over.into_iter().map(|node| self.moves.name(node)).collect(),
            outcomes: outcomes.into_iter().map(|(outcome, count)| (outcome.to_owned(), count)).collect(),
        }
    }

    /// Switches all automation off or on.
    pub(super) fn steer_automation(&self, request: &AutomationRequest) -> Result<AutomationReport, OperationError> {
        let is_off = match request.verb.as_str() {
            "off" => true,
            "on" => false,
            other => return Err(invalid(format!("do: {other:?} is neither on nor off"))),
        };
        self.planner.switch(is_off).map_err(OperationError::Failed)?;
        Ok(self.automation())
    }
}

fn ids(begun: &PlanReport) -> Vec<MoveId> {
    begun.moves.iter().filter_map(|planned| planned.id).map(MoveId).collect()
}

/// Converts steps to orders. Keys with the same source and target become one move.
fn orders_of(placement: &Placement, steps: &[Step], how: MoveOptions) -> Vec<MoveOrder> {
    let mut keys: BTreeMap<(NodeId, NodeId), BTreeSet<Key>> = BTreeMap::new();
    let mut orders = Vec::new();
    for step in steps {
        match &step.what {
            StepSubject::Key { key, .. } => {
                keys.entry((step.from, step.to)).or_default().insert(Key::from(&**key));
            }
            StepSubject::Slots(slots) => {
                let (source, target, slots) = (step.from, step.to, slots.clone());
                orders.push(MoveOrder { source, target, slots, keys: None, how, cause: Cause::Planned });
            }
        }
    }
    orders.extend(keys.into_iter().map(|((source, target), keys)| {
        let keys: std::sync::Arc<[Key]> = keys.into_iter().collect();
        MoveOrder {
            source,
            target,
            slots: MoveOrder::slots_of(placement, &keys),
            keys: Some(keys),
            how,
            cause: Cause::Planned,
        }
    }));
    let (mut orders, _) = without_shared_slots(placement, orders);
    // Keys first: they move quickly and carry most of the load.
    orders.sort_by_key(|order| order.keys.is_none());
    orders
}
