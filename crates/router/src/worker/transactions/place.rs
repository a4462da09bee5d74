//! The node that executes a transaction: the one that has all keys of its commands, and the watched ones.
//!
//! Determined when EXEC comes, not when commands are queued: keys may move in between, and the queue is complete only
//! then.

use std::collections::BTreeSet;
use std::sync::Arc;

use switchyard_policy::colocate::ColocationRequest;
use switchyard_policy::topology::{NodeId, Slot};
use switchyard_resp::command::Flags;

use super::session::{Multi, Rehearsal, Session};
use crate::shared::RoutingSnapshot;
use crate::slab::Handle;
use crate::worker::colocate::{wanted_of_several, whole_slots};
use crate::worker::command::with_parsed_command;
use crate::worker::downstreams::Downstreams;
use crate::worker::keyed::CommandHooks;
use crate::worker::overrides::{apart_text, node_of_transaction, parted_text, slot_of_name, wanted_by_transaction};
use crate::worker::scripts::rehearsed::rehearses;
use crate::worker::turn::Turn;

/// The commands of a transaction cannot be executed by one node now.
pub(super) struct NotTogether {
    /// Error of EXEC.
    pub(super) text: String,
    /// Brings the keys together; `None` if that is impossible.
    pub(super) wanted: Option<ColocationRequest>,
}

impl NotTogether {
    fn new(text: &str, wanted: Option<ColocationRequest>) -> Self {
        Self { text: format!("EXECABORT Transaction discarded because of: {text}"), wanted }
    }
}

/// Returns the node for the queued commands of a client, whose watch is intact. `slot`: that of the first key.
pub(super) fn node_of_exec(
    turn: &Turn,
    down: &Downstreams,
    hooks: &mut CommandHooks,
    routing: &Arc<RoutingSnapshot>,
    handle: Handle,
    slot: Slot,
) -> Result<NodeId, NotTogether> {
    let owner = routing.topology.owner(slot);
    let Some(session) = down.get(handle).and_then(|client| client.state::<Session>()) else { return Ok(owner) };
    let (multi, watch) = (&session.multi, session.watch.as_ref());
    let watched_at = watch.map(|watch| watch.node);
    if multi.are_apart || watch.is_some_and(|watch| watch.are_apart) {
        let watched = watch.iter().flat_map(|watch| watch.keys.iter()).map(|key| Arc::from(&**key)).collect();
        return routing
            .topology
            .only_node()
            .map_or_else(|| node_of_several(turn, hooks, routing, multi, watched, watched_at), Ok);
    }
    if !routing.topology.has_override(slot) {
        return Ok(watched_at.unwrap_or(owner));
    }
    let (queue, is_rehearsed) = (multi.requests(), multi.rehearsal != Rehearsal::None);
    let node = match multi.slot {
        Some(_) => node_of_transaction(turn, hooks, routing, slot, &queue, is_rehearsed).map(Some),
        None => Ok(None),
    };
    let text = match (watched_at, node) {
        (Some(at), Ok(Some(node))) if at != node => {
            parted_text(turn, routing, slot, if at == owner { node } else { at })
        }
        (watched_at, Ok(node)) => return Ok(watched_at.or(node).unwrap_or(owner)),
        (_, Err(text)) => text,
    };
    let watched = watch.map(|watch| watch.keys.clone()).unwrap_or_default();
    let wanted = wanted_by_transaction(turn, hooks, routing, slot, &queue, is_rehearsed, &watched);
    Err(NotTogether::new(&text, Some(wanted)))
}

/// Requirements of a transaction with keys of several slots.
struct Requirements {
    /// Keys of its commands.
    keys: Vec<Arc<[u8]>>,
    /// Slots that must be at its node with all their keys.
    slots: BTreeSet<Slot>,
    /// The required node, because of watched keys, channels, and slots that must be whole.
    node: Option<NodeId>,
    /// Several nodes are required.
    is_impossible: bool,
}

impl Requirements {
    fn require(&mut self, node: NodeId) {
        self.is_impossible |= self.node.is_some_and(|other| other != node);
        self.node = Some(node);
    }
}

/// Returns the node for commands with keys in several slots. The watched keys are at `watched_at`, because the watch is
/// intact. By the map of the commands they may still be at the source of a leg that has committed them, so only keys of
/// commands are checked. Otherwise EXEC would wait for the end of the leg.
#[cold]
fn node_of_several(
    turn: &Turn,
    hooks: &mut CommandHooks,
    routing: &Arc<RoutingSnapshot>,
    multi: &Multi,
    watched: Vec<Arc<[u8]>>,
    watched_at: Option<NodeId>,
) -> Result<NodeId, NotTogether> {
    let topology = &routing.topology;
    let mut all = Requirements { keys: Vec::new(), slots: BTreeSet::new(), node: watched_at, is_impossible: false };
    for request in multi.requests() {
        with_parsed_command(routing, &request, |command, args| {
            let mut places = Vec::new();
            if command.find_keys(args, &mut places).is_err() {
                return;
            }
            let names = || places.iter().filter_map(|place| args.get(*place as usize));
            if command.flags.has(Flags::PUBSUB) {
                // A channel is at the owner of its slot.
                names().for_each(|channel| all.require(topology.owner(slot_of_name(routing, command, channel))));
                return;
            }
            let is_rehearsed = multi.rehearsal != Rehearsal::None && rehearses(routing, command);
            if !places.is_empty() && !is_rehearsed && hooks.needs_whole_slots(turn, routing, command, args) {
                all.slots.extend(names().map(|key| topology.slot_of(key)));
            }
            all.keys.extend(names().map(Arc::from));
        });
    }
    if let Some(slot) = all.slots.first() {
        all.require(topology.owner(*slot));
    }
    let Requirements { keys, slots, node, is_impossible } = all;
    let (keys_of_commands, mut keys) = (keys, watched);
    keys.extend(keys_of_commands.iter().cloned());
    keys.sort_unstable();
    keys.dedup();
    let text = || apart_text(routing, keys.iter().map(|key| &**key));
    let refused = |why: &str| NotTogether::new(&format!("{}. {why}", text()), None);
    if !routing.colocates() {
        return Err(NotTogether::new(&text(), None));
    }
    if let Some(wanted) = whole_slots(routing, slots).map_err(refused)? {
        return Err(NotTogether::new(&text(), Some(wanted)));
    }
    if is_impossible {
        return Err(refused("Watched keys, channels, and slots of undeclared keys are at several nodes"));
    }
    let Some(at) = node.or_else(|| keys.first().map(|key| topology.lives_at(key))) else {
        return Err(NotTogether::new(&text(), None));
    };
    if keys_of_commands.iter().all(|key| topology.lives_at(key) == at) {
        return Ok(at);
    }
    Err(match wanted_of_several(routing, keys.clone(), node) {
        Ok(wanted) => NotTogether::new(&text(), Some(wanted)),
        Err(text) => NotTogether::new(&text, None),
    })
}
