//! What a connection to a node is: its lane; shared, for subscriptions, to a replica, or exclusive, with who has it and
//! what its node does for that client.

use std::net::SocketAddr;

use switchyard_policy::topology::Slot;
use switchyard_resp::translate::Shape;

use super::blocking::Unblock;
use super::upstream::Link;
use crate::connections::Connection;
use crate::slab::Handle;

/// The kinds of connection a worker has to a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Lane {
    /// Pipelined, shared by all clients.
    Main,
    /// The same for commands that may take long.
    Slow,
    /// One client's, for large values.
    Large,
    /// No connection of its own: the lane of a client while a command of it takes several rounds, so that no other
    /// command of it is sent.
    Rounds,
    /// One client's, from WATCH to EXEC; also for transactions while the shared connection is not up.
    Watch,
    /// One client's, for a command that waits at the node.
    Blocking,
    /// Reads at a replica: pipelined, shared by all clients.
    Replica,
    /// What hot copies are made of is asked for here: the node says on it what changes.
    Fills,
    /// Nothing but subscriptions. For a client: its commands in flight are (un)subscriptions.
    Pubsub,
}

impl Lane {
    /// Which of the pools of connections that one client has alone; `None` for the shared ones.
    #[inline]
    pub(super) fn pool(self) -> Option<usize> {
        match self {
            Lane::Main | Lane::Slow | Lane::Rounds | Lane::Pubsub | Lane::Replica | Lane::Fills => None,
            Lane::Large => Some(0),
            Lane::Watch => Some(1),
            Lane::Blocking => Some(2),
        }
    }

    /// Whether one client at a time has such a connection alone.
    #[inline]
    pub(super) fn is_exclusive(self) -> bool {
        self.pool().is_some()
    }
}

/// What a connection is.
#[derive(Debug)]
pub(super) enum Kind {
    /// Pipelined, for all clients.
    Shared,
    /// Nothing but subscriptions.
    Subscriptions,
    /// For reads, to this replica.
    Replica(SocketAddr),
    /// For one client at a time.
    Exclusive(Checkout),
}

/// Who has an exclusive connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CheckoutOwner {
    /// It has never been up. `is_ahead`: it is made for nobody in particular, because somebody will ask for it soon.
    Coming { is_ahead: bool },
    /// In its pool's list of free connections.
    Free,
    /// This client. `NONE`: somebody is about to take it, or its node has yet to answer before anybody may.
    Held(Handle),
}

/// The keys that a command waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Waited {
    /// None.
    Nothing,
    /// All are in this slot.
    Of(Slot),
    /// They are in several slots, the first in this one: only a node that has every key has them together.
    OfSeveral(Slot),
}

impl Waited {
    /// The slot in whose line it waits.
    pub(super) fn line(self) -> Option<Slot> {
        match self {
            Self::Nothing => None,
            Self::Of(slot) | Self::OfSeveral(slot) => Some(slot),
        }
    }
}

/// What the node does for the holder, beside answering.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Task {
    Nothing,
    /// It watches keys.
    Watching,
    /// The command under way may wait there, for these keys, until then (us).
    Waiting {
        waited: Waited,
        until_us: u64,
    },
    /// The last request of `pending` is still being uploaded: its time at the node has not begun.
    Uploading,
}

/// The state of an exclusive connection.
#[derive(Debug)]
pub(super) struct Checkout {
    pub(super) tenure: CheckoutOwner,
    pub(super) task: Task,
    /// The command under way is to be ended by CLIENT UNBLOCK.
    pub(super) unblock: Option<Box<Unblock>>,
    /// What is under way may take as long as commands of the slow lane.
    pub(super) slow: bool,
    /// What the reply to its request looks like in RESP3.
    pub(super) shape: Shape,
    /// The beginning of the command that it carries, for the slow log: the command itself is not kept.
    pub(super) began_with: Vec<u8>,
}

impl Kind {
    /// That of a lane. One to a replica is made by [`Link::to_replica`].
    pub(super) fn of(lane: Lane) -> Self {
        match lane {
            Lane::Main | Lane::Slow | Lane::Rounds | Lane::Replica | Lane::Fills => Kind::Shared,
            Lane::Pubsub => Kind::Subscriptions,
            Lane::Large | Lane::Watch | Lane::Blocking => Kind::Exclusive(Checkout {
                tenure: CheckoutOwner::Held(Handle::NONE),
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
    /// Its name among those of all workers.
    pub(super) fn connection(&self, worker: usize) -> Connection {
        Connection { worker, node: self.node, client_id: self.client_id, run_id: self.run_id.clone() }
    }

    /// One to a replica.
    pub(super) fn to_replica(address: SocketAddr, mut link: Self) -> Self {
        link.kind = Kind::Replica(address);
        link
    }

    /// What one client at a time has of it, where that is so.
    #[inline]
    pub(super) fn loan(&self) -> Option<&Checkout> {
        match &self.kind {
            Kind::Exclusive(loan) => Some(loan),
            Kind::Shared | Kind::Subscriptions | Kind::Replica(_) => None,
        }
    }

    #[inline]
    pub(super) fn loan_mut(&mut self) -> Option<&mut Checkout> {
        match &mut self.kind {
            Kind::Exclusive(loan) => Some(loan),
            Kind::Shared | Kind::Subscriptions | Kind::Replica(_) => None,
        }
    }

    /// The client that has it alone; `NONE` where nobody has.
    #[inline]
    pub(super) fn holder(&self) -> Handle {
        match self.loan().map(|loan| loan.tenure) {
            Some(CheckoutOwner::Held(holder)) => holder,
            _ => Handle::NONE,
        }
    }

    /// What its node does for the holder.
    #[inline]
    pub(super) fn task(&self) -> Task {
        self.loan().map_or(Task::Nothing, |loan| loan.task)
    }

    pub(super) fn set_task(&mut self, task: Task) {
        self.loan_mut().into_iter().for_each(|loan| loan.task = task);
    }

    pub(super) fn set_holder(&mut self, holder: Handle) {
        self.loan_mut().into_iter().for_each(|loan| loan.tenure = CheckoutOwner::Held(holder));
    }

    /// Until when the command under way may wait at the node, us.
    pub(super) fn waits_until_us(&self) -> u64 {
        match self.task() {
            Task::Waiting { until_us, .. } => until_us,
            Task::Nothing | Task::Watching | Task::Uploading => 0,
        }
    }

    /// Whether what is under way on it may take as long as slow commands do.
    pub(super) fn is_slow(&self) -> bool {
        self.lane == Lane::Slow
            || self.loan().is_some_and(|loan| loan.slow)
            || self.head().is_some_and(|head| head.is_long)
    }

    /// The replica that it leads to.
    pub(super) fn replica(&self) -> Option<SocketAddr> {
        match self.kind {
            Kind::Replica(address) => Some(address),
            Kind::Shared | Kind::Subscriptions | Kind::Exclusive(_) => None,
        }
    }
}
