//! Commands that wait at a node (BLPOP and relatives) whose keys are moved away from it: their wait is ended there, and they are issued again
//! where the keys are, with the time that is left, the oldest first.
//!
//! The wait is ended by `CLIENT UNBLOCK ... ERROR`, because a plain one looks like the command's own time-out. Until the node has answered
//! the command is in flight and holds up the drain barrier: it may still be served, and then that is its reply.

use std::sync::Arc;

use switchyard_resp::command::CommandClass;
use switchyard_resp::encode;
use switchyard_resp::request::{Limits, Scan, Scanner};

use super::downstream::Client;
use super::pool::Acquired;
use super::upstream::{Lane, Purpose};
use super::{Stall, Worker};
use crate::slab::Handle;

/// Where a waiting command is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// At a node.
    There,
    /// The same, but we have asked the node to end its wait.
    Ending,
    /// With us, until its keys are where they can be waited for.
    Here,
}

/// A command that waits.
#[derive(Debug)]
pub(super) struct Waiting {
    request: Vec<u8>,
    seq: u32,
    /// When its own time is over, us.
    until_us: Option<u64>,
    state: State,
}

impl Client {
    /// Whether a waiting command of it is with us.
    pub(super) fn is_recalled(&self) -> bool {
        self.waiting.as_ref().is_some_and(|p| p.state == State::Here)
    }
}

/// The same command with less time, milliseconds.
fn with_time_left(request: &[u8], left_ms: u64) -> Option<Vec<u8>> {
    let mut scanner = Scanner::default();
    let limits = Limits { argument_max: usize::MAX >> 1, large: usize::MAX, authenticated: true };
    if !matches!(scanner.scan(request, &limits), Ok(Scan::Complete { .. })) {
        return None;
    }
    let args = scanner.args(request);
    let name = args.get(0)?.to_ascii_uppercase();
    let seconds = format!("{}.{:03}", left_ms / 1000, left_ms % 1000);
    let (place, text) = match &name[..] {
        b"BLMPOP" | b"BZMPOP" => (1, seconds),
        b"XREAD" | b"XREADGROUP" => (args.iter().position(|a| a.eq_ignore_ascii_case(b"BLOCK"))? + 1, left_ms.to_string()),
        _ => (args.len() - 1, seconds),
    };
    let mut out = Vec::with_capacity(request.len() + 8);
    encode::header(&mut out, b'*', args.len());
    for (index, arg) in args.iter().enumerate() {
        encode::bulk(&mut out, if index == place { text.as_bytes() } else { arg });
    }
    Some(out)
}

impl Worker {
    /// A client's command has been sent that may wait: it is kept until it is answered. `waits_us`: for how long; `None` without end.
    pub(super) fn keep_waiting(&mut self, handle: Handle, request: &[u8], seq: u32, waits_us: Option<u64>) {
        let until_us = waits_us.map(|us| self.now_us.saturating_add(us));
        if let Some(client) = self.clients.get_mut(handle) {
            client.waiting = Some(Box::new(Waiting { request: request.to_vec(), seq, until_us, state: State::There }));
        }
    }

    /// The keys that the command on this connection waits for are observed, as part of a move: it may create others once it is served.
    pub(super) fn note_kept(&mut self, holder: Handle) {
        if let Some(request) = self.clients.get(holder).and_then(|c| c.waiting.as_ref()).map(|p| p.request.clone()) {
            self.note_waiting(&request);
        }
    }

    /// Ends the wait of the command on this connection, so that it can be issued again elsewhere.
    pub(super) fn recall_waiting(&mut self, link: Handle) {
        let Some(holder) = self.links.get(link).map(|l| l.holder) else { return };
        if let Some(waiting) = self.clients.get_mut(holder).and_then(|c| c.waiting.as_mut()) {
            waiting.state = State::Ending;
        }
        self.unblock(link, true, None);
    }

    /// The reply at the head of a connection is an error. True where it only says that a wait has been ended because we asked for it.
    pub(super) fn take_recalled(&mut self, link_handle: Handle, answer: &[u8]) -> bool {
        let Some(link) = self.links.get(link_handle).filter(|l| l.lane == Lane::Blocking && answer.starts_with(b"-UNBLOCKED")) else {
            return false;
        };
        let Some(pending) = link.pending.front().copied().filter(|p| p.purpose == Purpose::Client && link.expired == 0) else {
            return false;
        };
        let asked_by_a_client = link.unblock.as_ref().is_some_and(|u| u.is_asked_by_clients());
        let Some(client) = self.clients.get_mut(pending.who) else { return false };
        let Some(waiting) = client.waiting.as_mut().filter(|p| p.state == State::Ending && p.seq == pending.seq) else { return false };
        if asked_by_a_client {
            return false;
        }
        waiting.state = State::Here;
        client.held = None;
        self.stall(pending.who, Stall::Moving);
        if let Some(link) = self.links.get_mut(link_handle) {
            link.pop();
            link.trim();
        }
        self.after_exclusive_reply(link_handle);
        self.resumed.push(pending.who);
        true
    }

    /// Issues a command again that is with us, if its keys can be waited for now.
    pub(super) fn issue_again(&mut self, handle: Handle) {
        let Some(waiting) = self.clients.get(handle).and_then(|c| c.waiting.as_ref()) else { return };
        let (request, seq, until_us) = (waiting.request.clone(), waiting.seq, waiting.until_us);
        let (node, slot) = match self.place_again(handle, &request) {
            Ok(Some(place)) => place,
            Ok(None) => return,
            Err(text) => return self.end_recalled(handle, seq, &text),
        };
        let link = match self.acquire(handle, node, Lane::Blocking) {
            Acquired::Link(link) => link,
            Acquired::Wait => return,
            Acquired::Refused(text) => return self.end_recalled(handle, seq, &Arc::from(text)),
        };
        // 0 would be without end.
        let left_us = until_us.map(|until| until.saturating_sub(self.now_us).max(1000));
        let request = left_us.and_then(|us| with_time_left(&request, us.div_ceil(1000))).unwrap_or(request);
        self.push_exclusive(handle, link, &request, CommandClass::Blocking as u8, Some(seq));
        self.wait_at_node(handle, link, slot, left_us);
        if let Some(client) = self.clients.get_mut(handle) {
            client.note_write(node);
            if let Some(waiting) = client.waiting.as_mut() {
                waiting.state = State::There;
            }
        }
    }

    fn end_recalled(&mut self, handle: Handle, seq: u32, text: &Arc<str>) {
        let mut error = Vec::new();
        encode::error(&mut error, text);
        if let Some(client) = self.clients.get_mut(handle) {
            client.waiting = None;
        }
        self.unstall(handle);
        self.deliver(handle, seq, &error);
    }

    /// A read that waited for keys goes on: what its client waits for from here on is found out anew.
    pub(super) fn end_moving_stall(&mut self, handle: Handle) {
        if let Some(client) = self.clients.get_mut(handle).filter(|c| c.stall == Stall::Moving) {
            client.stall = Stall::None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_issued_again_with_the_time_that_is_left() {
        let request = |args: &[&str]| {
            let mut out = Vec::new();
            encode::command(&mut out, args.iter().map(|a| a.as_bytes()));
            out
        };
        for (before, after) in [
            (&["BLPOP", "a", "b", "5"][..], &["BLPOP", "a", "b", "1.250"][..]),
            (&["blmpop", "5", "1", "a", "LEFT"], &["blmpop", "1.250", "1", "a", "LEFT"]),
            (
                &["XREAD", "COUNT", "1", "block", "5000", "STREAMS", "a", "$"],
                &["XREAD", "COUNT", "1", "block", "1250", "STREAMS", "a", "$"],
            ),
        ] {
            assert_eq!(with_time_left(&request(before), 1250), Some(request(after)));
        }
    }
}
