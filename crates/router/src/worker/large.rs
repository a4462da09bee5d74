//! Large values: requests and replies that are streamed over exclusive connections.
//!
//! A shared connection cannot carry them: a client that sends or reads 512 MB slowly would delay all other clients. So
//! - a request with a large argument is streamed over an exclusive connection, with bounded buffers;
//! - a read with an unexpectedly large reply is discarded on the shared connection (the node sends at full speed, so no
//!   client waits for another) and repeated on an exclusive one. The key is remembered, so that later reads use an
//!   exclusive connection at once;
//! - a large reply to a command that must not be repeated is streamed, up to the client's output limit.

use std::sync::Arc;

use switchyard_policy::routing::{Route, route};
use switchyard_policy::topology::NodeId;
use switchyard_resp::command::{Command, Flags, Handling, Lookup};
use switchyard_resp::encode;
use switchyard_resp::reply::{self};
use switchyard_resp::request::{Args, Follower, Limits, ProtocolError, Scanner};
use tracing::warn;

use super::checkout::{Acquired, acquire, push_exclusive, take_exclusive};
use super::context::Context;
use super::dispatch::Flow;
use super::downstreams::Downstreams;
use super::downstreams::client::{Repeat, Upload};
use super::downstreams::waits::Stall;
use super::hot_copies::{fill_too_large, hold_uploaded};
use super::invocation::Invocation;
use super::keyed::Call;
use super::login::may_begin;
use super::pause::may_write;
use super::reissued::end_moving_stall;
use super::transactions::{Session, after_exec};
use super::transit::{Transit, place_again};
use super::turn::Turn;
use super::upstreams::Link;
use super::upstreams::kind::{Lane, Task};
use super::upstreams::link::{Again, Pending, Purpose, UPLOAD_HIGH};
use super::wait::Since;
use super::{OUTPUT_HIGH, Worker};
use crate::shared::RoutingSnapshot;
use crate::slab::Handle;

/// Time for which large keys are remembered.
const MEMORY_US: u64 = 60_000_000;

/// Keys with large values, remembered for a minute. They may have been replaced since.
#[derive(Debug)]
pub(super) struct LargeKeys {
    /// Key hashes, indexed by hash modulo the length. 0: empty.
    hashes: Box<[u64]>,
    is_empty: bool,
    forgets_at_us: u64,
}

impl LargeKeys {
    pub(super) fn new() -> Self {
        Self { hashes: vec![0; 1024].into(), is_empty: true, forgets_at_us: 0 }
    }

    #[inline]
    fn knows(&self, key: &[u8]) -> bool {
        !self.is_empty && {
            let hash = key_hash(key);
            self.hashes[(hash % self.hashes.len() as u64) as usize] == hash
        }
    }

    /// Whether a read of this key should use an exclusive connection.
    #[inline]
    pub(super) fn suggests(&self, command: &Command, key: &[u8]) -> bool {
        command.flags.has(Flags::READONLY) && self.knows(key)
    }

    fn remember(&mut self, key: &[u8], now_us: u64) {
        if self.is_empty {
            self.is_empty = false;
            self.forgets_at_us = now_us + MEMORY_US;
        }
        let hash = key_hash(key);
        self.hashes[(hash % self.hashes.len() as u64) as usize] = hash;
    }

    /// Clears all entries a minute after the first: a key that is still large is detected again by its next read.
    pub(super) fn forget_old(&mut self, now_us: u64) {
        if !self.is_empty && now_us >= self.forgets_at_us {
            self.hashes.fill(0);
            self.is_empty = true;
        }
    }
}

impl Worker {
    /// Starts to stream a command whose next argument is large and incomplete. `header`: the arguments before it.
    pub(super) fn dispatch_large(
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
        let found = command.find_keys(args, &mut keys);
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
    pub(super) fn upload(
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
    pub(super) fn take_large(&mut self, handle: Handle, bytes: usize, part: &[u8]) -> bool {
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
                encode::error(&mut error, super::gather::TOO_LARGE);
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
                encode::error(&mut error, super::gather::TOO_LARGE);
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

fn key_hash(key: &[u8]) -> u64 {
    rapidhash::v3::rapidhash_v3(key).max(1)
}

impl LargeKeys {
    fn remember_large(&mut self, turn: &Turn, down: &mut Downstreams, handle: Handle) {
        let Some(request) = down.get(handle).and_then(|c| c.state::<Repeat>()).map(|r| &r.request) else {
            return;
        };
        let Some(scanner) = Scanner::again(request) else {
            return;
        };
        let args = scanner.args(request);
        let Lookup::Command(command) = turn.routing().commands.find(&args) else { return };
        let mut keys = Vec::new();
        if command.find_keys(&args, &mut keys).is_ok()
            && let Some(key) = keys.first().and_then(|k| args.get(*k as usize))
        {
            self.remember(key, turn.now_us());
        }
    }
}

/// Streams a piece of the reply at the head of a connection.
pub(super) fn pass_piece(turn: &Turn, down: &mut Downstreams, client: Handle, piece: &[u8]) -> bool {
    let Some(receiver) = down.get_mut(client) else { return false };
    receiver.stream(piece);
    let unsent = receiver.unsent();
    if unsent < OUTPUT_HIGH / 4 {
        down.mark(client);
        return false;
    }
    down.flush_client(turn, client);
    down.get(client).is_some_and(|c| c.unsent() >= OUTPUT_HIGH / 4 && !c.socket().writes_first())
}

/// Sends a complete request on an exclusive connection.
pub(super) fn forward_large(cx: &mut Context, call: &Invocation<'_>, node: NodeId) -> Flow {
    let Invocation { handle, command, args, raw, .. } = *call;
    let acquired = match take_exclusive(cx, handle, node, Lane::Large) {
        Ok(acquired) => acquired,
        Err(flow) => return flow,
    };
    let link = send_large(cx, handle, acquired, Call::Found(command, args), raw, command.class() as u8, None);
    if let Some(checkout) = link.and_then(|link| cx.up.get_mut(link)?.checkout_mut()) {
        checkout.note_slow(command.flags.has(Flags::SLOW));
    }
    Flow::Next
}

/// Sends a request on the acquired connection, or replies with the refusal. `seq`: number of a command with a
/// pending reply, if any.
fn send_large(
    cx: &mut Context,
    handle: Handle,
    acquired: Acquired,
    call: Call<'_>,
    request: &[u8],
    class: u8,
    seq: Option<u32>,
) -> Option<Handle> {
    match acquired {
        Acquired::Link(link) => {
            cx.turn.counters().large.add(1);
            push_exclusive(cx, handle, link, call, request, class, seq);
            Some(link)
        }
        Acquired::Refused(error) => {
            let mut bytes = Vec::new();
            encode::error(&mut bytes, &error);
            match seq {
                Some(seq) => cx.down.deliver(&cx.turn, handle, seq, &bytes),
                None => cx.down.answer(&cx.turn, handle, class, &bytes),
            }
            None
        }
        Acquired::Wait => None,
    }
}

/// Starts the repeat of a read when a connection is available. Returns false while the client waits for one.
pub(super) fn run_repeat(cx: &mut Context, handle: Handle) -> bool {
    let Some(mut repeat) = cx.down.get_mut(handle).and_then(|c| c.take_state::<Repeat>()) else { return true };
    // The keys may have moved since the first attempt.
    if !cx.turn.routing().topology.is_settled() || cx.turn.routing().topology.epoch() as u32 != repeat.epoch {
        match place_again(&cx.turn, &mut cx.down, &mut cx.hooks, handle, &repeat.request) {
            Ok(Some((node, _))) => repeat.node = node,
            Ok(None) => {
                if let Some(client) = cx.down.get_mut(handle) {
                    client.set_state(*repeat);
                }
                return false;
            }
            Err(text) => {
                let mut error = Vec::new();
                encode::error(&mut error, &text);
                cx.down.deliver(&cx.turn, handle, repeat.seq, &error);
                return true;
            }
        }
        end_moving_stall(&mut cx.down, handle);
    }
    let acquired = acquire(cx, handle, repeat.node, Lane::Large);
    if matches!(acquired, Acquired::Wait) {
        if let Some(client) = cx.down.get_mut(handle) {
            client.set_state(*repeat);
        }
        return false;
    }
    send_large(cx, handle, acquired, Call::Bytes(&repeat.request), &repeat.request, repeat.class, Some(repeat.seq));
    true
}

impl LargeKeys {
    /// Repeats a read with a large reply on an exclusive connection. Only if no later command of the client is in
    /// flight, which would overtake it.
    pub(super) fn repeat_on_large(&mut self, cx: &mut Context, handle: Handle, pending: Pending) -> bool {
        let Some(link) = cx.up.get(handle) else { return false };
        let node = link.node();
        let request = link.requests().head_request().to_vec();
        let Some(client) = cx.down.get_mut(pending.who) else { return false };
        if !client.replies().is_last(pending.seq)
            || client.stall() == Stall::Exclusive
            || client.state::<Upload>().is_some()
        {
            return false;
        }
        client.set_state(Repeat { node, epoch: pending.epoch, seq: pending.seq, class: pending.class, request });
        // Later commands wait for it.
        client.replies_mut().take_lane(Lane::Large);
        self.remember_large(&cx.turn, &mut cx.down, pending.who);
        let who = pending.who;
        // Started now, whatever else the client waits for: a barrier or a full pipeline only ends with this reply.
        run_repeat(cx, who);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_keys_are_forgotten_after_a_minute_whenever_it_is_looked_at() {
        let mut keys = LargeKeys::new();
        // At the interval of client checks, which never equals a full minute of the router's time.
        let mut now_us = 130_017;
        for round in 0..10 {
            let key = format!("key{round}");
            keys.remember(key.as_bytes(), now_us);
            let began_us = now_us;
            while keys.knows(key.as_bytes()) {
                assert!(now_us - began_us < MEMORY_US + 200_000, "kept for {} us", now_us - began_us);
                now_us += 200_000;
                keys.forget_old(now_us);
            }
            assert!(now_us - began_us >= MEMORY_US, "forgotten after {} us", now_us - began_us);
        }
    }
}
