//! Local commands in a transaction: they are queued, and answered at their place in EXEC's array.
//!
//! The node executes the other commands in one piece and does not receive these. A command that changes the client
//! (`CLIENT SETNAME`) is executed at the node's reply to EXEC, because a failed transaction must change nothing. A
//! command that needs nodes (`INFO`, `CONFIG GET`) only reads, so it is answered before EXEC is sent, and no reply of a
//! node comes between the others and EXEC's.
//!
//! They are not sent to the node, whose replies would concern our connection and a single server.

use std::sync::Arc;

use super::invocation::Invocation;
use super::transactions::Session;
use std::collections::BTreeSet;

use switchyard_resp::command::{Handling, Local};
use switchyard_resp::{encode, reply};

use super::Worker;
use super::dispatch::Flow;
use super::downstreams::Downstreams;
use super::downstreams::replies::ReplyMode;
use super::downstreams::waits::Stall;
use super::scan::QueuedScan;
use super::transit::with_parsed_command;
use super::turn::Turn;
use crate::shared::RoutingSnapshot;
use crate::slab::Handle;

/// Time at which the router answers a command of a transaction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum When {
    /// Before EXEC is sent, with queries to nodes.
    Before,
    /// After the node has executed the other commands.
    After,
}

/// Returns when the router answers such a command in a transaction. `None`: it does not.
pub(super) fn answered(local: Local) -> Option<When> {
    match local {
        Local::Info | Local::ConfigGet => Some(When::Before),
        Local::AclWhoami
        | Local::ClientCapa
        | Local::ClientGetname
        | Local::ClientHelp
        | Local::ClientId
        | Local::ClientInfo
        | Local::ClientNoEvict
        | Local::ClientNoTouch
        | Local::ClientSetinfo
        | Local::ClientSetname
        | Local::Lolwut
        | Local::Role => Some(When::After),
        _ => None,
    }
}

/// Captures a reply instead of sending it to a client.
#[derive(Debug, Default)]
pub(super) enum CapturedReply {
    /// Replies go to clients.
    #[default]
    Nothing,
    /// Capture the next reply.
    Wanted,
    Answer(Vec<u8>),
}

impl CapturedReply {
    /// Captures a reply if requested. Returns whether it did.
    #[inline]
    pub(super) fn takes(&mut self, answer: &[u8]) -> bool {
        let is_wanted = matches!(self, Self::Wanted);
        if is_wanted {
            *self = Self::Answer(answer.to_vec());
        }
        is_wanted
    }

    fn end(&mut self) -> Option<Vec<u8>> {
        match std::mem::take(self) {
            Self::Answer(answer) => Some(answer),
            Self::Nothing | Self::Wanted => None,
        }
    }
}

#[derive(Debug)]
enum Answer {
    None,
    /// Nodes are being queried: number of the pending reply, and the client's database.
    Awaited(u32, u32),
    Given(Vec<u8>),
}

#[derive(Debug)]
struct Own {
    /// Place in EXEC's array. `None`: only the answer is needed.
    place: Option<usize>,
    request: Vec<u8>,
    when: When,
    answer: Answer,
}

/// Commands of a transaction whose replies are not the node's.
#[derive(Debug, Default)]
pub(super) struct LocalInMulti {
    own: Vec<Own>,
    /// Number of commands with a place in EXEC's array.
    placed: usize,
    /// Bytes of their requests.
    request_bytes: usize,
    /// All commands before this index that need queries are answered.
    replied: usize,
    databases: BTreeSet<u32>,
    /// Places of the node's replies to SCAN among its replies.
    scans: Vec<(usize, QueuedScan)>,
}

impl LocalInMulti {
    pub(super) fn is_empty(&self) -> bool {
        self.own.is_empty() && self.scans.is_empty()
    }

    /// Number of commands in EXEC's array.
    pub(super) fn count(&self) -> usize {
        self.placed
    }

    /// Memory of the queue, bytes.
    pub(super) fn bytes(&self) -> usize {
        self.own.len() * size_of::<Own>() + self.request_bytes + self.scans.len() * size_of::<(usize, QueuedScan)>()
    }

    /// Queues a command at this place of EXEC's array.
    pub(super) fn queue(&mut self, place: usize, when: When, request: &[u8]) {
        self.placed += 1;
        self.push(Own { place: Some(place), request: request.to_vec(), when, answer: Answer::None });
    }

    /// Records a SCAN that the node answers, at this place among its replies.
    pub(super) fn queue_scan(&mut self, place: usize, scan: QueuedScan) {
        self.scans.push((place, scan));
    }

    /// Requests a check before EXEC that the nodes have this database.
    pub(super) fn require_database(&mut self, database: u32) {
        let mut request = Vec::new();
        encode::command(&mut request, [&b"SELECT"[..], database.to_string().as_bytes()]);
        if self.databases.insert(database) {
            self.push(Own { place: None, request, when: When::Before, answer: Answer::None });
        }
    }

    fn push(&mut self, own: Own) {
        self.request_bytes += own.request.capacity();
        self.own.push(own);
    }

    /// Returns the first command that needs a query and has no answer.
    fn unanswered(&mut self) -> Option<&mut Own> {
        let is_done = |own: &Own| own.when == When::After || matches!(own.answer, Answer::Given(_));
        while self.own.get(self.replied).is_some_and(is_done) {
            self.replied += 1;
        }
        self.own.get_mut(self.replied)
    }

    fn unasked(&mut self) -> Option<&mut Own> {
        self.unanswered().filter(|own| matches!(own.answer, Answer::None))
    }

    fn awaited(&mut self, seq: u32) -> Option<&mut Own> {
        self.unanswered().filter(|own| matches!(own.answer, Answer::Awaited(of, _) if of == seq))
    }
}

impl Worker {
    /// Sends the queries required before EXEC. `None`: all are answered.
    #[cold]
    pub(super) fn query_before_exec(&mut self, routing: &Arc<RoutingSnapshot>, handle: Handle) -> Option<Flow> {
        loop {
            let client = self.cx.down.get_mut(handle)?;
            let (is_owed, database) = (client.in_flight() > 0, client.database());
            let own = client.state_mut::<Session>()?.multi.own.unasked()?;
            if is_owed {
                return Some(Flow::Stall(Stall::Barrier));
            }
            let request = own.request.clone();
            // Only EXEC itself is subject to CLIENT REPLY.
            let mode = client.replies_mut().set_mode(ReplyMode::On);
            let (flow, answer) = self.caught(routing, handle, &request);
            let client = self.cx.down.get_mut(handle)?;
            client.replies_mut().set_mode(mode);
            let seq = client.replies().last();
            let own = client.state_mut::<Session>()?.multi.own.unasked()?;
            match (flow, answer) {
                (_, Some(answer)) => {
                    own.answer = Answer::Given(answer);
                    client.select(database);
                }
                (Flow::Next, None) => {
                    own.answer = Answer::Awaited(seq, database);
                    return Some(Flow::Stall(Stall::Barrier));
                }
                (flow, None) => return Some(flow),
            }
        }
    }

    /// Executes a local command and returns its reply, if it is immediate.
    fn caught(&mut self, routing: &Arc<RoutingSnapshot>, handle: Handle, request: &[u8]) -> (Flow, Option<Vec<u8>>) {
        self.cx.down.caught = CapturedReply::Wanted;
        let flow = with_parsed_command(routing, request, |command, args| match command.handling {
            Handling::Local(local) => self.local(&Invocation { routing, handle, command, raw: request, args }, local),
            _ => Flow::Next,
        });
        (flow.unwrap_or(Flow::Next), self.cx.down.caught.end())
    }

    /// Inserts the router's replies into the node's reply to EXEC, and executes commands that change the client.
    pub(super) fn with_own_answers(&mut self, handle: Handle, own: LocalInMulti, answer: &[u8]) -> Vec<u8> {
        let routing = self.cx.turn.routing().clone();
        let count = own.count();
        let mut given: Vec<(usize, Vec<u8>)> = Vec::with_capacity(count);
        for own in own.own {
            let Some(place) = own.place else { continue };
            let answer = match own.answer {
                Answer::Given(answer) => Some(answer),
                Answer::None | Answer::Awaited(..) => self.caught(&routing, handle, &own.request).1,
            };
            given.push((
                place,
                answer.unwrap_or_else(|| b"-ERR switchyard: a command of the transaction got no reply\r\n".to_vec()),
            ));
        }
        let mut elements = reply::elements(answer);
        let whole = elements.remaining() as usize + count;
        let mut out = Vec::with_capacity(answer.len() + 64 * count);
        encode::header(&mut out, b'*', whole);
        let (mut given, mut scans, mut place) = (given.into_iter().peekable(), own.scans.into_iter().peekable(), 0);
        for at in 0..whole {
            if let Some((_, answer)) = given.next_if(|(place, _)| *place == at) {
                out.extend_from_slice(&answer);
                continue;
            }
            let Some(element) = elements.next() else { break };
            match scans.next_if(|(of, _)| *of == place) {
                Some((_, scan)) => out.extend_from_slice(&self.scanned(&scan, element)),
                None => out.extend_from_slice(element),
            }
            place += 1;
        }
        out
    }
}

/// Passes a combined reply of several nodes to a client, or to its transaction if that has requested it.
pub(super) fn deliver_joined(turn: &Turn, down: &mut Downstreams, handle: Handle, seq: u32, answer: &[u8]) {
    let Some(client) = down.get_mut(handle) else { return };
    if client.in_multi()
        && let Some(own) = client.state_mut::<Session>().and_then(|session| session.multi.own.awaited(seq))
        && let Answer::Awaited(_, database) = std::mem::replace(&mut own.answer, Answer::Given(answer.to_vec()))
    {
        client.select(database);
        return down.deliver(turn, handle, seq, b"");
    }
    down.deliver(turn, handle, seq, answer);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nodes are queried for one command at a time, and the cost per command is constant for long transactions.
    #[test]
    fn queries_to_nodes_are_sent_in_order_and_once() {
        let mut own = LocalInMulti::default();
        own.queue(0, When::After, b"ROLE");
        own.queue(1, When::Before, b"INFO");
        own.require_database(7);
        own.require_database(7);
        own.queue(3, When::Before, b"CONFIG GET x");
        assert_eq!(
            (own.count(), own.bytes()),
            (3, 4 * size_of::<Own>() + own.own.iter().map(|own| own.request.capacity()).sum::<usize>())
        );
        let mut asked = Vec::new();
        while let Some(next) = own.unasked() {
            next.answer = Answer::Awaited(5, 0);
            asked.push(next.place);
            assert!(own.unasked().is_none() && own.awaited(4).is_none(), "one at a time");
            own.awaited(5).expect("it is awaited").answer = Answer::Given(Vec::new());
        }
        assert_eq!(asked, [Some(1), None, Some(3)]);
    }
}
