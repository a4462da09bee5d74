//! A counting allocator: all heap memory is counted in one place.
//!
//! Counts at each buffer are not enough: a missing one would be a gap in the budget, and buffers of libraries (TLS) are
//! out of reach.

use std::alloc::{GlobalAlloc, Layout};

use crate::memory::note;

/// Wraps allocator `A` and counts the bytes in use ([`crate::heap_used`]).
#[derive(Debug)]
pub struct CountedHeap<A>(pub A);

// SAFETY: every call and its result are passed through unchanged. `note` neither allocates nor unwinds.
unsafe impl<A: GlobalAlloc> GlobalAlloc for CountedHeap<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller upholds the contract that the inner allocator requires; the same below.
        let block = unsafe { self.0.alloc(layout) };
        if !block.is_null() {
            note(layout.size() as i64);
        }
        block
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        let block = unsafe { self.0.alloc_zeroed(layout) };
        if !block.is_null() {
            note(layout.size() as i64);
        }
        block
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as above.
        let moved = unsafe { self.0.realloc(block, layout, size) };
        if !moved.is_null() {
            note(size as i64 - layout.size() as i64);
        }
        moved
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { self.0.dealloc(block, layout) };
        note(-(layout.size() as i64));
    }
}

#[cfg(test)]
mod tests {
    use std::alloc::System;

    use super::*;
    use crate::memory::{Account, thread_balance};

    #[test]
    fn allocations_reallocations_and_frees_are_counted() {
        let _account = Account::open();
        let heap = CountedHeap(System);
        let before = thread_balance();
        let layout = Layout::from_size_align(1000, 8).expect("a layout");
        // SAFETY: the block is used with the layout and size that it has.
        unsafe {
            let block = heap.alloc(layout);
            assert_eq!(thread_balance() - before, 1000);
            let block = heap.realloc(block, layout, 5000);
            assert_eq!(thread_balance() - before, 5000);
            heap.dealloc(block, Layout::from_size_align(5000, 8).expect("a layout"));
            let zeroed = heap.alloc_zeroed(layout);
            assert_eq!(thread_balance() - before, 1000);
            heap.dealloc(zeroed, layout);
        }
        assert_eq!(thread_balance(), before);
    }
}
