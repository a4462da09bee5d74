//! Keeps what nodes have in common the same on each: functions, which a node that joins or returns empty does not have.
//!
//! It also renews the check of scripts in libraries that an older router has stored, and has the state directory
//! remember the nodes' processes. And it removes copies that moves have left, and strays where that is asked for.
//!
//! A thread of its own, because it asks nodes and waits. It acts only where a node has no functions at all and the
//! others agree on theirs; whatever else differs is somebody's decision, and is told. Scripts need no such care: the
//! workers give a node what it lacks when it is called.
//!
//! While somebody copies them, no client changes functions ([`switchyard_router::CopyTurn`]): what was deleted or
//! replaced meanwhile would come back at one node. That holds until what was asked is answered, or the end of its
//! connection is confirmed: also what a mover has asked, which may be gone by then.

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

use crate::moves::{Copies, Moves, Strays};
use crate::nodes::{Functions, NodeConnection, functions};
use crate::processes::Processes;
use crate::running::Running;
use crate::store::RedbStore;

/// How often it looks whether a node's process is another one.
const PERIOD: Duration = Duration::from_millis(250);

/// A node may take so long to end a connection. Others wait behind it.
const SHORT_PATIENCE: Duration = Duration::from_secs(1);

/// How long a node may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// The running thread.
pub struct NodeMaintenance {
    thread: Repeating,
    remember: Box<dyn Fn()>,
}

impl NodeMaintenance {
    /// Starts looking after the nodes of the router. `strays_in`: the database whose strays are removed.
    pub fn start(
        running: Arc<Running>,
        processes: Arc<Processes>,
        store: Arc<RedbStore>,
        moves: Arc<Moves>,
        strays_in: Option<u32>,
    ) -> anyhow::Result<Self> {
        let threads = running.threads().clone();
        let remember = {
            let (running, processes, store) = (Arc::clone(&running), Arc::clone(&processes), Arc::clone(&store));
            Box::new(move || processes.note(&store, &running))
        };
        let mut known = Known::default();
        let mut copies = Copies::default();
        let mut strays = strays_in.map(Strays::of);
        let body = move || {
            processes.note(&store, &running);
            end_what_is_left(&running);
            look_after(&running, &mut known);
            moves.remove_copies(&mut copies);
            strays.iter_mut().for_each(|strays| moves.remove_strays(strays));
            ControlFlow::Continue(())
        };
        let thread = threads.repeat("care", || PERIOD, body).context("cannot start a thread")?;
        Ok(Self { thread, remember })
    }

    /// Ends it, while the router still serves: the state directory then knows what the router knows. A question to a
    /// node that is under way is left behind.
    pub fn stop(self) {
        (self.remember)();
        self.thread.stop();
    }
}

/// Why functions could not be copied.
enum CopyFailure {
    /// Nothing is under way.
    Failed(String),
    /// What was asked of this node, on this connection, may still be done.
    Left { why: String, node: NodeId, connection: Process },
}

impl From<String> for CopyFailure {
    fn from(why: String) -> Self {
        CopyFailure::Failed(why)
    }
}

/// Ends the connections on which functions were to be stored, and that were not answered.
fn end_what_is_left(running: &Running) {
    let Some((left, access)) = running.with(|router| (router.functions_left(), router.node_access())) else { return };
    for (node, connection) in left {
        // Of a node that is none of the router's any more nobody hears.
        if access.get(&node).is_none_or(|access| is_over(access, &connection)) {
            running.with(|router| router.connection_ended(node, connection));
        }
    }
}

/// Whether nothing can come any more of what was asked on a connection: the node confirms it, or is another process.
fn is_over(node: &NodeAccess, left: &Process) -> bool {
    let ended = || -> Option<bool> {
        let mut connection = NodeConnection::open(node, SHORT_PATIENCE).ok()?;
        if run_id(&mut connection)? != left.run_id {
            return Some(true);
        }
        let answer = connection.call(&["CLIENT", "KILL", "ID", &left.client_id.to_string()]).ok()?;
        Some(answer.error().is_none_or(|error| error.starts_with("ERR No such")))
    };
    ended().unwrap_or(false)
}

/// The process that answers.
fn run_id(connection: &mut NodeConnection) -> Option<String> {
    let info = connection.call(&["INFO", "server"]).ok()?.text();
    info.lines().find_map(|line| line.strip_prefix("run_id:")).map(|run_id| run_id.trim().to_owned())
}

/// The nodes whose functions were looked at last.
#[derive(Default)]
struct Known {
    processes: BTreeMap<NodeId, String>,
    /// There was one node, whose functions may use every key.
    was_one: bool,
}

/// Looks whether a node is a new process, or whether one node has become several or several one; then, at their
/// functions.
fn look_after(running: &Running, known: &mut Known) {
    let looked = running.with(|router| (router.status(), router.node_access(), router.is_one_node()));
    let Some((status, access, is_one)) = looked else { return };
    let up: BTreeMap<NodeId, String> =
        status.nodes.iter().filter(|n| n.link == Link::Up).filter_map(|n| Some((n.id, n.run_id.clone()?))).collect();
    let changed = is_one != known.was_one || up.iter().any(|(id, run_id)| known.processes.get(id) != Some(run_id));
    // Nothing is read at a node that may still store something, and it is given nothing.
    if !changed
        || running.with(|router| router.functions_left().iter().all(|(node, _)| !up.contains_key(node))) != Some(true)
    {
        return;
    }
    // Before the turn is taken: clients that change functions do not wait for a node that does not answer.
    let mut nodes =
        match up.keys().filter_map(|id| Some((*id, access.get(id)?))).map(meet).collect::<Result<Vec<_>, _>>() {
            Ok(nodes) => nodes,
            Err(why) => {
                debug!("functions of the nodes are compared later: {why}");
                return;
            }
        };
    // Else somebody copies, or a change takes long: tried again with the next look.
    let Some(turn) = running.with(|router| router.turn_to_copy_functions()).flatten() else { return };
    let until = Instant::now() + PATIENCE;
    while !turn.is_alone() {
        if Instant::now() >= until {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let why = match share_functions(running, &mut nodes) {
        Ok(()) => {
            *known = Known { processes: up, was_one: is_one };
            return;
        }
        Err(CopyFailure::Failed(why)) => why,
        Err(CopyFailure::Left { why, node, connection }) => {
            running.with(|router| router.leave_functions(node, connection, turn));
            why
        }
    };
    // Tried again with the next look.
    warn!("cannot compare the functions of the nodes: {why}");
}

/// Asks a node to store functions. Gives the text of its error.
fn store(
    connection: &mut NodeConnection,
    id: NodeId,
    node: &NodeAccess,
    args: &[&[u8]],
) -> Result<Option<String>, CopyFailure> {
    let failed = |why: &str| CopyFailure::Failed(format!("node {}: {why}", node.name));
    // So that its end can be confirmed.
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

/// Puts the check before libraries that lack it or have that of an older router; takes it away at the only node. True
/// where there were any such.
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
                warn!("library {name} of node {} cannot be kept to the keys that its callers name: {why}", node.name)
            }
        }
    }
    Ok(any)
}

/// A node with a connection to it.
type Met<'a> = (NodeId, &'a NodeAccess, NodeConnection);

/// Connects to a node that answers.
fn meet((id, node): (NodeId, &NodeAccess)) -> Result<Met<'_>, String> {
    let mut connection = NodeConnection::open(node, PATIENCE).map_err(|why| format!("node {} {why}", node.name))?;
    run_id(&mut connection).ok_or_else(|| format!("node {} does not answer", node.name))?;
    Ok((id, node, connection))
}

/// Gives the functions of the others to nodes that have none.
fn share_functions(running: &Running, nodes: &mut [Met<'_>]) -> Result<(), CopyFailure> {
    let (mut having, mut lacking) = (Vec::new(), Vec::new());
    for (id, node, connection) in nodes {
        let mut found = functions(connection);
        if renew(running, connection, found.as_ref(), *id, node)? {
            found = functions(connection);
        }
        match found {
            // A version without functions, or no right to see them: `switchyard doctor` tells.
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
             `switchyard doctor` says which",
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
        // Without REPLACE: whoever loads one past the router at the same moment wins.
        match store(connection, id, node, &[b"FUNCTION", b"RESTORE", dump.bytes()])? {
            None => info!("node {} had no functions: it was given those of node {}", node.name, source.name),
            Some(why) => warn!("functions of node {} cannot be given to node {}: {why}", source.name, node.name),
        }
    }
    Ok(())
}
