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
//! | `Granted`, `Released`, `Refused`, `Room` | the client that waits for a connection |
//! | `Abandoned` | blocking commands |
//! | `WatchAwaited` | transactions |
//!
//! [`Downstreams`](super::clients::Downstreams) knows no connection to a node, and does the same:
//!
//! | Event | Handled by |
//! |---|---|
//! | `Closed` | pools, lines of blocked clients, the held connection, MONITOR, tracking, subscriptions |
//! | `Drained`, `GivesBack`, `Abandons` | the held connection |
//! | `LeavesLine` | pools |
//! | `OwnWrite` | tracking |

use switchyard_resp::encode;

use super::clients::ClientEvent;
use super::downstream::{Client, Stall};
use super::monitor::end_monitor;
use super::outage::dispatch_waiting;
use super::pubsub::nodes::needs_pubsub_link;
use super::reissued::leave_line;
use super::transactions::fail_watch;
use super::upstreams::breaking::PERHAPS;
use super::upstreams::kind::Lane;
use super::upstreams::link::{Pending, Purpose};
use super::upstreams::{Event, Origin};
use super::wait::forget_waiting;
use super::{Worker, hot_copies};
use crate::slab::Handle;

impl Worker {
    /// Handles the events of connections.
    #[inline]
    pub(super) fn settle_events(&mut self) {
        loop {
            if let Some(event) = self.up.next_event() {
                self.on_event(event);
            } else if let Some(event) = self.down.next_event() {
                self.on_client_event(event);
            } else if self.gathers.has_requests() {
                self.send_gathers();
            } else if self.tracking.perform(&self.turn, &mut self.up) {
                self.tracking.settle_tracking(&self.turn, &mut self.down);
            } else if self.pubsub.has_requests() {
                if let Some(effect) = self.pubsub.perform(&self.turn, &mut self.up) {
                    let is_served = self.up.is_any_up(&self.turn);
                    self.pubsub.apply(&self.turn, &mut self.down, effect, is_served);
                }
            } else {
                return;
            }
        }
    }

    #[cold]
    fn on_client_event(&mut self, event: ClientEvent) {
        match event {
            ClientEvent::Closed { handle, client } => self.on_closed(handle, *client),
            ClientEvent::Drained { link } => self.up.unpause(link),
            ClientEvent::GivesBack { client, link } => {
                if self.up.get(link).is_some_and(|l| l.holder() == client || l.holder() == Handle::NONE) {
                    self.up.release(&self.turn, link);
                }
            }
            ClientEvent::Abandons { client, link } => self.up.abandon_of(&self.turn, client, link),
            ClientEvent::LeavesLine { client } => self.up.leave_pools(client),
            ClientEvent::OwnWrite { client, keys } => self.tracking.on_own_write(&self.turn, client, &keys),
        }
    }

    /// Ends everything that a closed client has used.
    fn on_closed(&mut self, handle: Handle, client: Client) {
        if client.stall == Stall::Exclusive {
            self.up.leave_pools(handle);
        }
        if let Some(waiting) = &client.waiting {
            leave_line(&self.turn, waiting);
        }
        let watched = client.session.as_ref().and_then(|s| s.watch.as_ref()).map(|w| w.link);
        for held in client.held.into_iter().chain(watched) {
            self.up.abandon_of(&self.turn, handle, held);
        }
        if client.monitor {
            end_monitor(&self.turn, handle);
        }
        if client.tracked.is_some() {
            self.tracking.end_tracking(&self.turn, &mut self.down, handle);
        }
        if let Some(subscriber) = client.pubsub {
            self.pubsub.forget_subscriber(&self.turn, handle, &subscriber);
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
                    let pending = self.hooks.over(&self.turn, ended, b"");
                    if text.is_none() {
                        if pending.purpose == Purpose::Fill {
                            hot_copies::filled(&self.turn, &mut self.down, &mut self.hooks, pending.seq, b"", true);
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
            Event::PubsubUp { link, node } => {
                self.tracking.link_up(&self.turn, &mut self.up, link, node);
                self.pubsub.link_up(&self.turn, &mut self.up, link, node);
            }
            Event::PubsubFailed { node } => {
                self.tracking.link_failed(&self.turn, &mut self.down, node);
                self.pubsub.link_failed(node);
            }
            Event::PubsubLost { node } => {
                self.tracking.tracking_link_lost(&self.turn, &mut self.down, node);
                self.pubsub.link_lost(&self.turn, &mut self.down, node);
                let is_member = self.turn.routing().topology.node(node).is_some();
                if is_member && needs_pubsub_link(&self.tracking, &self.pubsub, node) {
                    let link = self.up.shared_link(&self.turn, node, Lane::Pubsub, true);
                    if self.up.get(link).is_none_or(|link| !link.takes_commands()) {
                        self.up.emit(Event::PubsubFailed { node });
                    }
                }
            }
            Event::FillsUp { node, about } => self.hooks.link_up(&self.turn, node, &about),
            Event::FillsLost { node } => self.hooks.link_lost(&self.turn, node),
            Event::OutageOver => dispatch_waiting(&self.turn, &mut self.down),
            Event::Granted { client, link } => {
                match self.down.get_mut(client).filter(|client| client.stall == Stall::Exclusive) {
                    Some(waiting) => {
                        waiting.held = Some(link);
                        self.down.unstall(&self.turn, client);
                    }
                    None => self.up.release(&self.turn, link),
                }
            }
            Event::Released { client, link } => self.down.forget_held(client, link),
            Event::Refused { client, text } => {
                if let Some(waiting) = self.down.get_mut(client).filter(|client| client.stall == Stall::Exclusive) {
                    waiting.refusal = text.map(Into::into).or(waiting.refusal.take());
                    self.down.unstall(&self.turn, client);
                }
            }
            Event::Room { client } => {
                if self.down.get(client).is_some_and(|client| client.stall == Stall::Upstream) {
                    self.down.unstall(&self.turn, client);
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
                let holds = self.down.get(pending.who).is_some_and(|c| c.held == Some(link));
                let streamed = self.down.get(pending.who).is_some_and(|c| c.streaming && c.is_first(pending.seq));
                if holds && let Some(client) = self.down.get_mut(pending.who) {
                    client.held = None;
                    if let Some(upload) = client.upload.as_deref_mut() {
                        upload.link = None;
                    }
                }
                if pending.purpose == Purpose::Watch {
                    fail_watch(&mut self.down, pending.who);
                } else if pending.purpose == Purpose::Wait {
                    forget_waiting(&mut self.down, pending.who);
                }
                if streamed {
                    // Half a reply has been sent, so the connection must be closed.
                    self.down.close_client(&self.turn, pending.who);
                } else if lane == Some(Lane::Blocking) {
                    self.down.end_as_a_server_would(&self.turn, pending.who, pending.seq);
                } else if lane == Some(Lane::Replica) {
                    // The node itself may be up.
                    self.down.deliver_of_node(&self.turn, pending.who, pending.seq, error);
                } else {
                    self.down.deliver(&self.turn, pending.who, pending.seq, error);
                }
            }
            Purpose::Gather => self.gather_part(pending.who, pending.seq, error),
            Purpose::Unblock => self.on_unblock(pending.who, error),
            Purpose::Look => self.on_look(pending.who, pending.seq, error),
            // After a lost connection, its topics are handled together.
            Purpose::Subscribe if is_up => self.pubsub.subscribe_timed_out(pending.who, node),
            Purpose::Track if is_up => {
                self.tracking.on_tracking_answer(&self.turn, &mut self.down, node, pending.seq, error)
            }
            Purpose::Fill => hot_copies::filled(&self.turn, &mut self.down, &mut self.hooks, pending.seq, error, true),
            Purpose::Sync => self.pubsub.unsubscribe_synced(&self.turn, &mut self.down, pending.who, pending.seq),
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
