//! What users, listeners, prefixes and keys have used of what they may: shared by all workers, without a lock on the way of a command.
//!
//! A rate is one atomic word ([`switchyard_policy::limits::Rate`]), so a limit is exact over all workers. Only commands of clients that
//! are counted (`login::guard::COUNTED`) come here.
//!
//! Keys have a table of fixed size. A place holds a part of the key's hash and the time until which its bucket is not full; a place whose
//! bucket is full says nothing, and is free. Where more keys are busy at once than a set has places, the least busy is forgotten.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use switchyard_policy::limits::Rate;

use crate::shared::lock;

/// Commands on keys with a prefix, per second.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyLimit {
    /// The keys that begin with this; empty: all.
    pub prefix: String,
    /// Over all those keys together.
    pub requests_per_second: Option<u32>,
    /// On each of them.
    pub key_requests_per_second: Option<u32>,
}

/// The most that may be asked of a key's limit: its buckets have a resolution of a microsecond.
pub const KEY_RATE_MAX: u32 = 10_000;

/// What one user or listener uses.
#[derive(Debug, Default)]
pub(crate) struct Account {
    connections: AtomicU64,
    bytes: AtomicU64,
    pub(crate) requests: Bucket,
    pub(crate) accepts: Bucket,
}

/// A rate's state.
#[derive(Debug, Default)]
pub(crate) struct Bucket(AtomicU64);

impl Bucket {
    /// Takes one; the error is the time to wait, ns.
    pub(crate) fn take(&self, per_second: u32, now_us: u64) -> Result<(), u64> {
        take(&self.0, |full_at| Rate { per_second }.take(full_at, now_us * 1000))
    }
}

fn take(word: &AtomicU64, mut change: impl FnMut(u64) -> Result<u64, u64>) -> Result<(), u64> {
    let mut before = word.load(Ordering::Relaxed);
    loop {
        let after = change(before)?;
        match word.compare_exchange_weak(before, after, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return Ok(()),
            Err(other) => before = other,
        }
    }
}

/// A client's share of an account, given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Share {
    pub(crate) account: Arc<Account>,
    bytes: u64,
}

impl Share {
    /// A connection's share, unless there are `max` already.
    pub(crate) fn connect(account: Arc<Account>, max: Option<u32>) -> Option<Self> {
        let before = account.connections.fetch_add(1, Ordering::Relaxed);
        let share = Self { account, bytes: 0 };
        max.is_none_or(|max| before < u64::from(max)).then_some(share)
    }

    /// Says how many bytes the client holds now; false where that is more than fits, and then it is not counted.
    pub(crate) fn hold(&mut self, bytes: u64, max: Option<u64>) -> bool {
        let others = self.account.bytes.load(Ordering::Relaxed).saturating_sub(self.bytes);
        if bytes > self.bytes && max.is_some_and(|max| others + bytes > max) {
            return false;
        }
        self.account.bytes.fetch_add(bytes.wrapping_sub(self.bytes), Ordering::Relaxed);
        self.bytes = bytes;
        true
    }

    pub(crate) fn held(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.account.connections.fetch_sub(1, Ordering::Relaxed);
        self.account.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Places for keys: 8 in each of 8192 sets, half a megabyte.
const SETS: usize = 8192;
const WAYS: usize = 8;

/// A place: 20 bits of the hash, 44 bits of microseconds (half a year).
const TIME_BITS: u32 = 44;
const TIME_MASK: u64 = (1 << TIME_BITS) - 1;

/// All accounts.
#[derive(Debug, Default)]
pub(crate) struct Limits {
    accounts: Mutex<HashMap<String, Arc<Account>>>,
    prefixes: Mutex<HashMap<String, Arc<Account>>>,
    keys: OnceLock<Box<[AtomicU64]>>,
}

impl Limits {
    /// The account of a user (`user:NAME`) or listener (`listener:N`).
    pub(crate) fn account(&self, name: &str) -> Arc<Account> {
        lock(&self.accounts).entry(name.to_owned()).or_default().clone()
    }

    /// The account of a prefix.
    pub(crate) fn prefix(&self, prefix: &str) -> Arc<Account> {
        lock(&self.prefixes).entry(prefix.to_owned()).or_default().clone()
    }

    /// Takes one of a key's rate; the error is the time to wait, ns.
    pub(crate) fn take_key(&self, key: &[u8], per_second: u32, now_us: u64) -> Result<(), u64> {
        let table = self.keys.get_or_init(|| (0..SETS * WAYS).map(|_| AtomicU64::new(0)).collect());
        let hash = rapidhash::v3::rapidhash_v3(key);
        let set = &table[(hash as usize % SETS) * WAYS..][..WAYS];
        let tag = hash >> TIME_BITS << TIME_BITS;
        let full_at = |word: u64| word & TIME_MASK;
        let is_it = |word: u64| word & !TIME_MASK == tag && full_at(word) > now_us;
        let place = set.iter().find(|place| is_it(place.load(Ordering::Relaxed)));
        // Free places have a time that is over: the smallest of all.
        let Some(place) = place.or_else(|| set.iter().min_by_key(|place| full_at(place.load(Ordering::Relaxed)))) else { return Ok(()) };
        take(place, |before| {
            let bucket = if is_it(before) { full_at(before) } else { 0 };
            let after_ns = Rate { per_second: per_second.min(KEY_RATE_MAX) }.take(bucket * 1000, now_us * 1000)?;
            Ok(tag | (after_ns / 1000) & TIME_MASK)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_counted_apart() {
        let limits = Limits::default();
        let admitted = |key: &str, now_us: u64| (0..100).filter(|_| limits.take_key(key.as_bytes(), 10, now_us).is_ok()).count();
        for round in 0..3 {
            let now = 5_000_000 + round * 10_000_000;
            for key in 0..1000 {
                assert_eq!(admitted(&format!("key{key}"), now), 10);
            }
        }
        assert_eq!(admitted("key1", 25_000_000 + 500_000), 5);
    }

    #[test]
    fn shares_are_given_back() {
        let account = Arc::new(Account::default());
        let mut first = Share::connect(account.clone(), Some(2)).expect("room");
        let second = Share::connect(account.clone(), Some(2)).expect("room");
        assert!(Share::connect(account.clone(), Some(2)).is_none());
        assert!(first.hold(900, Some(1000)));
        assert!(!first.hold(1001, Some(1000)) && first.held() == 900);
        assert!(first.hold(10, Some(1000)));
        drop(second);
        drop(first);
        assert_eq!((account.connections.load(Ordering::Relaxed), account.bytes.load(Ordering::Relaxed)), (0, 0));
    }

    #[test]
    fn threads_share_one_rate() {
        let bucket = Bucket::default();
        let admitted: usize = std::thread::scope(|scope| {
            let threads: Vec<_> =
                (0..4).map(|_| scope.spawn(|| (0..5000).filter(|_| bucket.take(1000, 7_000_000).is_ok()).count())).collect();
            threads.into_iter().map(|t| t.join().expect("no panic")).sum()
        });
        assert_eq!(admitted, 1000);
    }
}
