//! Bugs that tests plant: in the state machines of policy, and in the model of the router around them.

#[cfg(feature = "planted-bugs")]
use switchyard_policy::migration::Bug as MachineBug;

/// A bug of workers, mover, or journal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bug {
    /// A command on a connection that broke no longer counts as in flight, though the node may still execute it.
    ClosedCountsAsDrained,
    /// A command that waits for a connection does not count as in flight.
    WaitingIsNotInFlight,
    /// A command that is sent again to the same node does not count as in flight in between.
    AskedAgainIsNotInFlight,
    /// Commands are sent before the node has returned the client id, so that the connection cannot be killed later.
    SentBeforeHandshake,
    /// The mover's connection is replaced without ending the old one.
    ReplacedWithoutKill,
    /// The databases with keys are queried while writes are still possible.
    DatabasesAskedEarly,
    /// After a crash the connections of the previous router are not killed.
    ResumedWithoutKill,
    /// After a crash they are killed only for a resumed leg, not before a new one.
    EndedOnlyForALeg,
    /// Broken connections are forgotten at the end of a leg.
    ForgottenAtTheEnd,
    /// A copy overwrites an existing key.
    RestoreReplace,
    /// The time to live travels as a duration.
    RelativeTtl,
    /// A leg begins between nodes whose clocks differ by too much.
    ClocksNotCompared,
    /// Slots of later legs are not observed while a leg moves, though their keys are listed.
    LaterSlotsNotObserved,
    /// All slots of a move are handed over with its first leg.
    HandedOverTooEarly,
    /// A FLUSHALL waits for one mover only.
    FlushWaitsForOne,
    /// The published state of a move omits the slots in transit of other moves.
    OtherLegDropped,
    /// After a crash only the first open move is resumed.
    FirstMoveTakenUp,
    /// The map stored at the end of a leg predates the hand-over of another leg.
    MapMadeBefore,
    /// Keys written during a listing are not recorded.
    WritesNotNoted,
    /// A write of undeclared keys during a listing is not recorded.
    AnythingNotNoted,
    /// The listing begins before all workers record their writes.
    ListedTooEarly,
    /// Commands blocked at the source stay there.
    BlockedNotParked,
    /// A worker keeps the committed keys of a rolled-back leg.
    CommittedKept,
    /// The journal reports a record as durable before it is.
    JournalNotSynced,
    /// After a crash the stored topology is used rather than the journal.
    TopologyDecides,
    /// The mover continues after one node has executed a FLUSHALL, rather than both.
    FlushHalfAwaited,
    /// A command on a key with a placement override goes to the slot owner.
    OverrideForgotten,
    /// A move of a slot also takes keys with placement overrides.
    OverrideTaken,
    /// A script is executed without the names of the keys of its slot that live elsewhere.
    ElsewhereNotNamed,
    /// An adoption of rules ends before all passages have arrived.
    AdoptionEndedEarly,
    /// During an adoption of rules, workers use the slots without rules.
    OldSlotsServed,
    /// A transaction is executed although the watching connection was lost or the key has moved.
    WatchForgotten,
    /// A transaction goes to the node that watched its key.
    WatchStays,
    /// A watch survives if its key moves away and returns.
    WatchReturns,
    /// Writes reported before the drain are not processed before the dirty elements are read.
    ToldNotTakenInTheLeg,
    /// Dirty elements of a key copied in pieces are read before the leg, during writes.
    TailReadBeforeTheLeg,
    /// An open leg of a previous router does not come first.
    OpenLegForgotten,
    /// A double read believes two replies without the key.
    DoubleReadBelieved,
    /// A double read also goes to a process that the leg has not met.
    DoubleReadOfAnyProcess,
    /// Staged copies are used although a node has restarted since their dirty elements were read.
    UnusableKeptAtReturn,
    /// A write raises no gate.
    WriteRaisesNothing,
    /// A write raises its gates after it is sent.
    RaisedLate,
    /// A gate counts writes in flight, without a version.
    OneCounter,
    /// A value read during a write is stored.
    KeptBesideAWrite,
    /// A read that joins a fill receives its reply, although a write came in between.
    WaitersAreToldThePast,
    /// A key is filled although a worker does not know that it is cacheable.
    FilledBeforeAllCacheable,
    /// A key is filled during a write that was sent before its worker knew that the key is cacheable.
    FilledBesideOlderWrites,
    /// A key is made uncacheable while workers that do not know it yet serve copies.
    UncacheableAtOnce,
    /// After a panic, workers that do not know the new gates serve copies by the old ones.
    GatesBeforeStayOpen,
    /// A write ends when its client times out.
    OpenedAtTimeOut,
    /// A write ends when its connection is lost.
    DoubtfulIsOver,
    /// A copy outlives its key.
    LifeForgotten,
    /// FLUSHALL raises no gate.
    FlushRaisesNothing,
    /// RENAME raises the gate of the first key only.
    RenamedToForgotten,
    /// A script raises only the gates of its declared keys, not of all keys in their slots.
    ScriptRaisesItsKeys,
    /// A blocked command raises no gate.
    BlockedRaisesNothing,
    /// A blocked command raises no gate of a key that becomes cacheable later.
    BlockedRaisesOnce,
    /// Commands of a panicked worker no longer count as in flight.
    PanicForgetsWhatWasSent,
    /// Copies survive if their key moves away and returns.
    NotPlacedAnew,
    /// Copies of a moving key are served and stored.
    ServedOnItsWay,
    /// A node's gate is unchanged after a restart of its process.
    AnotherProcessUnnoticed,
}

/// One bug, of either kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Planted {
    /// In the model of the router.
    Around(Bug),
    /// In the machine.
    #[cfg(feature = "planted-bugs")]
    Machine(MachineBug),
}

impl Planted {
    /// All bugs that can be planted.
    #[cfg(feature = "planted-bugs")]
    pub const ALL: &[Self] = &[
        Self::Around(Bug::ClosedCountsAsDrained),
        Self::Around(Bug::WaitingIsNotInFlight),
        Self::Around(Bug::AskedAgainIsNotInFlight),
        Self::Around(Bug::SentBeforeHandshake),
        Self::Around(Bug::ReplacedWithoutKill),
        Self::Around(Bug::ResumedWithoutKill),
        Self::Around(Bug::EndedOnlyForALeg),
        Self::Around(Bug::ForgottenAtTheEnd),
        Self::Around(Bug::RestoreReplace),
        Self::Around(Bug::RelativeTtl),
        Self::Around(Bug::DatabasesAskedEarly),
        Self::Around(Bug::ClocksNotCompared),
        Self::Around(Bug::LaterSlotsNotObserved),
        Self::Around(Bug::HandedOverTooEarly),
        Self::Around(Bug::FlushWaitsForOne),
        Self::Around(Bug::OtherLegDropped),
        Self::Around(Bug::FirstMoveTakenUp),
        Self::Around(Bug::MapMadeBefore),
        Self::Around(Bug::WritesNotNoted),
        Self::Around(Bug::AnythingNotNoted),
        Self::Around(Bug::ListedTooEarly),
        Self::Around(Bug::BlockedNotParked),
        Self::Around(Bug::CommittedKept),
        Self::Around(Bug::JournalNotSynced),
        Self::Around(Bug::TopologyDecides),
        Self::Around(Bug::FlushHalfAwaited),
        Self::Around(Bug::DoubleReadBelieved),
        Self::Around(Bug::DoubleReadOfAnyProcess),
        Self::Around(Bug::OverrideForgotten),
        Self::Around(Bug::OverrideTaken),
        Self::Around(Bug::ElsewhereNotNamed),
        Self::Around(Bug::AdoptionEndedEarly),
        Self::Around(Bug::OldSlotsServed),
        Self::Around(Bug::WatchForgotten),
        Self::Around(Bug::WatchStays),
        Self::Around(Bug::WatchReturns),
        Self::Around(Bug::ToldNotTakenInTheLeg),
        Self::Around(Bug::TailReadBeforeTheLeg),
        Self::Around(Bug::UnusableKeptAtReturn),
        Self::Around(Bug::OpenLegForgotten),
        Self::Around(Bug::WriteRaisesNothing),
        Self::Around(Bug::RaisedLate),
        Self::Around(Bug::OneCounter),
        Self::Around(Bug::KeptBesideAWrite),
        Self::Around(Bug::WaitersAreToldThePast),
        Self::Around(Bug::FilledBeforeAllCacheable),
        Self::Around(Bug::FilledBesideOlderWrites),
        Self::Around(Bug::UncacheableAtOnce),
        Self::Around(Bug::GatesBeforeStayOpen),
        Self::Around(Bug::OpenedAtTimeOut),
        Self::Around(Bug::DoubtfulIsOver),
        Self::Around(Bug::LifeForgotten),
        Self::Around(Bug::FlushRaisesNothing),
        Self::Around(Bug::RenamedToForgotten),
        Self::Around(Bug::ScriptRaisesItsKeys),
        Self::Around(Bug::BlockedRaisesNothing),
        Self::Around(Bug::BlockedRaisesOnce),
        Self::Around(Bug::PanicForgetsWhatWasSent),
        Self::Around(Bug::NotPlacedAnew),
        Self::Around(Bug::ServedOnItsWay),
        Self::Around(Bug::AnotherProcessUnnoticed),
        Self::Machine(MachineBug::GivenUpBeforeRecord),
        Self::Machine(MachineBug::ReadAgainTooEarly),
        Self::Machine(MachineBug::LastWritesForgotten),
        Self::Machine(MachineBug::GoneStaysCopied),
        Self::Machine(MachineBug::CopiedFromAnother),
        Self::Machine(MachineBug::PastNotPurged),
        Self::Machine(MachineBug::UnlinkBeforeRecord),
        Self::Machine(MachineBug::CommitBeforeUnlink),
        Self::Machine(MachineBug::CommitBeforeRecord),
        Self::Machine(MachineBug::NoDrain),
        Self::Machine(MachineBug::PresenceIsHistory),
        Self::Machine(MachineBug::NoPurge),
        Self::Machine(MachineBug::NoPurgeAfterRestart),
        Self::Machine(MachineBug::HandOverWithKeysLeft),
        Self::Machine(MachineBug::EndedUnconfirmed),
        Self::Machine(MachineBug::HandOverBeforeRecord),
        Self::Machine(MachineBug::NotRedone),
        Self::Machine(MachineBug::AbsentNotRecorded),
        Self::Machine(MachineBug::FlushWithoutQuiet),
        Self::Machine(MachineBug::RollbackWithoutDrain),
        Self::Machine(MachineBug::GivenUpWithoutDrain),
        Self::Machine(MachineBug::ReturnedThoughRemoved),
        Self::Machine(MachineBug::NotListedAgain),
        Self::Machine(MachineBug::LeftWhereItRestarted),
        Self::Machine(MachineBug::StagedWithoutBarrier),
        Self::Machine(MachineBug::TouchedNotReadAgain),
        Self::Machine(MachineBug::TailReadTooEarly),
        Self::Machine(MachineBug::PieceWrittenLate),
        Self::Machine(MachineBug::ChangeAsAWholeUnheard),
        Self::Machine(MachineBug::TailNotReadInTheLeg),
        Self::Machine(MachineBug::StagedAtAnotherProcess),
        Self::Machine(MachineBug::NotCounted),
        Self::Machine(MachineBug::GoneIsRenamed),
        Self::Machine(MachineBug::SlotForgotten),
        Self::Machine(MachineBug::SlotNotPurged),
        Self::Machine(MachineBug::LegOvertaken),
        Self::Machine(MachineBug::GivenUpStays),
        Self::Machine(MachineBug::CommittedAtTheOther),
        Self::Machine(MachineBug::OverridePurged),
        Self::Machine(MachineBug::PurgedBeyondScope),
        Self::Machine(MachineBug::WalkedWhileAway),
        Self::Machine(MachineBug::OneKeyIsEnough),
        Self::Machine(MachineBug::UndeclaredNotAwaited),
    ];
}

#[cfg(feature = "planted-bugs")]
impl Planted {
    /// Returns the bug for the driver of a leg, if it has one.
    pub(crate) fn of_the_driver(self) -> Option<MachineBug> {
        match self {
            Self::Machine(bug) => Some(bug),
            // Workers and the mover must agree on which keys move.
            Self::Around(Bug::OverrideTaken) => Some(MachineBug::OverrideTaken),
            Self::Around(_) => None,
        }
    }
}

/// Whether this bug is planted in the run.
#[inline]
pub(crate) fn is_injected(planted: Option<Planted>, bug: Bug) -> bool {
    cfg!(feature = "planted-bugs") && planted == Some(Planted::Around(bug))
}
