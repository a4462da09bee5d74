//! What the state directory knows of the servers that its slot map was used with: their processes, and whether these had keys.
//!
//! By that a start notices a state directory that belongs to other servers, and the guard of nodes that come back empty outlives the router. It is
//! kept here and not at the nodes: a server has no place for it that clients do not see and that its own restart keeps.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::bail;
use serde::{Deserialize, Serialize};
use switchyard_control::store::{RedbStore, Store, load_as, save_as};
use switchyard_policy::topology::{Fit, NodeId, Sample, Slot, Topology, judge, slot_of};
use switchyard_router::{KnownProcess, NodeAccess, Router};
use tracing::warn;

use super::running::Running;
use crate::doctor::holdings::sample;

/// The document of the store.
const PROCESSES: &str = "processes";

/// A process of a node. What of it is remembered is what the router needs again: see [`KnownProcess`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Process {
    run_id: String,
    had_keys: bool,
    persists: bool,
}

/// The processes of the nodes, as the state directory knows them.
#[derive(Debug)]
pub(crate) struct Fleet {
    /// By the name of the node; `None`: nothing was ever remembered here.
    processes: Mutex<Option<BTreeMap<String, Process>>>,
}

impl Fleet {
    pub(crate) fn load(store: &RedbStore) -> anyhow::Result<Self> {
        let any = store.load_document(PROCESSES)?.is_some();
        let processes = any.then(|| load_as(store, PROCESSES)).transpose()?;
        Ok(Self { processes: Mutex::new(processes) })
    }

    /// What the router begins with.
    pub(super) fn of(&self, topology: &Topology) -> BTreeMap<NodeId, KnownProcess> {
        let processes = self.processes.lock().unwrap_or_else(PoisonError::into_inner);
        let known = |name: &String| {
            let Process { run_id, had_keys, persists } = processes.as_ref()?.get(name)?.clone();
            Some(KnownProcess { run_id, had_keys, persists })
        };
        topology.nodes().filter_map(|node| Some((node.id, known(&node.name)?))).collect()
    }

    /// Remembers what the router knows by now, where that is news.
    pub(super) fn note(&self, store: &RedbStore, running: &Running) {
        let Some(known) = running.with(Router::processes) else { return };
        let known: BTreeMap<String, Process> = known
            .into_iter()
            .map(|(name, KnownProcess { run_id, had_keys, persists })| (name, Process { run_id, had_keys, persists }))
            .collect();
        let mut processes = self.processes.lock().unwrap_or_else(PoisonError::into_inner);
        // Where no node was met yet, what is remembered of them is not news: it may be that nothing is.
        if processes.as_ref() == Some(&known) || (known.is_empty() && processes.is_none()) {
            return;
        }
        match save_as(store, PROCESSES, &known) {
            Ok(()) => *processes = Some(known),
            // Tried again with the next look.
            Err(error) => warn!("what is known of the nodes' processes cannot be kept: {error}"),
        }
    }

    /// Whether this process is the one that was met last. Where nothing was ever remembered nobody is a stranger: an earlier version has made the
    /// state directory, or `recover` has.
    fn is_known(&self, name: &str, run_id: &str) -> bool {
        let processes = self.processes.lock().unwrap_or_else(PoisonError::into_inner);
        processes.as_ref().is_none_or(|known| known.get(name).is_some_and(|process| process.run_id == run_id))
    }

    /// Looks at some keys of each node that answers, and says which are elsewhere than a stored map looks for them. `left`: slots of which a node may still
    /// have keys that have left it.
    ///
    /// # Errors
    /// If the map is that of other nodes.
    pub(crate) fn recognise(
        &self,
        directory: &Path,
        topology: &Topology,
        nodes: &[NodeAccess],
        patience: Duration,
        left: impl Fn(NodeId) -> Vec<Slot> + Sync,
    ) -> anyhow::Result<Vec<String>> {
        let placed: Vec<(NodeId, &NodeAccess)> = nodes
            .iter()
            .filter_map(|access| Some((topology.nodes().find(|node| node.name == access.name)?.id, access)))
            // Every key of the only node is where the map looks.
            .filter(|_| topology.nodes().len() > 1)
            .collect();
        let looked: Vec<(&str, Sample)> = std::thread::scope(|scope| {
            let left = &left;
            let looks: Vec<_> = placed
                .iter()
                .map(|(id, access)| {
                    scope.spawn(move || {
                        let left = left(*id);
                        let is_elsewhere = |key: &[u8]| {
                            let slot = slot_of(key);
                            topology.lives_at(key) != *id && topology.transit(slot).is_none() && left.binary_search(&slot).is_err()
                        };
                        // One that does not answer is looked at by the guard of nodes that come back empty.
                        let found = sample(access, patience, is_elsewhere).ok()?;
                        let is_known = self.is_known(&access.name, &found.run_id);
                        Some((access.name.as_str(), Sample { is_known, ..found.sample }))
                    })
                })
                .collect();
            looks.into_iter().filter_map(|look| look.join().ok().flatten()).collect()
        });
        let samples: Vec<Sample> = looked.iter().map(|(_, sample)| *sample).collect();
        let sum = |of: fn(&Sample) -> u64| samples.iter().map(of).sum::<u64>();
        match judge(&samples) {
            Fit::Fits => Ok(Vec::new()),
            Fit::Doubtful => Ok(looked
                .iter()
                .filter(|(_, sample)| sample.elsewhere > 0)
                .map(|(name, sample)| {
                    format!(
                        "node {name}: of {} keys that were looked at, the slot map looks for {} elsewhere, so that clients do not find them. Somebody has written to the \
                         node past the router, or the state directory {} is an old copy",
                        sample.keys,
                        sample.elsewhere,
                        directory.display()
                    )
                })
                .collect()),
            Fit::Foreign => bail!(
                "the state directory {} belongs to other servers, or is an old copy: it knows none of the processes that answer at its nodes, and of {} keys \
                 that were looked at its slot map looks for {} elsewhere. Clients would read nil for them. Give the state directory of this fleet (--state-dir); if that is lost, \
                 make one from where the keys are (`switchyard recover` with an empty --state-dir)",
                directory.display(),
                sum(|sample| sample.keys),
                sum(|sample| sample.elsewhere),
            ),
        }
    }
}
