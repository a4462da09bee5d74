//! The guard of nodes that come back without their data: whether a process that answers in the place of another has
//! what that one had.
//!
//! A node may be empty for good reasons: its queue was consumed, its keys were deleted or have expired. Only keys that
//! must still be there are missed. A count of keys a second ago is not enough for that, so commands that may remove
//! keys since the count are known too.

/// A process with fewer than this part of the keys that were there has lost them. Some may be gone rightly: they were
/// written after the last snapshot.
const LOST_BELOW: (u64, u64) = (1, 10);

/// Once that was found, keys are put back one by one, and all that are not there yet would be answered with nil: so
/// many must be there before it is served.
const BACK_FROM: (u64, u64) = (9, 10);

/// The numbers of `INFO keyspace`, all databases together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holdings {
    /// Keys.
    pub keys: u64,
    /// Keys that have a time to live.
    pub expires: u64,
    /// The mean time to live of these, milliseconds.
    pub avg_ttl_ms: u64,
}

impl Holdings {
    /// Reads the answer to `INFO keyspace`.
    #[must_use]
    pub fn of_info(info: &str) -> Self {
        let mut all = Self::default();
        let mut ttl_ms = 0_u128;
        for line in info.lines().filter(|line| line.starts_with("db")) {
            let field = |name: &str| -> u64 {
                let fields = line.trim().split_once(':').map_or("", |(_, fields)| fields);
                fields.split(',').find_map(|field| field.strip_prefix(name)?.parse().ok()).unwrap_or(0)
            };
            let expires = field("expires=");
            all.keys = all.keys.saturating_add(field("keys="));
            all.expires = all.expires.saturating_add(expires);
            ttl_ms += u128::from(expires) * u128::from(field("avg_ttl="));
        }
        all.avg_ttl_ms = (ttl_ms / u128::from(all.expires.max(1))) as u64;
        all
    }

    /// When its keys are gone, on average, if all of them have a time to live; milliseconds since 1970.
    fn gone_by(&self, at_ms: u64) -> Option<u64> {
        (self.keys > 0 && self.expires >= self.keys && self.avg_ttl_ms > 0)
            .then(|| at_ms.saturating_add(self.avg_ttl_ms))
    }
}

/// Commands that a node was sent since the router's start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Those that may write.
    pub writes: u64,
    /// Keys that they may have removed.
    pub removals: u64,
}

/// A command that may remove any number of keys.
pub const ANY_NUMBER: u64 = 1 << 40;

/// The data of a process, as far as it is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Data {
    keys: u64,
    gone_by_ms: Option<u64>,
    /// Commands sent before the count.
    sent: Sent,
    /// The same one count earlier. A write of that time may have been under way at the count.
    before: Sent,
}

/// The part that a start of the router needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// Its keys.
    pub keys: u64,
    /// When these are gone, on average, if all have a time to live; milliseconds since 1970.
    pub gone_by_ms: Option<u64>,
}

/// The fate of the data of a process whose place another one has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Return {
    /// The other one has it.
    Intact,
    /// All keys had a time to live, and the node was away for longer than that.
    Expired,
    /// Commands that were sent since the last count may have removed so many keys.
    Removed(u64),
    /// Of so many keys too few are there, and nothing explains that.
    Lost(u64),
}

impl Data {
    /// A process that was counted when it was met.
    #[must_use]
    pub fn met(holdings: Holdings, at_ms: u64, sent: Sent) -> Self {
        Self { keys: holdings.keys, gone_by_ms: holdings.gone_by(at_ms), sent, before: sent }
    }

    /// The data as an earlier run of the router has known it.
    #[must_use]
    pub fn known(known: Known) -> Self {
        Self { keys: known.keys, gone_by_ms: known.gone_by_ms, ..Self::default() }
    }

    /// The process was counted. `sent`: what the node was sent before it was asked.
    pub fn counted(&mut self, holdings: Holdings, at_ms: u64, sent: Sent) {
        *self = Self { before: self.sent, ..Self::met(holdings, at_ms, sent) };
    }

    /// A move has stored so many keys at this process, or removed them there.
    pub fn moved(&mut self, stored: u64, removed: u64) {
        self.keys = (self.keys + stored).saturating_sub(removed);
    }

    /// The part that a later run of the router needs, after so many commands.
    #[must_use]
    pub fn to_know(&self, sent: Sent) -> Known {
        let has_written = sent.writes > self.before.writes;
        Known { keys: self.keys.max(u64::from(has_written)), gone_by_ms: self.gone_by_ms }
    }

    /// Judges a process with so many keys in its place. `is_held`: it was found to have lost them already.
    #[must_use]
    pub fn judge(&self, sent: Sent, now: u64, at_ms: u64, is_held: bool) -> Return {
        let Known { keys, gone_by_ms } = self.to_know(sent);
        let removed = sent.removals.saturating_sub(self.sent.removals);
        if !has_lost(keys, now, is_held) {
            Return::Intact
        } else if is_held {
            Return::Lost(keys)
        } else if gone_by_ms.is_some_and(|gone_by| gone_by <= at_ms) {
            Return::Expired
        } else if !has_lost(keys.saturating_sub(removed), now, false) {
            Return::Removed(keys.min(removed))
        } else {
            Return::Lost(keys)
        }
    }
}

/// Whether a process with `now` keys has lost what the one in its place had, which were `before`. `is_held`: it was
/// found so already.
fn has_lost(before: u64, now: u64, is_held: bool) -> bool {
    let (part, of) = if is_held { BACK_FROM } else { LOST_BELOW };
    now.saturating_mul(of) < before.saturating_mul(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_of_thousands_is_not_all_of_them() {
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

    #[test]
    fn keyspace_is_read_over_all_databases() {
        let info =
            "# Keyspace\r\ndb0:keys=3,expires=1,avg_ttl=4000,subexpiry=0\r\ndb7:keys=2,expires=2,avg_ttl=1000\r\n";
        assert_eq!(Holdings::of_info(info), Holdings { keys: 5, expires: 3, avg_ttl_ms: 2000 });
        assert_eq!(Holdings::of_info("# Keyspace\r\n"), Holdings::default());
    }

    fn sent(writes: u64, removals: u64) -> Sent {
        Sent { writes, removals }
    }

    fn holdings(keys: u64) -> Holdings {
        Holdings { keys, ..Holdings::default() }
    }

    #[test]
    fn only_keys_that_must_be_there_are_missed() {
        let mut data = Data::met(holdings(0), 0, sent(0, 0));
        assert_eq!(data.judge(sent(0, 0), 0, 9, false), Return::Intact);
        assert_eq!(data.judge(sent(1, 0), 0, 9, false), Return::Lost(1), "it was written to");
        data.counted(holdings(1), 0, sent(1, 0));
        assert_eq!(data.judge(sent(2, 1), 0, 9, false), Return::Removed(1), "a queue that was consumed");
        assert_eq!(data.judge(sent(2, 0), 0, 9, false), Return::Lost(1));
        data.counted(holdings(100), 0, sent(102, 1));
        assert_eq!(data.judge(sent(102, 11), 0, 9, false), Return::Lost(100), "most were not removed");
        assert_eq!(data.judge(sent(102, ANY_NUMBER), 0, 9, false), Return::Removed(100), "a flush");
        // The count falls to nothing.
        data.counted(holdings(0), 0, sent(103, 1));
        assert_eq!(
            data.judge(sent(103, 1), 0, 9, false),
            Return::Lost(1),
            "a write may have been under way at the count"
        );
        data.counted(holdings(0), 0, sent(103, 1));
        assert_eq!(data.judge(sent(103, 1), 0, 9, false), Return::Intact);
    }

    #[test]
    fn keys_that_have_expired_meanwhile_are_not_missed() {
        let all = Holdings { keys: 500, expires: 500, avg_ttl_ms: 4000 };
        let data = Data::met(all, 1000, sent(0, 0));
        assert_eq!(data.judge(sent(0, 0), 0, 4999, false), Return::Lost(500));
        assert_eq!(data.judge(sent(0, 0), 0, 5000, false), Return::Expired);
        assert_eq!(data.judge(sent(0, 0), 0, 5000, true), Return::Lost(500), "it was away for less when it was found");
        let some = Holdings { expires: 499, ..all };
        assert_eq!(Data::met(some, 1000, sent(0, 0)).judge(sent(0, 0), 0, 9999, false), Return::Lost(500));
    }

    #[test]
    fn another_run_of_the_router_knows_as_much() {
        let data = Data::met(Holdings { keys: 3, expires: 3, avg_ttl_ms: 50 }, 10, sent(5, 5));
        let later = Data::known(data.to_know(sent(5, 5)));
        for at_ms in [59, 60] {
            assert_eq!(later.judge(sent(0, 0), 0, at_ms, false), data.judge(sent(5, 5), 0, at_ms, false), "at {at_ms}");
        }
    }
}
