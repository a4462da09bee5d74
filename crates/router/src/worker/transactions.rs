//! MULTI, EXEC, DISCARD, WATCH, UNWATCH.
//!
//! **The router queues.** Between MULTI and EXEC a command is checked (name, arity, keys in the slot of the earlier
//! ones) and stored. EXEC sends MULTI, the commands and EXEC to the node in one piece. So a transaction needs no
//! connection of its own: on a shared connection nothing comes between its commands, and a client that disconnects
//! between MULTI and EXEC leaves nothing at a node. Errors that only the node can find (its own access rules, no
//! memory) occur when it queues, and EXEC fails with EXECABORT, as in Redis. The error contains the reason, because the
//! client has not seen it.
//!
//! **WATCH takes a connection**, because the node keeps watches by connection. It is held until EXEC, DISCARD or
//! UNWATCH. If it is lost, or a key has moved by the time of EXEC, EXEC answers nil: the transaction was not executed,
//! and the client retries. It never succeeds without the watch.
//!
//! The alternative, a connection from MULTI on with each command sent at once, would cost a round trip per command, and
//! a connection per client inside a transaction.

mod exec;
mod place;
pub(super) mod rehearsal;
pub(super) mod session;

use std::collections::BTreeSet;
use std::sync::Arc;

use switchyard_policy::colocate::ColocationRequest;
use switchyard_policy::routing::Route;
use switchyard_policy::topology::{NodeId, Slot};
use switchyard_resp::command::Local;
use switchyard_resp::{encode, reply};

use super::checkout::{Acquired, push_exclusive, take_exclusive};
use super::colocate::{wait_for_colocation, wanted_of_several};
use super::command::{Call, CommandSeq, KeyedCommand};
use super::context::Context;
use super::downstreams::waits::Stall;
use super::downstreams::{Client, ClientEvent, Downstreams};
use super::flow::Flow;
use super::gather::no_multi_text;
use super::invocation::Invocation;
use super::keyed::{CommandHooks, Request};
use super::overrides::{apart_text, not_together, parted_text, slots_by, wanted_of};
use super::turn::Turn;
use super::upstreams::kind::Task;
use super::upstreams::pending::{Again, MULTI, Pending, Purpose};
use super::upstreams::translate::note_transaction;
use super::upstreams::{Link, Upstreams};
use super::wait::state::Since;
use crate::lane::Lane;
use crate::lock::lock;
use crate::single_node_usage::Limit;
use crate::slab::Handle;
use place::NotTogether;
use session::{Published, Resend, Session, UnderWay, Watch};

const ABORTED: &str = "EXECABORT Transaction discarded because of previous errors.";

/// Age of a WATCH, without other activity of its client, after which its connection may be taken for a waiting client.
const RECALL_US: u64 = 60_000_000;

/// After a change of the keys' slots at the same nodes: places queued commands and watched keys as if they came now.
/// Aborts transactions whose commands would be refused now, or that were checked by the earlier placement.
pub(super) fn place_anew(turn: &Turn, down: &mut Downstreams) {
    let routing = Arc::clone(turn.routing());
    let is_only = routing.topology.only_node().is_some();
    let takes_several = is_only || routing.colocates();
    for handle in down.handles() {
        let Some(session) = down.get_mut(handle).and_then(|client| client.state_mut::<Session>()) else { continue };
        if session.multi.slot.is_some() {
            let requests = session.multi.requests();
            let slots: BTreeSet<Slot> = requests.iter().flat_map(|request| slots_by(&routing, request)).collect();
            session.multi.slot = slots.first().copied().or(session.multi.slot);
            session.multi.are_apart = slots.len() > 1;
            // A single one would be refused now.
            session.multi.aborted |= slots.len() != 1 && !takes_several;
        }
        session.multi.aborted |= session.multi.has_checks_by_placement && !is_only;
        if let Some(watch) = &mut session.watch {
            let slots: BTreeSet<Slot> = watch.keys.iter().map(|key| routing.topology.slot_of(key)).collect();
            watch.slot = slots.first().copied().unwrap_or(watch.slot);
            watch.are_apart = slots.len() > 1;
            session.watch_failed |= watch.are_apart && !takes_several;
            let is_elsewhere = session.multi.slot.is_some_and(|slot| slot != watch.slot);
            session.multi.are_apart |= is_elsewhere;
            session.multi.aborted |= is_elsewhere && !takes_several;
        }
    }
}

/// Updates the client after EXEC. `executed`: whether the node has executed the commands.
pub(super) fn after_exec(client: &mut Client, executed: bool) {
    if let Some(database) = client.state_mut::<Session>().and_then(|s| s.select.take())
        && executed
    {
        client.select(database);
    }
}

/// Returns a reply to EXEC with our clients counted instead of our workers, like PUBLISH outside of a transaction.
fn with_counts(turn: &Turn, node: NodeId, published: &[Published], answer: &[u8]) -> Vec<u8> {
    let elements = reply::elements(answer);
    let mut out = Vec::with_capacity(answer.len() + 16);
    encode::header(&mut out, b'*', elements.remaining() as usize);
    for (place, element) in elements.enumerate() {
        let message = published.iter().find(|p| p.place == place);
        match message.and_then(|p| Some((p, reply::integer(element)?))) {
            Some((p, count)) => encode::integer(&mut out, turn.count_of_publish(p.kind, &p.channel, node, count)),
            None => out.extend_from_slice(element),
        }
    }
    out
}

/// Whether the watch of a client may have been lost, so that EXEC will answer nil.
pub(super) fn is_dirty(turn: &Turn, up: &Upstreams, hooks: &CommandHooks, handle: Handle, client: &Client) -> bool {
    let Some(session) = client.state::<Session>() else { return false };
    session.watch_failed
        || session.watch.as_ref().is_some_and(|watch| {
            let moved = !hooks.are_used_at(turn, watch.keys.iter().map(|key| &**key), watch.node);
            let other_protocol = up.get(watch.link).is_some_and(|l| l.resp3() != client.resp3());
            moved || other_protocol || !up.links().is_watching(handle, watch.link, watch.node)
        })
}

/// Ends a transaction, if there is one, without executing it.
pub(super) fn discard(down: &mut Downstreams, handle: Handle) {
    if let Some(client) = down.get_mut(handle) {
        client.set_in_multi(false);
        if let Some(session) = client.state_mut::<Session>() {
            session.multi.clear();
        }
    }
    unwatch(down, handle);
}

fn unwatch(down: &mut Downstreams, handle: Handle) {
    let Some(session) = down.get_mut(handle).and_then(|c| c.state_mut::<Session>()) else { return };
    session.watch_failed = false;
    if let Some(watch) = session.watch.take() {
        down.emit(ClientEvent::Abandons { client: handle, link: watch.link });
    }
}

/// Handles a failed WATCH. EXEC will answer nil, once: the client may have sent its transaction without waiting for
/// the answer to WATCH, and then relies on it. Whether it has seen the error is unknown, however late MULTI comes.
/// UNWATCH and DISCARD reset this, as they end every watch.
pub(super) fn fail_watch(down: &mut Downstreams, handle: Handle) {
    unwatch(down, handle);
    if let Some(client) = down.get_mut(handle) {
        client.state_or_default::<Session>().watch_failed = true;
    }
}

/// Fails the watch of a client, if it has one.
fn watch_failed(down: &mut Downstreams, handle: Handle) {
    if down.get(handle).is_some_and(|client| client.state().is_some_and(Session::is_watching)) {
        fail_watch(down, handle);
    }
}

/// Handles the node's answer to WATCH.
pub(super) fn on_watch(turn: &Turn, down: &mut Downstreams, pending: Pending, answer: &[u8]) {
    if reply::is_error(answer) {
        fail_watch(down, pending.who);
    }
    down.deliver(turn, pending.who, pending.seq, answer);
}

/// The queued commands need keys of different nodes together: EXEC waits until they are. If this moves a watched key,
/// EXEC then answers nil, as after every change of a watched key.
#[cold]
fn exec_after_colocation(
    turn: &Turn,
    down: &mut Downstreams,
    handle: Handle,
    class: u8,
    NotTogether { text, wanted }: NotTogether,
) -> Flow {
    let waits = match wanted {
        Some(wanted) => wait_for_colocation(turn, down, handle, "EXEC", wanted, || text),
        None => Err(text),
    };
    waits.unwrap_or_else(|text| {
        discard(down, handle);
        down.refuse(turn, handle, class, &text)
    })
}

/// After a change of the snapshot: fails watches of keys at nodes where they are no longer used. Such a key may
/// change elsewhere unnoticed by that node, and be back there unchanged when EXEC comes.
pub(super) fn fail_stale_watches(turn: &Turn, up: &Upstreams, down: &mut Downstreams, hooks: &mut CommandHooks) {
    let holders = up.links().iter().filter(|(_, link)| link.task() == Task::Watching).map(|(_, link)| link.holder());
    let is_left = |watch: &Watch| !hooks.are_used_at(turn, watch.keys.iter().map(|key| &**key), watch.node);
    let watch = |client: &Client| client.state::<Session>().and_then(|s| s.watch.as_ref()).is_some_and(is_left);
    let left: Vec<Handle> = holders.filter(|holder| down.get(*holder).is_some_and(watch)).collect();
    for holder in left {
        if let Some(client) = down.get_mut(holder) {
            client.state_or_default::<Session>().watch_failed = true;
        }
    }
}

/// Handles WATCH, UNWATCH, and MULTI, DISCARD and EXEC outside of a transaction.
pub(super) fn transaction(cx: &mut Context, call: &Invocation<'_>, local: Local) -> Flow {
    let Invocation { handle, command, .. } = *call;
    let class = command.class() as u8;
    match local {
        Local::Exec => return cx.down.refuse(&cx.turn, handle, class, "ERR EXEC without MULTI"),
        Local::Discard => return cx.down.refuse(&cx.turn, handle, class, "ERR DISCARD without MULTI"),
        Local::Watch => return watch(cx, call),
        Local::Unwatch => unwatch(&mut cx.down, handle),
        _ => {
            if let Some(client) = cx.down.get_mut(handle) {
                client.set_in_multi(true);
                client.state_or_default::<Session>().multi.clear();
            }
        }
    }
    cx.down.answer(&cx.turn, handle, class, b"+OK\r\n");
    Flow::Next
}

/// Refuses a WATCH, or makes it wait for its keys. `wanted`: the request that brings them together, or the error.
#[cold]
fn watch_later(
    turn: &Turn,
    down: &mut Downstreams,
    call: &Invocation<'_>,
    wanted: Result<ColocationRequest, String>,
    text: impl FnOnce() -> String,
) -> Flow {
    let Invocation { handle, command, .. } = *call;
    let waits = wanted.and_then(|wanted| wait_for_colocation(turn, down, handle, &command.name, wanted, text));
    waits.unwrap_or_else(|text| {
        watch_failed(down, handle);
        down.refuse(turn, handle, command.class() as u8, &text)
    })
}

fn watch(cx: &mut Context, call: &Invocation<'_>) -> Flow {
    let Invocation { routing, handle, command, raw, args, .. } = *call;
    let class = command.class() as u8;
    let keys = args.iter().skip(1);
    let Some(first) = args.get(1) else { return Flow::Close };
    let target = routing.route(keys.clone());
    let Some(client) = cx.down.get_mut(handle) else { return Flow::Close };
    let session = client.state_or_default::<Session>();
    let (has_failed, watch) = (session.watch_failed, session.watch.as_ref());
    let before = watch.map(|watch| (watch.slot, watch.link, watch.node));
    let are_others_apart = watch.is_some_and(|watch| watch.are_apart);
    let (slot, node) = match target {
        Route::Owner(slot, node) => (slot, Some(node)),
        Route::Together(node) => (routing.topology.slot_of(first), Some(node)),
        Route::Parted(_) | Route::CrossSlot | Route::Anywhere => (routing.topology.slot_of(first), None),
    };
    if has_failed && node.is_some() {
        // EXEC will answer nil regardless of further watches.
        cx.down.answer(&cx.turn, handle, class, b"+OK\r\n");
        return Flow::Next;
    }
    let are_apart = matches!(target, Route::Together(_) | Route::CrossSlot)
        || are_others_apart
        || before.is_some_and(|(other, ..)| other != slot);
    let watched = |cx: &Context| {
        let session = cx.down.get(handle).and_then(|c| c.state::<Session>());
        let mut all = session.and_then(|s| s.watch.as_ref()).map(|watch| watch.keys.clone()).unwrap_or_default();
        all.extend(args.iter().skip(1).map(Box::from));
        all
    };
    let only = routing.topology.only_node();
    if are_apart && (only.is_none() || cx.hooks.groups.has_room()) {
        let all = watched(&*cx);
        cx.hooks.groups.note(all.iter().map(|key| &**key));
        let text = || apart_text(routing, all.iter().map(|key| &**key));
        if only.is_none() && !routing.colocates() {
            return watch_later(&cx.turn, &mut cx.down, call, Err(text()), text);
        }
        let at = before.map(|(.., at)| at);
        if node.is_none() || at.is_some() && at != node {
            let keys = all.iter().map(|key| Arc::from(&**key)).collect();
            return watch_later(&cx.turn, &mut cx.down, call, wanted_of_several(routing, keys, at), text);
        }
    }
    let Some(node) = node else {
        let wanted = wanted_of(routing, keys.clone());
        let text = || not_together(&cx.turn, routing, keys);
        return watch_later(&cx.turn, &mut cx.down, call, Ok(wanted), text);
    };
    if let Some((.., at)) = before.filter(|(.., at)| *at != node && routing.topology.has_override(slot)) {
        let wanted = wanted_of(routing, watched(&*cx).iter().map(|key| &**key));
        let other = if at == routing.topology.owner(slot) { node } else { at };
        let text = || parted_text(&cx.turn, routing, slot, other);
        return watch_later(&cx.turn, &mut cx.down, call, Ok(wanted), text);
    }
    let link = match before.map(|(slot, link, _)| (slot, link)) {
        // Failed already: EXEC will answer nil regardless of further watches.
        Some((_, link)) if !cx.up.links().is_watching(handle, link, node) => {
            watch_failed(&mut cx.down, handle);
            cx.down.answer(&cx.turn, handle, class, b"+OK\r\n");
            return Flow::Next;
        }
        Some((_, link)) => {
            if !cx.down.get_mut(handle).is_some_and(|c| c.may_take(Lane::Watch)) {
                return Flow::Stall(Stall::Barrier);
            }
            link
        }
        None => match take_exclusive(cx, handle, node, Lane::Watch) {
            Ok(Acquired::Link(link)) => link,
            Ok(Acquired::Refused(text)) => {
                fail_watch(&mut cx.down, handle);
                return cx.down.refuse(&cx.turn, handle, class, &text);
            }
            Ok(Acquired::Wait) => return Flow::Stall(Stall::Exclusive),
            Err(flow) => return flow,
        },
    };
    push_exclusive(cx, handle, link, Call::Found(command, args), raw, class, None);
    if let Some(link) = cx.up.get_mut(link) {
        link.checkout_mut().into_iter().for_each(|checkout| checkout.begin_task(Task::Watching));
        if let Some(pending) = link.last_mut() {
            pending.purpose = Purpose::Watch;
        }
    }
    // From now on it belongs to the watch, not to the command.
    if let Some(client) = cx.down.get_mut(handle) {
        client.take_held();
    }
    if let Some(client) = cx.down.get_mut(handle) {
        let watch = client.state_or_default::<Session>().watch.get_or_insert(Watch {
            slot,
            are_apart,
            node,
            keys: Vec::new(),
            link,
        });
        watch.are_apart |= are_apart;
        watch.keys.extend(args.iter().skip(1).map(Box::from));
    }
    if are_apart && !routing.colocates() {
        cx.hooks.tally.note(&command.name, Limit::Slots);
    }
    Flow::Next
}

/// A transaction on an exclusive connection.
fn exec_alone(cx: &mut Context, handle: Handle, node: NodeId, lane: Lane, class: u8) -> Flow {
    match take_exclusive(cx, handle, node, lane) {
        Ok(Acquired::Link(link)) => {
            if let Some(client) = cx.down.get_mut(handle) {
                client.hold(link);
            }
            if let Some(checkout) = cx.up.get_mut(link).and_then(Link::checkout_mut) {
                checkout.lend(handle);
            }
            send_transaction(cx, handle, link, class, false)
        }
        Ok(Acquired::Refused(text)) => {
            discard(&mut cx.down, handle);
            cx.down.refuse(&cx.turn, handle, class, &text)
        }
        Ok(Acquired::Wait) => Flow::Stall(Stall::Exclusive),
        Err(flow) => flow,
    }
}

/// Puts MULTI, the queued commands, and EXEC on a connection. `is_watched`: it has the client's watch.
fn send_transaction(cx: &mut Context, handle: Handle, link_handle: Handle, class: u8, is_watched: bool) -> Flow {
    let refusal = cx.up.get(link_handle).and_then(|l| l.no_multi().map(|why| (why.to_owned(), l.node())));
    if let Some((why, node)) = refusal {
        discard(&mut cx.down, handle);
        cx.up.after_exclusive_reply(&cx.turn, link_handle);
        return cx.down.refuse(&cx.turn, handle, class, &no_multi_text(&cx.turn, node, &why));
    }
    let scripts =
        cx.down.get(handle).and_then(|c| c.state::<Session>()).map(|s| s.multi.scripts.clone()).unwrap_or_default();
    load_scripts(cx, link_handle, &scripts);
    let epoch = cx.turn.routing().topology.epoch() as u32;
    let sent_us = cx.turn.now_us() as u32;
    let Some(client) = cx.down.get_mut(handle) else { return Flow::Close };
    let seq = client.owe(cx.turn.now_us(), class);
    client.replies_mut().note_write(cx.turn.now_us());
    let (database, no_touch) = (client.database(), client.no_touch());
    let mut multi = std::mem::take(&mut client.state_or_default::<Session>().multi);
    if let Some(limit) = multi.alone {
        cx.hooks.tally.note("EXEC", limit);
    }
    // An unknown database has no effect: the node returns an error.
    let keepers = cx.turn.data_nodes().all();
    client.state_or_default::<Session>().select =
        multi.selects.iter().copied().rfind(|database| cx.turn.shared().has_database(&keepers, *database));
    let resend = multi.slot.filter(|_| cx.turn.routing().topology.is_of_cluster()).map(|slot| {
        let (queue, commands) = (multi.queue.clone(), multi.commands.clone());
        Box::new(Resend { queue, commands, scripts, slot, slow: multi.slow, is_watched })
    });
    let under_way =
        UnderWay { published: std::mem::take(&mut multi.published), own: std::mem::take(&mut multi.own), resend };
    let has_own = !under_way.own.is_empty();
    if has_own || !under_way.published.is_empty() || under_way.resend.is_some() {
        client.state_or_default::<Session>().under_way.push_back((seq, under_way));
    }
    client.set_in_multi(false);
    if let Some(link) = cx.up.get_mut(link_handle) {
        note_transaction(&cx.turn, link, &multi.queue, multi.commands.iter().map(|(len, _)| *len as usize));
    }
    let Some(client) = cx.down.get_mut(handle) else { return Flow::Close };
    let Some(link) = cx.up.get_mut(link_handle) else { return Flow::Close };
    let node = link.node();
    if multi.writes {
        client.note_written(node, Since::now(cx.turn.shared(), cx.turn.routing()));
    }
    if let Some(checkout) = link.checkout_mut() {
        checkout.end_task();
        checkout.note_slow(multi.slow);
    }
    let queued = Pending {
        who: Handle::NONE,
        seq: 0,
        len: 0,
        sent_us,
        epoch,
        purpose: Purpose::Queued,
        class,
        again: Again::Never,
        is_long: false,
        end: CommandSeq::NONE,
        cacheable: cx.turn.cacheable(),
    };
    link.touch_as(no_touch, queued);
    let exec = Pending { who: handle, seq, purpose: Purpose::Exec, ..queued };
    push_commands(cx, link_handle, database, exec, &multi.queue, &multi.commands);
    if has_own {
        // Later commands depend on their changes.
        cx.down.stall(&cx.turn, handle, Stall::Barrier);
    }
    if multi.has_select {
        // Whether or not it was executed, the next command finds the connection in the expected database.
        cx.up.push_own(&cx.turn, link_handle, &[b"SELECT", database.to_string().as_bytes()], Purpose::Discarded, 0);
        cx.down.stall(&cx.turn, handle, Stall::Barrier);
    }
    multi.clear();
    if let Some(client) = cx.down.get_mut(handle) {
        client.state_or_default::<Session>().multi = multi;
    }
    Flow::Next
}

/// Loads scripts before a transaction, where NOSCRIPT would come too late to be healed.
fn load_scripts(cx: &mut Context, link: Handle, scripts: &[[u8; 40]]) {
    for sha in scripts {
        let body = lock(&cx.turn.shared().scripts).text(sha);
        if let Some(body) = body {
            cx.up.push_own(&cx.turn, link, &[b"SCRIPT", b"LOAD", &body], Purpose::Discarded, 0);
        }
    }
}

/// Puts MULTI, commands and EXEC on a connection. `exec`: the entry of EXEC.
fn push_commands(cx: &mut Context, link: Handle, database: u32, exec: Pending, queue: &[u8], commands: &[(u32, u8)]) {
    let Some(node) = cx.up.get(link).map(Link::node) else { return };
    let queued = Pending { who: Handle::NONE, seq: 0, purpose: Purpose::Queued, ..exec };
    cx.up.push(link, Request::of_ours(MULTI, database, queued));
    let mut at = 0;
    for (number, (len, class)) in commands.iter().enumerate() {
        let bytes = &queue[at..at + *len as usize];
        let keyed = KeyedCommand { call: Call::Bytes(bytes), node, database };
        let pending = Pending { seq: number as u32 + 1, class: *class, ..queued };
        let request = cx.hooks.pass_queued(&cx.turn, keyed, bytes, pending);
        cx.up.push(link, request);
        at += *len as usize;
    }
    let exec = cx.hooks.pass_exec(database, exec);
    cx.up.push(link, exec);
}

/// Sends a transaction of a client again, after a redirect. `asks`: after `ASKING`. This state of the connection lasts
/// until the end of the transaction.
pub(super) fn push_again(
    cx: &mut Context,
    link: Handle,
    database: u32,
    exec: Pending,
    transaction: Box<Resend>,
    asks: bool,
) {
    load_scripts(cx, link, &transaction.scripts);
    if asks {
        cx.up.push_own(&cx.turn, link, &[b"ASKING"], Purpose::Discarded, 0);
    }
    let exec = Pending { purpose: Purpose::Exec, ..exec };
    push_commands(cx, link, database, exec, &transaction.queue, &transaction.commands);
    if let Some(client) = cx.down.get_mut(exec.who) {
        client.state_or_default::<Session>().note_resend(exec.seq, transaction);
    }
}

/// For clients that wait for a connection: takes the connections of clients with a WATCH that have been inactive
/// for long. Their EXEC will answer nil.
pub(super) fn reissue_watches(cx: &mut Context, node: NodeId) {
    let now_us = cx.turn.now_us();
    let is_quiet = |c: &Client| c.in_flight() == 0 && c.socket().quiet_us(now_us) > RECALL_US;
    let quiet: Vec<Handle> = cx
        .up
        .links()
        .iter()
        .filter(|(_, l)| l.task() == Task::Watching && l.node() == node)
        .map(|(_, l)| l.holder())
        .filter(|h| cx.down.get(*h).is_some_and(is_quiet))
        .collect();
    for holder in quiet {
        watch_failed(&mut cx.down, holder);
    }
}
