//! How many bytes the heap of the process holds, counted by the allocator ([`crate::CountedHeap`]).
//!
//! Each worker has an account that only its thread writes, with plain loads and stores; all other threads share one.
//! What one thread allocates and another frees makes one account grow and the other shrink, so an account may be below
//! zero: the sum is right.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

/// Accounts: that of all other threads, and those of 1,024 workers.
const ACCOUNTS: usize = 1 + 1024;

/// Alone in its cache lines, because its worker writes it at every allocation.
#[repr(align(128))]
struct Place(AtomicI64);

static PLACES: [Place; ACCOUNTS] = [const { Place(AtomicI64::new(0)) }; ACCOUNTS];

/// Accounts that were ever opened, with the shared one.
static OPENED: AtomicUsize = AtomicUsize::new(1);

/// Those among them whose threads have ended. What they show stays.
static CLOSED: Mutex<Vec<usize>> = Mutex::new(Vec::new());

thread_local! {
    /// The account of this thread; 0 is the shared one.
    static MINE: Cell<usize> = const { Cell::new(0) };
}

/// Takes note of bytes allocated or freed by this thread. Called by the allocator: it must not allocate.
#[inline]
pub(crate) fn note(bytes: i64) {
    match MINE.get() {
        0 => drop(PLACES[0].0.fetch_add(bytes, Relaxed)),
        mine => {
            let place = &PLACES[mine].0;
            place.store(place.load(Relaxed).wrapping_add(bytes), Relaxed);
        }
    }
}

/// Bytes that this thread has allocated and not freed.
#[inline]
pub(crate) fn own() -> i64 {
    PLACES[MINE.get()].0.load(Relaxed)
}

/// Bytes in the heap of the process; 0 where its allocator does not count.
pub fn heap_used() -> usize {
    let opened = OPENED.load(Relaxed);
    let sum: i64 = PLACES[..opened].iter().map(|place| place.0.load(Relaxed)).sum();
    usize::try_from(sum).unwrap_or(0)
}

/// This thread writes an account of its own until this is dropped.
#[derive(Debug)]
pub(crate) struct Account {
    before: usize,
    /// It belongs to the thread that opened it.
    _here: PhantomData<*const ()>,
}

impl Account {
    /// Opens one, where there is one left.
    pub(crate) fn open() -> Self {
        let closed = CLOSED.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let fresh =
            || OPENED.fetch_update(Relaxed, Relaxed, |opened| (opened < ACCOUNTS).then_some(opened + 1)).unwrap_or(0);
        Self { before: MINE.replace(closed.unwrap_or_else(fresh)), _here: PhantomData }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        let mine = MINE.replace(self.before);
        if mine != 0 {
            CLOSED.lock().unwrap_or_else(PoisonError::into_inner).push(mine);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_thread_allocates_and_another_frees_adds_up() {
        let _here = Account::open();
        let before = own();
        note(5000);
        let there = std::thread::spawn(|| {
            let _there = Account::open();
            let before = own();
            note(-2000);
            own() - before
        });
        assert_eq!(there.join().expect("ended"), -2000);
        assert_eq!(own() - before, 5000);
        // Its account is given to the next thread, and still counts.
        let again = std::thread::spawn(|| {
            let _again = Account::open();
            note(-3000);
        });
        again.join().expect("ended");
        note(-5000);
        note(5000);
        assert_eq!(own() - before, 5000);
        assert!(OPENED.load(Relaxed) <= ACCOUNTS);
    }
}
