//! Server processes that the slot map was used with, and whether they had keys, according to the state directory.
//!
//! With this, a start detects a state directory that belongs to other servers, and the guard of nodes that return empty
//! outlives the router. The data is here rather than at the nodes, because a server has no place for it that is hidden
//! from clients and survives the server's restart.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::bail;
use serde::{Deserialize, Serialize};
use switchyard_policy::data_loss::Known;
use switchyard_policy::topology::{Fit, NodeId, Sample, Slot, Topology, judge};
use switchyard_resp::units::counted;
use switchyard_router::{KnownProcess, NodeAccess, Router};
use tracing::warn;

use crate::ledger::Ledger;
use crate::nodes::NodeConnection;
use crate::nodes::holdings::{SAMPLE, Sampled, duplicate_server, exists_each, in_parallel, sample};
use crate::running::Running;
use crate::store::{RedbStore, Store, load_json, save_json};

/// Store document of the processes.
const PROCESSES: &str = "processes";

/// A node's process, with the data that the router needs again: see [`KnownProcess`].
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Process {
    run_id: String,
    /// Written by earlier versions instead of a number.
    had_keys: bool,
    #[serde(default)]
    keys: u64,
    /// Average time at which all of its keys have expired, in milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    gone_by_ms: Option<u64>,
    persists: bool,
    #[serde(default)]
    is_held: bool,
    #[serde(default)]
    is_marked: bool,
}

/// A relative change of the number of keys up to 1/32 is not stored, because each write waits for the disk.
const KEYS_TOLERANCE: u64 = 32;

/// A smaller change of the expiry time is not stored, in milliseconds.
const EXPIRY_TOLERANCE_MS: u64 = 60_000;

impl Process {
    fn of(known: KnownProcess) -> Self {
        let KnownProcess {
            run_id,
            data: Known { keys, gone_by_ms },
            persists,
            is_held,
            has_ownership_record: is_marked,
        } = known;
        Self { run_id, had_keys: keys > 0, keys, gone_by_ms, persists, is_held, is_marked }
    }

    fn known(self) -> KnownProcess {
        let Self { run_id, had_keys, keys, gone_by_ms, persists, is_held, is_marked } = self;
        // Add the tolerance, because the stored time may be earlier by up to that.
        let data =
            Known { keys: keys.max(u64::from(had_keys)), gone_by_ms: gone_by_ms.map(|at| at + EXPIRY_TOLERANCE_MS) };
        KnownProcess { run_id, data, persists, is_held, has_ownership_record: is_marked }
    }

    /// Whether the difference is too small to be stored.
    fn is_similar(&self, other: &Self) -> bool {
        let facts = |process: &Self| (process.had_keys, process.persists, process.is_held, process.is_marked);
        let is_near = |(a, b): (Option<u64>, Option<u64>)| {
            a.is_some() == b.is_some() && a.unwrap_or(0).abs_diff(b.unwrap_or(0)) < EXPIRY_TOLERANCE_MS
        };
        self.run_id == other.run_id
            && facts(self) == facts(other)
            && is_near((self.gone_by_ms, other.gone_by_ms))
            && self.keys.abs_diff(other.keys) <= self.keys.max(other.keys) / KEYS_TOLERANCE
    }
}

/// Whether the map places a key at another node, and no move explains that. `left`: slots whose keys moves have left at
/// the node.
pub(crate) fn is_misplaced(topology: &Topology, node: NodeId, left: &[Slot], key: &[u8]) -> bool {
    let slot = topology.slot_of(key);
    topology.lives_at(key) != node && topology.transit(slot).is_none() && left.binary_search(&slot).is_err()
}

/// Explains to an operator that `elsewhere` of `keys` sampled keys of a node are misplaced.
pub fn misplaced_text(keys: u64, elsewhere: u64) -> String {
    format!(
        "of {} in the sample, the slot map places {elsewhere} elsewhere, so clients do not find them. A client has written to the node past the router",
        counted(keys, "key")
    )
}

/// Samples keys of the nodes, up to `at_most` per node or all. Omits nodes that do not reply.
pub(crate) fn samples<'a>(
    topology: &Topology,
    nodes: &'a [NodeAccess],
    timeout: Duration,
    site: Option<&str>,
    at_most: Option<u64>,
    left: impl Fn(NodeId) -> Vec<Slot> + Sync,
    is_elsewhere: impl Fn(NodeId, &[Slot], &[u8]) -> bool + Sync,
) -> Vec<(&'a str, Sampled)> {
    let placed: Vec<(NodeId, &NodeAccess)> = nodes
        .iter()
        .filter_map(|access| Some((topology.nodes().find(|node| node.name == access.name)?.id, access)))
        // A single node has no misplaced keys.
        .filter(|_| topology.nodes().len() > 1)
        .collect();
    let look = |(id, access): &(NodeId, &NodeAccess)| {
        let left = left(*id);
        sample(access, timeout, site, at_most, |key| is_elsewhere(*id, &left, key)).ok()
    };
    placed
        .iter()
        .zip(in_parallel(&placed, look))
        .filter_map(|((_, access), found)| Some((access.name.as_str(), found?)))
        .collect()
}

/// Maximum number of keys queried at an owner.
const QUERIED_MAX: usize = 10_000;

/// Keys at nodes that moves took them from, by owner, with the node where they were found. Normally these are
/// duplicates.
#[derive(Debug, Default)]
struct LeftOver {
    of: BTreeMap<NodeId, Vec<(NodeId, Vec<u8>)>>,
}

impl LeftOver {
    fn note(&mut self, owner: NodeId, at: NodeId, key: &[u8]) {
        let keys = self.of.entry(owner).or_default();
        if keys.len() < QUERIED_MAX {
            keys.push((at, key.to_vec()));
        }
    }

    /// Returns, by node, the number of keys that their owners lack, so that they are not duplicates but the only
    /// copies: for example, a server was restored from a snapshot made before the move. An owner that does not reply is
    /// assumed to have all.
    fn only_there(&self, topology: &Topology, nodes: &[NodeAccess], timeout: Duration) -> BTreeMap<NodeId, u64> {
        let mut only_there = BTreeMap::new();
        for (owner, keys) in &self.of {
            let names: Vec<&[u8]> = keys.iter().map(|(_, key)| &key[..]).collect();
            let access = topology.node(*owner).and_then(|owner| nodes.iter().find(|access| access.name == owner.name));
            let connection = access.and_then(|access| NodeConnection::open(access, timeout).ok());
            let Some(has) = connection.and_then(|mut connection| exists_each(&mut connection, &names).ok()) else {
                continue;
            };
            for ((at, _), _) in keys.iter().zip(has).filter(|(_, has)| !has) {
                *only_there.entry(*at).or_default() += 1;
            }
        }
        only_there
    }
}

/// Processes of the nodes according to the state directory.
#[derive(Debug)]
pub struct Processes {
    /// By name of the node. `None` if no process was ever stored.
    processes: Mutex<Option<BTreeMap<String, Process>>>,
    /// Identifier of the state directory in ownership records.
    site: Option<String>,
}

impl Processes {
    /// Loads the stored processes.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn load(store: &RedbStore) -> anyhow::Result<Self> {
        let any = store.load_document(PROCESSES)?.is_some();
        let processes = any.then(|| load_json(store, PROCESSES)).transpose()?;
        Ok(Self { processes: Mutex::new(processes), site: Ledger::site_in(store)? })
    }

    /// Returns the processes known at the router's start.
    pub fn of(&self, topology: &Topology) -> BTreeMap<NodeId, KnownProcess> {
        let processes = self.processes.lock().unwrap_or_else(PoisonError::into_inner);
        let known = |name: &String| Some(processes.as_ref()?.get(name)?.clone().known());
        topology.nodes().filter_map(|node| Some((node.id, known(&node.name)?))).collect()
    }

    /// Stores the router's present knowledge of the processes, if it differs enough.
    pub(crate) fn note(&self, store: &RedbStore, running: &Running) {
        let Some(known) = running.with(Router::processes) else { return };
        let known: BTreeMap<String, Process> =
            known.into_iter().map(|(name, process)| (name, Process::of(process))).collect();
        let mut processes = self.processes.lock().unwrap_or_else(PoisonError::into_inner);
        // Before the first contact with a node, an empty map is no news.
        let is_as = |before: &BTreeMap<String, Process>| {
            before.len() == known.len()
                && known.iter().all(|(name, process)| before.get(name).is_some_and(|before| before.is_similar(process)))
        };
        if processes.as_ref().map_or(known.is_empty(), is_as) {
            return;
        }
        match save_json(store, PROCESSES, &known) {
            Ok(()) => *processes = Some(known),
            // The next call tries again.
            Err(error) => warn!("the nodes' processes cannot be stored: {error}"),
        }
    }

    /// Whether this process is the last known one. Without stored processes every process counts as known: an earlier
    /// version made the state directory, or `recover` did.
    fn is_known(&self, name: &str, run_id: &str) -> bool {
        let processes = self.processes.lock().unwrap_or_else(PoisonError::into_inner);
        processes.as_ref().is_none_or(|known| known.get(name).is_some_and(|process| process.run_id == run_id))
    }

    /// Whether a process that had the ownership record of this state directory has lost it, because its users were
    /// loaded again.
    fn has_lost_mark(&self, name: &str, found: &Sampled) -> bool {
        let processes = self.processes.lock().unwrap_or_else(PoisonError::into_inner);
        let had = processes
            .as_ref()
            .and_then(|known| known.get(name))
            .is_some_and(|process| process.is_marked && process.run_id == found.run_id);
        had && found.is_marked == Some(false)
    }

    /// Samples keys of each node that replies, and reports misplaced keys under a stored map. `left`: slots whose keys
    /// moves may have left at a node.
    ///
    /// # Errors
    /// If the map belongs to other nodes.
    pub fn check_map(
        &self,
        directory: &Path,
        topology: &Topology,
        nodes: &[NodeAccess],
        timeout: Duration,
        left: impl Fn(NodeId) -> Vec<Slot> + Sync,
        moves_are_open: bool,
    ) -> anyhow::Result<Vec<String>> {
        let left_over = Mutex::new(LeftOver::default());
        let is_elsewhere = |node: NodeId, left: &[Slot], key: &[u8]| {
            let (owner, is_misplaced) = (topology.lives_at(key), is_misplaced(topology, node, left, key));
            // A key in transit is at one of two nodes.
            if owner != node && !is_misplaced && !moves_are_open {
                left_over.lock().unwrap_or_else(PoisonError::into_inner).note(owner, node, key);
            }
            is_misplaced
        };
        let look = |at_most| samples(topology, nodes, timeout, self.site.as_deref(), at_most, &left, is_elsewhere);
        let mut found = look(Some(SAMPLE));
        if let Some(why) = duplicate_server(found.iter().map(|(name, found)| (*name, found.run_id.as_str()))) {
            bail!(why);
        }
        // An ownership record at any node distinguishes an old copy from the newest. Without one, only the keys do, and
        // all of them must be checked.
        let is_vouched_for = found.iter().any(|(_, found)| found.is_marked == Some(true));
        let unmarked = found
            .iter()
            .find(|(name, found)| !is_vouched_for && self.has_lost_mark(name, found))
            .map(|(name, _)| *name);
        let has_keys = found.iter().any(|(_, found)| found.sample.keys > 0);
        let no_witness = if is_vouched_for || !has_keys {
            None
        } else if let Some(name) = unmarked {
            Some(format!("the ownership record is missing at node {name} (ACL LOAD removes it)"))
        } else if !found.iter().any(|(name, found)| found.sample.keys > 0 && self.is_known(name, &found.run_id)) {
            Some(
                "no server runs a process that the state directory lists, and none has its ownership record".to_owned(),
            )
        } else {
            None
        };
        if let Some(why) = &no_witness {
            warn!("{why}: checking every key of every node");
            *left_over.lock().unwrap_or_else(PoisonError::into_inner) = LeftOver::default();
            found = look(None);
        }
        let left_over = left_over.into_inner().unwrap_or_else(PoisonError::into_inner);
        let only_there = left_over.only_there(topology, nodes, timeout);
        let only_at = |name: &str| {
            topology.nodes().find(|node| node.name == name).and_then(|node| only_there.get(&node.id)).copied()
        };
        let looked: Vec<(&str, Sample)> = found
            .into_iter()
            .map(|(name, found)| {
                let elsewhere = found.sample.elsewhere + only_at(name).unwrap_or_default();
                (name, Sample { is_known: self.is_known(name, &found.run_id), elsewhere, ..found.sample })
            })
            .collect();
        let samples: Vec<Sample> = looked.iter().map(|(_, sample)| *sample).collect();
        let sum = |of: fn(&Sample) -> u64| samples.iter().map(of).sum::<u64>();
        let fit = judge(&samples);
        let is_by_keys = topology.placement().is_crc16();
        if let Some(why) = no_witness.filter(|_| fit == Fit::Doubtful && is_by_keys) {
            bail!(
                "the state directory {} may be an old copy: {why}, and of {} the slot map places {} elsewhere. Clients would read nil for them. \
                 Start with the state directory of the router that served last (--state-dir). If it is lost, make one from the location of the keys \
                 (`switchyard recover` with an empty --state-dir). Or restore state directory and servers from one time (docs/backup.md). \
                 Or, with loss of data: remove these keys, if a client has written them past the router",
                directory.display(),
                counted(sum(|sample| sample.keys), "key"),
                sum(|sample| sample.elsewhere),
            );
        }
        match fit {
            Fit::Fits => Ok(Vec::new()),
            // Here the map does not depend on the location of keys: misplaced keys come from earlier lists of servers.
            _ if !topology.placement().is_crc16() => {
                let misplaced = looked.iter().filter(|(_, sample)| sample.elsewhere > 0);
                Ok(misplaced.map(|(name, sample)| format!("node {name}: of {} checked, {} belong to other servers, and are not served", counted(sample.keys, "key"), sample.elsewhere)).collect())
            }
            Fit::Doubtful => Ok(looked
                .iter()
                .filter(|(_, sample)| sample.elsewhere > 0)
                .map(|(name, sample)| {
                    format!(
                        "node {name}: {}, or the state directory {} is an old copy, or servers were restored from snapshots of another time (docs/backup.md)",
                        misplaced_text(sample.keys, sample.elsewhere),
                        directory.display()
                    )
                })
                .collect()),
            Fit::Foreign => bail!(
                "the state directory {} belongs to other servers, or it and their data are of different times: it lists none of the processes that reply at its \
                 nodes, and of {} checked, its slot map places {} elsewhere. Clients would read nil for them. Give the state directory of this fleet (--state-dir); \
                 or restore state directory and servers from one time (docs/backup.md); or make a state directory from the location of the keys (`switchyard recover` with an empty \
                 --state-dir)",
                directory.display(),
                counted(sum(|sample| sample.keys), "key"),
                sum(|sample| sample.elsewhere),
            ),
        }
    }
}
