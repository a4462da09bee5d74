//! Ensures a single router: ownership records at the nodes, detection of a router that has taken over, and waiting as a
//! standby.
//!
//! The rules are in [`switchyard_policy::ownership`]. Workers and movers claim nodes and follow the rules. This module
//! keeps the record up to date, once a second and before a leg starts, and refuses a state directory older than the one
//! that last served the nodes.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use switchyard_policy::ownership::{
    Observation, OwnershipRecord, OwnershipStatus, Predecessor, StandbyMonitor, TakeoverDecision,
};
use switchyard_policy::topology::NodeId;
use switchyard_router::{
    Admission, EarlierRouters, FleetOwnership, NodeAccess, foreign_connections, parse_record, query_of_site,
    refusal_reason,
};
use tracing::{debug, info, warn};

use crate::ledger::Ledger;
use crate::nodes::{Answer, NodeAddress, NodeConnection};
use crate::placement::Placement;
use crate::running::Running;
use crate::store::{RedbStore, Store, StoreError, load_json, save_json};

/// Store document.
const DOCUMENT: &str = "seat";

/// Interval between renewals of records, and between checks of a standby.
const PERIOD: Duration = Duration::from_secs(1);

/// Timeout for a node's reply.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Interval between a standby's checks whether the state directory is free.
const DIRECTORY_PERIOD: Duration = Duration::from_millis(250);

/// Kind of a standby's state directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Standby {
    /// The other router's own directory, on storage shared by both machines.
    Shared,
    /// A copy of the other router's directory.
    Copy,
}

/// Age of the state directory.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PersistedState {
    /// Term of the last router that used it.
    term: u64,
    /// Counts changes of the location of keys.
    version: u64,
    /// That router, as named in its records.
    #[serde(default)]
    holder: String,
    /// Store that it had locked ([`RedbStore::lock_identity`]). A process that locks the same store proves that the
    /// router has ended.
    #[serde(default)]
    store: Option<String>,
}

impl PersistedState {
    /// Router that used the state directory before the router that has locked this store.
    fn predecessor(&self, found: &NodesState, store: Option<&str>) -> Predecessor {
        match store {
            _ if self.term == 0 && found.term == 0 => Predecessor::None,
            Some(store) if self.store.as_deref() == Some(store) && !self.holder.is_empty() => {
                Predecessor::Ended(self.holder.clone())
            }
            _ => Predecessor::Unknown,
        }
    }
}

/// Receives the reason when another router has taken over.
pub type Replaced = tokio::sync::mpsc::Receiver<String>;

/// Ownership records of this router.
#[derive(Debug)]
pub struct Ownerships {
    ownership: Arc<FleetOwnership>,
    placement: Arc<Placement>,
    kept: Mutex<PersistedState>,
    /// Number of legs about to start, whose nodes are being updated.
    beginning: AtomicUsize,
    beat: AtomicU64,
    nodes: Mutex<BTreeMap<NodeId, Arc<Mutex<OwnershipConnection>>>>,
}

/// A dedicated connection for records. Records of a node are written one at a time.
#[derive(Default)]
struct OwnershipConnection {
    connection: Option<Connected>,
    refuses: bool,
}

struct Connected {
    /// Address and credentials of the connection. If they change, the node gets a new connection.
    access: NodeAccess,
    run_id: String,
    connection: NodeConnection,
}

impl std::fmt::Debug for OwnershipConnection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AtNode").field("refuses", &self.refuses).finish_non_exhaustive()
    }
}

/// While it lives, records state that keys are moving.
#[derive(Debug)]
pub(crate) struct LegStartGuard<'a>(&'a AtomicUsize);

impl Drop for LegStartGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Ownerships {
    /// Takes ownership with the next term. If moves are open, raises the version: they continue now, which makes
    /// earlier copies of the state directory invalid.
    pub fn take(
        placement: &Arc<Placement>,
        site: &str,
        has_open_moves: bool,
        found: &NodesState,
    ) -> anyhow::Result<Self> {
        let store = placement.store();
        let last: PersistedState = load_json(&**store, DOCUMENT)?;
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let holder = format!("{:x}-{:x}", std::process::id(), since.as_micros());
        let identity = store.lock_identity();
        let predecessor = last.predecessor(found, identity.as_deref());
        let kept = PersistedState {
            term: last.term.max(found.term) + 1,
            version: last.version + u64::from(has_open_moves),
            holder: holder.clone(),
            store: identity,
        };
        save_json(&**store, DOCUMENT, &kept)?;
        let nodes = placement.topology().iter().flat_map(|topology| topology.nodes()).map(|node| node.id).collect();
        let before = EarlierRouters { predecessor, nodes };
        Ok(Self {
            ownership: Arc::new(FleetOwnership::new(site, kept.term, holder, kept.version, before)),
            placement: Arc::clone(placement),
            kept: Mutex::new(kept),
            beginning: AtomicUsize::new(0),
            beat: AtomicU64::new(0),
            nodes: Mutex::default(),
        })
    }

    /// Ownership state, for components that connect to nodes.
    pub fn seat(&self) -> Arc<FleetOwnership> {
        Arc::clone(&self.ownership)
    }

    /// Raises the version before the location of keys changes, so that existing copies of the state directory become
    /// older. The next records at the nodes contain it.
    pub(crate) fn raise_version(&self) -> Result<(), String> {
        let mut kept = locked(&self.kept);
        let next = PersistedState { version: kept.version + 1, ..kept.clone() };
        save_json(&**self.placement.store(), DOCUMENT, &next)
            .map_err(|error| format!("cannot store the version of the state directory: {error}"))?;
        self.ownership.set_version(next.version);
        *kept = next;
        Ok(())
    }

    /// Prepares a leg between these nodes. On return their records make older copies of the state directory invalid.
    /// The records state that keys are moving until the result is dropped, and afterwards while the slot map has keys
    /// in transit.
    pub(crate) fn leg_begins(
        &self,
        running: &Running,
        nodes: impl IntoIterator<Item = NodeId>,
    ) -> Result<LegStartGuard<'_>, String> {
        self.beginning.fetch_add(1, Ordering::AcqRel);
        let beginning = LegStartGuard(&self.beginning);
        self.raise_version()?;
        let access = running.with(switchyard_router::Router::node_access).ok_or("the router is being stopped")?;
        for node in nodes {
            let access = access.get(&node).ok_or("a node of the move is gone")?;
            self.record(running, node, access).map_err(|why| format!("node {} {why}", access.name))?;
        }
        Ok(beginning)
    }

    /// Renews or creates the record at a node.
    fn record(&self, running: &Running, node: NodeId, access: &NodeAccess) -> Result<(), String> {
        let at = Arc::clone(locked(&self.nodes).entry(node).or_default());
        let mut at = locked(&at);
        let outcome = self.try_mark(running, &mut at, node, access);
        if outcome.is_err() {
            at.connection = None;
        }
        outcome
    }

    fn try_mark(
        &self,
        running: &Running,
        at: &mut OwnershipConnection,
        node: NodeId,
        access: &NodeAccess,
    ) -> Result<(), String> {
        let Connected { run_id, connection, .. } = match &mut at.connection {
            Some(made) if made.access == *access => made,
            other => {
                let name = running
                    .with(|router| router.connection_name("ownership"))
                    .ok_or("is not contacted: the router is stopping")?;
                let mut connection = NodeConnection::open(access, TIMEOUT)?;
                // Name the connection first: a router that takes over ends named connections, and an unnamed one will
                // read the new record.
                let named = connection
                    .call(&["CLIENT", "SETNAME", &name])
                    .map_err(|error| format!("does not answer: {error}"))?;
                if let Some(error) = named.error() {
                    return Err(format!("refuses CLIENT SETNAME: {error}"));
                }
                let server =
                    connection.call(&["INFO", "server"]).map_err(|error| format!("does not answer: {error}"))?.text();
                let run_id =
                    server.lines().find_map(|line| line.strip_prefix("run_id:")).map_or("", str::trim).to_owned();
                other.insert(Connected { access: access.clone(), run_id, connection })
            }
        };
        // A replacement removes an earlier router's text, which the workers must read first.
        if self.ownership.admission(node, run_id) == Admission::Unmet {
            return Err("is not in use by the workers yet".to_owned());
        }
        let answer =
            connection.call(&self.ownership.question()).map_err(|error| format!("does not answer: {error}"))?;
        let standing = self.ownership.check_reply(&access.name, &answer.0);
        if let Some(why) = refusal_reason(standing) {
            return Err(format!("is not ours: {why}"));
        }
        let mut refusal = answer.error();
        if standing != OwnershipStatus::Unmarked {
            let answer = connection
                .call(&self.ownership.replacement(&self.mark_now()))
                .map_err(|error| format!("does not answer: {error}"))?;
            refusal = answer.error();
        }
        // Records are optional, except for a standby.
        if let (Some(why), false) = (&refusal, at.refuses) {
            info!(node = %access.name, reason = why, "node stores no ownership record of its router: no standby can take over (it needs ACL GETUSER and ACL SETUSER)");
        }
        at.refuses = refusal.is_some();
        Ok(())
    }

    /// Present record.
    fn mark_now(&self) -> OwnershipRecord {
        let is_moving = self.beginning.load(Ordering::Acquire) > 0 || self.placement.is_moving();
        OwnershipRecord {
            is_moving,
            beat: self.beat.load(Ordering::Relaxed),
            nodes: self.nodes_with_keys(is_moving),
            ..self.ownership.record()
        }
    }

    /// Names of the nodes that have keys, or are about to get some. Empty before the location of keys is known: a first
    /// start with an unreachable node may start again without it.
    fn nodes_with_keys(&self, is_moving: bool) -> Vec<String> {
        let Some(topology) = self.placement.topology().filter(|_| !self.placement.is_provisional()) else {
            return Vec::new();
        };
        let keepers = topology.nodes_with_keys();
        topology.nodes().filter(|node| is_moving || keepers.contains(&node.id)).map(|node| node.name.clone()).collect()
    }

    /// Records at a node that has left the fleet this router as the last one, without the names of other nodes, so that
    /// the server may start alone.
    fn leave(&self, at: &mut OwnershipConnection) {
        self.leave_mark(at, &self.ownership.record());
    }

    /// Replaces the record at a node with a last one, if it is still ours.
    fn leave_mark(&self, at: &mut OwnershipConnection, mark: &OwnershipRecord) {
        let Some(Connected { access, connection, .. }) = &mut at.connection else { return };
        let replaced = connection.call(&self.ownership.question()).and_then(|answer| {
            match self.ownership.check_reply(&access.name, &answer.0) {
                OwnershipStatus::Ours => connection.call(&self.ownership.replacement(mark)).map(drop),
                _ => Ok(()),
            }
        });
        if let Err(error) = replaced {
            debug!(node = %access.name, %error, "the last ownership record of this router cannot be written to a node");
        }
    }

    /// Records at all nodes that this router has stopped, so that its successor does not wait for its hot copies. Call
    /// it after the last worker has ended.
    fn leave_stopped(&self) {
        let mark = OwnershipRecord { is_stopped: true, ..self.mark_now() };
        let nodes: Vec<_> = locked(&self.nodes).values().cloned().collect();
        std::thread::scope(|scope| {
            for at in &nodes {
                let mark = &mark;
                scope.spawn(move || self.leave_mark(&mut locked(at), mark));
            }
        });
    }

    fn renew(&self, running: &Running) {
        let Some(nodes) = running.with(switchyard_router::Router::node_access) else { return };
        self.beat.fetch_add(1, Ordering::Relaxed);
        let leaving: Vec<_> = {
            let mut known = locked(&self.nodes);
            let gone: Vec<NodeId> = known.keys().filter(|id| !nodes.contains_key(id)).copied().collect();
            gone.iter().filter_map(|id| known.remove(id)).collect()
        };
        leaving.iter().for_each(|at| self.leave(&mut locked(at)));
        for (id, access) in nodes {
            if let Err(why) = self.record(running, id, &access) {
                debug!(node = %access.name, reason = why, "the ownership record of this router cannot be renewed at a node");
            }
        }
    }
}

/// The thread that renews records.
pub struct OwnershipThread {
    stop: mpsc::Sender<()>,
    thread: JoinHandle<()>,
    seats: Arc<Ownerships>,
}

impl OwnershipThread {
    /// Starts the thread. The router must be serving.
    pub fn start(seats: Arc<Ownerships>, running: Arc<Running>) -> anyhow::Result<(Self, Replaced)> {
        let (stop, stopped) = mpsc::channel();
        let (tell, replaced) = tokio::sync::mpsc::channel(1);
        let threads = running.threads().clone();
        let of_thread = Arc::clone(&seats);
        let thread = threads
            .spawn("ownership", move || {
                let seats = of_thread;
                loop {
                    seats.renew(&running);
                    if let Some(why) = seats.ownership.replaced() {
                        // Sending fails if the router is stopping.
                        let _ = tell.try_send(why.to_owned());
                        return;
                    }
                    if !matches!(stopped.recv_timeout(PERIOD), Err(RecvTimeoutError::Timeout)) {
                        return;
                    }
                }
            })
            .context("cannot start a thread")?;
        Ok((Self { stop, thread, seats }, replaced))
    }

    /// Ends the thread. If the workers have ended, records at the nodes that the router has stopped. A node that does
    /// not reply delays this by at most three times [`TIMEOUT`].
    pub fn stop(self, have_workers_ended: bool) {
        drop(self.stop);
        if have_workers_ended {
            self.seats.leave_stopped();
        }
        if self.thread.is_finished() {
            let _ = self.thread.join();
        }
    }
}

/// State of the nodes before the start.
#[derive(Debug)]
pub struct NodesState {
    /// Highest term of a record.
    term: u64,
}

/// The state directory must not serve these nodes now. Retrying would not help.
#[derive(Debug)]
pub struct Outdated(String);

impl std::fmt::Display for Outdated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Outdated {}

/// Reason why a standby waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Waiting {
    /// The state directory is in use by another process.
    #[default]
    Directory,
    /// The nodes are served by another router.
    Router,
    /// Too few nodes are reachable to know whether another router serves them.
    CutOff {
        /// Number of reachable nodes.
        reached: usize,
        /// Number of all nodes.
        nodes: usize,
    },
}

impl std::fmt::Display for Waiting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Directory => f.write_str("waits for the state directory"),
            Self::Router => f.write_str("another router serves the nodes"),
            Self::CutOff { reached, nodes } => {
                write!(f, "only {reached} of {nodes} nodes can be reached; more than half must be")
            }
        }
    }
}

/// Pauses a standby for a period. Returns false if the process must stop.
pub type Wait<'a> = &'a mut dyn FnMut(Waiting, Duration) -> bool;

/// Waits until no other process uses the state directory. `None` if the process must stop.
pub fn wait_for_directory<T>(
    open: impl Fn() -> anyhow::Result<T>,
    with: Standby,
    wait: Wait<'_>,
) -> anyhow::Result<Option<T>> {
    let mut told = false;
    loop {
        match open() {
            Err(error) if matches!(error.downcast_ref(), Some(StoreError::Locked { .. })) => {
                if !std::mem::replace(&mut told, true) {
                    let hint = match with {
                        Standby::Shared => "",
                        Standby::Copy => {
                            ". If that router is the active one of this standby, the directory is not a copy: use --standby shared"
                        }
                    };
                    info!("standby: waits until the state directory is free: {error}{hint}");
                }
            }
            other => return other.map(Some),
        }
        if !wait(Waiting::Directory, DIRECTORY_PERIOD) {
            return Ok(None);
        }
    }
}

/// Refuses a state directory older than the one that last served the nodes. A standby first waits until no other router
/// serves them; `None` if the process must stop.
pub fn look(
    store: &RedbStore,
    directory: &Path,
    nodes: &[NodeAddress],
    standby: Option<(Standby, Wait<'_>)>,
) -> anyhow::Result<Option<NodesState>> {
    let kept: PersistedState = load_json(store, DOCUMENT)?;
    let Some(site) = Ledger::site_in(store)? else {
        let has_map = store.load_topology()?.is_some();
        match standby.as_ref().map(|(with, _)| *with) {
            None => {}
            // Made by `recover`. The lock ensures that only this process uses it.
            Some(Standby::Shared) if has_map => {}
            Some(Standby::Copy) if has_map => bail!(
                "the state directory {} has a slot map that no router has used yet, as `switchyard recover` makes it: start the first router with it, \
                 without --standby, and give the standby a copy then (docs/high-availability.md)",
                directory.display()
            ),
            // An unmounted volume also appears as an empty directory.
            Some(_) => bail!(
                "the state directory {} is empty: a standby needs that of the active router, or a copy. Check that its volume is mounted; the very \
                 first start of a fleet is without --standby (docs/high-availability.md)",
                directory.display()
            ),
        }
        return Ok(Some(NodesState { term: 0 }));
    };
    let mut lookout = StandbyProbe { site, nodes: Vec::new() };
    for node in nodes {
        let mut access = node.access();
        if access.address.is_none() {
            access.address = store.load_primary(&node.name)?.map(|record| record.primary);
        }
        lookout.nodes.push((access, None));
    }
    let mut looks = lookout.look();
    if let Some((standby, wait)) = standby {
        let start = Instant::now();
        let mut watch = StandbyMonitor::new(nodes.len());
        let mut last = None;
        loop {
            check(&looks, &kept, directory, nodes)?;
            if let Some((Err(why), node)) = looks.iter().zip(nodes).find(|(look, _)| look.is_err()) {
                bail!(
                    "node {} does not report which router serves it, so a standby cannot take over: {why}. Allow CLIENT, ACL GETUSER and ACL SETUSER to Switchyard's user there",
                    node.name
                );
            }
            let now_us = start.elapsed().as_micros() as u64;
            for (at, look) in looks.iter().enumerate() {
                if let Ok(look) = look {
                    watch.observe(at, look.clone(), now_us);
                }
            }
            let turn = watch.turn(now_us);
            if last != Some(turn) {
                match turn {
                    TakeoverDecision::Wait => info!("standby: waits until no other router serves the nodes"),
                    TakeoverDecision::CutOff { reached } => {
                        warn!(
                            "standby: only {reached} of {} nodes can be reached; more than half must be. If the others are lost together with the router, stop \
                             this standby and start it without --standby",
                            nodes.len()
                        )
                    }
                    TakeoverDecision::Now => info!("standby: no other router serves the nodes; takes over"),
                }
                last = Some(turn);
            }
            let waiting = match turn {
                TakeoverDecision::Now => break,
                TakeoverDecision::Wait => Waiting::Router,
                TakeoverDecision::CutOff { reached } => Waiting::CutOff { reached, nodes: nodes.len() },
            };
            if !wait(waiting, PERIOD) {
                return Ok(None);
            }
            looks = lookout.look();
        }
        if standby == Standby::Copy && read_records(&looks).any(|mark| mark.is_moving) {
            bail!(Outdated(format!(
                "keys were moving when the nodes were last served, and only the state directory itself records where they are, not the copy in {}: start \
                 with the state directory of the router that served them",
                directory.display()
            )));
        }
    }
    check(&looks, &kept, directory, nodes)?;
    Ok(Some(NodesState { term: read_records(&looks).map(|mark| mark.term).max().unwrap_or(0) }))
}

/// State of a node, or the reason why it keeps no records.
type ProbeResult = Result<Observation, String>;

fn read_records(looks: &[ProbeResult]) -> impl Iterator<Item = &OwnershipRecord> {
    looks.iter().filter_map(|look| match look {
        Ok(Observation::Seen { mark, .. }) => mark.as_ref(),
        _ => None,
    })
}

fn check(looks: &[ProbeResult], kept: &PersistedState, directory: &Path, nodes: &[NodeAddress]) -> anyhow::Result<()> {
    for (look, node) in looks.iter().zip(nodes) {
        if let Ok(Observation::Seen { mark: Some(mark), .. }) = look
            && mark.version > kept.version
        {
            bail!(Outdated(format!(
                "the state directory {} is too old: it has version {}, and node {} was served under version {}. Keys that have moved since would not be \
                 found. Start with the newest state directory; if that is lost, see `switchyard recover --help`",
                directory.display(),
                kept.version,
                node.name,
                mark.version
            )));
        }
    }
    Ok(())
}

/// Repeatedly checks nodes.
struct StandbyProbe {
    site: String,
    nodes: Vec<(NodeAccess, Option<NodeConnection>)>,
}

impl StandbyProbe {
    fn look(&mut self) -> Vec<ProbeResult> {
        let site = self.site.as_str();
        std::thread::scope(|scope| {
            let asked: Vec<_> = self
                .nodes
                .iter_mut()
                .map(|(access, connection)| scope.spawn(move || look_at(access, connection, site)))
                .collect();
            asked.into_iter().map(|thread| thread.join().unwrap_or(Ok(Observation::Unreachable))).collect()
        })
    }
}

fn look_at(access: &NodeAccess, connection: &mut Option<NodeConnection>, site: &str) -> Result<Observation, String> {
    let mut ask = || -> Result<Result<(Answer, Answer), String>, String> {
        let connection = match &mut *connection {
            Some(connection) => connection,
            none => {
                let mut opened = NodeConnection::open(access, TIMEOUT)?;
                // Without connection names, the other router's connections could not be found.
                let named =
                    opened.call(&["CLIENT", "SETNAME", "switchyard-standby"]).map_err(|error| error.to_string())?;
                if let Some(error) = named.error() {
                    return Ok(Err(error));
                }
                none.insert(opened)
            }
        };
        let mark = connection.call(&query_of_site(site)).map_err(|error| error.to_string())?;
        let list = connection.call(&["CLIENT", "LIST"]).map_err(|error| error.to_string())?;
        Ok(Ok((mark, list)))
    };
    match ask() {
        Err(why) => {
            debug!(node = %access.name, reason = why, "node cannot be checked");
            *connection = None;
            Ok(Observation::Unreachable)
        }
        Ok(Err(refusal)) => Err(refusal),
        Ok(Ok((mark, list))) => {
            let mark = parse_record(&mark.0)?;
            list.error().map_or(Ok(()), Err)?;
            Ok(Observation::Seen { mark, connections: foreign_connections(&list.text(), site, "").len() })
        }
    }
}
