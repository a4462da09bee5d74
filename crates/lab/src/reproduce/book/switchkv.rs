//! Rows of SwitchKV (NSDI 2016): tables 1 and 2, and figures 9 to 19. Figures 1 to 8 have no measurements.
//!
//! The paper emulates its backends by rate limits, so millions of queries per second (MQPS) are multiples of these
//! limits and do not depend on a machine.
//!
//! Most results are curves. Computed values follow from the settings in table 2, with keys placed at random (the median
//! of several placements). The rate is the greatest one with a loss of 1 %, because the paper's client keeps the loss
//! between 0.5 and 1 %. The tests have the computation.

use switchyard_sim::fleet::switchkv::{Outcome, Written};

use super::super::spread::Spread;
use super::super::switchkv::changes::{
    BOTH, BUFFER, EVERY_KEY, HOT_IN, INSTANT, NO_BUFFER, PATTERNS, PERIODIC, UNCHANGED, drops, recoveries,
};
use super::super::switchkv::steady::{ARCHITECTURES, CACHE, NO_CACHE, written};
use super::super::switchkv::{Measured, at, changes, of_run, steady};
use super::{Better, Measure, Ours, Published, ResultSet, Row, row};

const LOSS: &str =
    "The simulated sender raises its rate up to a loss of 0.5 %, and the computed rate has a loss of 1 %.";
const BUSIEST: &str =
    "The keys are placed at random, so the busiest backend loses queries before all backends are used.";
const SERVED: &str =
    "The computed rate counts sent queries, and the simulated one served queries: 0.5 to 1 % are lost.";

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

fn measured(
    experiment: &'static str,
    page: &'static str,
    unit: &'static str,
    better: Better,
    values: impl Fn(&ResultSet) -> Vec<f64> + 'static,
) -> Ours {
    Ours::Measured(Measure { experiment, unit, better, page, values: Box::new(values) })
}

/// A value of the cache whose content stays.
fn of_steady(unit: &'static str, better: Better, values: impl Fn(&ResultSet) -> Vec<f64> + 'static) -> Ours {
    measured(steady::EXPERIMENT, "results/switchkv.md#steady-popularity", unit, better, values)
}

/// A value under changing popularity.
fn of_changes(unit: &'static str, better: Better, values: impl Fn(&ResultSet) -> Vec<f64> + 'static) -> Ours {
    measured(changes::EXPERIMENT, "results/switchkv.md#changing-popularity", unit, better, values)
}

/// Names of the architectures that send all reads to the cache node.
fn others() -> impl Iterator<Item = &'static str> {
    ARCHITECTURES.into_iter().skip(1).map(|(name, _)| name)
}

const SWITCHKV: &str = ARCHITECTURES[0].0;
const LOOK_ASIDE: &str = ARCHITECTURES[1].0;
const LOOK_THROUGH: &str = ARCHITECTURES[2].0;

/// Values of each repetition.
fn each(measured: &[Measured], value: impl Fn(&Outcome) -> f64) -> Vec<f64> {
    measured.iter().map(|measured| value(&measured.outcome)).collect()
}

/// Ratios of two runs, for each repetition.
fn ratios(these: &[Measured], those: &[Measured], value: impl Fn(&Outcome) -> f64) -> Vec<f64> {
    these.iter().zip(those).map(|(this, that)| value(&this.outcome) / value(&that.outcome)).collect()
}

fn throughput(outcome: &Outcome) -> f64 {
    outcome.throughput / 1e6
}

fn transits(outcome: &Outcome) -> f64 {
    outcome.transits.0
}

/// Ratio of an architecture to SwitchKV in a run of figure 13.
fn to_switchkv(figure: &'static str, name: &'static str, value: fn(&Outcome) -> f64) -> Ours {
    of_steady("", Better::Neither, move |set| ratios(&of_run(set, figure, name), &of_run(set, figure, SWITCHKV), value))
}

/// Throughput in MQPS of a run of figure 10 or 11.
fn mqps_at(figure: &'static str, name: &'static str, position: f64) -> Ours {
    of_steady(" MQPS", Better::More, move |set| each(&at(set, figure, name, position), throughput))
}

fn tables() -> Vec<Row> {
    vec![
        row(
            "Table 1",
            "machines that a query of an uncached key passes, look-aside : SwitchKV",
            Published::implied("\"three machine transits\" : \"a single machine transit\"", 3.0, 3.0),
            to_switchkv("13b", LOOK_ASIDE, transits),
            "",
        ),
        row(
            "Table 1",
            "machines that a query of an uncached key passes, look-through : SwitchKV",
            Published::implied("\"two machine transits\" : \"a single machine transit\"", 2.0, 2.0),
            to_switchkv("13b", LOOK_THROUGH, transits),
            "",
        ),
        row(
            "Table 1",
            "queries that the cache processes, look-aside or look-through : SwitchKV",
            Published::implied("2.6 (computed from table 2: all, or those of cached keys)", 2.6, 2.6),
            of_steady("", Better::Neither, |set| {
                let of = |name| of_run(set, "13c", name);
                others().flat_map(|name| ratios(&of(name), &of(SWITCHKV), |outcome| outcome.at_cache)).collect()
            }),
            "",
        ),
        row(
            "Table 2",
            "queries of cached keys, Zipf 0.99, 10,000 of 10 billion keys cached",
            Published::implied("\"about 38 %\"; 38.6 % (computed from table 2)", 38.0, 38.6),
            of_steady(" %", Better::Neither, |set| each(&at(set, "10", CACHE, 0.99), |outcome| 100.0 * outcome.hits)),
            "",
        ),
    ]
}

/// Section 5.2: 128 backends, and one cache node.
fn small_cache() -> Vec<Row> {
    vec![
        row(
            "Figure 9",
            "queries for the busiest backend : mean backend, Zipf 0.99, no cache",
            Published::implied("5.6 to 5.8 (computed from table 2)", 5.6, 5.8),
            of_steady("", Better::Neither, |set| each(&at(set, "10", NO_CACHE, 0.99), |outcome| outcome.busiest)),
            "",
        ),
        row(
            "Figure 10",
            "throughput : limit of all backends, uniform keys, no cache",
            Published::implied("\"near the maximum capacity\"", 1.0, 1.0),
            of_steady("", Better::More, |set| {
                each(&at(set, "10", NO_CACHE, 0.0), |outcome| throughput(outcome) / 12.8)
            }),
            "",
        ),
        row(
            "Figure 10",
            "throughput, Zipf 0.99, no cache",
            Published::implied("2.9 MQPS (computed from table 2)", 2.9, 2.9),
            mqps_at("10", NO_CACHE, 0.99),
            SERVED,
        ),
        row(
            "Figure 10",
            "throughput, Zipf 0.99, 10,000 items",
            Published::implied("21.2 MQPS (computed from table 2)", 21.2, 21.2),
            mqps_at("10", CACHE, 0.99),
            SERVED,
        ),
        row(
            "Figure 10",
            "throughput, Zipf 0.99, 10,000 items : no cache",
            Published::implied("\"7×\"; 7.3 (computed from table 2)", 7.0, 7.3),
            of_steady("", Better::More, |set| {
                ratios(&at(set, "10", CACHE, 0.99), &at(set, "10", NO_CACHE, 0.99), throughput)
            }),
            "",
        ),
        row(
            "Figure 11",
            "throughput, Zipf 0.99, 200 items",
            Published::implied("16.4 MQPS (computed from table 2)", 16.4, 16.4),
            mqps_at("11", "Zipf 0.99", 200.0),
            SERVED,
        ),
        row(
            "Figure 11",
            "throughput, Zipf 0.99, 1000 items",
            Published::implied("18.3 MQPS (computed from table 2)", 18.3, 18.3),
            mqps_at("11", "Zipf 0.99", 1000.0),
            SERVED,
        ),
    ]
}

/// Figure 12. The text has only the directions of its curves.
fn writes() -> Vec<Row> {
    let row = |kind: &str, keys: Written, percent: u32, text: &'static str, value: f64| {
        let quantity = format!("throughput, {percent} % writes of {kind} keys : no writes");
        let ours = of_steady("", Better::More, move |set| {
            let of = |percent: u32| at(set, "12", written(keys), f64::from(percent));
            ratios(&of(percent), &of(0), throughput)
        });
        row("Figure 12", quantity, Published::implied(text, value, value), ours, LOSS)
    };
    let (skewed, uniform) = (Written::Skewed, Written::Uniform);
    vec![
        row("Zipf 0.99", skewed, 20, "0.7 (computed from table 2)", 0.7),
        row("Zipf 0.99", skewed, 50, "0.31 (computed from table 2)", 0.31),
        row("Zipf 0.99", skewed, 100, "0.14 (computed from table 2)", 0.14),
        row("uniform", uniform, 20, "0.89 (computed from table 2)", 0.89),
        row("uniform", uniform, 50, "0.76 (computed from table 2)", 0.76),
        row("uniform", uniform, 100, "0.61 (computed from table 2)", 0.61),
    ]
}

/// Figure 13. Latencies are machines that a query passes.
fn latency() -> Vec<Row> {
    vec![
        row(
            "Figure 13a",
            "latency of cached keys, look-aside and look-through : SwitchKV, in machines",
            Published::implied("\"the same latency for cache hits\"", 1.0, 1.0),
            of_steady("", Better::Neither, |set| {
                let of = |name| of_run(set, "13a", name);
                others().flat_map(|name| ratios(&of(name), &of(SWITCHKV), transits)).collect()
            }),
            "",
        ),
        row(
            "Figure 13b",
            "latency of uncached keys, look-aside : SwitchKV, in machines",
            Published::implied("\"up to … 3×\"; 3 (computed from the machine transits)", 3.0, 3.0),
            to_switchkv("13b", LOOK_ASIDE, transits),
            "",
        ),
        row(
            "Figure 13b",
            "latency of uncached keys, look-through : SwitchKV, in machines",
            Published::implied("2 (computed from the machine transits)", 2.0, 2.0),
            to_switchkv("13b", LOOK_THROUGH, transits),
            "",
        ),
        row(
            "Figure 13c",
            "mean latency, Zipf 0.99, on the scale from cached keys (0) to uncached ones (1), look-aside and look-through",
            Published::implied("\"within the range of cache hits and cache misses\"", 0.0, 1.0),
            of_steady("", Better::Neither, |set| {
                let of = |figure, name| each(&of_run(set, figure, name), transits);
                let scale = |name| {
                    let ends = of("13a", name).into_iter().zip(of("13b", name));
                    let means = ends.zip(of("13c", name));
                    means.map(|((hit, miss), mean)| (mean - hit) / (miss - hit)).collect::<Vec<f64>>()
                };
                others().flat_map(scale).collect()
            }),
            "",
        ),
        row(
            "Figure 13c",
            "p99, Zipf 0.99 : uncached keys, each architecture, in machines",
            Published::implied("\"about the same as cache miss latency\"", 1.0, 1.0),
            of_steady("", Better::Neither, |set| {
                let p99 = |figure, name| each(&of_run(set, figure, name), |outcome| outcome.transits.1);
                let pairs =
                    ARCHITECTURES.into_iter().flat_map(|(name, _)| p99("13c", name).into_iter().zip(p99("13b", name)));
                pairs.map(|(skewed, uncached)| skewed / uncached).collect()
            }),
            "",
        ),
        row(
            "Figure 13c",
            "greatest throughput, SwitchKV : look-aside and look-through",
            Published::implied("1.5 (computed from table 2 and \"the 14 million QPS mark\")", 1.5, 1.5),
            of_steady("", Better::More, |set| {
                let of = |name| of_run(set, "13c", name);
                others().flat_map(|name| ratios(&of(SWITCHKV), &of(name), throughput)).collect()
            }),
            "",
        ),
    ]
}

/// Figure 14: limits of 50,000 queries per second for a backend, and 5 million for the cache. The number of items is
/// the best one up to 10,000 for each number of backends.
fn backends() -> Vec<Row> {
    /// Architectures that send all reads to the cache node, with 64 or more backends.
    fn limited(set: &ResultSet) -> Vec<f64> {
        let many = |what: &serde_json::Value| {
            what["figure"] == "14" && what["name"] != SWITCHKV && what["at"].as_f64() >= Some(64.0)
        };
        set.of::<Measured>(many).iter().flatten().map(|measured| throughput(&measured.outcome)).collect()
    }
    let with = |backends: f64| {
        of_steady(" MQPS", Better::More, move |set| each(&at(set, "14", SWITCHKV, backends), throughput))
    };
    vec![
        row(
            "Figure 14",
            "throughput, look-aside and look-through, 64 or more backends",
            Published::implied("5 MQPS, the limit of the cache", 5.0, 5.0),
            of_steady(" MQPS", Better::Neither, limited),
            SERVED,
        ),
        row(
            "Figure 14",
            "throughput, SwitchKV, 128 backends",
            Published::implied("10.6 MQPS (computed from the limits)", 10.6, 10.6),
            with(128.0),
            SERVED,
        ),
        row(
            "Figure 14",
            "throughput, SwitchKV, 256 backends",
            Published::implied("17 to 18 MQPS (computed from the limits)", 17.0, 18.0),
            with(256.0),
            SERVED,
        ),
        row(
            "Figure 14",
            "throughput, SwitchKV, 400 backends",
            Published::implied("23 to 25 MQPS (computed from the limits)", 23.0, 25.0),
            with(400.0),
            SERVED,
        ),
        row(
            "Figure 14",
            "throughput, 400 backends, SwitchKV : look-aside and look-through",
            Published::implied("\"up to 5×\"; 4.6 to 5 (computed from the limits)", 4.6, 5.0),
            of_steady("", Better::More, |set| {
                let of = |name| at(set, "14", name, 400.0);
                others().flat_map(|name| ratios(&of(SWITCHKV), &of(name), throughput)).collect()
            }),
            "",
        ),
        row(
            "Figure 14",
            "throughput, SwitchKV : limits of cache and backends, 400 backends",
            Published::implied("\"below the maximum system capacity\" only beyond 400", 1.0, 1.0),
            of_steady("", Better::More, |set| {
                each(&at(set, "14", SWITCHKV, 400.0), |outcome| throughput(outcome) / 25.0)
            }),
            BUSIEST,
        ),
    ]
}

/// Values of the changes in a run of figure 15.
fn of_hot_in(set: &ResultSet, name: &str, values: fn(&Outcome, f64) -> Vec<f64>) -> Vec<f64> {
    of_run(set, "15", name).iter().flat_map(|measured| values(&measured.outcome, HOT_IN.1)).collect()
}

/// Ratios for each change of figure 15, of both kinds of reports to the periodic ones.
fn both_to_periodic(values: fn(&Outcome, f64) -> Vec<f64>) -> impl Fn(&ResultSet) -> Vec<f64> + 'static {
    move |set| {
        let pairs = of_hot_in(set, BOTH, values).into_iter().zip(of_hot_in(set, PERIODIC, values));
        pairs.map(|(both, periodic)| both / periodic).collect()
    }
}

/// Mean throughput from a time on, of the runs of a figure with this name.
fn late(set: &ResultSet, figure: &str, name: &str, from: f64) -> Vec<f64> {
    each(&of_run(set, figure, name), |outcome| outcome.mean(from, f64::INFINITY))
}

/// Throughput without changes.
fn unchanged(set: &ResultSet) -> Vec<f64> {
    each(&of_run(set, "none", UNCHANGED), |outcome| outcome.throughput)
}

fn quotients(these: Vec<f64>, those: Vec<f64>) -> Vec<f64> {
    these.into_iter().zip(those).map(|(this, that)| this / that).collect()
}

/// Seconds from which on figures 16 and 17 count. At 50 s none of the first cached keys is left (section 5.4).
const LATE: (f64, f64) = (50.0, 10.0);

/// Figures 15 to 17: the popularity of 200 keys changes at once.
fn changes() -> Vec<Row> {
    vec![
        row(
            "Figure 15",
            "throughput in the second after hot-in : before, only periodic reports",
            Published::implied("\"less than half\"", 0.0, 0.5),
            of_changes("", Better::More, |set| of_hot_in(set, PERIODIC, drops)),
            "",
        ),
        row(
            "Figure 15",
            "time of recovery to 90 % from hot-in, only periodic reports",
            Published::implied("\"1-2 seconds\"", 1.0, 2.0),
            of_changes(" s", Better::Less, |set| of_hot_in(set, PERIODIC, recoveries)),
            "",
        ),
        row(
            "Figure 15",
            "throughput in the second after hot-in, periodic and instant reports : only periodic ones",
            Published::implied("\"a lower performance drop\", above 1", 1.0, f64::INFINITY),
            of_changes("", Better::More, both_to_periodic(drops)),
            "",
        ),
        row(
            "Figure 15",
            "time of recovery from hot-in, periodic and instant reports : only periodic ones",
            Published::implied("\"a much faster recovery\", below 1", 0.0, 1.0),
            of_changes("", Better::Less, both_to_periodic(recoveries)),
            "",
        ),
        row(
            "Figure 15",
            "throughput, each queried key is added to the cache : periodic and instant reports",
            Published::implied("\"very poor performance\", below 1", 0.0, 1.0),
            of_changes("", Better::Neither, |set| {
                ratios(&of_run(set, "15", EVERY_KEY), &of_run(set, "15", BOTH), throughput)
            }),
            "",
        ),
        row(
            "Figure 16",
            "throughput with hot-out of 200 keys/s : without changes",
            Published::implied("\"near maximum\" (figure 19)", 1.0, 1.0),
            of_changes("", Better::More, |set| quotients(late(set, "16", BOTH, LATE.0), unchanged(set))),
            "",
        ),
        row(
            "Figure 16",
            "throughput with hot-out of 200 keys/s, only instant reports : periodic and instant ones",
            Published::implied("\"cannot achieve its maximum throughput\", below 1", 0.0, 1.0),
            of_changes("", Better::Neither, |set| {
                quotients(late(set, "16", INSTANT, LATE.0), late(set, "16", BOTH, LATE.0))
            }),
            "",
        ),
        row(
            "Figure 17",
            "throughput with 200 random changes/s : without changes",
            Published::implied("\"near maximum\" (figure 19)", 1.0, 1.0),
            of_changes("", Better::More, |set| quotients(late(set, "17", BOTH, LATE.1), unchanged(set))),
            "",
        ),
        row(
            "Figure 17",
            "throughput with 200 random changes/s, only one kind of reports : both",
            Published::implied("\"lower\", below 1", 0.0, 1.0),
            of_changes("", Better::Neither, |set| {
                let both = || late(set, "17", BOTH, LATE.1);
                [PERIODIC, INSTANT]
                    .into_iter()
                    .flat_map(|name| quotients(late(set, "17", name, LATE.1), both()))
                    .collect()
            }),
            "",
        ),
    ]
}

/// Mean times in which the new keys of figure 18 are cached, for each repetition.
fn filled(set: &ResultSet, name: &str) -> Vec<f64> {
    let of = |measured: &Measured| -> Option<f64> {
        let times: Option<Vec<f64>> = measured.outcome.filled.iter().copied().collect();
        times.filter(|times| !times.is_empty()).map(|times| times.iter().sum::<f64>() / times.len() as f64)
    };
    of_run(set, "18", name).iter().filter_map(of).collect()
}

/// Throughput of a run of figure 19.
fn by_rate(set: &ResultSet, pattern: &str, keys: f64) -> Vec<f64> {
    each(&at(set, "19", pattern, keys), |outcome| outcome.throughput)
}

/// Figures 18 and 19: the switch updates 400 rules per second.
fn updates() -> Vec<Row> {
    const HOT: &str = PATTERNS[0].0;
    const OUT: &str = PATTERNS[1].0;
    const RANDOM: &str = PATTERNS[2].0;
    vec![
        row(
            "Figure 18",
            "time to add 600 new keys to the cache, with a rule buffer",
            Published::implied("\"within 1.5 seconds\"", 1.5, 1.5),
            of_changes(" s", Better::Less, |set| filled(set, BUFFER)),
            "",
        ),
        row(
            "Figure 18",
            "time to add 600 new keys to the cache, without a rule buffer : with it",
            Published::implied("\"would double\"", 2.0, 2.0),
            of_changes("", Better::Neither, |set| quotients(filled(set, NO_BUFFER), filled(set, BUFFER))),
            "",
        ),
        row(
            "Figure 19",
            "throughput with up to 200 changes/s, random and hot-out : without changes",
            Published::implied("\"near maximum\"", 1.0, 1.0),
            of_changes("", Better::More, |set| {
                let few = [10.0, 50.0, 100.0, 200.0];
                let all = few.into_iter().flat_map(|rate| [OUT, RANDOM].map(|pattern| by_rate(set, pattern, rate)));
                all.flat_map(|values| quotients(values, unchanged(set))).collect()
            }),
            "",
        ),
        row(
            "Figure 19",
            "throughput with 200 changes/s, hot-in : hot-out",
            Published::implied("\"drops quickly under increasing hot-in changes\", below 1", 0.0, 1.0),
            of_changes("", Better::Neither, |set| quotients(by_rate(set, HOT, 200.0), by_rate(set, OUT, 200.0))),
            "",
        ),
        row(
            "Figure 19",
            "throughput with 20,000 changes/s, each pattern : hot-in",
            Published::implied("\"similar throughput\"", 1.0, 1.0),
            of_changes("", Better::Neither, |set| {
                let of = |pattern| by_rate(set, pattern, 20_000.0);
                [OUT, RANDOM].into_iter().flat_map(|pattern| quotients(of(pattern), of(HOT))).collect()
            }),
            "",
        ),
        row(
            "Figure 19",
            "throughput with 20,000 changes/s : no cache",
            Published::implied("\"3×\"", 3.0, 3.0),
            of_changes("", Better::More, |set| {
                let all = [HOT, OUT, RANDOM].into_iter().flat_map(|pattern| by_rate(set, pattern, 20_000.0));
                let without = each(&of_run(set, "none", NO_CACHE), |outcome| outcome.throughput);
                let without = Spread::of(without).map_or(f64::NAN, |spread| spread.median);
                all.map(|rate| rate / without).collect()
            }),
            "",
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
