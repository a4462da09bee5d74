//! `switchyard doctor`: looks at the nodes, before a start or at any time, and says what is wrong and what to do.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::anyhow;
use clap::Args;
use serde::Serialize;
use switchyard_router::NodeAccess;

use super::Failure;
use super::flags::ConfigFlags;
use crate::config::{Resolved, TIME_FORM, parse_time};
use crate::doctor::{Finding, Level, Needs, examine, examine_commands, look, servers};

/// Check the nodes (versions, persistence, memory, clocks, limits, rights, functions), and the commands that are called there
#[derive(Debug, Args)]
#[command(
    long_about = "Check the nodes of a configuration, with their replicas: whether they can be reached with its credentials, and their versions, roles, \
        persistence, memory, clocks, limits, renamed commands, the rights of the router's user, and functions.\n\n\
        It also says which commands of the application may meet limits behind the router, by what the nodes have counted (INFO commandstats). With \
        --sample it looks at real commands (MONITOR, which costs a busy server part of its speed for that time) and counts those that would be refused: \
        keys of several slots, scripts with keys that they do not declare, waiting for keys of several slots. No key and no value is shown or kept.\n\n\
        It asks the nodes itself, so it works before a start and while a router runs. It changes nothing.",
    after_long_help = "Examples:\n  \
        switchyard doctor --node 127.0.0.1:7001 --node 127.0.0.1:7002\n  \
        switchyard doctor -c /etc/switchyard.toml\n  \
        switchyard doctor --node 10.0.0.1:6379 --sample 10s       would this application run behind the router?\n  \
        switchyard doctor -c /etc/switchyard.toml --json | jq '.findings[] | select(.level == \"error\")'\n\n\
        Exit codes: 0 nothing worse than a warning; 1 an error was found; 2 the configuration is wrong"
)]
pub(crate) struct Arguments {
    #[command(flatten)]
    flags: ConfigFlags,

    /// Print the findings as JSON, for scripts
    #[arg(long)]
    json: bool,

    /// Look at the nodes' real commands for so long, such as 10s, at most 10m
    #[arg(long, value_name = "TIME", value_parser = sample_time)]
    sample: Option<Duration>,

    /// Exit with 1 also for warnings
    #[arg(long)]
    strict: bool,
}

/// The longest sample: MONITOR costs the server.
const SAMPLE_MAX: Duration = Duration::from_secs(600);

fn sample_time(text: &str) -> Result<Duration, String> {
    let time = parse_time(text).filter(|time| *time <= SAMPLE_MAX && !time.is_zero());
    time.ok_or_else(|| format!("must be a time up to 10m: {TIME_FORM}"))
}

#[derive(Serialize)]
struct Report<'a> {
    nodes: usize,
    findings: &'a [Finding],
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let config = arguments.flags.sources().read()?;
    let resolved = config.resolve(|_| None)?;
    let mut findings = find(&resolved, config.workers);
    let primaries: Vec<NodeAccess> = resolved.nodes.iter().filter_map(|node| Some(servers(node).into_iter().next()?.access)).collect();
    findings.extend(examine_commands(&primaries, arguments.sample));
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.level));
    if arguments.json {
        let report = Report { nodes: resolved.nodes.len(), findings: &findings };
        println!("{}", serde_json::to_string_pretty(&report).map_err(|e| Failure::Failed(anyhow!(e)))?);
    } else {
        print!("{}", render(&findings, resolved.nodes.len()));
    }
    let worst = if arguments.strict { Level::Warning } else { Level::Error };
    let bad = findings.iter().filter(|f| f.level >= worst).count();
    if bad > 0 { Err(Failure::Failed(anyhow!("{bad} thing{} to see to", if bad == 1 { "" } else { "s" }))) } else { Ok(()) }
}

/// Looks at all nodes at once, with their replicas, and judges.
pub(crate) fn find(resolved: &Resolved, workers: usize) -> Vec<Finding> {
    let seen: Vec<_> = std::thread::scope(|scope| {
        let looks: Vec<_> = resolved.nodes.iter().map(|node| scope.spawn(|| servers(node).iter().map(look).collect::<Vec<_>>())).collect();
        looks.into_iter().filter_map(|look| look.join().ok()).flatten().collect()
    });
    examine(&seen, &needs(&resolved.live, workers))
}

/// What the router will ask of a node.
pub(crate) fn needs(live: &switchyard_router::Live, workers: usize) -> Needs {
    let alone = live.large_connections_max + live.watch_connections_max + live.blocking_connections_max;
    Needs { connections: (workers * 2, workers * 4 + alone), argument_max: live.argument_max, check_scripts: live.check_scripts }
}

fn render(findings: &[Finding], nodes: usize) -> String {
    let mut out = String::new();
    for finding in findings {
        let level = match finding.level {
            Level::Error => "ERROR  ",
            Level::Warning => "warning",
            Level::Note => "note   ",
        };
        let node = finding.node.as_deref().unwrap_or("all nodes");
        let _ = writeln!(out, "{level}  {node}  {}: {}\n         -> {}", finding.check, finding.found, finding.advice);
    }
    let count = |level| findings.iter().filter(|f| f.level == level).count();
    let _ = writeln!(
        out,
        "{nodes} node{} looked at: {} errors, {} warnings, {} notes",
        if nodes == 1 { "" } else { "s" },
        count(Level::Error),
        count(Level::Warning),
        count(Level::Note)
    );
    out
}
