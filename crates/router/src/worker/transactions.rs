//! MULTI, EXEC, DISCARD, WATCH, UNWATCH.
//!
//! **The router queues.** Between MULTI and EXEC a command is checked (it exists, its arity, its keys share one slot with those before it)
//! and kept; EXEC sends MULTI, the commands and EXEC to the node in one piece. So a transaction needs no connection of its own: on a shared
//! connection nothing comes between its commands, and a client that goes away between MULTI and EXEC leaves nothing at a node. What only
//! the node can refuse (its own access rules, no memory) it refuses when it queues, and so EXEC fails with EXECABORT, as in Redis; the
//! error names that reason, because the client has not seen it.
//!
//! **WATCH takes a connection**, because the node keeps watches by connection. It is held until EXEC, DISCARD or UNWATCH. If it is lost, or
//! a key lives elsewhere by then, EXEC answers nil: the transaction did not happen, and the client tries again. It never succeeds
//! without the watch.
//!
//! Not a connection from MULTI on with each command sent at once: it would cost a round trip for each command and a connection for each
//! client in the middle of a transaction.

use std::collections::VecDeque;
use std::sync::Arc;

use switchyard_policy::routing::{Route, route};
use switchyard_policy::topology::{NodeId, Slot, slot_of};
use switchyard_resp::command::{Command, Flags, Handling, KeyError, Local, errors};
use switchyard_resp::request::Args;
use switchyard_resp::{encode, reply};

use super::dispatch::Flow;
use super::downstream::Client;
use super::exceptions::wanted_of;
use super::keyed::{Call, EndNumber, Keyed, Request};
use super::kind::Task;
use super::local::parse;
use super::pool::Acquired;
use super::pubsub::Kind;
use super::upstream::{Lane, Link, MULTI, Pending, Phase, Purpose, UNSENT_HIGH};
use super::wait::Wait;
use super::{Stall, Worker};
use crate::one_node::Limit;
use crate::shared::{Plan, lock};
use crate::slab::Handle;

const QUEUED: &[u8] = b"+QUEUED\r\n";
const ABORTED: &str = "EXECABORT Transaction discarded because of previous errors.";

/// Bytes of commands queued by one client; as much as one request may have.
const QUEUE_MAX: usize = 1 << 30;

/// Queues larger than this are not kept for the next transaction.
const KEPT_MAX: usize = 16 << 10;

/// Somebody who waits for a connection gets that of a client whose WATCH is older than this and has been quiet since.
const RECALL_US: u64 = 60_000_000;

/// What a client has besides single commands. Apart from the client, because most have none of it.
#[derive(Debug, Default)]
pub(super) struct Session {
    pub(super) multi: Multi,
    /// Transactions under way that publish: numbers of their EXEC.
    published: VecDeque<(u32, Vec<Published>)>,
    pub(super) watch: Option<Watch>,
    /// A WATCH has failed: EXEC answers nil.
    watch_failed: bool,
    /// The database that the transaction under way selects.
    select: Option<u32>,
    pub(super) wait: Option<Wait>,
}

/// A PUBLISH or SPUBLISH in a transaction: the node's count is made ours when EXEC is answered.
#[derive(Debug)]
struct Published {
    /// Its place among the commands.
    place: usize,
    kind: Kind,
    channel: Box<[u8]>,
}

/// The commands since MULTI.
#[derive(Debug, Default)]
pub(super) struct Multi {
    /// Requests, one after the other.
    queue: Vec<u8>,
    /// Length and class of each.
    commands: Vec<(u32, u8)>,
    /// Where their keys are.
    slot: Option<Slot>,
    slow: bool,
    writes: bool,
    /// A command is executed only while there is one node, because of this limit.
    alone: Option<Limit>,
    /// A command was refused: EXEC will be, too.
    aborted: bool,
    /// The database after the last SELECT.
    select: Option<u32>,
    /// Scripts called by their SHA-1.
    scripts: Vec<[u8; 40]>,
    published: Vec<Published>,
}

impl Multi {
    pub(super) fn count(&self) -> usize {
        self.commands.len()
    }

    pub(super) fn bytes(&self) -> usize {
        self.queue.len()
    }

    /// Bytes that they take.
    pub(super) fn memory(&self) -> usize {
        let published: usize = self.published.iter().map(|p| size_of::<Published>() + p.channel.len()).sum();
        self.queue.capacity() + self.commands.capacity() * size_of::<(u32, u8)>() + self.scripts.capacity() * 40 + published
    }

    /// The commands, one by one.
    pub(super) fn requests(&self) -> Vec<Vec<u8>> {
        let mut at = 0;
        let request = |(len, _): &(u32, u8)| {
            let from = at;
            at += *len as usize;
            self.queue[from..at].to_vec()
        };
        self.commands.iter().map(request).collect()
    }

    fn clear(&mut self) {
        let mut queue = std::mem::take(&mut self.queue);
        let mut commands = std::mem::take(&mut self.commands);
        queue.clear();
        commands.clear();
        *self = Self::default();
        if queue.capacity() <= KEPT_MAX && commands.capacity() <= KEPT_MAX / 8 {
            self.queue = queue;
            self.commands = commands;
        }
    }
}

impl Session {
    /// What the transaction publishes whose EXEC has this number. Of those before it none will be answered any more.
    fn take_published(&mut self, seq: u32) -> Option<Vec<Published>> {
        let place = self.published.iter().position(|(exec, _)| *exec == seq)?;
        self.published.drain(..=place).next_back().map(|(_, published)| published)
    }
}

/// What a client watches.
#[derive(Debug)]
pub(super) struct Watch {
    /// That of the first.
    slot: Slot,
    /// They are in several slots: they are watched only while there is one node.
    are_apart: bool,
    node: NodeId,
    /// What is watched: a key may move to another node without its slot.
    keys: Vec<Box<[u8]>>,
    /// The connection that the node watches for.
    pub(super) link: Handle,
}

impl Client {
    fn session(&mut self) -> &mut Session {
        self.session.get_or_insert_default()
    }

    /// Between WATCH and EXEC.
    pub(super) fn watches(&self) -> bool {
        self.session.as_ref().is_some_and(|s| s.watch.is_some())
    }

    /// EXEC is answered: `executed` where the node did what was queued.
    pub(super) fn after_exec(&mut self, executed: bool) {
        if let Some(database) = self.session.as_mut().and_then(|s| s.select.take())
            && executed
        {
            self.database = database;
        }
    }
}

/// What is done with a command between MULTI and EXEC.
enum Queueing {
    /// Queued; its keys are in this slot, if it has any.
    Queue(Option<Slot>),
    /// The same, for as long as there is one node.
    Alone(Limit),
    /// The same, for a SELECT.
    Select(u32),
    Refuse(String),
}

impl Worker {
    /// A command of a client that is between MULTI and EXEC.
    #[cold]
    pub(super) fn in_multi(&mut self, plan: &Arc<Plan>, handle: Handle, command: &Command, raw: &[u8], args: &Args<'_>) -> Flow {
        let class = command.class() as u8;
        match command.handling {
            Handling::Local(Local::Exec) => return self.exec(plan, handle, class),
            Handling::Local(Local::Discard) => {
                self.discard(handle);
                self.answer(handle, class, b"+OK\r\n");
                return Flow::Next;
            }
            Handling::Local(local @ (Local::Quit | Local::Reset)) => return self.local(plan, handle, command, local, raw, args),
            Handling::Local(Local::Multi) => return self.refuse(handle, class, "ERR MULTI calls can not be nested"),
            Handling::Local(Local::Watch) => return self.refuse(handle, class, "ERR WATCH inside MULTI is not allowed"),
            _ => {}
        }
        let (slot, select, alone) = match self.queueing(plan, handle, command, args) {
            Queueing::Queue(slot) => (slot, None, None),
            Queueing::Alone(limit) => (None, None, Some(limit)),
            Queueing::Select(database) => (None, Some(database), None),
            Queueing::Refuse(text) => {
                self.spoil(handle);
                return self.refuse(handle, class, &text);
            }
        };
        // Code that is checked while it runs is other code for the node.
        let checked = match self.checked_code(plan, command, args) {
            Ok(checked) => checked,
            Err(text) => {
                self.spoil(handle);
                return self.refuse(handle, class, &text);
            }
        };
        let code = if command.flags.has(Flags::SCRIPT) { self.limit_of_code(plan, command, args) } else { None };
        let sha = self.sha_sent(plan, command, args);
        let raw = checked.as_deref().unwrap_or(raw);
        let Some(client) = self.clients.get_mut(handle) else { return Flow::Close };
        let multi = &mut client.session().multi;
        if !multi.aborted {
            multi.slot = multi.slot.or(slot);
            multi.select = select.or(multi.select);
            multi.slow |= command.flags.has(Flags::SLOW);
            multi.writes |= !command.flags.has(Flags::READONLY);
            multi.alone = multi.alone.or(alone).or(code);
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
        self.answer(handle, class, QUEUED);
        Flow::Next
    }

    /// A command was refused between MULTI and EXEC.
    pub(super) fn spoil(&mut self, handle: Handle) {
        if let Some(client) = self.clients.get_mut(handle).filter(|c| c.in_multi) {
            let multi = &mut client.session().multi;
            multi.clear();
            multi.aborted = true;
        }
    }

    /// A command with a wrong number of arguments. EXEC with arguments ends the transaction.
    #[cold]
    pub(super) fn wrong_arity(&mut self, handle: Handle, command: &Command) -> Flow {
        let class = command.class() as u8;
        let text = errors::arity(command);
        if command.handling == Handling::Local(Local::Exec) {
            self.discard(handle);
            let why = text.strip_prefix("ERR ").unwrap_or(&text);
            return self.refuse(handle, class, &format!("EXECABORT Transaction discarded because of: {why}"));
        }
        self.spoil(handle);
        self.refuse(handle, class, &text)
    }

    fn queueing(&mut self, plan: &Plan, handle: Handle, command: &Command, args: &Args<'_>) -> Queueing {
        let name = command.name.replace('|', " ");
        let Some(session) = self.clients.get(handle).and_then(|c| c.session.as_ref()) else { return Queueing::Queue(None) };
        let known = session.multi.slot.or(session.watch.as_ref().map(|w| w.slot));
        let is_only = plan.topology.only_node().is_some();
        if session.multi.bytes() > QUEUE_MAX {
            return Queueing::Refuse(format!("ERR Switchyard queues at most {QUEUE_MAX} bytes of commands in a transaction"));
        }
        if matches!(&*command.name, "PSYNC" | "SAVE" | "SHUTDOWN" | "SYNC") {
            return Queueing::Refuse("ERR Command not allowed inside a transaction".into());
        }
        match command.handling {
            Handling::Keyed | Handling::Split(_) | Handling::Local(Local::Spublish) => {
                let mut keys = std::mem::take(&mut self.keys);
                keys.clear();
                let found = command.find_keys(args, &mut keys);
                let target = route(&plan.topology, keys.iter().filter_map(|k| args.get(*k as usize)));
                self.keys = keys;
                match (found, target) {
                    // The node says what is wrong, and when: at EXEC.
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
                    (Err(error), _) if error.is_about_places() && is_only => Queueing::Alone(Limit::Unnamed),
                    (Err(error), _) => Queueing::Refuse(error.text(command)),
                    // Where they live is looked at with EXEC.
                    (Ok(()), Route::Owner(slot, _) | Route::Parted(slot)) if known.is_none_or(|k| k == slot) => Queueing::Queue(Some(slot)),
                    (Ok(()), Route::Owner(..) | Route::Together(_)) if is_only => Queueing::Alone(Limit::Slots),
                    (Ok(()), Route::Owner(..) | Route::Together(_) | Route::Parted(_) | Route::CrossSlot) => {
                        Queueing::Refuse(errors::CROSSSLOT.into())
                    }
                }
            }
            // Executed where the transaction is; subscriptions are at every node. A shard channel must belong there.
            Handling::Local(Local::Publish) => Queueing::Queue(None),
            // Its reply would be the node's, with what Switchyard has put before libraries.
            Handling::Any
                if &*command.name == "FUNCTION|LIST"
                    && plan.checks_scripts()
                    && args.iter().any(|arg| arg.eq_ignore_ascii_case(b"WITHCODE")) =>
            {
                Queueing::Refuse("ERR Switchyard does not serve FUNCTION LIST WITHCODE inside MULTI. Call it outside".into())
            }
            Handling::Any | Handling::Local(Local::Ping | Local::Echo | Local::Time | Local::Unwatch) => Queueing::Queue(None),
            Handling::Every(_) | Handling::OnlyNode(_) if is_only => Queueing::Alone(Limit::EveryNode),
            Handling::Every(_) => Queueing::Refuse(format!(
                "ERR Switchyard does not serve {name} inside MULTI: it concerns every node, and a transaction is executed by one. Call it outside"
            )),
            Handling::Local(Local::Select) => match args.get(1).and_then(parse::<u32>) {
                // Out of range: the node says so at EXEC.
                None => Queueing::Queue(None),
                Some(database) if self.shared.has_database(&self.keepers.all(), database) => Queueing::Select(database),
                Some(database) => Queueing::Refuse(format!(
                    "ERR Switchyard does not serve SELECT {database} inside MULTI before any client has selected that database outside"
                )),
            },
            Handling::Local(_) => Queueing::Refuse(format!(
                "ERR Switchyard does not serve {name} inside MULTI: Switchyard answers it, and the node executes the transaction. Call it outside"
            )),
            Handling::OnlyNode(_) | Handling::Refused(_) => Queueing::Refuse(errors::not_served(command).unwrap_or_default()),
        }
    }

    /// MULTI, DISCARD and EXEC of a client that is not between MULTI and EXEC, WATCH, UNWATCH.
    pub(super) fn transaction(
        &mut self,
        plan: &Plan,
        handle: Handle,
        local: Local,
        command: &Command,
        raw: &[u8],
        args: &Args<'_>,
    ) -> Flow {
        let class = command.class() as u8;
        match local {
            Local::Exec => return self.refuse(handle, class, "ERR EXEC without MULTI"),
            Local::Discard => return self.refuse(handle, class, "ERR DISCARD without MULTI"),
            Local::Watch => return self.watch(plan, handle, command, raw, args),
            Local::Unwatch => self.unwatch(handle),
            _ => {
                if let Some(client) = self.clients.get_mut(handle) {
                    client.in_multi = true;
                    client.session().multi.clear();
                }
            }
        }
        self.answer(handle, class, b"+OK\r\n");
        Flow::Next
    }

    /// Ends a transaction, if there is one, without executing it.
    pub(super) fn discard(&mut self, handle: Handle) {
        if let Some(client) = self.clients.get_mut(handle) {
            client.in_multi = false;
            if let Some(session) = client.session.as_deref_mut() {
                session.multi.clear();
            }
        }
        self.unwatch(handle);
    }

    fn unwatch(&mut self, handle: Handle) {
        let Some(session) = self.clients.get_mut(handle).and_then(|c| c.session.as_deref_mut()) else { return };
        session.watch_failed = false;
        if let Some(watch) = session.watch.take()
            && self.links.get(watch.link).is_some_and(|l| l.holder() == handle)
        {
            self.abandon(watch.link);
        }
    }

    fn watch(&mut self, plan: &Plan, handle: Handle, command: &Command, raw: &[u8], args: &Args<'_>) -> Flow {
        let class = command.class() as u8;
        let keys = args.iter().skip(1);
        let target = route(&plan.topology, keys.clone());
        let only = plan.topology.only_node();
        let place = match target {
            Route::Owner(slot, node) => Some((slot, node)),
            Route::Together(node) => args.get(1).map(|first| (slot_of(first), node)),
            Route::Parted(_) | Route::CrossSlot | Route::Anywhere => None,
        };
        let Some((slot, node)) = place else {
            let text = self.not_together(plan, keys.clone());
            let waits = match target {
                Route::Parted(_) => self.wait_for_colocation(handle, &command.name, wanted_of(plan, keys), text),
                _ => Err(text),
            };
            return waits.unwrap_or_else(|text| {
                self.watch_failed(handle);
                self.refuse(handle, class, &text)
            });
        };
        let Some(client) = self.clients.get_mut(handle) else { return Flow::Close };
        if client.session().watch_failed {
            // EXEC will answer nil whatever else is watched.
            self.answer(handle, class, b"+OK\r\n");
            return Flow::Next;
        }
        let before = client.session().watch.as_ref().map(|w| (w.slot, w.link, w.node));
        let are_apart = matches!(target, Route::Together(_)) || before.is_some_and(|(other, ..)| other != slot);
        if are_apart && only.is_none() {
            self.watch_failed(handle);
            return self.refuse(handle, class, errors::CROSSSLOT);
        }
        if let Some((.., at)) = before.filter(|(.., at)| *at != node && plan.topology.is_exceptional(slot)) {
            let text = self.parted_text(plan, slot, if at == plan.topology.owner(slot) { node } else { at });
            let watched = self.clients.get(handle).and_then(|c| c.session.as_ref()).and_then(|s| s.watch.as_ref());
            let mut watched = watched.map(|watch| watch.keys.clone()).unwrap_or_default();
            watched.extend(keys.map(Box::from));
            let wanted = wanted_of(plan, watched.iter().map(|key| &**key));
            return self.wait_for_colocation(handle, &command.name, wanted, text).unwrap_or_else(|text| {
                self.watch_failed(handle);
                self.refuse(handle, class, &text)
            });
        }
        let link = match before.map(|(slot, link, _)| (slot, link)) {
            // In doubt already: EXEC will answer nil whatever else is watched.
            Some((_, link)) if !self.is_watching(handle, link, node) => {
                self.watch_failed(handle);
                self.answer(handle, class, b"+OK\r\n");
                return Flow::Next;
            }
            Some((_, link)) => {
                if !self.clients.get_mut(handle).is_some_and(|c| c.may_take(Lane::Watch)) {
                    return Flow::Stall(Stall::Barrier);
                }
                link
            }
            None => match self.take_exclusive(handle, node, Lane::Watch) {
                Ok(Acquired::Link(link)) => link,
                Ok(Acquired::Refused(text)) => {
                    self.fail_watch(handle);
                    return self.refuse(handle, class, &text);
                }
                Ok(Acquired::Wait) => return Flow::Stall(Stall::Exclusive),
                Err(flow) => return flow,
            },
        };
        self.push_exclusive(handle, link, Call::Found(command, args), raw, class, None);
        if let Some(link) = self.links.get_mut(link) {
            link.set_task(Task::Watching);
            if let Some(pending) = link.last_mut() {
                pending.purpose = Purpose::Watch;
            }
        }
        // From now on it is the watch's, not the command's.
        if let Some(client) = self.clients.get_mut(handle) {
            client.held = None;
        }
        if let Some(client) = self.clients.get_mut(handle) {
            let watch = client.session().watch.get_or_insert(Watch { slot, are_apart, node, keys: Vec::new(), link });
            watch.are_apart |= are_apart;
            watch.keys.extend(args.iter().skip(1).map(Box::from));
        }
        if are_apart {
            self.tally.note(&command.name, Limit::Slots);
        }
        Flow::Next
    }

    /// A WATCH failed, and its client gets the error. EXEC will answer nil, once: the client may have sent its transaction without waiting
    /// for the answer to WATCH, and then relies on it. Whether it has seen the error is not known, however late MULTI comes. UNWATCH and
    /// DISCARD end the doubt, as they end every watch.
    pub(super) fn fail_watch(&mut self, handle: Handle) {
        self.unwatch(handle);
        if let Some(client) = self.clients.get_mut(handle) {
            client.session().watch_failed = true;
        }
    }

    /// Not all is watched any more that the client relies on, if it relies on anything.
    fn watch_failed(&mut self, handle: Handle) {
        if self.clients.get(handle).is_some_and(Client::watches) {
            self.fail_watch(handle);
        }
    }

    /// The map has changed. A key that is watched where it is not used any more may change without that node's knowing, also in such a way that it is
    /// back there, and as it was, when EXEC comes. So the watch counts no more from now on.
    pub(super) fn fail_watches_left_behind(&mut self) {
        let holders = self.links.iter().filter(|(_, link)| link.task() == Task::Watching).map(|(_, link)| link.holder());
        let is_left = |watch: &Watch| !self.are_used_at(watch.keys.iter().map(|key| &**key), watch.node);
        let watch = |client: &Client| client.session.as_ref().and_then(|s| s.watch.as_ref()).is_some_and(is_left);
        let left: Vec<Handle> = holders.filter(|holder| self.clients.get(*holder).is_some_and(watch)).collect();
        for holder in left {
            if let Some(client) = self.clients.get_mut(holder) {
                client.session().watch_failed = true;
            }
        }
    }

    /// The node's answer to WATCH.
    pub(super) fn on_watch(&mut self, pending: Pending, answer: &[u8]) {
        if reply::is_error(answer) {
            self.fail_watch(pending.who);
        }
        self.deliver(pending.who, pending.seq, answer);
    }

    /// Whether the node still watches on this connection for this client.
    fn is_watching(&self, handle: Handle, link: Handle, node: NodeId) -> bool {
        let is_up = |l: &Link| l.phase == Phase::Up && l.node == node && !l.is_head_expired();
        let watches = |l: &Link| is_up(l) && l.task() == Task::Watching && l.holder() == handle;
        self.links.get(link).is_some_and(watches)
    }

    /// Whether what a client watches is in doubt, so that EXEC will answer nil.
    pub(super) fn is_dirty(&self, handle: Handle, client: &Client) -> bool {
        let Some(session) = client.session.as_deref() else { return false };
        session.watch_failed
            || session.watch.as_ref().is_some_and(|watch| {
                let moved = !self.are_used_at(watch.keys.iter().map(|key| &**key), watch.node);
                let other_protocol = self.links.get(watch.link).is_some_and(|l| l.resp3 != client.resp3);
                moved || other_protocol || !self.is_watching(handle, watch.link, watch.node)
            })
    }

    fn exec(&mut self, plan: &Arc<Plan>, handle: Handle, class: u8) -> Flow {
        let Some(client) = self.clients.get(handle) else { return Flow::Close };
        let resp3 = client.resp3;
        let Some(session) = client.session.as_deref() else { return Flow::Close };
        let (multi, watch) = (&session.multi, session.watch.as_ref());
        if multi.aborted {
            self.discard(handle);
            return self.refuse(handle, class, ABORTED);
        }
        let alone = multi.alone.or(watch.filter(|watch| watch.are_apart).map(|_| Limit::Slots));
        if let Some(limit) = alone.filter(|_| plan.topology.only_node().is_none()) {
            self.discard(handle);
            return self.refuse(handle, class, limit.aborted());
        }
        if watch.is_some() && client.in_flight() > 0 {
            // Not before the node has said that it watches.
            return Flow::Stall(Stall::Barrier);
        }
        if self.is_dirty(handle, client) {
            self.discard(handle);
            self.answer(handle, class, if resp3 { b"_\r\n" } else { b"*-1\r\n" });
            return Flow::Next;
        }
        if let Some(watch) = watch {
            let (link, slot, node) = (watch.link, watch.slot, watch.node);
            if let Some(text) = self.exec_elsewhere(plan, handle, slot, Some(node)).err() {
                return self.exec_at_home(plan, handle, slot, class, text);
            }
            if let Some(client) = self.clients.get_mut(handle) {
                client.may_take(Lane::Watch);
                client.held = Some(link);
                client.session().watch = None;
            }
            if let Some(link) = self.links.get_mut(link) {
                link.set_task(Task::Nothing);
            }
            return self.send_transaction(handle, link, class);
        }
        if multi.commands.is_empty() {
            self.discard(handle);
            self.answer(handle, class, b"*0\r\n");
            return Flow::Next;
        }
        let node = match multi.slot {
            Some(slot) => match self.exec_elsewhere(plan, handle, slot, None) {
                Ok(node) => Some(node),
                Err(text) => return self.exec_at_home(plan, handle, slot, class, text),
            },
            None => self.choose_node(plan),
        };
        let Some(node) = node else {
            self.discard(handle);
            return self.refuse_all_down(handle, class);
        };
        let Some(client) = self.clients.get(handle) else { return Flow::Close };
        let Some(multi) = client.session.as_deref().map(|s| &s.multi) else { return Flow::Close };
        let lane = if multi.slow { Lane::Slow } else { Lane::Main };
        if multi.queue.len() > plan.live.large_value {
            return self.exec_alone(handle, node, Lane::Large, class);
        }
        if !client.can_take(lane) {
            return Flow::Stall(Stall::Barrier);
        }
        let link_handle = self.shared_link(node, lane, resp3);
        let Some(link) = self.links.get(link_handle) else { return Flow::Close };
        if link.phase != Phase::Up {
            // Nothing may be sent before the node has been asked whether it serves transactions.
            return self.exec_alone(handle, node, Lane::Watch, class);
        }
        if !link.has_room(UNSENT_HIGH) && self.links.is_full(link_handle, handle, UNSENT_HIGH) {
            return Flow::Stall(Stall::Upstream);
        }
        if let Some(client) = self.clients.get_mut(handle) {
            client.may_take(lane);
        }
        self.send_transaction(handle, link_handle, class)
    }

    /// Where what is queued is executed, in a slot of which some keys may live elsewhere; `watched`: where it watches. The error is that of EXEC.
    fn exec_elsewhere(&mut self, plan: &Arc<Plan>, handle: Handle, slot: Slot, watched: Option<NodeId>) -> Result<NodeId, String> {
        if !plan.topology.is_exceptional(slot) {
            return Ok(watched.unwrap_or_else(|| plan.topology.owner(slot)));
        }
        let multi = self.clients.get(handle).and_then(|c| c.session.as_ref()).map(|s| &s.multi);
        let (queue, has_keys) = multi.map(|multi| (multi.requests(), multi.slot.is_some())).unwrap_or_default();
        let aborted = |text: String| format!("EXECABORT Transaction discarded because of: {text}");
        let node = if has_keys { Some(self.node_of_transaction(plan, slot, &queue).map_err(aborted)?) } else { None };
        match (watched, node) {
            (Some(at), Some(node)) if at != node => {
                Err(aborted(self.parted_text(plan, slot, if at == plan.topology.owner(slot) { node } else { at })))
            }
            (watched, node) => Ok(watched.or(node).unwrap_or_else(|| plan.topology.owner(slot))),
        }
    }

    /// What is queued needs keys together that are not: EXEC waits until they are home. Where that takes away a key that is watched, it is answered by nil
    /// then, as after every change of a watched key.
    #[cold]
    fn exec_at_home(&mut self, plan: &Arc<Plan>, handle: Handle, slot: Slot, class: u8, text: String) -> Flow {
        let Some(session) = self.clients.get(handle).and_then(|c| c.session.as_ref()) else { return Flow::Close };
        let watched = session.watch.as_ref().map(|watch| watch.keys.clone()).unwrap_or_default();
        let queue = session.multi.requests();
        let wanted = self.wanted_by_transaction(plan, slot, &queue, &watched);
        self.wait_for_colocation(handle, "EXEC", wanted, text).unwrap_or_else(|text| {
            self.discard(handle);
            self.refuse(handle, class, &text)
        })
    }

    /// A transaction on a connection of its own.
    fn exec_alone(&mut self, handle: Handle, node: NodeId, lane: Lane, class: u8) -> Flow {
        match self.take_exclusive(handle, node, lane) {
            Ok(Acquired::Link(link)) => {
                if let Some(client) = self.clients.get_mut(handle) {
                    client.held = Some(link);
                }
                if let Some(link) = self.links.get_mut(link) {
                    link.set_holder(handle);
                }
                self.send_transaction(handle, link, class)
            }
            Ok(Acquired::Refused(text)) => {
                self.discard(handle);
                self.refuse(handle, class, &text)
            }
            Ok(Acquired::Wait) => Flow::Stall(Stall::Exclusive),
            Err(flow) => flow,
        }
    }

    /// Puts MULTI, what is queued, and EXEC on a connection.
    fn send_transaction(&mut self, handle: Handle, link_handle: Handle, class: u8) -> Flow {
        let refusal = self.links.get(link_handle).and_then(|l| l.no_multi.clone().map(|why| (why, l.node)));
        if let Some((why, node)) = refusal {
            self.discard(handle);
            self.after_exclusive_reply(link_handle);
            return self.refuse(handle, class, &self.no_multi_text(node, &why));
        }
        let scripts = self.clients.get(handle).and_then(|c| c.session.as_ref()).map(|s| s.multi.scripts.clone()).unwrap_or_default();
        for sha in scripts {
            // In a transaction NOSCRIPT comes too late to be healed.
            let body = lock(&self.shared.scripts).text(&sha);
            if let Some(body) = body {
                self.push_own(link_handle, &[b"SCRIPT", b"LOAD", &body], Purpose::Nobody, 0);
            }
        }
        let epoch = self.plan.topology.epoch() as u32;
        let sent_us = self.now_us as u32;
        let Some(client) = self.clients.get_mut(handle) else { return Flow::Close };
        let seq = client.owe(self.now_us, class);
        client.wrote_us = self.now_us;
        let (database, no_touch) = (client.database, client.no_touch);
        let mut multi = std::mem::take(&mut client.session().multi);
        if let Some(limit) = multi.alone {
            self.tally.note("EXEC", limit);
        }
        client.session().select = multi.select;
        if !multi.published.is_empty() {
            client.session().published.push_back((seq, std::mem::take(&mut multi.published)));
        }
        client.in_multi = false;
        self.note_transaction(link_handle, &multi.queue, multi.commands.iter().map(|(len, _)| *len as usize));
        let Some(client) = self.clients.get_mut(handle) else { return Flow::Close };
        let Some(link) = self.links.get_mut(link_handle) else { return Flow::Close };
        let node = link.node;
        if multi.writes {
            client.note_write(node);
        }
        if let Some(loan) = link.loan_mut() {
            loan.task = Task::Nothing;
            loan.slow |= multi.slow;
        }
        let queued = Pending {
            who: Handle::NONE,
            seq: 0,
            len: 0,
            sent_us,
            epoch,
            purpose: Purpose::Queued,
            class,
            repeatable: false,
            by_sha: false,
            end: EndNumber::NONE,
            armed: self.hearers.hot.generation() as u32,
        };
        link.touch_as(no_touch, queued);
        link.push(Request::of_ours(MULTI, database, queued));
        let mut at = 0;
        for (number, (len, class)) in multi.commands.iter().enumerate() {
            let bytes = &multi.queue[at..at + *len as usize];
            let keyed = Keyed { call: Call::Bytes(bytes), node, database };
            let request = self.pass_queued(keyed, bytes, Pending { seq: number as u32 + 1, class: *class, ..queued });
            self.links.push(link_handle, request);
            at += *len as usize;
        }
        let exec = self.pass_exec(database, Pending { who: handle, seq, purpose: Purpose::Exec, ..queued });
        self.links.push(link_handle, exec);
        if multi.select.is_some() {
            // Whether or not it was executed: the next command finds the connection in the database that we believe it to be in.
            self.push_own(link_handle, &[b"SELECT", database.to_string().as_bytes()], Purpose::Nobody, 0);
            self.stall(handle, Stall::Barrier);
        }
        multi.clear();
        if let Some(client) = self.clients.get_mut(handle) {
            client.session().multi = multi;
        }
        Flow::Next
    }

    pub(super) fn no_multi_text(&self, node: NodeId, why: &str) -> String {
        format!("ERR {} refuses transactions ({why}): allow MULTI and EXEC to Switchyard's user there", self.node_name(node))
    }

    /// A shared connection has come up, and the node refuses transactions. Those that wait for it are refused as a whole; sent, their commands would
    /// be executed one by one.
    pub(super) fn refuse_waiting_transactions(&mut self, handle: Handle) {
        let Some(link) = self.links.get_mut(handle) else { return };
        let (Some(why), node) = (link.no_multi.clone(), link.node) else { return };
        let refused = link.take_transactions();
        let mut error = Vec::new();
        encode::error(&mut error, &self.no_multi_text(node, &why));
        for ended in refused {
            let is_expired = ended.is_expired;
            let pending = self.over(ended, b"");
            if !is_expired {
                self.fail_pending(handle, pending, &error);
            }
        }
    }

    /// The node's answer to MULTI, or to a command behind it. If it refused to queue that, EXEC will say EXECABORT.
    pub(super) fn on_queued(&mut self, link: Handle, pending: Pending, refused: bool, answer: &[u8]) {
        let Some(link) = self.links.get_mut(link) else { return };
        if pending.seq == 0 {
            link.refused = None;
        }
        if refused {
            let text = reply::text(answer).unwrap_or_default();
            link.refused.get_or_insert(text.into());
            if pending.seq == 0 {
                link.no_multi = Some(String::from_utf8_lossy(text).into());
            }
        }
    }

    /// The node's answer to EXEC.
    pub(super) fn on_exec(&mut self, link: Handle, pending: Pending, answer: &[u8]) {
        let Some(link) = self.links.get_mut(link) else { return };
        let (refused, no_multi, node) = (link.refused.take(), link.no_multi.clone(), link.node);
        let executed = answer.starts_with(b"*") && !reply::is_null(answer);
        if executed {
            reply::elements(answer).filter(|element| reply::is_error(element)).for_each(|error| self.counters.errors.count(error));
        }
        let mut text = Vec::new();
        if let Some(client) = self.clients.get_mut(pending.who) {
            client.after_exec(executed);
            let published = client.session.as_mut().and_then(|s| s.take_published(pending.seq)).filter(|_| executed);
            if let Some(published) = published {
                text = self.with_counts(node, &published, answer);
            }
        }
        match (refused, no_multi) {
            (Some(_), Some(why)) if !answer.starts_with(b"-EXECABORT") => encode::error(
                &mut text,
                &format!(
                    "ERR the node refused MULTI ({why}): the commands were executed one by one. Allow MULTI to Switchyard's user there"
                ),
            ),
            (Some(why), _) if answer.starts_with(b"-EXECABORT") => {
                encode::line(&mut text, b'-', &[b"EXECABORT Transaction discarded because of: ", &why[..]].concat());
            }
            _ => {}
        }
        let answer = if text.is_empty() { answer } else { &text };
        let shown = if executed { self.scripts_met.with_own_shas(answer) } else { None };
        self.deliver(pending.who, pending.seq, shown.as_deref().unwrap_or(answer));
    }

    /// A reply to EXEC with our clients counted in the place of our workers, as PUBLISH outside of a transaction has it.
    fn with_counts(&self, node: NodeId, published: &[Published], answer: &[u8]) -> Vec<u8> {
        let elements = reply::elements(answer);
        let mut out = Vec::with_capacity(answer.len() + 16);
        encode::header(&mut out, b'*', elements.remaining() as usize);
        for (place, element) in elements.enumerate() {
            let message = published.iter().find(|p| p.place == place);
            match message.and_then(|p| Some((p, reply::integer(element)?))) {
                Some((p, count)) => encode::integer(&mut out, self.published(p.kind, &p.channel, node, count)),
                None => out.extend_from_slice(element),
            }
        }
        out
    }

    /// Others wait for a connection: takes back those of clients that watch and have been quiet for long. Their EXEC will answer nil.
    pub(super) fn recall_watches(&mut self, node: NodeId) {
        let now_us = self.now_us;
        let is_quiet = |c: &Client| c.in_flight() == 0 && now_us.saturating_sub(c.last_used_us) > RECALL_US;
        let quiet: Vec<Handle> = self
            .links
            .iter()
            .filter(|(_, l)| l.task() == Task::Watching && l.node == node)
            .map(|(_, l)| l.holder())
            .filter(|h| self.clients.get(*h).is_some_and(is_quiet))
            .collect();
        for holder in quiet {
            self.watch_failed(holder);
        }
    }
}
