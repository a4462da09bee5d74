//! WAIT and WAITAOF: the number of replicas that have this client's writes.
//!
//! A node answers for the connection of the command: it compares what replicas have acknowledged with the replication
//! offset after the last write *of that connection*. Our writes travel on shared connections, and WAIT there would hold
//! up all other clients; on a connection without writes, the answer would always be positive, which is false. So a
//! connection of the blocking pool first makes a write of its own that changes nothing, `SWAPDB 0 0`: it is propagated
//! to replicas and to the append-only file, and the client's writes, which have been answered before, are older than
//! it. Redis up to 7 would accept any command for this; Valkey only a propagated one. Members of a cluster refuse
//! `SWAPDB`, and get `FUNCTION RESTORE` of no libraries.
//!
//! Several nodes: each that the client has written to is queried, one at a time, with the time that remains; the reply
//! is the minimum. One at a time, because a client that held one connection while it waited for another could wait in a
//! circle.
//!
//! Invariant: a reply confirms a write only by a process that has it. If another process has replaced one that the
//! client has written to ([`Written`]), the reply is 0: it may lack the write. If keys have changed their node since
//! the first write, or are moving, all nodes with keys are queried, and a replaced process of any node counts: a key
//! may have been at a node without keys. While keys move, twice: the key of a write is at its source when that is
//! queried first, or at its target when that is queried last.

pub(super) mod state;

use switchyard_resp::{encode, reply};

use super::blocking::wait_at_node;
use super::checkout::{Acquired, acquire, push_exclusive};
use super::command::{Call, parse};
use super::context::Context;
use super::downstreams::Downstreams;
use super::downstreams::waits::Stall;
use super::flow::Flow;
use super::invocation::Invocation;
use super::reissued::ReissuedCommands;
use super::transactions::session::Session;
use super::turn::Turn;
use super::upstreams::Link;
use super::upstreams::kind::Waited;
use super::upstreams::pending::{MARK, MEMBER_MARK, Pending, Purpose};
use crate::lane::Lane;
use crate::reigns::bit_of;
use crate::slab::Handle;
use state::{About, Since, Wait, Written};

/// Bits of all nodes.
const ALL: u64 = u64::MAX;

/// The reply of WAIT (one number) or WAITAOF (two).
fn numbers_of(numbers: &[i64]) -> Vec<u8> {
    let mut out = Vec::new();
    if numbers.len() > 1 {
        encode::header(&mut out, b'*', numbers.len());
    }
    for number in numbers {
        encode::integer(&mut out, *number);
    }
    out
}

/// The reply that confirms nothing.
fn zeros(numbers: usize) -> Vec<u8> {
    numbers_of(&vec![0; numbers])
}

/// After the loss of the connection of a query: the client gets its error.
pub(super) fn forget_waiting(down: &mut Downstreams, handle: Handle) {
    if let Some(session) = down.get_mut(handle).and_then(|c| c.state_mut::<Session>()) {
        session.wait = None;
    }
}

fn end_waiting(turn: &Turn, down: &mut Downstreams, handle: Handle, answer: &[u8]) {
    let wait = down.get_mut(handle).and_then(|c| c.state_mut::<Session>()?.wait.take());
    if let Some(wait) = wait {
        down.deliver(turn, handle, wait.seq, answer);
    }
}

/// Handles the reply of a node.
/// `refused`: the node's error for the mark.
pub(super) fn on_wait(
    turn: &Turn,
    down: &mut Downstreams,
    pending: Pending,
    refused: Option<Box<[u8]>>,
    answer: &[u8],
) {
    let handle = pending.who;
    let Some(client) = down.get_mut(handle) else { return };
    let Some(wait) = client.state_mut::<Session>().and_then(|s| s.wait.as_mut()).filter(|w| w.seq == pending.seq)
    else {
        return;
    };
    if reply::is_error(answer) {
        let answer = answer.to_vec();
        end_waiting(turn, down, handle, &answer);
        return;
    }
    if let Some(why) = refused {
        let mark = if turn.routing().topology.is_of_cluster() { "FUNCTION RESTORE" } else { "SWAPDB 0 0" };
        let text = format!("ERR the node refuses {mark}, without which the reply to WAIT would be wrong: ");
        let mut out = Vec::new();
        encode::line(&mut out, b'-', &[text.as_bytes(), &why[..]].concat());
        end_waiting(turn, down, handle, &out);
        return;
    }
    let numbers: Vec<i64> = match reply::integer(answer) {
        Some(number) => vec![number],
        None => reply::elements(answer).filter_map(reply::integer).collect(),
    };
    if wait.least.is_empty() {
        wait.least = numbers;
    } else {
        for (least, number) in wait.least.iter_mut().zip(numbers) {
            *least = number.min(*least);
        }
    }
    // The connection is returned first; then this client continues with the next node.
    wait.due = true;
    down.resume(handle);
}

impl ReissuedCommands {
    pub(super) fn wait(&mut self, cx: &mut Context, call: &Invocation<'_>) -> Flow {
        let Invocation { routing, handle, command, args, .. } = *call;
        let class = command.class() as u8;
        let last = args.len() - 1;
        let counts = (1..last).all(|i| args.get(i).and_then(parse::<i64>).is_some());
        let Some(timeout_ms) =
            args.get(last).and_then(parse::<u64>).filter(|ms| counts && *ms < i64::MAX as u64 / 2000)
        else {
            // The node returns the error. But not on a shared connection: a timeout that is invalid here may be valid
            // there.
            return match cx.up.choose_node(&cx.turn, routing) {
                Some(node) => self.block(cx, call, node, None),
                None => cx.down.refuse_all_down(&cx.turn, handle, class),
            };
        };
        let Some(client) = cx.down.get_mut(handle) else { return Flow::Close };
        let written = client.written();
        if client.in_flight() > 0 {
            // All previous writes must be older than the mark.
            return Flow::Stall(Stall::Barrier);
        }
        let mut nodes = cx.turn.data_nodes().all();
        let began = Since::now(cx.turn.shared(), cx.turn.routing());
        let about = match written {
            Written::Nothing => None,
            Written::Lost => {
                cx.down.answer(&cx.turn, handle, class, &zeros(last - 1));
                return Flow::Next;
            }
            Written::At { nodes: written, since } => {
                let is_moving = !cx.turn.routing().topology.is_settled();
                let mut had = ALL;
                if is_moving {
                    nodes.extend_from_within(..);
                } else if since.epoch == began.epoch {
                    nodes.retain(|node| written & bit_of(*node) != 0);
                    had = written;
                }
                Some(About { nodes: had, since, began, may_repeat: !is_moving })
            }
        };
        let Some(client) = cx.down.get_mut(handle) else { return Flow::Close };
        client.replies_mut().take_lane(Lane::Blocking);
        let seq = client.owe(cx.turn.now_us(), class);
        let until_us = (timeout_ms > 0).then(|| cx.turn.now_us() + timeout_ms * 1000);
        let args = args.iter().take(last).map(<[u8]>::to_vec).collect();
        client.state_or_default::<Session>().wait =
            Some(Wait { args, until_us, nodes, about, least: Vec::new(), due: true, seq, class });
        query_next(cx, handle);
        Flow::Next
    }
}

/// Continues a WAIT after the answer of a node, or when a connection for the next one is available. In any stall of
/// the client: later input may have ended in a barrier, which only the reply to WAIT ends.
#[inline]
pub(super) fn go_on_waiting(cx: &mut Context, handle: Handle) {
    let Some(client) = cx.down.get(handle) else { return };
    if client.stall() != Stall::Exclusive
        && client.state::<Session>().is_some_and(|s| s.wait.as_ref().is_some_and(|w| w.due))
    {
        query_next(cx, handle);
    }
}

/// Queries the next node, or answers if none is left.
fn query_next(cx: &mut Context, handle: Handle) {
    let Some(wait) = cx.down.get_mut(handle).and_then(|c| c.state_mut::<Session>()?.wait.as_mut()) else { return };
    if wait.nodes.is_empty()
        && let Some(about) = &mut wait.about
        && about.may_repeat
        && cx.turn.routing().topology.epoch() != about.began.epoch
    {
        about.may_repeat = false;
        wait.nodes = cx.turn.data_nodes().all();
        about.nodes = ALL;
    }
    let Some(node) = wait.nodes.last().copied() else {
        let (numbers, about) = (std::mem::take(&mut wait.least), wait.about);
        let is_lost =
            about.is_some_and(|about| cx.turn.shared().reigns.has_replacement_since(about.nodes, about.since.reigns));
        let out = if is_lost { zeros(numbers.len()) } else { numbers_of(&numbers) };
        if let (Some(client), Some(About { nodes, began, .. })) = (cx.down.get_mut(handle), about) {
            client.note_waited(if is_lost { Written::Lost } else { Written::At { nodes, since: began } });
        }
        end_waiting(&cx.turn, &mut cx.down, handle, &out);
        return;
    };
    let link = match acquire(cx, handle, node, Lane::Blocking) {
        Acquired::Link(link) => link,
        Acquired::Wait => return, // retried when there is one
        Acquired::Refused(text) => {
            let mut out = Vec::new();
            encode::error(&mut out, &text);
            end_waiting(&cx.turn, &mut cx.down, handle, &out);
            return;
        }
    };
    let Some(wait) = cx.down.get_mut(handle).and_then(|c| c.state_mut::<Session>()?.wait.as_mut()) else { return };
    wait.nodes.pop();
    wait.due = false;
    // 0 would be without end.
    let left_us = wait.until_us.map(|until| until.saturating_sub(cx.turn.now_us()).max(1000));
    let timeout = left_us.map_or(0, |us| us.div_ceil(1000)).to_string();
    let mut request = Vec::new();
    encode::header(&mut request, b'*', wait.args.len() + 1);
    for arg in &wait.args {
        encode::bulk(&mut request, arg);
    }
    encode::bulk(&mut request, timeout.as_bytes());
    let (seq, class) = (wait.seq, wait.class);
    let mark = if cx.turn.routing().topology.is_of_cluster() { MEMBER_MARK } else { MARK };
    push_exclusive(cx, handle, link, Call::Bytes(mark), mark, class, Some(seq));
    if let Some(pending) = cx.up.get_mut(link).and_then(Link::last_mut) {
        *pending = Pending { who: Handle::NONE, seq: 1, purpose: Purpose::Queued, ..*pending };
    }
    push_exclusive(cx, handle, link, Call::Bytes(&request), &request, class, Some(seq));
    if let Some(pending) = cx.up.get_mut(link).and_then(Link::last_mut) {
        pending.purpose = Purpose::Wait;
    }
    wait_at_node(cx, handle, link, Waited::Nothing, left_us);
}
