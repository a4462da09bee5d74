//! Connects the autoscaler to the fleet: nodes join, drain and leave by the operators' own commands, with the same
//! checks.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;
use std::time::Instant;

use switchyard_policy::autoscale::{self, Observed, SizeChange, minimum};
use switchyard_policy::topology::{NodeId, Topology};
use switchyard_resp::units::{counted, describe_time};
use switchyard_router::{Link, Router};

use super::Operator;
use crate::admin::{
    AddNodeRequest, AutomationState, AutoscaleChange, AutoscaleEvent, AutoscaleReport, AutoscaleRequest,
    MoveOptionsRequest, MoveReport, MoveState, NodeRequest, OperationError, PlanReport, conflict, invalid,
};
use crate::autoscale::{
    AutoscaleConfig, Autoscaling, Evidence, FleetActions, Inspected, OpenMoves, POLICIES, ProvisionerKind,
    StartedServer, is_same, reason_text,
};
use crate::members::FleetFacts;
use crate::metrics::Page;
use crate::nodes::{NodeAddress, parse_endpoint};
use crate::planner::{Mode, OUTCOMES};

impl Operator {
    /// Applies the limits of the node count, and the way servers are started.
    pub fn tune_autoscaler(&self, config: &AutoscaleConfig) {
        self.autoscaler.tune(config);
    }

    /// Stores the names of configured nodes. The autoscaler removes none of them from now on.
    pub fn note_listed(&self, names: &[String]) {
        *self.listed.write().unwrap_or_else(PoisonError::into_inner) = names.iter().cloned().collect();
        names.iter().for_each(|name| self.autoscaler.disown(name, self.autoscaler.now()));
    }

    /// Whether the autoscaler is stopping this server now, so that it cannot join.
    #[must_use]
    pub fn is_stopping(&self, name: &str) -> bool {
        self.autoscaler.is_stopping(name)
    }

    fn listed(&self) -> BTreeSet<String> {
        self.listed.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Adds a node for an operator. The autoscaler neither stops it in the meantime nor removes it later.
    pub(super) fn add_listed(&self, request: &AddNodeRequest) -> Result<PlanReport, OperationError> {
        let name = parse_endpoint(&request.address).map_err(|why| invalid(format!("{:?}: {why}", request.address)))?;
        let joining = self.autoscaler.begin_join(&name).map_err(conflict)?;
        let added = self.add_node(request)?;
        joining.joined(self.autoscaler.now());
        Ok(added)
    }

    /// Observes the fleet and takes the next step. Returns whether another step can follow at once.
    pub(crate) fn scale_step(&self) -> bool {
        self.moves.topology_now().is_ok_and(|topology| {
            let hands = FleetSnapshot { operator: self, topology: &topology };
            self.autoscaler.log_rest(self.autoscaler_is_held(&self.autoscaler.standing()));
            self.autoscaler.step(&hands, self.autoscaler.now(), &self.moves.site())
        })
    }

    pub(super) fn autoscale(&self) -> Result<AutoscaleReport, OperationError> {
        let standing = self.autoscaler.standing();
        let topology = self.moves.topology_now()?;
        let name = |node: NodeId| self.moves.name(node);
        let config = &standing.config;
        let word = |known: &[(Mode, &'static str)]| {
            known.iter().find(|(mode, _)| *mode == config.mode).map_or("", |(_, word)| word).to_owned()
        };
        let policy = POLICIES.iter().find(|(policy, _)| *policy == config.knobs.policy).map_or("", |(_, word)| word);
        let provisioner = config.provisioner();
        let rests = self.autoscaler_rests(&standing);
        Ok(AutoscaleReport {
            mode: word(&Mode::ALL),
            policy: policy.to_owned(),
            provisioner: provisioner.ok().flatten().map(|way| ProvisionerKind::name(way).to_owned()),
            rests,
            nodes: topology.nodes().len(),
            wanted: standing.wanted,
            min: minimum(&config.knobs, self.autoscaler.now().wall).0,
            max: config.knobs.nodes_max,
            decision: standing.decision.as_ref().map(|decision| match decision.what {
                SizeChange::Stay => "stay".to_owned(),
                SizeChange::Add => "add".to_owned(),
                SizeChange::Remove(node) => format!("remove {}", name(node)),
            }),
            reasons: standing
                .decision
                .iter()
                .flat_map(|decision| &decision.reasons)
                .map(|reason| reason_text(reason, &name))
                .collect(),
            change: standing.change.map(|(number, stage, since, error)| AutoscaleChange {
                number,
                stage,
                since,
                error,
            }),
            started: standing.started.into_keys().collect(),
            events: standing
                .events
                .into_iter()
                .map(|event| AutoscaleEvent { at: event.at, change: event.change, kind: event.kind, text: event.text })
                .collect(),
        })
    }

    pub(super) fn steer_autoscale(&self, request: &AutoscaleRequest) -> Result<AutoscaleReport, OperationError> {
        match (request.verb.as_str(), request.nodes) {
            ("set-nodes", Some(nodes)) => {
                let has = self.moves.topology_now()?.nodes().len();
                self.autoscaler.set_target(nodes, has, self.autoscaler.now()).map_err(conflict)?;
            }
            ("set-nodes", None) => return Err(invalid("how many nodes? Give \"nodes\"")),
            ("pause", None) => self.autoscaler.pause(true).map_err(OperationError::Failed)?,
            ("resume", None) => self.autoscaler.pause(false).map_err(OperationError::Failed)?,
            (other, _) => {
                return Err(invalid(format!("do: {other:?} is not one of set-nodes (with nodes), pause, resume")));
            }
        }
        self.autoscale()
    }

    /// Reason why the autoscaler does not act until an operator changes something.
    fn autoscaler_is_held(&self, standing: &Autoscaling) -> Option<String> {
        match standing.config.provisioner() {
            _ if standing.is_paused => Some("an operator has paused it (`switchyard autoscale resume`)".to_owned()),
            _ if standing.config.mode != Mode::On => None,
            _ if self.is_automation_off() => Some("automation is switched off (`switchyard automation on`)".to_owned()),
            Ok(Some(_)) => None,
            Ok(None) => Some("no provisioner is configured (docs/autoscaling.md)".to_owned()),
            Err(why) => Some(why),
        }
    }

    /// Reason of [`Self::autoscaler_is_held`], or the pause after a failure.
    fn autoscaler_rests(&self, standing: &Autoscaling) -> Option<String> {
        let pause = |left| {
            format!(
                "its last change has failed, and it starts none for {} (`switchyard autoscale`)",
                describe_time(left)
            )
        };
        self.autoscaler_is_held(standing).or_else(|| standing.pause.map(pause))
    }

    /// State of the planner and the autoscaler.
    pub(crate) fn automation_states(&self) -> Vec<AutomationState> {
        let word =
            |mode: Mode| Mode::ALL.iter().find(|(known, _)| *known == mode).map_or("", |(_, word)| word).to_owned();
        let (planner, autoscaler) = (self.planner.standing(Instant::now()), self.autoscaler.standing());
        let rests = self.autoscaler_rests(&autoscaler).filter(|_| autoscaler.config.mode == Mode::On);
        [
            ("planner", planner.mode, planner.rests.filter(|_| planner.mode == Mode::On)),
            ("autoscaler", autoscaler.config.mode, rests),
        ]
        .map(|(name, mode, rests)| AutomationState { name: name.to_owned(), mode: word(mode), rests })
        .into()
    }

    fn is_automation_off(&self) -> bool {
        self.planner.is_off()
    }

    /// Adds metrics of the planner and the autoscaler.
    pub(crate) fn add_automation_metrics(&self, page: &mut Page) {
        let states = self.automation_states();
        let label = |state: &AutomationState| ("automation", state.name.clone());
        let modes = states.iter().flat_map(|state| {
            Mode::ALL.map(|(_, mode)| {
                (vec![label(state), ("mode", mode.to_owned())], f64::from(u8::from(mode == state.mode)))
            })
        });
        page.gauges(
            "automation_mode",
            "1 for the mode of planner and autoscaler in the configuration, 0 for the other modes",
            modes,
        );
        let rests = states.iter().map(|state| (vec![label(state)], f64::from(u8::from(state.rests.is_some()))));
        page.gauges("automation_rests", "1 while planner or autoscaler does not act although its mode is on", rests);
        let planner = self.planner.standing(Instant::now());
        page.gauge(
            "planner_nodes_over_limit",
            "Nodes over their limit at the planner's latest measurement",
            planner.over.len() as f64,
        );
        let outcomes = OUTCOMES
            .iter()
            .map(|outcome| (*outcome, planner.outcomes.get(outcome).copied().unwrap_or_default() as f64));
        page.counters("planner_decisions", "Decisions of the planner that have ended, by outcome", "outcome", outcomes);
        let standing = self.autoscaler.standing();
        let nodes = self.moves.topology_now().map_or(0, |topology| topology.nodes().len());
        page.gauge("autoscale_nodes", "Nodes of the fleet", nodes as f64);
        page.gauge(
            "autoscale_nodes_wanted",
            "Target number of nodes, from the autoscaler or an operator",
            standing.wanted.unwrap_or(nodes) as f64,
        );
        page.gauge(
            "autoscale_change_under_way",
            "1 while a node is being added or removed",
            f64::from(u8::from(standing.change.is_some())),
        );
        page.counter("autoscale_changes_done", "Nodes added or removed by the autoscaler", standing.done as f64);
        page.counter("autoscale_changes_failed", "Changes that the autoscaler has given up", standing.failed as f64);
    }
}

/// The fleet at the time of one step.
struct FleetSnapshot<'a> {
    operator: &'a Operator,
    topology: &'a Topology,
}

impl FleetSnapshot<'_> {
    fn facts(&self) -> Option<FleetFacts> {
        let Operator { moves, running, .. } = self.operator;
        FleetFacts::of(running, self.topology, moves.site(), moves.timeout())
    }

    /// Names and addresses of all nodes, and the addresses of their servers.
    fn addresses_of(&self, topology: &Topology) -> BTreeSet<String> {
        let mut all: BTreeSet<String> = topology.nodes().map(|node| node.name.clone()).collect();
        // The router may still have connections to a node that has left.
        let is_node = |id: NodeId| topology.node(id).is_some();
        let (access, status) = self.operator.running.with(|router| (router.node_access(), router.status())).unzip();
        let access = access.into_iter().flatten().filter(|(id, _)| is_node(*id));
        all.extend(access.filter_map(|(_, node)| node.address).map(|address| address.to_string()));
        let servers = status
            .into_iter()
            .flat_map(|status| status.nodes)
            .filter(|node| is_node(node.id))
            .filter_map(|node| node.servers);
        all.extend(
            servers
                .flat_map(|servers| servers.primary.into_iter().chain(servers.readable))
                .map(|address| address.to_string()),
        );
        all
    }

    fn id(&self, name: &str) -> Option<NodeId> {
        self.topology.nodes().find(|node| node.name == name).map(|node| node.id)
    }
}

fn ids(begun: &PlanReport) -> Vec<u64> {
    begun.moves.iter().filter_map(|planned| planned.id).collect()
}

fn text(refused: OperationError) -> String {
    refused.text().to_owned()
}

impl Evidence for FleetSnapshot<'_> {
    fn claim(&self, address: &str) -> Option<String> {
        // The topology of this step may be older than a join that has ended since.
        let is_known = |known: &String| is_same(known, address);
        let Ok(topology) = self.operator.moves.topology_now() else {
            return Some("the nodes are not known now".to_owned());
        };
        let member =
            self.addresses_of(&topology).iter().any(is_known).then(|| "it is a node, or a server of one".to_owned());
        member.or_else(|| self.operator.listed().iter().any(is_known).then(|| "the configuration lists it".to_owned()))
    }

    fn inspect(&self, address: &str) -> Result<Inspected, String> {
        let Operator { list, moves, .. } = self.operator;
        let facts = self.facts().ok_or("cannot be judged: the router is stopping")?;
        facts.inspect(&list.find(address)?, moves.timeout())
    }
}

impl FleetActions for FleetSnapshot<'_> {
    fn nodes(&self) -> Vec<(NodeId, String)> {
        self.topology.nodes().map(|node| (node.id, node.name.clone())).collect()
    }

    fn addresses(&self) -> BTreeSet<String> {
        self.addresses_of(self.topology)
    }

    fn observed(&self, started: &BTreeMap<String, StartedServer>) -> Observed {
        let load = self.operator.observed(self.topology, 0);
        let status = self.operator.running.with(Router::status);
        let is_up = |id: NodeId| {
            status.iter().flat_map(|status| &status.nodes).any(|node| node.id == id && node.link == Link::Up)
        };
        let node = |node: &switchyard_policy::topology::Node| {
            let load = load.nodes.get(&node.id).copied().unwrap_or_default();
            autoscale::Node {
                id: node.id,
                requests: load.requests,
                mean_us: load.answers.map(|answers| answers.mean_us),
                cpu: load.cpu,
                memory: load.memory.map(|used| (used, load.memory_max.unwrap_or(0))),
                is_up: is_up(node.id),
                may_go: started.contains_key(&node.name),
            }
        };
        Observed { now: self.operator.autoscaler.now(), nodes: self.topology.nodes().map(node).collect() }
    }

    fn run_ids(&self) -> BTreeMap<String, String> {
        let status = self.operator.running.with(Router::status);
        let up = status.into_iter().flat_map(|status| status.nodes).filter(|node| node.link == Link::Up);
        up.filter_map(|node| Some((node.name, node.run_id?))).collect()
    }

    fn is_automation_off(&self) -> bool {
        self.operator.is_automation_off()
    }

    fn owns(&self, node: &str) -> bool {
        self.id(node).is_some_and(|id| self.topology.slots_of(id) > 0 || self.topology.overrides_at(id) > 0)
    }

    fn owns_slots(&self, node: &str) -> bool {
        self.id(node).is_some_and(|id| self.topology.slots_of(id) > 0)
    }

    fn open_moves(&self, own: &[u64]) -> Option<OpenMoves> {
        let open = self.operator.moves.report().moves;
        let first = open.first()?;
        let paused = |open: &&MoveReport| open.state == MoveState::Paused;
        let (own, others): (Vec<&MoveReport>, Vec<&MoveReport>) = open.iter().partition(|open| own.contains(&open.id));
        let paused =
            own.iter().copied().find(paused).or_else(|| others.iter().copied().filter(|_| own.is_empty()).find(paused));
        Some(match paused {
            Some(MoveReport { id, .. }) => {
                OpenMoves::Other(format!("move {id} is paused (`switchyard moves resume {id}`)"))
            }
            None if own.is_empty() => {
                let MoveReport { id, from, to, .. } = first;
                OpenMoves::Other(format!("move {id} from {from} to {to} has not ended (`switchyard moves`)"))
            }
            None => OpenMoves::Own,
        })
    }

    fn missing_share(&self, node: &str, moves: &[u64]) -> Option<String> {
        let ended = self.operator.moves.report().ended;
        let outcome = |id: &u64| ended.iter().find(|ended| ended.id == *id);
        let cut = moves.iter().filter_map(outcome).find(|ended| ended.state != MoveState::Done).map(|ended| {
            let MoveReport { id, slots, slots_done, activity, .. } = ended;
            format!("move {id} has ended with {slots_done} of {} ({activity})", counted(*slots, "slot"))
        });
        // After a restart the result of a move may be unknown, so compare the share itself.
        if cut.is_some() || (!moves.is_empty() && moves.iter().all(|id| outcome(id).is_some())) {
            return cut;
        }
        let how = self.operator.moves.how(&MoveOptionsRequest::default());
        let rest = match how.and_then(|how| self.operator.share(self.topology, how, true)) {
            Ok(rest) => rest,
            Err(why) => return Some(format!("its share cannot be computed: {}", why.text())),
        };
        let slots: u64 = rest.moves.iter().filter(|planned| planned.to == node).map(|planned| planned.slots).sum();
        (slots > 0).then(|| format!("{} are with other nodes", counted(slots, "slot")))
    }

    fn place(&self, address: &str) -> Result<NodeAddress, String> {
        self.operator.list.find(address)
    }

    fn join(&self, address: &str) -> Result<(), String> {
        let request = AddNodeRequest { address: address.to_owned(), ..AddNodeRequest::default() };
        self.operator.add_node(&request).map_err(text)?;
        // A drained state of an earlier node with that name would keep its share from it.
        self.undrain(address);
        Ok(())
    }

    fn in_use(&self, address: &str) -> Option<String> {
        let Operator { list, moves, .. } = self.operator;
        self.facts()?.in_use(&list.find(address).ok()?, moves.timeout())
    }

    fn fill(&self, is_urgent: bool) -> Result<Vec<u64>, String> {
        let goal = is_urgent.then(|| "fast".to_owned());
        let how =
            self.operator.moves.how(&MoveOptionsRequest { goal, ..MoveOptionsRequest::default() }).map_err(text)?;
        let _one = self.operator.plan();
        let _pause = self.operator.check_no_open_moves("a node gets its share").map_err(text)?;
        self.operator.start_share_moves(how).map(|plan| ids(&plan)).map_err(text)
    }

    fn drain(&self, node: &str) -> Result<Vec<u64>, String> {
        let request = NodeRequest { address: node.to_owned(), ..NodeRequest::default() };
        self.operator.drain_node(&request).map(|plan| ids(&plan)).map_err(text)
    }

    fn undrain(&self, node: &str) {
        // Fails for a node that was not drained, which needs no change.
        let _ = self.operator.undrain_node(&NodeRequest { address: node.to_owned(), ..NodeRequest::default() });
    }

    fn leave(&self, node: &str) -> Result<(), String> {
        self.operator
            .remove_node(&NodeRequest { address: node.to_owned(), ..NodeRequest::default() })
            .map(drop)
            .map_err(text)
    }
}
