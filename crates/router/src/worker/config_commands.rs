//! CONFIG GET and CONFIG SET, as for a single server: settings of the router and of the nodes.
//!
//! GET queries every node. If the values differ, one value of the same type is returned, chosen per setting
//! ([`super::config_values`]), because programs parse it. Settings private to a node (port, files, passwords) are
//! hidden.
//!
//! SET of a setting of the router ([`crate::config_set`]) takes effect at every worker, for users who may call it. SET
//! of a node's setting is sent to every node, if `nodes.config-set` allows its name; by default none. The configuration
//! of a node belongs to its operator, and CONFIG SET has been used to take over servers (`dir`, `dbfilename`): such
//! names are never allowed.

use std::sync::Arc;

use switchyard_resp::{encode, glob, reply};

use super::command::parse;
use super::downstreams::Downstreams;
use super::downstreams::waits::Stall;
use super::fan_out::FanOutScope;
use super::flow::Flow;
use super::gather::{Aggregation, FanOut, Gathers};
use super::invocation::Invocation;

use super::multi_step::{MultiStepCommand, Next, StepRequest};
use super::turn::Turn;
use super::upstreams::Upstreams;
use super::{Worker, config_values};
use crate::config_set::{SETTABLE, Settable, allows_config_set};
use crate::lane::Lane;
use crate::open_files;
use crate::settings::RuntimeSettings;
use crate::shared::RoutingSnapshot;

/// Settings that only concern the operator of a node. Neither shown nor set. A name with a final `*` is a prefix.
const PRIVATE: &str = "aclfile acl-pubsub-default always-show-logo appenddirname appendfilename availability-zone bind* cluster-* crash-* daemonize \
     dbfilename dir disable-thp enable-* logfile masterauth masteruser oom-score-adj* pidfile port primaryauth primaryuser \
     proc-title-template protected-mode rdma-* rename-command replica-announce* replicaof requirepass server_cpulist slave-announce* \
     slaveof socket-mark-id supervised syslog-* tls-* unixsocket*";

/// Explains why CONFIG SET does not change a setting of the router, or a frequently used one, and names the
/// alternative.
fn instead(name: &str) -> Option<&'static str> {
    Some(match name {
        "requirepass" => {
            "change the default user by ACL SETUSER, or clients.password in Switchyard's configuration file, and send SIGHUP"
        }
        "client-output-buffer-limit" => {
            "set clients.output-limit, push-limit, push-soft-limit and push-soft-time in Switchyard's configuration file, and send SIGHUP"
        }
        "cluster-enabled" | "cluster-require-full-coverage" => {
            "set cluster.emulate in Switchyard's configuration file, and restart it"
        }
        "io-threads" | "port" => "set it in Switchyard's configuration file (workers, listen), and restart it",
        _ => return None,
    })
}

fn is_private(name: &str) -> bool {
    PRIVATE.split(' ').any(|p| p.strip_suffix('*').map_or(p == name, |start| name.starts_with(start)))
}

#[derive(Debug)]
struct ConfigGet {
    /// Requested settings of the router.
    own: Vec<(&'static str, String)>,
    /// Names of all settings that the router answers itself.
    ours: Vec<&'static str>,
}

impl MultiStepCommand for ConfigGet {
    fn next(&mut self, _: &Turn, _: &Upstreams, resp3: bool, parts: Vec<Vec<u8>>) -> Next {
        let mut out = Vec::new();
        // In the order of the first node, followed by settings of other nodes only.
        let mut found: Vec<(String, Vec<Vec<u8>>)> = Vec::new();
        for part in parts.iter().filter(|p| !reply::is_error(p)) {
            let mut elements = reply::elements(part);
            while let (Some(name), Some(value)) = (elements.next(), elements.next()) {
                let name = String::from_utf8_lossy(reply::text(name).unwrap_or_default()).to_ascii_lowercase();
                if is_private(&name) || self.ours.contains(&name.as_str()) {
                    continue;
                }
                let value = reply::text(value).unwrap_or_default().to_vec();
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
            encode::bulk(&mut out, &config_values::one_of(&name, &values));
        }
        Next::Done(out)
    }
}

impl Worker {
    pub(super) fn config_set(&mut self, call: &Invocation<'_>) -> Flow {
        let Invocation { routing, handle, raw, args, .. } = *call;
        let class = call.class();
        if !args.len().is_multiple_of(2) {
            return self.cx.down.refuse(
                &self.cx.turn,
                handle,
                class,
                "ERR wrong number of arguments for 'config|set' command",
            );
        }
        let names: Vec<String> =
            args.iter().skip(2).step_by(2).map(|n| String::from_utf8_lossy(n).to_ascii_lowercase()).collect();
        if let Some(name) = names.iter().enumerate().find_map(|(at, name)| names[..at].contains(name).then_some(name)) {
            let text = format!("ERR CONFIG SET failed (possibly related to argument '{name}') - duplicate parameter");
            return self.cx.down.refuse(&self.cx.turn, handle, class, &text);
        }
        let own: Vec<&Settable> = names.iter().filter_map(|name| SETTABLE.iter().find(|s| s.name == name)).collect();
        let is_own = |name: &String| own.iter().any(|s| s.name == name);
        let is_allowed = |name: &String| allows_config_set(&routing.live.config_set, name);
        for name in names.iter().filter(|name| !is_own(name)) {
            let why = match instead(name) {
                Some(instead) => instead,
                None if is_private(name) => "it is specific to a node and cannot be allowed, so call it at each node",
                None if !is_allowed(name) => "allow it with nodes.config-set, or call it at each node",
                None => continue,
            };
            return self.cx.down.refuse(
                &self.cx.turn,
                handle,
                class,
                &format!("ERR Switchyard does not serve CONFIG SET {name}: {why}"),
            );
        }
        if !own.is_empty() && own.len() < names.len() {
            return self.cx.down.refuse(
                &self.cx.turn,
                handle,
                class,
                "ERR settings of the router and of the nodes cannot be set by one CONFIG SET",
            );
        }
        let Some(client) = self.cx.down.get_mut(handle) else { return Flow::Close };
        let id = client.identity().id();
        if own.is_empty() {
            if !client.may_take(Lane::Main) {
                return Flow::Stall(Stall::Barrier);
            }
            tracing::info!(client = id, settings = names.join(" "), "CONFIG SET at every node");
            return self.gathers.fan_out(
                &self.cx.turn,
                &mut self.cx.down,
                FanOut {
                    client: handle,
                    lane: Lane::Main,
                    reach: FanOutScope::Unanimous,
                    requests: vec![raw.to_vec()],
                    class,
                    whole: Aggregation::Merged(switchyard_resp::command::Merge::Same),
                },
            );
        }
        let mut numbers = Vec::with_capacity(own.len());
        for (settable, value) in own.iter().zip(args.iter().skip(3).step_by(2)) {
            let why = match parse::<i64>(value) {
                None => "argument couldn't be parsed into an integer".to_owned(),
                Some(number) if !settable.range.contains(&number) => {
                    format!(
                        "argument must be between {} and {} inclusive",
                        settable.range.start(),
                        settable.range.end()
                    )
                }
                Some(number) => match room_for(settable.name, number, &routing.live) {
                    Ok(()) => {
                        numbers.push(number);
                        continue;
                    }
                    Err(why) => why,
                },
            };
            let text = format!("ERR CONFIG SET failed (possibly related to argument '{}') - {why}", settable.name);
            return self.cx.down.refuse(&self.cx.turn, handle, class, &text);
        }
        tracing::info!(client = id, settings = names.join(" "), "CONFIG SET, until the next reload or restart");
        self.cx.turn.shared().change_routing(|routing| {
            let mut overrides = (*routing.overrides).clone();
            own.iter().zip(&numbers).for_each(|(settable, number)| overrides.set(settable, *number));
            let live = overrides.over((*routing.live).clone());
            RoutingSnapshot { live: Arc::new(live), overrides: Arc::new(overrides), ..routing.clone() }
        });
        // The calling client sees the change at once; other workers adopt it in their next turn.
        self.adopt_routing();
        self.cx.down.answer(&self.cx.turn, handle, class, b"+OK\r\n");
        Flow::Next
    }
}

/// Checks whether the system allows a setting: more clients need more open files.
fn room_for(name: &str, number: i64, live: &RuntimeSettings) -> Result<(), String> {
    if name != "maxclients" {
        return Ok(());
    }
    let limit = open_files::raise(live.files_reserved.saturating_add(number.unsigned_abs()));
    let room = limit.saturating_sub(live.files_reserved);
    if room < number.unsigned_abs() {
        return Err(format!(
            "The operating system is not able to handle the specified number of clients, try with {room} (its limit of open files is {limit})"
        ));
    }
    Ok(())
}

/// Returns the router's settings in Redis's format.
fn own_settings(turn: &Turn, live: &RuntimeSettings) -> Vec<(&'static str, String)> {
    let slower = live.slowlog_slower_than.map_or(-1, |t| t.as_micros() as i64);
    // 0 means no limit.
    let normal = Some(live.client_output_limit).filter(|limit| *limit < usize::MAX).unwrap_or(0);
    let push = (live.push_limit, live.push_soft_limit, live.push_soft_time.as_secs());
    vec![
        (
            "client-output-buffer-limit",
            format!("normal {normal} 0 0 slave 0 0 0 pubsub {} {} {}", push.0, push.1, push.2),
        ),
        ("cluster-enabled", if live.cluster.is_some() { "yes" } else { "no" }.to_string()),
        ("cluster-require-full-coverage", "no".to_string()),
        ("io-threads", turn.shared().mailboxes.len().to_string()),
        ("maxclients", live.max_clients.to_string()),
        ("port", turn.shared().port.to_string()),
        ("proto-max-bulk-len", live.argument_max.to_string()),
        ("slowlog-log-slower-than", slower.to_string()),
        ("slowlog-max-len", live.slowlog_max_len.to_string()),
        ("timeout", live.client_idle_timeout.map_or(0, |t| t.as_secs()).to_string()),
    ]
}

impl Gathers {
    pub(super) fn config_get(&mut self, turn: &Turn, down: &mut Downstreams, call: &Invocation<'_>) -> Flow {
        let Invocation { routing, handle, raw, args, .. } = *call;
        let class = call.class();
        let own = own_settings(turn, &routing.live);
        let Some(client) = down.get_mut(handle) else { return Flow::Close };
        if !client.may_take(Lane::Main) {
            return Flow::Stall(Stall::Barrier);
        }
        let ours = own.iter().map(|(name, _)| *name).collect();
        let own = own
            .into_iter()
            .filter(|(name, _)| args.iter().skip(2).any(|p| glob::matches_setting(p, name.as_bytes())))
            .collect();
        let asks = turn
            .data_nodes()
            .all()
            .into_iter()
            .map(|node| StepRequest { node, lane: Lane::Main, requests: vec![raw.to_vec()] })
            .collect();
        self.begin_rounds(turn, down, handle, class, Box::new(ConfigGet { own, ours }), asks)
    }
}

#[cfg(test)]
mod tests {
    use super::{SETTABLE, instead, is_private};

    #[test]
    fn nothing_of_the_routers_reaches_the_nodes() {
        // They would close or limit the router's own connections, and CONFIG GET would not show it.
        for name in [
            "timeout",
            "maxclients",
            "proto-max-bulk-len",
            "client-output-buffer-limit",
            "requirepass",
            "io-threads",
            "port",
        ] {
            assert!(SETTABLE.iter().any(|s| s.name == name) != instead(name).is_some(), "{name}");
        }
    }

    #[test]
    fn settings_that_could_take_over_a_node_are_private() {
        for name in [
            "dir",
            "dbfilename",
            "requirepass",
            "tls-key-file",
            "bind",
            "bind-source-addr",
            "enable-debug-command",
            "masterauth",
        ] {
            assert!(is_private(name), "{name}");
        }
        for name in ["maxmemory", "appendonly", "save", "hash-max-listpack-entries", "databases"] {
            assert!(!is_private(name), "{name}");
        }
    }
}
