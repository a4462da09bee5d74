//! Commands about all keys during moves. The movers are quiet while the nodes execute them.
//!
//! FLUSHALL and FLUSHDB: keys that a mover has read before and stores after the flush would come back. DBSIZE and KEYS:
//! a key stored at the target and not yet removed from the source counts twice, and a key that moves between the
//! answers of two nodes may be in neither. While no mover has a batch in flight, each key is at one node. And movers'
//! own keys do not count.
//!
//! FUNCTION LOAD and similar commands wait only for copies of functions between nodes (`crate::function_turns`).

pub(super) mod state;

use std::collections::{BTreeMap, HashSet};

use switchyard_policy::migration::is_temporary;
use switchyard_policy::topology::{MoveId, NodeId, Stage, Transit};
use switchyard_resp::command::Merge;
use switchyard_resp::{encode, reply};

use super::downstreams::Downstreams;
use super::downstreams::waits::Stall;
use super::flow::Flow;
use super::gather::{Gathers, with_doubt};
use super::multi_step::{MultiStepCommand, Next, StepRequest};
use super::turn::Turn;
use super::upstreams::Upstreams;
use super::wait::state::Since;
use crate::lane::Lane;
use crate::shared::RoutingSnapshot;
use crate::slab::Handle;
use state::{Guard, QuiesceGuard, QuiesceWait};

/// Maximum wait of a read for the movers, microseconds. Then it is executed in the current state of the nodes.
const LOOK_TIMEOUT_US: u64 = 1_000_000;

/// The commands of a worker that wait until movers are quiet.
#[derive(Debug, Default)]
pub(super) struct QuiesceQueue {
    last_ticket: u64,
}

/// FLUSHALL at every node, with the movers quiet until all have answered.
#[derive(Debug)]
struct Flush {
    _guard: Guard,
}

impl MultiStepCommand for Flush {
    fn next(&mut self, _: &Turn, _: &Upstreams, _: bool, parts: Vec<Vec<u8>>) -> Next {
        let failed = parts.iter().find(|p| reply::is_error(p)).map(|error| with_doubt(error, &parts));
        Next::Done(failed.unwrap_or_else(|| parts.into_iter().next().unwrap_or_default()))
    }

    fn is_long(&self) -> bool {
        true
    }
}

/// DBSIZE or KEYS at every node, with the movers quiet until all have answered.
#[derive(Debug)]
struct FullScan {
    _guard: Guard,
    merge: Merge,
    nodes: Vec<NodeId>,
}

impl MultiStepCommand for FullScan {
    fn next(&mut self, turn: &Turn, _: &Upstreams, _: bool, parts: Vec<Vec<u8>>) -> Next {
        let (of_nodes, temporary) = parts.split_at(self.nodes.len().min(parts.len()));
        if let Some(error) = of_nodes.iter().find(|part| reply::is_error(part)) {
            return Next::Done(error.clone());
        }
        let mut out = Vec::new();
        match self.merge {
            Merge::Concat => {
                // As for SCAN: keys at a node unrelated to their slot cannot be used.
                let routing = &turn.routing();
                let is_key = |node: NodeId, key: &[u8]| {
                    reply::text(key).is_some_and(|key| !is_temporary(key) && belongs(routing, node, key))
                };
                let of_nodes = self.nodes.iter().zip(of_nodes);
                let keys = of_nodes.flat_map(|(node, part)| reply::elements(part).filter(|key| is_key(*node, key)));
                // If a mover did not become quiet, some keys may be at two nodes.
                let mut seen = HashSet::new();
                let keys: Vec<&[u8]> = keys.filter(|key| seen.insert(*key)).collect();
                encode::header(&mut out, b'*', keys.len());
                keys.into_iter().for_each(|key| out.extend_from_slice(key));
            }
            _ => {
                let sum = |parts: &[Vec<u8>]| parts.iter().filter_map(|part| reply::integer(part)).sum::<i64>();
                encode::integer(&mut out, sum(of_nodes) - sum(temporary));
            }
        }
        Next::Done(out)
    }
}

/// Delays a command that will change the functions of all nodes: a concurrent copy from one node to another would
/// restore the previous state. `None`: no copies start until the client's next procedure ends.
pub(super) fn wait_to_change_functions(turn: &Turn, down: &mut Downstreams, handle: Handle, class: u8) -> Option<Flow> {
    let now_us = turn.now_us();
    let timeout = turn.routing().live.command_timeout;
    let Some(client) = down.get_mut(handle) else { return Some(Flow::Close) };
    let change = turn.shared().functions.begin_change();
    let may = change.is_some();
    if !may && client.in_flight() > 0 {
        return Some(Flow::Stall(Stall::Barrier));
    }
    let since_us = client.state::<QuiesceWait>().map_or(now_us, |quieting| quieting.since_us);
    client.set_state(QuiesceWait { since_us, guard: Guard::Functions { _turn: change } });
    if may {
        return None;
    }
    if now_us.saturating_sub(since_us) <= timeout.as_micros() as u64 {
        return Some(Flow::Stall(Stall::Quiet));
    }
    client.take_state::<QuiesceWait>();
    let left = turn.shared().fences.with_functions();
    let left: Vec<&str> =
        left.iter().filter_map(|(node, _)| Some(&*turn.routing().live.nodes.get(node)?.name)).collect();
    let text = match left[..] {
        [] => {
            format!(
                "TRYAGAIN functions are being copied to a node, which did not end within {timeout:?}; no function was changed"
            )
        }
        [node, ..] => format!(
            "TRYAGAIN node {node} may still store functions sent by a move, because it does not confirm the end of a connection \
             (CLIENT KILL); no function was changed"
        ),
    };
    Some(down.refuse(turn, handle, class, &text))
}

/// Handles the report that a mover is quiet.
pub(super) fn on_quiet(turn: &Turn, down: &mut Downstreams, move_id: MoveId, ticket: u64) {
    // Including commands that are stalled for another reason; such commands are rare.
    for handle in down.handles() {
        let Some(quieting) = down.get_mut(handle).and_then(|c| c.state_mut::<QuiesceWait>()) else { continue };
        if let Some(guard) = quieting.movers().filter(|guard| guard.ticket == ticket)
            && let Some((_, quiet)) = guard.movers.get_mut(&move_id)
        {
            *quiet = true;
            if guard.movers.values().all(|(_, quiet)| *quiet) {
                down.unstall(turn, handle);
            }
        }
    }
}

/// Resumes commands that wait for quiet, because moves may have ended, or time has passed.
pub(super) fn tick_quieting(turn: &Turn, down: &mut Downstreams) {
    for handle in down.stalled(Stall::Quiet) {
        down.unstall(turn, handle);
    }
}

impl QuiesceQueue {
    /// Requests quiet movers for the command of a client. Returns whether they are, and the time waited.
    fn quiet_for(
        &mut self,
        turn: &Turn,
        down: &mut Downstreams,
        handle: Handle,
        routing: &RoutingSnapshot,
        flushes: bool,
    ) -> Option<(bool, u64)> {
        if down.get(handle)?.state::<QuiesceWait>().is_none() {
            self.last_ticket += 1;
            // Differs from the tickets of other workers.
            let ticket = self.last_ticket << 8 | (turn.index() as u64 & 0xff);
            let guard = Guard::Movers(QuiesceGuard { ticket, flushes, turn: None, movers: BTreeMap::new() });
            down.get_mut(handle)?.set_state(QuiesceWait { since_us: turn.now_us(), guard });
        }
        let quieting = down.get_mut(handle)?.state_mut::<QuiesceWait>()?;
        let waited_us = turn.now_us().saturating_sub(quieting.since_us);
        let guard = quieting.movers()?;
        if !flushes && guard.turn.is_none() {
            guard.turn = turn.shared().try_quiesce_lock();
            if guard.turn.is_none() {
                return Some((false, waited_us));
            }
        }
        // A move may have started in the meantime.
        guard.request(&routing.moves, turn.index());
        let quiet = guard.movers.iter().all(|(id, (_, quiet))| *quiet || !routing.moves.by_id.contains_key(id));
        Some((quiet, waited_us))
    }
}

/// FLUSHALL or FLUSHDB during moves.
#[cold]
pub(super) fn flush_quietly(
    turn: &Turn,
    down: &mut Downstreams,
    gathers: &mut Gathers,
    quiesce: &mut QuiesceQueue,
    handle: Handle,
    lane: Lane,
    raw: &[u8],
    class: u8,
) -> Flow {
    let routing = turn.routing().clone();
    let Some(client) = down.get_mut(handle) else { return Flow::Close };
    if client.in_flight() > 0 {
        return Flow::Stall(Stall::Barrier);
    }
    let Some((quiet, waited_us)) = quiesce.quiet_for(turn, down, handle, &routing, true) else {
        return Flow::Close;
    };
    if !quiet && waited_us <= routing.live.command_timeout.as_micros() as u64 {
        return Flow::Stall(Stall::Quiet);
    }
    let Some(quieting) = down.get_mut(handle).and_then(|c| c.take_state::<QuiesceWait>()) else { return Flow::Close };
    if !quiet {
        let text = format!(
            "TRYAGAIN data is being moved, and a move did not quiesce within {:?}; nothing was flushed",
            routing.live.command_timeout
        );
        return down.refuse(turn, handle, class, &text);
    }
    let mut nodes = turn.data_nodes().all();
    // Movers' own keys are flushed with the keys from which they were made.
    nodes.extend(routing.moves.by_id.values().map(|mover| mover.target));
    nodes.sort_unstable();
    nodes.dedup();
    if let Some(client) = down.get_mut(handle) {
        let since = Since::now(turn.shared(), turn.routing());
        nodes.iter().for_each(|node| client.note_written(*node, since));
    }
    let asks = nodes.into_iter().map(|node| StepRequest { node, lane, requests: vec![raw.to_vec()] }).collect();
    gathers.begin_alone(turn, down, handle, class, Box::new(Flush { _guard: quieting.guard }), asks)
}

/// DBSIZE or KEYS during moves.
#[cold]
pub(super) fn look_quietly(
    turn: &Turn,
    down: &mut Downstreams,
    gathers: &mut Gathers,
    quiesce: &mut QuiesceQueue,
    handle: Handle,
    lane: Lane,
    merge: Merge,
    raw: &[u8],
    class: u8,
) -> Flow {
    let routing = turn.routing().clone();
    let Some(client) = down.get_mut(handle) else { return Flow::Close };
    if client.in_flight() > 0 {
        return Flow::Stall(Stall::Barrier);
    }
    let database = client.database();
    let Some((quiet, waited_us)) = quiesce.quiet_for(turn, down, handle, &routing, false) else {
        return Flow::Close;
    };
    if !quiet && waited_us <= LOOK_TIMEOUT_US {
        return Flow::Stall(Stall::Quiet);
    }
    let Some(quieting) = down.get_mut(handle).and_then(|c| c.take_state::<QuiesceWait>()) else { return Flow::Close };
    let nodes = turn.data_nodes().all();
    let mut asks: Vec<StepRequest> =
        nodes.iter().map(|node| StepRequest { node: *node, lane, requests: vec![raw.to_vec()] }).collect();
    if merge == Merge::Sum {
        for mover in routing.moves.by_id.values().filter(|mover| nodes.contains(&mover.target)) {
            let names = mover.temporary_in(database);
            if !names.is_empty() {
                let mut request = Vec::new();
                encode::command(
                    &mut request,
                    std::iter::once(&b"EXISTS"[..]).chain(names.iter().map(Vec::as_slice)).collect::<Vec<_>>(),
                );
                asks.push(StepRequest { node: mover.target, lane, requests: vec![request] });
            }
        }
    }
    gathers.begin_alone(turn, down, handle, class, Box::new(FullScan { _guard: quieting.guard, merge, nodes }), asks)
}

/// Whether a key of this name can be used at a node. While keys are only listed or copied ahead, the ones at the target
/// are not used.
pub(super) fn belongs(routing: &RoutingSnapshot, node: NodeId, key: &[u8]) -> bool {
    let is_on_its_way =
        |transit: &Transit| transit.source == node || transit.target == node && transit.stage != Stage::Observed;
    routing.topology.node_of(key) == node
        || routing.topology.transit(routing.topology.slot_of(key)).is_some_and(is_on_its_way)
}
