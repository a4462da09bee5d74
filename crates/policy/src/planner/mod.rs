//! The planner: sees which nodes have too much to do, and chooses the cheapest remedy.
//!
//! [`solve`] takes a [`Problem`] (the load, the limits, what may move) and what was done lately, and gives a [`Plan`].
//! It has no clock and no state, and the same problem has the same plan: so a decision can be kept, explained and made
//! again. The caller measures the load, and has the moves made.
//!
//! - A node is over its **limit** where it has more requests than its capacity less headroom, or, where no capacity is
//!   known, more than its even share and headroom.
//! - A plan takes nodes down to their **goal**, which is half of the headroom below the limit. A node between the two
//!   is left alone: that is the hysteresis.
//! - A node that uses more than nine tenths of its `maxmemory` gives idle slots to nodes with room ([`memory`]).
//! - **Remedies** are moves of single keys (exceptions, Makris et al. 2017) and of whole slots, and keys that have
//!   grown cold go home. Each has a price in bytes.
//!
//! Several ways to fill the nodes are tried ([`remedies`]), and the cheapest one that brings every node under its limit
//! wins; the others are kept as alternatives. Not an exact solver: the problem is bin packing, its numbers are measured
//! and change every second, and a plan must be there in a fraction of one.
//!
//! Each plan of [`Policy::Switchyard`] asserts: no target ends above its limit, nor fuller than the node that it
//! relieved was; what moves fits into memory; what moved lately stays.

mod held;
mod makris;
mod memory;
mod planted;
mod remedies;
mod review;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::topology::{NodeId, Slot};
pub use held::{Held, Why, held};
pub use planted::Bug;
use planted::InjectedBug;
pub use review::{Effect, Review, fullest_at, nodes_of, review, take_back, undo};

/// The name of a key.
pub type Name = Box<[u8]>;

/// The facts and the goals of a decision.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Problem {
    /// All nodes, ascending.
    pub nodes: Vec<Node>,
    /// Slots that may be worth to be moved, ascending. The others stay.
    pub slots: Vec<SlotAt>,
    /// The keys that are used most, and those that live away from their slots.
    pub keys: Vec<KeyAt>,
    /// How to decide.
    pub knobs: Knobs,
}

/// A node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// Its number.
    pub id: NodeId,
    /// Requests in a second, by the newest look.
    pub load: f64,
    /// The load that it certainly had for the whole window ([`crate::load::lasting_load`]). Only what lasts is worth a
    /// remedy.
    pub lasting: f64,
    /// Its share, where no capacity is known; 0: it is to have nothing.
    pub weight: u32,
    /// Requests in a second that it can answer in time, where that was measured.
    pub capacity: Option<f64>,
    /// Bytes that its server uses, and may use (0: no limit).
    pub memory: Option<(u64, u64)>,
    /// Keys that a move of slots has to look through.
    pub keys: u64,
    /// Whether something may be moved now.
    pub state: State,
}

/// Whether a node may give and take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum State {
    /// It may.
    Ready,
    /// Nothing is begun there now: a move is under way, or a move was just refused.
    Busy,
    /// It cannot be used.
    Down,
    /// It is to be left: everything goes, nothing comes.
    Leaving,
}

/// A slot. Its keys that are listed by themselves do not count.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SlotAt {
    /// Its number.
    pub slot: Slot,
    /// Its owner.
    pub at: NodeId,
    /// Uses of its keys in a second.
    pub load: f64,
    /// Bytes that its keys take, all of them.
    pub bytes: u64,
}

/// A key.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KeyAt {
    /// Its name.
    pub key: Name,
    /// Its slot.
    pub slot: Slot,
    /// Where it lives.
    pub at: NodeId,
    /// The owner of its slot.
    pub home: NodeId,
    /// Reads in a second that reach the node.
    pub reads: f64,
    /// Writes in a second.
    pub writes: f64,
    /// Of the reads, those that hot copies will answer as soon as they have seen the key.
    pub copied: f64,
    /// Bytes that it takes.
    pub bytes: u64,
    /// It has not been used to speak of for a while.
    pub is_cold: bool,
    /// It stays where it is, and why.
    pub stays: Option<PinnedReason>,
}

impl KeyAt {
    /// Its load at its node, once hot copies have taken their part.
    #[must_use]
    pub fn load(&self) -> f64 {
        self.reads + self.writes - self.copied
    }
}

/// Why a key is not moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PinnedReason {
    /// Its name has a hash tag: it is used together with others.
    Tagged,
    /// A command has needed it together with others of its slot within the hour.
    NeededAtHome,
    /// Something of its slot is on its way.
    Moving,
}

/// How to decide.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Knobs {
    /// By which policy.
    pub policy: Policy,
    /// Part of a limit that is kept free: of the capacity, or above the even share.
    pub headroom: f64,
    /// Nodes with fewer requests per second are never relieved. None: [`Knobs::least`].
    #[serde(rename = "least")]
    pub least_set: Option<f64>,
    /// Keys that may move now.
    pub keys_max: usize,
    /// Bytes that may move now.
    pub bytes_max: u64,
}

impl Default for Knobs {
    fn default() -> Self {
        Self { policy: Policy::Switchyard, headroom: 0.1, least_set: None, keys_max: 600, bytes_max: 10 << 30 }
    }
}

impl Knobs {
    /// The least load by default of a node with a capacity, and of one without: its limit is a share, and that of
    /// little load is noise.
    pub const LEAST: (f64, f64) = (500.0, 5000.0);

    /// Requests per second below which this node is never relieved.
    #[must_use]
    pub fn least(&self, node: &Node) -> f64 {
        self.least_set.unwrap_or(if node.capacity.is_some() { Self::LEAST.0 } else { Self::LEAST.1 })
    }
}

/// The rule by which remedies are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// The cheapest of several ways, with a fit test, by keys and slots.
    #[default]
    Switchyard,
    /// The loop that the paper of Makris et al. prints: the most popular key of each overloaded node goes to the one
    /// with the least load, whether it fits or not.
    MakrisPrinted,
    /// The meaning of its text: first fit decreasing. A key that fits nowhere goes where most room is left.
    MakrisFfd,
    /// The same, and a key that fits nowhere stays.
    MakrisSafe,
}

/// The latest moves.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Previous {
    /// Keys that have moved so lately that they stay.
    pub keys: Vec<Name>,
    /// Slots that have, too.
    pub slots: Vec<Slot>,
    /// Nodes that were over their limit, and are taken down to their goal.
    pub over: Vec<NodeId>,
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// The result.
    pub verdict: Verdict,
    /// What moves.
    pub steps: Vec<Step>,
    /// The price.
    pub price: Price,
    /// Each node before and after.
    pub nodes: Vec<Outlook>,
    /// Other ways to the same end, and what they would cost.
    pub alternatives: Vec<Alternative>,
    /// Remedies that the planner does not have.
    pub advice: Vec<Advice>,
}

/// The result of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// No node is over its limit.
    Fine,
    /// All nodes are under their limits afterwards.
    Relieved,
    /// It helps, and some node stays over its limit.
    Partly,
    /// Nothing that may be done helps.
    NoneFound,
}

/// Something that moves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// What.
    pub what: What,
    /// From where.
    pub from: NodeId,
    /// To where.
    pub to: NodeId,
    /// Requests in a second that go with it.
    pub load: f64,
    /// Bytes that are moved.
    pub bytes: u64,
    /// The need of the node that it leaves.
    #[serde(default)]
    pub need: Need,
}

/// The need of a node that is relieved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Need {
    /// Fewer requests.
    #[default]
    Requests,
    /// More free memory.
    Memory,
}

/// What moves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum What {
    /// A key without its slot, or back to it.
    Key {
        /// Its name.
        key: Name,
        /// Its slot.
        slot: Slot,
        /// It goes home because it has grown cold.
        is_cold: bool,
    },
    /// Whole slots, ascending.
    Slots(Vec<Slot>),
}

/// The price of a plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Price {
    /// Bytes that are moved.
    pub bytes: u64,
    /// Keys that move by themselves.
    pub keys: usize,
    /// Slots that move.
    pub slots: usize,
    /// All of it as bytes: with what it costs to look through a node's keys, and to remember exceptions.
    pub total: f64,
}

impl Price {
    fn add_key(&mut self, bytes: u64) {
        (self.keys, self.bytes, self.total) = (self.keys + 1, self.bytes + bytes, self.total + bytes as f64);
    }
}

/// A node before and after.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outlook {
    /// Its number.
    pub node: NodeId,
    /// Requests in a second now.
    pub before: f64,
    /// As predicted.
    pub after: f64,
    /// The limit.
    pub limit: f64,
    /// Bytes that it uses now, and may use before it is relieved. None without `maxmemory`.
    #[serde(default)]
    pub memory: Option<(u64, u64)>,
}

/// Another way.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Alternative {
    /// Which.
    pub way: Way,
    /// Whether every node would be under its limit.
    pub relieves: bool,
    /// Its price.
    pub price: Price,
    /// The fullest node afterwards, as a part of its limit. Nodes that leave do not count.
    pub fullest: f64,
}

/// A way to relieve nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// The hottest keys first, then slots.
    KeysFirst,
    /// The pieces that relieve most for their price.
    Cheapest,
    /// Whole slots only, the busiest first.
    Slots,
    /// Whole slots only, those that relieve most for their price.
    CheapSlots,
    /// A search over the largest pieces, where no greedy way relieves all nodes: for fleets with little room.
    Search,
}

/// Advice to people.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Advice {
    /// All nodes together have too little room: so many requests in a second.
    AddNode {
        /// Requests in a second without room.
        missing: f64,
    },
    /// The others could do without this one.
    RemoveNode {
        /// Which.
        node: NodeId,
    },
    /// A key, or the keys that a hash tag binds to a slot, exceed the limit of every node. They cannot be split, so
    /// nothing moves away from their node.
    Unsplittable {
        /// The key, or the hottest key of the slot. None: no key of the slot is listed.
        key: Option<Name>,
        /// The slot of the key. None: recorded by an earlier version.
        #[serde(default)]
        slot: Option<Slot>,
        /// Whether the whole slot is meant, and not the key alone.
        #[serde(default)]
        is_slot: bool,
        /// The node that has it.
        at: NodeId,
        /// Requests per second.
        load: f64,
    },
    /// Hot copies are about to answer so many reads of a key, so it does not move.
    Copies {
        /// Its name.
        key: Name,
        /// Reads in a second.
        reads: f64,
    },
}

/// Gives the plan for a problem.
#[must_use]
pub fn solve(problem: &Problem, previous: &Previous) -> Plan {
    solve_with(problem, previous, InjectedBug::default())
}

/// The same with a bug.
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

/// The nodes, with what each may have.
#[derive(Clone, Debug)]
struct Fleet<'p> {
    nodes: BTreeMap<NodeId, Place<'p>>,
    planted: InjectedBug,
}

#[derive(Clone, Debug)]
struct Place<'p> {
    node: &'p Node,
    /// Now, less what hot copies will take.
    load: f64,
    limit: f64,
    goal: f64,
    /// Requests per second below which it is never relieved.
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
                    // A fleet without load has room, too: slots without load may go anywhere.
                    let share = all.max(1.0) * weight / weights;
                    (share * (1.0 + headroom), share * (1.0 + headroom / 2.0))
                }
            };
            (node.id, Place { node, load: load(node), limit, goal, least: problem.knobs.least(node) })
        };
        Self { nodes: problem.nodes.iter().map(place).collect(), planted }
    }

    /// The nodes that are to be relieved, the fullest first.
    fn over(&self, previous: &Previous) -> Vec<NodeId> {
        let is_over = |place: &Place<'_>| match place.node.state {
            State::Leaving => true,
            State::Busy | State::Down => false,
            State::Ready => {
                let was_over = previous.over.contains(&place.node.id) || self.planted.is(Bug::Oscillation);
                let most = if was_over { place.goal } else { place.limit };
                // A node of weight 0 gets nothing. Only its drain takes what it has.
                place.limit > 0.0 && place.load.min(place.node.lasting) > most && place.load >= place.least
            }
        };
        let mut over: Vec<&Place<'_>> = self.nodes.values().filter(|place| is_over(place)).collect();
        over.sort_by(|one, other| {
            other.fullness(other.load).total_cmp(&one.fullness(one.load)).then(one.node.id.cmp(&other.node.id))
        });
        over.into_iter().map(|place| place.node.id).collect()
    }

    /// Each node before, and after these steps.
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
    /// Its fullness with so many requests: 1 is its limit.
    fn fullness(&self, load: f64) -> f64 {
        match (load > 0.0, self.limit > 0.0) {
            (false, _) => 0.0,
            (true, true) => load / self.limit,
            (true, false) => f64::INFINITY,
        }
    }

    /// Its fullness now. A node that leaves is fuller than any other, also where it has nothing to do.
    fn fullness_before(&self) -> f64 {
        if self.node.state == State::Leaving { f64::INFINITY } else { self.fullness(self.load) }
    }

    /// Whether something of so many bytes fits into what it may use, with a tenth left.
    fn has_memory(&self, taken: u64, bytes: u64) -> bool {
        match self.node.memory {
            Some((used, most)) if most > 0 => used.saturating_add(taken).saturating_add(bytes) <= most - most / 10,
            _ => true,
        }
    }
}

/// Advice whatever the remedy: too little room, keys that no node can take, and reads that copies will take.
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
        // The one with the least to move, if the others then keep a fifth of their goals.
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

/// The heaviest key or slot of a node, if it exceeds the limit of its own and of every other node.
fn unsplittable(problem: &Problem, fleet: &Fleet<'_>, node: NodeId) -> Option<Advice> {
    let most = fleet
        .nodes
        .values()
        .filter(|place| place.node.id == node || place.node.state != State::Down)
        .map(|place| place.limit);
    let most = most.fold(0.0, f64::max);
    // Keys with a hash tag move with their slot only, as its other keys do.
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
