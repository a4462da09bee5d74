//! What a worker asks of whoever moves data: bring keys home that a command needs together with others of their slot.
//!
//! The router does not begin moves: the journal is not its own. A worker only says what it needs, and for which of its
//! clients; the answer comes through its mailbox, and that the keys are home it sees by the topology.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use switchyard_policy::colocate::ColocationRequest;

use crate::shared::{Mailboxes, Message};
use crate::slab::Handle;

/// Who brings keys home. Called by workers, so it must not wait.
pub trait ColocatePort: Send + Sync + fmt::Debug {
    /// Takes a request; it may be answered on any thread.
    fn colocate(&self, request: ColocateRequest);
}

/// What a client's command needs. Dropped without an answer, it is refused.
pub struct ColocateRequest {
    wanted: ColocationRequest,
    command: String,
    within: Duration,
    place: Option<Place>,
}

/// Where the answer goes.
struct Place {
    mailboxes: Arc<Mailboxes>,
    worker: usize,
    client: Handle,
    number: u32,
}

impl ColocateRequest {
    pub(crate) fn new(
        wanted: ColocationRequest,
        command: &str,
        within: Duration,
        mailboxes: Arc<Mailboxes>,
        worker: usize,
        (client, number): (Handle, u32),
    ) -> Self {
        let place = Some(Place { mailboxes, worker, client, number });
        Self { wanted, command: command.to_owned(), within, place }
    }

    /// What has to live together.
    #[must_use]
    pub fn wanted(&self) -> &ColocationRequest {
        &self.wanted
    }

    /// The name of the command.
    #[must_use]
    pub fn command(&self) -> &str {
        &self.command
    }

    /// How long the client waits, from when it asked.
    #[must_use]
    pub fn within(&self) -> Duration {
        self.within
    }

    /// It lives together, by the topology that was published last.
    pub fn done(mut self) {
        self.answer(None);
    }

    /// It does not, and will not soon.
    pub fn refuse(mut self, why: &str) {
        self.answer(Some(why));
    }

    fn answer(&mut self, refusal: Option<&str>) {
        if let Some(Place { mailboxes, worker, client, number }) = self.place.take() {
            mailboxes.send(worker, Message::Home { client, number, refusal: refusal.map(Arc::from) });
        }
    }
}

impl Drop for ColocateRequest {
    fn drop(&mut self) {
        self.answer(Some("the router is stopping"));
    }
}

impl fmt::Debug for ColocateRequest {
    /// Without names of keys.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ColocateRequest").field("command", &self.command).finish_non_exhaustive()
    }
}
