//! Handshake with a node on a new connection: authentication, identification of the process, and its commands.
//!
//! Sent in one piece: password, protocol, name, `CLIENT ID` and `INFO`. No client command is sent before all replies:
//! the connection could not be killed by its id before. And a node that must not be served (another process without its
//! data, a wrong version, a replica) is detected here.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use switchyard_policy::data_loss::{Data, Holdings, Return};
use switchyard_policy::failover::why_not_readable;
use switchyard_policy::ownership::OwnershipStatus;
use switchyard_policy::topology::NodeId;
use switchyard_resp::command::{covers, members_expire, parse_command_reply, why_not_covered};
use switchyard_resp::units::counted;
use switchyard_resp::{encode, reply};
use tracing::{debug, info, warn};

use super::pending::Purpose;
use super::translate::refuses_resp3;
use super::{Event, Link, Origin, Upstreams};
use crate::fences;
use crate::lane::Lane;
use crate::lock::lock;
use crate::ownership::{Admission, refusal_reason};
use crate::settings::OnDataLoss;
use crate::shared::{Commands, RoutingSnapshot, unix_ms};
use crate::slab::Handle;
use crate::worker::command::parse;
use crate::worker::gather::no_multi_text;
use crate::worker::hot_copies::store::{About, Elements, refused};
use crate::worker::turn::Turn;

/// Queries about the data of an unknown process.
const ABOUT_DATA: [(NodeHandshake, &[&str]); 3] = [
    (NodeHandshake::Persistence, &["INFO", "persistence"]),
    (NodeHandshake::Save, &["CONFIG", "GET", "save"]),
    (NodeHandshake::Keyspace, &["INFO", "keyspace"]),
];

/// Assumed amount of data of a process that refuses the query.
const UNKNOWN: Holdings = Holdings { keys: 1, expires: 0, avg_ttl_ms: 0 };

/// Returns a field of INFO with printable characters only, so that a node cannot control a terminal or forge log lines.
fn field_of(info: &[u8], name: &str) -> Option<String> {
    let info = String::from_utf8_lossy(info);
    let value = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    Some(value.chars().filter(char::is_ascii_graphic).take(64).collect())
}

/// Returns the `run_id` in an INFO reply.
fn run_id_of(info: &[u8]) -> Option<String> {
    field_of(info, "run_id")
}

/// Whether hash fields may have their own TTL: Redis from 7.4 on, Valkey from 9. Unknown versions may.
fn fields_expire(flavour: &str, version: &str) -> bool {
    let mut numbers = version.split('.').map(|number| number.parse::<u32>().unwrap_or(u32::MAX));
    let version = (numbers.next().unwrap_or(u32::MAX), numbers.next().unwrap_or(0));
    version >= if flavour == "valkey" { (9, 0) } else { (7, 4) }
}

/// Returns the text of a node's error, without control characters.
fn shown(error: &[u8]) -> String {
    reply::redacted_error(error).chars().map(|c| if c.is_control() { ' ' } else { c }).take(256).collect()
}

/// Steps of a handshake, in order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum NodeHandshake {
    Hello,
    Auth,
    SetName,
    /// SELECT of the highest database that clients use.
    Databases(u32),
    Select,
    /// CLIENT TRACKING, on connections for hot copies.
    Tracking,
    Multi,
    Exec,
    Role,
    /// READONLY, at a replica of a cluster: without it, it redirects every read.
    ReadOnly,
    /// INFO replication of a replica, and then INFO persistence, with the reply to the former.
    Replication,
    Loading(Vec<u8>),
    ClientId,
    /// Id of a member of a cluster.
    Member,
    Persistence,
    Save,
    Keyspace,
    /// CONFIG GET maxclients.
    MaxClients,
    /// On exclusive connections: identification of the process.
    Process,
    Info,
    /// Read the ownership record.
    Ownership,
    /// Claim the node for this router.
    Claim,
    /// Read the ownership record after the claim. With the INFO reply.
    Claimed(Vec<u8>),
    /// CLIENT LIST, at the first contact with this process. With the INFO reply.
    LeftBehind(Vec<u8>),
    /// CLIENT KILL of a connection of the router or of an earlier run. The last one has the INFO reply.
    Ended(Option<Vec<u8>>),
    /// The process has returned after being replaced by another process. Its old connections (these client ids) have
    /// been killed. With the INFO reply.
    Returned(Vec<u64>, Vec<u8>),
    /// Other workers still use the previous primary. With the INFO reply.
    Others(Vec<u8>),
    /// No query: waits, because an earlier router may still reply from hot copies of the node's keys. With the INFO
    /// reply.
    Waits(Vec<u8>),
}

/// State of a handshake, and of the node's process as known from it.
#[derive(Debug)]
pub(super) struct HandshakeState {
    /// Steps without a reply yet.
    steps: VecDeque<NodeHandshake>,
    /// State of the node's ownership record.
    standing: OwnershipStatus,
    /// Our client ID at the node.
    client_id: u64,
    run_id: Option<Arc<str>>,
    /// The handshake included a query of the node's data.
    knows_data: bool,
    /// The node's keys, if known.
    holdings: Option<Holdings>,
    /// The node was still loading its data.
    is_loading: bool,
    /// The node keeps its data on disk. `None` if unknown.
    persists: Option<bool>,
}

impl HandshakeState {
    pub(super) fn new() -> Self {
        Self {
            steps: VecDeque::new(),
            standing: OwnershipStatus::Unmarked,
            client_id: 0,
            run_id: None,
            knows_data: false,
            holdings: None,
            is_loading: false,
            persists: None,
        }
    }

    /// Expects no more replies.
    pub(super) fn abort(&mut self) {
        self.steps.clear();
    }

    /// Starts on a new connection. The process of the last connection stays known until the end.
    fn begin(&mut self) {
        self.steps.clear();
        self.standing = OwnershipStatus::Unmarked;
        (self.knows_data, self.holdings, self.is_loading, self.persists) = (false, None, false, None);
    }

    /// Records the reply to INFO persistence.
    fn note_persistence(&mut self, answer: &[u8]) {
        let text = String::from_utf8_lossy(reply::text(answer).unwrap_or_default());
        (self.persists, self.is_loading) = (Some(text.contains("aof_enabled:1")), text.contains("\nloading:1"));
    }

    /// Records whether the node saves snapshots. `None`: it refuses the query, so without an append-only file its
    /// persistence is unknown.
    fn note_save(&mut self, saves: Option<bool>) {
        match saves {
            Some(true) => self.persists = Some(true),
            Some(false) => {}
            None => self.persists = self.persists.filter(|has_aof| *has_aof),
        }
    }

    /// Whether it waits until an earlier router has no hot copies of the node's keys.
    pub(super) fn waits_for_earlier_router(&self) -> bool {
        matches!(self.steps.front(), Some(NodeHandshake::Waits(_)))
    }

    /// Process of the node.
    pub(super) fn run_id(&self) -> Option<&Arc<str>> {
        self.run_id.as_ref()
    }

    /// Our client ID at the node.
    pub(super) fn client_id(&self) -> u64 {
        self.client_id
    }
}

/// Adds commands of the node that our table lacks (modules, renamed commands).
pub(super) fn learn(turn: &Turn, node: NodeId, answer: &[u8]) {
    let learnt = parse_command_reply(answer);
    turn.shared().with_facts(node, |f| f.commands = Commands::Known);
    // Without the lock of the snapshot, because there may be many. Another worker may add others concurrently.
    let (mut count, mut done) = (0, false);
    while !done {
        let known = turn.shared().routing().commands.clone();
        let mut commands = (*known).clone();
        count = commands.learn(&learnt);
        let commands = if count == 0 { known.clone() } else { Arc::new(commands) };
        turn.shared().change_routing(|routing| {
            done = Arc::ptr_eq(&routing.commands, &known);
            RoutingSnapshot { commands: if done { commands } else { routing.commands.clone() }, ..routing.clone() }
        });
    }
    if count > 0 {
        info!(node = %turn.node_name(node), commands = count, "learnt commands from node");
    }
}

/// A step of the handshake of a connection.
#[derive(Debug)]
pub(in crate::worker) struct Handshake<'a> {
    up: &'a mut Upstreams,
    turn: &'a Turn,
    handle: Handle,
}

impl Upstreams {
    /// Continues the handshake of a connection.
    pub(in crate::worker) fn handshake<'a>(&'a mut self, turn: &'a Turn, handle: Handle) -> Handshake<'a> {
        Handshake { up: self, turn, handle }
    }
}

impl Handshake<'_> {
    fn link(&self) -> Option<&Link> {
        self.up.get(self.handle)
    }

    fn link_mut(&mut self) -> Option<&mut Link> {
        self.up.get_mut(self.handle)
    }

    /// Gives up this attempt.
    fn fail(&mut self, why: &str) {
        self.up.attempt_failed(self.turn, self.handle, why);
    }

    /// Continues after the TCP connect: with TLS, or with the handshake.
    pub(super) fn begin(&mut self) {
        let Some(link) = self.link_mut() else { return };
        if !link.socket.is_secured() {
            self.greet_node();
            return;
        }
        link.life.secures();
        self.secure();
    }

    /// Continues the TLS handshake, and then starts the handshake with the node.
    pub(in crate::worker) fn secure(&mut self) {
        let Some(link) = self.link_mut() else { return };
        match link.socket.secure() {
            Some(Err(error)) => self.fail(&io::Error::from(error).to_string()),
            Some(Ok(true)) => self.greet_node(),
            Some(Ok(false)) | None => {}
        }
    }

    /// Continues in RESP2, on a new connection: commands after the refused `HELLO` may have been refused with it.
    fn downgrade(&mut self, error: &str) {
        let turn = self.turn;
        let Some(link) = self.link_mut() else { return };
        let node = link.node;
        link.downgraded = true;
        link.handshake.abort();
        link.socket.close(turn);
        link.life.wait_until(turn.now_us());
        if turn.shared().with_facts(node, |f| !std::mem::replace(&mut f.translated, true)) {
            warn!(node = %turn.node_name(node), error, "node does not speak RESP3: its replies to RESP3 clients are translated");
        }
    }

    /// Continues after the identification of the process: old connections are killed before it is used.
    fn greet_known(&mut self, info: &[u8]) {
        let turn = self.turn;
        let Some((node, lane)) = self.link().map(|link| (link.node, link.lane)) else { return };
        let returned = run_id_of(info).filter(|run_id| {
            lane != Lane::Replica && turn.shared().with_facts(node, |facts| facts.run_id.as_deref() != Some(run_id))
        });
        let left = returned.map(|run_id| turn.shared().connections.broken_at(node, &run_id)).unwrap_or_default();
        if !left.is_empty() {
            // Not counted as zombies: while another process served, their commands could not be executed.
            let kill = |id: &u64| {
                (NodeHandshake::Ended(None), ["CLIENT", "KILL", "ID", &id.to_string()].map(str::to_owned).to_vec())
            };
            let kills: Vec<_> = left.iter().map(kill).collect();
            let last = (NodeHandshake::Returned(left, info.to_vec()), vec!["PING".to_owned()]);
            return self.send_queries(kills.into_iter().chain([last]).collect());
        }
        // In front of a cluster, each run has another site, and relies on no earlier one.
        let asks = !turn.routing().topology.is_of_cluster()
            && run_id_of(info).is_some_and(|run_id| turn.shared().fences.is_query_useful(node, &run_id));
        let claim = turn
            .shared()
            .ownership
            .as_ref()
            .filter(|_| self.link().is_some_and(|link| link.handshake.standing == OwnershipStatus::Free));
        let claim = claim.map(|seat| (NodeHandshake::Claim, seat.claim()));
        if (!asks && claim.is_none()) || self.link().is_none_or(|link| link.lane == Lane::Replica) {
            self.link_is_up(info);
        } else {
            let list = (NodeHandshake::LeftBehind(info.to_vec()), vec!["CLIENT".to_owned(), "LIST".to_owned()]);
            self.send_queries(claim.into_iter().chain([list]).collect());
        }
    }

    /// Returns whether a connection may be used after the handshake. Otherwise reads the ownership record first, or waits
    /// until an earlier router has no hot copies of the node's keys.
    fn is_admitted(&mut self, info: &[u8], run_id: Option<&str>) -> bool {
        let turn = self.turn;
        let Some(link) = self.link_mut().filter(|link| link.lane != Lane::Replica) else { return true };
        let (Some(seat), Some(run_id)) = (&turn.shared().ownership, run_id) else { return true };
        match seat.admission(link.node, run_id) {
            Admission::Admitted => return true,
            // The node stores no ownership records, so no router has hot copies of its keys.
            Admission::Unmet if link.handshake.standing == OwnershipStatus::Unmarked => {
                seat.admit_process_without_record(link.node, run_id);
                return true;
            }
            Admission::Waits(_) => link.handshake.steps.push_back(NodeHandshake::Waits(info.to_vec())),
            Admission::Unmet => {
                let question = seat.question();
                self.send_queries(vec![(NodeHandshake::Claimed(info.to_vec()), question)]);
            }
        }
        false
    }

    /// Uses a connection that has waited for an earlier router, if that time has passed.
    pub(super) fn end_wait_for_earlier_router(&mut self) {
        if let Some(NodeHandshake::Waits(info)) = self.link_mut().and_then(|link| link.handshake.steps.pop_front()) {
            self.link_is_up(&info);
        }
    }

    /// Starts the handshake after connecting. No command is sent before its replies, so that a CLIENT KILL over a later
    /// connection certainly reaches this one.
    pub(super) fn greet_node(&mut self) {
        let turn = self.turn;
        let Some(link) = self.link_mut() else { return };
        let Some(access) = turn.routing().live.nodes.get(&link.node) else { return };
        link.life.greets(turn.now_us());
        link.socket.is_free();
        link.handshake.begin();
        link.transaction.hope();
        let name = turn.shared().connection_name(turn.index());
        let mut bytes = Vec::new();
        let user = access.username.as_deref().unwrap_or("default");
        let mut ask = |link: &mut Link, what: NodeHandshake, args: &[&str]| {
            encode::command(&mut bytes, args.iter().map(|a| a.as_bytes()));
            link.handshake.steps.push_back(what);
        };
        match (&access.password, link.resp3 && !link.downgraded) {
            (Some(password), true) => ask(link, NodeHandshake::Hello, &["HELLO", "3", "AUTH", user, &password.0]),
            (None, true) => ask(link, NodeHandshake::Hello, &["HELLO", "3"]),
            (Some(password), false) if access.username.is_some() => {
                ask(link, NodeHandshake::Auth, &["AUTH", user, &password.0])
            }
            (Some(password), false) => ask(link, NodeHandshake::Auth, &["AUTH", &password.0]),
            (None, false) => {}
        }
        ask(link, NodeHandshake::SetName, &["CLIENT", "SETNAME", &name]);
        // Clients may use any of them: a command for a missing database would be executed in the wrong database.
        if let Some(last) =
            turn.shared().databases().checked_sub(1).filter(|last| *last > link.requests.start_database())
        {
            ask(link, NodeHandshake::Databases(last), &["SELECT", &last.to_string()]);
        }
        let database = link.requests.start_database().to_string();
        ask(link, NodeHandshake::Select, &["SELECT", &database]);
        if link.lane == Lane::Fills {
            ask(link, NodeHandshake::Tracking, &["CLIENT", "TRACKING", "ON"]);
        }
        let is_alone = link.lane.is_exclusive();
        // Transactions are later sent in one piece without waiting for the reply to MULTI. If that were refused, the
        // commands would be executed one by one.
        if !matches!(link.lane, Lane::Blocking | Lane::Pubsub | Lane::Fills) {
            ask(link, NodeHandshake::Multi, &["MULTI"]);
            ask(link, NodeHandshake::Exec, &["EXEC"]);
        }
        if link.lane != Lane::Replica && turn.routing().followed(link.node).is_some() {
            ask(link, NodeHandshake::Role, &["ROLE"]);
        }
        if link.lane == Lane::Replica {
            if turn.routing().topology.is_of_cluster() {
                ask(link, NodeHandshake::ReadOnly, &["READONLY"]);
            }
            ask(link, NodeHandshake::Replication, &["INFO", "replication"]);
            ask(link, NodeHandshake::Loading(Vec::new()), &["INFO", "persistence"]);
        }
        ask(link, NodeHandshake::ClientId, &["CLIENT", "ID"]);
        if turn.routing().topology.is_of_cluster() {
            ask(link, NodeHandshake::Member, &["CLUSTER", "MYID"]);
        }
        // After CLIENT SETNAME: a router that takes over kills named connections, and connections named later see its
        // record here.
        if let Some(seat) = turn.shared().ownership.as_ref().filter(|_| link.lane != Lane::Replica) {
            let question = seat.question();
            ask(link, NodeHandshake::Ownership, &question.iter().map(String::as_str).collect::<Vec<_>>());
        }
        // There may be thousands of exclusive connections, and they reveal nothing new about a known process.
        if is_alone {
            ask(link, NodeHandshake::Process, &["INFO", "server"]);
        } else {
            if link.lane != Lane::Replica {
                ABOUT_DATA.into_iter().for_each(|(what, args)| ask(link, what, args));
                ask(link, NodeHandshake::MaxClients, &["CONFIG", "GET", "maxclients"]);
            }
            ask(link, NodeHandshake::Info, &["INFO", "server"]);
        }
        self.send_greeting(&bytes);
    }

    fn send_greeting(&mut self, bytes: &[u8]) {
        let Some(link) = self.link_mut() else { return };
        // Small, on an idle connection: it fits into the socket buffer.
        match link.socket.send_first(bytes) {
            Some(Ok(count)) if count == bytes.len() => {}
            Some(Err(error)) => self.fail(&io::Error::from(error).to_string()),
            _ => self.fail("the greeting could not be sent whole"),
        }
    }

    /// Handles the identification of the process on an exclusive connection. An unknown process is queried about its
    /// data, as on shared connections.
    fn greet_process(&mut self, info: &[u8]) {
        let turn = self.turn;
        let run_id = run_id_of(info).map(Arc::from);
        let Some(link) = self.link_mut() else { return };
        let is_free = link.handshake.standing == OwnershipStatus::Free;
        if !is_free && turn.shared().with_facts(link.node, |facts| facts.run_id.is_some() && facts.run_id == run_id) {
            return self.link_is_up(info);
        }
        let mut bytes = Vec::new();
        for (what, args) in ABOUT_DATA.into_iter().chain([(NodeHandshake::Info, &["INFO", "server"][..])]) {
            encode::command(&mut bytes, args.iter().map(|arg| arg.as_bytes()));
            link.handshake.steps.push_back(what);
        }
        self.send_greeting(&bytes);
    }

    pub(in crate::worker) fn on_reply(&mut self, answer: &[u8]) {
        let turn = self.turn;
        let Some(link) = self.link_mut() else { return };
        let Some(question) = link.handshake.steps.pop_front() else { return };
        let error = reply::is_error(answer).then(|| shown(reply::text(answer).unwrap_or_default()));
        let node = link.node;
        match (question, error) {
            (NodeHandshake::Hello, Some(error)) if refuses_resp3(&error, turn.routing().topology.is_of_cluster()) => {
                self.downgrade(&error);
            }
            (NodeHandshake::Hello, Some(error)) => self.fail(&format!("it refuses HELLO 3: {error}")),
            (NodeHandshake::Auth, Some(error)) => {
                self.fail(&format!("it refuses our user or password (nodes.username, nodes.password-file): {error}"))
            }
            (NodeHandshake::Select, Some(error)) => {
                let database = link.requests.start_database();
                if error.starts_with("NOAUTH") {
                    return self.fail(&format!(
                        "it requires a password, and none is configured for it (nodes.password-file): {error}"
                    ));
                }
                // A member of a cluster has no other database.
                if !turn.routing().topology.is_of_cluster() {
                    self.fail(&format!("it refuses database {database}: {error}"));
                }
            }
            (NodeHandshake::Databases(last), Some(error)) => {
                self.fail(&format!("it has fewer databases than clients use: it refuses SELECT {last} ({error}). Set databases there as at the other nodes"),
                );
            }
            // Members of managed clusters may refuse both; nothing in front of a cluster relies on them.
            (NodeHandshake::ClientId, Some(_)) if turn.routing().topology.is_of_cluster() => {}
            (NodeHandshake::Info | NodeHandshake::Process, Some(_)) if turn.routing().topology.is_of_cluster() => {
                self.greet_known(b"");
            }
            (NodeHandshake::ClientId | NodeHandshake::Info | NodeHandshake::Process, Some(error)) => {
                self.fail(&format!("it does not identify itself (CLIENT ID, INFO server): {error}"));
            }
            (NodeHandshake::SetName, Some(error)) if error.starts_with("ERR max number of clients") => {
                self.fail(&format!("it refuses the connection: {error}"));
            }
            (NodeHandshake::Multi | NodeHandshake::Exec, Some(error)) => {
                debug!(node = %turn.node_name(node), error, "node refuses transactions");
                if let Some(link) = self.link_mut() {
                    link.transaction.note_no_multi(error);
                }
            }
            (NodeHandshake::SetName, Some(error)) => {
                debug!(node = %turn.node_name(node), error, "node refuses CLIENT SETNAME")
            }
            (
                NodeHandshake::Hello
                | NodeHandshake::Auth
                | NodeHandshake::SetName
                | NodeHandshake::Databases(_)
                | NodeHandshake::Multi
                | NodeHandshake::Exec,
                None,
            ) => {}
            (NodeHandshake::Role, Some(error)) => debug!(node = %turn.node_name(node), error, "node refuses ROLE"),
            (NodeHandshake::Role, None) => {
                if reply::elements(answer).next().and_then(reply::text).is_some_and(|role| role != b"master") {
                    self.fail("the server at its address is now a replica");
                }
            }
            (NodeHandshake::ReadOnly, Some(error)) => self.fail(&format!("it refuses READONLY: {error}")),
            (NodeHandshake::ReadOnly, None) => {}
            (NodeHandshake::Replication | NodeHandshake::Loading(_), Some(error)) => {
                self.fail(&format!(
                    "it does not report whether it has all data (INFO replication, INFO persistence): {error}"
                ));
            }
            (NodeHandshake::Replication, None) => {
                let replication = reply::text(answer).unwrap_or_default();
                if let Some(NodeHandshake::Loading(before)) = link.handshake.steps.front_mut() {
                    *before = replication.to_vec();
                }
            }
            (NodeHandshake::Loading(replication), None) => {
                let info = [&replication, &b"\n"[..], reply::text(answer).unwrap_or_default()].concat();
                if let Some(why) = why_not_readable(&String::from_utf8_lossy(&info)) {
                    self.fail(why);
                }
            }
            (NodeHandshake::Tracking, Some(error)) => {
                refused(turn, node, &error);
                self.fail(&format!("it refuses CLIENT TRACKING: {error}"));
            }
            (NodeHandshake::Tracking, None) => {}
            (NodeHandshake::Select, None) => {
                let database = link.requests.start_database();
                turn.shared().with_facts(node, |f| f.databases = f.databases.max(database + 1));
            }
            (NodeHandshake::ClientId, None) => {
                link.handshake.client_id = reply::integer(answer).and_then(|id| u64::try_from(id).ok()).unwrap_or(0);
            }
            (NodeHandshake::Member, Some(error)) => {
                debug!(node = %turn.node_name(node), error, "member refuses CLUSTER MYID");
            }
            (NodeHandshake::Member, None) => {
                let expected = match link.replica {
                    Some(replica) => match turn.routing().replica_member(node, replica) {
                        Some(member) => Some(member.id.clone()),
                        None => return self.fail("it is no longer read"),
                    },
                    None => turn.shared().cluster.as_ref().and_then(|map| map.member_id(node)),
                };
                if expected.is_some_and(|id| reply::text(answer) != Some(id.as_bytes())) {
                    // The address was reused.
                    turn.shared().request_map();
                    self.fail("another server is at the address of this member of the cluster");
                }
            }
            (NodeHandshake::Save, Some(_)) => link.handshake.note_save(None),
            // If it refuses, it counts as a process with keys, and with its last known persistence.
            (NodeHandshake::Persistence | NodeHandshake::Keyspace | NodeHandshake::MaxClients, Some(_)) => {}
            (NodeHandshake::MaxClients, None) => {
                let max = reply::elements(answer).nth(1).and_then(reply::text).and_then(parse::<usize>);
                turn.shared().exclusive_bounds(node).set_clients_max(max.unwrap_or(0));
            }
            (NodeHandshake::Persistence, None) => link.handshake.note_persistence(answer),
            (NodeHandshake::Save, None) => {
                let save = reply::elements(answer).nth(1).and_then(reply::text);
                link.handshake.note_save(Some(save.is_some_and(|save| !save.is_empty())));
            }
            (NodeHandshake::Keyspace, None) => {
                let text = String::from_utf8_lossy(reply::text(answer).unwrap_or_default());
                link.handshake.holdings = Some(Holdings::of_info(&text));
            }
            (NodeHandshake::Process, None) => self.greet_process(reply::text(answer).unwrap_or_default()),
            (NodeHandshake::Info, None) => {
                if let Some(link) = self.link_mut() {
                    link.handshake.knows_data = link.lane != Lane::Replica;
                }
                self.greet_known(reply::text(answer).unwrap_or_default());
            }
            (NodeHandshake::Returned(ended, info), _) => {
                if let Some(run_id) = run_id_of(&info) {
                    turn.shared().connections.remove_killed(node, &run_id, &ended);
                }
                self.greet_known(&info);
            }
            (NodeHandshake::Others(info), _) => self.link_is_up(&info),
            (NodeHandshake::Ownership, _) => {
                self.learn_standing(answer);
            }
            (NodeHandshake::Claim, None) => {}
            (NodeHandshake::Waits(_), _) => self.fail("it sent a reply without a request"),
            (NodeHandshake::Claim, Some(error)) => {
                link.handshake.standing = OwnershipStatus::Unmarked;
                debug!(node = %turn.node_name(node), error, "node refuses ACL SETUSER");
            }
            (NodeHandshake::Claimed(info), _) => match self.learn_standing(answer) {
                Some(OwnershipStatus::Ours | OwnershipStatus::Unmarked) => {
                    if let (Some(seat), Some(run_id)) = (&turn.shared().ownership, run_id_of(&info))
                        && seat.admit_process(node, &run_id, answer)
                    {
                        info!(node = %turn.node_name(node), "an earlier router may still reply from hot copies: nothing is sent to the node until their lease ends");
                    }
                    self.link_is_up(&info);
                }
                Some(OwnershipStatus::Free) => self.fail("it did not store this router's ownership record"),
                _ => {}
            },
            (NodeHandshake::LeftBehind(info), None) => {
                let list = String::from_utf8_lossy(reply::text(answer).unwrap_or_default()).into_owned();
                let left = fences::foreign_connections(&list, &turn.shared().site, &turn.shared().incarnation);
                let Some((last, first)) = left.split_last() else { return self.nothing_is_left(&info) };
                info!(node = %turn.node_name(node), connections = left.len(), "an earlier run of the router has left connections at the node: they are closed before it is used");
                let kill = |id: &u64| ["CLIENT", "KILL", "ID", &id.to_string()].map(str::to_owned).to_vec();
                let mut kills: Vec<_> = first.iter().map(|id| (NodeHandshake::Ended(None), kill(id))).collect();
                kills.push((NodeHandshake::Ended(Some(info)), kill(last)));
                self.send_queries(kills);
            }
            // Already gone.
            (NodeHandshake::Ended(info), error)
                if error.as_ref().is_none_or(|error| error.starts_with("ERR No such")) =>
            {
                if let Some(info) = info {
                    self.nothing_is_left(&info);
                }
            }
            (NodeHandshake::Ended(_), None) => {}
            // No move will be possible there, so no code relies on it.
            (NodeHandshake::LeftBehind(info), Some(error)) => {
                if let Some(run_id) = run_id_of(&info) {
                    turn.shared().fences.note_refused(node, &run_id);
                }
                warn!(node = %turn.node_name(node), error, "node refuses CLIENT LIST: commands of an earlier run of the router may still be executed");
                self.link_is_up(&info);
            }
            (NodeHandshake::Ended(_), Some(error)) => {
                self.fail(&format!("it refuses CLIENT KILL ID for an earlier connection of the router: {error}"));
            }
        }
    }

    /// Sends further queries before the connection is used.
    fn send_queries(&mut self, questions: Vec<(NodeHandshake, Vec<String>)>) {
        let Some(link) = self.link_mut() else { return };
        let mut bytes = Vec::new();
        for (what, args) in questions {
            encode::command(&mut bytes, args.iter().map(|a| a.as_bytes()));
            link.handshake.steps.push_back(what);
        }
        self.send_greeting(&bytes);
    }

    fn nothing_is_left(&mut self, info: &[u8]) {
        let turn = self.turn;
        if let (Some(link), Some(run_id)) = (self.link(), run_id_of(info)) {
            turn.shared().fences.set_cleared(link.node, &run_id);
        }
        match &turn.shared().ownership {
            Some(seat) if self.link().is_some_and(|link| link.handshake.standing == OwnershipStatus::Free) => {
                let question = seat.question();
                self.send_queries(vec![(NodeHandshake::Claimed(info.to_vec()), question)]);
            }
            _ => self.link_is_up(info),
        }
    }

    /// Records which router owns the node. Closes the connection if this router must not use it.
    fn learn_standing(&mut self, answer: &[u8]) -> Option<OwnershipStatus> {
        let turn = self.turn;
        let node = self.link()?.node;
        let standing = turn.shared().ownership.as_ref()?.check_reply(&turn.node_name(node), answer);
        self.link_mut()?.handshake.standing = standing;
        if let Some(why) = refusal_reason(standing) {
            self.fail(&why);
        }
        Some(standing)
    }

    /// Returns the reason why this node must not be served, if so: it has lost its data, and no operator has accepted
    /// that.
    fn comes_back_without_data(&self, run_id: Option<&str>) -> Option<String> {
        let turn = self.turn;
        let link = self.link().filter(|link| link.lane != Lane::Replica)?;
        let (node, now, is_loading, policy) =
            (link.node, link.handshake.holdings?.keys, link.handshake.is_loading, turn.routing().live.on_data_loss);
        // A node without assigned keys misses none.
        if !turn.routing().topology.nodes_with_keys().contains(&node) {
            return None;
        }
        let sent = turn.shared().changes_sent(node);
        let name = turn.node_name(node);
        turn.shared().with_facts(node, |facts| {
            if facts.run_id.is_none() || facts.run_id.as_deref() == run_id || facts.accepted {
                facts.is_held = false;
                return None;
            }
            let found = facts.data.judge(sent, now, unix_ms(), facts.is_held);
            let (is_to_be_held, what) = match (found, policy) {
                (Return::Intact, _) => (false, None),
                (Return::Expired, _) => (false, Some("it was away for longer than the mean time to live of its keys".to_owned())),
                (Return::Removed(keys), _) => {
                    let what = format!("commands of the last second may have removed {}", counted(keys, "key"));
                    (policy == OnDataLoss::Hold, Some(what))
                }
                (Return::Lost(_), OnDataLoss::Serve) => (false, Some("nodes.on-data-loss is serve".to_owned())),
                (Return::Lost(_), OnDataLoss::Auto) if !facts.persists => (false, Some("it keeps no data on disk".to_owned())),
                (Return::Lost(_), OnDataLoss::Hold | OnDataLoss::Auto) => (true, None),
            };
            if is_to_be_held && is_loading {
                return Some("it is loading its data".to_owned());
            }
            facts.is_held = is_to_be_held;
            let before = match found {
                Return::Lost(before) => before,
                _ => facts.data.to_know(sent).keys,
            };
            let with = if now == 0 { "empty".to_owned() } else { format!("with {now} of {before} keys") };
            if !is_to_be_held && let Some(why) = what {
                info!(node = %name, "node returned {with}, and is served: {why}");
                return None;
            }
            is_to_be_held.then(|| {
                let why = what
                    .map_or_else(|| "it restarted without its data".to_owned(), |why| format!("{why}, or it restarted without its data"));
                format!(
                    "it returned {with} ({why}). Restore its data, or accept their loss: `switchyard nodes accept` with its \
                     address (nodes.on-data-loss)"
                )
            })
        })
    }

    fn link_is_up(&mut self, info: &[u8]) {
        let turn = self.turn;
        let run_id: Option<Arc<str>> = run_id_of(info).map(Arc::from);
        let redis_version = field_of(info, "redis_version");
        let (flavour, version) = match field_of(info, "valkey_version") {
            Some(version) => ("valkey", version),
            None => ("redis", redis_version.clone().unwrap_or_else(|| "unknown".to_owned())),
        };
        if let Some(why) = turn.routing().held.clone() {
            self.fail(&why);
            return;
        }
        if !self.is_admitted(info, run_id.as_deref()) {
            return;
        }
        if let Some(why) = self.comes_back_without_data(run_id.as_deref()) {
            self.fail(&why);
            return;
        }
        if self.is_loading() {
            self.fail("it is loading its data");
            return;
        }
        self.note_process(run_id.as_ref());
        let Some(link) = self.link_mut() else { return };
        if link.lane != Lane::Replica && !turn.shared().publication.all_left_old_servers() {
            // A write here could be acknowledged while others still read at the old primary or process. They leave it
            // within a turn.
            return self.send_queries(vec![(NodeHandshake::Others(info.to_vec()), vec!["PING".to_owned()])]);
        }
        link.comes_up(turn.now_us());
        link.handshake.run_id.clone_from(&run_id);
        let (node, lane, resp3) = (link.node, link.lane, link.resp3);
        if lane == Lane::Replica {
            // Facts about a node concern its primary. And replicas are only read, so their zombies are harmless.
            self.up.mark(self.handle);
            return;
        }
        turn.shared().connections.add(link.connection(turn.index()));
        let (persists, knows_data, standing) =
            (link.handshake.persists, link.handshake.knows_data, link.handshake.standing);
        let name = turn.node_name(node);
        let mut uncovered = None;
        let (recovered, learn) = turn.shared().with_facts(node, |facts| {
            (facts.is_held, facts.accepted) = (false, false);
            facts.is_marked |= standing == OwnershipStatus::Ours;
            // A node that refuses the queries may persist its data as before.
            facts.persists = persists.filter(|_| knows_data).unwrap_or(facts.persists);
            uncovered = why_not_covered(flavour, &version).filter(|_| facts.version != version);
            facts.flavour = flavour;
            facts.version.clone_from(&version);
            facts.redis_version = redis_version.unwrap_or_else(|| version.clone());
            let first = !facts.tried;
            facts.tried = true;
            let learn = lane == Lane::Main && !resp3 && facts.commands == Commands::Unknown;
            if learn {
                facts.commands = Commands::Requested;
            }
            (facts.failure.take().is_some() || first, learn)
        });
        if recovered {
            info!(node = %name, version = %format_args!("{flavour} {version}"), "node is up");
        }
        if let Some(why) = uncovered {
            warn!(node = %name, "{why}");
        }
        if lane == Lane::Main {
            self.up.end_outage(node);
            self.up.kill_zombies(turn, node, self.handle, run_id.as_deref());
            if learn {
                self.up.push_own(turn, self.handle, &[b"COMMAND"], Purpose::Learn, 0);
            }
        }
        if lane == Lane::Pubsub {
            self.up.emit(Event::PubsubUp { link: self.handle, node });
        }
        if lane == Lane::Fills {
            let expire =
                Elements { of_hash: fields_expire(flavour, &version), of_set: members_expire(flavour, &version) };
            let about = About { expire, is_covered: covers(flavour, &version), run_id, standing };
            self.up.emit(Event::FillsUp { node, about });
        }
        if lane.is_exclusive() {
            self.up.pool(turn, node, lane).link_is_up(self.handle);
        } else {
            self.refuse_waiting_transactions();
        }
        self.up.mark(self.handle);
    }

    /// Records the process of a connection. If it has replaced another process, all workers close their connections to that
    /// one: an address may lead to a new primary while connections to the old one stay open, so clients would read and
    /// write at both.
    fn note_process(&self, run_id: Option<&Arc<str>>) {
        let turn = self.turn;
        let Some(link) = self.link().filter(|link| link.lane != Lane::Replica) else { return };
        let (node, holdings, start_database) = (link.node, link.handshake.holdings, link.requests.start_database());
        let sent = turn.shared().changes_sent(node);
        let restarted = turn.shared().with_facts(node, |facts| {
            if facts.run_id.as_ref() == run_id {
                return false;
            }
            let restarted = facts.run_id.is_some();
            if restarted {
                // No write of a client was sent to a node before its first process is known.
                turn.shared().reigns.begin(node);
                // Before any worker reads from it: values of the other process are stale.
                turn.shared().hot.invalidate_node(node);
                // Before any worker reads keys of a scan from it.
                lock(&turn.shared().scans).restarted(node, turn.shared().scan_tick());
            }
            facts.commands = Commands::Unknown;
            facts.databases = start_database + 1;
            facts.run_id = run_id.cloned();
            facts.is_marked = false;
            // Later counts come from `Router::note_data`.
            facts.data = Data::met(holdings.unwrap_or(UNKNOWN), unix_ms(), sent);
            restarted
        });
        if restarted {
            warn!(node = %turn.node_name(node), "node is another process than before: it was restarted, or replaced by a failover; keys that this process lacks are gone");
            turn.shared().make_workers_leave_old_processes();
        }
    }

    /// Whether a lost node replies on this connection, but still loads its data. It would refuse commands, so it has
    /// not returned yet.
    fn is_loading(&self) -> bool {
        let link = self.link().filter(|link| link.lane == Lane::Main && link.handshake.is_loading);
        link.is_some_and(|link| self.up.outages.has(link.node))
    }

    /// After a shared connection has come up to a node that refuses transactions: refuses waiting transactions as a
    /// whole. If sent, their commands would be executed individually.
    fn refuse_waiting_transactions(&mut self) {
        let (turn, handle) = (self.turn, self.handle);
        let Some(link) = self.link_mut() else { return };
        let (Some(why), node) = (link.no_multi().map(str::to_owned), link.node) else { return };
        let ended = link.requests.take_transactions();
        if !ended.is_empty() {
            let origin = Origin { link: handle, node, lane: Some(link.lane), is_up: true };
            let text = no_multi_text(turn, node, &why);
            let (text, requests) = (Some(text), Vec::new());
            self.up.emit(Event::Failed { origin, ended, in_flight: 0, text, requests });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn persistence_is_unknown_if_the_node_refuses_config_get() {
        let persists = |aof: Option<&str>, saves| {
            let mut state = HandshakeState::new();
            if let Some(aof) = aof {
                let info = format!("loading:0\r\naof_enabled:{aof}\r\n");
                state.note_persistence(format!("${}\r\n{info}\r\n", info.len()).as_bytes());
            }
            state.note_save(saves);
            state.persists
        };
        assert_eq!(
            [Some(true), Some(false), None].map(|saves| persists(Some("0"), saves)),
            [Some(true), Some(false), None]
        );
        assert_eq!([Some(true), Some(false), None].map(|saves| persists(Some("1"), saves)), [Some(true); 3]);
        assert_eq!([Some(true), Some(false), None].map(|saves| persists(None, saves)), [Some(true), None, None]);
    }
}
