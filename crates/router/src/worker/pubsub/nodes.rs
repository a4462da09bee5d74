//! The node side: topics, their subscriptions at nodes, and replies and messages from there.

use std::collections::HashSet;
use std::sync::Arc;

use switchyard_policy::cluster::Redirect;
use switchyard_policy::migration::{Side, is_temporary};
use switchyard_policy::topology::{NodeId, Stage, Transit};
use switchyard_resp::{encode, reply};
use tracing::{info, warn};

use super::{Effect, Item, Kind, Place, Request, Standing, Subscriber, Topic, Topics};
use crate::settings::OnMissed;
use crate::shared::RoutingSnapshot;
use crate::slab::Handle;
use crate::worker::Worker;
use crate::worker::downstreams::Downstreams;
use crate::worker::keyed::CommandHooks;
use crate::worker::tracking::Tracking;
use crate::worker::turn::Turn;
use crate::worker::upstreams::Upstreams;
use crate::worker::upstreams::connect::hopeful_link;
use crate::worker::upstreams::link::Phase;
use crate::worker::upstreams::pending::Purpose;

impl Topics {
    // ---- requests ----

    /// Performs the next request.
    pub(in crate::worker) fn perform(&mut self, turn: &Turn, up: &mut Upstreams) -> Option<Effect> {
        match self.requests.pop_front()? {
            Request::Subscribe { topic, node } => {
                self.request_place(turn, up, topic, node);
                Some(Effect::Settle { topic })
            }
            Request::Unsubscribe { kind, name, node } => {
                if let Some(link) = up.links().pubsub(node) {
                    up.push_own(turn, link, &[kind.unsubscribe().as_bytes(), &name], Purpose::Discarded, 0);
                }
                None
            }
            Request::Ping { client, seq } => {
                let connections = ping_pubsub_links(turn, up, client, seq);
                Some(Effect::Pinged { client, seq, connections })
            }
            Request::Settle { topic } => Some(Effect::Settle { topic }),
        }
    }

    /// Applies the effect of a request. `is_served`: any node is up.
    pub(in crate::worker) fn apply(&mut self, turn: &Turn, down: &mut Downstreams, effect: Effect, is_served: bool) {
        match effect {
            Effect::Settle { topic } => self.settle(turn, down, topic, is_served),
            Effect::Pinged { client, seq, connections } => {
                if let Some(left) = unsubscribe_left(down, client, seq) {
                    *left = connections;
                }
                self.advance_subscriber(turn, down, client);
            }
        }
    }

    // ---- outcomes ----

    /// Reports the state of a topic to waiting commands, if it is settled.
    fn settle(&mut self, turn: &Turn, down: &mut Downstreams, handle: Handle, is_served: bool) {
        let Some(topic) = self.topics.get_mut(handle) else { return };
        let failed = match topic.standing() {
            Standing::Unsettled => return,
            Standing::InForce => None,
            // It comes into force with its node. Nothing is published there before.
            Standing::Down if topic.kind == Kind::Shard && is_served => None,
            Standing::Down => {
                // No node serves: as one server that is unreachable.
                let waiting = std::mem::take(&mut topic.waiting);
                for (client, _) in waiting {
                    down.flush_client(turn, client);
                    down.close_client(turn, client);
                }
                return;
            }
            Standing::Refused(error) => Some(error),
        };
        let waiting = std::mem::take(&mut topic.waiting);
        for (client, seq) in waiting {
            let Some(subscriber) = down.get_mut(client).and_then(|c| c.state_mut::<Subscriber>()) else { continue };
            for item in &mut subscriber.items {
                if let Item::Subscribe { seq: own, left, failed: fate, .. } = item
                    && *own == seq
                {
                    *left = left.saturating_sub(1);
                    if let Some(error) = &failed {
                        fate.get_or_insert_with(|| error.clone());
                    }
                }
            }
            self.advance_subscriber(turn, down, client);
        }
    }

    /// A node that does not answer a subscription in time counts as down, unless it answers later.
    pub(in crate::worker) fn subscribe_timed_out(&mut self, handle: Handle, node: NodeId) {
        let Some(topic) = self.topics.get_mut(handle) else { return };
        if let Some((_, place)) = topic.places.iter_mut().find(|(at, place)| *at == node && *place == Place::Requested)
        {
            *place = Place::Down;
        }
        self.requests.push_back(Request::Settle { topic: handle });
    }

    /// Handles the end of one of these PINGs, answered or not.
    pub(in crate::worker) fn unsubscribe_synced(
        &mut self,
        turn: &Turn,
        down: &mut Downstreams,
        client: Handle,
        seq: u32,
    ) {
        if let Some(left) = unsubscribe_left(down, client, seq) {
            *left = left.saturating_sub(1);
        }
        self.advance_subscriber(turn, down, client);
    }

    // ---- the connections ----

    pub(in crate::worker) fn link_up(&mut self, turn: &Turn, up: &mut Upstreams, link: Handle, node: NodeId) {
        let mut asked = 0;
        for topic in self.topics.handles() {
            let Some(t) = self.topics.get_mut(topic) else { continue };
            let Some((_, place)) = t.places.iter_mut().find(|(n, _)| *n == node) else { continue };
            *place = Place::Requested;
            asked += usize::from(!t.subscribers.is_empty());
            self.send_subscribe(turn, up, link, topic);
        }
        if asked > 0 {
            info!(node = %turn.node_name(node), subscriptions = asked, "restoring subscriptions at node");
        }
    }

    /// An attempt to connect failed: commands stop waiting for this node. In front of a cluster, another member takes its
    /// place.
    pub(in crate::worker) fn link_failed(&mut self, turn: &Turn, node: NodeId) {
        for topic in self.topics.handles() {
            let Some(t) = self.topics.get_mut(topic) else { continue };
            let Some(at) = t.places.iter().position(|(n, _)| *n == node) else { continue };
            t.places[at].1 = Place::Down;
            if turn.routing().topology.is_of_cluster() && t.kind != Kind::Shard && !t.name.starts_with(KEYSPACE) {
                let others = channel_nodes(turn, &t.name, &t.places, Some(node));
                if let [other] = others[..]
                    && other != node
                {
                    t.places[at] = (other, Place::Requested);
                    self.requests.push_back(Request::Subscribe { topic, node: other });
                }
            }
            self.requests.push_back(Request::Settle { topic });
        }
    }

    /// After the loss of a connection: messages there are missed until the subscriptions are in force again.
    pub(in crate::worker) fn link_lost(&mut self, turn: &Turn, down: &mut Downstreams, node: NodeId) {
        let mut lost = 0;
        let mut missing = Vec::new();
        let policy = turn.routing().live.on_missed;
        for handle in self.topics.handles() {
            let Some(topic) = self.topics.get_mut(handle) else { continue };
            let Some((_, place)) = topic.places.iter_mut().find(|(n, _)| *n == node) else { continue };
            let was_in_force = std::mem::replace(place, Place::Requested) == Place::InForce;
            let (kind, name) = (topic.kind, topic.name.clone());
            if was_in_force {
                lost += 1;
                missing.extend(topic.to_disconnect(policy));
                note_in_force(turn, kind, &name, node, false);
            }
        }
        // A removed node publishes nothing any more.
        let is_member = turn.routing().topology.node(node).is_some();
        let disconnected = if is_member { disconnect_subscribers(turn, down, missing) } else { 0 };
        if lost > 0 {
            turn.counters().subscriptions_lost.add(lost);
            warn!(
                node = %turn.node_name(node),
                subscriptions = lost,
                disconnected,
                "lost the connection for subscriptions: messages published at this node are missed until they are restored"
            );
        }
    }

    /// Updates the places of all topics after a change of nodes or slot owners.
    pub(in crate::worker) fn update_places(&mut self, turn: &Turn) {
        let routing = turn.routing();
        let all_know = all_workers_know(turn);
        self.has_old_places = false;
        for handle in self.topics.handles() {
            let Some(topic) = self.topics.get_mut(handle) else { continue };
            let (kind, name) = (topic.kind, topic.name.clone());
            let shard = kind == Kind::Shard;
            let nodes = if shard { shard_nodes(turn, &name) } else { channel_nodes(turn, &name, &topic.places, None) };
            // Until every worker has the new topology, messages may still be published at the old owner.
            let kept = |node: NodeId| !all_know && routing.topology.node(node).is_some();
            let has = |node: NodeId| topic.places.iter().any(|(at, _)| *at == node);
            self.has_old_places |= shard && topic.places.iter().any(|(at, _)| !nodes.contains(at) && kept(*at));
            let wanted = |node: NodeId| nodes.contains(&node);
            let missing: Vec<NodeId> =
                routing.topology.nodes().map(|n| n.id).filter(|n| wanted(*n) && !has(*n)).collect();
            let left: Vec<(NodeId, Place)> =
                topic.places.extract_if(.., |(node, _)| !(wanted(*node) || shard && kept(*node))).collect();
            for node in missing {
                topic.places.push((node, Place::Requested));
                self.requests.push_back(Request::Subscribe { topic: handle, node });
            }
            for (node, place) in left {
                self.leave_place(turn, kind, &name, node, &place);
            }
            self.requests.push_back(Request::Settle { topic: handle });
        }
    }

    /// At every tick: leaves nodes whose shard channels have moved, when no worker publishes there any more.
    pub(in crate::worker) fn tick(&mut self, turn: &Turn) {
        if self.has_old_places && all_workers_know(turn) {
            self.update_places(turn);
        }
    }

    // ---- replies and messages ----

    /// Delivers a message to the subscribers of its topic.
    pub(in crate::worker) fn on_message(
        &mut self,
        turn: &Turn,
        down: &mut Downstreams,
        kind: Kind,
        name: &[u8],
        message: &[u8],
    ) {
        if let Some(topic) = self.by_name[kind as usize].get(name) {
            self.deliver_message(turn, down, *topic, message);
        }
    }

    /// Handles the reply to a subscription.
    pub(in crate::worker) fn on_subscribed(
        &mut self,
        turn: &Turn,
        down: &mut Downstreams,
        handle: Handle,
        node: NodeId,
        answer: &[u8],
    ) {
        let Some(topic) = self.topics.get_mut(handle) else { return };
        let Some((_, place)) = topic.places.iter_mut().find(|(n, _)| *n == node) else { return };
        let (kind, name) = (topic.kind, topic.name.clone());
        let redirect = reply::text(answer).filter(|_| reply::is_error(answer)).and_then(Redirect::of);
        if let (Some(Redirect::Moved { slot, to }), true) = (redirect, turn.routing().topology.is_of_cluster()) {
            // It is requested from the owner when this worker adopts the map.
            turn.shared().moved(slot, to, node);
            return;
        }
        if reply::is_error(answer) {
            let error = String::from_utf8_lossy(reply::text(answer).unwrap_or_default());
            *place = Place::Refused(error.into());
            if !topic.subscribers.is_empty() {
                let missing = topic.to_disconnect(turn.routing().live.on_missed);
                disconnect_subscribers(turn, down, missing);
                turn.counters().subscriptions_lost.add(1);
                warn!(node = %turn.node_name(node), error = %reply::redacted_error(answer), "node refuses to restore a subscription: its messages are missed");
            }
        } else if *place != Place::InForce {
            *place = Place::InForce;
            note_in_force(turn, kind, &name, node, true);
        }
        self.requests.push_back(Request::Settle { topic: handle });
    }

    /// Ends the place of a topic at a node.
    fn leave_place(&mut self, turn: &Turn, kind: Kind, name: &Arc<[u8]>, node: NodeId, place: &Place) {
        if *place == Place::InForce {
            note_in_force(turn, kind, name, node, false);
        }
        if matches!(place, Place::InForce | Place::Requested) {
            self.requests.push_back(Request::Unsubscribe { kind, name: name.clone(), node });
        }
    }
}

/// Returns the number of connections for whose replies the UNSUBSCRIBE `seq` of a client waits.
fn unsubscribe_left(down: &mut Downstreams, client: Handle, seq: u32) -> Option<&mut usize> {
    let subscriber = down.get_mut(client).and_then(|client| client.state_mut::<Subscriber>())?;
    subscriber.items.iter_mut().find_map(|item| match item {
        Item::Unsubscribe { seq: own, left, .. } if *own == seq => Some(left),
        _ => None,
    })
}

impl Worker {
    /// Handles a complete reply or push on a connection of subscriptions.
    pub(in crate::worker) fn on_pubsub_reply(&mut self, link: Handle, answer: &[u8]) {
        if matches!(answer[0], b'>' | b'*') {
            let mut parts = reply::elements(answer);
            let kind = match parts.next().and_then(reply::text) {
                Some(b"message") => Some(Kind::Channel),
                Some(b"pmessage") => Some(Kind::Pattern),
                Some(b"smessage") => Some(Kind::Shard),
                Some(b"invalidate") => {
                    if let Some(what) = parts.next() {
                        self.tracking.on_invalidation(&self.cx.turn, &mut self.cx.down, what);
                    }
                    return;
                }
                Some(b"sunsubscribe") if self.cx.turn.routing().topology.is_of_cluster() => {
                    let name = parts.next().and_then(reply::text).unwrap_or_default();
                    if self.leaves_shard_channel(link, name) {
                        return;
                    }
                    None
                }
                _ => None,
            };
            if let Some(kind) = kind {
                let name = parts.next().and_then(reply::text).unwrap_or_default();
                if self.cx.hooks.transit.before(self.cx.turn.now_us()).is_some()
                    || !self.cx.turn.routing().moves.by_id.is_empty()
                {
                    let channel = if kind == Kind::Pattern {
                        parts.next().and_then(reply::text).unwrap_or_default()
                    } else {
                        name
                    };
                    let payload = parts.next().and_then(reply::text).unwrap_or_default();
                    let node = self.cx.up.get(link).map(|l| l.node());
                    if node.is_some_and(|node| is_of_a_mover(&self.cx.turn, &self.cx.hooks, node, channel, payload)) {
                        return;
                    }
                }
                self.pubsub.on_message(&self.cx.turn, &mut self.cx.down, kind, name, answer);
                return;
            }
        }
        let Some(l) = self.cx.up.get_mut(link) else { return };
        let node = l.node();
        let Some(ended) = l.taken_out() else {
            self.cx.up.break_link(&self.cx.turn, link, "it sent a reply without a command");
            return;
        };
        let late = ended.is_expired;
        let pending = self.cx.hooks.over(&self.cx.turn, ended, answer);
        match pending.purpose {
            Purpose::Subscribe => {
                self.pubsub.on_subscribed(&self.cx.turn, &mut self.cx.down, pending.who, node, answer)
            }
            Purpose::Track if !late => {
                self.tracking.on_tracking_answer(&self.cx.turn, &mut self.cx.down, node, pending.seq, answer)
            }
            Purpose::Sync if !late => {
                self.pubsub.unsubscribe_synced(&self.cx.turn, &mut self.cx.down, pending.who, pending.seq)
            }
            _ => {}
        }
    }
}

impl Worker {
    /// Handles the end of a shard channel at a member of a cluster that has lost its slot. Returns false for the reply to
    /// a command of this worker.
    #[cold]
    fn leaves_shard_channel(&mut self, link: Handle, name: &[u8]) -> bool {
        let Some(l) = self.cx.up.get(link) else { return false };
        let mut own = Vec::new();
        encode::command(&mut own, [Kind::Shard.unsubscribe().as_bytes(), name]);
        if l.requests().head_request() == own {
            return false;
        }
        self.pubsub.lost_place(&self.cx.turn, Kind::Shard, name, l.node());
        self.cx.turn.shared().request_map();
        true
    }
}

impl Topics {
    /// The subscription of a topic at a node has ended. It comes into force at the next owner of its slot. Request it from
    /// this node again: the redirect names that owner, while the maps of other members may be older.
    fn lost_place(&mut self, turn: &Turn, kind: Kind, name: &[u8], node: NodeId) {
        let Some(handle) = self.by_name[kind as usize].get(name).copied() else { return };
        let Some(topic) = self.topics.get_mut(handle) else { return };
        let Some((_, place)) = topic.places.iter_mut().find(|(at, _)| *at == node) else { return };
        if std::mem::replace(place, Place::Requested) == Place::InForce {
            note_in_force(turn, kind, &topic.name.clone(), node, false);
        }
        self.requests.push_back(Request::Subscribe { topic: handle, node });
    }
}

impl Topic {
    /// Returns the state over all reachable nodes.
    fn standing(&self) -> Standing {
        if let Some(error) =
            self.places.iter().find_map(|(_, p)| if let Place::Refused(e) = p { Some(e) } else { None })
        {
            return Standing::Refused(error.to_string());
        }
        if self.places.iter().any(|(_, p)| *p == Place::Requested) {
            return Standing::Unsettled;
        }
        if self.places.iter().any(|(_, p)| *p == Place::InForce) { Standing::InForce } else { Standing::Down }
    }

    /// Returns the subscribers to disconnect, because they may have missed messages at one of the topic's nodes.
    fn to_disconnect(&self, policy: OnMissed) -> Vec<Handle> {
        let is_served = self.kind != Kind::Shard && self.places.iter().any(|(_, place)| *place == Place::InForce);
        let stay = match policy {
            OnMissed::Auto => is_served,
            OnMissed::Disconnect => false,
            OnMissed::Continue => true,
        };
        if stay { Vec::new() } else { self.subscribers.iter().copied().collect() }
    }
}

fn note_in_force(turn: &Turn, kind: Kind, name: &Arc<[u8]>, node: NodeId, in_force: bool) {
    turn.shared().subscriptions.set_upstream(turn.index(), kind, name, node, in_force);
    let gauge = &turn.counters().upstream_subscriptions;
    if in_force { gauge.add(1) } else { gauge.sub(1) }
}

/// Whether every worker has the current topology, and no publish under an older one is pending: the subscribers
/// counted by such a node would be wrong.
fn all_workers_know(turn: &Turn) -> bool {
    let epoch = turn.routing().topology.epoch();
    turn.shared().drained.oldest() >= epoch
}

/// Returns the nodes where a shard channel may be published: the owner of its slot, and the target of a move.
fn shard_nodes(turn: &Turn, name: &[u8]) -> Vec<NodeId> {
    let slot = turn.routing().topology.placement().slot_of_channel(name);
    let owner = turn.routing().topology.owner(slot);
    let mut nodes = vec![owner];
    if let Some(transit) = turn.routing().topology.transit(slot).filter(|transit| !transit.keys_only) {
        nodes.extend([transit.source, transit.target].into_iter().filter(|node| *node != owner));
    }
    nodes
}

/// Beginning of the channels of keyspace events.
const KEYSPACE: &[u8] = b"__key";

/// Returns the nodes where a channel or pattern is subscribed: all, because nodes do not forward messages. Members of a
/// cluster forward each message to all members, so it is subscribed at one, which stays the same while it is a member.
/// Keyspace events are not forwarded. `places`: where it is subscribed now; `lost`: a node to avoid.
fn channel_nodes(turn: &Turn, name: &[u8], places: &[(NodeId, Place)], lost: Option<NodeId>) -> Vec<NodeId> {
    if !turn.routing().topology.is_of_cluster() {
        return turn.routing().topology.nodes().map(|node| node.id).collect();
    }
    let owners = turn.data_nodes().all();
    if name.starts_with(KEYSPACE) {
        return owners;
    }
    let is_usable = |node: &NodeId| Some(*node) != lost && owners.contains(node);
    let present = places.iter().map(|(node, _)| *node).find(is_usable);
    let other = || owners.iter().copied().filter(|node| !turn.node_fails(*node)).find(is_usable);
    present.or_else(other).or_else(|| owners.first().copied()).into_iter().collect()
}

/// Whether a connection for subscriptions at the node is needed.
pub(in crate::worker) fn needs_pubsub_link(tracking: &Tracking, topics: &Topics, node: NodeId) -> bool {
    tracking.is_on() || topics.topics.iter().any(|(_, t)| t.places.iter().any(|(n, _)| *n == node))
}

/// Sends PING on every connection of subscriptions: the answer comes after all messages in transit. Returns the
/// number of connections.
pub(super) fn ping_pubsub_links(turn: &Turn, up: &mut Upstreams, client: Handle, seq: u32) -> usize {
    let links = up.links().pubsubs();
    for link in &links {
        up.push_own_for(turn, *link, client, &[b"PING"], Purpose::Sync, seq);
    }
    links.len()
}

/// Closes these clients, because they may have missed messages. Only the end of the connection shows this to a
/// client, as the end of one server would: it then subscribes again, and reloads its data. Returns the number of
/// disconnected clients.
fn disconnect_subscribers(turn: &Turn, down: &mut Downstreams, mut clients: Vec<Handle>) -> usize {
    clients.retain(|client| down.get(*client).is_some());
    clients.sort_unstable_by_key(|client| client.index);
    clients.dedup();
    turn.counters().cut_missed.add(clients.len() as u64);
    for client in &clients {
        down.close_client(turn, *client);
    }
    clients.len()
}

/// Whether a keyspace event comes from a mover's own commands: storing keys at the target, removing them at the
/// source, and probing the capabilities of nodes.
fn is_of_a_mover(turn: &Turn, hooks: &CommandHooks, node: NodeId, channel: &[u8], payload: &[u8]) -> bool {
    let (event, key) = match channel.iter().position(|b| *b == b':').map(|at| (&channel[..at], &channel[at + 1..])) {
        Some((kind, key)) if kind.starts_with(b"__keyspace@") => (payload, key),
        Some((kind, event)) if kind.starts_with(b"__keyevent@") => (event, payload),
        _ => return false,
    };
    if is_temporary(key) {
        return true;
    }
    let of = |routing: &RoutingSnapshot| {
        let slot = routing.topology.slot_of(key);
        let Some(Transit { move_id, source, target, stage: Stage::Moving { leg }, .. }) =
            routing.topology.transit(slot).copied()
        else {
            return false;
        };
        let view = routing.moves.legs.get(&(move_id, leg));
        let goes_back = view.is_some_and(|view| view.to() == Side::Source);
        if view.and_then(|view| view.scope()).is_some_and(|scope| !scope.contains_name(key)) {
            return false;
        }
        let (from, to) = if goes_back { (target, source) } else { (source, target) };
        let is_staged = || routing.moves.by_id.get(&move_id).is_some_and(|mover| mover.is_staged(key));
        (event == b"del" && node == from)
            || (event == b"restore" && node == to)
            || (event == b"rename_to" && node == to && is_staged())
    };
    of(turn.routing()) || hooks.transit.before(turn.now_us()).is_some_and(of)
}

impl Topics {
    /// Returns the topic of this name. Creates it and requests its subscriptions if it is missing.
    pub(super) fn topic(&mut self, turn: &Turn, kind: Kind, name: &[u8]) -> Handle {
        if let Some(topic) = self.by_name[kind as usize].get(name) {
            return *topic;
        }
        let name: Arc<[u8]> = name.into();
        let nodes: Vec<NodeId> = match kind {
            Kind::Shard => shard_nodes(turn, &name),
            Kind::Channel | Kind::Pattern => channel_nodes(turn, &name, &[], None),
        };
        let topic = Topic {
            kind,
            name: name.clone(),
            places: nodes.iter().map(|node| (*node, Place::Requested)).collect(),
            subscribers: HashSet::new(),
            waiting: Vec::new(),
            holds: 0,
        };
        let handle = self.topics.insert(topic);
        self.by_name[kind as usize].insert(name, handle);
        self.requests.extend(nodes.into_iter().map(|node| Request::Subscribe { topic: handle, node }));
        handle
    }

    /// Requests a topic from a node, now or when its connection is up.
    fn request_place(&mut self, turn: &Turn, up: &mut Upstreams, topic_handle: Handle, node: NodeId) {
        let link = hopeful_link(turn, up, node);
        let (is_up, hopeful) = up.get(link).map_or((false, false), |l| (l.phase() == Phase::Up, l.takes_commands()));
        let Some(topic) = self.topics.get_mut(topic_handle) else { return };
        let place = if hopeful { Place::Requested } else { Place::Down };
        match topic.places.iter_mut().find(|(n, _)| *n == node) {
            Some((_, old)) => *old = place,
            None => topic.places.push((node, place)),
        }
        if is_up {
            self.send_subscribe(turn, up, link, topic_handle);
        }
    }

    fn send_subscribe(&mut self, turn: &Turn, up: &mut Upstreams, link: Handle, topic_handle: Handle) {
        let Some(topic) = self.topics.get(topic_handle) else { return };
        let (verb, name) = (topic.kind.subscribe(), topic.name.clone());
        up.push_own_for(turn, link, topic_handle, &[verb.as_bytes(), &name], Purpose::Subscribe, 0);
    }

    /// A command names the topic: it stays until the command has taken effect. Returns whether the command must wait
    /// for the outcome.
    pub(super) fn hold_topic(&mut self, topic: Handle, client: Handle, seq: u32) -> bool {
        let Some(topic) = self.topics.get_mut(topic) else { return false };
        topic.holds += 1;
        let waits = !matches!(topic.standing(), Standing::InForce);
        if waits {
            topic.waiting.push((client, seq));
        }
        waits
    }

    pub(super) fn release_topics(&mut self, turn: &Turn, topics: &[Handle]) {
        for handle in topics {
            if let Some(topic) = self.topics.get_mut(*handle) {
                topic.holds = topic.holds.saturating_sub(1);
            }
            self.drop_unused_topic(turn, *handle);
        }
    }

    /// Ends the subscription at the nodes of a topic without subscribers.
    pub(super) fn drop_unused_topic(&mut self, turn: &Turn, handle: Handle) {
        if self.topics.get(handle).is_none_or(|t| t.holds > 0 || !t.subscribers.is_empty()) {
            return;
        }
        let Some(topic) = self.topics.remove(handle) else { return };
        self.by_name[topic.kind as usize].remove(&topic.name);
        for (node, place) in &topic.places {
            self.leave_place(turn, topic.kind, &topic.name, *node, place);
        }
    }

    /// Whether shard channels of slots in transit are not yet in force at a node that may count subscribers.
    pub(in crate::worker) fn are_topics_settling(&self, turn: &Turn) -> bool {
        let in_transit = |topic: &Topic| {
            topic.kind == Kind::Shard
                && turn
                    .routing()
                    .topology
                    .transit(turn.routing().topology.placement().slot_of_channel(&topic.name))
                    .is_some_and(|transit| !transit.keys_only)
        };
        self.topics
            .iter()
            .any(|(_, topic)| topic.places.iter().any(|(_, place)| *place == Place::Requested) && in_transit(topic))
    }
}
