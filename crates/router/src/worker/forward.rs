//! Sending of a command to the node of its keys, on a shared connection.

use switchyard_policy::topology::NodeId;
use switchyard_resp::command::{Command, Flags};
use switchyard_resp::request::Args;

use super::command::{Call, CommandSeq, KeyedCommand};
use super::context::Context;
use super::downstreams::waits::Stall;
use super::flow::Flow;
use super::turn::Turn;
use super::upstreams::link::UNSENT_HIGH;
use super::upstreams::pending::{Again, Pending, Purpose};
use super::wait::state::Since;
use crate::lane::Lane;
use crate::settings::Reads;
use crate::worker::invocation::Invocation;

/// Whether a replica may reply to a read. In front of a cluster, slots migrate unnoticed, so a replica may lack keys that
/// exist. Only the reply to a read of one key shows that, and then the owner replies instead
/// ([`Redirects::read_at_owner`](super::redirect::Redirects::read_at_owner)).
pub(super) fn may_replica_reply(turn: &Turn, command: &Command, args: &Args<'_>) -> bool {
    !turn.routing().topology.is_of_cluster()
        || command.first_key_only(args).is_some() && !command.flags.has(Flags::CURSOR)
}

/// Passes a command to the shared connection of a node.
#[inline]
pub(super) fn forward(cx: &mut Context, call: &Invocation<'_>, node: NodeId) -> Flow {
    let Invocation { handle, command, args, raw, .. } = *call;
    let class = command.class() as u8;
    let read_only = command.flags.has(Flags::READONLY);
    let mut lane = if command.flags.has(Flags::SLOW) { Lane::Slow } else { Lane::Main };
    let Some(client) = cx.down.get_mut(handle) else { return Flow::Close };
    let mut replica = None;
    if client.identity().reads() != Reads::Primary
        && !cx.hooks.detour
        && lane == Lane::Main
        && read_only
        && may_replica_reply(&cx.turn, command, args)
        && let Some(reads) = client.replica_policy()
    {
        replica = match cx.up.replica_for(&cx.turn, handle, reads, client.resp3(), node) {
            Ok(link) => link,
            Err(text) => {
                cx.down.refuse_read(&cx.turn, handle, class, &text);
                return Flow::Next;
            }
        };
        lane = if replica.is_some() { Lane::Replica } else { Lane::Main };
    }
    if !client.may_take(lane) {
        return Flow::Stall(Stall::Barrier);
    }
    let link_handle = replica.unwrap_or_else(|| cx.up.shared_link(&cx.turn, node, lane, client.resp3()));
    let Some(link) = cx.up.get(link_handle) else { return Flow::Close };
    let has_room = link.has_room(UNSENT_HIGH);
    if !link.takes_commands() && (replica.is_some() || !cx.up.is_worth_another_try(&cx.turn, link_handle)) {
        let text = cx.turn.down_text(node);
        return cx.down.refuse(&cx.turn, handle, class, &text);
    }
    if !has_room && cx.up.is_full(link_handle, handle, UNSENT_HIGH) {
        return Flow::Stall(Stall::Upstream);
    }
    let seq = client.replies_mut().owe_at(Some(node), cx.turn.now_us(), class);
    if !read_only {
        client.note_written(node, Since::now(cx.turn.shared(), cx.turn.routing()));
    }
    let (database, no_touch) = (client.database(), client.no_touch());
    let pending = Pending {
        who: handle,
        seq,
        len: 0,
        sent_us: cx.turn.now_us() as u32,
        epoch: cx.turn.routing().topology.epoch() as u32,
        purpose: Purpose::Client,
        class,
        again: match read_only {
            _ if command.flags.has(Flags::SCRIPT) => Again::Heals,
            true => Again::Reads,
            false => Again::Never,
        },
        is_long: false,
        end: CommandSeq::NONE,
        cacheable: cx.turn.cacheable(),
    };
    let keyed = KeyedCommand { call: Call::Found(command, args), node, database };
    let request = cx.hooks.pass(&cx.turn, keyed, raw, pending);
    cx.up.push_for(link_handle, no_touch, request);
    Flow::Next
}
