//! SCAN over all nodes: one after the other, each with its own cursor, in cursors that a client can carry.
//!
//! Where a node's keys end before the client has as many as it asked for, the next node is asked in the same call: a small keyspace
//! comes in one reply, as from one server, and nodes without keys cost the client no round trips.

use switchyard_policy::routing::ScanCursor;
use switchyard_resp::request::Args;
use switchyard_resp::{encode, reply};

use super::dispatch::Flow;
use super::local::parse;
use super::rounds::{Ask, Next, Procedure};
use super::upstream::Lane;
use super::{Stall, Worker};
use crate::shared::Plan;
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
        for key in reply::elements(found) {
            self.keys.extend_from_slice(key);
            self.found += 1;
        }
        if self.keys.len() > worker.plan.live.client_output_limit {
            return fail(super::gather::TOO_LARGE);
        }
        let plan = worker.plan.clone();
        let Some(next) = self.at.next(inner, plan.topology.nodes().len()) else {
            return fail("ERR switchyard: a node's SCAN cursor is too large to be carried");
        };
        if inner == 0 && next != 0 && self.found < self.wanted {
            self.at = ScanCursor { place: self.at.place + 1, inner: 0 };
            if let Some(ask) = self.ask(&plan) {
                return Next::Round(vec![ask]);
            }
        }
        let mut out = b"*2\r\n".to_vec();
        encode::bulk(&mut out, next.to_string().as_bytes());
        encode::header(&mut out, b'*', self.found);
        out.append(&mut self.keys);
        Next::Done(out)
    }
}

impl Worker {
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
        let scan = ScanCursor::decode(cursor, plan.topology.nodes().len()).map(|at| Scan {
            at,
            args: names,
            wanted: count.unwrap_or(COUNT),
            found: 0,
            keys: Vec::new(),
        });
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
