//! Hot copies in a worker: hits, fills, and the gates shut by its writes.
//!
//! Rules and proof are in [`switchyard_policy::hot_copies`] and docs/design/hot-copies.md. This file has the parts that
//! need a worker: keys that a command may write ([`hold`]), commands in flight at nodes ([`publish_drained`]), and
//! clients that wait for a fill ([`copied`], [`filled`]).
//!
//! Functions rather than methods of `Worker`: they own [`HotCopyStore`], and get the rest as an argument.

pub(super) mod store;

use std::sync::Arc;

use switchyard_policy::hot_copies::{Discarded, GateId, Read, ReadRequest, WriteHolds};
use switchyard_policy::ownership::OwnershipStatus;
use switchyard_policy::topology::{NodeId, Placement, Slot, crc16_slot};
use switchyard_resp::command::{Command, CommandClass, Flags, Handling, KeyError, Split};
use switchyard_resp::request::Args;
use switchyard_resp::translate::{Shape, to_resp2};
use switchyard_resp::{encode, reply};
use tracing::info;

use super::command::{Call, CommandSeq, KeyedCommand, with_parsed_command, writes};
use super::context::Context;
use super::downstreams::waits::Stall;
use super::downstreams::{Client, Downstreams};
use super::flow::Flow;
use super::invocation::Invocation;
use super::keyed::CommandHooks;
use super::tracking::Tracked;
use super::turn::Turn;
use super::upstreams::Upstreams;
use super::upstreams::link::{Phase, UNSENT_HIGH};
use super::upstreams::pending::{MARK, MEMBER_MARK, Pending, Purpose};
use crate::hot_copies::Published;
use crate::lane::Lane;
use crate::settings::{Reads, Reports};
use crate::shared::RoutingSnapshot;
use crate::slab::Handle;
use store::{About, Elements, Waiting, exact_us, refused};

/// Maximum wait of clients for a fill. Then their nodes answer.
const TIMEOUT_US: u64 = 50_000;

/// Interval of sweeps, which drop unused copies and report used ones to the nodes, in microseconds.
const SWEEP_US: u64 = 10_000_000;

/// Reply to PTTL of an absent key.
const ABSENT: i64 = -2;

/// Maximum keys reported as used per sweep.
const TOUCHES: usize = 1_000;

// ---- writes ----

/// Whether a command may change keys.
fn may_write(command: &Command) -> bool {
    // PFCOUNT stores its result in the key.
    writes(command) || &*command.name == "PFCOUNT"
}

// ---- reads ----

/// Answers a read of one key from a copy, or fills it. `None`: the node answers.
#[inline]
pub(super) fn copied(
    cx: &mut Context,
    handle: Handle,
    routing: &RoutingSnapshot,
    command: &Command,
    key: &[u8],
    raw: &[u8],
) -> Option<Flow> {
    if cx.hooks.hot.copies.has_due_touches() {
        send_touches(&cx.turn, &mut cx.up, &mut cx.hooks);
    }
    let Context { down, hooks: observers, turn, .. } = cx;
    let (counters, now_us) = (turn.counters(), turn.now_us());
    let client = down.get_mut(handle)?;
    let hot = &mut observers.hot;
    if hot.share.is_over() {
        return Some(Flow::Later);
    }
    let has_waited = client.waits_mut().take_fill();
    if observers.detour || !takes_copies(client) {
        return None;
    }
    let quick = rapidhash::v3::rapidhash_v3(raw);
    let (database, resp3) = (client.database(), client.resp3());
    // Commands of a client in one pipeline to a node are executed in order.
    if let Some(again) = hot.copies.find_recent(&*hot.gates, quick, (database, raw, resp3), || hot.clock.read())
        && !client.replies().is_under_way_at(again.node)
    {
        let seq = client.replies_mut().owe_at(None, now_us, command.class() as u8);
        observers.telemetry.note_hit(again.node, database, again.key, raw.len(), again.reply.len());
        counters.hot.hits.add(1);
        hot.share.record(again.reply.len());
        client.give(counters, seq, again.reply, false, now_us);
        let is_special = client.is_gated();
        down.mark(handle);
        if is_special {
            cx.down.after_delivery(&cx.turn, handle);
        }
        return Some(Flow::Next);
    }
    let node = routing.topology.lives_at(key);
    if client.replies().is_under_way_at(node) {
        return None;
    }
    let asked = ReadRequest { hash: hot.hash(key), key, database, request: raw, node, resp3 };
    let waits = !has_waited && !hot.slow_nodes.contains(&node);
    let number = match hot.copies.read(
        &*hot.gates,
        asked,
        now_us,
        || hot.clock.read(),
        |since| turn.shared().hot.may_fill(since, node),
    ) {
        Read::Hit(reply) => {
            let reply = reply.to_vec();
            hot.share.record(reply.len());
            hot.copies.record_hit(quick, &asked);
            observers.telemetry.note_hit(node, database, key, raw.len(), reply.len());
            counters.hot.hits.add(1);
            cx.down.answer(&cx.turn, handle, command.class() as u8, &reply);
            return Some(Flow::Next);
        }
        Read::Fill if waits => begin(&cx.turn, &mut cx.up, &mut cx.hooks, Elements::read_by(&command.name), &asked)?,
        Read::Wait(number) if waits => number,
        Read::NotCacheable if hot.all && turn.routing().live.hot_copies.allows_key(key) => {
            turn.shared().hot.request_key(asked.hash, routing.topology.slot_of(key));
            return None;
        }
        Read::Fill | Read::Wait(_) | Read::Miss | Read::NotCacheable => return None,
    };
    cx.hooks.hot.waiting.entry(number).or_default().clients.push(handle);
    Some(Flow::Stall(Stall::Fill))
}

/// Whether a client may be answered from copies. Not if it tracks keys, because the node must know its reads; not if it
/// reads from replicas; not if commands on another lane are in flight.
#[inline]
fn takes_copies(client: &mut Client) -> bool {
    client.state::<Tracked>().is_none() && client.identity().reads() == Reads::Primary && client.may_take(Lane::Main)
}

/// Answers a command that is split by keys from copies: EXISTS of one key, and MGET.
pub(super) fn copies_of(cx: &mut Context, call: &Invocation<'_>, how: Split, keys: &[u32]) -> Option<Flow> {
    let Invocation { handle, routing, command, raw, args, .. } = *call;
    match (how, keys) {
        (Split::Values, _) => copied_values(cx, call, keys),
        (_, [place]) if command.flags.has(Flags::COPYABLE) => {
            let key = args.get(*place as usize)?;
            copied(cx, handle, routing, command, key, raw)
        }
        _ => None,
    }
}

/// Answers an MGET if all keys have copies. Cacheable keys without a copy are filled without a wait.
fn copied_values(cx: &mut Context, call: &Invocation<'_>, keys: &[u32]) -> Option<Flow> {
    let Invocation { handle, routing, command, args, .. } = *call;
    let client = cx.down.get_mut(handle)?;
    if cx.hooks.detour || !takes_copies(client) {
        return None;
    }
    if cx.hooks.hot.share.is_over() {
        return Some(Flow::Later);
    }
    let (database, resp3) = (client.database(), client.resp3());
    let class = command.class() as u8;
    let large = routing.live.large_value;
    let mut answer = Vec::new();
    encode::header(&mut answer, b'*', keys.len());
    let (mut is_whole, mut hits, mut request) = (true, Vec::new(), Vec::new());
    for place in keys {
        let key = args.get(*place as usize)?;
        request.clear();
        encode::command(&mut request, [&b"GET"[..], key]);
        let node = routing.topology.lives_at(key);
        if cx.down.get(handle)?.replies().is_under_way_at(node) {
            return None;
        }
        let Context { hooks: observers, turn, .. } = cx;
        let hot = &mut observers.hot;
        let asked = ReadRequest { hash: hot.hash(key), key, database, request: &request, node, resp3 };
        match hot.copies.read(
            &*hot.gates,
            asked,
            turn.now_us(),
            || hot.clock.read(),
            |since| turn.shared().hot.may_fill(since, node),
        ) {
            Read::Hit(reply) => {
                // As for a node's reply, a large one is streamed rather than collected: names are short, but values may
                // be large.
                if answer.len() + reply.len() > large {
                    return None;
                }
                hits.push((*place, node, reply.len()));
                answer.extend_from_slice(reply);
            }
            Read::Fill => {
                is_whole = false;
                begin(&cx.turn, &mut cx.up, &mut cx.hooks, Elements::default(), &asked);
            }
            Read::Wait(_) => is_whole = false,
            Read::Miss | Read::NotCacheable => return None,
        }
    }
    if !is_whole {
        return None;
    }
    for (place, node, bytes) in hits {
        let key = args.get(place as usize)?;
        cx.hooks.telemetry.note_hit(node, database, key, key.len(), bytes);
    }
    cx.turn.counters().hot.hits.add(1);
    cx.hooks.hot.share.record(answer.len());
    cx.down.answer(&cx.turn, handle, class, &answer);
    Some(Flow::Next)
}

/// Starts a fill at a node. `None`: not possible now.
fn begin(
    turn: &Turn,
    up: &mut Upstreams,
    hooks: &mut CommandHooks,
    elements: Elements,
    asked: &ReadRequest<'_>,
) -> Option<u32> {
    let ReadRequest { node, database, .. } = *asked;
    let link_handle = up.shared_link(turn, node, Lane::Fills, true);
    let link = up.get(link_handle)?;
    if link.phase() != Phase::Up || link.is_downgraded() || !link.has_room(UNSENT_HIGH / 8) {
        return None;
    }
    let hot = &mut hooks.hot;
    if hot.slow_nodes.contains(&node) || hot.uncacheable_nodes.contains(&node) {
        return None;
    }
    let all = Elements { of_hash: true, of_set: true };
    if hot.expire.get(node.index()).copied().unwrap_or(all).meets(elements) {
        return None;
    }
    let number = hot.copies.begin(&*hot.gates, *asked, (turn.now_us(), exact_us()))?;
    let shape = with_parsed_command(turn.routing(), asked.request, |command, args| Shape::of(&command.name, args))
        .unwrap_or_default();
    hot.waiting.insert(number, Waiting { shape, clients: Vec::new() });
    let mut ttl = Vec::new();
    encode::command(&mut ttl, [&b"PTTL"[..], asked.key]);
    turn.counters().hot.fills.add(1);
    for (request, purpose) in [(&ttl[..], Purpose::FillTtl), (asked.request, Purpose::Fill)] {
        let pending = Pending { seq: number, purpose, class: CommandClass::Read as u8, ..Pending::of_ours(turn) };
        let request = hooks.pass(turn, KeyedCommand { call: Call::Bytes(request), node, database }, request, pending);
        up.push(link_handle, request);
    }
    Some(number)
}

// ---- messages of nodes ----

/// Ends a fill with the node's reply, or without one (`lost`).
pub(super) fn filled(
    turn: &Turn,
    down: &mut Downstreams,
    hooks: &mut CommandHooks,
    number: u32,
    answer: &[u8],
    lost: bool,
) {
    let hot = &mut hooks.hot;
    let Some(Waiting { shape, clients }) = hot.waiting.remove(&number) else { return };
    if lost {
        hot.copies.discard_fill(number, Discarded::Lost);
    }
    let mut resp2 = Vec::new();
    let differs = !reply::is_error(answer) && to_resp2(answer, shape, &mut resp2);
    let outcome = hot.copies.end(
        &*hot.gates,
        number,
        answer,
        differs.then_some(&resp2),
        (turn.now_us(), exact_us()),
        |key, slot| lives_at(turn.routing(), key, slot),
    );
    if let Err(why) = outcome {
        turn.counters().hot.discarded[why as usize].add(1);
    }
    hooks.count(turn);
    for client in clients {
        go_on(turn, down, client);
    }
}

/// Drops a fill whose reply is too large to collect.
pub(super) fn fill_too_large(turn: &Turn, down: &mut Downstreams, hooks: &mut CommandHooks, number: u32) {
    hooks.hot.copies.discard_fill(number, Discarded::Large);
    filled(turn, down, hooks, number, b"", false);
}

/// Ends a client's wait for a fill.
pub(super) fn go_on(turn: &Turn, down: &mut Downstreams, handle: Handle) {
    if let Some(client) = down.get_mut(handle).filter(|client| client.stall() == Stall::Fill) {
        client.waits_mut().fill_over();
        // The same command will be dispatched again.
        client.note_counted();
        down.unstall(turn, handle);
    }
}

fn gives_again(turn: &Turn, node: NodeId) {
    if turn.shared().hot.refused(node, None) {
        info!(node = %turn.node_name(node), "node supports hot copies again");
    }
}

// ---- set and snapshot ----

/// Returns the node of a key. `None`: its slot is in transit. `slot`: its slot with CRC16, where slots are constant.
fn lives_at(routing: &RoutingSnapshot, key: &[u8], slot: Slot) -> Option<NodeId> {
    let slot = if routing.topology.placement().is_constant() { slot } else { routing.topology.slot_of(key) };
    routing.topology.transit(slot).is_none().then(|| routing.topology.lives_at(key))
}

/// Adopts a new set: from now on this worker raises its gates.
pub(super) fn adopt(cx: &mut Context) {
    let Published { set, gates, all, .. } = cx.turn.shared().hot.published();
    let hot = &mut cx.hooks.hot;
    if !Arc::ptr_eq(&hot.gates, &gates) {
        // Gates raised in the old table have no effect any more. Commands in flight are older than all keys of the new
        // one.
        hot.gates = gates;
        hot.holds = WriteHolds::default();
    }
    hot.copies.adopt(&set);
    (hot.generation, hot.all, hot.is_cacheable) = (set.generation(), all, !set.is_empty());
    cx.turn.set_cacheable(set.generation());
    cx.hooks.limit(&cx.turn);
    hold_waiting(cx);
    cx.turn.shared().hot.adopted(cx.turn.index(), cx.hooks.hot.generation);
    publish_drained(&cx.turn, &mut cx.up, &mut cx.hooks);
    cx.hooks.count(&cx.turn);
}

/// Raises gates for blocking commands at nodes, which may write later, if their keys are now cacheable.
fn hold_waiting(cx: &mut Context) {
    for handle in cx.up.links().handles() {
        let Some(link) = cx.up.get(handle).filter(|link| link.lane() == Lane::Blocking && !link.is_idle()) else {
            continue;
        };
        let (node, end) =
            (link.node(), link.requests().pending().last().map_or(CommandSeq::NONE, |pending| pending.end));
        if link.requests().pending().all(|pending| pending.purpose == Purpose::Wait) {
            // WAIT writes nothing.
            let generation = cx.hooks.hot.generation;
            cx.up.get_mut(handle).into_iter().for_each(|link| link.held_by(end, generation as u32));
            continue;
        }
        // After a timeout, the client may already have another command elsewhere.
        let Some(client) = cx.down.get(link.holder()).filter(|client| client.held() == Some(handle)) else {
            continue;
        };
        // Unknown keys delay fills from the node.
        let Some(request) = client.state().map(|waiting: &super::reissued::state::Waiting| waiting.request().to_vec())
        else {
            continue;
        };
        let database = client.database();
        let end = cx.hooks.hold(&cx.turn, KeyedCommand { call: Call::Bytes(&request), node, database }, end);
        let generation = cx.hooks.hot.generation;
        if let Some(link) = cx.up.get_mut(handle) {
            link.held_by(end, generation as u32);
        }
    }
}

/// Records that the last byte of an upload is passed to its connection: from now on it may be executed.
pub(super) fn hold_uploaded(up: &mut Upstreams, hooks: &mut CommandHooks, link: Handle, keys: &[u64]) {
    let hot = &mut hooks.hot;
    let armed = hot.generation as u32;
    let gates: Vec<GateId> =
        keys.iter().filter(|hash| hot.copies.set().get(**hash).is_some()).map(|hash| GateId::of_key(*hash)).collect();
    let Some(node) = up.get(link).map(|link| link.node()) else { return };
    let Some(end) = up.get_mut(link).and_then(|link| link.last_mut()).map(|pending| {
        pending.cacheable = armed;
        pending.end
    }) else {
        return;
    };
    if gates.is_empty() {
        return;
    }
    let end = if end == CommandSeq::NONE { hooks.next() } else { end };
    let hot = &mut hooks.hot;
    hot.holds.sent(&*hot.gates, end.number(), node, gates);
    up.get_mut(link).and_then(|link| link.last_mut()).into_iter().for_each(|pending| pending.end = end);
}

/// Publishes the oldest generation of this worker's commands in flight, by node.
pub(super) fn publish_drained(turn: &Turn, up: &mut Upstreams, hooks: &mut CommandHooks) {
    let generation = hooks.hot.generation;
    let mut oldest = vec![generation; turn.routing().topology.node_id_bound()];
    let mut note = |node: NodeId, low: u32| {
        // As a distance, because the low bits wrap.
        let at = generation.saturating_sub(u64::from((generation as u32).wrapping_sub(low)));
        if let Some(oldest) = oldest.get_mut(node.index()) {
            *oldest = (*oldest).min(at);
        }
    };
    for (_, link) in up.links().iter() {
        // An incomplete upload is not executed: its gates are raised again with its last byte.
        if let Some(head) = link.head().filter(|_| !link.is_only_uploading()) {
            note(link.node(), head.cacheable);
        }
    }
    up.zombies().iter().for_each(|zombie| note(zombie.node(), zombie.cacheable()));
    if oldest != hooks.hot.drained {
        turn.shared().hot.drained(turn.index(), oldest.clone());
        hooks.hot.drained = oldest;
    }
}

/// Sends a beat to each node that is due, if its connection for fills is up.
fn send_beats(turn: &Turn, up: &mut Upstreams, hooks: &mut CommandHooks) {
    let due: Vec<NodeId> = hooks.hot.copies.beats().due(exact_us()).collect();
    for node in due {
        let Some(link) = up.links().shared(node, Lane::Fills, true).filter(|link| up.links().up(*link).is_some())
        else {
            continue;
        };
        hooks.hot.copies.beats().sent(node, exact_us());
        up.push_own(turn, link, &[b"PING"], Purpose::Beat, 0);
    }
}

/// Confirms used copies of a cluster's keys. Not sent if the connection for fills is not up.
fn send_touches(turn: &Turn, up: &mut Upstreams, hooks: &mut CommandHooks) {
    let link_of = |up: &Upstreams, node: NodeId| {
        up.links().shared(node, Lane::Fills, true).filter(|link| up.links().up(*link).is_some())
    };
    let due = hooks.hot.copies.due_touches(exact_us(), |node| link_of(up, node).is_some());
    for (number, node, database, key) in due {
        let Some(link) = link_of(up, node) else { continue };
        let mut request = Vec::new();
        encode::command(&mut request, [&b"TOUCH"[..], &key]);
        let pending = Pending { seq: number, purpose: Purpose::Touch, ..Pending::of_ours(turn) };
        let request = hooks.pass(turn, KeyedCommand { call: Call::Bytes(&request), node, database }, &request, pending);
        up.push(link, request);
    }
}

/// Performs periodic work. Returns the clients that have waited long enough for a fill: their nodes answer.
pub(super) fn tick(turn: &Turn, up: &mut Upstreams, hooks: &mut CommandHooks) -> Vec<Handle> {
    let hot = &mut hooks.hot;
    if hot.holds.in_doubt() > 0 {
        hot.holds.settle(&*hot.gates, |node| up.zombies().count_at(node) == 0);
    }
    turn.counters().hot.in_doubt.set(hot.holds.in_doubt() as u64);
    hooks.look_at_load(turn);
    if hooks.hot.generation == 0 {
        return Vec::new();
    }
    match hooks.hot.copies.are_bounded() {
        true => send_touches(turn, up, hooks),
        false => send_beats(turn, up, hooks),
    }
    let generation = hooks.hot.generation;
    let is_drained = hooks.hot.drained.iter().all(|oldest| *oldest == generation);
    if !is_drained || hooks.hot.drained.len() != turn.routing().topology.node_id_bound() {
        publish_drained(turn, up, hooks);
    }
    let hot = &mut hooks.hot;
    let late: Vec<(u32, NodeId)> = hot.copies.fills_before(turn.now_us().saturating_sub(TIMEOUT_US)).collect();
    hot.slow_nodes.clear();
    let mut clients = Vec::new();
    for (number, node) in late {
        if !hot.slow_nodes.contains(&node) {
            hot.slow_nodes.push(node);
        }
        clients.append(&mut hot.waiting.entry(number).or_default().clients);
    }
    if turn.now_us() >= hooks.hot.sweeps_at_us {
        hooks.hot.sweeps_at_us = turn.now_us() + SWEEP_US;
        sweep(turn, up, hooks);
    }
    clients
}

/// Drops unused copies, and reports used keys to their nodes, which would otherwise consider them idle and evict them
/// first.
fn sweep(turn: &Turn, up: &mut Upstreams, hooks: &mut CommandHooks) {
    for (node, database, key) in hooks.hot.copies.sweep(TOUCHES) {
        let link_handle = up.shared_link(turn, node, Lane::Fills, true);
        if up.links().up(link_handle).is_none() {
            continue;
        }
        let mut request = Vec::new();
        encode::command(&mut request, [&b"TOUCH"[..], &key]);
        let pending = Pending::of_ours(turn);
        let request = hooks.pass(turn, KeyedCommand { call: Call::Bytes(&request), node, database }, &request, pending);
        up.push(link_handle, request);
    }
    hooks.count(turn);
}

impl CommandHooks {
    /// Shuts the gates of keys that a command may write. Call it before the command is sent. Returns its number, if its end
    /// is observed.
    pub(super) fn hold(&mut self, turn: &Turn, keyed: KeyedCommand<'_>, end: CommandSeq) -> CommandSeq {
        let mut found = std::mem::take(&mut self.hot.found);
        found.clear();
        match keyed.call {
            Call::Found(command, _) if !may_write(command) => {}
            Call::Found(command, args) => self.gates_of(turn, keyed.node, command, args, &mut found),
            // Changes no keys. Otherwise every WAIT would invalidate all copies of the node.
            Call::Bytes(MARK | MEMBER_MARK) => {}
            Call::Bytes(request) => {
                let routing = turn.routing().clone();
                let known = with_parsed_command(&routing, request, |command, args| {
                    if may_write(command) {
                        self.gates_of(turn, keyed.node, command, args, &mut found);
                    }
                });
                if known.is_none() {
                    found.push(GateId::of_node(keyed.node));
                }
            }
        }
        let mut end = end;
        if !found.is_empty() {
            if end == CommandSeq::NONE {
                end = self.next();
            }
            let hot = &mut self.hot;
            hot.holds.sent(&*hot.gates, end.number(), keyed.node, found.drain(..));
        }
        self.hot.found = found;
        end
    }

    /// Collects the gates of keys that a command may write.
    fn gates_of(&mut self, turn: &Turn, node: NodeId, command: &Command, args: &Args<'_>, found: &mut Vec<GateId>) {
        if command.flags.has(Flags::PUBSUB) {
            return;
        }
        let mut places = std::mem::take(&mut self.keys);
        places.clear();
        let keys_found = command.find_keys(args, &mut places);
        let has_keys = keys_found.is_ok() && !places.is_empty();
        let hot = &self.hot;
        let set = hot.copies.set();
        let keys = places.iter().filter_map(|place| args.get(*place as usize));
        if command.flags.has(Flags::SCRIPT) {
            // A checked script uses only keys in the slots of its declared keys. A function library may have bypassed the
            // check.
            if turn.routing().checks_scripts() && !command.name.starts_with("FCALL") {
                match turn.routing().topology.placement() {
                    Placement::Crc16 => keys.for_each(|key| found.extend(set.gates_in(crc16_slot(key)))),
                    // The slot of a cacheable key may be that of an earlier rule set.
                    Placement::Ruled(_) => found.push(GateId::of_node(node)),
                    // With ketama, a script uses only its declared keys, and the slot of a cacheable key may be from an
                    // earlier server list.
                    Placement::Continuum(_) => found.extend(
                        keys.map(|key| hot.hash(key)).filter(|hash| set.get(*hash).is_some()).map(GateId::of_key),
                    ),
                }
            } else {
                found.push(GateId::of_node(node));
            }
        } else if has_keys {
            let armed = keys.map(|key| hot.hash(key)).filter(|hash| set.get(*hash).is_some());
            found.extend(armed.map(GateId::of_key));
        } else if keys_found == Err(KeyError::Undescribed) || matches!(command.handling, Handling::OnlyNode(_)) {
            // A single node receives it all the same.
            found.push(GateId::of_node(node));
        } else if command.flags.has(Flags::WRITE) && !matches!(command.handling, Handling::Local(_)) {
            found.push(GateId::of_node(node));
        }
        self.keys = places;
    }

    /// Reports a key that is a large part of the last commands to its node.
    #[cold]
    pub(super) fn noticed(&mut self, turn: &Turn, key: &[u8], count: u8) {
        let hash = self.hot.hash(key);
        let is_news = self.hot.copies.set().get(hash).is_none();
        if is_news && turn.routing().live.hot_copies.allows_key(key) {
            turn.shared().hot.note_frequent(turn.index(), hash, turn.routing().topology.slot_of(key), count);
        }
    }

    /// Handles the reply to PTTL for a fill.
    pub(super) fn on_ttl_reply(&mut self, turn: &Turn, node: NodeId, number: u32, answer: &[u8]) {
        if reply::is_error(answer) {
            if !self.hot.refusing.contains(&node) {
                self.hot.refusing.push(node);
            }
            refused(turn, node, &reply::redacted_error(answer));
        } else if let Some(place) = self.hot.refusing.iter().position(|refusing| *refusing == node) {
            self.hot.refusing.swap_remove(place);
            gives_again(turn, node);
        }
        let hot = &mut self.hot;
        let longest = turn
            .routing()
            .live
            .hot_copies
            .ttl
            .map_or(i64::MAX, |most| i64::try_from(most.as_millis()).unwrap_or(i64::MAX));
        if reply::integer(answer) == Some(ABSENT) {
            hot.copies.on_absent(number);
        }
        match reply::integer(answer) {
            Some(ms) if ms >= 0 => hot.copies.on_ttl_reply(number, ms.min(longest)),
            Some(_) if longest < i64::MAX => hot.copies.on_ttl_reply(number, longest),
            Some(_) => {}
            None => hot.copies.discard_fill(number, Discarded::Refused),
        }
    }

    /// Handles an invalidation of keys that were read on this connection.
    pub(super) fn invalidated(&mut self, turn: &Turn, node: NodeId, message: &[u8]) {
        let mut parts = reply::elements(message);
        if parts.next().and_then(reply::text) != Some(b"invalidate") {
            return;
        }
        let hot = &mut self.hot;
        match parts.next() {
            Some(keys) if !reply::is_null(keys) => {
                for key in reply::elements(keys).filter_map(reply::text) {
                    let hash = hot.hash(key);
                    hot.copies.changed(hash);
                    turn.counters().hot.invalidations.add(1);
                }
            }
            _ => {
                hot.copies.lost(node, Discarded::Invalidated);
                turn.counters().hot.invalidations.add(1);
            }
        }
        self.count(turn);
    }

    /// Handles a new connection for fills, on which the node tracks reads.
    pub(super) fn link_up(&mut self, turn: &Turn, node: NodeId, about: &About) {
        let About { run_id, standing, .. } = about;
        let hot = &mut self.hot;
        if hot.expire.len() <= node.index() {
            hot.expire.resize(node.index() + 1, Elements { of_hash: true, of_set: true });
        }
        hot.expire[node.index()] = about.expire;
        hot.uncacheable_nodes.retain(|barred| *barred != node);
        // Writes of another router raise no gates of this one. Neither do writes of an earlier run, which the node may
        // execute late.
        let why = if !about.is_covered {
            Some("it is newer than the command table")
        } else if turn.shared().ownership.is_some() && *standing != OwnershipStatus::Ours {
            Some("it does not store this router's ownership record (ACL SETUSER)")
        } else if !hot.copies.are_bounded()
            && !run_id.as_deref().is_some_and(|run_id| turn.shared().fences.is_cleared(node, run_id))
        {
            Some("it does not list the connections of an earlier run of the router (CLIENT LIST)")
        } else {
            None
        };
        match why {
            Some(why) => {
                hot.uncacheable_nodes.push(node);
                refused(turn, node, why);
            }
            None => gives_again(turn, node),
        }
    }

    /// Handles the loss of the connection for fills: the node no longer reports changes of keys read on it.
    pub(super) fn link_lost(&mut self, turn: &Turn, node: NodeId) {
        self.hot.copies.lost(node, Discarded::Lost);
        self.count(turn);
    }

    fn count(&self, turn: &Turn) {
        let sizes = self.hot.copies.sizes();
        turn.counters().hot.copies.set(sizes.copies as u64);
        turn.counters().hot.bytes.set(sizes.bytes as u64);
    }

    /// Adopts a new topology.
    pub(super) fn place_anew(&mut self, turn: &Turn) {
        self.hot.copies.update_placement(|key, slot| lives_at(turn.routing(), key, slot));
        self.count(turn);
    }

    /// Adopts changed settings.
    pub(super) fn limit(&mut self, turn: &Turn) {
        let settings = &turn.routing().live.hot_copies;
        let share = settings.bytes_of_worker(turn.shared().counters.len());
        let bytes_max = if settings.is_on { share } else { 0 };
        self.hot.copies.limit(bytes_max, settings.reply_max.min(turn.routing().live.large_value));
        self.hot.copies.promise(settings.staleness().map(|most| most.as_micros() as u64));
        self.count(turn);
    }

    /// Returns the keys whose gates an upload raises: the declared ones, if it may write.
    pub(super) fn keys_of_upload(&self, command: &Command, args: &Args<'_>, places: &[u32]) -> Box<[u64]> {
        let keys = places.iter().filter(|_| may_write(command)).filter_map(|place| args.get(*place as usize));
        keys.map(|key| self.hot.hash(key)).collect()
    }

    /// Handles the reply to a beat. Even if late or an error, it proves that the connection was alive when the beat was
    /// sent.
    pub(super) fn beat_confirmed(&mut self, node: NodeId) {
        self.hot.copies.beats().replied(node);
    }

    /// Handles the reply to a TOUCH of a copy's key.
    pub(super) fn touch_confirmed(&mut self, turn: &Turn, number: u32, answer: &[u8]) {
        self.hot.copies.touch_replied(number, reply::integer(answer));
        self.count(turn);
    }

    /// Enables instant reports for nodes with high load.
    fn look_at_load(&mut self, turn: &Turn) {
        let live = &turn.routing().live;
        let least = (live.hot_copies.is_on && live.telemetry.reports != Reports::Periodic)
            .then_some(live.telemetry.instant_threshold);
        let (workers, nodes) = (turn.shared().counters.len(), turn.routing().topology.node_id_bound());
        let counters = &turn.counters();
        let sent = |node: NodeId| counters.node(node).classes.iter().map(|class| class.requests.get()).sum();
        self.telemetry.look_at_load(turn.now_us(), least, workers, nodes, sent);
    }

    /// Drops all copies when memory is short.
    pub(super) fn clear(&mut self, turn: &Turn) {
        self.hot.copies.clear();
        self.count(turn);
    }
}
