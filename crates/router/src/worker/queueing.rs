//! Between MULTI and EXEC: each command is checked and queued, for EXEC to send ([`super::transactions`]). Keys may be in
//! several slots, unless the configuration refuses that: EXEC brings them together.
//!
//! Separate from EXEC, because nothing here reaches a node.

use switchyard_policy::routing::Route;
use switchyard_policy::together::GROUP_KEYS_MAX;
use switchyard_policy::topology::Slot;
use switchyard_resp::command::{Command, Flags, Handling, KeyError, Local, errors};

use super::Worker;
use super::command::{parse, with_parsed_command};
use super::downstreams::Downstreams;
use super::flow::{Flow, abort_transaction};
use super::invocation::Invocation;
use super::keyed::{CommandHooks, find_routed_keys};
use super::multi_local::answered;
use super::multi_local::state::{QueuedScan, When};
use super::overrides::{apart_text, slot_of_name};
use super::pubsub::Kind;
use super::scan::queued_scan;
use super::scripts::rehearsed::rehearses;
use super::transactions::discard;
use super::transactions::session::{Published, Rehearsal, Session};
use super::turn::Turn;
use crate::settings::other_database;
use crate::shared::RoutingSnapshot;
use crate::single_node_usage::Limit;
use crate::slab::Handle;

const QUEUED: &[u8] = b"+QUEUED\r\n";

/// Maximum bytes of commands queued by one client, like one request.
const QUEUE_MAX: usize = 1 << 30;

/// Action for a command between MULTI and EXEC.
enum Queueing {
    /// Queued; its keys are in this slot, if it has any.
    Queue(Option<Slot>),
    /// Queued; its keys, the first one in this slot, and the earlier ones are in several slots.
    Several(Slot),
    /// Queued, for as long as there is one node.
    Alone(Limit),
    /// A queued SELECT.
    Select(u32),
    /// A queued SCAN, executed by the only node.
    Scan(Vec<u8>, QueuedScan),
    /// The router answers it.
    Own(When),
    Refuse(String),
}

impl Worker {
    /// Handles a command of a client between MULTI and EXEC.
    #[cold]
    pub(super) fn in_multi(&mut self, call: &Invocation<'_>) -> Flow {
        let Invocation { routing, handle, command, raw, args, .. } = *call;
        let class = command.class() as u8;
        match command.handling {
            Handling::Local(Local::Exec) => return self.exec(routing, handle, class),
            Handling::Local(Local::Discard) => {
                discard(&mut self.cx.down, handle);
                self.cx.down.answer(&self.cx.turn, handle, class, b"+OK\r\n");
                return Flow::Next;
            }
            Handling::Local(local @ (Local::Quit | Local::Reset)) => {
                return self.local(call, local);
            }
            Handling::Local(Local::Multi) => {
                return self.cx.down.refuse(&self.cx.turn, handle, class, "ERR MULTI calls can not be nested");
            }
            Handling::Local(Local::Watch) => {
                return self.cx.down.refuse(&self.cx.turn, handle, class, "ERR WATCH inside MULTI is not allowed");
            }
            _ => {}
        }
        let mut scan = None;
        let mut are_apart = false;
        let (slot, select, alone) = match queueing(&self.cx.turn, &mut self.cx.down, &mut self.cx.hooks, call) {
            Queueing::Queue(slot) => (slot, None, None),
            Queueing::Several(slot) => {
                are_apart = true;
                (Some(slot), None, None)
            }
            Queueing::Alone(limit) => (None, None, Some(limit)),
            Queueing::Select(database) => (None, Some(database), None),
            Queueing::Scan(request, queued) => {
                scan = Some((request, queued));
                (None, None, Some(Limit::EveryNode))
            }
            Queueing::Own(when) => {
                if let Some(multi) = self
                    .cx
                    .down
                    .get_mut(handle)
                    .map(|client| &mut client.state_or_default::<Session>().multi)
                    .filter(|multi| !multi.aborted)
                {
                    multi.own.queue(multi.commands.len() + multi.own.count(), when, raw);
                }
                self.cx.down.answer(&self.cx.turn, handle, class, QUEUED);
                return Flow::Next;
            }
            Queueing::Refuse(text) => {
                abort_transaction(&mut self.cx.down, handle);
                return self.cx.down.refuse(&self.cx.turn, handle, class, &text);
            }
        };
        // Code with checks differs for the node.
        let checked = match self.cx.hooks.checked_code(&self.cx.turn, routing, command, args) {
            Ok(checked) => checked,
            Err(text) => {
                abort_transaction(&mut self.cx.down, handle);
                return self.cx.down.refuse(&self.cx.turn, handle, class, &text);
            }
        };
        let is_trusted =
            command.flags.has(Flags::SCRIPT) && self.cx.hooks.is_trusted(&self.cx.turn, routing, command, args);
        let code = if command.flags.has(Flags::SCRIPT) {
            self.cx.hooks.limit_of_code(&self.cx.turn, routing, command, args)
        } else {
            None
        };
        let sha = self.cx.hooks.sha_sent(&self.cx.turn, routing, command, args);
        let (request, scan) = scan.unzip();
        let raw = request.as_deref().or(checked.as_deref()).unwrap_or(raw);
        let is_known = select
            .is_none_or(|database| self.cx.turn.shared().has_database(&self.cx.turn.data_nodes().all(), database));
        let Some(client) = self.cx.down.get_mut(handle) else { return Flow::Close };
        let multi = &mut client.state_or_default::<Session>().multi;
        if !multi.aborted {
            multi.slot = multi.slot.or(slot);
            multi.are_apart |= are_apart;
            multi.selects.extend(select);
            multi.has_select |= select.is_some();
            if let Some(database) = select.filter(|_| !is_known) {
                multi.own.require_database(database);
            }
            if let Some(scan) = scan {
                multi.own.queue_scan(multi.commands.len(), scan);
            }
            multi.slow |= command.flags.has(Flags::SLOW);
            multi.writes |= !command.flags.has(Flags::READONLY);
            multi.alone = multi.alone.or(alone).or(code);
            if rehearses(routing, command) && checked.is_some() {
                multi.checked_calls.push(multi.commands.len());
                if !is_trusted {
                    multi.rehearsal = Rehearsal::Due(0);
                } else if multi.rehearsal == Rehearsal::None {
                    multi.rehearsal = Rehearsal::Trusted;
                }
            }
            let is_code = command.flags.has(Flags::SCRIPT) && routing.checks_scripts();
            multi.has_checks_by_placement |= is_code || command.sorts_by_whole_name(args).is_some();
            let kind = match command.handling {
                Handling::Local(Local::Publish) => Some(Kind::Channel),
                Handling::Local(Local::Spublish) => Some(Kind::Shard),
                _ => None,
            };
            let channel = args.get(1).unwrap_or_default().into();
            multi.published.extend(kind.map(|kind| Published { place: multi.commands.len(), kind, channel }));
            multi.queue.extend_from_slice(raw);
            multi.commands.push((raw.len() as u32, class));
            if let Some(sha) = sha
                && !multi.scripts.contains(&sha)
            {
                multi.scripts.push(sha);
            }
        }
        self.cx.down.answer(&self.cx.turn, handle, class, QUEUED);
        Flow::Next
    }
}

fn queueing(turn: &Turn, down: &mut Downstreams, hooks: &mut CommandHooks, call: &Invocation<'_>) -> Queueing {
    let Invocation { routing, handle, command, args, .. } = *call;
    let name = command.name.replace('|', " ");
    let Some(session) = down.get(handle).and_then(|c| c.state::<Session>()) else {
        return Queueing::Queue(None);
    };
    let known = session.multi.slot.or(session.watch.as_ref().map(|w| w.slot));
    let is_only = routing.topology.only_node().is_some();
    if session.multi.bytes() > QUEUE_MAX {
        return Queueing::Refuse(format!(
            "ERR Switchyard queues at most {QUEUE_MAX} bytes of commands in a transaction"
        ));
    }
    if matches!(&*command.name, "PSYNC" | "SAVE" | "SHUTDOWN" | "SYNC") {
        return Queueing::Refuse("ERR Command not allowed inside a transaction".into());
    }
    match command.handling {
        Handling::Keyed | Handling::Split(_) | Handling::Local(Local::Spublish) => {
            let mut keys = std::mem::take(&mut hooks.keys);
            keys.clear();
            let found = find_routed_keys(routing.topology.placement(), command, args, &mut keys);
            let own = || keys.iter().filter_map(|k| args.get(*k as usize));
            let target = match own().next().filter(|_| command.flags.has(Flags::PUBSUB)) {
                Some(channel) => {
                    let slot = slot_of_name(routing, command, channel);
                    Route::Owner(slot, routing.topology.owner(slot))
                }
                None => routing.route(own()),
            };
            let is_of_known = match target {
                Route::Owner(slot, _) | Route::Parted(slot) => known.is_none_or(|known| known == slot),
                Route::Together(_) | Route::CrossSlot => false,
                Route::Anywhere => true,
            };
            let first = own().next().filter(|_| !is_of_known).map(|name| slot_of_name(routing, command, name));
            let mut refusal = None;
            let may_be_apart = is_only || routing.colocates();
            if found.is_ok() && !is_of_known && (hooks.groups.has_room() || !may_be_apart) {
                let queued = keys_of_transaction(routing, session);
                let all = queued.iter().map(|key| &key[..]).chain(own());
                hooks.groups.note(all.clone());
                // Channels have no rules.
                let has_rules = !matches!(command.handling, Handling::Local(_));
                refusal = (has_rules && !may_be_apart).then(|| apart_text(routing, all));
            }
            hooks.keys = keys;
            match (found, target) {
                // The node returns the error at EXEC.
                (
                    Err(
                        KeyError::Arity
                        | KeyError::NumkeysNotInteger(_)
                        | KeyError::NumkeysTooSmall(_)
                        | KeyError::NumkeysTooLarge(_)
                        | KeyError::Syntax
                        | KeyError::UnbalancedStreams,
                    ),
                    _,
                )
                | (Ok(()), Route::Anywhere) => Queueing::Queue(None),
                (Err(error), _) if error.is_unknown_position() && is_only => Queueing::Alone(Limit::Unnamed),
                (Err(error), _) => Queueing::Refuse(error.text(command)),
                // Their location is checked at EXEC.
                (Ok(()), Route::Owner(slot, _) | Route::Parted(slot)) if known.is_none_or(|k| k == slot) => {
                    Queueing::Queue(Some(slot))
                }
                (Ok(()), _) if routing.colocates() => first.map_or(Queueing::Queue(None), Queueing::Several),
                (Ok(()), Route::Owner(..) | Route::Together(_)) if is_only => Queueing::Alone(Limit::Slots),
                (Ok(()), Route::Owner(..) | Route::Together(_) | Route::Parted(_) | Route::CrossSlot) => {
                    Queueing::Refuse(refusal.unwrap_or_else(|| errors::CROSSSLOT.into()))
                }
            }
        }
        // Executed at the node of the transaction; subscriptions are at every node. A shard channel must belong
        // there.
        Handling::Local(Local::Publish) => Queueing::Queue(None),
        // The node's reply would contain the checks that Switchyard has added to libraries.
        Handling::Any
            if &*command.name == "FUNCTION|LIST"
                && routing.checks_scripts()
                && args.iter().any(|arg| arg.eq_ignore_ascii_case(b"WITHCODE")) =>
        {
            Queueing::Refuse(
                "ERR Switchyard does not serve FUNCTION LIST WITHCODE inside MULTI. Call it outside".into(),
            )
        }
        Handling::Any | Handling::Local(Local::Ping | Local::Echo | Local::Time | Local::Unwatch) => {
            Queueing::Queue(None)
        }
        Handling::Every(_) | Handling::OnlyNode(_) if is_only => Queueing::Alone(Limit::EveryNode),
        Handling::Every(_) => Queueing::Refuse(format!(
            "ERR Switchyard does not serve {name} inside MULTI: it concerns every node, and a transaction is executed by one. Call it outside"
        )),
        Handling::Local(Local::Select) => match args.get(1).and_then(parse::<u32>) {
            // Out of range: the node returns the error at EXEC.
            None => Queueing::Queue(None),
            Some(database) => match other_database(&routing.live, database) {
                Some(why) => Queueing::Refuse(why),
                None => Queueing::Select(database),
            },
        },
        Handling::Local(Local::RandomKey) if is_only => Queueing::Alone(Limit::EveryNode),
        Handling::Local(Local::Scan) if let Some(node) = routing.topology.only_node() => {
            match queued_scan(turn, args, node) {
                Some((request, scan)) => Queueing::Scan(request, scan),
                // The router reports an error, or the end of the scan.
                None => Queueing::Own(When::Before),
            }
        }
        Handling::Local(local) if let Some(when) = answered(local) => Queueing::Own(when),
        Handling::Local(_) => Queueing::Refuse(format!(
            "ERR Switchyard does not serve {name} inside MULTI: Switchyard executes it, and the node executes the transaction. Call it outside"
        )),
        Handling::OnlyNode(_) | Handling::Refused(_) => {
            Queueing::Refuse(errors::not_served(command).unwrap_or_default())
        }
    }
}

/// Returns the watched keys and the keys of the queued commands.
#[cold]
fn keys_of_transaction(routing: &RoutingSnapshot, session: &Session) -> Vec<Box<[u8]>> {
    let mut all: Vec<Box<[u8]>> = session.watch.iter().flat_map(|watch| watch.keys.iter().cloned()).collect();
    for request in session.multi.requests().into_iter().take(GROUP_KEYS_MAX) {
        with_parsed_command(routing, &request, |command, args| {
            let mut keys = Vec::new();
            if command.find_keys(args, &mut keys).is_ok() {
                all.extend(keys.iter().filter_map(|k| args.get(*k as usize)).map(Box::from));
            }
        });
    }
    all
}

/// Refuses a command with a wrong number of arguments. EXEC with arguments ends the transaction.
#[cold]
pub(super) fn wrong_arity(turn: &Turn, down: &mut Downstreams, handle: Handle, command: &Command) -> Flow {
    let class = command.class() as u8;
    let text = errors::arity(command);
    if command.handling == Handling::Local(Local::Exec) {
        discard(down, handle);
        let why = text.strip_prefix("ERR ").unwrap_or(&text);
        return down.refuse(turn, handle, class, &format!("EXECABORT Transaction discarded because of: {why}"));
    }
    abort_transaction(down, handle);
    down.refuse(turn, handle, class, &text)
}
