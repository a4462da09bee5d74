//! Connections of a worker to the nodes: all connections, their roles, and those with unsent output.
//!
//! Independent of clients. Code that needs both sides is in other modules.

pub(super) mod breaking;
pub(super) mod connect;
pub(super) mod handshake;
pub(super) mod incoming;
pub(super) mod kind;
mod lifecycle;
pub(super) mod link;
pub(super) mod links;
pub(super) mod outages;
pub(super) mod pending;
pub(super) mod pool;
pub(super) mod queued;
pub(super) mod renew;
pub(super) mod replicas;
pub(super) mod requests;
mod socket;
pub(super) mod tick;
pub(super) mod translate;
pub(super) mod unblock;
pub(super) mod zombies;

use std::collections::VecDeque;
use std::net::SocketAddr;

use switchyard_policy::routing::anywhere;
use switchyard_policy::topology::NodeId;

use super::hot_copies::store::About;
use super::keyed::{FinishedRequest, Request};
use super::turn::Turn;
use crate::lane::Lane;
use crate::shared::RoutingSnapshot;
use crate::slab::Handle;
use crate::tap::Outcome;
use handshake::HandshakeState;
use incoming::Incoming;
use kind::Checkout;
use lifecycle::Lifecycle;
use links::Links;
use outages::Outages;
use pending::Pending;
use pool::Pools;
use queued::Transaction;
use requests::Requests;
use socket::Socket;
use unblock::Unblocks;
use zombies::Zombies;

/// Connection of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Origin {
    pub(super) link: Handle,
    pub(super) node: NodeId,
    /// `None`: there was no connection any more.
    pub(super) lane: Option<Lane>,
    /// The connection is still up.
    pub(super) is_up: bool,
}

/// Change of a connection that concerns clients or features. The loop passes each event to them.
#[derive(Debug)]
pub(super) enum Event {
    /// Requests that get no reply, because their connection was lost. The node may execute the first `in_flight`.
    /// `text`: error for their clients; `None`: they get none. `requests`: with members of a cluster, the bytes of
    /// requests that may be sent to another member.
    Failed {
        origin: Origin,
        ended: Vec<FinishedRequest>,
        in_flight: usize,
        text: Option<String>,
        requests: Vec<Option<Box<[u8]>>>,
    },
    /// Requests without a reply in time. They stay pending.
    Late {
        origin: Origin,
        late: Vec<Pending>,
        text: String,
    },
    /// A connection for subscriptions is up.
    PubsubUp {
        link: Handle,
        node: NodeId,
    },
    /// No connection for subscriptions to the node can be made.
    PubsubFailed {
        node: NodeId,
    },
    PubsubLost {
        node: NodeId,
    },
    /// A connection for fills of hot copies is up.
    FillsUp {
        node: NodeId,
        about: About,
    },
    FillsLost {
        node: NodeId,
    },
    /// A lost node has returned, or its commands wait no longer.
    OutageOver,
    /// An exclusive connection for the first client in line.
    Granted {
        client: Handle,
        link: Handle,
    },
    /// An exclusive connection is free again after its last reply.
    Released {
        client: Handle,
        link: Handle,
    },
    /// The client in line gets no exclusive connection. `None`: it tries again, and is answered at once.
    Refused {
        client: Handle,
        text: Option<String>,
    },
    /// A connection has room for commands of this client again.
    Room {
        client: Handle,
    },
    /// The client of a blocking command on this connection has gone.
    Abandoned {
        link: Handle,
    },
    /// Clients wait for a connection for transactions.
    WatchAwaited {
        node: NodeId,
    },
}

/// A connection to a node. See [`link`].
#[derive(Debug)]
pub(super) struct Link {
    node: NodeId,
    lane: Lane,
    /// Of an exclusive connection.
    checkout: Option<Checkout>,
    /// Address of the replica, if it leads to one.
    replica: Option<SocketAddr>,
    /// Current address, or the last one tried.
    address: Option<SocketAddr>,
    resp3: bool,
    /// For RESP3 clients, but the node does not support it: replies are translated.
    downgraded: bool,
    /// To a member of a cluster whose replica has replaced it: only its redirects count.
    is_distrusted: bool,
    life: Lifecycle,
    socket: Socket,
    requests: Requests,
    incoming: Incoming,
    handshake: HandshakeState,
    transaction: Transaction,
    /// In the list of connections with unsent output.
    dirty: bool,
    /// Clients that wait until fewer bytes are unsent.
    waiters: Vec<Handle>,
}

#[derive(Debug)]
pub(super) struct Upstreams {
    links: Links,
    pools: Pools,
    /// Connections with unsent output.
    dirty: Vec<Handle>,
    outages: Outages,
    zombies: Zombies,
    events: VecDeque<Event>,
    /// Connections that were not read to the end.
    unread: Vec<Handle>,
    /// Counter for choosing a node.
    turn_of_nodes: usize,
    unblocks: Unblocks,
}

impl Upstreams {
    /// `index`: number of the worker.
    pub(super) fn new(zombies: Zombies, index: usize) -> Self {
        Self {
            links: Links::new(),
            pools: Pools::default(),
            dirty: Vec::new(),
            outages: Outages::default(),
            zombies,
            events: VecDeque::new(),
            unread: Vec::new(),
            turn_of_nodes: index,
            unblocks: Unblocks::default(),
        }
    }

    /// Returns the next event.
    #[inline]
    pub(super) fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    pub(super) fn emit(&mut self, event: Event) {
        self.events.push_back(event);
    }

    // ---- input ----

    /// Reads a connection again in the next turn.
    #[inline]
    pub(super) fn read_later(&mut self, handle: Handle) {
        self.unread.push(handle);
    }

    pub(super) fn has_unread(&self) -> bool {
        !self.unread.is_empty()
    }

    pub(super) fn take_unread(&mut self) -> Vec<Handle> {
        std::mem::take(&mut self.unread)
    }

    /// All connections, and their roles.
    pub(super) fn links(&self) -> &Links {
        &self.links
    }

    #[inline]
    pub(super) fn get(&self, handle: Handle) -> Option<&Link> {
        self.links.get(handle)
    }

    #[inline]
    pub(super) fn get_mut(&mut self, handle: Handle) -> Option<&mut Link> {
        self.links.get_mut(handle)
    }

    /// Returns a node for a command that any node can execute, in turn.
    pub(super) fn choose_node(&mut self, turn: &Turn, routing: &RoutingSnapshot) -> Option<NodeId> {
        self.turn_of_nodes = self.turn_of_nodes.wrapping_add(1);
        let (links, topology, number) = (&self.links, &routing.topology, self.turn_of_nodes);
        // A node that has just joined may lack functions, and one without keys may be about to leave.
        let keeper = anywhere(topology, number, |node| turn.data_nodes().has(node) && links.is_up(node));
        let other = || anywhere(topology, number, |node| links.is_up(node));
        // After a start no node is up, and a command with keys would wait for its node as well. The same applies after
        // a loss.
        let soon = || anywhere(topology, number, |node| links.takes_commands(node) || !turn.node_fails(node));
        keeper.or_else(other).or_else(soon)
    }

    /// Whether all connections are up, and nothing has to be repeated.
    pub(super) fn is_settled(&self) -> bool {
        self.links.iter().all(|(_, link)| link.is_up()) && self.unblocks.is_empty()
    }

    /// Ends a pause of reading.
    pub(super) fn unpause(&mut self, handle: Handle) {
        if self.get_mut(handle).is_some_and(|link| link.incoming.unpause()) {
            self.read_later(handle);
        }
    }

    /// Broken connections with unconfirmed commands.
    pub(super) fn zombies(&self) -> &Zombies {
        &self.zombies
    }

    /// Ends of waits to be repeated.
    pub(super) fn unblocks(&mut self) -> &mut Unblocks {
        &mut self.unblocks
    }

    /// Outages of nodes.
    #[inline]
    pub(super) fn outages(&self) -> &Outages {
        &self.outages
    }

    // ---- output ----

    /// Passes a request to a connection. Without the connection, the request fails, because its end may be observed.
    #[inline]
    pub(super) fn push(&mut self, handle: Handle, request: Request<'_>) {
        match self.get_mut(handle) {
            Some(link) => link.push(request),
            None => {
                let origin = Origin { link: Handle::NONE, node: NodeId(0), lane: None, is_up: false };
                let ended = FinishedRequest::new(request.into_parts().2, Outcome::Never, false);
                let text = "NODELOST the connection was lost before the command was sent".to_owned();
                let (ended, text, requests) = (vec![ended], Some(text), Vec::new());
                self.emit(Event::Failed { origin, ended, in_flight: 0, text, requests });
            }
        }
        self.mark(handle);
    }

    /// Like `push`, for a client with this setting of CLIENT NO-TOUCH.
    #[inline]
    pub(super) fn push_for(&mut self, handle: Handle, no_touch: bool, request: Request<'_>) {
        if let Some(link) = self.links.get_mut(handle) {
            link.touch_as(no_touch, request.pending());
            link.push(request);
            if !link.dirty {
                link.dirty = true;
                self.dirty.push(handle);
            }
        } else {
            self.push(handle, request);
        }
    }

    /// Marks a connection as having unsent output.
    #[inline]
    pub(super) fn mark(&mut self, handle: Handle) {
        if let Some(link) = self.links.get_mut(handle)
            && !link.dirty
        {
            link.dirty = true;
            self.dirty.push(handle);
        }
    }

    /// Whether a client must wait before it adds to this connection. If so, it is resumed later.
    pub(super) fn is_full(&mut self, handle: Handle, client: Handle, high: usize) -> bool {
        let Some(link) = self.get_mut(handle).filter(|link| !link.has_room(high)) else { return false };
        if !link.waiters.contains(&client) {
            link.waiters.push(client);
        }
        self.mark(handle);
        true
    }

    /// Number of marked connections.
    pub(super) const fn marked_count(&self) -> usize {
        self.dirty.len()
    }

    /// Returns each marked connection once. A connection that was flushed within the turn and has new output is in the
    /// list twice.
    pub(super) fn marked(&mut self) -> impl Iterator<Item = (Handle, &Link)> {
        let links = &mut self.links;
        self.dirty.retain(|handle| links.get_mut(*handle).is_some_and(|link| std::mem::take(&mut link.dirty)));
        let links = &self.links;
        self.dirty.iter().filter_map(|handle| Some((*handle, links.get(*handle)?)))
    }

    /// Sends the output of the marked connections.
    pub(super) fn flush_links(&mut self, turn: &Turn) {
        let mut marked = std::mem::take(&mut self.dirty);
        for handle in marked.drain(..) {
            let Some(link) = self.get_mut(handle) else { continue };
            match link.flush() {
                Ok(waiters) => {
                    for client in waiters {
                        self.emit(Event::Room { client });
                    }
                }
                Err(error) => self.break_link(turn, handle, &std::io::Error::from(error).to_string()),
            }
        }
        // Reuses the list, if no connection was marked in the meantime.
        if self.dirty.is_empty() {
            self.dirty = marked;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::pending::{Again, Purpose};
    use super::*;
    use crate::worker::command::CommandSeq;

    #[test]
    fn a_request_whose_connection_is_gone_is_over() {
        let mut links = Upstreams::new(Zombies::default(), 0);
        let pending = Pending {
            who: Handle::NONE,
            seq: 7,
            len: 0,
            sent_us: 0,
            epoch: 0,
            purpose: Purpose::Client,
            class: 0,
            again: Again::Never,
            is_long: false,
            end: CommandSeq::NONE,
            cacheable: 0,
        };
        links.push(Handle::NONE, Request::of_ours(b"SET k v", 0, pending));
        let Some(Event::Failed { ended, text: Some(_), .. }) = links.next_event() else { panic!("one has failed") };
        assert_eq!((ended.len(), ended[0].outcome()), (1, Outcome::Never));
        assert!(links.next_event().is_none());
    }
}
