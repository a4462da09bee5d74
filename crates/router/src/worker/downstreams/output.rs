//! Output to clients: replies in order, and closing.

use std::sync::atomic::Ordering;

use rustix::net::RecvFlags;
use switchyard_resp::{encode, reply};
use tracing::warn;

use super::client::Stall;
use super::{Client, ClientEvent, Downstreams};
use crate::metrics::WorkerCounters;
use crate::slab::Handle;
use crate::worker::outage::closes;
use crate::worker::pubsub::clients::release_messages;
use crate::worker::tracking::nodes::release_invalidations;
use crate::worker::tracking::own::settle_own_write;
use crate::worker::turn::Turn;
use crate::worker::{OUTPUT_HIGH, QUIET_CAPACITY, transport};

/// Minimum size of a reply that is sent directly from the receive buffer if it is next. A copy would cost more than the
/// system call that it might share.
const DIRECT_MIN: usize = 8 << 10;

/// Takes the reply to command `seq` for the client. The part of a large reply that the socket accepts is not copied.
pub(in crate::worker) fn give(
    client: &mut Client,
    counters: &WorkerCounters,
    seq: u32,
    reply: &[u8],
    failed: bool,
    now_us: u64,
) {
    let mut reply = reply;
    if reply.len() >= DIRECT_MIN
        && client.takes_directly(seq)
        && let Ok(sent) = transport::send(&client.fd, &mut client.tls, reply)
    {
        counters.bytes_sent.add(sent as u64);
        client.last_used_us = now_us;
        client.writable = sent == reply.len();
        reply = &reply[sent..];
    }
    client.complete(seq, reply, failed, now_us, counters);
}

impl Downstreams {
    /// Sends a client a node's reply to command `seq`. A script may return any error, so an error here is never taken for
    /// one of the router.
    #[inline]
    pub(in crate::worker) fn deliver_of_node(&mut self, turn: &Turn, handle: Handle, seq: u32, reply: &[u8]) {
        let Some(client) = self.get_mut(handle) else { return };
        let whole = reply;
        let failed = reply::is_error(whole);
        if failed {
            turn.counters().errors.count(whole);
        }
        give(client, turn.counters(), seq, reply, failed, turn.now_us());
        let gated = client.gated;
        self.mark(handle);
        if gated {
            settle_own_write(self, handle, seq, whole);
        }
        self.after_delivery(turn, handle);
    }

    /// Replies to the command just read with an error about replicas. The connection stays open, because the node itself
    /// may be up.
    pub(in crate::worker) fn refuse_read(&mut self, turn: &Turn, handle: Handle, class: u8, text: &str) {
        let mut reply = Vec::new();
        encode::error(&mut reply, text);
        if self.caught.takes(&reply) {
            return;
        }
        if let Some(client) = self.get_mut(handle) {
            let seq = client.owe(turn.now_us(), class);
            self.deliver_of_node(turn, handle, seq, &reply);
        }
    }

    /// Replies to the current command of a client.
    pub(in crate::worker) fn answer(&mut self, turn: &Turn, handle: Handle, class: u8, reply: &[u8]) {
        if self.caught.takes(reply) {
            return;
        }
        if let Some(client) = self.get_mut(handle) {
            let seq = client.owe(turn.now_us(), class);
            self.deliver(turn, handle, seq, reply);
        }
    }

    /// Sends a client the router's reply to command `seq`, and resumes a client that waited for it. Some errors close
    /// the connection instead.
    pub(in crate::worker) fn deliver(&mut self, turn: &Turn, handle: Handle, seq: u32, reply: &[u8]) {
        if reply::is_error(reply) && closes(turn, reply) {
            self.close_after_replies(handle);
            self.get_mut(handle).into_iter().for_each(|client| client.drop_replies_from(seq));
        }
        self.deliver_of_node(turn, handle, seq, reply);
    }

    #[inline]
    pub(in crate::worker) fn after_delivery(&mut self, turn: &Turn, handle: Handle) {
        let Some(client) = self.get_mut(handle) else { return };
        let gated = client.gated;
        let go_on = match client.stall {
            Stall::Barrier | Stall::Blocked => client.in_flight() == 0,
            Stall::Pipeline => client.in_flight() == 0 || client.has_room(turn.routing().live.client_pipeline_max / 2),
            _ => false,
        };
        if gated {
            release_invalidations(turn, self, handle);
            release_messages(self, handle);
        }
        if go_on {
            self.unstall(turn, handle);
        }
    }

    pub(in crate::worker) fn flush_clients(&mut self, turn: &Turn) {
        let mut marked = self.take_marked();
        for handle in marked.drain(..) {
            self.flush_client(turn, handle);
        }
        self.recycle_marked(marked);
    }

    /// Sends output as far as the socket accepts it. Returns whether none is left.
    pub(in crate::worker) fn flush_client(&mut self, turn: &Turn, handle: Handle) -> bool {
        let Some(client) = self.get_mut(handle) else { return true };
        client.dirty = false;
        let mut broken = false;
        while client.unsent() > 0 && client.writable {
            let bytes = &client.out[client.out_sent..];
            let sent = if client.closing && client.in_flight() == 0 {
                transport::send_last(&client.fd, &mut client.tls, bytes)
            } else {
                transport::send(&client.fd, &mut client.tls, bytes)
            };
            match sent {
                Ok(count) => {
                    turn.counters().bytes_sent.add(count as u64);
                    client.note_sent(count, turn.now_us());
                }
                Err(rustix::io::Errno::AGAIN) => client.writable = false,
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => {
                    broken = true;
                    break;
                }
            }
        }
        if broken {
            turn.counters().broken.add(1);
            self.close_client(turn, handle);
            return true;
        }
        let done = client.unsent() == 0;
        if done {
            client.out.clear();
            client.out_sent = 0;
            if client.out.capacity() > QUIET_CAPACITY && client.in_flight() == 0 {
                client.out = Vec::new();
            }
        } else if client.out_sent > OUTPUT_HIGH {
            client.out.drain(..client.out_sent);
            client.out_sent = 0;
        }
        if client.output_bytes() > turn.routing().live.client_output_limit {
            warn!(
                client = client.details.id,
                bytes = client.output_bytes(),
                "disconnecting a client that does not read its replies (output-limit)"
            );
            turn.counters().cut_output.add(1);
            self.close_client(turn, handle);
            return true;
        }
        let client_unsent = client.unsent();
        if let Some(held) = client.held
            && client_unsent < OUTPUT_HIGH / 4
        {
            self.emit(ClientEvent::Drained { link: held });
        }
        if let Some(client) = self.get_mut(handle) {
            if client_unsent <= OUTPUT_HIGH / 2 {
                client.writes_first = false;
            }
            if client.stall == Stall::Output && client_unsent <= OUTPUT_HIGH / 2 {
                self.unstall(turn, handle);
            } else if done && (client.closing || client.half_closed) {
                self.close_if_done(turn, handle);
            }
        }
        done
    }

    /// Closes the connection after all pending replies have been sent.
    pub(in crate::worker) fn close_after_replies(&mut self, handle: Handle) {
        if let Some(client) = self.get_mut(handle) {
            client.closing = true;
            client.input = Vec::new();
            client.input_at = 0;
            self.mark(handle);
        }
    }

    /// Closes a client whose blocking command cannot complete. A stopping server closes such connections, which
    /// libraries handle, unlike an error reply. Earlier replies are sent first.
    pub(in crate::worker) fn end_as_a_server_would(&mut self, turn: &Turn, handle: Handle, seq: u32) {
        turn.counters().cut_waiting.add(1);
        self.close_after_replies(handle);
        self.deliver(turn, handle, seq, b"");
    }

    pub(in crate::worker) fn close_if_done(&mut self, turn: &Turn, handle: Handle) {
        let Some(client) = self.get(handle) else { return };
        if !(client.closing || client.half_closed) || client.in_flight() > 0 || client.unsent() > 0 {
            return;
        }
        let waits = client.stall != Stall::None || (client.half_closed && self.is_resumed(handle));
        if !client.closing && waits {
            return;
        }
        let Some(client) = self.get_mut(handle) else { return };
        if client.closing && !client.half_closed {
            // Let the client read the last reply: closing with unread input in our socket would reset the connection.
            transport::finish(&client.fd, &mut client.tls);
            let mut sink = [0u8; 4096];
            for _ in 0..256 {
                if !matches!(rustix::net::recv(&client.fd, &mut sink[..], RecvFlags::empty()), Ok((_, 1..))) {
                    break;
                }
            }
        }
        self.close_client(turn, handle);
    }

    pub(in crate::worker) fn close_client(&mut self, turn: &Turn, handle: Handle) {
        let Some(mut client) = self.remove(handle) else { return };
        if let Some(tls) = &mut client.tls {
            tls.notify_close(&client.fd);
        }
        turn.poll().remove(&client.fd);
        turn.shared().clients.fetch_sub(1, Ordering::Relaxed);
        turn.counters().clients.sub(1);
        if client.stall == Stall::Blocked {
            turn.counters().blocked.sub(1);
        }
        self.emit(ClientEvent::Closed { handle, client: Box::new(client) });
    }
}
