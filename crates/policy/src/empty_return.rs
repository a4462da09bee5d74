//! The guard of nodes that come back without their data: whether a process that answers in the place of another has what that one had.

/// A process with fewer than this part of the keys that were there has lost them. Some may be gone rightly: they have expired, or were written after the
/// last snapshot.
const LOST_BELOW: (u64, u64) = (1, 10);

/// Once that was found, keys are put back one by one, and all that are not there yet would be answered with nil: so many must be there before it is served.
const BACK_FROM: (u64, u64) = (9, 10);

/// Whether a process with `now` keys has lost what the one in its place had, which were `before`. `is_held`: it was found so already.
#[must_use]
pub fn has_lost(before: u64, now: u64, is_held: bool) -> bool {
    let (part, of) = if is_held { BACK_FROM } else { LOST_BELOW };
    now.saturating_mul(of) < before.saturating_mul(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_of_thousands_is_not_what_was_there() {
        for (before, now, is_held, lost) in [
            (0, 0, false, false),
            (1, 0, false, true),
            (1, 1, true, false),
            (3000, 0, false, true),
            (3000, 1, false, true),
            (3000, 299, false, true),
            (3000, 300, false, false),
            (3000, 300, true, true),
            (3000, 2699, true, true),
            (3000, 2700, true, false),
            (3000, 5000, true, false),
            (u64::MAX, 1, true, true),
        ] {
            assert_eq!(has_lost(before, now, is_held), lost, "{now} of {before}, held: {is_held}");
        }
    }
}
