//! Keys that live elsewhere than their slots (`Topology::lives_at`): what becomes of commands that need more than one
//! key of such a slot.
//!
//! A command of one key goes where that key lives, and one whose keys live together as well: nothing here is asked.
//! What is left waits until its keys are home (`colocate`), except where `cross_slot` can bring the values together;
//! where they do not come home it is refused with the command that brings them.

use std::collections::BTreeSet;
use std::sync::Arc;

use switchyard_policy::colocate::ColocationRequest;
use switchyard_policy::routing::{Route, route};
use switchyard_policy::topology::{NodeId, Slot};
use switchyard_resp::command::{Command, Flags, errors};
use switchyard_resp::request::Args;

use super::Worker;
use super::dispatch::Flow;
use super::transit::parsed;
use crate::shared::RoutingSnapshot;
use crate::slab::Handle;

/// What is wanted so that these keys of one slot live together: those that do not live where their slot is.
pub(super) fn wanted_of<'k>(plan: &RoutingSnapshot, keys: impl Iterator<Item = &'k [u8]>) -> ColocationRequest {
    ColocationRequest::Keys(keys.filter(|key| plan.topology.exception(key).is_some()).map(Arc::from).collect())
}

/// The slots of the keys of a request by this plan: none where it cannot be read.
pub(super) fn slots_by(plan: &Arc<RoutingSnapshot>, request: &[u8]) -> BTreeSet<Slot> {
    let slots = parsed(plan, request, |command, args| {
        let mut keys = Vec::new();
        command.find_keys(args, &mut keys).ok()?;
        Some(keys.iter().filter_map(|k| args.get(*k as usize)).map(|key| plan.topology.slot_of(key)).collect())
    });
    slots.flatten().unwrap_or_default()
}

impl Worker {
    /// A command that needs its keys together, the arguments at `keys`, which are not: in several slots, or some of
    /// them live elsewhere than their slot.
    #[cold]
    pub(super) fn bring_together(
        &mut self,
        plan: &RoutingSnapshot,
        handle: Handle,
        command: &Command,
        args: &Args<'_>,
        keys: &[u32],
    ) -> Flow {
        let keys = keys.iter().filter_map(|k| args.get(*k as usize));
        let text = self.not_together(plan, keys.clone());
        let waits = match route(&plan.topology, keys.clone()) {
            Route::Parted(_) => self.wait_for_colocation(handle, &command.name, wanted_of(plan, keys), text),
            _ => Err(text),
        };
        waits.unwrap_or_else(|text| self.refuse(handle, command.class() as u8, &text))
    }

    /// The error for keys that a command needs together and that are not: in several slots, or one of them lives
    /// elsewhere than its slot.
    #[cold]
    pub(super) fn not_together<'k>(
        &self,
        plan: &RoutingSnapshot,
        mut keys: impl Iterator<Item = &'k [u8]> + Clone,
    ) -> String {
        let slot = keys.clone().next().map(|key| plan.topology.slot_of(key));
        if !keys.clone().all(|key| Some(plan.topology.slot_of(key)) == slot) {
            return errors::CROSSSLOT.to_owned();
        }
        let exception = keys.find_map(|key| plan.topology.exception(key));
        match slot.zip(exception) {
            Some((slot, node)) => self.parted_text(plan, slot, node),
            None => errors::CROSSSLOT.to_owned(),
        }
    }

    /// The same, of a slot of which a key that is needed lives at `node`.
    pub(super) fn parted_text(&self, plan: &RoutingSnapshot, slot: Slot, node: NodeId) -> String {
        let (away, home) = (self.node_name(node), self.node_name(plan.topology.owner(slot)));
        format!(
            "CROSSSLOT Keys in request don't live at the same node: one of slot {} was moved to {away} alone. Bring it home first: switchyard move --from {away} --to {home} --keys KEY",
            slot.number()
        )
    }

    /// The error for a command that may use keys of a slot that it does not name, where some of them live elsewhere.
    #[cold]
    pub(super) fn undeclared_text(&self, plan: &RoutingSnapshot, slot: Slot) -> String {
        let owner = plan.topology.owner(slot);
        let other = plan.topology.exceptions_in(slot).map(|(_, at)| at).next().unwrap_or(owner);
        let (away, home) = (self.node_name(other), self.node_name(owner));
        format!(
            "CROSSSLOT This command may use keys of slot {} that it does not name, and some keys of that slot were moved to {away} alone. Bring them home first: switchyard move --from {away} --to {home} --keys KEY",
            slot.number()
        )
    }

    /// Where the commands of a transaction in this slot are executed. `Err`: not all of their keys live at one node.
    pub(super) fn node_of_transaction(
        &mut self,
        plan: &Arc<RoutingSnapshot>,
        slot: Slot,
        requests: &[Vec<u8>],
    ) -> Result<NodeId, String> {
        let owner = plan.topology.owner(slot);
        if !plan.topology.is_exceptional(slot) {
            return Ok(owner);
        }
        let mut found = None;
        for request in requests {
            let node = parsed(plan, request, |command, args| {
                let mut keys = Vec::new();
                command.find_keys(args, &mut keys).ok()?;
                let keys = keys.iter().filter_map(|k| args.get(*k as usize));
                // A channel is where its slot is.
                if command.flags.has(Flags::PUBSUB) {
                    return keys.clone().next().map(|_| Ok(owner));
                }
                if keys.clone().next().is_some() && self.uses_undeclared(plan, command, args) {
                    return Some(Err(self.undeclared_text(plan, slot)));
                }
                match route(&plan.topology, keys.clone()) {
                    Route::Owner(_, node) | Route::Together(node) => Some(Ok(node)),
                    Route::Anywhere => None,
                    Route::CrossSlot | Route::Parted(_) => Some(Err(self.not_together(plan, keys))),
                }
            });
            if let Some(node) = node.flatten().transpose()?
                && let Some(before) = found.replace(node).filter(|before| *before != node)
            {
                return Err(self.parted_text(plan, slot, if node == owner { before } else { node }));
            }
        }
        Ok(found.unwrap_or(owner))
    }

    /// What a transaction in this slot needs to live together: of the keys that its commands name and of those that are
    /// watched.
    pub(super) fn wanted_by_transaction(
        &mut self,
        plan: &Arc<RoutingSnapshot>,
        slot: Slot,
        requests: &[Vec<u8>],
        watched: &[Box<[u8]>],
    ) -> ColocationRequest {
        let mut wanted: Vec<Arc<[u8]>> = Vec::new();
        for request in requests {
            let all = parsed(plan, request, |command, args| {
                let mut keys = Vec::new();
                if command.flags.has(Flags::PUBSUB) || command.find_keys(args, &mut keys).is_err() || keys.is_empty() {
                    return false;
                }
                if self.uses_undeclared(plan, command, args) {
                    return true;
                }
                let keys = keys.iter().filter_map(|k| args.get(*k as usize));
                wanted.extend(keys.filter(|key| plan.topology.exception(key).is_some()).map(Arc::from));
                false
            });
            if all == Some(true) {
                return ColocationRequest::Slot(slot);
            }
        }
        wanted.extend(
            watched.iter().map(|key| &**key).filter(|key| plan.topology.exception(key).is_some()).map(Arc::from),
        );
        wanted.sort_unstable();
        wanted.dedup();
        ColocationRequest::Keys(wanted)
    }

    /// Whether these keys are all used at this node now, going by what has moved.
    pub(super) fn are_used_at<'k>(&self, mut keys: impl Iterator<Item = &'k [u8]>, node: NodeId) -> bool {
        let topology = &self.plan_of_moved().topology;
        keys.all(|key| topology.lives_at(key) == node)
    }

    /// The same for the keys of a request, which are in this slot.
    pub(super) fn is_used_at(&self, slot: Slot, request: &[u8], node: NodeId) -> bool {
        let plan = self.plan_of_moved();
        // The slot may have lost these keys to another number since the request came.
        let is_known = plan.topology.placement().is_crc16();
        if is_known && !plan.topology.is_exceptional(slot) {
            return plan.topology.owner(slot) == node;
        }
        let all = parsed(plan, request, |command, args| {
            let mut keys = Vec::new();
            command.find_keys(args, &mut keys).ok()?;
            Some(self.are_used_at(keys.iter().filter_map(|k| args.get(*k as usize)), node))
        });
        all.flatten().unwrap_or(false)
    }
}
