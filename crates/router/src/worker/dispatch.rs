//! Dispatch of a command: from its arguments to a connection, a gather, or a local reply.
//!
//! Checks are in the order of Redis: known, arity, permissions, state of the client; then keys in transit; then the
//! handling in the table. Each step may reply or stall the client, and only the last step changes state.

use std::sync::Arc;

use switchyard_policy::colocate::ColocationRequest;
use switchyard_policy::routing::{Route, common_node, split};
use switchyard_policy::topology::NodeId;
use switchyard_resp::command::{Command, Flags, Handling, Lookup, Merge, Split, errors};
use switchyard_resp::encode;
use switchyard_resp::request::{Args, Scanner};

use super::Worker;
use super::colocate::{bring_together, wait_for_colocation};
use super::context::Context;
use super::cross_slot::spans_slots;
use super::downstreams::Downstreams;
use super::downstreams::waits::Stall;
use super::fan_out::FanOutScope;
use super::flow::{Flow, abort_transaction};
use super::forward::forward;
use super::gather::{Aggregation, FanOut, Gathers};
use super::hot_copies::{copied, copies_of};
use super::invocation::Invocation;
use super::keyed::find_routed_keys;
use super::large::forward_large;
use super::login::guarded;
use super::monitor::gate_monitor;
use super::outage::Needs;
use super::overrides::undeclared_text;
use super::pause::Pauses;
use super::pubsub::clients::note_own_publish;
use super::pubsub::commands::gate_subscriber;
use super::queueing::wrong_arity;
use super::quiesce::state::QuiesceWait;
use super::quiesce::{flush_quietly, look_quietly, wait_to_change_functions};
use super::reissued::ReissuedCommands;
use super::scripts::rehearsed::{rehearses, replacement};
use super::scripts::script;
use super::tracking::commands::gate_tracking;
use super::transit::Transit;
use super::turn::Turn;
use super::wait::state::Since;
use crate::lane::Lane;
use crate::shared::{Commands, RoutingSnapshot};
use crate::single_node_usage::Limit;
use crate::slab::Handle;
use crate::wait_queues::QueueSlots;

impl Worker {
    /// Executes one complete command. `raw`: its bytes for forwarding.
    #[inline]
    pub(super) fn dispatch(
        &mut self,
        routing: &Arc<RoutingSnapshot>,
        handle: Handle,
        raw: &[u8],
        args: &Args<'_>,
    ) -> Flow {
        let command = match routing.commands.find(args) {
            Lookup::Command(command) => command,
            other => return unknown(&self.cx.turn, &mut self.cx.down, handle, &other, args),
        };
        if !command.arity_ok(args.len()) {
            return wrong_arity(&self.cx.turn, &mut self.cx.down, handle, command);
        }
        let call = &Invocation { routing, handle, command, raw, args };
        let Some(client) = self.cx.down.get_mut(handle) else { return Flow::Close };
        if client.identity().is_guarded()
            && let Some(flow) = guarded(&self.cx.turn, &mut self.cx.down, &mut self.cx.hooks, call)
        {
            return flow;
        }
        let Some(client) = self.cx.down.get_mut(handle) else { return Flow::Close };
        client.note_command(command.id);
        let in_multi = client.in_multi();
        let special =
            client.is_gated() || self.pauses.is_any() || !self.monitors.is_empty() || self.cx.up.outages().any();
        if special && let Some(flow) = self.pauses.gate(&self.cx.turn, &mut self.cx.down, handle, command) {
            return flow;
        }
        if !routing.topology.is_settled() {
            return self.dispatch_in_transit(call, special, in_multi);
        }
        self.execute(call, special, in_multi)
    }

    /// Executes a command while slots are in transit.
    fn dispatch_in_transit(&mut self, call: &Invocation<'_>, special: bool, in_multi: bool) -> Flow {
        let Invocation { handle, command, raw, .. } = *call;
        if !in_multi
            && let Some(flow) =
                self.with_more_keys(call, |worker, call| worker.dispatch_in_transit(call, special, in_multi))
        {
            return flow;
        }
        match self.large_keys.in_transit(&mut self.cx, call) {
            Transit::Settled => self.execute(call, special, in_multi),
            Transit::Instead(Flow::Stall(Stall::Keys)) if command.flags.has(Flags::BLOCKING) => {
                let flow = self.reissued_commands.wait_on_the_way(&self.cx.turn, &mut self.cx.down, call);
                self.executed(call, special, flow);
                flow
            }
            Transit::Instead(flow) => flow,
            Transit::Ask(asks) => {
                let flow = self.gathers.double_read(&self.cx.turn, &mut self.cx.down, handle, command, &asks, raw);
                self.executed(call, special, flow);
                flow
            }
            Transit::Moved(routing) => {
                // A replica may be older than the move.
                self.cx.hooks.detour = true;
                let flow = self.execute(&Invocation { routing: &routing, ..*call }, special, in_multi);
                self.cx.hooks.detour = false;
                flow
            }
        }
    }

    /// Executes a call of a script with further keys that it will touch, as far as they are known, or `SORT` as a script of
    /// the router. `None`: the command is executed as it is.
    fn with_more_keys(
        &mut self,
        call: &Invocation<'_>,
        run: impl FnOnce(&mut Self, &Invocation<'_>) -> Flow,
    ) -> Option<Flow> {
        let own = replacement(&mut self.cx, call)?;
        let scanner = Scanner::again(own.request())?;
        let raw = own.request();
        let args = &scanner.args(raw);
        let Lookup::Command(command) = call.routing.commands.find(args) else { return None };
        self.cx.hooks.script = Some(own.call());
        let flow = run(self, &Invocation { command, raw, args, ..*call });
        self.cx.hooks.script = None;
        Some(flow)
    }

    /// Completes a command outside of a transaction, given its result.
    #[inline]
    fn executed(&mut self, call: &Invocation<'_>, special: bool, flow: Flow) {
        let Context { turn, down, hooks, .. } = &mut self.cx;
        if special && matches!(flow, Flow::Next | Flow::Close) {
            self.monitors.feed_monitors(turn, down, call);
            self.tracking.note_tracked_read(turn, down, hooks, call);
            note_own_publish(down, call.handle, call.command);
        }
        if flow == Flow::Next {
            turn.counters().commands[usize::from(call.class())].add(1);
        }
    }

    #[inline]
    fn execute(&mut self, call: &Invocation<'_>, special: bool, in_multi: bool) -> Flow {
        let Invocation { routing, handle, command, args, .. } = *call;
        let class = command.class() as u8;
        if special && self.cx.up.outages().any() {
            let Some(client) = self.cx.down.get_mut(handle) else { return Flow::Close };
            let is_detour = self.cx.hooks.detour;
            let needs = Needs { turn: &self.cx.turn, routing, large_keys: &self.large_keys, handle, client, is_detour };
            if needs.lost_node(&mut self.cx.up, command, args) {
                // A refusal of an exclusive connection, from before the loss: it is out of date at the node's return.
                client.waits_mut().take_refusal();
                // The command has passed its limits, and is dispatched again.
                client.note_counted();
                return Flow::Stall(Stall::Outage);
            }
        }
        if in_multi {
            let flow = self.in_multi(call);
            if special && matches!(flow, Flow::Next | Flow::Close) {
                self.monitors.feed_monitors(&self.cx.turn, &mut self.cx.down, call);
                self.tracking.note_tracked_read(&self.cx.turn, &mut self.cx.down, &mut self.cx.hooks, call);
                note_own_publish(&mut self.cx.down, handle, command);
            }
            return flow;
        }
        let flow = match command.handling {
            Handling::Keyed => self.keyed(call),
            Handling::Split(how) => self.gathers.split(&mut self.cx, call, how),
            Handling::Every(merge) => self.every(call, merge),
            Handling::Any => self.gathers.any(&mut self.cx, call),
            Handling::Local(local) => self.local(call, local),
            Handling::OnlyNode(_) if routing.topology.only_node().is_some() => {
                self.reissued_commands.at_only_node(&mut self.cx, call)
            }
            Handling::OnlyNode(_) | Handling::Refused(_) => {
                let text = errors::not_served(command).unwrap_or_default();
                self.cx.down.refuse(&self.cx.turn, handle, class, &text);
                // A debugger runs its script next, despite the error, and expects that nothing is changed.
                match &*command.name {
                    "SCRIPT|DEBUG" => {
                        self.cx.down.close_after_replies(handle);
                        Flow::Close
                    }
                    _ => Flow::Next,
                }
            }
        };
        self.executed(call, special, flow);
        flow
    }

    fn keyed(&mut self, call: &Invocation<'_>) -> Flow {
        let Invocation { routing, handle, command, raw, args, .. } = *call;
        let class = command.class() as u8;
        let node = match command.first_key_only(args) {
            Some(index) => {
                let Some(key) = args.get(index) else { return Flow::Close };
                if command.flags.has(Flags::CURSOR) {
                    let node = routing.topology.lives_at(key);
                    let flow = self.gathers.element_scan(&self.cx.turn, &mut self.cx.down, call, node);
                    return flow.unwrap_or_else(|| forward(&mut self.cx, call, node));
                }
                if self.large_keys.suggests(command, key) {
                    return forward_large(&mut self.cx, call, routing.topology.lives_at(key));
                }
                if command.flags.has(Flags::COPYABLE)
                    && self.cx.hooks.hot.is_used()
                    && let Some(flow) = copied(&mut self.cx, handle, routing, command, key, raw)
                {
                    return flow;
                }
                routing.topology.lives_at(key)
            }
            None => {
                if command.flags.has(Flags::SCRIPT)
                    && let Some(flow) = self.with_more_keys(call, |worker, call| worker.keyed(call))
                {
                    return flow;
                }
                let mut keys = std::mem::take(&mut self.cx.hooks.keys);
                keys.clear();
                let found = find_routed_keys(routing.topology.placement(), command, args, &mut keys);
                let target = routing.route(keys.iter().filter_map(|k| args.get(*k as usize)));
                if found.is_ok() && matches!(target, Route::CrossSlot | Route::Together(_)) && !spans_slots(command) {
                    self.cx.hooks.groups.note(keys.iter().filter_map(|k| args.get(*k as usize)));
                }
                self.cx.hooks.keys = keys;
                match (found, target) {
                    (Err(error), _) => {
                        if let Some(node) = routing.topology.only_node().filter(|_| error.is_unknown_position()) {
                            return self.reissued_commands.together(&mut self.cx, call, node, Limit::Unnamed);
                        }
                        let sorted = self.with_more_keys(call, |worker, call| worker.keyed(call));
                        let text = || error.text(command);
                        return sorted.unwrap_or_else(|| self.cx.down.refuse(&self.cx.turn, handle, class, &text()));
                    }
                    (Ok(()), Route::Together(node)) => return self.several_slots(call, node),
                    (Ok(()), Route::Owner(slot, _) | Route::Parted(slot))
                        if routing.topology.has_override(slot)
                            && !rehearses(routing, command)
                            && self.cx.hooks.uses_undeclared(&self.cx.turn, routing, command, args) =>
                    {
                        let waits = wait_for_colocation(
                            &self.cx.turn,
                            &mut self.cx.down,
                            handle,
                            &command.name,
                            ColocationRequest::Slot(slot),
                            || undeclared_text(&self.cx.turn, routing, slot),
                        );
                        return waits.unwrap_or_else(|text| self.cx.down.refuse(&self.cx.turn, handle, class, &text));
                    }
                    (Ok(()), Route::Owner(slot, node))
                        if command.flags.has(Flags::BLOCKING) && command.blocks(args) =>
                    {
                        return self.reissued_commands.block(&mut self.cx, call, node, Some(QueueSlots::One(slot)));
                    }
                    (Ok(()), Route::Owner(_, node)) => node,
                    (Ok(()), Route::CrossSlot | Route::Parted(_)) => {
                        match self.gathers.cross_slot(&self.cx.turn, &mut self.cx.down, &mut self.cx.hooks, call) {
                            Ok(flow) => return flow,
                            Err(node) => node,
                        }
                    }
                    (Ok(()), Route::Anywhere) => match self.cx.up.choose_node(&self.cx.turn, routing) {
                        Some(node) => node,
                        None => return self.cx.down.refuse_all_down(&self.cx.turn, handle, class),
                    },
                }
            }
        };
        if command.flags.has(Flags::SCRIPT) {
            return script(&mut self.cx, call, node);
        }
        forward(&mut self.cx, call, node)
    }

    /// Executes a command whose keys are in several slots, and all at this node.
    #[cold]
    fn several_slots(&mut self, call: &Invocation<'_>, node: NodeId) -> Flow {
        if call.routing.topology.only_node().is_none() {
            let keys = self.cx.hooks.keys.clone();
            if let Some(flow) = bring_together(&self.cx.turn, &mut self.cx.down, &mut self.cx.hooks, call, &keys) {
                return flow;
            }
        }
        self.reissued_commands.together(&mut self.cx, call, node, Limit::Slots)
    }

    fn every(&mut self, call: &Invocation<'_>, merge: Merge) -> Flow {
        let Invocation { handle, command, .. } = *call;
        let changes_functions =
            matches!(&*command.name, "FUNCTION|DELETE" | "FUNCTION|FLUSH" | "FUNCTION|LOAD" | "FUNCTION|RESTORE");
        if changes_functions
            && let Some(flow) =
                wait_to_change_functions(&self.cx.turn, &mut self.cx.down, handle, command.class() as u8)
        {
            return flow;
        }
        let flow = self.every_now(call, merge);
        if changes_functions && let Some(client) = self.cx.down.get_mut(handle) {
            // A started change keeps the movers quiesced. After a refusal they resume.
            client.take_state::<QuiesceWait>();
        }
        flow
    }

    fn every_now(&mut self, call: &Invocation<'_>, merge: Merge) -> Flow {
        let Invocation { handle, command, raw, .. } = *call;
        let lane = if command.flags.has(Flags::SLOW) { Lane::Slow } else { Lane::Main };
        let Some(client) = self.cx.down.get_mut(handle) else { return Flow::Close };
        if !client.may_take(lane) {
            return Flow::Stall(Stall::Barrier);
        }
        if let Some(flow) =
            self.gathers.every_script(&self.cx.turn, &self.cx.up, &mut self.cx.down, &mut self.cx.hooks, call, lane)
        {
            return flow;
        }
        // Also if all moves have ended during the wait: then the quiesce is withdrawn there.
        let waits = self.cx.down.get_mut(handle).is_some_and(|client| client.state::<QuiesceWait>().is_some());
        if waits || !self.cx.turn.routing().moves.by_id.is_empty() || !self.cx.turn.routing().topology.is_settled() {
            match &*command.name {
                "FLUSHALL" | "FLUSHDB" => {
                    return flush_quietly(
                        &self.cx.turn,
                        &mut self.cx.down,
                        &mut self.gathers,
                        &mut self.quiesce,
                        handle,
                        lane,
                        raw,
                        command.class() as u8,
                    );
                }
                "DBSIZE" | "KEYS" => {
                    return look_quietly(
                        &self.cx.turn,
                        &mut self.cx.down,
                        &mut self.gathers,
                        &mut self.quiesce,
                        handle,
                        lane,
                        merge,
                        raw,
                        command.class() as u8,
                    );
                }
                _ => {}
            }
        }
        if command.flags.has(Flags::WRITE) {
            let nodes = self.cx.turn.data_nodes().all();
            if let Some(client) = self.cx.down.get_mut(handle) {
                let since = Since::now(self.cx.turn.shared(), self.cx.turn.routing());
                nodes.into_iter().for_each(|node| client.note_written(node, since));
            }
        }
        let about_keys = matches!(&*command.name, "DBSIZE" | "FLUSHALL" | "FLUSHDB" | "KEYS");
        let reach = if about_keys { FanOutScope::DataNodes } else { FanOutScope::Everybody };
        let whole = match &*command.name {
            "FLUSHALL" | "FLUSHDB" => Aggregation::Long(merge),
            _ if command.flags.has(Flags::READONLY) => Aggregation::Read(merge),
            _ => Aggregation::Merged(merge),
        };
        self.gathers.fan_out(
            &self.cx.turn,
            &mut self.cx.down,
            FanOut { client: handle, lane, reach, requests: vec![raw.to_vec()], class: command.class() as u8, whole },
        )
    }
}

fn gate_any(turn: &Turn, down: &mut Downstreams, handle: Handle, command: &Command) -> Option<Flow> {
    gate_tracking(down, handle)
        .or_else(|| gate_subscriber(turn, down, handle, command))
        .or_else(|| gate_monitor(turn, down, handle, command))
}

/// Whether an unknown command may become known, because the query for a node's commands is pending. A client waits
/// for that once.
fn may_still_learn(turn: &Turn, down: &mut Downstreams, handle: Handle) -> bool {
    let asked = turn
        .routing()
        .topology
        .nodes()
        .any(|n| turn.shared().with_facts(n.id, |f| f.commands == Commands::Requested || !f.tried));
    let Some(client) = down.get_mut(handle) else { return false };
    client.waits_mut().may_learn(asked)
}

/// Whether an unknown command is a part of an HTTP request.
pub(super) fn is_http(name: &[u8]) -> bool {
    name.eq_ignore_ascii_case(b"POST") || name.eq_ignore_ascii_case(b"HOST:")
}

#[cold]
fn unknown(turn: &Turn, down: &mut Downstreams, handle: Handle, lookup: &Lookup<'_>, args: &Args<'_>) -> Flow {
    let name = args.get(0).unwrap_or_default();
    if is_http(name) {
        // A browser was tricked into an HTTP request: reply nothing that a web page could use, as Redis does.
        let from = down.get(handle).map_or_else(String::new, |c| c.identity().origin());
        if let Some(suppressed) = down.http_log.allow(turn.now_us()) {
            tracing::warn!(
                from,
                suppressed = suppressed.count(),
                "closing a connection that speaks HTTP to the Redis port: possibly an attack from a web page"
            );
        }
        down.close_client(turn, handle);
        return Flow::Close;
    }
    if may_still_learn(turn, down, handle) {
        return Flow::Stall(Stall::Learning);
    }
    let text = match lookup {
        Lookup::UnknownSubcommand(container) => errors::unknown_subcommand(container, args),
        _ => errors::unknown(args),
    };
    abort_transaction(down, handle);
    let mut reply = Vec::new();
    encode::line(&mut reply, b'-', &text);
    let class = switchyard_resp::command::CommandClass::Admin as u8;
    down.answer(turn, handle, class, &reply);
    Flow::Next
}

impl Pauses {
    /// Checks the client's state and a pause. `None`: the command may proceed.
    #[cold]
    fn gate(&mut self, turn: &Turn, down: &mut Downstreams, handle: Handle, command: &Command) -> Option<Flow> {
        if let Some(flow) = gate_any(turn, down, handle, command) {
            return Some(flow);
        }
        self.is_held_back(turn, down, handle, command).then_some(Flow::Stall(Stall::Paused))
    }
}

impl ReissuedCommands {
    /// Executes a command without keys that requires a single node: its nodes are unknown, or several nodes cannot
    /// execute it atomically.
    #[cold]
    fn at_only_node(&mut self, cx: &mut Context, call: &Invocation<'_>) -> Flow {
        let Invocation { routing, handle, command, .. } = *call;
        let Some(node) = routing.topology.only_node() else {
            return cx.down.refuse_all_down(&cx.turn, handle, command.class() as u8);
        };
        let flow = match command.flags.has(Flags::BLOCKING) {
            true => self.block(cx, call, node, None),
            false => forward(cx, call, node),
        };
        if flow == Flow::Next {
            cx.hooks.tally.note(&command.name, Limit::EveryNode);
        }
        flow
    }

    /// Executes a command that only works because its node has all keys.
    #[cold]
    fn together(&mut self, cx: &mut Context, call: &Invocation<'_>, node: NodeId, limit: Limit) -> Flow {
        let Invocation { routing, command, args, .. } = *call;
        let flow = if command.flags.has(Flags::BLOCKING) && command.blocks(args) {
            let keys = cx.hooks.keys.iter().filter_map(|place| args.get(*place as usize));
            let slots = QueueSlots::of(&keys.map(|key| routing.topology.slot_of(key)).collect());
            self.block(cx, call, node, slots)
        } else if command.flags.has(Flags::SCRIPT) {
            script(cx, call, node)
        } else {
            forward(cx, call, node)
        };
        // Most are supported with several nodes as well.
        let is_limited = match limit {
            Limit::Slots if routing.colocates() => {
                !rehearses(routing, command) && cx.hooks.needs_whole_slots(&cx.turn, routing, command, args)
            }
            Limit::Slots => routing.live.cross_slot_max == 0 || !spans_slots(command),
            _ => true,
        };
        if flow == Flow::Next && is_limited && routing.topology.only_node().is_some() {
            cx.hooks.tally.note(&command.name, limit);
        }
        flow
    }
}

impl Gathers {
    fn any(&mut self, cx: &mut Context, call: &Invocation<'_>) -> Flow {
        let Invocation { routing, handle, command, .. } = *call;
        if command.name.starts_with("COMMAND") {
            return self.query_commands(cx, call);
        }
        match cx.up.choose_node(&cx.turn, routing) {
            Some(node) if command.name == "FUNCTION|LIST" => {
                let flow = self.function_list(&cx.turn, &mut cx.down, call, node);
                flow.unwrap_or_else(|| forward(cx, call, node))
            }
            Some(node) => forward(cx, call, node),
            None => cx.down.refuse_all_down(&cx.turn, handle, command.class() as u8),
        }
    }

    fn split(&mut self, cx: &mut Context, call: &Invocation<'_>, how: Split) -> Flow {
        let Invocation { handle, command, args, .. } = *call;
        let class = command.class() as u8;
        let mut indexes = std::mem::take(&mut cx.hooks.keys);
        indexes.clear();
        let found = command.find_keys(args, &mut indexes);
        if let Err(error) = found {
            cx.hooks.keys = indexes;
            return cx.down.refuse(&cx.turn, handle, class, &error.text(command));
        }
        let flow = self.split_keys(cx, call, how, &indexes);
        cx.hooks.keys = indexes;
        flow
    }

    fn split_keys(&mut self, cx: &mut Context, call: &Invocation<'_>, how: Split, indexes: &[u32]) -> Flow {
        let Invocation { routing, handle, command, args, .. } = *call;
        let key = |index: &u32| args.get(*index as usize).unwrap_or_default();
        if cx.hooks.hot.is_used()
            && let Some(flow) = copies_of(cx, call, how, indexes)
        {
            return flow;
        }
        // Usual case: all keys are at one node, which executes the whole command.
        if let Some(node) = common_node(&routing.topology, indexes.iter().map(key)) {
            return forward(cx, call, node);
        }
        let Some(client) = cx.down.get_mut(handle) else { return Flow::Close };
        if !client.may_take(Lane::Main) {
            return Flow::Stall(Stall::Barrier);
        }
        let class = command.class() as u8;
        let parts = split(&routing.topology, indexes.iter().map(key));
        let whole = match how {
            Split::Values => {
                let mut layout = vec![0; indexes.len()];
                for (number, part) in parts.iter().enumerate() {
                    for place in &part.keys {
                        layout[*place as usize] = number as u16;
                    }
                }
                Aggregation::Values { layout }
            }
            Split::Pairs => Aggregation::Merged(Merge::Same),
            Split::Count if command.flags.has(Flags::WRITE) => Aggregation::Merged(Merge::Sum),
            Split::Count => Aggregation::Read(Merge::Sum),
        };
        let Some(gather) = self.begin_gather(&cx.turn, &mut cx.down, handle, class, parts.len(), whole) else {
            return Flow::Close;
        };
        cx.turn.counters().fragments.add(parts.len() as u64);
        let per_key = if how == Split::Pairs { 2 } else { 1 };
        let mut request = Vec::new();
        for (number, part) in parts.iter().enumerate() {
            if how != Split::Values
                && let Some(client) = cx.down.get_mut(handle)
            {
                client.note_written(part.node, Since::now(cx.turn.shared(), cx.turn.routing()));
            }
            request.clear();
            encode::header(&mut request, b'*', 1 + part.keys.len() * per_key);
            encode::bulk(&mut request, args.get(0).unwrap_or_default());
            for place in &part.keys {
                let index = indexes[*place as usize] as usize;
                for offset in 0..per_key {
                    encode::bulk(&mut request, args.get(index + offset).unwrap_or_default());
                }
            }
            self.send_parts(cx, gather, number as u32, part.node, Lane::Main, &[&request], class);
        }
        Flow::Next
    }
}
