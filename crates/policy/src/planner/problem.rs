//! Converts measurements to the planner's input ([`Problem`]).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::{KeyAt, Knobs, Name, Node, PinnedReason, Problem, SlotAt, State};
use crate::load::{Expected, ObservedLoad, SampledRate, SlotLoad, lasting_load};
use crate::telemetry::HotKey;
use crate::topology::{NodeId, Placement, SLOT_NUMBERS, Slot, Topology};

/// Maximum number of keys per node that are considered.
pub const KEYS: usize = 256;

/// Maximum number of slots of a busy node that are considered, the busiest first. A plan that needs more takes several
/// rounds.
const SLOTS: usize = 1024;

/// Seconds after which hot copies have detected a key, if they ever do.
const COPIED_WITHIN: f64 = 4.0;

/// Fraction that remains of an unsustained rate after a second ([`crate::telemetry::Weights`]).
const HALF: f64 = 0.5;

/// Maximum factor for scaling the slots' load to the node's load, because slots are measured slowly.
const SCALE: f64 = 4.0;

/// Limits of hot copies: minimum reads per second, and minimum ratio of reads to writes.
const COPIED_READS: f64 = 100.0;
const READS_FOR_A_WRITE: f64 = 4.0;

/// Minimum and maximum seconds of data behind a key's rate. Older segments have little weight.
const RATE_SECONDS: (f64, f64) = (1.0, 3.0);

/// Loads of nodes at one time.
#[derive(Clone, Debug)]
pub(super) struct LoadSample {
    pub(super) at: Duration,
    /// Epoch of the topology. Loads of different epochs are not compared.
    pub(super) epoch: u64,
    /// By node number; 0 for numbers without a node. An array rather than a map: a fleet of 1,024 nodes has 60,000
    /// loads, which each step reads.
    pub(super) nodes: Vec<f64>,
}

impl LoadSample {
    fn of(&self, node: NodeId) -> f64 {
        self.nodes.get(node.index()).copied().unwrap_or_default()
    }

    /// Load of all nodes; above 0.
    fn total(&self) -> f64 {
        self.nodes.iter().sum::<f64>().max(1e-9)
    }
}

/// Further facts about a fleet.
#[derive(Clone, Debug, Default)]
pub struct FleetContext {
    /// Weight by node. 0: the node gets nothing.
    pub weights: BTreeMap<NodeId, u32>,
    /// Configured capacities, in requests per second.
    pub capacities: BTreeMap<NodeId, f64>,
    /// Nodes that take part in a move.
    pub busy: BTreeSet<NodeId>,
    /// Unusable nodes.
    pub down: BTreeSet<NodeId>,
    /// Nodes that must become empty.
    pub leaving: BTreeSet<NodeId>,
    /// Observed keys that commands needed together with others within the last hour.
    pub needed: BTreeSet<Name>,
    /// Whether hot copies answer reads.
    pub copies: bool,
}

/// Whether the planner may relieve this node of memory.
fn is_short_of_memory(node: &Node) -> bool {
    node.memory.is_some_and(|(used, most)| most > 0 && used > most / 100 * 80)
}

/// Current load of a node: the requests sent there, or, if they were not counted twice yet, the uses of its keys.
pub(super) fn load_of(load: &ObservedLoad, node: NodeId) -> f64 {
    let requests = load.nodes.get(&node).and_then(|node| node.requests);
    requests.unwrap_or_else(|| load.keys.iter().find(|hot| hot.node == node).map_or(0.0, |hot| hot.uses))
}

/// Names of the most used keys. A name that exists in several databases is returned for each, but moves as a whole.
pub fn names(load: &ObservedLoad) -> impl Iterator<Item = &[u8]> {
    load.keys.iter().flat_map(|node| &node.keys).filter_map(|hot| hot.name.key())
}

/// Recent loads, and the required evidence.
pub(super) struct LoadHistory<'l> {
    /// Loads, oldest first.
    pub(super) seen: &'l VecDeque<LoadSample>,
    pub(super) window: Duration,
    /// Number of recent decisions about a node. Each adds [`ERRORS`] to the evidence that its next one needs.
    pub(super) decisions: &'l dyn Fn(NodeId) -> usize,
}

/// Minimum excess of the mean load over a limit, in standard errors. A smaller excess is noise.
const ERRORS: f64 = 4.0;

pub(super) fn problem(
    topology: &Topology,
    load: &ObservedLoad,
    LoadHistory { seen, window, decisions }: &LoadHistory<'_>,
    around: &FleetContext,
    cold: &BTreeSet<Name>,
    knobs: Knobs,
) -> Problem {
    let newest = || seen.iter().rev();
    let alike = newest().take_while(|look| seen.back().is_some_and(|last| last.epoch == look.epoch)).count();
    // Loads that span the window: one more than start within it.
    let in_window =
        newest().take_while(|look| seen.back().is_some_and(|last| last.at - look.at <= window.mul_f64(0.9))).count()
            + 1;
    // Without a capacity, the limit is a fraction of the total load, which may vary by itself. Scale the compared load
    // accordingly.
    let last = seen.back().map_or(1.0, LoadSample::total);
    let scales: Vec<f64> = seen.iter().map(|look| last / look.total()).collect();
    let nodes: Vec<Node> = topology
        .nodes()
        .map(|node| {
            let id = node.id;
            let capacity = around.capacities.get(&id).copied();
            let scale = |scale: f64| if capacity.is_some() { 1.0 } else { scale };
            let loads: Vec<f64> = seen.iter().zip(&scales).map(|(look, by)| look.of(id) * scale(*by)).collect();
            let server = load.nodes.get(&id).copied().unwrap_or_default();
            let state = match () {
                () if around.down.contains(&id) => State::Down,
                () if around.busy.contains(&id) => State::Busy,
                () if around.leaving.contains(&id) => State::Leaving,
                () => State::Ready,
            };
            Node {
                id,
                // Use the latest load, because a mean over the window would contain the time before a change.
                load: loads.last().copied().unwrap_or_default(),
                lasting: lasting_load(&loads, alike, in_window, ERRORS * (1.0 + decisions(id) as f64)),
                weight: around.weights.get(&id).copied().unwrap_or(1),
                capacity,
                memory: server.memory.map(|used| (used, server.memory_max.unwrap_or(0))),
                keys: server.keys.unwrap_or(0),
                state,
            }
        })
        .collect();
    let keys = keys(topology, load, around, cold);
    let mut explained: BTreeMap<NodeId, f64> = BTreeMap::new();
    // By slot. An array rather than a map, because each slot of each busy node is looked up several times.
    let mut of_keys: Vec<Option<f64>> = vec![None; SLOT_NUMBERS];
    for key in &keys {
        *of_keys[key.slot.index()].get_or_insert_default() += key.reads + key.writes;
        *explained.entry(key.at).or_default() += key.reads + key.writes;
    }
    let mean = nodes.iter().map(|node| node.load).sum::<f64>() / nodes.len().max(1) as f64;
    let is_full =
        |node: &&Node| node.load > node.capacity.map_or(mean, |capacity| capacity / 2.0) || is_short_of_memory(node);
    let mut owned: BTreeMap<NodeId, Vec<Slot>> = nodes
        .iter()
        .filter(|node| node.state == State::Leaving || is_full(node))
        .map(|node| (node.id, Vec::new()))
        .collect();
    for slot in topology.slots() {
        if let Some(owned) = owned.get_mut(&topology.owner(slot)) {
            owned.push(slot);
        }
    }
    let mut slots = Vec::new();
    for node in &nodes {
        let Some(owned) = owned.remove(&node.id) else { continue };
        let is_left = node.state == State::Leaving;
        // Bytes per slot are not measured, so divide the node's memory evenly.
        let bytes = node.memory.map_or(0, |(used, _)| used) / owned.len().max(1) as u64;
        let of_slot = |slot: Slot| of_keys[slot.index()].unwrap_or_default();
        let rest = |slot: Slot| (load.slot(slot).commands - of_slot(slot)).max(0.0);
        // Every request is for some key. Spread the requests that no listed key explains over the slots, in the
        // measured proportions.
        let explained = explained.get(&node.id).copied().unwrap_or_default();
        let measured: f64 = owned.iter().copied().map(rest).sum();
        let unexplained = (node.load - explained).max(0.0);
        let scale = (unexplained / measured.max(1e-9)).clamp(1.0 / SCALE, SCALE);
        let expected = Expected::of(owned.iter().map(|slot| {
            let SlotLoad { commands, noise, .. } = load.slot(*slot);
            (rest(*slot), noise * rest(*slot) / commands.max(1e-9))
        }));
        // Limit the sum to this load: a slot with a single sample tends to the mean, and there are many such slots.
        let promised: f64 = owned.iter().map(|slot| expected.load(rest(*slot)) * scale).sum();
        let scale = scale * (unexplained / promised.max(1e-9)).min(1.0);
        let at = |slot: Slot| {
            let load = expected.load(rest(slot)) * scale;
            SlotAt { slot, at: node.id, load, bytes }
        };
        let gives_all = is_left || is_short_of_memory(node);
        let is_worth_it = |slot: &SlotAt| gives_all || slot.load > 0.0 || of_keys[slot.slot.index()].is_some();
        let mut own: Vec<SlotAt> =
            owned.into_iter().filter(|slot| topology.transit(*slot).is_none()).map(at).filter(is_worth_it).collect();
        if !is_left && own.len() > SLOTS {
            let busy = |slot: &SlotAt| slot.load + of_slot(slot.slot);
            own.sort_by(|one, other| busy(other).total_cmp(&busy(one)).then(one.slot.cmp(&other.slot)));
            // Include idle slots if the node needs memory.
            own.drain(SLOTS..if gives_all { own.len() - SLOTS.min(own.len() - SLOTS) } else { own.len() });
        }
        slots.extend(own);
    }
    slots.sort_unstable_by_key(|slot| slot.slot);
    Problem { nodes, slots, keys, knobs }
}

/// Returns the hash tag of a key, or the key without a tag, and whether it is a tag. Keys with a common tag are one load:
/// they move together, and are certain together.
fn unit<'k>(placement: &'k Placement, key: &'k [u8]) -> (&'k [u8], bool) {
    placement.hash_tag(key).map_or((key, false), |tag| (tag, true))
}

fn keys(topology: &Topology, load: &ObservedLoad, around: &FleetContext, cold: &BTreeSet<Name>) -> Vec<KeyAt> {
    let mut keys: BTreeMap<Name, KeyAt> = BTreeMap::new();
    let key_at = |key: &[u8]| {
        let (slot, is_needed) = (topology.slot_of(key), around.needed.contains(key));
        let stays = match () {
            () if topology.transit(slot).is_some() => Some(PinnedReason::Moving),
            () if topology.placement().hash_tag(key).is_some() => Some(PinnedReason::Tagged),
            () if is_needed => Some(PinnedReason::NeededAtHome),
            () => None,
        };
        let (at, home, is_cold) = (topology.node_of(key), topology.owner(slot), cold.contains(key));
        KeyAt { key: key.into(), slot, at, home, reads: 0.0, writes: 0.0, copied: 0.0, bytes: 0, is_cold, stays }
    };
    // A weighted rate lags behind for a key that has just become hot. Add the segment that found the key, because
    // `seconds` start at its end.
    let seconds = |hot: &HotKey| hot.seconds + 1.0;
    let known_part = |hot: &HotKey| 1.0 - HALF.powf(seconds(hot));
    let placement = topology.placement();
    let named = || {
        load.keys.iter().flat_map(|node| node.keys.iter().filter_map(|hot| Some((node.one_in, hot, hot.name.key()?))))
    };
    let mut rates: BTreeMap<(&[u8], bool), SampledRate> = BTreeMap::new();
    for (one_in, hot, name) in named() {
        let time = seconds(hot).clamp(RATE_SECONDS.0, RATE_SECONDS.1);
        rates.entry(unit(placement, name)).or_default().add(SampledRate::new(
            hot.rates.at_node() / known_part(hot),
            one_in,
            time,
        ));
    }
    for (_, hot, name) in named() {
        let certain = rates[&unit(placement, name)].certain();
        let of = |rate: f64| rate / known_part(hot);
        let uses = hot.rates.commands().max(1e-9);
        let known = keys.entry(name.into()).or_insert_with(|| key_at(name));
        (known.reads, known.writes) =
            (known.reads + of(hot.rates.reads) * certain, known.writes + of(hot.rates.writes) * certain);
        known.bytes += (hot.rates.bytes / uses).max(hot.rates.reply_bytes / uses) as u64;
        let is_new = hot.seconds < COPIED_WITHIN;
        if around.copies && is_new && of(hot.rates.reads - READS_FOR_A_WRITE * hot.rates.writes) >= COPIED_READS {
            // Reads answered by copies leave the node's load at once, but the weighted rate of reads later.
            known.copied += of(hot.rates.reads - hot.rates.hits).max(0.0) * certain;
        }
    }
    for key in cold {
        keys.entry(key.clone()).or_insert_with(|| key_at(key));
    }
    for (leaver, (key, at)) in
        around.leaving.iter().flat_map(|node| topology.placement_overrides().map(move |exception| (*node, exception)))
    {
        if at == leaver {
            keys.entry((**key).into()).or_insert_with(|| key_at(key));
        }
    }
    keys.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::{Board, Counted, Counts, Weights};

    #[test]
    fn new_keys_count_with_the_certain_part_of_their_load() {
        let topology = Topology::even(&["a".into()]).expect("a node");
        let mut board = Board::new(Weights::default());
        for second in 1..=6 {
            let key = Counted {
                hash: 7,
                database: 0,
                name: crate::telemetry::Name::of(b"k"),
                reads: 0,
                hits: 0,
                writes: 3000,
                bytes: 0,
                reply_bytes: 0,
                us: 0,
                error: 0,
            };
            let counts = Counts { uses: 5000, hits: 0, keys: vec![key], one_in: 1 };
            board.segment([(NodeId(0), counts)].into(), 1_000_000);
            let load = ObservedLoad { keys: board.nodes(10).collect(), ..ObservedLoad::default() };
            let seen = VecDeque::new();
            let looks = LoadHistory { seen: &seen, window: Duration::from_secs(3), decisions: &|_| 0 };
            let problem =
                problem(&topology, &load, &looks, &FleetContext::default(), &BTreeSet::new(), Knobs::default());
            let writes = problem.keys[0].writes;
            // Lower bound: at most three seconds of data, without sampling.
            let least = 3000.0 - 2.0 * (3000.0 / f64::from(second.min(3))).sqrt();
            assert!((writes - least).abs() < 1.0, "{writes} after {second} s");
        }
    }
}
