//! What the admin API says, as data. The names of the fields are the API: scripts rely on them, so they are only ever
//! added to.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::moves::{Operation, Refused};

/// Where the admin API gets what it serves: a [`crate::Fleet`].
///
/// It is called on threads where blocking is allowed, and by several requests at once.
pub trait Source: Send + Sync + 'static {
    /// The state of the router.
    fn status(&self) -> StatusReport;

    /// All metrics, in OpenMetrics.
    fn metrics(&self) -> String;

    /// An operator accepts a node as it is: one that came back empty is served, and a server that claims without proof
    /// to be its primary is followed.
    ///
    /// # Errors
    /// If there is no node of that name, or nothing of it waits to be accepted.
    fn accept(&self, node: &str) -> Result<(), Refused>;

    /// Does what is asked, and says what came of it as JSON. `who` asked, for the log.
    ///
    /// # Errors
    /// If it was not done, with the reason.
    fn operate(&self, operation: Operation, who: &str) -> Result<serde_json::Value, Refused> {
        let _ = (operation, who);
        Err(Refused::Unavailable("this router has no moves".to_owned()))
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
    /// How often a router was started on this state directory, this time included.
    pub incarnation: u64,
    /// Epoch of the topology that every worker has adopted.
    pub epoch: u64,
    /// Seconds since start.
    pub uptime_seconds: f64,
    /// Whether it was told to stop and is finishing what is in flight.
    pub draining: bool,
    /// Clients connected now.
    pub clients: u64,
    /// Commands answered since start.
    pub commands: u64,
    /// The nodes, by number.
    pub nodes: Vec<NodeReport>,
    /// What is wrong beside the nodes: slots that wait for one, moves that come no further, a disk that is full.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub troubles: Vec<Trouble>,
    /// Commands served because there is one node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub limited: Vec<LimitedReport>,
    /// A sentence for each thread of automation or observation that has stopped after an internal error. Every key is
    /// served all the same.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stopped_threads: Vec<String>,
    /// The planner and the autoscaler.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub automation: Vec<AutomationState>,
    /// The router waits as a standby, and serves no nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standby: Option<StandbyReport>,
}

/// A standby that waits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StandbyReport {
    /// Reason, as a sentence for display.
    pub waits_for: String,
    /// Whether too few nodes can be reached to take over.
    pub is_cut_off: bool,
}

/// Whether a part of automation acts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AutomationState {
    /// `planner` or `autoscaler`.
    pub name: String,
    /// `off`, `observe` or `on`, as in the configuration.
    pub mode: String,
    /// The reason why it does not act although its mode is `on`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rests: Option<String>,
}

/// Commands that were served because there is one node, and that would meet a limit if there were two.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitedReport {
    /// The command's name.
    pub command: String,
    /// The limit, for people.
    pub limit: String,
    /// The number of times since the router has started.
    pub count: u64,
}

/// Something that somebody should look at.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trouble {
    /// The number of the move that it is about; `None`: it is about the state directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<u64>,
    /// Slots of which keys cannot be used because of it.
    pub slots: u64,
    /// What is wrong and what to do, for people.
    pub what: String,
}

/// The state of a node, as this router sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodeReport {
    /// Its number.
    pub id: u16,
    /// Its address as the user wrote it.
    pub address: String,
    /// Whether it can be talked to.
    pub link: LinkReport,
    /// `run_id` of the server process, once known: another one means that it restarted.
    pub run_id: Option<String>,
    /// What it is, once known: "redis 7.0.15".
    pub version: Option<String>,
    /// How many slots it owns.
    pub slots: u64,
    /// It was drained, and gets no slots until somebody says so.
    #[serde(default)]
    pub drained: bool,
    /// It is ejected (`auto_eject_hosts`): so many of its slots are with others, or were when it began to return.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ejected: Option<u64>,
    /// How many keys live at it although it does not own their slots.
    #[serde(default)]
    pub exceptions: u64,
    /// Commands sent to it since start.
    pub requests: u64,
    /// Error replies and failures since start.
    pub errors: u64,
    /// Commands sent and not yet answered.
    pub in_flight: u64,
    /// The address that its name leads to, where the name is no address itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resolved: Option<SocketAddr>,
    /// Its primary now, for a node that has replicas, once known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub primary: Option<SocketAddr>,
    /// Its replicas that are fit to be read now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub replicas: Vec<SocketAddr>,
    /// It does not answer, with or without clients that ask it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub silence: Option<Silence>,
    /// Why it refuses writes, where it does: the code of its error first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refuses_writes: Option<String>,
}

impl NodeReport {
    /// Conditions beside its link, for people.
    #[must_use]
    pub fn conditions(&self) -> Vec<String> {
        let silence = self.silence.as_ref().map(Silence::text);
        let refusal = self.refuses_writes.as_ref().map(|why| format!("refuses writes: {why}"));
        let ejected = self
            .ejected
            .map(|slots| format!("ejected (auto_eject_hosts): others serve its {slots} slots until they are back"));
        silence.into_iter().chain(refusal).chain(ejected).collect()
    }
}

/// That a node does not answer what it is asked once a second.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Silence {
    /// Nobody knows why.
    Silent {
        /// For so long.
        seconds: f64,
    },
    /// It executes a slow command that came through the router.
    Busy {
        /// For so long.
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

/// Whether a node can be talked to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum LinkReport {
    /// Connected and answering.
    Up,
    /// No worker has a connection yet.
    Connecting,
    /// The last attempt failed.
    Down {
        /// Why.
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
    /// Commands served because there is one node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub limited: Vec<LimitedReport>,
}

/// Whether traffic should be sent to this router, and if not, why.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Readiness {
    /// It was told to stop.
    pub draining: bool,
    /// The nodes that own slots and cannot be talked to.
    pub not_ready: Vec<NotReady>,
    /// Some slot's owner can be talked to, and no owner is still to be tried for the first time.
    pub serves: bool,
    /// What is wrong beside them.
    pub troubles: Vec<String>,
    /// Threads that have stopped, and automation that rests. No key is concerned.
    pub automation: Vec<String>,
    /// The reason why the router waits as a standby.
    pub standby: Option<String>,
}

impl Readiness {
    /// Whether traffic is better sent here than nowhere. A node that is lost is lost for every router, and the other
    /// nodes' keys can be used: so it counts only where no slot is left that could be served.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        !self.draining && self.serves
    }

    /// Whether every key can be used.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.is_ready() && self.not_ready.is_empty() && self.troubles.is_empty()
    }

    /// Slots whose owner cannot be talked to.
    #[must_use]
    pub fn slots_unserved(&self) -> u64 {
        self.not_ready.iter().map(|node| node.slots).sum()
    }
}

/// A node that owns slots and cannot be talked to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotReady {
    /// Its address as the user wrote it.
    pub address: String,
    /// How many slots it owns.
    pub slots: u64,
    /// Why not.
    pub reason: String,
}

impl StatusReport {
    /// Whether traffic should be sent here, and what cannot be served. Nodes without slots do not matter.
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
                Some(NotReady { address: node.address.clone(), slots: node.slots, reason })
            })
            .collect();
        let mut owners = self.nodes.iter().filter(|node| node.slots > 0);
        let is_untried = self
            .nodes
            .iter()
            .any(|node| node.slots > 0 && node.link == LinkReport::Connecting && node.run_id.is_none());
        let serves = !is_untried && owners.any(|node| node.link == LinkReport::Up);
        // One that is silent has been named.
        let is_named = |node: &NodeReport| node.slots > 0 && matches!(node.silence, Some(Silence::Silent { .. }));
        let conditions = self.nodes.iter().flat_map(|node| {
            let others = node.conditions().into_iter().skip(usize::from(is_named(node)));
            others.map(|condition| format!("node {}: {condition}", node.address))
        });
        let troubles = conditions.chain(self.troubles.iter().map(|trouble| trouble.what.clone())).collect();
        let standby = self.standby.as_ref().map(|standby| standby.waits_for.clone());
        Readiness {
            draining: self.draining,
            not_ready,
            serves,
            troubles,
            automation: self.automation_troubles(),
            standby,
        }
    }

    /// A sentence for each thread that has stopped, and for each part of automation that rests.
    #[must_use]
    pub fn automation_troubles(&self) -> Vec<String> {
        let rests = |state: &AutomationState| Some(format!("the {} rests: {}", state.name, state.rests.as_ref()?));
        self.stopped_threads.iter().cloned().chain(self.automation.iter().filter_map(rests)).collect()
    }
}

/// Where the token is that the router has made for what changes something.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenReport {
    /// `None`: the configuration gives one, and says where; or none could be written.
    pub file: Option<std::path::PathBuf>,
}
