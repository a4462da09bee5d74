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
//! [`Downstreams`](super::downstreams::Downstreams) knows no connection to a node, and does the same:
//!
//! | Event | Handled by |
//! |---|---|
//! | `Closed` | pools, lines of blocked clients, the held connection, MONITOR, tracking, subscriptions |
//! | `Drained`, `GivesBack`, `Abandons` | the held connection |
//! | `LeavesLine` | pools |
//! | `OwnWrite` | tracking |

use switchyard_resp::encode;

use super::blocking::{on_unblock, unblock};
use super::downstreams::client::Upload;
use super::downstreams::waits::Stall;
use super::downstreams::{Client, ClientEvent};
use super::gather::FoundRedirect;
use super::monitor::end_monitor;
use super::outage::dispatch_waiting;
use super::pubsub::nodes::needs_pubsub_link;
use super::reissued::leave_line;
use super::tracking::Tracked;
use super::transactions::session::Session;
use super::transactions::{fail_watch, reissue_watches};
use super::upstreams::breaking::PERHAPS;
use super::upstreams::pending::{Pending, Purpose};
use super::upstreams::{Event, Origin};
use super::wait::forget_waiting;
use super::{Worker, hot_copies};
use crate::lane::Lane;
use crate::slab::Handle;

impl Worker {
    /// Handles the events of connections.
    #[inline]
    pub(super) fn settle_events(&mut self) {
        loop {
            if let Some(event) = self.cx.up.next_event() {
                self.on_event(event);
            } else if let Some(event) = self.cx.down.next_event() {
                self.on_client_event(event);
            } else if self.gathers.has_requests() {
                self.gathers.send_gathers(&mut self.cx);
            } else if let Some(FoundRedirect { client, seq, options, parts }) = self.gathers.next_redirect() {
                self.tracking.redirect_found(&self.cx.turn, &mut self.cx.down, client, seq, *options, &parts);
            } else if self.tracking.perform(&self.cx.turn, &mut self.cx.up) {
                self.tracking.settle_tracking(&self.cx.turn, &mut self.cx.down);
            } else if self.pubsub.has_requests() {
                if let Some(effect) = self.pubsub.perform(&self.cx.turn, &mut self.cx.up) {
                    let is_served = self.cx.up.links().is_any_up(&self.cx.turn);
                    self.pubsub.apply(&self.cx.turn, &mut self.cx.down, effect, is_served);
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
            ClientEvent::Drained { link } => self.cx.up.unpause(link),
            ClientEvent::GivesBack { client, link } => {
                if self.cx.up.get(link).is_some_and(|l| l.holder() == client || l.holder() == Handle::NONE) {
                    self.cx.up.release(&self.cx.turn, link);
                }
            }
            ClientEvent::Abandons { client, link } => self.cx.up.abandon(&self.cx.turn, client, link),
            ClientEvent::LeavesLine { client } => self.cx.up.leave_pools(client),
            ClientEvent::OwnWrite { client, keys } => self.tracking.on_own_write(&self.cx.turn, client, &keys),
        }
    }

    /// Ends everything that a closed client has used.
    fn on_closed(&mut self, handle: Handle, mut client: Client) {
        if client.stall() == Stall::Exclusive {
            self.cx.up.leave_pools(handle);
        }
        if let Some(waiting) = client.state() {
            leave_line(&self.cx.turn, waiting);
        }
        let watched = client.state::<Session>().and_then(|s| s.watch.as_ref()).map(|w| w.link);
        for held in client.held().into_iter().chain(watched) {
            self.cx.up.abandon(&self.cx.turn, handle, held);
        }
        if client.is_monitor() {
            end_monitor(&self.cx.turn, handle);
        }
        if client.state::<Tracked>().is_some() {
            self.tracking.end_tracking(&self.cx.turn, &mut self.cx.down, handle);
        }
        if let Some(subscriber) = client.take_state() {
            self.pubsub.forget_subscriber(&self.cx.turn, handle, &subscriber);
        }
    }

    #[cold]
    fn on_event(&mut self, event: Event) {
        match event {
            Event::Failed { origin, ended, in_flight, text, mut requests } => {
                let (mut not_executed, mut perhaps_executed) = (Vec::new(), Vec::new());
                if let Some(text) = &text {
                    encode::error(&mut not_executed, text);
                    encode::error(&mut perhaps_executed, &format!("{text}{PERHAPS}"));
                }
                for (place, ended) in ended.into_iter().enumerate() {
                    let is_expired = ended.is_expired;
                    let pending = self.cx.hooks.over(&self.cx.turn, ended, b"");
                    if text.is_none() {
                        if pending.purpose == Purpose::Fill {
                            hot_copies::filled(
                                &self.cx.turn,
                                &mut self.cx.down,
                                &mut self.cx.hooks,
                                pending.seq,
                                b"",
                                true,
                            );
                        }
                    } else if !is_expired {
                        let request = requests.get_mut(place).and_then(Option::take);
                        if let (Some(request), Some(lane)) = (request, origin.lane)
                            && self.redirects.repeat(
                                &mut self.cx,
                                &self.gathers,
                                lane,
                                pending,
                                &request,
                                place < in_flight,
                            )
                        {
                            continue;
                        }
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
                self.tracking.link_up(&self.cx.turn, &mut self.cx.up, &mut self.cx.down, link, node);
                self.pubsub.link_up(&self.cx.turn, &mut self.cx.up, link, node);
            }
            Event::PubsubFailed { node } => {
                self.tracking.link_failed(&self.cx.turn, &mut self.cx.down, node);
                self.pubsub.link_failed(&self.cx.turn, node);
            }
            Event::PubsubLost { node } => {
                self.tracking.tracking_link_lost(&self.cx.turn, &mut self.cx.down, node);
                self.pubsub.link_lost(&self.cx.turn, &mut self.cx.down, node);
                let is_member = self.cx.turn.routing().topology.node(node).is_some();
                if is_member && needs_pubsub_link(&self.tracking, &self.pubsub, node) {
                    let link = self.cx.up.shared_link(&self.cx.turn, node, Lane::Pubsub, true);
                    if self.cx.up.get(link).is_none_or(|link| !link.takes_commands()) {
                        self.cx.up.emit(Event::PubsubFailed { node });
                    }
                }
            }
            Event::FillsUp { node, about } => self.cx.hooks.link_up(&self.cx.turn, node, &about),
            Event::FillsLost { node } => self.cx.hooks.link_lost(&self.cx.turn, node),
            Event::OutageOver => dispatch_waiting(&self.cx.turn, &mut self.cx.down),
            Event::Granted { client, link } => {
                match self.cx.down.get_mut(client).filter(|client| client.stall() == Stall::Exclusive) {
                    Some(waiting) => {
                        waiting.hold(link);
                        self.cx.down.unstall(&self.cx.turn, client);
                    }
                    None => self.cx.up.release(&self.cx.turn, link),
                }
            }
            Event::Released { client, link } => self.cx.down.forget_held(client, link),
            Event::Refused { client, text } => {
                if let Some(waiting) = self.cx.down.get_mut(client).filter(|client| client.stall() == Stall::Exclusive)
                {
                    waiting.waits_mut().refuse(text);
                    self.cx.down.unstall(&self.cx.turn, client);
                }
            }
            Event::Room { client } => {
                if self.cx.down.get(client).is_some_and(|client| client.stall() == Stall::Upstream) {
                    self.cx.down.unstall(&self.cx.turn, client);
                }
            }
            Event::Abandoned { link } => unblock(&mut self.cx, link, false, None),
            Event::WatchAwaited { node } => reissue_watches(&mut self.cx, node),
        }
    }

    /// Replies with an error to a request.
    pub(super) fn fail_pending(&mut self, origin: Origin, pending: Pending, error: &[u8]) {
        let Origin { link, node, lane, is_up } = origin;
        match pending.purpose {
            Purpose::Client
            | Purpose::ClientHealed
            | Purpose::Exec
            | Purpose::ExecWithoutMulti
            | Purpose::Watch
            | Purpose::Wait => {
                let holds = self.cx.down.get(pending.who).is_some_and(|c| c.held() == Some(link));
                let streamed = self
                    .cx
                    .down
                    .get(pending.who)
                    .is_some_and(|c| c.replies().is_streaming() && c.replies().is_first(pending.seq));
                if holds && let Some(client) = self.cx.down.get_mut(pending.who) {
                    client.take_held();
                    if let Some(upload) = client.state_mut::<Upload>() {
                        upload.link = None;
                    }
                }
                if pending.purpose == Purpose::Watch {
                    fail_watch(&mut self.cx.down, pending.who);
                } else if pending.purpose == Purpose::Wait {
                    forget_waiting(&mut self.cx.down, pending.who);
                }
                if streamed {
                    // Half a reply has been sent, so the connection must be closed.
                    self.cx.down.close_client(&self.cx.turn, pending.who);
                } else if lane == Some(Lane::Blocking) {
                    self.cx.down.end_as_a_server_would(&self.cx.turn, pending.who, pending.seq);
                } else if lane == Some(Lane::Replica) {
                    // The node itself may be up.
                    self.cx.down.deliver_of_node(&self.cx.turn, pending.who, pending.seq, error);
                } else {
                    self.cx.down.deliver(&self.cx.turn, pending.who, pending.seq, error);
                }
            }
            Purpose::Gather => self.gathers.gather_part(&mut self.cx, pending.who, pending.seq, error),
            Purpose::Unblock => on_unblock(&mut self.cx, pending.who, error),
            Purpose::Look => self.reissued_commands.on_look(&mut self.cx, pending.who, pending.seq, error),
            // After a lost connection, its topics are handled together.
            Purpose::Subscribe if is_up => self.pubsub.subscribe_timed_out(pending.who, node),
            Purpose::Track if is_up => {
                self.tracking.on_tracking_answer(&self.cx.turn, &mut self.cx.down, node, pending.seq, error)
            }
            Purpose::Fill => {
                hot_copies::filled(&self.cx.turn, &mut self.cx.down, &mut self.cx.hooks, pending.seq, error, true)
            }
            Purpose::Sync => self.pubsub.unsubscribe_synced(&self.cx.turn, &mut self.cx.down, pending.who, pending.seq),
            Purpose::Discarded
            | Purpose::Learn
            | Purpose::Confirm
            | Purpose::Queued
            | Purpose::Subscribe
            | Purpose::Track
            | Purpose::FillTtl
            | Purpose::Beat
            | Purpose::Touch => {}
        }
    }
}
