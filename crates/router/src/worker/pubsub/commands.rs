//! The commands: SUBSCRIBE and its relatives, PUBLISH and SPUBLISH, PUBSUB, and checks for subscribed clients.

use std::sync::Arc;

use switchyard_policy::topology::NodeId;
use switchyard_resp::command::{Command, Handling, Local};
use switchyard_resp::encode;

use super::clients::tidy_subscriber;
use super::{Item, Kind, Request, Subscriber, Topics};
use crate::lane::Lane;
use crate::slab::Handle;
use crate::worker::Worker;
use crate::worker::context::Context;
use crate::worker::downstreams::Downstreams;
use crate::worker::downstreams::waits::Stall;
use crate::worker::flow::Flow;
use crate::worker::forward::forward;
use crate::worker::gather::{Aggregation, Gathers};
use crate::worker::invocation::Invocation;
use crate::worker::turn::Turn;
use crate::worker::upstreams::link::UNSENT_HIGH;

/// Bytes of the names of one client's subscriptions.
const NAME_BYTES_MAX: usize = 64 << 20;

impl Worker {
    pub(in crate::worker) fn dispatch_pubsub(&mut self, call: &Invocation<'_>, local: Local) -> Flow {
        match local {
            Local::Subscribe => self.pubsub.subscribe(&self.cx.turn, &mut self.cx.down, call, Kind::Channel),
            Local::Psubscribe => self.pubsub.subscribe(&self.cx.turn, &mut self.cx.down, call, Kind::Pattern),
            Local::Ssubscribe => self.pubsub.subscribe(&self.cx.turn, &mut self.cx.down, call, Kind::Shard),
            Local::Unsubscribe => self.pubsub.unsubscribe(&self.cx.turn, &mut self.cx.down, call, Kind::Channel),
            Local::Punsubscribe => self.pubsub.unsubscribe(&self.cx.turn, &mut self.cx.down, call, Kind::Pattern),
            Local::Sunsubscribe => self.pubsub.unsubscribe(&self.cx.turn, &mut self.cx.down, call, Kind::Shard),
            Local::Publish => self.gathers.publish(&mut self.cx, call, Kind::Channel),
            Local::Spublish => self.gathers.publish(&mut self.cx, call, Kind::Shard),
            _ => pubsub_info(&self.cx.turn, &mut self.cx.down, call, local),
        }
    }
}

impl Topics {
    fn subscribe(&mut self, turn: &Turn, down: &mut Downstreams, call: &Invocation<'_>, kind: Kind) -> Flow {
        let Invocation { handle, args, .. } = *call;
        let class = call.class();
        let Some(client) = down.get_mut(handle) else { return Flow::Close };
        if !client.may_take(Lane::Pubsub) {
            return Flow::Stall(Stall::Barrier);
        }
        let limit = turn.routing().live.subscriptions_max;
        let subscriber = client.state_or_default::<Subscriber>();
        let waiting: usize = subscriber
            .items
            .iter()
            .map(|i| if let Item::Subscribe { topics, .. } = i { topics.len() } else { 0 })
            .sum();
        let fresh = || args.iter().skip(1).filter(|name| !subscriber.names[kind as usize].contains_key(*name));
        let count = subscriber.total() + waiting + fresh().count();
        let bytes = subscriber.name_bytes + fresh().map(<[u8]>::len).sum::<usize>();
        if count > limit || bytes > NAME_BYTES_MAX {
            let text = if count > limit {
                format!("ERR too many subscriptions: a client may have {limit} (clients.subscriptions-max)")
            } else {
                format!(
                    "ERR too many subscriptions: the names of a client's subscriptions may have {NAME_BYTES_MAX} bytes together"
                )
            };
            tidy_subscriber(down, handle);
            return down.refuse(turn, handle, class, &text);
        }
        let seq = client.replies_mut().owe_push(turn.now_us(), class);
        let mut topics = Vec::with_capacity(args.len() - 1);
        let mut left = 0;
        for name in args.iter().skip(1) {
            let topic = self.topic(turn, kind, name);
            left += usize::from(self.hold_topic(topic, handle, seq));
            topics.push(topic);
        }
        if let Some(subscriber) = down.get_mut(handle).and_then(|c| c.state_mut::<Subscriber>()) {
            subscriber.items.push_back(Item::Subscribe { seq, kind, topics, left, failed: None });
        }
        // A topic that has already failed answers through its waiting list.
        self.settle_later(down, handle, seq);
        self.advance_subscriber(turn, down, handle);
        Flow::Next
    }

    fn unsubscribe(&mut self, turn: &Turn, down: &mut Downstreams, call: &Invocation<'_>, kind: Kind) -> Flow {
        let Invocation { handle, args, .. } = *call;
        let class = call.class();
        let Some(client) = down.get_mut(handle) else { return Flow::Close };
        if !client.may_take(Lane::Pubsub) {
            return Flow::Stall(Stall::Barrier);
        }
        let seq = client.replies_mut().owe_push(turn.now_us(), class);
        let names: Vec<Arc<[u8]>> = args.iter().skip(1).map(Arc::from).collect();
        // An earlier message may still be in transit: it comes first, as with one server.
        let subscriber = client.state_or_default::<Subscriber>();
        let own = &subscriber.names[kind as usize];
        let hears = subscriber.waits()
            || if names.is_empty() { !own.is_empty() } else { names.iter().any(|n| own.contains_key(n)) };
        subscriber.items.push_back(Item::Unsubscribe { seq, kind, names, left: usize::from(hears) });
        if hears {
            self.requests.push_back(Request::Ping { client: handle, seq });
        }
        self.advance_subscriber(turn, down, handle);
        Flow::Next
    }

    /// For a command just read: settles topics that have failed before.
    fn settle_later(&mut self, down: &Downstreams, client: Handle, seq: u32) {
        let subscriber = down.get(client).and_then(|client| client.state::<Subscriber>());
        if let Some(Item::Subscribe { seq: own, topics, .. }) = subscriber.and_then(|s| s.items.back())
            && *own == seq
        {
            self.requests.extend(topics.iter().map(|topic| Request::Settle { topic: *topic }));
        }
    }
}

/// Checks a command of a client that is subscribed, or whose subscription waits for nodes. `None`: the command may
/// proceed.
pub(in crate::worker) fn gate_subscriber(
    turn: &Turn,
    down: &mut Downstreams,
    handle: Handle,
    command: &Command,
) -> Option<Flow> {
    let client = down.get(handle)?;
    let subscriber = client.state::<Subscriber>()?;
    let Handling::Local(local) = command.handling else { return gate_other(turn, down, handle, command) };
    let subscribes = matches!(
        local,
        Local::Subscribe
            | Local::Psubscribe
            | Local::Ssubscribe
            | Local::Unsubscribe
            | Local::Punsubscribe
            | Local::Sunsubscribe
    );
    if subscribes || !subscriber.waits() && matches!(local, Local::Ping | Local::Quit | Local::Reset) {
        return None;
    }
    gate_other(turn, down, handle, command)
}

fn gate_other(turn: &Turn, down: &mut Downstreams, handle: Handle, command: &Command) -> Option<Flow> {
    let client = down.get(handle)?;
    let subscriber = client.state::<Subscriber>()?;
    if subscriber.waits() {
        return Some(Flow::Stall(Stall::Barrier));
    }
    if client.resp3() || subscriber.total() == 0 {
        return None;
    }
    let name = command.name.to_ascii_lowercase();
    let text = format!(
        "ERR Can't execute '{name}': only (P|S)SUBSCRIBE / (P|S)UNSUBSCRIBE / PING / QUIT / RESET are allowed in this context"
    );
    Some(down.refuse(turn, handle, command.class() as u8, &text))
}

fn pubsub_info(turn: &Turn, down: &mut Downstreams, call: &Invocation<'_>, local: Local) -> Flow {
    let Invocation { handle, args, .. } = *call;
    let class = call.class();
    let mut out = Vec::new();
    let all = &turn.shared().subscriptions;
    match local {
        Local::PubsubChannels | Local::PubsubShardchannels => {
            if args.len() > 3 {
                let name = String::from_utf8_lossy(args.get(1).unwrap_or_default()).into_owned();
                let text =
                    format!("ERR unknown subcommand or wrong number of arguments for '{name}'. Try PUBSUB HELP.");
                return down.refuse(turn, handle, class, &text);
            }
            let kind = if local == Local::PubsubChannels { Kind::Channel } else { Kind::Shard };
            let channels = all.channels(kind, args.get(2));
            encode::header(&mut out, b'*', channels.len());
            for channel in channels {
                encode::bulk(&mut out, &channel);
            }
        }
        Local::PubsubNumpat => encode::integer(&mut out, all.channels(Kind::Pattern, None).len() as i64),
        _ => {
            let kind = if local == Local::PubsubNumsub { Kind::Channel } else { Kind::Shard };
            encode::header(&mut out, b'*', (args.len() - 2) * 2);
            for name in args.iter().skip(2) {
                encode::bulk(&mut out, name);
                encode::integer(&mut out, all.subscribers(kind, name) as i64);
            }
        }
    }
    down.answer(turn, handle, class, &out);
    Flow::Next
}

impl Gathers {
    /// Sends a message to the owner of its channel's slot. The owner may be down, or have only some subscriptions in
    /// force again. Then another node delivers a message of a channel; for a shard channel, subscribers would miss it.
    /// The node counts our workers' subscriptions; the reply counts our clients instead.
    fn publish(&mut self, cx: &mut Context, call: &Invocation<'_>, kind: Kind) -> Flow {
        let Invocation { routing, handle, command, raw, args, .. } = *call;
        let channel = args.get(1).unwrap_or_default();
        let mut node = routing.topology.owner(routing.topology.placement().slot_of_channel(channel));
        let subscriptions = &cx.turn.shared().subscriptions;
        if subscriptions.is_empty() {
            return forward(cx, call, node);
        }
        let class = command.class() as u8;
        if !subscriptions.reaches_all(kind, channel, node) {
            // Members of a cluster redirect it if its slot has moved.
            if kind == Kind::Shard && !routing.topology.is_of_cluster() {
                let text = cx.turn.down_text_or(node, "its subscriptions are being restored");
                return cx.down.refuse(&cx.turn, handle, class, &text);
            }
            let is_anywhere = kind != Kind::Shard;
            let reaches =
                |at: &NodeId| is_anywhere && cx.up.links().is_up(*at) && subscriptions.reaches_all(kind, channel, *at);
            node = routing.topology.nodes().map(|n| n.id).find(reaches).unwrap_or(node);
        }
        let Some(client) = cx.down.get_mut(handle) else { return Flow::Close };
        if !client.may_take(Lane::Main) {
            return Flow::Stall(Stall::Barrier);
        }
        let resp3 = client.resp3();
        let link = cx.up.shared_link(&cx.turn, node, Lane::Main, resp3);
        if cx.up.is_full(link, handle, UNSENT_HIGH) {
            return Flow::Stall(Stall::Upstream);
        }
        let whole = Aggregation::Publish { kind, channel: channel.into(), node };
        let Some(gather) = self.begin_gather(&cx.turn, &mut cx.down, handle, class, 1, whole) else {
            return Flow::Close;
        };
        self.send_parts(cx, gather, 0, node, Lane::Main, &[raw], class);
        Flow::Next
    }
}
