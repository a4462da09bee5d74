//! Commands that read several keys and write at most one, with keys in several slots, or in one slot with placement
//! overrides.
//!
//! Foreign keys are read (DUMP) and stored next to the others under temporary names, in one MULTI/EXEC with the command
//! and the removal of these names. So the destination changes atomically or not at all, and clients see no temporary
//! key. Each source is read at a separate moment between the command and its reply, as for MGET over several nodes.
//!
//! For commands that change several keys (RENAME, SMOVE, LMOVE, MSETNX) the keys are brought to one node
//! ([`super::colocate`]): two nodes cannot change atomically, and half of such a command loses or duplicates a value. With
//! `clients.cross-slot-max = 0` this applies to all.
//!
//! The router does not compute results itself, because the code of the nodes knows all options, encodings and errors.

use std::sync::atomic::{AtomicU64, Ordering};

use switchyard_policy::topology::NodeId;
use switchyard_resp::command::{Command, Flags, is_option};
use switchyard_resp::request::Args;
use switchyard_resp::{encode, reply};

use super::colocate::bring_together;
use super::downstreams::Downstreams;
use super::flow::Flow;
use super::gather::Gathers;
use super::invocation::Invocation;
use super::keyed::CommandHooks;
use super::multi_step::{MultiStepCommand, Next, StepRequest};
use super::turn::Turn;
use super::upstreams::Upstreams;
use super::upstreams::pending::MULTI;
use super::wait::state::Since;
use crate::lane::Lane;

/// Access of a command to its keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// Reads all keys.
    Read,
    /// Writes the key in this argument, and reads the others.
    Store(usize),
    /// Reads the first key and overwrites the second.
    Copy,
    /// Removes elements from the first key that has some.
    Pop,
}

fn kind_of(command: &Command, keys: &[u32]) -> Option<Kind> {
    Some(match &*command.name {
        "LCS" | "PFCOUNT" | "SDIFF" | "SINTER" | "SINTERCARD" | "SUNION" | "ZDIFF" | "ZINTER" | "ZINTERCARD"
        | "ZUNION" => Kind::Read,
        "GEOSEARCHSTORE" | "PFMERGE" | "SDIFFSTORE" | "SINTERSTORE" | "SUNIONSTORE" | "ZDIFFSTORE" | "ZINTERSTORE"
        | "ZRANGESTORE" | "ZUNIONSTORE" => Kind::Store(1),
        "BITOP" => Kind::Store(2),
        "GEORADIUS" | "GEORADIUSBYMEMBER" | "SORT" => Kind::Store(*keys.last()? as usize),
        "COPY" => Kind::Copy,
        "LMPOP" | "ZMPOP" => Kind::Pop,
        _ => return None,
    })
}

/// Whether SORT reads keys that depend on data.
fn uses_pattern(args: &Args<'_>) -> bool {
    (2..args.len()).any(|at| {
        let is = |word| args.get(at).is_some_and(|arg| is_option(arg, word));
        (is(b"by") || is(b"get")) && args.get(at + 1).is_some_and(|pattern| pattern.contains(&b'*'))
    })
}

/// Whether a command with keys in several slots is supported, by collecting values at one node.
#[must_use]
pub fn spans_slots(command: &Command) -> bool {
    kind_of(command, &[1]).is_some()
}

fn request<A: AsRef<[u8]>>(args: &[A]) -> Vec<u8> {
    let mut out = Vec::new();
    encode::command(&mut out, args.iter().map(AsRef::as_ref));
    out
}

fn error(text: &str) -> Next {
    let mut out = Vec::new();
    encode::error(&mut out, text);
    Next::Done(out)
}

/// Returns the error text of a node that cannot read the payload of a RESTORE.
fn unreadable(refused: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(reply::text(refused).filter(|_| reply::is_error(refused))?).into_owned();
    ["Bad data format", "DUMP payload version or checksum are wrong"]
        .iter()
        .any(|known| text.contains(known))
        .then_some(text)
}

/// Returns an error with the names and versions of the node with the value and of the node that cannot read it.
fn unreadable_text(error: &str, source: &(String, String), target: &(String, String)) -> String {
    format!(
        "{error} (node {} is {} and cannot read a value of node {}, which is {}: run the same version at both, or keep these keys in one slot)",
        target.0, target.1, source.0, source.1
    )
}

/// A key at another node than the executing one.
#[derive(Debug)]
struct Foreign {
    /// Index of the argument.
    index: usize,
    node: NodeId,
    temporary: Vec<u8>,
    /// DUMP payload, once read. `None`: the key does not exist.
    payload: Option<Vec<u8>>,
    /// TTL in milliseconds. 0: none. Only read for COPY.
    ttl: i64,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    /// Reading the sizes.
    Sizing,
    Reading,
    /// Testing the restores. Only if versions differ: another version may refuse a payload, and in a MULTI the command
    /// would still be executed, without this key.
    Trying,
    Executing,
}

#[derive(Debug)]
struct Assemble {
    kind: Kind,
    args: Vec<Vec<u8>>,
    target: NodeId,
    foreign: Vec<Foreign>,
    phase: Phase,
    try_first: bool,
    bytes_max: usize,
}

impl Assemble {
    fn size(&self) -> Vec<StepRequest> {
        let ask = |f: &Foreign| StepRequest {
            node: f.node,
            lane: Lane::Slow,
            requests: vec![request::<&[u8]>(&[b"MEMORY", b"USAGE", self.args[f.index].as_slice()])],
        };
        self.foreign.iter().map(ask).collect()
    }

    fn read(&self) -> Vec<StepRequest> {
        let ask = |f: &Foreign| {
            let key = self.args[f.index].as_slice();
            let requests = match self.kind {
                Kind::Copy => {
                    vec![
                        MULTI.to_vec(),
                        request::<&[u8]>(&[b"PTTL", key]),
                        request::<&[u8]>(&[b"DUMP", key]),
                        request::<&[u8]>(&[b"EXEC"]),
                    ]
                }
                _ => vec![request::<&[u8]>(&[b"DUMP", key])],
            };
            StepRequest { node: f.node, lane: Lane::Slow, requests }
        };
        self.foreign.iter().map(ask).collect()
    }

    fn take_payloads(&mut self, parts: &[Vec<u8>]) {
        for (foreign, part) in self.foreign.iter_mut().zip(parts) {
            let mut dump = part.as_slice();
            if self.kind == Kind::Copy {
                let mut pair = reply::elements(part);
                foreign.ttl =
                    pair.next().and_then(reply::integer).map_or(0, |ttl| if ttl < 0 { 0 } else { ttl.max(1) });
                dump = pair.next().unwrap_or_default();
            }
            foreign.payload = if reply::is_null(dump) { None } else { reply::text(dump).map(<[u8]>::to_vec) };
        }
    }

    /// Returns one transaction: restores of the existing values, the command, and the removal of the temporary keys.
    /// For a test only restores and removal.
    fn block(&self, execute: bool) -> Vec<StepRequest> {
        let mut requests = vec![MULTI.to_vec()];
        let mut remove: Vec<&[u8]> = vec![b"UNLINK"];
        for foreign in &self.foreign {
            if let Some(payload) = &foreign.payload {
                requests.push(request::<&[u8]>(&[b"RESTORE", foreign.temporary.as_slice(), b"0", payload]));
                remove.push(&foreign.temporary);
            }
        }
        if execute {
            let mut args = self.args.clone();
            for foreign in &self.foreign {
                args[foreign.index].clone_from(&foreign.temporary);
            }
            requests.push(request(&args));
        }
        if remove.len() > 1 {
            requests.push(request(&remove));
        }
        requests.push(request::<&[u8]>(&[b"EXEC"]));
        vec![StepRequest { node: self.target, lane: Lane::Slow, requests }]
    }

    /// COPY needs no temporary key: the value is restored at its destination.
    fn copy(&self) -> Option<Vec<StepRequest>> {
        let source = self.foreign.first()?;
        let ttl = source.ttl.to_string();
        let mut args: Vec<&[u8]> = vec![b"RESTORE", &self.args[2], ttl.as_bytes(), source.payload.as_deref()?];
        if self.args.iter().skip(3).any(|a| is_option(a, b"REPLACE")) {
            args.push(b"REPLACE");
        }
        Some(vec![StepRequest { node: self.target, lane: Lane::Slow, requests: vec![request(&args)] }])
    }

    fn execute(&mut self) -> Next {
        self.phase = Phase::Executing;
        if self.kind == Kind::Copy {
            return self.copy().map_or_else(|| Next::Done(b":0\r\n".to_vec()), Next::Round);
        }
        Next::Round(self.block(true))
    }

    fn restored(&self) -> usize {
        self.foreign.iter().filter(|f| f.payload.is_some()).count()
    }

    /// Returns the target's error for the value restored at this place. Includes both nodes and versions if the target
    /// cannot read the value.
    fn refused(&self, turn: &Turn, place: usize, refused: &[u8]) -> Vec<u8> {
        let source =
            self.foreign.iter().filter(|foreign| foreign.payload.is_some()).nth(place).map(|foreign| foreign.node);
        let Some((source, text)) = source.zip(unreadable(refused)) else { return refused.to_vec() };
        let [source, target] = [source, self.target].map(|node| {
            let (flavour, version) = turn.shared().with_facts(node, |facts| (facts.flavour, facts.version.clone()));
            (turn.node_name(node), format!("{flavour} {version}"))
        });
        let mut out = Vec::new();
        encode::error(&mut out, &unreadable_text(&text, &source, &target));
        out
    }

    fn finish(&self, turn: &Turn, answer: Vec<u8>) -> Next {
        if self.kind == Kind::Copy {
            return Next::Done(match answer.as_slice() {
                b"+OK\r\n" => b":1\r\n".to_vec(),
                busy if busy.starts_with(b"-BUSYKEY") => b":0\r\n".to_vec(),
                _ => self.refused(turn, 0, &answer),
            });
        }
        if answer.starts_with(b"-ERR EXEC without MULTI") {
            return error(
                "ERR the node refused MULTI: the commands were executed one by one. Allow MULTI to Switchyard's user there",
            );
        }
        if reply::is_error(&answer) {
            return Next::Done(answer);
        }
        let mut results = reply::elements(&answer);
        for place in 0..self.restored() {
            if let Some(refused) = results.next().filter(|r| reply::is_error(r)) {
                return Next::Done(self.refused(turn, place, refused));
            }
        }
        match results.next() {
            Some(result) => Next::Done(result.to_vec()),
            None => error("ERR switchyard: a node answered EXEC with fewer replies than commands"),
        }
    }
}

impl MultiStepCommand for Assemble {
    fn next(&mut self, turn: &Turn, _: &Upstreams, _: bool, mut parts: Vec<Vec<u8>>) -> Next {
        if !matches!(self.phase, Phase::Executing)
            && let Some(refused) = parts.iter().find(|p| reply::is_error(p))
        {
            return Next::Done(refused.clone());
        }
        match self.phase {
            Phase::Sizing => {
                let bytes: i64 = parts.iter().filter_map(|p| reply::integer(p)).sum();
                if usize::try_from(bytes).is_ok_and(|bytes| bytes > self.bytes_max) {
                    return error(&format!(
                        "CROSSSLOT Keys in request don't hash to the same slot, and {bytes} bytes would have to be moved to one node (cross-slot-max is {})",
                        self.bytes_max
                    ));
                }
                self.phase = Phase::Reading;
                Next::Round(self.read())
            }
            Phase::Reading => {
                self.take_payloads(&parts);
                if self.try_first && self.kind != Kind::Copy && self.restored() > 0 {
                    self.phase = Phase::Trying;
                    return Next::Round(self.block(false));
                }
                self.execute()
            }
            Phase::Trying => {
                match parts.iter().flat_map(|p| reply::elements(p)).enumerate().find(|(_, r)| reply::is_error(r)) {
                    Some((place, refused)) => Next::Done(self.refused(turn, place, refused)),
                    None => self.execute(),
                }
            }
            Phase::Executing => self.finish(turn, parts.pop().unwrap_or_default()),
        }
    }
}

/// LMPOP and ZMPOP: tries one key at a time until one has elements.
#[derive(Debug)]
struct Pop {
    lane: Lane,
    name: Vec<u8>,
    /// Remaining keys with their nodes, the next one last.
    left: Vec<(Vec<u8>, NodeId)>,
    options: Vec<Vec<u8>>,
}

impl Pop {
    fn next_request(&mut self) -> Option<StepRequest> {
        let (key, node) = self.left.pop()?;
        let mut args: Vec<&[u8]> = vec![&self.name, b"1", &key];
        args.extend(self.options.iter().map(Vec::as_slice));
        Some(StepRequest { node, lane: self.lane, requests: vec![request(&args)] })
    }
}

impl MultiStepCommand for Pop {
    fn next(&mut self, _: &Turn, _: &Upstreams, _: bool, mut parts: Vec<Vec<u8>>) -> Next {
        let answer = parts.pop().unwrap_or_default();
        match self.next_request().filter(|_| reply::is_null(&answer)) {
            Some(ask) => Next::Round(vec![ask]),
            None => Next::Done(answer),
        }
    }
}

/// Counter for names of temporary keys of this process.
static TEMPORARY: AtomicU64 = AtomicU64::new(0);

impl Gathers {
    /// Executes a command with the keys at `self.keys`, which are in several slots or at several nodes.
    #[cold]
    pub(super) fn cross_slot(
        &mut self,
        turn: &Turn,
        down: &mut Downstreams,
        hooks: &mut CommandHooks,
        call: &Invocation<'_>,
    ) -> Result<Flow, NodeId> {
        let Invocation { routing, handle, command, args, .. } = *call;
        let class = command.class() as u8;
        let bytes_max = routing.live.cross_slot_max;
        let keys = hooks.keys.clone();
        let owner = |index: usize| routing.topology.lives_at(args.get(index).unwrap_or_default());
        let first = owner(keys.first().map_or(0, |k| *k as usize));
        let kind = kind_of(command, &keys).filter(|_| bytes_max > 0);
        let between_databases = || kind == Some(Kind::Copy) && args.iter().skip(3).any(|a| is_option(a, b"DB"));
        let Some(kind) = kind.filter(|_| !between_databases()) else {
            return bring_together(turn, down, hooks, call, &keys).ok_or(first);
        };
        if keys.iter().all(|k| owner(*k as usize) == first) {
            return Err(first);
        }
        if kind == Kind::Copy && args.iter().skip(3).any(|option| !is_option(option, b"REPLACE")) {
            // The node will reply with an error and copy nothing.
            return Err(first);
        }
        if &*command.name == "SORT" && uses_pattern(args) {
            // The keys of the pattern are with the source, and the command is executed at the destination.
            return bring_together(turn, down, hooks, call, &keys).ok_or(first);
        }
        let args: Vec<Vec<u8>> = args.iter().map(<[u8]>::to_vec).collect();
        if let Some(client) = down.get_mut(handle).filter(|_| kind != Kind::Read) {
            // For WAIT: any of the nodes may be the destination.
            let since = Since::now(turn.shared(), turn.routing());
            keys.iter().for_each(|k| client.note_written(routing.topology.lives_at(&args[*k as usize]), since));
        }
        if kind == Kind::Pop {
            let lane = if command.flags.has(Flags::SLOW) { Lane::Slow } else { Lane::Main };
            let after = keys.last().map_or(0, |k| *k as usize) + 1;
            let left = keys
                .iter()
                .rev()
                .map(|k| (args[*k as usize].clone(), routing.topology.lives_at(&args[*k as usize])))
                .collect();
            let mut pop = Pop { lane, name: args[0].clone(), left, options: args[after..].to_vec() };
            let Some(ask) = pop.next_request() else { return Ok(Flow::Close) };
            return Ok(self.begin_alone(turn, down, handle, class, Box::new(pop), vec![ask]));
        }
        let target = match kind {
            Kind::Store(destination) => routing.topology.lives_at(&args[destination]),
            Kind::Copy => routing.topology.lives_at(&args[2]),
            _ => first,
        };
        let version = |node: NodeId| turn.shared().with_facts(node, |f| (f.flavour, f.version.clone()));
        let mut try_first = false;
        let mut foreign = Vec::new();
        for index in keys.iter().map(|k| *k as usize) {
            let node = routing.topology.lives_at(&args[index]);
            if node != target {
                try_first |= version(node) != version(target);
                let number = TEMPORARY.fetch_add(1, Ordering::Relaxed);
                let temporary = format!("switchyard:temporary:{}:{number}", turn.shared().incarnation).into_bytes();
                foreign.push(Foreign { index, node, temporary, payload: None, ttl: 0 });
            }
        }
        let assemble = Assemble { kind, args, target, foreign, phase: Phase::Sizing, try_first, bytes_max };
        let first = assemble.size();
        Ok(self.begin_alone(turn, down, handle, class, Box::new(assemble), first))
    }
}

#[cfg(test)]
mod tests {
    use switchyard_resp::command::CommandTable;

    use super::*;

    #[test]
    fn a_value_that_a_node_cannot_read_names_both_nodes_and_versions() {
        let [source, target] =
            [("a", "redis 7.2.4"), ("b", "redis 6.2.7")].map(|(name, version)| (name.to_owned(), version.to_owned()));
        for error in ["ERR Bad data format", "ERR DUMP payload version or checksum are wrong"] {
            let refused = format!("-{error}\r\n");
            let text = unreadable(refused.as_bytes()).expect("a refused payload");
            assert_eq!(
                unreadable_text(&text, &source, &target),
                format!(
                    "{error} (node b is redis 6.2.7 and cannot read a value of node a, which is redis 7.2.4: run the same version at both, or keep these keys in one slot)"
                )
            );
        }
        for other in [
            "-OOM command not allowed\r\n",
            "-BUSYKEY Target key name already exists.\r\n",
            "$15\r\nBad data format\r\n",
        ] {
            assert_eq!(unreadable(other.as_bytes()), None, "{other}");
        }
    }

    #[test]
    fn only_commands_that_write_one_key_at_most_are_assembled() {
        let table = CommandTable::builtin();
        let kind = |name: &str| kind_of(table.by_name(name).expect("a command"), &[1, 2]);
        assert_eq!(kind("SUNION"), Some(Kind::Read));
        assert_eq!(kind("BITOP"), Some(Kind::Store(2)));
        for name in ["RENAME", "RENAMENX", "SMOVE", "LMOVE", "RPOPLPUSH", "MSETNX", "EVAL", "FCALL", "XREADGROUP"] {
            assert_eq!(kind(name), None, "{name}");
        }
    }
}
