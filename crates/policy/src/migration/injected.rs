//! Bugs that can be injected into the machines, one at a time, to show that the simulator finds them.
//!
//! They are conditions in the code itself, constant `false` unless the feature `planted-bugs` is on: a copy of the
//! code with bugs would diverge from it.

/// Injected bug.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(not(feature = "planted-bugs"), allow(unreachable_pub))]
pub enum Bug {
    /// The source copy is removed before the move of the key is on record.
    UnlinkBeforeRecord,
    /// A key is committed while its source copy is still there.
    CommitBeforeUnlink,
    /// A key is committed as soon as it is stored.
    CommitBeforeRecord,
    /// Copying does not wait for the drain.
    NoDrain,
    /// Keys at a restarted source are trusted.
    PresenceIsHistory,
    /// Leftovers at the target are not purged.
    NoPurge,
    /// Keys at a restarted target are not purged.
    NoPurgeAfterRestart,
    /// The slots are handed over while the source has keys.
    HandOverWithKeysLeft,
    /// A leg ends without a check that the purged process still runs at its side.
    EndedUnconfirmed,
    /// The slots are handed over before the hand-over is on record.
    HandOverBeforeRecord,
    /// Requests without a reply on a broken connection are treated as done.
    NotRedone,
    /// The absence of a key at the source is not recorded.
    AbsentNotRecorded,
    /// FLUSHALL does not wait for requests in flight.
    FlushWithoutQuiet,
    /// A leg that returns without its target treats keys as never moved although their removal was sent.
    ReturnedThoughRemoved,
    /// A leg that was returning to a lost source ends while commands sent there can still get a reply.
    GivenUpWithoutDrain,
    /// Steps permitted only without a side happen before its loss is on record.
    GivenUpBeforeRecord,
    /// Keys return before the workers have seen the rollback.
    RollbackWithoutDrain,
    /// The listing made before a restart of the source is treated as complete.
    NotListedAgain,
    /// After a restart of the source, keys of a batch read earlier are not removed there.
    LeftWhereItRestarted,
    /// A copy in pieces starts before all workers report writes, and before earlier commands have ended.
    StagedWithoutBarrier,
    /// Elements touched during a copy in pieces are not read again.
    TouchedNotReadAgain,
    /// An element is read again before the command that touched it has ended.
    TailReadTooEarly,
    /// A piece is written after newer values of its elements.
    PieceWrittenLate,
    /// A command that replaces a key does not restart its copy.
    ChangeAsAWholeUnheard,
    /// A key written during the pre-copy is read again before its write has ended.
    ReadAgainTooEarly,
    /// The last writes before the cut-over are not copied again.
    LastWritesForgotten,
    /// A copied key that is gone from the source stays at the target.
    GoneStaysCopied,
    /// Copies from one process are completed from another.
    CopiedFromAnother,
    /// Keys at the source after the cut-over are not purged.
    PastNotPurged,
    /// The last dirty elements are not read in the leg.
    TailNotReadInTheLeg,
    /// A staged copy is used although a node is another process now.
    StagedAtAnotherProcess,
    /// A staging key is renamed although it has fewer elements than the key.
    NotCounted,
    /// A missing staging key is treated as renamed.
    GoneIsRenamed,
    /// Later records of a move overtake the start of its leg, which waits for space in the journal.
    LegOvertaken,
    /// A leg abandoned before the journal had space for its start is recorded anyway.
    GivenUpStays,
    /// The hand-over commits all keys even if workers would use them at the other node.
    CommittedAtTheOther,
    /// A move of a slot takes keys that have a placement override.
    OverrideTaken,
    /// A move of a slot also purges keys that the target holds by placement override.
    OverridePurged,
    /// A move of keys purges all keys of their slot at the target.
    PurgedBeyondScope,
    /// A lost side is treated as listed if no database is known to have keys.
    WalkedWhileAway,
    /// A scan of a node skips the last of several slots.
    SlotForgotten,
    /// A purge of the target skips the last of several slots.
    SlotNotPurged,
    /// A command with several keys runs as soon as one is committed.
    OneKeyIsEnough,
    /// A command with undeclared keys waits only for its declared keys.
    UndeclaredNotAwaited,
}

pub(super) type InjectedBug = crate::injected::InjectedBug<Bug>;
