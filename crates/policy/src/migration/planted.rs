//! Bugs that can be planted in the machines, one at a time, so that the simulator shows that it would find them.
//!
//! They are in the code itself, as questions that are answered no at compile time unless the feature `planted-bugs` is
//! on: a copy of the code with bugs in it would drift away from it.

/// A bug of the machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(not(feature = "planted-bugs"), allow(unreachable_pub))]
pub enum Bug {
    /// The source copy goes before that the key moved is on record.
    UnlinkBeforeRecord,
    /// A key is committed while its source copy is still there.
    CommitBeforeUnlink,
    /// A key is committed as soon as it is stored.
    CommitBeforeRecord,
    /// Copying does not wait for the drain.
    NoDrain,
    /// What a restarted source shows is believed.
    PresenceIsHistory,
    /// What the target has of earlier times stays there.
    NoPurge,
    /// What the target shows after its restart stays there.
    NoPurgeAfterRestart,
    /// The slots are handed over while keys are left at the source.
    HandOverWithKeysLeft,
    /// A leg ends without asking whether the process at its side is still the one that was purged.
    EndedUnconfirmed,
    /// The slots are handed over before that is on record.
    HandOverBeforeRecord,
    /// What was not answered when a connection broke is taken for done.
    NotRedone,
    /// That the source does not have a key is not recorded.
    AbsentNotRecorded,
    /// FLUSHALL does not wait for what is under way.
    FlushWithoutQuiet,
    /// A leg that goes back without its target takes keys for never moved whose removal was sent.
    ReturnedThoughRemoved,
    /// A leg that goes back to a source that is given up ends while commands that were sent there can still be
    /// answered.
    GivenUpWithoutDrain,
    /// What only a leg without one of its sides does is done before it is on record that this side is given up.
    GivenUpBeforeRecord,
    /// Keys come back before the workers know.
    RollbackWithoutDrain,
    /// Keys listed before the source restarted are taken for all that it has.
    NotListedAgain,
    /// What a source that restarted shows of the keys of a batch that was read before stays there.
    LeftWhereItRestarted,
    /// A copy in pieces begins before all workers tell what they write, and before what they sent earlier is answered.
    StagedWithoutBarrier,
    /// What commands touch while a key is copied in pieces is not read again.
    TouchedNotReadAgain,
    /// It is read again before the command that touches it has been answered.
    TailReadTooEarly,
    /// A piece that was read before is written after what was read again.
    PieceWrittenLate,
    /// A command that changes a key as a whole does not make its copy begin again.
    ChangeAsAWholeUnheard,
    /// What was written while keys were copied ahead is read again before it has been answered.
    ReadAgainTooEarly,
    /// What was written last before the cut is not copied again.
    LastWritesForgotten,
    /// A key that was copied and is gone from the source stays at the target.
    GoneStaysCopied,
    /// Copies of one process are completed by those of another.
    CopiedFromAnother,
    /// What the source has after the cut stays there.
    PastNotPurged,
    /// What was touched last is not read in the leg.
    TailNotReadInTheLeg,
    /// What was copied in pieces is used though a node is another process now.
    StagedAtAnotherProcess,
    /// A staging key gets its name though it has not as many elements as the key.
    NotCounted,
    /// A staging key that is gone is taken for renamed.
    GoneIsRenamed,
    /// What a move records while its leg waits for room is written before the beginning of the leg.
    LegOvertaken,
    /// A leg that was given up before there was room for it is written all the same.
    GivenUpStays,
    /// All is committed when the slots are handed over, also where workers would use it at the other node.
    CommittedAtTheOther,
    /// A move of a slot takes keys of it that live elsewhere, too.
    ExceptionTaken,
    /// What a move of a slot finds at its target is removed, also keys that live there.
    ExceptionPurged,
    /// A move of keys purges all that its target has of their slot.
    PurgedBeyondScope,
    /// What a side has that is away is taken for listed, where none of its databases are known to have keys.
    WalkedWhileAway,
    /// Keys of the last slot of several are not listed where a node is walked through.
    SlotForgotten,
    /// What the target has of the last slot of several stays there.
    SlotNotPurged,
    /// A command of several keys goes as soon as one is there.
    OneKeyIsEnough,
    /// A command that may use keys it does not name waits only for those that it names.
    UndeclaredNotAwaited,
}

pub(super) type InjectedBug = crate::planted::InjectedBug<Bug>;
