//! `SWITCHYARD MOVE ...` and related commands over RESP. Replies are those of the admin API, as maps and arrays.
//!
//! Workers hand the commands over; a thread executes them, because they may query nodes and block.

use std::sync::Arc;

use serde_json::Value;
use switchyard_resp::encode;
use switchyard_resp::units::parse_rate;
use switchyard_router::OperatorCommand;
use tracing::warn;

use super::CommandThread;
use crate::admin::{
    Abandon, AbortRequest, AddNodeRequest, AutomationRequest, AutoscaleRequest, BalanceRequest, HotCopiesOrder,
    HotKeysReport, MoveOptionsRequest, MoveRequest, NodeRequest, Operation, PaperRequest, PlanRequest, RulesOrder,
    Source, SteerRequest,
};
use crate::moves::NO_RESEARCH;
use crate::running::Running;

/// Starts the thread that executes `SWITCHYARD` commands.
///
/// # Errors
/// If no thread can be started.
pub fn listen(source: Arc<dyn Source>, running: Arc<Running>) -> anyhow::Result<Arc<CommandThread>> {
    CommandThread::start("operator", running, move |command| answer(&*source, command))
}

fn answer(source: &dyn Source, command: &OperatorCommand) -> Vec<u8> {
    let mut out = Vec::new();
    let words: Vec<String> = command.words().iter().map(|word| String::from_utf8_lossy(word).into_owned()).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let asked = match words.as_slice() {
        [verb, node @ ..] if verb.eq_ignore_ascii_case("ACCEPT") => Ok(OperatorRequest::Accept(node)),
        // Names of keys are bytes.
        [verb, _, ..] if verb.eq_ignore_ascii_case("WHERE") => {
            Ok(OperatorRequest::Operation(Operation::Where(command.words()[1..].to_vec())))
        }
        [verb, rest @ ..] if verb.eq_ignore_ascii_case("HOTCOPIES") => hot_copies(rest, command.words()),
        [verb, rest @ ..] if verb.eq_ignore_ascii_case("LOAD") => load(rest),
        [verb, count @ ..] if verb.eq_ignore_ascii_case("HOTKEYS") => hot_keys(count, command.may_operate()),
        _ => parse(&words)
            .map(|asked| OperatorRequest::Operation(named(asked, command.may_operate())))
            .map_err(|why| format!("ERR {why}. Try SWITCHYARD HELP.")),
    };
    let done = asked.and_then(|asked| match asked {
        asked if asked.changes() && !command.may_operate() => {
            warn!(target: "audit", who = command.who(), refused = true, "the user is not an operator");
            Err(format!("NOPERM this changes the fleet, and {} may not: {HOW_TO_OPERATE}", command.who()))
        }
        OperatorRequest::Accept(node) => accept(source, node, command.who()).map(|()| encode::simple(&mut out, "OK")),
        OperatorRequest::Operation(operation) => {
            let done = source.operate(operation, command.who()).map_err(|refused| format!("ERR {}", refused.text()));
            done.map(|value| encode_json(&value, command.resp3(), &mut out))
        }
    });
    if let Err(why) = done {
        encode::error(&mut out, &why.replace(['\r', '\n'], " "));
    }
    out
}

/// Remedy for clients without operator rights.
const HOW_TO_OPERATE: &str = "give its user the word operator (in the users file; for the default user in clients.default-user-rules), or use the \
                              command line, such as `switchyard move`";

/// A parsed command.
enum OperatorRequest<'w> {
    /// Arguments after ACCEPT.
    Accept(&'w [&'w str]),
    Operation(Operation),
}

impl OperatorRequest<'_> {
    fn changes(&self) -> bool {
        match self {
            OperatorRequest::Accept(_) => true,
            OperatorRequest::Operation(operation) => operation.changes(),
        }
    }
}

/// Executes `SWITCHYARD ACCEPT node`, like `switchyard nodes accept`.
fn accept(source: &dyn Source, words: &[&str], who: &str) -> Result<(), String> {
    let [node] = words else { return Err("ERR wrong arguments: ACCEPT node".to_owned()) };
    source.accept(node).map_err(|refused| format!("ERR {}", refused.text()))?;
    warn!(target: "audit", who, node, "the node is accepted as it is");
    Ok(())
}

/// Sets whether the client may read names of keys.
fn named(asked: Operation, named: bool) -> Operation {
    match asked {
        Operation::Plan(request) => Operation::Plan(PlanRequest { named, ..request }),
        Operation::PlanHistory { .. } => Operation::PlanHistory { named },
        Operation::Replay { id, .. } => Operation::Replay { id, named },
        other => other,
    }
}

/// Parses `SWITCHYARD HOTKEYS [count]`. Only operators see names.
fn hot_keys<'w>(count: &[&str], named: bool) -> Result<OperatorRequest<'w>, String> {
    let keys = match count {
        [] => Some(HotKeysReport::KEYS),
        [count] => HotKeysReport::count(count),
        _ => None,
    };
    let keys =
        keys.ok_or_else(|| format!("ERR wrong arguments: HOTKEYS [count], from 1 to {}", HotKeysReport::KEYS_MAX))?;
    Ok(OperatorRequest::Operation(Operation::HotKeys { keys, named }))
}

/// Parses `SWITCHYARD LOAD`.
fn load<'w>(rest: &[&str]) -> Result<OperatorRequest<'w>, String> {
    match rest {
        [] => Ok(OperatorRequest::Operation(Operation::Load)),
        _ => Err("ERR wrong arguments: LOAD".to_owned()),
    }
}

/// Parses `SWITCHYARD HOTCOPIES [EVICT KEY k | EVICT PREFIX p | EVICT ALL | OFF | ON]`. `bytes` contains all words,
/// HOTCOPIES first, because names of keys are bytes.
fn hot_copies<'w>(rest: &[&str], bytes: &[Vec<u8>]) -> Result<OperatorRequest<'w>, String> {
    let upper: Vec<String> = rest.iter().take(2).map(|word| word.to_ascii_uppercase()).collect();
    let upper: Vec<&str> = upper.iter().map(String::as_str).collect();
    let order = match (upper.as_slice(), bytes) {
        ([], _) => return Ok(OperatorRequest::Operation(Operation::HotCopies)),
        (["OFF"], _) if rest.len() == 1 => HotCopiesOrder::Suspend(true),
        (["ON"], _) if rest.len() == 1 => HotCopiesOrder::Suspend(false),
        (["EVICT", "ALL"], _) if rest.len() == 2 => HotCopiesOrder::EvictAll,
        (["EVICT", "KEY"], [_, _, _, key]) => HotCopiesOrder::EvictKey(key.clone()),
        (["EVICT", "PREFIX"], [_, _, _, prefix]) => HotCopiesOrder::EvictPrefix(prefix.clone()),
        _ => {
            return Err(
                "ERR wrong arguments: HOTCOPIES, HOTCOPIES EVICT KEY key, HOTCOPIES EVICT PREFIX prefix, HOTCOPIES EVICT ALL, HOTCOPIES OFF, or HOTCOPIES ON"
                    .to_owned(),
            );
        }
    };
    Ok(OperatorRequest::Operation(Operation::SteerHotCopies(order)))
}

/// Parses arguments, which are the same as on the command line.
fn parse(words: &[&str]) -> Result<Operation, String> {
    let name = words.iter().take(2).map(|word| word.to_ascii_uppercase()).collect::<Vec<_>>();
    let name: Vec<&str> = name.iter().map(String::as_str).collect();
    match (name.as_slice(), words) {
        (["MOVE", ..], [_, rest @ ..]) => {
            let mut request = MoveRequest::default();
            read(rest, &mut request.how, |option, value| {
                match option {
                    "FROM" => value?.clone_into(&mut request.from),
                    "TO" => value?.clone_into(&mut request.to),
                    "SLOTS" => request.slots = Some(value?.to_owned()),
                    "KEYS" => request.keys = Some(value?.to_owned()),
                    flag @ ("ALL" | "HOME" | "DRY-RUN") => {
                        request.all |= flag == "ALL";
                        request.home |= flag == "HOME";
                        request.dry_run |= flag == "DRY-RUN";
                        return Ok(false);
                    }
                    _ => return Err(format!("unknown option {option}")),
                }
                Ok(true)
            })?;
            if request.to.is_empty() && !request.home {
                return Err("MOVE needs TO node (or HOME)".to_owned());
            }
            Ok(Operation::Move(request))
        }
        (["MOVES"], _) => Ok(Operation::Moves),
        (["SLOTS"], _) => Ok(Operation::Slots),
        (["WHERE", ..], _) => Err("wrong arguments: WHERE key [key ...]".to_owned()),
        (["MOVES", verb @ ("PAUSE" | "RESUME")], [_, _, id]) => {
            let what = if *verb == "PAUSE" { SteerRequest::Pause } else { SteerRequest::Resume };
            Ok(Operation::Steer { id: number(id)?, what })
        }
        (["MOVES", "ABORT"], [_, _, id, options @ ..]) => {
            let mut request = AbortRequest::default();
            for option in options {
                match option.trim_start_matches('-').to_ascii_uppercase().as_str() {
                    "ABANDON-TARGET" => request.abandon = Some(Abandon::Target),
                    "ABANDON-SOURCE" => request.abandon = Some(Abandon::Source),
                    "DRY-RUN" => request.dry_run = true,
                    other => return Err(format!("unknown option {other}")),
                }
            }
            Ok(Operation::Steer { id: number(id)?, what: SteerRequest::Abort(request) })
        }
        (["MOVES", "GOAL"], [_, _, id, goal]) => {
            Ok(Operation::Steer { id: number(id)?, what: SteerRequest::Goal(goal.to_ascii_lowercase()) })
        }
        (["MOVES", "MAX-RATE"], [_, _, id, rate]) => {
            let rate = if rate.eq_ignore_ascii_case("none") { None } else { Some(parse_rate(rate)?) };
            Ok(Operation::Steer { id: number(id)?, what: SteerRequest::MaxRate(rate) })
        }
        (["MOVES", "SOURCE-OPS-MAX"], [_, _, id, max]) if cfg!(feature = "research") => {
            let max = Some(max.to_ascii_lowercase()).filter(|max| max != "none");
            Ok(Operation::Steer { id: number(id)?, what: SteerRequest::SourceOpsMax(max) })
        }
        (["MOVES", ..], _) => {
            Err("wrong arguments: MOVES, MOVES PAUSE|RESUME id, MOVES ABORT id [ABANDON-TARGET|ABANDON-SOURCE] [DRY-RUN], MOVES GOAL id goal, or MOVES \
                 MAX-RATE id rate|none"
                .to_owned())
        }
        (["NODES", "ADD"], [_, _, address, rest @ ..]) => {
            let mut request = AddNodeRequest { address: (*address).to_owned(), ..AddNodeRequest::default() };
            read(rest, &mut request.how, |option, _| match option {
                flag @ ("REBALANCE" | "ALLOW-LIMITS") => {
                    request.rebalance |= flag == "REBALANCE";
                    request.allow_limits |= flag == "ALLOW-LIMITS";
                    Ok(false)
                }
                _ => Err(format!("unknown option {option}")),
            })?;
            Ok(Operation::AddNode(request))
        }
        (["NODES", verb @ ("DRAIN" | "UNDRAIN" | "REMOVE")], [_, _, address, rest @ ..]) => {
            let mut request = NodeRequest { address: (*address).to_owned(), ..NodeRequest::default() };
            read(rest, &mut request.how, |option, _| match option {
                "DRY-RUN" if *verb == "DRAIN" => {
                    request.dry_run = true;
                    Ok(false)
                }
                _ => Err(format!("unknown option {option}")),
            })?;
            Ok(match *verb {
                "DRAIN" => Operation::DrainNode(request),
                "UNDRAIN" => Operation::UndrainNode(request),
                _ => Operation::RemoveNode(request),
            })
        }
        (["NODES", ..], _) => Err("wrong arguments: NODES, or NODES ADD|DRAIN|UNDRAIN|REMOVE address".to_owned()),
        (["PLAN"], _) => Ok(Operation::Plan(PlanRequest::default())),
        (["PLAN", "APPLY"], [_, _]) => Ok(Operation::Plan(PlanRequest { apply: true, ..PlanRequest::default() })),
        (["PLAN", "HISTORY"], [_, _]) => Ok(Operation::PlanHistory { named: false }),
        (["PLAN", "REPLAY"], [_, _, id]) => {
            let id = id.parse().map_err(|_| format!("{id:?} is not the number of a decision"))?;
            Ok(Operation::Replay { id, named: false })
        }
        (["PLAN", ..], _) => Err("wrong arguments: PLAN, PLAN APPLY, PLAN HISTORY, or PLAN REPLAY id".to_owned()),
        (["AUTOSCALE"], _) => Ok(Operation::Autoscale),
        (["AUTOSCALE", "PAUSE" | "RESUME"], [_, verb]) => {
            Ok(Operation::SteerAutoscale(AutoscaleRequest { verb: verb.to_ascii_lowercase(), nodes: None }))
        }
        (["AUTOSCALE", "SET-NODES"], [_, _, nodes]) => {
            let nodes = nodes.parse().map_err(|_| format!("{nodes:?} is not a number of nodes"))?;
            Ok(Operation::SteerAutoscale(AutoscaleRequest { verb: "set-nodes".to_owned(), nodes: Some(nodes) }))
        }
        (["AUTOSCALE", ..], _) => Err("wrong arguments: AUTOSCALE, AUTOSCALE SET-NODES number, AUTOSCALE PAUSE, or AUTOSCALE RESUME".to_owned()),
        (["AUTOMATION"], _) => Ok(Operation::Automation),
        (["AUTOMATION", "ON" | "OFF"], [_, verb]) => Ok(Operation::SteerAutomation(AutomationRequest { verb: verb.to_ascii_lowercase() })),
        (["AUTOMATION", ..], _) => Err("wrong arguments: AUTOMATION, AUTOMATION ON, or AUTOMATION OFF".to_owned()),
        (["RULES"], _) => Ok(Operation::Rules),
        (["RULES", "ADOPT"], [_, _, rest @ ..]) => {
            let (mut dry_run, mut how) = (false, MoveOptionsRequest::default());
            read(rest, &mut how, |option, _| match option {
                "DRY-RUN" => {
                    dry_run = true;
                    Ok(false)
                }
                _ => Err(format!("unknown option {option}")),
            })?;
            Ok(Operation::SteerRules(RulesOrder::Adopt { rules: None, dry_run, how }))
        }
        (["RULES", "PAUSE" | "RESUME"], [_, verb]) => {
            Ok(Operation::SteerRules(RulesOrder::Pause(verb.eq_ignore_ascii_case("PAUSE"))))
        }
        (["RULES", "ABANDON"], [_, _]) => Ok(Operation::SteerRules(RulesOrder::Abandon)),
        (["RULES", ..], _) => {
            Err("wrong arguments: RULES, RULES ADOPT [DRY-RUN], RULES PAUSE, RULES RESUME, or RULES ABANDON".to_owned())
        }
        (["BALANCE", ..], [_, rest @ ..]) => {
            let mut request = BalanceRequest::default();
            read(rest, &mut request.how, |option, value| match option {
                "DRY-RUN" => {
                    request.dry_run = true;
                    Ok(false)
                }
                "BY" => {
                    request.by = Some(value?.to_ascii_lowercase());
                    Ok(true)
                }
                _ => Err(format!("unknown option {option}")),
            })?;
            Ok(Operation::Balance(request))
        }
        _ => Err("unknown subcommand".to_owned()),
    }
}

fn number(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("{text:?} is not the number of a move"))
}

fn paper<'h>(how: &'h mut MoveOptionsRequest, what: &str) -> Result<&'h mut PaperRequest, String> {
    how.paper.as_deref_mut().ok_or_else(|| format!("{what} is a setting of MODE paper, which comes before it"))
}

fn count<N: std::str::FromStr>(what: &str, text: &str) -> Result<N, String> {
    text.parse().map_err(|_| format!("{what}: {text:?} is not a valid number"))
}

/// Parses options: options of moves itself, others through `own`, which returns whether it consumed the value.
fn read<'w>(
    words: &[&'w str],
    how: &mut MoveOptionsRequest,
    mut own: impl FnMut(&str, Result<&'w str, String>) -> Result<bool, String>,
) -> Result<(), String> {
    let mut at = 0;
    while let Some(word) = words.get(at) {
        let option = word.trim_start_matches('-').to_ascii_uppercase();
        let value = words.get(at + 1).copied().ok_or_else(|| format!("{option} needs a value"));
        let text = |value: &Result<&str, String>| value.clone().map(|value| Some(value.to_ascii_lowercase()));
        at += 2;
        match option.as_str() {
            "GOAL" => how.goal = text(&value)?,
            "DURABILITY" => how.durability = text(&value)?,
            "PROTOCOL" => how.protocol = text(&value)?,
            "MODE" | "TRACKER" | "GROUPS" | "BITS" | "COUNTING-BYTES" | "GROUPS-AT-ONCE" | "SOURCE-OPS-MAX"
            | "NO-FORWARDING" | "ALLOW-KEY-LOSS"
                if !cfg!(feature = "research") =>
            {
                return Err(NO_RESEARCH.to_owned());
            }
            "MODE" => match &*value?.to_ascii_lowercase() {
                "safe" => how.paper = None,
                "paper" => how.paper = Some(Box::default()),
                other => return Err(format!("there is no MODE {other:?}: safe or paper")),
            },
            "TRACKER" => paper(how, "TRACKER")?.tracker = text(&value)?,
            "GROUPS" => paper(how, "GROUPS")?.groups = Some(count("GROUPS", value?)?),
            "BITS" => paper(how, "BITS")?.bits = Some(count("BITS", value?)?),
            "COUNTING-BYTES" => paper(how, "COUNTING-BYTES")?.counting_bytes = Some(count("COUNTING-BYTES", value?)?),
            "GROUPS-AT-ONCE" => paper(how, "GROUPS-AT-ONCE")?.groups_at_once = Some(count("GROUPS-AT-ONCE", value?)?),
            "SOURCE-OPS-MAX" => paper(how, "SOURCE-OPS-MAX")?.source_ops_max = text(&value)?,
            "NO-FORWARDING" => {
                paper(how, "NO-FORWARDING")?.no_forwarding = true;
                at -= 1;
            }
            "MAX-RATE" => how.max_rate = Some(parse_rate(value?)?),
            "PURGE-TARGET" => {
                how.purge_target = true;
                at -= 1;
            }
            "ALLOW-KEY-LOSS" => {
                how.allow_key_loss = true;
                at -= 1;
            }
            "ALLOW-DIRECT-CLIENTS" => {
                how.allow_direct_clients = true;
                at -= 1;
            }
            other => {
                if !own(other, value)? {
                    at -= 1;
                }
            }
        }
    }
    Ok(())
}

/// Encodes JSON as RESP: objects as maps, fractions as text, as Redis does.
fn encode_json(value: &Value, resp3: bool, out: &mut Vec<u8>) {
    match value {
        Value::Null => encode::null(out, resp3),
        Value::Bool(flag) => encode::integer(out, i64::from(*flag)),
        Value::Number(number) => match number.as_i64() {
            Some(whole) => encode::integer(out, whole),
            None => encode::bulk(out, number.to_string().as_bytes()),
        },
        Value::String(text) => encode::bulk(out, text.as_bytes()),
        Value::Array(items) => {
            encode::header(out, b'*', items.len());
            items.iter().for_each(|item| encode_json(item, resp3, out));
        }
        Value::Object(fields) => {
            encode::map(out, fields.len(), resp3);
            for (name, value) in fields {
                encode::bulk(out, name.as_bytes());
                encode_json(value, resp3, out);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_need_operator_rights() {
        for (words, changes) in [
            (&["MOVES"][..], false),
            (&["BALANCE", "DRY-RUN"], false),
            (&["BALANCE"], true),
            (&["MOVE", "FROM", "a:1", "TO", "b:1", "ALL", "--dry-run"], false),
            // Here DRY-RUN is a node's name.
            (&["MOVE", "FROM", "DRY-RUN", "TO", "b:1", "ALL"], true),
            (&["MOVE", "FROM", "a:1", "TO", "DRY-RUN", "ALL"], true),
            (&["MOVES", "PAUSE", "1"], true),
            (&["MOVES", "RESUME", "1"], true),
            (&["MOVES", "ABORT", "1"], true),
            (&["MOVES", "ABORT", "1", "ABANDON-TARGET"], true),
            (&["MOVES", "ABORT", "1", "--abandon-target", "DRY-RUN"], false),
            (&["NODES", "UNDRAIN", "a:1"], true),
            (&["MOVES", "GOAL", "1", "fast"], true),
            (&["MOVES", "MAX-RATE", "1", "none"], true),
            (&["NODES", "ADD", "a:1"], true),
            (&["NODES", "DRAIN", "a:1"], true),
            (&["NODES", "REMOVE", "a:1"], true),
        ] {
            assert_eq!(
                parse(words).map(|operation| OperatorRequest::Operation(operation).changes()),
                Ok(changes),
                "{words:?}"
            );
        }
        assert!(OperatorRequest::Accept(&["a:1"]).changes());
    }

    #[test]
    fn hot_copies_are_steered_by_operators_and_names_are_bytes() {
        let asked = |words: &[&[u8]]| {
            let bytes: Vec<Vec<u8>> = words.iter().map(|word| word.to_vec()).collect();
            let texts: Vec<String> = words[1..].iter().map(|word| String::from_utf8_lossy(word).into_owned()).collect();
            match hot_copies(&texts.iter().map(String::as_str).collect::<Vec<_>>(), &bytes)? {
                asked @ OperatorRequest::Operation(_) => {
                    let changes = asked.changes();
                    let OperatorRequest::Operation(operation) = asked else { return Err("no operation".to_owned()) };
                    Ok((operation, changes))
                }
                OperatorRequest::Accept(_) => Err("no operation".to_owned()),
            }
        };
        assert_eq!(asked(&[b"HOTCOPIES"]), Ok((Operation::HotCopies, false)));
        for (words, order) in [
            (&[&b"cache"[..], b"off"][..], HotCopiesOrder::Suspend(true)),
            (&[b"HOTCOPIES", b"On"], HotCopiesOrder::Suspend(false)),
            (&[b"HOTCOPIES", b"EVICT", b"all"], HotCopiesOrder::EvictAll),
            (&[b"HOTCOPIES", b"evict", b"key", b"\xff"], HotCopiesOrder::EvictKey(b"\xff".to_vec())),
            // Here ALL is a key's name.
            (&[b"HOTCOPIES", b"EVICT", b"KEY", b"ALL"], HotCopiesOrder::EvictKey(b"ALL".to_vec())),
            (&[b"HOTCOPIES", b"EVICT", b"PREFIX", b"\xfe:"], HotCopiesOrder::EvictPrefix(b"\xfe:".to_vec())),
        ] {
            assert_eq!(asked(words), Ok((Operation::SteerHotCopies(order), true)), "{words:?}");
        }
        for words in [
            &[&b"HOTCOPIES"[..], b"NOW"][..],
            &[b"HOTCOPIES", b"OFF", b"ON"],
            &[b"HOTCOPIES", b"EVICT"],
            &[b"HOTCOPIES", b"EVICT", b"KEY"],
            &[b"HOTCOPIES", b"EVICT", b"KEY", b"a", b"b"],
            &[b"HOTCOPIES", b"EVICT", b"PREFIX"],
            &[b"HOTCOPIES", b"EVICT", b"ALL", b"KEY"],
        ] {
            assert!(asked(words).is_err_and(|why| why.starts_with("ERR wrong arguments")), "{words:?}");
        }
    }

    #[test]
    fn options_of_research_modes_need_a_build_that_has_them() {
        for words in [&["MOVE", "FROM", "a:1", "TO", "b:1", "ALLOW-KEY-LOSS"][..], &["BALANCE", "MODE", "paper"]] {
            let parsed = parse(words);
            if cfg!(feature = "research") {
                assert!(parsed.is_ok(), "{words:?}: {parsed:?}");
            } else {
                assert!(parsed.is_err_and(|why| why.contains("--features research")), "{words:?}");
            }
        }
    }

    #[test]
    fn arguments_are_the_same_as_on_the_command_line() {
        let words = "move --from a:1 TO b:1 slots 0-5 --goal Fast MAX-RATE 10mb --purge-target";
        let Ok(Operation::Move(request)) = parse(&words.split(' ').collect::<Vec<_>>()) else { panic!("a move") };
        assert_eq!((request.from.as_str(), request.to.as_str(), request.slots.as_deref()), ("a:1", "b:1", Some("0-5")));
        assert_eq!((request.how.goal.as_deref(), request.how.max_rate), (Some("fast"), Some(10 << 20)));
        assert!(request.how.purge_target && !request.all);
        let Ok(Operation::Move(request)) = parse(&["MOVE", "FROM", "a:1", "HOME", "KEYS", "user:*", "DRY-RUN"]) else {
            panic!("a move")
        };
        assert_eq!((request.keys.as_deref(), request.home, request.dry_run), (Some("user:*"), true, true));
        for (words, what) in [
            (&["MOVES", "pause", "7"][..], SteerRequest::Pause),
            (&["MOVES", "goal", "7", "Fast"], SteerRequest::Goal("fast".to_owned())),
            (
                &["MOVES", "abort", "7", "abandon-source"],
                SteerRequest::Abort(AbortRequest { abandon: Some(Abandon::Source), dry_run: false }),
            ),
            (&["MOVES", "max-rate", "7", "1kb"], SteerRequest::MaxRate(Some(1024))),
            (&["MOVES", "max-rate", "7", "None"], SteerRequest::MaxRate(None)),
        ] {
            assert_eq!(parse(words), Ok(Operation::Steer { id: 7, what }));
        }
        let parsed = parse(&["MOVES", "source-ops-max", "7", "Short"]);
        let what = SteerRequest::SourceOpsMax(Some("short".to_owned()));
        assert_eq!(parsed.ok(), cfg!(feature = "research").then_some(Operation::Steer { id: 7, what }));
        let added = AddNodeRequest { address: "c:1".into(), rebalance: true, ..AddNodeRequest::default() };
        assert_eq!(parse(&["NODES", "ADD", "c:1", "REBALANCE"]), Ok(Operation::AddNode(added)));
        let added = AddNodeRequest { address: "c:1".into(), allow_limits: true, ..AddNodeRequest::default() };
        assert_eq!(parse(&["NODES", "ADD", "c:1", "allow-limits"]), Ok(Operation::AddNode(added)));
        let balance = BalanceRequest { dry_run: true, ..BalanceRequest::default() };
        assert_eq!(parse(&["balance", "dry-run"]), Ok(Operation::Balance(balance)));
        for wrong in [
            &["MOVE"][..],
            &["MOVE", "FROM", "a:1"],
            &["MOVE", "FROM", "a:1", "TO"],
            &["MOVE", "FROM", "a:1", "TO", "b:1", "SIDEWAYS"],
            &["MOVES", "PAUSE"],
            &["MOVES", "PAUSE", "x"],
            &["MOVES", "GOAL", "7"],
            &["MOVES", "MAX-RATE", "7", "much"],
            // Ambiguous: bytes or megabytes.
            &["MOVES", "MAX-RATE", "7", "20"],
            &["BALANCE", "MAX-RATE", "20"],
            &["MOVES", "ABORT", "7", "ABANDON-ALL"],
            &["NODES", "ADD"],
            &["NODES", "EXPLODE", "a"],
            &["BALANCE", "MAX-RATE", "much"],
        ] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }
}
