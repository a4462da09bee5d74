//! Copying big keys in pieces, while their slots are observed and the source serves everything: what is decided about
//! it, without connections, formats and clocks. The router's mover and the simulator do what it says ([`Action`]) and
//! tell it what came of it ([`Event`]).
//!
//! A big key is copied under another name at the target, its *staging key*, before its leg begins. In the leg, when
//! nobody writes any more, only its *tail* is read ([`Staging::tail`]), written to the staging key, and that is renamed
//! (`last_piece`). The leg's machine knows nothing of it.
//!
//! # The rules
//! 1. A copy begins behind a barrier: every worker knows that the key is staged, and what was sent before has been
//!    answered ([`Event::Reached`]). From then on workers tell what a command may touch before they send it
//!    ([`Event::Touched`]).
//! 2. What was told is read again, as it *is*, behind a later barrier, one that was set after the telling. What was
//!    read before is written before.
//! 3. A command that does not name its elements makes the copy begin again, to another staging key; after some times
//!    the key is moved whole.
//! 4. So each element of the source is in the staging key with its value. What removes without being told (expiry,
//!    eviction) shows in the count: as many elements on both sides are the same elements. If not, the key is moved
//!    whole.
//! 5. What was copied is worth something only at the processes between which it was copied. While it is copied, that
//!    holds for the connections, too.
//! 6. A staging key that is gone where the key is there has been renamed; gone where the key is not, it is lost.
//!
//! One thing is asked for at a time: [`Event::Go`] asks what is next, and nothing is next while something is not
//! answered. So whoever does the I/O says how fast. Values never pass through here: pieces stay with whoever read them.

mod last_piece;

use std::collections::{BTreeMap, VecDeque};

use super::planted::{Bug, InjectedBug};
use super::tail::{DirtyElements, Element};
use super::{BatchId, Key, Process, Stored};
use crate::topology::{Placement, Slot};

use last_piece::{Next, Storing};

pub use last_piece::{Counted, Renamed, StagingReply, Step};

/// A copy begins so often at most, before the key is moved whole.
const STARTS_MAX: u32 = 5;
/// The leg begins when no more elements than these have to be read in it, or after so many rounds.
const FEW: usize = 200;
const ROUNDS_MAX: u32 = 50;
/// Elements that are read again in one go.
const TAIL_AT_ONCE: usize = 500;

/// A key in one database.
pub type Place = (Key, u32);

/// Between which connections, and so which processes, something is copied.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ends {
    /// At the source.
    pub source: Process,
    /// At the target.
    pub target: Process,
}

/// What a look at a key has shown.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Seen {
    /// It can be copied in pieces.
    Fit,
    /// It is gone, or not big any more.
    Gone,
    /// It cannot be copied in pieces, and why.
    Unfit(String),
}

/// What came of reading a piece.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Piece {
    /// It is read.
    Taken {
        /// It has no elements.
        is_empty: bool,
        /// There are no more.
        is_last: bool,
    },
    /// The key is of another type by now.
    OtherType,
    /// It cannot be copied in pieces after all, and why.
    Unfit(String),
}

/// What is written to a staging key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    /// What [`Action::Read`] has read last.
    Piece,
    /// What [`Action::ReadAgain`] has read last.
    Again,
}

/// What came of writing to a staging key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Wrote {
    /// It is written.
    Yes,
    /// The staging key was gone: what is there now is only what was written last.
    Vanished,
    /// The node refuses it, and why.
    Refused(String),
}

/// What happened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// A leg is to be prepared. What was copied over other connections is copied again: what those had sent last is not
    /// known.
    Begin {
        /// Big keys of its slots that need not be moved whole.
        big: Vec<Place>,
        /// The connections that there are now.
        ends: Ends,
    },
    /// What is next? Nothing is under way.
    Go {
        /// A barrier may be set also where nobody waits for one.
        barrier: bool,
    },
    /// [`Action::Look`] is done.
    Looked {
        /// The key.
        place: Place,
        /// What was seen.
        seen: Seen,
    },
    /// A worker is about to send a command that may touch these elements; `None`: anything of the key.
    Touched {
        /// The key, in all databases.
        key: Key,
        /// The elements.
        elements: Option<Vec<Element>>,
    },
    /// A worker that did not know yet that the key is staged is about to write it.
    Written {
        /// The key, in all databases.
        key: Key,
    },
    /// Any key of the slot may be written.
    TouchedSlot(Slot),
    /// All keys may go (FLUSHALL, SWAPDB).
    Flush,
    /// [`Action::Barrier`] is done: it was published under this epoch. If that cannot be now, it is asked for again.
    Published {
        /// The epoch.
        epoch: u64,
    },
    /// All workers have adopted the epoch, and what was sent to the source before is answered. What they had told
    /// before must have been taken note of.
    Reached {
        /// The epoch.
        epoch: u64,
    },
    /// [`Action::Read`] is done.
    Read {
        /// The key.
        place: Place,
        /// What came of it.
        piece: Piece,
    },
    /// [`Action::ReadAgain`] is done.
    ReadAgain {
        /// The key.
        place: Place,
        /// It is of the same type.
        same_type: bool,
    },
    /// [`Action::Write`] is done.
    Wrote {
        /// The key.
        place: Place,
        /// What came of it.
        wrote: Wrote,
    },
    /// What is staged of the key cannot be used, and why.
    Unfit {
        /// The key.
        place: Place,
        /// Why, for people.
        why: String,
    },
    /// What is staged of the key is not needed any more: it has moved, or its slot has left.
    Over {
        /// The key, in all databases.
        key: Key,
    },
    /// Nothing that is staged is needed any more: the leg goes back, or the move is over.
    AllOver,
    /// In the leg: a batch is copied, perhaps once more. What was said about it before means nothing.
    Copying {
        /// The batch.
        batch: BatchId,
    },
    /// In the leg: the keys of a batch are being stored, but those that are staged, perhaps once more;
    /// [`Event::Stored`] follows.
    Storing {
        /// The batch.
        batch: BatchId,
        /// Its keys.
        keys: Vec<Key>,
        /// Of which the tail was read.
        staged: Vec<Place>,
    },
    /// They were stored, or those of [`Action::StoreWhole`] were: an outcome per key.
    Stored {
        /// The batch.
        batch: BatchId,
        /// What came of it.
        outcomes: Vec<Stored>,
    },
    /// [`Action::Finish`] is done.
    Finished {
        /// The batch.
        batch: BatchId,
        /// What it has shown of each key.
        shown: Vec<(Place, StagingReply)>,
    },
    /// [`Action::ReadWhole`] is done, or is refused, and why.
    ReadWhole {
        /// The batch.
        batch: BatchId,
        /// Which were asked for: the answer to an earlier question means nothing.
        places: Vec<Place>,
        /// Why not, where not.
        refused: Option<String>,
    },
    /// The source is not connected: what was to be read there whole is not answered any more.
    SourceLost,
}

/// What to do, in this order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// Look what the key is; [`Event::Looked`] follows.
    Look {
        /// The key.
        place: Place,
        /// The number that its staging key gets; none is used twice.
        number: u64,
    },
    /// Have the workers know which keys are staged ([`Staging::places`]) and then that there is a new epoch;
    /// [`Event::Published`] follows, and when it is reached [`Event::Reached`]. Other things are done meanwhile.
    Barrier,
    /// Read the next piece of the key; [`Event::Read`] follows. It may be read while the one before is written.
    Read {
        /// The key.
        place: Place,
    },
    /// Read these elements as they are; [`Event::ReadAgain`] follows.
    ReadAgain {
        /// The key.
        place: Place,
        /// Which.
        elements: Vec<Element>,
    },
    /// Write to the staging key; [`Event::Wrote`] follows.
    Write {
        /// The key.
        place: Place,
        /// What.
        part: Part,
        /// The staging key is new: whatever has its name goes first.
        afresh: bool,
    },
    /// What is staged of the key is not used any more: forget its pieces, and remove the staging key at some time.
    Drop {
        /// The key.
        place: Place,
    },
    /// The key is gone or not big any more.
    Forget {
        /// The key.
        place: Place,
    },
    /// The key is moved whole, and why, for people.
    Whole {
        /// The key.
        place: Place,
        /// Why.
        why: String,
    },
    /// What is staged lacks only its tails, or nothing is: the leg may begin.
    Ready,
    /// In the leg: this step with these keys of the batch; [`Event::Finished`] follows.
    Finish {
        /// The batch.
        batch: BatchId,
        /// What.
        step: Step,
        /// Which.
        places: Vec<Place>,
    },
    /// In the leg: what was staged of these is worth nothing. Read them whole, at the source; [`Event::ReadWhole`]
    /// follows, or [`Event::SourceLost`].
    ReadWhole {
        /// The batch.
        batch: BatchId,
        /// Which.
        places: Vec<Place>,
    },
    /// Store these, which were read whole, never over an existing key; [`Event::Stored`] follows, with an outcome for
    /// each.
    StoreWhole {
        /// The batch.
        batch: BatchId,
        /// Which.
        places: Vec<Place>,
    },
    /// The batch is stored: an outcome per key.
    Stored {
        /// The batch.
        batch: BatchId,
        /// What came of it.
        outcomes: Vec<Stored>,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Barrier {
    /// None is waited for: what was told before the last one may be read again.
    #[default]
    Reached,
    /// One is asked for.
    Wanted,
    /// One is waited for.
    Set(u64),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// The workers are not told yet.
    New,
    /// They are told, under this epoch.
    Announced(u64),
    /// The copy may begin.
    Ready,
    /// It has begun.
    Copying,
    /// All has been read.
    Read,
}

/// A key that is being copied, or has been.
#[derive(Clone, Debug)]
struct Staged {
    stage: Stage,
    tail: DirtyElements,
    /// A piece has been read and not been written.
    held: bool,
    /// The staging key is there.
    written: bool,
    starts: u32,
    ends: Ends,
}

impl Staged {
    fn has_begun(&self) -> bool {
        matches!(self.stage, Stage::Copying | Stage::Read)
    }

    fn is_whole(&self) -> bool {
        self.stage == Stage::Read && !self.held && !self.tail.is_everything()
    }
}

/// The machine.
#[derive(Clone, Debug, Default)]
pub struct Staging {
    planted: InjectedBug,
    placement: Placement,
    all: BTreeMap<Place, Staged>,
    /// To be looked at, and how often their copies have begun then.
    looks: VecDeque<(Place, u32)>,
    ends: Option<Ends>,
    numbers: u64,
    /// So many answers are awaited, of one key.
    pending_replies: u8,
    /// What is written when those have come.
    parts: VecDeque<Part>,
    /// Batches with staged keys that are being stored.
    storing: BTreeMap<BatchId, Storing>,
    barrier: Barrier,
    /// A barrier has been reached, and what follows from it is not done yet.
    is_reached: bool,
    /// All was read when the last one was reached, and so often in this preparation.
    is_read: bool,
    rounds: u32,
}

impl Staging {
    /// For a move in a fleet whose keys have their slots by this placement.
    #[must_use]
    pub fn new(placement: Placement) -> Self {
        Self { placement, ..Self::default() }
    }

    /// The same with a bug in it, for tests of the simulator.
    #[cfg(feature = "planted-bugs")]
    #[must_use]
    pub fn with(mut self, bug: Option<Bug>) -> Self {
        self.planted = InjectedBug::new(bug);
        self
    }

    /// Takes note of what happened and says what to do.
    pub fn step(&mut self, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Begin { big, ends } => self.begin(big, ends, actions),
            Event::Go { barrier } => self.go(barrier, actions),
            Event::Looked { place, seen } => self.looked(place, seen, actions),
            Event::Touched { key, elements } => self.touched(&key, elements.as_deref()),
            Event::Written { key } => {
                // Before the copy begins that is answered.
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
            Event::Unfit { place, why } => self.whole(place, why, actions),
            Event::Over { key } => {
                let places: Vec<Place> = self.places_of(&key).cloned().collect();
                places.iter().for_each(|place| self.drop_place(place, actions));
            }
            Event::AllOver => self.drop_all(actions),
            Event::Copying { batch } => drop(self.storing.remove(&batch)),
            Event::Storing { batch, keys, staged } => {
                // What was read whole since is not staged any more.
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
                self.go_on_storing(batch, next, actions);
            }
            Event::Finished { batch, shown } => {
                let Some(storing) = self.storing.get_mut(&batch) else { return };
                let (next, unusable) = storing.finished(shown, self.planted);
                unusable.into_iter().for_each(|(place, why)| self.whole(place, why, actions));
                self.go_on_storing(batch, next, actions);
            }
            Event::ReadWhole { batch, places, refused } => {
                let Some(storing) = self.storing.get_mut(&batch).filter(|storing| storing.reads_whole(&places)) else {
                    return;
                };
                let next = storing.read_whole(refused.as_deref());
                self.go_on_storing(batch, next, actions);
            }
            Event::SourceLost => {
                let why = Some("what was copied of it in pieces is worth nothing, and its source is lost");
                let reading = self.storing.iter_mut().filter(|(_, storing)| storing.is_reading_whole());
                let all: Vec<(BatchId, Next)> =
                    reading.map(|(batch, storing)| (*batch, storing.read_whole(why))).collect();
                all.into_iter().for_each(|(batch, next)| self.go_on_storing(batch, next, actions));
            }
        }
    }

    // ---- what may be asked ----

    /// Whether nothing is staged.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// What is staged.
    pub fn places(&self) -> impl Iterator<Item = &Place> {
        self.all.keys()
    }

    /// Of a key, in all databases.
    pub fn places_of(&self, key: &Key) -> impl Iterator<Item = &Place> + use<'_> {
        self.all.range((key.clone(), 0)..=(key.clone(), u32::MAX)).map(|(place, _)| place)
    }

    /// Whether the staging key may be at the target.
    #[must_use]
    pub fn is_written(&self, place: &Place) -> bool {
        self.all.get(place).is_some_and(|staged| staged.written)
    }

    /// The epoch that is waited for ([`Event::Reached`]).
    #[must_use]
    pub const fn awaits(&self) -> Option<u64> {
        if let Barrier::Set(epoch) = self.barrier { Some(epoch) } else { None }
    }

    /// Whether something is not answered: nothing is next.
    #[must_use]
    pub const fn is_asking(&self) -> bool {
        self.pending_replies > 0
    }

    /// How often its copy has begun.
    #[must_use]
    pub fn starts(&self, place: &Place) -> u32 {
        self.all.get(place).map_or(0, |staged| staged.starts)
    }

    /// In the leg: what of a key has to be read again before its staging key is what the key is. It stays, so that it
    /// can be asked once more. `None`: the key is not staged.
    #[must_use]
    pub fn tail(&self, place: &Place) -> Option<Vec<Element>> {
        let staged = self.all.get(place)?;
        Some(if self.planted.is(Bug::TailNotReadInTheLeg) { Vec::new() } else { staged.tail.all().cloned().collect() })
    }

    /// In the leg, before keys are read: those of which nothing that is staged may be used are moved whole. Else all of
    /// a key was read, it was not changed as a whole since, and both nodes are the processes that they were (by their
    /// `run_id`; `None`: not connected, so it cannot be told, and nothing is asked there). `is_ours`: the key is of the
    /// leg.
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
            let why = "it was changed as a whole, or a node was started again, after it had been copied in pieces";
            self.whole(place, why.to_owned(), actions);
        }
    }

    // ---- what it decides ----

    fn begin(&mut self, big: Vec<Place>, ends: Ends, actions: &mut Vec<Action>) {
        if self.all.values().any(|staged| staged.ends != ends) {
            self.drop_all(actions);
        }
        self.ends = Some(ends);
        self.looks = big.into_iter().filter(|place| !self.all.contains_key(place)).map(|place| (place, 1)).collect();
        (self.is_read, self.rounds) = (false, 0);
        self.forget_pending();
    }

    /// Nothing is answered any more.
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
        if let Some((place, _)) = self.looks.front() {
            self.numbers += 1;
            self.pending_replies = 1;
            actions.push(Action::Look { place: place.clone(), number: self.numbers });
            return;
        }
        if self.all.is_empty() {
            actions.push(Action::Ready);
            return;
        }
        if self.planted.is(Bug::TailReadTooEarly) {
            self.all.values_mut().for_each(|staged| staged.tail.begin_round());
        }
        if (self.barrier == Barrier::Reached || self.planted.is(Bug::TailReadTooEarly)) && self.read_a_tail(actions) {
            return;
        }
        if std::mem::take(&mut self.is_reached) {
            self.is_read = self.all.values().all(Staged::is_whole);
            self.rounds += u32::from(self.is_read);
            let left: usize = self.all.values().map(|staged| staged.tail.len()).sum();
            if self.is_read && (left <= FEW || self.rounds >= ROUNDS_MAX) {
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
                actions.push(Action::Write { place: place.clone(), part: Part::Piece, afresh: !staged.written });
            }
            if staged.stage == Stage::Copying {
                self.pending_replies += 1;
                actions.push(Action::Read { place });
            }
        }
    }

    /// Copies begin again that a command has changed as a whole, or are given up.
    fn begin_again(&mut self, actions: &mut Vec<Action>) {
        let all = self.all.iter();
        let changed: Vec<(Place, u32)> =
            all.filter(|(_, s)| s.tail.is_everything()).map(|(place, s)| (place.clone(), s.starts)).collect();
        for (place, starts) in changed {
            if starts >= STARTS_MAX {
                self.whole(
                    place,
                    "commands changed it as a whole, again and again, while it was copied".to_owned(),
                    actions,
                );
            } else {
                self.drop_place(&place, actions);
                self.looks.push_back((place, starts + 1));
            }
        }
    }

    fn looked(&mut self, place: Place, seen: Seen, actions: &mut Vec<Action>) {
        self.pending_replies = 0;
        let Some((_, starts)) = self.looks.pop_front_if(|(of, _)| *of == place) else { return };
        match seen {
            Seen::Gone => actions.push(Action::Forget { place }),
            Seen::Unfit(why) => self.whole(place, why, actions),
            Seen::Fit => {
                let Some(ends) = self.ends.clone() else { return };
                let stage = if self.planted.is(Bug::StagedWithoutBarrier) { Stage::Ready } else { Stage::New };
                self.all.insert(
                    place,
                    Staged { stage, tail: DirtyElements::default(), held: false, written: false, starts, ends },
                );
            }
        }
    }

    /// Asks for elements that were told before the last barrier, if there are any.
    fn read_a_tail(&mut self, actions: &mut Vec<Action>) -> bool {
        for (place, staged) in &mut self.all {
            let elements = staged.tail.take(TAIL_AT_ONCE);
            if elements.is_empty() {
                continue;
            }
            // What was read before is written before.
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
                // The copy will show it.
                staged.tail.drop_old();
            }
        }
    }

    fn read(&mut self, place: Place, piece: Piece, actions: &mut Vec<Action>) {
        match piece {
            Piece::OtherType => self.touch_everything(&place),
            Piece::Unfit(why) => self.whole(place, why, actions),
            Piece::Taken { is_empty, is_last } => {
                let Some(staged) = self.all.get_mut(&place) else { return };
                staged.held |= !is_empty;
                if is_last {
                    staged.stage = Stage::Read;
                }
            }
        }
    }

    /// What was read again is written, behind what was read before it.
    fn write_next(&mut self, place: Place, actions: &mut Vec<Action>) {
        if self.pending_replies == 0
            && let Some(part) = self.parts.pop_front()
        {
            self.pending_replies = 1;
            let afresh = self.all.get(&place).is_none_or(|staged| !staged.written);
            actions.push(Action::Write { place, part, afresh });
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
            Wrote::Refused(why) => self.whole(place, why, actions),
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

    fn go_on_storing(&mut self, batch: BatchId, next: Next, actions: &mut Vec<Action>) {
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

    fn whole(&mut self, place: Place, why: String, actions: &mut Vec<Action>) {
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
        self.looks.clear();
        self.forget_pending();
        self.barrier = Barrier::Reached;
        self.is_reached = false;
    }

    /// Those in any database.
    fn of_mut<'s>(&'s mut self, key: &Key) -> impl Iterator<Item = &'s mut Staged> + use<'s> {
        self.all.range_mut((key.clone(), 0)..=(key.clone(), u32::MAX)).map(|(_, staged)| staged)
    }
}
