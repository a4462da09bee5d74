//! Keeps what nodes have in common the same on each: functions, which a node that joins or returns empty does not have.
//!
//! It also renews the check of scripts in libraries that an older router has stored.
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
use switchyard_policy::topology::NodeId;
use switchyard_router::{Link, NodeAccess, renewed_library};
use tracing::{info, warn};

use super::running::Running;
use crate::doctor::connection::NodeConnection;
use crate::doctor::{Functions, functions};

/// How often it looks whether a node's process is another one.
const PERIOD: Duration = Duration::from_millis(250);

/// How long a node may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// The running thread.
pub(super) struct Care {
    stop: mpsc::Sender<()>,
    thread: JoinHandle<()>,
}

impl Care {
    /// Starts looking after the nodes of the router.
    pub(super) fn start(running: Arc<Running>) -> anyhow::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("care".to_owned())
            .spawn(move || {
                let mut known = BTreeMap::new();
                while matches!(stopped.recv_timeout(PERIOD), Err(RecvTimeoutError::Timeout)) {
                    look_after(&running, &mut known);
                }
            })
            .context("cannot start a thread")?;
        Ok(Self { stop, thread })
    }

    /// Ends it. A question to a node that is under way is left behind.
    pub(super) fn stop(self) {
        drop(self.stop);
        if self.thread.is_finished() {
            let _ = self.thread.join();
        }
    }
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
