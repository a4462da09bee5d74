//! A tracker that does not repeat known errors.
//!
//! The Bloom telemetry paper requires it: a filter is wrong about the same keys every time, and the popular ones are
//! read most. Corrections are stored exactly, next to the filter. So memory grows with the errors found, not with the
//! groups.

use std::collections::VecDeque;

use super::{Saturation, State, Tracker};
use crate::migration::{Fingerprint, FingerprintMap};

/// Wraps a tracker and corrects its errors as they are found.
#[derive(Clone, Debug)]
pub struct Adaptive<T> {
    inner: T,
    repaired: FingerprintMap<State>,
    /// In the order of their discovery, including groups whose correction has expired.
    found: VecDeque<Fingerprint>,
    repairs_max: usize,
}

impl<T: Tracker> Adaptive<T> {
    /// Default number of corrections: about 3 MB.
    pub const REPAIRS_MAX: usize = 1 << 16;

    /// `repairs_max`: beyond it the oldest correction is dropped, which only brings the error back.
    #[must_use]
    pub fn new(inner: T, repairs_max: usize) -> Self {
        Self { inner, repaired: FingerprintMap::default(), found: VecDeque::new(), repairs_max: repairs_max.max(1) }
    }

    /// Number of corrections.
    #[must_use]
    pub fn repairs(&self) -> usize {
        self.repaired.len()
    }
}

impl<T: Tracker> Tracker for Adaptive<T> {
    fn start(&mut self, group: Fingerprint) {
        self.repaired.remove(&group);
        self.inner.start(group);
    }

    fn complete(&mut self, group: Fingerprint) {
        self.repaired.remove(&group);
        self.inner.complete(group);
    }

    fn state(&self, group: Fingerprint) -> State {
        self.repaired.get(&group).copied().unwrap_or_else(|| self.inner.state(group))
    }

    fn correct(&mut self, group: Fingerprint, truth: State) -> bool {
        if self.inner.state(group) == truth {
            self.repaired.remove(&group);
            return true;
        }
        if self.repaired.insert(group, truth).is_none() {
            self.found.push_back(group);
        }
        while self.repaired.len() > self.repairs_max {
            let Some(oldest) = self.found.pop_front() else { break };
            self.repaired.remove(&oldest);
        }
        if self.found.len() > 2 * self.repairs_max {
            let repaired = &self.repaired;
            self.found.retain(|group| repaired.contains_key(group));
        }
        true
    }

    fn reset(&mut self) {
        self.repaired.clear();
        self.found.clear();
        self.inner.reset();
    }

    fn bytes(&self) -> usize {
        let entry = size_of::<(Fingerprint, State)>() + 1;
        self.inner.bytes() + self.repaired.capacity() * 8 / 7 * entry + self.found.capacity() * size_of::<Fingerprint>()
    }

    fn saturation(&self) -> Saturation {
        self.inner.saturation()
    }
}
