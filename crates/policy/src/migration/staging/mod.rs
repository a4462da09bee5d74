//! Copying big keys in pieces, while their slots are observed and the source serves everything: what is decided about it, without connections, formats and
//! clocks. The router's mover and the simulator do what it says ([`Action`]) and tell it what came of it ([`Event`]).
//!
//! A big key is copied under another name at the target, its *staging key*, before its leg begins. In the leg, when nobody writes any more, only its *tail*
//! is read ([`Staging::tail`]), written to the staging key, and that is renamed ([`Storing`]). The leg's machine knows nothing of it.
//!
//! # The rules
//! 1. A copy begins behind a barrier: every worker knows that the key is staged, and what was sent before has been answered ([`Event::Reached`]). From then
//!    on workers tell what a command may touch before they send it ([`Event::Touched`]).
//! 2. What was told is read again, as it *is*, behind a later barrier, one that was set after the telling. What was read before is written before.
//! 3. A command that does not name its elements makes the copy begin again, to another staging key; after some times the key is moved whole.
//! 4. So each element of the source is in the staging key with its value. What removes without being told (expiry, eviction) shows in the count: as many
//!    elements on both sides are the same elements. If not, the key is moved whole.
//! 5. What was copied is worth something only at the processes between which it was copied. While it is copied, that holds for the connections, too.
//! 6. A staging key that is gone where the key is there has been renamed; gone where the key is not, it is lost.
//!
//! One thing is asked for at a time: [`Event::Go`] asks what is next, and is given again when that is done. So who drives it says how fast.

mod last_piece;

use std::collections::{BTreeMap, VecDeque};

use super::planted::{Bug, Planted};
use super::tail::{Element, Tail};
use super::{Key, Process};
use crate::topology::{Slot, slot_of};

pub use last_piece::{Counted, Finished, Next, Renamed, Step, Storing, renamed};

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
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Piece {
    /// There are more.
    More,
    /// It was the last one.
    Last,
    /// It is of another type by now.
    OtherType,
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
    /// A leg is to be prepared. What was copied over other connections is copied again: what those had sent last is not known.
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
    /// All workers have adopted the epoch, and what was sent to the source before is answered. What they had told before must have been taken note of.
    Reached {
        /// The epoch.
        epoch: u64,
    },
    /// [`Action::Copy`] is done.
    Copied {
        /// The key.
        place: Place,
        /// What came of writing the piece before, if there was one and it was not empty.
        wrote: Option<Wrote>,
        /// What came of reading, where there was more to be read.
        read: Option<Piece>,
    },
    /// [`Action::ReadAgain`] is done; `None`: the key is of another type by now.
    ReadAgain {
        /// The key.
        place: Place,
        /// What came of writing.
        wrote: Option<Wrote>,
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
        /// The key.
        place: Place,
    },
    /// Nothing that is staged is needed any more: the leg goes back, or the move is over.
    AllOver,
}

/// What to do, in this order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// Look what the key is; [`Event::Looked`] follows.
    Look {
        /// The key.
        place: Place,
    },
    /// Have the workers know which keys are staged ([`Staging::places`]) and then that there is a new epoch; [`Event::Published`] follows, and when it is
    /// reached [`Event::Reached`]. Other things are done meanwhile.
    Barrier,
    /// Write the piece of the key that was read last, if there is one, and read the next one, if there is more; [`Event::Copied`] follows.
    Copy {
        /// The key.
        place: Place,
        /// The staging key is new: whatever has its name goes first.
        afresh: bool,
    },
    /// Read these elements as they are; write the piece that was read last, if there is one, and then these. [`Event::ReadAgain`] follows.
    ReadAgain {
        /// The key.
        place: Place,
        /// Which.
        elements: Vec<Element>,
        /// The piece that was read last is to be written before.
        held_first: bool,
        /// The staging key is new: whatever has its name goes first.
        afresh: bool,
    },
    /// What is staged of the key is not used any more: forget its pieces, and remove the staging key at some time.
    Drop {
        /// The key.
        place: Place,
        /// The number of the staging key.
        number: u64,
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
    tail: Tail,
    /// A piece has been read and not been written.
    held: bool,
    /// The staging key is there.
    written: bool,
    number: u64,
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
    planted: Planted,
    all: BTreeMap<Place, Staged>,
    /// To be looked at, and how often their copies have begun then.
    looks: VecDeque<(Place, u32)>,
    ends: Option<Ends>,
    numbers: u64,
    barrier: Barrier,
    /// A barrier has been reached, and what follows from it is not done yet.
    is_reached: bool,
    /// All was read when the last one was reached, and so often in this preparation.
    is_read: bool,
    rounds: u32,
}

impl Staging {
    /// The same with a bug in it, for tests of the simulator.
    #[cfg(feature = "planted-bugs")]
    #[must_use]
    pub fn with(mut self, bug: Option<Bug>) -> Self {
        self.planted = Planted(bug);
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
                let of_slot = self.all.iter_mut().filter(|((key, _), _)| slot_of(key) == slot);
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
            Event::Copied { place, wrote, read } => self.copied(place, wrote, read, actions),
            Event::ReadAgain { place, wrote } => match wrote {
                Some(wrote) => self.wrote(place, wrote, actions),
                None => self.touch_everything(&place),
            },
            Event::Unfit { place, why } => self.whole(place, why, actions),
            Event::Over { place } => self.drop_place(&place, actions),
            Event::AllOver => self.drop_all(actions),
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

    /// The number of the staging key of a key; none is used twice.
    #[must_use]
    pub fn number(&self, place: &Place) -> Option<u64> {
        self.all.get(place).map(|staged| staged.number)
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

    /// How often its copy has begun.
    #[must_use]
    pub fn starts(&self, place: &Place) -> u32 {
        self.all.get(place).map_or(0, |staged| staged.starts)
    }

    /// In the leg: what of a key has to be read again before its staging key is what the key is. It stays, so that it can be asked once more. `None`: the
    /// key is not staged.
    #[must_use]
    pub fn tail(&self, place: &Place) -> Option<Vec<Element>> {
        let staged = self.all.get(place)?;
        Some(if self.planted.is(Bug::TailNotReadInTheLeg) { Vec::new() } else { staged.tail.all().cloned().collect() })
    }

    /// In the leg: whether what is staged of a key may be used. All of it was read, it was not changed as a whole since, and both nodes are the processes that
    /// they were (by their `run_id`; `None`: not connected, so it cannot be told, and nothing is asked there).
    #[must_use]
    pub fn is_usable(&self, place: &Place, source: Option<&str>, target: Option<&str>) -> bool {
        let Some(staged) = self.all.get(place) else { return false };
        let same = |now: Option<&str>, then: &Process| now.is_none_or(|now| now == then.run_id);
        let are_same = same(source, &staged.ends.source) && same(target, &staged.ends.target);
        staged.is_whole() && staged.written && (are_same || self.planted.is(Bug::StagedAtAnotherProcess))
    }

    // ---- what it decides ----

    fn begin(&mut self, big: Vec<Place>, ends: Ends, actions: &mut Vec<Action>) {
        if self.all.values().any(|staged| staged.ends != ends) {
            self.drop_all(actions);
        }
        self.ends = Some(ends);
        self.looks = big.into_iter().filter(|place| !self.all.contains_key(place)).map(|place| (place, 1)).collect();
        (self.is_read, self.rounds) = (false, 0);
    }

    fn go(&mut self, barrier: bool, actions: &mut Vec<Action>) {
        self.begin_again(actions);
        if let Some((place, _)) = self.looks.front() {
            actions.push(Action::Look { place: place.clone() });
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
        let is_next =
            |staged: &Staged| staged.stage == Stage::Ready || staged.stage == Stage::Copying || staged.stage == Stage::Read && staged.held;
        if let Some((place, staged)) = self.all.iter_mut().find(|(_, staged)| is_next(staged)) {
            if staged.stage == Stage::Ready {
                staged.stage = Stage::Copying;
            }
            staged.held = false;
            actions.push(Action::Copy { place: place.clone(), afresh: !staged.written });
        }
    }

    /// Copies begin again that a command has changed as a whole, or are given up.
    fn begin_again(&mut self, actions: &mut Vec<Action>) {
        let all = self.all.iter();
        let changed: Vec<(Place, u32)> = all.filter(|(_, s)| s.tail.is_everything()).map(|(place, s)| (place.clone(), s.starts)).collect();
        for (place, starts) in changed {
            if starts >= STARTS_MAX {
                self.whole(place, "commands changed it as a whole, again and again, while it was copied".to_owned(), actions);
            } else {
                self.drop_place(&place, actions);
                self.looks.push_back((place, starts + 1));
            }
        }
    }

    fn looked(&mut self, place: Place, seen: Seen, actions: &mut Vec<Action>) {
        let Some((_, starts)) = self.looks.pop_front_if(|(of, _)| *of == place) else { return };
        match seen {
            Seen::Gone => actions.push(Action::Forget { place }),
            Seen::Unfit(why) => self.whole(place, why, actions),
            Seen::Fit => {
                let Some(ends) = self.ends.clone() else { return };
                self.numbers += 1;
                let stage = if self.planted.is(Bug::StagedWithoutBarrier) { Stage::Ready } else { Stage::New };
                let number = self.numbers;
                self.all.insert(place, Staged { stage, tail: Tail::default(), held: false, written: false, number, starts, ends });
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
            let held_first = staged.held && !self.planted.is(Bug::PieceWrittenLate);
            staged.held &= !held_first;
            actions.push(Action::ReadAgain { place: place.clone(), elements, held_first, afresh: !staged.written });
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

    fn copied(&mut self, place: Place, wrote: Option<Wrote>, read: Option<Piece>, actions: &mut Vec<Action>) {
        let goes_on = wrote.as_ref().is_none_or(|wrote| *wrote == Wrote::Yes);
        if let Some(wrote) = wrote {
            self.wrote(place.clone(), wrote, actions);
        }
        let Some(staged) = self.all.get_mut(&place).filter(|_| goes_on) else { return };
        match read {
            Some(Piece::OtherType) => self.touch_everything(&place),
            Some(piece) => {
                staged.held = true;
                if piece == Piece::Last {
                    staged.stage = Stage::Read;
                }
            }
            None => {}
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
        let (dropped, unheard) = (self.planted.is(Bug::TouchedNotReadAgain), self.planted.is(Bug::ChangeAsAWholeUnheard));
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

    fn whole(&mut self, place: Place, why: String, actions: &mut Vec<Action>) {
        self.drop_place(&place, actions);
        actions.push(Action::Whole { place, why });
    }

    fn drop_place(&mut self, place: &Place, actions: &mut Vec<Action>) {
        if let Some(staged) = self.all.remove(place) {
            actions.push(Action::Drop { place: place.clone(), number: staged.number });
        }
    }

    fn drop_all(&mut self, actions: &mut Vec<Action>) {
        let all = std::mem::take(&mut self.all);
        actions.extend(all.into_iter().map(|(place, staged)| Action::Drop { place, number: staged.number }));
        self.looks.clear();
        self.barrier = Barrier::Reached;
        self.is_reached = false;
    }

    /// Those in any database.
    fn of_mut<'s>(&'s mut self, key: &Key) -> impl Iterator<Item = &'s mut Staged> + use<'s> {
        self.all.range_mut((key.clone(), 0)..=(key.clone(), u32::MAX)).map(|(_, staged)| staged)
    }
}
