//! `SWITCHYARD MOVE ...` and what else a client may ask of whoever runs the router: handed over by a worker, answered later.
//!
//! The router does not know what the words mean. A worker only gives them away, because what they ask may take long, and passes on the answer.

use std::fmt;
use std::sync::Arc;

use switchyard_resp::encode;

use crate::shared::{Mailboxes, Message};
use crate::slab::Handle;

/// Who executes such commands. Called by workers, so it must not wait.
pub trait OperatorPort: Send + Sync + fmt::Debug {
    /// Takes a command; the answer may be given on any thread.
    fn take(&self, command: OperatorCommand);
}

/// A command for the operator. Dropped without an answer, it is answered with an error.
pub struct OperatorCommand {
    words: Vec<Vec<u8>>,
    who: String,
    resp3: bool,
    place: Option<Place>,
}

/// Where the answer goes.
struct Place {
    mailboxes: Arc<Mailboxes>,
    worker: usize,
    gather: Handle,
}

impl OperatorCommand {
    pub(crate) fn new(words: Vec<Vec<u8>>, who: String, resp3: bool, mailboxes: Arc<Mailboxes>, worker: usize, gather: Handle) -> Self {
        Self { words, who, resp3, place: Some(Place { mailboxes, worker, gather }) }
    }

    /// The words after `SWITCHYARD`.
    #[must_use]
    pub fn words(&self) -> &[Vec<u8>] {
        &self.words
    }

    /// Who asks, for logs.
    #[must_use]
    pub fn who(&self) -> &str {
        &self.who
    }

    /// Whether the client speaks RESP3.
    #[must_use]
    pub fn resp3(&self) -> bool {
        self.resp3
    }

    /// Answers with a RESP reply.
    pub fn answer(mut self, reply: &[u8]) {
        self.send(reply);
    }

    fn send(&mut self, reply: &[u8]) {
        if let Some(place) = self.place.take() {
            place.mailboxes.send(place.worker, Message::Answer { gather: place.gather, part: 0, reply: reply.to_vec() });
        }
    }
}

impl Drop for OperatorCommand {
    fn drop(&mut self) {
        let mut reply = Vec::new();
        encode::error(&mut reply, "ERR this command was not executed: the router is stopping");
        self.send(&reply);
    }
}

impl fmt::Debug for OperatorCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OperatorCommand").field("who", &self.who).finish_non_exhaustive()
    }
}
