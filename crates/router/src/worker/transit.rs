//! Slots in transit to another node: destinations of their commands, and waiting clients.
//!
//! Without moves, all of this is one predicted branch per command (`Topology::is_settled`). During moves,
//! `policy::migration` determines which keys of a command for a moving slot are missing at the target ([`KeyLookup`]).
//! If none is missing, the command is executed as if the slots had been handed over, by a snapshot in which they are
//! ([`Worker::routing_of_moved`]): no other code is affected. Otherwise its client waits (`Stall::Keys`, [`Waits`]),
//! the mover is notified of the wanted keys, and the command is later checked again from its beginning. Writes to slots
//! whose keys are being listed are reported to the mover when they are passed to a connection ([`super::keyed`]).
//!
//! A move by a protocol as published may limit the commands that its source serves ([`source_ops`]).
//!
//! There is no queue of commands at the mover: see docs/decisions/0011-keys-are-handed-over-not-commands.md.

mod source_ops;
pub(super) mod state;

use std::sync::Arc;

use switchyard_policy::migration::{Decision, Fingerprint, KeyLookup, Waits, Wanted, moved, observed};
use switchyard_policy::routing::Route;
use switchyard_policy::topology::{MoveId, NodeId, Topology};
use switchyard_resp::command::{Command, Flags, Handling, Local, Touched, is_option};
use switchyard_resp::request::Args;

use super::colocate::{wait_for_colocation, wanted_by_wait};
use super::command::{with_parsed_command, writes};
use super::context::Context;
use super::double_read::{Asks, are_connected, fetch_sampled};
use super::downstreams::Downstreams;
use super::downstreams::waits::Stall;
use super::flow::Flow;
use super::gather::Gathers;
use super::invocation::Invocation;
use super::keyed::CommandHooks;
use super::large::LargeKeys;
use super::overrides::not_together;
use super::pubsub::Topics;
use super::transactions::session::Session;
use super::transactions::{discard, fail_watch};
use super::turn::Turn;
use super::upstreams::Upstreams;
use super::upstreams::kind::Waited;
use crate::mover::{MoverMessage, SharedLeg};
use crate::publication::OldestInFlight;
use crate::shared::RoutingSnapshot;
use crate::slab::Handle;
use source_ops::{is_over_limit, take_turn};
use state::Moving;

pub(super) use source_ops::tick_source_ops;

/// Number of commands in flight above which the drain barrier is checked only every [`PUBLISH_US`].
const MUCH: usize = 1000;
const PUBLISH_US: u64 = 500;

/// Action for a command while slots are in transit.
#[derive(Debug)]
pub(super) enum Transit {
    /// Executed as without moves.
    Settled,
    /// Executed by this snapshot.
    Moved(Arc<RoutingSnapshot>),
    /// Send it to these nodes.
    Ask(Asks),
    /// Not executed now.
    Instead(Flow),
}

/// Makes a client wait for missing keys. Returns false if they have arrived in the meantime: the command must be
/// checked again.
fn wait_for(turn: &Turn, down: &mut Downstreams, handle: Handle, look: KeyLookup<SharedLeg>) -> bool {
    let now_us = turn.now_us();
    let Some(client) = down.get_mut(handle) else { return true };
    if client.state::<Moving>().is_none() {
        client.set_state(Moving {
            since_us: now_us,
            move_id: None,
            turn_at_source: None,
            waits: Waits::default(),
            refusal: None,
        });
    }
    let Some(moving) = client.state_mut::<Moving>() else { return true };
    let wanted = moving.waits.begin(look, turn.index());
    moving.move_id = moving.waits.first_move().or(moving.move_id);
    let Some(wanted) = wanted else { return false };
    for ((id, leg), what) in wanted {
        if let Some(mover) = turn.routing().moves.by_id.get(&id) {
            mover.notify(match what {
                Wanted::Keys(keys) => MoverMessage::Wanted { leg, keys },
                Wanted::Whole => MoverMessage::WantedWhole { leg },
            });
        }
    }
    true
}

/// Ends the wait of a command for keys.
fn end_hold(turn: &Turn, down: &mut Downstreams, handle: Handle) {
    let Some(moving) = down.get_mut(handle).and_then(|c| c.take_state::<Moving>()) else { return };
    let held_us = turn.now_us().saturating_sub(moving.since_us);
    if let Some(mover) = moving.move_id.and_then(|id| turn.routing().moves.by_id.get(&id)) {
        mover.note_hold(held_us);
    }
}

/// Checks waiting commands again: all of them, or those whose keys have arrived.
pub(super) fn look_again(turn: &Turn, down: &mut Downstreams, all: bool) {
    let mut due: Vec<(u64, Handle)> = Vec::new();
    for handle in down.stalled(Stall::Keys) {
        let Some(moving) = down.get(handle).and_then(|client| client.state::<Moving>()) else { continue };
        moving.waits.register_again(turn.index());
        if all || moving.is_over() {
            due.push((moving.since_us, handle));
        }
    }
    // Longest wait first.
    due.sort_unstable_by_key(|(since_us, handle)| (*since_us, handle.index));
    for (_, handle) in due {
        go_on_moving(turn, down, handle);
    }
}

fn go_on_moving(turn: &Turn, down: &mut Downstreams, handle: Handle) {
    let Some(client) = down.get(handle) else { return };
    if client.has_yet_to_send() {
        // Its reply is pending already: no later command may be checked before.
        down.resume(handle);
        return;
    }
    if turn.routing().topology.is_settled() {
        // No slot is in transit any more, so its keys will not be checked again.
        end_hold(turn, down, handle);
    }
    down.unstall(turn, handle);
}

/// Answers clients that wait for any of these keys with an error.
pub(super) fn refuse_moving(
    turn: &Turn,
    down: &mut Downstreams,
    move_id: MoveId,
    keys: Option<&[Fingerprint]>,
    error: &Arc<str>,
) {
    for handle in down.stalled(Stall::Keys) {
        let Some(moving) = down.get_mut(handle).and_then(|client| client.state_mut::<Moving>()) else { continue };
        if moving.waits.concerns(move_id, keys) {
            moving.refusal = Some(error.clone());
        }
    }
    look_again(turn, down, false);
}

/// Answers a client that waits for keys with this error.
pub(super) fn refuse_held(turn: &Turn, down: &mut Downstreams, handle: Handle, error: String) {
    if let Some(moving) = down.get_mut(handle).and_then(|c| c.state_mut::<Moving>()) {
        moving.refusal = Some(error.into());
    }
    look_again(turn, down, false);
}

/// Ends waits that are longer than a node's timeout.
pub(super) fn tick_moving(turn: &Turn, down: &mut Downstreams) {
    let waiting = down.stalled(Stall::Keys);
    if waiting.is_empty() {
        return;
    }
    let timeout = turn.routing().live.command_timeout;
    for handle in waiting {
        let Some(moving) = down.get(handle).and_then(|client| client.state::<Moving>()) else { continue };
        if moving.refusal.is_some() || turn.now_us().saturating_sub(moving.since_us) <= timeout.as_micros() as u64 {
            continue;
        }
        let between = moving.move_id.and_then(|id| Some((id, turn.routing().moves.by_id.get(&id)?)));
        if between.is_some_and(|(_, m)| {
            [m.source, m.target].iter().any(|node| turn.shared().busy.was_busy(*node, turn.now_us(), timeout))
        }) {
            continue;
        }
        let what = between.map_or_else(
            || "the keys' slot is being moved".to_owned(),
            |(id, m)| {
                format!(
                    "the keys' slot is being moved from {} to {} (move {})",
                    turn.node_name(m.source),
                    turn.node_name(m.target),
                    id.0
                )
            },
        );
        let text =
            format!("NODETIMEOUT {what}, and they did not arrive within {timeout:?}; the command was not executed");
        if let Some(moving) = down.get_mut(handle).and_then(|c| c.state_mut::<Moving>()) {
            moving.refusal = Some(text.into());
        }
    }
    look_again(turn, down, false);
}

/// Returns the snapshot with another topology.
fn routing_by(routing: &RoutingSnapshot, topology: Arc<Topology>) -> Arc<RoutingSnapshot> {
    Arc::new(RoutingSnapshot { topology, ..routing.clone() })
}

impl CommandHooks {
    /// Returns the snapshot for commands whose keys are all there.
    pub(super) fn routing_of_moved<'a>(&'a self, turn: &'a Turn) -> &'a Arc<RoutingSnapshot> {
        self.transit.moved.as_ref().unwrap_or(turn.routing())
    }

    /// Derives the snapshot for moved keys from a new snapshot.
    pub(super) fn place_moving_anew(&mut self, turn: &Turn) {
        let moved = moved(&turn.routing().topology, &turn.routing().moves.legs);
        self.transit.moved = moved.map(|topology| routing_by(turn.routing(), Arc::new(topology)));
    }

    /// For a command that is passed to a connection to `node`: records for the movers the keys that it may create or
    /// change in slots whose keys are being listed.
    pub(super) fn note_sent(
        &mut self,
        turn: &Turn,
        routing: &RoutingSnapshot,
        node: NodeId,
        command: &Command,
        args: &Args<'_>,
        places: &[u32],
    ) {
        if routing.topology.is_settled() || !writes(command) {
            return;
        }
        let mut undeclared = None;
        for (number, key) in
            places.iter().enumerate().filter_map(|(number, place)| Some((number, args.get(*place as usize)?)))
        {
            let Some(transit) = observed(&routing.topology, key, node) else { continue };
            let mover = routing.moves.by_id.get(&transit.move_id);
            match mover.filter(|mover| mover.is_staged(key)) {
                Some(mover) => match command.touched(args, number) {
                    Touched::Nothing => {}
                    Touched::Elements(elements) => {
                        mover.note_touched(key.into(), Some(elements.into_iter().map(Box::from).collect()))
                    }
                    Touched::Everything => mover.note_touched(key.into(), None),
                },
                None => match self.transit.written.iter_mut().find(|(known, _)| *known == transit.move_id) {
                    Some((_, keys)) => keys.push(key.into()),
                    None => self.transit.written.push((transit.move_id, vec![key.into()])),
                },
            }
            if *undeclared.get_or_insert_with(|| self.uses_undeclared(turn, routing, command, args))
                && let Some(mover) = mover
            {
                mover.send_without_wake(MoverMessage::WrittenAnything(routing.topology.slot_of(key)));
            }
        }
    }

    /// Notifies the movers of writes by commands that wait to be sent. Call it before any is sent.
    #[inline]
    pub(super) fn notify_movers(&mut self, turn: &Turn) {
        if self.transit.written.is_empty() {
            return;
        }
        for (move_id, keys) in std::mem::take(&mut self.transit.written) {
            if let Some(mover) = turn.routing().moves.by_id.get(&move_id) {
                mover.send_without_wake(MoverMessage::Written(keys));
            }
        }
    }

    fn look_at(
        &mut self,
        turn: &Turn,
        routing: &RoutingSnapshot,
        command: &Command,
        args: &Args<'_>,
        look: &mut KeyLookup<SharedLeg>,
    ) {
        let mut places = std::mem::take(&mut self.keys);
        places.clear();
        // Otherwise the command is refused elsewhere.
        if !command.flags.has(Flags::PUBSUB) && command.find_keys(args, &mut places).is_ok() {
            let mut undeclared = None;
            for key in places.iter().filter_map(|place| args.get(*place as usize)) {
                let undeclared =
                    || *undeclared.get_or_insert_with(|| self.uses_undeclared(turn, routing, command, args));
                look.key(&routing.topology, &routing.moves.legs, key, writes(command), undeclared);
            }
        }
        self.keys = places;
    }

    /// Whether all keys of the command's slots must be at its node, because it may use others than it names.
    pub(super) fn needs_whole_slots(
        &mut self,
        turn: &Turn,
        routing: &RoutingSnapshot,
        command: &Command,
        args: &Args<'_>,
    ) -> bool {
        // Without the check of scripts, operators have accepted that scripts find only the keys of their node. With ketama,
        // the check permits declared keys only.
        let has_no_others = !routing.live.check_scripts || routing.topology.placement().continuum().is_some();
        let is_accepted = command.flags.has(Flags::SCRIPT) && has_no_others;
        !is_accepted && self.uses_undeclared(turn, routing, command, args)
    }

    /// Whether a command may use other keys of its slot than those it names.
    pub(super) fn uses_undeclared(
        &mut self,
        turn: &Turn,
        routing: &RoutingSnapshot,
        command: &Command,
        args: &Args<'_>,
    ) -> bool {
        if command.flags.has(Flags::SCRIPT) {
            return !self.is_proved(turn, routing, command, args);
        }
        command.name.starts_with("SORT")
            && args.iter().skip(2).zip(args.iter().skip(3)).any(|(option, pattern)| {
                (is_option(option, b"BY") || is_option(option, b"GET")) && pattern.contains(&b'*')
            })
    }
}

/// Returns the new location of a request that was sent before, or waited at a node. `None`: the client waits for
/// its keys. `Err`: the wait has ended.
pub(super) fn place_again(
    turn: &Turn,
    down: &mut Downstreams,
    hooks: &mut CommandHooks,
    handle: Handle,
    request: &[u8],
) -> Result<Option<(NodeId, Waited)>, Arc<str>> {
    let routing = turn.routing().clone();
    if let Some(text) = down.get_mut(handle).and_then(|c| c.state_mut::<Moving>()?.refusal.take()) {
        end_hold(turn, down, handle);
        return Err(text);
    }
    loop {
        let mut look = KeyLookup::default();
        let mut waits = false;
        let place = with_parsed_command(&routing, request, |command, args| {
            hooks.look_at(turn, &routing, command, args, &mut look);
            let decision = look.decide(&routing.topology, &routing.moves.legs, false, || false);
            waits = decision == Decision::Wait;
            let mut keys = Vec::new();
            command.find_keys(args, &mut keys).ok()?;
            let keys = keys.iter().filter_map(|k| args.get(*k as usize));
            let by_key;
            let now = match decision {
                Decision::Settled => &routing,
                Decision::Split(topology) => {
                    by_key = routing_by(&routing, topology);
                    &by_key
                }
                _ => hooks.transit.moved.as_ref().unwrap_or(&routing),
            };
            match now.route(keys.clone()) {
                Route::Owner(slot, node) => Some(Ok((node, Waited::Of(slot)))),
                Route::Together(node) => Some(Ok((node, Waited::Several))),
                Route::Parted(_) | Route::CrossSlot => {
                    // The keys are not together at any location.
                    waits = false;
                    Some(Err((command.name.clone(), wanted_by_wait(now, keys.clone()), not_together(turn, now, keys))))
                }
                Route::Anywhere => None,
            }
        });
        let Some(place) = place.flatten() else {
            return Err("ERR switchyard: a command that waited cannot be parsed again".into());
        };
        if !waits {
            end_hold(turn, down, handle);
            let (name, wanted, text) = match place {
                Ok(place) => return Ok(Some(place)),
                Err(apart) => apart,
            };
            let later = wanted.and_then(|wanted| wait_for_colocation(turn, down, handle, &name, wanted, || text));
            return match later {
                Ok(Flow::Stall(why)) => {
                    down.stall(turn, handle, why);
                    Ok(None)
                }
                Ok(_) => Ok(None),
                Err(text) => Err(text.into()),
            };
        }
        if wait_for(turn, down, handle, look) {
            down.stall(turn, handle, Stall::Keys);
            return Ok(None);
        }
    }
}

/// Publishes the drain barrier: the oldest epoch with a command in flight, in total and by node.
///
/// A gather counts until its end, under the epoch of its beginning, for every node: requests of its later rounds
/// use the locations of that time.
pub(super) fn publish_drained(turn: &Turn, up: &Upstreams, gathers: &Gathers, pubsub: &Topics) {
    let epoch = turn.routing().topology.epoch();
    // Epochs in flight are near the current one, so their low bits identify them.
    let whole = |low: u32| epoch - u64::from((epoch as u32).wrapping_sub(low));
    let mut by_node = vec![epoch; turn.routing().topology.node_id_bound()];
    let mut oldest = epoch;
    let count = |by_node: &mut [u64], node: NodeId, epoch: u64| {
        if let Some(at) = by_node.get_mut(node.index()) {
            *at = (*at).min(epoch);
        }
    };
    for (_, link) in up.links().iter() {
        // Not only the first: a script that was loaded at its node is sent again under its first epoch.
        if let Some(low) = link.requests().oldest_epoch() {
            oldest = oldest.min(whole(low));
            count(&mut by_node, link.node(), whole(low));
        }
    }
    let mut answered = by_node.clone();
    for zombie in up.zombies().iter() {
        oldest = oldest.min(zombie.epoch());
        count(&mut by_node, zombie.node(), zombie.epoch());
    }
    if !turn.routing().topology.is_settled() && pubsub.are_topics_settling(turn) {
        // Messages published at the target of a move must reach subscribers: the barrier waits for their
        // subscriptions, too.
        oldest = oldest.min(epoch.saturating_sub(1));
        by_node.fill(epoch.saturating_sub(1));
        answered.fill(epoch.saturating_sub(1));
    }
    let rounds = gathers.iter().map(|(_, gather)| gather.epoch()).min().unwrap_or(epoch);
    let until_rounds = |by_node: Vec<u64>| by_node.into_iter().map(|at| at.min(rounds)).collect();
    let by_node = OldestInFlight { executed: until_rounds(by_node), answered: until_rounds(answered) };
    turn.shared().publish_drained(turn.index(), oldest.min(rounds), by_node);
}

/// At the end of a turn: publishes the drain barrier if requested.
#[inline]
pub(super) fn publish_if_wanted(
    turn: &Turn,
    up: &mut Upstreams,
    hooks: &mut CommandHooks,
    gathers: &mut Gathers,
    pubsub: &mut Topics,
) {
    if turn.shared().drained.is_wanted(turn.index()) {
        // Checking all commands in flight costs time; with many of them, another turn comes soon.
        let is_much = up.links().iter().map(|(_, link)| link.requests().pending().len()).sum::<usize>() > MUCH;
        if !is_much || turn.now_us() >= hooks.transit.published_us + PUBLISH_US {
            hooks.transit.published_us = turn.now_us();
            publish_drained(turn, up, gathers, pubsub);
        }
    }
}

impl LargeKeys {
    /// Checks a command while slots are in transit.
    #[cold]
    pub(super) fn in_transit(&mut self, cx: &mut Context, call: &Invocation<'_>) -> Transit {
        let Invocation { routing, handle, command, args, .. } = *call;
        let class = command.class() as u8;
        let Some(client) = cx.down.get_mut(handle) else { return Transit::Instead(Flow::Close) };
        let is_exec = command.handling == Handling::Local(Local::Exec);
        let has_keys = matches!(command.handling, Handling::Keyed | Handling::Split(_) | Handling::Local(Local::Watch));
        // Between MULTI and EXEC commands are only queued. Channels are always at their slot's owner.
        if client.in_multi() != is_exec || !(has_keys || is_exec) || command.flags.has(Flags::PUBSUB) {
            return Transit::Settled;
        }
        if let Some(text) = client.state_mut::<Moving>().and_then(|m| m.refusal.take()) {
            end_hold(&cx.turn, &mut cx.down, handle);
            match command.handling {
                Handling::Local(Local::Exec) => discard(&mut cx.down, handle),
                Handling::Local(Local::Watch) => fail_watch(&mut cx.down, handle),
                _ => {}
            }
            return Transit::Instead(cx.down.refuse(&cx.turn, handle, class, &text));
        }
        let has_turn = take_turn(&cx.turn, &mut cx.down, handle);
        loop {
            let mut look = KeyLookup::default();
            if is_exec {
                let queue = cx
                    .down
                    .get(handle)
                    .and_then(|c| c.state::<Session>())
                    .map(|s| s.multi.requests())
                    .unwrap_or_default();
                for request in queue {
                    with_parsed_command(routing, &request, |command, args| {
                        cx.hooks.look_at(&cx.turn, routing, command, args, &mut look)
                    });
                }
            } else {
                cx.hooks.look_at(&cx.turn, routing, command, args, &mut look);
            }
            let Some(client) = cx.down.get(handle) else { return Transit::Instead(Flow::Close) };
            let resp3 = client.resp3();
            let splits = matches!(command.handling, Handling::Split(_));
            let decision = look.decide(&routing.topology, &routing.moves.legs, splits, || {
                client.state::<Moving>().is_none() && self.reads_one_key(client, command, args)
            });
            if !has_turn
                && !routing.moves.source_ops.is_empty()
                && let Some(id) = look.move_of_source(&routing.topology, &decision)
            {
                // A double read waits for the client's earlier commands, and is checked again after them.
                if matches!(decision, Decision::Ask(_))
                    && cx.down.get(handle).is_some_and(|client| client.in_flight() > 0)
                {
                    return Transit::Instead(Flow::Stall(Stall::Barrier));
                }
                if is_over_limit(&cx.turn, &mut cx.down, &mut cx.hooks.transit, handle, id) {
                    return Transit::Instead(Flow::Stall(Stall::SourceOps));
                }
            }
            let transit = match decision {
                Decision::Settled => Transit::Settled,
                // If no key is elsewhere (keys move back to their slot owner), replicas are still not read.
                Decision::Moved => Transit::Moved(cx.hooks.transit.moved.as_ref().unwrap_or(routing).clone()),
                Decision::Split(topology) => Transit::Moved(routing_by(routing, topology)),
                Decision::Ask(nodes) => Transit::Ask(Asks { nodes, as_published: true }),
                Decision::DoubleRead(nodes, processes)
                    if are_connected(&cx.turn, &mut cx.up, resp3, command, nodes, &processes) =>
                {
                    Transit::Ask(Asks { nodes: nodes.to_vec(), as_published: false })
                }
                Decision::DoubleRead(..) | Decision::Wait => {
                    if wait_for(&cx.turn, &mut cx.down, handle, look) {
                        return Transit::Instead(Flow::Stall(Stall::Keys));
                    }
                    continue;
                }
            };
            end_hold(&cx.turn, &mut cx.down, handle);
            if matches!(&transit, Transit::Ask(asks) if asks.nodes.len() > 1) {
                fetch_sampled(&cx.turn, routing, &look);
            }
            return transit;
        }
    }
}
