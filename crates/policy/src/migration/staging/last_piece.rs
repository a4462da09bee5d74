//! The end of a staged key's way, in its leg: what is stored of a batch with staged keys, step by step, and what the nodes' answers mean.
//!
//! First the batch's other keys are stored. Then each staged key's tail is written to its staging key, and all is counted, in one transaction; where the count
//! is right the staging key is renamed, in another. What was staged in vain is read once more, whole, at the source: nobody has written it since the
//! drain. Doing any of it again is harmless: elements are written as they are, and no step stores over a key that is there.

use super::Place;
use crate::migration::planted::{Bug, Planted};
use crate::migration::{Key, Stored};

/// What is asked of the target for a staged key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Write the tail, and count.
    Write,
    /// Give the staging key its time to live and its name, never over an existing key.
    Rename,
}

/// What came of a step for one key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Finished {
    /// The next step.
    GoOn,
    /// It is over.
    Over(Stored),
    /// The staging key is worth nothing (why): the key has to be copied in another way.
    Unusable(String),
}

/// What [`Step::Write`] has shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Counted {
    /// The key itself was there before.
    pub key_was_there: bool,
    /// The staging key was there before.
    pub staging_was_there: bool,
    /// Elements of the staging key after.
    pub there: i64,
    /// Elements at the source, when the tail was read.
    pub at_source: i64,
}

/// What [`Step::Rename`] has shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Renamed {
    /// It has its name.
    Yes,
    /// The key is there already.
    KeyIsThere,
    /// It got its time to live, and that was over.
    TimeIsOver,
    /// It was gone.
    Gone,
}

/// What is to be done with a batch next.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Next {
    /// This step with these; [`Storing::finished`] follows.
    Finish(Step, Vec<Place>),
    /// Read these keys whole at the source and store them, never over an existing key; then [`Storing::stored`] follows, or [`Storing::refused`].
    ReadAgain(Vec<Key>),
    /// The batch is stored: an outcome per key.
    Done(Vec<Stored>),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Keys that are not staged are being stored.
    Others,
    /// Staged keys get what they lack and their names.
    Finishing,
    /// What was staged in vain is being read and stored.
    Again,
}

/// A batch with staged keys that is being stored.
#[derive(Clone, Debug)]
pub struct Storing {
    planted: Planted,
    state: State,
    keys: Vec<Key>,
    outcomes: Vec<Stored>,
    /// Of these what was staged is worth nothing.
    again: Vec<Key>,
}

impl Storing {
    /// These keys are to be stored.
    #[must_use]
    pub fn of(keys: Vec<Key>) -> Self {
        Self { planted: Planted::default(), state: State::Others, keys, outcomes: Vec::new(), again: Vec::new() }
    }

    /// The same with a bug in it, for tests of the simulator.
    #[cfg(feature = "planted-bugs")]
    #[must_use]
    pub fn with(mut self, bug: Option<Bug>) -> Self {
        self.planted = Planted(bug);
        self
    }

    /// Whether it waits for keys that are read again.
    #[must_use]
    pub fn is_reading_again(&self) -> bool {
        self.state == State::Again
    }

    /// The keys of the batch, but those that are staged, were stored: an outcome per key. With those that are staged, and whether they still are. Or what was
    /// read again was stored: an outcome per key of [`Next::ReadAgain`].
    pub fn stored(&mut self, outcomes: Vec<Stored>, staged: Vec<(Place, bool)>) -> Next {
        if self.state == State::Again {
            for (key, outcome) in std::mem::take(&mut self.again).into_iter().zip(outcomes) {
                self.note(&key, outcome);
            }
            return self.done();
        }
        self.state = State::Finishing;
        self.outcomes = outcomes;
        let (there, gone): (Vec<_>, Vec<_>) = staged.into_iter().partition(|(_, is_staged)| *is_staged);
        gone.into_iter().for_each(|((key, _), _)| self.read_again(key));
        self.go_on(Step::Write, there.into_iter().map(|(place, _)| place).collect())
    }

    /// A step was answered.
    pub fn finished(&mut self, all: Vec<(Place, Finished)>) -> Next {
        let mut next = Vec::new();
        for (place, finished) in all {
            match finished {
                Finished::GoOn => next.push(place),
                Finished::Over(outcome) => self.note(&place.0, outcome),
                Finished::Unusable(_) => self.read_again(place.0),
            }
        }
        self.go_on(Step::Rename, next)
    }

    /// What was to be read again cannot be, and why.
    pub fn refused(&mut self, why: &str) -> Next {
        for key in std::mem::take(&mut self.again) {
            self.note(&key, Stored::Refused(why.to_owned()));
        }
        self.done()
    }

    fn go_on(&mut self, step: Step, places: Vec<Place>) -> Next {
        if !places.is_empty() {
            return Next::Finish(step, places);
        }
        if self.again.is_empty() {
            return self.done();
        }
        self.state = State::Again;
        Next::ReadAgain(self.again.clone())
    }

    fn done(&mut self) -> Next {
        Next::Done(std::mem::take(&mut self.outcomes))
    }

    fn read_again(&mut self, key: Key) {
        if !self.again.contains(&key) {
            self.again.push(key);
        }
    }

    /// What came of one of a key's databases: a refusal counts most, then a key that was there.
    fn note(&mut self, key: &Key, outcome: Stored) {
        let Some(at) = self.keys.iter().position(|of| of == key) else { return };
        let Some(so_far) = self.outcomes.get_mut(at) else { return };
        match (&so_far, &outcome) {
            (Stored::Refused(_), _) | (Stored::Exists, Stored::Stored) => {}
            _ => *so_far = outcome,
        }
    }

    /// What [`Step::Write`] means.
    #[must_use]
    pub fn counted(&self, seen: Counted) -> Finished {
        let Counted { key_was_there, staging_was_there, there, at_source } = seen;
        // What is not there any more was renamed, or was lost.
        match (staging_was_there, key_was_there) {
            (false, false) if self.planted.is(Bug::GoneIsRenamed) => Finished::Over(Stored::Exists),
            (false, true) => Finished::Over(Stored::Exists),
            (false, false) => Finished::Unusable("what was copied of it is gone".to_owned()),
            (true, _) if there != at_source && !self.planted.is(Bug::NotCounted) => Finished::Unusable(format!(
                "its copy has {there} elements, and it has {at_source}: it was changed past the router, or emptied"
            )),
            (true, _) => Finished::GoOn,
        }
    }
}

/// What [`Step::Rename`] means.
#[must_use]
pub fn renamed(seen: Renamed) -> Finished {
    match seen {
        Renamed::Yes | Renamed::TimeIsOver => Finished::Over(Stored::Stored),
        Renamed::KeyIsThere => Finished::Over(Stored::Exists),
        Renamed::Gone => Finished::Unusable("what was copied of it is gone".to_owned()),
    }
}
