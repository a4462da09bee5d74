//! CONFIG GET and CONFIG SET for an operator who sees one server: the router's own settings, and those of the nodes.
//!
//! GET asks every node. What all answer alike is the answer; what differs is shown as such, with the nodes' names, because any one
//! node's value would be taken for all. What is private to a node (its port, its files, its passwords) is not shown.
//!
//! SET reaches every node, for the names that `nodes.config-set` allows; nothing by default. A node's configuration is the
//! operator's who runs it, and CONFIG SET is how servers have been taken over (`dir`, `dbfilename`): such names are never allowed.

use switchyard_resp::request::Args;
use switchyard_resp::{encode, reply};

use super::dispatch::Flow;
use super::gather::Whole;
use super::local::{glob, parse};
use super::rounds::{Ask, Next, Procedure};
use super::upstream::Lane;
use super::{Stall, Worker};
use crate::shared::Plan;
use crate::slab::Handle;

/// Settings of a node that concern nobody but who runs it. Neither shown nor set; a name that ends in `*` means all that begin so.
const PRIVATE: &[&str] = &[
    "aclfile",
    "acl-pubsub-default",
    "always-show-logo",
    "appenddirname",
    "appendfilename",
    "availability-zone",
    "bind*",
    "cluster-*",
    "crash-*",
    "daemonize",
    "dbfilename",
    "dir",
    "disable-thp",
    "enable-*",
    "logfile",
    "masterauth",
    "masteruser",
    "oom-score-adj*",
    "pidfile",
    "port",
    "primaryauth",
    "primaryuser",
    "proc-title-template",
    "protected-mode",
    "rdma-*",
    "rename-command",
    "replica-announce*",
    "replicaof",
    "requirepass",
    "server_cpulist",
    "slave-announce*",
    "slaveof",
    "socket-mark-id",
    "supervised",
    "syslog-*",
    "tls-*",
    "unixsocket*",
];

/// Settings of ours that CONFIG SET can change.
const OWN_SETTABLE: [&str; 2] = ["slowlog-log-slower-than", "slowlog-max-len"];

fn is_private(name: &str) -> bool {
    PRIVATE.iter().any(|p| p.strip_suffix('*').map_or(*p == name, |start| name.starts_with(start)))
}

/// A node, by its place, and its value.
type NodeValue = (usize, Vec<u8>);

#[derive(Debug)]
struct ConfigGet {
    /// The router's settings that were asked for.
    own: Vec<(&'static str, String)>,
    /// Names of all settings that are the router's to answer.
    ours: Vec<&'static str>,
    nodes: Vec<String>,
}

impl Procedure for ConfigGet {
    fn next(&mut self, _: &mut Worker, resp3: bool, parts: Vec<Vec<u8>>) -> Next {
        let mut out = Vec::new();
        // In the order of the first node, then what only others have.
        let mut found: Vec<(String, Vec<NodeValue>)> = Vec::new();
        for (node, part) in parts.iter().enumerate().filter(|(_, p)| !reply::is_error(p)) {
            let mut elements = reply::elements(part);
            while let (Some(name), Some(value)) = (elements.next(), elements.next()) {
                let name = String::from_utf8_lossy(reply::text(name).unwrap_or_default()).to_ascii_lowercase();
                if is_private(&name) || self.ours.contains(&name.as_str()) {
                    continue;
                }
                let value = (node, reply::text(value).unwrap_or_default().to_vec());
                match found.iter_mut().find(|(n, _)| *n == name) {
                    Some((_, values)) => values.push(value),
                    None => found.push((name, vec![value])),
                }
            }
        }
        if found.is_empty()
            && self.own.is_empty()
            && let Some(error) = parts.iter().find(|p| reply::is_error(p))
            && parts.iter().all(|p| reply::is_error(p))
        {
            return Next::Done(error.clone());
        }
        encode::map(&mut out, found.len() + self.own.len(), resp3);
        for (name, value) in &self.own {
            encode::bulk(&mut out, name.as_bytes());
            encode::bulk(&mut out, value.as_bytes());
        }
        for (name, values) in found {
            encode::bulk(&mut out, name.as_bytes());
            if values.iter().all(|(_, v)| *v == values[0].1) {
                encode::bulk(&mut out, &values[0].1);
            } else {
                let each = values.iter().map(|(node, v)| format!("{} ({})", String::from_utf8_lossy(v), self.nodes[*node]));
                encode::bulk(&mut out, format!("nodes differ: {}", each.collect::<Vec<_>>().join(", ")).as_bytes());
            }
        }
        Next::Done(out)
    }
}

impl Worker {
    pub(super) fn config_get(&mut self, plan: &Plan, handle: Handle, class: u8, raw: &[u8], args: &Args<'_>) -> Flow {
        let live = &plan.live;
        let slower = live.slowlog_slower_than.map_or(-1, |t| t.as_micros() as i64);
        let own = [
            ("cluster-enabled", if live.cluster.is_some() { "yes" } else { "no" }.to_string()),
            ("cluster-require-full-coverage", "no".to_string()),
            ("io-threads", self.shared.mailboxes.len().to_string()),
            ("maxclients", live.max_clients.to_string()),
            ("port", self.shared.port.to_string()),
            ("proto-max-bulk-len", live.argument_max.to_string()),
            ("slowlog-log-slower-than", slower.to_string()),
            ("slowlog-max-len", live.slowlog_max_len.to_string()),
            ("timeout", live.client_idle_timeout.map_or(0, |t| t.as_secs()).to_string()),
        ];
        let Some(client) = self.clients.get_mut(handle) else { return Flow::Close };
        if !client.may_take(Lane::Main) {
            return Flow::Stall(Stall::Barrier);
        }
        let patterns: Vec<Vec<u8>> = args.iter().skip(2).map(<[u8]>::to_ascii_lowercase).collect();
        let ours = own.iter().map(|(name, _)| *name).collect();
        let own = own.into_iter().filter(|(name, _)| patterns.iter().any(|p| glob(p, name.as_bytes()))).collect();
        let nodes = plan.topology.nodes().map(|n| n.name.clone()).collect();
        let asks = plan.topology.nodes().map(|n| Ask { node: n.id, lane: Lane::Main, requests: vec![raw.to_vec()] }).collect();
        self.begin_rounds(handle, class, Box::new(ConfigGet { own, ours, nodes }), asks)
    }

    pub(super) fn config_set(&mut self, plan: &Plan, handle: Handle, class: u8, raw: &[u8], args: &Args<'_>) -> Flow {
        if !args.len().is_multiple_of(2) {
            return self.refuse(handle, class, "ERR wrong number of arguments for 'config|set' command");
        }
        let names: Vec<String> = args.iter().skip(2).step_by(2).map(|n| String::from_utf8_lossy(n).to_ascii_lowercase()).collect();
        let allowed = |name: &String| plan.live.config_set.iter().any(|p| glob(p.as_bytes(), name.as_bytes()));
        if let Some(name) = names.iter().find(|n| !allowed(n) || (is_private(n) && !OWN_SETTABLE.contains(&n.as_str()))) {
            let why = if is_private(name) { "it is a node's own business and cannot be allowed" } else { "allow it with nodes.config-set" };
            return self.refuse(handle, class, &format!("ERR Switchyard does not serve CONFIG SET {name}: {why}, or call it at each node"));
        }
        let own = names.iter().filter(|n| OWN_SETTABLE.contains(&n.as_str())).count();
        if own > 0 && own < names.len() {
            return self.refuse(handle, class, "ERR settings of the router and of the nodes cannot be set by one CONFIG SET");
        }
        let Some(client) = self.clients.get_mut(handle) else { return Flow::Close };
        if own == 0 {
            if !client.may_take(Lane::Main) {
                return Flow::Stall(Stall::Barrier);
            }
            tracing::info!(client = client.details.id, settings = names.join(" "), "CONFIG SET at every node");
            self.gather_every(handle, Lane::Main, raw, class, Whole::Merged(switchyard_resp::command::Merge::Same));
            return Flow::Next;
        }
        let mut live = (*plan.live).clone();
        for (name, value) in names.iter().zip(args.iter().skip(3).step_by(2)) {
            let number = parse::<i64>(value);
            match (name.as_str(), number) {
                ("slowlog-log-slower-than", Some(us @ -1..)) => {
                    live.slowlog_slower_than = u64::try_from(us).ok().map(std::time::Duration::from_micros);
                }
                ("slowlog-max-len", Some(max @ 0..)) => live.slowlog_max_len = usize::try_from(max).unwrap_or(usize::MAX),
                (name, Some(_)) => {
                    let text = format!(
                        "ERR CONFIG SET failed (possibly related to argument '{name}') - argument must be between -1 and 9223372036854775807 inclusive"
                    );
                    return self.refuse(handle, class, &text);
                }
                (name, None) => {
                    let text = format!(
                        "ERR CONFIG SET failed (possibly related to argument '{name}') - argument couldn't be parsed into an integer"
                    );
                    return self.refuse(handle, class, &text);
                }
            }
        }
        let (slower, max) = (live.slowlog_slower_than, live.slowlog_max_len);
        self.shared.change_plan(|plan| {
            let live = crate::settings::Live { slowlog_slower_than: slower, slowlog_max_len: max, ..(*plan.live).clone() };
            Plan { live: std::sync::Arc::new(live), ..plan.clone() }
        });
        // The client that asked for it finds it done; other workers follow in their next turn.
        self.adopt_plan();
        self.answer(handle, class, b"+OK\r\n");
        Flow::Next
    }
}

#[cfg(test)]
mod tests {
    use super::is_private;

    #[test]
    fn what_could_take_over_a_node_is_private() {
        for name in ["dir", "dbfilename", "requirepass", "tls-key-file", "bind", "bind-source-addr", "enable-debug-command", "masterauth"] {
            assert!(is_private(name), "{name}");
        }
        for name in ["maxmemory", "appendonly", "save", "hash-max-listpack-entries", "databases"] {
            assert!(!is_private(name), "{name}");
        }
    }
}
