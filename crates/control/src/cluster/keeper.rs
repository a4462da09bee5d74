//! Keeps the router's map of a cluster up to date: one reader at a time, on request of a worker and periodically.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context;
use switchyard_policy::cluster::Member;
use switchyard_router::{ClusterMap, Router, RuntimeSettings};
use tracing::{info, warn};

use super::report::{ClusterReader, ReplicatedMember, Report};
use crate::running::Running;

/// Maximum age of the map.
const PERIOD: Duration = Duration::from_secs(10);

/// Minimum time between two reports.
const PAUSE: Duration = Duration::from_millis(100);

/// Reads the map of a cluster for a running router.
#[derive(Debug)]
pub struct ClusterKeeper {
    running: Arc<Running>,
    map: Arc<ClusterMap>,
    reader: Mutex<Reader>,
    /// Owners of slots with replicas, if clients may read from replicas.
    replicated: Mutex<Arc<Vec<ReplicatedMember>>>,
}

#[derive(Debug)]
struct Reader {
    reader: ClusterReader,
    /// Number of reads, for the choice of the first member.
    turn: usize,
}

impl ClusterKeeper {
    /// Creates a keeper of the map of the running router.
    pub fn new(running: Arc<Running>, map: Arc<ClusterMap>, reader: ClusterReader) -> Arc<Self> {
        Arc::new(Self { running, map, reader: Mutex::new(Reader { reader, turn: 0 }), replicated: Mutex::default() })
    }

    /// Map of the cluster.
    pub fn map(&self) -> &Arc<ClusterMap> {
        &self.map
    }

    /// Owners of slots with replicas, as last reported. None if no client may read from replicas.
    pub(super) fn replicated(&self) -> Arc<Vec<ReplicatedMember>> {
        self.replicated.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Held while settings or the map change, so that neither change undoes the other.
    fn reader(&self) -> MutexGuard<'_, Reader> {
        self.reader.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the map, and publishes it to the workers. Returns whether anything has changed.
    ///
    /// # Errors
    /// If no member sends a usable report.
    pub fn refresh(&self) -> Result<bool, String> {
        let mut reader = self.reader();
        let is_any_added = self.add_members(&reader.reader);
        let known: Vec<Member> = self.map.members().into_iter().map(|(_, member)| member).collect();
        let replaced = self.map.replaced();
        let turn = reader.turn;
        reader.turn = turn.wrapping_add(1);
        let report = reader.reader.read(&known, &replaced, turn)?;
        let gaining = self.map.gaining(&report.shards);
        let (Report { shards, access }, is_whole) = reader.reader.confirmed(report, &gaining);
        if !is_whole {
            // A member has an older map than the others, for a moment, or does not reply.
            self.map.request();
        }
        if shards.is_empty() {
            return Ok(is_any_added);
        }
        let adopted = self.running.with(|router| router.adopt_shards(&shards, &access));
        let is_changed = adopted.unwrap_or(Ok(false)).map_err(|error| error.to_string())?;
        let are_read = self.running.with(Router::are_replicas_read).unwrap_or(false);
        let replicated = if are_read { reader.reader.replicated(&shards) } else { Vec::new() };
        *self.replicated.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(replicated);
        drop(reader);
        self.running.note_topology(self.map.topology());
        Ok(is_changed || is_any_added)
    }

    /// Adds the members at addresses that workers have received, which own no slots yet.
    fn add_members(&self, reader: &ClusterReader) -> bool {
        let mut is_any_added = false;
        for (host, port) in self.map.take_places() {
            // If a member does not reply, the next redirect to it requests its address again.
            if let Ok(member) = reader.member_at(&host, port) {
                let access = reader.access_of(&member);
                is_any_added |= self.running.with(|router| router.adopt_member(&member, access)).unwrap_or(false);
            }
        }
        is_any_added
    }

    /// Applies settings with another reader: credentials and certificates may have changed.
    pub fn reconfigure(&self, live: RuntimeSettings, reader: ClusterReader) {
        let mut current = self.reader();
        let nodes = self.map.members().into_iter().map(|(node, member)| (node, reader.access_of(&member))).collect();
        current.reader = reader;
        let live = RuntimeSettings { nodes, ..live };
        self.running.with(|router| {
            router.reconfigure(live.clone());
            if router.discard_config_set(live) {
                info!("values changed by CONFIG SET are reset to the configuration");
            }
        });
        drop(current);
        self.map.request();
    }
}

/// The running thread. Dropping it ends the thread.
#[derive(Debug)]
pub struct MapThread {
    keeper: Arc<ClusterKeeper>,
    is_stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl MapThread {
    /// Starts to keep the map up to date.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn start(keeper: Arc<ClusterKeeper>) -> anyhow::Result<Self> {
        let is_stopping = Arc::new(AtomicBool::new(false));
        let (worker, stopping) = (Arc::clone(&keeper), Arc::clone(&is_stopping));
        let thread = keeper
            .running
            .threads()
            .spawn("cluster-map", move || keep(&worker, &stopping))
            .context("cannot start reading the cluster's map")?;
        Ok(Self { keeper, is_stopping, thread: Some(thread) })
    }
}

impl Drop for MapThread {
    fn drop(&mut self) {
        self.is_stopping.store(true, Ordering::Release);
        self.keeper.map.request();
        // A read may take as long as all members' timeouts together, and its result is no longer needed.
        drop(self.thread.take());
    }
}

fn keep(keeper: &ClusterKeeper, is_stopping: &AtomicBool) {
    let mut failed = false;
    loop {
        keeper.map.wait_for_request(PERIOD);
        if is_stopping.load(Ordering::Acquire) {
            return;
        }
        match keeper.refresh() {
            Ok(is_changed) => {
                if is_changed {
                    info!(epoch = keeper.map.topology().epoch(), "the map of the cluster has changed");
                }
                if failed {
                    info!("a member of the cluster shows its map again");
                }
                failed = false;
            }
            Err(why) => {
                if !failed {
                    warn!(reason = why, "no member of the cluster shows its map; the last one stays in use");
                }
                failed = true;
            }
        }
        std::thread::sleep(PAUSE);
    }
}
