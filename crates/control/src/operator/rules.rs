//! Placement rules of a fleet: requests, the steps of an adoption, and an estimate of its effect.
//!
//! The stored set is in force, and the configuration is a request: rules move keys, so a reload alone must not change
//! them. An adoption starts when no move is in progress, moves its groups of keys by ordinary moves, and ends when all
//! have arrived ([`switchyard_policy::topology::Ruled`]). Its steps are repeated periodically, so a router that was
//! killed continues after its restart.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use switchyard_policy::balance::Shift;
use switchyard_policy::together::{COVERAGE, Proposal, TooLarge, propose};
use switchyard_policy::topology::{AdoptionGoal, Node, NodeId, Rule, RuleSet, Ruled, Slot, Topology};
use switchyard_resp::units::counted;
use switchyard_router::{NodeAccess, Router};
use tracing::{info, warn};

use super::{Operator, orders};
use crate::admin::{
    AbortRequest, AdoptionReport, MoveOptionsRequest, OperationError, RuledKeyReport, RulesCheckReport, RulesEstimate,
    RulesOrder, RulesProposal, RulesReport, RulesResult, SteerRequest, TooLargeReport, conflict, invalid,
};
use crate::loads::field;
use crate::metrics::Page;
use crate::moves::RulesChange;
use crate::nodes::NodeConnection;
use crate::nodes::holdings::{SAMPLE, databases, each_key, in_parallel};
use crate::store::{RedbStore, StoreError, load_json, save_json};

/// Store document of the requested adoption.
const REQUEST: &str = "rules-requested";

/// Minimum number of sampled groups before learned rules are adopted without an order.
const GROUPS_MIN: usize = 100;

/// Maximum number of frequently used keys per node in an estimate of the load.
const HOT_KEYS: usize = 256;

/// The requested adoption, and the configured set.
#[derive(Debug)]
pub(super) struct RuleAdoption(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    request: Request,
    configured: Vec<Rule>,
    /// Whether rules are adopted without an order.
    adopts: bool,
    /// The configured rules could not be compared yet; with the setting whether they are adopted without an order.
    not_compared: Option<bool>,
    /// Reason why the adoption waits, or its last error.
    waits_for: Option<String>,
}

/// A request, until the adoption ends.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    /// Set whose adoption has not started.
    next: Option<Vec<Rule>>,
    /// Whether an operator has abandoned the adoption in progress.
    is_abandoned: bool,
    is_paused: bool,
    how: MoveOptionsRequest,
}

impl RuleAdoption {
    pub(super) fn load(store: &RedbStore) -> Result<Self, StoreError> {
        Ok(Self(Mutex::new(Inner { request: load_json(store, REQUEST)?, ..Inner::default() })))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn request(&self) -> Request {
        self.inner().request.clone()
    }

    fn store(&self, store: &RedbStore, request: Request) -> Result<(), OperationError> {
        let mut inner = self.inner();
        if inner.request != request {
            save_json(store, REQUEST, &request)
                .map_err(|error| OperationError::Failed(format!("cannot store the request about rules: {error}")))?;
            inner.request = request;
        }
        Ok(())
    }
}

impl Operator {
    /// Applies the configured rules. `adopts`: request their adoption if they differ from those in force.
    pub fn tune_rules(&self, configured: Vec<Rule>, adopts: bool) {
        let topology = self.moves.topology_now();
        {
            let mut inner = self.rules.inner();
            inner.configured.clone_from(&configured);
            inner.adopts = adopts;
            // A first start may not know the keys of all nodes yet.
            inner.not_compared = topology.is_err().then_some(adopts);
        }
        let Ok(topology) = topology else { return };
        if goal_rules(&topology) == configured || topology.placement().continuum().is_some() {
            return;
        }
        if adopts && configured.is_empty() {
            // Learned rules, or none. `switchyard rules adopt --none` removes them.
            return;
        }
        if !adopts {
            warn!(
                "the rules in the configuration differ from those in force: `switchyard rules adopt --dry-run` shows the effect, `switchyard rules adopt` adopts them"
            );
            return;
        }
        if let Err(refused) = self.request_adoption(configured, MoveOptionsRequest::default()) {
            warn!("the configured rules are not adopted: {}", refused.text());
        }
    }

    /// Reports the rules and the adoption.
    pub(super) fn rules(&self) -> Result<RulesReport, OperationError> {
        let topology = self.moves.topology_now()?;
        let inner = self.rules.inner();
        let (request, configured, waits_for) =
            (inner.request.clone(), inner.configured.clone(), inner.waits_for.clone());
        drop(inner);
        let ruled = topology.ruled();
        let adopting = ruled.and_then(|ruled| ruled.adoption());
        let after = request.next.clone().unwrap_or_else(|| goal_rules(&topology));
        let adoption = match (adopting, request.next) {
            (None, None) => None,
            (None, Some(rules)) => Some(AdoptionReport {
                rules,
                state: if request.is_paused { "paused" } else { "requested" }.to_owned(),
                waits_for,
                ..AdoptionReport::default()
            }),
            (Some((next, goal)), _) => Some(AdoptionReport {
                rules: next.rules().to_vec(),
                state: match (request.is_abandoned || goal == AdoptionGoal::Present, request.is_paused) {
                    (true, _) => "abandoned",
                    (false, true) => "paused",
                    (false, false) => "running",
                }
                .to_owned(),
                groups: topology.slots().filter(|slot| slot.is_passage()).count() as u64,
                groups_left: topology.adoption_moves().len() as u64,
                moves: self.moves.open_moves_of_slots().iter().map(|id| id.0).collect(),
                waits_for,
            }),
        };
        Ok(RulesReport {
            number: ruled.map_or(0, |ruled| ruled.number()),
            rules: ruled.map(|ruled| ruled.rules().rules().to_vec()).unwrap_or_default(),
            configured: Some(configured).filter(|configured| *configured != after),
            adoption,
        })
    }

    /// Reports the effect of a set on keys: the set in adoption, the configured set if it differs from the one in force,
    /// or the set in force.
    pub(super) fn check_rules(&self, keys: &[Vec<u8>]) -> Result<RulesCheckReport, OperationError> {
        let topology = self.moves.topology_now()?;
        let (configured, next) = {
            let inner = self.rules.inner();
            (inner.configured.clone(), inner.request.next.clone())
        };
        let in_force = topology.ruled().map(|ruled| ruled.rules().rules().to_vec()).unwrap_or_default();
        let shown = next.unwrap_or_else(|| if topology.is_adopting() { goal_rules(&topology) } else { configured });
        let is_in_force = shown == in_force;
        let ruled = Ruled::first(RuleSet::new(shown).map_err(|error| invalid(error.to_string()))?);
        let text = |bytes: &[u8]| match std::str::from_utf8(bytes) {
            Ok(text) => text.to_owned(),
            Err(_) => bytes.escape_ascii().to_string(),
        };
        let report = |key: &Vec<u8>| {
            let (slot, pattern, tag) = (ruled.slot_of(key), ruled.matching(key), ruled.tag(key));
            RuledKeyReport {
                key: text(key),
                pattern: pattern.map(|found| found.pattern.to_owned()),
                tag: tag.map(text),
                has_own_tag: tag.is_some() && pattern.is_none(),
                slot: slot.number(),
                owner: self.moves.name(topology.owner(slot)),
            }
        };
        let number = topology.ruled().map_or(0, |ruled| ruled.number()) + u64::from(!is_in_force);
        Ok(RulesCheckReport { number, is_in_force, keys: keys.iter().map(report).collect() })
    }

    /// Proposes rules for the keys that clients use together.
    pub(super) fn learn_rules(&self, named: bool) -> Result<RulesProposal, OperationError> {
        let topology = self.moves.topology_now()?;
        let Proposal { rules, proposed, groups, together_now, together_then, too_large } = self.proposal(&topology);
        let is_enough = together_then as f64 >= COVERAGE * groups as f64;
        let report = |TooLarge { rule, tag, percent }| TooLargeReport { rule, tag, percent };
        // Patterns may be names of keys.
        let (rules, too_large) = if named { (rules, too_large) } else { Default::default() };
        Ok(RulesProposal {
            rules,
            proposed: proposed as u64,
            groups: groups as u64,
            together_now: together_now as u64,
            together_then: together_then as u64,
            is_enough,
            too_large: too_large.into_iter().map(report).collect(),
        })
    }

    fn proposal(&self, topology: &Topology) -> Proposal {
        let (groups, hot) =
            self.running.with(|router| (router.used_together(), router.hot_keys(HOT_KEYS))).unwrap_or_default();
        let keys = hot.iter().flat_map(|node| &node.keys);
        let known: Vec<(&[u8], f64)> = keys.filter_map(|key| Some((key.name.key()?, key.rates.commands()))).collect();
        // The load of all other keys is spread over them.
        let rest = hot.iter().map(|node| node.uses).sum::<f64>() - known.iter().map(|(_, load)| load).sum::<f64>();
        let loads: Vec<(&[u8], f64)> = known.into_iter().chain([(&b""[..], rest.max(0.0))]).collect();
        propose(&goal_rules(topology), &groups, &loads, topology.nodes().len())
    }

    /// Describes the effect of proposed rules on commands that a second node would refuse; empty without a proposal.
    pub(super) fn proposal_text(&self, topology: &Topology) -> String {
        let found = self.proposal(topology);
        if found.proposed == 0 {
            return String::new();
        }
        format!(
            ". Placement rules would keep {} of {} sampled groups of keys together: `switchyard rules learn`",
            found.together_then, found.groups
        )
    }

    /// Performs an order about rules.
    pub(super) fn steer_rules(&self, order: RulesOrder) -> Result<RulesResult, OperationError> {
        let message = |message: String| Ok(RulesResult { message, ..RulesResult::default() });
        match order {
            RulesOrder::Adopt { rules, dry_run, how } => {
                let rules = rules.unwrap_or_else(|| self.rules.inner().configured.clone());
                if dry_run {
                    return self.estimate(rules);
                }
                self.request_adoption(rules, how)?;
                self.follow_rules();
                message(match self.rules()?.adoption {
                    None => "the rules are in force: no key had to move".to_owned(),
                    Some(AdoptionReport { waits_for: Some(why), .. }) => format!("the adoption waits: {why}"),
                    Some(_) => {
                        "keys move to the nodes of their tags: `switchyard rules list` shows the progress".to_owned()
                    }
                })
            }
            RulesOrder::Pause(is_paused) => {
                let _one = self.plan();
                self.require_adoption()?;
                self.rules.store(&self.store, Request { is_paused, ..self.rules.request() })?;
                self.steer_open(if is_paused { &SteerRequest::Pause } else { &SteerRequest::Resume });
                message(if is_paused { "the adoption is paused" } else { "the adoption continues" }.to_owned())
            }
            RulesOrder::Abandon => {
                let _one = self.plan();
                let topology = self.require_adoption()?;
                let request = self.rules.request();
                if !topology.is_adopting() {
                    self.rules.store(&self.store, Request::default())?;
                    return message("the request is withdrawn: the adoption had not started".to_owned());
                }
                self.rules.store(&self.store, Request { is_abandoned: true, is_paused: false, ..request })?;
                self.steer_open(&SteerRequest::Abort(AbortRequest::default()));
                message("the keys that have moved return: `switchyard rules list` shows the progress".to_owned())
            }
        }
    }

    fn require_adoption(&self) -> Result<std::sync::Arc<Topology>, OperationError> {
        let topology = self.moves.topology_now()?;
        if topology.is_adopting() || self.rules.inner().request.next.is_some() {
            return Ok(topology);
        }
        Err(conflict("no adoption of rules is in progress"))
    }

    fn request_adoption(&self, rules: Vec<Rule>, how: MoveOptionsRequest) -> Result<(), OperationError> {
        RuleSet::new(rules.clone()).map_err(|error| invalid(error.to_string()))?;
        self.moves.how(&how)?;
        let _one = self.plan();
        let topology = self.moves.topology_now()?;
        if topology.placement().continuum().is_some() {
            return Err(conflict("the keys of a twemproxy pool are placed by its list of servers, without rules"));
        }
        if topology.is_adopting() {
            return Err(conflict(
                "an adoption of rules is in progress: wait for its end (`switchyard rules list`), or abandon it first (`switchyard rules abandon`)",
            ));
        }
        if goal_rules(&topology) == rules {
            self.rules.store(&self.store, Request::default())?;
            return Ok(());
        }
        self.rules.store(&self.store, Request { next: Some(rules), how, ..Request::default() })
    }

    /// Changes all moves of the adoption. A refused change is reported by the next step.
    fn steer_open(&self, what: &SteerRequest) {
        for id in self.moves.open_moves_of_slots() {
            if let Err(refused) = self.moves.steer(id, what) {
                info!("move {} of the adoption of rules stays as it is: {}", id.0, refused.text());
            }
        }
    }

    /// Requests the adoption of learned rules, if that needs no order and no rules are configured.
    fn adopt_learned(&self) {
        let is_wanted = {
            let inner = self.rules.inner();
            inner.adopts && inner.configured.is_empty() && inner.request.next.is_none()
        };
        let Ok(topology) = self.moves.topology_now() else { return };
        if !is_wanted || topology.is_adopting() || topology.placement().continuum().is_some() {
            return;
        }
        let proposal = self.proposal(&topology);
        if proposal.proposed == 0 || proposal.groups < GROUPS_MIN || !proposal.is_enough() {
            return;
        }
        info!("{} learned placement rules are adopted, for {} groups of keys", proposal.proposed, proposal.groups);
        if let Err(refused) = self.request_adoption(proposal.rules, MoveOptionsRequest::default()) {
            info!("learned placement rules are not adopted now: {}", refused.text());
        }
    }

    /// Performs the next step of an adoption. Called periodically.
    pub(crate) fn follow_rules(&self) {
        let (not_compared, configured) = {
            let inner = self.rules.inner();
            (inner.not_compared, inner.configured.clone())
        };
        if let Some(adopts) = not_compared {
            self.tune_rules(configured, adopts);
        }
        self.adopt_learned();
        let waits_for = match self.step_of_adoption() {
            Ok(waits_for) => waits_for,
            Err(OperationError::Unavailable(_)) => return,
            Err(refused) => Some(refused.text().to_owned()),
        };
        let mut inner = self.rules.inner();
        if inner.waits_for != waits_for {
            if let Some(why) = &waits_for {
                info!("the adoption of rules waits: {why}");
            }
            inner.waits_for = waits_for;
        }
    }

    /// Returns the reason why the adoption cannot continue now, if there is one.
    fn step_of_adoption(&self) -> Result<Option<String>, OperationError> {
        let topology = self.moves.topology_now()?;
        if !topology.is_adopting() && self.rules.inner().request.next.is_none() {
            return Ok(None);
        }
        let _one = self.plan();
        let request = self.rules.request();
        let mut topology = self.moves.topology_now()?;
        if request.is_paused {
            return Ok(None);
        }
        let open = self.moves.open_ids();
        if let Some(rules) = request.next.clone() {
            if let Some(id) = open.first() {
                return Ok(Some(format!("move {} is in progress (`switchyard moves`)", id.0)));
            }
            let rules = RuleSet::new(rules).map_err(|error| invalid(error.to_string()))?;
            if !topology.is_adopting() {
                topology = self.moves.change_rules(RulesChange::Begin(rules))?;
                info!("an adoption of rules has started");
            }
            // After a crash in between, the adoption has started already.
            self.rules.store(&self.store, Request { next: None, ..request.clone() })?;
        }
        let Some((_, goal)) = topology.ruled().and_then(|ruled| ruled.adoption()) else { return Ok(None) };
        if !open.is_empty() {
            return Ok(None);
        }
        if request.is_abandoned && goal == AdoptionGoal::Next {
            topology = self.moves.change_rules(RulesChange::Goal(AdoptionGoal::Present))?;
        }
        let shifts = shifts_of(&topology);
        if !shifts.is_empty() {
            let how = self.moves.how(&request.how)?;
            self.moves.accept(&topology, orders(shifts, how))?;
            return Ok(None);
        }
        let ended = self.moves.change_rules(RulesChange::End)?;
        self.rules.store(&self.store, Request::default())?;
        let number = ended.ruled().map_or(0, |ruled| ruled.number());
        info!("the adoption of rules has ended: set {number} is in force");
        Ok(None)
    }

    /// Adds the metrics of the rules.
    pub(crate) fn add_rules_metrics(&self, page: &mut Page) {
        let Ok(topology) = self.moves.topology_now() else { return };
        let number = topology.ruled().map_or(0, |ruled| ruled.number());
        page.gauge("placement_rules_number", "Number of the placement rules in force; 0 without any", number as f64);
        page.gauge(
            "placement_rules_groups_left",
            "Groups of keys that an adoption of placement rules has not moved yet",
            topology.adoption_moves().len() as f64,
        );
    }

    /// Estimates the effect of a set.
    fn estimate(&self, rules: Vec<Rule>) -> Result<RulesResult, OperationError> {
        let topology = self.moves.topology_now()?;
        let set = RuleSet::new(rules).map_err(|error| invalid(error.to_string()))?;
        topology.with_adoption(set.clone()).map_err(|error| conflict(error.to_string()))?;
        let next = Ruled::first(set);
        let goal = |key: &[u8]| topology.placement_override(key).unwrap_or_else(|| topology.owner(next.slot_of(key)));
        let stopping = || OperationError::Unavailable("the router is stopping".to_owned());
        let access = self.running.with(Router::node_access).ok_or_else(stopping)?;
        let nodes: Vec<(NodeId, NodeAccess)> = access.into_iter().collect();
        let timeout = self.moves.timeout();
        let samples: Vec<NodeSample> = in_parallel(&nodes, |(id, access)| {
            sample(*id, access, timeout, goal).map_err(|why| format!("node {} {why}", access.name))
        })
        .into_iter()
        .collect::<Result<_, String>>()
        .map_err(OperationError::Failed)?;
        let hot = self.running.with(|router| router.hot_keys(HOT_KEYS)).unwrap_or_default();
        let (mut now, mut after): (BTreeMap<NodeId, f64>, BTreeMap<NodeId, f64>) = Default::default();
        for hot in &hot {
            let known: f64 = hot.keys.iter().filter_map(|key| key.name.key().map(|_| key.rates.at_node())).sum();
            *now.entry(hot.node).or_default() += hot.uses;
            for key in &hot.keys {
                let Some(name) = key.name.key() else { continue };
                *after.entry(goal(name)).or_default() += key.rates.at_node();
            }
            // All other keys of the node are assumed to be used alike.
            let rest = (hot.uses - known).max(0.0);
            let sample = samples.iter().find(|sample| sample.node == hot.node).filter(|sample| sample.seen > 0);
            match sample {
                None => *after.entry(hot.node).or_default() += rest,
                Some(sample) => {
                    for (goal, count) in &sample.goals {
                        *after.entry(*goal).or_default() += rest * *count as f64 / sample.seen as f64;
                    }
                }
            }
        }
        let all: f64 = now.values().sum();
        let share = |of: &BTreeMap<NodeId, f64>, node: NodeId| {
            (all > 0.0).then(|| of.get(&node).copied().unwrap_or_default() / all * 100.0)
        };
        let report = |node: &Node| {
            let own = samples.iter().find(|sample| sample.node == node.id);
            let leaving = own.map_or(0, NodeSample::leaving);
            let arriving: u64 = samples.iter().map(|sample| sample.scaled(node.id)).sum();
            RulesEstimate {
                node: node.name.clone(),
                keys: own.map_or(0, |sample| sample.keys),
                leaving,
                leaving_bytes: own.map_or(0, |sample| (leaving as f64 * sample.bytes_per_key) as u64),
                keys_after: arriving,
                load_percent: share(&now, node.id),
                load_percent_after: share(&after, node.id),
            }
        };
        let nodes: Vec<RulesEstimate> = topology.nodes().map(report).collect();
        let leaving: u64 = nodes.iter().map(|node| node.leaving).sum();
        let keys: u64 = nodes.iter().map(|node| node.keys).sum();
        let message = format!("about {leaving} of {} would move to another node", counted(keys, "key"));
        Ok(RulesResult { message, nodes, moves: Vec::new() })
    }
}

/// Rules in force after the adoption in progress, if any.
fn goal_rules(topology: &Topology) -> Vec<Rule> {
    topology.ruled().map(|ruled| ruled.goal_rules().rules().to_vec()).unwrap_or_default()
}

/// Shifts of the passages that are not at their goal.
fn shifts_of(topology: &Topology) -> Vec<Shift> {
    let mut by_way: BTreeMap<(NodeId, NodeId), Vec<Slot>> = BTreeMap::new();
    for (slot, target) in topology.adoption_moves() {
        by_way.entry((topology.owner(slot), target)).or_default().push(slot);
    }
    by_way.into_iter().map(|((source, target), slots)| Shift { source, target, slots }).collect()
}

/// A sample of the keys of a node.
struct NodeSample {
    node: NodeId,
    /// Number of all keys.
    keys: u64,
    bytes_per_key: f64,
    /// Number of keys in the sample.
    seen: u64,
    /// Number of keys in the sample by their future node.
    goals: BTreeMap<NodeId, u64>,
}

impl NodeSample {
    /// Number of all keys that would be at a node.
    fn scaled(&self, goal: NodeId) -> u64 {
        let seen = self.goals.get(&goal).copied().unwrap_or_default();
        if self.seen == 0 { 0 } else { (seen as f64 * self.keys as f64 / self.seen as f64).round() as u64 }
    }

    fn leaving(&self) -> u64 {
        self.goals.keys().filter(|goal| **goal != self.node).map(|goal| self.scaled(*goal)).sum()
    }
}

fn sample(
    node: NodeId,
    access: &NodeAccess,
    timeout: std::time::Duration,
    goal: impl Fn(&[u8]) -> NodeId,
) -> Result<NodeSample, String> {
    let mut connection = NodeConnection::open(access, timeout)?;
    let mut info = |section: &str| {
        connection
            .call(&["INFO", section])
            .map(|answer| answer.text())
            .map_err(|error| format!("does not answer INFO: {error}"))
    };
    let keys: u64 = databases(&info("keyspace")?).map(|(_, keys)| keys).sum();
    let bytes: f64 = field(&info("memory")?, "used_memory_dataset").and_then(|bytes| bytes.parse().ok()).unwrap_or(0.0);
    let (mut seen, mut goals) = (0, BTreeMap::new());
    each_key(&mut connection, Some(SAMPLE), |key| {
        seen += 1;
        *goals.entry(goal(key)).or_default() += 1;
        ControlFlow::Continue(())
    })
    .map_err(|error| format!("{error:#}"))?;
    Ok(NodeSample { node, keys, bytes_per_key: bytes / keys.max(1) as f64, seen, goals })
}
