//! Users of clients: logins, clients without a login, and effects of changed users on connected clients.

pub(super) mod state;

use std::sync::Arc;

use switchyard_resp::command::Flags;

use super::colocate::waits_for_colocation;
use super::downstreams::Downstreams;
use super::downstreams::waits::Stall;
use super::flow::{Flow, abort_transaction};
use super::invocation::Invocation;
use super::keyed::CommandHooks;
use super::quotas::part_of;
use super::transit::state::Moving;
use super::turn::Turn;
use crate::lane::Lane;
use crate::limits::ClientQuota;
use crate::lock::lock;
use crate::shared::RoutingSnapshot;
use crate::slab::Handle;
use crate::users::Attempt;
use crate::users::Denied;
use crate::users::Refused;
use crate::users::{Bounds, User};
use state::Verdict;

/// Result of a login.
pub(super) enum Login {
    As(Arc<User>),
    /// The command waits for the result.
    Wait,
    /// The error for the client.
    Refused(&'static str),
}

const WRONG: &str = "WRONGPASS invalid username-password pair or user is disabled.";
const BUSY: &str = "LIMITED too many logins are waiting; try again";

/// Handles the result of a password check.
pub(super) fn on_login(turn: &Turn, down: &mut Downstreams, handle: Handle, attempt: Attempt) {
    let Some(client) = down.get_mut(handle) else { return };
    if let Some(verdict) = client.state_mut::<Verdict>() {
        verdict.attempt = attempt;
    }
    if client.stall() == Stall::Login {
        down.unstall(turn, handle);
    }
}

/// Sets the user of a client (without a login: the default user). Fails, without a change, if the user has reached
/// its connection limit.
pub(super) fn become_user(
    turn: &Turn,
    down: &mut Downstreams,
    handle: Handle,
    user: Arc<User>,
    authenticated: bool,
) -> Result<(), String> {
    let Some(client) = down.get_mut(handle) else { return Ok(()) };
    let bounds = user.bounds();
    if !authenticated || *bounds == Bounds::default() {
        client.identity_mut().set_share(None);
    } else if client.identity().needs_share(&user) {
        let part = part_of(turn, down, format!("user:{}", user.name()));
        let Some(share) = ClientQuota::connect(part, bounds.connections) else {
            turn.counters().limited.add(1);
            let max = bounds.connections.unwrap_or_default();
            return Err(format!(
                "LIMITED user {} is at its limit of {max} connections; close one, or try again later",
                user.name()
            ));
        };
        if let Some(client) = down.get_mut(handle) {
            client.identity_mut().set_share(Some(Box::new(share)));
        }
    }
    if let Some(client) = down.get_mut(handle) {
        let live = &turn.routing().live;
        let counts_keys = !live.key_limits.is_empty();
        client.identity_mut().become_user(user, authenticated, counts_keys, live.reads, turn.now_us());
    }
    Ok(())
}

/// Checks whether `password` belongs to `name`. A client that must wait repeats the call with the same arguments
/// when the result is known.
pub(super) fn login(
    turn: &Turn,
    down: &mut Downstreams,
    routing: &RoutingSnapshot,
    handle: Handle,
    name: &[u8],
    password: &[u8],
) -> Login {
    let Some(client) = down.get_mut(handle) else { return Login::Wait };
    let user = routing.live.users.get(name);
    let from = client.identity().peer().map(|peer| peer.ip());
    let attempt = match client.state().filter(|v: &&Verdict| v.is_for(name, password)).map(|verdict| verdict.attempt) {
        Some(attempt) => {
            client.take_state::<Verdict>();
            attempt
        }
        None => turn.shared().logins.attempt(user, password, from, (turn.index(), handle)),
    };
    match (attempt, user) {
        // The user may have been removed during the check.
        (Attempt::Right, Some(user)) if user.is_on() => Login::As(user.clone()),
        (Attempt::Right | Attempt::Wrong, _) => {
            note_refused(turn, down, handle, "auth", b"AUTH".to_vec(), name);
            login_failed(turn, down, handle, user.map(|user| user.name()));
            Login::Refused(WRONG)
        }
        (Attempt::Busy, _) => Login::Refused(BUSY),
        (Attempt::Queued, _) => {
            if let Some(client) = down.get_mut(handle) {
                let (name, password) = (name.to_vec(), password.to_vec());
                client.set_state(Verdict { name, password, attempt: Attempt::Queued });
            }
            Login::Wait
        }
    }
}

/// Counts and logs a failed login. An unknown name may be a misplaced password, so it is not logged.
fn login_failed(turn: &Turn, down: &mut Downstreams, handle: Handle, user: Option<&str>) {
    turn.counters().logins_failed.add(1);
    let from = down.get(handle).map_or_else(String::new, |c| c.identity().origin());
    if let Some(suppressed) = down.login_log.allow(turn.now_us()) {
        tracing::warn!(target: "audit", from, user = user.unwrap_or("(no such user)"), suppressed = suppressed.count(), "a login failed");
    }
}

/// Checks a command of a restricted or limited client. `Some`: it was refused or must wait.
#[cold]
pub(super) fn guarded(
    turn: &Turn,
    down: &mut Downstreams,
    hooks: &mut CommandHooks,
    call: &Invocation<'_>,
) -> Option<Flow> {
    let Invocation { handle, command, args, .. } = *call;
    let client = down.get(handle)?;
    let class = command.class() as u8;
    if client.identity().is_stranger() {
        if command.flags.has(Flags::NO_AUTH) {
            return None;
        }
        abort_transaction(down, handle);
        return Some(down.refuse(turn, handle, class, "NOAUTH Authentication required."));
    }
    if client.identity().is_restricted() {
        hooks.keys.clear();
        let verdict = client.identity().user().check(command, args, &mut hooks.keys);
        if let Err(denied) = verdict {
            turn.counters().denied.add(1);
            note_denied(turn, down, call, denied);
            abort_transaction(down, handle);
            return Some(down.refuse(turn, handle, class, &denied.text(command)));
        }
    }
    let client = down.get_mut(handle)?;
    // A command that has waited for its keys, or for a copy, was already counted.
    let is_counted =
        client.waits_mut().take_counted() || client.state::<Moving>().is_some() || waits_for_colocation(client);
    if client.identity().is_counted()
        && !is_counted
        && let Err(text) = super::quotas::count(turn, down, hooks, call)
    {
        turn.counters().limited.add(1);
        abort_transaction(down, handle);
        return Some(down.refuse(turn, handle, class, &text));
    }
    None
}

/// Whether an incomplete command may be streamed. `args`: the arguments before a large one.
pub(super) fn may_begin(down: &mut Downstreams, hooks: &mut CommandHooks, call: &Invocation<'_>) -> bool {
    let Invocation { handle, command, args, .. } = *call;
    let Some(client) = down.get(handle) else { return false };
    if !client.identity().is_guarded() {
        return true;
    }
    let who = client.identity();
    hooks.keys.clear();
    // Checked again when the command is complete, which also returns the error.
    !who.is_stranger()
        && !who.is_counted()
        && (!who.is_restricted() || who.user().check(command, args, &mut hooks.keys).is_ok())
}

/// Applies changed users: rules take effect at once, and clients that could not log in again are closed.
pub(super) fn readmit_clients(turn: &Turn, down: &mut Downstreams) {
    let users = turn.routing().live.users.clone();
    let mut gone = Vec::new();
    for handle in down.handles() {
        let Some(client) = down.get_mut(handle) else { continue };
        let (authenticated, same) = (
            client.identity().is_authenticated(),
            users.get(client.identity().user().name().as_bytes()) == Some(client.identity().user()),
        );
        let stays = match users.get(client.identity().user().name().as_bytes()) {
            // Clients without a login use the current default user.
            Some(user) if !authenticated => become_user(turn, down, handle, user.clone(), user.is_open()).is_ok(),
            Some(user) if same || user.may_stay(client.identity().user()) => {
                if !same {
                    // Queued commands of a transaction were checked by the old rules.
                    abort_transaction(down, handle);
                }
                become_user(turn, down, handle, user.clone(), true).is_ok()
            }
            _ => false,
        };
        if !stays {
            gone.push(handle);
        }
    }
    for handle in gone {
        // A client that has removed its own user still gets its reply.
        if awaits_users(down, handle) { down.close_after_replies(handle) } else { down.close_client(turn, handle) }
    }
}

/// Whether a change of users by this client is pending.
pub(super) fn awaits_users(down: &Downstreams, handle: Handle) -> bool {
    down.get(handle).is_some_and(|client| client.replies().are_under_way_on(Lane::Rounds))
}

/// Adds a refused command to the log.
pub(super) fn note_denied(turn: &Turn, down: &Downstreams, call: &Invocation<'_>, denied: Denied) {
    let Invocation { handle, command, args, .. } = *call;
    let Some(client) = down.get(handle) else { return };
    let (reason, object) = match denied {
        Denied::Key(index) => ("key", args.get(index).unwrap_or_default().to_vec()),
        Denied::Channel(index) => ("channel", args.get(index).unwrap_or_default().to_vec()),
        _ => ("command", command.name.to_ascii_lowercase().into_bytes()),
    };
    note_refused(turn, down, handle, reason, object, client.identity().user().name().as_bytes());
}

pub(super) fn note_refused(
    turn: &Turn,
    down: &Downstreams,
    handle: Handle,
    reason: &'static str,
    object: Vec<u8>,
    user: &[u8],
) {
    let Some(client) = down.get(handle) else { return };
    let context = if client.in_multi() { "multi" } else { "toplevel" };
    let client = client.describe(turn.now_us(), "acl", false);
    lock(&turn.shared().acl_log).note(Refused { reason, context, object, user: user.to_vec(), client });
}
