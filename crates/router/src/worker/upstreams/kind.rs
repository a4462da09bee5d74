//! Kind of a connection to a node: its lane, and for an exclusive connection its holder and the node's activity for it.

use switchyard_policy::topology::Slot;
use switchyard_resp::translate::Shape;

use super::Link;
use super::unblock::Unblock;
use crate::connections::Connection;
use crate::lane::Lane;
use crate::shared::Mailboxes;
use crate::slab::Handle;
use crate::wait_queues::QueueSlots;

/// Holder of an exclusive connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum CheckoutOwner {
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
    /// The keys are in several slots.
    Several,
}

impl Waited {
    /// Returns the value for keys in these slots.
    pub(in crate::worker) fn by(slots: Option<&QueueSlots>) -> Self {
        match slots {
            None => Self::Nothing,
            Some(QueueSlots::One(slot)) => Self::Of(*slot),
            Some(QueueSlots::Several(_)) => Self::Several,
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

/// State of an exclusive connection.
#[derive(Debug)]
pub(in crate::worker) struct Checkout {
    owner: CheckoutOwner,
    task: Task,
    /// The current command must be ended by CLIENT UNBLOCK.
    unblock: Option<Box<Unblock>>,
    /// The current command may take as long as commands on the slow lane.
    slow: bool,
    /// Form of the reply in RESP3.
    shape: Shape,
    /// Start of the current command, for the slow log. The whole command is not stored.
    began_with: Vec<u8>,
}

impl Checkout {
    pub(super) fn new() -> Self {
        Self {
            owner: CheckoutOwner::Held(Handle::NONE),
            task: Task::Nothing,
            unblock: None,
            slow: false,
            shape: Shape::Plain,
            began_with: Vec::new(),
        }
    }

    // ---- holder ----

    /// Records that the connection has never been up. `is_ahead`: opened in advance, without a client.
    pub(super) fn set_coming(&mut self, is_ahead: bool) {
        self.owner = CheckoutOwner::Coming { is_ahead };
    }

    pub(super) fn is_coming(&self) -> bool {
        matches!(self.owner, CheckoutOwner::Coming { .. })
    }

    pub(super) fn is_coming_ahead(&self) -> bool {
        self.owner == CheckoutOwner::Coming { is_ahead: true }
    }

    /// Passes the connection to a client. `NONE`: it is about to be taken, or the node must reply first.
    pub(in crate::worker) fn lend(&mut self, holder: Handle) {
        self.owner = CheckoutOwner::Held(holder);
    }

    /// Whether it may be added to the free connections of its pool.
    pub(super) fn is_releasable(&self) -> bool {
        self.task != Task::Watching && self.owner != CheckoutOwner::Free
    }

    /// Returns the connection to its pool.
    pub(super) fn release(&mut self) {
        self.owner = CheckoutOwner::Free;
        self.slow = false;
    }

    // ---- command ----

    fn begin_command(&mut self, holder: Handle, shape: Shape, start: &[u8]) {
        self.owner = CheckoutOwner::Held(holder);
        self.task = Task::Nothing;
        self.shape = shape;
        self.began_with.clear();
        self.began_with.extend_from_slice(start);
    }

    /// Start of the current command.
    pub(in crate::worker) fn command_start(&self) -> &[u8] {
        &self.began_with
    }

    /// Form of the reply in RESP3.
    pub(super) fn shape(&self) -> Shape {
        self.shape
    }

    /// For a transaction: the shapes of its replies are stored instead.
    pub(super) fn is_transaction(&mut self) {
        self.shape = Shape::Plain;
    }

    /// Records whether the current command may take as long as commands on the slow lane.
    pub(in crate::worker) fn note_slow(&mut self, is_slow: bool) {
        self.slow |= is_slow;
    }

    /// Starts an activity of the node for the holder.
    pub(in crate::worker) fn begin_task(&mut self, task: Task) {
        self.task = task;
    }

    pub(in crate::worker) fn end_task(&mut self) {
        self.task = Task::Nothing;
    }

    /// Time until which the current command may block at the node, us.
    pub(in crate::worker) fn waits_until_us(&self) -> u64 {
        match self.task {
            Task::Waiting { until_us, .. } => until_us,
            Task::Nothing | Task::Watching | Task::Uploading => 0,
        }
    }

    // ---- CLIENT UNBLOCK ----

    /// Returns the CLIENT UNBLOCK for the current command, if any.
    pub(in crate::worker) fn unblock(&self) -> Option<&Unblock> {
        self.unblock.as_deref()
    }

    pub(in crate::worker) fn unblock_mut(&mut self) -> Option<&mut Unblock> {
        self.unblock.as_deref_mut()
    }

    /// Returns the CLIENT UNBLOCK for the current command. Creates it if necessary.
    pub(in crate::worker) fn begin_unblock(&mut self) -> &mut Unblock {
        self.unblock.get_or_insert_default()
    }

    /// Replies to the clients that have requested a CLIENT UNBLOCK, and removes it.
    pub(in crate::worker) fn end_unblock(&mut self, mailboxes: &Mailboxes, count: i64) {
        if let Some(unblock) = self.unblock.take() {
            unblock.answer(mailboxes, count);
        }
    }
}

impl Link {
    /// Returns the identity of the connection, unique over all workers.
    pub(super) fn connection(&self, worker: usize) -> Connection {
        Connection { worker, node: self.node, client_id: self.client_id(), run_id: self.handshake.run_id().cloned() }
    }

    /// Returns the state of an exclusive connection.
    #[inline]
    pub(in crate::worker) fn checkout(&self) -> Option<&Checkout> {
        self.checkout.as_ref()
    }

    #[inline]
    pub(in crate::worker) fn checkout_mut(&mut self) -> Option<&mut Checkout> {
        self.checkout.as_mut()
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
        self.checkout_mut().into_iter().for_each(|checkout| checkout.begin_command(holder, shape, start));
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

    /// Whether its current commands may take as long as slow commands.
    pub(super) fn is_slow(&self) -> bool {
        self.lane == Lane::Slow
            || self.checkout().is_some_and(|loan| loan.slow)
            || self.head().is_some_and(|head| head.is_long)
    }
}
