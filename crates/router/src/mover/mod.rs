//! The mover: one thread per move, which steps the machine of the leg under way (`switchyard_policy::migration`) and does what it says.
//!
//! It has connections of its own to the source and the target, the list of keys, and the only handle on what workers know of the leg. It
//! is a thread beside the workers, not one of them: copying takes no turn from clients, and a worker's commands need not pass
//! through it.

#[allow(dead_code)] // the thread that uses the rest comes with the next commit
mod admission;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use switchyard_policy::migration::record::OpenMove;
use switchyard_policy::migration::{Durability, Fingerprinter, Goal, Phase, Protocol, Record};
use switchyard_policy::topology::{MoveId, NodeId, Slot, Transit};

use crate::shared::Shared;
pub(crate) use admission::{LegView, Moves, SharedLeg, SharedMove, Told};

/// Called when something is done, from a thread of whoever did it; with a text where it failed.
pub type Done = Box<dyn FnOnce(Result<(), String>) + Send>;

/// What a mover needs of those who keep things: the journal, the stored topology.
pub trait Host: Send + Sync + fmt::Debug {
    /// Makes records durable, after all that were given before; then calls `done`. Several that wait are made durable together.
    fn record(&self, records: Vec<Record>, done: Done);

    /// Makes `owner` the owner of `slots`: stores the topology and has the router publish it; the slots are in transit no more. Then calls `done`.
    fn hand_over(&self, move_id: MoveId, slots: &[Slot], owner: NodeId, done: Done);

    /// Has the router publish a topology in which these slots are in transit for this move, instead of those named before. Other moves'
    /// transits stay. Returns its epoch.
    ///
    /// # Errors
    /// If the topology cannot be changed now; the text says why.
    fn set_transits(&self, move_id: MoveId, transits: Vec<(Transit, Vec<Slot>)>) -> Result<u64, String>;

    /// Where lists of keys that do not fit into memory may be kept; emptied at start.
    fn spool_directory(&self) -> PathBuf;

    /// The move is over. The last call for it.
    fn ended(&self, move_id: MoveId, end: &MoveEnd);
}

/// How a move ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum MoveEnd {
    /// All slots belong to the target.
    Done,
    /// It stopped: what was moved stays moved, the rest stays where it was. With the reason.
    Stopped(String),
}

/// What to move, and how.
#[derive(Clone, Debug)]
pub struct MoveOrder {
    /// Its number.
    pub id: MoveId,
    /// From where.
    pub source: NodeId,
    /// To where.
    pub target: NodeId,
    /// Which slots, ascending; all of them belong to the source (or, of a move that is resumed, to the target already).
    pub slots: Vec<Slot>,
    /// How.
    pub protocol: Protocol,
    /// What must be safe at the target before a source copy goes.
    pub durability: Durability,
    /// What matters most.
    pub goal: Goal,
    /// Bytes per second at most; `None`: as the goal says.
    pub bytes_per_second_max: Option<u64>,
    /// Keys found at the target in slots that it does not own are removed, whoever put them there. Otherwise only those that an earlier
    /// move of ours left; others stop the move before it begins.
    pub purge_target: bool,
    /// Slots, ascending, in which an earlier move of ours may have left keys at the target: what is found there is stale.
    pub leftovers: Vec<Slot>,
    /// Makes fingerprints, under the secret of the state directory.
    pub fingerprints: Fingerprinter,
    /// Where it stood when the router ended, if it is resumed.
    pub resume: Option<OpenMove>,
    /// Who keeps things.
    pub host: Arc<dyn Host>,
}

/// What a user may do to a move under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Steer {
    /// Start no further leg, and no further batch of the present one but those that commands need.
    Pause,
    /// Go on.
    Resume,
    /// End the leg under way (forwards, where it can), start no other, and end the move.
    Abort,
    /// Go on with another goal.
    Goal(Goal),
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
    /// Keys listed at the source so far.
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
    /// Keys that were found at the source after their slots had left it, and what became of them: moved late, removed as stale, left.
    pub late: LateKeys,
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

/// Begins a move.
pub(crate) fn begin(_: &Arc<Shared>, _: MoveOrder) -> std::io::Result<()> {
    Err(std::io::Error::new(std::io::ErrorKind::Unsupported, "this router does not move yet"))
}
