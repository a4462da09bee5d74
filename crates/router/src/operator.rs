//! `SWITCHYARD MOVE ...`, `ACL SETUSER` and other commands for the operator, forwarded by a worker and answered later.
//!
//! The router does not interpret them. A worker forwards them, because they may take long, and passes on the reply.

use std::fmt;
use std::sync::Arc;

use switchyard_resp::encode;

use crate::shared::{Mailboxes, Message};
use crate::slab::Handle;

/// Version of the `SWITCHYARD` commands, their replies, and the section `switchyard` of INFO. `docs/compatibility-policy.md`
/// defines when it increases.
pub(crate) const COMMANDS_VERSION: u32 = 1;

/// Component that executes operator commands. Called by workers, so it must not block.
pub trait OperatorPort: Send + Sync {
    /// Accepts a command. The reply may come from any thread.
    fn take(&self, command: OperatorCommand);
}

/// A command for the operator. Dropping it without a reply returns an error to the client.
pub struct OperatorCommand {
    words: Vec<Vec<u8>>,
    who: String,
    /// Whether the client's user may change the fleet.
    may_operate: bool,
    resp3: bool,
    place: Option<Place>,
}

/// The client of an operator command.
pub(crate) struct CallingClient {
    pub(crate) who: String,
    pub(crate) may_operate: bool,
    pub(crate) resp3: bool,
}

/// Destination of the reply.
struct Place {
    mailboxes: Arc<Mailboxes>,
    worker: usize,
    gather: Handle,
    /// Delay the reply until every worker has adopted the change. Each worker sends one part.
    adopted: bool,
}

impl OperatorCommand {
    pub(crate) fn new(
        words: Vec<Vec<u8>>,
        asker: CallingClient,
        mailboxes: Arc<Mailboxes>,
        worker: usize,
        gather: Handle,
    ) -> Self {
        let CallingClient { who, may_operate, resp3 } = asker;
        Self { words, who, may_operate, resp3, place: Some(Place { mailboxes, worker, gather, adopted: false }) }
    }

    /// Delays the reply until every worker has adopted the change. The gather needs an additional part per worker.
    pub(crate) fn when_adopted(mut self) -> Self {
        if let Some(place) = &mut self.place {
            place.adopted = true;
        }
        self
    }

    /// Arguments after `SWITCHYARD`.
    #[must_use]
    pub fn words(&self) -> &[Vec<u8>] {
        &self.words
    }

    /// Client name, for logs.
    #[must_use]
    pub fn who(&self) -> &str {
        &self.who
    }

    /// Whether the client's user may change the fleet (the rule `operator`).
    #[must_use]
    pub fn may_operate(&self) -> bool {
        self.may_operate
    }

    /// Whether the client uses RESP3.
    #[must_use]
    pub fn resp3(&self) -> bool {
        self.resp3
    }

    /// Sends a RESP reply.
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
