//! Keys at several nodes (`Topology::lives_at`), for commands and transactions that need them at one: in several slots, or
//! of one slot with placement overrides.
//!
//! A command with one key, or with keys at the same node, goes to that node without this code. Other commands wait
//! until the keys are together (`colocate`), unless `cross_slot` can collect the values. If they do not come together, the
//! command is refused, for keys of one slot with the command line that moves them back.

use std::collections::BTreeSet;
use std::sync::Arc;

use switchyard_policy::colocate::ColocationRequest;
use switchyard_policy::routing::{Route, route};
use switchyard_policy::together::rule_for;
use switchyard_policy::topology::{NodeId, Slot};
use switchyard_resp::command::{Command, Flags, errors};

use super::command::with_parsed_command;
use super::keyed::CommandHooks;
use super::scripts::rehearsed::rehearses;
use super::turn::Turn;
use crate::shared::RoutingSnapshot;

/// Returns the request that brings these keys of one slot together: all keys that are not at the slot owner.
pub(super) fn wanted_of<'k>(routing: &RoutingSnapshot, keys: impl Iterator<Item = &'k [u8]>) -> ColocationRequest {
    ColocationRequest::Keys(
        keys.filter(|key| routing.topology.placement_override(key).is_some()).map(Arc::from).collect(),
    )
}

/// Returns the slot of a key, or of the channel of SPUBLISH, which has no placement rule.
pub(super) fn slot_of_name(routing: &RoutingSnapshot, command: &Command, name: &[u8]) -> Slot {
    let placement = routing.topology.placement();
    if command.flags.has(Flags::PUBSUB) { placement.slot_of_channel(name) } else { placement.slot_of(name) }
}

/// Returns the slots of the keys of a request by this snapshot. Empty if it cannot be parsed.
pub(super) fn slots_by(routing: &Arc<RoutingSnapshot>, request: &[u8]) -> BTreeSet<Slot> {
    let slots = with_parsed_command(routing, request, |command, args| {
        let mut keys = Vec::new();
        command.find_keys(args, &mut keys).ok()?;
        let names = keys.iter().filter_map(|k| args.get(*k as usize));
        Some(names.map(|name| slot_of_name(routing, command, name)).collect())
    });
    slots.flatten().unwrap_or_default()
}

/// Returns the error for keys that are not at one node, because of several slots or a placement override.
#[cold]
pub(super) fn not_together<'k>(
    turn: &Turn,
    routing: &RoutingSnapshot,
    mut keys: impl Iterator<Item = &'k [u8]> + Clone,
) -> String {
    let slot = keys.clone().next().map(|key| routing.topology.slot_of(key));
    if !keys.clone().all(|key| Some(routing.topology.slot_of(key)) == slot) {
        return apart_text(routing, keys);
    }
    let exception = keys.find_map(|key| routing.topology.placement_override(key));
    match slot.zip(exception) {
        Some((slot, node)) => parted_text(turn, routing, slot, node),
        None => errors::CROSSSLOT.to_owned(),
    }
}

/// Returns the error for keys in several slots, with a placement rule that would keep them in one.
#[cold]
pub(super) fn apart_text<'k>(routing: &RoutingSnapshot, keys: impl Iterator<Item = &'k [u8]> + Clone) -> String {
    let topology = &routing.topology;
    // The pools of a twemproxy configuration have no rules.
    let rule = if topology.placement().continuum().is_none() {
        rule_for(topology.ruled().map(|ruled| &**ruled), keys)
    } else {
        None
    };
    match rule {
        Some(rule) => {
            format!("{}. A placement rule with {rule} would place them in one (docs/any-keys.md)", errors::CROSSSLOT)
        }
        None => errors::CROSSSLOT.to_owned(),
    }
}

/// Returns the error for a slot with a required key at `node`.
pub(super) fn parted_text(turn: &Turn, routing: &RoutingSnapshot, slot: Slot, node: NodeId) -> String {
    let (away, home) = (turn.node_name(node), turn.node_name(routing.topology.owner(slot)));
    format!(
        "CROSSSLOT Keys in request don't live at the same node: one of slot {} has a placement override to {away}. Return it first: switchyard move --from {away} --to {home} --keys KEY",
        slot.number()
    )
}

/// Returns the error for a command that may use undeclared keys of a slot with placement overrides.
#[cold]
pub(super) fn undeclared_text(turn: &Turn, routing: &RoutingSnapshot, slot: Slot) -> String {
    let owner = routing.topology.owner(slot);
    let other = routing.topology.overrides_in(slot).map(|(_, at)| at).next().unwrap_or(owner);
    let (away, home) = (turn.node_name(other), turn.node_name(owner));
    format!(
        "CROSSSLOT This command may use keys of slot {} that it does not name, and some keys of that slot have placement overrides to {away}. Return them first: switchyard move --from {away} --to {home} --keys KEY",
        slot.number()
    )
}

/// Returns the node for the commands of a transaction in this slot. `is_rehearsed`: its scripts declare their keys. `Err`:
/// their keys are not at one node.
pub(super) fn node_of_transaction(
    turn: &Turn,
    hooks: &mut CommandHooks,
    routing: &Arc<RoutingSnapshot>,
    slot: Slot,
    requests: &[Vec<u8>],
    is_rehearsed: bool,
) -> Result<NodeId, String> {
    let owner = routing.topology.owner(slot);
    if !routing.topology.has_override(slot) {
        return Ok(owner);
    }
    let mut found = None;
    for request in requests {
        let node = with_parsed_command(routing, request, |command, args| {
            let mut keys = Vec::new();
            command.find_keys(args, &mut keys).ok()?;
            let keys = keys.iter().filter_map(|k| args.get(*k as usize));
            // A channel is at the owner of its slot.
            if command.flags.has(Flags::PUBSUB) {
                return keys.clone().next().map(|_| Ok(owner));
            }
            let declares_all = is_rehearsed && rehearses(routing, command);
            if keys.clone().next().is_some() && !declares_all && hooks.uses_undeclared(turn, routing, command, args) {
                return Some(Err(undeclared_text(turn, routing, slot)));
            }
            match route(&routing.topology, keys.clone()) {
                Route::Owner(_, node) | Route::Together(node) => Some(Ok(node)),
                Route::Anywhere => None,
                Route::CrossSlot | Route::Parted(_) => Some(Err(not_together(turn, routing, keys))),
            }
        });
        if let Some(node) = node.flatten().transpose()?
            && let Some(before) = found.replace(node).filter(|before| *before != node)
        {
            return Err(parted_text(turn, routing, slot, if node == owner { before } else { node }));
        }
    }
    Ok(found.unwrap_or(owner))
}

/// Returns the request that brings the keys of a transaction in this slot together, including watched keys.
pub(super) fn wanted_by_transaction(
    turn: &Turn,
    hooks: &mut CommandHooks,
    routing: &Arc<RoutingSnapshot>,
    slot: Slot,
    requests: &[Vec<u8>],
    is_rehearsed: bool,
    watched: &[Box<[u8]>],
) -> ColocationRequest {
    let mut wanted: Vec<Arc<[u8]>> = Vec::new();
    for request in requests {
        let all = with_parsed_command(routing, request, |command, args| {
            let mut keys = Vec::new();
            if command.flags.has(Flags::PUBSUB) || command.find_keys(args, &mut keys).is_err() || keys.is_empty() {
                return false;
            }
            let declares_all = is_rehearsed && rehearses(routing, command);
            if !declares_all && hooks.uses_undeclared(turn, routing, command, args) {
                return true;
            }
            let keys = keys.iter().filter_map(|k| args.get(*k as usize));
            wanted.extend(keys.filter(|key| routing.topology.placement_override(key).is_some()).map(Arc::from));
            false
        });
        if all == Some(true) {
            return ColocationRequest::Slot(slot);
        }
    }
    wanted.extend(
        watched
            .iter()
            .map(|key| &**key)
            .filter(|key| routing.topology.placement_override(key).is_some())
            .map(Arc::from),
    );
    wanted.sort_unstable();
    wanted.dedup();
    ColocationRequest::Keys(wanted)
}

impl CommandHooks {
    /// Whether all these keys are now used at this node, considering moved keys.
    pub(super) fn are_used_at<'k>(&self, turn: &Turn, mut keys: impl Iterator<Item = &'k [u8]>, node: NodeId) -> bool {
        let topology = &self.routing_of_moved(turn).topology;
        keys.all(|key| topology.lives_at(key) == node)
    }

    /// Whether all keys of a request in this slot are used at this node.
    pub(super) fn is_used_at(&self, turn: &Turn, slot: Slot, request: &[u8], node: NodeId) -> bool {
        let routing = self.routing_of_moved(turn);
        // With ketama or rules, the keys may now be in another slot than when the request arrived.
        let is_known = routing.topology.placement().is_constant();
        if is_known && !routing.topology.has_override(slot) {
            return routing.topology.owner(slot) == node;
        }
        self.is_all_used_at(turn, request, node)
    }

    /// Whether all keys of a request are used at this node.
    pub(super) fn is_all_used_at(&self, turn: &Turn, request: &[u8], node: NodeId) -> bool {
        let all = with_parsed_command(self.routing_of_moved(turn), request, |command, args| {
            let mut keys = Vec::new();
            command.find_keys(args, &mut keys).ok()?;
            Some(self.are_used_at(turn, keys.iter().filter_map(|k| args.get(*k as usize)), node))
        });
        all.flatten().unwrap_or(false)
    }
}
