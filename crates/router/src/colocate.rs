//! Requests of workers to bring keys to one node, because a command needs them together.
//!
//! The router cannot start moves itself: it does not own the journal. A worker sends the requirement and the client.
//! The answer comes through the worker's mailbox; the new location of the keys comes with the topology.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use switchyard_policy::colocate::ColocationRequest;

use crate::shared::{Mailboxes, Message};
use crate::slab::Handle;

/// Component that starts these moves. Called by workers, so it must not block.
pub trait ColocatePort: Send + Sync {
    /// Accepts a request. The answer may come from any thread.
    fn colocate(&self, request: ColocateRequest);
}

/// Requirement of a client's command. Dropping the request without an answer refuses it.
pub struct ColocateRequest {
    wanted: ColocationRequest,
    command: String,
    timeout: Duration,
    waited: Duration,
    wait: Weak<()>,
    place: Option<ReplyTo>,
}

/// Destination of the answer.
struct ReplyTo {
    mailboxes: Arc<Mailboxes>,
    worker: usize,
    client: Handle,
    number: u32,
}

impl ColocateRequest {
    /// Creates a request. `wait` exists while the command waits: it has done so for `waited`, and does for `timeout` in
    /// total.
    pub(crate) fn new(
        wanted: ColocationRequest,
        command: &str,
        (waited, timeout): (Duration, Duration),
        wait: &Arc<()>,
        mailboxes: Arc<Mailboxes>,
        worker: usize,
        (client, number): (Handle, u32),
    ) -> Self {
        let place = Some(ReplyTo { mailboxes, worker, client, number });
        Self { wanted, command: command.to_owned(), timeout, waited, wait: Arc::downgrade(wait), place }
    }

    /// Returns the keys that must be at one node.
    #[must_use]
    pub fn wanted(&self) -> &ColocationRequest {
        &self.wanted
    }

    /// Name of the command.
    #[must_use]
    pub fn command(&self) -> &str {
        &self.command
    }

    /// Maximum wait of the command.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Wait of the command before this request: an earlier one was answered, and other commands took its keys first.
    #[must_use]
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// Returns a reference to the wait, which ends when the command is sent or its client has disconnected.
    #[must_use]
    pub fn wait(&self) -> &Weak<()> {
        &self.wait
    }

    /// Reports success: by the last published topology, the keys are together.
    pub fn done(mut self) {
        self.answer(None);
    }

    /// Refuses the request.
    pub fn refuse(mut self, why: &str) {
        self.answer(Some(why));
    }

    fn answer(&mut self, refusal: Option<&str>) {
        if let Some(ReplyTo { mailboxes, worker, client, number }) = self.place.take() {
            mailboxes.send(worker, Message::ColocateAnswer { client, number, refusal: refusal.map(Arc::from) });
        }
    }
}

impl Drop for ColocateRequest {
    fn drop(&mut self) {
        self.answer(Some("the router is stopping"));
    }
}

impl fmt::Debug for ColocateRequest {
    /// Omits key names.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ColocateRequest").field("command", &self.command).finish_non_exhaustive()
    }
}
