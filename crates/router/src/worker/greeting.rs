//! The first words with a node on a new connection: who we are, who it is, and what commands it has.

use std::io;
use std::sync::Arc;

use switchyard_policy::topology::NodeId;
use switchyard_resp::command::parse_command_reply;
use switchyard_resp::{encode, reply};
use tracing::{debug, info, warn};

use super::Worker;
use super::translate::refuses_resp3;
use super::transport;
use super::upstream::{Greeting, Lane, Link, Phase, Purpose};
use crate::settings::EmptyReturn;
use crate::shared::{Commands, Connection, Plan};
use crate::slab::Handle;

impl Worker {
    /// Connected: asks the node who it is before anything else is sent. Sending nothing before its answer makes the connection one
    /// that a CLIENT KILL by a later connection surely reaches.
    pub(super) fn greet_node(&mut self, handle: Handle) {
        let Some(link) = self.links.get_mut(handle) else { return };
        let Some(access) = self.plan.live.nodes.get(&link.node) else { return };
        link.phase = Phase::Greeting;
        link.since_us = self.now_us;
        link.writable = true;
        link.greeting.clear();
        // It is asked again: what an earlier connection was refused, this one may be allowed.
        link.no_multi = None;
        let name = format!("switchyard-{}-{}", self.shared.incarnation, self.index);
        let mut bytes = Vec::new();
        let user = access.username.as_deref().unwrap_or("default");
        let mut ask = |link: &mut Link, what: Greeting, args: &[&str]| {
            encode::command(&mut bytes, args.iter().map(|a| a.as_bytes()));
            link.greeting.push_back(what);
        };
        match (&access.password, link.resp3 && !link.downgraded) {
            (Some(password), true) => ask(link, Greeting::Hello, &["HELLO", "3", "AUTH", user, &password.0]),
            (None, true) => ask(link, Greeting::Hello, &["HELLO", "3"]),
            (Some(password), false) if access.username.is_some() => ask(link, Greeting::Auth, &["AUTH", user, &password.0]),
            (Some(password), false) => ask(link, Greeting::Auth, &["AUTH", &password.0]),
            (None, false) => {}
        }
        ask(link, Greeting::SetName, &["CLIENT", "SETNAME", &name]);
        let database = link.start_database.to_string();
        ask(link, Greeting::Select, &["SELECT", &database]);
        // Sent in one piece later on, without waiting for the answer to MULTI: where that were refused, the commands behind it would be
        // executed one by one.
        ask(link, Greeting::Multi, &["MULTI"]);
        ask(link, Greeting::Exec, &["EXEC"]);
        if link.lane != Lane::Replica && self.plan.servers.contains_key(&link.node) {
            ask(link, Greeting::Role, &["ROLE"]);
        }
        ask(link, Greeting::ClientId, &["CLIENT", "ID"]);
        if link.lane != Lane::Replica {
            ask(link, Greeting::Persistence, &["INFO", "persistence"]);
            ask(link, Greeting::Save, &["CONFIG", "GET", "save"]);
            ask(link, Greeting::Keyspace, &["INFO", "keyspace"]);
        }
        ask(link, Greeting::Info, &["INFO", "server"]);
        // Small and first on a fresh connection: it fits the socket's buffer whole.
        let tls = &mut link.tls;
        let sent = link.fd.as_ref().map(|fd| transport::send(fd, tls, &bytes));
        match sent {
            Some(Ok(count)) if count == bytes.len() => {}
            Some(Err(error)) => self.attempt_failed(handle, &io::Error::from(error).to_string()),
            _ => self.attempt_failed(handle, "the connection took no greeting"),
        }
    }

    pub(super) fn on_greeting(&mut self, handle: Handle, answer: &[u8]) {
        let Some(link) = self.links.get_mut(handle) else { return };
        let Some(question) = link.greeting.pop_front() else { return };
        let error = reply::is_error(answer).then(|| String::from_utf8_lossy(reply::text(answer).unwrap_or_default()).into_owned());
        let node = link.node;
        match (question, error) {
            (Greeting::Hello, Some(error)) if refuses_resp3(&error) => self.downgrade(handle, &error),
            (Greeting::Hello, Some(error)) => self.attempt_failed(handle, &format!("it refuses HELLO 3: {error}")),
            (Greeting::Auth, Some(error)) => self.attempt_failed(handle, &format!("it refuses our credentials: {error}")),
            (Greeting::Select, Some(error)) => {
                let database = link.start_database;
                self.attempt_failed(handle, &format!("it refuses database {database}: {error}"));
            }
            (Greeting::ClientId | Greeting::Info, Some(error)) => {
                self.attempt_failed(handle, &format!("it does not say who it is (CLIENT ID, INFO server): {error}"));
            }
            (Greeting::SetName, Some(error)) if error.starts_with("ERR max number of clients") => {
                self.attempt_failed(handle, &format!("it refuses the connection: {error}"));
            }
            (Greeting::Multi | Greeting::Exec, Some(error)) => {
                debug!(node = %self.node_name(node), error, "node refuses transactions");
                if let Some(link) = self.links.get_mut(handle) {
                    link.no_multi.get_or_insert(error.into());
                }
            }
            (Greeting::SetName, Some(error)) => debug!(node = %self.node_name(node), error, "node refuses CLIENT SETNAME"),
            (Greeting::Hello | Greeting::Auth | Greeting::SetName | Greeting::Multi | Greeting::Exec, None) => {}
            (Greeting::Role, Some(error)) => debug!(node = %self.node_name(node), error, "node refuses ROLE"),
            (Greeting::Role, None) => {
                if reply::elements(answer).next().and_then(reply::text).is_some_and(|role| role != b"master") {
                    self.attempt_failed(handle, "the server at its address is a replica now");
                }
            }
            (Greeting::Select, None) => {
                let database = link.start_database;
                self.shared.with_facts(node, |f| f.databases = f.databases.max(database + 1));
            }
            (Greeting::ClientId, None) => {
                link.client_id = reply::integer(answer).and_then(|id| u64::try_from(id).ok()).unwrap_or(0);
            }
            // Where it does not say, it is taken for one that keeps nothing and has keys: it is served.
            (Greeting::Persistence | Greeting::Save | Greeting::Keyspace, Some(_)) => {}
            (Greeting::Persistence, None) => {
                link.persists = String::from_utf8_lossy(reply::text(answer).unwrap_or_default()).contains("aof_enabled:1");
            }
            (Greeting::Save, None) => {
                link.persists |= reply::elements(answer).nth(1).and_then(reply::text).is_some_and(|save| !save.is_empty());
            }
            (Greeting::Keyspace, None) => {
                let text = String::from_utf8_lossy(reply::text(answer).unwrap_or_default());
                link.is_empty = !text.lines().any(|line| line.starts_with("db"));
            }
            (Greeting::Info, None) => self.link_is_up(handle, reply::text(answer).unwrap_or_default()),
        }
    }

    /// Commands that write sent to a node, by all workers.
    fn writes_sent(&self, node: NodeId) -> u64 {
        let class = switchyard_resp::command::CommandClass::Write as usize;
        self.shared.counters.iter().map(|w| w.node(node).classes[class].requests.get()).sum()
    }

    /// Whether a node that is being greeted must not be served: it lost what it had, and nobody has said that this is all right.
    fn comes_back_empty(&self, handle: Handle, run_id: Option<&str>) -> bool {
        let Some(link) = self.links.get(handle).filter(|l| l.is_empty && l.lane != Lane::Replica) else { return false };
        let (node, policy) = (link.node, self.plan.live.empty_return);
        let writes = self.writes_sent(node);
        self.shared.with_facts(node, |facts| {
            let had_keys = facts.had_keys || writes > facts.writes_before;
            let is_held = policy == EmptyReturn::Hold || (policy == EmptyReturn::Auto && facts.persists);
            facts.run_id.is_some() && facts.run_id.as_deref() != run_id && had_keys && is_held && !facts.accepted
        })
    }

    fn link_is_up(&mut self, handle: Handle, info: &[u8]) {
        let info = String::from_utf8_lossy(info);
        let field = |name: &str| info.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':')).map(str::trim);
        let run_id: Option<Arc<str>> = field("run_id").map(Arc::from);
        let valkey = field("valkey_version").or_else(|| field("server_name").filter(|n| *n == "valkey").and(field("valkey_version")));
        let (flavour, version) = match valkey {
            Some(version) => ("valkey", version),
            None => ("redis", field("redis_version").unwrap_or("unknown")),
        };
        if self.comes_back_empty(handle, run_id.as_deref()) {
            let why = "it came back empty: another process, without the keys that it had. Restore its data, or accept that they are gone with SWITCHYARD ACCEPT and its address (nodes.empty-return)";
            self.attempt_failed(handle, why);
            return;
        }
        let Some(link) = self.links.get_mut(handle) else { return };
        link.phase = Phase::Up;
        link.renewing = false;
        link.failures = 0;
        link.idle_since_us = self.now_us;
        link.flowed_us = self.now_us;
        link.run_id.clone_from(&run_id);
        link.counters.connects.add(1);
        link.counters.connections.add(1);
        let (node, lane, resp3, start_database) = (link.node, link.lane, link.resp3, link.start_database);
        if lane == Lane::Replica {
            // What is known of a node is known of its primary. And a replica is only read: what a connection to it leaves behind
            // changes nothing.
            self.mark_link(handle);
            return;
        }
        self.shared.connection_began(Connection { worker: self.index, node, client_id: link.client_id, run_id: run_id.clone() });
        let (is_empty, persists) = (link.is_empty, link.persists);
        let writes = self.writes_sent(node);
        let name = self.node_name(node);
        let mut restarted = false;
        let (recovered, learn) = self.shared.with_facts(node, |facts| {
            if facts.run_id != run_id {
                restarted = facts.run_id.is_some();
                facts.commands = Commands::Unknown;
                facts.databases = start_database + 1;
                facts.run_id.clone_from(&run_id);
                facts.had_keys = false;
                facts.accepted = false;
                facts.writes_before = writes;
            }
            facts.had_keys |= !is_empty;
            facts.persists = persists;
            facts.flavour = flavour;
            facts.version = version.to_string();
            facts.redis_version = field("redis_version").unwrap_or(version).to_string();
            let first = !facts.tried;
            facts.tried = true;
            let learn = lane == Lane::Main && !resp3 && facts.commands == Commands::Unknown;
            if learn {
                facts.commands = Commands::Asked;
            }
            (facts.failure.take().is_some() || first, learn)
        });
        if restarted {
            warn!(node = %name, "node has restarted: it keeps what its persistence kept");
        }
        if recovered {
            info!(node = %name, version = %format_args!("{flavour} {version}"), "node is up");
        }
        if lane == Lane::Main {
            self.kill_zombies(node, handle, run_id.as_deref());
            if learn {
                self.push_own(handle, &[b"COMMAND"], Purpose::Learn, 0);
            }
        }
        if lane == Lane::Pubsub {
            self.pubsub_link_up(handle, node);
        }
        if lane.is_exclusive() {
            self.exclusive_up(handle);
        }
        self.mark_link(handle);
    }

    /// Adds commands that the node has and our table lacks (modules, renamed commands).
    pub(super) fn learn(&mut self, node: NodeId, answer: &[u8]) {
        let learnt = parse_command_reply(answer);
        self.shared.with_facts(node, |f| f.commands = Commands::Known);
        let mut count = 0;
        self.shared.change_plan(|plan| {
            let mut commands = (*plan.commands).clone();
            count = commands.learn(&learnt);
            let commands = if count == 0 { plan.commands.clone() } else { Arc::new(commands) };
            Plan { commands, ..plan.clone() }
        });
        if count > 0 {
            info!(node = %self.node_name(node), commands = count, "learnt commands from node");
        }
    }
}
