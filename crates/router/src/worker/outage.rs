//! Nodes that this worker has lost, and the commands that wait for their return.
//!
//! A server that restarts is away for a moment. Libraries survive that before one server, because a closed connection
//! is what they expect; an error reply in its place ends some of them. So a command for a lost node waits
//! ([`Stall::Outage`]): until a main connection to the node is up, until another node owns its keys, or until
//! `nodes.wait-max` after the loss. The bound belongs to the node rather than the command, so a long outage gives
//! `NODEDOWN` at once. With one node, `NODEDOWN` and `NODELOST` close the client's connection instead.
//!
//! Invariant: a waiting command has had no effect. It is not queued, no part of it is sent, and it is dispatched from
//! its beginning afterwards, by the map of that moment. A reply in flight that is lost does not wait: the node may have
//! executed its command.
//!
//! Not a queue at the connection: a new owner could not get its commands, and its memory would need a bound. The loss
//! is a fact of the worker rather than one that workers share, because each loses its own connection, and one of them
//! may find the node up before the others.

use switchyard_policy::routing::{Route, route};
use switchyard_policy::topology::NodeId;
use switchyard_resp::command::{Command, Flags, Handling, Local, Merge};
use switchyard_resp::request::Args;

use super::Worker;
use super::clients::Downstreams;
use super::downstream::{Client, Stall};
use super::local::parse;
use super::login::guard;
use super::transit::with_parsed_command;
use super::turn::Turn;
use super::upstreams::Upstreams;
use super::upstreams::outages::wait_us;
use crate::settings::Reads;
use crate::shared::{RoutingSnapshot, lock};
use crate::slab::Handle;

/// Dispatches the commands that wait for lost nodes again.
pub(super) fn dispatch_waiting(turn: &Turn, down: &mut Downstreams) {
    for client in down.stalled(Stall::Outage) {
        down.unstall(turn, client);
    }
}

/// Whether a client waits for a node and has closed its side, without a reply in flight: its command is dropped.
pub(super) fn is_abandoned(client: &Client) -> bool {
    client.stall == Stall::Outage && client.hangup && client.in_flight() == 0 && client.unsent() == 0
}

/// Whether an error of the router closes its client's connection instead, as the end of a plain server does: with one
/// node, if commands wait for it at all.
pub(super) fn closes(turn: &Turn, error: &[u8]) -> bool {
    let is_loss = error.starts_with(b"-NODEDOWN ") || error.starts_with(b"-NODELOST ");
    is_loss && turn.routing().topology.nodes().len() == 1 && wait_us(turn.routing()) > 0
}

/// Whether a command waits for the return of a node. Only if none of its nodes is lost may it be sent at all.
#[cold]
pub(super) fn waits(
    worker: &mut Worker,
    routing: &RoutingSnapshot,
    handle: Handle,
    command: &Command,
    args: &Args<'_>,
) -> bool {
    if !worker.up.outages().any() || !needs_lost_node(worker, routing, handle, command, args) {
        return false;
    }
    if let Some(client) = worker.down.get_mut(handle) {
        // A refusal of an exclusive connection, from before the loss: it is out of date at the node's return.
        client.refusal = None;
        // The command has passed its limits, and is dispatched again.
        client.was_counted = client.guard & guard::COUNTED != 0;
    }
    true
}

fn needs_lost_node(
    worker: &mut Worker,
    routing: &RoutingSnapshot,
    handle: Handle,
    command: &Command,
    args: &Args<'_>,
) -> bool {
    let Some(client) = worker.down.get(handle) else { return false };
    if client.in_multi {
        return command.handling == Handling::Local(Local::Exec) && needs_of_exec(worker, routing, handle);
    }
    let written = client.written;
    match command.handling {
        Handling::Keyed | Handling::Split(_) => needs_of_keys(worker, routing, Some(handle), command, args),
        Handling::Local(Local::Watch) => needs_of_keys(worker, routing, None, command, args),
        // One reply is enough.
        Handling::Every(Merge::AnyOk) => false,
        Handling::Every(_) | Handling::Local(Local::RandomKey) => {
            is_any_lost(&worker.up, &worker.turn.data_nodes().all())
        }
        Handling::Any | Handling::Local(Local::Subscribe | Local::Psubscribe) => needs_any(&worker.up, routing),
        Handling::OnlyNode(_) => routing.topology.only_node().is_some_and(|node| worker.up.outages().has(node)),
        Handling::Local(Local::Publish) if !worker.turn.shared().subscriptions.is_empty() => {
            needs_any(&worker.up, routing)
        }
        Handling::Local(Local::Publish | Local::Spublish | Local::Ssubscribe) => {
            args.get(1).is_some_and(|channel| worker.up.outages().has(routing.topology.owner_of(channel)))
        }
        Handling::Local(Local::Scan) => {
            let position = args.get(1).and_then(parse::<u64>).and_then(|cursor| {
                let now = worker.turn.shared().scan_tick();
                lock(&worker.turn.shared().scans).decode(cursor, now)
            });
            position.is_some_and(|position| worker.up.outages().has(position.node))
        }
        Handling::Local(Local::Wait) => worker
            .turn
            .data_nodes()
            .all()
            .into_iter()
            .any(|node| written.concerns(node) && worker.up.outages().has(node)),
        Handling::Local(Local::Select) => {
            let keepers = worker.turn.data_nodes().all();
            let database = args.get(1).and_then(parse::<u32>);
            database.is_some_and(|database| !worker.turn.shared().has_database(&keepers, database))
                && is_any_lost(&worker.up, &keepers)
        }
        Handling::Local(Local::ClientTracking) => {
            args.get(2).is_some_and(|switch| switch.eq_ignore_ascii_case(b"ON"))
                && is_any_lost(&worker.up, &worker.turn.data_nodes().all())
        }
        Handling::Local(_) | Handling::Refused(_) => false,
    }
}

fn is_any_lost(up: &Upstreams, nodes: &[NodeId]) -> bool {
    nodes.iter().any(|node| up.outages().has(*node))
}

/// Whether a command that any node executes waits: no node is up, and one may return.
fn needs_any(up: &Upstreams, routing: &RoutingSnapshot) -> bool {
    !routing.topology.nodes().any(|node| up.is_up(node.id))
}

/// Whether a lost node has keys of a command. `reader`: its client, if a replica may reply to it.
fn needs_of_keys(
    worker: &mut Worker,
    routing: &RoutingSnapshot,
    reader: Option<Handle>,
    command: &Command,
    args: &Args<'_>,
) -> bool {
    if let Some(node) = routing.topology.only_node() {
        return worker.up.outages().has(node) && !has_replica(worker, reader, command, args, node);
    }
    let mut places = Vec::new();
    if command.find_keys(args, &mut places).is_err() {
        // It is refused.
        return false;
    }
    let keys = places.iter().filter_map(|place| args.get(*place as usize));
    match route(&routing.topology, keys.clone()) {
        Route::Anywhere => needs_any(&worker.up, routing),
        Route::Owner(_, node) | Route::Together(node) => {
            worker.up.outages().has(node) && !has_replica(worker, reader, command, args, node)
        }
        Route::CrossSlot | Route::Parted(_) => {
            keys.map(|key| routing.topology.lives_at(key)).any(|node| worker.up.outages().has(node))
        }
    }
}

/// Whether a replica of a lost node replies to a read, or the client accepts no other reply.
fn has_replica(worker: &mut Worker, reader: Option<Handle>, command: &Command, args: &Args<'_>, node: NodeId) -> bool {
    let needs_primary = [Flags::SLOW, Flags::CURSOR, Flags::BLOCKING].into_iter().any(|flag| command.flags.has(flag));
    let is_large = args.get(1).is_some_and(|key| worker.large_keys.suggests(command, key));
    let is_read = command.flags.has(Flags::READONLY) && !needs_primary && !is_large && !worker.hooks.detour;
    let reader = reader
        .filter(|reader| is_read && worker.down.get(*reader).is_some_and(|client| client.reads != Reads::Primary));
    reader.is_some_and(|reader| !matches!(worker.replica_for(reader, node), Ok(None)))
}

/// Whether what a client has queued needs a lost node. A transaction that is refused, or whose watched keys count as
/// changed, needs none.
fn needs_of_exec(worker: &mut Worker, routing: &RoutingSnapshot, handle: Handle) -> bool {
    let Some(client) = worker.down.get(handle).filter(|client| !client.watches()) else { return false };
    let Some(multi) = client.session.as_ref().map(|session| &session.multi).filter(|multi| !multi.aborted) else {
        return false;
    };
    if multi.commands.is_empty() {
        return false;
    }
    if multi.slot.is_none() {
        return needs_any(&worker.up, routing);
    }
    multi.requests().iter().any(|request| {
        let needs =
            with_parsed_command(routing, request, |command, args| needs_of_keys(worker, routing, None, command, args));
        needs.unwrap_or(false)
    })
}
