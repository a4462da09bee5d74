//! Derives findings and advice from the replies of nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use switchyard_resp::command::why_not_covered;

use super::{Finding, Level, Needs, NodeFacts};
use crate::config::counted;

/// Clock skew from which a note is reported, in milliseconds.
const SKEW_MS: i64 = 1000;

/// Clock skew that makes times to live wrong when keys move, in milliseconds.
const SKEW_BAD_MS: i64 = 30_000;

/// Consequence of missing ownership records.
const NO_MARKS: &str = "it has no ownership record of the router that serves it, so no standby can take over, an old copy of the state directory is not refused, and nothing \
                        ends a second router that is started on a copy";

struct Notes<'a> {
    found: Vec<Finding>,
    node: Option<&'a str>,
}

impl Notes<'_> {
    fn error(&mut self, check: &'static str, found: impl Into<String>, advice: impl Into<String>) {
        self.add(Level::Error, check, found, advice);
    }

    fn warning(&mut self, check: &'static str, found: impl Into<String>, advice: impl Into<String>) {
        self.add(Level::Warning, check, found, advice);
    }

    fn note(&mut self, check: &'static str, found: impl Into<String>, advice: impl Into<String>) {
        self.add(Level::Note, check, found, advice);
    }

    fn add(&mut self, level: Level, check: &'static str, found: impl Into<String>, advice: impl Into<String>) {
        self.found.push(Finding {
            level,
            node: self.node.map(str::to_owned),
            check,
            found: found.into(),
            advice: advice.into(),
        });
    }
}

fn number(map: &BTreeMap<String, String>, name: &str) -> Option<u64> {
    map.get(name)?.trim().parse().ok()
}

/// Returns the findings about these nodes, worst first.
pub(crate) fn examine(nodes: &[NodeFacts], needs: &Needs) -> Vec<Finding> {
    let mut found = Vec::new();
    for node in nodes {
        let mut notes = Notes { found: Vec::new(), node: Some(&node.name) };
        match &node.failure {
            // A replica that is down fails no command, but reads and failover have one server less.
            Some(why) => notes.add(
                if node.replica_of.is_some() { Level::Warning } else { Level::Error },
                "connection",
                why.clone(),
                "check that the server runs, that its address and port are right, and that the user and the password of [nodes] or [[node]] are its own",
            ),
            None => {
                server(node, &mut notes);
                clients(node, &mut notes);
                storage(node, &mut notes);
                limits(node, needs, &mut notes);
                rights(node, needs, &mut notes);
            }
        }
        found.append(&mut notes.found);
    }
    let up: Vec<&NodeFacts> = nodes.iter().filter(|n| n.failure.is_none()).collect();
    let mut notes = Notes { found, node: None };
    together(&up, &mut notes);
    if needs.hot_copies {
        written_past_copies(&up, &mut notes);
    }
    notes.found.sort_by_key(|f| std::cmp::Reverse(f.level));
    notes.found
}

fn server(node: &NodeFacts, notes: &mut Notes<'_>) {
    let info = |name: &str| node.info.get(name).map(String::as_str).unwrap_or_default();
    if node.info.is_empty() {
        return notes.error(
            "info",
            "it does not answer INFO",
            "allow INFO to our user: the router identifies servers by it",
        );
    }
    let version = info("redis_version");
    let major_minor: Vec<u32> = version.split('.').take(2).filter_map(|p| p.parse().ok()).collect();
    if let [major, minor] = major_minor[..] {
        if (major, minor) < (6, 0) {
            notes.error(
                "version",
                format!("it is version {version}"),
                "use 6.2 or later; Switchyard is tested with 7.0 and later",
            );
        } else if major < 7 {
            notes.warning("version", format!("it is version {version}"), "Switchyard is tested with 7.0 and later");
        }
    }
    let (flavour, own) = node.info.get("valkey_version").map_or(("redis", version), |own| ("valkey", own.as_str()));
    if let Some(why) = why_not_covered(flavour, own).filter(|_| !own.is_empty()) {
        notes.warning("newer version", why, "use a version of the server that the table covers, or a newer Switchyard");
    }
    if let Some(primary) = node.replica_of {
        replica(node, primary, notes);
    } else if info("role") == "slave" {
        notes.error(
            "role",
            format!("it is a replica of {}:{}: writes fail", info("master_host"), info("master_port")),
            "name the primary instead, or promote this server (REPLICAOF NO ONE)",
        );
    }
    if info("cluster_enabled") == "1" {
        notes.error(
            "cluster mode",
            "it runs in cluster mode: it refuses keys of slots that it does not own",
            "set cluster-enabled no; Switchyard places the slots",
        );
    }
    if info("loading") == "1" {
        notes.warning("loading", "it is loading its data, and refuses commands until it is done", "wait");
    }
    match node.clock {
        Some((off, took)) if off.abs() - took > SKEW_BAD_MS => notes.error(
            "clock",
            format!("its clock is {:.1} s off ours", off as f64 / 1000.0),
            "run NTP: expiry times that are given as timestamps are wrong there",
        ),
        Some((off, took)) if off.abs() - took > SKEW_MS => {
            notes.warning(
                "clock",
                format!("its clock is {:.1} s off ours", off as f64 / 1000.0),
                "run NTP on both machines",
            );
        }
        _ => {}
    }
}

/// Checks the role and replication state of a replica, which decide whether it can serve reads and take over.
fn replica(node: &NodeFacts, primary: SocketAddr, notes: &mut Notes<'_>) {
    let info = |name: &str| node.info.get(name).map(String::as_str).unwrap_or_default();
    if info("role") != "slave" {
        return notes.error(
            "role",
            format!("it reports that it is a primary, in addition to {primary}: it gets no writes, and is not read"),
            "find out the primary with `switchyard status`, and make the other server its replica (REPLICAOF): data that only that server has is lost then",
        );
    }
    let follows = (info("master_host"), info("master_port"));
    let address = follows.0.parse::<IpAddr>().ok().zip(follows.1.parse::<u16>().ok()).map(SocketAddr::from);
    match address {
        Some(address) if address != primary => notes.error(
            "role",
            format!("it follows {address}, and not the primary {primary}: it is not read"),
            format!("REPLICAOF {} {}, unless another server is the primary", primary.ip(), primary.port()),
        ),
        Some(_) => {}
        None => notes.note(
            "role",
            format!(
                "it follows {}:{}, a name: whether that is the primary {primary} is not checked",
                follows.0, follows.1
            ),
            "set REPLICAOF with an address",
        ),
    }
    // The replica was never in sync: its first synchronization is about to begin.
    let is_first = info("master_link_down_since_seconds") == "-1";
    if info("master_sync_in_progress") == "1" || is_first {
        notes.warning(
            "replication",
            "it is synchronizing with its primary, and is not read until that has finished",
            "wait",
        );
    } else if info("master_link_status") != "up" {
        notes.error(
            "replication",
            "it has lost its primary: its data becomes stale, and it is not read",
            "see its log; requirepass at the primary needs masterauth (and masteruser) here",
        );
    }
    if info("slave_read_only") == "0" {
        notes.warning(
            "replica-read-only",
            "it accepts writes that its primary never gets",
            "set replica-read-only yes",
        );
    }
    if info("slave_priority") == "0" {
        notes.note(
            "replica-priority",
            "it is never promoted by Sentinel (replica-priority 0)",
            "fine for a copy to back up from",
        );
    }
}

/// Checks for clients that bypass the router. Harmless while a fleet is being taken over, but not once keys move.
fn clients(node: &NodeFacts, notes: &mut Notes<'_>) {
    let Some(first) = node.direct.iter().find(|client| client.writes).or(node.direct.first()) else { return };
    let writers = node.direct.iter().filter(|client| client.writes).count();
    let of = match writers {
        0 => "none of which wrote with its last command".to_owned(),
        1 => "1 of them writes".to_owned(),
        writers => format!("{writers} of them write"),
    };
    notes.warning(
        "direct clients",
        format!("its keys are used past the router by {}, {of}; one is {first}", counted(node.direct.len(), "client")),
        "connect them to the router before keys move, or fence them off (docs/moving-data.md): they would not find moved keys",
    );
}

fn storage(node: &NodeFacts, notes: &mut Notes<'_>) {
    let info = |name: &str| node.info.get(name).map(String::as_str).unwrap_or_default();
    let append_only = info("aof_enabled") == "1";
    if !append_only && node.config.get("save").is_some_and(String::is_empty) {
        notes.warning("persistence",
            "it loses its keys in a restart (appendonly no, save \"\")",
            "fine for a cache; else set appendonly yes. A node that returns empty is served as it is unless nodes.on-data-loss is \"hold\"",
        );
    }
    for (field, what) in
        [("rdb_last_bgsave_status", "last snapshot"), ("aof_last_write_status", "last write to its append-only file")]
    {
        if info(field) == "err" {
            notes.error("persistence", format!("its {what} failed"), "see its log: often the disk is full");
        }
    }
    let (used, max) = (number(&node.info, "used_memory"), number(&node.info, "maxmemory").filter(|m| *m > 0));
    let policy = info("maxmemory_policy");
    if let (Some(used), Some(max)) = (used, max) {
        if used.saturating_mul(10) > max.saturating_mul(9) {
            let (level, then) = match policy {
                "noeviction" => (Level::Error, "writes fail when it is full"),
                _ => (Level::Warning, "it evicts keys"),
            };
            notes.add(
                level,
                "memory",
                format!("it uses {}% of maxmemory; {then}", used * 100 / max),
                "give it more memory, or add a node",
            );
        }
        if policy.starts_with("allkeys") {
            notes.note("eviction", format!("it evicts any key when it is full ({policy})"), "fine for a cache");
        }
    }
}

fn limits(node: &NodeFacts, needs: &Needs, notes: &mut Notes<'_>) {
    let (least, most) = needs.connections;
    let max = number(&node.config, "maxclients").or_else(|| number(&node.info, "maxclients"));
    if let Some(max) = max {
        let max = usize::try_from(max).unwrap_or(usize::MAX);
        let advice = format!("raise maxclients there above {most}, or lower the connection limits in [nodes]");
        if max < least {
            notes.error(
                "maxclients",
                format!("it accepts {max} connections, and the router needs at least {least}"),
                advice,
            );
        } else if max < most {
            notes.warning(
                "maxclients",
                format!("it accepts {max} connections, and the router may need up to {most}"),
                advice,
            );
        }
    }
    if let Some(timeout) = number(&node.config, "timeout").filter(|t| *t > 0) {
        notes.warning(
            "timeout",
            format!("it closes connections that are quiet for {timeout} s; the router then reconnects"),
            "set timeout 0 there",
        );
    }
    if let Some(bulk) = number(&node.config, "proto-max-bulk-len")
        && (bulk as u128) < needs.argument_max as u128
    {
        notes.warning(
            "proto-max-bulk-len",
            format!("it accepts arguments up to {bulk} bytes, and clients may send up to {}", needs.argument_max),
            "set clients.argument-max to the same: a larger argument breaks the connection to the node",
        );
    }
    if node.config.get("protected-mode").is_some_and(|v| v == "yes") && !node.authenticates && !node.loopback {
        notes.note(
            "protected-mode",
            "it is in protected mode and requires no password",
            "check that it is bound to the address named here",
        );
    }
    if node.config.get("protected-mode").is_some_and(|v| v == "no") && !node.authenticates {
        notes.warning(
            "password",
            "it requires no password and is not in protected mode: any client with network access can bypass the router",
            "set a password or an ACL user there, and give it to the router in [nodes]",
        );
    }
}

fn rights(node: &NodeFacts, needs: &Needs, notes: &mut Notes<'_>) {
    if let Some(error) = &node.config_error {
        notes.note(
            "rights",
            format!("CONFIG GET is refused, so not everything could be checked: {error}"),
            "allow +config|get to our user",
        );
    }
    for name in &node.missing {
        let (level, then) = match name.as_str() {
            "CLIENT" | "COMMAND" | "INFO" | "SELECT" => (Level::Error, "the router cannot work without it"),
            "ACL" => (Level::Warning, NO_MARKS),
            _ => (Level::Warning, "clients that use it get the node's error"),
        };
        notes.add(
            level,
            "renamed command",
            format!("it has no {name}: {then}"),
            "remove rename-command from its configuration, and use ACLs instead",
        );
    }
    for (name, error) in &node.refused {
        let (level, then) = match name.as_str() {
            "CLIENT ID" | "INFO" | "SELECT" => (Level::Error, "the router cannot work without it"),
            "CLIENT KILL" => (Level::Error, "commands left by a broken connection cannot be confirmed as ended"),
            "DUMP" | "RESTORE" | "MEMORY USAGE" | "UNLINK" => {
                (Level::Warning, "commands on keys of several slots fail")
            }
            "COMMAND" => (
                Level::Warning,
                "commands of modules and newer versions stay unknown, and scripts are not checked fully",
            ),
            "ACL GETUSER" | "ACL SETUSER" => (Level::Warning, NO_MARKS),
            "ACL USERS" => (
                Level::Warning,
                "a first start cannot detect that the node belongs to a larger fleet than the listed one",
            ),
            "FUNCTION LIST" | "FUNCTION DUMP" => {
                (Level::Warning, "functions cannot be restored at nodes that return empty")
            }
            _ => (Level::Warning, "clients that need it get the node's error"),
        };
        notes.add(
            level,
            "rights",
            format!("our user may not use {name}: {then} ({error})"),
            "ACL SETUSER our user there: ~* &* +@all -@dangerous +client +info +config|get +keys +function +acl|users +acl|getuser +acl|setuser",
        );
    }
    if let Some(functions) = node.functions.as_ref().filter(|f| needs.check_scripts && !f.unchecked.is_empty()) {
        notes.warning(
            "functions",
            format!(
                "libraries that were loaded past the router can access undeclared keys: {}",
                functions.unchecked.join(", ")
            ),
            "load them through the router: FUNCTION LOAD REPLACE",
        );
    }
}

/// Hot copies are never older than writes through the router. Nodes report writes that bypass it. One finding for all
/// nodes.
fn written_past_copies(nodes: &[&NodeFacts], notes: &mut Notes<'_>) {
    let names: Vec<&str> = nodes
        .iter()
        .filter(|node| node.direct.iter().any(|client| client.writes))
        .map(|node| node.name.as_str())
        .collect();
    if names.is_empty() {
        return;
    }
    notes.note(
        "hot copies",
        format!("clients bypass the router with writes at {}: hot copies of these keys are served until the node's invalidation arrives (CLIENT TRACKING), a moment later", names.join(", ")),
        "if even that moment is too long, list the keys in hot-copies.exclude, or set hot-copies.mode = \"off\"",
    );
}

/// Checks that compare nodes with each other.
fn together(nodes: &[&NodeFacts], notes: &mut Notes<'_>) {
    let mut same: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for node in nodes {
        if let Some(run_id) = node.info.get("run_id") {
            same.entry(run_id).or_default().push(&node.name);
        }
    }
    for names in same.values().filter(|names| names.len() > 1) {
        notes.error(
            "same server",
            format!("{} are one and the same server", names.join(" and ")),
            "name it once: keys of both would mix",
        );
    }
    let versions = by_value(nodes, |n| {
        let flavour = n.info.get("valkey_version").map_or("redis", |_| "valkey");
        n.info.get("valkey_version").or_else(|| n.info.get("redis_version")).map(|v| format!("{flavour} {v}"))
    });
    if versions.len() > 1 {
        notes.warning(
            "versions differ",
            shown(&versions),
            "keys may not move from a newer server to an older one; clients should use only what the oldest has",
        );
    }
    for (name, level, then) in [
        ("maxmemory-policy", Level::Warning, "keys are evicted on some nodes and not on others"),
        ("appendonly", Level::Warning, "a crash costs different amounts of data on different nodes"),
        ("save", Level::Warning, "a restart costs different amounts of data on different nodes"),
        ("databases", Level::Warning, "SELECT of a database that not all have fails"),
        ("notify-keyspace-events", Level::Warning, "subscribers miss the events of some nodes"),
        ("maxmemory", Level::Note, "keys are spread by slots, not by memory"),
    ] {
        // It is common that only replicas keep snapshots.
        let values =
            by_value(nodes, |n| n.config.get(name).filter(|_| name != "save" || n.replica_of.is_none()).cloned());
        if values.len() > 1 {
            let how = match name {
                "notify-keyspace-events" | "maxmemory-policy" => {
                    ": CONFIG SET, which the router passes on with the name in nodes.config-set"
                }
                "databases" => ", in their configuration files",
                _ => "",
            };
            notes.add(
                level,
                "settings differ",
                format!("{name}: {}; {then}", shown(&values)),
                format!("set {name} to one value on all nodes{how}"),
            );
        }
    }
    let modules = by_value(nodes, |n| Some(n.modules.join(",")));
    if modules.len() > 1 {
        notes.warning("modules differ", shown(&modules), "load the same modules on all nodes");
    }
    let names: BTreeSet<&String> =
        nodes.iter().filter_map(|n| n.functions.as_ref()).flat_map(|f| f.code.keys()).collect();
    for name in names {
        let values = by_value(nodes, |n| n.functions.as_ref().map(|f| f.code.get(name).cloned().unwrap_or_default()));
        if values.len() > 1 {
            let lacking: Vec<&str> =
                values.get("").map(|nodes| nodes.iter().map(String::as_str).collect()).unwrap_or_default();
            let found = if lacking.is_empty() || values.len() > 2 {
                format!("the library {name} has different code on different nodes")
            } else {
                format!("the library {name} is not on {}", lacking.join(", "))
            };
            notes.error("functions differ", found, "load it again through the router: FUNCTION LOAD REPLACE");
        }
    }
}

/// Groups the names of the nodes by value.
fn by_value(nodes: &[&NodeFacts], value: impl Fn(&NodeFacts) -> Option<String>) -> BTreeMap<String, Vec<String>> {
    let mut values: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for node in nodes {
        if let Some(value) = value(node) {
            values.entry(value).or_default().push(node.name.clone());
        }
    }
    values
}

fn shown(values: &BTreeMap<String, Vec<String>>) -> String {
    let one = |(value, nodes): (&String, &Vec<String>)| {
        format!("{} on {}", if value.is_empty() { "nothing" } else { value }, nodes.join(", "))
    };
    values.iter().map(one).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good(name: &str) -> NodeFacts {
        let map = |pairs: &[(&str, &str)]| pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        NodeFacts {
            name: name.to_owned(),
            loopback: true,
            info: map(&[
                ("redis_version", "7.0.15"),
                ("role", "master"),
                ("cluster_enabled", "0"),
                ("aof_enabled", "1"),
                ("run_id", name),
            ]),
            config: map(&[
                ("maxclients", "10000"),
                ("timeout", "0"),
                ("save", ""),
                ("databases", "16"),
                ("proto-max-bulk-len", "536870912"),
            ]),
            clock: Some((3, 1)),
            ..NodeFacts::default()
        }
    }

    fn found(nodes: &[NodeFacts]) -> Vec<(Level, &'static str)> {
        let needs = Needs { connections: (4, 80), argument_max: 512 << 20, check_scripts: true, hot_copies: true };
        examine(nodes, &needs).iter().map(|f| (f.level, f.check)).collect()
    }

    #[test]
    fn healthy_nodes_have_no_findings() {
        assert_eq!(found(&[good("a"), good("b")]), []);
    }

    #[test]
    fn each_fault_is_found_and_the_worst_comes_first() {
        type Fault = (fn(&mut NodeFacts), Level, &'static str);
        let faults: [Fault; 18] = [
            (|n| n.failure = Some("cannot be reached".into()), Level::Error, "connection"),
            (|n| drop(n.info.insert("redis_version".into(), "5.0.7".into())), Level::Error, "version"),
            (|n| drop(n.info.insert("redis_version".into(), "8.13.0".into())), Level::Warning, "newer version"),
            (|n| drop(n.info.insert("role".into(), "slave".into())), Level::Error, "role"),
            (|n| drop(n.info.insert("cluster_enabled".into(), "1".into())), Level::Error, "cluster mode"),
            (|n| drop(n.info.insert("aof_enabled".into(), "0".into())), Level::Warning, "persistence"),
            (|n| drop(n.info.insert("rdb_last_bgsave_status".into(), "err".into())), Level::Error, "persistence"),
            (|n| n.clock = Some((-5000, 2)), Level::Warning, "clock"),
            (|n| n.clock = Some((3_600_000, 2)), Level::Error, "clock"),
            (|n| drop(n.config.insert("maxclients".into(), "3".into())), Level::Error, "maxclients"),
            (|n| drop(n.config.insert("maxclients".into(), "50".into())), Level::Warning, "maxclients"),
            (|n| drop(n.config.insert("timeout".into(), "300".into())), Level::Warning, "timeout"),
            (
                |n| drop(n.config.insert("proto-max-bulk-len".into(), "1048576".into())),
                Level::Warning,
                "proto-max-bulk-len",
            ),
            (|n| n.missing.push("CLIENT".into()), Level::Error, "renamed command"),
            (|n| n.refused.push(("CLIENT KILL".into(), "NOPERM".into())), Level::Error, "rights"),
            (|n| drop(n.config.insert("databases".into(), "4".into())), Level::Warning, "settings differ"),
            (|n| drop(n.config.insert("save".into(), "60 1".into())), Level::Warning, "settings differ"),
            (|n| n.modules.push("bf".into()), Level::Warning, "modules differ"),
        ];
        for (break_it, level, check) in faults {
            let mut broken = good("b");
            break_it(&mut broken);
            let all = found(&[good("a"), broken]);
            assert!(all.contains(&(level, check)), "{check}: {all:?}");
            assert!(all.windows(2).all(|w| w[0].0 >= w[1].0), "{all:?}");
        }
        assert_eq!(found(&[good("a"), NodeFacts { name: "b".into(), ..good("a") }]), [(Level::Error, "same server")]);
    }

    #[test]
    fn writes_that_bypass_hot_copies_are_reported_once() {
        use switchyard_control::nodes::DirectClient;
        let client = |writes| DirectClient {
            address: "10.0.0.3:7".to_owned(),
            name: String::new(),
            user: "app".to_owned(),
            command: "set".to_owned(),
            writes,
        };
        let used = |name: &str, writes| NodeFacts { direct: vec![client(writes)], ..good(name) };
        let told = |nodes: &[NodeFacts], hot_copies| {
            let needs = Needs { connections: (4, 80), argument_max: 512 << 20, check_scripts: true, hot_copies };
            examine(nodes, &needs)
                .into_iter()
                .filter(|f| f.check == "hot copies")
                .map(|f| (f.node, f.found))
                .collect::<Vec<_>>()
        };
        let [(None, found)] = &told(&[used("a", true), used("b", true), used("c", false)], true)[..] else {
            panic!("one note of no node")
        };
        assert!(found.contains("at a, b:"), "{found}");
        assert_eq!(told(&[used("a", true)], false), []);
        assert_eq!(told(&[used("a", false), good("b")], true), []);
    }

    #[test]
    fn replicas_are_checked_as_replicas() {
        let follower = |change: fn(&mut NodeFacts)| {
            let mut replica = NodeFacts { replica_of: "10.0.0.1:6379".parse().ok(), ..good("a replica b") };
            for (field, value) in
                [("role", "slave"), ("master_host", "10.0.0.1"), ("master_port", "6379"), ("master_link_status", "up")]
            {
                replica.info.insert(field.into(), value.into());
            }
            change(&mut replica);
            found(&[good("a"), replica])
        };
        assert_eq!(follower(|_| ()), []);
        type Fault = (fn(&mut NodeFacts), Level, &'static str);
        let faults: [Fault; 6] = [
            (|n| n.failure = Some("cannot be reached".into()), Level::Warning, "connection"),
            (|n| drop(n.info.insert("role".into(), "master".into())), Level::Error, "role"),
            (|n| drop(n.info.insert("master_port".into(), "6380".into())), Level::Error, "role"),
            (|n| drop(n.info.insert("master_link_status".into(), "down".into())), Level::Error, "replication"),
            (|n| drop(n.info.insert("slave_read_only".into(), "0".into())), Level::Warning, "replica-read-only"),
            (|n| drop(n.config.insert("maxclients".into(), "3".into())), Level::Error, "maxclients"),
        ];
        for (break_it, level, check) in faults {
            assert_eq!(follower(break_it), [(level, check)]);
        }
    }

    #[test]
    fn functions_are_compared() {
        use super::super::Functions;
        let with = |name: &str, code: &[(&str, &str)]| NodeFacts {
            functions: Some(Functions {
                code: code.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
                unchecked: Vec::new(),
            }),
            ..good(name)
        };
        assert_eq!(found(&[with("a", &[("l", "x")]), with("b", &[("l", "x")])]), []);
        let needs = Needs { connections: (4, 80), argument_max: 512 << 20, check_scripts: true, hot_copies: true };
        let lacking = examine(&[with("a", &[("l", "x")]), with("b", &[])], &needs);
        assert!(lacking[0].found.contains("is not on b"), "{lacking:?}");
        let other = examine(&[with("a", &[("l", "x")]), with("b", &[("l", "y")])], &needs);
        assert!(other[0].found.contains("different code"), "{other:?}");
    }
}
