//! Finds commands of an application that behave differently behind the router, before the application is switched over.
//!
//! `stats` uses the command counts of every server. `sample` inspects real commands and their keys for a short time.
//! Both use the router's command table.

mod sample;
mod stats;

use std::time::Duration;

use sample::{Sample, sample};
use stats::{Calls, calls, judge_calls};
use switchyard_policy::topology::Placement;
use switchyard_resp::command::{Command, Flags, Handling, Keys};
use switchyard_router::{NodeAccess, spans_slots};

use super::{Finding, Level};

/// Timeout of a node's reply.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// Start of the message when MONITOR is refused.
const NO_MONITOR: &str = "refuses MONITOR";

/// Prefix of the names of routers' connections.
const OWN: &str = "switchyard-";

/// Reason why the router may refuse a command that a single server accepts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Limit {
    /// The keys must share a slot.
    OneSlot,
    /// All keys of a transaction, including watched keys, must share a slot.
    Transaction,
    /// The keys of a blocking command must share a slot.
    Blocking,
    /// The keys of a script must share a slot and be declared.
    Script,
    /// The router refuses the command, for this reason.
    Refused(&'static str),
}

/// Returns findings about the commands of these servers: from call counts, and with `time` also from a sample.
/// `placement`: that of the fleet, which decides whether keys share a slot.
pub(crate) fn examine_commands(nodes: &[NodeAccess], placement: &Placement, time: Option<Duration>) -> Vec<Finding> {
    let seen: Vec<_> = std::thread::scope(|scope| {
        let looks: Vec<_> = nodes
            .iter()
            .map(|node| (node, scope.spawn(move || (calls(node), time.map(|time| sample(node, placement, time))))))
            .collect();
        looks.into_iter().filter_map(|(node, look)| Some((node, look.join().ok()?))).collect()
    });
    let mut total = Calls::new();
    let mut samples: Option<Sample> = None;
    let mut findings = Vec::new();
    for (node, (calls, sample)) in seen {
        // A server that does not reply is reported by the other checks.
        for (name, count) in calls.unwrap_or_default() {
            *total.entry(name).or_default() += count;
        }
        match sample {
            None => {}
            Some(Ok(sample)) => samples.get_or_insert_default().add(sample),
            Some(Err(why)) => findings.push(Finding {
                level: Level::Warning,
                node: Some(node.name.clone()),
                check: "sample",
                found: format!("its commands could not be sampled: it {why}"),
                advice: match why.starts_with(NO_MONITOR) {
                    true => "allow +monitor to our user there, or omit --sample",
                    false => "repair that node first",
                }
                .to_owned(),
            }),
        }
    }
    findings.extend(judge_calls(&total));
    findings.extend(samples.iter().flat_map(Sample::judge));
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.level));
    findings
}

/// Returns the limit that may apply to a command. Commands that operators send directly to servers do not count.
fn limit_of(command: &Command) -> Option<Limit> {
    match command.handling {
        Handling::OnlyNode(why) | Handling::Refused(why) => {
            (!command.flags.has(Flags::ADMIN)).then_some(Limit::Refused(why))
        }
        Handling::Keyed if command.flags.has(Flags::SCRIPT) => Some(Limit::Script),
        Handling::Keyed if !may_have_several_keys(&command.keys) || spans_slots(command) => None,
        Handling::Keyed if command.flags.has(Flags::BLOCKING) => Some(Limit::Blocking),
        Handling::Keyed => Some(Limit::OneSlot),
        _ if matches!(&*command.name, "EXEC" | "WATCH") => Some(Limit::Transaction),
        _ => None,
    }
}

fn may_have_several_keys(keys: &Keys) -> bool {
    match keys {
        Keys::None | Keys::Sort { store: false } => false,
        Keys::Range { first, last, .. } => i32::from(*first) != i32::from(*last),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use switchyard_resp::command::CommandTable;

    use super::*;

    #[test]
    fn the_table_lists_commands_that_may_meet_limits() {
        let table = CommandTable::builtin();
        let limit = |name: &str| limit_of(table.by_name(name).unwrap_or_else(|| panic!("{name} is in the table")));
        for name in ["RENAME", "RENAMENX", "SMOVE", "LMOVE", "RPOPLPUSH", "MSETNX"] {
            assert_eq!(limit(name), Some(Limit::OneSlot), "{name}");
        }
        for name in ["BLPOP", "BLMOVE", "BZMPOP", "XREAD", "XREADGROUP"] {
            assert_eq!(limit(name), Some(Limit::Blocking), "{name}");
        }
        for name in ["EVAL", "EVALSHA_RO", "FCALL"] {
            assert_eq!(limit(name), Some(Limit::Script), "{name}");
        }
        assert_eq!((limit("EXEC"), limit("WATCH")), (Some(Limit::Transaction), Some(Limit::Transaction)));
        assert!(matches!(limit("SWAPDB"), Some(Limit::Refused(_))));
        for name in [
            "GET",
            "MGET",
            "MSET",
            "DEL",
            "SINTERSTORE",
            "PFMERGE",
            "SORT",
            "SCAN",
            "XGROUP|CREATE",
            "PUBLISH",
            "MULTI",
            "SAVE",
            "REPLCONF",
        ] {
            assert_eq!(limit(name), None, "{name}");
        }
    }
}
