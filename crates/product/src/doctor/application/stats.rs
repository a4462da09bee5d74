//! INFO commandstats: counts of called commands, and which of them may meet a limit.

use std::collections::BTreeMap;

use switchyard_control::nodes::NodeConnection;
use switchyard_resp::command::CommandTable;
use switchyard_router::{NodeAccess, site_of_record_user};

use super::{Limit, OWN, REPLY_TIMEOUT, limit_of};
use crate::config::counted;
use crate::doctor::{Finding, Level};

/// Number of calls by command name (`GET`, `XGROUP|CREATE`).
pub(crate) type Calls = BTreeMap<String, u64>;

/// Commands that routers and moves also call at nodes. The counters do not separate them from clients' calls, but a
/// sample does.
const ROUTERS: &[&str] = &["EXEC", "MSETNX", "RENAMENX", "SWAPDB", "WATCH"];

/// Returns a node's counts of clients' calls without errors.
pub(crate) fn calls(access: &NodeAccess) -> Result<Calls, String> {
    let mut node = NodeConnection::open(access, REPLY_TIMEOUT)?;
    let answer = node.call(&["INFO", "commandstats"]).map_err(|error| format!("does not answer: {error}"))?;
    match answer.error() {
        Some(error) => Err(format!("refuses INFO: {error}")),
        None => {
            let mut calls = parse(&answer.text());
            let mut ask = |args: &[&str]| node.call(args).map_err(|error| format!("does not answer: {error}"));
            let (clients, users) = (ask(&["CLIENT", "LIST"])?.text(), ask(&["ACL", "USERS"])?);
            // A router that has ended has left its ownership record.
            let had_router = users.items().iter().any(|user| site_of_record_user(&user.text()).is_some());
            if had_router || clients.lines().any(|line| line.contains(&format!(" name={OWN}"))) {
                calls.retain(|name, _| !ROUTERS.contains(&name.as_str()));
            }
            Ok(calls)
        }
    }
}

fn parse(info: &str) -> Calls {
    let line = |line: &str| {
        let (name, fields) = line.trim().strip_prefix("cmdstat_")?.split_once(":calls=")?;
        let failed =
            fields.split(',').find_map(|field| field.strip_prefix("failed_calls=")?.parse::<u64>().ok()).unwrap_or(0);
        let calls: u64 = fields.split(',').next()?.parse().ok()?;
        Some((name.to_ascii_uppercase(), calls.saturating_sub(failed)))
    };
    info.lines().filter_map(line).collect()
}

/// Returns findings about the called commands.
pub(crate) fn judge_calls(calls: &Calls) -> Vec<Finding> {
    let table = CommandTable::builtin();
    let mut found: BTreeMap<Limit, Vec<(&str, u64)>> = BTreeMap::new();
    for (name, count) in calls.iter().filter(|(_, count)| **count > 0) {
        // Commands that are not in the table belong to modules or newer servers: the router learns them from the node.
        if let Some(limit) = table.by_name(name).and_then(limit_of) {
            found.entry(limit).or_default().push((name, *count));
        }
    }
    found.into_iter().map(|(limit, commands)| finding(limit, &commands)).collect()
}

fn finding(limit: Limit, commands: &[(&str, u64)]) -> Finding {
    let shown: Vec<String> = commands
        .iter()
        .map(|(name, count)| format!("{} ({})", name.replace('|', " "), counted(*count, "call")))
        .collect();
    let shown = shown.join(", ");
    let (level, found, advice) = match limit {
        Limit::Refused(why) => (
            Level::Warning,
            format!("commands were called that the router does not serve: {shown}"),
            format!("check that the application can work without them: {why}"),
        ),
        Limit::OneSlot => (
            Level::Note,
            format!("commands were called whose keys must share a slot: {shown}"),
            format!("{TAGS}; {SAMPLE}"),
        ),
        Limit::Transaction => (
            Level::Note,
            format!("transactions were called, and all keys of one, with those watched, must share a slot: {shown}"),
            format!("{TAGS}; {SAMPLE}"),
        ),
        Limit::Blocking => (
            Level::Note,
            format!("commands were called that may wait for several keys, which must share a slot: {shown}"),
            format!("{TAGS}; {SAMPLE}"),
        ),
        Limit::Script => (
            Level::Note,
            format!("scripts were called, whose keys must share a slot and be declared (KEYS): {shown}"),
            format!("{TAGS}, and pass every key as one; {SAMPLE}"),
        ),
    };
    Finding { level, node: None, check: "commands", found, advice }
}

const TAGS: &str = "give keys that are used together a common hash tag ({user:7}:cart, {user:7}:name)";
const SAMPLE: &str = "`switchyard doctor --sample 10s` inspects real commands and finds those that would fail";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_that_may_meet_limits_are_listed_with_their_calls() {
        let calls = parse(
            "# Commandstats\r\ncmdstat_get:calls=700,usec=9,usec_per_call=0.10,rejected_calls=0,failed_calls=0\r\n\
             cmdstat_rename:calls=3,usec=9,usec_per_call=3.00\r\ncmdstat_smove:calls=1,usec=1\r\ncmdstat_exec:calls=5,usec=1\r\n\
             cmdstat_msetnx:calls=2,usec=0,usec_per_call=0.00,rejected_calls=0,failed_calls=2\r\ncmdstat_swapdb:calls=2,usec=1\r\ncmdstat_xgroup|create:calls=9,usec=1\r\n\
             cmdstat_json.set:calls=4,usec=1\r\ncmdstat_config|get:calls=4,usec=1\r\n",
        );
        assert_eq!(calls["XGROUP|CREATE"], 9);
        let found = judge_calls(&calls);
        let told: Vec<(Level, &str)> =
            found.iter().map(|f| (f.level, f.found.rsplit(": ").next().unwrap_or_default())).collect();
        let expected = [
            (Level::Note, "RENAME (3 calls), SMOVE (1 call)"),
            (Level::Note, "EXEC (5 calls)"),
            (Level::Warning, "SWAPDB (2 calls)"),
        ];
        assert_eq!(told, expected);
        assert!(judge_calls(&parse("cmdstat_get:calls=1,usec=1\r\ncmdstat_mget:calls=1,usec=1\r\n")).is_empty());
    }
}
