//! Accounting of commands for limits of users, listeners, prefixes and keys.

pub(super) mod state;

use std::sync::Arc;

use switchyard_resp::command::Command;
use switchyard_resp::request::Args;

use super::downstreams::Downstreams;
use super::invocation::Invocation;
use super::keyed::CommandHooks;
use super::turn::Turn;
use crate::limits::Part;

/// Memory overhead per argument, bytes.
const ARGUMENT_OVERHEAD: usize = 16;

/// Updates the bytes held by limited clients, without replies that were read.
pub(super) fn recount(down: &mut Downstreams) {
    for handle in down.handles() {
        let Some(client) = down.get_mut(handle) else { continue };
        let (is_idle, output) = (client.in_flight() == 0, client.output_bytes());
        client.identity_mut().recount(is_idle, output);
    }
}

/// Counts a command. The error is the text for the client.
#[cold]
pub(super) fn count(
    turn: &Turn,
    down: &mut Downstreams,
    hooks: &mut CommandHooks,
    call: &Invocation<'_>,
) -> Result<(), String> {
    let Invocation { handle, command, args, .. } = *call;
    // Commands that end a state are always allowed.
    if matches!(
        &*command.name,
        "EXEC" | "DISCARD" | "UNWATCH" | "QUIT" | "RESET" | "UNSUBSCRIBE" | "PUNSUBSCRIBE" | "SUNSUBSCRIBE"
    ) {
        return Ok(());
    }
    let Some(client) = down.get_mut(handle) else { return Ok(()) };
    let request: usize = args.iter().map(|arg| arg.len() + ARGUMENT_OVERHEAD).sum();
    let (is_idle, output) = (client.in_flight() == 0, client.output_bytes());
    client.identity_mut().count(request, is_idle, output, turn.now_us())?;
    count_keys(turn, down, hooks, command, args)
}

/// Returns the end of an error for a client that must wait.
pub(super) fn try_again(ns: u64) -> String {
    format!("try again in {} ms", ns.div_ceil(1_000_000).max(1))
}

fn count_keys(
    turn: &Turn,
    down: &mut Downstreams,
    hooks: &mut CommandHooks,
    command: &Command,
    args: &Args<'_>,
) -> Result<(), String> {
    if turn.routing().live.key_limits.is_empty() {
        return Ok(());
    }
    hooks.keys.clear();
    if command.find_keys(args, &mut hooks.keys).is_err() {
        return Ok(()); // the command will fail
    }
    let (holders, now_us) = (turn.shared().counters.len(), turn.now_us());
    for (limit, part) in turn.routing().live.key_limits.iter().zip(&down.accounts.of_prefixes) {
        let mut own = hooks
            .keys
            .iter()
            .filter_map(|key| args.get(*key as usize))
            .filter(|key| key.starts_with(limit.prefix.as_bytes()))
            .peekable();
        if own.peek().is_none() {
            continue;
        }
        if let Some(per_second) = limit.requests_per_second {
            part.take(per_second, now_us).map_err(|ns| {
                format!(
                    "LIMITED keys that start with '{}' are at their limit of {per_second} requests per second; {}",
                    limit.prefix,
                    try_again(ns)
                )
            })?;
        }
        if let Some(per_second) = limit.key_requests_per_second {
            for key in own {
                down.accounts.of_keys.take(&turn.shared().limits, holders, key, per_second, now_us).map_err(|ns| {
                    format!("LIMITED this key is at its limit of {per_second} requests per second; {}", try_again(ns))
                })?;
            }
        }
    }
    Ok(())
}

/// Returns this worker's part of an account.
pub(super) fn part_of(turn: &Turn, down: &mut Downstreams, name: String) -> Arc<Part> {
    let (limits, holders) = (&turn.shared().limits, turn.shared().counters.len());
    down.accounts
        .parts
        .entry(name)
        .or_insert_with_key(|name| Arc::new(Part::new(limits.account(name), holders)))
        .clone()
}

/// Adopts changed key limits.
pub(super) fn place_prefixes_anew(turn: &Turn, down: &mut Downstreams) {
    let routing = turn.routing().clone();
    down.accounts.of_prefixes =
        routing.live.key_limits.iter().map(|limit| part_of(turn, down, format!("prefix:{}", limit.prefix))).collect();
}
