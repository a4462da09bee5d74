//! Bugs injected by tests.
//!
//! Each is a condition in the code itself, constant false unless the feature `planted-bugs` is enabled. A buggy copy of
//! the code would diverge from the original.

use std::marker::PhantomData;

/// Injected bug of a state machine, from the kinds `B`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct InjectedBug<B> {
    #[cfg(feature = "planted-bugs")]
    bug: Option<B>,
    kinds: PhantomData<B>,
}

impl<B> Default for InjectedBug<B> {
    fn default() -> Self {
        Self {
            #[cfg(feature = "planted-bugs")]
            bug: None,
            kinds: PhantomData,
        }
    }
}

#[cfg(feature = "planted-bugs")]
impl<B: PartialEq> InjectedBug<B> {
    pub(crate) fn new(bug: Option<B>) -> Self {
        Self { bug, kinds: PhantomData }
    }

    pub(crate) fn is(&self, bug: B) -> bool {
        self.bug == Some(bug)
    }
}

#[cfg(not(feature = "planted-bugs"))]
impl<B: Copy> InjectedBug<B> {
    #[inline(always)]
    #[expect(clippy::unused_self, reason = "the other one uses it")]
    pub(crate) const fn is(&self, _bug: B) -> bool {
        false
    }
}
