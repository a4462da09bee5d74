//! Replies of nodes: each complete reply is taken from its connection and passed to the sender of the command.
//!
//! A connection knows no clients: it returns the next arrival ([`Link::arrival`](super::upstreams::link::Link::arrival)), with
//! the `Pending` that it answers. This module has both. Nothing is copied, and there is no queue between them.

use std::borrow::Cow;

use switchyard_policy::cluster::Redirect;
use switchyard_resp::{encode, reply};

use super::Worker;
use super::blocking::{is_end_of_waits, on_unblock};
use super::context::Context;
use super::gather::Gathers;
use super::hot_copies::filled;
use super::large::pass_piece;
use super::redirect::{REPLACED, Redirected};
use super::scripts::heal_script;
use super::scripts::rehearsed::{is_of_rehearsal, run_again};
use super::transactions::on_watch;
use super::upstreams::breaking::PERHAPS;
use super::upstreams::connect::rewrite_redirect;
use super::upstreams::link::{Arrival, Phase, Taken};
use super::upstreams::pending::{Again, Purpose};
use super::upstreams::translate::raised;
use super::upstreams::{Link, Origin};
use super::wait::{forget_waiting, on_wait};
use crate::lane::Lane;
use crate::slab::Handle;

impl Worker {
    /// Reads once into `buffer`, and passes the received replies on.
    pub(super) fn read_link(&mut self, handle: Handle, buffer: &mut [u8]) {
        let Some(link) = self.cx.up.get_mut(handle) else { return };
        match link.receive(buffer, self.cx.turn.now_us()) {
            Taken::Bytes(count) => {
                let more = link.may_be_readable();
                let mut input = link.take_received();
                let kept = if input.is_empty() {
                    let taken = self.take_replies(handle, &buffer[..count]);
                    input.extend_from_slice(&buffer[taken..count]);
                    input
                } else {
                    input.extend_from_slice(&buffer[..count]);
                    let taken = self.take_replies(handle, &input);
                    input.drain(..taken);
                    if input.is_empty() && input.capacity() > 64 << 10 { Vec::new() } else { input }
                };
                if let Some(link) = self.cx.up.get_mut(handle) {
                    link.keep_received(kept);
                    if more && !link.incoming().is_paused() {
                        self.cx.up.read_later(handle);
                    }
                }
            }
            Taken::Nothing if link.phase() == Phase::Securing => self.cx.up.handshake(&self.cx.turn, handle).secure(),
            Taken::Nothing | Taken::Paused => {}
            Taken::Interrupted => self.cx.up.read_later(handle),
            Taken::Early => self.cx.up.attempt_failed(&self.cx.turn, handle, "it sent data before our greeting"),
            Taken::Lost(why) => self.cx.up.break_link(&self.cx.turn, handle, &why),
        }
    }

    /// Continues with the received part of a reply whose client is gone.
    pub(super) fn read_again(&mut self, handle: Handle) {
        let Some(link) = self.cx.up.get_mut(handle) else { return };
        let mut input = link.take_received();
        let taken = self.take_replies(handle, &input);
        input.drain(..taken);
        input.shrink_to_fit();
        if let Some(link) = self.cx.up.get_mut(handle) {
            link.keep_received(input);
        }
    }

    /// Takes the replies at the start of `bytes`; returns how many bytes they took.
    fn take_replies(&mut self, handle: Handle, bytes: &[u8]) -> usize {
        let mut pos = 0;
        while pos < bytes.len() {
            let Some(link) = self.cx.up.get_mut(handle) else { return bytes.len() };
            if !matches!(link.phase(), Phase::Up | Phase::Handshake) {
                // Given up because of an earlier reply of the same read; a main connection is already reconnecting.
                return bytes.len();
            }
            let rest = &bytes[pos..];
            match link.arrival(rest, &self.cx.turn.routing().live) {
                Arrival::Reply(len) => {
                    pos += len;
                    self.on_reply(handle, &rest[..len]);
                }
                Arrival::Large(_) if link.is_distrusted() => {
                    self.cx.up.break_link(&self.cx.turn, handle, REPLACED);
                    return bytes.len();
                }
                Arrival::Large(size) => {
                    // A reply that is translated must be whole.
                    let whole = link.is_downgraded()
                        && rest[0] == b'*'
                        && size <= self.cx.turn.routing().live.client_output_limit;
                    let head = link.head().copied();
                    let is_kept = whole && head.is_some_and(|head| self.gathers.is_awaited(&self.cx.down, &head));
                    let is_ours = is_of_rehearsal(rest, &self.cx.hooks.scripts_met.token);
                    if is_kept || is_ours || !self.take_large(handle, size, rest) {
                        break;
                    }
                }
                Arrival::Piece { len, passes, is_last } => {
                    pos += len;
                    if passes {
                        let (who, is_exclusive) = (link.head().map(|head| head.who), link.lane().is_exclusive());
                        let is_behind =
                            who.is_some_and(|who| pass_piece(&self.cx.turn, &mut self.cx.down, who, &rest[..len]));
                        if is_behind && is_exclusive {
                            self.cx.up.get_mut(handle).into_iter().for_each(Link::pause);
                        }
                    }
                    if !is_last {
                        break;
                    }
                    self.gathers.end_body(&mut self.cx, handle);
                }
                Arrival::Nothing => break,
                Arrival::Senseless(why) => {
                    self.cx.up.break_link(&self.cx.turn, handle, &why);
                    return bytes.len();
                }
            }
        }
        pos
    }

    fn on_reply(&mut self, handle: Handle, answer: &[u8]) {
        let Some(link) = self.cx.up.get_mut(handle) else { return };
        if link.phase() == Phase::Handshake {
            self.cx.up.handshake(&self.cx.turn, handle).on_reply(answer);
            return;
        }
        if link.lane() == Lane::Pubsub {
            self.on_pubsub_reply(handle, answer);
            return;
        }
        if answer[0] == b'>' {
            // Out of band: an invalidation of keys in hot copies, or nothing of ours.
            if link.lane() == Lane::Fills {
                let node = link.node();
                self.cx.hooks.invalidated(&self.cx.turn, node, answer);
            }
            return;
        }
        let raised = if link.is_downgraded() { raised(&self.cx.turn, link, answer) } else { None };
        let answer = raised.as_deref().unwrap_or(answer);
        let Some(link) = self.cx.up.get_mut(handle) else { return };
        if link.is_distrusted() && !is_redirect(answer) {
            return self.on_distrusted(handle);
        }
        let is_of_replica = link.lane() == Lane::Replica && self.cx.turn.routing().topology.is_of_cluster();
        let Some(head) = link.head() else {
            self.cx.up.break_link(&self.cx.turn, handle, "it sent a reply without a command");
            return;
        };
        if self.cx.hooks.slow.is_slow((self.cx.turn.now_us() as u32).wrapping_sub(head.sent_us))
            && let Some(link) = self.cx.up.get(handle)
        {
            self.cx.hooks.note_slow(&self.cx.turn, &self.cx.down, &self.gathers, link);
        }
        let is_error = reply::is_error(answer);
        let mut instead: Option<Cow<'_, [u8]>> = None;
        if is_of_replica
            && reply::may_be_missing_key(answer)
            && self.redirects.read_at_owner(&mut self.cx, handle, answer)
        {
            return self.cx.up.mark(handle); // the flush checks whether waiting clients may continue
        }
        if is_error && !is_of_replica && self.cx.turn.routing().topology.is_of_cluster() {
            if self.reissued_commands.take_reissued(&mut self.cx, handle, answer) {
                return;
            }
            match self.redirects.examine(&mut self.cx, &self.gathers, handle, answer) {
                Redirected::Again => return self.cx.up.mark(handle), // the flush checks whether waiting clients may continue
                Redirected::Reply(reply) => instead = Some(Cow::Borrowed(reply)),
                Redirected::No => {}
            }
        }
        if is_error && let Some(link) = self.cx.up.get(handle) {
            link.counters().note_error(answer);
            if !self.cx.turn.routing().topology.is_of_cluster() {
                instead = rewrite_redirect(&self.cx.turn, link.node(), answer).map(Cow::Owned);
            }
        }
        let answer = instead.as_deref().unwrap_or(answer);
        let is_error = is_error && reply::is_error(answer);
        if is_error
            && (answer.starts_with(b"-NOSCRIPT") && heal_script(&mut self.cx, handle)
                || run_again(&mut self.cx, handle, answer)
                || self.reissued_commands.take_reissued(&mut self.cx, handle, answer))
        {
            return;
        }
        let Some(link) = self.cx.up.get_mut(handle) else { return };
        let is_early = is_error && link.is_head_unsent();
        let Some(ended) = link.answered(self.cx.turn.now_us(), is_error) else { return };
        let is_awaited = link.is_awaited();
        let (node, lane, expired) = (link.node(), link.lane(), ended.is_expired);
        let pending = self.cx.hooks.over(&self.cx.turn, ended, answer);
        if is_awaited {
            self.cx.up.mark(handle); // the flush checks whether waiting clients may continue
        }
        if !expired {
            if lane.is_exclusive()
                && let Some(link) = self.cx.up.get(handle)
            {
                self.cx.hooks.note_slow_exclusive(&self.cx.turn, &self.cx.down, &self.gathers, link, pending);
            }
            match pending.purpose {
                Purpose::Client | Purpose::ClientHealed if is_error && pending.again == Again::Heals => {
                    let shown = self.cx.hooks.scripts_met.with_own_sha(answer);
                    self.cx.down.deliver_of_node(&self.cx.turn, pending.who, pending.seq, &shown);
                }
                Purpose::Client | Purpose::Wait
                    if is_error && lane == Lane::Blocking && is_end_of_waits(&self.cx.turn, answer) =>
                {
                    forget_waiting(&mut self.cx.down, pending.who);
                    self.cx.down.end_as_a_server_would(&self.cx.turn, pending.who, pending.seq);
                }
                Purpose::Client | Purpose::ClientHealed => {
                    self.cx.down.deliver_of_node(&self.cx.turn, pending.who, pending.seq, answer)
                }
                Purpose::Gather => self.gathers.gather_part(&mut self.cx, pending.who, pending.seq, answer),
                Purpose::Exec | Purpose::ExecWithoutMulti => self.on_exec(handle, pending, answer),
                Purpose::Watch => on_watch(&self.cx.turn, &mut self.cx.down, pending, answer),
                Purpose::Wait => {
                    let refused = self.cx.up.get_mut(handle).and_then(Link::take_refusal);
                    on_wait(&self.cx.turn, &mut self.cx.down, pending, refused, answer);
                }
                Purpose::Fill => {
                    filled(&self.cx.turn, &mut self.cx.down, &mut self.cx.hooks, pending.seq, answer, false)
                }
                Purpose::FillTtl => self.cx.hooks.on_ttl_reply(&self.cx.turn, node, pending.seq, answer),
                Purpose::Discarded
                | Purpose::Learn
                | Purpose::Confirm
                | Purpose::Queued
                | Purpose::Unblock
                | Purpose::Look => {}
                Purpose::Subscribe | Purpose::Sync | Purpose::Track | Purpose::Beat | Purpose::Touch => {}
            }
        }
        match pending.purpose {
            Purpose::Discarded | Purpose::Learn | Purpose::Confirm => {
                self.cx.up.on_own_reply(&self.cx.turn, pending, node, answer)
            }
            Purpose::Queued => {
                self.cx.up.get_mut(handle).into_iter().for_each(|link| link.on_queued(pending, is_error, answer))
            }
            Purpose::Unblock => on_unblock(&mut self.cx, pending.who, answer),
            Purpose::Look => self.reissued_commands.on_look(&mut self.cx, pending.who, pending.seq, answer),
            Purpose::Beat => self.cx.hooks.beat_confirmed(node),
            Purpose::Touch => self.cx.hooks.touch_confirmed(&self.cx.turn, pending.seq, answer),
            _ => {}
        }
        if is_early {
            self.cx.up.break_link(&self.cx.turn, handle, "it replied before it had the whole command");
        } else if lane.is_exclusive() {
            self.cx.up.after_exclusive_reply(&self.cx.turn, handle);
        }
    }
}

/// Whether a reply of a member of a cluster proves that its command was not executed.
#[cold]
fn is_redirect(answer: &[u8]) -> bool {
    let redirect = || reply::text(answer).and_then(Redirect::of);
    reply::is_error(answer) && (answer.starts_with(b"-UNBLOCKED") || redirect().is_some())
}

impl Worker {
    /// Discards a reply of a member of a cluster whose replica has replaced it: the reply may be older than commands that
    /// the replica has executed since. Reads are sent again.
    #[cold]
    fn on_distrusted(&mut self, handle: Handle) {
        let Some(link) = self.cx.up.get_mut(handle) else { return };
        let (lane, node) = (link.lane(), link.node());
        if lane.is_exclusive() {
            return self.cx.up.break_link(&self.cx.turn, handle, REPLACED);
        }
        let request = link.requests().head_request().to_vec();
        let Some(ended) = link.taken_out() else { return };
        let is_expired = ended.is_expired;
        let pending = self.cx.hooks.over(&self.cx.turn, ended, b"");
        self.cx.up.mark(handle);
        let is_plain = matches!(pending.purpose, Purpose::Client | Purpose::ClientHealed | Purpose::Gather);
        if is_expired || is_plain && self.redirects.repeat(&mut self.cx, &self.gathers, lane, pending, &request, true) {
            return;
        }
        let mut error = Vec::new();
        let name = self.cx.turn.node_name(node);
        encode::error(&mut error, &format!("NODELOST {name} {REPLACED}{PERHAPS}"));
        let origin = Origin { link: handle, node, lane: Some(lane), is_up: true };
        self.fail_pending(origin, pending, &error);
    }
}

impl Gathers {
    /// Ends a streamed or skipped reply.
    fn end_body(&mut self, cx: &mut Context, handle: Handle) {
        let Some(link) = cx.up.get_mut(handle) else { return };
        let through = link.incoming().passes_body_on();
        if link.head().is_some_and(|head| cx.hooks.slow.is_slow((cx.turn.now_us() as u32).wrapping_sub(head.sent_us)))
            && let Some(link) = cx.up.get(handle)
        {
            cx.hooks.note_slow(&cx.turn, &cx.down, self, link);
        }
        let Some(link) = cx.up.get_mut(handle) else { return };
        let Some(ended) = link.answered_in_pieces(cx.turn.now_us()) else { return };
        let is_awaited = link.is_awaited();
        let expired = ended.is_expired;
        let is_exclusive = link.lane().is_exclusive();
        let pending = cx.hooks.over(&cx.turn, ended, b"");
        if is_awaited {
            cx.up.mark(handle); // the flush checks whether waiting clients may continue
        }
        if !expired
            && is_exclusive
            && let Some(link) = cx.up.get(handle)
        {
            cx.hooks.note_slow_exclusive(&cx.turn, &cx.down, self, link, pending);
        }
        if through && !expired {
            let counters = cx.turn.counters().clone();
            if let Some(client) = cx.down.get_mut(pending.who) {
                client.end_stream(cx.turn.now_us(), &counters);
                cx.down.mark(pending.who);
                cx.down.after_delivery(&cx.turn, pending.who);
            }
        }
        cx.up.after_exclusive_reply(&cx.turn, handle);
    }
}
