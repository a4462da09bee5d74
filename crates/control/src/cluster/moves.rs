//! Moves of slots between members, as operators order them: one at a time in a cluster.
//!
//! The order is in memory, and everything else in the cluster. So another router shows a move of this one as open slots
//! or as a migration of the members, refuses a second move, and continues an interrupted one.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::ControlFlow;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant};

use anyhow::Context;
use switchyard_policy::balance;
use switchyard_policy::cluster::reshard::{Job, OpenSlot, Survey};
use switchyard_policy::load::SlotLoad;
use switchyard_policy::topology::{NodeId, SLOT_COUNT, Slot};
use switchyard_resp::units::counted;
use switchyard_router::{ClusterMap, Repeating};
use tracing::{info, warn};

use super::members::{Members, topology_of};
use super::mover::{Host, IDLE, Mover, Shift, Stop, Wish};
use super::planning::{Evidence, PERIOD};
use super::report::ClusterReader;
use crate::admin::{
    AbortRequest, MoveOptionsRequest, MoveReport, MoveRequest, MoveState, MovesReport, OperationError, PlanReport,
    PlannedReport, SteerRequest, Warning, conflict, invalid,
};
use crate::metrics::Page;
use crate::moves::add_state_metrics;
use crate::nodes::parse_endpoint;
use crate::operator::{parse_slots, text_of};
use crate::planner::PlannerConfig;
use crate::running::Running;

/// Ids of slots that other routers or tools have opened: this, plus the number of the slot.
const OPEN_IDS: u64 = 1_000_000;

/// Ids of migrations by `CLUSTER MIGRATESLOTS` that other routers or tools have started: this, plus the first slot.
const JOB_IDS: u64 = 2_000_000;

/// Maximum number of ended moves that are reported.
const ENDED: usize = 100;

/// Time for which an order waits until the members agree.
const AGREEMENT: Duration = Duration::from_secs(3);

/// Time that the end of the router leaves to a slot being moved. Afterwards, another router continues it.
const LAST_SLOT: Duration = Duration::from_secs(5);

/// Moves of a cluster's slots.
pub struct ClusterMoves {
    running: Arc<Running>,
    map: Arc<ClusterMap>,
    reader: RwLock<Arc<ClusterReader>>,
    state: Mutex<State>,
    changed: Condvar,
    /// Serializes orders.
    ordering: Mutex<()>,
    pub(super) planner: RwLock<PlannerConfig>,
}

impl std::fmt::Debug for ClusterMoves {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClusterMoves").finish_non_exhaustive()
    }
}

#[derive(Default)]
struct State {
    /// Moves in their order. The first one runs.
    queue: VecDeque<Queued>,
    ended: VecDeque<MoveReport>,
    /// Numbers of ended moves since the start, done and stopped early. `ended` has only the last ones.
    counts: (u64, u64),
    last_id: u64,
    /// Moves that ended early and left a slot open.
    left_open: BTreeMap<u64, String>,
    is_stopping: bool,
}

impl State {
    /// Adds a move to the ended ones.
    fn close(&mut self, report: MoveReport) {
        let (done, stopped) = &mut self.counts;
        *(if report.state == MoveState::Done { done } else { stopped }) += 1;
        self.ended.push_back(report);
        while self.ended.len() > ENDED {
            self.ended.pop_front();
        }
    }
}

struct Queued {
    shift: Shift,
    wish: Wish,
    report: MoveReport,
    started: Option<Instant>,
    progressed: Instant,
}

impl Queued {
    fn shown(&self, now: Instant) -> MoveReport {
        let mut report = self.report.clone();
        let seconds = self.started.map_or(0.0, |started| now.saturating_duration_since(started).as_secs_f64());
        report.state = match (self.wish, self.started) {
            (Wish::End | Wish::Leave, _) => MoveState::Aborting,
            (Wish::Pause, _) => MoveState::Paused,
            (Wish::Continue, Some(_)) => MoveState::Running,
            (Wish::Continue, None) => MoveState::Queued,
        };
        report.seconds = seconds;
        report.idle_seconds = now.saturating_duration_since(self.progressed).as_secs_f64();
        report.percent = percent(&report);
        if seconds > 0.0 {
            report.keys_per_second = report.keys_moved as f64 / seconds;
        }
        if report.slots_done > 0 {
            let left = report.slots.saturating_sub(report.slots_done) as f64;
            report.seconds_left = Some(seconds / report.slots_done as f64 * left);
        }
        report
    }
}

fn percent(report: &MoveReport) -> f64 {
    report.slots_done as f64 * 100.0 / report.slots.max(1) as f64
}

/// The operator's handle to the running move.
struct Handle<'m> {
    moves: &'m ClusterMoves,
    id: u64,
}

impl Host for Handle<'_> {
    fn wish(&self) -> Wish {
        let state = self.moves.state();
        if state.is_stopping {
            return Wish::Leave;
        }
        state.queue.front().filter(|queued| queued.report.id == self.id).map_or(Wish::End, |queued| queued.wish)
    }

    fn note(&self, change: &mut dyn FnMut(&mut MoveReport)) {
        let mut state = self.moves.state();
        let Some(queued) = state.queue.front_mut().filter(|queued| queued.report.id == self.id) else { return };
        let moved = |report: &MoveReport| [report.slots_done, report.keys_moved, report.bytes_moved];
        let before = moved(&queued.report);
        change(&mut queued.report);
        let after = moved(&queued.report);
        if before == after {
            return;
        }
        queued.progressed = Instant::now();
        drop(state);
        let [slots, keys, bytes] = std::array::from_fn(|at| after[at].saturating_sub(before[at]));
        self.moves.running.with(|router| router.note_moved(slots, keys, bytes));
    }
}

impl ClusterMoves {
    /// Creates the moves of the cluster that the router serves.
    #[must_use]
    pub fn new(running: Arc<Running>, map: Arc<ClusterMap>, reader: ClusterReader) -> Arc<Self> {
        let reader = RwLock::new(Arc::new(reader));
        let (state, changed, ordering, planner) = <_>::default();
        Arc::new(Self { running, map, reader, state, changed, ordering, planner })
    }

    /// Uses other credentials and addresses from now on.
    pub fn reconfigure(&self, reader: ClusterReader) {
        *self.reader.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(reader);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Held while an order is checked and accepted.
    pub(super) fn ordering(&self) -> MutexGuard<'_, ()> {
        self.ordering.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether moves are in progress.
    pub(super) fn has_moves(&self) -> bool {
        !self.state().queue.is_empty()
    }

    /// Load of slots, from the commands of this router's clients.
    pub(super) fn slot_sample(&self) -> Vec<SlotLoad> {
        self.running.loads().slots()
    }

    pub(super) fn members(&self) -> Members {
        let reader = Arc::clone(&self.reader.read().unwrap_or_else(PoisonError::into_inner));
        Members::new(reader, self.map.members().into_iter().map(|(_, member)| member).collect())
    }

    /// Moves that need an operator.
    pub(super) fn warnings(&self) -> Vec<Warning> {
        let state = self.state();
        state.left_open.iter().map(|(id, what)| Warning { id: Some(*id), slots: 0, what: what.clone() }).collect()
    }

    /// Adds metrics of this router's moves. Those of other routers and tools are not counted, because members would
    /// have to be queried.
    pub(super) fn add_metrics(&self, page: &mut Page) {
        let now = Instant::now();
        let state = self.state();
        let moves: Vec<MoveReport> = state.queue.iter().map(|queued| queued.shown(now)).collect();
        add_state_metrics(page, &moves, state.counts, state.left_open.len());
    }

    /// All moves of this router, and all others that the members show.
    pub(super) fn report(&self) -> MovesReport {
        let now = Instant::now();
        let mut report = {
            let state = self.state();
            MovesReport {
                moves: state.queue.iter().map(|queued| queued.shown(now)).collect(),
                ended: state.ended.iter().cloned().collect(),
                ..MovesReport::default()
            }
        };
        let mut members = self.members();
        match members.survey() {
            Err(why) => report.message = format!("no member of the cluster shows its state: {why}"),
            Ok(survey) => {
                if let Some(why) = survey.dispute(&|id| members.name(id)) {
                    report.message = format!("slots cannot move now: {why}");
                }
                let own = self.own();
                let foreign = survey.open().into_iter().filter(|open| !own.contains(&open.slot));
                for open in foreign.collect::<Vec<_>>() {
                    report.moves.push(open_report(&mut members, &survey, &open));
                }
                let jobs = survey.running_jobs().filter(|job| !own.iter().any(|slot| job.has(*slot)));
                report.moves.extend(jobs.map(|job| job_report(&members, job)));
            }
        }
        report
    }

    /// Slots of this router's moves.
    fn own(&self) -> BTreeSet<Slot> {
        self.state().queue.iter().flat_map(|queued| queued.shift.slots.iter().copied()).collect()
    }

    /// State of all primaries, once they agree.
    pub(super) fn agreed(&self, members: &mut Members) -> Result<Survey, OperationError> {
        let since = Instant::now();
        loop {
            let survey = members
                .survey()
                .map_err(|why| OperationError::Unavailable(format!("no member shows the cluster's state: {why}")))?;
            let Some(why) = survey.dispute(&|id| members.name(id)) else { return Ok(survey) };
            if since.elapsed() > AGREEMENT {
                return Err(conflict(format!(
                    "{why}. Slots move only while all primaries reply and agree: repair the member, or wait for the failover"
                )));
            }
            sleep(Duration::from_millis(100));
        }
    }

    /// Starts the moves that an operator has ordered.
    pub(super) fn begin(&self, request: &MoveRequest) -> Result<PlanReport, OperationError> {
        if request.keys.is_some() || request.home {
            return Err(invalid(
                "single keys cannot leave their slot in a cluster: move whole slots with --slots or --all",
            ));
        }
        check_options(&request.how)?;
        let _one = self.ordering();
        let mut members = self.members();
        let survey = self.agreed(&mut members)?;
        if request.to.is_empty() {
            return Err(invalid("to which member?"));
        }
        let target = member_named(&members, &survey, &request.to)?;
        let source = match request.from.as_str() {
            "" => None,
            name => Some(member_named(&members, &survey, name)?),
        };
        if source.as_ref() == Some(&target) {
            return Err(invalid(format!("source and target are the same member, {}", request.from)));
        }
        let slots: Vec<Slot> = match (&request.slots, request.all, &source) {
            (Some(_), true, _) => return Err(invalid("give slots, or all, not both")),
            (None, false, _) => return Err(invalid("which slots? Give slots, such as 0-100,200, or all")),
            (None, true, None) => return Err(invalid("name the source of all these slots")),
            (None, true, Some(source)) => Slot::all().filter(|slot| survey.owner(*slot) == Some(source)).collect(),
            (Some(text), false, _) => parse_slots(text, SLOT_COUNT).map_err(invalid)?,
        };
        let mut by_owner: BTreeMap<String, Vec<Slot>> = BTreeMap::new();
        for slot in slots {
            let owner = survey.owner(slot).ok_or_else(|| {
                conflict(format!("slot {} has no owner: give it one with redis-cli --cluster fix", slot.number()))
            })?;
            // The target owns an open slot before all members know.
            let is_unfinished = owner == target && survey.open().iter().any(|open| open.slot == slot);
            if owner != target || is_unfinished {
                by_owner.entry(owner.to_owned()).or_default().push(slot);
            }
        }
        if let Some(source) = &source
            && let Some((owner, slots)) = by_owner.iter().find(|(owner, _)| *owner != source && **owner != target)
        {
            return Err(conflict(format!(
                "{} of these slots do not belong to {}: slot {} is owned by {}",
                slots.len(),
                request.from,
                slots[0].number(),
                members.name(owner)
            )));
        }
        if by_owner.is_empty() {
            return Err(conflict(format!("{} owns these slots already, so there is nothing to move", request.to)));
        }
        let shifts = by_owner.into_iter().map(|(source, slots)| Shift { source, target: target.clone(), slots });
        self.order(&mut members, &survey, shifts.collect(), request.dry_run, Vec::new())
    }

    /// Starts moves that distribute the slots evenly over the primaries.
    pub(super) fn balance(&self, how: &MoveOptionsRequest, dry_run: bool) -> Result<PlanReport, OperationError> {
        check_options(how)?;
        let _one = self.ordering();
        let mut members = self.members();
        let survey = self.agreed(&mut members)?;
        let (topology, ids) = topology_of(&members, &survey).map_err(conflict)?;
        let shifts = balance::even(&topology, &BTreeMap::new()).map_err(|error| conflict(error.to_string()))?;
        let shifts = shifts.into_iter().filter_map(|shift| {
            let id = |node: NodeId| ids.get(node.index()).cloned();
            Some(Shift { source: id(shift.source)?, target: id(shift.target)?, slots: shift.slots })
        });
        self.order(&mut members, &survey, shifts.collect(), dry_run, Vec::new())
    }

    /// Accepts moves, unless another move is in progress in the cluster.
    pub(super) fn order(
        &self,
        members: &mut Members,
        survey: &Survey,
        shifts: Vec<Shift>,
        dry_run: bool,
        mut notes: Vec<String>,
    ) -> Result<PlanReport, OperationError> {
        self.check_free(members, survey, &shifts, dry_run)?;
        if let Some(shift) = shifts.first()
            && let Some(refusal) = refusal(members, shift)
        {
            if !dry_run {
                return Err(conflict(format!("{refusal}. {BY_SERVICE}")));
            }
            notes.push(format!("{refusal}. {BY_SERVICE}"));
        } else if dry_run {
            notes.extend(shifts.iter().map(|shift| by_hand(members, shift)));
        }
        let mut planned = Vec::new();
        let mut state = self.state();
        for shift in shifts {
            let id = (!dry_run).then(|| {
                state.last_id += 1;
                state.last_id
            });
            let (from, to) = (members.name(&shift.source), members.name(&shift.target));
            let (slots, ranges) = (shift.slots.len() as u64, text_of(&shift.slots));
            if let Some(id) = id {
                let report = MoveReport { id, from: from.clone(), to: to.clone(), slots, ..MoveReport::default() };
                let (wish, started, progressed) = (Wish::Continue, None, Instant::now());
                state.queue.push_back(Queued { shift, wish, report, started, progressed });
            }
            planned.push(PlannedReport { id, from, to, slots, ranges, keys: None });
        }
        if !dry_run {
            state.left_open.clear();
        }
        drop(state);
        self.changed.notify_all();
        Ok(PlanReport { dry_run, moves: planned, notes })
    }

    /// Refuses moves while another move is in progress in the cluster. A slot that an interrupted move left open is no
    /// obstacle to its own continuation.
    fn check_free(
        &self,
        members: &mut Members,
        survey: &Survey,
        shifts: &[Shift],
        dry_run: bool,
    ) -> Result<(), OperationError> {
        let open_ids: Vec<String> = self.state().queue.iter().map(|queued| queued.report.id.to_string()).collect();
        if let [first, ..] = open_ids.as_slice() {
            return Err(conflict(format!(
                "moves are in progress ({}): let them end (`switchyard moves watch`), or end them (`switchyard moves abort {first}`)",
                open_ids.join(", ")
            )));
        }
        if let Some(job) = survey.running_jobs().next() {
            return Err(conflict(format!(
                "{} from slot {} on migrate from {} to {} already: let them end (`switchyard moves`), or end them (`switchyard moves abort {}`)",
                counted(job.count() as usize, "slot"),
                job.first(),
                members.name(&job.source),
                members.name(&job.target),
                JOB_IDS + u64::from(job.first())
            )));
        }
        let open = survey.open();
        if let Some(open) = open.iter().find(|open| !survey.primaries().any(|id| id == open.target)) {
            return Err(conflict(lost_target(members, open)));
        }
        let continues = |open: &OpenSlot| {
            shifts.iter().any(|shift| shift.slots.contains(&open.slot) && shift.target == open.target)
        };
        let (own, foreign): (Vec<&OpenSlot>, Vec<&OpenSlot>) = open.iter().partition(|open| continues(open));
        if let Some(open) = foreign.first() {
            let report = open_report(members, survey, open);
            return Err(conflict(format!(
                "slot {} migrates from {} to {} already{}: let it end. If its router or tool has stopped, `switchyard moves resume {}` finishes it",
                open.slot.number(),
                report.from,
                report.to,
                report.leg_keys_left.map_or_else(String::new, |left| format!(", with {left} keys left")),
                report.id
            )));
        }
        if own.is_empty() || dry_run {
            return Ok(());
        }
        check_idle(members, &own)
    }

    /// Controls a move.
    pub(super) fn steer(&self, id: u64, what: &SteerRequest) -> Result<MovesReport, OperationError> {
        if id >= OPEN_IDS {
            return self.steer_foreign(id, what);
        }
        let mut state = self.state();
        let Some(queued) = state.queue.iter_mut().find(|queued| queued.report.id == id) else {
            return Err(match state.ended.iter().any(|ended| ended.id == id) {
                true => conflict(format!("move {id} has ended")),
                false => invalid(format!("this router has no move {id}; `switchyard moves` lists them")),
            });
        };
        let message = match what {
            SteerRequest::Pause => {
                queued.wish = Wish::Pause;
                "the slot being moved is finished, then the move pauses"
            }
            SteerRequest::Resume => {
                queued.wish = Wish::Continue;
                "the move continues"
            }
            SteerRequest::Abort(AbortRequest { abandon: Some(_), .. }) => {
                return Err(invalid(
                    "the cluster itself has the slots: after a failover, the move continues or ends without the lost member",
                ));
            }
            SteerRequest::Abort(AbortRequest { dry_run, .. }) => {
                if !dry_run {
                    queued.wish = Wish::End;
                }
                "a slot being moved is finished, or a migration of the members is cancelled, unless the source has others; slots that have moved stay at the target"
            }
            SteerRequest::Goal(_) | SteerRequest::MaxRate(_) | SteerRequest::SourceOpsMax(_) => {
                return Err(invalid(NO_OPTIONS));
            }
        };
        drop(state);
        self.changed.notify_all();
        let now = Instant::now();
        let state = self.state();
        Ok(MovesReport {
            moves: state.queue.iter().map(|queued| queued.shown(now)).collect(),
            message: message.to_owned(),
            ..MovesReport::default()
        })
    }

    /// Controls a move of another router or tool.
    fn steer_foreign(&self, id: u64, what: &SteerRequest) -> Result<MovesReport, OperationError> {
        let is_dry = match what {
            SteerRequest::Resume => false,
            SteerRequest::Abort(AbortRequest { abandon: None, dry_run }) => *dry_run,
            _ => {
                return Err(invalid(
                    "a move of another router or tool can be resumed or aborted, if its router has stopped",
                ));
            }
        };
        let _one = self.ordering();
        let mut members = self.members();
        let survey = self.agreed(&mut members)?;
        let none = || {
            conflict(format!("move {id} has ended, or its slot is not open any more; `switchyard moves` lists them"))
        };
        if id >= JOB_IDS {
            let job = survey.running_jobs().find(|job| JOB_IDS + u64::from(job.first()) == id).ok_or_else(none)?;
            if matches!(what, SteerRequest::Resume) {
                return Err(conflict("the members continue this migration themselves"));
            }
            let (source, name) = (job.source.clone(), members.name(&job.source));
            if let Some(other) = survey.other_job_from(&source, |other| other.name == job.name) {
                return Err(conflict(format!(
                    "slots from {} on leave {name}, too, and CLUSTER CANCELSLOTMIGRATIONS would cancel both migrations: let one end",
                    other.first()
                )));
            }
            if !is_dry {
                let answer = members.call(&source, &["CLUSTER", "CANCELSLOTMIGRATIONS"]);
                let refused = answer.map_or_else(Some, |answer| answer.error());
                if let Some(why) = refused {
                    return Err(conflict(format!("{name}: CLUSTER CANCELSLOTMIGRATIONS: {why}")));
                }
            }
            let message = format!("the migration is cancelled, and its slots stay at {name}");
            return Ok(MovesReport { message, ..MovesReport::default() });
        }
        let open = survey.open();
        let open = open.iter().find(|open| OPEN_IDS + u64::from(open.slot.number()) == id).ok_or_else(none)?;
        if !survey.primaries().any(|primary| primary == open.target) {
            return Err(conflict(lost_target(&members, open)));
        }
        let source = survey.owner(open.slot).unwrap_or(&open.source).to_owned();
        let shift = Shift { source, target: open.target.clone(), slots: vec![open.slot] };
        if let Some(other) = survey.open().iter().find(|other| other.slot != open.slot) {
            return Err(conflict(format!(
                "slot {} is open, too: more than one move was interrupted. Finish all of them with redis-cli --cluster fix",
                other.slot.number()
            )));
        }
        let plan = self.order(&mut members, &survey, vec![shift], is_dry, Vec::new())?;
        let begun = plan.moves.first().and_then(|planned| planned.id);
        // Keys of an open slot are at both members, so it cannot return: a client may use a key that was created at the
        // target.
        let message = format!(
            "slot {} is finished{}: its keys are at both members, so it cannot return",
            open.slot.number(),
            begun.map_or_else(String::new, |id| format!(" as move {id}"))
        );
        Ok(MovesReport { message, ..self.report() })
    }

    /// Waits for the next move. `None` if the router stops.
    fn next(&self) -> Option<(u64, Shift)> {
        let mut state = self.state();
        loop {
            if state.is_stopping {
                return None;
            }
            if let Some(queued) = state.queue.front_mut() {
                queued.started = Some(Instant::now());
                return Some((queued.report.id, queued.shift.clone()));
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn end(&self, id: u64, result: Result<(), Stop>, is_open: bool) {
        let now = Instant::now();
        let mut state = self.state();
        let Some(queued) = state.queue.pop_front() else { return };
        let mut report = queued.shown(now);
        report.leg_keys_left = None;
        report.seconds_left = None;
        (report.state, report.activity) = match &result {
            Ok(()) => (MoveState::Done, String::new()),
            Err(Stop::Ended) => (MoveState::Stopped, "ended by an operator".to_owned()),
            Err(Stop::Failed(why)) => (MoveState::Stopped, why.clone()),
        };
        info!(
            id,
            slots = report.slots_done,
            of = report.slots,
            from = report.from,
            to = report.to,
            "{}",
            if result.is_ok() { "slots have moved" } else { "a move of slots has ended early" }
        );
        if let Err(Stop::Failed(why)) = &result {
            warn!(id, reason = why, "a move of slots cannot continue");
            if is_open {
                let what = format!(
                    "move {id} has left a slot open, whose keys are served by both members: {why}. `switchyard moves` shows how to finish it"
                );
                state.left_open.insert(id, what);
            }
        }
        state.close(report);
        // Later moves of the same order depend on this one.
        if result.is_err() {
            let others: Vec<Queued> = state.queue.drain(..).collect();
            for other in others {
                let mut report = other.shown(now);
                (report.state, report.activity) = (MoveState::Stopped, format!("move {id} ended early"));
                state.close(report);
            }
        }
        drop(state);
        self.changed.notify_all();
    }

    fn work(&self) {
        while let Some((id, shift)) = self.next() {
            let mut members = self.members();
            // For the address of a member without slots. After an error the move itself tries again.
            let _ = members.survey();
            info!(
                id,
                slots = shift.slots.len(),
                from = members.name(&shift.source),
                to = members.name(&shift.target),
                "slots begin to move"
            );
            // Commands about all keys must reach it before a client is redirected there.
            if let (Some(target), Some(access)) = (members.place(&shift.target), members.access(&shift.target)) {
                self.running.with(|router| router.adopt_member(target, access));
            }
            let result = Mover::new(&mut members, &shift, &Handle { moves: self, id }).run();
            let is_open = result.is_err()
                && members
                    .survey()
                    .is_ok_and(|survey| survey.open().iter().any(|open| shift.slots.contains(&open.slot)));
            self.end(id, result, is_open);
            self.map.request();
        }
    }
}

const NO_OPTIONS: &str = "the members of a cluster copy keys themselves, so goal, max-rate, durability, protocol and other options of moves do not apply";

/// Remedy if the members refuse to move slots.
const BY_SERVICE: &str = "Managed services move slots by their own API: AWS ElastiCache by `aws elasticache \
    modify-replication-group-shard-configuration --replication-group-id ID --node-group-count COUNT --apply-immediately` \
    (with the present count it distributes the slots evenly), AWS MemoryDB by `aws memorydb update-cluster --cluster-name \
    NAME --shard-configuration ShardCount=COUNT`, Google Memorystore by `gcloud redis clusters update NAME --shard-count \
    COUNT` or `gcloud memorystore instances update NAME --shard-count COUNT`, Azure by `az redis update --shard-count \
    COUNT`. Other users: allow CLUSTER and MIGRATE to the router's user";

pub(super) fn check_options(how: &MoveOptionsRequest) -> Result<(), OperationError> {
    let allowed =
        MoveOptionsRequest { allow_direct_clients: how.allow_direct_clients, ..MoveOptionsRequest::default() };
    if *how == allowed { Ok(()) } else { Err(invalid(NO_OPTIONS)) }
}

/// Reason why a member refuses to move slots, if it does. No command has an effect: the arguments are wrong, or name no
/// key that exists. Their number is right, because servers check it before the rights of users.
fn refusal(members: &mut Members, shift: &Shift) -> Option<String> {
    let (none, name) = ("switchyard:no-such-key", members.name(&shift.source));
    let needed: &[&[&str]] = match members.have_jobs(&shift.source, &shift.target) {
        true => &[&["CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", "0", "0", "NODE", "SWITCHYARD"]],
        false => {
            &[&["CLUSTER", "SETSLOT", "0", "SWITCHYARD"], &["MIGRATE", "127.0.0.1", "1", "", "0", "100", "KEYS", none]]
        }
    };
    needed.iter().find_map(|command| {
        let error = members.call(&shift.source, command).ok()?.error()?;
        let is_refused = match error.starts_with("NOPERM") {
            // A user may have other keys only.
            true => error.contains("command"),
            false => error.to_ascii_lowercase().contains("unknown"),
        };
        let command = if command[0] == "MIGRATE" { "MIGRATE".to_owned() } else { command[..2].join(" ") };
        is_refused.then(|| format!("{name} refuses {command}: {error}"))
    })
}

/// Commands that do the same without Switchyard.
fn by_hand(members: &Members, shift: &Shift) -> String {
    let (source, target) = (members.name(&shift.source), &shift.target);
    if members.have_jobs(&shift.source, target) {
        let ranges = shift.slots.chunk_by(|one, next| one.number() + 1 == next.number());
        let ranges: Vec<String> = ranges
            .filter_map(|range| Some(format!("{} {}", range.first()?.number(), range.last()?.number())))
            .collect();
        let (host, port) = source.rsplit_once(':').unwrap_or((&source, ""));
        return format!(
            "by hand: valkey-cli -h {host} -p {port} CLUSTER MIGRATESLOTS SLOTSRANGE {} NODE {target}",
            ranges.join(" ")
        );
    }
    format!(
        "by hand, for any slots of the source: redis-cli --cluster reshard {source} --cluster-from {} --cluster-to {target} --cluster-slots {}",
        shift.source,
        shift.slots.len()
    )
}

/// Reason why an open slot cannot be moved on: a member without its mark may have keys of it.
fn lost_target(members: &Members, open: &OpenSlot) -> String {
    format!(
        "slot {} migrates to {}, which is no primary now. If it returns, repeat this command. If its replica has replaced it, the \
         replica has the moved keys: redis-cli --cluster fix collects the keys of the slot",
        open.slot.number(),
        members.name(&open.target)
    )
}

/// Refuses slots that another router or tool moves now.
fn check_idle(members: &mut Members, open: &[&OpenSlot]) -> Result<(), OperationError> {
    let counts = |members: &mut Members| -> Vec<Option<i64>> {
        open.iter().map(|open| keys_of(members, &open.source, open.slot)).collect()
    };
    let before = counts(members);
    sleep(IDLE);
    let survey = members.survey().map_err(OperationError::Unavailable)?;
    let now_open = survey.open();
    if counts(members) != before || open.iter().any(|open| !now_open.contains(*open)) {
        return Err(conflict("another router or tool moves these slots now: `switchyard moves` shows its progress"));
    }
    Ok(())
}

fn keys_of(members: &mut Members, id: &str, slot: Slot) -> Option<i64> {
    members.call(id, &["CLUSTER", "COUNTKEYSINSLOT", &slot.number().to_string()]).ok()?.number()
}

fn open_report(members: &mut Members, survey: &Survey, open: &OpenSlot) -> MoveReport {
    let number = open.slot.number();
    let id = OPEN_IDS + u64::from(number);
    let source = survey.owner(open.slot).unwrap_or(&open.source).to_owned();
    MoveReport {
        id,
        from: members.name(&open.source),
        to: members.name(&open.target),
        state: MoveState::Running,
        activity: format!(
            "slot {number}, by another router or tool. If that has stopped: `switchyard moves resume {id}`"
        ),
        protocol: "setslot".to_owned(),
        slots: 1,
        leg_keys_left: keys_of(members, &source, open.slot).and_then(|left| u64::try_from(left).ok()),
        ..MoveReport::default()
    }
}

fn job_report(members: &Members, job: &Job) -> MoveReport {
    MoveReport {
        id: JOB_IDS + u64::from(job.first()),
        from: members.name(&job.source),
        to: members.name(&job.target),
        state: MoveState::Running,
        activity: format!("slots from {} on, by the members: {}", job.first(), job.state),
        protocol: "migrateslots".to_owned(),
        slots: job.count(),
        ..MoveReport::default()
    }
}

/// Returns the id of a primary by its address or id.
fn member_named(members: &Members, survey: &Survey, name: &str) -> Result<String, OperationError> {
    let full = parse_endpoint(name).unwrap_or_else(|_| name.to_owned());
    let is_named = |id: &&str| *id == name || members.name(id) == name || members.name(id) == full;
    survey.primaries().find(is_named).map(str::to_owned).ok_or_else(|| {
        let known: Vec<String> = survey.primaries().map(|id| members.name(id)).collect();
        invalid(format!("the cluster has no primary {name:?}; it has {}", known.join(", ")))
    })
}

/// The threads that move slots and plan moves. Dropping it finishes the slot being moved, if that is quick.
#[derive(Debug)]
pub struct MovesThread {
    moves: Arc<ClusterMoves>,
    thread: Option<JoinHandle<()>>,
    _planner: Repeating,
}

impl MovesThread {
    /// Starts the threads.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn start(moves: Arc<ClusterMoves>) -> anyhow::Result<Self> {
        let threads = moves.running.threads().clone();
        let (worker, planned, mut evidence) = (Arc::clone(&moves), Arc::clone(&moves), Evidence::default());
        let plan = move || {
            planned.plan_step(&mut evidence);
            ControlFlow::Continue(())
        };
        let planner = threads.repeat("planner", || PERIOD, plan).context("cannot start the planner")?;
        let thread = threads.spawn("cluster-moves", move || worker.work()).context("cannot start the mover")?;
        Ok(Self { moves, thread: Some(thread), _planner: planner })
    }
}

impl Drop for MovesThread {
    fn drop(&mut self) {
        let mut state = self.moves.state();
        state.is_stopping = true;
        self.moves.changed.notify_all();
        let until = Instant::now() + LAST_SLOT;
        while state.queue.front().is_some_and(|queued| queued.started.is_some()) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                warn!("a slot is still open: its keys are served by both members, and any router continues its move");
                break;
            }
            let waited = self.moves.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(state);
        // A MIGRATE may take longer, and its result is not needed.
        drop(self.thread.take());
    }
}
