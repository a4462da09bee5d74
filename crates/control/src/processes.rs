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
use switchyard_policy::topology::{Fit, NodeId, Sample, Slot, Topology, judge, slot_of};
use switchyard_resp::units::counted;
use switchyard_router::{KnownProcess, NodeAccess, Router};
use tracing::warn;

use crate::ledger::Ledger;
use crate::nodes::NodeConnection;
use crate::nodes::holdings::{SAMPLE, Sampled, at_once, missing_at, one_server_twice, sample};
use crate::running::Running;
use crate::store::{RedbStore, Store, load_as, save_as};

/// The document of the store.
const PROCESSES: &str = "processes";

/// A process of a node. What of it is remembered is what the router needs again: see [`KnownProcess`].
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Process {
    run_id: String,
    /// What earlier versions have kept, in the place of a number.
    had_keys: bool,
    #[serde(default)]
    keys: u64,
    persists: bool,
    #[serde(default)]
    is_held: bool,
    #[serde(default)]
    is_marked: bool,
}

/// A number of keys that has changed by no more than one in so many is no news: each piece of news waits for the disk.
const NEWS_ONE_IN: u64 = 32;

impl Process {
    fn of(known: KnownProcess) -> Self {
        let KnownProcess { run_id, keys, persists, is_held, is_marked } = known;
        Self { run_id, had_keys: keys > 0, keys, persists, is_held, is_marked }
    }

    fn known(self) -> KnownProcess {
        let Self { run_id, had_keys, keys, persists, is_held, is_marked } = self;
        KnownProcess { run_id, keys: keys.max(u64::from(had_keys)), persists, is_held, is_marked }
    }

    /// Whether it need not be kept anew.
    fn is_as(&self, other: &Self) -> bool {
        let facts = |process: &Self| (process.had_keys, process.persists, process.is_held, process.is_marked);
        self.run_id == other.run_id
            && facts(self) == facts(other)
            && self.keys.abs_diff(other.keys) <= self.keys.max(other.keys) / NEWS_ONE_IN
    }
}

/// Whether the map looks elsewhere for a key of a node, and no move explains it. `left`: slots of which the node may still have keys that have left it.
pub(crate) fn is_misplaced(topology: &Topology, node: NodeId, left: &[Slot], key: &[u8]) -> bool {
    let slot = slot_of(key);
    topology.lives_at(key) != node && topology.transit(slot).is_none() && left.binary_search(&slot).is_err()
}

/// What it means for clients that of so many keys of a node so many are elsewhere than the map looks.
pub fn misplaced_text(keys: u64, elsewhere: u64) -> String {
    format!(
        "of {} looked at, the slot map looks for {elsewhere} elsewhere, so that clients do not find them. Somebody has written to the node past the router",
        counted(keys, "key")
    )
}

/// Looks at keys of the nodes, so many of each or all. One that does not answer is left out.
pub(crate) fn samples<'a>(
    topology: &Topology,
    nodes: &'a [NodeAccess],
    patience: Duration,
    site: Option<&str>,
    at_most: Option<u64>,
    left: impl Fn(NodeId) -> Vec<Slot> + Sync,
    is_elsewhere: impl Fn(NodeId, &[Slot], &[u8]) -> bool + Sync,
) -> Vec<(&'a str, Sampled)> {
    let placed: Vec<(NodeId, &NodeAccess)> = nodes
        .iter()
        .filter_map(|access| Some((topology.nodes().find(|node| node.name == access.name)?.id, access)))
        // Every key of the only node is where the map looks.
        .filter(|_| topology.nodes().len() > 1)
        .collect();
    let look = |(id, access): &(NodeId, &NodeAccess)| {
        let left = left(*id);
        sample(access, patience, site, at_most, |key| is_elsewhere(*id, &left, key)).ok()
    };
    placed.iter().zip(at_once(&placed, look)).filter_map(|((_, access), found)| Some((access.name.as_str(), found?))).collect()
}

/// Keys of one owner that others still have, and that are looked for at it, at most.
const LEFT_OVER_MAX: usize = 100;

/// What moves have left behind is there a second time, at its owner. Where most of it is not, it is no leftover but all that is left: a server was restored from a snapshot
/// of before the move, say. `left_over`: names by owner.
fn lost_at_owners(
    topology: &Topology,
    nodes: &[NodeAccess],
    patience: Duration,
    left_over: &BTreeMap<NodeId, Vec<Vec<u8>>>,
) -> Vec<String> {
    let doubt = |(owner, names): (&NodeId, &Vec<Vec<u8>>)| {
        let owner = topology.node(*owner)?;
        let access = nodes.iter().find(|access| access.name == owner.name)?;
        let missing = missing_at(&mut NodeConnection::open(access, patience).ok()?, names).ok()?;
        (missing * 2 > names.len()).then(|| {
            format!(
                "node {}: of {} that moves took to it and that other nodes still show, it lacks {missing}. Clients read nil for these, and a later move of their slots removes \
                 them where they are. Were servers restored from snapshots older than the state directory? Then stop this, and restore all from one time (docs/backup.md), or make \
                 the slot map from where the keys are (`switchyard recover` with an empty --state-dir)",
                owner.name,
                counted(names.len(), "key"),
            )
        })
    };
    left_over.iter().filter_map(doubt).collect()
}

/// The processes of the nodes, as the state directory knows them.
#[derive(Debug)]
pub struct Processes {
    /// By the name of the node; `None`: nothing was ever remembered here.
    processes: Mutex<Option<BTreeMap<String, Process>>>,
    /// What names the state directory in marks.
    site: Option<String>,
}

impl Processes {
    /// What the store remembers.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn load(store: &RedbStore) -> anyhow::Result<Self> {
        let any = store.load_document(PROCESSES)?.is_some();
        let processes = any.then(|| load_as(store, PROCESSES)).transpose()?;
        Ok(Self { processes: Mutex::new(processes), site: Ledger::site_in(store)? })
    }

    /// What the router begins with.
    pub fn of(&self, topology: &Topology) -> BTreeMap<NodeId, KnownProcess> {
        let processes = self.processes.lock().unwrap_or_else(PoisonError::into_inner);
        let known = |name: &String| Some(processes.as_ref()?.get(name)?.clone().known());
        topology.nodes().filter_map(|node| Some((node.id, known(&node.name)?))).collect()
    }

    /// Remembers what the router knows by now, where that is news.
    pub(crate) fn note(&self, store: &RedbStore, running: &Running) {
        let Some(known) = running.with(Router::processes) else { return };
        let known: BTreeMap<String, Process> = known.into_iter().map(|(name, process)| (name, Process::of(process))).collect();
        let mut processes = self.processes.lock().unwrap_or_else(PoisonError::into_inner);
        // Where no node was met yet, what is remembered of them is not news: it may be that nothing is.
        let is_as = |before: &BTreeMap<String, Process>| {
            before.len() == known.len() && known.iter().all(|(name, process)| before.get(name).is_some_and(|before| before.is_as(process)))
        };
        if processes.as_ref().map_or(known.is_empty(), is_as) {
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

    /// Whether a node has lost the mark of this state directory, though its process is the one that had it: somebody has loaded its users anew.
    fn has_lost_mark(&self, name: &str, found: &Sampled) -> bool {
        let processes = self.processes.lock().unwrap_or_else(PoisonError::into_inner);
        let had =
            processes.as_ref().and_then(|known| known.get(name)).is_some_and(|process| process.is_marked && process.run_id == found.run_id);
        had && found.is_marked == Some(false)
    }

    /// Looks at some keys of each node that answers, and says which are elsewhere than a stored map looks for them. `left`: slots of which a node may still
    /// have keys that have left it.
    ///
    /// # Errors
    /// If the map is that of other nodes.
    pub fn recognise(
        &self,
        directory: &Path,
        topology: &Topology,
        nodes: &[NodeAccess],
        patience: Duration,
        left: impl Fn(NodeId) -> Vec<Slot> + Sync,
        moves_are_open: bool,
    ) -> anyhow::Result<Vec<String>> {
        let left_over = Mutex::new(BTreeMap::<NodeId, Vec<Vec<u8>>>::new());
        let is_elsewhere = |node: NodeId, left: &[Slot], key: &[u8]| {
            let (owner, is_misplaced) = (topology.lives_at(key), is_misplaced(topology, node, left, key));
            // A key on its way is at one of both.
            if owner != node && !is_misplaced && !moves_are_open {
                let mut left_over = left_over.lock().unwrap_or_else(PoisonError::into_inner);
                let names = left_over.entry(owner).or_default();
                if names.len() < LEFT_OVER_MAX {
                    names.push(key.to_vec());
                }
            }
            is_misplaced
        };
        let look = |at_most| samples(topology, nodes, patience, self.site.as_deref(), at_most, &left, is_elsewhere);
        let mut found = look(Some(SAMPLE));
        if let Some(why) = one_server_twice(found.iter().map(|(name, found)| (*name, found.run_id.as_str()))) {
            bail!(why);
        }
        // A mark at any node tells an old copy from the newest. Where they were taken away, only the keys themselves do: all of them.
        let is_vouched_for = found.iter().any(|(_, found)| found.is_marked == Some(true));
        let unmarked = found.iter().find(|(name, found)| !is_vouched_for && self.has_lost_mark(name, found)).map(|(name, _)| *name);
        if unmarked.is_some() {
            found = look(None);
        }
        let looked: Vec<(&str, Sample)> = found
            .into_iter()
            .map(|(name, found)| (name, Sample { is_known: self.is_known(name, &found.run_id), ..found.sample }))
            .collect();
        let samples: Vec<Sample> = looked.iter().map(|(_, sample)| *sample).collect();
        let sum = |of: fn(&Sample) -> u64| samples.iter().map(of).sum::<u64>();
        if let Some(name) = unmarked.filter(|_| sum(|sample| sample.elsewhere) > 0) {
            bail!(
                "the state directory {} may be an old copy: the mark that would tell is gone from node {name} (ACL LOAD removes it), and of {} the slot map looks for \
                 {} elsewhere. Clients would read nil for them. Start with the state directory of the router that served last (--state-dir); if it is lost, make one from where the \
                 keys are (`switchyard recover` with an empty --state-dir); or remove these keys, if somebody has written them past the router",
                directory.display(),
                counted(sum(|sample| sample.keys), "key"),
                sum(|sample| sample.elsewhere),
            );
        }
        let mut doubts = lost_at_owners(topology, nodes, patience, &left_over.into_inner().unwrap_or_else(PoisonError::into_inner));
        match judge(&samples) {
            Fit::Fits => Ok(doubts),
            Fit::Doubtful => {
                doubts.extend(looked.iter().filter(|(_, sample)| sample.elsewhere > 0).map(|(name, sample)| {
                    let found = misplaced_text(sample.keys, sample.elsewhere);
                    format!("node {name}: {found}, or the state directory {} is an old copy", directory.display())
                }));
                Ok(doubts)
            }
            Fit::Foreign => bail!(
                "the state directory {} belongs to other servers, or is an old copy: it knows none of the processes that answer at its nodes, and of {} \
                 looked at, its slot map looks for {} elsewhere. Clients would read nil for them. Give the state directory of this fleet (--state-dir); if that is lost, \
                 make one from where the keys are (`switchyard recover` with an empty --state-dir)",
                directory.display(),
                counted(sum(|sample| sample.keys), "key"),
                sum(|sample| sample.elsewhere),
            ),
        }
    }
}
