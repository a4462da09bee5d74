//! Rate limits: a token bucket stored as one number.
//!
//! The number is the time at which the bucket will be full again, in nanoseconds of the caller's clock (the
//! "theoretical arrival time" of GCRA). A full bucket equals a new one, so idle buckets need not be stored, and workers
//! can share a bucket as one atomic word.
//!
//! Workers take slices of a shared bucket ([`Rate::slice`]), so that not every command writes to shared memory. Unused
//! slices are at most [`SLICES_PERCENT`] of the limit. The rate over any time span may exceed the limit by this much,
//! and a worker may get this much less while the others are idle.

/// Events per second. After an idle second, as many may occur at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Limit per second, at least 1.
    pub per_second: u32,
}

/// Maximum unused part of all slices together, in percent of the limit.
pub const SLICES_PERCENT: u64 = 5;

/// Maximum unused part of `limit` per holder.
#[must_use]
pub fn unused_max(limit: u64, holders: usize) -> u64 {
    (u128::from(limit) * u128::from(SLICES_PERCENT) / 100) as u64 / holders.max(1) as u64
}

impl Rate {
    /// Number of tokens that a worker takes at once: one to use, plus the unused part.
    #[must_use]
    pub fn slice(self, holders: usize) -> u32 {
        1 + u32::try_from(unused_max(u64::from(self.per_second), holders)).unwrap_or(u32::MAX - 1)
    }

    /// Interval between tokens, in nanoseconds.
    fn interval_ns(self) -> u64 {
        1_000_000_000 / u64::from(self.per_second.clamp(1, 1_000_000_000))
    }

    /// Returns an empty bucket.
    #[must_use]
    pub fn empty(self, now_ns: u64) -> u64 {
        now_ns + self.interval_ns() * u64::from(self.per_second.max(1))
    }

    /// Consumes one token. Returns the updated bucket, or when a token is available, in nanoseconds.
    pub fn take(self, full_at_ns: u64, now_ns: u64) -> Result<u64, u64> {
        self.take_up_to(1, full_at_ns, now_ns).map(|(next, _)| next)
    }

    /// Consumes one to `wanted` tokens, as available. Returns the updated bucket and the number consumed, or when a
    /// token is available, in nanoseconds.
    pub fn take_up_to(self, wanted: u32, full_at_ns: u64, now_ns: u64) -> Result<(u64, u32), u64> {
        let interval = self.interval_ns();
        let full_at = full_at_ns.max(now_ns);
        // An empty bucket takes one second to fill.
        let latest = now_ns + interval * u64::from(self.per_second.max(1));
        let there = latest.saturating_sub(full_at) / interval;
        if there == 0 {
            return Err(full_at + interval - latest);
        }
        let taken = there.min(u64::from(wanted.max(1)));
        Ok((full_at + interval * taken, u32::try_from(taken).unwrap_or(u32::MAX)))
    }
}

#[cfg(test)]
mod tests {
    use super::{Rate, SLICES_PERCENT};

    /// Number of events admitted with an attempt every `step_ns` from `from_ns` to `to_ns`.
    fn admitted(rate: Rate, bucket: &mut u64, from_ns: u64, to_ns: u64, step_ns: u64) -> u64 {
        (from_ns..to_ns)
            .step_by(step_ns as usize)
            .filter(|now| match rate.take(*bucket, *now) {
                Ok(next) => {
                    *bucket = next;
                    true
                }
                Err(wait) => {
                    assert!(wait > 0);
                    false
                }
            })
            .count() as u64
    }

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn the_configured_number_is_admitted_and_no_more() {
        for per_second in [1, 3, 100, 7777] {
            let rate = Rate { per_second };
            let mut bucket = 0;
            let first = admitted(rate, &mut bucket, SECOND, 2 * SECOND, 50_000);
            let more = admitted(rate, &mut bucket, 2 * SECOND, 12 * SECOND, 50_000);
            // The first second admits a full bucket plus its refill.
            assert!(first.abs_diff(2 * u64::from(per_second)) <= 1, "{per_second}: {first}");
            assert!(more.abs_diff(10 * u64::from(per_second)) <= 10, "{per_second}: {more}");
        }
    }

    #[test]
    fn an_empty_bucket_admits_no_more_than_the_rate() {
        for per_second in [1, 3, 100, 7777, 300_000] {
            let rate = Rate { per_second };
            let mut bucket = rate.empty(SECOND);
            assert!(rate.take(bucket, SECOND).is_err());
            let taken = admitted(rate, &mut bucket, SECOND, 3 * SECOND, 3_000);
            assert!(taken <= 2 * u64::from(per_second) + 100, "{per_second}: {taken}");
            assert!(taken >= 2 * u64::from(per_second) - 2, "{per_second}: {taken}");
        }
    }

    /// Pseudorandom numbers, the same in every run.
    fn next(state: &mut u64) -> u64 {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        *state
    }

    #[test]
    fn slices_exceed_a_limit_by_the_stated_percentage_at_most() {
        for seed in 1..=60u64 {
            let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let holders = 1 + next(&mut random) as usize % 64;
            let rate = Rate { per_second: 1 + (next(&mut random) % 20_000) as u32 };
            let slice = rate.slice(holders);
            let (mut bucket, mut left, mut now) = (0, vec![0u32; holders], SECOND);
            let mut times = Vec::new();
            let mut busy = 1 + next(&mut random) as usize % holders;
            while now < 5 * SECOND {
                if next(&mut random).is_multiple_of(5000) {
                    // The other workers are busy and these slices stay unused, or all workers are idle for a while.
                    busy = 1 + next(&mut random) as usize % holders;
                    now += next(&mut random) % (SECOND / 2);
                }
                now += next(&mut random) % (SECOND / 2 / u64::from(rate.per_second)).max(1);
                let holder = next(&mut random) as usize % busy;
                if left[holder] == 0
                    && let Ok((full_at, taken)) = rate.take_up_to(slice, bucket, now)
                {
                    (bucket, left[holder]) = (full_at, taken);
                }
                if left[holder] > 0 {
                    left[holder] -= 1;
                    times.push(now);
                }
            }
            // In every time span: the tokens of a full bucket with its refill, plus the percentage once.
            let most = |span: u64| {
                let limit = u64::from(rate.per_second);
                limit + span / rate.interval_ns() + 1 + limit * SLICES_PERCENT / 100
            };
            let step = (times.len() / 200).max(1);
            for begin in (0..times.len()).step_by(step) {
                for end in (begin..times.len()).step_by(step) {
                    let (count, span) = ((end - begin + 1) as u64, times[end] - times[begin]);
                    assert!(
                        count <= most(span),
                        "seed {seed}: {count} in {span} ns, {} per second, {holders} holders",
                        rate.per_second
                    );
                }
            }
            // And no event is refused while more tokens remain than the other workers can hold.
            let least = u64::from(rate.per_second) - u64::from(rate.per_second) * SLICES_PERCENT / 100;
            let (mut alone, mut own, mut full_at) = (0, 0, 0);
            // The other workers take one slice each and use one token.
            for _ in 1..holders {
                if let Ok((next, _)) = rate.take_up_to(slice, full_at, now) {
                    full_at = next;
                }
            }
            let used = holders as u64 - 1;
            while own > 0
                || rate.take_up_to(slice, full_at, now).map(|(next, taken)| (full_at, own) = (next, taken)).is_ok()
            {
                own -= 1;
                alone += 1;
            }
            assert!(alone + used >= least, "seed {seed}: {alone} of {} with {holders} holders", rate.per_second);
        }
    }

    #[test]
    fn small_limits_are_exact() {
        assert_eq!(Rate { per_second: 19 }.slice(1), 1);
        assert_eq!(Rate { per_second: 100 }.slice(16), 1);
        assert_eq!(Rate { per_second: 1000 }.slice(16), 4);
        assert_eq!(Rate { per_second: u32::MAX }.slice(1), 214_748_365);
    }

    #[test]
    fn a_client_that_waits_the_returned_time_is_admitted() {
        let rate = Rate { per_second: 10 };
        let mut bucket = 0;
        assert_eq!(admitted(rate, &mut bucket, 0, 1000, 1), 10);
        let wait = rate.take(bucket, 1000).expect_err("empty");
        assert!(rate.take(bucket, 1000 + wait).is_ok() && rate.take(bucket, 999 + wait).is_err());
        assert_eq!(
            admitted(rate, &mut bucket, 100 * SECOND, 100 * SECOND + 1000, 1),
            10,
            "never more than a second's worth"
        );
    }
}
