//! Reusable slots for connections, with a generation each: a stale handle (in a node's pending reply, or an epoll
//! event) never reaches a connection that reuses the slot.

/// Names an entry of a [`Slab`]; stale after the entry is removed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Handle {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

impl Handle {
    /// A handle that no slab gives out.
    pub(crate) const NONE: Handle = Handle { index: u32::MAX, generation: 0 };
}

#[derive(Debug)]
struct Entry<T> {
    generation: u32,
    value: Option<T>,
}

#[derive(Debug)]
pub(crate) struct Slab<T> {
    entries: Vec<Entry<T>>,
    free: Vec<u32>,
}

/// Number of generations before they wrap. A handle must fit into an epoll token together with its tag.
const GENERATIONS: u32 = 1 << 29;

impl<T> Slab<T> {
    pub(crate) fn new() -> Self {
        Self { entries: Vec::new(), free: Vec::new() }
    }

    pub(crate) fn insert(&mut self, value: T) -> Handle {
        let index = self.free.pop().unwrap_or_else(|| {
            self.entries.push(Entry { generation: 0, value: None });
            (self.entries.len() - 1) as u32
        });
        let entry = &mut self.entries[index as usize];
        entry.value = Some(value);
        Handle { index, generation: entry.generation }
    }

    #[inline]
    pub(crate) fn get(&self, handle: Handle) -> Option<&T> {
        self.entries.get(handle.index as usize).filter(|e| e.generation == handle.generation)?.value.as_ref()
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, handle: Handle) -> Option<&mut T> {
        self.entries.get_mut(handle.index as usize).filter(|e| e.generation == handle.generation)?.value.as_mut()
    }

    pub(crate) fn remove(&mut self, handle: Handle) -> Option<T> {
        let entry = self.entries.get_mut(handle.index as usize).filter(|e| e.generation == handle.generation)?;
        let value = entry.value.take()?;
        entry.generation = (entry.generation + 1) % GENERATIONS;
        self.free.push(handle.index);
        Some(value)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Handle, &T)> {
        self.entries.iter().enumerate().filter_map(|(index, e)| {
            let handle = Handle { index: index as u32, generation: e.generation };
            e.value.as_ref().map(|value| (handle, value))
        })
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (Handle, &mut T)> {
        self.entries.iter_mut().enumerate().filter_map(|(index, e)| {
            let handle = Handle { index: index as u32, generation: e.generation };
            e.value.as_mut().map(|value| (handle, value))
        })
    }

    pub(crate) fn handles(&self) -> Vec<Handle> {
        self.iter().map(|(handle, _)| handle).collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::Slab;

    #[test]
    fn a_stale_handle_reaches_no_entry() {
        let mut slab = Slab::new();
        let first = slab.insert("a");
        assert_eq!(slab.remove(first), Some("a"));
        let second = slab.insert("b");
        assert_eq!(first.index, second.index);
        assert_eq!((slab.get(first), slab.get(second)), (None, Some(&"b")));
        assert_eq!(slab.remove(first), None);
        assert_eq!(slab.len(), 1);
    }
}
