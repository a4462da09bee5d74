//! Limits on how often something may be done: a token bucket, as one number.
//!
//! The bucket of a limit is the instant at which it will be full again, in nanoseconds of whatever clock the caller has
//! (the "theoretical arrival time" of GCRA). Full and forgotten are the same, so idle buckets need no keeping; and one
//! number can be shared by workers as one atomic word.
//!
//! Workers take from a shared bucket in slices ([`Rate::slice`]) and use them up by themselves, so that a command does
//! not write to memory that all of them share. What they have taken and not used is at most [`SLICES_PERCENT`] of the
//! limit: by so much, and no more, may be exceeded what the bucket allows in any span of time, and by so much less may
//! be left to one of them while the others are idle.

/// So many per second, of which as many may come at once after a quiet second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// How many per second; at least 1.
    pub per_second: u32,
}

/// What all holders of slices together have taken and not used, in percent of the limit, at most.
pub const SLICES_PERCENT: u64 = 5;

/// How much of a limit each of so many holders may have without using it.
#[must_use]
pub fn unused_max(limit: u64, holders: usize) -> u64 {
    (u128::from(limit) * u128::from(SLICES_PERCENT) / 100) as u64 / holders.max(1) as u64
}

impl Rate {
    /// How many each of so many holders takes at once: one to use now, and what it may have unused.
    #[must_use]
    pub fn slice(self, holders: usize) -> u32 {
        1 + u32::try_from(unused_max(u64::from(self.per_second), holders)).unwrap_or(u32::MAX - 1)
    }

    /// Time in which one more is allowed, ns.
    fn interval_ns(self) -> u64 {
        1_000_000_000 / u64::from(self.per_second.clamp(1, 1_000_000_000))
    }

    /// Takes one from the bucket that is full at `full_at_ns`. Gives the bucket as it is then, or the time after which
    /// to try again, ns.
    pub fn take(self, full_at_ns: u64, now_ns: u64) -> Result<u64, u64> {
        self.take_up_to(1, full_at_ns, now_ns).map(|(next, _)| next)
    }

    /// Takes as many as there are, up to `wanted`, and at least one. Gives the bucket as it is then and how many were
    /// taken, or the time after which to try again, ns.
    pub fn take_up_to(self, wanted: u32, full_at_ns: u64, now_ns: u64) -> Result<(u64, u32), u64> {
        let interval = self.interval_ns();
        let full_at = full_at_ns.max(now_ns);
        // Empty is the bucket that takes a second to fill.
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

    /// Numbers that look random, the same in every run.
    fn next(state: &mut u64) -> u64 {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        *state
    }

    #[test]
    fn slices_exceed_a_limit_by_the_percentage_said_and_no_more() {
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
                    // Others are busy now, and what these have is left unused; or all are quiet for a while.
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
            // In every span of time: what a bucket that is full at its beginning gives, and the percentage once.
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
            // And nobody is refused while more is left than the others may have unused.
            let least = u64::from(rate.per_second) - u64::from(rate.per_second) * SLICES_PERCENT / 100;
            let (mut alone, mut own, mut full_at) = (0, 0, 0);
            // The others take a slice each and use one.
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
    fn who_waits_as_told_gets_through() {
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
