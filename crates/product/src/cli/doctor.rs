//! `switchyard doctor`: checks the nodes before a start or at any time, and reports problems with advice.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Duration;

use anyhow::anyhow;
use clap::Args;
use serde::Serialize;
use switchyard_control::admin::{LimitedReport, LinkReport, MisplacedReport, NodesReport};
use switchyard_control::autoscale::{default_directory, former_directory, kept_directories};
use switchyard_control::misplaced_text;
use switchyard_control::nodes::holdings::{FirstStart, first_start, primaries};
use switchyard_control::nodes::servers_of;
use switchyard_policy::topology::{Placement, RuleSet, Slot, Topology};
use switchyard_resp::units::{TIME_FORM, counted, describe_time, parse_time};

use super::Failure;
use super::flags::ConfigFlags;
use super::known_fleet::KnownFleet;
use crate::config::{Config, Problems, Resolved};
use crate::doctor::{Finding, Level, Needs, examine, examine_cluster, examine_commands, look};

/// Check the nodes (versions, persistence, memory, clocks, limits, permissions, functions), and the commands in use
#[derive(Debug, Args)]
#[command(
    long_about = "Check the nodes of a configuration, with their replicas: whether they can be reached with its credentials, and their versions, roles, \
        persistence, memory, clocks, limits, renamed commands, the permissions of the router's user, and functions.\n\n\
        It also lists commands of the application that may meet limits behind the router, from the nodes' counters (INFO commandstats). With \
        --sample it inspects real commands (MONITOR, which slows down a busy server for that time) and counts those that would be refused: \
        keys of several slots, scripts with undeclared keys, blocking commands with keys of several slots. No key or value is shown or stored.\n\n\
        It queries the nodes itself, so it works before a start and while a router runs. Nodes that were added or removed at run time are known \
        from the state directory, or from the router that runs on it (--state-dir, --admin). Before a first start it reports whether the keys that the nodes \
        hold fit a slot map. It changes nothing.",
    after_long_help = "Examples:\n  \
        switchyard doctor --node 127.0.0.1:7001 --node 127.0.0.1:7002\n  \
        switchyard doctor -c /etc/switchyard.toml\n  \
        switchyard doctor --storage-cluster redis-1:6379          which features does this cluster allow?\n  \
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

    /// Inspect the nodes' real commands for this time, such as 10s, at most 10m
    #[arg(long, value_name = "TIME", value_parser = sample_time)]
    sample: Option<Duration>,

    /// Exit with 1 also for warnings
    #[arg(long)]
    strict: bool,
}

/// Maximum sample duration: MONITOR is costly for the server.
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
    let mut config = arguments.flags.sources().read()?;
    if config.is_of_cluster() {
        return run_for_cluster(arguments, &config);
    }
    let fleet = KnownFleet::find(&mut config);
    let resolved = config.resolve(|_| None)?.require_resolved()?;
    let rules = config.rule_set()?;
    let mut findings = find(&resolved, &config, &rules, &fleet);
    if let Some(time) = arguments.sample {
        eprintln!("inspecting real commands for {}", describe_time(time));
    }
    // Without a stored map, the configured rules are those of the first start.
    let placement = match &fleet {
        KnownFleet::Placed { topology, .. } => topology.placement().clone(),
        _ => Placement::by_rules(rules),
    };
    findings.extend(examine_commands(&primaries(&resolved.nodes), &placement, arguments.sample));
    print(arguments, resolved.nodes.len(), findings)
}

/// Checks the members of a cluster.
fn run_for_cluster(arguments: &Arguments, config: &Config) -> Result<(), Failure> {
    if arguments.sample.is_some() {
        return Err(Failure::Config(Problems::of("--sample is for nodes, and not available for a cluster yet")));
    }
    let resolved = config.resolve(|_| None)?;
    let Some(places) = &resolved.cluster else { return Ok(()) };
    let report = places.reader().read(&[], &[], 0);
    let report =
        report.map_err(|why| anyhow!("no member of the cluster shows its map: {why}")).map_err(Failure::Failed)?;
    print(arguments, report.access.len(), examine_cluster(&report, resolved.live.connect_timeout))
}

fn print(arguments: &Arguments, nodes: usize, mut findings: Vec<Finding>) -> Result<(), Failure> {
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.level));
    if arguments.json {
        let report = Report { nodes, findings: &findings };
        println!("{}", serde_json::to_string_pretty(&report).map_err(|e| Failure::Failed(anyhow!(e)))?);
    } else {
        print!("{}", render(&findings, nodes));
    }
    let worst = if arguments.strict { Level::Warning } else { Level::Error };
    let bad = findings.iter().filter(|f| f.level >= worst).count();
    if bad > 0 { Err(Failure::Failed(anyhow!("{} need attention", counted(bad, "thing")))) } else { Ok(()) }
}

/// Checks all nodes and their replicas in parallel.
fn find(resolved: &Resolved, config: &Config, rules: &RuleSet, fleet: &KnownFleet) -> Vec<Finding> {
    let seen: Vec<_> = std::thread::scope(|scope| {
        let look_at = |node| servers_of(node, fleet.primary_of(&node.name)).iter().map(look).collect::<Vec<_>>();
        let looks: Vec<_> = resolved.nodes.iter().map(|node| scope.spawn(move || look_at(node))).collect();
        looks.into_iter().filter_map(|look| look.join().ok()).flatten().collect()
    });
    let mut findings = examine(&seen, &needs(&resolved.live, config.workers, resolved.nodes.len()));
    findings.extend(placement(resolved, config, rules, fleet));
    findings.extend(local_servers(config));
    let routers: BTreeSet<&String> = seen.iter().flat_map(|node| &node.routers).collect();
    if matches!(fleet, KnownFleet::Unplaced) && !routers.is_empty() {
        findings.push(Finding {
            level: Level::Warning,
            node: None,
            check: "another router",
            found: format!("a router uses these nodes, and its state directory is not {}", config.state_dir.display()),
            advice: "use its state directory (--state-dir), which has the nodes added since: two routers do not know of each other's moves".to_owned(),
        });
    }
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.level));
    findings
}

/// Checks the data directories of servers that the autoscaler starts on this machine.
fn local_servers(config: &Config) -> Vec<Finding> {
    let finding = |level, found: String, advice: &str| Finding {
        level,
        node: None,
        check: "local servers",
        found,
        advice: advice.to_owned(),
    };
    let folder = config.autoscale.local.directory.clone().unwrap_or_else(|| default_directory(&config.state_dir));
    let mut findings = Vec::new();
    if !config.autoscale.local.command.is_empty() && is_on_one_disk(&folder, &config.state_dir) {
        let found = format!(
            "{} and the state directory {} are on one disk: files of a server can fill it, and moves then stop",
            folder.display(),
            config.state_dir.display()
        );
        findings.push(finding(Level::Warning, found, "name a folder on another disk (autoscale.local.directory)"));
    }
    for kept in [former_directory(&config.state_dir), folder].iter().flat_map(|folder| kept_directories(folder)) {
        let found = format!("{} is the directory of a server that was not proven empty when it ended", kept.display());
        findings.push(finding(Level::Warning, found, "check it for keys, then remove it"));
    }
    findings
}

/// Whether two paths are on one file system. The paths need not exist.
fn is_on_one_disk(one: &Path, other: &Path) -> bool {
    let device = |path: &Path| path.ancestors().find_map(|path| path.metadata().ok()).map(|found| found.dev());
    device(one).is_some_and(|found| device(other) == Some(found))
}

/// Findings of a running router: nodes that it does not use, and keys that are misplaced according to its slot map.
fn running(report: &NodesReport, misplaced: &anyhow::Result<MisplacedReport>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut add = |level, node: Option<&String>, check, found: String, advice: &str| {
        findings.push(Finding { level, node: node.cloned(), check, found, advice: advice.to_owned() });
    };
    for LimitedReport { command, limit, count } in report.limited.iter().filter(|_| report.nodes.len() == 1) {
        let found = format!("{} of {command} that meet a limit with two nodes: {limit}", counted(*count, "call"));
        let advice = "before a second node joins: give keys that are used together a common hash tag, and scripts all of their keys in KEYS (docs/commands.md)";
        add(Level::Note, None, "one node", found, advice);
    }
    for node in &report.nodes {
        if let LinkReport::Down { reason } = &node.link {
            let found = format!("the running router does not use it: {reason}");
            add(Level::Error, Some(&node.address), "not served", found, "docs/dead-server.md has the remedies");
        }
    }
    match misplaced {
        Ok(report) => {
            for node in report.nodes.iter().filter(|node| node.elsewhere > 0) {
                let advice = "find the clients that write there (CLIENT LIST), and let them use the router; then copy these keys through the router, or remove them";
                add(Level::Warning, Some(&node.node), "slot map", misplaced_text(node.keys, node.elsewhere), advice);
            }
        }
        Err(error) => {
            let found =
                format!("the running router does not report whether all keys are placed by its slot map: {error:#}");
            add(Level::Warning, None, "slot map", found, "see its log");
        }
    }
    findings
}

/// Findings about the slot map: of a first start, or the stored map.
fn placement(resolved: &Resolved, config: &Config, rules: &RuleSet, fleet: &KnownFleet) -> Vec<Finding> {
    let finding = |level, found: String, advice: &str| Finding {
        level,
        node: None,
        check: "slot map",
        found,
        advice: advice.to_owned(),
    };
    let timeout = resolved.live.connect_timeout;
    match fleet {
        KnownFleet::Running { report, misplaced } => running(report, misplaced),
        KnownFleet::Hidden(why) => {
            let advice = "give its state directory and admin address (--state-dir, --admin), and run this as a user with read access to both";
            vec![finding(Level::Warning, format!("only the configured nodes were checked: {why}"), advice)]
        }
        KnownFleet::Unplaced => match first_start(&primaries(&resolved.nodes), rules, timeout, &|progress| {
            eprintln!("{progress}")
        }) {
            Ok(FirstStart::Place { owner: None, .. }) => Vec::new(),
            Ok(FirstStart::Place { owner: Some((name, keys)), .. }) => {
                let found =
                    format!("{name} has all keys ({keys}): a first start gives it all slots, and the other nodes none");
                vec![finding(Level::Note, found, "fine; `switchyard balance` spreads them while clients use them")]
            }
            Ok(FirstStart::Refused(why)) => {
                vec![finding(
                    Level::Error,
                    format!("a first start would be refused: {why}"),
                    "choose one of these remedies",
                )]
            }
            Ok(FirstStart::Unknown(why)) => {
                let found = format!("a first start serves no key before it has checked every node: {why}");
                vec![finding(
                    Level::Warning,
                    found,
                    "repair that node, or omit it and add it later (`switchyard nodes add`)",
                )]
            }
            Err(error) => vec![finding(Level::Error, error.to_string(), "correct the list of nodes")],
        },
        KnownFleet::Placed { topology, processes } => {
            if let Err(error) = Topology::place(Some(topology), &config.node_names()) {
                return vec![finding(
                    Level::Error,
                    format!("a start would be refused: {error}"),
                    "correct the list of nodes, or --state-dir",
                )];
            }
            // Keys in transit, or left behind by moves, are recorded only in the journal, which only the router reads.
            // A key that its owner has as well may be a leftover.
            let left = |_| Slot::numbers().collect();
            match processes.check_map(&config.state_dir, topology, &primaries(&resolved.nodes), timeout, left, false) {
                Ok(doubts) => {
                    let advice =
                        "harmless if a move was in progress when the router ended; else find the origin of these keys";
                    doubts.into_iter().map(|doubt| finding(Level::Warning, doubt, advice)).collect()
                }
                Err(why) => vec![finding(
                    Level::Error,
                    format!("a start would be refused: {why}"),
                    "give the state directory of this fleet (--state-dir)",
                )],
            }
        }
    }
}

/// Requirements of the router at a node.
pub(crate) fn needs(live: &switchyard_router::RuntimeSettings, workers: usize, nodes: usize) -> Needs {
    let alone = live.large_connections_max + live.watch_connections_max + live.blocking_connections_max;
    Needs {
        connections: (workers * 2, workers * 4 + alone),
        argument_max: live.argument_max,
        // With a single node, functions may use every key.
        check_scripts: live.check_scripts && nodes > 1,
        hot_copies: live.hot_copies.is_on,
    }
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
        "{} checked: {}, {}, {}",
        counted(nodes, "node"),
        counted(count(Level::Error), "error"),
        counted(count(Level::Warning), "warning"),
        counted(count(Level::Note), "note")
    );
    out
}
