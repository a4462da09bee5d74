//! Redirects by members of a cluster: their commands are sent again, in the order of each client's commands.
//!
//! A member that redirects a command has not executed it. `MOVED` also changes the owner of its slot for all workers.
//! `ASK` changes nothing: only this command is sent to the other member, directly behind `ASKING`. After `TRYAGAIN` and
//! `CLUSTERDOWN`, and while its member is unknown or lost, a command is held and sent later, for at most
//! `storage.wait-max`.
//!
//! **Order.** A client's commands are sent again in the order of their redirects, on one connection. Nothing new of the
//! client is sent until no reply is outstanding: by the new map it could overtake a command that is still to be
//! redirected. For the same reason every client with commands in flight waits after a change of owners. `TRYAGAIN` may
//! come long before a later command of the client is executed, so it is only repeated without a later command.
//!
//! A script may return any error, so for scripts only `MOVED` and `ASK` of the slot of their keys count. Commands on
//! exclusive connections are not sent again: their clients receive `TRYAGAIN`.
//!
//! **Lost connections.** Reads, and commands that were not sent, are sent to the owner of their slot once there is one.
//! Other commands may have been executed, so their clients receive an error.

mod replica_reads;

use std::collections::{HashMap, VecDeque};

use switchyard_policy::cluster::Redirect;
use switchyard_policy::topology::{NodeId, Slot};
use switchyard_resp::command::{Command, Flags};
use switchyard_resp::request::Args;
use switchyard_resp::{encode, reply};

pub(super) use self::replica_reads::leave_silent_replicas;
use super::command::{Call, KeyedCommand, with_parsed_command};
use super::context::Context;
use super::downstreams::Downstreams;
use super::gather::{Gather, Gathers};
use super::overrides::slots_by;
use super::transactions::session::Resend;
use super::transactions::{fail_watch, push_again};
use super::turn::Turn;
use super::upstreams::pending::{Again, Pending, Purpose};
use super::upstreams::{Link, Upstreams};
use crate::lane::Lane;
use crate::slab::Handle;

/// Time between two attempts of a held command, us.
const RETRY_US: u64 = 10_000;

/// Redirects of a command that are followed at once. Members that name each other have different maps for a moment.
const REDIRECTS_MAX: u32 = 5;

/// Time for which the attempts of a command are remembered after its last attempt, us.
const KEPT_US: u64 = 1_000_000;

/// Time for which redirects of a replaced member still count, us: by them, commands in flight at a planned failover are
/// known not to be executed.
const REDIRECTS_US: u64 = 1_000_000;

/// Reason why a reply of a replaced member does not count.
pub(super) const REPLACED: &str = "was replaced by its replica";

/// Age of a command without a reply after which its member counts as silent, and the map is refreshed, us.
const SILENCE_US: u64 = 500_000;

/// Reply to a command on an exclusive connection that was redirected.
const NOT_EXECUTED: &[u8] =
    b"-TRYAGAIN the keys have moved to another member of the cluster. The command was not executed: send it again\r\n";

/// Result of the examination of an error.
#[derive(Debug)]
pub(super) enum Redirected {
    /// The client receives the error.
    No,
    /// The command was or will be sent again.
    Again,
    /// The client receives this reply.
    Reply(&'static [u8]),
}

/// A command to be sent again.
#[derive(Debug)]
pub(super) enum Content {
    Command(Vec<u8>),
    Transaction(Box<Resend>),
}

/// A redirected command.
#[derive(Debug)]
struct Redirection {
    pending: Pending,
    /// Client whose order it keeps.
    client: Handle,
    lane: Lane,
    slot: Slot,
    target: Target,
    content: Content,
}

/// Member to which a redirected command is sent.
#[derive(Clone, Copy, Debug)]
enum Target {
    /// The owner of its slot, after a pause.
    OwnerLater,
    /// The owner of its slot, as a member has just reported it.
    Owner(NodeId),
    /// The target of a migration, right after `ASKING`.
    Asked(NodeId),
}

impl Target {
    fn of(turn: &Turn, redirect: Redirect<'_>, from: NodeId) -> Self {
        let is_member = |node: &NodeId| turn.routing().topology.node(*node).is_some();
        match redirect {
            Redirect::Moved { slot, to } => {
                let owner = turn.shared().moved(slot, to, from).filter(|owner| *owner != from && is_member(owner));
                owner.map_or(Self::OwnerLater, Self::Owner)
            }
            Redirect::Ask { to, .. } => {
                turn.shared().member_at(to, from).filter(is_member).map_or(Self::OwnerLater, Self::Asked)
            }
            Redirect::TryAgain => Self::OwnerLater,
            Redirect::Down => {
                turn.shared().request_map();
                Self::OwnerLater
            }
        }
    }

    /// The target by the error of a script, which can be any text. It is a known member, and the map does not change:
    /// otherwise clients could direct the credentials of members, and commands of other clients, to any address.
    fn of_script(turn: &Turn, redirect: Redirect<'_>, from: NodeId) -> Self {
        turn.shared().request_map();
        let member = |to| {
            let node = turn.shared().known_member_at(to, from);
            node.filter(|node| *node != from && turn.routing().topology.node(*node).is_some())
        };
        match redirect {
            Redirect::Moved { to, .. } => member(to).map_or(Self::OwnerLater, Self::Owner),
            Redirect::Ask { to, .. } => member(to).map_or(Self::OwnerLater, Self::Asked),
            Redirect::TryAgain | Redirect::Down => Self::OwnerLater,
        }
    }

    fn node(self, turn: &Turn, slot: Slot) -> NodeId {
        match self {
            Self::OwnerLater => turn.routing().topology.owner(slot),
            Self::Owner(node) | Self::Asked(node) => node,
        }
    }
}

/// A redirected command that cannot be sent yet.
#[derive(Debug)]
struct Held {
    redirection: Redirection,
    not_before_us: u64,
    until_us: u64,
}

/// A held command whose time has passed.
#[derive(Debug)]
pub(super) struct Expired {
    pub(super) pending: Pending,
    pub(super) error: Vec<u8>,
}

/// Attempts to send a redirected command.
#[derive(Debug)]
struct Attempts {
    count: u32,
    until_us: u64,
}

/// Redirected commands of a worker.
#[derive(Debug, Default)]
pub(super) struct Redirects {
    held: VecDeque<Held>,
    /// Attempts by receiver and number of the reply. Entries of answered commands are removed after their time.
    attempts: HashMap<(Handle, u32), Attempts>,
    /// Members whose replicas have replaced them, with the end of the time for which their redirects count, us; 0
    /// afterwards.
    replaced: Vec<(NodeId, u64)>,
    /// Last refresh of the map because of silence, us.
    silent_at_us: u64,
}

/// Whether a command on a connection has no reply yet after a long time.
fn is_silent(turn: &Turn, link: &Link) -> bool {
    let age_us = |head: &Pending| (turn.now_us() as u32).wrapping_sub(head.sent_us);
    link.head().is_some_and(|head| u64::from(age_us(head)) > SILENCE_US)
}

/// Ignores replies of a replaced member that does not reply in time. It may be suspended, and then execute commands that
/// it received before. A member that replies in time has executed them as the owner.
///
/// While the main connection is silent, later commands on other connections count as late, too.
fn distrust_silent(turn: &Turn, up: &mut Upstreams, node: NodeId) {
    let is_of_it = |link: &Link| link.node() == node && is_silent(turn, link);
    let is_suspended = up.links().iter().any(|(_, link)| link.lane() == Lane::Main && is_of_it(link));
    for link in up.links().handles() {
        let counts_no_more =
            |link: &&mut Link| is_of_it(link) || is_suspended && link.node() == node && link.head().is_some();
        up.get_mut(link).into_iter().filter(counts_no_more).for_each(Link::distrust);
    }
}

/// Ends the connections to a member whose replies do not count.
fn end_distrusted(turn: &Turn, up: &mut Upstreams, node: NodeId) {
    for link in up.links().handles() {
        if up.get(link).is_some_and(|link| link.node() == node && link.is_distrusted()) {
            up.break_link(turn, link, REPLACED);
        }
    }
}

/// Prevents new commands of a client until no reply is outstanding.
fn hold_back(down: &mut Downstreams, client: Handle) {
    if let Some(client) = down.get_mut(client)
        && client.replies().in_flight() > 0
        && client.replies().is_on_shared_lane()
    {
        client.replies_mut().take_lane(Lane::Rounds);
    }
}

/// After a change of owners: holds back every client with commands in flight, because a redirect of one of them may
/// follow.
pub(super) fn hold_back_all(down: &mut Downstreams) {
    for handle in down.handles() {
        hold_back(down, handle);
    }
}

impl Redirects {
    /// Whether a command is held, or was redirected recently.
    pub(super) fn is_any(&self) -> bool {
        !self.held.is_empty() || !self.attempts.is_empty()
    }

    /// Whether a command is held.
    pub(super) fn holds_any(&self) -> bool {
        !self.held.is_empty()
    }

    /// Adopts the members whose replicas have replaced them. A member may have been suspended, and then reply
    /// to commands that it received before, although its replica has executed later ones.
    pub(super) fn adopt_replaced(&mut self, turn: &Turn, up: &mut Upstreams, replaced: &[NodeId]) {
        let (stay, back) = self.replaced.drain(..).partition(|(node, _)| replaced.contains(node));
        self.replaced = stay;
        for (node, _) in back {
            end_distrusted(turn, up, node);
        }
        for node in replaced {
            if self.replaced.iter().any(|(known, _)| known == node) {
                continue;
            }
            self.replaced.push((*node, turn.now_us() + REDIRECTS_US));
            distrust_silent(turn, up, *node);
        }
    }

    /// Ends the connections to replaced members whose redirects no longer count. Requests a refresh of the map if a
    /// member is silent.
    pub(super) fn tick_members(&mut self, turn: &Turn, up: &mut Upstreams) {
        let now_us = turn.now_us();
        for (node, until_us) in self.replaced.iter_mut().filter(|(_, until_us)| *until_us > 0) {
            distrust_silent(turn, up, *node);
            if now_us >= *until_us {
                *until_us = 0;
                end_distrusted(turn, up, *node);
            }
        }
        let is_old = |link: &Link| link.lane() == Lane::Main && is_silent(turn, link);
        if now_us.saturating_sub(self.silent_at_us) > SILENCE_US && up.links().iter().any(|(_, link)| is_old(link)) {
            self.silent_at_us = now_us;
            turn.shared().request_map();
        }
    }

    /// Examines an error of a member.
    #[cold]
    pub(super) fn examine(&mut self, cx: &mut Context, gathers: &Gathers, handle: Handle, answer: &[u8]) -> Redirected {
        let Some(redirect) = reply::text(answer).and_then(Redirect::of) else { return Redirected::No };
        let Some(link) = cx.up.get(handle) else { return Redirected::No };
        let Some(pending) = link.head().copied() else { return Redirected::No };
        let (from, lane) = (link.node(), link.lane());
        let request = link.requests().head_request().to_vec();
        let is_expired = link.requests().is_head_expired();
        let is_unsent = link.is_head_unsent();
        let slot = slots_by(cx.turn.routing(), &request).first().copied();
        let is_of_script = pending.again == Again::Heals;
        if is_of_script
            && !matches!(redirect, Redirect::Moved { slot: at, .. } | Redirect::Ask { slot: at, .. } if Some(at) == slot)
        {
            return Redirected::No;
        }
        // Also by the error of a queued command, or of one whose client no longer waits.
        let target = match is_of_script {
            true => Target::of_script(&cx.turn, redirect, from),
            false => Target::of(&cx.turn, redirect, from),
        };
        let (client, seq) = match pending.purpose {
            Purpose::Client | Purpose::ClientHealed => (pending.who, pending.seq),
            Purpose::Gather => match gathers.get(pending.who) {
                Some(gather) => (gather.client(), gather.seq()),
                None => return Redirected::No,
            },
            Purpose::Watch => {
                fail_watch(&mut cx.down, pending.who);
                return Redirected::Reply(b"+OK\r\n");
            }
            _ => return Redirected::No,
        };
        if lane.is_exclusive() {
            // Blocking commands are handled before.
            return if matches!(redirect, Redirect::Down) { Redirected::No } else { Redirected::Reply(NOT_EXECUTED) };
        }
        let (Some(slot), false, false) = (slot, is_expired, is_unsent) else { return Redirected::No };
        let is_last = cx.down.get(client).is_none_or(|client| client.replies().is_last(seq));
        if matches!(redirect, Redirect::TryAgain | Redirect::Down) && !is_last {
            return Redirected::No;
        }
        let Some(ended) = cx.up.get_mut(handle).and_then(Link::taken_out) else { return Redirected::No };
        cx.hooks.over(&cx.turn, ended, b"");
        let content = Content::Command(request);
        self.follow(cx, Redirection { pending, client, lane, slot, target, content });
        Redirected::Again
    }

    /// Sends a transaction again whose EXEC was refused for this reason. Returns false if it is not sent again.
    #[cold]
    pub(super) fn follow_transaction(
        &mut self,
        cx: &mut Context,
        from: NodeId,
        reason: &[u8],
        pending: Pending,
        transaction: Box<Resend>,
    ) -> bool {
        let Some(redirect) = Redirect::of(reason) else { return false };
        let is_last = cx.down.get(pending.who).is_none_or(|client| client.replies().is_last(pending.seq));
        if matches!(redirect, Redirect::TryAgain | Redirect::Down) && !is_last {
            return false;
        }
        let target = Target::of(&cx.turn, redirect, from);
        let (lane, slot) = (transaction.lane(), transaction.slot());
        let content = Content::Transaction(transaction);
        self.follow(cx, Redirection { pending, client: pending.who, lane, slot, target, content });
        true
    }

    /// Holds a command whose connection to its member was lost, until it can be sent to the owner of its slot. Returns
    /// false for a command that `may_be_executed` and that is no read.
    #[cold]
    pub(super) fn repeat(
        &mut self,
        cx: &mut Context,
        gathers: &Gathers,
        lane: Lane,
        pending: Pending,
        request: &[u8],
        may_be_executed: bool,
    ) -> bool {
        let is_read = |command: &Command, _: &Args<'_>| command.flags.has(Flags::READONLY);
        let is_repeatable =
            !may_be_executed || with_parsed_command(cx.turn.routing(), request, is_read).unwrap_or(false);
        let slot = slots_by(cx.turn.routing(), request).first().copied();
        let client = match pending.purpose {
            Purpose::Gather => gathers.get(pending.who).map(Gather::client),
            _ => Some(pending.who),
        };
        let (true, Some(slot), Some(client)) = (is_repeatable, slot, client) else { return false };
        cx.turn.shared().request_map();
        let (target, content) = (Target::OwnerLater, Content::Command(request.to_vec()));
        // The lane of replicas has no connections to owners.
        let lane = if lane == Lane::Replica { Lane::Main } else { lane };
        self.follow(cx, Redirection { pending, client, lane, slot, target, content });
        true
    }

    /// Sends a redirected command, or holds it.
    fn follow(&mut self, cx: &mut Context, redirection: Redirection) {
        hold_back(&mut cx.down, redirection.client);
        let is_behind_held = self.held.iter().any(|held| held.redirection.client == redirection.client);
        let now_us = cx.turn.now_us();
        let until_us = now_us + cx.turn.routing().live.wait_for_return(1).as_micros() as u64;
        let key = (redirection.pending.who, redirection.pending.seq);
        let attempts = self.attempts.entry(key).or_insert(Attempts { count: 0, until_us });
        attempts.count += 1;
        let until_us = attempts.until_us;
        let is_frequent = attempts.count > REDIRECTS_MAX;
        let (redirection, pause_us) = match redirection.target {
            Target::Owner(_) | Target::Asked(_) if is_behind_held => (redirection, 0),
            Target::Owner(_) | Target::Asked(_) if !is_frequent => match send(cx, redirection) {
                Ok(()) => return,
                Err(redirection) => (redirection, RETRY_US),
            },
            _ => (redirection, RETRY_US),
        };
        self.held.push_back(Held { redirection, not_before_us: now_us + pause_us, until_us });
    }

    /// Sends held commands that may be sent now, in order for each client. Returns those whose time has passed.
    pub(super) fn tick(&mut self, cx: &mut Context) -> Vec<Expired> {
        let (mut expired, mut waiting) = (Vec::new(), Vec::new());
        let now_us = cx.turn.now_us();
        self.attempts.retain(|_, attempts| now_us < attempts.until_us + KEPT_US);
        for held in std::mem::take(&mut self.held) {
            let Held { redirection, not_before_us, until_us } = held;
            let client = redirection.client;
            if cx.down.get(client).is_none() || now_us >= until_us {
                expired.push(Expired { pending: redirection.pending, error: expiry_text(&cx.turn, &redirection) });
                continue;
            }
            if waiting.contains(&client) || now_us < not_before_us {
                waiting.push(client);
                self.held.push_back(Held { redirection, not_before_us, until_us });
                continue;
            }
            let pending = Pending { sent_us: now_us as u32, ..redirection.pending };
            if let Err(redirection) = send(cx, Redirection { pending, ..redirection }) {
                waiting.push(client);
                self.held.push_back(Held { redirection, not_before_us: now_us + RETRY_US, until_us });
            }
        }
        expired
    }
}

/// Passes a command to the connection of its member. Returns it if there is none that takes commands.
fn send(cx: &mut Context, redirection: Redirection) -> Result<(), Redirection> {
    let Redirection { pending, client, lane, slot, target, .. } = redirection;
    let node = target.node(&cx.turn, slot);
    if cx.turn.routing().topology.node(node).is_none() {
        return Err(Redirection { target: Target::OwnerLater, ..redirection });
    }
    let Some((resp3, no_touch, database)) =
        cx.down.get(client).map(|client| (client.resp3(), client.no_touch(), client.database()))
    else {
        return Err(redirection);
    };
    let link = cx.up.shared_link(&cx.turn, node, lane, resp3);
    if !cx.up.takes_commands_or_tries(&cx.turn, link) {
        // The member is lost: another member may own the slot at the next attempt.
        cx.turn.shared().request_map();
        return Err(Redirection { target: Target::OwnerLater, ..redirection });
    }
    let pending = Pending { epoch: cx.turn.routing().topology.epoch() as u32, ..pending };
    cx.up.get_mut(link).into_iter().for_each(|link| link.touch_as(no_touch, pending));
    let asks = matches!(target, Target::Asked(_));
    match redirection.content {
        Content::Command(request) => {
            if asks {
                // Nothing may come between it and the command.
                cx.up.push_own(&cx.turn, link, &[b"ASKING"], Purpose::Discarded, 0);
            }
            let keyed = KeyedCommand { call: Call::Bytes(&request), node, database };
            let request = cx.hooks.pass(&cx.turn, keyed, &request, pending);
            cx.up.push(link, request);
        }
        Content::Transaction(transaction) => push_again(cx, link, database, pending, transaction, asks),
    }
    Ok(())
}

fn expiry_text(turn: &Turn, redirection: &Redirection) -> Vec<u8> {
    let node = redirection.target.node(turn, redirection.slot);
    let why = format!("no member of the cluster has served slot {} for storage.wait-max", redirection.slot.number());
    let mut error = Vec::new();
    encode::error(&mut error, &turn.down_text_or(node, &why));
    error
}
