//! The node side: tracking at nodes, and delivery of their invalidations to clients.

use switchyard_policy::migration::is_temporary;
use switchyard_policy::topology::NodeId;
use switchyard_resp::encode;
use switchyard_resp::reply;
use tracing::warn;

use super::{Place, Request, Tracked, Tracking};
use crate::shared::Message;
use crate::slab::Handle;
use crate::worker::downstreams::Downstreams;
use crate::worker::downstreams::waits::Stall;
use crate::worker::pubsub::clients::cut_subscriber;
use crate::worker::turn::Turn;
use crate::worker::upstreams::Upstreams;
use crate::worker::upstreams::connect::hopeful_link;
use crate::worker::upstreams::link::Phase;
use crate::worker::upstreams::pending::Purpose;

/// Start of an invalidation, before the keys or the null.
pub(super) const INVALIDATE: &[u8] = b">2\r\n$10\r\ninvalidate\r\n";

/// Start for a RESP2 client that other clients redirect to.
const INVALIDATE_MESSAGE: &[u8] = b"*3\r\n$7\r\nmessage\r\n$20\r\n__redis__:invalidate\r\n";

impl Tracking {
    // ---- outcomes ----

    /// Handles a node's answer, or a timeout (then `answer` is the error for its clients).
    pub(in crate::worker) fn on_tracking_answer(
        &mut self,
        turn: &Turn,
        down: &mut Downstreams,
        node: NodeId,
        generation: u32,
        answer: &[u8],
    ) {
        if generation != self.generation || !self.is_on() {
            return;
        }
        if reply::is_error(answer) {
            let error = String::from_utf8_lossy(reply::text(answer).unwrap_or_default()).into_owned();
            self.set_tracking_place(node, Place::Refused(error.into()));
        } else {
            let widened = self.places.iter().any(|(n, p)| *n == node && *p == Place::Widening);
            self.set_tracking_place(node, Place::InForce);
            if !widened {
                // Clients that tracked before were not covered for a moment.
                self.invalidate_all(turn, down);
            }
        }
        self.settle_tracking(turn, down);
    }

    /// Answers the TRACKING ON of clients, once all nodes have an outcome.
    pub(in crate::worker) fn settle_tracking(&mut self, turn: &Turn, down: &mut Downstreams) {
        // They are settled when their requests have been performed.
        if !self.requests.is_empty() {
            return;
        }
        let places = &self.places;
        if places.iter().any(|(_, p)| matches!(p, Place::Requested | Place::Widening)) {
            return;
        }
        let refused =
            places.iter().find_map(|(_, p)| if let Place::Refused(e) = p { Some(e.to_string()) } else { None });
        let first_down =
            places.iter().all(|(_, p)| *p == Place::Down).then(|| places.first().map(|(n, _)| *n)).flatten();
        let failed = refused.or_else(|| first_down.map(|node| turn.down_text(node)));
        for handle in self.clients.clone() {
            let Some(client) = down.get_mut(handle) else { continue };
            let Some(tracked) = client.state_mut::<Tracked>() else { continue };
            let Some(seq) = tracked.pending.take() else {
                if failed.is_some() && self.places.iter().any(|(_, p)| matches!(p, Place::Refused(_))) {
                    // It relies on tracking that is no longer available. A disconnected client drops its cache.
                    warn!(client = client.identity().id(), "closing a client whose keys can no longer be tracked");
                    down.close_client(turn, handle);
                }
                continue;
            };
            match &failed {
                Some(error) => {
                    self.end_tracking(turn, down, handle);
                    self.refuse_tracking(turn, down, handle, seq, error);
                }
                None => down.deliver(turn, handle, seq, b"+OK\r\n"),
            }
        }
    }

    // ---- the connections ----

    pub(in crate::worker) fn link_up(
        &mut self,
        turn: &Turn,
        up: &mut Upstreams,
        down: &mut Downstreams,
        link: Handle,
        node: NodeId,
    ) {
        if self.is_on() && self.places.iter().any(|(n, _)| *n == node) {
            self.set_tracking_place(node, Place::Requested);
            self.send_tracking(turn, up, link, node);
            self.settle_tracking(turn, down);
        }
    }

    pub(in crate::worker) fn link_failed(&mut self, turn: &Turn, down: &mut Downstreams, node: NodeId) {
        if self.places.iter().any(|(n, _)| *n == node) {
            self.set_tracking_place(node, Place::Down);
            self.settle_tracking(turn, down);
        }
    }

    /// Tracks at all nodes of a new topology.
    pub(in crate::worker) fn update_places(&mut self, turn: &Turn, up: &mut Upstreams) {
        if !self.is_on() {
            return;
        }
        let routing = turn.routing();
        self.places.retain(|(node, _)| routing.topology.node(*node).is_some());
        for node in routing.topology.nodes() {
            if !self.places.iter().any(|(n, _)| *n == node.id) {
                self.request_tracking(turn, up, node.id, &[]);
            }
        }
    }

    /// Performs the next recorded request to nodes. Returns whether there was one.
    pub(in crate::worker) fn perform(&mut self, turn: &Turn, up: &mut Upstreams) -> bool {
        match self.requests.pop_front() {
            Some(Request::Widen(prefixes)) => self.widen_tracking(turn, up, &prefixes),
            Some(Request::Stop(nodes)) => {
                for node in nodes {
                    if let Some(link) = up.links().pubsub(node) {
                        up.push_own(turn, link, &[b"CLIENT", b"TRACKING", b"OFF"], Purpose::Discarded, 0);
                    }
                }
            }
            None => return false,
        }
        true
    }
}

/// Sends an invalidation to a client or its redirect target, or holds it for now. `keys`: an array of keys; `None`:
/// all.
fn invalidate(turn: &Turn, down: &mut Downstreams, handle: Handle, keys: Option<&[u8]>) {
    let Some(client) = down.get_mut(handle) else { return };
    let ordered = client.in_flight() > 0 || client.replies().is_streaming();
    let (resp3, last) = (client.resp3(), client.replies().last());
    let Some(tracked) = client.state_mut::<Tracked>() else { return };
    let redirects = tracked.options.redirect.is_some();
    if !redirects && !resp3 {
        return; // RESP2 has no place for it, and Redis does not send it either
    }
    turn.counters().invalidations.add(1);
    let is_own = || {
        keys.and_then(|k| reply::elements(k).next()).and_then(reply::text).is_some_and(|key| tracked.is_changing(key))
    };
    if !ordered || redirects && !is_own() {
        push_invalidation(turn, down, handle, keys);
        return;
    }
    tracked.held_bytes += keys.map_or(0, <[u8]>::len) + INVALIDATE.len();
    tracked.held.push_back((last, keys.map(Into::into)));
    if tracked.held_bytes > turn.routing().live.push_limit {
        cut_subscriber(turn, down, handle, "push-limit");
    }
}

fn push_invalidation(turn: &Turn, down: &mut Downstreams, handle: Handle, keys: Option<&[u8]>) {
    let Some(tracked) = down.get(handle).and_then(|c| c.state::<Tracked>()) else { return };
    if let Some(redirect) = tracked.options.redirect {
        let message =
            Message::Invalidate { to: redirect.client, from: turn.index(), source: handle, keys: keys.map(Into::into) };
        turn.shared().mailboxes[redirect.worker].send(message);
        return;
    }
    let bytes = [INVALIDATE, keys.unwrap_or(b"_\r\n")].concat();
    down.push(turn, handle, &bytes);
}

/// Sends invalidations that had to wait for replies which are now complete.
pub(in crate::worker) fn release_invalidations(turn: &Turn, down: &mut Downstreams, handle: Handle) {
    loop {
        let Some(client) = down.get_mut(handle) else { return };
        if client.replies().is_streaming() {
            return;
        }
        let first = client.replies().first();
        let Some(tracked) = client.state_mut::<Tracked>() else { return };
        while tracked.own.front().is_some_and(|write| write.is_answered(first)) {
            tracked.own.pop_front(); // its reply proved nothing
        }
        let due = tracked.held.front().is_some_and(|(behind, _)| (behind.wrapping_sub(first) as i32) < 0);
        if !due {
            return;
        }
        let Some((_, keys)) = tracked.held.pop_front() else { return };
        tracked.held_bytes -= keys.as_ref().map_or(0, Vec::len) + INVALIDATE.len();
        push_invalidation(turn, down, handle, keys.as_deref());
    }
}

/// Handles an invalidation for a client of this worker, redirected by `source` of worker `from`.
pub(in crate::worker) fn on_redirected(
    turn: &Turn,
    down: &mut Downstreams,
    to: Handle,
    from: usize,
    source: Handle,
    keys: Option<&[u8]>,
) {
    let Some(client) = down.get(to) else {
        turn.shared().mailboxes[from].send(Message::RedirectBroken { source });
        return;
    };
    let bytes = if client.resp3() {
        [INVALIDATE, keys.unwrap_or(b"_\r\n")].concat()
    } else if client.subscribed() > 0 {
        [INVALIDATE_MESSAGE, keys.unwrap_or(b"$-1\r\n")].concat()
    } else {
        return;
    };
    down.push(turn, to, &bytes);
}

/// The client that `source` redirects to is gone.
pub(in crate::worker) fn on_redirect_broken(turn: &Turn, down: &mut Downstreams, source: Handle) {
    let Some(client) = down.get_mut(source) else { return };
    let resp3 = client.resp3();
    let Some(redirect) = client.state_mut::<Tracked>().and_then(|t| t.options.redirect.as_mut()) else { return };
    redirect.broken = true;
    if resp3 {
        let mut bytes = b">2\r\n$21\r\ntracking-redir-broken\r\n".to_vec();
        encode::integer(&mut bytes, redirect.id as i64);
        down.push(turn, source, &bytes);
    }
}

impl Tracking {
    /// Tracks these prefixes at every node.
    pub(super) fn widen_tracking(&mut self, turn: &Turn, up: &mut Upstreams, prefixes: &[Box<[u8]>]) {
        let before = self.cover.clone();
        for prefix in prefixes {
            self.widen(prefix);
        }
        if self.cover != before {
            self.generation = self.generation.wrapping_add(1);
            let cover = &self.cover;
            // Prefixes can be added to those in force, as long as none of them becomes superfluous.
            let adds = before.iter().all(|prefix| cover.contains(prefix));
            let added: Vec<Box<[u8]>> =
                cover.iter().filter(|prefix| adds && !before.contains(prefix)).cloned().collect();
            let nodes: Vec<NodeId> = turn.routing().topology.nodes().map(|n| n.id).collect();
            for node in nodes {
                self.request_tracking(turn, up, node, &added);
            }
        }
    }

    /// Requests tracking from a node: only for the prefixes `added`, if it tracks the others already.
    fn request_tracking(&mut self, turn: &Turn, up: &mut Upstreams, node: NodeId, added: &[Box<[u8]>]) {
        let link = hopeful_link(turn, up, node);
        let (is_up, hopeful) = up.get(link).map_or((false, false), |l| (l.phase() == Phase::Up, l.takes_commands()));
        let in_force = self.places.iter().any(|(n, p)| *n == node && matches!(p, Place::InForce | Place::Widening));
        if is_up && in_force && !added.is_empty() {
            self.set_tracking_place(node, Place::Widening);
            self.send_prefixes(turn, up, link, added);
            return;
        }
        self.set_tracking_place(node, if hopeful { Place::Requested } else { Place::Down });
        if is_up {
            self.send_tracking(turn, up, link, node);
        }
    }

    fn set_tracking_place(&mut self, node: NodeId, place: Place) {
        match self.places.iter_mut().find(|(n, _)| *n == node) {
            Some((_, old)) => *old = place,
            None => self.places.push((node, place)),
        }
    }

    fn send_tracking(&mut self, turn: &Turn, up: &mut Upstreams, link: Handle, node: NodeId) {
        if up.get(link).is_some_and(|l| l.is_downgraded()) {
            let error = format!("ERR Switchyard cannot track keys: node {} does not speak RESP3", turn.node_name(node));
            self.set_tracking_place(node, Place::Refused(error.into()));
            return;
        }
        // Prefixes must not overlap: start over. Changes in between are covered by an invalidation of all.
        up.push_own(turn, link, &[b"CLIENT", b"TRACKING", b"OFF"], Purpose::Discarded, 0);
        let cover = self.cover.clone();
        self.send_prefixes(turn, up, link, &cover);
    }

    fn send_prefixes(&mut self, turn: &Turn, up: &mut Upstreams, link: Handle, prefixes: &[Box<[u8]>]) {
        let mut args: Vec<&[u8]> = vec![b"CLIENT", b"TRACKING", b"ON", b"BCAST"];
        for prefix in prefixes {
            args.push(b"PREFIX");
            args.push(prefix);
        }
        up.push_own(turn, link, &args, Purpose::Track, self.generation);
    }

    /// Stops tracking, because no client tracks any more.
    pub(super) fn stop_tracking(&mut self, turn: &Turn) {
        self.cover.clear();
        self.forget_reads();
        self.count_tracked(turn);
        self.generation = self.generation.wrapping_add(1);
        let nodes = std::mem::take(&mut self.places).into_iter().map(|(node, _)| node).collect();
        self.requests.push_back(Request::Stop(nodes));
    }

    pub(in crate::worker) fn tracking_link_lost(&mut self, turn: &Turn, down: &mut Downstreams, node: NodeId) {
        if self.places.iter().any(|(n, _)| *n == node) {
            self.set_tracking_place(node, Place::Requested);
            warn!(node = %turn.node_name(node), "lost the invalidation connection: clients get an invalidation of all keys");
            self.forget_reads();
            self.count_tracked(turn);
            self.invalidate_all(turn, down);
        }
    }

    /// Handles an invalidation by a node: an array of changed keys, or null for all.
    pub(in crate::worker) fn on_invalidation(&mut self, turn: &Turn, down: &mut Downstreams, what: &[u8]) {
        if reply::is_null(what) {
            self.forget_reads();
            self.count_tracked(turn);
            self.invalidate_all(turn, down);
            return;
        }
        let mut payload = Vec::new();
        for element in reply::elements(what) {
            let readers = reply::text(element).map(|key| self.take_readers(key)).unwrap_or_default();
            if readers.is_empty() {
                continue;
            }
            payload.clear();
            payload.extend_from_slice(b"*1\r\n");
            payload.extend_from_slice(element);
            for reader in readers {
                if down.get(reader).and_then(|c| c.state::<Tracked>()).is_some_and(|t| !t.options.bcast) {
                    invalidate(turn, down, reader, Some(&payload));
                }
            }
        }
        self.count_tracked(turn);
        for place in (0..self.clients.len()).rev() {
            let Some(&handle) = self.clients.get(place) else { continue };
            let Some(tracked) = down.get(handle).and_then(|c| c.state::<Tracked>()) else { continue };
            if !tracked.options.bcast || tracked.pending.is_some() {
                continue;
            }
            let wanted = |element: &&[u8]| {
                reply::text(element).is_some_and(|key| {
                    !is_temporary(key) && tracked.options.prefixes.iter().any(|prefix| key.starts_with(prefix))
                })
            };
            let count = reply::elements(what).filter(wanted).count();
            if count == 0 {
                continue;
            }
            payload.clear();
            encode::header(&mut payload, b'*', count);
            reply::elements(what).filter(wanted).for_each(|e| payload.extend_from_slice(e));
            invalidate(turn, down, handle, Some(&payload));
        }
    }

    /// Sends every tracking client an invalidation of all keys.
    pub(super) fn invalidate_all(&mut self, turn: &Turn, down: &mut Downstreams) {
        for handle in self.clients.clone() {
            let ready = down
                .get(handle)
                .and_then(|c| c.state::<Tracked>())
                .is_some_and(|t| t.pending.is_none() || t.was_tracking);
            if ready {
                invalidate(turn, down, handle, None);
            }
        }
    }

    /// Called periodically: a client that blocks at a node may do so without end, and its pending reply is no old
    /// value. It gets the invalidations held since the last call; newer ones may belong after a reply in transit.
    pub(in crate::worker) fn push_to_blocked_clients(&mut self, turn: &Turn, down: &mut Downstreams) {
        for handle in self.clients.clone() {
            let Some(client) = down.get_mut(handle) else { continue };
            let blocked = client.stall() == Stall::Blocked;
            let Some(tracked) = client.state_mut::<Tracked>() else { continue };
            let due = if blocked { tracked.held_long.min(tracked.held.len()) } else { 0 };
            let held: Vec<_> = tracked.held.drain(..due).collect();
            tracked.held_long = tracked.held.len();
            for (_, keys) in held {
                if let Some(tracked) = down.get_mut(handle).and_then(|c| c.state_mut::<Tracked>()) {
                    tracked.held_bytes -= keys.as_ref().map_or(0, Vec::len) + INVALIDATE.len();
                }
                push_invalidation(turn, down, handle, keys.as_deref());
            }
        }
    }
}

impl Tracking {
    /// Invalidates all keys of clients, because the table is too large.
    pub(in crate::worker) fn forget_tracked_reads(&mut self, turn: &Turn, down: &mut Downstreams) {
        self.forget_reads();
        self.invalidate_all(turn, down);
        self.count_tracked(turn);
    }

    /// Updates the counters of tracked keys.
    pub(super) fn count_tracked(&self, turn: &Turn) {
        turn.counters().tracked_keys.set(self.keys.len() as u64);
        turn.counters().tracked_reads.set(self.reads as u64);
    }

    /// Updates the counter of prefixes, when clients have started or stopped tracking.
    pub(super) fn count_prefixes(&self, turn: &Turn, down: &Downstreams) {
        let options = self.clients.iter().filter_map(|c| Some(&down.get(*c)?.state::<Tracked>()?.options));
        let mut prefixes: Vec<&[u8]> =
            options.filter(|o| o.bcast).flat_map(|o| o.prefixes.iter().map(|p| &**p)).collect();
        prefixes.sort_unstable();
        prefixes.dedup();
        turn.counters().tracked_prefixes.set(prefixes.len() as u64);
    }
}
