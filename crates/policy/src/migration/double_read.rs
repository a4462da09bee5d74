//! Double reads: a read of a key that is on its way is asked of both nodes, so that nobody waits for the key
//! (NetMigrate, FAST 2024, section 4.3; Fulva).
//!
//! The published systems let the target's success win, and else take the source's answer. On unmodified servers there
//! are no versions to compare. What makes it right here is the order in which a leg does things: a copy is stored, then
//! removed where it was, then committed, and only then written. So
//! - an answer that shows the key is right, whichever node gave it: as long as the source has the key, nobody has
//!   written it elsewhere; and what the target has is the copy, or what was written since;
//! - two answers without the key say nothing: the target may have been asked before the copy came, and the source after
//!   it went. Then the key is wanted, as without double reads, and its reader waits. (The papers answer "absent" there,
//!   and call it rare.)
//!
//! That holds for the two processes that the leg has met, of which the target was purged before anybody was told of the
//! leg. One that has come back with older data may show what is past: it is not asked. Nor is anybody while a leg goes
//! back.
//!
//! Writes wait until their key has moved. The papers send them to the target at once, which is right for a plain `SET`
//! only, and there only with versions.

use super::Process;

/// The processes between which keys may be read at either side.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DoubleRead {
    /// The `run_id` at the source.
    pub source: String,
    /// The `run_id` at the target.
    pub target: String,
    /// Of so many such reads one has its key fetched; 0: none has (Fulva).
    pub fetches_one_in: u32,
}

impl DoubleRead {
    /// Between these.
    #[must_use]
    pub fn between(source: &Process, target: &Process, fetches_one_in: u32) -> Self {
        Self { source: source.run_id.clone(), target: target.run_id.clone(), fetches_one_in }
    }

    /// Whether the key of the read of this number, from 1, is fetched.
    #[must_use]
    pub const fn fetches(&self, number: u64) -> bool {
        self.fetches_one_in > 0 && number.is_multiple_of(self.fetches_one_in as u64)
    }
}
