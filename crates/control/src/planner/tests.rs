//! Decisions that are compared, reverted, refused, and restored after a restart.

use switchyard_policy::load::{NodeLoad, ObservedLoad, SlotLoad};
use switchyard_policy::planner::{KeyAt, Knobs, Node, Price, State, StepSubject, Verdict};
use switchyard_policy::telemetry::{HotKey, HotNode, Name, Rates};
use switchyard_policy::topology::Slot;

use super::*;

/// Failures in a row after which the planner pauses, and its first pause.
const FAILURES_MAX: u32 = 3;
const PAUSE: Duration = Duration::from_secs(60);

/// A planner that acts, with a window of 3 s, and the time of its first step.
struct Bench {
    _dir: tempfile::TempDir,
    planner: Planner,
    now: Instant,
}

/// Limits are 900. Node 0 has a key with 400 requests that fits at node 1.
fn problem(loads: [f64; 2], at: u16) -> Problem {
    let node = |(id, load): (u16, f64)| Node {
        id: NodeId(id),
        load,
        lasting: load,
        weight: 1,
        capacity: Some(1000.0),
        memory: None,
        keys: 10,
        state: State::Ready,
    };
    let (slot, at, home) = (Slot::new(7).expect("a slot"), NodeId(at), NodeId(0));
    let key = KeyAt {
        key: b"k"[..].into(),
        slot,
        at,
        home,
        reads: 0.0,
        writes: 400.0,
        copied: 0.0,
        bytes: 100,
        is_cold: false,
        stays: None,
    };
    let knobs = Knobs { least_set: Some(100.0), ..Knobs::default() };
    Problem { nodes: [(0, loads[0]), (1, loads[1])].map(node).to_vec(), slots: Vec::new(), keys: vec![key], knobs }
}

/// Overload at node 0; then, after the key has moved, at node 1.
fn before() -> Problem {
    problem([1100.0, 300.0], 0)
}
fn worse() -> Problem {
    problem([500.0, 1300.0], 1)
}

const SETTLED: Duration = Duration::from_secs(10);

impl Bench {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let planner = Planner::open(Arc::new(RedbStore::open(dir.path()).expect("a store"))).expect("a planner");
        planner.tune(&PlannerConfig { mode: Mode::On, ..PlannerConfig::default() });
        Self { _dir: dir, planner, now: Instant::now() }
    }

    /// Performs a step after everything has settled. All moves have ended.
    fn look(&mut self, problem: &Problem) -> Next {
        self.now += SETTLED;
        self.planner.step(self.now, problem, Previous::default(), |_| false)
    }

    /// Performs a step that must start a decision. Returns the decision.
    fn begins(&mut self, problem: &Problem) -> u64 {
        let Next::Begin(id, plan) = self.look(problem) else { panic!("nothing was started") };
        self.begin(id, &plan, problem);
        id
    }

    fn begin(&mut self, id: u64, plan: &Plan, problem: &Problem) {
        self.planner.begun(self.now, id, fullest_at(problem, &nodes_of(&plan.steps)), vec![MoveId(id)]);
    }

    /// Ends the moves in progress and compares their effect.
    fn compare(&mut self, problem: &Problem) -> Next {
        assert!(matches!(self.look(problem), Next::Rest), "the load settles");
        self.look(problem)
    }

    fn outcome(&self, id: u64) -> String {
        self.planner.decision(id).and_then(|decision| decision.outcome).unwrap_or_default()
    }
}

#[test]
fn decisions_without_effect_are_reverted_once() {
    let mut bench = Bench::new();
    let first = bench.begins(&before());
    let Next::Begin(second, plan) = bench.compare(&worse()) else { panic!("it is taken back") };
    assert_eq!((plan.steps[0].from, plan.steps[0].to), (NodeId(1), NodeId(0)));
    assert!(bench.outcome(first).ends_with("it has failed, and is undone"), "{}", bench.outcome(first));
    bench.begin(second, &plan, &worse());
    // The reverting decision does not help either, but must not be reverted in turn.
    bench.compare(&problem([1300.0, 900.0], 0));
    assert!(bench.outcome(second).starts_with("the fullest of its nodes went"), "{}", bench.outcome(second));
    let takes_back =
        bench.planner.decisions().into_iter().filter(|(_, decision)| Planner::is_revert(&decision.by)).count();
    assert_eq!(takes_back, 1);
}

#[test]
fn plans_of_operators_are_never_reverted() {
    let mut bench = Bench::new();
    let plan = solve(&before(), &Previous::default());
    let id = bench.planner.record_requested("a person", before(), Previous::default(), plan.clone());
    bench.begin(id, &plan, &before());
    // The planner decides for itself, and the key stays for a minute.
    bench.compare(&worse());
    assert!(bench.outcome(id).starts_with("the fullest of its nodes went"), "{}", bench.outcome(id));
    assert!(bench.planner.decisions().iter().all(|(_, decision)| !Planner::is_revert(&decision.by)));
    assert_eq!(bench.planner.inner().stored.failures, 0);
}

#[test]
fn a_key_that_an_operator_has_moved_is_no_longer_the_planners() {
    let mut bench = Bench::new();
    bench.begins(&before());
    let relocated = |bench: &Bench| bench.planner.inner().stored.relocated.clone();
    let at = |node| Relocated(BTreeMap::from([(b"k"[..].into(), node)]));
    bench.planner.keep_relocated(|_| None);
    assert_eq!(relocated(&bench), at(Some(NodeId(1))), "its move may be in flight");
    bench.compare(&problem([700.0, 700.0], 1));
    bench.planner.keep_relocated(|_| Some(NodeId(1)));
    assert_eq!(relocated(&bench), at(Some(NodeId(1))));
    bench.planner.keep_relocated(|_| Some(NodeId(2)));
    assert_eq!(relocated(&bench), Relocated::default(), "an operator has moved it");
}

#[test]
fn keys_recorded_without_a_node_are_restored() {
    let stored: PersistedState =
        serde_json::from_str(r#"{"is_off": false, "relocated": [[107]]}"#).expect("the format of an earlier version");
    let bench = Bench::new();
    stored.restore(&mut bench.planner.inner().cycle, Duration::ZERO);
    bench.planner.keep_relocated(|_| Some(NodeId(2)));
    let relocated = bench.planner.inner().stored.relocated.clone();
    let stored = serde_json::to_string(&relocated).expect("JSON");
    assert_eq!(stored, "[[[107],2]]");
    assert_eq!(serde_json::from_str::<Relocated>(&stored).expect("JSON"), relocated);
}

#[test]
fn nothing_is_reverted_while_the_planner_does_not_act() {
    for stop in [
        (|planner: &Planner| planner.switch(true).expect("is kept")) as fn(&Planner),
        |planner| planner.tune(&PlannerConfig { mode: Mode::Observe, ..PlannerConfig::default() }),
        |planner| planner.tune(&PlannerConfig { mode: Mode::Off, ..PlannerConfig::default() }),
    ] {
        let mut bench = Bench::new();
        let id = bench.begins(&before());
        stop(&bench.planner);
        assert!(!bench.planner.is_idle(), "it still compares");
        assert!(matches!(bench.compare(&worse()), Next::Rest));
        assert!(bench.outcome(id).ends_with("stays: the planner does not act now"), "{}", bench.outcome(id));
    }
}

#[test]
fn failures_in_a_row_lead_to_growing_pauses() {
    let mut bench = Bench::new();
    for _ in 0..FAILURES_MAX {
        assert!(bench.planner.standing(bench.now).rests.is_none());
        bench.begins(&before());
        let Next::Begin(id, plan) = bench.compare(&worse()) else { panic!("it is taken back") };
        bench.begin(id, &plan, &worse());
        bench.compare(&problem([850.0, 300.0], 0));
    }
    let store = Arc::clone(&bench.planner.store);
    let again = Planner::open(store).expect("opens again");
    for (planner, now) in [(&bench.planner, bench.now), (&again, Instant::now())] {
        assert!(planner.standing(now).rests.is_some_and(|why| why.contains("3 decisions in a row have failed")));
    }
    assert_eq!(bench.planner.standing(bench.now).outcomes["failed"], u64::from(FAILURES_MAX));
    assert!(matches!(bench.look(&before()), Next::Rest));
    // The planner retries by itself. The next failure leads to a longer pause, which an operator ends.
    bench.now += PAUSE;
    bench.begins(&before());
    let Next::Begin(id, plan) = bench.compare(&worse()) else { panic!("it is taken back") };
    bench.begin(id, &plan, &worse());
    bench.compare(&problem([850.0, 300.0], 0));
    bench.now += PAUSE;
    assert!(matches!(bench.look(&before()), Next::Rest));
    bench.planner.switch(false).expect("is kept");
    bench.begins(&before());
}

#[test]
fn budgets_cooldowns_and_open_decisions_survive_a_restart() {
    let mut bench = Bench::new();
    let id = bench.begins(&before());
    let again = Planner::open(Arc::clone(&bench.planner.store)).expect("opens again");
    again.tune(&PlannerConfig { mode: Mode::On, keys_per_minute: 1, ..PlannerConfig::default() });
    let now = Instant::now();
    let topology = Topology::even(&["a".into(), "b".into()]).expect("nodes");
    let (left, previous) = again.problem(now, &topology, &ObservedLoad::default(), &FleetContext::default());
    assert_eq!((left.knobs.keys_max, previous.keys), (0, vec![b"k"[..].into()]));
    // The moves are still running, so the planner starts nothing and does not count them as done.
    assert!(matches!(again.step(now, &before(), Previous::default(), |id| id == MoveId(1)), Next::Rest));
    let later = now + Duration::from_secs(60) + SETTLED;
    assert!(again.standing(later).rests.is_some_and(|why| why.contains("decision 1")));
    again.step(later, &problem([700.0, 700.0], 1), Previous::default(), |_| false);
    again.step(later + SETTLED, &problem([700.0, 700.0], 1), Previous::default(), |_| false);
    let outcome = again.decision(id).and_then(|decision| decision.outcome);
    assert_eq!(
        outcome.as_deref(),
        Some(
            "the fullest of its nodes went from 122 to 78 % of its limit, and 400 of 400 requests/s left the relieved nodes"
        )
    );
}

#[test]
fn refusals_pause_their_node_without_a_cooldown() {
    let mut bench = Bench::new();
    let Next::Begin(id, _) = bench.look(&before()) else { panic!("nothing was started") };
    bench.planner.refused(bench.now, id, [NodeId(1)], "it is full");
    assert_eq!(bench.outcome(id), "refused: it is full");
    let topology = Topology::even(&["a".into(), "b".into()]).expect("nodes");
    let (problem, previous) =
        bench.planner.problem(bench.now, &topology, &ObservedLoad::default(), &FleetContext::default());
    assert_eq!(problem.nodes.iter().map(|node| node.state).collect::<Vec<_>>(), [State::Ready, State::Busy]);
    assert!(previous.keys.is_empty() && problem.knobs.keys_max == 600);
}

#[test]
fn returns_of_cold_keys_end_with_their_moves() {
    let mut bench = Bench::new();
    let mut cold = problem([500.0, 500.0], 1);
    (cold.keys[0].is_cold, cold.keys[0].writes) = (true, 1.0);
    let id = bench.begins(&cold);
    let is_open = |_: MoveId| true;
    assert!(matches!(bench.planner.step(bench.now, &before(), Previous::default(), is_open), Next::Rest));
    assert_eq!(bench.outcome(id), "");
    bench.look(&problem([500.0, 500.0], 0));
    assert_eq!(bench.outcome(id), "done");
}

#[test]
fn unreadable_decisions_do_not_prevent_a_start() {
    let bench = Bench::new();
    let plan = solve(&before(), &Previous::default());
    assert_eq!(plan.price, Price { keys: 1, ..plan.price });
    bench.planner.record_requested("a person", before(), Previous::default(), plan.clone());
    bench.planner.record_requested("a person", before(), Previous::default(), plan);
    crate::store::save_json(&*bench.planner.store, "planner-decision-1", &"no decision").expect("is saved");
    let again = Planner::open(Arc::clone(&bench.planner.store)).expect("opens again");
    assert_eq!(again.decisions().iter().map(|(id, _)| *id).collect::<Vec<_>>(), [2]);
}

/// Three nodes with 40 Zipf keys (about 1,000 requests/s per node), whose rates are drawn again each second, between
/// zero and twice the mean. Decisions are carried out at once.
#[test]
fn noise_of_five_minutes_leads_to_two_decisions_at_most() {
    const KEYS: usize = 40;
    let harmonic: f64 = (1..=KEYS).map(|rank| 1.0 / rank as f64).sum();
    for seed in 1..=6_u64 {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as f64 / f64::from(u32::MAX >> 1)
        };
        let mut topology = Topology::even(&["a".into(), "b".into(), "c".into()]).expect("nodes");
        let name = |rank: usize| format!("key:{rank}").into_bytes();
        let mut at: Vec<NodeId> = (1..=KEYS).map(|rank| topology.owner(topology.slot_of(&name(rank)))).collect();
        let bench = Bench::new();
        bench.planner.tune(&PlannerConfig { mode: Mode::On, least: Some(500), ..PlannerConfig::default() });
        let (mut decisions, mut now, mut known) = (0, bench.now, vec![0.0; KEYS]);
        for _ in 0..310 {
            now += Duration::from_secs(1);
            let rates: Vec<f64> = (1..=KEYS).map(|rank| 3000.0 / rank as f64 / harmonic * 2.0 * uniform()).collect();
            // Same weighting as [`Board`].
            known.iter_mut().zip(&rates).for_each(|(known, rate)| *known = (*known + rate) / 2.0);
            let mut load = ObservedLoad::default();
            for id in topology.nodes().map(|node| node.id) {
                let sum: f64 = rates.iter().zip(&at).filter(|(_, at)| **at == id).map(|(rate, _)| rate).sum();
                load.nodes.insert(id, NodeLoad { requests: Some(sum), ..NodeLoad::default() });
            }
            bench.planner.note(now, &topology, &load);
            let (mut problem, previous) = bench.planner.problem(now, &topology, &load, &FleetContext::default());
            let hot = |(rank, (rate, at)): (usize, (&f64, &NodeId))| {
                let slot = topology.slot_of(&name(rank + 1));
                let key = name(rank + 1).into();
                KeyAt {
                    key,
                    slot,
                    at: *at,
                    home: topology.owner(slot),
                    reads: 0.0,
                    writes: *rate,
                    copied: 0.0,
                    bytes: 100,
                    is_cold: false,
                    stays: None,
                }
            };
            problem.keys = known.iter().zip(&at).enumerate().map(hot).collect();
            if let Next::Begin(id, plan) = bench.planner.step(now, &problem, previous, |_| false) {
                decisions += 1;
                let next = topology.epoch() + 1;
                topology = topology.at_epoch(next);
                for step in &plan.steps {
                    if let StepSubject::Key { key, .. } = &step.what {
                        let rank = (1..=KEYS).find(|rank| name(*rank)[..] == **key).expect("a key");
                        at[rank - 1] = step.to;
                    }
                }
                bench.planner.begun(now, id, fullest_at(&problem, &nodes_of(&plan.steps)), vec![MoveId(id)]);
            }
        }
        assert!((1..=2).contains(&decisions), "{decisions} decisions with seed {seed}");
    }
}

/// One key has 3,500 writes per second, and 160,000 others have 2,500 together. The sample contains some of these once.
#[test]
fn slot_loads_sum_to_at_most_the_unexplained_load() {
    let topology = Topology::even(&["a".into(), "b".into(), "c".into()]).expect("nodes");
    let hot = |name: String, writes: f64, seconds: f64| HotKey {
        hash: 0,
        database: 0,
        name: Name::of(name.as_bytes()),
        seconds,
        rates: Rates { writes, ..Rates::default() },
    };
    let node = topology.owner(topology.slot_of(b"hot"));
    let lucky = (0..)
        .map(|number| format!("key:{number}"))
        .filter(|key| topology.owner(topology.slot_of(key.as_bytes())) == node);
    let keys = std::iter::once(hot("hot".to_owned(), 3500.0, 60.0))
        .chain(lucky.take(200).map(|key| hot(key, 16.0, 0.0)))
        .collect();
    let slots = topology.slots().map(|slot| match slot {
        _ if topology.owner(slot) != node => SlotLoad::default(),
        _ if slot == topology.slot_of(b"hot") => {
            SlotLoad { commands: 3500.0, writes: 3500.0, bytes: 0.0, noise: 5600.0 }
        }
        // A quarter of the slots had one sample of 16 in the last ten seconds.
        _ if slot.number() % 4 == 0 => SlotLoad { commands: 3.2, writes: 3.2, bytes: 0.0, noise: 10.0 },
        _ => SlotLoad::default(),
    });
    let mut load = ObservedLoad { slots: slots.collect(), ..ObservedLoad::default() };
    load.keys = vec![HotNode { node, uses: 4333.0, hits: 0.0, one_in: 16, keys }];
    let requests = |node| NodeLoad { requests: Some(node), ..NodeLoad::default() };
    load.nodes =
        topology.nodes().map(|other| (other.id, requests(if other.id == node { 4333.0 } else { 833.0 }))).collect();
    let bench = Bench::new();
    bench.planner.tune(&PlannerConfig { mode: Mode::On, least: Some(500), ..PlannerConfig::default() });
    for second in 0..8 {
        bench.planner.note(bench.now + Duration::from_secs(second), &topology, &load);
    }
    let (problem, previous) =
        bench.planner.problem(bench.now + Duration::from_secs(8), &topology, &load, &FleetContext::default());
    let certain: f64 = problem.keys.iter().map(|key| key.writes).sum();
    assert!(problem.keys.iter().all(|key| key.writes == 0.0 || &*key.key == b"hot"), "one sample is no load");
    let promised: f64 = problem.slots.iter().filter(|slot| slot.at == node).map(|slot| slot.load).sum();
    assert!(certain > 3100.0 && promised <= 4333.0 - certain + 1e-6, "{certain} and {promised}");
    // Without the key its node has less than its share, and with it no node is below its limit.
    let plan = solve(&problem, &Previous { over: vec![node], ..previous });
    assert_eq!((plan.verdict, plan.steps.len()), (Verdict::NoneFound, 0), "{:?}", plan.advice);
}
