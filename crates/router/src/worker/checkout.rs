//! Exclusive connections of clients: a client takes one for a command, and gives it back.
//!
//! Separate from the pools ([`super::upstreams::pool`]), which know no client.

use super::dispatch::Flow;
use super::keyed::{Call, CommandSeq, KeyedCommand};
use super::upstreams::Link;
use super::upstreams::kind::{Lane, Task};
use super::upstreams::link::{Again, Pending, Phase, Purpose};
use super::upstreams::translate::shape_of;
use super::{Stall, Worker};
use crate::slab::Handle;
use switchyard_policy::topology::NodeId;
use switchyard_resp::translate::Shape;

/// Result of a client's request for a connection.
#[derive(Debug)]
pub(super) enum Acquired {
    Link(Handle),
    /// The client waits in line.
    Wait,
    Refused(String),
}

impl Worker {
    /// Acquires an exclusive connection for a command, or returns the flow of the command without one.
    pub(super) fn take_exclusive(&mut self, handle: Handle, node: NodeId, lane: Lane) -> Result<Acquired, Flow> {
        let Some(client) = self.down.get_mut(handle) else { return Err(Flow::Close) };
        if !client.may_take(lane) || self.holds_elsewhere(handle, node) {
            return Err(Flow::Stall(Stall::Barrier));
        }
        match self.acquire(handle, node, lane) {
            Acquired::Wait => Err(Flow::Stall(Stall::Exclusive)),
            acquired => Ok(acquired),
        }
    }

    /// Whether commands of the client are in flight on an exclusive connection to another node. A client has at most
    /// one such connection at a time. With two, a reply on one could come too early and pause it, and nothing would
    /// resume it. And a third command to the first node would take a third connection and overtake commands on the
    /// first.
    fn holds_elsewhere(&self, handle: Handle, node: NodeId) -> bool {
        self.down.get(handle).is_some_and(|client| {
            client.in_flight() > 0
                && client.held.and_then(|held| self.up.get(held)).is_some_and(|link| link.node() != node)
        })
    }

    /// Returns a free connection, or puts the client in line.
    pub(super) fn acquire(&mut self, handle: Handle, node: NodeId, lane: Lane) -> Acquired {
        let Some(client) = self.down.get_mut(handle) else { return Acquired::Wait };
        let resp3 = client.resp3;
        if let Some(refusal) = client.refusal.take() {
            return Acquired::Refused(refusal.into());
        }
        if let Some(held) = client.held {
            let fits = |l: &Link| {
                l.node() == node
                    && l.lane() == lane
                    && l.resp3() == resp3
                    && l.phase() == Phase::Up
                    && l.holder() == handle
            };
            if self.up.get(held).is_some_and(fits) {
                return Acquired::Link(held);
            }
            if client.in_flight() == 0 {
                // Kept for a command that now goes elsewhere.
                client.held = None;
                if self.up.get(held).is_some_and(|l| l.holder() == handle) {
                    self.up.abandon(&self.turn, held);
                }
            }
        }
        if self.turn.node_fails(node) {
            return Acquired::Refused(self.turn.down_text(node));
        }
        if let Some(link) = self.up.take_free(node, lane, resp3) {
            return Acquired::Link(link);
        }
        self.down.stall(&self.turn, handle, Stall::Exclusive);
        self.up.wait_for_connection(&self.turn, handle, node, lane, resp3);
        Acquired::Wait
    }

    /// Puts a request, or its beginning, on the connection that `handle` has acquired. `seq`: number of a command whose
    /// reply is already pending.
    pub(super) fn push_exclusive(
        &mut self,
        handle: Handle,
        link_handle: Handle,
        call: Call<'_>,
        request: &[u8],
        class: u8,
        seq: Option<u32>,
    ) {
        let epoch = self.turn.routing().topology.epoch() as u32;
        let Some(client) = self.down.get_mut(handle) else { return };
        let seq = seq.unwrap_or_else(|| client.owe(self.turn.now_us(), class));
        client.held = Some(link_handle);
        let (database, no_touch) = (client.database, client.no_touch);
        let downgraded = self.up.get(link_handle).is_some_and(|l| l.is_downgraded());
        let shape = if downgraded { shape_of(&self.turn, request) } else { Shape::Plain };
        let Some(link) = self.up.get_mut(link_handle) else { return };
        let node = link.node();
        let kept = if self.hooks.slow.is_on() { &request[..request.len().min(super::slowlog::KEPT)] } else { &[] };
        link.begin_command(handle, shape, kept);
        let pending = Pending {
            who: handle,
            seq,
            len: 0,
            sent_us: self.turn.now_us() as u32,
            epoch,
            purpose: Purpose::Client,
            class,
            again: Again::Never,
            is_long: false,
            end: CommandSeq::NONE,
            cacheable: self.turn.cacheable(),
        };
        link.touch_as(no_touch, pending);
        let request = self.hooks.pass(&self.turn, KeyedCommand { call, node, database }, request, pending);
        self.up.push(link_handle, request);
    }

    /// After a complete reply on an exclusive connection: if it was the last one, the connection is free again.
    pub(super) fn after_exclusive_reply(&mut self, handle: Handle) {
        let Some(link) = self.up.get_mut(handle) else { return };
        if !link.lane().is_exclusive() || !link.is_idle() || link.task() == Task::Watching {
            return;
        }
        if let Some(client) = self.down.get_mut(link.holder())
            && client.held == Some(handle)
        {
            client.held = None;
        }
        self.up.release(&self.turn, handle);
    }

    /// Returns a connection that this client has acquired but does not need.
    pub(super) fn give_back(&mut self, handle: Handle, link_handle: Handle) {
        if let Some(client) = self.down.get_mut(handle).filter(|c| c.held == Some(link_handle)) {
            client.held = None;
        }
        if self.up.get(link_handle).is_some_and(|l| l.holder() == handle || l.holder() == Handle::NONE) {
            self.up.release(&self.turn, link_handle);
        }
    }

    /// Returns the connection that a client holds, if it is unused.
    pub(super) fn give_back_unused(&mut self, handle: Handle) {
        let held = self.down.get(handle).and_then(|client| client.held);
        let is_unused = |link: &Link| link.is_idle() && link.task() == Task::Nothing && link.holder() == handle;
        if let Some(held) = held.filter(|held| self.up.get(*held).is_some_and(is_unused)) {
            self.give_back(handle, held);
        }
    }

    /// Returns a connection that a client got while in line, if it leads to a node that is no longer its destination.
    pub(super) fn give_back_of_another(&mut self, handle: Handle, node: NodeId) {
        let held = self.down.get(handle).and_then(|c| c.held);
        if let Some(held) = held.filter(|held| self.up.get(*held).is_none_or(|l| l.node() != node)) {
            self.give_back(handle, held);
        }
    }
}
