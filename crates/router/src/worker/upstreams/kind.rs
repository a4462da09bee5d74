//! Kind of a connection to a node: its lane; shared, for subscriptions, to a replica, or exclusive, with its holder and
//! the node's activity for it.

use std::net::SocketAddr;

use switchyard_policy::topology::Slot;
use switchyard_resp::translate::Shape;

use super::unblock::Unblock;
use super::{Checkout, Link};
use crate::connections::Connection;
use crate::slab::Handle;

/// Lanes: the kinds of connections of a worker to a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Lane {
    /// Pipelined, shared by all clients.
    Main,
    /// Like `Main`, for commands that may take long.
    Slow,
    /// Exclusive, for large values.
    Large,
    /// No connection: the lane of a client during a command of several steps, so that none of its other commands is
    /// sent.
    Rounds,
    /// Exclusive, from WATCH to EXEC. Also for transactions while the shared connection is down.
    Watch,
    /// Exclusive, for a blocking command.
    Blocking,
    /// Reads from a replica: pipelined, shared by all clients.
    Replica,
    /// Fills of hot copies. The node reports changes of keys read here.
    Fills,
    /// Only subscriptions. For a client: its commands in flight change subscriptions.
    Pubsub,
}

impl Lane {
    /// Index of the pool of exclusive connections. `None` for shared lanes.
    #[inline]
    pub(super) fn pool(self) -> Option<usize> {
        match self {
            Lane::Main | Lane::Slow | Lane::Rounds | Lane::Pubsub | Lane::Replica | Lane::Fills => None,
            Lane::Large => Some(0),
            Lane::Watch => Some(1),
            Lane::Blocking => Some(2),
        }
    }

    /// Whether connections of this lane are exclusive.
    #[inline]
    pub(in crate::worker) fn is_exclusive(self) -> bool {
        self.pool().is_some()
    }
}

/// Kind of a connection.
#[derive(Debug)]
pub(super) enum Kind {
    /// Pipelined, for all clients.
    Shared,
    /// Only subscriptions.
    Subscriptions,
    /// Reads from this replica.
    Replica(SocketAddr),
    /// Exclusive, for one client at a time.
    Exclusive(Checkout),
}

/// Holder of an exclusive connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::worker) enum CheckoutOwner {
    /// Never connected yet. `is_ahead`: opened in advance, without a client.
    Coming { is_ahead: bool },
    /// In its pool's list of free connections.
    Free,
    /// Held by this client. `NONE`: about to be taken, or the node must reply first.
    Held(Handle),
}

/// Keys that a blocking command waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::worker) enum Waited {
    /// No keys.
    Nothing,
    /// All keys are in this slot.
    Of(Slot),
    /// Several slots, the first one being this: requires a node with all keys.
    OfSeveral(Slot),
}

impl Waited {
    /// Slot of its queue.
    pub(in crate::worker) fn line(self) -> Option<Slot> {
        match self {
            Self::Nothing => None,
            Self::Of(slot) | Self::OfSeveral(slot) => Some(slot),
        }
    }
}

/// Activity of the node for the holder, besides replies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::worker) enum Task {
    Nothing,
    /// Watching keys.
    Watching,
    /// The current command may block for these keys until this time (us).
    Waiting {
        waited: Waited,
        until_us: u64,
    },
    /// The last request of `pending` is still being uploaded: its timeout has not started.
    Uploading,
}

impl Kind {
    /// Returns the kind of a lane. Connections to replicas are created by [`Link::to_replica`].
    pub(super) fn of(lane: Lane) -> Self {
        match lane {
            Lane::Main | Lane::Slow | Lane::Rounds | Lane::Replica | Lane::Fills => Kind::Shared,
            Lane::Pubsub => Kind::Subscriptions,
            Lane::Large | Lane::Watch | Lane::Blocking => Kind::Exclusive(Checkout {
                owner: CheckoutOwner::Held(Handle::NONE),
                task: Task::Nothing,
                unblock: None,
                slow: false,
                shape: Shape::Plain,
                began_with: Vec::new(),
            }),
        }
    }
}

impl Link {
    /// Returns the identity of the connection, unique over all workers.
    pub(super) fn connection(&self, worker: usize) -> Connection {
        Connection { worker, node: self.node, client_id: self.client_id(), run_id: self.handshake.run_id().cloned() }
    }

    /// Returns a connection to a replica.
    pub(super) fn to_replica(address: SocketAddr, mut link: Self) -> Self {
        link.kind = Kind::Replica(address);
        link
    }

    /// Returns the state of an exclusive connection.
    #[inline]
    pub(super) fn checkout(&self) -> Option<&Checkout> {
        match &self.kind {
            Kind::Exclusive(loan) => Some(loan),
            Kind::Shared | Kind::Subscriptions | Kind::Replica(_) => None,
        }
    }

    #[inline]
    pub(super) fn checkout_mut(&mut self) -> Option<&mut Checkout> {
        match &mut self.kind {
            Kind::Exclusive(loan) => Some(loan),
            Kind::Shared | Kind::Subscriptions | Kind::Replica(_) => None,
        }
    }

    /// Returns the holding client. `NONE` without one.
    #[inline]
    pub(in crate::worker) fn holder(&self) -> Handle {
        match self.checkout().map(|loan| loan.owner) {
            Some(CheckoutOwner::Held(holder)) => holder,
            _ => Handle::NONE,
        }
    }

    /// Starts a command of `holder` on an exclusive connection. `start`: the part of the command that is kept for the
    /// slow log.
    pub(in crate::worker) fn begin_command(&mut self, holder: Handle, shape: Shape, start: &[u8]) {
        self.transaction.begin();
        let Some(checkout) = self.checkout_mut() else { return };
        checkout.owner = CheckoutOwner::Held(holder);
        checkout.task = Task::Nothing;
        checkout.shape = shape;
        checkout.began_with.clear();
        checkout.began_with.extend_from_slice(start);
    }

    /// Start of the current command on an exclusive connection.
    pub(in crate::worker) fn command_start(&self) -> &[u8] {
        self.checkout().map_or(&[], |checkout| &checkout.began_with)
    }

    /// Records whether the current command may take as long as commands on the slow lane.
    pub(in crate::worker) fn note_slow(&mut self, is_slow: bool) {
        self.checkout_mut().into_iter().for_each(|checkout| checkout.slow |= is_slow);
    }

    /// Returns the CLIENT UNBLOCK for the current command, if any.
    pub(in crate::worker) fn unblock(&self) -> Option<&Unblock> {
        self.checkout()?.unblock.as_deref()
    }

    pub(in crate::worker) fn unblock_mut(&mut self) -> Option<&mut Unblock> {
        self.checkout_mut()?.unblock.as_deref_mut()
    }

    /// Returns the CLIENT UNBLOCK for the current command of an exclusive connection. Creates it if necessary.
    pub(in crate::worker) fn begin_unblock(&mut self) -> Option<&mut Unblock> {
        Some(self.checkout_mut()?.unblock.get_or_insert_default())
    }

    /// Whether this client holds it without a command or another activity of the node.
    pub(in crate::worker) fn is_unused_by(&self, client: Handle) -> bool {
        self.is_idle() && self.task() == Task::Nothing && self.holder() == client
    }

    /// Returns the activity of the node for the holder.
    #[inline]
    pub(in crate::worker) fn task(&self) -> Task {
        self.checkout().map_or(Task::Nothing, |loan| loan.task)
    }

    /// Whether the last request is still being uploaded.
    #[inline]
    pub(super) fn is_uploading(&self) -> bool {
        self.task() == Task::Uploading
    }

    pub(in crate::worker) fn set_task(&mut self, task: Task) {
        self.checkout_mut().into_iter().for_each(|loan| loan.task = task);
    }

    pub(in crate::worker) fn set_holder(&mut self, holder: Handle) {
        self.checkout_mut().into_iter().for_each(|loan| loan.owner = CheckoutOwner::Held(holder));
    }

    /// Time until which the current command may block at the node, us.
    pub(in crate::worker) fn waits_until_us(&self) -> u64 {
        match self.task() {
            Task::Waiting { until_us, .. } => until_us,
            Task::Nothing | Task::Watching | Task::Uploading => 0,
        }
    }

    /// Whether its current commands may take as long as slow commands.
    pub(super) fn is_slow(&self) -> bool {
        self.lane == Lane::Slow
            || self.checkout().is_some_and(|loan| loan.slow)
            || self.head().is_some_and(|head| head.is_long)
    }

    /// Address of the replica.
    pub(in crate::worker) fn replica(&self) -> Option<SocketAddr> {
        match self.kind {
            Kind::Replica(address) => Some(address),
            Kind::Shared | Kind::Subscriptions | Kind::Exclusive(_) => None,
        }
    }
}
