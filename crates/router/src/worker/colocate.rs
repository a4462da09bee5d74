//! Commands that need several keys at one node while some live elsewhere than their slot: they wait until the keys have
//! returned to the slot owner.
//!
//! The worker requests this ([`crate::colocate`]) once per command, and processes the command again with the next
//! topology. No state of the command is kept except that it waits, so its needs are determined at that time, and its
//! client's order is the order of its connection.
//!
//! There is no queue at the component that moves the keys, because clients that disconnect or time out would have to be
//! removed from it.

pub(super) mod state;

use std::sync::Arc;

use switchyard_policy::colocate::ColocationRequest;
use switchyard_policy::routing::{Route, route};

use super::downstreams::waits::Stall;
use super::downstreams::{Client, Downstreams};
use super::flow::Flow;
use super::overrides::{not_together, wanted_of};
use super::transit::refuse_held;
use super::turn::Turn;
use crate::colocate::ColocateRequest;
use crate::slab::Handle;
use crate::worker::invocation::Invocation;
use state::ColocateWait;

/// Whether the next command of the client waits for the return of keys.
pub(super) fn waits_for_colocation(client: &Client) -> bool {
    client.state().is_some_and(|wait: &ColocateWait| wait.number == client.replies().next_seq())
}

fn late_text(turn: &Turn, text: &str) -> String {
    format!(
        "{text}. It did not return within {:?} (moves.colocate-timeout); see switchyard moves",
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
    text: String,
) -> Result<Flow, String> {
    let limit = turn.routing().live.colocate_timeout;
    let (now_us, worker) = (turn.now_us(), turn.index());
    let Some(client) = down.get_mut(handle) else { return Ok(Flow::Close) };
    let Some(port) = turn.shared().ports.colocate.as_ref().filter(|_| !limit.is_zero()) else {
        return Err(text);
    };
    let number = client.replies().next_seq();
    if !waits_for_colocation(client) {
        turn.counters().colocate_waits.add(1);
        client.set_state(ColocateWait {
            number,
            since_us: now_us,
            is_requested: false,
            refusal: None,
            text: String::new(),
        });
    }
    let Some(wait) = client.state_mut::<ColocateWait>() else { return Err(text) };
    // In the error cases the client gets a reply, so the number no longer matches any command.
    if let Some(why) = wait.refusal.take() {
        turn.counters().colocate_refused.add(1);
        return Err(format!("{text}. It was not returned automatically: {why}"));
    }
    if now_us.saturating_sub(wait.since_us) > limit.as_micros() as u64 {
        turn.counters().colocate_refused.add(1);
        return Err(late_text(turn, &text));
    }
    if !wait.is_requested {
        wait.is_requested = true;
        port.colocate(ColocateRequest::new(
            wanted,
            command,
            limit,
            turn.shared().mailboxes.clone(),
            worker,
            (handle, number),
        ));
    }
    wait.text = text;
    Ok(Flow::Stall(Stall::Colocation))
}

/// Handles the answer to a request. The return of the keys is seen in the topology: a command that finds them apart
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

/// Handles a command that needs its keys, the arguments at `keys`, at one node: they are in several slots, or some
/// have placement overrides.
#[cold]
pub(super) fn bring_together(turn: &Turn, down: &mut Downstreams, call: &Invocation<'_>, keys: &[u32]) -> Flow {
    let Invocation { routing, handle, command, args, .. } = *call;
    let keys = keys.iter().filter_map(|k| args.get(*k as usize));
    let text = not_together(turn, routing, keys.clone());
    let waits = match route(&routing.topology, keys.clone()) {
        Route::Parted(_) => wait_for_colocation(turn, down, handle, &command.name, wanted_of(routing, keys), text),
        _ => Err(text),
    };
    waits.unwrap_or_else(|text| down.refuse(turn, handle, command.class() as u8, &text))
}
