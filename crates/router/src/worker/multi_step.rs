//! Commands that take several rounds of requests to the nodes, each depending on the replies before.
//!
//! A round is a gather like any other. With its last part, the procedure returns the next requests, or the client's
//! reply. Nothing is held at a node between two rounds, so a disconnected client or node leaves nothing to clean up.
//!
//! This is not a task or a coroutine: the state between two rounds is small and plain, and a worker has no runtime to
//! drive them.

use std::fmt::Debug;

use switchyard_policy::topology::NodeId;

use super::transactions::rehearsal::FoundKeys;
use super::turn::Turn;
use super::upstreams::Upstreams;
use crate::lane::Lane;

/// One query of a round. Several requests are sent to the node in one piece, so that nothing comes between them; the
/// reply to the last one counts.
#[derive(Debug)]
pub(super) struct StepRequest {
    pub(super) node: NodeId,
    pub(super) lane: Lane,
    pub(super) requests: Vec<Vec<u8>>,
}

/// Next step after a round.
#[derive(Debug)]
pub(super) enum Next {
    /// The client's reply.
    Done(Vec<u8>),
    /// The next round. Not empty.
    Round(Vec<StepRequest>),
    /// No reply: the client's command is dispatched again, with these keys.
    Again(Box<FoundKeys>),
}

/// State of a command over its rounds.
pub(super) trait MultiStepCommand: Debug + Send {
    /// Takes the replies of a round, in the order of its queries.
    fn next(&mut self, turn: &Turn, up: &Upstreams, resp3: bool, parts: Vec<Vec<u8>>) -> Next;

    /// Whether its queries may take long on a connection for short ones.
    fn is_long(&self) -> bool {
        false
    }
}
