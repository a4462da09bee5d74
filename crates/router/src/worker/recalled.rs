//! Commands that wait at a node (BLPOP and relatives) whose keys are moved away from it: their wait is ended there, and they are issued again
//! where the keys are, with the time that is left, the oldest first.
//!
//! The wait is ended by `CLIENT UNBLOCK ... ERROR`, because a plain one looks like the command's own time-out. Until the node has answered
//! the command is in flight and holds up the drain barrier: it may still be served, and then that is its reply.

use std::sync::Arc;

use switchyard_resp::command::CommandClass;
use switchyard_resp::request::{Limits, Scan, Scanner};
use switchyard_resp::{encode, reply};

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
    /// Streams that it reads from their ends on (`$`), by the place of that argument, and where they ended when its wait was ended.
    ends: Vec<(usize, Option<Vec<u8>>)>,
}

impl Client {
    /// Whether a waiting command of it is with us.
    pub(super) fn is_recalled(&self) -> bool {
        self.waiting.as_ref().is_some_and(|p| p.state == State::Here)
    }
}

/// The places of `$` in an XREAD, each with its stream's.
fn open_ends(request: &[u8]) -> Vec<(usize, usize)> {
    let mut scanner = Scanner::default();
    let limits = Limits { argument_max: usize::MAX >> 1, large: usize::MAX, authenticated: true };
    if !matches!(scanner.scan(request, &limits), Ok(Scan::Complete { .. })) {
        return Vec::new();
    }
    let args = scanner.args(request);
    if !args.get(0).is_some_and(|name| name.eq_ignore_ascii_case(b"XREAD")) {
        return Vec::new();
    }
    let Some(first) = args.iter().position(|a| a.eq_ignore_ascii_case(b"STREAMS")).map(|at| at + 1) else { return Vec::new() };
    let count = (args.len() - first) / 2;
    (0..count).map(|n| (first + count + n, first + n)).filter(|(id, _)| args.get(*id) == Some(b"$")).collect()
}

/// The argument of a request at this place.
fn argument(request: &[u8], place: usize) -> Option<Vec<u8>> {
    let mut scanner = Scanner::default();
    let limits = Limits { argument_max: usize::MAX >> 1, large: usize::MAX, authenticated: true };
    matches!(scanner.scan(request, &limits), Ok(Scan::Complete { .. })).then(|| scanner.args(request).get(place).map(<[u8]>::to_vec))?
}

/// The same command with other arguments at some places.
fn with_arguments(request: &[u8], others: &[(usize, Option<Vec<u8>>)]) -> Option<Vec<u8>> {
    let mut scanner = Scanner::default();
    let limits = Limits { argument_max: usize::MAX >> 1, large: usize::MAX, authenticated: true };
    if !matches!(scanner.scan(request, &limits), Ok(Scan::Complete { .. })) {
        return None;
    }
    let args = scanner.args(request);
    let mut out = Vec::with_capacity(request.len() + 64);
    encode::header(&mut out, b'*', args.len());
    for (index, arg) in args.iter().enumerate() {
        let other = others.iter().find(|(place, _)| *place == index).and_then(|(_, other)| other.as_deref());
        encode::bulk(&mut out, other.unwrap_or(arg));
    }
    Some(out)
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
            client.waiting = Some(Box::new(Waiting { request: request.to_vec(), seq, until_us, state: State::There, ends: Vec::new() }));
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
            waiting.ends = open_ends(&waiting.request).into_iter().map(|(id, _)| (id, None)).collect();
        }
        self.unblock(link, true, None);
    }

    /// A recalled XREAD that begins at the ends of streams: what was added while it waits nowhere would be missed. So it is found out where the
    /// streams end when its wait ends. The database and the streams.
    pub(super) fn streams_to_look_at(&self, holder: Handle) -> Option<(u32, Vec<Vec<u8>>)> {
        let client = self.clients.get(holder)?;
        let waiting = client.waiting.as_ref().filter(|w| w.state == State::Ending && !w.ends.is_empty())?;
        let streams = open_ends(&waiting.request).into_iter().filter_map(|(_, stream)| argument(&waiting.request, stream)).collect();
        Some((client.database, streams))
    }

    /// The answer to the transaction that ends such a wait; gives that to CLIENT UNBLOCK.
    pub(super) fn streams_seen<'a>(&mut self, holder: Handle, answer: &'a [u8]) -> &'a [u8] {
        let mut parts = reply::elements(answer);
        let Some(unblocked) = parts.next() else { return b":0\r\n" };
        let ended = reply::integer(unblocked) == Some(1);
        if let Some(waiting) = self.clients.get_mut(holder).and_then(|c| c.waiting.as_mut()).filter(|_| ended) {
            for ((_, end), stream) in waiting.ends.iter_mut().zip(parts) {
                let fields: Vec<&[u8]> = reply::elements(stream).map(|field| reply::text(field).unwrap_or_default()).collect();
                let at = fields.iter().position(|field| *field == b"last-generated-id");
                // Where there is no stream, everything is new.
                *end = Some(at.and_then(|at| fields.get(at + 1)).map_or_else(|| b"0-0".to_vec(), |id| id.to_vec()));
            }
            self.resumed.push(holder);
        }
        unblocked
    }

    /// The node does not say where streams end: the command is issued again as it was.
    pub(super) fn streams_unseen(&mut self, holder: Option<Handle>) {
        let Some(holder) = holder else { return };
        if let Some(waiting) = self.clients.get_mut(holder).and_then(|c| c.waiting.as_mut()).filter(|w| !w.ends.is_empty()) {
            waiting.ends = Vec::new();
            self.resumed.push(holder);
        }
    }

    /// The same as [`Worker::push_own`] in a database.
    pub(super) fn push_own_in(&mut self, link: Handle, database: u32, args: &[&[u8]]) {
        if self.links.get(link).is_some_and(|l| l.database != database) {
            self.push_own(link, &[b"SELECT", database.to_string().as_bytes()], Purpose::Nobody, 0);
            if let Some(link) = self.links.get_mut(link) {
                link.database = database;
            }
        }
        self.push_own(link, args, Purpose::Nobody, 0);
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
        if waiting.ends.iter().any(|(_, end)| end.is_none()) {
            return; // until it is known where its streams ended
        }
        let (request, seq, until_us) = (waiting.request.clone(), waiting.seq, waiting.until_us);
        let request = if waiting.ends.is_empty() { request } else { with_arguments(&request, &waiting.ends).unwrap_or(request) };
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
                // From here on it begins where it began here.
                if !waiting.ends.is_empty() {
                    waiting.request = request;
                    waiting.ends = Vec::new();
                }
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
