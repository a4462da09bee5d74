//! The reproduction book: a row for each table and figure with measurements in the five papers, with the published
//! value, ours, and a verdict. `docs/reproduction.md` has its tables between marks.
//!
//! The book is computed from kept results only, so that a test can compare the document with them. Measurements and
//! pages of single experiments do not depend on it. Hand-written verdicts were rejected, because they become wrong with
//! the next measurement.
//!
//! A verdict never mixes machines: each row uses one complete set of its experiment, which one build measured on one
//! machine.

mod bloom;
mod makris;
mod netmigrate;
mod report;
mod switchkv;

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use anyhow::{Context as _, Result};
use switchyard_bench::table::Table;

use super::kept::{ResultSet, StoredResults};
use super::plain;
use super::spread::Spread;
use crate::document::replace_between_marks;

/// Mark of the book's tables in the document.
const MARK: &str = "reproduction";
/// Columns of a row, without the columns of its origin.
const HEAD: [&str; 6] = ["place", "quantity", "published", "here", "verdict", "reason"];
/// Maximum distance of a reproduced value from the published range, as a share of the published effect.
const TOLERANCE: f64 = 0.25;
/// Minimum tolerance, relative to the published value.
const TOLERANCE_LEAST: f64 = 0.05;

/// A paper, or the report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Paper {
    /// Bloom telemetry.
    Bloom,
    /// NetMigrate (FAST 2024).
    Netmigrate,
    /// Makris et al.
    Makris,
    /// SwitchKV (NSDI 2016).
    Switchkv,
    /// The report on auto-scaling (Raman, IIT Kanpur).
    Report,
}

impl Paper {
    const ALL: [Self; 5] = [Self::Bloom, Self::Netmigrate, Self::Makris, Self::Switchkv, Self::Report];

    fn title(self) -> &'static str {
        match self {
            Self::Bloom => "Bloom telemetry",
            Self::Netmigrate => "NetMigrate (FAST 2024)",
            Self::Makris => "Makris et al., an exceptions directory",
            Self::Switchkv => "SwitchKV (NSDI 2016)",
            Self::Report => "Auto-scaling of key-value stores (Raman, IIT Kanpur)",
        }
    }

    fn rows(self) -> Vec<Row> {
        match self {
            Self::Bloom => bloom::rows(),
            Self::Netmigrate => netmigrate::rows(),
            Self::Makris => makris::rows(),
            Self::Switchkv => switchkv::rows(),
            Self::Report => report::rows(),
        }
    }
}

/// One table, figure or sentence of a paper.
struct Row {
    /// Place in the paper: "Table 5", "Figure 1", "Section 6.2".
    place: &'static str,
    /// The compared quantity.
    quantity: String,
    published: Published,
    ours: Ours,
    /// The reason for the difference, in one sentence; empty for reproduced and missing rows.
    reason: &'static str,
}

impl Row {
    /// Cells of [`HEAD`].
    fn cells(&self, judged: &Judged) -> [String; HEAD.len()] {
        let published = match (self.published.text, self.published.range) {
            (Some(text), _) => text.to_owned(),
            (None, Some((least, most))) => {
                let unit = if let Ours::Measured(measure) = &self.ours { measure.unit } else { "" };
                if least == most {
                    number(least, unit)
                } else {
                    format!("{} to {}", number(least, unit), number(most, unit))
                }
            }
            (None, None) => String::new(),
        };
        let reason = match self.ours {
            Ours::NotPossible(reason) => reason,
            _ if matches!(judged.verdict, Verdict::Missing | Verdict::Reproduced) => "",
            _ => self.reason,
        };
        let texts = [self.place, &self.quantity, &published, &judged.here, &judged.verdict.to_string(), reason];
        texts.map(str::to_owned)
    }
}

fn row(
    place: &'static str,
    quantity: impl Into<String>,
    published: Published,
    ours: Ours,
    reason: &'static str,
) -> Row {
    Row { place, quantity: quantity.into(), published, ours, reason }
}

/// The published value.
struct Published {
    /// Text of the table, if it is not the range itself.
    text: Option<&'static str>,
    /// The least and the greatest published value, or the values that a sentence implies.
    range: Option<(f64, f64)>,
}

impl Published {
    /// A value of the paper's text or tables.
    const fn value(value: f64) -> Self {
        Self::range(value, value)
    }

    /// Several values of the paper's text or tables: the least and the greatest.
    const fn range(least: f64, most: f64) -> Self {
        Self { text: None, range: Some((least, most)) }
    }

    /// A sentence of the paper, or a value computed from its parameters, and the range that it implies.
    const fn implied(text: &'static str, least: f64, most: f64) -> Self {
        Self { text: Some(text), range: Some((least, most)) }
    }

    /// A sentence of the paper that implies no number.
    const fn sentence(text: &'static str) -> Self {
        Self { text: Some(text), range: None }
    }

    /// A value that only a curve shows. Nothing is read off curves.
    const fn not_in_text() -> Self {
        Self { text: Some("not in the text"), range: None }
    }
}

/// Our value.
enum Ours {
    Measured(Measure),
    /// The experiment cannot run on the test machine, for this reason.
    NotPossible(&'static str),
}

/// Computation of a row's values.
struct Measure {
    /// Name of the experiment, and of its file of results.
    experiment: &'static str,
    /// Suffix of the values: "" for a ratio, " %", " s".
    unit: &'static str,
    better: Better,
    /// Page with the full table, relative to the document.
    page: &'static str,
    /// Returns a value for each repetition, and for each cell that the row covers. Empty without such results.
    values: Values,
}

type Values = Box<dyn Fn(&ResultSet) -> Vec<f64>>;

/// The direction in which a value is better than the published one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Better {
    More,
    Less,
    /// The value is a property, not a goal.
    Neither,
}

/// Comparison of our values with the published range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Reproduced,
    Better,
    Differs,
    NotPossible,
    /// The paper has no number.
    NoComparison,
    Missing,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Reproduced => "reproduced",
            Self::Better => "better",
            Self::Differs => "differs",
            Self::NotPossible => "not possible here",
            Self::NoComparison => "no published number",
            Self::Missing => "missing",
        })
    }
}

/// Compares our range with the published one.
///
/// Ours reproduces it if both ranges touch. The published range is first widened by a quarter of its effect, and by 5 %
/// of the value at least. The effect is the distance of a ratio from 1, and the value itself with a unit. Other machines,
/// servers and clients move the published effects by so much without another cause.
fn compare(published: Option<(f64, f64)>, ours: Spread, unit: &str, better: Better) -> Verdict {
    let Some((least, most)) = published else { return Verdict::NoComparison };
    let widened_by = |value: f64| {
        let effect = if unit.is_empty() { (value - 1.0).abs() } else { value.abs() };
        (TOLERANCE * effect).max(TOLERANCE_LEAST * value.abs())
    };
    let (from, to) = (least - widened_by(least), most + widened_by(most));
    if ours.least <= to && ours.most >= from {
        return Verdict::Reproduced;
    }
    let is_more = ours.least > to;
    match better {
        Better::More if is_more => Verdict::Better,
        Better::Less if !is_more => Verdict::Better,
        _ => Verdict::Differs,
    }
}

/// Three significant digits, and the unit.
fn number(value: f64, unit: &str) -> String {
    if value == 0.0 || !value.is_finite() {
        return format!("{value}{unit}");
    }
    let digits = (2 - value.abs().log10().floor() as i32).clamp(0, 9) as usize;
    let rounded: f64 = format!("{value:.digits$}").parse().unwrap_or(value);
    format!("{}{unit}", if digits == 9 { format!("{value:.2e}") } else { plain(rounded) })
}

/// Complete sets of results, by experiment.
struct Results {
    sets: BTreeMap<&'static str, Option<ResultSet>>,
}

/// A row with its value and verdict.
struct Judged {
    verdict: Verdict,
    /// Text of our value.
    here: String,
}

impl Results {
    fn read(folder: &Path, rows: &[(Paper, Vec<Row>)]) -> Result<Self> {
        let mut sets = BTreeMap::new();
        for row in rows.iter().flat_map(|(_, rows)| rows) {
            if let Ours::Measured(Measure { experiment, .. }) = row.ours
                && !sets.contains_key(experiment)
            {
                sets.insert(experiment, StoredResults::newest_complete(folder, experiment)?);
            }
        }
        Ok(Self { sets })
    }

    fn of<'a>(&'a self, row: &'a Row) -> Option<(&'a Measure, &'a ResultSet)> {
        let Ours::Measured(measure) = &row.ours else { return None };
        Some((measure, self.sets.get(measure.experiment)?.as_ref()?))
    }

    fn judge(&self, row: &Row) -> Judged {
        if let Ours::NotPossible(_) = row.ours {
            return Judged { verdict: Verdict::NotPossible, here: String::new() };
        }
        let measured = self.of(row).and_then(|(measure, set)| {
            let values = (measure.values)(set).into_iter().filter(|value| value.is_finite());
            Some((measure, Spread::of(values)?))
        });
        let Some((measure, spread)) = measured else {
            return Judged { verdict: Verdict::Missing, here: String::new() };
        };
        Judged {
            verdict: compare(row.published.range, spread, measure.unit, measure.better),
            here: spread.text(|value| number(value, measure.unit)),
        }
    }
}

/// Returns the book's tables, from the results in this folder.
///
/// # Errors
/// If a file of results cannot be read.
pub(super) fn text(folder: &Path) -> Result<String> {
    let papers: Vec<(Paper, Vec<Row>)> = Paper::ALL.into_iter().map(|paper| (paper, paper.rows())).collect();
    let results = Results::read(folder, &papers)?;
    let mut origins: Vec<String> = Vec::new();
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    let mut parts = Vec::new();
    for (paper, rows) in &papers {
        let mut table = Table::of_text(HEAD.into_iter().chain(["by", "full table"]));
        for row in rows {
            let judged = results.judge(row);
            *counts.entry(judged.verdict.to_string()).or_default() += 1;
            let (mut by, mut page) = (String::new(), String::new());
            if let Some((measure, set)) = results.of(row).filter(|_| judged.verdict != Verdict::Missing) {
                let origin = set.origin();
                let at = origins.iter().position(|known| *known == origin).unwrap_or_else(|| {
                    origins.push(origin);
                    origins.len() - 1
                });
                by = format!("[{}]", at + 1);
                page = format!("[{}]({})", measure.experiment, measure.page);
            }
            table.row(row.cells(&judged).into_iter().chain([by, page]));
        }
        parts.push(format!("### {}\n\n{}", paper.title(), table.to_markdown()));
    }
    let counts: Vec<String> = counts.iter().map(|(verdict, count)| format!("{count} {verdict}")).collect();
    parts.insert(
        0,
        format!("{} rows: {}.\n", papers.iter().map(|(_, rows)| rows.len()).sum::<usize>(), counts.join(", ")),
    );
    if !origins.is_empty() {
        let lines: String =
            origins.iter().enumerate().map(|(at, origin)| format!("- [{}]: {origin}\n", at + 1)).collect();
        parts.push(format!("### Machines and builds\n\n{lines}"));
    }
    Ok(parts.join("\n"))
}

/// Returns the rows of one paper, from the results in this folder.
///
/// # Errors
/// If a file of results cannot be read.
pub(super) fn compared(folder: &Path, paper: Paper) -> Result<Table> {
    let papers = [(paper, paper.rows())];
    let results = Results::read(folder, &papers)?;
    let mut table = Table::of_text(HEAD);
    for row in papers.iter().flat_map(|(_, rows)| rows) {
        table.row(row.cells(&results.judge(row)));
    }
    Ok(table)
}

/// Rewrites the book's tables in the document.
///
/// # Errors
/// If a file cannot be read or written, or the document has no marks.
pub(super) fn write(folder: &Path, document: &Path) -> Result<()> {
    let old = std::fs::read_to_string(document)
        .with_context(|| format!("cannot read {}; run this in the root of the repository", document.display()))?;
    let new = replace_between_marks(&old, MARK, &text(folder)?)
        .with_context(|| format!("cannot rewrite {}", document.display()))?;
    std::fs::write(document, new).with_context(|| format!("cannot write {}", document.display()))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn root() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
    }

    fn spread(least: f64, most: f64) -> Spread {
        Spread::of([least, most]).expect("two values")
    }

    #[test]
    fn the_document_has_the_tables_of_kept_results() {
        let document = std::fs::read_to_string(root().join("docs/reproduction.md")).expect("the book");
        let tables = text(&root().join("docs/results/data")).expect("results");
        let expected = replace_between_marks(&document, MARK, &tables).expect("marks");
        assert!(document == expected, "docs/reproduction.md is stale: run `switchyard-lab reproduce all --book-only`");
    }

    #[test]
    fn rows_with_another_verdict_than_reproduced_have_a_reason() {
        let papers: Vec<_> = Paper::ALL.into_iter().map(|paper| (paper, paper.rows())).collect();
        let results = Results::read(&root().join("docs/results/data"), &papers).expect("results");
        for (paper, row) in papers.iter().flat_map(|(paper, rows)| rows.iter().map(move |row| (paper, row))) {
            let verdict = results.judge(row).verdict;
            let needs_one = matches!(verdict, Verdict::Better | Verdict::Differs | Verdict::NoComparison);
            assert!(!needs_one || !row.reason.is_empty(), "{paper:?}, {}, {}: {verdict}", row.place, row.quantity);
        }
    }

    #[test]
    fn rows_are_unique_and_cover_every_paper() {
        for paper in Paper::ALL {
            let rows = paper.rows();
            let names: std::collections::BTreeSet<_> = rows.iter().map(|row| (row.place, &row.quantity)).collect();
            assert_eq!(names.len(), rows.len(), "{paper:?}");
            assert!(rows.len() >= 3, "{paper:?}");
        }
    }

    #[test]
    fn ranges_that_touch_are_reproduced() {
        let of = |ours, better| compare(Some((1.2, 1.4)), ours, "", better);
        assert_eq!(of(spread(1.3, 1.35), Better::More), Verdict::Reproduced);
        // Widened by a quarter of 0.4, and by 0.06, which is 5 % of 1.2.
        assert_eq!(of(spread(1.49, 1.6), Better::More), Verdict::Reproduced);
        assert_eq!(of(spread(1.0, 1.15), Better::More), Verdict::Reproduced);
        assert_eq!(of(spread(1.51, 1.6), Better::More), Verdict::Better);
        assert_eq!(of(spread(1.51, 1.6), Better::Less), Verdict::Differs);
        assert_eq!(of(spread(1.51, 1.6), Better::Neither), Verdict::Differs);
        assert_eq!(of(spread(1.0, 1.13), Better::Less), Verdict::Better);
        assert_eq!(compare(None, spread(1.0, 1.0), "", Better::More), Verdict::NoComparison);
    }

    #[test]
    fn percents_are_compared_by_their_size() {
        assert_eq!(compare(Some((-40.0, -40.0)), spread(-31.0, -20.0), " %", Better::Less), Verdict::Reproduced);
        assert_eq!(compare(Some((-40.0, -40.0)), spread(-29.0, -20.0), " %", Better::Less), Verdict::Differs);
        assert_eq!(compare(Some((-40.0, -40.0)), spread(-90.0, -80.0), " %", Better::Less), Verdict::Better);
    }

    #[test]
    fn numbers_have_three_significant_digits() {
        let texts = [1.0, 1.2345, 0.012_345, 12_345.0, 0.0].map(|value| number(value, ""));
        assert_eq!(texts, ["1", "1.23", "0.0123", "12345", "0"]);
        assert_eq!(number(3.11e-12, " %"), "3.11e-12 %");
    }
}
