//! The end of a staged key's way, in its leg: what is stored of a batch with staged keys, step by step, and what the
//! nodes' answers mean.
//!
//! First the batch's other keys are stored. Then each staged key's tail is written to its staging key, and all is
//! counted, in one transaction; where the count is right the staging key is renamed, in another. What was staged in
//! vain is read once more, whole, at the source: nobody has written it since the drain. Doing any of it again is
//! harmless: elements are written as they are, and no step stores over a key that is there.

use super::Place;
use crate::migration::planted::{Bug, InjectedBug};
use crate::migration::{Key, Stored};

/// What is asked of the target for a staged key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Write the tail, and count.
    Write,
    /// Give the staging key its time to live and its name, never over an existing key.
    Rename,
}

/// What a step has shown of one key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StagingReply {
    /// Of [`Step::Write`].
    Counted(Counted),
    /// Of [`Step::Rename`].
    Renamed(Renamed),
    /// The node refuses it, and why.
    Refused(String),
    /// The staging key is worth nothing, and why: the key has to be copied in another way.
    Unusable(String),
}

/// What came of a step for one key.
enum Finished {
    GoOn,
    Over(Stored),
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
#[derive(Debug)]
pub(super) enum Next {
    Finish(Step, Vec<Place>),
    ReadWhole(Vec<Place>),
    StoreWhole(Vec<Place>),
    Done(Vec<Stored>),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Keys that are not staged are being stored.
    Others,
    /// Staged keys get what they lack and their names.
    Finishing,
    /// What was staged in vain is being read whole.
    Reading,
    /// And stored.
    StoringWhole,
}

/// A batch with staged keys that is being stored.
#[derive(Clone, Debug)]
pub(super) struct Storing {
    state: State,
    keys: Vec<Key>,
    staged: Vec<Place>,
    outcomes: Vec<Stored>,
    /// Of these what was staged is worth nothing.
    again: Vec<Place>,
}

impl Storing {
    /// These keys are to be stored, and of some the tail was read.
    pub(super) fn of(keys: Vec<Key>, staged: Vec<Place>) -> Self {
        Self { state: State::Others, keys, staged, outcomes: Vec::new(), again: Vec::new() }
    }

    pub(super) fn is_reading_whole(&self) -> bool {
        self.state == State::Reading
    }

    /// Whether these are what it has asked for. Another question may still be answered: what is asked at the source
    /// outlives the loss of the target.
    pub(super) fn reads_whole(&self, places: &[Place]) -> bool {
        self.is_reading_whole() && self.again == places
    }

    /// The keys of the batch, but those that are staged, were stored: an outcome per key; `is_staged`: whether a key
    /// still is. Or what was read whole was stored: an outcome for each of [`Next::StoreWhole`].
    pub(super) fn stored(&mut self, outcomes: Vec<Stored>, is_staged: impl Fn(&Place) -> bool) -> Next {
        if self.state == State::StoringWhole {
            for ((key, _), outcome) in std::mem::take(&mut self.again).into_iter().zip(outcomes) {
                self.note(&key, outcome);
            }
            return self.done();
        }
        self.state = State::Finishing;
        self.outcomes = outcomes;
        let (there, gone): (Vec<_>, Vec<_>) = std::mem::take(&mut self.staged).into_iter().partition(is_staged);
        self.again.extend(gone);
        self.go_on(Step::Write, there)
    }

    /// A step was answered. With those of which the staging keys are worth nothing, and why.
    pub(super) fn finished(
        &mut self,
        all: Vec<(Place, StagingReply)>,
        planted: InjectedBug,
    ) -> (Next, Vec<(Place, String)>) {
        let (mut next, mut unusable) = (Vec::new(), Vec::new());
        for (place, shown) in all {
            match shown.means(planted) {
                Finished::GoOn => next.push(place),
                Finished::Over(outcome) => self.note(&place.0, outcome),
                Finished::Unusable(why) => {
                    self.again.push(place.clone());
                    unusable.push((place, why));
                }
            }
        }
        (self.go_on(Step::Rename, next), unusable)
    }

    /// What was to be read whole is read, or cannot be, and why.
    pub(super) fn read_whole(&mut self, refused: Option<&str>) -> Next {
        let Some(why) = refused else {
            self.state = State::StoringWhole;
            return Next::StoreWhole(self.again.clone());
        };
        for (key, _) in std::mem::take(&mut self.again) {
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
        self.state = State::Reading;
        Next::ReadWhole(self.again.clone())
    }

    fn done(&mut self) -> Next {
        Next::Done(std::mem::take(&mut self.outcomes))
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
}

impl StagingReply {
    fn means(self, planted: InjectedBug) -> Finished {
        let gone = || Finished::Unusable("what was copied of it is gone".to_owned());
        match self {
            Self::Counted(Counted { key_was_there, staging_was_there, there, at_source }) => {
                match (staging_was_there, key_was_there) {
                    // What is not there any more was renamed, or was lost.
                    (false, false) if planted.is(Bug::GoneIsRenamed) => Finished::Over(Stored::Exists),
                    (false, true) => Finished::Over(Stored::Exists),
                    (false, false) => gone(),
                    (true, _) if there != at_source && !planted.is(Bug::NotCounted) => Finished::Unusable(format!(
                        "its copy has {there} elements, and it has {at_source}: it was changed past the router, or emptied"
                    )),
                    (true, _) => Finished::GoOn,
                }
            }
            Self::Renamed(Renamed::Yes | Renamed::TimeIsOver) => Finished::Over(Stored::Stored),
            Self::Renamed(Renamed::KeyIsThere) => Finished::Over(Stored::Exists),
            Self::Renamed(Renamed::Gone) => gone(),
            Self::Refused(why) => Finished::Over(Stored::Refused(why)),
            Self::Unusable(why) => Finished::Unusable(why),
        }
    }
}
