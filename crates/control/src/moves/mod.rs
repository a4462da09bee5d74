//! The executor of moves: queues moves, decides which may run at the same time, and stores their results.
//!
//! A move is on record from its acceptance, even while it is queued, so it is performed despite crashes. The router's
//! mover performs a move; the executor decides when it starts. A thread of its own, because movers end on their own
//! threads, and none of them should have to start another.

mod aborting;
mod accept;
mod colocate;
mod colocation_report;
mod copies;
mod ejecting;
mod ended;
mod host;
mod messages;
mod misplaced;
mod options;
#[cfg(feature = "research")]
mod published;
mod queue;
mod report;
mod resume;
#[cfg(not(feature = "research"))]
mod unpublished;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use switchyard_policy::migration::{Cause, Key, MoveOptions, MoveOrder, Record};
use switchyard_policy::topology::{MoveId, NodeId, Slot};
use switchyard_resp::units::counted;
use switchyard_router::{MoveEnd, MoveTask, UserRequest};
use tracing::{error, info, warn};

pub(crate) use self::accept::{RulesChange, check_size};
pub(crate) use self::colocate::ColocationPause;
pub(crate) use self::copies::CopyRemoval;
use self::ended::{ENDED, EndedMove};
pub(crate) use self::misplaced::MisplacedKeys;
use self::options::{OPTIONS, Options, so_far};
use self::queue::{MoverSettings, Planned, State, Steering};
pub(crate) use self::report::add_state_metrics;
#[cfg(not(feature = "research"))]
use self::unpublished as published;
pub(crate) use published::source_ops_max;

use crate::admin::{MoveReport, MoveState};
use crate::ledger::Ledger;
use crate::members::Drained;
use crate::placement::Placement;
use crate::running::Running;
use crate::store::{RedbStore, save_json};

pub(crate) use messages::NO_RESEARCH;
pub use messages::{DURABILITIES, keyword_of, parse_keyword};

/// Store document of ended moves.
const SAMPLE: Duration = Duration::from_secs(1);

/// Interval between saves of the moves' progress, for the next start.
const KEEP: Duration = Duration::from_secs(2);

/// Default options of moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MovesConfig {
    /// Options of a move that does not override them.
    pub how: MoveOptions,
    /// Maximum number of simultaneous moves per node.
    pub per_node_max: usize,
}

impl Default for MovesConfig {
    fn default() -> Self {
        Self { how: MoveOptions::default(), per_node_max: 1 }
    }
}

/// Settings that a reload can change.
#[derive(Debug, Default)]
struct Tuning {
    config: MovesConfig,
    /// Timeout for the reply of a checked node.
    timeout: Duration,
}

/// Executor of one fleet's moves. One type in several files, because everything concerns one state under one lock: an
/// order that is accepted, steered, started, reported and ended is the same entry. `queue` contains the parts that need
/// only that state.
#[derive(Debug)]
pub struct Moves {
    placement: Arc<Placement>,
    running: Arc<Running>,
    store: Arc<RedbStore>,
    ledger: Ledger,
    spool: PathBuf,
    tuning: RwLock<Tuning>,
    state: Mutex<State>,
    /// Signalled when a mover has ended.
    mover_ended: Condvar,
    wake: mpsc::Sender<()>,
    woken: Mutex<Option<mpsc::Receiver<()>>>,
    /// The router is stopping: moves that end now continue after the next start.
    stopping: AtomicBool,
    /// Serializes recording. Planning queries nodes and may take long, and colocation records moves in parallel, so
    /// preconditions are checked again under this lock.
    recording: Mutex<()>,
    /// Serializes saving the options of open moves, in the order in which they were read. Also keeps operators'
    /// requests and their effects on movers in one order.
    keeping: Mutex<()>,
    /// Options of moves that may be on record and are not open: not yet, or no longer. A start after a crash resumes
    /// them with these options.
    unopened_options: Arc<Mutex<BTreeMap<MoveId, Options>>>,
    /// The stored list of ended moves lacks some that clients waited for.
    has_unsaved_ends: AtomicBool,
    colocations: colocate::Colocations,
    /// Drained nodes, to which no keys are brought.
    drained: Arc<Drained>,
}

/// Thread of the executor.
pub struct MovesThread {
    thread: JoinHandle<()>,
}

impl Moves {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies settings that a reload can change.
    pub fn tune(&self, config: &MovesConfig, timeout: Duration) {
        *self.tuning.write().unwrap_or_else(PoisonError::into_inner) = Tuning { config: config.clone(), timeout };
        self.wake();
    }

    /// Identifies this state directory at nodes, without disclosing its secret.
    pub fn site(&self) -> String {
        self.ledger.site()
    }

    /// Moves that have not ended.
    pub fn open_ids(&self) -> Vec<MoveId> {
        self.state().open.keys().copied().collect()
    }

    /// Moves of slots that have not ended. During an adoption of rules all of them are part of it.
    pub(crate) fn open_moves_of_slots(&self) -> Vec<MoveId> {
        let state = self.state();
        state.open.iter().filter(|(_, planned)| planned.order.keys.is_none()).map(|(id, _)| *id).collect()
    }

    /// An open move that involves the node.
    pub(crate) fn involving(&self, node: NodeId) -> Option<MoveId> {
        self.state().open.iter().find(|(_, planned)| planned.order.nodes().contains(&node)).map(|(id, _)| *id)
    }

    /// Open moves away from a node.
    pub(crate) fn leaving(&self, node: NodeId) -> Vec<MoveId> {
        self.state().open.iter().filter(|(_, planned)| planned.order.source == node).map(|(id, _)| *id).collect()
    }

    /// Keys that open moves transfer without their slots.
    pub(crate) fn open_keys(&self) -> Vec<Arc<[Key]>> {
        self.state().open.values().filter_map(|planned| planned.order.keys.clone()).collect()
    }

    /// Drained nodes.
    pub(crate) fn drained(&self) -> &Arc<Drained> {
        &self.drained
    }

    /// Nodes of open moves that no command waits for.
    pub(crate) fn nodes_of_long_moves(&self) -> BTreeSet<NodeId> {
        let state = self.state();
        let long = state.open.values().filter(|planned| planned.order.needed_keys().is_none());
        long.flat_map(|planned| planned.order.nodes()).collect()
    }

    /// Slots that take part in open moves.
    pub(crate) fn open_slots(&self) -> BTreeSet<Slot> {
        self.state().open.values().flat_map(|planned| planned.order.slots.iter().copied()).collect()
    }

    /// State of colocation.
    pub(crate) fn colocations(&self) -> &colocate::Colocations {
        &self.colocations
    }

    /// Slots that moves have left at a node, whose keys may reappear there.
    pub fn left_at(&self, node: NodeId) -> Vec<Slot> {
        self.ledger.leftover_slots(node)
    }

    fn wake(&self) {
        // Sending fails only if the thread has ended because the router is about to stop.
        let _ = self.wake.send(());
    }

    /// Starts the thread. The router must be serving.
    pub fn start(self: &Arc<Self>) -> anyhow::Result<MovesThread> {
        let woken = self
            .woken
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
            .context("the executor of moves is already running")?;
        let moves = Arc::clone(self);
        let threads = self.running.threads();
        let thread = threads
            .spawn("moves", move || {
                let mut kept = Instant::now();
                while !moves.stopping.load(Ordering::Acquire) {
                    moves.advance();
                    if kept.elapsed() >= KEEP {
                        kept = Instant::now();
                        moves.save_progress();
                        moves.save_unsaved_ends();
                        if moves.store.trouble().is_some() {
                            // The store reports later failures itself.
                            let _ = moves.store.retry_write();
                        }
                    }
                    match woken.recv_timeout(SAMPLE) {
                        Ok(()) | Err(RecvTimeoutError::Timeout) => while woken.try_recv().is_ok() {},
                        Err(RecvTimeoutError::Disconnected) => return,
                    }
                }
            })
            .context("cannot start a thread")?;
        colocate::start(self).context("cannot start a thread")?;
        Ok(MovesThread { thread })
    }

    /// Reads progress, finishes ended moves, and starts queued ones.
    fn advance(self: &Arc<Self>) {
        let open = self.open_ids();
        let told = self.running.with(|router| {
            router.note_waits();
            router.close_unused_mover_connections();
            router.progress_of(&open)
        });
        let Some(progress) = told else { return };
        let per_node_max = self.tuning.read().unwrap_or_else(PoisonError::into_inner).config.per_node_max;
        let due = {
            let mut state = self.state();
            state.note(progress);
            state.due(per_node_max)
        };
        due.aborted.into_iter().for_each(|id| self.end_unstarted(id));
        due.ended.into_iter().for_each(|id| self.finish(id));
        due.next.into_iter().for_each(|id| self.begin(id));
    }

    fn begin(self: &Arc<Self>, id: MoveId) {
        let (task, begun_with) = {
            let mut state = self.state();
            let Some(planned) = state.open.get_mut(&id) else { return };
            let (order, steering) = (planned.order.clone(), planned.steering);
            // A mover always starts unpaused.
            let begun_with = MoverSettings { steering: Steering { paused: false, ..steering }, ..planned.wanted() };
            let task = MoveTask {
                id,
                leftovers: self.ledger.leftover_slots(order.target),
                leftovers_at_source: self.ledger.leftover_slots(order.source),
                order,
                aborted: steering.aborting,
                give_up: steering.give_up,
                so_far: planned.so_far,
                databases: planned.databases,
                fingerprints: self.ledger.fingerprinter(),
                resume: planned.resume.take(),
                host: Arc::clone(self) as Arc<dyn switchyard_router::Host>,
            };
            (task, begun_with)
        };
        let resume = task.resume.clone();
        let outcome = self.running.with(|router| router.begin_move(task));
        match outcome {
            Some(Ok(())) => {
                info!("move {} has started: {}", id.0, self.describe(id));
                self.apply_steering(id, begun_with);
            }
            None => {}
            Some(Err(error)) => {
                let why = error.to_string();
                let open_leg = resume.as_ref().is_some_and(|resume| resume.leg.is_some());
                let mut state = self.state();
                let Some(planned) = state.open.get_mut(&id) else { return };
                if error.kind() == io::ErrorKind::InvalidInput && !open_leg {
                    // A retry cannot succeed.
                    planned.end = Some(MoveEnd::Stopped(why));
                    drop(state);
                    return self.wake();
                }
                planned.begun = false;
                planned.resume = resume;
                if planned.trouble.as_ref() != Some(&why) {
                    warn!("move {} cannot be started now, and will be retried: {why}", id.0);
                    planned.trouble = Some(why);
                }
            }
        }
    }

    /// Repeats changes that an operator made since the order was read: the router did not know the move then. `heard`
    /// is the state that the mover knows.
    fn apply_steering(&self, id: MoveId, mut heard: MoverSettings) {
        loop {
            let Some(wanted) = self.state().open.get(&id).map(Planned::wanted) else { return };
            if wanted == heard {
                return;
            }
            self.running.with(|router| {
                for steer in wanted.since(heard) {
                    // False if the mover has already ended.
                    let _ = router.steer_move(id, steer);
                }
            });
            // Concurrent changes may have reached the mover earlier; then the next iteration sees them.
            heard = wanted;
        }
    }

    /// Closes a move after its mover has reported the end.
    fn finish(&self, id: MoveId) {
        let state = self.state();
        let Some(planned) = state.open.get(&id) else { return };
        let Some(end) = &planned.end else { return };
        let mut report = self.report_of(id, planned);
        match end {
            MoveEnd::Done => {
                if let (Some(keys), Cause::Needed(by)) = (&planned.order.keys, &planned.order.cause) {
                    self.colocations.note_done(keys, by);
                }
                report.state = MoveState::Done;
                report.activity = "done".to_owned();
                report.percent = 100.0;
                info!(
                    "move {} is done: {}, {}",
                    id.0,
                    counted(report.keys_moved, "key"),
                    counted(report.bytes_moved, "byte")
                );
            }
            MoveEnd::Stopped(why) => {
                if let Some(keys) = planned.order.needed_keys() {
                    self.colocations.notify(colocate::ColocationEvent::Stopped {
                        keys: Arc::clone(keys),
                        why: format!("move {} has stopped: {why}", id.0),
                    });
                }
                report.state = MoveState::Stopped;
                report.activity.clone_from(why);
                warn!(
                    "move {} has stopped: {why}. Moved slots and keys stay at the target, the others at the source",
                    id.0
                );
            }
        }
        let options = Options::of(planned);
        drop(state);
        self.close(id, options, report);
    }

    /// Moves an open move to the ended ones. Readers find it in either list at any time.
    fn close(&self, id: MoveId, options: Options, report: MoveReport) {
        self.placement.release_nodes(id);
        // A stopped move must not resume by itself.
        let options = if report.state == MoveState::Done { options } else { options.stopped() };
        self.beside().insert(id, options);
        let is_deferred = {
            let mut state = self.state();
            // After a crash such a move is open with nothing left to move, and ends again.
            let is_deferred = report.state == MoveState::Done
                && state.open.get(&id).is_some_and(|planned| planned.order.needed_keys().is_some());
            state.close(id, report);
            is_deferred
        };
        if is_deferred {
            self.has_unsaved_ends.store(true, Ordering::Release);
            self.record_end(id);
        } else {
            // Before the journal removes it: a start that finds the move in both places treats it as ended.
            self.save_ended();
            self.record_end(id);
            self.save_options();
        }
        self.colocations.notify(colocate::ColocationEvent::Look);
    }

    /// Saves the list of ended moves. Returns whether that succeeded.
    fn save_ended(&self) -> bool {
        let ended: Vec<EndedMove> = self.state().ended.iter().cloned().map(EndedMove::from).collect();
        let outcome = save_json(&*self.store, ENDED, &ended);
        if let Err(error) = &outcome {
            warn!("the list of ended moves cannot be stored: {error}");
        }
        outcome.is_ok()
    }

    /// Saves the ends of moves that clients waited for. Many of these moves may end in a second, so they share a write.
    fn save_unsaved_ends(&self) {
        if self.has_unsaved_ends.swap(false, Ordering::AcqRel) {
            let is_saved = self.save_ended();
            self.has_unsaved_ends.fetch_or(!is_saved, Ordering::AcqRel);
            self.save_options();
        }
    }

    /// Updates the progress of moves.
    fn refresh(&self) {
        let open = self.open_ids();
        let fresh = self.running.with(|router| router.progress_of(&open)).unwrap_or_default();
        self.state().note(fresh);
    }

    /// Saves the progress of moves for the next start.
    fn save_progress(&self) {
        let mut is_new = false;
        for planned in self.state().open.values_mut() {
            if let Some(progress) = &planned.progress {
                let done = so_far(progress);
                is_new |=
                    (done.keys_moved, done.bytes_moved) != (planned.so_far.keys_moved, planned.so_far.bytes_moved);
                planned.so_far = done;
            }
        }
        if is_new {
            self.save_options();
        }
    }

    fn beside(&self) -> MutexGuard<'_, BTreeMap<MoveId, Options>> {
        self.unopened_options.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a move must not be resumed. Its options are stored until the record is durable.
    fn record_end(&self, id: MoveId) {
        let beside = Arc::clone(&self.unopened_options);
        self.ledger.record(
            vec![Record::Ended { move_id: id }],
            Box::new(move |outcome| match outcome {
                Ok(()) => drop(beside.lock().unwrap_or_else(PoisonError::into_inner).remove(&id)),
                Err(why) => {
                    error!("the end of move {} is not on record ({why}): it resumes after a restart", id.0)
                }
            }),
        );
    }

    fn in_order(&self) -> MutexGuard<'_, ()> {
        self.keeping.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores the options of all moves, with a changed steering for one of them.
    fn save_all_options(&self, _in_order: &MutexGuard<'_, ()>, but: Option<(MoveId, Steering)>) -> Result<(), String> {
        let options: BTreeMap<u64, Options> = {
            let state = self.state();
            let steering = |id: MoveId, planned: &Planned| {
                but.filter(|(of, _)| *of == id).map_or(planned.steering, |(_, steering)| steering)
            };
            let open = state.open.iter().map(|(id, planned)| (id.0, Options::steered(planned, steering(*id, planned))));
            open.chain(self.beside().iter().map(|(id, options)| (id.0, options.clone()))).collect()
        };
        save_json(&*self.store, OPTIONS, &options).map_err(|error| error.to_string())
    }

    fn try_save_options(&self) -> Result<(), String> {
        self.save_all_options(&self.in_order(), None)
    }

    fn save_options(&self) {
        self.save_options_in(&self.in_order());
    }

    fn save_options_in(&self, in_order: &MutexGuard<'_, ()>) {
        if let Err(error) = self.save_all_options(in_order, None) {
            warn!("the options of moves cannot be stored: {error}");
        }
    }

    /// Stops running moves between two legs, within `bound`. They continue after the next start. The router must still
    /// be serving.
    pub fn stop(&self, thread: MovesThread, bound: Duration) {
        self.stopping.store(true, Ordering::Release);
        self.wake();
        self.colocations.notify(colocate::ColocationEvent::Look);
        if thread.thread.join().is_err() {
            error!("the executor of moves has panicked");
        }
        self.save_unsaved_ends();
        let begun: Vec<MoveId> =
            self.state().open.iter().filter(|(_, p)| p.begun && p.end.is_none()).map(|(id, _)| *id).collect();
        if begun.is_empty() {
            return;
        }
        info!(
            "in progress: {}. Each ends its current leg, and continues after the next start",
            counted(begun.len(), "move")
        );
        self.running.with(|router| {
            for id in &begun {
                router.steer_move(*id, UserRequest::Abort);
            }
        });
        let goes_on = |state: &mut State| state.open.values().any(|planned| planned.begun && planned.end.is_none());
        let waited = self.mover_ended.wait_timeout_while(self.state(), bound, goes_on);
        let (state, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        drop(state);
        self.refresh();
        self.save_progress();
        if !waited.timed_out() {
            return;
        }
        warn!(
            "moves are still in progress after {bound:?}: their legs resume after the next start, and their keys cannot be used until then"
        );
    }

    /// Name of a node.
    pub(crate) fn name(&self, node: NodeId) -> String {
        let topology = self.placement.topology();
        let name = topology.as_ref().and_then(|t| t.node(node)).map(|node| node.name.clone());
        name.unwrap_or_else(|| format!("node number {}", node.0))
    }

    fn describe(&self, id: MoveId) -> String {
        let state = self.state();
        let Some(planned) = state.open.get(&id) else { return String::new() };
        let MoveOrder { source, target, how, .. } = planned.order;
        let slots = counted(planned.order.slots.len(), "slot");
        let what = planned
            .order
            .keys
            .as_ref()
            .map_or_else(|| slots.clone(), |keys| format!("{} of {slots}", counted(keys.len(), "key")));
        let durability = keyword_of(&DURABILITIES, how.durability);
        drop(state);
        format!("{what} from {} to {}, durability {durability}", self.name(source), self.name(target))
    }
}
