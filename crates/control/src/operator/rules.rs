//! Placement rules of a fleet: requests, the steps of an adoption, and an estimate of its effect.
//!
//! The stored set is in force, and the configuration is a request: rules move keys, so a reload alone must not change
//! them. An adoption starts when no move is in progress, moves its groups of keys by ordinary moves, and ends when all
//! have arrived ([`switchyard_policy::topology::Ruled`]). Its steps are repeated periodically, so a router that was
//! killed continues after its restart.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use switchyard_policy::balance::Shift;
use switchyard_policy::together::{COVERAGE, Proposal, TooLarge, Weighed, propose};
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
use crate::nodes::holdings::{SAMPLE, databases, each_key, in_parallel, sample_sizes};
use crate::store::{RedbStore, StoreError, load_json, save_json};

/// Store document of the requested adoption.
const REQUEST: &str = "rules-requested";

/// Minimum number of sampled groups before learned rules are adopted without an order.
const GROUPS_MIN: usize = 100;

/// Time after which the sizes of keys are sampled again for learned rules.
const SIZES_MAX_AGE: Duration = Duration::from_secs(60);

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
    comparison: Comparison,
    /// Reason why the adoption waits, or its last error.
    waits_for: Option<String>,
    /// A sample of the keys of all nodes with their bytes, and its time.
    sizes: Option<(Instant, Sizes)>,
}

/// By node: keys, each with the bytes of all keys that it stands for.
type Sizes = Arc<[(NodeId, Vec<(Vec<u8>, f64)>)]>;

/// Comparison of the configured rules with those in force, after a start or a reload.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Comparison {
    /// No configuration has been read.
    #[default]
    Unread,
    /// Waits for the map, the end of an adoption, or the permission of automatic actions.
    Pending,
    Done,
}

/// A request, until the adoption ends.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    /// An operator has abandoned an adoption or removed all rules, and has adopted none since. So learned rules need an
    /// order. Stays after the end of an adoption.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    has_declined: bool,
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

    /// Returns no request, after one that has ended.
    fn ended(&self) -> Request {
        Request { has_declined: self.request().has_declined, ..Request::default() }
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
    /// Applies the configured rules. `adopts`: request their adoption if they have changed and differ from those in
    /// force.
    pub fn tune_rules(&self, configured: Vec<Rule>, adopts: bool) {
        {
            let mut inner = self.rules.inner();
            if inner.comparison != Comparison::Unread && inner.configured == configured && inner.adopts == adopts {
                return;
            }
            inner.configured = configured;
            inner.adopts = adopts;
            inner.comparison = Comparison::Pending;
        }
        self.compare_rules();
    }

    fn compare_rules(&self) {
        let (configured, adopts, requested) = {
            let inner = self.rules.inner();
            if inner.comparison != Comparison::Pending {
                return;
            }
            (inner.configured.clone(), inner.adopts, inner.request.next.clone())
        };
        // A first start may not know the keys of all nodes yet.
        let Ok(topology) = self.moves.topology_now() else { return };
        let differs = requested.unwrap_or_else(|| goal_rules(&topology)) != configured
            && topology.placement().continuum().is_none();
        if differs && adopts && !configured.is_empty() && (topology.is_adopting() || self.planner.is_off()) {
            return;
        }
        self.rules.inner().comparison = Comparison::Done;
        match (differs, adopts, configured.is_empty()) {
            (false, ..) => {}
            // Rules that an order or the router has adopted.
            (true, _, true) => info!(
                "rules are in force that the configuration lacks: write them there, because `switchyard recover` knows no others, or remove them by `switchyard rules adopt --none`"
            ),
            (true, false, false) => warn!(
                "the rules in the configuration differ from those in force: `switchyard rules adopt --dry-run` shows the effect, `switchyard rules adopt` adopts them"
            ),
            (true, true, false) => {
                if let Err(refused) = self.request_adoption(configured, MoveOptionsRequest::default()) {
                    warn!("the configured rules are not adopted: {}", refused.text());
                }
            }
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
                state: match (request.is_paused, request.is_abandoned || goal == AdoptionGoal::Present) {
                    (true, _) => "paused",
                    (false, true) => "abandoned",
                    (false, false) => "running",
                }
                .to_owned(),
                groups: topology.passages_that_move() as u64,
                groups_left: topology.adoption_moves().len() as u64,
                moves: self.moves.open_moves_of_slots().iter().map(|id| id.0).collect(),
                waits_for,
            }),
        };
        Ok(RulesReport {
            number: ruled.map_or(0, |ruled| ruled.number()),
            rules: ruled.map(|ruled| ruled.rules().rules().to_vec()).unwrap_or_default(),
            configured: Some(configured).filter(|configured| !configured.is_empty() && *configured != after),
            adoption,
        })
    }

    /// Reports the effect of a set on keys: the set in adoption, the configured set if it differs from the one in force,
    /// or the set in force.
    pub(super) fn check_rules(&self, keys: &[Vec<u8>]) -> Result<RulesCheckReport, OperationError> {
        let topology = self.moves.topology_now()?;
        require_rules_possible(&topology)?;
        let (configured, next) = {
            let inner = self.rules.inner();
            (inner.configured.clone(), inner.request.next.clone())
        };
        let in_force = topology.ruled().map(|ruled| ruled.rules().rules().to_vec()).unwrap_or_default();
        let configured = Some(configured).filter(|rules| !rules.is_empty() && !topology.is_adopting());
        let shown = next.or(configured).unwrap_or_else(|| goal_rules(&topology));
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
        require_rules_possible(&topology)?;
        let (Proposal { rules, proposed, groups, together_now, together_then, too_large }, _) =
            self.proposal(&topology)?;
        let is_enough = together_then as f64 >= COVERAGE * groups as f64;
        let report = |TooLarge { rule, tag, of, percent }| TooLargeReport { rule, tag, of: of.to_string(), percent };
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

    /// Proposes rules for the sampled groups, and whether load and bytes are known and each pattern matches enough of
    /// the sampled keys. Fails if the groups need rules and a node does not reply with sizes of keys.
    fn proposal(&self, topology: &Topology) -> Result<(Proposal, bool), OperationError> {
        let (groups, hot) =
            self.running.with(|router| (router.used_together(), router.hot_keys(HOT_KEYS))).unwrap_or_default();
        let (present, nodes) = (goal_rules(topology), topology.nodes().len());
        let possible = propose(&present, &groups, &[], &[], nodes);
        if possible.proposed == 0 {
            return Ok((possible, false));
        }
        let sizes = self.sizes()?;
        let bytes: Vec<(&[u8], f64)> =
            sizes.iter().flat_map(|(_, keys)| keys).map(|(key, bytes)| (key.as_slice(), *bytes)).collect();
        let mut load: Vec<(&[u8], f64)> = Vec::new();
        for hot in &hot {
            let known = hot.keys.iter().filter_map(|key| Some((key.name.key()?, key.rates.commands())));
            // All other keys of the node are assumed to be used alike.
            let rest = (hot.uses - known.clone().map(|(_, load)| load).sum::<f64>()).max(0.0);
            let others = sizes.iter().filter(|(node, _)| *node == hot.node).flat_map(|(_, keys)| keys);
            let each = rest / others.clone().count().max(1) as f64;
            load.extend(known);
            load.extend(others.map(|(key, _)| (key.as_slice(), each)));
        }
        let found = propose(&present, &groups, &load, &bytes, nodes);
        let is_known = |weighed: &Weighed<'_>| weighed.iter().any(|(_, weight)| *weight > 0.0);
        let new = &found.rules[found.rules.len() - found.proposed..];
        let is_proved = is_known(&load) && is_known(&bytes) && new.iter().all(|rule| groups.has_many_keys_of(rule));
        Ok((found, is_proved))
    }

    /// Returns a recent sample of the sizes of keys.
    fn sizes(&self) -> Result<Sizes, OperationError> {
        if let Some((at, sizes)) = &self.rules.inner().sizes
            && at.elapsed() < SIZES_MAX_AGE
        {
            return Ok(Arc::clone(sizes));
        }
        let sampled = self.of_each_node(|id, access, timeout| {
            let sizes = sample_sizes(&mut NodeConnection::open(access, timeout)?);
            sizes.map(|sizes| (id, sizes)).map_err(|error| format!("{error:#}"))
        })?;
        let sizes = Sizes::from(sampled);
        self.rules.inner().sizes = Some((Instant::now(), Arc::clone(&sizes)));
        Ok(sizes)
    }

    /// Applies a function to all nodes in parallel. Its error begins with a verb.
    fn of_each_node<T: Send>(
        &self,
        ask: impl Fn(NodeId, &NodeAccess, Duration) -> Result<T, String> + Sync,
    ) -> Result<Vec<T>, OperationError> {
        let stopping = || OperationError::Unavailable("the router is stopping".to_owned());
        let access = self.running.with(Router::node_access).ok_or_else(stopping)?;
        let nodes: Vec<(NodeId, NodeAccess)> = access.into_iter().collect();
        let timeout = self.moves.timeout();
        in_parallel(&nodes, |(id, access)| {
            ask(*id, access, timeout).map_err(|why| format!("node {} {why}", access.name))
        })
        .into_iter()
        .collect::<Result<_, String>>()
        .map_err(OperationError::Failed)
    }

    /// Describes the effect of proposed rules on commands that a second node would refuse; empty without a proposal.
    pub(super) fn proposal_text(&self, topology: &Topology) -> String {
        let Some((found, _)) = self.proposal(topology).ok().filter(|(found, _)| found.proposed > 0) else {
            return String::new();
        };
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
                let configured = Some(self.rules.inner().configured.clone()).filter(|rules| !rules.is_empty());
                let rules = rules.or(configured).ok_or_else(|| {
                    conflict(
                        "the configuration has no [[placement.rule]]. Write rules there and reload it (SIGHUP), or use --preset NAME, or --none to remove all rules",
                    )
                })?;
                if dry_run {
                    return self.estimate(rules);
                }
                let has_declined = rules.is_empty();
                self.request_adoption(rules, how)?;
                self.rules.store(&self.store, Request { has_declined, ..self.rules.request() })?;
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
                let topology = self.require_adoption()?;
                self.rules.store(&self.store, Request { is_paused, ..self.rules.request() })?;
                // Before its start, other moves are open.
                if topology.is_adopting() {
                    self.steer_open(if is_paused { &SteerRequest::Pause } else { &SteerRequest::Resume });
                }
                message(if is_paused { "the adoption is paused" } else { "the adoption continues" }.to_owned())
            }
            RulesOrder::Abandon => {
                let _one = self.plan();
                let topology = self.require_adoption()?;
                let request = Request { has_declined: true, ..self.rules.request() };
                if !topology.is_adopting() {
                    self.rules.store(&self.store, Request { has_declined: true, ..Request::default() })?;
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
        require_rules_possible(&topology)?;
        if topology.is_adopting() {
            return Err(conflict(
                "an adoption of rules is in progress: wait for its end (`switchyard rules list`), or abandon it first (`switchyard rules abandon`)",
            ));
        }
        if goal_rules(&topology) == rules {
            return self.rules.store(&self.store, self.rules.ended());
        }
        self.rules.store(&self.store, Request { next: Some(rules), how, ..self.rules.ended() })
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
            let Request { next, has_declined, .. } = &inner.request;
            inner.adopts && inner.configured.is_empty() && next.is_none() && !has_declined && !self.planner.is_off()
        };
        let Ok(topology) = self.moves.topology_now() else { return };
        if !is_wanted || topology.is_adopting() || topology.placement().continuum().is_some() {
            return;
        }
        // `switchyard rules learn` reports an error.
        let Ok((proposal, is_proved)) = self.proposal(&topology) else { return };
        if !is_proved || proposal.proposed == 0 || proposal.groups < GROUPS_MIN || !proposal.is_enough() {
            return;
        }
        info!("{} learned placement rules are adopted, for {} groups of keys", proposal.proposed, proposal.groups);
        if let Err(refused) = self.request_adoption(proposal.rules, MoveOptionsRequest::default()) {
            info!("learned placement rules are not adopted now: {}", refused.text());
        }
    }

    /// Performs the next step of an adoption. Called periodically.
    pub(crate) fn follow_rules(&self) {
        self.compare_rules();
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
        let changes = request.next.is_some() || topology.is_adopting();
        let _pause = (changes && self.moves.open_moves_of_slots().is_empty()).then(|| self.moves.pause_colocations());
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
        self.rules.store(&self.store, self.rules.ended())?;
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
        let samples = self.of_each_node(|id, access, timeout| sample(id, access, timeout, goal))?;
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

/// Fails for the pools of a twemproxy configuration.
fn require_rules_possible(topology: &Topology) -> Result<(), OperationError> {
    if topology.placement().continuum().is_some() {
        return Err(conflict("the keys of a twemproxy pool are placed by its list of servers, without rules"));
    }
    Ok(())
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
    timeout: Duration,
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
