//! `switchyard status`: state of a running router, and with `--watch` the load of its nodes.

use std::thread::sleep;
use std::time::Duration;

use clap::Args;
use switchyard_control::admin::{LoadReport, NodeLoadReport, NodeReport, StatusReport};
use switchyard_resp::units::{describe_size, describe_time, plural};

use super::admin_client::{AdminClient, AdminFlags};
use super::screen::Window;
use super::table::{count, number, table, text};
use super::{Failure, nodes};

/// Interval of `--watch`.
const WATCH_EVERY: Duration = Duration::from_secs(1);

/// Show the state of a running router
#[derive(Debug, Args)]
#[command(
    long_about = "Show the state of a running router: whether every slot can be served, clients, commands, and each node.",
    after_long_help = "Examples:\n  \
        switchyard status\n  \
        switchyard status --watch                      the load of each node, refreshed each second, until Ctrl-C\n  \
        switchyard status -c /etc/switchyard.toml      address and token of the admin port from there\n  \
        switchyard status --check                      one verdict as the exit code, for monitoring\n  \
        switchyard status --json | jq .ready\n\n\
        Exit codes: 0 the router answered, ready or not; 1 it did not\n\
        Exit codes with --check:\n  \
        0  healthy: every slot is served, or the router waits as a standby\n  \
        1  degraded: every slot is served, and something needs attention; or a standby reaches too few nodes\n  \
        2  keys of some slots cannot be used: no node serves them\n  \
        3  no router: none answers at the admin address, or the configuration is wrong"
)]
pub(crate) struct Arguments {
    /// Show the load of each node, refreshed each second
    #[arg(long)]
    watch: bool,

    /// Exit with 0 if the router is healthy, 1 if it is degraded, 2 if slots have no serving node, 3 if no router
    /// replies
    #[arg(long, conflicts_with = "watch")]
    check: bool,

    #[command(flatten)]
    flags: AdminFlags,
}

/// Result of `--check`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verdict {
    Healthy,
    /// Every slot is served, but something needs attention, or a standby cannot take over.
    Degraded,
    /// Keys of some slots cannot be used.
    Unserved,
}

impl Verdict {
    fn of(status: &StatusReport) -> Self {
        if let Some(standby) = &status.standby {
            return if standby.is_cut_off { Self::Degraded } else { Self::Healthy };
        }
        let readiness = status.readiness();
        let has_unserved = readiness.slots_unserved() > 0 || status.warnings.iter().any(|warning| warning.slots > 0);
        if has_unserved || !readiness.serves {
            Self::Unserved
        } else if !readiness.is_complete() || !readiness.automation.is_empty() {
            Self::Degraded
        } else {
            Self::Healthy
        }
    }

    /// The exit code with its meaning, unless healthy.
    fn failure(self) -> Result<(), Failure> {
        let (code, why) = match self {
            Self::Healthy => return Ok(()),
            Self::Degraded => (1, "degraded: something needs attention"),
            Self::Unserved => (2, "keys of some slots cannot be used: no node serves them"),
        };
        Err(Failure::Checked { code, why: format!("switchyard: {why}") })
    }
}

/// Exit code of `--check` without a reply from a router.
const NO_ROUTER: u8 = 3;

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    if !arguments.check {
        return show(arguments);
    }
    check(arguments).map_err(|failure| match failure {
        Failure::Checked { .. } => failure,
        other => Failure::Checked { code: NO_ROUTER, why: other.to_string() },
    })
}

fn check(arguments: &Arguments) -> Result<(), Failure> {
    let client = AdminClient::new(&arguments.flags)?;
    let body = client.get("/api/v1/status")?;
    client.print(&body, render)?;
    Verdict::of(&client.read(&body)?).failure()
}

fn show(arguments: &Arguments) -> Result<(), Failure> {
    let client = AdminClient::new(&arguments.flags)?;
    loop {
        let body = client.get("/api/v1/status")?;
        if !arguments.watch {
            return client.print(&body, render);
        }
        let (status, load): (StatusReport, LoadReport) =
            (client.read(&body)?, client.read(&client.get("/api/v1/load")?)?);
        if arguments.flags.json {
            println!("{}", serde_json::to_string(&load).map_err(anyhow::Error::from)?);
        } else if let Some(window) = Window::of_stdout() {
            window.show(&format!("{}{}", render_state(&status), render_load(&hottest_first(status, &load), &load)));
        } else {
            println!("{}{}", render_state(&status), render_load(&status, &load));
        }
        sleep(WATCH_EVERY);
    }
}

/// Sorts the nodes by request rate, so that a small window shows the busiest.
fn hottest_first(mut status: StatusReport, load: &LoadReport) -> StatusReport {
    let rate = |node: &NodeReport| {
        load.nodes.iter().find(|load| load.node == node.address).and_then(|load| load.requests_per_second)
    };
    status.nodes.sort_by(|one, other| rate(other).unwrap_or(0.0).total_cmp(&rate(one).unwrap_or(0.0)));
    status
}

/// Renders the load of each node, in the order of the report.
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
            known(
                us.map(|us| if us < 10_000 { format!("{} us", count(us)) } else { format!("{} ms", count(us / 1000)) }),
            )
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

/// Renders everything except the nodes.
fn render_state(status: &StatusReport) -> String {
    let readiness = status.readiness();
    let state = if let Some(standby) = &status.standby {
        format!("waits as a standby: {}", standby.waits_for)
    } else if status.draining {
        "draining: it is stopping".to_owned()
    } else if readiness.is_complete() {
        "ready: every slot is served".to_owned()
    } else {
        let word = if readiness.is_ready() { "READY IN PART" } else { "NOT READY" };
        let unserved = readiness.slots_unserved();
        let moving: u64 = status.warnings.iter().map(|warning| warning.slots).sum();
        let mut parts = Vec::new();
        if unserved > 0 {
            parts.push(format!("{} {} cannot be served", count(unserved), plural(unserved, "slot")));
        }
        if moving > 0 {
            parts.push(format!("keys of {} {} in transit cannot be used", count(moving), plural(moving, "slot")));
        }
        let limping = status.nodes.iter().filter(|node| !node.conditions().is_empty()).count() as u64;
        if limping > 0 {
            parts.push(format!("{limping} {} silent, busy or refusing writes", plural(limping, "node")));
        }
        if status.warnings.iter().any(|warning| warning.id.is_none()) {
            parts.push("the state directory needs attention".to_owned());
        }
        if parts.is_empty() {
            parts.push("moves need attention".to_owned());
        }
        format!("{word}: {}", parts.join(", "))
    };
    let warnings = status.warnings.iter().map(|warning| warning.what.clone()).chain(status.automation_warnings());
    let warnings: String = warnings.map(|warning| format!("{warning}\n")).collect();
    let uptime = Duration::try_from_secs_f64(status.uptime_seconds).unwrap_or_default();
    format!(
        "switchyard {}  {state}\nup {} (start {})  epoch {}  clients {}  commands {}\n{warnings}\n",
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
    fn a_check_distinguishes_degraded_from_unserved() {
        let verdict = |rest: &str, links: [&str; 2]| {
            let node = |id: usize, slots: u64| {
                format!(
                    r#"{{"id":{id},"address":"a:{id}","link":{},"run_id":"r","version":null,"slots":{slots},"requests":0,"errors":0,"in_flight":0}}"#,
                    links[id]
                )
            };
            let body = format!(
                r#"{{"version":"0.1.0","incarnation":3,"epoch":1,"uptime_seconds":1,"draining":false,"clients":2,"commands":4,"nodes":[{},{}]{rest}}}"#,
                node(0, 16384),
                node(1, 0)
            );
            Verdict::of(&serde_json::from_str(&body).expect("a status"))
        };
        let (up, down) = (r#"{"state":"up"}"#, r#"{"state":"down","reason":"refused"}"#);
        assert_eq!(verdict("", [up, up]), Verdict::Healthy);
        assert_eq!(verdict("", [up, down]), Verdict::Healthy, "the second node owns no slots");
        assert_eq!(verdict("", [down, up]), Verdict::Unserved);
        assert_eq!(verdict(r#","warnings":[{"slots":0,"what":"the disk is full"}]"#, [up, up]), Verdict::Degraded);
        assert_eq!(verdict(r#","warnings":[{"id":1,"slots":3,"what":"move 1 waits"}]"#, [up, up]), Verdict::Unserved);
        assert_eq!(
            verdict(r#","automation":[{"name":"planner","mode":"on","rests":"why"}]"#, [up, up]),
            Verdict::Degraded
        );
        assert_eq!(verdict(r#","automation":[{"name":"planner","mode":"on"}]"#, [up, up]), Verdict::Healthy);
    }

    #[test]
    fn a_window_shows_the_busiest_node_first() {
        let status = |nodes: [&str; 3]| {
            StatusReport {
            nodes: nodes
                .map(|name| serde_json::from_str(&format!(
                    r#"{{"id":0,"address":"{name}","link":{{"state":"up"}},"run_id":null,"version":null,"slots":1,"requests":0,"errors":0,"in_flight":0}}"#
                )).expect("a node"))
                .to_vec(),
            ..StatusReport::default()
        }
        };
        let load = |node: &str, rate| NodeLoadReport {
            node: node.to_owned(),
            requests_per_second: rate,
            ..NodeLoadReport::default()
        };
        let load = LoadReport {
            nodes: vec![load("a", Some(10.0)), load("b", None), load("c", Some(900.0))],
            ..LoadReport::default()
        };
        let names = hottest_first(status(["a", "b", "c"]), &load)
            .nodes
            .into_iter()
            .map(|node| node.address)
            .collect::<Vec<_>>();
        assert_eq!(names, ["c", "a", "b"]);
    }

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
