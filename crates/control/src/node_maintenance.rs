//! Keeps function libraries equal on all nodes, because a node that joins or returns empty lacks them.
//!
//! Also renews the script check in libraries stored by an older router, stores the nodes' processes in the state
//! directory, removes copies that moves have left, and, on request, misplaced keys.
//!
//! A thread of its own, because it queries nodes and waits. It copies functions only to a node without any, and only if
//! the other nodes agree; other differences are left to an operator, and logged. Scripts need no such copy: the workers
//! load a missing script when it is called.
//!
//! During a copy no client can change functions ([`switchyard_router::CopyTurn`]), because functions deleted or
//! replaced in the meantime would reappear at one node. The lock is held until the copying commands are answered or the
//! end of their connection is confirmed, even for commands of a mover that has ended since.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use switchyard_policy::migration::Process;
use switchyard_policy::topology::NodeId;
use switchyard_resp::reply;
use switchyard_router::{Link, NodeAccess, Repeating};
use tracing::{debug, info, warn};

use crate::moves::{CopyRemoval, MisplacedKeys, Moves};
use crate::nodes::{Functions, NodeConnection, functions};
use crate::processes::Processes;
use crate::running::Running;
use crate::store::RedbStore;

/// Interval between checks for new server processes.
const PERIOD: Duration = Duration::from_millis(250);

/// Timeout for ending a connection at a node. Short, because other nodes wait.
const KILL_TIMEOUT: Duration = Duration::from_secs(1);

/// Timeout for a node's reply.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The running thread.
pub struct NodeMaintenance {
    thread: Repeating,
    store_processes: Box<dyn Fn()>,
}

impl NodeMaintenance {
    /// Starts the maintenance of the router's nodes. `strays_in`: database whose misplaced keys are removed.
    pub fn start(
        running: Arc<Running>,
        processes: Arc<Processes>,
        store: Arc<RedbStore>,
        moves: Arc<Moves>,
        misplaced_in: Option<u32>,
    ) -> anyhow::Result<Self> {
        let threads = running.threads().clone();
        let remember = {
            let (running, processes, store) = (Arc::clone(&running), Arc::clone(&processes), Arc::clone(&store));
            Box::new(move || processes.note(&store, &running))
        };
        let mut known = ComparedNodes::default();
        let mut copies = CopyRemoval::default();
        let mut misplaced = misplaced_in.map(MisplacedKeys::of);
        let body = move || {
            processes.note(&store, &running);
            end_unanswered_connections(&running);
            compare_functions(&running, &mut known);
            moves.remove_copies(&mut copies);
            misplaced.iter_mut().for_each(|misplaced| moves.remove_misplaced(misplaced));
            ControlFlow::Continue(())
        };
        let thread = threads.repeat("maintenance", || PERIOD, body).context("cannot start a thread")?;
        Ok(Self { thread, store_processes: remember })
    }

    /// Ends the thread while the router still serves, after storing the router's knowledge in the state directory. A
    /// query in progress is abandoned.
    pub fn stop(self) {
        (self.store_processes)();
        self.thread.stop();
    }
}

/// Reason why functions could not be copied.
enum CopyFailure {
    /// Nothing is in flight.
    Failed(String),
    /// A command sent to this node, on this connection, may still be executed.
    Left { why: String, node: NodeId, connection: Process },
}

impl From<String> for CopyFailure {
    fn from(why: String) -> Self {
        CopyFailure::Failed(why)
    }
}

/// Ends connections with unanswered commands that store functions.
fn end_unanswered_connections(running: &Running) {
    let Some((left, access)) = running.with(|router| (router.unconfirmed_functions(), router.node_access())) else {
        return;
    };
    for (node, connection) in left {
        // A node that has left the fleet needs no confirmation.
        if access.get(&node).is_none_or(|access| has_ended(access, &connection)) {
            running.with(|router| router.note_confirmed_connection(node, connection));
        }
    }
}

/// Whether no command sent on a connection can be executed any more: the node confirms it, or is another process.
fn has_ended(node: &NodeAccess, left: &Process) -> bool {
    let ended = || -> Option<bool> {
        let mut connection = NodeConnection::open(node, KILL_TIMEOUT).ok()?;
        if run_id(&mut connection)? != left.run_id {
            return Some(true);
        }
        let answer = connection.call(&["CLIENT", "KILL", "ID", &left.client_id.to_string()]).ok()?;
        Some(answer.error().is_none_or(|error| error.starts_with("ERR No such")))
    };
    ended().unwrap_or(false)
}

/// Returns the `run_id` of the process.
fn run_id(connection: &mut NodeConnection) -> Option<String> {
    let info = connection.call(&["INFO", "server"]).ok()?.text();
    info.lines().find_map(|line| line.strip_prefix("run_id:")).map(|run_id| run_id.trim().to_owned())
}

/// Nodes at the last comparison of functions.
#[derive(Default)]
struct ComparedNodes {
    processes: BTreeMap<NodeId, String>,
    /// Whether there was a single node, whose functions may use every key.
    was_one: bool,
    /// Placement rules that the checks of the libraries were made for.
    rules: (u64, bool),
}

/// Compares functions if a node is a new process, if the number of nodes has changed between one and several, or if the
/// placement rules have changed.
fn compare_functions(running: &Running, known: &mut ComparedNodes) {
    let looked =
        running.with(|router| (router.status(), router.node_access(), router.is_one_node(), router.rules_in_force()));
    let Some((status, access, is_one, rules)) = looked else { return };
    let up: BTreeMap<NodeId, String> =
        status.nodes.iter().filter(|n| n.link == Link::Up).filter_map(|n| Some((n.id, n.run_id.clone()?))).collect();
    let changed = is_one != known.was_one
        || rules != known.rules
        || up.iter().any(|(id, run_id)| known.processes.get(id) != Some(run_id));
    // Skip this while a command that stores functions may still be executed at a node.
    if !changed
        || running.with(|router| router.unconfirmed_functions().iter().all(|(node, _)| !up.contains_key(node)))
            != Some(true)
    {
        return;
    }
    // Connect before taking the turn, so that clients that change functions do not wait for an unresponsive node.
    let mut nodes =
        match up.keys().filter_map(|id| Some((*id, access.get(id)?))).map(meet).collect::<Result<Vec<_>, _>>() {
            Ok(nodes) => nodes,
            Err(why) => {
                debug!("functions of the nodes are compared later: {why}");
                return;
            }
        };
    // Another copy or a slow change is in progress. The next call tries again.
    let Some(turn) = running.with(|router| router.begin_copy_of_functions()).flatten() else { return };
    let until = Instant::now() + TIMEOUT;
    while !turn.is_alone() {
        if Instant::now() >= until {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let why = match share_functions(running, &mut nodes) {
        Ok(()) => {
            *known = ComparedNodes { processes: up, was_one: is_one, rules };
            return;
        }
        Err(CopyFailure::Failed(why)) => why,
        Err(CopyFailure::Left { why, node, connection }) => {
            running.with(|router| router.note_unconfirmed_functions(node, connection, turn));
            why
        }
    };
    // The next call tries again.
    warn!("cannot compare the functions of the nodes: {why}");
}

/// Stores functions at a node. Returns the text of its error.
fn store(
    connection: &mut NodeConnection,
    id: NodeId,
    node: &NodeAccess,
    args: &[&[u8]],
) -> Result<Option<String>, CopyFailure> {
    let failed = |why: &str| CopyFailure::Failed(format!("node {}: {why}", node.name));
    // The id is needed to confirm the connection's end.
    let client_id = connection.call(&["CLIENT", "ID"]).map_err(|error| failed(&error.to_string()))?;
    let client_id = reply::integer(&client_id.0).and_then(|number| u64::try_from(number).ok());
    let client_id = client_id.ok_or_else(|| failed("it does not answer CLIENT ID"))?;
    let run_id = run_id(connection).ok_or_else(|| failed("its INFO names no run_id"))?;
    match connection.call(args) {
        Ok(answer) => Ok(answer.error()),
        Err(error) => Err(CopyFailure::Left {
            why: format!("node {}: {error}", node.name),
            node: id,
            connection: Process { run_id, client_id },
        }),
    }
}

/// Adds the script check to libraries that lack it or have an older one, and removes it from a single node. Returns
/// whether any library changed.
fn renew(
    running: &Running,
    connection: &mut NodeConnection,
    found: Option<&Functions>,
    id: NodeId,
    node: &NodeAccess,
) -> Result<bool, CopyFailure> {
    let mut any = false;
    for (name, code) in found.iter().flat_map(|found| &found.code) {
        match running.with(|router| router.renewed_library(code.as_bytes())).flatten() {
            None => {}
            Some(Ok(code)) => {
                if let Some(error) = store(connection, id, node, &[b"FUNCTION", b"LOAD", b"REPLACE", &code])? {
                    return Err(format!("node {}: {error}", node.name).into());
                }
                any = true;
            }
            Some(Err(why)) => {
                warn!(
                    "library {name} of node {} cannot be restricted to the keys that its callers name: {why}",
                    node.name
                )
            }
        }
    }
    Ok(any)
}

/// A node with a connection to it.
type ConnectedNode<'a> = (NodeId, &'a NodeAccess, NodeConnection);

/// Connects to a node that replies.
fn meet((id, node): (NodeId, &NodeAccess)) -> Result<ConnectedNode<'_>, String> {
    let mut connection = NodeConnection::open(node, TIMEOUT).map_err(|why| format!("node {} {why}", node.name))?;
    run_id(&mut connection).ok_or_else(|| format!("node {} does not answer", node.name))?;
    Ok((id, node, connection))
}

/// Copies the functions of the other nodes to nodes without any.
fn share_functions(running: &Running, nodes: &mut [ConnectedNode<'_>]) -> Result<(), CopyFailure> {
    let (mut having, mut lacking) = (Vec::new(), Vec::new());
    for (id, node, connection) in nodes {
        let mut found = functions(connection);
        if renew(running, connection, found.as_ref(), *id, node)? {
            found = functions(connection);
        }
        match found {
            // A version without functions, or a missing permission, which `switchyard doctor` reports.
            None => {}
            Some(found) if found.code.is_empty() => lacking.push((*id, node, connection)),
            Some(found) => having.push((node, connection, found)),
        }
    }
    let mut having = having.into_iter();
    let Some((source, connection, first)) = having.next() else { return Ok(()) };
    if let Some((other, ..)) = having.find(|(.., found)| found.code != first.code) {
        warn!(
            "the functions of nodes {} and {} differ: load the libraries again through the router (FUNCTION LOAD REPLACE); \
             `switchyard doctor` lists them",
            source.name, other.name
        );
        return Ok(());
    }
    if lacking.is_empty() {
        return Ok(());
    }
    let dump = connection.call(&["FUNCTION", "DUMP"]).map_err(|error| format!("node {}: {error}", source.name))?;
    if let Some(error) = dump.error() {
        return Err(format!("node {}: {error}", source.name).into());
    }
    for (id, node, connection) in lacking {
        // Without REPLACE, so that a library loaded past the router at the same moment is retained.
        match store(connection, id, node, &[b"FUNCTION", b"RESTORE", dump.bytes()])? {
            None => info!("node {} had no functions: those of node {} were copied to it", node.name, source.name),
            Some(why) => warn!("functions of node {} cannot be copied to node {}: {why}", source.name, node.name),
        }
    }
    Ok(())
}
