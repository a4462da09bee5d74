//! Ejects failing servers of a twemproxy pool (`auto_eject_hosts`), selects their replacements, and returns them.
//!
//! Ejection suits caches: the data of an ejected server is given up, so keys may be missing. It is separate from moves,
//! which never lose a key. nutcracker rebuilds its continuum from the live servers; here only the slots of the ejected
//! server go elsewhere, so keys of the other servers stay.
//!
//! Pure: the caller provides facts, executes the steps, and reports the outcome.

use std::collections::BTreeMap;

use crate::migration::{Fingerprint, FingerprintSet};
use crate::topology::{NodeId, Slot, Topology};

/// Conditions for ejection and return.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rule {
    /// Consecutive failures that eject a server, at least 1 (`server_failure_limit`).
    pub failure_limit: u32,
    /// Time until an ejected server is tried again, in milliseconds (`server_retry_timeout`).
    pub retry_ms: u64,
}

/// Observed condition of a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Condition {
    /// The node replies.
    Answers,
    /// The node has failed since the last check.
    Fails,
    /// Unknown.
    #[default]
    Unknown,
}

/// Facts about a node.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Facts {
    /// Whether the node replies.
    pub condition: Condition,
    /// No command sent earlier can still be executed. Checked only for ejected nodes.
    pub is_drained: bool,
    /// Targets of the moves in which the node takes part.
    pub move_targets: Vec<NodeId>,
    /// Whether one of these moves is running, or resumes as soon as possible.
    pub is_moving: bool,
}

/// State of a node.
#[derive(Clone, PartialEq, Eq, Debug)]
enum State {
    /// The node has its slots.
    Live {
        /// Consecutive failures.
        failures: u32,
    },
    /// Other nodes have its slots.
    Ejected {
        /// Slots to return, ascending.
        slots: Vec<Slot>,
        /// Time before which no return is tried, in milliseconds.
        until_ms: u64,
        /// Consecutive failures. Counted because the node may have some of its slots again.
        failures: u32,
    },
}

/// Reason why a failing node keeps its slots.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum KeepReason {
    /// No other server is live.
    IsLast,
    /// Every other live server takes part in a move.
    OthersMove,
    /// Number of keys with a placement override to this node.
    HasOverrides(usize),
    /// The node takes part in a move.
    Moves,
}

/// A step for the caller.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// Leave a failing node as it is.
    Keep {
        /// The node.
        node: NodeId,
        /// The reason.
        why: KeepReason,
    },
    /// End the moves of this node without it. All of them return slots to ejected nodes.
    GiveUp {
        /// The node.
        node: NodeId,
    },
    /// Give the node's slots to others.
    Eject {
        /// The node.
        node: NodeId,
        /// Slots by new owner; each list ascending, none empty.
        to: BTreeMap<NodeId, Vec<Slot>>,
    },
    /// Return slots to a node that replies again.
    Return {
        /// The node.
        node: NodeId,
        /// Slots by current owner; each list ascending, none empty.
        from: BTreeMap<NodeId, Vec<Slot>>,
    },
    /// All slots have returned.
    Back {
        /// The node.
        node: NodeId,
    },
}

/// Ejection state of a pool.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ejections {
    rule: Rule,
    nodes: BTreeMap<NodeId, State>,
}

impl Ejections {
    /// Restores the state, with the slots of ejected nodes. A return may be tried immediately.
    #[must_use]
    pub fn new(rule: Rule, ejected: BTreeMap<NodeId, Vec<Slot>>) -> Self {
        let state = |mut slots: Vec<Slot>| {
            slots.sort_unstable();
            State::Ejected { slots, until_ms: 0, failures: 0 }
        };
        Self { rule, nodes: ejected.into_iter().map(|(node, slots)| (node, state(slots))).collect() }
    }

    /// Replaces the rule.
    pub fn tune(&mut self, rule: Rule) {
        self.rule = rule;
    }

    /// Ejected nodes, with the slots to return.
    #[must_use]
    pub fn ejected(&self) -> BTreeMap<NodeId, Vec<Slot>> {
        let slots = |(node, state): (&NodeId, &State)| match state {
            State::Ejected { slots, .. } => Some((*node, slots.clone())),
            State::Live { .. } => None,
        };
        self.nodes.iter().filter_map(slots).collect()
    }

    fn is_ejected(&self, node: NodeId) -> bool {
        matches!(self.nodes.get(&node), Some(State::Ejected { .. }))
    }

    /// Checks all nodes at this time in milliseconds, and returns the steps. Each step must be executed at most once.
    pub fn check(&mut self, now_ms: u64, topology: &Topology, facts: &BTreeMap<NodeId, Facts>) -> Vec<Step> {
        let limit = self.rule.failure_limit.max(1);
        self.nodes.retain(|node, _| topology.node(*node).is_some());
        let mut failing = Vec::new();
        for node in topology.nodes() {
            let state = self.nodes.entry(node.id).or_insert(State::Live { failures: 0 });
            let (State::Live { failures } | State::Ejected { failures, .. }) = state;
            match facts.get(&node.id).map(|facts| facts.condition).unwrap_or_default() {
                Condition::Answers => *failures = 0,
                Condition::Fails => *failures = failures.saturating_add(1),
                Condition::Unknown => {}
            }
            if *failures >= limit {
                failing.push(node.id);
            }
        }
        let mut steps: Vec<Step> =
            failing.iter().filter_map(|node| self.step_against_failing(*node, now_ms, topology, facts)).collect();
        // Excludes failing nodes: the next check sees their slots. Returns only take slots from nodes that reply, so
        // the owners of the failing ones do not change here.
        let others = topology.nodes().filter(|node| !failing.contains(&node.id));
        steps.extend(others.filter_map(|node| self.back(node.id, now_ms, topology, facts)));
        steps
    }

    /// The step for a failing node.
    fn step_against_failing(
        &self,
        node: NodeId,
        now_ms: u64,
        topology: &Topology,
        facts: &BTreeMap<NodeId, Facts>,
    ) -> Option<Step> {
        let targets = facts.get(&node).map(|facts| &facts.move_targets[..]).unwrap_or_default();
        if !targets.is_empty() {
            // Only moves that return slots have an ejected node as target.
            let ours = targets.iter().all(|target| self.is_ejected(*target));
            return Some(if ours { Step::GiveUp { node } } else { Step::Keep { node, why: KeepReason::Moves } });
        }
        if topology.slots_of(node) == 0 {
            return None;
        }
        let overrides = topology.overrides_at(node);
        if overrides > 0 {
            return Some(Step::Keep { node, why: KeepReason::HasOverrides(overrides) });
        }
        let is_idle = |other: NodeId| facts.get(&other).is_some_and(|facts| !facts.is_moving);
        match stand_ins(topology, node, |other| self.is_fit(other, now_ms, facts) && is_idle(other)) {
            Some(to) => Some(Step::Eject { node, to }),
            None if topology.nodes().any(|other| other.id != node && self.is_fit(other.id, now_ms, facts)) => {
                Some(Step::Keep { node, why: KeepReason::OthersMove })
            }
            None => Some(Step::Keep { node, why: KeepReason::IsLast }),
        }
    }

    /// Whether a node may receive slots of another. An ejected node may as soon as it could return.
    fn is_fit(&self, node: NodeId, now_ms: u64, facts: &BTreeMap<NodeId, Facts>) -> bool {
        let Some(facts) = facts.get(&node).filter(|facts| facts.condition == Condition::Answers) else { return false };
        match self.nodes.get(&node) {
            Some(State::Ejected { until_ms, .. }) => facts.is_drained && *until_ms <= now_ms,
            Some(State::Live { .. }) | None => true,
        }
    }

    /// The step for a node whose slots must return.
    fn back(&self, node: NodeId, now_ms: u64, topology: &Topology, facts: &BTreeMap<NodeId, Facts>) -> Option<Step> {
        let Some(State::Ejected { slots, .. }) = self.nodes.get(&node) else { return None };
        if !facts.get(&node).is_some_and(|facts| facts.move_targets.is_empty()) {
            return None;
        }
        let mut from: BTreeMap<NodeId, Vec<Slot>> = BTreeMap::new();
        for slot in slots.iter().filter(|slot| topology.owner(**slot) != node) {
            from.entry(topology.owner(*slot)).or_default().push(*slot);
        }
        if from.is_empty() {
            return Some(Step::Back { node });
        }
        // Slots of an owner that does not reply return later.
        from.retain(|owner, _| facts.get(owner).is_some_and(|facts| facts.condition == Condition::Answers));
        (!from.is_empty() && self.is_fit(node, now_ms, facts)).then_some(Step::Return { node, from })
    }

    /// Returns the slots of all ejected nodes as they will be once `to` is applied. Must be durable before the new
    /// owners are published.
    #[must_use]
    pub fn with(&self, node: NodeId, to: &BTreeMap<NodeId, Vec<Slot>>) -> BTreeMap<NodeId, Vec<Slot>> {
        let mut ejected = self.ejected();
        let is_known = |slot: &Slot| ejected.values().any(|known| known.binary_search(slot).is_ok());
        // A slot that the node had on behalf of another ejected node returns to that one.
        let own: Vec<Slot> = to.values().flatten().copied().filter(|slot| !is_known(slot)).collect();
        let slots = ejected.entry(node).or_default();
        slots.extend(own);
        slots.sort_unstable();
        ejected
    }

    /// Records an ejection at this time in milliseconds.
    pub fn note_ejected(&mut self, node: NodeId, to: &BTreeMap<NodeId, Vec<Slot>>, now_ms: u64) {
        let until_ms = now_ms.saturating_add(self.rule.retry_ms);
        let slots = self.with(node, to).remove(&node).unwrap_or_default();
        self.nodes.insert(node, State::Ejected { slots, until_ms, failures: 0 });
    }

    /// Records an attempt to return a node, successful or not. The next one waits for `retry_ms`.
    pub fn note_tried(&mut self, node: NodeId, now_ms: u64) {
        let retry_ms = self.rule.retry_ms;
        if let Some(State::Ejected { until_ms, .. }) = self.nodes.get_mut(&node) {
            *until_ms = now_ms.saturating_add(retry_ms);
        }
    }

    /// Records that all slots of a node have returned, or that the return is cancelled.
    pub fn note_back(&mut self, node: NodeId) {
        self.nodes.insert(node, State::Live { failures: 0 });
    }
}

/// Whether a key found at a stand-in must be removed before the stand-in receives these slots (ascending): a key of the
/// slots that lives elsewhere. A key with a placement override to the stand-in stays.
#[must_use]
pub fn is_misplaced_at(topology: &Topology, stand_in: NodeId, slots: &[Slot], key: &[u8]) -> bool {
    slots.binary_search(&topology.slot_of(key)).is_ok() && topology.node_of(key) != stand_in
}

/// Maximum fingerprints in the list of an ejection: a million of 16 bytes need up to 40 MB in a hash set.
const WRITTEN_MAX: usize = 1_000_000;

/// Keys written or deleted elsewhere while slots of an ejected node are with others. If the node returns as the same
/// process, its other keys of these slots are current, because no write was sent to it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Elsewhere {
    /// These keys.
    Keys {
        /// `run_id` of the ejected process.
        process: String,
        /// Fingerprints of the keys.
        written: FingerprintSet,
    },
    /// Possibly any key: a command did not name its keys, the list was full, or the data of the node were not in use.
    Any,
}

impl Elsewhere {
    /// Returns an empty list. `process`: the `run_id` of the node whose data clients used; `None`: they used no data of
    /// the node.
    #[must_use]
    pub fn new(process: Option<&str>) -> Self {
        process
            .map_or(Self::Any, |process| Self::Keys { process: process.to_owned(), written: FingerprintSet::default() })
    }

    /// Records a key that a command may change. Must be called before the command is sent.
    pub fn note(&mut self, key: Fingerprint) {
        let Self::Keys { written, .. } = self else { return };
        written.insert(key);
        if written.len() > WRITTEN_MAX {
            self.note_any();
        }
    }

    /// Records that any key may have changed.
    pub fn note_any(&mut self) {
        *self = Self::Any;
    }

    /// Whether the list concerns the data of this process.
    #[must_use]
    pub fn is_of(&self, now: Option<&str>) -> bool {
        matches!(self, Self::Keys { process, .. } if now == Some(process))
    }

    /// Whether the key at the node, now this process, is current. All other keys of the slots must be removed there.
    #[must_use]
    pub fn is_current(&self, now: &str, key: Fingerprint) -> bool {
        matches!(self, Self::Keys { process, written } if process == now && !written.contains(&key))
    }
}

/// Stand-ins of a node, with their slots: each slot goes to the first fit server on the continuum, starting at the
/// slot's own place. `None` if no other server is fit.
fn stand_ins(
    topology: &Topology,
    node: NodeId,
    is_fit: impl Fn(NodeId) -> bool,
) -> Option<BTreeMap<NodeId, Vec<Slot>>> {
    let ring = topology.placement().continuum()?;
    let numbers: BTreeMap<&str, NodeId> = topology.nodes().map(|node| (node.name.as_str(), node.id)).collect();
    let number = |name: &str| numbers.get(name).copied().filter(|other| *other != node && is_fit(*other));
    let by_slot = ring.first_fit(|server| number(&server.name).is_some())?;
    let mut to: BTreeMap<NodeId, Vec<Slot>> = BTreeMap::new();
    for (slot, server) in topology.slots().zip(by_slot).filter(|(slot, _)| topology.owner(*slot) == node) {
        to.entry(number(&server.name)?).or_default().push(slot);
    }
    Some(to)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::topology::{Continuum, Distribution, Scheme, Server};

    const RULE: Rule = Rule { failure_limit: 2, retry_ms: 1000 };

    fn fleet(distribution: Distribution, weights: &[u32]) -> Topology {
        let servers = weights.iter().enumerate().map(|(n, weight)| Server { name: format!("s{n}"), weight: *weight });
        Topology::on_continuum(Arc::new(
            Continuum::new(Scheme { distribution, ..Scheme::default() }, servers).expect("a continuum"),
        ))
    }

    /// Facts of nodes that reply (and are drained) or fail.
    fn facts(topology: &Topology, fails: impl Fn(NodeId) -> bool) -> BTreeMap<NodeId, Facts> {
        let of = |node: NodeId| match fails(node) {
            true => Facts { condition: Condition::Fails, ..Facts::default() },
            false => Facts { condition: Condition::Answers, is_drained: true, ..Facts::default() },
        };
        topology.nodes().map(|node| (node.id, of(node.id))).collect()
    }

    fn handed_over(topology: &Topology, to: &BTreeMap<NodeId, Vec<Slot>>) -> Topology {
        to.iter().fold(topology.clone(), |topology, (node, slots)| topology.handed_over(slots, *node))
    }

    fn owners(topology: &Topology) -> Vec<NodeId> {
        topology.slots().map(|slot| topology.owner(slot)).collect()
    }

    #[test]
    fn slots_go_to_the_next_server_of_the_list() {
        // Points of modula are list entries: one for s0, two for s1, one for s2.
        let topology = fleet(Distribution::Modula, &[1, 2, 1]);
        let mut ejections = Ejections::new(RULE, BTreeMap::new());
        let fails = facts(&topology, |node| node == NodeId(2));
        assert_eq!(ejections.check(0, &topology, &fails), [], "one failure is no reason");
        let [Step::Eject { node, to }] = &ejections.check(0, &topology, &fails)[..] else { panic!("it is ejected") };
        assert_eq!(
            (node, to.keys().collect::<Vec<_>>()),
            (&NodeId(2), vec![&NodeId(0)]),
            "behind the last place comes the first"
        );
        let mut ejections = Ejections::new(RULE, BTreeMap::new());
        let fails = facts(&topology, |node| node == NodeId(0) || node == NodeId(1));
        ejections.check(0, &topology, &fails);
        let steps = ejections.check(0, &topology, &fails);
        let all_to_last = |step: &Step| matches!(step, Step::Eject { to, .. } if to.keys().eq([&NodeId(2)]));
        assert!(steps.len() == 2 && steps.iter().all(all_to_last), "{steps:?}");
    }

    #[test]
    fn failures_in_a_row_count() {
        let topology = fleet(Distribution::Ketama, &[1, 1]);
        let mut ejections = Ejections::new(RULE, BTreeMap::new());
        let look = |ejections: &mut Ejections, fails: bool| {
            ejections.check(0, &topology, &facts(&topology, |node| fails && node == NodeId(0)))
        };
        for _ in 0..3 {
            assert_eq!(look(&mut ejections, true), []);
            assert_eq!(look(&mut ejections, false), []);
        }
        assert_eq!(look(&mut ejections, true), []);
        assert_eq!(ejections.check(0, &topology, &BTreeMap::new()), [], "an unknown condition causes no step");
        assert!(matches!(look(&mut ejections, true)[..], [Step::Eject { node: NodeId(0), .. }]));
    }

    #[test]
    fn a_node_returns_by_moves_when_it_answers_and_is_drained() {
        let before = fleet(Distribution::Ketama, &[1, 1, 1]);
        let mut ejections = Ejections::new(RULE, BTreeMap::new());
        let lost = NodeId(1);
        let fails = facts(&before, |node| node == lost);
        ejections.check(0, &before, &fails);
        let Some(Step::Eject { to, .. }) = ejections.check(0, &before, &fails).pop() else { panic!("it is ejected") };
        let kept = ejections.with(lost, &to);
        let topology = handed_over(&before, &to);
        ejections.note_ejected(lost, &to, 0);
        assert_eq!(ejections.ejected(), kept, "the recorded slots");
        let mut answers = facts(&topology, |_| false);
        assert_eq!(ejections.check(999, &topology, &answers), [], "it is not tried before");
        answers.get_mut(&lost).expect("known").is_drained = false;
        assert_eq!(ejections.check(1000, &topology, &answers), [], "earlier commands may still be executed");
        answers.get_mut(&lost).expect("known").is_drained = true;
        // A restarted router has the same state, and tries immediately.
        let mut again = Ejections::new(RULE, kept);
        let [Step::Return { node, from }] = &again.check(0, &topology, &answers)[..] else { panic!("it returns") };
        assert_eq!((node, from), (&lost, &to));
        // The node fails again during moves: they end without it, and no other step follows.
        let mut moving = facts(&topology, |node| node == lost);
        moving.values_mut().for_each(|facts| facts.move_targets = vec![lost]);
        again.check(0, &topology, &moving);
        assert!(again.check(0, &topology, &moving).contains(&Step::GiveUp { node: lost }));
        let back = from.values().fold(topology, |topology, slots| topology.handed_over(slots, lost));
        assert_eq!(owners(&back), owners(&before));
        assert_eq!(again.check(0, &back, &answers), [Step::Back { node: lost }]);
        again.note_back(lost);
        assert_eq!((again.check(0, &back, &answers), again.ejected()), (vec![], BTreeMap::new()));
    }

    #[test]
    fn a_failed_ejection_does_not_block_the_return_of_others() {
        let home = fleet(Distribution::Ketama, &[1, 1, 1]);
        let (back, lost) = (NodeId(0), NodeId(1));
        let (mut topology, mut ejections) =
            (home.clone(), Ejections::new(Rule { failure_limit: 1, ..RULE }, BTreeMap::new()));
        let Some(Step::Eject { to, .. }) = ejections.check(0, &home, &facts(&home, |node| node == back)).pop() else {
            panic!("it is ejected")
        };
        topology = handed_over(&topology, &to);
        ejections.note_ejected(back, &to, 0);
        // The other ejection is not executed.
        let fails = facts(&topology, |node| node == lost);
        assert!(matches!(ejections.check(999, &topology, &fails)[..], [Step::Eject { node: NodeId(1), .. }]));
        let [Step::Eject { .. }, Step::Return { node, from }] = &ejections.check(1000, &topology, &fails)[..] else {
            panic!("it returns")
        };
        assert!(*node == back && !from.contains_key(&lost), "only from nodes that reply");
    }

    #[test]
    fn moves_and_placement_overrides_prevent_an_ejection() {
        let topology = fleet(Distribution::Ketama, &[1, 1]);
        let node = NodeId(0);
        let mut fails = facts(&topology, |other| other == node);
        let mut ejections = Ejections::new(Rule { failure_limit: 1, ..RULE }, BTreeMap::new());
        fails.get_mut(&node).expect("known").move_targets = vec![NodeId(1)];
        assert_eq!(ejections.check(0, &topology, &fails), [Step::Keep { node, why: KeepReason::Moves }]);
        let key: Arc<[u8]> = (0..)
            .map(|n| format!("k{n}"))
            .find(|key| topology.owner_of(key.as_bytes()) != node)
            .expect("a key")
            .into_bytes()
            .into();
        let with_key = topology.keys_handed_over(&[topology.slot_of(&key)], [&key], node);
        fails.get_mut(&node).expect("known").move_targets = Vec::new();
        assert_eq!(ejections.check(0, &with_key, &fails), [Step::Keep { node, why: KeepReason::HasOverrides(1) }]);
    }

    #[test]
    fn a_returning_process_keeps_keys_not_written_elsewhere() {
        let (old, written) = (Fingerprint(1), Fingerprint(2));
        let mut elsewhere = Elsewhere::new(Some("a"));
        elsewhere.note(written);
        assert!(elsewhere.is_of(Some("a")) && !elsewhere.is_of(Some("b")) && !elsewhere.is_of(None));
        assert!(elsewhere.is_current("a", old) && !elsewhere.is_current("a", written));
        assert!(!elsewhere.is_current("b", old), "another process may have read old data from its disk");
        assert!(!Elsewhere::new(None).is_current("a", old), "its data were not in use");
        let mut flushed = elsewhere.clone();
        flushed.note_any();
        flushed.note(Fingerprint(3));
        assert!(!flushed.is_current("a", old));
        (3..).take(WRITTEN_MAX - 1).for_each(|key| elsewhere.note(Fingerprint(key)));
        assert!(elsewhere.is_current("a", old), "the list is full");
        elsewhere.note(Fingerprint(0));
        assert_eq!(elsewhere, Elsewhere::Any, "more than the list takes");
    }

    #[test]
    fn no_stand_in_takes_part_in_a_move() {
        let topology = fleet(Distribution::Ketama, &[1, 1, 1]);
        let (lost, moving, idle) = (NodeId(0), NodeId(1), NodeId(2));
        let mut fails = facts(&topology, |node| node == lost);
        let mut ejections = Ejections::new(Rule { failure_limit: 1, ..RULE }, BTreeMap::new());
        fails.get_mut(&moving).expect("known").is_moving = true;
        let steps = ejections.check(0, &topology, &fails);
        assert!(matches!(&steps[..], [Step::Eject { to, .. }] if to.keys().eq([&idle])), "{steps:?}");
        fails.get_mut(&idle).expect("known").is_moving = true;
        assert_eq!(ejections.check(0, &topology, &fails), [Step::Keep { node: lost, why: KeepReason::OthersMove }]);
    }

    #[test]
    fn a_key_that_has_moved_to_a_stand_in_alone_is_not_misplaced() {
        let before = fleet(Distribution::Ketama, &[1, 1, 1]);
        let (lost, from, stand_in) = (NodeId(0), NodeId(1), NodeId(2));
        let name = (0..).map(|n| format!("k{n}")).find(|key| before.owner_of(key.as_bytes()) == lost).expect("a key");
        let key: Arc<[u8]> = name.into_bytes().into();
        let slots = [before.slot_of(&key)];
        let alone = before.keys_handed_over(&slots, [&key], from);
        assert!(is_misplaced_at(&alone, stand_in, &slots, &key), "an old copy");
        // Results of a scan page are compared with the current map: this key has arrived since the removal started.
        let moved = alone.keys_handed_over(&slots, [&key], stand_in);
        assert!(!is_misplaced_at(&moved, stand_in, &slots, &key), "its only copy");
        assert!(!is_misplaced_at(&alone, stand_in, &[], &key), "a key of another slot");
    }

    proptest! {
        /// Servers fail and reply in any order. Slots of other nodes never move by an ejection, at least one server
        /// keeps slots, and in the end all slots have returned.
        #[test]
        fn slots_of_other_nodes_stay_and_all_slots_return(
            is_modula: bool,
            weights in prop::collection::vec(1_u32..4, 2..6),
            rounds in prop::collection::vec((any::<u8>(), 0_u64..1500), 1..30),
        ) {
            let home = fleet(if is_modula { Distribution::Modula } else { Distribution::Ketama }, &weights);
            let (mut topology, mut now) = (home.clone(), 0);
            let mut ejections = Ejections::new(RULE, BTreeMap::new());
            let mut look = |ejections: &mut Ejections, topology: &mut Topology, failing: u8, later: u64| {
                now += later;
                let fails = |node: NodeId| failing & (1 << node.0) != 0;
                for step in ejections.check(now, topology, &facts(topology, fails)) {
                    match step {
                        Step::Eject { node, to } => {
                            prop_assert!(fails(node) && to.keys().all(|other| !fails(*other)), "only to servers that answer");
                            // If two fail at once, the first is ejected, and the next check sees the rest.
                            if to.values().flatten().any(|slot| topology.owner(*slot) != node) {
                                continue;
                            }
                            let next = handed_over(topology, &to);
                            for slot in topology.slots() {
                                prop_assert!(topology.owner(slot) == node || topology.owner(slot) == next.owner(slot), "others' slots stay");
                            }
                            prop_assert_eq!(next.slots_of(node), 0);
                            ejections.note_ejected(node, &to, now);
                            *topology = next;
                        }
                        Step::Return { node, from } => {
                            prop_assert!(!fails(node));
                            ejections.note_tried(node, now);
                            *topology = from.values().fold(topology.clone(), |topology, slots| topology.handed_over(slots, node));
                        }
                        Step::Back { node } => ejections.note_back(node),
                        Step::Keep { why, .. } => prop_assert_eq!(why, KeepReason::IsLast),
                        Step::GiveUp { .. } => prop_assert!(false, "there are no moves"),
                    }
                }
                let known: Vec<Slot> = ejections.ejected().into_values().flatten().collect();
                prop_assert_eq!(known.iter().collect::<BTreeSet<_>>().len(), known.len(), "a slot comes back to one node");
                Ok(())
            };
            for (failing, later) in rounds {
                look(&mut ejections, &mut topology, failing, later)?;
            }
            for _ in 0..20 {
                look(&mut ejections, &mut topology, 0, 1000)?;
            }
            prop_assert_eq!(owners(&topology), owners(&home));
            prop_assert_eq!(ejections.ejected(), BTreeMap::new());
        }
    }
}
