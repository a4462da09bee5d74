//! Results of the papers, as far as their texts contain them: data, each with its place in the paper.
//!
//! Their machines differ, so only ratios are compared. Values that are only in a figure are left out.

/// A protocol of NetMigrate's evaluation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Row {
    /// "Source": Slacker, Remus.
    Source,
    /// Rocksteady.
    Rocksteady,
    /// Fulva.
    Fulva,
    /// NetMigrate, set for throughput.
    NetMigrate,
}

/// One protocol in one cell of the grid.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Numbers {
    /// Thousands of queries per second (NetMigrate, FAST 2024, Table 5).
    pub(super) throughput: f64,
    /// Milliseconds (Table 6).
    pub(super) p50_ms: f64,
    /// Milliseconds (Table 7).
    pub(super) p99_ms: f64,
    /// Percent of the queries' traffic (Table 4, column C).
    pub(super) extra_clients: f64,
    /// Percent of the queries' traffic (Table 4, column S).
    pub(super) extra_servers: f64,
}

/// Percent of writes, in the order of the tables. Section 6.2 has 5 %, in figures.
pub(super) const WRITES: [f64; 4] = [0.0, 10.0, 20.0, 30.0];
/// Shares of a processor for our source, which stand for 100, 70 and 40 % of the paper's budget.
pub(super) const SHARES: [f64; 3] = [0.25, 0.175, 0.1];

/// The three budgets of the source, for each share of writes.
type Grid = [[f64; 3]; 4];

const THROUGHPUT: [Grid; 4] = [
    [[445.66, 289.16, 152.30], [417.98, 289.17, 145.96], [424.72, 266.27, 140.38], [412.77, 266.51, 142.25]],
    [[113.17, 114.52, 67.73], [119.11, 125.15, 77.53], [133.76, 132.34, 84.07], [147.79, 145.57, 99.28]],
    [[239.68, 251.77, 201.73], [262.27, 278.99, 243.49], [244.15, 296.81, 253.36], [241.86, 247.76, 261.79]],
    [[584.41, 459.58, 297.36], [554.67, 446.83, 290.83], [549.70, 427.67, 286.42], [559.92, 420.09, 278.75]],
];
#[expect(clippy::approx_constant, reason = "3.14 is a time here")]
const P50: [Grid; 4] = [
    [[3.38, 1.09, 1.40], [3.65, 1.23, 2.38], [3.55, 1.31, 1.33], [3.62, 1.21, 1.28]],
    [[3.43, 3.15, 2.97], [3.30, 3.14, 2.45], [2.83, 2.70, 2.19], [2.81, 2.51, 1.92]],
    [[3.11, 2.07, 1.93], [2.58, 2.10, 1.80], [2.72, 2.09, 1.80], [2.79, 2.38, 1.82]],
    [[2.12, 1.20, 1.10], [2.26, 1.11, 1.05], [2.27, 1.05, 1.08], [2.20, 0.97, 1.05]],
];
const P99: [Grid; 4] = [
    [[6.40, 29.32, 62.11], [6.83, 30.05, 66.01], [7.19, 31.03, 68.22], [8.11, 30.31, 63.29]],
    [[491.86, 504.92, 864.89], [368.89, 425.64, 973.53], [331.37, 346.02, 866.59], [213.79, 227.03, 795.49]],
    [[21.75, 23.34, 48.75], [21.04, 24.59, 42.36], [18.51, 23.42, 46.06], [21.50, 22.65, 38.79]],
    [[9.21, 23.09, 48.31], [7.73, 21.74, 33.89], [8.38, 19.19, 41.28], [7.50, 15.89, 34.75]],
];
const EXTRA_CLIENTS: [Grid; 4] = [
    [[0.0; 3]; 4],
    [[12.5, 12.6, 11.3], [10.9, 10.4, 9.3], [8.6, 8.6, 7.5], [6.9, 6.8, 5.5]],
    [[58.1, 60.9, 50.3], [49.4, 55.0, 46.6], [43.6, 58.2, 53.4], [36.9, 39.2, 44.1]],
    [[0.025, 0.031, 0.05], [0.005, 0.005, 0.005], [0.004, 0.004, 0.004], [0.003, 0.003, 0.003]],
];
const EXTRA_SERVERS: [Grid; 4] = [
    [[0.0; 3], [10.5, 10.2, 9.8], [20.7, 20.6, 20.5], [31.3, 30.9, 30.6]],
    [[0.0; 3]; 4],
    [[0.0; 3]; 4],
    [[3.11e-5, 3.39e-5, 2.65e-5], [3.27e-5, 2.69e-5, 1.05e-5], [1.36e-5, 3.74e-5, 2.37e-5], [1.71e-5, 2.88e-5, 2.1e-5]],
];

/// Returns the values of NetMigrate's tables for this cell; `None` if they have no such cell.
pub(super) fn numbers(row: Row, writes_percent: f64, source_share: Option<f64>) -> Option<Numbers> {
    let writes = WRITES.iter().position(|one| *one == writes_percent)?;
    let share = SHARES.iter().position(|one| Some(*one) == source_share)?;
    let of = |table: &[Grid; 4]| table[row as usize][writes][share];
    Some(Numbers {
        throughput: of(&THROUGHPUT),
        p50_ms: of(&P50),
        p99_ms: of(&P99),
        extra_clients: of(&EXTRA_CLIENTS),
        extra_servers: of(&EXTRA_SERVERS),
    })
}

/// A filter or a number of groups in NetMigrate's tables 2 and 3: thousands of queries per second, milliseconds, and
/// percent of the queries' traffic.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Tuned {
    pub(super) throughput: f64,
    pub(super) p50_ms: f64,
    pub(super) p99_ms: f64,
    pub(super) extra_clients: f64,
}

const fn tuned(throughput: f64, p50_ms: f64, p99_ms: f64, extra_clients: f64) -> Tuned {
    Tuned { throughput, p50_ms, p99_ms, extra_clients }
}

/// By bytes of the counting filter, with 32 bits for each element (Table 2).
pub(super) const BY_COUNTING: [(u32, Tuned); 4] = [
    (64, tuned(572.7, 0.92, 7.23, 0.30)),
    (128, tuned(564.1, 1.13, 7.83, 0.06)),
    (32, tuned(362.5, 0.89, 26.5, 1.37)),
    (16, tuned(197.5, 1.15, 190.2, 3.73)),
];

/// By bits for each element, with a counting filter of 64 B (Table 2).
pub(super) const BY_BITS: [(u32, Tuned); 6] = [
    (32, tuned(572.7, 0.92, 7.23, 0.30)),
    (16, tuned(569.6, 0.94, 5.61, 0.30)),
    (8, tuned(573.2, 0.93, 4.47, 0.30)),
    (4, tuned(563.6, 0.95, 5.42, 0.30)),
    (2, tuned(523.8, 0.93, 4.38, 0.47)),
    (1, tuned(495.8, 1.01, 5.73, 0.65)),
];

/// By the number of groups, as a power of two (Table 3). The table has the keys per group, of 2^28 keys; the number of
/// groups means the same with fewer keys.
pub(super) const BY_GROUPS: [(u32, Tuned); 8] = [
    (17, tuned(567.0, 2.33, 8.46, 0.0060)),
    (14, tuned(599.0, 1.05, 5.19, 0.0165)),
    (10, tuned(573.0, 0.95, 10.97, 0.2613)),
    (9, tuned(561.0, 0.91, 3.82, 0.3733)),
    (8, tuned(521.0, 0.9, 3.63, 0.4858)),
    (7, tuned(494.0, 0.9, 4.01, 0.66)),
    (4, tuned(255.0, 0.94, 86.27, 2.76)),
    (3, tuned(180.0, 1.07, 250.52, 4.05)),
];

/// Ratio of the losses without and with the filter (Bloom telemetry): mean, minimum and maximum of a figure.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Improvement {
    pub(super) mean: f64,
    pub(super) least: f64,
    pub(super) most: f64,
}

/// Figure 1: Zipf 0.9, writes 1 to 5 % (section 3.1).
pub(super) const BLOOM_BY_WRITES: Improvement = Improvement { mean: 3.5, least: 3.162, most: 3.870 };
/// Figure 2: writes 5 %, Zipf 0.9 to 0.99 (section 3.2).
pub(super) const BLOOM_BY_ZIPF: Improvement = Improvement { mean: 3.837, least: 3.367, most: 4.367 };
/// Queries that the filter sent to the target without success, in percent: always less (section 3.3).
pub(super) const BLOOM_NIL_PERCENT: f64 = 0.043;

/// Sentences of the report on auto-scaling of key-value stores (Raman, IIT Kanpur), because its curves are only in
/// figures. Its queries are GET and SET, 100,000 at a time.
pub(super) mod autoscaling {
    /// "Single redis instance, with no memory/cpu restriction".
    pub(in crate::reproduce) const QUERIES: &str =
        "on a linear scale we observe a linear relationship between the response time and the number of queries";
    /// "Single redis instance, compared with 6 Node cluster", without limits.
    pub(in crate::reproduce) const SIX_NODES: &str =
        "the cluster based system performs a bit better (though the effect is negligible)";
    /// "10^5 queries on different node configurations".
    pub(in crate::reproduce) const NODE_SWEEP: &str =
        "there is no direct correlation between the number of nodes and the response rate";
    /// "10^5 queries on redis instance, with varying CPU".
    pub(in crate::reproduce) const CPU_SWEEP: &str = "response time quadratically depends on the CPU period/quota";
    /// "10^5 queries on redis instance, with varying main memory".
    pub(in crate::reproduce) const MEMORY_SWEEP: &str = "increasing memory, linearly decrease the response time";
    /// "10^5 keys present, setup time for adding new node".
    pub(in crate::reproduce) const NODE_ADD: &str =
        "the startup time is inversely proportional to number of nodes in the cluster";
    /// "Varying queries and number of nodes", with 6 MB each.
    pub(in crate::reproduce) const THRESHOLD: &str =
        "we can see jumps in the case when memory the limit is reached in the cluster";
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reproduce::ways::WAYS;

    #[test]
    fn every_compared_cell_has_published_numbers() {
        let rows: Vec<Row> = WAYS.iter().filter_map(|way| way.published).collect();
        assert_eq!(rows, [Row::Source, Row::Rocksteady, Row::NetMigrate, Row::Fulva]);
        for row in rows {
            for writes in WRITES {
                for share in SHARES {
                    let numbers =
                        numbers(row, writes, Some(share)).unwrap_or_else(|| panic!("{row:?}, {writes} %, {share}"));
                    assert!(
                        numbers.throughput > 0.0 && numbers.p50_ms > 0.0 && numbers.p99_ms > numbers.p50_ms,
                        "{numbers:?}"
                    );
                }
            }
        }
        // These are in no table.
        assert_eq!(numbers(Row::Source, 5.0, Some(SHARES[0])), None);
        assert_eq!(numbers(Row::Source, 0.5, Some(SHARES[0])), None);
        assert_eq!(numbers(Row::Source, 0.0, None), None);
    }

    /// The text's statement about the tables holds for them here: 6.5 % to 416 % more than each other protocol
    /// (sections 6 and 6.5).
    #[test]
    fn the_tables_agree_with_the_text() {
        let mut gains = Vec::new();
        for row in [Row::Source, Row::Rocksteady, Row::Fulva] {
            for writes in WRITES {
                for share in SHARES {
                    let of = |row| numbers(row, writes, Some(share)).expect("a cell").throughput;
                    gains.push(100.0 * (of(Row::NetMigrate) / of(row) - 1.0));
                }
            }
        }
        let (least, most) =
            gains.iter().fold((f64::MAX, f64::MIN), |(least, most), gain| (least.min(*gain), most.max(*gain)));
        assert!((least - 6.5).abs() < 0.1 && (most - 416.0).abs() < 1.0, "{least} to {most}");
    }
}
