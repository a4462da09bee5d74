//! The autoscaler's eyes and hands: nodes join, are drained and leave by the verbs that people have, with the same checks.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{SystemTime, UNIX_EPOCH};

use switchyard_policy::autoscale::{self, Millis, Observed, What, minimum};
use switchyard_policy::topology::{NodeId, Topology};
use switchyard_router::{Link, Router};

use super::Operator;
use crate::admin::{
    AddNodeRequest, AutoscaleChange, AutoscaleEvent, AutoscaleReport, AutoscaleRequest, HowRequest, NodeRequest, Refused, conflict, wrong,
};
use crate::autoscale::{AutoscaleConfig, Hands, POLICIES, Started, Way, reason_text};
use crate::members::FleetFacts;
use crate::metrics::Page;
use crate::planner::Mode;

fn now() -> Millis {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as Millis)
}

impl Operator {
    /// Takes over how many nodes there may be, and how servers are started.
    pub fn tune_autoscaler(&self, config: &AutoscaleConfig) {
        self.autoscaler.tune(config);
    }

    /// Looks at the fleet once more, and takes the next step. True: the one after it can be taken at once.
    pub(crate) fn look_and_scale(&self) -> bool {
        self.moves.topology_now().is_ok_and(|topology| {
            let hands = OfFleet { operator: self, topology: &topology };
            self.autoscaler.step(&hands, now(), &self.moves.site())
        })
    }

    pub(super) fn autoscale(&self) -> Result<AutoscaleReport, Refused> {
        let standing = self.autoscaler.standing();
        let topology = self.moves.topology_now()?;
        let name = |node: NodeId| self.moves.name(node);
        let config = &standing.config;
        let word =
            |known: &[(Mode, &'static str)]| known.iter().find(|(mode, _)| *mode == config.mode).map_or("", |(_, word)| word).to_owned();
        let policy = POLICIES.iter().find(|(policy, _)| *policy == config.knobs.policy).map_or("", |(_, word)| word);
        let provisioner = config.provisioner();
        let rests = match () {
            () if standing.is_paused => Some("somebody has paused it (`switchyard autoscale resume`)".to_owned()),
            () if config.mode != Mode::On => None,
            () if self.is_automation_off() => Some("automation is switched off (`switchyard automation on`)".to_owned()),
            () => match &provisioner {
                Ok(Some(_)) => None,
                Ok(None) => Some("no provisioner is configured (docs/autoscaling.md)".to_owned()),
                Err(why) => Some(why.clone()),
            },
        };
        Ok(AutoscaleReport {
            mode: word(&Mode::ALL),
            policy: policy.to_owned(),
            provisioner: provisioner.ok().flatten().map(|way| Way::name(way).to_owned()),
            rests,
            nodes: topology.nodes().len(),
            wanted: standing.wanted,
            min: minimum(&config.knobs, now()).0,
            max: config.knobs.nodes_max,
            decision: standing.decision.as_ref().map(|decision| match decision.what {
                What::Stay => "stay".to_owned(),
                What::Add => "add".to_owned(),
                What::Remove(node) => format!("remove {}", name(node)),
            }),
            reasons: standing.decision.iter().flat_map(|decision| &decision.reasons).map(|reason| reason_text(reason, &name)).collect(),
            change: standing.change.map(|(number, stage, since, error)| AutoscaleChange { number, stage, since, error }),
            started: standing.started.into_keys().collect(),
            events: standing
                .events
                .into_iter()
                .map(|event| AutoscaleEvent { at: event.at, change: event.change, kind: event.kind, text: event.text })
                .collect(),
        })
    }

    pub(super) fn steer_autoscale(&self, request: &AutoscaleRequest) -> Result<AutoscaleReport, Refused> {
        match (request.verb.as_str(), request.nodes) {
            ("set-nodes", Some(nodes)) => {
                let has = self.moves.topology_now()?.nodes().len();
                self.autoscaler.want(nodes, has, now()).map_err(conflict)?;
            }
            ("set-nodes", None) => return Err(wrong("how many nodes? Give \"nodes\"")),
            ("pause", None) => self.autoscaler.pause(true).map_err(Refused::Failed)?,
            ("resume", None) => self.autoscaler.pause(false).map_err(Refused::Failed)?,
            (other, _) => return Err(wrong(format!("do: {other:?} is none of set-nodes (with nodes), pause, resume"))),
        }
        self.autoscale()
    }

    fn is_automation_off(&self) -> bool {
        self.planner.is_off()
    }

    /// Adds the autoscaler's figures.
    pub(crate) fn add_autoscale_metrics(&self, page: &mut Page) {
        let standing = self.autoscaler.standing();
        let nodes = self.moves.topology_now().map_or(0, |topology| topology.nodes().len());
        page.gauge("autoscale_nodes", "Nodes of the fleet", nodes as f64);
        page.gauge(
            "autoscale_nodes_wanted",
            "Nodes that the autoscaler, or an operator's order, wants",
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

/// The fleet at one look.
struct OfFleet<'a> {
    operator: &'a Operator,
    topology: &'a Topology,
}

impl OfFleet<'_> {
    fn id(&self, name: &str) -> Option<NodeId> {
        self.topology.nodes().find(|node| node.name == name).map(|node| node.id)
    }
}

fn text(refused: Refused) -> String {
    refused.text().to_owned()
}

impl Hands for OfFleet<'_> {
    fn nodes(&self) -> Vec<(NodeId, String)> {
        self.topology.nodes().map(|node| (node.id, node.name.clone())).collect()
    }

    fn addresses(&self) -> BTreeSet<String> {
        let mut all: BTreeSet<String> = self.topology.nodes().map(|node| node.name.clone()).collect();
        let (access, status) = self.operator.running.with(|router| (router.node_access(), router.status())).unzip();
        all.extend(access.into_iter().flatten().filter_map(|(_, node)| node.address).map(|address| address.to_string()));
        let servers = status.into_iter().flat_map(|status| status.nodes).filter_map(|node| node.servers);
        all.extend(servers.flat_map(|servers| servers.primary.into_iter().chain(servers.readable)).map(|address| address.to_string()));
        all
    }

    fn observed(&self, started: &BTreeMap<String, Started>) -> Observed {
        let load = self.operator.observed(self.topology, 0);
        let status = self.operator.running.with(Router::status);
        let is_up = |id: NodeId| status.iter().flat_map(|status| &status.nodes).any(|node| node.id == id && node.link == Link::Up);
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
        Observed { now: now(), nodes: self.topology.nodes().map(node).collect() }
    }

    fn is_automation_off(&self) -> bool {
        self.operator.is_automation_off()
    }

    fn owns(&self, node: &str) -> bool {
        self.id(node).is_some_and(|id| self.topology.slots_of(id) > 0 || self.topology.exceptions_at(id) > 0)
    }

    fn owns_slots(&self, node: &str) -> bool {
        self.id(node).is_some_and(|id| self.topology.slots_of(id) > 0)
    }

    fn is_moving(&self) -> bool {
        !self.operator.moves.open_ids().is_empty()
    }

    fn join(&self, address: &str) -> Result<(), String> {
        let request = AddNodeRequest { address: address.to_owned(), ..AddNodeRequest::default() };
        self.operator.add_node(&request).map_err(text)?;
        // A mark of an earlier node of that name would keep its share from it.
        self.undrain(address);
        Ok(())
    }

    fn in_use(&self, address: &str) -> Option<String> {
        let Operator { list, moves, running, .. } = self.operator;
        let patience = moves.patience();
        FleetFacts::of(running, self.topology, moves.site(), patience)?.in_use(&list.find(address).ok()?, patience)
    }

    fn fill(&self, is_urgent: bool) -> Result<(), String> {
        let goal = is_urgent.then(|| "fast".to_owned());
        let how = self.operator.moves.how(&HowRequest { goal, ..HowRequest::default() }).map_err(text)?;
        let _one = self.operator.plan();
        self.operator.nothing_under_way("a node gets its share").map_err(text)?;
        self.operator.give_share(how).map(drop).map_err(text)
    }

    fn drain(&self, node: &str) -> Result<(), String> {
        self.operator.drain_node(&NodeRequest { address: node.to_owned(), ..NodeRequest::default() }).map(drop).map_err(text)
    }

    fn undrain(&self, node: &str) {
        // A node that was not drained needs nothing undone.
        let _ = self.operator.undrain_node(&NodeRequest { address: node.to_owned(), ..NodeRequest::default() });
    }

    fn leave(&self, node: &str) -> Result<(), String> {
        self.operator.remove_node(&NodeRequest { address: node.to_owned(), ..NodeRequest::default() }).map(drop).map_err(text)
    }
}
