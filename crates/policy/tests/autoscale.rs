//! Tests of the autoscaler with a model of a fleet: any load, any policy, and concurrent triggers.

use proptest::prelude::*;
use switchyard_policy::autoscale::{
    Clock, Decision, Knobs, Node, Now, Observed, Policy, Reason, Schedule, SizeChange, State, decide, minimum,
};
use switchyard_policy::topology::NodeId;

/// Requests per second that one node can serve.
const CAPACITY: f64 = 10_000.0;

/// A fleet with evenly shared load. Changes take time.
struct Fleet {
    now: u64,
    nodes: Vec<NodeId>,
    next: u16,
    load: f64,
    /// SizeChange in progress, and the time of its end.
    change: Option<(SizeChange, u64)>,
    state: State,
}

impl Fleet {
    fn new(nodes: u16) -> Fleet {
        let state = State::default();
        Fleet {
            now: 1_000_000_000_000,
            nodes: (0..nodes).map(NodeId).collect(),
            next: nodes,
            load: 0.0,
            change: None,
            state,
        }
    }

    fn observed(&self) -> Observed {
        let each = self.load / self.nodes.len() as f64;
        let node = |id: &NodeId| Node {
            id: *id,
            requests: Some(each),
            // Time in a queue with one server.
            mean_us: Some(100.0 / (1.0 - (each / CAPACITY).min(0.999))),
            cpu: Some((each / CAPACITY).min(1.0)),
            memory: Some((1 << 20, 100 << 20)),
            is_up: true,
            may_go: true,
        };
        Observed { now: Now { run: self.now, wall: self.now }, nodes: self.nodes.iter().map(node).collect() }
    }

    /// Advances by one second. Concurrent triggers start one change.
    fn second(&mut self, knobs: &Knobs, triggers: usize, takes_ms: u64) -> Decision {
        self.now += 1000;
        if let Some((what, _)) = self.change.filter(|(_, done)| *done <= self.now) {
            match what {
                SizeChange::Add => self.nodes.push(NodeId(self.next)),
                SizeChange::Remove(node) => self.nodes.retain(|known| *known != node),
                SizeChange::Stay => {}
            }
            self.next += 1;
            self.change = None;
            self.state.ended(self.now, false);
        }
        let decision = decide(&self.observed(), knobs, &mut self.state);
        for _ in 0..triggers {
            if decision.what != SizeChange::Stay && self.state.bind(decision.key) {
                assert!(self.change.is_none(), "one change at a time");
                self.change = Some((decision.what, self.now + takes_ms));
            }
        }
        decision
    }
}

fn policies() -> impl Strategy<Value = Knobs> {
    let policy = prop_oneof![
        Just(Policy::Threshold),
        Just(Policy::Static),
        Just(Policy::Model),
        Just(Policy::Learned),
        Just(Policy::Predictive)
    ];
    let times = (0..60_000_u64, 0..120_000_u64, 0..60_000_u64, 0..120_000_u64);
    (policy, 1..4_usize, 0..8_usize, times).prop_map(
        |(policy, nodes_min, more, (up_after, down_after, up_cooldown, down_cooldown))| Knobs {
            policy,
            nodes_min,
            nodes_max: nodes_min + more,
            up_after,
            down_after,
            up_cooldown,
            down_cooldown,
            capacity: Some(CAPACITY),
            ..Knobs::default()
        },
    )
}

proptest! {
    /// Always within the bounds once inside, at most one change at a time, no change during a cooldown.
    #[test]
    fn bounds_and_pauses_hold_under_any_load(
        knobs in policies(),
        loads in prop::collection::vec((0.0..100_000.0_f64, 1..90_u64), 1..20),
        triggers in 1..5_usize,
        takes_ms in 0..40_000_u64,
    ) {
        let mut fleet = Fleet::new(knobs.nodes_min as u16);
        let (mut was, mut ended): (usize, Option<u64>) = (fleet.nodes.len(), None);
        for (load, seconds) in loads {
            fleet.load = load;
            for _ in 0..seconds {
                let before = fleet.change;
                let decision = fleet.second(&knobs, triggers, takes_ms);
                prop_assert!((knobs.nodes_min..=knobs.nodes_max).contains(&fleet.nodes.len()), "{} nodes", fleet.nodes.len());
                prop_assert!(fleet.nodes.len().abs_diff(was) <= 1);
                if before.is_some() && (fleet.change.is_none() || fleet.nodes.len() != was) {
                    ended = Some(fleet.now);
                }
                was = fleet.nodes.len();
                prop_assert!(!decision.reasons.is_empty(), "each decision has a reason");
                if let (Some(ended), Some((what, done)), true) = (ended, fleet.change, decision.what != SizeChange::Stay) {
                    let begun = done - takes_ms;
                    let pause = if what == SizeChange::Add { knobs.up_cooldown } else { knobs.down_cooldown };
                    prop_assert!(begun >= ended + pause, "{what:?} {} ms after a change, and the pause has {pause}", begun - ended);
                }
            }
        }
    }

    /// Policies that look ahead are `threshold` without a history, and state that as a reason.
    #[test]
    fn policies_without_history_decide_like_threshold(
        knobs in policies(),
        loads in prop::collection::vec((0.0..100_000.0_f64, 1..90_u64), 1..20),
    ) {
        let mut fleets = [Policy::Threshold, Policy::Learned, Policy::Predictive]
            .map(|policy| (Fleet::new(knobs.nodes_min as u16), Knobs { policy, ..knobs.clone() }));
        for (load, seconds) in loads {
            for _ in 0..seconds {
                let [usual, ahead @ ..] = fleets.each_mut().map(|(fleet, knobs)| {
                    fleet.load = load;
                    fleet.second(knobs, 1, 5000)
                });
                for other in ahead {
                    prop_assert_eq!(other.what, usual.what);
                    let is_judged = !matches!(usual.reasons[0], Reason::UnderWay(_) | Reason::Minimum(..));
                    let is_stated = other.reasons.iter().any(|reason| matches!(reason, Reason::NoHistory(0, _)));
                    prop_assert!(is_stated || !is_judged, "{:?}", other.reasons);
                }
            }
        }
    }

    /// A steady load with some noise leads to a steady number of nodes.
    #[test]
    fn a_steady_load_ends_all_changes(knobs in policies(), load in 0.0..60_000.0_f64, noise in prop::collection::vec(-0.02..0.02_f64, 2000)) {
        let mut fleet = Fleet::new(knobs.nodes_min as u16);
        let mut ways = Vec::new();
        for noise in noise {
            fleet.load = load * (1.0 + noise);
            let before = fleet.nodes.len();
            fleet.second(&knobs, 1, 5000);
            if fleet.nodes.len() != before {
                ways.push(fleet.nodes.len() > before);
            }
        }
        prop_assert!(ways.windows(2).all(|pair| pair[0] == pair[1]), "to and fro: {ways:?}");
    }
}

#[test]
fn a_number_starts_one_change() {
    let mut state = State::default();
    let key = state.next();
    assert!(state.bind(key) && !state.bind(key) && !state.bind(key + 1));
    state.ended(5, false);
    assert!(!state.bind(key), "an old trigger begins nothing");
    assert!(state.bind(state.next()));
}

#[test]
fn a_failed_provisioner_is_paused() {
    let knobs = Knobs { nodes_min: 3, up_cooldown: 30_000, ..Knobs::default() };
    let mut state = State::default();
    let at = |now| Observed { now: Now { run: now, wall: now }, nodes: Vec::new() };
    assert_eq!(decide(&at(1_000_000), &knobs, &mut state).what, SizeChange::Add);
    state.ended(1_000_000, true);
    let decision = decide(&at(1_010_000), &knobs, &mut state);
    assert_eq!((decision.what, decision.reasons.last()), (SizeChange::Stay, Some(&Reason::Pause(20_000))));
    assert_eq!(decide(&at(1_030_000), &knobs, &mut state).what, SizeChange::Add);
    // The cooldown doubles with each failure, up to an hour.
    state.ended(1_030_000, true);
    assert_eq!(state.failed_pause(1_040_000, &knobs), Some(50_000));
    assert_eq!(decide(&at(1_089_999), &knobs, &mut state).what, SizeChange::Stay);
    assert_eq!(decide(&at(1_090_000), &knobs, &mut state).what, SizeChange::Add);
    (0..20).for_each(|_| state.ended(1_090_000, true));
    assert_eq!(state.failed_pause(1_090_000, &knobs), Some(3_600_000));
    // After a successful change the next one starts immediately.
    state.ended(1_100_000, false);
    assert_eq!(
        (decide(&at(1_100_001), &knobs, &mut state).what, state.failed_pause(1_100_001, &knobs)),
        (SizeChange::Add, None)
    );
}

#[test]
fn wall_clock_jumps_change_no_wait_and_restarts_keep_it() {
    const T: u64 = 1_000_000_000_000;
    const HOUR: u64 = 3_600_000;
    let knobs = Knobs { down_after: 300_000, down_cooldown: 300_000, up_after: 0, up_cooldown: 0, ..Knobs::default() };
    let mut fleet = Fleet::new(3);
    let mut what = |now: Now, state: &mut State| {
        let observed = Observed { now, ..fleet.observed() };
        fleet.now = now.run;
        decide(&observed, &knobs, state).what
    };
    for jump in [HOUR as i64, -(HOUR as i64)] {
        let mut state = State::default();
        let clock = Clock::start(T);
        let at = |elapsed: u64| clock.now(elapsed, (T + elapsed).saturating_add_signed(jump));
        state.ended(at(0).run, false);
        assert_eq!(what(clock.now(0, T), &mut state), SizeChange::Stay);
        assert_eq!(what(at(1000), &mut state), SizeChange::Stay, "{jump}");
        // A restart with the changed clock.
        let (last, mut resumed) = (at(2000), state.clone());
        let again = Clock::start(last.wall + 1000);
        resumed.resume(last, again.now(0, last.wall + 1000));
        assert_eq!(what(again.now(200_000, 0), &mut resumed), SizeChange::Stay, "{jump}");
        assert_eq!(what(again.now(298_000, 0), &mut resumed), SizeChange::Remove(NodeId(2)), "{jump}");
        // Without a restart.
        assert_eq!(what(at(299_999), &mut state), SizeChange::Stay, "{jump}");
        assert_eq!(what(at(300_000), &mut state), SizeChange::Remove(NodeId(2)), "{jump}");
    }
}

#[test]
fn a_node_is_removed_only_if_the_others_have_memory() {
    let node = |id: u16, used: u64, is_up: bool, may_go: bool| Node {
        id: NodeId(id),
        requests: Some(1.0),
        mean_us: Some(50.0),
        cpu: Some(0.01),
        memory: Some((used, 1000)),
        is_up,
        may_go,
    };
    let of = |nodes: [Node; 3]| Observed { now: Now::default(), nodes: nodes.into() }.cheapest();
    assert_eq!(
        of([node(0, 100, true, false), node(1, 300, true, true), node(2, 200, true, true)]),
        Ok(NodeId(2)),
        "the fewest bytes"
    );
    assert_eq!(
        of([node(0, 100, true, false), node(1, 300, true, false), node(2, 200, true, false)]),
        Err(Reason::NoneMayGo)
    );
    assert_eq!(
        of([node(0, 850, true, false), node(1, 850, true, false), node(2, 200, true, true)]),
        Err(Reason::NoMemory(NodeId(2)))
    );
    assert_eq!(
        of([node(0, 100, false, false), node(1, 300, true, true), node(2, 200, true, true)]),
        Err(Reason::Down(NodeId(0)))
    );
}

#[test]
fn the_schedule_raises_the_minimum() {
    let schedule =
        Schedule::parse(&["Fri 18:00 at least 6".to_owned(), "Sat 02:00 at least 1".to_owned()]).expect("a schedule");
    let knobs = Knobs { schedule, nodes_max: 5, ..Knobs::default() };
    // 2026-11-27 is a Friday.
    let friday = 1_795_737_600_000;
    assert_eq!(minimum(&knobs, friday + 19 * 3_600_000), (5, true), "within the maximum");
    assert_eq!(minimum(&knobs, friday + 30 * 3_600_000), (1, false));
    let mut fleet = Fleet::new(2);
    fleet.now = friday + 19 * 3_600_000;
    let decision = fleet.second(&knobs, 1, 0);
    assert_eq!((decision.what, decision.reasons), (SizeChange::Add, vec![Reason::Minimum(5, true)]));
}
