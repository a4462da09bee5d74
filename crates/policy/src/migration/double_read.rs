//! Double reads: a read of a key in transit is sent to both nodes, so that no client waits for the key (NetMigrate,
//! FAST 2024, section 4.3; Fulva).
//!
//! The published systems prefer a success of the target, and otherwise take the source's reply. Unmodified servers have
//! no versions to compare. Here the order of a leg makes the result correct: a copy is stored, then removed at the
//! source, then committed, and only then written. Therefore
//! - a reply with a value is correct, from either node: while the source has the key, no client has written it
//!   elsewhere, and the target has the copy, or a later write;
//! - two replies without a value prove nothing: the target may have replied before the copy arrived, and the source
//!   after its removal. Then the key is requested as without double reads, and its reader waits. (The papers reply
//!   "absent", and call the case rare.)
//!
//! This holds for the two processes that the leg met; the target was purged before the leg was published. A process
//! that restarted with older data may return old values, so it is not read. While a leg goes back, there are no double
//! reads.
//!
//! Writes wait until their key has moved. The papers send them to the target at once, which is correct only for a plain
//! `SET`, and only with versions.

use super::Process;

/// Processes that permit double reads.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DoubleRead {
    /// `run_id` of the source process.
    pub source: String,
    /// `run_id` of the target process.
    pub target: String,
    /// Every n-th double read has its key fetched; 0: none (Fulva).
    pub fetches_one_in: u32,
}

impl DoubleRead {
    /// Permits double reads between these processes.
    #[must_use]
    pub fn between(source: &Process, target: &Process, fetches_one_in: u32) -> Self {
        Self { source: source.run_id.clone(), target: target.run_id.clone(), fetches_one_in }
    }

    /// Whether the n-th read fetches its key. `number` counts from 1.
    #[must_use]
    pub const fn fetches(&self, number: u64) -> bool {
        self.fetches_one_in > 0 && number.is_multiple_of(self.fetches_one_in as u64)
    }
}
