//! The mover: one thread per move, which does what two machines of `switchyard_policy::migration` say: that of the
//! move's life, and that of the leg under way.
//!
//! It has connections of its own to the source and the target, the list of keys, and the only handle on what workers
//! know of the leg. It is a thread beside the workers, not one of them: copying takes no turn from clients, and a
//! worker's commands need not pass through it.

mod big;
mod checks;
mod committed;
mod connection;
mod drive;
mod keys;
mod last_piece;
mod late_keys;
mod left_over;
mod list;
mod listing;
mod moved;
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

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use switchyard_policy::failover::Position;
use switchyard_policy::migration::record::OpenMove;
use switchyard_policy::migration::{Fingerprint, Fingerprinter, Key, MoveOrder, Phase, Record, Side};
use switchyard_policy::topology::{MoveId, NodeId, Slot, Transit};

use crate::shared::{Shared, lock};
pub use big::{BigKey, BigKeys};
pub(crate) use committed::{MoverMessage, Moves, SharedLeg, SharedMove, SharedTracker};
pub use left_over::are_all_that_is_left;
pub use switchyard_policy::migration::{MoveEnd, UserRequest};

/// Moves that are remembered, also when they have ended.
const REMEMBERED: usize = 64;

/// Called when something is done, from a thread of whoever did it; with a text where it failed.
pub type Done = Box<dyn FnOnce(Result<(), String>) + Send>;

/// What a mover needs of those who keep things: the journal, the stored topology.
pub trait Host: Send + Sync + fmt::Debug {
    /// Makes records durable, after all that were given before; then calls `done`. Several that wait are made durable
    /// together. What cannot be written is tried again, in order, for as long as it takes: an error says that the
    /// router stops before it could be.
    fn record(&self, records: Vec<Record>, done: Done);

    /// Makes `owner` the owner of `slots`, or (where `keys` are named, which are in these slots) has these live there:
    /// stores the topology and has the router publish it; the slots are in transit no more. Then calls `done`.
    fn hand_over(&self, move_id: MoveId, slots: &[Slot], keys: Option<&[Key]>, owner: NodeId, done: Done);

    /// Clients are about to read replicas of `node` for what was moved to it. Waits until those that are read have what
    /// its primary had at `position`, for `patience` at most, and has the others not be read until they do
    /// ([`crate::Router::set_servers`]). Then calls `done`; with an error where it is to be asked again.
    fn replicas_need(&self, node: NodeId, position: Position, patience: Duration, done: Done);

    /// Has the router publish a topology in which these slots are in transit for this move, instead of those named
    /// before. Other moves' transits stay. Returns its epoch.
    ///
    /// # Errors
    /// If the topology cannot be changed now; the text says why.
    fn set_transits(&self, move_id: MoveId, transits: Vec<(Transit, Vec<Slot>)>) -> Result<u64, String>;

    /// Where lists of keys that do not fit into memory may be kept; emptied at start.
    fn spool_directory(&self) -> PathBuf;

    /// Keys of the move are in so many databases, and some of them are about to move: a key's name stands for so many
    /// keys, at most. It is on record when this returns.
    fn databases(&self, move_id: MoveId, count: u32);

    /// A node was given up, and a leg ends without it. `keys`: those that were on record as moved to it, where it was
    /// the target; `most`: so many keys are lost at most, because a name may be a key in several databases.
    fn lost(&self, move_id: MoveId, node: NodeId, keys: &[Fingerprint], most: u64);

    /// The move is over. The last call for it.
    fn ended(&self, move_id: MoveId, end: &MoveEnd);
}

/// An order, and what its mover needs besides.
#[derive(Clone, Debug)]
pub struct MoveTask {
    /// Its number.
    pub id: MoveId,
    /// What to move, and how. All of it is at the source, or, of a move that is resumed, at the target already. Keys
    /// that are found at the target in slots that it does not own, and that no earlier move of ours has left, stop the
    /// move before it begins, unless the order says that they are removed.
    pub order: MoveOrder,
    /// Slots, ascending, in which an earlier move of ours may have left keys at the target: what is found there is
    /// stale.
    pub leftovers: Vec<Slot>,
    /// The same of the source: of what is found there after the move it cannot be told whether it is stale.
    pub leftovers_at_source: Vec<Slot>,
    /// It only ends what is under way: the user wants no more of it.
    pub aborted: bool,
    /// The side that is lost for good, says the user.
    pub give_up: Option<Side>,
    /// What it has done before the router's last start.
    pub so_far: MoveTotals,
    /// What [`Host::databases`] was told last.
    pub databases: u32,
    /// Makes fingerprints, under the secret of the state directory.
    pub fingerprints: Fingerprinter,
    /// Where it stood when the router ended, if it is resumed.
    pub resume: Option<OpenMove>,
    /// Who keeps things.
    pub host: Arc<dyn Host>,
}

/// What a move has done so far.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct MoveTotals {
    /// Keys moved.
    pub keys_moved: u64,
    /// Bytes of their serialised values.
    pub bytes_moved: u64,
    /// Keys moved because a command wanted them.
    pub pulled: u64,
    /// Batches done again.
    pub repeated: u64,
    /// Seconds that it has taken.
    pub seconds: f64,
}

/// How far a move is.
#[derive(Clone, Debug)]
pub struct MoveProgress {
    /// Its number.
    pub id: MoveId,
    /// From where.
    pub source: NodeId,
    /// To where.
    pub target: NodeId,
    /// What it does now, for people: "listing keys", "moving", "waiting for 127.0.0.1:7001: ...".
    pub doing: String,
    /// The phase of the leg under way, if one is.
    pub phase: Option<Phase>,
    /// The user has paused it.
    pub paused: bool,
    /// Slots of the whole move.
    pub slots: u32,
    /// Slots handed over.
    pub slots_done: u32,
    /// The user wants it to end.
    pub aborting: bool,
    /// Keys of the leg under way that are still to move, or to come back, at most.
    pub leg_left: Option<u64>,
    /// Keys of it that are lost with the target, at most.
    pub leg_away: Option<u64>,
    /// For how many seconds each side has not answered: the source, and the target.
    pub lost: [Option<f64>; 2],
    /// Keys that were lost with a node that was given up, at most.
    pub keys_lost: u64,
    /// Seconds in which it has come no further.
    pub idle_seconds: f64,
    /// Keys of the whole move, as far as they are listed.
    pub keys_listed: u64,
    /// Whether all are listed.
    pub listed: bool,
    /// Keys moved.
    pub keys_moved: u64,
    /// Bytes of their serialised values.
    pub bytes_moved: u64,
    /// Keys moved because a command wanted them.
    pub pulled: u64,
    /// Batches done again because their end was unknown.
    pub repeated: u64,
    /// Keys that were found at the source after their slots had left it, and what became of them: moved late, removed
    /// as stale, left.
    pub late: LateKeys,
    /// Big keys, and how they were moved.
    pub big: BigKeys,
    /// How long commands were held back, microseconds: how many, and the median, the 99th percentile, the longest.
    pub holds: Holds,
    /// Keys per second, lately.
    pub keys_per_second: f64,
    /// Bytes per second, lately.
    pub bytes_per_second: f64,
    /// Seconds that it will probably still take, once that can be told.
    pub seconds_left: Option<f64>,
    /// Seconds since it began (or was resumed).
    pub seconds: f64,
    /// Records made durable, their bytes unknown here.
    pub records: u64,
    /// How it ended, if it has.
    pub end: Option<MoveEnd>,
}

impl MoveProgress {
    /// Of a move that has just begun.
    fn new(task: &MoveTask) -> Self {
        Self {
            id: task.id,
            source: task.order.source,
            target: task.order.target,
            doing: "connecting".to_owned(),
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

/// What moves have done since the router started: never less than before, also when a move is forgotten, goes back, or
/// begins again.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Moved {
    pub(crate) slots: u64,
    pub(crate) keys: u64,
    /// Of their serialised values.
    pub(crate) bytes: u64,
    /// Keys moved because a command wanted them.
    pub(crate) pulled: u64,
    /// Batches done again.
    pub(crate) repeated: u64,
    pub(crate) big_in_pieces: u64,
    pub(crate) big_whole: u64,
}

impl Moved {
    /// A move has come from one state to another.
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
    /// Written past the router meanwhile, and moved.
    pub moved: u64,
    /// Stale copies, removed.
    pub removed: u64,
    /// Neither could be told: left where they are.
    pub left: u64,
}

/// How long commands were held back.
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

/// Begins a move: its thread.
pub(crate) fn begin(shared: &Arc<Shared>, task: MoveTask) -> std::io::Result<()> {
    use std::io::{Error, ErrorKind};
    let plan = shared.plan();
    let invalid = |why: String| Err(Error::new(ErrorKind::InvalidInput, why));
    for node in [task.order.source, task.order.target] {
        if plan.topology.node(node).is_none() {
            return invalid(format!("there is no node number {}", node.0));
        }
    }
    if task.order.source == task.order.target {
        return invalid("the source and the target are the same node".to_owned());
    }
    let handed_over = task.resume.as_ref().map(|r| r.handed_over.as_slice()).unwrap_or_default();
    if let Some(keys) = &task.order.keys {
        let is_elsewhere = |key: &&Key| {
            plan.topology.lives_at(key) != task.order.source
                && handed_over.binary_search(&plan.topology.slot_of(key)).is_err()
        };
        if let Some(key) = keys.iter().find(is_elsewhere) {
            return invalid(format!(
                "a key of slot {} does not live at the source",
                plan.topology.slot_of(key).number()
            ));
        }
    } else if let Some(slot) = task
        .order
        .slots
        .iter()
        .find(|s| plan.topology.owner(**s) != task.order.source && handed_over.binary_search(s).is_err())
    {
        return invalid(format!("slot {} does not belong to the source", slot.number()));
    }
    let mut moves = lock(&shared.moves);
    if moves.get(&task.id).is_some_and(|m| lock(&m.progress).end.is_none()) {
        return Err(Error::new(ErrorKind::AlreadyExists, format!("move {} is under way", task.id.0)));
    }
    while moves.len() >= REMEMBERED
        && let Some(ended) = moves.iter().find(|(_, m)| lock(&m.progress).end.is_some()).map(|(id, _)| *id)
    {
        moves.remove(&ended);
    }
    let own =
        Arc::new(SharedMove::new(plan.topology.placement().clone(), task.fingerprints, MoveProgress::new(&task))?);
    moves.insert(task.id, own.clone());
    drop(moves);
    let id = task.id;
    shared.change_moves(|moves| {
        moves.by_id.insert(id, own.clone());
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
            });
            Err(error)
        }
    }
}
