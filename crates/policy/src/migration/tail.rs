//! The tail of a key that is copied in pieces: elements that commands have touched since, and that have to be read
//! again.
//!
//! Who writes is heard *before* the write is sent. So an element is settled only by a read that began when everything
//! sent before that telling had been answered. Elements are kept in two generations for that: [`DirtyElements::begin_round`]
//! when the barrier is set, [`DirtyElements::take`] when it is reached; what is told in between is of the next round. Not a log
//! of commands: what counts is the state that an element has when it is read, and reading once more does no harm.

use std::collections::BTreeSet;

/// A field of a hash, or a member of a set.
pub type Element = Box<[u8]>;

/// What a key's copy lacks.
#[derive(Clone, Debug, Default)]
pub struct DirtyElements {
    /// Told before the barrier that is waited for.
    old: BTreeSet<Element>,
    /// Told since.
    new: BTreeSet<Element>,
    bytes: usize,
    everything: bool,
}

/// Bytes of elements that are remembered; beyond it the copy begins again.
const BYTES_MAX: usize = 32 << 20;
/// What an element costs beside its bytes, about.
const ELEMENT: usize = 40;

impl DirtyElements {
    /// A command may have changed these.
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

    /// A command may have changed anything, or more than can be remembered.
    pub fn touch_everything(&mut self) {
        *self = Self { everything: true, ..Self::default() };
    }

    /// Whether the copy has to begin again.
    #[must_use]
    pub fn is_everything(&self) -> bool {
        self.everything
    }

    /// A barrier is set: what was told so far may be read when it is reached.
    pub fn begin_round(&mut self) {
        for element in std::mem::take(&mut self.new) {
            let bytes = element.len() + ELEMENT;
            if !self.old.insert(element) {
                self.bytes = self.bytes.saturating_sub(bytes);
            }
        }
    }

    /// At most `count` of the elements that may be read now; whoever takes them reads them.
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
        // One that was told again stays, and its bytes were counted again.
        self.bytes = self.bytes.saturating_sub(element.len() + ELEMENT);
    }

    /// The copy has not begun when the barrier is reached: it will show what was told before.
    pub fn drop_old(&mut self) {
        while !self.take(1024).is_empty() {}
    }

    /// Everything that is not settled; it stays.
    pub fn all(&self) -> impl Iterator<Item = &Element> {
        self.old.iter().chain(self.new.difference(&self.old))
    }

    /// How many that are, at most.
    #[must_use]
    pub fn len(&self) -> usize {
        self.old.len() + self.new.len()
    }

    /// Whether there are none.
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
    fn what_is_told_after_the_barrier_waits_for_the_next_one() {
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
    fn nothing_is_counted_twice() {
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
    fn what_cannot_be_remembered_is_everything() {
        let mut tail = DirtyElements::default();
        for n in 0..40_u32 {
            tail.touch([vec![n as u8; 1 << 20].into()]);
        }
        assert!(tail.is_everything() && tail.is_empty());
        tail.touch([element("a")]);
        assert!(tail.is_empty(), "nothing more is remembered");
    }
}
