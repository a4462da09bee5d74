//! Commands that need several keys at one node while these are at several nodes: they wait until the keys are together.
//! Keys of one slot return to its owner; keys of several slots come to one of their nodes.
//!
//! The worker requests this ([`crate::colocate`]) once per command, and processes the command again with the next
//! topology. No state of the command is kept except that it waits, so its needs are determined at that time, and its
//! client's order is the order of its connection.
//!
//! There is no queue at the component that moves the keys, because clients that disconnect or time out would have to be
//! removed from it.

pub(super) mod state;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use switchyard_policy::colocate::{ColocationRequest, REQUEST_BYTES_MAX, REQUEST_KEYS_MAX};
use switchyard_policy::routing::{Route, route};
use switchyard_policy::topology::{NodeId, Slot};
use switchyard_resp::command::{Flags, errors};

use super::downstreams::waits::Stall;
use super::downstreams::{Client, Downstreams};
use super::flow::Flow;
use super::keyed::CommandHooks;
use super::overrides::{apart_text, not_together, wanted_of};
use super::reissued::state::Waiting;
use super::scripts::rehearsed::{first_dispatch_us, rehearses};
use super::transit::refuse_held;
use super::turn::Turn;
use crate::colocate::ColocateRequest;
use crate::shared::RoutingSnapshot;
use crate::slab::Handle;
use crate::worker::invocation::Invocation;
use state::ColocateWait;

/// Number of the command that is processed next: the reissued one, or a new one.
fn next_command(client: &Client) -> u32 {
    let reissued = client.state::<Waiting>().filter(|_| client.is_reissued());
    reissued.map_or_else(|| client.replies().next_seq(), Waiting::seq)
}

/// Whether the next command of the client waits for its keys.
pub(super) fn waits_for_colocation(client: &Client) -> bool {
    client.state().is_some_and(|wait: &ColocateWait| wait.number == next_command(client))
}

fn late_text(turn: &Turn, text: &str) -> String {
    format!(
        "{text}. The keys were not brought together within {:?} (moves.colocate-timeout); see switchyard moves",
        turn.routing().live.colocate_timeout
    )
}

/// Makes a command wait until its keys are at one node. Returns an error for the client if it cannot wait (any
/// longer). `text`: error with the location of the keys.
#[cold]
pub(super) fn wait_for_colocation(
    turn: &Turn,
    down: &mut Downstreams,
    handle: Handle,
    command: &str,
    wanted: ColocationRequest,
    text: impl FnOnce() -> String,
) -> Result<Flow, String> {
    let limit = turn.routing().live.colocate_timeout;
    let (now_us, worker) = (turn.now_us(), turn.index());
    let Some(client) = down.get_mut(handle) else { return Ok(Flow::Close) };
    let Some(port) = turn.shared().ports.colocate.as_ref().filter(|_| !limit.is_zero()) else {
        return Err(text());
    };
    let number = next_command(client);
    if !waits_for_colocation(client) {
        turn.counters().colocate_waits.add(1);
        client.set_state(ColocateWait {
            number,
            since_us: first_dispatch_us(client, number).unwrap_or(now_us),
            wait: Arc::default(),
            is_requested: false,
            refusal: None,
            text: String::new(),
        });
    }
    let Some(wait) = client.state_mut::<ColocateWait>() else { return Err(text()) };
    // In the error cases the client gets a reply, so the number no longer matches any command.
    if let Some(why) = wait.refusal.take() {
        turn.counters().colocate_refused.add(1);
        return Err(format!("{}. The keys were not brought together: {why}", text()));
    }
    let waited = Duration::from_micros(now_us.saturating_sub(wait.since_us));
    if waited > limit {
        turn.counters().colocate_refused.add(1);
        return Err(late_text(turn, &text()));
    }
    if !wait.is_requested {
        wait.is_requested = true;
        port.colocate(ColocateRequest::new(
            wanted,
            command,
            (waited, limit),
            &wait.wait,
            turn.shared().mailboxes.clone(),
            worker,
            (handle, number),
        ));
    }
    if wait.text.is_empty() {
        wait.text = text();
    }
    Ok(Flow::Stall(Stall::Colocation))
}

/// Ends the wait of a command that was sent or answered: its keys need not stay where they are any more.
pub(super) fn end_colocation(down: &mut Downstreams, handle: Handle) {
    if let Some(client) = down.get_mut(handle)
        && client.state::<ColocateWait>().is_some()
        && !waits_for_colocation(client)
    {
        client.take_state::<ColocateWait>();
    }
}

/// Handles the answer to a request. The arrival of the keys is seen in the topology: a command that finds them apart
/// again repeats the request, after a tick.
pub(super) fn on_colocation(
    turn: &Turn,
    down: &mut Downstreams,
    handle: Handle,
    number: u32,
    refusal: Option<Arc<str>>,
) {
    let Some(client) = down.get_mut(handle).filter(|client| waits_for_colocation(client)) else { return };
    let Some(wait) = client.state_mut::<ColocateWait>().filter(|wait| wait.number == number) else { return };
    wait.is_requested = false;
    wait.refusal = refusal;
    if wait.refusal.is_some() && client.stall() == Stall::Colocation {
        down.unstall(turn, handle);
    }
}

/// Resumes clients whose wait has timed out or whose request was answered. `all`: resumes all, after a topology
/// change.
pub(super) fn settle_colocate_waits(turn: &Turn, down: &mut Downstreams, all: bool) {
    let limit_us = turn.routing().live.colocate_timeout.as_micros() as u64;
    let is_late = |wait: &ColocateWait| turn.now_us().saturating_sub(wait.since_us) > limit_us;
    for handle in down.stalled(Stall::Colocation) {
        let wait = down.get(handle).and_then(|client| client.state::<ColocateWait>());
        if wait.is_some_and(|wait| all || !wait.is_requested || is_late(wait)) {
            down.unstall(turn, handle);
        }
    }
    // A running move of the keys holds the command by itself.
    for handle in down.stalled(Stall::Keys) {
        let Some(client) = down.get(handle).filter(|client| waits_for_colocation(client)) else {
            continue;
        };
        if let Some(wait) = client.state::<ColocateWait>().filter(|wait| is_late(wait)) {
            let text = late_text(turn, &wait.text);
            turn.counters().colocate_refused.add(1);
            refuse_held(turn, down, handle, text);
        }
    }
}

/// Handles a command that needs its keys, the arguments at `keys`, at one node: they are in several slots, or some have
/// placement overrides. `None`: they are together, with all that the command may use.
#[cold]
pub(super) fn bring_together(
    turn: &Turn,
    down: &mut Downstreams,
    hooks: &mut CommandHooks,
    call: &Invocation<'_>,
    keys: &[u32],
) -> Option<Flow> {
    let Invocation { routing, handle, command, args, .. } = *call;
    let names = keys.iter().filter_map(|k| args.get(*k as usize));
    let waits = match needed(turn, hooks, call, names.clone()) {
        Ok(None) => return None,
        Ok(Some(wanted)) => {
            wait_for_colocation(turn, down, handle, &command.name, wanted, || not_together(turn, routing, names))
        }
        Err(text) => Err(text),
    };
    Some(waits.unwrap_or_else(|text| down.refuse(turn, handle, command.class() as u8, &text)))
}

/// Returns the request that brings these keys of a command together; `None` if they are. The error is for the client.
fn needed<'k>(
    turn: &Turn,
    hooks: &mut CommandHooks,
    call: &Invocation<'_>,
    keys: impl Iterator<Item = &'k [u8]> + Clone,
) -> Result<Option<ColocationRequest>, String> {
    let Invocation { routing, command, args, .. } = *call;
    let target = route(&routing.topology, keys.clone());
    match target {
        Route::Parted(_) => return Ok(Some(wanted_of(routing, keys))),
        Route::Owner(..) | Route::Anywhere => return Ok(None),
        Route::Together(_) | Route::CrossSlot => {}
    }
    if !routing.colocates() {
        return Err(apart_text(routing, keys));
    }
    // Before any key moves: the script may be unknown, or refused whatever its keys.
    if command.flags.has(Flags::SCRIPT) {
        hooks.checked_script(turn, routing, command, args, None)?;
    }
    if !rehearses(routing, command) && hooks.needs_whole_slots(turn, routing, command, args) {
        let slots = keys.clone().map(|key| routing.topology.slot_of(key)).collect();
        return whole_slots(routing, slots).map_err(|why| format!("{}. {why}", apart_text(routing, keys)));
    }
    match target {
        Route::Together(_) => Ok(None),
        _ => wanted_of_several(routing, keys.map(Arc::from).collect(), None).map(Some),
    }
}

/// Returns the request that brings together the keys of a command that has waited for them at a node, where they are no
/// longer. The error is for the client.
pub(super) fn wanted_by_wait<'k>(
    routing: &RoutingSnapshot,
    keys: impl Iterator<Item = &'k [u8]> + Clone,
) -> Result<ColocationRequest, String> {
    match route(&routing.topology, keys.clone()) {
        Route::Parted(_) => Ok(wanted_of(routing, keys)),
        _ if routing.colocates() => wanted_of_several(routing, keys.map(Arc::from).collect(), None),
        _ => Err(format!("{}, and another node has joined since this command started to wait", errors::CROSSSLOT)),
    }
}

/// Returns the request that brings these keys of several slots together. `at`: the required node.
pub(super) fn wanted_of_several(
    routing: &RoutingSnapshot,
    keys: Vec<Arc<[u8]>>,
    at: Option<NodeId>,
) -> Result<ColocationRequest, String> {
    if keys.len() > REQUEST_KEYS_MAX {
        let text = apart_text(routing, keys.iter().map(|key| &**key));
        return Err(format!(
            "{text}. They are {} keys at several nodes, and at most {REQUEST_KEYS_MAX} are brought to one",
            keys.len()
        ));
    }
    if keys.iter().map(|key| key.len()).sum::<usize>() > REQUEST_BYTES_MAX {
        return Err(format!(
            "{}. Their names are too long: keys at several nodes with names of at most {REQUEST_BYTES_MAX} bytes are brought to one",
            apart_text(routing, keys.iter().map(|key| &**key))
        ));
    }
    Ok(ColocationRequest::Several { keys, at })
}

/// Returns the request after which one node has all keys of these slots; `None` if it has. The error is the reason why
/// that is impossible.
pub(super) fn whole_slots(
    routing: &RoutingSnapshot,
    slots: BTreeSet<Slot>,
) -> Result<Option<ColocationRequest>, &'static str> {
    let owners: BTreeSet<NodeId> = slots.iter().map(|slot| routing.topology.owner(*slot)).collect();
    if owners.len() > 1 {
        return Err("It may use keys of these slots that it does not name, and the slots have several owners");
    }
    Ok(slots.into_iter().find(|slot| routing.topology.has_override(*slot)).map(ColocationRequest::Slot))
}
