//! `switchyard status`: how a running router does, and with `--watch` the load of its nodes.

use std::thread::sleep;
use std::time::Duration;

use clap::Args;
use switchyard_control::admin::{LoadReport, NodeLoadReport, NodeReport, StatusReport};
use switchyard_resp::units::{describe_size, describe_time, plural};

use super::admin_client::{AdminClient, AdminFlags};
use super::table::{count, number, table, text};
use super::{Failure, nodes};

/// The load is shown anew so often.
const WATCH_EVERY: Duration = Duration::from_secs(1);

/// Show how a running router does
#[derive(Debug, Args)]
#[command(
    long_about = "Show how a running router does: whether every slot can be served, clients, commands, and each node.",
    after_long_help = "Examples:\n  \
        switchyard status\n  \
        switchyard status --watch                      the load of each node, again each second, until Ctrl-C\n  \
        switchyard status -c /etc/switchyard.toml      address and token of the admin port from there\n  \
        switchyard status --json | jq .ready\n\n\
        Exit codes: 0 the router answered, ready or not; 1 it did not"
)]
pub(crate) struct Arguments {
    /// Show the load of each node, anew each second
    #[arg(long)]
    watch: bool,

    #[command(flatten)]
    flags: AdminFlags,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let client = AdminClient::new(&arguments.flags)?;
    loop {
        let body = client.get("/api/v1/status")?;
        if !arguments.watch {
            return client.print(&body, render);
        }
        let (status, load): (StatusReport, LoadReport) = (client.read(&body)?, client.read(&client.get("/api/v1/load")?)?);
        if arguments.flags.json {
            println!("{}", serde_json::to_string(&load).map_err(anyhow::Error::from)?);
        } else {
            println!("{}{}", render_state(&status), render_load(&status, &load));
        }
        sleep(WATCH_EVERY);
    }
}

/// The load of each node, in the order of the nodes.
fn render_load(status: &StatusReport, load: &LoadReport) -> String {
    let columns = [
        text("NODE"),
        text("LINK"),
        number("REQUESTS/S"),
        number("P50"),
        number("P99"),
        number("CPU"),
        number("MEMORY"),
        number("KEYS"),
        number("IN FLIGHT"),
        number("CLIENTS"),
        number("REPLICAS"),
    ];
    let known = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let row = |node: &NodeReport| {
        let unknown = NodeLoadReport::default();
        let load = load.nodes.iter().find(|load| load.node == node.address).unwrap_or(&unknown);
        let time = |us: Option<u64>| {
            known(us.map(|us| if us < 10_000 { format!("{} us", count(us)) } else { format!("{} ms", count(us / 1000)) }))
        };
        vec![
            node.address.clone(),
            nodes::link(node).to_owned(),
            known(load.requests_per_second.map(|rate| count(rate.round() as u64))),
            time(load.p50_us),
            time(load.p99_us),
            known(load.cpu_percent.map(|cpu| format!("{cpu:.0}%"))),
            known(load.memory_bytes.map(describe_size)),
            known(load.keys.map(count)),
            count(load.in_flight),
            known(load.clients.map(count)),
            node.replicas.len().to_string(),
        ]
    };
    table(&columns, &status.nodes.iter().map(row).collect::<Vec<_>>())
}

fn render(status: &StatusReport) -> String {
    format!("{}{}", render_state(status), nodes::render(&status.nodes))
}

/// Everything but the nodes.
fn render_state(status: &StatusReport) -> String {
    let readiness = status.readiness();
    let state = if status.draining {
        "draining: it was told to stop".to_owned()
    } else if readiness.is_whole() {
        "ready: every slot is served".to_owned()
    } else {
        let word = if readiness.is_ready() { "READY IN PART" } else { "NOT READY" };
        let unserved = readiness.slots_unserved();
        let moving: u64 = status.troubles.iter().map(|trouble| trouble.slots).sum();
        let mut parts = Vec::new();
        if unserved > 0 {
            parts.push(format!("{} {} cannot be served", count(unserved), plural(unserved, "slot")));
        }
        if moving > 0 {
            parts.push(format!("keys of {} {} on the way cannot be used", count(moving), plural(moving, "slot")));
        }
        let limping = status.nodes.iter().filter(|node| !node.conditions().is_empty()).count() as u64;
        if limping > 0 {
            parts.push(format!("{limping} {} silent, busy or refusing writes", plural(limping, "node")));
        }
        if status.troubles.iter().any(|trouble| trouble.id.is_none()) {
            parts.push("the state directory needs a look".to_owned());
        }
        if parts.is_empty() {
            parts.push("moves need a look".to_owned());
        }
        format!("{word}: {}", parts.join(", "))
    };
    let troubles = status.troubles.iter().map(|trouble| trouble.what.clone()).chain(status.automation_troubles());
    let troubles: String = troubles.map(|trouble| format!("{trouble}\n")).collect();
    let uptime = Duration::try_from_secs_f64(status.uptime_seconds).unwrap_or_default();
    format!(
        "switchyard {}  {state}\nup {} (start {})  epoch {}  clients {}  commands {}\n{troubles}\n",
        status.version,
        describe_time(uptime),
        status.incarnation,
        status.epoch,
        count(status.clients),
        count(status.commands),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_is_down_makes_it_not_ready() {
        let body = |link: &str| {
            format!(
                r#"{{"ready":true,"version":"0.1.0","incarnation":3,"epoch":1,"uptime_seconds":61.5,"draining":false,"clients":2,
                "commands":1234,"nodes":[{{"id":0,"address":"a:1","link":{link},"run_id":null,"version":null,"slots":16384,
                "requests":0,"errors":0,"in_flight":0}}]}}"#
            )
        };
        let shown = |link| render(&serde_json::from_str(&body(link)).expect("what the API sends"));
        let up = shown(r#"{"state":"up"}"#);
        assert!(up.starts_with("switchyard 0.1.0  ready"), "{up}");
        assert!(up.contains("up 1m 1s (start 3)  epoch 1  clients 2  commands 1 234"), "{up}");
        let down = shown(r#"{"state":"down","reason":"refused"}"#);
        assert!(down.contains("NOT READY: 16 384 slots cannot be served"), "{down}");
        assert!(down.contains("a:1 is down: refused"), "{down}");
    }
}
