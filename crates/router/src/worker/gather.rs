//! Commands answered by several nodes (or workers): their parts are collected and combined into one reply.
//!
//! A failed part makes the whole reply an error. If half of a write may have been executed, the error states that.
//! Parts are collected whole; large replies that need no combination do not come here.

use std::collections::VecDeque;

use switchyard_policy::migration::is_temporary;
use switchyard_policy::topology::NodeId;
use switchyard_resp::command::Merge;
use switchyard_resp::{encode, reply};

use super::command::{Call, CommandSeq, KeyedCommand};
use super::context::Context;
use super::double_read::{PendingDoubleRead, end_double_read};
use super::downstreams::Downstreams;
use super::downstreams::waits::Stall;
use super::fan_out::FanOutScope;
use super::flow::Flow;
use super::info::{Digest, info_text};
use super::memory_stats;
use super::multi_step::{MultiStepCommand, Next, StepRequest};
use super::pubsub::Kind;
use super::quiesce::state::QuiesceWait;
use super::silent_nodes::{is_silent, timeout_of};
use super::tracking::Options;
use super::transactions::session::Session;
use super::turn::Turn;
use super::upstreams::Upstreams;
use super::upstreams::breaking::PERHAPS;
use super::upstreams::link::Phase;
use super::upstreams::pending::{Again, EXEC, MULTI, Pending, Purpose};
use crate::lane::Lane;
use crate::settings::other_database;
use crate::slab::{Handle, Slab};

/// Error for a reply that is combined in memory and exceeds the client's output limit.
pub(super) const TOO_LARGE: &str = "ERR the nodes' replies together are larger than output-limit";

/// Part of an error for a command with other parts that may have been executed.
const OTHERS_PERHAPS: &str = "; other parts of the command may have been executed";

/// Combination of the parts.
#[derive(Debug)]
pub(super) enum Aggregation {
    /// As in the command table.
    Merged(Merge),
    /// Like `Merged`, for a command that may take long on the main lane, because it must keep its order among its
    /// client's commands.
    Long(Merge),
    /// Like `Merged`, for a read: a failure leaves no half executed.
    Read(Merge),
    /// MGET: element `i` of the reply is the next element of part `layout[i]`.
    Values { layout: Vec<u16> },
    /// INFO of the nodes and of the router.
    Info { sections: Vec<String>, digest: Box<Digest> },
    /// COMMAND, as in this request: any node's reply.
    Commands { request: Vec<u8> },
    /// CLIENT LIST: concatenated texts.
    ClientList,
    /// CLIENT KILL in its old form: OK, or an error if no client was killed.
    ClientKillOne,
    /// CLIENT TRACKING with REDIRECT: lookup of the target.
    Redirect(Box<Options>),
    /// MONITOR: takes effect when all workers know.
    Monitor,
    /// PUBLISH, SPUBLISH: the node's count, with our clients instead of our own subscriptions.
    Publish { kind: Kind, channel: Box<[u8]>, node: NodeId },
    /// SCRIPT EXISTS: 1 also for scripts known to the router, because it loads them into a node that lacks them.
    ScriptExists { known: Vec<bool> },
    /// SELECT: the client's database changes if every node has it.
    Select { database: u32 },
    /// Double read: a request to source and target of a move. A reply with the key wins.
    DoubleRead { request: Vec<u8>, as_published: bool },
    /// A command in several steps.
    Rounds(Box<dyn MultiStepCommand>),
}

impl Aggregation {
    fn is_long(&self) -> bool {
        match self {
            Self::Long(_) => true,
            Self::Rounds(procedure) => procedure.is_long(),
            _ => false,
        }
    }
}

#[derive(Debug)]
pub(super) struct Gather {
    client: Handle,
    seq: u32,
    class: u8,
    /// The client's database when the command was read. A later SELECT has no effect on it.
    database: u32,
    parts: Vec<Option<Vec<u8>>>,
    /// Node of each part, if parts are from nodes.
    nodes: Vec<NodeId>,
    /// Nodes whose errors are ignored.
    excused: Vec<NodeId>,
    left: usize,
    bytes: usize,
    /// Epoch in which the nodes were chosen, also for later steps.
    epoch: u64,
    /// Start time, microseconds.
    began_us: u64,
    whole: Aggregation,
    /// Keeps movers quiesced until dropped.
    _quiet: Option<Box<QuiesceWait>>,
}

/// The gathers of a worker.
#[derive(Debug)]
pub(super) struct Gathers {
    all: Slab<Gather>,
    /// Last results of INFO from the nodes.
    info: Option<Box<Digest>>,
    /// Recorded requests to nodes, in order.
    requests: VecDeque<GatherRequest>,
    /// Counter for choices by chance.
    random: u64,
    redirects: VecDeque<FoundRedirect>,
}

/// Replies of all workers to the search for the client that another client redirects to.
#[derive(Debug)]
pub(super) struct FoundRedirect {
    pub(super) client: Handle,
    pub(super) seq: u32,
    pub(super) options: Box<Options>,
    pub(super) parts: Vec<Vec<u8>>,
}

/// Requests of a gather to nodes. A command only records them; they are sent before the next command of its client.
#[derive(Debug)]
pub(super) enum GatherRequest {
    /// The next parts of a gather.
    Round { gather: Handle, steps: Vec<StepRequest>, class: u8 },
    /// Requests to every node in reach; the reply to the last one is the part of the node.
    Every { gather: Handle, lane: Lane, reach: FanOutScope, requests: Vec<Vec<u8>>, class: u8 },
}

/// A command for all nodes in reach.
#[derive(Debug)]
pub(super) struct FanOut {
    pub(super) client: Handle,
    pub(super) lane: Lane,
    pub(super) reach: FanOutScope,
    pub(super) requests: Vec<Vec<u8>>,
    pub(super) class: u8,
    pub(super) whole: Aggregation,
}

impl Gathers {
    pub(super) fn new() -> Self {
        Self { all: Slab::new(), info: None, requests: VecDeque::new(), random: 0, redirects: VecDeque::new() }
    }

    pub(super) fn get(&self, handle: Handle) -> Option<&Gather> {
        self.all.get(handle)
    }

    pub(super) fn get_mut(&mut self, handle: Handle) -> Option<&mut Gather> {
        self.all.get_mut(handle)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Handle, &Gather)> {
        self.all.iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (Handle, &mut Gather)> {
        self.all.iter_mut()
    }

    /// Whether requests are recorded.
    #[inline]
    pub(super) fn has_requests(&self) -> bool {
        !self.requests.is_empty()
    }

    /// Returns a number that differs from the last one.
    pub(super) fn next_random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(1);
        self.random
    }

    /// Returns the next complete search for a client.
    pub(super) fn next_redirect(&mut self) -> Option<FoundRedirect> {
        self.redirects.pop_front()
    }

    /// Records the parts of a gather.
    pub(super) fn send_round(&mut self, gather: Handle, steps: Vec<StepRequest>, class: u8) {
        self.requests.push_back(GatherRequest::Round { gather, steps, class });
    }

    /// Begins a command for all nodes in reach.
    pub(super) fn fan_out(&mut self, turn: &Turn, down: &mut Downstreams, fan_out: FanOut) -> Flow {
        let FanOut { client, lane, reach, requests, class, whole } = fan_out;
        if !matches!(whole, Aggregation::Info { .. }) {
            // Cached replies of nodes (INFO) must not be used for later commands of this client.
            down.get_mut(client).into_iter().for_each(|client| client.replies_mut().note_write(turn.now_us()));
        }
        let Some(gather) = self.begin_gather(turn, down, client, class, 0, whole) else { return Flow::Close };
        self.requests.push_back(GatherRequest::Every { gather, lane, reach, requests, class });
        Flow::Next
    }

    /// Last results of INFO from the nodes.
    pub(super) fn last_info(&self) -> Option<&Digest> {
        self.info.as_deref()
    }
}

impl Gather {
    pub(super) fn began_us(&self) -> u64 {
        self.began_us
    }

    /// Whether silent nodes are not waited for.
    pub(super) fn is_impatient(&self) -> bool {
        matches!(self.whole, Aggregation::Info { .. } | Aggregation::Commands { .. })
    }

    /// Returns the request if this is COMMAND.
    pub(super) fn commands_request(&self) -> Option<&[u8]> {
        if let Aggregation::Commands { request } = &self.whole { Some(request) } else { None }
    }

    /// Adds the last INFO of a node that does not reply in time.
    pub(super) fn add_info(&mut self, text: &[u8]) {
        if let Aggregation::Info { digest, .. } = &mut self.whole {
            digest.add(text);
        }
    }

    /// Returns the missing parts and their nodes.
    pub(super) fn missing(&self) -> Vec<(u32, NodeId)> {
        let parts = (0..).zip(&self.parts).zip(&self.nodes);
        parts.filter(|((_, part), _)| part.is_none()).map(|((number, _), node)| (number, *node)).collect()
    }

    /// Epoch at the start.
    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Waiting client.
    pub(super) fn client(&self) -> Handle {
        self.client
    }

    /// Number of the client's command.
    pub(super) fn seq(&self) -> u32 {
        self.seq
    }

    /// Bytes of the received parts.
    pub(super) fn memory(&self) -> usize {
        self.parts.iter().flatten().map(Vec::capacity).sum()
    }

    /// Replaces received parts by errors after the client was disconnected.
    pub(super) fn drop_parts(&mut self) {
        for part in self.parts.iter_mut().flatten() {
            *part = b"-ERR the client was cut\r\n".to_vec();
        }
    }
}

/// Returns the error of a part for a whole command that may change something. If other parts were or may have been
/// executed, the error must not deny the execution of the whole.
pub(super) fn with_doubt(error: &[u8], parts: &[Vec<u8>]) -> Vec<u8> {
    let says_perhaps = |part: &[u8]| memchr::memmem::find(part, PERHAPS.as_bytes()).is_some();
    let is_in_doubt = parts.iter().any(|part| !reply::is_error(part) || says_perhaps(part));
    if !error.starts_with(b"-NODE") || says_perhaps(error) || !is_in_doubt {
        return error.to_vec();
    }
    let mut out = Vec::new();
    encode::line(&mut out, b'-', &[reply::text(error).unwrap_or_default(), OTHERS_PERHAPS.as_bytes()].concat());
    out
}

/// Combines replies of nodes. `name`: node of a part. Any error makes the whole an error, unless one success suffices.
fn merged(merge: Merge, parts: Vec<Vec<u8>>, name: &dyn Fn(usize) -> String, resp3: bool) -> Vec<u8> {
    if merge == Merge::AnyOk {
        return any_ok(parts);
    }
    if let Some(error) = parts.iter().find(|part| reply::is_error(part)) {
        return error.clone();
    }
    let mut out = Vec::new();
    match merge {
        Merge::AnyOk => {}
        Merge::Sum => {
            // Nodes may reply any number.
            let sum = parts.iter().filter_map(|p| reply::integer(p)).fold(0, i64::saturating_add);
            encode::integer(&mut out, sum);
        }
        Merge::Least => {
            encode::integer(&mut out, parts.iter().filter_map(|p| reply::integer(p)).min().unwrap_or(0));
        }
        Merge::Texts => {
            let mut whole = String::new();
            for (at, part) in parts.iter().enumerate() {
                let text = String::from_utf8_lossy(reply::text(part).unwrap_or_default());
                whole.push_str(&format!("{}:\n{}\n\n", name(at), text.trim_end()));
            }
            encode::verbatim(&mut out, whole.as_bytes(), resp3);
        }
        Merge::Figures => return memory_stats::together(&parts, resp3),
        Merge::Same => return parts.into_iter().next().unwrap_or_default(),
        Merge::Concat => {
            // KEYS: staging keys of moves are hidden.
            let is_shown = |element: &&[u8]| !reply::text(element).is_some_and(is_temporary);
            let all = || parts.iter().flat_map(|p| reply::elements(p)).filter(is_shown);
            // KEYS replies with an array in RESP2 and RESP3; keep the type of the nodes.
            let kind = parts.first().and_then(|p| p.first()).copied().filter(|k| *k == b'~').unwrap_or(b'*');
            encode::header(&mut out, kind, all().count());
            all().for_each(|element| out.extend_from_slice(element));
        }
        Merge::AllOnes => all_ones(&mut out, &parts, &[]),
    }
    out
}

/// Returns the first success, or the first error if there is none.
fn any_ok(parts: Vec<Vec<u8>>) -> Vec<u8> {
    let chosen = parts.iter().position(|p| !reply::is_error(p)).unwrap_or(0);
    parts.into_iter().nth(chosen).unwrap_or_default()
}

/// Encodes 1 where every part has 1 or `known` is set.
fn all_ones(out: &mut Vec<u8>, parts: &[Vec<u8>], known: &[bool]) {
    let count = parts.first().map_or(0, |p| reply::elements(p).remaining() as usize);
    encode::header(out, b'*', count);
    let mut columns: Vec<_> = parts.iter().map(|p| reply::elements(p)).collect();
    for place in 0..count {
        // Advances every column by one.
        let ones = columns.iter_mut().filter_map(|c| c.next().and_then(reply::integer)).filter(|n| *n == 1).count();
        encode::integer(out, i64::from(ones == columns.len() || known.get(place) == Some(&true)));
    }
}

fn protocol_error(what: &str) -> Vec<u8> {
    let mut out = Vec::new();
    encode::error(&mut out, &format!("ERR switchyard: {what}"));
    out
}

/// Returns a request before the last one of a part. Its reply is not collected. Like every inserted command, it has no
/// receiver, so its bytes count for the client of the command after it.
fn before_last(purpose: Purpose, last: Pending) -> Pending {
    Pending { who: Handle::NONE, seq: 0, purpose, ..last }
}

impl Gathers {
    /// Starts a gather for the current command.
    pub(super) fn begin_gather(
        &mut self,
        turn: &Turn,
        down: &mut Downstreams,
        client_handle: Handle,
        class: u8,
        parts: usize,
        whole: Aggregation,
    ) -> Option<Handle> {
        let client = down.get_mut(client_handle)?;
        let seq = client.owe(turn.now_us(), class);
        let database = client.database();
        let _quiet = client.take_state::<QuiesceWait>();
        let parts_of = vec![None; parts];
        let epoch = turn.routing().topology.epoch();
        let nodes = Vec::new();
        let gather = Gather {
            client: client_handle,
            seq,
            class,
            database,
            parts: parts_of,
            nodes,
            excused: Vec::new(),
            left: parts,
            bytes: 0,
            epoch,
            began_us: turn.now_us(),
            whole,
            _quiet,
        };
        Some(self.all.insert(gather))
    }

    fn merge(&mut self, turn: &Turn, down: &mut Downstreams, gather: Gather, resp3: bool) -> Vec<u8> {
        let (mut parts, mut nodes): (Vec<Vec<u8>>, _) = (gather.parts.into_iter().flatten().collect(), gather.nodes);
        if !gather.excused.is_empty() {
            let mut answered = parts.iter().map(|part| !part.is_empty());
            nodes.retain(|_| answered.next() == Some(true));
            parts.retain(|part| !part.is_empty());
        }
        let error = parts.iter().find(|p| reply::is_error(p));
        let name = |at: usize| nodes.get(at).map_or_else(String::new, |node| turn.node_name(*node));
        let mut out = Vec::new();
        match (gather.whole, error) {
            (Aggregation::Merged(merge) | Aggregation::Long(merge), error) => {
                let doubtful =
                    error.filter(|_| matches!(merge, Merge::Same | Merge::Sum)).map(|error| with_doubt(error, &parts));
                return doubtful.unwrap_or_else(|| merged(merge, parts, &name, resp3));
            }
            (Aggregation::Read(merge), _) => return merged(merge, parts, &name, resp3),
            (Aggregation::Info { sections, digest }, _) => {
                let text = info_text(turn, &digest, &sections);
                self.info = Some(digest);
                encode::verbatim(&mut out, text.as_bytes(), resp3);
            }
            (_, Some(error)) => return error.clone(),
            (Aggregation::ScriptExists { known }, None) => all_ones(&mut out, &parts, &known),
            (Aggregation::Values { layout }, None) => {
                encode::header(&mut out, b'*', layout.len());
                let mut columns: Vec<_> = parts.iter().map(|p| reply::elements(p)).collect();
                for column in layout {
                    match columns.get_mut(usize::from(column)).and_then(Iterator::next) {
                        Some(element) => out.extend_from_slice(element),
                        None => return protocol_error("a node answered MGET with fewer values than keys"),
                    }
                }
            }
            (Aggregation::ClientList, None) => {
                let text: Vec<u8> = parts.iter().filter_map(|p| reply::text(p)).flatten().copied().collect();
                encode::verbatim(&mut out, &text, resp3);
            }
            (Aggregation::ClientKillOne, None) => {
                if parts.iter().filter_map(|p| reply::integer(p)).sum::<i64>() > 0 {
                    encode::simple(&mut out, "OK");
                } else {
                    encode::error(&mut out, "ERR No such client");
                }
            }
            // Never merged: see `gather_part`.
            (Aggregation::Commands { request }, None) => {
                out = parts.pop().unwrap_or_default();
                turn.shared().command_replies.note(resp3, &request, &out);
            }
            (Aggregation::Rounds(_), None) => return protocol_error("a procedure was taken for a merge"),
            // Never merged: see `gather_part`.
            (Aggregation::DoubleRead { .. }, None) => return protocol_error("a double read was taken for a merge"),
            (Aggregation::Redirect(_), None) => return protocol_error("a redirect was taken for a merge"),
            (Aggregation::Monitor, None) => {
                if let Some(client) = down.get_mut(gather.client) {
                    client.set_monitor(true);
                }
                encode::simple(&mut out, "OK");
            }
            (Aggregation::Publish { kind, channel, node }, None) => {
                let count = parts.first().and_then(|p| reply::integer(p)).unwrap_or(0);
                encode::integer(&mut out, turn.count_of_publish(kind, &channel, node, count));
            }
            (Aggregation::Select { database }, None)
                if let Some(why) = other_database(&turn.routing().live, database) =>
            {
                // The settings have changed since it was sent.
                encode::error(&mut out, &why);
            }
            (Aggregation::Select { database }, None) => {
                for node in &nodes {
                    turn.shared().with_facts(*node, |f| f.databases = f.databases.max(database + 1));
                }
                if let Some(client) = down.get_mut(gather.client) {
                    client.select(database);
                }
                encode::simple(&mut out, "OK");
            }
        }
        out
    }
}

impl Gathers {
    fn end_round(&mut self, turn: &Turn, up: &Upstreams, down: &mut Downstreams, mut gather: Gather, resp3: bool) {
        let parts = gather.parts.drain(..).flatten().collect();
        let Aggregation::Rounds(procedure) = &mut gather.whole else { return };
        match procedure.next(turn, up, resp3, parts) {
            Next::Done(reply) => deliver_joined(turn, down, gather.client, gather.seq, &reply),
            Next::Again(found) => {
                if let Some(client) = down.get_mut(gather.client)
                    && client.replies().is_last(gather.seq)
                {
                    client.replies_mut().take_back();
                    client.note_counted();
                    client.set_state(*found);
                    down.unstall(turn, gather.client);
                }
            }
            Next::Round(asks) => {
                gather.parts = vec![None; asks.len()];
                gather.left = asks.len();
                gather.nodes.clear();
                gather.bytes = 0;
                let class = gather.class;
                let handle = self.all.insert(gather);
                self.send_round(handle, asks, class);
            }
        }
    }
}

impl Gathers {
    /// Sends several requests to a node together; the reply to the last is the part.
    pub(super) fn send_parts<R: AsRef<[u8]>>(
        &mut self,
        cx: &mut Context,
        gather: Handle,
        part: u32,
        node: NodeId,
        lane: Lane,
        requests: &[R],
        class: u8,
    ) {
        let known = self.get(gather).and_then(|g| {
            let client = cx.down.get(g.client)?;
            Some((client.resp3(), client.no_touch(), g.database, g.epoch as u32, g.whole.is_long()))
        });
        let Some((resp3, no_touch, database, epoch, is_long)) = known else {
            self.all.remove(gather);
            return;
        };
        if let Some(g) = self.get_mut(gather) {
            g.nodes.push(node);
        }
        let handle = cx.up.shared_link(&cx.turn, node, lane, resp3);
        let sent_us = cx.turn.now_us() as u32;
        let why = cx.up.get(handle).filter(|l| l.phase() == Phase::Up).and_then(|l| l.no_multi().map(str::to_owned));
        if let Some(why) = why.filter(|_| requests[0].as_ref() == MULTI) {
            let mut error = Vec::new();
            encode::error(&mut error, &no_multi_text(&cx.turn, node, &why));
            self.gather_part(cx, gather, part, &error);
        } else if cx.up.takes_commands_or_tries(&cx.turn, handle)
            && let Some(link) = cx.up.get_mut(handle)
        {
            let pending = Pending {
                who: gather,
                seq: part,
                len: 0,
                sent_us,
                epoch,
                purpose: Purpose::Gather,
                class,
                again: Again::Never,
                is_long,
                end: CommandSeq::NONE,
                cacheable: cx.turn.cacheable(),
            };
            link.touch_as(no_touch, pending);
            for (number, request) in requests.iter().enumerate() {
                let bytes = request.as_ref();
                let keyed = KeyedCommand { call: Call::Bytes(bytes), node, database };
                let request = match bytes {
                    EXEC => cx.hooks.pass_exec(database, pending),
                    _ if number + 1 == requests.len() => cx.hooks.pass(&cx.turn, keyed, bytes, pending),
                    MULTI => cx.hooks.pass_queued(&cx.turn, keyed, bytes, before_last(Purpose::Queued, pending)),
                    _ if requests[0].as_ref() == MULTI => {
                        cx.hooks.pass_queued(&cx.turn, keyed, bytes, before_last(Purpose::Discarded, pending))
                    }
                    _ => cx.hooks.pass(&cx.turn, keyed, bytes, before_last(Purpose::Discarded, pending)),
                };
                cx.up.push(handle, request);
            }
        } else {
            let mut error = Vec::new();
            encode::error(&mut error, &cx.turn.down_text(node));
            self.gather_part(cx, gather, part, &error);
        }
    }

    /// Sends the recorded requests.
    pub(super) fn send_gathers(&mut self, cx: &mut Context) {
        while let Some(request) = self.requests.pop_front() {
            match request {
                GatherRequest::Round { gather, steps, class } => {
                    for (part, step) in steps.into_iter().enumerate() {
                        self.send_parts(cx, gather, part as u32, step.node, step.lane, &step.requests, class);
                    }
                }
                GatherRequest::Every { gather, lane, reach, requests, class } => {
                    self.gather_every(cx, gather, lane, reach, &requests, class);
                }
            }
        }
    }

    /// Sends the same requests to all nodes of `reach`; the reply to the last is the part.
    fn gather_every(
        &mut self,
        cx: &mut Context,
        handle: Handle,
        lane: Lane,
        reach: FanOutScope,
        requests: &[Vec<u8>],
        class: u8,
    ) {
        let mut nodes = if reach == FanOutScope::DataNodes {
            cx.turn.data_nodes().all()
        } else {
            cx.up.links().reachable(&cx.turn)
        };
        let Some(gather) = self.get_mut(handle) else { return };
        if matches!(gather.whole, Aggregation::Info { .. }) {
            let timeout_us = timeout_of(&cx.turn, &cx.down, gather.client);
            nodes.retain(|node| !is_silent(&cx.turn, &cx.up, *node, timeout_us));
        }
        let mut excused = Vec::new();
        if reach == FanOutScope::Everybody {
            excused = nodes.iter().copied().filter(|node| !cx.turn.data_nodes().has(*node)).collect();
            gather.excused.clone_from(&excused);
        }
        gather.parts = vec![None; nodes.len()];
        gather.left = nodes.len();
        let is_select = matches!(gather.whole, Aggregation::Select { .. });
        let resp3 = cx.down.get(gather.client).is_some_and(|client| client.resp3());
        for (part, node) in nodes.into_iter().enumerate() {
            // Slow commands may take arbitrarily long, and the reply of an excused node is not worth the wait.
            let lane = if excused.contains(&node) { Lane::Main } else { lane };
            self.send_parts(cx, handle, part as u32, node, lane, requests, class);
            if is_select {
                // The next command of the main connection expects the database from before.
                let main = cx.up.shared_link(&cx.turn, node, Lane::Main, resp3);
                if let Some(link) = cx.up.get(main).filter(|link| link.takes_commands()) {
                    let back = link.requests().database().to_string();
                    cx.up.push_own(&cx.turn, main, &[b"SELECT", back.as_bytes()], Purpose::Discarded, 0);
                }
            }
        }
    }

    /// Handles a part. The last one completes the reply.
    pub(super) fn gather_part(&mut self, cx: &mut Context, handle: Handle, part: u32, answer: &[u8]) {
        let Some(gather) = self.get_mut(handle) else { return };
        let Some(place) = gather.parts.get_mut(part as usize).filter(|p| p.is_none()) else { return };
        gather.bytes += answer.len();
        let is_alone = cx.down.get(gather.client).is_none();
        let too_large = is_alone || gather.bytes > cx.turn.routing().live.client_output_limit;
        let is_left_out = reply::is_error(answer)
            && gather.nodes.get(part as usize).is_some_and(|node| gather.excused.contains(node));
        *place = Some(if let Aggregation::Info { digest, .. } = &mut gather.whole {
            digest.take(answer);
            Vec::new()
        } else if is_left_out {
            // No reply is empty.
            Vec::new()
        } else if too_large {
            let mut error = Vec::new();
            encode::error(&mut error, TOO_LARGE);
            error
        } else {
            answer.to_vec()
        });
        gather.left -= 1;
        if gather.left > 0 {
            return;
        }
        let Some(gather) = self.all.remove(handle) else { return };
        let (client, seq) = (gather.client, gather.seq);
        let Some(resp3) = cx.down.get(client).map(|c| c.resp3()) else { return };
        let gather = match gather {
            Gather { whole: Aggregation::Rounds(_), .. } => {
                return self.end_round(&cx.turn, &cx.up, &mut cx.down, gather, resp3);
            }
            Gather { whole: Aggregation::DoubleRead { request, as_published }, parts, class, epoch, .. } => {
                let parts: Vec<Vec<u8>> = parts.into_iter().flatten().collect();
                return end_double_read(
                    cx,
                    client,
                    PendingDoubleRead { as_published, seq, class, epoch: epoch as u32, request },
                    &parts,
                );
            }
            Gather { whole: Aggregation::Redirect(options), parts, .. } => {
                let parts = parts.into_iter().flatten().collect();
                self.redirects.push_back(FoundRedirect { client, seq, options, parts });
                return;
            }
            other => other,
        };
        let whole = self.merge(&cx.turn, &mut cx.down, gather, resp3);
        deliver_joined(&cx.turn, &mut cx.down, client, seq, &whole);
    }
}

impl Gathers {
    /// Begins a procedure whose rounds must not be mixed with other commands of the client: it starts when the client
    /// has no pending replies, and later commands wait for its end.
    pub(super) fn begin_alone(
        &mut self,
        turn: &Turn,
        down: &mut Downstreams,
        handle: Handle,
        class: u8,
        procedure: Box<dyn MultiStepCommand>,
        first: Vec<StepRequest>,
    ) -> Flow {
        let Some(client) = down.get_mut(handle) else { return Flow::Close };
        if client.in_flight() > 0 {
            return Flow::Stall(Stall::Barrier);
        }
        client.replies_mut().take_lane(Lane::Rounds);
        self.begin_rounds(turn, down, handle, class, procedure, first)
    }

    /// Begins a procedure. The caller ensures the order among the client's commands.
    pub(super) fn begin_rounds(
        &mut self,
        turn: &Turn,
        down: &mut Downstreams,
        handle: Handle,
        class: u8,
        procedure: Box<dyn MultiStepCommand>,
        first: Vec<StepRequest>,
    ) -> Flow {
        let whole = Aggregation::Rounds(procedure);
        let Some(gather) = self.begin_gather(turn, down, handle, class, first.len(), whole) else {
            return Flow::Close;
        };
        self.send_round(gather, first, class);
        Flow::Next
    }
}

pub(super) fn no_multi_text(turn: &Turn, node: NodeId, why: &str) -> String {
    format!(
        "ERR {} refuses transactions ({why}): allow MULTI and EXEC to Switchyard's user there",
        turn.node_name(node)
    )
}

/// Passes a combined reply of several nodes to a client, or to its transaction if that has requested it.
fn deliver_joined(turn: &Turn, down: &mut Downstreams, handle: Handle, seq: u32, answer: &[u8]) {
    let Some(client) = down.get_mut(handle) else { return };
    if client.in_multi()
        && let Some(database) =
            client.state_mut::<Session>().and_then(|session| session.multi.own.note_answer(seq, answer))
    {
        client.select(database);
        return down.deliver(turn, handle, seq, b"");
    }
    down.deliver(turn, handle, seq, answer);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::upstreams::link::tests::pending;

    #[test]
    fn a_command_is_not_called_unexecuted_because_one_part_was_not() {
        let down = b"-NODEDOWN b:1 cannot be reached: why\r\n";
        let lost = b"-NODELOST connection to a:1 was lost: why; the command may have been executed\r\n";
        let doubtful = b"-NODEDOWN b:1 cannot be reached: why; other parts of the command may have been executed\r\n";
        let whole = |parts: &[&[u8]]| {
            let parts: Vec<Vec<u8>> = parts.iter().map(|part| part.to_vec()).collect();
            with_doubt(parts.iter().find(|part| reply::is_error(part)).expect("an error"), &parts)
        };
        assert_eq!(whole(&[b"+OK\r\n", down]), doubtful);
        assert_eq!(whole(&[down, lost]), doubtful);
        assert_eq!(whole(&[down, down]), down);
        assert_eq!(whole(&[lost, b":1\r\n"]), lost);
        assert_eq!(whole(&[b"-OOM command not allowed\r\n", b"+OK\r\n"]), b"-OOM command not allowed\r\n");
    }

    #[test]
    fn requests_before_the_last_of_a_part_count_for_its_client() {
        let client = Handle { index: 7, generation: 1 };
        let last = Pending { who: client, ..pending(Purpose::Client) };
        let gathers = Gathers::new();
        let requests = [before_last(Purpose::Queued, last), before_last(Purpose::Discarded, last), last];
        assert_eq!(gathers.owners(requests.iter()).map(|(owner, _)| owner).collect::<Vec<_>>(), [Some(client); 3]);
    }
}
