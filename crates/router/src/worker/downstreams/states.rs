//! State of features for one client, by type: each feature finds its own, and none of another.
//!
//! In the client, because most of it is needed with each of its commands. Tables in the features would cost a lookup
//! each.

use super::client::{Repeat, Upload};
use crate::worker::colocate::state::ColocateWait;
use crate::worker::login::state::Verdict;
use crate::worker::pubsub::Subscriber;
use crate::worker::quiesce::state::QuiesceWait;
use crate::worker::reissued::state::Waiting;
use crate::worker::scripts::checking::LibraryCheck;
use crate::worker::scripts::rehearsed::RehearsedCall;
use crate::worker::tracking::Tracked;
use crate::worker::transactions::rehearsal::FoundKeys;
use crate::worker::transactions::session::Session;
use crate::worker::transit::state::Moving;

#[derive(Debug, Default)]
pub(in crate::worker) struct States {
    verdict: Option<Box<Verdict>>,
    /// Transactions and WAIT. Created on first use.
    session: Option<Box<Session>>,
    subscriber: Option<Box<Subscriber>>,
    tracked: Option<Box<Tracked>>,
    upload: Option<Box<Upload>>,
    /// A read with a large reply, to repeat on a connection for large values.
    repeat: Option<Box<Repeat>>,
    /// Wait of its command for keys that are being moved.
    moving: Option<Box<Moving>>,
    /// Wait of its command for keys to return to their slot owner.
    colocation: Option<Box<ColocateWait>>,
    /// A command that is blocked at a node, and may have to be reissued at a different one.
    waiting: Option<Box<Waiting>>,
    /// Wait of its command for quiesced movers.
    quiet: Option<Box<QuiesceWait>>,
    libraries: Option<Box<LibraryCheck>>,
    /// A call of a script that may have to be repeated with more keys.
    rehearsed: Option<Box<RehearsedCall>>,
    /// Keys that the scripts of its transaction will touch.
    found: Option<Box<FoundKeys>>,
    is_monitor: bool,
    /// Whether a state restricts commands. Checked once per command.
    is_gated: bool,
}

/// State of a feature for one client.
pub(in crate::worker) trait State: Sized {
    fn of(states: &States) -> &Option<Box<Self>>;
    fn of_mut(states: &mut States) -> &mut Option<Box<Self>>;
}

macro_rules! states {
    ($($field:ident: $state:ty),* $(,)?) => {$(
        impl State for $state {
            #[inline]
            fn of(states: &States) -> &Option<Box<Self>> {
                &states.$field
            }

            #[inline]
            fn of_mut(states: &mut States) -> &mut Option<Box<Self>> {
                &mut states.$field
            }
        }
    )*};
}

states! {
    verdict: Verdict,
    session: Session,
    subscriber: Subscriber,
    tracked: Tracked,
    upload: Upload,
    repeat: Repeat,
    moving: Moving,
    colocation: ColocateWait,
    waiting: Waiting,
    quiet: QuiesceWait,
    libraries: LibraryCheck,
    rehearsed: RehearsedCall,
    found: FoundKeys,
}

impl States {
    #[inline]
    pub(super) fn get<T: State>(&self) -> Option<&T> {
        T::of(self).as_deref()
    }

    #[inline]
    pub(super) fn get_mut<T: State>(&mut self) -> Option<&mut T> {
        T::of_mut(self).as_deref_mut()
    }

    pub(super) fn get_or_default<T: State + Default>(&mut self) -> &mut T {
        if T::of(self).is_none() {
            self.set(Some(Box::<T>::default()));
        }
        T::of_mut(self).get_or_insert_default()
    }

    /// Replaces a state and returns the previous one.
    pub(super) fn set<T: State>(&mut self, state: Option<Box<T>>) -> Option<Box<T>> {
        let previous = std::mem::replace(T::of_mut(self), state);
        self.update_gate();
        previous
    }

    pub(super) fn is_monitor(&self) -> bool {
        self.is_monitor
    }

    /// Starts or ends MONITOR. Returns whether it was on.
    pub(super) fn set_monitor(&mut self, is_on: bool) -> bool {
        let was_on = std::mem::replace(&mut self.is_monitor, is_on);
        self.update_gate();
        was_on
    }

    #[inline]
    pub(super) fn is_gated(&self) -> bool {
        self.is_gated
    }

    fn update_gate(&mut self) {
        self.is_gated = self.is_monitor || self.subscriber.is_some() || self.tracked.is_some();
    }

    /// Memory in bytes.
    pub(super) fn memory(&self) -> usize {
        self.repeat.as_ref().map_or(0, |repeat| repeat.request.capacity())
            + self.waiting.as_ref().map_or(0, |waiting| waiting.memory())
            + self.libraries.as_ref().map_or(0, |check| check.memory())
            + self.rehearsed.as_ref().map_or(0, |call| call.memory())
            + self.session.as_ref().map_or(0, |session| session.multi.memory())
            + self.subscriber.as_ref().map_or(0, |subscriber| subscriber.memory())
            + self.tracked.as_ref().map_or(0, |tracked| tracked.memory())
    }
}
