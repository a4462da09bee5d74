//! SCAN over all nodes: which node is asked next, and when every key that was there all the time has been given.
//!
//! One pass over the nodes misses a key that moves from a node not yet asked to one that was. So for every slot the
//! time is kept at which something last *happened* to it: it began or ceased to move, a leg of it rolled back, its
//! owner or its exceptions changed, a node that has it became another process. A slot is *covered* by a pass in which
//! nothing happened to it, and in which a node that it leaves was asked before the one it goes to. What a pass has not
//! covered the next one asks for, at the nodes that have such slots, and passes go up and down the nodes in turn: a
//! move that does not end lies in the right direction in one of two. The scan ends when all is covered.
//!
//! A cursor holds the pass and when it began, the run of the router, the node, and the node's own cursor. So it is good
//! at every worker, may be used twice, and can be left unused without a trace. Only which slots a later pass is about
//! is remembered here; where that is forgotten, all are.
//!
//! Not the moves since the scan began, by number: their number has no bound, a cursor has. Not a list of the keys that
//! moved either: it would grow with the move.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::topology::{MoveId, NodeId, SLOT_COUNT, Slot, Stage, Topology};

/// Milliseconds of a tick. Times in cursors are counted in ticks since 1970.
pub const TICK_MS: u64 = 500;

/// Bits of a cursor for the tick at which the pass began: a cursor is good for 36 hours.
const TICK_BITS: u32 = 18;
/// Bits of a cursor for the run of the router, so that no clock decides whether a cursor is of this run.
const RUN_BITS: u32 = 3;
/// Ticks by which the count may be ahead of the clock, and of its start: it grows by one if a pass begins in the tick
/// of a change.
const LEAD: u64 = 64;
const PASS_BITS: u32 = 2;
/// Bits for the place of a node among the nodes: few for the first of them, as many as [`crate::topology::MAX_NODES`]
/// needs for others.
const NEAR_BITS: u32 = 5;
const FAR_BITS: u32 = 10;
/// Cursors stay below 2^63: some clients take them for signed.
const CURSOR_BITS: u32 = 63;
/// Later passes of which it is remembered what they are about, 2 KiB each.
const REMEMBERED: usize = 256;

const WORDS: usize = SLOT_COUNT / 64;

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

    /// Whether it has the slot.
    #[must_use]
    pub fn has(&self, slot: Slot) -> bool {
        self.0[slot.index() / 64] & (1 << (slot.index() % 64)) != 0
    }

    fn iter(&self) -> impl Iterator<Item = Slot> {
        Slot::all().filter(|slot| self.has(*slot))
    }
}

/// A pass over the nodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pass {
    /// Over all nodes at which keys may be, in the order of their numbers.
    First,
    /// Over those with slots that are not covered, from the last to the first.
    Down,
    /// The same from the first to the last.
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

/// How far a scan is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Position {
    /// The pass.
    pub pass: Pass,
    /// The tick at which it began.
    pub since: u64,
    /// Who is asked next.
    pub node: NodeId,
    /// With this cursor of its own.
    pub inner: u64,
}

/// How keys of a slot move: from one node to another, in that direction only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Motion {
    from: NodeId,
    to: NodeId,
    leg: (MoveId, u32),
}

/// What all scans of a router have in common.
#[derive(Debug)]
pub struct Scans {
    topology: Arc<Topology>,
    /// The nodes at which keys may be: nobody need wait for another.
    keepers: Vec<NodeId>,
    /// Legs that go back.
    back: BTreeSet<(MoveId, u32)>,
    /// The run of the router, modulo 2^[`RUN_BITS`].
    run: u64,
    /// The first tick of this run.
    started: u64,
    /// Never falls.
    tick: u64,
    /// Of earlier ticks nothing is known.
    known_since: u64,
    /// The last tick in which something happened.
    touched: u64,
    /// The same for each slot.
    happened: Box<[u64; SLOT_COUNT]>,
    /// Nodes that are gone, and since when.
    removed: Vec<(u64, NodeId)>,
    /// What later passes are about, by the tick at which they began.
    passes: BTreeMap<u64, SlotSet>,
}

impl Scans {
    /// Returns the state of a router that starts. `now` in ticks, here and below. `run` counts the routers of a fleet:
    /// a scan whose cursor is of another run, out of 2^[`RUN_BITS`] in order, starts from the beginning.
    #[must_use]
    pub fn new(topology: Arc<Topology>, now: u64, run: u64) -> Self {
        // If the clocks agree, also above all ticks of earlier runs that the bits of the run do not distinguish.
        let tick = now + LEAD + 2;
        Self {
            keepers: topology.keepers(),
            topology,
            back: BTreeSet::new(),
            run: run & low_bits(RUN_BITS),
            started: tick,
            tick,
            known_since: tick,
            touched: 0,
            happened: Box::new([0; SLOT_COUNT]),
            removed: Vec::new(),
            passes: BTreeMap::new(),
        }
    }

    fn advance(&mut self, now: u64) {
        self.tick = self.tick.max(now);
        self.step_over_zero();
    }

    /// The bits of a tick are never all 0: a cursor of 0 ends a scan.
    fn step_over_zero(&mut self) {
        if self.tick & low_bits(TICK_BITS) == 0 {
            self.tick += 1;
        }
    }

    /// A tick for a pass that begins now: later than all that has happened, unless the count is too far ahead of the
    /// clock. Then what happened in this tick counts as later, and is looked at once more than needed.
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

    /// There is another topology, or other legs go back. To be called before a worker can see it.
    pub fn observe(&mut self, topology: &Arc<Topology>, back: BTreeSet<(MoveId, u32)>, now: u64) {
        if Arc::ptr_eq(topology, &self.topology) && back == self.back {
            return;
        }
        self.advance(now);
        let old = std::mem::replace(&mut self.topology, Arc::clone(topology));
        self.keepers = topology.keepers();
        let old_back = std::mem::replace(&mut self.back, back);
        if old.placement() != topology.placement() {
            // Keys have other slots, so all that is known of slots is void: scans begin anew.
            self.tick += 1;
            self.step_over_zero();
            self.known_since = self.tick;
            self.passes.clear();
        }
        for slot in Slot::all() {
            let is_same = old.owner(slot) == topology.owner(slot)
                && motion(&old, &old_back, slot) == motion(topology, &self.back, slot)
                && !old.parts_otherwise(topology, slot);
            if !is_same {
                self.touch(slot);
            }
        }
        let tick = self.tick;
        self.removed.retain(|(since, _)| tick - since < low_bits(TICK_BITS));
        self.removed.extend(old.nodes().filter(|node| topology.node(node.id).is_none()).map(|node| (tick, node.id)));
    }

    /// A node is another process, so what a cursor of its own means has changed.
    pub fn restarted(&mut self, node: NodeId, now: u64) {
        self.advance(now);
        for slot in Slot::all() {
            if self.has(node, slot) {
                self.touch(slot);
            }
        }
    }

    fn motion(&self, slot: Slot) -> Option<Motion> {
        motion(&self.topology, &self.back, slot)
    }

    /// The nodes that may have keys of a slot.
    fn nodes_of(&self, slot: Slot) -> impl Iterator<Item = NodeId> {
        let moving = self.motion(slot).into_iter().flat_map(|motion| [motion.from, motion.to]);
        let alone = self.topology.exceptions_in(slot).map(|(_, node)| node);
        std::iter::once(self.topology.owner(slot)).chain(moving).chain(alone)
    }

    fn has(&self, node: NodeId, slot: Slot) -> bool {
        self.nodes_of(slot).any(|of| of == node)
    }

    /// The beginning of a scan.
    pub fn begin(&mut self, now: u64) -> Position {
        let since = self.fresh(now);
        let first = self.keepers.first().copied().unwrap_or(NodeId(0));
        Position { pass: Pass::First, since, node: first, inner: 0 }
    }

    /// Takes a client's cursor apart. One from before the router's start, or too old, begins anew. `None`: the scan is
    /// over; so is one whose cursor was never given out, as in Redis.
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
        let ago = self.tick.wrapping_sub(take(TICK_BITS)) & low_bits(TICK_BITS);
        let is_of_this_run = take(RUN_BITS) == self.run;
        let inner = rest;
        let Some(since) = self.tick.checked_sub(ago).filter(|since| is_of_this_run && *since >= self.known_since)
        else {
            return Some(self.begin(now));
        };
        let node = *self.members(since).get(place)?;
        let at = Position { pass, since, node, inner };
        // What was at a node that keeps none any more has moved, so a later pass asks for it.
        if self.keepers.contains(&node) { Some(at) } else { self.next_node(at, now) }
    }

    /// The cursor for the client; `None` where the node's own is too large to carry.
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
        let tick = at.since & low_bits(TICK_BITS);
        let fields =
            [(PASS_BITS, pass), (1, u64::from(is_far)), (place_bits, place), (TICK_BITS, tick), (RUN_BITS, self.run)];
        for (bits, value) in fields {
            cursor |= value << used;
            used += bits;
        }
        (at.inner <= low_bits(CURSOR_BITS - used)).then(|| cursor | at.inner << used)
    }

    /// All that have been nodes since then, in order: their places in it stay the same, because newcomers have higher
    /// numbers.
    fn members(&self, since: u64) -> Vec<NodeId> {
        let gone = self.removed.iter().filter(|(tick, _)| *tick >= since).map(|(_, node)| *node);
        let mut members: Vec<NodeId> = self.topology.nodes().map(|node| node.id).chain(gone).collect();
        members.sort_unstable();
        members
    }

    /// Which slots a pass is about; `None`: all.
    #[must_use]
    pub fn wanted(&self, at: Position) -> Option<&SlotSet> {
        if at.pass == Pass::First { None } else { self.passes.get(&at.since) }
    }

    /// Where to go on after the node has answered with a cursor; `None`: the scan is over.
    pub fn after(&mut self, at: Position, inner: u64, now: u64) -> Option<Position> {
        match () {
            () if at.since < self.known_since => Some(self.begin(now)),
            () if inner > 0 => Some(Position { inner, ..at }),
            () => self.next_node(at, now),
        }
    }

    fn next_node(&mut self, at: Position, now: u64) -> Option<Position> {
        let nodes = self.nodes_in(at);
        let next = if at.pass.is_upwards() {
            nodes.into_iter().find(|node| *node > at.node)
        } else {
            nodes.into_iter().rev().find(|node| *node < at.node)
        };
        if let Some(node) = next {
            return Some(Position { node, inner: 0, ..at });
        }
        let open = self.not_covered(at)?;
        let since = self.fresh(now);
        let pass = at.pass.next();
        // Another scan may begin a pass in the same tick: this one is then about the slots of both.
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

    /// The nodes that a pass goes over, in order.
    fn nodes_in(&self, at: Position) -> Vec<NodeId> {
        let Some(wanted) = self.wanted(at) else { return self.keepers.clone() };
        let nodes: BTreeSet<NodeId> = wanted.iter().flat_map(|slot| self.nodes_of(slot)).collect();
        nodes.into_iter().collect()
    }

    /// The slots that a pass has not covered, now that it is over; `None`: it has covered all.
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
    use crate::topology::{Continuum, Scheme, Server, Transit, crc16_slot};

    const NOW: u64 = 7_000_000_000;

    fn of(count: u16) -> Arc<Topology> {
        let names: Vec<String> = (0..count).map(|i| format!("127.0.0.1:{}", 7000 + i)).collect();
        Arc::new(Topology::even(&names).expect("nodes"))
    }

    /// All that is asked, where every node answers 7 first and then 0.
    fn full_scan(scans: &mut Scans, mut cursor: u64, mut between: impl FnMut(&mut Scans)) -> Vec<(Pass, u16, u64)> {
        let mut asked = Vec::new();
        loop {
            // Half a second for each call: right after the start the count of ticks has no lead yet.
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
    fn a_scan_asks_every_node_once_and_ends() {
        let mut scans = Scans::new(of(3), NOW, 1);
        let once = [0, 1, 2].map(|node| [(Pass::First, node, 0), (Pass::First, node, 7)]).concat();
        assert_eq!(full_scan(&mut scans, 0, |_| {}), once);
    }

    #[test]
    fn a_new_list_of_servers_begins_scans_anew() {
        let servers = |names: &[&str]| {
            names.iter().map(|name| Server { name: (*name).to_owned(), weight: 1 }).collect::<Vec<_>>()
        };
        let ring = Continuum::new(Scheme::default(), servers(&["a", "b"])).expect("a ring");
        let names = ["a", "b", "c"].map(str::to_owned);
        let topology = Topology::place(Some(&Topology::on_continuum(ring.into())), &names).expect("one joins").topology;
        let next = Arc::new(topology.laid_over(servers(&["a", "b", "c"])).expect("a new ring").topology);
        let mut scans = Scans::new(Arc::new(topology), NOW, 1);
        let mut step = 0;
        let all = full_scan(&mut scans, 0, |scans| {
            step += 1;
            if step == 4 {
                scans.observe(&next, BTreeSet::new(), NOW + LEAD + 6);
            }
        });
        // The last answer of the old ring, with the cursor 0 of the last node, does not end the scan.
        let nodes: Vec<u16> = all.iter().filter(|(_, _, inner)| *inner == 0).map(|(_, node, _)| *node).collect();
        assert_eq!(nodes, [0, 1, 0, 1], "{all:?}");
    }

    #[test]
    fn a_node_without_keys_is_not_asked_until_keys_move_to_it() {
        let two = of(2);
        let names: Vec<String> = (0..3).map(|i| format!("127.0.0.1:{}", 7000 + i)).collect();
        let topology = Arc::new(Topology::place(Some(&two), &names).expect("one joins").topology);
        let mut scans = Scans::new(topology.clone(), NOW, 1);
        let nodes = |all: &[(Pass, u16, u64)]| {
            all.iter().filter(|(_, _, inner)| *inner == 0).map(|(_, node, _)| *node).collect::<Vec<_>>()
        };
        assert_eq!(nodes(&full_scan(&mut scans, 0, |_| {})), [0, 1]);
        // It is drained while a scan is at it, and again keeps nothing: the cursor goes on, and a later pass asks where
        // its keys are now.
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
    fn what_moved_meanwhile_is_asked_for_again_and_nothing_else() {
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
        // It does not end: the pass downwards finds all of it.
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
        // A scan that begins now needs no more.
        let later = full_scan(&mut scans, 0, |_| {}).into_iter().filter(|(pass, _, _)| *pass != Pass::First).count();
        assert_eq!(later, 4);
        scans.observe(&Arc::new(moving.handed_over(&slots, NodeId(0))), BTreeSet::new(), NOW);
        assert_eq!(full_scan(&mut scans, 0, |_| {}).len(), 6, "what was over before does not count");
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
    fn a_cursor_outlives_the_removal_of_nodes_and_is_never_for_another_node() {
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
    fn cursors_that_mean_nothing_any_more_begin_anew_or_end() {
        let mut scans = Scans::new(of(2), NOW, 1);
        let begun = scans.begin(NOW);
        let old = scans.encode(Position { node: NodeId(1), inner: 5, ..begun }).expect("small");
        let mut later = Scans::new(of(2), NOW + 1, 2);
        assert_eq!(later.decode(old, NOW + 1).map(|at| (at.pass, at.node.0, at.inner)), Some((Pass::First, 0, 0)));
        for run in 2..=8 {
            // A clock that is behind, by more than the earlier run lasted.
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
}
