//! Scripts and functions: the same at every node, and restricted to their declared keys.
//!
//! The router stores the scripts that pass through it, because servers do not return theirs. So EVALSHA works at every
//! node, also at one that has just joined or restarted. A script is analyzed once per worker ([`crate::lua`]). If it
//! must be checked while it runs, it is executed as another script, with a prelude and a hash of its own, which clients
//! never see.

pub(super) mod checking;
pub(super) mod met;
pub(super) mod rehearsed;

use std::sync::Arc;

use switchyard_policy::topology::NodeId;
use switchyard_resp::command::{Command, CommandTable, Flags, Merge};
use switchyard_resp::request::{Args, Limits, Scanner};
use switchyard_resp::{encode, reply};

use super::command::{Call, KeyedCommand};
use super::context::Context;
use super::downstreams::Downstreams;
use super::downstreams::waits::Stall;
use super::fan_out::FanOutScope;
use super::flow::Flow;
use super::forward::forward;
use super::gather::{Aggregation, FanOut, Gathers};
use super::invocation::Invocation;
use super::keyed::CommandHooks;
use super::multi_step::{MultiStepCommand, Next, StepRequest};
use super::turn::Turn;
use super::upstreams::pending::{Again, Pending, Purpose};
use super::upstreams::{Link, Upstreams};
use crate::lane::Lane;
use crate::library_checks::NO_FUNCTIONS;
use crate::lock::lock;
use crate::lua::{UndeclaredKeys, Verdict, unwrapped_library};
use crate::scripts::{Script, sha_of};
use crate::shared::RoutingSnapshot;
use crate::single_node_usage::Limit;
use crate::slab::Handle;
use checking::check_libraries;
use rehearsed::{CheckedCall, OwnCall, note_rehearsed};

const NOSCRIPT: &str = "NOSCRIPT No matching script. Please use EVAL.";

/// FUNCTION LIST WITHCODE, with the preludes removed.
#[derive(Debug)]
struct Unwrap;

impl MultiStepCommand for Unwrap {
    fn next(&mut self, _: &Turn, _: &Upstreams, _: bool, mut parts: Vec<Vec<u8>>) -> Next {
        let answer = parts.pop().unwrap_or_default();
        let mut out = Vec::with_capacity(answer.len());
        without_preludes(&answer, &mut out);
        Next::Done(out)
    }
}

/// Copies a reply without the preludes of libraries. Replies to FUNCTION LIST nest four deep.
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

impl CommandHooks {
    /// While there is one node: returns the limit that a script or function would meet with several nodes.
    pub(super) fn limit_of_code(
        &mut self,
        turn: &Turn,
        routing: &RoutingSnapshot,
        command: &Command,
        args: &Args<'_>,
    ) -> Option<Limit> {
        if !routing.live.check_scripts || routing.checks_scripts() {
            return None;
        }
        let text = args.get(1).unwrap_or_default();
        let script = match &*command.name {
            "EVAL" | "EVAL_RO" => Some(self.met(turn, text, &routing.commands)),
            "EVALSHA" | "EVALSHA_RO" => self.met_by_sha(turn, text),
            _ => None,
        };
        match script.map(|script| &script.verdict) {
            Some(Verdict::Proved) => None,
            Some(Verdict::Refused(_)) => Some(Limit::Unnamed),
            Some(Verdict::Wrapped(_)) | None => Some(Limit::Unproved),
        }
    }

    /// Returns the replacement of a script call: `None` if it is sent unchanged. `at`: the node, which has all declared
    /// keys. `None`: the call is queued in a transaction, or not sent.
    pub(super) fn checked_script(
        &mut self,
        turn: &Turn,
        routing: &RoutingSnapshot,
        command: &Command,
        args: &Args<'_>,
        at: Option<NodeId>,
    ) -> Result<Option<CheckedCall>, String> {
        if let Some(OwnCall::Sort) = self.script {
            let argument = format!("{}:", self.scripts_met.token);
            let mut request = Vec::new();
            encode::command(&mut request, args.iter().chain([argument.as_bytes()]).collect::<Vec<_>>());
            return Ok(Some(CheckedCall { request, is_rehearsed: true }));
        }
        let text = args.get(1).unwrap_or_default();
        let check = routing.checks_scripts();
        let by_sha = command.name.starts_with("EVALSHA");
        let script = match &*command.name {
            "EVAL" | "EVAL_RO" => self.met(turn, text, &routing.commands),
            "EVALSHA" | "EVALSHA_RO" if check => match self.met_by_sha(turn, text) {
                Some(script) => script,
                None => return Err(NOSCRIPT.into()),
            },
            "FCALL" | "FCALL_RO" if check && !routing.topology.placement().is_crc16() => {
                return Err(NO_FUNCTIONS.into());
            }
            _ => return Ok(None),
        };
        match &script.verdict {
            _ if !check => Ok(None),
            Verdict::Proved => Ok(None),
            Verdict::Refused(why) => Err(why.to_string()),
            Verdict::Wrapped(_) => {
                let script = Arc::clone(script);
                let sha = [&script.wrapped_sha[..]];
                let wrapped = script.wrapped();
                let text = if by_sha { &sha[..] } else { &wrapped[..] };
                let len: usize = text.iter().map(|part| part.len()).sum();
                let mut request = Vec::with_capacity(len + 256);
                let (argument, is_rehearsed) = self.script_argument(routing, command, args, &script, at);
                // In a transaction the node refuses a wrong number of keys, which must not include the argument.
                let takes_argument = at.is_some() || command.find_keys(args, &mut Vec::new()).is_ok();
                encode::header(&mut request, b'*', args.len() + usize::from(takes_argument));
                for (index, arg) in args.iter().enumerate() {
                    encode::bulk_of(&mut request, if index == 1 { text } else { std::slice::from_ref(&arg) });
                }
                if takes_argument {
                    encode::bulk(&mut request, &argument);
                }
                Ok(Some(CheckedCall { request, is_rehearsed }))
            }
        }
    }

    /// Whether a script call provably uses only its declared keys; never true for a function.
    pub(super) fn is_proved(
        &mut self,
        turn: &Turn,
        routing: &RoutingSnapshot,
        command: &Command,
        args: &Args<'_>,
    ) -> bool {
        let text = args.get(1).unwrap_or_default();
        let verdict = match &*command.name {
            "EVAL" | "EVAL_RO" => Some(&self.met(turn, text, &routing.commands).verdict),
            "EVALSHA" | "EVALSHA_RO" => self.met_by_sha(turn, text).map(|script| &script.verdict),
            _ => None,
        };
        verdict == Some(&Verdict::Proved)
    }

    /// Returns the hash at the node of a script that is called by its hash.
    pub(super) fn sha_sent(
        &mut self,
        turn: &Turn,
        routing: &RoutingSnapshot,
        command: &Command,
        args: &Args<'_>,
    ) -> Option<[u8; 40]> {
        if !matches!(&*command.name, "EVALSHA" | "EVALSHA_RO") {
            return None;
        }
        let sha = args.get(1)?;
        match self.met_by_sha(turn, sha).filter(|_| routing.checks_scripts()) {
            Some(script) => Some(script.wrapped_sha),
            None => sha.to_ascii_lowercase().try_into().ok(),
        }
    }

    fn met(&mut self, turn: &Turn, body: &[u8], table: &CommandTable) -> &Arc<Script> {
        let hash = rapidhash::v3::rapidhash_v3(body);
        let beside = UndeclaredKeys::under(turn.routing().topology.placement());
        let fits = |script: &Script| *script.body == *body && script.beside.is_same(&beside);
        if self.scripts_met.by_text.get(&hash).is_none_or(|script| !fits(script)) {
            let sha = sha_of(&[body]);
            // Texts with the same hash can be constructed.
            let known = lock(&turn.shared().scripts).by_client_sha(&sha).filter(|script| fits(script)).cloned();
            // Analyzed without the lock: a text may be long.
            let script = known.unwrap_or_else(|| {
                let script = Arc::new(Script::analyse(body, sha, table, beside));
                lock(&turn.shared().scripts).store(&script);
                script
            });
            self.scripts_met.remember(hash, &script);
        }
        &self.scripts_met.by_text[&hash]
    }

    fn met_by_sha(&mut self, turn: &Turn, sha: &[u8]) -> Option<&Arc<Script>> {
        let beside = UndeclaredKeys::under(turn.routing().topology.placement());
        match self.scripts_met.named(sha) {
            Some(script) if script.beside.is_same(&beside) => {}
            _ => {
                let script = lock(&turn.shared().scripts).by_client_sha(sha)?.clone();
                if script.beside.is_same(&beside) {
                    self.scripts_met.remember(rapidhash::v3::rapidhash_v3(&script.body), &script);
                } else {
                    // The placement rules have changed since.
                    let table = Arc::clone(&turn.routing().commands);
                    self.met(turn, &script.body, &table);
                }
            }
        }
        self.scripts_met.named(sha)
    }

    /// Returns the replacement of a command that runs or loads code in a transaction: `None` if it is queued unchanged.
    pub(super) fn checked_code(
        &mut self,
        turn: &Turn,
        routing: &RoutingSnapshot,
        command: &Command,
        args: &Args<'_>,
    ) -> Result<Option<Vec<u8>>, String> {
        if command.flags.has(Flags::SCRIPT) {
            return Ok(self.checked_script(turn, routing, command, args, None)?.map(|checked| checked.request));
        }
        if command.name == "SCRIPT|LOAD" {
            // The router knows it from here on, as if it had gone to every node.
            let script = self.met(turn, args.get(2).unwrap_or_default(), &routing.commands);
            return match &script.verdict {
                Verdict::Refused(why) if routing.checks_scripts() => Err(why.to_string()),
                _ => Ok(None),
            };
        }
        // FUNCTION LOAD and RESTORE are queued only with a single node, whose functions need no check.
        Ok(None)
    }
}

impl Gathers {
    /// FUNCTION LIST: libraries as their authors wrote them. `None`: the node replies to the command as it is.
    pub(super) fn function_list(
        &mut self,
        turn: &Turn,
        down: &mut Downstreams,
        call: &Invocation<'_>,
        node: NodeId,
    ) -> Option<Flow> {
        let Invocation { handle, command, raw, args, .. } = *call;
        let with_code = args.iter().skip(2).any(|a| a.eq_ignore_ascii_case(b"WITHCODE"));
        if !with_code || !turn.routing().live.check_scripts {
            return None;
        }
        let ask = StepRequest { node, lane: Lane::Slow, requests: vec![raw.to_vec()] };
        Some(self.begin_alone(turn, down, handle, command.class() as u8, Box::new(Unwrap), vec![ask]))
    }
}

impl Gathers {
    /// SCRIPT and FUNCTION subcommands for every node that need more than forwarding; `None` for the others.
    pub(super) fn every_script(
        &mut self,
        turn: &Turn,
        up: &Upstreams,
        down: &mut Downstreams,
        hooks: &mut CommandHooks,
        call: &Invocation<'_>,
        lane: Lane,
    ) -> Option<Flow> {
        let Invocation { handle, command, args, .. } = *call;
        let routing = turn.routing().clone();
        let check = routing.checks_scripts();
        let class = command.class() as u8;
        match &*command.name {
            "SCRIPT|LOAD" => {
                let script = hooks.met(turn, args.get(2)?, &routing.commands).clone();
                match &script.verdict {
                    Verdict::Refused(why) if check => return Some(down.refuse(turn, handle, class, why)),
                    Verdict::Wrapped(_) if check => {}
                    _ => return None,
                }
                // Load the wrapped script as well, so that a later call finds it. The reply is the script's own hash.
                let mut requests = vec![Vec::new(), Vec::new()];
                encode::command(&mut requests[0], [&b"SCRIPT"[..], b"LOAD", &script.wrapped().concat()]);
                encode::command(&mut requests[1], [&b"SCRIPT"[..], b"LOAD", &script.body]);
                Some(self.fan_out(
                    turn,
                    down,
                    FanOut {
                        client: handle,
                        lane,
                        reach: FanOutScope::Everybody,
                        requests,
                        class,
                        whole: Aggregation::Merged(Merge::Same),
                    },
                ))
            }
            "SCRIPT|EXISTS" if check => {
                // Known scripts can be loaded at any node; unknown ones cannot be executed anywhere.
                let mut out = Vec::new();
                let known = lock(&turn.shared().scripts);
                encode::header(&mut out, b'*', args.len() - 2);
                for sha in args.iter().skip(2) {
                    encode::integer(&mut out, i64::from(known.by_client_sha(sha).is_some()));
                }
                drop(known);
                down.answer(turn, handle, class, &out);
                Some(Flow::Next)
            }
            "SCRIPT|EXISTS" => {
                // Known scripts are loaded at a node when needed; and a script that is at every node can be executed,
                // whether or not it went through the router.
                let scripts = lock(&turn.shared().scripts);
                let known = args.iter().skip(2).map(|sha| scripts.by_client_sha(sha).is_some()).collect();
                drop(scripts);
                let mut request = Vec::new();
                encode::command(&mut request, args.iter().collect::<Vec<_>>());
                Some(self.fan_out(
                    turn,
                    down,
                    FanOut {
                        client: handle,
                        lane,
                        reach: FanOutScope::Everybody,
                        requests: vec![request],
                        class,
                        whole: Aggregation::ScriptExists { known },
                    },
                ))
            }
            "SCRIPT|FLUSH" => {
                lock(&turn.shared().scripts).clear();
                hooks.scripts_met.clear();
                None
            }
            "FUNCTION|LOAD" | "FUNCTION|RESTORE" => match check_libraries(turn, down, call) {
                None => Some(Flow::Stall(Stall::Libraries)),
                Some(Ok(checked)) => {
                    let as_it_is = || {
                        let mut request = Vec::new();
                        encode::command(&mut request, args.iter().collect::<Vec<_>>());
                        request
                    };
                    Some(self.change_libraries(turn, up, down, handle, lane, class, checked.unwrap_or_else(as_it_is)))
                }
                Some(Err(why)) => Some(down.refuse(turn, handle, class, &why)),
            },
            _ => None,
        }
    }
}

/// Sends a script or function call to the node that has its keys.
pub(super) fn script(cx: &mut Context, call: &Invocation<'_>, node: NodeId) -> Flow {
    let Invocation { routing, handle, command, args, .. } = *call;
    let flow = match cx.hooks.checked_script(&cx.turn, routing, command, args, Some(node)) {
        Ok(None) => forward(cx, call, node),
        Ok(Some(checked)) => {
            let flow = forward(cx, &Invocation { raw: &checked.request, ..*call }, node);
            if flow == Flow::Next && checked.is_rehearsed {
                note_rehearsed(cx, call);
            }
            flow
        }
        Err(text) => return cx.down.refuse(&cx.turn, handle, command.class() as u8, &text),
    };
    if flow == Flow::Next
        && let Some(limit) = cx.hooks.limit_of_code(&cx.turn, routing, command, args)
    {
        cx.hooks.tally.note(&command.name, limit);
    }
    flow
}

/// If a node has lost a known script: loads it and sends the call again. Only if the client has no later command in
/// flight, which would be overtaken; otherwise the client gets NOSCRIPT, as from the node.
pub(super) fn heal_script(cx: &mut Context, link_handle: Handle) -> bool {
    let Some(link) = cx.up.get(link_handle) else { return false };
    let Some(pending) = link.head().copied() else { return false };
    if link.requests().is_head_expired() || pending.purpose != Purpose::Client || pending.again != Again::Heals {
        return false;
    }
    let request = link.requests().head_request().to_vec();
    let Some(client) = cx.down.get(pending.who) else { return false };
    if !client.replies().is_last(pending.seq) {
        return false;
    }
    let (database, no_touch) = (client.database(), client.no_touch());
    let mut scanner = Scanner::default();
    if scanner.scan(&request, &Limits::NONE).is_err() {
        return false;
    }
    let Some(sha) = scanner.args(&request).get(1) else { return false };
    let Some(body) = lock(&cx.turn.shared().scripts).text(sha) else { return false };
    let node = link.node();
    if let Some(ended) = cx.up.get_mut(link_handle).and_then(Link::taken_out) {
        cx.hooks.over(&cx.turn, ended, b"");
    }
    cx.up.push_own(&cx.turn, link_handle, &[b"SCRIPT", b"LOAD", &body], Purpose::Discarded, 0);
    let pending = Pending { purpose: Purpose::ClientHealed, sent_us: cx.turn.now_us() as u32, ..pending };
    let request =
        cx.hooks.pass(&cx.turn, KeyedCommand { call: Call::Bytes(&request), node, database }, &request, pending);
    if let Some(link) = cx.up.get_mut(link_handle) {
        link.touch_as(no_touch, pending);
        link.push(request);
    }
    cx.up.mark(link_handle);
    true
}
