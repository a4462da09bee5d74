//! Tests of `SCAN` while nodes join, leave, and exchange keys: no key that exists throughout is missed, and every scan
//! ends.
//!
//! A seeded world of nodes with bucket tables, a mover that moves keys one by one, and several scanning clients. The
//! same world with one input of the tracker removed must miss keys, to show that the test can fail.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use switchyard_policy::scan::{Pass, Position, Scans};
use switchyard_policy::topology::{AdoptionGoal, MoveId, NodeId, Rule, RuleSet, Slot, Stage, Topology, Transit};

fn name(number: u16) -> String {
    format!("127.0.0.1:{}", 7000 + number)
}

/// Injected bugs: inputs withheld from the tracker, or misuse of a cursor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum InjectedBug {
    Nothing,
    /// Some changes of the topology are not observed.
    Changes,
    Turns,
    Restarts,
    /// Later passes are always ascending.
    Direction,
    /// A scan ends after its first pass.
    OnePass,
    /// The start and the end of an adoption of rules are not observed.
    Adoptions,
}

const KEYS: usize = 120;
const BUCKETS: u64 = 4;

struct Random(u64);

impl Random {
    fn below(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % below.max(1)
    }

    fn one_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }
}

struct Leg {
    transit: Transit,
    slots: Vec<Slot>,
    /// Keys that move without their slot.
    keys: Option<Vec<Arc<[u8]>>>,
    goes_back: bool,
}

impl Leg {
    fn id(&self) -> (MoveId, u32) {
        (self.transit.move_id, 0)
    }

    fn takes(&self, topology: &Topology, key: &Arc<[u8]>) -> bool {
        self.slots.contains(&topology.slot_of(key)) && self.keys.as_ref().is_none_or(|keys| keys.contains(key))
    }
}

struct Client {
    cursor: u64,
    seen: BTreeSet<Arc<[u8]>>,
}

struct World {
    random: Random,
    planted: InjectedBug,
    topology: Arc<Topology>,
    scans: Scans,
    legs: Vec<Leg>,
    next_move: u64,
    next_node: u16,
    /// Node of every key, and the seed of each node's table.
    keys: BTreeMap<Arc<[u8]>, NodeId>,
    seeds: BTreeMap<NodeId, u64>,
    now: u64,
    clients: Vec<Client>,
    ended: usize,
    missed: usize,
}

impl World {
    fn new(seed: u64, planted: InjectedBug) -> Self {
        let names: Vec<String> = (0..3).map(name).collect();
        let topology = Arc::new(Topology::even(&names).expect("three nodes"));
        let keys: BTreeMap<Arc<[u8]>, NodeId> = (0..KEYS)
            .map(|i| if i % 3 == 0 { format!("{{{}}}{i}", i % 40) } else { format!("t{}:{i}", i % 40) })
            .map(|key| key.into_bytes().into())
            .map(|key: Arc<[u8]>| (key.clone(), topology.lives_at(&key)))
            .collect();
        Self {
            random: Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            planted,
            scans: Scans::new(topology.clone(), 1_000_000, 1),
            seeds: topology.nodes().map(|node| (node.id, 1)).collect(),
            topology,
            legs: Vec::new(),
            next_move: 1,
            next_node: 3,
            keys,
            now: 1_000_000,
            clients: (0..3).map(|_| Client { cursor: 0, seen: BTreeSet::new() }).collect(),
            ended: 0,
            missed: 0,
        }
    }

    fn observe(&mut self) {
        if self.planted == InjectedBug::Changes && self.random.one_in(2) {
            return;
        }
        let back = self.legs.iter().filter(|leg| leg.goes_back).map(Leg::id).collect();
        self.scans.observe(&self.topology, back, self.now);
    }

    fn mark(&self, topology: &Topology) -> Topology {
        topology.with_transits(self.legs.iter().map(|leg| (leg.transit, &leg.slots[..]))).expect("few")
    }

    fn begin_leg(&mut self) {
        if self.topology.is_adopting() {
            return self.begin_leg_of_adoption();
        }
        let nodes: Vec<NodeId> = self.topology.nodes().map(|node| node.id).collect();
        let source = nodes[self.random.below(nodes.len())];
        let target = nodes[self.random.below(nodes.len())];
        let is_free = |slot: Slot| !self.legs.iter().any(|leg| leg.slots.contains(&slot));
        let keys_only = self.random.one_in(3);
        let mut keys: Vec<Arc<[u8]>> =
            self.keys.keys().filter(|key| is_free(self.topology.slot_of(key))).cloned().collect();
        keys.retain(|key| {
            if keys_only { self.topology.lives_at(key) == source } else { self.topology.owner_of(key) == source }
        });
        let (skip, take) = (self.random.below(keys.len()), 1 + self.random.below(20));
        let keys: Vec<_> = keys.into_iter().skip(skip).take(take).collect();
        if source == target || keys.is_empty() {
            return;
        }
        let slots: BTreeSet<Slot> = keys.iter().map(|key| self.topology.slot_of(key)).collect();
        let move_id = MoveId(self.next_move);
        self.next_move += 1;
        let transit = Transit { move_id, source, target, stage: Stage::Moving { leg: 0 }, keys_only };
        self.legs.push(Leg {
            transit,
            slots: slots.into_iter().collect(),
            keys: keys_only.then_some(keys),
            goes_back: false,
        });
        self.topology = Arc::new(self.mark(&self.topology));
        self.observe();
    }

    /// Begins an adoption of other rules, or changes its goal.
    fn adopt(&mut self) {
        let next = if self.topology.is_adopting() {
            let goal = if self.random.one_in(3) { AdoptionGoal::Present } else { AdoptionGoal::Next };
            self.topology.with_adoption_goal(goal)
        } else {
            let rule = |keys: &str| Rule { keys: vec![keys.to_owned()], tag: None };
            let rules = [vec![], vec![rule("t{x}:*")], vec![rule("t{x}:5"), rule("t{x}:*")]];
            let rules = rules[self.random.below(3)].clone();
            self.topology.with_adoption(RuleSet::new(rules).expect("valid rules"))
        };
        self.topology = Arc::new(next.expect("no leg is in progress"));
        self.observe_rules();
    }

    fn observe_rules(&mut self) {
        if self.planted != InjectedBug::Adoptions {
            self.observe();
        }
    }

    /// Begins a leg of some passages with keys, or ends the adoption if these have arrived.
    fn begin_leg_of_adoption(&mut self) {
        let used: BTreeSet<Slot> = self.keys.keys().map(|key| self.topology.slot_of(key)).collect();
        let left = self.topology.adoption_moves();
        let Some((first, target)) = left.iter().find(|(slot, _)| used.contains(slot)).copied() else {
            if self.legs.is_empty() {
                let empty = left
                    .iter()
                    .fold((*self.topology).clone(), |topology, (slot, node)| topology.handed_over(&[*slot], *node));
                self.topology = Arc::new(empty.with_adoption_ended().expect("all keys have arrived"));
                self.observe_rules();
            }
            return;
        };
        let source = self.topology.owner(first);
        let is_one = |(slot, node): &&(Slot, NodeId)| {
            used.contains(slot) && *node == target && self.topology.owner(*slot) == source
        };
        let most = 1 + self.random.below(4);
        let slots: Vec<Slot> = left.iter().filter(is_one).map(|(slot, _)| *slot).take(most).collect();
        if slots.iter().any(|slot| self.topology.transit(*slot).is_some()) {
            return;
        }
        let move_id = MoveId(self.next_move);
        self.next_move += 1;
        let transit = Transit { move_id, source, target, stage: Stage::Moving { leg: 0 }, keys_only: false };
        self.legs.push(Leg { transit, slots, keys: None, goes_back: false });
        self.topology = Arc::new(self.mark(&self.topology));
        self.observe();
    }

    /// Whether a key moves with its slot, or is named by the leg.
    fn is_of_slot_owner(&self, leg: &Leg, key: &Arc<[u8]>) -> bool {
        leg.keys.is_some() || self.topology.placement_override(key).is_none()
    }

    /// Moves up to `most` keys of a leg in its direction. Returns whether none is left.
    fn move_keys(&mut self, leg: usize, most: usize) -> bool {
        let leg = &self.legs[leg];
        let (from, to) = if leg.goes_back {
            (leg.transit.target, leg.transit.source)
        } else {
            (leg.transit.source, leg.transit.target)
        };
        let there: Vec<Arc<[u8]>> = self
            .keys
            .iter()
            .filter(|(key, node)| **node == from && leg.takes(&self.topology, key) && self.is_of_slot_owner(leg, key))
            .map(|(key, _)| key.clone())
            .collect();
        for key in there.iter().take(most) {
            self.keys.insert(key.clone(), to);
        }
        there.len() <= most
    }

    fn end_leg(&mut self, at: usize) {
        while !self.move_keys(at, 5) {
            self.scan_steps();
        }
        let leg = self.legs.remove(at);
        let mut next = (*self.topology).clone();
        if !leg.goes_back {
            next = match &leg.keys {
                Some(keys) => next.keys_handed_over(&leg.slots, keys, leg.transit.target),
                None => next.handed_over(&leg.slots, leg.transit.target),
            };
        }
        self.topology = Arc::new(self.mark(&next));
        self.observe();
    }

    fn change_nodes(&mut self) {
        let mut names: Vec<String> = self.topology.nodes().map(|node| node.name.clone()).collect();
        let is_empty = |node: NodeId| {
            self.topology.slots_of(node) == 0
                && self.topology.overrides_at(node) == 0
                && !self.legs.iter().any(|leg| leg.transit.source == node || leg.transit.target == node)
        };
        let empty = self.topology.nodes().find(|node| is_empty(node.id)).map(|node| node.name.clone());
        match empty {
            Some(empty) if self.random.one_in(2) => names.retain(|name| *name != empty),
            _ if names.len() < 6 => {
                names.push(name(self.next_node));
                self.next_node += 1;
            }
            // Drains a node at once, with as many legs in a row as necessary.
            _ => {
                let nodes: Vec<NodeId> = self.topology.nodes().map(|node| node.id).collect();
                let (node, to) = (nodes[self.random.below(nodes.len())], nodes[self.random.below(nodes.len())]);
                while !self.legs.is_empty() {
                    self.end_leg(0);
                }
                return self.drain(node, to);
            }
        }
        let placed = Topology::place(Some(&self.topology), &names).expect("only empty nodes go").topology;
        self.topology = Arc::new(placed);
        for node in self.topology.nodes() {
            self.seeds.entry(node.id).or_insert(1);
        }
        self.observe();
    }

    fn drain(&mut self, node: NodeId, to: NodeId) {
        if node == to {
            return;
        }
        let alone: Vec<Arc<[u8]>> =
            self.topology.placement_overrides().filter(|(_, at)| *at == node).map(|(key, _)| key.clone()).collect();
        let slots: Vec<Slot> = self.topology.slots().filter(|slot| self.topology.owner(*slot) == node).collect();
        for (keys, slots) in
            [(Some(alone.clone()), alone.iter().map(|key| self.topology.slot_of(key)).collect()), (None, slots)]
        {
            let move_id = MoveId(self.next_move);
            self.next_move += 1;
            let transit = Transit {
                move_id,
                source: node,
                target: to,
                stage: Stage::Moving { leg: 0 },
                keys_only: keys.is_some(),
            };
            self.legs.push(Leg { transit, slots, keys, goes_back: false });
            self.topology = Arc::new(self.mark(&self.topology));
            self.observe();
            self.end_leg(0);
        }
    }

    /// One `SCAN` call of a client, answered with a bucket of one node.
    fn scan_step(&mut self, client: usize) {
        let cursor = self.clients[client].cursor;
        let Some(at) = self.scans.decode(cursor, self.now) else { return self.end_scan(client) };
        let seed = self.seeds[&at.node];
        let bucket = |key: &[u8]| {
            key.iter().fold(seed, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)) >> 20
                & (BUCKETS - 1)
        };
        let wanted = self.scans.wanted(at).cloned();
        let is_given = |key: &[u8]| {
            wanted.as_ref().is_none_or(|wanted| wanted.has(self.topology.slot_of(key))) && bucket(key) == at.inner
        };
        let found: Vec<Arc<[u8]>> = self
            .keys
            .iter()
            .filter(|(key, node)| **node == at.node && is_given(key))
            .map(|(key, _)| key.clone())
            .collect();
        let next = self.scans.after(at, (at.inner + 1) % BUCKETS, self.now).map(|next| self.plant(at, next));
        // A reply may be lost: the client then repeats the cursor.
        if self.random.one_in(20) {
            return;
        }
        self.clients[client].seen.extend(found);
        match next.filter(|next| self.planted != InjectedBug::OnePass || next.pass == Pass::First) {
            Some(next) => self.clients[client].cursor = self.scans.encode(next).expect("small cursors"),
            None => self.end_scan(client),
        }
    }

    fn plant(&self, at: Position, next: Position) -> Position {
        match self.planted {
            InjectedBug::Direction if next.pass == Pass::Down => {
                let first = self.topology.nodes().next().map_or(NodeId(0), |node| node.id);
                Position { pass: Pass::Up, node: if next.since == at.since { next.node } else { first }, ..next }
            }
            _ => next,
        }
    }

    fn end_scan(&mut self, client: usize) {
        let client = &mut self.clients[client];
        self.missed += self.keys.keys().filter(|key| !client.seen.contains(*key)).count();
        self.ended += 1;
        *client = Client { cursor: 0, seen: BTreeSet::new() };
    }

    fn scan_steps(&mut self) {
        for _ in 0..self.random.below(4) {
            let client = self.random.below(self.clients.len());
            self.scan_step(client);
        }
    }

    fn step(&mut self) {
        if self.random.one_in(10) {
            self.now += 1;
        }
        match self.random.below(20) {
            0 if self.legs.len() < 3 => self.begin_leg(),
            1..=4 if !self.legs.is_empty() => {
                let leg = self.random.below(self.legs.len());
                self.move_keys(leg, 2);
            }
            5 if !self.legs.is_empty() => {
                let leg = self.random.below(self.legs.len());
                self.end_leg(leg);
            }
            6 if !self.legs.is_empty() && self.random.one_in(3) => {
                let leg = self.random.below(self.legs.len());
                self.legs[leg].goes_back = true;
                if self.planted != InjectedBug::Turns {
                    self.observe();
                }
            }
            7 if self.random.one_in(6) && !self.topology.is_adopting() => self.change_nodes(),
            9 if self.legs.is_empty() && self.random.one_in(3) => self.adopt(),
            8 if self.random.one_in(6) => {
                let nodes: Vec<NodeId> = self.seeds.keys().copied().collect();
                let node = nodes[self.random.below(nodes.len())];
                *self.seeds.entry(node).or_default() += 77;
                if self.planted != InjectedBug::Restarts {
                    self.scans.restarted(node, self.now);
                }
            }
            _ => self.scan_steps(),
        }
    }
}

/// Returns the number of finished scans, and of keys that they missed.
fn run(seed: u64, planted: InjectedBug) -> (usize, usize) {
    let mut world = World::new(seed, planted);
    for _ in 0..1500 {
        world.step();
    }
    // Legs stay unfinished; the scans must end nevertheless.
    let limit = 3000;
    for client in 0..world.clients.len() {
        let before = world.ended;
        let mut steps = 0;
        while world.ended == before {
            world.scan_step(client);
            world.now += u64::from(steps % 20 == 0);
            steps += 1;
            assert!(
                steps < limit || planted != InjectedBug::Nothing,
                "seed {seed}: a scan does not end: {:?}",
                world.scans.decode(world.clients[client].cursor, world.now)
            );
            if steps == limit {
                break;
            }
        }
    }
    (world.ended, world.missed)
}

#[test]
fn no_key_present_throughout_is_missed() {
    let mut ended = 0;
    for seed in 1..=60 {
        let (scans, missed) = run(seed, InjectedBug::Nothing);
        assert_eq!(missed, 0, "seed {seed}");
        ended += scans;
    }
    assert!(ended > 60 * 10, "only {ended} scans ended");
}

#[test]
fn planted_bugs_are_found() {
    for planted in [
        InjectedBug::Changes,
        InjectedBug::Turns,
        InjectedBug::Restarts,
        InjectedBug::Direction,
        InjectedBug::OnePass,
        InjectedBug::Adoptions,
    ] {
        let found = (1..=300).find(|seed| run(*seed, planted).1 > 0);
        assert!(found.is_some(), "{planted:?} is not found");
    }
}
