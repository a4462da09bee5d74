//! In which order records are written: what may be written now, given that there is room for it or not.
//!
//! A leg begins only where there is room to end it; where there is none its first record waits, and other moves go on.
//! But the records of one move come on disk in the order in which they were made: after a crash each is read as
//! following on those before it, and that a record is durable says the same of all earlier ones of its move. So what a
//! move records while its leg waits to begin waits behind it; and a leg that is given up meanwhile has never been.
//!
//! Pure, and stepped by the journal and by the simulator. Neither knows more of what is written than this.

use super::Record;
use crate::migration::planted::{Bug, InjectedBug};
use crate::topology::MoveId;

/// How what is given together is to be written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// It begins a move: it is refused where there would not be room to end it.
    Begins,
    /// It begins a leg of a move that was accepted: it waits until there is room to end it, with all that its move
    /// records after it.
    Waits,
    /// It must be written, if it takes until the disk has room again, or works again.
    Goes,
    /// The same, and it is the last of its move.
    Ends,
}

impl Kind {
    /// That of records which are given together.
    #[must_use]
    pub fn of(records: &[Record]) -> Self {
        let any = |is: fn(&Record) -> bool| records.iter().any(is);
        if any(|record| matches!(record, Record::Begun { .. })) {
            Self::Begins
        } else if any(|record| matches!(record, Record::LegBegun { .. })) {
            Self::Waits
        } else if any(|record| matches!(record, Record::Ended { .. })) {
            Self::Ends
        } else {
            Self::Goes
        }
    }
}

/// What was given together, and is written together or not at all.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Given<T> {
    /// The move. Where several begin together: any of them.
    pub of: MoveId,
    /// How.
    pub kind: Kind,
    /// What.
    pub what: T,
}

/// What was found out about room.
#[derive(Debug)]
pub struct Room<T, E> {
    /// Moves that are refused, and why.
    pub refused: Option<(Vec<Given<T>>, E)>,
    /// Why legs wait, where some do.
    pub starved: Option<E>,
}

/// What waits to be written.
#[derive(Debug)]
pub struct Queue<T> {
    planted: InjectedBug,
    /// Legs that wait for room, and what their moves have recorded since.
    waiting: Vec<Given<T>>,
    /// What goes with the next group.
    next: Vec<Given<T>>,
    /// What is being written: until it is, nothing else is.
    writing: Vec<Given<T>>,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self { planted: InjectedBug::default(), waiting: Vec::new(), next: Vec::new(), writing: Vec::new() }
    }
}

impl<T> Queue<T> {
    /// The same with a bug in it, for tests of the simulator.
    #[cfg(feature = "planted-bugs")]
    #[must_use]
    pub fn with(mut self, bug: Option<Bug>) -> Self {
        self.planted = InjectedBug::new(bug);
        self
    }

    /// Takes what is to be written. Gives what is never written now: the beginning of a leg that was given up before
    /// there was room for it, and what its move recorded of it. Another leg of its move, or its end, says that it was.
    pub fn give(&mut self, given: Given<T>) -> Vec<Given<T>> {
        let of = given.of;
        let given_up = matches!(given.kind, Kind::Waits | Kind::Ends) && !self.planted.is(Bug::GivenUpStays);
        let withdrawn =
            if given_up { self.waiting.extract_if(.., |before| before.of == of).collect() } else { Vec::new() };
        let overtakes =
            self.planted.is(Bug::LegOvertaken) || self.planted.is(Bug::GivenUpStays) && given.kind == Kind::Ends;
        let is_behind = self.waiting.iter().any(|before| before.of == of) && !overtakes;
        if given.kind == Kind::Waits || is_behind {
            self.waiting.push(given)
        } else {
            self.next.push(given)
        }
        withdrawn
    }

    /// Decides what is written next, where nothing is being written. `room` reserves space for these, and for ending
    /// what they begin.
    pub fn decide<E>(&mut self, mut room: impl FnMut(&[Given<T>]) -> Result<(), E>) -> Room<T, E> {
        let mut found = Room { refused: None, starved: None };
        if !self.writing.is_empty() {
            return found;
        }
        if !self.waiting.is_empty() {
            match room(&self.waiting) {
                Ok(()) => self.next.append(&mut self.waiting),
                Err(why) => found.starved = Some(why),
            }
        }
        let begins = |given: &Given<T>| given.kind == Kind::Begins;
        if self.next.iter().any(begins)
            && let Err(why) = room(&self.next)
        {
            found.refused = Some((self.next.extract_if(.., |given| begins(given)).collect(), why));
        }
        self.writing = std::mem::take(&mut self.next);
        found
    }

    /// What is to be written, as one group and in this order; again and again until it is there.
    #[must_use]
    pub fn writing(&self) -> &[Given<T>] {
        &self.writing
    }

    /// It is durable.
    pub fn written(&mut self) -> Vec<Given<T>> {
        std::mem::take(&mut self.writing)
    }

    /// Whether legs wait for room.
    #[must_use]
    pub const fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// All that is not durable; that of one move in its order.
    pub fn all(&self) -> impl Iterator<Item = &Given<T>> {
        self.writing.iter().chain(&self.next).chain(&self.waiting)
    }

    /// All that is not durable, which never will be.
    pub fn into_rest(self) -> impl Iterator<Item = Given<T>> {
        self.writing.into_iter().chain(self.next).chain(self.waiting)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(of: u64, kind: Kind, what: u32) -> Given<u32> {
        Given { of: MoveId(of), kind, what }
    }

    fn whats(given: &[Given<u32>]) -> Vec<u32> {
        given.iter().map(|given| given.what).collect()
    }

    /// Decides, and takes what was written.
    fn round(queue: &mut Queue<u32>, has_room: bool) -> Vec<u32> {
        let _ = queue.decide(|_| if has_room { Ok(()) } else { Err(()) });
        whats(&queue.written())
    }

    #[test]
    fn what_a_move_records_waits_behind_its_leg_and_nothing_else_does() {
        let mut queue = Queue::default();
        for (of, kind, what) in [(1, Kind::Waits, 1), (2, Kind::Goes, 2), (1, Kind::Goes, 3), (2, Kind::Goes, 4)] {
            assert!(queue.give(given(of, kind, what)).is_empty());
        }
        assert_eq!(round(&mut queue, false), [2, 4]);
        assert!(queue.give(given(1, Kind::Goes, 5)).is_empty());
        assert_eq!(round(&mut queue, false), []);
        assert_eq!(round(&mut queue, true), [1, 3, 5]);
        assert!(queue.give(given(1, Kind::Goes, 6)).is_empty());
        assert_eq!(round(&mut queue, false), [6], "a leg that is let in holds up nothing");
    }

    #[test]
    fn a_leg_that_is_given_up_before_there_is_room_is_never_written() {
        let mut queue = Queue::default();
        queue.give(given(1, Kind::Waits, 1));
        queue.give(given(1, Kind::Goes, 2));
        queue.give(given(2, Kind::Waits, 3));
        assert_eq!(round(&mut queue, false), []);
        assert_eq!(whats(&queue.give(given(1, Kind::Waits, 4))), [1, 2], "the next attempt takes its place");
        assert_eq!(whats(&queue.give(given(1, Kind::Ends, 5))), [4]);
        assert_eq!(round(&mut queue, false), [5], "an end waits for nobody");
        assert_eq!(round(&mut queue, true), [3]);
        assert_eq!(queue.all().count(), 0);
    }

    #[test]
    fn what_is_being_written_stays_first_until_it_is_there() {
        let mut queue = Queue::default();
        queue.give(given(1, Kind::Waits, 1));
        let found = queue.decide(|_| Ok::<(), ()>(()));
        assert!(found.refused.is_none() && found.starved.is_none());
        queue.give(given(1, Kind::Goes, 2));
        queue.give(given(1, Kind::Ends, 3));
        let _ = queue.decide(|_| Ok::<(), ()>(()));
        assert_eq!(whats(queue.writing()), [1], "it is no longer waiting, so it is not withdrawn");
        assert_eq!(whats(&queue.written()), [1]);
        assert_eq!(round(&mut queue, false), [2, 3]);
    }

    #[test]
    fn moves_are_refused_where_there_is_no_room_and_the_rest_goes() {
        let mut queue = Queue::default();
        queue.give(given(1, Kind::Begins, 1));
        queue.give(given(2, Kind::Goes, 2));
        let found = queue.decide(|_| Err("full"));
        let (refused, why) = found.refused.expect("refused");
        assert_eq!((whats(&refused), why, found.starved), (vec![1], "full", None));
        assert_eq!(whats(&queue.written()), [2]);
    }
}
