//! Hot copies during a take-over: two routers, one node, one key. The first router is cut off from the node, or
//! stopped, at each of its steps; the second one takes over and writes. No read that begins after that write was
//! acknowledged may return the old value.
//!
//! A separate model rather than a fault of [`crate::scenario`], because scenarios have one router, and this question
//! needs no keys in transit. Copies, beats and the wait are from `switchyard_policy`.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::sync::Arc;

use switchyard_policy::hot_copies::{
    CacheableSet, Copies, Discarded, Gate, GateId, Gates, LEASE_US, Read, ReadRequest,
};
use switchyard_policy::ownership::{OwnershipRecord, Predecessor, TAKE_OVER_WAIT_US};
use switchyard_policy::topology::{NodeId, Slot};

/// A bug of the first or the second router.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bug {
    /// A hit needs no beat.
    NoBeat,
    /// The age of a beat counts from its reply.
    BeatFromReply,
    /// Hits use the clock reading of the turn, from before the commands were read from the socket.
    ClockOfTurn,
    /// The second router writes as soon as the first one's connection has ended.
    NoWait,
}

/// A fault of the first router.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// Messages between the router and the node are lost from now on.
    Cut,
    /// The process is stopped for this time, microseconds. `loses_end`: the node's message that the connection has
    /// ended is lost.
    Stop { time_us: u64, loses_end: bool },
}

/// Time of a message between a router and the node, microseconds.
const TRAVEL_US: u64 = 500;

/// Interval between two turns of the first router, and between two reads of its client, microseconds.
const TURN_US: u64 = 40_000;

/// Time at which the client begins to read, and end of a run, microseconds.
const BEGIN_US: u64 = 1_000_000;
const END_US: u64 = BEGIN_US + 6 * LEASE_US;

/// First time at which the second router ends the first one's connection, and the interval between such times, in
/// microseconds. The interval is no multiple of the one between two beats.
const TAKE_OVER_US: u64 = BEGIN_US + LEASE_US;
const TAKE_OVER_STEP_US: u64 = 70_000;
const TAKE_OVERS: u64 = 8;

const NODE: NodeId = NodeId(0);
const HASH: u64 = 7 << 32;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Event {
    /// The first router begins a turn: it reads the clock, and sends beats that are due.
    Turn,
    /// The first router reads its client's socket.
    ReadSocket,
    /// The first router replies to the commands that it has read.
    Serve,
    /// A request of the first router arrives at the node.
    AtNode(Request),
    /// The node's reply arrives at the first router.
    Replied(Request, u32),
    /// The client sends a read.
    ClientReads,
    /// The node ends the first router's connection.
    TakeOver,
    /// The first router receives the end of its connection.
    Lost,
    /// The second router's write is executed and acknowledged.
    Write,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Request {
    Beat,
    Fill(u32),
}

impl Event {
    /// Whether it happens in the first router's process, which may be stopped.
    fn is_of_first(self) -> bool {
        matches!(self, Self::Turn | Self::ReadSocket | Self::Serve | Self::Replied(..) | Self::Lost)
    }
}

#[derive(Default)]
struct OpenGates(RefCell<BTreeMap<GateId, u64>>);

impl Gates for OpenGates {
    fn load(&self, gate: GateId) -> Gate {
        Gate(self.0.borrow().get(&gate).copied().unwrap_or(0))
    }

    fn add(&self, gate: GateId, what: u64) {
        let mut gates = self.0.borrow_mut();
        let state = gates.entry(gate).or_default();
        *state = state.wrapping_add(what);
    }
}

struct World {
    bug: Option<Bug>,
    now: u64,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    /// Events so far; also breaks ties.
    number: u64,
    /// The value at the node.
    value: u32,
    is_connected: bool,
    is_cut: bool,
    loses_end: bool,
    stopped_until: u64,
    copies: Copies,
    gates: OpenGates,
    turn_us: u64,
    /// Send times of the client's reads that are still in the socket, and that are read from it.
    sent: VecDeque<u64>,
    received: Vec<u64>,
    acknowledged: Option<u64>,
    hits: u64,
    violation: Option<String>,
}

/// The outcome of a search.
#[derive(Debug)]
pub struct Searched {
    /// Runs: one for each step, fault and time of the take-over.
    pub runs: u64,
    /// Reads that copies have answered.
    pub hits: u64,
    /// The first stale read, if there was one.
    pub violation: Option<String>,
}

/// Runs each fault at each step of the first router, until a read is stale.
#[must_use]
pub fn search(bug: Option<Bug>) -> Searched {
    let mut searched = Searched { runs: 0, hits: 0, violation: None };
    let stops = [LEASE_US / 2, LEASE_US * 2, LEASE_US * 4].into_iter();
    let stops = stops.flat_map(|time_us| [false, true].map(|loses_end| Fault::Stop { time_us, loses_end }));
    let faults: Vec<Fault> = [Fault::Cut].into_iter().chain(stops).collect();
    for take_over in 0..TAKE_OVERS {
        for &fault in &faults {
            for step in 0.. {
                let mut world = World::new(bug, TAKE_OVER_US + take_over * TAKE_OVER_STEP_US);
                let is_reached = world.run(step, fault);
                searched.runs += 1;
                searched.hits += world.hits;
                if let Some(violation) = world.violation {
                    searched.violation = Some(format!("{fault:?} at step {step}, take-over {take_over}: {violation}"));
                    return searched;
                }
                if !is_reached {
                    break;
                }
            }
        }
    }
    searched
}

impl World {
    fn new(bug: Option<Bug>, take_over_us: u64) -> Self {
        let mut copies = Copies::default();
        copies.limit(1 << 20, 1 << 10);
        copies.adopt(&Arc::new(CacheableSet::default().next(Slot::new(1).map(|slot| (HASH, slot)), [])));
        let mut world = Self {
            bug,
            now: 0,
            events: BinaryHeap::new(),
            number: 0,
            value: 1,
            is_connected: true,
            is_cut: false,
            loses_end: false,
            stopped_until: 0,
            copies,
            gates: OpenGates::default(),
            turn_us: 0,
            sent: VecDeque::new(),
            received: Vec::new(),
            acknowledged: None,
            hits: 0,
            violation: None,
        };
        world.at(BEGIN_US, Event::Turn);
        world.at(BEGIN_US, Event::ClientReads);
        world.at(take_over_us, Event::TakeOver);
        world
    }

    fn at(&mut self, time: u64, event: Event) {
        self.number += 1;
        self.events.push(Reverse((time, self.number, event)));
    }

    /// Runs to the end. Returns whether the first router has reached the step of the fault.
    fn run(&mut self, fault_at: u64, fault: Fault) -> bool {
        let mut step = 0;
        while let Some(Reverse((time, _, event))) = self.events.pop()
            && time <= END_US
            && self.violation.is_none()
        {
            self.now = time;
            if event.is_of_first() {
                if time < self.stopped_until {
                    self.at(self.stopped_until, event);
                    continue;
                }
                if step == fault_at {
                    match fault {
                        Fault::Cut => self.is_cut = true,
                        Fault::Stop { time_us, loses_end } => {
                            self.stopped_until = time + time_us;
                            self.loses_end = loses_end;
                        }
                    }
                    step += 1;
                    self.at(self.stopped_until.max(time), event);
                    continue;
                }
                step += 1;
            }
            self.happen(event);
        }
        step > fault_at
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::ClientReads => {
                self.sent.push_back(self.now);
                self.at(self.now + TURN_US, Event::ClientReads);
            }
            Event::Turn => {
                self.turn_us = self.now;
                let due: Vec<NodeId> = self.copies.beats().due(self.now).collect();
                if self.is_connected && !due.is_empty() {
                    self.copies.beats().sent(NODE, self.now);
                    self.send(Request::Beat);
                }
                self.at(self.now + 10, Event::ReadSocket);
            }
            Event::ReadSocket => {
                self.received.extend(self.sent.drain(..));
                self.at(self.now + 10, Event::Serve);
            }
            Event::Serve => {
                for began in std::mem::take(&mut self.received) {
                    self.read(began);
                }
                self.at(self.now + TURN_US, Event::Turn);
            }
            Event::AtNode(request) if self.is_connected && !self.is_cut => {
                self.at(self.now + TRAVEL_US, Event::Replied(request, self.value));
            }
            Event::AtNode(_) => {}
            Event::Replied(..) if self.is_cut => {}
            Event::Replied(Request::Beat, _) => {
                if self.bug == Some(Bug::BeatFromReply) {
                    self.copies.beats().sent(NODE, self.now);
                }
                self.copies.beats().replied(NODE);
            }
            Event::Replied(Request::Fill(number), value) => {
                let reply = value.to_string();
                let _ = self
                    .copies
                    .end(&self.gates, number, reply.as_bytes(), None, (self.now, self.now), |_, _| Some(NODE));
            }
            Event::TakeOver => {
                self.is_connected = false;
                self.at(self.now + TRAVEL_US, Event::Lost);
                let old = OwnershipRecord { term: 1, holder: "first".to_owned(), ..OwnershipRecord::default() }.words();
                let waits = Predecessor::Unknown.may_have_copies(old.iter().map(String::as_str), "second", true);
                let wait = if waits && self.bug != Some(Bug::NoWait) { TAKE_OVER_WAIT_US } else { 0 };
                self.at(self.now + wait, Event::Write);
            }
            Event::Lost if self.is_cut || self.loses_end => {}
            Event::Lost => self.copies.lost(NODE, Discarded::Lost),
            Event::Write => {
                self.value = 2;
                self.acknowledged = Some(self.now);
            }
        }
    }

    fn send(&mut self, request: Request) {
        self.at(self.now + TRAVEL_US, Event::AtNode(request));
    }

    /// The first router handles a read that its client sent at this time.
    fn read(&mut self, began: u64) {
        let asked = ReadRequest { hash: HASH, key: b"k", database: 0, request: b"GET k", node: NODE, resp3: true };
        if self.bug == Some(Bug::NoBeat) {
            self.copies.beats().sent(NODE, self.now);
            self.copies.beats().replied(NODE);
        }
        let clock = if self.bug == Some(Bug::ClockOfTurn) { self.turn_us } else { self.now };
        match self.copies.read(&self.gates, asked, self.turn_us, || clock, |_| true) {
            Read::Hit(reply) => {
                self.hits += 1;
                let is_old = reply == b"1";
                if let Some(at) = self.acknowledged.filter(|at| is_old && began > *at) {
                    self.violation = Some(format!(
                        "a read that began at {began} returned the value before the write acknowledged at {at}"
                    ));
                }
            }
            Read::Fill if self.is_connected => {
                if let Some(number) = self.copies.begin(&self.gates, asked, (self.turn_us, self.now)) {
                    self.send(Request::Fill(number));
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replaced_router_serves_no_old_value() {
        let searched = search(None);
        assert_eq!(searched.violation, None);
        println!("{searched:?}");
        assert!(searched.runs > 5_000 && searched.hits > searched.runs, "{searched:?}");
    }

    #[test]
    fn planted_bugs_of_a_take_over_are_found() {
        for bug in [Bug::NoBeat, Bug::BeatFromReply, Bug::ClockOfTurn, Bug::NoWait] {
            let searched = search(Some(bug));
            println!("{bug:?}: {searched:?}");
            assert!(searched.violation.is_some(), "{bug:?} was not found in {} runs", searched.runs);
        }
    }
}
