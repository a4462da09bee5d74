//! `SCAN` over all nodes: selects the next node, and detects when every key present during the whole scan has been
//! returned.
//!
//! One pass over the nodes misses a key that moves from a node not yet scanned to a scanned one. So for each slot the
//! time of its last *change* is stored: a move started or ended, a leg rolled back, the owner or its placement
//! overrides changed, the process of a node changed. A pass *covers* a slot if it did not change during the pass, and
//! if the source of its move was scanned before the target. The next pass scans the nodes of uncovered slots. Passes
//! alternate between ascending and descending node order, so an unfinished move has the right direction in one of two.
//! The scan ends when all slots are covered.
//!
//! A cursor contains the pass and its start, the run of the router, the node, and the node's own cursor. So it is valid
//! at every worker, may be used twice, and may be abandoned without a trace. Only the slots of later passes are stored
//! here; if evicted, the pass includes all slots.
//!
//! A cursor cannot contain the moves since the start of the scan: their number is unbounded, a cursor's size is not. A
//! list of moved keys would grow with the move.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::cluster::OpenSlot;
use crate::topology::{MoveId, NodeId, SLOT_NUMBERS, Slot, Stage, Topology, Transit};

/// Milliseconds per tick. Cursors count ticks since 1970.
pub const TICK_MS: u64 = 500;

/// Bits for the tick at which the pass started: a cursor is valid for 36 hours.
const TICK_BITS: u32 = 18;
/// Bits for the run of the router, so that the check does not depend on clocks.
const RUN_BITS: u32 = 3;
/// Bits of ticks in front of a cluster, where clients may use several routers: a pass may take two hours.
const CLUSTER_TICK_BITS: u32 = 14;
/// Bits of the run there, which identifies the router. Servers with a table for each slot use 14 of the other bits.
const CLUSTER_RUN_BITS: u32 = 11;
/// Maximum lead of the tick count over the clock and its start, in ticks: the count increases by one if a pass starts
/// in the tick of a change.
const LEAD: u64 = 64;
const PASS_BITS: u32 = 2;
/// Bits for the index of a node: few for the first nodes, as many as [`crate::topology::MAX_NODES`] needs for others.
const NEAR_BITS: u32 = 5;
const FAR_BITS: u32 = 10;
/// Cursors stay below 2^63: some clients parse them as signed.
const CURSOR_BITS: u32 = 63;
/// Maximum number of stored slot sets for later passes, 4 KiB each.
const REMEMBERED: usize = 256;

const WORDS: usize = SLOT_NUMBERS / 64;

/// A set of slots.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SlotSet(Box<[u64; WORDS]>);

impl SlotSet {
    fn none() -> Self {
        Self(Box::new([0; WORDS]))
    }

    fn all() -> Self {
        Self(Box::new([u64::MAX; WORDS]))
    }

    fn insert(&mut self, slot: Slot) {
        self.0[slot.index() / 64] |= 1 << (slot.index() % 64);
    }

    /// Whether the set contains the slot.
    #[must_use]
    pub fn has(&self, slot: Slot) -> bool {
        self.0[slot.index() / 64] & (1 << (slot.index() % 64)) != 0
    }

    fn iter(&self) -> impl Iterator<Item = Slot> {
        Slot::numbers().filter(|slot| self.has(*slot))
    }
}

/// A pass over the nodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pass {
    /// Over all nodes that may have keys, ascending.
    First,
    /// Over the nodes with uncovered slots, descending.
    Down,
    /// Over the nodes with uncovered slots, ascending.
    Up,
}

impl Pass {
    fn next(self) -> Self {
        if self == Self::Down { Self::Up } else { Self::Down }
    }

    fn is_upwards(self) -> bool {
        self != Self::Down
    }
}

/// Progress of a scan.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Position {
    /// Current pass.
    pub pass: Pass,
    /// Tick at which the pass started.
    pub since: u64,
    /// Next node to scan.
    pub node: NodeId,
    /// The node's own cursor.
    pub inner: u64,
}

/// Direction in which keys of a slot move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Motion {
    from: NodeId,
    to: NodeId,
    leg: (MoveId, u32),
}

/// Shared state of all scans of a router.
#[derive(Debug)]
pub struct Scans {
    /// As observed.
    observed: Arc<Topology>,
    /// As observed, with `open` in transit.
    topology: Arc<Topology>,
    /// Slots of a cluster whose keys migrate one by one.
    open: Vec<OpenSlot>,
    /// Nodes that may have keys; the others are skipped.
    keepers: Vec<NodeId>,
    /// Legs that roll back.
    back: BTreeSet<(MoveId, u32)>,
    /// Bits of ticks and of runs.
    bits: (u32, u32),
    /// Run of the router, as far as its bits suffice.
    run: u64,
    /// First tick of this run.
    started: u64,
    /// Current tick. Never decreases.
    tick: u64,
    /// First tick for which changes are known.
    known_since: u64,
    /// Tick of the last change of any slot.
    touched: u64,
    /// Tick of the last change, by slot.
    happened: Box<[u64; SLOT_NUMBERS]>,
    /// Removed nodes, with the tick of their removal.
    removed: Vec<(u64, NodeId)>,
    /// Slots of later passes, by the tick at which they started.
    passes: BTreeMap<u64, SlotSet>,
}

impl Scans {
    /// Returns the state of a router that starts. `now` in ticks, here and below. `run` counts the routers of a fleet:
    /// a scan whose cursor is of another run, out of 2^[`RUN_BITS`] in order, starts from the beginning. In front of
    /// a cluster, `run` is a random number.
    #[must_use]
    pub fn new(topology: Arc<Topology>, now: u64, run: u64) -> Self {
        // With synchronised clocks, also above all ticks of earlier runs that the bits of the run do not distinguish.
        let tick = now + LEAD + 2;
        let bits = match topology.is_of_cluster() {
            true => (CLUSTER_TICK_BITS, CLUSTER_RUN_BITS),
            false => (TICK_BITS, RUN_BITS),
        };
        Self {
            keepers: topology.nodes_with_keys(),
            observed: Arc::clone(&topology),
            topology,
            open: Vec::new(),
            back: BTreeSet::new(),
            bits,
            run: run & low_bits(bits.1),
            started: tick,
            tick,
            known_since: tick,
            touched: 0,
            happened: Box::new([0; SLOT_NUMBERS]),
            removed: Vec::new(),
            passes: BTreeMap::new(),
        }
    }

    fn advance(&mut self, now: u64) {
        self.tick = self.tick.max(now);
        self.step_over_zero();
    }

    /// Skips ticks whose bits are all 0: cursor 0 ends a scan.
    fn step_over_zero(&mut self) {
        if self.tick & low_bits(self.bits.0) == 0 {
            self.tick += 1;
        }
    }

    /// Tick for a pass that starts now: later than all changes, unless the count is too far ahead of the clock. In that
    /// case, changes of this tick count as later, and their slots are scanned once more than necessary.
    fn fresh(&mut self, now: u64) -> u64 {
        self.advance(now);
        if self.touched == self.tick && self.tick < now.max(self.started) + LEAD {
            self.tick += 1;
            self.step_over_zero();
        }
        self.tick
    }

    fn touch(&mut self, slot: Slot) {
        self.touched = self.tick;
        self.happened[slot.index()] = self.tick;
    }

    /// Records a new topology or other legs that roll back. Must be called before a worker can see it.
    pub fn observe(&mut self, topology: &Arc<Topology>, back: BTreeSet<(MoveId, u32)>, now: u64) {
        if Arc::ptr_eq(topology, &self.observed) && back == self.back {
            return;
        }
        self.observed = Arc::clone(topology);
        self.change(back, now);
    }

    /// Records what the members of a cluster show only on request, so this must be called before a scan begins, and
    /// before a pass ends. `open`: the slots whose keys migrate one by one, in order. `returned`: slots that may have left
    /// their owner and returned. Returns false if the open slots exceed what a scan can follow.
    pub fn note_members(&mut self, open: Vec<OpenSlot>, returned: &[Slot], now: u64) -> bool {
        if open != self.open {
            self.open = open;
            self.change(self.back.clone(), now);
        }
        self.advance(now);
        returned.iter().for_each(|slot| self.touch(*slot));
        self.open.is_empty() || self.topology.transits().next().is_some()
    }

    /// Whether the node is the last one of its pass. In front of a cluster, the members must be noted before the pass ends.
    #[must_use]
    pub fn is_last_of_pass(&self, at: Position) -> bool {
        self.next_in_pass(at).is_none()
    }

    /// Whether the node may have keys.
    #[must_use]
    pub fn may_have_keys(&self, node: NodeId) -> bool {
        self.keepers.contains(&node)
    }

    /// The observed topology, with open slots in transit.
    fn with_open(&self) -> Arc<Topology> {
        let mut by_pair: BTreeMap<(NodeId, NodeId), Vec<Slot>> = BTreeMap::new();
        for OpenSlot { from, to, slot } in &self.open {
            by_pair.entry((*from, *to)).or_default().push(*slot);
        }
        let transit = |(source, target): (NodeId, NodeId)| Transit {
            move_id: MoveId(u64::from(source.0) << 16 | u64::from(target.0)),
            source,
            target,
            stage: Stage::Moving { leg: 0 },
            keys_only: false,
        };
        let transits = by_pair.iter().map(|(pair, slots)| (transit(*pair), slots.as_slice()));
        match self.open.is_empty() {
            true => Arc::clone(&self.observed),
            false => self.observed.with_transits(transits).map_or_else(|_| Arc::clone(&self.observed), Arc::new),
        }
    }

    fn change(&mut self, back: BTreeSet<(MoveId, u32)>, now: u64) {
        self.advance(now);
        let topology = &self.with_open();
        let old = std::mem::replace(&mut self.topology, Arc::clone(topology));
        self.keepers = topology.nodes_with_keys();
        let old_back = std::mem::replace(&mut self.back, back);
        if old.placement() == topology.placement() {
            topology.overrides_since(&old).iter().for_each(|(key, _)| self.touch(topology.slot_of(key)));
        } else {
            // Slots of keys have changed, so all knowledge about slots is void: scans start again.
            self.tick += 1;
            self.step_over_zero();
            self.known_since = self.tick;
            self.passes.clear();
        }
        for slot in Slot::numbers() {
            let is_same = old.owner(slot) == topology.owner(slot)
                && motion(&old, &old_back, slot) == motion(topology, &self.back, slot);
            if !is_same {
                self.touch(slot);
            }
        }
        let tick = self.tick;
        let ticks = low_bits(self.bits.0);
        self.removed.retain(|(since, _)| tick - since < ticks);
        self.removed.extend(old.nodes().filter(|node| topology.node(node.id).is_none()).map(|node| (tick, node.id)));
    }

    /// Records a new process of a node, which invalidates the node's own cursors.
    pub fn restarted(&mut self, node: NodeId, now: u64) {
        self.advance(now);
        for slot in Slot::numbers() {
            if self.has(node, slot) {
                self.touch(slot);
            }
        }
    }

    fn motion(&self, slot: Slot) -> Option<Motion> {
        motion(&self.topology, &self.back, slot)
    }

    /// Returns the nodes that may have keys of a slot.
    fn nodes_of(&self, slot: Slot) -> impl Iterator<Item = NodeId> {
        let moving = self.motion(slot).into_iter().flat_map(|motion| [motion.from, motion.to]);
        let alone = self.topology.overrides_in(slot).map(|(_, node)| node);
        std::iter::once(self.topology.owner(slot)).chain(moving).chain(alone)
    }

    fn has(&self, node: NodeId, slot: Slot) -> bool {
        self.nodes_of(slot).any(|of| of == node)
    }

    /// Starts a scan.
    pub fn begin(&mut self, now: u64) -> Position {
        let since = self.fresh(now);
        let first = self.keepers.first().copied().unwrap_or(NodeId(0));
        Position { pass: Pass::First, since, node: first, inner: 0 }
    }

    /// Decodes a client's cursor. Cursors from an earlier run, or too old, start again. `None`: the scan has ended.
    /// Invalid cursors end a scan too, as in Redis.
    pub fn decode(&mut self, cursor: u64, now: u64) -> Option<Position> {
        if cursor == 0 {
            return Some(self.begin(now));
        }
        let mut rest = cursor;
        let mut take = |bits: u32| {
            let taken = rest & low_bits(bits);
            rest >>= bits;
            taken
        };
        let pass = [Pass::First, Pass::Down, Pass::Up].get(take(PASS_BITS) as usize).copied()?;
        let place_bits = if take(1) == 0 { NEAR_BITS } else { FAR_BITS };
        let place = take(place_bits) as usize;
        let (tick_bits, run_bits) = self.bits;
        let ago = self.tick.wrapping_sub(take(tick_bits)) & low_bits(tick_bits);
        let is_of_this_run = take(run_bits) == self.run;
        let inner = rest;
        let Some(since) = self.tick.checked_sub(ago).filter(|since| is_of_this_run && *since >= self.known_since)
        else {
            return Some(self.begin(now));
        };
        let node = *self.members(since).get(place)?;
        let at = Position { pass, since, node, inner };
        // The keys of the node have moved away, so a later pass finds them.
        match self.keepers.contains(&node) {
            true => Some(at),
            // The members must be noted before the pass ends.
            false if self.topology.is_of_cluster() => Some(Position { inner: 0, ..at }),
            false => self.next_node(at, now),
        }
    }

    /// Encodes the cursor for the client; `None` if the node's own cursor is too large.
    #[must_use]
    pub fn encode(&self, at: Position) -> Option<u64> {
        let place = self.members(at.since).binary_search(&at.node).ok()? as u64;
        let is_far = place > low_bits(NEAR_BITS);
        let place_bits = if is_far { FAR_BITS } else { NEAR_BITS };
        if place > low_bits(place_bits) {
            return None;
        }
        let mut cursor = 0;
        let mut used = 0;
        let pass = match at.pass {
            Pass::First => 0,
            Pass::Down => 1,
            Pass::Up => 2,
        };
        let (tick_bits, run_bits) = self.bits;
        let tick = at.since & low_bits(tick_bits);
        let fields =
            [(PASS_BITS, pass), (1, u64::from(is_far)), (place_bits, place), (tick_bits, tick), (run_bits, self.run)];
        for (bits, value) in fields {
            cursor |= value << used;
            used += bits;
        }
        (at.inner <= low_bits(CURSOR_BITS - used)).then(|| cursor | at.inner << used)
    }

    /// All nodes since this tick, by id. Indexes stay the same, because new nodes have higher ids.
    fn members(&self, since: u64) -> Vec<NodeId> {
        let gone = self.removed.iter().filter(|(tick, _)| *tick >= since).map(|(_, node)| *node);
        let mut members: Vec<NodeId> = self.topology.nodes().map(|node| node.id).chain(gone).collect();
        members.sort_unstable();
        members
    }

    /// Slots of a pass; `None`: all.
    #[must_use]
    pub fn wanted(&self, at: Position) -> Option<&SlotSet> {
        if at.pass == Pass::First { None } else { self.passes.get(&at.since) }
    }

    /// Next position after the node has returned its cursor; `None`: the scan has ended.
    pub fn after(&mut self, at: Position, inner: u64, now: u64) -> Option<Position> {
        match () {
            () if at.since < self.known_since => Some(self.begin(now)),
            () if inner > 0 => Some(Position { inner, ..at }),
            () => self.next_node(at, now),
        }
    }

    fn next_in_pass(&self, at: Position) -> Option<Position> {
        let nodes = self.nodes_in(at);
        let next = if at.pass.is_upwards() {
            nodes.into_iter().find(|node| *node > at.node)
        } else {
            nodes.into_iter().rev().find(|node| *node < at.node)
        };
        next.map(|node| Position { node, inner: 0, ..at })
    }

    fn next_node(&mut self, at: Position, now: u64) -> Option<Position> {
        if let Some(next) = self.next_in_pass(at) {
            return Some(next);
        }
        let open = self.not_covered(at)?;
        let since = self.fresh(now);
        let pass = at.pass.next();
        // Another scan may start a pass in the same tick. The pass then includes the slots of both.
        let about = self.passes.entry(since).or_insert_with(SlotSet::none);
        about.0.iter_mut().zip(open.0.iter()).for_each(|(word, more)| *word |= more);
        if self.passes.len() > REMEMBERED {
            self.passes.pop_first();
        }
        let at = Position { pass, since, node: at.node, inner: 0 };
        let nodes = self.nodes_in(at);
        let first = if pass.is_upwards() { nodes.first() } else { nodes.last() };
        first.map(|node| Position { node: *node, ..at })
    }

    /// Nodes of a pass, ascending.
    fn nodes_in(&self, at: Position) -> Vec<NodeId> {
        let Some(wanted) = self.wanted(at) else { return self.keepers.clone() };
        let nodes: BTreeSet<NodeId> = wanted.iter().flat_map(|slot| self.nodes_of(slot)).collect();
        nodes.into_iter().collect()
    }

    /// Returns the slots not covered by a finished pass; `None`: all are covered.
    fn not_covered(&self, at: Position) -> Option<SlotSet> {
        if self.touched < at.since && self.topology.is_settled() {
            return None;
        }
        let wanted = self.wanted(at).cloned().unwrap_or_else(SlotSet::all);
        let mut open = SlotSet::none();
        let mut is_any = false;
        for slot in wanted.iter() {
            let goes_against =
                self.motion(slot).is_some_and(|motion| (motion.from < motion.to) != at.pass.is_upwards());
            if self.happened[slot.index()] >= at.since || goes_against {
                open.insert(slot);
                is_any = true;
            }
        }
        is_any.then_some(open)
    }
}

fn low_bits(bits: u32) -> u64 {
    (1 << bits) - 1
}

fn motion(topology: &Topology, back: &BTreeSet<(MoveId, u32)>, slot: Slot) -> Option<Motion> {
    let transit = topology.transit(slot)?;
    let Stage::Moving { leg } = transit.stage else { return None };
    let leg = (transit.move_id, leg);
    let (from, to) =
        if back.contains(&leg) { (transit.target, transit.source) } else { (transit.source, transit.target) };
    Some(Motion { from, to, leg })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::{Continuum, Scheme, Server, crc16_slot};

    const NOW: u64 = 7_000_000_000;

    fn of(count: u16) -> Arc<Topology> {
        let names: Vec<String> = (0..count).map(|i| format!("127.0.0.1:{}", 7000 + i)).collect();
        Arc::new(Topology::even(&names).expect("nodes"))
    }

    /// All positions of a scan in which every node returns cursor 7, then 0.
    fn full_scan(scans: &mut Scans, mut cursor: u64, mut between: impl FnMut(&mut Scans)) -> Vec<(Pass, u16, u64)> {
        let mut asked = Vec::new();
        loop {
            // Half a second per call: right after the start the tick count has no lead yet.
            let now = NOW + LEAD + 2 * asked.len() as u64;
            let Some(at) = scans.decode(cursor, now) else { return asked };
            asked.push((at.pass, at.node.0, at.inner));
            between(scans);
            let Some(next) = scans.after(at, if at.inner == 0 { 7 } else { 0 }, now) else { return asked };
            cursor = scans.encode(next).expect("small cursors");
            assert!(cursor > 0 && cursor < 1 << 53, "{cursor}");
            assert!(asked.len() < 100, "it ends: {asked:?}");
        }
    }

    #[test]
    fn a_scan_queries_every_node_once_and_ends() {
        let mut scans = Scans::new(of(3), NOW, 1);
        let once = [0, 1, 2].map(|node| [(Pass::First, node, 0), (Pass::First, node, 7)]).concat();
        assert_eq!(full_scan(&mut scans, 0, |_| {}), once);
    }

    #[test]
    fn a_new_server_list_restarts_scans() {
        let servers = |names: &[&str]| {
            names.iter().map(|name| Server { name: (*name).to_owned(), weight: 1 }).collect::<Vec<_>>()
        };
        let ring = Continuum::new(Scheme::default(), servers(&["a", "b"])).expect("a ring");
        let names = ["a", "b", "c"].map(str::to_owned);
        let topology = Topology::place(Some(&Topology::on_continuum(ring.into())), &names).expect("one joins").topology;
        let next = Arc::new(topology.with_overlay(servers(&["a", "b", "c"])).expect("a new ring").topology);
        let mut scans = Scans::new(Arc::new(topology), NOW, 1);
        let mut step = 0;
        let all = full_scan(&mut scans, 0, |scans| {
            step += 1;
            if step == 4 {
                scans.observe(&next, BTreeSet::new(), NOW + LEAD + 6);
            }
        });
        // The last reply under the old continuum, with cursor 0 of the last node, does not end the scan.
        let nodes: Vec<u16> = all.iter().filter(|(_, _, inner)| *inner == 0).map(|(_, node, _)| *node).collect();
        assert_eq!(nodes, [0, 1, 0, 1], "{all:?}");
    }

    #[test]
    fn a_node_without_keys_is_not_scanned_until_keys_move_to_it() {
        let two = of(2);
        let names: Vec<String> = (0..3).map(|i| format!("127.0.0.1:{}", 7000 + i)).collect();
        let topology = Arc::new(Topology::place(Some(&two), &names).expect("one joins").topology);
        let mut scans = Scans::new(topology.clone(), NOW, 1);
        let nodes = |all: &[(Pass, u16, u64)]| {
            all.iter().filter(|(_, _, inner)| *inner == 0).map(|(_, node, _)| *node).collect::<Vec<_>>()
        };
        assert_eq!(nodes(&full_scan(&mut scans, 0, |_| {})), [0, 1]);
        // The node is drained during its scan and has no keys then: the cursor continues, and a later pass scans the
        // new nodes of its keys.
        let slots: Vec<Slot> = Slot::all().filter(|slot| topology.owner(*slot) == NodeId(1)).collect();
        let drained = Arc::new(topology.handed_over(&slots, NodeId(0)));
        let mut step = 0;
        let all = full_scan(&mut scans, 0, |scans| {
            step += 1;
            if step == 3 {
                scans.observe(&drained, BTreeSet::new(), NOW);
            }
        });
        assert_eq!(nodes(&all), [0, 1, 0], "{all:?}");
        let transit = Transit {
            move_id: MoveId(1),
            source: NodeId(0),
            target: NodeId(2),
            stage: Stage::Moving { leg: 0 },
            keys_only: false,
        };
        scans.observe(&Arc::new(drained.with_transits([(transit, &slots[..])]).expect("few")), BTreeSet::new(), NOW);
        assert_eq!(nodes(&full_scan(&mut scans, 0, |_| {})), [0, 2]);
    }

    #[test]
    fn only_slots_that_moved_during_the_scan_are_scanned_again() {
        let topology = of(3);
        let mut scans = Scans::new(topology.clone(), NOW, 1);
        let slots = topology.ranges_of(NodeId(2))[0].clone().take(3).filter_map(Slot::new).collect::<Vec<_>>();
        let transit = Transit {
            move_id: MoveId(1),
            source: NodeId(2),
            target: NodeId(0),
            stage: Stage::Moving { leg: 0 },
            keys_only: false,
        };
        let moving = Arc::new(topology.with_transits([(transit, &slots[..])]).expect("few"));
        // The move continues: the descending pass finds all of it.
        let mut step = 0;
        let all = full_scan(&mut scans, 0, |scans| {
            step += 1;
            if step == 3 {
                scans.observe(&moving, BTreeSet::new(), NOW);
            }
        });
        let later: Vec<_> =
            all.iter().filter(|(pass, _, inner)| *pass != Pass::First && *inner == 0).copied().collect();
        assert_eq!(later, [(Pass::Down, 2, 0), (Pass::Down, 0, 0)]);
        let at = Position { pass: Pass::Down, since: scans.tick, node: NodeId(0), inner: 0 };
        assert_eq!(scans.wanted(at).map(|set| set.iter().collect::<Vec<_>>()), Some(slots.clone()));
        // A scan that starts now needs no further pass.
        let later = full_scan(&mut scans, 0, |_| {}).into_iter().filter(|(pass, _, _)| *pass != Pass::First).count();
        assert_eq!(later, 4);
        scans.observe(&Arc::new(moving.handed_over(&slots, NodeId(0))), BTreeSet::new(), NOW);
        assert_eq!(full_scan(&mut scans, 0, |_| {}).len(), 6, "earlier moves do not count");
    }

    #[test]
    fn thousands_of_moves_during_one_scan_are_all_followed() {
        let topology = of(3);
        let keys: Vec<Arc<[u8]>> = (0..5000).map(|i| format!("k{i}").into_bytes().into()).collect();
        let keys: Vec<_> = keys.into_iter().filter(|key| topology.owner_of(key) == NodeId(0)).collect();
        let mut now = Arc::new(topology.keys_handed_over(&[], &keys, NodeId(1)));
        let mut scans = Scans::new(now.clone(), NOW, 1);
        let at = scans.begin(NOW);
        let at = scans.after(at, 0, NOW).expect("the next node");
        let cursor = scans.encode(at).expect("small");
        for key in &keys {
            now = Arc::new(now.keys_handed_over(&[], [key], NodeId(0)));
            scans.observe(&now, BTreeSet::new(), NOW);
        }
        let all = full_scan(&mut scans, cursor, |_| {});
        assert!(all.contains(&(Pass::Down, 0, 0)), "{all:?}");
        let wanted = scans.passes.last_key_value().map(|(_, set)| set.clone()).expect("a later pass");
        assert!(keys.iter().all(|key| wanted.has(crc16_slot(key))));
    }

    #[test]
    fn a_cursor_survives_node_removal_and_never_changes_its_node() {
        let topology = of(4);
        let owned: Vec<Slot> = Slot::all().filter(|slot| topology.owner(*slot) == NodeId(1)).collect();
        let drained = Arc::new(topology.handed_over(&owned, NodeId(3)));
        let mut scans = Scans::new(drained.clone(), NOW, 1);
        let begun = scans.begin(NOW);
        let cursors =
            [1, 2, 3].map(|node| scans.encode(Position { node: NodeId(node), inner: 9, ..begun }).expect("small"));
        let names: Vec<String> =
            drained.nodes().filter(|node| node.id != NodeId(1)).map(|node| node.name.clone()).collect();
        let removed = Arc::new(Topology::place(Some(&drained), &names).expect("it is empty").topology);
        scans.observe(&removed, BTreeSet::new(), NOW + 9);
        let at = cursors.map(|cursor| scans.decode(cursor, NOW + 9).map(|at| (at.node.0, at.inner)));
        assert_eq!(at, [Some((2, 0)), Some((2, 9)), Some((3, 9))]);
    }

    #[test]
    fn a_pass_right_after_the_start_covers_a_change_of_its_tick() {
        let topology = of(3);
        let mut scans = Scans::new(topology.clone(), NOW, 1);
        let slots = [Slot::new(0).expect("a slot")];
        scans.observe(&Arc::new(topology.handed_over(&slots, NodeId(2))), BTreeSet::new(), NOW);
        let once = [0, 1, 2].map(|node| [(Pass::First, node, 0), (Pass::First, node, 7)]).concat();
        assert_eq!(full_scan(&mut scans, 0, |_| {}), once);
    }

    #[test]
    fn invalid_cursors_restart_or_end_a_scan() {
        let mut scans = Scans::new(of(2), NOW, 1);
        let begun = scans.begin(NOW);
        let old = scans.encode(Position { node: NodeId(1), inner: 5, ..begun }).expect("small");
        let mut later = Scans::new(of(2), NOW + 1, 2);
        assert_eq!(later.decode(old, NOW + 1).map(|at| (at.pass, at.node.0, at.inner)), Some((Pass::First, 0, 0)));
        for run in 2..=8 {
            // A clock that is behind by more than the duration of the earlier run.
            let mut behind = Scans::new(of(2), NOW - 100, run);
            behind.begin(NOW + 2 * LEAD);
            let at = behind.decode(old, NOW + 2 * LEAD).map(|at| (at.pass, at.node.0, at.inner));
            assert_eq!(at, Some((Pass::First, 0, 0)), "a cursor of run 1 at run {run}");
        }
        let third = scans.encode(begun).expect("small") | 2 << (PASS_BITS + 1);
        assert_eq!(scans.decode(third, NOW), None, "there is no third node");
        assert_eq!(scans.decode(3, NOW), None);
        assert_eq!(scans.encode(Position { inner: 1 << 33, ..begun }).map(|cursor| cursor < 1 << 63), Some(true));
        assert_eq!(scans.encode(Position { inner: 1 << 34, ..begun }), None);
    }

    #[test]
    fn open_slots_of_a_cluster_cause_another_pass() {
        let cluster = Arc::new((*of(3)).clone().of_cluster(Vec::new()));
        let mut scans = Scans::new(Arc::clone(&cluster), NOW, 0);
        let slot = cluster.ranges_of(NodeId(2)).first().and_then(|range| Slot::new(*range.start())).expect("a slot");
        let opened = OpenSlot { from: NodeId(2), to: NodeId(0), slot };
        let visited = |scans: &mut Scans, open: &[OpenSlot], returned: &[Slot]| {
            let mut calls = 0;
            full_scan(scans, 0, |scans| {
                calls += 1;
                if calls == 3 {
                    assert!(scans.note_members(open.to_vec(), returned, NOW));
                }
            })
        };
        let later = |visited: &[(Pass, u16, u64)]| -> Vec<u16> {
            visited.iter().filter(|(pass, ..)| *pass != Pass::First).map(|(_, node, _)| *node).collect()
        };
        assert_eq!(visited(&mut scans, &[], &[]).len(), 6, "each node twice");
        // Keys may have left the last node for the first one after that was scanned.
        let with_open = visited(&mut scans, &[opened], &[]);
        assert_eq!(later(&with_open)[..4], [2, 2, 0, 0], "{with_open:?}");
        // It stays open: a pass in the direction of its keys covers it.
        let still_open = visited(&mut scans, &[opened], &[]);
        assert_eq!(later(&still_open), [2, 2, 0, 0], "{still_open:?}");
        assert!(later(&visited(&mut scans, &[], &[])).contains(&2), "it is closed");
        assert_eq!(later(&visited(&mut scans, &[], &[slot])), [2, 2], "it may have returned");
    }

    #[test]
    fn a_cursor_of_another_router_restarts_a_scan() {
        let cluster = Arc::new((*of(3)).clone().of_cluster(Vec::new()));
        let mut one = Scans::new(Arc::clone(&cluster), NOW, 77);
        let mut other = Scans::new(cluster, NOW, 76);
        let begun = one.begin(NOW);
        // A bucket of a slot, with the slot in 14 bits.
        let cursor = one.encode(Position { node: NodeId(2), inner: (1 << 30) - 1, ..begun }).expect("small");
        assert_eq!(one.decode(cursor, NOW).map(|at| (at.node.0, at.inner)), Some((2, (1 << 30) - 1)));
        let at = other.decode(cursor, NOW + LEAD).map(|at| (at.pass, at.node.0, at.inner));
        assert_eq!(at, Some((Pass::First, 0, 0)));
    }

    #[test]
    fn a_pass_over_a_cluster_never_ends_before_its_members_are_noted() {
        let cluster = Arc::new((*of(3)).clone().of_cluster(Vec::new()));
        let mut scans = Scans::new(Arc::clone(&cluster), NOW, 0);
        let begun = scans.begin(NOW);
        let last = Position { node: NodeId(2), inner: 5, ..begun };
        assert!(scans.is_last_of_pass(last) && !scans.is_last_of_pass(begun));
        let cursor = scans.encode(last).expect("small");
        let slots: Vec<Slot> = Slot::all().filter(|slot| cluster.owner(*slot) == NodeId(2)).collect();
        scans.observe(&Arc::new(cluster.handed_over(&slots, NodeId(0))), BTreeSet::new(), NOW);
        // Its last node has no keys any more.
        assert_eq!(scans.decode(cursor, NOW), Some(Position { inner: 0, ..last }));
        assert!(!scans.may_have_keys(NodeId(2)));
        let next = scans.after(Position { inner: 0, ..last }, 0, NOW).expect("its keys are elsewhere");
        assert_eq!((next.pass, next.node), (Pass::Down, NodeId(0)));
    }
}
