//! Large values: requests and replies that are streamed over exclusive connections.
//!
//! A shared connection cannot carry them: a client that sends or reads 512 MB slowly would delay all other clients. So
//! - a request with a large argument is streamed over an exclusive connection, with bounded buffers;
//! - a read with an unexpectedly large reply is discarded on the shared connection (the node sends at full speed, so no
//!   client waits for another) and repeated on an exclusive one. The key is remembered, so that later reads use an
//!   exclusive connection at once;
//! - a large reply to a command that must not be repeated is streamed, up to the client's output limit.

mod upload;

use switchyard_policy::topology::NodeId;
use switchyard_resp::command::{Command, Flags, Lookup};
use switchyard_resp::encode;
use switchyard_resp::request::Scanner;

use super::checkout::{Acquired, acquire, push_exclusive, take_exclusive};
use super::command::Call;
use super::context::Context;
use super::downstreams::Downstreams;
use super::downstreams::client::{Repeat, Upload};
use super::downstreams::socket::OUTPUT_HIGH;
use super::downstreams::waits::Stall;
use super::flow::Flow;
use super::invocation::Invocation;
use super::reissued::end_moving_stall;
use super::transit::place_again;
use super::turn::Turn;
use super::upstreams::pending::Pending;
use crate::lane::Lane;
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
