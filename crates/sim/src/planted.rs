//! All bugs that can be planted: those of the machine (policy) and those of what surrounds it in the router, which the
//! model repeats.

#[cfg(feature = "planted-bugs")]
use switchyard_policy::migration::Bug as MachineBug;

/// A bug of workers, mover, or journal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bug {
    /// A command on a connection that broke no longer counts as in flight, though the node may still execute it.
    ClosedCountsAsDrained,
    /// A command that waits for a connection does not count as in flight.
    WaitingIsNotInFlight,
    /// A command that is asked again at the same node does not count as in flight meanwhile.
    AskedAgainIsNotInFlight,
    /// Commands are sent before the node has told the connection's number, so that nobody can end it later.
    SentBeforeHandshake,
    /// The mover's connection is replaced without ending the old one.
    ReplacedWithoutKill,
    /// Which databases have keys is asked before nothing is written any more.
    DatabasesAskedEarly,
    /// After a crash the connections of the router before are left alone.
    ResumedWithoutKill,
    /// That alone for a leg that is taken up again, and not where another one begins.
    EndedOnlyForALeg,
    /// Connections that broke are forgotten at the end of a leg.
    ForgottenAtTheEnd,
    /// A copy is stored over what is there.
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
    /// What is published of a move leaves out how the slots of others are in transit.
    OtherLegDropped,
    /// After a crash only the first of the open moves is taken up again.
    FirstMoveTakenUp,
    /// The map that is stored when a leg ends was made before another leg was handed over.
    MapMadeBefore,
    /// Keys written while others are listed are not noted.
    WritesNotNoted,
    /// A write of keys that nobody names, while keys are listed, is not noted.
    AnythingNotNoted,
    /// The listing begins before all workers note what they write.
    ListedTooEarly,
    /// Commands that wait at the source stay there.
    BlockedNotParked,
    /// A worker keeps what was committed when a leg rolls back.
    CommittedKept,
    /// The journal says that a record is durable before it is.
    JournalNotSynced,
    /// After a crash the stored topology decides, and not the journal.
    TopologyDecides,
    /// Only one of the nodes that a FLUSHALL changes is waited for before the mover goes on.
    FlushHalfAwaited,
    /// A key that lives elsewhere than its slot is looked for at the owner of the slot.
    ExceptionForgotten,
    /// A move of a slot takes keys of it that live elsewhere, too.
    ExceptionTaken,
    /// A transaction is executed though its connection was lost on which the key was watched, or the key has moved
    /// since.
    WatchForgotten,
    /// A transaction goes to where its key was when it was watched.
    WatchStays,
    /// A watch still counts when its key has been elsewhere meanwhile and is back.
    WatchReturns,
    /// What workers told before the drain is not taken note of before the tails are read.
    ToldNotTakenInTheLeg,
    /// The tail of a key that is copied in pieces is read before the leg, while it is written.
    TailReadBeforeTheLeg,
    /// A leg that a router before this one has left does not come first.
    OpenLegForgotten,
    /// Two answers without the key are believed.
    DoubleReadBelieved,
    /// A double read is asked also of a process that the leg has not met.
    DoubleReadOfAnyProcess,
    /// What was staged is used though a node has been another process since its tail was read.
    UnusableKeptAtReturn,
    /// A write raises no gate.
    WriteRaisesNothing,
    /// A write raises its gates after it was sent.
    RaisedLate,
    /// A gate counts writes under way, and has no version.
    OneCounter,
    /// What was read beside a write is kept.
    KeptBesideAWrite,
    /// Who asks while a fill is under way is told what it has read, although something was written since.
    WaitersAreToldThePast,
    /// A key is filled although a worker does not know that it is armed.
    FilledBeforeAllArmed,
    /// A key is filled although a write is under way that was sent before its worker knew that it is armed.
    FilledBesideOlderWrites,
    /// A key is disarmed, and workers that do not know it yet give copies of it still.
    DisarmedAtOnce,
    /// A worker has panicked, and workers that do not know of the new gates yet give copies by the old ones still.
    GatesBeforeStayOpen,
    /// A write is over when its client has given up.
    OpenedAtTimeOut,
    /// A write is over when its connection is lost.
    DoubtfulIsOver,
    /// A copy lives longer than its key.
    LifeForgotten,
    /// FLUSHALL raises no gate.
    FlushRaisesNothing,
    /// RENAME raises the gate of the first key only.
    RenamedToForgotten,
    /// A script raises the gates of the keys that it names, and not of others in their slots.
    ScriptRaisesItsKeys,
    /// A command that waits at a node raises no gate.
    BlockedRaisesNothing,
    /// A command that waits at a node raises no gate of a key that is armed later.
    BlockedRaisesOnce,
    /// What a worker has sent that panicked is not under way any more.
    PanicForgetsWhatWasSent,
    /// What has been elsewhere meanwhile, and is back, is where it was.
    NotPlacedAnew,
    /// Copies of a key that moves are given and made.
    ServedOnItsWay,
    /// A node's gate stays as it is when another process is in its place.
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
    /// All of them.
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
        Self::Around(Bug::ExceptionForgotten),
        Self::Around(Bug::ExceptionTaken),
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
        Self::Around(Bug::FilledBeforeAllArmed),
        Self::Around(Bug::FilledBesideOlderWrites),
        Self::Around(Bug::DisarmedAtOnce),
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
        Self::Machine(MachineBug::ExceptionPurged),
        Self::Machine(MachineBug::PurgedBeyondScope),
        Self::Machine(MachineBug::WalkedWhileAway),
        Self::Machine(MachineBug::OneKeyIsEnough),
        Self::Machine(MachineBug::UndeclaredNotAwaited),
    ];
}

#[cfg(feature = "planted-bugs")]
impl Planted {
    /// What of it is in the driver of a leg.
    pub(crate) fn of_the_driver(self) -> Option<MachineBug> {
        match self {
            Self::Machine(bug) => Some(bug),
            // Workers and the mover must agree on which keys move.
            Self::Around(Bug::ExceptionTaken) => Some(MachineBug::ExceptionTaken),
            Self::Around(_) => None,
        }
    }
}

/// What a run asks: whether this is the bug that is planted.
#[inline]
pub(crate) fn is_planted(planted: Option<Planted>, bug: Bug) -> bool {
    cfg!(feature = "planted-bugs") && planted == Some(Planted::Around(bug))
}
