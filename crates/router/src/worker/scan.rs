//! SCAN over all nodes: one after the other, each with its own cursor, in cursors that a client can carry.
//!
//! Where a node's keys end before the client has as many as it asked for, the next node is asked in the same call: a small keyspace
//! comes in one reply, as from one server, and nodes without keys cost the client no round trips.

use std::sync::Arc;

use switchyard_policy::migration::is_temporary;
use switchyard_policy::routing::{Movement, ScanCursor};
use switchyard_policy::topology::{MoveId, NodeId, slot_of};
use switchyard_resp::request::Args;
use switchyard_resp::{encode, reply};

use super::dispatch::Flow;
use super::local::parse;
use super::rounds::{Ask, Next, Procedure};
use super::upstream::Lane;
use super::{Stall, Worker};
use crate::mover::SharedMove;
use crate::shared::{Plan, lock};
use crate::slab::Handle;

/// Keys that a call without COUNT asks for.
const COUNT: usize = 10;

#[derive(Debug)]
struct Scan {
    at: ScanCursor,
    /// SCAN and its options, without the cursor.
    args: Vec<Vec<u8>>,
    wanted: usize,
    found: usize,
    /// The keys so far, as RESP.
    keys: Vec<u8>,
}

impl Scan {
    fn ask(&self, plan: &Plan) -> Option<Ask> {
        let node = plan.topology.nodes().nth(usize::from(self.at.place))?.id;
        let cursor = self.at.inner.to_string();
        let args: Vec<&[u8]> = self.args[..1].iter().map(Vec::as_slice).chain([cursor.as_bytes()]).collect();
        let mut request = Vec::new();
        encode::command(&mut request, args.into_iter().chain(self.args[1..].iter().map(Vec::as_slice)).collect::<Vec<_>>());
        Some(Ask { node, lane: Lane::Main, requests: vec![request] })
    }
}

impl Procedure for Scan {
    fn next(&mut self, worker: &mut Worker, _: bool, parts: Vec<Vec<u8>>) -> Next {
        let answer = parts.into_iter().next().unwrap_or_default();
        if reply::is_error(&answer) {
            return Next::Done(answer);
        }
        let fail = |text: &str| {
            let mut out = Vec::new();
            encode::error(&mut out, text);
            Next::Done(out)
        };
        let mut pair = reply::elements(&answer);
        let inner = pair.next().and_then(|c| parse::<u64>(reply::text(c)?));
        let Some((inner, found)) = inner.zip(pair.next()) else {
            return fail("ERR switchyard: a node answered SCAN with something else than a cursor and keys");
        };
        let plan = worker.plan.clone();
        let nodes: Vec<NodeId> = plan.topology.nodes().map(|n| n.id).collect();
        let moves = worker.movements();
        let asked = nodes.get(usize::from(self.at.place)).copied();
        for key in reply::elements(found) {
            // What lies at a node that has nothing to do with its slot cannot be used.
            let is_astray = || asked.is_some_and(|node| reply::text(key).is_some_and(|key| !belongs(&plan, node, key)));
            if (!moves.is_empty() && is_astray()) || reply::text(key).is_some_and(is_temporary) {
                continue;
            }
            self.keys.extend_from_slice(key);
            self.found += 1;
        }
        if self.keys.len() > worker.plan.live.client_output_limit {
            return fail(super::gather::TOO_LARGE);
        }
        let next = self.at.next(inner, &nodes, &moves);
        if inner == 0
            && self.found < self.wanted
            && let Some(next) = next
        {
            self.at = next;
            if let Some(ask) = self.ask(&plan) {
                return Next::Round(vec![ask]);
            }
        }
        let Some(next) = next.map_or(Some(0), ScanCursor::encode) else {
            return fail("ERR switchyard: a node's SCAN cursor is too large to be carried");
        };
        let mut out = b"*2\r\n".to_vec();
        encode::bulk(&mut out, next.to_string().as_bytes());
        encode::header(&mut out, b'*', self.found);
        out.append(&mut self.keys);
        Next::Done(out)
    }
}

/// Whether a key of this name can be used at a node.
pub(super) fn belongs(plan: &Plan, node: NodeId, key: &[u8]) -> bool {
    let slot = slot_of(key);
    plan.topology.lives_at(key) == node || plan.topology.transit(slot).is_some_and(|t| t.source == node || t.target == node)
}

impl Worker {
    /// The moves that scans have to know of.
    fn movements(&self) -> Vec<Movement> {
        let moves = lock(&self.shared.moves);
        let movement = |(id, m): (&MoveId, &Arc<SharedMove>)| Movement {
            number: id.0,
            source: m.source,
            target: m.target,
            is_under_way: lock(&m.progress).end.is_none(),
        };
        moves.iter().map(movement).collect()
    }

    pub(super) fn scan(&mut self, plan: &Plan, handle: Handle, class: u8, args: &Args<'_>) -> Flow {
        let Some(cursor) = args.get(1).and_then(parse::<u64>) else {
            return self.refuse(handle, class, "ERR invalid cursor");
        };
        let Some(client) = self.clients.get_mut(handle) else { return Flow::Close };
        if !client.may_take(Lane::Main) {
            return Flow::Stall(Stall::Barrier);
        }
        let count = args.iter().position(|a| a.eq_ignore_ascii_case(b"COUNT")).and_then(|at| args.get(at + 1)).and_then(parse::<usize>);
        let names: Vec<Vec<u8>> = args.iter().enumerate().filter(|(index, _)| *index != 1).map(|(_, a)| a.to_vec()).collect();
        let moves = self.movements();
        let begun =
            ScanCursor::decode(cursor, plan.topology.nodes().len()).map(|at| if cursor == 0 { ScanCursor::start(&moves) } else { at });
        let scan = begun.map(|at| Scan { at, args: names, wanted: count.unwrap_or(COUNT), found: 0, keys: Vec::new() });
        match scan.and_then(|scan| scan.ask(plan).map(|ask| (scan, ask))) {
            // No barrier: a key that is there from the beginning of an iteration to its end is found whatever other commands do.
            Some((scan, ask)) => self.begin_rounds(handle, class, Box::new(scan), vec![ask]),
            // As Redis: a cursor that was never given out ends the scan.
            None => {
                self.answer(handle, class, b"*2\r\n$1\r\n0\r\n*0\r\n");
                Flow::Next
            }
        }
    }
}
