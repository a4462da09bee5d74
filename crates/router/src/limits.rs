//! Usage of rate and byte limits of users, listeners, prefixes and keys, over all workers.
//!
//! A rate is one atomic word ([`switchyard_policy::limits::Rate`]), the bytes are another. Each worker has a [`Part`]
//! of an account and refills it from these in slices, so most commands write no shared memory. A limit may therefore be
//! exceeded by up to [`SLICES_PERCENT`](switchyard_policy::limits::SLICES_PERCENT) percent. Only commands of limited
//! clients (`login::state::guard::COUNTED`) come here.
//!
//! Keys have a table of fixed size. A place holds a part of the key's hash and the time at which its bucket is full
//! again; after that time the place is free. If more keys are busy than a set has places, the least busy key is
//! evicted.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use switchyard_policy::limits::{Rate, unused_max};

use crate::lock::lock;
use crate::metrics::Counter;

/// Rate limits for keys with a prefix, in commands per second.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyLimit {
    /// Key prefix. Empty: all keys.
    pub prefix: String,
    /// Limit for all these keys together.
    pub requests_per_second: Option<u32>,
    /// Limit for each of these keys.
    pub key_requests_per_second: Option<u32>,
}

/// Maximum rate limit of a key: its buckets have a resolution of one microsecond.
pub const KEY_RATE_MAX: u32 = 10_000;

/// Usage of one user or listener.
#[derive(Debug, Default)]
pub(crate) struct Account {
    connections: AtomicU64,
    bytes: AtomicU64,
    requests: Bucket,
    pub(crate) accepts: Bucket,
}

/// State of a token bucket: the time at which it is full, in nanoseconds.
#[derive(Debug, Default)]
pub(crate) struct Bucket(AtomicU64);

impl Bucket {
    /// Creates an empty bucket.
    pub(crate) fn empty(per_second: u32, now_us: u64) -> Self {
        Self(AtomicU64::new(Rate { per_second }.empty(now_us * 1000)))
    }

    /// Consumes one token. The error is the time to wait, in nanoseconds.
    pub(crate) fn take(&self, per_second: u32, now_us: u64) -> Result<(), u64> {
        self.take_up_to(1, per_second, now_us).map(drop)
    }

    fn take_up_to(&self, wanted: u32, per_second: u32, now_us: u64) -> Result<u32, u64> {
        take(&self.0, |full_at| Rate { per_second }.take_up_to(wanted, full_at, now_us * 1000))
    }
}

/// Changes a bucket atomically. Returns the number of consumed tokens. An error leaves the bucket unchanged.
fn take(word: &AtomicU64, mut change: impl FnMut(u64) -> Result<(u64, u32), u64>) -> Result<u32, u64> {
    let mut before = word.load(Ordering::Relaxed);
    loop {
        let (after, taken) = change(before)?;
        match word.compare_exchange_weak(before, after, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return Ok(taken),
            Err(other) => before = other,
        }
    }
}

/// One worker's part of an account. Written by this worker only.
#[derive(Debug)]
pub(crate) struct Part {
    account: Arc<Account>,
    holders: usize,
    /// Tokens left of the last slice.
    requests_left: Counter,
    /// Bytes held by the worker's clients.
    held: Counter,
    /// Bytes claimed from the account. At least `held`.
    claimed: Counter,
    /// Hysteresis in bytes: a claim takes this many extra, and up to twice as many are kept, so that small changes do
    /// not touch the account.
    step: Counter,
}

impl Part {
    /// Creates the part of one of `holders` workers.
    pub(crate) fn new(account: Arc<Account>, holders: usize) -> Self {
        let [requests_left, held, claimed, step] = Default::default();
        Self { account, holders, requests_left, held, claimed, step }
    }

    /// Consumes one token. The error is the time to wait, in nanoseconds.
    pub(crate) fn take(&self, per_second: u32, now_us: u64) -> Result<(), u64> {
        let mut left = self.requests_left.get();
        if left == 0 {
            let slice = Rate { per_second }.slice(self.holders);
            left = u64::from(self.account.requests.take_up_to(slice, per_second, now_us)?);
        }
        self.requests_left.set(left - 1);
        Ok(())
    }

    /// Sets the bytes held by the worker's clients. Returns false, without a change, if they exceed the limit.
    fn hold(&self, bytes: u64, max: Option<u64>) -> bool {
        if let Some(max) = max {
            self.step.set(unused_max(max, self.holders) / 2);
        }
        let (claimed, step) = (self.claimed.get(), self.step.get());
        if bytes > claimed {
            let claim = |all: u64| {
                let others = all - claimed;
                let fits = max.is_none_or(|max| others + bytes <= max + 2 * step * (self.holders as u64 - 1));
                fits.then(|| others + bytes + step)
            };
            if self.account.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, claim).is_err() {
                return false;
            }
            self.claimed.set(bytes + step);
        } else if claimed - bytes > 2 * step {
            self.account.bytes.fetch_sub(claimed - bytes - step, Ordering::Relaxed);
            self.claimed.set(bytes + step);
        }
        self.held.set(bytes);
        true
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        self.account.bytes.fetch_sub(self.claimed.get(), Ordering::Relaxed);
    }
}

/// A client's use of an account. Released on drop.
#[derive(Debug)]
pub(crate) struct ClientQuota {
    pub(crate) part: Arc<Part>,
    bytes: u64,
}

impl ClientQuota {
    /// Registers a connection. Returns `None` if there are `max` already.
    pub(crate) fn connect(part: Arc<Part>, max: Option<u32>) -> Option<Self> {
        let before = part.account.connections.fetch_add(1, Ordering::Relaxed);
        let share = Self { part, bytes: 0 };
        max.is_none_or(|max| before < u64::from(max)).then_some(share)
    }

    /// Sets the bytes held by the client. Returns false, without a change, if they exceed the limit.
    pub(crate) fn hold(&mut self, bytes: u64, max: Option<u64>) -> bool {
        if bytes == self.bytes {
            return true;
        }
        let all = self.part.held.get() - self.bytes + bytes;
        // A decrease always succeeds.
        if !self.part.hold(all, max.filter(|_| bytes > self.bytes)) {
            return false;
        }
        self.bytes = bytes;
        true
    }

    pub(crate) fn held(&self) -> u64 {
        self.bytes
    }
}

impl Drop for ClientQuota {
    fn drop(&mut self) {
        self.part.account.connections.fetch_sub(1, Ordering::Relaxed);
        self.hold(0, None);
    }
}

/// Slices of key rates held by one worker.
#[derive(Debug, Default)]
pub(crate) struct KeySlices(Vec<KeySlice>);

#[derive(Clone, Copy, Debug, Default)]
struct KeySlice {
    hash: u64,
    left: u32,
    /// Time of the last refill, milliseconds.
    since_ms: u32,
}

/// Maximum number of keys with a slice per worker.
const SLICED_KEYS: usize = 4096;

/// Time for which a slice keeps its place against other keys, milliseconds.
const SLICE_MS: u32 = 1000;

impl KeySlices {
    /// Consumes one token of a key's rate. The error is the time to wait, in nanoseconds.
    pub(crate) fn take(
        &mut self,
        limits: &Limits,
        holders: usize,
        key: &[u8],
        per_second: u32,
        now_us: u64,
    ) -> Result<(), u64> {
        let rate = Rate { per_second: per_second.min(KEY_RATE_MAX) };
        let hash = rapidhash::v3::rapidhash_v3(key);
        let slice = rate.slice(holders);
        if slice == 1 {
            // Such a small limit is exact: the shared word is written at most at the limited rate.
            return limits.take_key(hash, 1, rate, now_us).map(drop);
        }
        if self.0.is_empty() {
            self.0 = vec![KeySlice::default(); SLICED_KEYS];
        }
        let now_ms = (now_us / 1000) as u32;
        let place = &mut self.0[hash as usize % SLICED_KEYS];
        let is_own = place.hash == hash;
        if is_own && place.left > 0 {
            place.left -= 1;
            return Ok(());
        }
        let is_free = is_own || place.left == 0 || now_ms.wrapping_sub(place.since_ms) > SLICE_MS;
        let taken = limits.take_key(hash, if is_free { slice } else { 1 }, rate, now_us)?;
        if is_free {
            *place = KeySlice { hash, left: taken - 1, since_ms: now_ms };
        }
        Ok(())
    }
}

/// Table of keys: 8192 sets of 8 places, half a megabyte.
const SETS: usize = 8192;
const WAYS: usize = 8;

/// Layout of a place: 20 bits of the hash, 44 bits of microseconds (half a year).
const TIME_BITS: u32 = 44;
const TIME_MASK: u64 = (1 << TIME_BITS) - 1;

/// All accounts.
#[derive(Debug, Default)]
pub(crate) struct Limits {
    accounts: Mutex<HashMap<String, Arc<Account>>>,
    keys: OnceLock<Box<[AtomicU64]>>,
}

impl Limits {
    /// The account of a user (`user:NAME`), a listener (`listener:N`) or a prefix (`prefix:PREFIX`).
    pub(crate) fn account(&self, name: &str) -> Arc<Account> {
        lock(&self.accounts).entry(name.to_owned()).or_default().clone()
    }

    /// Consumes up to `wanted` tokens of the rate of the key with this hash. The error is the time to wait, in
    /// nanoseconds.
    fn take_key(&self, hash: u64, wanted: u32, rate: Rate, now_us: u64) -> Result<u32, u64> {
        let table = self.keys.get_or_init(|| (0..SETS * WAYS).map(|_| AtomicU64::new(0)).collect());
        let set = &table[(hash as usize % SETS) * WAYS..][..WAYS];
        let tag = hash >> TIME_BITS << TIME_BITS;
        let full_at = |word: u64| word & TIME_MASK;
        let is_it = |word: u64| word & !TIME_MASK == tag && full_at(word) > now_us;
        loop {
            // Read once: with a second read, the place that another worker has just given to the key would look like the
            // place of another key, and the key would get a second bucket.
            let words: [u64; WAYS] = std::array::from_fn(|way| set[way].load(Ordering::Relaxed));
            // Free places have a time in the past, the smallest of all.
            let way = (0..WAYS).min_by_key(|way| (!is_it(words[*way]), full_at(words[*way]))).unwrap_or_default();
            let bucket = if is_it(words[way]) { full_at(words[way]) } else { 0 };
            let (after_ns, taken) = rate.take_up_to(wanted, bucket * 1000, now_us * 1000)?;
            let after = tag | (after_ns / 1000) & TIME_MASK;
            if set[way].compare_exchange(words[way], after, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                return Ok(taken);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_separate_buckets() {
        let (limits, mut slices) = (Limits::default(), KeySlices::default());
        let mut admitted = |key: &str, now_us: u64| {
            (0..100).filter(|_| slices.take(&limits, 4, key.as_bytes(), 10, now_us).is_ok()).count()
        };
        for round in 0..3 {
            let now = 5_000_000 + round * 10_000_000;
            for key in 0..1000 {
                assert_eq!(admitted(&format!("key{key}"), now), 10);
            }
        }
        assert_eq!(admitted("key1", 25_000_000 + 500_000), 5);
    }

    #[test]
    fn quotas_are_released_on_drop() {
        let account = Arc::new(Account::default());
        let part = Arc::new(Part::new(account.clone(), 1));
        let mut first = ClientQuota::connect(part.clone(), Some(2)).expect("room");
        let second = ClientQuota::connect(part.clone(), Some(2)).expect("room");
        assert!(ClientQuota::connect(part.clone(), Some(2)).is_none());
        assert!(first.hold(900, Some(1000)));
        assert!(!first.hold(1001, Some(1000)) && first.held() == 900);
        assert!(first.hold(10, Some(1000)));
        drop(second);
        drop(first);
        drop(part);
        assert_eq!((account.connections.load(Ordering::Relaxed), account.bytes.load(Ordering::Relaxed)), (0, 0));
    }

    /// Lets four workers compete for a rate at one instant. Returns the number of admitted commands.
    fn admitted_to_four(take: impl Fn(usize) -> bool + Sync) -> usize {
        std::thread::scope(|scope| {
            let take = &take;
            let threads: Vec<_> =
                (0..4).map(|worker| scope.spawn(move || (0..5000).filter(|_| take(worker)).count())).collect();
            threads.into_iter().map(|t| t.join().expect("no panic")).sum()
        })
    }

    #[test]
    fn workers_share_one_rate() {
        let account = Arc::new(Account::default());
        let parts: Vec<Part> = (0..4).map(|_| Part::new(account.clone(), 4)).collect();
        assert_eq!(admitted_to_four(|worker| parts[worker].take(1000, 7_000_000).is_ok()), 1000);
        let limits = Limits::default();
        let slices: Vec<Mutex<KeySlices>> = (0..4).map(|_| Mutex::default()).collect();
        let take = |worker: usize| lock(&slices[worker]).take(&limits, 4, b"key", 1000, 7_000_000).is_ok();
        assert_eq!(admitted_to_four(take), 1000);
    }

    #[test]
    fn shared_rate_is_written_once_per_slice() {
        let account = Arc::new(Account::default());
        let part = Part::new(account.clone(), 2);
        let mut writes = 0;
        for _ in 0..1000 {
            let before = account.requests.0.load(Ordering::Relaxed);
            part.take(10_000, 7_000_000).expect("there is enough");
            writes += u32::from(account.requests.0.load(Ordering::Relaxed) != before);
        }
        assert_eq!(writes, 4, "251 at once");
        let (limits, mut slices, mut writes) = (Limits::default(), KeySlices::default(), 0);
        for _ in 0..1000 {
            let before: u64 = limits
                .keys
                .get()
                .map_or(0, |keys| keys.iter().map(|word| word.load(Ordering::Relaxed)).fold(0, u64::wrapping_add));
            slices.take(&limits, 2, b"key", 10_000, 7_000_000).expect("there is enough");
            writes += u32::from(
                limits
                    .keys
                    .get()
                    .expect("it is there")
                    .iter()
                    .map(|word| word.load(Ordering::Relaxed))
                    .fold(0, u64::wrapping_add)
                    != before,
            );
        }
        assert_eq!(writes, 4);
    }

    #[test]
    fn byte_limit_holds_within_the_slice_percentage() {
        const MAX: u64 = 100_000;
        let account = Arc::new(Account::default());
        let parts: Vec<Arc<Part>> = (0..4).map(|_| Arc::new(Part::new(account.clone(), 4))).collect();
        let mut shares: Vec<ClientQuota> =
            (0..40).map(|n| ClientQuota::connect(parts[n % 4].clone(), None).expect("room")).collect();
        let (mut random, mut refused) = (88_172_645_463_325_252u64, 0);
        for _ in 0..100_000 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let share = (random >> 8) as usize % shares.len();
            let bytes = (random >> 32) % 6000;
            let held = shares.iter().map(ClientQuota::held).sum::<u64>();
            let wanted = held - shares[share].held() + bytes;
            if shares[share].hold(bytes, Some(MAX)) {
                let grew = wanted > held;
                assert!(!grew || wanted <= MAX * 105 / 100, "{wanted} bytes");
            } else {
                refused += 1;
                assert!(wanted > MAX, "refused at {wanted} bytes");
            }
        }
        assert!(refused > 1000, "{refused} refused");
        // Small changes do not reach the account.
        let told = account.bytes.load(Ordering::Relaxed);
        shares[0].hold(0, Some(MAX));
        let held = shares[0].held();
        shares[0].hold(held + 300, Some(MAX));
        let begin = account.bytes.load(Ordering::Relaxed);
        for bytes in [100, 400, 50, 500, 0, 300].repeat(100) {
            shares[0].hold(bytes, Some(MAX));
            assert_eq!(account.bytes.load(Ordering::Relaxed), begin, "{told} before");
        }
        drop(shares);
        drop(parts);
        assert_eq!(account.bytes.load(Ordering::Relaxed), 0);
    }
}
