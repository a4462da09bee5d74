//! Double reads ([`switchyard_policy::migration::DoubleRead`]): a read of one key that is on its way is asked of its
//! source and its target at once. An answer that shows the key goes to the client. Where none does, the read is issued
//! again: as any command whose key is not there yet, it waits for it.
//!
//! Only reads of one key. Of several keys one node gives the values of one moment, and two nodes cannot.
//!
//! It begins when the client is owed nothing, because the second try must not come behind what the client has sent
//! later.

use switchyard_policy::migration::KeyLookup;
use switchyard_policy::topology::NodeId;
use switchyard_resp::command::{Command, Flags, Handling};
use switchyard_resp::reply;
use switchyard_resp::request::Args;

use super::dispatch::Flow;
use super::downstream::Repeat;
use super::gather::Aggregation;
use super::upstream::{Lane, Phase};
use super::{Stall, Worker};
use crate::mover::{MoverMessage, SharedLeg};
use crate::shared::RoutingSnapshot;
use crate::slab::Handle;

/// Of which nodes a read is asked at once.
#[derive(Debug)]
pub(super) struct Asks {
    /// The source, and the target; or the target alone.
    pub(super) nodes: Vec<NodeId>,
    /// By a protocol as published: that neither of both has the key is believed.
    pub(super) as_published: bool,
}

/// A command that was asked of them.
#[derive(Debug)]
pub(super) struct PendingDoubleRead {
    pub(super) as_published: bool,
    pub(super) seq: u32,
    pub(super) class: u8,
    /// Low bits of the epoch under which the nodes were chosen.
    pub(super) epoch: u32,
    pub(super) request: Vec<u8>,
}

const fn lane_of(command: &Command) -> Lane {
    if command.flags.has(Flags::SLOW) { Lane::Slow } else { Lane::Main }
}

/// The nodes that a command may be asked of, in the place of waiting.
pub(super) fn may_double_read(
    worker: &mut Worker,
    plan: &RoutingSnapshot,
    handle: Handle,
    command: &Command,
    args: &Args<'_>,
    look: &KeyLookup<SharedLeg>,
) -> Option<Asks> {
    let (nodes, processes) = look.double_read(&plan.topology)?;
    let client = worker.clients.get(handle)?;
    // One that has waited already has what it waited for, or soon will.
    if client.moving.is_some() || !reads_one_key(worker, handle, command, args) {
        return None;
    }
    let resp3 = client.resp3;
    for (node, process) in nodes.into_iter().zip([&processes.source, &processes.target]) {
        let link = worker.shared_link(node, lane_of(command), resp3);
        // Another process than the leg has met may show what is past.
        worker.links.get(link).filter(|link| {
            link.phase == Phase::Up && link.takes_commands() && link.run_id.as_deref() == Some(process)
        })?;
    }
    Some(Asks { nodes: nodes.to_vec(), as_published: false })
}

/// Whether a command only reads one key, in a way that can be asked of two nodes.
pub(super) fn reads_one_key(worker: &Worker, handle: Handle, command: &Command, args: &Args<'_>) -> bool {
    let is_read =
        command.flags.has(Flags::READONLY) && !command.flags.has(Flags::SCRIPT) && !command.flags.has(Flags::BLOCKING);
    // A cursor into a value means something to one server only; and what a module answers of a missing key is not
    // known.
    let can_be =
        is_read && command.is_builtin() && command.handling == Handling::Keyed && !command.flags.has(Flags::CURSOR);
    let key = command.first_key_only(args).and_then(|place| args.get(place)).filter(|_| can_be);
    let is_free = worker.clients.get(handle).is_some_and(|client| !client.in_multi);
    key.is_some_and(|key| is_free && !worker.large_keys.suggests(command, key))
}

/// Has the mover fetch the key of one read in so many, if the protocol wants that.
pub(super) fn fetch_sampled(worker: &Worker, plan: &RoutingSnapshot, look: &KeyLookup<SharedLeg>) {
    let number = worker.counters.double_reads.get() + 1;
    let is_sampled = look.is_sampled(&plan.topology, number);
    if is_sampled
        && let Some(((id, leg), key)) = look.fetched()
        && let Some(mover) = plan.moves.by_id.get(&id)
    {
        mover.notify(MoverMessage::Wanted { leg, keys: vec![key] });
    }
}

/// Asks them.
pub(super) fn double_read(worker: &mut Worker, handle: Handle, command: &Command, asks: &Asks, raw: &[u8]) -> Flow {
    let Some(client) = worker.clients.get_mut(handle) else { return Flow::Close };
    if client.in_flight() > 0 {
        return Flow::Stall(Stall::Barrier);
    }
    client.lane = Lane::Rounds;
    let class = command.class() as u8;
    let Asks { nodes, as_published } = asks;
    let whole = Aggregation::DoubleRead { request: raw.to_vec(), as_published: *as_published };
    let Some(gather) = worker.begin_gather(handle, class, nodes.len(), whole) else { return Flow::Close };
    worker.counters.double_reads.add(u64::from(nodes.len() > 1));
    for (part, node) in nodes.iter().enumerate() {
        worker.send_part(gather, part as u32, *node, lane_of(command), raw, class);
    }
    Flow::Next
}

/// All have answered: the source, and the target; or the target alone.
pub(super) fn end_double_read(worker: &mut Worker, handle: Handle, asked: PendingDoubleRead, parts: &[Vec<u8>]) {
    if let Some(shown) = parts.iter().rev().find(|part| !reply::may_be_missing_key(part)) {
        return worker.deliver(handle, asked.seq, shown);
    }
    if let ([of_source, _], true) = (parts, asked.as_published) {
        return worker.deliver(handle, asked.seq, of_source);
    }
    worker.counters.double_reads_missed.add(u64::from(parts.len() > 1));
    let PendingDoubleRead { seq, class, epoch, request, .. } = asked;
    let Some(client) = worker.clients.get_mut(handle) else { return };
    // The node is chosen anew: slots are in transit, or the epoch is another one.
    client.repeat = Some(Box::new(Repeat { node: NodeId(0), epoch, seq, class, request }));
    client.lane = Lane::Large;
    worker.run_repeat(handle);
}
