//! `SWITCHYARD MOVE ...`, `ACL SETUSER` and what else a client may ask of whoever runs the router: handed over by a
//! worker, answered later.
//!
//! The router does not know what the words mean. A worker only gives them away, because what they ask may take long,
//! and passes on the answer.

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
    /// The client's user may change the fleet.
    may_operate: bool,
    resp3: bool,
    place: Option<Place>,
}

/// Who asks.
pub(crate) struct Asker {
    pub(crate) who: String,
    pub(crate) may_operate: bool,
    pub(crate) resp3: bool,
}

/// Where the answer goes.
struct Place {
    mailboxes: Arc<Mailboxes>,
    worker: usize,
    gather: Handle,
    /// The answer counts when every worker has adopted what has changed: as many parts more.
    adopted: bool,
}

impl OperatorCommand {
    pub(crate) fn new(
        words: Vec<Vec<u8>>,
        asker: Asker,
        mailboxes: Arc<Mailboxes>,
        worker: usize,
        gather: Handle,
    ) -> Self {
        let Asker { who, may_operate, resp3 } = asker;
        Self { words, who, may_operate, resp3, place: Some(Place { mailboxes, worker, gather, adopted: false }) }
    }

    /// The same, where the client is told when every worker has adopted what has changed. The gather has a part more
    /// for each.
    pub(crate) fn when_adopted(mut self) -> Self {
        if let Some(place) = &mut self.place {
            place.adopted = true;
        }
        self
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

    /// Whether the client's user has the right to change the fleet (the word `operator`).
    #[must_use]
    pub fn may_operate(&self) -> bool {
        self.may_operate
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
            let (from, gather) = (place.worker, place.gather);
            place.mailboxes.send(from, Message::Answer { gather, part: 0, reply: reply.to_vec() });
            for (part, mailbox) in (1..).zip(place.mailboxes.iter()).filter(|_| place.adopted) {
                mailbox.send(Message::Refresh { from, gather, part, settled: false });
            }
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
