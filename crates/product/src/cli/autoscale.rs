//! `switchyard autoscale`: the current and the desired number of nodes, and the reasons.

use clap::{Args, Subcommand};
use switchyard_control::admin::{AutoscaleEvent, AutoscaleReport, AutoscaleRequest};
use switchyard_resp::units::counted;

use super::Failure;
use super::admin_client::{AdminClient, AdminFlags};
use super::plan::ago;

const PATH: &str = "/api/v1/autoscale";

/// Show the desired number of nodes and why, or set it
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    long_about = "The desired number of nodes, and why. With [autoscale] mode = \"on\" a server is started when the fleet is overloaded. It joins and gets its share by live \
        moves. When the load is low, a node is drained and its server stopped. With \"observe\" the autoscaler only reports its decisions. [autoscale] policy chooses how it decides: threshold, static \
        and model by the present load, learned and predictive by the load to expect, with their confidence. docs/autoscaling.md is its guide.",
    after_long_help = "Examples:\n  \
        switchyard autoscale\n  \
        switchyard autoscale history\n  \
        switchyard autoscale set-nodes 3     now, regardless of the load\n  \
        switchyard autoscale pause           no decisions until resume\n  \
        switchyard autoscale resume\n\n\
        Exit codes: 0 success; 1 refused"
)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,

    #[command(flatten)]
    flags: AdminFlags,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show the state, as without a subcommand
    Status(Flags),
    /// Show decisions and actions, latest first
    History(Flags),
    /// Keep this number of nodes, regardless of load
    SetNodes(SetNodes),
    /// Stop deciding until `resume`. A change in progress continues
    Pause(Flags),
    /// Decide again
    Resume(Flags),
}

#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  switchyard autoscale history --json\n\nExit codes: 0 success; 1 failure")]
struct Flags {
    #[command(flatten)]
    flags: AdminFlags,
}

#[derive(Debug, Args)]
#[command(
    after_long_help = "Examples:\n  switchyard autoscale set-nodes 3\n  switchyard autoscale set-nodes 2    remove the cheapest of its own servers\n\nExit codes: 0 recorded; 1 refused"
)]
struct SetNodes {
    /// Number of nodes
    #[arg(value_name = "NODES")]
    nodes: usize,

    #[command(flatten)]
    flags: AdminFlags,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let steer = |flags: &AdminFlags, verb: &str, nodes| {
        let client = AdminClient::new(flags)?;
        let request = AutoscaleRequest { verb: verb.to_owned(), nodes };
        client.print(&client.post_json(PATH, &request)?, standing)
    };
    let show = |flags: &AdminFlags, text: fn(&AutoscaleReport) -> String| {
        let client = AdminClient::new(flags)?;
        client.print(&client.get(PATH)?, text)
    };
    match &arguments.command {
        None => show(&arguments.flags, standing),
        Some(Command::Status(Flags { flags })) => show(flags, standing),
        Some(Command::History(Flags { flags })) => show(flags, history),
        Some(Command::SetNodes(SetNodes { nodes, flags })) => steer(flags, "set-nodes", Some(*nodes)),
        Some(Command::Pause(Flags { flags })) => steer(flags, "pause", None),
        Some(Command::Resume(Flags { flags })) => steer(flags, "resume", None),
    }
}

fn standing(report: &AutoscaleReport) -> String {
    let AutoscaleReport { nodes, min, max, mode, policy, .. } = report;
    let mut out = match report.wanted.filter(|wanted| wanted != nodes) {
        Some(wanted) => format!("{}, {wanted} requested ({min} to {max})\n", counted(*nodes, "node")),
        None => format!("{} ({min} to {max})\n", counted(*nodes, "node")),
    };
    if let Some(change) = &report.change {
        let tried = change.error.as_ref().map_or(String::new(), |error| format!("; the last attempt failed: {error}"));
        out.push_str(&format!("change {}: {}, {}{tried}\n", change.number, change.stage, ago(change.since / 1000)));
    }
    out.push_str(&match (&report.rests, mode.as_str()) {
        (Some(why), _) => format!("paused: {why}\n"),
        (None, "off") => "[autoscale] mode is \"off\": the number changes only on request\n".to_owned(),
        (None, mode) => format!("[autoscale] mode is {mode:?}, policy {policy:?}\n"),
    });
    if let Some(decision) = &report.decision {
        out.push_str(&format!("{decision}: {}\n", report.reasons.join("; ")));
    }
    if !report.started.is_empty() {
        out.push_str(&format!("started servers: {}\n", report.started.join(", ")));
    }
    for event in report.events.iter().take(3) {
        out.push_str(&line(event));
    }
    out
}

fn history(report: &AutoscaleReport) -> String {
    if report.events.is_empty() {
        return "no events yet\n".to_owned();
    }
    report.events.iter().map(line).collect()
}

fn line(event: &AutoscaleEvent) -> String {
    format!("{:>10}  {:8} {}\n", ago(event.at / 1000), event.kind, event.text)
}
