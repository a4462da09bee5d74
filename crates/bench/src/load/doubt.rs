//! The states that a key may have once a command on it had no answer.
//!
//! While every command is answered a key has one state, and each reply is known. A command that fails may have been
//! executed or not: then the key has one of several states, and a later answer tells which. Answers come in the order
//! of the commands, so a set of states that is changed at each answer is enough.

/// The fate of a command without an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doubt {
    /// It may be executed at any time, also after commands that were sent later: bytes that a hanging server has
    /// received wait there.
    Lasting,
    /// The server ends: it has executed the command, or never will. `NODEDOWN` says that it was not sent, and
    /// `NODELOST` that it may have been executed. `LOADING` comes from a server that has just been started, and
    /// executes nothing yet.
    Brief,
}

/// Whether a command was executed that had no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Executed {
    No,
    Maybe,
    /// Now or at any later time.
    MaybeLater,
}

/// The answer of an error to that.
pub(super) fn may_be(doubt: Doubt, text: &[u8]) -> Executed {
    let doubtful = b"may have been executed";
    let says_so = text.windows(doubtful.len()).any(|part| part == doubtful);
    match doubt {
        Doubt::Brief if text.starts_with(b"LOADING ") || text.starts_with(b"NODEDOWN ") && !says_so => Executed::No,
        Doubt::Brief if text.starts_with(b"NODEDOWN ") || text.starts_with(b"NODELOST ") => Executed::Maybe,
        Doubt::Brief | Doubt::Lasting => Executed::MaybeLater,
    }
}

/// The change that a command makes to the state of its key: a version, a number, or fields as bits; 0: there is no such
/// key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Effect {
    /// It only reads.
    None,
    /// It answers 1 where the key exists, and changes nothing that is seen.
    Touch,
    /// It writes this version.
    Set(u32),
    /// It removes the key, and answers 1 where it existed.
    Clear,
    /// It adds one, and answers the sum.
    Count,
    /// It adds a field, and answers 1 where that is new.
    Add(u32),
}

impl Effect {
    fn on(self, state: u32) -> u32 {
        match self {
            Self::None | Self::Touch => state,
            Self::Set(version) => version,
            Self::Clear => 0,
            Self::Count => state.wrapping_add(1),
            Self::Add(bit) => state | bit,
        }
    }

    /// Its answer, where that is an integer.
    fn answer(self, state: u32) -> Option<i64> {
        match self {
            Self::None | Self::Set(_) => None,
            Self::Touch | Self::Clear => Some(i64::from(state != 0)),
            Self::Count => Some(i64::from(state) + 1),
            Self::Add(bit) => Some(i64::from(state & bit == 0)),
        }
    }
}

/// The states that a key may have.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum States {
    OneOf(Vec<u32>),
    /// Any one that it ever had or may get.
    Any,
}

impl States {
    pub(super) fn one(state: u32) -> Self {
        Self::OneOf(vec![state])
    }

    /// A command had no answer.
    pub(super) fn unanswered(&mut self, effect: Effect, executed: Executed) {
        let Self::OneOf(states) = self else { return };
        match executed {
            _ if matches!(effect, Effect::None | Effect::Touch) => {}
            Executed::No => {}
            Executed::Maybe => {
                let after: Vec<u32> = states.iter().map(|state| effect.on(*state)).collect();
                states.extend(after);
                states.sort_unstable();
                states.dedup();
            }
            Executed::MaybeLater => *self = Self::Any,
        }
    }

    /// A command was answered, with an integer or not. False: no possible state gives that answer.
    pub(super) fn answered(&mut self, effect: Effect, answer: Option<i64>) -> bool {
        let Self::OneOf(states) = self else { return true };
        let mut left: Vec<u32> =
            states.iter().filter(|state| effect.answer(**state) == answer).map(|state| effect.on(*state)).collect();
        left.sort_unstable();
        left.dedup();
        if left.is_empty() {
            return false;
        }
        *states = left;
        true
    }

    /// This state was read. False: the key cannot have it.
    pub(super) fn read(&mut self, state: u32) -> bool {
        match self {
            Self::OneOf(states) if !states.contains(&state) => false,
            Self::OneOf(states) => {
                *states = vec![state];
                true
            }
            Self::Any => true,
        }
    }

    /// The newest of them, where they are versions.
    pub(super) fn newest(&self) -> Option<u32> {
        match self {
            Self::OneOf(states) => states.iter().max().copied(),
            Self::Any => None,
        }
    }
}
