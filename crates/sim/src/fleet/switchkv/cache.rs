//! The switch, which updates a limited number of rules per second, and the traditional choice of cached keys.

use std::collections::VecDeque;

use super::keys::KeyId;

/// Change of a rule in the switch. `None`: a key that is in no rank, so that its rule changes no load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RuleChange {
    pub(super) key: Option<KeyId>,
    /// Whether the rule is installed, or removed.
    pub(super) is_installed: bool,
}

/// The switch's rule updates, in the order of their requests.
#[derive(Clone, Debug)]
pub(super) struct Switch {
    per_second: Option<f64>,
    queue: VecDeque<RuleChange>,
    /// Updates that the passed time permits. None are saved while the switch is idle.
    credit: f64,
}

impl Switch {
    pub(super) fn new(per_second: Option<f64>) -> Self {
        Self { per_second, queue: VecDeque::new(), credit: 0.0 }
    }

    pub(super) fn request(&mut self, change: RuleChange) {
        self.queue.push_back(change);
    }

    /// Whether requested updates exceed the updates of one slice.
    pub(super) fn is_behind(&self, seconds: f64) -> bool {
        self.per_second.is_some_and(|rate| self.queue.len() as f64 >= rate * seconds)
    }

    /// Returns the updates made in a slice of this length.
    pub(super) fn slice(&mut self, seconds: f64) -> Vec<RuleChange> {
        let count = match self.per_second {
            None => self.queue.len(),
            Some(rate) => {
                self.credit += rate * seconds;
                (self.credit as usize).min(self.queue.len())
            }
        };
        let made: Vec<RuleChange> = self.queue.drain(..count).collect();
        self.credit = if self.queue.is_empty() { 0.0 } else { self.credit - count as f64 };
        made
    }
}

/// The traditional method: each queried key replaces the least recently used key. As caches do, it approximates that
/// order with a second chance for used keys.
#[derive(Clone, Debug, Default)]
pub(super) struct Clock {
    ring: VecDeque<KeyId>,
}

impl Clock {
    pub(super) fn add(&mut self, id: KeyId) {
        self.ring.push_back(id);
    }

    /// Removes a key that was not read since its last check.
    pub(super) fn evict(&mut self, mut was_read: impl FnMut(KeyId) -> bool) -> Option<KeyId> {
        for _ in 0..=self.ring.len() {
            let id = self.ring.pop_front()?;
            if !was_read(id) {
                return Some(id);
            }
            self.ring.push_back(id);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::super::keys::KeySpace;
    use super::*;

    #[test]
    fn a_switch_makes_its_updates_in_order_and_saves_none() {
        let mut switch = Switch::new(Some(400.0));
        assert_eq!(switch.slice(60.0), []);
        let change = |is_installed| RuleChange { key: None, is_installed };
        (0..6).for_each(|number| switch.request(change(number < 5)));
        assert!(switch.is_behind(0.01));
        assert_eq!(switch.slice(0.01), [change(true); 4]);
        assert!(!switch.is_behind(0.01));
        assert_eq!(switch.slice(0.01), [change(true), change(false)]);
        let mut unlimited = Switch::new(None);
        (0..1000).for_each(|_| unlimited.request(change(true)));
        assert_eq!((unlimited.slice(0.01).len(), unlimited.is_behind(0.01)), (1000, false));
    }

    #[test]
    fn used_keys_get_a_second_chance() {
        let space = KeySpace::new(1e6, 0.9, 4, 1);
        let ids: Vec<KeyId> = space.head().map(|(id, _)| id).take(3).collect();
        let mut clock = Clock::default();
        ids.iter().for_each(|id| clock.add(*id));
        let mut reads = vec![ids[0]];
        let mut evict = || clock.evict(|id| reads.pop_if(|read| *read == id).is_some());
        assert_eq!([evict(), evict(), evict(), evict()], [Some(ids[1]), Some(ids[2]), Some(ids[0]), None]);
    }
}
