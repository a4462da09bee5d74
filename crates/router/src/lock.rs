//! Locks that a panicked worker may have held.

use std::sync::PoisonError;

use crate::sync::{Mutex, MutexGuard};

/// Locks a mutex and ignores poisoning. A worker may have panicked with the lock held, but the data is a cache or a
/// queue that is incomplete at worst.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
