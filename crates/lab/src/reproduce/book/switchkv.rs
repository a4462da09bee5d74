//! Rows of SwitchKV (NSDI 2016): tables 1 and 2, and figures 9 to 19. Figures 1 to 8 have no measurements.
//!
//! The paper emulates its backends by rate limits, so millions of queries per second (MQPS) are multiples of these
//! limits and do not depend on a machine.
//!
//! Most results are curves. Computed values follow from the settings in table 2, with keys placed at random (the median
//! of several placements). The rate is the greatest one with a loss of 1 %, because the paper's client keeps the loss
//! between 0.5 and 1 %. The tests have the computation.

use super::{Ours, Published, Row};

pub(super) fn rows() -> Vec<Row> {
    let mut rows = tables();
    rows.extend(small_cache());
    rows.extend(writes());
    rows.extend(latency());
    rows.extend(backends());
    rows.extend(changes());
    rows.extend(updates());
    rows
}

fn row(place: &'static str, quantity: impl Into<String>, published: Published) -> Row {
    Row { place, quantity: quantity.into(), published, ours: Ours::NotImplemented, reason: "" }
}

fn tables() -> Vec<Row> {
    vec![
        row(
            "Table 1",
            "machines that a query of an uncached key passes, look-aside : SwitchKV",
            Published::implied("\"three machine transits\" : \"a single machine transit\"", 3.0, 3.0),
        ),
        row(
            "Table 1",
            "machines that a query of an uncached key passes, look-through : SwitchKV",
            Published::implied("\"two machine transits\" : \"a single machine transit\"", 2.0, 2.0),
        ),
        row(
            "Table 1",
            "queries that the cache processes, look-aside or look-through : SwitchKV",
            Published::implied("2.6 (computed from table 2: all, or those of cached keys)", 2.6, 2.6),
        ),
        row(
            "Table 2",
            "queries of cached keys, Zipf 0.99, 10,000 of 10 billion keys cached",
            Published::implied("\"about 38 %\"; 38.6 % (computed from table 2)", 38.0, 38.6),
        ),
    ]
}

/// Section 4.2: 128 backends, and one cache node.
fn small_cache() -> Vec<Row> {
    vec![
        row(
            "Figure 9",
            "queries for the busiest backend : mean backend, Zipf 0.99, no cache",
            Published::implied("5.6 to 5.8 (computed from table 2)", 5.6, 5.8),
        ),
        row(
            "Figure 10",
            "throughput : limit of all backends, uniform keys, no cache",
            Published::implied("\"near the maximum capacity\"", 1.0, 1.0),
        ),
        row(
            "Figure 10",
            "throughput, Zipf 0.99, no cache",
            Published::implied("2.9 MQPS (computed from table 2)", 2.9, 2.9),
        ),
        row(
            "Figure 10",
            "throughput, Zipf 0.99, 10,000 items",
            Published::implied("21.2 MQPS (computed from table 2)", 21.2, 21.2),
        ),
        row(
            "Figure 10",
            "throughput, Zipf 0.99, 10,000 items : no cache",
            Published::implied("\"7×\"; 7.3 (computed from table 2)", 7.0, 7.3),
        ),
        row(
            "Figure 11",
            "throughput, Zipf 0.99, 200 items",
            Published::implied("16.4 MQPS (computed from table 2)", 16.4, 16.4),
        ),
        row(
            "Figure 11",
            "throughput, Zipf 0.99, 1000 items",
            Published::implied("18.3 MQPS (computed from table 2)", 18.3, 18.3),
        ),
    ]
}

/// Figure 12. The text has only the directions of its curves.
fn writes() -> Vec<Row> {
    let row = |kind: &str, percent: u32, text: &'static str, value: f64| {
        let quantity = format!("throughput, {percent} % writes of {kind} keys : no writes");
        row("Figure 12", quantity, Published::implied(text, value, value))
    };
    vec![
        row("Zipf 0.99", 20, "0.7 (computed from table 2)", 0.7),
        row("Zipf 0.99", 50, "0.31 (computed from table 2)", 0.31),
        row("Zipf 0.99", 100, "0.14 (computed from table 2)", 0.14),
        row("uniform", 20, "0.89 (computed from table 2)", 0.89),
        row("uniform", 50, "0.76 (computed from table 2)", 0.76),
        row("uniform", 100, "0.61 (computed from table 2)", 0.61),
    ]
}

/// Figure 13.
fn latency() -> Vec<Row> {
    vec![
        row(
            "Figure 13a",
            "latency of cached keys, look-aside and look-through : SwitchKV",
            Published::implied("\"the same latency for cache hits\"", 1.0, 1.0),
        ),
        row(
            "Figure 13b",
            "latency of uncached keys, look-aside : SwitchKV",
            Published::implied("\"up to … 3×\"; 3 (computed from the machine transits)", 3.0, 3.0),
        ),
        row(
            "Figure 13b",
            "latency of uncached keys, look-through : SwitchKV",
            Published::implied("2 (computed from the machine transits)", 2.0, 2.0),
        ),
        row(
            "Figure 13c",
            "mean latency, Zipf 0.99, on the scale from cached keys (0) to uncached ones (1)",
            Published::implied("\"within the range of cache hits and cache misses\"", 0.0, 1.0),
        ),
        row(
            "Figure 13c",
            "p99, Zipf 0.99 : uncached keys",
            Published::implied("\"about the same as cache miss latency\"", 1.0, 1.0),
        ),
        row(
            "Figure 13c",
            "greatest throughput, SwitchKV : look-aside and look-through",
            Published::implied("1.5 (computed from table 2 and \"the 14 million QPS mark\")", 1.5, 1.5),
        ),
    ]
}

/// Figure 14: limits of 50,000 queries per second for a backend, and 5 million for the cache. The number of items is
/// the best one up to 10,000 for each number of backends.
fn backends() -> Vec<Row> {
    vec![
        row(
            "Figure 14",
            "throughput, look-aside and look-through, 64 or more backends",
            Published::implied("5 MQPS, the limit of the cache", 5.0, 5.0),
        ),
        row(
            "Figure 14",
            "throughput, SwitchKV, 128 backends",
            Published::implied("10.6 MQPS (computed from the limits)", 10.6, 10.6),
        ),
        row(
            "Figure 14",
            "throughput, SwitchKV, 256 backends",
            Published::implied("17 to 18 MQPS (computed from the limits)", 17.0, 18.0),
        ),
        row(
            "Figure 14",
            "throughput, SwitchKV, 400 backends",
            Published::implied("23 to 25 MQPS (computed from the limits)", 23.0, 25.0),
        ),
        row(
            "Figure 14",
            "throughput, 400 backends, SwitchKV : look-aside and look-through",
            Published::implied("\"up to 5×\"; 4.6 to 5 (computed from the limits)", 4.6, 5.0),
        ),
        row(
            "Figure 14",
            "throughput, SwitchKV : limits of cache and backends, 400 backends",
            Published::implied("\"below the maximum system capacity\" only beyond 400", 1.0, 1.0),
        ),
    ]
}

/// Figures 15 to 17: the popularity of 200 keys changes at once.
fn changes() -> Vec<Row> {
    vec![
        row(
            "Figure 15",
            "throughput after hot-in : before, only periodic reports",
            Published::implied("\"less than half\"", 0.0, 0.5),
        ),
        row(
            "Figure 15",
            "time of recovery from hot-in, only periodic reports",
            Published::implied("\"1-2 seconds\"", 1.0, 2.0),
        ),
        row(
            "Figure 15",
            "throughput after hot-in, periodic and instant reports : only periodic ones",
            Published::implied("\"a lower performance drop\", above 1", 1.0, f64::INFINITY),
        ),
        row(
            "Figure 15",
            "time of recovery from hot-in, periodic and instant reports : only periodic ones",
            Published::implied("\"a much faster recovery\", below 1", 0.0, 1.0),
        ),
        row(
            "Figure 15",
            "throughput, each queried key is added to the cache : periodic and instant reports",
            Published::implied("\"very poor performance\", below 1", 0.0, 1.0),
        ),
        row(
            "Figure 16",
            "throughput with hot-out of 200 keys/s : without changes",
            Published::implied("\"near maximum\" (figure 19)", 1.0, 1.0),
        ),
        row(
            "Figure 16",
            "throughput with hot-out of 200 keys/s, only instant reports : periodic and instant ones",
            Published::implied("\"cannot achieve its maximum throughput\", below 1", 0.0, 1.0),
        ),
        row(
            "Figure 17",
            "throughput with 200 random changes/s : without changes",
            Published::implied("\"near maximum\" (figure 19)", 1.0, 1.0),
        ),
        row(
            "Figure 17",
            "throughput with 200 random changes/s, only one kind of reports : both",
            Published::implied("\"lower\", below 1", 0.0, 1.0),
        ),
    ]
}

/// Figures 18 and 19: the switch updates 400 rules per second.
fn updates() -> Vec<Row> {
    vec![
        row(
            "Figure 18",
            "time to add 600 new keys to the cache, with a rule buffer",
            Published::implied("\"within 1.5 seconds\"", 1.5, 1.5),
        ),
        row(
            "Figure 18",
            "time to add 600 new keys to the cache, without a rule buffer : with it",
            Published::implied("\"would double\"", 2.0, 2.0),
        ),
        row(
            "Figure 19",
            "throughput with up to 200 changes/s, random and hot-out : without changes",
            Published::implied("\"near maximum\"", 1.0, 1.0),
        ),
        row(
            "Figure 19",
            "throughput with 200 changes/s, hot-in : hot-out",
            Published::implied("\"drops quickly under increasing hot-in changes\", below 1", 0.0, 1.0),
        ),
        row(
            "Figure 19",
            "throughput with more than 10,000 changes/s, each pattern : hot-in",
            Published::implied("\"similar throughput\"", 1.0, 1.0),
        ),
        row(
            "Figure 19",
            "throughput with more than 10,000 changes/s : no cache",
            Published::implied("\"3×\"", 3.0, 3.0),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use switchyard_bench::random::Rng;

    use super::super::super::spread::Spread;
    use super::*;

    const KEYS: u64 = 10_000_000_000;
    const ZIPF: f64 = 0.99;
    /// Number of the hottest keys that have a backend each. The others are spread evenly over all backends.
    const PLACED: u64 = 10_000;
    /// Number of placements, because the backends of the hottest keys decide about the busiest backend.
    const PLACEMENTS: u64 = 9;

    fn weight(rank: u64) -> f64 {
        (rank as f64).powf(-ZIPF)
    }

    /// Returns the share of the queries that the hottest keys receive.
    fn share_of_hottest(ranks: u64) -> f64 {
        let integral = |rank: u64| (rank as f64 + 0.5).powf(1.0 - ZIPF) / (1.0 - ZIPF);
        let sum = |ranks: u64| {
            let exact = ranks.min(PLACED);
            (1..=exact).map(weight).sum::<f64>() + integral(ranks) - integral(exact)
        };
        sum(ranks) / sum(KEYS)
    }

    /// Settings of an experiment, as in table 2.
    #[derive(Clone, Copy)]
    struct Setting {
        backends: usize,
        /// Limit of a backend, in MQPS.
        limit: f64,
        items: u64,
        writes: f64,
        /// Whether writes have the same popularity as reads; otherwise all keys are alike.
        are_writes_skewed: bool,
    }

    const DEFAULT: Setting =
        Setting { backends: 128, limit: 0.1, items: 10_000, writes: 0.0, are_writes_skewed: false };

    impl Setting {
        /// Returns the median over all placements of a value of the shares of all queries that backends receive.
        fn median(&self, value: impl Fn(&[f64]) -> f64) -> f64 {
            let (reads, skewed) = (1.0 - self.writes, if self.are_writes_skewed { self.writes } else { 0.0 });
            let hottest = share_of_hottest(1);
            let placed = (1..=PLACED).map(|rank| {
                let uncached = if rank > self.items { reads } else { 0.0 };
                (uncached + skewed) * weight(rank) * hottest
            });
            let placed: Vec<f64> = placed.collect();
            let others = (reads + skewed) * (1.0 - share_of_hottest(PLACED)) + self.writes - skewed;
            let values = (0..PLACEMENTS).map(|seed| {
                let mut rng = Rng::new(seed);
                let mut shares = vec![others / self.backends as f64; self.backends];
                for share in &placed {
                    shares[rng.below(self.backends as u64) as usize] += share;
                }
                value(&shares)
            });
            Spread::of(values).expect("values").median
        }

        /// Returns the greatest rate, in MQPS, with a loss of 1 % at the backends.
        fn throughput(&self) -> f64 {
            self.median(|shares| {
                let (mut least, mut most) = (0.0, 1000.0);
                for _ in 0..50 {
                    let rate = f64::midpoint(least, most);
                    let lost: f64 = shares.iter().map(|share| (share * rate - self.limit).max(0.0)).sum();
                    if lost <= 0.01 * rate {
                        least = rate;
                    } else {
                        most = rate;
                    }
                }
                least
            })
        }
    }

    /// Asserts that a value is in the published range of this row, within 4 %, because the rows have two or three
    /// digits and the placements differ.
    fn assert_published(place: &str, quantity: &str, value: f64) {
        let rows = rows();
        let row = rows.iter().find(|row| row.place == place && row.quantity.starts_with(quantity)).expect("a row");
        let (least, most) = row.published.range.expect("a number");
        assert!(least * 0.96 <= value && value <= most * 1.04, "{place}, {quantity}: {value}");
    }

    #[test]
    fn computed_values_follow_from_the_default_settings() {
        let hits = share_of_hottest(DEFAULT.items);
        assert_published("Table 1", "queries that the cache", 1.0 / hits);
        assert_published("Table 2", "queries of cached keys", hits * 100.0);
        let none = Setting { items: 0, ..DEFAULT };
        let busiest = none.median(|shares| shares.iter().copied().fold(0.0, f64::max));
        assert_published("Figure 9", "queries for the busiest backend", busiest * DEFAULT.backends as f64);
        let (without, with) = (none.throughput(), DEFAULT.throughput());
        assert_published("Figure 10", "throughput, Zipf 0.99, no cache", without);
        assert_published("Figure 10", "throughput, Zipf 0.99, 10,000 items", with);
        assert_published("Figure 10", "throughput, Zipf 0.99, 10,000 items : no cache", with / without);
        for items in [200, 1000] {
            let throughput = Setting { items, ..DEFAULT }.throughput();
            assert_published("Figure 11", &format!("throughput, Zipf 0.99, {items} items"), throughput);
        }
        for (kind, are_writes_skewed) in [("Zipf 0.99", true), ("uniform", false)] {
            for percent in [20, 50, 100] {
                let setting = Setting { writes: f64::from(percent) / 100.0, are_writes_skewed, ..DEFAULT };
                let quantity = format!("throughput, {percent} % writes of {kind} keys");
                assert_published("Figure 12", &quantity, setting.throughput() / with);
            }
        }
        assert_published("Figure 13c", "greatest throughput", with / 14.0);
    }

    #[test]
    fn computed_values_by_the_number_of_backends_follow_from_the_limits() {
        const CACHE: f64 = 5.0;
        let best = |backends: usize| {
            let of = |items: u64| {
                let setting = Setting { backends, limit: 0.05, items, ..DEFAULT };
                setting.throughput().min(CACHE / share_of_hottest(items))
            };
            [100, 140, 200, 500, 700, 1000, 10_000].map(of).into_iter().fold(0.0, f64::max)
        };
        for backends in [128, 256, 400] {
            assert_published("Figure 14", &format!("throughput, SwitchKV, {backends} backends"), best(backends));
        }
        assert_published("Figure 14", "throughput, 400 backends", best(400) / CACHE);
    }
}
