//! Detects nodes that return without their data: a new process that lacks the keys of the previous one.
//!
//! A node may be empty for good reasons: its queue was consumed, or its keys were deleted or have expired. Only keys
//! that must still exist count as missing. A recent key count is not sufficient, so commands sent since the count that
//! may remove keys are counted too.

/// Fraction of the previous keys below which a process has lost data. Some may be missing for a good reason: they were
/// written after the last snapshot.
const LOST_BELOW: (u64, u64) = (1, 10);

/// Fraction of the keys that must be present before a node with lost data is served again. While keys are restored one
/// by one, reads of the others would return nil.
const BACK_FROM: (u64, u64) = (9, 10);

/// Totals of `INFO keyspace` over all databases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holdings {
    /// Number of keys.
    pub keys: u64,
    /// Number of keys with an expiry.
    pub expires: u64,
    /// Mean TTL of the keys with an expiry, in milliseconds.
    pub avg_ttl_ms: u64,
}

impl Holdings {
    /// Parses the reply to `INFO keyspace`.
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

    /// Mean expiry time if all keys have one, in milliseconds since 1970.
    fn gone_by(&self, at_ms: u64) -> Option<u64> {
        (self.keys > 0 && self.expires >= self.keys && self.avg_ttl_ms > 0)
            .then(|| at_ms.saturating_add(self.avg_ttl_ms))
    }
}

/// Counters of commands sent to a node since the start of the router.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Commands that may write.
    pub writes: u64,
    /// Maximum number of keys removed by them.
    pub removals: u64,
}

/// Removals counted for a command that may remove any number of keys.
pub const ANY_NUMBER: u64 = 1 << 40;

/// Known data of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Data {
    keys: u64,
    gone_by_ms: Option<u64>,
    /// Commands sent before the key count.
    sent: Sent,
    /// Commands sent before the previous key count. A write from that time may have been in flight at the last count.
    before: Sent,
}

/// The part kept for the next start of the router.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// Number of keys.
    pub keys: u64,
    /// Mean expiry time if all keys have one, in milliseconds since 1970.
    pub gone_by_ms: Option<u64>,
}

/// Result of the comparison with the previous process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Return {
    /// The new process has the data.
    Intact,
    /// All keys had an expiry, and the node was down for longer than their TTL.
    Expired,
    /// Commands sent since the last count may have removed this many keys.
    Removed(u64),
    /// Too few of this many keys are present, without an explanation.
    Lost(u64),
}

impl Data {
    /// Records the first count of a process.
    #[must_use]
    pub fn met(holdings: Holdings, at_ms: u64, sent: Sent) -> Self {
        Self { keys: holdings.keys, gone_by_ms: holdings.gone_by(at_ms), sent, before: sent }
    }

    /// Data recorded by an earlier run of the router.
    #[must_use]
    pub fn known(known: Known) -> Self {
        Self { keys: known.keys, gone_by_ms: known.gone_by_ms, ..Self::default() }
    }

    /// Records a later count. `sent`: commands sent before the count was requested.
    pub fn counted(&mut self, holdings: Holdings, at_ms: u64, sent: Sent) {
        *self = Self { before: self.sent, ..Self::met(holdings, at_ms, sent) };
    }

    /// Adjusts the count for keys stored or removed by a move.
    pub fn moved(&mut self, stored: u64, removed: u64) {
        self.keys = (self.keys + stored).saturating_sub(removed);
    }

    /// Returns the part kept for the next start of the router, given the commands sent so far.
    #[must_use]
    pub fn to_know(&self, sent: Sent) -> Known {
        let has_written = sent.writes > self.before.writes;
        Known { keys: self.keys.max(u64::from(has_written)), gone_by_ms: self.gone_by_ms }
    }

    /// Judges a new process with `now` keys. `is_held`: it was already found to have lost data.
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

/// Whether a process with `now` keys has lost data of the previous process with `before` keys. `is_held`: it was
/// already found to have lost data.
fn has_lost(before: u64, now: u64, is_held: bool) -> bool {
    let (part, of) = if is_held { BACK_FROM } else { LOST_BELOW };
    now.saturating_mul(of) < before.saturating_mul(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_loss_is_judged_by_the_fraction_of_keys() {
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
    fn only_keys_that_must_exist_count_as_missing() {
        let mut data = Data::met(holdings(0), 0, sent(0, 0));
        assert_eq!(data.judge(sent(0, 0), 0, 9, false), Return::Intact);
        assert_eq!(data.judge(sent(1, 0), 0, 9, false), Return::Lost(1), "it was written to");
        data.counted(holdings(1), 0, sent(1, 0));
        assert_eq!(data.judge(sent(2, 1), 0, 9, false), Return::Removed(1), "a queue that was consumed");
        assert_eq!(data.judge(sent(2, 0), 0, 9, false), Return::Lost(1));
        data.counted(holdings(100), 0, sent(102, 1));
        assert_eq!(data.judge(sent(102, 11), 0, 9, false), Return::Lost(100), "most were not removed");
        assert_eq!(data.judge(sent(102, ANY_NUMBER), 0, 9, false), Return::Removed(100), "a flush");
        // The count drops to zero.
        data.counted(holdings(0), 0, sent(103, 1));
        assert_eq!(
            data.judge(sent(103, 1), 0, 9, false),
            Return::Lost(1),
            "a write may have been in flight at the count"
        );
        data.counted(holdings(0), 0, sent(103, 1));
        assert_eq!(data.judge(sent(103, 1), 0, 9, false), Return::Intact);
    }

    #[test]
    fn keys_expired_in_the_meantime_do_not_count_as_missing() {
        let all = Holdings { keys: 500, expires: 500, avg_ttl_ms: 4000 };
        let data = Data::met(all, 1000, sent(0, 0));
        assert_eq!(data.judge(sent(0, 0), 0, 4999, false), Return::Lost(500));
        assert_eq!(data.judge(sent(0, 0), 0, 5000, false), Return::Expired);
        assert_eq!(data.judge(sent(0, 0), 0, 5000, true), Return::Lost(500), "it was away for less when it was found");
        let some = Holdings { expires: 499, ..all };
        assert_eq!(Data::met(some, 1000, sent(0, 0)).judge(sent(0, 0), 0, 9999, false), Return::Lost(500));
    }

    #[test]
    fn a_restarted_router_has_the_same_knowledge() {
        let data = Data::met(Holdings { keys: 3, expires: 3, avg_ttl_ms: 50 }, 10, sent(5, 5));
        let later = Data::known(data.to_know(sent(5, 5)));
        for at_ms in [59, 60] {
            assert_eq!(later.judge(sent(0, 0), 0, at_ms, false), data.judge(sent(5, 5), 0, at_ms, false), "at {at_ms}");
        }
    }
}
