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

use super::command::{parse, with_parsed_command};
use super::downstreams::waits::Stall;
use super::downstreams::{Client, Downstreams};
use super::forward::may_replica_reply;
use super::large::LargeKeys;
use super::transactions::session::Session;
use super::turn::Turn;
use super::upstreams::Upstreams;
use crate::lock::lock;
use crate::shared::RoutingSnapshot;
use crate::slab::Handle;

/// Dispatches the commands that wait for lost nodes again.
pub(super) fn dispatch_waiting(turn: &Turn, down: &mut Downstreams) {
    for client in down.stalled(Stall::Outage) {
        down.unstall(turn, client);
    }
}

/// Whether a client waits for a node and has closed its side, without a reply in flight: its command is dropped.
pub(super) fn is_abandoned(client: &Client) -> bool {
    client.stall() == Stall::Outage && client.input().has_hung_up() && client.in_flight() == 0 && client.unsent() == 0
}

/// A command that may need a lost node.
pub(super) struct Needs<'a> {
    pub(super) turn: &'a Turn,
    pub(super) routing: &'a RoutingSnapshot,
    pub(super) large_keys: &'a LargeKeys,
    pub(super) handle: Handle,
    pub(super) client: &'a Client,
    /// Whether the snapshot of moved keys executes it.
    pub(super) is_detour: bool,
}

impl Needs<'_> {
    /// Whether the command waits for the return of a node. Only if none of its nodes is lost may it be sent at all.
    #[cold]
    pub(super) fn lost_node(&self, up: &mut Upstreams, command: &Command, args: &Args<'_>) -> bool {
        let Self { turn, routing, client, .. } = self;
        if client.in_multi() {
            return command.handling == Handling::Local(Local::Exec) && self.of_exec(up);
        }
        let nodes = turn.data_nodes();
        match command.handling {
            Handling::Keyed | Handling::Split(_) => self.of_keys(up, true, command, args),
            Handling::Local(Local::Watch) => self.of_keys(up, false, command, args),
            // One reply is enough.
            Handling::Every(Merge::AnyOk) => false,
            Handling::Every(_) | Handling::Local(Local::RandomKey) => is_any_lost(up, &nodes.all()),
            Handling::Any | Handling::Local(Local::Subscribe | Local::Psubscribe) => !up.links().is_any_up(turn),
            Handling::OnlyNode(_) => routing.topology.only_node().is_some_and(|node| up.outages().has(node)),
            Handling::Local(Local::Publish) if !turn.shared().subscriptions.is_empty() => !up.links().is_any_up(turn),
            Handling::Local(Local::Publish | Local::Spublish | Local::Ssubscribe) => {
                args.get(1).is_some_and(|channel| up.outages().has(routing.topology.owner_of(channel)))
            }
            Handling::Local(Local::Scan) => {
                let position = args.get(1).and_then(parse::<u64>).and_then(|cursor| {
                    let now = turn.shared().scan_tick();
                    lock(&turn.shared().scans).decode(cursor, now)
                });
                position.is_some_and(|position| up.outages().has(position.node))
            }
            Handling::Local(Local::Wait) => {
                nodes.all().into_iter().any(|node| client.written().concerns(node) && up.outages().has(node))
            }
            Handling::Local(Local::Select) => {
                let database = args.get(1).and_then(parse::<u32>);
                database.is_some_and(|database| !turn.shared().has_database(&nodes.all(), database))
                    && is_any_lost(up, &nodes.all())
            }
            Handling::Local(Local::ClientTracking) => {
                args.get(2).is_some_and(|switch| switch.eq_ignore_ascii_case(b"ON")) && is_any_lost(up, &nodes.all())
            }
            Handling::Local(_) | Handling::Refused(_) => false,
        }
    }

    /// Whether a lost node has keys of a command. `is_read`: a replica may reply to it.
    fn of_keys(&self, up: &mut Upstreams, is_read: bool, command: &Command, args: &Args<'_>) -> bool {
        let topology = &self.routing.topology;
        if let Some(node) = topology.only_node() {
            return up.outages().has(node) && !(is_read && self.has_replica(up, command, args, node));
        }
        let mut places = Vec::new();
        if command.find_keys(args, &mut places).is_err() {
            // It is refused.
            return false;
        }
        let keys = places.iter().filter_map(|place| args.get(*place as usize));
        match route(topology, keys.clone()) {
            Route::Anywhere => !up.links().is_any_up(self.turn),
            Route::Owner(_, node) | Route::Together(node) => {
                up.outages().has(node) && !(is_read && self.has_replica(up, command, args, node))
            }
            Route::CrossSlot | Route::Parted(_) => {
                keys.map(|key| topology.lives_at(key)).any(|node| up.outages().has(node))
            }
        }
    }

    /// Whether a replica of a lost node replies to a read, or the client accepts no other reply.
    fn has_replica(&self, up: &mut Upstreams, command: &Command, args: &Args<'_>, node: NodeId) -> bool {
        let needs_primary =
            [Flags::SLOW, Flags::CURSOR, Flags::BLOCKING].into_iter().any(|flag| command.flags.has(flag));
        let is_large = args.get(1).is_some_and(|key| self.large_keys.suggests(command, key));
        let is_read = command.flags.has(Flags::READONLY)
            && !needs_primary
            && !is_large
            && !self.is_detour
            && may_replica_reply(self.turn, command, args);
        let Some(reads) = self.client.replica_policy().filter(|_| is_read) else { return false };
        !matches!(up.replica_for(self.turn, self.handle, reads, self.client.resp3(), node), Ok(None))
    }

    /// Whether queued commands of the client need a lost node. A transaction that is refused, or whose watched keys
    /// count as changed, needs none.
    fn of_exec(&self, up: &mut Upstreams) -> bool {
        let client = self.client;
        if client.state().is_some_and(Session::is_watching) {
            return false;
        }
        let Some(multi) = client.state::<Session>().map(|session| &session.multi).filter(|multi| !multi.aborted) else {
            return false;
        };
        if multi.commands.is_empty() {
            return false;
        }
        if multi.slot.is_none() {
            return !up.links().is_any_up(self.turn);
        }
        multi.requests().iter().any(|request| {
            with_parsed_command(self.routing, request, |command, args| self.of_keys(up, false, command, args))
                .unwrap_or(false)
        })
    }
}

fn is_any_lost(up: &Upstreams, nodes: &[NodeId]) -> bool {
    nodes.iter().any(|node| up.outages().has(*node))
}
