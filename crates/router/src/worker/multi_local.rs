//! Local commands in a transaction: they are queued, and answered at their place in EXEC's array.
//!
//! The node executes the other commands in one piece and does not receive these. A command that changes the client
//! (`CLIENT SETNAME`) is executed at the node's reply to EXEC, because a failed transaction must change nothing. A
//! command that needs nodes (`INFO`, `CONFIG GET`) only reads, so it is answered before EXEC is sent, and no reply of a
//! node comes between the others and EXEC's.
//!
//! They are not sent to the node, whose replies would concern our connection and a single server.

pub(super) mod state;

use std::sync::Arc;

use switchyard_resp::command::{Handling, Local};
use switchyard_resp::{encode, reply};

use super::Worker;
use super::command::with_parsed_command;
use super::downstreams::replies::ReplyMode;
use super::downstreams::waits::Stall;
use super::flow::Flow;
use super::invocation::Invocation;
use super::transactions::session::Session;
use crate::shared::RoutingSnapshot;
use crate::slab::Handle;
use state::{Answer, CapturedReply, LocalInMulti, When};

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
