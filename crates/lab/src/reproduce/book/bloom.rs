//! Rows of the Bloom telemetry paper: figures 1 and 2, and section 3.3.
//!
//! The figures show rates of lost queries; the text has only the ratio of the rates without and with the filter. Rates
//! without the filter are computed from the paper's keys, queries and shares: a read is lost if its key has neither
//! moved nor been written before. Keys are assumed to move at a constant rate, in an order that does not depend on their
//! popularity.
//!
//! Rows with dropped queries have no published value, although the ratios of the figures are known: the share of drops
//! was derived from these ratios, so agreement would show nothing.
//!
//! The durations of section 3.1 and 3.2 have no row, because the rate of our moves is a setting.

use serde_json::{Value, json};

use super::super::bloom::{
    Cell, DROPS_PERCENT, Measured, SAFE, Variant, WITH, WITHOUT, is_in_figure_1, is_in_figure_2, lost_percent,
};
use super::super::published::{BLOOM_BY_WRITES, BLOOM_BY_ZIPF, BLOOM_NIL_PERCENT, Improvement};
use super::{Better, Measure, Ours, Published, ResultSet, Row, Values, plain};

const UNEXPLAINED: &str = "The paper's filter misled less than 0.043 % of the queries; the other losses with it, which \
                           the text does not explain, do not occur here.";
const FEWER_KEYS: &str = "Here are a hundredth of the paper's keys and as many queries, so a write reaches a key \
                          earlier: the same computation gives 29 to 36 %.";
const FEWER_KEYS_BY_ZIPF: &str = "Here are a hundredth of the paper's keys and as many queries, so a write reaches a \
                                  key earlier: the same computation gives 22 to 29 %.";
const DERIVED: &str = "The paper mentions no dropped queries; the share was derived from its ratios, so agreement \
                       would show nothing.";

/// Computed losses without the filter, in percent: figure 1, by writes, and figure 2, by Zipf.
const WITHOUT_BY_WRITES: (f64, f64) = (38.0, 43.0);
const WITHOUT_BY_ZIPF: (f64, f64) = (30.0, 38.0);

pub(super) fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    rows.extend(figure(Figure {
        place: "Figure 1",
        cells: "Zipf 0.9, writes 1 to 5 %",
        ends: "Zipf 0.9, writes 1 and 5 %",
        is_in: is_in_figure_1,
        improvement: BLOOM_BY_WRITES,
        without: Published::implied(
            "38 to 43 % (computed from keys, queries and writes)",
            WITHOUT_BY_WRITES.0,
            WITHOUT_BY_WRITES.1,
        ),
        fewer_keys: FEWER_KEYS,
    }));
    rows.extend(figure(Figure {
        place: "Figure 2",
        cells: "writes 5 %, Zipf 0.9 to 0.99",
        ends: "writes 5 %, Zipf 0.9 and 0.99",
        is_in: is_in_figure_2,
        improvement: BLOOM_BY_ZIPF,
        without: Published::implied(
            "30 to 38 % (computed from keys, queries and Zipf)",
            WITHOUT_BY_ZIPF.0,
            WITHOUT_BY_ZIPF.1,
        ),
        fewer_keys: FEWER_KEYS_BY_ZIPF,
    }));
    for (variant, quantity) in [
        (WITH, "queries that found nothing with the filter"),
        (SAFE, "queries that found nothing with Switchyard's default protocol"),
    ] {
        rows.push(Row {
            place: "Section 3.3",
            quantity: quantity.to_owned(),
            published: Published::implied("with the filter, always less than 0.043 %", 0.0, BLOOM_NIL_PERCENT),
            ours: losses(variant, Better::Less, |_| true),
            reason: "",
        });
    }
    rows
}

/// One of the two figures.
struct Figure {
    place: &'static str,
    /// Points without dropped queries.
    cells: &'static str,
    /// Points with dropped queries.
    ends: &'static str,
    is_in: fn(&Cell) -> bool,
    improvement: Improvement,
    /// Losses without the filter.
    without: Published,
    fewer_keys: &'static str,
}

fn figure(figure: Figure) -> [Row; 3] {
    let Figure { place, cells, ends, is_in, improvement, without, fewer_keys } = figure;
    let [none, dropped] = DROPS_PERCENT;
    [
        Row {
            place,
            quantity: format!(
                "queries lost, no filter : filter; {cells}; a run without losses counts as one lost query"
            ),
            published: Published::range(improvement.least, improvement.most),
            ours: measured("", Better::More, move |set| ratios(set, |cell| is_in(cell) && cell.drops_percent == none)),
            reason: UNEXPLAINED,
        },
        Row {
            place,
            quantity: format!(
                "queries lost, no filter : filter; {ends}; {} % of the queries dropped in both variants",
                plain(dropped)
            ),
            published: Published::sentence("no ratio with dropped queries"),
            ours: measured("", Better::More, move |set| {
                ratios(set, |cell| is_in(cell) && cell.drops_percent == dropped)
            }),
            reason: DERIVED,
        },
        Row {
            place,
            quantity: format!("queries lost without the filter; {cells}"),
            published: without,
            ours: losses(WITHOUT, Better::Neither, is_in),
            reason: fewer_keys,
        },
    ]
}

fn measured(unit: &'static str, better: Better, values: impl Fn(&ResultSet) -> Vec<f64> + 'static) -> Ours {
    let values: Values = Box::new(values);
    let page = "results/migration-protocols.md#queries-lost-with-and-without-a-filter";
    Ours::Measured(Measure { experiment: "bloom", unit, better, page, values })
}

/// Percent of queries lost in the runs without dropped queries.
fn losses(variant: Variant, better: Better, is_in: fn(&Cell) -> bool) -> Ours {
    measured(" %", better, move |set| {
        let runs = runs(set, variant, |cell| is_in(cell) && cell.drops_percent == DROPS_PERCENT[0]);
        runs.iter().flatten().map(lost_percent).collect()
    })
}

/// Returns the ratio of losses without and with the filter, by cell and repetition.
fn ratios(set: &ResultSet, is_covered: impl Fn(&Cell) -> bool) -> Vec<f64> {
    let (without, with) = (runs(set, WITHOUT, &is_covered), runs(set, WITH, &is_covered));
    // Both variants have the same cells in the same order.
    let pairs = without.iter().zip(&with).flat_map(|(without, with)| without.iter().zip(with));
    pairs.map(|(without, with)| ratio(without, with)).collect()
}

/// Returns the ratio of losses, or a lower bound of it if the filter lost no query.
fn ratio(without: &Measured, with: &Measured) -> f64 {
    lost_percent(without) / lost_percent(with).max(100.0 / with.queries.max(1) as f64)
}

fn runs(set: &ResultSet, variant: Variant, is_covered: impl Fn(&Cell) -> bool) -> Vec<Vec<Measured>> {
    set.of(|what| what["flags"] == json!(variant.flags) && is_covered(&cell(what)))
}

/// Returns the cell of a run's settings.
fn cell(what: &Value) -> Cell {
    let of = |name: &str| what["cell"][name].as_f64().unwrap_or(f64::NAN);
    Cell { zipf: of("zipf"), writes_percent: of("writes_percent"), drops_percent: of("drops_percent") }
}

#[cfg(test)]
mod tests {
    use super::super::super::bloom::lost_without_filter;
    use super::super::super::kept::StoredResults;
    use super::*;

    #[test]
    fn computed_losses_follow_from_keys_queries_and_writes() {
        let of = |keys: u64, zipf: f64, writes_percent: f64| {
            let cell = Cell { zipf, writes_percent, drops_percent: 0.0 };
            lost_without_filter(keys, 750_000, &cell).round()
        };
        let paper = |zipf, writes_percent| of(50_000_000, zipf, writes_percent);
        assert_eq!((paper(0.9, 5.0), paper(0.9, 1.0)), WITHOUT_BY_WRITES);
        assert_eq!((paper(0.99, 5.0), paper(0.9, 5.0)), WITHOUT_BY_ZIPF);
        let here = [(0.99, 5.0), (0.9, 5.0), (0.9, 1.0)].map(|(zipf, writes)| of(500_000, zipf, writes));
        assert_eq!(here, [22.0, 29.0, 36.0]);
        assert!(FEWER_KEYS.contains("29 to 36 %") && FEWER_KEYS_BY_ZIPF.contains("22 to 29 %"));
    }

    #[test]
    fn ratios_pair_the_variants_of_a_cell_and_repetition() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut stored = StoredResults::open(folder.path(), "bloom", "this".to_owned()).expect("readable");
        let what = |cell: Cell, variant: Variant| json!({"cell": cell, "flags": variant.flags});
        let result = |lost: u64| {
            let other = ["stale", "errors", "wrong_after", "seconds", "before", "during", "p50_ms", "p99_ms"];
            let mut result = json!({"queries": 1000, "lost": lost, "longest_gap_ms": 0, "curve": []});
            other.iter().for_each(|name| result[name] = json!(0));
            result
        };
        let [first, second] = [1.0, 2.0].map(|writes_percent| Cell { zipf: 0.9, writes_percent, drops_percent: 0.0 });
        let dropped = Cell { drops_percent: DROPS_PERCENT[1], ..first };
        let runs = [
            (first, WITHOUT, [100, 200]),
            (first, WITH, [50, 20]),
            (second, WITHOUT, [300, 300]),
            (second, WITH, [0, 100]),
            (dropped, WITHOUT, [400, 400]),
            (dropped, WITH, [200, 100]),
        ];
        stored.plan(&runs.map(|(cell, variant, _)| what(cell, variant)), 2).expect("written");
        for (cell, variant, lost) in runs {
            for (round, lost) in (0..).zip(lost) {
                let date = "2026-01-01".to_owned();
                stored.add(&what(cell, variant), round, date, 0.0, &result(lost)).expect("written");
            }
        }
        let set = StoredResults::newest_complete(folder.path(), "bloom").expect("readable").expect("a set");
        let values: Vec<Vec<f64>> = rows()
            .iter()
            .map(|row| match &row.ours {
                Ours::Measured(measure) => (measure.values)(&set).iter().map(|value| value.round()).collect(),
                _ => Vec::new(),
            })
            .collect();
        assert_eq!(values[0], [2.0, 10.0, 300.0, 3.0]);
        assert_eq!(values[1], [2.0, 4.0]);
        assert_eq!(values[2], [10.0, 20.0, 30.0, 30.0]);
        assert_eq!(values[6], [5.0, 2.0, 0.0, 10.0]);
        // No run has 5 % writes, or the default protocol.
        assert!([3, 4, 5, 7].iter().all(|row| values[*row].is_empty()), "{values:?}");
    }
}
