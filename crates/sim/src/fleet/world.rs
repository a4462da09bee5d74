//! The fleet in time: each slice moves keys, divides the requests over copies and nodes, and steps the policies.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use switchyard_policy::autoscale::{self, Observed};
use switchyard_policy::load::{Answers, NodeLoad, ObservedLoad};
use switchyard_policy::planner::{FleetContext, KEYS};
use switchyard_policy::topology::{NodeId, SLOT_COUNT};

use super::Planted;
use super::autoscaler::{self, Autoscaler};
use super::copies::{HotCopies, Slice};
use super::draw::{Draws, Stream};
use super::keys::KeySpace;
use super::load::Clients;
use super::map::Map;
use super::moves::{Moves, Sizes};
use super::planner::Planner;
use super::record::{Recorder, Run, Totals};
use super::scenario::Scenario;
use super::servers::{Queue, Tier};
use super::telemetry::{Flow, KeyRate, Telemetry};
use super::variation::Variation;

/// Keys of a node that the admission considers.
const KEYS_OF_ADMISSION: usize = 8192;

/// Interval of the counters that the load of nodes is computed from, in seconds.
const READING: f64 = 1.0;

/// A node.
#[derive(Clone, Debug)]
struct Node {
    queue: Queue,
    reading: Reading,
    load: NodeLoad,
}

/// Sums since the last reading of the counters.
#[derive(Clone, Copy, Debug, Default)]
struct Reading {
    requests: f64,
    answered: f64,
    response: f64,
    busy: f64,
}

/// A simulated fleet.
pub(super) struct World<'s> {
    scenario: &'s Scenario,
    slices: u64,
    at: f64,
    clients: Clients<'s>,
    space: KeySpace,
    map: Map,
    nodes: BTreeMap<NodeId, Node>,
    router: Option<Tier>,
    cache: Option<Tier>,
    moves: Moves,
    telemetry: Option<Telemetry>,
    copies: Option<HotCopies>,
    planner: Option<Planner>,
    autoscaler: Option<Autoscaler>,
    noise: Draws,
    churn: Draws,
    samples: Draws,
    losses: Draws,
    variation: Variation,
    /// Load of each slot relative to its mean.
    slot_noise: Vec<f64>,
    next_noise: f64,
    next_churn: f64,
    /// Share of each slot's other keys in this period.
    tail: Vec<f64>,
    /// Sum of these, number of slots, and requests per second in this slice, by number of the node.
    tail_of_nodes: Vec<f64>,
    slots_of_nodes: Vec<f64>,
    loads: Vec<f64>,
    /// Rates of this slice, by place of the key; and of the other keys by slot.
    rates: Vec<KeyRate>,
    tail_rates: Vec<f64>,
    event_shares: Vec<f64>,
    reading_seconds: f64,
    recorder: Recorder,
}

impl<'s> World<'s> {
    pub(super) fn new(scenario: &'s Scenario, seed: u64, planted: Option<Planted>) -> Self {
        let topology = Map::even(scenario.nodes.count);
        let space = KeySpace::new(&scenario.keys, &scenario.events, &topology, seed);
        let map = Map::new(topology, space.keys());
        let mut copies = scenario.copies.map(|settings| {
            let (holders, fill_us) = (scenario.copies_of_a_key(), scenario.nodes.base_us);
            HotCopies::new(settings, holders, fill_us, &space, super::admission(planted))
        });
        if let Some(copies) = copies.as_mut().filter(|_| scenario.copies.is_some_and(|copies| copies.prefilled)) {
            copies.prefill(&space, scenario.load.rate, scenario.keys.bytes as u64);
        }
        let is_counted = scenario.copies.is_some() || scenario.planner.is_some();
        let telemetry = is_counted.then(|| {
            Telemetry::new(scenario.telemetry, scenario.workers(), scenario.keys.bytes, super::board(planted))
        });
        let router = scenario.router.map(|router| Tier::new(f64::from(router.workers) * 1e6));
        let cache = scenario.cache.map(|cache| Tier::new(f64::from(cache.count) * cache.service_rate));
        let autoscaler = Autoscaler::new(scenario, super::autoscaler_state(planted), super::advisor(planted));
        let planner = scenario.planner.as_ref().map(|settings| Planner::new(settings, super::planner_bug(planted)));
        let mut world = Self {
            scenario,
            slices: 0,
            at: 0.0,
            clients: Clients::new(&scenario.load, &scenario.events),
            rates: vec![KeyRate::default(); space.keys().len()],
            space,
            map,
            nodes: BTreeMap::new(),
            router,
            cache,
            moves: Moves::new(scenario.moves),
            telemetry,
            copies,
            planner,
            autoscaler,
            noise: Draws::new(seed, Stream::Noise),
            churn: Draws::new(seed, Stream::Churn),
            samples: Draws::new(seed, Stream::Samples),
            losses: Draws::new(seed, Stream::Losses),
            variation: Variation::new(scenario, seed),
            slot_noise: vec![1.0; SLOT_COUNT],
            next_noise: 0.0,
            next_churn: scenario.churn.map_or(f64::INFINITY, |churn| churn.every),
            tail: vec![0.0; SLOT_COUNT],
            tail_of_nodes: Vec::new(),
            slots_of_nodes: Vec::new(),
            loads: Vec::new(),
            tail_rates: vec![0.0; SLOT_COUNT],
            event_shares: vec![0.0; scenario.events.len()],
            reading_seconds: 0.0,
            recorder: Recorder::new(scenario.bin, scenario.warm_up),
        };
        world.follow_map();
        world
    }

    /// Simulates the whole scenario.
    pub(super) fn run(mut self) -> Run {
        let began = Instant::now();
        let slices = (self.scenario.duration / self.scenario.slice).round() as u64;
        while self.slices < slices {
            self.slice();
        }
        let Self { scenario, planner, autoscaler, moves, recorder, .. } = self;
        let decisions = planner.as_ref().map(Planner::decisions).unwrap_or_default();
        let solving = planner.map_or(Duration::ZERO, |planner| planner.solving());
        Run {
            points: recorder.points(),
            bin: scenario.bin,
            event_at: scenario.events.first().map_or(0.0, |event| event.at),
            objective_us: scenario.nodes.objective_us,
            decisions: decisions.made,
            reverts: decisions.reverts,
            failed: decisions.failed,
            reversals: decisions.reversals,
            keys_moved: moves.keys,
            slots_moved: moves.slots,
            resizes: autoscaler.map_or(0, |autoscaler| autoscaler.resizes()),
            wall: began.elapsed().saturating_sub(solving),
            solving,
        }
    }

    fn slice(&mut self) {
        let seconds = self.scenario.slice;
        self.vary();
        let moved_before = self.moves.bytes;
        let costs = self.advance_moves(seconds);
        let totals = Totals { bytes: self.moves.bytes - moved_before, ..self.serve(seconds, &costs) };
        self.slices += 1;
        self.at = self.slices as f64 * seconds;
        self.count(seconds);
        self.step_policies();
        let starting = self.autoscaler.as_ref().map_or(0, Autoscaler::starting);
        let totals = Totals { starting, ..totals };
        self.clients.react(totals.lost / totals.offered.max(1e-9));
        // A node that has just joined had no load in this slice.
        let load = |id: &NodeId| self.loads.get(id.index()).copied().unwrap_or_default();
        let nodes = self.nodes.keys().map(|id| (*id, load(id) * seconds));
        self.recorder.note(self.at, seconds, &totals, nodes);
    }

    // ---- load ----

    /// Draws the variations and changes of the load that begin with this slice.
    fn vary(&mut self) {
        let noise = self.scenario.noise;
        let mut is_changed = false;
        if self.at >= self.next_noise - 1e-6 {
            self.next_noise += noise.period;
            if noise.slots > 0.0 {
                for factor in &mut self.slot_noise {
                    *factor = (1.0 + noise.slots * self.noise.normal()).max(0.0);
                }
                is_changed = true;
            }
            self.variation.next_period(self.at, &mut self.noise);
        }
        if let Some(churn) = self.scenario.churn.filter(|_| self.at >= self.next_churn - 1e-6) {
            self.next_churn += churn.every;
            let before: Vec<u64> = self.space.keys().iter().map(|key| key.hash).collect();
            for place in self.space.churn(&churn, self.map.topology(), &mut self.churn) {
                let key = &self.space.keys()[place];
                self.map.place(place, key);
                if let Some(copies) = &mut self.copies {
                    copies.replace(place, before[place], key);
                }
                if let Some(telemetry) = &mut self.telemetry {
                    telemetry.forget(place);
                }
            }
        }
        let shares = self.clients.shares(self.at);
        if shares != self.event_shares {
            self.space.share_out(&shares);
            self.event_shares = shares;
            is_changed = true;
        }
        if is_changed {
            self.follow_map();
        }
    }

    /// Sums the load of the keys without a rate of their own by node, and adds and removes nodes.
    fn follow_map(&mut self) {
        self.map.take_changed();
        let topology = self.map.topology();
        let nodes = &self.scenario.nodes;
        self.nodes.retain(|id, _| topology.node(*id).is_some());
        for node in topology.nodes() {
            self.nodes.entry(node.id).or_insert_with(|| Node {
                queue: Queue::new(nodes.service_rate, nodes.queue),
                reading: Reading::default(),
                load: NodeLoad::default(),
            });
        }
        self.tail_of_nodes = vec![0.0; topology.node_id_bound()];
        self.slots_of_nodes = vec![0.0; topology.node_id_bound()];
        for slot in topology.slots() {
            let share = self.space.tail(slot.index()) * self.slot_noise[slot.index()];
            self.tail[slot.index()] = share;
            let owner = topology.owner(slot).index();
            self.tail_of_nodes[owner] += share;
            self.slots_of_nodes[owner] += 1.0;
        }
    }

    // ---- data ----

    /// Size of the data now.
    fn sizes(&self) -> Sizes {
        let keys = &self.scenario.keys;
        let count = keys.count * (1.0 + keys.growth * self.at / 3600.0);
        Sizes { keys_of_slot: count / SLOT_COUNT as f64, bytes_of_key: keys.bytes }
    }

    /// Advances moves. Returns their costs by node, in requests per second.
    fn advance_moves(&mut self, seconds: f64) -> BTreeMap<NodeId, f64> {
        if self.moves.is_idle() {
            return BTreeMap::new();
        }
        let sizes = self.sizes();
        let slots = &self.slots_of_nodes;
        let keys_at = |node: NodeId| slots[node.index()] * sizes.keys_of_slot;
        let (done, costs) = self.moves.advance(self.at, seconds, sizes, keys_at);
        self.map.hand_over(&done, self.space.keys());
        if self.map.take_changed() {
            self.follow_map();
        }
        costs
    }

    // ---- requests ----

    /// Divides the requests of a slice, and serves them.
    fn serve(&mut self, seconds: f64, costs: &BTreeMap<NodeId, f64>) -> Totals {
        let rate = self.clients.rate(self.at) * self.variation.factor(self.at);
        self.loads.clear();
        self.loads.resize(self.tail_of_nodes.len(), 0.0);
        let (mut hits, mut forwarded, mut fills) = (0.0, 0.0, 0.0);
        for (place, (key, found)) in self.space.keys().iter().zip(&mut self.rates).enumerate() {
            let requests = rate * key.share * self.slot_noise[key.slot.index()];
            let (reads, writes) = (requests * (1.0 - key.writes), requests * key.writes);
            *found = match &self.copies {
                Some(copies) => copies.rate(place, reads, writes),
                None => KeyRate { reads, hits: 0.0, writes },
            };
            hits += found.hits;
            // Commands that fill copies are additional.
            forwarded += requests - found.hits;
            fills += found.reads + found.writes + found.hits - requests;
            self.loads[self.map.nodes()[place].index()] += found.reads + found.writes;
        }
        let mut rest = 0.0;
        for (load, tail) in self.loads.iter_mut().zip(&self.tail_of_nodes) {
            *load += rate * tail;
            rest += rate * tail;
        }
        if self.telemetry.is_some() {
            for (tail, share) in self.tail_rates.iter_mut().zip(&self.tail) {
                *tail = rate * share;
            }
        }
        forwarded += rest;
        let offered = hits + forwarded;
        let passed = match (self.router, self.scenario.router) {
            (Some(tier), Some(router)) => tier.part(hits * router.hit_us + (forwarded + fills) * router.forward_us),
            _ => 1.0,
        };
        let hits_served = hits * passed * self.cache.map_or(1.0, |cache| cache.part(hits * passed));
        let mut totals = Totals {
            offered: offered * seconds,
            served: hits_served * seconds,
            hits: hits_served * seconds,
            lost: (offered * (1.0 - passed) + hits * passed - hits_served) * seconds,
            ..Totals::default()
        };
        // Requests of clients among the commands at nodes; the others fill copies.
        let of_clients = if forwarded + fills > 0.0 { forwarded / (forwarded + fills) } else { 1.0 };
        for (id, node) in &mut self.nodes {
            let taken = costs.get(id).copied().unwrap_or_default() / self.scenario.nodes.service_rate;
            let arriving = self.loads[id.index()] * passed * seconds;
            let served = node.queue.serve(arriving, seconds, taken);
            totals.served += served.served * of_clients;
            totals.lost += served.lost * of_clients;
            let mean_us = served.mean_us + self.scenario.nodes.base_us;
            totals.response += served.served * mean_us;
            totals.answered += served.served;
            let reading = &mut node.reading;
            reading.requests += arriving;
            reading.answered += served.served;
            reading.response += served.served * mean_us;
            reading.busy += served.busy * seconds;
        }
        totals
    }

    // ---- policies ----

    /// Counts the requests of the slice.
    fn count(&mut self, seconds: f64) {
        self.reading_seconds += seconds;
        if self.reading_seconds >= READING - seconds / 2.0 {
            self.read_counters();
        }
        let Some(telemetry) = &mut self.telemetry else { return };
        let flow = Flow {
            seconds,
            keys: self.space.keys(),
            rates: &self.rates,
            nodes: self.map.nodes(),
            tail: &self.tail_rates,
        };
        telemetry.note(&flow, &mut self.samples);
    }

    /// Computes the load of each node from its counters.
    fn read_counters(&mut self) {
        let seconds = std::mem::take(&mut self.reading_seconds);
        let sizes = self.sizes();
        let bytes_of_slot = sizes.keys_of_slot * sizes.bytes_of_key;
        let topology = self.map.topology();
        for (id, node) in &mut self.nodes {
            let Reading { requests, answered, response, busy } = std::mem::take(&mut node.reading);
            let slots = self.slots_of_nodes[id.index()];
            let overrides = topology.overrides_at(*id) as f64;
            let mean_us = response / answered.max(1e-9);
            node.load = NodeLoad {
                requests: Some(requests / seconds),
                answers: (answered > 0.0).then_some(Answers {
                    mean_us,
                    p50_us: mean_us as u64,
                    p99_us: mean_us as u64,
                }),
                cpu: Some(busy / seconds),
                memory: Some((slots * bytes_of_slot + overrides * sizes.bytes_of_key) as u64),
                memory_max: Some(self.scenario.nodes.memory),
                keys: Some((slots * sizes.keys_of_slot + overrides) as u64),
                ..NodeLoad::default()
            };
        }
    }

    /// Steps the policies that are due.
    fn step_policies(&mut self) {
        self.step_copies();
        self.step_planner();
        self.step_autoscaler();
        if self.map.take_changed() {
            self.follow_map();
        }
    }

    fn step_copies(&mut self) {
        let (Some(copies), Some(telemetry)) = (&mut self.copies, &self.telemetry) else { return };
        let now_us = (self.at * 1e6).round() as u64;
        let slice = Slice {
            seconds: self.scenario.slice,
            workers: self.scenario.workers(),
            keys: self.space.keys(),
            rates: &self.rates,
            nodes: self.map.nodes(),
            loads: &self.loads,
        };
        copies.check_recent(&slice, &self.scenario.telemetry, now_us, &mut self.samples);
        copies.step(now_us, self.map.topology().placement(), || telemetry.hottest(KEYS_OF_ADMISSION));
    }

    fn step_planner(&mut self) {
        let (Some(planner), Some(telemetry)) = (&mut self.planner, &self.telemetry) else { return };
        if !planner.is_due(self.at) {
            return;
        }
        let load = ObservedLoad {
            nodes: self.nodes.iter().map(|(id, node)| (*id, node.load)).collect(),
            slots: telemetry.slots(),
            keys: telemetry.hottest(KEYS),
        };
        let topology = self.map.topology();
        let drained = self.autoscaler.as_ref().and_then(Autoscaler::drained);
        let context = FleetContext {
            weights: drained.into_iter().map(|node| (node, 0)).collect(),
            capacities: match self.scenario.nodes.capacity {
                Some(capacity) => topology.nodes().map(|node| (node.id, capacity)).collect(),
                None => BTreeMap::new(),
            },
            busy: self.moves.busy(),
            copies: self.copies.is_some(),
            ..FleetContext::default()
        };
        planner.step(self.at, topology, &load, &context, &mut self.moves);
    }

    fn step_autoscaler(&mut self) {
        let Some(autoscaler) = &mut self.autoscaler else { return };
        let (nodes, at) = (&self.nodes, self.at);
        let unobserved = self.scenario.autoscale.as_ref().map_or(0.0, |scaling| scaling.unobserved);
        let is_lost = (unobserved > 0.0 && self.losses.unit() < unobserved) || self.variation.is_silent(at);
        let observe = |autoscaler: &Autoscaler, map: &Map| {
            let observed = |node: &switchyard_policy::topology::Node| {
                let load = nodes.get(&node.id).filter(|_| !is_lost).map(|node| node.load).unwrap_or_default();
                autoscale::Node {
                    id: node.id,
                    requests: load.requests,
                    mean_us: load.answers.map(|answers| answers.mean_us),
                    cpu: load.cpu,
                    memory: load.memory.zip(load.memory_max),
                    is_up: true,
                    may_go: autoscaler.may_go(node.id),
                }
            };
            Observed { now: autoscaler::now(at), nodes: map.topology().nodes().map(observed).collect() }
        };
        autoscaler.step(self.at, &mut self.map, &mut self.moves, observe);
    }
}
