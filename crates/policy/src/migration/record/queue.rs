//! Order of records: selects the records to write now, depending on the free space of the journal.
//!
//! A leg starts only if there is space for its end; otherwise its first record waits, and other moves continue. But the
//! records of one move become durable in their order: each is replayed on top of the previous ones, and a durable
//! record implies that all earlier ones of its move are durable. So the later records of a move wait behind its waiting
//! leg. A leg that is given up while it waits is never recorded.
//!
//! Pure, and used by the journal and by the simulator; neither duplicates this state.

use super::Record;
use crate::migration::injected::{Bug, InjectedBug};
use crate::topology::MoveId;

/// Scheduling class of records that are written together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Starts a move: refused without space for its end.
    StartsMove,
    /// Starts a leg of an accepted move: waits for space for its end, and the later records of its move wait behind it.
    StartsLeg,
    /// Must be written, even if that waits for disk space or a repair of the disk.
    Required,
    /// [`Kind::Required`], and the last record of its move.
    EndsMove,
}

impl Kind {
    /// Returns the class of records that are written together.
    #[must_use]
    pub fn of(records: &[Record]) -> Self {
        let any = |is: fn(&Record) -> bool| records.iter().any(is);
        if any(|record| matches!(record, Record::Begun { .. })) {
            Self::StartsMove
        } else if any(|record| matches!(record, Record::LegBegun { .. })) {
            Self::StartsLeg
        } else if any(|record| matches!(record, Record::Ended { .. })) {
            Self::EndsMove
        } else {
            Self::Required
        }
    }
}

/// Records that are written together or not at all.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RecordGroup<T> {
    /// Move of the records. If several start together: any of them.
    pub of: MoveId,
    /// Scheduling class.
    pub kind: Kind,
    /// Records or their handle.
    pub records: T,
}

/// Result of a check for space.
#[derive(Debug)]
pub struct SpaceCheck<T, E> {
    /// Refused moves, and the reason.
    pub refused: Option<(Vec<RecordGroup<T>>, E)>,
    /// Reason why legs wait, if any do.
    pub starved: Option<E>,
}

/// Records that are not yet durable.
#[derive(Debug)]
pub struct Queue<T> {
    planted: InjectedBug,
    /// Legs that wait for space, and later records of their moves.
    waiting: Vec<RecordGroup<T>>,
    /// Records of the next group.
    next: Vec<RecordGroup<T>>,
    /// The group being written. No other is written at the same time.
    writing: Vec<RecordGroup<T>>,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self { planted: InjectedBug::default(), waiting: Vec::new(), next: Vec::new(), writing: Vec::new() }
    }
}

impl<T> Queue<T> {
    /// Injects a bug, for tests of the simulator.
    #[cfg(feature = "planted-bugs")]
    #[must_use]
    pub fn with(mut self, bug: Option<Bug>) -> Self {
        self.planted = InjectedBug::new(bug);
        self
    }

    /// Adds records. Returns records that will never be written: a leg given up while it waited for space, with later
    /// records of its move. Another leg of the move, or its end, implies that.
    pub fn push(&mut self, given: RecordGroup<T>) -> Vec<RecordGroup<T>> {
        let of = given.of;
        let given_up = matches!(given.kind, Kind::StartsLeg | Kind::EndsMove) && !self.planted.is(Bug::GivenUpStays);
        let withdrawn =
            if given_up { self.waiting.extract_if(.., |before| before.of == of).collect() } else { Vec::new() };
        let overtakes =
            self.planted.is(Bug::LegOvertaken) || self.planted.is(Bug::GivenUpStays) && given.kind == Kind::EndsMove;
        let is_behind = self.waiting.iter().any(|before| before.of == of) && !overtakes;
        if given.kind == Kind::StartsLeg || is_behind {
            self.waiting.push(given)
        } else {
            self.next.push(given)
        }
        withdrawn
    }

    /// Selects the next group, unless one is being written. `room` reserves space for these records, and for the ends
    /// of moves and legs that they start.
    pub fn select_next<E>(&mut self, mut room: impl FnMut(&[RecordGroup<T>]) -> Result<(), E>) -> SpaceCheck<T, E> {
        let mut found = SpaceCheck { refused: None, starved: None };
        if !self.writing.is_empty() {
            return found;
        }
        if !self.waiting.is_empty() {
            match room(&self.waiting) {
                Ok(()) => self.next.append(&mut self.waiting),
                Err(why) => found.starved = Some(why),
            }
        }
        let begins = |given: &RecordGroup<T>| given.kind == Kind::StartsMove;
        if self.next.iter().any(begins)
            && let Err(why) = room(&self.next)
        {
            found.refused = Some((self.next.extract_if(.., |given| begins(given)).collect(), why));
        }
        self.writing = std::mem::take(&mut self.next);
        found
    }

    /// The group to write, in this order, with retries until it is durable.
    #[must_use]
    pub fn writing(&self) -> &[RecordGroup<T>] {
        &self.writing
    }

    /// Removes and returns the written group.
    pub fn written(&mut self) -> Vec<RecordGroup<T>> {
        std::mem::take(&mut self.writing)
    }

    /// Whether legs wait for space.
    #[must_use]
    pub const fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Returns the records that are not durable; those of one move in order.
    pub fn all(&self) -> impl Iterator<Item = &RecordGroup<T>> {
        self.writing.iter().chain(&self.next).chain(&self.waiting)
    }

    /// Consumes the queue; its records will never be durable.
    pub fn into_rest(self) -> impl Iterator<Item = RecordGroup<T>> {
        self.writing.into_iter().chain(self.next).chain(self.waiting)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(of: u64, kind: Kind, what: u32) -> RecordGroup<u32> {
        RecordGroup { of: MoveId(of), kind, records: what }
    }

    fn whats(given: &[RecordGroup<u32>]) -> Vec<u32> {
        given.iter().map(|given| given.records).collect()
    }

    /// Selects a group, and returns its records as written.
    fn round(queue: &mut Queue<u32>, has_room: bool) -> Vec<u32> {
        let _ = queue.select_next(|_| if has_room { Ok(()) } else { Err(()) });
        whats(&queue.written())
    }

    #[test]
    fn only_records_of_the_same_move_wait_behind_its_leg() {
        let mut queue = Queue::default();
        for (of, kind, what) in
            [(1, Kind::StartsLeg, 1), (2, Kind::Required, 2), (1, Kind::Required, 3), (2, Kind::Required, 4)]
        {
            assert!(queue.push(given(of, kind, what)).is_empty());
        }
        assert_eq!(round(&mut queue, false), [2, 4]);
        assert!(queue.push(given(1, Kind::Required, 5)).is_empty());
        assert_eq!(round(&mut queue, false), []);
        assert_eq!(round(&mut queue, true), [1, 3, 5]);
        assert!(queue.push(given(1, Kind::Required, 6)).is_empty());
        assert_eq!(round(&mut queue, false), [6], "a leg with space delays nothing");
    }

    #[test]
    fn a_leg_given_up_while_waiting_for_space_is_not_written() {
        let mut queue = Queue::default();
        queue.push(given(1, Kind::StartsLeg, 1));
        queue.push(given(1, Kind::Required, 2));
        queue.push(given(2, Kind::StartsLeg, 3));
        assert_eq!(round(&mut queue, false), []);
        assert_eq!(whats(&queue.push(given(1, Kind::StartsLeg, 4))), [1, 2], "the next attempt takes its place");
        assert_eq!(whats(&queue.push(given(1, Kind::EndsMove, 5))), [4]);
        assert_eq!(round(&mut queue, false), [5], "the end of a move does not wait");
        assert_eq!(round(&mut queue, true), [3]);
        assert_eq!(queue.all().count(), 0);
    }

    #[test]
    fn a_group_being_written_stays_first_until_durable() {
        let mut queue = Queue::default();
        queue.push(given(1, Kind::StartsLeg, 1));
        let found = queue.select_next(|_| Ok::<(), ()>(()));
        assert!(found.refused.is_none() && found.starved.is_none());
        queue.push(given(1, Kind::Required, 2));
        queue.push(given(1, Kind::EndsMove, 3));
        let _ = queue.select_next(|_| Ok::<(), ()>(()));
        assert_eq!(whats(queue.writing()), [1], "it is no longer waiting, so it is not withdrawn");
        assert_eq!(whats(&queue.written()), [1]);
        assert_eq!(round(&mut queue, false), [2, 3]);
    }

    #[test]
    fn moves_without_space_are_refused_and_others_written() {
        let mut queue = Queue::default();
        queue.push(given(1, Kind::StartsMove, 1));
        queue.push(given(2, Kind::Required, 2));
        let found = queue.select_next(|_| Err("full"));
        let (refused, why) = found.refused.expect("refused");
        assert_eq!((whats(&refused), why, found.starved), (vec![1], "full", None));
        assert_eq!(whats(&queue.written()), [2]);
    }
}
