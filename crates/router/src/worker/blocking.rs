//! Blocking commands (BLPOP and similar, XREAD with BLOCK), and the ends of their wait: an element, a timeout, CLIENT
//! UNBLOCK, a disconnect of the client, a failure of the node.
//!
//! Such a command has an exclusive connection while it waits. Later commands of its client are not processed before its
//! reply, as in Redis. The connection then returns to its pool.
//!
//! **Ending a wait from outside** uses `CLIENT UNBLOCK` on the main connection rather than a closed socket: the
//! connection remains usable, and the reply indicates whether the wait was still active. The node may receive it before
//! the blocking command, on another connection, and then finds no wait: it is repeated until it succeeds or the command
//! is answered. While its reply is pending, the connection is not reused, because it could end the wait of another
//! client.
//!
//! **A frozen node** is not detected on connections with blocking commands, where silence is normal. So while clients
//! wait, the main connection is probed with PING; if it times out, the waiting connections are closed as well.

use std::sync::atomic::Ordering;

use switchyard_policy::topology::NodeId;
use switchyard_resp::command::{CommandClass, Flags};
use switchyard_resp::reply;
use tracing::warn;

use super::checkout::{Acquired, push_exclusive, take_exclusive};
use super::command::Call;
use super::context::Context;
use super::downstreams::waits::Stall;
use super::downstreams::{Client, Downstreams};
use super::flow::Flow;
use super::invocation::Invocation;
use super::keyed::CommandHooks;
use super::overrides::slots_by;
use super::reissued::state::Waiting;
use super::reissued::{
    ReissuedCommands, WaitEnd, end_reissued, keep_waiting, note_kept, reissue_waiting, streams_seen,
    streams_to_look_at, streams_unseen,
};
use super::turn::Turn;
use super::upstreams::Link;
use super::upstreams::connect::{push_own_exec, push_own_queued};
use super::upstreams::kind::{Checkout, Task, Waited};
use super::upstreams::pending::Purpose;
use super::upstreams::unblock::{Asker, Unblock};
use super::wait::state::Since;
use crate::lane::Lane;
use crate::slab::Handle;
use crate::wait_queues::QueueSlots;

/// Whether keys of a waiting client are in a slot in transit.
fn waits_on_the_way(turn: &Turn, down: &Downstreams, waited: Waited, holder: Handle) -> bool {
    let topology = &turn.routing().topology;
    if topology.is_settled() {
        return false;
    }
    match (waited, down.get(holder).and_then(|client| client.state::<Waiting>())) {
        (Waited::Nothing, _) | (_, None) => false,
        (Waited::Of(slot), _) if topology.placement().is_constant() => topology.transit(slot).is_some(),
        (_, Some(waiting)) => {
            slots_by(turn.routing(), waiting.request()).into_iter().any(|slot| topology.transit(slot).is_some())
        }
    }
}

/// Whether an error at the end of a wait is caused by the stop of the router or by a role change of the node.
pub(super) fn is_end_of_waits(turn: &Turn, error: &[u8]) -> bool {
    error.starts_with(b"-UNBLOCKED force")
        || error.starts_with(b"-UNBLOCKED") && turn.shared().draining.load(Ordering::Relaxed)
}

/// Whether the keys of a waiting client are still served where it waits.
fn is_waiting_well(
    turn: &Turn,
    down: &Downstreams,
    hooks: &CommandHooks,
    waited: Waited,
    holder: Handle,
    node: NodeId,
) -> bool {
    let waiting = down.get(holder).and_then(|c| c.state::<Waiting>());
    match (waited, waiting) {
        (Waited::Nothing, _) => true,
        (Waited::Of(slot), Some(waiting)) => hooks.is_used_at(turn, slot, waiting.request(), node),
        (Waited::Of(slot), None) => hooks.routing_of_moved(turn).topology.owner(slot) == node,
        (Waited::Several, _) if turn.routing().topology.only_node() == Some(node) => true,
        (Waited::Several, Some(waiting)) => {
            turn.routing().colocates() && hooks.is_all_used_at(turn, waiting.request(), node)
        }
        // Its client has disconnected, and its wait is being ended.
        (Waited::Several, None) => true,
    }
}

impl ReissuedCommands {
    /// Sends a command that may block at the node. `slots`: slots of its keys; `None` without keys.
    #[cold]
    pub(super) fn block(
        &mut self,
        cx: &mut Context,
        call: &Invocation<'_>,
        node: NodeId,
        slots: Option<QueueSlots>,
    ) -> Flow {
        let Invocation { handle, command, raw, args, .. } = *call;
        // Also for XREAD, whose other calls do not block.
        let class = CommandClass::Blocking as u8;
        if cx.down.get(handle).is_some_and(Client::is_reissued) {
            return Flow::Stall(Stall::Barrier); // behind a command that is about to be reissued
        }
        let link = match take_exclusive(cx, handle, node, Lane::Blocking) {
            Ok(Acquired::Link(link)) => link,
            Ok(Acquired::Refused(_)) if cx.turn.node_fails(node) => {
                // As at the start of its wait: a single unreachable server accepts no connection.
                cx.turn.counters().cut_waiting.add(1);
                cx.down.close_after_replies(handle);
                return Flow::Close;
            }
            Ok(Acquired::Refused(text)) => return cx.down.refuse(&cx.turn, handle, class, &text),
            Ok(Acquired::Wait) => return Flow::Stall(Stall::Exclusive),
            Err(flow) => return flow,
        };
        let waits_us = command.waits_us(args);
        let waited = Waited::by(slots.as_ref());
        let ticket = slots.map(|slots| cx.turn.shared().wait_queues.enter(slots, cx.turn.index(), handle));
        if let Some((ticket, false)) = ticket {
            // Queue behind clients that wait for keys of these slots and move to this node.
            cx.down.give_back(handle, link);
            self.wait_in_line(&cx.turn, &mut cx.down, handle, raw, class, ticket, waits_us);
            return Flow::Next;
        }
        push_exclusive(cx, handle, link, Call::Found(command, args), raw, class, None);
        if let Some(client) = cx.down.get_mut(handle)
            && !command.flags.has(Flags::READONLY)
        {
            client.note_written(node, Since::now(cx.turn.shared(), cx.turn.routing()));
        }
        if let (Some(seq), Some((ticket, _))) = (cx.down.get(handle).map(|client| client.replies().last()), ticket) {
            keep_waiting(&cx.turn, &mut cx.down, handle, raw, seq, ticket, waits_us);
        }
        wait_at_node(cx, handle, link, waited, waits_us);
        Flow::Next
    }
}

/// Marks the client as blocked after its command was sent on `link`. `waits_us`: timeout, microseconds; `None`:
/// none.
pub(super) fn wait_at_node(
    cx: &mut Context,
    handle: Handle,
    link_handle: Handle,
    waited: Waited,
    waits_us: Option<u64>,
) {
    let Some(client) = cx.down.get_mut(handle) else { return };
    let gone = client.input().has_hung_up() || client.input().has_ended();
    cx.down.stall(&cx.turn, handle, Stall::Blocked);
    let grace_us = cx.turn.routing().live.command_timeout.as_micros() as u64;
    let until_us = waits_us.map_or(u64::MAX, |us| cx.turn.now_us().saturating_add(us).saturating_add(grace_us));
    if let Some(checkout) = cx.up.get_mut(link_handle).and_then(Link::checkout_mut) {
        checkout.begin_task(Task::Waiting { waited, until_us });
    }
    if gone {
        // The client has closed its side: it only gets data that is available at once.
        unblock(cx, link_handle, false, None);
    }
}

/// Ends the wait of a client because the router stops. The node ends it first, so that no element is lost.
pub(super) fn end_wait(cx: &mut Context, handle: Handle) {
    if cx.down.get(handle).is_some_and(Client::is_reissued) {
        return end_reissued(&cx.turn, &mut cx.down, handle, WaitEnd::Lost);
    }
    let held = cx.down.get(handle).and_then(|c| c.held());
    if let Some(link) = held
        && cx.up.get(link).is_some_and(|link| link.checkout().and_then(Checkout::unblock).is_none())
    {
        unblock(cx, link, true, None);
    }
}

/// Handles CLIENT UNBLOCK from a client of any worker.
pub(super) fn unblock_client(cx: &mut Context, id: u64, error: bool, asker: Asker) {
    let found = cx.down.iter().find(|(_, c)| c.identity().id() == id);
    if let Some((handle, _)) = found.filter(|(_, c)| c.is_reissued()) {
        // The command is not at a node, so no query is needed.
        end_reissued(&cx.turn, &mut cx.down, handle, if error { WaitEnd::Unblocked } else { WaitEnd::OutOfTime });
        return asker.answer(&cx.turn.shared().mailboxes, b":1\r\n");
    }
    let held = found
        .filter(|(_, c)| c.stall() == Stall::Blocked)
        .and_then(|(_, c)| Some((c.held()?, c.state().is_some_and(Waiting::is_ending))));
    match held {
        None => asker.answer(&cx.turn.shared().mailboxes, b":0\r\n"),
        Some((link, false)) => unblock(cx, link, error, Some(asker)),
        // A request is already in flight: its reply decides.
        Some((link, true)) => match cx.up.get_mut(link).and_then(Link::checkout_mut).map(Checkout::begin_unblock) {
            Some(unblock) => unblock.add(asker, error),
            None => asker.answer(&cx.turn.shared().mailboxes, b":0\r\n"),
        },
    }
}

/// Ends the wait of the command on this connection at the node.
pub(super) fn unblock(cx: &mut Context, link_handle: Handle, error: bool, asker: Option<Asker>) {
    let Some(unblock) = cx.up.get_mut(link_handle).and_then(Link::checkout_mut).map(Checkout::begin_unblock) else {
        if let Some(asker) = asker {
            asker.answer(&cx.turn.shared().mailboxes, b":0\r\n");
        }
        return;
    };
    if unblock.request(error, asker) {
        send_unblock(cx, link_handle);
    }
}

fn send_unblock(cx: &mut Context, link_handle: Handle) {
    let Some(link) = cx.up.get(link_handle) else { return };
    let (node, client_id) = (link.node(), link.client_id().to_string());
    // In another process, the id may belong to another client.
    let Some(main) = cx.up.links().main_to(node, link.run_id()) else {
        cx.up.break_link(
            &cx.turn,
            link_handle,
            "its client has disconnected, and CLIENT UNBLOCK cannot be sent to the node",
        );
        return;
    };
    let Some(link) = cx.up.get_mut(link_handle) else { return };
    let holder = link.holder();
    let Some(unblock) = link.checkout_mut().and_then(Checkout::unblock_mut) else { return };
    let reason = unblock.sent();
    let request = [&b"CLIENT"[..], b"UNBLOCK", client_id.as_bytes(), reason];
    match streams_to_look_at(&cx.down, holder) {
        None => cx.up.push_own_for(&cx.turn, main, link_handle, &request, Purpose::Unblock, 0),
        Some((database, streams)) => {
            // Atomically end the wait and read the last entry of each stream.
            push_own_queued(&cx.turn, &mut cx.up, &mut cx.hooks, main, database, &[b"MULTI"]);
            cx.up.push_own(&cx.turn, main, &request, Purpose::Discarded, 0);
            for stream in &streams {
                push_own_queued(&cx.turn, &mut cx.up, &mut cx.hooks, main, database, &[b"XINFO", b"STREAM", stream]);
            }
            push_own_exec(&cx.turn, &mut cx.up, &mut cx.hooks, main, link_handle, database, Purpose::Unblock);
        }
    }
}

/// Handles the reply to CLIENT UNBLOCK for a connection, or an error without a reply.
pub(super) fn on_unblock(cx: &mut Context, link_handle: Handle, answer: &[u8]) {
    let holder = cx.up.get(link_handle).map(Link::holder);
    let answer = match holder.filter(|_| answer.starts_with(b"*")) {
        Some(holder) => streams_seen(&mut cx.down, holder, answer),
        None => {
            streams_unseen(&mut cx.down, holder.filter(|_| reply::is_error(answer)));
            answer
        }
    };
    let Some(link) = cx.up.get_mut(link_handle) else { return };
    let (node, holder) = (link.node(), link.holder());
    let Some(unblock) = link.checkout_mut().and_then(Checkout::unblock_mut) else { return };
    let over = unblock.replied();
    let abandoned = cx.down.get(holder).is_none();
    if reply::is_error(answer) {
        for (asker, _) in unblock.take_askers() {
            asker.answer(&cx.turn.shared().mailboxes, answer);
        }
        link.checkout_mut().into_iter().for_each(|checkout| checkout.end_unblock(&cx.turn.shared().mailboxes, 0));
        if over {
            cx.up.release(&cx.turn, link_handle);
        } else if abandoned {
            warn!(node = %cx.turn.node_name(node), error = %reply::redacted_error(answer), "CLIENT UNBLOCK failed: closing the connection of a client that has disconnected");
            cx.up.break_link(&cx.turn, link_handle, "the client that waited has disconnected");
        }
    } else if reply::integer(answer) == Some(1) || over {
        // The reply of the blocking command may be late, and the command may be reissued before it arrives.
        let wanted = unblock.wanted().filter(|_| !over);
        if let Some(waiting) = cx.down.get_mut(holder).and_then(|c| c.state_mut::<Waiting>()) {
            waiting.note_unblocked(wanted);
        }
        let count = reply::integer(answer).unwrap_or(0);
        link.checkout_mut().into_iter().for_each(|checkout| checkout.end_unblock(&cx.turn.shared().mailboxes, count));
        cx.up.release(&cx.turn, link_handle);
    } else {
        // The command had not reached the node, or its reply is in transit.
        cx.up.unblocks().again.push(link_handle);
    }
}

/// Repeats CLIENT UNBLOCK for waits that had not started yet.
pub(super) fn retry_unblocks(cx: &mut Context) {
    for link in std::mem::take(&mut cx.up.unblocks().again) {
        if cx.up.get(link).and_then(Link::checkout).and_then(Checkout::unblock).is_some_and(Unblock::is_to_be_sent) {
            send_unblock(cx, link);
        }
    }
}

/// Handles a new topology. A wait at the right node continues under the new epoch, so that a command without a
/// timeout does not block the drain barrier. A wait at a node that no longer serves its keys is ended there and
/// reissued.
pub(super) fn restamp_waiting(cx: &mut Context) {
    let epoch = cx.turn.routing().topology.epoch() as u32;
    for handle in cx.up.links().handles() {
        let Some(link) = cx.up.get(handle).filter(|l| l.lane() == Lane::Blocking && !l.is_idle()) else {
            continue;
        };
        let (node, holder) = (link.node(), link.holder());
        let waited = if let Task::Waiting { waited, .. } = link.task() { waited } else { Waited::Nothing };
        if !is_waiting_well(&cx.turn, &cx.down, &cx.hooks, waited, holder, node) {
            reissue_waiting(cx, handle);
            continue;
        }
        // For a disconnected client, CLIENT UNBLOCK is in flight. Its keys are no longer known, so it keeps its
        // epoch.
        if waited != Waited::Nothing && cx.down.get(holder).is_none_or(|client| client.state::<Waiting>().is_none()) {
            continue;
        }
        if waits_on_the_way(&cx.turn, &cx.down, waited, holder) {
            note_kept(&cx.turn, &mut cx.down, &mut cx.hooks, holder, node);
        }
        cx.up.get_mut(handle).into_iter().for_each(|link| link.restamp(epoch));
    }
}
