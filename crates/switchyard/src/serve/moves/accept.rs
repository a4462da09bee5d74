//! What people ask of moves and nodes: checked against what is, refused with what to do, or put on record and done.
//!
//! The command line, the admin API and RESP come here; none of them decides anything.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, mpsc};
use std::time::Duration;

use serde::Serialize;
use serde_json::Value;
use switchyard_control::admin::{
    AddNodeRequest, BalanceRequest, HowRequest, Lose, MoveRequest, NodeRequest, Operation, PlanReport, PlannedReport, Refused, SteerRequest,
};
use switchyard_policy::balance::{self, Shift};
use switchyard_policy::migration::{Durability, Goal, Key, Protocol, Record};
use switchyard_policy::topology::{MoveId, NodeId, SLOT_COUNT, Slot, Topology};
use switchyard_router::{Link, Steer};
use tracing::info;

use super::direct::{Own, PATIENCE, check_node};
use super::map::{ranges_text, slots_report, text_of, where_report};
use super::{MemberChange, Moves, Options, Planned, State};
use crate::config::{DURABILITIES, counted, name_of, named, parse_endpoint};

/// How long the journal may take to put a move on record.
const RECORD_BOUND: Duration = Duration::from_secs(10);

/// What is to move: slots, or some keys of them.
#[derive(Clone, Debug)]
pub(super) struct Wish {
    pub(super) shift: Shift,
    pub(super) keys: Option<Arc<[Key]>>,
    pub(super) pattern: Option<String>,
    /// Commands of clients that need these keys at home, with how many keys each needed first.
    pub(super) home_for: BTreeMap<String, u64>,
}

impl From<Shift> for Wish {
    fn from(shift: Shift) -> Self {
        Self { shift, keys: None, pattern: None, home_for: BTreeMap::new() }
    }
}

/// How a move is to be done, with what the configuration says where the user did not.
pub(super) struct How {
    goal: Goal,
    max_rate: Option<u64>,
    durability: Durability,
    pub(super) protocol: Protocol,
    allow_direct_clients: bool,
    purge_target: bool,
}

impl How {
    /// What a target must be able to promise.
    pub(super) fn durability(&self) -> Durability {
        self.durability
    }

    /// Clients may use nodes past the router.
    pub(super) fn allows_direct_clients(&self) -> bool {
        self.allow_direct_clients
    }
}

pub(super) fn wrong(text: impl Into<String>) -> Refused {
    Refused::Wrong(text.into())
}

pub(super) fn conflict(text: impl Into<String>) -> Refused {
    Refused::Conflict(text.into())
}

pub(super) fn json(value: &impl Serialize) -> Result<Value, Refused> {
    serde_json::to_value(value).map_err(|error| Refused::Failed(error.to_string()))
}

impl Moves {
    /// Does what is asked.
    pub(in super::super) fn operate(self: &Arc<Self>, operation: Operation, who: &str) -> Result<Value, Refused> {
        let only_looks = matches!(
            operation,
            Operation::Moves | Operation::Slots | Operation::Where(_) | Operation::Balance(BalanceRequest { dry_run: true, .. })
        );
        let told = told(&operation);
        let outcome = self.execute(operation);
        match &outcome {
            Err(refused) => info!(target: "audit", who, "refused: {told}: {}", refused.text()),
            Ok(_) if only_looks => {}
            Ok(_) => info!(target: "audit", who, "asked: {told}"),
        }
        outcome
    }

    fn execute(self: &Arc<Self>, operation: Operation) -> Result<Value, Refused> {
        match operation {
            Operation::Moves => json(&self.report()),
            Operation::Slots => json(&slots_report(&*self.topology_now()?)),
            Operation::Where(keys) => json(&where_report(&*self.topology_now()?, &keys)),
            Operation::Move(request) => self.begin_one(&request),
            Operation::Steer { id, what } => self.steer(MoveId(id), &what),
            Operation::AddNode(request) => self.add_node(&request),
            Operation::DrainNode(request) => self.drain_node(&request),
            Operation::UndrainNode(request) => self.undrain_node(&request),
            Operation::RemoveNode(request) => self.remove_node(&request),
            Operation::Balance(request) => self.balance(&request),
        }
    }

    pub(super) fn topology_now(&self) -> Result<Arc<Topology>, Refused> {
        if self.placement.is_provisional() {
            let why =
                "this is a first start, and it is not yet known what each node holds: `switchyard status` says which node does not answer";
            return Err(Refused::Unavailable(why.to_owned()));
        }
        let serving = self.running.with(|_| ()).is_some() && !self.stopping.load(Ordering::Acquire);
        let topology = self.placement.topology().filter(|_| serving);
        topology.ok_or_else(|| Refused::Unavailable("the router is not serving: it is starting, or was told to stop".to_owned()))
    }

    pub(super) fn how(&self, request: &HowRequest) -> Result<How, Refused> {
        let tuning = self.tuning.read().unwrap_or_else(PoisonError::into_inner);
        let config = &tuning.config;
        let of = |what: &str, error: String| wrong(format!("{what}: {error}"));
        let how = How {
            goal: request.goal.as_ref().map_or(Ok(config.goal), |word| named(&Goal::ALL, word)).map_err(|e| of("goal", e))?,
            max_rate: request.max_rate.filter(|rate| *rate > 0).or(config.max_rate),
            durability: match &request.durability {
                Some(word) => named(&DURABILITIES, word).map_err(|e| of("durability", e))?,
                None => config.durability,
            },
            protocol: match &request.protocol {
                Some(word) => named(&Protocol::ALL, word).map_err(|e| of("protocol", e))?,
                None => Protocol::default(),
            },
            allow_direct_clients: request.allow_direct_clients,
            purge_target: request.purge_target,
        };
        if how.protocol == Protocol::StopAndCopy {
            // MIGRATE removes at the source, key by key, before anything is on record or on disk.
            if how.durability != Durability::Memory {
                return Err(wrong(format!(
                    "stop-and-copy cannot keep durability {}: ask for durability memory, or use the default protocol",
                    name_of(&DURABILITIES, how.durability)
                )));
            }
            if !request.allow_key_loss {
                return Err(wrong(
                    "stop-and-copy loses keys when a node restarts in the middle of the move, so it is only for comparisons: use the default protocol, \
                     or say that keys may be lost (--allow-key-loss)",
                ));
            }
        }
        Ok(how)
    }

    fn begin_one(self: &Arc<Self>, request: &MoveRequest) -> Result<Value, Refused> {
        let how = self.how(&request.how)?;
        let _one = self.planning.lock().unwrap_or_else(PoisonError::into_inner);
        let topology = self.topology_now()?;
        if request.keys.is_some() || request.home {
            return self.begin_keys(&topology, request, &how);
        }
        if request.to.is_empty() {
            return Err(wrong("to which node?"));
        }
        let target = node_named(&topology, &request.to)?;
        let source = if request.from.is_empty() { None } else { Some(node_named(&topology, &request.from)?) };
        self.may_get_more(target)?;
        if source == Some(target) {
            return Err(wrong(format!("source and target are the same node, {}", request.from)));
        }
        let slots = match (&request.slots, request.all, source) {
            (Some(_), true, _) => return Err(wrong("give slots, or all, not both")),
            (None, false, _) => return Err(wrong("which slots? Give slots, such as 0-100,200, or all, or a pattern of keys")),
            (None, true, None) => return Err(wrong("all slots of which node? Say from which")),
            (None, true, Some(source)) => Slot::all().filter(|slot| topology.owner(*slot) == source).collect(),
            (Some(text), false, _) => parse_slots(text).map_err(wrong)?,
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
                    self.name(topology.owner(*first)),
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
        let wishes = by_owner.into_iter().map(|(source, slots)| Shift { source, target, slots }.into());
        if request.dry_run {
            let moves = wishes.map(|wish| self.planned(None, &wish)).collect();
            return json(&PlanReport { dry_run: true, moves, ..PlanReport::default() });
        }
        json(&self.accept(&topology, wishes.collect(), &how)?)
    }

    fn balance(self: &Arc<Self>, request: &BalanceRequest) -> Result<Value, Refused> {
        let how = self.how(&request.how)?;
        let _one = self.planning.lock().unwrap_or_else(PoisonError::into_inner);
        let topology = self.topology_now()?;
        self.nothing_under_way("the slots are evened")?;
        let shifts = balance::even(&topology, &self.weights(&topology)).map_err(|error| self.no_weight(&error))?;
        if request.dry_run {
            let moves = shifts.into_iter().map(|shift| self.planned(None, &shift.into())).collect();
            return json(&PlanReport { dry_run: true, moves, ..PlanReport::default() });
        }
        json(&self.accept(&topology, wishes(shifts), &how)?)
    }

    fn drain_node(self: &Arc<Self>, request: &NodeRequest) -> Result<Value, Refused> {
        let how = self.how(&request.how)?;
        let _one = self.planning.lock().unwrap_or_else(PoisonError::into_inner);
        let topology = self.topology_now()?;
        let node = node_named(&topology, &request.address)?;
        self.nothing_under_way("a node is drained")?;
        // Whatever becomes of the moves: it gets nothing until somebody says so.
        let mut weights = self.weights(&topology);
        weights.insert(node, 0);
        let shifts = balance::drain(&topology, node, &weights).map_err(|error| self.no_weight(&error))?;
        if (!shifts.is_empty() || topology.exceptions_at(node) > 0)
            && let Some(way) = self.way_without(node)
        {
            return Err(conflict(way));
        }
        // Keys that live there although their slots do not leave it, too.
        let mut moves = Self::away_from_home(&topology, node, None);
        moves.extend(wishes(shifts));
        let name = self.name(node);
        let was = self.drained.has(&name);
        self.drained.set(&self.store, &name, true).map_err(Refused::Failed)?;
        let accepted = self.accept(&topology, moves, &how);
        if accepted.is_err() && !was {
            self.drained.set(&self.store, &name, false).map_err(Refused::Failed)?;
        }
        json(&accepted?)
    }

    /// What was drained gets nothing by mistake.
    pub(super) fn may_get_more(&self, target: NodeId) -> Result<(), Refused> {
        let name = self.name(target);
        if self.drained.has(&name) {
            return Err(conflict(format!("{name} is drained, so nothing moves to it; first: switchyard nodes undrain {name}")));
        }
        Ok(())
    }

    /// How to do without a node that owns something, where it cannot be reached: nothing can be moved away from it.
    fn way_without(&self, node: NodeId) -> Option<String> {
        let status = self.running.with(switchyard_router::Router::status)?;
        let node = status.nodes.into_iter().find(|status| status.id == node)?;
        let Link::Down(why) = node.link else { return None };
        Some(format!(
            "{0} cannot be reached ({why}), so nothing can be moved away from it. If it comes back, drain it then. If it is lost for good, put a server in its \
             place, with a backup or empty: at {0} itself; or elsewhere, listed under `replicas` of this node in the configuration, then a reload (SIGHUP) and \
             `switchyard nodes accept {0}`. After that it can be drained and removed (docs/dead-server.md)",
            node.name
        ))
    }

    /// A node that was drained may get slots again.
    fn undrain_node(&self, request: &NodeRequest) -> Result<Value, Refused> {
        let _one = self.planning.lock().unwrap_or_else(PoisonError::into_inner);
        let topology = self.topology_now()?;
        let name = self.name(node_named(&topology, &request.address)?);
        if !self.drained.has(&name) {
            return Err(conflict(format!("{name} is not drained; nodes get slots by `switchyard balance` and `switchyard move`")));
        }
        self.drained.set(&self.store, &name, false).map_err(Refused::Failed)?;
        json(&PlanReport::default())
    }

    pub(super) fn no_weight(&self, error: &balance::BalanceError) -> Refused {
        let drained = self.drained.all();
        conflict(match drained.is_empty() {
            true => error.to_string(),
            false => format!("{error}, or let one get slots again with `switchyard nodes undrain` (drained: {})", drained.join(", ")),
        })
    }

    fn add_node(self: &Arc<Self>, request: &AddNodeRequest) -> Result<Value, Refused> {
        let how = self.how(&request.how)?;
        let _one = self.planning.lock().unwrap_or_else(PoisonError::into_inner);
        let topology = self.topology_now()?;
        json(&self.join(&topology, request, &how)?)
    }

    fn remove_node(self: &Arc<Self>, request: &NodeRequest) -> Result<Value, Refused> {
        let _one = self.planning.lock().unwrap_or_else(PoisonError::into_inner);
        let topology = self.topology_now()?;
        let node = node_named(&topology, &request.address)?;
        if let Some((id, _)) = self.state().open.iter().find(|(_, planned)| [planned.source, planned.target].contains(&node)) {
            return Err(conflict(format!(
                "{} takes part in move {1}; let that end, or end it with `switchyard moves abort {1}`",
                request.address, id.0
            )));
        }
        let (slots, exceptions) = (topology.slots_of(node), topology.exceptions_at(node));
        if (slots > 0 || exceptions > 0)
            && let Some(way) = self.way_without(node)
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
        if exceptions > 0 {
            return Err(conflict(format!(
                "{1} {2} moved to {0} alone, without the slots; first: switchyard nodes drain {0}",
                request.address,
                counted(exceptions, "key"),
                if exceptions == 1 { "was" } else { "were" }
            )));
        }
        if topology.nodes().len() == 1 {
            return Err(conflict("it is the only node"));
        }
        let name = self.name(node);
        self.members.change(MemberChange::Remove(name.clone())).map_err(Refused::Failed)?;
        self.drained.set(&self.store, &name, false).map_err(Refused::Failed)?;
        json(&PlanReport::default())
    }

    pub(super) fn steer(self: &Arc<Self>, id: MoveId, what: &SteerRequest) -> Result<Value, Refused> {
        let steer = match what {
            SteerRequest::Pause => Steer::Pause,
            SteerRequest::Resume => Steer::Resume,
            SteerRequest::Abort(request) => return self.abort(id, *request),
            SteerRequest::Goal(word) => Steer::Goal(named(&Goal::ALL, word).map_err(|error| wrong(format!("goal: {error}")))?),
            SteerRequest::MaxRate(rate) => Steer::MaxRate(rate.filter(|rate| *rate > 0)),
        };
        let begun = {
            let mut state = self.state();
            let not_open = Self::not_open(&state, id);
            let planned = state.open.get_mut(&id).ok_or(not_open)?;
            if planned.options.aborting {
                return Err(conflict(format!("move {} is being aborted and does not go on; begin another one", id.0)));
            }
            match steer {
                Steer::Pause => planned.options.paused = true,
                Steer::Resume => planned.options.paused = false,
                Steer::Goal(goal) => name_of(&Goal::ALL, goal).clone_into(&mut planned.options.goal),
                Steer::MaxRate(rate) => planned.options.max_rate = rate,
                Steer::Abort | Steer::GiveUp(_) => {}
            }
            planned.begun
        };
        if begun {
            self.running.with(|router| router.steer_move(id, steer));
        }
        self.save_options();
        self.wake();
        json(&self.report())
    }

    /// Why nothing can be done to a move that is not open.
    pub(super) fn not_open(state: &State, id: MoveId) -> Refused {
        if state.ended.iter().any(|report| report.id == id.0) {
            return conflict(format!("move {} is over", id.0));
        }
        let known: Vec<String> = state.open.keys().map(|id| id.0.to_string()).collect();
        let known = if known.is_empty() { "none is under way".to_owned() } else { format!("under way: {}", known.join(", ")) };
        conflict(format!("there is no move {}; {known}", id.0))
    }

    pub(super) fn nothing_under_way(&self, before: &str) -> Result<(), Refused> {
        let open: Vec<String> = self.state().open.keys().map(|id| id.0.to_string()).collect();
        if open.is_empty() {
            return Ok(());
        }
        Err(conflict(format!(
            "moves are under way ({}): let them end before {before} (`switchyard moves watch`), or end them with `switchyard moves abort ID`",
            open.join(", ")
        )))
    }

    pub(super) fn weights(&self, topology: &Topology) -> BTreeMap<NodeId, u32> {
        let tuning = self.tuning.read().unwrap_or_else(PoisonError::into_inner);
        let weight = |name: &str| if self.drained.has(name) { 0 } else { tuning.weights.get(name).copied().unwrap_or(1) };
        topology.nodes().map(|node| (node.id, weight(&node.name))).collect()
    }

    pub(super) fn planned(&self, id: Option<MoveId>, wish: &Wish) -> PlannedReport {
        let shift = &wish.shift;
        PlannedReport {
            id: id.map(|id| id.0),
            from: self.name(shift.source),
            to: self.name(shift.target),
            slots: shift.slots.len() as u64,
            ranges: text_of(&shift.slots),
            keys: wish.keys.as_ref().map(|keys| keys.len() as u64),
        }
    }

    /// Checks what can be checked before anything is done, and puts moves on record.
    pub(super) fn accept(self: &Arc<Self>, topology: &Topology, wishes: Vec<Wish>, how: &How) -> Result<PlanReport, Refused> {
        self.nothing_in_the_way(&wishes)?;
        self.check_nodes(topology, &wishes, how)?;
        self.accept_checked(wishes, how)
    }

    /// That no other move has these slots, and that the journal takes records.
    fn nothing_in_the_way(&self, wishes: &[Wish]) -> Result<(), Refused> {
        let shifts = || wishes.iter().map(|wish| &wish.shift);
        {
            let state = self.state();
            for (id, planned) in &state.open {
                let taken: BTreeSet<Slot> = planned.slots.iter().copied().collect();
                if let Some(slot) = shifts().flat_map(|shift| &shift.slots).find(|slot| taken.contains(slot)) {
                    return Err(conflict(format!(
                        "slot {} is part of move {}, which is under way; see `switchyard moves`",
                        slot.number(),
                        id.0
                    )));
                }
            }
        }
        let trouble = self.ledger.status().trouble;
        if let Some(trouble) = trouble {
            return Err(Refused::Failed(trouble));
        }
        Ok(())
    }

    /// Puts moves on record whose nodes have just been checked, if what they were planned by still holds.
    pub(super) fn accept_checked(self: &Arc<Self>, wishes: Vec<Wish>, how: &How) -> Result<PlanReport, Refused> {
        let _one = self.recording.lock().unwrap_or_else(PoisonError::into_inner);
        self.nothing_in_the_way(&wishes)?;
        let topology = self.topology_now()?;
        for Wish { shift, keys, .. } in &wishes {
            let is_there = match keys {
                Some(keys) => keys.iter().all(|key| topology.lives_at(key) == shift.source),
                None => shift.slots.iter().all(|slot| topology.owner(*slot) == shift.source),
            };
            if !is_there {
                let source = self.name(shift.source);
                return Err(conflict(format!("some of what was to move has left {source} by another move meanwhile; ask again")));
            }
        }
        let (mut records, mut moves, mut reports) = (Vec::new(), BTreeMap::new(), Vec::new());
        for wish in wishes {
            let id = self.ledger.next_move();
            reports.push(self.planned(Some(id), &wish));
            let Wish { shift: Shift { source, target, slots }, keys, pattern, home_for } = wish;
            let (protocol, durability) = (how.protocol, how.durability);
            records.push(Record::Begun { move_id: id, source, target, slots: slots.clone(), protocol, durability });
            records.extend(keys.as_ref().map(|keys| Record::Keys { move_id: id, keys: keys.to_vec() }));
            let options = Options {
                direct_clients: how.allow_direct_clients,
                goal: name_of(&Goal::ALL, how.goal).to_owned(),
                max_rate: how.max_rate,
                purge_target: how.purge_target,
                pattern,
                home_for,
                ..Options::default()
            };
            let planned = Planned {
                source,
                target,
                slots,
                keys,
                protocol,
                durability,
                options,
                begun: false,
                resume: None,
                left_at_start: 0,
                progress: None,
                end: None,
                trouble: None,
            };
            moves.insert(id, planned);
        }
        self.take_up(records, moves).map_err(Refused::Failed)?;
        Ok(PlanReport { dry_run: false, moves: reports, ..PlanReport::default() })
    }

    /// Puts moves on record; then they wait for their turn.
    pub(super) fn take_up(self: &Arc<Self>, records: Vec<Record>, moves: BTreeMap<MoveId, Planned>) -> Result<(), String> {
        // The options first: a move on record without them would go on after a crash as the configuration says.
        self.beside().extend(moves.iter().map(|(id, planned)| (*id, planned.options.clone())));
        self.try_save_options().inspect_err(|_| self.beside().retain(|id, _| !moves.contains_key(id)))?;
        for (id, planned) in &moves {
            self.placement.take_part(*id, [planned.source, planned.target]);
        }
        if let Err(why) = self.put_on_record(records, moves.keys().copied().collect()) {
            for id in moves.keys() {
                self.placement.part(*id);
            }
            return Err(why);
        }
        {
            let mut state = self.state();
            self.beside().retain(|id, _| !moves.contains_key(id));
            state.open.extend(moves);
        }
        self.wake();
        Ok(())
    }

    /// Waits for the journal, but not for ever. What comes on record after that is ended at once: whoever asked was told that it is not begun.
    fn put_on_record(self: &Arc<Self>, records: Vec<Record>, ids: Vec<MoveId>) -> Result<(), String> {
        let (told, outcome) = mpsc::sync_channel(1);
        let waits = Arc::new(AtomicBool::new(true));
        let (moves, still) = (Arc::clone(self), Arc::clone(&waits));
        let done = move |outcome: Result<(), String>| {
            let is_late = !still.swap(false, Ordering::AcqRel);
            match &outcome {
                Ok(()) if is_late => ids.into_iter().for_each(|id| moves.take_off_record(id)),
                Ok(()) => {}
                Err(_) => moves.beside().retain(|id, _| !ids.contains(id)),
            }
            drop(told.send(outcome));
        };
        self.ledger.record(records, Box::new(done));
        match outcome.recv_timeout(RECORD_BOUND) {
            Ok(outcome) => outcome,
            Err(_) if waits.swap(false, Ordering::AcqRel) => {
                let trouble = self.ledger.status().trouble;
                Err(trouble.map_or_else(|| "the journal of moves does not answer".to_owned(), |t| t + "; this one was not begun"))
            }
            // At the last moment.
            Err(_) => outcome.recv().unwrap_or_else(|error| Err(error.to_string())),
        }
    }

    fn check_nodes(&self, topology: &Topology, wishes: &[Wish], how: &How) -> Result<(), Refused> {
        let shifts = || wishes.iter().map(|wish| &wish.shift);
        let targets: BTreeSet<NodeId> = shifts().map(|shift| shift.target).collect();
        let nodes: BTreeSet<NodeId> = shifts().map(|shift| shift.source).chain(targets.iter().copied()).collect();
        debug_assert!(nodes.iter().all(|id| topology.node(*id).is_some()));
        let mut met: BTreeMap<String, NodeId> = BTreeMap::new();
        for id in nodes {
            let run_id = self.check_one(id, targets.contains(&id), how)?;
            // All that a move finds at its target would be its source's own keys.
            if !run_id.is_empty()
                && let Some(other) = met.insert(run_id, id)
            {
                return Err(conflict(format!(
                    "{} and {} are one server under two names, so nothing can move between them; take one of them out of the configuration",
                    self.name(other),
                    self.name(id)
                )));
            }
        }
        Ok(())
    }

    /// Asks a node whether keys may move to or from it, and which process it is, which takes as long as it takes to answer.
    pub(super) fn check_one(&self, id: NodeId, is_target: bool, how: &How) -> Result<String, Refused> {
        let access = self.running.with(switchyard_router::Router::node_access).unwrap_or_default();
        let Some(access) = access.get(&id) else {
            return Err(Refused::Failed(format!("it is not known how {} is reached", self.name(id))));
        };
        let patience = self.tuning.read().unwrap_or_else(PoisonError::into_inner).patience.max(PATIENCE);
        check_node(access, patience, is_target.then_some(how.durability), how.allow_direct_clients, &self.own()).map_err(conflict)
    }

    /// How connections of this router are named.
    pub(super) fn own(&self) -> Own {
        let run = self.running.with(|router| router.run_id().to_owned()).unwrap_or_default();
        Own { site: self.site(), run }
    }
}

/// What was asked, for the audit log.
fn told(operation: &Operation) -> String {
    match operation {
        Operation::Move(request) => {
            let what = match (&request.keys, &request.slots) {
                (None, _) if request.home => "keys that live there alone".to_owned(),
                // Names of keys are nobody's business.
                (Some(_), _) => "keys of a pattern".to_owned(),
                (None, _) if request.all => "all slots".to_owned(),
                (None, slots) => format!("slots {}", slots.as_deref().unwrap_or("?")),
            };
            let to = if request.home { "home" } else { &request.to };
            let from = if request.from.is_empty() { "wherever they are" } else { &request.from };
            format!("move {what} from {from} to {to}{}", if request.dry_run { ", only planned" } else { "" })
        }
        Operation::Moves => "moves".to_owned(),
        Operation::Slots => "slots".to_owned(),
        Operation::Where(keys) => format!("where {} {}", counted(keys.len(), "key"), if keys.len() == 1 { "is" } else { "are" }),
        Operation::Steer { id, what } => match what {
            SteerRequest::Pause => format!("pause move {id}"),
            SteerRequest::Resume => format!("resume move {id}"),
            SteerRequest::Abort(request) => {
                let without = match request.lose {
                    None => "",
                    Some(Lose::Source) => ", giving up its source",
                    Some(Lose::Target) => ", giving up its target",
                };
                format!("abort move {id}{without}{}", if request.dry_run { ", only planned" } else { "" })
            }
            SteerRequest::Goal(goal) => format!("move {id} with the goal {goal}"),
            SteerRequest::MaxRate(Some(max)) => format!("move {id} with at most {max} bytes per second"),
            SteerRequest::MaxRate(None) => format!("move {id} as fast as its goal says"),
        },
        Operation::AddNode(request) => format!("add node {}{}", request.address, if request.rebalance { " and rebalance" } else { "" }),
        Operation::DrainNode(request) => format!("drain node {}", request.address),
        Operation::UndrainNode(request) => format!("undrain node {}", request.address),
        Operation::RemoveNode(request) => format!("remove node {}", request.address),
        Operation::Balance(request) => format!("balance{}", if request.dry_run { ", only planned" } else { "" }),
    }
}

pub(super) fn wishes(shifts: Vec<Shift>) -> Vec<Wish> {
    shifts.into_iter().map(Wish::from).collect()
}

pub(super) fn node_named(topology: &Topology, name: &str) -> Result<NodeId, Refused> {
    // The port may be left out where the configuration may leave it out.
    let full = parse_endpoint(name).unwrap_or_else(|_| name.to_owned());
    let found = topology.nodes().find(|node| node.name == name || node.name == full);
    found.map(|node| node.id).ok_or_else(|| {
        let known: Vec<&str> = topology.nodes().map(|node| node.name.as_str()).collect();
        wrong(format!("there is no node {name:?}; there are: {}", known.join(", ")))
    })
}

/// Slots from `0-100,200`, ascending.
fn parse_slots(text: &str) -> Result<Vec<Slot>, String> {
    let mut slots = BTreeSet::new();
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let form = || format!("{part:?} is no range of slots: write numbers from 0 to {}, such as 0-100,200", SLOT_COUNT - 1);
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |text: &str| text.trim().parse().ok().and_then(Slot::new).ok_or_else(form);
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
    use super::*;

    #[test]
    fn slots_are_read_as_they_are_shown() {
        for (text, shown) in [("5", "5"), ("0-3,7", "0-3,7"), ("7,0-3,2-5", "0-5,7"), (" 1 , 2 ", "1-2"), ("0-16383", "0-16383")] {
            assert_eq!(parse_slots(text).map(|slots| text_of(&slots)), Ok(shown.to_owned()), "{text}");
        }
        for text in ["", ",", "16384", "5-3", "-1", "a", "1-2-3", "1..3"] {
            assert!(parse_slots(text).is_err(), "{text}");
        }
    }
}
