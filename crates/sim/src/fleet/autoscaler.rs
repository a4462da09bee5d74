//! The autoscaler of the fleet: the decisions of `policy`, and a model of `control::autoscale`, which carries them out.
//!
//! A change is a sequence of stages as there: the server starts, joins and gets an even share of the slots; or a node is
//! drained and leaves. No stage fails here.

use std::collections::BTreeMap;

use switchyard_policy::autoscale::{
    Advisor, Knobs, Millis, Now, Observed, Progress, SizeChange, State, decide_advised,
};
use switchyard_policy::balance;
use switchyard_policy::topology::{MoveId, NodeId, Topology};

use super::map::Map;
use super::moves::{Moves, Order, Subject};
use super::scenario::Scenario;

/// Interval between steps.
const INTERVAL: f64 = 0.5;

/// Monday, 1970-01-05 00:00 UTC: the start of a scenario, in milliseconds since 1970.
const MONDAY: Millis = 4 * 86_400_000;

/// Stage of the change in progress.
#[derive(Clone, Debug, PartialEq)]
enum Stage {
    /// A server starts, and is ready at this time.
    Starts { ready_at: f64, is_urgent: bool },
    /// The node has joined, and waits until no move is open.
    Waits { is_urgent: bool },
    /// The node gets its share.
    Fills { moves: Vec<MoveId> },
    /// The node is drained.
    Drains { node: NodeId, moves: Vec<MoveId> },
}

/// The autoscaler.
#[derive(Debug)]
pub(super) struct Autoscaler {
    knobs: Knobs,
    start_up: f64,
    state: State,
    advisor: Advisor,
    stage: Option<Stage>,
    next_at: f64,
    /// First node id that a provisioner has started.
    first_own: u16,
    /// Time from which on changes are counted.
    counted_from: f64,
    resizes: u64,
}

/// Returns the present time on both clocks.
pub(super) fn now(at: f64) -> Now {
    let run = (at * 1e3).round() as Millis;
    Now { run, wall: MONDAY + run }
}

impl Autoscaler {
    /// Creates the autoscaler of a scenario. `None`: off.
    pub(super) fn new(scenario: &Scenario, state: State, advisor: Advisor) -> Option<Self> {
        let settings = scenario.autoscale.as_ref()?;
        Some(Self {
            knobs: settings.knobs(),
            start_up: settings.start_up,
            state,
            advisor,
            stage: None,
            next_at: INTERVAL,
            first_own: scenario.nodes.count as u16,
            counted_from: scenario.warm_up,
            resizes: 0,
        })
    }

    /// Number of nodes added and removed after the warm-up.
    pub(super) fn resizes(&self) -> u64 {
        self.resizes
    }

    /// Number of servers that start, and are no nodes yet.
    pub(super) fn starting(&self) -> usize {
        usize::from(matches!(self.stage, Some(Stage::Starts { .. })))
    }

    fn progress(&self) -> Progress {
        match self.stage {
            None => Progress::Idle,
            Some(Stage::Drains { .. }) => Progress::Removing,
            Some(_) => Progress::Adding,
        }
    }

    /// Whether a provisioner has started this node.
    pub(super) fn may_go(&self, node: NodeId) -> bool {
        node.0 >= self.first_own
    }

    /// Returns the node that is being drained.
    pub(super) fn drained(&self) -> Option<NodeId> {
        match self.stage {
            Some(Stage::Drains { node, .. }) => Some(node),
            _ => None,
        }
    }

    /// Performs the steps that are due. `observe` returns the present load.
    pub(super) fn step(
        &mut self,
        at: f64,
        map: &mut Map,
        moves: &mut Moves,
        observe: impl FnOnce(&Self, &Map) -> Observed,
    ) {
        if at < self.next_at - 1e-6 {
            return;
        }
        self.next_at = (self.next_at + INTERVAL).max(at);
        let observed = observe(&*self, &*map);
        self.advisor.observe(&observed, self.progress());
        if self.stage.is_none() {
            self.stage = self.begin(&observed, at, map.topology(), moves);
            // A change is measured from its begin.
            self.advisor.observe(&observed, self.progress());
        }
        // A stage follows a completed one at once.
        while let Some(before) = self.stage.clone() {
            self.stage = self.advance(before.clone(), at, map, moves);
            if self.stage == Some(before) {
                return;
            }
        }
    }

    /// Decides whether a change begins.
    fn begin(&mut self, observed: &Observed, at: f64, topology: &Topology, moves: &mut Moves) -> Option<Stage> {
        let advice = self.advisor.advise(observed, &self.knobs);
        let decision = decide_advised(observed, &self.knobs, &mut self.state, advice.as_ref());
        if decision.what == SizeChange::Stay || !self.state.bind(decision.key) {
            return None;
        }
        Some(match decision.what {
            SizeChange::Remove(node) => Stage::Drains { node, moves: drain(topology, node, moves) },
            _ => Stage::Starts { ready_at: at + self.start_up, is_urgent: decision.is_urgent() },
        })
    }

    fn advance(&mut self, stage: Stage, at: f64, map: &mut Map, moves: &mut Moves) -> Option<Stage> {
        let is_open = |ids: &[MoveId]| ids.iter().any(|id| moves.is_open(*id));
        match stage {
            Stage::Starts { ready_at, .. } if at < ready_at - 1e-6 => Some(stage),
            Stage::Starts { is_urgent, .. } => {
                map.join();
                Some(Stage::Waits { is_urgent })
            }
            Stage::Waits { .. } if !moves.is_idle() => Some(stage),
            Stage::Waits { is_urgent } => {
                let shifts = balance::even(map.topology(), &BTreeMap::new()).unwrap_or_default();
                Some(Stage::Fills { moves: moves.order(orders_of(shifts, is_urgent)) })
            }
            Stage::Fills { moves: ref own } if is_open(own) => Some(stage),
            Stage::Fills { .. } => self.end(at),
            Stage::Drains { moves: ref own, .. } if is_open(own) => Some(stage),
            // Moves that the planner had ordered before.
            Stage::Drains { node, .. } if moves.busy().contains(&node) => Some(stage),
            Stage::Drains { node, .. } => {
                let rest = drain(map.topology(), node, moves);
                if rest.is_empty() {
                    map.leave(node);
                    return self.end(at);
                }
                Some(Stage::Drains { node, moves: rest })
            }
        }
    }

    fn end(&mut self, at: f64) -> Option<Stage> {
        self.resizes += u64::from(at > self.counted_from);
        self.state.ended(now(at).run, false);
        None
    }
}

/// Orders moves of everything away from a node: its slots, and keys with placement overrides to their slots' owners.
fn drain(topology: &Topology, node: NodeId, moves: &mut Moves) -> Vec<MoveId> {
    let weights = BTreeMap::from([(node, 0)]);
    let shifts = balance::drain(topology, node, &weights).unwrap_or_default();
    let mut home: BTreeMap<NodeId, Vec<_>> = BTreeMap::new();
    for (key, _) in topology.placement_overrides().filter(|(_, at)| *at == node) {
        home.entry(topology.owner_of(key)).or_default().push((**key).into());
    }
    let keys = home.into_iter().map(|(target, keys)| Order {
        source: node,
        target,
        subject: Subject::Keys(keys),
        is_urgent: false,
    });
    let orders = keys.chain(orders_of(shifts, false)).collect();
    moves.order(orders)
}

fn orders_of(shifts: Vec<balance::Shift>, is_urgent: bool) -> Vec<Order> {
    let order =
        |balance::Shift { source, target, slots }| Order { source, target, subject: Subject::Slots(slots), is_urgent };
    shifts.into_iter().map(order).collect()
}
