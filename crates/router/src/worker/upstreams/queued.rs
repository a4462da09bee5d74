//! Transactions on connections: watched keys, errors of queued commands, and nodes that refuse transactions.

use switchyard_resp::reply;
use switchyard_resp::translate::Shape;

use super::Link;
use super::pending::Pending;

/// Transaction on a connection.
#[derive(Debug, Default)]
pub(super) struct Transaction {
    /// On a downgraded connection: the shapes of the parts of the next EXEC's reply.
    shapes: Vec<Shape>,
    /// The node's error for a queued command of the current transaction.
    refused: Option<Box<[u8]>>,
    /// Reason why the node would refuse a transaction, if it would.
    no_multi: Option<Box<str>>,
}

impl Transaction {
    /// Starts another transaction.
    pub(super) fn begin(&mut self) {
        self.refused = None;
    }

    /// Records the node's error for a queued command.
    fn refuse(&mut self, error: &[u8]) {
        self.refused.get_or_insert(error.into());
    }

    /// Takes the node's error for a queued command of the current transaction.
    pub(super) fn take_refusal(&mut self) -> Option<Box<[u8]>> {
        self.refused.take()
    }

    /// Reason why the node would refuse a transaction, if it would.
    pub(super) fn no_multi(&self) -> Option<&str> {
        self.no_multi.as_deref()
    }

    /// Records that the node refuses transactions. The first reason is kept.
    pub(super) fn note_no_multi(&mut self, error: String) {
        self.no_multi.get_or_insert(error.into());
    }

    /// Expects transactions to be accepted: permissions may have changed since an earlier connection.
    pub(super) fn hope(&mut self) {
        self.no_multi = None;
    }

    /// Records the shape of the reply to a queued command, or (`None`) MULTI.
    pub(super) fn add_shape(&mut self, shape: Option<Shape>) {
        match shape {
            Some(shape) => self.shapes.push(shape),
            None => self.shapes.clear(),
        }
    }

    /// Records the shapes of all its replies.
    pub(super) fn set_shapes(&mut self, shapes: Vec<Shape>) {
        self.shapes = shapes;
    }

    pub(super) fn take_shapes(&mut self) -> Vec<Shape> {
        std::mem::take(&mut self.shapes)
    }
}

impl Link {
    /// Handles the node's answer to MULTI, or to a command after it. After an error, EXEC will return EXECABORT.
    pub(in crate::worker) fn on_queued(&mut self, pending: Pending, refused: bool, answer: &[u8]) {
        if pending.seq == 0 {
            self.transaction.begin();
        }
        if refused {
            let text = reply::text(answer).unwrap_or_default();
            self.transaction.refuse(text);
            if pending.seq == 0 {
                self.transaction.no_multi = Some(String::from_utf8_lossy(text).into());
                self.requests.expect_exec_without_multi();
            }
        }
    }
}
