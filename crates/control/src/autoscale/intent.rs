//! Persistent state of the autoscaler: a small document in the state directory.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use switchyard_policy::autoscale::{Millis, Now, State};

use super::ProvisionerKind;

/// Maximum number of events in the history.
const EVENTS: usize = 100;

/// Store document of the state.
pub(super) const DOCUMENT: &str = "autoscale";

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Intent {
    /// State of the policy.
    pub(super) state: State,
    /// Target number of nodes, set by the policy or an operator. `None`: the current number.
    pub(super) wanted: Option<usize>,
    /// Whether an operator has paused the policy.
    pub(super) is_paused: bool,
    /// Nodes that a provisioner has started, by name.
    pub(super) started: BTreeMap<String, StartedServer>,
    /// Change in progress.
    pub(super) change: Option<Change>,
    /// Events, the latest last.
    pub(super) events: VecDeque<Event>,
    /// Time of this record. Earlier versions stored only wall time, so both clocks are zero.
    #[serde(default)]
    pub(super) last: Now,
    /// Changes that succeeded, and that failed.
    pub(super) done: u64,
    pub(super) failed: u64,
}

/// A server that a provisioner has started. The record alone does not justify a stop: see [`super::removal`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StartedServer {
    /// Number of the change that started it.
    pub(super) number: u64,
    /// Provisioner of the server, which may differ from the configured one.
    pub(super) way: ProvisionerKind,
    /// Directory of a local server, with a random token in its name. `None`: not local, or started by a version that
    /// named directories by number.
    #[serde(default)]
    pub(super) home: Option<PathBuf>,
    /// Machine of a local server. `None`: not local, or not recorded.
    #[serde(default)]
    pub(super) host: Option<String>,
    /// Latest observation of its process.
    #[serde(default)]
    pub(super) seen: LastSeen,
}

/// Latest observation of a server's process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum LastSeen {
    /// The record of an earlier version, without an observation.
    #[default]
    Unknown,
    /// Started, without an open port so far.
    Never,
    /// The port was open, and the server did not reply.
    Listening,
    /// `run_id` of the process that replied.
    Process(String),
}

impl StartedServer {
    /// Returns the record of a server at its start.
    pub(super) fn new(number: u64, way: ProvisionerKind) -> Self {
        Self { number, way, home: None, host: None, seen: LastSeen::Never }
    }
}

/// A change in progress.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Change {
    pub(super) number: u64,
    /// Provisioner. A server is stopped by the provisioner that started it.
    pub(super) way: ProvisionerKind,
    pub(super) stage: Stage,
    /// Whether the fleet is overloaded, so that the new node gets its share as fast as possible.
    #[serde(default)]
    pub(super) is_urgent: bool,
    /// Wall time at the beginning of this stage, for reports.
    pub(super) since: Millis,
    /// Failed attempts at this stage.
    pub(super) failures: u32,
    /// Error of the last attempt.
    #[serde(default)]
    pub(super) error: Option<String>,
    /// Moves that this stage has ordered last.
    #[serde(default)]
    pub(super) moves: Vec<u64>,
    /// Wall time since which the change has waited for other or paused moves.
    #[serde(default)]
    pub(super) waits_since: Option<Millis>,
    /// Standby servers that could not join.
    #[serde(default)]
    pub(super) tried: BTreeSet<String>,
    /// Time of the next attempt, on the clock of this run.
    pub(super) again: Millis,
}

impl Change {
    /// Returns the change at its next stage.
    pub(super) fn at(&self, stage: Stage, now: Now) -> Self {
        Self { stage, since: now.wall, failures: 0, error: None, waits_since: None, again: 0, ..self.clone() }
    }
}

/// Next step of a change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Stage {
    /// Start a server, at this address if one was chosen.
    Provision(Option<String>),
    /// Add the server as a node.
    Join(String),
    /// Order its share. It may already own something, because the planner moves keys and slots to nodes with room.
    Fill(String),
    /// Wait for the ordered share.
    Share(String),
    /// Move everything away from this node.
    Drain(String),
    /// Remove the node.
    Leave(String),
    /// Stop its server. `Some`: the reason why the change has failed.
    Stop(String, Option<String>),
}

impl Stage {
    /// Description of the stage.
    pub(super) fn text(&self) -> String {
        match self {
            Self::Provision(None) => "a server is being started".to_owned(),
            Self::Provision(Some(address)) => format!("a server is being started at {address}"),
            Self::Join(address) => format!("{address} is joining"),
            Self::Fill(address) | Self::Share(address) => format!("{address} is getting its share"),
            Self::Drain(node) => format!("{node} is being drained"),
            Self::Leave(node) => format!("{node} is leaving"),
            Self::Stop(address, _) if address.is_empty() => "a server that was started is being stopped".to_owned(),
            Self::Stop(address, _) => format!("the server {address} is being stopped"),
        }
    }
}

/// An event in the history.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Event {
    /// Time, in milliseconds since 1970.
    pub(crate) at: Millis,
    /// Number of the change that the event belongs to.
    pub(crate) change: Option<u64>,
    /// `decided`, `done` or `failed`.
    pub(crate) kind: String,
    /// Description as a sentence.
    pub(crate) text: String,
}

impl Intent {
    /// Resumes from the record of an earlier run. `pause_max`: maximum pause after a failure.
    pub(super) fn resume(&mut self, now: Now, pause_max: Millis) {
        self.state.resume(self.last, now);
        if let Some(change) = &mut self.change {
            change.again = self.last.to_wall(change.again).min(now.run + pause_max);
        }
        self.last = now;
    }

    /// Cancels a change whose server has not joined yet, and stops that server. A later stage continues.
    pub(super) fn withdraw(&mut self, now: Now) {
        let Some(change) = &self.change else { return };
        let address = match &change.stage {
            Stage::Provision(chosen) => chosen.clone().unwrap_or_default(),
            Stage::Join(address) => address.clone(),
            _ => return,
        };
        let why = "an operator has withdrawn the new node (`switchyard autoscale set-nodes`)".to_owned();
        self.change = Some(change.at(Stage::Stop(address, Some(why)), now));
    }

    /// Cancels a pending stop of this server, because an operator wants it as a node.
    pub(super) fn withdraw_stop(&mut self, now: Now, is_it: impl Fn(&str) -> bool) -> Option<Event> {
        let Some(Change { stage: Stage::Stop(address, _), number, .. }) = &self.change else { return None };
        let (address, number) = (address.clone(), *number);
        is_it(&address).then(|| {
            (self.change, self.failed) = (None, self.failed + 1);
            self.state.ended(now.run, true);
            self.note(
                now,
                Some(number),
                "failed",
                format!("change {number}: an operator has added {address} as a node, so it is not stopped"),
            )
        })
    }

    /// Ends a change whose server did not stop after `attempts` attempts. Its server may keep running.
    pub(super) fn abandon_stop(&mut self, now: Now, attempts: u32) {
        let Some(Change { stage: Stage::Stop(address, _), number, failures, .. }) = &self.change else { return };
        if *failures < attempts {
            return;
        }
        let (address, number) = (address.clone(), *number);
        self.started.remove(&address);
        (self.change, self.failed) = (None, self.failed + 1);
        self.state.ended(now.run, true);
        self.note(
            now,
            Some(number),
            "failed",
            format!("change {number}: an operator gave up the stop of {address}, which may keep running"),
        );
    }

    pub(super) fn note(&mut self, now: Now, change: Option<u64>, kind: &str, text: String) -> Event {
        let event = Event { at: now.wall, change, kind: kind.to_owned(), text };
        self.events.push_back(event.clone());
        while self.events.len() > EVENTS {
            self.events.pop_front();
        }
        event
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Record of a version without proofs of removal, with wall time only.
    const FORMER: &str = r#"{
        "state": {"above": null, "below": 1000000, "changed": 900000, "next": 5, "under_way": 4},
        "wanted": null, "is_paused": false,
        "started": {"127.0.0.1:7101": {"number": 3, "way": "local"}},
        "change": {"number": 4, "way": "local", "stage": {"stop": ["127.0.0.1:7101", null]}, "since": 950000, "failures": 2, "again": 1000500},
        "events": [], "done": 1, "failed": 0
    }"#;

    #[test]
    fn a_record_of_an_earlier_version_proves_nothing_about_a_server() {
        let mut intent: Intent = serde_json::from_str(FORMER).expect("the format of an earlier version");
        let started = StartedServer { seen: LastSeen::Unknown, ..StartedServer::new(3, ProvisionerKind::Local) };
        assert_eq!(intent.started, BTreeMap::from([("127.0.0.1:7101".to_owned(), started)]));
        let now = Now { run: 1_000_000, wall: 1_000_000 };
        intent.resume(now, 10_000);
        let again = |intent: &Intent| intent.change.as_ref().map(|change| change.again);
        assert_eq!((again(&intent), intent.last), (Some(1_000_500), now), "wall time is taken over");
        // The wall clock jumped an hour ahead of the run's clock, and the next run starts from the wall clock.
        intent.last = Now { run: 1_000_200, wall: 4_600_200 };
        intent.resume(Now { run: 4_600_300, wall: 4_600_300 }, 10_000);
        assert_eq!(again(&intent), Some(4_600_500));
    }
}
