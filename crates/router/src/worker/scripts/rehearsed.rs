//! Calls of scripts that may touch keys which they do not declare: they are rehearsed at the node ([`crate::lua`]), and
//! repeated with the keys that the rehearsal has touched.
//!
//! A rehearsed call has no effect if it touches foreign keys. Its reply is then dropped, and the client's command is
//! dispatched again from its start, as after a stall. This time the router declares the further keys after the client's
//! own ones, so all that works for declared keys works for them: they are brought to one node, their moves wait for the
//! call, and their copies are discarded. Until the reply arrives, no later command of the client is dispatched.
//!
//! A call whose declared keys all have a hash tag, their own or by a rule, is not rehearsed: its author keeps the keys of the
//! script together. It is if keys of its slots live at several nodes, or if the script has touched a foreign key before. A
//! count of calls without foreign keys is no criterion: a queue may have been empty so far.
//!
//! Not a state machine that sends the call again by itself: it would need all of the dispatch.

use std::collections::BTreeSet;
use std::sync::Arc;

use switchyard_policy::colocate::REQUEST_KEYS_MAX;
use switchyard_policy::topology::NodeId;
use switchyard_resp::command::{Command, Flags, KeyError, is_option};
use switchyard_resp::encode;
use switchyard_resp::request::{Args, Scanner};

use super::super::command::with_parsed_command;
use super::super::context::Context;
use super::super::downstreams::waits::Stall;
use super::super::downstreams::{Client, Downstreams};
use super::super::invocation::Invocation;
use super::super::keyed::{CommandHooks, find_routed_keys};
use super::super::turn::Turn;
use super::super::upstreams::Link;
use super::super::upstreams::pending::{Again, Purpose};
use crate::lua::{FOREIGN, Verdict, sort_script};
use crate::script_argument::ScriptArgument;
use crate::scripts::{Script, sha_of};
use crate::shared::RoutingSnapshot;
use crate::slab::Handle;

/// Maximum repetitions of a call. Each can find further keys: values of the first ones determine them, or other clients
/// have changed these values since.
pub(in crate::worker) const REPEATS_MAX: u32 = 256;

/// A call in the form for nodes.
#[derive(Debug)]
pub(in crate::worker) struct CheckedCall {
    pub(super) request: Vec<u8>,
    pub(super) is_rehearsed: bool,
}

/// The last call of a client that was rehearsed, until its reply arrives.
#[derive(Debug)]
pub(in crate::worker) struct RehearsedCall {
    /// Command number within the client.
    number: u32,
    /// Time of its first dispatch, microseconds.
    since_us: u64,
    /// The client's command.
    request: Vec<u8>,
    /// Keys that the router declares.
    more: Vec<Arc<[u8]>>,
    repeats: u32,
}

impl RehearsedCall {
    fn new(turn: &Turn, number: u32, request: &[u8], more: Vec<Arc<[u8]>>) -> Self {
        Self { number, since_us: turn.now_us(), request: request.to_vec(), more, repeats: 0 }
    }

    /// Memory in bytes.
    pub(in crate::worker) fn memory(&self) -> usize {
        self.request.capacity() + self.more.iter().map(|key| key.len() + size_of::<Arc<[u8]>>()).sum::<usize>()
    }
}

/// Time of the first dispatch of the command with this number, if it is a rehearsed call, microseconds. A repeated call keeps
/// its place among the waiting ones.
pub(in crate::worker) fn first_dispatch_us(client: &Client, number: u32) -> Option<u64> {
    let call = client.state::<RehearsedCall>().filter(|call| call.number == number);
    call.map(|call| call.since_us)
}

/// Whether calls of this command are rehearsed instead of waiting until one node has all keys of their slots. Functions
/// are not: a node may have libraries without the rehearsal.
pub(in crate::worker) fn rehearses(routing: &RoutingSnapshot, command: &Command) -> bool {
    command.flags.has(Flags::SCRIPT)
        && command.name.starts_with("EVAL")
        && routing.checks_scripts()
        && routing.colocates()
}

/// Some arguments of a call.
pub(in crate::worker) type Arguments<'a> = Vec<&'a [u8]>;

/// Returns the declared keys and the other arguments of a call.
pub(in crate::worker) fn keys_and_arguments<'a>(
    command: &Command,
    args: &Args<'a>,
) -> Option<(Arguments<'a>, Arguments<'a>)> {
    let mut places = Vec::new();
    command.find_keys(args, &mut places).ok()?;
    let keys: Vec<&[u8]> = places.iter().filter_map(|place| args.get(*place as usize)).collect();
    let arguments = args.iter().skip(3 + keys.len()).collect();
    Some((keys, arguments))
}

/// Returns a call with more declared keys.
fn with_keys(command: &Command, args: &Args<'_>, more: &[Arc<[u8]>]) -> Option<Vec<u8>> {
    let (keys, arguments) = keys_and_arguments(command, args)?;
    let count = (keys.len() + more.len()).to_string();
    let mut request = Vec::new();
    encode::header(&mut request, b'*', args.len() + more.len());
    args.iter().take(2).chain([count.as_bytes()]).for_each(|arg| encode::bulk(&mut request, arg));
    let more = more.iter().map(|key| &**key);
    keys.into_iter().chain(more).chain(arguments).for_each(|arg| encode::bulk(&mut request, arg));
    Some(request)
}

/// A call of a script that the router has changed or made.
#[derive(Clone, Copy, Debug)]
pub(in crate::worker) enum OwnCall {
    /// A client's script, with this number of further declared keys.
    WithMoreKeys(usize),
    /// The router's script for `SORT`.
    Sort,
}

/// A call of a script instead of a client's command.
pub(in crate::worker) struct Replacement {
    request: Vec<u8>,
    call: OwnCall,
}

impl Replacement {
    /// Bytes of the call.
    pub(in crate::worker) fn request(&self) -> &[u8] {
        &self.request
    }

    /// Kind of the call.
    pub(in crate::worker) fn call(&self) -> OwnCall {
        self.call
    }
}

/// Returns the call to execute instead of a command: that of a script with the keys that its rehearsals have touched, or
/// that templates predict, after the client's own ones; or the router's script for `SORT` by keys of any slot. `None`: the
/// command is executed as it is.
pub(in crate::worker) fn replacement(cx: &mut Context, call: &Invocation<'_>) -> Option<Replacement> {
    let Invocation { routing, handle, command, args, raw } = *call;
    let sorts = sorts_by_any_keys(routing, command, args);
    if cx.hooks.script.is_some() || !sorts && !rehearses(routing, command) {
        return None;
    }
    let client = cx.down.get_mut(handle)?;
    let number = client.replies().next_seq();
    let known = client.state::<RehearsedCall>().filter(|call| call.number == number);
    let more = match known {
        Some(known) => known.more.clone(),
        None => {
            let more = cx.hooks.expected_keys(&cx.turn, routing, command, args);
            if sorts || !more.is_empty() {
                client.set_state(RehearsedCall::new(&cx.turn, number, raw, more.clone()));
            }
            more
        }
    };
    if sorts {
        return Some(Replacement { request: sort_call(args, &more)?, call: OwnCall::Sort });
    }
    let request = if more.is_empty() { None } else { with_keys(command, args, &more) };
    Some(Replacement { request: request?, call: OwnCall::WithMoreKeys(more.len()) })
}

/// Whether a command is `SORT` by a pattern whose keys may be in any slot.
fn sorts_by_any_keys(routing: &RoutingSnapshot, command: &Command, args: &Args<'_>) -> bool {
    command.name.starts_with("SORT")
        && routing.colocates()
        && routing.topology.only_node().is_none()
        && matches!(
            find_routed_keys(routing.topology.placement(), command, args, &mut Vec::new()),
            Err(KeyError::SortPattern(_))
        )
}

/// Returns the call of the router's script for `SORT`, with more declared keys.
fn sort_call(args: &Args<'_>, more: &[Arc<[u8]>]) -> Option<Vec<u8>> {
    let is_store = |at: &usize| args.get(*at).is_some_and(|arg| is_option(arg, b"STORE"));
    let stored = (2..args.len().saturating_sub(1)).rfind(is_store).and_then(|at| args.get(at + 1));
    let keys: Vec<&[u8]> = args.get(1).into_iter().chain(stored).chain(more.iter().map(|key| &**key)).collect();
    let (script, count) = (sort_script(), keys.len().to_string());
    let head = [&b"EVAL"[..], script.as_bytes(), count.as_bytes()];
    let rest = args.get(0).into_iter().chain(args.iter().skip(2));
    let all: Vec<&[u8]> = head.into_iter().chain(keys).chain(rest).collect();
    let mut request = Vec::new();
    encode::command(&mut request, all);
    Some(request)
}

impl CommandHooks {
    /// Returns the script of a call, if it is checked while it runs.
    fn checked_script_of(
        &mut self,
        turn: &Turn,
        routing: &RoutingSnapshot,
        command: &Command,
        args: &Args<'_>,
    ) -> Option<Arc<Script>> {
        // Not of functions, whose names are no texts.
        let text = args.get(1).filter(|_| command.flags.has(Flags::SCRIPT) && command.name.starts_with("EVAL"))?;
        let script = match command.name.starts_with("EVALSHA") {
            true => self.met_by_sha(turn, text)?,
            false => self.met(turn, text, &routing.commands),
        };
        matches!(script.verdict, Verdict::Wrapped(_)).then(|| Arc::clone(script))
    }

    /// Returns undeclared keys that a call will probably touch.
    fn expected_keys(
        &mut self,
        turn: &Turn,
        routing: &RoutingSnapshot,
        command: &Command,
        args: &Args<'_>,
    ) -> Vec<Arc<[u8]>> {
        let expected = |hooks: &mut Self| {
            let script = hooks.checked_script_of(turn, routing, command, args)?;
            let (keys, arguments) = keys_and_arguments(command, args)?;
            Some(hooks.scripts_met.calls_of(&script).templates.predict(&keys, &arguments))
        };
        let expected = if self.scripts_met.has_templates { expected(self) } else { None };
        expected.into_iter().flatten().map(Arc::from).collect()
    }

    /// Whether a call is executed without a rehearsal.
    pub(in crate::worker) fn is_trusted(
        &mut self,
        turn: &Turn,
        routing: &RoutingSnapshot,
        command: &Command,
        args: &Args<'_>,
    ) -> bool {
        let script = self.checked_script_of(turn, routing, command, args);
        let keys = keys_and_arguments(command, args);
        script.zip(keys).is_some_and(|(script, (keys, _))| self.is_trusted_script(routing, &script, &keys))
    }

    fn is_trusted_script(&mut self, routing: &RoutingSnapshot, script: &Script, keys: &[&[u8]]) -> bool {
        let placement = routing.topology.placement();
        let are_tagged = !keys.is_empty() && keys.iter().all(|key| placement.hash_tag(key).is_some());
        are_tagged && !self.scripts_met.calls_of(script).has_foreign
    }

    /// Records that a call in the form for nodes touches foreign keys.
    pub(in crate::worker) fn note_foreign_keys(&mut self, request: &[u8]) {
        let Some(scanner) = Scanner::again(request) else { return };
        let text = scanner.args(request).get(1).unwrap_or_default();
        let found =
            self.scripts_met.by_any_sha(text).or_else(|| self.scripts_met.by_any_sha(&sha_of(&[text]))).cloned();
        if let Some(script) = found {
            self.scripts_met.calls_of(&script).has_foreign = true;
        }
    }

    /// Returns the router's argument for a call of a checked script, and whether the call is rehearsed.
    pub(super) fn script_argument(
        &mut self,
        routing: &RoutingSnapshot,
        command: &Command,
        args: &Args<'_>,
        script: &Script,
        at: Option<NodeId>,
    ) -> (Vec<u8>, bool) {
        let Some((node, (keys, _))) = at.filter(|_| rehearses(routing, command)).zip(keys_and_arguments(command, args))
        else {
            return (ScriptArgument::default().encode(None), false);
        };
        let more = if let Some(OwnCall::WithMoreKeys(more)) = self.script { more } else { 0 };
        let argument = ScriptArgument::new(&routing.topology, node, &keys, more);
        let is_rehearsed = !argument.is_plain() || !self.is_trusted_script(routing, script, &keys);
        (argument.encode(is_rehearsed.then_some(&*self.scripts_met.token)), is_rehearsed)
    }

    /// Records the foreign keys of a call.
    fn learn_foreign_keys(&mut self, turn: &Turn, routing: &RoutingSnapshot, request: &[u8], names: &[Vec<u8>]) {
        with_parsed_command(routing, request, |command, args| {
            let script = self.checked_script_of(turn, routing, command, args)?;
            let (keys, arguments) = keys_and_arguments(command, args)?;
            self.scripts_met.has_templates = true;
            let calls = self.scripts_met.calls_of(&script);
            calls.has_foreign = true;
            names.iter().for_each(|name| calls.templates.learn(name, &keys, &arguments));
            Some(())
        });
    }
}

/// Records that the call that was just sent is rehearsed. Later commands of the client wait for its reply.
pub(super) fn note_rehearsed(cx: &mut Context, call: &Invocation<'_>) {
    let Some(client) = cx.down.get_mut(call.handle).filter(|client| client.in_flight() > 0) else { return };
    let number = client.replies().last();
    if client.state::<RehearsedCall>().is_none_or(|known| known.number != number) {
        client.set_state(RehearsedCall::new(&cx.turn, number, call.raw, Vec::new()));
    }
    cx.down.stall(&cx.turn, call.handle, Stall::Barrier);
}

/// Forgets a rehearsed call whose reply has arrived.
pub(in crate::worker) fn end_rehearsed(down: &mut Downstreams, handle: Handle) {
    // A client may be resumed for another reason while the call is in flight.
    if let Some(client) = down.get_mut(handle)
        && client.in_flight() == 0
        && client.state::<RehearsedCall>().is_some_and(|call| call.number != client.replies().next_seq())
    {
        client.take_state::<RehearsedCall>();
    }
}

/// Whether the start of a reply is that of an error of a rehearsal, which is for the router.
pub(in crate::worker) fn is_of_rehearsal(start: &[u8], token: &str) -> bool {
    let rest = start.strip_prefix(b"-ERR ").and_then(|rest| rest.strip_prefix(FOREIGN.as_bytes()));
    rest.is_some_and(|rest| rest.starts_with(token.as_bytes()))
}

/// Returns the names in the error of a rehearsal. `None`: it is another error.
pub(in crate::worker) fn foreign_keys(error: &[u8], token: &str) -> Option<Vec<Vec<u8>>> {
    let rest = error.strip_prefix(b"-ERR ")?.strip_prefix(FOREIGN.as_bytes())?.strip_prefix(token.as_bytes())?;
    let rest = rest.strip_prefix(b":")?;
    let end = rest.iter().position(|byte| !byte.is_ascii_hexdigit() && *byte != b',').unwrap_or(rest.len());
    let names = rest[..end].split(|byte| *byte == b',').skip(1);
    names.map(|name| hex::decode(name).ok()).collect()
}

/// Returns the name in the error of a script that has touched a foreign key outside a rehearsal; of a long name the first
/// 128 bytes.
pub(in crate::worker) fn touched_key(error: &[u8]) -> Option<&[u8]> {
    let start = b"the script touches the key '";
    let name = &error[memchr::memmem::find(error, start)? + start.len()..];
    Some(&name[..memchr::memmem::find(name, b"', which it neither declares")?])
}

/// Returns the error for the client instead of that of a rehearsal. `None`: it is another error.
pub(super) fn without_token(error: &[u8], token: &str) -> Option<Vec<u8>> {
    let names = foreign_keys(error, token)?;
    let shown = names.first().map(|name| String::from_utf8_lossy(&name[..name.len().min(128)]).into_owned());
    let mut out = Vec::new();
    encode::error(
        &mut out,
        &format!(
            "ERR Switchyard: the script touches the key '{}', which it does not declare in KEYS, and has touched further ones in \
             each repetition. Declare them, or use a placement rule (docs/any-keys.md)",
            shown.unwrap_or_default()
        ),
    );
    Some(out)
}

/// If a call has ended because its rehearsal has touched foreign keys: drops its reply, and dispatches the client's
/// command again with these keys. Returns false if the error is for the client.
#[cold]
pub(in crate::worker) fn run_again(cx: &mut Context, link_handle: Handle, answer: &[u8]) -> bool {
    let Some(link) = cx.up.get(link_handle) else { return false };
    let Some(pending) = link.head().copied() else { return false };
    let is_call = matches!(pending.purpose, Purpose::Client | Purpose::ClientHealed) && pending.again == Again::Heals;
    if !is_call || link.requests().is_head_expired() {
        return false;
    }
    let Some(names) = foreign_keys(answer, &cx.hooks.scripts_met.token) else {
        if let Some(name) = touched_key(answer) {
            let request = link.requests().head_request().to_vec();
            // Its calls are rehearsed from now on.
            cx.hooks.note_foreign_keys(&request);
            let call = cx.down.get(pending.who).and_then(|client| client.state::<RehearsedCall>());
            if let Some(call) = call.filter(|call| call.number == pending.seq) {
                let routing = cx.turn.routing().clone();
                // A longer name may be cut.
                let names = if name.len() < 128 { &[name.to_vec()][..] } else { &[] };
                cx.hooks.learn_foreign_keys(&cx.turn, &routing, &call.request, names);
            }
        }
        return false;
    };
    let Some(client) = cx.down.get_mut(pending.who) else { return false };
    let (is_last, is_closing) = (client.replies().is_last(pending.seq), client.input().is_closing());
    let Some(call) = client.state_mut::<RehearsedCall>().filter(|call| call.number == pending.seq) else {
        return false;
    };
    let request = call.request.clone();
    let routing = cx.turn.routing().clone();
    cx.hooks.learn_foreign_keys(&cx.turn, &routing, &request, &names);
    let more: BTreeSet<Arc<[u8]>> = call.more.iter().cloned().chain(names.into_iter().map(Arc::from)).collect();
    call.repeats += 1;
    let is_new = more.len() > call.more.len();
    if !is_last || is_closing || !is_new || call.repeats > REPEATS_MAX || more.len() > REQUEST_KEYS_MAX {
        return false;
    }
    call.more = more.into_iter().collect();
    client.replies_mut().take_back();
    client.note_counted();
    client.input_mut().put_first(&request);
    if let Some(ended) = cx.up.get_mut(link_handle).and_then(Link::taken_out) {
        cx.hooks.over(&cx.turn, ended, b"");
    }
    cx.turn.counters().script_repeats.add(1);
    cx.down.unstall(&cx.turn, pending.who);
    cx.up.mark(link_handle); // the flush checks whether waiting clients may continue
    true
}

#[cfg(test)]
mod tests {
    use switchyard_resp::command::{CommandTable, Lookup};

    use super::*;

    #[test]
    fn keys_of_the_router_follow_those_of_the_client() {
        let mut request = Vec::new();
        encode::command(&mut request, [&b"EVALSHA"[..], b"sha", b"1", b"k", b"x", b"y"]);
        let scanner = Scanner::again(&request).expect("a command");
        let (args, table) = (scanner.args(&request), CommandTable::builtin());
        let Lookup::Command(command) = table.find(&args) else { panic!("EVALSHA is known") };
        let more = [&b"m"[..], b"n"].map(Arc::from);
        let expanded = with_keys(command, &args, &more).expect("it has keys");
        let mut expected = Vec::new();
        encode::command(&mut expected, [&b"EVALSHA"[..], b"sha", b"3", b"k", b"m", b"n", b"x", b"y"]);
        assert_eq!(expanded, expected);
    }

    #[test]
    fn the_destination_of_sort_is_declared_after_its_key() {
        let mut request = Vec::new();
        encode::command(&mut request, [&b"sort"[..], b"k", b"by", b"w_*", b"store", b"d"]);
        let scanner = Scanner::again(&request).expect("a command");
        let call = sort_call(&scanner.args(&request), &[Arc::from(&b"w_1"[..])]).expect("it has a key");
        let scanner = Scanner::again(&call).expect("a command");
        let args = scanner.args(&call);
        let after_script: Vec<&[u8]> = args.iter().skip(2).collect();
        assert_eq!(after_script, [&b"3"[..], b"k", b"d", b"w_1", b"sort", b"by", b"w_*", b"store", b"d"]);
    }

    #[test]
    fn only_errors_with_the_token_name_foreign_keys() {
        let error = b"-ERR switchyard-keys:00ff:,61,00,,6d3a31\r\n";
        assert_eq!(foreign_keys(error, "00ff"), Some(vec![b"a".to_vec(), vec![0], Vec::new(), b"m:1".to_vec()]));
        assert_eq!(foreign_keys(error, "00fe"), None);
        assert_eq!(foreign_keys(b"-ERR Error: switchyard-keys:00ff:61\r\n", "00ff"), None);
        assert_eq!(foreign_keys(b"-ERR switchyard-keys:00ff:,6\r\n", "00ff"), None);
        let shown = without_token(error, "00ff").expect("an error of a rehearsal");
        let shown = String::from_utf8_lossy(&shown);
        assert!(shown.contains("'a'") && !shown.contains("00ff"), "{shown}");
        let error =
            b"-ERR Switchyard: the script touches the key 'it's', which it neither declares in KEYS nor has\r\n";
        assert_eq!((touched_key(error), touched_key(b"-ERR x\r\n")), (Some(&b"it's"[..]), None));
    }
}
