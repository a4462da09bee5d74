//! Moves and nodes in the admin API: what may be asked, and what is told. As in `report`, names of fields are only ever
//! added to.

use serde::{Deserialize, Serialize};
use switchyard_policy::migration::Side;

use super::autoscale::AutoscaleRequest;
use super::hot_copies::HotCopiesOrder;
use super::planner::{AutomationRequest, PlanRequest};

/// What changes something, or asks about moves. The command line, the admin API and `SWITCHYARD` over RESP all come to
/// one of these.
#[derive(Clone, Debug, PartialEq)]
pub enum Operation {
    /// Move slots, or single keys.
    Move(MoveRequest),
    /// What is under way, waits, and has ended.
    Moves,
    /// Which node owns which slots, and what else is to be known to find a key.
    Slots,
    /// How many of some keys of each node the slot map looks for elsewhere.
    Misplaced,
    /// Where these keys are.
    Where(Vec<Vec<u8>>),
    /// The keys of each node that are used most.
    HotKeys {
        /// How many of each node, at most.
        keys: usize,
        /// Whoever asks may read their names.
        named: bool,
    },
    /// The load of nodes and slots.
    Load,
    /// What is answered from hot copies.
    HotCopies,
    /// Do something to them.
    SteerHotCopies(HotCopiesOrder),
    /// Make a plan now; carry it out.
    Plan(PlanRequest),
    /// The planner's decisions.
    PlanHistory {
        /// The client may read names of keys.
        named: bool,
    },
    /// One of its decisions once more, on what it was made on.
    Replay {
        /// Its number.
        id: u64,
        /// The client may read names of keys.
        named: bool,
    },
    /// The number of nodes that there are to be, and the reasons.
    Autoscale,
    /// Say how many.
    SteerAutoscale(AutoscaleRequest),
    /// Whether anything is done without anybody asking.
    Automation,
    /// Whether it may be.
    SteerAutomation(AutomationRequest),
    /// Do something to a move.
    Steer {
        /// The move's number.
        id: u64,
        /// What.
        what: SteerRequest,
    },
    /// Let a node join.
    AddNode(AddNodeRequest),
    /// Move everything away from a node.
    DrainNode(NodeRequest),
    /// A node that was drained may get slots again.
    UndrainNode(NodeRequest),
    /// Let a node go that owns nothing.
    RemoveNode(NodeRequest),
    /// Even the slots.
    Balance(BalanceRequest),
}

impl Operation {
    /// Whether it changes something. What is only planned does not.
    #[must_use]
    pub fn changes(&self) -> bool {
        match self {
            Self::Moves
            | Self::Slots
            | Self::Misplaced
            | Self::Where(_)
            | Self::HotKeys { .. }
            | Self::Load
            | Self::HotCopies => false,
            Self::PlanHistory { .. } | Self::Replay { .. } | Self::Automation | Self::Autoscale => false,
            Self::Plan(request) => request.apply,
            Self::SteerAutomation(_) | Self::SteerAutoscale(_) => true,
            Self::Move(request) => !request.dry_run,
            Self::Balance(request) => !request.dry_run,
            Self::DrainNode(request) => !request.dry_run,
            Self::Steer { what: SteerRequest::Abort(request), .. } => !request.dry_run,
            Self::Steer { .. }
            | Self::AddNode(_)
            | Self::UndrainNode(_)
            | Self::RemoveNode(_)
            | Self::SteerHotCopies(_) => true,
        }
    }
}

/// Slots to move, or keys. What is not said is as the configuration has it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoveRequest {
    /// Name of the source; empty: wherever the slots or keys are.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub from: String,
    /// Name of the target; empty with `home`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub to: String,
    /// Which: `0-100,200`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slots: Option<String>,
    /// All that the source owns.
    #[serde(default)]
    pub all: bool,
    /// Not slots but the keys at the source that match this pattern (as that of `KEYS`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys: Option<String>,
    /// The keys that live at the source although their slots do not (of these, those that match `keys` if it is given)
    /// go to the owners of their slots.
    #[serde(default)]
    pub home: bool,
    /// Only say what would be done.
    #[serde(default)]
    pub dry_run: bool,
    /// How.
    #[serde(flatten)]
    pub how: HowRequest,
}

/// The slot map.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SlotsReport {
    /// Epoch of the map.
    pub epoch: u64,
    /// The nodes, by number; also those that own none.
    pub nodes: Vec<NodeSlotsReport>,
    /// All slots as ranges of one owner, in order.
    pub ranges: Vec<RangeReport>,
    /// Slots that are on their way to another node.
    pub in_transit: Vec<TransitReport>,
    /// Keys that live elsewhere than their slots: how many of each slot, by node.
    pub exceptions: Vec<ExceptionsReport>,
}

/// What a look at some keys of each node that answered has found.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MisplacedReport {
    /// By node.
    pub nodes: Vec<NodeMisplacedReport>,
}

/// What it has found at a node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeMisplacedReport {
    /// Its name.
    pub node: String,
    /// How many keys were looked at.
    pub keys: u64,
    /// For how many of these the slot map looks elsewhere, so that no client finds them.
    pub elsewhere: u64,
}

/// What a node owns.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeSlotsReport {
    /// Its name.
    pub node: String,
    /// How many slots.
    pub slots: u64,
    /// Which: `0-100,200`.
    pub ranges: String,
    /// How many keys live at it without their slots.
    pub exceptions: u64,
}

/// Slots of one owner.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RangeReport {
    /// The first.
    pub first: u16,
    /// The last.
    pub last: u16,
    /// Their owner.
    pub node: String,
}

/// Slots, or some keys of them, on their way.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TransitReport {
    /// The move.
    #[serde(rename = "move")]
    pub move_id: u64,
    /// From where.
    pub from: String,
    /// To where.
    pub to: String,
    /// Which slots: `0-100,200`.
    pub slots: String,
    /// How many.
    pub count: u64,
    /// `listed`: all keys are still at the source. `moving`: each is at either.
    pub stage: String,
    /// Only single keys of them move.
    pub keys_only: bool,
}

/// Keys of a slot that live elsewhere.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExceptionsReport {
    /// The slot.
    pub slot: u16,
    /// The owner of the slot.
    pub owner: String,
    /// Where they live.
    pub node: String,
    /// How many.
    pub keys: u64,
}

/// The keys that are used most, and the load of their nodes. Rates of keys are of a sample, and weighed over the last
/// seconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HotKeysReport {
    /// All nodes.
    pub nodes: Vec<HotNodeReport>,
}

impl HotKeysReport {
    /// Keys of each node, where nobody says how many.
    pub const KEYS: usize = 10;
    /// Most that can be asked for.
    pub const KEYS_MAX: usize = 256;

    /// How many somebody wants, if that can be had.
    #[must_use]
    pub fn count(text: &str) -> Option<usize> {
        text.parse().ok().filter(|count| (1..=Self::KEYS_MAX).contains(count))
    }
}

/// Those of one node. What is not known is left out.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HotNodeReport {
    /// Its name.
    pub node: String,
    /// How often keys are used there, each second.
    pub uses_per_second: f64,
    /// How often hot copies answer in its place, each second.
    pub hits_per_second: f64,
    /// Commands that go to it in the last second, all of them: not from a sample.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests_per_second: Option<f64>,
    /// From sending a command to its answer, on average over the last second, microseconds; without commands that wait
    /// there. None also where it answered none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer_us: Option<f64>,
    /// What its server takes of one processor, percent, with all its threads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_percent: Option<f64>,
    /// Memory that the server uses, bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Its `maxmemory`; 0: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_max_bytes: Option<u64>,
    /// The keys, the one that is used most first.
    pub keys: Vec<HotKeyReport>,
}

/// A key that is used much.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HotKeyReport {
    /// Its name; what is not UTF-8 is escaped. None where it is longer than 64 bytes, or for whoever may not read it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// What stands for it and its database until the router restarts: 16 hexadecimal digits.
    pub fingerprint: String,
    /// Its database.
    pub database: u32,
    /// Commands that only read, each second.
    pub reads_per_second: f64,
    /// All others, each second.
    pub writes_per_second: f64,
    /// Reads that hot copies answer, each second.
    pub hits_per_second: f64,
    /// Bytes of these commands, each second.
    pub bytes_per_second: f64,
    /// Bytes of the answers, each second.
    pub reply_bytes_per_second: f64,
    /// From sending a command to the node to its answer, on average, microseconds; without commands that wait there.
    pub wait_us: f64,
    /// For so long it has been among the keys that are counted, seconds.
    #[serde(default)]
    pub since_seconds: f64,
    /// Its share of the uses at its node, percent.
    pub percent: f64,
}

/// Where keys are.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WhereReport {
    /// Epoch of the map.
    pub epoch: u64,
    /// The keys, in the order asked.
    pub keys: Vec<KeyReport>,
}

/// Where a key is, whether it exists or not.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct KeyReport {
    /// Its name; what is not UTF-8 is escaped.
    pub key: String,
    /// Its slot.
    pub slot: u16,
    /// The hash tag that decides that, where it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hash_tag: Option<String>,
    /// The owner of the slot.
    pub owner: String,
    /// The node at which the key is; in transit, the one that it comes from.
    pub node: String,
    /// It was moved there alone, without its slot.
    pub relocated: bool,
    /// Its slot is on its way to another node, and maybe the key with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_transit: Option<TransitReport>,
}

/// How data is to move.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HowRequest {
    /// fast, balanced or gentle.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub goal: Option<String>,
    /// Bytes per second at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_rate: Option<u64>,
    /// memory, aof or replica.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub durability: Option<String>,
    /// switchyard, or one of those for comparisons.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol: Option<String>,
    /// The protocol as it was published.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paper: Option<Box<PaperRequest>>,
    /// Go on although clients use the nodes directly.
    #[serde(default)]
    pub allow_direct_clients: bool,
    /// Remove what is found at a target in slots that it does not own, whoever put it there.
    #[serde(default)]
    pub purge_target: bool,
    /// Go on by a protocol that loses keys when a node restarts in the middle.
    #[serde(default)]
    pub allow_key_loss: bool,
}

/// How a published protocol is set; what is not said is as its paper has it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PaperRequest {
    /// What remembers where groups are: exact, bloom, bloom+counting or adaptive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tracker: Option<String>,
    /// How many groups there are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub groups: Option<u32>,
    /// Bits of the filter for each group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bits: Option<u8>,
    /// Of bloom: the arm without filter and forwarding.
    #[serde(default)]
    pub no_forwarding: bool,
}

/// What may be done to a move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SteerRequest {
    /// Stop where it is, until it is resumed.
    Pause,
    /// Go on.
    Resume,
    /// Finish the slots being moved now, or bring them back, then stop.
    Abort(AbortRequest),
    /// Go on with another goal: fast, balanced or gentle.
    Goal(String),
    /// Go on with so many bytes per second at most; `None`: as the goal says.
    MaxRate(Option<u64>),
}

/// How a move is to be aborted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AbortRequest {
    /// Do not wait for this node of the move: it is lost for good.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lose: Option<Lose>,
    /// Only say what would be done, and what would be lost.
    #[serde(default)]
    pub dry_run: bool,
}

/// A node of a move that is lost for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lose {
    /// The one that keys move from.
    Source,
    /// The one that keys move to.
    Target,
}

impl From<Lose> for Side {
    fn from(lose: Lose) -> Self {
        match lose {
            Lose::Source => Self::Source,
            Lose::Target => Self::Target,
        }
    }
}

/// Another goal for a move.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GoalRequest {
    /// fast, balanced or gentle.
    pub goal: String,
}

/// Another rate for a move.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MaxRateRequest {
    /// Bytes per second at most; `null`: as the goal says. Named in any case: a request without it would lift a bound
    /// by mistake.
    #[serde(deserialize_with = "Option::deserialize")]
    pub max_rate: Option<u64>,
}

/// A node that joins.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddNodeRequest {
    /// Its address.
    pub address: String,
    /// Give it its share of the slots at once.
    #[serde(default)]
    pub rebalance: bool,
    /// Go on although clients use commands that meet limits when there are two nodes.
    #[serde(default)]
    pub allow_limits: bool,
    /// How, where it gets some.
    #[serde(flatten)]
    pub how: HowRequest,
}

/// A node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeRequest {
    /// Its address.
    pub address: String,
    /// Only say what would be done, where data would move.
    pub dry_run: bool,
    /// How, where data moves.
    pub how: HowRequest,
}

/// Even slots; or move all away from a node that is named elsewhere.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BalanceRequest {
    /// Only say what would be done.
    #[serde(default)]
    pub dry_run: bool,
    /// What is evened: `slots` (the default) or `load`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
    /// How.
    #[serde(flatten)]
    pub how: HowRequest,
}

/// Why something was not done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// What was asked makes no sense.
    Wrong(String),
    /// It does not fit the present state.
    Conflict(String),
    /// It failed.
    Failed(String),
    /// The router does not serve (yet, or any more).
    Unavailable(String),
}

pub(crate) fn wrong(text: impl Into<String>) -> Refused {
    Refused::Wrong(text.into())
}

pub(crate) fn conflict(text: impl Into<String>) -> Refused {
    Refused::Conflict(text.into())
}

impl Refused {
    /// Why.
    #[must_use]
    pub fn text(&self) -> &str {
        match self {
            Self::Wrong(text) | Self::Conflict(text) | Self::Failed(text) | Self::Unavailable(text) => text,
        }
    }

    /// The same with another text.
    #[must_use]
    pub fn map(self, text: impl FnOnce(&str) -> String) -> Self {
        let text = text(self.text());
        match self {
            Self::Wrong(_) => Self::Wrong(text),
            Self::Conflict(_) => Self::Conflict(text),
            Self::Failed(_) => Self::Failed(text),
            Self::Unavailable(_) => Self::Unavailable(text),
        }
    }
}

/// Moves that were begun, or would be.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PlanReport {
    /// They were only planned.
    pub dry_run: bool,
    /// The moves; without numbers where they were only planned.
    pub moves: Vec<PlannedReport>,
    /// What somebody should know who asks for this.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// A move that was begun, or would be.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PlannedReport {
    /// Its number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<u64>,
    /// Name of the source.
    pub from: String,
    /// Name of the target.
    pub to: String,
    /// How many slots.
    pub slots: u64,
    /// Which, as ranges.
    pub ranges: String,
    /// How many keys, where these move without their slots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys: Option<u64>,
}

/// All moves.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MovesReport {
    /// Under way, or waiting: by number.
    pub moves: Vec<MoveReport>,
    /// Ended, the latest last; the last hundred.
    pub ended: Vec<MoveReport>,
    /// What their records cost.
    pub journal: JournalReport,
    /// What is done now, or would be, where a move was aborted; for people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub says: String,
    /// Keys that were brought home because commands needed them, since the router's start, by command.
    #[serde(default)]
    pub brought_home: Vec<HomeReport>,
}

/// Keys that came home because a command of a client needed them together with others of their slots.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HomeReport {
    /// The name of the command.
    pub command: String,
    /// How many keys, of those that it needed first.
    pub keys: u64,
}

/// The journal of the moves, since the router's start.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct JournalReport {
    /// Bytes written.
    pub bytes: u64,
    /// Records made durable.
    pub records: u64,
    /// Times that the disk was waited for.
    pub syncs: u64,
    /// Length of the file, bytes.
    pub length: u64,
    /// What keeps it from writing now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

/// How a move is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MoveState {
    /// Waits until its nodes are free.
    #[default]
    Queued,
    /// Under way.
    Running,
    /// Stopped by the user, until it is resumed.
    Paused,
    /// The user wants it to end: what is under way is ended, and nothing else is begun.
    Aborting,
    /// Over: the target owns all slots.
    Done,
    /// Over before the end.
    Stopped,
}

impl MoveState {
    /// Whether it is over.
    #[must_use]
    pub fn is_over(self) -> bool {
        matches!(self, Self::Done | Self::Stopped)
    }
}

/// A big key that is being copied in pieces. Its name is nobody's business.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BigKeyReport {
    /// Its type.
    pub kind: String,
    /// Bytes that it takes at the source.
    pub bytes: u64,
    /// Bytes copied so far.
    pub copied: u64,
    /// All of it has been copied once, and what is written to it is copied after.
    pub is_read: bool,
    /// How often the copy began again, because commands changed the value as a whole.
    pub restarts: u32,
}

/// A move.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MoveReport {
    /// Its number.
    pub id: u64,
    /// Name of the source.
    pub from: String,
    /// Name of the target.
    pub to: String,
    /// How it is.
    pub state: MoveState,
    /// What it does now, or why it ended.
    pub doing: String,
    /// How: `switchyard`, `stop-and-copy`.
    pub protocol: String,
    /// How safe: `memory`, `aof`, `replica`.
    pub durability: String,
    /// What matters most: `fast`, `balanced`, `gentle`.
    pub goal: String,
    /// Bytes per second at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_rate: Option<u64>,
    /// How many keys it is about, where these move without their slots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys: Option<u64>,
    /// The pattern by which these were chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pattern: Option<String>,
    /// It was begun by the router, because these commands of clients need its keys at home.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub home_for: Vec<HomeReport>,
    /// The planner has begun it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub planned: bool,
    /// Slots (those of the keys, where keys move without them).
    pub slots: u64,
    /// Slots that the target owns (or of which the keys live there).
    pub slots_done: u64,
    /// Keys of the whole move, as far as they were found.
    pub keys_listed: u64,
    /// Whether all were found.
    pub listed: bool,
    /// Keys moved.
    pub keys_moved: u64,
    /// Bytes of their serialised values.
    pub bytes_moved: u64,
    /// Keys of the slots that are moving now which have not moved yet, or (of a move that goes back) not come back; at
    /// most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leg_keys_left: Option<u64>,
    /// The node that does not answer, and that the slots which are moving now wait for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
    /// Keys that were lost with a node that was given up; at most.
    #[serde(default)]
    pub keys_lost: u64,
    /// How far it is, of a hundred.
    #[serde(default)]
    pub percent: f64,
    /// Seconds in which it has come no further.
    #[serde(default)]
    pub idle_seconds: f64,
    /// Keys moved because a command wanted them.
    pub pulled: u64,
    /// Batches done again because their end was unknown.
    pub repeated: u64,
    /// Keys that were found at the source afterwards: moved late.
    pub late_moved: u64,
    /// The same: removed as stale.
    pub late_removed: u64,
    /// The same: left where they are.
    pub late_left: u64,
    /// Big keys that were moved in pieces.
    #[serde(default)]
    pub big_in_pieces: u64,
    /// Big keys that were moved whole: commands for them, and others at their nodes, waited meanwhile.
    #[serde(default)]
    pub big_whole: u64,
    /// The longest that one of these took, microseconds.
    #[serde(default)]
    pub big_whole_max_us: u64,
    /// The last of these: type, size, time, and why it was not moved in pieces.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub big_whole_last: String,
    /// Big keys that are being copied in pieces now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub big: Vec<BigKeyReport>,
    /// Commands held back.
    pub holds: u64,
    /// How long, microseconds: the median.
    pub hold_p50_us: u64,
    /// The same: the 99th percentile.
    pub hold_p99_us: u64,
    /// The same: the longest.
    pub hold_max_us: u64,
    /// Keys per second, lately.
    pub keys_per_second: f64,
    /// Bytes per second, lately.
    pub bytes_per_second: f64,
    /// Seconds that it will probably still take.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds_left: Option<f64>,
    /// Seconds that it has taken, without those in which no router ran.
    pub seconds: f64,
}
