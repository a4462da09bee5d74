//! Ejects failed servers of a pool and returns them: `auto_eject_hosts` in twemproxy's file.
//!
//! [`switchyard_policy::eject`] decides. This thread collects facts once a second and executes the steps. Their safety
//! depends on their order:
//!
//! - **Ejection.** Misplaced keys of the slots are removed from the stand-ins. Then requests for the slots wait until
//!   no command sent to the lost server can still be answered. Then the slots that must return are recorded, and one
//!   map gives all of them to others.
//! - **Return.** A server that replies waits until no command sent to it earlier can still be executed. Then moves
//!   return its slots, after removing its keys: all of them, or, if the process is unchanged, only keys written
//!   elsewhere in the meantime. So an outdated value is never read.
//!
//! Separate from the planner's thread: a step there may wait for servers, and here every second counts. Separate from
//! the workers: each sees only its own connection.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use switchyard_policy::eject::{Condition, Ejections, Facts, KeepReason, Rule, Step};
use switchyard_policy::topology::{NodeId, Slot, Topology};
use switchyard_resp::units::counted;
use switchyard_router::{Link, Repeating, Router};
use tracing::{error, info, warn};

use crate::admin::NodeReport;
use crate::metrics::Page;
use crate::moves::Moves;
use crate::placement::Placement;
use crate::running::Running;
use crate::store::{RedbStore, load_json, save_json};

/// Store document: slots that must return, by number of the ejected node.
const EJECTED: &str = "ejected";

/// Interval between checks of the nodes.
const PERIOD: Duration = Duration::from_secs(1);

/// Pause after a failed ejection, because requests wait in each attempt.
const RETRY_PAUSE: Duration = Duration::from_secs(5);

/// Additional time, beyond the command timeout, for commands in flight at a lost server to fail.
const EXTRA_TIMEOUT: Duration = Duration::from_secs(2);

/// Ejects nodes of a pool. Without a rule, only returns nodes that are ejected.
#[derive(Debug)]
pub struct Ejector {
    moves: Arc<Moves>,
    running: Arc<Running>,
    placement: Arc<Placement>,
    store: Arc<RedbStore>,
    started: Instant,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    ejections: Ejections,
    /// Whether the pool is configured to eject servers.
    is_on: bool,
    /// Timeout for a node's reply.
    timeout: Duration,
    /// Nodes that the pool's file no longer lists.
    leaving: Vec<String>,
    /// By node: number of ejections since the start, and time of the last one, in seconds since 1970.
    count: BTreeMap<NodeId, (u64, u64)>,
    /// By node: last logged error, and time of the next attempt.
    trouble: BTreeMap<NodeId, (String, Option<Instant>)>,
    /// Ejected nodes for which returning moves have started.
    returning: BTreeSet<NodeId>,
}

/// A rule that never ejects.
const NEVER: Rule = Rule { failure_limit: u32::MAX, retry_ms: 1000 };

impl Ejector {
    /// Opens the ejector of a fleet. Nodes that the store lists as ejected remain so.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub(crate) fn open(
        moves: Arc<Moves>,
        running: Arc<Running>,
        placement: Arc<Placement>,
    ) -> anyhow::Result<Arc<Self>> {
        let store = Arc::clone(placement.store());
        let kept: BTreeMap<u16, Vec<Slot>> = load_json(&*store, EJECTED)?;
        let ejected: BTreeMap<NodeId, Vec<Slot>> =
            kept.into_iter().map(|(node, slots)| (NodeId(node), slots)).collect();
        moves.set_ejected(ejected.clone());
        let inner = Inner {
            ejections: Ejections::new(NEVER, ejected),
            is_on: false,
            timeout: PERIOD,
            leaving: Vec::new(),
            count: BTreeMap::new(),
            trouble: BTreeMap::new(),
            returning: BTreeSet::new(),
        };
        Ok(Arc::new(Self { moves, running, placement, store, started: Instant::now(), inner: Mutex::new(inner) }))
    }

    /// Sets the rule of the pool's file (`None`: no ejections), the timeout for a node's reply, and the nodes that the
    /// file no longer lists.
    pub fn tune(&self, rule: Option<Rule>, timeout: Duration, leaving: Vec<String>) {
        let mut inner = self.inner();
        inner.ejections.tune(rule.unwrap_or(NEVER));
        (inner.is_on, inner.timeout, inner.leaving) = (rule.is_some(), timeout, leaving);
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// Number of an ejected node's slots at other nodes. `None` if it is not ejected.
    pub(crate) fn slots_away(&self, node: NodeId) -> Option<u64> {
        self.inner().ejections.ejected().get(&node).map(|slots| slots.len() as u64)
    }

    /// Adds metrics of ejections, which are 0 if the pool does not eject.
    pub(crate) fn add_metrics(&self, page: &mut Page, nodes: &[NodeReport]) {
        let count = self.inner().count.clone();
        let of = |node: &NodeReport, figure: u64| (vec![("node", node.address.clone())], figure as f64);
        let counted = |node: &NodeReport| count.get(&NodeId(node.id)).copied().unwrap_or_default();
        let ejected = nodes.iter().map(|node| of(node, u64::from(node.ejected.is_some())));
        page.gauges(
            "node_ejected",
            "1 if the node is ejected (auto_eject_hosts), and stand-ins have its slots",
            ejected,
        );
        let times = nodes.iter().map(|node| of(node, counted(node).0));
        page.labelled_counters("node_ejections", "How often the node was ejected", times);
        let at = nodes.iter().map(|node| of(node, counted(node).1));
        page.gauges(
            "node_ejected_at_seconds",
            "When the node was ejected last, in seconds since 1970; 0: not since the start",
            at,
        );
    }

    fn keep(&self, ejected: &BTreeMap<NodeId, Vec<Slot>>) -> Result<(), String> {
        let ejected: BTreeMap<u16, &Vec<Slot>> = ejected.iter().map(|(node, slots)| (node.0, slots)).collect();
        save_json(&*self.store, EJECTED, &ejected).map_err(|error| format!("cannot store that it is ejected: {error}"))
    }

    /// Logs a new error of an ejection or a return.
    fn note_trouble(&self, node: NodeId, why: String, again: Option<Duration>) {
        let mut inner = self.inner();
        let again = again.map(|pause| Instant::now() + pause);
        let known = inner.trouble.insert(node, (why.clone(), again));
        if known.is_none_or(|(known, _)| known != why) {
            warn!("node {}: {why}", self.moves.name(node));
        }
    }

    /// Checks the nodes and executes the due steps.
    fn check_nodes(&self) {
        let Some(topology) = self.placement.topology().filter(|topology| topology.placement().continuum().is_some())
        else {
            return;
        };
        let (is_on, timeout, leaving, ejected) = {
            let inner = self.inner();
            (inner.is_on, inner.timeout, inner.leaving.clone(), inner.ejections.ejected())
        };
        if self.placement.is_provisional() || !is_on && ejected.is_empty() {
            return;
        }
        for (node, _) in
            ejected.iter().filter(|(node, _)| topology.node(**node).is_none_or(|node| leaving.contains(&node.name)))
        {
            if !self.moves.moves_at(*node).0.is_empty() {
                // Slots are moving to it: the moves complete, or end without it.
                if let Err(refused) = self.moves.end_without(*node) {
                    self.note_trouble(
                        *node,
                        format!("it has left the list, and moves to it have not ended: {}", refused.text()),
                        None,
                    );
                }
                continue;
            }
            // Its keys follow the list without it.
            self.end_ejection(*node, "it is no longer in the list of servers: its slots stay where they are");
        }
        let Some(facts) = self.facts(&topology, &ejected, timeout) else { return };
        let steps = {
            let mut inner = self.inner();
            let answers = |node: &NodeId| facts.get(node).is_some_and(|facts| facts.condition == Condition::Answers);
            inner.trouble.retain(|node, _| !answers(node) || ejected.contains_key(node));
            inner.ejections.check(self.now_ms(), &topology, &facts)
        };
        for step in steps {
            match step {
                Step::Keep { node, why } => self.note_trouble(node, kept_text(&why), None),
                Step::GiveUp { node } => {
                    self.running.with(|router| router.note_interrupted_return(node));
                    if let Err(refused) = self.moves.end_without(node) {
                        self.note_trouble(
                            node,
                            format!("it fails, and moves to it have not ended yet: {}", refused.text()),
                            None,
                        );
                    }
                }
                Step::Eject { node, to } => self.eject(node, &to, &topology, timeout),
                Step::Return { node, from } => self.bring_back(node, from),
                Step::Back { node } => self.end_ejection(node, "all of its slots are back, and it is served again"),
            }
        }
    }

    /// Returns facts about the nodes. `None` while the router does not serve.
    fn facts(
        &self,
        topology: &Topology,
        ejected: &BTreeMap<NodeId, Vec<Slot>>,
        timeout: Duration,
    ) -> Option<BTreeMap<NodeId, Facts>> {
        let now = Instant::now();
        let (status, held) = self.running.with(|router| (router.status(), router.held_nodes()))?;
        let of = |node: &switchyard_router::NodeStatus| {
            let (is_ejected, is_held) = (ejected.contains_key(&node.id), held.contains_key(&node.id));
            if is_ejected && is_held {
                // Its keys are given up anyway.
                self.running.with(|router| router.accept_empty(&node.name));
            }
            let condition = match (self.running.health().condition(node.id, timeout, now), &node.link) {
                // A held node has lost its keys, so other servers can serve its slots.
                _ if is_held && !is_ejected => Condition::Fails,
                (Condition::Answers, Link::Up) => Condition::Answers,
                (Condition::Fails, Link::Connecting | Link::Down(_)) => Condition::Fails,
                // A worker that sends no commands to the node does not notice the failure.
                (Condition::Fails, Link::Up)
                    if node.slow_for.is_none() && self.running.health().is_late(node.id, timeout, now) =>
                {
                    Condition::Fails
                }
                _ => Condition::Unknown,
            };
            let is_drained = is_ejected
                && condition == Condition::Answers
                && self.running.with(|router| router.drained_source(topology.epoch(), node.id)).unwrap_or(false);
            let (move_targets, is_moving) = self.moves.moves_at(node.id);
            (node.id, Facts { condition, is_drained, move_targets, is_moving })
        };
        Some(status.nodes.iter().map(of).collect())
    }

    fn eject(&self, node: NodeId, to: &BTreeMap<NodeId, Vec<Slot>>, topology: &Topology, timeout: Duration) {
        if self.inner().trouble.get(&node).is_some_and(|(_, again)| again.is_some_and(|again| Instant::now() < again)) {
            return;
        }
        // Removing keys would use the map that is about to change, and a move would change the map that the removal at
        // the stand-ins uses.
        let Some(_turn) = self.moves.reserve_for_ejection(node, to) else { return };
        let (before, after) = {
            let inner = self.inner();
            (inner.ejections.ejected(), inner.ejections.with(node, to))
        };
        let forget = || {
            if let Err(why) = self.keep(&before) {
                // With its slots unchanged, the next check treats the node as returned.
                error!("node {}: {why}", self.moves.name(node));
            }
        };
        let access = self.running.with(Router::node_access).unwrap_or_default();
        let outcome = self.moves.stand_ins(to, topology, &access).and_then(|stand_ins| {
            let keep = || self.still_fails(node, timeout).and_then(|()| self.keep(&after));
            self.moves.eject(node, to, stand_ins, timeout.saturating_add(EXTRA_TIMEOUT), keep, forget)
        });
        let name = self.moves.name(node);
        if let Err(why) = outcome {
            if !before.contains_key(&node) {
                self.running.with(|router| router.note_slots_returned(node));
            }
            self.moves.set_ejected(before);
            return self.note_trouble(node, format!("it fails, and cannot be ejected now: {why}"), Some(RETRY_PAUSE));
        }
        let slots: usize = to.values().map(Vec::len).sum();
        let others: Vec<String> = to.keys().map(|other| self.moves.name(*other)).collect();
        let ejected = {
            let mut inner = self.inner();
            inner.ejections.note_ejected(node, to, self.now_ms());
            let seconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
            let (times, at) = inner.count.entry(node).or_default();
            (*times, *at) = (*times + 1, seconds);
            inner.trouble.remove(&node);
            inner.ejections.ejected()
        };
        self.moves.set_ejected(ejected);
        warn!(
            "node {name} is ejected: {} went to {}, without the keys that it has",
            counted(slots, "slot"),
            others.join(", ")
        );
    }

    /// Fails if a node has started to reply while its ejection was prepared. A held node may reply, because it has lost
    /// its keys.
    fn still_fails(&self, node: NodeId, timeout: Duration) -> Result<(), String> {
        let is_held = self.running.with(|router| router.held_nodes().contains_key(&node)).unwrap_or(false);
        match self.running.health().condition(node, timeout, Instant::now()) {
            Condition::Answers if !is_held => Err("it answers again".to_owned()),
            _ => Ok(()),
        }
    }

    fn bring_back(&self, node: NodeId, from: BTreeMap<NodeId, Vec<Slot>>) {
        let was_tried = {
            let mut inner = self.inner();
            inner.ejections.note_tried(node, self.now_ms());
            inner.returning.contains(&node)
        };
        if was_tried {
            // Its moves have ended early, or returned some of its slots, so outdated keys can no longer be
            // distinguished.
            self.running.with(|router| router.note_interrupted_return(node));
        }
        match self.moves.bring_back(node, from) {
            Ok(plan) => {
                self.inner().returning.insert(node);
                let ids: Vec<String> =
                    plan.moves.iter().filter_map(|planned| planned.id).map(|id| id.to_string()).collect();
                info!(
                    "node {} answers again: outdated keys are removed there, and its slots move back (moves {})",
                    self.moves.name(node),
                    ids.join(", ")
                );
            }
            Err(refused) => self.note_trouble(
                node,
                format!("it answers, and its slots cannot move back yet: {}", refused.text()),
                None,
            ),
        }
    }

    /// Ends the ejection of a node.
    fn end_ejection(&self, node: NodeId, why: &str) {
        let mut ejected = self.inner().ejections.ejected();
        ejected.remove(&node);
        if let Err(why) = self.keep(&ejected) {
            return self.note_trouble(node, why, None);
        }
        {
            let mut inner = self.inner();
            inner.ejections.note_back(node);
            inner.trouble.remove(&node);
            inner.returning.remove(&node);
        }
        self.running.with(|router| router.note_slots_returned(node));
        self.moves.set_ejected(ejected);
        info!("node {} is no longer ejected: {why}", self.moves.name(node));
    }
}

fn kept_text(why: &KeepReason) -> String {
    match why {
        KeepReason::IsLast => "it fails, and is not ejected: no other server is live".to_owned(),
        KeepReason::OthersMove => {
            "it fails, and is not ejected while the other servers that are live take part in moves (`switchyard moves`)"
                .to_owned()
        }
        KeepReason::HasOverrides(keys) => {
            format!("it fails, and is not ejected: {} moved there without the slots", counted(*keys, "key"))
        }
        KeepReason::Moves => {
            "it fails, and is not ejected while it takes part in a move (`switchyard moves`)".to_owned()
        }
    }
}

/// The running thread. Dropping it ends the thread.
#[derive(Debug)]
pub struct EjectThread {
    _thread: Repeating,
}

impl EjectThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn start(ejector: Arc<Ejector>) -> anyhow::Result<Self> {
        let threads = ejector.running.threads().clone();
        let body = move || {
            if ejector.moves.is_stopping() {
                return ControlFlow::Break(());
            }
            ejector.check_nodes();
            ControlFlow::Continue(())
        };
        let thread = threads.repeat("eject", || PERIOD, body).context("cannot start a thread")?;
        Ok(Self { _thread: thread })
    }
}
