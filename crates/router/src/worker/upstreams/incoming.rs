//! Data from a node: the received part of the reply at the head, and how it is handled.

use switchyard_resp::reply::{ReplyFollower, ReplyScan, ReplyScanner};

use super::link::Arrival;

/// Handling of the reply at the head of the connection.
#[derive(Clone, Copy, Debug)]
enum Body {
    /// Collected whole.
    Whole(ReplyScanner),
    /// Passed on to the client in pieces.
    Through(ReplyFollower),
    /// Discarded: it is fetched again on a connection for large values, or has no receiver.
    Skip(ReplyFollower),
}

/// Received data.
#[derive(Debug)]
pub(in crate::worker) struct Incoming {
    input: Vec<u8>,
    /// Time of the last data from the node.
    received_us: u64,
    body: Body,
    /// Bytes of the body that were handled in pieces.
    streamed: u64,
    /// Reading is paused because the client does not read.
    paused: bool,
}

impl Incoming {
    pub(super) fn new(now_us: u64) -> Self {
        let body = Body::Whole(ReplyScanner::default());
        Self { input: Vec::new(), received_us: now_us, body, streamed: 0, paused: false }
    }

    /// Time of the last data from the node, us.
    pub(in crate::worker) fn received_us(&self) -> u64 {
        self.received_us
    }

    #[inline]
    pub(super) fn note_received(&mut self, now_us: u64) {
        self.received_us = now_us;
    }

    /// Whether the node is sending a reply, and has sent a part of it in the last `timeout_us`.
    pub(super) fn is_arriving(&self, now_us: u64, timeout_us: u32) -> bool {
        let mid_reply = !self.input.is_empty() || !self.is_collecting();
        mid_reply && now_us.saturating_sub(self.received_us) < u64::from(timeout_us)
    }

    /// Memory of the received part of a reply, bytes.
    pub(in crate::worker) fn memory(&self) -> usize {
        self.input.capacity()
    }

    /// Length of the received part of a reply, bytes.
    pub(in crate::worker) fn len(&self) -> usize {
        self.input.len()
    }

    /// Takes the received part of an incomplete reply, to be extended and returned by [`Self::keep`].
    #[inline]
    pub(super) fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.input)
    }

    #[inline]
    pub(super) fn keep(&mut self, part: Vec<u8>) {
        self.input = part;
    }

    /// Discards the received part of a reply.
    pub(super) fn clear(&mut self) {
        self.input.clear();
    }

    /// Expects data of a new connection.
    pub(super) fn restart(&mut self) {
        self.input = Vec::new();
        self.next_body();
    }

    /// Pauses reading, because the client does not read.
    pub(super) fn pause(&mut self) {
        self.paused = true;
    }

    /// Ends a pause. Returns whether there was one.
    pub(super) fn unpause(&mut self) -> bool {
        std::mem::take(&mut self.paused)
    }

    #[inline]
    pub(in crate::worker) fn is_paused(&self) -> bool {
        self.paused
    }

    /// Whether the reply at the head is collected whole.
    pub(in crate::worker) fn is_collecting(&self) -> bool {
        matches!(self.body, Body::Whole(_))
    }

    pub(in crate::worker) fn passes_body_on(&self) -> bool {
        matches!(self.body, Body::Through(_))
    }

    /// Discards the reply at the head.
    pub(super) fn skip_body(&mut self) {
        self.body = Body::Skip(ReplyFollower::default());
    }

    /// Passes the reply at the head on in pieces.
    pub(super) fn pass_body_on(&mut self) {
        self.body = Body::Through(ReplyFollower::default());
    }

    /// Returns the next part of these received bytes. `max`: the maximum size of a collected reply; `large`: the
    /// minimum size of a large one.
    #[inline]
    pub(super) fn arrival(&mut self, bytes: &[u8], large: usize, max: impl FnOnce() -> usize) -> Arrival {
        let passes = matches!(self.body, Body::Through(_));
        match &mut self.body {
            Body::Whole(scanner) => match scanner.scan(bytes) {
                Ok(ReplyScan::Complete(len)) => Arrival::Reply(len),
                Ok(ReplyScan::Incomplete(need)) => {
                    let (size, max) = (need.max(bytes.len()), max());
                    if size > max {
                        Arrival::Senseless(format!("it sends more than {max} bytes instead of a short reply"))
                    } else if size > large {
                        Arrival::Large(size)
                    } else {
                        Arrival::Nothing
                    }
                }
                Err(error) => Arrival::Senseless(error.to_string()),
            },
            Body::Through(follower) | Body::Skip(follower) => match follower.follow(bytes) {
                Ok((len, is_last)) => {
                    self.streamed += len as u64;
                    Arrival::Piece { len, passes, is_last }
                }
                Err(error) => Arrival::Senseless(error.to_string()),
            },
        }
    }

    /// Starts the next reply. Returns the bytes of the last one that were handled in pieces.
    pub(super) fn next_body(&mut self) -> u64 {
        self.body = Body::Whole(ReplyScanner::default());
        std::mem::take(&mut self.streamed)
    }
}
