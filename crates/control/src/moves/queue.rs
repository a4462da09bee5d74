//! Open moves, the choice of the next ones, and the results of ended ones.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use switchyard_policy::migration::published::Paper;
use switchyard_policy::migration::record::OpenMove;
use switchyard_policy::migration::{Goal, MoveOptions, MoveOrder, Protocol, Side};
use switchyard_policy::topology::{MoveId, NodeId, Slot};
use switchyard_router::{MoveEnd, MoveProgress, MoveTotals, UserRequest};

use crate::admin::{MoveReport, MoveState, OperationError, conflict};

/// Maximum number of ended moves in the history.
const ENDED_MAX: usize = 100;

/// An open move.
#[derive(Debug)]
pub(super) struct Planned {
    pub(super) order: MoveOrder,
    pub(super) steering: Steering,
    /// Totals at the last save, including earlier routers.
    pub(super) so_far: MoveTotals,
    /// Number of databases that its keys were in.
    pub(super) databases: u32,
    /// Upper bound of the keys lost with an abandoned node, once decided.
    pub(super) lost: Option<u64>,
    /// Whether a mover runs.
    pub(super) begun: bool,
    /// State in the journal when the previous router ended.
    pub(super) resume: Option<OpenMove>,
    /// Keys of the open leg that were at the target at that time.
    pub(super) left_at_start: u64,
    pub(super) progress: Option<MoveProgress>,
    pub(super) end: Option<MoveEnd>,
    /// Error of the last attempt to start it.
    pub(super) trouble: Option<String>,
}

/// Changes requested by operators since the order.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Steering {
    pub(super) paused: bool,
    /// The move must end.
    pub(super) aborting: bool,
    /// End without this node, which is permanently lost.
    pub(super) give_up: Option<Side>,
}

/// Settings that a running mover accepts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct MoverSettings {
    pub(super) steering: Steering,
    pub(super) goal: Goal,
    pub(super) max_rate: Option<u64>,
    pub(super) source_ops_max: Option<u32>,
}

impl MoverSettings {
    /// Returns the requests for a mover that knows `before`. Abandoning and aborting are irreversible.
    pub(super) fn since(self, before: Self) -> Vec<UserRequest> {
        let (new, old) = (self.steering, before.steering);
        let changes = [
            (new.paused != old.paused).then_some(if new.paused { UserRequest::Pause } else { UserRequest::Resume }),
            (self.goal != before.goal).then_some(UserRequest::Goal(self.goal)),
            (self.max_rate != before.max_rate).then_some(UserRequest::MaxRate(self.max_rate)),
            (self.source_ops_max != before.source_ops_max).then_some(UserRequest::SourceOpsMax(self.source_ops_max)),
            (new.aborting != old.aborting).then_some(UserRequest::Abort),
            new.give_up.filter(|_| new.give_up != old.give_up).map(UserRequest::GiveUp),
        ];
        changes.into_iter().flatten().collect()
    }
}

impl Planned {
    /// Settings that the mover should have.
    pub(super) fn wanted(&self) -> MoverSettings {
        let MoveOptions { goal, max_rate, source_ops_max, .. } = self.order.how;
        MoverSettings { steering: self.steering, goal, max_rate, source_ops_max }
    }

    /// Whether an earlier router has moved some of its slots.
    pub(super) fn was_begun(&self) -> bool {
        self.resume.as_ref().is_some_and(|resume| !resume.handed_over.is_empty())
    }

    /// Returns the protocol that simultaneous moves must share, because moves by a published protocol share one
    /// tracker.
    fn shared_protocol(&self) -> Option<(Protocol, Paper)> {
        let how = &self.order.how;
        how.paper.map(|paper| (how.protocol, paper))
    }

    /// Creates an unstarted move.
    pub(super) fn new(order: MoveOrder) -> Self {
        Self {
            order,
            steering: Steering::default(),
            so_far: MoveTotals::default(),
            databases: 0,
            lost: None,
            begun: false,
            resume: None,
            left_at_start: 0,
            progress: None,
            end: None,
            trouble: None,
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) open: BTreeMap<MoveId, Planned>,
    /// Nodes reserved for the removal of keys. None of their moves starts until the removal ends.
    pub(super) reserved: BTreeSet<NodeId>,
    /// Ejected nodes, and the slots that will return to them. Other moves avoid both.
    pub(super) ejected: BTreeMap<NodeId, Vec<Slot>>,
    pub(super) ended: VecDeque<MoveReport>,
    /// Moves ended since the start: done, and stopped early.
    pub(super) done: u64,
    pub(super) stopped: u64,
}

/// Moves that need an action now.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Due {
    /// Moves whose movers have ended.
    pub(super) ended: Vec<MoveId>,
    /// Aborted moves without an open leg.
    pub(super) aborted: Vec<MoveId>,
    /// Moves to start.
    pub(super) next: Vec<MoveId>,
}

impl State {
    /// Stores the progress of moves.
    pub(super) fn note(&mut self, progress: Vec<MoveProgress>) {
        for told in progress {
            if let Some(planned) = self.open.get_mut(&told.id) {
                planned.progress = Some(told);
            }
        }
    }

    /// Whether a move runs at a node, or has a leg there that must continue.
    pub(super) fn is_involved(&self, node: NodeId) -> bool {
        let is_under_way = |planned: &Planned| {
            planned.begun && planned.end.is_none() || planned.resume.as_ref().is_some_and(|resume| resume.leg.is_some())
        };
        self.open.values().any(|planned| is_under_way(planned) && planned.order.nodes().contains(&node))
    }

    /// Reserves nodes for the removal of keys, if no others are reserved and no node of `idle` takes part in a move.
    /// Returns whether it succeeded.
    pub(super) fn reserve(&mut self, nodes: BTreeSet<NodeId>, idle: impl IntoIterator<Item = NodeId>) -> bool {
        let is_free = self.reserved.is_empty() && !idle.into_iter().any(|node| self.is_involved(node));
        if is_free {
            self.reserved = nodes;
        }
        is_free
    }

    /// Returns the moves that need an action, with at most `per_node_max` simultaneous moves per node, and sets `begun`
    /// for the next ones. A move by a published protocol starts only if all running ones have the same protocol and
    /// options.
    pub(super) fn due(&mut self, per_node_max: usize) -> Due {
        let mut due = Due::default();
        let mut busy: BTreeMap<NodeId, usize> = BTreeMap::new();
        for planned in self.open.values().filter(|planned| planned.begun && planned.end.is_none()) {
            for node in planned.order.nodes() {
                *busy.entry(node).or_default() += 1;
            }
        }
        let mut way = self
            .open
            .values()
            .filter(|planned| planned.begun && planned.end.is_none())
            .find_map(Planned::shared_protocol);
        for (id, planned) in &mut self.open {
            if planned.end.is_some() {
                due.ended.push(*id);
                continue;
            }
            if planned.begun {
                continue;
            }
            // A move with an open leg ignores the bound, because clients wait for its keys.
            let must = planned.resume.as_ref().is_some_and(|resume| resume.leg.is_some());
            if planned.steering.aborting && !must {
                due.aborted.push(*id);
                continue;
            }
            if !must && planned.order.nodes().iter().any(|node| self.reserved.contains(node)) {
                continue;
            }
            let free = planned.order.nodes().iter().all(|node| busy.get(node).copied().unwrap_or(0) < per_node_max);
            // Moves that clients need for colocation ignore the bound: otherwise clients could wait for hours.
            let may = (free || planned.order.needed_keys().is_some()) && !planned.steering.paused;
            let agrees = planned.shared_protocol().is_none_or(|own| way.is_none_or(|other| own == other));
            if must || may && agrees {
                way = way.or(planned.shared_protocol());
                for node in planned.order.nodes() {
                    *busy.entry(node).or_default() += 1;
                }
                planned.begun = true;
                due.next.push(*id);
            } else if planned.was_begun() {
                // Paused before a restart: moves that waited for it must keep waiting.
                for node in planned.order.nodes() {
                    *busy.entry(node).or_default() += 1;
                }
            }
        }
        due
    }

    /// Adds a move to the ended ones.
    pub(super) fn close(&mut self, id: MoveId, report: MoveReport) {
        self.open.remove(&id);
        match report.state {
            MoveState::Done => self.done += 1,
            _ => self.stopped += 1,
        }
        self.ended.push_back(report);
        while self.ended.len() > ENDED_MAX {
            self.ended.pop_front();
        }
    }

    /// Returns the error for a change of a move that is not open.
    pub(super) fn not_open(&self, id: MoveId) -> OperationError {
        if self.ended.iter().any(|report| report.id == id.0) {
            return conflict(format!("move {} has ended", id.0));
        }
        let known: Vec<String> = self.open.keys().map(|id| id.0.to_string()).collect();
        let known = if known.is_empty() {
            "none is in progress".to_owned()
        } else {
            format!("in progress: {}", known.join(", "))
        };
        conflict(format!("there is no move {}; {known}", id.0))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use switchyard_policy::migration::record::{OpenLeg, ProcessGenerations, StaleCopies};
    use switchyard_policy::migration::{Cause, Key, Process};
    use switchyard_policy::topology::Slot;

    use super::*;

    fn order(source: u16, target: u16) -> MoveOrder {
        let (source, target) = (NodeId(source), NodeId(target));
        MoveOrder {
            source,
            target,
            slots: Vec::new(),
            keys: None,
            how: MoveOptions::default(),
            cause: Cause::Requested(None),
        }
    }

    fn ids(numbers: &[u64]) -> Vec<MoveId> {
        numbers.iter().copied().map(MoveId).collect()
    }

    #[test]
    fn movers_receive_each_change_once() {
        let mut planned = Planned::new(order(0, 1));
        let before = planned.wanted();
        assert_eq!(before.since(before), []);
        planned.steering.paused = true;
        planned.order.how.goal = Goal::Fast;
        planned.order.how.max_rate = Some(7);
        planned.order.how.source_ops_max = Some(9);
        let between = planned.wanted();
        assert_eq!(
            between.since(before),
            [
                UserRequest::Pause,
                UserRequest::Goal(Goal::Fast),
                UserRequest::MaxRate(Some(7)),
                UserRequest::SourceOpsMax(Some(9))
            ]
        );
        planned.steering = Steering { paused: false, aborting: true, give_up: Some(Side::Target) };
        assert_eq!(
            planned.wanted().since(between),
            [UserRequest::Resume, UserRequest::Abort, UserRequest::GiveUp(Side::Target)]
        );
    }

    #[test]
    fn no_move_of_a_stand_in_begins_while_its_keys_are_removed() {
        let (lost, stand_in, other) = (NodeId(0), NodeId(1), NodeId(2));
        let mut state = State { open: [(MoveId(1), Planned::new(order(2, 1)))].into(), ..State::default() };
        assert!(
            state.reserve([lost, stand_in].into(), [stand_in]),
            "a move that waits for its turn is none in progress"
        );
        assert!(!state.reserve([other].into(), [other]), "one removal at a time");
        assert_eq!(state.due(1), Due::default(), "it would bring a key that the removal does not expect");
        state.reserved.clear();
        assert_eq!(state.due(1).next, ids(&[1]));
        assert!(!state.reserve([lost, stand_in].into(), [stand_in]), "the stand-in takes part in a move");
        assert!(state.reserve([lost].into(), [lost]) && state.reserved == [lost].into());
    }

    #[test]
    fn moves_per_node_are_limited_unless_clients_wait() {
        let needed = MoveOrder {
            keys: Some(Arc::from([Key::from(&b"k"[..])])),
            cause: Cause::Needed(BTreeMap::new()),
            ..order(0, 1)
        };
        let paused = Steering { paused: true, ..Steering::default() };
        let aborting = Steering { aborting: true, ..Steering::default() };
        let open_leg = |order: MoveOrder| {
            let process = Process { run_id: String::new(), client_id: 0 };
            let leg = OpenLeg {
                leg: 0,
                slots: Vec::new(),
                moving: true,
                rolled_back: None,
                given_up: None,
                cut_over: false,
                behind: StaleCopies::NONE,
                source: process.clone(),
                target: process,
                eras: ProcessGenerations { source: 0, target: 0 },
                away: BTreeMap::new(),
            };
            let found = OpenMove {
                source: order.source,
                target: order.target,
                slots: Vec::new(),
                protocol: order.how.protocol,
                durability: order.how.durability,
                keys: None,
                handed_over: Vec::new(),
                leg: Some(leg),
                next_leg: 1,
            };
            Planned {
                resume: Some(found),
                steering: Steering { aborting: true, paused: true, ..Steering::default() },
                ..Planned::new(order)
            }
        };
        let open = [
            Planned::new(order(0, 1)),
            Planned::new(order(1, 2)),
            Planned::new(order(2, 3)),
            Planned::new(needed),
            Planned { steering: paused, ..Planned::new(order(4, 5)) },
            Planned { steering: aborting, ..Planned::new(order(4, 5)) },
            open_leg(order(0, 1)),
        ];
        let mut state = State { open: (1..).map(MoveId).zip(open).collect(), ..State::default() };
        assert_eq!(state.due(1), Due { ended: Vec::new(), aborted: ids(&[6]), next: ids(&[1, 3, 4, 7]) });
        assert_eq!(state.due(1), Due { aborted: ids(&[6]), ..Due::default() }, "the second waits for its node");
        for id in ids(&[1, 4, 7]) {
            state.open.get_mut(&id).expect("open").end = Some(MoveEnd::Done);
        }
        assert_eq!(
            state.due(1),
            Due { ended: ids(&[1, 4, 7]), aborted: ids(&[6]), next: Vec::new() },
            "node 2 is busy"
        );
        assert_eq!(state.due(2).next, ids(&[2]));
        // Paused halfway, before the router restarted.
        let found = open_leg(order(0, 1)).resume.expect("an open leg");
        let found = OpenMove { leg: None, handed_over: vec![Slot::new(7).expect("a slot")], ..found };
        let halfway = Planned { steering: paused, resume: Some(found), ..Planned::new(order(0, 1)) };
        let mut state =
            State { open: (1..).map(MoveId).zip([halfway, Planned::new(order(1, 2))]).collect(), ..State::default() };
        assert_eq!(state.due(1), Due::default(), "the second waits for the first, which rests");
    }
}
