//! Large values: requests and replies that travel on a connection of their own, piece by piece.
//!
//! A shared connection cannot carry them: a client that sends or reads 512 MB slowly would hold up everybody behind it. So
//! - a request with a large argument is passed on as it comes, over a connection that its client has alone, with a bound on what is
//!   under way;
//! - a read whose reply turns out to be large is thrown away on the shared connection (the node sends at full speed, so nobody waits
//!   for the client) and asked again on a connection of its own; the key is remembered, and goes there at once the next time;
//! - a large reply to a command that must not be asked twice is passed on as it comes, up to the client's output limit.

use switchyard_policy::routing::{Route, route};
use switchyard_policy::topology::NodeId;
use switchyard_resp::command::{Command, Flags, Handling, Lookup};
use switchyard_resp::encode;
use switchyard_resp::request::{Args, Follower, Limits, ProtocolError, Scan, Scanner};

use super::dispatch::Flow;
use super::downstream::{Repeat, Upload};
use super::upstream::{Lane, Link, Pending, Phase, Purpose};
use super::{OUTPUT_HIGH, Stall, Worker};
use crate::shared::Plan;
use crate::slab::Handle;

/// Bytes of an upload that may wait for the node's socket; then the client is not read from.
const UPLOAD_HIGH: usize = 256 << 10;

/// It is read from again below this.
pub(super) const UPLOAD_LOW: usize = 64 << 10;

/// How long keys with large values are remembered.
const MEMORY_US: u64 = 60_000_000;

pub(super) enum Acquired {
    Link(Handle),
    /// The client waits in the queue.
    Wait,
    Refused(String),
}

impl Worker {
    /// A command whose next argument is large and not all there: `header` has the arguments before it. Starts to pass it on.
    pub(super) fn dispatch_large(&mut self, plan: &Plan, handle: Handle, header: &[u8], args: &Args<'_>, len: usize, after: usize) -> Flow {
        let Lookup::Command(command) = plan.commands.find(args) else { return Flow::Buffer };
        if command.handling != Handling::Keyed || command.flags.has(Flags::BLOCKING) || !command.arity_ok(args.len()) {
            return Flow::Buffer;
        }
        let mut keys = std::mem::take(&mut self.keys);
        keys.clear();
        let found = command.find_keys(args, &mut keys);
        let target = route(&plan.topology, keys.iter().filter_map(|k| args.get(*k as usize)));
        self.keys = keys;
        let (Ok(()), Route::Owner(_, node)) = (found, target) else { return Flow::Buffer };
        let Some(client) = self.clients.get_mut(handle) else { return Flow::Close };
        if !client.may_take(Lane::Large) || self.holds_large_elsewhere(handle, node) {
            return Flow::Stall(Stall::Barrier);
        }
        let class = command.class() as u8;
        match self.acquire_large(handle, node) {
            Acquired::Wait => return Flow::Stall(Stall::Large),
            Acquired::Refused(error) => {
                let mut bytes = Vec::new();
                encode::error(&mut bytes, &error);
                self.answer(handle, class, &bytes);
                if let Some(client) = self.clients.get_mut(handle) {
                    client.upload = Some(Box::new(Upload { link: None, follower: Follower::new(len, after) }));
                }
            }
            Acquired::Link(link) => {
                self.counters.large.add(1);
                self.push_large(handle, link, header, class, None, true);
                if let Some(client) = self.clients.get_mut(handle) {
                    client.upload = Some(Box::new(Upload { link: Some(link), follower: Follower::new(len, after) }));
                }
            }
        }
        self.counters.commands[usize::from(class)].add(1);
        Flow::Next
    }

    /// Passes on the next bytes of an upload; returns how many, and whether it is complete.
    pub(super) fn upload(&mut self, handle: Handle, plan: &Plan, bytes: &[u8]) -> Result<(usize, bool), ProtocolError> {
        let Some(link) = self.clients.get(handle).and_then(|c| c.upload.as_ref()).map(|u| u.link) else { return Ok((0, false)) };
        if let Some(link) = link
            && self.link_is_full(link, handle, UPLOAD_HIGH)
        {
            self.stall(handle, Stall::Upstream);
            return Ok((0, false));
        }
        let Some(client) = self.clients.get_mut(handle) else { return Ok((0, false)) };
        let Some(upload) = client.upload.as_deref_mut() else { return Ok((0, false)) };
        let limits = Limits { argument_max: plan.live.argument_max, large: usize::MAX, authenticated: true };
        let (taken, done) = upload.follower.follow(bytes, &limits)?;
        if done {
            client.upload = None;
        }
        if let Some(link) = link.and_then(|l| self.links.get_mut(l)) {
            link.out.extend_from_slice(&bytes[..taken]);
            if done {
                link.uploading = false;
                if let Some(pending) = link.pending.back_mut() {
                    pending.sent_us = self.now_us as u32;
                }
            }
        }
        if let Some(link) = link {
            self.mark_link(link);
        }
        Ok((taken, done))
    }

    /// Whether a read of this key is better sent on a connection of its own right away.
    #[inline]
    pub(super) fn is_known_large(&self, command: &Command, key: &[u8]) -> bool {
        self.large_keys_known > 0 && command.flags.has(Flags::READONLY) && {
            let hash = key_hash(key);
            self.large_keys[(hash % self.large_keys.len() as u64) as usize] == hash
        }
    }

    /// Sends a whole request on a connection of the client's own.
    pub(super) fn forward_large(&mut self, handle: Handle, node: NodeId, raw: &[u8], class: u8) -> Flow {
        let Some(client) = self.clients.get_mut(handle) else { return Flow::Close };
        if !client.may_take(Lane::Large) || self.holds_large_elsewhere(handle, node) {
            return Flow::Stall(Stall::Barrier);
        }
        match self.acquire_large(handle, node) {
            Acquired::Wait => return Flow::Stall(Stall::Large),
            Acquired::Refused(error) => {
                let mut bytes = Vec::new();
                encode::error(&mut bytes, &error);
                self.answer(handle, class, &bytes);
            }
            Acquired::Link(link) => {
                self.counters.large.add(1);
                self.push_large(handle, link, raw, class, None, false);
            }
        }
        Flow::Next
    }

    /// Whether commands of the client are under way on a connection for large values to another node. It has one such connection at a
    /// time: of two, one would carry a reply that is not yet due and be paused with nobody to go on with it, and a third command to the
    /// first node would take a third connection and overtake what is under way on the first.
    fn holds_large_elsewhere(&self, handle: Handle, node: NodeId) -> bool {
        self.clients.get(handle).is_some_and(|client| {
            client.in_flight() > 0 && client.large.and_then(|held| self.links.get(held)).is_some_and(|link| link.node != node)
        })
    }

    /// Puts a request, or its beginning, on the connection that `handle` has acquired. `seq` is that of a command already owed.
    fn push_large(&mut self, handle: Handle, link_handle: Handle, request: &[u8], class: u8, seq: Option<u32>, uploading: bool) {
        let epoch = self.plan.topology.epoch() as u32;
        let Some(client) = self.clients.get_mut(handle) else { return };
        let seq = seq.unwrap_or_else(|| client.owe(self.now_us, class));
        client.large = Some(link_handle);
        let Some(link) = self.links.get_mut(link_handle) else { return };
        link.holder = handle;
        link.uploading = uploading;
        let sent_us = self.now_us as u32;
        let pending =
            Pending { who: handle, seq, len: 0, sent_us, epoch, purpose: Purpose::Client, class, repeatable: false, by_sha: false };
        link.push(request, client.database, pending);
        self.mark_link(link_handle);
    }

    /// A free connection for large values, if there is one; else the client is put into the queue for one.
    pub(super) fn acquire_large(&mut self, handle: Handle, node: NodeId) -> Acquired {
        let Some(client) = self.clients.get_mut(handle) else { return Acquired::Wait };
        let resp3 = client.resp3;
        if std::mem::take(&mut client.large_refused) {
            return Acquired::Refused(match self.shared.with_facts(node, |f| f.failure.is_some()) {
                true => self.down_text(node),
                false => format!(
                    "NODEBUSY {}: no connection for large values became free within {:?} (large-connections-max {})",
                    self.node_name(node),
                    self.plan.live.command_timeout,
                    self.plan.live.large_connections_max
                ),
            });
        }
        if let Some(reserved) = client.large
            && self.links.get(reserved).is_some_and(|l| l.node == node && l.phase == Phase::Up && l.holder == handle)
        {
            return Acquired::Link(reserved);
        }
        if self.shared.with_facts(node, |f| f.failure.is_some()) {
            return Acquired::Refused(self.down_text(node));
        }
        let large = self.routes[node.index()].large.clone();
        let is_free = |l: &Link| l.phase == Phase::Up && l.holder == Handle::NONE && l.pending.is_empty();
        let free: Vec<Handle> = large.iter().copied().filter(|h| self.links.get(*h).is_some_and(|l| is_free(l))).collect();
        if let Some(link) = free.iter().copied().find(|h| self.links.get(*h).is_some_and(|l| l.resp3 == resp3)) {
            return Acquired::Link(link);
        }
        let mut open = large.len();
        if open >= self.plan.live.large_connections_max
            && let Some(other) = free.first()
        {
            // Free, but it speaks the other protocol.
            self.drop_link(*other);
            open -= 1;
        }
        self.routes[node.index()].large_waiters.push_back(handle);
        // Before connecting: an attempt that fails at once wakes the queue.
        self.stall(handle, Stall::Large);
        if open < self.plan.live.large_connections_max {
            let link = Link::new(node, Lane::Large, resp3, self.plan.live.database, self.counters.node(node), self.now_us);
            let link = self.links.insert(Box::new(link));
            self.routes[node.index()].large.push(link);
            self.connect(link);
        }
        Acquired::Wait
    }

    /// Gives a connection that has become free to the first client in the queue that can use it.
    pub(super) fn wake_large_waiter(&mut self, node: NodeId) {
        let is_down = self.shared.with_facts(node, |f| f.failure.is_some());
        let Some(route) = self.routes.get_mut(node.index()) else { return };
        let mut kept = std::collections::VecDeque::new();
        let waiters = std::mem::take(&mut route.large_waiters);
        let large = route.large.clone();
        for waiter in waiters {
            let Some(client) = self.clients.get_mut(waiter).filter(|c| c.stall == Stall::Large) else { continue };
            let free = large.iter().copied().find(|h| {
                self.links
                    .get(*h)
                    .is_some_and(|l| l.phase == Phase::Up && l.holder == Handle::NONE && l.pending.is_empty() && l.resp3 == client.resp3)
            });
            if let Some(free) = free {
                client.large = Some(free);
                if let Some(link) = self.links.get_mut(free) {
                    link.holder = waiter;
                }
                self.unstall(waiter);
            } else if is_down {
                client.large_refused = true;
                self.unstall(waiter);
            } else if large.is_empty() {
                // Their connection is gone: they ask for a new one.
                self.unstall(waiter);
            } else {
                kept.push_back(waiter);
            }
        }
        if let Some(route) = self.routes.get_mut(node.index()) {
            kept.append(&mut route.large_waiters);
            route.large_waiters = kept;
        }
    }

    /// The reply of a connection for large values is complete: it is free again.
    pub(super) fn after_large_reply(&mut self, handle: Handle, holder: Handle) {
        let Some(link) = self.links.get_mut(handle) else { return };
        if link.lane != Lane::Large || !link.pending.is_empty() {
            return;
        }
        link.holder = Handle::NONE;
        link.paused = false;
        link.idle_since_us = self.now_us;
        let node = link.node;
        if let Some(client) = self.clients.get_mut(holder)
            && client.large == Some(handle)
        {
            client.large = None;
        }
        self.wake_large_waiter(node);
    }

    /// The client that held the connection is gone.
    pub(super) fn abandon_large(&mut self, handle: Handle) {
        let Some(link) = self.links.get_mut(handle) else { return };
        let node = link.node;
        if link.uploading {
            // The node has half a command: without the connection it never executes it.
            self.drop_link(handle);
            self.wake_large_waiter(node);
        } else if link.pending.is_empty() {
            self.after_large_reply(handle, Handle::NONE);
        } else if link.paused || link.unsent() > 0 || !matches!(link.body, super::upstream::Body::Whole(_)) {
            self.break_link(handle, "the client left in the middle of a large value");
        }
        // Else the reply is awaited: what was sent is in flight until then.
    }

    /// Passes on a piece of the reply at the head of a connection.
    pub(super) fn pass_piece(&mut self, handle: Handle, piece: &[u8]) {
        let Some(link) = self.links.get(handle) else { return };
        let Some(pending) = link.pending.front().copied() else { return };
        let large = link.lane == Lane::Large;
        let Some(client) = self.clients.get_mut(pending.who) else { return };
        client.stream(piece);
        let unsent = client.unsent();
        if unsent < OUTPUT_HIGH / 4 {
            if !client.dirty {
                client.dirty = true;
                self.dirty_clients.push(pending.who);
            }
            return;
        }
        self.flush_client(pending.who);
        let behind = self.clients.get(pending.who).is_some_and(|c| c.unsent() >= OUTPUT_HIGH / 4);
        if large
            && behind
            && let Some(link) = self.links.get_mut(handle)
        {
            link.paused = true;
        }
    }

    pub(super) fn unpause_link(&mut self, handle: Handle) {
        if let Some(link) = self.links.get_mut(handle)
            && std::mem::take(&mut link.paused)
        {
            self.unread.push(crate::poll::Token::Link(handle));
        }
    }

    /// A read's reply on a shared connection is large: asks it again on a connection of its own. Only where nothing of the same client
    /// is behind it, because that would then overtake it.
    pub(super) fn repeat_on_large(&mut self, handle: Handle, pending: Pending) -> bool {
        let Some(link) = self.links.get(handle) else { return false };
        let node = link.node;
        let request = link.head_request().to_vec();
        let Some(client) = self.clients.get_mut(pending.who) else { return false };
        if !client.is_last(pending.seq) || client.stall == Stall::Large || client.upload.is_some() {
            return false;
        }
        client.repeat = Some(Box::new(Repeat { node, seq: pending.seq, class: pending.class, request }));
        // Commands that follow wait for it.
        client.lane = Lane::Large;
        self.remember_large(pending.who);
        let who = pending.who;
        // Whatever else the client waits for: a barrier or a full pipeline ends only with this very reply, so nothing else would start it.
        self.run_repeat(who);
        true
    }

    /// Starts the repeat of a read, as soon as there is a connection for it; false while the client waits for one.
    pub(super) fn run_repeat(&mut self, handle: Handle) -> bool {
        let Some(repeat) = self.clients.get_mut(handle).and_then(|c| c.repeat.take()) else { return true };
        match self.acquire_large(handle, repeat.node) {
            Acquired::Wait => {
                if let Some(client) = self.clients.get_mut(handle) {
                    client.repeat = Some(repeat);
                }
                return false;
            }
            Acquired::Refused(error) => {
                let mut bytes = Vec::new();
                encode::error(&mut bytes, &error);
                self.deliver(handle, repeat.seq, &bytes);
            }
            Acquired::Link(link) => {
                self.counters.large.add(1);
                self.push_large(handle, link, &repeat.request, repeat.class, Some(repeat.seq), false);
            }
        }
        true
    }

    fn remember_large(&mut self, handle: Handle) {
        let Some(request) = self.clients.get(handle).and_then(|c| c.repeat.as_ref()).map(|r| &r.request) else { return };
        let mut scanner = Scanner::default();
        let limits = Limits { argument_max: usize::MAX >> 1, large: usize::MAX, authenticated: true };
        if !matches!(scanner.scan(request, &limits), Ok(Scan::Complete { .. })) {
            return;
        }
        let args = scanner.args(request);
        let Lookup::Command(command) = self.plan.commands.find(&args) else { return };
        let mut keys = Vec::new();
        if command.find_keys(&args, &mut keys).is_ok()
            && let Some(key) = keys.first().and_then(|k| args.get(*k as usize))
        {
            let hash = key_hash(key);
            let place = (hash % self.large_keys.len() as u64) as usize;
            self.large_keys[place] = hash;
            self.large_keys_known += 1;
        }
    }

    pub(super) fn tick_large(&mut self) {
        let patience_us = self.plan.live.command_timeout.as_micros() as u64;
        let mut late = Vec::new();
        for route in &mut self.routes {
            route.large_waiters.retain(|waiter| {
                let Some(client) = self.clients.get(*waiter).filter(|c| c.stall == Stall::Large) else { return false };
                let is_late = self.now_us.saturating_sub(client.stalled_at_us) > patience_us;
                if is_late {
                    late.push(*waiter);
                }
                !is_late
            });
        }
        for waiter in late {
            if let Some(client) = self.clients.get_mut(waiter) {
                client.large_refused = true;
            }
            self.unstall(waiter);
        }
        if self.large_keys_known > 0 && self.now_us % MEMORY_US < super::TICK.as_micros() as u64 {
            self.large_keys.fill(0);
            self.large_keys_known = 0;
        }
    }
}

fn key_hash(key: &[u8]) -> u64 {
    rapidhash::v3::rapidhash_v3(key).max(1)
}
