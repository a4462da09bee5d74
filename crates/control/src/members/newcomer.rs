//! Checks of a server that joins as a node. The checks come before any change, and a later failure reverts the join.
//!
//! So a wrong address yields an error and no node. `look` queries, `judge` decides: for `switchyard nodes add`, and for
//! newly configured nodes.

use std::collections::BTreeSet;
use std::time::Duration;

use switchyard_policy::topology::Topology;
use switchyard_resp::units::counted;
use switchyard_router::{Limited, Link, NodeAccess, foreign_connections};
use tracing::{error, warn};

use super::align_settings;
use crate::autoscale::Inspected;
use crate::nodes::fit::{is_older, is_router, unfit_reason};
use crate::nodes::holdings::in_parallel;
use crate::nodes::{Action, NodeAddress, NodeConnection, PROBE_NAME, direct_clients, routers, servers, settled_list};
use crate::running::Running;

/// The fleet that a server joins.
#[derive(Debug, Default)]
pub struct FleetFacts {
    /// The router's own `run_id`, as in its INFO.
    router: String,
    /// Identifier of the router's state directory in the names of its connections.
    site: String,
    /// Name, `run_id` and version (`redis 7.0.15`) of each node, as far as they are known.
    nodes: Vec<(String, Option<String>, Option<String>)>,
    /// Number of databases that clients may use.
    databases: u32,
    /// Commands that work with a single node only.
    limited: Vec<Limited>,
    /// Access to each node, for comparisons of settings.
    access: Vec<NodeAccess>,
}

impl FleetFacts {
    /// Queries these nodes, before a router serves them.
    pub fn query(nodes: &[NodeAccess], site: String, timeout: Duration) -> Self {
        let ask = |access: &NodeAccess| {
            let said = identify(access, timeout).unwrap_or_default();
            (access.name.clone(), said.field("run_id").map(str::to_owned), said.version())
        };
        let databases = nodes.iter().find_map(|access| databases_of(access, timeout)).unwrap_or_default();
        Self {
            router: String::new(),
            site,
            nodes: in_parallel(nodes, ask),
            databases,
            limited: Vec::new(),
            access: nodes.to_vec(),
        }
    }

    /// Facts of the fleet from its router. `None` if it does not serve.
    pub fn of(running: &Running, topology: &Topology, site: String, timeout: Duration) -> Option<Self> {
        let (status, reached, used, router) = running
            .with(|router| (router.status(), router.node_access(), router.databases(), router.run_id().to_owned()))?;
        // Clients cannot use a database that any node lacks.
        let up = status.nodes.iter().filter(|node| node.link == Link::Up && topology.node(node.id).is_some());
        let setting = up.filter_map(|node| databases_of(reached.get(&node.id)?, timeout)).next();
        // Query the nodes, because the router may not have connected yet, or may know an earlier process.
        let said = in_parallel(&status.nodes, |node| identify(reached.get(&node.id)?, timeout));
        let nodes = status.nodes.into_iter().zip(said).map(|(node, said)| match said {
            Some(said) => (node.name, said.field("run_id").map(str::to_owned), said.version()),
            None => (node.name, node.run_id, node.version),
        });
        let nodes = nodes.collect();
        let limited = if topology.nodes().len() == 1 { status.limited } else { Vec::new() };
        let access = reached.into_values().collect();
        Some(Self { router, site, nodes, databases: setting.unwrap_or(used), limited, access })
    }

    /// Commands that meet limits as soon as there is a second node: `RENAME (3: keys of several slots)`.
    pub(crate) fn limits(&self) -> Option<String> {
        let shown = self
            .limited
            .iter()
            .map(|Limited { command, limit, count }| format!("{command} ({count}: {})", limit.text()));
        Some(shown.collect::<Vec<_>>().join(", ")).filter(|limits| !limits.is_empty())
    }

    /// Returns the names of newly listed servers that may not join, and logs the reasons. Sets the settings that
    /// `config_set` (`nodes.config-set`) permits at the other servers.
    pub fn refuse(mut self, newly_listed: &[&NodeAddress], config_set: &[String], timeout: Duration) -> Vec<String> {
        let mut refused = Vec::new();
        for place in newly_listed {
            match self.check_server(place, timeout) {
                Ok((access, newcomer, notes)) => {
                    let settings = align_settings(&access, &self.access, config_set, timeout);
                    notes.iter().chain(&settings).for_each(|note| warn!("node {note}"));
                    if let Some(limits) = self.limits() {
                        warn!("node {} joins: from now on these commands of clients meet limits: {limits}", place.name);
                    }
                    let run_id = newcomer.field("run_id").map(str::to_owned);
                    self.nodes.push((place.name.clone(), run_id, newcomer.version()));
                }
                Err(why) => {
                    error!(
                        "node {} is in the configuration, but does not join: {why}. After correcting that: reload (SIGHUP), or `switchyard nodes add {}`",
                        place.name, place.name
                    );
                    refused.push(place.name.clone());
                }
            }
        }
        refused
    }

    /// Checks a server. Returns its access, its INFO and notes; or the reason why it may not join.
    pub(crate) fn check_server(
        &self,
        place: &NodeAddress,
        timeout: Duration,
    ) -> Result<(NodeAccess, Newcomer, Vec<String>), String> {
        let name = &place.name;
        let access = servers(place).into_iter().next().map(|server| server.access);
        let access = access.ok_or_else(|| format!("{name} has no known address"))?;
        let newcomer =
            look(&access, timeout, self.databases).map_err(|why| format!("{name} {why}; nothing was changed"))?;
        let notes = judge(name, &newcomer, self)?;
        Ok((access, newcomer, notes))
    }

    /// Collects the facts that decide whether a server outside the fleet may be stopped. Queries INFO last, so its
    /// number of keys is the newest fact.
    ///
    /// # Errors
    /// If the server does not reply, or refuses a command.
    pub(crate) fn inspect(&self, place: &NodeAddress, timeout: Duration) -> Result<Inspected, String> {
        let access = servers(place).into_iter().next().map(|server| server.access).ok_or("has no known address")?;
        let mut node = NodeConnection::open(&access, timeout)?;
        let mut query = |args: &[&str]| {
            let reply = node.call(args).map_err(|error| format!("does not answer {}: {error}", args[0]))?;
            reply.error().map_or_else(|| Ok(reply.text()), |error| Err(format!("refuses {}: {error}", args[0])))
        };
        // Redis 6.2 lists no subcommands, so this connection needs a name.
        query(&["CLIENT", "SETNAME", PROBE_NAME])?;
        let clients = settled_list(Action::Removal, || query(&["CLIENT", "LIST"]))?;
        let seen = Newcomer { info: query(&["INFO"])?, ..Newcomer::default() };
        Ok(self.inspected(&place.name, &clients, &seen))
    }

    fn inspected(&self, name: &str, clients: &str, seen: &Newcomer) -> Inspected {
        let run_id = seen.field("run_id").map(str::to_owned);
        // The router may still know a node of this name, which has just left.
        let is_node = |node: &str, known: &Option<String>| node != name && known.is_some() && *known == run_id;
        let node = self
            .nodes
            .iter()
            .find(|(node, known, _)| is_node(node, known))
            .map(|(node, ..)| format!("it is node {node}"));
        let is_replica = seen.field("role") != Some("master");
        let replica = || is_replica.then(|| "it is a replica, or does not state its role".to_owned());
        let replicas = || (seen.field("connected_slaves") != Some("0")).then(|| "replicas follow it".to_owned());
        let router =
            || routers(clients).iter().any(|site| *site != self.site).then(|| "another router uses it".to_owned());
        let client =
            || direct_clients(clients, Action::Removal).first().map(|client| format!("a client uses it ({client})"));
        Inspected {
            user: node.or_else(replica).or_else(replicas).or_else(router).or_else(client),
            // No router has an empty run id, so this counts every connection of this site.
            own_connections: foreign_connections(clients, &self.site, "").len(),
            keys: seen.keys().iter().map(|(_, keys)| keys).sum(),
            run_id,
        }
    }

    /// Reason why a server that has not joined must not be stopped: a router uses it. `None` also if it does not reply.
    pub(crate) fn in_use(&self, place: &NodeAddress, timeout: Duration) -> Option<String> {
        let access = servers(place).into_iter().next()?.access;
        let newcomer = look(&access, timeout, self.databases).ok()?;
        let run_id = newcomer.field("run_id")?;
        let node = self
            .nodes
            .iter()
            .find(|(_, known, _)| known.as_deref() == Some(run_id))
            .map(|(node, ..)| format!("it is node {node}"));
        let is_elsewhere = newcomer.routers.iter().any(|site| *site != self.site);
        node.or_else(|| is_elsewhere.then(|| "another router uses it".to_owned()))
    }
}

/// Queries INFO. `None` if the node does not reply.
fn identify(access: &NodeAccess, timeout: Duration) -> Option<Newcomer> {
    let info = NodeConnection::open(access, timeout).ok()?.call(&["INFO"]).ok()?.text();
    Some(Newcomer { info, ..Newcomer::default() })
}

/// Facts about a server.
#[derive(Debug, Default)]
pub(crate) struct Newcomer {
    info: String,
    /// Whether it accepts a command that only routers have.
    is_router: bool,
    /// Routers that use it, identified by their state directories.
    routers: BTreeSet<String>,
    /// Error of SELECT for the last database that clients may use.
    lacks_databases: Option<String>,
}

impl Newcomer {
    fn field(&self, name: &str) -> Option<&str> {
        self.info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
    }

    /// Product and version, such as `redis 7.0.15`.
    fn version(&self) -> Option<String> {
        let valkey = self.field("valkey_version").map(|version| format!("valkey {version}"));
        valkey.or_else(|| Some(format!("redis {}", self.field("redis_version")?)))
    }

    /// Number of keys by database.
    fn keys(&self) -> Vec<(&str, u64)> {
        let of = |line: &'_ str| line.split_once("keys=").and_then(|(_, rest)| rest.split(',').next()?.parse().ok());
        let databases = self.info.lines().filter(|line| line.starts_with("db"));
        databases.filter_map(|line| Some((line.split(':').next()?, of(line)?))).filter(|(_, keys)| *keys > 0).collect()
    }
}

fn look(access: &NodeAccess, timeout: Duration, databases: u32) -> Result<Newcomer, String> {
    let mut node = NodeConnection::open(access, timeout)?;
    let mut ask = |args: &[&str]| node.call(args).map_err(|error| format!("does not answer {}: {error}", args[0]));
    let info = ask(&["INFO"])?;
    if let Some(error) = info.error() {
        return Err(format!("refuses INFO: {error}"));
    }
    let is_router = is_router(&ask(&["SWITCHYARD", "STATUS"])?);
    let lacks_databases = match databases.checked_sub(1) {
        Some(last) if !is_router => ask(&["SELECT", &last.to_string()])?.error(),
        _ => None,
    };
    let routers = routers(&ask(&["CLIENT", "LIST"])?.text());
    Ok(Newcomer { info: info.text(), is_router, routers, lacks_databases })
}

/// Returns notes about a server that may join, or the reason why it may not.
fn judge(name: &str, newcomer: &Newcomer, fleet: &FleetFacts) -> Result<Vec<String>, String> {
    let run_id = newcomer.field("run_id");
    if run_id == Some(&fleet.router) {
        return Err(format!("{name} is this router itself: a node must be a Redis or Valkey server behind it"));
    }
    if let Some(why) = unfit_reason(name, &newcomer.info, newcomer.is_router) {
        return Err(why);
    }
    let Some(run_id) = run_id else {
        return Err(format!("{name} has no run_id in its INFO, which the router needs to distinguish servers"));
    };
    if let Some((other, ..)) = fleet.nodes.iter().find(|(_, known, _)| known.as_deref() == Some(run_id)) {
        return Err(format!("{name} is the same server as node {other}, by another name (both have run_id {run_id})"));
    }
    if newcomer.field("loading") == Some("1") {
        return Err(format!("{name} is still loading its data: try again when it is done"));
    }
    if newcomer.routers.iter().any(|site| *site != fleet.site) {
        return Err(format!(
            "{name} is used by another router, with a state directory of its own: each would write keys there that the other does not know. Stop that router first, or \
             use another server"
        ));
    }
    let keys = newcomer.keys();
    if !keys.is_empty() {
        let each: Vec<String> = keys.iter().map(|(database, keys)| format!("{database}: {keys}")).collect();
        let (host, port) = name.rsplit_once(':').unwrap_or((name, "6379"));
        let host = host.trim_matches(['[', ']']);
        return Err(format!(
            "{name} holds {} ({}), and a node that joins owns no slots, so no client would find them. To delete them: \
             `redis-cli -h {host} -p {port} FLUSHALL`, then add it again. To keep them: stop the router, and run `switchyard recover`, which \
             makes a slot map from the keys of all servers",
            counted(keys.iter().map(|(_, keys)| keys).sum::<u64>(), "key"),
            each.join(", ")
        ));
    }
    if let Some(error) = &newcomer.lacks_databases {
        return Err(format!(
            "{name} has fewer databases than the other nodes: it refuses SELECT {} ({error}). Set databases there to {}",
            fleet.databases - 1,
            fleet.databases
        ));
    }
    Ok(version_note(newcomer, fleet).into_iter().map(|note| format!("{name} {note}")).collect())
}

/// Warns if the server is older or newer than a node, because it may not be able to read the other's keys.
fn version_note(newcomer: &Newcomer, fleet: &FleetFacts) -> Option<String> {
    let version = newcomer.version()?;
    let beside = |is: &dyn Fn(&str) -> bool| {
        let of = |(name, _, theirs): &(String, Option<String>, Option<String>)| {
            theirs.as_deref().filter(|theirs| is(theirs)).map(|theirs| format!("node {name} ({theirs})"))
        };
        fleet.nodes.iter().find_map(of)
    };
    if let Some(newer) = beside(&|theirs| is_older(&version, theirs)) {
        return Some(format!(
            "is {version}, older than {newer}: it may refuse keys from there, and clients may use only its features"
        ));
    }
    let older = beside(&|theirs| is_older(theirs, &version))?;
    Some(format!(
        "is {version}, newer than {older}: which may refuse keys from here, so they cannot move back. Upgrade it soon"
    ))
}

/// Number of databases of a node, if it replies.
fn databases_of(access: &NodeAccess, timeout: Duration) -> Option<u32> {
    let mut node = NodeConnection::open(access, timeout).ok()?;
    node.call(&["CONFIG", "GET", "databases"]).ok()?.items().get(1)?.text().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fleet() -> FleetFacts {
        let node = |name: &str, run_id: &str, version: &str| {
            (name.to_owned(), Some(run_id.to_owned()), Some(version.to_owned()))
        };
        let nodes =
            vec![node("a:1", "aaa", "redis 7.0.15"), ("b:1".to_owned(), None, None), node("c:1", "ccc", "redis 7.2.4")];
        FleetFacts {
            router: "me".to_owned(),
            site: "0a1b2c3d".to_owned(),
            nodes,
            databases: 16,
            ..FleetFacts::default()
        }
    }

    fn server(more: &str) -> Newcomer {
        let info = format!(
            "# Server\r\nredis_version:7.2.9\r\nrun_id:new\r\nrole:master\r\ncluster_enabled:0\r\nloading:0\r\n{more}"
        );
        Newcomer { info, ..Newcomer::default() }
    }

    #[test]
    fn an_empty_primary_may_join() {
        let notes = judge("n:1", &server("# Keyspace\r\n"), &fleet()).expect("it may join");
        assert!(
            notes.len() == 1 && notes[0].starts_with("n:1 is redis 7.2.9, newer than node a:1 (redis 7.0.15)"),
            "{notes:?}"
        );
        let alike = FleetFacts { nodes: fleet().nodes.split_off(1), ..fleet() };
        assert_eq!(judge("n:1", &server(""), &alike), Ok(Vec::new()));
        let left = Newcomer { routers: ["0a1b2c3d".to_owned()].into(), ..server("") };
        assert!(judge("n:1", &left, &fleet()).is_ok(), "connections of ours are about to go");
        let older = Newcomer { info: server("").info.replace("7.2.9", "7.0.1"), ..Newcomer::default() };
        let notes = judge("n:1", &older, &fleet()).expect("it may join");
        assert!(
            notes.len() == 1 && notes[0].starts_with("n:1 is redis 7.0.1, older than node c:1 (redis 7.2.4)"),
            "{notes:?}"
        );
    }

    #[test]
    fn a_server_in_any_use_is_inspected_as_used() {
        let info = "role:master\r\nconnected_slaves:0\r\n";
        let unused = Newcomer {
            info: format!("run_id:new\r\n{info}db0:keys=2,expires=0\r\ndb3:keys=1,expires=0\r\n"),
            ..Newcomer::default()
        };
        let own =
            "id=4 addr=a name=switchyard-0a1b2c3d-1f-62-0 flags=N cmd=set\nid=5 addr=b name= flags=N cmd=client|list\n";
        let seen = fleet().inspected("n:1", own, &unused);
        assert_eq!(seen, Inspected { run_id: Some("new".to_owned()), user: None, own_connections: 1, keys: 3 });
        let with = |from: &str, to: &str| Newcomer { info: unused.info.replace(from, to), ..Newcomer::default() };
        for (clients, server, user) in [
            ("", with("run_id:new", "run_id:ccc"), "it is node c:1"),
            ("", with("role:master", "role:slave"), "it is a replica"),
            ("", with("slaves:0", "slaves:1"), "replicas follow it"),
            ("id=4 name=switchyard-deadbeef-1f-62-0 cmd=ping\n", with("", ""), "another router uses it"),
            (
                "id=4 addr=10.0.0.1:5 name= flags=N cmd=get\n",
                with("", ""),
                "a client uses it (10.0.0.1:5, last command get)",
            ),
        ] {
            let found = fleet().inspected("n:1", clients, &server).user.expect(user);
            assert!(found.starts_with(user), "{found}");
        }
    }

    #[test]
    fn unfit_servers_are_refused_with_a_reason() {
        let with = |from: &str, to: &str| Newcomer { info: server("").info.replace(from, to), ..Newcomer::default() };
        let used = Newcomer { routers: ["0a1b2c3d", "deadbeef"].map(str::to_owned).into(), ..server("") };
        let lacking = Newcomer { lacks_databases: Some("ERR DB index is out of range".to_owned()), ..server("") };
        for (newcomer, said) in [
            (with("run_id:new", "run_id:me"), "is this router itself"),
            (Newcomer { is_router: true, ..server("") }, "is a Switchyard router"),
            (with("run_id:new", "run_id:ccc"), "is the same server as node c:1"),
            (with("run_id:new\r\n", ""), "no run_id"),
            (with("7.2.9", "6.0.9"), "is redis 6.0.9, which is too old"),
            (with("cluster_enabled:0", "cluster_enabled:1"), "set cluster-enabled no"),
            (
                with("role:master", "role:slave\r\nmaster_host:10.0.0.1\r\nmaster_port:6379"),
                "is a replica of 10.0.0.1:6379",
            ),
            (with("loading:0", "loading:1"), "still loading"),
            (
                server("db0:keys=7,expires=0,avg_ttl=0\r\ndb3:keys=2,expires=2,avg_ttl=5\r\n"),
                "holds 9 keys (db0: 7, db3: 2)",
            ),
            (used, "is used by another router"),
            (lacking, "refuses SELECT 15 (ERR DB index is out of range). Set databases there to 16"),
        ] {
            let why = judge("n:1", &newcomer, &fleet()).expect_err(said);
            assert!(why.starts_with("n:1 ") && why.contains(said), "{why}");
        }
    }
}
