//! Uploads: large requests of clients. And large replies, as they arrive.

use std::sync::Arc;

use switchyard_policy::routing::{Route, route};
use switchyard_resp::command::{Flags, Handling, Lookup};
use switchyard_resp::request::{Args, Follower, Limits, ProtocolError};
use switchyard_resp::{encode, reply};
use tracing::warn;

use super::send_large;
use crate::lane::Lane;
use crate::shared::RoutingSnapshot;
use crate::slab::Handle;
use crate::worker::Worker;
use crate::worker::checkout::take_exclusive;
use crate::worker::command::{Call, may_write};
use crate::worker::downstreams::client::Upload;
use crate::worker::downstreams::waits::Stall;
use crate::worker::flow::Flow;
use crate::worker::hot_copies::{fill_too_large, hold_uploaded};
use crate::worker::invocation::Invocation;
use crate::worker::keyed::find_routed_keys;
use crate::worker::login::may_begin;
use crate::worker::transactions::after_exec;
use crate::worker::transactions::session::Session;
use crate::worker::transit::Transit;
use crate::worker::upstreams::Link;
use crate::worker::upstreams::kind::Task;
use crate::worker::upstreams::link::UPLOAD_HIGH;
use crate::worker::upstreams::pending::{Again, Purpose};
use crate::worker::wait::state::Since;

impl Worker {
    /// Starts to stream a command whose next argument is large and incomplete. `header`: the arguments before it.
    pub(in crate::worker) fn dispatch_large(
        &mut self,
        routing: &Arc<RoutingSnapshot>,
        handle: Handle,
        header: &[u8],
        args: &Args<'_>,
        len: usize,
        after: usize,
    ) -> Flow {
        let Lookup::Command(command) = routing.commands.find(args) else { return Flow::Buffer };
        if self.pauses.is_any() || !self.monitors.is_empty() || self.cx.down.get(handle).is_some_and(|c| c.is_gated()) {
            return Flow::Buffer; // special cases are handled with complete commands
        }
        let in_multi = self.cx.down.get(handle).is_some_and(|c| c.in_multi());
        if in_multi
            || command.handling != Handling::Keyed
            || command.flags.has(Flags::BLOCKING)
            || !command.arity_ok(args.len())
        {
            return Flow::Buffer;
        }
        // Scripts are analysed before they are sent, and may be modified.
        if command.flags.has(Flags::SCRIPT) {
            return Flow::Buffer;
        }
        let call = Invocation { routing, handle, command, raw: header, args };
        if !may_begin(&mut self.cx.down, &mut self.cx.hooks, &call) {
            return Flow::Buffer;
        }
        let mut moved = None;
        if !routing.topology.is_settled() {
            match self.large_keys.in_transit(&mut self.cx, &call) {
                Transit::Settled => {}
                Transit::Moved(routing) => moved = Some(routing),
                Transit::Ask(_) => return Flow::Buffer,
                Transit::Instead(flow) => {
                    if let Some(client) = self.cx.down.get_mut(handle).filter(|_| flow == Flow::Next) {
                        // It was answered with an error: the rest of its input is discarded.
                        client.set_state(Upload {
                            link: None,
                            follower: Follower::new(len, after),
                            writes: false,
                            keys: Box::default(),
                        });
                    }
                    return flow;
                }
            }
        }
        let routing = moved.as_ref().unwrap_or(routing);
        let mut keys = std::mem::take(&mut self.cx.hooks.keys);
        keys.clear();
        let found = find_routed_keys(routing.topology.placement(), command, args, &mut keys);
        let target = route(&routing.topology, keys.iter().filter_map(|k| args.get(*k as usize)));
        let written = self.cx.hooks.keys_of_upload(command, args, &keys);
        self.cx.hooks.keys = keys;
        let (Ok(()), Route::Owner(_, node)) = (found, target) else { return Flow::Buffer };
        if self.cx.up.outages().has(node) {
            return Flow::Stall(Stall::Outage);
        }
        let class = command.class() as u8;
        let acquired = match take_exclusive(&mut self.cx, handle, node, Lane::Large) {
            Ok(acquired) => acquired,
            Err(flow) => return flow,
        };
        let link = send_large(&mut self.cx, handle, acquired, Call::Found(command, args), header, class, None);
        if let Some(checkout) = link.and_then(|link| self.cx.up.get_mut(link)?.checkout_mut()) {
            checkout.begin_task(Task::Uploading);
            checkout.note_slow(command.flags.has(Flags::SLOW));
        }
        if let Some(client) = self.cx.down.get_mut(handle) {
            client.note_written(node, Since::now(self.cx.turn.shared(), self.cx.turn.routing()));
            client.set_state(Upload {
                link,
                follower: Follower::new(len, after),
                writes: may_write(command),
                keys: written,
            });
        }
        self.cx.turn.counters().commands[usize::from(class)].add(1);
        Flow::Next
    }

    /// Streams the next bytes of an upload. Returns how many were taken, and whether the upload is complete.
    pub(in crate::worker) fn upload(
        &mut self,
        handle: Handle,
        routing: &RoutingSnapshot,
        bytes: &[u8],
    ) -> Result<(usize, bool), ProtocolError> {
        let upload = self.cx.down.get(handle).and_then(|c| c.state::<Upload>()).map(|u| (u.link, u.writes));
        let Some((link, writes)) = upload else { return Ok((0, false)) };
        if self.pauses.holds_back(writes) {
            // The node executes nothing before the end of the upload.
            self.cx.down.stall(&self.cx.turn, handle, Stall::Paused);
            return Ok((0, false));
        }
        if let Some(link) = link
            && self.cx.up.is_full(link, handle, UPLOAD_HIGH)
        {
            self.cx.down.stall(&self.cx.turn, handle, Stall::Upstream);
            return Ok((0, false));
        }
        let Some(client) = self.cx.down.get_mut(handle) else { return Ok((0, false)) };
        let Some(upload) = client.state_mut::<Upload>() else { return Ok((0, false)) };
        let limits = Limits { argument_max: routing.live.argument_max, large: usize::MAX, authenticated: true };
        let (taken, done) = upload.follower.follow(bytes, &limits)?;
        let written = if done { client.take_state::<Upload>().map(|upload| upload.keys) } else { None };
        if let (Some(link), Some(written)) = (link, written) {
            hold_uploaded(&mut self.cx.up, &mut self.cx.hooks, link, &written);
        }
        if let Some(link) = link.and_then(|l| self.cx.up.get_mut(l)) {
            link.push_more(&bytes[..taken], done, self.cx.turn.now_us());
        }
        if let Some(link) = link {
            self.cx.up.mark(link);
        }
        Ok((taken, done))
    }

    /// Starts to handle a reply of at least `bytes`, too large to collect, with `part` received. Returns false if it
    /// must be collected nevertheless.
    pub(in crate::worker) fn take_large(&mut self, handle: Handle, bytes: usize, part: &[u8]) -> bool {
        let Some(link) = self.cx.up.get_mut(handle) else { return false };
        let Some(pending) = link.head().copied() else { return false };
        if link.lane() == Lane::Pubsub {
            return false; // a message: its receivers are determined when it is complete
        }
        if link.lane() == Lane::Fills && part[0] == b'>' {
            return false; // an invalidation, not the pending reply
        }
        let too_large = bytes > self.cx.turn.routing().live.client_output_limit;
        let whole = link.is_downgraded() && part[0] == b'*';
        if link.requests().is_head_expired() {
            link.skip_body();
            return true;
        }
        match pending.purpose {
            Purpose::Client | Purpose::ClientHealed | Purpose::Exec | Purpose::ExecWithoutMulti
                if self.cx.down.get(pending.who).is_none() => {}
            Purpose::Client | Purpose::ClientHealed | Purpose::Exec | Purpose::ExecWithoutMulti if whole => {
                let mut error = Vec::new();
                encode::error(&mut error, crate::worker::gather::TOO_LARGE);
                self.cx.down.deliver(&self.cx.turn, pending.who, pending.seq, &error);
            }
            Purpose::Client | Purpose::ClientHealed | Purpose::Exec | Purpose::ExecWithoutMulti => {
                if matches!(link.lane(), Lane::Main | Lane::Replica)
                    && pending.again == Again::Reads
                    && self.large_keys.repeat_on_large(&mut self.cx, handle, pending)
                {
                    self.cx.up.get_mut(handle).into_iter().for_each(Link::skip_head);
                    return true;
                }
                // It must not be repeated: stream it if it is next.
                let Some(client) = self.cx.down.get_mut(pending.who) else { return false };
                let is_own = pending.purpose == Purpose::Exec
                    && client.state().is_some_and(|s: &Session| s.has_own_answers(pending.seq));
                if client.replies().is_first(pending.seq) && !is_own {
                    let failed = reply::is_error(part);
                    client.replies_mut().begin_stream(failed);
                    if failed {
                        self.cx.turn.counters().errors.count(part);
                    }
                    if pending.purpose == Purpose::Exec {
                        // Such a large reply is not an error: the transaction is being executed.
                        after_exec(client, true);
                    }
                    if let Some(link) = self.cx.up.get_mut(handle) {
                        link.pass_body_on();
                    }
                    return true;
                }
                if !too_large {
                    return false;
                }
                warn!(
                    client = client.identity().id(),
                    bytes, "disconnecting a client whose unread replies exceed its limit (output-limit)"
                );
                self.cx.turn.counters().cut_output.add(1);
                self.cx.down.close_client(&self.cx.turn, pending.who);
            }
            Purpose::Gather if too_large || !self.gathers.is_awaited(&self.cx.down, &pending) => {
                let mut error = Vec::new();
                encode::error(&mut error, crate::worker::gather::TOO_LARGE);
                self.gathers.gather_part(&mut self.cx, pending.who, pending.seq, &error);
            }
            Purpose::Fill => fill_too_large(&self.cx.turn, &mut self.cx.down, &mut self.cx.hooks, pending.seq),
            Purpose::Discarded | Purpose::Queued => {}
            // Short replies: see `reply_max`.
            _ => return false,
        }
        self.cx.up.get_mut(handle).into_iter().for_each(Link::skip_head);
        true
    }
}
