//! Samples real commands with MONITOR, and counts the commands that the router would refuse.
//!
//! Values and key names are discarded: only counts, and patterns that many keys match, leave this module. MONITOR's lines are parsed like inline commands,
//! because servers write them in that syntax.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use switchyard_control::nodes::{NodeConnection, PROBE_NAME};
use switchyard_policy::together::{GROUP_KEYS_MAX, Groups, Proposal, propose};
use switchyard_policy::topology::{Placement, Slot};
use switchyard_resp::command::{Command, CommandTable, Lookup};
use switchyard_resp::request::{Args, Limits, Scanner, inline_to_multibulk};
use switchyard_router::NodeAccess;

use super::{Limit, OWN, REPLY_TIMEOUT, limit_of};
use crate::doctor::{Finding, Level};

/// Maximum number of bytes of MONITOR output per node. MONITOR is costly for the node, and a longer sample adds little.
const BYTES_MAX: usize = 256 << 20;

/// Longer lines are skipped: they contain large values.
const LINE_MAX: usize = 16 << 20;

/// Maximum number of keys whose load is counted separately.
const LOADS_MAX: usize = 65_536;

/// Maximum number of clients whose transactions are followed.
const CLIENTS_MAX: usize = 100_000;

/// Counts from one node.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sample {
    /// Commands of clients in the sample.
    pub(crate) commands: u64,
    /// Commands from routers, which have already rewritten them.
    pub(crate) routed: u64,
    /// The sample ended early: the node exceeded [`BYTES_MAX`] or closed the connection.
    pub(crate) cut_short: bool,
    /// Commands that the router would refuse, and `called`: all calls of each command.
    refused: BTreeMap<(Limit, String), u64>,
    called: BTreeMap<String, u64>,
    /// Keys used together that are in several slots.
    groups: Groups,
    loads: KeyLoads,
}

/// Number of uses of each key.
#[derive(Clone, Debug, Default)]
struct KeyLoads {
    by_key: BTreeMap<Box<[u8]>, u64>,
    others: u64,
}

impl KeyLoads {
    fn add(&mut self, key: &[u8], uses: u64) {
        let has_room = self.by_key.len() < LOADS_MAX;
        match self.by_key.get_mut(key) {
            Some(known) => *known += uses,
            None if has_room => drop(self.by_key.insert(key.into(), uses)),
            None => self.others += uses,
        }
    }

    fn weighed(&self) -> Vec<(&[u8], f64)> {
        let known = self.by_key.iter().map(|(key, uses)| (&**key, *uses as f64));
        known.chain([(&b""[..], self.others as f64)]).collect()
    }
}

impl Sample {
    fn meet(&mut self, limit: Limit, name: &str) {
        *self.refused.entry((limit, name.to_owned())).or_default() += 1;
    }

    /// Adds the counts of another node.
    pub(crate) fn add(&mut self, other: Sample) {
        self.commands += other.commands;
        self.routed += other.routed;
        self.cut_short |= other.cut_short;
        self.groups.append(other.groups);
        other.loads.by_key.iter().for_each(|(key, uses)| self.loads.add(key, *uses));
        self.loads.others += other.loads.others;
        for (what, count) in other.refused {
            *self.refused.entry(what).or_default() += count;
        }
        for (what, count) in other.called {
            *self.called.entry(what).or_default() += count;
        }
    }

    /// Returns proposed rules, and advice. The text of a pattern begins key names, so patterns are included only if many
    /// different keys match each one.
    fn proposed_rules(&self) -> Option<(String, &'static str)> {
        let Proposal { rules, proposed, groups, together_then, .. } =
            propose(&[], &self.groups, &self.loads.weighed(), &[], 2);
        if proposed == 0 {
            return None;
        }
        let start =
            format!("placement rules would keep {together_then} of {groups} sampled groups of keys in one slot");
        if !rules.iter().all(|rule| self.groups.has_many_keys_of(rule)) {
            return Some((start, "behind the router, `switchyard rules learn` shows them to operators"));
        }
        let patterns: Vec<&str> = rules.iter().flat_map(|rule| &rule.keys).map(String::as_str).collect();
        Some((
            format!("{start}: {}", patterns.join(" ")),
            "write them as [[placement.rule]] in the configuration (docs/any-keys.md), before the second node joins",
        ))
    }

    /// Returns the findings.
    pub(crate) fn judge(&self) -> Vec<Finding> {
        let tell = |level, found, advice: &str| Finding {
            level,
            node: None,
            check: "sample",
            found,
            advice: advice.to_owned(),
        };
        let mut findings: Vec<Finding> = self
            .refused
            .iter()
            .map(|((limit, name), count)| {
                let of = self.called.get(name).copied().unwrap_or(*count);
                let (what, advice) = match limit {
                    Limit::OneSlot => ("with keys of several slots", TAGS),
                    Limit::Transaction => ("with keys of several slots between MULTI (or WATCH) and EXEC", TAGS),
                    Limit::Blocking => ("waiting for keys of several slots", TAGS),
                    Limit::Script => {
                        ("with keys of several slots, or with keys that are not among those declared", DECLARE)
                    }
                    Limit::Refused(why) => ("which the router does not serve", *why),
                };
                tell(Level::Warning, format!("{count} of {of} calls of {} {what}", name.replace('|', " ")), advice)
            })
            .collect();
        if let Some((found, advice)) = self.proposed_rules() {
            findings.push(tell(Level::Note, found, advice));
        }
        if self.cut_short {
            findings.push(tell(
                Level::Note,
                "the sample ended early: a node exceeded the sample size, or closed the connection".to_owned(),
                "use a shorter sample",
            ));
        }
        let routed = if self.routed > 0 {
            format!("; {} more came through a router, which has already adapted them", self.routed)
        } else {
            String::new()
        };
        let clean = if self.refused.is_empty() { ", and none would be refused" } else { "" };
        findings.push(tell(
            Level::Note,
            format!("{} commands of clients were sampled{clean}{routed}", self.commands),
            "repeat this while the application does its rare tasks",
        ));
        findings
    }
}

const TAGS: &str = "the router moves these keys to one node at their first use: a common hash tag ({user:7}:cart, {user:7}:name) keeps them together from the start";
const DECLARE: &str = "the router answers CROSSSLOT, or stops the script: pass every key in KEYS, and give keys of one call a common hash tag";

/// Samples the commands of a node for `time`.
pub(crate) fn sample(access: &NodeAccess, placement: &Placement, time: Duration) -> Result<Sample, String> {
    let mut node = NodeConnection::open(access, REPLY_TIMEOUT)?;
    // Routers that connect later are recognized by their CLIENT SETNAME in the sample.
    let mut other = NodeConnection::open(access, REPLY_TIMEOUT)?;
    let _ = other.call(&["CLIENT", "SETNAME", PROBE_NAME]);
    let routers = routers(&mut other);
    let mut tally = Tally { placement: placement.clone(), ..Tally::default() };
    let until = Instant::now() + time;
    let whole = node.monitor(until, BYTES_MAX, LINE_MAX, &mut |line| tally.take(line))?;
    Ok(tally.finish(&routers, !whole))
}

/// Returns the addresses of routers' connections.
fn routers(node: &mut NodeConnection) -> BTreeSet<String> {
    let Ok(list) = node.call(&["CLIENT", "LIST"]) else { return BTreeSet::new() };
    let field = |line: &str, name: &str| {
        line.split(' ').find_map(|word| word.strip_prefix(name).map(str::to_owned)).unwrap_or_default()
    };
    list.text().lines().filter(|line| field(line, "name=").starts_with(OWN)).map(|line| field(line, "addr=")).collect()
}

/// State of one client.
#[derive(Debug, Default)]
struct ClientSample {
    sample: Sample,
    /// Slots of watched keys and of the keys of its transaction.
    slots: BTreeSet<Slot>,
    /// Some of these keys.
    keys: Vec<Vec<u8>>,
    in_multi: bool,
    /// The connection's name is that of a router.
    is_router: bool,
}

/// Parser state for MONITOR's lines.
#[derive(Debug)]
struct Tally {
    table: Arc<CommandTable>,
    placement: Placement,
    clients: BTreeMap<String, ClientSample>,
    loads: KeyLoads,
    /// Last script with its declared keys. The commands that a script calls follow its own line directly.
    script: Option<Script>,
}

#[derive(Debug)]
struct Script {
    client: String,
    name: String,
    declared: BTreeSet<Vec<u8>>,
    is_refused: bool,
}

impl Default for Tally {
    fn default() -> Self {
        Self {
            table: Arc::new(CommandTable::builtin()),
            placement: Placement::Crc16,
            clients: BTreeMap::new(),
            loads: KeyLoads::default(),
            script: None,
        }
    }
}

/// Parses `1339518083.107412 [0 127.0.0.1:60866] "keys" "*"`: returns the client and the command.
fn parts(line: &[u8]) -> Option<(&str, &[u8])> {
    let open = line.iter().position(|byte| *byte == b'[')?;
    let close = open + line[open..].iter().position(|byte| *byte == b']')?;
    // An IPv6 address has brackets of its own.
    let close = if line.get(close + 1) == Some(&b':') {
        close + 1 + line[close + 1..].iter().position(|byte| *byte == b']')?
    } else {
        close
    };
    let inside = std::str::from_utf8(&line[open + 1..close]).ok()?;
    let (_, who) = inside.split_once(' ')?;
    Some((who, line.get(close + 1..)?))
}

impl Tally {
    fn take(&mut self, line: &[u8]) {
        let Some((who, rest)) = parts(line) else { return };
        let who = who.to_owned();
        let mut request = Vec::with_capacity(rest.len() + 64);
        let rest: &[u8] = rest.strip_prefix(b" ").unwrap_or(rest);
        let mut scanner = Scanner::default();
        if inline_to_multibulk(rest, &mut request).is_err() || scanner.scan(&request, &Limits::NONE).is_err() {
            return;
        }
        let args = scanner.args(&request);
        let table = Arc::clone(&self.table);
        if let Lookup::Command(command) = table.find(&args) {
            if who == "lua" { self.called_by_script(command, &args) } else { self.called(who, command, &args) }
        }
    }

    fn called(&mut self, who: String, command: &Command, args: &Args<'_>) {
        self.script = None;
        if self.clients.len() >= CLIENTS_MAX && !self.clients.contains_key(&who) {
            return;
        }
        let keys = keys(command, args);
        keys.iter().for_each(|key| self.loads.add(key, 1));
        let slots: BTreeSet<Slot> = keys.iter().map(|key| self.placement.slot_of(key)).collect();
        let seen = self.clients.entry(who.clone()).or_default();
        if seen.in_multi || &*command.name == "WATCH" {
            let room = GROUP_KEYS_MAX.saturating_sub(seen.keys.len());
            seen.keys.extend(keys.iter().take(room).map(|key| key.to_vec()));
        }
        seen.is_router |=
            &*command.name == "CLIENT|SETNAME" && args.get(2).is_some_and(|name| name.starts_with(OWN.as_bytes()));
        seen.sample.commands += 1;
        let limit = match limit_of(command) {
            Some(Limit::Blocking) if !command.blocks(args) => Some(Limit::OneSlot),
            limit => limit,
        };
        if limit.is_some() {
            *seen.sample.called.entry(command.name.to_string()).or_default() += 1;
        }
        match (&*command.name, limit) {
            ("MULTI", _) => seen.in_multi = true,
            ("WATCH", _) => seen.slots.extend(slots),
            ("EXEC", _) => {
                if seen.slots.len() > 1 {
                    seen.sample.meet(Limit::Transaction, "EXEC");
                    seen.sample.groups.note(seen.keys.iter().map(Vec::as_slice));
                }
                seen.end_transaction();
            }
            ("DISCARD", _) => seen.end_transaction(),
            ("UNWATCH", _) if !seen.in_multi => seen.end_transaction(),
            (name, Some(limit @ Limit::Refused(_))) => seen.sample.meet(limit, name),
            (name, Some(Limit::Script)) => {
                let is_refused = slots.len() > 1;
                if is_refused {
                    seen.sample.meet(Limit::Script, name);
                    seen.sample.groups.note(keys.iter().copied());
                }
                if seen.in_multi {
                    seen.slots.extend(slots);
                }
                let declared = keys.into_iter().map(<[u8]>::to_vec).collect();
                self.script = Some(Script { client: who, name: name.to_owned(), declared, is_refused });
            }
            // Counted once, at EXEC.
            _ if seen.in_multi => seen.slots.extend(slots),
            (name, Some(limit)) if slots.len() > 1 => {
                seen.sample.meet(limit, name);
                seen.sample.groups.note(keys.iter().copied());
            }
            _ => {}
        }
    }

    fn called_by_script(&mut self, command: &Command, args: &Args<'_>) {
        let Some(script) = self.script.as_mut() else { return };
        let used = keys(command, args);
        if used.iter().all(|key| script.declared.contains(*key)) {
            return;
        }
        if let Some(seen) = self.clients.get_mut(&script.client) {
            if !script.is_refused {
                seen.sample.meet(Limit::Script, &script.name);
            }
            // A script that touches keys in the slot of a declared one needs no rule.
            let all: Vec<&[u8]> = script.declared.iter().map(Vec::as_slice).chain(used).collect();
            let slots: BTreeSet<Slot> = all.iter().map(|key| self.placement.slot_of(key)).collect();
            if slots.len() > 1 {
                seen.sample.groups.note(all);
            }
        }
        script.is_refused = true;
    }

    fn finish(self, routers: &BTreeSet<String>, cut_short: bool) -> Sample {
        let mut whole = Sample { cut_short, loads: self.loads, ..Sample::default() };
        for (who, seen) in self.clients {
            if seen.is_router || routers.contains(&who) {
                whole.routed += seen.sample.commands;
            } else {
                whole.add(seen.sample);
            }
        }
        whole
    }
}

impl ClientSample {
    fn end_transaction(&mut self) {
        self.slots.clear();
        self.keys.clear();
        self.in_multi = false;
    }
}

/// Keys of a call. Empty if they cannot be determined.
fn keys<'a>(command: &Command, args: &Args<'a>) -> Vec<&'a [u8]> {
    let mut places = Vec::new();
    match command.find_keys(args, &mut places) {
        Ok(()) => places.iter().filter_map(|place| args.get(*place as usize)).collect(),
        Err(_) => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(lines: &[&str]) -> Vec<(String, u64)> {
        let mut tally = Tally::default();
        for line in lines {
            tally.take(format!("1339518083.107412 {line}").as_bytes());
        }
        let sample = tally.finish(&BTreeSet::from(["10.0.0.9:1".to_owned()]), false);
        sample.refused.into_iter().map(|((_, name), count)| (name, count)).collect()
    }

    #[test]
    fn commands_that_the_router_would_refuse_are_counted() {
        let one = |name: &str| vec![(name.to_owned(), 1)];
        for (lines, expected) in [
            (&[r#"[0 10.0.0.1:5] "rename" "a" "b""#][..], one("RENAME")),
            (&[r#"[0 10.0.0.1:5] "rename" "{x}a" "{x}b""#], vec![]),
            (&[r#"[0 10.0.0.1:5] "MSETNX" "a" "1" "b" "2""#], one("MSETNX")),
            (&[r#"[0 10.0.0.1:5] "mset" "a" "1" "b" "2""#], vec![]),
            (&[r#"[0 10.0.0.1:5] "sunionstore" "a" "b" "c""#], vec![]),
            (&[r#"[3 unix:/tmp/x.sock] "blpop" "a" "b" "0""#], one("BLPOP")),
            (&[r#"[3 [::1]:700] "xread" "STREAMS" "a" "b" "0" "0""#], one("XREAD")),
            (&[r#"[0 10.0.0.1:5] "swapdb" "0" "1""#], one("SWAPDB")),
            (&[r#"[0 10.0.0.9:1] "rename" "a" "b""#], vec![]),
            (
                &[
                    r#"[0 10.0.0.8:1] "client" "setname" "switchyard-0a1b2c3d-1-2-m""#,
                    r#"[0 10.0.0.8:1] "rename" "a" "b""#,
                ],
                vec![],
            ),
            (
                &[
                    r#"[0 10.0.0.1:5] "set" "a" "x\"y\xff\n \"""#,
                    r#"[0 10.0.0.1:5] "get""#,
                    "OK",
                    "[",
                    "[0 x] \"set\" \"a",
                ],
                vec![],
            ),
        ] {
            assert_eq!(refused(lines), expected, "{lines:?}");
        }
    }

    #[test]
    fn transactions_and_scripts_are_followed_by_client() {
        let lines = [
            r#"[0 10.0.0.1:5] "multi""#,
            r#"[0 10.0.0.2:5] "set" "b" "1""#,
            r#"[0 10.0.0.1:5] "set" "a" "1""#,
            r#"[0 10.0.0.1:5] "mget" "a" "b""#,
            r#"[0 10.0.0.1:5] "exec""#,
            r#"[0 10.0.0.2:5] "watch" "a""#,
            r#"[0 10.0.0.2:5] "multi""#,
            r#"[0 10.0.0.2:5] "get" "a""#,
            r#"[0 10.0.0.2:5] "exec""#,
        ];
        assert_eq!(refused(&lines), [("EXEC".to_owned(), 1)]);
        let script = |declared: &str, called: &str| {
            refused(&[
                &format!(r#"[0 10.0.0.1:5] "eval" "return 1" {declared}"#),
                &format!("[0 lua] {called}"),
                &format!("[0 lua] {called}"),
                r#"[0 10.0.0.1:5] "get" "x""#,
                r#"[0 lua] "get" "nobody""#,
            ])
        };
        assert_eq!(script(r#""1" "a""#, r#""set" "a" "1""#), []);
        assert_eq!(script(r#""1" "a""#, r#""set" "b" "1""#), [("EVAL".to_owned(), 1)]);
        assert_eq!(script(r#""0""#, r#""set" "b" "1""#), [("EVAL".to_owned(), 1)]);
        assert_eq!(script(r#""2" "a" "b""#, r#""get" "a""#), [("EVAL".to_owned(), 1)]);
    }

    #[test]
    fn patterns_of_proposed_rules_are_shown_if_many_keys_match() {
        let proposed = |count: usize| {
            let mut tally = Tally::default();
            for i in 0..count {
                tally.take(format!(r#"1.0 [0 10.0.0.1:5] "rename" "job:{i}:a" "job:{i}:b""#).as_bytes());
            }
            let found = tally.finish(&BTreeSet::new(), false).judge();
            found.into_iter().map(|f| f.found).find(|found| found.contains("rules")).expect("a proposal")
        };
        let start = |count| format!("placement rules would keep {count} of {count} sampled groups of keys in one slot");
        assert_eq!(proposed(4), start(4) + ": job:{name}:*");
    }

    #[test]
    fn findings_have_counts_but_no_key_names() {
        let mut tally = Tally::default();
        for line in
            [r#"1.0 [0 10.0.0.1:5] "rename" "secret-a" "secret-b""#, r#"1.0 [0 10.0.0.1:5] "rename" "{s}a" "{s}b""#]
        {
            tally.take(line.as_bytes());
        }
        let found = tally.finish(&BTreeSet::new(), false).judge();
        assert_eq!(found[0].found, "1 of 2 calls of RENAME with keys of several slots");
        assert!(found.iter().all(|f| !f.found.contains("secret")), "{found:?}");
        assert!(
            found
                .last()
                .is_some_and(|f| f.found.starts_with("2 commands of clients were sampled") && f.level == Level::Note)
        );
        let clean = Sample { commands: 3, ..Sample::default() }.judge();
        assert!(clean.len() == 1 && clean[0].found.ends_with("none would be refused"), "{clean:?}");
    }
}
