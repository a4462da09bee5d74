//! Scripts and functions: the same at every node, and kept to their keys.
//!
//! The router remembers the scripts that pass through it, because no server tells its own. So EVALSHA works at every node, also at one
//! that has just joined or restarted. What a script may touch is judged once per script and worker ([`crate::lua`]); one that must be
//! checked while it runs is executed as another script, with a prelude and a hash of its own, which clients never see.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use sha1::{Digest, Sha1};
use switchyard_policy::topology::NodeId;
use switchyard_resp::command::{Command, CommandTable, Merge};
use switchyard_resp::request::{Args, Limits, Scanner};
use switchyard_resp::{encode, reply};

use super::Worker;
use super::dispatch::Flow;
use super::gather::Whole;
use super::rounds::{Ask, Next, Procedure};
use super::upstream::{Lane, Pending, Purpose};
use crate::lua::{Verdict, is_wrapped_library, judge, unwrapped_library, wrapped_library, wrapped_script};
use crate::shared::{Plan, lock};
use crate::slab::Handle;

/// Scripts that a worker remembers its judgement of.
const JUDGED_MAX: usize = 10_000;

const NOSCRIPT: &str = "NOSCRIPT No matching script. Please use EVAL.";

/// What was found out about a script.
#[derive(Clone, Debug)]
pub(super) struct Judged {
    body: Arc<[u8]>,
    verdict: Verdict,
    /// Where it is wrapped: the text and the hash that nodes know.
    wrapped: Arc<[u8]>,
    wrapped_sha: [u8; 40],
}

/// The scripts that a worker has met.
#[derive(Debug, Default)]
pub(super) struct ScriptsMet {
    /// By a quick hash of the text: SHA-1 costs more than forwarding.
    by_text: HashMap<u64, Judged>,
    by_sha: HashMap<[u8; 40], u64>,
    /// The hash that clients know, by that of the wrapped script.
    own: HashMap<[u8; 40], [u8; 40]>,
}

fn sha_of(body: &[u8]) -> [u8; 40] {
    let mut sha = [0u8; 40];
    for (pair, byte) in sha.chunks_exact_mut(2).zip(Sha1::digest(body)) {
        pair[0] = b"0123456789abcdef"[usize::from(byte >> 4)];
        pair[1] = b"0123456789abcdef"[usize::from(byte & 15)];
    }
    sha
}

fn around(name: &str) -> String {
    format!(
        "ERR Switchyard does not run a script that uses {name}: by it the check that it touches only its keys could be passed by (scripts.undeclared-keys)"
    )
}

impl Worker {
    /// Sends a script or function call to the node that has its keys.
    pub(super) fn script(&mut self, plan: &Plan, handle: Handle, command: &Command, node: NodeId, raw: &[u8], args: &Args<'_>) -> Flow {
        match self.checked_script(plan, command, args) {
            Ok(None) => self.forward(handle, command, node, raw),
            Ok(Some(request)) => self.forward(handle, command, node, &request),
            Err(text) => self.refuse(handle, command.class() as u8, &text),
        }
    }

    /// What is sent in place of a script call: `None`, where it is sent as it is.
    pub(super) fn checked_script(&mut self, plan: &Plan, command: &Command, args: &Args<'_>) -> Result<Option<Vec<u8>>, String> {
        let text = args.get(1).unwrap_or_default();
        let by_sha = command.name.starts_with("EVALSHA");
        let judged = match &*command.name {
            "EVAL" | "EVAL_RO" => self.met(text, &plan.commands),
            "EVALSHA" | "EVALSHA_RO" if plan.live.check_scripts => match self.met_by_sha(text, &plan.commands) {
                Some(judged) => judged,
                None => return Err(NOSCRIPT.into()),
            },
            _ => return Ok(None),
        };
        match judged.verdict {
            _ if !plan.live.check_scripts => Ok(None),
            Verdict::Proved => Ok(None),
            Verdict::Refused(name) => Err(around(name)),
            Verdict::Wrapped => {
                let script = if by_sha { &judged.wrapped_sha[..] } else { &judged.wrapped[..] };
                let mut request = Vec::with_capacity(script.len() + 256);
                encode::header(&mut request, b'*', args.len());
                for (index, arg) in args.iter().enumerate() {
                    encode::bulk(&mut request, if index == 1 { script } else { arg });
                }
                Ok(Some(request))
            }
        }
    }

    /// What was found out about the script that a command calls; `None` for functions, and for one that is not known.
    pub(super) fn verdict_of(&mut self, plan: &Plan, command: &Command, args: &Args<'_>) -> Option<Verdict> {
        let text = args.get(1)?;
        match &*command.name {
            "EVAL" | "EVAL_RO" => Some(self.met(text, &plan.commands).verdict),
            "EVALSHA" | "EVALSHA_RO" => self.met_by_sha(text, &plan.commands).map(|judged| judged.verdict),
            _ => None,
        }
    }

    /// The hash by which the node knows a script that is called by its hash.
    pub(super) fn sha_sent(&mut self, plan: &Plan, command: &Command, args: &Args<'_>) -> Option<[u8; 40]> {
        if !matches!(&*command.name, "EVALSHA" | "EVALSHA_RO") {
            return None;
        }
        let sha = args.get(1)?;
        match self.met_by_sha(sha, &plan.commands).filter(|j| plan.live.check_scripts && j.verdict == Verdict::Wrapped) {
            Some(judged) => Some(judged.wrapped_sha),
            None => sha.to_ascii_lowercase().try_into().ok(),
        }
    }

    /// An error of a script names its hash: it is to be the one that the client knows.
    #[cold]
    pub(super) fn with_own_sha<'r>(&self, error: &'r [u8]) -> Cow<'r, [u8]> {
        for (at, window) in error.windows(40).enumerate() {
            if window.iter().all(u8::is_ascii_hexdigit)
                && let Some(own) = <[u8; 40]>::try_from(window).ok().and_then(|sha| self.scripts_met.own.get(&sha))
            {
                return Cow::Owned([&error[..at], own, &error[at + 40..]].concat());
            }
        }
        Cow::Borrowed(error)
    }

    fn met(&mut self, body: &[u8], table: &CommandTable) -> Judged {
        let hash = rapidhash::v3::rapidhash_v3(body);
        if let Some(judged) = self.scripts_met.by_text.get(&hash).filter(|j| *j.body == *body) {
            return judged.clone();
        }
        if self.scripts_met.by_text.len() >= JUDGED_MAX {
            self.scripts_met = ScriptsMet::default();
        }
        let sha = sha_of(body);
        let verdict = judge(body, table);
        let (wrapped, wrapped_sha) = match verdict {
            Verdict::Wrapped => {
                let wrapped = wrapped_script(body);
                let sha = sha_of(&wrapped);
                (wrapped, sha)
            }
            _ => (Vec::new(), sha),
        };
        let mut known = lock(&self.shared.scripts);
        known.remember(sha, body);
        if verdict == Verdict::Wrapped {
            known.remember(wrapped_sha, &wrapped);
        }
        drop(known);
        let judged = Judged { body: body.into(), verdict, wrapped: wrapped.into(), wrapped_sha };
        self.scripts_met.by_text.insert(hash, judged.clone());
        self.scripts_met.by_sha.insert(sha, hash);
        self.scripts_met.own.insert(wrapped_sha, sha);
        judged
    }

    fn met_by_sha(&mut self, sha: &[u8], table: &CommandTable) -> Option<Judged> {
        let lower: [u8; 40] = sha.to_ascii_lowercase().try_into().ok()?;
        if let Some(judged) = self.scripts_met.by_sha.get(&lower).and_then(|hash| self.scripts_met.by_text.get(hash)) {
            return Some(judged.clone());
        }
        let body = lock(&self.shared.scripts).body(&lower)?;
        Some(self.met(&body, table))
    }

    /// SCRIPT and FUNCTION subcommands that concern every node and need more than passing on; `None` for the others.
    pub(super) fn every_script(&mut self, handle: Handle, lane: Lane, command: &Command, args: &Args<'_>) -> Option<Flow> {
        let plan = self.plan.clone();
        let check = plan.live.check_scripts;
        let class = command.class() as u8;
        match &*command.name {
            "SCRIPT|LOAD" => {
                let judged = self.met(args.get(2)?, &plan.commands);
                match judged.verdict {
                    Verdict::Refused(name) if check => return Some(self.refuse(handle, class, &around(name))),
                    Verdict::Wrapped if check => {}
                    _ => return None,
                }
                // The wrapped one beside it, so that a call behind this command finds it. The reply is the script's own hash.
                let mut requests = vec![Vec::new(), Vec::new()];
                encode::command(&mut requests[0], [&b"SCRIPT"[..], b"LOAD", &judged.wrapped]);
                encode::command(&mut requests[1], [&b"SCRIPT"[..], b"LOAD", &judged.body]);
                let nodes: Vec<NodeId> = plan.topology.nodes().map(|n| n.id).collect();
                let gather = self.begin_gather(handle, class, nodes.len(), Whole::Merged(Merge::Same))?;
                for (part, node) in nodes.into_iter().enumerate() {
                    self.send_parts(gather, part as u32, node, lane, &requests, class);
                }
                Some(Flow::Next)
            }
            "SCRIPT|EXISTS" if check => {
                // What it knows it can give to any node; what it does not know it runs nowhere.
                let mut out = Vec::new();
                let known = lock(&self.shared.scripts);
                encode::header(&mut out, b'*', args.len() - 2);
                for sha in args.iter().skip(2) {
                    encode::integer(&mut out, i64::from(known.body(sha).is_some()));
                }
                drop(known);
                self.answer(handle, class, &out);
                Some(Flow::Next)
            }
            "SCRIPT|EXISTS" => {
                // The router gives a node what it knows; and what every node has runs, whether or not it went through the router.
                let scripts = lock(&self.shared.scripts);
                let known = args.iter().skip(2).map(|sha| scripts.body(sha).is_some()).collect();
                drop(scripts);
                let mut request = Vec::new();
                encode::command(&mut request, args.iter().collect::<Vec<_>>());
                self.gather_every(handle, lane, &request, class, Whole::ScriptExists { known });
                Some(Flow::Next)
            }
            "SCRIPT|FLUSH" => {
                lock(&self.shared.scripts).clear();
                self.scripts_met = ScriptsMet::default();
                None
            }
            "FUNCTION|LOAD" if check => {
                let code = args.get(args.len() - 1)?;
                if let Verdict::Refused(name) = judge(code, &plan.commands) {
                    return Some(self.refuse(handle, class, &around(name)));
                }
                let wrapped = wrapped_library(code);
                let mut request = Vec::new();
                let last = args.len() - 1;
                encode::header(&mut request, b'*', args.len());
                for (index, arg) in args.iter().enumerate() {
                    encode::bulk(&mut request, if index == last { &wrapped } else { arg });
                }
                self.gather_every(handle, lane, &request, class, Whole::Merged(Merge::Same));
                Some(Flow::Next)
            }
            "FUNCTION|RESTORE" if check => {
                let nodes: Vec<NodeId> = plan.topology.nodes().map(|n| n.id).collect();
                let mut request = Vec::new();
                encode::command(&mut request, args.iter().collect::<Vec<_>>());
                let asks = ask_all(&nodes, &[request]);
                let restore = RestoreFunctions { nodes, phase: RestorePhase::Restoring, answer: Vec::new() };
                Some(self.begin_alone(handle, class, Box::new(restore), asks))
            }
            _ => None,
        }
    }

    /// FUNCTION LIST: libraries as their authors wrote them.
    pub(super) fn function_list(&mut self, handle: Handle, command: &Command, node: NodeId, raw: &[u8], args: &Args<'_>) -> Flow {
        let with_code = args.iter().skip(2).any(|a| a.eq_ignore_ascii_case(b"WITHCODE"));
        if !with_code || !self.plan.live.check_scripts {
            return self.forward(handle, command, node, raw);
        }
        let ask = Ask { node, lane: Lane::Slow, requests: vec![raw.to_vec()] };
        self.begin_alone(handle, command.class() as u8, Box::new(Unwrap), vec![ask])
    }

    /// The node lost a script that went through us: gives it back and asks again. Only where nothing of the same client is behind the
    /// command, which would overtake it; else the client sees NOSCRIPT, as it would from the node.
    pub(super) fn heal_script(&mut self, link_handle: Handle) -> bool {
        let Some(link) = self.links.get(link_handle) else { return false };
        let Some(pending) = link.pending.front().copied() else { return false };
        if link.expired > 0 || pending.purpose != Purpose::Client || !pending.by_sha {
            return false;
        }
        let request = link.head_request().to_vec();
        let Some(client) = self.clients.get(pending.who) else { return false };
        if !client.is_last(pending.seq) {
            return false;
        }
        let database = client.database;
        let mut scanner = Scanner::default();
        let limits = Limits { argument_max: usize::MAX >> 1, large: usize::MAX, authenticated: true };
        if scanner.scan(&request, &limits).is_err() {
            return false;
        }
        let Some(sha) = scanner.args(&request).get(1) else { return false };
        let Some(body) = lock(&self.shared.scripts).body(sha) else { return false };
        if let Some(link) = self.links.get_mut(link_handle) {
            link.pop();
            link.trim();
        }
        self.push_own(link_handle, &[b"SCRIPT", b"LOAD", &body], Purpose::Nobody, 0);
        if let Some(link) = self.links.get_mut(link_handle) {
            link.push(&request, database, Pending { purpose: Purpose::ClientHealed, sent_us: self.now_us as u32, ..pending });
        }
        self.mark_link(link_handle);
        true
    }
}

fn ask_all(nodes: &[NodeId], requests: &[Vec<u8>]) -> Vec<Ask> {
    nodes.iter().map(|node| Ask { node: *node, lane: Lane::Slow, requests: requests.to_vec() }).collect()
}

/// FUNCTION LIST WITHCODE, with the preludes taken off.
#[derive(Debug)]
struct Unwrap;

impl Procedure for Unwrap {
    fn next(&mut self, _: &mut Worker, _: bool, mut parts: Vec<Vec<u8>>) -> Next {
        let answer = parts.pop().unwrap_or_default();
        let mut out = Vec::with_capacity(answer.len());
        without_preludes(&answer, &mut out);
        Next::Done(out)
    }
}

/// Copies a reply, with libraries' preludes taken off wherever a string has one. Replies to FUNCTION LIST nest four deep.
fn without_preludes(value: &[u8], out: &mut Vec<u8>) {
    match value.first() {
        Some(b'*' | b'%' | b'~') => {
            let header = value.iter().position(|b| *b == b'\n').map_or(value.len(), |at| at + 1);
            out.extend_from_slice(&value[..header]);
            for element in reply::elements(value) {
                without_preludes(element, out);
            }
        }
        Some(b'$') => match reply::text(value).and_then(unwrapped_library) {
            Some(code) => encode::bulk(out, &code),
            None => out.extend_from_slice(value),
        },
        _ => out.extend_from_slice(value),
    }
}

#[derive(Debug)]
enum RestorePhase {
    Restoring,
    Listing,
    Wrapping,
}

/// FUNCTION RESTORE of libraries that may come from elsewhere: those without prelude are loaded again with it.
#[derive(Debug)]
struct RestoreFunctions {
    nodes: Vec<NodeId>,
    phase: RestorePhase,
    answer: Vec<u8>,
}

impl Procedure for RestoreFunctions {
    fn next(&mut self, _: &mut Worker, _: bool, parts: Vec<Vec<u8>>) -> Next {
        let error = parts.iter().find(|p| reply::is_error(p)).cloned();
        match self.phase {
            RestorePhase::Restoring => {
                if let Some(error) = error {
                    return Next::Done(error);
                }
                self.answer = parts.into_iter().next().unwrap_or_default();
                self.phase = RestorePhase::Listing;
                let mut request = Vec::new();
                encode::command(&mut request, [&b"FUNCTION"[..], b"LIST", b"WITHCODE"]);
                Next::Round(ask_all(&self.nodes[..1], &[request]))
            }
            RestorePhase::Listing => {
                let mut codes = Vec::new();
                for library in parts.iter().flat_map(|p| reply::elements(p)) {
                    let fields: Vec<&[u8]> = reply::elements(library).filter_map(reply::text).collect();
                    let strings: Vec<&[u8]> = reply::elements(library).map(|e| reply::text(e).unwrap_or_default()).collect();
                    let code = strings.iter().position(|s| *s == b"library_code").and_then(|at| strings.get(at + 1));
                    if let Some(code) = code.filter(|c| !fields.is_empty() && !is_wrapped_library(c)) {
                        codes.push(wrapped_library(code));
                    }
                }
                if codes.is_empty() {
                    return Next::Done(std::mem::take(&mut self.answer));
                }
                self.phase = RestorePhase::Wrapping;
                let load = |code: &Vec<u8>| {
                    let mut request = Vec::new();
                    encode::command(&mut request, [&b"FUNCTION"[..], b"LOAD", b"REPLACE", code]);
                    request
                };
                Next::Round(codes.iter().flat_map(|code| ask_all(&self.nodes, &[load(code)])).collect())
            }
            RestorePhase::Wrapping => Next::Done(error.unwrap_or_else(|| std::mem::take(&mut self.answer))),
        }
    }
}
