//! The record of the autoscaler: one small document in the state directory.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};
use switchyard_policy::autoscale::{Millis, State};

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
    /// Changes that ended well, and that failed.
    pub(super) done: u64,
    pub(super) failed: u64,
}

/// A server that a provisioner has started, and is to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Started {
    /// The number of the change.
    pub(super) number: u64,
    /// The provisioner. The configuration may name another one by now.
    pub(super) way: Way,
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
    /// When this stage began.
    pub(super) since: Millis,
    /// Attempts at this stage that failed.
    pub(super) failures: u32,
    /// Not before then.
    pub(super) again: Millis,
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
    /// Ends the change under way if a server has not joined by it yet: that server is stopped. A change that is further goes on.
    pub(super) fn withdraw(&mut self, now: Millis) {
        let Some(change) = &mut self.change else { return };
        let address = match &change.stage {
            Stage::Provision(chosen) => chosen.clone().unwrap_or_default(),
            Stage::Join(address) => address.clone(),
            _ => return,
        };
        let why = "somebody does not want another node any more (`switchyard autoscale set-nodes`)".to_owned();
        (change.stage, change.since, change.failures, change.again) = (Stage::Stop(address, Some(why)), now, 0, 0);
    }

    pub(super) fn note(&mut self, at: Millis, change: Option<u64>, kind: &str, text: String) -> Event {
        let event = Event { at, change, kind: kind.to_owned(), text };
        self.events.push_back(event.clone());
        while self.events.len() > EVENTS {
            self.events.pop_front();
        }
        event
    }
}
