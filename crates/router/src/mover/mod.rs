//! The mover: one thread per move. Performs the steps of two state machines of `switchyard_policy::migration`, one for
//! the move and one for the current leg.
//!
//! A mover has its own connections to the source and the target, the list of keys, and the only handle for publishing
//! the state of the leg to workers. Copying runs on this thread rather than on a worker, so that it takes no turn from
//! clients, and commands need not pass through it.

mod big;
mod checked_pairs;
mod checks;
mod committed;
mod connection;
mod drive;
mod keys;
mod last_piece;
mod late_keys;
mod list;
mod listing;
mod moved;
mod orphaned_keys;
mod pacing;
mod pieces;
mod progress;
mod replicas;
mod returning;
mod run;
mod side;
mod sizes;
mod spool;
mod staging;
mod tails;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use switchyard_policy::failover::Position;
use switchyard_policy::migration::record::OpenMove;
use switchyard_policy::migration::{Fingerprint, Fingerprinter, Key, MoveOrder, Phase, Record, Side};
use switchyard_policy::topology::{MoveId, NodeId, Slot, Transit};

use crate::lock::lock;
use crate::shared::Shared;
pub use big::{BigKey, BigKeys};
pub(crate) use checked_pairs::CheckedPairs;
pub(crate) use committed::{MoverMessage, Moves, SharedLeg, SharedMove, SharedTracker, SourceOps};
pub use orphaned_keys::may_be_only_copies;
pub use switchyard_policy::migration::{MoveEnd, UserRequest};

/// Moves kept in memory, including ended moves.
const REMEMBERED: usize = 64;

/// Completion callback, called from any thread. The error is a text for operators.
pub type Done = Box<dyn FnOnce(Result<(), String>) + Send>;

/// Services that a mover needs: the journal and the stored topology.
pub trait Host: Send + Sync {
    /// Makes records durable after all records passed earlier, then calls `done`. Waiting records are written together.
    /// A failed write is retried, in order, without a limit: an error means that the router stops first.
    fn record(&self, records: Vec<Record>, done: Done);

    /// Makes `owner` the owner of `slots`, or only of `keys` (all in these slots) if there are any. Stores and
    /// publishes the topology, ends the transit of the slots, then calls `done`.
    fn hand_over(&self, move_id: MoveId, slots: &[Slot], keys: Option<&[Key]>, owner: NodeId, done: Done);

    /// Waits until the replicas of `node` that clients read have reached `position` of its primary, at most for
    /// `timeout`. Excludes the other replicas from reads until they have caught up ([`crate::Router::set_servers`]).
    /// Then calls `done`. An error means that the caller should retry.
    fn replicas_need(&self, node: NodeId, position: Position, timeout: Duration, done: Done);

    /// Publishes a topology with these slots in transit, replacing all earlier transits of this move. Transits of other
    /// moves stay. Returns the epoch.
    ///
    /// # Errors
    /// If the topology cannot be changed now.
    fn set_transits(&self, move_id: MoveId, transits: Vec<(Transit, Vec<Slot>)>) -> Result<u64, String>;

    /// Directory for key lists that do not fit into memory. Emptied at start.
    fn spool_directory(&self) -> PathBuf;

    /// Records that keys of the move are in `count` databases, so that one key name stands for at most `count` keys.
    /// Returns when the record is durable. Called before any of these keys move.
    fn databases(&self, move_id: MoveId, count: u32);

    /// Reports that a leg ends without a node that was given up. `keys`: keys on record as moved to it, if it was the
    /// target. `most`: upper bound of lost keys, because a name may be a key in several databases.
    fn lost(&self, move_id: MoveId, node: NodeId, keys: &[Fingerprint], most: u64);

    /// Ends the move. No call for this move follows.
    fn ended(&self, move_id: MoveId, end: &MoveEnd);
}

/// An order with the data that its mover needs.
#[derive(Clone, Debug)]
pub struct MoveTask {
    /// Move id.
    pub id: MoveId,
    /// Slots or keys to move, and options. All are at the source, or, for a resumed move, already at the target.
    /// Unexpected keys at the target, in slots that it does not own and that are not in `leftovers`, stop the move
    /// before it begins, unless the order allows their removal.
    pub order: MoveOrder,
    /// Slots, ascending, in which an earlier move may have left keys at the target. Such keys are stale.
    pub leftovers: Vec<Slot>,
    /// Slots, ascending, in which an earlier move may have left keys at the source. A key found there later may be
    /// stale or new.
    pub leftovers_at_source: Vec<Slot>,
    /// The operator has aborted the move: it only ends the work in progress.
    pub aborted: bool,
    /// Side that the operator has declared lost for good.
    pub give_up: Option<Side>,
    /// Totals from before the last start of the router.
    pub so_far: MoveTotals,
    /// Number of databases last passed to [`Host::databases`].
    pub databases: u32,
    /// Makes fingerprints, under the secret of the state directory.
    pub fingerprints: Fingerprinter,
    /// State from the journal, for a resumed move.
    pub resume: Option<OpenMove>,
    /// Journal and topology store.
    pub host: Arc<dyn Host>,
}

/// Totals of a move.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct MoveTotals {
    /// Keys moved.
    pub keys_moved: u64,
    /// Bytes of their serialised values.
    pub bytes_moved: u64,
    /// Keys moved early because a command needed them.
    pub pulled: u64,
    /// Batches that were repeated.
    pub repeated: u64,
    /// Duration so far, seconds.
    pub seconds: f64,
}

/// Progress of a move, for status output.
#[derive(Clone, Debug)]
pub struct MoveProgress {
    /// Move id.
    pub id: MoveId,
    /// Node that the keys leave.
    pub source: NodeId,
    /// Node that receives the keys.
    pub target: NodeId,
    /// Current activity, for display: "listing keys", "moving", "waiting for 127.0.0.1:7001: ...".
    pub activity: String,
    /// Phase of the current leg.
    pub phase: Option<Phase>,
    /// Paused by the operator.
    pub paused: bool,
    /// Slots of the whole move.
    pub slots: u32,
    /// Slots handed over.
    pub slots_done: u32,
    /// The operator has aborted it.
    pub aborting: bool,
    /// Keys of the current leg still to move or to return. Upper bound.
    pub leg_left: Option<u64>,
    /// Keys of the current leg that would be lost with the target. Upper bound.
    pub leg_away: Option<u64>,
    /// Seconds since the source and the target last replied, for each side that is not connected.
    pub lost: [Option<f64>; 2],
    /// Keys lost with a node that was given up. Upper bound.
    pub keys_lost: u64,
    /// Seconds without progress.
    pub idle_seconds: f64,
    /// Keys of the whole move listed so far.
    pub keys_listed: u64,
    /// Whether the listing is complete.
    pub listed: bool,
    /// Keys moved.
    pub keys_moved: u64,
    /// Bytes of their serialised values.
    pub bytes_moved: u64,
    /// Keys moved early because a command needed them.
    pub pulled: u64,
    /// Batches repeated because their result was unknown.
    pub repeated: u64,
    /// Keys found at the source after their slots had left it.
    pub late: LateKeys,
    /// Big keys, and how they were moved.
    pub big: BigKeys,
    /// Delays of held commands.
    pub holds: Holds,
    /// Recent rate, keys per second.
    pub keys_per_second: f64,
    /// Recent rate, bytes per second.
    pub bytes_per_second: f64,
    /// Estimated remaining seconds. `None` until there is an estimate.
    pub seconds_left: Option<f64>,
    /// Seconds since the start or the resumption.
    pub seconds: f64,
    /// Records made durable.
    pub records: u64,
    /// Result, if the move has ended.
    pub end: Option<MoveEnd>,
}

impl MoveProgress {
    /// Returns the progress of a move that has just started.
    fn new(task: &MoveTask) -> Self {
        Self {
            id: task.id,
            source: task.order.source,
            target: task.order.target,
            activity: "connecting".to_owned(),
            phase: None,
            paused: false,
            slots: task.order.slots.len() as u32,
            slots_done: task.resume.as_ref().map_or(0, |r| r.handed_over.len() as u32),
            aborting: task.aborted,
            leg_left: None,
            leg_away: None,
            lost: [None; 2],
            keys_lost: 0,
            idle_seconds: 0.0,
            keys_listed: 0,
            listed: false,
            keys_moved: task.so_far.keys_moved,
            bytes_moved: task.so_far.bytes_moved,
            pulled: task.so_far.pulled,
            repeated: task.so_far.repeated,
            late: LateKeys::default(),
            big: BigKeys::default(),
            holds: Holds::default(),
            keys_per_second: 0.0,
            bytes_per_second: 0.0,
            seconds_left: None,
            seconds: task.so_far.seconds,
            records: 0,
            end: None,
        }
    }
}

/// Totals of all moves since the router started. Monotonic, also when a move is forgotten, rolled back or restarted.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Moved {
    pub(crate) slots: u64,
    pub(crate) keys: u64,
    /// Bytes of serialised values.
    pub(crate) bytes: u64,
    /// Keys moved early because a command needed them.
    pub(crate) pulled: u64,
    /// Batches that were repeated.
    pub(crate) repeated: u64,
    pub(crate) big_in_pieces: u64,
    pub(crate) big_whole: u64,
}

impl Moved {
    /// Adds the difference between two states of a move.
    fn grow(&mut self, before: &MoveProgress, after: &MoveProgress) {
        let grow =
            |total: &mut u64, figure: fn(&MoveProgress) -> u64| *total += figure(after).saturating_sub(figure(before));
        grow(&mut self.slots, |p| u64::from(p.slots_done));
        grow(&mut self.keys, |p| p.keys_moved);
        grow(&mut self.bytes, |p| p.bytes_moved);
        grow(&mut self.pulled, |p| p.pulled);
        grow(&mut self.repeated, |p| p.repeated);
        grow(&mut self.big_in_pieces, |p| p.big.in_pieces);
        grow(&mut self.big_whole, |p| p.big.whole);
    }
}

/// Keys found at the source after their slots had left it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LateKeys {
    /// Written past the router during the move, and then moved.
    pub moved: u64,
    /// Stale copies, removed.
    pub removed: u64,
    /// Left in place: neither known to be stale nor known to be new.
    pub left: u64,
}

/// Delays of held commands.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Holds {
    /// How many.
    pub count: u64,
    /// Median, microseconds.
    pub p50_us: u64,
    /// 99th percentile, microseconds.
    pub p99_us: u64,
    /// The longest, microseconds.
    pub max_us: u64,
}

/// Starts the thread of a move.
pub(crate) fn begin(shared: &Arc<Shared>, task: MoveTask) -> std::io::Result<()> {
    use std::io::{Error, ErrorKind};
    let routing = shared.routing();
    let invalid = |why: String| Err(Error::new(ErrorKind::InvalidInput, why));
    for node in [task.order.source, task.order.target] {
        if routing.topology.node(node).is_none() {
            return invalid(format!("there is no node number {}", node.0));
        }
    }
    if task.order.source == task.order.target {
        return invalid("the source and the target are the same node".to_owned());
    }
    let handed_over = task.resume.as_ref().map(|r| r.handed_over.as_slice()).unwrap_or_default();
    if let Some(keys) = &task.order.keys {
        let is_elsewhere = |key: &&Key| {
            routing.topology.lives_at(key) != task.order.source
                && handed_over.binary_search(&routing.topology.slot_of(key)).is_err()
        };
        if let Some(key) = keys.iter().find(is_elsewhere) {
            return invalid(format!("a key of slot {} is not at the source", routing.topology.slot_of(key).number()));
        }
    } else if let Some(slot) = task
        .order
        .slots
        .iter()
        .find(|s| routing.topology.owner(**s) != task.order.source && handed_over.binary_search(s).is_err())
    {
        return invalid(format!("slot {} does not belong to the source", slot.number()));
    }
    let mut moves = lock(&shared.moves);
    if moves.get(&task.id).is_some_and(|m| lock(&m.progress).end.is_none()) {
        return Err(Error::new(ErrorKind::AlreadyExists, format!("move {} is already running", task.id.0)));
    }
    while moves.len() >= REMEMBERED
        && let Some(ended) = moves.iter().find(|(_, m)| lock(&m.progress).end.is_some()).map(|(id, _)| *id)
    {
        moves.remove(&ended);
    }
    let own =
        Arc::new(SharedMove::new(routing.topology.placement().clone(), task.fingerprints, MoveProgress::new(&task))?);
    moves.insert(task.id, own.clone());
    drop(moves);
    let id = task.id;
    let source_ops = task.order.how.source_ops_max.map(|max| SourceOps::new(max, shared.uptime().as_micros() as u64));
    shared.change_moves(|moves| {
        moves.by_id.insert(id, own.clone());
        moves.source_ops.extend(source_ops.map(|limit| (id, Arc::new(limit))));
    });
    let thread = std::thread::Builder::new().name(format!("mover-{}", id.0)).spawn({
        let shared = shared.clone();
        move || run::run(shared, own, task)
    });
    match thread {
        Ok(thread) => {
            let mut movers = lock(&shared.movers);
            movers.retain(|thread| !thread.is_finished());
            movers.push(thread);
            Ok(())
        }
        Err(error) => {
            lock(&shared.moves).remove(&id);
            shared.change_moves(|moves| {
                moves.by_id.remove(&id);
                moves.source_ops.remove(&id);
            });
            Err(error)
        }
    }
}
