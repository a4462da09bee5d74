//! Reports of the admin API. Scripts rely on the names of the fields, so fields are only ever added.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::moves::{Operation, OperationError};

/// Source of all data that the admin API serves: a [`crate::Fleet`].
///
/// Methods may block, and several requests may call them at once.
pub trait Source: Send + Sync + 'static {
    /// The state of the router.
    fn status(&self) -> StatusReport;

    /// All metrics, in OpenMetrics.
    fn metrics(&self) -> String;

    /// Accepts a node in its present state, for an operator: a node that returned empty is served, and a server that
    /// claims without proof to be the node's primary is followed.
    ///
    /// # Errors
    /// If there is no node of that name, or it has nothing to accept.
    fn accept(&self, node: &str) -> Result<(), OperationError>;

    /// Performs the operation, and returns its result as JSON. The log names `who` as its origin.
    ///
    /// # Errors
    /// If the operation was refused or failed, with the reason.
    fn operate(&self, operation: Operation, who: &str) -> Result<serde_json::Value, OperationError> {
        let _ = (operation, who);
        Err(OperationError::Unavailable("this router has no moves".to_owned()))
    }

    /// Whether traffic should be sent here.
    fn ready(&self) -> Readiness {
        self.status().readiness()
    }
}

/// The state of the router.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StatusReport {
    /// Version of Switchyard.
    pub version: String,
    /// Number of router starts on this state directory, including this one.
    pub incarnation: u64,
    /// Epoch of the topology that all workers have adopted.
    pub epoch: u64,
    /// Seconds since start.
    pub uptime_seconds: f64,
    /// Whether the router is shutting down and finishing commands in flight.
    pub draining: bool,
    /// Clients connected now.
    pub clients: u64,
    /// Commands answered since start.
    pub commands: u64,
    /// The nodes, by number.
    pub nodes: Vec<NodeReport>,
    /// Problems other than unreachable nodes: slots that wait for a node, moves without progress, a full disk.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<Warning>,
    /// Commands that are incompatible with several nodes, and work because there is one node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub limited: Vec<LimitedReport>,
    /// One sentence per automation or observation thread that stopped after an internal error. Every key is served all
    /// the same.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stopped_threads: Vec<String>,
    /// State of the planner and the autoscaler.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub automation: Vec<AutomationState>,
    /// Present while the router waits as a standby, without serving nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standby: Option<StandbyReport>,
}

/// State of a waiting standby.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StandbyReport {
    /// Reason, as a sentence for display.
    pub waits_for: String,
    /// Whether too few nodes are reachable to take over.
    pub is_cut_off: bool,
}

/// Whether a part of automation acts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AutomationState {
    /// `planner` or `autoscaler`.
    pub name: String,
    /// `off`, `observe` or `on`, as in the configuration.
    pub mode: String,
    /// Reason why it does not act although its mode is `on`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rests: Option<String>,
}

/// A command that was served because there is one node, and that would meet a limit with two.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitedReport {
    /// The command's name.
    pub command: String,
    /// The limit, for display.
    pub limit: String,
    /// Number of executions since the start.
    pub count: u64,
}

/// A problem that needs an operator.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Warning {
    /// Id of the affected move. `None` if the state directory is affected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<u64>,
    /// Number of slots with unusable keys.
    pub slots: u64,
    /// Problem and remedy, for display.
    pub what: String,
}

/// State of a node, as this router sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodeReport {
    /// Number of the node.
    pub id: u16,
    /// Address as written in the configuration.
    pub address: String,
    /// Connection state.
    pub link: LinkReport,
    /// `run_id` of the server process, once known. Changes when the server restarts.
    pub run_id: Option<String>,
    /// Product and version, once known: "redis 7.0.15".
    pub version: Option<String>,
    /// Number of slots.
    pub slots: u64,
    /// Whether the node was drained. It gets no slots until an operator undrains it.
    #[serde(default)]
    pub drained: bool,
    /// For a node ejected by `auto_eject_hosts`: number of its slots at other nodes, or at the beginning of its return.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ejected: Option<u64>,
    /// Number of placement overrides at the node.
    #[serde(default)]
    pub overrides: u64,
    /// Commands sent since the start.
    pub requests: u64,
    /// Error replies and failures since the start.
    pub errors: u64,
    /// Commands sent and not yet answered.
    pub in_flight: u64,
    /// Resolved address, if the configured one is a name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resolved: Option<SocketAddr>,
    /// Current primary, once known, if the node has replicas.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub primary: Option<SocketAddr>,
    /// Replicas that may be read now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub replicas: Vec<SocketAddr>,
    /// Present if the node does not reply, whether or not clients send commands to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub silence: Option<Silence>,
    /// Reason why the node refuses writes, beginning with its error code.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refuses_writes: Option<String>,
}

impl NodeReport {
    /// Conditions other than the connection state, for display.
    #[must_use]
    pub fn conditions(&self) -> Vec<String> {
        let silence = self.silence.as_ref().map(Silence::text);
        let refusal = self.refuses_writes.as_ref().map(|why| format!("refuses writes: {why}"));
        let ejected = self
            .ejected
            .map(|slots| format!("ejected (auto_eject_hosts): others serve its {slots} slots until these move back"));
        silence.into_iter().chain(refusal).chain(ejected).collect()
    }
}

/// State of a node that does not reply to the health check, which is sent once a second.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Silence {
    /// The reason is unknown.
    Silent {
        /// Time without a reply, in seconds.
        seconds: f64,
    },
    /// The node executes a slow command that came through the router.
    Busy {
        /// Running time of the command, in seconds.
        seconds: f64,
    },
}

impl Silence {
    fn text(&self) -> String {
        match self {
            Self::Silent { seconds } => format!("silent: it has not answered for {seconds:.0} s"),
            Self::Busy { seconds } => format!("busy: it has executed a slow command for {seconds:.0} s"),
        }
    }
}

/// Whether a node can be reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum LinkReport {
    /// Connected and replying.
    Up,
    /// No worker has a connection yet.
    Connecting,
    /// The last connection attempt failed.
    Down {
        /// Reason of the failure.
        reason: String,
    },
}

/// The nodes of a topology.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodesReport {
    /// Epoch of that topology.
    pub epoch: u64,
    /// The nodes, by number.
    pub nodes: Vec<NodeReport>,
    /// Commands that are incompatible with several nodes, and work because there is one node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub limited: Vec<LimitedReport>,
}

/// Whether this router should receive traffic, and the reasons if not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Readiness {
    /// Whether the router is shutting down.
    pub draining: bool,
    /// Unreachable nodes that own slots.
    pub not_ready: Vec<UnreachableNode>,
    /// Whether some slot owner is reachable, and none remains to be tried for the first time.
    pub serves: bool,
    /// Problems other than unreachable nodes.
    pub warnings: Vec<String>,
    /// Stopped threads, and paused automation. Keys are not affected.
    pub automation: Vec<String>,
    /// Reason why the router waits as a standby.
    pub standby: Option<String>,
}

impl Readiness {
    /// Whether the router should receive traffic. A lost node is lost for every router, and the keys of other nodes
    /// remain usable, so lost nodes count only if no slot can be served.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        !self.draining && self.serves
    }

    /// Whether every key is usable.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.is_ready() && self.not_ready.is_empty() && self.warnings.is_empty()
    }

    /// Number of slots with an unreachable owner.
    #[must_use]
    pub fn slots_unserved(&self) -> u64 {
        self.not_ready.iter().map(|node| node.slots).sum()
    }
}

/// An unreachable node that owns slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreachableNode {
    /// Address as written in the configuration.
    pub address: String,
    /// Number of slots.
    pub slots: u64,
    /// Reason.
    pub reason: String,
}

impl StatusReport {
    /// Returns whether traffic should be sent here, and the slots that cannot be served. Ignores nodes without slots.
    #[must_use]
    pub fn readiness(&self) -> Readiness {
        let not_ready = self
            .nodes
            .iter()
            .filter(|node| node.slots > 0)
            .filter_map(|node| {
                let link = match &node.link {
                    LinkReport::Up => None,
                    LinkReport::Connecting => Some("connecting".to_owned()),
                    LinkReport::Down { reason } => Some(reason.clone()),
                };
                let silence = node
                    .silence
                    .as_ref()
                    .filter(|silence| matches!(silence, Silence::Silent { .. }))
                    .map(Silence::text);
                let reason = match (silence, link) {
                    (Some(silence), Some(link)) => format!("{silence}; {link}"),
                    (silence, link) => silence.or(link)?,
                };
                Some(UnreachableNode { address: node.address.clone(), slots: node.slots, reason })
            })
            .collect();
        let mut owners = self.nodes.iter().filter(|node| node.slots > 0);
        let is_untried = self
            .nodes
            .iter()
            .any(|node| node.slots > 0 && node.link == LinkReport::Connecting && node.run_id.is_none());
        let serves = !is_untried && owners.any(|node| node.link == LinkReport::Up);
        // `not_ready` already names silent nodes.
        let is_named = |node: &NodeReport| node.slots > 0 && matches!(node.silence, Some(Silence::Silent { .. }));
        let conditions = self.nodes.iter().flat_map(|node| {
            let others = node.conditions().into_iter().skip(usize::from(is_named(node)));
            others.map(|condition| format!("node {}: {condition}", node.address))
        });
        let warnings = conditions.chain(self.warnings.iter().map(|warning| warning.what.clone())).collect();
        let standby = self.standby.as_ref().map(|standby| standby.waits_for.clone());
        Readiness {
            draining: self.draining,
            not_ready,
            serves,
            warnings,
            automation: self.automation_warnings(),
            standby,
        }
    }

    /// One sentence for each stopped thread, and for each paused part of automation.
    #[must_use]
    pub fn automation_warnings(&self) -> Vec<String> {
        let rests = |state: &AutomationState| Some(format!("the {} is paused: {}", state.name, state.rests.as_ref()?));
        self.stopped_threads.iter().cloned().chain(self.automation.iter().filter_map(rests)).collect()
    }
}

/// Location of the token that the router generated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenReport {
    /// `None` if the configuration contains the token, or no token could be written.
    pub file: Option<std::path::PathBuf>,
}
