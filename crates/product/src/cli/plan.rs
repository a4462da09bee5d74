//! `switchyard plan`: findings and decisions of the planner. `switchyard automation`: enables and disables it.

use clap::{Args, Subcommand};
use switchyard_control::admin::{
    AlternativeReport, AutomationReport, AutomationRequest, DecisionReport, HistoryReport, NodeOutlookReport,
    PlanRequest, PriceReport, StepReport,
};
use switchyard_resp::units::{counted, describe_size};

use super::Failure;
use super::admin_client::{AdminClient, AdminFlags, encoded};
use super::table::{count, number, shortened, table, text};

const PATH: &str = "/api/v1/plan";

/// Show overloaded nodes, the planner's remedies, and the reasons
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    long_about = "Overloaded nodes, the cheapest remedy, its cost, and alternatives. A node is over its limit when it has more requests than its \
        capacity (capacity of [[node]]) less the headroom; without a capacity, more than its even share plus the headroom.\n\n\
        Remedies are moves of single hot keys, moves of slots, and returns of keys that are no longer hot to their slots' owners. With [planner] mode = \"on\" the planner does this by itself; \
        with \"observe\", the default, it only reports it.",
    after_long_help = "Examples:\n  \
        switchyard plan\n  \
        switchyard plan --apply\n  \
        switchyard plan --load x2                  if there were twice as many requests\n  \
        switchyard plan --without 127.0.0.1:7003   if this node were removed\n  \
        switchyard plan --policy makris-ffd\n  \
        switchyard plan history\n  \
        switchyard plan replay 12                  repeat decision 12 on its recorded input\n  \
        switchyard plan undo 12                    move the keys and slots of decision 12 back\n\n\
        Exit codes: 0 success; 1 failure, or --apply found nothing to do"
)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,

    /// Start the moves of the plan
    #[arg(long, conflicts_with = "load")]
    apply: bool,

    /// Assume a multiple of the load, such as x2 or 0.5
    #[arg(long, value_name = "TIMES", value_parser = times)]
    load: Option<f64>,

    /// Assume that this node is removed
    #[arg(long, value_name = "NODE")]
    without: Option<String>,

    /// Use another policy: switchyard, makris-ffd or makris-safe
    #[arg(long, value_name = "POLICY")]
    policy: Option<String>,

    #[command(flatten)]
    flags: AdminFlags,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List decisions with their ids and outcomes
    History(HistoryArguments),
    /// Repeat a decision on its recorded input
    Replay(ReplayArguments),
    /// Undo the moves of a decision
    Undo(UndoArguments),
}

#[derive(Debug, Args)]
#[command(
    after_long_help = "Examples:\n  switchyard plan history\n  switchyard plan history --json | jq '.decisions[0]'\n\nExit codes: 0 success; 1 failure"
)]
struct HistoryArguments {
    #[command(flatten)]
    flags: AdminFlags,
}

#[derive(Debug, Args)]
#[command(
    after_long_help = "Examples:\n  switchyard plan replay 12\n\nExit codes: 0 success; 1 there is no such decision"
)]
struct ReplayArguments {
    /// Id of the decision
    #[arg(value_name = "ID")]
    id: u64,

    #[command(flatten)]
    flags: AdminFlags,
}

#[derive(Debug, Args)]
#[command(
    long_about = "Move the keys and slots of a decision back, if they are still at the nodes that the decision moved them to.",
    after_long_help = "Examples:\n  switchyard plan history\n  switchyard plan undo 12\n\n\
        Exit codes: 0 the moves have started; 1 nothing can be moved back, with the reason"
)]
struct UndoArguments {
    /// Id of the decision
    #[arg(value_name = "ID")]
    id: u64,

    #[command(flatten)]
    flags: AdminFlags,
}

/// Show whether the router moves anything by itself; disable or enable it
#[derive(Debug, Args)]
#[command(
    long_about = "Whether the router moves anything by itself: the planner with [planner] mode = \"on\". `off` disables it at once and permanently, regardless of the configuration, \
        until `on`. Moves in progress continue.",
    after_long_help = "Examples:\n  \
        switchyard automation\n  \
        switchyard automation off\n  \
        switchyard automation on\n\n\
        Exit codes: 0 success; 1 failure"
)]
pub(crate) struct AutomationArguments {
    /// on or off; without it, show the state
    #[arg(value_parser = ["on", "off"])]
    verb: Option<String>,

    #[command(flatten)]
    flags: AdminFlags,
}

fn times(text: &str) -> Result<f64, String> {
    let number = text.strip_prefix(['x', '×']).unwrap_or(text).parse::<f64>();
    number
        .ok()
        .filter(|times| (0.0..=1000.0).contains(times))
        .ok_or_else(|| format!("{text:?} is not a factor: write x2 or 0.5"))
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    match &arguments.command {
        Some(Command::History(HistoryArguments { flags })) => {
            let client = AdminClient::new(flags)?;
            return client.print(&client.get_all("/api/v1/plan/history")?, history);
        }
        Some(Command::Replay(ReplayArguments { id, flags })) => {
            let client = AdminClient::new(flags)?;
            return client.print(&client.get_all(&format!("/api/v1/plan/history/{id}/replay"))?, decision);
        }
        Some(Command::Undo(UndoArguments { id, flags })) => {
            let client = AdminClient::new(flags)?;
            return client
                .print(&client.post_json(PATH, &PlanRequest { undo: Some(*id), ..PlanRequest::default() })?, decision);
        }
        None => {}
    }
    let client = AdminClient::new(&arguments.flags)?;
    let Arguments { without, policy, load, .. } = arguments;
    if arguments.apply {
        let request = PlanRequest { without: without.clone(), policy: policy.clone(), ..PlanRequest::default() };
        return client.print(&client.post_json(PATH, &request)?, decision);
    }
    let load = load.map(|load| load.to_string());
    let query: Vec<String> = [("load", load.as_ref()), ("without", without.as_ref()), ("policy", policy.as_ref())]
        .into_iter()
        .filter_map(|(name, value)| Some(format!("{name}={}", encoded(value?))))
        .collect();
    let path = if query.is_empty() { PATH.to_owned() } else { format!("{PATH}?{}", query.join("&")) };
    client.print(&client.get_all(&path)?, decision)
}

pub(crate) fn run_automation(arguments: &AutomationArguments) -> Result<(), Failure> {
    let client = AdminClient::new(&arguments.flags)?;
    let path = "/api/v1/automation";
    let body = match &arguments.verb {
        None => client.get(path)?,
        Some(verb) => client.post_json(path, &AutomationRequest { verb: verb.clone() })?,
    };
    client.print(&body, |report: &AutomationReport| format!("{}\n", automation(report)))
}

fn automation(report: &AutomationReport) -> String {
    match (&*report.mode, &report.rests) {
        (_, Some(why)) => format!("automation does not act: {why}"),
        ("on", None) => "automation acts: [planner] mode is \"on\" (the autoscaler: `switchyard autoscale`)".to_owned(),
        (mode, None) => {
            format!("the planner does not act: [planner] mode is {mode:?} (the autoscaler: `switchyard autoscale`)")
        }
    }
}

fn history(report: &HistoryReport) -> String {
    let mut out = format!("{}\n", automation(&report.automation));
    if report.decisions.is_empty() {
        out.push_str("no decisions yet\n");
    }
    for decision in &report.decisions {
        let outcome = decision.outcome.as_deref().unwrap_or("not carried out");
        let id = decision.id.unwrap_or_default();
        out.push_str(&format!(
            "\n{id}  {}  by {}\n    {}\n    {outcome}\n",
            ago(decision.at),
            decision.by,
            decision.message
        ));
    }
    out
}

/// Time since a moment, as text.
pub(super) fn ago(seconds: u64) -> String {
    let now =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(seconds, |since| since.as_secs());
    match now.saturating_sub(seconds) {
        seconds @ 0..120 => format!("{seconds} s ago"),
        seconds @ 120..7200 => format!("{} min ago", seconds / 60),
        seconds => format!("{} h ago", seconds / 3600),
    }
}

fn decision(report: &DecisionReport) -> String {
    let mut out = format!("{}\n", report.message);
    let rate = |rate: f64| count(rate.round() as u64);
    let row = |node: &NodeOutlookReport| {
        let NodeOutlookReport { node, requests_per_second, after_per_second, limit_per_second } = node;
        vec![node.clone(), rate(*requests_per_second), rate(*limit_per_second), rate(*after_per_second)]
    };
    let rows: Vec<Vec<String>> = report.nodes.iter().map(row).collect();
    out.push_str(&format!(
        "\n{}",
        table(&[text("node"), number("requests/s"), number("limit"), number("then")], &rows)
    ));
    if !report.steps.is_empty() {
        let row = |step: &StepReport| {
            let StepReport { what, key, slots, from, to, requests_per_second, bytes } = step;
            let what = match (what.as_str(), key) {
                ("slots", _) => format!("slots {}", shortened(slots, 40)),
                (what, Some(key)) => format!("{what} {key}"),
                (what, None) => format!("{what} (slot {slots})"),
            };
            vec![what, from.clone(), to.clone(), rate(*requests_per_second), describe_size(*bytes)]
        };
        let rows: Vec<Vec<String>> = report.steps.iter().map(row).collect();
        let columns = [text("moves"), text("from"), text("to"), number("requests/s"), number("bytes")];
        out.push_str(&format!("\n{}\ncosts {}\n", table(&columns, &rows), price(report.price)));
    }
    for AlternativeReport { way, relieves, price: cost, fullest_percent } in &report.alternatives {
        let ends = match *fullest_percent {
            _ if *relieves => "relieves every node".to_owned(),
            percent if percent > 100.0 => format!("leaves a node at {percent:.0} % of its limit"),
            _ => "leaves keys at the node to be removed".to_owned(),
        };
        out.push_str(&format!("instead, {way}: {ends}, costs {}\n", price(*cost)));
    }
    for held in &report.held {
        out.push_str(&format!("{held}\n"));
    }
    for advice in &report.advice {
        out.push_str(&format!("note: {advice}\n"));
    }
    if let Some(outcome) = &report.outcome {
        out.push_str(&format!("{outcome}\n"));
    }
    if let Some(applied) = &report.applied {
        let moves: Vec<String> =
            applied.moves.iter().filter_map(|planned| planned.id).map(|id| id.to_string()).collect();
        let id = report.id.unwrap_or_default();
        out.push_str(&format!(
            "decision {id} has started as {} ({}); `switchyard moves watch` shows the progress\n",
            counted(moves.len(), "move"),
            moves.join(", ")
        ));
    }
    out
}

fn price(price: PriceReport) -> String {
    let PriceReport { bytes, keys, slots, .. } = price;
    format!("{}: {} and {}", describe_size(bytes), counted(keys as usize, "key"), counted(slots as usize, "slot"))
}
