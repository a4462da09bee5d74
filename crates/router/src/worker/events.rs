//! Events of connections to nodes, and their effects on clients and features.
//!
//! [`Upstreams`](super::upstreams::Upstreams) changes its own state at once and knows no client. It records what concerns
//! others as an event. The loop handles the events after each step, in their order:
//!
//! | Event | Handled by |
//! |---|---|
//! | `Failed`, `Late` | the command hook, then the owner of each request (`fail_pending`) |
//! | `PubsubUp`, `PubsubFailed`, `PubsubLost` | tracking, then subscriptions |
//! | `FillsUp`, `FillsLost` | hot copies |
//! | `OutageOver` | clients that wait for a lost node |
//! | `Granted`, `Refused`, `Room` | the client that waits for a connection |
//! | `Abandoned` | blocking commands |
//! | `WatchAwaited` | transactions |

use switchyard_resp::encode;

use super::downstream::Stall;
use super::outage::dispatch_waiting;
use super::output::deliver_of_node;
use super::upstreams::breaking::PERHAPS;
use super::upstreams::kind::Lane;
use super::upstreams::link::{Pending, Purpose};
use super::upstreams::{Event, Origin};
use super::{Worker, hot_copies};

impl Worker {
    /// Handles the events of connections.
    #[inline]
    pub(super) fn settle_events(&mut self) {
        while let Some(event) = self.up.next_event() {
            self.on_event(event);
        }
    }

    #[cold]
    fn on_event(&mut self, event: Event) {
        match event {
            Event::Failed { origin, ended, in_flight, text } => {
                let (mut not_executed, mut perhaps_executed) = (Vec::new(), Vec::new());
                if let Some(text) = &text {
                    encode::error(&mut not_executed, text);
                    encode::error(&mut perhaps_executed, &format!("{text}{PERHAPS}"));
                }
                for (place, ended) in ended.into_iter().enumerate() {
                    let is_expired = ended.is_expired;
                    let pending = self.over(ended, b"");
                    if text.is_none() {
                        if pending.purpose == Purpose::Fill {
                            hot_copies::filled(self, pending.seq, b"", true);
                        }
                    } else if !is_expired {
                        let error = if place < in_flight { &perhaps_executed } else { &not_executed };
                        self.fail_pending(origin, pending, error);
                    }
                }
            }
            Event::Late { origin, late, text } => {
                let mut error = Vec::new();
                encode::error(&mut error, &text);
                for pending in late {
                    self.fail_pending(origin, pending, &error);
                }
            }
            Event::PubsubUp { link, node } => self.pubsub_link_up(link, node),
            Event::PubsubFailed { node } => self.pubsub_link_failed(node),
            Event::PubsubLost { node } => self.pubsub_link_lost(node),
            Event::FillsUp { node, about } => hot_copies::link_up(self, node, &about),
            Event::FillsLost { node } => hot_copies::link_lost(self, node),
            Event::OutageOver => dispatch_waiting(self),
            Event::Granted { client, link } => {
                match self.clients.get_mut(client).filter(|client| client.stall == Stall::Exclusive) {
                    Some(waiting) => {
                        waiting.held = Some(link);
                        self.unstall(client);
                    }
                    None => self.up.release(&self.turn, link),
                }
            }
            Event::Refused { client, text } => {
                if let Some(waiting) = self.clients.get_mut(client).filter(|client| client.stall == Stall::Exclusive) {
                    waiting.refusal = text.map(Into::into).or(waiting.refusal.take());
                    self.unstall(client);
                }
            }
            Event::Room { client } => {
                if self.clients.get(client).is_some_and(|client| client.stall == Stall::Upstream) {
                    self.unstall(client);
                }
            }
            Event::Abandoned { link } => self.unblock(link, false, None),
            Event::WatchAwaited { node } => self.reissue_watches(node),
        }
    }

    /// Replies with an error to a request.
    fn fail_pending(&mut self, origin: Origin, pending: Pending, error: &[u8]) {
        let Origin { link, node, lane, is_up } = origin;
        match pending.purpose {
            Purpose::Client
            | Purpose::ClientHealed
            | Purpose::Exec
            | Purpose::ExecWithoutMulti
            | Purpose::Watch
            | Purpose::Wait => {
                let holds = self.clients.get(pending.who).is_some_and(|c| c.held == Some(link));
                let streamed = self.clients.get(pending.who).is_some_and(|c| c.streaming && c.is_first(pending.seq));
                if holds && let Some(client) = self.clients.get_mut(pending.who) {
                    client.held = None;
                    if let Some(upload) = client.upload.as_deref_mut() {
                        upload.link = None;
                    }
                }
                if pending.purpose == Purpose::Watch {
                    self.fail_watch(pending.who);
                } else if pending.purpose == Purpose::Wait {
                    self.forget_waiting(pending.who);
                }
                if streamed {
                    // Half a reply has been sent, so the connection must be closed.
                    self.close_client(pending.who);
                } else if lane == Some(Lane::Blocking) {
                    self.end_as_a_server_would(pending.who, pending.seq);
                } else if lane == Some(Lane::Replica) {
                    // The node itself may be up.
                    deliver_of_node(self, pending.who, pending.seq, error);
                } else {
                    self.deliver(pending.who, pending.seq, error);
                }
            }
            Purpose::Gather => self.gather_part(pending.who, pending.seq, error),
            Purpose::Unblock => self.on_unblock(pending.who, error),
            Purpose::Look => self.on_look(pending.who, pending.seq, error),
            // After a lost connection, its topics are handled together.
            Purpose::Subscribe if is_up => self.subscribe_timed_out(pending.who, node),
            Purpose::Track if is_up => self.on_tracking_answer(node, pending.seq, error),
            Purpose::Fill => hot_copies::filled(self, pending.seq, error, true),
            Purpose::Sync => self.unsubscribe_synced(pending.who, pending.seq),
            Purpose::Discarded
            | Purpose::Learn
            | Purpose::Confirm
            | Purpose::Queued
            | Purpose::Subscribe
            | Purpose::Track
            | Purpose::FillTtl
            | Purpose::Beat => {}
        }
    }
}
