//! Output to clients: replies in order, and closing.

use std::sync::atomic::Ordering;

use switchyard_resp::{encode, reply};
use tracing::warn;

use super::socket::OUTPUT_HIGH;
use super::waits::Stall;
use super::{ClientEvent, Downstreams};
use crate::slab::Handle;
use crate::worker::pubsub::clients::release_messages;
use crate::worker::tracking::nodes::release_invalidations;
use crate::worker::tracking::own::settle_own_write;
use crate::worker::turn::Turn;

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
        client.give(turn.counters(), seq, reply, failed, turn.now_us());
        let gated = client.is_gated();
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
            self.get_mut(handle).into_iter().for_each(|client| client.replies.drop_replies_from(seq));
        }
        self.deliver_of_node(turn, handle, seq, reply);
    }

    #[inline]
    pub(in crate::worker) fn after_delivery(&mut self, turn: &Turn, handle: Handle) {
        let Some(client) = self.get_mut(handle) else { return };
        let gated = client.is_gated();
        let go_on = match client.stall() {
            Stall::Barrier | Stall::Blocked => client.in_flight() == 0,
            Stall::Pipeline => {
                client.in_flight() == 0 || client.replies.has_room(turn.routing().live.client_pipeline_max / 2)
            }
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
        if !client.flush(turn.counters(), turn.now_us()) {
            turn.counters().broken.add(1);
            self.close_client(turn, handle);
            return true;
        }
        client.socket.trim(client.in_flight() == 0);
        let done = client.unsent() == 0;
        if client.output_bytes() > turn.routing().live.client_output_limit {
            warn!(
                client = client.identity.id(),
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
                client.socket.set_writes_first(false);
            }
            if client.stall() == Stall::Output && client_unsent <= OUTPUT_HIGH / 2 {
                self.unstall(turn, handle);
            } else if done && client.input.is_last() {
                self.close_if_done(turn, handle);
            }
        }
        done
    }

    /// Closes the connection after all pending replies have been sent.
    pub(in crate::worker) fn close_after_replies(&mut self, handle: Handle) {
        if let Some(client) = self.get_mut(handle) {
            client.input.close();
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
        if !client.input.is_last() || client.in_flight() > 0 || client.unsent() > 0 {
            return;
        }
        let waits = client.stall() != Stall::None || (client.input.has_ended() && self.is_resumed(handle));
        if !client.input.is_closing() && waits {
            return;
        }
        let Some(client) = self.get_mut(handle) else { return };
        if client.input.is_closing() && !client.input.has_ended() {
            client.socket.finish();
        }
        self.close_client(turn, handle);
    }

    pub(in crate::worker) fn close_client(&mut self, turn: &Turn, handle: Handle) {
        let Some(mut client) = self.remove(handle) else { return };
        client.socket.close(turn.poll());
        turn.shared().clients.fetch_sub(1, Ordering::Relaxed);
        turn.counters().clients.sub(1);
        if client.stall() == Stall::Blocked {
            turn.counters().blocked.sub(1);
        }
        self.emit(ClientEvent::Closed { handle, client: Box::new(client) });
    }
}

/// Whether an error of the router closes its client's connection instead, as the end of a plain server does: with one
/// node, if commands wait for it at all.
fn closes(turn: &Turn, error: &[u8]) -> bool {
    let is_loss = error.starts_with(b"-NODEDOWN ") || error.starts_with(b"-NODELOST ");
    is_loss && turn.routing().topology.nodes().len() == 1 && turn.routing().live.wait_for_return(1).as_micros() > 0
}
