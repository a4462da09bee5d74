//! The record of the autoscaler: one small document in the state directory.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use switchyard_policy::autoscale::{Millis, Now, State};

use super::Way;

/// Events that are kept.
const EVENTS: usize = 100;

/// The name of the document.
pub(super) const DOCUMENT: &str = "autoscale";

/// All of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Intent {
    /// The memory of the policy.
    pub(super) state: State,
    /// So many nodes are wanted: by the policy, or because somebody said so. None: as many as there are.
    pub(super) wanted: Option<usize>,
    /// Somebody has told the policy to rest.
    pub(super) is_paused: bool,
    /// Nodes that a provisioner has started, by name.
    pub(super) started: BTreeMap<String, Started>,
    /// The change that is under way.
    pub(super) change: Option<Change>,
    /// The latest last.
    pub(super) events: VecDeque<Event>,
    /// The moment of this record. An earlier version had only wall time, for which both clocks are zero.
    #[serde(default)]
    pub(super) last: Now,
    /// Changes that ended well, and that failed.
    pub(super) done: u64,
    pub(super) failed: u64,
}

/// A server that a provisioner has started. The record alone is no right to stop it: see [`super::removal`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Started {
    /// Number of the change that started it.
    pub(super) number: u64,
    /// The provisioner. The configuration may name another one by now.
    pub(super) way: Way,
    /// Directory of a local server, with a random token in its name. `None`: not local, or started by a version that
    /// named directories by number.
    #[serde(default)]
    pub(super) home: Option<PathBuf>,
    /// Machine of a local server. `None`: not local, or not recorded.
    #[serde(default)]
    pub(super) host: Option<String>,
    /// The newest observation of its process.
    #[serde(default)]
    pub(super) seen: LastSeen,
}

/// The newest observation of a server's process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum LastSeen {
    /// An earlier version made the record and observed nothing.
    #[default]
    Unknown,
    /// Started, without an open port so far.
    Never,
    /// The port was open, and nothing replied.
    Listening,
    /// `run_id` of the process that replied.
    Process(String),
}

impl Started {
    /// Returns the record of a server at its start.
    pub(super) fn new(number: u64, way: Way) -> Self {
        Self { number, way, home: None, host: None, seen: LastSeen::Never }
    }
}

/// A change that is under way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Change {
    pub(super) number: u64,
    /// Its provisioner. A server that goes is stopped by the one that started it.
    pub(super) way: Way,
    pub(super) stage: Stage,
    /// The fleet has too much to do, so the new node gets its share as fast as the nodes can give it.
    #[serde(default)]
    pub(super) is_urgent: bool,
    /// Wall time at which this stage began, for reports.
    pub(super) since: Millis,
    /// Attempts at this stage that failed.
    pub(super) failures: u32,
    /// Why the last one of them failed.
    #[serde(default)]
    pub(super) error: Option<String>,
    /// The moves that this stage has ordered last.
    #[serde(default)]
    pub(super) moves: Vec<u64>,
    /// Wall time since which the change waits for moves of others or for paused ones.
    #[serde(default)]
    pub(super) waits_since: Option<Millis>,
    /// Standby servers that could not join.
    #[serde(default)]
    pub(super) tried: BTreeSet<String>,
    /// Time of the run from which the next attempt is due.
    pub(super) again: Millis,
}

impl Change {
    /// It goes on with this stage.
    pub(super) fn at(&self, stage: Stage, now: Now) -> Self {
        Self { stage, since: now.wall, failures: 0, error: None, waits_since: None, again: 0, ..self.clone() }
    }
}

/// The step of a change that comes next.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Stage {
    /// Start a server, at this address if one was chosen.
    Provision(Option<String>),
    /// Let it join.
    Join(String),
    /// Give it its share. It may own something already: the planner moves keys and slots to whoever has room.
    Fill(String),
    /// Its share was ordered: wait for it.
    Share(String),
    /// Move everything away from this node.
    Drain(String),
    /// Let it go.
    Leave(String),
    /// Stop its server. `Some`: the change has failed, for this reason.
    Stop(String, Option<String>),
}

impl Stage {
    /// The stage in a few words.
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

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Event {
    /// Milliseconds since 1970.
    pub(crate) at: Millis,
    /// The number of the change, if it belongs to one.
    pub(crate) change: Option<u64>,
    /// `decided`, `done` or `failed`.
    pub(crate) kind: String,
    /// In a sentence.
    pub(crate) text: String,
}

impl Intent {
    /// Takes over the record of an earlier run. `pause_max`: the longest pause after a failure.
    pub(super) fn resume(&mut self, now: Now, pause_max: Millis) {
        self.state.resume(self.last, now);
        if let Some(change) = &mut self.change {
            change.again = self.last.to_wall(change.again).min(now.run + pause_max);
        }
        self.last = now;
    }

    /// Ends the change under way if a server has not joined by it yet: that server is stopped. A change that is further
    /// goes on.
    pub(super) fn withdraw(&mut self, now: Now) {
        let Some(change) = &self.change else { return };
        let address = match &change.stage {
            Stage::Provision(chosen) => chosen.clone().unwrap_or_default(),
            Stage::Join(address) => address.clone(),
            _ => return,
        };
        let why = "somebody does not want another node any more (`switchyard autoscale set-nodes`)".to_owned();
        self.change = Some(change.at(Stage::Stop(address, Some(why)), now));
    }

    /// Ends a stop of this server that is pending: an operator wants the server as a node.
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

    /// Ends a change whose server does not stop after so many attempts. Its server may run on.
    pub(super) fn give_up_stop(&mut self, now: Now, attempts: u32) {
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
            format!("change {number}: somebody gave up the stop of {address}, which may run on"),
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

    /// As versions before the proof of removal wrote it, with wall time only.
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
        let started = Started { seen: LastSeen::Unknown, ..Started::new(3, Way::Local) };
        assert_eq!(intent.started, BTreeMap::from([("127.0.0.1:7101".to_owned(), started)]));
        let now = Now { run: 1_000_000, wall: 1_000_000 };
        intent.resume(now, 10_000);
        let again = |intent: &Intent| intent.change.as_ref().map(|change| change.again);
        assert_eq!((again(&intent), intent.last), (Some(1_000_500), now), "wall time is taken over");
        // The wall clock of the run jumped an hour ahead of it, and the next run begins with the clock that jumped.
        intent.last = Now { run: 1_000_200, wall: 4_600_200 };
        intent.resume(Now { run: 4_600_300, wall: 4_600_300 }, 10_000);
        assert_eq!(again(&intent), Some(4_600_500));
    }
}
