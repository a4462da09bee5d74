//! `switchyard nodes`: lists nodes, and lets nodes join and leave.

use clap::{Args, Subcommand};
use switchyard_control::admin::{
    AddNodeRequest, BalanceRequest, LinkReport, NodeReport, NodesReport, PlanReport, Silence,
};
use switchyard_control::nodes::parse_endpoint;

use super::Failure;
use super::admin_client::{AdminClient, AdminFlags, encoded};
use super::move_slots::{HowFlags, finish};
use super::table::{count, number, table, text};

/// Manage the nodes of a running router: list, add, drain, remove, accept
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    switchyard nodes                                         list them\n  \
    switchyard nodes -c /etc/switchyard.toml                 the same, with address and token of the admin port from there\n  \
    switchyard nodes add 127.0.0.1:7003 --rebalance --wait   add one, with its share of the slots\n  \
    switchyard nodes drain 127.0.0.1:7003 --wait             move everything away from it\n  \
    switchyard nodes remove 127.0.0.1:7003                   remove it\n\n\
    Exit codes: 0 success; 1 failure")]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,

    #[command(flatten)]
    flags: AdminFlags,
}

#[derive(Debug, Subcommand)]
enum Command {
    List(ListArguments),
    Accept(AcceptArguments),
    Add(AddArguments),
    Drain(DrainArguments),
    Undrain(UndrainArguments),
    Remove(RemoveArguments),
}

/// Serve a node as it is: a node that returned empty, or whose primary is claimed by a server without proof
#[derive(Debug, Args)]
#[command(
    long_about = "Serve a node as it is.\n\n\
        A node that returned without keys that it should have stored is held (nodes.on-data-loss): accepting it confirms that they are lost. \
        If a server claims to be the primary of a node with replicas, without proof that it was promoted in place of \
        the previous primary, accepting the node makes the router follow this server: writes that it lacks are lost.",
    after_long_help = "Examples:\n  \
        switchyard nodes accept 10.0.0.1:6379\n  \
        switchyard nodes accept mymaster --admin https://router-1:6381 --admin-ca-file ca.pem --admin-token-file token\n\n\
        Exit codes: 0 accepted; 1 refused"
)]
struct AcceptArguments {
    /// Name of the node, as `switchyard nodes list` shows it
    node: String,

    #[command(flatten)]
    flags: AdminFlags,
}

/// Add a server as a node
#[derive(Debug, Args)]
#[command(
    long_about = "Add a server as a node. It is checked first: it must be reachable with the user, the password and the TLS of [nodes], a primary of \
        Redis 6.2 or later or of Valkey, without cluster mode, empty, and not a node yet, under any name. If a check fails, nothing changes.\n\n\
        The node is remembered in the state directory, so that no file has to be edited. It owns no slots until some are moved to it.\n\n\
        A single node accepts every command; with two, keys that are used together must share a slot. Before a second node joins, commands that clients have used \
        and that would be refused afterwards are listed with counts, and it joins only with --allow-limits.",
    after_long_help = "Examples:\n  \
        switchyard nodes add 127.0.0.1:7003\n  \
        switchyard nodes add 127.0.0.1:7003 --rebalance --wait      and give it its share of the slots\n  \
        redis-cli -h 127.0.0.1 -p 7003 DBSIZE                       before that: is it empty?\n\n\
        Exit codes: 0 joined (with --wait: with its share); 1 refused, and nothing has changed (or a move stopped early)"
)]
struct AddArguments {
    /// Address of the server
    address: String,

    /// Move its share of the slots to it at once
    #[arg(long)]
    rebalance: bool,

    /// Continue although clients use commands that meet limits with two nodes
    #[arg(long)]
    allow_limits: bool,

    #[command(flatten)]
    how: HowFlags,

    /// Wait until the node has its share, and show the progress
    #[arg(long, requires = "rebalance")]
    wait: bool,

    #[command(flatten)]
    flags: AdminFlags,
}

/// Allow a drained node to own slots again
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    switchyard nodes undrain 127.0.0.1:7001 && switchyard balance\n\n\
    Exit codes: 0 the node may get slots; 1 refused")]
struct UndrainArguments {
    /// Node, as `switchyard nodes list` shows it
    address: String,

    #[command(flatten)]
    flags: AdminFlags,
}

/// Move everything away from a node; it gets no slots until it is undrained
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    switchyard nodes drain 127.0.0.1:7001 --dry-run\n  \
    switchyard nodes drain 127.0.0.1:7001 --wait && switchyard nodes remove 127.0.0.1:7001\n\n\
    Exit codes: 0 recorded (with --wait: the node owns nothing); 1 refused, or a move stopped early")]
struct DrainArguments {
    /// Node, as `switchyard nodes list` shows it
    address: String,

    /// Only show the moves that would start
    #[arg(long)]
    dry_run: bool,

    #[command(flatten)]
    how: HowFlags,

    /// Wait until the node owns nothing, and show the progress
    #[arg(long, conflicts_with = "dry_run")]
    wait: bool,

    #[command(flatten)]
    flags: AdminFlags,
}

/// Remove a node that owns no slots
#[derive(Debug, Args)]
#[command(
    long_about = "Remove a node that owns no slots. The removal is stored, even if the configuration still lists the node.",
    after_long_help = "Examples:\n  \
        switchyard nodes drain 127.0.0.1:7003 --wait && switchyard nodes remove 127.0.0.1:7003\n\n\
        Exit codes: 0 removed; 1 refused"
)]
struct RemoveArguments {
    /// Node, as `switchyard nodes list` shows it
    address: String,

    #[command(flatten)]
    flags: AdminFlags,
}

/// List the nodes: availability, slots, servers, traffic
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    switchyard nodes list\n  \
    switchyard nodes list --admin router-1:6381 --admin-token-file token\n  \
    switchyard nodes list --json | jq -r '.nodes[] | select(.link.state != \"up\") | .address'\n\n\
    Exit codes: 0 the router answered; 1 it did not")]
struct ListArguments {
    #[command(flatten)]
    flags: AdminFlags,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let flags = match &arguments.command {
        None => &arguments.flags,
        Some(Command::List(ListArguments { flags })) => flags,
        Some(Command::Accept(AcceptArguments { node, flags })) => {
            let client = AdminClient::new(flags)?;
            let body = client.post(&format!("/api/v1/nodes/{}/accept", encoded(node)))?;
            return client.print_text(&body, &format!("{node} is accepted"));
        }
        Some(Command::Add(given)) => {
            let client = AdminClient::new(&given.flags)?;
            let request = AddNodeRequest {
                address: given.address.clone(),
                rebalance: given.rebalance,
                allow_limits: given.allow_limits,
                how: given.how.request(),
            };
            let body = client.post_json("/api/v1/nodes", &request)?;
            if given.rebalance {
                return finish(&client, &body, given.wait, given.flags.json);
            }
            // With the port, which the argument may omit.
            let name = parse_endpoint(&given.address).unwrap_or_else(|_| given.address.clone());
            let notes = notes(&client.read(&body)?);
            return client.print_text(
                &body,
                &format!("{name} has joined; it owns no slots until `switchyard balance` or `switchyard move`{notes}"),
            );
        }
        Some(Command::Drain(given)) => {
            let client = AdminClient::new(&given.flags)?;
            let request = BalanceRequest { dry_run: given.dry_run, by: None, how: given.how.request() };
            let body = client.post_json(&format!("/api/v1/nodes/{}/drain", encoded(&given.address)), &request)?;
            return finish(&client, &body, given.wait, given.flags.json);
        }
        Some(Command::Undrain(given)) => {
            let client = AdminClient::new(&given.flags)?;
            let body = client
                .post_json(&format!("/api/v1/nodes/{}/undrain", encoded(&given.address)), &serde_json::json!({}))?;
            let notes = notes(&client.read(&body)?);
            return client.print_text(
                &body,
                &format!("{} may get slots again; `switchyard balance` gives it its share{notes}", given.address),
            );
        }
        Some(Command::Remove(given)) => {
            let client = AdminClient::new(&given.flags)?;
            let body = client
                .post_json(&format!("/api/v1/nodes/{}/remove", encoded(&given.address)), &serde_json::json!({}))?;
            return client.print_text(&body, &format!("{} is removed", given.address));
        }
    };
    let client = AdminClient::new(flags)?;
    let body = client.get("/api/v1/nodes")?;
    client.print(&body, |report: &NodesReport| render(&report.nodes))
}

fn notes(report: &PlanReport) -> String {
    report.notes.iter().map(|note| format!("\nNOTE: {note}")).collect()
}

/// One word for the state of a node.
pub(super) fn link(node: &NodeReport) -> &'static str {
    match (&node.silence, &node.link) {
        (Some(Silence::Silent { .. }), _) => "SILENT",
        (_, LinkReport::Down { .. }) => "DOWN",
        (Some(Silence::Busy { .. }), _) => "busy",
        (None, LinkReport::Up) => "up",
        (None, LinkReport::Connecting) => "connecting",
    }
}

pub(super) fn render(nodes: &[NodeReport]) -> String {
    let columns = [
        number("ID"),
        text("NODE"),
        text("LINK"),
        number("SLOTS"),
        text("SERVER"),
        number("REQUESTS"),
        number("ERRORS"),
        number("IN FLIGHT"),
    ];
    let rows: Vec<Vec<String>> = nodes
        .iter()
        .map(|node| {
            vec![
                node.id.to_string(),
                node.address.clone(),
                link(node).to_owned(),
                count(node.slots),
                node.version.clone().unwrap_or_else(|| "?".to_owned()),
                count(node.requests),
                count(node.errors),
                count(node.in_flight),
            ]
        })
        .collect();
    let mut out = table(&columns, &rows);
    for node in nodes {
        if let LinkReport::Down { reason } = &node.link {
            let tried = node.resolved.map(|address| format!(" (tried at {address})")).unwrap_or_default();
            out.push_str(&format!("{} is down: {reason}{tried}\n", node.address));
        }
        for condition in node.conditions() {
            out.push_str(&format!("{}: {condition}\n", node.address));
        }
        if node.drained {
            out.push_str(&format!(
                "{0}: drained; it gets no slots before `switchyard nodes undrain {0}`\n",
                node.address
            ));
        }
        if node.overrides > 0 {
            let keys = if node.overrides == 1 { "key" } else { "keys" };
            out.push_str(&format!(
                "{}: also holds {} {keys} moved there without their slots\n",
                node.address,
                count(node.overrides)
            ));
        }
        if let Some(primary) = node.primary {
            let replicas: Vec<String> = node.replicas.iter().map(ToString::to_string).collect();
            let replicas = if replicas.is_empty() { "none".to_owned() } else { replicas.join(", ") };
            out.push_str(&format!("{}: its primary is {primary}; readable replicas: {replicas}\n", node.address));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_is_down_stands_out_with_its_reason() {
        let node = |id, link| NodeReport {
            id,
            address: format!("127.0.0.1:700{id}"),
            link,
            run_id: None,
            version: Some("redis 7.0.15".to_owned()),
            slots: 8192,
            drained: false,
            ejected: None,
            overrides: 0,
            requests: 12_345,
            errors: 0,
            in_flight: 2,
            primary: None,
            replicas: Vec::new(),
            resolved: None,
            silence: None,
            refuses_writes: None,
        };
        let shown =
            render(&[node(1, LinkReport::Up), node(2, LinkReport::Down { reason: "connection refused".to_owned() })]);
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(lines[0], "ID  NODE            LINK  SLOTS  SERVER        REQUESTS  ERRORS  IN FLIGHT");
        assert_eq!(lines[1], " 1  127.0.0.1:7001  up    8 192  redis 7.0.15    12 345       0          2");
        assert!(lines[2].contains("DOWN"), "{shown}");
        assert_eq!(lines[3], "127.0.0.1:7002 is down: connection refused");

        let mut named = node(2, LinkReport::Down { reason: "connection refused".to_owned() });
        named.resolved = Some("10.0.0.9:7002".parse().expect("an address"));
        let shown = render(&[named]);
        assert!(shown.ends_with("127.0.0.1:7002 is down: connection refused (tried at 10.0.0.9:7002)\n"), "{shown}");

        let mut silent = node(2, LinkReport::Up);
        silent.silence = Some(Silence::Silent { seconds: 3.2 });
        silent.refuses_writes = Some("MISCONF it cannot save".to_owned());
        let shown = render(&[silent]);
        assert!(
            shown.contains("  SILENT  ") && shown.contains("127.0.0.1:7002: silent: it has not answered for 3 s\n"),
            "{shown}"
        );
        assert!(shown.ends_with("127.0.0.1:7002: refuses writes: MISCONF it cannot save\n"), "{shown}");

        let mut with_replicas = node(3, LinkReport::Up);
        with_replicas.primary = Some("127.0.0.1:7103".parse().expect("an address"));
        let shown = render(&[with_replicas.clone()]);
        assert!(shown.ends_with("127.0.0.1:7003: its primary is 127.0.0.1:7103; readable replicas: none\n"), "{shown}");
        with_replicas.replicas = vec!["127.0.0.1:7003".parse().expect("an address")];
        assert!(render(&[with_replicas]).ends_with("readable replicas: 127.0.0.1:7003\n"));
    }
}
