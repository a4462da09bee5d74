//! Limits on how often something may be done: a token bucket, as one number.
//!
//! The bucket of a limit is the instant at which it will be full again, in nanoseconds of whatever clock the caller has (the "theoretical
//! arrival time" of GCRA). Full and forgotten are the same, so idle buckets need no keeping; and one number can be shared by workers as
//! one atomic word, which makes a limit exact over all of them without a lock.

/// So many per second, of which as many may come at once after a quiet second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// How many per second; at least 1.
    pub per_second: u32,
}

impl Rate {
    /// Time in which one more is allowed, ns.
    fn interval_ns(self) -> u64 {
        1_000_000_000 / u64::from(self.per_second.clamp(1, 1_000_000_000))
    }

    /// Takes one from the bucket that is full at `full_at_ns`. Gives the bucket as it is then, or the time after which to try again, ns.
    pub fn take(self, full_at_ns: u64, now_ns: u64) -> Result<u64, u64> {
        let interval = self.interval_ns();
        let next = full_at_ns.max(now_ns) + interval;
        // Empty is the bucket that takes a second to fill.
        let latest = now_ns + interval * u64::from(self.per_second.max(1));
        if next > latest { Err(next - latest) } else { Ok(next) }
    }
}

#[cfg(test)]
mod tests {
    use super::Rate;

    /// How many of those who try every `step_ns` from `from_ns` to `to_ns` get through.
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
    fn as_many_as_said_get_through_and_no_more() {
        for per_second in [1, 3, 100, 7777] {
            let rate = Rate { per_second };
            let mut bucket = 0;
            let first = admitted(rate, &mut bucket, SECOND, 2 * SECOND, 50_000);
            let more = admitted(rate, &mut bucket, 2 * SECOND, 12 * SECOND, 50_000);
            // In the first second what was saved up, and what comes in it.
            assert!(first.abs_diff(2 * u64::from(per_second)) <= 1, "{per_second}: {first}");
            assert!(more.abs_diff(10 * u64::from(per_second)) <= 10, "{per_second}: {more}");
        }
    }

    #[test]
    fn who_waits_as_told_gets_through() {
        let rate = Rate { per_second: 10 };
        let mut bucket = 0;
        assert_eq!(admitted(rate, &mut bucket, 0, 1000, 1), 10);
        let wait = rate.take(bucket, 1000).expect_err("empty");
        assert!(rate.take(bucket, 1000 + wait).is_ok() && rate.take(bucket, 999 + wait).is_err());
        assert_eq!(admitted(rate, &mut bucket, 100 * SECOND, 100 * SECOND + 1000, 1), 10, "never more than a second's worth");
    }
}
