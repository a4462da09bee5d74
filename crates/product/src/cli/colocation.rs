//! `switchyard colocation`: keys that commands have brought together.

use std::fmt::Write as _;
use std::time::Duration;

use clap::Args;
use switchyard_control::admin::{
    ColocatedKeyReport, ColocationRefusalReport, ColocationReport, ColocationWaitReport, KeyGroupReport, MoveReport,
};
use switchyard_resp::units::{counted, describe_time};

use super::Failure;
use super::admin_client::{AdminClient, AdminFlags};
use super::table::{count, number, table, text};

/// Show keys that commands have brought together, their groups and moves, and refused commands
#[derive(Debug, Args)]
#[command(
    long_about = "Commands, transactions and scripts whose keys are at several nodes wait until moves have brought these keys to one node. This shows the keys \
        that such moves have brought to other nodes than their slots within the last hour, and groups: keys that commands needed together in the last minute, \
        which follow each other. Then follow the commands that wait now, the moves, and commands that were refused, each with the reason.\n\n\
        Each list has the latest 50 entries. Key names are shown to users with the router's token. After a restart of the router, only the moves are known.",
    after_long_help = "Examples:\n  \
        switchyard colocation\n  \
        switchyard colocation --json | jq -r '.refusals[] | \"\\(.command): \\(.reason)\"'\n  \
        switchyard move --home --from 10.0.0.1:6379        return keys of this node to their slots\n\n\
        Exit codes: 0 the router answered; 1 it did not"
)]
pub(crate) struct Arguments {
    #[command(flatten)]
    flags: AdminFlags,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let client = AdminClient::new(&arguments.flags)?;
    let body = client.get_all("/api/v1/colocation")?;
    client.print(&body, render)
}

fn ago(seconds: u64) -> String {
    describe_time(Duration::from_secs(seconds))
}

/// Number of keys of a request.
fn keys(number: Option<u64>) -> String {
    number.map_or_else(|| "a slot".to_owned(), count)
}

fn render(report: &ColocationReport) -> String {
    let mut out = format!(
        "{} {} at other nodes than their slots; commands have brought {} of them there within the last hour\n",
        counted(report.overrides, "key"),
        if report.overrides == 1 { "is" } else { "are" },
        count(report.brought)
    );
    let mut section = |title: String, columns: &[super::table::Column], rows: Vec<Vec<String>>| {
        if !rows.is_empty() {
            let _ = write!(out, "\n{title}:\n{}", table(columns, &rows));
        }
    };
    let key = |key: &ColocatedKeyReport| {
        vec![
            ago(key.seconds_ago),
            key.slot.to_string(),
            key.owner.clone(),
            key.node.clone(),
            key.commands.clone(),
            key.key.clone().unwrap_or_default(),
        ]
    };
    section(
        "latest keys".to_owned(),
        &[number("AGO"), number("SLOT"), text("OWNER"), text("NODE"), text("FOR"), text("KEY")],
        report.keys.iter().map(key).collect(),
    );
    let group = |group: &KeyGroupReport| {
        let rest = if group.names.is_empty() || group.names.len() as u64 == group.keys { "" } else { " ..." };
        vec![
            ago(group.seconds_ago),
            count(group.keys),
            group.nodes.join(" "),
            format!("{}{rest}", group.names.join(" ")),
        ]
    };
    section(
        format!("recent groups ({}): if a key moves for a command, its group follows", count(report.groups_total)),
        &[number("AGO"), number("KEYS"), text("NODES"), text("NAMES")],
        report.groups.iter().map(group).collect(),
    );
    let wait = |wait: &ColocationWaitReport| vec![ago(wait.seconds), keys(wait.keys), wait.command.clone()];
    section(
        format!("commands that wait for their keys ({})", count(report.waiting_total)),
        &[number("SINCE"), number("KEYS"), text("COMMAND")],
        report.waiting.iter().map(wait).collect(),
    );
    let moved = |m: &MoveReport| {
        let commands: Vec<&str> = m.home_for.iter().map(|home| home.command.as_str()).collect();
        vec![
            m.id.to_string(),
            m.from.clone(),
            m.to.clone(),
            count(m.keys.unwrap_or_default()),
            commands.join(", "),
            m.activity.clone(),
        ]
    };
    section(
        "moves".to_owned(),
        &[number("MOVE"), text("FROM"), text("TO"), number("KEYS"), text("FOR"), text("STATE")],
        report.moves.iter().map(moved).collect(),
    );
    let refusal = |refusal: &ColocationRefusalReport| {
        vec![ago(refusal.seconds_ago), refusal.command.clone(), keys(refusal.keys), refusal.reason.clone()]
    };
    section(
        "refused commands".to_owned(),
        &[number("AGO"), text("COMMAND"), number("KEYS"), text("REASON")],
        report.refusals.iter().map(refusal).collect(),
    );
    out
}

#[cfg(test)]
mod tests {
    use switchyard_control::admin::ReturnedKeysReport;

    use super::*;

    #[test]
    fn each_list_of_the_report_is_a_table() {
        let empty = render(&ColocationReport::default());
        assert_eq!(empty.lines().count(), 1, "{empty}");
        let report = ColocationReport {
            overrides: 3,
            brought: 1,
            keys: vec![ColocatedKeyReport {
                key: Some("stock:7".into()),
                slot: 9,
                owner: "a:1".into(),
                node: "b:1".into(),
                commands: "EVAL".into(),
                seconds_ago: 5,
            }],
            groups_total: 1,
            groups: vec![KeyGroupReport {
                keys: 3,
                names: vec!["order:1".into(), "stock:7".into()],
                nodes: vec!["b:1".into()],
                seconds_ago: 5,
            }],
            waiting_total: 1,
            waiting: vec![ColocationWaitReport { command: "RENAME".into(), keys: Some(2), seconds: 1 }],
            moves: vec![MoveReport {
                id: 4,
                from: "a:1".into(),
                to: "b:1".into(),
                keys: Some(1),
                activity: "done".into(),
                home_for: vec![ReturnedKeysReport { command: "EVAL".into(), keys: 1 }],
                ..MoveReport::default()
            }],
            refusals: vec![ColocationRefusalReport {
                command: "FCALL".into(),
                keys: None,
                reason: "c:1 cannot be used".into(),
                seconds_ago: 61,
            }],
        };
        let shown = render(&report);
        for line in [
            "3 keys are at other nodes than their slots; commands have brought 1 of them there within the last hour",
            "     9  a:1    b:1   EVAL  stock:7",
            "   3  b:1    order:1 stock:7 ...",
            "commands that wait for their keys (1):",
            "   4  a:1   b:1     1  EVAL  done",
            "FCALL    a slot  c:1 cannot be used",
        ] {
            assert!(shown.lines().any(|of| of.ends_with(line)), "{line:?} in\n{shown}");
        }
    }
}
