//! The planner: finds overloaded nodes and selects the cheapest remedy.
//!
//! [`solve`] takes a [`Problem`] (load, limits, movable keys and slots) and the recent moves, and returns a [`Plan`].
//! Without clock or state, the same problem has the same plan, so a decision can be stored, explained, and reproduced.
//! The caller measures the load and executes the moves. [`Cycle`] decides when to solve, and evaluates the effect.
//!
//! - A node is over its **limit** if its requests exceed its capacity minus headroom or, without a known capacity, its
//!   even share plus headroom.
//! - A plan brings nodes down to their **goal**, half of the headroom below the limit. A node between goal and limit is
//!   left alone: hysteresis.
//! - A node that uses more than nine tenths of its `maxmemory` gives idle slots to nodes with room ([`memory`]).
//! - **Remedies** are moves of single keys (placement overrides, Makris et al. 2017) and of whole slots; cold keys
//!   return to their slot owner. Each has a price in bytes.
//!
//! Several ways to fill the nodes are tried ([`remedies`]). The cheapest one that brings every node under its limit
//! wins; the others are kept as alternatives. No exact solver: the problem is bin packing, its measured numbers change
//! every second, and a plan is needed in a fraction of that.
//!
//! Each plan of [`Policy::Switchyard`] asserts: no target ends above its limit, or fuller than the node that it
//! relieves was; moved data fits into memory; recently moved keys and slots stay.

mod cycle;
mod held;
mod injected;
mod makris;
mod memory;
mod problem;
mod remedies;
mod review;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::topology::{NodeId, Slot};
pub use cycle::{
    Author, Cycle, DurableState, Ended, KEY_COOLDOWN, Mode, Next, PauseReason, PlannerConfig, SLOT_COOLDOWN, Started,
};
pub use held::{OverLimitNode, OverLimitReason, held};
pub use injected::Bug;
use injected::InjectedBug;
pub use problem::{FleetContext, KEYS, names};
pub use review::{Effect, Review, fullest_at, nodes_of, revert, review, undo};

/// Name of a key.
pub type Name = Box<[u8]>;

/// Input of a decision.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Problem {
    /// All nodes, ascending.
    pub nodes: Vec<Node>,
    /// Slots that are candidates for a move, ascending. The others stay.
    pub slots: Vec<SlotAt>,
    /// The hottest keys, and keys with placement overrides.
    pub keys: Vec<KeyAt>,
    /// Parameters.
    pub knobs: Knobs,
}

/// A node of the fleet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// Node id.
    pub id: NodeId,
    /// Requests per second, latest measurement.
    pub load: f64,
    /// Load proven for the whole window ([`crate::load::lasting_load`]). Only a sustained load justifies a remedy.
    pub lasting: f64,
    /// Relative share, without a known capacity; 0: no slots.
    pub weight: u32,
    /// Maximum requests per second with acceptable latency, if measured.
    pub capacity: Option<f64>,
    /// Used bytes and memory limit in bytes (0: no limit).
    pub memory: Option<(u64, u64)>,
    /// Keys that a move of slots must scan.
    pub keys: u64,
    /// Whether moves may start now.
    pub state: State,
}

/// Availability of a node for moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum State {
    /// Moves may start.
    Ready,
    /// The node takes part in a move, or has just refused one.
    Busy,
    /// Unavailable.
    Down,
    /// Being removed: everything moves away, nothing moves in.
    Leaving,
}

/// A slot. Excludes the keys listed separately.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SlotAt {
    /// Slot number.
    pub slot: Slot,
    /// Owner.
    pub at: NodeId,
    /// Uses of its keys per second.
    pub load: f64,
    /// Size of all its keys, in bytes.
    pub bytes: u64,
}

/// A key of the problem.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KeyAt {
    /// Name.
    pub key: Name,
    /// Slot of the key.
    pub slot: Slot,
    /// Node that has the key.
    pub at: NodeId,
    /// Owner of the slot.
    pub home: NodeId,
    /// Reads per second that reach the node.
    pub reads: f64,
    /// Writes per second.
    pub writes: f64,
    /// Part of the reads that hot copies will serve once they know the key.
    pub copied: f64,
    /// Size in bytes.
    pub bytes: u64,
    /// Whether the key has been nearly unused for a while.
    pub is_cold: bool,
    /// Reason why the key must stay, if any.
    pub stays: Option<PinnedReason>,
}

impl KeyAt {
    /// Load at the node, without reads that hot copies will serve.
    #[must_use]
    pub fn load(&self) -> f64 {
        self.reads + self.writes - self.copied
    }
}

/// Reason why a key must not move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PinnedReason {
    /// The key has a hash tag, so it is used together with others.
    Tagged,
    /// A command needed the key together with others within the last hour.
    NeededAtHome,
    /// The slot, or keys of it, are in transit.
    Moving,
}

/// Parameters of a decision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Knobs {
    /// Algorithm that selects the remedies.
    pub policy: Policy,
    /// Headroom as a fraction: below the capacity, or above the even share.
    pub headroom: f64,
    /// Minimum requests per second of nodes to relieve. `None`: [`Knobs::least`].
    #[serde(rename = "least")]
    pub least_set: Option<f64>,
    /// Maximum number of keys to move.
    pub keys_max: usize,
    /// Maximum bytes to move.
    pub bytes_max: u64,
}

impl Default for Knobs {
    fn default() -> Self {
        Self { policy: Policy::Switchyard, headroom: 0.1, least_set: None, keys_max: 600, bytes_max: 10 << 30 }
    }
}

impl Knobs {
    /// Default minimum load of a node with a known capacity, and of one without, whose limit is a share: a share of a
    /// small load is noise.
    pub const LEAST: (f64, f64) = (500.0, 5000.0);

    /// Requests per second below which this node is never relieved.
    #[must_use]
    pub fn least(&self, node: &Node) -> f64 {
        self.least_set.unwrap_or(if node.capacity.is_some() { Self::LEAST.0 } else { Self::LEAST.1 })
    }
}

/// Algorithm that selects the remedies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// The cheapest of several ways with a fit test, using keys and slots.
    #[default]
    Switchyard,
    /// The loop printed in the paper of Makris et al.: the most popular key of each overloaded node goes to the node
    /// with the least load, whether it fits or not.
    #[cfg(feature = "research")]
    MakrisPrinted,
    /// The algorithm described in the paper's text: first fit decreasing. A key that fits nowhere goes to the node with
    /// the most room.
    MakrisFfd,
    /// First fit decreasing; a key that fits nowhere stays.
    MakrisSafe,
}

/// Recent moves.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Previous {
    /// Keys that moved recently and must stay.
    pub keys: Vec<Name>,
    /// Slots that moved recently and must stay.
    pub slots: Vec<Slot>,
    /// Nodes that were over their limit, to be relieved down to their goal.
    pub over: Vec<NodeId>,
}

/// A planner decision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Outcome.
    pub verdict: Verdict,
    /// Keys and slots to move.
    pub steps: Vec<Step>,
    /// Total price.
    pub price: Price,
    /// Each node before and after.
    pub nodes: Vec<Outlook>,
    /// Rejected ways, with their prices.
    pub alternatives: Vec<Alternative>,
    /// Remedies for the operator.
    pub advice: Vec<Advice>,
}

/// Outcome of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// No node is over its limit.
    Fine,
    /// All nodes are below their limits afterwards.
    Relieved,
    /// Some nodes remain over their limits, but the plan helps.
    Partly,
    /// No permitted move helps.
    NoneFound,
}

/// A move of a plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Key or slots to move.
    pub what: StepSubject,
    /// Source node.
    pub from: NodeId,
    /// Target node.
    pub to: NodeId,
    /// Requests per second that move along.
    pub load: f64,
    /// Bytes to move.
    pub bytes: u64,
    /// Reason to relieve the source.
    #[serde(default)]
    pub need: Need,
}

/// Resource that a node lacks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Need {
    /// Capacity for requests.
    #[default]
    Requests,
    /// Free memory.
    Memory,
}

/// Subject of a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum StepSubject {
    /// A single key, away from its slot owner or back to it.
    Key {
        /// Name.
        key: Name,
        /// Slot of the key.
        slot: Slot,
        /// The key is cold and returns to its slot owner.
        is_cold: bool,
    },
    /// Whole slots, ascending.
    Slots(Vec<Slot>),
}

/// Price of a plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Price {
    /// Bytes to move.
    pub bytes: u64,
    /// Single keys to move.
    pub keys: usize,
    /// Slots to move.
    pub slots: usize,
    /// Total, in bytes. Includes scanning a node's keys and storing placement overrides.
    pub total: f64,
}

impl Price {
    fn add_key(&mut self, bytes: u64) {
        (self.keys, self.bytes, self.total) = (self.keys + 1, self.bytes + bytes, self.total + bytes as f64);
    }
}

/// A node before and after a plan.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outlook {
    /// Node id.
    pub node: NodeId,
    /// Current requests per second.
    pub before: f64,
    /// Predicted requests per second.
    pub after: f64,
    /// Limit in requests per second.
    pub limit: f64,
    /// Used bytes, and the bytes above which the node is relieved. `None` without `maxmemory`.
    #[serde(default)]
    pub memory: Option<(u64, u64)>,
}

/// A rejected way.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Alternative {
    /// The way.
    pub way: Way,
    /// Whether it would bring every node under its limit.
    pub relieves: bool,
    /// Price of the way.
    pub price: Price,
    /// Load of the fullest node afterwards, relative to its limit. Nodes being removed do not count.
    pub fullest: f64,
}

/// A way to relieve nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// Hottest keys first, then slots.
    KeysFirst,
    /// Keys and slots with the best relief per price.
    Cheapest,
    /// Whole slots only, busiest first.
    Slots,
    /// Whole slots only, those with the best relief for their price first.
    CheapSlots,
    /// A search over the largest keys and slots, if no greedy way relieves all nodes: for fleets with little room.
    Search,
}

/// Advice to the operator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Advice {
    /// The fleet as a whole has too little capacity.
    AddNode {
        /// Requests per second above the capacity.
        missing: f64,
    },
    /// The other nodes have enough capacity without this one.
    RemoveNode {
        /// The node.
        node: NodeId,
    },
    /// A key, or the keys that a hash tag binds to a slot, exceed the limit of every node. They cannot be split, so
    /// nothing moves away from their node.
    Unsplittable {
        /// The key, or the hottest key of the slot. `None`: no key of the slot is listed.
        key: Option<Name>,
        /// Slot of the key. `None`: recorded by an earlier version.
        #[serde(default)]
        slot: Option<Slot>,
        /// Whether the whole slot exceeds the limit, rather than the key alone.
        #[serde(default)]
        is_slot: bool,
        /// The node that has it.
        at: NodeId,
        /// Requests per second.
        load: f64,
    },
    /// Hot copies are about to serve reads of a key, so it does not move.
    Copies {
        /// Name.
        key: Name,
        /// Reads per second.
        reads: f64,
    },
}

/// Returns the plan for a problem.
#[must_use]
pub fn solve(problem: &Problem, previous: &Previous) -> Plan {
    solve_with(problem, previous, InjectedBug::default())
}

/// Like [`solve`], with an injected bug.
#[cfg(feature = "planted-bugs")]
#[must_use]
pub fn solve_wrongly(problem: &Problem, previous: &Previous, bug: Bug) -> Plan {
    solve_with(problem, previous, InjectedBug::new(Some(bug)))
}

fn solve_with(problem: &Problem, previous: &Previous, planted: InjectedBug) -> Plan {
    let fleet = Fleet::of(problem, planted);
    let over = fleet.over(previous);
    match problem.knobs.policy {
        Policy::Switchyard => remedies::solve(problem, previous, &fleet, &over),
        policy => makris::solve(problem, previous, &fleet, &over, policy),
    }
}

/// The nodes with their limits.
#[derive(Clone, Debug)]
struct Fleet<'p> {
    nodes: BTreeMap<NodeId, Place<'p>>,
    planted: InjectedBug,
}

#[derive(Clone, Debug)]
struct Place<'p> {
    node: &'p Node,
    /// Current load minus the reads that hot copies will serve.
    load: f64,
    limit: f64,
    goal: f64,
    /// Requests per second below which the node is never relieved.
    least: f64,
}

impl<'p> Fleet<'p> {
    fn of(problem: &'p Problem, planted: InjectedBug) -> Self {
        let mut copied: BTreeMap<NodeId, f64> = BTreeMap::new();
        for key in &problem.keys {
            *copied.entry(key.at).or_default() += key.copied;
        }
        let seen = |node: &Node| if planted.is(Bug::StaleObservation) { node.lasting } else { node.load };
        let load = |node: &Node| (seen(node) - copied.get(&node.id).copied().unwrap_or_default()).max(0.0);
        let weight =
            |node: &Node| if matches!(node.state, State::Down | State::Leaving) { 0.0 } else { f64::from(node.weight) };
        let all: f64 = problem.nodes.iter().filter(|node| node.state != State::Down).map(load).sum();
        let weights: f64 = problem.nodes.iter().map(weight).sum();
        let headroom = problem.knobs.headroom.clamp(0.0, 0.9);
        let place = |node: &'p Node| {
            let (limit, goal) = match (node.capacity, weight(node)) {
                (_, 0.0) => (0.0, 0.0),
                (Some(capacity), _) => (capacity * (1.0 - headroom), capacity * (1.0 - headroom * 1.5).max(0.0)),
                (None, weight) => {
                    // Minimum 1, so that a fleet without load has room too: slots without load may go anywhere.
                    let share = all.max(1.0) * weight / weights;
                    (share * (1.0 + headroom), share * (1.0 + headroom / 2.0))
                }
            };
            (node.id, Place { node, load: load(node), limit, goal, least: problem.knobs.least(node) })
        };
        Self { nodes: problem.nodes.iter().map(place).collect(), planted }
    }

    /// The nodes to relieve, fullest first.
    fn over(&self, previous: &Previous) -> Vec<NodeId> {
        let is_over = |place: &Place<'_>| match place.node.state {
            State::Leaving => true,
            State::Busy | State::Down => false,
            State::Ready => {
                let was_over = previous.over.contains(&place.node.id) || self.planted.is(Bug::Oscillation);
                let most = if was_over { place.goal } else { place.limit };
                // A node of weight 0 receives nothing. Only a drain empties it.
                place.limit > 0.0 && place.load.min(place.node.lasting) > most && place.load >= place.least
            }
        };
        let mut over: Vec<&Place<'_>> = self.nodes.values().filter(|place| is_over(place)).collect();
        over.sort_by(|one, other| {
            other.fullness(other.load).total_cmp(&one.fullness(one.load)).then(one.node.id.cmp(&other.node.id))
        });
        over.into_iter().map(|place| place.node.id).collect()
    }

    /// Each node before and after these steps.
    fn outlook(&self, steps: &[Step]) -> Vec<Outlook> {
        let mut after: BTreeMap<NodeId, f64> = self.nodes.iter().map(|(id, place)| (*id, place.load)).collect();
        for step in steps {
            *after.entry(step.from).or_default() -= step.load;
            *after.entry(step.to).or_default() += step.load;
        }
        let outlook = |place: &Place<'_>| {
            let node = place.node.id;
            Outlook {
                node,
                before: place.node.load,
                after: after[&node].max(0.0),
                limit: place.limit,
                memory: memory::use_and_limit(place),
            }
        };
        self.nodes.values().map(outlook).collect()
    }
}

impl Place<'_> {
    /// Load relative to the limit.
    fn fullness(&self, load: f64) -> f64 {
        match (load > 0.0, self.limit > 0.0) {
            (false, _) => 0.0,
            (true, true) => load / self.limit,
            (true, false) => f64::INFINITY,
        }
    }

    /// Current load relative to the limit. Infinite for a node being removed, even without load.
    fn fullness_before(&self) -> f64 {
        if self.node.state == State::Leaving { f64::INFINITY } else { self.fullness(self.load) }
    }

    /// Whether `bytes` more fit into the memory limit, with a tenth left free.
    fn has_memory(&self, taken: u64, bytes: u64) -> bool {
        match self.node.memory {
            Some((used, most)) if most > 0 => used.saturating_add(taken).saturating_add(bytes) <= most - most / 10,
            _ => true,
        }
    }
}

/// Advice independent of the remedy: too little capacity, unsplittable keys, and reads that copies will serve.
fn advice(problem: &Problem, fleet: &Fleet<'_>, over: &[NodeId]) -> Vec<Advice> {
    let mut advice = Vec::new();
    let taking = || {
        fleet.nodes.values().filter(|place| matches!(place.node.state, State::Ready | State::Busy) && place.limit > 0.0)
    };
    let is_measured = taking().next().is_some() && taking().all(|place| place.node.capacity.is_some());
    let load: f64 = fleet.nodes.values().map(|place| place.load).sum();
    let room: f64 = taking().map(|place| place.limit).sum();
    if is_measured && load > room {
        advice.push(Advice::AddNode { missing: load - room });
    }
    if is_measured && over.is_empty() {
        // The node with the least load, if the others then keep a fifth of their goals free.
        let spare = |gone: &Place<'_>| taking().map(|place| place.goal).sum::<f64>() - gone.goal - load;
        let least = taking().min_by(|one, other| one.load.total_cmp(&other.load));
        let goals: f64 = taking().map(|place| place.goal).sum();
        if let Some(node) = least.filter(|least| taking().count() > 1 && spare(least) > goals / 5.0) {
            advice.push(Advice::RemoveNode { node: node.node.id });
        }
    }
    for key in problem.keys.iter().filter(|key| key.copied > 0.0 && over.contains(&key.at)) {
        advice.push(Advice::Copies { key: key.key.clone(), reads: key.copied });
    }
    advice.extend(over.iter().filter_map(|id| unsplittable(problem, fleet, *id)));
    advice
}

/// The heaviest key or slot of a node, if it exceeds the limit of every node.
fn unsplittable(problem: &Problem, fleet: &Fleet<'_>, node: NodeId) -> Option<Advice> {
    let most = fleet
        .nodes
        .values()
        .filter(|place| place.node.id == node || place.node.state != State::Down)
        .map(|place| place.limit);
    let most = most.fold(0.0, f64::max);
    // Keys with a hash tag move only with their slot, like the slot's other keys.
    let mut slots: BTreeMap<Slot, (f64, Option<&KeyAt>)> =
        problem.slots.iter().filter(|slot| slot.at == node).map(|slot| (slot.slot, (slot.load, None))).collect();
    let (tagged, single): (Vec<&KeyAt>, Vec<&KeyAt>) =
        problem.keys.iter().filter(|key| key.at == node).partition(|key| key.stays == Some(PinnedReason::Tagged));
    for key in tagged {
        let (load, hottest) = slots.entry(key.slot).or_default();
        *load += key.load();
        *hottest = hottest.filter(|hottest| hottest.load() >= key.load()).or(Some(key));
    }
    let key = single.into_iter().map(|key| (key.load(), key.slot, Some(key), false));
    let slot = slots.into_iter().map(|(slot, (load, hottest))| (load, slot, hottest, true));
    let heaviest = key.chain(slot).max_by(|one, other| one.0.total_cmp(&other.0))?;
    let (load, slot, key, is_slot) = heaviest;
    (load > most).then(|| Advice::Unsplittable {
        key: key.map(|key| key.key.clone()),
        slot: Some(slot),
        is_slot,
        at: node,
        load,
    })
}
