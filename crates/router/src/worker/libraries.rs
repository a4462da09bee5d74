//! FUNCTION LOAD and FUNCTION RESTORE: if one node refuses, the change is reverted at the others.
//!
//! A node may refuse a library that others accept: an older version lacks a function, or the node has no memory. So the
//! current libraries are read first, and restored at nodes that have accepted the change if another has not. If a node
//! or the client is lost in between, the nodes differ, which the log reports (`control/src/care.rs`).

use switchyard_policy::topology::NodeId;
use switchyard_resp::command::Merge;
use switchyard_resp::{encode, reply};

use super::downstreams::Downstreams;
use super::downstreams::waits::Stall;
use super::fan_out::FanOutScope;
use super::flow::Flow;
use super::gather::{Aggregation, FanOut, Gathers, with_doubt};
use super::multi_step::{MultiStepCommand, Next, StepRequest};
use super::quiesce::state::QuiesceWait;
use super::turn::Turn;
use super::upstreams::Upstreams;
use super::wait::state::Since;
use crate::lane::Lane;
use crate::slab::Handle;

/// Suffix of a node's error if another node could not be restored.
const KEPT: &[u8] = b"; another node has accepted it, and its previous state could not be restored";

#[derive(Debug)]
struct Change {
    nodes: Vec<NodeId>,
    lane: Lane,
    request: Vec<u8>,
    stage: Stage,
    /// Blocks copies of functions in the meantime.
    _turn: Option<Box<QuiesceWait>>,
}

#[derive(Debug)]
enum Stage {
    /// Reading the current libraries.
    Listing,
    /// Changing the libraries. Has the earlier ones.
    Changing(Vec<Vec<u8>>),
    /// A node has refused with this error; the others are being restored.
    TakingBack { error: Vec<u8>, is_kept: bool },
}

impl Change {
    fn requests(&self) -> Vec<StepRequest> {
        self.nodes
            .iter()
            .map(|node| StepRequest { node: *node, lane: self.lane, requests: vec![self.request.clone()] })
            .collect()
    }

    /// Returns the first reply of a keeper that satisfies `is`.
    fn first<'p>(&self, turn: &Turn, parts: &'p [Vec<u8>], is: impl Fn(&[u8]) -> bool) -> Option<&'p Vec<u8>> {
        let counted = self.nodes.iter().zip(parts).filter(|(node, _)| turn.data_nodes().has(**node));
        counted.map(|(_, part)| part).find(|part| is(part))
    }
}

impl MultiStepCommand for Change {
    fn next(&mut self, turn: &Turn, _: &Upstreams, _: bool, parts: Vec<Vec<u8>>) -> Next {
        match std::mem::replace(&mut self.stage, Stage::Listing) {
            Stage::Listing => {
                if let Some(error) = self.first(turn, &parts, |part| part.starts_with(b"-NODE")) {
                    return Next::Done(error.clone());
                }
                self.stage = Stage::Changing(parts);
                Next::Round(self.requests())
            }
            Stage::Changing(before) => {
                let Some(error) = self.first(turn, &parts, reply::is_error) else {
                    return Next::Done(self.first(turn, &parts, |_| true).cloned().unwrap_or_default());
                };
                let changed = self.nodes.iter().zip(&parts).zip(before).filter(|((_, part), _)| !reply::is_error(part));
                let (mut asks, mut is_kept) = (Vec::new(), false);
                for ((node, _), before) in changed {
                    let Some(dump) = reply::text(&before).filter(|_| !reply::is_error(&before)) else {
                        is_kept = true;
                        continue;
                    };
                    let mut request = Vec::with_capacity(dump.len() + 64);
                    encode::command(&mut request, [&b"FUNCTION"[..], b"RESTORE", dump, b"FLUSH"]);
                    asks.push(StepRequest { node: *node, lane: self.lane, requests: vec![request] });
                }
                if asks.is_empty() {
                    return Next::Done(if is_kept { unchanged_error(error) } else { with_doubt(error, &parts) });
                }
                self.stage = Stage::TakingBack { error: error.clone(), is_kept };
                Next::Round(asks)
            }
            Stage::TakingBack { error, is_kept } => {
                let is_kept = is_kept || parts.iter().any(|part| reply::is_error(part));
                Next::Done(if is_kept { unchanged_error(&error) } else { error })
            }
        }
    }
}

fn unchanged_error(error: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    encode::line(&mut out, b'-', &[reply::text(error).unwrap_or_default(), KEPT].concat());
    out
}

impl Gathers {
    /// Changes the libraries of all nodes, or of none.
    pub(super) fn change_libraries(
        &mut self,
        turn: &Turn,
        up: &Upstreams,
        down: &mut Downstreams,
        handle: Handle,
        lane: Lane,
        class: u8,
        request: Vec<u8>,
    ) -> Flow {
        let nodes = up.links().reachable(turn);
        let now_us = turn.now_us();
        let since = Since::now(turn.shared(), turn.routing());
        let Some(client) = down.get_mut(handle) else { return Flow::Close };
        nodes.iter().for_each(|node| client.note_written(*node, since));
        if nodes.len() == 1 {
            return self.fan_out(
                turn,
                down,
                FanOut {
                    client: handle,
                    lane,
                    reach: FanOutScope::Everybody,
                    requests: vec![request],
                    class,
                    whole: Aggregation::Merged(Merge::Same),
                },
            );
        }
        if client.in_flight() > 0 {
            return Flow::Stall(Stall::Barrier);
        }
        client.replies_mut().note_write(now_us);
        let mut look = Vec::new();
        encode::command(&mut look, [&b"FUNCTION"[..], b"DUMP"]);
        let asks = nodes.iter().map(|node| StepRequest { node: *node, lane, requests: vec![look.clone()] }).collect();
        let change = Change { nodes, lane, request, stage: Stage::Listing, _turn: client.take_state::<QuiesceWait>() };
        self.begin_alone(turn, down, handle, class, Box::new(change), asks)
    }
}
