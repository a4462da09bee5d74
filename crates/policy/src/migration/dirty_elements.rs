//! Dirty elements of a key that is copied in pieces: commands have touched them during the copy, so they must be read
//! again.
//!
//! A write is reported *before* it is sent. So an element is clean only after a read that started when all commands
//! sent before the report had ended. Two generations implement this: [`DirtyElements::begin_round`] when the barrier is
//! set, [`DirtyElements::take`] when it is reached; elements reported in between belong to the next round. Elements
//! rather than a log of commands: only the value at the time of the read matters, and another read does no harm.

use std::collections::BTreeSet;

/// A field of a hash, or a member of a set.
pub type Element = Box<[u8]>;

/// Elements and generations that a key's copy lacks.
#[derive(Clone, Debug, Default)]
pub struct DirtyElements {
    /// Reported before the pending barrier.
    old: BTreeSet<Element>,
    /// Reported since.
    new: BTreeSet<Element>,
    bytes: usize,
    everything: bool,
}

/// Maximum size of the tracked elements, bytes; beyond it the copy restarts.
const BYTES_MAX: usize = 32 << 20;
/// Approximate overhead of an element, bytes.
const ELEMENT: usize = 40;

impl DirtyElements {
    /// Records elements that a command may change.
    pub fn touch(&mut self, elements: impl IntoIterator<Item = Element>) {
        for element in elements {
            let bytes = element.len() + ELEMENT;
            if !self.everything && self.new.insert(element) {
                self.bytes += bytes;
            }
        }
        if self.bytes > BYTES_MAX {
            self.touch_everything();
        }
    }

    /// Records that a command may change any element, or more than can be tracked.
    pub fn touch_everything(&mut self) {
        *self = Self { everything: true, ..Self::default() };
    }

    /// Whether the copy must restart.
    #[must_use]
    pub fn is_everything(&self) -> bool {
        self.everything
    }

    /// Sets a barrier: elements reported so far may be read when it is reached.
    pub fn begin_round(&mut self) {
        for element in std::mem::take(&mut self.new) {
            let bytes = element.len() + ELEMENT;
            if !self.old.insert(element) {
                self.bytes = self.bytes.saturating_sub(bytes);
            }
        }
    }

    /// Removes and returns up to `count` elements that may be read now. The caller reads them.
    pub fn take(&mut self, count: usize) -> Vec<Element> {
        let mut taken = Vec::new();
        while taken.len() < count
            && let Some(element) = self.old.pop_first()
        {
            self.forget(&element);
            taken.push(element);
        }
        taken
    }

    fn forget(&mut self, element: &Element) {
        // An element reported again stays, and was counted twice.
        self.bytes = self.bytes.saturating_sub(element.len() + ELEMENT);
    }

    /// Drops elements reported before the barrier: the copy has not started, and will include them.
    pub fn drop_old(&mut self) {
        while !self.take(1024).is_empty() {}
    }

    /// Returns all dirty elements, without removing them.
    pub fn all(&self) -> impl Iterator<Item = &Element> {
        self.old.iter().chain(self.new.difference(&self.old))
    }

    /// Maximum number of dirty elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.old.len() + self.new.len()
    }

    /// Whether no element is dirty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn element(name: &str) -> Element {
        name.as_bytes().into()
    }

    #[test]
    fn elements_reported_after_a_barrier_wait_for_the_next() {
        let mut tail = DirtyElements::default();
        tail.touch([element("a"), element("b")]);
        assert!(tail.take(9).is_empty(), "no barrier yet");
        tail.begin_round();
        tail.touch([element("b"), element("c")]);
        assert_eq!(tail.take(9), [element("a"), element("b")]);
        assert_eq!(tail.all().cloned().collect::<Vec<_>>(), [element("b"), element("c")]);
        tail.begin_round();
        assert_eq!(tail.take(1), [element("b")]);
        assert_eq!(tail.take(9), [element("c")]);
        assert!(tail.is_empty() && tail.bytes == 0);
    }

    #[test]
    fn repeated_elements_are_counted_once() {
        let mut tail = DirtyElements::default();
        tail.touch([element("a")]);
        tail.begin_round();
        tail.touch([element("a"), element("a")]);
        assert_eq!(tail.all().count(), 1);
        tail.begin_round();
        tail.drop_old();
        assert_eq!((tail.len(), tail.bytes), (0, 0));
    }

    #[test]
    fn too_many_dirty_elements_restart_the_copy() {
        let mut tail = DirtyElements::default();
        for n in 0..40_u32 {
            tail.touch([vec![n as u8; 1 << 20].into()]);
        }
        assert!(tail.is_everything() && tail.is_empty());
        tail.touch([element("a")]);
        assert!(tail.is_empty(), "nothing more is remembered");
    }
}
