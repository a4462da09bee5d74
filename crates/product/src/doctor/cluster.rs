//! Checks the members of a cluster: its state, and the commands that they must accept for all features.

use std::collections::BTreeSet;
use std::time::Duration;

use switchyard_control::cluster::Report;
use switchyard_control::nodes::NodeConnection;
use switchyard_policy::cluster::Member;
use switchyard_policy::topology::SLOT_COUNT;
use switchyard_router::NodeAccess;

use super::{Finding, Level};
use crate::config::counted;

/// Commands that the router sends to members, with the consequence if one is refused. Only AUTH and CLUSTER SLOTS are
/// required.
const COMMANDS: [(&[&str], &str); 9] = [
    (&["CLUSTER", "NODES"], "SCAN is refused, and slots cannot be moved by Switchyard"),
    (&["CLUSTER", "MYID"], "a server of another cluster at a reused address is not detected"),
    (&["INFO", "server"], "versions and restarts of members are not known"),
    (&["CLIENT", "ID"], "commands of broken connections cannot be ended"),
    (&["COMMAND", "COUNT"], "commands of modules are not known"),
    (&["CONFIG", "GET", "maxclients"], "connections are not bounded by the limit of members"),
    (&["SCRIPT", "EXISTS", "0000000000000000000000000000000000000000"], "scripts are not executed"),
    (&["READONLY"], "no replica can be read"),
    // The last one: it applies to the next command.
    (&["ASKING"], "commands for keys of migrating slots fail"),
];

/// Returns the findings about a cluster, by the report of one of its members.
pub(crate) fn examine_cluster(report: &Report, timeout: Duration) -> Vec<Finding> {
    let owned: usize = report.shards.iter().map(|shard| shard.slots.len()).sum();
    let mut findings = Vec::new();
    if owned < SLOT_COUNT {
        let found = format!("{} of the cluster have no owner", counted(SLOT_COUNT - owned, "slot"));
        let advice = "give them to members (redis-cli --cluster fix): commands for their keys wait, and then fail";
        findings.push(Finding { level: Level::Error, node: None, check: "slots", found, advice: advice.to_owned() });
    }
    let primaries: BTreeSet<&Member> = report.shards.iter().map(|shard| &shard.primary).collect();
    std::thread::scope(|scope| {
        let checks: Vec<_> = primaries
            .iter()
            .filter_map(|member| Some((member.name(), report.access.get(*member)?)))
            .map(|(name, access)| scope.spawn(move || examine_member(&name, access, timeout)))
            .collect();
        findings.extend(checks.into_iter().filter_map(|check| check.join().ok()).flatten());
    });
    findings
}

fn examine_member(name: &str, access: &NodeAccess, timeout: Duration) -> Vec<Finding> {
    let finding = |level, check, found: String, advice: &str| Finding {
        level,
        node: Some(name.to_owned()),
        check,
        found,
        advice: advice.to_owned(),
    };
    let unreachable = |why: String| {
        let advice = "check its address as clients of the cluster see it (storage.addresses), and the user and password of [nodes]";
        vec![finding(Level::Error, "connection", why, advice)]
    };
    let mut connection = match NodeConnection::open(access, timeout) {
        Ok(connection) => connection,
        Err(why) => return unreachable(why),
    };
    let mut findings = Vec::new();
    match connection.call(&["CLUSTER", "INFO"]) {
        Err(error) => return unreachable(format!("does not answer: {error}")),
        Ok(answer) if answer.text().contains("cluster_state:fail") => {
            let advice = "repair its members, or their network: commands wait for storage.wait-max, and then fail";
            findings.push(finding(Level::Error, "state", "it sees the cluster as failed".to_owned(), advice));
        }
        Ok(_) => {}
    }
    for (command, consequence) in COMMANDS {
        let refusal = match connection.call(command) {
            Ok(answer) => answer.error(),
            Err(error) => Some(error.to_string()),
        };
        if let Some(why) = refusal {
            let found = format!("it refuses {}, so {consequence}: {why}", command[..command.len().min(2)].join(" "));
            findings.push(finding(
                Level::Warning,
                "permissions",
                found,
                "allow it to the router's user, if the service can",
            ));
        }
    }
    findings
}
