//! Exclusive connections of clients: a client takes one for a command, and gives it back.
//!
//! Separate from the pools ([`super::upstreams::pool`]), which know no client.

use switchyard_policy::topology::NodeId;
use switchyard_resp::translate::Shape;

use super::command::{Call, CommandSeq, KeyedCommand};
use super::context::Context;
use super::downstreams::waits::Stall;
use super::flow::Flow;
use super::upstreams::Link;
use super::upstreams::link::Phase;
use super::upstreams::pending::{Again, Pending, Purpose};
use super::upstreams::translate::shape_of;
use crate::lane::Lane;
use crate::slab::Handle;

/// Result of a client's request for a connection.
#[derive(Debug)]
pub(super) enum Acquired {
    Link(Handle),
    /// The client waits in line.
    Wait,
    Refused(String),
}

/// Acquires an exclusive connection for a command, or returns the flow of the command without one.
pub(super) fn take_exclusive(cx: &mut Context, handle: Handle, node: NodeId, lane: Lane) -> Result<Acquired, Flow> {
    let Some(client) = cx.down.get_mut(handle) else { return Err(Flow::Close) };
    // A client has at most one exclusive connection with commands in flight. With two, a reply on one could come too
    // early and pause it, and nothing would resume it. And a third command to the first node would take a third
    // connection and overtake commands on the first.
    let held = client.held().filter(|_| client.in_flight() > 0).and_then(|held| cx.up.get(held));
    if held.is_some_and(|link| link.node() != node) || !client.may_take(lane) {
        return Err(Flow::Stall(Stall::Barrier));
    }
    match acquire(cx, handle, node, lane) {
        Acquired::Wait => Err(Flow::Stall(Stall::Exclusive)),
        acquired => Ok(acquired),
    }
}

/// Returns a free connection, or puts the client in line.
pub(super) fn acquire(cx: &mut Context, handle: Handle, node: NodeId, lane: Lane) -> Acquired {
    let Some(client) = cx.down.get_mut(handle) else { return Acquired::Wait };
    let resp3 = client.resp3();
    if let Some(refusal) = client.waits_mut().take_refusal() {
        return Acquired::Refused(refusal.into());
    }
    if let Some(held) = client.held() {
        let fits = |l: &Link| {
            l.node() == node && l.lane() == lane && l.resp3() == resp3 && l.phase() == Phase::Up && l.holder() == handle
        };
        if cx.up.get(held).is_some_and(fits) {
            return Acquired::Link(held);
        }
        if client.in_flight() == 0 {
            // Kept for a command that now goes elsewhere.
            client.take_held();
            cx.up.abandon(&cx.turn, handle, held);
        }
    }
    if cx.turn.node_fails(node) {
        return Acquired::Refused(cx.turn.down_text(node));
    }
    if let Some(link) = cx.up.pool(&cx.turn, node, lane).take_free(resp3) {
        return Acquired::Link(link);
    }
    cx.down.stall(&cx.turn, handle, Stall::Exclusive);
    cx.up.pool(&cx.turn, node, lane).wait(handle, resp3);
    Acquired::Wait
}

/// Puts a request, or its beginning, on the connection that `handle` has acquired. `seq`: number of a command whose
/// reply is already pending.
pub(super) fn push_exclusive(
    cx: &mut Context,
    handle: Handle,
    link_handle: Handle,
    call: Call<'_>,
    request: &[u8],
    class: u8,
    seq: Option<u32>,
) {
    let epoch = cx.turn.routing().topology.epoch() as u32;
    let Some(client) = cx.down.get_mut(handle) else { return };
    let seq = seq.unwrap_or_else(|| client.owe(cx.turn.now_us(), class));
    client.hold(link_handle);
    let (database, no_touch) = (client.database(), client.no_touch());
    let downgraded = cx.up.get(link_handle).is_some_and(|l| l.is_downgraded());
    let shape = if downgraded { shape_of(&cx.turn, request) } else { Shape::Plain };
    let Some(link) = cx.up.get_mut(link_handle) else { return };
    let node = link.node();
    let kept = if cx.hooks.slow.is_on() { &request[..request.len().min(crate::slow_log::KEPT)] } else { &[] };
    link.begin_command(handle, shape, kept);
    let pending = Pending {
        who: handle,
        seq,
        len: 0,
        sent_us: cx.turn.now_us() as u32,
        epoch,
        purpose: Purpose::Client,
        class,
        again: Again::Never,
        is_long: false,
        end: CommandSeq::NONE,
        cacheable: cx.turn.cacheable(),
    };
    link.touch_as(no_touch, pending);
    let request = cx.hooks.pass(&cx.turn, KeyedCommand { call, node, database }, request, pending);
    cx.up.push(link_handle, request);
}
