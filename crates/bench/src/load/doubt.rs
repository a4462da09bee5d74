//! Possible states of a key after a command without a reply.
//!
//! While every command has a reply, a key has one known state, and each reply is predictable. A failed command may or
//! may not have been executed, so the key has several possible states, and later replies eliminate some. Replies arrive
//! in the order of the commands, so a set of states updated at each reply is sufficient.

/// Possible execution time of a command without a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doubt {
    /// Any time, even after later commands: a hanging server may still process bytes that it has received.
    Lasting,
    /// Before the end of the server, or never. `NODEDOWN` means not sent, and `NODELOST` possibly executed. `LOADING`
    /// comes from a new server process, which has executed nothing yet.
    Brief,
}

/// Whether a command without a reply was executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Executed {
    No,
    Maybe,
    /// Now or at any later time.
    MaybeLater,
}

/// Interprets an error reply.
pub(super) fn may_be(doubt: Doubt, text: &[u8]) -> Executed {
    let doubtful = b"may have been executed";
    let says_so = text.windows(doubtful.len()).any(|part| part == doubtful);
    match doubt {
        Doubt::Brief if text.starts_with(b"LOADING ") || text.starts_with(b"NODEDOWN ") && !says_so => Executed::No,
        Doubt::Brief if text.starts_with(b"NODEDOWN ") || text.starts_with(b"NODELOST ") => Executed::Maybe,
        Doubt::Brief | Doubt::Lasting => Executed::MaybeLater,
    }
}

/// Change by a command to the state of its key: a version, a number, or fields as bits; 0: no such key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Effect {
    /// Read only.
    None,
    /// Returns 1 if the key exists, without a visible change.
    Touch,
    /// Writes this version.
    Set(u32),
    /// Removes the key, and returns 1 if it existed.
    Clear,
    /// Adds one, and returns the sum.
    Count,
    /// Adds a field, and returns 1 if it is new.
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

    /// Reply in this state, if an integer.
    fn answer(self, state: u32) -> Option<i64> {
        match self {
            Self::None | Self::Set(_) => None,
            Self::Touch | Self::Clear => Some(i64::from(state != 0)),
            Self::Count => Some(i64::from(state) + 1),
            Self::Add(bit) => Some(i64::from(state & bit == 0)),
        }
    }
}

/// Possible states of a key.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum States {
    OneOf(Vec<u32>),
    /// Any state that the key ever had or may get.
    Any,
}

impl States {
    pub(super) fn one(state: u32) -> Self {
        Self::OneOf(vec![state])
    }

    /// Records a command without a reply.
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

    /// Records a reply, with its integer if it has one. Returns false if no possible state leads to that reply.
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

    /// Records a state that was read. Returns false if the key cannot have it.
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

    /// Newest possible version, for states that are versions.
    pub(super) fn newest(&self) -> Option<u32> {
        match self {
            Self::OneOf(states) => states.iter().max().copied(),
            Self::Any => None,
        }
    }
}
