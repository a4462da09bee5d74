//! Result of a client's attempt to log in.

use crate::users::Attempt;

/// Result of an attempt to log in, kept until its command is dispatched again.
#[derive(Debug)]
pub(in crate::worker) struct Verdict {
    pub(super) name: Vec<u8>,
    pub(super) password: Vec<u8>,
    /// [`Attempt::Queued`]: pending.
    pub(super) attempt: Attempt,
}

impl Drop for Verdict {
    fn drop(&mut self) {
        self.password.fill(0);
    }
}

impl Verdict {
    pub(super) fn is_for(&self, name: &[u8], password: &[u8]) -> bool {
        self.attempt != Attempt::Queued && self.name == name && self.password == password
    }
}
