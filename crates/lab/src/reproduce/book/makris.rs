//! Rows of Makris et al.: figures 1 and 3 to 8, and table I. Figure 2 has no measurements.
//!
//! Table I is of 20,000 GET/s in total, and the knee in figure 1 is at 20,000 GET/s, too. So our runs at the knee
//! compare with it. Runs at lower rates have rows of their own: the first node has less to gain there. Response times
//! above the knee are in no row, because a queue that grows before the move makes them a function of the run's duration;
//! the page has them. Shares of requests do not depend on the rate, so their rows cover all rates.
//!
//! The paper's printed algorithm differs from the one in its text. Each has a policy, and rows of the paper's policies
//! cover both.

use serde_json::Value;

use super::super::makris::{Measured, Node, POLICIES, RatePoint, change, change_of_mean, knee, share_of};
use super::{Better, Measure, Ours, Published, ResultSet, Row, Values};

const PAGE: &str = "results/planner.md#makris-et-al-reproduced";
/// The algorithm as printed, and as the text describes it.
const OF_PAPER: [&str; 2] = ["makris-printed", "makris-ffd"];
/// Policies that check whether a key fits.
const OF_SWITCHYARD: [&str; 2] = ["makris-safe", "switchyard"];

const ONE_IN_FLIGHT: &str = "A client has one request in flight, and times count from its plan, so a wait for the first \
                             node delays its requests to every node.";
const QUEUE: &str = "Most of the time at the knee is that of a queue that grows before the move; with 16 requests in \
                     flight, three servers reply to little more than one, so it shrinks slowly.";
const LOWER_RATE: &str = "The published values are of the rate at the knee only.";

/// Rates of a row, as shares of the knee.
#[derive(Clone, Copy)]
enum Rates {
    All,
    UpToKnee,
    AtKnee,
    BelowKnee,
}

impl Rates {
    fn contain(self, what: &Value) -> bool {
        what["of_knee"].as_f64().is_some_and(|share| match self {
            Self::All => true,
            Self::UpToKnee => share <= 1.0,
            Self::AtKnee => share == 1.0,
            Self::BelowKnee => share < 1.0,
        })
    }

    fn text(self) -> &'static str {
        match self {
            Self::All => "at all rates",
            Self::UpToKnee => "at rates up to the knee",
            Self::AtKnee => "at the knee",
            Self::BelowKnee => "at rates below the knee",
        }
    }
}

pub(super) fn rows() -> Vec<Row> {
    use Better::{Less, Neither};
    use Rates::{All, AtKnee, BelowKnee, UpToKnee};

    let most_after = || {
        let text = "42 % of the requested keys, 39 % of the load (computed from table I)";
        Published::implied(text, 39.0, 42.0)
    };
    let slowest = || Published::value(-33.0);
    let others = || Published::implied("1.33 to 1.38 (computed from table I), \"about 1.3 times\"", 1.33, 1.38);
    let mean = || Published::implied("-38 % (computed from table I)", -37.8, -37.5);
    let mut rows = figure_1();
    rows.extend([
        Row {
            place: "Figures 3, 4",
            quantity: format!("the first node's share of the requests before the move, {}", All.text()),
            published: Published::value(98.0),
            ours: measured(" %", Neither, &POLICIES, All, |run| vec![share_of(&run.before, 0)]),
            reason: "",
        },
        Row {
            place: "Figure 5",
            quantity: format!("response time before the move, first node : each other node, {}", AtKnee.text()),
            published: Published::implied("2.28 to 2.41 (computed from table I)", 2.28, 2.41),
            ours: measured("", Neither, &POLICIES, AtKnee, |run| {
                run.before[1..].iter().map(|node| run.before[0].answer_us / node.answer_us).collect()
            }),
            reason: ONE_IN_FLIGHT,
        },
        of_policies("Figures 6, 7", "the most loaded node's share of the requests after the move", most_after(), "")
            .measured(" %", Less, &OF_PAPER, All, most_share_after),
        of_policies("Figures 6, 7", "the most loaded node's share of the requests after the move", most_after(), "")
            .measured(" %", Less, &OF_SWITCHYARD, All, most_share_after),
        of_policies("Figure 7", "change of the first node's load", Published::value(-60.0), "").measured(
            " %",
            Less,
            &OF_PAPER,
            UpToKnee,
            |run| vec![(run.after[0].requests / run.before[0].requests - 1.0) * 100.0],
        ),
        of_policies(
            "Figure 7",
            "load of each other node, after the move : before",
            Published::implied("\"about 32 times\"; 30 to 32 (computed from table I)", 30.0, 32.0),
            "With exponent 1, the last two of the twenty keys have 1.4 % of the requests each instead of 1 %.",
        )
        .measured("", Neither, &OF_PAPER, UpToKnee, |run| of_others(run, |node| node.requests)),
    ]);
    let groups: [(&'static [&'static str], Rates, &'static str); 3] =
        [(&OF_PAPER, AtKnee, QUEUE), (&OF_PAPER, BelowKnee, LOWER_RATE), (&OF_SWITCHYARD, AtKnee, QUEUE)];
    for (policies, rates, reason) in groups {
        let quantity = "change of the slowest node's response time";
        rows.push(
            of_policies("Figure 8", quantity, slowest(), reason)
                .measured(" %", Less, policies, rates, |run| vec![change(run)]),
        );
    }
    for (policies, rates, _) in groups {
        let quantity = "response time of each other node, after the move : before";
        rows.push(of_policies("Figure 8", quantity, others(), ONE_IN_FLIGHT).measured(
            "",
            Less,
            policies,
            rates,
            |run| of_others(run, |node| node.answer_us),
        ));
    }
    rows.push(
        of_policies(
            "Figure 8",
            "response time after the move, slowest node : fastest node",
            Published::implied("1.17 (computed from table I), \"uniform across the nodes\"", 1.17, 1.17),
            ONE_IN_FLIGHT,
        )
        .measured("", Less, &OF_PAPER, AtKnee, |run| {
            let times = run.after.iter().map(|node| node.answer_us);
            vec![times.clone().fold(0.0, f64::max) / times.fold(f64::INFINITY, f64::min)]
        }),
    );
    for (policies, rates, reason) in groups {
        let quantity = "change of the mean response time of all requests";
        rows.push(
            of_policies("Table I", quantity, mean(), reason)
                .measured(" %", Less, policies, rates, |run| vec![change_of_mean(run)]),
        );
    }
    rows
}

/// Rows of the mean response time by the rate. The paper's text has the knee only.
fn figure_1() -> Vec<Row> {
    let ours = |unit: &'static str, of: fn(&[RatePoint]) -> Option<f64>| {
        let values: Values = Box::new(move |set: &ResultSet| {
            set.of::<Vec<RatePoint>>(|_| true).iter().flatten().filter_map(|run| of(run)).collect()
        });
        Ours::Measured(Measure { experiment: "makris-rates", unit, better: Better::Neither, page: PAGE, values })
    };
    vec![
        Row {
            place: "Figure 1",
            quantity: "knee: the greatest rate that one server sustains".to_owned(),
            published: Published::sentence("20,000 GET/s, with an exponential increase of the time above it"),
            ours: ours(" GET/s", knee),
            reason: "The rate is a property of the machine; each server has only a part of a processor here.",
        },
        Row {
            place: "Figure 1",
            quantity: "mean response time, at the knee : at half of it".to_owned(),
            published: Published::not_in_text(),
            ours: ours("", rise),
            reason: "Only a curve shows the published times.",
        },
    ]
}

/// Returns the ratio of the mean response times at the knee and at the greatest rate up to half of it.
fn rise(points: &[RatePoint]) -> Option<f64> {
    let knee = knee(points)?;
    let at = points.iter().find(|point| point.offered == knee)?;
    let half = points.iter().rfind(|point| point.offered <= knee / 2.0)?;
    Some(at.mean_ms / half.mean_ms)
}

/// Row of some policies, without its measure.
struct OfPolicies {
    place: &'static str,
    quantity: &'static str,
    published: Published,
    reason: &'static str,
}

fn of_policies(place: &'static str, quantity: &'static str, published: Published, reason: &'static str) -> OfPolicies {
    OfPolicies { place, quantity, published, reason }
}

impl OfPolicies {
    fn measured(
        self,
        unit: &'static str,
        better: Better,
        policies: &'static [&'static str],
        rates: Rates,
        of: fn(&Measured) -> Vec<f64>,
    ) -> Row {
        let Self { place, quantity, published, reason } = self;
        let quantity = format!("{quantity}, {} ({})", rates.text(), policies.join(", "));
        Row { place, quantity, published, ours: measured(unit, better, policies, rates, of), reason }
    }
}

fn measured(
    unit: &'static str,
    better: Better,
    policies: &'static [&'static str],
    rates: Rates,
    of: fn(&Measured) -> Vec<f64>,
) -> Ours {
    let values: Values = Box::new(move |set: &ResultSet| {
        let is_wanted = |what: &Value| policies.iter().any(|policy| what["policy"] == *policy) && rates.contain(what);
        set.of::<Measured>(is_wanted).iter().flatten().flat_map(of).collect()
    });
    Ours::Measured(Measure { experiment: "makris", unit, better, page: PAGE, values })
}

fn most_share_after(run: &Measured) -> Vec<f64> {
    vec![(0..run.after.len()).map(|node| share_of(&run.after, node)).fold(0.0, f64::max)]
}

/// Returns the ratio of a value after and before the move, for each node but the first.
fn of_others(run: &Measured, value: fn(&Node) -> f64) -> Vec<f64> {
    run.before.iter().zip(&run.after).skip(1).map(|(before, after)| value(after) / value(before)).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::super::kept::StoredResults;
    use super::super::super::makris::PUBLISHED;
    use super::super::super::spread::Spread;
    use super::super::{Verdict, compare};
    use super::*;

    /// Requests of table I before and after: GET/s, and percent of the keys.
    const LOADS: [[f64; 3]; 2] = [[19_600.0, 200.0, 200.0], [7900.0, 6400.0, 6000.0]];
    const KEYS: [[f64; 3]; 2] = [[98.0, 1.0, 1.0], [42.0, 30.0, 28.0]];

    #[test]
    fn published_values_follow_from_table_1() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut stored = StoredResults::open(folder.path(), "makris", "paper".to_owned()).expect("readable");
        let rates = [0.9, 1.0];
        let whats: Vec<Value> = rates
            .iter()
            .flat_map(|rate| POLICIES.map(|policy| json!({"policy": policy, "of_knee": rate})))
            .chain([json!({"policy": "makris-ffd", "of_knee": 1.1})])
            .collect();
        stored.plan(&whats, 2).expect("written");
        for what in &whats {
            for (round, requests) in (0..).zip([LOADS, KEYS]) {
                // Response times above the knee are in no row.
                let factor = if what["of_knee"] == 1.1 { 9.0 } else { 1.0 };
                let phase = |phase: usize| -> Value {
                    let nodes = requests[phase].iter().zip(&PUBLISHED[phase]).enumerate();
                    nodes
                        .map(|(node, (requests, (_, seconds)))| {
                            let slowed = if phase == 0 && node == 0 { factor } else { 1.0 };
                            json!({"requests": requests, "answer_us": seconds * 1e6 * slowed})
                        })
                        .collect()
                };
                let result = json!({"before": phase(0), "after": phase(1), "moved": 5, "errors": 0});
                stored.add(what, round, "2017-01-01".to_owned(), 0.0, &result).expect("written");
            }
        }
        let set = StoredResults::newest_complete(folder.path(), "makris").expect("readable").expect("a set");
        let rows = rows();
        let of_table = rows.iter().filter_map(|row| match &row.ours {
            Ours::Measured(measure) if measure.experiment == "makris" => Some((row, measure)),
            _ => None,
        });
        for (row, measure) in of_table {
            let spread = Spread::of((measure.values)(&set)).expect("values");
            let (least, most) = row.published.range.expect("a number");
            let (place, quantity) = (row.place, &row.quantity);
            // The shares of loads and of keys are not the same after the move.
            let is_near = |one: f64, other: f64| (one - other).abs() <= 0.08 * other.abs();
            assert!(is_near(spread.least, least) && is_near(spread.most, most), "{place}, {quantity}: {spread:?}");
            assert_eq!(compare(row.published.range, spread, measure.unit, measure.better), Verdict::Reproduced);
        }
    }

    #[test]
    fn the_rise_is_that_from_half_the_knee_to_the_knee() {
        let points: Vec<RatePoint> = [(40.0, 40.0, 1.0), (50.0, 50.0, 2.0), (100.0, 99.0, 7.0), (110.0, 100.0, 90.0)]
            .map(|(offered, achieved, mean_ms)| RatePoint { offered, achieved, mean_ms })
            .into();
        assert_eq!(rise(&points), Some(3.5));
        assert_eq!(rise(&points[2..]), None);
    }
}
