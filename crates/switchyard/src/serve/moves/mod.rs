//! The executor of moves: who is to move what, which of them may go at the same time, and what became of them.
//!
//! A move is on record from the moment it is accepted, also while it waits: what was asked for is done, whatever happens to this process.
//! The router's mover does a move; here is decided when it begins. It is a thread of its own, because movers end on threads of
//! theirs, and none of them should have to begin another.

mod aborting;
mod accept;
mod colocate;
mod direct;
mod drained;
mod host;
mod joining;
mod keys;
mod map;
mod members;
mod report;
mod resp;
mod resume;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::{Deserialize, Serialize};
use switchyard_control::admin::{MoveReport, MoveState};
use switchyard_control::ledger::Ledger;
use switchyard_control::store::{RedbStore, save_as};
use switchyard_policy::migration::record::OpenMove;
use switchyard_policy::migration::{Durability, Goal, Key, Protocol, Record, Side};
use switchyard_policy::topology::{MoveId, NodeId, Slot};
use switchyard_router::{MoveEnd, MoveOrder, MoveProgress, SoFar, Steer};
use tracing::{error, info, warn};

use super::placement::Placement;
use super::running::Running;
use crate::config::{Config, DURABILITIES, MovesConfig, NodeAddress, counted, name_of};

pub(super) use joining::Fleet as Joined;
pub(crate) use members::recall;
pub(super) use members::{MemberChange, Members, ReloadAsk, Remembered, remember};
pub(super) use resp::RespOperator;

/// The documents of the store.
const OPTIONS: &str = "moves-options";
const ENDED: &str = "moves-ended";

/// How many moves that ended are remembered.
const ENDED_MAX: usize = 100;

/// How often progress is looked at.
const LOOK: Duration = Duration::from_millis(250);

/// How often what moves have done is kept for the next start.
const KEEP: Duration = Duration::from_secs(2);

/// What of an order is not in the journal.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Options {
    #[serde(default)]
    direct_clients: bool,
    goal: String,
    max_rate: Option<u64>,
    purge_target: bool,
    paused: bool,
    /// The user wants it to end.
    #[serde(default)]
    aborting: bool,
    /// Without this side, which is lost for good.
    #[serde(default, with = "side_word", skip_serializing_if = "Option::is_none")]
    give_up: Option<Side>,
    /// How many keys were lost with that side, at most, once that was decided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lost: Option<u64>,
    /// What it had done when that was last looked at.
    #[serde(default)]
    so_far: Done,
    /// The pattern by which its keys were chosen, to be shown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pattern: Option<String>,
    /// It was begun because these commands of clients need its keys at home: for how many keys, by the command that needed them first.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    home_for: BTreeMap<String, u64>,
}

/// What a move has done, with the routers before this one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct Done {
    keys: u64,
    bytes: u64,
    pulled: u64,
    repeated: u64,
    seconds: f64,
}

impl Done {
    const fn of(progress: &MoveProgress) -> Self {
        Self {
            keys: progress.keys_moved,
            bytes: progress.bytes_moved,
            pulled: progress.pulled,
            repeated: progress.repeated,
            seconds: progress.seconds,
        }
    }
}

/// A side of a move, as it is kept.
mod side_word {
    use serde::{Deserialize as _, Deserializer, Serializer};
    use switchyard_policy::migration::Side;

    #[expect(clippy::ref_option, reason = "serde asks so")]
    pub(super) fn serialize<S: Serializer>(side: &Option<Side>, serializer: S) -> Result<S::Ok, S::Error> {
        match side {
            Some(Side::Source) => serializer.serialize_some("source"),
            Some(Side::Target) => serializer.serialize_some("target"),
            None => serializer.serialize_none(),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Side>, D::Error> {
        let word = Option::<String>::deserialize(deserializer)?;
        match word.as_deref() {
            None => Ok(None),
            Some("source") => Ok(Some(Side::Source)),
            Some("target") => Ok(Some(Side::Target)),
            Some(other) => Err(serde::de::Error::custom(format!("{other:?} is neither source nor target"))),
        }
    }
}

/// A move that is not over.
#[derive(Debug)]
struct Planned {
    source: NodeId,
    target: NodeId,
    slots: Vec<Slot>,
    /// Only these keys of them.
    keys: Option<Arc<[Key]>>,
    protocol: Protocol,
    durability: Durability,
    options: Options,
    /// A mover has it.
    begun: bool,
    /// Where it stood when the router ended.
    resume: Option<OpenMove>,
    /// Keys that the open leg had away then.
    left_at_start: u64,
    progress: Option<MoveProgress>,
    end: Option<MoveEnd>,
    /// Why it could not be begun the last time.
    trouble: Option<String>,
}

#[derive(Debug, Default)]
struct State {
    open: BTreeMap<MoveId, Planned>,
    ended: VecDeque<MoveReport>,
    /// How many have ended since the start: done, and stopped early.
    done: u64,
    stopped: u64,
}

/// What a reload may change.
#[derive(Debug, Default)]
struct Tuning {
    config: MovesConfig,
    /// By name of the node.
    weights: BTreeMap<String, u32>,
    /// How long a node that is checked may take to answer.
    patience: Duration,
}

#[derive(Debug)]
pub(super) struct Moves {
    placement: Arc<Placement>,
    running: Arc<Running>,
    store: Arc<RedbStore>,
    ledger: Ledger,
    spool: PathBuf,
    tuning: RwLock<Tuning>,
    state: Mutex<State>,
    wake: mpsc::Sender<()>,
    woken: Mutex<Option<mpsc::Receiver<()>>>,
    /// The router is told to stop: what ends now goes on after the next start.
    stopping: AtomicBool,
    members: Members,
    /// One plan at a time of what somebody orders.
    planning: Mutex<()>,
    /// Keys come home beside that, because plans ask nodes and may take long: what holds by then is looked at once more while a move comes on record,
    /// one at a time.
    recording: Mutex<()>,
    /// What is kept of moves that are open is written in the order in which it was looked at.
    keeping: Mutex<()>,
    /// The same of moves that may be on record and are not open: not yet, or no more. A start after a crash takes them up as they were wanted.
    beside: Arc<Mutex<BTreeMap<MoveId, Options>>>,
    drained: drained::Drained,
    home: colocate::Home,
}

/// The thread of the executor.
pub(super) struct MovesThread {
    thread: JoinHandle<()>,
}

impl Moves {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes over what a reload may change.
    pub(super) fn tune(&self, config: &Config, nodes: &[NodeAddress]) {
        let weights = nodes.iter().map(|node| (node.name.clone(), node.weight)).collect();
        *self.tuning.write().unwrap_or_else(PoisonError::into_inner) =
            Tuning { config: config.moves.clone(), weights, patience: config.command_timeout() };
        self.wake();
    }

    /// Names this state directory at nodes, without telling anything of its secret.
    pub(super) fn site(&self) -> String {
        self.ledger.site()
    }

    /// Moves that are not over.
    pub(super) fn has_open(&self) -> bool {
        !self.state().open.is_empty()
    }

    /// Slots that moves have left at a node: it may show keys of them again.
    pub(super) fn left_at(&self, node: NodeId) -> Vec<Slot> {
        self.ledger.left_at(node)
    }

    fn wake(&self) {
        // If the thread has ended, the router is about to.
        let _ = self.wake.send(());
    }

    fn per_node_max(&self) -> usize {
        self.tuning.read().unwrap_or_else(PoisonError::into_inner).config.per_node_max
    }

    /// Starts the thread. The router must serve.
    pub(super) fn start(self: &Arc<Self>) -> anyhow::Result<MovesThread> {
        let woken = self.woken.lock().unwrap_or_else(PoisonError::into_inner).take().context("the executor of moves runs already")?;
        let moves = Arc::clone(self);
        let thread = std::thread::Builder::new()
            .name("moves".to_owned())
            .spawn(move || {
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
                    match woken.recv_timeout(LOOK) {
                        Ok(()) | Err(RecvTimeoutError::Timeout) => while woken.try_recv().is_ok() {},
                        Err(RecvTimeoutError::Disconnected) => return,
                    }
                }
            })
            .context("cannot start a thread")?;
        self.start_home().context("cannot start a thread")?;
        Ok(MovesThread { thread })
    }

    /// Looks at progress, notes what has ended, and begins what may begin.
    fn look(self: &Arc<Self>) {
        let told = self.running.with(|router| {
            router.note_waits();
            router.moves()
        });
        let Some(progress) = told else { return };
        let mut ended = Vec::new();
        let mut unwanted = Vec::new();
        let mut next = Vec::new();
        {
            let mut state = self.state();
            for told in progress {
                if let Some(planned) = state.open.get_mut(&told.id) {
                    planned.progress = Some(told);
                }
            }
            ended.extend(state.open.iter().filter(|(_, planned)| planned.end.is_some()).map(|(id, _)| *id));
            let mut busy: BTreeMap<NodeId, usize> = BTreeMap::new();
            for planned in state.open.values().filter(|planned| planned.begun && planned.end.is_none()) {
                for node in [planned.source, planned.target] {
                    *busy.entry(node).or_default() += 1;
                }
            }
            let max = self.per_node_max();
            for (id, planned) in &mut state.open {
                // A move of which a leg is open goes on whatever the bound says: clients wait for its keys.
                let must = planned.resume.as_ref().is_some_and(|resume| resume.leg.is_some());
                let free = [planned.source, planned.target].iter().all(|node| busy.get(node).copied().unwrap_or(0) < max);
                // The same where clients wait for keys to come home: they would wait for an end that may be hours away.
                let may = (free || !planned.options.home_for.is_empty()) && !planned.options.paused && !planned.options.aborting;
                if planned.options.aborting && !planned.begun && planned.end.is_none() && !must {
                    unwanted.push(*id);
                }
                if planned.begun || planned.end.is_some() || !(must || may) {
                    continue;
                }
                for node in [planned.source, planned.target] {
                    *busy.entry(node).or_default() += 1;
                }
                planned.begun = true;
                next.push(*id);
            }
        }
        unwanted.into_iter().for_each(|id| self.end_before_it_begins(id));
        for id in ended {
            self.finish(id);
        }
        for id in next {
            self.begin(id);
        }
    }

    fn begin(self: &Arc<Self>, id: MoveId) {
        let (order, paused) = {
            let mut state = self.state();
            let Some(planned) = state.open.get_mut(&id) else { return };
            let order = MoveOrder {
                id,
                source: planned.source,
                target: planned.target,
                slots: planned.slots.clone(),
                keys: planned.keys.clone(),
                protocol: planned.protocol,
                durability: planned.durability,
                goal: Goal::ALL.iter().find(|(_, name)| *name == planned.options.goal).map_or(Goal::default(), |(goal, _)| *goal),
                bytes_per_second_max: planned.options.max_rate,
                purge_target: planned.options.purge_target,
                direct_clients: planned.options.direct_clients,
                leftovers: self.ledger.left_at(planned.target),
                leftovers_at_source: self.ledger.left_at(planned.source),
                aborted: planned.options.aborting,
                give_up: planned.options.give_up,
                so_far: {
                    let Done { keys, bytes, pulled, repeated, seconds } = planned.options.so_far;
                    SoFar { keys_moved: keys, bytes_moved: bytes, pulled, repeated, seconds }
                },
                fingerprints: self.ledger.fingerprints(),
                resume: planned.resume.take(),
                host: Arc::clone(self) as Arc<dyn switchyard_router::Host>,
            };
            (order, planned.options.paused)
        };
        let resume = order.resume.clone();
        let outcome = self.running.with(|router| {
            router.begin_move(order)?;
            if paused {
                router.steer_move(id, Steer::Pause);
            }
            Ok::<(), io::Error>(())
        });
        match outcome {
            Some(Ok(())) => {
                info!("move {} has begun: {}", id.0, self.describe(id));
                // Somebody may have aborted it since the order was made.
                let aborted = self.state().open.get(&id).map(|planned| planned.options.clone()).filter(|options| options.aborting);
                if let Some(options) = aborted {
                    self.running.with(|router| router.steer_move(id, options.give_up.map_or(Steer::Abort, Steer::GiveUp)));
                }
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

    /// A mover has said that a move is over.
    fn finish(&self, id: MoveId) {
        let state = self.state();
        let Some(planned) = state.open.get(&id) else { return };
        let Some(end) = &planned.end else { return };
        let mut report = self.report_of(id, planned);
        let colocated = planned.keys.as_ref().filter(|_| !planned.options.home_for.is_empty());
        match end {
            MoveEnd::Done => {
                if let Some(keys) = colocated {
                    self.home.note_done(keys, &planned.options.home_for);
                }
                report.state = MoveState::Done;
                report.doing = "done".to_owned();
                report.percent = 100.0;
                info!("move {} is done: {}, {}", id.0, counted(report.keys_moved, "key"), counted(report.bytes_moved, "byte"));
            }
            MoveEnd::Stopped(why) => {
                if let Some(keys) = colocated {
                    self.home.tell(colocate::Told::Stopped { keys: Arc::clone(keys), why: format!("move {} has stopped: {why}", id.0) });
                }
                report.state = MoveState::Stopped;
                report.doing.clone_from(why);
                warn!("move {} has stopped: {why}. What was moved stays moved, the rest stays where it was", id.0);
            }
        }
        let options = planned.options.clone();
        drop(state);
        self.close(id, options, report);
    }

    /// Puts a move among those that have ended. Whoever asks finds it there or among those under way.
    fn close(&self, id: MoveId, options: Options, report: MoveReport) {
        self.placement.part(id);
        // One that has stopped does not go on by itself.
        let aborting = options.aborting || report.state != MoveState::Done;
        self.beside().insert(id, Options { aborting, ..options });
        self.take_off_record(id);
        let ended: Vec<MoveReport> = {
            let mut state = self.state();
            state.open.remove(&id);
            match report.state {
                MoveState::Done => state.done += 1,
                _ => state.stopped += 1,
            }
            state.ended.push_back(report);
            while state.ended.len() > ENDED_MAX {
                state.ended.pop_front();
            }
            state.ended.iter().cloned().collect()
        };
        if let Err(error) = save_as(&*self.store, ENDED, &ended) {
            warn!("the list of moves that have ended cannot be kept: {error}");
        }
        self.save_options();
        self.home.tell(colocate::Told::Look);
    }

    /// Takes note of how far moves are.
    fn refresh(&self) {
        let fresh = self.running.with(switchyard_router::Router::moves).unwrap_or_default();
        let mut state = self.state();
        for told in fresh {
            if let Some(planned) = state.open.get_mut(&told.id) {
                planned.progress = Some(told);
            }
        }
    }

    /// Keeps what moves have done, for the next start.
    fn keep_what_is_done(&self) {
        let mut is_new = false;
        for planned in self.state().open.values_mut() {
            if let Some(progress) = &planned.progress {
                let done = Done::of(progress);
                is_new |= done.keys != planned.options.so_far.keys || done.bytes != planned.options.so_far.bytes;
                planned.options.so_far = done;
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
                Err(why) => error!("the end of move {} is not on record ({why}): after a restart it is taken up again", id.0),
            }),
        );
    }

    fn try_save_options(&self) -> Result<(), String> {
        let _in_order = self.keeping.lock().unwrap_or_else(PoisonError::into_inner);
        let options: BTreeMap<u64, Options> = {
            let state = self.state();
            let open = state.open.iter().map(|(id, planned)| (id.0, planned.options.clone()));
            open.chain(self.beside().iter().map(|(id, options)| (id.0, options.clone()))).collect()
        };
        save_as(&*self.store, OPTIONS, &options).map_err(|error| error.to_string())
    }

    fn save_options(&self) {
        if let Err(error) = self.try_save_options() {
            warn!("the options of moves cannot be kept: {error}");
        }
    }

    /// Stops what is under way between two legs, within `bound`: it goes on after the next start. The router must still serve.
    pub(super) fn stop(&self, thread: MovesThread, bound: Duration) {
        self.stopping.store(true, Ordering::Release);
        self.wake();
        if thread.thread.join().is_err() {
            error!("the executor of moves has panicked");
        }
        let begun: Vec<MoveId> = self.state().open.iter().filter(|(_, p)| p.begun && p.end.is_none()).map(|(id, _)| *id).collect();
        if begun.is_empty() {
            return;
        }
        info!("under way: {}. Each ends its present leg, and goes on after the next start", counted(begun.len(), "move"));
        self.running.with(|router| {
            for id in &begun {
                router.steer_move(*id, Steer::Abort);
            }
        });
        let deadline = Instant::now() + bound;
        let is_over = || self.state().open.values().all(|planned| !planned.begun || planned.end.is_some());
        while !is_over() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        self.refresh();
        self.keep_what_is_done();
        if is_over() {
            return;
        }
        warn!(
            "moves are still under way after {bound:?}: their legs are taken up after the next start, and their keys cannot be used until then"
        );
    }

    fn name(&self, node: NodeId) -> String {
        let topology = self.placement.topology();
        let name = topology.as_ref().and_then(|t| t.node(node)).map(|node| node.name.clone());
        name.unwrap_or_else(|| format!("node number {}", node.0))
    }

    fn describe(&self, id: MoveId) -> String {
        let state = self.state();
        let Some(planned) = state.open.get(&id) else { return String::new() };
        let (source, target, slots) = (planned.source, planned.target, planned.slots.len());
        let slots = counted(slots, "slot");
        let what = planned.keys.as_ref().map_or_else(|| slots.clone(), |keys| format!("{} of {slots}", counted(keys.len(), "key")));
        let durability = name_of(&DURABILITIES, planned.durability);
        drop(state);
        format!("{what} from {} to {}, durability {durability}", self.name(source), self.name(target))
    }
}
