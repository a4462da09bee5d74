//! How many bytes the heap of the process holds, counted by the allocator ([`crate::CountedHeap`]).
//!
//! Each worker has an account that only its thread writes, with plain loads and stores; all other threads share one. If
//! one thread allocates and another frees, the first account grows and the other shrinks. An account may therefore be
//! negative, but the sum is exact.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

/// Number of accounts: the shared one, and 1,024 for workers.
const ACCOUNTS: usize = 1 + 1024;

/// Alone in its cache lines, because its worker writes it at every allocation.
#[repr(align(128))]
struct AccountCell(AtomicI64);

static PLACES: [AccountCell; ACCOUNTS] = [const { AccountCell(AtomicI64::new(0)) }; ACCOUNTS];

/// Number of accounts ever opened, including the shared one.
static OPENED: AtomicUsize = AtomicUsize::new(1);

/// Opened accounts whose threads have ended. Their balances remain part of the sum.
static CLOSED: Mutex<Vec<usize>> = Mutex::new(Vec::new());

thread_local! {
    /// The account of this thread; 0 is the shared one.
    static MINE: Cell<usize> = const { Cell::new(0) };
}

/// Records bytes allocated or freed by this thread. Called by the allocator, so it must not allocate.
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

/// Balance of this thread's account, bytes.
#[inline]
pub(crate) fn thread_balance() -> i64 {
    PLACES[MINE.get()].0.load(Relaxed)
}

/// Bytes in the heap of the process. 0 if its allocator does not count.
pub fn heap_used() -> usize {
    let opened = OPENED.load(Relaxed);
    let sum: i64 = PLACES[..opened].iter().map(|place| place.0.load(Relaxed)).sum();
    usize::try_from(sum).unwrap_or(0)
}

/// Assigns this thread its own account until dropped.
#[derive(Debug)]
pub(crate) struct Account {
    before: usize,
    /// Must be dropped by the thread that opened it: neither `Send` nor `Sync`.
    _here: PhantomData<*const ()>,
}

impl Account {
    /// Opens an account. If none is left, the thread keeps using the shared one.
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
    fn allocations_freed_by_another_thread_add_up() {
        let _here = Account::open();
        let before = thread_balance();
        note(5000);
        let there = std::thread::spawn(|| {
            let _there = Account::open();
            let before = thread_balance();
            note(-2000);
            thread_balance() - before
        });
        assert_eq!(there.join().expect("ended"), -2000);
        assert_eq!(thread_balance() - before, 5000);
        // The account is reused by the next thread, and its balance still counts.
        let again = std::thread::spawn(|| {
            let _again = Account::open();
            note(-3000);
        });
        again.join().expect("ended");
        note(-5000);
        note(5000);
        assert_eq!(thread_balance() - before, 5000);
        assert!(OPENED.load(Relaxed) <= ACCOUNTS);
    }
}
