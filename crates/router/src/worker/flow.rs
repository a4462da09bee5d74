//! Result of the dispatch of a command, and refusals.

use switchyard_resp::encode;

use super::downstreams::Downstreams;
use super::downstreams::waits::Stall;
use super::turn::Turn;
use crate::slab::Handle;
use crate::worker::transactions::session::Session;

/// Result of the dispatch of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Flow {
    /// Sent or answered.
    Next,
    /// Must wait, and will be dispatched again.
    Stall(Stall),
    /// Other clients have their turn first. Dispatched again in the next turn.
    Later,
    /// Cannot be streamed: collect the whole command.
    Buffer,
    /// The client is being closed.
    Close,
}

impl Downstreams {
    /// Replies to the current command with an error.
    #[cold]
    pub(super) fn refuse(&mut self, turn: &Turn, handle: Handle, class: u8, text: &str) -> Flow {
        let mut reply = Vec::new();
        encode::error(&mut reply, text);
        self.answer(turn, handle, class, &reply);
        Flow::Next
    }

    pub(super) fn refuse_all_down(&mut self, turn: &Turn, handle: Handle, class: u8) -> Flow {
        let first = turn.routing().topology.nodes().next().map(|n| n.id);
        let text = first.map_or_else(|| "NODEDOWN there are no nodes".into(), |node| turn.down_text(node));
        self.refuse(turn, handle, class, &text)
    }
}

/// Makes EXEC fail, because a command was refused after MULTI.
pub(super) fn abort_transaction(down: &mut Downstreams, handle: Handle) {
    if let Some(client) = down.get_mut(handle).filter(|c| c.in_multi()) {
        let multi = &mut client.state_or_default::<Session>().multi;
        multi.clear();
        multi.aborted = true;
    }
}
