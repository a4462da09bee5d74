//! A worker: one thread that owns its listeners, its clients and its connections to the nodes, and shares nothing on
//! the path of a command.
//!
//! A turn of the loop: wait; read from all ready sockets; then one write per node, then one write per client. Shared
//! costs are paid once per turn: the clock is read once, and a node gets the commands of all clients in one system
//! call.
//!
//! Under load a turn pauses before it polls (`Batching`): it then finds more events, and every system call carries
//! more. With few active clients it never pauses, because that would only add latency.

mod accept;
mod acl;
mod away;
mod batching;
mod blocking;
mod changes;
mod checkout;
mod client_commands;
mod cluster;
mod colocate;
mod command;
mod config_commands;
mod config_values;
mod context;
mod cross_slot;
mod dispatch;
mod double_read;
mod downstreams;
mod element_scan;
mod events;
mod fan_out;
mod flow;
mod forward;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz {
    //! Fuzz targets of this module.
    pub use super::cluster::fuzz::cluster;
    pub use super::input::fuzz::first_bytes;
}
mod gather;
mod hot_copies;
mod info;
mod input;
mod invocation;
mod keyed;
mod large;
mod libraries;
mod local;
mod log_throttle;
mod login;
mod memory;
mod memory_stats;
mod monitor;
mod multi_local;
mod multi_step;
mod outage;
mod overrides;
mod pause;
mod published;
mod pubsub;
mod queueing;
mod quiesce;
mod quotas;
mod random_key;
mod redirect;
mod reissued;
mod replies;
mod scan;
mod scripts;
mod send;
mod silent_nodes;
mod slowlog;
mod stale_replies;
mod telemetry;
mod tracking;
mod transactions;
mod transit;
pub(crate) mod transport;
mod turn;
mod upstreams;
mod wait;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use switchyard_policy::topology::NodeId;

use crate::listener::Listener;
use crate::poll::{Poll, Ready, Token};
use crate::shared::{Message, Shared};
use crate::slab::Handle;
use accept::handshake_failed;
use batching::pause;
use blocking::{end_wait, restamp_waiting, retry_unblocks, unblock_client};
use client_commands::{kill_clients, list_clients};
use colocate::{on_colocation, settle_colocate_waits};
use downstreams::Client;
use downstreams::client::Upload;
use downstreams::waits::Stall;
use gather::Gather;
use login::{on_login, readmit_clients};
use pause::refresh;
use pubsub::clients::cut_subscriber;
use quiesce::{on_quiet, tick_quieting};
use quotas::{place_prefixes_anew, recount};
use reissued::{on_reissue, on_turn};
use scripts::checking::on_libraries_checked;
use tracking::commands::find_client;
use tracking::nodes::{on_redirect_broken, on_redirected};
use transactions::fail_stale_watches;
use transit::{look_again, publish_if_wanted, refuse_moving, tick_moving, tick_source_ops};
use upstreams::Origin;
use upstreams::tick::publish_slow;
use upstreams::unblock::{Asker, tick_blocked};

pub use cross_slot::spans_slots;

/// Bytes per read. Large enough for a batch of replies, small enough for the L2 cache.
const READ_SIZE: usize = 128 << 10;

/// Interval of timeout checks.
const TICK: Duration = Duration::from_millis(20);

/// Interval of timeout checks without clients and connection attempts.
const TICK_IDLE: Duration = Duration::from_millis(500);

/// Interval of checks of all clients. There may be tens of thousands.
const CLIENT_TICK_US: u64 = 200_000;

/// Time without progress after which a client over `OUTPUT_HIGH` is assumed to write its whole pipeline before it
/// reads: its commands continue, up to its output limit.
const OUTPUT_TIMEOUT_US: u64 = 200_000;

#[derive(Debug)]
pub(crate) struct Worker {
    cx: context::Context,
    gathers: gather::Gathers,
    pubsub: pubsub::Topics,
    monitors: monitor::Monitors,
    tracking: tracking::Tracking,
    pauses: pause::Pauses,
    large_keys: large::LargeKeys,
    next_tick_us: u64,
    next_client_tick_us: u64,
    sender: send::Sender,
    memory: memory::MemoryWatch,
    reissued_commands: reissued::ReissuedCommands,
    redirects: redirect::Redirects,
    quiesce: quiesce::QuiesceQueue,
}

impl Worker {
    pub(crate) fn new(index: usize, shared: Arc<Shared>, listeners: Vec<Listener>) -> std::io::Result<Self> {
        let poll = Poll::new()?;
        poll.add(&shared.mailboxes[index].wake, Token::Wake)?;
        let door = accept::state::Acceptor::open(listeners, &poll)?;
        // Commands of a panicked worker with this number may still run at the nodes.
        let left_behind = shared.connections.take_over_worker(index);
        let epoch = shared.drained.of(index);
        let mut zombies = upstreams::zombies::Zombies::default();
        left_behind.into_iter().for_each(|connection| zombies.add(connection, epoch, 0));
        let fingerprints = shared.board.fingerprints;
        let hot = hot_copies::store::HotCopyStore::new(&shared.hot, fingerprints);
        let turn = turn::Turn::new(index, shared, poll);
        turn.shared().publication.adopted(index, turn.generation());
        let hooks = keyed::CommandHooks::new(
            changes::Changes::new(Arc::clone(turn.counters())),
            telemetry::Telemetry::new(fingerprints, index),
            hot,
            slowlog::entries::SlowCommands::new(turn.routing().live.slow_us()),
        );
        let down = downstreams::Downstreams::new(turn.counters().clone(), door);
        let up = upstreams::Upstreams::new(zombies, index);
        Ok(Self {
            cx: context::Context { turn, up, down, hooks },
            gathers: gather::Gathers::new(),
            pubsub: pubsub::Topics::new(),
            monitors: monitor::Monitors::default(),
            tracking: tracking::Tracking::default(),
            pauses: pause::Pauses::default(),
            large_keys: large::LargeKeys::new(),
            next_tick_us: 0,
            next_client_tick_us: 0,
            sender: send::Sender::new(),
            memory: memory::MemoryWatch::default(),
            reissued_commands: reissued::ReissuedCommands::default(),
            redirects: redirect::Redirects::default(),
            quiesce: quiesce::QuiesceQueue::default(),
        })
    }

    /// Runs until the router stops.
    pub(crate) fn run(mut self) -> std::io::Result<()> {
        // The default slack of 50 us would double the pause of `Batching`.
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
        self.open_send_batch();
        let mut buffer = vec![0; READ_SIZE];
        let mut ready = Vec::new();
        let mut events = Vec::new();
        self.cx.turn.begin();
        // A replacement of a panicked worker adopts the shared state.
        refresh(
            &self.cx.turn,
            &self.cx.up,
            &mut self.cx.down,
            &mut self.monitors,
            &mut self.pauses,
            self.cx.turn.index(),
            Handle::NONE,
            0,
            false,
        );
        place_prefixes_anew(&self.cx.turn, &mut self.cx.down);
        self.cx.up.connect_main(&self.cx.turn);
        self.cx.hooks.place_moving_anew(&self.cx.turn);
        self.cx.hooks.adopt_routing(self.cx.turn.routing(), self.cx.turn.shared().tap.get());
        loop {
            // The wake-up for a new snapshot may have come in a turn that had already checked the generation.
            let pending_work = self.cx.down.begin_turn()
                || self.cx.turn.is_outdated()
                || self.cx.down.has_unread()
                || self.cx.up.has_unread();
            if pending_work {
                self.cx.turn.poll().wait(Some(Duration::ZERO), &mut events, &mut ready)?;
            } else {
                if let Some(length) = self.sender.batching.pause() {
                    pause(length);
                }
                let is_busy = self.cx.down.len() > 0
                    || !self.cx.up.is_settled()
                    || self.cx.turn.shared().draining.load(Ordering::Relaxed);
                self.cx.turn.tick_every(if is_busy { TICK } else { TICK_IDLE })?;
                self.cx.turn.poll().wait(None, &mut events, &mut ready)?;
            }
            self.cx.turn.begin();
            let began = self.cx.turn.now_us();
            self.sender.batching.turn(self.cx.turn.now_us());
            if self.cx.turn.is_outdated() {
                self.adopt_routing();
                self.settle_events();
            }
            if self.cx.turn.shared().hot.generation() != self.cx.hooks.hot.generation() {
                hot_copies::adopt(&mut self.cx);
            }
            for link in self.cx.up.take_unread() {
                self.read_link(link, &mut buffer);
                self.settle_events();
                self.check_memory_after_growth();
            }
            for client in self.cx.down.take_unread() {
                self.read_client(client, &mut buffer);
                self.settle_events();
                self.check_memory_after_growth();
            }
            for event in &ready {
                self.on_ready(*event, &mut buffer);
            }
            self.finish_turn();
            if self.cx.turn.now_us() >= self.next_tick_us {
                self.tick();
                self.settle_events();
                self.finish_turn();
            }
            publish_if_wanted(&self.cx.turn, &mut self.cx.up, &mut self.cx.hooks, &mut self.gathers, &mut self.pubsub);
            if self.cx.turn.shared().draining.load(Ordering::Relaxed) && self.drained() {
                return Ok(());
            }
            if !ready.is_empty() {
                self.cx.turn.counters().turns.record(self.cx.turn.clock_us().saturating_sub(began));
            }
        }
    }

    fn on_ready(&mut self, event: Ready, buffer: &mut [u8]) {
        match event.token {
            Token::Client(handle) => {
                let Some(client) = self.cx.down.get_mut(handle) else { return };
                if client.note_ready(event) {
                    self.cx.down.mark(handle);
                }
                if event.readable {
                    self.read_client(handle, buffer);
                }
            }
            Token::Link(handle) => {
                if self.cx.up.on_ready(&self.cx.turn, handle, event) {
                    self.read_link(handle, buffer);
                }
            }
            Token::Listener(index) => accept::accept(&self.cx.turn, &mut self.cx.down, index as usize),
            Token::Tick => {
                self.cx.turn.poll().consume_tick();
                self.next_tick_us = self.cx.turn.now_us();
            }
            Token::Wake => {
                for message in self.cx.turn.shared().clone().mailboxes[self.cx.turn.index()].take() {
                    self.on_message(message);
                }
            }
        }
        self.settle_events();
        self.check_memory_after_growth();
    }

    /// Sends the output of the turn: to the nodes first, so that they can start.
    fn finish_turn(&mut self) {
        // A flush can end a stall, and a resumed client may produce more. After some rounds, the rest waits for the
        // next turn.
        self.monitors.flush_monitors(&self.cx.turn);
        for _ in 0..8 {
            let resumed = self.cx.down.take_resumed();
            for handle in resumed {
                self.resume_client(handle);
                self.settle_events();
                self.check_memory_after_growth();
            }
            self.cx.hooks.notify_movers(&self.cx.turn);
            self.send_together();
            self.cx.up.flush_links(&self.cx.turn);
            self.settle_events();
            self.cx.down.flush_clients(&self.cx.turn);
            self.settle_events();
            if !self.cx.down.are_any_resumed() && self.cx.up.marked_count() == 0 {
                break;
            }
        }
    }

    fn adopt_routing(&mut self) {
        let (known, before) = self.cx.turn.adopt_routing();
        self.cx.hooks.slow.set_threshold(self.cx.turn.routing().live.slow_us());
        if !Arc::ptr_eq(&before.live, &self.cx.turn.routing().live) {
            self.cx.up.mark_stale(&self.cx.turn, &before.live);
        }
        self.cx.up.connect_main(&self.cx.turn);
        self.cx.hooks.transit.keep_before(before.clone(), self.cx.turn.now_us());
        self.cx.hooks.place_moving_anew(&self.cx.turn);
        self.cx.hooks.adopt_routing(self.cx.turn.routing(), self.cx.turn.shared().tap.get());
        if !Arc::ptr_eq(&before.topology, &self.cx.turn.routing().topology) {
            self.cx.hooks.place_anew(&self.cx.turn);
        }
        self.cx.hooks.limit(&self.cx.turn);
        if self.cx.turn.routing().topology.placement() != before.topology.placement() {
            transactions::place_anew(&self.cx.turn, &mut self.cx.down);
            reissued::place_anew(&self.cx.turn, &mut self.cx.down);
        }
        if self.cx.turn.routing().topology.epoch() != before.topology.epoch() {
            restamp_waiting(&mut self.cx);
            fail_stale_watches(&self.cx.turn, &self.cx.up, &mut self.cx.down, &mut self.cx.hooks);
        }
        if self.cx.turn.routing().topology.is_of_cluster()
            && !Arc::ptr_eq(&before.topology, &self.cx.turn.routing().topology)
        {
            redirect::hold_back_all(&mut self.cx.down);
            let replaced = self.cx.turn.shared().replaced_members();
            self.redirects.adopt_replaced(&self.cx.turn, &mut self.cx.up, &replaced);
        }
        // Keys that commands wait for may be elsewhere.
        look_again(&self.cx.turn, &mut self.cx.down, true);
        settle_colocate_waits(&self.cx.turn, &mut self.cx.down, true);
        self.cx.up.drop_foreign_links(&self.cx.turn);
        self.cx.up.follow_servers(&self.cx.turn);
        self.cx.up.adopt_outages(&self.cx.turn);
        if self.cx.turn.shared().publication.must_leave_servers(known) {
            self.cx.up.leave_other_processes(&self.cx.turn);
        }
        self.cx.turn.shared().publication.adopted(self.cx.turn.index(), self.cx.turn.generation());
        let limits_changed = before.live.key_limits != self.cx.turn.routing().live.key_limits;
        if limits_changed {
            place_prefixes_anew(&self.cx.turn, &mut self.cx.down);
        }
        if limits_changed
            || (!Arc::ptr_eq(&before.live.users, &self.cx.turn.routing().live.users)
                && before.live.users != self.cx.turn.routing().live.users)
        {
            readmit_clients(&self.cx.turn, &mut self.cx.down);
        }
        if self.cx.turn.routing().live.one_database && !Arc::ptr_eq(&before.live, &self.cx.turn.routing().live) {
            local::close_clients_elsewhere(&self.cx.turn, &mut self.cx.down);
        }
        self.pubsub.update_places(&self.cx.turn);
        self.tracking.update_places(&self.cx.turn, &mut self.cx.up);
        self.tracking.settle_tracking(&self.cx.turn, &mut self.cx.down);
        let learning: Vec<Handle> =
            self.cx.down.iter().filter(|(_, c)| c.stall() == Stall::Learning).map(|(h, _)| h).collect();
        for client in learning {
            self.cx.down.unstall(&self.cx.turn, client);
        }
    }

    fn tick(&mut self) {
        self.next_tick_us = self.cx.turn.now_us() + TICK.as_micros() as u64;
        let (tracking, topics) = (&self.tracking, &self.pubsub);
        let needs_pubsub = |node| pubsub::nodes::needs_pubsub_link(tracking, topics, node);
        self.cx.up.tick_links(&self.cx.turn, self.cx.hooks.hot.has_copies(), &needs_pubsub);
        self.cx.up.tick_outages(&self.cx.turn);
        retry_unblocks(&mut self.cx);
        self.tick_redirects();
        self.pauses.tick_pause(&self.cx.turn, &self.cx.up, &mut self.cx.down);
        tick_moving(&self.cx.turn, &mut self.cx.down);
        tick_source_ops(&self.cx.turn, &mut self.cx.down, &mut self.cx.hooks.transit);
        settle_colocate_waits(&self.cx.turn, &mut self.cx.down, false);
        self.reissued_commands.tick_reissued(&self.cx.turn, &mut self.cx.down);
        tick_quieting(&self.cx.turn, &mut self.cx.down);
        self.pubsub.tick(&self.cx.turn);
        self.cx.hooks.enter_waiting(&self.cx.turn);
        self.cx.hooks.transit.forget_before(self.cx.turn.now_us());
        transit::publish_drained(&self.cx.turn, &self.cx.up, &self.gathers, &self.pubsub);
        self.cx.hooks.tally.drain_into(&self.cx.turn.shared().alone);
        self.cx.hooks.groups.drain_into(&self.cx.turn.shared().used_together);
        for client in hot_copies::tick(&self.cx.turn, &mut self.cx.up, &mut self.cx.hooks) {
            hot_copies::go_on(&self.cx.turn, &mut self.cx.down, client);
        }
        if let Some(counts) = self.cx.hooks.telemetry.ended(self.cx.turn.now_us()) {
            let ends = counts.ends && self.cx.turn.index() == 0;
            self.cx.turn.shared().board.take(counts, ends);
        }
        self.check_memory_at_tick();
        if self.cx.turn.now_us() >= self.next_client_tick_us {
            self.next_client_tick_us = self.cx.turn.now_us() + CLIENT_TICK_US;
            self.tick_clients();
            self.tick_memory();
            recount(&mut self.cx.down);
            publish_slow(&self.cx.turn, &self.cx.up);
        }
    }

    /// Sends held commands to members of a cluster, and has the map read while commands wait for a member.
    fn tick_redirects(&mut self) {
        if self.cx.turn.routing().topology.is_of_cluster() {
            self.redirects.tick_members(&self.cx.turn, &mut self.cx.up);
            redirect::leave_silent_replicas(&self.cx.turn, &mut self.cx.up);
        }
        if !self.redirects.is_any() && !self.cx.up.outages().any() {
            return;
        }
        for redirect::Expired { pending, error } in self.redirects.tick(&mut self.cx) {
            let origin = Origin { link: Handle::NONE, node: NodeId(0), lane: None, is_up: false };
            self.fail_pending(origin, pending, &error);
        }
        if self.redirects.holds_any() || self.cx.up.outages().any() {
            self.cx.turn.shared().request_map();
        }
    }

    fn tick_clients(&mut self) {
        let now_us = self.cx.turn.now_us();
        let idle_us = self.cx.turn.routing().live.client_idle_timeout.map(|t| t.as_micros() as u64);
        let login_us = self.cx.turn.routing().live.login_timeout.map(|t| t.as_micros() as u64);
        let handshake_us = self.cx.turn.routing().live.handshake_timeout.as_micros() as u64;
        let (soft, soft_us) = (
            self.cx.turn.routing().live.push_soft_limit,
            self.cx.turn.routing().live.push_soft_time.as_micros() as u64,
        );
        let (mut late, mut behind, mut first) = (Vec::new(), Vec::new(), Vec::new());
        for (handle, client) in self.cx.down.iter() {
            if let Some(still) = client.socket().is_still_behind(soft, soft_us, now_us) {
                behind.push((handle, still));
            }
            let (stalled, quiet_us) = (client.waits().stalled_us(now_us), client.socket().quiet_us(now_us));
            let overdue = if client.stall() == Stall::Blocked {
                false
            } else if client.held().is_some() {
                quiet_us > LARGE_TIMEOUT_US
            } else if client.in_flight() > 0
                || matches!(client.stall(), Stall::Paused | Stall::SourceOps)
                || Stall::LISTED.contains(&client.stall())
            {
                false
            } else if client.input().is_closing() || client.input().has_ended() {
                quiet_us > CLOSING_TIMEOUT_US
            } else if client.socket().is_handshaking() {
                client.identity().age_us(now_us) > handshake_us
            } else {
                // Subscribers are idle by nature, as in Redis.
                client.subscribed() == 0 && !client.is_monitor() && idle_us.is_some_and(|idle| quiet_us > idle)
            };
            let stranger_us = client.identity().stranger_us(now_us);
            let overdue = overdue || login_us.zip(stranger_us).is_some_and(|(login, stranger)| stranger > login);
            // Only logged-in clients may write a whole pipeline before they read.
            let fills =
                client.stall() == Stall::Output && stalled > OUTPUT_TIMEOUT_US && client.identity().is_stranger();
            if fills {
                self.cx.turn.counters().cut_output.add(1);
            }
            if writes_before_it_reads(client) && stalled > OUTPUT_TIMEOUT_US {
                first.push(handle);
            }
            if overdue || fills {
                late.push((handle, true));
            } else if (client.stall() == Stall::Learning && stalled > LEARNING_TIMEOUT_US)
                || (client.stall() == Stall::Output && stalled > OUTPUT_TIMEOUT_US)
            {
                late.push((handle, false));
            }
        }
        for (handle, still) in behind {
            if still {
                cut_subscriber(&self.cx.turn, &mut self.cx.down, handle, "push-soft-limit");
            } else if let Some(client) = self.cx.down.get_mut(handle) {
                client.socket_mut().catches_up();
            }
        }
        for handle in first {
            // Otherwise its large reply and its next commands would wait for each other.
            let held = self.cx.down.get_mut(handle).and_then(|client| {
                client.socket_mut().set_writes_first(true);
                client.held()
            });
            held.into_iter().for_each(|held| self.cx.up.unpause(held));
        }
        for (handle, close) in late {
            if close {
                if self.cx.down.get(handle).is_some_and(|client| client.socket().is_handshaking()) {
                    handshake_failed(
                        &self.cx.turn,
                        &mut self.cx.down,
                        handle,
                        "it did not finish within the handshake timeout",
                    );
                }
                self.cx.down.close_client(&self.cx.turn, handle);
            } else if let Some(client) = self.cx.down.get_mut(handle) {
                let writes_first = client.stall() == Stall::Output;
                client.socket_mut().set_writes_first(writes_first);
                self.cx.down.unstall(&self.cx.turn, handle);
            }
        }
        self.large_keys.forget_old(self.cx.turn.now_us());
        self.cx.up.tick_pools(&self.cx.turn);
        self.gathers.tick_timeout(&mut self.cx);
        tick_blocked(&self.cx.turn, &mut self.cx.up);
        self.tracking.push_to_blocked_clients(&self.cx.turn, &mut self.cx.down);
    }

    /// During a drain: closes clients without pending replies. Returns whether all are gone.
    fn drained(&mut self) -> bool {
        self.cx.down.door.close(self.cx.turn.poll());
        let stop = self.cx.turn.shared().stop.load(Ordering::Relaxed);
        for handle in self.cx.down.handles() {
            let Some(client) = self.cx.down.get(handle) else { continue };
            if (client.stall() == Stall::Blocked || client.is_reissued()) && !stop {
                end_wait(&mut self.cx, handle);
                continue;
            }
            // A client that waits for a fill is answered soon.
            let idle = client.in_flight() == 0
                && client.unsent() == 0
                && client.state::<Upload>().is_none()
                && client.stall() != Stall::Fill;
            if idle || stop {
                if !idle {
                    self.cx.turn.shared().cut.fetch_add(1, Ordering::Relaxed);
                }
                self.cx.down.close_client(&self.cx.turn, handle);
            }
        }
        self.settle_events();
        self.cx.down.len() == 0
    }

    fn on_message(&mut self, message: Message) {
        match message {
            Message::Login { client, attempt } => on_login(&self.cx.turn, &mut self.cx.down, client, attempt),
            Message::LibrariesChecked { client, number, result } => {
                on_libraries_checked(&self.cx.turn, &mut self.cx.down, client, number, result)
            }
            Message::Evict => self.on_evict_request(),
            Message::CloseUnused { node, lane } => self.cx.up.pool(&self.cx.turn, node, lane).make_room(),
            Message::ConnectionAvailable { node } => self.cx.up.room_was_made(&self.cx.turn, node),
            Message::Committed => look_again(&self.cx.turn, &mut self.cx.down, false),
            Message::ColocateAnswer { client, number, refusal } => {
                on_colocation(&self.cx.turn, &mut self.cx.down, client, number, refusal)
            }
            Message::WaitTurn { client } => on_turn(&mut self.cx.down, client),
            Message::Recall { client } => on_reissue(&mut self.cx, client),
            Message::Refused { move_id, keys, error } => {
                refuse_moving(&self.cx.turn, &mut self.cx.down, move_id, keys.as_deref(), &error)
            }
            Message::Quiesced { move_id, ticket } => on_quiet(&self.cx.turn, &mut self.cx.down, move_id, ticket),
            Message::Answer { gather, part, reply } => self.gathers.gather_part(&mut self.cx, gather, part, &reply),
            Message::List { filter, from, gather, part } => {
                let reply = list_clients(&self.cx.turn, &self.cx.up, &self.cx.down, &self.cx.hooks, &filter);
                self.cx.turn.shared().mailboxes[from].send(Message::Answer { gather, part, reply });
            }
            Message::Unblock { id, error, from, gather, part } => {
                unblock_client(&mut self.cx, id, error, Asker { from, gather, part })
            }
            Message::Refresh { from, gather, part, settled } => {
                // A snapshot changed before this message was sent must be in force at the reply.
                if self.cx.turn.is_outdated() {
                    self.adopt_routing();
                }
                refresh(
                    &self.cx.turn,
                    &self.cx.up,
                    &mut self.cx.down,
                    &mut self.monitors,
                    &mut self.pauses,
                    from,
                    gather,
                    part,
                    settled,
                );
            }
            Message::Lines(lines) => self.monitors.show(&self.cx.turn, &mut self.cx.down, &lines),
            Message::Find { id, from, gather, part } => {
                let reply = find_client(&self.cx.turn, &self.cx.down, id);
                self.cx.turn.shared().mailboxes[from].send(Message::Answer { gather, part, reply });
            }
            Message::Invalidate { to, from, source, keys } => {
                on_redirected(&self.cx.turn, &mut self.cx.down, to, from, source, keys.as_deref())
            }
            Message::RedirectBroken { source } => on_redirect_broken(&self.cx.turn, &mut self.cx.down, source),
            Message::Listeners { done } => {
                let (turn, door) = (&self.cx.turn, &mut self.cx.down.door);
                let adopted = turn.shared().listening.of_worker(turn.index());
                // The receiver is gone if it has waited for too long.
                let _ = done.send(adopted.and_then(|listeners| door.adopt(listeners, turn.poll())));
            }
            #[cfg(test)]
            Message::Panic => panic!("requested by a test"),
            Message::Kill { filter, from, gather, part } => {
                let killer = self.gathers.get(gather).filter(|_| from == self.cx.turn.index()).map(Gather::client);
                let reply = kill_clients(&self.cx.turn, &mut self.cx.down, &filter, killer);
                self.cx.turn.shared().mailboxes[from].send(Message::Answer { gather, part, reply });
            }
        }
    }
}

/// Maximum time that a client with an unknown command waits for the nodes' command lists.
const LEARNING_TIMEOUT_US: u64 = 1_000_000;

/// Time after which a closing client that neither reads nor disconnects is dropped.
const CLOSING_TIMEOUT_US: u64 = 10_000_000;

/// Time after which a client that holds a connection for large values without traffic is disconnected, because others
/// wait for it.
const LARGE_TIMEOUT_US: u64 = 60_000_000;

/// Whether the client is stalled with more input, and does not read the large reply on its exclusive connection.
fn writes_before_it_reads(client: &Client) -> bool {
    let has_more = client.input().is_readable() || client.input().has_unparsed();
    client.held().is_some() && client.is_stalled() && has_more && client.unsent() > 0 && !client.socket().writes_first()
}
