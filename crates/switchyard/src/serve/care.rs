//! Keeps what nodes have in common the same on each: functions, which a node that joins or returns empty does not have.
//!
//! It also renews the check of scripts in libraries that an older router has stored, asks nodes whether they keep their data on disk, and has the
//! state directory remember their processes.
//!
//! A thread of its own, because it asks nodes and waits. It acts only where a node has no functions at all and the others agree on
//! theirs; whatever else differs is somebody's decision, and is told. Scripts need no such care: the workers give a node what it lacks
//! when it is called.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context;
use switchyard_control::store::RedbStore;
use switchyard_policy::topology::NodeId;
use switchyard_router::{Link, NodeAccess, Router, renewed_library};
use tracing::{info, warn};

use super::fleet::Fleet;
use super::running::Running;
use crate::doctor::connection::NodeConnection;
use crate::doctor::holdings::ANSWER_MAX;
use crate::doctor::{Functions, functions};

/// How often it looks whether a node's process is another one.
const PERIOD: Duration = Duration::from_millis(250);

/// Of so many looks, one asks the nodes whether they keep their data on disk.
const PERSISTENCE_ONE_IN: u32 = 4;

/// How long a node may take to say that: others wait behind it.
const PERSISTENCE_PATIENCE: Duration = Duration::from_secs(1);

/// How long a node may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// The running thread.
pub(super) struct Care {
    stop: mpsc::Sender<()>,
    thread: JoinHandle<()>,
    remember: Box<dyn Fn()>,
}

impl Care {
    /// Starts looking after the nodes of the router.
    pub(super) fn start(running: Arc<Running>, fleet: Arc<Fleet>, store: Arc<RedbStore>) -> anyhow::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let remember = {
            let (running, fleet, store) = (Arc::clone(&running), Arc::clone(&fleet), Arc::clone(&store));
            Box::new(move || fleet.note(&store, &running))
        };
        let thread = std::thread::Builder::new()
            .name("care".to_owned())
            .spawn(move || {
                let mut known = BTreeMap::new();
                let mut persistence = Persistence::default();
                let mut looks = 0_u32;
                while matches!(stopped.recv_timeout(PERIOD), Err(RecvTimeoutError::Timeout)) {
                    looks = looks.wrapping_add(1);
                    if looks.is_multiple_of(PERSISTENCE_ONE_IN) {
                        persistence.ask(&running);
                    }
                    fleet.note(&store, &running);
                    look_after(&running, &mut known);
                }
            })
            .context("cannot start a thread")?;
        Ok(Self { stop, thread, remember })
    }

    /// Ends it, while the router still serves: the state directory then knows what the router knows. A question to a node that is under way is left behind.
    pub(super) fn stop(self) {
        (self.remember)();
        drop(self.stop);
        if self.thread.is_finished() {
            let _ = self.thread.join();
        }
    }
}

/// Connections on which nodes are asked whether they keep their data on disk, each with the process at its end.
#[derive(Default)]
struct Persistence(BTreeMap<NodeId, (NodeAccess, NodeConnection, String)>);

impl Persistence {
    /// `CONFIG SET` at a node changes it while its process runs, and then a node that comes back empty has lost what it should have kept.
    fn ask(&mut self, running: &Running) {
        let Some((status, access)) = running.with(|router| (router.status(), router.node_access())) else { return };
        let up: BTreeMap<NodeId, &NodeAccess> =
            status.nodes.iter().filter(|node| node.link == Link::Up).filter_map(|node| Some((node.id, access.get(&node.id)?))).collect();
        self.0.retain(|id, (access, ..)| up.get(id) == Some(&&*access));
        for (id, access) in up {
            if !self.0.contains_key(&id) {
                let Ok(connection) = NodeConnection::open(access, PERSISTENCE_PATIENCE) else { continue };
                let mut connection = connection.with_answers_up_to(ANSWER_MAX);
                let Ok(info) = connection.ask(&["INFO", "server"]) else { continue };
                let run_id = info.text().lines().find_map(|line| line.trim().strip_prefix("run_id:").map(str::to_owned)).unwrap_or_default();
                self.0.insert(id, (access.clone(), connection, run_id));
            }
            let Some((_, connection, run_id)) = self.0.get_mut(&id) else { continue };
            match persists(connection) {
                Ok(persists) => drop(running.with(|router: &Router| router.note_persistence(id, run_id, persists))),
                // Connected anew with the next question.
                Err(_) => drop(self.0.remove(&id)),
            }
        }
    }
}

/// Whether the node keeps its data on disk. Where it does not say, it is taken for one that does not.
fn persists(connection: &mut NodeConnection) -> std::io::Result<bool> {
    let appends = connection.ask(&["INFO", "persistence"])?.text().lines().any(|line| line.trim() == "aof_enabled:1");
    let save = connection.ask(&["CONFIG", "GET", "save"])?;
    Ok(appends || save.error().is_none() && save.items().get(1).is_some_and(|save| !save.text().is_empty()))
}

/// Looks whether a node is a new process; then, at their functions.
fn look_after(running: &Running, known: &mut BTreeMap<NodeId, String>) {
    let Some((status, access)) = running.with(|router| (router.status(), router.node_access())) else { return };
    let up: BTreeMap<NodeId, String> =
        status.nodes.iter().filter(|n| n.link == Link::Up).filter_map(|n| Some((n.id, n.run_id.clone()?))).collect();
    let changed = up.iter().any(|(id, run_id)| known.get(id) != Some(run_id));
    if !changed {
        return;
    }
    let nodes: Vec<&NodeAccess> = up.keys().filter_map(|id| access.get(id)).collect();
    match share_functions(&nodes) {
        Ok(()) => *known = up,
        // Tried again with the next look.
        Err(why) => warn!("cannot compare the functions of the nodes: {why}"),
    }
}

/// Puts the present check before libraries that an older router has put its own before. True where there were any.
fn renew(connection: &mut NodeConnection, found: Option<&Functions>, node: &NodeAccess) -> Result<bool, String> {
    let mut any = false;
    for (name, code) in found.iter().flat_map(|found| &found.code) {
        match renewed_library(code.as_bytes()) {
            None => {}
            Some(Ok(code)) => {
                let answer = connection
                    .ask(&[&b"FUNCTION"[..], b"LOAD", b"REPLACE", &code])
                    .map_err(|error| format!("node {}: {error}", node.name))?;
                answer.error().map_or(Ok(()), |error| Err(format!("node {}: {error}", node.name)))?;
                any = true;
            }
            Some(Err(why)) => warn!("library {name} of node {} keeps the check of an older router: {why}", node.name),
        }
    }
    Ok(any)
}

/// Gives the functions of the others to nodes that have none.
fn share_functions(nodes: &[&NodeAccess]) -> Result<(), String> {
    let mut having: Vec<(&NodeAccess, Functions)> = Vec::new();
    let mut lacking: Vec<&NodeAccess> = Vec::new();
    for node in nodes {
        let mut connection = NodeConnection::open(node, PATIENCE).map_err(|why| format!("node {} {why}", node.name))?;
        let mut found = functions(&mut connection);
        if renew(&mut connection, found.as_ref(), node)? {
            found = functions(&mut connection);
        }
        match found {
            // A version without functions, or no right to see them: `switchyard doctor` tells.
            None => {}
            Some(found) if found.code.is_empty() => lacking.push(node),
            Some(found) => having.push((node, found)),
        }
    }
    let Some((source, first)) = having.first() else { return Ok(()) };
    if let Some((other, _)) = having.iter().find(|(_, found)| found.code != first.code) {
        warn!(
            "the functions of nodes {} and {} differ: load the libraries again through the router (FUNCTION LOAD REPLACE); \
             `switchyard doctor` says which",
            source.name, other.name
        );
        return Ok(());
    }
    if lacking.is_empty() {
        return Ok(());
    }
    let ask = |node: &NodeAccess, args: &[&[u8]]| {
        let mut connection = NodeConnection::open(node, PATIENCE).map_err(|why| format!("node {} {why}", node.name))?;
        let answer = connection.ask(args).map_err(|error| format!("node {}: {error}", node.name))?;
        answer.error().map_or(Ok(answer), |error| Err(format!("node {}: {error}", node.name)))
    };
    let dump = ask(source, &[b"FUNCTION", b"DUMP"])?;
    for node in lacking {
        // Without REPLACE: whoever loads one at the same moment wins.
        match ask(node, &[b"FUNCTION", b"RESTORE", dump.bytes()]) {
            Ok(_) => info!("node {} had no functions: it was given those of node {}", node.name, source.name),
            Err(why) => warn!("functions of node {} cannot be given to another: {why}", source.name),
        }
    }
    Ok(())
}
