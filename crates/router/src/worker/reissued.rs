//! Commands that wait at a node (BLPOP and relatives) and whose keys are moved away: their wait is ended there, and
//! they are reissued at the new location of the keys, with the remaining time, in the order in which their waits began.
//!
//! The wait is ended by `CLIENT UNBLOCK ... ERROR`, because a plain one looks like the command's own timeout. Until the
//! node has answered, the command is in flight and holds up the drain barrier: it may still be served, and then that is
//! its reply.
//!
//! **Order.** There is no order between connections, and these clients are on several, of several workers. So the
//! commands of a slot are issued one at a time ([`crate::wait_queues`]): the next one when the node has answered the
//! previous one, or shows it as waiting (`b` among its flags in `CLIENT LIST ID`). Clients that begin to wait for keys
//! of the slot in the meantime go to the end of that line. A node that refuses CLIENT LIST, or does not answer for
//! [`LOOKS_US`], does not hold up the line: there the order is the order of sending.
//!
//! If its keys are apart then, they are brought together while it is at the router ([`super::colocate`]). Commands behind
//! it in the queues of its slots wait for that.
//!
//! While a command is at the router, everything that ends a wait is handled here: its own timeout, `CLIENT UNBLOCK`,
//! `CLIENT KILL`, a disconnected client, a drain, unreachable keys.

pub(super) mod state;

use std::sync::Arc;

use switchyard_policy::cluster::Redirect;
use switchyard_policy::routing::Route;
use switchyard_policy::topology::NodeId;
use switchyard_resp::command::{CommandClass, stream_options};
use switchyard_resp::request::Scanner;
use switchyard_resp::{encode, reply};
use tracing::debug;

use super::blocking::{unblock, wait_at_node};
use super::checkout::{Acquired, acquire, push_exclusive};
use super::colocate::end_colocation;
use super::colocate::state::ColocateWait;
use super::command::{Call, KeyedCommand};
use super::context::Context;
use super::downstreams::waits::Stall;
use super::downstreams::{Client, ClientEvent, Downstreams};
use super::flow::Flow;
use super::invocation::Invocation;
use super::keyed::CommandHooks;
use super::overrides::slots_by;
use super::transit::place_again;
use super::transit::state::Moving;
use super::turn::Turn;
use super::upstreams::Link;
use super::upstreams::kind::Checkout;
use super::upstreams::pending::Purpose;
use super::wait::state::Since;
use crate::lane::Lane;
use crate::shared::Message;
use crate::slab::Handle;
use crate::wait_queues::{QueueSlots, Ticket};
use state::{State, Waiting};

/// Time after which a node that has not shown a client as waiting is assumed not to do so, us.
const LOOKS_US: u64 = 1_000_000;

/// Time before a redirected command is issued again, us: the map of the cluster is refreshed in the meantime.
const REDIRECT_PAUSE_US: u64 = 10_000;

/// Learns from a redirect of the member `from`. Returns the member for this command only, if it names one.
fn follow_redirect(turn: &Turn, redirect: Redirect<'_>, from: NodeId) -> Option<NodeId> {
    match redirect {
        Redirect::Moved { slot, to } => {
            turn.shared().moved(slot, to, from);
            None
        }
        Redirect::Ask { to, .. } => {
            turn.shared().member_at(to, from).filter(|node| turn.routing().topology.node(*node).is_some())
        }
        Redirect::TryAgain | Redirect::Down => {
            turn.shared().request_map();
            None
        }
    }
}

/// Reason for the end of a wait at the router.
#[derive(Clone, Debug)]
pub(super) enum WaitEnd {
    /// Timeout, or CLIENT UNBLOCK.
    OutOfTime,
    /// CLIENT UNBLOCK ... ERROR.
    Unblocked,
    /// The command cannot wait any more: the router stops, or cannot reach the keys.
    Lost,
    /// An error that a server returns as well.
    Error(Arc<str>),
}

/// After a change of the keys' slots at the same nodes: moves each wait to the queues of its keys' slots, where its
/// ticket keeps its place.
pub(super) fn place_anew(turn: &Turn, down: &mut Downstreams) {
    let shared = turn.shared();
    for handle in down.handles() {
        let Some(waiting) = down.get_mut(handle).and_then(|client| client.state_mut::<Waiting>()) else { continue };
        if let Some(slots) = QueueSlots::of(&slots_by(turn.routing(), waiting.request())) {
            waiting.ticket = shared.wait_queues.place_anew(&waiting.ticket, slots, &shared.mailboxes);
        }
    }
}

impl WaitEnd {
    /// Returns the reply as sent by a node; `None` if the connection of the client is closed instead.
    fn reply(&self, resp3: bool) -> Option<Vec<u8>> {
        let mut out = Vec::new();
        match self {
            WaitEnd::OutOfTime if resp3 => encode::null(&mut out, true),
            WaitEnd::OutOfTime => out.extend_from_slice(b"*-1\r\n"),
            WaitEnd::Unblocked => out.extend_from_slice(b"-UNBLOCKED client unblocked via CLIENT UNBLOCK\r\n"),
            WaitEnd::Lost => return None,
            WaitEnd::Error(text) => encode::error(&mut out, text),
        }
        Some(out)
    }
}

/// Whether a CLIENT LIST shows this client as waiting.
fn is_shown_waiting(list: &[u8], client_id: u64) -> bool {
    let text = String::from_utf8_lossy(list);
    let mut lines = text.lines().map(|line| line.split(' '));
    let id = client_id.to_string();
    // In RESP3 the text has a prefix.
    let is_id = |field: &str| field.strip_prefix("txt:").unwrap_or(field).strip_prefix("id=") == Some(&id);
    let mut of_client = lines.find(|fields| fields.clone().any(is_id));
    of_client
        .as_mut()
        .is_some_and(|fields| fields.any(|field| field.strip_prefix("flags=").is_some_and(|flags| flags.contains('b'))))
}

impl Client {
    /// Whether a waiting command of the client is at the router.
    pub(super) fn is_reissued(&self) -> bool {
        self.state().is_some_and(|p: &Waiting| p.state == State::Here)
    }
}

/// Indexes of `$` in an XREAD, each with the index of its stream.
fn open_ends(request: &[u8]) -> Vec<(usize, usize)> {
    let Some(scanner) = Scanner::again(request) else {
        return Vec::new();
    };
    let args = scanner.args(request);
    if !args.get(0).is_some_and(|name| name.eq_ignore_ascii_case(b"XREAD")) {
        return Vec::new();
    }
    let Ok(first) = stream_options(&args).streams else { return Vec::new() };
    let count = (args.len() - first) / 2;
    (0..count).map(|n| (first + count + n, first + n)).filter(|(id, _)| args.get(*id) == Some(b"$")).collect()
}

/// Returns the argument of a request at this index.
fn argument(request: &[u8], place: usize) -> Option<Vec<u8>> {
    Scanner::again(request)?.args(request).get(place).map(<[u8]>::to_vec)
}

/// Returns the command with some arguments replaced.
fn with_arguments(request: &[u8], others: &[(usize, Option<Vec<u8>>)]) -> Option<Vec<u8>> {
    let scanner = Scanner::again(request)?;
    let args = scanner.args(request);
    let mut out = Vec::with_capacity(request.len() + 64);
    encode::header(&mut out, b'*', args.len());
    for (index, arg) in args.iter().enumerate() {
        let other = others.iter().find(|(place, _)| *place == index).and_then(|(_, other)| other.as_deref());
        encode::bulk(&mut out, other.unwrap_or(arg));
    }
    Some(out)
}

/// Returns the command with a new timeout, milliseconds.
fn with_time_left(request: &[u8], left_ms: u64) -> Option<Vec<u8>> {
    let scanner = Scanner::again(request)?;
    let args = scanner.args(request);
    let name = args.get(0)?.to_ascii_uppercase();
    let seconds = format!("{}.{:03}", left_ms / 1000, left_ms % 1000);
    let (place, text) = match &name[..] {
        b"BLMPOP" | b"BZMPOP" => (1, seconds),
        b"XREAD" | b"XREADGROUP" => (stream_options(&args).timeout?, left_ms.to_string()),
        // The index of their timeout is unknown: they wait the full time again.
        b"BLMOVEM" | b"BZMOVE" | b"BZMOVEMEMBER" => return Some(request.to_vec()),
        _ => (args.len() - 1, seconds),
    };
    let mut out = Vec::with_capacity(request.len() + 8);
    encode::header(&mut out, b'*', args.len());
    for (index, arg) in args.iter().enumerate() {
        encode::bulk(&mut out, if index == place { text.as_bytes() } else { arg });
    }
    Some(out)
}

/// The reissued commands of a worker.
#[derive(Debug, Default)]
pub(super) struct ReissuedCommands {
    clients: Vec<Handle>,
    /// Number of the last query whether a client waits at a node.
    last_look: u32,
}

impl ReissuedCommands {
    /// Number of clients of this protocol with a recalled command at the router, up to `most`.
    fn count_of(&self, clients: &Downstreams, resp3: bool, most: usize) -> usize {
        let is = |h: &&Handle| clients.get(**h).is_some_and(|client| client.resp3() == resp3 && client.is_reissued());
        self.clients.iter().filter(is).take(most).count()
    }
}

/// Removes a finished wait from the line, for the clients behind it.
pub(super) fn leave_line(turn: &Turn, waiting: &Waiting) {
    turn.shared().wait_queues.leave(&waiting.ticket, &turn.shared().mailboxes);
}

/// Stores a command that was sent and may wait, until it is answered. `waits_us`: its timeout; `None` without end.
pub(super) fn keep_waiting(
    turn: &Turn,
    down: &mut Downstreams,
    handle: Handle,
    request: &[u8],
    seq: u32,
    ticket: Ticket,
    waits_us: Option<u64>,
) {
    let until_us = waits_us.map(|us| turn.now_us().saturating_add(us));
    if let Some(client) = down.get_mut(handle) {
        let waiting = Waiting {
            request: request.to_vec(),
            seq,
            ticket,
            until_us,
            state: State::There,
            ends: Vec::new(),
            asked: None,
            not_before_us: 0,
            unblocked: None,
        };
        client.set_state(waiting);
    }
}

/// Returns the database and the streams of a recalled XREAD that begins at the ends of streams: entries added while
/// it waits at no node would be missed. So the ends are read when its wait ends.
pub(super) fn streams_to_look_at(down: &Downstreams, holder: Handle) -> Option<(u32, Vec<Vec<u8>>)> {
    let client = down.get(holder)?;
    let waiting = client.state::<Waiting>().filter(|w| w.state == State::Ending && !w.ends.is_empty())?;
    let streams =
        open_ends(&waiting.request).into_iter().filter_map(|(_, stream)| argument(&waiting.request, stream)).collect();
    Some((client.database(), streams))
}

/// Handles the reply to the transaction that ends such a wait. Returns its reply to CLIENT UNBLOCK.
pub(super) fn streams_seen<'a>(down: &mut Downstreams, holder: Handle, answer: &'a [u8]) -> &'a [u8] {
    let mut parts = reply::elements(answer);
    let Some(unblocked) = parts.next() else { return b":0\r\n" };
    let ended = reply::integer(unblocked) == Some(1);
    if let Some(waiting) = down.get_mut(holder).and_then(|c| c.state_mut::<Waiting>()).filter(|_| ended) {
        for ((_, end), stream) in waiting.ends.iter_mut().zip(parts) {
            let fields: Vec<&[u8]> =
                reply::elements(stream).map(|field| reply::text(field).unwrap_or_default()).collect();
            let at = fields.iter().position(|field| *field == b"last-generated-id");
            // A missing stream: every entry is new.
            *end = Some(at.and_then(|at| fields.get(at + 1)).map_or_else(|| b"0-0".to_vec(), |id| id.to_vec()));
        }
        down.resume(holder);
    }
    unblocked
}

/// The node does not return the ends of the streams: the command is reissued unchanged.
pub(super) fn streams_unseen(down: &mut Downstreams, holder: Option<Handle>) {
    let Some(holder) = holder else { return };
    if let Some(waiting) = down.get_mut(holder).and_then(|c| c.state_mut::<Waiting>()).filter(|w| !w.ends.is_empty()) {
        waiting.ends = Vec::new();
        down.resume(holder);
    }
}

/// Lets a client wait at a node, because it is first in line.
pub(super) fn on_turn(down: &mut Downstreams, handle: Handle) {
    if down.get(handle).is_some_and(|c| c.is_reissued() && matches!(c.stall(), Stall::Keys | Stall::Turn)) {
        down.resume(handle);
    }
}

/// Lets the next command go, because a reissued one waits at its node.
fn is_there(turn: &Turn, down: &mut Downstreams, handle: Handle) {
    if let Some(waiting) = down.get_mut(handle).and_then(|c| c.state_mut::<Waiting>()) {
        waiting.state = State::There;
        for (worker, next) in turn.shared().wait_queues.note_seen_at_node(&waiting.ticket) {
            // In this turn: a message to this worker would arrive in the next one.
            if worker == turn.index() {
                on_turn(down, next);
            } else {
                turn.shared().mailboxes.send(worker, Message::WaitTurn { client: next });
            }
        }
    }
}

/// Resumes a read that waited for keys; its next stall is determined again.
pub(super) fn end_moving_stall(down: &mut Downstreams, handle: Handle) {
    if let Some(client) = down.get_mut(handle).filter(|c| c.stall() == Stall::Keys) {
        client.waits_mut().forget();
    }
}

/// The snapshot changes while the command on a connection waits: it may create keys when it is served.
pub(super) fn note_kept(turn: &Turn, down: &mut Downstreams, hooks: &mut CommandHooks, holder: Handle, node: NodeId) {
    let Some(client) = down.get(holder) else { return };
    let (database, Some(request)) = (client.database(), client.state::<Waiting>().map(|p| p.request.clone())) else {
        return;
    };
    hooks.pass_again(turn, KeyedCommand { call: Call::Bytes(&request), node, database });
}

impl ReissuedCommands {
    /// Makes a command that may wait, but may not be sent yet, wait at the router as if it had been recalled.
    pub(super) fn wait_in_line(
        &mut self,
        turn: &Turn,
        down: &mut Downstreams,
        handle: Handle,
        request: &[u8],
        class: u8,
        ticket: Ticket,
        waits_us: Option<u64>,
    ) {
        let Some(seq) = down.get_mut(handle).map(|client| client.owe(turn.now_us(), class)) else {
            return;
        };
        keep_waiting(turn, down, handle, request, seq, ticket, waits_us);
        self.is_here(turn, down, handle);
    }

    /// Makes a command wait at the router while its keys are in transit to another node: so it has its place in line,
    /// its timeout runs, and CLIENT UNBLOCK finds it.
    #[cold]
    pub(super) fn wait_on_the_way(&mut self, turn: &Turn, down: &mut Downstreams, call: &Invocation<'_>) -> Flow {
        let Invocation { routing, handle, command, raw, args, .. } = *call;
        let later = Flow::Stall(Stall::Keys);
        let mut keys = Vec::new();
        if !command.blocks(args) || command.find_keys(args, &mut keys).is_err() {
            return later;
        }
        let names = || keys.iter().filter_map(|k| args.get(*k as usize));
        let (Route::Owner(..) | Route::Together(_)) = routing.route(names()) else { return later };
        let Some(slots) = QueueSlots::of(&names().map(|key| routing.topology.slot_of(key)).collect()) else {
            return later;
        };
        let Some(client) = down.get_mut(handle) else { return Flow::Close };
        if client.in_flight() > 0 {
            return later; // after its earlier commands
        }
        client.replies_mut().take_lane(Lane::Blocking);
        let ticket = turn.shared().wait_queues.enter_reissued(slots, turn.index(), handle);
        self.wait_in_line(turn, down, handle, raw, command.class() as u8, ticket, command.waits_us(args));
        Flow::Next
    }

    /// Stores that a client's waiting command is at the router.
    fn is_here(&mut self, turn: &Turn, down: &mut Downstreams, handle: Handle) {
        if let Some(waiting) = down.get_mut(handle).and_then(|c| c.state_mut::<Waiting>()) {
            waiting.state = State::Here;
            turn.shared().wait_queues.note_returned(&waiting.ticket, &turn.shared().mailboxes);
        }
        self.clients.push(handle);
        down.stall(turn, handle, Stall::Turn);
        down.resume(handle);
    }
}

/// Ends the wait of a recalled command whose keys cannot be reached.
fn lose_reissued(turn: &Turn, down: &mut Downstreams, handle: Handle, why: &str) {
    if let Some(client) = down.get(handle) {
        debug!(client = client.identity().id(), reason = why, "closing a client that can no longer wait for its keys");
    }
    end_reissued(turn, down, handle, WaitEnd::Lost);
}

/// Ends a wait at the router.
pub(super) fn end_reissued(turn: &Turn, down: &mut Downstreams, handle: Handle, end: WaitEnd) {
    let Some(client) = down.get_mut(handle) else { return };
    let (Some(waiting), resp3, held) = (client.take_state::<Waiting>(), client.resp3(), client.take_held()) else {
        return;
    };
    client.take_state::<Moving>();
    client.take_state::<ColocateWait>();
    client.waits_mut().take_refusal();
    if client.stall() == Stall::Exclusive {
        down.emit(ClientEvent::LeavesLine { client: handle });
    }
    if let Some(held) = held {
        down.give_back(handle, held);
    }
    down.unstall(turn, handle);
    match end.reply(resp3) {
        Some(reply) => down.deliver(turn, handle, waiting.seq, &reply),
        None => down.end_as_a_server_would(turn, handle, waiting.seq),
    }
    leave_line(turn, &waiting);
}

impl ReissuedCommands {
    /// Ends waits with an expired timeout, also in line or for keys.
    pub(super) fn tick_reissued(&mut self, turn: &Turn, down: &mut Downstreams) {
        let clients = &down;
        self.clients.retain(|h| clients.get(*h).is_some_and(Client::is_reissued));
        let is_over = |h: &Handle| {
            clients
                .get(*h)
                .and_then(|c| c.state::<Waiting>())
                .and_then(|w| w.until_us)
                .is_some_and(|until_us| until_us <= turn.now_us())
        };
        let over: Vec<Handle> = self.clients.iter().copied().filter(is_over).collect();
        for handle in over {
            end_reissued(turn, down, handle, WaitEnd::OutOfTime);
        }
        for handle in &self.clients {
            let Some(waiting) = down.get_mut(*handle).and_then(|client| client.state_mut::<Waiting>()) else {
                continue;
            };
            if (1..=turn.now_us()).contains(&waiting.not_before_us) {
                waiting.not_before_us = 0;
                down.resume(*handle);
            }
        }
    }
}

/// Ends the wait of the command on this connection, so that it can be reissued elsewhere.
pub(super) fn reissue_waiting(cx: &mut Context, link: Handle) {
    let Some(holder) = cx.up.get(link).map(Link::holder) else { return };
    if let Some(waiting) = cx.down.get_mut(holder).and_then(|c| c.state_mut::<Waiting>()) {
        cx.turn.shared().wait_queues.reissue(&waiting.ticket, cx.turn.index(), holder);
        waiting.state = State::Ending;
        waiting.ends = open_ends(&waiting.request).into_iter().map(|(id, _)| (id, None)).collect();
    }
    unblock(cx, link, true, None);
}

/// Recalls the command of a client that is overtaking another client, which began to wait earlier but reaches the
/// node later.
/// the node later.
pub(super) fn on_reissue(cx: &mut Context, handle: Handle) {
    let Some(client) = cx.down.get(handle) else { return };
    let is_there = client.state::<Waiting>().is_some_and(|w| matches!(w.state, State::There | State::Sent { .. }));
    if let Some(link) = client.held().filter(|_| is_there) {
        reissue_waiting(cx, link);
    }
}

impl ReissuedCommands {
    /// Handles an error at the head of a connection. Returns true if it only reports that a wait was ended at our
    /// request, or that a member of a cluster does not serve the keys of the command.
    pub(super) fn take_reissued(&mut self, cx: &mut Context, link_handle: Handle, answer: &[u8]) -> bool {
        let is_cluster = cx.turn.routing().topology.is_of_cluster();
        let redirect = reply::text(answer).filter(|_| is_cluster).and_then(Redirect::of);
        // The second form: the member has become a replica.
        let is_redirected = redirect.is_some() || is_cluster && answer.starts_with(b"-UNBLOCKED force");
        let is_ended = is_redirected || answer.starts_with(b"-UNBLOCKED");
        let Some(link) = cx.up.get(link_handle).filter(|l| l.lane() == Lane::Blocking && is_ended) else {
            return false;
        };
        let from = link.node();
        let Some(pending) =
            link.head().copied().filter(|p| p.purpose == Purpose::Client && !link.requests().is_head_expired())
        else {
            return false;
        };
        let Some(client) = cx.down.get_mut(pending.who) else { return false };
        let resp3 = client.resp3();
        let is_over = |waiting: &&mut Waiting| waiting.state == State::Ending || is_redirected;
        let Some(waiting) = client.state_mut::<Waiting>().filter(|waiting| waiting.seq == pending.seq).filter(is_over)
        else {
            return false;
        };
        let unblocked = waiting.unblocked;
        if is_redirected {
            if waiting.state != State::Ending {
                cx.turn.shared().wait_queues.reissue(&waiting.ticket, cx.turn.index(), pending.who);
            }
            waiting.asked = redirect.and_then(|redirect| follow_redirect(&cx.turn, redirect, from));
            waiting.not_before_us = if waiting.asked.is_some() { 0 } else { cx.turn.now_us() + REDIRECT_PAUSE_US };
        }
        client.take_held();
        let mut askers = Vec::new();
        if let Some(link) = cx.up.get_mut(link_handle) {
            askers = link
                .checkout_mut()
                .and_then(Checkout::unblock_mut)
                .map(|unblock| unblock.take_askers())
                .unwrap_or_default();
            if let Some(ended) = link.taken_out() {
                cx.hooks.over(&cx.turn, ended, answer);
            }
        }
        match unblocked.or(askers.first().map(|(_, error)| *error)) {
            None => self.is_here(&cx.turn, &mut cx.down, pending.who),
            // A client wanted to end it as well: then this is the end, in the requested form, and only once.
            Some(error) => {
                let end = if error { WaitEnd::Unblocked } else { WaitEnd::OutOfTime };
                cx.down.deliver(&cx.turn, pending.who, pending.seq, &end.reply(resp3).unwrap_or_default());
            }
        }
        for (number, (asker, _)) in askers.into_iter().enumerate() {
            asker.answer(
                &cx.turn.shared().mailboxes,
                if number == 0 && unblocked.is_none() { b":1\r\n" } else { b":0\r\n" },
            );
        }
        cx.up.after_exclusive_reply(&cx.turn, link_handle);
        true
    }

    /// Reissues a command that is at the router, if it can wait for its keys now.
    pub(super) fn issue_again(&mut self, cx: &mut Context, handle: Handle) {
        let Some(waiting) = cx.down.get(handle).and_then(|c| c.state::<Waiting>()) else { return };
        if waiting.ends.iter().any(|(_, end)| end.is_none()) {
            return; // until the ends of its streams are known
        }
        if waiting.not_before_us > cx.turn.now_us() {
            return cx.down.stall(&cx.turn, handle, Stall::Turn);
        }
        let asked = waiting.asked.filter(|node| cx.turn.routing().topology.node(*node).is_some());
        let (request, seq, until_us) = (waiting.request.clone(), waiting.seq, waiting.until_us);
        let ticket = waiting.ticket.clone();
        let request =
            if waiting.ends.is_empty() { request } else { with_arguments(&request, &waiting.ends).unwrap_or(request) };
        let (node, waited) = match place_again(&cx.turn, &mut cx.down, &mut cx.hooks, handle, &request) {
            Ok(Some(place)) => place,
            Ok(None) => return,
            Err(why) if why.starts_with("NODE") => return lose_reissued(&cx.turn, &mut cx.down, handle, &why),
            Err(text) => return end_reissued(&cx.turn, &mut cx.down, handle, WaitEnd::Error(text)),
        };
        let node = asked.unwrap_or(node);
        let resp3 = cx.down.get(handle).is_some_and(|client| client.resp3());
        let (clients, reissued) = (&cx.down, &self);
        cx.up.pool(&cx.turn, node, Lane::Blocking).make_ahead(resp3, |most| reissued.count_of(clients, resp3, most));
        if !cx.turn.shared().wait_queues.is_turn(&ticket, &cx.turn.shared().mailboxes) {
            return cx.down.stall(&cx.turn, handle, Stall::Turn);
        }
        // It may have got a connection to another node while in line.
        let held = cx.down.get(handle).and_then(|client| client.held());
        if let Some(held) = held.filter(|held| cx.up.get(*held).is_none_or(|link| link.node() != node)) {
            cx.down.give_back(handle, held);
        }
        let link = match acquire(cx, handle, node, Lane::Blocking) {
            Acquired::Link(link) => link,
            Acquired::Wait => return,
            Acquired::Refused(why) => return lose_reissued(&cx.turn, &mut cx.down, handle, &why),
        };
        // The state may have changed before it had a connection.
        if !cx.turn.shared().wait_queues.go(&ticket, cx.turn.index(), handle, &cx.turn.shared().mailboxes) {
            cx.down.give_back(handle, link);
            return cx.down.stall(&cx.turn, handle, Stall::Turn);
        }
        // 0 would mean no timeout.
        let left_us = until_us.map(|until| until.saturating_sub(cx.turn.now_us()).max(1000));
        let request = left_us.and_then(|us| with_time_left(&request, us.div_ceil(1000))).unwrap_or(request);
        if asked.is_some() {
            cx.up.push_own(&cx.turn, link, &[b"ASKING"], Purpose::Discarded, 0);
        }
        push_exclusive(cx, handle, link, Call::Bytes(&request), &request, CommandClass::Blocking as u8, Some(seq));
        wait_at_node(cx, handle, link, waited, left_us);
        if let Some(client) = cx.down.get_mut(handle) {
            client.note_written(node, Since::now(cx.turn.shared(), cx.turn.routing()));
            if let Some(waiting) = client.state_mut::<Waiting>() {
                waiting.state = State::Sent { look: 0, since_us: cx.turn.now_us() };
                waiting.asked = None;
                // From here on it has the IDs of its start instead of `$`.
                if !waiting.ends.is_empty() {
                    waiting.request = request;
                    waiting.ends = Vec::new();
                }
            }
        }
        // If its keys are separated again, the next wait for them has the whole timeout.
        end_colocation(&mut cx.down, handle);
        self.query_blocked_state(cx, link);
    }

    /// Queries the node of a connection whether the client of a reissued command waits there.
    fn query_blocked_state(&mut self, cx: &mut Context, link_handle: Handle) {
        let Some(link) = cx.up.get(link_handle) else { return };
        let (holder, client_id, run_id) =
            (link.holder(), link.client_id().to_string(), link.run_id().map(str::to_owned));
        let Some(main) = cx.up.links().main_to(link.node(), run_id.as_deref()) else {
            return is_there(&cx.turn, &mut cx.down, holder);
        };
        self.last_look = self.last_look.wrapping_add(1);
        let number = self.last_look;
        if let Some(Waiting { state: State::Sent { look, .. }, .. }) =
            cx.down.get_mut(holder).and_then(|c| c.state_mut::<Waiting>())
        {
            *look = number;
            cx.up.push_own_for(
                &cx.turn,
                main,
                link_handle,
                &[b"CLIENT", b"LIST", b"ID", client_id.as_bytes()],
                Purpose::Look,
                number,
            );
        }
    }

    /// Handles the node's answer to this query, or an error.
    pub(super) fn on_look(&mut self, cx: &mut Context, link_handle: Handle, number: u32, answer: &[u8]) {
        let Some(link) = cx.up.get(link_handle) else { return };
        let (holder, client_id) = (link.holder(), link.client_id());
        // The wait may have ended, and the connection may belong to another client.
        let since_us = match cx.down.get(holder).and_then(|c| c.state::<Waiting>()).map(|w| w.state) {
            Some(State::Sent { look, since_us }) if look == number => since_us,
            _ => return,
        };
        if reply::is_error(answer)
            || is_shown_waiting(answer, client_id)
            || cx.turn.now_us().saturating_sub(since_us) > LOOKS_US
        {
            is_there(&cx.turn, &mut cx.down, holder);
        } else {
            self.query_blocked_state(cx, link_handle);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_clients_shows_blocked_ones() {
        let list = b"$99\r\nid=17 addr=1.2.3.4:5 name=flags=b flags=N db=0\nid=7 addr=1.2.3.4:6 name= flags=Ob db=0 cmd=blpop\n\r\n";
        assert!(is_shown_waiting(list, 7) && !is_shown_waiting(list, 17) && !is_shown_waiting(list, 1));
        assert!(is_shown_waiting(b"=19\r\ntxt:id=7 flags=b\n\r\n", 7) && !is_shown_waiting(b"$0\r\n\r\n", 7));
    }

    #[test]
    fn a_command_is_issued_again_with_the_time_that_is_left() {
        let request = |args: &[&str]| {
            let mut out = Vec::new();
            encode::command(&mut out, args.iter().map(|a| a.as_bytes()));
            out
        };
        for (before, after) in [
            (&["BLPOP", "a", "b", "5"][..], &["BLPOP", "a", "b", "1.250"][..]),
            (&["blmpop", "5", "1", "a", "LEFT"], &["blmpop", "1.250", "1", "a", "LEFT"]),
            (
                &["XREAD", "COUNT", "1", "block", "5000", "STREAMS", "a", "$"],
                &["XREAD", "COUNT", "1", "block", "1250", "STREAMS", "a", "$"],
            ),
            (
                &["XREADGROUP", "GROUP", "block", "c", "BLOCK\0", "5000", "STREAMS", "a", ">"],
                &["XREADGROUP", "GROUP", "block", "c", "BLOCK\0", "1250", "STREAMS", "a", ">"],
            ),
        ] {
            assert_eq!(with_time_left(&request(before), 1250), Some(request(after)));
        }
    }
}
