//! Double reads ([`switchyard_policy::migration::DoubleRead`]): a read of one key in transit is sent to its source and
//! target concurrently. A reply with the key goes to the client. If neither node has the key, the read is repeated like
//! any command whose key is in transit, and waits for it.
//!
//! Only for reads of one key: one node returns the values of several keys at one moment, two nodes cannot.
//!
//! Starts only if the client has no pending reply, because the second attempt must not follow later commands of the
//! client.

use switchyard_policy::migration::{DoubleRead, KeyLookup};
use switchyard_policy::topology::NodeId;
use switchyard_resp::command::{Command, Flags, Handling};
use switchyard_resp::reply;
use switchyard_resp::request::Args;

use super::context::Context;
use super::downstreams::client::Repeat;
use super::downstreams::waits::Stall;
use super::downstreams::{Client, Downstreams};
use super::flow::Flow;
use super::gather::{Aggregation, Gathers};
use super::large::{LargeKeys, run_repeat};
use super::multi_step::StepRequest;
use super::turn::Turn;
use super::upstreams::Upstreams;
use super::upstreams::link::Phase;
use crate::lane::Lane;
use crate::mover::{MoverMessage, SharedLeg};
use crate::shared::RoutingSnapshot;
use crate::slab::Handle;

/// Nodes of a double read.
#[derive(Debug)]
pub(super) struct Asks {
    /// Source and target, or only the target.
    pub(super) nodes: Vec<NodeId>,
    /// Published protocol: if both nodes lack the key, it counts as missing.
    pub(super) as_published: bool,
}

/// A pending double read.
#[derive(Debug)]
pub(super) struct PendingDoubleRead {
    pub(super) as_published: bool,
    pub(super) seq: u32,
    pub(super) class: u8,
    /// Low bits of the epoch in which the nodes were chosen.
    pub(super) epoch: u32,
    pub(super) request: Vec<u8>,
}

const fn lane_of(command: &Command) -> Lane {
    if command.flags.has(Flags::SLOW) { Lane::Slow } else { Lane::Main }
}

/// Whether the processes of a double read are connected.
pub(super) fn are_connected(
    turn: &Turn,
    up: &mut Upstreams,
    resp3: bool,
    command: &Command,
    nodes: [NodeId; 2],
    processes: &DoubleRead,
) -> bool {
    nodes.into_iter().zip([&processes.source, &processes.target]).all(|(node, process)| {
        let link = up.shared_link(turn, node, lane_of(command), resp3);
        // A process other than the leg's may have stale data.
        up.get(link)
            .is_some_and(|link| link.phase() == Phase::Up && link.takes_commands() && link.run_id() == Some(process))
    })
}

/// Requests the key from the mover for a sample of double reads, if the protocol does so.
pub(super) fn fetch_sampled(turn: &Turn, routing: &RoutingSnapshot, look: &KeyLookup<SharedLeg>) {
    let number = turn.counters().double_reads.get() + 1;
    let is_sampled = look.is_sampled(&routing.topology, number);
    if is_sampled
        && let Some(((id, leg), key)) = look.fetched()
        && let Some(mover) = routing.moves.by_id.get(&id)
    {
        mover.notify(MoverMessage::Wanted { leg, keys: vec![key] });
    }
}

/// Handles the replies of the source and target, or of the target alone.
pub(super) fn end_double_read(cx: &mut Context, handle: Handle, asked: PendingDoubleRead, parts: &[Vec<u8>]) {
    let lacks_key = if asked.as_published { reply::is_missing_key_as_published } else { reply::may_be_missing_key };
    if let Some(shown) = parts.iter().rev().find(|part| !lacks_key(part)) {
        return cx.down.deliver(&cx.turn, handle, asked.seq, shown);
    }
    if let ([of_source, _], true) = (parts, asked.as_published) {
        return cx.down.deliver(&cx.turn, handle, asked.seq, of_source);
    }
    cx.turn.counters().double_reads_missed.add(u64::from(parts.len() > 1));
    let PendingDoubleRead { seq, class, epoch, request, .. } = asked;
    let Some(client) = cx.down.get_mut(handle) else { return };
    // The node is chosen again: slots are in transit, or the epoch has changed.
    client.set_state(Repeat { node: NodeId(0), epoch, seq, class, request });
    client.replies_mut().take_lane(Lane::Large);
    run_repeat(cx, handle);
}

impl LargeKeys {
    /// Whether a command only reads one key and may be sent to two nodes.
    pub(super) fn reads_one_key(&self, client: &Client, command: &Command, args: &Args<'_>) -> bool {
        let is_read = command.flags.has(Flags::READONLY)
            && !command.flags.has(Flags::SCRIPT)
            && !command.flags.has(Flags::BLOCKING);
        // Element cursors are only valid at one server, and the reply of a module for a missing key is unknown.
        let can_be =
            is_read && command.is_builtin() && command.handling == Handling::Keyed && !command.flags.has(Flags::CURSOR);
        let key = command.first_key_only(args).and_then(|place| args.get(place)).filter(|_| can_be);
        key.is_some_and(|key| !client.in_multi() && !self.suggests(command, key))
    }
}

impl Gathers {
    /// Sends the reads.
    pub(super) fn double_read(
        &mut self,
        turn: &Turn,
        down: &mut Downstreams,
        handle: Handle,
        command: &Command,
        asks: &Asks,
        raw: &[u8],
    ) -> Flow {
        let Some(client) = down.get_mut(handle) else { return Flow::Close };
        if client.in_flight() > 0 {
            return Flow::Stall(Stall::Barrier);
        }
        client.replies_mut().take_lane(Lane::Rounds);
        let class = command.class() as u8;
        let Asks { nodes, as_published } = asks;
        let whole = Aggregation::DoubleRead { request: raw.to_vec(), as_published: *as_published };
        let Some(gather) = self.begin_gather(turn, down, handle, class, nodes.len(), whole) else {
            return Flow::Close;
        };
        turn.counters().double_reads.add(u64::from(nodes.len() > 1));
        let step = |node: &NodeId| StepRequest { node: *node, lane: lane_of(command), requests: vec![raw.to_vec()] };
        self.send_round(gather, nodes.iter().map(step).collect(), class);
        Flow::Next
    }
}
