//! SCAN over all nodes, one at a time, each with its own cursor, in cursors suited to clients.
//!
//! If the keys of a node end before the requested count is reached, the next node is queried in the same call: a small
//! keyspace comes in one reply, as from one server, and nodes without keys cost the client no round trips.
//! `policy::scan` defines the order of nodes and the meaning of a cursor.

use switchyard_policy::cluster::Claims;
use switchyard_policy::migration::is_temporary;
use switchyard_policy::scan::{Pass, Position, SlotSet};
use switchyard_policy::topology::NodeId;
use switchyard_resp::request::Args;
use switchyard_resp::{encode, reply};

use super::Worker;
use super::command::parse;
use super::downstreams::Downstreams;
use super::downstreams::waits::Stall;
use super::flow::Flow;
use super::gather::Gathers;
use super::invocation::Invocation;

use super::multi_local::state::QueuedScan;
use super::multi_step::{MultiStepCommand, Next, StepRequest};
use super::quiesce::belongs;
use super::turn::Turn;
use super::upstreams::Upstreams;
use crate::lane::Lane;
use crate::lock::lock;

/// Default of COUNT.
const COUNT: usize = 10;

/// Minimum count in a later pass: most keys there belong to slots that were covered before.
const COUNT_LATER: usize = 1000;

/// Maximum number of rounds of later passes in one call.
const ROUNDS_LATER: u32 = 16;

/// Query of a scan whose replies come next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Query {
    /// SCAN of a node.
    Keys,
    /// CLUSTER NODES of all members: before the scan begins.
    First,
    /// CLUSTER NODES of all members, before a pass ends: slots may have moved without a redirect to this router.
    Last,
}

#[derive(Debug)]
struct Scan {
    query: Query,
    /// Members whose CLUSTER NODES come next, in order.
    members: Vec<NodeId>,
    at: Position,
    /// The slots of the pass; `None`: all.
    about: Option<SlotSet>,
    /// SCAN and its options, without the cursor.
    args: Vec<Vec<u8>>,
    wanted: usize,
    rounds_later: u32,
    found: usize,
    /// The keys so far, as RESP.
    keys: Vec<u8>,
}

impl Scan {
    fn new(at: Position, about: Option<SlotSet>, args: Vec<Vec<u8>>, wanted: usize) -> Self {
        let (query, members, keys) = (Query::Keys, Vec::new(), Vec::new());
        Self { query, members, at, about, args, wanted, rounds_later: 0, found: 0, keys }
    }

    fn request(&self) -> StepRequest {
        let cursor = self.at.inner.to_string();
        let count = self.wanted.max(COUNT_LATER).to_string();
        let mut args = vec![self.args[0].as_slice(), cursor.as_bytes()];
        args.extend(self.args[1..].iter().map(Vec::as_slice));
        if self.at.pass != Pass::First {
            // The last of two counts applies.
            args.extend([b"COUNT", count.as_bytes()]);
        }
        let mut request = Vec::new();
        encode::command(&mut request, args);
        StepRequest { node: self.at.node, lane: Lane::Main, requests: vec![request] }
    }

    /// Whether the next node, or the next step of a later pass, is queried in the same call.
    fn goes_on(&mut self, next: Position) -> bool {
        if self.found >= self.wanted {
            return false;
        }
        self.rounds_later += u32::from(next.pass != Pass::First);
        if next.pass == Pass::First { next.inner == 0 } else { self.rounds_later <= ROUNDS_LATER }
    }
}

fn failed(text: &str) -> Vec<u8> {
    let mut out = Vec::new();
    encode::error(&mut out, text);
    out
}

impl Scan {
    /// Queries all members of a cluster for their slots.
    fn query_members(&mut self, turn: &Turn, query: Query) -> Vec<StepRequest> {
        self.query = query;
        self.members = turn.data_nodes().all();
        let mut request = Vec::new();
        encode::command(&mut request, [&b"CLUSTER"[..], b"NODES"]);
        let step = |node: &NodeId| StepRequest { node: *node, lane: Lane::Main, requests: vec![request.clone()] };
        self.members.iter().map(step).collect()
    }

    /// Takes the replies of all members. Returns whether they show all places of keys, or the error for the client.
    fn take_members(&self, turn: &Turn, parts: &[Vec<u8>]) -> Result<bool, Vec<u8>> {
        let claims = |part: &Vec<u8>| Claims::of(std::str::from_utf8(reply::text(part)?).ok()?);
        let replies = || self.members.iter().zip(parts);
        let claims: Vec<_> = replies().filter_map(|(node, part)| Some((*node, claims(part)?))).collect();
        let is_complete = turn.shared().adopt_claims(&claims);
        let owners = turn.routing().topology.nodes_with_keys();
        let refusal = replies().find(|(node, part)| owners.contains(node) && reply::is_error(part));
        match refusal.filter(|_| !is_complete).map(|(_, part)| part) {
            Some(error) if error.starts_with(b"-NODE") => Err(error.clone()),
            Some(error) => {
                let reason = String::from_utf8_lossy(reply::text(error).unwrap_or_default());
                Err(failed(&format!(
                    "ERR SCAN in front of a cluster needs CLUSTER NODES, which a member refuses: {reason}"
                )))
            }
            None => Ok(is_complete),
        }
    }

    /// Takes the keys found by a node. Returns the node's own cursor, or the error for the client.
    fn take(&mut self, turn: &Turn, answer: &[u8]) -> Result<u64, Vec<u8>> {
        if reply::is_error(answer) {
            return Err(answer.to_vec());
        }
        let mut pair = reply::elements(answer);
        let inner = pair.next().and_then(|c| parse::<u64>(reply::text(c)?));
        let Some((inner, found)) = inner.zip(pair.next()) else {
            return Err(failed("ERR switchyard: the reply of a node to SCAN is not a cursor with keys"));
        };
        let routing = turn.routing().clone();
        // On a continuum, keys of earlier server lists are normal. Members of a cluster delete keys that are not theirs.
        let may_be_astray = !routing.topology.placement().is_crc16() || !lock(&turn.shared().moves).is_empty();
        for element in reply::elements(found) {
            let Some(key) = reply::text(element) else { continue };
            // A key at a node unrelated to its slot cannot be used.
            let is_astray = may_be_astray && !belongs(&routing, self.at.node, key);
            if is_astray
                || is_temporary(key)
                || self.about.as_ref().is_some_and(|slots| !slots.has(routing.topology.slot_of(key)))
            {
                continue;
            }
            self.keys.extend_from_slice(element);
            self.found += 1;
        }
        if self.keys.len() > turn.routing().live.client_output_limit {
            return Err(failed(super::gather::TOO_LARGE));
        }
        Ok(inner)
    }

    /// Returns the reply to the client, with the cursor of the next position.
    fn reply(&self, turn: &Turn, next: Option<Position>) -> Vec<u8> {
        let Some(cursor) = next.map_or(Some(0), |next| lock(&turn.shared().scans).encode(next)) else {
            return failed("ERR switchyard: the SCAN cursor of a node is too large to be encoded");
        };
        let mut out = b"*2\r\n".to_vec();
        encode::bulk(&mut out, cursor.to_string().as_bytes());
        encode::header(&mut out, b'*', self.found);
        out.extend_from_slice(&self.keys);
        out
    }
}

impl MultiStepCommand for Scan {
    fn next(&mut self, turn: &Turn, up: &Upstreams, _: bool, parts: Vec<Vec<u8>>) -> Next {
        let now = turn.shared().scan_tick();
        let scans = || lock(&turn.shared().scans);
        let next = match std::mem::replace(&mut self.query, Query::Keys) {
            Query::Keys => {
                let inner = match self.take(turn, &parts.into_iter().next().unwrap_or_default()) {
                    Ok(inner) => inner,
                    Err(error) => return Next::Done(error),
                };
                // One lock: the nodes of the pass may change.
                let mut scans = scans();
                if inner == 0 && turn.routing().topology.is_of_cluster() && scans.is_last_of_pass(self.at) {
                    drop(scans);
                    return Next::Round(self.query_members(turn, Query::Last));
                }
                scans.after(self.at, inner, now)
            }
            Query::First => {
                // If claims are missing, they appear as a change at the end of the pass.
                if let Err(error) = self.take_members(turn, &parts) {
                    return Next::Done(error);
                }
                self.at = scans().begin(now);
                return Next::Round(vec![self.request()]);
            }
            Query::Last => match self.take_members(turn, &parts) {
                Ok(true) => scans().after(self.at, 0, now),
                // The last node is scanned again, until the members show all places of keys.
                Ok(false) => return Next::Done(self.reply(turn, Some(Position { inner: 0, ..self.at }))),
                Err(error) => return Next::Done(error),
            },
        };
        // If this turn does not know the node yet, or the node is lost, it is queried in the next call, which waits.
        if let Some(next) = next.filter(|next| turn.routing().topology.node(next.node).is_some())
            && !up.outages().has(next.node)
            && self.goes_on(next)
        {
            self.at = next;
            self.about = lock(&turn.shared().scans).wanted(next).cloned();
            return Next::Round(vec![self.request()]);
        }
        Next::Done(self.reply(turn, next))
    }
}

impl Worker {
    /// Returns the node's reply to it, with a cursor suited to clients.
    pub(super) fn scanned(&self, scan: &QueuedScan, answer: &[u8]) -> Vec<u8> {
        let mut scan = Scan::new(scan.0, None, Vec::new(), 0);
        match scan.take(&self.cx.turn, answer) {
            Ok(inner) => {
                let shared = self.cx.turn.shared();
                let next = lock(&shared.scans).after(scan.at, inner, shared.scan_tick());
                scan.reply(&self.cx.turn, next)
            }
            Err(error) => error,
        }
    }
}

/// A SCAN in a transaction of the only node, with the node's own cursor. `None`: this node cannot continue its
/// cursor.
pub(super) fn queued_scan(turn: &Turn, args: &Args<'_>, node: NodeId) -> Option<(Vec<u8>, QueuedScan)> {
    let cursor = args.get(1).and_then(parse::<u64>)?;
    let now = turn.shared().scan_tick();
    let mut scans = lock(&turn.shared().scans);
    let at = scans.decode(cursor, now).filter(|at| at.node == node && scans.wanted(*at).is_none())?;
    let inner = at.inner.to_string();
    let mut request = Vec::new();
    let with_inner = |(place, arg)| if place == 1 { inner.as_bytes() } else { arg };
    encode::command(&mut request, args.iter().enumerate().map(with_inner).collect::<Vec<&[u8]>>());
    Some((request, QueuedScan(at)))
}

impl Gathers {
    pub(super) fn scan(&mut self, turn: &Turn, down: &mut Downstreams, call: &Invocation<'_>) -> Flow {
        let Invocation { routing, handle, args, .. } = *call;
        let class = call.class();
        let Some(cursor) = args.get(1).and_then(parse::<u64>) else {
            return down.refuse(turn, handle, class, "ERR invalid cursor");
        };
        let Some(client) = down.get_mut(handle) else { return Flow::Close };
        if !client.may_take(Lane::Main) {
            return Flow::Stall(Stall::Barrier);
        }
        let count = args
            .iter()
            .position(|a| a.eq_ignore_ascii_case(b"COUNT"))
            .and_then(|at| args.get(at + 1))
            .and_then(parse::<usize>);
        let names: Vec<Vec<u8>> =
            args.iter().enumerate().filter(|(index, _)| *index != 1).map(|(_, a)| a.to_vec()).collect();
        let now = turn.shared().scan_tick();
        let mut scans = lock(&turn.shared().scans);
        // As in Redis: an unknown cursor ends the scan.
        let end = b"*2\r\n$1\r\n0\r\n*0\r\n";
        let Some(at) = scans.decode(cursor, now) else {
            drop(scans);
            down.answer(turn, handle, class, end);
            return Flow::Next;
        };
        // The keys of its node have moved away, so the pass continues at the next node.
        let is_left = routing.topology.is_of_cluster() && !scans.may_have_keys(at.node);
        let ends_pass = is_left && scans.is_last_of_pass(at);
        let at = if is_left && !ends_pass { scans.after(at, 0, now).unwrap_or(at) } else { at };
        let about = scans.wanted(at).cloned();
        let again = scans.encode(at);
        drop(scans);
        if !ends_pass && routing.topology.node(at.node).is_none() {
            // This worker does not know the node yet.
            let mut out = b"*2\r\n".to_vec();
            encode::bulk(&mut out, again.unwrap_or_default().to_string().as_bytes());
            out.extend_from_slice(b"*0\r\n");
            down.answer(turn, handle, class, &out);
            return Flow::Next;
        }
        let wanted = count.unwrap_or(COUNT);
        let mut scan = Scan::new(at, about, names, wanted);
        let requests = match cursor {
            0 if routing.topology.is_of_cluster() => scan.query_members(turn, Query::First),
            _ if ends_pass => scan.query_members(turn, Query::Last),
            _ => vec![scan.request()],
        };
        // No barrier: a key that exists during a complete iteration is found regardless of other commands.
        self.begin_rounds(turn, down, handle, class, Box::new(scan), requests)
    }
}
