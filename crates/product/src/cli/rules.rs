//! `switchyard rules`: placement rules, and their adoption by a running router.

use clap::{Args, Subcommand};
use switchyard_control::admin::{
    AdoptionReport, RuledKeyReport, RulesCheckReport, RulesEstimate, RulesProposal, RulesReport, RulesRequest,
    RulesResult,
};
use switchyard_policy::topology::{PRESETS, Rule};
use switchyard_resp::units::describe_size;

use super::Failure;
use super::admin_client::{AdminClient, AdminFlags, encoded};
use super::move_slots::HowFlags;
use super::table::{count, number, table, text};

const PATH: &str = "/api/v1/rules";

/// Show placement rules; check them, adopt them, pause or abandon an adoption
#[derive(Debug, Args)]
#[command(
    long_about = "Rules keep related keys at one node: keys with the same captured text, or of one rule with a tag, share a slot. So transactions, scripts and \
        blocking commands on them work on several nodes, without {braces} in the names of keys.\n\n\
        The rules in force are stored with the slot map. [[placement.rule]] in the configuration is a request: `adopt` moves the keys whose node changes, while \
        clients use them.",
    after_long_help = "Examples:\n  \
        switchyard rules                                  the rules in force, and the progress of an adoption\n  \
        switchyard rules check bull:mail:wait bull:mail:7 the rule, tag and node of each key\n  \
        switchyard rules learn                            propose rules for keys that clients use together\n  \
        switchyard rules adopt --dry-run                  how many keys would move, and the load afterwards\n  \
        switchyard rules adopt                            adopt the rules in the configuration\n  \
        switchyard rules adopt --preset bullmq            or those for a library\n  \
        switchyard rules pause                            stop moving keys for now\n  \
        switchyard rules abandon                          return the keys that have moved\n\n\
        Exit codes: 0 success; 1 refused, or failure"
)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,

    #[command(flatten)]
    flags: AdminFlags,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show the rules in force, and the progress of an adoption
    List(PlainArguments),
    /// Show the rule, tag and node of keys, by the rules in force after an adoption
    Check(CheckArguments),
    /// Propose rules for keys that clients use together, from a sample of their commands
    Learn(PlainArguments),
    /// Adopt rules: move the keys whose node changes
    Adopt(Box<AdoptArguments>),
    /// Pause an adoption
    Pause(PlainArguments),
    /// Resume a paused adoption
    Resume(PlainArguments),
    /// Abandon an adoption: return the keys that have moved
    Abandon(PlainArguments),
}

#[derive(Debug, Args)]
struct PlainArguments {
    #[command(flatten)]
    flags: AdminFlags,
}

#[derive(Debug, Args)]
struct CheckArguments {
    /// The keys
    #[arg(required = true, value_name = "KEY")]
    keys: Vec<String>,

    #[command(flatten)]
    flags: AdminFlags,
}

#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
        switchyard rules adopt --dry-run\n  \
        switchyard rules adopt --goal gentle\n  \
        switchyard rules adopt --preset bullmq --preset rq\n  \
        switchyard rules adopt --none                     keys are placed by their names again\n\n\
        Exit codes: 0 requested; 1 refused")]
struct AdoptArguments {
    /// Only estimate the effect, from a sample of each node's keys
    #[arg(long)]
    dry_run: bool,

    /// The rules for a library, instead of those in the configuration; repeatable
    #[arg(long, value_name = "NAME", value_parser = PRESETS.map(|preset| preset.name), conflicts_with = "none")]
    preset: Vec<String>,

    /// No rules, instead of those in the configuration
    #[arg(long)]
    none: bool,

    #[command(flatten)]
    how: HowFlags,

    #[command(flatten)]
    flags: AdminFlags,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let plain = |verb: &str| RulesRequest { verb: verb.to_owned(), ..RulesRequest::default() };
    let (flags, request) = match &arguments.command {
        None => return list(&arguments.flags),
        Some(Command::List(PlainArguments { flags })) => return list(flags),
        Some(Command::Check(CheckArguments { keys, flags })) => {
            let client = AdminClient::new(flags)?;
            let asked: Vec<String> = keys.iter().map(|key| format!("key={}", encoded(key))).collect();
            return client.print(&client.get(&format!("{PATH}/check?{}", asked.join("&")))?, render_keys);
        }
        Some(Command::Learn(PlainArguments { flags })) => {
            let client = AdminClient::new(flags)?;
            return client.print(&client.get_all(&format!("{PATH}/learn"))?, render_proposal);
        }
        Some(Command::Adopt(adopt)) => {
            let presets = || PRESETS.iter().filter(|preset| adopt.preset.iter().any(|name| name == preset.name));
            let rules = match (adopt.none, adopt.preset.is_empty()) {
                (true, _) => Some(Vec::new()),
                (false, true) => None,
                (false, false) => Some(presets().flat_map(switchyard_policy::topology::Preset::rules).collect()),
            };
            (&adopt.flags, RulesRequest { rules, dry_run: adopt.dry_run, how: adopt.how.request(), ..plain("adopt") })
        }
        Some(Command::Pause(PlainArguments { flags })) => (flags, plain("pause")),
        Some(Command::Resume(PlainArguments { flags })) => (flags, plain("resume")),
        Some(Command::Abandon(PlainArguments { flags })) => (flags, plain("abandon")),
    };
    let client = AdminClient::new(flags)?;
    client.print(&client.post_json(PATH, &request)?, render_result)
}

fn list(flags: &AdminFlags) -> Result<(), Failure> {
    let client = AdminClient::new(flags)?;
    client.print(&client.get(PATH)?, render)
}

/// Returns rules as a part of the configuration.
fn tables_of(rules: &[Rule]) -> String {
    let quoted = |text: &String| toml::Value::String(text.clone()).to_string();
    let rule_table = |rule: &Rule| {
        let keys: Vec<String> = rule.keys.iter().map(quoted).collect();
        let tag = rule.tag.as_ref().map(|tag| format!("tag = {}\n", quoted(tag))).unwrap_or_default();
        format!("\n[[placement.rule]]\nkeys = [{}]\n{tag}", keys.join(", "))
    };
    if rules.is_empty() { "none\n".to_owned() } else { rules.iter().map(rule_table).collect() }
}

fn render(report: &RulesReport) -> String {
    let mut out = match report.number {
        0 => "no placement rules: the slot of a key is that of its name, or of its {hash tag}\n".to_owned(),
        number => format!("placement rules in force (set {number}):\n{}", tables_of(&report.rules)),
    };
    if let Some(adoption) = &report.adoption {
        out.push_str(&render_adoption(adoption));
    }
    if let Some(configured) = &report.configured {
        out.push_str(&format!(
            "\nthe configuration has other rules (`switchyard rules adopt` adopts them):\n{}",
            tables_of(configured)
        ));
    }
    out
}

fn render_adoption(adoption: &AdoptionReport) -> String {
    let AdoptionReport { rules, state, groups, groups_left, moves, waits_for } = adoption;
    let mut out = format!("\nadoption ({state}) of:\n{}\n", tables_of(rules));
    if *groups > 0 {
        let done = groups.saturating_sub(*groups_left);
        out.push_str(&format!("groups of keys at their node: {} of {}\n", count(done), count(*groups)));
    }
    if !moves.is_empty() {
        let ids: Vec<String> = moves.iter().map(u64::to_string).collect();
        out.push_str(&format!("moves in progress: {} (`switchyard moves watch`)\n", ids.join(", ")));
    }
    if let Some(why) = waits_for {
        out.push_str(&format!("waits: {why}\n"));
    }
    out
}

fn render_result(result: &RulesResult) -> String {
    let mut out = format!("{}\n", result.message);
    if !result.nodes.is_empty() {
        let percent = |share: Option<f64>| share.map_or("-".to_owned(), |share| format!("{share:.0} %"));
        let row = |node: &RulesEstimate| {
            vec![
                node.node.clone(),
                count(node.keys),
                count(node.leaving),
                describe_size(node.leaving_bytes),
                count(node.keys_after),
                percent(node.load_percent),
                percent(node.load_percent_after),
            ]
        };
        let columns = [
            text("NODE"),
            number("KEYS"),
            number("LEAVING"),
            number("BYTES"),
            number("KEYS AFTER"),
            number("LOAD"),
            number("LOAD AFTER"),
        ];
        out.push_str(&table(&columns, &result.nodes.iter().map(row).collect::<Vec<_>>()));
    }
    out
}

/// Shows proposed rules as a part of the configuration.
fn render_proposal(proposal: &RulesProposal) -> String {
    let RulesProposal { rules, proposed, groups, together_now, together_then, is_enough, too_large } = proposal;
    if *groups == 0 {
        return "no rules are needed so far: since the start of the router, no command, transaction or script has used keys of several slots\n"
            .to_owned();
    }
    let mut out = format!(
        "{} groups of keys were used together while they were in several slots; {} of them are in one slot now\n",
        count(*groups),
        count(*together_now)
    );
    if *proposed > 0 && !rules.is_empty() {
        out.push_str(&tables_of(&rules[rules.len().saturating_sub(*proposed as usize)..]));
    }
    if *proposed == 0 && together_now < groups && too_large.is_empty() {
        out.push_str("no pattern fits the others: write a {hash tag} into the names of keys that are used together\n");
    }
    if *proposed > 0 && rules.is_empty() {
        out.push_str(&format!(
            "{proposed} rules would keep {} groups in one slot; only requests with the admin token receive them, because they contain parts of key names\n",
            count(*together_then)
        ));
    } else if *proposed > 0 {
        let few = if *is_enough { "" } else { ": less than 95 %" };
        out.push_str(&format!(
            "\nthese rules would keep {} groups in one slot{few}. Write them into the configuration, reload it, and see `switchyard rules adopt --dry-run`\n",
            count(*together_then)
        ));
    }
    for refused in too_large {
        out.push_str(&format!(
            "not proposed: {}, because its tag {} has {} % of the {}, more than half of a node's share\n",
            refused.rule.keys.join(" "),
            refused.tag,
            refused.percent,
            refused.of
        ));
    }
    out
}

fn render_keys(report: &RulesCheckReport) -> String {
    let row = |key: &RuledKeyReport| {
        let by = match (&key.pattern, key.has_own_tag) {
            (Some(pattern), _) => pattern.clone(),
            (None, true) => "its own hash tag".to_owned(),
            (None, false) => "no rule".to_owned(),
        };
        vec![key.key.clone(), by, key.tag.clone().unwrap_or_default(), key.slot.to_string(), key.owner.clone()]
    };
    let columns = [text("KEY"), text("RULE"), text("TAG"), number("SLOT"), text("NODE")];
    let rows = table(&columns, &report.keys.iter().map(row).collect::<Vec<_>>());
    let note = if report.is_in_force { "" } else { "by rules that are not in force yet:\n" };
    format!("{note}{rows}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_shows_rules_and_the_progress_of_an_adoption() {
        let rule = |keys: &str, tag: Option<&str>| Rule { keys: vec![keys.to_owned()], tag: tag.map(str::to_owned) };
        let report = RulesReport {
            number: 2,
            rules: vec![rule("rq:*", Some("rq"))],
            configured: Some(vec![rule("bull:{queue}:*", None)]),
            adoption: Some(AdoptionReport {
                rules: vec![rule("bull:{queue}:*", None)],
                state: "running".to_owned(),
                groups: 128,
                groups_left: 100,
                moves: vec![7],
                waits_for: None,
            }),
        };
        let shown = render(&report);
        for part in [
            "placement rules in force (set 2):\n\n[[placement.rule]]\nkeys = [\"rq:*\"]\ntag = \"rq\"\n",
            "adoption (running) of:\n\n[[placement.rule]]\nkeys = [\"bull:{queue}:*\"]\n",
            "groups of keys at their node: 28 of 128",
            "moves in progress: 7",
            "the configuration has other rules",
        ] {
            assert!(shown.contains(part), "{part}\n{shown}");
        }
    }
}
