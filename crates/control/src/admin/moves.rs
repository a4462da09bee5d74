//! Moves and nodes in the admin API: requests and reports. As in `report`, fields are only ever added.

use serde::{Deserialize, Serialize};
use switchyard_policy::migration::Side;

use super::autoscale::AutoscaleRequest;
use super::hot_copies::HotCopiesOrder;
use super::planner::{AutomationRequest, PlanRequest};
use super::rules::RulesOrder;

/// A command to the router, or a query about moves. The command line, the admin API and `SWITCHYARD` over RESP all
/// become an operation.
#[derive(Clone, Debug, PartialEq)]
pub enum Operation {
    /// Move slots, or single keys.
    Move(MoveRequest),
    /// List moves: running, queued and ended.
    Moves,
    /// Return the slot map: owners, slots in transit, placement overrides.
    Slots,
    /// Count misplaced keys in a sample of each node's keys.
    Misplaced,
    /// Locate keys.
    Where(Vec<Vec<u8>>),
    /// Return the keys that commands have brought together.
    Colocation {
        /// Whether the client may read names of keys.
        named: bool,
    },
    /// List the most used keys of each node.
    HotKeys {
        /// Maximum number of keys per node.
        keys: usize,
        /// Whether the client may read names of keys.
        named: bool,
    },
    /// Return the load of nodes and slots.
    Load,
    /// Return the state of hot copies.
    HotCopies,
    /// Control hot copies.
    SteerHotCopies(HotCopiesOrder),
    /// Make a plan, and apply it if requested.
    Plan(PlanRequest),
    /// List the planner's decisions.
    PlanHistory {
        /// Whether the client may read names of keys.
        named: bool,
    },
    /// Repeat a decision on its stored input.
    Replay {
        /// Number of the decision.
        id: u64,
        /// Whether the client may read names of keys.
        named: bool,
    },
    /// Return the target number of nodes, and the reasons.
    Autoscale,
    /// Control the autoscaler.
    SteerAutoscale(AutoscaleRequest),
    /// Return whether the planner acts by itself.
    Automation,
    /// Enable or disable automation.
    SteerAutomation(AutomationRequest),
    /// Return the placement rules.
    Rules,
    /// Return the effect of the rules on keys.
    CheckRules(Vec<Vec<u8>>),
    /// Propose placement rules.
    LearnRules {
        /// Whether the client may read names of keys.
        named: bool,
    },
    /// Change the placement rules.
    SteerRules(RulesOrder),
    /// Control a move.
    Steer {
        /// Move id.
        id: u64,
        /// Action.
        what: SteerRequest,
    },
    /// Add a node.
    AddNode(AddNodeRequest),
    /// Move all data away from a node.
    DrainNode(NodeRequest),
    /// Let a drained node receive slots again.
    UndrainNode(NodeRequest),
    /// Remove a node that owns no slots and keys.
    RemoveNode(NodeRequest),
    /// Balance slots or load.
    Balance(BalanceRequest),
    /// Replace the process by a new one.
    Upgrade,
}

impl Operation {
    /// Whether the operation changes state. A dry run does not.
    #[must_use]
    pub fn changes(&self) -> bool {
        match self {
            Self::Moves
            | Self::Slots
            | Self::Misplaced
            | Self::Where(_)
            | Self::Colocation { .. }
            | Self::HotKeys { .. }
            | Self::Load
            | Self::HotCopies => false,
            Self::PlanHistory { .. } | Self::Replay { .. } | Self::Automation | Self::Autoscale => false,
            Self::Rules | Self::CheckRules(_) | Self::LearnRules { .. } => false,
            Self::SteerRules(order) => !matches!(order, RulesOrder::Adopt { dry_run: true, .. }),
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
            | Self::SteerHotCopies(_)
            | Self::Upgrade => true,
        }
    }
}

/// Slots or keys to move. Omitted fields default to the configuration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoveRequest {
    /// Name of the source. Empty: the present owners of the slots or keys.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub from: String,
    /// Name of the target. Empty with `home`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub to: String,
    /// Slots as ranges: `0-100,200`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slots: Option<String>,
    /// Move all slots of the source.
    #[serde(default)]
    pub all: bool,
    /// Move the source's keys that match this pattern (syntax of `KEYS`), without their slots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys: Option<String>,
    /// Return the source's placement overrides to the owners of their slots, or only the keys that match `keys`.
    #[serde(default)]
    pub home: bool,
    /// Only return the plan.
    #[serde(default)]
    pub dry_run: bool,
    /// Options of the move.
    #[serde(flatten)]
    pub how: MoveOptionsRequest,
}

/// The slot map.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SlotsReport {
    /// Epoch of the map.
    pub epoch: u64,
    /// All nodes by number, including nodes without slots.
    pub nodes: Vec<NodeSlotsReport>,
    /// All slots in order, merged into ranges of one owner.
    pub ranges: Vec<RangeReport>,
    /// Slots in transit.
    pub in_transit: Vec<TransitReport>,
    /// Placement overrides: number of keys per slot and node.
    pub overrides: Vec<OverridesReport>,
}

/// Misplaced keys, from a sample of each node that replied.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MisplacedReport {
    /// One entry per node.
    pub nodes: Vec<NodeMisplacedReport>,
}

/// Misplaced keys of a node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeMisplacedReport {
    /// Name of the node.
    pub node: String,
    /// Number of keys in the sample.
    pub keys: u64,
    /// Number of these keys that the slot map places elsewhere, so that no client finds them.
    pub elsewhere: u64,
}

/// Slots and keys of a node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeSlotsReport {
    /// Name of the node.
    pub node: String,
    /// Number of slots.
    pub slots: u64,
    /// Slots as ranges: `0-100,200`.
    pub ranges: String,
    /// Number of placement overrides at the node.
    pub overrides: u64,
}

/// A range of slots with one owner.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RangeReport {
    /// First slot.
    pub first: u16,
    /// Last slot, inclusive.
    pub last: u16,
    /// Owner.
    pub node: String,
}

/// Slots in transit, or some of their keys.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TransitReport {
    /// Move id.
    #[serde(rename = "move")]
    pub move_id: u64,
    /// Name of the source.
    pub from: String,
    /// Name of the target.
    pub to: String,
    /// Slots as ranges: `0-100,200`.
    pub slots: String,
    /// Number of slots.
    pub count: u64,
    /// `listed`: all keys are still at the source. `moving`: each key is at one of the two nodes.
    pub stage: String,
    /// Whether only single keys of the slots move.
    pub keys_only: bool,
}

/// Placement overrides of a slot at one node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OverridesReport {
    /// Slot number.
    pub slot: u16,
    /// Owner of the slot.
    pub owner: String,
    /// Node that has the keys.
    pub node: String,
    /// Number of keys.
    pub keys: u64,
}

/// The most used keys, and the load of their nodes. Key rates are sampled, as weighted averages of the last seconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HotKeysReport {
    /// One entry per node.
    pub nodes: Vec<HotNodeReport>,
}

impl HotKeysReport {
    /// Default number of keys per node.
    pub const KEYS: usize = 10;
    /// Maximum number of keys per node.
    pub const KEYS_MAX: usize = 256;

    /// Parses a number of keys. `None` if it is not between 1 and [`Self::KEYS_MAX`].
    #[must_use]
    pub fn count(text: &str) -> Option<usize> {
        text.parse().ok().filter(|count| (1..=Self::KEYS_MAX).contains(count))
    }
}

/// The most used keys of a node. Unknown numbers are omitted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HotNodeReport {
    /// Name of the node.
    pub node: String,
    /// Uses of keys per second at the node.
    pub uses_per_second: f64,
    /// Hits of hot copies per second, instead of the node.
    pub hits_per_second: f64,
    /// Commands sent to the node in the last second. Exact, not sampled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests_per_second: Option<f64>,
    /// Mean time from sending a command to its reply over the last second, in microseconds. Blocking commands are
    /// excluded. `None` without replies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer_us: Option<f64>,
    /// CPU time of the server over all threads, in percent of one processor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_percent: Option<f64>,
    /// Bytes of memory that the server uses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// `maxmemory` in bytes. 0 means no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_max_bytes: Option<u64>,
    /// Keys, in descending order of use.
    pub keys: Vec<HotKeyReport>,
}

/// A frequently used key.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HotKeyReport {
    /// Name, with bytes other than UTF-8 escaped. `None` if it is longer than 64 bytes, or the client may not read it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Identifies the key and its database until the router restarts: 16 hexadecimal digits.
    pub fingerprint: String,
    /// Database number.
    pub database: u32,
    /// Read-only commands per second.
    pub reads_per_second: f64,
    /// Other commands per second.
    pub writes_per_second: f64,
    /// Hits of hot copies per second.
    pub hits_per_second: f64,
    /// Bytes of these commands per second.
    pub bytes_per_second: f64,
    /// Bytes of the replies per second.
    pub reply_bytes_per_second: f64,
    /// Mean time from sending a command to its reply, in microseconds. Blocking commands are excluded.
    pub wait_us: f64,
    /// Time since the key entered the set of counted keys, in seconds.
    #[serde(default)]
    pub since_seconds: f64,
    /// Share of the uses at the node, in percent.
    pub percent: f64,
}

/// Locations of keys.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WhereReport {
    /// Epoch of the map.
    pub epoch: u64,
    /// Keys in the order of the request.
    pub keys: Vec<KeyReport>,
}

/// Location of a key, whether it exists or not.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct KeyReport {
    /// Name, with bytes other than UTF-8 escaped.
    pub key: String,
    /// Slot of the key.
    pub slot: u16,
    /// Hash tag, if the name contains one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hash_tag: Option<String>,
    /// Owner of the slot.
    pub owner: String,
    /// Node that has the key; in transit, the source.
    pub node: String,
    /// Whether the key was moved without its slot.
    pub relocated: bool,
    /// Transit of the key's slot, which may include the key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_transit: Option<TransitReport>,
}

/// Options of a move.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MoveOptionsRequest {
    /// `fast`, `balanced` or `gentle`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub goal: Option<String>,
    /// Maximum rate, in bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_rate: Option<u64>,
    /// `memory`, `aof` or `replica`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub durability: Option<String>,
    /// `switchyard`, or a protocol for comparison.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol: Option<String>,
    /// Options of a published protocol. Refused without the feature `research`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paper: Option<Box<PaperRequest>>,
    /// Proceed although clients use the nodes directly.
    #[serde(default)]
    pub allow_direct_clients: bool,
    /// Remove keys found at a target in slots that it does not own, regardless of their origin.
    #[serde(default)]
    pub purge_target: bool,
    /// Proceed with a protocol that loses keys. Refused without the feature `research`.
    #[serde(default)]
    pub allow_key_loss: bool,
}

/// Options of a published protocol. Omitted fields default to the paper's values.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PaperRequest {
    /// Structure that tracks the location of groups: `exact`, `bloom`, `bloom+counting` or `adaptive`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tracker: Option<String>,
    /// Number of groups.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub groups: Option<u32>,
    /// Bits of the filter per group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bits: Option<u8>,
    /// Size of the counting filter of groups in progress, bytes; each counter has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counting_bytes: Option<u32>,
    /// Number of groups in progress at a time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub groups_at_once: Option<u8>,
    /// Limit of the client commands per second that the source serves of keys in transit: a number, or `short`, `medium`
    /// or `long` for a share of the source's configured capacity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_ops_max: Option<String>,
    /// For `bloom`: the variant without filter and forwarding.
    #[serde(default)]
    pub no_forwarding: bool,
}

/// An action on a move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SteerRequest {
    /// Pause until the move is resumed.
    Pause,
    /// Resume.
    Resume,
    /// Finish the slots in transit, or return them, then stop.
    Abort(AbortRequest),
    /// Change the goal: `fast`, `balanced` or `gentle`.
    Goal(String),
    /// Change the maximum rate, in bytes per second. `None`: the goal's default.
    MaxRate(Option<u64>),
    /// Change the limit of the source of a move by a published protocol: as [`PaperRequest::source_ops_max`]. `None`: no
    /// limit.
    SourceOpsMax(Option<String>),
}

/// Options of an abort.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AbortRequest {
    /// Do not wait for this node: it is permanently lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub abandon: Option<Abandon>,
    /// Only return the plan, and the keys that would be lost.
    #[serde(default)]
    pub dry_run: bool,
}

/// A permanently lost node of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Abandon {
    /// The node that keys leave.
    Source,
    /// The node that keys go to.
    Target,
}

impl From<Abandon> for Side {
    fn from(abandon: Abandon) -> Self {
        match abandon {
            Abandon::Source => Self::Source,
            Abandon::Target => Self::Target,
        }
    }
}

/// A new goal for a move.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GoalRequest {
    /// `fast`, `balanced` or `gentle`.
    pub goal: String,
}

/// A new maximum rate for a move.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MaxRateRequest {
    /// Bytes per second. `null`: the goal's default. Required, because a default would lift a limit by mistake.
    #[serde(deserialize_with = "Option::deserialize")]
    pub max_rate: Option<u64>,
}

/// A new limit of the source of a move by a published protocol.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceOpsMaxRequest {
    /// As [`PaperRequest::source_ops_max`]. `null`: no limit. Required, because a default would lift a limit by mistake.
    #[serde(deserialize_with = "Option::deserialize")]
    pub source_ops_max: Option<String>,
}

/// A node to add.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddNodeRequest {
    /// Address of the node.
    pub address: String,
    /// Move its share of the slots to it at once.
    #[serde(default)]
    pub rebalance: bool,
    /// Proceed although clients use commands that are incompatible with several nodes.
    #[serde(default)]
    pub allow_limits: bool,
    /// Options of these moves.
    #[serde(flatten)]
    pub how: MoveOptionsRequest,
}

/// A node to drain, undrain or remove.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeRequest {
    /// Address of the node.
    pub address: String,
    /// For a drain: only return the plan.
    pub dry_run: bool,
    /// Options of the moves.
    pub how: MoveOptionsRequest,
}

/// A request to balance, or to move everything away from the node in the path.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BalanceRequest {
    /// Only return the plan.
    #[serde(default)]
    pub dry_run: bool,
    /// Quantity to balance: `slots` (the default) or `load`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
    /// Options of the moves.
    #[serde(flatten)]
    pub how: MoveOptionsRequest,
}

/// Reason why an operation was not performed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OperationError {
    /// The request is invalid.
    Invalid(String),
    /// The request conflicts with the present state.
    Conflict(String),
    /// The operation failed.
    Failed(String),
    /// The router is not serving yet, or no longer.
    Unavailable(String),
}

pub(crate) fn invalid(text: impl Into<String>) -> OperationError {
    OperationError::Invalid(text.into())
}

pub(crate) fn conflict(text: impl Into<String>) -> OperationError {
    OperationError::Conflict(text.into())
}

impl OperationError {
    /// Reason as text.
    #[must_use]
    pub fn text(&self) -> &str {
        match self {
            Self::Invalid(text) | Self::Conflict(text) | Self::Failed(text) | Self::Unavailable(text) => text,
        }
    }

    /// Replaces the text, keeping the variant.
    #[must_use]
    pub fn map(self, text: impl FnOnce(&str) -> String) -> Self {
        let text = text(self.text());
        match self {
            Self::Invalid(_) => Self::Invalid(text),
            Self::Conflict(_) => Self::Conflict(text),
            Self::Failed(_) => Self::Failed(text),
            Self::Unavailable(_) => Self::Unavailable(text),
        }
    }
}

/// Moves that were started, or planned by a dry run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PlanReport {
    /// Whether the moves were only planned.
    pub dry_run: bool,
    /// The moves. A dry run assigns no ids.
    pub moves: Vec<PlannedReport>,
    /// Notes for the operator.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// A move that was started, or planned.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PlannedReport {
    /// Move id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<u64>,
    /// Name of the source.
    pub from: String,
    /// Name of the target.
    pub to: String,
    /// Number of slots.
    pub slots: u64,
    /// Slots as ranges.
    pub ranges: String,
    /// Number of keys, if keys move without their slots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys: Option<u64>,
}

/// All moves.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MovesReport {
    /// Running and queued moves, by id.
    pub moves: Vec<MoveReport>,
    /// The last hundred ended moves, the latest last.
    pub ended: Vec<MoveReport>,
    /// Cost of the journal.
    pub journal: JournalReport,
    /// Effect of an abort, as a sentence for display.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// Keys brought to others because commands needed them together, since the router's start, by command.
    #[serde(default)]
    pub brought_home: Vec<ReturnedKeysReport>,
}

/// Keys brought to others because a client's command needed several keys on one node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReturnedKeysReport {
    /// Name of the command.
    pub command: String,
    /// Number of keys, counted under the command that needed them first.
    pub keys: u64,
}

/// Statistics of the move journal since the router's start.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct JournalReport {
    /// Bytes written.
    pub bytes: u64,
    /// Durable records.
    pub records: u64,
    /// Number of waits for the disk.
    pub syncs: u64,
    /// File length in bytes.
    pub length: u64,
    /// Error that prevents writes now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_error: Option<String>,
}

/// State of a move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MoveState {
    /// Waiting until its nodes are free.
    #[default]
    Queued,
    /// Running.
    Running,
    /// Paused by an operator.
    Paused,
    /// Aborted by an operator: slots in transit are finished or returned, no others are started.
    Aborting,
    /// Ended: the target owns all slots.
    Done,
    /// Ended early.
    Stopped,
}

impl MoveState {
    /// Whether the move has ended.
    #[must_use]
    pub fn has_ended(self) -> bool {
        matches!(self, Self::Done | Self::Stopped)
    }
}

/// A big key that is being copied in pieces. Its name is not disclosed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BigKeyReport {
    /// Type of the value.
    pub kind: String,
    /// Size at the source, in bytes.
    pub bytes: u64,
    /// Bytes copied so far.
    pub copied: u64,
    /// Whether everything has been copied once, and only later writes remain to be copied.
    pub is_read: bool,
    /// Number of restarts, because commands replaced the whole value.
    pub restarts: u32,
}

/// State and progress of a move.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MoveReport {
    /// Move id. Never reused within a state directory.
    pub id: u64,
    /// Name of the source.
    pub from: String,
    /// Name of the target.
    pub to: String,
    /// State.
    pub state: MoveState,
    /// The present activity, or the reason of the end.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    /// Current activity, or the reason for the end.
    pub activity: String,
    /// Protocol, `switchyard` for example.
    pub protocol: String,
    /// Durability: `memory`, `aof`, `replica`.
    pub durability: String,
    /// Goal: `fast`, `balanced`, `gentle`.
    pub goal: String,
    /// Maximum rate, in bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_rate: Option<u64>,
    /// Limit of the client commands per second that the source serves of keys in transit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_ops_max: Option<u32>,
    /// Number of keys, if keys move without their slots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys: Option<u64>,
    /// Pattern that selected these keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pattern: Option<String>,
    /// Commands that need the keys together with others, if the router started this move for them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub home_for: Vec<ReturnedKeysReport>,
    /// Whether the planner started the move.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub planned: bool,
    /// Number of slots (of the keys, if keys move without them).
    pub slots: u64,
    /// Number of slots that the target already owns (or whose keys it already has).
    pub slots_done: u64,
    /// Keys found so far, over the whole move.
    pub keys_listed: u64,
    /// Whether all keys were found.
    pub listed: bool,
    /// Keys moved.
    pub keys_moved: u64,
    /// Bytes of their serialized values.
    pub bytes_moved: u64,
    /// Upper bound of the keys in transit that have not moved yet, or not returned yet if the leg rolls back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leg_keys_left: Option<u64>,
    /// Unresponsive node that the slots in transit wait for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
    /// Upper bound of the keys lost with an abandoned node.
    #[serde(default)]
    pub keys_lost: u64,
    /// Progress in percent.
    #[serde(default)]
    pub percent: f64,
    /// Seconds without progress.
    #[serde(default)]
    pub idle_seconds: f64,
    /// Keys moved early because a command needed them.
    pub pulled: u64,
    /// Batches repeated because their outcome was unknown.
    pub repeated: u64,
    /// Late keys, found at the source afterwards, that were moved.
    pub late_moved: u64,
    /// Late keys that were removed as stale.
    pub late_removed: u64,
    /// Late keys that were left in place.
    pub late_left: u64,
    /// Big keys moved in pieces.
    #[serde(default)]
    pub big_in_pieces: u64,
    /// Big keys moved whole. Commands for them, and others at their nodes, waited in the meantime.
    #[serde(default)]
    pub big_whole: u64,
    /// Maximum time of such a key, in microseconds.
    #[serde(default)]
    pub big_whole_max_us: u64,
    /// The last such key: type, size, time, and the reason why it was not moved in pieces.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub big_whole_last: String,
    /// Big keys being copied in pieces.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub big: Vec<BigKeyReport>,
    /// Commands held back.
    pub holds: u64,
    /// Median hold time, in microseconds.
    pub hold_p50_us: u64,
    /// 99th percentile of the hold time, in microseconds.
    pub hold_p99_us: u64,
    /// Maximum hold time, in microseconds.
    pub hold_max_us: u64,
    /// Current rate, in keys per second.
    pub keys_per_second: f64,
    /// Current rate, in bytes per second.
    pub bytes_per_second: f64,
    /// Estimated seconds left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds_left: Option<f64>,
    /// Elapsed seconds, excluding time without a running router.
    pub seconds: f64,
}
