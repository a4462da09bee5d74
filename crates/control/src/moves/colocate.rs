//! Brings keys to one node when a client's command needs them together.
//!
//! Workers report the keys that their clients wait for. This thread starts moves for them as an operator would:
//! recorded, and with the same checks. A request for keys in transit joins the clients that wait for them. A thread of
//! its own, because recording a move blocks, and neither a worker nor the executor may wait for that. The checks query
//! nodes, so each pair of nodes is checked on another thread: a node without replies delays only its own moves.
//!
//! When the keys of a request are together, they stay there until its client has used them, but not longer than [`PIN`].
//! Otherwise commands with common keys could take these from each other before any of them is executed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use switchyard_policy::colocate::{self, Colocation, ColocationRequest, ColocationStatus, Fleet, Open, RecentGroups};
use switchyard_policy::migration::{Cause, Key, MoveOptions, MoveOrder};
use switchyard_policy::topology::{MoveId, NodeId, Slot, Topology};
use switchyard_resp::units::counted;
use switchyard_router::{ColocatePort, ColocateRequest, Link, Router};
use tracing::info;

use super::Moves;
use super::colocation_report::{ColocatorState, GroupState, Refusals};
use super::queue::Planned;
use crate::admin::{
    ColocationReport, ColocationWaitReport, MoveOptionsRequest, OperationError, ReturnedKeysReport, conflict,
};

/// Interval between checks of the nodes that waiting clients need. Moves report their changes themselves.
const HEALTH: Duration = Duration::from_millis(250);

/// Validity of a check of a pair of nodes. Several moves may use a result, since each move verifies its own connections.
const FRESH: Duration = Duration::from_secs(2);

/// Maximum time for which keys stay at the node to which they were brought, until their client has used them. A worker
/// adopts a topology and sends the command within a few milliseconds.
const PIN: Duration = Duration::from_millis(50);

/// Interval between checks whether such clients have used their keys, while others wait.
const PIN_CHECK: Duration = Duration::from_millis(2);

/// How long a moved key is remembered, for warnings.
const WARN_PERIOD: Duration = Duration::from_secs(3600);

/// Interval between removals of old keys.
const SWEEP_INTERVAL: Duration = Duration::from_secs(60);

/// Maximum number of remembered keys.
const REMEMBERED_MAX: usize = 65_536;

/// Events of the thread.
#[derive(Debug)]
pub(super) enum ColocationEvent {
    /// A client waits for keys.
    Request(ColocateRequest),
    /// A move has started, was steered, has handed keys over, or has ended.
    Look,
    /// A colocation move has ended early.
    Stopped { keys: Arc<[Key]>, why: String },
    /// Result of checking both nodes: whether keys may move from the first to the second.
    Checked { between: Pair, outcome: Result<(), OperationError> },
    /// An operator queries the state of the thread.
    Report(mpsc::SyncSender<ColocatorState>),
}

/// Source and target.
type Pair = (NodeId, NodeId);

/// Check of a pair of nodes.
#[derive(Debug)]
enum Check {
    Running(JoinHandle<()>),
    Done(Instant, Result<(), OperationError>),
}

/// Maximum wait of an operation for the end of moves that commands need.
const PAUSE: Duration = Duration::from_secs(10);

/// Statistics of moved keys, and the channel to the thread.
#[derive(Debug)]
pub(crate) struct Colocations {
    /// Number of operations during which no such move starts. The thread holds the lock while it starts moves.
    pauses: Mutex<usize>,
    sender: mpsc::Sender<ColocationEvent>,
    receiver: Mutex<Option<mpsc::Receiver<ColocationEvent>>>,
    tally: Mutex<Tally>,
}

#[derive(Debug, Default)]
struct Tally {
    /// Number of keys, by the command that needed them.
    keys: BTreeMap<String, u64>,
    /// Keys, with the time of their move and the commands that needed them.
    remembered: BTreeMap<Key, (Instant, Arc<str>)>,
    /// Time at which old keys were last removed.
    swept: Option<Instant>,
}

impl Default for Colocations {
    fn default() -> Self {
        let (tell, told) = mpsc::channel();
        Self { pauses: Mutex::default(), sender: tell, receiver: Mutex::new(Some(told)), tally: Mutex::default() }
    }
}

impl Colocations {
    pub(super) fn notify(&self, what: ColocationEvent) {
        // Sending fails if the thread has ended because the router is about to stop. Dropping the request notifies its
        // client.
        drop(self.sender.send(what));
    }

    /// Whether an operation is in progress that requires that no move is.
    pub(crate) fn are_paused(&self) -> bool {
        *self.pauses() > 0
    }

    fn pauses(&self) -> MutexGuard<'_, usize> {
        self.pauses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tally(&self) -> MutexGuard<'_, Tally> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that keys were brought to a node.
    pub(super) fn note_done(&self, keys: &[Key], home_for: &BTreeMap<String, u64>) {
        let commands: Arc<str> = home_for.keys().map(String::as_str).collect::<Vec<_>>().join(", ").into();
        let mut tally = self.tally();
        for (command, keys) in home_for {
            *tally.keys.entry(command.clone()).or_default() += keys;
        }
        let now = Instant::now();
        if tally.swept.is_none_or(|swept| now - swept >= SWEEP_INTERVAL) {
            tally.swept = Some(now);
            tally.remembered.retain(|_, (since, _)| now - *since < WARN_PERIOD);
        }
        for key in keys {
            if tally.remembered.len() < REMEMBERED_MAX || tally.remembered.contains_key(key) {
                tally.remembered.insert(Arc::clone(key), (now, Arc::clone(&commands)));
            }
        }
    }

    /// Returns the keys that were brought to others within [`WARN_PERIOD`], with the times of their moves and the
    /// commands, the latest first.
    pub(super) fn latest(&self) -> Vec<(Instant, Key, Arc<str>)> {
        let tally = self.tally();
        let is_new = |since: &Instant| since.elapsed() < WARN_PERIOD;
        let remembered = tally.remembered.iter().filter(|(_, (since, _))| is_new(since));
        let mut latest: Vec<_> =
            remembered.map(|(key, (since, commands))| (*since, Arc::clone(key), Arc::clone(commands))).collect();
        drop(tally);
        latest.sort_by(|(one, ..), (other, ..)| other.cmp(one));
        latest
    }

    /// Number of moved keys, by command.
    pub(super) fn report(&self) -> Vec<ReturnedKeysReport> {
        report_of(&self.tally().keys)
    }

    /// Returns a warning for an operator who moves these keys away again.
    pub(crate) fn warning(&self, keys: &[Key]) -> Option<String> {
        let tally = self.tally();
        let lately: Vec<&(Instant, Arc<str>)> = keys
            .iter()
            .filter_map(|key| tally.remembered.get(key))
            .filter(|(since, _)| since.elapsed() < WARN_PERIOD)
            .collect();
        let commands: BTreeSet<&str> = lately.iter().flat_map(|(_, commands)| commands.split(", ")).collect();
        (!lately.is_empty()).then(|| {
            format!(
                "{} of these keys were brought to other keys within the last hour because clients need them together ({}), and will be again when needed \
                 (moves.colocate-timeout)",
                lately.len(),
                commands.into_iter().collect::<Vec<_>>().join(", ")
            )
        })
    }
}

/// Converts the counts to a report.
pub(super) fn report_of(keys: &BTreeMap<String, u64>) -> Vec<ReturnedKeysReport> {
    keys.iter().map(|(command, keys)| ReturnedKeysReport { command: command.clone(), keys: *keys }).collect()
}

/// While this exists, no move starts because commands need keys together. The commands wait.
#[must_use]
pub(crate) struct ColocationPause<'a>(&'a Colocations);

impl Drop for ColocationPause<'_> {
    fn drop(&mut self) {
        *self.0.pauses() -= 1;
        self.0.notify(ColocationEvent::Look);
    }
}

impl Moves {
    /// Pauses moves that commands need, and waits for the end of those in progress. For operations that require that no
    /// move is in progress: under load, such moves would follow each other.
    pub(crate) fn pause_colocations(&self) -> ColocationPause<'_> {
        *self.colocations.pauses() += 1;
        let pause = ColocationPause(&self.colocations);
        let since = Instant::now();
        let is_open = |planned: &Planned| planned.order.needed_keys().is_some() && !planned.steering.paused;
        while self.state().open.values().any(is_open) && since.elapsed() < PAUSE {
            std::thread::sleep(PIN_CHECK);
        }
        pause
    }
}

impl ColocatePort for Moves {
    fn colocate(&self, request: ColocateRequest) {
        self.colocations.notify(ColocationEvent::Request(request));
    }
}

/// A waiting client.
#[derive(Debug)]
struct Waiting {
    request: ColocateRequest,
    since: Instant,
}

impl Waiting {
    fn until(&self) -> Instant {
        self.since + self.request.timeout()
    }

    fn is_over(&self, now: Instant) -> bool {
        self.until() <= now || self.request.wait().strong_count() == 0
    }
}

/// Keys that a client is about to use.
#[derive(Debug)]
struct Pin {
    slots: BTreeSet<Slot>,
    until: Instant,
    wait: Weak<()>,
}

fn refuse(refusals: &mut Refusals, waiting: impl IntoIterator<Item = Waiting>, why: &str) {
    for w in waiting {
        refusals.note(&w.request, why);
        w.request.refuse(why);
    }
}

/// Starts the thread, which ends when the router stops.
pub(super) fn start(moves: &Arc<Moves>) -> std::io::Result<()> {
    let told = moves.colocations.receiver.lock().unwrap_or_else(PoisonError::into_inner).take();
    let Some(told) = told else { return Ok(()) };
    let colocator = Colocator {
        moves: Arc::clone(moves),
        began: Instant::now(),
        waiting: Vec::new(),
        pins: Vec::new(),
        recent: RecentGroups::default(),
        refusals: Refusals::default(),
        checks: BTreeMap::new(),
    };
    moves.running.threads().spawn("colocate", move || colocator.run(&told))?;
    Ok(())
}

struct Colocator {
    moves: Arc<Moves>,
    /// Zero of the times of `recent`.
    began: Instant,
    /// Longest waiting first.
    waiting: Vec<Waiting>,
    pins: Vec<Pin>,
    recent: RecentGroups,
    refusals: Refusals,
    checks: BTreeMap<Pair, Check>,
}

impl Colocator {
    fn run(mut self, told: &mpsc::Receiver<ColocationEvent>) {
        while !self.moves.stopping.load(Ordering::Acquire) {
            let soonest = self.waiting.iter().map(|w| w.until().saturating_duration_since(Instant::now())).min();
            let interval = if self.pins.is_empty() { HEALTH } else { PIN_CHECK };
            let first = match soonest {
                None => told.recv().ok(),
                Some(soonest) => told.recv_timeout(soonest.min(interval)).ok(),
            };
            for what in first.into_iter().chain(told.try_iter()) {
                match what {
                    ColocationEvent::Request(request) => self.add(request),
                    ColocationEvent::Look => {}
                    ColocationEvent::Stopped { keys, why } => {
                        let placement = self
                            .moves
                            .placement
                            .topology()
                            .map(|topology| topology.placement().clone())
                            .unwrap_or_default();
                        let waiting = self.waiting.extract_if(.., |w| w.request.wanted().concerns(&placement, &keys));
                        refuse(&mut self.refusals, waiting, &why);
                    }
                    ColocationEvent::Checked { between, outcome } => {
                        self.checks.insert(between, Check::Done(Instant::now(), outcome));
                    }
                    // Sending fails if the operator waits no more.
                    ColocationEvent::Report(reply) => drop(reply.try_send(self.state())),
                }
            }
            let now = Instant::now();
            // Their workers have already replied to the clients, or have sent the commands.
            for w in self.waiting.extract_if(.., |w| w.is_over(now)) {
                if w.request.wait().strong_count() > 0 {
                    self.refusals.note(&w.request, "the time is over (moves.colocate-timeout)");
                }
                w.request.done();
            }
            self.pins.retain(|pin| now < pin.until && pin.wait.strong_count() > 0);
            self.checks.retain(|_, check| match check {
                // The thread has delivered its result, or has panicked.
                Check::Running(thread) => !thread.is_finished(),
                Check::Done(at, _) => at.elapsed() < FRESH,
            });
            if !self.waiting.is_empty() {
                self.start_colocations();
            }
        }
    }

    /// State for the report.
    fn state(&self) -> ColocatorState {
        let now_ms = self.now_ms();
        let group = |(at_ms, keys): (u64, &BTreeSet<Key>)| {
            GroupState::new(Duration::from_millis(now_ms.saturating_sub(at_ms)), keys)
        };
        let waiting = |w: &Waiting| ColocationWaitReport {
            command: w.request.command().to_owned(),
            keys: w.request.wanted().key_count().map(|keys| keys as u64),
            seconds: w.since.elapsed().as_secs(),
        };
        let listed = ColocationReport::LISTED_MAX;
        ColocatorState {
            groups: (self.recent.latest().take(listed).map(group).collect(), self.recent.latest().count()),
            waiting: (self.waiting.iter().take(listed).map(waiting).collect(), self.waiting.len()),
            refusals: self.refusals.clone(),
        }
    }

    /// Time of `recent`.
    fn now_ms(&self) -> u64 {
        self.began.elapsed().as_millis() as u64
    }

    /// Adds a client. If it has found its keys apart again, it keeps its place, and its keys are not pinned any more.
    fn add(&mut self, request: ColocateRequest) {
        self.pins.retain(|pin| !pin.wait.ptr_eq(request.wait()));
        let now = Instant::now();
        let since = now.checked_sub(request.waited()).unwrap_or(now);
        let place = self.waiting.partition_point(|other| other.since <= since);
        self.waiting.insert(place, Waiting { request, since });
    }

    /// Starts all moves that can start.
    fn start_colocations(&mut self) {
        let moves = Arc::clone(&self.moves);
        let pauses = moves.colocations.pauses();
        if *pauses > 0 {
            return;
        }
        let mut topology = match moves.topology_now() {
            Ok(topology) => topology,
            Err(refused) => return refuse(&mut self.refusals, self.waiting.drain(..), refused.text()),
        };
        let away = self.nodes_away();
        let nodes_away: BTreeSet<NodeId> = away.keys().copied().collect();
        let is_drained = |id: &NodeId| moves.drained.has(&moves.name(*id));
        let drained: BTreeSet<NodeId> = topology.nodes().map(|node| node.id).filter(is_drained).collect();
        let pinned: BTreeSet<Slot> = self.pins.iter().flat_map(|pin| pin.slots.iter().copied()).collect();
        let waiting = std::mem::take(&mut self.waiting);
        let (plan, mut known) = {
            let state = moves.state();
            // A move is closed after the publication of its result, so this map has the results of all that are closed.
            topology = moves.placement.topology().unwrap_or(topology);
            let open = state.open.iter().map(|(id, planned)| Open {
                id: *id,
                source: planned.order.source,
                target: planned.order.target,
                slots: &planned.order.slots,
                keys_only: planned.order.keys.is_some(),
                is_paused: planned.steering.paused,
                colocates: matches!(planned.order.cause, Cause::Needed(_)),
            });
            let wanted: Vec<&ColocationRequest> = waiting.iter().map(|w| w.request.wanted()).collect();
            let fleet = Fleet {
                topology: &topology,
                open: &open.collect::<Vec<_>>(),
                pinned: &pinned,
                away: &nodes_away,
                drained: &drained,
                recent: &self.recent,
            };
            (colocate::plan(&fleet, &wanted), state.open.keys().copied().collect::<BTreeSet<MoveId>>())
        };
        let mut refusals: BTreeMap<usize, String> = BTreeMap::new();
        let mut begun: BTreeSet<usize> = BTreeSet::new();
        let mut failed: BTreeSet<Pair> = BTreeSet::new();
        for colocation in plan.moves {
            let between = (colocation.source, colocation.target);
            let outcome = match self.checks.get(&between) {
                Some(Check::Done(_, outcome)) => {
                    if outcome.is_err() {
                        failed.insert(between);
                    }
                    outcome.clone()
                }
                Some(Check::Running(_)) => continue,
                None => match self.begin_check(between) {
                    Ok(thread) => {
                        self.checks.insert(between, Check::Running(thread));
                        continue;
                    }
                    Err(error) => {
                        Err(OperationError::Failed(format!("cannot start a thread that checks the nodes: {error}")))
                    }
                },
            };
            let mut home_for: BTreeMap<String, u64> = BTreeMap::new();
            for first in colocation.keys.values() {
                *home_for.entry(waiting[*first].request.command().to_owned()).or_default() += 1;
            }
            let commands = home_for.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            let has_room = self.check_room(&topology, &colocation);
            let keys: Arc<[Key]> = colocation.keys.into_keys().collect();
            let (slots, count) = (MoveOrder::slots_of(topology.placement(), &keys), keys.len());
            let order = |how| MoveOrder {
                source: colocation.source,
                target: colocation.target,
                slots,
                keys: Some(keys),
                how,
                cause: Cause::Needed(home_for),
            };
            let order = match outcome.and(has_room).and_then(|()| colocation_options(&moves)) {
                Ok(how) => order(how),
                Err(refused) => {
                    refusals.extend(colocation.wanted_by.iter().map(|place| (*place, refused.text().to_owned())));
                    continue;
                }
            };
            match moves.accept_checked(vec![order]) {
                Ok(report) => {
                    let id = report.moves.first().and_then(|planned| planned.id).unwrap_or_default();
                    known.insert(MoveId(id));
                    let why = match colocation.wanted_by.is_empty() {
                        false => "needs them together with others",
                        true => "recently needed them together with keys that move there",
                    };
                    info!(
                        "move {id} brings {} to {}: {commands} {why}",
                        counted(count, "key"),
                        moves.name(colocation.target)
                    );
                    begun.extend(colocation.wanted_by);
                }
                // Another move was accepted or has ended since the plan was made. Its requests are planned again.
                Err(OperationError::Conflict(_)) if self.is_outdated(&topology, &known) => {}
                Err(refused) => {
                    refusals.extend(colocation.wanted_by.iter().map(|place| (*place, refused.text().to_owned())))
                }
            }
        }
        self.checks.retain(|between, _| !failed.contains(between));
        let (now, now_ms) = (Instant::now(), self.now_ms());
        for group in plan.groups {
            if group.wanted_by.iter().any(|place| begun.contains(place)) {
                self.recent.note(group.keys, now_ms);
            }
        }
        for (place, (w, standing)) in waiting.into_iter().zip(plan.standings).enumerate() {
            match (refusals.remove(&place), standing) {
                (Some(why), _) => refuse(&mut self.refusals, [w], &why),
                (None, ColocationStatus::Together) => {
                    let slots = w.request.wanted().slots(topology.placement());
                    self.pins.push(Pin { slots, until: now + PIN, wait: w.request.wait().clone() });
                    w.request.done();
                }
                (None, ColocationStatus::Wait) => self.waiting.push(w),
                (None, ColocationStatus::Paused(MoveId(id))) => {
                    let why =
                        format!("a slot of them is part of move {id}, which is paused (switchyard moves resume {id})");
                    refuse(&mut self.refusals, [w], &why);
                }
                (None, ColocationStatus::Away(node)) => {
                    let why = away.get(&node).map(String::as_str).unwrap_or_default();
                    refuse(&mut self.refusals, [w], &format!("{} cannot be used: {why}", moves.name(node)));
                }
            }
        }
    }

    /// Whether the topology or the open moves differ from those of a plan.
    fn is_outdated(&self, topology: &Topology, known: &BTreeSet<MoveId>) -> bool {
        let now = self.moves.placement.topology();
        now.is_none_or(|now| now.epoch() != topology.epoch())
            || self.moves.open_ids().iter().any(|id| !known.contains(id))
    }

    /// Checks that the directory of placement overrides has room for the keys of a move, in addition to those of open
    /// moves.
    fn check_room(&self, topology: &Topology, colocation: &Colocation) -> Result<(), OperationError> {
        let is_new = |key: &&Arc<[u8]>| topology.placement_override(key).is_none();
        if !colocation.keys.keys().filter(is_new).any(|key| topology.owner_of(key) != colocation.target) {
            return Ok(());
        }
        let open = self.moves.open_keys();
        let keys = colocation.keys.keys().chain(open.iter().flat_map(|keys| keys.iter())).filter(is_new);
        let has_room = topology.room_for_overrides(keys.map(|key| &**key), colocation.target);
        has_room.map_err(|full| conflict(format!("the directory of placement overrides is full: {full}")))
    }

    /// Checks both nodes in another thread, as for a move that an operator orders.
    fn begin_check(&self, between: Pair) -> std::io::Result<JoinHandle<()>> {
        let moves = Arc::clone(&self.moves);
        let check = move || {
            let (source, target) = between;
            let outcome = colocation_options(&moves).and_then(|how| {
                moves.check_move_node(source, false, &how)?;
                moves.check_move_node(target, true, &how).map(drop)
            });
            moves.colocations.notify(ColocationEvent::Checked { between, outcome });
        };
        self.moves.running.threads().spawn("colocate-check", check)
    }

    /// Unreachable nodes, with the reasons.
    fn nodes_away(&self) -> BTreeMap<NodeId, String> {
        let nodes = self.moves.running.with(Router::status).map(|status| status.nodes).unwrap_or_default();
        let why = |link| match link {
            Link::Down(why) => Some(why),
            Link::Up | Link::Connecting => None,
        };
        nodes.into_iter().filter_map(|node| Some((node.id, why(node.link)?))).collect()
    }
}

/// Options of such a move: fast, because clients wait for it.
fn colocation_options(moves: &Moves) -> Result<MoveOptions, OperationError> {
    moves.how(&MoveOptionsRequest { goal: Some("fast".to_owned()), ..MoveOptionsRequest::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moving_a_colocated_key_away_gives_a_warning() {
        let home = Colocations::default();
        let keys: Vec<Key> = [&b"a"[..], b"b", b"c"].map(Key::from).to_vec();
        assert_eq!((home.warning(&keys), home.report()), (None, Vec::new()));
        home.note_done(&keys[..1], &[("RENAME".to_owned(), 1)].into());
        home.note_done(&keys[1..2], &[("EVAL".to_owned(), 1), ("RENAME".to_owned(), 0)].into());
        let text = home.warning(&keys).expect("two of them did");
        assert!(text.starts_with("2 of these keys") && text.contains("(EVAL, RENAME)"), "{text}");
        assert_eq!(home.warning(&keys[2..]), None);
        let report = |command: &str, keys| ReturnedKeysReport { command: command.to_owned(), keys };
        assert_eq!(home.report(), [report("EVAL", 1), report("RENAME", 1)]);
        let latest: Vec<(Key, String)> =
            home.latest().into_iter().map(|(_, key, commands)| (key, commands.to_string())).collect();
        assert_eq!(latest, [(keys[1].clone(), "EVAL, RENAME".to_owned()), (keys[0].clone(), "RENAME".to_owned())]);
    }
}
