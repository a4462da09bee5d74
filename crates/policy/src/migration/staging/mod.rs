//! Copies of big keys in pieces, while their slots are observed and the source serves them. Contains the decisions,
//! without connections, formats and clocks. The router's mover and the simulator execute the [`Action`]s and report
//! results as [`Event`]s.
//!
//! A big key is copied under another name at the target, its *staging key*, before its leg starts. In the leg, after
//! the last write, only its *dirty elements* are read ([`Staging::dirty_elements`]), written to the staging key, and
//! that is renamed (`last_piece`). The machine of the leg is not involved.
//!
//! # Rules
//! 1. A copy starts behind a barrier: every worker knows that the key is staged, and earlier commands have ended
//!    ([`Event::Reached`]). From then on workers report the elements a command may touch before they send it
//!    ([`Event::Touched`]).
//! 2. A reported element is read again, with its present value, behind a barrier set after the report. Pieces read
//!    earlier are written earlier.
//! 3. A command with undeclared elements restarts the copy, to another staging key; after several restarts the key is
//!    moved whole.
//! 4. So the staging key has each element of the source with its value. Unreported removals (expiry, eviction) show in
//!    the count: equal counts mean equal elements. Otherwise the key is moved whole.
//! 5. A copy is valid only for the two processes it was made between. During the copy this holds for the connections,
//!    too.
//! 6. A missing staging key was renamed if the key exists, and is lost otherwise.
//!
//! One request runs at a time: [`Event::Next`] requests the next action, and there is none while a reply is pending. So
//! the caller determines the speed. Values do not pass through here: pieces stay with the reader.

mod last_piece;

use std::collections::{BTreeMap, VecDeque};

use super::dirty_elements::{DirtyElements, Element};
use super::injected::{Bug, InjectedBug};
use super::{BatchId, Key, Process, Stored};
use crate::topology::{Placement, Slot};

use last_piece::{Next, Storing};

pub use last_piece::{Counted, Renamed, StagingReply, Step};

/// Maximum number of starts of a copy, before the key is moved whole.
const STARTS_MAX: u32 = 5;
/// The leg starts when at most this many elements must be read in it, or after the maximum number of rounds.
const DIRTY_IN_LEG_MAX: usize = 200;
const ROUNDS_MAX: u32 = 50;
/// Elements per repeated read.
const DIRTY_READ_MAX: usize = 500;

/// A key in one database.
pub type Place = (Key, u32);

/// Connections, and so processes, of a copy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Endpoints {
    /// Source process.
    pub source: Process,
    /// Target process.
    pub target: Process,
}

/// Result of inspecting a key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Inspection {
    /// The key can be copied in pieces.
    Fit,
    /// The key is gone, or no longer big.
    Gone,
    /// The key cannot be copied in pieces, with the reason.
    Unfit(String),
}

/// Result of reading a piece.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Piece {
    /// A piece was read.
    Taken {
        /// The piece has no elements.
        is_empty: bool,
        /// The piece is the last one.
        is_last: bool,
    },
    /// The type of the key has changed.
    OtherType,
    /// The key cannot be copied in pieces after all, with the reason.
    Unfit(String),
}

/// Content to write to a staging key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    /// The last result of [`Action::Read`].
    Piece,
    /// The last result of [`Action::ReadAgain`].
    Again,
}

/// Result of writing to a staging key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Wrote {
    /// The write succeeded.
    Yes,
    /// The staging key had vanished, and has only the last write now.
    Vanished,
    /// The node refused the write, with the reason.
    Refused(String),
}

/// Input of a [`Staging`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// Prepares a leg. Copies over other connections are restarted, because the last requests there have unknown
    /// results.
    Begin {
        /// Big keys of the leg's slots that can be copied in pieces.
        big: Vec<Place>,
        /// Present connections.
        ends: Endpoints,
    },
    /// Requests the next action. Nothing is in flight.
    Next {
        /// Permits a barrier although no action waits for one.
        barrier: bool,
    },
    /// [`Action::Inspect`] is done.
    Inspected {
        /// Key and database.
        place: Place,
        /// Result of the inspection.
        seen: Inspection,
    },
    /// A worker is about to send a command that may touch these elements; `None`: any element of the key.
    Touched {
        /// Key, in all databases.
        key: Key,
        /// Touched elements.
        elements: Option<Vec<Element>>,
    },
    /// A worker that has not yet seen that the key is staged is about to write it.
    Written {
        /// Key, in all databases.
        key: Key,
    },
    /// Any key of the slot may be written.
    TouchedSlot(Slot),
    /// All keys may be removed (FLUSHALL, SWAPDB).
    Flush,
    /// [`Action::Barrier`] is done, published under this epoch. If publishing is impossible now, the caller retries.
    Published {
        /// Epoch of the plan.
        epoch: u64,
    },
    /// All workers have adopted the epoch, and earlier commands at the source have ended. Earlier reports of the
    /// workers must have been handled.
    Reached {
        /// Epoch of the plan.
        epoch: u64,
    },
    /// [`Action::Read`] is done.
    Read {
        /// Key and database.
        place: Place,
        /// Result of the read.
        piece: Piece,
    },
    /// [`Action::ReadAgain`] is done.
    ReadAgain {
        /// Key and database.
        place: Place,
        /// Whether the key still has the same type.
        same_type: bool,
    },
    /// [`Action::Write`] is done.
    Wrote {
        /// Key and database.
        place: Place,
        /// Result of the write.
        wrote: Wrote,
    },
    /// The staged copy of the key is unusable, with the reason.
    Unfit {
        /// Key and database.
        place: Place,
        /// Reason, for display.
        why: String,
    },
    /// The staged copy of the key is no longer needed: the key has moved, or its slot has left.
    Unneeded {
        /// Key, in all databases.
        key: Key,
    },
    /// No staged copy is needed any more: the leg goes back, or the move has ended.
    AllUnneeded,
    /// In the leg: a batch is copied, or copied again. Earlier events about it no longer apply.
    Copying {
        /// Batch number.
        batch: BatchId,
    },
    /// In the leg: the unstaged keys of a batch are being stored, or stored again; [`Event::Stored`] follows.
    Storing {
        /// Batch number.
        batch: BatchId,
        /// All keys of the batch.
        keys: Vec<Key>,
        /// Keys with a staged copy, whose dirty elements were read.
        staged: Vec<Place>,
    },
    /// The unstaged keys, or those of [`Action::StoreWhole`], were stored, with a result per key.
    Stored {
        /// Batch number.
        batch: BatchId,
        /// Results, in the order of the keys.
        outcomes: Vec<Stored>,
    },
    /// [`Action::Finish`] is done.
    Finished {
        /// Batch number.
        batch: BatchId,
        /// Result for each key.
        shown: Vec<(Place, StagingReply)>,
    },
    /// [`Action::ReadWhole`] is done, or failed.
    ReadWhole {
        /// Batch number.
        batch: BatchId,
        /// Requested keys: a reply to an earlier request is ignored.
        places: Vec<Place>,
        /// Reason of a failure.
        refused: Option<String>,
    },
    /// The source is disconnected: pending whole reads get no reply.
    SourceLost,
}

/// Output of a [`Staging`], executed in order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// Inspect the key; [`Event::Inspected`] follows.
    Inspect {
        /// Key and database.
        place: Place,
        /// Number of its staging key. Never reused.
        number: u64,
    },
    /// Publish the staged keys ([`Staging::places`]) and then a new epoch; [`Event::Published`] follows, and
    /// [`Event::Reached`] when it is reached. Other actions continue in the meantime.
    Barrier,
    /// Read the next piece of the key; [`Event::Read`] follows. May overlap with the write of the previous piece.
    Read {
        /// Key and database.
        place: Place,
    },
    /// Read the present values of these elements; [`Event::ReadAgain`] follows.
    ReadAgain {
        /// Key and database.
        place: Place,
        /// Elements to read.
        elements: Vec<Element>,
    },
    /// Write to the staging key; [`Event::Wrote`] follows.
    Write {
        /// Key and database.
        place: Place,
        /// Content to write.
        part: Part,
        /// The staging key is new: first remove an existing key of this name.
        is_new: bool,
    },
    /// The staged copy is no longer used: discard its pieces, and remove the staging key eventually.
    Drop {
        /// Key and database.
        place: Place,
    },
    /// The key is gone or no longer big.
    Forget {
        /// Key and database.
        place: Place,
    },
    /// The key is moved whole.
    Whole {
        /// Key and database.
        place: Place,
        /// Reason, for display.
        why: String,
    },
    /// Staged copies lack only their dirty elements, or none exists: the leg may start.
    Ready,
    /// In the leg: execute this step for these keys of the batch; [`Event::Finished`] follows.
    Finish {
        /// Batch number.
        batch: BatchId,
        /// Step to execute.
        step: Step,
        /// Keys to finish.
        places: Vec<Place>,
    },
    /// In the leg: the staged copies of these keys are invalid. Read them whole at the source; [`Event::ReadWhole`]
    /// follows, or [`Event::SourceLost`].
    ReadWhole {
        /// Batch number.
        batch: BatchId,
        /// Keys to read.
        places: Vec<Place>,
    },
    /// Store these keys, which were read whole, never over an existing key; [`Event::Stored`] follows, with a result
    /// per key.
    StoreWhole {
        /// Batch number.
        batch: BatchId,
        /// Keys to store.
        places: Vec<Place>,
    },
    /// The batch is stored.
    Stored {
        /// Batch number.
        batch: BatchId,
        /// Results, in the order of the keys.
        outcomes: Vec<Stored>,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Barrier {
    /// No barrier is pending: elements reported before the last one may be read again.
    #[default]
    Reached,
    /// A barrier is requested.
    Wanted,
    /// A barrier is set, under this epoch.
    Set(u64),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// Not yet published to the workers.
    New,
    /// Published to the workers under this epoch.
    Announced(u64),
    /// The copy may start.
    Ready,
    /// The copy has started.
    Copying,
    /// All pieces are read.
    Read,
}

/// A key that is being copied, or is copied.
#[derive(Clone, Debug)]
struct Staged {
    stage: Stage,
    tail: DirtyElements,
    /// A piece is read and not yet written.
    held: bool,
    /// The staging key exists.
    written: bool,
    starts: u32,
    ends: Endpoints,
}

impl Staged {
    fn has_begun(&self) -> bool {
        matches!(self.stage, Stage::Copying | Stage::Read)
    }

    fn is_whole(&self) -> bool {
        self.stage == Stage::Read && !self.held && !self.tail.is_everything()
    }
}

/// State machine of the copies of a move.
#[derive(Clone, Debug, Default)]
pub struct Staging {
    planted: InjectedBug,
    placement: Placement,
    all: BTreeMap<Place, Staged>,
    /// Keys to inspect, with the number of starts of their copies.
    to_inspect: VecDeque<(Place, u32)>,
    ends: Option<Endpoints>,
    numbers: u64,
    /// Number of pending replies, all for one key.
    pending_replies: u8,
    /// Parts to write after these replies.
    parts: VecDeque<Part>,
    /// Batches with staged keys that are being stored.
    storing: BTreeMap<BatchId, Storing>,
    barrier: Barrier,
    /// A barrier was reached, and its consequences are not yet handled.
    is_reached: bool,
    /// All pieces were read at the last barrier; and the number of such barriers in this preparation.
    is_read: bool,
    rounds: u32,
}

impl Staging {
    /// Creates the machine of a move, for a fleet with this placement.
    #[must_use]
    pub fn new(placement: Placement) -> Self {
        Self { placement, ..Self::default() }
    }

    /// Injects a bug, for tests of the simulator.
    #[cfg(feature = "planted-bugs")]
    #[must_use]
    pub fn with(mut self, bug: Option<Bug>) -> Self {
        self.planted = InjectedBug::new(bug);
        self
    }

    /// Handles an event and appends the resulting actions.
    pub fn step(&mut self, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Begin { big, ends } => self.begin(big, ends, actions),
            Event::Next { barrier } => self.go(barrier, actions),
            Event::Inspected { place, seen } => self.looked(place, seen, actions),
            Event::Touched { key, elements } => self.touched(&key, elements.as_deref()),
            Event::Written { key } => {
                // Not before the copy starts, because it waits for the command to end.
                self.of_mut(&key).filter(|staged| staged.has_begun()).for_each(|staged| staged.tail.touch_everything());
            }
            Event::TouchedSlot(slot) => {
                let of_slot = self.all.iter_mut().filter(|((key, _), _)| self.placement.slot_of(key) == slot);
                of_slot.for_each(|(_, staged)| staged.tail.touch_everything());
            }
            Event::Flush => self.all.values_mut().for_each(|staged| staged.tail.touch_everything()),
            Event::Published { epoch } => {
                self.barrier = Barrier::Set(epoch);
                for staged in self.all.values_mut().filter(|staged| staged.stage == Stage::New) {
                    staged.stage = Stage::Announced(epoch);
                }
            }
            Event::Reached { epoch } => self.reached(epoch),
            Event::Read { place, piece } => {
                self.pending_replies = self.pending_replies.saturating_sub(1);
                self.read(place, piece, actions);
            }
            Event::ReadAgain { place, same_type } => {
                self.pending_replies = self.pending_replies.saturating_sub(1);
                if !same_type {
                    self.parts.clear();
                    self.touch_everything(&place);
                }
                self.write_next(place, actions);
            }
            Event::Wrote { place, wrote } => {
                self.pending_replies = self.pending_replies.saturating_sub(1);
                if wrote != Wrote::Yes {
                    self.parts.clear();
                }
                self.wrote(place.clone(), wrote, actions);
                self.write_next(place, actions);
            }
            Event::Unfit { place, why } => self.move_whole(place, why, actions),
            Event::Unneeded { key } => {
                let places: Vec<Place> = self.places_of(&key).cloned().collect();
                places.iter().for_each(|place| self.drop_place(place, actions));
            }
            Event::AllUnneeded => self.drop_all(actions),
            Event::Copying { batch } => drop(self.storing.remove(&batch)),
            Event::Storing { batch, keys, staged } => {
                // Keys read whole are no longer staged.
                self.storing.remove(&batch);
                if !staged.is_empty() {
                    self.storing.insert(batch, Storing::of(keys, staged));
                }
            }
            Event::Stored { batch, outcomes } => {
                let Some(storing) = self.storing.get_mut(&batch) else {
                    return actions.push(Action::Stored { batch, outcomes });
                };
                let all = &self.all;
                let next = storing.stored(outcomes, |place| all.contains_key(place));
                self.continue_storing(batch, next, actions);
            }
            Event::Finished { batch, shown } => {
                let Some(storing) = self.storing.get_mut(&batch) else { return };
                let (next, unusable) = storing.finished(shown, self.planted);
                unusable.into_iter().for_each(|(place, why)| self.move_whole(place, why, actions));
                self.continue_storing(batch, next, actions);
            }
            Event::ReadWhole { batch, places, refused } => {
                let Some(storing) = self.storing.get_mut(&batch).filter(|storing| storing.reads_whole(&places)) else {
                    return;
                };
                let next = storing.read_whole(refused.as_deref());
                self.continue_storing(batch, next, actions);
            }
            Event::SourceLost => {
                let why = Some("its copy in pieces is invalid, and its source is lost");
                let reading = self.storing.iter_mut().filter(|(_, storing)| storing.is_reading_whole());
                let all: Vec<(BatchId, Next)> =
                    reading.map(|(batch, storing)| (*batch, storing.read_whole(why))).collect();
                all.into_iter().for_each(|(batch, next)| self.continue_storing(batch, next, actions));
            }
        }
    }

    // ---- state ----

    /// Whether nothing is staged.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Staged keys.
    pub fn places(&self) -> impl Iterator<Item = &Place> {
        self.all.keys()
    }

    /// Staged databases of a key.
    pub fn places_of(&self, key: &Key) -> impl Iterator<Item = &Place> + use<'_> {
        self.all.range((key.clone(), 0)..=(key.clone(), u32::MAX)).map(|(place, _)| place)
    }

    /// Whether the staging key may exist at the target.
    #[must_use]
    pub fn is_written(&self, place: &Place) -> bool {
        self.all.get(place).is_some_and(|staged| staged.written)
    }

    /// Epoch of the pending barrier ([`Event::Reached`]).
    #[must_use]
    pub const fn pending_epoch(&self) -> Option<u64> {
        if let Barrier::Set(epoch) = self.barrier { Some(epoch) } else { None }
    }

    /// Whether a reply is pending, so that no action follows.
    #[must_use]
    pub const fn is_busy(&self) -> bool {
        self.pending_replies > 0
    }

    /// Number of starts of the key's copy.
    #[must_use]
    pub fn starts(&self, place: &Place) -> u32 {
        self.all.get(place).map_or(0, |staged| staged.starts)
    }

    /// In the leg: dirty elements to read before the staging key equals the key. They stay, so that the query can be
    /// repeated. `None`: the key is not staged.
    #[must_use]
    pub fn tail(&self, place: &Place) -> Option<Vec<Element>> {
        let staged = self.all.get(place)?;
        Some(if self.planted.is(Bug::TailNotReadInTheLeg) { Vec::new() } else { staged.tail.all().cloned().collect() })
    }

    /// In the leg, before keys are read: moves keys with unusable copies whole. A copy is usable if all pieces were
    /// read, no later command replaced the key, and both nodes are the same processes (by `run_id`; `None`: not
    /// connected, so unknown, but nothing is read there). `is_ours`: whether the key belongs to the leg.
    pub fn drop_unusable(
        &mut self,
        source: Option<&str>,
        target: Option<&str>,
        is_ours: impl Fn(&Place) -> bool,
        actions: &mut Vec<Action>,
    ) {
        let same = |now: Option<&str>, then: &Process| now.is_none_or(|now| now == then.run_id);
        let other_process = !self.planted.is(Bug::StagedAtAnotherProcess);
        let is_unusable = |staged: &Staged| {
            let are_same = same(source, &staged.ends.source) && same(target, &staged.ends.target);
            !staged.is_whole() || !staged.written || (!are_same && other_process)
        };
        let unusable = self.all.iter().filter(|(place, staged)| is_ours(place) && is_unusable(staged));
        let unusable: Vec<Place> = unusable.map(|(place, _)| place.clone()).collect();
        for place in unusable {
            let why = "it was replaced, or a node was restarted, after its copy in pieces";
            self.move_whole(place, why.to_owned(), actions);
        }
    }

    // ---- decisions ----

    fn begin(&mut self, big: Vec<Place>, ends: Endpoints, actions: &mut Vec<Action>) {
        if self.all.values().any(|staged| staged.ends != ends) {
            self.drop_all(actions);
        }
        self.ends = Some(ends);
        self.to_inspect =
            big.into_iter().filter(|place| !self.all.contains_key(place)).map(|place| (place, 1)).collect();
        (self.is_read, self.rounds) = (false, 0);
        self.forget_pending();
    }

    /// Drops all pending replies.
    fn forget_pending(&mut self) {
        self.pending_replies = 0;
        self.parts.clear();
        self.storing.clear();
    }

    fn go(&mut self, barrier: bool, actions: &mut Vec<Action>) {
        if self.pending_replies > 0 {
            return;
        }
        self.begin_again(actions);
        if let Some((place, _)) = self.to_inspect.front() {
            self.numbers += 1;
            self.pending_replies = 1;
            actions.push(Action::Inspect { place: place.clone(), number: self.numbers });
            return;
        }
        if self.all.is_empty() {
            actions.push(Action::Ready);
            return;
        }
        if self.planted.is(Bug::TailReadTooEarly) {
            self.all.values_mut().for_each(|staged| staged.tail.begin_round());
        }
        if (self.barrier == Barrier::Reached || self.planted.is(Bug::TailReadTooEarly)) && self.read_dirty(actions) {
            return;
        }
        if std::mem::take(&mut self.is_reached) {
            self.is_read = self.all.values().all(Staged::is_whole);
            self.rounds += u32::from(self.is_read);
            let left: usize = self.all.values().map(|staged| staged.tail.len()).sum();
            if self.is_read && (left <= DIRTY_IN_LEG_MAX || self.rounds >= ROUNDS_MAX) {
                actions.push(Action::Ready);
                return;
            }
        }
        let is_awaited = self.is_read || self.all.values().any(|staged| staged.stage == Stage::New);
        if !matches!(self.barrier, Barrier::Set(_)) && (is_awaited || barrier) {
            self.barrier = Barrier::Wanted;
            self.all.values_mut().for_each(|staged| staged.tail.begin_round());
            actions.push(Action::Barrier);
        }
        let is_next = |staged: &Staged| {
            staged.stage == Stage::Ready || staged.stage == Stage::Copying || staged.stage == Stage::Read && staged.held
        };
        if let Some((place, staged)) = self.all.iter_mut().find(|(_, staged)| is_next(staged)) {
            if staged.stage == Stage::Ready {
                staged.stage = Stage::Copying;
            }
            let place = place.clone();
            if std::mem::take(&mut staged.held) {
                self.pending_replies += 1;
                actions.push(Action::Write { place: place.clone(), part: Part::Piece, is_new: !staged.written });
            }
            if staged.stage == Stage::Copying {
                self.pending_replies += 1;
                actions.push(Action::Read { place });
            }
        }
    }

    /// Restarts copies of replaced keys, or gives them up.
    fn begin_again(&mut self, actions: &mut Vec<Action>) {
        let all = self.all.iter();
        let changed: Vec<(Place, u32)> =
            all.filter(|(_, s)| s.tail.is_everything()).map(|(place, s)| (place.clone(), s.starts)).collect();
        for (place, starts) in changed {
            if starts >= STARTS_MAX {
                self.move_whole(place, "commands repeatedly replaced it during the copy".to_owned(), actions);
            } else {
                self.drop_place(&place, actions);
                self.to_inspect.push_back((place, starts + 1));
            }
        }
    }

    fn looked(&mut self, place: Place, seen: Inspection, actions: &mut Vec<Action>) {
        self.pending_replies = 0;
        let Some((_, starts)) = self.to_inspect.pop_front_if(|(of, _)| *of == place) else { return };
        match seen {
            Inspection::Gone => actions.push(Action::Forget { place }),
            Inspection::Unfit(why) => self.move_whole(place, why, actions),
            Inspection::Fit => {
                let Some(ends) = self.ends.clone() else { return };
                let stage = if self.planted.is(Bug::StagedWithoutBarrier) { Stage::Ready } else { Stage::New };
                self.all.insert(
                    place,
                    Staged { stage, tail: DirtyElements::default(), held: false, written: false, starts, ends },
                );
            }
        }
    }

    /// Requests elements reported before the last barrier. Returns whether there are any.
    fn read_dirty(&mut self, actions: &mut Vec<Action>) -> bool {
        for (place, staged) in &mut self.all {
            let elements = staged.tail.take(DIRTY_READ_MAX);
            if elements.is_empty() {
                continue;
            }
            // Pieces read earlier are written earlier.
            if staged.held && !self.planted.is(Bug::PieceWrittenLate) {
                staged.held = false;
                self.parts.push_back(Part::Piece);
            }
            self.parts.push_back(Part::Again);
            self.pending_replies = 1;
            actions.push(Action::ReadAgain { place: place.clone(), elements });
            return true;
        }
        false
    }

    fn reached(&mut self, epoch: u64) {
        if self.barrier != Barrier::Set(epoch) {
            return;
        }
        self.barrier = Barrier::Reached;
        self.is_reached = true;
        for staged in self.all.values_mut() {
            if matches!(staged.stage, Stage::Announced(since) if since <= epoch) {
                staged.stage = Stage::Ready;
            }
            if !staged.has_begun() {
                // The copy will include them.
                staged.tail.drop_old();
            }
        }
    }

    fn read(&mut self, place: Place, piece: Piece, actions: &mut Vec<Action>) {
        match piece {
            Piece::OtherType => self.touch_everything(&place),
            Piece::Unfit(why) => self.move_whole(place, why, actions),
            Piece::Taken { is_empty, is_last } => {
                let Some(staged) = self.all.get_mut(&place) else { return };
                staged.held |= !is_empty;
                if is_last {
                    staged.stage = Stage::Read;
                }
            }
        }
    }

    /// Writes the next part: elements read again follow earlier pieces.
    fn write_next(&mut self, place: Place, actions: &mut Vec<Action>) {
        if self.pending_replies == 0
            && let Some(part) = self.parts.pop_front()
        {
            self.pending_replies = 1;
            let afresh = self.all.get(&place).is_none_or(|staged| !staged.written);
            actions.push(Action::Write { place, part, is_new: afresh });
        }
    }

    fn wrote(&mut self, place: Place, wrote: Wrote, actions: &mut Vec<Action>) {
        match wrote {
            Wrote::Yes => {
                if let Some(staged) = self.all.get_mut(&place) {
                    staged.written = true;
                }
            }
            Wrote::Vanished => self.touch_everything(&place),
            Wrote::Refused(why) => self.move_whole(place, why, actions),
        }
    }

    fn touched(&mut self, key: &Key, elements: Option<&[Element]>) {
        let (dropped, unheard) =
            (self.planted.is(Bug::TouchedNotReadAgain), self.planted.is(Bug::ChangeAsAWholeUnheard));
        for staged in self.of_mut(key) {
            match elements {
                Some(_) if dropped => {}
                Some(elements) => staged.tail.touch(elements.iter().cloned()),
                None if unheard => {}
                None => staged.tail.touch_everything(),
            }
        }
    }

    fn touch_everything(&mut self, place: &Place) {
        if let Some(staged) = self.all.get_mut(place) {
            staged.tail.touch_everything();
        }
    }

    fn continue_storing(&mut self, batch: BatchId, next: Next, actions: &mut Vec<Action>) {
        actions.push(match next {
            Next::Finish(step, places) => Action::Finish { batch, step, places },
            Next::ReadWhole(places) => Action::ReadWhole { batch, places },
            Next::StoreWhole(places) => Action::StoreWhole { batch, places },
            Next::Done(outcomes) => {
                self.storing.remove(&batch);
                Action::Stored { batch, outcomes }
            }
        });
    }

    fn move_whole(&mut self, place: Place, why: String, actions: &mut Vec<Action>) {
        self.drop_place(&place, actions);
        actions.push(Action::Whole { place, why });
    }

    fn drop_place(&mut self, place: &Place, actions: &mut Vec<Action>) {
        if self.all.remove(place).is_some() {
            actions.push(Action::Drop { place: place.clone() });
        }
    }

    fn drop_all(&mut self, actions: &mut Vec<Action>) {
        let all = std::mem::take(&mut self.all);
        actions.extend(all.into_keys().map(|place| Action::Drop { place }));
        self.to_inspect.clear();
        self.forget_pending();
        self.barrier = Barrier::Reached;
        self.is_reached = false;
    }

    /// Staged copies of a key, in all databases.
    fn of_mut<'s>(&'s mut self, key: &Key) -> impl Iterator<Item = &'s mut Staged> + use<'s> {
        self.all.range_mut((key.clone(), 0)..=(key.clone(), u32::MAX)).map(|(_, staged)| staged)
    }
}
