//! Median and range of a number that was measured several times.

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) least: f64,
    pub(crate) most: f64,
    several: bool,
}

impl Spread {
    /// Returns `None` without values.
    pub(crate) fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let (least, most) = (*values.first()?, *values.last()?);
        let middle = values.len() / 2;
        let median =
            if values.len() % 2 == 1 { values[middle] } else { f64::midpoint(values[middle - 1], values[middle]) };
        Some(Self { median, least, most, several: values.len() > 1 })
    }

    /// Formats the median, and of several values also the range.
    pub(crate) fn text(self, show: impl Fn(f64) -> String) -> String {
        let (median, least, most) = (show(self.median), show(self.least), show(self.most));
        if self.several && (least != median || most != median) {
            format!("{median} ({least} to {most})")
        } else {
            median
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_and_range_are_shown() {
        assert_eq!(Spread::of([]), None);
        let whole = |value: f64| format!("{value:.0}");
        assert_eq!(Spread::of([3.0]).expect("one").text(whole), "3");
        assert_eq!(Spread::of([9.0, 1.0, 3.0]).expect("three").text(whole), "3 (1 to 9)");
        assert_eq!(Spread::of([3.1, 3.2]).expect("two").text(whole), "3");
        assert_eq!(Spread::of([1.0, 3.0]).expect("two").median, 2.0);
    }
}
