//! Last steps of staged keys, in their leg: storing a batch with staged keys, and the interpretation of the nodes'
//! replies.
//!
//! First the other keys of the batch are stored. Then the dirty elements of each staged key are written to its staging
//! key, and all elements are counted, in one transaction; if the count is right, the staging key is renamed, in
//! another. A key with an invalid copy is read again, whole, at the source: it was not written since the drain.
//! Repeating any step is harmless: elements are written with their present values, and no step stores over an existing
//! key.

use super::Place;
use crate::migration::injected::{Bug, InjectedBug};
use crate::migration::{Key, Stored};

/// Step at the target for a staged key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Write the dirty elements, and count.
    Write,
    /// Set the time to live of the staging key and rename it, never over an existing key.
    Rename,
}

/// Reply to a step for one key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StagingReply {
    /// Reply to [`Step::Write`].
    Counted(Counted),
    /// Reply to [`Step::Rename`].
    Renamed(Renamed),
    /// The node refused the step, with the reason.
    Refused(String),
    /// The staging key is invalid, with the reason: the key must be copied in another way.
    Unusable(String),
}

/// Interpreted result of a step for one key.
enum Finished {
    Continue,
    Over(Stored),
    Unusable(String),
}

/// Reply to [`Step::Write`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Counted {
    /// The key itself existed before.
    pub key_existed: bool,
    /// The staging key existed before.
    pub staging_existed: bool,
    /// Number of elements of the staging key afterwards.
    pub there: i64,
    /// Number of elements at the source, when the dirty elements were read.
    pub at_source: i64,
}

/// Reply to [`Step::Rename`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Renamed {
    /// The staging key was renamed.
    Yes,
    /// The key exists already.
    KeyExists,
    /// The staging key got its time to live and had expired.
    Expired,
    /// The staging key was missing.
    Gone,
}

/// Next action for a batch.
#[derive(Debug)]
pub(super) enum Next {
    Finish(Step, Vec<Place>),
    ReadWhole(Vec<Place>),
    StoreWhole(Vec<Place>),
    Done(Vec<Stored>),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Stores unstaged keys.
    Others,
    /// Completes and renames staged keys.
    Finishing,
    /// Reads keys with invalid copies whole.
    Reading,
    /// Stores keys that were read whole.
    StoringWhole,
}

/// A batch with staged keys that is being stored.
#[derive(Clone, Debug)]
pub(super) struct Storing {
    state: State,
    keys: Vec<Key>,
    staged: Vec<Place>,
    outcomes: Vec<Stored>,
    /// Keys with invalid copies.
    again: Vec<Place>,
}

impl Storing {
    /// Creates the state of a batch: all keys, and the staged ones, whose dirty elements were read.
    pub(super) fn of(keys: Vec<Key>, staged: Vec<Place>) -> Self {
        Self { state: State::Others, keys, staged, outcomes: Vec::new(), again: Vec::new() }
    }

    pub(super) fn is_reading_whole(&self) -> bool {
        self.state == State::Reading
    }

    /// Whether the reply belongs to the present request. Another reply is possible: a request to the source outlives
    /// the loss of the target.
    pub(super) fn reads_whole(&self, places: &[Place]) -> bool {
        self.is_reading_whole() && self.again == places
    }

    /// Handles results of stored keys, one per key: of the unstaged keys (`is_staged`: whether a key still is), or of
    /// [`Next::StoreWhole`].
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
        self.next_step(Step::Write, there)
    }

    /// Handles the replies to a step. Also returns keys with invalid staging keys, with reasons.
    pub(super) fn finished(
        &mut self,
        all: Vec<(Place, StagingReply)>,
        planted: InjectedBug,
    ) -> (Next, Vec<(Place, String)>) {
        let (mut next, mut unusable) = (Vec::new(), Vec::new());
        for (place, shown) in all {
            match shown.interpret(planted) {
                Finished::Continue => next.push(place),
                Finished::Over(outcome) => self.note(&place.0, outcome),
                Finished::Unusable(why) => {
                    self.again.push(place.clone());
                    unusable.push((place, why));
                }
            }
        }
        (self.next_step(Step::Rename, next), unusable)
    }

    /// Handles the result of a whole read, or its failure.
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

    fn next_step(&mut self, step: Step, places: Vec<Place>) -> Next {
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

    /// Merges the results of a key's databases: a refusal takes precedence, then an existing key.
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
    fn interpret(self, planted: InjectedBug) -> Finished {
        let gone = || Finished::Unusable("its staging key is gone".to_owned());
        match self {
            Self::Counted(Counted {
                key_existed: key_was_there,
                staging_existed: staging_was_there,
                there,
                at_source,
            }) => {
                match (staging_was_there, key_was_there) {
                    // A missing staging key was renamed, or is lost.
                    (false, false) if planted.is(Bug::GoneIsRenamed) => Finished::Over(Stored::Exists),
                    (false, true) => Finished::Over(Stored::Exists),
                    (false, false) => gone(),
                    (true, _) if there != at_source && !planted.is(Bug::NotCounted) => Finished::Unusable(format!(
                        "its copy has {there} elements, and it has {at_source}: a client bypassed the router, or emptied it"
                    )),
                    (true, _) => Finished::Continue,
                }
            }
            Self::Renamed(Renamed::Yes | Renamed::Expired) => Finished::Over(Stored::Stored),
            Self::Renamed(Renamed::KeyExists) => Finished::Over(Stored::Exists),
            Self::Renamed(Renamed::Gone) => gone(),
            Self::Refused(why) => Finished::Over(Stored::Refused(why)),
            Self::Unusable(why) => Finished::Unusable(why),
        }
    }
}
