//! The executor of moves: who is to move what, which of them may go at the same time, and what became of them.
//!
//! A move is on record from the moment it is accepted, also while it waits: what was asked for is done, whatever
//! happens to this process. The router's mover does a move; here is decided when it begins. It is a thread of its own,
//! because movers end on threads of theirs, and none of them should have to begin another.

mod aborting;
mod accept;
mod colocate;
mod copies;
mod ejecting;
mod host;
mod messages;
mod options;
mod queue;
mod report;
mod resume;
mod strays;

use std::collections::BTreeMap;
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
use switchyard_router::{MoveEnd, MoveTask, Router, Steer};
use tracing::{error, info, warn};

pub(crate) use self::copies::Copies;
use self::options::{OPTIONS, Options, so_far};
use self::queue::{Planned, State, Steering, Wanted};
pub(crate) use self::strays::Strays;
use crate::admin::{MoveReport, MoveState};
use crate::ledger::Ledger;
use crate::placement::Placement;
use crate::running::Running;
use crate::store::{RedbStore, save_json};

pub use messages::{DURABILITIES, name_of, named};

/// The document of the store.
const ENDED: &str = "moves-ended";

/// How often it is noted what clients wait, and whether what failed goes now. What begins and what ends is told.
const SAMPLE: Duration = Duration::from_secs(1);

/// How often what moves have done is kept for the next start.
const KEEP: Duration = Duration::from_secs(2);

/// How data moves, where a move does not say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MovesConfig {
    /// In which way.
    pub how: MoveOptions,
    /// Moves in which a node takes part at once.
    pub per_node_max: usize,
}

impl Default for MovesConfig {
    fn default() -> Self {
        Self { how: MoveOptions::default(), per_node_max: 1 }
    }
}

/// What a reload may change.
#[derive(Debug, Default)]
struct Tuning {
    config: MovesConfig,
    /// How long a node that is checked may take to answer.
    patience: Duration,
}

/// The executor of one fleet's moves. It is one type in several files, because all of it is about one state under one
/// lock: an order that is accepted, steered, begun, reported and ended is the same entry. What needs only that state is
/// in `queue`.
#[derive(Debug)]
pub struct Moves {
    placement: Arc<Placement>,
    running: Arc<Running>,
    store: Arc<RedbStore>,
    ledger: Ledger,
    spool: PathBuf,
    tuning: RwLock<Tuning>,
    state: Mutex<State>,
    /// A mover has told its end.
    mover_ended: Condvar,
    wake: mpsc::Sender<()>,
    woken: Mutex<Option<mpsc::Receiver<()>>>,
    /// The router is told to stop: what ends now goes on after the next start.
    stopping: AtomicBool,
    /// Plans ask nodes and may take long, and keys come home beside them: what holds by then is looked at once more
    /// while a move comes on record, one at a time.
    recording: Mutex<()>,
    /// What is kept of moves that are open is written in the order in which it was looked at. What users say of moves
    /// is heard and told in one order, too.
    keeping: Mutex<()>,
    /// The same of moves that may be on record and are not open: not yet, or no more. A start after a crash takes them
    /// up as they were wanted.
    beside: Arc<Mutex<BTreeMap<MoveId, Options>>>,
    home: colocate::Colocations,
}

/// The thread of the executor.
pub struct MovesThread {
    thread: JoinHandle<()>,
}

impl Moves {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes over what a reload may change.
    pub fn tune(&self, config: &MovesConfig, patience: Duration) {
        *self.tuning.write().unwrap_or_else(PoisonError::into_inner) = Tuning { config: config.clone(), patience };
        self.wake();
    }

    /// Names this state directory at nodes, without telling anything of its secret.
    pub fn site(&self) -> String {
        self.ledger.site()
    }

    /// Moves that are not over.
    pub fn open_ids(&self) -> Vec<MoveId> {
        self.state().open.keys().copied().collect()
    }

    /// One of them in which a node takes part.
    pub(crate) fn involving(&self, node: NodeId) -> Option<MoveId> {
        self.state().open.iter().find(|(_, planned)| planned.order.nodes().contains(&node)).map(|(id, _)| *id)
    }

    /// Those that move something away from a node.
    pub(crate) fn leaving(&self, node: NodeId) -> Vec<MoveId> {
        self.state().open.iter().filter(|(_, planned)| planned.order.source == node).map(|(id, _)| *id).collect()
    }

    /// The keys that they take somewhere without their slots.
    pub(crate) fn open_keys(&self) -> Vec<Arc<[Key]>> {
        self.state().open.values().filter_map(|planned| planned.order.keys.clone()).collect()
    }

    /// What is known of keys that were brought home.
    pub(crate) fn home(&self) -> &colocate::Colocations {
        &self.home
    }

    /// Slots that moves have left at a node: it may show keys of them again.
    pub fn left_at(&self, node: NodeId) -> Vec<Slot> {
        self.ledger.left_at(node)
    }

    fn wake(&self) {
        // If the thread has ended, the router is about to.
        let _ = self.wake.send(());
    }

    /// Starts the thread. The router must serve.
    pub fn start(self: &Arc<Self>) -> anyhow::Result<MovesThread> {
        let woken = self
            .woken
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
            .context("the executor of moves runs already")?;
        let moves = Arc::clone(self);
        let threads = self.running.threads();
        let thread = threads
            .spawn("moves", move || {
                let mut kept = Instant::now();
                while !moves.stopping.load(Ordering::Acquire) {
                    moves.look();
                    if kept.elapsed() >= KEEP {
                        kept = Instant::now();
                        moves.keep_what_is_done();
                        if moves.store.trouble().is_some() {
                            // Whether it succeeds is what the store tells from then on.
                            let _ = moves.store.try_again();
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

    /// Looks at progress, notes what has ended, and begins what may begin.
    fn look(self: &Arc<Self>) {
        let told = self.running.with(|router| {
            router.note_waits();
            router.moves()
        });
        let Some(progress) = told else { return };
        let per_node_max = self.tuning.read().unwrap_or_else(PoisonError::into_inner).config.per_node_max;
        let due = {
            let mut state = self.state();
            state.note(progress);
            state.due(per_node_max)
        };
        due.unwanted.into_iter().for_each(|id| self.end_before_it_begins(id));
        due.ended.into_iter().for_each(|id| self.finish(id));
        due.next.into_iter().for_each(|id| self.begin(id));
    }

    fn begin(self: &Arc<Self>, id: MoveId) {
        let (task, begun_with) = {
            let mut state = self.state();
            let Some(planned) = state.open.get_mut(&id) else { return };
            let (order, steering) = (planned.order.clone(), planned.steering);
            // A mover begins without a pause.
            let begun_with = Wanted { steering: Steering { paused: false, ..steering }, ..planned.wanted() };
            let task = MoveTask {
                id,
                leftovers: self.ledger.left_at(order.target),
                leftovers_at_source: self.ledger.left_at(order.source),
                order,
                aborted: steering.aborting,
                give_up: steering.give_up,
                so_far: planned.so_far,
                databases: planned.databases,
                fingerprints: self.ledger.fingerprints(),
                resume: planned.resume.take(),
                host: Arc::clone(self) as Arc<dyn switchyard_router::Host>,
            };
            (task, begun_with)
        };
        let resume = task.resume.clone();
        let outcome = self.running.with(|router| router.begin_move(task));
        match outcome {
            Some(Ok(())) => {
                info!("move {} has begun: {}", id.0, self.describe(id));
                self.steer_as_wanted(id, begun_with);
            }
            None => {}
            Some(Err(error)) => {
                let why = error.to_string();
                let open_leg = resume.as_ref().is_some_and(|resume| resume.leg.is_some());
                let mut state = self.state();
                let Some(planned) = state.open.get_mut(&id) else { return };
                if error.kind() == io::ErrorKind::InvalidInput && !open_leg {
                    // It will not be right the next time.
                    planned.end = Some(MoveEnd::Stopped(why));
                    drop(state);
                    return self.wake();
                }
                planned.begun = false;
                planned.resume = resume;
                if planned.trouble.as_ref() != Some(&why) {
                    warn!("move {} cannot be begun now, and is tried again: {why}", id.0);
                    planned.trouble = Some(why);
                }
            }
        }
    }

    /// Somebody may have steered the move since its order was made, and nobody heard: the router knew no such move.
    /// `heard` is what the mover knows.
    fn steer_as_wanted(&self, id: MoveId, mut heard: Wanted) {
        loop {
            let Some(wanted) = self.state().open.get(&id).map(Planned::wanted) else { return };
            if wanted == heard {
                return;
            }
            self.running.with(|router| {
                for steer in wanted.since(heard) {
                    // False: the mover has ended already.
                    let _ = router.steer_move(id, steer);
                }
            });
            // What somebody else told it meanwhile may have arrived before this: then the next look sees it.
            heard = wanted;
        }
    }

    /// A mover has said that a move is over.
    fn finish(&self, id: MoveId) {
        let state = self.state();
        let Some(planned) = state.open.get(&id) else { return };
        let Some(end) = &planned.end else { return };
        let mut report = self.report_of(id, planned);
        match end {
            MoveEnd::Done => {
                if let (Some(keys), Cause::Needed(by)) = (&planned.order.keys, &planned.order.cause) {
                    self.home.note_done(keys, by);
                }
                report.state = MoveState::Done;
                report.doing = "done".to_owned();
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
                    self.home.notify(colocate::ColocationEvent::Stopped {
                        keys: Arc::clone(keys),
                        why: format!("move {} has stopped: {why}", id.0),
                    });
                }
                report.state = MoveState::Stopped;
                report.doing.clone_from(why);
                warn!("move {} has stopped: {why}. What was moved stays moved, the rest stays where it was", id.0);
            }
        }
        let options = Options::of(planned);
        drop(state);
        self.close(id, options, report);
    }

    /// Puts a move among those that have ended. Whoever asks finds it there or among those under way.
    fn close(&self, id: MoveId, options: Options, report: MoveReport) {
        self.placement.part(id);
        // One that has stopped does not go on by itself.
        let options = if report.state == MoveState::Done { options } else { options.stopped() };
        self.beside().insert(id, options);
        let ended = {
            let mut state = self.state();
            state.close(id, report);
            state.ended.clone()
        };
        // Before the journal forgets it: a start that finds it in both knows that it is over.
        if let Err(error) = save_json(&*self.store, ENDED, &ended) {
            warn!("the list of moves that have ended cannot be kept: {error}");
        }
        self.take_off_record(id);
        self.save_options();
        self.home.notify(colocate::ColocationEvent::Look);
    }

    /// Takes note of how far moves are.
    fn refresh(&self) {
        let fresh = self.running.with(Router::moves).unwrap_or_default();
        self.state().note(fresh);
    }

    /// Keeps what moves have done, for the next start.
    fn keep_what_is_done(&self) {
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
        self.beside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A move is not to be taken up again. Its options are kept until that is certain.
    fn take_off_record(&self, id: MoveId) {
        let beside = Arc::clone(&self.beside);
        self.ledger.record(
            vec![Record::Ended { move_id: id }],
            Box::new(move |outcome| match outcome {
                Ok(()) => drop(beside.lock().unwrap_or_else(PoisonError::into_inner).remove(&id)),
                Err(why) => {
                    error!("the end of move {} is not on record ({why}): after a restart it is taken up again", id.0)
                }
            }),
        );
    }

    fn in_order(&self) -> MutexGuard<'_, ()> {
        self.keeping.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps what is wanted of moves, as if the user had said this of one of them.
    fn keep(&self, _in_order: &MutexGuard<'_, ()>, but: Option<(MoveId, Steering)>) -> Result<(), String> {
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
        self.keep(&self.in_order(), None)
    }

    fn save_options(&self) {
        self.save_options_in(&self.in_order());
    }

    fn save_options_in(&self, in_order: &MutexGuard<'_, ()>) {
        if let Err(error) = self.keep(in_order, None) {
            warn!("the options of moves cannot be kept: {error}");
        }
    }

    /// Stops what is under way between two legs, within `bound`: it goes on after the next start. The router must still
    /// serve.
    pub fn stop(&self, thread: MovesThread, bound: Duration) {
        self.stopping.store(true, Ordering::Release);
        self.wake();
        self.home.notify(colocate::ColocationEvent::Look);
        if thread.thread.join().is_err() {
            error!("the executor of moves has panicked");
        }
        let begun: Vec<MoveId> =
            self.state().open.iter().filter(|(_, p)| p.begun && p.end.is_none()).map(|(id, _)| *id).collect();
        if begun.is_empty() {
            return;
        }
        info!(
            "under way: {}. Each ends its present leg, and goes on after the next start",
            counted(begun.len(), "move")
        );
        self.running.with(|router| {
            for id in &begun {
                router.steer_move(*id, Steer::Abort);
            }
        });
        let goes_on = |state: &mut State| state.open.values().any(|planned| planned.begun && planned.end.is_none());
        let waited = self.mover_ended.wait_timeout_while(self.state(), bound, goes_on);
        let (state, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        drop(state);
        self.refresh();
        self.keep_what_is_done();
        if !waited.timed_out() {
            return;
        }
        warn!(
            "moves are still under way after {bound:?}: their legs are taken up after the next start, and their keys cannot be used until then"
        );
    }

    /// What a node is called.
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
        let durability = name_of(&DURABILITIES, how.durability);
        drop(state);
        format!("{what} from {} to {}, durability {durability}", self.name(source), self.name(target))
    }
}
