//! Returns keys with placement overrides to their slot owners when a client's command needs them together with other
//! keys.
//!
//! Workers report the keys that their clients wait for. This thread starts moves for them as an operator would:
//! recorded, and with the same checks. A request for keys in transit joins the clients that wait for them. A thread of
//! its own, because recording a move blocks, and neither a worker nor the executor may wait for that. The checks query
//! nodes, so each pair of nodes is checked on another thread: a node without replies delays only its own moves.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use switchyard_policy::colocate::{self, ColocationRequest, ColocationStatus, Open};
use switchyard_policy::migration::{Cause, Key, MoveOptions, MoveOrder};
use switchyard_policy::topology::{MoveId, NodeId};
use switchyard_resp::units::counted;
use switchyard_router::{ColocatePort, ColocateRequest, Link, Router};
use tracing::info;

use super::Moves;
use crate::admin::{MoveOptionsRequest, OperationError, ReturnedKeysReport};

/// Interval between checks of the nodes that waiting clients need. Moves report their changes themselves.
const HEALTH: Duration = Duration::from_millis(250);

/// Validity of a check of a pair of nodes. Mostly a move starts at once.
const FRESH: Duration = Duration::from_secs(2);

/// How long a returned key is remembered.
const WARN_PERIOD: Duration = Duration::from_secs(3600);

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
}

/// Source and target.
type Pair = (NodeId, NodeId);

/// Check of a pair of nodes.
#[derive(Debug)]
enum Check {
    Running(JoinHandle<()>),
    Done(Instant, Result<(), OperationError>),
}

/// Statistics of returned keys, and the channel to the thread.
#[derive(Debug)]
pub(crate) struct Colocations {
    sender: mpsc::Sender<ColocationEvent>,
    receiver: Mutex<Option<mpsc::Receiver<ColocationEvent>>>,
    tally: Mutex<Tally>,
}

#[derive(Debug, Default)]
struct Tally {
    /// Number of keys, by the command that needed them.
    keys: BTreeMap<String, u64>,
    /// Keys, with the time of their return and the commands that needed them.
    remembered: BTreeMap<Key, (Instant, Arc<str>)>,
}

impl Default for Colocations {
    fn default() -> Self {
        let (tell, told) = mpsc::channel();
        Self { sender: tell, receiver: Mutex::new(Some(told)), tally: Mutex::default() }
    }
}

impl Colocations {
    pub(super) fn notify(&self, what: ColocationEvent) {
        // Sending fails if the thread has ended because the router is about to stop. Dropping the request notifies its
        // client.
        drop(self.sender.send(what));
    }

    fn tally(&self) -> MutexGuard<'_, Tally> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that keys have returned to their slot owners.
    pub(super) fn note_done(&self, keys: &[Key], home_for: &BTreeMap<String, u64>) {
        let commands: Arc<str> = home_for.keys().map(String::as_str).collect::<Vec<_>>().join(", ").into();
        let mut tally = self.tally();
        for (command, keys) in home_for {
            *tally.keys.entry(command.clone()).or_default() += keys;
        }
        tally.remembered.retain(|_, (since, _)| since.elapsed() < WARN_PERIOD);
        let now = Instant::now();
        for key in keys {
            if tally.remembered.len() < REMEMBERED_MAX || tally.remembered.contains_key(key) {
                tally.remembered.insert(Arc::clone(key), (now, Arc::clone(&commands)));
            }
        }
    }

    /// Number of returned keys, by command.
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
                "{} of these keys were returned within the last hour because clients need them together with other keys of their slots ({}), and will be again \
                 when needed (moves.colocate-timeout)",
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

impl ColocatePort for Moves {
    fn colocate(&self, request: ColocateRequest) {
        self.colocations.notify(ColocationEvent::Request(request));
    }
}

/// A waiting client.
#[derive(Debug)]
struct Waiting {
    request: ColocateRequest,
    until: Instant,
}

fn refuse(waiting: impl IntoIterator<Item = Waiting>, why: &str) {
    waiting.into_iter().for_each(|w| w.request.refuse(why));
}

/// Starts the thread, which ends when the router stops.
pub(super) fn start(moves: &Arc<Moves>) -> std::io::Result<()> {
    let told = moves.colocations.receiver.lock().unwrap_or_else(PoisonError::into_inner).take();
    let Some(told) = told else { return Ok(()) };
    let colocation = Colocation { moves: Arc::clone(moves), waiting: Vec::new(), checks: BTreeMap::new() };
    moves.running.threads().spawn("colocate", move || colocation.run(&told))?;
    Ok(())
}

struct Colocation {
    moves: Arc<Moves>,
    waiting: Vec<Waiting>,
    checks: BTreeMap<Pair, Check>,
}

impl Colocation {
    fn run(mut self, told: &mpsc::Receiver<ColocationEvent>) {
        while !self.moves.stopping.load(Ordering::Acquire) {
            let soonest = self.waiting.iter().map(|w| w.until.saturating_duration_since(Instant::now())).min();
            let first = match soonest {
                None => told.recv().ok(),
                Some(soonest) => told.recv_timeout(soonest.min(HEALTH)).ok(),
            };
            for what in first.into_iter().chain(told.try_iter()) {
                match what {
                    ColocationEvent::Request(request) => {
                        self.waiting.push(Waiting { until: Instant::now() + request.within(), request })
                    }
                    ColocationEvent::Look => {}
                    ColocationEvent::Stopped { keys, why } => {
                        let placement = self
                            .moves
                            .placement
                            .topology()
                            .map(|topology| topology.placement().clone())
                            .unwrap_or_default();
                        refuse(self.waiting.extract_if(.., |w| w.request.wanted().concerns(&placement, &keys)), &why);
                    }
                    ColocationEvent::Checked { between, outcome } => {
                        self.checks.insert(between, Check::Done(Instant::now(), outcome));
                    }
                }
            }
            let now = Instant::now();
            // Their workers have already replied to the clients.
            self.waiting.extract_if(.., |w| w.until <= now).for_each(|w| w.request.done());
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

    /// Starts all moves that can start.
    fn start_colocations(&mut self) {
        let moves = Arc::clone(&self.moves);
        let topology = match moves.topology_now() {
            Ok(topology) => topology,
            Err(refused) => return refuse(self.waiting.drain(..), refused.text()),
        };
        let away = self.nodes_away();
        let waiting = std::mem::take(&mut self.waiting);
        let plan = {
            let state = moves.state();
            let open = state.open.iter().map(|(id, planned)| Open {
                id: *id,
                source: planned.order.source,
                target: planned.order.target,
                slots: &planned.order.slots,
                is_paused: planned.steering.paused,
                colocates: matches!(planned.order.cause, Cause::Needed(_)),
            });
            let wanted: Vec<&ColocationRequest> = waiting.iter().map(|w| w.request.wanted()).collect();
            colocate::plan(&topology, &wanted, &open.collect::<Vec<_>>(), |node| away.contains_key(&node))
        };
        let mut refusals: BTreeMap<usize, String> = BTreeMap::new();
        for colocation in plan.moves {
            let between = (colocation.source, colocation.target);
            let outcome = match self.checks.remove(&between) {
                Some(Check::Done(_, outcome)) => outcome,
                Some(Check::Running(thread)) => {
                    self.checks.insert(between, Check::Running(thread));
                    continue;
                }
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
            match outcome.and_then(|()| moves.accept_checked(vec![order(colocation_options(&moves)?)])) {
                Ok(report) => {
                    let id = report.moves.first().and_then(|planned| planned.id).unwrap_or_default();
                    info!(
                        "move {id} returns {} to the slot owner: {commands} needs them together with others of their slots",
                        counted(count, "key")
                    );
                }
                Err(refused) => {
                    refusals.extend(colocation.wanted_by.iter().map(|place| (*place, refused.text().to_owned())))
                }
            }
        }
        for (place, (w, standing)) in waiting.into_iter().zip(plan.standings).enumerate() {
            match (refusals.remove(&place), standing) {
                (Some(why), _) => w.request.refuse(&why),
                (None, ColocationStatus::AtSlotOwner) => w.request.done(),
                (None, ColocationStatus::Wait) => self.waiting.push(w),
                (None, ColocationStatus::Paused(MoveId(id))) => {
                    w.request.refuse(&format!(
                        "its slot is part of move {id}, which is paused (switchyard moves resume {id})"
                    ));
                }
                (None, ColocationStatus::Away(node)) => {
                    let why = away.get(&node).map(String::as_str).unwrap_or_default();
                    w.request.refuse(&format!("{} cannot be used: {why}", moves.name(node)));
                }
            }
        }
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
    fn moving_a_returned_key_away_gives_a_warning() {
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
    }
}
