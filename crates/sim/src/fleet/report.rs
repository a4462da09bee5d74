//! Results of several seeds as text.

use super::record::{MEASURES, Run, three_digits};

/// Mean and range of a number over seeds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// Mean.
    pub mean: f64,
    /// Smallest value.
    pub least: f64,
    /// Greatest value.
    pub most: f64,
}

impl Spread {
    /// Computes the spread of these values; all are 0 without values.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let values: Vec<f64> = values.into_iter().collect();
        if values.is_empty() {
            return Self { mean: 0.0, least: 0.0, most: 0.0 };
        }
        Self {
            mean: values.iter().sum::<f64>() / values.len() as f64,
            least: values.iter().copied().fold(f64::INFINITY, f64::min),
            most: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        }
    }

    /// Formats the mean, and the range if values differ, with three digits.
    #[must_use]
    pub fn text(self) -> String {
        let (mean, least, most) = (three_digits(self.mean), three_digits(self.least), three_digits(self.most));
        if least == most { mean } else { format!("{mean} ({least} to {most})") }
    }
}

/// Points of a run that the text shows.
const POINTS: usize = 12;

/// Formats the reproducible results of all seeds: the measures, and the first seed over time. For comparison with a
/// stored text.
#[must_use]
pub fn golden(runs: &[Run]) -> String {
    let mut out = String::new();
    for measure in MEASURES {
        let spread = Spread::of(runs.iter().map(|run| (measure.of)(run)));
        out.push_str(&format!("{}: {}\n", measure.name, spread.text()));
    }
    out.push_str("\nat, s | served, requests/s | lost, % | hits, % | max/mean | nodes\n");
    let points = runs.first().map(|run| run.points.as_slice()).unwrap_or_default();
    for number in 0..POINTS.min(points.len()) {
        let point = points[number * points.len() / POINTS.min(points.len())];
        let cells = [point.served, 100.0 * point.lost, 100.0 * point.hits, point.max_over_mean, point.nodes];
        out.push_str(&format!("{:.1} | {}\n", point.at, cells.map(three_digits).join(" | ")));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_shown_if_values_differ() {
        let texts = [vec![2.0], vec![1.0, 2.0, 6.0], vec![1.0, 1.0001], vec![]].map(|values| Spread::of(values).text());
        assert_eq!(texts, ["2", "3 (1 to 6)", "1", "0"]);
    }
}
