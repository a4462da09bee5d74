//! The client side: subscriptions that take effect, delivery of messages, and disconnected clients.

use std::sync::Arc;

use switchyard_resp::command::{Command, Flags, Handling, Local};
use switchyard_resp::encode;
use tracing::warn;

use super::{Item, Kind, Subscriber, Topics, confirmation};
use crate::slab::Handle;
use crate::worker::downstreams::{Client, Downstreams};
use crate::worker::turn::Turn;

/// A message of at least this size is sent to each subscriber before it is copied for the next one: only the part that
/// a socket does not accept stays in memory.
const AT_ONCE_MIN: usize = 64 << 10;

impl Topics {
    /// Applies commands of a client that wait for nothing more, in order.
    pub(super) fn advance_subscriber(&mut self, turn: &Turn, down: &mut Downstreams, handle: Handle) {
        loop {
            let Some(client) = down.get_mut(handle) else { return };
            let resp3 = client.resp3();
            let Some(subscriber) = client.state_mut::<Subscriber>() else { return };
            let ready = match subscriber.items.front() {
                Some(Item::Subscribe { left, failed, .. }) => *left == 0 || failed.is_some(),
                Some(Item::Unsubscribe { left, .. }) => *left == 0,
                None => false,
            };
            if !ready {
                break;
            }
            let Some(item) = subscriber.items.pop_front() else { break };
            let mut out = std::mem::take(&mut self.scratch);
            out.clear();
            let seq = match item {
                Item::Subscribe { seq, topics, failed: Some(error), .. } => {
                    encode::error(&mut out, &error);
                    self.release_topics(turn, &topics);
                    seq
                }
                Item::Subscribe { seq, kind, topics, .. } => {
                    for topic in &topics {
                        self.join(turn, down, handle, *topic);
                        let Some(name) = self.topics.get(*topic).map(|t| t.name.clone()) else { continue };
                        if let Some(subscriber) = down.get(handle).and_then(|c| c.state::<Subscriber>()) {
                            confirmation(&mut out, kind.subscribe(), Some(&name), subscriber, kind, resp3);
                        }
                    }
                    self.release_topics(turn, &topics);
                    seq
                }
                Item::Unsubscribe { seq, kind, names, .. } => {
                    let everything = names.is_empty();
                    let names =
                        if everything { subscriber.names[kind as usize].keys().cloned().collect() } else { names };
                    for name in &names {
                        self.leave(turn, down, handle, kind, name);
                        if let Some(subscriber) = down.get(handle).and_then(|c| c.state::<Subscriber>()) {
                            confirmation(&mut out, kind.unsubscribe(), Some(name), subscriber, kind, resp3);
                        }
                    }
                    if names.is_empty()
                        && let Some(subscriber) = down.get(handle).and_then(|c| c.state::<Subscriber>())
                    {
                        confirmation(&mut out, kind.unsubscribe(), None, subscriber, kind, resp3);
                    }
                    seq
                }
            };
            down.deliver(turn, handle, seq, &out);
            self.scratch = out;
        }
        tidy_subscriber(down, handle);
    }

    fn leave(&mut self, turn: &Turn, down: &mut Downstreams, handle: Handle, kind: Kind, name: &Arc<[u8]>) {
        let Some(subscriber) = down.get_mut(handle).and_then(|c| c.state_mut::<Subscriber>()) else { return };
        let Some(topic) = subscriber.names[kind as usize].remove(name) else { return };
        subscriber.name_bytes -= name.len();
        turn.counters().subscribers.sub(u64::from(subscriber.total() == 0));
        self.leave_topic(turn, handle, topic);
    }
}

/// Returns the command whose reply must precede a message that arrives now.
fn holds_messages(client: &Client) -> Option<u32> {
    let (first, is_streaming) = (client.replies().first(), client.replies().is_streaming());
    match client.state::<Subscriber>() {
        Some(subscriber) => subscriber.holds(first, is_streaming),
        None => is_streaming.then_some(first),
    }
}

/// Drops the data of a client without subscriptions.
pub(super) fn tidy_subscriber(down: &mut Downstreams, handle: Handle) {
    let Some(client) = down.get_mut(handle) else { return };
    if client.state::<Subscriber>().is_some_and(Subscriber::is_idle) {
        client.take_state::<Subscriber>();
    }
}

/// Sends messages that had to wait for replies which are now complete.
#[cold]
pub(in crate::worker) fn release_messages(down: &mut Downstreams, handle: Handle) {
    let Some(client) = down.get_mut(handle) else { return };
    let (streaming, first) = (client.replies().is_streaming(), client.replies().first());
    let Some(subscriber) = client.state_mut::<Subscriber>() else { return };
    let mut released: Vec<Vec<u8>> = Vec::new();
    while let Some((_, bytes)) =
        subscriber.held.pop_front_if(|(behind, _)| !streaming && (behind.wrapping_sub(first) as i32) < 0)
    {
        subscriber.held_bytes -= bytes.len();
        released.push(bytes);
    }
    let any = !released.is_empty();
    released.iter().for_each(|bytes| client.push_out(&[bytes]));
    if any {
        tidy_subscriber(down, handle);
    }
}

/// Handles a dispatched command of a client that may be subscribed.
pub(in crate::worker) fn note_own_publish(down: &mut Downstreams, handle: Handle, command: &Command) {
    let Some(client) = down.get_mut(handle) else { return };
    let publishes = matches!(command.handling, Handling::Local(Local::Publish | Local::Spublish | Local::Exec));
    if client.in_flight() > 0 && (publishes || command.flags.has(Flags::SCRIPT)) {
        let last = client.replies().last();
        if let Some(subscriber) = client.state_mut::<Subscriber>() {
            subscriber.published = Some(last);
        }
    }
}

/// Disconnects a client that does not read its pushed messages. `limit`: the exceeded key of `[clients]`.
pub(in crate::worker) fn cut_subscriber(turn: &Turn, down: &mut Downstreams, handle: Handle, limit: &str) {
    let Some(client) = down.get(handle) else { return };
    warn!(
        client = client.identity().id(),
        bytes = client.unsent(),
        "disconnecting a subscriber that does not read its messages (clients.{limit})"
    );
    turn.counters().cut_push.add(1);
    down.close_client(turn, handle);
}

impl Downstreams {
    /// Sends a client something that is no reply: a message, an invalidation, a line of MONITOR. `bytes` begins with
    /// `>` or `*`, depending on the protocol.
    pub(in crate::worker) fn push(&mut self, turn: &Turn, handle: Handle, bytes: &[u8]) {
        let limit = turn.routing().live.push_limit;
        let Some(client) = self.get_mut(handle) else { return };
        if client.input().is_closing() {
            return;
        }
        let (first, rest) = bytes.split_at(1);
        let first = match first {
            b">" | b"*" if client.resp3() => b">",
            b">" | b"*" => b"*",
            _ => first,
        };
        if let Some(behind) = holds_messages(client) {
            let subscriber = client.state_or_default::<Subscriber>();
            subscriber.held_bytes += bytes.len();
            subscriber.held.push_back((behind, [first, rest].concat()));
            if subscriber.held_bytes > limit {
                cut_subscriber(turn, self, handle, "push-limit");
            }
            return;
        }
        client.push_out(&[first, rest]);
        client.socket_mut().note_behind(turn.routing().live.push_soft_limit, turn.now_us());
        let over = client.unsent() > limit;
        self.mark(handle);
        if over || bytes.len() >= AT_ONCE_MIN {
            self.flush_client(turn, handle);
        }
        if over && self.get(handle).is_some_and(|c| c.unsent() > limit) {
            cut_subscriber(turn, self, handle, "push-limit");
        }
    }
}

impl Topics {
    /// Adds a client to the subscribers of a topic.
    fn join(&mut self, turn: &Turn, down: &mut Downstreams, handle: Handle, topic_handle: Handle) {
        let Some(topic) = self.topics.get_mut(topic_handle) else { return };
        let Some(subscriber) = down.get_mut(handle).and_then(|c| c.state_mut::<Subscriber>()) else { return };
        if topic.subscribers.insert(handle) {
            subscriber.names[topic.kind as usize].insert(topic.name.clone(), topic_handle);
            subscriber.name_bytes += topic.name.len();
            turn.shared().subscriptions.add_client(turn.index(), topic.kind, &topic.name);
            turn.counters().subscriptions.add(1);
            turn.counters().subscribers.add(u64::from(subscriber.total() == 1));
        }
    }

    fn leave_topic(&mut self, turn: &Turn, handle: Handle, topic_handle: Handle) {
        let Some(topic) = self.topics.get_mut(topic_handle) else { return };
        if topic.subscribers.remove(&handle) {
            turn.shared().subscriptions.remove_client(turn.index(), topic.kind, &topic.name);
            turn.counters().subscriptions.sub(1);
        }
        self.drop_unused_topic(turn, topic_handle);
    }

    /// Ends all subscriptions of a client that is gone or has sent RESET.
    pub(in crate::worker) fn forget_subscriber(&mut self, turn: &Turn, handle: Handle, subscriber: &Subscriber) {
        turn.counters().subscribers.sub(u64::from(subscriber.total() > 0));
        for topic in subscriber.names.iter().flat_map(|n| n.values()) {
            self.leave_topic(turn, handle, *topic);
        }
        for item in &subscriber.items {
            if let Item::Subscribe { topics, .. } = item {
                self.release_topics(turn, topics);
            }
        }
    }

    /// Passes a message to all subscribers of a topic. `bytes`: the message as sent by a node. Only its first byte
    /// differs between the protocols.
    pub(super) fn deliver_message(&mut self, turn: &Turn, down: &mut Downstreams, topic: Handle, bytes: &[u8]) {
        let Some(topic) = self.topics.get(topic) else { return };
        // Taken temporarily: pushing may close a client, which removes it from the set.
        let mut receivers = std::mem::take(&mut self.receivers);
        receivers.clear();
        receivers.extend(topic.subscribers.iter().copied());
        turn.counters().messages.add(receivers.len() as u64);
        for receiver in &receivers {
            down.push(turn, *receiver, bytes);
        }
        self.receivers = receivers;
    }
}
